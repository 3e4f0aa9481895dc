"""Error rates, power and agreement of what a verdict rests on; and measured losses."""

import math

import numpy as np
import pytest
from scipy import integrate, stats

from eval.compare.judging import FEWEST_PAIRS, Comparison, judge, make_pool, seeds_needed


def judged(losses: np.ndarray) -> list[Comparison | None]:
    pool = make_pool(losses)
    return judge(losses, pool, pool.judged)


BOOKS = np.array(
    [
        [5.180573950164529, 5.1626537599889275, 5.203628913468364],  # standard
        [5.227233011755999, 5.229752925385071, 5.225062194631221],  # control_block
        [5.195690023149339, 5.191766853744639, 5.21661993682028],  # attnres_block
        [5.180071407859543, 5.186044605931684, 5.189812781382628],  # m_gate_kv
        [5.143924890726055, 5.098566936187822, 5.1357611120756985],  # value_residual
    ]
)
"""Measured final losses of the study books_1m, three seeds each."""


def test_measured_losses_that_paired_tests_could_not_tell_apart() -> None:
    found = judged(BOOKS)
    p = [one.p for one in found if one is not None]
    spread = 0.01312951213
    edges = [np.full(4, abs(one.mean) / (spread * math.sqrt(2 / 3))) for one in found if one is not None]
    shape = 0.5 + 0.5 * np.eye(4)
    reference = [
        1 - stats.multivariate_t.cdf(edge, shape=shape, df=8, lower_limit=-edge, maxpts=400_000, random_state=0)
        for edge in edges
    ]
    assert p == pytest.approx(reference, abs=1e-4)
    assert [one.sure for one in found if one is not None] == [True, False, False, True]
    paired = stats.ttest_rel(BOOKS[1:], BOOKS[:1], axis=1).pvalue
    assert min(paired) * 4 > 0.05


def simulated(count: int, seed: int, variants: int = 4, seeds: int = 3) -> np.ndarray:
    rng = np.random.default_rng(seed)
    arms = 5 + rng.normal(size=(count, 1, seeds)) * 0.02
    return arms + rng.normal(size=(count, 1 + variants, seeds)) * 0.0131


def test_without_differences_verdicts_are_as_rare_as_the_level_says() -> None:
    """At 5%, 99 of 100 draws of 600 studies have 17 to 44 with a verdict; the pretest adds at most 6."""
    wrong = [any(one is not None and one.sure for one in judged(study)) for study in simulated(600, 0)]
    assert 17 <= sum(wrong) <= 50


def test_a_true_difference_is_found_far_more_often_than_by_paired_tests() -> None:
    studies = simulated(200, 1)
    studies[:, 4] -= 0.056
    found = np.mean([one is not None and one.high < 0 for one in (judged(study)[3] for study in studies)])
    p = stats.ttest_1samp(studies[:, 1:] - studies[:, :1], 0.0, axis=-1).pvalue
    assert found > 0.92
    assert np.mean(p[:, 3] < 0.05 / 4) < 0.4


@pytest.mark.parametrize("gaps", [[], [(1, 0)], [(1, 0), (2, 1)], [(0, 2)]])
def test_an_interval_holds_0_unless_p_is_below_the_level(gaps: list[tuple[int, int]]) -> None:
    studies = simulated(60, 2) + np.linspace(0, 0.06, 5)[None, :, None]
    seen = set()
    for study in studies:
        for cell in gaps:
            study[cell] = np.nan
        for one in judged(study):
            if one is not None:
                assert one.p is not None
                assert one.sure == (one.p < 0.05)
                assert one.low < one.mean < one.high
                seen.add(one.sure)
    assert seen == {True, False}


