"""File lists of checkpoints, and what they find."""

import json
import os
from pathlib import Path

import pytest

from torchtitan_ext.titan import checkpoint_files
from torchtitan_ext.titan.checkpoint_files import (
    Damage,
    Listed,
    check_contents,
    damage_of,
    read_file_list,
    remove_unfinished,
    saved_steps,
    set_aside,
    steps_set_aside,
    write_file_list,
)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoint" / "step-7"
    path.mkdir(parents=True)
    (path / ".metadata").write_bytes(b"123456789")
    (path / "__0_0.distcp").write_bytes(bytes(range(256)) * 100)
    write_file_list(path)
    return path


def damage_within(path: Path) -> str | None:
    try:
        check_contents(path, read_file_list(path))
    except Damage as damage:
        return str(damage)
    return None


def test_a_whole_one_and_the_checksum_of_the_standard(checkpoint: Path) -> None:
    """CRC-32 as in ISO 3309: its check value, of the digits 1 to 9, is CBF43926."""
    assert read_file_list(checkpoint)[".metadata"] == Listed(9, "cbf43926")
    assert damage_of(checkpoint) is None
    assert damage_within(checkpoint) is None


def test_a_checksum_over_several_chunks_is_that_of_the_whole(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = read_file_list(checkpoint)
    monkeypatch.setattr(checkpoint_files, "CHUNK", 1000)
    write_file_list(checkpoint)
    assert read_file_list(checkpoint) == whole


@pytest.mark.parametrize("bit", range(8))
@pytest.mark.parametrize("place", [0, 12_345, -1])
def test_any_bit(bit: int, place: int, checkpoint: Path) -> None:
    path = checkpoint / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << bit
    path.write_bytes(content)
    assert damage_of(checkpoint) is None, "the size is right"
    assert damage_within(checkpoint) == f"{path} is not what was written (its checksum differs)"


def test_sizes_and_missing_files(checkpoint: Path) -> None:
    path = checkpoint / "__0_0.distcp"
    os.truncate(path, 5)
    assert damage_of(checkpoint) == f"{path} has 5 bytes, 25600 were written"
    path.unlink()
    assert damage_of(checkpoint) == f"{path} is missing"
    assert damage_within(checkpoint) == f"{path} cannot be read (No such file or directory)"


@pytest.mark.parametrize(
    "content",
    [
        *("", "{", "[]", "{}", "7", '{"__0_0.distcp": 25600}', '{".metadata": "9"}', '{".metadata": {"size": 9}}'),
        '{".metadata": {"size": 9, "crc32": "cbf4392"}}',
        '{".metadata": {"size": "9", "crc32": "cbf43926"}}',
        '{".metadata": {"size": 9, "crc33": "cbf43926"}}',
        '{".metadata": {"size": 9, "crc32": null}}',
        "\udcff",
    ],
)
def test_a_damaged_list(content: str, checkpoint: Path) -> None:
    (checkpoint / "files.json").write_bytes(content.encode(errors="surrogateescape"))
    assert damage_of(checkpoint) == f"{checkpoint / 'files.json'} is missing or damaged"


def test_lists_of_earlier_versions_have_sizes_alone(checkpoint: Path) -> None:
    (checkpoint / "files.json").write_text(json.dumps({".metadata": 9, "__0_0.distcp": 25600}))
    assert read_file_list(checkpoint) == {".metadata": Listed(9, None), "__0_0.distcp": Listed(25600, None)}
    assert damage_of(checkpoint) is None
    (checkpoint / ".metadata").write_bytes(bytes(9))
    assert damage_within(checkpoint) is None
    (checkpoint / ".metadata").write_bytes(bytes(8))
    assert damage_of(checkpoint) == f"{checkpoint / '.metadata'} has 8 bytes, 9 were written"


def test_each_folder_is_what_its_name_says(checkpoint: Path) -> None:
    folder = checkpoint.parent
    for name in (".step-9.tmp", ".step-9", "step-9.tmp", "step-x", ".other.tmp"):
        (folder / name).mkdir()
    assert saved_steps(folder) == [7]
    said: list[str] = []
    remove_unfinished(folder, said.append)
    assert [str(folder / ".step-9.tmp") in line for line in said] == [True]
    assert not (folder / ".step-9.tmp").exists()
    aside = set_aside(folder, 7)
    assert (saved_steps(folder), steps_set_aside(folder)) == ([], [7])
    assert damage_of(aside) is None, "moved as it was"
    assert {path.name for path in folder.iterdir()} == {".step-9", "step-9.tmp", "step-x", ".other.tmp", aside.name}
