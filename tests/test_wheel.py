"""The installed wheel: the commands work in an empty folder, without a checkout, and find the project's own files."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from torchtitan_ext.shipped import RUN_FILES, found

ROOT = Path(__file__).resolve().parent.parent
CONTENTS = ("torchtitan_ext", "data_prep", "launch", "eval", "train_configs")
FILES = ("pyproject.toml", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The content of the wheel that this source makes."""
    base = tmp_path_factory.mktemp("wheel")
    for name in CONTENTS:
        shutil.copytree(ROOT / name, base / "source" / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, base / "source" / name)
    command = [sys.executable, "-m", "pip", "wheel", str(base / "source"), "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", str(base)], check=True, capture_output=True)
    (wheel,) = base.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(base / "site")
    return base / "site"


@pytest.mark.slow
def test_a_shipped_run_file_is_found_in_an_empty_folder(installed: Path, dataset: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(installed)}

    def depth(*arguments: str) -> str:
        command = [sys.executable, "-m", "torchtitan_ext.cli", *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout

    arguments = ("train_configs/fineweb_100m.yaml", "--data.path", str(dataset), "--print-config", "--nproc", "1")
    assert "size: 100M" in depth("train", *arguments)
    study = "train_configs/studies/books_1m.yaml"
    assert "standard-1.2M" in depth("study", "plan", study, "--set.data.path", str(dataset), "--nproc", "1")
    where = subprocess.run(
        [sys.executable, "-c", "import launch.torchrun as t; print(t.__file__)"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert Path(where.stdout.strip()).is_relative_to(installed)
    assert not list(tmp_path.iterdir())


def test_a_file_of_the_users_own_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert found("train_configs/base.yaml") == str(RUN_FILES / "base.yaml")
    for argument in ("train_configs/none.yaml", "base.yaml", "--nproc", ""):
        assert found(argument) == argument
    (tmp_path / "train_configs").mkdir()
    (tmp_path / "train_configs" / "base.yaml").touch()
    assert found("train_configs/base.yaml") == "train_configs/base.yaml"
