"""What a part of a model is, apart from its tensors: options, costs and how its parameters are trained."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self

from torchtitan_ext.errors import UserError, nearest
from torchtitan_ext.parameter_groups import Group, with_settings
from torchtitan_ext.sizes import Shape


@dataclass(frozen=True)
class Declaration:
    """A small declaration from which a part of a model is built and its cost is counted.

    A subclass is a family: its further fields are the family's options, and a name in a registry stands for an instance
    of it.
    """

    kind: ClassVar[str]
    """What the part is called in messages."""
    section: ClassVar[str]
    """The section of the run file that has its options."""

    summary: str
    source: str
    rates: tuple[tuple[str, float], ...] = ()
    """Learning rates and decay that the source gives to the parameters, where they are not those of ``groups``:
    settings of parameter groups as in the run file's section ``groups``."""

    def check(self, shape: Shape) -> None:
        """Raise ``UserError`` when an option does not fit the model or another option."""

    def parameters(self, shape: Shape) -> int:
        """Parameters beyond those of the standard model."""
        return 0

    def flops_per_token(self, shape: Shape, seq_len: int) -> int:
        """Training FLOPs per token (forward and backward) beyond those of the standard model."""
        return 0

    def groups(self, shape: Shape) -> tuple[Group, ...]:
        """The parameters beyond those of the standard model, by how they are trained. A group may hold no
        parameters."""
        return ()

    def trained_groups(self, shape: Shape) -> tuple[Group, ...]:
        """The ``groups`` that hold parameters, with the ``rates``."""
        groups = [group for group in self.groups(shape) if group.parameters]
        names = {group.name for group in groups}
        rates = {key: value for key, value in self.rates if key.partition(".")[0] in names}
        return with_settings(groups, rates, lambda key: type(self).__name__)

    def with_options(self, options: Mapping[str, Any], where: Callable[[str], str]) -> Self:
        """This declaration with some options replaced, as its section of a run file asks.

        ``where`` says where the key ``SECTION.NAME`` was given. Raises ``UserError`` for an option the family does not
        have or a value of the wrong type.
        """
        known = {field.name for field in fields(self)} - {"summary", "source", "rates"}
        for name, value in options.items():
            key = f"{self.section}.{name}"
            if name not in known:
                hint = nearest(name, known) if known else f"the {self.kind} has no options"
                raise UserError(f"{where(key)}: {key} is not an option of the {self.kind}; {hint}")
            current = getattr(self, name)
            numbers = isinstance(current, float) and isinstance(value, int) and not isinstance(value, bool)
            if current is not None and type(value) is not type(current) and not numbers:
                raise UserError(
                    f"{where(key)}: {key} is {value!r}; it must be a {type(current).__name__} like {current!r}"
                )
        return replace(self, **options)
