"""How much disk the checkpoints of runs take."""

from pathlib import Path


def bytes_below(folder: Path) -> int:
    """Bytes of the files in ``folder`` and below; those that vanish meanwhile are not counted."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            continue
    return total


class Sizes:
    """Bytes of checkpoint folders, counted again only when a checkpoint has come or gone."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[int, int]] = {}

    def of(self, checkpoints: Path) -> int:
        try:
            changed = checkpoints.stat().st_mtime_ns
        except FileNotFoundError:
            return 0
        if checkpoints not in self._known or self._known[checkpoints][0] != changed:
            self._known[checkpoints] = changed, bytes_below(checkpoints)
        return self._known[checkpoints][1]
