"""Runs → groups (runs that differ in their seeds alone) → families (a baseline and what may be compared with it)."""

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from eval.compare.curves import measure_of
from eval.compare.run import DIVERGED, UNFINISHED, LeftOut, Run
from eval.compare.sweeps import Sweep, keep_best, renamed
from torchtitan_ext.errors import UserError, nearest

STANDARD = "standard"
WALL_CLOCK = "wall_clock"
"""The study's control that is the baseline trained for as long as a variant took."""
LENGTH = {"training.steps", "optimizer.warmup_steps", "optimizer.decay_fraction"}
"""Settings that follow from how long a run is."""


@dataclass(frozen=True, eq=False)
class Group:
    """Runs that differ in their seeds alone.

    Attributes:
        lost: those without a final loss, of the same settings as far as that is known.
        sweep: the learning rates of which this group is the best; None where there was one.
    """

    label: str
    runs: tuple[Run, ...]
    lost: tuple[LeftOut, ...] = ()
    sweep: Sweep | None = None

    @property
    def first(self) -> Run:
        return self.runs[0]

    @property
    def diverged(self) -> tuple[LeftOut, ...]:
        return tuple(out for out in self.lost if out.fate == DIVERGED)

    @property
    def called(self) -> tuple[str, str | None]:
        """Label and size: no two groups have both in common."""
        return self.label, self.first.size

    def paired_with(self, other: "Group") -> list[tuple[Run, Run]]:
        """This group's runs with the other's of the same seeds. Two lone runs of unknown seed make a pair too."""
        if len(self.runs) == len(other.runs) == 1 and None in (self.first.seed, other.first.seed):
            return [(self.first, other.first)]
        by_pair = {run.pair: run for run in other.runs if run.seed is not None}
        return [(run, by_pair[run.pair]) for run in self.runs if run.pair in by_pair]


@dataclass(frozen=True)
class Family:
    """Groups of one size whose losses may be compared; those in ``other_tokens`` in bits per byte alone."""

    size: str | None
    baseline: Group | None
    groups: tuple[Group, ...]
    other_tokens: tuple[Group, ...] = ()

    @property
    def all(self) -> tuple[Group, ...]:
        return (*([self.baseline] if self.baseline else []), *self.groups)

    def is_reference(self, group: Group) -> bool:
        """Whether ``group`` is the baseline's model trained for another length: a measure of time, not a variant."""
        if self.baseline is None or group is self.baseline:
            return False
        one, other = group.first, self.baseline.first
        if one.control == WALL_CLOCK:
            return True
        different = {
            key for key in {**one.settings, **other.settings} if one.settings.get(key) != other.settings.get(key)
        }
        return one.variant == other.variant and bool(different) and different <= LENGTH

    @property
    def measure(self) -> str:
        return measure_of(run for group in self.all for run in group.runs)


def make_families(runs: Sequence[Run], left_out: list[LeftOut], baseline: str | None = None) -> list[Family]:
    """Put runs into families, baseline first. What fits nowhere is added to ``left_out``.

    ``baseline`` is a label or variant; by default what the runs' study says, or else the variant ``standard``.

    Raises:
        UserError: no run has that label or variant.
    """
    groups = _groups(runs, left_out, baseline)
    members: dict[tuple[Group | None, str | None], list[Group]] = {}
    for group, base in zip(groups, _baselines(groups, baseline), strict=True):
        found = members.setdefault((base, base.first.size if base else group.first.size), [])
        if group is not base:
            found.append(group)
    families = [_family(base, found, left_out) for (base, _), found in members.items()]
    compared = [family for family in families if len(family.all) + len(family.other_tokens) > 1]
    return [family for family in families if family in compared or _worth_showing(family, compared, left_out)]


