"""Depth-state language models for torchtitan: sizes and variants as model specs.

Nothing heavy is imported until it is used, so that light commands start at once.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchtitan.protocols.model_spec import ModelSpec


def model_registry(
    size: str,
    variant: str = "standard",
    *,
    vocab_size: int = 50_304,
    seq_len: int = 2048,
    documents: bool = False,
    **options: Any,
) -> "ModelSpec":
    """The model of a named size and variant as torchtitan's ``ModelSpec``, for a trainer configuration of one's own.

    ``documents``: attention stays within a document. ``options`` are the variant's. Raises ``UserError`` for an unknown
    name with the nearest one.
    """
    from torchtitan_ext.depth.registry import variant_of
    from torchtitan_ext.sizes import shape_of
    from torchtitan_ext.titan.config import model_spec

    chosen = variant_of(variant).with_options(options, lambda key: "model_registry")
    shape = shape_of(size, vocab_size)
    return model_spec(shape, chosen, seq_len=seq_len, documents=documents, flavor=f"{size} {variant}")
