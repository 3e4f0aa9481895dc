"""The arithmetic of the table, on numbers small enough to do by hand."""

from types import SimpleNamespace

import pytest

from torchtitan_ext.bench.summary import summarise
from torchtitan_ext.bench.turns import Measured, rotation
from torchtitan_ext.titan.bench import Setup


def measured(label: str, seconds: list[float], **changes: float) -> Measured:
    """A model whose turns take ``seconds``, a quarter of it forward and the rest backward."""
    setup = {
        "device": "abacus",
        "peak_flops": 1000.0,
        "parameters": 10,
        "flops_per_token": 6,
        "tokens_per_step": 20,
        "compile_seconds": None,
        "graphs": None,
        "saved_bytes": 100,
        "peak_bytes": 400,
        **changes,
    }
    turns = [{"forward": one / 4, "backward": one * 3 / 4} for one in seconds]
    return Measured(SimpleNamespace(label=label), Setup(**setup), turns)  # type: ignore[arg-type]


def test_ratios_are_taken_within_a_turn() -> None:
    """On a machine that gets three times slower, a model that is always 20% slower is found to be just that."""
    standard = measured("standard", [1.0, 2.0, 3.0])
    other = measured("other", [1.25, 2.5, 3.75])
    _, row = summarise([standard, other], steps=5, ranks=1)
    assert row.speed is not None
    assert row.speed.ratio == pytest.approx((0.8, 0.8, 0.8))


def test_quartiles_of_the_ratios() -> None:
    standard = measured("standard", [1.0] * 5)
    other = measured("other", [1 / 0.7, 1 / 1.1, 1 / 0.8, 1 / 1.0, 1 / 0.9])
    _, row = summarise([standard, other], steps=1, ranks=1)
    assert row.speed is not None
    # Of 0.7 0.8 0.9 1.0 1.1 the second, third and fourth.
    assert row.speed.ratio == pytest.approx((0.8, 0.9, 1.0))


def test_speed_step_and_mfu() -> None:
    standard = measured("standard", [2.0, 4.0, 8.0])
    other = measured("other", [4.0, 4.0, 4.0], flops_per_token=9, peak_flops=1.0)
    rows = summarise([standard, other], steps=10, ranks=2)
    speeds = [row.speed for row in rows]
    assert speeds[0] is not None
    assert speeds[1] is not None
    # 10 steps of 20 tokens in 4 seconds, the median turn.
    assert speeds[0].tokens_per_second == pytest.approx(50)
    assert speeds[0].step_seconds == pytest.approx(0.4)
    assert speeds[0].parts == pytest.approx({"forward": 0.1, "backward": 0.3})
    # 50 tokens/s x 6 FLOPs on two devices of 1000 FLOP/s each; the other model against the same peak.
    assert speeds[0].mfu == pytest.approx(0.15)
    assert speeds[1].mfu == pytest.approx(0.225)


def test_memory_is_compared_with_the_first_model() -> None:
    standard = measured("standard", [])
    other = measured("other", [], saved_bytes=103, peak_bytes=500)
    rows = summarise([standard, other], steps=1, ranks=1)
    assert [row.speed for row in rows] == [None, None], "nothing was timed"
    assert [row.saved_ratio for row in rows] == [1.0, pytest.approx(1.03)]
    assert [row.peak_ratio for row in rows] == [1.0, pytest.approx(1.25)]


def test_every_model_comes_first_equally_often() -> None:
    orders = [rotation(3, turn) for turn in range(3)]
    assert sorted(order[0] for order in orders) == [0, 1, 2]
    assert all(sorted(order) == [0, 1, 2] for order in orders)
