"""One process at a time trains in a run folder.

The first rank holds ``flock`` on the folder's ``lock`` for as long as it lives, and writes into it who it is. The
kernel lets go of the lock when the process ends, however it ends, so on one machine nothing is left behind. Where a
shared file system does not carry ``flock`` from one machine to another, what is written counts: a run that another
machine has not let go of is left alone until it has shown no sign of life for ``SILENCE`` seconds. Where a file system
has no ``flock`` at all, as Lustre may be mounted, what is written and the list of processes count on this machine, too.
"""

import fcntl
import json
import os
import platform
import sys
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
            taken = _flock(self._file, fcntl.LOCK_EX)
            if taken is not False:
                break
            time.sleep(0.25)
        else:
            holder = _read(self._file)
            os.close(self._file)
            raise UserError(
                f"{folder} is being trained by {holder or 'another process'}; wait for it, or stop it first"
            )
        if taken is None:
            print(
                f"note: the file system of {folder} has no locks; two runs that start there at the same moment would "
                "not notice one another, so start one at a time",
                file=sys.stderr,
                flush=True,
            )
        there = _read(self._file)
        restart = _restarted() and there is not None and there.launch == mine.launch != ""
        if there is not None and not restart and _alive(there, folder, locks=taken is not None):
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
        taken = _flock(file, fcntl.LOCK_SH)
        if taken is False:
            return holder or Holder(platform.node(), 0, "")
        return holder if holder is not None and _alive(holder, folder, locks=taken is not None) else None
    finally:
        os.close(file)


def _flock(file: int, kind: int) -> bool | None:
    """Take the lock if it is free. None on a file system without locks, where what is written has to do."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
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


def _alive(holder: Holder, folder: Path, locks: bool) -> bool:
    """Whether ``holder``, which has not let go, may be alive. On this machine ``flock`` has told, if it is there."""
    if holder.host == platform.node():
        return not locks and holder.pid not in (0, os.getpid()) and _is_process(holder.pid)
    signs = [path.stat().st_mtime for path in (folder / LOCK_FILE, folder / "status.json") if path.exists()]
    return time.time() - max(signs, default=0.0) < SILENCE


def _is_process(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # It is another user's.
        pass
    return True
