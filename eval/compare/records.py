"""Logged records → curves and costs. A record is one line of ``metrics.jsonl``: a step and values by tag."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from eval.compare.run import AXES, Curve, DepthNumbers

HELDOUT = ("heldout/loss", "validation_metrics/loss")  # the second is stock torchtitan's
BITS_PER_BYTE = ("heldout/bits_per_byte",)
TRAINING = ("loss_metrics/global_avg_loss",)
TOKENS = ("progress/tokens", "n_tokens_seen")
TOKENS_PER_S = ("throughput/global_tokens_per_s",)
TOKENS_PER_S_PER_DEVICE = ("throughput(tps)",)
STEP_SECONDS = ("time_metrics/end_to_end(s)",)
PEAK_MEMORY = ("memory/max_active(GiB)",)
WARM_UP = 0.1
"""Share of the logged steps whose speed is not counted: compiling and warming up."""

Series = tuple[np.ndarray, np.ndarray]


class Records:
    """The values of one run by tag. Later records of a step win; what is no number is dropped and noted."""

    def __init__(self, records: Iterable[Any]) -> None:
        self._values: dict[str, dict[int, float]] = defaultdict(dict)
        self._maps: dict[str, tuple[int, list[list[float]]]] = {}
        self.notes: list[str] = []
        not_finite: set[str] = set()
        strange = 0
        for record in records:
            step = record.get("step") if isinstance(record, Mapping) else None
            if not isinstance(step, int) or isinstance(step, bool) or step < 0:
                strange += 1
                continue
            for tag, value in record.items():
                if isinstance(value, int | float) and not isinstance(value, bool):
                    if not math.isfinite(value):
                        not_finite.add(tag)
                    self._values[tag][step] = float(value)
                elif tag.startswith("depth/") and _is_map(value):
                    self._maps[tag.removeprefix("depth/")] = (step, value)
        if strange:
            self.notes.append(f"{strange} lines of its record have no step and were not used")
        for tag in sorted(not_finite & {*HELDOUT, *TRAINING}):
            self.notes.append(f"{tag} is NaN or infinite at some steps, which were not used")

    def series(self, tags: Iterable[str]) -> Series:
        """Steps [n] and values [n] of the first tag that was logged, NaN and infinity among them; empty if none was."""
        for tag in tags:
            if tag in self._values:
                steps = sorted(self._values[tag])
                return np.array(steps), np.array([self._values[tag][step] for step in steps])
        return np.array([], dtype=int), np.array([])

    def curve(self, tags: Iterable[str], axes: Mapping[str, Series]) -> Curve:
        """The finite values of a tag, with ``axes`` read at their steps."""
        steps, values = self.series(tags)
        steps, values = steps[np.isfinite(values)], values[np.isfinite(values)]
        return Curve(steps, values, {axis: _read_at(steps, axes[axis]) for axis in AXES})

    def axes(self, flops_per_token: float) -> dict[str, Series]:
        """The cost so far on each axis, as far as it was logged."""
        steps, tokens = self.series(TOKENS)
        return {"tokens": (steps, tokens), "flops": (steps, tokens * flops_per_token), "seconds": self._seconds()}

    def _seconds(self) -> Series:
        steps, seconds = self.series(("progress/train_seconds",))
        if len(steps):
            return steps, seconds
        # Stock torchtitan logs the time since the line before, divided by its log_freq. It logs at step 1 too, so that
        # the first two intervals are shorter than log_freq and divided by that all the same.
        steps, each = self.series(STEP_SECONDS)
        counted = np.diff(steps, prepend=0)
        if len(steps) > 1 and steps[0] == 1:
            counted[:2] = counted[2:].min(initial=steps[1])
        return steps, np.cumsum(each * counted)

    def typical(self, tags: Iterable[str]) -> float:
        """The median once the run is warm; NaN where nothing was logged."""
        _, values = self.series(tags)
        values = values[int(len(values) * WARM_UP) :]
        values = values[np.isfinite(values)]
        return float(np.median(values)) if len(values) else math.nan

    def peak(self, tags: Iterable[str]) -> float:
        _, values = self.series(tags)
        values = values[np.isfinite(values) & (values >= 0)]  # torchtitan logs −1 where a device does not tell
        return float(values.max()) if len(values) else math.nan

    def learning_rate(self) -> Series:
        return self.series(sorted(tag for tag in self._values if tag == "lr" or tag.startswith("lr/")))

    def depth(self) -> DepthNumbers:
        """The last look inside: ``depth/<name>/<index>`` scalars and ``depth/<name>`` maps."""
        series: dict[str, dict[int, float]] = defaultdict(dict)
        step = 0
        for tag, values in self._values.items():
            parts = tag.split("/")
            if parts[0] == "depth" and len(parts) >= 3 and parts[-1].isdigit():
                last = max(values)
                series["/".join(parts[1:-1])][int(parts[-1])] = values[last]
                step = max(step, last)
        step = max([step, *(at for at, _ in self._maps.values())])
        return DepthNumbers(
            step,
            {name: [by_index[index] for index in sorted(by_index)] for name, by_index in series.items()},
            {name: rows for name, (_, rows) in self._maps.items()},
        )


def _is_map(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) > 0
        and all(isinstance(row, list) and all(isinstance(cell, int | float) for cell in row) for row in value)
    )


def _read_at(steps: np.ndarray, series: Series) -> np.ndarray:
    """What a counter stood at. It was 0 at step 0 and grows evenly between two lines; it is unknown past the last."""
    at, counted = series
    if not len(at):
        return np.full(len(steps), np.nan)
    return np.interp(steps, np.concatenate([[0], at]), np.concatenate([[0.0], counted]), right=np.nan)
