"""TensorBoard event files as the records that ``metrics.jsonl`` holds, whoever wrote them.

A run may have been started several times, with one event file or one ``YYYYMMDD-HHMM`` folder for each start (stock
torchtitan). What a later start logged replaces what earlier ones logged from its first step on.
"""

import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.compat.proto.event_pb2 import SessionLog
from tensorboard.util.tensor_util import make_ndarray

EVENTS = "events.out.tfevents.*"
START_FOLDER = re.compile(r"\d{8}-\d{4,6}")
_RANK_FOLDER = re.compile(r"rank_(\d+)|replica_(\d+)")
_FRAME = struct.Struct("<QI")  # a TFRecord: length, its checksum, the data, their checksum (4 bytes)


def event_files(folder: Path) -> list[Path]:
    """The event files of one run: in ``folder``, its ``tb``, or their folders per start, oldest first.

    Where every rank wrote its own, those of the lowest rank.
    """
    for base in (folder, folder / "tb"):
        starts = [base, *(sub for sub in _folders(base) if START_FOLDER.fullmatch(sub.name))]
        found = [file for start in starts for file in _of_one_start(start)]
        if found:
            return sorted(found, key=_began)
    return []


def _of_one_start(folder: Path) -> list[Path]:
    files = [file for file in folder.glob(EVENTS) if file.is_file()]
    if files:
        return files
    ranks = [sub for sub in _folders(folder) if _RANK_FOLDER.fullmatch(sub.name)]
    return _of_one_start(min(ranks, key=lambda sub: int(sub.name.split("_")[1]))) if ranks else []


def _folders(folder: Path) -> list[Path]:
    return sorted(sub for sub in folder.iterdir() if sub.is_dir()) if folder.is_dir() else []


def _began(file: Path) -> tuple[float, str]:
    """When the file was begun, which its name says: ``events.out.tfevents.SECONDS.HOST.…``."""
    seconds = file.name.removeprefix(EVENTS.removesuffix("*")).split(".")[0]
    return (float(seconds) if seconds.isdigit() else 0.0, str(file))


@dataclass(frozen=True)
class Events:
    """The scalars of one run.

    Attributes:
        records: one for each step, in order.
        notes: what could not be read.
        missing: what of the run that leaves unknown; None where later files say all that was lost.
    """

    records: list[dict[str, Any]]
    notes: list[str]
    missing: str | None


def read_events(files: Iterable[Path]) -> Events:
    """Read the event files of one run, oldest first."""
    records: dict[int, dict[str, Any]] = {}
    notes: list[str] = []
    starts: list[int] = []  # the steps from which later files replace a damaged one
    damaged = False
    for file in files:
        scalars, first_step, note = _read_file(file)
        if first_step is not None:
            records = {step: record for step, record in records.items() if step < first_step}
            behind = damaged or any(step >= first_step for step in starts)
            starts = [step for step in starts if step < first_step] + ([first_step] if behind else [])
        damaged = bool(note) or (damaged and first_step is None)
        if note:
            notes.append(note)
        for step, tag, value in scalars:
            records.setdefault(step, {"step": step})[tag] = value
    logged = [records[step] for step in sorted(records)]
    gaps = [gap for start in starts if (gap := _gap(logged, start)) is not None]
    missing = "; ".join(gaps) or None
    if damaged:
        missing = f"whether it went on after step {logged[-1]['step'] if logged else 0} cannot be told"
    return Events(logged, notes, missing)


def _gap(records: Sequence[Mapping[str, Any]], start: int) -> str | None:
    """What is missing before ``start``: steps that are further apart there than elsewhere, or values of a tag."""
    by_tag: dict[str, list[int]] = {}
    for record in records:
        for tag in record:
            by_tag.setdefault(tag, []).append(record["step"])
    for tag, steps in by_tag.items():
        before, after = [step for step in steps if step < start], [step for step in steps if step >= start]
        usual = max((y - x for part in (before, after) for x, y in pairwise(part)), default=0)
        last = before[-1] if before else 0
        if tag == "step":
            if after and after[0] - last > usual:
                return f"what was logged between steps {last} and {after[0]} is lost"
        elif before and after and usual and after[0] - last > usual:
            return f"{tag} is lost between steps {last} and {after[0]}"
    return None


def _read_file(file: Path) -> tuple[list[tuple[int, str, float]], int | None, str | None]:
    """(step, tag, value) of each scalar; the first step that the file speaks for; what is wrong with it."""
    scalars: list[tuple[int, str, float]] = []
    began: int | None = None
    events = 0
    try:
        for event in EventFileLoader(str(file)).Load():
            events += 1
            if event.HasField("session_log") and event.session_log.status == SessionLog.START:
                began = event.step
            if event.HasField("summary"):
                for value in event.summary.value:
                    number = _scalar(value)
                    if number is not None:
                        scalars.append((event.step, value.tag, number))
    except (DecodeError, OSError, ValueError) as error:
        return scalars, _first(scalars, began), f"{file.name} is damaged after {events} events ({error})"
    whole, cut = _frames(file)
    note = None
    if events < whole or cut:
        note = f"{file.name} is cut off or damaged after {events} events; what came later is lost"
    elif not whole:
        note = f"{file.name} holds nothing"
    return scalars, _first(scalars, began), note


def _first(scalars: list[tuple[int, str, float]], began: int | None) -> int | None:
    steps = [step for step, _, _ in scalars]
    return min([*steps, *([] if began is None else [began])], default=None)


def _scalar(value: Any) -> float | None:
    if value.metadata.plugin_data.plugin_name != "scalars" or not value.HasField("tensor"):
        return None
    array = make_ndarray(value.tensor)
    return float(array.item()) if array.size == 1 else None


def _frames(file: Path) -> tuple[int, bool]:
    """How many whole records the file holds, and whether something is left behind them.

    The loader stops at a damaged record without saying so.
    """
    size, at, whole = file.stat().st_size, 0, 0
    with open(file, "rb") as stream:
        while at + _FRAME.size <= size:
            stream.seek(at)
            length, _ = _FRAME.unpack(stream.read(_FRAME.size))
            if at + _FRAME.size + length + 4 > size:
                break
            at += _FRAME.size + length + 4
            whole += 1
    return whole, at < size
