"""The loader serves the same global batches however they are split, and goes on from one number."""

from itertools import islice
from pathlib import Path

import pytest
import torch

from data_prep.dataset import TokenDataset
from torchtitan_ext.titan.loader import WindowLoader

SEQ_LEN, GLOBAL_BATCH = 32, 8


def loader(dataset: Path, rank: int = 0, ranks: int = 1, micro_batch: int = 4, **options: object) -> WindowLoader:
    config = WindowLoader.Config(dataset_path=str(dataset), global_batch=GLOBAL_BATCH, **options)
    return config.build(dp_world_size=ranks, dp_rank=rank, seq_len=SEQ_LEN, local_batch_size=micro_batch)


def global_batches(dataset: Path, steps: int, ranks: int, micro_batch: int) -> list[set[tuple[int, ...]]]:
    """Per step, the windows that all ranks consume in all passes."""
    passes = GLOBAL_BATCH // (ranks * micro_batch)
    batches: list[set[tuple[int, ...]]] = [set() for _ in range(steps)]
    for rank in range(ranks):
        stream = iter(loader(dataset, rank, ranks, micro_batch))
        for step in range(steps):
            for inputs, labels in islice(stream, passes):
                rows = torch.cat([inputs["input"], labels[:, -1:]], dim=1)
                batches[step] |= {tuple(row) for row in rows.tolist()}
    return batches


@pytest.mark.parametrize(("ranks", "micro_batch"), [(1, 1), (1, 8), (2, 2), (2, 4), (4, 1), (4, 2), (8, 1)])
def test_any_split_gives_the_same_global_batches(dataset: Path, ranks: int, micro_batch: int) -> None:
    expected = global_batches(dataset, 5, ranks=1, micro_batch=4)
    assert all(len(batch) == GLOBAL_BATCH for batch in expected)
    assert global_batches(dataset, 5, ranks, micro_batch) == expected


def test_windows_are_the_texts_own(dataset: Path) -> None:
    """Each window is SEQ_LEN + 1 consecutive tokens of the training split, at a multiple of SEQ_LEN."""
    split = TokenDataset.open(dataset).split("train")
    tokens = split.read(0, split.n_tokens).astype(int)
    starts = {tuple(tokens[i : i + SEQ_LEN + 1].tolist()) for i in range(0, len(tokens) - SEQ_LEN, SEQ_LEN)}
    for batch in global_batches(dataset, 20, ranks=1, micro_batch=8):
        assert batch <= starts


def test_the_state_is_the_number_of_samples_and_resuming_goes_on_from_it(dataset: Path) -> None:
    first = loader(dataset, micro_batch=2)
    stream = iter(first)
    for _ in range(3 * GLOBAL_BATCH // 2):
        next(stream)
    assert first.state_dict() == {"samples": 3 * GLOBAL_BATCH}
    expected = next(stream)[0]["input"]

    resumed = loader(dataset, micro_batch=2)
    resumed.load_state_dict({"samples": 3 * GLOBAL_BATCH})
    assert torch.equal(next(iter(resumed))[0]["input"], expected)


def test_another_seed_is_another_order(dataset: Path) -> None:
    first, second = (next(iter(loader(dataset, seed=seed)))[0]["input"] for seed in (0, 1))
    assert not torch.equal(first, second)


def test_positions_restart_after_each_end_of_text(dataset: Path) -> None:
    eot = TokenDataset.open(dataset).eot_id
    seen = 0
    for inputs, _ in islice(iter(loader(dataset, document_mask=True, micro_batch=8)), 250):
        for tokens, positions in zip(inputs["input"].tolist(), inputs["positions"].tolist(), strict=True):
            expected, position = [], 0
            for token in tokens:
                expected.append(position)
                position = 0 if token == eot else position + 1
                seen += token == eot
            assert positions == expected
    assert seen > 5
