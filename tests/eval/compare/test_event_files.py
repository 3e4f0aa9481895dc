"""TensorBoard event files, written by the real writer."""

from pathlib import Path

import pytest
from torch.utils.tensorboard import SummaryWriter

from eval.compare.event_files import event_files, read_events
from eval.compare.grouping import make_families
from eval.compare.sources import gather

LOSS, VALIDATION = "loss_metrics/global_avg_loss", "validation_metrics/loss"


def write(folder: Path, steps: range, offset: float = 0.0, **options: int) -> Path:
    """One start of a stock torchtitan run: its loss is 10 − step / 100 + ``offset``, a step takes 2 seconds."""
    with SummaryWriter(str(folder), **options) as writer:
        for step in steps:
            writer.add_scalar(LOSS, 10 - step / 100 + offset, step)
            writer.add_scalar("time_metrics/end_to_end(s)", 2.0, step)
            writer.add_scalar("throughput(tps)", 500.0, step)
            writer.add_scalar("n_tokens_seen", 1000 * step, step)
            if step % 20 == 0:
                writer.add_scalar(VALIDATION, 11 - step / 100 + offset, step)
    return next(folder.glob("events*"))


def test_several_starts_of_a_stock_run_make_one_curve(tmp_path: Path) -> None:
    """The second start goes on from the checkpoint of step 60: what the first logged after it was lost."""
    first = write(tmp_path / "tb" / "20260101-0900", range(10, 101, 10), offset=5.0)
    second = write(tmp_path / "tb" / "20260101-1000", range(70, 141, 10))
    # The files' names say when they were begun, in whole seconds; these two began in the same one.
    first.rename(first.with_name("events.out.tfevents.1767258000.host.1.0"))
    second.rename(second.with_name("events.out.tfevents.1767261600.host.2.0"))
    events = read_events(event_files(tmp_path))
    records, notes = events.records, events.notes
    assert notes == []
    assert [record["step"] for record in records] == list(range(10, 141, 10))
    assert [record[LOSS] for record in records] == pytest.approx(
        [15 - s / 100 for s in range(10, 61, 10)] + [10 - s / 100 for s in range(70, 141, 10)]
    )


def test_a_start_that_logged_nothing_yet_still_purges(tmp_path: Path) -> None:
    """``purge_step`` says which steps a start will run again."""
    write(tmp_path, range(10, 101, 10)).rename(tmp_path / "events.out.tfevents.100.host.1.0")
    with SummaryWriter(str(tmp_path), purge_step=61):
        pass
    records = read_events(event_files(tmp_path)).records
    assert records[-1]["step"] == 60


def test_of_all_ranks_the_lowest_speaks(tmp_path: Path) -> None:
    for rank in (0, 2, 10):
        write(tmp_path / "tb" / "20260101-0900" / f"rank_{rank}", range(10, 31, 10), offset=float(rank))
    records = read_events(event_files(tmp_path)).records
    assert records[0][LOSS] == pytest.approx(9.9)


@pytest.mark.parametrize("keep", [0.0, 0.3, 0.61, 0.999])
def test_a_file_cut_off_anywhere_is_read_up_to_there(tmp_path: Path, keep: float) -> None:
    file = write(tmp_path, range(10, 101, 10))
    whole = read_events([file]).records
    file.write_bytes(file.read_bytes()[: int(keep * file.stat().st_size)])
    events = read_events([file])
    records, notes = events.records, events.notes
    assert len(notes) == 1
    assert file.name in notes[0]
    for cut, record in zip(records, whole, strict=False):
        assert cut.items() <= record.items()
    assert len(records) < len(whole) or keep > 0.9


def test_a_damaged_byte_in_the_middle_is_noticed(tmp_path: Path) -> None:
    file = write(tmp_path, range(10, 101, 10))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0xFF
    file.write_bytes(content)
    events = read_events([file])
    records, notes = events.records, events.notes
    assert 0 < len(records) < 10
    assert "damaged" in notes[0]


def test_something_else_by_the_name_of_an_event_file(tmp_path: Path) -> None:
    file = tmp_path / "events.out.tfevents.1.host"
    file.write_bytes(b"not an event file, but long enough to hold a header")
    events = read_events([file])
    records, notes = events.records, events.notes
    assert records == []
    assert len(notes) == 1


def test_stock_runs_are_compared_by_their_validation_loss(tmp_path: Path) -> None:
    for seed in (0, 1):
        write(tmp_path / f"base-seed{seed}" / "tb" / "20260101-0900", range(10, 101, 10), offset=0.01 * seed)
        write(tmp_path / f"mine-seed{seed}" / "tb" / "20260101-0900", range(10, 101, 10), offset=-0.2 + 0.02 * seed)
    gathered = gather([str(tmp_path)])
    (family,) = make_families(gathered.runs, gathered.left_out, "base")
    assert gathered.left_out == []
    assert family.measure == "heldout"
    assert [(run.variant, run.seed) for group in family.all for run in group.runs] == [
        ("base", 0),
        ("base", 1),
        ("mine", 0),
        ("mine", 1),
    ]
    run = family.all[0].first
    assert run.heldout.steps.tolist() == [20, 40, 60, 80, 100]
    assert run.heldout.axes["tokens"].tolist() == [20_000, 40_000, 60_000, 80_000, 100_000]
    assert run.heldout.axes["seconds"].tolist() == [40.0, 80.0, 120.0, 160.0, 200.0]
    assert run.costs["tokens_per_s"] == 500.0
    assert run.per_device


