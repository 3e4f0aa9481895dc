"""Skips: one cached activation read again by later layers.

Shape suffixes: B = batch, T = tokens, D = model width.

Two more of the cheap controls (see ``controls``). A layer's output is carried beside the residual stream to the layers
that read it. The embedding holds its place until then, and it stays after its last reader.
"""

from dataclasses import dataclass

import torch
from torch import nn

from torchtitan_ext.errors import UserError
from torchtitan_ext.sizes import Shape

from . import initial
from .connection import Connection, Stream
from .pair import Pair, PairConnection, PairStream
from .variant import Variant


class CacheConnection(PairConnection):
    """After the feed-forward of the layer whose output is cached."""

    @dataclass(kw_only=True, slots=True)
    class Config(PairConnection.Config):
        pass

    def close(self, carry: Pair, y_BTD: torch.Tensor) -> Pair:
        x_BTD = carry[0] + y_BTD
        return x_BTD, x_BTD.view_as(x_BTD)  # a view, as in PairStream


class SkipConnection(PairConnection):
    """x ← x + σ(gate) c before attention, for the cached c."""

    @dataclass(kw_only=True, slots=True)
    class Config(PairConnection.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.gate = nn.Parameter(torch.empty(1))

    def open(self, state: Pair) -> tuple[torch.Tensor, Pair]:
        x_BTD, cached_BTD = state
        x_BTD = (x_BTD + torch.sigmoid(self.gate) * cached_BTD).to(x_BTD.dtype)
        return x_BTD, (x_BTD, cached_BTD)


class ContextConnection(PairConnection):
    """Attention reads the cached activation; what it finds is added to the residual stream."""

    @dataclass(kw_only=True, slots=True)
    class Config(PairConnection.Config):
        pass

    def open(self, state: Pair) -> tuple[torch.Tensor, Pair]:
        return state[1], state


class ContextStream(PairStream):
    """The final norm reads x − λ c."""

    @dataclass(kw_only=True, slots=True)
    class Config(PairStream.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.backout = nn.Parameter(torch.empty(1))

    def finish(self, state: Pair) -> torch.Tensor:
        x_BTD, cached_BTD = state
        return (x_BTD - self.backout * cached_BTD).to(x_BTD.dtype)


@dataclass(frozen=True)
class MidSkip(Variant):
    """x ← x + σ(s) c before a later layer, with c the cached output of an earlier one and s a learned scalar.

    Source: modded-nanogpt, records/track_1_short/2025-11-18_RefineSkip: after 4 of 11 layers, before the 7th,
    σ(−1.5) ≈ 0.18 at the start; taking the skip out costs about 0.0025 validation loss there. nanochat's dev/LOG.md
    (2026-01-16) found such a skip slightly worse than none. modded-nanogpt's later records multiply the gate by an
    input-dependent factor that starts at 1; it is left out (choice).

    ``after`` and ``before`` are shares of the model's depth: c is the output of the first ``after`` · L layers, and
    is added to what enters the layer after the first ``before`` · L, both rounded to whole layers. The model does
    not start as the standard one.
    """

    summary: str = "one early layer's output added again before a later layer, under a learned gate"
    source: str = "modded-nanogpt 2025-11-18"
    rates: tuple[tuple[str, float], ...] = (("depth.lr", 0.04),)  # Adam's 0.008 times lr_mul 5, beside NorMuon at 0.03
    after: float = 4 / 11
    before: float = 6 / 11
    gate_start: float = -1.5

    def layers(self, shape: Shape) -> tuple[int, int]:
        """The number of the layer whose output is cached and of the layer that it is added before."""
        return round(self.after * shape.layers) - 1, round(self.before * shape.layers)

    def check(self, shape: Shape) -> None:
        cached, added = self.layers(shape)
        if not 0 <= cached < added - 1 or added >= shape.layers:
            raise UserError(
                f"depth.after {self.after:.3g} and depth.before {self.before:.3g} of {shape.layers} layers add the "
                f"output of layer {cached + 1} before layer {added + 1}; a skip needs a layer in between and must end "
                "in the model: try depth.after 0.36 and depth.before 0.55, with 3 layers or more"
            )

    def connections(self, shape: Shape, layer: int) -> tuple[Connection.Config, Connection.Config]:
        cached, added = self.layers(shape)
        return (
            SkipConnection.Config(param_init={"gate": initial.constant(self.gate_start)})
            if layer == added
            else PairConnection.Config(),
            CacheConnection.Config() if layer == cached else PairConnection.Config(),
        )

    def stream(self, shape: Shape) -> Stream.Config:
        return PairStream.Config()

    def parameters(self, shape: Shape) -> int:
        return 1

    def flops_per_token(self, shape: Shape, seq_len: int) -> int:
        """A multiplication and an addition per element; three times that with the backward pass."""
        return 3 * 2 * shape.width


@dataclass(frozen=True)
class MidContext(Variant):
    """The last layers' attention reads the cached output c of an earlier layer, and the final norm reads x − λ c.

    Source: modded-nanogpt, records/track_1_short/2026-03-06_SimplifyHC, where this one cached activation replaced
    partitioned hyper-connections: after 8 of 11 layers, λ = 0.5 at the start, 1.446 to 1.435 minutes to the same
    validation loss. The layers after c add predictions to x that their attention does not read. The source has its
    skip from an early layer (``mid_skip``) and residual scalars beside it; here it is alone.

    ``after`` is a share of the model's depth, rounded to whole layers. The model does not start as the standard one.
    """

    summary: str = "the last layers' attention reads one cached activation, which is taken off again at the end"
    source: str = "modded-nanogpt 2026-03-06"
    rates: tuple[tuple[str, float], ...] = (("depth.lr", 0.04),)  # Adam's 0.008 times lr_mul 5, beside NorMuon at 0.023
    after: float = 8 / 11
    backout_start: float = 0.5

    def cached(self, shape: Shape) -> int:
        """The number of the layer whose output is cached."""
        return round(self.after * shape.layers) - 1

    def check(self, shape: Shape) -> None:
        cached = self.cached(shape)
        if not 0 <= cached < shape.layers - 1:
            raise UserError(
                f"depth.after {self.after:.3g} of {shape.layers} layers caches the output of layer {cached + 1}; there "
                "must be such a layer and one after it: try depth.after 0.73, with 2 layers or more"
            )

    def connections(self, shape: Shape, layer: int) -> tuple[Connection.Config, Connection.Config]:
        cached = self.cached(shape)
        return (
            ContextConnection.Config() if layer > cached else PairConnection.Config(),
            CacheConnection.Config() if layer == cached else PairConnection.Config(),
        )

    def stream(self, shape: Shape) -> Stream.Config:
        return ContextStream.Config(param_init={"backout": initial.constant(self.backout_start)})

    def parameters(self, shape: Shape) -> int:
        return 1

    def flops_per_token(self, shape: Shape, seq_len: int) -> int:
        """A multiplication and a subtraction per element; three times that with the backward pass."""
        return 3 * 2 * shape.width


NAMED: dict[str, Variant] = {"mid_skip": MidSkip(), "mid_context": MidContext()}
