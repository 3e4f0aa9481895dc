"""The report's numbers, against hand-computed ones and scipy called directly."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from eval.compare.compare import compare
from eval.compare.grouping import make_families
from eval.compare.judging import seeds_needed
from eval.compare.numbers import interval
from eval.compare.page import Bullets
from eval.compare.page_markdown import to_markdown
from eval.compare.results import FamilyResult, Results
from eval.compare.sections import report
from eval.compare.sections.short import short_blocks
from eval.compare.sources import gather
from eval.compare.statistics import estimate

from .conftest import Recorded, straight


def results(runs: Path, baseline: str | None = None) -> Results:
    gathered = gather([str(runs)])
    return compare(make_families(gathered.runs, gathered.left_out, baseline), gathered.left_out)


def only(runs: Path, baseline: str | None = None) -> FamilyResult:
    (family,) = results(runs, baseline).families
    return family


BASE = {0: 4.00, 1: 4.06, 2: 3.95, 3: 4.02}
GATE = {0: 3.95, 1: 4.00, 2: 3.91, 3: 3.96}
MODA = {0: 3.99, 1: 4.07, 2: 3.94, 3: 4.03}


@pytest.fixture
def study(runs: Path) -> Path:
    """Four seeds of a baseline and two variants, whose curves are straight lines from 8 to the losses above."""
    for seed in BASE:
        Recorded(straight(8, BASE[seed]), seed=seed).write(runs / f"s{seed}")
        gate = {"step_seconds": 0.6, "memory": 2.5, "flops_per_token": 660, "parameters": 110}
        Recorded(straight(8, GATE[seed]), variant="m_gate_kv", seed=seed, **gate).write(runs / f"g{seed}")
        Recorded(straight(8, MODA[seed]), variant="moda", seed=seed).write(runs / f"m{seed}")
    return runs


def test_final_losses_intervals_and_tests(study: Path) -> None:
    family = only(study)
    base, gate, moda = family.groups
    assert family.baseline == base.label == "standard"
    assert gate.loss == pytest.approx((3.95 + 4.00 + 3.91 + 3.96) / 4)
    assert [(pair.seed, pair.difference) for pair in gate.pairs] == [
        (0, pytest.approx(-0.05)),
        (1, pytest.approx(-0.06)),
        (2, pytest.approx(-0.04)),
        (3, pytest.approx(-0.06)),
    ]
    reference = stats.ttest_rel(list(GATE.values()), list(BASE.values()))
    low, high = reference.confidence_interval(0.95)
    assert gate.paired is not None
    assert (gate.paired.low, gate.paired.high) == pytest.approx((low, high))
    assert gate.paired.p == pytest.approx(reference.pvalue)
    # The pooled test by hand: residuals of arms and seeds, (3 − 1)(4 − 1) degrees of freedom, and scipy's integral.
    losses = np.array([list(arm.values()) for arm in (BASE, GATE, MODA)])
    residuals = losses - losses.mean(1, keepdims=True) - losses.mean(0) + losses.mean()
    spread = math.sqrt((residuals**2).sum() / 6)
    t = (gate.loss - base.loss) / (spread * math.sqrt(2 / 4))
    assert gate.difference is not None
    assert (gate.difference.method, gate.difference.n, gate.difference.degrees) == ("pooled", 4, 6)
    assert gate.difference.mean == pytest.approx(-0.0525)
    assert gate.difference.sd == pytest.approx(spread * math.sqrt(2))
    shape, edge = [[1, 0.5], [0.5, 1]], np.full(2, abs(t))
    inside = stats.multivariate_t.cdf(edge, shape=shape, df=6, lower_limit=-edge, maxpts=400_000, random_state=0)
    assert gate.difference.p == pytest.approx(1 - inside, abs=1e-4)
    # Dunnett 1964, table for two-sided 5%: two treatments and 6 degrees of freedom, 2.86.
    half = 2.86 * spread * math.sqrt(2 / 4)
    ends = gate.difference.low, gate.difference.high
    assert ends == pytest.approx((-0.0525 - half, -0.0525 + half), abs=0.005 * half)
    assert moda.difference is not None
    assert moda.difference.low < 0 < moda.difference.high
    assert [group.verdict for group in family.groups] == ["", "better", "cannot tell"]


def test_costs_and_their_ratios(study: Path) -> None:
    base, gate, _ = only(study).groups
    assert gate.costs["step_seconds"].value == pytest.approx(0.6)
    assert gate.costs["step_seconds"].ratio == pytest.approx(1.2)
    assert gate.costs["tokens_per_s"].ratio == pytest.approx(1 / 1.2)
    assert gate.costs["peak_memory_gib"].ratio == pytest.approx(1.25)
    assert gate.costs["flops_per_token"].ratio == pytest.approx(1.1)
    assert gate.costs["parameters"].ratio == pytest.approx(1.1)
    assert base.costs["parameters"].value == 100


def test_equal_tokens_are_the_whole_runs(study: Path) -> None:
    gate = only(study).groups[1]
    found = gate.at_equal["tokens"]
    assert (found.against, found.spent, found.budget) == ("standard", 1.0, 100_000)
    assert (found.read_at, found.baseline_read_at) == (1.0, 1.0)
    assert found.difference == gate.paired
    assert found.final == gate.difference  # as the main table has it


def test_equal_time_cuts_the_slower_run_short(study: Path) -> None:
    """The baseline's 50 s are 83⅓ steps of 0.6 s: between the measurements at steps 80 and 100, over log time."""
    found = only(study).groups[1].at_equal["seconds"]
    share = math.log(50 / 48) / math.log(60 / 48)
    differences = []
    for seed in BASE:
        at_80, at_100 = 8 + (GATE[seed] - 8) * 0.8, GATE[seed]
        differences.append(at_80 + share * (at_100 - at_80) - BASE[seed])
    assert found.budget == pytest.approx(50)
    assert found.spent == pytest.approx(1.2)
    assert found.difference is not None
    assert found.difference.mean == pytest.approx(sum(differences) / 4)
    assert found.difference.mean > 0.5  # far from its end: its final loss is the lower one
    assert found.final is not None
    assert found.final.mean < 0
    assert found.read_at == pytest.approx(50 / 60)
    # Recorded learning rates fall evenly to zero over the last 20 steps: at step 83⅓ five sixths are left.
    assert found.learning_rate == pytest.approx(5 / 6)
    assert found.baseline_learning_rate == 0


