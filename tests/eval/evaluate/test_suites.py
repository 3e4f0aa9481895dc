"""Suites of tasks: the harness's own task files with our settings, on small data of the real data sets' columns."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from data_prep.dataset import TokenDataset
from eval.evaluate.processes import Processes
from eval.evaluate.suites import SUITES
from torchtitan_ext.run_folder import RunFolder
from torchtitan_ext.titan.restore import restore

pytest.importorskip("lm_eval", reason="needs the extra `eval`: pip install 'torchtitan-ext[eval]'")

import lm_eval
from lm_eval.api.instance import Instance

from eval.evaluate.harness import HarnessModel
from eval.evaluate.tasks import Tasks

MakeRun = Callable[..., RunFolder]
DepthEval = Callable[..., int]
HARNESS = Path(lm_eval.__file__).parent / "tasks"
QUESTIONS, EXAMPLES = 7, 14
WORDS = ("class", "return", "import", "method", "list", "file", "error", "value", "name", "text", "index", "loop")
WORDS += ("tuple", "module", "string", "object", "number")
FIRST_QUESTION = 7 * len(WORDS)
"""A row with the words of row 0 but another right answer, whether of 2, 3, 4 or 5: it is none of the examples."""


def word(number: int) -> str:
    return WORDS[number % len(WORDS)]


def four(i: int) -> dict[str, Any]:
    return {"text": [f"the {word(i + 3 * k)} {'of it ' * (k == 2)}" + word(i) for k in range(4)], "label": list("ABCD")}


# Task → its file in the harness, and row i of its data.
FILES: dict[str, tuple[str, Callable[[int], dict[str, Any]]]] = {
    "hellaswag": (
        "hellaswag/hellaswag.yaml",
        lambda i: {
            "activity_label": word(i),
            "ctx_a": f"The {word(i + 1)} is here.",
            "ctx_b": "it",
            "endings": four(i)["text"],
            "label": str(i % 4),
        },
    ),
    "arc_easy": (
        "arc/arc_easy.yaml",
        lambda i: {"question": f"What has a {word(i)}?", "choices": four(i), "answerKey": "ABCD"[i % 4]},
    ),
    "arc_challenge": (
        "arc/arc_challenge.yaml",
        lambda i: {"question": f"Why is a {word(i)}?", "choices": four(i + 5), "answerKey": "ABCD"[(i + 1) % 4]},
    ),
    "copa": (
        "super_glue/copa/default.yaml",
        lambda i: {
            "premise": f"The {word(i)} was read.",
            "question": ["cause", "effect"][i % 2],
            "choice1": f"It is a {word(i + 1)}.",
            "choice2": f"A {word(i + 2)} was found.",
            "label": i % 2,
        },
    ),
    "commonsense_qa": (
        "commonsense_qa/default.yaml",
        lambda i: {
            "question": f"Where is a {word(i)}?",
            "choices": {"text": [*four(i)["text"], "here"], "label": list("ABCDE")},
            "answerKey": "ABCDE"[i % 5],
        },
    ),
    "piqa": (
        "piqa/piqa.yaml",
        lambda i: {"goal": f"Find the {word(i)}", "sol1": word(i + 1), "sol2": f"the {word(i + 2)}", "label": i % 2},
    ),
    "openbookqa": (
        "openbookqa/openbookqa.yaml",
        lambda i: {"question_stem": f"A {word(i)} is", "choices": four(i + 2), "answerKey": "ABCD"[(i + 2) % 4]},
    ),
    "lambada_openai": (
        "lambada/lambada_openai.yaml",
        lambda i: {"text": f"The {word(i)} of the {word(i + 4)} is a {word(i)}"},
    ),
    "wsc273": (
        "wsc273/default.yaml",
        lambda i: {
            "text": f"The {word(i)} has the {word(i + 1)} because it is long.",
            "pronoun": "it",
            "pronoun_loc": len(f"The {word(i)} has the {word(i + 1)} because "),
            "options": [f"The {word(i)}", f"The {word(i + 1)}"],
            "label": i % 2,
        },
    ),
    "winogrande": (
        "winogrande/default.yaml",
        lambda i: {
            "sentence": f"The {word(i)} has the {word(i + 1)} because the _ is long.",
            "option1": word(i),
            "option2": word(i + 1),
            "answer": str(1 + i % 2),
        },
    ),
    "agieval_lsat_ar": (
        "agieval/lsat-ar.yaml",
        lambda i: {
            "query": f"Q: {word(i)}? A: Among A through E, the answer is",
            "choices": list("ABCDE"),
            "gold": [i % 5],
        },
    ),
    "boolq": (
        "super_glue/boolq/default.yaml",
        lambda i: {"passage": f"A {word(i)} is a {word(i + 1)}.", "question": f"is it a {word(i)}", "label": i % 2},
    ),
    "social_iqa": (
        "siqa/siqa.yaml",
        lambda i: {
            "context": f"A {word(i)} was found.",
            "question": "What is it?",
            "answerA": word(i + 1),
            "answerB": f"the {word(i + 2)}",
            "answerC": f"one of the {word(i + 3)}",
            "label": str(1 + i % 3),
        },
    ),
    **{
        f"mmlu_{subject}_continuation": (
            f"mmlu/continuation/mmlu_{subject}.yaml",
            lambda i, subject=subject: {
                "question": f"In {subject}, what is a {word(i)}?",
                "choices": four(i + len(subject))["text"],
                "answer": i % 4,
            },
        )
        for subject in ("anatomy", "virology")
    },
}


def rows(task: str, split: str) -> list[dict[str, Any]]:
    first, count = (0, EXAMPLES) if split == "examples" else (FIRST_QUESTION, QUESTIONS + 2 * ("virology" in task))
    return [FILES[task][1](first + i) for i in range(count)]


@pytest.fixture(scope="module")
def task_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The harness's task files by reference, with nothing but their data replaced."""
    folder = tmp_path_factory.mktemp("tasks")
    for task, (file, _) in FILES.items():
        for split in ("examples", "questions"):
            lines = "".join(json.dumps(row) + "\n" for row in rows(task, split))
            (folder / f"{task}.{split}.jsonl").write_text(lines)
        data = {name: str(folder / f"{task}.examples.jsonl") for name in ("train", "dev")}
        data |= {name: str(folder / f"{task}.questions.jsonl") for name in ("validation", "test")}
        own = {
            "include": str(HARNESS / file),
            "task": task,
            "dataset_path": "json",
            "dataset_name": None,
            "dataset_kwargs": {"data_files": data, "cache_dir": str(folder / "cache")},
        }
        (folder / f"{task}.yaml").write_text(yaml.safe_dump(own))
    group = {"group": "mmlu_continuation", "task": [task for task in FILES if task.startswith("mmlu")]}
    (folder / "mmlu_continuation.yaml").write_text(yaml.safe_dump(group))
    return folder


