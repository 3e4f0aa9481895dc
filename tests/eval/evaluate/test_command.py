"""``depth eval`` as a user calls it."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from torchtitan_ext.errors import UserError
from torchtitan_ext.run_folder import RunFolder

MakeRun = Callable[..., RunFolder]
DepthEval = Callable[..., int]


@pytest.fixture(scope="session")
def small_data(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other text with the same tokeniser, of which a third is held out."""
    base = tmp_path_factory.mktemp("small")
    texts = [f"Document {number}: the class has {number} methods, and each returns None.\n" for number in range(60)]
    (base / "text.jsonl").write_text("".join(json.dumps({"text": text * 3}) + "\n" for text in texts))
    command = [
        sys.executable,
        "-m",
        "torchtitan_ext.cli",
        "prep",
        str(base / "text.jsonl"),
        "--out",
        str(base / "data"),
    ]
    command += ["--tokenizer", str(dataset / "tokenizer.json"), "--heldout-fraction", "0.3"]
    subprocess.run(command, check=True)
    return base / "data"


def test_against_a_baseline_on_other_data(
    make_run: MakeRun, standard: RunFolder, small_data: Path, depth_eval: DepthEval, capsys: pytest.CaptureFixture[str]
) -> None:
    gated = make_run("gated", "--model.variant", "m_gate_kv")
    assert depth_eval(gated.path, "--data", small_data, "--baseline", standard.path, "--top", 3, "--nproc", 1) == 0
    out = gated.path / "eval" / "step-10-on-data-against-standard.json"
    results, shown = json.loads(out.read_text()), capsys.readouterr().out
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert results["heldout"]["tokens"] == sum(row["tokens"] for row in results["by_context"])
    assert results["heldout"]["tokens"] == sum(row["tokens"] for row in results["by_document_position"])
    comparison = results["comparison"]
    assert comparison["difference"] == pytest.approx(results["heldout"]["loss"] - results["baseline_heldout"]["loss"])
    assert len(comparison["places_won"]) <= 3
    assert "logged" not in results, "another held-out split than that of training"
    assert f"{results['heldout']['loss']:.4f}" in shown
    paths = (str(gated.path), str(standard.path), str(small_data))
    assert [line for line in shown.splitlines() if len(line) > 80 and not any(path in line for path in paths)] == []

    assert depth_eval(standard.path, "--step", 10, "--data", small_data, "--nproc", 1) == 0
    alone = json.loads((standard.path / "eval" / "step-10-on-data.json").read_text())
    assert alone["heldout"]["loss"] == results["baseline_heldout"]["loss"]


def test_writing(
    standard: RunFolder, depth_eval: DepthEval, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = ["--prompt", "The class", "", "--max-tokens", 5, "--top-k", 50, "--seed", 4, "--nproc", 1]
    out = tmp_path / "new" / "samples.json"
    assert depth_eval(standard.path, *arguments, "--out", out) == 0
    samples = json.loads(out.read_text())["samples"]
    assert [sample["prompt"] for sample in samples] == ["The class", ""]
    assert "heldout" not in json.loads(out.read_text())
    assert f"The class{samples[0]['text']}" in capsys.readouterr().out
    assert [sample["top_k"] for sample in samples] == [50, 50]
    with pytest.raises(UserError, match="window of 64"):
        depth_eval(standard.path, "--prompt", "word " * 100, "--nproc", 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--step", 7], "no checkpoint of step 7; there are steps 10, 20"),
        (["--temperature", "nan"], "--temperature is nan; it must be 0 or more"),
        (["--top-p", 0], "--top-p is 0.0; it must be above 0"),
        (["--nproc", 0], "--nproc is 0; it must be 1 or more"),
        (["--baseline-step", 3], "give --baseline RUN2 as well"),
        (["--out", "."], "is a folder"),
        (["--data", "nowhere"], "nowhere does not exist"),
        (["--baseline", "nowhere"], "nowhere is not a run folder"),
    ],
)
def test_mistakes_are_named(standard: RunFolder, depth_eval: DepthEval, arguments: list[object], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        depth_eval(standard.path, *arguments)


def test_models_that_cannot_be_compared(make_run: MakeRun, standard: RunFolder, depth_eval: DepthEval) -> None:
    longer = make_run("longer", "--data.seq_len", "128")
    with pytest.raises(UserError, match="windows of 128 tokens and the run has windows of 64:"):
        depth_eval(standard.path, "--step", 10, "--baseline", longer.path)
    with pytest.raises(
        UserError, match=r"no checkpoint of step 20; there are steps 10; choose one with --baseline-step"
    ):
        depth_eval(standard.path, "--baseline", make_run("short").path)


def test_another_tokeniser_is_refused(
    make_run: MakeRun, depth_eval: DepthEval, small_data: Path, tmp_path: Path
) -> None:
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": f"Some letters, and {number}."}) + "\n" for number in range(40)))
    command = [sys.executable, "-m", "torchtitan_ext.cli", "prep", str(text), "--out", str(tmp_path / "letters")]
    subprocess.run([*command, "--tokenizer", "characters", "--heldout-fraction", "0.5"], check=True)
    folder = make_run("moved")
    with pytest.raises(UserError, match="letters was prepared with another tokeniser"):
        depth_eval(folder.path, "--data", tmp_path / "letters")
    # The run's data are gone: their own copy will do, other data cannot be checked.
    own = yaml.safe_load((folder.path / "run.yaml").read_text())
    own["data"]["path"] = "gone"
    (folder.path / "run.yaml").write_text(yaml.safe_dump(own))
    for arguments in ([], ["--data", small_data]):
        with pytest.raises(UserError, match="the run's own data set is needed for its tokeniser: gone does not exist"):
            depth_eval(folder.path, *arguments)


@pytest.mark.slow
def test_the_loss_is_the_one_that_training_logged(dataset: Path, tmp_path: Path, depth_eval: DepthEval) -> None:
    """A run trained by torchrun on two processes, evaluated by one and by two: equal to training's to 1e-6, and to
    each other to the last bit."""
    run = {
        "model": {"size": "debug", "variant": "m_gate_kv"},
        "data": {"path": str(dataset), "seq_len": 64},
        "training": {"steps": 4, "batch_tokens": 512, "micro_batch": 2},
        "optimizer": {"lr": 3e-3},
        "heldout": {"every": 4, "tokens": 8192},
        "logging": {"every": 1, "tensorboard": False},
        "folder": str(tmp_path / "trained"),
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("-m", "torchtitan_ext.train", "--config-file", str(tmp_path / "run.yaml")),
    ]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    folder = RunFolder(tmp_path / "trained")
    (logged,) = [record["heldout/loss"] for record in folder.metrics() if "heldout/loss" in record]
    results = []
    for processes in (1, 2):
        out = tmp_path / f"{processes}.json"
        assert depth_eval(folder.path, "--nproc", processes, "--out", out) == 0
        results.append(json.loads(out.read_text()))
        assert results[-1]["logged"]["loss"] == logged
        assert results[-1]["logged"]["same_windows"] == pytest.approx(logged, rel=1e-6)
    assert results[0] == results[1]