def _groups(runs: Sequence[Run], left_out: list[LeftOut], asked: str | None) -> list[Group]:
    """All groups; of those that differ in their learning rate alone the best one, unless ``asked`` names another."""
    by_key: dict[str, dict[str, Run]] = {}
    for run in runs:
        same = by_key.setdefault(_key(run), {})
        twin = next((other for other in same.values() if run.seed is not None and other.pair == run.pair), None)
        if twin is not None:
            left_out.append(LeftOut(run.name, f"the same settings and seed as {twin.name}, which was used"))
        else:
            same[f"{len(same)} {run.name}"] = run
    alike = [tuple(sorted(same.values(), key=_seed)) for same in by_key.values()]
    lost = {id(group): tuple(out for out in left_out if _belongs(out, group[0])) for group in alike}
    groups = _with_labels([Group("", group, lost[id(group)]) for group in alike])
    chosen = keep_best(alike, left_out)
    if not any(sweep for _, sweep in chosen):
        return groups
    best = _with_labels([Group("", renamed(group), lost[id(group)], sweep) for group, sweep in chosen])
    return groups if asked in _names(groups) - _names(best) else best


def _seed(run: Run) -> tuple[bool, int]:
    """Order of the runs of a group: by number, unknown seeds last."""
    return run.seed is None, run.seed or 0


def _names(groups: Sequence[Group]) -> set[str | None]:
    return {name for group in groups for name in (group.label, group.first.label)}


def _belongs(out: LeftOut, first: Run) -> bool:
    """Whether ``out`` was to be one more run of the group of ``first``."""
    if out.fate is None:
        return False
    if out.known is not None:
        return _key(out.known) == _key(first)
    return out.label is not None and (out.label, out.size) == (first.label, first.size)


def _key(run: Run) -> str:
    """What runs have in common that differ in their seeds alone."""
    named = [run.label, run.variant, run.size, run.control]
    return json.dumps([*named, run.settings, run.data], sort_keys=True, default=str)


def _with_labels(groups: Sequence[Group]) -> list[Group]:
    """Give each group its title; of several with the same one, all but the first get a number."""
    labelled: list[Group] = []
    for untitled, title in zip(groups, titles([group.first for group in groups]), strict=True):
        group = replace(untitled, label=title)
        same = sum(other.called == group.called for other in labelled)
        labelled.append(replace(group, label=f"{title} ({same + 1})") if same else group)
    return labelled


def titles(firsts: Sequence[Run], without: Collection[str] = ()) -> list[str]:
    """For one run of each group, its study's label, or its variant; then what tells it from groups of the same size
    that are called so too, apart from settings in ``without``."""
    found = []
    for first in firsts:
        title = first.label or first.variant
        twins = [other for other in firsts if (other.label or other.variant, other.size) == (title, first.size)]
        parts = [title]
        for key in sorted({key for twin in twins for key in twin.settings} - {*without}):
            if len({json.dumps(twin.settings.get(key), default=str) for twin in twins}) > 1:
                parts.append(f"{key.split('.')[-1]} {_short(first.settings.get(key))}")
        if len({json.dumps(twin.data) for twin in twins}) > 1:
            parts.append(f"data {(first.data or {}).get('training data', 'unknown')}")
        found.append(", ".join(parts))
    return found


def without_size(title: str, size: str | None) -> str:
    """What a title is at every size: a study's labels end in the size, or in the size and the learning rate."""
    return re.sub(rf"-{re.escape(size)}(?=$|-lr|,)", "", title, count=1) if size else title


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "default" if value is None else str(value)


def _baselines(groups: list[Group], asked: str | None) -> list[Group | None]:
    """The baseline of each group; a baseline is its own.

    That is ``asked``, or else what the group's study says, or else ``standard``: of several, the one whose settings are
    nearest to the group's. A standard residual with another attention is compared with one that has the standard
    attention, and is the baseline of variants with its own attention.
    """
    wanted = asked or STANDARD
    exact = [group for group in groups if group.label == wanted]
    named_so = [g for g in groups if wanted in (g.first.label, g.first.variant) and g.first.control is None]
    sizes = {group.first.size for group in exact}
    candidates = [*exact, *(group for group in named_so if group.first.size not in sizes)]
    if asked and not candidates:
        raise UserError(f"--baseline {asked}: no run is called so; {nearest(asked, [g.label for g in groups])}")
    named = {group.first.baseline for group in groups} - {None} if not asked else set()
    result: list[Group | None] = []
    for group in groups:
        same_size = [base for base in candidates if base.first.size == group.first.size]
        plain = [base for base in same_size if _has_standard_attention(base)]
        if group.first.label in named:
            choice = [group]
        elif group in candidates and not (group.first.baseline and named):
            choice = [group] if asked or _has_standard_attention(group) or not plain else plain
        elif group.first.baseline and not asked:
            choice = [base for base in groups if base.first.label == group.first.baseline]
        else:
            choice = same_size
        result.append(min(choice, key=lambda base: _differences(base.first, group.first), default=None))
    return result


