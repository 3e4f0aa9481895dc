"""What the report and ``results.json`` hold of scaling laws."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Interval:
    """A number with its 95% interval; None where there is none. An open end of an interval is infinite."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Point:
    """Runs of one size and length: means over ``runs`` of them. ``parameters`` N, ``tokens`` D, ``flops`` C."""

    size: str
    runs: int
    parameters: float
    tokens: float
    flops: float
    loss: float


@dataclass(frozen=True)
class Gain:
    """Compute-equivalent gain at one size: what the baseline needs for the variant's loss over what the variant spent.

    Attributes:
        loss: the variant's by its law.
        gain: None where the baseline's law never has that loss.
        outside: how far what the baseline needs lies outside the compute of its runs: 1 inside.
        far: ``outside`` is more than the step from one size to the next.
    """

    size: str
    loss: float
    gain: Interval | None
    outside: float | None
    far: bool


@dataclass(frozen=True)
class Line:
    """Loss over FLOPs by a law, with the 95% band; ``low`` and ``high`` are empty where there is none."""

    flops: list[float]
    loss: list[float]
    low: list[float]
    high: list[float]


@dataclass
class LadderResult:
    """One variant at all its sizes.

    Attributes:
        constants: by name: ``E``, then ``K`` and ``gamma``, or ``A``, ``B``, ``alpha`` and ``beta``.
        error: root mean square of the residuals of log loss: about the relative error of the law on its runs.
        why_not: why there is no law.
    """

    label: str
    baseline: str | None
    points: list[Point]
    constants: dict[str, Interval] = field(default_factory=dict)
    error: float | None = None
    line: Line | None = None
    gains: list[Gain] = field(default_factory=list)
    why_not: str | None = None
    notes: list[str] = field(default_factory=list)


@dataclass
class ScalingResult:
    """``law``: ``L(C)`` or ``L(N, D)``, the same for all ladders; ``draws``: of the bootstrap."""

    law: str
    measure: str
    ladders: list[LadderResult]
    draws: int