def test_a_longer_baseline_makes_the_comparison_at_equal_time(study: Path) -> None:
    for seed in BASE:
        longer = Recorded(straight(8, BASE[seed] + 0.6), seed=seed, steps=(40, 80, 120))
        longer.write(study / f"long{seed}")
    family = only(study, "standard, steps 100")
    gate = next(group for group in family.groups if group.variant == "m_gate_kv")
    found = gate.at_equal["seconds"]
    assert (found.against, found.spent) == ("standard, steps 120", pytest.approx(1.0))
    assert found.final is not None
    # At step 120 that line is at 8 + (BASE + 0.6 − 8) · 1.2 = 1.2 BASE − 0.88.
    expected = sum(GATE[seed] - (1.2 * BASE[seed] - 0.88) for seed in BASE) / 4
    assert found.final.mean == pytest.approx(expected)
    longer = next(group for group in family.groups if group.reference)
    assert (longer.verdict, longer.difference, longer.at_equal) == ("", None, {})
    assert results(study, "standard, steps 100").comparisons == 2


def test_how_much_sooner_the_baselines_loss_is_reached(study: Path) -> None:
    gate = only(study).groups[1]
    ratios = []
    for seed in BASE:
        at_80, at_100 = 8 + (GATE[seed] - 8) * 0.8, GATE[seed]
        share = (at_80 - BASE[seed]) / (at_80 - at_100)
        ratios.append(100_000 / (80_000 * (100 / 80) ** share))
    found = gate.reach["tokens"]
    assert found.per_seed == pytest.approx(ratios)
    assert found.speed_up == pytest.approx(math.prod(ratios) ** 0.25)
    assert gate.reach["flops"].speed_up == pytest.approx(math.prod(ratios) ** 0.25 / 1.1)
    assert gate.reach["seconds"].speed_up == pytest.approx(math.prod(ratios) ** 0.25 / 1.2)


def test_a_loss_that_some_seeds_never_reach_has_no_speed_up(study: Path) -> None:
    moda = only(study).groups[2]
    assert [ratio is None for ratio in moda.reach["tokens"].per_seed] == [False, True, False, True]
    assert moda.reach["tokens"].speed_up is None


def test_equal_memory_is_the_best_that_fits(study: Path) -> None:
    """standard and moda need 2 GiB, m_gate_kv 2.5; mean losses 4.0075, 4.0075 and 3.955."""
    rows = only(study).memory
    assert [(row.gib, row.added, row.best) for row in rows] == [
        (2.0, ["standard", "moda"], "standard"),
        (2.5, ["m_gate_kv"], "m_gate_kv"),
    ]
    assert rows[1].best_loss == pytest.approx(3.955)


def test_every_pair_of_rows_both_ways(study: Path) -> None:
    found = {(pair.row, pair.column): pair.difference.mean for pair in only(study).every_pair}
    assert len(found) == 6
    assert found["m_gate_kv", "moda"] == pytest.approx(3.955 - 4.0075)
    assert found["moda", "m_gate_kv"] == pytest.approx(4.0075 - 3.955)


