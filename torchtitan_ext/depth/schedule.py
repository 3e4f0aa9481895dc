"""A schedule of layers that changes during training: which of a variant's schedules is in use, and for how long each
was."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.protocols.module import Module

Schedule = tuple[int, ...]
"""The numbers of the layers in the order in which they are applied."""


class ChangingSchedule(Module):
    """One of several schedules. A part of the model, so that its state is saved, restored and exported with it.

    ``state`` holds the number of the schedule in use, and then the steps trained with each.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        schedules: tuple[Schedule, ...]
        choose: Callable[[int, int, int, torch.nn.Module], int]
        """``Variant.next_schedule``."""
        flops_per_token: tuple[int, ...]

    state: torch.Tensor

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.schedules, self.choose, self.flops = config.schedules, config.choose, config.flops_per_token
        self.register_buffer("state", torch.zeros(1 + len(self.schedules), dtype=torch.int64))
        self._known: list[int] | None = None
        self.register_load_state_dict_post_hook(_forget)

    def _init_self_buffers(self, *, buffer_device: torch.device | None = None) -> None:
        self.state = torch.zeros_like(self.state, device=buffer_device or self.state.device)
        self._known = None

    @property
    def _values(self) -> list[int]:
        # Read from the device once, not at every step.
        if self._known is None:
            self._known = self.state.tolist()
        return self._known

    @property
    def number(self) -> int:
        """The number of the schedule in use."""
        return self._values[0]

    def after_step(
        self, step: int, steps: int, model: torch.nn.Module, together: Callable[[Callable[[], int]], list[int]]
    ) -> None:
        """Count step number ``step`` of ``steps``, and let the variant choose the schedule of the next. ``together``
        does that on every rank and gives all of them all choices, of which the first counts. Raises ``ValueError`` for
        a number that is none."""
        number = together(lambda: self.choose(self.number, step, steps, model))[0]
        if not 0 <= number < len(self.schedules):
            raise ValueError(f"next_schedule gave {number}, and there are {len(self.schedules)} schedules, from 0")
        values = list(self._values)
        values[1 + values[0]] += 1
        self._set([number, *values[1:]])

    def use_longest(self) -> None:
        """Go on with the schedule that applies most layers: what a run comes to need."""
        longest = max(range(len(self.schedules)), key=lambda number: len(self.schedules[number]))
        self._set([longest, *([0] * len(self.schedules))])

    def _set(self, values: list[int]) -> None:
        self.state.copy_(torch.tensor(values))
        self._known = values

    def trained_flops(self, tokens: int, tokens_per_step: int) -> int:
        """FLOPs of training on ``tokens``, of which those not yet counted are trained with the schedule in use."""
        number, *counted = self._values
        counted_tokens = [count * tokens_per_step for count in counted]
        before = sum(each * flops for each, flops in zip(counted_tokens, self.flops, strict=True))
        return before + (tokens - sum(counted_tokens)) * self.flops[number]


def _forget(module: ChangingSchedule, keys: Any) -> None:
    module._known = None
