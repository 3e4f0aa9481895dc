"""The depth read by itself: what is read, who can read it, and what one reading takes.

Shape suffixes: B = batch, T = tokens, D = model width, K = key width, R = rank of the query's part that depends on the
token, n = sources.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from torchtitan_ext.ops.backends import BACKENDS, able, asks, unavailable
from torchtitan_ext.ops.depth_query import DepthQuery, depth_read_reference
from torchtitan_ext.titan.bench_meters import peak_bytes, reset_peak

from .turns import rotation, say

Read = Callable[[Sequence[torch.Tensor], DepthQuery], torch.Tensor]

REFERENCE = "reference"
COPY = "copy"


@dataclass(frozen=True)
class Shape:
    """What a depth read is measured on: ``sources`` tensors [1, tokens, width] of ``dtype``."""

    sources: int
    tokens: int
    width: int
    key_width: int
    rank: int
    dtype: str

    @property
    def source_bytes(self) -> int:
        return self.tokens * self.width * {"float32": 4, "bfloat16": 2}[self.dtype]

    @property
    def bytes(self) -> tuple[int, int]:
        """The bytes that forward and backward cannot do without, each tensor moved once, per-token scalars neglected.

        Forward reads n sources and writes the read. Backward reads them and the incoming gradient, and writes n
        gradients.
        """
        n = self.sources
        return (n + 1) * self.source_bytes, (2 * n + 1) * self.source_bytes


class Case:
    """Sources, a query and an incoming gradient, drawn from a fixed seed, on the device there is."""

    def __init__(self, shape: Shape) -> None:
        self.device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
        generator = torch.Generator().manual_seed(0)

        def draw(*size: int, dtype: str = shape.dtype) -> torch.Tensor:
            return torch.randn(*size, generator=generator).to(self.device, getattr(torch, dtype)).requires_grad_()

        n, rank = shape.sources, shape.rank
        w_1K = draw(1, shape.key_width, dtype="float32")
        basis_nRK = draw(n, rank, shape.key_width, dtype="float32") if rank else None
        coefficients_BTR = draw(1, shape.tokens, rank) if rank else None
        # One vector for all sources, as a model's reads have.
        self.query = DepthQuery(w_1K.expand(n, -1), basis_nRK=basis_nRK, coefficients_BTR=coefficients_BTR)
        self.learned = [tensor for tensor in (w_1K, basis_nRK, coefficients_BTR) if tensor is not None]
        self.sources = [draw(1, shape.tokens, shape.width) for _ in range(n)]
        self.grad_BTD = draw(1, shape.tokens, shape.width).detach()

    def run(self, read: Read) -> tuple[float, float]:
        """Seconds of forward and backward."""
        began = self.now()
        h_BTD = read(self.sources, self.query)
        middle = self.now()
        torch.autograd.grad(h_BTD, [*self.learned, *self.sources], self.grad_BTD)
        return middle - began, self.now() - middle

    def copy(self, target_nBTD: torch.Tensor, source_nBTD: torch.Tensor) -> tuple[float, float]:
        """Seconds of a plain copy, and none."""
        began = self.now()
        target_nBTD.copy_(source_nBTD)
        return self.now() - began, 0.0

    def now(self) -> float:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return time.perf_counter()


def implementations(shape: Shape) -> dict[str, Read]:
    """Those that can do such a read here, by name: the plain reference, then the backends."""
    found: dict[str, Read] = {REFERENCE: depth_read_reference}
    return found | {name: BACKENDS[name].read for name in sorted(BACKENDS.keys() - left_out(shape).keys())}


def left_out(shape: Shape) -> dict[str, str]:
    """The backends that cannot, with the reason."""
    case = Case(Shape(shape.sources, 1, shape.width, shape.key_width, shape.rank, shape.dtype))
    names = able(asks(case.query, shape.width), case.sources[0].dtype)
    reasons = {name: unavailable(name) or (None if name in names else "cannot do such a read") for name in BACKENDS}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def times(shape: Shape, names: Sequence[str], turns: int) -> dict[str, list[tuple[float, float]]]:
    """Seconds of forward and backward in each turn; a turn before them is for warming up. ``COPY`` is one of them."""
    case, reads = Case(shape), implementations(shape)
    source_nBTD = torch.stack([source.detach() for source in case.sources])
    target_nBTD = torch.empty_like(source_nBTD)
    names = [*names, COPY]
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for turn in range(turns + 1):
        for index in rotation(len(names), turn):
            name = names[index]
            seconds = case.copy(target_nBTD, source_nBTD) if name == COPY else case.run(reads[name])
            if turn > 0:
                spent[name].append(seconds)
        say(f"turn {turn} of {turns}" if turn else "warmed up")
    return spent


def extra_bytes(shape: Shape, name: str) -> int:
    """Peak bytes of one forward and backward beyond what was there before, the sources' gradients included."""
    read = implementations(shape)[name]
    # What libraries and compilers set up once is no part of it.
    Case(Shape(shape.sources, 8, shape.width, shape.key_width, shape.rank, shape.dtype)).run(read)
    case = Case(shape)
    before = reset_peak()
    case.run(read)
    return peak_bytes() - before


def device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
