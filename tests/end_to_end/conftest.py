"""Real training processes on a real data set: the debug size on text that Python ships."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import yaml

from torchtitan_ext.run_folder import RunFolder

TIMEOUT = 240
"""Seconds after which a launch counts as hung."""


@pytest.fixture(scope="session")
def run_file(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 steps of 8 short windows, in two passes per step on two ranks: seconds, once the processes have started."""
    path = tmp_path_factory.mktemp("files") / "debug.yaml"
    run = {
        "model": {"size": "debug"},
        "data": {"path": str(dataset), "seq_len": 64},
        "training": {"steps": 60, "batch_tokens": 512, "micro_batch": 2},
        "optimizer": {"lr": 3e-3},
        "checkpoint": {"every": 20},
        "heldout": {"every": 20, "tokens": 4096},
        "logging": {"every": 1},
    }
    path.write_text(yaml.safe_dump(run))
    return path


class Launch:
    """Training processes under torchrun."""

    def __init__(self, run_file: Path, folder: Path, *overrides: str, ranks: int) -> None:
        self.folder = RunFolder(folder)
        self.log = folder.parent / f"{folder.name}.log"
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)),
            *("-m", "torchtitan_ext.train", "--config-file", str(run_file), "--folder", str(folder), *overrides),
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.started_at = time.time()
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )

    @property
    def output(self) -> str:
        return self.log.read_text()

    def finish(self) -> "Launch":
        """Wait for the end of a launch that must succeed."""
        assert self.wait() == 0, self.output[-4000:]
        return self

    def wait(self) -> int:
        try:
            return self.process.wait(TIMEOUT)
        finally:
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)

    def signal_at(self, step: int, number: signal.Signals) -> int:
        """Send ``number`` to all processes of this launch once it has logged ``step``, the ranks first, so that none
        hears of it from another; returns the exit status."""
        deadline = time.monotonic() + TIMEOUT
        while self._step() < step:
            assert self.process.poll() is None, f"ended before step {step}:\n{self.output[-4000:]}"
            assert time.monotonic() < deadline, f"hung before step {step}:\n{self.output[-4000:]}"
            time.sleep(0.01)
        for process in reversed(psutil.Process(self.process.pid).children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)
        self.process.send_signal(number)
        return self.wait()

    def _step(self) -> int:
        status = self.folder.status()
        return status["step"] if status and status["time"] >= self.started_at else 0


@pytest.fixture(scope="session")
def train_many(run_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, RunFolder]]:
    """``train_many({name: overrides}, ranks=2)`` trains all these runs in one launch and returns their folders;
    ``prepare(name, folder)`` may fill a run's folder first; ``file`` may be another run file;
    ``strangers``: the variants of docs/adding-a-variant.md are there too."""

    def train(
        runs: dict[str, list[str]],
        ranks: int = 2,
        prepare: Callable[[str, Path], None] | None = None,
        file: Path = run_file,
        strangers: bool = False,
    ) -> dict[str, RunFolder]:
        base = tmp_path_factory.mktemp("many")
        folders = {name: base / name for name in runs}
        if prepare is not None:
            for name, folder in folders.items():
                prepare(name, folder)
        (base / "runs.json").write_text(json.dumps({str(folders[name]): runs[name] for name in runs}))
        worker = Path(__file__).with_name("many_runs.py")
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)),
            *(str(worker), str(file), str(base / "runs.json"), *(["strangers"] if strangers else [])),
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=len(runs) * TIMEOUT)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        return {name: RunFolder(folder) for name, folder in folders.items()}

    return train


@pytest.fixture(scope="session")
def launch(run_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Launch]:
    """``launch(name, *overrides, ranks=2)`` starts the debug run in the folder of that name."""
    base = tmp_path_factory.mktemp("runs")

    def start(name: str, *overrides: str, ranks: int = 2) -> Launch:
        return Launch(run_file, base / name, *overrides, ranks=ranks)

    return start


@pytest.fixture(scope="session")
def unbroken(launch: Callable[..., Launch]) -> RunFolder:
    """The debug run on two ranks from its first step to its last."""
    return launch("unbroken").finish().folder
