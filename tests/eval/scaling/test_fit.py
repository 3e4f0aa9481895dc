"""Laws fitted to losses whose constants are known, by construction or by publication."""

from pathlib import Path

import numpy as np
import pytest
from scipy.optimize import approx_fprime

from eval.scaling import fit as fitting
from eval.scaling.fit import DELTA, Law, fit

TRUE = Law(np.array([np.log(1.7), np.log(400.0), np.log(900.0), 0.34, 0.31]))
SIZES, LENGTHS = np.geomspace(1e7, 1e9, 5), np.geomspace(2e8, 4e10, 5)
GRID = np.log([[n, d] for n in SIZES for d in LENGTHS])


def test_a_law_without_noise_is_found_again() -> None:
    found = fit(GRID, TRUE.loss(GRID))
    np.testing.assert_allclose(found.constants, TRUE.constants, rtol=2e-3)
    # E + A N^−α + B D^−β, written out.
    n, d = np.exp(GRID[7])
    assert TRUE.loss(GRID[7]) == pytest.approx(1.7 + 400 * n**-0.34 + 900 * d**-0.31, rel=1e-12)


def test_constants_are_recovered_within_their_standard_errors() -> None:
    """The reference is the covariance of least squares, σ² (JᵀJ)⁻¹: noise is well inside Huber's quadratic part."""
    noise = 3e-4
    jacobian = np.array(
        [approx_fprime(TRUE.constants, lambda c, x=x: float(np.log(Law(c).loss(x))), 1e-7) for x in GRID]
    )
    errors = noise * np.sqrt(np.diag(np.linalg.inv(jacobian.T @ jacobian)))
    rng = np.random.default_rng(0)
    draws = [fit(GRID, TRUE.loss(GRID) * np.exp(rng.normal(0, noise, len(GRID)))).constants for _ in range(8)]
    scores = (np.array(draws) - TRUE.constants) / errors
    assert np.abs(scores).max() < 3.5
    assert np.abs(scores.mean(0)).max() < 3 / np.sqrt(8)  # unbiased
    assert scores.std(0).max() < 2  # and no wider than the noise makes it


def test_an_outlier_pulls_little() -> None:
    rng = np.random.default_rng(1)
    losses = TRUE.loss(GRID) * np.exp(rng.normal(0, 3e-4, len(GRID)))
    clean = fit(GRID, losses)
    losses[12] *= 1.2
    robust, squares = fit(GRID, losses), fit(GRID, losses, delta=1e3)
    beyond = np.log([1e10, 4e11])
    moved = [abs(np.log(law.loss(beyond) / clean.loss(beyond))) for law in (robust, squares)]
    assert moved[0] < 1e-3
    assert moved[1] > 10 * moved[0]


def test_the_gradient_is_that_of_the_objective() -> None:
    constants = TRUE.constants + 0.05
    logs = GRID - GRID.mean(0)
    weights = np.arange(len(GRID), dtype=float)
    log_losses = np.log(TRUE.loss(GRID))

    def value(c: np.ndarray) -> float:
        return fitting._objective(c, logs, log_losses, weights, 0.3)[0]

    found = fitting._objective(constants, logs, log_losses, weights, 0.3)[1]
    np.testing.assert_allclose(found, approx_fprime(constants, value, 1e-7), rtol=1e-4, atol=1e-3)


def test_a_weight_counts_a_run_so_many_times() -> None:
    rng = np.random.default_rng(2)
    logs = np.log(np.geomspace(1e15, 1e18, 6))[:, None]
    losses = (1.7 + 300 * np.exp(-0.15 * logs[:, 0])) * np.exp(rng.normal(0, 2e-3, 6))
    weights = np.array([1, 2, 0, 3, 1, 1])
    weighted, repeated = fit(logs, losses, weights), fit(np.repeat(logs, weights, 0), np.repeat(losses, weights))
    np.testing.assert_allclose(weighted.loss(logs), repeated.loss(logs), rtol=1e-5)


def test_what_cannot_be_fitted_is_refused() -> None:
    with pytest.raises(ValueError, match="4 runs cannot determine 5 constants"):
        fit(GRID[:4], TRUE.loss(GRID[:4]))
    with pytest.raises(ValueError, match="not a positive number"):
        fit(GRID, np.full(len(GRID), np.nan))


def test_the_published_fit_of_chinchillas_runs() -> None:
    """Besiroglu et al. 2024 publish, for all runs but the five with the highest losses (data_analysis.ipynb in their
    repository, cell 25), A, B, E, α and β with standard errors; and by L-BFGS from Hoffmann et al.'s grid of starts
    (cell 18) a minimum of the Huber loss, which no better search can miss."""
    file = Path(__file__).with_name("chinchilla_figure_4.csv")
    n, flops, losses = np.loadtxt(file, delimiter=",", skiprows=4, unpack=True)
    kept = losses < np.sort(losses)[-5]
    assert kept.sum() == 240
    logs = np.log([n, flops / (6 * n)]).T[kept]
    law = fit(logs, losses[kept])
    (a, b), (alpha, beta) = law.factors, law.exponents
    published = {"A": (482.00572, 124.52232), "B": (2085.4342, 1293.2841), "E": (1.81686, 0.02566)}
    published |= {"alpha": (0.34781, 0.0154), "beta": (0.36585, 0.0206)}
    for name, value in {"A": a, "B": b, "E": law.irreducible, "alpha": alpha, "beta": beta}.items():
        centre, error = published[name]
        assert abs(value - centre) < 0.2 * error, name
    residuals = np.abs(np.log(law.loss(logs) / losses[kept]))
    small = residuals <= DELTA
    total = (residuals[small] ** 2 / 2).sum() + (DELTA * (residuals[~small] - DELTA / 2)).sum()
    assert total == pytest.approx(0.0010182740346, rel=1e-5)
