"""Tokenisers by name, and the bytes that their tokens stand for."""

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from data_prep.encode import is_heldout
from data_prep.sources import LocalSource
from data_prep.token_bytes import token_bytes
from data_prep.tokenizer import build, end_of_text, identity
from torchtitan_ext.errors import UserError


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory, documents: list[str]) -> LocalSource:
    path = tmp_path_factory.mktemp("source") / "text.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return LocalSource([str(path)], "text", None)


def test_trained_bpe_is_the_same_every_time_and_has_the_size_asked_for(source: LocalSource) -> None:
    one, other = (build("bpe:700", source, 0.1, workers=2) for _ in range(2))
    assert one.to_str() == other.to_str()
    assert one.get_vocab_size() == 700


def test_trained_bpe_has_not_seen_the_heldout_documents(source: LocalSource, documents: list[str]) -> None:
    training = [text for text in documents if not is_heldout(text.encode(), 0.5)]
    assert 20 < len(training) < len(documents) - 20
    reference = Tokenizer(models.BPE())
    reference.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    reference.train_from_iterator(training, trainer)
    assert build("bpe:500", source, 0.5, workers=1).get_vocab() == reference.get_vocab()


def test_characters_are_the_alphabet_of_the_source(source: LocalSource, documents: list[str]) -> None:
    tokenizer = build("characters", source, 0.1, workers=1)
    alphabet = sorted(set("".join(documents)))
    text = documents[0]
    assert tokenizer.get_vocab() == {**{c: i for i, c in enumerate(alphabet)}, "<|endoftext|>": len(alphabet)}
    assert tokenizer.encode(text).ids == [alphabet.index(character) for character in text]
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_a_file_is_identified_by_its_contents(tokenizer_path: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.json"
    copy.write_bytes(tokenizer_path.read_bytes())
    assert identity(str(copy)) == identity(str(tokenizer_path))
    copy.write_bytes(tokenizer_path.read_bytes() + b" ")
    assert identity(str(copy)) != identity(str(tokenizer_path))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("bpe:", "at least 257"),
        ("bpe:256", "at least 257"),
        ("bpe:4k", "at least 257"),
        ("gpt-2", "did you mean 'gpt2'"),
    ],
)
def test_unknown_tokenizers(kind: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        identity(kind)


def test_end_of_text_token(tokenizer_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(tokenizer_path))
    assert end_of_text(tokenizer, None) == tokenizer.token_to_id("<|endoftext|>")
    tokenizer.add_special_tokens(["<|stop|>"])
    assert end_of_text(tokenizer, "<|stop|>") == 600
    with pytest.raises(UserError, match=r"did you mean '<\|stop\|>'"):
        end_of_text(tokenizer, "<|stopp|>")
    with pytest.raises(UserError, match="--eot-token"):
        end_of_text(Tokenizer(models.BPE({"a": 0}, [])), None)


def test_a_special_token_ends_documents_rather_than_an_ordinary_one(tokenizer_path: Path) -> None:
    """Gemma has ``<eos>``, and ``</s>`` among the pieces of HTML."""
    gemma = json.loads(tokenizer_path.read_text())
    gemma["added_tokens"][0]["content"] = "<eos>"
    gemma["model"]["vocab"]["<eos>"] = gemma["model"]["vocab"].pop("<|endoftext|>")
    tokenizer = Tokenizer.from_str(json.dumps(gemma))
    tokenizer.add_tokens(["</s>"])
    assert end_of_text(tokenizer, None) == tokenizer.token_to_id("<eos>")
    assert end_of_text(tokenizer, "</s>") == tokenizer.token_to_id("</s>")
    tokenizer.add_special_tokens(["<|endoftext|>"])
    assert end_of_text(tokenizer, None) == tokenizer.token_to_id("<|endoftext|>")


def tokens_and_bytes(tokenizer: Tokenizer, text: str) -> tuple[int, int]:
    tokenizer.encode_special_tokens = True
    table = token_bytes(tokenizer, end_of_text(tokenizer, None))
    return int(table[np.array(tokenizer.encode(text, add_special_tokens=False).ids)].sum()), len(text.encode())


def test_bytes_of_a_byte_level_vocabulary_with_added_tokens(tokenizer_path: Path, documents: list[str]) -> None:
    tokenizer = Tokenizer.from_file(str(tokenizer_path))
    tokenizer.add_tokens([AddedToken("数学", normalized=False), "statement"])
    tokenizer.add_special_tokens(["<|pad|>"])
    for text in documents:
        stand_for, length = tokens_and_bytes(tokenizer, text)
        assert stand_for == length
    assert token_bytes(tokenizer, 0)[tokenizer.token_to_id("<|pad|>")] == 0


def test_bytes_of_a_sentencepiece_vocabulary_with_byte_fallback() -> None:
    """The parts of a Llama 2 tokeniser: spaces as "▁", and bytes for characters outside the vocabulary."""
    symbols = ["</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "é", "▁a"]
    vocabulary = {symbol: index for index, symbol in enumerate(symbols)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("▁", "a")], byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    replace, fallback = decoders.Replace("▁", " "), decoders.ByteFallback()
    tokenizer.decoder = decoders.Sequence([replace, fallback, decoders.Fuse()])
    tokenizer.add_special_tokens(["</s>"])
    text = "a é  数学 a\n🙂"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    stand_for, length = tokens_and_bytes(tokenizer, text)
    assert stand_for == length


def test_bytes_of_a_word_vocabulary_cannot_be_told() -> None:
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "<eos>": 1, "a": 2, "##b": 3}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(UserError, match="WordPiece"):
        token_bytes(tokenizer, 1)
