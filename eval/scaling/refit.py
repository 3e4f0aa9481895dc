"""The same law fitted to many draws of the same runs at once.

A bootstrap fits hundreds of draws, each of which ``fit.fit`` would search for by itself. Here all of them take their
steps together, as arrays: damped Newton steps on the sum of Huber losses, and the steps of iteratively reweighted least
squares, of which each draw takes whichever brings it lowest, within the same bounds as in ``fit.fit`` (constants that
stand at a bound and are pulled beyond it stay there: Bertsekas 1982, SIAM J. Control Optim. 20, 221–246).

Shapes: d draws, n runs, k quantities, p = 2k + 1 constants.
"""

import numpy as np
from scipy.special import huber

from eval.scaling.fit import DELTA, Law, bounds_of, fit, moved

_MOST_STEPS = 400
_SMALL = 1e-12
"""A relative step down in the objective that counts as none."""
_IDLE = 8
"""Steps in a row without a step down, with ever more damping, after which a draw has arrived."""
_DAMPING = (1e-9, 1e6)


def refit(logs: np.ndarray, losses: np.ndarray, weights: np.ndarray, start: Law) -> list[Law]:
    """One law for each row of ``weights`` [d, n], which count how often a run of ``logs`` [n, k], ``losses`` [n] was
    drawn; all searches begin at ``start``. A draw that has not arrived after many steps is fitted by ``fit.fit``."""
    if not len(weights):
        return []
    centre, log_losses = logs.mean(0), np.log(losses)
    centred = logs - centre
    found = [bounds_of(float(log_losses[row > 0].min()), logs.shape[1]) for row in weights]
    lower, upper = np.array(found).transpose(2, 0, 1)  # [d, p]
    constants = np.clip(np.broadcast_to(moved(start.constants, centre), lower.shape), lower, upper)
    arrived = np.zeros(len(weights), dtype=bool)
    damping, idle = np.full(len(weights), 1e-3), np.zeros(len(weights), dtype=int)
    for _ in range(_MOST_STEPS):
        on = np.flatnonzero(~arrived)
        if not len(on):
            break
        x, w, low, high = constants[on], weights[on], lower[on], upper[on]
        steps = _steps(x, centred, log_losses, w, damping[on], low, high)
        tried = np.clip(x + steps, low, high)  # [s, d, p]
        values = _objective(np.concatenate([x[None], tried]), centred, log_losses, w)  # [1 + s, d]
        best = values[1:].argmin(0)
        lowest = values[1:][best, np.arange(len(on))]
        down = lowest < values[0] * (1 - _SMALL)
        constants[on[down]] = tried[best, np.arange(len(on))][down]
        idle[on] = np.where(down, 0, idle[on] + 1)
        damping[on] = np.clip(damping[on] * np.where(down, 0.2, 30.0), *_DAMPING)
        arrived[on] = idle[on] >= _IDLE
    return [
        Law(moved(constants[draw], -centre)) if arrived[draw] else fit(logs, losses, weights[draw], start)
        for draw in range(len(weights))
    ]


def _residuals(constants: np.ndarray, logs: np.ndarray, log_losses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """In units of δ, [..., n]; the shares of the law's terms, [..., n, 1 + k]."""
    k = logs.shape[1]
    powers = constants[..., None, 1 : 1 + k] - constants[..., None, 1 + k :] * logs
    terms = np.concatenate([np.broadcast_to(constants[..., None, :1], (*powers.shape[:-1], 1)), powers], axis=-1)
    log_sum = np.logaddexp.reduce(terms, axis=-1)
    return (log_sum - log_losses) / DELTA, np.exp(terms - log_sum[..., None])


def _objective(constants: np.ndarray, logs: np.ndarray, log_losses: np.ndarray, weights: np.ndarray) -> np.ndarray:
    residuals, _ = _residuals(constants, logs, log_losses)
    value: np.ndarray = (weights * huber(1.0, residuals)).sum(-1)
    return value


def _steps(
    constants: np.ndarray,
    logs: np.ndarray,
    log_losses: np.ndarray,
    weights: np.ndarray,
    damping: np.ndarray,
    lower: np.ndarray,
    upper: np.ndarray,
) -> np.ndarray:
    """Steps to try, [s, d, p]."""
    residuals, shares = _residuals(constants, logs, log_losses)
    by_power = shares[..., 1:]
    slopes = np.concatenate([shares[..., :1], by_power, -by_power * logs], axis=-1) / DELTA  # [d, n, p]
    pulls = weights * np.clip(residuals, -1.0, 1.0)
    gradient = np.einsum("dn,dnp->dp", pulls, slopes)
    held = ((constants <= lower) & (gradient > 0)) | ((constants >= upper) & (gradient < 0))
    free = ~held[:, :, None] & ~held[:, None, :]
    gradient = np.where(held, 0.0, gradient)
    reweighted = free * _curvature(slopes, weights / np.maximum(1.0, np.abs(residuals)))
    newton = free * _curvature(slopes, weights * (np.abs(residuals) < 1.0))
    whole = newton + free * (_bending(shares, logs, pulls / DELTA) - _curvature(slopes, pulls * DELTA))
    diagonal = np.einsum("dpp->dp", reweighted)
    scale = diagonal + 1e-12 * diagonal.max(-1, keepdims=True) + held
    found = []
    for curvature, more in ((whole, 1), (whole, 100), (newton, 1), (newton, 100), (reweighted, 1), (reweighted, 0)):
        ridge = (1e-12 + more * damping)[:, None] * scale + held
        found.append(
            -np.linalg.solve(curvature + ridge[:, :, None] * np.eye(ridge.shape[1]), gradient[..., None])[..., 0]
        )
    return np.array([*found, 2 * found[-1]])


def _bending(shares: np.ndarray, logs: np.ndarray, pulls: np.ndarray) -> np.ndarray:
    """Σ over runs of ``pulls`` [d, n] × Σ over terms of their share × (the term's slopes by the constants, squared):
    the part of the second derivative that the slopes of the whole sum leave out, [d, p, p]."""
    n, k = logs.shape
    by_term = np.zeros((n, 1 + k, 2 * k + 1))
    by_term[:, 0, 0] = 1.0
    for quantity in range(k):
        by_term[:, 1 + quantity, 1 + quantity] = 1.0
        by_term[:, 1 + quantity, 1 + k + quantity] = -logs[:, quantity]
    squared = np.einsum("njp,njq->njpq", by_term, by_term).reshape(n * (1 + k), -1)
    summed: np.ndarray = (pulls[:, :, None] * shares).reshape(len(pulls), -1) @ squared
    return summed.reshape(-1, 2 * k + 1, 2 * k + 1)


def _curvature(slopes: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """[d, p, p]."""
    return np.einsum("dnp,dn,dnq->dpq", slopes, weights, slopes)
