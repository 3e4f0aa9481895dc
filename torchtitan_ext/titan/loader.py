"""Serve windows of a prepared data set as torchtitan batches.

The loader's whole state is the number of samples (windows) consumed by all ranks, so a run can be resumed on another
number of ranks, and with another split of the global batch into ranks, passes and micro-batches, without changing what
step k consumes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer

from data_prep.dataset import TokenDataset
from data_prep.windows import WindowOrder, Windows, document_positions, samples_of

Batch = tuple[dict[str, torch.Tensor], torch.Tensor]


def to_batch(windows: np.ndarray, eot_id: int, document_mask: bool) -> Batch:
    """Split windows [m, T + 1] int64 into inputs {"input": [m, T], "positions": [m, T]?} and labels [m, T]."""
    tokens = torch.from_numpy(windows)
    inputs = {"input": tokens[:, :-1].contiguous()}
    if document_mask:
        inputs["positions"] = torch.from_numpy(document_positions(windows[:, :-1], eot_id))
    # A copy: with one window in the batch, contiguous() would hand out a view that shares memory with the inputs.
    return inputs, tokens[:, 1:].clone(memory_format=torch.contiguous_format)


class WindowLoader(BaseDataLoader):
    """An endless stream of micro-batches for one data-parallel rank."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        seed: int = 0
        global_batch: int = 0
        document_mask: bool = False

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        seq_len: int,
        local_batch_size: int,
        **unused: Any,
    ) -> None:
        dataset = TokenDataset.open(config.dataset_path or "")
        self.windows = Windows(dataset.split("train"), seq_len, config.global_batch)
        self.order = WindowOrder(self.windows.n_windows, config.seed)
        self.eot_id = dataset.eot_id
        self.document_mask = config.document_mask
        self.rank, self.ranks = dp_rank, dp_world_size
        self.micro_batch = local_batch_size
        self.global_batch = config.global_batch
        self.samples = 0

    def __iter__(self) -> Iterator[Batch]:
        passes = self.global_batch // (self.micro_batch * self.ranks)
        while True:
            step = self.samples // self.global_batch
            for number in range(passes):
                samples = samples_of(step, number, self.rank, self.ranks, self.micro_batch, self.global_batch)
                windows = self.windows.batch(self.order.window(sample) for sample in samples)
                if number == passes - 1:
                    # Before the hand-over: a checkpoint is taken between steps, when the last pass has been handed
                    # over.
                    self.samples += self.global_batch
                yield to_batch(windows, self.eot_id, self.document_mask)

    def state_dict(self) -> dict[str, Any]:
        return {"samples": self.samples}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.samples = state_dict["samples"]


class NoTokenizer(BaseTokenizer):
    """Stands where torchtitan expects a tokeniser: the data are tokens already."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, *, tokenizer_path: str) -> None:
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        raise AssertionError("prepared data are tokens already")

    def decode(self, *args: Any, **kwargs: Any) -> str:
        raise AssertionError("prepared data are tokens already")

    def get_vocab_size(self) -> int:
        raise AssertionError("prepared data are tokens already")
