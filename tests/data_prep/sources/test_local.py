"""Documents from Parquet, JSON-lines and text files."""

import bz2
import gzip
import json
import os
import pickle
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_prep.sources import LocalSource, blocks, text
from torchtitan_ext.errors import UserError


def documents(source: LocalSource) -> list[str]:
    return [text for block in blocks(source) for piece in block.pieces for text in piece.texts()]


def read(*patterns: object, column: str = "text", separator: str | None = None) -> list[str]:
    return documents(LocalSource([str(pattern) for pattern in patterns], column, separator))


def error(*patterns: object, column: str = "text", separator: str | None = None) -> str:
    with pytest.raises(UserError) as raised:
        read(*patterns, column=column, separator=separator)
    assert "\n" not in str(raised.value)
    return str(raised.value)


TEXTS = [f"document {number} " + "long " * 400 for number in range(3000)]


@pytest.mark.parametrize("row_group_size", [100, 1 << 20])
@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()])
def test_parquet(row_group_size: int, kind: pa.DataType, tmp_path: Path) -> None:
    table = pa.table({"id": list(range(3001)), "body": pa.array([*TEXTS, None], kind)})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=row_group_size)
    assert read(tmp_path / "a.parquet", column="body") == [*TEXTS, ""]
    assert len(list(blocks(LocalSource([str(tmp_path)], "body", None)))) > 4


def test_json_lines(tmp_path: Path) -> None:
    lines = [json.dumps({"text": text}) for text in TEXTS] + [
        "",
        json.dumps({"text": None}),
        json.dumps({"text": "\u2028"}),
    ]
    (tmp_path / "a.jsonl").write_text("\r\n".join(lines))
    assert read(tmp_path / "a.jsonl") == [*TEXTS, "", "\u2028"]


