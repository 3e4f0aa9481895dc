"""Where two models differ, on losses that were chosen so that the answers can be counted by hand."""

import numpy as np
import pytest

from eval.evaluate.positions import Bin, by_position, compare, standard_error
from eval.evaluate.score import HeldOutTokens, TokenLosses

TOKENS = np.array([5, 6, 5, 6, 7, 0, 5, 6, 7, 0])
TEXT = HeldOutTokens(TOKENS, np.ones(10), eot_id=0)
HERE = TokenLosses(TEXT, np.array([3, 1, 2, 1, 4, 0, 1, 1, 5, 0], dtype=np.float32))
THERE = TokenLosses(TEXT, np.array([3, 2, 2, 4, 1, 0, 1, 1.5, 1, 0], dtype=np.float32))


def decode(ids: list[int]) -> str:
    return "".join("∎...."[i] if i < 5 else "abc"[i - 5] for i in ids)


def test_bins_are_powers_of_two() -> None:
    position = np.array([0, 1, 2, 3, 4, 5, 8, 9, 10, 0])
    bins = by_position(position, HERE, THERE)
    assert bins == [
        Bin(0, 0, tokens=2, loss=1.5, difference=0.0),
        Bin(1, 1, tokens=1, loss=1.0, difference=-1.0),
        Bin(2, 2, tokens=1, loss=2.0, difference=0.0),
        Bin(3, 4, tokens=2, loss=2.5, difference=0.0),
        Bin(5, 8, tokens=2, loss=0.5, difference=0.0),
        Bin(9, 10, tokens=2, loss=3.0, difference=1.75),
    ]
    assert by_position(position, HERE)[1] == Bin(1, 1, tokens=1, loss=1.0)


def test_every_token_is_in_one_bin() -> None:
    positions = np.arange(1000)
    text = HeldOutTokens(positions, positions, eot_id=-1)
    bins = by_position(positions, TokenLosses(text, np.ones(1000, dtype=np.float32)))
    assert [(row.start, row.stop) for row in bins][-2:] == [(257, 512), (513, 999)]
    for row in bins:
        assert row.tokens == row.stop - row.start + 1
    assert by_position(np.zeros(10, dtype=int), HERE)[0].tokens == 10


def test_the_places_and_pairs_that_differ_most() -> None:
    found = compare(HERE, THERE, context_N=TEXT.context_N(4, False), decode=decode, vocab_size=8, top=2)
    # Differences: 0 −1 0 −3 +3 0 0 −0.5 +4 0.
    assert found.difference == pytest.approx(2.5 / 10)
    assert found.better == 0.3
    assert [(place.token, place.loss, place.baseline) for place in found.places_won] == [(3, 1, 4), (1, 1, 2)]
    assert [(place.token, place.loss, place.baseline) for place in found.places_lost] == [(8, 5, 1), (4, 4, 1)]
    # Token 3 is the third that the first window of 4 predicts, token 8 the last that the second does.
    assert (found.places_won[0].context, found.places_won[0].target) == ("aba", "b")
    assert (found.places_lost[0].context, found.places_lost[0].target) == ("c∎ab", "c")
    # "a b" stands at tokens 1, 3 and 7, "b c" at 4 and 8; no other pair differs.
    assert [(p.previous, p.target, p.count, p.difference) for p in found.pairs_won] == [("a", "b", 3, -4.5)]
    assert [(p.previous, p.target, p.count, p.difference) for p in found.pairs_lost] == [("b", "c", 2, 7.0)]


def test_equal_models_differ_nowhere() -> None:
    found = compare(HERE, HERE, context_N=TEXT.context_N(4, False), decode=decode, vocab_size=8)
    assert (found.difference, found.better, found.standard_error) == (0.0, 0.0, 0.0)
    assert [*found.places_won, *found.places_lost, *found.pairs_won, *found.pairs_lost] == []


def test_the_standard_error_is_that_of_documents() -> None:
    """With documents of one length it is the textbook's standard error of the mean of their means."""
    random = np.random.default_rng(0)
    means = random.normal(size=12)
    values = (means[:, None] + random.normal(size=(12, 50))).ravel()
    documents = np.repeat(np.arange(12), 50)
    own = values.reshape(12, 50).mean(axis=1)
    assert standard_error(values, documents) == pytest.approx(own.std(ddof=1) / np.sqrt(12), rel=1e-12)
    assert standard_error(values[:50], documents[:50]) is None


def test_the_standard_error_covers_documents_of_many_lengths() -> None:
    """Over many draws of documents the estimate agrees with how much the mean really varies."""
    random = np.random.default_rng(1)
    lengths = random.integers(5, 200, size=(300, 40))
    found, means = [], []
    for row in lengths:
        level = np.repeat(random.normal(size=40), row)
        values = level + random.normal(size=row.sum())
        means.append(values.mean())
        found.append(standard_error(values, np.repeat(np.arange(40), row)))
    # The spread of 300 means is known to 1/√600 = 4%; three times that, and the estimate's own small bias.
    assert np.mean(found) == pytest.approx(np.std(means), rel=0.15)
