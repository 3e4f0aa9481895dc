"""A study into its runs: which there are, what each sets, and what it may differ in."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torchtitan_ext.errors import UserError
from torchtitan_ext.study import controls
from torchtitan_ext.study.cases import Case, Group
from torchtitan_ext.study.check import check_widths, control_label
from torchtitan_ext.study.differences import check_intended, differences_between
from torchtitan_ext.study.dropped import dropped_runs
from torchtitan_ext.study.exclusions import Exclusions
from torchtitan_ext.study.measured import begun_steps, common_step_seconds
from torchtitan_ext.study.planned import Plan, PlannedRun, TrainCommand
from torchtitan_ext.study.record import check_folder
from torchtitan_ext.study.run_keys import Launch, RunKeys
from torchtitan_ext.study.schema import Study


def plan_study(study: Study, ranks: int, vocab_size: int | None = None) -> Plan:
    """Work out the runs of ``study``, for launches on ``ranks`` processes.

    Nothing is written. The data set has to be there, since shapes follow from its vocabulary, or else the size of its
    vocabulary be given; such a plan is compared with no run folder. Wall-clock controls are solved from the run folders
    that there are.

    Raises:
        UserError: something in the study, its base run file or its folder does not fit; one line that says where.
    """
    excluded, launch = Exclusions(study), Launch(ranks, vocab_size)
    runs: list[PlannedRun] = []
    for size, keys in _sizes(study):
        for lr, keys_of_lr in _learning_rates(study, keys):
            runs += _Planner(study, Group(study, size, keys_of_lr, launch), lr, excluded).runs()
    excluded.check_all_used()
    if not runs:
        raise UserError(f"{study.origin('exclude')}: every run of {study.name} is excluded; nothing is left to run")
    longest = max(run.resolved.steps for run in runs if run.resolved is not None)
    if study.stop is not None and study.stop.at_step > longest:
        where = study.origin("stop", "at_step")
        raise UserError(f"{where}: stop.at_step is {study.stop.at_step}, but the longest run has {longest} steps")
    plan = Plan(study, ranks, tuple(runs))
    if vocab_size is None:
        check_folder(plan)
    return plan


def _sizes(study: Study) -> Iterator[tuple[str, RunKeys]]:
    """Each size, with the run keys that all of its runs have."""
    common = RunKeys()
    for key, value in study.set.items():
        common = common.with_values({key: value}, study.origin("set", key))
    if study.sizes is None:
        size_of_base = common.load(study.base_file).model.size
        check_widths(study, [size_of_base])
        yield size_of_base, common
        return
    check_widths(study, [size.size for size in study.sizes])
    for number, size in enumerate(study.sizes):
        keys = common
        for key, value in size.set.items():
            keys = keys.with_values({key: value}, study.origin("sizes", number, "set", key))
        yield size.size, keys.with_values({"model.size": size.size}, study.origin("sizes", number))


def _learning_rates(study: Study, keys: RunKeys) -> Iterator[tuple[float | None, RunKeys]]:
    if study.learning_rates is None:
        yield None, keys
    for lr in study.learning_rates or []:
        yield lr, keys.with_values({"optimizer.lr": lr}, study.origin("learning_rates"))


class _Planner:
    """The runs of one size and learning rate."""

    def __init__(self, study: Study, group: Group, lr: float | None, excluded: Exclusions) -> None:
        self.study, self.group, self.lr, self.excluded = study, group, lr, excluded
        self.planned: list[PlannedRun] = []
        self.baselines: dict[int, PlannedRun] = {}

    def runs(self) -> list[PlannedRun]:
        """The runs in the order to start them: seed by seed the baseline and what is compared with it, and last the
        wall-clock controls, which wait for the others of all seeds."""
        baseline = self.study.entry(self.study.baseline)
        seeds = {entry.label: self._seeds(entry.size, entry.label) for entry in self.study.variants}
        cases = {
            entry.label: self.group.baseline() if entry is baseline else self.group.variant(entry)
            for entry in sorted(self.study.variants, key=lambda entry: entry is not baseline)
            if seeds[entry.label]
        }
        waiting: list[tuple[Case, str]] = []
        for control, location in self.study.all_controls():
            place = self.study.origin(*location)
            label = control_label(control.of, control.kind)
            size = self.study.entry(control.of).size if control.kind == "detached" else None
            seeds[label] = self._seeds(size, control.of, label)
            if not seeds[label] or control.of not in cases:
                continue
            variant = cases[control.of]
            if control.kind == "detached":
                cases[label] = controls.detached(variant, place)
            elif control.kind == "wider":
                cases[label] = controls.wider(self.group, variant, control.width_at(self.group.size), place)
            else:
                waiting.append((variant, place))
        for seed in self.study.seeds:
            for label, case in cases.items():
                if seed in seeds[label]:
                    self._plan(case, seed)
        for variant, place in waiting:
            case, after = self._wall_clock(variant, place)
            for seed in seeds[case.entry]:
                self._plan(case, seed, after)
        return self.planned

    def _seeds(self, size: str | None, *labels: str) -> list[int]:
        """The seeds at which a run that goes by ``labels`` is not left out."""
        return [
            seed for seed in self.study.seeds if not self.excluded.hold(labels, size or self.group.size, self.lr, seed)
        ]

    def _wall_clock(self, variant: Case, place: str) -> tuple[Case, tuple[str, ...]]:
        """The wall-clock control of a variant, and the runs whose step times it needs."""
        label = self._label(control_label(variant.entry, "wall_clock"), self.group.size)
        dropped = dropped_runs(self.study.folder)
        own = [run for run in self.baselines.values() if run.name not in dropped]
        label_of_other = self._label(variant.entry, variant.size)
        other = [run for run in self.planned if run.label == label_of_other and run.name not in dropped]
        own_seconds = common_step_seconds(run.folder for run in own)
        other_seconds = common_step_seconds(run.folder for run in other)
        seconds = (own_seconds, other_seconds) if own_seconds and other_seconds else None
        begun = begun_steps(self.study.folder / _name(label, seed) for seed in self.study.seeds)
        case = controls.wall_clock(self.group, variant, seconds, begun, place)
        return case, tuple(run.name for run in (*own, *other))

    def _label(self, entry: str, size: str) -> str:
        return f"{entry}-{size}" if self.lr is None else f"{entry}-{size}-lr{self.lr!r}"

    def _plan(self, case: Case, seed: int, after: tuple[str, ...] = ()) -> None:
        """Add the run of ``case`` with ``seed``."""
        label = self._label(case.entry, case.size)
        name = _name(label, seed)
        is_baseline = case.entry == self.study.baseline
        if not is_baseline and seed not in self.baselines:
            raise UserError(f"{case.place}: {name} has no baseline, which is excluded; exclude this run too")
        baseline = None if is_baseline else self.baselines[seed]
        run = PlannedRun(
            name=name,
            folder=self.study.folder / name,
            label=label,
            entry=case.entry,
            variant=case.variant,
            size=case.size,
            seed=seed,
            lr=self.lr,
            control=case.control,
            baseline=baseline.name if baseline else None,
            after=after,
            command=None,
            matches=case.matches,
        )
        if case.keys is not None:
            own: dict[str, Any] = {"name": name, "folder": str(run.folder), "seed": seed, "data.seed": seed}
            if baseline is not None:
                own["logging.baseline"] = str(baseline.folder)
                if self.study.stop is not None:
                    own["training.stop_behind"] = self.study.stop.behind
                    own["training.stop_behind_at"] = self.study.stop.at_step
            keys = RunKeys({**own, **case.keys.values}, {**dict.fromkeys(own, case.place), **case.keys.places})
            resolved = keys.resolve(keys.load(self.study.base_file), self.group.launch)
            differences = differences_between(resolved, baseline.resolved if baseline else None)
            check_intended(differences, case.intended, f"{case.place}: {name}")
            command = TrainCommand(self.study.base_file, keys.tokens(), resolved)
            run = replace(run, command=command, differences=differences)
        self.planned.append(run)
        if is_baseline:
            self.baselines[seed] = run


def _name(label: str, seed: int) -> str:
    return f"{label}-s{seed}"
