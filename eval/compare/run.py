"""A run as the comparison sees it: who it is, its curves, its costs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

AXES = ("tokens", "flops", "seconds")
"""What a curve can be read against: training tokens, training FLOPs, training seconds (neither evaluation nor
checkpoints)."""

COSTS = ("tokens_per_s", "step_seconds", "peak_memory_gib", "flops_per_token", "parameters")


@dataclass(frozen=True)
class Curve:
    """A loss over training, by step [n], with the cost so far on each axis of ``AXES`` [n]; NaN where it is unknown."""

    steps: np.ndarray
    values: np.ndarray
    axes: Mapping[str, np.ndarray]

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def final(self) -> float:
        return float(self.values[-1])

    def end(self, axis: str) -> float:
        """What the whole curve cost."""
        return float(self.axes[axis][-1])


NO_CURVE = Curve(np.array([], dtype=int), np.array([]), {axis: np.array([]) for axis in AXES})


@dataclass(frozen=True)
class DepthNumbers:
    """The last look inside the model: ``series`` by layer or read, ``maps`` with one row per read."""

    step: int = 0
    series: Mapping[str, list[float]] = field(default_factory=dict)
    maps: Mapping[str, list[list[float]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Mark:
    """A score in a downstream task, by one of its metrics.

    Attributes:
        questions: how many were asked; None where the task does not say.
        precision: of the parameters.
        standard_error: of the score over draws of as many questions, as the task gives it.
    """

    task: str
    metric: str
    questions: int | None
    precision: str
    score: float
    standard_error: float | None


@dataclass(frozen=True)
class Origin:
    """What a run folder says of where the run comes from. Of a run that was started several times, all different
    values in order.

    Attributes:
        days: of each start, as ``2026-11-30``.
        machines, hardware, revisions, versions: of the starts.
        data: path of its data set.
        precision: of training.
    """

    days: tuple[str, ...] = ()
    machines: tuple[str, ...] = ()
    hardware: tuple[str, ...] = ()
    revisions: tuple[str, ...] = ()
    versions: tuple[str, ...] = ()
    data: str | None = None
    precision: str | None = None


@dataclass(frozen=True)
class Run:
    """One finished run.

    Attributes:
        name, path: as given.
        label: what the run is without its seed, where its study says so.
        variant, size, seed, data_seed, control: None where nothing says.
        study: name of its study, where it is one's.
        origin: where it comes from; None for event files, which do not say.
        baseline: label of the run it is compared with, where its study says so.
        settings: the run file's keys that change what is learned, seeds apart: what tells groups apart.
        speed: the run file's keys that change what a step costs and nothing else.
        data: what must agree before two losses may be compared; None for event files, which do not say.
        text: what must agree before bits per byte may be compared; None where that cannot be told.
        heldout, bits_per_byte, training: curves; any may be empty.
        learning_rate: (steps [n], values [n]).
        costs: by name in ``COSTS``; NaN where unknown.
        marks: in downstream tasks, of the whole run.
        devices: kinds of devices that it was trained on; empty where nothing says.
        notes: what a reader must know about how this run was read.
    """

    name: str
    path: Path
    variant: str
    heldout: Curve
    bits_per_byte: Curve
    training: Curve
    learning_rate: tuple[np.ndarray, np.ndarray]
    costs: Mapping[str, float]
    label: str | None = None
    size: str | None = None
    seed: int | None = None
    data_seed: int | None = None
    control: str | None = None
    study: str | None = None
    origin: Origin | None = None
    baseline: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    speed: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] | None = None
    text: Mapping[str, Any] | None = None
    depth: DepthNumbers = DepthNumbers()
    marks: tuple[Mark, ...] = ()
    devices: frozenset[str] = frozenset()
    per_device: bool = False
    notes: tuple[str, ...] = ()

    @property
    def pair(self) -> tuple[int | None, int | None]:
        """Runs with equal pairs began with the same shared weights and saw the same batches in the same order."""
        return self.seed, self.data_seed


DIVERGED, FAILED, UNFINISHED = "diverged", "failed", "unfinished"
"""What became of a run that has no final loss: its loss was no number or too high, it crashed, or neither is known."""


@dataclass(frozen=True)
class LeftOut:
    """A run that the comparison does without, and why.

    Attributes:
        label, size, seed: as for ``Run``, as far as they are known.
        fate: ``diverged``, ``failed`` or ``unfinished`` where the run was to have a final loss and has none, which
            counts against its group; None where it was left out for what it is.
        known: its variant, settings and data, in a run without curves; None where they could not be read.
    """

    name: str
    why: str
    label: str | None = None
    size: str | None = None
    seed: int | None = None
    fate: str | None = None
    known: Run | None = None