@pytest.fixture(scope="module")
def other(make_run: MakeRun) -> RunFolder:
    return make_run("gated_suites", "--model.variant", "m_gate_kv")


def harness_model(folder: RunFolder, dataset: Path, **options: bool) -> HarnessModel:
    data = TokenDataset.open(dataset)
    restored = restore(folder, 10, device=torch.device("cpu"))
    return HarnessModel(restored, data.tokenizer(), data.eot_id, Processes(), **options)


@pytest.fixture(scope="module")
def model(standard: RunFolder, dataset: Path) -> HarnessModel:
    return harness_model(standard, dataset)


Question = tuple[list[tuple[str, str]], int, str]
"""(context, continuation) of each answer, which is right, and how answers are compared: as in OLMES's Table 2."""


def arc(row: dict[str, Any]) -> tuple[str, list[str], int]:
    return f"Question: {row['question']}\nAnswer:", row["choices"]["text"], "ABCDE".index(row["answerKey"])


OLMES: dict[str, Callable[[dict[str, Any]], tuple[str, list[str], int]]] = {
    "arc_challenge": arc,
    "arc_easy": arc,
    "commonsense_qa": arc,
    "boolq": lambda row: (
        f"{row['passage']}\nQuestion: {row['question']}?\nAnswer:",
        ["no", "yes"],
        row["label"],
    ),
    "openbookqa": lambda row: (row["question_stem"], row["choices"]["text"], "ABCD".index(row["answerKey"])),
    "piqa": lambda row: (f"Question: {row['goal']}\nAnswer:", [row["sol1"], row["sol2"]], row["label"]),
    "social_iqa": lambda row: (
        f"Q: {row['context']} {row['question']}\nA:",
        [row["answerA"], row["answerB"], row["answerC"]],
        int(row["label"]) - 1,
    ),
    "mmlu_anatomy_continuation": lambda row: (f"Question: {row['question']}\nAnswer:", row["choices"], row["answer"]),
}
COMPARED = {"arc_challenge": "pmi", "commonsense_qa": "pmi", "openbookqa": "pmi", "boolq": "sum"}
CHANCE = {"commonsense_qa": 1 / 5, "boolq": 1 / 2, "piqa": 1 / 2, "social_iqa": 1 / 3}


