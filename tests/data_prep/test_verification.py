"""Shards that have changed are found, and how much is read for it is bounded."""

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest

from data_prep import verification
from data_prep.dataset import TokenDataset
from data_prep.verification import compare, copy_name, due
from torchtitan_ext.errors import UserError


@pytest.fixture
def copy(small: Path, tmp_path: Path) -> TokenDataset:
    return TokenDataset.open(shutil.copytree(small, tmp_path / "copy"))


def flip(path: Path) -> None:
    """Change one bit, and not the modification time."""
    times = path.stat()
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def names(shards: list) -> list[str]:
    return [shard.file for shard in shards]


def test_everything_is_compared_once_and_a_small_data_set_always(copy: TokenDataset) -> None:
    everything = names(copy.shards())
    assert len(everything) >= 4
    assert names(due(copy, {})) == everything
    compared = compare(copy, due(copy, {}))
    assert sorted(compared) == sorted(everything)
    assert sorted(names(due(copy, json.loads(json.dumps(compared))))) == sorted(everything)


def test_of_a_large_one_what_has_changed_and_the_others_in_turn(
    copy: TokenDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = copy.shards()
    compared = compare(copy, shards)
    monkeypatch.setattr(verification, "BUDGET", 0)
    seen = []
    for _ in shards:
        (now,) = due(copy, compared)  # one, however small the budget
        seen.append(now.file)
        compared |= compare(copy, [now])
    assert sorted(seen) == sorted(names(shards)), "each gets its turn"

    touched, changed = shards[1], shards[2]
    os.utime(copy.path / touched.file)
    flip(copy.path / changed.file)
    assert sorted(names(due(copy, compared))) == sorted([touched.file, changed.file])
    compared |= compare(copy, [touched])
    assert names(due(copy, compared)) == [changed.file]
    with pytest.raises(UserError, match="is not the file that was written") as raised:
        compare(copy, due(copy, compared))
    assert str(copy.path / changed.file) in str(raised.value)


def test_the_budget_is_bytes(copy: TokenDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = copy.shards()
    compared = {file: [*times, number] for number, (file, times) in enumerate(_times(copy).items())}
    monkeypatch.setattr(verification, "BUDGET", shards[0].size + shards[1].size)
    assert names(due(copy, compared)) == names(shards[:2])


def _times(dataset: TokenDataset) -> dict[str, list[int]]:
    stats = {shard.file: (dataset.path / shard.file).stat() for shard in dataset.shards()}
    return {file: [stat.st_mtime_ns, stat.st_ctime_ns] for file, stat in stats.items()}


def test_every_damaged_shard_is_named_on_a_line_of_its_own(copy: TokenDataset) -> None:
    paths = [copy.path / shard.file for shard in copy.shards()[:2]]
    flip(paths[0])
    paths[1].unlink()
    with pytest.raises(UserError) as raised:
        compare(copy, copy.shards())
    lines = str(raised.value).splitlines()
    assert [str(path) in line for path, line in zip(paths, lines, strict=True)] == [True, True]


def test_what_is_compared_is_the_file(copy: TokenDataset) -> None:
    for shard in copy.shards():
        assert hashlib.sha256((copy.path / shard.file).read_bytes()).hexdigest() == shard.sha256
    assert compare(copy, copy.shards()).keys() == {shard.file for shard in copy.shards()}


def test_copies_of_a_data_set_have_names_of_their_own(small: Path, copy: TokenDataset) -> None:
    assert copy_name(copy) != copy_name(TokenDataset.open(small))
    assert copy_name(copy) == copy_name(TokenDataset.open(copy.path))
