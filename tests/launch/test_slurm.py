"""Jobs in a real Slurm: a training run on two nodes, and what Slurm says when it refuses."""

import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from launch.slurm import job_states, submit
from torchtitan_ext.errors import UserError
from torchtitan_ext.run_folder import RunFolder

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPT = ROOT / "launch" / "slurm" / "train_b200.sbatch"
SMALL = ["--nodes=2", "--gres=none", "--time=60"]
"""What differs here from nodes with eight GPUs."""

STEPS = 60
TIMEOUT = 600
"""Seconds after which a job counts as hung."""


@pytest.fixture
def echo(tmp_path: Path) -> Path:
    """A job that prints its arguments and its LOG_FOLDER."""
    script = tmp_path / "echo.sbatch"
    script.write_text('#!/bin/bash\nprintf "<%s>\\n" "$@"\necho "$LOG_FOLDER"\n')
    return script


def wait_for(what: Callable[[], bool], job: str, output: Path) -> None:
    """Wait until ``what`` is true; fails when the job ends without it, or hangs."""
    deadline = time.monotonic() + TIMEOUT
    while True:
        state = job_states([job])[job]
        if what():
            return
        said = output.read_text()[-4000:] if output.exists() else "nothing"
        assert state not in ("FAILED", "COMPLETED", "CANCELLED", "TIMEOUT"), f"{state}: {said}"
        assert time.monotonic() < deadline, said
        time.sleep(0.2)


def ended(job: str, state: str) -> Callable[[], bool]:
    return lambda: job_states([job]) == {job: state}


def scontrol(*words: str) -> str:
    return subprocess.run(["scontrol", *words], check=True, capture_output=True, text=True).stdout


@pytest.mark.slow
@pytest.mark.usefixtures("slurm")
def test_a_run_on_two_nodes_outlives_a_requeue_and_the_end_of_its_time(dataset: Path, tmp_path: Path) -> None:
    run_file = tmp_path / "debug.yaml"
    run = {
        "model": {"size": "debug"},
        "data": {"path": str(dataset), "seq_len": 64},
        "training": {"steps": STEPS, "batch_tokens": 1024, "micro_batch": 8},
        "optimizer": {"lr": 3e-3},
        "checkpoint": {"every": 0},
        "heldout": {"every": 0},
        "logging": {"every": 1},
    }
    run_file.write_text(yaml.safe_dump(run))
    folder = RunFolder(tmp_path / "run")
    logs = folder.path / "logs"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NPROC_PER_NODE", "1")
        arguments = ["--config-file", str(run_file), "--folder", str(folder.path)]
        job = submit(arguments, script=SCRIPT, name="debug run", log_folder=logs, sbatch_options=SMALL)
    output = logs / f"slurm-{job}.out"

    def records() -> list[dict[str, Any]]:
        return [record for record in folder.metrics() if "grad_norm" in record]

    def interrupt(*command: str) -> list[dict[str, Any]]:
        """Interrupt the run three steps from where it stands; returns what it had logged when it was in the queue
        again, and lets it start at once rather than after Slurm's two minutes."""
        seen = len(records())
        wait_for(lambda: len(records()) >= seen + 3, job, output)
        subprocess.run([*command, job], check=True)
        wait_for(ended(job, "PENDING"), job, output)
        status = folder.status()
        assert status is not None
        assert status["state"] == "stopped", output.read_text()[-4000:]
        assert status["step"] < STEPS, "interrupted too late to show anything"
        assert (folder.checkpoint_path / f"step-{status['step']}").is_dir()
        logged = records()
        assert logged[-1]["step"] == status["step"]
        # A node refuses a job that starts again within the second in which its last turn was revoked.
        time.sleep(2)
        scontrol("update", f"JobId={job}", "StartTime=now")
        return logged

    first = interrupt("scontrol", "requeue")
    # What Slurm does shortly before a job's time is up, by the script's --signal: the script queues itself again.
    second = interrupt("scancel", "--signal=TERM")
    wait_for(ended(job, "COMPLETED"), job, output)

    status = folder.status()
    assert status is not None
    assert (status["state"], status["step"]) == ("finished", STEPS), output.read_text()[-4000:]
    curve = records()
    assert [record["step"] for record in curve] == list(range(1, STEPS + 1))
    assert curve[: len(first)] == first, "steps before the requeue were not trained again"
    assert curve[: len(second)] == second
    assert curve[-1]["progress/tokens"] == STEPS * 1024
    assert "Restarts=2" in scontrol("show", "job", job)

    # Each node ran one of the two ranks, in each of the three turns.
    lines = {node: sorted(logs.glob(f"{node}/*/attempt_0/0/stdout.log")) for node in ("n1", "n2")}
    assert {node: len(files) for node, files in lines.items()} == {"n1": 3, "n2": 3}
    for files in lines.values():
        assert any(f"step {STEPS}/{STEPS}" in file.read_text() for file in files)


