"""All draws of a bootstrap at once, against the search for each by itself."""

import numpy as np
import pytest

from eval.scaling.fit import DELTA, Law, fit
from eval.scaling.refit import refit

COMPUTE = np.repeat(np.linspace(35.0, 44.0, 4), 3)[:, None]
SIZES, LENGTHS = np.meshgrid(np.linspace(14.0, 18.5, 4), np.linspace(18.5, 23.0, 3))
LADDERS = {
    "L(C)": (COMPUTE, 1.8 + np.exp(3.5 - 0.1 * COMPUTE[:, 0])),
    "L(N, D)": (
        np.stack([SIZES.ravel(), LENGTHS.ravel()], axis=1),
        1.7 + 400 * np.exp(-0.34 * SIZES.ravel()) + 410 * np.exp(-0.28 * LENGTHS.ravel()),
    ),
}


def draws(runs: int, fewest: int) -> np.ndarray:
    """How often each run was drawn, [40, runs]."""
    counts = np.random.default_rng(1).multinomial(runs, np.full(runs, 1 / runs), size=200)
    return counts[(counts > 0).sum(1) >= fewest][:40].astype(float)


def objective(law: Law, logs: np.ndarray, losses: np.ndarray, weights: np.ndarray) -> float:
    """The sum of Huber losses as the paper writes it, in units of δ²."""
    k = logs.shape[1]
    powers = np.exp(law.constants[1 : 1 + k] - law.constants[1 + k :] * logs)
    residuals = np.abs(np.log(np.exp(law.constants[0]) + powers.sum(1)) - np.log(losses))
    each = np.where(residuals < DELTA, residuals**2 / 2, DELTA * (residuals - DELTA / 2))
    return float((weights * each).sum() / DELTA**2)


@pytest.mark.parametrize("noise", [0.0005, 0.01])
@pytest.mark.parametrize("law", LADDERS)
def test_no_draw_is_fitted_worse_than_by_itself(law: str, noise: float) -> None:
    logs, exact = LADDERS[law]
    losses = exact * np.exp(np.random.default_rng(0).normal(0, noise, len(exact)))
    whole, weights = fit(logs, losses), draws(len(losses), fewest=8)
    together = [
        objective(one, logs, losses, own) for one, own in zip(refit(logs, losses, weights, whole), weights, strict=True)
    ]
    alone = [objective(fit(logs, losses, own, whole), logs, losses, own) for own in weights]
    assert len(weights) == 40
    assert np.all(np.array(together) <= np.array(alone) * (1 + 1e-6) + 1e-9)


@pytest.mark.parametrize("law", LADDERS)
def test_draws_without_noise_give_the_law_back(law: str) -> None:
    logs, losses = LADDERS[law]
    start = fit(logs, losses * np.exp(np.random.default_rng(0).normal(0, 0.01, len(losses))))
    wanted = fit(logs, losses)
    for one in refit(logs, losses, draws(len(losses), fewest=8), start):
        assert one.loss(logs) == pytest.approx(wanted.loss(logs), rel=1e-6)
        assert one.loss(logs) == pytest.approx(losses, rel=1e-6)


def test_no_draws_give_no_laws() -> None:
    logs, losses = LADDERS["L(C)"]
    assert refit(logs, losses, np.empty((0, len(losses))), fit(logs, losses)) == []
