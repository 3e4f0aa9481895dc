"""What a variant is: a small declaration from which a model is built and its cost is counted."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from torchtitan_ext.errors import UserError, nearest
from torchtitan_ext.parameter_groups import Group, with_settings
from torchtitan_ext.sizes import Shape

from .connection import Connection, Stream


@dataclass(frozen=True)
class Variant:
    """A replacement of the residual connection; this base class is the standard residual.

    A subclass is a family of variants: its further fields are the family's options, and a named variant is an instance
    of it.
    """

    machine_options: ClassVar[frozenset[str]] = frozenset()
    """Options that say what computes the variant, not what is computed: no part of a run's identity."""

    summary: str = "x ← x + sublayer(norm(x)): the residual stream of Llama 3"
    source: str = "He et al., arXiv 1512.03385; torchtitan models/llama3"
    rates: tuple[tuple[str, float], ...] = ()
    """Learning rates and decay that the source gives to what the variant adds, where they are not those of
    ``groups``: settings of parameter groups as in the run file's section ``groups``."""

    def check(self, shape: Shape) -> None:
        """Raise ``UserError`` when an option does not fit the model or another option."""

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

    def parameters(self, shape: Shape) -> int:
        """Parameters beyond those of the standard model."""
        return 0

    def without_gradient(self, shape: Shape) -> int:
        """Parameters of the whole model whose gradient is missing or always zero, so that training teaches them
        nothing."""
        return 0

    def flops_per_token(self, shape: Shape, seq_len: int) -> int:
        """Training FLOPs per token (forward and backward) beyond those of the standard model."""
        return 0

    def groups(self, shape: Shape) -> tuple[Group, ...]:
        """The parameters beyond those of the standard model, by how they are trained; by default all in one group,
        ``depth``, at the run's learning rate and without weight decay. A group may hold no parameters."""
        return (Group("depth", r"_connection\.|^stream\.", self.parameters(shape), weight_decay=0.0),)

    def trained_groups(self, shape: Shape) -> tuple[Group, ...]:
        """The ``groups`` that hold parameters, with the variant's ``rates``."""
        groups = [group for group in self.groups(shape) if group.parameters]
        names = {group.name for group in groups}
        rates = {key: value for key, value in self.rates if key.partition(".")[0] in names}
        return with_settings(groups, rates, lambda key: type(self).__name__)

    def with_options(self, options: Mapping[str, Any], where: Callable[[str], str]) -> "Variant":
        """This variant with some options replaced, as a run file's ``depth`` section asks.

        ``where`` says where the key ``depth.NAME`` was given. Raises ``UserError`` for an option the family does not
        have or a value of the wrong type.
        """
        known = {field.name for field in fields(self)} - {"summary", "source", "rates"}
        for name, value in options.items():
            place = where(f"depth.{name}")
            if name not in known:
                hint = nearest(name, known) if known else "the variant has no options"
                raise UserError(f"{place}: depth.{name} is not an option of the variant; {hint}")
            current = getattr(self, name)
            numbers = isinstance(current, float) and isinstance(value, int) and not isinstance(value, bool)
            if current is not None and type(value) is not type(current) and not numbers:
                raise UserError(
                    f"{place}: depth.{name} is {value!r}; it must be a {type(current).__name__} like {current!r}"
                )
        return replace(self, **options)
