"""What makes a budget equal: widths for parameters, steps for tokens, FLOPs and time."""

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


def closest_width(count: Count, target: int, preferred_step: int, tolerance: float) -> int:
    """Return the width whose parameters are closest to ``target``: a multiple of ``preferred_step`` where one is
    within the ``tolerance`` (a share), because matrix units like multiples, else any."""
    width = closest_multiple(count, target, preferred_step)
    return width if abs(count(width) - target) <= tolerance * target else closest_multiple(count, target, 1)


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
