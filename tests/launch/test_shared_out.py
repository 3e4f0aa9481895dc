"""How many nodes a job gets, and what does not agree."""

import pytest

from launch.slurm import shared_out
from torchtitan_ext.errors import UserError


@pytest.mark.parametrize(
    ("processes", "options", "each", "expected"),
    [
        (32, [], None, (4, 8)),
        (8, ["--time=4:00:00", "--nodes=1"], None, (1, 8)),
        (32, ["-N4"], None, (4, 8)),
        (32, ["--nodes", "4"], None, (4, 8)),
        (2, [], None, (1, 2)),
        (12, [], "4", (3, 4)),
        (2, ["-N", "2"], "1", (2, 1)),
    ],
)
def test_processes_are_shared_out(
    processes: int, options: list[str], each: str | None, expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NPROC_PER_NODE", raising=False)
    if each is not None:
        monkeypatch.setenv("NPROC_PER_NODE", each)
    assert shared_out(processes, options) == expected


@pytest.mark.parametrize(
    ("processes", "options", "each", "message"),
    [
        (8, ["--nodes=4"], "8", "--nproc 8 and --sbatch=--nodes=4 do not agree: 4 nodes of 8 processes are 32; use"),
        (12, [], "8", "--nproc 12 does not fill nodes of 8 processes; use --nproc 8 or 16, or set NPROC_PER_NODE"),
        (8, ["--nodes=1-4"], "8", "--sbatch=--nodes=1-4: give one number of nodes"),
        (8, ["-N"], "8", "--sbatch=-N: give one number of nodes"),
        (8, [], "eight", "NPROC_PER_NODE is 'eight'; must be the number of processes of each node, such as 8"),
        (8, [], "0", "NPROC_PER_NODE is '0'"),
    ],
)
def test_what_does_not_agree_is_refused(
    processes: int, options: list[str], each: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPROC_PER_NODE", each)
    with pytest.raises(UserError) as error:
        shared_out(processes, options)
    assert str(error.value).startswith(message)
