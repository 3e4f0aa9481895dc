"""Every variant by name. A new variant is one new file and one line here."""

from torchtitan_ext.errors import UserError, nearest

from . import attention_over_depth_named, controls, gated_state, mixture_of_depths
from .variant import Variant

VARIANTS: dict[str, Variant] = {
    "standard": Variant(),
    "deep_baseline": Variant(summary="standard, by the name it has in comparisons at the size 500M-deep"),
    **attention_over_depth_named.NAMED,
    **gated_state.NAMED,
    **mixture_of_depths.NAMED,
    **controls.NAMED,
}


def variant_of(name: str) -> Variant:
    """The variant called ``name``; raises ``UserError`` with the nearest name for an unknown one."""
    if name not in VARIANTS:
        raise UserError(f"model.variant {name!r} is unknown; {nearest(name, VARIANTS)} `depth variants` lists them")
    return VARIANTS[name]
