"""What a plan says that runs cost, with and without the data set. Numbers by hand; the model's are in conftest.py."""

from collections.abc import Callable
from pathlib import Path

import pytest

from torchtitan_ext import cli
from torchtitan_ext.cost import heldout_flops, heldout_tokens, most_checkpoints, peak_disk_bytes
from torchtitan_ext.resolve import ResolvedRun
from torchtitan_ext.run_folder import RunFolder
from torchtitan_ext.study import Plan

GATE = "variants: [standard, m_gate_kv]\nbaseline: standard\n"


@pytest.fixture
def first(plan: Callable[..., Plan]) -> Callable[[str], ResolvedRun]:
    def resolved(settings: str) -> ResolvedRun:
        run = plan(GATE + f"set: {{{settings}}}").runs[0].resolved
        assert run
        return run

    return resolved


def test_evaluation_is_a_forward_pass_over_the_chosen_windows_every_so_often(
    first: Callable[[str], ResolvedRun],
) -> None:
    # After steps 300, 600, 900 and 1000: 4,100 tokens are 64 whole windows of 64.
    run = first("heldout.every: 300, heldout.tokens: 4100")
    assert heldout_tokens(run) == 4 * 64 * 64
    assert heldout_flops(run) == pytest.approx(4 * 64 * 64 * 1_576_320 / 3)
    # 10 windows on 2 processes of 4 are padded to 16.
    assert heldout_tokens(first("heldout.every: 500, heldout.tokens: 640")) == 2 * 16 * 64
    assert heldout_tokens(first("heldout.every: 0")) == 0
    # No more than the split has: its tokens but for the last, which has no next one, in whole windows.
    run = first("heldout.every: 1000, heldout.tokens: 1000000000")
    whole = (run.dataset.split("heldout").n_tokens - 1) // 64
    assert heldout_tokens(run) == -(-whole // 8) * 8 * 64


def test_while_a_checkpoint_is_written_those_that_it_replaces_are_still_there(
    first: Callable[[str], ResolvedRun],
) -> None:
    run = first("checkpoint.every: 300")  # 300, 600; 900 beside them; 1000 beside 600 and 900
    assert most_checkpoints(run) == 3
    assert peak_disk_bytes(run) == 3 * (12 * 229_952 + 4 * 512 * 64)
    assert most_checkpoints(first("checkpoint.every: 0")) == 1
    assert most_checkpoints(first("checkpoint.every: 300, checkpoint.keep_last: 9")) == 4
    # 1000 beside the milestones 300 and 900, and 600, the one before the last.
    assert most_checkpoints(first("checkpoint.every: 300, checkpoint.milestones: [300, 900]")) == 4


def planned(capsys: pytest.CaptureFixture[str], *options: str) -> list[str]:
    assert cli.main(["study", "plan", "s.yaml", "--gpus", "2", *options]) == 0
    return capsys.readouterr().out.splitlines()


def test_the_cost_is_known_before_the_data_are_there(
    plan: Callable[..., Plan], capsys: pytest.CaptureFixture[str]
) -> None:
    plan(GATE + "budget: {match: params}\nset: {heldout.every: 300, heldout.tokens: 4096}")
    with_data = planned(capsys)
    Path("text").unlink()
    without = planned(capsys, "--vocab-size", "512")
    assert max(map(len, without)) <= 80
    rows = slice(3, 6)
    assert with_data[rows] == without[rows]
    assert with_data[4].split()[:3] == ["standard-debug", "1", "230k"]
    words = " ".join(line.strip() for line in without)
    # 512,000 tokens are 99.5% of 514,573, of 2 bytes each; 468,000 a second.
    assert "Once 512k tokens for the longest run, with the held-out ones, take 1.03MB on disk and <0.01 core-h" in words
    # Evaluation: 4 · 4,096 tokens forward, a third of the FLOPs each, beside 512,000.
    assert any(line.startswith("standard-debug") and line.split()[1:3] == ["?", "1.1%"] for line in without), without


def test_without_data_the_error_says_how_to_plan(message: Callable[..., str]) -> None:
    Path("text").unlink()
    assert message(GATE).endswith(
        "text does not exist; make it with `depth prep`, or correct the path; `depth study plan --vocab-size 50257` "
        "plans without it"
    )


def test_text_that_is_seen_again_is_said(plan: Callable[..., Plan], capsys: pytest.CaptureFixture[str]) -> None:
    plan(GATE + "sizes: [debug, {size: 1.2M, set: {training.steps: 3000}}]")
    lines = planned(capsys)
    there = plan(GATE).runs[0].resolved.dataset.split("train").n_tokens  # type: ignore[union-attr]
    seen = f"{3000 * 512 / there:.3g}"
    begin = lines.index("sees text more than once")
    assert lines[begin + 1] == f"  standard-1.2M: 1.54M tokens out of {there / 1e3:.0f}k, {seen} epochs"
    assert "debug" not in "".join(lines[begin : begin + 3])
    assert any(line.startswith("m_gate_kv-1.2M") and line.split()[1] == seen for line in lines)


def test_a_plan_without_data_is_not_held_against_folders_of_runs(
    plan: Callable[..., Plan],
    train: Callable[..., None],
    replan: Callable[[], Plan],
    capsys: pytest.CaptureFixture[str],
) -> None:
    plan(GATE)
    run = replan().runs[0]
    train(run, [0.1])
    assert RunFolder(run.folder).exists
    assert planned(capsys, "--vocab-size", "50257")[0].startswith("s: 2 runs")
