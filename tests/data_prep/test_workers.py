"""The ordered map over real processes. The functions are the standard library's, which every process can import."""

import os
import subprocess
from collections.abc import Iterator
from functools import partial

import pytest

from data_prep.workers import BLOCKS_PER_WORKER, ordered_map
from torchtitan_ext.errors import UserError


def test_results_come_in_order_whichever_is_ready_first() -> None:
    build = partial(partial, subprocess.getoutput)
    items = ["sleep 0.3; echo slow", *(f"echo {number}" for number in range(20))]
    assert list(ordered_map(build, items, 2)) == ["slow", *map(str, range(20))]


def test_items_are_read_no_further_ahead_than_needed() -> None:
    taken = []

    def items() -> Iterator[int]:
        for number in range(1000):
            taken.append(number)
            yield number

    results = ordered_map(partial(partial, pow, 2), items(), 2)
    assert next(results) == 1
    assert len(taken) == 2 * BLOCKS_PER_WORKER
    results.close()


@pytest.mark.parametrize("workers", [1, 2])
def test_errors_come_through(workers: int) -> None:
    with pytest.raises(ValueError, match="'three'"):
        list(ordered_map(partial(partial, int), ["1", "2", "three"], workers))


def test_a_worker_that_dies_is_an_error() -> None:
    with pytest.raises(UserError, match="fewer --workers than 2"):
        list(ordered_map(partial(partial, os._exit), [9], 2))
