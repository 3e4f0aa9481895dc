"""The arguments of ``depth compare`` → runs, and what was left out.

An argument is a run folder, a study's folder or file, a folder of TensorBoard event files, or a folder that holds some
of these. A damaged run never takes the others down.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from eval.compare.event_files import START_FOLDER, event_files
from eval.compare.run import FAILED, UNFINISHED, LeftOut, Run
from eval.compare.run_reader import NoFinalLoss, read_event_folder, read_run_folder, without_seed
from torchtitan_ext.errors import UserError
from torchtitan_ext.study.dropped import dropped_runs

STUDY_RECORD = "study.json"
STUDY_FORMAT = 1
_RUN_MARKS = ("facts.json", "run.yaml", "status.json", "metrics.jsonl")
_CHOSEN_BY_TORCHTITAN = ("outputs", "tb")


@dataclass
class Gathered:
    runs: list[Run] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    seen: set[Path] = field(default_factory=set)

    def read(
        self,
        path: Path,
        name: str,
        known: Mapping[str, Any] | None = None,
        label: str | None = None,
        dropped: str | None = None,
    ) -> None:
        """Read one run, or leave it out. ``known`` is what its study's record says of it, as fields of ``Run``;
        ``dropped`` why it was given up by hand, which counts as a failure: nothing bounds the loss it would have had.
        """
        if path.resolve() in self.seen:
            return
        self.seen.add(path.resolve())
        known = known or {}
        try:
            self.runs.append(_as_called(_read(path, label or name, started=not known), name, known, label))
        except NoFinalLoss as error:
            run = _as_called(error.known, name, known, label) if error.known else None
            self._leave_out(name, *_fate(str(error), error.fate, dropped), known, label, run)
        except UserError as error:
            self._leave_out(name, *_fate(str(error), UNFINISHED, dropped), known, label)
        except Exception as error:  # Whatever is wrong with one run must not take the others down.
            self._leave_out(name, f"damaged: {error!r}", UNFINISHED, known, label)

    def _leave_out(
        self, name: str, why: str, fate: str, known: Mapping[str, Any], label: str | None, run: Run | None = None
    ) -> None:
        called = known.get("label", without_seed(label) if label else run.variant if run else None)
        size = known.get("size", run.size if run else None)
        seed = known.get("seed", run.seed if run else None)
        self.left_out.append(LeftOut(name, why, called, size, seed, fate, run))


def _fate(why: str, fate: str, dropped: str | None) -> tuple[str, str]:
    """Why a run has no final loss and what became of it; where it was given up by hand, that."""
    return (why, fate) if dropped is None else (f"dropped by hand: {dropped}", FAILED)


def _as_called(run: Run, name: str, known: Mapping[str, Any], label: str | None) -> Run:
    run = replace(run, **known)
    return replace(run, name=name, label=without_seed(label)) if label else run


def _read(path: Path, name: str, started: bool) -> Run:
    if not path.exists():
        if started:
            raise UserError(f"{path} does not exist")
        raise NoFinalLoss("not started: its folder does not exist", UNFINISHED)
    if any((path / mark).exists() for mark in _RUN_MARKS) or not event_files(path):
        return read_run_folder(path, name)
    return read_event_folder(path, name)


def gather(arguments: Iterable[str]) -> Gathered:
    """Read everything that ``arguments`` name, each a path or ``LABEL=PATH``.

    Raises:
        UserError: an argument does not exist or cannot be read, or the record of a study that it names is damaged.
    """
    gathered = Gathered()
    for argument in arguments:
        try:
            label, path = None, Path(argument)
            if not path.exists() and "=" in argument:
                label, _, rest = argument.partition("=")
                path = Path(rest)
            if not path.exists():
                raise UserError(f"{path} does not exist; give run folders, a study or a folder that holds runs")
            _gather(path, gathered, label)
        except OSError as error:
            raise UserError(f"{argument} cannot be read ({error.strerror}); give what you may read") from error
    return gathered


def _gather(path: Path, gathered: Gathered, label: str | None) -> None:
    if path.is_file():
        path = _study_folder(path)
    if (path / STUDY_RECORD).exists():
        dropped = dropped_runs(path)
        for name, known in _study_runs(path / STUDY_RECORD):
            gathered.read(path / name, name, known, dropped=dropped.get(name))
    elif _is_run(path):
        gathered.read(path, _name(path), label=label)
    else:
        _gather_inside(path, gathered, label)


def _gather_inside(path: Path, gathered: Gathered, label: str | None) -> None:
    """What a folder holds; of this, what is damaged or may not be read does not take the rest down."""
    found = 0
    for sub in sorted(path.iterdir()):
        try:
            if sub.name.startswith(".") or not sub.is_dir() or not (_is_run(sub) or (sub / STUDY_RECORD).exists()):
                continue
            found += 1
            _gather(sub, gathered, label)
        except OSError as error:
            found += 1
            gathered.left_out.append(LeftOut(sub.name, f"cannot be read ({error.strerror})", label))
        except UserError as error:
            gathered.left_out.append(LeftOut(sub.name, str(error), label))
    if not found:
        gathered.left_out.append(LeftOut(str(path), "holds no run folder, study or event file"))


def _name(path: Path) -> str:
    """The folder's name; that of the folder around it where it is one that torchtitan chose."""
    whole = path.resolve()
    while whole.name in _CHOSEN_BY_TORCHTITAN or START_FOLDER.fullmatch(whole.name):
        whole = whole.parent
    return whole.name


def _is_run(path: Path) -> bool:
    return any((path / mark).exists() for mark in _RUN_MARKS) or bool(event_files(path))


def _study_folder(file: Path) -> Path:
    if file.name == STUDY_RECORD:
        return file.parent
    if file.suffix not in (".yaml", ".yml"):
        raise UserError(f"{file} is no folder and no study file; give run folders, a study or a folder of runs")
    from torchtitan_ext.study import load_study

    folder = Path(load_study(file).folder)
    if not (folder / STUDY_RECORD).exists():
        raise UserError(f"{folder} has no {STUDY_RECORD}: the study of {file} was not started; run it first")
    return folder


def _study_runs(file: Path) -> list[tuple[str, dict[str, Any]]]:
    """Name of each run and what the record says of it, as fields of ``Run``."""
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        if record["format"] != STUDY_FORMAT:
            raise UserError(f"{file} has format {record['format']}, this version reads format {STUDY_FORMAT}")
        runs = {str(run["name"]): run for run in record["runs"]}
        label_of = {name: str(run["label"]) for name, run in runs.items()}
        return [
            (
                name,
                {
                    "label": label_of[name],
                    "variant": str(run["variant"]),
                    "size": str(run["size"]),
                    **({} if run.get("seed") is None else {"seed": int(run["seed"])}),
                    "study": str(record["name"]) if record.get("name") else None,
                    "control": run.get("control"),
                    "baseline": label_of.get(run["baseline"]) if run.get("baseline") else None,
                },
            )
            for name, run in runs.items()
        ]
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"{file} is damaged ({error!r}); give the run folders themselves, or run the study again"
        ) from (error)
