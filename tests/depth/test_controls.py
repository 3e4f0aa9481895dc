"""The cheap controls against their definitions, and what each computes at the start."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from torchtitan_ext.depth.controls import EMBEDDING_EPS, NAMED, ResidualScalars, ValueResidual
from torchtitan_ext.depth.skips import CacheConnection, MidContext, MidSkip
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


def residual_scalars(slow: Any, tokens: torch.Tensor, positions: Sequence[int], normalize: bool = True) -> torch.Tensor:
    x = slow.embed(tokens)
    if normalize:
        x = x / (x.square().mean(-1, keepdim=True) + EMBEDDING_EPS).sqrt()
    first = x
    for i in range(slow.shape.layers):
        x = (
            slow.of(i, "attention_connection.residual_scale") * x
            + slow.of(i, "attention_connection.embedding_scale") * first
        )
        x = layer_of(slow, i, x, positions)
    return slow.logits(x)


Weights = Callable[[Any, int], tuple[float | torch.Tensor, float | torch.Tensor]]


def value_residual(
    slow: Any, tokens: torch.Tensor, positions: Sequence[int], weights: Weights = lambda slow, i: (0.5, 0.5)
) -> torch.Tensor:
    """``weights``: λ of the first layer's values and of its own, in a later layer."""
    x, first_values = slow.embed(tokens), None
    for i in range(slow.shape.layers):
        q, k, v = slow.qkv(i, slow.norm(x, slow.of(i, "attention_norm.weight")))
        if first_values is None:
            first_values = v
        else:
            first, own = weights(slow, i)
            v = first * first_values + own * v
        x = x + slow.attend(i, slow.rotate(q, positions), slow.rotate(k, positions), v, positions)
        x = x + slow.feed_forward(i, slow.norm(x, slow.of(i, "ffn_norm.weight")))
    return slow.logits(x)


def learned_share(slow: Any, i: int) -> tuple[torch.Tensor, torch.Tensor]:
    return slow.of(i, "attention_connection.mix"), 1 - slow.of(i, "attention_connection.mix")


def learned_both(slow: Any, i: int) -> tuple[torch.Tensor, torch.Tensor]:
    return slow.of(i, "attention_connection.first_scale"), slow.of(i, "attention_connection.own_scale")


VALUE_FORMS: dict[str, Weights] = {
    "constant": lambda slow, i: (2, 1),
    "learnable": learned_both,
    "sparse": lambda slow, i: (5, 1) if i in (4, 5, 6) else (0, 1),  # 3/8 of 7 layers are 2.6
    "learned_share": learned_share,
}


def mid_skip(slow: Any, tokens: torch.Tensor, positions: Sequence[int]) -> torch.Tensor:
    """At 7 layers: 4/11 of them are 3, and 6/11 are 4."""
    x = slow.embed(tokens)
    for i in (0, 1, 2):
        x = layer_of(slow, i, x, positions)
    cached = x
    x = layer_of(slow, 3, x, positions)
    x = x + cached / (1 + (-slow.of(4, "attention_connection.gate")).exp())
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
    "x0_lambdas": residual_scalars,
    "value_residual": value_residual,
    "value_residual_learned": lambda *args: value_residual(*args, learned_share),
    "mid_skip": mid_skip,
    "mid_context": mid_context,
}


@pytest.mark.parametrize("name", NAMED)
def test_equals_the_definition(checks: Any, name: str) -> None:
    checks.equals_slow(NAMED[name], DEFINITIONS[name], layers=7)


@pytest.mark.parametrize("form", VALUE_FORMS)
def test_forms_of_the_value_residual_equal_their_definitions(checks: Any, form: str) -> None:
    checks.equals_slow(
        ValueResidual(form=form), lambda *args: value_residual(*args, VALUE_FORMS[form]), layers=7, moved=0.3
    )


def test_the_embedding_can_be_left_as_it_is(checks: Any) -> None:
    checks.equals_slow(ResidualScalars(normalize=False), lambda *args: residual_scalars(*args, normalize=False))


def test_the_stream_starts_from_the_normalised_embedding(checks: Any) -> None:
    model, tokens = checks.build(NAMED["residual_scalars"]), checks.tokens_of()
    for start in model.stream.start(model.tok_embeddings(tokens)):
        assert start.square().mean(-1).tolist() == [pytest.approx([1] * 13, rel=0.02)] * 2


