"""Run folders of the first version: what their models are today, and which of them were trained wrongly."""

from typing import Any

import pytest

from torchtitan_ext.depth.registry import VARIANTS, variant_of
from torchtitan_ext.errors import UserError
from torchtitan_ext.older import check_trained_right, upgraded


def facts(variant: str = "standard", *, tied: bool = True, rows: int = 512, **options: Any) -> dict[str, Any]:
    model = {"layers": 4, "vocab_size": rows, "tied": tied, "variant": variant}
    model |= {f"depth.{name}": value for name, value in options.items()}
    return {"format": 1, "identity": {"model": model, "seed": 0}}


def depth_options(content: dict[str, Any]) -> dict[str, Any]:
    model = content["identity"]["model"]
    return {key.removeprefix("depth."): value for key, value in model.items() if key.startswith("depth.")}


@pytest.mark.parametrize("variant", ["attnres_block", "control_block", "moda", "value_residual", "residual_scalars"])
def test_what_a_variant_was_is_an_option_of_what_it_is(variant: str) -> None:
    options = depth_options(upgraded(facts(variant)))
    assert options
    was = variant_of(variant).with_options(options, lambda key: key)
    assert was != VARIANTS[variant]


def test_options_that_were_given_stay() -> None:
    assert depth_options(upgraded(facts("attnres_block", blocks=4))) == {"blocks": 4, "query_scale": "inverse_sqrt"}
    assert depth_options(upgraded(facts("moda", post_norm=True))) == {"norm": "reordered", "rotated_keys": True}
    assert depth_options(upgraded(facts("moda", post_norm=False))) == {"norm": "pre", "rotated_keys": True}
    assert upgraded(facts("standard")) == facts("standard")
    now = {**facts("attnres_block"), "format": 2}
    assert upgraded(now) == now


@pytest.mark.parametrize(
    ("content", "ranks", "groups", "right"),
    [
        (facts(), (1, 2, 4), 1, True),
        (facts(), (2, 3), 1, False),
        (facts(), (6,), 3, True),  # three groups of two processes
        (facts(), (6,), 2, False),
        (facts(tied=False), (3,), 1, True),
        (facts(rows=510), (3,), 1, True),
        ({**facts(), "format": 2}, (3,), 1, True),
    ],
)
def test_runs_that_were_trained_wrongly_are_refused(
    content: dict[str, Any], ranks: tuple[int, ...], groups: int, right: bool
) -> None:
    records: list[dict[str, Any]] = [{"step": 1, "heldout/loss": 3.0}]
    records += [{"throughput(tps)": 123.4, "throughput/global_tokens_per_s": 123.4 * n} for n in ranks]
    if right:
        check_trained_right("runs/a", content, records, groups)
    else:
        with pytest.raises(UserError, match=f"runs/a was trained on {ranks[-1]} processes by an older version"):
            check_trained_right("runs/a", content, records, groups)
