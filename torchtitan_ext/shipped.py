"""The run and study files that come with the project, in a checkout and in an installed wheel."""

from pathlib import Path

RUN_FILES = Path(__file__).resolve().parent.parent / "train_configs"


def found(argument: str) -> str:
    """A command's argument, with the project's own file for ``train_configs/…`` where there is none in this folder."""
    path = Path(argument)
    if path.parts[:1] != ("train_configs",) or path.exists():
        return argument
    own = RUN_FILES.joinpath(*path.parts[1:])
    return str(own) if own.is_file() else argument
