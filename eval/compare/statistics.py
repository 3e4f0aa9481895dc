"""Paired differences between a variant and its baseline, each variant by itself.

Each pair is two runs of one seed, which began with the same shared weights and saw the same batches. The interval and
the p-value are those of the paired t-test (Student 1908), which takes differences to be normally distributed; the sign
test takes nothing for granted and needs six pairs to reach 0.05. ``judging.py`` judges variants together.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

LEVEL = 0.05


@dataclass(frozen=True)
class Estimate:
    """A mean of paired differences. What cannot be known from so few pairs is None.

    Attributes:
        n: pairs.
        mean, sd: of the differences; ``sd`` with n − 1.
        low, high: 95% interval of the mean by Student's t; None where all differences are equal.
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


def estimate(differences: Sequence[float], level: float = LEVEL) -> Estimate:
    """``level``: of the test whose interval is given, 1 − its confidence.

    Raises ``ValueError`` for no differences.
    """
    if not len(differences):
        raise ValueError("no differences")
    values = np.asarray(differences, dtype=float)
    n, mean = len(values), float(values.mean())
    signs = values[values != 0]
    sign_p = float(stats.binomtest(int((signs < 0).sum()), len(signs)).pvalue) if len(signs) else 1.0
    if n == 1:
        return Estimate(n, mean)
    sd = spread(values)
    if sd == 0:
        return Estimate(n, mean, 0.0, p=1.0 if mean == 0 else None, sign_p=sign_p)
    half = float(stats.t.ppf(1 - level / 2, n - 1)) * sd / math.sqrt(n)
    p = float(stats.ttest_1samp(values, 0.0).pvalue)
    return Estimate(n, mean, sd, mean - half, mean + half, p, sign_p)


def spread(values: np.ndarray) -> float:
    """Standard deviation, with n − 1, of two values or more; 0 where they differ by rounding alone."""
    sd = float(values.std(ddof=1))
    # Equal differences leave rounding noise; a spread so far below the values' own precision is none.
    return sd if sd > 1e-12 * max(abs(float(values.mean())), 1e-300) else 0.0
