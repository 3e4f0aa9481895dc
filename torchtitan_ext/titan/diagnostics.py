"""Numbers by depth: what a variant notes about itself, the size of each sublayer's output, and gradient norms."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torchtitan.distributed.utils import SpmdContext

from torchtitan_ext.depth.observe import listening

from .heldout import HeldOut


@dataclass
class DepthNumbers:
    """``series``: one number per layer or read, by name. ``maps``: one row per read, each with its sources' weights."""

    series: dict[str, list[float]] = field(default_factory=dict)
    maps: dict[str, list[list[float]]] = field(default_factory=dict)


def look_inside(model: nn.Module, heldout: HeldOut, context: SpmdContext, device: torch.device) -> DepthNumbers:
    """One forward pass without gradient over this rank's first held-out windows, and the last step's gradients.

    The windows are the same for every run on the data. Gradient norms are those after clipping. Collective: every rank
    calls it and gets the averages over all of them.
    """
    inputs, extras = heldout.first_batch(model, device)
    with torch.no_grad(), listening() as notes, _output_sizes(model) as sizes, context():
        model(inputs, **extras)
    noted = {**notes, **sizes}
    flat = torch.cat([value.float().reshape(-1) for values in noted.values() for value in values])
    if heldout.ranks > 1:
        dist.all_reduce(flat)
        flat /= heldout.ranks
    averages = iter(flat.tolist())
    numbers = DepthNumbers()
    for name, values in noted.items():
        rows = [[next(averages) for _ in range(value.numel())] for value in values]
        if all(value.dim() == 0 for value in values):
            numbers.series[name] = [row[0] for row in rows]
        else:
            numbers.maps[name] = rows
    numbers.series["gradient_norm"] = _gradient_norms(model)
    return numbers


@contextmanager
def _output_sizes(model: nn.Module) -> Iterator[dict[str, list[torch.Tensor]]]:
    """The root mean square of what each layer's attention and feed-forward put out, in order of depth.

    Attention is caught at its output projection: a variant may go through its parts without calling it as a whole.
    """
    sizes: dict[str, list[torch.Tensor]] = {}

    def keep(name: str, output: torch.Tensor) -> None:
        sizes.setdefault(name, []).append(output.float().square().mean().sqrt())

    handles = []
    names = {"attention.wo": "attention_output_rms", "feed_forward": "feed_forward_output_rms"}
    for path, module in model.named_modules():
        for ending, name in names.items():
            if path.endswith(f".{ending}"):
                handles.append(module.register_forward_hook(lambda _m, _i, output, name=name: keep(name, output)))
    try:
        yield sizes
    finally:
        for handle in handles:
            handle.remove()


def _gradient_norms(model: nn.Module) -> list[float]:
    norms = []
    for layer in model.layers.values():
        gradients = [parameter.grad for parameter in layer.parameters() if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients, foreach=True)
        norms.append(float(norm.full_tensor() if isinstance(norm, DTensor) else norm))
    return norms
