"""Documents from Parquet, JSON-lines and text files."""

import json
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
