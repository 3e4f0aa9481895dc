"""Sweeps over the learning rate: of each arm that was trained at several rates, the best one is compared.

The best rate is the one with the lowest mean final loss over the seeds that all rates of the arm have; a rate at which
runs diverged is the best one only where runs diverged at all of them.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from eval.compare.curves import READ, measure_of
from eval.compare.run import DIVERGED, LeftOut, Run

RATE = "optimizer.lr"
_FOLLOWS = ("training.steps", "optimizer.warmup_steps", "optimizer.decay_fraction")
_IN_LABEL = re.compile(r"-lr([0-9.]+(?:e[+-]?[0-9]+)?)(?=$|,)")
"""How a study names the rate in the label of a run."""


@dataclass(frozen=True)
class Rate:
    """One learning rate of a sweep.

    Attributes:
        runs, diverged: how many ended, and how many diverged.
        loss, low, high: final loss over the seeds that all rates have (or all of its own where they have none in
            common): mean, lowest, highest; None where no run ended.
    """

    rate: float
    runs: int
    diverged: int
    loss: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Sweep:
    """One arm at several learning rates, rising; ``seeds``: how many seeds all rates have that ended."""

    rates: tuple[Rate, ...]
    best: float
    seeds: int

    @property
    def edge(self) -> str | None:
        """``lowest`` or ``highest`` where the best rate is the last of those tried on its side."""
        tried = [rate.rate for rate in self.rates]
        return "lowest" if self.best == tried[0] else "highest" if self.best == tried[-1] else None


def without_rate(label: str | None) -> str | None:
    """A label without the learning rate by which its study tells it from others."""
    return _IN_LABEL.sub("", label, count=1) if label else label


def keep_best(
    groups: Sequence[tuple[Run, ...]], left_out: Sequence[LeftOut]
) -> list[tuple[tuple[Run, ...], Sweep | None]]:
    """Of each arm its best rate, with its sweep where it has several. ``left_out`` says where runs diverged."""
    arms: dict[str, dict[float | None, tuple[Run, ...]]] = {}
    for runs in groups:
        arms.setdefault(_arm(runs[0]), {})[_rate(runs[0])] = runs
    diverged: dict[str, Counter[float | None]] = {}
    for out in left_out:
        if out.known and out.fate == DIVERGED:
            diverged.setdefault(_arm(out.known), Counter())[_rate(out.known)] += 1
    kept: list[tuple[tuple[Run, ...], Sweep | None]] = []
    for arm, by_rate in arms.items():
        lost = diverged.get(arm, Counter())
        tried = {rate for rate in (*by_rate, *lost) if rate is not None}
        if len(tried) < 2 or None in by_rate:
            kept += [(runs, None) for runs in by_rate.values()]
            continue
        sweep = _sweep(by_rate, tried, lost)
        kept.append((by_rate[sweep.best], sweep))
    return kept


def _sweep(
    by_rate: Mapping[float | None, tuple[Run, ...]], tried: Iterable[float], diverged: Counter[float | None]
) -> Sweep:
    read = READ[measure_of(run for runs in by_rate.values() for run in runs)]
    losses = {rate: {run.pair: read(run).final for run in runs if len(read(run))} for rate, runs in by_rate.items()}
    common = set.intersection(*(set(found) for found in losses.values()))
    rates = []
    for rate in sorted(tried):
        own = losses.get(rate, {})
        values = [loss for pair, loss in own.items() if pair in common or not common]
        spread = (float(np.mean(values)), min(values), max(values)) if values else (None, None, None)
        rates.append(Rate(rate, len(own), diverged[rate], *spread))
    best = min(
        (rate for rate in rates if rate.loss is not None), key=lambda rate: (rate.diverged > 0, rate.loss or 0.0)
    )
    return Sweep(tuple(rates), best.rate, len(common))


def _arm(run: Run) -> str:
    """What runs have in common that differ in learning rate and seed alone."""
    free = {RATE, *(_FOLLOWS if run.control == "wall_clock" else ())}
    settings = {key: value for key, value in run.settings.items() if key not in free}
    named = [without_rate(run.label), run.variant, run.size, run.control]
    return json.dumps([*named, settings, run.data], sort_keys=True, default=str)


def _rate(run: Run) -> float | None:
    value = run.settings.get(RATE)
    return float(value) if isinstance(value, int | float) else None


def renamed(runs: tuple[Run, ...]) -> tuple[Run, ...]:
    """Without the rate in their labels, so that what is compared is called alike whatever rate was the best."""
    return tuple(replace(run, label=without_rate(run.label), baseline=without_rate(run.baseline)) for run in runs)
