"""lm-evaluation-harness, offline: a task of our own on local data, against log-likelihoods computed directly."""

import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from data_prep.dataset import TokenDataset
from eval.evaluate.processes import Processes
from torchtitan_ext.errors import UserError
from torchtitan_ext.run_folder import RunFolder
from torchtitan_ext.titan.restore import restore

pytest.importorskip("lm_eval", reason="needs the extra `eval`: pip install 'torchtitan-ext[eval]'")

from lm_eval.api.instance import Instance

from eval.evaluate.harness import HarnessModel
from eval.evaluate.tasks import Tasks

MakeRun = Callable[..., RunFolder]
QUESTIONS = [
    {"question": "The class has", "choices": [" a method", " no attribute at all", " x"], "answer": 0},
    {"question": "Return the first", "choices": [" element of the list", " word"], "answer": 1},
    {"question": "import", "choices": [" os", " the module sys, which is there", " for"], "answer": 2},
    {"question": "If the file is not found", "choices": [", an error is raised", " "], "answer": 0},
]
TEXTS = ["def f(x):\n    return x", "for x in y: " * 30, "Naïve café: 1 + 1 = 2"]


@pytest.fixture(scope="module", params=["false", "true"], ids=["whole window", "documents"])
def model(request: pytest.FixtureRequest, make_run: MakeRun, dataset: Path) -> HarnessModel:
    folder = make_run(f"harness_{request.param}", "--data.document_mask", request.param)
    restored = restore(folder, device=torch.device("cpu"))
    data = TokenDataset.open(dataset)
    return HarnessModel(restored, data.tokenizer(), data.eot_id, Processes())


class Direct:
    """Log-likelihoods in fp64 from forward passes over one text at a time, without a mask."""

    def __init__(self, model: HarnessModel) -> None:
        self.harness = model
        self.eot = model.eot_id

    @torch.no_grad()
    def score(self, context: Sequence[int], continuation: Sequence[int]) -> tuple[float, bool]:
        """A document after an end-of-text token is passed alone where documents do not see each other."""
        *inputs, _ = window = [*context, *continuation][-65:]
        apart = self.harness.document_mask and inputs[0] == self.eot and len(inputs) > 1
        self.harness.model.double()
        parts = [
            self.harness.model(torch.tensor([part]))[0] for part in ([inputs[:1], inputs[1:]] if apart else [inputs])
        ]
        self.harness.model.float()
        log_p = torch.log_softmax(torch.cat(parts), dim=-1)[-len(continuation) :]
        targets = torch.tensor(window[-len(continuation) :])
        return log_p.gather(1, targets[:, None]).sum().item(), bool((log_p.argmax(-1) == targets).all())


@pytest.fixture
def task_folder(tmp_path: Path) -> Path:
    data = tmp_path / "questions.jsonl"
    data.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    task = {
        "task": "own_questions",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": str(tmp_path / "cache")},
        "output_type": "multiple_choice",
        "test_split": "test",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }
    (tmp_path / "own_questions.yaml").write_text(yaml.safe_dump(task))
    return tmp_path


def test_marks_equal_a_direct_computation(model: HarnessModel, task_folder: Path) -> None:
    direct, encode = Direct(model), model.tok_encode
    right = right_by_length = 0
    for question in QUESTIONS:
        context = encode(question["question"])
        scores = []
        for choice in question["choices"]:
            whole = encode(question["question"] + choice)
            scores.append(direct.score(context, whole[len(context) :])[0])
        right += scores.index(max(scores)) == question["answer"]
        # acc_norm takes the likelihood per character of the choice.
        by_length = [score / len(choice) for score, choice in zip(scores, question["choices"], strict=True)]
        right_by_length += by_length.index(max(by_length)) == question["answer"]
    marks = Tasks(["own_questions"], folder=str(task_folder)).run(model, None).marks["own_questions"]
    assert marks["acc"] == right / 4
    assert marks["acc_norm"] == right_by_length / 4
    assert Tasks(["own_questions"], folder=str(task_folder)).run(model, 2).marks["own_questions"]["sample_len"] == 2


def instance(kind: str, *arguments: object) -> Instance:
    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)


