"""The commands of docs/first-study.md, one after another, at a small size: two nodes of one process each for four of
eight, a stand-in for the container, and text that Python ships for FineWeb-Edu."""

import re
import shlex
from pathlib import Path

import pytest
import yaml

from launch.slurm import job_states
from launch.study.slurm_queue import JobList
from torchtitan_ext.cli import main as depth
from torchtitan_ext.run_folder import RunFolder
from torchtitan_ext.study import load_study

from .conftest import ROOT, wait_for_job

PAGE = ROOT / "docs" / "first-study.md"
STUDY = "train_configs/studies/first_500m.yaml"
SMALLER = {
    STUDY: "first_500m.yaml",
    "fineweb-edu --config sample-10BT --tokenizer gpt2": "builtin --tokenizer bpe:512 --heldout-fraction 0.05",
    "--vocab-size 50257": "--vocab-size 512",
    "--gpus 32": "--gpus 2",
    "--nproc 32": "--nproc 2",
    "launch/slurm/": f"{ROOT}/launch/slurm/",
    "--jobs 1": "--jobs 1 --sbatch=--gres=none --sbatch=--time=60",
    "attnres_block-500M-s2": "attnres_block-debug-s2",
}
"""Words of the page, and what stands for them here."""


def commands() -> list[str]:
    """What the page has people type, from `depth` on."""
    blocks = re.findall(r"^```\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    return [line.removeprefix("depth ") for line in lines if line.startswith("depth ")]


def smaller(command: str) -> list[str]:
    for words, ours in SMALLER.items():
        command = command.replace(words, ours)
    return shlex.split(command)


def wait_for_result(runs: Path, name: str) -> None:
    (job,) = JobList(runs).read()[name]
    wait_for_job(lambda: job_states([job]) == {job: "COMPLETED"}, job, runs)
    status = RunFolder(runs / name).status()
    assert status is not None
    assert status["state"] == "finished"


def test_the_page_names_what_is_there() -> None:
    said = "\n".join(commands())
    assert all(words in said for words in SMALLER)
    study = load_study(ROOT / STUDY)
    assert [entry.label for entry in study.variants].count("attnres_block") == 1
    assert 2 in study.seeds


@pytest.mark.slow
@pytest.mark.usefixtures("slurm")
def test_from_zero_to_a_report(
    container: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NPROC_PER_NODE", "1")
    study = yaml.safe_load((ROOT / STUDY).read_text())
    small = {"variants": ["standard", "attnres_block"], "seeds": [0, 2], "base": "debug.yaml"}
    Path("first_500m.yaml").write_text(yaml.safe_dump({**study, **small}))
    run = {
        "model": {"size": "debug"},
        "data": {"path": "data/fineweb-edu-10BT", "seq_len": 64},
        "training": {"steps": 4, "batch_tokens": 512, "micro_batch": 4},
        "heldout": {"every": 2, "tokens": 4096},
        "logging": {"every": 1},
    }
    Path("debug.yaml").write_text(yaml.safe_dump(run))
    runs = Path("runs/first_500m")
    said: dict[str, str] = {}
    for command in commands():
        assert depth(smaller(command)) == 0, command
        if " --slurm " in command:
            assert depth(smaller(command)) == 0, "again, by someone who is not sure"
            for name in ("standard-debug-s0", "attnres_block-debug-s0", "standard-debug-s2"):
                wait_for_result(runs, name)
                if name != "standard-debug-s2":
                    assert depth(smaller(command)) == 0  # --jobs 1: the next one
        said[" ".join(command.split()[:2])] = capsys.readouterr().out
    assert "epochs" in said["study plan"]
    assert "3 of 4 ended" in said["study status"]
    assert "attnres_block-debug-s2 is dropped at step 0: 0.8 nats behind" in said["study drop"]
    assert Path("report/report.html").stat().st_size > 0
    assert "dropped by hand: 0.8 nats behind" in Path("report/report.md").read_text()
    assert "3 runs pruned" in said["study prune"]
    # Training ran inside the container alone.
    assert {line.split()[-1] for line in container.read_text().splitlines()} == {"n1", "n2"}
