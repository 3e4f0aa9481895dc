"""Families of runs → ladders: one variant at all its sizes."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from eval.compare.curves import ReadCurve, has_axis
from eval.compare.grouping import LENGTH, Family, Group, titles, without_size
from eval.compare.run import Run
from eval.scaling.results import Point

COMPUTE, SIZE_AND_DATA = "L(C)", "L(N, D)"
MOST_COLLINEAR = 0.95
"""Correlation of log N with log D above which what either does cannot be told apart."""


@dataclass(frozen=True)
class Finished:
    """The end of one run.

    ``seed``: what runs of different variants that belong together have in common beside size and length;
    ``reference``: the baseline's model trained for another length, to measure others by.
    """

    size: str
    seed: object
    parameters: float
    tokens: float
    flops: float
    loss: float
    reference: bool


@dataclass(frozen=True)
class Ladder:
    """``why_not``: why no law may be fitted whatever the number of sizes."""

    label: str
    baseline: str | None
    runs: tuple[Finished, ...]
    why_not: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def sizes(self) -> int:
        return len({run.size for run in self.runs})

    def logs(self, law: str) -> np.ndarray:
        """Logarithms of the law's quantities, [runs, 1 or 2]."""
        if law == COMPUTE:
            return np.log([[run.flops] for run in self.runs])
        return np.log([[run.parameters, run.tokens] for run in self.runs])

    def cells(self, law: str) -> list[tuple[object, ...]]:
        """For each run what it has in common with those of other variants that are drawn with it: size and seed, and
        the length where the law has several of one size."""
        if law == COMPUTE:
            return [(run.size, run.seed) for run in self.runs]
        return [(run.size, round(run.tokens), run.seed) for run in self.runs]

    def losses(self) -> np.ndarray:
        return np.array([run.loss for run in self.runs])

    def points(self) -> list[Point]:
        """Means over runs of one size and length, by rising compute."""
        groups: dict[tuple[str, float], list[Finished]] = {}
        for run in self.runs:
            groups.setdefault((run.size, run.tokens), []).append(run)
        found = [
            Point(
                size,
                len(runs),
                *(
                    float(np.mean([getattr(run, key) for run in runs]))
                    for key in ("parameters", "tokens", "flops", "loss")
                ),
            )
            for (size, _), runs in groups.items()
        ]
        return sorted(found, key=lambda point: point.flops)

    def longest(self) -> list[Point]:
        """The point with the most tokens of each size, by rising compute."""
        best: dict[str, Point] = {}
        for point in self.points():
            if point.size not in best or point.tokens > best[point.size].tokens:
                best[point.size] = point
        return sorted(best.values(), key=lambda point: point.flops)

    def only_longest(self) -> "Ladder":
        """Without the shorter runs of each size, and without references."""
        own = replace(self, runs=tuple(run for run in self.runs if not run.reference))
        kept = {(point.size, point.tokens) for point in own.longest()}
        runs = tuple(run for run in own.runs if (run.size, run.tokens) in kept)
        notes = self.notes
        if left := len(own.runs) - len(runs):
            said = "1 shorter run is" if left == 1 else f"{left} shorter runs are"
            notes = (*notes, f"{said} not in the law, which takes the longest of each size")
        return replace(self, runs=runs, notes=notes)


def make_ladders(families: Sequence[Family], reads: dict[str, ReadCurve]) -> list[Ladder]:
    """All variants with at least two sizes; baselines first. ``reads``: how each family's measure is read."""
    placed = [(family, group) for family in families for group in family.all]
    called = dict(
        zip(
            (id(group) for _, group in placed),
            (
                without_size(title, group.first.size)
                for title, (_, group) in zip(titles([g.first for _, g in placed], LENGTH), placed, strict=True)
            ),
            strict=True,
        )
    )
    members: dict[str, list[tuple[Family, Group]]] = {}
    baselines: dict[str, str] = {}
    for family, group in placed:
        title = called[id(family.baseline)] if family.is_reference(group) else called[id(group)]
        members.setdefault(title, []).append((family, group))
        if family.baseline and family.baseline is not group and not family.is_reference(group):
            baselines.setdefault(title, called[id(family.baseline)])
    ladders = [
        _ladder(title, baselines.get(title), found, reads)
        for title, found in members.items()
        if len({group.first.size for _, group in found}) > 1
    ]
    bases = {ladder.baseline for ladder in ladders}
    return sorted(ladders, key=lambda ladder: ladder.label not in bases)


