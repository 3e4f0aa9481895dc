"""A study of the debug size with folders that tests fill by hand."""

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from torchtitan_ext.run_folder import RunFolder
from torchtitan_ext.study import Plan, load_study, plan_study, write_record

STEPS = 40


@pytest.fixture
def plan(dataset: Path, tmp_path: Path) -> Callable[..., Plan]:
    """``plan(**keys)`` plans a study of ``standard`` and ``control_block``, seeds 0 and 1, with further keys."""
    base = {
        "model": {"size": "debug"},
        "data": {"path": str(dataset), "seq_len": 64},
        "training": {"steps": STEPS, "batch_tokens": 512},
    }
    (tmp_path / "debug.yaml").write_text(yaml.safe_dump(base))

    def make(**keys: object) -> Plan:
        study = {
            "base": "debug.yaml",
            "folder": str(tmp_path / "runs"),
            "variants": ["standard", "control_block"],
            "seeds": [0, 1],
            "baseline": "standard",
            **keys,
        }
        file = tmp_path / "study.yaml"
        file.write_text(yaml.safe_dump(study))
        plan = plan_study(load_study(file), 1)
        write_record(plan)
        return plan

    return make


@pytest.fixture
def leave(tmp_path: Path) -> Callable[..., RunFolder]:
    """``leave(name, state, step)`` leaves a run folder as a run in that state does."""

    def make(name: str, state: str, step: int, reason: str | None = None, steps: int = STEPS) -> RunFolder:
        folder = RunFolder(tmp_path / "runs" / name)
        folder.create()
        folder.append_metrics(
            step,
            {
                "loss_metrics/global_avg_loss": 3.25,
                "throughput/global_tokens_per_s": 12_345.0,
                "memory/max_reserved(GiB)": 1.5,
                "time_metrics/end_to_end(s)": 2.0,
                "progress/train_flops": step * 1e9,
                "progress/train_seconds": step * 2.0,
                "vs_baseline/loss": -0.125,
            },
        )
        folder.append_metrics(step, {"heldout/loss": 3.5})
        folder.write_status(state, step, steps, reason)
        return folder

    return make
