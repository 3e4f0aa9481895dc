"""The picture of the loss by position: what sets its scale."""

from typing import Any

import numpy as np
import pytest

from eval.evaluate.report import picture
from eval.evaluate.scale import far_out


def results(first_tokens: int, first_difference: float) -> dict[str, Any]:
    """Bins that double, as of 194 windows of 512 tokens; only the first token of the split has nothing before it."""
    starts = [0, 1, 2, 3, 5, 9, 17, 33, 65, 129, 257]
    stops = [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
    bins = []
    for number, (start, stop) in enumerate(zip(starts, stops, strict=True)):
        tokens, difference = 194 * (stop - start + 1), -0.01 - 0.002 * number
        if number == 0:
            tokens, difference = first_tokens, first_difference
        loss = 5.7 - 0.05 * number + (difference if number == 0 else 0)
        bins.append({"start": start, "stop": stop, "tokens": tokens, "loss": loss, "difference": difference})
    about = {"variant": "m_gate_kv", "step": 300, "baseline": {"variant": "standard", "step": 300}, "comparison": {}}
    return {**about, "by_context": bins, "by_document_position": bins}


def test_a_bin_of_one_token_does_not_set_the_scale() -> None:
    figure = picture(results(1, -3.2))
    for axes in figure.axes[2:]:
        low, high = axes.get_ylim()
        assert low < -0.03 < 0 < high, "differences of -0.012 to -0.03, and the line at 0"
        assert high - low < 0.04
        assert [text.get_text() for text in axes.texts] == ["↓ -3.2 (1 token)"]
    for axes in figure.axes[:2]:
        low, high = axes.get_ylim()
        assert high - low < 1


def test_a_bin_of_many_tokens_is_on_the_scale_however_far_out() -> None:
    for axes in picture(results(5000, -3.2)).axes[2:]:
        assert axes.get_ylim()[0] < -3.2
        assert not axes.texts


def test_values_near_the_others_are_on_the_scale_however_few_their_tokens() -> None:
    values = [0.1, 0.2, 0.3, 0.4, 0.5]
    assert not far_out(values, [1] * 5).any()
    # Quartiles 0.2 and 0.4: the fences are at -0.4 and 1.0.
    assert far_out([0.1, 0.2, 0.3, 0.4, 1.01], [1] * 5).tolist() == [False] * 4 + [True]
    assert not far_out([0.1, 0.2, 0.3, 0.4, 1.01], [1000] * 5).any()
    assert not far_out([0.1, 0.2, 0.3, 0.4, 0.99], [1] * 5).any()
    assert not far_out([2.0], [1]).any()


@pytest.mark.parametrize("difference", [0.0])
def test_equal_curves_are_drawn(difference: float) -> None:
    """A model against itself: all differences are 0."""
    content = results(1, difference)
    for row in content["by_context"]:
        row["difference"] = difference
    low, high = picture(content).axes[2].get_ylim()
    assert low < 0 < high
    assert np.isfinite([low, high]).all()
