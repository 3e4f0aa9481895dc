"""What the author of a variant may forget, said in one line before anything is trained (docs/adding-a-variant.md)."""

from collections.abc import Mapping, Sequence

from torch import nn
from torchtitan.protocols.module import Module

from torchtitan_ext.errors import UserError


def check_learned(author: str, modules: Mapping[str, nn.Module], declared: int, standard: Sequence[str] = ()) -> None:
    """Check what a variant or an attention adds to a model.

    Args:
        author: the name of the class of the variant or the attention.
        modules: what it builds, by the names in the model, before sharding.
        declared: its ``parameters``.
        standard: submodules that ``modules`` also have in the standard model, which are passed over.

    Raises:
        UserError: a parameter has no axis or no initial value, or there are more or fewer of them than declared.
    """
    found = 0
    for end, top in modules.items():
        for path, module in top.named_modules():
            if path.partition(".")[0] in standard:
                continue
            for name, parameter in module.named_parameters(recurse=False):
                full = ".".join(part for part in (end, path, name) if part)
                if parameter.dim() == 0:
                    raise UserError(
                        f"{author}: {full} has no axis, and FSDP cannot shard it; make it nn.Parameter(torch.empty(1))"
                    )
                initialisers = module._param_init if isinstance(module, Module) else None
                if name not in (initialisers or {}):
                    raise UserError(
                        f"{author}: {full} has no initial value; give the Config of its module "
                        f"param_init={{{name!r}: …}}, such as initial.zeros"
                    )
                found += parameter.numel()
    if found != declared:
        raise UserError(f"{author}: the method parameters counts {declared:,}, but what it builds has {found:,}")
