"""Where a model is good and bad: its loss by position, and where it beats or loses to a baseline most.

Shape suffixes: N = tokens of the split.

The question is that of "Adding a 4th Signal to Transformer Attention" (G. Seckin 2025, section 8), which found its
variant's gain gathered in the names of speakers: at which places in the text do two models differ?
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from eval.evaluate.score import HeldOutTokens, TokenLosses

SHOWN_TOKENS = 16
"""How much of a token's context is shown."""

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class Bin:
    """Tokens with ``start`` to ``stop`` tokens before them, and their loss in nats per token; ``difference``: this
    run's loss − the baseline's, where there is one."""

    start: int
    stop: int
    tokens: int
    loss: float
    difference: float | None = None


@dataclass(frozen=True)
class Place:
    """One token of the split, decoded, with the end of what the model saw before it. Losses are in nats."""

    token: int
    context: str
    target: str
    loss: float
    baseline: float


@dataclass(frozen=True)
class Pair:
    """All places where the token ``target`` follows ``previous``. ``difference``: the sum over them, in nats, of this
    run's loss − the baseline's."""

    previous: str
    target: str
    count: int
    difference: float


@dataclass(frozen=True)
class Comparison:
    """This run against a baseline on the same tokens.

    Attributes:
        difference: this run's loss − the baseline's, in nats per token.
        standard_error: of ``difference``, from how much it varies between documents; None with fewer than two of them.
            It is the uncertainty of this text, for these two models: that of another seed is not in it.
        better: share of the tokens that this run gives the lower loss.
        places_won, places_lost: where the loss of one token differs most, in nats.
        pairs_won, pairs_lost: pairs of neighbours over which the difference adds up to most.
    """

    difference: float
    standard_error: float | None
    better: float
    places_won: list[Place]
    places_lost: list[Place]
    pairs_won: list[Pair]
    pairs_lost: list[Pair]


def by_position(position_N: np.ndarray, losses: TokenLosses, baseline: TokenLosses | None = None) -> list[Bin]:
    """The loss of tokens with 0, 1, 2, 3–4, 5–8, 9–16, … tokens before them; bins without tokens are left out."""
    last = int(position_N.max())
    edges = [0, *(1 << power for power in range(last.bit_length() + 1))]
    bin_N = np.searchsorted(edges, position_N)
    counts = np.bincount(bin_N)
    sums = np.bincount(bin_N, weights=losses.nats_N)
    gaps = np.bincount(bin_N, weights=_difference(losses, baseline)) if baseline is not None else None
    return [
        Bin(
            start=edges[number - 1] + 1 if number else 0,
            stop=min(edges[number], last),
            tokens=int(count),
            loss=float(sums[number] / count),
            difference=None if gaps is None else float(gaps[number] / count),
        )
        for number, count in enumerate(counts)
        if count
    ]


def compare(
    losses: TokenLosses, baseline: TokenLosses, *, context_N: np.ndarray, decode: Decode, vocab_size: int, top: int = 20
) -> Comparison:
    """Find the ``top`` places and pairs of neighbours at which two models differ most.

    Args:
        losses, baseline: of the same tokens.
        context_N: how many tokens the model saw before each token.
        decode: ids to text.
    """
    difference_N = _difference(losses, baseline)
    pairs = _pairs(losses.text, difference_N, decode, vocab_size, top)
    order_N = np.argsort(difference_N, kind="stable")

    def places(index: np.ndarray) -> list[Place]:
        return [_place(int(token), losses, baseline, context_N, decode) for token in index]

    return Comparison(
        difference=float(difference_N.mean()),
        standard_error=standard_error(difference_N, losses.text.document_N),
        better=float((difference_N < 0).mean()),
        places_won=[place for place in places(order_N[:top]) if place.loss < place.baseline],
        places_lost=[place for place in places(order_N[::-1][:top]) if place.loss > place.baseline],
        pairs_won=pairs[0],
        pairs_lost=pairs[1],
    )


def standard_error(value_N: np.ndarray, document_N: np.ndarray) -> float | None:
    """The standard error of the mean of ``value_N``, with documents as the units that were drawn; None for one.

    The mean is a ratio of two sums over documents, of values and of tokens (Cochran 1977, Sampling Techniques, equation
    6.13, for a large population).
    """
    tokens = np.bincount(document_N)
    documents = len(tokens)
    if documents < 2:
        return None
    rest = np.bincount(document_N, weights=value_N) - value_N.mean() * tokens
    return float(np.sqrt(documents / (documents - 1) * np.square(rest).sum()) / tokens.sum())


def _difference(losses: TokenLosses, baseline: TokenLosses) -> np.ndarray:
    return losses.nats_N.astype(np.float64) - baseline.nats_N


def _place(token: int, losses: TokenLosses, baseline: TokenLosses, context_N: np.ndarray, decode: Decode) -> Place:
    tokens_N = losses.text.tokens_N
    first = token - min(SHOWN_TOKENS, int(context_N[token]))
    return Place(
        token=token,
        context=decode(tokens_N[first:token].tolist()),
        target=decode([int(tokens_N[token])]),
        loss=float(losses.nats_N[token]),
        baseline=float(baseline.nats_N[token]),
    )


def _pairs(
    text: HeldOutTokens, difference_N: np.ndarray, decode: Decode, vocab_size: int, top: int
) -> tuple[list[Pair], list[Pair]]:
    """The pairs of neighbours with the largest sums on this run's side and on the baseline's."""
    tokens_N = text.tokens_N.astype(np.int64)
    keys, inverse, counts = np.unique(
        tokens_N[:-1] * vocab_size + tokens_N[1:], return_inverse=True, return_counts=True
    )
    sums = np.bincount(inverse, weights=difference_N[1:], minlength=len(keys))
    order = np.argsort(sums, kind="stable")

    def pair(index: int) -> Pair:
        previous, target = divmod(int(keys[index]), vocab_size)
        return Pair(decode([previous]), decode([target]), int(counts[index]), float(sums[index]))

    won = [pair(index) for index in order[:top] if sums[index] < 0]
    lost = [pair(index) for index in order[::-1][:top] if sums[index] > 0]
    return won, lost
