"""What planned runs cost: FLOPs, disk for their checkpoints, and text to train on.

`depth plan` and `depth study plan` both count with this.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from data_prep.dataset import TokenDataset
from data_prep.windows import Windows
from torchtitan_ext.resolve import ResolvedRun
from torchtitan_ext.units import count

BYTES_PER_PARAMETER = 12
"""Of a checkpoint: the weight and AdamW's two moments, in fp32."""

FORWARD_SHARE = 1 / 3
"""Of a training step's FLOPs: evaluation has no backward pass, which takes two thirds."""

HELDOUT_SHARE = 0.005
"""Of a data set that is not prepared yet: what `depth prep` holds out by default."""


PREPARED_TOKENS_PER_CORE_SECOND = 468_000
"""Tokens that `depth prep` makes in a second of processor time (docs/performance.md, "Preparing data")."""


def train_tokens(run: ResolvedRun) -> int:
    return run.steps * run.batch_tokens


def train_flops(run: ResolvedRun) -> int:
    return train_tokens(run) * run.flops_per_token


def heldout_tokens(run: ResolvedRun) -> int:
    """Tokens that go through the model in all held-out measurements of a run, those that fill up batches included.

    The held-out split of a data set that is not prepared yet is taken to be as large as a measurement may read.
    """
    every, seq_len = run.run.heldout.every, run.run.data.seq_len
    if not every:
        return 0
    windows = max(1, run.run.heldout.tokens // seq_len)
    if is_prepared(run.dataset):
        windows = min(windows, Windows(run.dataset.split("heldout"), seq_len).n_windows)
    assert run.run.training.micro_batch is not None
    together = run.run.training.micro_batch * run.ranks
    times = -(-run.steps // every)  # the last step is measured too
    return times * -(-windows // together) * together * seq_len


def heldout_flops(run: ResolvedRun) -> float:
    return heldout_tokens(run) * run.flops_per_token * FORWARD_SHARE


def gpu_flops(run: ResolvedRun) -> float:
    """FLOPs of training and of held-out measurements."""
    return train_flops(run) + heldout_flops(run)


def saved_checkpoints(run: ResolvedRun) -> list[int]:
    """The steps at which an undisturbed run saves."""
    settings = run.run.checkpoint
    saved = {run.steps, *(step for step in settings.milestones if step <= run.steps)}
    if settings.every:
        saved |= set(range(settings.every, run.steps + 1, settings.every))
    return sorted(saved)


def kept_checkpoints(run: ResolvedRun) -> int:
    """How many checkpoints a finished run leaves."""
    return len(_kept(saved_checkpoints(run), run))


def most_checkpoints(run: ResolvedRun) -> int:
    """How many checkpoints lie on the disk at worst: those that a new one replaces are there while it is written."""
    return len(_kept(saved_checkpoints(run)[:-1], run)) + 1


def _kept(steps: list[int], run: ResolvedRun) -> set[int]:
    settings = run.run.checkpoint
    return {*steps[-settings.keep_last :], *(step for step in steps if step in settings.milestones)}


def checkpoint_bytes(run: ResolvedRun) -> int:
    """Bytes of one checkpoint. It has tied weights under both of their names."""
    twice = run.shape.vocab_size * run.shape.width if run.shape.tied else 0
    return BYTES_PER_PARAMETER * run.parameters + 4 * twice


def disk_bytes(run: ResolvedRun) -> int:
    """Bytes of the checkpoints that a finished run leaves."""
    return kept_checkpoints(run) * checkpoint_bytes(run)


def peak_disk_bytes(run: ResolvedRun) -> int:
    """Bytes of a run's checkpoints at worst, while it saves."""
    return most_checkpoints(run) * checkpoint_bytes(run)


def is_prepared(dataset: TokenDataset) -> bool:
    """False for what stands for a data set that is yet to be prepared."""
    return dataset.split("train").n_tokens > 0


def epochs(run: ResolvedRun) -> float | None:
    """How often a run sees its training text; None while that is not prepared."""
    if not is_prepared(run.dataset):
        return None
    return train_tokens(run) / run.dataset.split("train").n_tokens


def text_seen(run: ResolvedRun) -> str:
    """How much of its prepared text a run sees, and how often: a line for people."""
    there = run.dataset.split("train").n_tokens
    return (
        f"{count(train_tokens(run))} tokens of training over the {count(there)} in {run.dataset.path}: "
        f"{epochs(run):.3g} epochs"
    )


@dataclass(frozen=True)
class TextNeeded:
    """The text that runs on one data set need to see nothing twice.

    Attributes:
        dataset: the data set.
        train_tokens: of the longest run.
    """

    dataset: TokenDataset
    train_tokens: int

    @property
    def tokens(self) -> int:
        """With the held-out split of a data set that is prepared with the defaults."""
        return round(self.train_tokens / (1 - HELDOUT_SHARE))

    @property
    def disk_bytes(self) -> int:
        """As `depth prep` writes them: two bytes a token where they hold every id."""
        return self.tokens * (2 if self.dataset.vocab_size <= 1 << 16 else 4)

    @property
    def prepare_core_hours(self) -> float:
        return self.tokens / PREPARED_TOKENS_PER_CORE_SECOND / 3600


def texts_needed(runs: Iterable[ResolvedRun]) -> list[TextNeeded]:
    """What ``runs`` need of each data set that they read."""
    longest: dict[str, ResolvedRun] = {}
    for run in runs:
        path = run.run.data.path
        if path not in longest or train_tokens(run) > train_tokens(longest[path]):
            longest[path] = run
    return [TextNeeded(run.dataset, train_tokens(run)) for run in longest.values()]
