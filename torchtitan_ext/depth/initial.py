"""Initial weights as a pure function of (seed, parameter name).

torchtitan draws each parameter in place from one shared generator, so the values depend on the order of the draws and,
once sharded, on the number of ranks. Here every parameter is drawn whole, on the CPU, in fp32, by a generator seeded
with a hash of the run's seed and the parameter's name; a rank then keeps its shard. Two models that share a parameter's
name and shape therefore start from the same values for it, whatever else they contain and however many ranks they run
on.

An initialiser is a function of (tensor, generator) that fills the tensor in place.
"""

import hashlib
from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torchtitan.protocols.module import Module

Initialiser = Callable[[torch.Tensor, torch.Generator], None]


def zeros(tensor: torch.Tensor, generator: torch.Generator) -> None:
    tensor.zero_()


def ones(tensor: torch.Tensor, generator: torch.Generator) -> None:
    tensor.fill_(1.0)


def identity(tensor: torch.Tensor, generator: torch.Generator) -> None:
    """The identity matrix, for a map that must change nothing at the start."""
    nn.init.eye_(tensor)


def constant(value: float) -> Initialiser:
    def fill(tensor: torch.Tensor, generator: torch.Generator) -> None:
        tensor.fill_(value)

    return fill


def normal(std: float) -> Initialiser:
    """Normal with mean 0, cut off at three standard deviations."""

    def fill(tensor: torch.Tensor, generator: torch.Generator) -> None:
        nn.init.trunc_normal_(tensor, std=std, a=-3 * std, b=3 * std, generator=generator)

    return fill


def bind(model: nn.Module, seed: int) -> None:
    """Give every initialiser of ``model`` its parameter's name and ``seed``.

    Call it before the model is wrapped or sharded, while its parameters have their final names. Afterwards torchtitan's
    ``init_states`` fills each parameter through the bound initialiser.
    """
    for module_name, module in model.named_modules():
        if isinstance(module, Module) and module._param_init is not None:
            prefix = f"{module_name}." if module_name else ""
            module._param_init = {
                name: partial(_fill, initialiser=initialiser, seed=seed, name=f"{prefix}{name}")
                for name, initialiser in module._param_init.items()
            }


def generator_for(seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "big", signed=True))


@torch.no_grad()
def _fill(param: torch.Tensor, *, initialiser: Initialiser, seed: int, name: str) -> None:
    whole = torch.empty(param.shape, dtype=torch.float32, device="cpu")
    initialiser(whole, generator_for(seed, name))
    whole = whole.to(device=param.device, dtype=param.dtype)
    if isinstance(param, DTensor):
        # src_data_rank=None: every rank drew the same values, so nothing needs to be sent.
        whole = distribute_tensor(whole, param.device_mesh, param.placements, src_data_rank=None)
    param.copy_(whole)
