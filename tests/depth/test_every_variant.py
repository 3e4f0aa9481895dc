"""What every variant must do, whoever registers it: a line in the registry brings these checks with it."""

import re
from typing import Any

import pytest
import torch

from torchtitan_ext.depth.registry import VARIANTS

ALIASES = ("deep_baseline", "deep_control_block", "deep_hybrid_memory")
"""The same declarations as others, by another name."""
EVERY = pytest.mark.parametrize("name", [name for name in VARIANTS if name not in ALIASES])


@EVERY
def test_later_tokens_and_other_documents_change_nothing(checks: Any, name: str) -> None:
    checks.is_causal(VARIANTS[name])


@EVERY
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_finite(checks: Any, name: str, dtype: torch.dtype) -> None:
    checks.trains_finitely(VARIANTS[name], 12, dtype)


@EVERY
def test_counts_are_those_of_the_model(checks: Any, name: str) -> None:
    checks.counts_are_those_of_the_model(VARIANTS[name], ["debug", "10M", "500M"])


@EVERY
def test_every_parameter_moves_but_those_that_are_declared_not_to(checks: Any, name: str) -> None:
    shape = checks.small_shape(6)
    model = checks.build(VARIANTS[name], shape, moved=0.05)
    before = {key: parameter.detach().clone() for key, parameter in model.named_parameters()}
    checks.loss_of(model, checks.tokens_of(30)).backward()
    torch.optim.SGD([p for p in model.parameters() if p.grad is not None], lr=1e6).step()
    still = [key for key, parameter in model.named_parameters() if torch.equal(parameter, before[key])]
    assert sum(before[key].numel() for key in still) == VARIANTS[name].without_gradient(shape), still


@EVERY
def test_each_parameter_that_is_added_is_in_one_group(checks: Any, name: str) -> None:
    shape = checks.small_shape(6)
    names = [key for key, _ in checks.build(VARIANTS[name], shape).named_parameters()]
    added = [key for key in names if "_connection." in key or key.startswith("stream.")]
    for key in names:
        groups = [group.name for group in VARIANTS[name].groups(shape) if re.search(group.pattern, key)]
        assert len(groups) == (key in added), (key, groups)
