"""Families of runs → results: every number of the report."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from eval.compare.bands import difference_bands, loss_bands, training_bands
from eval.compare.curves import READ, ReadCurve, has_axis, learning_rate_share, reaches, value_at
from eval.compare.grouping import Family, Group
from eval.compare.judged import judge_families
from eval.compare.numbers import size_order
from eval.compare.provenance import provenance
from eval.compare.results import (
    UNDECIDED,
    AtEqual,
    BitsPerByte,
    Cost,
    EveryPair,
    FamilyResult,
    GroupResult,
    Lost,
    MemoryBudget,
    Reach,
    Results,
    SeedPair,
    SweepResult,
)
from eval.compare.run import AXES, COSTS, DIVERGED, Curve, LeftOut, Run
from eval.compare.statistics import Estimate, estimate
from eval.compare.tasks import task_rows
from eval.compare.warn import group_notes, reservations, unlike, warnings
from eval.scaling.scale import scale

Pairs = Sequence[tuple[Run, Run]]
_SAME_MEMORY = 0.005


def compare(families: Sequence[Family], left_out: Sequence[LeftOut]) -> Results:
    """Compare each family's groups with its baseline."""
    families = sorted(families, key=lambda family: size_order(family.size))
    results = [_family(family) for family in families]
    comparisons = judge_families(families, results)
    for family in results:
        for group in family.groups:
            group.verdict = _verdict(group)
            group.at_equal = {axis: _as_judged(found, group, family) for axis, found in group.at_equal.items()}
    said = [
        {
            "name": out.name,
            "why": out.why,
            "label": out.label,
            "size": out.size,
            "seed": out.seed,
            "fate": out.fate,
            "diverged": out.fate == DIVERGED,
        }
        for out in left_out
    ]
    return Results(results, said, comparisons, scale(families, READ))


def _verdict(group: GroupResult) -> str:
    """``better``, ``worse`` or ``cannot tell``; empty for a baseline of whatever length."""
    found = group.difference
    if found is None:
        return UNDECIDED if group.at_equal else ""
    return UNDECIDED if not found.sure else "better" if found.mean < 0 else "worse"


def _as_judged(found: AtEqual, group: GroupResult, family: FamilyResult) -> AtEqual:
    """With the difference to the baseline that the verdict rests on, or without an interval where there is none."""
    if found.final is None or found.against != family.baseline:
        return found
    return replace(found, final=group.difference or Estimate(found.final.n, found.final.mean))


def _family(family: Family) -> FamilyResult:
    read = READ[family.measure]
    groups = [_group(group, family, read) for group in family.all]
    return FamilyResult(
        size=family.size,
        baseline=family.baseline.label if family.baseline else None,
        measure=family.measure,
        per_device=any(run.per_device for group in family.all for run in group.runs),
        groups=groups,
        test=None,
        sweeps=[SweepResult(group.label, group.sweep, group.sweep.edge) for group in family.all if group.sweep],
        memory=_memory(groups),
        every_pair=_every_pair(family.all, read) if len(family.all) > 2 else [],
        bits_per_byte=_bits_per_byte(family),
        tasks=task_rows(family),
        data=family.all[0].first.data,
        warnings=warnings(family),
        provenance=provenance(family),
    )


def _group(group: Group, family: Family, read: ReadCurve) -> GroupResult:
    base, reference = family.baseline, family.is_reference(group)
    pairs = [] if base is None or group is base else group.paired_with(base)
    compared = base is not None and group is not base and not reference
    rulers = [*([base] if base else []), *(other for other in family.groups if family.is_reference(other))]
    partner = {id(run): other for run, other in pairs}
    rows = []
    for run in group.runs:
        loss, other = read(run).final, partner.get(id(run))
        theirs = read(other).final if other else None
        rows.append(SeedPair(run.name, run.seed, loss, theirs, None if theirs is None else loss - theirs))
    differences = [row.difference for row in rows if row.difference is not None]
    shared = [row.loss for row in rows if row.difference is not None] or [row.loss for row in rows]
    return GroupResult(
        label=group.label,
        variant=group.first.variant,
        control=group.first.control,
        reference=reference,
        seeds=[run.seed for run in group.runs],
        steps=int(max(read(run).steps[-1] for run in group.runs)),
        loss=float(np.mean(shared)),
        pairs=rows,
        paired=estimate(differences) if differences else None,
        reservations=reservations(group, base) if compared and base else [],
        lost=[Lost(out.name, out.fate or "", out.why) for out in group.lost],
        unlike=unlike(group, base) if compared and base else [],
        costs=_costs(group, base),
        at_equal={axis: _at_equal(group, rulers, axis, read) for axis in AXES} if compared else {},
        reach={axis: found for axis in AXES if compared and (found := _reach(pairs, axis, read)) is not None},
        curves=loss_bands(group.runs, read),
        training_curves=training_bands(group.runs),
        difference_curves=difference_bands(pairs, read),
        depth_step=group.first.depth.step,
        depth_series=group.first.depth.series,
        depth_maps=group.first.depth.maps,
        notes=group_notes(group, None if group is base else base, len(pairs)),
    )


