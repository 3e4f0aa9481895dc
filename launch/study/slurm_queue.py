"""A study's runs in Slurm's queue. ``jobs.json`` in the study's folder says which jobs were submitted for which run:
``{"format": 1, "jobs": {run name: [job ids, oldest first]}}``.
"""

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from launch.slurm import job_states, submit
from launch.study.state import RunState, States
from torchtitan_ext.errors import UserError
from torchtitan_ext.files import write_file
from torchtitan_ext.study import Plan

FORMAT = 1
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

    def read(self) -> dict[str, list[int]]:
        """Job ids by run. Raises ``UserError`` when the file is damaged."""
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
            if content["format"] != FORMAT:
                raise ValueError(f"format {content['format']}")
            return {str(name): [int(job) for job in jobs] for name, jobs in content["jobs"].items()}
        except FileNotFoundError:
            return {}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"{self.path} is damaged ({error}); delete it when none of its jobs is queued any more"
            ) from error

    def add(self, name: str, job: int) -> None:
        jobs = self.read()
        jobs.setdefault(name, []).append(job)
        write_file(self.path, (json.dumps({"format": FORMAT, "jobs": jobs}, indent=1) + "\n").encode())

    def live(self) -> dict[str, int]:
        """The newest job of each run that has one which Slurm still means to run or is running.

        Raises ``UserError`` where Slurm cannot be asked.
        """
        newest = {name: jobs[-1] for name, jobs in self.read().items()}
        states = job_states(newest.values())
        return {name: job for name, job in newest.items() if states.get(job, "COMPLETED") not in OVER}

    def queued(self) -> frozenset[str]:
        """The runs with a live job, as far as this machine can tell: none where there is no Slurm."""
        if not self.read():
            return frozenset()
        try:
            return frozenset(self.live())
        except UserError:
            return frozenset()

    @contextmanager
    def only_one(self) -> Iterator[None]:
        """Keep a second person from submitting the same runs meanwhile."""
        with open(self.path.with_name("jobs.lock"), "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def submit_runs(plan: Plan, *, script: Path, sbatch_options: list[str]) -> None:
    """Submit every run that can be started and has neither ended nor a live job. Says what it does with each.

    Raises ``UserError`` where Slurm is not there or refuses a job; those submitted before stay submitted.
    """
    jobs = JobList(plan.study.folder)
    with jobs.only_one():
        live = jobs.live()
        states = States().look(plan.runs, frozenset(live))
        for run in plan.runs:
            state = states[run.name]
            if run.name in live:
                print(f"{run.name}  {state.state} as job {live[run.name]}")
            elif state.ended or state.state == "running" or run.command is None:
                print(f"{run.name}  {_where(state)}")
            else:
                job = submit(
                    run.command.arguments,
                    script=script,
                    name=run.name,
                    log_folder=run.folder / "logs",
                    sbatch_options=sbatch_options,
                )
                jobs.add(run.name, job)
                print(f"{run.name}  submitted as job {job}" + (f", from step {state.step}" if state.step else ""))


def _where(state: RunState) -> str:
    if state.holder is not None:
        return f"is being trained by {state.holder}"
    if state.run.command is None:
        return f"waits for {', '.join(state.run.after)}; submit again when they have ended"
    return f"{state.state} at step {state.step}"
