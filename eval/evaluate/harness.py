"""Downstream tasks through EleutherAI's lm-evaluation-harness.

Shape suffixes: B = rows, T = tokens, V = vocabulary.

Everything about a task (its data, its prompts, what counts as right) is the harness's; this tells it log-likelihoods
and writes text for it. A context that is too long for the window loses its beginning, as the harness does it.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tokenizers import Tokenizer

from data_prep.windows import document_positions
from eval.evaluate.processes import Processes
from eval.evaluate.sample import Sampling, generate
from eval.evaluate.score import BATCH_TOKENS
from torchtitan_ext.errors import UserError, nearest
from torchtitan_ext.titan.restore import Restored

MAX_TOKENS = 256
"""New tokens where a task does not say how many, the harness's own default."""
GENERATED_ROWS = 16
"""Rows that are written side by side."""

Scored = tuple[float, bool]
"""The log-likelihood of a continuation in nats, and whether each of its tokens is the model's first choice."""


class HarnessModel(TemplateLM):
    """A restored model as the harness wants one.

    Every process is given all questions, forwards its share of the batches, and gets all answers.
    """

    def __init__(self, restored: Restored, tokenizer: Tokenizer, eot_id: int, processes: Processes) -> None:
        super().__init__()
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
        pieces: list[tuple[list[int], list[int]]] = []
        counts = []
        for request in requests:
            tokens = self.tok_encode(request.args[0])
            windows = get_rolling_token_windows(tokens, self.eot_id, self.window, 1)
            own = [make_disjoint_window(window) for window in windows]
            pieces += own
            counts.append(len(own))
        scores = iter(self._score(pieces))
        return [sum(next(scores)[0] for _ in range(count)) for count in counts]

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **unused: Any
    ) -> list[Scored]:
        return self._score([(context, continuation) for _, context, continuation in requests])

    def _score(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[Scored]:
        """Score continuations of at least one token behind contexts of at least one."""
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
            scored = slice(max(0, stop - len(continuation)), stop)
            scores.append((-nats_BT[row, scored].sum().item(), bool(first_BT[row, scored].all())))
        return scores

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
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
            [(self.tok_encode(context) or [self.eot_id])[-(self.window - max_tokens) :] for context in contexts],
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


def run_tasks(
    model: HarnessModel, tasks: Sequence[str], *, folder: str | None, limit: int | None
) -> dict[str, dict[str, Any]]:
    """The marks of ``model`` in ``tasks``, by task and metric. Collective.

    ``folder`` holds further task files (YAML); ``limit``: how many questions of each task.

    Raises:
        UserError: the harness knows no such task, or cannot get its data.
    """
    logging.getLogger("lm_eval").setLevel(logging.WARNING)
    manager = _manager(tasks, folder)
    try:
        loaded = manager.load(list(tasks))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot load the data of {', '.join(tasks)}: {str(error).splitlines()[0]}") from error
    results = evaluate(model, loaded, limit=limit, log_samples=False, bootstrap_iters=1000)
    return {
        name: {key.removesuffix(",none"): value for key, value in marks.items() if key != "alias"}
        for name, marks in results["results"].items()
    }


def _manager(tasks: Sequence[str], folder: str | None) -> TaskManager:
    """One that knows all of ``tasks``. To know the harness's own takes seconds, so those in ``folder`` come first."""
    if folder is not None:
        manager = TaskManager(include_path=folder, include_defaults=False)
        if all(manager.match_tasks([name]) for name in tasks):
            return manager
    manager = TaskManager(include_path=folder)
    for name in tasks:
        if not manager.match_tasks([name]):
            raise UserError(
                f"--tasks {name}: neither lm-evaluation-harness nor --task-folder has such a task; "
                f"{nearest(name, [known for known in manager.all_tasks if known[0] == name[0]] or ['hellaswag'])}"
            )
    return manager


def _before(text: str, endings: Sequence[str]) -> str:
    for ending in endings:
        text = text.split(ending)[0]
    return text
