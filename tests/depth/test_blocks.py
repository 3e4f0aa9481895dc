"""Blocks other than Llama's: against the definition, against another library's GPT-2, and their counts."""

import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from tests.distinct import DISTINCT
from torchtitan_ext.depth.attention import FusedAttention
from torchtitan_ext.depth.build import decoder_config
from torchtitan_ext.depth.decoder import DepthDecoder
from torchtitan_ext.depth.registry import VARIANTS
from torchtitan_ext.depth.variant import Variant
from torchtitan_ext.errors import UserError
from torchtitan_ext.parameter_groups import trained_groups
from torchtitan_ext.sizes import Shape, shape_of

OTHERS = pytest.mark.parametrize("block", ["gpt2", "nanogpt"])


def shape_with(block: str, **numbers: int) -> Shape:
    own = {"layers": 3, "width": 16, "heads": 4, "kv_heads": 2, **numbers}
    return shape_of("debug", 67, block=block, seq_len=32, **own)


def moved(checks: Any, variant: Variant, shape: Shape, documents: bool = False) -> DepthDecoder:
    """A model whose biases and gains are off their start too."""
    model = checks.build(variant, shape, documents=documents, moved=0.1)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model.double()


class Slow:
    """The parts of a block for one sequence, in fp64, from the definitions of Radford et al. and of nanoGPT."""

    def __init__(self, checks: Any, model: DepthDecoder, shape: Shape) -> None:
        self.slow, self.shape = checks.slow(model, shape), shape

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        centred = x - x.mean(-1, keepdim=True)
        normed = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * self.slow[f"{name}.weight"]
        return normed + self.slow[f"{name}.bias"] if self.shape.biases else normed

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        y = x @ self.slow[f"{name}.weight"].T
        return y + self.slow[f"{name}.bias"] if self.shape.biases else y

    def gelu(self, x: torch.Tensor) -> torch.Tensor:
        if self.shape.block == "gpt2":
            return 0.5 * x * (1 + ((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)).tanh())
        return 0.5 * x * (1 + torch.erf(x / 2**0.5))

    def logits(self, tokens: torch.Tensor, positions: Sequence[int]) -> torch.Tensor:
        x = self.slow.embed(tokens) + self.slow["position_embeddings.weight"][list(positions)]
        s = self.shape
        for i in range(s.layers):
            rows = self.linear(self.norm(x, f"layers.{i}.attention_norm"), f"layers.{i}.attention.qkv_linear.wqkv")
            groups = rows.unflatten(-1, (s.kv_heads, -1, s.head_dim))
            per_key = s.heads // s.kv_heads
            q, k, v = groups[:, :, :per_key].flatten(1, 2), groups[:, :, per_key], groups[:, :, per_key + 1]
            x = x + self.slow.attend(i, q, k, v, positions)
            if s.biases:
                x = x + self.slow.of(i, "attention.wo.bias")
            hidden = self.linear(self.norm(x, f"layers.{i}.ffn_norm"), f"layers.{i}.feed_forward.w1")
            x = x + self.linear(self.gelu(hidden), f"layers.{i}.feed_forward.w2")
        return self.norm(x, "norm") @ self.slow["tok_embeddings.weight"].T


@OTHERS
def test_it_computes_its_definition(checks: Any, block: str) -> None:
    shape = shape_with(block)
    model = moved(checks, Variant(), shape, documents=True)
    slow, tokens = Slow(checks, model, shape), checks.tokens_of(7)
    for positions in (list(range(7)), [0, 1, 2, 0, 0, 1, 2]):
        got = model(tokens, positions=torch.tensor([positions, positions]))
        expected = torch.stack([slow.logits(row, positions) for row in tokens])
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