def _costs(group: Group, base: Group | None) -> dict[str, Cost]:
    costs = {}
    for name in COSTS:
        value = _mean([run.costs[name] for run in group.runs])
        theirs = _mean([run.costs[name] for run in base.runs]) if base else None
        costs[name] = Cost(value, value / theirs if value is not None and theirs else None)
    return costs


def _mean(values: Sequence[float]) -> float | None:
    known = [value for value in values if math.isfinite(value)]
    return float(np.mean(known)) if known else None


def _at_equal(group: Group, rulers: Sequence[Group], axis: str, read: ReadCurve) -> AtEqual:
    """Against that one of ``rulers``, the baseline first, whose runs cost most nearly the same."""
    known = []
    for ruler in rulers:
        curves = [(read(run), read(base)) for run, base in group.paired_with(ruler)]
        if curves and all(has_axis(curve, axis) for pair in curves for curve in pair):
            spent = float(
                np.mean([one.end(axis) for one, _ in curves]) / np.mean([base.end(axis) for _, base in curves])
            )
            known.append((ruler, curves, spent))
    if not known:
        paired = any(group.paired_with(ruler) for ruler in rulers)
        return AtEqual(why_not=f"not every run logged its {axis}" if paired else "no two runs of one seed")
    ruler, curves, spent = min(known, key=lambda item: round(abs(math.log(item[2])), 9))
    final = estimate([one.final - other.final for one, other in curves])
    budget = min(curve.end(axis) for pair in curves for curve in pair)
    losses = [(value_at(one, axis, budget), value_at(other, axis, budget)) for one, other in curves]
    differences = [mine - theirs for mine, theirs in losses if mine is not None and theirs is not None]
    if len(differences) < len(losses):
        return AtEqual(ruler.label, spent, final, why_not="one curve begins only after the other has ended")
    pairs = group.paired_with(ruler)
    return AtEqual(
        against=ruler.label,
        spent=spent,
        final=final,
        budget=budget,
        difference=estimate(differences),
        read_at=min(budget / one.end(axis) for one, _ in curves),
        baseline_read_at=min(budget / other.end(axis) for _, other in curves),
        learning_rate=_mean_rate([run for run, _ in pairs], axis, budget, read),
        baseline_learning_rate=_mean_rate([base for _, base in pairs], axis, budget, read),
    )


def _mean_rate(runs: Sequence[Run], axis: str, budget: float, read: ReadCurve) -> float | None:
    shares = [learning_rate_share(run, read(run), axis, budget) for run in runs]
    return _mean([share for share in shares if share is not None])


def _reach(pairs: Pairs, axis: str, read: ReadCurve) -> Reach | None:
    curves: list[tuple[Curve, Curve]] = [(read(run), read(base)) for run, base in pairs]
    if not curves or not all(has_axis(curve, axis) for pair in curves for curve in pair):
        return None
    crossings = [(reaches(one, axis, other.final), other.end(axis)) for one, other in curves]
    per_seed = [whole / crossing.budget if crossing else None for crossing, whole in crossings]
    known = [ratio for ratio in per_seed if ratio is not None]
    return Reach(
        per_seed=per_seed,
        speed_up=math.exp(float(np.mean(np.log(known)))) if len(known) == len(per_seed) else None,
        at_least=any(crossing is not None and crossing.at_most for crossing, _ in crossings),
    )


def _memory(groups: Sequence[GroupResult]) -> list[MemoryBudget]:
    """One budget for each group's own peak, smallest first; peaks within ``_SAME_MEMORY`` of another are one."""
    peaks = [(group.costs["peak_memory_gib"].value or 0.0, group) for group in groups if not group.reference]
    if len(peaks) < 2 or not all(peak for peak, _ in peaks):
        return []
    peaks.sort(key=lambda item: item[0])
    rows: list[MemoryBudget] = []
    for index, (peak, _) in enumerate(peaks):
        if index + 1 < len(peaks) and peaks[index + 1][0] <= peak * (1 + _SAME_MEMORY):
            continue
        fitting = [group for _, group in peaks[: index + 1]]
        added = [group.label for group in fitting[len(rows[-1].fits) if rows else 0 :]]
        best = min(fitting, key=lambda group: group.loss)
        rows.append(MemoryBudget(peak, added, [group.label for group in fitting], best.label, best.loss))
    return rows


def _every_pair(groups: Sequence[Group], read: ReadCurve) -> list[EveryPair]:
    found = []
    for row in groups:
        for column in groups:
            differences = [read(run).final - read(base).final for run, base in row.paired_with(column)]
            if row is not column and differences:
                found.append(EveryPair(row.label, column.label, estimate(differences)))
    return found


def _bits_per_byte(family: Family) -> list[BitsPerByte]:
    base = family.baseline
    if base is None or not family.other_tokens:
        return []
    rows = [BitsPerByte(base.label, _final_bits(base), None)]
    for group in family.other_tokens:
        differences = [run.bits_per_byte.final - other.bits_per_byte.final for run, other in group.paired_with(base)]
        found: Estimate | None = estimate(differences) if differences else None
        rows.append(BitsPerByte(group.label, _final_bits(group), found))
    return rows


def _final_bits(group: Group) -> float:
    return float(np.mean([run.bits_per_byte.final for run in group.runs]))
