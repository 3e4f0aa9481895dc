"""Ladders → laws, their intervals, and compute-equivalent gains.

Intervals come from a bootstrap over runs: laws are fitted again to runs drawn with replacement, the same draws for all
variants, so that what a seed or a size does to all of them alike cancels in their comparison. A percentile interval
from few runs is too narrow; its percentiles are therefore moved outwards to where Student's t puts them with
runs − constants degrees of freedom (the expanded percentile interval of Hesterberg 2015, The American Statistician 69,
371–386). Few runs leave few different sets of runs to fit, and an interval over few laws is too narrow however its
percentiles are moved: below ``FEWEST_SETS`` there is none.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from scipy.optimize import brentq
from scipy.stats import norm, t
from tqdm import tqdm

from eval.compare.curves import ReadCurve
from eval.compare.grouping import Family
from eval.scaling.fit import Law, constants_needed, fit
from eval.scaling.ladder import COMPUTE, SIZE_AND_DATA, Ladder, choose_law, make_ladders
from eval.scaling.refit import refit
from eval.scaling.results import Gain, Interval, LadderResult, Line, Point, ScalingResult

FEWEST_SIZES = 3
DRAWS = 400
FEWEST_SETS = 30
"""Different sets of a ladder's runs that draws must leave before their spread is an interval. Three sizes of two seeds
have 27, and fewer than six in ten of their intervals of a gain held the truth (benchmarks/scaling_coverage.py)."""
_TRIES = 50
"""Draws that are looked at, as a multiple of those that are wanted, before intervals are given up."""
_NAMES = {COMPUTE: ("E", "K", "gamma"), SIZE_AND_DATA: ("E", "A", "B", "alpha", "beta")}
_GROWTH = {COMPUTE: np.array([1.0]), SIZE_AND_DATA: np.array([0.5, 0.5])}
"""What one unit of log compute adds to each quantity's logarithm: N and D grow alike."""
_LINE_POINTS = 40
_SEED = 0
Draw: TypeAlias = dict[tuple[object, ...], int]
_REACH = 60.0
"""Compute is looked for within e^±60 of the baseline's."""


@dataclass(frozen=True)
class Fitted:
    """``drawn``: the laws of the bootstrap's draws, in their order; empty where there can be none, and ``why_none``."""

    ladder: Ladder
    law: Law
    drawn: Sequence[Law]
    degrees: int
    why_none: str | None


def scale(families: Sequence[Family], reads: dict[str, ReadCurve], draws: int = DRAWS) -> ScalingResult | None:
    """Fit one law to each variant's ladder; None where no variant has two sizes.

    Args:
        reads: how the loss of each measure is read off a run.
        draws: of the bootstrap.
    """
    ladders = make_ladders(families, reads)
    if not ladders:
        return None
    law = choose_law(ladders)
    if law == COMPUTE:
        ladders = [ladder.only_longest() for ladder in ladders]
    measures = {family.measure for family in families}
    reasons = {ladder.label: _why_not(ladder, law) for ladder in ladders}
    usable = [ladder for ladder in ladders if reasons[ladder.label] is None]
    cells, without = _draw(usable, law, draws)
    progress = tqdm(usable, desc="scaling laws", leave=False, disable=None)
    fitted = {ladder.label: _fit(ladder, law, cells, without.get(ladder.label)) for ladder in progress}
    results = []
    for ladder in ladders:
        result = LadderResult(ladder.label, ladder.baseline, ladder.points(), notes=list(ladder.notes))
        result.why_not = reasons[ladder.label]
        if ladder.label in fitted:
            _describe(result, fitted[ladder.label], fitted.get(ladder.baseline or ""), law)
        results.append(result)
    return ScalingResult(law, "heldout" if "heldout" in measures else "training", results, draws)


def _why_not(ladder: Ladder, law: str) -> str | None:
    if ladder.why_not:
        return ladder.why_not
    if ladder.sizes < FEWEST_SIZES:
        need = constants_needed(1)
        return f"{ladder.sizes} sizes; a law has {need} constants or more and needs {FEWEST_SIZES} sizes at least"
    return None


