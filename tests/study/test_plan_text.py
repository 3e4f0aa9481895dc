"""What a plan says about how its runs are trained, and where they are not equal."""

from collections.abc import Callable

import pytest

from torchtitan_ext import cli
from torchtitan_ext.study import Plan, plan_text

GATE = "variants: [standard, m_gate_kv]\nbaseline: standard\n"


def sections(text: str) -> dict[str, list[str]]:
    """The lines of each section below its first line."""
    found = {}
    for part in text.split("\n\n"):
        first, *rest = part.splitlines()
        found[first.split("   ")[0]] = rest
    return found


def joined(lines: list[str]) -> str:
    return " ".join(line.strip() for line in lines)


def test_each_arm_has_its_recipe(plan: Callable[..., Plan]) -> None:
    other = "{variant: control_block, name: other, set: {training.batch_tokens: 1024, optimizer.beta2: 0.9}}"
    text = plan_text(
        plan(
            f"variants: [standard, m_gate_kv, {other}]\nbaseline: standard\nbudget: {{match: flops, tolerance: 0.01}}\n"
            "set: {optimizer.lr: 0.00012345, training.compile: true, optimizer.schedule: cosine}\n"
            "sizes: [debug, {size: 1.2M, set: {training.activation_checkpoint: full, training.precision: fp32}}]"
        )
    )
    assert max(map(len, text.splitlines())) <= 80
    table = text[text.index("recipe ") :].split("\n\n")[0].splitlines()
    assert table[0].split() == ["recipe", "micro", "lr", "batch", "warm-up", "sched.", "prec.", "compile"]
    rows = {line.split()[0]: line.split()[1:] for line in table[1:7]}
    # 8 sequences of 64 tokens on 2 processes; 1,000 and 874 steps (test_budgets.py), a tenth of them warm-up.
    assert rows["standard-debug"] == ["4", "1.23e-4", "512", "100", "cosine", "auto", "yes"]
    assert rows["m_gate_kv-debug"] == ["4", "1.23e-4", "512", "87", "cosine", "auto", "yes"]
    assert rows["other-debug"][0:3:2] == ["8", "1024"]
    assert rows["standard-1.2M"][4:] == ["cosine", "fp32", "yes"]
    words = joined(table[7:])
    for part in (
        "all runs, but for differences",
        "data.seq_len 64",
        "optimizer.beta2 0.99",
        "optimizer.weight_decay 0.1",
    ):
        assert part in words
    # What changes with the size is said for each, and in no place for all.
    assert (
        "standard-debug: training.activation_checkpoint none standard-1.2M: training.activation_checkpoint full"
        in words
    )
    assert words.count("training.activation_checkpoint") == 2
    assert "other-debug: " in joined(sections(text)["differs from the baseline in"])
    assert "optimizer.beta2 0.9 (0.99)" in joined(sections(text)["differs from the baseline in"])
    assert "training.micro_batch 8 (4)" in joined(sections(text)["differs from the baseline in"])


def test_a_size_of_ones_own_shows_its_shape_and_an_entry_without_differences_says_so(plan: Callable[..., Plan]) -> None:
    again = "{variant: standard, name: again}"
    deep = "{variant: deep_baseline, size: 1.2M}"
    text = plan_text(plan(f"variants: [standard, {again}, {deep}]\nbaseline: standard"))
    words = joined(sections(text)["differs from the baseline in"])
    assert "again: nothing" in words
    assert (
        "model.size 1.2M (debug), model.variant deep_baseline (standard), model.layers 6 (4), model.width 128 (64)"
        in words
    )


def test_an_entry_that_differs_at_one_size_alone_says_nothing_of_the_others(plan: Callable[..., Plan]) -> None:
    entry = "{variant: standard, name: six, set: {model.layers: 6}}"  # as many as the size 1.2M has
    text = plan_text(plan(f"variants: [standard, {entry}]\nbaseline: standard\nsizes: [debug, 1.2M]"))
    assert sections(text)["differs from the baseline in"] == ["  six-debug: model.layers 6 (4)", "  six-1.2M: nothing"]


