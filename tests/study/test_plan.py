"""Which runs a plan has, in which order, and how it is shown."""

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from torchtitan_ext.cost import disk_bytes, kept_checkpoints
from torchtitan_ext.errors import UserError
from torchtitan_ext.gpus import Speed
from torchtitan_ext.resolve import load_resolved
from torchtitan_ext.study import Plan, load_study, plan_study, plan_text
from torchtitan_ext.study.differences import check_intended, differences_between

GATE = "variants: [standard, m_gate_kv]\nbaseline: standard\n"


def test_the_matrix_seed_by_seed_with_the_baseline_first(plan: Callable[..., Plan]) -> None:
    found = plan("variants: [control_block, standard]\nbaseline: standard\nseeds: [7, 3]\nsizes: [1.2M, debug]")
    assert [run.name for run in found.runs] == [
        f"{entry}-{size}-s{seed}"
        for size, seed, entry in itertools.product(["1.2M", "debug"], [7, 3], ["standard", "control_block"])
    ]
    assert [run.baseline for run in found.runs[:2]] == [None, "standard-1.2M-s7"]
    assert {run.label for run in found.runs} == {
        *("standard-1.2M", "control_block-1.2M", "standard-debug", "control_block-debug")
    }


def test_overrides_are_what_train_takes(plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch) -> None:
    entry = "{variant: m_gate_query, name: odd, depth: {detach: true}, set: {training.precision: fp32}}"
    study = (
        f"variants: [standard, {entry}]\nbaseline: standard\n"
        "set: {checkpoint.milestones: [10, 20], data.path: ./text}\n"
        "learning_rates: [1e-05]\nstop: {behind: 0.1, at_step: 500}\nfolder: out/{name}"
    )
    monkeypatch.setenv("WORLD_SIZE", "2")
    baseline, variant = plan(study).runs
    for run in (baseline, variant):
        assert run.command
        assert run.resolved
        again = load_resolved(str(run.command.config_file), list(run.command.overrides))
        assert again.run == run.resolved.run
        assert (again.run.name, Path(again.run.folder)) == (run.name, run.folder)
    assert variant.resolved
    assert variant.resolved.run.depth == {"detach": True}
    assert variant.resolved.run.checkpoint.milestones == [10, 20]
    assert variant.resolved.run.logging.baseline == "out/s/standard-debug-lr1e-05-s0"
    assert (variant.resolved.run.training.stop_behind, variant.resolved.run.training.stop_behind_at) == (0.1, 500)
    assert baseline.resolved
    assert baseline.resolved.run.training.stop_behind is None


def test_options_that_look_like_something_else_stay_text(plan: Callable[..., Plan]) -> None:
    entry = "{variant: m_gate_kv, depth: {inject: 'key_value'}, name: '007'}"
    run = plan(f"variants: [standard, {entry}]\nbaseline: standard\nname: '1e3'").runs[1]
    assert run.resolved
    assert (run.resolved.run.name, run.resolved.run.depth) == ("007-debug-s0", {"inject": "key_value"})


def test_exclusions_take_controls_along(plan: Callable[..., Plan]) -> None:
    text = GATE + "seeds: [0, 1]\ncontrols: [{detached: m_gate_kv}, {wider: m_gate_kv}, {wall_clock: m_gate_kv}]\n"
    names = [
        run.name for run in plan(text + "exclude: [{variant: m_gate_kv, seed: 1}, {variant: m_gate_kv_wider}]").runs
    ]
    assert names == [
        *("standard-debug-s0", "m_gate_kv-debug-s0", "m_gate_kv_detached-debug-s0", "standard-debug-s1"),
        "m_gate_kv_wall_clock-debug-s0",
    ]


def test_an_entry_with_a_size_of_its_own_is_compared_with_the_baseline_of_the_studys(plan: Callable[..., Plan]) -> None:
    run = plan("variants: [standard, {variant: deep_baseline, size: 1.2M}]\nbaseline: standard").runs[1]
    assert (run.name, run.size, run.baseline) == ("deep_baseline-1.2M-s0", "1.2M", "standard-debug-s0")
    assert run.resolved
    assert run.resolved.shape.layers == 6
    assert run.differences == (("model.size", "1.2M", "debug"), ("model.variant", "deep_baseline", "standard"))


def test_a_difference_that_nobody_asked_for_is_an_error(plan: Callable[..., Plan]) -> None:
    one, other = (plan(GATE + f"set: {{optimizer.weight_decay: {value}}}").runs for value in (0.1, 0.2))
    assert one[1].resolved
    differences = differences_between(one[1].resolved, other[0].resolved)
    with pytest.raises(UserError, match=r"^x differs from its baseline in optimizer.weight_decay \(0.1 against 0.2\)"):
        check_intended(differences, frozenset({"model.variant"}), "x")


