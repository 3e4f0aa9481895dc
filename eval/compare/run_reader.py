"""One run folder, or one folder of TensorBoard event files, → ``Run``.

Raises ``UserError`` saying why a run cannot be used, ``NoFinalLoss`` where it diverged, crashed or has not ended.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from data_prep.manifest import MANIFEST, read_manifest
from eval.compare import records as tags
from eval.compare.event_files import event_files, read_events
from eval.compare.marks import read_marks
from eval.compare.provenance import read_origin
from eval.compare.records import Records
from eval.compare.run import DIVERGED, FAILED, NO_CURVE, UNFINISHED, Run
from torchtitan_ext.errors import UserError
from torchtitan_ext.machines import devices_of
from torchtitan_ext.run_folder import RunFolder

SPEED_SETTINGS = re.compile(
    r"(parallelism\..*|training\.(micro_batch|compile|deterministic|activation_checkpoint)|depth\.backend)$"
)
"""Keys of a run file that change what a step costs and not what is learned."""

NO_SETTINGS = re.compile(
    r"(name|folder|seed|model\.(size|variant)|data\.(path|seed)|(logging|checkpoint|heldout)\..*|training\.stop_.*)$"
)
"""Keys of a run file that change neither, or that a run is known by anyway. Data are compared by their fingerprints."""

_SEED_IN_NAME = re.compile(r"[-_.]?(?:seed|(?<=[-_.])s)[-_]?(\d+)$")


class NoFinalLoss(UserError):
    """The run has no final loss to compare. ``fate`` and ``known`` are those of ``LeftOut``."""

    def __init__(self, message: str, fate: str, known: Run | None = None) -> None:
        super().__init__(message)
        self.fate, self.known = fate, known


def read_run_folder(path: Path, name: str) -> Run:
    """Read a run folder that ``depth train`` left. Its ``tb`` stands in for a damaged ``metrics.jsonl``."""
    folder = RunFolder(path)
    facts, status = folder.facts(), folder.status()
    settings = _run_file(path / "run.yaml")
    known = _known(path, name, facts, settings)
    if status is None:
        raise NoFinalLoss("it was never started: there is no status.json", UNFINISHED, known)
    state, step, steps = (status.get(key) for key in ("state", "step", "steps"))
    if state != "finished":
        why = f"{state} at step {step} of {steps}"
        if state not in (DIVERGED, FAILED):
            raise NoFinalLoss(f"not finished: {why}", UNFINISHED, known)
        raise NoFinalLoss(f"{why}: {status.get('reason') or 'status.json gives no reason'}", state, known)
    try:
        return _finished(folder, known, settings, facts["identity"]["data"], int(step or 0))
    except NoFinalLoss:
        raise
    except UserError as error:
        raise NoFinalLoss(str(error), UNFINISHED, known) from error


def _finished(
    folder: RunFolder, known: Run, settings: Mapping[str, Any], data: Mapping[str, Any], last_step: int
) -> Run:
    records = _records(folder)
    _check_last_losses(records, known)
    run = _run(known, records)
    _check_end(run, last_step)
    text = _heldout_text(settings.get("data.path"), data, _windows(settings, data))
    marks, notes = read_marks(folder.path, last_step)
    devices = devices_of(folder.path)
    return replace(run, text=text, marks=marks, devices=devices, notes=(*run.notes, *notes))


def _known(path: Path, name: str, facts: Mapping[str, Any], settings: Mapping[str, Any]) -> Run:
    """All that is known of a run before its record is read."""
    try:
        identity = facts["identity"]
        data, flops = identity["data"], float(facts["flops_per_token"])
        comparable = {
            "training data": data["fingerprint"],
            "held-out data": data["heldout_fingerprint"],
            "vocabulary": data["vocab_size"],
            "sequence length": data["seq_len"],
            "document mask": data["document_mask"],
            "held-out windows, at most": _windows(settings, data),
        }
        costs = {"flops_per_token": flops, "parameters": float(facts["parameters"])}
        chosen = {key: value for key, value in settings.items() if value is not None and not NO_SETTINGS.match(key)}
        speed = {key: value for key, value in chosen.items() if SPEED_SETTINGS.match(key)}
        learning = {key: value for key, value in chosen.items() if key not in speed}
        return replace(
            _unread(path, name, str(facts["variant"]), costs, int(identity["seed"])),
            size=str(facts["size"]),
            data_seed=int(data["seed"]),
            origin=read_origin(path, settings),
            data=comparable,
            settings=learning,
            speed=speed,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"facts.json or run.yaml is damaged: {error!r} is missing or no number") from error


def _windows(settings: Mapping[str, Any], data: Mapping[str, Any]) -> int:
    """Of held-out text, at most."""
    return int(settings["heldout.tokens"]) // int(data["seq_len"])


def _unread(path: Path, name: str, variant: str, costs: Mapping[str, float], seed: int | None = None) -> Run:
    none = (np.array([], dtype=int), np.array([]))
    return Run(name, path, variant, NO_CURVE, NO_CURVE, NO_CURVE, none, costs, seed=seed)


def _check_last_losses(records: Records, known: Run) -> None:
    """A run whose last loss is no number has diverged, whatever its status says."""
    for what, its_tags in (("held-out loss", tags.HELDOUT), ("training loss", tags.TRAINING)):
        steps, losses = records.series(its_tags)
        if len(losses) and not math.isfinite(losses[-1]):
            raise NoFinalLoss(f"diverged: its last {what}, of step {steps[-1]}, is {losses[-1]}", DIVERGED, known)


def read_event_folder(path: Path, name: str) -> Run:
    """Read the event files of a run that this project did not make: they say nothing of its data, seed or model."""
    events = read_events(event_files(path))
    if not events.records:
        raise UserError("; ".join(events.notes) or "no scalars in its event files")
    if events.missing is not None:
        raise UserError("; ".join([*events.notes, events.missing]))
    records = Records(events.records)
    records.notes += [f"{note}, and a later start logged it again" for note in events.notes]
    found = _SEED_IN_NAME.search(name)
    unknown = {"flops_per_token": math.nan, "parameters": math.nan}
    known = _unread(path, name, without_seed(name), unknown, int(found[1]) if found else None)
    _check_last_losses(records, known)
    return _run(known, records)


def without_seed(name: str) -> str:
    """A name without the seed at its end: ``mine-seed3`` is ``mine``."""
    return _SEED_IN_NAME.sub("", name) or name


def _run(known: Run, records: Records) -> Run:
    axes = records.axes(known.costs["flops_per_token"])
    everywhere = records.typical(tags.TOKENS_PER_S)
    costs = {
        "tokens_per_s": records.typical(tags.TOKENS_PER_S_PER_DEVICE) if math.isnan(everywhere) else everywhere,
        "step_seconds": records.typical(tags.STEP_SECONDS),
        "peak_memory_gib": records.peak(tags.PEAK_MEMORY),
        **known.costs,
    }
    run = replace(
        known,
        heldout=records.curve(tags.HELDOUT, axes),
        bits_per_byte=records.curve(tags.BITS_PER_BYTE, axes),
        training=records.curve(tags.TRAINING, axes),
        learning_rate=records.learning_rate(),
        costs=costs,
        depth=records.depth(),
        per_device=math.isnan(everywhere),
        notes=tuple(records.notes),
    )
    if not len(run.heldout) and not len(run.training):
        raise UserError("no finite loss was logged")
    return run


def _check_end(run: Run, step: int) -> None:
    """A finished run's last held-out loss is that of its last step, or the record is not whole."""
    if len(run.heldout) and run.heldout.steps[-1] != step:
        raise UserError(
            f"its last held-out loss that is a number is of step {run.heldout.steps[-1]}, and it ended at step {step}"
        )
    if not len(run.heldout) and run.training.steps[-1] != step:
        raise UserError(f"its record ends at step {run.training.steps[-1]}, and it ended at step {step}")


