"""The seam at which a variant replaces the residual connection.

Shape suffixes: B = batch, T = tokens, D = model width, N = query heads, K = key/value heads, H = head width.

A decoder is a stack of layers that hand a *depth state* along. A ``Stream`` (one per model) says how the state starts
from the embeddings and how the final norm reads it. A ``Connection`` (one per sublayer, so two per layer) opens the
state: it gives the sublayer its input, and a *carry*, whatever it needs again when it closes. Closing takes the carry
and the sublayer's output and gives the next state::

    x, carry = connection.open(state)      y = sublayer(norm(x))      state = connection.close(carry, y)

What a layer must remember is in the state; what it learns about depth is in its connections, so that it is sharded
with its layer; what several layers share is in the stream. The rules for a state and a carry: any nest of tuples of
tensors and None; every tensor has the batch and token axes first; nothing in them is changed in place.

The classes here are the standard residual stream, ``x ← x + A(n1 x)``, ``x ← x + F(n2 x)``: the state is one tensor.
Variants subclass them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeAlias

import torch
from torchtitan.protocols.module import Module

State = Any
"""A tensor, or a nest of tuples of tensors (and None), as a variant's ``Stream.start`` defines it."""


class QKV(NamedTuple):
    """One tensor each for queries, keys and values: what becomes of them, or separate inputs [B, T, D] of their
    projections."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


SublayerInput: TypeAlias = torch.Tensor | QKV
"""What a connection gives its sublayer, [B, T, D]; an attention connection may give three tensors."""


class Connection(Module):
    """A sublayer's connection to the depth state; this base class is the standard residual connection."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        pass

    full_precision: ClassVar[bool] = True
    """Whether the connection's parameters are fp32 in the forward pass whatever the precision of the run, as scalars,
    gains and queries should be; ``open`` and ``close`` then convert what they return to the dtype of what they were
    given. False for connections whose parameters are matrices, which are used in the run's precision."""

    applies_norm: bool = False
    """Whether the connection applies the sublayer's norm itself, through ``norm``; the sublayer then leaves it out."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self._norm: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = ()

    def connect(self, stream: "Stream", norm: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Show the connection its model's stream and its sublayer's norm, once, after all of them are built. A
        connection that uses what the stream has learned keeps a reference that does not register the stream as a
        submodule of the layer: in a tuple, as here for the norm."""
        self._norm = (norm,)

    def norm(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """The sublayer's norm."""
        return self._norm[0](x_BTD)

    def open(self, state: State) -> tuple[SublayerInput, State]:
        """The sublayer's input [B, T, D], before its norm unless ``applies_norm``, and what ``close`` needs again."""
        return state, state

    def close(self, carry: State, y_BTD: torch.Tensor) -> State:
        """The state after the sublayer turned what ``open`` gave into ``y_BTD``."""
        return carry + y_BTD


class AttentionConnection(Connection):
    """A connection that also acts inside attention. Each method takes the carry and may change it."""

    @dataclass(kw_only=True, slots=True)
    class Config(Connection.Config):
        pass

    def before_rotation(
        self, carry: State, q_BTNH: torch.Tensor, k_BTKH: torch.Tensor, v_BTKH: torch.Tensor
    ) -> tuple[State, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The carry, queries, keys and values, before rotary positions and behind the attention's norm of queries and
        keys if it has one."""
        return carry, q_BTNH, k_BTKH, v_BTKH

    def after_rotation(
        self,
        carry: State,
        q_BTNH: torch.Tensor,
        k_BTKH: torch.Tensor,
        v_BTKH: torch.Tensor,
        unrotated_BTKH: torch.Tensor,
    ) -> tuple[State, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The carry, queries, keys and values that meet in the softmax; ``unrotated_BTKH`` are the keys without
        rotary positions, and without the attention's norm of keys if it has one."""
        return carry, q_BTNH, k_BTKH, v_BTKH

    def entries(self, carry: State) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        """Further keys and values [B, T, K, H] that each token's softmax covers beside the sequence, its own alone."""
        return (), ()


class Stream(Module):
    """The model's end points of the depth state; this base class is the standard residual stream."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        pass

    full_precision: ClassVar[bool] = True
    """As that of ``Connection``, for the stream's parameters."""
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
