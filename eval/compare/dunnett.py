"""Dunnett's comparison of several arms with one: critical values, adjusted p-values, power.

The statistics are T_i = Z_i / S. Z is normal with unit variances and correlations λ_i λ_j, S² is χ² over its degrees of
freedom and independent of Z. With Z_i = λ_i U + √(1 − λ_i²) V_i,

    P(|T_i| ≤ c for all i) = ∫ f(s) ∫ φ(u) Π_i [Φ((c s − λ_i u) / √(1 − λ_i²)) − Φ((−c s − λ_i u) / √(1 − λ_i²))] du ds,

which is computed as it stands (Dunnett 1955, J. Am. Stat. Assoc. 50, 1096–1121). In a balanced design every λ² is 1/2.
With all λ = 0 the integral is a lower bound of that probability whatever the correlations are (Šidák 1967, J. Am. Stat.
Assoc. 62, 626–633), so that critical values and p-values from it err on the safe side.
"""

import math
from functools import lru_cache

import numpy as np
from scipy.optimize import brentq
from scipy.special import ndtr
from scipy.stats import chi2

Factors = tuple[float, ...]
"""λ of each arm that is compared."""

_TAIL = 1e-13
_SHARED = np.linspace(-8.5, 8.5, 121)
"""Where the inner integral is read; the trapezoidal rule is exact to all digits that count for what decays so fast."""
_SHARED_WEIGHTS = np.exp(-(_SHARED**2) / 2) / math.sqrt(2 * math.pi) * (_SHARED[1] - _SHARED[0])
_SAME = 1e-9


def balanced(compared: int) -> Factors:
    """The factors of ``compared`` arms that have the same seeds as the baseline."""
    return (round(math.sqrt(0.5), 12),) * compared


def one_factor(correlation: np.ndarray) -> Factors | None:
    """λ with ``correlation`` [k, k] = λ_i λ_j off the diagonal, each |λ| below 1; None where there are none."""
    k = len(correlation)
    if k == 1:
        return (0.0,)
    if k == 2:
        root = math.sqrt(abs(correlation[0, 1]))
        return (root, math.copysign(root, correlation[0, 1]))
    factors = []
    for i in range(k):
        j, other = [index for index in range(k) if index != i][:2]
        square = correlation[i, j] * correlation[i, other] / correlation[j, other] if correlation[j, other] else -1.0
        factors.append(math.sqrt(square) if 0 <= square < 1 else math.nan)
    product = np.outer(factors, factors)
    np.fill_diagonal(product, 1.0)
    # Rounded, so that equal arms have equal factors.
    return tuple(round(f, 12) for f in factors) if np.allclose(product, correlation, rtol=0, atol=_SAME) else None


def all_within(bound: float, factors: Factors, degrees: int) -> float:
    """P(|T_i| ≤ ``bound`` for all i)."""
    scales, weights = _scales(degrees)
    edge = (bound * scales)[:, None]
    inside = np.ones((len(scales), len(_SHARED)))
    for factor in set(factors):
        rest, shift = math.sqrt(1 - factor**2), factor * _SHARED
        one = ndtr((edge - shift) / rest) - ndtr((-edge - shift) / rest)
        inside *= one ** factors.count(factor)
    return float(weights @ (inside @ _SHARED_WEIGHTS))


def adjusted_p(t: float, factors: Factors, degrees: int) -> float:
    """How often the largest |T| of all arms is as large as |``t``| where no arm differs from the baseline."""
    return min(1.0, max(0.0, 1 - all_within(abs(t), factors, degrees)))


@lru_cache(maxsize=4096)
def critical_value(level: float, factors: Factors, degrees: int) -> float:
    """The bound that the largest |T| exceeds with probability ``level``."""
    upper = 4.0
    while 1 - all_within(upper, factors, degrees) > level:
        upper *= 2
    return float(brentq(lambda bound: 1 - all_within(bound, factors, degrees) - level, 0.0, upper, xtol=1e-10))


def power(shift: float, critical: float, degrees: int) -> float:
    """P(|T| > ``critical``) of a noncentral t, whose Z has mean ``shift``."""
    scales, weights = _scales(degrees)
    edge = critical * scales
    return float(weights @ (ndtr(shift - edge) + ndtr(-edge - shift)))


@lru_cache(maxsize=4096)
def _scales(degrees: int) -> tuple[np.ndarray, np.ndarray]:
    """Values [n] of S = √(χ² / degrees), and weights [n] that integrate over its density."""
    low, high = np.sqrt(chi2.ppf([_TAIL, 1 - _TAIL], degrees) / degrees)
    nodes, weights = np.polynomial.legendre.leggauss(64)
    scales = low + (high - low) * (nodes + 1) / 2
    density = chi2.pdf(degrees * scales**2, degrees) * 2 * degrees * scales
    weights = weights * (high - low) / 2 * density
    return scales, weights / weights.sum()
