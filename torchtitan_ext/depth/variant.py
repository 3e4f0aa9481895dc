"""What a variant is: a small declaration from which a model is built and its cost is counted."""

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from torchtitan_ext.parameter_groups import Group
from torchtitan_ext.sizes import Shape

from .connection import Connection, Stream
from .declaration import Declaration


@dataclass(frozen=True)
class Variant(Declaration):
    """A replacement of the residual connection; this base class is the standard residual.

    A subclass is a family of variants: its further fields are the family's options, and a named variant is an instance
    of it.
    """

    kind: ClassVar[str] = "variant"
    section: ClassVar[str] = "depth"
    machine_options: ClassVar[frozenset[str]] = frozenset()
    """Options that say what computes the variant, not what is computed: no part of a run's identity."""

    summary: str = "x ← x + sublayer(norm(x)): the residual stream of Llama 3"
    source: str = "He et al., arXiv 1512.03385; torchtitan models/llama3"

    def check_machine(self, precision: str) -> None:
        """Raise ``UserError`` when an option asks for something that this machine does not have, or does not do in
        ``precision``, a run's ``training.precision``."""

    def connections(self, shape: Shape, layer: int) -> tuple[Connection.Config, Connection.Config]:
        """What joins the attention and the feed-forward of layer number ``layer`` (from 0) to the depth state."""
        return Connection.Config(), Connection.Config()

    def stream(self, shape: Shape) -> Stream.Config:
        """The start and the end of the depth state."""
        return Stream.Config()

    def schedule(self, shape: Shape) -> tuple[int, ...]:
        """The numbers of the layers in the order in which they are applied; by default each of them once. A layer that
        stands there several times has its weights once. What it costs beyond one application is for
        ``flops_per_token`` to say."""
        return tuple(range(shape.layers))

    def schedules(self, shape: Shape) -> tuple[tuple[int, ...], ...]:
        """All schedules that training may come to, the first of them at the start; by default ``schedule`` alone."""
        return (self.schedule(shape),)

    def next_schedule(self, number: int, step: int, steps: int, model: nn.Module) -> int:
        """The number of the schedule to go on with after ``step`` of ``steps`` steps (from 1) were trained, the last of
        them with schedule ``number``. Where ranks differ, the first one's choice counts for all; which schedule is in
        use is saved with the model."""
        return number

    def starts_as_standard(self) -> bool:
        """Whether a model computes at the start what the standard model of the same seed does, but for rounding."""
        return type(self) is Variant

    def without_gradient(self, shape: Shape) -> int:
        """Parameters of the whole model whose gradient is missing or always zero, so that training teaches them
        nothing."""
        return 0

    def groups(self, shape: Shape) -> tuple[Group, ...]:
        """The parameters beyond those of the standard model, by how they are trained; by default all in one group,
        ``depth``, at the run's learning rate and without weight decay. A group may hold no parameters."""
        return (Group("depth", r"_connection\.|^stream\.", self.parameters(shape), weight_decay=0.0),)
