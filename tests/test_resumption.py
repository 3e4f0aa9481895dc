"""What changed between two starts of a run is printed and kept."""

import logging
import platform
from pathlib import Path

import pytest
import yaml

from eval.compare.provenance import read_origin
from torchtitan_ext.resolve import ResolvedRun, resolve
from torchtitan_ext.run_file import load_run
from torchtitan_ext.run_folder import RunFolder
from torchtitan_ext.start import start_run


@pytest.fixture
def run_file(dataset: Path, tmp_path: Path) -> Path:
    run = {"model": {"size": "debug"}, "data": {"path": str(dataset), "seq_len": 64}, "training": {"steps": 100}}
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({**run, "folder": str(tmp_path / "run")}))
    return path


def start(run_file: Path, *overrides: str) -> ResolvedRun:
    resolved = resolve(load_run(run_file, list(overrides)), ranks=1)
    lock = start_run(resolved, rank=0)
    assert lock is not None
    lock.release()
    return resolved


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    prefix = "Changed since the last start: "
    messages = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    caplog.clear()
    return [message.removeprefix(prefix) for message in messages if message.startswith(prefix)]


def test_changes_of_the_recipe_are_said_and_kept(run_file: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = start(run_file)
    start(run_file)
    assert said(caplog) == []
    start(run_file, "--optimizer.lr", "0.5", "--training.precision", "bf16", "--training.deterministic", "true")
    expected = [
        "training.precision was auto, is bf16",
        "training.deterministic was false, is true",
        f"optimizer.lr was {first.run.optimizer.lr}, is 0.5",
    ]
    assert said(caplog) == expected
    code = (Path(first.run.folder) / "code.txt").read_text()
    assert code.count("started ") == 3
    origin = read_origin(Path(first.run.folder), {})
    assert (origin.machines, len(origin.days), len(origin.revisions)) == ((platform.node(),), 3, 1)
    (hardware,) = origin.hardware
    assert hardware.startswith("1 process, ")
    assert [line.removeprefix("changed   ") for line in code.splitlines() if line.startswith("changed")] == expected
    start(run_file, "--optimizer.lr", "0.5", "--training.precision", "bf16")
    assert said(caplog) == ["training.deterministic was true, is false"]


def test_another_revision_and_a_schedule_that_had_ended_are_said(
    run_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    batch = ("--training.batch_tokens", "1024")  # else the recipe's, which follows the length
    folder = RunFolder(start(run_file, *batch).run.folder)
    code = folder.path / "code.txt"
    lines = code.read_text().splitlines()
    now = next(line for line in lines if line.startswith("revision")).removeprefix("revision  ")
    code.write_text("\n".join("revision  0123abc" if line.startswith("revision") else line for line in lines) + "\n")
    folder.write_status("finished", 100, 100)
    start(run_file, *batch, "--training.steps", "150", "--optimizer.warmup_steps", "10")
    assert said(caplog) == [
        "training.steps was 100, is 150",
        "the learning rate had come to its end at step 100, and goes on from where the schedule of 150 steps has it "
        "there",
        f"the code's revision was 0123abc, is {now}",
    ]
