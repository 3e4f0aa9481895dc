"""Reading curves between their points, and never outside them."""

import math

import numpy as np
import pytest

from eval.compare.curves import Crossing, has_axis, reaches, smoothed, value_at
from eval.compare.run import Curve


def curve(tokens: list[float], values: list[float]) -> Curve:
    return Curve(np.arange(len(tokens)), np.array(values), {"tokens": np.array(tokens)})


def test_straight_lines_over_the_logarithm() -> None:
    found = curve([100, 10_000], [5.0, 3.0])
    assert value_at(found, "tokens", 1000) == pytest.approx(4.0)  # half-way in log
    assert value_at(found, "tokens", 100) == 5.0
    assert value_at(found, "tokens", 10_000) == 3.0


def test_nothing_outside_a_curve() -> None:
    found = curve([100, 10_000], [5.0, 3.0])
    assert value_at(found, "tokens", 99) is None
    assert value_at(found, "tokens", 10_001) is None


def test_where_a_loss_is_first_reached() -> None:
    found = curve([100, 10_000, 20_000, 30_000], [5.0, 3.0, 3.5, 2.0])
    crossing = reaches(found, "tokens", 4.0)
    assert crossing is not None
    assert crossing.budget == pytest.approx(1000)
    assert reaches(found, "tokens", 1.9) is None
    assert reaches(found, "tokens", 6.0) == Crossing(100.0, at_most=True)


def test_reading_and_reaching_are_each_others_inverse() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        tokens = np.cumsum(rng.uniform(1, 100, 6))
        values = 10 - np.cumsum(rng.uniform(0.01, 1, 6))
        found = curve(tokens.tolist(), values.tolist())
        budget = math.exp(rng.uniform(math.log(tokens[0] * 1.001), math.log(tokens[-1])))
        loss = value_at(found, "tokens", budget)
        assert loss is not None
        crossing = reaches(found, "tokens", loss)
        assert crossing is not None
        assert crossing.budget == pytest.approx(budget, rel=1e-9)


@pytest.mark.parametrize("tokens", [[1.0, math.nan], [0.0, 1.0], [2.0, 2.0], []])
def test_an_axis_has_to_be_known_and_to_rise(tokens: list[float]) -> None:
    assert not has_axis(curve(tokens, [1.0] * len(tokens)), "tokens")


def test_smoothing_is_the_mean_of_what_came_before() -> None:
    found = smoothed(curve([1, 2, 3, 4], [4.0, 2.0, 6.0, 8.0]), share=0.5)
    assert found.values.tolist() == [4.0, 3.0, 4.0, 7.0]
