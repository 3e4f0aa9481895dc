"""Sweeps over the learning rate: best against best."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from eval.compare.compare import compare
from eval.compare.console import main_table
from eval.compare.grouping import make_families
from eval.compare.page_markdown import to_markdown
from eval.compare.results import FamilyResult, Results
from eval.compare.sections import report
from eval.compare.sources import gather

from .conftest import Recorded, straight

STANDARD = {1e-3: 4.05, 2e-3: 4.00, 4e-3: 4.10}
GATE = {1e-3: 4.01, 2e-3: 3.95, 4e-3: 3.90}
NOISE = (0.0, 0.004, -0.003)


def write(runs: Path, variant: str, losses: Mapping[float, float], seeds: int = 3) -> None:
    for lr, loss in losses.items():
        for seed in range(seeds):
            own = NOISE[seed] if variant == "standard" else -NOISE[seed] / 2
            run = Recorded(straight(8, loss + own), variant=variant, seed=seed, lr=lr)
            run.write(runs / f"{variant}-{lr}-s{seed}")


def results(runs: Path, baseline: str | None = None) -> Results:
    gathered = gather([str(runs)])
    return compare(make_families(gathered.runs, gathered.left_out, baseline), gathered.left_out)


def only(runs: Path) -> FamilyResult:
    (family,) = results(runs).families
    return family


def test_each_arm_is_compared_at_its_best_rate(runs: Path) -> None:
    write(runs, "standard", STANDARD)
    write(runs, "m_gate_kv", GATE)
    found = results(runs)
    (family,) = found.families
    base, gate = family.groups
    assert [group.label for group in family.groups] == ["standard", "m_gate_kv"]
    assert base.loss == pytest.approx(4.00 + sum(NOISE) / 3)
    assert gate.loss == pytest.approx(3.90 - sum(NOISE) / 6)
    assert [(one.label, one.sweep.best, one.edge) for one in family.sweeps] == [
        ("standard", 2e-3, None),
        ("m_gate_kv", 4e-3, "highest"),
    ]
    rates = family.sweeps[0].sweep.rates
    assert [(rate.rate, rate.runs) for rate in rates] == [(1e-3, 3), (2e-3, 3), (4e-3, 3)]
    assert (rates[2].low, rates[2].high) == (pytest.approx(4.097), pytest.approx(4.104))
    assert found.left_out == []


def test_what_a_sweep_means_for_the_verdict_is_said_everywhere(runs: Path) -> None:
    write(runs, "standard", STANDARD)
    write(runs, "m_gate_kv", GATE)
    found = results(runs)
    markdown, console = to_markdown(report(found)), " ".join(main_table(found).split())
    short = markdown[markdown.index("### In short") : markdown.index("### Final held-out loss")]
    said = "better{}, but: each at the best of 3 learning rates (0.004, the baseline 0.002), chosen on these seeds"
    assert said.format("**") in short
    assert said.format("") in console
    edge = "The best learning rate of 'm_gate_kv', 0.004, is the highest of those tried (0.001, 0.002, 0.004)"
    assert edge in markdown
    assert edge in console
    assert "The best learning rate of 'standard'" not in markdown
    assert "### Learning rates" in markdown
    assert "pictures/f0-sweep.svg" in markdown
    assert "| `standard` | 0.002 | 3 | 4.0003 | 3.9970 | 4.0040 | **best** |" in markdown
    assert "were trained alike" not in markdown


def test_the_best_rate_is_chosen_over_the_seeds_that_all_rates_have(runs: Path) -> None:
    """One lucky seed at another rate does not win against three."""
    write(runs, "standard", {1e-3: 4.0})
    write(runs, "m_gate_kv", {1e-3: 4.0})
    Recorded(straight(8, 3.99), variant="m_gate_kv", seed=1, lr=2e-3).write(runs / "lucky")
    # Seed 1 alone: 3.998 at 0.001, 3.99 at 0.002; so 0.002 is the best, of one seed.
    family = only(runs)
    sweep = family.sweeps[0].sweep
    assert family.groups[1].reservations[0].long == (
        "at the best of 2 learning rates (0.002), the baseline at its only learning rate (0.001), chosen on these seeds"
    )
    assert (sweep.best, sweep.seeds) == (2e-3, 1)
    assert [rate.loss for rate in sweep.rates] == [pytest.approx(3.998), pytest.approx(3.99)]
    assert [rate.runs for rate in sweep.rates] == [3, 1]


def test_a_rate_with_diverged_runs_is_not_the_best(runs: Path) -> None:
    write(runs, "standard", {1e-3: 4.0, 2e-3: 4.1})
    write(runs, "m_gate_kv", {1e-3: 4.0, 2e-3: 3.5}, seeds=2)
    Recorded(variant="m_gate_kv", seed=2, lr=1e-3, loss=straight(8, 4.0)).write(runs / "g2")
    Recorded(variant="m_gate_kv", seed=2, lr=2e-3, state="diverged", reason="Loss is not finite").write(runs / "bad")
    Recorded(variant="m_gate_kv", seed=2, lr=4e-3, state="diverged", reason="Loss is not finite").write(runs / "worse")
    family = only(runs)
    sweep = next(one for one in family.sweeps if one.label == "m_gate_kv")
    assert [(rate.rate, rate.runs, rate.diverged) for rate in sweep.sweep.rates] == [
        (1e-3, 3, 0),
        (2e-3, 2, 1),
        (4e-3, 0, 1),
    ]
    assert (sweep.sweep.best, sweep.edge) == (1e-3, "lowest")
    assert family.groups[1].lost == []


def test_a_studys_labels_lose_the_rate(runs: Path) -> None:
    """At two sizes, whose best rates differ."""
    record = []
    for size, best in (("10M", 2e-3), ("24M", 1e-3)):
        for lr in (1e-3, 2e-3):
            for variant in ("standard", "m_gate_kv"):
                name = f"{variant}-{size}-lr{lr!r}-s0"
                Recorded(straight(8, 4.0 if lr == best else 4.1), variant=variant, size=size, lr=lr).write(runs / name)
                record.append(
                    {
                        "name": name,
                        "label": name.removesuffix("-s0"),
                        "variant": variant,
                        "size": size,
                        "seed": 0,
                        "lr": lr,
                        "control": None,
                        "baseline": f"standard-{size}-lr{lr!r}-s0" if variant != "standard" else None,
                    }
                )
    (runs / "study.json").write_text(json.dumps({"format": 1, "name": "s", "baseline": "standard", "runs": record}))
    found = results(runs).families
    assert [[group.label for group in family.groups] for family in found] == [
        ["standard-10M", "m_gate_kv-10M"],
        ["standard-24M", "m_gate_kv-24M"],
    ]
    assert [family.sweeps[1].sweep.best for family in found] == [2e-3, 1e-3]
    (asked,) = results(runs, "standard-10M-lr0.001").families[:1]
    assert asked.baseline == "standard-10M-lr0.001"
    assert asked.sweeps == []
