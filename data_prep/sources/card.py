"""The card of a data set repository: which files its configurations consist of."""

import re
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

import yaml

from torchtitan_ext.errors import UserError, nearest

CARD = "README.md"
SPLIT = "train"

FINEWEB_LAYOUT = {
    "default": ["data/*/*"],
    "sample-10BT": ["sample/10BT/*"],
    "sample-100BT": ["sample/100BT/*"],
    "sample-350BT": ["sample/350BT/*"],
}
"""Where FineWeb and FineWeb-Edu keep their files, for a copy without its card."""

Layout = Mapping[str, Sequence[str]]
"""Names of configurations with the patterns of their training files, relative to the repository."""


def layout_of(card: str) -> Layout:
    """Read the configurations from the YAML at the head of a card; none where there is no such thing."""
    head = re.match(r"---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(\r?\n|$)", card, re.DOTALL)
    try:
        record = yaml.safe_load(head[1]) if head else None
    except yaml.YAMLError:
        return {}
    configs = record.get("configs") if isinstance(record, dict) else None
    if not isinstance(configs, list):
        return {}
    named = {str(config.get("config_name", "default")): config for config in configs if isinstance(config, dict)}
    return {name: patterns for name, config in named.items() if (patterns := _patterns(config))}


def select(layout: Layout, config: str, names: Sequence[str]) -> list[str]:
    """Return those of ``names``, paths relative to the repository, that belong to ``config``."""
    patterns = [re.compile(_regex(pattern)) for pattern in layout[config]]
    visible = [name for name in names if not any(part.startswith((".", "_")) for part in PurePosixPath(name).parts)]
    return sorted(name for name in visible if name != CARD and any(pattern.fullmatch(name) for pattern in patterns))


def choose(repository: str, layout: Layout, config: str | None, names: Sequence[str]) -> tuple[str, list[str]]:
    """Return a configuration and its files: the one asked for, else ``default``, else the only one that is there.

    Raises:
        UserError: there is none, or more than one to choose from.
    """
    if config is None:
        there = [name for name in layout if select(layout, name, names)]
        if len(there) > 1 and "default" not in there:
            raise UserError(f"{repository} has several configurations; choose one with --config: {', '.join(there)}")
        if not there:
            raise UserError(f"{repository} has no files of the configurations in its {CARD}; give paths of its files")
        config = "default" if "default" in there else there[0]
    if config not in layout:
        raise UserError(
            f"{repository} has no configuration {config!r}; {nearest(config, layout)} Give it with --config"
        )
    chosen = select(layout, config, names)
    if not chosen:
        patterns = ", ".join(layout[config])
        raise UserError(
            f"{repository} has no files {patterns} of configuration {config!r}; download them, or give another --config"
        )
    return config, chosen


def _patterns(config: Mapping[str, object]) -> list[str]:
    """The patterns of the training split in one entry of ``configs``, in any of the forms that cards use."""
    files, folder = config.get("data_files"), config.get("data_dir")
    if files is None:
        return [f"{folder}/**"] if isinstance(folder, str) else []
    if isinstance(files, Mapping):
        files = [{"split": split, "path": path} for split, path in files.items()]
    entries = files if isinstance(files, list) else [files]
    paths = [
        entry.get("path") if isinstance(entry, Mapping) else entry
        for entry in entries
        if not isinstance(entry, Mapping) or entry.get("split", SPLIT) == SPLIT
    ]
    flat = [path for group in paths for path in (group if isinstance(group, list) else [group])]
    prefix = f"{folder}/" if isinstance(folder, str) else ""
    return [prefix + path.removeprefix("./") for path in flat if isinstance(path, str)]


def _regex(pattern: str) -> str:
    """A glob in which ``*`` stays within one folder and ``**`` does not."""
    parts = re.split(r"(\*\*/|\*\*|\*|\?|\[[^]]*\])", pattern)
    known = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return "".join(known.get(part, part if part.startswith("[") else re.escape(part)) for part in parts)