def _has_standard_attention(group: Group) -> bool:
    return group.first.settings.get("model.attention", STANDARD) == STANDARD


def _differences(one: Run, other: Run) -> int:
    keys = {key for key in {**one.settings, **other.settings} if not key.startswith("depth.")}
    return sum(one.settings.get(key) != other.settings.get(key) for key in keys) + 100 * (
        (one.data != other.data) + (one.size != other.size)
    )


def _family(base: Group | None, members: list[Group], left_out: list[LeftOut]) -> Family:
    kept, other_tokens = [], []
    reference = base or max(members, key=lambda group: sum(group.first.data == other.first.data for other in members))
    for group in members:
        why = _why_not_comparable(reference, group)
        if why is None:
            kept.append(group)
        elif base and group.first.text is not None and group.first.text == reference.first.text:
            other_tokens.append(group)
        else:
            left_out += [LeftOut(run.name, why, group.label) for run in group.runs]
    family = Family(reference.first.size, base, tuple(kept), tuple(other_tokens))
    if family.measure == "heldout":
        family = _only_heldout(family, left_out)
    return replace(family, other_tokens=_with_bits_per_byte(family, base, left_out))


def _only_heldout(family: Family, left_out: list[LeftOut]) -> Family:
    """Drop runs that measured no held-out loss, where others did."""

    def only(group: Group) -> Group:
        without = [run for run in group.runs if not len(run.heldout)]
        why = "it logged no held-out loss (heldout.every: 0)"
        lost = tuple(LeftOut(run.name, why, group.label, run.size, run.seed, UNFINISHED, run) for run in without)
        left_out.extend(lost)
        return replace(group, runs=tuple(run for run in group.runs if len(run.heldout)), lost=(*group.lost, *lost))

    base = only(family.baseline) if family.baseline else None
    kept = tuple(group for group in map(only, family.groups) if group.runs)
    return replace(family, baseline=base if base and base.runs else None, groups=kept)


def _with_bits_per_byte(family: Family, base: Group | None, left_out: list[LeftOut]) -> tuple[Group, ...]:
    """The groups in other tokens, as far as they can be compared with ``base``, which ``family`` may have lost."""
    why = None
    if base and not (family.baseline and all(len(run.bits_per_byte) for run in family.baseline.runs)):
        why = f"it has other tokens than {base.label}, which logged no bits per byte to compare it in"
    kept = []
    for group in family.other_tokens:
        runs = () if why else tuple(run for run in group.runs if len(run.bits_per_byte))
        without = [run for run in group.runs if run not in runs]
        own = f"it has other tokens than {base.label if base else 'the others'} and logged no bits per byte"
        left_out += [LeftOut(run.name, why or own, group.label) for run in without]
        if runs:
            kept.append(replace(group, runs=runs))
    return tuple(kept)


def _why_not_comparable(base: Group, group: Group) -> str | None:
    one, other = base.first.data, group.first.data
    if one == other:
        return None
    if one is None or other is None:
        return (
            "its loss is not compared: event files do not say on which data a loss was measured, and the losses of "
            f"{base.label} are of known data"
            if other is None
            else f"its loss is not compared: the event files of {base.label} do not say on which data it was measured"
        )
    different = [f"{key} {one[key]} in {base.label}, {other[key]} here" for key in one if one[key] != other[key]]
    return (
        f"its loss is not compared: {'; '.join(different)}. Bits per byte would do if both data sets were at the paths "
        "of their run.yaml, held out the same text and all of it were scored (heldout.tokens)"
    )


def _worth_showing(alone: Family, compared: Sequence[Family], left_out: list[LeftOut]) -> bool:
    """A lone baseline is, where its variant is compared at other sizes: it is a rung of a ladder."""
    rungs = {family.baseline.first.variant for family in compared if family.baseline}
    if alone.baseline and alone.baseline.first.variant in rungs and alone.size not in {one.size for one in compared}:
        return True
    for group in alone.all:
        why = f"no other run is compared with {group.label!r}; --baseline LABEL compares across settings too"
        left_out += [LeftOut(run.name, why, group.label) for run in group.runs]
    return False
