"""Two processes never train in one run folder, and a killed one does not keep others out."""

import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchtitan_ext.errors import UserError
from torchtitan_ext.run_folder import RunFolder
from torchtitan_ext.run_lock import SILENCE, RunLock, holder_of

HOLD = "import sys, time; from pathlib import Path; from torchtitan_ext.run_lock import RunLock; \
lock = RunLock(Path(sys.argv[1])); print('held', flush=True); time.sleep(600)"


@pytest.fixture
def other(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that trains in ``tmp_path``."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def test_a_second_process_is_refused_and_told_by_whom(other: subprocess.Popen[str], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"is being trained by process {other.pid} on {platform.node()}"):
        RunLock(tmp_path)
    holder = holder_of(tmp_path)
    assert holder is not None
    assert (holder.pid, holder.host) == (other.pid, platform.node())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_process_leaves_the_folder_free(
    number: signal.Signals, other: subprocess.Popen[str], tmp_path: Path
) -> None:
    other.send_signal(number)
    other.wait()
    assert holder_of(tmp_path) is None
    lock = RunLock(tmp_path)
    holder = holder_of(tmp_path)
    assert holder is not None
    assert holder.pid == os.getpid()
    lock.release()
    assert holder_of(tmp_path) is None


def test_without_locks_a_living_process_of_this_machine_counts(without_locks: dict[str, str], tmp_path: Path) -> None:
    """Every process gets an error from ``flock``; others try while the first lives, and after it was killed."""
    environment = os.environ | without_locks
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    first = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    command[2] = HOLD.replace("sleep(600)", "sleep(0)")
    try:
        assert first.stdout is not None
        assert first.stdout.readline() == "held\n"
        second = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
        assert f"is being trained by process {first.pid} on {platform.node()}" in second.stderr
    finally:
        first.kill()
        _, err = first.communicate()
    assert "has no locks" in err
    third = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    assert third.stdout == "held\n"


def test_looking_does_not_keep_anyone_out(tmp_path: Path) -> None:
    RunLock(tmp_path).release()
    look = "import sys; from pathlib import Path; from torchtitan_ext.run_lock import holder_of\n\
print('looking', flush=True)\nwhile True: holder_of(Path(sys.argv[1]))"
    process = subprocess.Popen([sys.executable, "-c", look, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "looking\n"
        for _ in range(20):
            RunLock(tmp_path).release()
    finally:
        process.kill()
        process.wait()


def on_another_machine(folder: Path, launch: str = "") -> None:
    """What a process on another machine leaves where the file system does not carry its lock to this one."""
    (folder / "lock").write_text(json.dumps({"host": "node7", "pid": 4711, "launch": launch}))
    RunFolder(folder).write_status("running", 3, 10)


def silent_for(folder: Path, seconds: float) -> None:
    for name in ("lock", "status.json"):
        os.utime(folder / name, (time.time() - seconds,) * 2)


def test_a_process_on_another_machine_is_believed_while_it_shows_signs_of_life(tmp_path: Path) -> None:
    on_another_machine(tmp_path)
    holder = holder_of(tmp_path)
    assert holder is not None
    assert str(holder) == "process 4711 on node7"
    with pytest.raises(UserError, match=r"process 4711 on node7; if that process is gone, delete .*/lock"):
        RunLock(tmp_path)
    silent_for(tmp_path, SILENCE - 60)
    assert holder_of(tmp_path) is not None
    silent_for(tmp_path, SILENCE + 60)
    assert holder_of(tmp_path) is None
    RunLock(tmp_path).release()


def test_a_launch_that_is_started_again_elsewhere_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm's requeue and torchrun's restart end the old processes first; the same id alone proves nothing."""
    on_another_machine(tmp_path, launch="job-12")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-12")
    with pytest.raises(UserError, match="node7"):
        RunLock(tmp_path)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    RunLock(tmp_path).release()
    on_another_machine(tmp_path, launch="job-13")
    with pytest.raises(UserError, match="node7"):
        RunLock(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"host": "a"}', "\x00\x00"])
def test_a_lock_file_that_a_crash_damaged_is_no_obstacle(content: str, tmp_path: Path) -> None:
    (tmp_path / "lock").write_text(content)
    assert holder_of(tmp_path) is None
    RunLock(tmp_path).release()


def test_a_run_folder_may_hold_a_lock(tmp_path: Path) -> None:
    RunLock(tmp_path).release()
    RunFolder(tmp_path).create()
