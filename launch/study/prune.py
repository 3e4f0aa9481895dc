"""Free the disk that the checkpoints of ended runs take."""

import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from launch.study.disk import bytes_below
from launch.study.state import RunState
from torchtitan_ext.errors import UserError
from torchtitan_ext.pruned import is_pruned_to, mark_pruned
from torchtitan_ext.run_file import load_run
from torchtitan_ext.run_folder import RunFolder
from torchtitan_ext.run_lock import RunLock
from torchtitan_ext.units import count

WEIGHTS, RECORDS = "weights", "records"
BYTES_PER_WEIGHT = 4


@dataclass(frozen=True)
class Pruning:
    """What is to be done to one run.

    Attributes:
        folder: the run's.
        keep: ``weights`` (of the last step and of milestones) or ``records`` (no checkpoint).
        steps: of the checkpoints to keep the weights of.
        before, after: bytes of its checkpoints now and, about, then.
    """

    folder: RunFolder
    keep: str
    steps: tuple[int, ...]
    before: int
    after: int


def prunings(states: Iterable[RunState], keep: str) -> list[Pruning]:
    """What there is to free: runs that have ended and were not pruned as far already."""
    found = []
    for state in states:
        folder = RunFolder(state.run.folder)
        if not state.ended or state.holder is not None or not folder.checkpoint_path.is_dir():
            continue
        before, saved = bytes_below(folder.checkpoint_path), _saved_steps(folder)
        if is_pruned_to(folder, keep) or not saved:
            continue
        steps: tuple[int, ...] = ()
        if keep == WEIGHTS:
            milestones = load_run(folder.path / "run.yaml").checkpoint.milestones
            steps = tuple(step for step in saved if step == saved[-1] or step in milestones)
        after = len(steps) * BYTES_PER_WEIGHT * int(folder.facts()["parameters"])
        found.append(Pruning(folder, keep, steps, before, after))
    return found


def prune(pruning: Pruning) -> None:
    """Do it. Raises ``UserError`` where the run is being trained, or a checkpoint to be kept is damaged; nothing is
    deleted then."""
    folder = pruning.folder
    lock = RunLock(folder.path)
    try:
        ended_at = int((folder.status() or {}).get("step", 0))
        if pruning.keep == WEIGHTS:
            # Only here, since it takes seconds: this imports torch.
            from torchtitan_ext.titan.weights_only import check_whole, keep_weights

            check_whole(folder, pruning.steps)
        mark_pruned(folder, pruning.keep, ended_at, done=False)
        for step in pruning.steps:
            keep_weights(folder, step)
        kept = {f"step-{step}" for step in pruning.steps}
        for path in folder.checkpoint_path.iterdir():
            if path.name not in kept and path.is_dir():
                shutil.rmtree(path)
        mark_pruned(folder, pruning.keep, ended_at, done=True)
    finally:
        lock.release()


def prune_study(states: Iterable[RunState], keep: str, go: bool, say: Callable[[str], None] = print) -> int:
    """Say what pruning would free, and with ``go`` do it. Returns 1 where a run could not be pruned."""
    states = list(states)
    found = prunings(states, keep)
    for one in found:
        say(f"{one.folder.path.name}  {count(one.before)}B, of which {count(one.after)}B stay")
    left = sorted({f"{state.run.name} ({state.state})" for state in states if not state.ended})
    if left:
        say(f"left alone, since they have not ended: {', '.join(left)}")
    freed = sum(one.before - one.after for one in found)
    if not found:
        say("there is nothing to free")
        return 0
    what = "keep the weights of their last step" if keep == WEIGHTS else "keep their records and no checkpoint"
    say(f"{len(found)} runs would {what}, which frees about {count(freed)}B; they can then not be trained on")
    if not go:
        say("nothing was changed; the same command with --yes does it")
        return 0
    failed = 0
    for one in found:
        try:
            prune(one)
        except (UserError, OSError) as error:
            failed += 1
            say(f"{one.folder.path.name} was not pruned: {error}")
    freed = sum(one.before - bytes_below(one.folder.checkpoint_path) for one in found)
    say(f"{len(found) - failed} runs pruned, {count(freed)}B freed")
    return 1 if failed else 0


def _saved_steps(folder: RunFolder) -> list[int]:
    """The steps of its checkpoints, those among them whose pruning was interrupted."""
    names = [re.fullmatch(r"step-(\d+)|\.step-(\d+)\.full", path.name) for path in folder.checkpoint_path.iterdir()]
    return sorted({int(name[1] or name[2]) for name in names if name})
