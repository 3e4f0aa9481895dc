"""Downstream tasks as the harness loads them: what they draw at random, and how they fail. All on local files."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from data_prep.dataset import TokenDataset
from eval.evaluate.processes import Processes
from eval.evaluate.report import show
from torchtitan_ext.errors import UserError
from torchtitan_ext.run_folder import RunFolder
from torchtitan_ext.titan.restore import restore

pytest.importorskip("lm_eval", reason="needs the extra `eval`: pip install 'torchtitan-ext[eval]'")

from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks import TaskManager

from eval.evaluate.harness import HarnessModel
from eval.evaluate.tasks import Tasks, check_names

DepthEval = Callable[..., int]
TASK = """
dataset_path: json
dataset_kwargs: {{data_files: {{train: {data}, test: {data}}}, cache_dir: {cache}}}
output_type: loglikelihood
fewshot_split: train
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
num_fewshot: 2
metric_list: [{{metric: perplexity}}, {{metric: acc}}]
"""
"""Two examples that are drawn from twelve stand in front of each question."""
FUNCTIONS = """
import random

import numpy


def question(doc):
    return f"{doc['question']} {random.random()} {numpy.random.rand()}"


def no_message(doc):
    raise ValueError
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    data = tmp_path / "questions.jsonl"
    lines = [{"question": f"{number} plus {number}", "answer": str(2 * number)} for number in range(12)]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    (tmp_path / "needy.py").write_text("import nowhere_to_be_found\n")
    (tmp_path / "script.py").write_text("")
    add_task(tmp_path, "drawn")
    add_task(tmp_path, "drawn_text", "doc_to_text: !function functions.question")
    return tmp_path


def add_task(folder: Path, name: str, *keys: str) -> None:
    """A task like ``TASK`` with ``keys`` (lines of YAML) in place of its own."""
    own = {key.split(":")[0] for key in keys}
    lines = TASK.format(data=folder / "questions.jsonl", cache=folder / "cache").strip().splitlines()
    kept = [line for line in lines if line.split(":")[0] not in own]
    (folder / f"{name}.yaml").write_text("\n".join([f"task: {name}", *kept, *keys]) + "\n")


@pytest.fixture(scope="module")
def model(standard: RunFolder, dataset: Path) -> HarnessModel:
    data = TokenDataset.open(dataset)
    return HarnessModel(restore(standard, device=torch.device("cpu")), data.tokenizer(), data.eot_id, Processes())


DRAWN = ["drawn", "drawn_text"]


def test_what_is_drawn_is_the_same_every_time_and_as_the_harness_draws_it(model: HarnessModel, folder: Path) -> None:
    loaded, again = (Tasks(DRAWN, folder=str(folder)) for _ in range(2))
    first = loaded.run(model, None).marks
    assert first == loaded.run(model, None).marks, "the second of two models"
    assert first == again.run(model, None).marks
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    settings = {"log_samples": False, "bootstrap_iters": 1000}
    expected = simple_evaluate(model, tasks=DRAWN, task_manager=manager, **settings)["results"]
    for task in DRAWN:
        assert first[task]["perplexity"] == expected[task]["perplexity,none"]


@pytest.mark.slow
def test_marks_do_not_depend_on_the_number_of_processes(
    standard: RunFolder, depth_eval: DepthEval, folder: Path
) -> None:
    marks = []
    for processes in (1, 2):
        out = folder / f"{processes}.json"
        options = ["--task-folder", folder, "--nproc", processes, "--out", out]
        assert depth_eval(standard.path, "--tasks", *DRAWN, *options) == 0
        marks.append(json.loads(out.read_text())["tasks"])
    assert marks[0] == marks[1]
    assert marks[0]["drawn"]["perplexity"] > 1


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (["dataset_path: {folder}/script.py", "dataset_kwargs: {{}}"], "Dataset scripts are no longer supported"),
        (["dataset_path: {folder}/nowhere"], "cannot load --tasks bad: "),
        (["doc_to_text: !function needy.question"], "No module named 'nowhere_to_be_found'; install what is missing"),
        (["doc_to_text: !function functions.no_message"], "cannot load --tasks bad: ValueError"),
        (["unsafe_code: true"], "bad runs code that the model writes, which depth eval does not; leave it out"),
        (["doc_to_image: question"], "bad shows the model more than text"),
    ],
)
def test_a_task_that_cannot_be_done_is_refused_in_one_line(
    keys: list[str], says: str, model: HarnessModel, folder: Path
) -> None:
    add_task(folder, "bad", *(key.format(folder=folder) for key in keys))
    with pytest.raises(UserError, match=re.escape(says)) as caught:
        Tasks(["bad"], folder=str(folder)).run(model, None)
    assert "\n" not in str(caught.value)


def test_names_that_are_no_task() -> None:
    """Among them an empty one, and a pattern, which the harness would match but not load."""
    known = ["arc_easy", "hellaswag", "piqa"]
    check_names(["piqa", "arc_easy"], known)
    for name, says in {
        "": "--tasks '': neither lm-evaluation-harness nor --task-folder has such a task; choose from: hellaswag",
        "arc_eazy": "did you mean 'arc_easy'?",
        "arc_*": "--tasks arc_*: neither",
        "zzz": "choose from: hellaswag",
    }.items():
        with pytest.raises(UserError, match=re.escape(says)) as caught:
            check_names(["piqa", name], known)
        assert "\n" not in str(caught.value)


def test_a_standard_error_stands_beside_its_own_metric(capsys: pytest.CaptureFixture[str]) -> None:
    """The marks of a task with two ways to find an answer, as the harness names them."""
    marks = {
        "exact_match,strict-match": 0.25,
        "exact_match_stderr,strict-match": 0.0625,
        "exact_match,flexible-extract": 0.5,
        "exact_match_stderr,flexible-extract": 0.125,
        "acc": 0.75,
        "acc_stderr": "N/A",
    }
    about = {"run": "r", "step": 1, "size": "debug", "variant": "standard", "precision": "fp32"}
    show({**about, "tasks": {"gsm8k": marks}}, Path("out.json"))
    rows = [line.split()[1:] for line in capsys.readouterr().out.splitlines() if line.startswith("gsm8k")]
    assert [row[1:] for row in rows] == [["0.2500", "0.0625"], ["0.5000", "0.1250"], ["0.7500"]]
