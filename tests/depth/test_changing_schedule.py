"""A schedule of layers that changes during training: what is applied, counted, saved and restored."""

from typing import Any

import pytest
import torch

from tests.strangers import STRANGERS

GROWING = STRANGERS["growing"]
STEPS = 6


def trained(model: Any, steps: int, begun: int = 0) -> None:
    for step in range(begun + 1, steps + 1):
        model.changing_schedule.after_step(step, STEPS, model, lambda choose: [choose()])


def test_layers_are_applied_by_the_schedule_in_use(checks: Any) -> None:
    """Once as the standard model, twice as the loop of the same page, with the same weights."""
    tokens = checks.tokens_of()
    model = checks.build(GROWING)
    assert torch.equal(model(tokens), checks.build(type(GROWING).__base__())(tokens))
    trained(model, 2)
    assert model.changing_schedule.number == 0
    trained(model, 3, begun=2)
    assert model.changing_schedule.number == 1
    assert torch.equal(model(tokens), checks.build(STRANGERS["looped"])(tokens))


def test_the_state_is_part_of_the_models_state(checks: Any) -> None:
    model, other = checks.build(GROWING), checks.build(GROWING)
    trained(model, 4)
    other(checks.tokens_of())  # has read its own state before
    other.load_state_dict(model.state_dict())
    assert other.changing_schedule.number == 1
    assert torch.equal(other(checks.tokens_of()), model(checks.tokens_of()))
    assert other.changing_schedule.state.tolist() == [1, 3, 1]


def test_flops_are_those_of_each_step_with_its_schedule(checks: Any) -> None:
    shape = checks.small_shape()
    model = checks.build(GROWING, shape)
    once, more = shape.flops_per_token(32), shape.layers * shape.layer_flops_per_token(32)
    assert model.changing_schedule.trained_flops(100, 100) == 100 * once, "step 1, before it is counted"
    trained(model, 4)
    assert model.changing_schedule.trained_flops(400, 100) == 400 * once + 100 * more
    assert model.changing_schedule.trained_flops(500, 100) == 500 * once + 200 * more


def test_the_first_ranks_choice_counts(checks: Any) -> None:
    model = checks.build(GROWING)
    model.changing_schedule.after_step(1, STEPS, model, lambda choose: [1, choose()])
    assert model.changing_schedule.number == 1


def test_a_number_that_is_no_schedules_is_refused(checks: Any) -> None:
    model = checks.build(GROWING)
    with pytest.raises(ValueError, match="next_schedule gave 2, and there are 2 schedules"):
        model.changing_schedule.after_step(1, STEPS, model, lambda choose: [2])
