"""What is wrong with a study is said in one line, with file, line and key, before anything is written."""

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from torchtitan_ext.errors import UserError
from torchtitan_ext.study import load_study, plan_study

# With the base before them: the first line of a test's own is line 4.
GATE = "variants: [standard, m_gate_kv]\nbaseline: standard\n"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("seed: 1", "s.yaml:4: seed is not a key; did you mean 'seeds'?"),
        ("budget: {mach: flops}", "s.yaml:4: budget.mach is not a key; did you mean 'match'?"),
        ("budget:\n  match: flop", "s.yaml:5: budget.match 'flop' is unknown; did you mean 'flops'?"),
        ("budget: {by: width}", "s.yaml:4: budget is {by: 'width'}; only match: params is solved by a width"),
        ("budget: params", "s.yaml:4: budget is 'params'; must be a mapping with keys of match, by, tolerance"),
        ("seeds: 8", "s.yaml:4: seeds is 8; must be a list, written [a, b] or one '- a' a line"),
        ("seeds: []", "s.yaml:4: seeds is empty; give at least one"),
        ("seeds: [0, 1, 0]", "s.yaml:4: seeds is [0, 1, 0]; 0 is in it twice; keep one"),
        ("seeds: [0, -1]", "s.yaml:4: seeds[1] is -1; must be a whole number at least 0"),
        ("learning_rates: [0]", "s.yaml:4: learning_rates[0] is 0; must be a number greater than 0"),
        ("sizes: [debug, 10]", "s.yaml:4: sizes[1] is 10; must be a mapping with keys of size, set"),
        ("sizes: [debug, 10N]", "s.yaml:4: size '10N' is unknown; did you mean '10M'?"),
        ("sizes: [debug, debug]", "s.yaml:4: size 'debug' is in sizes twice; keep one"),
        ("retries: many", "s.yaml:4: retries is 'many'; must be a whole number at least 0"),
        ("folder: runs/{size}", "s.yaml:4: folder is 'runs/{size}'; the only part in braces that is filled in is"),
        ("name: a b", "s.yaml:4: name is 'a b'; must hold only letters, digits, '.', '_' and '-'"),
        ("seeds: [0]\nseeds: [1]", "s.yaml:5: seeds is given twice; keep one"),
        ("stop: {behind: 0.1}", "s.yaml:4: stop.at_step is missing; add it (at which step this is judged)"),
        ("stop: {behind: 0.1, at_step: 1001}", "s.yaml:4: stop.at_step is 1001, but the longest run has 1000 steps"),
        ("set: {training.step: 5}", "s.yaml:4: set: training.step is not a key; did you mean 'steps'?"),
        ("set:\n  training:\n    steps: 5", "s.yaml:5: set: training is a mapping; write whole keys, such as training"),
        ("set: {seed: 5}", "s.yaml:4: set: seed is decided by the study; use 'seeds'"),
        ("set: {model.variant: moda}", "s.yaml:4: set: model.variant is decided by the study; use 'variants'"),
        ("set: {depth.detach: true}", "s.yaml:4: set: depth.detach is an option of a variant; put it under `depth:`"),
        ("set:\n  training.steps: x", "s.yaml:5: training.steps is 'x'; must be a whole number greater than 0"),
        ("set:\n  training.batch_tokens: 100", "s.yaml:5: training.batch_tokens is 100, not a multiple of data.seq_"),
        ("set:\n  training.batch_tokens: 576", "s.yaml:5: the batch of 9 sequences (576 tokens) cannot be split over"),
        ("set:\n  data.path: nowhere", "nowhere does not exist; make it with `depth prep`, or correct the path"),
        ("set: {optimizer.lr: 1}\nlearning_rates: [1]", "s.yaml:4: set: optimizer.lr is decided by the study; use 'l"),
        ("controls: [{detached: m_gate}]", "s.yaml:4: detached: 'm_gate' is not the label of an entry; did you mean"),
        ("controls: [{wider: standard}]", "s.yaml:4: wider: 'standard' is the baseline itself; choose from: m_gate_kv"),
        ("controls: [{wide: m_gate_kv}]", "s.yaml:4: controls[0].wide is not a key; did you mean 'wider'?"),
        ("controls: [m_gate_kv]", "s.yaml:4: controls[0] is 'm_gate_kv'; must be a mapping with keys of detached"),
        ("controls: [{width: 5}]", "s.yaml:4: controls[0] is {width: 5}; a control has exactly one of detached"),
        ("controls: [{wall_clock: m_gate_kv, width: 72}]", "s.yaml:4: controls[0] is {wall_clock: 'm_gate_kv', width"),
        ("controls:\n  - wider: m_gate_kv\n  - wider: m_gate_kv", "s.yaml:6: two entries are called 'm_gate_kv_wider'"),
        (
            "exclude:\n  - {variant: moda}",
            "s.yaml:5: exclude: 'moda' is not the label of an entry; choose from: standa",
        ),
        ("exclude:\n  - {size: 10M}", "s.yaml:5: exclude: no run of the study has all of this; correct it or drop it"),
        (
            "exclude:\n  - {}",
            "s.yaml:4: exclude[0] is {}; an exclusion needs at least one of variant, size, seed and lr",
        ),
        ("exclude:\n  - {seed: 0}", "s.yaml:4: every run of s is excluded; nothing is left to run"),
        ("exclude:\n  - {variant: standard}", "s.yaml:2: m_gate_kv-debug-s0 has no baseline, which is excluded"),
        ("a: &a 1", "s.yaml:4: anchors (&) and aliases (*) are not used; repeat the value"),
    ],
)
def test_a_line_says_what_is_wrong_and_where(message: Callable[..., str], lines: str, expected: str) -> None:
    assert message(GATE + lines).startswith(expected)


