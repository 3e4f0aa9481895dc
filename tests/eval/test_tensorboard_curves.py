"""Curves for TensorBoard, read back with TensorBoard's own reader."""

from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer
from tensorboard.plugins.hparams import metadata, plugin_data_pb2

from eval.compare.compare import compare
from eval.compare.grouping import make_families
from eval.compare.results import Results
from eval.compare.run import Curve, Run
from eval.tensorboard_curves import MARK, axis, check_folder, make_runs, write_curves
from torchtitan_ext import cli
from torchtitan_ext.errors import UserError

STEPS = np.arange(1, 11) * 20
BATCH = 4096


def made(variant: str, seed: int = 0, size: str = "10M", parameters: float = 9.3e6, better: float = 0.0) -> Run:
    """Ten measurements of a run of 819,200 tokens; its loss is 6 − better − seed / 100 + 1 / measurement."""
    tokens = STEPS * BATCH
    axes = {"tokens": tokens.astype(float), "flops": 6 * parameters * tokens, "seconds": STEPS * 0.25}
    curve = Curve(STEPS, 6 - better - seed / 100 + 20 / STEPS, axes)
    costs = {"tokens_per_s": 1.6e4, "step_seconds": 0.25, "peak_memory_gib": 2.0, "flops_per_token": 6 * parameters}
    return Run(
        name=f"{variant}-{size}-s{seed}",
        path=Path(variant),
        variant=variant,
        heldout=curve,
        bits_per_byte=curve,
        training=curve,
        learning_rate=(STEPS, np.ones(len(STEPS))),
        costs={**costs, "parameters": parameters},
        size=size,
        seed=seed,
        data={"training data": "aaaa"},
    )


def results_of(*runs: Run) -> Results:
    return compare(make_families(runs, []), [])


@pytest.fixture(scope="module")
def two_variants() -> Results:
    return results_of(
        *(made(variant, seed, better=gain) for variant, gain in (("standard", 0.0), ("moda", 0.1)) for seed in (0, 1))
    )


@pytest.fixture(scope="module")
def two_sizes() -> Results:
    sizes = {"10M": 9.3e6, "100M": 9.98e7}
    return results_of(
        *(
            made(variant, 0, size, count, better=gain + np.log10(count) / 4)
            for variant, gain in (("standard", 0.0), ("moda", 0.1))
            for size, count in sizes.items()
        )
    )


def read(folder: Path) -> EventMultiplexer:
    reader = EventMultiplexer().AddRunsFromDirectory(str(folder))
    reader.Reload()
    return reader


def scalars(reader: EventMultiplexer, run: str, tag: str) -> tuple[list[int], list[float]]:
    points = reader.Scalars(run, tag)
    return [point.step for point in points], [point.value for point in points]


def test_steps_are_what_the_tag_says(two_variants: Results, tmp_path: Path) -> None:
    assert write_curves(two_variants, tmp_path / "tb") == 2
    reader = read(tmp_path / "tb")
    assert set(reader.Runs()) == {"standard", "moda"}
    steps, losses = scalars(reader, "moda", "heldout_loss/by_tokens")
    assert steps == (STEPS * BATCH).tolist()
    # Mean over seeds 0 and 1.
    assert losses == pytest.approx((6 - 0.1 - 0.005 + 20 / STEPS).tolist(), rel=1e-6)
    # 6 × 9.3e6 FLOPs × 819,200 tokens = 4.571e13: 45,711 GFLOPs, but only 45.7 TFLOPs.
    steps, _ = scalars(reader, "standard", "heldout_loss/by_GFLOPs")
    assert steps[-1] == 45711
    # 200 steps of 0.25 s.
    assert scalars(reader, "standard", "training_loss/by_milliseconds")[0][-1] == 50_000
    assert scalars(reader, "moda", "loss_vs_baseline/by_tokens")[1] == pytest.approx([-0.1] * 10, abs=1e-6)


@pytest.mark.parametrize(
    ("what", "shortest", "name", "unit"),
    [
        ("tokens", 819_200, "by_tokens", 1),
        ("tokens", 1e6, "by_thousand_tokens", 1e3),
        ("tokens", 2e10, "by_million_tokens", 1e6),
        ("flops", 6.1e13, "by_GFLOPs", 1e9),
        ("flops", 1.2e19, "by_PFLOPs", 1e15),
        ("seconds", 3600, "by_seconds", 1),
        ("seconds", 2.5, "by_milliseconds", 1e-3),
        ("parameters", 9.3e6, "by_thousand_parameters", 1e3),
    ],
)
def test_units_are_the_largest_that_still_resolve(what: str, shortest: float, name: str, unit: float) -> None:
    found = axis(what, shortest)
    assert (found.name, found.unit) == (name, unit)


def test_several_sizes_have_scaling_curves(two_sizes: Results, tmp_path: Path) -> None:
    write_curves(two_sizes, tmp_path / "tb")
    reader = read(tmp_path / "tb")
    assert set(reader.Runs()) == {"standard", "standard/10M", "standard/100M", "moda", "moda/10M", "moda/100M"}
    steps, losses = scalars(reader, "moda", "trend_of_final_loss/by_thousand_parameters")
    assert steps == [9300, 99800]
    assert losses == pytest.approx([6 - 0.1 - np.log10(n) / 4 + 0.1 for n in (9.3e6, 9.98e7)], rel=1e-5)
    # All sizes of one picture have one unit: that of the smallest.
    assert scalars(reader, "standard/100M", "heldout_loss/by_GFLOPs")[0][-1] == round(6 * 9.98e7 * 819_200 / 1e9)