def test_bands_span_the_seeds(study: Path) -> None:
    base, gate, _ = only(study).groups
    band = base.curves["tokens"]
    assert band.x == [10_000, 20_000, 40_000, 60_000, 80_000, 100_000]
    assert (band.low[-1], band.mean[-1], band.high[-1]) == pytest.approx((3.95, 4.0075, 4.06))
    difference = gate.difference_curves["tokens"]
    assert difference.mean == pytest.approx([-0.0525 * step / 100 for step in (10, 20, 40, 60, 80, 100)])
    assert gate.difference_curves["seconds"].x[-1] == 50


def test_the_seeds_needed_are_those_of_the_test_that_judged(runs: Path) -> None:
    """Five variants: three of one spread, one that is equal to the baseline, and one that is shifted exactly."""
    gains = {"m_gate_kv": (0.02, 0.05, -0.005), "moda": (0.01, -0.02, 0.01), "attnres_block": (-0.03, 0.0, 0.02)}
    for seed in range(3):
        Recorded(straight(8, 4.0), seed=seed).write(runs / f"s{seed}")
        for variant, gain in gains.items():
            Recorded(straight(8, 4.0 - gain[seed]), variant=variant, seed=seed).write(runs / f"{variant}{seed}")
        Recorded(straight(8, 4.0), variant="control_block", seed=seed).write(runs / f"same{seed}")
        Recorded(straight(8, 3.9), variant="attnres_full", seed=seed).write(runs / f"shift{seed}")
    found = results(runs)
    rows = {group.label: group for group in found.families[0].groups}
    undecided = rows["m_gate_kv"]
    assert undecided.difference is not None
    assert undecided.verdict == "cannot tell"
    assert found.comparisons == 3
    assert found.families[0].test is not None
    assert sorted(found.families[0].test.pooled) == sorted(gains)
    assert (rows["attnres_full"].difference, rows["control_block"].difference) == (None, None)
    assert undecided.seeds_needed == seeds_needed(undecided.difference.mean / undecided.difference.sd, 3)
    assert undecided.seeds_needed is not None
    assert undecided.seeds_needed > 3
    markdown = to_markdown(report(found))
    assert f"| cannot tell ({undecided.seeds_needed} seeds needed) |" in markdown
    assert "| cannot tell (no difference in any seed) |" in markdown
    assert "| cannot tell (equal in all seeds: no spread to test against) |" in markdown
    assert "it judges 3 rows" in markdown


def test_two_seeds_and_a_paired_test_alone_give_no_verdict(runs: Path) -> None:
    for seed, loss in enumerate((3.5, 3.501)):
        Recorded(straight(8, 4.0), seed=seed).write(runs / f"s{seed}")
        Recorded(straight(8, loss), variant="m_gate_kv", seed=seed).write(runs / f"m{seed}")
    family = only(runs)
    assert family.groups[1].verdict == "cannot tell"
    assert family.groups[1].difference is None
    assert family.groups[1].at_equal["tokens"].final is not None
    assert interval(family.groups[1].at_equal["tokens"].final) == "–"
    # With a second variant there are two degrees of freedom, and 0.5 nats are 500 times the spread.
    for seed, loss in enumerate((4.001, 4.0)):
        Recorded(straight(8, loss), variant="moda", seed=seed).write(runs / f"o{seed}")
    assert [group.verdict for group in only(runs).groups] == ["", "better", "cannot tell"]


def test_a_single_seed_is_told_and_not_judged(runs: Path) -> None:
    Recorded().write(runs / "s")
    Recorded(straight(8, 3.5), variant="m_gate_kv").write(runs / "m")
    family = only(runs)
    gate = family.groups[1]
    assert gate.mean == pytest.approx(-0.5)
    assert (gate.difference, gate.verdict) == (None, "cannot tell")
    assert any("single run" in warning for warning in family.warnings)


def test_seeds_that_do_not_match_make_no_pairs(runs: Path) -> None:
    for seed in (0, 1):
        Recorded(seed=seed).write(runs / f"s{seed}")
        Recorded(seed=seed + 1, variant="moda").write(runs / f"m{seed}")
        Recorded(seed=seed + 5, variant="m_gate_kv").write(runs / f"g{seed}")
    groups = {group.label: group for group in only(runs).groups}
    assert groups["m_gate_kv"].mean is None
    assert groups["m_gate_kv"].verdict == "cannot tell"
    assert "no run shares a seed" in groups["m_gate_kv"].notes[0]
    assert groups["moda"].paired is not None
    assert groups["moda"].paired.n == 1
    assert "1 of its 2 runs share a seed" in groups["moda"].notes[0]


