"""Token shards that are no longer what was prepared, found at a bounded cost for each start of a run.

A run compares every shard with its SHA-256 once. Later it reads again the shards whose size or times are not those of
then, and of the others, longest ago first, as many as fit ``BUDGET``: a small data set is compared whole every time.
"""

import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from data_prep.dataset import AGAIN, TokenDataset, check_digest
from data_prep.manifest import MANIFEST, Shard
from torchtitan_ext.errors import UserError

BUDGET = 4 << 30
"""Bytes to read in one start although nothing says that they have changed."""

Compared = list[float]
"""When a shard last equalled its SHA-256: the file's modification time and change time in ns, and the time in s."""


def copy_name(dataset: TokenDataset) -> str:
    """The same for all processes that read the same files, different for hosts with copies of their own."""
    times = (dataset.path / MANIFEST).stat()
    return f"{times.st_mtime_ns}-{times.st_ctime_ns}"


def due(dataset: TokenDataset, compared: Mapping[str, Compared]) -> list[Shard]:
    """The shards to compare now. ``compared``: what ``compare`` returned earlier, by file.

    Raises:
        UserError: naming a shard that is missing.
    """
    changed: list[Shard] = []
    unchanged: list[Shard] = []
    for shard in dataset.shards():
        known = compared.get(shard.file)
        same = known is not None and known[:2] == _times(dataset.path / shard.file)
        (unchanged if same else changed).append(shard)
    spent = sum(shard.size for shard in changed)
    for shard in sorted(unchanged, key=lambda shard: (compared[shard.file][2], shard.file)):
        # A shard that is larger than all of the budget gets its turn, too.
        if spent and spent + shard.size > BUDGET:
            break
        spent += shard.size
        changed.append(shard)
    return changed


def compare(dataset: TokenDataset, shards: Iterable[Shard]) -> dict[str, Compared]:
    """Compare shards with their SHA-256, and say when.

    Raises:
        UserError: naming every shard that differs.
    """
    found: dict[str, Compared] = {}
    wrong = []
    for shard in shards:
        path = dataset.path / shard.file
        try:
            # Before it is read: what is written meanwhile then counts as a change.
            times = _times(path)
            check_digest(path, shard.sha256)
            found[shard.file] = [*times, time.time()]
        except UserError as error:
            wrong.append(str(error))
        except OSError as error:
            wrong.append(_unreadable(path, error))
    if wrong:
        raise UserError("\n".join(wrong))
    return found


def _times(path: Path) -> list[float]:
    try:
        stat = path.stat()
    except OSError as error:
        raise UserError(_unreadable(path, error)) from error
    # Nobody can set the change time: it tells of files put in place with their old modification time, too.
    return [stat.st_mtime_ns, stat.st_ctime_ns]


def _unreadable(path: Path, error: OSError) -> str:
    return f"{path} cannot be read ({error.strerror}); {AGAIN}"
