"""On what a run was trained. Where there is no GPU, a script answers as nvidia-smi does."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from torchtitan_ext.machines import devices_of, note_machine, starts_of


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Eight GPUs of two kinds; `-i 6,7` are the last two."""
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    gpus = ["NVIDIA B200, 570.86.15"] * 6 + ["NVIDIA H200, 570.86.15"] * 2
    lines = "\n".join(gpus)
    program.write_text(
        f'#!/bin/bash\ngpus="{lines}"\n'
        '[[ "$*" == "--query-gpu=name,driver_version --format=csv,noheader"* ]] || exit 2\n'
        'if [[ $3 == -i ]]; then for i in ${4//,/ }; do sed -n "$((i + 1))p" <<<"$gpus"; done; else echo "$gpus"; fi\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return program


def test_gpus_drivers_and_processes_of_each_start(smi: Path, tmp_path: Path) -> None:
    logs = tmp_path / "run" / "logs"
    note_machine(logs, processes=None, hosts=4)
    note_machine(logs, processes=2, environment={"CUDA_VISIBLE_DEVICES": "6,7"})
    first, second = starts_of(tmp_path / "run")
    assert first["devices"] == {"NVIDIA B200": 6, "NVIDIA H200": 2}
    assert (first["host"], first["driver"]) == (platform.node(), "570.86.15")
    assert (first["processes"], first["world_size"]) == (8, 32)
    assert second["devices"] == {"NVIDIA H200": 2}
    assert (second["processes"], second["world_size"]) == (2, 2)
    assert devices_of(tmp_path / "run") == {"NVIDIA B200", "NVIDIA H200"}


def test_without_a_gpu_it_is_the_processor(tmp_path: Path) -> None:
    note_machine(tmp_path / "logs", processes=2, environment={"CUDA_VISIBLE_DEVICES": ""})
    (start,) = starts_of(tmp_path)
    assert start["driver"] is None
    (name,) = start["devices"]
    cpuinfo = Path("/proc/cpuinfo")
    assert not cpuinfo.exists() or "model name" not in cpuinfo.read_text() or name in cpuinfo.read_text()


def test_damaged_lines_are_left_out(tmp_path: Path) -> None:
    note_machine(tmp_path / "logs", processes=1)
    (file,) = (tmp_path / "logs" / "machines").iterdir()
    whole = json.loads(file.read_text())
    file.write_text(f'{{"format": 1, "ti\n[]\n{json.dumps({**whole, "format": 9})}\n{json.dumps(whole)}\n')
    assert starts_of(tmp_path) == [whole]
    assert devices_of(tmp_path / "none") == frozenset()


def test_the_launcher_on_several_hosts_notes_each(smi: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "launch.machine", str(tmp_path / "logs"), "auto", "2"]
    subprocess.run(command, check=True)
    (start,) = starts_of(tmp_path)
    assert (start["processes"], start["world_size"]) == (8, 16)
