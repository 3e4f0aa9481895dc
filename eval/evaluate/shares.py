"""Marks as sums over questions: what makes their standard errors, and those of differences between two models.

A mark is a mean over questions, or a mean of such means. ``Shares`` keep what each question adds to it. Two models
that were asked the same questions differ by the sum of the differences of their shares, and how much these vary from
question to question is the uncertainty of that difference: a paired standard error, which is smaller than that of two
separate marks wherever both models find the same questions hard.
"""

import numpy as np

Shares = dict[str, np.ndarray]
"""Name of the data → what each of its questions adds, fp64. The mark is the sum of all."""


def mean_of(data: str, values: np.ndarray) -> Shares:
    """The shares of a plain mean over one data set's questions."""
    return {data: np.asarray(values, dtype=np.float64) / len(values)}


def weighted(terms: list[tuple[float, Shares]]) -> Shares:
    """The shares of Σ weight × mark. Questions that two of the marks have in common are one question."""
    added: Shares = {}
    for weight, shares in terms:
        for data, share_N in shares.items():
            added[data] = added[data] + weight * share_N if data in added else weight * share_N
    return added


def difference(mine: Shares, theirs: Shares) -> Shares:
    """The shares of the difference of two models' marks. Both were asked the same questions."""
    return weighted([(1.0, mine), (-1.0, theirs)])


def shifted(shares: Shares, by: float) -> Shares:
    """The shares of a mark + ``by``, a number that is known exactly."""
    each = by / sum(map(len, shares.values()))
    return {data: share_N + each for data, share_N in shares.items()}


def total(shares: Shares) -> tuple[float, float | None]:
    """A mark and its standard error, None with one question: the questions of each data set are independent draws."""
    value = float(sum(share_N.sum() for share_N in shares.values()))
    if any(len(share_N) < 2 for share_N in shares.values()):
        return value, None
    variances = [len(share_N) * float(share_N.var(ddof=1)) for share_N in shares.values()]
    return value, float(np.sqrt(sum(variances)))
