"""Runs of a study in a real Slurm, from a container: several on a node in a job array, and one on two nodes."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import yaml

from launch.slurm import job_states
from launch.study.slurm_queue import JobList
from torchtitan_ext.cli import main as depth
from torchtitan_ext.machines import starts_of
from torchtitan_ext.run_folder import RunFolder
from torchtitan_ext.run_lock import holder_of

from .conftest import ROOT, TIMEOUT, wait_for_job

PACK, TRAIN = (str(ROOT / "launch" / "slurm" / name) for name in ("pack_b200.sbatch", "train_b200.sbatch"))
SMALL = ["--sbatch=--gres=none", "--sbatch=--time=60"]
"""What differs here from nodes with eight GPUs."""
STEPS = 60
NAMES = ("standard-debug-s0", "control_block-debug-s0", "standard-debug-s1")


@pytest.fixture
def study(dataset: Path, tmp_path: Path) -> Path:
    run = {
        "model": {"size": "debug"},
        "data": {"path": str(dataset), "seq_len": 64},
        "training": {"steps": STEPS, "batch_tokens": 512, "micro_batch": 4},
        "checkpoint": {"every": 0},
        "heldout": {"every": 0},
        "logging": {"every": 1},
    }
    (tmp_path / "debug.yaml").write_text(yaml.safe_dump(run))
    file = tmp_path / "small.yaml"
    study = {"base": "debug.yaml", "folder": str(tmp_path / "runs"), "baseline": "standard", "seeds": [0, 1]}
    exclude = [{"variant": "control_block", "seed": 1}]
    file.write_text(yaml.safe_dump({**study, "variants": ["standard", "control_block"], "exclude": exclude}))
    return file


def records(folder: RunFolder) -> list[dict]:
    return [record for record in folder.metrics() if "grad_norm" in record]


@pytest.mark.slow
@pytest.mark.usefixtures("slurm")
def test_small_runs_share_a_node_and_go_on_after_a_requeue(
    study: Path, container: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NPROC_PER_NODE", "2")
    folders = {name: RunFolder(tmp_path / "runs" / name) for name in NAMES}
    command = ["study", "run", str(study), "--slurm", PACK, "--nproc", "1", "--per-node", "2", *SMALL]
    assert depth([*command, "--jobs", "1"]) == 0
    jobs = {name: ids[-1] for name, ids in JobList(tmp_path / "runs").read().items()}
    first, second = jobs[NAMES[0]], jobs[NAMES[2]]
    array = first.partition("_")[0]
    assert jobs == {NAMES[0]: f"{array}_0", NAMES[1]: f"{array}_0", NAMES[2]: f"{array}_1"}
    assert job_states([second]) == {second: "PENDING"}, "--jobs 1: one task at a time"
    assert depth(command) == 0
    assert capsys.readouterr().out.count(f" as job {array}_") == 6, "submitted once, and then found in the queue"
    assert len(list((tmp_path / "runs" / "packs").glob("*.txt"))) == 1

    # Both runs of the first task train at a time; the task is put back into the queue.
    packs = tmp_path / "runs" / "packs"
    paused: dict[str, int] = {}

    def both_are_held() -> bool:
        """Hold each run as soon as it has trained three steps, so that it does not matter which is faster."""
        for name in set(NAMES[:2]) - set(paused):
            holder = holder_of(folders[name].path)
            if holder is not None and holder.pid and len(records(folders[name])) >= 3:
                os.kill(holder.pid, signal.SIGSTOP)
                paused[name] = holder.pid
        return len(paused) == 2

    wait_for_job(both_are_held, first, packs)
    subprocess.run(["scancel", "--signal=TERM", first], check=True)  # as Slurm does when time is nearly up
    for pid in paused.values():
        os.kill(pid, signal.SIGCONT)
    wait_for_job(lambda: job_states([first]) == {first: "PENDING"}, first, packs)
    saved = {}
    for name in NAMES[:2]:
        status = folders[name].status()
        assert status is not None
        assert status["state"] == "stopped"
        assert status["step"] < STEPS, "interrupted too late to show anything"
        assert (folders[name].checkpoint_path / f"step-{status['step']}").is_dir()
        saved[name] = records(folders[name])
        assert saved[name][-1]["step"] == status["step"]
    # A node refuses a job that starts again within the second in which its last turn was revoked.
    time.sleep(2)
    subprocess.run(["scontrol", "update", f"JobId={first}", "StartTime=now"], check=True)
    wait_for_job(lambda: job_states([first]) == {first: "COMPLETED"}, first, packs)
    wait_for_job(lambda: job_states([second]) == {second: "COMPLETED"}, second, packs)
    for name, folder in folders.items():
        status = folder.status()
        assert status is not None
        assert (status["state"], status["step"]) == ("finished", STEPS)
        curve = records(folder)
        assert [record["step"] for record in curve] == list(range(1, STEPS + 1))
        assert curve[: len(saved.get(name, []))] == saved.get(name, []), "saved steps were not trained again"
    starts = starts_of(folders[NAMES[0]].path)
    assert [(start["processes"], start["world_size"]) for start in starts] == [(1, 1), (1, 1)]
    assert all(line.startswith(str(container.parent / "python")) for line in container.read_text().splitlines())
    assert depth(command) == 0
    assert capsys.readouterr().out.count("finished at step") == 3
    assert len(list(packs.glob("*.txt"))) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("slurm")
def test_a_run_on_two_nodes_from_a_container(
    study: Path, container: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NPROC_PER_NODE", "1")
    monkeypatch.setenv("SRUN_OPTIONS", "--label --unbuffered")
    command = ["study", "run", str(study), "--slurm", TRAIN, "--nproc", "2", *SMALL, "--set.training.steps", "4"]
    assert depth([*command, "--jobs", "1"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("submitted as job") == 1
    assert printed.count("is left for later: 1 jobs are in the queue") == 2
    (job,) = JobList(tmp_path / "runs").read()[NAMES[0]]
    wait_for_job(lambda: job_states([job]) == {job: "COMPLETED"}, job, tmp_path / "runs")
    status = RunFolder(tmp_path / "runs" / NAMES[0]).status()
    assert status is not None
    assert (status["state"], status["step"]) == ("finished", 4)
    starts = starts_of(tmp_path / "runs" / NAMES[0])
    assert [(start["processes"], start["world_size"]) for start in starts] == [(1, 2), (1, 2)], "one on each node"
    assert {line.split()[-1] for line in container.read_text().splitlines()} == {"n1", "n2"}
    assert "0: " in (tmp_path / "runs" / NAMES[0] / "logs" / f"slurm-{job}.out").read_text(), "srun's --label"


@pytest.mark.usefixtures("slurm")
def test_a_job_of_another_size_than_planned_ends_with_one_line(tmp_path: Path) -> None:
    options = ["--nodes=1", "--gres=none", "--time=60", f"--output={tmp_path}/out"]
    environment = {**os.environ, "NPROC_PER_NODE": "1", "PROCESSES": "2", "PYTHON": "none"}
    done = subprocess.run(["sbatch", "--wait", *options, TRAIN], env=environment, capture_output=True, timeout=TIMEOUT)
    assert done.returncode == 2
    assert (tmp_path / "out").read_text() == (
        "error: this job has 1 nodes of 1 processes, 1 in all, and was planned for 2\n"
    )
