"""Arms and seeds: against the textbook formulas, and by simulation."""

import numpy as np
import pytest
from scipy import stats

from eval.compare.blocks import fit, least_equal

LOSSES = np.array([[4.00, 4.06, 3.95], [3.95, 4.00, 3.91], [3.99, 4.07, 3.94], [4.02, 4.05, 3.99]])


def test_without_gaps_it_is_the_two_way_analysis_of_variance() -> None:
    found = fit(LOSSES)
    residuals = LOSSES - LOSSES.mean(1, keepdims=True) - LOSSES.mean(0) + LOSSES.mean()
    assert found.differences == pytest.approx(LOSSES[1:].mean(1) - LOSSES[0].mean())
    assert found.degrees == 3 * 2
    assert found.spread == pytest.approx(np.sqrt((residuals**2).sum() / 6))
    assert found.units == pytest.approx([2 / 3] * 3)
    assert found.correlation == pytest.approx(0.5 + 0.5 * np.eye(3))


def test_one_variant_is_the_paired_t_test() -> None:
    found = fit(LOSSES[:2])
    t = found.differences[0] / (found.spread * np.sqrt(found.units[0]))
    assert found.degrees == 2
    assert t == pytest.approx(stats.ttest_rel(LOSSES[1], LOSSES[0]).statistic)


def test_seeds_take_nothing_from_the_differences() -> None:
    moved = fit(LOSSES + np.array([0.7, -3.0, 0.1]))
    assert moved.differences == pytest.approx(fit(LOSSES).differences)
    assert moved.spread == pytest.approx(fit(LOSSES).spread)


def test_gaps_are_filled_as_least_squares_does() -> None:
    """Against an explicit dummy regression, whose covariance is scipy-free linear algebra."""
    gaps = LOSSES.copy()
    gaps[1, 0] = gaps[3, 2] = np.nan
    found = fit(gaps)
    cells = [(arm, seed) for arm in range(4) for seed in range(3) if not np.isnan(gaps[arm, seed])]
    # Level, three arms, two seeds.
    design = np.array([[1, *(arm == i for i in (1, 2, 3)), *(seed == j for j in (1, 2))] for arm, seed in cells], float)
    values = np.array([gaps[cell] for cell in cells])
    effects, (rest,), _, _ = np.linalg.lstsq(design, values, rcond=None)
    covariance = np.linalg.inv(design.T @ design)[1:4, 1:4]
    assert found.degrees == 10 - 6
    assert found.differences == pytest.approx(effects[1:4])
    assert found.spread == pytest.approx(np.sqrt(rest / 4))
    assert found.units == pytest.approx(np.diag(covariance))
    scale = np.sqrt(np.diag(covariance))
    assert found.correlation == pytest.approx(covariance / np.outer(scale, scale))


def test_cells_that_do_not_determine_the_differences_are_refused() -> None:
    apart = np.array([[4.0, 4.1, np.nan, np.nan], [np.nan, np.nan, 4.0, 4.1]])
    with pytest.raises(ValueError, match="do not determine"):
        fit(apart)
    with pytest.raises(ValueError, match="do not determine"):
        fit(np.array([[4.0], [4.1]]))


@pytest.mark.parametrize("gap", [False, True])
def test_equal_variances_are_doubted_as_often_as_the_level_says(gap: bool) -> None:
    """Seeds, levels and scale do not matter; 2,000 p-values are uniform but for their number."""
    rng = np.random.default_rng(1)
    p = []
    for _ in range(2000):
        losses = 5 + rng.normal(size=(5, 1)) + rng.normal(size=3) + 0.013 * rng.normal(size=(5, 3))
        if gap:
            losses[2, 0] = np.nan
        p.append(least_equal(losses)[1])
    assert stats.kstest(p, "uniform").pvalue > 0.01


def test_the_arm_whose_errors_vary_most_is_found() -> None:
    rng = np.random.default_rng(2)
    for arm in (0, 3):
        found = []
        for _ in range(200):
            losses = rng.normal(size=(5, 6))
            losses[arm] *= 6
            found.append(least_equal(losses))
        assert np.mean([found_arm == arm and p < 0.01 for found_arm, p in found]) > 0.85
