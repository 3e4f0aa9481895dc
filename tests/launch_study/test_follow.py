"""Reading a record that grows, is cut back, or is damaged."""

from pathlib import Path

import pytest

from torchtitan_ext.follow import Follower
from torchtitan_ext.run_folder import RunFolder


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    return folder


def steps(follower: Follower) -> tuple[bool, list[int]]:
    anew, records = follower.read()
    return anew, [record["step"] for record in records]


def test_each_record_is_read_once(folder: RunFolder) -> None:
    follower = Follower(folder.metrics_path)
    assert steps(follower) == (False, []), "nothing is there yet"
    folder.append_metrics(1, {"loss": 3.0})
    folder.append_metrics(2, {"loss": 2.0})
    assert steps(follower) == (False, [1, 2])
    assert steps(follower) == (False, [])
    folder.append_metrics(3, {"loss": 1.0})
    assert steps(follower) == (False, [3])


def test_only_what_was_added_is_read_from_the_disk(folder: RunFolder) -> None:
    for step in range(1000):
        folder.append_metrics(step, {"loss": 3.0})
    follower = Follower(folder.metrics_path)
    follower.read()
    folder.append_metrics(1000, {"loss": 3.0})
    before = _bytes_read()
    assert steps(follower) == (False, [1000])
    assert _bytes_read() - before < 20_000 < folder.metrics_path.stat().st_size


def _bytes_read() -> int:
    """Bytes this process has read so far, from files and caches alike."""
    return int(Path("/proc/self/io").read_text().split()[1])


def test_half_a_line_waits_for_its_other_half(folder: RunFolder) -> None:
    follower = Follower(folder.metrics_path)
    folder.append_metrics(1, {"loss": 3.0})
    whole = folder.metrics_path.read_text()
    with open(folder.metrics_path, "a") as file:
        file.write('{"step": 2, "lo')
    assert steps(follower) == (False, [1])
    with open(folder.metrics_path, "a") as file:
        file.write('ss": 2.0}\n')
    assert follower.read() == (False, [{"step": 2, "loss": 2.0}])
    assert folder.metrics_path.read_text().startswith(whole)


@pytest.mark.parametrize("again", [1, 2, 5])
def test_a_record_that_was_cut_is_read_from_its_beginning(again: int, folder: RunFolder) -> None:
    """Cut back to step 1, and grown again to be shorter, as long or longer than before."""
    follower = Follower(folder.metrics_path)
    for step in (1, 2, 3):
        folder.append_metrics(step, {"loss": 3.0})
    assert steps(follower) == (False, [1, 2, 3])
    folder.cut_metrics(1)
    for step in range(2, 2 + again):
        folder.append_metrics(step, {"loss": 2.5})
    assert steps(follower) == (True, list(range(1, 2 + again)))
    assert steps(follower) == (False, [])


@pytest.mark.parametrize("damage", [b"nonsense", b"\xff\xfe", b"[1, 2]", b'{"no": "step"}', b'{"step": "one"}', b""])
def test_damaged_lines_are_left_out(damage: bytes, folder: RunFolder) -> None:
    folder.append_metrics(1, {"loss": 3.0})
    with open(folder.metrics_path, "ab") as file:
        file.write(damage + b"\n")
    folder.append_metrics(2, {"loss": 2.0})
    assert steps(Follower(folder.metrics_path)) == (False, [1, 2])


def test_a_record_that_is_no_file_is_empty(tmp_path: Path) -> None:
    assert Follower(tmp_path).read() == (False, [])
    assert Follower(tmp_path / "nowhere" / "metrics.jsonl").read() == (False, [])
