"""A prepared data set that every room's tests may use."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.rotation import VARIABLE, decide


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The text that comes with Python: 658 thousand tokens in 229 documents for training, 8 documents held out."""
    out = tmp_path_factory.mktemp("data") / "builtin"
    command = [sys.executable, "-m", "torchtitan_ext.cli", "prep", "builtin", "--tokenizer", "bpe:512"]
    subprocess.run([*command, "--heldout-fraction", "0.05", "--out", str(out)], check=True)
    return out


def pytest_report_header() -> str:
    return f"{VARIABLE}={decide()} chooses the models that are trained (tests/rotation.py)"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the tests that start training processes: run last, they would keep one worker busy alone."""
    items.sort(key=lambda item: "slow" not in item.keywords)


@pytest.fixture(scope="session", params=["ENOSYS", "ENOLCK"])
def without_locks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process for which no file system has ``flock``, as some shared ones are mounted."""
    folder = tmp_path_factory.mktemp("without_locks")
    code = f"#include <errno.h>\nint flock(int file, int kind) {{ errno = {request.param}; return -1; }}\n"
    (folder / "flock.c").write_text(code)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", "flock.so", "flock.c"], cwd=folder, check=True)
    return {"LD_PRELOAD": str(folder / "flock.so")}
