"""Streaming through ``datasets``, from a local folder in the layout of the Hub."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_prep.dataset import TokenDataset
from data_prep.manifest import Settings
from data_prep.prepare import prepare
from data_prep.sources import HubSource, LocalSource, blocks
from torchtitan_ext.errors import UserError

CARD = """---
configs:
- config_name: default
  data_files: [{split: train, path: "*/*.parquet"}]
- config_name: sample-10BT
  data_files: [{split: train, path: sample/*.parquet}]
---
"""


@pytest.fixture
def repository(tmp_path: Path, documents: list[str], monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two configurations, one of a single file, with a column that need not be read."""
    folder = tmp_path / "repository"
    for name, copies in (("sample/0", 5), ("rest/0", 1), ("rest/1", 1)):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        texts = [f"{name} {number} {text}" for number in range(copies) for text in documents]
        pq.write_table(pa.table({"id": list(range(len(texts))), "text": texts}), folder / f"{name}.parquet")
    (folder / "README.md").write_text(CARD)
    return folder


def test_same_documents_as_the_files_in_any_configuration(repository: Path) -> None:
    for config, parts, files in (("sample-10BT", 1, ["sample"]), ("default", 3, ["rest", "sample"])):
        source = HubSource(str(repository), config, None, "text")
        local = LocalSource([str(repository / name / "*.parquet") for name in files], "text", None)
        texts, expected = (
            [text for block in blocks(either) for piece in block.pieces for text in piece.texts()]
            for either in (source, local)
        )
        assert texts == expected
        assert source.parts == source.describe()["files"] == parts
        assert sum(block.work for block in blocks(source)) == pytest.approx(source.work)


def test_blocks_are_the_same_from_any_earlier_end(repository: Path) -> None:
    source = HubSource(str(repository), "default", None, "text")
    whole = list(blocks(source))
    assert len(whole) >= 3
    for number, block in enumerate(whole):
        assert list(blocks(source, block.end)) == whole[number + 1 :]


def test_prepares_the_data_set_that_the_files_give(
    repository: Path, prep, tokenizer_path: Path, tmp_path: Path
) -> None:
    source = HubSource(str(repository), "sample-10BT", None, "text")
    tokenizer = str(tokenizer_path)
    settings = Settings(source=source.describe(), tokenizer="file", heldout_fraction=0.1, shard_tokens=1 << 20)
    prepare(source, settings, tokenizer, tmp_path / "streamed", 1)
    options = ["--tokenizer", tokenizer, "--heldout-fraction", "0.1", "--out", tmp_path / "local"]
    prep.here(repository / "sample" / "*.parquet", *options)
    streamed, local = TokenDataset.open(tmp_path / "streamed"), TokenDataset.open(tmp_path / "local")
    assert streamed.manifest.settings.source["config"] == "sample-10BT"
    for name in ("train", "heldout"):
        one, other = streamed.split(name), local.split(name)
        assert one.read(0, one.n_tokens).tolist() == other.read(0, other.n_tokens).tolist()


def test_unknown_configuration_and_column(repository: Path) -> None:
    with pytest.raises(UserError, match="sample-10BT"):
        HubSource(str(repository), "sample-11BT", None, "text")
    with pytest.raises(UserError, match="did you mean 'text'"):
        HubSource(str(repository), "default", None, "texts")


def test_file_that_cannot_be_read_is_named(repository: Path) -> None:
    source = HubSource(str(repository), "sample-10BT", None, "text")
    path = repository / "sample" / "0.parquet"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(UserError, match="run the same command again") as raised:
        list(blocks(source))
    assert str(path) in str(raised.value)
