"""Losses of several arms with seeds as blocks: loss = arm + seed + error, and one variance of the error for all arms.

Runs of one seed saw the same batches and began with the same shared weights, so that a seed moves all arms alike. What
is left after arms and seeds is the error. Its variance is pooled over the arms: k arms with n seeds each give
(k − 1)(n − 1) degrees of freedom, where the differences of one arm give n − 1.

Where cells are missing, this is the least-squares fit to the cells that are there.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

DRAWS = 20_000
"""Draws behind a p-value of the test for equal variances: its standard error is 0.0015 at 0.05."""
_SEED = 0


@dataclass(frozen=True)
class Fit:
    """The arms' differences to the first one.

    Attributes:
        differences: [arms − 1], in the unit of the losses.
        spread: standard deviation of the error.
        units: variance of each difference, [arms − 1], in units of ``spread``²; 2/n for n seeds without gaps.
        correlation: of the differences, [arms − 1, arms − 1]; 1/2 without gaps.
        degrees: degrees of freedom of ``spread``.
    """

    differences: np.ndarray
    spread: float
    units: np.ndarray
    correlation: np.ndarray
    degrees: int


def fit(losses: np.ndarray) -> Fit:
    """Fit ``losses`` [arms, seeds]; NaN marks a missing cell. The baseline is the first arm.

    Raises:
        ValueError: an arm shares no seed with the others, or no degree of freedom is left.
    """
    design, values = _design(losses), losses[~np.isnan(losses)]
    inverse = np.linalg.pinv(design.T @ design)
    degrees = len(values) - int(np.linalg.matrix_rank(design))
    arms, columns = len(losses), design.shape[1]
    contrasts = np.zeros((arms - 1, columns))
    contrasts[:, 0] = -1
    contrasts[np.arange(arms - 1), np.arange(1, arms)] = 1
    if degrees < 1 or not np.allclose(contrasts @ inverse @ design.T @ design, contrasts, atol=1e-8):
        raise ValueError("these cells do not determine the differences and their variance")
    # Differences do not depend on the level of the losses; without it less is lost to rounding.
    centred = values - values.mean()
    effects = inverse @ design.T @ centred
    covariance = contrasts @ inverse @ contrasts.T
    units = np.diag(covariance).copy()
    residuals = centred - design @ effects
    return Fit(
        differences=contrasts @ effects,
        spread=float(np.sqrt(residuals @ residuals / degrees)),
        units=units,
        correlation=covariance / np.sqrt(np.outer(units, units)),
        degrees=degrees,
    )


def least_equal(losses: np.ndarray) -> tuple[int, float]:
    """The arm of ``losses`` [arms, seeds] whose errors vary most, and the p-value of the test that all vary alike.

    The statistic is the largest share that one arm has in the sum of squared residuals, each arm's sum divided by the
    degrees of freedom that its cells have in it: Cochran's C (Cochran 1941, Ann. Eugen. 11, 47–52) of the residuals of
    arms and seeds. Under equal variances it depends on the design alone, so its p-value is exact but for the number of
    draws. It needs three arms: the residuals of two are each other's mirror image.
    """
    present = ~np.isnan(losses)
    maker, arm_of, shares = _residual_maker(present.tobytes(), present.shape)
    values = losses[present]
    mean_squares = _mean_squares((values - values.mean()) @ maker, arm_of, shares)
    statistic = _largest_share(mean_squares)
    null = _null(present.tobytes(), present.shape)
    beyond = len(null) - int(np.searchsorted(null, statistic * (1 - 1e-12)))
    return int(np.argmax(mean_squares)), (1 + beyond) / (1 + len(null))


def _design(losses: np.ndarray) -> np.ndarray:
    """One row for each cell that is there: which arm, and which seed."""
    arms, seeds = np.nonzero(~np.isnan(losses))
    design = np.zeros((len(arms), sum(losses.shape)))
    design[np.arange(len(arms)), arms] = 1
    design[np.arange(len(arms)), losses.shape[0] + seeds] = 1
    return design


@lru_cache(maxsize=64)
def _residual_maker(present: bytes, shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The matrix that makes residuals of values [cells, cells], the arm of each cell, the degrees of each arm."""
    cells = np.where(np.frombuffer(present, dtype=bool).reshape(shape), 0.0, np.nan)
    design = _design(cells)
    maker = np.eye(len(design)) - design @ np.linalg.pinv(design)
    arm_of = np.nonzero(~np.isnan(cells))[0]
    return maker, arm_of, np.bincount(arm_of, np.diag(maker), minlength=shape[0])


def _mean_squares(residuals: np.ndarray, arm_of: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """[..., arms]; 0 for an arm that has no degree of freedom."""
    sums = (residuals**2) @ np.eye(len(shares))[arm_of]
    return np.divide(sums, shares, out=np.zeros_like(sums), where=shares > 1e-9)


def _largest_share(mean_squares: np.ndarray) -> np.ndarray:
    return mean_squares.max(-1) / mean_squares.sum(-1)


@lru_cache(maxsize=64)
def _null(present: bytes, shape: tuple[int, int]) -> np.ndarray:
    """The statistic in ``DRAWS`` data sets of equal variances, in rising order."""
    maker, arm_of, shares = _residual_maker(present, shape)
    drawn = np.random.default_rng(_SEED).normal(size=(DRAWS, len(maker)))
    return np.sort(_largest_share(_mean_squares(drawn @ maker, arm_of, shares)))
