"""One run folder, or one folder of TensorBoard event files, → ``Run``.

Raises ``UserError`` saying why a run cannot be used, ``Diverged`` where its loss became infinite.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from data_prep.manifest import MANIFEST, read_manifest
from eval.compare import records as tags
from eval.compare.event_files import event_files, read_events
from eval.compare.marks import read_marks
from eval.compare.records import Records
from eval.compare.run import Run
from torchtitan_ext.errors import UserError
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


class Diverged(UserError):
    """The run's loss became infinite or NaN, so that it has no final loss."""

    def __init__(self, message: str, variant: str, size: str | None = None) -> None:
        super().__init__(message)
        self.variant, self.size = variant, size


def read_run_folder(path: Path, name: str) -> Run:
    """Read a run folder that ``depth train`` left. Its ``tb`` stands in for a damaged ``metrics.jsonl``."""
    folder = RunFolder(path)
    facts, status = folder.facts(), folder.status()
    settings = _run_file(path / "run.yaml")
    if status is None:
        raise UserError("it was never started: there is no status.json")
    state, step, steps = (status.get(key) for key in ("state", "step", "steps"))
    if state == "diverged":
        why = f"diverged at step {step} of {steps}: its loss became infinite or NaN, or fell too far behind"
        raise Diverged(why, str(facts.get("variant", name)), facts.get("size"))
    if state != "finished":
        raise UserError(f"not finished: {state} at step {step} of {steps}")
    records = _records(folder)
    try:
        identity = facts["identity"]
        data, flops = identity["data"], float(facts["flops_per_token"])
        seeds = {"seed": int(identity["seed"]), "data_seed": int(data["seed"])}
        common = {"variant": str(facts["variant"]), "size": str(facts["size"])}
        windows = int(settings["heldout.tokens"]) // int(data["seq_len"])
        comparable = {
            "training data": data["fingerprint"],
            "held-out data": data["heldout_fingerprint"],
            "vocabulary": data["vocab_size"],
            "sequence length": data["seq_len"],
            "document mask": data["document_mask"],
            "held-out windows, at most": windows,
        }
        costs = {"flops_per_token": flops, "parameters": float(facts["parameters"])}
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"facts.json or run.yaml is damaged: {error!r} is missing or no number") from error
    chosen = {key: value for key, value in settings.items() if value is not None and not NO_SETTINGS.match(key)}
    speed = {key: value for key, value in chosen.items() if SPEED_SETTINGS.match(key)}
    learning = {key: value for key, value in chosen.items() if key not in speed}
    run = _run(path, name, records, costs, data=comparable, settings=learning, speed=speed, **seeds, **common)
    _check_end(run, int(step or 0))
    text = _heldout_text(settings.get("data.path"), data, windows)
    marks, notes = read_marks(path, int(step or 0))
    return replace(run, text=text, marks=marks, notes=(*run.notes, *notes))


def read_event_folder(path: Path, name: str) -> Run:
    """Read the event files of a run that this project did not make: they say nothing of its data, seed or model."""
    events = read_events(event_files(path))
    if not events.records:
        raise UserError("; ".join(events.notes) or "no scalars in its event files")
    if events.missing is not None:
        raise UserError("; ".join([*events.notes, events.missing]))
    records = Records(events.records)
    records.notes += [f"{note}, and a later start logged it again" for note in events.notes]
    _, losses = records.series(tags.TRAINING)
    found, variant = _SEED_IN_NAME.search(name), without_seed(name)
    if len(losses) and not math.isfinite(losses[-1]):
        raise Diverged(f"diverged: its training loss is {losses[-1]} at step {records.last_step()}", variant)
    return _run(path, name, records, {}, variant=variant, seed=int(found[1]) if found else None)


def without_seed(name: str) -> str:
    """A name without the seed at its end: ``mine-seed3`` is ``mine``."""
    return _SEED_IN_NAME.sub("", name) or name


def _run(path: Path, name: str, records: Records, known: dict[str, float], **fields: Any) -> Run:
    axes = records.axes(known.get("flops_per_token", math.nan))
    everywhere = records.typical(tags.TOKENS_PER_S)
    costs = {
        "tokens_per_s": records.typical(tags.TOKENS_PER_S_PER_DEVICE) if math.isnan(everywhere) else everywhere,
        "step_seconds": records.typical(tags.STEP_SECONDS),
        "peak_memory_gib": records.peak(tags.PEAK_MEMORY),
        "flops_per_token": math.nan,
        "parameters": math.nan,
        **known,
    }
    run = Run(
        name=name,
        path=path,
        heldout=records.curve(tags.HELDOUT, axes),
        bits_per_byte=records.curve(tags.BITS_PER_BYTE, axes),
        training=records.curve(tags.TRAINING, axes),
        learning_rate=records.learning_rate(),
        costs=costs,
        depth=records.depth(),
        per_device=math.isnan(everywhere),
        notes=tuple(records.notes),
        **fields,
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
