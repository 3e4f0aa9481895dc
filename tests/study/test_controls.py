"""Controls: the gradient cut, the wider baseline, the baseline with the variant's wall-clock."""

import json
from collections.abc import Callable

import pytest

from torchtitan_ext.study import Plan, PlannedRun, plan_text

GATE = "variants: [standard, m_gate_kv]\nbaseline: standard\n"
WALL_CLOCK = GATE + "controls: [{wall_clock: m_gate_kv}]\n"


def test_detached_is_the_variant_but_for_its_gradient(plan: Callable[..., Plan]) -> None:
    _, variant, control = plan(GATE + "budget: {match: flops}\ncontrols: [{detached: m_gate_kv}]").runs
    assert (control.variant, control.control, control.name) == (
        "m_gate_kv_detached",
        "detached",
        "m_gate_kv_detached-debug-s0",
    )
    assert variant.resolved
    assert control.resolved
    own, other = control.resolved.run.model_dump(), variant.resolved.run.model_dump()
    assert own.pop("model") == {**other.pop("model"), "variant": "m_gate_kv_detached"}
    assert {key for key in own if own[key] != other[key]} == {"name", "folder"}


def test_detached_works_for_a_variant_with_the_option_alone(plan: Callable[..., Plan]) -> None:
    text = "variants: [standard, m_gate_query]\nbaseline: standard\ncontrols: [{detached: m_gate_query}]"
    control = plan(text).runs[2]
    assert control.resolved
    assert (control.resolved.run.model.variant, control.resolved.run.depth) == ("m_gate_query", {"detach": True})


def test_a_wider_baseline_has_at_least_as_many_parameters(plan: Callable[..., Plan]) -> None:
    # 36,864 / 768 = 48 more of ffn_width. 192 + 48 = 240.
    _, variant, control = plan(GATE + "controls: [{wider: m_gate_kv}]").runs
    assert control.resolved
    assert (control.variant, control.control, control.baseline) == ("standard", "wider", "standard-debug-s0")
    assert control.resolved.shape.ffn_width == 240
    assert control.resolved.parameters == 229_952 + 48 * 768 == 266_816
    assert control.differences == (("model.ffn_width", 240, 192),)
    assert variant.resolved
    assert control.resolved.steps == variant.resolved.steps


def test_a_wider_baseline_of_a_given_width(plan: Callable[..., Plan], message: Callable[..., str]) -> None:
    # Width 72, feed-forward 216: 4 · (2·72·72 + 2·72·36 + 3·72·216 + 144) + 72 + 512·72 = 286,344.
    control = plan(GATE + "controls: [{wider: m_gate_kv, width: 72}]").runs[2]
    assert control.resolved
    assert control.resolved.parameters == 286_344
    assert control.differences == (("model.width", 72, 64), ("model.ffn_width", 216, 192))
    assert message(GATE + "controls:\n  - {wider: m_gate_kv, width: 64}") == (
        "s.yaml:5: m_gate_kv_wider at debug: 229,952 parameters against 266,816 (-13.82%); it must have as many, and "
        "model.width 64 comes closest"
    )
    assert message(GATE + "controls:\n  - {wider: m_gate_kv, width: 70}").startswith(
        "s.yaml:5: m_gate_kv_wider at debug: width = 70 and heads = 4, which does not divide it"
    )


def test_a_wider_baseline_has_a_width_for_each_size(plan: Callable[..., Plan], message: Callable[..., str]) -> None:
    text = GATE + "sizes: [debug, 10M]\ncontrols:\n  - {wider: m_gate_kv, width: %s}"
    found = plan(text % "{10M: 320, debug: 96}").runs
    widths = [run.resolved and run.resolved.shape.width for run in found if run.control == "wider"]
    assert widths == [96, 320]
    assert message(text % 320) == (
        "s.yaml:6: width 320 cannot fit all of debug, 10M; give a width for each as {debug: 320, ...}, or leave width "
        "out to have each feed-forward widened"
    )
    assert message(text % "{debug: 96}") == "s.yaml:6: width has none for 10M; add {10M: WIDTH} to it"
    assert message(text % "{debug: 96, 10N: 8}") == (
        "s.yaml:6: width is given for '10N', no size of this study; did you mean '10M'?"
    )
    assert message(text % "[96]").startswith("s.yaml:6: controls[0].width is [96]; must be a whole number greater than")
    # The size may also be the base's.
    assert message(GATE + "controls:\n  - {wider: m_gate_kv, width: {1.2M: 160}}").startswith(
        "s.yaml:5: width is given for '1.2M', no size of this study; choose from: debug"
    )


