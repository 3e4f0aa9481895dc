"""What a model of any shape is built of: a variant of the residual connection and an attention, counted together."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from torchtitan_ext.parameter_groups import Group
from torchtitan_ext.sizes import Shape

from .attentions import Attention, attention_of
from .registry import variant_of
from .variant import Variant


@dataclass(frozen=True)
class Architecture:
    """A variant and an attention, each with its options."""

    variant: Variant
    attention: Attention

    @classmethod
    def named(
        cls,
        variant: str,
        variant_options: Mapping[str, Any],
        attention: str,
        attention_options: Mapping[str, Any],
        where: Callable[[str], str],
    ) -> Self:
        """The architecture of these names and options.

        ``where`` says where a key such as ``depth.blocks`` was given. Raises ``UserError`` for a name that there is not
        and for an option that does not fit.
        """
        return cls(
            variant_of(variant).with_options(variant_options, where),
            attention_of(attention).with_options(attention_options, where),
        )

    @classmethod
    def described(cls, facts: dict[str, Any], where: str) -> Self:
        """Take out of ``facts``, what a run folder says of its model, the architecture; the rest is the shape.

        Raises ``KeyError`` where there is no variant, and ``UserError`` as ``named`` does.
        """
        options: dict[str, dict[str, Any]] = {}
        for section in (Variant.section, Attention.section):
            keys = [key for key in facts if key.startswith(f"{section}.")]
            options[section] = {key.partition(".")[2]: facts.pop(key) for key in keys}
        names = facts.pop("variant"), facts.pop("attention", "standard")
        return cls.named(names[0], options[Variant.section], names[1], options[Attention.section], lambda key: where)

    def check(self, shape: Shape) -> None:
        """Raise ``UserError`` when an option does not fit the shape or another option."""
        self.variant.check(shape)
        self.attention.check(shape)

    def parameters(self, shape: Shape) -> int:
        """All parameters of a model of ``shape``."""
        return shape.parameters() + self.variant.parameters(shape) + self.attention.parameters(shape)

    def flops_per_token(self, shape: Shape, seq_len: int) -> int:
        """Training FLOPs per token, forward and backward, of a model of ``shape``."""
        added = self.variant.flops_per_token(shape, seq_len) + self.attention.flops_per_token(shape, seq_len)
        return shape.flops_per_token(seq_len) + added

    def trained_groups(self, shape: Shape) -> tuple[Group, ...]:
        """The parameter groups of what is added to the standard model."""
        return self.variant.trained_groups(shape) + self.attention.trained_groups(shape)
