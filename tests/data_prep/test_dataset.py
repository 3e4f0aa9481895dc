"""Reading a data set folder, whole and damaged."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from data_prep import dataset as dataset_module
from data_prep.dataset import TokenDataset
from torchtitan_ext.errors import UserError


@pytest.fixture
def copy(small: Path, tmp_path: Path) -> Path:
    return shutil.copytree(small, tmp_path / "copy")


def whole(folder: Path, name: str) -> np.ndarray:
    return np.concatenate([load_file(path)["tokens"] for path in sorted((folder / name).iterdir())])


def edit_manifest(folder: Path, **changes: object) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_reading_across_shards_equals_one_array(small: Path) -> None:
    split = TokenDataset.open(small).split("train")
    tokens = whole(small, "train")
    borders = np.cumsum([shard.tokens for shard in TokenDataset.open(small).manifest.splits["train"].shards]).tolist()
    assert len(borders) >= 3
    assert split.n_tokens == len(tokens) == borders[-1]
    ranges = [(0, len(tokens)), (0, 0), (len(tokens), len(tokens)), (borders[0] - 1, borders[1] + 1)]
    ranges += [
        (border - before, min(border + after, len(tokens)))
        for border in borders
        for before in (0, 1, 5)
        for after in (0, 1, 5)
    ]
    ranges += [tuple(sorted(pair)) for pair in np.random.default_rng(0).integers(0, len(tokens), (200, 2)).tolist()]
    for start, stop in ranges:
        part = split.read(start, stop)
        assert part.dtype == np.uint16
        assert np.array_equal(part, tokens[start:stop])


def test_reading_beyond_the_split_is_an_error(small: Path) -> None:
    split = TokenDataset.open(small).split("heldout")
    for start, stop in ((-1, 2), (0, split.n_tokens + 1), (3, 2)):
        with pytest.raises(IndexError):
            split.read(start, stop)


def test_few_shards_stay_mapped(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset_module, "OPEN_SHARDS", 1)
    split = TokenDataset.open(copy).split("train")
    split.read(0, split.n_tokens)
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if str(copy) in line}
    assert len(mapped) == 1


def test_a_mapped_shard_keeps_no_file_open(copy: Path) -> None:
    split = TokenDataset.open(copy).split("train")
    split.read(0, split.n_tokens)
    maps = Path("/proc/self/maps").read_text()
    assert all(str(copy / shard.file) in maps for shard in TokenDataset.open(copy).manifest.splits["train"].shards)
    assert not [link for link in Path("/proc/self/fd").iterdir() if str(copy) in str(link.resolve())]


def test_what_is_read_may_be_written_to(copy: Path) -> None:
    dataset = TokenDataset.open(copy)
    dataset.split("train").read(0, 10)[:] = 0
    dataset.verify_checksums()


def test_fingerprints_tell_data_apart(small: Path, copy: Path) -> None:
    original = TokenDataset.open(small)
    assert TokenDataset.open(copy).fingerprint == original.fingerprint
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["settings"]["source"]["kind"] = "elsewhere"
    edit_manifest(copy, **manifest)
    assert TokenDataset.open(copy).fingerprint == original.fingerprint
    manifest["splits"]["train"]["shards"].reverse()
    edit_manifest(copy, **manifest)
    assert TokenDataset.open(copy).fingerprint != original.fingerprint
    assert TokenDataset.open(copy).heldout_fingerprint == original.heldout_fingerprint
    manifest["splits"]["heldout"]["shards"][0]["sha256"] = "0" * 64
    edit_manifest(copy, **manifest)
    assert TokenDataset.open(copy).heldout_fingerprint != original.heldout_fingerprint


def test_checksums_are_shared_among_ranks(copy: Path) -> None:
    path = copy / "train" / "00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    dataset = TokenDataset.open(copy)
    found = []
    for part in range(3):
        try:
            dataset.verify_checksums(part, 3)
        except UserError as error:
            found.append((part, str(error)))
    assert [part for part, _ in found] == [1]
    assert str(path) in found[0][1]


def test_missing_or_unfinished_folder(copy: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        TokenDataset.open(tmp_path / "nowhere")
    (copy / "manifest.json").unlink()
    with pytest.raises(UserError, match=r"manifest\.json is missing"):
        TokenDataset.open(copy)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format_version": 2}, "format version 2, and this code reads 1"),
        ({"eot_id": "0"}, "key eot_id"),
        ({"novelty": 1}, "key novelty"),
        ({"dtype": "int8"}, "key dtype"),
    ],
)
def test_manifest_of_another_form(changes: dict, message: str, copy: Path) -> None:
    edit_manifest(copy, **changes)
    with pytest.raises(UserError, match=message) as raised:
        TokenDataset.open(copy)
    assert str(copy / "manifest.json") in str(raised.value)


def test_manifest_that_is_not_json(copy: Path) -> None:
    (copy / "manifest.json").write_text("{")
    with pytest.raises(UserError, match="is damaged"):
        TokenDataset.open(copy)


@pytest.mark.parametrize("name", ["train/00001.safetensors", "tokenizer.json", "token_bytes.safetensors"])
def test_missing_file_is_named(name: str, copy: Path) -> None:
    (copy / name).unlink()
    with pytest.raises(UserError, match="is missing") as raised:
        TokenDataset.open(copy)
    assert str(copy / name) in str(raised.value)


def test_truncated_shard_is_named(copy: Path) -> None:
    path = copy / "heldout" / "00000.safetensors"
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(UserError, match="bytes instead of") as raised:
        TokenDataset.open(copy)
    assert str(path) in str(raised.value)


@pytest.mark.parametrize("name", ["tokenizer.json", "token_bytes.safetensors"])
def test_changed_tokenizer_is_named(name: str, copy: Path) -> None:
    with open(copy / name, "ab") as file:
        file.write(b" ")
    with pytest.raises(UserError, match="not the file that was written") as raised:
        TokenDataset.open(copy)
    assert str(copy / name) in str(raised.value)


def test_token_outside_the_vocabulary_names_the_shard_and_the_place(copy: Path) -> None:
    path = copy / "train" / "00001.safetensors"
    tokens = load_file(path)["tokens"]
    tokens[7] = TokenDataset.open(copy).vocab_size
    save_file({"tokens": tokens}, path)
    split = TokenDataset.open(copy).split("train")
    with pytest.raises(UserError, match="token 7 is 600, outside the vocabulary of 600") as raised:
        split.read(0, split.n_tokens)
    assert str(path) in str(raised.value)


@pytest.mark.parametrize("damage", ["header", "type"])
def test_shard_that_is_no_shard_is_named(damage: str, copy: Path) -> None:
    path = copy / "train" / "00000.safetensors"
    data = path.read_bytes()
    if damage == "header":
        path.write_bytes(data[:9] + b"?" + data[10:])
    else:
        path.write_bytes(data.replace(b"U16", b"I16", 1))
    split = TokenDataset.open(copy).split("train")
    with pytest.raises(UserError, match="not the token shard it should be") as raised:
        split.read(0, 1)
    assert str(path) in str(raised.value)


def test_preparing_and_reading_need_no_torch() -> None:
    code = "import data_prep.command, data_prep.dataset, data_prep.windows, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=False).returncode == 0
