"""Fitting a scaling law to final losses: approach 3 of Hoffmann et al. 2022 (arXiv 2203.15556, section 3.3).

The law is a sum of an irreducible loss and one power law for each quantity x_i::

    L = E + Σ_i A_i · x_i^(−α_i)          with x = (N, D), or x = (C)

and its constants minimise the Huber loss (δ = 0.001) of the residuals of log L. As there, L is written as the
exponential of a log-sum-exp of ``e``, ``a_i − α_i · log x_i``, so that E and A_i cannot become negative.

Two pitfalls that Besiroglu et al. 2024 (arXiv 2404.10102) found in the published fit are avoided: residuals
are measured in units of δ, or else the optimiser's tolerance stops it early (their sum is then of the order of 1e-3),
and no start is given up before it converges. The search starts where the weighted least squares solution for E and A_i
at each pair of exponents on a grid leaves the smallest Huber loss; x is centred, which makes ``a`` and ``α`` nearly
independent.

Shapes: n runs, k quantities, g points of the grid, p = 2k + 1 constants, ordered ``e, a_1 … a_k, α_1 … α_k``.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from scipy.optimize import minimize
from scipy.special import huber

DELTA = 1e-3
"""Relative error from which on a run counts in proportion to its error, not its square: outliers pull little."""

_EXPONENTS = (1e-3, 3.0)
_GRID = np.geomspace(0.02, 2.0, 25)
_STARTS = 8


@dataclass(frozen=True)
class Law:
    """``logs`` [..., k] are logarithms of the quantities."""

    constants: np.ndarray
    """[p], with ``a`` for quantities that are not centred."""

    @property
    def quantities(self) -> int:
        return len(self.constants) // 2

    @property
    def irreducible(self) -> float:
        """E."""
        return math.exp(self.constants[0])

    @property
    def factors(self) -> list[float]:
        """A_i."""
        return [math.exp(a) for a in self.constants[1 : 1 + self.quantities]]

    @property
    def exponents(self) -> list[float]:
        """α_i."""
        return [float(alpha) for alpha in self.constants[1 + self.quantities :]]

    def loss(self, logs: np.ndarray) -> np.ndarray:
        """The law's loss, [...]."""
        return np.exp(np.logaddexp.reduce(_terms(self.constants, logs), axis=-1))

    @property
    def on_edge(self) -> bool:
        """Whether an exponent stands at the end of its range: the data do not determine it."""
        return any(alpha <= _EXPONENTS[0] * 1.01 or alpha >= _EXPONENTS[1] * 0.99 for alpha in self.exponents)


def constants_needed(quantities: int) -> int:
    return 2 * quantities + 1


def fit(
    logs: np.ndarray,
    losses: np.ndarray,
    weights: np.ndarray | None = None,
    start: Law | None = None,
    delta: float = DELTA,
) -> Law:
    """Fit ``losses`` [n] over ``logs`` [n, k]. ``weights`` [n] count a run so many times; ``start`` replaces the grid.

    Raises:
        ValueError: fewer runs than constants, or a loss that is not a positive number.
    """
    weights = np.ones(len(losses)) if weights is None else weights
    used = weights > 0
    logs, losses, weights = logs[used], losses[used], weights[used]
    if len(losses) < constants_needed(logs.shape[1]):
        raise ValueError(f"{len(losses)} runs cannot determine {constants_needed(logs.shape[1])} constants")
    if not np.all(np.isfinite(losses) & (losses > 0)):
        raise ValueError("a loss is not a positive number")
    centre = np.average(logs, axis=0, weights=weights)
    centred, log_losses = logs - centre, np.log(losses)
    starts = _starts(centred, losses, weights, delta) if start is None else [moved(start.constants, centre)]
    lowest = float(log_losses.min())
    bounds = bounds_of(lowest, logs.shape[1])
    lower, upper = np.array(bounds).T
    solved = [
        minimize(
            _objective,
            np.clip(first, lower, upper),
            args=(centred, log_losses, weights, delta),
            jac=True,
            method="L-BFGS-B",
            bounds=bounds,
            options={"maxiter": 2000, "ftol": 1e-13, "gtol": 1e-7},
        )
        for first in starts
    ]
    best = min(solved, key=lambda result: result.fun)
    return Law(moved(best.x, -centre))


def bounds_of(lowest: float, quantities: int) -> list[tuple[float, float]]:
    """Of the constants [p] where ``lowest`` is the logarithm of the lowest loss and quantities are centred."""
    return [(lowest - 10, lowest), *[(lowest - 15, lowest + 15)] * quantities, *[_EXPONENTS] * quantities]


def _terms(constants: np.ndarray, logs: np.ndarray) -> np.ndarray:
    """The logarithms of the law's terms, [..., 1 + k]."""
    k = logs.shape[-1]
    terms = np.empty((*logs.shape[:-1], 1 + k))
    terms[..., 0] = constants[0]
    terms[..., 1:] = constants[1 : 1 + k] - constants[1 + k :] * logs
    return terms


def moved(constants: np.ndarray, by: np.ndarray) -> np.ndarray:
    """The constants of the same law over ``logs − by``."""
    k = len(by)
    moved = np.array(constants, dtype=float)
    moved[1 : 1 + k] -= moved[1 + k :] * by
    return moved


def _objective(
    constants: np.ndarray, logs: np.ndarray, log_losses: np.ndarray, weights: np.ndarray, delta: float
) -> tuple[float, np.ndarray]:
    """The sum of Huber losses, in units of δ², and its gradient [p]."""
    terms = _terms(constants, logs)
    log_sum = np.logaddexp.reduce(terms, axis=-1)
    residuals = (log_sum - log_losses) / delta
    slopes = weights * np.clip(residuals, -1.0, 1.0) / delta
    shares = np.exp(terms - log_sum[:, None]) * slopes[:, None]
    by_power = shares[:, 1:]
    gradient = np.concatenate([[shares[:, 0].sum()], by_power.sum(0), -(by_power * logs).sum(0)])
    return float((weights * huber(1.0, residuals)).sum()), gradient


def _starts(logs: np.ndarray, losses: np.ndarray, weights: np.ndarray, delta: float) -> Sequence[np.ndarray]:
    """For all exponents on a grid, E and A_i by weighted least squares of the relative error; the best few of them."""
    k = logs.shape[1]
    exponents = np.array(list(product(_GRID, repeat=k)))  # [g, k]
    powers = np.exp(-exponents[:, None, :] * logs)  # [g, n, k]
    columns = np.concatenate([np.ones((*powers.shape[:2], 1)), powers], axis=-1) / losses[:, None]
    weighted = columns * weights[:, None]
    # A little ridge: exponents at which two columns are all but equal have no unique solution.
    normal = weighted.transpose(0, 2, 1) @ columns
    normal += 1e-9 * np.trace(normal, axis1=1, axis2=2)[:, None, None] * np.eye(k + 1)
    solution = np.linalg.solve(normal, weighted.sum(1)[:, :, None])[:, :, 0]  # [g, 1 + k]
    solution = np.maximum(solution, 1e-4 * losses.min())
    predicted = np.log((columns @ solution[:, :, None])[:, :, 0])  # log of predicted / measured, [g, n]
    scores = (weights * huber(1.0, predicted / delta)).sum(1)
    best = np.argsort(scores)[:: max(1, 2 * k)][:_STARTS]
    return [np.concatenate([np.log(solution[index]), exponents[index]]) for index in best]
