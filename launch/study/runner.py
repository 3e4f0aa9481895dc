"""Run a study on this machine: every run that has not ended, so many at a time, until none is left."""

import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from launch.study.job import Job, start_job
from launch.study.slurm_queue import JobList
from launch.study.state import RunState, States
from launch.study.table import status_table
from torchtitan_ext.errors import UserError
from torchtitan_ext.run_folder import RunFolder
from torchtitan_ext.study import PlannedRun, Study, TrainCommand, plan_study, write_record
from torchtitan_ext.units import count, duration

LOOK_EVERY = 5.0
"""Seconds between looks at runs that others train."""
REPORT_EVERY = 30.0
"""Seconds between the lines that say how far the runs are."""


class Runner:
    """Starts the runs of ``study`` with ``processes`` processes each, one in each of ``places`` (environments, see
    :func:`launch.study.job.places`) at a time; with ``only``, those of these names.

    Raises ``UserError`` for what is wrong with the study, before anything is started.
    """

    def __init__(
        self, study: Study, *, processes: int, places: list[dict[str, str]], only: Sequence[str] | None = None
    ) -> None:
        self.study, self.processes = study, processes
        self.free = list(places)
        self.plan = plan_study(study, processes)
        self.names = tuple(run.name for run in self.plan.runs)
        if only is not None:
            self.names = tuple(self.plan.checked_names(only))
        self.jobs: list[Job] = []
        self.states = States()
        self.queue = JobList(study.folder)
        self.crashes: dict[str, int] = {}
        self.given_up: dict[str, str] = {}
        self.stopping = False
        self.said: set[str] = set()

    def run(self) -> int:
        """Run until no run is left. Returns 0, 1 when a run has no result, 130 when asked to stop (SIGINT, SIGTERM)."""
        write_record(self.plan)
        with self._signals():
            try:
                self._work()
            finally:
                self._stop_jobs()
        states = {name: state for name, state in self._look().items() if name in self.names}
        print(f"\n{status_table(states.values())}")
        for name, reason in self.given_up.items():
            print(f"{name} {reason}")
        if self.stopping:
            print("stopped; the same command goes on from here")
            return 130
        return 0 if all(state.ended for state in states.values()) else 1

    def _work(self) -> None:
        look_at = report_at = 0.0
        while not self.stopping:
            if self._reap() or time.monotonic() >= look_at:
                states = self._look()
                if self._solve(states):
                    states = self._look()
                others = self._start(states)
                look_at = time.monotonic() + LOOK_EVERY
                if not self.jobs and not others:
                    return
                if not self.jobs:
                    self._wait_for(others)
            if time.monotonic() >= report_at:
                self._report()
                report_at = time.monotonic() + REPORT_EVERY
            time.sleep(0.2)

    def _look(self) -> dict[str, RunState]:
        return self.states.look(self.plan.runs, frozenset(self.queue.others()))

    def _solve(self, states: dict[str, RunState]) -> bool:
        """Plan again when the runs whose step times were missing have ended; says whether it did."""
        unsolved = [
            run
            for run in self.plan.runs
            if run.command is None
            and run.name in self.names
            and run.name not in self.given_up
            and states[run.name].state == "ready"
        ]
        if not unsolved:
            return False
        problem = "there are no step times"
        try:
            self.plan = plan_study(self.study, self.processes)
        except UserError as error:
            problem = str(error)
        for run in unsolved:
            if self.plan.run(run.name).command is None:
                self.given_up[run.name] = f"cannot be solved from {', '.join(run.after)}: {problem}"
        return True

    def _start(self, states: dict[str, RunState]) -> list[RunState]:
        """Start what there is a place for; returns the runs that others train or that wait in Slurm's queue."""
        mine = {job.run.name for job in self.jobs}
        others = []
        for run in self.plan.runs:
            state = states[run.name]
            skipped = run.name not in self.names or run.name in mine or run.name in self.given_up
            if skipped or state.ended or run.command is None:
                continue
            if state.state in ("running", "queued"):
                others.append(state)
            elif self.free and not self.stopping:
                self._start_one(run, run.command, resumes=state.step > 0)
        return others

    def _start_one(self, run: PlannedRun, command: TrainCommand, resumes: bool) -> None:
        try:
            job = start_job(run, command, processes=self.processes, place=self.free[0])
        except (UserError, OSError) as error:
            self.given_up[run.name] = f"cannot be started: {error}"
            _say(run, self.given_up[run.name])
            return
        self.free.remove(job.place)
        self.jobs.append(job)
        where = job.place.get("CUDA_VISIBLE_DEVICES")
        _say(run, ("resumes" if resumes else "starts") + (f" on GPU {where}" if where else ""))

    def _reap(self) -> bool:
        """Take note of jobs that have ended; says whether there was one."""
        done = [job for job in self.jobs if job.process.poll() is not None]
        for job in done:
            self.jobs.remove(job)
            self.free.append(job.place)
            if not self.stopping:
                self._note_end(job)
        return bool(done)

    def _note_end(self, job: Job) -> None:
        run = job.run
        state = self.states.look((run,))[run.name]
        status = RunFolder(run.folder).status() or {"time": 0.0}
        if state.state == "running":
            _say(run, f"is being trained by {state.holder}, and left to it")
        elif state.state == "finished":
            _say(run, f"finished at step {state.step}{_loss(state)}")
        elif state.state == "dropped":
            _say(run, f"was dropped: {state.reason}")
        elif state.state == "diverged":
            _say(run, f"diverged at step {state.step}: {state.reason}")
        elif state.state == "stopped" and status["time"] >= job.started:
            self.given_up[run.name] = f"was stopped by someone at step {state.step}"
            _say(run, self.given_up[run.name])
        else:
            self._note_crash(job, state.step, state.reason if status["time"] >= job.started else None)

    def _note_crash(self, job: Job, step: int, reason: str | None) -> None:
        run = job.run
        crashes = self.crashes[run.name] = self.crashes.get(run.name, 0) + 1
        why = reason or job.last_error()
        if crashes > self.study.retries:
            self.given_up[run.name] = f"failed {crashes} times; {job.console} has what it printed"
            RunFolder(run.folder).write_status("failed", step, job.command.resolved.steps, why)
            _say(run, f"failed: {why}; given up after {crashes} times")
        else:
            _say(run, f"failed: {why}; retry {crashes} of {self.study.retries}")

    def _report(self) -> None:
        states = self.states.look(tuple(job.run for job in self.jobs))
        for state in states.values():
            if state.training and state.step and state.seconds_left is not None:
                speed = count(state.training["throughput/global_tokens_per_s"])
                left = duration(state.seconds_left)
                _say(state.run, f"step {state.step}/{state.steps}{_loss(state)}, {speed} tok/s, {left} left")

    def _wait_for(self, others: list[RunState]) -> None:
        for state in others:
            who = f"being trained by {state.holder}" if state.holder else "in Slurm's queue"
            text = f"is {who}; waiting for it"
            if (line := f"{state.run.name} {text}") not in self.said:
                self.said.add(line)
                _say(state.run, text)

    def _stop_jobs(self) -> None:
        for job in self.jobs:
            job.stop()
        if self.jobs:
            print(f"stopping {len(self.jobs)} runs, each saves a checkpoint", flush=True)
        while self.jobs:
            self._reap()
            time.sleep(0.1)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Turn Ctrl-C, SIGTERM and a closed terminal into a request to stop; a second one changes nothing."""

        def request(number: int, frame: FrameType | None) -> None:
            self.stopping = True

        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as it is under nohup
            numbers.append(signal.SIGHUP)
        before = {number: signal.signal(number, request) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _say(run: PlannedRun, text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {run.name}  {text}", flush=True)


def _loss(state: RunState) -> str:
    loss = state.heldout.get("heldout/loss")
    if state.state == "finished" and loss is not None:
        return f", held-out loss {loss:.4f}"
    loss = state.training.get("loss_metrics/global_avg_loss")
    known = state.versus.get("step") == state.training.get("step")
    beside = f" ({state.versus['vs_baseline/loss']:+.4f})" if known and state.versus else ""
    return "" if loss is None else f", loss {loss:.4f}{beside}"
