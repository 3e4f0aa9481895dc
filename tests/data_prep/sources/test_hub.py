"""A data set of the Hub: from a server on this machine, and from a local folder in its layout."""

import itertools
import random
import signal
import subprocess
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_prep.dataset import TokenDataset
from data_prep.manifest import Settings
from data_prep.prepare import prepare
from data_prep.sources import START, Cursor, HubSource, LocalSource, blocks, download, hub_client, patience
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


OWNERS = "HuggingFaceFW/fineweb-edu"


@pytest.fixture
def published(repository: Path, documents: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The repository as the real one has it: features in the card, and columns larger than the text."""
    card = CARD.replace('path: "*/*.parquet"}]', 'path: "*/*"}]\n  features: [{name: text, dtype: string}]')
    (repository / "README.md").write_text(card)
    noise = [random.Random(number).randbytes(4000) for number in range(400)]
    texts = [f"{number} {documents[number % 40][:300]}" for number in range(400)]
    for name in ("sample/0", "sample/1", "sample/2"):
        # The first file has enough text for a block of its own.
        copies = 8 if name == "sample/0" else 1
        table = pa.table({"noise": pa.array(noise, pa.binary()), "text": [text * copies for text in texts]})
        pq.write_table(table, repository / f"{name}.parquet", row_group_size=50, use_dictionary=False)
    monkeypatch.setattr(download, "SEGMENT", 1 << 18)
    monkeypatch.setattr(hub_client, "FOOTER_GUESS", 1 << 18)
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
    return repository


def at(hub, monkeypatch: pytest.MonkeyPatch, config: str = "sample-10BT", **options) -> HubSource:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    return HubSource(OWNERS, config, None, "text", **options)


def texts_of(source: HubSource, start: Cursor = START) -> list[str]:
    return [text for block in blocks(source, start) for piece in block.pieces for text in piece.texts()]


@pytest.mark.parametrize("guess", [64, 1 << 16])
def test_downloads_what_the_files_hold(
    guess: int, published: Path, serve, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(hub_client, "FOOTER_GUESS", guess)
    expected = texts_of(HubSource(str(published), "default", None, "text"))
    with serve(published) as hub, closing(at(hub, monkeypatch, "default", spool=tmp_path / "spool")) as source:
        assert source.describe()["revision"] == hub.commit
        assert source.parts == 5
        assert texts_of(source) == expected
        source.release(source.parts)
        assert list((tmp_path / "spool").iterdir()) == []
        # Once and a little more: the footers are looked at first.
        assert hub.sent < 1.2 * sum(path.stat().st_size for path in published.rglob("*.parquet"))
    assert not (tmp_path / "spool").exists()


def test_several_connections_read_at_once(published: Path, serve, monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    with serve(published) as hub, closing(at(hub, monkeypatch, spool=tmp_path / "spool")) as source:
        hub.meet = 3  # The first requests wait until so many are there.
        assert len(texts_of(source)) == 1200
        assert hub.most_at_once >= 3


@pytest.mark.parametrize("fault", ["breaks", "busy", "no ranges", "the way expires", "errors"])
def test_a_server_with_bad_days(
    fault: str, published: Path, serve, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys
) -> None:
    expected = texts_of(HubSource(str(published), "sample-10BT", None, "text"))
    monkeypatch.setattr(patience, "FIRST_WAIT", 0.01)
    with serve(published) as hub:
        turns = itertools.count()
        if fault == "breaks":
            hub.break_after = 100_000
        elif fault == "busy":
            hub.status = lambda path: (429, "0") if next(turns) % 3 else None
        elif fault == "errors":
            hub.status = lambda path: (503, "") if next(turns) % 3 == 1 else None
        elif fault == "the way expires":
            hub.status = lambda path: (403, "") if "elsewhere" in path and next(turns) % 3 == 2 else None
        else:
            hub.ranges = False
        with closing(at(hub, monkeypatch, spool=tmp_path / "spool")) as source:
            assert texts_of(source) == expected
        if fault == "breaks":
            # Each connection goes on where the last one broke.
            assert hub.sent < 1.2 * sum(path.stat().st_size for path in published.glob("sample/*.parquet"))
    assert ("the server asks to wait (HTTP 429, too many requests)" in capsys.readouterr().err) == (fault == "busy")


def test_reading_from_the_middle_downloads_no_more_than_that(
    published: Path, serve, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole = texts_of(HubSource(str(published), "sample-10BT", None, "text"))
    with serve(published) as hub, closing(at(hub, monkeypatch, spool=tmp_path / "spool")) as source:
        assert texts_of(source, Cursor(1, 300)) == whole[700:]
        assert hub.sent < 0.6 * sum(path.stat().st_size for path in published.glob("sample/*.parquet"))


def test_little_is_downloaded_for_a_look_at_the_beginning(
    published: Path, serve, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words = random.Random(0).choices(["".join(pair) for pair in itertools.permutations("abcdefghij", 5)], k=4_000_000)
    table = pa.table({"text": [" ".join(words[number : number + 1000]) for number in range(0, len(words), 1000)]})
    for name in ("sample/0", "sample/1", "sample/2"):
        pq.write_table(table, published / f"{name}.parquet", row_group_size=250, compression="NONE")
    with serve(published) as hub, closing(at(hub, monkeypatch, spool=tmp_path / "spool")) as source:
        for part in (2, 0, 1):
            pieces = source.pieces(part)
            assert next(pieces)[0].texts() == table["text"][:250].to_pylist()
            pieces.close()
        assert hub.sent < 0.5 * sum(path.stat().st_size for path in published.glob("sample/*.parquet"))


def test_a_repository_or_revision_that_is_not_there(published: Path, serve, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve(published) as hub:
        at(hub, monkeypatch).close()
        with pytest.raises(UserError, match=r"--revision: HTTP 404"):
            HubSource(OWNERS, "default", "elsewhere", "text")
        with pytest.raises(UserError, match="did you mean 'sample-10BT'"):
            HubSource(OWNERS, "sample-11BT", None, "text")
        with pytest.raises(UserError, match="did you mean 'text'"):
            HubSource(OWNERS, "default", None, "texts")


def test_what_is_wrong_for_good_is_said(
    published: Path, serve, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(patience, "FIRST_WAIT", 0.001)
    with serve(published) as hub, closing(at(hub, monkeypatch, spool=tmp_path / "spool")) as source:
        hub.status = lambda path: (500, "") if "1.parquet" in path else None
        with pytest.raises(UserError, match=r"sample/1\.parquet.*HTTP 500.*run the same command again"):
            texts_of(source)


def hub_command(prep, hub, tmp_path: Path, tokenizer_path: Path) -> "subprocess.Popen[str]":
    environment = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}
    options = ["--tokenizer", tokenizer_path, "--heldout-fraction", "0.1", "--shard-tokens", "40000"]
    return prep.start(
        "fineweb-edu", *options, "--workers", 1, "--out", tmp_path / "data", environment=environment, cwd=tmp_path
    )


def test_ctrl_c_ends_a_wait_at_once_and_the_same_command_continues(
    published: Path, serve, prep, tokenizer_path: Path, tmp_path: Path, until: Callable, kill_later: list
) -> None:
    with serve(published) as hub:
        # First while the list of files is asked for, then in the middle of the second file.
        for refused in ("/api/", "elsewhere/sample/1"):
            hub.requests.clear()
            hub.status = lambda path, refused=refused: (429, "3000") if refused in path else None
            process = hub_command(prep, hub, tmp_path, tokenizer_path)
            kill_later.append(process)
            if refused == "/api/":
                until(lambda: bool(hub.asked("/api/datasets")))
            else:
                journal = tmp_path / "data" / "progress.json"
                until(lambda: journal.exists() and "train/00000" in journal.read_text())  # noqa: B023
            until(lambda: bool(hub.asked(refused)))  # noqa: B023
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=60)
            assert process.returncode == 130, err
            assert "Traceback" not in err
        assert "asks to wait (HTTP 429, too many requests); waiting 3000 s" in err
        done = {path.name for path in tmp_path.glob("data/train/*.safetensors")}
        hub.status = lambda path: None
        hub.requests.clear()
        process = hub_command(prep, hub, tmp_path, tokenizer_path)
        kill_later.append(process)
        _, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        # What is in finished shards is not downloaded again, but for the file's footer.
        assert not [asked for _, path, asked in hub.requests if "sample/0" in path and asked.startswith("bytes=0-")]
    assert done <= {path.name for path in tmp_path.glob("data/train/*.safetensors")}
    assert not (tmp_path / "data" / ".downloads").exists()
    prep.here(
        published / "sample" / "*", "--tokenizer", tokenizer_path, "--heldout-fraction", "0.1", "--out", tmp_path / "l"
    )
    downloaded, local = TokenDataset.open(tmp_path / "data"), TokenDataset.open(tmp_path / "l")
    for name in ("train", "heldout"):
        one, other = downloaded.split(name), local.split(name)
        assert one.read(0, one.n_tokens).tolist() == other.read(0, other.n_tokens).tolist()


@pytest.mark.parametrize("config", ["default", "sample-10BT"])
def test_a_local_copy_in_the_working_directory_comes_first(
    config: str, published: Path, prep, tokenizer_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    (tmp_path / "HuggingFaceFW").mkdir()
    published.rename(tmp_path / "HuggingFaceFW" / "fineweb-edu")
    monkeypatch.chdir(tmp_path)
    options = ["--tokenizer", tokenizer_path, "--heldout-fraction", "0.1"]
    prep.here("fineweb-edu", "--config", config, *options, "--out", "data")
    assert f"the documents are read from the local folder {tmp_path / OWNERS}" in capsys.readouterr().err
    prep.here(OWNERS, "--config", config, *options, "--out", "by_path")
    by_name, by_path = TokenDataset.open("data"), TokenDataset.open("by_path")
    assert by_name.fingerprint == by_path.fingerprint
    assert by_name.manifest.settings.source["files"] == {"default": 5, "sample-10BT": 3}[config]
