"""A comparison as TensorBoard runs, one for each variant (and size), so that TensorBoard overlays the variants.

Here the step axis is not the training step but what the tag says: tokens, FLOPs, seconds or parameters, in a unit that
makes the whole numbers TensorBoard wants of them. A single comparison has one run for each of its rows. Over several
sizes each row is a run ``variant/size``, and ``variant`` itself is its scaling curve.
"""

import json
import math
import os
import re
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams import summary_v2 as hparams
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from eval.compare.grouping import without_size
from eval.compare.results import Band, FamilyResult, GroupResult, Results
from torchtitan_ext.errors import UserError
from torchtitan_ext.files import write_file

MARK = "depth_compare.json"
"""Says that a folder was written here, and so may be replaced."""

_COUNTED = {1.0: "", 1e3: "thousand_", 1e6: "million_", 1e9: "billion_"}
_UNITS = {
    "tokens": _COUNTED,
    "parameters": _COUNTED,
    "flops": {1.0: "", 1e6: "M", 1e9: "G", 1e12: "T", 1e15: "P", 1e18: "E"},
    "seconds": {1e-3: "milli", 1.0: ""},
}
_WORDS = {"flops": "FLOPs"}
_RESOLVED = 1000
"""Even the shortest curve ends at this many units or more, so that rounding moves its end by less than 0.1%."""
_AT_THE_END = "values_at_the_end"
"""TensorBoard shows groups of cards by the alphabet of their names: those with a curve come before this one."""
_FINAL = {
    f"{_AT_THE_END}/loss": "final loss",
    f"{_AT_THE_END}/difference": "difference to the baseline",
    f"{_AT_THE_END}/tokens_per_s": "tokens per second",
    f"{_AT_THE_END}/peak_memory_gib": "peak memory (GiB)",
}
_TREND = "trend_of_final_loss"
"""Curves with a point for each size, so behind those of training."""
_OPTIONS = ("variant", "size", "control", "seeds", "parameters", "flops_per_token")


@dataclass(frozen=True)
class Axis:
    """``name`` ends a tag: ``by_million_tokens``."""

    name: str
    unit: float

    def steps(self, values: Iterable[float]) -> list[int]:
        return [round(value / self.unit) for value in values]


@dataclass
class Curves:
    """One TensorBoard run: by tag, its points as (step, value); what it is, for HParams."""

    points: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    options: dict[str, str | float] = field(default_factory=dict)


def axis(what: str, shortest: float) -> Axis:
    """The axis of ``what`` in the largest unit that still resolves a curve that ends at ``shortest``."""
    units = _UNITS[what]
    unit = max((unit for unit in units if shortest >= _RESOLVED * unit), default=min(units))
    return Axis(f"by_{units[unit]}{_WORDS.get(what, what)}", unit)


def check_folder(folder: Path) -> None:
    """Raise ``UserError`` where ``folder`` holds anything but what was written here before."""
    if not folder.exists() and not folder.is_symlink():
        return
    if not folder.is_dir():
        raise UserError(f"--tensorboard {folder}: that is a file; choose a new folder")
    inside = [path for path in folder.rglob("*") if not path.is_dir() or path.is_symlink()]
    foreign = [path for path in inside if path.name != MARK and not path.name.startswith("events.out.tfevents.")]
    if foreign or (inside and not (folder / MARK).is_file()):
        example = (foreign or inside)[0].relative_to(folder)
        raise UserError(
            f"--tensorboard {folder}: it holds files that depth compare did not write, such as {example}; choose a "
            "new folder"
        )


def write_curves(results: Results, folder: Path) -> int:
    """Write one run for each row of ``results`` under ``folder``, whole or not at all; return their number.

    Raises:
        UserError: ``folder`` holds anything else.
    """
    check_folder(folder)
    runs = make_runs(results)
    folder = folder.resolve()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as scratch:
        new, old = Path(scratch) / "new", Path(scratch) / "old"
        new.mkdir()
        now = time.time()
        # TensorBoard finds what HParams are there in any run; in a folder of its own it would be a run without curves.
        described = hparams.hparams_config_pb(*_config(runs))
        for number, (name, curves) in enumerate(runs.items()):
            _write_run(new, name, curves, now, [] if number else [described])
        write_file(new / MARK, json.dumps({"format": 1}).encode())
        if folder.exists():
            os.rename(folder, old)
        os.rename(new, folder)
    return len(runs)


