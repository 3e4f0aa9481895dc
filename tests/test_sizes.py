"""The table of sizes against published parameter counts and against torchtitan's own Llama 3 model."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.config_utils import get_attention_config, make_ffn_config, make_gqa_config
from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock

from torchtitan_ext.errors import UserError
from torchtitan_ext.sizes import SIZES, Shape, padded_vocab, shape_of

GPT2_VOCAB = 50_304
NAMED = {
    "100M": 100e6,
    "200M": 200e6,
    "350M": 350e6,
    "500M": 500e6,
    "750M": 750e6,
    "1B": 1e9,
    "1.5B": 1.5e9,
    "500M-deep": 500e6,
}
SMALL = Shape(layers=2, width=64, heads=4, kv_heads=2, ffn_width=128, vocab_size=100)

# Total parameters as published with the weights.
PUBLISHED = [
    pytest.param(Shape(30, 576, 9, 3, 1536, 49_152), 134_515_008, id="SmolLM2-135M"),
    pytest.param(Shape(32, 960, 15, 5, 2560, 49_152), 361_821_120, id="SmolLM2-360M"),
    pytest.param(Shape(16, 2048, 32, 8, 8192, 128_256), 1_235_814_400, id="Llama-3.2-1B"),
    pytest.param(Shape(22, 2048, 32, 4, 5632, 32_000, tied=False), 1_100_048_384, id="TinyLlama-1.1B"),
]


def torchtitan_model(shape: Shape) -> tuple[Llama3Model.Config, nn.Module]:
    """Assemble torchtitan's Llama 3 as its own registry does; the model has shapes but no storage."""
    linear = {"weight": nn.init.zeros_}
    norm = RMSNorm.Config(normalized_shape=shape.width, param_init={"weight": nn.init.ones_})
    layer = Llama3TransformerBlock.Config(
        attention_norm=norm,
        ffn_norm=norm,
        attention=make_gqa_config(
            dim=shape.width,
            n_heads=shape.heads,
            n_kv_heads=shape.kv_heads,
            wqkv_param_init=linear,
            wo_param_init=linear,
            inner_attention=get_attention_config("flex"),
            fuse_qkv=True,
            rope=ComplexRoPE.Config(dim=shape.width // shape.heads, max_seq_len=64, theta=500_000, scaling="llama"),
        ),
        feed_forward=make_ffn_config(
            dim=shape.width, hidden_dim=shape.ffn_width, w1_param_init=linear, w2w3_param_init=linear
        ),
    )
    config = Llama3Model.Config(
        dim=shape.width,
        vocab_size=shape.vocab_size,
        enable_weight_tying=shape.tied,
        tok_embeddings=Embedding.Config(num_embeddings=shape.vocab_size, embedding_dim=shape.width, param_init=linear),
        norm=norm,
        lm_head=Linear.Config(in_features=shape.width, out_features=shape.vocab_size, param_init=linear),
        layers=[layer] * shape.layers,
    )
    with torch.device("meta"):
        return config, config.build()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("size", SIZES)
def test_parameters_and_flops_are_torchtitans(size: str, tied: bool) -> None:
    shape = shape_of(size, GPT2_VOCAB, tied=tied)
    config, model = torchtitan_model(shape)
    for seq_len in (128, 4096):
        assert (shape.parameters(), shape.flops_per_token(seq_len)) == config.get_nparams_and_flops(model, seq_len)


@pytest.mark.parametrize(("shape", "parameters"), PUBLISHED)
def test_parameters_are_the_published_ones(shape: Shape, parameters: int) -> None:
    shape.validate("shape")
    assert shape.parameters() == parameters


def test_the_largest_size_is_qwen3() -> None:
    # Qwen3-1.7B has 1,720,574,976 parameters: 151,936 tokens, and in each of 28 layers two norms of 128 (QK-norm) that
    # this architecture lacks.
    assert shape_of("1.5B", 151_936).parameters() == 1_720_574_976 - 28 * 2 * 128


def test_flops_by_hand() -> None:
    # Forward, per token and layer: two operations per weight, and for each of 10 positions a score and a weighted sum
    # over 64 channels. The backward pass costs twice the forward pass. Norm gains count as weights at torchtitan.
    weights = 64 * 64 + 2 * (64 * 32) + 64 * 64 + 3 * 64 * 128 + 2 * 64
    forward = 2 * (2 * weights + 2 * 10 * 64 * 2) + 2 * 64 + 2 * 100 * 64
    assert SMALL.flops_per_token(10) == 3 * forward


@pytest.mark.parametrize(("size", "parameters"), NAMED.items())
def test_named_for_their_parameters(size: str, parameters: float) -> None:
    assert shape_of(size, padded_vocab(50_257)).parameters() == pytest.approx(parameters, rel=0.03)


def test_depth_is_compared_at_equal_parameters() -> None:
    wide, deep = shape_of("500M", GPT2_VOCAB), shape_of("500M-deep", GPT2_VOCAB)
    assert (wide.layers, wide.width, deep.layers, deep.width) == (24, 1536, 48, 1080)
    assert deep.parameters() == pytest.approx(wide.parameters(), rel=0.01)


@pytest.mark.parametrize("size", NAMED)
def test_widths_suit_gpu_kernels(size: str) -> None:
    shape = shape_of(size, GPT2_VOCAB)
    assert shape.ffn_width % (64 if shape.parameters() < 300e6 else 128) == 0
    assert shape.head_dim in ((64, 128) if size != "500M-deep" else (120,))


def test_character_size_matches_the_nanogpt_model() -> None:
    # nanoGPT: four attention matrices and two feed-forward matrices of 4 x width per layer, 12 width^2 in all.
    def body(width: int) -> int:
        shape = shape_of("1.2M", 128, width=width)
        return shape.parameters() - 128 * width

    assert shape_of("1.2M", 128).width == 128
    for width in (112, 128, 136):
        shape = shape_of("1.2M", 128, width=width)
        assert shape.head_dim * shape.heads == width
        assert shape.head_dim % 2 == 0
        assert body(width) == pytest.approx(6 * 12 * width**2, rel=0.02)


@pytest.mark.parametrize("vocab_size", [4096, 8192])
def test_cpu_size_has_ten_million_parameters(vocab_size: int) -> None:
    assert shape_of("10M", vocab_size).parameters() == pytest.approx(10e6, rel=0.07)


@pytest.mark.parametrize("field", ["layers", "heads", "kv_heads", "ffn_width"])
def test_an_override_replaces_one_number(field: str) -> None:
    override: dict[str, Any] = {field: {"layers": 7, "heads": 16, "kv_heads": 1, "ffn_width": 1000}[field]}
    assert shape_of("200M", 256, **override) == dataclasses.replace(shape_of("200M", 256), **override)


def test_a_new_width_keeps_the_feed_forward_ratio() -> None:
    assert shape_of("200M", 256, width=1536).ffn_width == 3 * 1536
    assert shape_of("1.2M", 256, width=112).ffn_width == 304  # 344 x 112 / 128 = 301; multiples of 8: 296, 304
    assert shape_of("200M", 256, width=1536, ffn_width=2304).ffn_width == 2304


@pytest.mark.parametrize(
    ("size", "overrides", "words"),
    [
        ("500m", {}, ["'500m'", "did you mean '500M'?"]),
        ("huge", {}, ["'huge'", "1.5B"]),
        ("200M", {"heads": 7}, ["width = 768", "heads = 7", "try heads = 6", "128"]),
        ("1.2M", {"width": 136, "heads": 8}, ["width = 136", "heads = 8", "odd head dimension 17", "try heads = 4"]),
        ("200M", {"width": 769}, ["width = 769", "odd"]),
        ("200M", {"kv_heads": 5}, ["heads = 12", "kv_heads = 5", "try kv_heads = 4"]),
        ("200M", {"kv_heads": 24}, ["heads = 12", "kv_heads = 24", "try kv_heads = 12"]),
        ("200M", {"layers": 0}, ["layers = 0"]),
        ("200M", {"width": -64}, ["width = -64"]),
    ],
)
def test_errors_say_what_to_do(size: str, overrides: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UserError) as error:
        shape_of(size, GPT2_VOCAB, **overrides, where="run.yaml:3")
    message = str(error.value)
    assert message.startswith("run.yaml:3: ")
    assert "\n" not in message
    assert all(word in message for word in words), message


def test_no_shape_without_a_vocabulary() -> None:
    with pytest.raises(UserError, match="vocab_size = 0"):
        shape_of("debug", 0)


@pytest.mark.parametrize(("n", "padded"), [(1, 64), (64, 64), (65, 128), (4096, 4096), (50_257, 50_304)])
def test_padded_vocab(n: int, padded: int) -> None:
    assert padded_vocab(n) == padded


def test_padded_vocab_of_nothing() -> None:
    with pytest.raises(UserError, match="not 0"):
        padded_vocab(0)
