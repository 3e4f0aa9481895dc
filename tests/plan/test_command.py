"""`depth plan` from the command line: what it says, and what it says to mistakes."""

import re
from pathlib import Path

import pytest
import yaml

from tests.strangers import STRANGERS
from torchtitan_ext.cli import main
from torchtitan_ext.depth.registry import VARIANTS
from torchtitan_ext.gpus import GPUS, Gpu

VOCABULARY = 512
PARAMETERS = 512 * 64 + 64 + 4 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 192 + 2 * 64)
"""Of the debug size: tied embedding, last norm, and 4 layers of attention (2 of 4 heads for keys and values),
feed-forward and norms."""


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    run = {
        "model": {"size": "debug", "layers": 4, "variant": "m_gate_kv"},
        "data": {"path": str(tmp_path / "none"), "seq_len": 64},
        "training": {"tokens": 4096, "batch_tokens": 1024},
    }
    path.write_text(yaml.safe_dump(run))
    return path


def plan(run_file: Path, *arguments: str) -> int:
    return main(["plan", str(run_file), "--vocab-size", str(VOCABULARY), *arguments])


def test_a_plan_without_data(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(run_file, "--gpu", "h100", "--gpus", "2", "--mfu", "0.4", "--model.variant", "standard") == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert f"{PARAMETERS:,} parameters" in out, out
    assert "2 x H100" in out
    assert "4 steps, 4.1k tokens" in out
    # 6 FLOPs per parameter, and 12 per layer, width and position for attention.
    flops = 6 * PARAMETERS + 12 * 4 * 64 * 64
    rate = 2 * 0.4 * 989e12 / flops
    assert f"{rate / 1e6:.0f}M tokens/s" in out
    assert re.search(r"largest micro-batch +8\n", out), "all 8 sequences of a GPU's share"


def test_a_variant_stands_beside_standard(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(run_file, "--gpus", "1") == 0
    assert re.search(r"GiB per GPU +m_gate_kv +standard\n", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu", "H20O"], r"--gpu H20O is unknown; did you mean 'H200'\?"),
        (["--gpus", "0"], "--gpus 0 is no number of GPUs"),
        (["--mfu", "45"], "--mfu 45 must be a share of the peak, above 0 and at most 1"),
        (["--vocab-size", "0"], "--vocab-size 0 is no vocabulary"),
        (["--gpus", "3"], "cannot be split over 3 ranks"),
        (["--gpus", "2", "--training.micro_batch", "3"], "training.micro_batch 3 does not divide the 8 sequences"),
        (
            ["--gpus", "2", "--parallelism.replicate", "4"],
            r"parallelism.replicate 4 × parallelism.shard -1 does not give 2",
        ),
        (["--model.variant", "moba"], "model.variant 'moba' is unknown; did you mean 'moda'"),
    ],
)
def test_mistakes(run_file: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(run_file, *arguments) == 2
    error = capsys.readouterr().err
    assert re.search(message, error)
    assert error.count("\n") == 1


def test_missing_data_names_the_way_out(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(run_file)]) == 2
    assert re.search(
        "does not exist; .*; to plan without it give its vocabulary, such as --vocab-size", capsys.readouterr().err
    )


def test_what_does_not_fit(run_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs of a few MB stand for runs of many GB."""
    arguments = ["--gpus", "1", "--gpu", "A100", "--model.variant", "standard", "--training.micro_batch", "16"]

    def refused(megabytes: float) -> str:
        monkeypatch.setitem(GPUS, "A100", Gpu(megabytes * 1e6, 312e12, ""))
        assert plan(run_file, *arguments) == 2
        return capsys.readouterr().err

    moments = 16 * PARAMETERS / 1e6  # weights, gradients and two moments in fp32
    fitting = re.search(r"micro-batch 16 does not fit on A100; --training.micro_batch (\d+) does", refused(moments + 8))
    assert fitting
    assert plan(run_file, *arguments[:-1], fitting[1]) == 0
    capsys.readouterr()
    nowhere = refused(moments / 2)
    assert re.search("does not fit on A100, nor does 1; what would fit: ", nowhere)
    assert "--gpu H100" in nowhere
    assert "--gpus" in nowhere.partition("what would fit")[2]


def test_a_schedule_that_grows_is_planned_at_its_longest(
    run_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory of the layers applied twice, which is that of the loop with the same weights."""
    wide = ("--model.size", "100M", "--model.layers", "4", "--data.seq_len", "512")
    found = {}
    for variant in ("growing", "looped", "standard"):
        monkeypatch.setitem(VARIANTS, variant, {**VARIANTS, **STRANGERS}[variant])
        assert plan(run_file, "--gpus", "1", *wide, "--model.variant", variant) == 0
        (found[variant],) = re.findall(r"\n *activations +(\S+)", capsys.readouterr().out)
    assert found["growing"] == found["looped"] != found["standard"]
