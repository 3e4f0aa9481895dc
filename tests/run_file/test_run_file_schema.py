"""The schema in words, and what it does without a file."""

import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

import torchtitan_ext.run_file
from torchtitan_ext.run_file import KeyHelp, Run, describe_schema


def test_every_key_is_described_in_one_line() -> None:
    rows = describe_schema()
    assert len({row.key for row in rows}) == len(rows)
    for row in rows:
        assert all(row)
        assert "\n" not in "".join(row)


@pytest.mark.parametrize(
    ("key", "kind", "default"),
    [
        ("extends", "text", "none"),
        ("name", "text", "the file's name without its ending"),
        ("folder", "text", "runs/{name}"),
        ("model.size", "text", "required"),
        ("model.layers", "a whole number greater than 0 (or null)", "null"),
        ("depth.<option>", "a number, or true or false, or text", "the variant's"),
        ("groups.<group>.<setting>", "a number at least 0", "the variant's"),
        ("data.seq_len", "a whole number greater than 0 and a multiple of 8", "1024"),
        ("training.precision", "one of auto, bf16, fp32", "auto"),
        ("training.compile", "true or false", "false"),
        ("optimizer.beta2", "a number at least 0 and less than 1 (or null)", "null"),
        ("optimizer.decay_fraction", "a number at least 0 and at most 1 (or null)", "null"),
        ("checkpoint.milestones", "a list, each a whole number greater than 0", "[]"),
    ],
)
def test_types_and_defaults_in_words(key: str, kind: str, default: str) -> None:
    row = next(row for row in describe_schema() if row.key == key)
    assert row == KeyHelp(key, kind, default, row.description)


def test_a_run_built_in_code_is_checked_too() -> None:
    sections: dict[str, object] = {"name": "a", "model": {"size": "10M"}, "data": {"path": "d"}}
    run = Run.model_validate(sections | {"training": {"steps": 1}})
    assert (run.folder, run.origin("training.steps")) == ("runs/a", "run")
    for training in ({}, {"steps": 1, "tokens": 1}, {"steps": 1, "batch_tokens": 100}, {"steps": 1, "stepz": 1}):
        with pytest.raises(ValidationError):
            Run.model_validate(sections | {"training": training})
    with pytest.raises(ValidationError):
        Run.model_validate(sections | {"training": {"steps": 1}, "depth": {"a.b": 1}})
    for groups in ({"a": 1}, {"a.rate": 1}, {"a.lr": -1}):
        with pytest.raises(ValidationError):
            Run.model_validate(sections | {"training": {"steps": 1}, "groups": groups})


def test_run_files_need_no_torch() -> None:
    code = "import sys, torchtitan_ext.run_file; sys.exit('torch' in sys.modules)"
    root = Path(torchtitan_ext.run_file.__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=root).returncode == 0
