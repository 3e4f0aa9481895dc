"""Every variant by name. A new variant is one new file and one line here."""

from torchtitan_ext.errors import UserError, nearest

from .variant import Variant

VARIANTS: dict[str, Variant] = {
    "standard": Variant(),
}


def variant_of(name: str) -> Variant:
    """The variant called ``name``; raises ``UserError`` with the nearest name for an unknown one."""
    if name not in VARIANTS:
        raise UserError(f"model.variant {name!r} is unknown; {nearest(name, VARIANTS)} `depth variants` lists them")
    return VARIANTS[name]
