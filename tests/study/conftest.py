"""A folder with a base run file and prepared text, which is the current folder while a test runs.

The base trains the size `debug` (4 layers of width 64, 4 heads of 16, 2 of them for keys and values, feed-forward 192)
for 1,000 steps of 512 tokens, in windows of 64. The vocabulary has 512 tokens. By hand, for the standard model:

    attention   2·64·64 + 2·64·(2·16)            12,288
    feed-forward                   3·64·192      36,864
    norms                          2·64             128
    4 layers                  4 · 49,280        197,120
    last norm and embedding   64 + 512·64        32,832      in all 229,952

and for what `m_gate_kv` adds in 3 of the layers: 64·64 for M's projection to keys and values, 2·64·64 for the gate:
3 · 12,288 = 36,864, in all 266,816.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from torchtitan_ext.errors import UserError
from torchtitan_ext.run_file import dump_run
from torchtitan_ext.run_folder import RunFolder
from torchtitan_ext.study import Plan, PlannedRun, Study, load_study, plan_study, write_record

BASE = """\
model:
  size: debug
data:
  path: text
  seq_len: 64
training:
  steps: 1000
  batch_tokens: 512
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, dataset: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("text").symlink_to(dataset)
    Path("base.yaml").write_text(BASE)
    return tmp_path


@pytest.fixture
def load() -> Callable[..., Study]:
    """Write ``text`` to ``s.yaml`` behind a first line that names the base, and load it."""

    def write_and_load(text: str, *overrides: str) -> Study:
        Path("s.yaml").write_text(f"base: base.yaml\n{text}\n")
        return load_study("s.yaml", overrides)

    return write_and_load


@pytest.fixture
def plan(load: Callable[..., Study]) -> Callable[..., Plan]:
    """The plan of such a study, on 2 processes."""
    return lambda text, *overrides: plan_study(load(text, *overrides), ranks=2)


@pytest.fixture
def message(plan: Callable[..., Plan]) -> Callable[..., str]:
    """The one line of the error that such a study gives."""

    def error_of(text: str, *overrides: str) -> str:
        with pytest.raises(UserError) as error:
            plan(text, *overrides)
        line = str(error.value)
        assert line.splitlines() == [line]
        return line

    return error_of


@pytest.fixture
def train() -> Callable[..., None]:
    """Leave the folder of a run that took ``seconds`` per step at each logged step."""

    def write(run: PlannedRun, seconds: list[float], state: str = "finished") -> None:
        assert run.resolved is not None
        shutil.rmtree(run.folder, ignore_errors=True)
        folder = RunFolder(run.folder)
        folder.create()
        folder.write_run(dump_run(run.resolved.run))
        folder.write_facts(run.resolved.facts())
        for number, time in enumerate(seconds, 1):
            folder.append_metrics(10 * number, {"time_metrics/end_to_end(s)": time})
            folder.append_metrics(10 * number, {"heldout/loss": 5.0})
        folder.write_status(state, run.resolved.steps, run.resolved.steps)

    return write


@pytest.fixture
def replan() -> Callable[[], Plan]:
    """The plan of the study that was loaded last, made anew once its runs' folders belong to it."""

    def plan_again() -> Plan:
        study = load_study("s.yaml")
        if not study.folder.exists():
            write_record(plan_study(study, ranks=2))
        return plan_study(study, ranks=2)

    return plan_again
