"""The cheap controls against their definitions, and what each computes at the start."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from torchtitan_ext.depth.controls import NAMED, ResidualScalars, ValueResidual
from torchtitan_ext.depth.skips import CacheLink, MidContext, MidSkip
from torchtitan_ext.depth.variant import Variant
from torchtitan_ext.errors import UserError
from torchtitan_ext.sizes import SIZES


def layer_of(
    slow: Any, i: int, x: torch.Tensor, positions: Sequence[int], attended: torch.Tensor | None = None
) -> torch.Tensor:
    """The standard layer; attention may read another activation than x."""
    read = x if attended is None else attended
    x = x + slow.attention(i, slow.norm(read, slow.of(i, "attention_norm.weight")), positions)
    return x + slow.feed_forward(i, slow.norm(x, slow.of(i, "ffn_norm.weight")))


def residual_scalars(slow: Any, tokens: torch.Tensor, positions: Sequence[int]) -> torch.Tensor:
    x = first = slow.embed(tokens)
    for i in range(slow.shape.layers):
        x = slow.of(i, "link.residual_scale") * x + slow.of(i, "link.embedding_scale") * first
        x = layer_of(slow, i, x, positions)
    return slow.logits(x)


def value_residual(slow: Any, tokens: torch.Tensor, positions: Sequence[int]) -> torch.Tensor:
    x, first = slow.embed(tokens), None
    for i in range(slow.shape.layers):
        q, k, v = slow.qkv(i, slow.norm(x, slow.of(i, "attention_norm.weight")))
        if first is None:
            first = v
        else:
            share = slow.of(i, "link.mix")
            v = (1 - share) * v + share * first
        x = x + slow.attend(i, slow.rotate(q, positions), slow.rotate(k, positions), v, positions)
        x = x + slow.feed_forward(i, slow.norm(x, slow.of(i, "ffn_norm.weight")))
    return slow.logits(x)


def mid_skip(slow: Any, tokens: torch.Tensor, positions: Sequence[int]) -> torch.Tensor:
    """At 7 layers: 4/11 of them are 3, and 6/11 are 4."""
    x = slow.embed(tokens)
    for i in (0, 1, 2):
        x = layer_of(slow, i, x, positions)
    cached = x
    x = layer_of(slow, 3, x, positions)
    x = x + cached / (1 + (-slow.of(4, "link.gate")).exp())
    for i in (4, 5, 6):
        x = layer_of(slow, i, x, positions)
    return slow.logits(x)


def mid_context(slow: Any, tokens: torch.Tensor, positions: Sequence[int]) -> torch.Tensor:
    """At 7 layers: 8/11 of them are 5."""
    x = slow.embed(tokens)
    for i in range(5):
        x = layer_of(slow, i, x, positions)
    cached = x
    for i in (5, 6):
        x = layer_of(slow, i, x, positions, attended=cached)
    return slow.logits(x - slow["stream.backout"] * cached)


DEFINITIONS: dict[str, Callable[..., torch.Tensor]] = {
    "residual_scalars": residual_scalars,
    "value_residual": value_residual,
    "mid_skip": mid_skip,
    "mid_context": mid_context,
}


@pytest.mark.parametrize("name", NAMED)
def test_equals_the_definition(checks: Any, name: str) -> None:
    checks.equals_slow(NAMED[name], DEFINITIONS[name], layers=7)


@pytest.mark.parametrize("variant", [ResidualScalars(), ValueResidual(start=0.0)])
def test_starts_as_the_standard_model_to_the_bit(checks: Any, variant: Variant) -> None:
    checks.starts_as_standard(variant)


@pytest.mark.parametrize(
    ("name", "starts"),
    [
        ("residual_scalars", {"residual_scale": 1.0, "embedding_scale": 0.0}),
        ("value_residual", {"mix": 0.5}),
        ("mid_skip", {"gate": -1.5}),
        ("mid_context", {"backout": 0.5}),
    ],
)
def test_scalars_start_where_the_sources_have_them(checks: Any, name: str, starts: dict[str, float]) -> None:
    model, standard = checks.build(NAMED[name]), checks.build(Variant())
    shared = {name for name, _ in standard.named_parameters()}
    own = {name: parameter for name, parameter in model.named_parameters() if name not in shared}
    assert {full_name.split(".")[-1] for full_name in own} == starts.keys()
    for full_name, parameter in own.items():
        assert parameter.tolist() == [starts[full_name.split(".")[-1]]]
    if name != "residual_scalars":
        tokens = checks.tokens_of()
        assert not torch.allclose(model(tokens), standard(tokens))


def test_without_a_context_layer_taken_off_only_the_last_attentions_change(checks: Any) -> None:
    """λ = 0 leaves the residual stream whole: up to the cached layer the model is the standard one, to the bit."""
    tokens = checks.tokens_of()
    model, standard = checks.build(MidContext(backout_start=0.0)), checks.build(Variant())
    state, x = model.stream.start(model.tok_embeddings(tokens)), standard.tok_embeddings(tokens)
    for i in range(3):
        state, x = model.layers[str(i)](state, None), standard.layers[str(i)](x, None)
    assert torch.equal(state[0], x)
    assert torch.equal(state[1], x)
    # The first layer that reads the cache finds the residual stream in it.
    assert torch.equal(model(tokens), standard(tokens))


@pytest.mark.parametrize("name", NAMED)
def test_later_tokens_and_other_documents_change_nothing(checks: Any, name: str) -> None:
    checks.is_causal(NAMED[name])


@pytest.mark.parametrize("name", NAMED)
def test_layers_compile_to_the_same_graphs_at_any_depth(checks: Any, name: str) -> None:
    checks.compiles(NAMED[name], layers=7, deeper=11)


@pytest.mark.parametrize("name", NAMED)
def test_counts_are_those_of_the_built_model(checks: Any, name: str) -> None:
    checks.counts_are_those_of_the_model(NAMED[name], list(SIZES))


@pytest.mark.parametrize(
    ("name", "elementwise"),
    [
        ("residual_scalars", 5 * 3 * 32),
        ("value_residual", 4 * 3 * 16),
        ("mid_skip", 2 * 32),
        ("mid_context", 2 * 32),
    ],
)
def test_flops_are_elementwise_alone(checks: Any, name: str, elementwise: int) -> None:
    variant, shape = NAMED[name], checks.small_shape(5)
    assert checks.matrix_flops(variant, shape) == 0
    assert variant.flops_per_token(shape, 32) == 3 * elementwise


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layers", [24, 48])
@pytest.mark.parametrize("name", NAMED)
def test_deep_models_have_finite_gradients(checks: Any, name: str, layers: int, dtype: torch.dtype) -> None:
    checks.trains_finitely(NAMED[name], layers, dtype)


@pytest.mark.parametrize("name", ["mid_skip", "mid_context"])
@pytest.mark.parametrize("size", SIZES)
def test_shares_of_the_depth_fit_every_size(checks: Any, name: str, size: str) -> None:
    shape = checks.small_shape(SIZES[size].layers)
    NAMED[name].check(shape)
    links = [NAMED[name].link(shape, i) for i in range(shape.layers)]
    assert sum(isinstance(link, CacheLink.Config) for link in links) == 1


@pytest.mark.parametrize(
    ("variant", "options", "layers", "message"),
    [
        (ValueResidual(), {}, 1, "model.layers is 1, make it 2 or more"),
        (MidSkip(), {}, 2, "a skip needs a layer in between"),
        (MidSkip(), {"before": 1.0}, 4, "before layer 5"),
        (MidSkip(), {"after": 0.0}, 4, "try depth.after 0.36"),
        (MidContext(), {"after": 1.0}, 4, "there must be such a layer and one after it"),
        (MidContext(), {}, 1, "with 2 layers or more"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    checks: Any, variant: Variant, options: dict[str, Any], layers: int, message: str
) -> None:
    with pytest.raises(UserError) as error:
        checks.build(replace(variant, **options), checks.small_shape(layers))
    assert message in str(error.value)
    assert "\n" not in str(error.value)
