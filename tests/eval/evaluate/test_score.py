"""Every token of the split is scored once, in the windows of training, and equals a direct computation in fp64."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from data_prep.dataset import TokenDataset
from eval.evaluate.processes import Processes
from eval.evaluate.score import HeldOutTokens, TokenLosses, score
from torchtitan_ext.errors import UserError
from torchtitan_ext.run_folder import RunFolder
from torchtitan_ext.titan.restore import restore

MakeRun = Callable[..., RunFolder]
SEQ_LEN = 64
CPU = torch.device("cpu")


def cut(text: HeldOutTokens, tokens: int) -> HeldOutTokens:
    return HeldOutTokens(text.tokens_N[:tokens], text.bytes_N[:tokens], text.eot_id)


@pytest.fixture(scope="module")
def text(dataset: Path) -> HeldOutTokens:
    return HeldOutTokens.read(TokenDataset.open(dataset))


@pytest.fixture(scope="module")
def documents_run(make_run: MakeRun) -> RunFolder:
    return make_run("documents", "--data.document_mask", "true")


def test_the_text_is_the_whole_split(dataset: Path, text: HeldOutTokens) -> None:
    data = TokenDataset.open(dataset)
    tokens = data.split("heldout").read(0, data.split("heldout").n_tokens)
    assert np.array_equal(text.tokens_N, tokens)
    documents = data.tokenizer().decode(tokens.tolist(), skip_special_tokens=True)
    assert text.bytes_N.sum() == len(documents.encode()), "the bytes are those of the text"
    assert text.document_N[-1] + 1 == (tokens == data.eot_id).sum()


@pytest.mark.parametrize("tokens", [1, 2, 64, 65, 66, 64 * 64 + 1, 64 * 65 + 1 + 17])
def test_every_loss_equals_a_direct_computation(standard: RunFolder, text: HeldOutTokens, tokens: int) -> None:
    """Splits that end behind the first token, in a window, at its end and in a second batch of windows."""
    model, some = restore(standard, device=CPU).model, cut(text, tokens)
    got = score(model, some, seq_len=SEQ_LEN, document_mask=False, processes=Processes())
    assert got.nats_N.shape == (tokens,)
    exact = model.double()
    sequence = torch.tensor([text.eot_id, *some.tokens_N.tolist()])
    expected = []
    with torch.no_grad():
        for token in range(tokens):
            # Token t of the split is predicted in window (t - 1) // 64; the first from an end-of-text token alone.
            first = 0 if token == 0 else 1 + (token - 1) // SEQ_LEN * SEQ_LEN
            if token in (0, first):
                window = sequence[first : 1 if token == 0 else first + SEQ_LEN]
                log_p = torch.log_softmax(exact(window[None])[0], dim=-1)
            expected.append(-log_p[token - first, some.tokens_N[token]].item())
    np.testing.assert_allclose(got.nats_N, expected, rtol=2e-5)
    assert got.loss == pytest.approx(sum(expected) / tokens, rel=1e-6)
    assert got.bits_per_byte == pytest.approx(sum(expected) / math.log(2) / some.bytes_N.sum(), rel=1e-6)
    assert got.perplexity == pytest.approx(math.exp(sum(expected) / tokens), rel=1e-5)


def test_documents_do_not_see_each_other(documents_run: RunFolder, text: HeldOutTokens) -> None:
    """With a document mask, what comes before a document in its window makes no difference to it."""
    model = restore(documents_run, device=CPU).model
    end = int(np.flatnonzero(text.tokens_N == text.eot_id)[0])
    begin = max(0, end + 1 - 20)
    some = HeldOutTokens(text.tokens_N[begin : begin + 60], text.bytes_N[begin : begin + 60], text.eot_id)
    changed = HeldOutTokens(some.tokens_N.copy(), some.bytes_N, text.eot_id)
    changed.tokens_N[3] = (changed.tokens_N[3] + 1) % 300
    before, after = (
        score(model, each, seq_len=SEQ_LEN, document_mask=True, processes=Processes()).nats_N
        for each in (some, changed)
    )
    boundary = end - begin + 1
    assert not np.array_equal(before[4:boundary], after[4:boundary])
    # The first token of the next document is predicted from the end of this one.
    assert np.array_equal(before[boundary + 1 :], after[boundary + 1 :])


def test_what_a_token_sees() -> None:
    """Windows of 4 over documents a b eot | c d e f g eot | h, counted by hand."""
    tokens = np.array([1, 2, 0, 3, 4, 5, 6, 7, 0, 8])
    text = HeldOutTokens(tokens, np.ones(10), eot_id=0)
    assert text.document_N.tolist() == [0, 0, 0, 1, 1, 1, 1, 1, 1, 2]
    assert text.document_position_N.tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 5, 0]
    assert text.context_N(4, document_mask=False).tolist() == [0, 1, 2, 3, 4, 1, 2, 3, 4, 1]
    # Token 3 begins a document and is predicted from token 2, which sees tokens 0 to 2 of its own.
    assert text.context_N(4, document_mask=True).tolist() == [0, 1, 2, 3, 1, 1, 2, 3, 4, 1]


class Share(Processes):
    """One of several processes, without the others: sums are left to the test."""

    def add_up(self, array: np.ndarray) -> None:
        pass


@pytest.mark.parametrize("ranks", [2, 3, 7])
def test_shares_add_up_to_the_last_bit(standard: RunFolder, text: HeldOutTokens, ranks: int) -> None:
    model, some = restore(standard, device=CPU).model, cut(text, 64 * 64 * 3 + 40)
    settings = {"seq_len": SEQ_LEN, "document_mask": False}
    whole = score(model, some, processes=Processes(), **settings)
    parts = [score(model, some, processes=Share(rank, ranks), **settings).nats_N for rank in range(ranks)]
    assert (np.count_nonzero(parts, axis=0) == 1).all(), "each token by one process"
    assert np.array_equal(np.sum(parts, axis=0, dtype=np.float32), whole.nats_N)


def test_the_windows_of_training_are_found_again() -> None:
    """Ten windows of 4 tokens, of which training reads 3: windows 0, 3 and 6 (n · 10 // 3)."""
    text = HeldOutTokens(np.zeros(43, dtype=np.int64), np.ones(43), eot_id=1)
    losses = TokenLosses(text, np.arange(43, dtype=np.float32))
    chosen = [1, 2, 3, 4, 13, 14, 15, 16, 25, 26, 27, 28]
    assert losses.over_training_windows(4, 15) == sum(chosen) / 12


def test_a_diverged_model_is_named(standard: RunFolder, text: HeldOutTokens) -> None:
    model = restore(standard, device=CPU).model
    model.norm.weight.data[0] = math.nan
    with pytest.raises(UserError, match="100 of 100 tokens is not a finite number"):
        score(model, cut(text, 100), seq_len=SEQ_LEN, document_mask=False, processes=Processes())
