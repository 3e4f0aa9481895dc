"""What a verdict must not be read without: other settings, and seeds without a final loss."""

import json
import math
from pathlib import Path

import pytest

from eval.compare.compare import compare
from eval.compare.console import main_table
from eval.compare.grouping import make_families
from eval.compare.page import Page
from eval.compare.page_markdown import to_markdown
from eval.compare.results import GroupResult, Results
from eval.compare.sections import report
from eval.compare.sections.losses import loss_blocks
from eval.compare.sections.short import short_blocks
from eval.compare.sources import gather

from .conftest import Recorded, straight

NOISE = (0.0, 0.003, -0.004, 0.002, -0.001, 0.004)
SHIFT = {"m_gate_kv": 0, "moda": 1, "attnres_block": 2, "standard": 3, "control_block": 4}
"""Where in the noise a variant begins: each has its own."""
WHY = "Loss is not finite (nan) at step 40"


def results(runs: Path) -> Results:
    gathered = gather([str(runs)])
    return compare(make_families(gathered.runs, gathered.left_out), gathered.left_out)


def rows(found: Results) -> dict[str, GroupResult]:
    (family,) = found.families
    return {group.label: group for group in family.groups}


def texts(found: Results) -> tuple[str, str]:
    """The report's section "In short", and the console's table as one line."""
    (family,) = found.families
    return to_markdown(Page("", short_blocks(family))), " ".join(main_table(found).split())


def write(runs: Path, variant: str, loss: float, seeds: int = 6, **fields: object) -> None:
    for seed in range(seeds):
        own = NOISE[(seed + SHIFT[variant]) % 6]
        Recorded(straight(8, loss + own), variant=variant, seed=seed, **fields).write(runs / f"{variant}-s{seed}")


@pytest.fixture
def study(runs: Path) -> Path:
    """Six seeds of a baseline, a good variant and a bad one."""
    write(runs, "standard", 4.0)
    write(runs, "m_gate_kv", 3.9)
    write(runs, "moda", 4.1)
    return runs


def fail(runs: Path, variant: str, *seeds: int, state: str = "diverged", reason: str | None = WHY) -> None:
    for seed in seeds:
        path = runs / f"{variant}-s{seed}"
        status = json.loads((path / "status.json").read_text())
        (path / "status.json").write_text(json.dumps({**status, "state": state, "step": 40, "reason": reason}))


def test_without_losses_the_verdicts_are_plain(study: Path) -> None:
    found = rows(results(study))
    assert [group.verdict for group in found.values()] == ["", "better", "worse"]
    assert [group.reservations for group in found.values()] == [[], [], []]


@pytest.mark.parametrize("state", ["diverged", "failed"])
def test_a_variant_that_lost_seeds_is_not_better_but_may_be_worse(study: Path, state: str) -> None:
    fail(study, "m_gate_kv", 1, 4, state=state)
    fail(study, "moda", 2, state=state)
    result = results(study)
    found = rows(result)
    gate, moda = found["m_gate_kv"], found["moda"]
    assert (gate.verdict, moda.verdict) == ("cannot tell", "worse")
    assert gate.difference is not None
    assert gate.difference.mean == pytest.approx(-0.1, abs=0.01)
    assert (gate.difference.high, gate.difference.p) == (math.inf, None)
    assert gate.difference.low < -0.1
    assert moda.difference is not None
    assert moda.difference.low > 0
    assert moda.difference.high == math.inf
    short, console = texts(result)
    said = f"2 of 6 seeds {state}, which rules out “better” ({state} at step 40 of 100: {WHY})"
    assert f"`m_gate_kv`: **cannot tell**, but: {said}" in short
    assert f"cannot tell, but: {said}" in console
    assert f"**worse**, but: 1 of 6 seeds {state}" in short
    assert "-0.1" in short  # the difference of the others is shown
    written = json.loads(result.to_json())
    assert next(g for g in written["families"][0]["groups"] if g["label"] == "m_gate_kv")["difference"]["high"] is None


