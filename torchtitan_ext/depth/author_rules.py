"""What the author of a variant may forget, said in one line before anything is trained (docs/adding-a-variant.md)."""

from collections.abc import Mapping

from torch import nn
from torchtitan.protocols.module import Module

from torchtitan_ext.errors import UserError


def check_learned(variant: str, ends: Mapping[str, nn.Module], declared: int) -> None:
    """Check what a variant adds to a model.

    Args:
        variant: the name of the variant's class.
        ends: the stream and all connections, by their names in the model, before sharding.
        declared: ``Variant.parameters``.

    Raises:
        UserError: a parameter has no axis or no initial value, or there are more or fewer of them than declared.
    """
    found = 0
    for end, top in ends.items():
        for path, module in top.named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                full = ".".join(part for part in (end, path, name) if part)
                if parameter.dim() == 0:
                    raise UserError(
                        f"{variant}: {full} has no axis, and FSDP cannot shard it; make it nn.Parameter(torch.empty(1))"
                    )
                initialisers = module._param_init if isinstance(module, Module) else None
                if name not in (initialisers or {}):
                    raise UserError(
                        f"{variant}: {full} has no initial value; give the Config of its module "
                        f"param_init={{{name!r}: …}}, such as initial.zeros"
                    )
                found += parameter.numel()
    if found != declared:
        raise UserError(
            f"{variant}: the method parameters counts {declared:,}, but its connections and its stream have {found:,}"
        )
