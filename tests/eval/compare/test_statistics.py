"""Against scipy called directly, and hand-computed examples."""

import math

import pytest
from scipy import stats

from eval.compare.statistics import estimate


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
    assert (found.sd, found.low, found.high, found.p) == (0.0, None, None, None)


def test_no_difference_at_all() -> None:
    found = estimate([0.0, 0.0, 0.0])
    assert (found.mean, found.p, found.sign_p) == (0.0, 1.0, 1.0)


def test_ties_do_not_count_in_the_sign_test() -> None:
    assert estimate([-1.0, -2.0, 0.0]).sign_p == 0.5  # two of two: 2 · (1/2)²
