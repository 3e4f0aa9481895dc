"""The gated state against its definition, and what each way of reading it does to the standard model."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from torchtitan_ext.depth.gated_state import NAMED, GatedState
from torchtitan_ext.depth.observe import listening
from torchtitan_ext.depth.variant import Variant
from torchtitan_ext.errors import UserError
from torchtitan_ext.sizes import SIZES, shape_of

EVERY = {
    **NAMED,
    "around_one": GatedState(inject="multiply", around_one=True),
    "biased": GatedState(gate_bias=True, zero_start=True),
}


def written_out(
    slow: Any, tokens: torch.Tensor, positions: Sequence[int], inject: str, cut: bool = False
) -> torch.Tensor:
    """The definition. ``cut`` detaches M where the projection reads it, and nowhere else."""
    x = slow.embed(tokens)
    m = torch.zeros_like(x)
    layers = slow.shape.layers
    for i in range(layers):
        q, k, v = slow.qkv(i, slow.norm(x, slow.of(i, "attention_norm.weight")))
        added = None
        if i > 0 and "multiply" not in inject:
            added = (m.detach() if cut else m) @ slow.of(i, "attention_connection.projection.weight").T
        if inject == "key_value":
            width = slow.shape.kv_heads * slow.shape.head_dim
            if added is not None:
                k, v = k + added[:, :width].reshape(k.shape), v + added[:, width:].reshape(v.shape)
        elif inject == "query" and added is not None:
            q = q + added.reshape(q.shape)
        y = slow.attend(i, slow.rotate(q, positions), slow.rotate(k, positions), v, positions)
        if inject == "output" and added is not None:
            y = y + added
        elif inject == "multiply":
            y = y * m
        elif inject == "multiply around one":
            y = y * (1 + m)
        x = x + y
        h = slow.norm(x, slow.of(i, "ffn_norm.weight"))
        if i < layers - 1:
            both = h @ slow.of(i, "feed_forward_connection.gate.weight").T
            if f"layers.{i}.feed_forward_connection.gate.bias" in slow.weights:
                both = both + slow.of(i, "feed_forward_connection.gate.bias")
            g = 1 / (1 + (-both[:, : slow.shape.width]).exp())
            c = both[:, slow.shape.width :].tanh()
            m = g * m + (1 - g) * c
        x = x + slow.feed_forward(i, h)
    return slow.logits(x)


def inject_of(name: str) -> str:
    return "multiply around one" if name == "around_one" else EVERY[name].inject


@pytest.mark.parametrize("name", EVERY)
def test_equals_the_definition(checks: Any, name: str) -> None:
    checks.equals_slow(EVERY[name], lambda *args: written_out(*args, inject_of(name)))


@pytest.mark.parametrize("name", ["m_gate_kv", "m_gate_kv_detached", "m_gate_query", "m_gate_output"])
def test_a_projection_that_starts_at_zero_is_the_standard_model_to_the_bit(checks: Any, name: str) -> None:
    checks.starts_as_standard(replace(NAMED[name], zero_start=True))


def test_matrices_start_as_in_the_published_code(checks: Any) -> None:
    """Normal with standard deviation 0.02, here cut off at three of them, which takes 1.3% off; no biases."""
    model = checks.build(NAMED["m_gate_kv"], checks.small_shape(4, width=128))
    added = {name: parameter for name, parameter in model.named_parameters() if "_connection." in name}
    assert set(added) == {
        *(f"layers.{i}.attention_connection.projection.weight" for i in (1, 2, 3)),
        *(f"layers.{i}.feed_forward_connection.gate.weight" for i in (0, 1, 2)),
    }
    for parameter in added.values():
        assert parameter.std().item() == pytest.approx(0.02 * 0.9866, rel=0.03)


@pytest.mark.parametrize("inject", ["key_value", "query", "output", "multiply"])
def test_detaching_changes_no_forward_value(checks: Any, inject: str) -> None:
    attached, detached = GatedState(inject=inject), GatedState(inject=inject, detach=True)
    tokens = checks.tokens_of()
    assert torch.equal(checks.build(attached, moved=0.3)(tokens), checks.build(detached, moved=0.3)(tokens))


def test_detaching_removes_the_gradient_across_layers_and_no_other(checks: Any) -> None:
    shape = checks.small_shape(3, width=16)
    tokens = checks.tokens_of(6, rows=1)

    def slow_gradients(cut: bool) -> dict[str, torch.Tensor | None]:
        slow = checks.slow(checks.build(GatedState(), shape, moved=0.3), shape)
        logits = written_out(slow, tokens[0, :-1], range(5), "key_value", cut)
        torch.nn.functional.cross_entropy(logits, tokens[0, 1:]).backward()
        return {name: weight.grad for name, weight in slow.weights.items()}

    def gradients(detach: bool) -> dict[str, torch.Tensor | None]:
        model = checks.build(GatedState(detach=detach), shape, moved=0.3).double()
        torch.nn.functional.cross_entropy(model(tokens[:, :-1])[0], tokens[0, 1:]).backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    cut, whole = slow_gradients(cut=True), slow_gradients(cut=False)
    for expected, got in ((cut, gradients(detach=True)), (whole, gradients(detach=False))):
        assert expected.keys() == got.keys()
        for name, gradient in expected.items():
            if gradient is None:
                assert got[name] is None, name
            else:
                torch.testing.assert_close(got[name], gradient, rtol=1e-5, atol=1e-7, msg=name)
    for i in range(shape.layers - 1):
        assert cut[f"layers.{i}.feed_forward_connection.gate.weight"] is None
        assert whole[f"layers.{i}.feed_forward_connection.gate.weight"].abs().max() > 0
    assert not torch.equal(cut["layers.0.feed_forward.w1.weight"], whole["layers.0.feed_forward.w1.weight"])


def test_the_gate_of_the_detached_control_is_not_trained(checks: Any) -> None:
    trained = {n for n, p in checks.build(EVERY["m_gate_kv_detached"]).named_parameters() if p.requires_grad}
    everything = {n for n, _ in checks.build(EVERY["m_gate_kv"]).named_parameters()}
    assert everything - trained == {f"layers.{i}.feed_forward_connection.gate.weight" for i in range(3)}


def test_multiplying_silences_attention_and_one_plus_m_does_not(checks: Any) -> None:
    """What the class's docstring says breaks, and what it says mends it."""
    shape, tokens = shape_of("1.2M", 67), checks.tokens_of(17)

    def first_layer(variant: Variant) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Its output, M after it, and the gradient of its queries, keys and values."""
        model = checks.build(variant, shape)
        checks.loss_of(model, tokens).backward()
        layer, state = model.layers["0"], model.stream.start(model.tok_embeddings(tokens))
        out = layer(state, None)
        x, m = out if isinstance(out, tuple) else (out, torch.zeros(()))
        return x, m, layer.attention.qkv_linear.wqkv.weight.grad

    _, m, gradient = first_layer(EVERY["m_gate_multiply"])
    assert 0.05 < m.abs().mean() < 0.15
    assert not gradient.any()
    mended, _, gradient = first_layer(EVERY["around_one"])
    standard, _, _ = first_layer(Variant())
    assert torch.equal(mended, standard)
    assert gradient.abs().max() > 0


def test_gates_are_noted_from_the_first_layer_to_the_last_but_one(checks: Any) -> None:
    """With weights at zero a gate is the sigmoid of its bias, whatever it is given."""
    model = checks.build(EVERY["biased"])
    biases = (-1.0, 0.0, 2.0)
    for layer, bias in zip(model.layers.values(), biases, strict=False):
        layer.feed_forward_connection.gate.weight.data.zero_()
        layer.feed_forward_connection.gate.bias.data.fill_(bias)
    with listening() as notes:
        model(checks.tokens_of())
    expected = [1 / (1 + math.exp(-bias)) for bias in biases]
    assert [note.item() for note in notes["gate_openness"]] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("name", EVERY)
def test_later_tokens_and_other_documents_change_nothing(checks: Any, name: str) -> None:
    checks.is_causal(EVERY[name])


@pytest.mark.parametrize("name", EVERY)
def test_layers_compile_to_the_same_graphs_at_any_depth(checks: Any, name: str) -> None:
    checks.compiles(EVERY[name])


@pytest.mark.parametrize("name", EVERY)
def test_counts_are_those_of_the_built_model(checks: Any, name: str) -> None:
    checks.counts_are_those_of_the_model(EVERY[name], list(SIZES))


def test_size_of_the_source(checks: Any) -> None:
    """The source's model of 6 layers of width 112 has 1.21M parameters, of which W_kvm and W_gm in every layer are
    301,056; two are left out."""
    shape = shape_of("1.2M", 65, width=112)
    assert EVERY["m_gate_kv"].parameters(shape) == 301_056 - 2 * 112 * 224
    without = 12 * 6 * 112**2 + 65 * 112 + 13 * 112  # attention and a feed-forward of 4 D, embedding, norms
    assert round((without + 301_056) / 1e6, 2) == 1.21


@pytest.mark.parametrize("name", EVERY)
def test_flops_are_those_that_are_computed(checks: Any, name: str) -> None:
    variant, shape = EVERY[name], checks.small_shape(5)
    width, out = shape.width, variant._widths(shape)
    gate = (8 if variant.gate_bias else 6) * width
    elementwise = 3 * 4 * (gate + out)
    if variant.detach:
        elementwise = 4 * (gate + 3 * out)
    if variant.inject == "multiply":
        elementwise += 3 * 5 * width * (2 if variant.around_one else 1)
    assert variant.flops_per_token(shape, 32) == checks.matrix_flops(variant, shape) + elementwise


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layers", [24, 48])
@pytest.mark.parametrize("name", EVERY)
def test_deep_models_have_finite_gradients(checks: Any, name: str, layers: int, dtype: torch.dtype) -> None:
    checks.trains_finitely(EVERY[name], layers, dtype)


@pytest.mark.parametrize(
    ("options", "layers", "message"),
    [
        ({"inject": "key-value"}, 4, "depth.inject 'key-value' is unknown; did you mean 'key_value'?"),
        ({"around_one": True}, 4, "set depth.inject: multiply"),
        ({"inject": "multiply", "zero_start": True}, 4, "depth.zero_start is about the projection of M"),
        ({}, 1, "model.layers is 1, make it 2 or more"),
    ],
)
def test_options_that_do_not_fit_are_refused(checks: Any, options: dict[str, Any], layers: int, message: str) -> None:
    with pytest.raises(UserError) as error:
        checks.build(replace(GatedState(), **options), checks.small_shape(layers))
    assert message in str(error.value)
    assert "\n" not in str(error.value)