@pytest.mark.parametrize(
    ("match", "expected"),
    [
        # A feed-forward of 240 adds 36,864 parameters (test_controls.py): 6 · 36,864 FLOPs per token to 1,576,320.
        ("flops", "m_gate_kv_wider-debug: +14.0% training FLOPs against standard-debug"),
        ("tokens", None),
    ],
)
def test_controls_outside_the_budget_are_named(plan: Callable[..., Plan], match: str, expected: str | None) -> None:
    text = plan_text(plan(GATE + f"budget: {{match: {match}}}\ncontrols: [{{wider: m_gate_kv}}]"))
    said = sections(text).get("outside the budget, as these controls ask")
    assert said == (None if expected is None else [f"  {expected}"])


def test_a_detached_control_has_as_many_steps_and_so_fewer_flops(plan: Callable[..., Plan]) -> None:
    # Without gradient across layers M costs, in 3 layers, 2 · 8,192 + 3 · 64 for the projection and 16,384 + 384 for
    # the gate: 3 · 33,344 = 100,032 in place of 225,216 (test_budgets.py), for 875 steps in place of 1,000.
    text = plan_text(plan(GATE + "budget: {match: flops}\ncontrols: [{detached: m_gate_kv}]"))
    share = 875 * (1_576_320 + 100_032) / (1000 * 1_576_320) - 1
    assert sections(text)["outside the budget, as these controls ask"] == [
        f"  m_gate_kv_detached-debug: {share:+.1%} training FLOPs against standard-debug"
    ]


def test_the_command_prints_the_same_when_it_is_piped(
    plan: Callable[..., Plan], capsys: pytest.CaptureFixture[str]
) -> None:
    text = plan_text(plan(GATE))
    assert cli.main(["study", "plan", "s.yaml", "--nproc", "2"]) == 0
    assert capsys.readouterr().out == f"{text}\n"


def test_parameters_are_counted_by_how_they_are_trained(plan: Callable[..., Plan]) -> None:
    rates = "{groups.gates.lr: 0.02, groups.gate_biases.lr_factor: 0.5}"
    entry = f"{{variant: m_gate_kv, depth: {{gate_bias: true}}, set: {rates}}}"
    rates = "{optimizer.lr: 1e-3, optimizer.weight_decay: 0.2}"
    study = f"variants: [standard, {entry}]\nbaseline: standard\nset: {rates}\ncontrols: [{{detached: m_gate_kv}}]"
    text = plan_text(plan(study))
    # Norms and embedding: 9 · 64 + 512 · 64 = 33,344 of 229,952. M adds in 3 layers matrices of 64 · 64 and 64 · 128,
    # 36,864 in all, and 3 · 128 biases; without a gradient the gates' 3 · 64 · 128 and the biases learn nothing.
    assert text[text.index("parameters  ") :].split("\n\n")[0].splitlines() == [
        "parameters                          all      decayed    undecayed  no gradient",
        "standard-debug                  229,952      196,608       33,344            0",
        "m_gate_kv-debug                 267,200      233,472       33,728            0",
        "m_gate_kv_detached-debug        267,200      233,472       33,728       24,960",
    ]
    groups = (
        "gate_biases, 384, learning rate 0.0005, no weight decay; gates, 36,864, learning rate 0.02, weight decay 0.2"
    )
    assert joined(sections(text)["parameter groups that variants add"]) == (
        f"m_gate_kv-debug: {groups} m_gate_kv_detached-debug: {groups}"
    )
    # A rate that an entry asks for is a difference from the baseline.
    assert "groups.gates.lr 0.02 (none)" in joined(sections(text)["differs from the baseline in"])


def test_equal_parameters_that_are_not_equally_decayed_are_named(plan: Callable[..., Plan]) -> None:
    text = (
        "variants: [standard, m_gate_kv, {variant: m_gate_kv, name: undecayed, set: {groups.gates.weight_decay: 0}}]\n"
    )
    said = sections(plan_text(plan(text + "baseline: standard\nbudget: {match: params}")))
    # The feed-forward gives 48 · 768 = 36,864 decayed parameters (test_budgets.py), as many as M's matrices have.
    assert said["decayed parameters, where not equal too"] == [
        "  undecayed-debug: -36,864 against standard-debug, -16.0% of its parameters"
    ]


def test_a_group_that_the_variant_does_not_have_is_an_error(message: Callable[..., str]) -> None:
    entry = "{variant: m_gate_kv, set: {groups.gate.lr: 0.02}}"
    assert message(f"variants:\n  - standard\n  - {entry}\nbaseline: standard") == (
        "s.yaml:4: groups.gate.lr is not for a parameter group of the variant; did you mean 'gates'?"
    )