@pytest.mark.parametrize("separator", ["\n\n", "ab", "<|endoftext|>", "é"])
def test_text_between_separators(separator: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Small chunks put a border inside every separator and every character.
    monkeypatch.setattr(text, "PIECE_BYTES", 7)
    for content in (
        "one\n\n\ntwo\n\n\n\nthree\n",
        "aababbab",
        "abab",
        "x<|endoftext|>y<|endoftext|>",
        "éé à é\n\n",
        "no end",
    ):
        (tmp_path / "a.txt").write_text(content)
        # str.split is the definition; empty documents are dropped later.
        expected = [part for part in content.split(separator) if part]
        assert [part for part in read(tmp_path / "a.txt", separator=separator) if part] == expected


def test_text_without_separator_is_one_document_and_line_ends_are_kept(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\r\n\r\ntwo\n")
    assert read(tmp_path / "a.txt") == ["one\r\n\r\ntwo\n"]


def test_files_come_in_the_order_of_patterns_sorted_within_each(tmp_path: Path) -> None:
    for name in ("b/2.txt", "b/1.md", "a/3.txt", "a/deep/4.txt", "[x]/5.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    assert read(tmp_path / "b" / "*", tmp_path / "a") == ["b/1.md", "b/2.txt", "a/3.txt", "a/deep/4.txt"]
    assert read(tmp_path / "**" / "*.txt") == ["[x]/5.txt", "a/3.txt", "a/deep/4.txt", "b/2.txt"]
    assert read(tmp_path / "[x]" / "5.txt") == ["[x]/5.txt"]


def test_blocks_are_the_same_from_any_earlier_end(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    for number in range(300):
        (tmp_path / f"b{number:03}.txt").write_text(TEXTS[number] * 3)
    source = LocalSource([str(tmp_path)], "text", None)
    whole = list(blocks(source))
    assert len(whole) > 5
    assert sum(block.work for block in whole) == source.work
    for number, block in enumerate(whole):
        assert list(blocks(source, block.end)) == whole[number + 1 :]


def test_small_files_share_a_block(tmp_path: Path) -> None:
    for number in range(50):
        (tmp_path / f"{number}.txt").write_text("short")
    assert len(list(blocks(LocalSource([str(tmp_path)], "text", None)))) == 1


def test_description_tells_sources_apart(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.txt").write_text("two")
    one, other = str(tmp_path / "a.txt"), str(tmp_path / "b.txt")

    def describe(*patterns: str, separator: str | None = None) -> str:
        return json.dumps(LocalSource(patterns, "text", separator).describe())

    before = describe(one, other)
    assert describe(one, other) == before
    assert len({before, describe(other, one), describe(one), describe(one, other, separator="x")}) == 4
    (tmp_path / "a.txt").write_text("longer")
    assert describe(one, other) != before


def test_errors_in_the_choice_of_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "a.csv").write_text("text")
    assert "no file matches" in error(tmp_path / "*.parquet")
    assert "named twice" in error(tmp_path / "a.txt", tmp_path / "*.txt")
    assert ".parquet" in error(tmp_path / "a.csv")


def test_errors_in_parquet_files(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["one"], "count": [1]}), path)
    assert "did you mean 'text'?" in error(path, column="texts")
    assert "int64" in error(path, column="count")
    path.write_bytes(b"no Parquet")
    assert "not a readable Parquet file" in error(path)


def test_damage_inside_a_parquet_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": TEXTS}), path, compression="zstd", use_dictionary=False)
    data = path.read_bytes()
    path.write_bytes(data[:40] + bytes(len(data) // 2) + data[40 + len(data) // 2 :])
    assert str(path) in error(path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "not JSON"),
        (b"[1]", "not an object"),
        (b'{"texts": "one"}', "did you mean 'texts'?"),
        (b'{"text": 3}', "holds int, not text"),
        (b'{"text": "\xff"}', "not JSON"),
    ],
)
def test_errors_in_json_lines_name_the_line(line: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    good = json.dumps({"text": "long " * 100}).encode()
    for number in (1, 2, 5000):
        lines = [good] * 5000
        lines[number - 1] = line
        path.write_bytes(b"\n".join(lines))
        assert f"{path}, line {number}: " in error(path)
        assert message in error(path)


def test_errors_in_text_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"caf\xe9")
    assert "not UTF-8" in error(path)
    monkeypatch.setattr(text, "WHOLE_FILE_LIMIT", 1 << 20)
    path.write_text("long " * 300_000)
    assert "--document-separator" in error(path)
    assert "from byte 0 is longer than 1 MiB" in error(path, separator="\n")


@pytest.mark.parametrize("pack", [".gz", ".bz2", ".zst"])
def test_compressed_text(pack: str, tmp_path: Path) -> None:
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
    packer = {".gz": gzip.compress, ".bz2": bz2.compress, ".zst": lambda data: pa.compress(data, "zstd", asbytes=True)}
    # Two members, as tools write that pack in parallel.
    half = lines.index(b"\n", len(lines) // 2) + 1
    (tmp_path / f"a.jsonl{pack}").write_bytes(packer[pack](lines[:half]) + packer[pack](lines[half:]))
    (tmp_path / f"b.txt{pack}").write_bytes(packer[pack](b"one\n\ntwo"))
    source = LocalSource([str(tmp_path / f"a.jsonl{pack}"), str(tmp_path / f"b.txt{pack}")], "text", "\n\n")
    assert documents(source) == [*TEXTS, "one", "two"]
    whole = list(blocks(source))
    assert len(whole) > 4
    assert sum(block.work for block in whole) == source.work
    for number, block in enumerate(whole):
        assert list(blocks(source, block.end)) == whole[number + 1 :]


def test_errors_in_compressed_text(tmp_path: Path) -> None:
    lines = [json.dumps({"text": text}) for text in TEXTS]
    lines[2000] = "{"
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    assert f"{path}, line 2001: not JSON" in error(path)
    path.write_bytes(gzip.compress("\n".join(lines[:2000]).encode())[:-20])
    assert f"{path} cannot be read" in error(path)
    path.write_bytes(b"no gzip")
    assert f"{path} cannot be read" in error(path)
    for name in ("a.parquet.gz", "a.zip", "a.jsonl.xz"):
        (tmp_path / name).write_bytes(b"")
        assert "unpack it" in error(tmp_path / name)


@pytest.mark.parametrize("separator", ["\n\n", "\r\n\r\n", "\n--\n"])
def test_line_ends_of_windows_match_a_separator(
    separator: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text, "PIECE_BYTES", 5)
    plain = separator.replace("\r", "")
    expected = [f"line {number}\nand more" for number in range(40)]
    path = tmp_path / "a.txt"
    path.write_bytes(plain.join(expected).encode())
    assert read(path, separator=separator) == expected
    path.write_bytes(plain.join(expected).replace("\n", "\r\n").encode())
    assert read(path, separator=separator) == [document.replace("\n", "\r\n") for document in expected]
    mixed = plain.join(expected[:20]) + plain.replace("\n", "\r\n") + plain.join(expected[20:])
    path.write_bytes(mixed.encode())
    assert read(path, separator=separator) == expected


def test_a_separator_that_does_not_occur_is_not_recommended(prep, tokenizer_path: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo")
    options = ["--tokenizer", tokenizer_path, "--document-separator", r"\n\n", "--out", tmp_path / "data"]
    with pytest.raises(UserError, match=r"the --document-separator '\\n\\n' does not occur"):
        prep.here(tmp_path / "a.txt", *options)


@pytest.mark.parametrize("pattern", ["d", "d/*", "d/*.parquet", "d/b.parquet", "**/*.parquet", "d/**"])
def test_a_link_to_nothing_is_named(pattern: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("d").mkdir()
    pq.write_table(pa.table({"text": ["one"]}), "d/a.parquet")
    Path("d/b.parquet").symlink_to("gone")
    assert error(pattern).startswith("d/b.parquet is a link to gone, which does not exist")
    Path("gone").mkdir()


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["one"]}), tmp_path / "a.parquet")
    os.mkfifo(tmp_path / "b.parquet")
    assert "b.parquet is not a regular file" in error(tmp_path)


def test_a_file_behind_two_names_is_one_too_many(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "b.txt").symlink_to("a.txt")
    assert "named twice" in error(tmp_path)
    (tmp_path / "b.txt").unlink()
    (tmp_path / "deep").symlink_to(".", target_is_directory=True)
    assert "deep is a link to a folder that it lies in" in error(tmp_path)


def test_files_about_the_data_are_no_data(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    pq.write_table(pa.table({"text": ["one"]}), tmp_path / "deep" / "a.parquet")
    beside = ["README.md", "LICENSE", "LICENSE.txt", "notes.txt", "dataset_infos.json", "load.py", "deep/picture.png"]
    for name in beside:
        (tmp_path / name).write_text('{"text": "beside"}')
    (tmp_path / ".gitattributes").write_text("hidden")
    for pattern in (tmp_path, tmp_path / "*", tmp_path / "**", tmp_path / "**" / "*"):
        source = LocalSource([str(pattern)], "text", None)
        assert documents(source) == ["one"]
        (note,) = source.notes
        assert "left out as no data" in note
    (tmp_path / "data.csv").write_text("text")
    assert "data.csv: cannot tell what kind of file it is" in error(tmp_path)
    assert read(tmp_path / "README.md") == ['{"text": "beside"}']
    assert read(tmp_path / "**" / "README.md") == ['{"text": "beside"}']


def test_a_folder_of_text_is_data(tmp_path: Path) -> None:
    for name in ("README.md", "a.md", "b.txt"):
        (tmp_path / name).write_text(name)
    source = LocalSource([str(tmp_path)], "text", None)
    assert documents(source) == ["a.md", "b.txt"]
    assert source.notes == [f"{tmp_path}: README.md left out as no data; name a file itself to read it"]
    for name in ("a.md", "b.txt"):
        (tmp_path / name).unlink()
    assert "only README.md" in error(tmp_path)


FORMS = {
    "list": "- config_name: default\n  data_files: [{split: train, path: data/*/*}]",
    "string": "- config_name: default\n  data_files: data/*/*",
    "folder": "- config_name: default\n  data_dir: data",
    "mapping": "- config_name: default\n  data_files: {train: [data/one/*], test: sample/*/*}\n- config_name: all\n"
    '  data_files: "**"',
    "none": "- config_name: default\n  default: true",
}


@pytest.mark.parametrize("form", FORMS)
def test_a_copy_of_a_repository_gives_one_configuration(form: str, tmp_path: Path) -> None:
    for name in ("data/one/0", "data/one/1", "sample/10BT/0"):
        path = tmp_path / f"{name}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"text": [name]}), path)
    (tmp_path / "README.md").write_text(f"---\nlicense: odc-by\nconfigs:\n{FORMS[form]}\n---\n# Card\n")
    # A card that says nothing of files leaves the layout of FineWeb.
    source = LocalSource([str(tmp_path)], "text", None)
    assert documents(source) == ["data/one/0", "data/one/1"]
    assert "configuration 'default', 2 of" in source.notes[0]
    assert source.describe()["config"] == "default"
    with pytest.raises(UserError, match="has no configuration 'sample'"):
        LocalSource([str(tmp_path)], "text", None, "sample")
    if form == "none":
        assert documents(LocalSource([str(tmp_path)], "text", None, "sample-10BT")) == ["sample/10BT/0"]
        with pytest.raises(UserError, match=r"no files sample/100BT/\*"):
            LocalSource([str(tmp_path)], "text", None, "sample-100BT")
    with pytest.raises(UserError, match="--config is for fineweb-edu and for folders with the card"):
        LocalSource([str(tmp_path / "data" / "one" / "0.parquet")], "text", None, "default")


def test_pieces_of_a_large_row_group_carry_their_own_rows_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    texts = [f"{number} " + "text " * 1000 for number in range(4000)]
    pq.write_table(pa.table({"text": texts}), path, row_group_size=4000, use_dictionary=False)
    source = LocalSource([str(path)], "text", None)
    whole = list(blocks(source))
    assert documents(source) == texts
    assert len(whole) > 10
    assert sum(len(pickle.dumps(block)) for block in whole) < 1.1 * sum(map(len, texts))
    for number in (0, 7, len(whole) - 2):
        assert list(blocks(source, whole[number].end)) == whole[number + 1 :]


def test_pieces_of_ordinary_row_groups_and_lines_carry_no_text(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": TEXTS}), tmp_path / "a.parquet", row_group_size=1000)
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    source = LocalSource([str(tmp_path)], "text", None)
    assert documents(source) == TEXTS * 2
    assert sum(len(pickle.dumps(block)) for block in blocks(source)) < 20_000
