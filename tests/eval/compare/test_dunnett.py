"""Against scipy's multivariate t, simulated data and Dunnett's published tables."""

import math

import numpy as np
import pytest
from scipy import integrate, stats

from eval.compare.dunnett import adjusted_p, all_within, balanced, critical_value, one_factor, power


@pytest.mark.parametrize(
    ("factors", "degrees", "bound"),
    [
        (balanced(4), 8, 3.0),
        (balanced(3), 2, 5.0),
        (balanced(6), 30, 2.2),
        ((0.3, 0.9, 0.7), 6, 2.5),
        ((0.6, -0.6), 4, 2.0),
        ((0.0, 0.0, 0.0), 5, 2.6),
    ],
)
def test_the_integral_is_scipys_multivariate_t(factors: tuple[float, ...], degrees: int, bound: float) -> None:
    shape = np.outer(factors, factors)
    np.fill_diagonal(shape, 1.0)
    edge = np.full(len(factors), bound)
    reference = stats.multivariate_t.cdf(
        edge, shape=shape, df=degrees, lower_limit=-edge, maxpts=400_000, random_state=0
    )
    assert all_within(bound, factors, degrees) == pytest.approx(reference, abs=1e-4)


@pytest.mark.parametrize(
    ("compared", "degrees", "bound"),
    [(1, 5, 2.57), (2, 5, 3.03), (3, 5, 3.29), (4, 5, 3.48), (5, 5, 3.62), (2, 10, 2.57), (3, 10, 2.76), (4, 10, 2.89),
     (2, 20, 2.38), (3, 20, 2.54), (4, 20, 2.65)],
)  # fmt: skip
def test_critical_values_are_those_of_dunnetts_table(compared: int, degrees: int, bound: float) -> None:
    """Dunnett 1964 (Biometrics 20, 482–491), two-sided 5%, equal numbers."""
    assert critical_value(0.05, balanced(compared), degrees) == pytest.approx(bound, abs=0.006)


def test_p_values_and_critical_values_are_of_one_distribution() -> None:
    for level in (0.05, 0.0125, 1e-6):
        bound = critical_value(level, balanced(4), 8)
        assert adjusted_p(-bound, balanced(4), 8) == pytest.approx(level, rel=1e-4)
    assert adjusted_p(0.0, balanced(4), 8) == 1.0


def test_one_arm_is_a_t_test() -> None:
    for degrees in (1, 2, 7, 500):
        assert critical_value(0.05, balanced(1), degrees) == pytest.approx(stats.t.ppf(0.975, degrees), rel=1e-5)
        assert adjusted_p(2.3, (0.0,), degrees) == pytest.approx(2 * stats.t.sf(2.3, degrees), abs=1e-6)


def test_scipys_own_dunnett_test_agrees() -> None:
    """One-way data: there the degrees of freedom are those of the groups, and the correlations are 1/2 as well."""
    groups = np.random.default_rng(3).normal(size=(4, 5)) + np.array([0.0, 1.2, 0.4, -0.9])[:, None]
    reference = stats.dunnett(*groups[1:], control=groups[0], rng=np.random.default_rng(0))
    spread = math.sqrt(groups.var(axis=1, ddof=1).mean())
    for mean, p in zip(groups[1:].mean(1) - groups[0].mean(), reference.pvalue, strict=True):
        assert adjusted_p(mean / (spread * math.sqrt(2 / 5)), balanced(3), 16) == pytest.approx(p, abs=1e-3)


def test_power_is_that_of_the_noncentral_t() -> None:
    assert power(3.0, 2.0, 3) == pytest.approx(stats.nct.sf(2, 3, 3) + stats.nct.cdf(-2, 3, 3), abs=1e-9)
    # Here scipy's nct.cdf is NaN.
    edge, shift = 8.86, 40.0

    def beyond(s: float) -> float:
        return stats.norm.sf(edge * s - shift) * stats.chi2.pdf(2 * s**2, 2) * 4 * s

    assert power(shift, edge, 2) == pytest.approx(integrate.quad(beyond, 0, 10)[0], abs=1e-8)


def test_factors_are_found_where_there_are_any() -> None:
    factors = np.array([0.5, 0.6, 0.7, 0.8])
    product = np.outer(factors, factors)
    np.fill_diagonal(product, 1.0)
    found = one_factor(product)
    assert found is not None
    assert found == pytest.approx(factors)
    product[0, 1] = product[1, 0] = 0.4
    assert one_factor(product) is None
    assert one_factor(np.eye(1)) == (0.0,)
    two = one_factor(np.array([[1, -0.25], [-0.25, 1]]))
    assert two is not None
    assert two[0] * two[1] == pytest.approx(-0.25)


def test_the_bound_for_other_correlations_is_on_the_safe_side() -> None:
    """A design whose correlations have no product form, by simulation."""
    correlation = np.array([[1, 0.44, 0.44, 0.5], [0.44, 1, 0.35, 0.44], [0.44, 0.35, 1, 0.44], [0.5, 0.44, 0.44, 1]])
    assert one_factor(correlation) is None
    rng = np.random.default_rng(0)
    normal = rng.multivariate_normal(np.zeros(4), correlation, 200_000)
    largest = np.abs(normal / np.sqrt(rng.chisquare(6, (200_000, 1)) / 6)).max(1)
    bound = critical_value(0.05, (0.0,) * 4, 6)
    assert 0.03 < (largest > bound).mean() < 0.05