def test_an_arm_whose_errors_vary_too_much_is_judged_alone() -> None:
    losses = simulated(1, 3, seeds=6)[0]
    losses[2] += np.array([1.0, -1.0, 0.5, 0.8, -0.9, -0.4])
    pool = make_pool(losses)
    ((variant, p),) = pool.set_aside
    assert (variant, pool.pooled, pool.paired) == (1, (0, 2, 3), (1,))
    assert p < 0.01
    found = judge(losses, pool, 4)[1]
    assert found is not None
    differences = losses[2] - losses[0]
    assert found.method == "paired"
    assert found.p == pytest.approx(min(1, 4 * stats.ttest_1samp(differences, 0).pvalue))
    half = stats.t.ppf(1 - 0.05 / 8, 5) * differences.std(ddof=1) / math.sqrt(6)
    assert (found.low, found.high) == pytest.approx((differences.mean() - half, differences.mean() + half))
    # The others are judged as if they were alone, at three quarters of the level.
    alone = judge(losses[[0, 1, 3, 4]], make_pool(losses[[0, 1, 3, 4]]), 4)
    assert [judge(losses, pool, 4)[index] for index in (0, 2, 3)] == alone


def test_where_the_baseline_varies_too_much_nothing_is_pooled() -> None:
    losses = simulated(1, 4, seeds=6)[0]
    losses[0] += np.array([1.0, -1.0, 0.5, 0.8, -0.9, -0.4])
    pool = make_pool(losses)
    assert pool.set_aside[0][0] == -1
    assert (pool.pooled, pool.paired) == ((), (0, 1, 2, 3))


def test_two_seeds_are_judged_together_or_not_at_all() -> None:
    losses = simulated(1, 5, variants=3, seeds=2)[0]
    assert [one is not None and one.degrees for one in judged(losses)] == [3, 3, 3]
    assert judged(losses[:2]) == [None]


@pytest.mark.parametrize(("effect", "pairs"), [(0.2, 199), (0.5, 34), (0.8, 15), (1.0, 10)])
def test_seeds_needed_agree_with_published_tables(effect: float, pairs: int) -> None:
    """Paired t-test, two-sided 0.05, power 0.8: the values that G*Power gives."""
    assert seeds_needed(effect) == seeds_needed(-effect) == pairs


def power(effect: float, n: int, pooled: int, level: float) -> float:
    """By quadrature over s of the variance, with scipy's critical value where one arm is compared."""
    degrees = pooled * (n - 1)
    if pooled == 1:
        critical = stats.t.ppf(1 - level / 2, degrees)
    else:
        rng = np.random.default_rng(0)
        shared = rng.normal(size=(400_000, 1))
        t = (rng.normal(size=(400_000, pooled)) - shared) / math.sqrt(2)
        t /= np.sqrt(rng.chisquare(degrees, (400_000, 1)) / degrees)
        critical = np.quantile(np.abs(t).max(1), 1 - level)
    shift = effect * math.sqrt(n)

    def beyond(v: float) -> float:
        edge = critical * math.sqrt(v / degrees)
        return (stats.norm.sf(edge - shift) + stats.norm.cdf(-edge - shift)) * stats.chi2.pdf(v, degrees)

    return integrate.quad(beyond, 0, stats.chi2.ppf(1 - 1e-12, degrees))[0]


@pytest.mark.parametrize(("pooled", "level"), [(1, 0.05), (1, 0.05 / 3), (1, 0.005), (4, 0.05), (3, 0.025)])
def test_seeds_needed_have_the_power_and_one_less_has_not(pooled: int, level: float) -> None:
    needed = seeds_needed(0.9, pooled, level)
    assert needed is not None
    assert power(0.9, needed - 1, pooled, level) < 0.8 <= power(0.9, needed, pooled, level)


def test_seeds_needed_at_the_edges() -> None:
    assert seeds_needed(0.0) is None
    assert seeds_needed(1e6) == FEWEST_PAIRS == 3  # two seeds and a paired test give no verdict
    assert seeds_needed(1e6, pooled=4) == 2
    # Where scipy's noncentral t has no number in its tail: an effect of 4 needs more than 3 seeds at 0.05/20.
    needed = seeds_needed(4.0, 1, 0.05 / 20)
    assert needed is not None
    assert power(4.0, needed - 1, 1, 0.05 / 20) < 0.8 <= power(4.0, needed, 1, 0.05 / 20)


def test_an_undecided_row_needs_more_seeds_than_it_has() -> None:
    for study in simulated(15, 6) + np.linspace(0, 0.03, 5)[None, :, None]:
        for one in judged(study):
            if one is not None and not one.sure:
                needed = seeds_needed(one.mean / one.sd, 4)
                assert needed is None or needed > 3