def test_log_likelihoods_equal_a_direct_computation(model: HarnessModel) -> None:
    """Among them an empty context, spaces at its end, a continuation that the model would choose and one too long."""
    direct, encode = Direct(model), model.tok_encode
    prompt = model.generate_until([instance("generate_until", "import", {"max_gen_toks": 3})])[0]
    pairs = [("import", " os.path"), ("", "Hello"), ("The end ", "is near"), ("a " * 200, "b"), ("import", prompt)]
    got = model.loglikelihood([instance("loglikelihood", *pair) for pair in pairs])
    split = [(encode("import"), encode("import os.path")), ([model.eot_id], [model.eot_id, *encode("Hello")])]
    split += [(encode("The end"), encode("The end is near")), (encode("a " * 199 + "a"), encode("a " * 200 + "b"))]
    split += [(encode("import"), encode("import" + prompt))]
    for (context, whole), (score, greedy), pair in zip(split, got, pairs, strict=True):
        expected = direct.score(context, whole[len(context) :])
        assert score == pytest.approx(expected[0], rel=1e-5), pair
        assert greedy == expected[1], pair


def test_a_continuation_longer_than_the_window_is_scored_whole(model: HarnessModel) -> None:
    """A window of 64 tokens at a time, the first behind the context's last token; the last keeps its context. Lengths
    around one and two windows, and one that the model would choose itself but for its last token."""
    direct, encode = Direct(model), model.tok_encode
    context = encode("for x in y")
    for length in (63, 64, 65, 128, 129, 150):
        whole = context + encode("for x in y: " * 30)[:length]
        at, expected, greedy = len(context), 0.0, True
        while at < len(whole):
            end = min(at + 64, len(whole))
            # Of one window or less, the whole context stands before it, as far as it fits.
            before = whole[:at] if length <= 64 else whole[at - 1 if at == len(context) else max(0, end - 65) : at]
            score, first = direct.score(before, whole[at:end])
            at, expected, greedy = end, expected + score, greedy and first
        question = (("for x in y", str(length)), context, whole[len(context) :])
        ((got, chosen),) = model._loglikelihood_tokens([question])
        assert got == pytest.approx(expected, rel=1e-5), length
        assert chosen == greedy
    by_text = model.loglikelihood([instance("loglikelihood", "for x in y", ": for x in y" * 30)])[0][0]
    assert by_text < got, "as a task asks it"


def test_a_context_of_spaces_leaves_no_token_out(model: HarnessModel) -> None:
    """The harness moves spaces from the end of a context into the continuation, which leaves no context at all."""
    got = model.loglikelihood([instance("loglikelihood", "  ", "the end")])
    expected = Direct(model).score([model.eot_id], model.tok_encode("  the end"))
    assert got[0] == (pytest.approx(expected[0], rel=1e-5), expected[1])


class Beside(Processes):
    """One of two processes, of which the other was given other questions."""

    def gather(self, thing: Any) -> list[Any]:
        return [thing, f"not {thing}"]


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        ("loglikelihood", ("import", " os")),
        ("loglikelihood_rolling", ("import os",)),
        ("generate_until", ("import", {"max_gen_toks": 3})),
    ],
)
def test_answers_to_different_questions_are_not_added_up(
    model: HarnessModel, kind: str, arguments: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "processes", Beside(0, 2))
    with pytest.raises(UserError, match=re.escape("asks each process something else")):
        getattr(model, kind)([instance(kind, *arguments)])


def test_rolling_log_likelihoods_take_each_token_once(model: HarnessModel) -> None:
    """In windows of 64 one behind the other, the first behind an end-of-text token; the last one keeps its context."""
    direct = Direct(model)
    got = model.loglikelihood_rolling([instance("loglikelihood_rolling", text) for text in TEXTS])
    assert len(model.tok_encode(TEXTS[1])) > 2 * 64
    for text, total in zip(TEXTS, got, strict=True):
        tokens = model.tok_encode(text)
        expected, at = 0.0, 0
        while at < len(tokens):
            end = min(at + 64, len(tokens))
            context = [model.eot_id] if at == 0 else tokens[max(0, end - 65) : at]
            expected += direct.score(context, tokens[at:end])[0]
            at = end
        assert total == pytest.approx(expected, rel=1e-5), text[:20]
        assert math.isfinite(total)


def test_text_ends_before_what_the_task_says(model: HarnessModel) -> None:
    free = model.generate_until([instance("generate_until", "The class", {"max_gen_toks": 20})])[0]
    assert len(free) > 4
    end = free[3:5]
    requests = [instance("generate_until", "The class", {"until": [end], "max_gen_toks": 20})] * 2
    requests.insert(1, instance("generate_until", "a " * 200, {"until": "\n", "max_gen_toks": 2}))
    got = model.generate_until(requests)
    assert got[0] == got[2] == free.split(end)[0]
