"""Values, defaults, files that extend each other and overrides from the command line."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from torchtitan_ext.run_file import Run, load_run

Load = Callable[..., Run]


def test_defaults(load: Load, base: str) -> None:
    run = load(base)
    assert (run.name, run.folder, run.seed, run.depth) == ("x", "runs/x", 0, {})
    assert (run.model.size, run.model.variant, run.model.layers) == ("10M", "standard", None)
    assert (run.data.path, run.data.seq_len, run.data.document_mask) == ("prepared/tiny", 1024, False)
    assert (run.training.steps, run.training.tokens, run.training.precision) == (5, None, "auto")
    assert (run.optimizer.lr, run.optimizer.eps, run.optimizer.schedule) == (None, 1e-8, "wsd")
    assert (run.parallelism.replicate, run.parallelism.shard) == (1, -1)
    assert (run.checkpoint.every, run.checkpoint.keep_last, run.checkpoint.milestones) == (500, 2, [])
    assert (run.heldout.tokens, run.logging.every, run.logging.tensorboard) == (10_000_000, 10, True)


@pytest.mark.parametrize(
    ("text", "value"),
    [("true", True), ("True", True), ("TRUE", True), ("false", False), ("False", False), ("FALSE", False)],
)
def test_booleans(load: Load, base: str, text: str, value: bool) -> None:
    assert load(f"{base}  compile: {text}\n").training.compile is value
    assert load(base, f"--training.compile={text}").training.compile is value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("1E-3", 0.001),
        ("3e-4", 0.0003),
        ("1.5e-3", 0.0015),
        ("1.e-3", 0.001),
        (".5", 0.5),
        ("0.5", 0.5),
        ("5.", 5.0),
        ("+2e0", 2.0),
        ("2", 2.0),
        ("1_000.5", 1000.5),
    ],
)
def test_numbers(load: Load, base: str, text: str, value: float) -> None:
    for run in (load(f"{base}optimizer:\n  lr: {text}\n"), load(base, "--optimizer.lr", text)):
        assert run.optimizer.lr == value
        assert type(run.optimizer.lr) is float


@pytest.mark.parametrize(
    ("text", "value"),
    [("100", 100), ("1_000_000", 10**6), ("1e9", 10**9), ("2.5e3", 2500), ("+7", 7), (str(2**63 - 1), 2**63 - 1)],
)
def test_whole_numbers(load: Load, base: str, text: str, value: int) -> None:
    for run in (load(f"{base}heldout:\n  tokens: {text}\n"), load(base, f"--heldout.tokens={text}")):
        assert run.heldout.tokens == value
        assert type(run.heldout.tokens) is int


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4", 4),
        ("4.0", 4.0),
        ("1e-3", 0.001),
        ("true", True),
        ("on", "on"),
        ("no", "no"),
        ("010", "010"),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("'4'", "4"),
        ('"true"', "true"),
        ("two words", "two words"),
    ],
)
def test_options_of_the_variant_keep_their_type(load: Load, base: str, text: str, value: Any) -> None:
    for run in (load(f"{base}depth:\n  option: {text}\n"), load(base, "--depth.option", text)):
        assert run.depth == {"option": value}
        assert type(run.depth["option"]) is type(value)


def test_an_empty_section_and_a_byte_order_mark_do_no_harm(load: Load, base: str) -> None:
    text = base + "optimizer:\n  # lr: 1e-3\ndepth:\n"
    assert load("\ufeff" + text) == load(text) == load(base)
    assert load(text.replace("\n", "\r\n")) == load(base)


def test_a_run_cannot_be_changed(load: Load, base: str) -> None:
    run = load(base)
    with pytest.raises(ValidationError):
        run.training.steps = 6


def test_the_folder_is_named_after_the_run(load: Load, base: str) -> None:
    assert load(base + "name: a.b_c-1\n").folder == "runs/a.b_c-1"
    assert load(base + "folder: '{name}/{name}-out'\n").folder == "x/x-out"
    assert load(base, "--name", "2024", "--folder={name}").folder == "2024"
    assert load(base, "--name", "'2024'").name == "2024"


def test_a_file_overrides_the_one_it_extends_and_the_command_line_both(load: Load, base: str) -> None:
    Path("base").mkdir()
    Path("base/a.yaml").write_text(base + "  compile: true\nseed: 1\ndepth:\n  blocks: 4\n  gain: 1\n")
    Path("base/b.yaml").write_text("extends: a.yaml\nseed: 2\ndata:\n  seed: 2\ndepth:\n  gain: 2\n")
    text = "extends: base/b.yaml\ndata:\n  seed: 3\nmodel:\n  layers: 3\n"
    run = load(text, "--model.layers", "4", "--depth.norm", "true")
    assert (run.model.size, run.model.layers, run.data.path) == ("10M", 4, "prepared/tiny")
    assert (run.seed, run.data.seed, run.training.compile) == (2, 3, True)
    assert run.depth == {"blocks": 4, "gain": 2, "norm": True}
    assert load(text).model.layers == 3
    assert {key: run.origin(key) for key in ("model.size", "seed", "data.seed", "model.layers", "depth.gain")} == {
        "model.size": "base/a.yaml:2",
        "seed": "base/b.yaml:2",
        "data.seed": "x.yaml:3",
        "model.layers": "command line --model.layers",
        "depth.gain": "base/b.yaml:6",
    }
    assert run.origin("data.seq_len") == run.origin("name") == "x.yaml"


def test_of_two_overrides_the_last_counts_and_a_list_is_replaced(load: Load, base: str) -> None:
    run = load(
        base + "checkpoint:\n  milestones: [10, 20]\n", "--checkpoint.milestones", "[30]", "--seed=1", "--seed=2"
    )
    assert (run.checkpoint.milestones, run.seed) == ([30], 2)


def test_a_switch_needs_no_value(load: Load, base: str) -> None:
    for overrides in (
        ["--training.compile"],
        ["--training.compile", "--seed=1"],
        ["--seed", "1", "--training.compile"],
    ):
        assert load(base, *overrides).training.compile
    run = load(base, "--training.compile", "false", "--parallelism.shard", "-1")
    assert (run.training.compile, run.parallelism.shard) == (False, -1)


def test_paths_on_the_command_line_need_no_yaml_quotes(load: Load, base: str) -> None:
    for path in ("a: b", "a #b", "{x}", "[x]", "*a", "&a", "!a", "1e3", "null", "-a", "a=b", "@a", "%a"):
        assert load(base, f"--data.path={path}").data.path == path


@pytest.mark.parametrize("length", ["tokens: 1e6", "tokens_per_parameter: 20"])
def test_one_kind_of_length_replaces_an_inherited_one(load: Load, base: str, length: str) -> None:
    Path("base.yaml").write_text(base)
    key, _, value = length.partition(": ")
    for run in (load(f"extends: base.yaml\ntraining:\n  {length}\n"), load(base, f"--training.{key}", value)):
        assert run.training.steps is None
        assert getattr(run.training, key) == float(value)
    # The command line may bring back the first kind, and null alone takes nothing away.
    run = load(f"extends: base.yaml\ntraining:\n  {length}\n", "--training.steps", "7")
    assert (run.training.steps, getattr(run.training, key)) == (7, None)
    assert load("extends: base.yaml\ntraining:\n  tokens: null\n").training.steps == 5


def test_null_takes_an_inherited_option_of_the_variant_back(load: Load, base: str) -> None:
    Path("base.yaml").write_text(base + "depth:\n  blocks: 4\n  gain: 1\n")
    assert load("extends: base.yaml\ndepth:\n  blocks: null\n").depth == {"gain": 1}
    assert load("extends: base.yaml\n", "--depth.gain=null").depth == {"blocks": 4}


def test_null_takes_an_inherited_value_back_to_the_recipe(load: Load, base: str) -> None:
    Path("base.yaml").write_text(base + "optimizer:\n  lr: 1e-3\n")
    assert load("extends: base.yaml\noptimizer:\n  lr: null\n").optimizer.lr is None


def test_two_runs_do_not_inherit_one_folder(load: Load, base: str) -> None:
    Path("base.yaml").write_text(base + "name: first\nfolder: out/{name}\n")
    run = load("extends: base.yaml\n")
    assert (run.name, run.folder) == ("x", "out/x")
    assert load_run("base.yaml").folder == "out/first"
    Path("base.yaml").write_text(base + "folder: out/first\n")
    assert load("extends: base.yaml\n").folder == "runs/x"


def test_known_names_are_accepted(load: Load, base: str) -> None:
    run = load(base, "--model.variant=b", known={"model.size": ("10M",), "model.variant": ("a", "b")})
    assert (run.model.size, run.model.variant) == ("10M", "b")


def test_a_path_object_and_a_folder_elsewhere(tmp_path: Path, base: str) -> None:
    (tmp_path / "base.yaml").write_text(base)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "child.yaml").write_text("extends: ../base.yaml\n")
    run = load_run(tmp_path / "sub" / "child.yaml")
    assert (run.name, run.origin("training.steps")) == ("child", f"{tmp_path / 'base.yaml'}:6")
