"""A source that changes between two runs of the command, or has rows that cannot be used."""

import gzip
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Regex, Tokenizer, pre_tokenizers

from data_prep import consumed
from data_prep.dataset import TokenDataset
from data_prep.sources import LocalSource, blocks
from torchtitan_ext.errors import UserError

GOOD = [f"document {number} " + "with some words " * 60 for number in range(3000)]
BAD = 2700
"""Where the row that cannot be used stands."""

LONE_SURROGATE = '{"text": "\\ud83d"}'

Write = Callable[[Path, list[str], bool], Path]


def json_lines(folder: Path, texts: list[str], bad: bool) -> Path:
    lines = [json.dumps({"text": text}) for text in texts]
    if bad:
        lines.insert(BAD, LONE_SURROGATE)
    (folder / "a.jsonl").write_text("\n".join(lines) + "\n")
    return folder / "a.jsonl"


def reformatted(folder: Path, texts: list[str], bad: bool) -> Path:
    """As the repaired file comes out of a script that writes all of its lines anew."""
    if bad:
        return json_lines(folder, texts, bad)
    lines = [json.dumps({"id": number, "text": text}, indent=None) for number, text in enumerate(texts)]
    (folder / "a.jsonl").write_text("\r\n".join(lines))
    return folder / "a.jsonl"


def packed(folder: Path, texts: list[str], bad: bool) -> Path:
    path = json_lines(folder, texts, bad)
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(path.read_bytes(), 1))
    path.unlink()
    return folder / "a.jsonl.gz"


def parquet(folder: Path, texts: list[str], bad: bool) -> Path:
    """The repaired file has other row groups."""
    utf8 = [text.encode() for text in texts]
    if bad:
        utf8.insert(BAD, b"\xff")
    table = pa.table({"text": pa.array(utf8, pa.binary())})
    # A view of the bytes as text is not checked, as most writers do not check.
    table = pa.table({"text": table["text"].combine_chunks().view(pa.string())})
    pq.write_table(table, folder / "a.parquet", row_group_size=500 if bad else 700)
    return folder / "a.parquet"


def separated(folder: Path, texts: list[str], bad: bool) -> Path:
    utf8 = [text.encode() for text in texts]
    if bad:
        utf8.insert(BAD, b"caf\xe9")
    (folder / "a.txt").write_bytes(b"\n\n".join(utf8))
    return folder / "a.txt"


WRITERS = {
    "json_lines": (json_lines, r"a\.jsonl, line 2701: not valid Unicode"),
    "reformatted": (reformatted, r"a\.jsonl, line 2701: not valid Unicode"),
    "packed": (packed, r"a\.jsonl\.gz, line 2701: not valid Unicode"),
    "parquet": (parquet, r"a\.parquet, row 2700 \(counted from 0\): not valid UTF-8"),
    "separated": (separated, r"a\.txt, the document from byte \d+: not UTF-8"),
}


@pytest.fixture
def options(tokenizer_path: Path) -> list[object]:
    fraction = ["--heldout-fraction", "0.1", "--shard-tokens", "100000"]
    return ["--tokenizer", tokenizer_path, "--document-separator", r"\n\n", *fraction]


def shards(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in folder.glob("*/*.safetensors")}


def tokens(folder: Path) -> dict[str, np.ndarray]:
    dataset = TokenDataset.open(folder)
    return {name: (split := dataset.split(name)).read(0, split.n_tokens) for name in ("train", "heldout")}  # type: ignore[arg-type]


def same(one: Path, other: Path) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(tokens(one).values(), tokens(other).values(), strict=True))


@pytest.mark.parametrize("kind", WRITERS)
def test_a_bad_row_costs_one_line_and_no_finished_shard(kind: str, prep, options: list[object], tmp_path: Path) -> None:
    write, message = WRITERS[kind]
    path, out = write(tmp_path, GOOD, True), tmp_path / "data"
    with pytest.raises(UserError, match=message) as raised:
        prep.here(path, *options, "--out", out)
    assert "\n" not in str(raised.value)
    done = shards(out)
    assert len([name for name in done if name.startswith("train")]) >= 1

    write(tmp_path, GOOD, False)
    prep.here(path, *options, "--out", out)
    assert {name: time for name, time in shards(out).items() if name in done} == done
    prep.here(path, *options, "--out", tmp_path / "fresh")
    assert same(out, tmp_path / "fresh")


