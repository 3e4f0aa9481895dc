"""What ``results.json`` holds: every number of the report. ``FORMAT`` rises when a reader would have to change."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from eval.compare.statistics import Estimate
from eval.scaling.results import ScalingResult

FORMAT = 2


@dataclass(frozen=True)
class SeedPair:
    """Final losses of one seed; the baseline's and the difference are None where the baseline has no such run."""

    name: str
    seed: int | None
    loss: float
    baseline: float | None = None
    difference: float | None = None


@dataclass(frozen=True)
class Cost:
    """Mean over the runs, and its ratio to the baseline's; None where it was not logged."""

    value: float | None
    ratio: float | None = None


@dataclass(frozen=True)
class AtEqual:
    """A group against the baseline, or the baseline's model trained for another length, at one budget.

    Attributes:
        against: label of the one whose whole cost is nearest to the group's.
        spent: the group's whole cost as a multiple of that one's.
        final: difference of the final losses.
        budget: the most that all paired runs reach; ``difference`` is that of the losses read there.
        read_at, baseline_read_at: the share of its own run at which a loss was read.
        learning_rate, baseline_learning_rate: there, as a share of the run's peak.
        why_not: why there are no numbers.
    """

    against: str | None = None
    spent: float | None = None
    final: Estimate | None = None
    budget: float | None = None
    difference: Estimate | None = None
    read_at: float | None = None
    baseline_read_at: float | None = None
    learning_rate: float | None = None
    baseline_learning_rate: float | None = None
    why_not: str | None = None


@dataclass(frozen=True)
class Reach:
    """How much sooner the baseline's final loss is reached: the baseline's whole budget over what was needed.

    ``speed_up`` is the geometric mean over the seeds, None unless all reach it; ``at_least`` where one was there at its
    first measurement already.
    """

    per_seed: list[float | None]
    speed_up: float | None
    at_least: bool


@dataclass(frozen=True)
class Band:
    """Mean, lowest and highest over the seeds, at each ``x``."""

    x: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]


@dataclass
class GroupResult:
    """One row of the main table.

    ``reference``: the baseline's model trained for another length, which is no variant and gets no verdict. ``p_holm``:
    ``difference.p`` corrected for all comparisons of the report. ``seeds_needed``: pairs that would show a difference
    as large as an undecided one, with its spread and for as many comparisons, four times out of five; None where over
    ``MOST_SEEDS`` would be needed, or there is no spread to tell.
    """

    label: str
    variant: str
    control: str | None
    reference: bool
    seeds: list[int | None]
    steps: int
    loss: float
    pairs: list[SeedPair]
    difference: Estimate | None
    p_holm: float | None = None
    seeds_needed: int | None = None
    verdict: str = ""
    costs: dict[str, Cost] = field(default_factory=dict)
    at_equal: dict[str, AtEqual] = field(default_factory=dict)
    reach: dict[str, Reach] = field(default_factory=dict)
    curves: dict[str, Band] = field(default_factory=dict)
    training_curves: dict[str, Band] = field(default_factory=dict)
    difference_curves: dict[str, Band] = field(default_factory=dict)
    depth_step: int = 0
    depth_series: Mapping[str, list[float]] = field(default_factory=dict)
    depth_maps: Mapping[str, list[list[float]]] = field(default_factory=dict)
    diverged: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class MemoryBudget:
    """Of the groups that need no more than ``gib``, the one with the lowest final loss. ``added``: those that fit from
    this budget on."""

    gib: float
    added: list[str]
    fits: list[str]
    best: str
    best_loss: float


@dataclass(frozen=True)
class EveryPair:
    """``row``'s final loss less ``column``'s, by seed."""

    row: str
    column: str
    difference: Estimate


@dataclass(frozen=True)
class BitsPerByte:
    """Final held-out bits per byte of a group, and its difference to the baseline's."""

    label: str
    bits_per_byte: float
    difference: Estimate | None


@dataclass(frozen=True)
class TaskRow:
    """A group's mean score in a downstream task by one metric, over ``runs`` of its runs.

    ``standard_error``: the task's own, of one run's score; None where the task gives none. ``difference``: to the
    baseline's, by seed.
    """

    label: str
    task: str
    metric: str
    questions: int | None
    precision: str
    runs: int
    score: float
    standard_error: float | None
    difference: Estimate | None


@dataclass
class FamilyResult:
    """One comparison: ``groups[0]`` is the baseline where ``baseline`` is not None. ``measure``: the loss compared."""

    size: str | None
    baseline: str | None
    measure: str
    per_device: bool
    groups: list[GroupResult]
    memory: list[MemoryBudget]
    every_pair: list[EveryPair]
    bits_per_byte: list[BitsPerByte]
    tasks: list[TaskRow]
    data: Mapping[str, Any] | None
    warnings: list[str]


@dataclass
class Results:
    """``comparisons``: rows with a p, for which the p are corrected. ``scaling``: None where no variant has two
    sizes."""

    families: list[FamilyResult]
    left_out: list[dict[str, Any]]
    comparisons: int
    scaling: ScalingResult | None = None
    format: int = FORMAT

    def to_json(self) -> str:
        """Strict JSON: what is NaN or infinite becomes null."""
        return json.dumps(_finite(asdict(self)), indent=1, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
