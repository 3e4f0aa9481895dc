"""The entry: what it refuses, what it shows, and torchtitan's own entry on the same configuration."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from torchtitan_ext import train
from torchtitan_ext.cli import main as depth
from torchtitan_ext.cost import text_seen
from torchtitan_ext.resolve import load_resolved
from torchtitan_ext.run_folder import RunFolder


@pytest.fixture
def run_file(dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    run = {"model": {"size": "debug"}, "data": {"path": str(dataset), "seq_len": 64}, "training": {"steps": 20}}
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(run, sort_keys=False))
    return path


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--model.size", "10m"], "'10m' is unknown; did you mean '10M'?"),
        (["--model.variant", "standart"], "did you mean 'standard'?"),
        (["--model.heads", "7"], "width = 64 and heads = 7, which does not divide it; try heads = 8"),
        (["--depth.blocks", "3"], "depth.blocks is not an option of the variant; the variant has no options"),
        (["--training.batch_tokens", "100"], "not a multiple of data.seq_len"),
        (["--training.batch_tokens", "64000000"], "10287 windows of 64, and a batch needs 1000000"),
        (["--training.batch_tokens", "512", "--training.micro_batch", "3"], "does not divide the 8 sequences"),
        (["--parallelism.replicate", "2"], "does not give 1 ranks"),
        (["--parallelism.pipeline", "2"], "parallelism.pipeline=2 is not supported, because"),
        (["--data.path", "nowhere"], "nowhere does not exist"),
        (
            ["--data.seq_len", "65536", "--training.batch_tokens", "65536"],
            "the heldout split has 35798 tokens, 0 windows of 65536",
        ),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing_behind(
    overrides: list[str], message: str, run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train.main(["--config-file", str(run_file), *overrides]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    assert not printed.out
    assert not Path("runs").exists()


def test_a_batch_that_does_not_split_over_the_ranks(
    run_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert train.main(["--config-file", str(run_file), "--training.batch_tokens", "512"]) == 2
    assert "8 sequences (512 tokens) cannot be split over 3 ranks; use 384 tokens" in capsys.readouterr().err


def test_without_a_run_file_or_without_torchrun(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main([]) == 2
    assert "give a run file" in capsys.readouterr().err
    assert train.main(["--config-file"]) == 2
    assert "needs a run file" in capsys.readouterr().err
    assert train.main(["--config-file", str(run_file)]) == 2
    assert "start training with torchrun" in capsys.readouterr().err


def test_the_resolved_run_is_a_run_file_that_resolves_to_itself(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train.main(["--config-file", str(run_file), "--print-config", "--optimizer.lr", "0.5"]) == 0
    first = capsys.readouterr().out
    resolved = yaml.safe_load(first)
    assert resolved["optimizer"]["lr"] == 0.5
    assert resolved["training"]["batch_tokens"] % 64 == 0
    assert None not in (resolved["training"]["micro_batch"], resolved["optimizer"]["warmup_steps"])
    again = run_file.with_name("again.yaml")
    again.write_text(first)
    assert train.main(["--config-file", str(again), "--print-config"]) == 0
    assert capsys.readouterr().out == first


def test_a_run_says_how_often_it_sees_its_text(run_file: Path, dataset: Path) -> None:
    resolved = load_resolved(str(run_file), ["--training.batch_tokens", "6400", "--training.steps", "200"])
    there = json.loads((dataset / "manifest.json").read_text())["splits"]["train"]["tokens"]
    assert f"1.28M tokens of training over the {there / 1000:.0f}k in" in text_seen(resolved)
    assert text_seen(resolved).endswith(f": {6400 * 200 / there:.3g} epochs")


def test_depth_help_and_unknown_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert depth(["--help"]) == 0
    assert "depth train" in capsys.readouterr().out
    assert depth(["trian"]) == 2
    assert "did you mean 'train'?" in capsys.readouterr().err
    for command in (
        "prep",
        "train",
        "study",
        "plan",
        "compare",
        "eval",
        "export",
        "import",
        "bench",
        "sizes",
        "variants",
        "quickstart",
    ):
        with pytest.raises(SystemExit) as leaving:
            depth([command, "--help"])
        assert leaving.value.code == 0
        assert "example" in capsys.readouterr().out, command


def test_depth_sizes_and_variants(capsys: pytest.CaptureFixture[str]) -> None:
    assert depth(["sizes"]) == 0
    assert "500M-deep" in capsys.readouterr().out
    assert depth(["variants", "--size", "debug"]) == 0
    assert capsys.readouterr().out.splitlines()[2].startswith("standard")


@pytest.mark.slow
def test_torchtitans_own_entry_trains_a_named_configuration(dataset: Path, tmp_path: Path) -> None:
    """``--module torchtitan_ext --config quickstart``; on a CPU the device has to be chosen first."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "quickstart").symlink_to(dataset)
    script = tmp_path / "stock.py"
    script.write_text("import torchtitan_ext.titan\nfrom torchtitan.train import main\nmain()\n")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    chosen = ["--module", "torchtitan_ext", "--config", "quickstart", "--training.steps", "3"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *chosen], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    status = RunFolder(tmp_path / "runs" / "quickstart").status()
    assert status is not None
    assert (status["state"], status["step"]) == ("finished", 3)
