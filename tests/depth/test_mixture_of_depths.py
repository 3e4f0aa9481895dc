"""Mixture-of-depths attention as a whole model: against its definition, and where it must agree with the standard
one."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import and_masks, create_block_mask, flex_attention
from torchtitan.models.common.attention import FlexAttention, get_causal_mask_mod, get_document_mask_mod

from torchtitan_ext.depth.attention import FusedAttention, document_mask
from torchtitan_ext.depth.attentions import ATTENTIONS
from torchtitan_ext.depth.build import decoder_config
from torchtitan_ext.depth.mixture_of_depths import NAMED, MixtureOfDepths
from torchtitan_ext.depth.observe import listening
from torchtitan_ext.depth.variant import Variant
from torchtitan_ext.errors import UserError
from torchtitan_ext.sizes import SIZES, Shape

EVERY = {
    **NAMED,
    "attention_alone": MixtureOfDepths(feed_forward_writes=False),
    "every_second": MixtureOfDepths(write_every=2),
    "reordered_norm": MixtureOfDepths(norm="reordered"),
    "rotated_keys": MixtureOfDepths(norm="pre", rotated_keys=True),
}


def published(slow: Any, tokens: torch.Tensor, positions: Sequence[int], qk_norm: bool = False) -> torch.Tensor:
    """The authors' language model: x ← n(x + f(x)); queries and the sequence's keys are turned, and normed with
    ``qk_norm``, and cached keys are neither, all in one softmax."""
    x, cache = slow.embed(tokens), []
    for i in range(slow.shape.layers):
        q, k, v = slow.qkv(i, x)
        met = slow.normed_heads(i, q, k) if qk_norm else (q, k)
        attended = slow.attend(i, *(slow.rotate(each, positions) for each in met), v, positions, cache)
        cache = [*cache, (k, v)]
        x = slow.norm(x + attended, slow.of(i, "attention_norm.weight"))
        if i < slow.shape.layers - 1:  # nobody reads what the last one would write
            key, value = (x @ half.T for half in slow.of(i, "feed_forward_connection.key_value.weight").chunk(2))
            cache = [*cache, (key.unflatten(-1, k.shape[1:]), value.unflatten(-1, k.shape[1:]))]
        x = slow.norm(x + slow.feed_forward(i, x), slow.of(i, "ffn_norm.weight"))
    return slow.logits(x)


def test_with_qk_norm_cached_keys_are_those_before_the_norm(checks: Any) -> None:
    """As in the authors' code, which caches the projection's output and norms what meets in the sequence's softmax."""
    checks.equals_slow(
        NAMED["moda"],
        lambda *args: published(*args, qk_norm=True),
        moved=0.1,
        layers=4,
        attention=ATTENTIONS["qk_norm"],
    )


