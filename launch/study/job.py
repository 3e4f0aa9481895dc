"""One run of a study as torchrun's processes on this machine."""

import os
import re
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

from launch.torchrun import torchrun_command, torchrun_environment
from torchtitan_ext.errors import UserError
from torchtitan_ext.machines import note_machine
from torchtitan_ext.orphans import stop_with_parent
from torchtitan_ext.run_folder import RunFolder
from torchtitan_ext.study import PlannedRun, TrainCommand

CONSOLE = "console.txt"
"""What torchrun and the first rank print, in the run's ``logs``, over all starts."""


def places(processes: int, jobs: int) -> list[dict[str, str]]:
    """The environments of ``jobs`` jobs at a time, of ``processes`` processes each: disjoint GPUs, or a share of the
    cores.

    Raises ``UserError`` where there are not enough GPUs.
    """
    import torch

    environment = torchrun_environment(processes * jobs)
    if not torch.cuda.is_available():
        return [environment for _ in range(jobs)]
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if gpus == [""]:
        gpus = [str(number) for number in range(torch.cuda.device_count())]
    if processes * jobs > len(gpus):
        raise UserError(
            f"--jobs {jobs} of --nproc {processes} need {jobs * processes} GPUs, and there are {len(gpus)}; "
            f"use --jobs {max(1, len(gpus) // processes)}, or --nproc {max(1, len(gpus) // jobs)}"
        )
    shares = [gpus[job * processes : (job + 1) * processes] for job in range(jobs)]
    return [{**environment, "CUDA_VISIBLE_DEVICES": ",".join(share)} for share in shares]


ERROR = re.compile(
    r"^(?:\[rank0\]:error: (.+)|\[rank0\]:(\w+(?:Error|Exception|Interrupt): .+)|\s*traceback : (Signal .+))$",
    re.MULTILINE,
)
"""A line that says what went wrong: the first rank's error for people or the end of its traceback, or torchrun's word
about the signal that ended a process."""


@dataclass
class Job:
    """A started run. ``place`` is the environment it was given."""

    run: PlannedRun
    command: TrainCommand
    place: dict[str, str]
    process: subprocess.Popen[bytes]
    console_begins: int
    started: float = field(default_factory=time.time)

    @property
    def console(self) -> Path:
        return console_of(self.run)

    def stop(self) -> None:
        """Ask the run to save and leave; torchrun kills what has not left after a while."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)

    def last_error(self) -> str:
        """The last error that the first rank printed in this start, or else torchrun's exit status."""
        with open(self.console, "rb") as file:
            file.seek(self.console_begins)
            found = ERROR.findall(file.read().decode(errors="replace"))
        return "".join(found[-1]) if found else f"torchrun left with exit status {self.process.returncode}"


def console_of(run: PlannedRun) -> Path:
    return run.folder / "logs" / CONSOLE


def start_job(run: PlannedRun, command: TrainCommand, *, processes: int, place: dict[str, str]) -> Job:
    """Start or resume ``run`` with its ``command``. Raises ``UserError`` when something else is in the place of its
    folder."""
    RunFolder(run.folder).create()
    console_of(run).parent.mkdir(exist_ok=True)
    launch = torchrun_command(command.arguments, processes=processes, log_folder=run.folder / "logs")
    note_machine(run.folder / "logs", processes=processes, environment=place)
    with open(console_of(run), "ab") as console:
        begins = console.tell()
        process = subprocess.Popen(
            launch,
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=subprocess.STDOUT,
            env=place,
            # Ctrl-C reaches the study alone, which asks each run to stop once: torchrun takes a second for haste.
            process_group=0,
            preexec_fn=stop_with_parent,
        )
    return Job(run, command, place, process, begins)