def _draw(ladders: Sequence[Ladder], law: str, draws: int) -> tuple[list[Draw], dict[str, str]]:
    """How often each cell was drawn, for each draw that leaves enough to fit; and why ladders get no intervals, by
    label. Those ask nothing of a draw."""
    without = {}
    for ladder in ladders:
        cells, constants = len(set(ladder.cells(law))), len(_NAMES[law])
        if cells <= constants:
            without[ladder.label] = f"{cells} runs for {constants} constants: no intervals"
    while draws and (spare := [ladder for ladder in ladders if ladder.label not in without]):
        found, few = _draw_for(spare, law, draws)
        without |= few
        if not few:
            return found, without
    return [], without


def _draw_for(ladders: Sequence[Ladder], law: str, draws: int) -> tuple[list[Draw], dict[str, str]]:
    """Draws for all of ``ladders``; those of them, by label, for which they do not do, and why."""
    cells = sorted({cell for ladder in ladders for cell in ladder.cells(law)}, key=repr)
    own = {ladder.label: ladder.cells(law) for ladder in ladders}
    sets: dict[str, set[tuple[int, ...]]] = {ladder.label: set() for ladder in ladders}
    rng = np.random.default_rng(_SEED)
    found: list[Draw] = []
    for counts in rng.multinomial(len(cells), np.full(len(cells), 1 / len(cells)), size=_TRIES * draws):
        drawn = dict(zip(cells, (int(count) for count in counts), strict=True))
        left = {label: tuple(index for index, cell in enumerate(own[label]) if drawn[cell]) for label in own}
        if all(_enough(ladder, law, left[ladder.label]) for ladder in ladders):
            if len(found) < draws:
                found.append(drawn)
            for label in own:
                sets[label].add(left[label])
        if len(found) == draws and all(len(seen) >= FEWEST_SETS for seen in sets.values()):
            return found, {}
    if len(found) < draws:
        return [], dict.fromkeys(own, "runs drawn anew leave too few sizes or lengths too often: no intervals")
    return [], {
        label: f"runs drawn anew leave only {len(seen)} different sets of its {len(own[label])} runs, which are too few"
        " laws to read an interval off: no intervals"
        for label, seen in sets.items()
        if len(seen) < FEWEST_SETS
    }


def _enough(ladder: Ladder, law: str, left: Sequence[int]) -> bool:
    """Whether the runs of these indices may be fitted."""
    runs = [ladder.runs[index] for index in left]
    if len({run.size for run in runs}) < FEWEST_SIZES:
        return False
    if law == COMPUTE:
        return True
    # As many lengths as sizes, or else the draw does not determine how the loss falls with them.
    points = {(run.size, round(run.tokens)) for run in runs}
    return len(points) >= constants_needed(2) and len({tokens for _, tokens in points}) >= FEWEST_SIZES


def _fit(ladder: Ladder, law: str, draws: Sequence[Draw], why_none: str | None) -> Fitted:
    logs, losses, cells = ladder.logs(law), ladder.losses(), ladder.cells(law)
    whole = fit(logs, losses)
    degrees = len(set(cells)) - len(whole.constants)
    if why_none is not None:
        return Fitted(ladder, whole, (), degrees, why_none)
    weights = np.array([[drawn[cell] for cell in cells] for drawn in draws], dtype=float).reshape(-1, len(cells))
    return Fitted(ladder, whole, refit(logs, losses, weights, whole), degrees, None)


def _describe(result: LadderResult, fitted: Fitted, base: Fitted | None, law: str) -> None:
    """Fill in what the law says. ``base`` is the baseline's, where that has a law."""
    found, ladder = fitted.law, fitted.ladder
    values = [[one.irreducible, *one.factors, *one.exponents] for one in [found, *fitted.drawn]]
    for name, column in zip(_NAMES[law], zip(*values, strict=True), strict=True):
        result.constants[name] = _interval(column[0], column[1:], fitted.degrees)
    result.error = float(np.sqrt(np.mean((np.log(found.loss(ladder.logs(law))) - np.log(ladder.losses())) ** 2)))
    result.line = _line(fitted, law)
    if fitted.why_none:
        result.notes.append(fitted.why_none)
    if found.on_edge or found.irreducible < 0.01 * float(ladder.losses().min()):
        result.notes.append(
            "these runs do not determine the constants (an exponent or E stands at the end of its range): the law may "
            "be read between its sizes, not beyond them"
        )
    if base is not None:
        result.gains = _gains(fitted, base, law)


