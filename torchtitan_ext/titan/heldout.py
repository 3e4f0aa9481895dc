"""Held-out loss over a fixed set of windows: the same for every run on the same data, and the same on any number of
ranks.

torchtitan's own validation lets each rank average over its own stream of batches; here every window is scored once,
somewhere, and the sums are added up in fp64.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.distributed.utils import SpmdContext

from data_prep.dataset import TokenDataset
from data_prep.windows import Windows, heldout_windows

from .loader import to_batch


@dataclass(frozen=True)
class HeldOutLoss:
    """Sums over the scored tokens: negative log-likelihood in nats, tokens, and UTF-8 bytes of text they stand for."""

    nats: float
    tokens: int
    text_bytes: int

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nats / self.tokens

    def metrics(self) -> dict[str, float]:
        return {
            "heldout/loss": self.loss,
            "heldout/perplexity": math.exp(min(self.loss, 700.0)),
            "heldout/bits_per_byte": self.nats / math.log(2) / self.text_bytes,
        }


class HeldOut:
    """The held-out windows of a data set, scored in micro-batches.

    At most ``tokens`` tokens are scored: evenly spaced windows of ``seq_len`` tokens, chosen without any seed.
    """

    def __init__(
        self,
        dataset: TokenDataset,
        *,
        seq_len: int,
        tokens: int,
        micro_batch: int,
        document_mask: bool,
        rank: int,
        ranks: int,
    ) -> None:
        self.windows = Windows(dataset.split("heldout"), seq_len)
        self.chosen = heldout_windows(self.windows.n_windows, max(1, tokens // seq_len))
        self.token_bytes = torch.from_numpy(dataset.token_bytes().astype(np.int64))
        self.eot_id = dataset.eot_id
        self.micro_batch = micro_batch
        self.document_mask = document_mask
        self.rank, self.ranks = rank, ranks

    def evaluate(self, model: nn.Module, context: SpmdContext, device: torch.device) -> HeldOutLoss:
        """Score all chosen windows. Collective: every rank calls it and gets the same sums."""
        sums = self.score_share(model, context, device)
        if self.ranks > 1:
            sums = sums.to(device)
            torch.distributed.all_reduce(sums)
        nats, tokens, text_bytes = sums.tolist()
        return HeldOutLoss(nats, int(tokens), int(text_bytes))

    @torch.no_grad()
    def score_share(self, model: nn.Module, context: SpmdContext, device: torch.device) -> torch.Tensor:
        """This rank's share of the sums, [nats, tokens, bytes] in fp64, after as many forward passes as on any rank."""
        was_training, skipped_head = model.training, model._skip_lm_head
        model.eval()
        model._skip_lm_head = False
        sums = torch.zeros(3, dtype=torch.float64)
        stride = self.micro_batch * self.ranks
        for first in range(self.rank * self.micro_batch, _round_up(len(self.chosen), stride), stride):
            # A rank whose share has run out scores nothing, but takes part in the forward pass with the others.
            share = self.chosen[first : first + self.micro_batch]
            padded = np.resize(share if len(share) else self.chosen[:1], self.micro_batch)
            inputs, labels = to_batch(self.windows.batch(padded), self.eot_id, self.document_mask)
            labels[len(share) :] = IGNORE_INDEX
            with context():
                logits = model(inputs["input"].to(device), **self._extras(model, inputs, device))
            nats = F.cross_entropy(
                logits.flatten(0, 1).float(), labels.flatten().to(device), reduction="none", ignore_index=IGNORE_INDEX
            )
            scored = labels[labels != IGNORE_INDEX]
            batch = [nats.double().sum().item(), scored.numel(), self.token_bytes[scored].sum().item()]
            sums += torch.tensor(batch, dtype=torch.float64)
        model.train(was_training)
        model._skip_lm_head = skipped_head
        return sums

    def first_batch(self, model: nn.Module, device: torch.device) -> tuple[torch.Tensor, dict[str, object]]:
        """The first windows of this rank's share: inputs [micro_batch, T] and the model's other arguments."""
        share = np.resize(self.chosen[self.rank * self.micro_batch :] or self.chosen, self.micro_batch)
        inputs, _ = to_batch(self.windows.batch(share), self.eot_id, self.document_mask)
        return inputs["input"].to(device), self._extras(model, inputs, device)

    def _extras(self, model: nn.Module, inputs: dict[str, torch.Tensor], device: torch.device) -> dict[str, object]:
        if "positions" not in inputs:
            return {}
        positions = inputs["positions"].to(device)
        extras: dict[str, object] = {"positions": positions}
        if model.config.make_mask is None:
            extras["attention_masks"] = model.get_attention_masks(positions=positions)
        return extras


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
