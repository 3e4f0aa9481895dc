"""``depth eval`` as a user calls it."""

import json
import os
import re
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from eval.evaluate import job
from torchtitan_ext.errors import UserError
from torchtitan_ext.run_folder import RunFolder
from torchtitan_ext.titan.restore import Restored

MakeRun = Callable[..., RunFolder]
DepthEval = Callable[..., int]


def test_against_a_baseline_on_other_data(
    make_run: MakeRun, standard: RunFolder, small_data: Path, depth_eval: DepthEval, capsys: pytest.CaptureFixture[str]
) -> None:
    gated = make_run("gated", "--model.variant", "m_gate_kv")
    assert depth_eval(gated.path, "--data", small_data, "--baseline", standard.path, "--top", 3, "--nproc", 1) == 0
    (out,) = (gated.path / "eval").glob("step-10-on-data-against-standard-*.json")
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
    (alone,) = (standard.path / "eval").glob("step-10-on-data-????????.json")
    alone = json.loads(alone.read_text())
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
        (["--tasks", "core"], "--tasks core: that is a set of tasks; ask for it with --suite core"),
        (["--tasks", "piqa", "olmes"], "ask for it with --suite olmes and the others with --tasks piqa"),
        (["--bos"], "--bos is about the questions of tasks; give --tasks or --suite as well"),
        (["--out", "results.png"], "--out results.png is for the results, and the picture goes beside them"),
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
    for arguments, advice in (
        ([], "or give it with --data"),
        (["--data", small_data], f"put it there again, so that {small_data} can be checked against it"),
    ):
        with pytest.raises(UserError) as caught:
            depth_eval(folder.path, *arguments)
        message = str(caught.value)
        assert message.startswith("the run's own data set is needed for its tokeniser: gone does not exist")
        assert message.endswith(advice)


def test_a_damaged_log_costs_no_result(
    make_run: MakeRun, small_data: Path, depth_eval: DepthEval, capsys: pytest.CaptureFixture[str]
) -> None:
    """What stands before the damage is read; otherwise training's loss is left out, with a warning."""
    folder = make_run("logged", "--data.path", str(small_data))
    out = folder.path / "eval" / "step-10.json"
    record = json.dumps({"step": 10, "heldout/loss": 5.5})
    for content, warning in (
        (f"{record}\n{{broken\n", None),
        (f"{{broken\n{record}\n", f"{folder.metrics_path}:1: not a JSON object"),
        (f"7\n{record}\n", f"{folder.metrics_path} is damaged"),
    ):
        folder.metrics_path.write_text(content)
        assert depth_eval(folder.path, "--nproc", 1) == 0
        results, errors = json.loads(out.read_text()), capsys.readouterr().err.splitlines()
        out.unlink()
        warnings = [line for line in errors if line.startswith("warning: ")]
        assert results["heldout"]["loss"] > 0
        if warning is None:
            assert warnings == []
            assert results["logged"]["loss"] == 5.5
        else:
            assert "logged" not in results
            (shown,) = warnings
            assert warning in shown


def test_the_model_makes_room_for_the_baseline(
    standard: RunFolder, small_data: Path, depth_eval: DepthEval, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """When the baseline is loaded, the weights of the run are no longer held, whatever was asked before."""
    pytest.importorskip("lm_eval", reason="needs the extra `eval`: pip install 'torchtitan-ext[eval]'")
    loaded: list[weakref.ref] = []
    real_load = job.load

    def load(*arguments: Any) -> Restored:
        assert all(weights() is None for weights in loaded)
        restored = real_load(*arguments)
        loaded.extend(weakref.ref(parameter) for parameter in restored.model.parameters())
        return restored

    task = {
        "task": "own",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "one.jsonl")}, "cache_dir": str(tmp_path / "cache")},
        "output_type": "loglikelihood",
        "test_split": "test",
        "doc_to_text": "import",
        "doc_to_target": "{{word}}",
        "metric_list": [{"metric": "acc"}],
    }
    (tmp_path / "one.jsonl").write_text('{"word": "os"}\n')
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(task))
    arguments = ["--baseline", standard.path, "--baseline-step", 10, "--data", small_data, "--out", tmp_path / "o.json"]
    monkeypatch.setattr(job, "load", load)
    depth_eval(standard.path, *arguments, "--tasks", "own", "--task-folder", tmp_path, "--prompt", "", "--nproc", 1)
    assert len(loaded) > 50


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
