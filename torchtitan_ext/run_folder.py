"""The run folder: the contract between training and everything that reads its results.

::

    run.yaml        the resolved run, as a run file
    facts.json      what follows from it: shape, data fingerprints, parameters, FLOPs per token
    code.txt        hardware, command, revision and versions of every start
    metrics.jsonl   one JSON object per logged step: "step", "time" (seconds since the epoch), and TensorBoard's tags
    tb/             the same numbers as TensorBoard event files
    checkpoint/     step-N/ distributed checkpoints (torchtitan_ext/titan/checkpoint_files.py)
    logs/           what each rank printed, where the launcher keeps it
    status.json     {"format", "state", "step", "steps", "time"}; state is one of STATES; "reason" where it went wrong;
                    "saved": the step of the checkpoint that was written last
    data.json       when which token shard was last compared with its checksum (data_prep/verification.py)
    lock            who trains here now (torchtitan_ext/run_lock.py)
    eval/           what ``depth eval`` measured: one JSON file and picture for each time

Files other than logs are written under a temporary name, flushed and renamed.
"""

import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from torchtitan_ext.errors import UserError
from torchtitan_ext.files import write_file
from torchtitan_ext.older import check_trained_right, upgraded

FORMAT = 2
READABLE = (1, FORMAT)
"""Formats that are read; ``older.py`` says what format 1 meant."""
CONTENTS = frozenset(
    [
        *("run.yaml", "facts.json", "code.txt", "metrics.jsonl", "status.json", "data.json", "lock"),
        *("tb", "checkpoint", "logs", "eval", "comm_traces"),
    ]
)
STATES = ("running", "stopped", "finished", "diverged", "failed")
"""How a run stands. ``stopped``: asked to stop, checkpoint saved, to be resumed. ``diverged``: the loss, the gradient
or the weights became infinite or NaN, or the loss fell so far behind the baseline's that the run's stopping rule ended
it."""


class RunFolder:
    """A run folder on disk. Reading needs no more than the folder; writing belongs to the run's first rank."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.metrics_path = self.path / "metrics.jsonl"
        self.tensorboard_path = self.path / "tb"
        self.checkpoint_path = self.path / "checkpoint"

    @property
    def exists(self) -> bool:
        return (self.path / "facts.json").exists()

    def check_place(self) -> None:
        """Raise ``UserError`` where something else than a run is in the folder's place."""
        if self.path.exists() and not self.path.is_dir():
            raise UserError(f"{self.path} is a file; choose another folder for the run")
        if self.path.is_dir() and not self.exists:
            strangers = sorted(entry.name for entry in self.path.iterdir() if not _is_ours(entry.name))
            if strangers:
                raise UserError(
                    f"{self.path} holds {strangers[0]}, which is no run's; choose another folder for the run"
                )

    def create(self) -> None:
        """Make the folder; raises ``UserError`` where something else is in its place."""
        self.check_place()
        self.path.mkdir(parents=True, exist_ok=True)

    def facts(self) -> dict[str, Any]:
        """What follows from the run, in the terms of this version."""
        return upgraded(self._read_json("facts.json"))

    def check_trained_right(self) -> None:
        """Raise ``UserError`` where an older version trained the run wrongly, so that its checkpoints are of no use."""
        facts = self.facts()
        if facts["format"] == FORMAT:
            return
        run_file = self.path / "run.yaml"
        settings = yaml.safe_load(run_file.read_text(encoding="utf-8")) if run_file.exists() else {}
        copies = settings.get("parallelism", {}).get("replicate", 1)
        check_trained_right(str(self.path), facts, self.metrics(), copies)

    def status(self) -> dict[str, Any] | None:
        """The last status, or None before the first one."""
        return self._read_json("status.json") if (self.path / "status.json").exists() else None

    def compared_data(self) -> dict[str, Any]:
        """What ``write_compared_data`` wrote; empty where there is nothing that can be read."""
        try:
            return self._read_json("data.json")["copies"]
        except (UserError, KeyError):
            return {}

    def write_compared_data(self, copies: dict[str, Any]) -> None:
        self._write("data.json", json.dumps({"format": FORMAT, "copies": copies}) + "\n")

    def write_facts(self, facts: dict[str, Any]) -> None:
        self._write("facts.json", json.dumps({"format": FORMAT, **facts}, indent=2) + "\n")

    def write_run(self, text: str) -> None:
        self._write("run.yaml", text)

    def append_code(self, text: str) -> None:
        with open(self.path / "code.txt", "a", encoding="utf-8") as file:
            file.write(text)

    def write_status(self, state: str, step: int, steps: int, reason: str | None = None) -> None:
        """``reason``: why the run diverged or failed; its first line is kept."""
        assert state in STATES, state
        status: dict[str, Any] = {"format": FORMAT, "state": state, "step": step, "steps": steps, "time": time.time()}
        if reason:
            status["reason"] = reason.strip().splitlines()[0]
        if (saved := self.readable_status().get("saved")) is not None:
            status["saved"] = saved
        self._write("status.json", json.dumps(status) + "\n")

    def readable_status(self) -> dict[str, Any]:
        """The last status; empty before the first one, and where it is damaged."""
        try:
            return self.status() or {}
        except UserError:
            return {}

    def note_saved(self, step: int) -> None:
        """Note in the status that the checkpoint of ``step`` was written, for as long as the folder is there."""
        status = self.readable_status()
        if status:
            self._write("status.json", json.dumps({**status, "saved": step, "time": time.time()}) + "\n")

    def append_metrics(self, step: int, metrics: Mapping[str, Any]) -> None:
        record = json.dumps({"step": step, "time": time.time(), **metrics})
        with open(self.metrics_path, "a", encoding="utf-8") as file:
            file.write(record + "\n")

    def metrics(self) -> Iterator[dict[str, Any]]:
        """The logged records in order; a last line that was cut off by a crash is left out."""
        if not self.metrics_path.exists():
            return
        with open(self.metrics_path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith("\n"):
                    return
                try:
                    yield json.loads(line)
                except json.JSONDecodeError as error:
                    raise UserError(f"{self.metrics_path}:{number}: not a JSON object ({error.msg})") from error

    def cut_metrics(self, step: int) -> None:
        """Drop what was logged after ``step``: those steps were lost and will be run again."""
        if not self.metrics_path.exists():
            return
        kept = [json.dumps(record) + "\n" for record in self.metrics() if record["step"] <= step]
        self._write("metrics.jsonl", "".join(kept))

    def _write(self, name: str, text: str) -> None:
        write_file(self.path / name, text.encode())

    def _read_json(self, name: str) -> dict[str, Any]:
        path = self.path / name
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise UserError(f"{self.path} is not a run folder: it has no {name}") from error
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise UserError(f"{path} is damaged: {error}") from error
        if content.get("format") not in READABLE:
            raise UserError(
                f"{path} has format {content.get('format')}, this version reads the formats up to {FORMAT}: "
                "use the version that code.txt names"
            )
        return content


def _is_ours(name: str) -> bool:
    """Also while it is being written, under its temporary name."""
    return name in CONTENTS or (name.startswith(".") and name.endswith(".tmp") and name[1:-4] in CONTENTS)