def test_gpt2_is_the_gpt2_of_transformers(checks: Any) -> None:
    """With as many key heads as query heads, as GPT-2 has."""
    shape = shape_with("gpt2", kv_heads=4)
    ours = moved(checks, Variant(), shape).eval()
    sizes = {"n_embd": shape.width, "n_layer": shape.layers, "n_head": shape.heads, "n_inner": shape.ffn_width}
    theirs = GPT2LMHeadModel(GPT2Config(vocab_size=67, n_positions=32, **sizes)).double().eval()
    state = dict(ours.state_dict())
    renamed = {"wte.weight": state["tok_embeddings.weight"], "wpe.weight": state["position_embeddings.weight"]}
    for kind in ("weight", "bias"):
        renamed[f"ln_f.{kind}"] = state[f"norm.{kind}"]
        for i in range(shape.layers):
            layer, other = f"layers.{i}", f"h.{i}"
            renamed[f"{other}.ln_1.{kind}"] = state[f"{layer}.attention_norm.{kind}"]
            renamed[f"{other}.ln_2.{kind}"] = state[f"{layer}.ffn_norm.{kind}"]
            apart = [state[f"{layer}.attention.qkv_linear.{w}.{kind}"] for w in ("wq", "wk", "wv")]
            # Their projections are stored transposed.
            renamed[f"{other}.attn.c_attn.{kind}"] = torch.cat(apart).t()
            renamed[f"{other}.attn.c_proj.{kind}"] = state[f"{layer}.attention.wo.{kind}"].t()
            renamed[f"{other}.mlp.c_fc.{kind}"] = state[f"{layer}.feed_forward.w1.{kind}"].t()
            renamed[f"{other}.mlp.c_proj.{kind}"] = state[f"{layer}.feed_forward.w2.{kind}"].t()
    theirs.transformer.load_state_dict(renamed)
    tokens = checks.tokens_of(20)
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-10, atol=1e-10)


@OTHERS
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("size", ["debug", "10M", "500M"])
def test_counts_are_those_of_the_model(block: str, size: str, tied: bool) -> None:
    shape = shape_of(size, 67, block=block, seq_len=64, tied=tied)
    config = decoder_config(shape, Variant(), seq_len=64, inner_attention=FusedAttention.Config())
    with torch.device("meta"):
        model = config.build()
    assert config.get_nparams_and_flops(model, 64) == (shape.parameters(), shape.flops_per_token(64))
    undecayed, standard = shape.undecayed_parameters(), {}
    counts = {"matrices": shape.parameters() - undecayed, "norms and embeddings": undecayed}
    groups = trained_groups(counts, (), tied=tied, lr=1.0, weight_decay=1.0)
    for name, parameter in model.named_parameters():
        group = next(group for group in groups if re.search(group.pattern, name))
        is_head = tied and name.startswith("lm_head")
        assert bool(group.weight_decay) == (parameter.dim() > 1 and "embeddings" not in name and not is_head), name
        standard[group.name] = standard.get(group.name, 0) + parameter.numel()
    assert standard == counts


def test_a_size_keeps_its_parameters_with_two_matrices_in_place_of_three() -> None:
    """1.2M is nanoGPT's character model, whose feed-forward is 4 × width."""
    assert shape_of("1.2M", 65, block="nanogpt", seq_len=256).ffn_width == 4 * 128
    assert shape_of("10M", 65, block="gpt2", seq_len=256).ffn_width == 640 * 3 // 2
    assert shape_of("10M", 65, block="gpt2", seq_len=256, ffn_width=640).ffn_width == 640


def test_an_unknown_block_says_the_nearest() -> None:
    with pytest.raises(UserError, match="block 'gpt-2' is unknown; did you mean 'gpt2'"):
        shape_of("debug", 67, block="gpt-2")


@OTHERS
@pytest.mark.parametrize("variant", DISTINCT)
def test_every_variant_takes_a_step(checks: Any, variant: str, block: str) -> None:
    shape = shape_with(block, layers=6, width=32)
    model = checks.build(VARIANTS[variant], shape, moved=0.05)
    loss = checks.loss_of(model, checks.tokens_of())
    loss.backward()
    assert loss.isfinite()
    for name, parameter in model.named_parameters():
        assert parameter.grad is None or parameter.grad.isfinite().all(), name
    assert model.position_embeddings.weight.grad.any()
