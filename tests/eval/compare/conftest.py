"""Small recorded runs, made by formula, so that right answers can be computed by hand."""

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from torchtitan_ext.run_folder import RunFolder

STEPS = (10, 20, 40, 60, 80, 100)
BATCH = 1000


def straight(start: float, end: float) -> Callable[[int], float]:
    """A loss that falls evenly from ``start`` at step 0 to ``end`` at step 100."""
    return lambda step: start + (end - start) * step / 100


@dataclass
class Recorded:
    """A run to be written. Losses are of the step; a step takes ``step_seconds`` and ``BATCH`` tokens."""

    loss: Callable[[int], float] = field(default_factory=lambda: straight(8.0, 4.0))
    variant: str = "standard"
    seed: int = 0
    size: str = "10M"
    lr: float = 1e-3
    step_seconds: float = 0.5
    memory: float = 2.0
    flops_per_token: int = 600
    parameters: int = 100
    steps: tuple[int, ...] = STEPS
    state: str = "finished"
    reason: str | None = None
    data: Mapping[str, Any] = field(default_factory=dict)
    run_file: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    heldout: bool = True

    def records(self) -> list[dict[str, Any]]:
        lines = []
        for step in self.steps:
            decay = min(1.0, (self.steps[-1] - step) / (0.2 * self.steps[-1]))
            training = {
                "loss_metrics/global_avg_loss": self.loss(step) - 0.1,
                "throughput/global_tokens_per_s": BATCH / self.step_seconds,
                "time_metrics/end_to_end(s)": self.step_seconds,
                "memory/max_active(GiB)": self.memory,
                "progress/tokens": BATCH * step,
                "progress/train_flops": float(self.flops_per_token * BATCH * step),
                "progress/train_seconds": self.step_seconds * step,
                "lr/AdamW/0": self.lr * decay,
            }
            lines.append({"step": step, "time": 1e9 + step, **training})
            if self.heldout:
                measured = {"heldout/loss": self.loss(step), "heldout/bits_per_byte": self.loss(step) / 2}
                lines.append({"step": step, "time": 1e9 + step, **measured})
        lines.append({"step": self.steps[-1], "time": 2e9, **self.extra})
        return lines

    def write(self, path: Path) -> Path:
        folder = RunFolder(path)
        folder.create()
        data = {
            "fingerprint": "aaaa",
            "heldout_fingerprint": "bbbb",
            "vocab_size": 4096,
            "seq_len": 100,
            "seed": self.seed,
            "document_mask": False,
            **self.data,
        }
        model = {"layers": 2, "width": 8, "variant": self.variant}
        folder.write_facts(
            {
                "name": path.name,
                "size": self.size,
                "variant": self.variant,
                "identity": {"model": model, "seed": self.seed, "data": data, "batch_tokens": BATCH},
                "parameters": self.parameters,
                "flops_per_token": self.flops_per_token,
                "steps": self.steps[-1],
            }
        )
        run: dict[str, Any] = {
            "name": path.name,
            "folder": str(path),
            "seed": self.seed,
            "model": {"size": self.size, "variant": self.variant},
            "depth": {},
            "data": {"path": "nowhere", "seq_len": data["seq_len"], "seed": self.seed},
            "training": {"steps": self.steps[-1], "batch_tokens": BATCH, "compile": False},
            "optimizer": {"lr": self.lr},
            "heldout": {"every": 20, "tokens": 5000},
        }
        for section, keys in self.run_file.items():
            run[section] = {**run.get(section, {}), **keys}
        folder.write_run(yaml.safe_dump(run))
        folder.metrics_path.write_text("".join(json.dumps(record) + "\n" for record in self.records()))
        folder.write_status(self.state, self.steps[-1], self.steps[-1], self.reason)
        return path


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A folder for runs."""
    return tmp_path / "runs"


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that any user may read, for tests of permissions, with ``as_a_user``."""
    user = os.getresuid()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder
        os.setresuid(*user)
        for inside in folder.iterdir():
            if inside.is_dir():
                inside.chmod(0o755)


def as_a_user() -> None:
    """Be one whom permissions bind until ``public`` ends; the superuser may do everything."""
    if os.getuid() == 0:
        os.setresuid(65534, 65534, 0)
