"""What makes a budget equal: widths for parameters, steps for tokens, FLOPs and time."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torchtitan_ext.errors import UserError

Count = Callable[[int], int]
"""Parameters at a width; grows with it."""


@dataclass(frozen=True)
class Match:
    """What was solved for, and how well it met what was wanted.

    Attributes:
        quantity: what was made equal, with its unit.
        solved: the run keys that were solved, with their values.
        got: the run's amount.
        wanted: the amount to be met.
        at_least: ``got`` may lie above ``wanted`` by any amount.
    """

    quantity: str
    solved: Mapping[str, Any]
    got: float
    wanted: float
    at_least: bool = False

    @property
    def miss(self) -> float:
        """By which share ``got`` lies above ``wanted``."""
        return self.got / self.wanted - 1

    def check(self, tolerance: float, what: str) -> None:
        """Raise ``UserError``, starting with ``what``, when ``got`` misses ``wanted`` by more than the tolerance."""
        if self.miss >= 0 if self.at_least else abs(self.miss) <= tolerance:
            return
        allowed = "it must have as many" if self.at_least else f"the tolerance is {tolerance:.2%}"
        best = ", ".join(f"{key} {value}" for key, value in self.solved.items())
        raise UserError(
            f"{what}: {self.got:,.0f} {self.quantity} against {self.wanted:,.0f} ({self.miss:+.2%}); {allowed}"
            + (f", and {best} comes closest" if best else "")
        )


WIDTH_STEP = 64
"""Model widths are multiples of this where the tolerance allows: the width of the tiles of matrix units."""
HEAD_STEP = 8
"""Head dimensions are multiples of this: at 2 bytes a number, rows of 16 bytes, as matrix units and flash attention
take them without padding. A run with another head dimension may be slow for that alone."""
FFN_STEP = 8
"""Feed-forward widths are multiples of this where the tolerance allows, for the same reason."""


def closest_width(count: Count, target: int, heads: int, tolerance: float) -> int:
    """Return the model width whose parameters are closest to ``target``: a multiple of ``WIDTH_STEP`` where one is
    within the ``tolerance`` (a share), else any that gives ``heads`` heads of a multiple of ``HEAD_STEP``."""
    step = HEAD_STEP * heads
    return _closest(count, target, (math.lcm(step, WIDTH_STEP), step), tolerance)


def closest_ffn_width(count: Count, target: int, tolerance: float) -> int:
    """Return the feed-forward width whose parameters are closest to ``target``: a multiple of ``FFN_STEP`` where one
    is within the ``tolerance`` (a share), else any."""
    return _closest(count, target, (FFN_STEP, 1), tolerance)


def _closest(count: Count, target: int, steps: tuple[int, int], tolerance: float) -> int:
    width = closest_multiple(count, target, steps[0])
    return width if abs(count(width) - target) <= tolerance * target else closest_multiple(count, target, steps[1])


def closest_multiple(count: Count, target: int, step: int) -> int:
    """Return the multiple of ``step`` whose parameters are closest to ``target``."""
    above = smallest_multiple(count, target, step)
    return min(max(step, above - step), above, key=lambda width: abs(count(width) - target))


def smallest_multiple(count: Count, target: int, step: int) -> int:
    """Return the smallest multiple of ``step`` with ``target`` parameters or more."""
    high = step
    while count(high) < target:
        high *= 2
    low = high // 2 // step * step  # 0, or a multiple with too few
    while high - low > step:
        middle = (low + high) // 2 // step * step
        low, high = (middle, high) if count(middle) < target else (low, middle)
    return high


def equal_steps(wanted: float, per_step: float, what: str) -> int:
    """Return the steps whose sum of ``per_step`` is closest to ``wanted``.

    Raises:
        UserError: it is less than one step; the message starts with ``what``.
    """
    steps = round(wanted / per_step)
    if steps < 1:
        raise UserError(f"{what}: the budget solves to {wanted / per_step:.2g} steps; make the baseline's run longer")
    return steps
