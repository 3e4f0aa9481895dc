"""What ``depth export`` refuses, before it writes anything."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from torchtitan_ext.errors import UserError
from torchtitan_ext.run_folder import RunFolder

Command = Callable[..., int]


def refused(depth_export: Command, *arguments: object) -> str:
    with pytest.raises(UserError) as caught:
        depth_export(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_folder_that_is_no_run_and_a_step_that_is_not_there(
    standard: RunFolder, depth_export: Command, tmp_path: Path
) -> None:
    assert "is not a run folder" in refused(depth_export, tmp_path, "--out", tmp_path / "out")
    message = refused(depth_export, standard.path, "--step", 11, "--out", tmp_path / "out")
    assert message == f"{standard.path} has no checkpoint of step 11; there are steps 10"
    assert not list(tmp_path.iterdir())


def test_a_damaged_checkpoint(standard: RunFolder, depth_export: Command, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(standard.path, run)
    shard = next((run / "checkpoint" / "step-10").glob("*.distcp"))
    size = shard.stat().st_size
    os.truncate(shard, size // 2)
    assert f"{shard} has {size // 2} bytes, {size} were written" in refused(depth_export, run, "--out", tmp_path / "a")
    # As long as it was, but not what it was: found when it is read, and nothing is left behind.
    shard.write_bytes(bytes(size))
    assert "cannot be read" in refused(depth_export, run, "--out", tmp_path / "a")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_folder_that_is_taken(standard: RunFolder, depth_export: Command, tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("years of work")
    message = refused(depth_export, standard.path, "--out", tmp_path / "thesis")
    assert message == f"{tmp_path / 'thesis'} is there already; remove it, or choose another one with --out"
    assert (tmp_path / "thesis" / "chapter.tex").read_text() == "years of work"
    file = tmp_path / "thesis" / "chapter.tex"
    assert "is there already" in refused(depth_export, standard.path, "--out", file)
    assert "cannot be written to" in refused(depth_export, standard.path, "--out", file / "below")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    assert "is there already" in refused(depth_export, standard.path, "--out", tmp_path / "link")


def test_a_disk_that_is_full(
    standard: RunFolder, depth_export: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 192 + 2 * 64
    assert 4 * layer + 64 + 512 * 64 == 229_952
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=4 * 229_952 - 1))
    assert "needs 0.0 GB, and 0.0 GB are free there; make room" in refused(
        depth_export, standard.path, "--out", tmp_path / "out"
    )
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=4 * 229_952))
    assert depth_export(standard.path, "--out", tmp_path / "out") == 0


def test_a_data_set_that_moved_changed_or_is_another(
    standard: RunFolder, dataset: Path, odd_dataset: Path, depth_export: Command, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(standard.path, run)
    text = (run / "run.yaml").read_text()
    (run / "run.yaml").write_text(text.replace(str(dataset), str(tmp_path / "gone")))
    out = tmp_path / "out"
    message = refused(depth_export, run, "--out", out)
    assert message.startswith(f"{tmp_path / 'gone' / 'manifest.json'} is missing")
    assert message.endswith("--data")
    assert "is not the data set that the run was trained on" in refused(
        depth_export, run, "--data", odd_dataset, "--out", out
    )
    # Two small files are all it takes from a data set.
    moved = tmp_path / "moved"
    moved.mkdir()
    for name in ("manifest.json", "tokenizer.json"):
        shutil.copy(dataset / name, moved)
    tokenizer = json.loads((moved / "tokenizer.json").read_text())
    (moved / "tokenizer.json").write_text(json.dumps({**tokenizer, "truncation": None}))
    assert "its SHA-256 differs" in refused(depth_export, run, "--data", moved, "--out", out)
    assert not out.exists()
    shutil.copy(dataset / "tokenizer.json", moved)
    assert depth_export(run, "--data", moved, "--out", out) == 0
