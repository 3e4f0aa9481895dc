"""Families of runs → the judged differences of their rows (``judging.py``), written into the results."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from eval.compare.curves import READ
from eval.compare.grouping import Family, Group
from eval.compare.judging import Comparison, Pool, judge, make_pool, seeds_needed
from eval.compare.results import FamilyResult, GroupResult, Test
from eval.compare.statistics import LEVEL
from eval.compare.warn import rules_out


def judge_families(families: Sequence[Family], results: Sequence[FamilyResult]) -> int:
    """Set ``difference`` and ``seeds_needed`` of all rows that can be judged; return how many these are."""
    tables = [_losses(family) for family in families]
    pools = [make_pool(table) for table in tables]
    comparisons = sum(pool.judged for pool in pools)
    for family, result, table, pool in zip(families, results, tables, pools, strict=True):
        if family.baseline is None:
            continue
        base, rows = family.baseline, _judged(family)
        by_group = dict(zip(map(id, family.all), result.groups, strict=True))
        result.test = _test(pool, [row.label for row in rows], base.label, table)
        found = judge(table, pool, comparisons) if pool.judged else [None] * len(rows)
        for variant, (row, one) in enumerate(zip(rows, found, strict=True)):
            if one is not None:
                _set(by_group[id(row)], _open(one, row, base), variant, pool, comparisons)
    return comparisons


def _judged(family: Family) -> list[Group]:
    return [group for group in family.groups if not family.is_reference(group)]


def _losses(family: Family) -> np.ndarray:
    """Final losses [1 + variants, seeds], the baseline first; NaN where there is no such run."""
    if family.baseline is None:
        return np.empty((1, 0))
    read, arms = READ[family.measure], [family.baseline, *_judged(family)]
    seeds = list(dict.fromkeys(run.pair for arm in arms for run in arm.runs if run.seed is not None))
    losses = np.full((len(arms), len(seeds)), np.nan)
    for row, arm in zip(losses, arms, strict=True):
        for run in arm.runs:
            if run.seed is not None:
                row[seeds.index(run.pair)] = read(run).final
    return losses


def _open(found: Comparison, row: Group, base: Group) -> Comparison:
    """Runs that diverged or failed leave open how high the loss of their group is, and so one end of the interval."""
    low = -math.inf if rules_out(base) else found.low
    high = math.inf if rules_out(row) else found.high
    possible = low > -math.inf if found.mean > 0 else high < math.inf
    return replace(found, low=low, high=high, p=found.p if possible else None)


def _set(group: GroupResult, found: Comparison, variant: int, pool: Pool, comparisons: int) -> None:
    group.difference = found
    if not found.sure and found.p is not None:
        together = len(pool.pooled) if variant in pool.pooled else 1
        group.seeds_needed = seeds_needed(found.mean / found.sd, together, LEVEL * together / comparisons)


def _test(pool: Pool, labels: Sequence[str], base: str, table: np.ndarray) -> Test | None:
    if not pool.judged:
        return None
    return Test(
        pooled=[labels[variant] for variant in pool.pooled],
        paired=[labels[variant] for variant in pool.paired],
        spread=pool.fit.spread if pool.fit else None,
        degrees=pool.fit.degrees if pool.fit else None,
        equal_p=pool.equal_p,
        set_aside={base if arm < 0 else labels[arm]: p for arm, p in pool.set_aside},
        complete=not np.isnan(table[[0, *(variant + 1 for variant in pool.pooled)]]).any(),
        exact=pool.exact,
    )
