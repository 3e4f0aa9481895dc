"""Which files a path, folder or glob stands for. Nothing is passed over without a word."""

import glob
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from data_prep.sources import card
from data_prep.sources.compressed import CODECS
from torchtitan_ext.errors import UserError

PARQUET = (".parquet",)
JSON_LINES = (".jsonl", ".json", ".ndjson")
TEXT = (".txt", ".text", ".md")

ABOUT = ("readme", "license", "licence", "notice", "citation", "changelog", "contributing", "authors", "copying")
"""What the names of files about the data begin with."""
METADATA = ("dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json", "croissant.json")
CODE = [".py", ".sh", ".yaml", ".yml", ".toml", ".cfg", ".ini", ".css", ".html", ".ipynb"]
PICTURES = [".png", ".jpg", ".jpeg", ".gif", ".svg", ".pdf"]
NO_DATA = frozenset(["", *CODE, *PICTURES, ".bib", ".cff", ".lock", ".sha256", ".md5", ".crc", ".log"])
"""Suffixes of files that lie beside data and are no documents."""


@dataclass
class Choice:
    """Files in order, the configuration they belong to where there is one, and what the user must know."""

    files: list[Path] = field(default_factory=list)
    config: str | None = None
    notes: list[str] = field(default_factory=list)


def kind(path: Path) -> tuple[str, ...] | None:
    """What ``path`` holds, by its name: ``PARQUET``, ``JSON_LINES`` or ``TEXT``, or none of them."""
    packed = path.suffix.lower() in CODECS
    suffix = Path(path.stem if packed else path.name).suffix.lower()
    kinds = (JSON_LINES, TEXT) if packed else (PARQUET, JSON_LINES, TEXT)
    return next((suffixes for suffixes in kinds if suffix in suffixes), None)


def choose(patterns: Sequence[str], config: str | None) -> Choice:
    """Find the files, in the order of the patterns, sorted within each.

    Of a folder or glob, what is plainly no data (a README, a licence, code, pictures; text beside Parquet or JSON
    lines) is left out and named in a note. A folder with the card of a repository, or in the layout of FineWeb, gives
    the files of one configuration.

    Raises:
        UserError: nothing matches, a file is named twice, cannot be reached, or is of no known kind.
    """
    choice = Choice()
    seen: dict[Path, Path] = {}
    for pattern in patterns:
        for path in _files(pattern, config, choice):
            if kind(path) is None:
                raise UserError(_unknown_kind(path))
            before = seen.setdefault(path.resolve(), path)
            if before is not path:
                raise UserError(f"{path} is named twice in the sources, also as {before}; name each file once")
            choice.files.append(path)
    if config is not None and choice.config is None:
        raise UserError(
            f"--config is for fineweb-edu and for folders with the card of a repository; {patterns[0]} is not one"
        )
    return choice


def _files(pattern: str, config: str | None, choice: Choice) -> list[Path]:
    path = Path(pattern)
    if path.is_dir():
        found = files_below(path)
        repository = _repository(path, config, found)
        if repository is not None:
            choice.config, names = repository
            choice.notes.append(
                f"{pattern}: configuration {choice.config!r}, {len(names)} of {len(found)} files (choose with --config)"
            )
            return [path / name for name in names]
        return _data(pattern, found, choice)
    # A path with brackets in its name is itself before it is a pattern.
    if os.path.lexists(path) or not glob.has_magic(pattern):
        return [_reachable(path)]
    names = sorted(glob.glob(pattern, recursive=True))
    found = []
    for name in map(Path, names):
        if not name.is_dir():
            found.append(_reachable(name))
        elif "**" not in Path(pattern).parts:
            found += files_below(name)
    # The last part of the pattern is a name: the user means these files.
    return found if not glob.has_magic(path.name) and found else _data(pattern, found, choice)


def files_below(folder: Path) -> list[Path]:
    """The files below ``folder`` but for hidden ones, sorted; those behind links to folders too.

    Raises:
        UserError: naming what cannot be reached.
    """
    return sorted(_walk(folder))


def _walk(folder: Path) -> Iterator[Path]:
    for where, folders, names in os.walk(folder, onerror=_raise, followlinks=True):
        inside = Path(where)
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in folders:
            if (inside / name).is_symlink() and inside.resolve().is_relative_to((inside / name).resolve()):
                raise UserError(f"{inside / name} is a link to a folder that it lies in; remove the link")
        yield from (_reachable(inside / name) for name in names if not name.startswith("."))


def _raise(error: OSError) -> None:
    raise error


def _reachable(path: Path) -> Path:
    if path.is_symlink() and not path.exists():
        raise UserError(
            f"{path} is a link to {os.readlink(path)}, which does not exist; download it, or remove the link"
        )
    if not path.exists():
        raise UserError(
            f"no file matches {str(path)!r}; give paths, folders or globs of local files, 'fineweb-edu' or 'builtin'"
        )
    if not path.is_file():
        raise UserError(f"{path} is not a regular file; leave it out")
    if not os.access(path, os.R_OK):
        raise UserError(f"{path} may not be read by this user; change its permissions, or leave it out")
    return path


def _data(pattern: str, found: Sequence[Path], choice: Choice) -> list[Path]:
    """Leave out what is plainly no data, and say so."""
    records = any(kind(path) in (PARQUET, JSON_LINES) for path in found if not _about(path))
    tables = any(kind(path) is PARQUET for path in found)
    left_out = [
        path
        for path in found
        if _about(path)
        or path.suffix.lower() in NO_DATA
        or (records and kind(path) is TEXT)
        or (tables and path.suffix.lower() == ".json")
    ]
    aside = set(left_out)
    data = [path for path in found if path not in aside]
    if not data:
        beside = (
            f", only {_listed(left_out)}, which is taken for no data; name it itself to read it" if left_out else ""
        )
        raise UserError(
            f"no file matches {pattern!r}{beside}; "
            "give paths, folders or globs of local files, 'fineweb-edu' or 'builtin'"
        )
    if left_out:
        choice.notes.append(f"{pattern}: {_listed(left_out)} left out as no data; name a file itself to read it")
    return data


def _about(path: Path) -> bool:
    return path.name.lower().startswith(ABOUT) or path.name.lower() in METADATA


def _listed(paths: Sequence[Path]) -> str:
    more = f" and {len(paths) - 5} more" if len(paths) > 5 else ""
    return ", ".join(path.name for path in paths[:5]) + more


def _repository(folder: Path, config: str | None, found: Sequence[Path]) -> tuple[str, list[str]] | None:
    """The configuration and files of a folder in the layout of a repository; None where it is just a folder."""
    names = [path.relative_to(folder).as_posix() for path in found]
    path = folder / card.CARD
    layout: card.Layout = card.layout_of(path.read_text(errors="replace")) if path.is_file() else {}
    if not layout:
        there = [name for name in card.FINEWEB_LAYOUT if card.select(card.FINEWEB_LAYOUT, name, names)]
        if config is None and len(there) < 2:
            return None
        layout = card.FINEWEB_LAYOUT
    return card.choose(str(folder), layout, config, names)


def _unknown_kind(path: Path) -> str:
    known = " ".join((*PARQUET, *JSON_LINES, *TEXT))
    packed = " ".join(CODECS)
    hint = "unpack it, or leave it out; " if path.suffix.lower() in (*CODECS, ".xz", ".zip", ".tar", ".tgz") else ""
    return (
        f"{path}: cannot tell what kind of file it is; {hint}its name must end in one of {known}, text also "
        f"compressed: {packed}"
    )
