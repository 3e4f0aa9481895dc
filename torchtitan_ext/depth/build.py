"""From a shape, a variant and an attention to a model configuration."""

from collections.abc import Callable
from typing import Any

import torch
from torchtitan.models.common import Embedding, Linear
from torchtitan.models.common.config_utils import make_gqa_config
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.protocols.module import Module

from torchtitan_ext.recipe import EMBEDDING_STD, INIT_STD, residual_std
from torchtitan_ext.sizes import Shape

from . import initial
from .attentions import Attention
from .block import feed_forward_config, linear_config, norm_config, positions_config, rope_config
from .decoder import DepthDecoder, DepthLayer
from .schedule import ChangingSchedule
from .staged_attention import StagedAttention
from .variant import Variant

STANDARD = Attention()


def decoder_config(
    shape: Shape,
    variant: Variant,
    attention: Attention = STANDARD,
    *,
    seq_len: int,
    inner_attention: Module.Config,
    make_mask: Callable[[torch.Tensor], Any] | None = None,
) -> DepthDecoder.Config:
    """The configuration of a decoder of ``shape`` with ``variant`` in place of its residual connection and with
    ``attention``.

    ``seq_len`` (tokens) enters the count of FLOPs alone. Raises ``UserError`` when they do not fit together.
    """
    shape.validate("model")
    variant.check(shape)
    attention.check(shape)
    schedules = variant.schedules(shape)
    added_flops = variant.flops_per_token(shape, seq_len) + attention.flops_per_token(shape, seq_len)
    head = {"weight": initial.normal(EMBEDDING_STD if shape.tied else shape.width**-0.5)}
    embedding = {"weight": _skip if shape.tied else initial.normal(EMBEDDING_STD)}
    return DepthDecoder.Config(
        dim=shape.width,
        vocab_size=shape.vocab_size,
        enable_weight_tying=shape.tied,
        tok_embeddings=Embedding.Config(
            num_embeddings=shape.vocab_size, embedding_dim=shape.width, param_init=embedding
        ),
        norm=norm_config(shape),
        position_embeddings=positions_config(shape),
        lm_head=Linear.Config(in_features=shape.width, out_features=shape.vocab_size, param_init=head),
        layers=[_layer(shape, variant, attention, i, inner_attention) for i in range(shape.layers)],
        stream=variant.stream(shape),
        schedules=schedules,
        changing_schedule=_changing_schedule(shape, variant, seq_len, added_flops) if len(schedules) > 1 else None,
        variant=type(variant).__name__,
        attention=type(attention).__name__,
        depth_parameters=variant.parameters(shape),
        attention_parameters=attention.parameters(shape),
        added_flops_per_token=added_flops,
        make_mask=make_mask,
    )


def _changing_schedule(shape: Shape, variant: Variant, seq_len: int, added_flops: int) -> ChangingSchedule.Config:
    schedules, more = variant.schedules(shape), shape.layer_flops_per_token(seq_len)
    first = shape.flops_per_token(seq_len) + added_flops
    return ChangingSchedule.Config(
        schedules=schedules,
        choose=variant.next_schedule,
        flops_per_token=tuple(first + (len(each) - len(schedules[0])) * more for each in schedules),
    )


def _layer(
    shape: Shape, variant: Variant, attention: Attention, layer: int, inner_attention: Module.Config
) -> DepthLayer.Config:
    attention_connection, feed_forward_connection = variant.connections(shape, layer)
    standard = make_gqa_config(
        dim=shape.width,
        n_heads=shape.heads,
        n_kv_heads=shape.kv_heads,
        wqkv_param_init={},
        wo_param_init={},
        inner_attention=inner_attention,
        fuse_qkv=True,
        rope=rope_config(shape),
    )
    fused = standard.qkv_linear.wqkv.out_features
    standard.qkv_linear.wqkv = linear_config(shape, shape.width, fused, INIT_STD)
    standard.wo = linear_config(shape, shape.width, shape.width, residual_std(shape.layers))
    return DepthLayer.Config(
        attention=attention.config(StagedAttention.config_of(standard), shape),
        feed_forward=feed_forward_config(shape),
        attention_norm=norm_config(shape),
        ffn_norm=norm_config(shape),
        attention_connection=attention_connection,
        feed_forward_connection=feed_forward_connection,
    )


def _skip(tensor: torch.Tensor, generator: torch.Generator) -> None:
    skip_param_init(tensor)  # tied to the output head, which is filled
