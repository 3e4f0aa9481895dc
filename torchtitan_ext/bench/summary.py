"""From what models took to what is reported: medians over turns, and ratios to ``standard`` paired turn by turn."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .turns import Measured


class Spread(NamedTuple):
    """Quartiles over turns."""

    lower: float
    median: float
    upper: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        return cls(*(float(q) for q in np.quantile(values, [0.25, 0.5, 0.75])))


@dataclass(frozen=True)
class Speed:
    """What the turns gave.

    Attributes:
        tokens_per_second: over all ranks, the median turn's.
        ratio: of it to ``standard``'s in the same turn.
        step_seconds, parts: of one step, and of its parts, medians over turns.
        mfu: model FLOP/s, recomputation not counted, over the devices' peak.
    """

    tokens_per_second: float
    ratio: Spread
    step_seconds: float
    parts: dict[str, float]
    mfu: float


@dataclass(frozen=True)
class Row:
    """One model in the table; sizes are those of one rank."""

    label: str
    parameters: int
    flops_per_token: int
    speed: Speed | None
    peak_bytes: int
    peak_ratio: float
    saved_bytes: int
    saved_ratio: float
    compile_seconds: float | None
    graphs: int | None


def summarise(measured: Sequence[Measured], *, steps: int, ranks: int) -> list[Row]:
    """One row per model; the first is what the others are compared with. ``steps`` in each turn."""
    first = measured[0]
    rows = []
    for one in measured:
        setup = one.setup
        rows.append(
            Row(
                label=one.contender.label,
                parameters=setup.parameters,
                flops_per_token=setup.flops_per_token,
                speed=_speed(one, first, steps=steps, ranks=ranks) if one.turns else None,
                peak_bytes=setup.peak_bytes,
                peak_ratio=setup.peak_bytes / first.setup.peak_bytes,
                saved_bytes=setup.saved_bytes,
                saved_ratio=setup.saved_bytes / first.setup.saved_bytes,
                compile_seconds=setup.compile_seconds,
                graphs=setup.graphs,
            )
        )
    return rows


def _speed(one: Measured, first: Measured, *, steps: int, ranks: int) -> Speed:
    rates, standard = _rates(one, steps), _rates(first, steps)
    rate = float(np.median(rates))
    return Speed(
        tokens_per_second=rate,
        ratio=Spread.of([ours / theirs for ours, theirs in zip(rates, standard, strict=True)]),
        step_seconds=float(np.median([sum(turn.values()) / steps for turn in one.turns])),
        parts={part: float(np.median([turn[part] / steps for turn in one.turns])) for part in one.turns[0]},
        # One peak for all: on a CPU each process has measured it anew.
        mfu=rate * one.setup.flops_per_token / (ranks * first.setup.peak_flops),
    )


def _rates(one: Measured, steps: int) -> list[float]:
    return [one.setup.tokens_per_step * steps / sum(turn.values()) for turn in one.turns]
