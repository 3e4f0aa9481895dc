"""A study's runs in Slurm's queue.

``jobs.json`` in the study's folder says which jobs were submitted for which run: ``{"format": 2, "jobs": {run name:
[job ids, oldest first]}}``. The id of a job array's task, which trains several runs, is ``ARRAY_TASK``. Format 1 had
numbers.
"""

import fcntl
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from launch.slurm import job_states, processes_per_node, shared_out, submit, this_job
from launch.study.state import RunState, States
from torchtitan_ext.errors import UserError
from torchtitan_ext.files import write_file
from torchtitan_ext.study import Plan, PlannedRun
from torchtitan_ext.study.record import STUDY

FORMAT = 2
OVER = frozenset(
    [
        *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED"),
        *("NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT"),
    ]
)
"""Slurm's words for jobs that will not run again (https://slurm.schedmd.com/squeue.html, job state codes)."""


class JobList:
    """The jobs of the study in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "jobs.json"

    def read(self) -> dict[str, list[str]]:
        """Job ids by run. Raises ``UserError`` when the file is damaged."""
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
            if content["format"] not in (1, FORMAT):
                raise ValueError(f"format {content['format']}")
            return {str(name): [_job_id(job) for job in jobs] for name, jobs in content["jobs"].items()}
        except FileNotFoundError:
            return {}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"{self.path} is damaged ({error}); delete it when none of its jobs is queued any more"
            ) from error

    def add(self, jobs: dict[str, str]) -> None:
        """Note a job for each of some runs."""
        known = self.read()
        for name, job in jobs.items():
            known.setdefault(name, []).append(job)
        write_file(self.path, (json.dumps({"format": FORMAT, "jobs": known}, indent=1) + "\n").encode())

    def live(self) -> dict[str, tuple[str, str]]:
        """The newest job, and its state, of each run that has one which Slurm still means to run or is running.

        Raises ``UserError`` where Slurm cannot be asked.
        """
        newest = {name: jobs[-1] for name, jobs in self.read().items()}
        states = job_states(dict.fromkeys(newest.values()))
        found = {name: (job, states.get(job, "COMPLETED")) for name, job in newest.items()}
        return {name: (job, state) for name, (job, state) in found.items() if state not in OVER}

    def others(self) -> dict[str, tuple[str, str]]:
        """The same without the job that this process is part of, as far as this machine can tell: none where there is
        no Slurm."""
        if not self.read():
            return {}
        try:
            return {name: live for name, live in self.live().items() if live[0] != this_job()}
        except UserError:
            return {}

    @contextmanager
    def only_one(self) -> Iterator[None]:
        """Keep a second person from submitting the same runs meanwhile."""
        with open(self.path.with_name("jobs.lock"), "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _job_id(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise TypeError(f"{value!r} is no job id")
    return str(value)


def submit_runs(plan: Plan, *, script: Path, sbatch_options: Sequence[str], at_most: int | None = None) -> None:
    """Submit, each as a job of its own, the runs that can be started and have neither ended nor a live job, but no more
    than leave ``at_most`` jobs of the study live. Says what it does with each.

    Raises ``UserError`` where Slurm is not there or refuses a job, or where ``sbatch_options`` do not agree with the
    plan's processes; those submitted before stay submitted.
    """
    nodes, each = shared_out(plan.ranks, sbatch_options)
    options = [f"--nodes={nodes}", *sbatch_options]
    environment = {"NPROC_PER_NODE": str(each), "PROCESSES": str(plan.ranks)}
    jobs = JobList(plan.study.folder)
    with jobs.only_one():
        live = jobs.live()
        queued = len({job for job, _ in live.values()})
        for run, step in _open_runs(plan, live):
            assert run.command is not None
            if at_most is not None and queued >= at_most:
                print(f"{run.name}  is left for later: {queued} jobs are in the queue")
                continue
            job = submit(
                run.command.arguments,
                script=script,
                name=run.name,
                log_folder=run.folder / "logs",
                sbatch_options=options,
                environment=environment,
            )
            jobs.add({run.name: job})
            queued += 1
            print(f"{run.name}  submitted as job {job}" + (f", from step {step}" if step else ""))


def submit_packed(
    plan: Plan, *, script: Path, sbatch_options: Sequence[str], per_node: int, at_most: int | None = None
) -> None:
    """Submit the same runs as one job array whose tasks train ``per_node`` runs at a time on a node of their own;
    ``at_most`` tasks at a time.

    ``packs/N.txt`` in the study's folder has a line of run names for each task. Raises ``UserError`` as `submit_runs`
    does.
    """
    together, each = per_node * plan.ranks, processes_per_node()
    if together > each:
        raise UserError(
            f"--per-node {per_node} runs of --nproc {plan.ranks} are {together} processes, and a node has {each}; use "
            f"--per-node {max(1, each // plan.ranks)}, or set NPROC_PER_NODE"
        )
    folder = plan.study.folder
    jobs = JobList(folder)
    with jobs.only_one():
        names = [run.name for run, _ in _open_runs(plan, jobs.live())]
        packs = [names[first : first + per_node] for first in range(0, len(names), per_node)]
        if not packs:
            return
        (folder / "packs").mkdir(exist_ok=True)
        pack_file = folder / "packs" / f"{len(list((folder / 'packs').glob('*.txt')))}.txt"
        write_file(pack_file, "".join(" ".join(pack) + "\n" for pack in packs).encode())
        throttle = "" if at_most is None else f"%{at_most}"
        array = submit(
            [str(pack_file.resolve()), str((folder / STUDY).resolve())],
            script=script,
            name=plan.study.name,
            log_folder=folder / "packs" / "logs",
            sbatch_options=[f"--array=0-{len(packs) - 1}{throttle}", *sbatch_options],
            environment={"PER_NODE": str(per_node), "PROCESSES": str(plan.ranks)},
        )
        jobs.add({name: f"{array}_{task}" for task, pack in enumerate(packs) for name in pack})
        for task, pack in enumerate(packs):
            for name in pack:
                print(f"{name}  submitted as job {array}_{task}")


def _open_runs(plan: Plan, live: Mapping[str, tuple[str, str]]) -> Iterable[tuple[PlannedRun, int]]:
    """The runs to be submitted, with the step that each has reached; says how the others stand. ``live``: as
    ``JobList.live`` gives it."""
    states = States().look(plan.runs, frozenset(live))
    found = []
    for run in plan.runs:
        state = states[run.name]
        if run.name in live:
            print(f"{run.name}  {state.state} as job {live[run.name][0]}")
        elif state.ended or state.state == "running" or run.command is None:
            print(f"{run.name}  {_where(state)}")
        else:
            found.append((run, state.step))
    return found


def _where(state: RunState) -> str:
    if state.holder is not None:
        return f"is being trained by {state.holder}"
    if state.run.command is None and not state.ended:
        return f"waits for {', '.join(state.run.after)}; submit again when they have ended"
    return f"{state.state} at step {state.step}"
