"""From text to a data set folder: what the tokens are, and that nothing but text and settings decides it."""

import json
import random
import unicodedata
from collections import Counter
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer, models

from data_prep.dataset import TokenDataset
from torchtitan_ext.errors import UserError


def write_lines(path: Path, documents: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return path


def tokens_of(dataset: TokenDataset, name: str) -> np.ndarray:
    return np.concatenate([load_file(path)["tokens"] for path in sorted((dataset.path / name).iterdir())])


def documents_of(dataset: TokenDataset, name: str) -> list[str]:
    """The documents of a split, by cutting its tokens behind each end-of-text token and decoding them."""
    tokens = tokens_of(dataset, name)
    ends = np.flatnonzero(tokens == dataset.eot_id)
    assert ends[-1] == len(tokens) - 1
    tokenizer = dataset.tokenizer()
    parts = np.split(tokens, ends + 1)[:-1]
    return [tokenizer.decode(part[:-1].tolist(), skip_special_tokens=False) for part in parts]


@pytest.mark.parametrize("kind", ["a file", "bpe:300", "characters"])
def test_every_document_is_there_once_in_order_and_to_the_byte(
    kind: str, prep, documents: list[str], tokenizer_path: Path, tmp_path: Path
) -> None:
    source = write_lines(tmp_path / "text.jsonl", ["", *documents, documents[0]])
    tokenizer = tokenizer_path if kind == "a file" else kind
    prep.here(source, "--tokenizer", tokenizer, "--heldout-fraction", "0.2", "--out", tmp_path / "data")
    dataset = TokenDataset.open(tmp_path / "data")

    heldout = set(documents_of(dataset, "heldout"))
    assert 0 < len(heldout) < len(documents) / 2
    expected = {
        "train": [text for text in [*documents, documents[0]] if text not in heldout],
        "heldout": [text for text in [*documents, documents[0]] if text in heldout],
    }
    table = dataset.token_bytes()
    for name in ("train", "heldout"):
        assert documents_of(dataset, name) == expected[name]
        split = dataset.manifest.splits[name]
        tokens = tokens_of(dataset, name)
        text_bytes = sum(len(text.encode()) for text in expected[name])
        assert (split.tokens, split.documents, split.bytes) == (len(tokens), len(expected[name]), text_bytes)
        assert table[tokens].sum() == text_bytes
    assert table.shape == (dataset.vocab_size,)
    assert table[dataset.eot_id] == 0


def test_tokens_are_those_of_the_library(prep, documents: list[str], tokenizer_path: Path, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "text.jsonl", documents)
    prep.here(source, "--tokenizer", tokenizer_path, "--heldout-fraction", "0.2", "--out", tmp_path / "data")
    dataset = TokenDataset.open(tmp_path / "data")
    tokenizer = Tokenizer.from_file(str(tokenizer_path))
    tokenizer.encode_special_tokens = True
    for name in ("train", "heldout"):
        expected = [[*tokenizer.encode(text).ids, dataset.eot_id] for text in documents_of(dataset, name)]
        assert tokens_of(dataset, name).tolist() == list(chain.from_iterable(expected))


def test_the_cut_does_not_depend_on_order_company_or_file_format(
    prep, documents: list[str], tokenizer_path: Path, tmp_path: Path
) -> None:
    shuffled = documents.copy()
    random.Random(0).shuffle(shuffled)
    sources = [
        write_lines(tmp_path / "as_they_are.jsonl", documents),
        write_lines(tmp_path / "shuffled_with_more.jsonl", [*shuffled, "one more"]),
        tmp_path / "shuffled.parquet",
    ]
    pq.write_table(pa.table({"text": shuffled}), sources[2])
    heldout = []
    for source in sources:
        out = tmp_path / source.stem
        prep.here(source, "--tokenizer", tokenizer_path, "--heldout-fraction", "0.3", "--out", out)
        heldout.append(Counter(documents_of(TokenDataset.open(out), "heldout")) - Counter(["one more"]))
    assert heldout[0] == heldout[1] == heldout[2]
    assert 0 < heldout[0].total() < len(documents)


def test_a_larger_fraction_keeps_what_a_smaller_one_held_out(
    prep, documents: list[str], tokenizer_path: Path, tmp_path: Path
) -> None:
    source = write_lines(tmp_path / "text.jsonl", documents)
    sets = []
    for fraction in ("0.1", "0.4"):
        out = tmp_path / fraction
        prep.here(source, "--tokenizer", tokenizer_path, "--heldout-fraction", fraction, "--out", out)
        sets.append(set(documents_of(TokenDataset.open(out), "heldout")))
    assert sets[0] < sets[1]


def test_wide_vocabularies_take_32_bits(prep, documents: list[str], tokenizer_path: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(tokenizer_path))
    tokenizer.add_tokens([f"<entry {number}>" for number in range(66_000)] + ["statement"])
    tokenizer.save(str(tmp_path / "wide.json"))
    source = write_lines(tmp_path / "text.jsonl", documents)
    options = ["--heldout-fraction", "0.2", "--out", tmp_path / "data"]
    prep.here(source, "--tokenizer", tmp_path / "wide.json", *options)
    dataset = TokenDataset.open(tmp_path / "data")
    tokens = tokens_of(dataset, "train")
    assert tokens.dtype == dataset.split("train").read(0, 3).dtype == np.uint32
    assert tokens.max() == dataset.vocab_size - 1 > 1 << 16
    assert dataset.token_bytes()[tokens].sum() == dataset.manifest.splits["train"].bytes


def test_shard_size_changes_the_files_but_not_the_tokens(small: Path, tokenizer_path: Path, prep, tmp_path) -> None:
    source = small.parent / "text.jsonl"
    prep.here(source, "--tokenizer", tokenizer_path, "--heldout-fraction", "0.2", "--out", tmp_path / "data")
    one, many = TokenDataset.open(tmp_path / "data"), TokenDataset.open(small)
    assert len(one.manifest.splits["train"].shards) == 1 < len(many.manifest.splits["train"].shards)
    for name in ("train", "heldout"):
        assert np.array_equal(tokens_of(one, name), tokens_of(many, name))


@pytest.mark.parametrize("option", [None, "</s>"])
def test_the_end_token_written_in_a_text_ends_no_document(
    option: str | None, prep, tokenizer_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a tokeniser that takes its end token for ordinary text: one that has only this, and one that is told to."""
    tokenizer = Tokenizer.from_file(str(tokenizer_path))
    tokenizer.add_tokens(["</s>"])
    description = json.loads(tokenizer.to_str())
    description["added_tokens"][0]["special"] = False
    (tmp_path / "ordinary.json").write_text(json.dumps(description))
    written = [f"note {number} <s>stone</s> and <|endoftext|> end" for number in range(60)]
    source = write_lines(tmp_path / "text.jsonl", written)
    options = ["--eot-token", option] if option else []
    out = tmp_path / "data"
    prep.here(source, "--tokenizer", tmp_path / "ordinary.json", "--heldout-fraction", "0.3", *options, "--out", out)
    end = option or "<|endoftext|>"
    assert f"end-of-text token: {end!r}" in capsys.readouterr().err
    dataset = TokenDataset.open(out)
    assert dataset.eot_id == dataset.tokenizer().token_to_id(end)
    found = [text for name in ("train", "heldout") for text in documents_of(dataset, name)]
    assert sorted(found) == sorted(written)


def test_a_tokenizer_that_makes_its_end_token_of_text_is_refused(prep, tmp_path: Path) -> None:
    """Its merges lead to the end token, which is no added token."""
    vocabulary = {"<": 0, "e": 1, "o": 2, "s": 3, ">": 4, "<e": 5, "os": 6, "<eos": 7, "<eos>": 8, "a": 9}
    merges = [("<", "e"), ("o", "s"), ("<e", "os"), ("<eos", ">")]
    description = json.loads(Tokenizer(models.BPE(vocabulary, merges)).to_str())
    description["added_tokens"] = [
        {"id": 8, "content": "<eos>", "special": True}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    ]
    (tmp_path / "tokenizer.json").write_text(json.dumps(description))
    source = write_lines(tmp_path / "text.jsonl", ["a" * (number + 1) for number in range(40)] + ["a<eos>a"])
    options = ["--tokenizer", tmp_path / "tokenizer.json", "--heldout-fraction", "0.3", "--out", tmp_path / "data"]
    with pytest.raises(UserError, match=r"line 41: the tokeniser makes its end-of-text token '<eos>' of text"):
        prep.here(source, *options)


def test_copies_that_differ_in_white_space_or_form_lie_on_one_side(
    prep, tokenizer_path: Path, documents: list[str], tmp_path: Path
) -> None:
    source = tmp_path / "text.jsonl"
    changes = [
        lambda text: text,
        lambda text: text + "\n",
        lambda text: "\ufeff" + text.replace("\n", "\r\n") + " \t",
        lambda text: text.replace(" ", "\u00a0"),
        lambda text: unicodedata.normalize("NFD", text),
        lambda text: text.upper() if text.isascii() else text,
    ]
    write_lines(source, [f"{number} {change(text)}" for change in changes for number, text in enumerate(documents)])
    prep.here(source, "--tokenizer", tokenizer_path, "--heldout-fraction", "0.4", "--out", tmp_path / "data")
    dataset = TokenDataset.open(tmp_path / "data")
    numbers = {
        name: Counter(int(text.lstrip("\ufeff").split(None, 1)[0]) for text in documents_of(dataset, name))
        for name in ("train", "heldout")
    }
    assert 20 < len(numbers["heldout"]) < len(documents) - 20
    assert not numbers["train"].keys() & numbers["heldout"].keys()
    assert set((numbers["train"] + numbers["heldout"]).values()) == {len(changes)}


@pytest.mark.parametrize(
    ("documents_on_hand", "fraction", "message"),
    [
        (["", ""], "0.5", "holds no text"),
        (["only this"], "0.5", "one document"),
        ([f"document {number}" for number in range(40)], "0.0001", "raise --heldout-fraction from 0.0001 to 0.25"),
        ([f"document {number}" for number in range(4)], "0.9999", "lower --heldout-fraction"),
    ],
)
def test_an_empty_split_is_an_error_and_leaves_nothing_behind(
    documents_on_hand: list[str], fraction: str, message: str, prep, tokenizer_path: Path, tmp_path: Path
) -> None:
    source = write_lines(tmp_path / "text.jsonl", documents_on_hand)
    with pytest.raises(UserError, match=message):
        prep.here(source, "--tokenizer", tokenizer_path, "--heldout-fraction", fraction, "--out", tmp_path / "data")
    assert not (tmp_path / "data").exists()


def test_leaves_foreign_folders_alone(prep, small: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    options = [tmp_path / "notes.txt", "--tokenizer", "characters", "--out"]
    with pytest.raises(UserError, match="not empty"):
        prep.here(*options, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    with pytest.raises(UserError, match="is a finished data set made with"):
        prep.here(*options, small)
    TokenDataset.open(small).verify_checksums()


def test_a_tokenizer_that_cannot_be_made_leaves_nothing_behind(prep, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(UserError, match=r"tokenizer\.json is not a tokenizer\.json"):
        prep.here(
            tmp_path / "tokenizer.json",
            "--text-column",
            "version",
            "--tokenizer",
            tmp_path / "tokenizer.json",
            "--out",
            tmp_path / "data",
        )
    assert not (tmp_path / "data").exists()
