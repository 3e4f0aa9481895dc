"""A run beside its baseline, step by step, while both may still be running.

Differences are taken at steps that both have logged. Where the baseline is the slower one, a step is compared later,
when the baseline has come that far; the comparisons stay in order of steps.
"""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan_ext.follow import Follower
from torchtitan_ext.run_folder import RunFolder

LOSS = "loss_metrics/global_avg_loss"
SPEED = "throughput/global_tokens_per_s"
MEMORY = "memory/max_reserved(GiB)"


@dataclass(frozen=True)
class StoppingRule:
    """End a run whose loss is more than ``behind`` (nats per token) above its baseline's at step ``at``, or else at the
    first step after it that both have logged."""

    behind: float
    at: int


class Versus:
    """Compares the run in ``own`` with the one in ``baseline``. For the first rank of a run, after what it had logged
    beyond its checkpoint has been cut off.

    A baseline that is missing, short or damaged leaves steps without a comparison and raises nothing.
    """

    def __init__(self, own: RunFolder, baseline: Path, rule: StoppingRule | None = None) -> None:
        self.baseline = baseline
        self.rule = rule
        self.verdict: str | None = None
        """Why the rule ends the run, once it does."""
        self._decided = rule is None
        self._follower = Follower(RunFolder(baseline).metrics_path)
        self._theirs: dict[int, tuple[float, float, float]] = {}
        self._pending: deque[tuple[int, tuple[float, float, float]]] = deque()
        for record in own.metrics():
            self.note(record["step"], record)
            if "vs_baseline/loss" in record:
                self._pending = deque(entry for entry in self._pending if entry[0] > record["step"])
                self._decide(record["step"], record["vs_baseline/loss"])

    def note(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Remember what the run logged at ``step``, to be compared."""
        if (numbers := _numbers(metrics)) is not None:
            self._pending.append((step, numbers))

    def compare(self) -> dict[int, dict[str, float]]:
        """The comparisons that have become possible, by step: loss as a difference in nats per token, tokens per second
        and peak memory as ratios."""
        anew, added = self._follower.read()
        if anew:
            self._theirs.clear()
        for record in added:
            if (numbers := _numbers(record)) is not None:
                self._theirs[record["step"]] = numbers
        reached = max(self._theirs, default=0)
        compared: dict[int, dict[str, float]] = {}
        while self._pending and self._pending[0][0] <= reached:
            step, mine = self._pending.popleft()
            theirs = self._theirs.get(step)
            if theirs is None:
                continue  # a step that the baseline did not log
            loss, speed, memory = mine[0] - theirs[0], mine[1] / theirs[1], mine[2] / theirs[2]
            compared[step] = {
                "vs_baseline/loss": loss,
                "vs_baseline/tokens_per_s": speed,
                "vs_baseline/peak_memory": memory,
            }
            self._decide(step, loss)
        return compared

    def _decide(self, step: int, difference: float) -> None:
        if self._decided or self.rule is None or step < self.rule.at:
            return
        self._decided = True
        if difference > self.rule.behind:
            self.verdict = (
                f"loss {difference:.4f} above that of {self.baseline} at step {step}; "
                f"training.stop_behind allows {self.rule.behind:g} at step {self.rule.at}"
            )


def _numbers(metrics: Mapping[str, Any]) -> tuple[float, float, float] | None:
    """(loss, tokens per second, peak memory) of a training step; None for other records and for damaged ones."""
    try:
        loss, speed, memory = (float(metrics[name]) for name in (LOSS, SPEED, MEMORY))
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    return (loss, speed, memory) if math.isfinite(loss + speed + memory) and speed > 0 and memory > 0 else None
