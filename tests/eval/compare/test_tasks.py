"""Marks in downstream tasks, from the files that ``depth eval`` leaves in a run folder."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from eval.compare.compare import compare
from eval.compare.grouping import make_families
from eval.compare.page_html import to_html
from eval.compare.page_markdown import to_markdown
from eval.compare.results import Results
from eval.compare.sections import report
from eval.compare.sources import gather

from .conftest import Recorded


def evaluated(run: Path, name: str, age: int = 0, step: int = 100, **tasks: dict[str, Any]) -> Path:
    """What ``depth eval --tasks`` writes, ``age`` seconds ago."""
    file = run / "eval" / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps({"format": 1, "run": str(run), "step": step, "precision": "fp32", "tasks": tasks}))
    os.utime(file, (2e9 - age, 2e9 - age))
    return file


def acc(score: float, questions: int = 500, error: float | str = 0.02) -> dict[str, Any]:
    return {"name": "task", "sample_len": questions, "acc": score, "acc_stderr": error}


def results(runs: Path) -> Results:
    gathered = gather([str(runs)])
    return compare(make_families(gathered.runs, gathered.left_out), gathered.left_out)


BASE, GATE = (0.50, 0.52, 0.47), (0.53, 0.54, 0.52)


@pytest.fixture
def study(runs: Path) -> Path:
    for seed in range(3):
        base = Recorded(seed=seed).write(runs / f"s{seed}")
        gate = Recorded(variant="m_gate_kv", seed=seed).write(runs / f"g{seed}")
        evaluated(base, "step-100-tasks.json", hellaswag=acc(BASE[seed], error=0.02 + seed / 1000))
        evaluated(gate, "anything.json", hellaswag=acc(GATE[seed], error=0.03))
    return runs


def test_scores_and_their_differences_by_seed(study: Path) -> None:
    base, gate = results(study).families[0].tasks
    assert (base.label, base.task, base.metric, base.questions, base.runs) == ("standard", "hellaswag", "acc", 500, 3)
    assert base.score == pytest.approx((0.50 + 0.52 + 0.47) / 3)
    assert base.standard_error == pytest.approx(0.021)
    assert base.difference is None
    reference = stats.ttest_rel(GATE, BASE).confidence_interval(0.95)
    assert gate.difference is not None
    assert gate.difference.mean == pytest.approx((0.03 + 0.02 + 0.05) / 3)
    assert (gate.difference.low, gate.difference.high) == pytest.approx(tuple(reference))


def test_the_report_shows_them_in_all_its_files(study: Path) -> None:
    found = results(study)
    page = report(found)
    row = "| `m_gate_kv` | `hellaswag` | `acc` | 500 | 3 | 0.5300 | 0.0300 | +0.0333 | -0.0046 to +0.0713 |"
    assert row in to_markdown(page)
    assert "Downstream tasks" in to_html(page)
    assert json.loads(found.to_json())["families"][0]["tasks"][1]["task"] == "hellaswag"


def test_without_marks_there_is_no_section(runs: Path) -> None:
    Recorded().write(runs / "s")
    Recorded(variant="moda").write(runs / "m")
    found = results(runs)
    assert found.families[0].tasks == []
    assert "Downstream" not in to_markdown(report(found))


def test_the_newest_file_counts_task_by_task(study: Path) -> None:
    evaluated(study / "s0", "z-old.json", age=50, hellaswag=acc(0.9), piqa=acc(0.6))
    evaluated(study / "s0", "a-new.json", age=-50, lambada=acc(0.3))
    found = {row.task: row for row in results(study).families[0].tasks if row.label == "standard"}
    assert found["hellaswag"].score == pytest.approx((0.50 + 0.52 + 0.47) / 3)
    assert (found["piqa"].score, found["piqa"].runs) == (0.6, 1)
    assert found["lambada"].score == 0.3


def test_marks_of_an_earlier_step_and_files_without_tasks_do_not_count(study: Path) -> None:
    evaluated(study / "s0", "step-80.json", age=-50, step=80, hellaswag=acc(0.9))
    (study / "s0" / "eval" / "step-100.json").write_text(json.dumps({"format": 1, "step": 100, "heldout": {}}))
    found = results(study)
    assert found.families[0].tasks[0].score == pytest.approx((0.50 + 0.52 + 0.47) / 3)
    assert found.families[0].groups[0].notes == []


def test_other_numbers_of_questions_are_not_compared(study: Path) -> None:
    """A quick look at ten questions of seed 0 of the variant, later than the whole task."""
    evaluated(study / "g0", "quick.json", age=-50, hellaswag=acc(1.0, questions=10))
    rows = results(study).families[0].tasks
    assert [(row.label, row.questions, row.runs) for row in rows] == [
        ("standard", 500, 3),
        ("m_gate_kv", 500, 2),
        ("m_gate_kv", 10, 1),
    ]
    assert rows[1].difference is not None
    assert rows[1].difference.mean == pytest.approx((0.02 + 0.05) / 2)
    assert rows[2].difference is None


def test_every_metric_with_its_own_error(runs: Path) -> None:
    """As the harness names them: with the task's way to find an answer, without an error, with one that is a word."""
    marks = {
        "sample_len": 5,
        "exact_match,strict": 0.25,
        "exact_match_stderr,strict": 0.1,
        "word_perplexity": 12.5,
        "word_perplexity_stderr": "N/A",
        "f1": float("nan"),
    }
    evaluated(Recorded().write(runs / "s"), "t.json", gsm=marks)
    Recorded(variant="moda").write(runs / "m")
    rows = results(runs).families[0].tasks
    assert [(row.metric, row.score, row.standard_error) for row in rows] == [
        ("exact_match,strict", 0.25, 0.1),
        ("word_perplexity", 12.5, None),
    ]


@pytest.mark.parametrize("text", ["{", '{"tasks": 3, "step": 100, "format": 1, "precision": "fp32"}', '{"tasks": {}}'])
def test_a_damaged_file_is_a_note_and_takes_nothing_down(study: Path, text: str) -> None:
    (study / "g0" / "eval" / "broken.json").write_text(text)
    found = results(study).families[0]
    assert [row.runs for row in found.tasks] == [3, 3]
    assert any("eval/broken.json is damaged" in note for note in found.groups[1].notes)
