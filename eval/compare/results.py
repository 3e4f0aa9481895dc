"""What ``results.json`` holds: every number of the report. ``FORMAT`` rises when a reader would have to change."""

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from eval.compare.judging import Comparison
from eval.compare.statistics import Estimate
from eval.compare.sweeps import Sweep
from eval.scaling.results import ScalingResult

FORMAT = 3
UNDECIDED = "cannot tell"
ORDER = ("better", UNDECIDED, "worse", "")
"""Verdicts as a report orders them; a baseline of whatever length has none."""


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
        final: difference of the final losses; against the baseline that of the main table.
        budget: the most that all paired runs reach; ``difference`` is that of the losses read there.
        read_at, baseline_read_at: the share of its own run at which a loss was read.
        learning_rate, baseline_learning_rate: there, as a share of the run's peak.
        why_not: why there are no numbers.
    """

    against: str | None = None
    spent: float | None = None
    final: Estimate | Comparison | None = None
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


@dataclass(frozen=True)
class Reservation:
    """What a verdict must not be read without: in a few words, and with its numbers."""

    short: str
    long: str


@dataclass(frozen=True)
class Lost:
    """A run of the group that has no final loss. ``fate``: ``diverged``, ``failed`` or ``unfinished``."""

    name: str
    fate: str
    why: str


@dataclass
class GroupResult:
    """One row of the main table.

    Attributes:
        reference: the baseline's model trained for another length, which is no variant and gets no verdict.
        loss: mean over the seeds that the baseline has too, or over all where it has none of them.
        paired: the differences to the baseline seed by seed, by themselves.
        difference: judged with the other variants; None where two seeds or fewer leave nothing to judge by.
        seeds_needed: seeds that would show a difference as large as an undecided one, with its spread and as many
            comparisons, four times out of five; None where over ``MOST_SEEDS`` would be needed, or nothing is known of
            the spread.
        verdict: ``better``, ``worse`` or ``cannot tell``; empty for a baseline of whatever length.
        lost: its runs without a final loss.
        unlike: keys of the run file, other than the model's, in which it differs from the baseline.
    """

    label: str
    variant: str
    control: str | None
    reference: bool
    seeds: list[int | None]
    steps: int
    loss: float
    pairs: list[SeedPair]
    paired: Estimate | None
    difference: Comparison | None = None
    seeds_needed: int | None = None
    verdict: str = ""
    reservations: list[Reservation] = field(default_factory=list)
    lost: list[Lost] = field(default_factory=list)
    unlike: list[str] = field(default_factory=list)
    costs: dict[str, Cost] = field(default_factory=dict)
    at_equal: dict[str, AtEqual] = field(default_factory=dict)
    reach: dict[str, Reach] = field(default_factory=dict)
    curves: dict[str, Band] = field(default_factory=dict)
    training_curves: dict[str, Band] = field(default_factory=dict)
    difference_curves: dict[str, Band] = field(default_factory=dict)
    depth_step: int = 0
    depth_series: Mapping[str, list[float]] = field(default_factory=dict)
    depth_maps: Mapping[str, list[list[float]]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def mean(self) -> float | None:
        """The difference to the baseline as well as it is known."""
        return self.difference.mean if self.difference else self.paired.mean if self.paired else None

    @property
    def fates(self) -> list[str]:
        """How many of its runs have no final loss for each reason, such as ``2 diverged``."""
        return [f"{number} {fate}" for fate, number in Counter(lost.fate for lost in self.lost).items()]


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


@dataclass(frozen=True)
class Test:
    """How the rows of a family were judged.

    Attributes:
        pooled: labels of the variants judged together, by Dunnett's test with seeds as blocks.
        paired: labels of those judged by a paired t-test each.
        spread: standard deviation of a run's error, pooled over the baseline and ``pooled``.
        degrees: degrees of freedom of ``spread``.
        equal_p: p-value of the test that the errors of these arms vary alike.
        set_aside: labels of the arms whose errors vary too much to be pooled, with the p-value that said so.
        complete: whether all arms judged together have all seeds.
        exact: whether the critical value is exact, or a bound on the safe side.
    """

    pooled: list[str]
    paired: list[str]
    spread: float | None
    degrees: int | None
    equal_p: float | None
    set_aside: dict[str, float]
    complete: bool
    exact: bool


@dataclass(frozen=True)
class SweepResult:
    """The learning rates of the row ``label``, of which the best one is compared."""

    label: str
    sweep: Sweep
    edge: str | None


@dataclass
class FamilyResult:
    """One comparison: ``groups[0]`` is the baseline where ``baseline`` is not None. ``measure``: the loss compared.
    ``provenance``: where its runs come from, the values by what they say."""

    size: str | None
    baseline: str | None
    measure: str
    per_device: bool
    groups: list[GroupResult]
    test: Test | None
    sweeps: list[SweepResult]
    memory: list[MemoryBudget]
    every_pair: list[EveryPair]
    bits_per_byte: list[BitsPerByte]
    tasks: list[TaskRow]
    data: Mapping[str, Any] | None
    warnings: list[str]
    provenance: dict[str, list[str]] = field(default_factory=dict)

    @property
    def in_order(self) -> list[GroupResult]:
        """The groups as a report shows them: the baseline, then by verdict (``ORDER``), the lowest difference first."""

        def place(group: GroupResult) -> tuple[bool, int, float]:
            return (
                group.label != self.baseline,
                ORDER.index(group.verdict),
                math.inf if group.mean is None else group.mean,
            )

        return sorted(self.groups, key=place) if self.baseline else list(self.groups)


@dataclass
class Results:
    """``comparisons``: rows that are judged, for all of which the intervals hold together. ``scaling``: None where no
    variant has two sizes."""

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
