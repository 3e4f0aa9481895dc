"""Initial weights depend on the seed and the parameter's name, and on nothing else."""

from dataclasses import replace

import pytest
import torch

from torchtitan_ext.depth import initial
from torchtitan_ext.depth.attention import FusedAttention
from torchtitan_ext.depth.build import decoder_config
from torchtitan_ext.depth.variant import Variant
from torchtitan_ext.recipe import EMBEDDING_STD, INIT_STD, residual_std
from torchtitan_ext.sizes import Shape, shape_of


def weights(shape: Shape, seed: int = 0) -> dict[str, torch.Tensor]:
    config = decoder_config(shape, Variant(), seq_len=32, inner_attention=FusedAttention.Config())
    config.seed = seed
    model = config.build()
    model.init_states()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def test_two_models_share_what_has_the_same_name_and_shape() -> None:
    shape = shape_of("debug", 256)
    small, large = weights(shape), weights(replace(shape, layers=6, ffn_width=96))
    shared = [name for name in small if small[name].shape == large[name].shape and ".wo." not in name]
    assert "layers.3.attention.qkv_linear.wqkv.weight" in shared
    assert "tok_embeddings.weight" in shared
    for name in shared:
        assert torch.equal(small[name], large[name]), name


def test_the_random_state_does_not_matter_and_is_left_alone() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = weights(shape_of("debug", 256))
    torch.manual_seed(2)
    second = weights(shape_of("debug", 256))
    assert all(torch.equal(first[name], second[name]) for name in first)
    torch.manual_seed(1)
    initial.normal(1.0)(torch.empty(3), initial.generator_for(0, "x"))
    assert torch.equal(torch.get_rng_state(), before)


def test_another_seed_or_name_gives_other_values() -> None:
    first, second = weights(shape_of("debug", 256), seed=0), weights(shape_of("debug", 256), seed=1)
    random = [name for name in first if "norm" not in name]
    assert not any(torch.equal(first[name], second[name]) for name in random)
    assert not torch.equal(first["layers.0.feed_forward.w1.weight"], first["layers.1.feed_forward.w1.weight"])


@pytest.mark.parametrize(
    ("name", "std"),
    [
        ("tok_embeddings.weight", EMBEDDING_STD),
        ("layers.0.attention.qkv_linear.wqkv.weight", INIT_STD),
        ("layers.1.feed_forward.w1.weight", INIT_STD),
        ("layers.1.feed_forward.w2.weight", residual_std(6)),
        ("layers.2.attention.wo.weight", residual_std(6)),
    ],
)
def test_spread_of_each_kind_of_matrix(name: str, std: float) -> None:
    """Cut off at 3 standard deviations, a normal distribution keeps 98.7% of its standard deviation."""
    matrix = weights(shape_of("1.2M", 256))[name]
    assert matrix.abs().max() <= 3 * std
    assert matrix.std().item() == pytest.approx(0.987 * std, rel=0.02)


def test_norms_start_at_one() -> None:
    norms = {name: value for name, value in weights(shape_of("debug", 256)).items() if "norm" in name}
    assert len(norms) == 9
    assert all(torch.equal(value, torch.ones_like(value)) for value in norms.values())
