"""Depth-state language models for torchtitan: sizes and variants as model specs.

Nothing heavy is imported until it is used, so that light commands start at once.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchtitan.protocols.model_spec import ModelSpec


def model_registry(
    size: str,
    variant: str = "standard",
    *,
    attention: str = "standard",
    attention_options: Mapping[str, Any] | None = None,
    vocab_size: int = 50_304,
    seq_len: int = 2048,
    documents: bool = False,
    **options: Any,
) -> "ModelSpec":
    """The model of a named size, variant and attention as torchtitan's ``ModelSpec``, for a trainer configuration of
    one's own.

    ``documents``: attention stays within a document. ``options`` are the variant's. Raises ``UserError`` for an unknown
    name with the nearest one.
    """
    from torchtitan_ext.depth.architecture import Architecture
    from torchtitan_ext.sizes import shape_of
    from torchtitan_ext.titan.config import model_spec

    chosen = Architecture.named(variant, options, attention, attention_options or {}, lambda key: "model_registry")
    shape = shape_of(size, vocab_size)
    return model_spec(shape, chosen, seq_len=seq_len, documents=documents, flavor=f"{size} {variant} {attention}")