def choose_law(ladders: Sequence[Ladder]) -> str:
    """``L(N, D)`` where every ladder that can have a law varies both enough, else ``L(C)``."""
    usable = [ladder for ladder in ladders if ladder.why_not is None and ladder.sizes > 2]
    return SIZE_AND_DATA if usable and all(map(_varies_both, usable)) else COMPUTE


def _varies_both(ladder: Ladder) -> bool:
    points = ladder.points()
    logs = np.log([[point.parameters, point.tokens] for point in points])
    distinct = [len(np.unique(column.round(6))) for column in logs.T]
    # One point more than the law has constants, or else it would go through all of them.
    if len(points) < 6 or min(distinct) < 3:
        return False
    return bool(abs(np.corrcoef(logs.T)[0, 1]) <= MOST_COLLINEAR)


def _ladder(
    title: str, baseline: str | None, found: Sequence[tuple[Family, Group]], reads: dict[str, ReadCurve]
) -> Ladder:
    why_not = None
    if len({family.measure for family, _ in found}) > 1:
        why_not = "some of its sizes measured a held-out loss and others did not"
    elif len({json.dumps(group.first.data, default=str) for _, group in found}) > 1:
        why_not = f"its sizes differ in {_differing([group.first for _, group in found])}"
    runs: list[Finished] = []
    for family, group in found:
        for index, run in enumerate(group.runs):
            finished = _finished(run, index, reads[family.measure], family.is_reference(group))
            if isinstance(finished, str):
                why_not = why_not or finished
            else:
                runs.append(finished)
    notes = _stepped([group.first for _, group in found]) if baseline is None else ()
    return Ladder(title, baseline, tuple(runs), why_not, notes)


STEPPED = {"training.batch_tokens": "batch", "optimizer.beta2": "β2"}
"""Run keys that a recipe changes from size to size in steps, and what they are called."""


def _stepped(runs: Sequence[Run]) -> tuple[str, ...]:
    """What sizes differ in beside their size, in steps: a law over them holds for that as well."""
    found = []
    for key, called in STEPPED.items():
        by_size = {run.size: run.settings.get(key) for run in runs}
        if len(set(by_size.values()) - {None}) > 1:
            found.append(f"{called} {', '.join(f'{value:,g} at {size}' for size, value in by_size.items() if value)}")
    if not found:
        return ()
    return (f"its sizes differ in more than size: {'; '.join(found)}; neighbours may differ for that in part",)


def _differing(runs: Sequence[Run]) -> str:
    known = [run.data or {} for run in runs]
    keys = dict.fromkeys(key for data in known for key in data)
    return (
        ", ".join(key for key in keys if len({str(data.get(key)) for data in known}) > 1)
        or "what is known of their data"
    )


def _finished(run: Run, index: int, read: ReadCurve, reference: bool) -> Finished | str:
    """The end of ``run``, or why it can be part of no law."""
    curve, parameters = read(run), run.costs["parameters"]
    if run.size is None or not math.isfinite(parameters):
        return f"the size of {run.name} is not known"
    if not all(has_axis(curve, axis) for axis in ("tokens", "flops")):
        return f"{run.name} logged no tokens or no FLOPs"
    if curve.final <= 0:
        return f"the final loss of {run.name} is {curve.final:.4g}, and laws are of losses above zero"
    seed = run.pair if run.seed is not None else index
    ends = curve.end("tokens"), curve.end("flops")
    return Finished(run.size, seed, parameters, *ends, curve.final, reference)