@pytest.mark.parametrize("kind", ["json_lines", "parquet", "separated"])
@pytest.mark.parametrize("begun", [True, False])
def test_bad_rows_are_left_out_on_request_and_counted(
    kind: str, begun: bool, prep, options: list[object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write, message = WRITERS[kind]
    path, out = write(tmp_path, GOOD, True), tmp_path / "data"
    if begun:
        with pytest.raises(UserError):
            prep.here(path, *options, "--out", out)
    done = shards(out)
    prep.here(path, *options, "--skip-bad-rows", "--workers", 1 if begun else 2, "--out", out)
    assert {name: time for name, time in shards(out).items() if name in done} == done
    err = capsys.readouterr().err
    assert re.search("left out: .*" + message, err)
    assert "1 rows that could not be used were left out" in err
    assert TokenDataset.open(out).manifest.skipped_rows == 1
    write(tmp_path, GOOD, False)
    prep.here(path, *options, "--out", tmp_path / "repaired")
    assert same(out, tmp_path / "repaired")
    assert TokenDataset.open(tmp_path / "repaired").manifest.skipped_rows == 0


def test_rows_without_text_are_counted(prep, tokenizer_path: Path, tmp_path: Path, capsys) -> None:
    lines = [json.dumps({"text": text}) for text in [*GOOD[:40], "", None, ""]]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    options = ["--tokenizer", tokenizer_path, "--heldout-fraction", "0.3", "--out", tmp_path / "data"]
    prep.here(tmp_path / "a.jsonl", *options)
    assert TokenDataset.open(tmp_path / "data").manifest.empty_rows == 3
    assert "3 rows have no text" in capsys.readouterr().err


def test_a_document_that_the_tokenizer_cannot_take_is_named_in_one_line(
    prep, tokenizer_path: Path, tmp_path: Path
) -> None:
    """Ten million spaces are more than this pattern of a published tokeniser can take."""
    pattern = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    tokenizer = Tokenizer.from_file(str(tokenizer_path))
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    lines = [json.dumps({"text": text}) for text in [*GOOD[:40], "a" + " " * 10_100_000 + "b", *GOOD[40:60]]]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    options = ["--tokenizer", tmp_path / "tokenizer.json", "--heldout-fraction", "0.3", "--out", tmp_path / "data"]
    for workers in (1, 2):
        process = prep.start(tmp_path / "a.jsonl", *options, "--workers", workers)
        _, err = process.communicate(timeout=120)
        assert process.returncode == 2
        *before, last = err.splitlines()
        assert f"{tmp_path}/a.jsonl, line 41: the tokeniser fails on this document of 10,100,002 bytes" in last
        assert all(line.startswith(("tokeniser: ", "end-of-text token: ")) for line in before)
    prep.here(tmp_path / "a.jsonl", *options, "--skip-bad-rows")
    manifest = TokenDataset.open(tmp_path / "data").manifest
    assert manifest.skipped_rows == 1
    assert sum(split.documents for split in manifest.splits.values()) == 60


def change_one_word(path: Path) -> None:
    """In place and to the same size, with the time of modification put back."""
    times = path.stat()
    with open(path, "r+b") as file:
        data = file.read()
        file.seek(data.index(b"words", len(data) // 3))
        file.write(b"WORDS")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


@pytest.mark.parametrize("kind", ["json_lines", "separated", "parquet"])
@pytest.mark.parametrize("finished", [True, False])
def test_a_source_edited_in_place_is_noticed(
    kind: str, finished: bool, prep, options: list[object], tmp_path: Path
) -> None:
    path, out = WRITERS[kind][0](tmp_path, GOOD, not finished), tmp_path / "data"
    if finished:
        prep.here(path, *options, "--out", out)
    else:
        with pytest.raises(UserError):
            prep.here(path, *options, "--out", out)
    done = shards(out)
    if kind == "parquet":
        WRITERS[kind][0](tmp_path, [GOOD[0].upper(), *GOOD[1:]], not finished)
    else:
        change_one_word(path)
    with pytest.raises(UserError, match=f"{path.name} has changed since {out} was prepared from it"):
        prep.here(path, *options, "--out", out)
    assert shards(out) == done


def test_a_copy_of_the_source_is_as_good(prep, options: list[object], tmp_path: Path) -> None:
    path, out = json_lines(tmp_path, GOOD, False), tmp_path / "data"
    prep.here(path, *options, "--out", out)
    (tmp_path / "elsewhere").mkdir()
    copy = Path(shutil.copy(path, tmp_path / "elsewhere"))
    assert prep.here(copy, *options, "--out", out) == 0
    with open(copy, "a") as file:
        file.write(json.dumps({"text": "one more"}) + "\n")
    with pytest.raises(UserError, match="had 3000 rows and has more now"):
        prep.here(copy, *options, "--out", out)


def test_a_source_that_changes_while_it_is_read_is_noticed(tmp_path: Path) -> None:
    path = json_lines(tmp_path, GOOD, False)
    source = LocalSource([str(path)], "text", None)
    before = source.files()
    assert sum(block.work for block in blocks(source)) == source.work
    consumed.check_untouched(before, source)
    change_one_word(path)
    with pytest.raises(UserError, match=r"a\.jsonl was changed while it was read"):
        consumed.check_untouched(before, source)


def test_a_file_behind_the_place_of_stopping_may_be_replaced_or_left_out(
    prep, options: list[object], tmp_path: Path
) -> None:
    first, bad = tmp_path / "1.jsonl", tmp_path / "2.jsonl"
    first.write_bytes(json_lines(tmp_path, GOOD, False).read_bytes())
    bad.write_text(LONE_SURROGATE)
    for name, remaining in (("replaced", [first, bad]), ("left_out", [first])):
        out = tmp_path / name
        bad.write_text("\n" * 1000 + LONE_SURROGATE)
        with pytest.raises(UserError, match=r"2\.jsonl, line 1001: not valid Unicode"):
            prep.here(first, bad, *options, "--out", out)
        done = shards(out)
        assert len(done) >= 4
        bad.write_text(json.dumps({"text": "good again"}))
        prep.here(*remaining, *options, "--out", out)
        assert {file: time for file, time in shards(out).items() if file in done} == done
        prep.here(*remaining, *options, "--out", tmp_path / f"{name}-fresh")
        assert same(out, tmp_path / f"{name}-fresh")


def test_the_alphabet_of_a_changed_source_is_made_anew(prep, tmp_path: Path) -> None:
    path, out = json_lines(tmp_path, GOOD, False), tmp_path / "data"
    options = ["--tokenizer", "characters", "--heldout-fraction", "0.1", "--shard-tokens", "1000000"]
    with open(path, "a") as file:
        file.write(LONE_SURROGATE + "\n")
    with pytest.raises(UserError, match="line 3001"):
        prep.here(path, *options, "--out", out)
    json_lines(tmp_path, [*GOOD, "数学"], False)
    prep.here(path, *options, "--out", out)
    assert TokenDataset.open(out).tokenizer().token_to_id("数") is not None