def test_where_the_baseline_lost_seeds_nothing_is_worse(study: Path) -> None:
    fail(study, "standard", 0)
    result = results(study)
    found = rows(result)
    assert (found["m_gate_kv"].verdict, found["moda"].verdict) == ("better", "cannot tell")
    short, _ = texts(result)
    assert short.count("1 of 6 seeds of the baseline diverged, which rules out “worse”") == 2


def test_unfinished_seeds_are_counted_and_leave_the_verdict(study: Path) -> None:
    fail(study, "m_gate_kv", 1, 4, state="running", reason=None)
    result = results(study)
    gate = rows(result)["m_gate_kv"]
    assert gate.verdict == "better"
    short, console = texts(result)
    said = "better{}, but: 2 of 6 seeds are missing (not finished: running at step 40 of 100)"
    assert said.format("**") in short
    assert said.format("") in console


def test_a_seed_whose_record_is_damaged_is_missing(study: Path) -> None:
    (study / "moda-s1" / "metrics.jsonl").unlink()
    moda = rows(results(study))["moda"]
    assert [(lost.name, lost.fate) for lost in moda.lost] == [("moda-s1", "unfinished")]
    assert moda.reservations[0].long.startswith("1 of 6 seeds is missing (metrics.jsonl is missing or empty")


def test_seeds_that_only_the_baseline_has_are_counted(runs: Path) -> None:
    write(runs, "standard", 4.0)
    write(runs, "m_gate_kv", 3.9, seeds=4)
    write(runs, "moda", 4.1)
    result = results(runs)
    short, _ = texts(result)
    assert "`m_gate_kv`: **better**, but: no run of 2 seeds that the baseline has (4, 5)" in short
    # Mean losses are over the four seeds that both have, and a note says so.
    gate = rows(result)["m_gate_kv"]
    assert gate.loss == pytest.approx(3.9 + sum(NOISE[:4]) / 4)
    assert "its mean loss is over 4 seeds, that of standard over 6" in gate.notes


def test_runs_of_the_variant_alone_are_not_in_its_mean(runs: Path) -> None:
    write(runs, "standard", 4.0, seeds=4)
    write(runs, "m_gate_kv", 3.9, seeds=6)
    assert rows(results(runs))["m_gate_kv"].loss == pytest.approx(3.9 + sum(NOISE[:4]) / 4)


@pytest.mark.parametrize("tag", ["heldout/loss", "loss_metrics/global_avg_loss"])
def test_a_finished_run_whose_last_loss_is_nan_has_diverged(study: Path, tag: str) -> None:
    path = study / "m_gate_kv-s3" / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    broken = [{**line, tag: math.nan} if line["step"] == 100 and tag in line else line for line in lines]
    path.write_text("".join(json.dumps(line) + "\n" for line in broken))
    gate = rows(results(study))["m_gate_kv"]
    assert gate.verdict == "cannot tell"
    assert [(lost.name, lost.fate) for lost in gate.lost] == [("m_gate_kv-s3", "diverged")]
    assert "of step 100, is nan" in gate.lost[0].why


def test_the_reason_is_that_of_the_status_file(study: Path) -> None:
    fail(study, "m_gate_kv", 0, reason="loss 0.7 above that of standard-s0 at step 40; training.stop_behind allows 0.5")
    fail(study, "m_gate_kv", 1, reason=None)
    first, second = rows(results(study))["m_gate_kv"].lost
    assert first.why == (
        "diverged at step 40 of 100: loss 0.7 above that of standard-s0 at step 40; training.stop_behind allows 0.5"
    )
    assert second.why == "diverged at step 40 of 100: status.json gives no reason"


