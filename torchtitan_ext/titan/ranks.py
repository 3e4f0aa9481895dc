"""What the ranks of a launch tell one another on the CPU."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from torchtitan_ext import agreement

Result = TypeVar("Result")


class Ranks:
    """A process group of all ranks on the CPU, so that what they agree on never waits for the device. All methods and
    the constructor are collective."""

    def __init__(self) -> None:
        self.group = dist.new_group(backend="gloo")

    def gather(self, mine: Any) -> list[Any]:
        """All ranks' values, in order, on every rank."""
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine, group=self.group)
        return everyone

    def together(self, work: Callable[[], Result]) -> list[Result]:
        """``agreement.together`` of these ranks."""
        return agreement.together(self.gather, work)

    def by_first(self, work: Callable[[], Result]) -> Result:
        """``agreement.by_first`` of these ranks."""
        return agreement.by_first(self.gather, dist.get_rank(), work)