def test_disk_is_what_a_finished_run_keeps_of_checkpoints(plan: Callable[..., Plan]) -> None:
    def kept(settings: str) -> int:
        run = plan(GATE + f"set: {{training.steps: 1000, {settings}}}").runs[0].resolved
        assert run
        # The weights and Adam's two moments, 4 bytes each; the tied embedding's weight once more, as the head's.
        assert disk_bytes(run) == kept_checkpoints(run) * (3 * 4 * 229_952 + 4 * 512 * 64)
        return kept_checkpoints(run)

    assert kept("checkpoint.every: 0") == 1  # step 1000
    assert kept("checkpoint.every: 300") == 2  # steps 900 and 1000
    assert kept("checkpoint.every: 300, checkpoint.keep_last: 9") == 4  # 300, 600, 900, 1000
    assert kept("checkpoint.every: 300, checkpoint.milestones: [300, 900, 2000]") == 3  # 300; 900 is a last one too


def test_gpu_hours_are_flops_over_the_stated_speed() -> None:
    # 1e18 / (2250e12 · 0.4) = 1111.1 s; at 989e12 · 0.5, 2022.2 s
    assert Speed().gpu_hours(1e18) == pytest.approx(1111.111 / 3600, rel=1e-6)
    assert Speed("H100", 0.5).gpu_hours(1e18) == pytest.approx(2022.245 / 3600, rel=1e-6)
    with pytest.raises(UserError, match=r"--gpu B20 is unknown; did you mean 'B200'\?"):
        Speed("B20")
    with pytest.raises(UserError, match="--mfu 40 must be a share"):
        Speed(mfu=40.0)


def test_the_text_fits_80_columns_and_says_what_differs(plan: Callable[..., Plan]) -> None:
    text = plan_text(
        plan(
            GATE + "budget: {match: params}\nseeds: [0, 1, 2]\nsizes: [debug, 1.2M]\nlearning_rates: [1e-3]\n"
            "controls: [{detached: m_gate_kv}, {wall_clock: m_gate_kv}, "
            "{wider: m_gate_kv, width: {debug: 72, 1.2M: 160}}]"
        ),
        Speed("H100", 0.5),
    )
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0] == "s: 30 runs of 2 processes each, in runs/s"
    # 1000 steps of 512 tokens of 1,576,320 FLOPs (test_budgets.py)
    assert "standard-debug-lr0.001         3    230k    1000    512k 8.07e11   <0.01   <0.01" in lines
    assert "  m_gate_kv-debug-lr0.001: model.ffn_width 144, 229,952 parameters against" in lines
    assert "    229,952 (+0.00%)" in lines
    # Another width at 1.2M, and heads of 18: 286,344 parameters are 24.5% above 229,952.
    assert "  m_gate_kv_wider-debug-lr0.001: model.width 72 (64), model.ffn_width 216 (192)" in lines
    assert "  m_gate_kv_wider-debug-lr0.001: heads of 18" in lines
    assert "  m_gate_kv_wider-debug-lr0.001: +24.5% parameters against" in lines
    assert "Hours assume H100 at an MFU of 50% of 989 TFLOP/s" in text
    assert "m_gate_kv_wall_clock-1.2M-lr0.001: for the step times of" in text
    # What is the same at all sizes is said once.
    assert "  m_gate_kv-debug-lr0.001: model.variant m_gate_kv (standard), model.ffn_width" in lines


def test_the_command_line_wins_over_the_file(plan: Callable[..., Plan]) -> None:
    text = GATE + "seeds: [0, 1]\nset: {training.steps: 10, optimizer.lr: 1e-3}"
    tokens = ["--seeds", "[5]", "--set.training.steps=20", "--variants", "[standard, {variant: moda, name: x}]"]
    found = plan(text, *tokens, "--name", "007")
    assert [run.name for run in found.runs] == ["standard-debug-s5", "x-debug-s5"]
    assert found.study.folder == Path("runs/007")
    assert found.runs[0].resolved
    assert (found.runs[0].resolved.steps, found.runs[0].resolved.run.optimizer.lr) == (20, 1e-3)


def test_the_command_line_takes_whole_mappings(plan: Callable[..., Plan]) -> None:
    text = GATE + "budget: {tolerance: 0.1}\nset: {training.steps: 10, optimizer.lr: 1e-3}"
    tokens = ["--budget", "{match: params, by: ffn_width}", "--stop={behind: 1, at_step: 5}"]
    found = plan(text, *tokens, "--set", "{training.steps: 20}", "--folder", "{name}-{name}")
    # A mapping replaces the file's.
    assert (found.study.budget.match, found.study.budget.tolerance) == ("params", 0.005)
    assert found.study.set == {"training.steps": 20}
    assert found.study.stop
    assert (found.study.stop.behind, found.study.stop.at_step) == (1, 5)
    # A path in braces stays a path.
    assert found.study.folder == Path("s-s")


def test_a_plan_is_the_same_every_time(load: Callable[..., object]) -> None:
    load(GATE + "budget: {match: flops}\nseeds: [0, 1]\ncontrols: [{wall_clock: m_gate_kv}]")
    first, second = (plan_study(load_study("s.yaml"), ranks=2).runs for _ in range(2))
    assert [run.command and run.command.overrides for run in first] == [
        run.command and run.command.overrides for run in second
    ]
