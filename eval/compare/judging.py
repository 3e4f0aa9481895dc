"""Which variants differ from their baseline: intervals and p-values that hold for all comparisons of a report at once.

The arms of one family, which are its baseline and its variants, are judged together where that can be: seeds are
blocks, the variance of the error is pooled (``blocks.py``), and Dunnett's test (``dunnett.py``) compares each variant
with the baseline. Before, the arms' variances are tested for being equal, at ``EQUAL_LEVEL``. A variant whose errors
vary too much is set aside and judged by a paired t-test of its own, and the others are tested again; where it is the
baseline whose errors do, each variant has a test of its own.

A report over several families shares ``LEVEL`` among them by their numbers of comparisons (Bonferroni), and so it does
between a pool and the variants set aside. The chance of even one false verdict in the report is then ``LEVEL``, and up
to ``EQUAL_LEVEL`` more, as which test is used depends on the losses too (``benchmarks/compare_power.py``).
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from eval.compare.blocks import Fit, fit, least_equal
from eval.compare.dunnett import Factors, adjusted_p, balanced, critical_value, one_factor, power
from eval.compare.statistics import LEVEL, estimate, spread

POOLED, PAIRED = "pooled", "paired"
EQUAL_LEVEL = 0.01
"""Of the test for equal variances. A false alarm costs most of the power; moderately unequal variances cost less."""
POWER = 0.8
MOST_SEEDS = 1000
FEWEST_PAIRS = 3
"""With two seeds a paired test rests on one degree of freedom, and gives no verdict."""


@dataclass(frozen=True)
class Comparison:
    """A variant's final loss less its baseline's, judged.

    Attributes:
        method: ``pooled`` or ``paired``.
        n: seeds that both have.
        mean: the difference. ``pooled``: of the least-squares fit, which is the mean over the seeds where no run is
            missing.
        sd: standard deviation of the difference of two runs of one seed.
        low, high: interval that holds the true difference; all intervals of the report do with 95%. An end is infinite
            where runs without a final loss leave it open.
        p: adjusted for all comparisons of the report; below ``LEVEL`` where 0 lies outside the interval. None where
            runs without a final loss rule that out.
        degrees: degrees of freedom of ``sd``.
    """

    method: str
    n: int
    mean: float
    sd: float
    low: float
    high: float
    p: float | None
    degrees: int

    @property
    def sure(self) -> bool:
        """Whether 0 lies outside the interval."""
        return self.low > 0 or self.high < 0


@dataclass(frozen=True)
class Pool:
    """How the variants of one family are judged; they are counted from 0.

    Attributes:
        pooled, paired: variants judged together, and each by itself. Others are not judged.
        fit, factors: of the baseline and those judged together; None where there are none.
        exact: whether ``factors`` are those of the differences, or stand for a bound.
        set_aside: those of ``paired`` whose errors vary too much, with the p-value that said so; −1 is the baseline.
        equal_p: the p-value of the test that the arms judged together vary alike.
    """

    pooled: tuple[int, ...]
    paired: tuple[int, ...]
    fit: Fit | None = None
    factors: Factors = ()
    exact: bool = True
    set_aside: tuple[tuple[int, float], ...] = ()
    equal_p: float | None = None

    @property
    def judged(self) -> int:
        return len(self.pooled) + len(self.paired)


def make_pool(losses: np.ndarray) -> Pool:
    """How to judge ``losses`` [1 + variants, seeds], the baseline first; NaN marks a missing run."""
    each = [_differences(losses, variant) for variant in range(len(losses) - 1)]
    left = [variant for variant, found in enumerate(each) if len(found) > 1 and spread(found) > 0]
    alone = tuple(variant for variant in left if len(each[variant]) >= FEWEST_PAIRS)
    set_aside: list[tuple[int, float]] = []
    equal_p = None
    while len(left) > 1:
        arm, equal_p = least_equal(losses[[0, *(variant + 1 for variant in left)]])
        if equal_p >= EQUAL_LEVEL:
            break
        set_aside.append((left[arm - 1] if arm else -1, equal_p))
        left = [variant for variant in left if arm and variant != left[arm - 1]]
    if len(left) < 2:
        return Pool((), alone, set_aside=tuple(set_aside))
    fitted = fit(losses[[0, *(variant + 1 for variant in left)]])
    factors = one_factor(fitted.correlation)
    return Pool(
        pooled=tuple(left),
        paired=tuple(variant for variant in alone if variant not in left),
        fit=fitted,
        factors=factors or (0.0,) * len(left),
        exact=factors is not None,
        set_aside=tuple(set_aside),
        equal_p=equal_p,
    )


def judge(losses: np.ndarray, pool: Pool, comparisons: int) -> list[Comparison | None]:
    """One for each variant of ``losses`` [1 + variants, seeds]; ``comparisons``: how many the report judges."""
    found: list[Comparison | None] = [None] * (len(losses) - 1)
    for variant in pool.paired:
        own = estimate(_differences(losses, variant).tolist(), LEVEL / comparisons)
        assert own.sd is not None
        assert own.low is not None
        assert own.high is not None
        assert own.p is not None
        p = min(1.0, own.p * comparisons)
        found[variant] = Comparison(PAIRED, own.n, own.mean, own.sd, own.low, own.high, p, own.n - 1)
    if pool.fit is None:
        return found
    share, degrees = comparisons / len(pool.pooled), pool.fit.degrees
    critical = critical_value(LEVEL / share, pool.factors, degrees)
    for index, variant in enumerate(pool.pooled):
        mean, error = float(pool.fit.differences[index]), pool.fit.spread * math.sqrt(pool.fit.units[index])
        p = min(1.0, share * adjusted_p(mean / error, pool.factors, degrees))
        both = int(np.isfinite(losses[0] + losses[variant + 1]).sum())
        ends = mean - critical * error, mean + critical * error
        found[variant] = Comparison(POOLED, both, mean, pool.fit.spread * math.sqrt(2), *ends, p, degrees)
    return found


def seeds_needed(effect: float, pooled: int = 1, level: float = LEVEL) -> int | None:
    """The fewest seeds with which a true difference is found with power 0.8.

    Args:
        effect: the difference, in units of the standard deviation of the difference of two runs of one seed.
        pooled: variants that are judged together; 1 is a paired test.
        level: of the test of all of them.

    None where even ``MOST_SEEDS`` would not do.
    """
    fewest, most = FEWEST_PAIRS if pooled == 1 else 2, MOST_SEEDS
    if _power(abs(effect), most, pooled, level) < POWER:
        return None
    while fewest < most:
        middle = (fewest + most) // 2
        if _power(abs(effect), middle, pooled, level) >= POWER:
            most = middle
        else:
            fewest = middle + 1
    return most


@lru_cache(maxsize=4096)
def _power(effect: float, n: int, pooled: int, level: float) -> float:
    degrees = pooled * (n - 1)
    return power(effect * math.sqrt(n), critical_value(level, balanced(pooled), degrees), degrees)


def _differences(losses: np.ndarray, variant: int) -> np.ndarray:
    """To the baseline, over the seeds that both have."""
    differences = losses[variant + 1] - losses[0]
    return differences[np.isfinite(differences)]
