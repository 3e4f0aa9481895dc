"""What one rank cannot do fails on all of them; the ranks are threads here."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from torchtitan_ext.agreement import alone, by_first, together
from torchtitan_ext.errors import SharedError, UserError

RANKS = 3


def on_ranks(work: Callable[[int, Callable[[Any], list[Any]]], Any]) -> list[Any]:
    """What ``work(rank, gather)`` returns, or the exception that it raises, on each rank."""
    barrier = threading.Barrier(RANKS, timeout=30)
    box: list[Any] = [None] * RANKS
    results: list[Any] = [None] * RANKS

    def run(rank: int) -> None:
        def gather(mine: Any) -> list[Any]:
            box[rank] = mine
            barrier.wait()
            everyone = list(box)
            barrier.wait()
            return everyone

        try:
            results[rank] = work(rank, gather)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def fail(error: Exception) -> None:
    raise error


def test_results_of_all_and_of_the_first() -> None:
    assert on_ranks(lambda rank, gather: together(gather, lambda: rank * 10)) == [[0, 10, 20]] * RANKS
    assert on_ranks(lambda rank, gather: by_first(gather, rank, lambda: f"rank {rank}")) == ["rank 0"] * RANKS
    assert together(alone, lambda: 7) == [7]


def test_mistakes_of_some_are_raised_by_all_one_line_each() -> None:
    def work(rank: int) -> None:
        if rank > 0:
            raise UserError(f"file {rank} is damaged")

    errors = on_ranks(lambda rank, gather: together(gather, lambda: work(rank)))
    assert [type(error) for error in errors] == [SharedError] * RANKS
    assert {str(error) for error in errors} == {"file 1 is damaged\nfile 2 is damaged"}
    same = on_ranks(lambda rank, gather: together(gather, lambda: fail(UserError("a full disk"))))
    assert {str(error) for error in same} == {"a full disk"}


def test_other_errors_stop_all_and_keep_their_kind_where_they_were_raised() -> None:
    errors = on_ranks(lambda rank, gather: by_first(gather, rank, lambda: fail(OSError(28, "no space left"))))
    assert type(errors[0]) is OSError
    for error in errors[1:]:
        assert type(error) is RuntimeError
        assert "rank 0 on " in str(error)
        assert "no space left" in str(error)


def test_hosts_are_named_where_there_are_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.node", lambda: threading.current_thread().name)
    errors = on_ranks(
        lambda rank, gather: together(gather, lambda: fail(UserError("not there")) if rank == 2 else None)
    )
    assert str(errors[0]).startswith("not there (rank 2 on Thread-")
