"""A depth state of two activations: the residual stream and one that is carried beside it.

Shape suffixes: B = batch, T = tokens, D = model width.
"""

from dataclasses import dataclass

import torch

from .connection import Connection, Stream

Pair = tuple[torch.Tensor, torch.Tensor]
"""The residual stream x and an earlier activation that is carried beside it, both [B, T, D]."""


class PairConnection(Connection):
    """The standard residual connection on the first of a pair. Connections with a role of their own subclass it."""

    @dataclass(kw_only=True, slots=True)
    class Config(Connection.Config):
        pass

    def open(self, state: Pair) -> tuple[torch.Tensor, Pair]:
        return state[0], state

    def close(self, carry: Pair, y_BTD: torch.Tensor) -> Pair:
        return carry[0] + y_BTD, carry[1]


class PairStream(Stream):
    """The embedding is carried at the start; the final norm reads the residual stream."""

    @dataclass(kw_only=True, slots=True)
    class Config(Stream.Config):
        pass

    def start(self, x_BTD: torch.Tensor) -> Pair:
        # A view: were both one tensor object, the first layer would be compiled for that, apart from all others.
        return x_BTD, x_BTD.view_as(x_BTD)

    def finish(self, state: Pair) -> torch.Tensor:
        return state[0]
