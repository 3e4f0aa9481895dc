"""A restored model as EleutherAI's lm-evaluation-harness wants one.

Shape suffixes: B = rows, T = tokens, V = vocabulary.

This tells the harness log-likelihoods and writes text for it. A context that is too long for the window loses its
beginning, as the harness does it; a continuation never does: one that is longer than the window is scored a window at
a time.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tokenizers import Tokenizer

from data_prep.windows import document_positions
from eval.evaluate.processes import Processes
from eval.evaluate.sample import Sampling, generate
from eval.evaluate.score import BATCH_TOKENS
from torchtitan_ext.errors import UserError
from torchtitan_ext.titan.restore import Restored

MAX_TOKENS = 256
"""New tokens where a task does not say how many, the harness's own default."""
GENERATED_ROWS = 16
"""Rows that are written side by side."""

Scored = tuple[float, bool]
"""The log-likelihood of a continuation in nats, and whether each of its tokens is the model's first choice."""


class HarnessModel(TemplateLM):
    """A language model that shares the work out.

    Every process is given all questions, forwards its share of the batches, and gets all answers. Each of its methods
    raises ``UserError`` when the processes were given different questions, whose answers cannot be put together.
    """

    def __init__(
        self, restored: Restored, tokenizer: Tokenizer, eot_id: int, processes: Processes, *, bos: bool = False
    ) -> None:
        """``bos``: whether every context begins with an end-of-text token, as documents did in training."""
        super().__init__()
        self.bos = bos
        self.model = restored.model
        self.window = restored.description.seq_len
        self.document_mask = restored.description.run.data.document_mask
        self.vocab_size = restored.description.vocab_size
        self.text_tokenizer = tokenizer
        self.eot_id = eot_id
        self.processes = processes
        self._device = next(self.model.parameters()).device

    @property
    def eot_token_id(self) -> int:
        return self.eot_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **unused: Any) -> list[int]:
        # Prepared data sets are encoded without special tokens too.
        return self.text_tokenizer.encode(string, add_special_tokens=False).ids

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of whole texts, each token once, in windows one behind the other."""
        texts = [request.args[0] for request in requests]
        self._check_same(texts)
        return [nats for nats, _ in self._score_whole([([self.eot_id], self.tok_encode(text)) for text in texts])]

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **unused: Any
    ) -> list[Scored]:
        self._check_same(texts for texts, _, _ in requests)
        # A context of spaces alone has no token: the harness moves spaces at its end into the continuation.
        return self._score_whole([(self._begun(context), continuation) for _, context, continuation in requests])

    def _begun(self, context: list[int]) -> list[int]:
        begun = self.bos and context[:1] != [self.eot_id]
        return [self.eot_id, *context] if begun or not context else context

    def _score_whole(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[Scored]:
        """Score continuations of any length behind contexts of at least one token, each token of them once."""
        pieces = [self._pieces(context, continuation) for context, continuation in pairs]
        scores = iter(self._score([piece for own in pieces for piece in own]))
        whole = [[next(scores) for _ in own] for own in pieces]
        return [(sum((nats for nats, _ in own), 0.0), all(greedy for _, greedy in own)) for own in whole]

    def _pieces(self, context: list[int], continuation: list[int]) -> list[tuple[list[int], list[int]]]:
        """The continuation in pieces that fit the window, one behind the other, as rolling cuts a text."""
        if 0 < len(continuation) <= self.window:
            return [(context, continuation)]
        windows = get_rolling_token_windows(continuation, context[-1], self.window, 1)
        return [make_disjoint_window(window) for window in windows]

    def _check_same(self, questions: Iterable[Any]) -> None:
        digest = hashlib.sha256()
        for question in questions:
            digest.update(repr(question).encode())
        if len(set(self.processes.gather(digest.hexdigest()))) > 1:
            raise UserError(
                "a task asks each process something else, for it draws at random without a seed; use one process "
                "(--nproc 1)"
            )

    def _score(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[Scored]:
        """Score continuations of 1 to ``window`` tokens behind contexts of at least one."""
        scores_N2 = np.zeros((len(pairs), 2))
        batches = self._batches([len(context) + len(continuation) for context, continuation in pairs])
        with self.processes.progress("log-likelihoods", len(pairs)) as progress:
            for number, batch in enumerate(batches):
                if number % self.processes.ranks == self.processes.rank:
                    scores_N2[batch] = self._score_batch([pairs[index] for index in batch])
                progress.update(len(batch))
        self.processes.add_up(scores_N2)
        return [(float(nats), bool(greedy)) for nats, greedy in scores_N2]

    def _batches(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        """Numbers of the requests, longest first, so that rows of a batch are of about one length."""
        order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
        while order:
            rows = max(1, BATCH_TOKENS // min(self.window, lengths[order[0]]))
            yield order[:rows]
            order = order[rows:]

    @torch.no_grad()
    def _score_batch(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[Scored]:
        rows = [(context + continuation)[-(self.window + 1) :] for context, continuation in pairs]
        tokens_BT = torch.full((len(rows), max(map(len, rows))), self.eot_id)
        for row, tokens in enumerate(rows):
            tokens_BT[row, : len(tokens)] = torch.tensor(tokens)
        inputs_BT, targets_BT = tokens_BT[:, :-1], tokens_BT[:, 1:]
        positions_BT = None
        if self.document_mask:
            positions_BT = torch.from_numpy(document_positions(inputs_BT.numpy(), self.eot_id)).to(self.device)
        # Nothing attends to what comes later, so what fills a row up on the right changes nothing.
        logits_BTV = self.model(inputs_BT.to(self.device), positions=positions_BT).float()
        nats_BT = F.cross_entropy(logits_BTV.transpose(1, 2), targets_BT.to(self.device), reduction="none")
        first_BT = (logits_BTV.argmax(-1) == targets_BT.to(self.device)).cpu()
        nats_BT = nats_BT.double().cpu()
        scores = []
        for row, (_, continuation) in enumerate(pairs):
            stop = len(rows[row]) - 1
            scored = slice(stop - len(continuation), stop)
            scores.append((-nats_BT[row, scored].sum().item(), bool(first_BT[row, scored].all())))
        return scores

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        self._check_same(request.args for request in requests)
        groups: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            groups.setdefault(repr(request.args[1]), []).append(index)
        batches = [
            group[first : first + GENERATED_ROWS]
            for group in groups.values()
            for first in range(0, len(group), GENERATED_ROWS)
        ]
        mine: dict[int, str] = {}
        with self.processes.progress("texts", len(requests)) as progress:
            for number, batch in enumerate(batches):
                if number % self.processes.ranks == self.processes.rank:
                    contexts = [requests[index].args[0] for index in batch]
                    mine |= zip(batch, self._write(contexts, dict(requests[batch[0]].args[1])), strict=True)
                progress.update(len(batch))
        texts = {index: text for share in self.processes.gather(mine) for index, text in share.items()}
        return [texts[index] for index in range(len(requests))]

    def _write(self, contexts: Sequence[str], settings: dict[str, Any]) -> list[str]:
        endings = settings.get("until") or []
        endings = [endings] if isinstance(endings, str) else [ending for ending in endings if ending]
        max_tokens = min(int(settings.get("max_gen_toks", MAX_TOKENS)), self.window - 1)
        temperature = float(settings.get("temperature", 1.0)) if settings.get("do_sample") else 0.0
        sampling = Sampling(temperature, int(settings.get("top_k", 0)), float(settings.get("top_p", 1.0)))
        rows = generate(
            self.model,
            [self._begun(self.tok_encode(context))[-(self.window - max_tokens) :] for context in contexts],
            max_tokens=max_tokens,
            window=self.window,
            eot_id=self.eot_id,
            vocab_size=self.vocab_size,
            document_mask=self.document_mask,
            sampling=sampling,
            stop=self._ends_with(endings),
        )
        return [_before(self.text_tokenizer.decode(tokens), endings) for tokens in rows]

    def _ends_with(self, endings: Sequence[str]) -> Callable[[list[int]], bool]:
        def stop(tokens: list[int]) -> bool:
            text = self.text_tokenizer.decode(tokens)
            return any(ending in text for ending in endings)

        return stop


def _before(text: str, endings: Sequence[str]) -> str:
    for ending in endings:
        text = text.split(ending)[0]
    return text
