"""Freeing the disk of ended runs, on checkpoints that training wrote."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml

from launch.study.disk import bytes_below
from launch.study.prune import Pruning, prune, prunings
from launch.study.state import States
from torchtitan_ext.cli import main as depth
from torchtitan_ext.cost import disk_bytes, kept_checkpoints
from torchtitan_ext.errors import UserError
from torchtitan_ext.run_folder import RunFolder
from torchtitan_ext.run_lock import RunLock
from torchtitan_ext.study import Plan, load_study, plan_study, write_record
from torchtitan_ext.titan.checkpoints import damage_of, saved_steps
from torchtitan_ext.titan.restore import restore

pytestmark = pytest.mark.slow

FINISHED, STOPPED = "standard-debug-s0", "control_block-debug-s0"
MANY_RUNS = Path(__file__).parent.parent / "end_to_end" / "many_runs.py"
WEIGHTS = 229_952 * 4
"""Bytes of the debug size's fp32 weights (tests/study/conftest.py)."""


@pytest.fixture(scope="module")
def trained(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study of two runs that two processes trained, with checkpoints of steps 2, 4 (a milestone), 6 and 8."""
    base = tmp_path_factory.mktemp("pruned")
    run = {
        "model": {"size": "debug"},
        "data": {"path": str(dataset), "seq_len": 64},
        "training": {"steps": 8, "batch_tokens": 512},
        "checkpoint": {"every": 2, "milestones": [4]},
        "heldout": {"every": 4, "tokens": 4096},
    }
    (base / "debug.yaml").write_text(yaml.safe_dump(run))
    study = {"base": "debug.yaml", "folder": str(base / "runs"), "baseline": "standard"}
    (base / "study.yaml").write_text(yaml.safe_dump({**study, "variants": ["standard", "control_block"]}))
    plan = plan_of(base)
    write_record(plan)
    runs = {str(run.folder): list(run.command.overrides) for run in plan.runs if run.command}
    (base / "runs.json").write_text(json.dumps(runs))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, str(MANY_RUNS), str(base / "debug.yaml"), str(base / "runs.json")],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return base


@pytest.fixture
def base(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The study in a folder of its own, whose second run is as if it had been stopped at step 6."""
    shutil.copytree(trained / "runs", tmp_path / "runs")
    (tmp_path / "debug.yaml").write_text((trained / "debug.yaml").read_text())
    study = yaml.safe_load((trained / "study.yaml").read_text())
    (tmp_path / "study.yaml").write_text(yaml.safe_dump({**study, "folder": str(tmp_path / "runs")}))
    RunFolder(tmp_path / "runs" / STOPPED).write_status("stopped", 6, 8)
    return tmp_path


def plan_of(base: Path) -> Plan:
    return plan_study(load_study(base / "study.yaml"), 2)


def folder_of(base: Path, name: str = FINISHED) -> RunFolder:
    return RunFolder(base / "runs" / name)


def run_prune(base: Path, *options: str) -> int:
    return depth(["study", "prune", str(base / "study.yaml"), "--nproc", "2", *options])


def found(base: Path, keep: str = "weights") -> list[Pruning]:
    return prunings(States().look(plan_of(base).runs).values(), keep)


def files_of(folder: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_nothing_is_changed_without_a_yes(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = files_of(base / "runs")
    assert run_prune(base) == 0
    assert files_of(base / "runs") == before
    printed = capsys.readouterr().out
    assert f"{FINISHED}  {bytes_below(folder_of(base).checkpoint_path) / 1e6:.3g}MB, of which 1.84MB stay" in printed
    assert f"left alone, since they have not ended: {STOPPED} (stopped)" in printed
    assert "nothing was changed" in printed


def test_a_plan_foresees_what_checkpoints_take(base: Path) -> None:
    run = plan_of(base).run(FINISHED).resolved
    assert run
    assert kept_checkpoints(run) == 3
    # Names and places of tensors, which the plan leaves out, are a quarter of the debug size's.
    assert disk_bytes(run) < bytes_below(folder_of(base).checkpoint_path) < 1.4 * disk_bytes(run)


def test_the_weights_that_stay_are_the_same(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, other = folder_of(base), files_of(folder_of(base, STOPPED).checkpoint_path)
    records = {name: (folder.path / name).read_bytes() for name in ("metrics.jsonl", "status.json", "facts.json")}
    before = {step: restore(folder, step).model.state_dict() for step in (4, 8)}
    assert saved_steps(folder.checkpoint_path) == [4, 6, 8]
    assert run_prune(base, "--yes") == 0
    assert saved_steps(folder.checkpoint_path) == [4, 8], "the milestone and the last"
    for step, weights in before.items():
        path = folder.checkpoint_path / f"step-{step}"
        assert damage_of(path) is None
        assert WEIGHTS <= bytes_below(path) < 1.1 * WEIGHTS
        after = restore(folder, step).model.state_dict()
        assert after.keys() == weights.keys()
        assert all(torch.equal(after[name], weights[name]) for name in weights)
    assert {name: (folder.path / name).read_bytes() for name in records} == records
    assert files_of(folder_of(base, STOPPED).checkpoint_path) == other
    assert sorted(path.name for path in folder.checkpoint_path.iterdir()) == ["pruned.json", "step-4", "step-8"]
    assert "1 runs pruned" in capsys.readouterr().out
    assert run_prune(base, "--yes") == 0
    assert "there is nothing to free" in capsys.readouterr().out


def test_no_checkpoint_stays_when_records_are_enough(base: Path) -> None:
    assert run_prune(base, "--keep", "weights", "--yes") == 0
    assert run_prune(base, "--keep", "records", "--yes") == 0
    assert [path.name for path in folder_of(base).checkpoint_path.iterdir()] == ["pruned.json"]
    assert found(base) == []
    assert len(list(folder_of(base).metrics())) > 1


def test_what_was_pruned_is_not_trained_on(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_prune(base, "--yes") == 0
    assert States().look(plan_of(base).runs)[FINISHED].state == "finished"
    run = plan_of(base).run(FINISHED)
    assert run.command
    launcher = [sys.executable, "-m", "torchtitan_ext.train", *run.command.arguments, "--training.steps", "12"]
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    before = files_of(folder_of(base).path)
    done = subprocess.run(launcher, env={**os.environ, **ranks}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert f"{FINISHED} was pruned, so that it cannot be trained on: only the weights are left" in done.stderr
    assert files_of(folder_of(base).path) == before


def test_a_run_in_training_is_left_alone_even_when_it_starts_meanwhile(base: Path) -> None:
    (one,) = found(base)
    before = files_of(one.folder.checkpoint_path)
    lock = RunLock(one.folder.path)
    with pytest.raises(UserError, match="is being trained by process"):
        prune(one)
    assert found(base) == []
    lock.release()
    assert files_of(one.folder.checkpoint_path) == before


def test_a_damaged_checkpoint_stops_it_before_anything_is_deleted(
    base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints = folder_of(base).checkpoint_path
    damaged = next((checkpoints / "step-8").glob("*.distcp"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    before = files_of(checkpoints)
    assert run_prune(base, "--yes") == 1
    assert f"{FINISHED} was not pruned: the checkpoint of step 8 is damaged" in capsys.readouterr().out
    assert files_of(checkpoints) == before


def test_an_interruption_between_two_renames_is_made_good(
    base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The process ends when the full checkpoint was moved aside and the small one not yet put in its place."""
    checkpoints = folder_of(base).checkpoint_path
    rename: Callable[[Path, Path], Path] = Path.rename

    def until_the_second(path: Path, target: Path) -> Path:
        if path.name.endswith(".weights"):
            raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", until_the_second)
    assert run_prune(base, "--yes") == 130
    monkeypatch.undo()
    assert (checkpoints / ".step-4.full").is_dir()
    assert run_prune(base, "--yes") == 0
    assert saved_steps(checkpoints) == [4, 8]
    assert all(damage_of(checkpoints / f"step-{step}") is None for step in (4, 8))
    assert bytes_below(checkpoints) < 2.2 * WEIGHTS
