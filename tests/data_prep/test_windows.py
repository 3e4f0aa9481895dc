"""The order of samples, the windows, and the arithmetic between steps and samples."""

from pathlib import Path

import numpy as np
import pytest

from data_prep.dataset import TokenDataset
from data_prep.windows import WindowOrder, Windows, document_positions, heldout_windows, samples_of
from torchtitan_ext.errors import UserError

COUNTS = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 100, 127, 128, 129, 1000, 1023, 1024, 1025, 4097]


def epoch(order: WindowOrder, number: int) -> list[int]:
    return [order.window(number * order.n_windows + index) for index in range(order.n_windows)]


@pytest.mark.parametrize("count", COUNTS)
def test_each_epoch_visits_every_window_once(count: int) -> None:
    for seed in (0, 1, 2**63 + 5, -1):
        order = WindowOrder(count, seed)
        for number in (0, 1, 7):
            assert sorted(epoch(order, number)) == list(range(count))


def test_order_differs_between_epochs_and_seeds_from_the_first_epoch_on() -> None:
    orders = [tuple(epoch(WindowOrder(1000, seed), number)) for seed in range(5) for number in range(5)]
    assert len({*orders, tuple(range(1000))}) == 26


def test_order_depends_on_seed_and_sample_alone() -> None:
    samples = np.random.default_rng(0).permutation(5000).tolist()
    jumping, walking = WindowOrder(1000, 3), WindowOrder(1000, 3)
    expected = [walking.window(sample) for sample in range(5000)]
    assert [jumping.window(sample) for sample in samples] == [expected[sample] for sample in samples]


def test_order_is_as_uniform_as_chance() -> None:
    """Pearson's chi-squared of (sample, window) pairs over many seeds: mean and variance of its distribution."""
    count, seeds = 12, 2400
    table = np.zeros((count, count))
    for seed in range(seeds):
        table[np.arange(count), epoch(WindowOrder(count, seed), 0)] += 1
    statistic = ((table - seeds / count) ** 2 / (seeds / count)).sum()
    # The sums of rows and columns are fixed, which scales the statistic of permutations by count / (count - 1).
    freedom = (count - 1) ** 2
    standard_deviation = np.sqrt(2 * freedom)
    assert abs(statistic * (count - 1) / count - freedom) < 5 * standard_deviation


def test_order_takes_no_memory_for_many_windows() -> None:
    order = WindowOrder(10**15, 0)
    windows = {order.window(sample) for sample in range(1000)}
    assert len(windows) == 1000
    assert max(windows) < 10**15


def test_windows_cover_the_split(small: Path) -> None:
    split = TokenDataset.open(small).split("train")
    tokens = split.read(0, split.n_tokens)
    for length in (1, 7, 256, split.n_tokens - 1):
        windows = Windows(split, length)
        last = windows.n_windows - 1
        assert windows.n_windows * length + 1 <= split.n_tokens < (windows.n_windows + 1) * length + 1
        for index in {0, last // 2, last}:
            assert np.array_equal(windows[index], tokens[index * length : index * length + length + 1])


def test_a_batch_is_its_windows(small: Path) -> None:
    windows = Windows(TokenDataset.open(small).split("train"), 64)
    batch = windows.batch([5, 0, 5, windows.n_windows - 1])
    assert batch.shape == (4, 65)
    assert batch.dtype == np.int64
    for row, index in zip(batch, [5, 0, 5, windows.n_windows - 1], strict=True):
        assert np.array_equal(row, windows[index])


def test_too_short_a_split_is_an_error(small: Path) -> None:
    split = TokenDataset.open(small).split("heldout")
    with pytest.raises(UserError, match=r"heldout split has .* 0 windows"):
        Windows(split, split.n_tokens)
    length = (split.n_tokens - 1) // 3
    assert Windows(split, length, batch=3).n_windows == 3
    with pytest.raises(UserError, match=r"3 windows .* a batch needs 4"):
        Windows(split, length, batch=4)


def test_positions_restart_behind_each_end_of_text() -> None:
    tokens = np.array([[5, 0, 7, 8, 0, 0, 9, 9], [0, 1, 2, 3, 4, 5, 6, 0]], dtype=np.uint16)
    expected = np.array([[0, 1, 0, 1, 2, 0, 0, 1], [0, 0, 1, 2, 3, 4, 5, 6]])
    positions = document_positions(tokens, 0)
    assert positions.dtype == np.int32
    assert np.array_equal(positions, expected)
    assert np.array_equal(document_positions(tokens[0], 0), expected[0])
    assert np.array_equal(document_positions(tokens[0], 99), np.arange(8))


def test_positions_equal_those_counted_one_by_one(small: Path) -> None:
    dataset = TokenDataset.open(small)
    tokens = dataset.split("train").read(0, 20_000)
    expected, position = [], 0
    for token in tokens.tolist():
        expected.append(position)
        position = 0 if token == dataset.eot_id else position + 1
    assert document_positions(tokens, dataset.eot_id).tolist() == expected


@pytest.mark.parametrize(("ranks", "micro_batch"), [(1, 1), (1, 24), (2, 3), (4, 6), (8, 1), (3, 4)])
def test_every_division_of_a_step_takes_the_same_samples(ranks: int, micro_batch: int) -> None:
    passes = 24 // (ranks * micro_batch)
    for step in (0, 1, 10**9):
        parts = [samples_of(step, j, rank, ranks, micro_batch, 24) for j in range(passes) for rank in range(ranks)]
        assert [sample for part in parts for sample in part] == list(range(step * 24, step * 24 + 24))


def test_a_global_batch_that_does_not_divide_is_an_error() -> None:
    with pytest.raises(UserError, match="24 sequences is not a multiple of 5 data ranks"):
        samples_of(0, 0, 0, 5, 1, 24)


def test_heldout_windows_are_spread_evenly() -> None:
    assert heldout_windows(10, 20) == list(range(10))
    assert heldout_windows(10, 5) == [0, 2, 4, 6, 8]
    for count, limit in ((1000, 7), (64, 64), (1, 1), (12345, 1000)):
        chosen = heldout_windows(count, limit)
        gaps = np.diff([*chosen, count])
        assert len(chosen) == min(count, limit)
        assert chosen[0] == 0
        assert gaps.max() - gaps.min() <= 1