def log_p(model: HarnessModel, context: str, continuation: str) -> float:
    request = Instance(request_type="loglikelihood", doc={}, arguments=(context, continuation), idx=0)
    return model.loglikelihood([request], disable_tqdm=True)[0][0]


def by_hand(model: HarnessModel, task: str) -> tuple[float, float]:
    """Accuracy and bits per byte of the right answer behind the first five examples."""
    ask = OLMES[task]
    examples = [ask(row) for row in rows(task, "examples")[:5]]
    before = "".join(f"{text} {answers[right]}\n\n" for text, answers, right in examples)
    if task.startswith("mmlu"):
        before = "The following are questions (with answers) about anatomy.\n\n" + before
    found, bits = [], []
    for row in rows(task, "questions"):
        text, answers, right = ask(row)
        scores = [log_p(model, before + text, f" {answer}") for answer in answers]
        bits.append(-scores[right] / math.log(2) / len(f" {answers[right]}".encode()))
        way = COMPARED.get(task, "character")
        if way == "character":
            scores = [score / len(answer) for score, answer in zip(scores, answers, strict=True)]
        elif way == "pmi":
            scores = [score - log_p(model, "", f" {answer}") for score, answer in zip(scores, answers, strict=True)]
        found.append(scores.index(max(scores)) == right)
    return float(np.mean(found)), float(np.mean(bits))


def test_olmes_asks_in_cloze_form_behind_five_fixed_examples(model: HarnessModel, task_folder: Path) -> None:
    outcome = Tasks([], suite="olmes", folder=str(task_folder)).run(model, None)
    for task in (task for task in OLMES if not task.startswith("mmlu")):
        marks = outcome.marks[f"olmes/{task}@5"]
        (metric,) = [entry.metric for entry in SUITES["olmes"].tasks if entry.task == task]
        accuracy, bits = by_hand(model, task)
        assert marks[metric] == pytest.approx(accuracy), task
        assert marks["answer_bits_per_byte"] == pytest.approx(bits, rel=1e-5), task
        assert marks["sample_len"] == QUESTIONS
    # Of a group the mean over its tasks counts, however many questions each has.
    anatomy = by_hand(model, "mmlu_anatomy_continuation")
    alone = Tasks(["mmlu_virology_continuation"], folder=str(task_folder))
    assert alone.loaded is not None
    alone.loaded["tasks"]["mmlu_virology_continuation"].set_config(key="num_fewshot", value=5)
    virology = alone.run(model, None).marks["mmlu_virology_continuation"]
    group = outcome.marks["olmes/mmlu_continuation@5"]
    assert group["sample_len"] == 2 * QUESTIONS + 2
    assert group["answer_bits_per_byte"] == pytest.approx((anatomy[1] + virology["answer_bits_per_byte"]) / 2, rel=1e-5)
    centred = []
    for task in SUITES["olmes"].tasks:
        chance = CHANCE.get(task.task, 1 / 2 if task.task == "winogrande" else 1 / 4)
        centred.append((outcome.marks[f"olmes/{task.label}"][task.metric] - chance) / (1 - chance))
    assert len(centred) == 10
    assert outcome.marks["olmes"]["centred_mean"] == pytest.approx(np.mean(centred), abs=1e-12)


class Recording(HarnessModel):
    """Keeps what it is asked."""

    asked: list[tuple[str, str]]

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        self.asked += [request.args for request in requests]
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm)


DCLM = {
    # Task: examples, choices (DCLM's eval_meta_data_v1.csv: #shots, Random baseline), mark of the start of a question.
    "hellaswag@0": (0, 4, ": The "),
    "hellaswag@10": (10, 4, ": The "),
    "arc_easy@10": (10, 4, "What has a"),
    "arc_challenge@10": (10, 4, "Why is a"),
    "copa@0": (0, 2, "was read"),
    "commonsense_qa@10": (10, 5, "Where is a"),
    "piqa@10": (10, 2, "Find the"),
    "openbookqa@0": (0, 4, " is"),
    "lambada_openai@0": (0, math.inf, "The "),
    "wsc273@0": (0, 2, "because"),
    "winogrande@0": (0, 2, "because"),
    "agieval_lsat_ar@3": (3, 5, "Among A through E"),
    "boolq@10": (10, 1 / 0.62, "\nQuestion: is it"),
}