def test_cards_with_long_curves_come_first(two_sizes: Results, tmp_path: Path) -> None:
    """TensorBoard sorts groups of cards by name: curves of training, then of a point per size, then single values."""
    write_curves(two_sizes, tmp_path / "tb")
    points: dict[str, set[int]] = {}
    reader = read(tmp_path / "tb")
    for run, found in reader.Runs().items():
        for tag in found["scalars"]:
            points.setdefault(tag.split("/")[0], set()).add(len(reader.Scalars(run, tag)))
    groups = sorted(points)
    assert groups[-2:] == ["trend_of_final_loss", "values_at_the_end"]
    assert points["values_at_the_end"] == {1}
    assert points["trend_of_final_loss"] == {2}, "one for each size"
    assert all(min(points[group]) > 2 for group in groups[:-2])


def test_sizes_without_a_known_end_have_no_scaling_curve(tmp_path: Path) -> None:
    """As of runs that logged no tokens."""
    runs = [made(variant, 0, size) for variant in ("standard", "moda") for size in ("10M", "100M")]
    for run in runs:
        run.heldout.axes["tokens"][:] = np.nan
    write_curves(results_of(*runs), tmp_path / "tb")
    assert set(read(tmp_path / "tb").Runs()) == {"standard/10M", "standard/100M", "moda/10M", "moda/100M"}


def test_each_run_is_a_row_of_hparams(two_sizes: Results, tmp_path: Path) -> None:
    write_curves(two_sizes, tmp_path / "tb")
    found = read(tmp_path / "tb").PluginRunToTagToContent(metadata.PLUGIN_NAME)
    rows = {
        plugin_data_pb2.HParamsPluginData.FromString(
            tags[metadata.SESSION_START_INFO_TAG]
        ).session_start_info.group_name
        for tags in found.values()
    }
    assert len(rows) == 4


def test_hparams_describe_each_run(two_variants: Results, tmp_path: Path) -> None:
    write_curves(two_variants, tmp_path / "tb")
    found = read(tmp_path / "tb").PluginRunToTagToContent(metadata.PLUGIN_NAME)
    sessions = {}
    for run, tags in found.items():
        start = plugin_data_pb2.HParamsPluginData.FromString(tags[metadata.SESSION_START_INFO_TAG]).session_start_info
        sessions[run] = {key: value.string_value or value.number_value for key, value in start.hparams.items()}
    assert set(sessions) == {"standard", "moda"}
    assert sessions["moda"]["variant"] == "moda"
    assert sessions["moda"]["seeds"] == 2
    assert sessions["moda"]["parameters"] == 9.3e6
    (described,) = [tags[metadata.EXPERIMENT_TAG] for tags in found.values() if metadata.EXPERIMENT_TAG in tags]
    experiment = plugin_data_pb2.HParamsPluginData.FromString(described).experiment
    metrics = {info.name.tag for info in experiment.metric_infos}
    assert metrics == {
        f"values_at_the_end/{name}" for name in ("loss", "difference", "tokens_per_s", "peak_memory_gib")
    }
    assert scalars(read(tmp_path / "tb"), "moda", "values_at_the_end/loss")[1] == pytest.approx(
        [6 - 0.105 + 0.1], rel=1e-6
    )


def test_a_second_writing_replaces_the_first(two_variants: Results, two_sizes: Results, tmp_path: Path) -> None:
    write_curves(two_sizes, tmp_path / "tb")
    write_curves(two_variants, tmp_path / "tb")
    assert set(read(tmp_path / "tb").Runs()) == {"standard", "moda"}
    assert [path.name for path in tmp_path.iterdir()] == ["tb"]  # nothing left beside it


def test_an_empty_folder_will_do(two_variants: Results, tmp_path: Path) -> None:
    (tmp_path / "tb").mkdir()
    write_curves(two_variants, tmp_path / "tb")
    assert (tmp_path / "tb" / MARK).exists()


def test_a_folder_of_someone_elses_is_left_alone(two_variants: Results, tmp_path: Path) -> None:
    foreign = tmp_path / "tb"
    foreign.mkdir()
    (foreign / "events.out.tfevents.1.host").write_bytes(b"x")
    with pytest.raises(UserError, match=r"did not write, such as events\.out"):
        write_curves(two_variants, foreign)
    assert [path.name for path in foreign.iterdir()] == ["events.out.tfevents.1.host"]

    mine = tmp_path / "mine"
    write_curves(two_variants, mine)
    (mine / "moda" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"such as moda/notes\.txt"):
        check_folder(mine)

    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="is a file"):
        check_folder(tmp_path / "file")


def test_no_label_leads_out_of_the_folder(tmp_path: Path) -> None:
    labels = ("../../up", "/etc", "..", "a/b", "<b>&|", "x" * 300, "")
    results = results_of(made("standard"), *(made(label) for label in labels))
    runs = make_runs(results)
    assert len(runs) == 1 + len(labels)
    write_curves(results, tmp_path / "inside" / "tb")
    assert len(read(tmp_path / "inside" / "tb").Runs()) == 1 + len(labels)
    assert [path.name for path in tmp_path.iterdir()] == ["inside"]
    assert [path.name for path in (tmp_path / "inside").iterdir()] == ["tb"]


def test_the_command_refuses_before_it_reads_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(cli.COMMANDS, "compare", ("eval.compare.command", ""))
    (tmp_path / "tb").mkdir()
    (tmp_path / "tb" / "mine").write_text("x")
    assert cli.main(["compare", str(tmp_path / "no"), "--tensorboard", str(tmp_path / "tb")]) == 2
    assert "did not write, such as mine" in capsys.readouterr().err
    inside = str(tmp_path / "new" / "report")
    assert cli.main(["compare", str(tmp_path / "no"), "--out", inside, "--tensorboard", str(tmp_path / "new")]) == 2
    assert "give the two folders of their own" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["tb"]
