"""Start training as a Slurm job, and ask how jobs stand."""

import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from torchtitan_ext.errors import UserError


def submit(train_arguments: list[str], *, script: Path, name: str, log_folder: Path, sbatch_options: list[str]) -> int:
    """Submit ``script`` with ``train_arguments``, those of ``torchtitan_ext.train``; returns the job's id.

    The job runs in the present folder with the present Python and environment, which its nodes must see. Slurm's own
    output goes to ``log_folder/slurm-<job id>.out``, that of each process below ``log_folder`` (the script's
    LOG_FOLDER). ``sbatch_options`` (``["--nodes=4"]``) win over those in the script.

    Raises ``UserError`` where Slurm is not there or refuses the job.
    """
    if not script.is_file():
        raise UserError(f"{script}: no such file; give an sbatch script, such as launch/slurm/train_b200.sbatch")
    log_folder = log_folder.resolve()
    log_folder.mkdir(parents=True, exist_ok=True)
    # Slurm replaces %-patterns in this path, and %% by a percent sign.
    output = f"{str(log_folder).replace('%', '%%')}/slurm-%j.out"
    options = [f"--job-name={name}", f"--output={output}", *sbatch_options]
    command = ["sbatch", "--parsable", *options, str(script), *train_arguments]
    done = _slurm(command, LOG_FOLDER=str(log_folder), PYTHON=sys.executable)
    if done.returncode:
        raise UserError(f"sbatch refused {name}: {_words(done.stderr)}")
    return int(done.stdout.partition(";")[0])  # "id", or "id;cluster"


def job_states(job_ids: Iterable[int]) -> dict[int, str]:
    """Slurm's state word (PENDING, RUNNING, COMPLETED, …) for each job that Slurm still knows.

    Slurm forgets a job some minutes after its end (MinJobAge). Raises ``UserError`` where Slurm is not there or does
    not answer.
    """
    ids = ",".join(str(job_id) for job_id in job_ids)
    if not ids:
        return {}
    done = _slurm(["squeue", "--noheader", "--states=all", "--format=%i %T", f"--jobs={ids}"])
    if done.returncode:
        if "Invalid job id" in done.stderr:  # what squeue says of a single job that it does not know
            return {}
        raise UserError(f"squeue cannot say how the jobs stand: {_words(done.stderr)}")
    pairs = [line.split() for line in done.stdout.splitlines()]
    return {int(job_id): state for job_id, state in pairs}


def _slurm(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
    except FileNotFoundError as error:
        raise UserError(
            f"{command[0]} is not on this machine; start this where Slurm's commands are, usually a login node"
        ) from error


def _words(stderr: str) -> str:
    """What a Slurm command said, on one line."""
    lines = (re.sub("^(sbatch: |squeue: )?(error: )?", "", line).strip() for line in stderr.splitlines())
    return "; ".join(line for line in lines if line) or "it gave no reason"
