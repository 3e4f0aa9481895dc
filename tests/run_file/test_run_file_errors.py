"""What is wrong in a run file is said in one line, with file, line, key and what to do."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from torchtitan_ext.errors import UserError
from torchtitan_ext.run_file import load_run

Message = Callable[..., str]
KNOWN = {"model.size": ["10M", "60M"], "model.variant": ["standard", "block_attnres"]}


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("  step: 5", "x.yaml:7: training.step is not a key; did you mean 'steps'?"),
        ("  lr: 5", "x.yaml:7: training.lr is not a key; did you mean 'optimizer.lr'?"),
        ("  seed: 5", "x.yaml:7: training.seed is not a key; did you mean 'seed' or 'data.seed'?"),
        ("sede: 5", "x.yaml:7: sede is not a key; did you mean 'seed'?"),
        ("\nparalelism:\n  shard: 2", "x.yaml:8: paralelism is not a key; did you mean 'parallelism'?"),
        ("data.seed: 5", "x.yaml:7: data.seed cannot stand on one line; write 'seed:' indented below 'data:'"),
        ("depth:\n  block-size: 4", "x.yaml:8: depth.block-size is not a key; an option holds only letters, digits"),
        (
            "1: 5",
            "x.yaml:7: 1 is not a key; choose from: extends, name, folder, seed, model, depth, attention, groups",
        ),
        ('"a\\nb": 5', "x.yaml:7: 'a\\nb' is not a key; choose from: extends"),
    ],
)
def test_unknown_keys_give_the_nearest_key(message: Message, base: str, lines: str, expected: str) -> None:
    assert message(base + lines + "\n").startswith(expected)


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("  micro_batch: -1", "7: training.micro_batch is -1; must be greater than 0"),
        ("  micro_batch: 0", "7: training.micro_batch is 0; must be greater than 0"),
        ("  micro_batch: 1.5", "7: training.micro_batch is 1.5; must be a whole number greater than 0"),
        ("  micro_batch: '4'", "7: training.micro_batch is '4'; must be a whole number greater than 0"),
        ("  micro_batch: true", "7: training.micro_batch is true; must be a whole number greater than 0"),
        ("  micro_batch: [1]", "7: training.micro_batch is [1]; must be a whole number greater than 0"),
        ("  micro_batch:\n    a: 1", "7: training.micro_batch is a mapping; must be a whole number greater than 0"),
        ("  micro_batch: 0x10", "7: training.micro_batch is '0x10'; must be a whole number greater than 0"),
        ("  micro_batch: 010", "7: training.micro_batch is '010'; must be a whole number greater than 0"),
        ("  micro_batch: 2024-01-01", "7: training.micro_batch is '2024-01-01'; must be a whole number greater than 0"),
        ("  micro_batch: 9223372036854775808", "7: training.micro_batch is 9223372036854775808; must fit in 64 bits"),
        ("  compile: yes", "7: training.compile is 'yes'; must be true or false"),
        ("  compile: 1", "7: training.compile is 1; must be true or false"),
        ("  compile:", "7: training.compile is empty; must be true or false"),
        ("  max_grad_norm: 0", "7: training.max_grad_norm is 0; must be greater than 0"),
        ("  max_grad_norm: null", "7: training.max_grad_norm is empty; must be a number greater than 0"),
        ("  max_grad_norm: .inf", "7: training.max_grad_norm is '.inf'; must be a number greater than 0"),
        ("  max_grad_norm: 1e999", "7: training.max_grad_norm is inf; must be a number greater than 0"),
        ("  precision: bf6", "7: training.precision 'bf6' is unknown; did you mean 'bf16'?"),
        ("  precision: 16", "7: training.precision is 16; must be one of auto, bf16, fp32"),
        ("optimizer:\n  beta2: 1", "8: optimizer.beta2 is 1; must be less than 1"),
        ("optimizer:\n  beta1: -0.1", "8: optimizer.beta1 is -0.1; must be at least 0"),
        ("optimizer:\n  min_lr_ratio: 1.1", "8: optimizer.min_lr_ratio is 1.1; must be at most 1"),
        ("optimizer:\n  decay_fraction: 1.1", "8: optimizer.decay_fraction is 1.1; must be at most 1"),
        ("optimizer: 3", "7: optimizer is 3; must be a section, with its keys on indented lines below it"),
        ("optimizer:\n- lr", "7: optimizer is ['lr']; must be a section, with its keys on indented lines below it"),
        ("checkpoint:\n  keep_last: 1", "8: checkpoint.keep_last is 1; must be at least 2"),
        ("checkpoint:\n  milestones: [1, 0]", "8: checkpoint.milestones[1] is 0; must be greater than 0"),
        ("checkpoint:\n  milestones: [a]", "8: checkpoint.milestones[0] is 'a'; must be a whole number"),
        ("checkpoint:\n  milestones: 5", "8: checkpoint.milestones is 5; must be a list, each a whole number"),
        ("depth:\n  blocks: [4]", "8: depth.blocks is [4]; must be a number, or true or false, or text"),
        ("depth:\n  blocks: ''", "8: depth.blocks is ''; must not be empty"),
        ("parallelism:\n  shard: 0", "8: parallelism.shard is 0; must be -1 (all remaining ranks) or at least 1"),
        ("seed: -1", "7: seed is -1; must be at least 0"),
        ("name: 2024", "7: name is 2024; must be text; put it in quotes"),
        ("name: a/b", "7: name is 'a/b'; must hold only letters, digits, '.', '_' and '-', and not begin with"),
        ("name: ..", "7: name is '..'; must hold only letters, digits, '.', '_' and '-', and not begin with"),
        ("folder: ''", "7: folder is ''; must not be empty"),
        ('folder: "a\\0b"', "7: folder is 'a\\x00b'; must be text without control characters"),
        ("folder: 'runs/{nam}'", "7: folder is 'runs/{nam}'; the only part in braces that is filled in is {name}"),
    ],
)
def test_wrong_values_are_described_in_plain_words(message: Message, base: str, lines: str, expected: str) -> None:
    assert message(base + lines + "\n").startswith("x.yaml:" + expected)


def test_sequence_length_must_be_a_multiple_of_eight(message: Message, base: str) -> None:
    text = base.replace("data:\n", "data:\n  seq_len: 100\n")
    assert message(text) == "x.yaml:4: data.seq_len is 100; must be a multiple of 8"


def test_long_values_are_cut_short(message: Message, base: str) -> None:
    assert len(message(base + f"  compile: {'y' * 5000}\n")) < 200
    assert len(message(base + f"  micro_batch: {'9' * 5000}\n")) < 200


@pytest.mark.parametrize("kind", ["tensor", "pipeline", "context", "expert"])
def test_unsupported_parallelism_says_why_and_what_instead(message: Message, base: str, kind: str) -> None:
    line = message(base + f"parallelism:\n  {kind}: 2\n")
    assert line.startswith(f"x.yaml:8: parallelism.{kind}=2 is not supported, because ")
    assert line.endswith("; use parallelism.shard / replicate")


@pytest.mark.parametrize(
    ("key", "given", "expected"),
    [
        ("size", "10m", "x.yaml:2: model.size '10m' is unknown; did you mean '10M'?"),
        ("variant", "attn", "x.yaml:2: model.variant 'attn' is unknown; choose from: standard, block_attnres"),
    ],
)
def test_names_are_checked_against_the_known_ones(
    message: Message, base: str, key: str, given: str, expected: str
) -> None:
    text = base.replace("  size: 10M", f"  {key}: {given}" + ("" if key == "size" else "\n  size: 10M"))
    assert message(text, known=KNOWN) == expected


def test_a_missing_key_gives_the_known_names(message: Message, base: str) -> None:
    line = message(base.replace("  size: 10M\n", ""), known=KNOWN)
    assert line.startswith("x.yaml: model.size is missing; add it (")
    assert line.endswith("; choose from: 10M, 60M")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "x.yaml:1: the file is empty"),
        ("# nothing\n", "x.yaml:1: the file is empty"),
        ("\n- a\n", "x.yaml:2: the top level must be keys with values"),
        ("just text\n", "x.yaml:1: the top level must be keys with values"),
        ("seed: 1\nmodel:\n\tsize: 10M\n", "x.yaml:3: a tab stands where YAML allows only spaces"),
        ("seed: 1\nmodel:\n  size: 10M\n\tlayers: 3\n", "x.yaml:4: a tab stands where YAML allows only spaces"),
        ("seed: 1\nmodel: size: 10M\n", "x.yaml:2: not valid YAML: mapping values are not allowed here"),
        ("seed: [1,\n", "x.yaml:2: not valid YAML: "),
        ("seed: 'a\n", "x.yaml:2: not valid YAML: "),
        ("seed: 1\n---\nseed: 2\n", "x.yaml:2: not valid YAML: a second document starts here"),
        ("seed: 1\nname: &a b\n", "x.yaml:2: anchors (&) and aliases (*) are not used"),
        ("seed: 1\nname: *a\n", "x.yaml:2: anchors (&) and aliases (*) are not used"),
        ("seed: 1\nname: !!python/name:os.system\n", "x.yaml:2: tags (!) are not used"),
        ("seed: 1\n? [a]\n: 1\n", "x.yaml:2: a key must be a plain word"),
        ("seed: 1\nname: a\x07\n", "x.yaml:2: the control character '\\x07' is not allowed"),
        ('seed: 1\nname: "\\UFFFFFFFF"\n', "x.yaml:1: not valid YAML: "),
        ("seed: " + "[" * 5000, "x.yaml:1: lists or mappings are nested too deeply"),
        (b"seed: 1\nname: caf\xe9\n", "x.yaml:2: the file is not UTF-8 text"),
        ("seed: 1\n".encode("utf-16"), "x.yaml:1: the file is not UTF-8 text"),
    ],
)
def test_text_that_is_no_run_file(message: Message, text: str | bytes, expected: str) -> None:
    assert message(text).startswith(expected)


def test_repeated_keys_name_both_lines(message: Message, base: str) -> None:
    assert message(base + "  steps: 6\n") == "x.yaml:7: training.steps is given twice, first in line 6; keep one"
    assert message(base + "seed: 1\nseed: 1\n") == "x.yaml:8: seed is given twice, first in line 7; keep one"
    assert message(base + "data:\n  seed: 1\n") == "x.yaml:7: data is given twice, first in line 3; keep one"


def test_the_first_problem_in_reading_order_is_told_and_the_others_counted(message: Message, base: str) -> None:
    text = base.replace("size: 10M", "size: 5") + "  compile: 3\n  step: 2\nseed: x\n"
    assert message(text) == "x.yaml:2: model.size is 5; must be text; put it in quotes (and 3 more)"
    line = message(base + "  step: 2\n", "--training.stepz", "4")
    assert line == "x.yaml:7: training.step is not a key; did you mean 'steps'? (and 1 more)"


def test_problems_of_the_run_file_come_before_those_of_the_file_it_extends(message: Message, base: str) -> None:
    Path("base.yaml").write_text(base + "  stepz: 2\n")
    line = message("extends: base.yaml\n\n\n\n\n\n\n\nsede: 3\n")
    assert line == "x.yaml:9: sede is not a key; did you mean 'seed'? (and 1 more)"
    assert message("extends: base.yaml\n") == "base.yaml:7: training.stepz is not a key; did you mean 'steps'?"


def test_length_of_the_run_is_given_once(message: Message, base: str) -> None:
    assert message(base + "  tokens: 100\n") == (
        "x.yaml:6: training.steps (5) and training.tokens (100) each say how long the run is; keep one"
        " (training.tokens: x.yaml:7)"
    )
    assert message(base.replace("steps: 5", "compile: true")) == (
        "x.yaml: nothing says how long the run is; give one of training.steps, training.tokens,"
        " training.tokens_per_parameter"
    )


def test_batch_must_hold_whole_sequences(message: Message, base: str) -> None:
    assert message(base + "  batch_tokens: 1500\n") == (
        "x.yaml:7: training.batch_tokens is 1500, not a multiple of data.seq_len, which is 1024; use 1024 or 2048"
        " (data.seq_len: default)"
    )
    assert message(base + "  batch_tokens: 100\n", "--data.seq_len", "256") == (
        "x.yaml:7: training.batch_tokens is 100, not a multiple of data.seq_len, which is 256; use 256"
        " (data.seq_len: command line)"
    )


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_decay_fraction_belongs_to_wsd(message: Message, base: str, schedule: str) -> None:
    line = message(base + f"optimizer:\n  schedule: {schedule}\n  decay_fraction: 0.5\n")
    assert line == (
        f"x.yaml:9: optimizer.decay_fraction is 0.5, but only the schedule wsd has one and optimizer.schedule is "
        f"'{schedule}'; drop decay_fraction or use wsd (optimizer.schedule: x.yaml:8)"
    )


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["--training.stepz", "4"], "--training.stepz is not a key; did you mean '--training.steps'?"),
        (["--lr=1"], "--lr is not a key; did you mean '--optimizer.lr'?"),
        (["--trainng.step", "4"], "--trainng.step is not a key; did you mean '--training.steps'?"),
        (["--training.micro-batch=4"], "--training.micro-batch is not a key; did you mean '--training.micro_batch'?"),
        (["--depth.a-b=4"], "--depth.a-b is not a key; an option holds only letters, digits and '_'"),
        (["--training.micro_batch", "-1"], "--training.micro_batch is -1; must be greater than 0"),
        (["--training.compile=yes"], "--training.compile is 'yes'; must be true or false"),
        (["--training.micro_batch=a: b"], "--training.micro_batch is 'a: b'; must be a whole number greater than 0"),
        (["--training.steps="], "nothing says how long the run is"),
        (["--training.steps"], "--training.steps needs a value; write --training.steps value"),
        (["--training.steps", "--training.compile"], "--training.steps needs a value; write --training.steps value"),
        (["--training", "4"], "--training is a section; write --training.key value"),
        (["--extends", "y.yaml"], "--extends can only be given in a run file"),
        (["--training.precision", "bf6"], "--training.precision 'bf6' is unknown; did you mean 'bf16'?"),
        (["--parallelism.tensor=2"], "--parallelism.tensor=2 is not supported, because"),
        (["--model.size", "10m"], "--model.size '10m' is unknown; did you mean '10M'?"),
        (["--checkpoint.milestones", "[1, 2"], "--checkpoint.milestones [1, 2: not valid YAML: "),
        (["--data.path", "'a"], "--data.path 'a: not valid YAML: "),
        (["training.steps=4"], "training.steps=4 is not an option; write --section.key value"),
        (["--"], "-- is not an option; write --section.key value"),
        (["-x"], "-x is not an option; write --section.key value"),
    ],
)
def test_command_line_errors_name_the_option(message: Message, base: str, overrides: list[str], expected: str) -> None:
    place = "x.yaml" if expected.startswith("nothing") else "command line"
    assert message(base, *overrides, known=KNOWN).startswith(f"{place}: {expected}")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("bas.yaml", "x.yaml:2: extends 'bas.yaml', which does not exist; did you mean 'base.yaml'?"),
        ("base", "x.yaml:2: extends 'base', which does not exist; did you mean 'base.yaml'?"),
        ("no/base.yaml", "x.yaml:2: extends 'no/base.yaml', which does not exist; there is no folder no either"),
        (".", "x.yaml:2: extends '.', which is a folder, not a run file; choose from: base.yaml, x.yaml"),
        ("[base.yaml]", "x.yaml:2: extends is ['base.yaml']; must be the path of one run file"),
        ("", "x.yaml:2: extends is empty; must be the path of one run file"),
        ('"a\\0"', "x.yaml:2: extends 'a\\x00', which cannot be read: embedded null byte"),
        (
            "x.yaml",
            "x.yaml:2: extends 'x.yaml', which closes a circle of files that extend each other: x.yaml -> x.yaml",
        ),
        (
            "./loop/y.yaml",
            "loop/y.yaml:1: extends '../x.yaml', which closes a circle of files that extend each other: "
            "x.yaml -> loop/y.yaml -> x.yaml",
        ),
    ],
)
def test_files_that_cannot_be_extended(message: Message, base: str, value: str, expected: str) -> None:
    Path("base.yaml").write_text(base)
    Path("loop").mkdir()
    Path("loop/y.yaml").write_text("extends: ../x.yaml\n")
    assert message(f"seed: 1\nextends: {value}\n") == expected


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("runs/10N.yaml", "runs/10N.yaml does not exist; did you mean '10M.yaml'?"),
        ("runs/10M.yml", "runs/10M.yml does not exist; did you mean '10M.yaml'?"),
        ("runs/10M", "runs/10M does not exist; did you mean '10M.yaml'?"),
        ("runs", "runs is a folder, not a run file; choose from: 10M.yaml"),
        ("empty/a.yaml", "empty/a.yaml does not exist; there is no .yaml file in that folder"),
        ("none/a.yaml", "none/a.yaml does not exist; there is no folder none either"),
        ("runs/10M.yaml/a.yaml", "runs/10M.yaml/a.yaml does not exist; there is no folder runs/10M.yaml either"),
        ("a\nb", "'a\\nb' does not exist; there is no .yaml file in that folder"),
    ],
)
def test_run_files_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, base: str, path: str, expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("runs", "empty"):
        Path(folder).mkdir()
    Path("runs/10M.yaml").write_text(base)
    with pytest.raises(UserError) as error:
        load_run(path)
    assert str(error.value) == expected


def test_a_path_the_system_refuses(message: Message) -> None:
    line = message(f"extends: {'a' * 5000}\n")
    assert line.startswith("x.yaml:1: extends 'aaaa")
    assert line.endswith(f", which cannot be read: {os.strerror(errno.ENAMETOOLONG)}")


def test_a_file_name_that_is_no_name_for_a_run(tmp_path: Path, base: str) -> None:
    path = tmp_path / "my run.yaml"
    path.write_text(base)
    with pytest.raises(UserError, match=r"my run\.yaml: name is 'my run'; must hold only letters, digits"):
        load_run(path)
    assert load_run(path, ["--name", "mine"]).name == "mine"
