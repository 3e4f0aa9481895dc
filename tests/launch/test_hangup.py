"""The end of a terminal: on SIGHUP ``depth train`` saves and leaves; under nohup, which ignores SIGHUP, it goes on."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from torchtitan_ext.run_folder import RunFolder

pytestmark = pytest.mark.slow

STEPS = 400
PATIENCE = 240
"""Seconds after which a launch counts as hung."""


class Training:
    """``depth train`` on two processes."""

    def __init__(self, dataset: Path, folder: Path, before: list[str]) -> None:
        self.folder = RunFolder(folder)
        run = {
            "model": {"size": "debug", "layers": 2},
            "data": {"path": str(dataset), "seq_len": 32},
            "training": {"steps": STEPS, "batch_tokens": 128},
            "checkpoint": {"every": 0},
            "heldout": {"every": 0},
            "logging": {"every": 1, "tensorboard": False},
            "folder": str(folder),
        }
        run_file = folder.with_suffix(".yaml")
        run_file.write_text(yaml.safe_dump(run))
        command = [*before, sys.executable, "-m", "torchtitan_ext.cli", "train", str(run_file), "--nproc", "2"]
        self.process = subprocess.Popen(
            command,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            # The tests may themselves run under nohup, which is inherited.
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
        )

    def hang_up_at(self, step: int) -> int:
        """Send SIGHUP to the whole session, as the end of its terminal does; returns the exit status."""
        deadline = time.monotonic() + PATIENCE
        while self.folder.readable_status().get("step", 0) < step:
            assert self.process.poll() is None
            assert time.monotonic() < deadline, "hung"
            time.sleep(0.01)
        os.killpg(self.process.pid, signal.SIGHUP)
        try:
            return self.process.wait(PATIENCE)
        finally:
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)


def test_a_run_saves_and_leaves(dataset: Path, tmp_path: Path) -> None:
    training = Training(dataset, tmp_path / "run", [])
    assert training.hang_up_at(5) == 128 + signal.SIGHUP
    status = training.folder.status()
    assert status
    assert status["state"] == "stopped"
    assert 5 <= status["step"] < STEPS
    assert (training.folder.checkpoint_path / f"step-{status['step']}").is_dir()


def test_a_run_under_nohup_goes_on(dataset: Path, tmp_path: Path) -> None:
    training = Training(dataset, tmp_path / "run", ["nohup"])
    assert training.hang_up_at(5) == 0
    status = training.folder.status()
    assert status
    assert (status["state"], status["step"]) == ("finished", STEPS)