def _interval(value: float, drawn: Sequence[float], degrees: int) -> Interval:
    if not drawn:
        return Interval(value)
    low, high = _expanded(np.array(drawn), degrees)
    return Interval(value, float(low), float(high))


def _expanded(drawn: np.ndarray, degrees: int) -> tuple[np.ndarray, np.ndarray]:
    """The 95% interval over the first axis. An infinite draw may make its upper end infinite."""
    tail = norm.cdf(-math.sqrt(1 + 1 / degrees) * t.ppf(0.975, degrees))
    low, high = np.quantile(drawn, [tail, 1 - tail], axis=0, method="inverted_cdf")
    return low, high


def _line(fitted: Fitted, law: str) -> Line:
    points = fitted.ladder.points()
    flops = np.geomspace(points[0].flops, points[-1].flops, _LINE_POINTS)
    losses = np.array([_along(one, flops, points, law) for one in [fitted.law, *fitted.drawn]])
    low, high = _expanded(losses[1:], fitted.degrees) if fitted.drawn else (np.array([]), np.array([]))
    return Line(flops.tolist(), losses[0].tolist(), low.tolist(), high.tolist())


def _along(found: Law, flops: np.ndarray, points: Sequence[Point], law: str) -> np.ndarray:
    """The law's loss at each compute; of ``L(N, D)`` the lowest one (Hoffmann et al. 2022, eq. 4)."""
    if law == COMPUTE:
        return found.loss(np.log(flops)[:, None])
    (a, b), (alpha, beta) = found.factors, found.exponents
    # There FLOPs are 6 N D; here they were counted, so the factor is what the runs give.
    product = flops / np.mean([point.flops / (point.parameters * point.tokens) for point in points])
    log_n = (math.log(alpha * a / (beta * b)) + beta * np.log(product)) / (alpha + beta)
    return found.loss(np.stack([log_n, np.log(product) - log_n], axis=1))


def _gains(fitted: Fitted, base: Fitted, law: str) -> list[Gain]:
    rungs = base.ladder.longest()
    theirs = {point.size: point for point in rungs}
    found = []
    smallest, largest = rungs[0].flops, rungs[-1].flops
    step = max(rungs[index + 1].flops / rungs[index].flops for index in range(len(rungs) - 1))
    degrees = min(fitted.degrees, base.degrees)
    for mine in fitted.ladder.longest():
        loss = float(fitted.law.loss(_logs(mine, law)))
        if mine.size not in theirs:
            continue
        at = theirs[mine.size]
        needed = [
            _needed(other, at, float(one.loss(_logs(mine, law))), law)
            for one, other in [(fitted.law, base.law), *zip(fitted.drawn, base.drawn, strict=False)]
        ]
        if not 0 < needed[0] < math.inf:
            found.append(Gain(mine.size, loss, None, None, True))
            continue
        outside = max(1.0, needed[0] / largest, smallest / needed[0])
        gain = _interval(needed[0] / mine.flops, [one / mine.flops for one in needed[1:]], degrees)
        found.append(Gain(mine.size, loss, gain, outside, outside > step))
    return found


def _logs(point: Point, law: str) -> np.ndarray:
    return np.log([point.flops] if law == COMPUTE else [point.parameters, point.tokens])


def _needed(base: Law, at: Point, loss: float, law: str) -> float:
    """The FLOPs at which the baseline's law comes down to ``loss`` when it grows from ``at``; infinite where it never
    does."""
    logs, growth = _logs(at, law), _GROWTH[law]

    def above(more: float) -> float:
        return float(base.loss(logs + more * growth)) - loss

    if above(_REACH) >= 0:
        return math.inf
    if above(-_REACH) <= 0:
        return 0.0
    return at.flops * math.exp(brentq(above, -_REACH, _REACH, xtol=1e-9))