def test_labels_on_the_command_line_name_stock_runs(tmp_path: Path) -> None:
    write(tmp_path / "a" / "outputs" / "tb" / "20260101-0900", range(10, 101, 10))
    write(tmp_path / "b" / "outputs" / "tb" / "20260101-0900", range(10, 101, 10))
    arguments = [f"old-seed4={tmp_path}/a/outputs", f"new-seed4={tmp_path}/b/outputs/tb/20260101-0900"]
    gathered = gather(arguments)
    assert [(run.name, run.label, run.seed) for run in gathered.runs] == [("a", "old", 4), ("b", "new", 4)]


def test_a_cut_off_stock_run_is_left_out(tmp_path: Path) -> None:
    file = write(tmp_path / "base", range(10, 101, 10))
    write(tmp_path / "mine", range(10, 101, 10))
    file.write_bytes(file.read_bytes()[:-300])
    gathered = gather([str(tmp_path)])
    assert [run.name for run in gathered.runs] == ["mine"]
    assert "cut off" in gathered.left_out[0].why


def started_again(folder: Path, first: range, second: range) -> tuple[Path, Path]:
    """The event files of two starts, in their order."""
    files = []
    for number, steps in enumerate((first, second)):
        start = folder / "tb" / f"20260101-090{number}"
        file = write(start, steps)
        files.append(file.rename(start / f"events.out.tfevents.{100 + number}.host.1.0"))
    return files[0], files[1]


def cut(file: Path, share: float) -> None:
    file.write_bytes(file.read_bytes()[: int(share * file.stat().st_size)])


def test_a_damaged_earlier_start_is_a_note_where_a_later_one_logged_it_again(tmp_path: Path) -> None:
    """The first start is cut off after about step 160 of 200; the second went on from the checkpoint of step 100."""
    whole, damaged = tmp_path / "whole-seed0", tmp_path / "damaged-seed1"
    started_again(whole, range(10, 201, 10), range(110, 301, 10))
    first, _ = started_again(damaged, range(10, 201, 10), range(110, 301, 10))
    cut(first, 0.8)
    gathered = gather([str(tmp_path)])
    assert gathered.left_out == []
    mended, reference = gathered.runs
    assert mended.heldout.steps.tolist() == reference.heldout.steps.tolist() == list(range(20, 301, 20))
    assert mended.heldout.values == pytest.approx(reference.heldout.values)
    assert reference.notes == ()
    assert "a later start logged it again" in mended.notes[0]


def test_a_damaged_earlier_start_that_leaves_a_gap_is_left_out(tmp_path: Path) -> None:
    """Cut off after about step 60, and the second start began at step 100."""
    first, _ = started_again(tmp_path / "run", range(10, 201, 10), range(110, 301, 10))
    cut(first, 0.3)
    gathered = gather([str(tmp_path)])
    assert gathered.runs == []
    assert "and 110 is lost" in gathered.left_out[0].why
    cut(first, 0.0)
    assert "between steps 0 and 110 is lost" in gather([str(tmp_path)]).left_out[0].why


def test_a_gap_in_the_validation_loss_alone_is_one_too(tmp_path: Path) -> None:
    first, _ = started_again(tmp_path / "run", range(10, 101, 10), range(110, 301, 10))
    # The last event of the first start is the validation loss of step 100.
    first.write_bytes(first.read_bytes()[:-5])
    assert f"{VALIDATION} is lost between steps 80 and 120" in gather([str(tmp_path)]).left_out[0].why


def test_a_gap_that_a_third_start_leaves(tmp_path: Path) -> None:
    """The second start made up for the damage, but the third began before it and replaces it."""
    first, _ = started_again(tmp_path / "run", range(10, 201, 10), range(110, 201, 10))
    cut(first, 0.4)
    third = write(tmp_path / "run" / "tb" / "20260101-0902", range(100, 301, 10))
    third.rename(third.with_name("events.out.tfevents.102.host.1.0"))
    assert "and 100 is lost" in gather([str(tmp_path)]).left_out[0].why


@pytest.mark.parametrize(
    ("logged", "seconds"),
    [
        # log_freq 10: step 1 takes 30 s, the others 2 s each, and torchtitan divides what passed by 10.
        ({1: 30 / 10, 10: 18 / 10, 20: 2.0, 30: 2.0}, {1: 30.0, 10: 48.0, 20: 68.0, 30: 88.0}),
        ({1: 30 / 10, 10: 18 / 10}, {1: 30.0, 10: 48.0}),
        # log_freq 1 and 2 begin alike.
        ({1: 30.0, 2: 2.0, 3: 2.0}, {1: 30.0, 2: 32.0, 3: 34.0}),
        ({1: 15.0, 2: 1.0, 4: 2.0}, {1: 30.0, 2: 32.0, 4: 36.0}),
    ],
)
def test_torchtitan_divides_by_its_log_freq_at_step_1_too(
    tmp_path: Path, logged: dict[int, float], seconds: dict[int, float]
) -> None:
    with SummaryWriter(str(tmp_path / "run")) as writer:
        for step, each in logged.items():
            writer.add_scalar("time_metrics/end_to_end(s)", each, step)
            writer.add_scalar(LOSS, 5.0, step)
    (run,) = gather([str(tmp_path)]).runs
    assert dict(zip(run.training.steps.tolist(), run.training.axes["seconds"], strict=True)) == pytest.approx(seconds)


def test_without_validation_the_training_loss_is_compared(tmp_path: Path) -> None:
    for name in ("one", "two"):
        with SummaryWriter(str(tmp_path / name)) as writer:
            for step in range(1, 41):
                writer.add_scalar(LOSS, 5.0 - step / 100, step)
    gathered = gather([str(tmp_path)])
    (family,) = make_families(gathered.runs, gathered.left_out)
    assert family.measure == "training"
    assert family.baseline is None