@pytest.mark.parametrize(
    ("variants", "expected"),
    [
        ("[]", "s.yaml:3: variants is empty; give at least one"),
        ("[standard, standrad]", "s.yaml:3: variant 'standrad' is unknown; did you mean 'standard'?"),
        ("[standard, moda, moda]", "s.yaml:3: two entries are called 'moda'; give one a `name:` of its own"),
        ("[moda]", "s.yaml:2: baseline 'standard' is not the label of an entry of variants; choose from: moda"),
        ("[{variant: standard, size: 10M}]", "s.yaml:2: baseline 'standard' has a size of its own; the baseline has"),
        ("\n  - standard\n  - {variant: moda, dept: {}}", "s.yaml:5: variants[1].dept is not a key; did you mean 'dep"),
        ("\n  - standard\n  - {name: moda}", "s.yaml:5: variants[1].variant is missing; add it (name of the variant)"),
        (
            "\n  - standard\n  -\n    variant: moda\n    depth: {a: 1}",
            "s.yaml:7: depth.a is not an option of the varia",
        ),
        (
            "\n  - standard\n  - {variant: moda, depth: {a-b: 1}}",
            "s.yaml:5: depth.a-b is not a key; an option holds on",
        ),
        ("\n  - standard\n  - {variant: moda, depth: {x: [1]}}", "s.yaml:5: variants[1].depth.x is [1]; must be a num"),
        ("\n  - standard\n  - {variant: moda, set: {model.layers: 1}}", "s.yaml:5: moda at debug: "),
        ("\n  - standard\n  - {variant: moda, set: {model.heads: 5}}", "s.yaml:5: moda at debug: width = 64 and heads"),
        ("\n  - standard\n  - {variant: moda, set: {training.steps: 5}}", "s.yaml:5: set: training.steps cannot be an"),
        ("\n  - standard\n  - {variant: moda, set: {data.seq_len: 8}}", "s.yaml:5: set: data.seq_len cannot be an ent"),
    ],
)
def test_entries_are_checked(message: Callable[..., str], variants: str, expected: str) -> None:
    assert message(f"baseline: standard\nvariants: {variants}").startswith(expected)


def test_an_own_size_needs_one_size_to_be_compared_with(message: Callable[..., str]) -> None:
    text = "sizes: [debug, 1.2M]\nbaseline: standard\nvariants:\n  - standard\n  - {variant: deep_baseline, size: 10M}"
    assert message(text).startswith("s.yaml:6: 'deep_baseline' has its own size, but the study has 2; it is not clear")


def test_options_in_the_base_are_named_where_they_are(message: Callable[..., str]) -> None:
    with open("base.yaml", "a") as file:
        file.write("depth:\n  detach: true\n")
    assert message(GATE).startswith("base.yaml:10: depth.detach is not an option of the variant")


