"""The name of a result file says what was asked."""

import argparse
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from eval.evaluate import command
from eval.evaluate.request import baseline_of, data_of, result_file
from torchtitan_ext.run_folder import RunFolder
from torchtitan_ext.titan.restore import describe

MakeRun = Callable[..., RunFolder]


@pytest.fixture
def name(standard: RunFolder) -> Callable[..., str]:
    """``name("--limit", 50)`` is that of the file for what ``depth eval standard --limit 50`` finds."""

    def named(*arguments: object) -> str:
        parser = argparse.ArgumentParser()
        command.add_arguments(parser)
        args = parser.parse_args([str(standard.path), *map(str, arguments)])
        description = describe(standard)
        data, _ = data_of(description, args.data)
        baseline = baseline_of(description, 10, args.baseline, args.baseline_step)
        file = result_file(args, standard.path, 10, data, baseline)
        assert file.parent == standard.path / "eval"
        return file.name

    return named


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "step-10.json"),
        (["--precision", "bf16"], "step-10-bf16.json"),
        (["--tasks", "hellaswag"], "step-10-tasks-hellaswag.json"),
        (["--tasks", "arc_easy", "piqa", "--limit", 50], "step-10-limit-50-tasks-arc_easy+piqa.json"),
        (["--suite", "core", "--tasks", "piqa", "--bos"], "step-10-bos-suite-core-tasks-piqa.json"),
        (["--suite", "core", "--task-folder", "mine"], "step-10-suite-core-########.json"),
        (["--tasks", "piqa", "--task-folder", "mine"], "step-10-tasks-piqa-########.json"),
        (["--tasks", *("hellaswag",) * 20], "step-10-20-tasks-########.json"),
        (["--tasks", "../piqa"], "step-10-1-tasks-########.json"),
        (["--prompt", "It was a"], "step-10-samples-########.json"),
    ],
)
def test_a_name_can_be_read(arguments: list[object], expected: str, name: Callable[..., str]) -> None:
    assert re.fullmatch(re.escape(expected).replace(re.escape("########"), "[0-9a-f]{8}"), name(*arguments))


def test_other_questions_have_other_names(
    make_run: MakeRun, standard: RunFolder, dataset: Path, name: Callable[..., str], tmp_path: Path
) -> None:
    """Among them data sets and baselines in folders of equal names, and everything that samples depend on."""
    for place in ("one", "two"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "run").symlink_to(make_run(f"{place}_baseline", steps=(10, 20)).path)
    baseline, prompt, tasks = ["--baseline", standard.path], ["--prompt", "It was"], ["--tasks", "piqa"]
    questions: list[list[object]] = [
        *([], ["--precision", "bf16"], ["--data", dataset], [*prompt, "--data", dataset]),
        *(baseline, [*baseline, "--baseline-step", 20], [*baseline, "--top", 5], [*baseline, *tasks]),
        *(["--baseline", tmp_path / place / "run"] for place in ("one", "two")),
        *(prompt, ["--prompt", "It was "], ["--prompt", "It", "was"], [*prompt, *tasks]),
        *([*prompt, option, 2] for option in ("--max-tokens", "--temperature", "--top-k", "--seed")),
        [*prompt, "--top-p", 0.5],
        *(tasks, ["--tasks", "hellaswag"], ["--tasks", "piqa", "hellaswag"], [*tasks, "--limit", 5]),
        *(["--suite", "core"], ["--suite", "olmes"], ["--suite", "core", "--bos"], [*tasks, "--bos"]),
        [*tasks, "--suite", "core"],
        *([*tasks, "--task-folder", tmp_path / place] for place in ("one", "two")),
        *(["--tasks", *("hellaswag",) * count] for count in (20, 21)),
    ]
    names = [name(*question) for question in questions]
    assert len(set(names)) == len(names)
    assert names == [name(*question) for question in questions]


def test_data_are_told_apart_by_what_is_held_out(
    dataset: Path, small_data: Path, name: Callable[..., str], tmp_path: Path
) -> None:
    """Other data in a folder of the same name are another question; the same data in another place are not."""
    copies = [shutil.copytree(small_data, tmp_path / place / dataset.name) for place in ("one", "two")]
    other, again, first = (name("--data", path) for path in (*copies, dataset))
    assert other == again != first
    assert re.fullmatch("step-10-on-builtin-[0-9a-f]{8}.json", other)
