"""What a plan is: the runs of a study, with nothing left to decide but what has to be measured first."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torchtitan_ext.errors import UserError, nearest
from torchtitan_ext.resolve import ResolvedRun
from torchtitan_ext.study.schema import Study
from torchtitan_ext.study.solve import Match


@dataclass(frozen=True)
class TrainCommand:
    """How a run is started. There is none for a run that is not solved, which can therefore not be started.

    Attributes:
        config_file: the base run file.
        overrides: what the run sets over it.
        resolved: the run that both give, with nothing left open.
    """

    config_file: Path
    overrides: tuple[str, ...]
    resolved: ResolvedRun

    @property
    def arguments(self) -> list[str]:
        """The arguments of `torchtitan_ext.train`."""
        return ["--config-file", str(self.config_file), *self.overrides]


@dataclass(frozen=True)
class PlannedRun:
    """One run of a study.

    Attributes:
        name: unique in the study; also the name of the run's folder.
        folder: the run folder.
        label: the run without its seed.
        entry: the label of its entry in the study, or of the control.
        variant: its ``model.variant``.
        size: its ``model.size``.
        seed: of the weights and of the data order.
        lr: its learning rate, where the study varies it.
        control: ``detached``, ``wider`` or ``wall_clock``; None for an entry of ``variants``.
        baseline: name of the run it is compared with; None for a baseline run.
        after: names of the runs that must have ended before this one can be solved and started.
        command: how it is started; None for a wall-clock control until the step times that it needs are measured.
        matches: what was solved for it, and how well it met the budget.
        differences: what it trains otherwise than its baseline: run keys with its own and the baseline's value.
    """

    name: str
    folder: Path
    label: str
    entry: str
    variant: str
    size: str
    seed: int
    lr: float | None
    control: str | None
    baseline: str | None
    after: tuple[str, ...]
    command: TrainCommand | None
    matches: tuple[Match, ...] = ()
    differences: tuple[tuple[str, Any, Any], ...] = ()

    @property
    def resolved(self) -> ResolvedRun | None:
        """The run with nothing left open; None while it is not solved."""
        return self.command.resolved if self.command is not None else None


@dataclass(frozen=True)
class Compared:
    """A solved run beside its baseline.

    Attributes:
        run: the run.
        resolved: what it trains.
        against: label of its baseline.
        baseline: what the baseline trains.
    """

    run: PlannedRun
    resolved: ResolvedRun
    against: str
    baseline: ResolvedRun


RunsByLabel = dict[str, list[PlannedRun]]
"""Runs by label: those that differ in seed alone."""


def solved(groups: RunsByLabel) -> Iterator[tuple[PlannedRun, ResolvedRun]]:
    """Each label that is solved, by its first run and what that trains."""
    for run in (runs[0] for runs in groups.values()):
        if run.resolved is not None:
            yield run, run.resolved


@dataclass(frozen=True)
class Plan:
    """The runs of a study in the order in which to start them; ``ranks`` processes each."""

    study: Study
    ranks: int
    runs: tuple[PlannedRun, ...]

    def run(self, name: str) -> PlannedRun:
        """The run called ``name``, which must be there."""
        return next(run for run in self.runs if run.name == name)

    def only(self, names: Sequence[str]) -> "Plan":
        """The same plan with the runs of these names. Raises ``UserError`` where one is not a run's."""
        chosen = self.checked_names(names)
        return replace(self, runs=tuple(run for run in self.runs if run.name in chosen))

    def checked_names(self, names: Sequence[str]) -> Sequence[str]:
        """``names``, each of which must be that of a run. Raises ``UserError`` with the nearest name else."""
        known = [run.name for run in self.runs]
        for name in names:
            if name not in known:
                raise UserError(f"{name} is not a run of {self.study.name}; {nearest(name, known)}")
        return names

    def compared(self) -> Iterator[Compared]:
        """Each label but the baselines' that is solved, by its first run, in the plan's order."""
        for run, resolved in solved(self.by_label()):
            baseline = None if run.baseline is None else self.run(run.baseline)
            if baseline is not None and baseline.resolved is not None:
                yield Compared(run, resolved, baseline.label, baseline.resolved)

    def by_label(self) -> RunsByLabel:
        """The runs grouped with those that differ from them in seed alone, in the plan's order."""
        groups: RunsByLabel = {}
        for run in self.runs:
            groups.setdefault(run.label, []).append(run)
        return groups