def test_other_settings_are_said_with_the_verdict(runs: Path) -> None:
    write(runs, "standard", 4.0)
    write(runs, "m_gate_kv", 3.9, lr=2e-3)
    write(runs, "moda", 4.1, run_file={"training": {"batch_tokens": 2000}}, steps=(10, 20, 40, 60, 80))
    write(runs, "attnres_block", 3.9, run_file={"optimizer": {"weight_decay": 0.3}})
    write(runs, "control_block", 3.9, run_file={"training": {"compile": True}})
    result = results(runs)
    short, console = texts(result)
    assert "`m_gate_kv`: **better**, but: learning rate 0.002, the baseline's 0.001." in short
    assert "better, but: learning rate 0.002, the baseline's 0.001" in console
    assert "`moda`: **worse**, but: batch 2000, the baseline's 1000; length 80, the baseline's 100" in short
    assert "`attnres_block`: **better**, but: optimizer.weight_decay 0.3, the baseline's not set." in short
    assert "`control_block`: **better**. " in short  # what changes the speed alone changes no loss
    assert "| better, but: other learning rate |" in to_markdown(Page("", loss_blocks(result.families[0], 4)))
    markdown = to_markdown(report(result))
    assert "trained alike" not in markdown
    assert "Some differ from it in how they were trained, too" in markdown


def test_runs_that_were_trained_alike_are_called_so(study: Path) -> None:
    assert "were trained alike" in to_markdown(report(results(study)))


def test_the_console_keeps_to_80_columns(study: Path) -> None:
    fail(study, "m_gate_kv", 1, 4)
    fail(study, "standard", 0)
    assert max(map(len, main_table(results(study)).splitlines())) <= 80


def test_how_the_rows_were_judged_is_said(study: Path) -> None:
    found = results(study)
    said = (
        "m_gate_kv and moda are judged together: seeds are blocks, the errors of 3 arms are pooled (standard deviation"
    )
    _, console = texts(found)
    assert said in console
    assert "10 degrees of freedom" in console


def test_an_arm_that_varies_too_much_is_named(study: Path) -> None:
    for seed, loss in enumerate((3.0, 5.0, 3.3, 4.9, 2.8, 5.1)):
        Recorded(straight(8, loss), variant="attnres_block", seed=seed).write(study / f"wild-s{seed}")
    result = results(study)
    _, console = texts(result)
    assert "The errors of attnres_block vary too much to be pooled with those of the others (p < 0.0001" in console
    assert "attnres_block is judged by a paired t-test alone." in console
    assert rows(result)["m_gate_kv"].verdict == "better"


def test_a_variant_that_diverged_at_all_seeds_is_told(study: Path) -> None:
    for seed in range(3):
        Recorded(variant="attnres_block", seed=seed, state="diverged", reason=WHY).write(study / f"a{seed}")
    result = results(study)
    said = "has no row: 3 of its 3 runs diverged, none has a final loss."
    assert f"attnres_block {said}" in texts(result)[1]
    assert f"`attnres_block` {said}" in to_markdown(report(result))


def test_unlike_devices_are_a_note_on_speed_and_time(study: Path) -> None:
    for name, device in (("standard", "NVIDIA B200"), ("m_gate_kv", "NVIDIA H200"), ("moda", "NVIDIA B200")):
        for seed in range(6):
            logs = study / f"{name}-s{seed}" / "logs" / "machines"
            logs.mkdir(parents=True)
            other = "NVIDIA A100" if (name, seed) == ("moda", 5) else device
            start = {"format": 1, "time": 0.0, "host": "n1", "devices": {other: 8}}
            (logs / "n1.jsonl").write_text(json.dumps(start) + "\n")
    found = rows(results(study))
    assert not [note for note in found["standard"].notes if "NVIDIA" in note]
    (note,) = [note for note in found["m_gate_kv"].notes if "NVIDIA" in note]
    assert note.startswith("it was trained on NVIDIA H200, standard on NVIDIA B200: speed, time and memory")
    assert "its runs were trained on NVIDIA A100 and NVIDIA B200: its speed" in " ".join(found["moda"].notes)