@pytest.mark.slow
@pytest.mark.usefixtures("slurm")
def test_a_mistake_in_a_job_sent_by_hand_is_one_line(tmp_path: Path) -> None:
    """Without LOG_FOLDER the script resolves the run, to find its folder, before it starts processes."""
    run_file = tmp_path / "wrong.yaml"
    run_file.write_text("model: {size: debug}\ndata: {path: nowhere}\ntraining: {steps: 1}\n")
    command = ["sbatch", "--wait", f"--output={tmp_path}/out", *SMALL, str(SCRIPT), "--config-file", str(run_file)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHON", sys.executable)
        assert subprocess.run(command, capture_output=True, timeout=TIMEOUT).returncode == 2
    assert "nowhere" in (tmp_path / "out").read_text()
    assert len((tmp_path / "out").read_text().splitlines()) == 1


@pytest.mark.usefixtures("slurm")
def test_arguments_and_folders_arrive_as_they_are(tmp_path: Path, echo: Path) -> None:
    folder = tmp_path / "50% of, it's" / "logs"
    arguments = ["--config-file", "a file.yaml", "--name", 'it\'s "$HOME"', "--checkpoint.milestones", "[7, 10]", ""]
    job = submit(arguments, script=echo, name="echo", log_folder=folder, sbatch_options=[])
    output = folder / f"slurm-{job}.out"
    wait_for(ended(job, "COMPLETED"), job, output)
    assert output.read_text().splitlines() == [*(f"<{argument}>" for argument in arguments), str(folder)]


@pytest.mark.usefixtures("slurm")
@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--partition=nowhere", "invalid partition specified: nowhere; Batch job submission failed"),
        ("--gres=gpu:8", "Invalid generic resource (gres) specification"),
        ("--time=soon", "Invalid --time specification"),
        ("--nodse=2", "unrecognized option '--nodse=2'"),
    ],
)
def test_a_refusal_is_told_in_slurms_words(tmp_path: Path, echo: Path, option: str, words: str) -> None:
    with pytest.raises(UserError) as refused:
        submit([], script=echo, name="study-7", log_folder=tmp_path, sbatch_options=[option])
    message = str(refused.value)
    assert message.startswith("sbatch refused study-7: ")
    assert words in message
    assert "\n" not in message


@pytest.mark.usefixtures("slurm")
def test_states_of_jobs(tmp_path: Path, echo: Path) -> None:
    held = submit([], script=echo, name="held", log_folder=tmp_path, sbatch_options=["--hold"])
    failed = tmp_path / "failed.sbatch"
    failed.write_text("#!/bin/bash\nexit 3\n")
    failing = submit([], script=failed, name="failing", log_folder=tmp_path, sbatch_options=[])
    wait_for(ended(failing, "FAILED"), held, tmp_path / "none")
    unknown = "999999"
    assert job_states([held, failing, unknown]) == {held: "PENDING", failing: "FAILED"}
    assert job_states([unknown]) == {}
    assert job_states([]) == {}
    subprocess.run(["scancel", held], check=True)
    assert job_states([held]) == {held: "CANCELLED"}


def test_without_slurm(tmp_path: Path, echo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"^sbatch is not on this machine"):
        submit([], script=echo, name="x", log_folder=tmp_path, sbatch_options=[])
    with pytest.raises(UserError, match=r"^squeue is not on this machine"):
        job_states(["1"])


def test_without_the_script(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"/none\.sbatch: no such file"):
        submit([], script=tmp_path / "none.sbatch", name="x", log_folder=tmp_path / "logs", sbatch_options=[])
    assert not (tmp_path / "logs").exists()


def test_an_unreachable_controller_is_told(tmp_path: Path, slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = slurm.read_text()
    elsewhere = tmp_path / "slurm.conf"
    elsewhere.write_text(re.sub("SlurmctldPort=.*", "SlurmctldPort=1\nMessageTimeout=2", text))
    monkeypatch.setenv("SLURM_CONF", str(elsewhere))
    with pytest.raises(UserError, match=r"^squeue cannot say how the jobs stand: slurm_load_jobs error"):
        job_states(["1"])