def test_a_baseline_that_is_no_smaller_needs_no_wider_one(message: Callable[..., str]) -> None:
    narrow = "{variant: m_gate_kv, set: {model.ffn_width: 64}}"
    text = f"variants: [standard, {narrow}]\nbaseline: standard\ncontrols:\n  - wider: m_gate_kv"
    # 266,816 - 128 · 768 = 168,512
    assert message(text) == (
        "s.yaml:5: m_gate_kv_wider at debug: the baseline has 229,952 parameters, no fewer than the variant's 168,512; "
        "give a `width:` or drop this control"
    )


def test_wall_clock_waits_for_the_step_times_of_all_seeds(
    plan: Callable[..., Plan], train: Callable[..., None]
) -> None:
    found = plan(WALL_CLOCK, "--seeds", "[0, 1]")
    assert [run.control for run in found.runs] == [None, None, None, None, "wall_clock", "wall_clock"]
    control = found.runs[-1]
    assert control.after == (
        *("standard-debug-s0", "standard-debug-s1"),
        *("m_gate_kv-debug-s0", "m_gate_kv-debug-s1"),
    )
    assert (control.command, control.resolved) == (None, None)


def test_wall_clock_gives_the_baseline_the_steps_that_the_slower_step_would_have_bought(
    load: Callable[..., object], train: Callable[..., None], replan: Callable[[], Plan]
) -> None:
    load(WALL_CLOCK + "seeds: [0, 1]")
    runs = {run.name: run for run in replan().runs}
    # The first step compiles. Medians: 0.10 and 0.11 for the baseline, 0.12 and 0.14 for the variant.
    train(runs["standard-debug-s0"], [9.0, 0.10, 0.10, 0.11, 0.09])
    train(runs["standard-debug-s1"], [9.0, 0.11, 0.11])
    train(runs["m_gate_kv-debug-s0"], [9.0, 0.12, 0.12])
    assert replan().runs[-1].command is None
    train(runs["m_gate_kv-debug-s1"], [9.0, 0.14, 0.14], state="running")
    assert replan().runs[-1].command is None
    train(runs["m_gate_kv-debug-s1"], [9.0, 0.14, 0.14], state="diverged")
    # 1000 · 0.13 / 0.105 = 1238.1; a tenth of it is warm-up.
    for control in replan().runs[-2:]:
        assert control.resolved
        assert control.resolved.steps == 1238
        assert control.resolved.run.optimizer.warmup_steps == 123
        assert control.matches[0].got == pytest.approx(1238 * 0.105)
        assert control.matches[0].wanted == pytest.approx(130.0)
        assert {key for key, _, _ in control.differences} == {"training.steps", "optimizer.warmup_steps"}


def test_a_wall_clock_run_that_has_begun_keeps_its_length(
    load: Callable[..., object], train: Callable[..., None], replan: Callable[[], Plan]
) -> None:
    load(WALL_CLOCK)

    def measure(standard: float, variant: float) -> PlannedRun:
        runs = replan().runs
        train(runs[0], [standard])
        train(runs[1], [variant])
        return replan().runs[2]

    first = measure(0.1, 0.12)
    assert first.resolved
    assert first.resolved.steps == 1200
    train(first, [0.1], state="running")
    again = measure(0.1, 0.13)
    assert again.resolved
    assert again.resolved.steps == 1200
    assert again.matches[0].miss == pytest.approx(1200 / 1300 - 1)


def test_a_wall_clock_budget_is_that_control_for_every_variant(plan: Callable[..., Plan]) -> None:
    text = "variants: [standard, m_gate_kv, control_block]\nbaseline: standard\nbudget: {match: wall_clock}\n"
    entries = ["standard", "m_gate_kv", "control_block", "m_gate_kv_wall_clock", "control_block_wall_clock"]
    assert [run.entry for run in plan(text).runs] == entries
    assert [run.entry for run in plan(text + "controls: [{wall_clock: m_gate_kv}]").runs] == entries


def test_step_times_of_unlike_machines_are_pointed_out(
    plan: Callable[..., Plan], train: Callable[..., None], replan: Callable[[], Plan]
) -> None:
    plan(WALL_CLOCK)
    own, other, _ = replan().runs
    for run, device, seconds in ((own, "NVIDIA B200", 0.1), (other, "NVIDIA H200", 0.2)):
        train(run, [seconds] * 3)
        file = run.folder / "logs" / "machines" / "n1.jsonl"
        file.parent.mkdir(parents=True)
        start = {"format": 1, "time": 0.0, "host": "n1", "devices": {device: 8}}
        file.write_text(json.dumps(start) + "\n")
    said = " ".join(plan_text(replan()).split())
    assert (
        "measured on unlike machines m_gate_kv_wall_clock-debug: step times of standard-debug on NVIDIA B200, "
        "m_gate_kv-debug on NVIDIA H200 say more of the machines than of the variant" in said
    )
    file.write_text(json.dumps({**start, "devices": {"NVIDIA B200": 4}}) + "\n")
    assert "unlike machines" not in plan_text(replan())
