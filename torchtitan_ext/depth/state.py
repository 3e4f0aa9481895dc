"""The seam at which a variant replaces the residual connection.

Shape suffixes: B = batch, T = tokens, D = model width.

A decoder is a stack of layers that hand a *depth state* along. A ``Stream`` (one per model) says how the state starts
from the embeddings and how the final norm reads it. A ``Link`` (one per layer) says how each sublayer reads its input
from the state and writes its output back. What a layer must remember is in the state; what it learns about depth is in
its link, so that it is sharded with its layer; what several layers share is in the stream. The rules for a state: any
nest of tuples of tensors; every tensor has the batch and token axes first; nothing in it is changed in place.

The classes here are the standard residual stream, ``x ← x + A(n1 x)``, ``x ← x + F(n2 x)``: the state is one tensor, a
read returns it, a write adds to it. Variants subclass them.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar

import torch
from torchtitan.protocols.module import Module

State = Any
"""A tensor, or a nest of tuples of tensors (and None), as a variant's ``Stream.start`` defines it."""


class Site(Enum):
    """The two places of a layer that read from the depth state and write to it."""

    ATTENTION = "attention"
    FEED_FORWARD = "feed_forward"


class Link(Module):
    """One layer's connection to the depth state; this base class is the standard residual connection."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        pass

    in_sublayers: ClassVar[bool] = False
    """Whether layers are compiled, and selectively checkpointed, sublayer by sublayer: because the state holds more
    tensors after a write than before, and no graph may depend on how many, or because the first layer or the last
    lacks a part, and the graphs of the others can be used for what it has."""

    full_precision: ClassVar[bool] = True
    """Whether the link's parameters are fp32 in the forward pass whatever the precision of the run, as scalars, gains
    and queries should be; ``read`` and ``write`` then convert what they return to the dtype of what they were given.
    False for links whose parameters are matrices, which are used in the run's precision."""

    def __init__(self, config: Config) -> None:
        super().__init__()

    def connect(self, stream: "Stream") -> None:
        """Show the link its model's stream, once, after both are built. A link that uses what the stream has learned
        keeps a reference that does not register the stream as a submodule of the layer (in a tuple, say)."""

    def read(self, state: State, site: Site) -> torch.Tensor:
        """The input [B, T, D] of the sublayer at ``site`` (before its norm)."""
        return state

    def write(self, state: State, site: Site, x_BTD: torch.Tensor, y_BTD: torch.Tensor) -> State:
        """The state after the sublayer at ``site`` turned ``x_BTD`` (what ``read`` gave) into ``y_BTD``."""
        return state + y_BTD


class Stream(Module):
    """The model's end points of the depth state; this base class is the standard residual stream."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        pass

    full_precision: ClassVar[bool] = True
    """As that of ``Link``, for the stream's parameters."""
    recomputed: bool = False
    """Set where layers are recomputed from the state in backward, which so should hold nothing that can be made
    again."""

    def __init__(self, config: Config) -> None:
        super().__init__()

    def start(self, x_BTD: torch.Tensor) -> State:
        """The state before the first layer, from the embeddings [B, T, D]."""
        return x_BTD

    def finish(self, state: State) -> torch.Tensor:
        """The input [B, T, D] of the final norm."""
        return state
