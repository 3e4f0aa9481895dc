"""Laws and compute-equivalent gains of whole ladders, whose answers are known."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from eval.compare.compare import READ, compare
from eval.compare.console import main_table
from eval.compare.page import Bullets, pictures_of
from eval.compare.page_markdown import to_markdown
from eval.compare.run import Run
from eval.compare.sections import report
from eval.compare.sections.scaling import scaling_blocks
from eval.scaling.results import Interval
from eval.scaling.scale import scale

from .conftest import PARAMETERS, compute, families_of, make_run, scaled

Make = Callable[..., list[Run]]


def test_the_gain_is_that_which_was_put_in(ladder: Make) -> None:
    result, found = scaled(ladder())
    assert result.law == "L(C)"
    constants = found["m_gate_kv"].constants
    assert constants["E"].value == pytest.approx(1.7, rel=1e-3)
    assert constants["gamma"].value == pytest.approx(0.1, rel=2e-3)
    assert constants["K"].value == pytest.approx(60 * 1.25**-0.1, rel=1e-2)
    gains = found["m_gate_kv"].gains
    assert [gain.size for gain in gains] == list(PARAMETERS)
    assert [gain.gain.value for gain in gains if gain.gain] == pytest.approx([1.25] * 4, rel=1e-3)
    # At the largest size the baseline would need 1.25 times its own compute, less than a step from size to size.
    assert gains[-1].outside == pytest.approx(1.25, rel=1e-3)
    assert not any(gain.far for gain in gains)
    assert found["standard"].gains == []


def covers(interval: Interval | None, truth: float) -> bool:
    assert interval is not None
    assert interval.low is not None
    assert interval.high is not None
    assert interval.high - interval.low < truth  # or else it says nothing
    return interval.low < truth < interval.high


def test_intervals_cover_the_truth(ladder: Make) -> None:
    """Nominally 95 of 100 do; of five ladders with three seeds at four sizes at least five in six must."""
    rng = np.random.default_rng(5)
    hits = []
    for _ in range(5):
        _, found = scaled(ladder(seeds=3, noise=lambda *_: rng.normal(0, 5e-4)), draws=60)
        for result in found.values():
            hits += [covers(result.constants["E"], 1.7), covers(result.constants["gamma"], 0.1)]
            hits += [covers(gain.gain, 1.25) for gain in result.gains]
    assert len(hits) == 5 * (4 + 4)
    assert np.mean(hits) > 5 / 6


def test_the_band_holds_the_law(ladder: Make) -> None:
    rng = np.random.default_rng(7)
    _, found = scaled(ladder(seeds=2, noise=lambda *_: rng.normal(0, 5e-4)), draws=30)
    line = found["standard"].line
    assert line is not None
    assert (line.flops[0], line.flops[-1]) == pytest.approx((compute("10M"), compute("300M")))
    assert all(low <= loss <= high for low, loss, high in zip(line.low, line.loss, line.high, strict=True))
    assert all(before > after for before, after in pairwise(line.loss))


def test_what_a_seed_does_to_both_alike_cancels_in_the_gain(ladder: Make) -> None:
    """Equal errors at equal sizes and seeds: the laws are uncertain, how they compare is less so."""
    rng = np.random.default_rng(6)
    shared = {(size, seed): rng.normal(0, 2e-3) for size in PARAMETERS for seed in range(2)}
    own = {key: rng.normal(0, 2e-3) for key in shared}
    widths = []
    for other in (shared, own):
        noise = {"standard": shared, "m_gate_kv": other}
        _, found = scaled(ladder(seeds=2, noise=lambda variant, size, seed: noise[variant][size, seed]), draws=40)  # noqa: B023
        gain = found["m_gate_kv"].gains[1].gain
        assert gain is not None
        assert gain.low is not None
        assert gain.high is not None
        widths.append(gain.high - gain.low)
    assert widths[0] < widths[1] / 3


def test_a_loss_that_the_baseline_never_reaches_has_no_gain(ladder: Make) -> None:
    runs = [
        replace(run, heldout=replace(run.heldout, values=run.heldout.values - 0.9))
        if run.variant == "m_gate_kv"
        else run
        for run in ladder()
    ]
    gains = scaled(runs)[1]["m_gate_kv"].gains
    last = gains[-1]
    assert 1.7 + 60 * (1.25 * compute("300M")) ** -0.1 - 0.9 < 1.7  # below the baseline's E
    assert last.gain is None
    assert last.far


def test_reading_far_beyond_the_data_is_said(ladder: Make) -> None:
    """A variant worth 50 times the compute: ten times the largest step from size to size, 11.1 times in FLOPs."""
    runs = [run for run in ladder() if run.variant == "standard"]
    runs += [make_run(1.7 + 60 * (50 * compute(size)) ** -0.1, "moda", size) for size in PARAMETERS]
    gains = scaled(runs)[1]["moda"].gains
    assert [gain.far for gain in gains] == [False, False, False, True]
    assert gains[-1].outside == pytest.approx(50, rel=0.02)


def test_n_and_d_are_told_apart_where_the_ladder_varies_both() -> None:
    def loss(size: str, tokens: float, more: float) -> float:
        return 1.7 + 400 * (more * PARAMETERS[size]) ** -0.34 + 900 * (more * tokens) ** -0.31

    lengths = (2e8, 1e9, 6e9)
    runs = [
        make_run(loss(size, tokens, more), variant, size, tokens=tokens)
        for size in PARAMETERS
        for tokens in lengths
        for variant, more in (("standard", 1.0), ("moda", 1.2))
    ]
    result, found = scaled(runs)
    assert result.law == "L(N, D)"
    constants = {name: interval.value for name, interval in found["standard"].constants.items()}
    assert constants["alpha"] == pytest.approx(0.34, rel=5e-3)
    assert constants["beta"] == pytest.approx(0.31, rel=5e-3)
    assert constants["E"] == pytest.approx(1.7, rel=5e-3)
    # The variant is worth 1.2 times the parameters and 1.2 times the tokens.
    assert [gain.gain.value for gain in found["moda"].gains if gain.gain] == pytest.approx([1.44] * 4, rel=5e-3)
    # The line is the lowest loss at each compute: no split of it between N and D does better.
    line = found["standard"].line
    assert line is not None
    flops = line.flops[20]
    splits = [1.7 + 400 * n**-0.34 + 900 * (flops / 6 / n) ** -0.31 for n in np.geomspace(1e5, 1e11, 4000)]
    assert line.loss[20] == pytest.approx(min(splits), rel=1e-3)


def test_sizes_and_lengths_of_one_seed_have_intervals_that_hold_the_truth() -> None:
    """Runs of one size and seed that differ in length are drawn apart, or else every draw would be all runs."""
    rng = np.random.default_rng(8)
    hits = []
    for _ in range(4):
        runs = [
            make_run(
                float((1.7 + 400 * (more * n) ** -0.34 + 900 * (more * tokens) ** -0.31) * np.exp(rng.normal(0, 5e-4))),
                variant,
                size,
                tokens=tokens,
            )
            for size, n in list(PARAMETERS.items())[:3]
            for tokens in (2e8, 1e9, 6e9)
            for variant, more in (("standard", 1.0), ("moda", 1.2))
        ]
        result, found = scaled(runs, draws=40)
        assert result.law == "L(N, D)"
        for ladder in result.ladders:
            assert ladder.notes == []
            hits += [covers(ladder.constants[name], true) for name, true in (("E", 1.7), ("alpha", 0.34))]
        hits += [covers(gain.gain, 1.44) for gain in found["moda"].gains]
    assert len(hits) == 4 * (4 + 3)
    assert np.mean(hits) > 5 / 6


@pytest.mark.parametrize(("sizes", "seeds", "sets", "runs"), [(4, 1, 5, 4), (3, 2, 27, 6)])
def test_few_different_draws_leave_no_interval(ladder: Make, sizes: int, seeds: int, sets: int, runs: int) -> None:
    """Of four runs all, or all but one: 5 sets. Of two seeds at each of three sizes one, the other, or both: 3³."""
    rng = np.random.default_rng(9)
    made = ladder(sizes=list(PARAMETERS)[:sizes], seeds=seeds, noise=lambda *_: rng.normal(0, 5e-4))
    _, found = scaled(made, draws=40)
    assert found["standard"].constants["E"].low is None
    assert found["m_gate_kv"].gains[0].gain is not None
    assert found["m_gate_kv"].gains[0].gain.low is None
    assert f"only {sets} different sets of its {runs} runs" in found["standard"].notes[0]


def test_a_ladder_of_too_few_runs_for_intervals_does_not_take_the_others(ladder: Make) -> None:
    rng = np.random.default_rng(10)
    made = ladder(seeds=2, noise=lambda *_: rng.normal(0, 5e-4))
    odd = [make_run(1.65 + 60 * compute(size) ** -0.1, "moda", size) for size in PARAMETERS]
    _, found = scaled([*made, *odd], draws=30)
    assert "different sets of its 4 runs" in found["moda"].notes[0]
    assert found["m_gate_kv"].constants["E"].low is not None


def test_of_several_lengths_that_do_not_vary_enough_the_longest_count(ladder: Make) -> None:
    runs = ladder(sizes=("10M", "30M", "100M"))
    result, found = scaled(
        [*runs, make_run(4.0, size="10M", tokens=1e8), make_run(3.9, "m_gate_kv", "10M", tokens=1e8)]
    )
    assert result.law == "L(C)"
    assert [point.tokens for point in found["standard"].points] == [2e8, 6e8, 2e9]
    assert "1 shorter run is not in the law" in found["standard"].notes[0]
    assert found["m_gate_kv"].gains[0].gain is not None


def test_too_few_sizes_are_refused(ladder: Make) -> None:
    _, found = scaled(ladder(sizes=("10M", "30M"), seeds=2), draws=10)
    assert found["standard"].constants == {}
    assert found["standard"].why_not == "2 sizes; a law has 3 constants or more and needs 3 sizes at least"
    assert scale(families_of(ladder(sizes=("10M",))), READ) is None


def test_a_variant_with_fewer_sizes_does_not_take_the_others_down(ladder: Make) -> None:
    _, found = scaled([*ladder(), make_run(3.0, "moda", "10M"), make_run(2.8, "moda", "30M")])
    assert found["moda"].why_not is not None
    assert found["m_gate_kv"].gains[0].gain is not None


def test_sizes_on_different_data_are_refused(ladder: Make) -> None:
    runs = [
        replace(run, data={"training data": "bbbb", "vocabulary": 4096}) if run.size == "100M" else run
        for run in ladder()
    ]
    _, found = scaled(runs)
    assert found["standard"].why_not == "its sizes differ in training data"


def test_as_many_runs_as_constants_leave_no_interval(ladder: Make) -> None:
    _, found = scaled(ladder(sizes=("10M", "30M", "100M")), draws=10)
    assert found["standard"].constants["E"].low is None
    assert found["standard"].notes == ["3 runs for 3 constants: no intervals"]


def test_a_studys_labels_name_their_ladder_without_the_size(ladder: Make) -> None:
    runs = [
        replace(
            run,
            label=f"{run.variant}-{run.size}-lr0.001",
            baseline=f"standard-{run.size}-lr0.001" if run.variant != "standard" else None,
        )
        for run in ladder()
    ]
    _, found = scaled(runs)
    assert list(found) == ["standard-lr0.001", "m_gate_kv-lr0.001"]
    assert found["m_gate_kv-lr0.001"].baseline == "standard-lr0.001"


def test_of_a_sweep_over_the_learning_rate_the_best_run_is_the_rung(ladder: Make) -> None:
    """Swept at two sizes of four, with another best rate at each."""
    runs = []
    for run in ladder():
        for rate in (1e-3, 2e-3) if run.size in ("10M", "100M") else (1e-3,):
            best = {"10M": 1e-3, "100M": 2e-3}.get(str(run.size), 1e-3)
            worse = replace(run.heldout, values=run.heldout.values + (rate != best))
            settings = {**run.settings, "optimizer.lr": rate}
            runs.append(replace(run, name=f"{run.name}-{rate}", heldout=worse, settings=settings))
    _, found = scaled(runs)
    _, plain = scaled(ladder())
    assert list(found) == ["standard", "m_gate_kv"]
    assert found["m_gate_kv"].points == plain["m_gate_kv"].points


def test_a_size_of_the_baseline_alone_is_a_rung_of_its_ladder(ladder: Make) -> None:
    runs = [run for run in ladder() if not (run.variant == "m_gate_kv" and run.size == "300M")]
    _, found = scaled(runs)
    assert [point.size for point in found["standard"].points] == list(PARAMETERS)
    assert [gain.size for gain in found["m_gate_kv"].gains] == ["10M", "30M", "100M"]


def test_the_baseline_trained_for_longer_is_no_rung_of_a_compute_ladder(ladder: Make) -> None:
    longer = [make_run(3.0, size=size, tokens=40 * PARAMETERS[size], control="wall_clock") for size in PARAMETERS]
    result, found = scaled([*ladder(), *longer])
    assert result.law == "L(C)"
    assert list(found) == ["standard", "m_gate_kv"]
    assert [point.tokens for point in found["standard"].points] == [20 * n for n in PARAMETERS.values()]
    assert found["m_gate_kv"].gains[0].gain is not None
    assert found["m_gate_kv"].gains[0].gain.value == pytest.approx(1.25, rel=1e-3)


@pytest.mark.parametrize("losses", [(3.0, 3.0, 3.0, 3.0), (2.0, 2.5, 3.0, 3.5), (3.0, 1e-6, 3.0, 1e6)])
def test_losses_that_follow_no_law_take_nothing_down(ladder: Make, losses: tuple[float, ...]) -> None:
    odd = [make_run(loss, "moda", size) for loss, size in zip(losses, PARAMETERS, strict=True)]
    result, found = scaled([*ladder(), *odd])
    assert found["m_gate_kv"].gains[0].gain is not None
    scaling_blocks(result)
    scaling_blocks(scale(families_of([*ladder(), *odd], "moda"), READ, 0))  # and as the baseline


def test_a_loss_of_zero_refuses_its_ladder_alone(ladder: Make) -> None:
    odd = [make_run(loss, "moda", size) for loss, size in zip((3.0, 2.0, 1.0, 0.0), PARAMETERS, strict=True)]
    _, found = scaled([*ladder(), *odd])
    assert "above zero" in (found["moda"].why_not or "")
    assert found["m_gate_kv"].gains[0].gain is not None


def test_runs_that_logged_no_tokens_are_refused_and_said(ladder: Make) -> None:
    runs = ladder()
    for run in runs:
        run.heldout.axes["tokens"][:] = np.nan
    result, found = scaled(runs)
    assert "logged no tokens or no FLOPs" in (found["standard"].why_not or "")
    assert any(isinstance(block, Bullets) for block in scaling_blocks(result))


def test_data_that_determine_no_law_are_flagged() -> None:
    """A straight line over log C has no E."""
    runs = [
        make_run(5.0 - 0.05 * np.log(compute(size) / 1e15) + shift, variant, size)
        for size in PARAMETERS
        for variant, shift in (("standard", 0.0), ("moda", -0.01))
    ]
    _, found = scaled(runs)
    assert "do not determine the constants" in " ".join(found["standard"].notes)


def test_the_report_shows_it(ladder: Make) -> None:
    families = families_of(ladder(sizes=("10M", "30M", "100M")))
    results = compare(families, [])
    page = report(results)
    text = to_markdown(page)
    assert "L(C) = E + K · C^−γ" in text
    assert f"| `m_gate_kv` | `10M` | {1.7 + 60 * (1.25 * compute('10M')) ** -0.1:.4f} | 1.25× |" in text
    assert "m_gate_kv: 1.25× at 100M" in main_table(results)
    assert "scaling" in [picture.file for picture in pictures_of(page.blocks)]
    assert '"law": "L(C)"' in results.to_json()


def test_what_sizes_differ_in_beside_their_size_is_said_once(ladder: Callable[..., list[Run]]) -> None:
    steps = {"10M": (131072, 0.99), "30M": (262144, 0.99), "100M": (262144, 0.99), "300M": (524288, 0.95)}
    runs = []
    for run in ladder():
        assert run.size
        batch, beta2 = steps[run.size]
        settings = {**run.settings, "training.batch_tokens": batch, "optimizer.beta2": beta2}
        runs.append(replace(run, settings=settings))
    _, found = scaled(runs)
    assert found["standard"].notes[0] == (
        "its sizes differ in more than size: batch 131,072 at 10M, 262,144 at 30M, 262,144 at 100M, 524,288 at 300M; "
        "β2 0.99 at 10M, 0.99 at 30M, 0.99 at 100M, 0.95 at 300M; neighbours may differ for that in part"
    )
    assert not any("more than size" in note for note in found["m_gate_kv"].notes)
