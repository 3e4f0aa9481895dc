"""Let models train in turns and keep what they took."""

import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .workers import Workers

if TYPE_CHECKING:
    from torchtitan_ext.titan.bench import Setup

    from .contenders import Contender


@dataclass
class Measured:
    """One model: its set-up, and for each turn the seconds of each part of its steps, summed over the turn's steps."""

    contender: "Contender"
    setup: "Setup"
    turns: list[dict[str, float]] = field(default_factory=list)


def measure(contenders: Sequence["Contender"], *, ranks: int, turns: int, steps: int) -> list[Measured]:
    """Set the models up one after the other, then let each train ``steps`` steps in each of ``turns`` turns.

    A turn is one round of all models; the order moves on by one from round to round, so that no model always comes
    first. A round before these is for warming up and does not count. Without turns nothing is timed.
    """
    with ExitStack() as stack:
        groups, results = [], []
        for number, contender in enumerate(contenders, 1):
            say(f"setting up {contender.label} ({number} of {len(contenders)})")
            groups.append(stack.enter_context(closing(Workers(contender, ranks))))
            results.append(Measured(contender, groups[-1].set_up()))
            if not turns:
                groups[-1].close()
        began = time.monotonic()
        for turn in range(turns + 1 if turns else 0):
            for index in rotation(len(groups), turn):
                seconds = groups[index].train(steps)
                if turn > 0:
                    results[index].turns.append(seconds)
            left = (time.monotonic() - began) / (turn + 1) * (turns - turn)
            say(f"{f'turn {turn} of {turns}' if turn else 'warmed up'}, {left:.0f} s left")
    return results


def rotation(models: int, turn: int) -> list[int]:
    """The order in which ``models`` models come in a turn."""
    return [(turn + i) % models for i in range(models)]


def say(line: str) -> None:
    """A line of progress."""
    print(line, file=sys.stderr, flush=True)
