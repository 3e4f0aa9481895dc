"""Text from a model: greedy, or drawn with temperature, top-k and top-p.

Shape suffixes: B = rows, T = tokens, V = vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from data_prep.windows import document_positions
from eval.evaluate.cache import cached
from torchtitan_ext.depth.decoder import DepthDecoder


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
        temperature: logits are divided by it; 0 takes the likeliest token.
        top_k: of how many of the likeliest tokens; 0 for all.
        top_p: of the fewest likeliest tokens that together have this probability (Holtzman et al., arXiv 1904.09751);
            1 for all. Taken after ``top_k``.
        seed: row r of a batch draws from a generator of (seed, r), so that a row does not depend on those beside it.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


def probabilities(logits_BV: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """The distribution [B, V] that ``sampling`` draws from, for a temperature above 0."""
    logits_BV = logits_BV / sampling.temperature
    if 0 < sampling.top_k < logits_BV.shape[-1]:
        smallest_B1 = logits_BV.topk(sampling.top_k).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < smallest_B1, -torch.inf)
    p_BV = logits_BV.softmax(-1)
    if sampling.top_p < 1.0:
        sorted_BV, order_BV = p_BV.sort(descending=True, stable=True)
        # A token stays as long as those before it have not reached the share.
        dropped_BV = sorted_BV.cumsum(-1) - sorted_BV >= sampling.top_p
        dropped_BV[:, 0] = False
        p_BV = p_BV.masked_fill(dropped_BV.scatter(-1, order_BV, dropped_BV), 0.0)
        p_BV = p_BV / p_BV.sum(-1, keepdim=True)
    return p_BV


def generate(
    model: DepthDecoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    window: int,
    eot_id: int,
    vocab_size: int,
    document_mask: bool,
    sampling: Sampling,
    stop: Callable[[list[int]], bool] = lambda tokens: False,
) -> list[list[int]]:
    """Continue each of ``prompts``, token ids of any length, side by side.

    A row ends with ``max_tokens`` new tokens, with its window of ``window`` tokens full, behind an end-of-text token
    (which is not returned), or when ``stop`` says so of its new tokens. Ids from ``vocab_size`` on are never chosen.
    """
    device = next(model.parameters()).device
    generators = [torch.Generator().manual_seed(_row_seed(sampling.seed, row)) for row in range(len(prompts))]
    written: list[list[int]] = [[] for _ in prompts]
    room = [min(max_tokens, window - len(prompt)) for prompt in prompts]
    running = [room[row] > 0 for row in range(len(prompts))]
    tokens_BT, positions_BT = _filled_up(prompts, eot_id, document_mask)
    with cached(model) as decoder:
        while any(running):
            logits_BTV = decoder(tokens_BT.to(device), positions_BT.to(device))
            logits_BV = logits_BTV[:, -1, :vocab_size].to("cpu", torch.float64)
            chosen = _choose(logits_BV, sampling, generators)
            for row in range(len(prompts)):
                if not running[row]:
                    continue
                if chosen[row] == eot_id:
                    running[row] = False
                    continue
                written[row].append(chosen[row])
                running[row] = len(written[row]) < room[row] and not stop(written[row])
            # A row that has ended goes on beside the others, unread, and may not leave the window.
            next_B1 = (positions_BT[:, -1:] + 1).clamp(max=window - 1)
            begins_B1 = (tokens_BT[:, -1:] == eot_id) & document_mask
            tokens_BT, positions_BT = torch.tensor(chosen)[:, None], next_B1.masked_fill(begins_B1, 0)
    return written


def _choose(logits_BV: torch.Tensor, sampling: Sampling, generators: Sequence[torch.Generator]) -> list[int]:
    if sampling.temperature == 0:
        return logits_BV.argmax(-1).tolist()
    rows = zip(probabilities(logits_BV, sampling), generators, strict=True)
    return [int(torch.multinomial(p_V, 1, generator=generator)) for p_V, generator in rows]


def _filled_up(prompts: Sequence[Sequence[int]], eot_id: int, document_mask: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and positions [B, T] of prompts that end together. What fills a row up is a document of its own, which
    the prompt, beginning at position 0, does not attend to."""
    longest = max(map(len, prompts))
    tokens_BT = np.full((len(prompts), longest), eot_id, dtype=np.int64)
    positions_BT = np.tile(np.arange(longest), (len(prompts), 1))
    for row, prompt in enumerate(prompts):
        begin = longest - len(prompt)
        tokens_BT[row, begin:] = prompt
        own = tokens_BT[row, begin:]
        positions_BT[row, begin:] = document_positions(own, eot_id) if document_mask else np.arange(len(own))
    return torch.from_numpy(tokens_BT), torch.from_numpy(positions_BT)


def _row_seed(seed: int, row: int) -> int:
    return int(np.random.SeedSequence([seed, row]).generate_state(1, np.uint64)[0] >> 1)
