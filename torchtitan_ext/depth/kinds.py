"""Which layers of a model are of one kind, so that one compiled graph serves them all.

Found out by handing a state of one token through all connections, with zeros for what sublayers put out.
"""

from collections.abc import Hashable
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from .connection import AttentionConnection, Connection, State
from .decoder import DepthDecoder, DepthLayer


@torch.no_grad()
def has_few_kinds(model: DepthDecoder, most: int) -> bool:
    """Whether the layers of ``model``, as they are applied by any of its schedules, are of at most ``most`` kinds, and
    fewer than they are.

    Two are of one kind when the states that they get have the same structure and the same shapes, and their
    connections have the same class, settings and shapes of parameters. The model may be on the meta device.
    """
    embedding = model.tok_embeddings.weight
    x_BTD = torch.zeros(1, 1, model.config.dim, device=embedding.device, dtype=embedding.dtype)
    most = min(most, max(1, len(model.config.schedules[0]) - 1))
    kinds = set()
    for schedule in model.config.schedules:
        state = model.stream.start(x_BTD)
        for layer in model.applied(schedule):
            kinds.add((_structure(state), *map(_settings, layer.connections)))
            if len(kinds) > most:
                return False
            state = _handed_on(layer, state, x_BTD)
    return True


def _handed_on(layer: DepthLayer, state: State, y_BTD: torch.Tensor) -> State:
    """The state behind a layer whose sublayers put out ``y_BTD``."""
    attention, connection = layer.attention, layer.attention_connection
    _, carry = connection.open(state)
    if isinstance(connection, AttentionConnection):
        q_BTNH = y_BTD.new_zeros(1, 1, attention.n_heads, attention.head_dim)
        k_BTKH = y_BTD.new_zeros(1, 1, attention.n_kv_heads, attention.head_dim)
        carry, q_BTNH, k_BTKH, v_BTKH = connection.before_rotation(carry, q_BTNH, k_BTKH, k_BTKH)
        carry, *_ = connection.after_rotation(carry, q_BTNH, k_BTKH, v_BTKH, k_BTKH)
    _, carry = layer.feed_forward_connection.open(connection.close(carry, y_BTD))
    return layer.feed_forward_connection.close(carry, y_BTD)


def _structure(state: State) -> Hashable:
    leaves, tree = tree_flatten(state)
    return str(tree), tuple((leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)


def _settings(connection: Connection) -> Hashable:
    plain = {name: value for name, value in vars(connection).items() if name not in _INTERNAL and _is_plain(value)}
    parameters = tuple((name, value.shape, value.requires_grad) for name, value in connection.named_parameters())
    return type(connection), repr(plain), parameters


def _is_plain(value: Any) -> bool:
    """Whether compiled code is compiled anew where ``value`` differs."""
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, str | int | float | Enum)


_INTERNAL = frozenset(vars(nn.Module()))
