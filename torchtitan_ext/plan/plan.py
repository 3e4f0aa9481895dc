"""From a resolved run to what it needs on GPUs: memory at every micro-batch, and the largest that fits."""

from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from torchtitan_ext.depth.registry import VARIANTS
from torchtitan_ext.gpus import Speed
from torchtitan_ext.plan.storages import Parts
from torchtitan_ext.resolve import ResolvedRun
from torchtitan_ext.titan.rehearsal import FIXED, Rehearsal, rehearsing


@dataclass(frozen=True)
class Memory:
    """Bytes per GPU by part, at the peak of training and, in a run that measures it, of the held-out loss."""

    training: Parts
    heldout: Parts | None

    @property
    def peak(self) -> int:
        return max(sum(self.training.values()), sum((self.heldout or {}).values()))


class MemoryOf:
    """The memory of a rehearsed run at any micro-batch. ``announce`` is called before every rehearsal, with its
    micro-batch."""

    def __init__(self, rehearsal: Rehearsal, announce: Callable[[int], None] = lambda micro_batch: None) -> None:
        self.rehearsal, self.resolved, self.announce = rehearsal, rehearsal.resolved, announce
        self._known: dict[int, Memory] = {}

    @property
    def micro_batches(self) -> list[int]:
        """The micro-batches that split a GPU's share of the batch evenly, in order."""
        share = self.resolved.batch_tokens // self.resolved.run.data.seq_len // self.resolved.ranks
        return [size for size in range(1, share + 1) if share % size == 0]

    def at(self, micro_batch: int) -> Memory:
        if micro_batch not in self._known:
            self.announce(micro_batch)
            heldout = self.rehearsal.evaluate(micro_batch) if self.resolved.run.heldout.every else None
            self._known[micro_batch] = Memory(self.rehearsal.train(micro_batch), heldout)
        return self._known[micro_batch]

    def largest(self, usable: float) -> int | None:
        """The largest micro-batch whose peak is within ``usable`` bytes; None when there is none.

        Every answer is rehearsed: a guess in proportion to what grows with the micro-batch says only where to begin,
        and from there it goes up or down, for memory grows with the micro-batch.
        """
        choices = self.micro_batches
        own = self.resolved.run.training.micro_batch
        assert own is not None
        fixed = sum(size for part, size in self.at(own).training.items() if part in FIXED)
        guess = own * (usable - fixed) / max(1, self.at(own).peak - fixed)
        index = max(0, bisect_right(choices, guess) - 1)
        while index >= 0 and self.at(choices[index]).peak > usable:
            index -= 1
        if index < 0:
            return None
        while index + 1 < len(choices) and self.at(choices[index + 1]).peak <= usable:
            index += 1
        return choices[index]


@dataclass(frozen=True)
class Need:
    """What a run needs at its own micro-batch; the largest micro-batch that fits (None: none does) and its peak."""

    resolved: ResolvedRun
    memory: Memory
    largest: int | None
    largest_peak: int


def need_of(resolved: ResolvedRun, usable: float, announce: Callable[[int], None] = lambda micro_batch: None) -> Need:
    """Rehearse ``resolved`` on GPUs where tensors may fill ``usable`` bytes."""
    micro_batch = resolved.run.training.micro_batch
    assert micro_batch is not None
    with rehearsing(resolved) as rehearsal:
        memory = MemoryOf(rehearsal, announce)
        largest = memory.largest(usable)
        return Need(resolved, memory.at(micro_batch), largest, memory.at(largest).peak if largest else 0)


def standard_of(resolved: ResolvedRun) -> ResolvedRun:
    """The same run with the standard residual in place of its variant."""
    model = resolved.run.model.model_copy(update={"variant": "standard"})
    run = resolved.run.model_copy(update={"model": model, "depth": {}, "groups": {}})
    return replace(resolved, run=run, architecture=replace(resolved.architecture, variant=VARIANTS["standard"]))


def tokens_per_second(resolved: ResolvedRun, speed: Speed) -> float:
    """Of all ranks together, in training."""
    return resolved.ranks * speed.flops / resolved.flops_per_token


def remedies(
    resolved: ResolvedRun,
    usable: float,
    larger: Iterable[tuple[str, float]],
    with_gpus: Callable[[int], ResolvedRun | None],
) -> list[str]:
    """What would make a run fit that does not fit at micro-batch 1: each one change alone, in words.

    ``larger`` gives other GPUs by name with their usable bytes, ``with_gpus`` the run on another number of GPUs (None
    where its batch cannot be split so).
    """
    found = []

    def smallest(run: ResolvedRun) -> int:
        with rehearsing(run) as rehearsal:
            return MemoryOf(rehearsal).at(1).peak

    modes = ("none", "selective", "full")
    for mode in modes[modes.index(resolved.run.training.activation_checkpoint) + 1 :]:
        training = resolved.run.training.model_copy(update={"activation_checkpoint": mode})
        lighter = replace(resolved, run=resolved.run.model_copy(update={"training": training}))
        if smallest(lighter) <= usable:
            found.append(f"--training.activation_checkpoint {mode} --training.micro_batch 1")
            break
    for factor in (2, 4, 8, 16):
        more = with_gpus(factor * resolved.ranks)
        if more is not None and smallest(more) <= usable:
            found.append(f"--gpus {more.ranks} --training.micro_batch 1")
            break
    needed = smallest(resolved)
    found += [f"--gpu {name} --training.micro_batch 1" for name, bytes_there in larger if needed <= bytes_there][:1]
    return found
