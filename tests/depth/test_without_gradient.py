"""What variants declare about parameters that learn nothing, against the gradients of a model."""

from typing import Any

import pytest
import torch

from torchtitan_ext.depth.gated_state import GatedState
from torchtitan_ext.depth.registry import VARIANTS
from torchtitan_ext.sizes import shape_of

OTHERS = {
    "detached query": GatedState(inject="query", detach=True),
    "detached multiply": GatedState(inject="multiply", detach=True),
    "detached multiply around one": GatedState(inject="multiply", detach=True, around_one=True),
}
EVERY = {**VARIANTS, **OTHERS}


@pytest.mark.parametrize("name", EVERY)
def test_as_many_parameters_have_no_gradient_as_the_variant_says(checks: Any, name: str) -> None:
    variant, shape = EVERY[name], checks.small_shape()
    model = checks.build(variant, shape)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():  # away from the start, where what is zero stops many a gradient
        parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    checks.loss_of(model, checks.tokens_of()).backward()
    gradients = [(parameter.numel(), parameter.grad) for parameter in model.parameters()]
    without = sum(number for number, gradient in gradients if gradient is None or not gradient.any())
    assert without == variant.without_gradient(shape)


def test_a_detached_state_leaves_its_gates_untrained() -> None:
    # 19 of 20 layers have a gate of 576 · 2 · 576 weights.
    shape = shape_of("100M", 50_304)
    assert VARIANTS["m_gate_kv_detached"].without_gradient(shape) == 19 * 2 * 576 * 576 == 12_607_488
