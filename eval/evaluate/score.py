"""The loss of every token of a held-out split.

Shape suffixes: N = tokens of the split, B = windows, T = tokens of a window.

The split is read in the windows of training, one behind the other, to its last token. So every token is scored once,
with the tokens before it in its window as context: 1 to ``seq_len`` of them. The last window is shorter, and the very
first token, which nothing precedes, is predicted from an end-of-text token: it has a context of 0.

A batch of windows is the same whatever the number of processes, each loss is kept, and sums are taken over all of them
at once: results do not depend on how the work was shared out, to the last bit.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F

from data_prep.dataset import TokenDataset
from data_prep.windows import document_positions, heldout_windows
from eval.evaluate.processes import Processes
from torchtitan_ext.depth.decoder import DepthDecoder
from torchtitan_ext.errors import UserError
from torchtitan_ext.titan.loader import to_batch

BATCH_TOKENS = 4096
"""Tokens in one forward pass: their logits over a vocabulary of 50 thousand take 0.8 GB."""


@dataclass(frozen=True)
class HeldOutTokens:
    """The tokens of a data set's held-out split, and where they stand.

    Attributes:
        tokens_N: their ids.
        bytes_N: how many UTF-8 bytes of text each stands for.
        eot_id: the token behind each document.
    """

    tokens_N: np.ndarray
    bytes_N: np.ndarray
    eot_id: int

    @classmethod
    def read(cls, dataset: TokenDataset) -> "HeldOutTokens":
        """Read the whole split. Raises ``UserError`` when it is empty."""
        split = dataset.split("heldout")
        if not split.n_tokens:
            raise UserError(f"{dataset.path} holds nothing out; prepare it again with a --heldout-fraction above 0")
        tokens_N = split.read(0, split.n_tokens)
        return cls(tokens_N, dataset.token_bytes()[tokens_N], dataset.eot_id)

    def __len__(self) -> int:
        return len(self.tokens_N)

    @cached_property
    def document_position_N(self) -> np.ndarray:
        """How many tokens of its document come before each token."""
        return document_positions(self.tokens_N, self.eot_id)

    @cached_property
    def document_N(self) -> np.ndarray:
        """The number of each token's document, from 0."""
        return np.cumsum(self.document_position_N == 0) - 1

    def context_N(self, seq_len: int, document_mask: bool) -> np.ndarray:
        """How many tokens a model that is trained on windows of ``seq_len`` tokens sees before each token."""
        index_N = np.arange(len(self), dtype=np.int64)
        context_N = np.where(index_N == 0, 0, (index_N - 1) % seq_len + 1)
        if not document_mask:
            return context_N
        # A token is predicted from the one before it, which sees its own document: at the start of a document, that is
        # the document before.
        seen_N = np.concatenate([[0], self.document_position_N[:-1] + 1])
        return np.minimum(context_N, seen_N)


@dataclass(frozen=True)
class TokenLosses:
    """The negative log-likelihood in nats of each token of ``text``, ``nats_N`` fp32."""

    text: HeldOutTokens
    nats_N: np.ndarray

    @property
    def nats(self) -> float:
        return float(self.nats_N.sum(dtype=np.float64))

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nats / len(self.text)

    @property
    def bits_per_byte(self) -> float:
        """Bits per UTF-8 byte of text."""
        return self.nats / math.log(2) / int(self.text.bytes_N.sum())

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))

    def over_training_windows(self, seq_len: int, limit: int) -> float:
        """The loss over the windows that training measures at most ``limit`` tokens of: nats per token."""
        chosen = heldout_windows((len(self.text) - 1) // seq_len, max(1, limit // seq_len))
        index = (np.array(chosen)[:, None] * seq_len + np.arange(1, seq_len + 1)).ravel()
        return float(self.nats_N[index].mean(dtype=np.float64))


def score(
    model: DepthDecoder,
    text: HeldOutTokens,
    *,
    seq_len: int,
    document_mask: bool,
    processes: Processes,
    title: str = "held-out loss",
) -> TokenLosses:
    """The loss of every token of ``text``. Collective: each process scores its share and gets all losses.

    Raises:
        UserError: a loss is not a finite number.
    """
    nats_N = np.zeros(len(text), dtype=np.float32)
    pieces = list(_pieces(len(text), seq_len))
    with processes.progress(title, len(text)) as progress:
        for first, windows, length in pieces[processes.rank :: processes.ranks]:
            tokens_BT = _windows(text, first, windows, length)
            nats_BT = window_nats(model, tokens_BT, text.eot_id, document_mask)
            nats_N[first : first + windows * length] = nats_BT.numpy().ravel()
            progress.update(windows * length * processes.ranks)
    processes.add_up(nats_N)
    broken = len(text) - int(np.isfinite(nats_N).sum())
    if broken:
        raise UserError(
            f"the loss of {broken:,} of {len(text):,} tokens is not a finite number: the model has diverged"
        )
    return TokenLosses(text, nats_N)


@torch.no_grad()
def window_nats(model: DepthDecoder, windows_BT: np.ndarray, eot_id: int, document_mask: bool) -> torch.Tensor:
    """The losses [B, T] on the CPU of the tokens that follow the first one in each of the windows [B, T + 1] int64."""
    device = next(model.parameters()).device
    inputs, labels_BT = to_batch(windows_BT, eot_id, document_mask)
    tokens_BT, positions_BT = inputs["input"].to(device), inputs.get("positions")
    logits_BTV = model(tokens_BT, positions=None if positions_BT is None else positions_BT.to(device))
    nats = F.cross_entropy(logits_BTV.flatten(0, 1).float(), labels_BT.flatten().to(device), reduction="none")
    return nats.view(labels_BT.shape).cpu()


def _pieces(tokens: int, seq_len: int) -> Iterator[tuple[int, int, int]]:
    """The forward passes: the first token that one predicts, in how many windows, and how many tokens in each."""
    yield 0, 1, 1
    whole, rest = divmod(tokens - 1, seq_len)
    batch = max(1, BATCH_TOKENS // seq_len)
    for window in range(0, whole, batch):
        yield 1 + window * seq_len, min(batch, whole - window), seq_len
    if rest:
        yield 1 + whole * seq_len, 1, rest


def _windows(text: HeldOutTokens, first: int, windows: int, length: int) -> np.ndarray:
    """Windows [B, length + 1] int64 that predict ``windows * length`` tokens from ``first`` on."""
    if first == 0:
        return np.array([[text.eot_id, text.tokens_N[0]]], dtype=np.int64)
    starts = first - 1 + length * np.arange(windows)
    return text.tokens_N[starts[:, None] + np.arange(length + 1)].astype(np.int64)
