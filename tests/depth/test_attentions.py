"""The forms of attention beside the variants: what each computes, what it costs, and every pair of the two."""

import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.distinct import DISTINCT
from torchtitan_ext.depth.attentions import ATTENTIONS, Attention, GatedAttention, attention_of
from torchtitan_ext.depth.registry import VARIANTS
from torchtitan_ext.depth.variant import Variant
from torchtitan_ext.errors import UserError
from torchtitan_ext.sizes import shape_of

FORMS = [name for name in ATTENTIONS if name != "standard"]
EVERY_FORM = pytest.mark.parametrize("form", FORMS)


def written_out(slow: Any, tokens: torch.Tensor, positions: Sequence[int], form: str) -> torch.Tensor:
    """Logits [T, V] of the standard residual with this attention, from the definitions."""
    x = slow.embed(tokens)
    for layer in range(slow.shape.layers):
        h = slow.norm(x, slow.of(layer, "attention_norm.weight"))
        q, k, v = slow.qkv(layer, h)
        q, k = slow.normed_heads(layer, q, k)
        gates = None
        if form != "qk_norm":
            scores = h @ slow.of(layer, "attention.gate.weight").T
            per_head = slow.shape.head_dim if form == "gate_elementwise" else 1
            gates = (1 / (1 + (-scores).exp())).reshape(len(tokens), slow.shape.heads, per_head)
        q, k = slow.rotate(q, positions), slow.rotate(k, positions)
        x = x + slow.attend(layer, q, k, v, positions, gates=gates)
        x = x + slow.feed_forward(layer, slow.norm(x, slow.of(layer, "ffn_norm.weight")))
    return slow.logits(x)


@EVERY_FORM
def test_it_computes_its_definition(checks: Any, form: str) -> None:
    checks.equals_slow(
        Variant(),
        lambda slow, tokens, positions: written_out(slow, tokens, positions, form),
        attention=ATTENTIONS[form],
    )


def test_a_gate_at_zero_halves_what_attention_gives(checks: Any) -> None:
    """σ(0) = ½: with W_g = 0 the heads are those of attention without gates, times ½."""
    shape = checks.small_shape()
    gated = checks.build(Variant(), shape, attention=GatedAttention(qk_norm=False))
    plain = checks.build(Variant(), shape)
    for layer in gated.layers.values():
        layer.attention.gate.weight.data.zero_()
    for layer in plain.layers.values():
        layer.attention.wo.weight.data *= 0.5
    torch.testing.assert_close(gated(checks.tokens_of()), plain(checks.tokens_of()), rtol=1e-6, atol=1e-6)


@EVERY_FORM
@pytest.mark.parametrize("variant", DISTINCT)
def test_every_pair_takes_a_step(checks: Any, variant: str, form: str) -> None:
    """A finite gradient for every parameter that is trained, and each in one group, that of its own part."""
    shape = checks.small_shape(6)
    model = checks.build(VARIANTS[variant], shape, moved=0.05, attention=ATTENTIONS[form])
    loss = checks.loss_of(model, checks.tokens_of())
    loss.backward()
    assert loss.isfinite()
    idle = 0
    groups = (*VARIANTS[variant].groups(shape), *ATTENTIONS[form].groups(shape))
    for name, parameter in model.named_parameters():
        if parameter.grad is None or not parameter.grad.any():
            idle += parameter.numel()
        else:
            assert parameter.grad.isfinite().all(), name
        assert len([group for group in groups if re.search(group.pattern, name)]) == checks.is_added(name), name
    silenced = variant == "m_gate_multiply"  # of its first layer's attention nothing is heard, so neither of this part
    assert idle == VARIANTS[variant].without_gradient(shape) + silenced * ATTENTIONS[form].parameters(shape) // 6


@EVERY_FORM
def test_later_tokens_and_other_documents_change_nothing(checks: Any, form: str) -> None:
    checks.is_causal(Variant(), attention=ATTENTIONS[form])


@pytest.mark.slow
@EVERY_FORM
def test_compiled_equals_eager(checks: Any, form: str) -> None:
    checks.compiles(VARIANTS["moda"], attention=ATTENTIONS[form])
    checks.compiles(Variant(), attention=ATTENTIONS[form])


@EVERY_FORM
@pytest.mark.parametrize("size", ["debug", "10M", "500M"])
def test_counts_are_those_of_the_model(checks: Any, form: str, size: str) -> None:
    shape, attention = shape_of(size, 67), ATTENTIONS[form]
    checks.counts_are_those_of_the_model(Variant(), [size], attention)
    assert sum(group.parameters for group in attention.groups(shape)) == attention.parameters(shape)


@EVERY_FORM
def test_flops_of_matrices_are_those_that_pytorch_counts(checks: Any, form: str) -> None:
    shape, attention = checks.small_shape(), ATTENTIONS[form]
    gates = attention.parameters(shape) - 2 * shape.layers * shape.head_dim
    assert checks.matrix_flops(Variant(), shape, attention) == 6 * gates


def test_gates_start_and_decay_as_the_projection_of_the_queries() -> None:
    shape = shape_of("debug", 67)
    norms, gates = ATTENTIONS["gate_elementwise"].trained_groups(shape)
    assert (norms.weight_decay, gates.weight_decay, gates.weight_decay_factor, gates.lr_factor) == (0.0, None, 1.0, 1.0)


def test_an_author_who_miscounts_is_told(checks: Any) -> None:
    class Miscounted(GatedAttention):
        def parameters(self, shape: Any) -> int:
            return super().parameters(shape) + 1

    with pytest.raises(
        UserError, match=r"^Miscounted: the method parameters counts 4,161, but what it builds has 4,160"
    ):
        checks.build(Variant(), checks.small_shape(), attention=Miscounted())


def test_an_unknown_name_and_an_unknown_option_say_the_nearest() -> None:
    with pytest.raises(UserError, match=r"model\.attention 'qk_nrom' is unknown; did you mean 'qk_norm'"):
        attention_of("qk_nrom")
    with pytest.raises(UserError, match=r"here: attention\.elementwse is not an option of the attention; did you mean"):
        ATTENTIONS["gate_headwise"].with_options({"elementwse": True}, lambda key: "here")
    with pytest.raises(UserError, match="the attention has no options"):
        Attention().with_options({"qk_norm": True}, lambda key: "here")
