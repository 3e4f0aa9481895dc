"""The parts in which blocks other than Llama's differ: GPT-2's norm, feed-forward and absolute positions.

Shape suffixes: B = batch, T = tokens, D = model width.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torchtitan.models.common import Embedding, FeedForward, Linear, RMSNorm
from torchtitan.models.common.config_utils import make_ffn_config
from torchtitan.models.common.rope import ComplexRoPE, RoPE
from torchtitan.protocols.module import Module

from torchtitan_ext.recipe import INIT_STD, residual_std
from torchtitan_ext.sizes import Shape

from . import initial

ROPE_THETA = 500_000.0
"""Llama 3's base (arXiv 2407.21783, section 3.2), also OLMo 2's."""
LONGEST = 131_072
"""The longest context that may be asked for; the trainer cuts the cache of rotary positions down to the run's
window."""
POSITION_STD = {"gpt2": 0.01, "nanogpt": 0.02}
"""Initial standard deviation of learned positions, by block: ``model.py`` of each."""


class LayerNorm(nn.LayerNorm, Module):
    """LayerNorm with or without bias."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        normalized_shape: int
        bias: bool
        eps: float = 1e-5

    def __init__(self, config: Config) -> None:
        super().__init__(config.normalized_shape, eps=config.eps, bias=config.bias)


class GeluFeedForward(Module):
    """W_2 GELU(W_1 x + b_1) + b_2, [B, T, D]."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        w1: Linear.Config
        w2: Linear.Config
        approximate: str

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.w1, self.w2, self.approximate = config.w1.build(), config.w2.build(), config.approximate

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        return self.w2(F.gelu(self.w1(x_BTD), approximate=self.approximate))


class NoRotation(RoPE):
    """In place of rotary positions, where the embeddings already say the position."""

    @dataclass(kw_only=True, slots=True)
    class Config(RoPE.Config):
        pass

    def _precompute_cache(self) -> torch.Tensor:
        return torch.empty(0)

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return query, key


def norm_config(shape: Shape) -> RMSNorm.Config | LayerNorm.Config:
    """The norm of each sublayer's input and of the model's output."""
    gain = {"weight": initial.ones}
    if shape.is_llama:
        return RMSNorm.Config(normalized_shape=shape.width, param_init=gain)
    bias = {"bias": initial.zeros} if shape.biases else {}
    return LayerNorm.Config(normalized_shape=shape.width, bias=shape.biases, param_init=gain | bias)


def linear_config(shape: Shape, into: int, out: int, std: float) -> Linear.Config:
    """A projection from ``into`` to ``out`` channels, with a bias where the block has biases."""
    bias = {"bias": initial.zeros} if shape.biases else {}
    return Linear.Config(
        in_features=into, out_features=out, bias=shape.biases, param_init={"weight": initial.normal(std), **bias}
    )


def feed_forward_config(shape: Shape) -> FeedForward.Config | GeluFeedForward.Config:
    """SwiGLU for Llama's block, GELU for the others: OpenAI's approximation by tanh, or nanoGPT's exact one."""
    hidden, out_of = shape.ffn_width, residual_std(shape.layers)
    if shape.is_llama:
        into: dict[str, Callable] = {"weight": initial.normal(INIT_STD)}
        gated = make_ffn_config(dim=shape.width, hidden_dim=hidden, w1_param_init=into, w2w3_param_init=into)
        gated.w2.param_init = {"weight": initial.normal(out_of)}
        return gated
    return GeluFeedForward.Config(
        w1=linear_config(shape, shape.width, hidden, INIT_STD),
        w2=linear_config(shape, hidden, shape.width, out_of),
        approximate="tanh" if shape.block == "gpt2" else "none",
    )


def rope_config(shape: Shape) -> RoPE.Config:
    kind = ComplexRoPE if shape.is_llama else NoRotation
    return kind.Config(dim=shape.head_dim, max_seq_len=shape.positions or LONGEST, theta=ROPE_THETA)


def positions_config(shape: Shape) -> Embedding.Config | None:
    """The learned embeddings of positions; None where positions are rotary."""
    if shape.is_llama:
        return None
    start = {"weight": initial.normal(POSITION_STD[shape.block])}
    return Embedding.Config(num_embeddings=shape.positions, embedding_dim=shape.width, param_init=start)
