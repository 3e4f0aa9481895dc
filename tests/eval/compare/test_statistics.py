"""Against scipy called directly, hand-computed examples and published tables."""

import math

import pytest
from scipy import integrate, stats

from eval.compare.statistics import estimate, holm, seeds_needed


def test_a_paired_difference_is_scipys_paired_t_test() -> None:
    variant, baseline = [4.10, 4.13, 4.08, 4.15], [4.14, 4.15, 4.15, 4.16]
    found = estimate([a - b for a, b in zip(variant, baseline, strict=True)])
    reference = stats.ttest_rel(variant, baseline)
    low, high = reference.confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((low, high))
    assert found.p == pytest.approx(reference.pvalue)
    assert found.sign_p == 2 / 16  # four of four: 2 · (1/2)⁴


def test_an_interval_by_hand() -> None:
    """Differences 1, 2, 3: mean 2, SD 1; t(0.975; 2) = 4.303 (any table), so 2 ± 4.303/√3 = 2 ± 2.484."""
    found = estimate([1.0, 2.0, 3.0])
    assert found.mean == 2.0
    assert found.sd == 1.0
    assert found.low == pytest.approx(2 - 2.484, abs=1e-3)
    assert found.high == pytest.approx(2 + 2.484, abs=1e-3)


def test_one_seed_tells_nothing_and_two_tell_little() -> None:
    one = estimate([-0.05])
    assert (one.mean, one.low, one.p) == (-0.05, None, None)
    two = estimate([-0.05, -0.04])
    assert two.low is not None
    assert two.high is not None
    # One degree of freedom: t = 12.706, so half the width is 12.706 · 0.00707 / √2.
    assert two.high - two.low == pytest.approx(2 * 12.706 * 0.0070711 / math.sqrt(2), rel=1e-4)
    assert two.low < 0 < two.high


@pytest.mark.parametrize("value", [-0.05, 0.1 + 0.2])
def test_equal_differences_have_no_spread_to_test_against(value: float) -> None:
    found = estimate([value] * 3)
    assert (found.low, found.high, found.p) == (found.mean, found.mean, None)


def test_no_difference_at_all() -> None:
    found = estimate([0.0, 0.0, 0.0])
    assert (found.mean, found.p, found.sign_p) == (0.0, 1.0, 1.0)


def test_ties_do_not_count_in_the_sign_test() -> None:
    assert estimate([-1.0, -2.0, 0.0]).sign_p == 0.5  # two of two: 2 · (1/2)²


@pytest.mark.parametrize(("effect", "pairs"), [(0.2, 199), (0.5, 34), (0.8, 15), (1.0, 10)])
def test_seeds_needed_agree_with_published_tables(effect: float, pairs: int) -> None:
    """Paired t-test, two-sided 0.05, power 0.8: the values that G*Power gives."""
    assert seeds_needed(effect) == seeds_needed(-effect) == pairs


def power(effect: float, n: int, level: float) -> float:
    """Of the two-sided paired t-test: T = (Z + effect · √n) / √(V / (n − 1)), V chi-square; by quadrature over V."""
    critical, shift, degrees = stats.t.ppf(1 - level / 2, n - 1), effect * math.sqrt(n), n - 1

    def beyond(v: float) -> float:
        edge = critical * math.sqrt(v / degrees)
        return (stats.norm.sf(edge - shift) + stats.norm.cdf(-edge - shift)) * stats.chi2.pdf(v, degrees)

    return integrate.quad(beyond, 0, stats.chi2.ppf(1 - 1e-12, degrees))[0]


@pytest.mark.parametrize("level", [0.05, 0.05 / 3, 0.005])
def test_seeds_needed_at_a_corrected_level(level: float) -> None:
    needed = seeds_needed(0.9, level)
    assert needed is not None
    assert power(0.9, needed - 1, level) < 0.8 <= power(0.9, needed, level)


def test_seeds_needed_at_the_edges() -> None:
    assert seeds_needed(0.0) is None
    assert seeds_needed(1e6) == 2


def test_holm_by_hand() -> None:
    """0.01·4, then 0.015·3, then 0.03·2, then 0.04·1 raised to what came before."""
    assert holm([0.01, 0.04, 0.03, 0.015]) == pytest.approx([0.04, 0.06, 0.06, 0.045])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([]) == []
