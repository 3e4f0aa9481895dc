"""Start training as a Slurm job, and ask how jobs stand."""

import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from torchtitan_ext.errors import UserError

PER_NODE = 8
"""Processes of a node where NPROC_PER_NODE does not say: one for each GPU."""


def processes_per_node() -> int:
    """As NPROC_PER_NODE says. Raises ``UserError`` where that is no number."""
    text = os.environ.get("NPROC_PER_NODE", str(PER_NODE))
    if not text.isdecimal() or int(text) < 1:
        raise UserError(f"NPROC_PER_NODE is {text!r}; must be the number of processes of each node, such as {PER_NODE}")
    return int(text)


def shared_out(processes: int, sbatch_options: Sequence[str]) -> tuple[int, int]:
    """Over how many nodes, and with how many processes on each, a job of ``processes`` processes runs.

    Raises ``UserError`` where that does not agree with NPROC_PER_NODE and the ``--nodes`` among ``sbatch_options``.
    """
    each, nodes = processes_per_node(), _nodes_in(sbatch_options)
    if nodes is not None:
        if nodes * each != processes:
            raise UserError(
                f"--nproc {processes} and --sbatch=--nodes={nodes} do not agree: {nodes} nodes of {each} processes are "
                f"{nodes * each}; use --nproc {nodes * each}, or leave --nodes out, or set NPROC_PER_NODE"
            )
        return nodes, each
    if processes < each:
        return 1, processes
    if processes % each:
        raise UserError(
            f"--nproc {processes} does not fill nodes of {each} processes; use --nproc {processes // each * each} or "
            f"{-(-processes // each) * each}, or set NPROC_PER_NODE"
        )
    return processes // each, each


def _nodes_in(options: Sequence[str]) -> int | None:
    """The number of nodes that sbatch ``options`` ask for; None where they do not."""
    found = None
    for number, option in enumerate(options):
        match = re.fullmatch(r"(?:--nodes=?|-N\s*)(.*)", option)
        if match is None:
            continue
        text = match[1] or next(iter(options[number + 1 : number + 2]), "")
        if not text.isdecimal():
            raise UserError(f"--sbatch={option}: give one number of nodes, as --sbatch=--nodes=4")
        found = int(text)
    return found


def submit(
    arguments: list[str],
    *,
    script: Path,
    name: str,
    log_folder: Path,
    sbatch_options: Sequence[str],
    environment: Mapping[str, str] | None = None,
) -> str:
    """Submit ``script`` with ``arguments``, those of ``torchtitan_ext.train``; returns the job's id.

    The job runs in the present folder with the present environment, which its nodes must see, and with the present
    Python unless PYTHON names another (in a container there is none at this one's path). Slurm's own output goes to
    ``log_folder/slurm-<job id>.out``, that of each process below ``log_folder`` (the script's LOG_FOLDER).
    ``sbatch_options`` (``["--nodes=4"]``) win over those in the script, ``environment`` over the present one.

    Raises ``UserError`` where Slurm is not there or refuses the job.
    """
    if not script.is_file():
        raise UserError(f"{script}: no such file; give an sbatch script, such as launch/slurm/train_b200.sbatch")
    log_folder = log_folder.resolve()
    log_folder.mkdir(parents=True, exist_ok=True)
    # Slurm replaces %-patterns in this path, and %% by a percent sign. %j is the id of an array's task, too.
    output = f"{str(log_folder).replace('%', '%%')}/slurm-%j.out"
    options = [f"--job-name={name}", f"--output={output}", *sbatch_options]
    command = ["sbatch", "--parsable", *options, str(script), *arguments]
    ours = {"LOG_FOLDER": str(log_folder), "PYTHON": os.environ.get("PYTHON", sys.executable), **(environment or {})}
    done = _slurm(command, **ours)
    if done.returncode:
        raise UserError(f"sbatch refused {name}: {_words(done.stderr)}")
    return done.stdout.strip().partition(";")[0]  # "id", or "id;cluster"


def job_states(job_ids: Iterable[str]) -> dict[str, str]:
    """Slurm's state word (PENDING, RUNNING, COMPLETED, …) for each job that Slurm still knows.

    The id of an array's task is ``ARRAY_TASK``. Slurm forgets a job some minutes after its end (MinJobAge). Raises
    ``UserError`` where Slurm is not there or does not answer.
    """
    asked = list(job_ids)
    if not asked:
        return {}
    done = _slurm(["squeue", "--noheader", "--array", "--states=all", "--format=%i %T", f"--jobs={','.join(asked)}"])
    if done.returncode:
        if "Invalid job id" in done.stderr:  # what squeue says of a single job that it does not know
            return {}
        raise UserError(f"squeue cannot say how the jobs stand: {_words(done.stderr)}")
    pairs = [line.split() for line in done.stdout.splitlines()]
    return {job_id: state for job_id, state in pairs if job_id in asked}


def this_job() -> str | None:
    """The id of the job that this process is part of, as ``job_states`` takes it; None outside of Slurm."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID")


def cancel(job_id: str) -> None:
    """Have Slurm end a job, which saves. Raises ``UserError`` where Slurm is not there or refuses."""
    done = _slurm(["scancel", job_id])
    if done.returncode:
        raise UserError(f"scancel refused to cancel {job_id}: {_words(done.stderr)}")


def _slurm(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
    except FileNotFoundError as error:
        raise UserError(
            f"{command[0]} is not on this machine; start this where Slurm's commands are, usually a login node"
        ) from error


def _words(stderr: str) -> str:
    """What a Slurm command said, on one line."""
    lines = (re.sub("^(sbatch: |squeue: |scancel: )?(error: )?", "", line).strip() for line in stderr.splitlines())
    return "; ".join(line for line in lines if line) or "it gave no reason"
