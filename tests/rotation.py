"""Which of many models are trained today: a share of them, another one each day."""

import os
from collections.abc import Sequence
from datetime import UTC, datetime

VARIABLE = "TEST_ROTATION"
"""``all`` trains all of them, as `make test-full` does; a number stands for a day, to repeat that day's choice."""


def decide() -> str:
    """What decides on the choice, for this process and all that it starts: tests that run over midnight have one."""
    return os.environ.setdefault(VARIABLE, str(datetime.now(UTC).toordinal()))


def rotated(names: Sequence[str], count: int) -> list[str]:
    """``count`` of ``names``, beginning where the choice of the day before ended."""
    day = decide()
    if day == "all":
        return list(names)
    first = int(day) * count
    return [names[(first + number) % len(names)] for number in range(min(count, len(names)))]
