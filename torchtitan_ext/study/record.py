"""What a study leaves in its folder, and what keeps two studies from sharing one.

``study.json`` is for the tools that read the study's runs: ``{"format": 1, "name", "baseline", "runs": [{"name",
"label", "variant", "size", "seed", "lr", "control", "baseline"}]}``. The study's ``baseline`` is the label of an entry,
a run's is the name of a run. ``study.yaml`` is the study itself, as a study file.
"""

import json
from operator import attrgetter
from pathlib import Path
from typing import Any

from torchtitan_ext.errors import UserError
from torchtitan_ext.files import write_file
from torchtitan_ext.older import RETIRED_KEYS
from torchtitan_ext.resolve import ResolvedRun
from torchtitan_ext.run_file import load_run
from torchtitan_ext.run_file.schema import fields
from torchtitan_ext.run_file.yaml_text import dump
from torchtitan_ext.run_folder import RunFolder
from torchtitan_ext.start import check_same_run
from torchtitan_ext.study.planned import Plan, PlannedRun

FORMAT = 1
RECORD = "study.json"
STUDY = "study.yaml"
RECIPE = [
    *("training.steps", "training.precision", "training.max_grad_norm", "groups"),
    *(key for key in fields() if key.startswith("optimizer.")),
]
"""Run keys that change the result of a run and are no part of its identity."""
COLUMNS = ("name", "label", "variant", "size", "seed", "lr", "control", "baseline")


def write_record(plan: Plan) -> None:
    """Write ``study.json`` and ``study.yaml`` into the study's folder, for the plan that is about to be run.

    Runs recorded earlier that the plan no longer has stay recorded while their folders exist.
    """
    study = plan.study
    check_folder(plan)
    study.folder.mkdir(parents=True, exist_ok=True)
    rows = [_row(run) for run in plan.runs]
    names = {row["name"] for row in rows}
    earlier = _read(plan)["runs"] if (study.folder / RECORD).exists() else []
    rows += [row for row in earlier if row["name"] not in names and (study.folder / row["name"]).exists()]
    record = {"format": FORMAT, "name": study.name, "baseline": study.baseline, "runs": rows}
    _write_anew(study.folder / RECORD, (json.dumps(record, indent=1) + "\n").encode())
    # What was given and no defaults, some of which may not be written beside others.
    text = study.model_dump(exclude_unset=True, exclude_none=True) | {
        "name": study.name,
        "base": str(study.base_file.resolve()),
        "folder": str(study.folder.resolve()),
    }
    _write_anew(study.folder / STUDY, dump(text).encode())


def _write_anew(path: Path, data: bytes) -> None:
    """Write what is not there already: many jobs begin at once and would write the same."""
    if not path.exists() or path.read_bytes() != data:
        write_file(path, data)


def check_folder(plan: Plan) -> None:
    """Raise ``UserError`` where the study's folder, or one of its runs' folders, belongs to something else."""
    study = plan.study
    where = f"{study.origin('folder')}: {study.folder}"
    if study.folder.exists() and not study.folder.is_dir():
        raise UserError(f"{where} is a file; choose another folder")
    if RunFolder(study.folder).exists:
        raise UserError(f"{where} is the folder of a run; choose another folder, or another name for the study")
    if (study.folder / RECORD).exists():
        _check_record(plan, where)
    else:
        taken = [run.name for run in plan.runs if run.folder.exists()]
        if taken:
            raise UserError(f"{where} already holds {taken[0]}, from before this study; choose another folder")
    for run in plan.runs:
        if run.resolved is not None and RunFolder(run.folder).exists:
            check_same_run(run.resolved, RunFolder(run.folder))
            _check_same_recipe(run, run.resolved)


def _check_same_recipe(run: PlannedRun, resolved: ResolvedRun) -> None:
    """A run folder may go on with another recipe, but in a study that would be an unfair run, or one left as it was."""
    begun = load_run(run.folder / "run.yaml", retired=RETIRED_KEYS)
    for name in RECIPE:
        before, now = (attrgetter(name)(one) for one in (begun, resolved.run))
        if before != now:
            raise UserError(
                f"{run.folder} was begun with {name} {before}, and the study now gives {now}; undo the change, or "
                "choose another name or folder for the study"
            )


def _check_record(plan: Plan, where: str) -> None:
    record = _read(plan)
    study = plan.study
    for key, own in {"name": study.name, "baseline": study.baseline}.items():
        if record[key] != own:
            raise UserError(
                f"{where} belongs to another study, whose {key} is {record[key]!r}, not {own!r}; choose another folder"
            )
    earlier = {row["name"]: row for row in record["runs"]}
    for run in plan.runs:
        row = earlier.get(run.name, _row(run))
        for key, own in _row(run).items():
            if row[key] != own:
                raise UserError(
                    f"{where} belongs to another study, whose {run.name} has {key} {row[key]!r}, not {own!r}; choose "
                    "another folder"
                )


def _row(run: PlannedRun) -> dict[str, Any]:
    return {column: getattr(run, column) for column in COLUMNS}


def _read(plan: Plan) -> dict[str, Any]:
    path = plan.study.folder / RECORD
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is damaged: {error}; delete it to have it written again") from None
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise UserError(f"{path} is not a study record of format {FORMAT}; choose another folder for the study")
    return record
