"""Ladders of runs that end at a loss given by formula."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eval.compare.compare import READ
from eval.compare.grouping import Family, make_families
from eval.compare.run import Curve, Run
from eval.scaling.results import LadderResult, ScalingResult
from eval.scaling.scale import scale

PARAMETERS = {"10M": 1e7, "30M": 3e7, "100M": 1e8, "300M": 3e8}
DATA = {"training data": "aaaa", "vocabulary": 4096}


def make_run(
    loss: float,
    variant: str = "standard",
    size: str = "10M",
    seed: int | None = 0,
    tokens: float | None = None,
    **changes: Any,
) -> Run:
    """A run of three measurements. It trains on 20 tokens per parameter and spends 6 FLOPs per parameter and token."""
    parameters = PARAMETERS[size]
    end = tokens or 20 * parameters
    at = np.array([0.25, 0.5, 1.0]) * end
    axes = {"tokens": at, "flops": 6 * parameters * at, "seconds": at / 1e6}
    curve = Curve(np.array([25, 50, 100]), loss + np.array([0.4, 0.2, 0.0]), axes)
    fields: dict[str, Any] = {
        "name": f"{variant}-{size}-{end:.3g}-s{seed}",
        "path": Path(variant),
        "variant": variant,
        "size": size,
        "seed": seed,
        "heldout": curve,
        "bits_per_byte": curve,
        "training": curve,
        "learning_rate": (np.array([0]), np.array([1.0])),
        "costs": {
            "tokens_per_s": 1e6,
            "step_seconds": 1.0,
            "peak_memory_gib": 2.0,
            "flops_per_token": 6 * parameters,
            "parameters": parameters,
        },
        "settings": {"training.steps": int(end)},
        "data": DATA,
    }
    return Run(**{**fields, **changes})


def compute(size: str) -> float:
    return 6 * PARAMETERS[size] * 20 * PARAMETERS[size]


def families_of(runs: Iterable[Run], baseline: str | None = None) -> list[Family]:
    return make_families(list(runs), [], baseline)


def scaled(runs: Iterable[Run], draws: int = 0) -> tuple[ScalingResult, Mapping[str, LadderResult]]:
    result = scale(families_of(runs), READ, draws)
    assert result is not None
    return result, {ladder.label: ladder for ladder in result.ladders}


@pytest.fixture
def ladder() -> Callable[..., list[Run]]:
    """Runs of ``standard`` and ``m_gate_kv``: L = 1.7 + 60 (g C)^−0.1, where g is 1.25 for the variant."""

    def make(
        sizes: Iterable[str] = PARAMETERS, seeds: int = 1, noise: Callable[[str, str, int], float] | None = None
    ) -> list[Run]:
        runs = []
        for size in sizes:
            for variant, more in (("standard", 1.0), ("m_gate_kv", 1.25)):
                for seed in range(seeds):
                    error = noise(variant, size, seed) if noise else 0.0
                    loss = (1.7 + 60 * (more * compute(size)) ** -0.1) * np.exp(error)
                    runs.append(make_run(float(loss), variant, size, seed))
        return runs

    return make
