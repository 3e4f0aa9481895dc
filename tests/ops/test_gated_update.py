"""The gated update against its formula in fp64 and against finite differences."""

import pytest
import torch

from torchtitan_ext.ops.gated_update import gated_update


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def formula(z: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    g, c = torch.sigmoid(z[..., : m.shape[-1]]), torch.tanh(z[..., m.shape[-1] :])
    return g * m + (1 - g) * c


def test_it_is_the_formula_and_its_slope() -> None:
    z, m = draw(2, 3, 10, seed=0).requires_grad_(), draw(2, 3, 5, seed=1).requires_grad_()
    torch.testing.assert_close(gated_update(z, m), formula(z, m), rtol=1e-14, atol=1e-14)
    assert torch.autograd.gradcheck(gated_update, (z, m))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_in_low_precision_are_near_the_exact_ones(dtype: torch.dtype) -> None:
    z, m, weight = (draw(4, 7, width, seed=width, dtype=dtype) for width in (32, 16, 16))
    z.requires_grad_(), m.requires_grad_()
    exact = [tensor.detach().double().requires_grad_() for tensor in (z, m)]
    gradients = torch.autograd.grad(gated_update(z, m), (z, m), weight)
    for gradient, reference in zip(
        gradients, torch.autograd.grad(formula(*exact), exact, weight.double()), strict=True
    ):
        assert gradient.dtype == dtype
        assert (gradient.double() - reference).norm() <= 2 * torch.finfo(dtype).eps * reference.norm()


def test_backward_keeps_its_inputs_alone() -> None:
    z, m = draw(2, 3, 10, seed=0).requires_grad_(), draw(2, 3, 5, seed=1).requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.data_ptr()), lambda _: None):
        gated_update(z, m)
    assert sorted(kept) == sorted([z.data_ptr(), m.data_ptr()])


def test_inside_a_compiled_graph() -> None:
    z, m = draw(2, 3, 10, seed=0), draw(2, 3, 5, seed=1)
    compiled = torch.compile(gated_update, backend="aot_eager", fullgraph=True)(z, m)
    torch.testing.assert_close(compiled, formula(z, m), rtol=1e-14, atol=1e-14)