@pytest.mark.parametrize("variant", [ResidualScalars(normalize=False), ValueResidual(form="learned_share", start=0.0)])
def test_starts_as_the_standard_model_to_the_bit(checks: Any, variant: Variant) -> None:
    checks.starts_as_standard(variant)


EVERY = {**NAMED, **{f"value {form}": ValueResidual(form=form) for form in VALUE_FORMS}}


@pytest.mark.parametrize(
    ("name", "starts"),
    [
        ("residual_scalars", {"residual_scale": [1, 1, 1, 1, 1], "embedding_scale": [0, 0, 0, 0, 0]}),
        (
            "x0_lambdas",
            {
                "residual_scale": [1.15, 1.125, 1.1, 1.075, 1.05],
                "embedding_scale": [0.2, 0.1625, 0.125, 0.0875, 0.05],
            },
        ),
        ("value_residual", {}),
        ("value learnable", {"first_scale": [0.5] * 4, "own_scale": [0.5] * 4}),
        ("value_residual_learned", {"mix": [0.5] * 4}),
        ("mid_skip", {"gate": [-1.5]}),
        ("mid_context", {"backout": [0.5]}),
    ],
)
def test_scalars_start_where_the_sources_have_them(checks: Any, name: str, starts: dict[str, list[float]]) -> None:
    """From the first layer that has one to the last."""
    shape = checks.small_shape(5)
    model, standard = checks.build(EVERY[name], shape), checks.build(Variant(), shape)
    shared = {name for name, _ in standard.named_parameters()}
    found: dict[str, list[float]] = {}
    for full_name, parameter in model.named_parameters():
        if full_name not in shared:
            found.setdefault(full_name.split(".")[-1], []).extend(parameter.tolist())
    assert found == {kind: pytest.approx(values, rel=1e-6) for kind, values in starts.items()}
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


@pytest.mark.parametrize("name", EVERY)
def test_later_tokens_and_other_documents_change_nothing(checks: Any, name: str) -> None:
    checks.is_causal(EVERY[name])


@pytest.mark.parametrize("name", EVERY)
def test_layers_compile_to_the_same_graphs_at_any_depth(checks: Any, name: str) -> None:
    checks.compiles(EVERY[name], layers=7, deeper=11)


@pytest.mark.parametrize("name", EVERY)
def test_counts_are_those_of_the_built_model(checks: Any, name: str) -> None:
    checks.counts_are_those_of_the_model(EVERY[name], list(SIZES))


@pytest.mark.parametrize(
    ("name", "elementwise"),
    [
        ("residual_scalars", (5 + 1) * 3 * 32),
        ("value_residual", 4 * 3 * 16),
        ("value sparse", 2 * 3 * 16),
        ("mid_skip", 2 * 32),
        ("mid_context", 2 * 32),
    ],
)
def test_flops_are_elementwise_alone(checks: Any, name: str, elementwise: int) -> None:
    variant, shape = EVERY[name], checks.small_shape(5)
    assert checks.matrix_flops(variant, shape) == 0
    assert variant.flops_per_token(shape, 32) == 3 * elementwise


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layers", [24, 48])
@pytest.mark.parametrize("name", EVERY)
def test_deep_models_have_finite_gradients(checks: Any, name: str, layers: int, dtype: torch.dtype) -> None:
    checks.trains_finitely(EVERY[name], layers, dtype)


@pytest.mark.parametrize("name", ["mid_skip", "mid_context"])
@pytest.mark.parametrize("size", SIZES)
def test_shares_of_the_depth_fit_every_size(checks: Any, name: str, size: str) -> None:
    shape = checks.small_shape(SIZES[size].layers)
    NAMED[name].check(shape)
    caching = [isinstance(NAMED[name].connections(shape, i)[1], CacheConnection.Config) for i in range(shape.layers)]
    assert sum(caching) == 1


@pytest.mark.parametrize(
    ("variant", "options", "layers", "message"),
    [
        (ValueResidual(), {}, 1, "model.layers is 1, make it 2 or more"),
        (ValueResidual(), {"form": "fixed"}, 4, "depth.form 'fixed' is unknown"),
        (ValueResidual(), {"start": 0.1}, 4, "depth.start = 0.1 has no effect without depth.form: learned_share"),
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