def make_runs(results: Results) -> dict[str, Curves]:
    """All runs by the name that TensorBoard shows."""
    families = results.families
    several = len({family.size for family in families}) > 1
    axes = _axes(families)
    runs: dict[str, Curves] = {}
    for family in families:
        for group in family.groups:
            size = family.size if several else None
            runs[_free(_name(without_size(group.label, size), size), runs)] = _row(group, family, axes)
    ladders = [ladder for ladder in results.scaling.ladders if ladder.points] if results.scaling else []
    if ladders:
        points = [point for ladder in ladders for point in ladder.points]
        for what in ("parameters", "tokens", "flops"):
            by = axis(what, min(getattr(point, what) for point in points))
            for ladder in ladders:
                curve = sorted((getattr(point, what), point.loss) for point in ladder.points)
                steps = by.steps(x for x, _ in curve)
                found = runs.setdefault(_name(ladder.label, None), Curves())
                found.points[f"{_TREND}/{by.name}"] = list(zip(steps, [y for _, y in curve], strict=True))
    return runs


def _axes(families: Sequence[FamilyResult]) -> dict[str, Axis]:
    """One unit for each axis, whatever the run, so that all curves are on one picture."""
    shortest: dict[str, float] = {}
    for family in families:
        for group in family.groups:
            for name, band in [*group.curves.items(), *group.training_curves.items()]:
                shortest[name] = min(shortest.get(name, math.inf), band.x[-1])
    return {name: axis(name, value) for name, value in shortest.items()}


def _row(group: GroupResult, family: FamilyResult, axes: Mapping[str, Axis]) -> Curves:
    measured = "heldout_loss" if family.measure == "heldout" else "training_loss"
    kinds = {measured: group.curves, "loss_vs_baseline": group.difference_curves}
    if family.measure == "heldout":
        kinds["training_loss"] = group.training_curves
    curves = Curves()
    for kind, bands in kinds.items():
        for name, band in bands.items():
            curves.points[f"{kind}/{axes[name].name}"] = _curve(band, axes[name])
    final = {
        f"{_AT_THE_END}/loss": group.loss,
        f"{_AT_THE_END}/difference": group.mean,
        f"{_AT_THE_END}/tokens_per_s": group.costs["tokens_per_s"].value,
        f"{_AT_THE_END}/peak_memory_gib": group.costs["peak_memory_gib"].value,
    }
    curves.points |= {tag: [(0, value)] for tag, value in final.items() if value is not None}
    options: dict[str, str | float | None] = {
        "variant": group.variant,
        "size": family.size,
        "control": group.control or "none",
        "seeds": float(len(group.seeds)),
        "parameters": group.costs["parameters"].value,
        "flops_per_token": group.costs["flops_per_token"].value,
    }
    curves.options = {name: value for name, value in options.items() if value is not None}
    return curves


def _curve(band: Band, by: Axis) -> list[tuple[int, float]]:
    """One value for each step: of points that fall on the same, the last."""
    return list(dict(zip(by.steps(band.x), band.mean, strict=True)).items())


def _config(runs: Mapping[str, Curves]) -> tuple[list[hparams.HParam], list[hparams.Metric]]:
    known = {name for curves in runs.values() for name in curves.options}
    measured = {tag for curves in runs.values() for tag in curves.points}
    return (
        [hparams.HParam(name) for name in _OPTIONS if name in known],
        [hparams.Metric(tag, display_name=title) for tag, title in _FINAL.items() if tag in measured],
    )


def _write_run(folder: Path, name: str, curves: Curves, now: float, described: list[Summary]) -> None:
    session = [hparams.hparams_pb(curves.options, trial_id=name, start_time_secs=now)] if curves.options else []
    events = [(0, summary) for summary in [*described, *session]]
    for tag, points in curves.points.items():
        events += [(step, Summary(value=[Summary.Value(tag=tag, simple_value=value)])) for step, value in points]
    writer = EventFileWriter(str(folder / name))
    for step, summary in events:
        writer.add_event(Event(wall_time=now, step=step, summary=summary))
    writer.close()


def _name(label: str, size: str | None) -> str:
    """A path for any label: nothing in it leads elsewhere or hides."""
    parts = [label, *([size] if size else [])]
    return "/".join(re.sub(r"[^\w.,=+() -]", "_", part).strip(". ")[:100] or "_" for part in parts)


def _free(name: str, taken: Mapping[str, object]) -> str:
    number = 1
    while (name if number == 1 else f"{name} ({number})") in taken:
        number += 1
    return name if number == 1 else f"{name} ({number})"
