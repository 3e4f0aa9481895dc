"""A study with a wall-clock control, run for real: it is solved from the step times that the study measures."""

import json
from collections.abc import Callable
from pathlib import Path
from statistics import median

import pytest
import yaml

from torchtitan_ext.cli import main as depth
from torchtitan_ext.run_folder import RunFolder
from torchtitan_ext.study import Plan

pytestmark = pytest.mark.slow

STEPS = 12
NAMES = ("standard-debug-s3", "m_gate_kv-debug-s3", "m_gate_kv_wall_clock-debug-s3")


def logged(folder: RunFolder, tag: str) -> dict[int, float]:
    return {record["step"]: record[tag] for record in folder.metrics() if tag in record}


def test_the_control_trains_the_baseline_for_the_time_of_the_variant(
    plan: Callable[..., Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)  # the base run file alone would train in runs/debug, which is in the study's folder
    three = plan(
        variants=["standard", "m_gate_kv"],
        seeds=[3],
        controls=[{"wall_clock": "m_gate_kv"}],
        budget={"match": "tokens", "tolerance": 0.2},  # a whole number of so few steps is far from the exact time
        retries=0,
        set={"training.steps": STEPS, "logging.every": 1, "heldout.every": 0, "logging.tensorboard": False},
    )
    assert three.runs[2].command is None
    assert depth(["study", "run", str(three.study.file), "--nproc", "1"]) == 0
    printed = capsys.readouterr().out
    assert "3 of 3 ended" in printed
    assert "failed" not in printed
    assert {path.name for path in (tmp_path / "runs").iterdir() if path.is_dir()} == set(NAMES)

    standard, variant, control = (RunFolder(tmp_path / "runs" / name) for name in NAMES)
    own, other = (median(logged(folder, "time_metrics/end_to_end(s)").values()) for folder in (standard, variant))
    steps = round(STEPS * other / own)
    trained = yaml.safe_load((control.path / "run.yaml").read_text())
    assert trained["training"]["steps"] == steps
    assert (trained["name"], trained["seed"], trained["data"]["seed"]) == (NAMES[2], 3, 3)
    assert trained["logging"]["baseline"] == str(standard.path)
    status = control.status()
    assert status is not None
    assert (status["state"], status["step"]) == ("finished", steps)
    # The same model from the same weights on the same first batch.
    facts = [json.loads((folder.path / "facts.json").read_text()) for folder in (standard, control)]
    assert facts[0]["identity"] == facts[1]["identity"]
    losses = [logged(folder, "loss_metrics/global_avg_loss") for folder in (standard, control)]
    assert losses[0][1] == losses[1][1]
    assert max(losses[1]) == steps
