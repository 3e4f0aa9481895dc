"""How the runs of a study stand, as their folders tell it. Reading changes nothing: it works beside those who train."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torchtitan_ext.follow import Follower
from torchtitan_ext.run_folder import RunFolder
from torchtitan_ext.run_lock import Holder, holder_of
from torchtitan_ext.study import PlannedRun
from torchtitan_ext.study.dropped import dropped_runs

ENDED = ("finished", "diverged", "dropped")
"""States of runs that are not started again: the first two have a result, the third was given up by hand."""

KINDS = {"training": "loss_metrics/global_avg_loss", "heldout": "heldout/loss", "versus": "vs_baseline/loss"}
"""Kinds of records, each with the tag that tells it; a record may be of several kinds."""


@dataclass(frozen=True)
class RunState:
    """How one run stands.

    Attributes:
        state: ``waiting`` (for other runs' results), ``ready`` (to start), ``queued`` (in Slurm's queue), ``running``,
            ``stopped`` (on request, saved), ``interrupted`` (its process is gone, or it is to be longer now), or
            ``finished``, ``diverged``, ``failed``, ``dropped`` (given up by hand).
        step, steps: reached and planned; ``steps`` is None while the run is not solved and not begun.
        reason: why it diverged, failed or was dropped.
        holder: who trains it now.
        training, heldout, versus: its newest records of a training step, of held-out loss and of a comparison with its
            baseline, empty where there is none.
    """

    run: PlannedRun
    state: str
    step: int = 0
    steps: int | None = None
    reason: str | None = None
    holder: Holder | None = None
    training: Mapping[str, Any] = field(default_factory=dict)
    heldout: Mapping[str, Any] = field(default_factory=dict)
    versus: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    @property
    def seconds_left(self) -> float | None:
        """Seconds to the last step at the speed of the newest logged steps; None unless it is running."""
        pace = self.training.get("time_metrics/end_to_end(s)")
        if self.state != "running" or self.steps is None or pace is None:
            return None
        return (self.steps - self.step) * pace


class States:
    """Looks at the runs of a plan, again and again: a look costs what the runs have logged since the last one."""

    def __init__(self) -> None:
        self._followers: dict[str, Follower] = {}
        self._newest: dict[str, dict[str, Any]] = {}

    def look(self, runs: tuple[PlannedRun, ...], queued: frozenset[str] = frozenset()) -> dict[str, RunState]:
        """How each of ``runs`` stands, by name. ``queued``: names of runs that have a job in Slurm's queue."""
        states: dict[str, RunState] = {}
        dropped = {folder: dropped_runs(folder) for folder in {run.folder.parent for run in runs}}
        for run in sorted(runs, key=lambda run: len(run.after)):
            begun = _begun(run)
            if begun is None:
                ready = run.command is not None or all(after in states and states[after].ended for after in run.after)
                begun = RunState(run, "ready" if ready else "waiting", steps=_steps(run))
            reason = dropped[run.folder.parent].get(run.name)
            if reason is not None and begun.state != "running" and not begun.ended:
                begun = replace(begun, state="dropped", reason=reason)
            if run.name in queued and begun.state != "running" and not begun.ended:
                begun = replace(begun, state="queued")
            states[run.name] = replace(begun, **self._records(run))
        return {run.name: states[run.name] for run in runs}

    def _records(self, run: PlannedRun) -> dict[str, Any]:
        """The newest record of each kind, by the kind's name in ``RunState``."""
        follower = self._followers.setdefault(run.name, Follower(RunFolder(run.folder).metrics_path))
        anew, records = follower.read()
        newest = {} if anew else self._newest.get(run.name, {})
        for record in records:
            newest |= {kind: record for kind, tag in KINDS.items() if tag in record}
        self._newest[run.name] = newest
        return newest


def _begun(run: PlannedRun) -> RunState | None:
    """The state of a run that has begun; None for one that has not."""
    holder = holder_of(run.folder)
    status = RunFolder(run.folder).status()
    if status is None:
        return RunState(run, "running", steps=_steps(run), holder=holder) if holder is not None else None
    steps = _steps(run) or int(status["steps"])
    state = str(status["state"])
    if holder is not None:
        state = "running"
    elif state == "running" or (state == "finished" and status["step"] < steps):
        state = "interrupted"
    return RunState(run, state, int(status["step"]), steps, status.get("reason"), holder)


def _steps(run: PlannedRun) -> int | None:
    return run.resolved.steps if run.resolved is not None else None