def written_out(slow: Any, tokens: torch.Tensor, positions: Sequence[int], variant: MixtureOfDepths) -> torch.Tensor:
    """With every option: one softmax over the sequence and over all that was written at the token."""

    def joined(x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if variant.norm == "post":
            return slow.norm(x + y, weight)
        return x + (slow.norm(y, weight) if variant.norm == "reordered" else y)

    x = slow.embed(tokens)
    written: list[tuple[torch.Tensor, torch.Tensor]] = []
    for i in range(slow.shape.layers):
        attention_norm, ffn_norm = slow.of(i, "attention_norm.weight"), slow.of(i, "ffn_norm.weight")
        q, k, v = slow.qkv(i, slow.norm(x, attention_norm) if variant.norm == "pre" else x)
        turned = slow.rotate(k, positions)
        x = joined(x, slow.attend(i, slow.rotate(q, positions), turned, v, positions, written), attention_norm)
        h = slow.norm(x, ffn_norm) if variant.norm == "pre" else x
        if i % variant.write_every == 0 and i < slow.shape.layers - 1:
            written.append((turned if variant.rotated_keys else k, v))
            if variant.feed_forward_writes:
                both = h @ slow.of(i, "feed_forward_connection.key_value.weight").T
                key, value = both.unflatten(-1, (2, *k.shape[1:])).unbind(1)
                written.append((slow.rotate(key, positions) if variant.rotated_keys else key, value))
        x = joined(x, slow.feed_forward(i, h), ffn_norm)
    return slow.logits(x)


def test_the_default_is_the_published_model(checks: Any) -> None:
    checks.equals_slow(NAMED["moda"], published, moved=0.1, layers=4)


@pytest.mark.parametrize("name", EVERY)
def test_equals_the_definition(checks: Any, name: str) -> None:
    checks.equals_slow(EVERY[name], lambda *args: written_out(*args, EVERY[name]), moved=0.1, layers=4)


def test_the_first_layer_of_the_pre_norm_form_is_the_standard_one_to_the_bit(checks: Any) -> None:
    tokens = checks.tokens_of()
    model, standard = checks.build(NAMED["moda_pre_norm"]), checks.build(Variant())
    x, keys, values, _ = model.layers["0"](model.stream.start(model.tok_embeddings(tokens)), None)
    assert torch.equal(x, standard.layers["0"](standard.tok_embeddings(tokens), None))
    assert len(keys) == len(values) == 2
    assert not torch.equal(model(tokens), standard(tokens))


@pytest.mark.parametrize("rotated", [True, False])
def test_depth_logits_depend_on_the_position_unless_keys_are_turned(checks: Any, rotated: bool) -> None:
    """A query and a key of one token that are turned alike have the same product. A sequence of one token has no other
    keys than those."""
    variant = replace(NAMED["moda"], rotated_keys=rotated)
    model, token = checks.build(variant, moved=0.3).double(), torch.tensor([[5]])
    here, there = (model(token, positions=torch.tensor([[position]])) for position in (0, 41))
    if rotated:
        torch.testing.assert_close(here, there, **checks.tolerance)
    else:
        assert (here - there).norm() > 1e-3 * here.norm()


def test_layers_write_by_reference(checks: Any) -> None:
    """The cache holds the very tensors that the layers made: it grows by references, not by copies."""
    model = checks.build(NAMED["moda"])
    state = model.stream.start(model.tok_embeddings(checks.tokens_of()))
    for layer in model.layers.values():
        before, state = state, layer(state, None)
        for old, new in zip(
            before[1] + before[2], state[1][: len(before[1])] + state[2][: len(before[2])], strict=True
        ):
            assert old is new
    assert len(state[1]) == 2 * (len(model.layers) - 1)


def test_the_share_of_depth_keys_is_noted(checks: Any) -> None:
    """With queries at zero every key weighs the same: of t + 1 tokens and E entries, E / (t + 1 + E)."""
    model = checks.build(NAMED["moda"])
    for layer in model.layers.values():
        layer.attention.qkv_linear.wqkv.weight.data.zero_()
    with listening() as notes:
        model(checks.tokens_of(9))
    expected = [sum(entries / (t + 1 + entries) for t in range(9)) / 9 for entries in (2, 4, 6)]
    assert [note.item() for note in notes["depth_key_mass"]] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("name", EVERY)
def test_later_tokens_and_other_documents_change_nothing(checks: Any, name: str) -> None:
    checks.is_causal(EVERY[name])


def test_flex_attention_gives_what_the_explicit_mask_gives(checks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs mask documents with FlexAttention. A CPU runs it without gradients and uncompiled, but runs it."""
    monkeypatch.setattr(FlexAttention, "_compiled_flex_attn", staticmethod(flex_attention))
    shape, variant, tokens = checks.small_shape(width=64), NAMED["moda"], checks.tokens_of(16)
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]] * 2)
    allowed = and_masks(get_causal_mask_mod(), get_document_mask_mod(positions))
    blocks = create_block_mask(allowed, 2, None, 16, 16, device="cpu", BLOCK_SIZE=16)
    outputs = []
    for attention, mask in ((FusedAttention.Config(), document_mask), (FlexAttention.Config(block_size=16), None)):
        config = decoder_config(shape, variant, seq_len=16, inner_attention=attention, make_mask=mask)
        model = config.build()
        model.init_states()
        with torch.no_grad():
            outputs.append(model(tokens, positions=positions, attention_masks=blocks if mask is None else None))
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("name", "layers"), [("moda", 5), ("attention_alone", 9)])
def test_regions_compile_to_the_same_graphs_at_any_depth(checks: Any, name: str, layers: int) -> None:
    """The shallower model's layers read up to 8 entries, which takes every size of chunk."""
    checks.compiles(EVERY[name], layers=layers, deeper=layers + 3)


@pytest.mark.parametrize("name", EVERY)
def test_counts_are_those_of_the_built_model(checks: Any, name: str) -> None:
    checks.counts_are_those_of_the_model(EVERY[name], list(SIZES))


def test_size_of_the_source() -> None:
    """Table 3, row 4 against row 3: 705.7M − 669.0M parameters at 36 layers of width 1024 with two queries to a key,
    which is 35 matrices, the last layer's left out."""
    shape = Shape(layers=36, width=1024, heads=16, kv_heads=8, ffn_width=4096, vocab_size=64)
    assert round(NAMED["moda"].parameters(shape) / 1e6, 1) == 36.7


@pytest.mark.parametrize("name", EVERY)
def test_flops_are_those_that_are_computed(checks: Any, name: str) -> None:
    """The matrices as PyTorch counts them; the softmax over depth, layer by layer, as the docstring counts it."""
    variant, shape = EVERY[name], checks.small_shape(6)
    written, elementwise = 0, 0
    for layer in range(6):
        elementwise += 4 * 32 * written + (32 if written else 0)
        if layer % variant.write_every == 0 and layer < 5:
            written += 2 if variant.feed_forward_writes else 1
            elementwise += 3 * 16 if variant.feed_forward_writes and variant.rotated_keys else 0
    assert variant.flops_per_token(shape, 32) == checks.matrix_flops(variant, shape) + 3 * elementwise


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layers", [24, 48])
@pytest.mark.parametrize("name", EVERY)
def test_deep_models_have_finite_gradients(checks: Any, name: str, layers: int, dtype: torch.dtype) -> None:
    checks.trains_finitely(EVERY[name], layers, dtype)


@pytest.mark.parametrize(
    ("options", "layers", "message"),
    [
        ({"write_every": 0}, 4, "1 (every layer writes) to 3 (the first alone)"),
        ({"write_every": 4}, 4, "depth.write_every is 4"),
        ({}, 1, "model.layers is 1, make it 2 or more"),
        ({"norm": "postt"}, 4, "depth.norm 'postt' is unknown; did you mean 'post'?"),
    ],
)
def test_options_that_do_not_fit_are_refused(checks: Any, options: dict[str, Any], layers: int, message: str) -> None:
    with pytest.raises(UserError) as error:
        checks.build(replace(MixtureOfDepths(), **options), checks.small_shape(layers))
    assert message in str(error.value)
    assert "\n" not in str(error.value)