def test_core_has_dclms_numbers_of_examples_and_chance_levels(
    standard: RunFolder, dataset: Path, task_folder: Path
) -> None:
    model = harness_model(standard, dataset)
    model.__class__ = Recording
    model.asked = []
    outcome = Tasks([], suite="core", folder=str(task_folder)).run(model, 5)
    tasks = {name.removeprefix("core/"): marks for name, marks in outcome.marks.items() if name != "core"}
    assert tasks.keys() == DCLM.keys()
    at, centred, errors = 0, [], {}
    for task, (examples, choices, start) in DCLM.items():
        entry = next(entry for entry in SUITES["core"].tasks if entry.label == task)
        answers = {"lambada_openai@0": 1, "boolq@10": 2}.get(task) or round(choices)
        contexts = [context for context, _ in model.asked[at : at + 5 * answers]]
        at += 5 * answers
        assert {context.count(start) for context in contexts} == {examples + 1}, task
        chance = 1 / choices
        centred.append((tasks[task][entry.metric] - chance) / (1 - chance))
        errors[task] = tasks[task][f"{entry.metric}_stderr"] / (1 - chance)
    assert at == len(model.asked)
    assert outcome.marks["core"]["centred_mean"] == pytest.approx(np.mean(centred), abs=1e-12)
    # The two tasks on the same questions are correlated; without them errors add up as of independent draws.
    shares = outcome.shares["core"]["centred_mean"]
    assert len(shares["hellaswag"]) == 5
    apart = sum(error**2 for task, error in errors.items() if not task.startswith("hellaswag"))
    both = np.sqrt(apart / 13**2 + 5 * shares["hellaswag"].var(ddof=1))
    assert outcome.marks["core"]["centred_mean_stderr"] == pytest.approx(both, rel=1e-9)
    assert outcome.marks["core"]["sample_len"] == 12 * 5


def test_two_runs_are_compared_question_by_question(
    standard: RunFolder, other: RunFolder, dataset: Path, small_data: Path, task_folder: Path, depth_eval: DepthEval
) -> None:
    options = ["--suite", "olmes", "--tasks", "copa", "--bos", "--task-folder", task_folder, "--nproc", 1]
    against = ["--data", small_data, "--baseline", standard.path]
    assert depth_eval(other.path, *options, *against) == 0
    (out,) = (other.path / "eval").glob("step-10-*bos-suite-olmes-tasks-copa-*.json")
    results = json.loads(out.read_text())
    assert results["suite"]["name"] == "olmes"
    # Each question's bits, asked of each model by hand, with the end-of-text token in front.
    values = []
    for folder in (other, standard):
        model = harness_model(folder, dataset, bos=True)
        bits = []
        for row in rows("copa", "questions"):
            connector = {"cause": "because", "effect": "therefore"}[row["question"]]
            answer = row["choice2" if row["label"] else "choice1"]
            answer = f"  {answer[0].lower()}{answer[1:]}"
            before = model.tok_encode(f"{row['premise'][:-1]} {connector}")
            whole = model.tok_encode(f"{row['premise'][:-1]} {connector}{answer}")
            tokens = torch.tensor([[model.eot_id, *whole]])
            with torch.no_grad():
                log_probabilities = torch.log_softmax(model.model.double()(tokens[:, :-1]), -1)
            nats = -log_probabilities.gather(2, tokens[:, 1:, None])[0, len(before) :, 0].sum().item()
            bits.append(nats / math.log(2) / len(answer))
        values.append(np.array(bits))
    marks = results["tasks"]["copa+bos"]
    assert marks["answer_bits_per_byte"] == pytest.approx(values[0].mean(), rel=1e-5)
    assert results["baseline_tasks"]["copa+bos"]["answer_bits_per_byte"] == pytest.approx(values[1].mean(), rel=1e-5)
    found, gap = results["tasks_comparison"]["copa+bos"]["answer_bits_per_byte"], values[0] - values[1]
    assert found["difference"] == pytest.approx(gap.mean(), rel=1e-3)
    assert found["standard_error"] == pytest.approx(gap.std(ddof=1) / math.sqrt(QUESTIONS), rel=1e-3)
    whole = results["tasks_comparison"]["olmes+bos"]["centred_mean"]
    own, base = (results[key]["olmes+bos"]["centred_mean"] for key in ("tasks", "baseline_tasks"))
    assert whole["difference"] == pytest.approx(own - base, abs=1e-12)


def test_without_a_network_one_line_says_so(standard: RunFolder, tmp_path: Path) -> None:
    """Nothing listens at the hub's address, and nothing is in the cache; before a checkpoint is read."""
    command = [
        sys.executable,
        "-m",
        "torchtitan_ext.cli",
        "eval",
        str(standard.path),
        "--suite",
        "core",
        "--nproc",
        "1",
    ]
    settings = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    done = subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(
        "error: --suite core: hellaswag: its data are not on this machine and cannot be fetched (http:"
    )
    assert "with HF_HOME set to a folder" in line
