"""Start runs one after another, some of which must fail, with damage done to them in between; torch is imported once.

torchrun … starts.py RUN_FILE STARTS.json, where STARTS.json is a list of

    {"folder": run folder, "overrides": […], "before": [[name, …], …], "during": [[name, …], …]}

``before`` names functions of this module that the first rank calls before the start, with the rest as arguments;
``during`` names others that every rank calls in the process that trains. STARTS.json.done lists how each start ended.
"""

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from many_runs import agreed_port

from torchtitan_ext import train
from torchtitan_ext.files import write_file
from torchtitan_ext.titan import checkpoint_files, checkpoints, trainer

HUNG_AFTER = 100.0
"""Seconds after which a start counts as hung."""
RANK = int(os.environ["RANK"])
RANKS = int(os.environ["WORLD_SIZE"])


# What the first rank does before a start.


def copy(source: str, target: str) -> None:
    shutil.copytree(source, target)


def flip(path: str, bit: int = 0) -> None:
    """Change one bit in the middle of a file, and nothing of when it was written."""
    file, times = Path(path), os.stat(path)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1 << bit
    file.write_bytes(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def cut(path: str) -> None:
    os.truncate(path, os.stat(path).st_size // 2)


def zero(path: str) -> None:
    Path(path).write_bytes(bytes(os.stat(path).st_size))


def spoil_record(path: str) -> None:
    Path(path).write_text("?" + Path(path).read_text()[1:])


def rename(path: str, name: str) -> None:
    os.rename(path, Path(path).with_name(name))


def remove(path: str) -> None:
    shutil.rmtree(path)


def list_sizes_alone(folder: str) -> None:
    """Write the file lists of a run's checkpoints as earlier versions did."""
    for file_list in Path(folder).glob("checkpoint/step-*/files.json"):
        sizes = {name: entry["size"] for name, entry in json.loads(file_list.read_text()).items()}
        file_list.write_text(json.dumps(sizes, indent=1))


# What the processes that train do.


def after_step(step: int, do: Callable[[trainer.DepthTrainer], None]) -> None:
    whole = trainer.DepthTrainer.train_step

    def train_step(self: trainer.DepthTrainer, batches: Any) -> None:
        whole(self, batches)
        if self.step == step:
            do(self)

    trainer.DepthTrainer.train_step = train_step  # type: ignore[method-assign]


def stop_after(step: int) -> None:
    """SIGTERM, to the last rank alone."""
    after_step(step, lambda _: os.kill(os.getpid(), signal.SIGTERM) if RANK == RANKS - 1 else None)


def kill_after(step: int) -> None:
    after_step(step, lambda _: os.kill(os.getpid(), signal.SIGKILL))


def cut_after(step: int, path: str) -> None:
    """The first rank cuts off half of a file after ``step``."""
    after_step(step, lambda _: cut(path) if RANK == 0 else None)


def kill_while_saving() -> None:
    """The first rank ends when all files of a checkpoint are written but their list."""
    checkpoints.Checkpoints._finish = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]


def spoil_weight(step: int, name: str) -> None:
    """NaN in the last rank's share of one parameter after ``step``."""

    def spoil(run: trainer.DepthTrainer) -> None:
        for group in next(iter(run.optimizers)).param_groups:
            for parameter, called in zip(group["params"], group["param_names"], strict=True):
                if called == name and RANK == RANKS - 1:
                    parameter.data.to_local()[-1].fill_(float("nan"))

    after_step(step, spoil)


def spoil_moment(step: int) -> None:
    """An infinite second moment of one parameter after ``step``, which makes the next update of a weight zero."""

    def spoil(run: trainer.DepthTrainer) -> None:
        state = next(iter(next(iter(run.optimizers)).state.values()))
        if RANK == RANKS - 1:
            state["exp_avg_sq"].to_local()[-1].fill_(float("inf"))

    after_step(step, spoil)


def blind(rank: int, name: str, seconds: float, patience: float) -> None:
    """For so many seconds ``rank`` sees nothing of this name; ranks wait for ``patience`` seconds."""
    checkpoints.VISIBLE_WITHIN = patience
    if rank != RANK:
        return
    until = time.monotonic() + seconds
    stat, listdir = os.stat, os.listdir

    def hidden(path: Any) -> bool:
        return time.monotonic() < until and name in Path(os.fspath(path)).parts

    def blind_stat(path: Any, *more: Any, **options: Any) -> os.stat_result:
        if isinstance(path, str | os.PathLike) and hidden(path):
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return stat(path, *more, **options)

    os.stat = blind_stat
    os.listdir = lambda path=".": [entry for entry in listdir(path) if not hidden(entry)]


def say_what_is_read() -> None:
    """Print the checkpoint files whose checksums this rank takes."""
    whole = checkpoint_files._crc32

    def reading(path: Path) -> str:
        # In one piece: files are read by several threads.
        os.write(1, f"rank {RANK} reads {path.parent.name}/{path.name}\n".encode())
        return whole(path)

    checkpoint_files._crc32 = reading


def main(run_file: str, starts: str) -> int:
    # The agent's store serves one process group; every run makes its own.
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    done = []
    for number, start in enumerate(json.loads(Path(starts).read_text())):
        mine = Path(f"{starts}.{number}")
        if RANK == 0:
            for name, *arguments in start["before"]:
                globals()[name](*arguments)
        port = agreed_port(Path(f"{mine}.port"))
        child = os.fork()
        if child == 0:
            os.environ["MASTER_PORT"] = port
            output = os.open(f"{mine}.rank-{RANK}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            status = 1
            try:
                for name, *arguments in start["during"]:
                    globals()[name](*arguments)
                status = train.main(["--config-file", run_file, "--folder", start["folder"], *start["overrides"]])
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        write_file(Path(f"{mine}.status-{RANK}"), json.dumps(wait_for(child)).encode())
        if RANK == 0:
            files = [Path(f"{mine}.status-{rank}") for rank in range(RANKS)]
            while not all(file.exists() for file in files):
                time.sleep(0.01)
            done.append(
                {
                    "statuses": [json.loads(file.read_text()) for file in files],
                    "outputs": [Path(f"{mine}.rank-{rank}").read_text() for rank in range(RANKS)],
                    **what_is_in(Path(start["folder"])),
                }
            )
    if RANK == 0:
        write_file(Path(f"{starts}.done"), json.dumps(done).encode())
    return 0


def wait_for(child: int) -> int | str:
    deadline = time.monotonic() + HUNG_AFTER
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "hung"


def what_is_in(folder: Path) -> dict[str, Any]:
    checkpoint, metrics, status = folder / "checkpoint", folder / "metrics.jsonl", folder / "status.json"
    return {
        "checkpoints": sorted(os.listdir(checkpoint)) if checkpoint.exists() else [],
        "metrics": metrics.read_text() if metrics.exists() else "",
        "status": json.loads(status.read_text()) if status.exists() else None,
    }


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