def test_other_conditions_of_measurement_are_noted(runs: Path) -> None:
    Recorded().write(runs / "s")
    Recorded(variant="moda", run_file={"training": {"compile": True}, "optimizer": {"lr": 2e-3}}).write(runs / "m")
    notes = only(runs).groups[1].notes
    assert any("training.compile is True here, False there" in note for note in notes)
    assert any(note.startswith("optimizer.lr is 0.002 here") for note in notes)


def test_seeds_measured_under_unlike_conditions_are_noted(runs: Path) -> None:
    for seed, backend in enumerate(("triton", "plain")):
        Recorded(seed=seed).write(runs / f"s{seed}")
        path = runs / f"m{seed}"
        Recorded(variant="moda", seed=seed, run_file={"depth": {"backend": backend}}).write(path)
    (base, moda) = only(runs).groups
    assert moda.seeds == [0, 1]  # how a read is computed makes no other variant
    assert any("unlike conditions" in note and "triton in m0, plain in m1" in note for note in moda.notes)
    assert not any("unlike" in note for note in base.notes)


def open_or_not(family: FamilyResult, final: list[float], at_budget: list[float]) -> str:
    """What the short answer says of the training time when those are the differences by seed at its two ends."""
    gate = family.groups[1]
    found = gate.at_equal["seconds"]
    gate.at_equal["seconds"] = replace(found, final=estimate(final), difference=estimate(at_budget))
    bullets = short_blocks(family)[1]
    assert isinstance(bullets, Bullets)
    return next(item for item in bullets.items if "`m_gate_kv`" in item)


def test_who_wins_at_equal_time_is_open_unless_the_smaller_difference_is_sure(study: Path) -> None:
    family = only(study)
    sure = [-0.04, -0.05, -0.045, -0.05]
    said = open_or_not(family, final=[-0.10, -0.11, -0.10, -0.12], at_budget=sure)
    assert "At equal training time it is at least 0.0462 below (95% interval -0.0539 to -0.0386)." in said
    # The mean, −0.01, has the right sign; its interval, −0.01 ± 3.182 · 0.0115 / 2, holds 0.
    said = open_or_not(family, final=sure, at_budget=[-0.02, 0.0, 0.0, -0.02])
    assert "training time is open" in said
    assert "95% interval -0.0284 to +0.0084" in said
    assert "at least" not in said.split("training time is open")[1]
    assert "training time is open" in open_or_not(family, final=sure, at_budget=[0.5, 0.6, 0.5, 0.6])
    said = open_or_not(family, final=[-0.05], at_budget=[-0.04])
    assert "training time is open" in said
    assert "1 pair" in said


def test_a_run_without_timings_is_compared_but_for_time(runs: Path) -> None:
    for name, variant in (("s", "standard"), ("m", "moda")):
        path = Recorded(variant=variant).write(runs / name)
        lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        kept = [{k: v for k, v in line.items() if "time_" not in k and "seconds" not in k} for line in lines]
        (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    found = only(runs).groups[1]
    assert found.at_equal["seconds"].why_not == "not every run logged its seconds"
    assert found.costs["step_seconds"].ratio is None
    assert "seconds" not in found.reach
    assert found.at_equal["flops"].difference is not None


def test_corrections_count_the_variants_of_all_sizes(runs: Path) -> None:
    for size in ("10M", "24M"):
        for seed in BASE:
            Recorded(straight(8, BASE[seed]), size=size, seed=seed).write(runs / f"s{size}{seed}")
            gate = Recorded(straight(8, GATE[seed]), size=size, seed=seed, variant="m_gate_kv")
            gate.write(runs / f"g{size}{seed}")
    p = stats.ttest_rel(list(GATE.values()), list(BASE.values())).pvalue
    found = results(runs)
    assert found.comparisons == 2
    for family in found.families:
        gate = family.groups[1]
        assert gate.difference is not None
        # One variant for each baseline: nothing to pool, and half of the level for each.
        assert (gate.difference.method, gate.difference.p) == ("paired", pytest.approx(2 * p))
        sd = np.std([GATE[seed] - BASE[seed] for seed in BASE], ddof=1)
        half = stats.t.ppf(1 - 0.05 / 4, 3) * sd / 2
        assert (gate.difference.low, gate.difference.high) == pytest.approx((-0.0525 - half, -0.0525 + half))


def test_a_nan_that_a_run_logged_becomes_null(runs: Path) -> None:
    Recorded(extra={"depth/gradient_norm/00": math.nan, "depth/gradient_norm/01": 0.5}).write(runs / "s")
    Recorded(variant="moda").write(runs / "m")
    written = json.loads(results(runs).to_json(), parse_constant=pytest.fail)
    assert written["families"][0]["groups"][0]["depth_series"] == {"gradient_norm": [None, 0.5]}