def test_a_variant_that_cannot_be_detached_names_those_that_can(message: Callable[..., str]) -> None:
    text = "variants: [standard, moda]\nbaseline: standard\ncontrols: [{detached: moda}]"
    assert message(text) == (
        "s.yaml:4: detached: moda has no gradient across layers that could be cut; these have: m_gate_kv, "
        "m_gate_multiply, m_gate_query, m_gate_output"
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "base: bass.yaml\nvariants: [standard]\nbaseline: standard",
            "s.yaml:1: base is 'bass.yaml', which is not a fi",
        ),
        ("variants: [standard]\nbaseline: standard", "s.yaml: base is missing; add it (run file that all runs start f"),
        ("", "s.yaml:1: the file is empty"),
        ("[1]", "s.yaml:1: the top level must be keys with values"),
        ("base: [", "s.yaml:1: not valid YAML"),
    ],
)
def test_files_that_are_no_study(text: str, expected: str) -> None:
    Path("s.yaml").write_text(text)
    with pytest.raises(UserError) as error:
        load_study("s.yaml")
    assert str(error.value).startswith(expected)


def test_a_study_file_that_cannot_be_read() -> None:
    Path("bytes.yaml").write_bytes(b"\xff")
    for name, expected in {
        "bas.yaml": "bas.yaml does not exist; did you mean 'base.yaml'?",
        "none/s.yaml": "none/s.yaml does not exist; there is no .yaml file in none either",
        "text": "text cannot be read: Is a directory",
        "bytes.yaml": "bytes.yaml: the file is not UTF-8 text; save it as UTF-8",
    }.items():
        with pytest.raises(UserError) as error:
            load_study(name)
        assert str(error.value) == expected


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (["--seed", "[0]"], "command line: --seed is not a key of a study; did you mean 'seeds'?"),
        (["seeds"], "command line: seeds is not an option; write --key value"),
        (["--seeds"], "command line: --seeds needs a value; write --seeds value"),
        (["--seeds", "0"], "command line: --seeds: seeds is 0; must be a list"),
        (["--seeds", "[0"], "command line: --seeds [0: not valid YAML"),
        (["--set.training.step", "5"], "command line: --set.training.step: set: training.step is not a key"),
        (["--set.training.steps=x"], "command line: --set.training.steps: training.steps is 'x'; must be a whole num"),
        (["--budget", "{mach: flops}"], "command line: --budget: budget.mach is not a key; did you mean 'match'?"),
        (["--budget", "{match: flops"], "command line: --budget {match: flops: not valid YAML"),
        (["--budget", "{by: width, by: ffn_width}"], "command line: --budget: by is given twice; keep one"),
        (["--variants", "[{variant: a, variant: b}]"], "command line: --variants: variant is given twice; keep one"),
        (["--stop={behind: 0.1, at_step: 2000}"], "command line: --stop: stop.at_step is 2000, but the longest run"),
        (["--set", "{training.step: 5}"], "command line: --set: set: training.step is not a key"),
        (["--folder", "{size}/x"], "command line: --folder: folder is '{size}/x'; the only part in braces"),
        (["--variants.x", "5"], "command line: --variants.x: give variants whole, as --variants value"),
    ],
)
def test_the_command_line_is_checked_like_the_file(
    message: Callable[..., str], tokens: list[str], expected: str
) -> None:
    assert message(GATE, *tokens).startswith(expected)


def test_no_study_ends_in_anything_but_a_plan_or_a_line(load: Callable[..., object]) -> None:
    """Every key with every kind of value that does not belong there."""
    odd = ["", "5", "-1", "1e99", "x", "''", "true", "[]", "[[]]", "{}", "{a: {b: [c]}}", "[{}]", "[null]", "[1, x]"]
    odd += ["[{variant: standard, set: [1]}]", "[{size: debug, set: {x: {}}}]", "{match: params, tolerance: x}"]
    odd += [
        "[standard, m_gate_kv, {variant: m_gate_kv_detached, name: -}]",
        "9" * 120,
        '{"a\\nb": {"c\\n": 1}}',
        "{training.steps: 1e3}",
    ]
    keys = ["base", "name", "folder", "variants", "sizes", "seeds", "learning_rates", "set", "baseline", "budget"]
    keys += ["controls", "exclude", "stop", "retries"]
    outcomes = []
    for key, value in itertools.product(keys, odd):
        lines = {"base": "base.yaml", "variants": "[standard, m_gate_kv]", "baseline": "standard", key: value}
        Path("s.yaml").write_text("".join(f"{name}: {text}\n" for name, text in lines.items()))
        try:
            plan_study(load_study("s.yaml"), ranks=2)
            outcomes.append("")
        except UserError as error:
            outcomes.append(str(error))
    assert "" in outcomes
    assert [text for text in outcomes if len(text.splitlines()) > 1] == []
    assert not Path("runs").exists()
