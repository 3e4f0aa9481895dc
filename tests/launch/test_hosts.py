"""launch/hosts.sh: the same command on every host."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from torchtitan_ext.run_folder import RunFolder

SCRIPT = Path(__file__).resolve().parent.parent.parent / "launch" / "hosts.sh"
STEPS = 40
TIMEOUT = 600
"""Seconds after which a launch counts as hung."""


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["2"],
        ["2", "node1:29500"],
        ["two", "node1:29500", "--config-file", "run.yaml"],
        ["0", "node1:29500", "--config-file", "run.yaml"],
        ["2", "node1", "--config-file", "run.yaml"],
        ["--config-file", "run.yaml", "--name", "x"],
    ],
)
def test_a_command_that_is_not_whole_is_refused_in_one_line(arguments: list[str]) -> None:
    environment = {**os.environ, "PYTHON": "false"}
    done = subprocess.run(["bash", str(SCRIPT), *arguments], capture_output=True, text=True, env=environment)
    assert done.returncode == 2
    assert done.stderr == "error: usage: launch/hosts.sh HOSTS HEAD:PORT --config-file RUN_FILE …\n"


@contextmanager
def two_hosts(arguments: list[str], port: int, folder: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The script as two hosts would call it, with one process each; their output goes to ``folder/host-*``."""
    settings = {"NPROC_PER_NODE": "1", "OMP_NUM_THREADS": "1", "PYTHON": sys.executable, "LOG_FOLDER": f"{folder}/logs"}
    hosts = []
    try:
        for number in (0, 1):
            with open(folder / f"host-{number}", "wb") as output:
                host = subprocess.Popen(
                    ["bash", str(SCRIPT), "2", f"localhost:{port}", *arguments],
                    env={**os.environ, **settings},
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            hosts.append(host)
        yield hosts
    finally:
        for host in hosts:
            if host.poll() is None:
                for process in [*children(host.pid), host.pid]:
                    os.kill(process, signal.SIGKILL)
                host.wait()


def children(pid: int) -> list[int]:
    done = subprocess.run(["ps", "-o", "pid=,args=", "--ppid", str(pid)], capture_output=True, text=True)
    return [int(line.split()[0]) for line in done.stdout.splitlines() if "torchtitan_ext.train" in line]


@pytest.mark.slow
def test_two_hosts_go_on_from_the_last_checkpoint_when_a_process_dies(
    dataset: Path, tmp_path: Path, free_port: int
) -> None:
    run_file = tmp_path / "debug.yaml"
    run = {
        "model": {"size": "debug"},
        "data": {"path": str(dataset), "seq_len": 64},
        "training": {"steps": STEPS, "batch_tokens": 1024, "micro_batch": 8},
        "optimizer": {"lr": 3e-3},
        "checkpoint": {"every": 5},
        "heldout": {"every": 0},
        "logging": {"every": 1},
    }
    run_file.write_text(yaml.safe_dump(run))
    folder = RunFolder(tmp_path / "run")

    with two_hosts(["--config-file", str(run_file), "--folder", str(folder.path)], free_port, tmp_path) as hosts:

        def said() -> str:
            return "\n".join((tmp_path / f"host-{number}").read_text()[-3000:] for number in (0, 1))

        deadline = time.monotonic() + TIMEOUT
        while not (folder.checkpoint_path / "step-5").is_dir():
            assert all(host.poll() is None for host in hosts), said()
            assert time.monotonic() < deadline, said()
            time.sleep(0.05)
        (victim,) = children(hosts[1].pid)
        os.kill(victim, signal.SIGKILL)
        assert [host.wait(TIMEOUT) for host in hosts] == [0, 0], said()

    status = folder.status()
    assert status is not None
    assert (status["state"], status["step"]) == ("finished", STEPS)
    records = [record for record in folder.metrics() if "grad_norm" in record]
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    assert (folder.path / "code.txt").read_text().count("started ") == 2
    # The host whose process died restarted it once. The other one restarted its own to go along.
    attempts = {path.name for path in (tmp_path / "logs").glob("*/*/attempt_*")}
    assert attempts == {"attempt_0", "attempt_1"}
