"""One process at a time trains in a run folder.

The first rank holds ``flock`` on the folder's ``lock`` for as long as it lives, and writes into it who it is. The
kernel lets go of the lock when the process ends, however it ends, so on one machine nothing is left behind. Where a
shared file system does not carry ``flock`` from one machine to another, what is written counts: a run that another
machine has not let go of is left alone until it has shown no sign of life for ``SILENCE`` seconds.
"""

import fcntl
import json
import os
import platform
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from torchtitan_ext.errors import UserError

LOCK_FILE = "lock"
SILENCE = 900.0
"""Seconds without a sign of life (a logged step) after which a run on another machine is taken to be dead."""


@dataclass(frozen=True)
class Holder:
    """The process that trains in a run folder; ``pid`` is 0 while it has not said.

    ``launch`` is what all processes of one start have in common: torchrun's run id, which stays the same when it
    restarts its workers.
    """

    host: str
    pid: int
    launch: str

    @staticmethod
    def this_process() -> "Holder":
        launch = os.environ.get("TORCHELASTIC_RUN_ID", "none")
        return Holder(platform.node(), os.getpid(), "" if launch == "none" else launch)

    def __str__(self) -> str:
        return f"{f'process {self.pid}' if self.pid else 'another process'} on {self.host}"


class RunLock:
    """The right to train in ``folder``, held until ``release`` or the end of the process.

    Raises ``UserError`` that names the holder when another process has it.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / LOCK_FILE
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        mine = Holder.this_process()
        # A look at the lock (see holder_of) takes it for an instant, so one refusal is not the last word.
        for _ in range(4):
            if _flock(self._file, fcntl.LOCK_EX):
                break
            time.sleep(0.25)
        else:
            holder = _read(self._file)
            os.close(self._file)
            raise UserError(
                f"{folder} is being trained by {holder or 'another process'}; wait for it, or stop it first"
            )
        there = _read(self._file)
        restart = _restarted() and there is not None and there.launch == mine.launch != ""
        if there is not None and not restart and _alive_elsewhere(there, folder):
            os.close(self._file)
            raise UserError(
                f"{folder} is being trained by {there}; if that process is gone, delete {path} and start again"
            )
        self._write(json.dumps(asdict(mine)) + "\n")

    def release(self) -> None:
        self._write("")
        os.close(self._file)

    def _write(self, text: str) -> None:
        # In this order there is always a whole first line to be read: the old one or the new one.
        os.pwrite(self._file, text.encode(), 0)
        os.ftruncate(self._file, len(text.encode()))
        os.fsync(self._file)


def holder_of(folder: Path) -> Holder | None:
    """Who trains in ``folder`` now; None when nobody does, also after its process was killed."""
    try:
        file = os.open(folder / LOCK_FILE, os.O_RDONLY)
    except OSError:
        return None
    try:
        holder = _read(file)
        if not _flock(file, fcntl.LOCK_SH):
            return holder or Holder(platform.node(), 0, "")
        return holder if holder is not None and _alive_elsewhere(holder, folder) else None
    finally:
        os.close(file)


def _flock(file: int, kind: int) -> bool:
    """Take the lock if it is free. True as well on a file system without locks, where what is written has to do."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _restarted() -> bool:
    """Whether torchrun or Slurm has started this launch again, after ending the processes of the time before."""
    return any(
        os.environ.get(name, "0") not in ("", "0") for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
    )


def _read(file: int) -> Holder | None:
    """Who the lock file names; None when it was let go of, or damaged by a crash."""
    try:
        return Holder(**json.loads(os.pread(file, 4096, 0).split(b"\n")[0]))
    except (ValueError, TypeError):
        return None


def _alive_elsewhere(holder: Holder, folder: Path) -> bool:
    """Whether ``holder``, which has not let go, may be alive on another machine. On this one ``flock`` has told."""
    if holder.host == platform.node():
        return False
    signs = [path.stat().st_mtime for path in (folder / LOCK_FILE, folder / "status.json") if path.exists()]
    return time.time() - max(signs, default=0.0) < SILENCE
