"""Processes that each hold one model and train it when told, so that models can take turns.

A process of its own gives each model its own allocator, compiler cache and peak memory; between turns it waits without
using the device.
"""

import multiprocessing
import os
import shutil
import signal
import socket
import tempfile
import traceback
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from torchtitan_ext.errors import UserError
from torchtitan_ext.orphans import stop_with_parent
from torchtitan_ext.run_file import dump_run

if TYPE_CHECKING:
    from torchtitan_ext.titan.bench import Setup

    from .contenders import Contender


class Workers:
    """The processes of one contender, one per rank. To be closed."""

    def __init__(self, contender: "Contender", ranks: int) -> None:
        self.label = contender.label
        self.folder = tempfile.mkdtemp(prefix="depth-bench-")
        run_file = Path(self.folder) / "run.yaml"
        run_file.write_text(dump_run(contender.resolved.run), encoding="utf-8")
        context = multiprocessing.get_context("spawn")
        port = _free_port()
        self.connections: list[Connection] = []
        self.processes = []
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, ranks, port, self.folder), daemon=True)
            process.start()
            theirs.close()
            self.connections.append(ours)
            self.processes.append(process)

    def set_up(self) -> "Setup":
        """Build the model, train its first steps and take stock."""
        return self._ask("set_up")

    def train(self, steps: int) -> dict[str, float]:
        """Train ``steps`` steps; returns the seconds of each part of a step, summed over the steps."""
        return self._ask("train", steps)

    def close(self) -> None:
        for connection in self.connections:
            connection.close()
        for process in self.processes:
            process.join(timeout=10)
            process.kill()
            process.join()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _ask(self, method: str, *args: Any) -> Any:
        for connection in self.connections:
            connection.send((method, args))
        # In whichever order they come: the others may be waiting for one that has failed.
        answers: dict[int, Any] = {}
        while len(answers) < len(self.connections):
            for ready in wait([c for rank, c in enumerate(self.connections) if rank not in answers]):
                rank = self.connections.index(cast("Connection", ready))
                answers[rank] = self._answer(rank)
        return answers[0]

    def _answer(self, rank: int) -> Any:
        try:
            kind, value = self.connections[rank].recv()
        except EOFError:
            self.processes[rank].join()
            code = self.processes[rank].exitcode
            if code == -signal.SIGKILL:
                raise UserError(
                    f"the process that trains {self.label} was killed, as the system does when memory runs out; "
                    "lower --micro-batch, or choose --checkpoint full or a smaller --size"
                ) from None
            raise RuntimeError(f"the process that trains {self.label} ended with status {code}") from None
        if kind == "memory":
            raise UserError(
                f"{self.label} does not fit: {value}; "
                "lower --micro-batch, or choose --checkpoint full or a smaller --size"
            )
        if kind == "error":
            raise RuntimeError(f"{self.label} failed\n{value}")
        return value


def _serve(connection: Connection, rank: int, ranks: int, port: int, folder: str) -> None:
    """What each process runs: answer (method, arguments) with ("done", result), ("memory", what) or ("error", text)."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        # An empty cache, so that the time to compile does not depend on what was compiled before.
        "TORCHINDUCTOR_CACHE_DIR": os.path.join(folder, "inductor"),
        # What the profiler, which counts memory on a CPU, tells its developers.
        "KINETO_LOG_LEVEL": "99",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    if ranks > 1:
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    stop_with_parent()
    trainer = None
    while True:
        try:
            method, args = connection.recv()
        except (EOFError, KeyboardInterrupt):
            return
        try:
            if trainer is None:
                trainer = _build(folder)
            connection.send(("done", getattr(trainer, method)(*args)))
        except KeyboardInterrupt:
            return
        except Exception as error:
            import torch

            if isinstance(error, torch.OutOfMemoryError):
                connection.send(("memory", str(error).split(". ")[0]))
            else:
                connection.send(("error", traceback.format_exc()))


def _build(folder: str) -> Any:
    import logging
    import warnings

    from torchtitan_ext.resolve import load_resolved
    from torchtitan_ext.titan.bench import BenchTrainer
    from torchtitan_ext.titan.console import set_up_logging

    set_up_logging()
    # A run shows its warnings; here they would come once for each model and process.
    logging.getLogger().setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    return BenchTrainer(load_resolved(os.path.join(folder, "run.yaml"), []), folder)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]
