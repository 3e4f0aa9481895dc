"""On which machines a run was trained: ``logs/machines/HOST.jsonl`` in its folder has an object for each start there:

``{"format": 1, "time", "host", "devices": {name: number}, "driver", "processes", "world_size"}``; ``driver`` is null
where there is no GPU, and ``devices`` then names the processor. The launchers write it, before any process starts.
"""

import json
import os
import platform
import subprocess
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FORMAT = 1
FOLDER = "machines"
SMI = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]


def note_machine(
    logs: Path, *, processes: int | None, hosts: int = 1, environment: Mapping[str, str] = os.environ
) -> None:
    """Note in a run's ``logs`` that a start is about to be made here.

    Args:
        logs: the run folder's ``logs``.
        processes: of this host; None: one for each GPU.
        hosts: of the start, each with as many processes.
        environment: of its processes; CUDA_VISIBLE_DEVICES says which GPUs they may use.
    """
    gpus = _gpus(environment.get("CUDA_VISIBLE_DEVICES"))
    devices = Counter(name for name, _ in gpus) or Counter([processor()])
    each = processes if processes is not None else len(gpus) or 1
    entry = {
        "format": FORMAT,
        "time": time.time(),
        "host": platform.node(),
        "devices": dict(devices),
        "driver": gpus[0][1] if gpus else None,
        "processes": each,
        "world_size": each * hosts,
    }
    path = logs / FOLDER / f"{platform.node()}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(entry) + "\n")


def starts_of(run_folder: Path) -> list[dict[str, Any]]:
    """The starts of a run that were noted, by time; none for a run that was started otherwise. Lines that are damaged
    are left out: they are no part of a result."""
    found = []
    for path in (run_folder / "logs" / FOLDER).glob("*.jsonl"):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                entry = json.loads(line)
                if entry["format"] == FORMAT:
                    found.append({**entry, "time": float(entry["time"]), "devices": dict(entry["devices"])})
            except (ValueError, KeyError, TypeError):
                continue
    return sorted(found, key=lambda entry: entry["time"])


def devices_of(run_folder: Path) -> frozenset[str]:
    """The kinds of devices that a run was trained on, over all starts; empty where nothing was noted."""
    return frozenset(name for entry in starts_of(run_folder) for name in entry["devices"])


def _gpus(visible: str | None) -> list[tuple[str, str]]:
    """Name and driver of each GPU that may be used; none where there is no driver."""
    if visible == "":
        return []
    chosen = [] if visible is None else ["-i", visible]
    try:
        done = subprocess.run([*SMI, *chosen], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return []
    if done.returncode:
        return []
    pairs = [line.rpartition(",") for line in done.stdout.splitlines() if "," in line]
    return [(name.strip(), driver.strip()) for name, _, driver in pairs]


def processor() -> str:
    """The processor's name where Linux says it, else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine() or "unknown processor"
