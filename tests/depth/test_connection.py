"""The seam itself: separate inputs of queries, keys and values, and what an author is told who breaks a rule."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn
from torchtitan.models.common import Linear
from torchtitan.models.common.attention import QKVLinear

from torchtitan_ext.depth import initial
from torchtitan_ext.depth.attention import FusedAttention
from torchtitan_ext.depth.build import decoder_config
from torchtitan_ext.depth.connection import QKV, Connection
from torchtitan_ext.depth.pair import Pair, PairConnection, PairStream
from torchtitan_ext.depth.variant import Variant
from torchtitan_ext.errors import UserError
from torchtitan_ext.sizes import Shape
from torchtitan_ext.titan.graphs import count_graphs


class Apart(PairConnection):
    """Queries from the residual stream x, keys from the embedding e, values from x + e."""

    @dataclass(kw_only=True, slots=True)
    class Config(PairConnection.Config):
        pass

    def open(self, state: Pair) -> tuple[QKV, Pair]:  # type: ignore[override]
        x_BTD, embedding_BTD = state
        return QKV(x_BTD, embedding_BTD, x_BTD + embedding_BTD), state


@dataclass(frozen=True)
class ApartInputs(Variant):
    def connections(self, shape: Shape, layer: int) -> tuple[Connection.Config, Connection.Config]:
        return Apart.Config(), PairConnection.Config()

    def stream(self, shape: Shape) -> PairStream.Config:
        return PairStream.Config()


def written_out(slow: Any, tokens: torch.Tensor, positions: Sequence[int]) -> torch.Tensor:
    x = embedding = slow.embed(tokens)
    for i in range(slow.shape.layers):
        inputs = [slow.norm(one, slow.of(i, "attention_norm.weight")) for one in (x, embedding, x + embedding)]
        q, k, v = (slow.qkv(i, one)[place] for place, one in enumerate(inputs))
        x = x + slow.attend(i, slow.rotate(q, positions), slow.rotate(k, positions), v, positions)
        x = x + slow.feed_forward(i, slow.norm(x, slow.of(i, "ffn_norm.weight")))
    return slow.logits(x)


def test_queries_keys_and_values_may_have_inputs_of_their_own(checks: Any) -> None:
    checks.equals_slow(ApartInputs(), written_out)


def test_separate_inputs_are_the_same_for_separate_projections(checks: Any) -> None:
    """As exported models have them."""
    shape = checks.small_shape()
    fused = checks.build(ApartInputs(), shape)
    config = decoder_config(shape, ApartInputs(), seq_len=32, inner_attention=FusedAttention.Config())
    for layer in config.layers:
        layer.attention.rope.max_seq_len = 64
        layer.attention.qkv_linear = QKVLinear.Config(
            head_dim=shape.head_dim,
            wq=Linear.Config(in_features=shape.width, out_features=shape.width),
            wkv=Linear.Config(in_features=shape.width, out_features=shape.kv_heads * shape.head_dim),
        )
    separate = config.build()
    separate.init_states()
    separate.load_state_dict(fused.state_dict())
    torch.testing.assert_close(separate(checks.tokens_of()), fused(checks.tokens_of()))


class Scale(Connection):
    @dataclass(kw_only=True, slots=True)
    class Config(Connection.Config):
        axes: tuple[int, ...]

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.scale = nn.Parameter(torch.empty(config.axes))


@dataclass(frozen=True)
class Scales(Variant):
    axes: tuple[int, ...] = (1,)
    filled: bool = True
    counted: int = 4

    def connections(self, shape: Shape, layer: int) -> tuple[Connection.Config, Connection.Config]:
        filled = {"scale": initial.ones} if self.filled else {}
        return Scale.Config(axes=self.axes, param_init=filled), Connection.Config()

    def parameters(self, shape: Shape) -> int:
        return self.counted


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        (Scales(axes=()), r"^Scales: layers\.0\.attention_connection\.scale has no axis.*torch\.empty\(1\)"),
        (Scales(filled=False), r"^Scales: layers\.0\.attention_connection\.scale has no initial value; .*'scale'"),
        (Scales(counted=3), r"^Scales: the method parameters counts 3, but what it builds has 4$"),
    ],
)
def test_what_an_author_forgets_is_said_in_one_line(checks: Any, variant: Scales, message: str) -> None:
    with pytest.raises(UserError, match=message):
        checks.build(variant)
    assert checks.build(replace(Scales(), axes=(1,))).layers["0"].attention_connection.scale.item() == 1.0


class Numbered(Connection):
    """Adds the output times a number that depends on the layer."""

    @dataclass(kw_only=True, slots=True)
    class Config(Connection.Config):
        number: int

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._number = config.number

    def close(self, carry: torch.Tensor, y_BTD: torch.Tensor) -> torch.Tensor:
        return carry + y_BTD / (1 + self._number)


@dataclass(frozen=True)
class NumberedLayers(Variant):
    def connections(self, shape: Shape, layer: int) -> tuple[Connection.Config, Connection.Config]:
        return Numbered.Config(number=layer), Numbered.Config(number=layer)


@pytest.mark.slow
def test_a_setting_of_each_layer_makes_no_graph_of_each_layer() -> None:
    """With a graph for each, the compiler would meet its limit of recompilations at 12 layers."""
    assert count_graphs(NumberedLayers(), 4) == count_graphs(NumberedLayers(), 24) == 2