def _records(folder: RunFolder) -> Records:
    try:
        logged = list(folder.metrics())
        problem = None if logged else "metrics.jsonl is missing or empty"
    except UserError as error:
        problem = f"metrics.jsonl is damaged ({error})"
    except UnicodeDecodeError:
        problem = "metrics.jsonl is damaged (not UTF-8)"
    if problem is None:
        return Records(logged)
    events = read_events(event_files(folder.tensorboard_path))
    if not events.records:
        raise UserError(f"{problem}, and tb/ has no event files to read instead")
    records = Records(events.records)
    records.notes += [f"{problem}; its event files were read instead", *events.notes]
    if events.missing is not None:
        records.notes.append(events.missing)
    return records


def _run_file(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError("it has no run.yaml") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"run.yaml is damaged: {str(error).splitlines()[0]}") from error
    if not isinstance(content, dict):
        raise UserError("run.yaml is damaged: no keys in it")
    return _flat(content)


def _flat(content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in content.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def _heldout_text(path: Any, data: Mapping[str, Any], windows: int) -> dict[str, Any] | None:
    """What identifies the held-out text whatever the tokeniser, where the data set is at hand and all of it is scored.

    A data set's fingerprint is that of its tokens. Its manifest says which source the text came from and how much of it
    was held out, by a hash of each document's text: equal answers mean equal text. A run that scores a sample of the
    windows scores other text under another tokeniser, so only whole splits count.
    """
    try:
        manifest = read_manifest(Path(str(path)) / MANIFEST)
    except (OSError, UserError):
        return None
    split = manifest.splits["heldout"]
    if manifest.fingerprint != data["fingerprint"] or split.bytes != split.token_bytes:
        return None
    if windows < (split.tokens - 1) // int(data["seq_len"]):
        return None
    settings = manifest.settings
    return {
        "source": settings.source,
        "held-out share": settings.heldout_fraction,
        "documents": split.documents,
        "bytes": split.bytes,
    }
