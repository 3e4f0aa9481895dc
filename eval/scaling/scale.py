"""Ladders → laws, their intervals, and compute-equivalent gains.

Intervals come from a bootstrap over runs: laws are fitted again to runs drawn with replacement, the same draws for all
variants, so that what a seed or a size does to all of them alike cancels in their comparison. A percentile interval
from few runs is too narrow; its percentiles are therefore moved outwards to where Student's t puts them with
runs − constants degrees of freedom (the expanded percentile interval of Hesterberg 2015, The American Statistician 69,
371–386).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from scipy.optimize import brentq
from scipy.stats import norm, t
from tqdm import tqdm

from eval.compare.bands import ReadCurve
from eval.compare.grouping import Family
from eval.scaling.fit import Law, constants_needed, fit
from eval.scaling.ladder import COMPUTE, SIZE_AND_DATA, Ladder, choose_law, make_ladders
from eval.scaling.results import Gain, Interval, LadderResult, Line, Point, ScalingResult

FEWEST_SIZES = 3
DRAWS = 400
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
    """``drawn``: the laws of the bootstrap's draws, in their order; empty where there can be none."""

    ladder: Ladder
    law: Law
    drawn: Sequence[Law]

    @property
    def degrees(self) -> int:
        return len(self.ladder.runs) - len(self.law.constants)


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
    cells = _draw([ladder for ladder in ladders if reasons[ladder.label] is None], law, draws)
    progress = tqdm(ladders, desc="scaling laws", leave=False, disable=None)
    fitted = {ladder.label: _fit(ladder, law, cells) for ladder in progress if reasons[ladder.label] is None}
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


def _draw(ladders: Sequence[Ladder], law: str, draws: int) -> list[Draw]:
    """How often each cell (a size and seed) was drawn, for each draw that leaves every ladder enough to fit.

    Ladders with no run to spare get no intervals and ask nothing of a draw. None where hardly any draw will do.
    """
    ladders = [ladder for ladder in ladders if _can_spare(ladder, law)]
    cells = sorted({run.cell for ladder in ladders for run in ladder.runs}, key=repr)
    if not cells:
        return []
    rng = np.random.default_rng(_SEED)
    found: list[Draw] = []
    for counts in rng.multinomial(len(cells), np.full(len(cells), 1 / len(cells)), size=50 * draws):
        drawn = dict(zip(cells, (int(count) for count in counts), strict=True))
        if all(_enough(ladder, law, drawn) for ladder in ladders):
            found.append(drawn)
        if len(found) == draws:
            return found
    return []


def _can_spare(ladder: Ladder, law: str) -> bool:
    return len(ladder.runs) > len(_NAMES[law])


def _enough(ladder: Ladder, law: str, drawn: Draw) -> bool:
    left = [run for run in ladder.runs if drawn[run.cell]]
    if len({run.size for run in left}) < FEWEST_SIZES:
        return False
    return law == COMPUTE or len({(run.size, run.tokens) for run in left}) >= constants_needed(2)


def _fit(ladder: Ladder, law: str, cells: Sequence[Draw]) -> Fitted:
    logs, losses = ladder.logs(law), ladder.losses()
    whole = fit(logs, losses)
    if not _can_spare(ladder, law):
        return Fitted(ladder, whole, ())
    weights = [np.array([drawn[run.cell] for run in ladder.runs], dtype=float) for drawn in cells]
    return Fitted(ladder, whole, [fit(logs, losses, one, whole) for one in weights])


def _describe(result: LadderResult, fitted: Fitted, base: Fitted | None, law: str) -> None:
    """Fill in what the law says. ``base`` is the baseline's, where that has a law."""
    found, ladder = fitted.law, fitted.ladder
    values = [[one.irreducible, *one.factors, *one.exponents] for one in [found, *fitted.drawn]]
    for name, column in zip(_NAMES[law], zip(*values, strict=True), strict=True):
        result.constants[name] = _interval(column[0], column[1:], fitted.degrees)
    result.error = float(np.sqrt(np.mean((np.log(found.loss(ladder.logs(law))) - np.log(ladder.losses())) ** 2)))
    result.line = _line(fitted, law)
    if not _can_spare(ladder, law):
        result.notes.append(f"{len(ladder.runs)} runs for {len(found.constants)} constants: no intervals")
    elif not fitted.drawn:
        result.notes.append("runs drawn anew leave too few sizes too often: no intervals")
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
