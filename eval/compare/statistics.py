"""Paired differences between a variant and its baseline: how large, how sure.

Each pair is two runs of one seed, which began with the same shared weights and saw the same batches. The interval and
the p-value are those of the paired t-test (Student 1908), which takes differences to be normally distributed; the sign
test takes nothing for granted and needs six pairs to reach 0.05. Holm's correction (Holm 1979, Scand. J. Statist. 6,
65–70) bounds the chance of even one false discovery among all variants compared.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

LEVEL = 0.05
POWER = 0.8
MOST_SEEDS = 1000


@dataclass(frozen=True)
class Estimate:
    """A mean of paired differences. What cannot be known from so few pairs is None.

    Attributes:
        n: pairs.
        mean, sd: of the differences; ``sd`` with n − 1.
        low, high: 95% interval of the mean by Student's t.
        p: two-sided p-value of the paired t-test.
        sign_p: two-sided p-value of the sign test, ties left out.
    """

    n: int
    mean: float
    sd: float | None = None
    low: float | None = None
    high: float | None = None
    p: float | None = None
    sign_p: float | None = None


def estimate(differences: Sequence[float]) -> Estimate:
    """Raises ``ValueError`` for no differences."""
    if not differences:
        raise ValueError("no differences")
    values = np.asarray(differences, dtype=float)
    n, mean = len(values), float(values.mean())
    signs = values[values != 0]
    sign_p = float(stats.binomtest(int((signs < 0).sum()), len(signs)).pvalue) if len(signs) else 1.0
    if n == 1:
        return Estimate(n, mean)
    sd = float(values.std(ddof=1))
    # Equal differences leave rounding noise; a spread so far below the values' own precision is none.
    if sd <= 1e-12 * max(abs(mean), 1e-300):
        return Estimate(n, mean, 0.0, mean, mean, 1.0 if mean == 0 else None, sign_p)
    half = float(stats.t.ppf(1 - LEVEL / 2, n - 1)) * sd / math.sqrt(n)
    p = float(stats.ttest_1samp(values, 0.0).pvalue)
    return Estimate(n, mean, sd, mean - half, mean + half, p, sign_p)


def seeds_needed(effect: float, level: float = LEVEL) -> int | None:
    """The fewest pairs with which a two-sided paired t-test at ``level`` finds ``effect`` (mean / SD) with power 0.8.

    None where even ``MOST_SEEDS`` would not do.
    """
    fewest, most = 2, MOST_SEEDS
    if _power(abs(effect), most, level) < POWER:
        return None
    while fewest < most:
        middle = (fewest + most) // 2
        if _power(abs(effect), middle, level) >= POWER:
            most = middle
        else:
            fewest = middle + 1
    return most


def _power(effect: float, n: int, level: float) -> float:
    critical, shift = stats.t.ppf(1 - level / 2, n - 1), effect * math.sqrt(n)
    # scipy's noncentral t gives NaN far in its tails, where the power is 1 to all digits.
    power = stats.nct.sf(critical, n - 1, shift) + stats.nct.cdf(-critical, n - 1, shift)
    return 1.0 if math.isnan(power) else float(power)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values, in the order given: compare each with the level that one test would have."""
    adjusted = [0.0] * len(p_values)
    so_far = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        so_far = max(so_far, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = so_far
    return adjusted
