"""Damage between two starts, or in the middle of one, costs no more than it has destroyed, and is told."""

import json
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

STEPS = 12
SHORT = [
    *("--training.steps", str(STEPS), "--checkpoint.every", "3", "--checkpoint.keep_last", "4"),
    *("--heldout.every", "0", "--logging.tensorboard", "false"),
]
DIVERGING = [*SHORT, "--logging.every", "20", "--checkpoint.every", "4"]
MILESTONES = [*SHORT, "--training.steps", "9", "--checkpoint.keep_last", "2", "--checkpoint.milestones", "[3]"]
TIMEOUT = 900


@dataclass
class Ended:
    """How a start ended: each rank's exit status and output, and what is in the run folder then."""

    folder: Path
    statuses: list[int | str]
    outputs: list[str]
    checkpoints: list[str]
    metrics: str
    status: dict[str, Any] | None

    @property
    def losses(self) -> dict[int, float]:
        records = [json.loads(line) for line in self.metrics.splitlines()]
        return {record["step"]: record["loss_metrics/global_avg_loss"] for record in records}

    @property
    def errors(self) -> list[str]:
        return [line for line in self.outputs[0].splitlines() if line.startswith("error: ")]


class Starts:
    """Collects starts, and makes them all in one launch on two ranks."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.starts: list[dict[str, Any]] = []
        self.names: list[str] = []

    def add(self, name: str, folder: str, *before: list, overrides: list[str], during: list | None = None) -> None:
        self.names.append(name)
        self.starts.append(
            {"folder": str(self.base / folder), "overrides": overrides, "before": before, "during": during or []}
        )

    def make(self, run_file: Path) -> dict[str, Ended]:
        (self.base / "starts.json").write_text(json.dumps(self.starts))
        worker = Path(__file__).with_name("starts.py")
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
            *(str(worker), str(run_file), str(self.base / "starts.json")),
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        launched = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT)
        assert launched.returncode == 0, launched.stdout[-2000:] + launched.stderr[-4000:]
        done = json.loads((self.base / "starts.json.done").read_text())
        return {
            name: Ended(Path(start["folder"]), **ended)
            for name, start, ended in zip(self.names, self.starts, done, strict=True)
        }


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("damage")


@pytest.fixture(scope="module")
def data(dataset: Path, base: Path) -> Path:
    return shutil.copytree(dataset, base / "data")


def shards(data: Path) -> list[Path]:
    """The one shard for training, which the first of two ranks checks, and the other one, held out."""
    (train,), (heldout,) = (data / "train").iterdir(), (data / "heldout").iterdir()
    return [train, heldout]


@pytest.fixture(scope="module")
def ended(run_file: Path, base: Path, data: Path) -> dict[str, Ended]:
    starts = Starts(base)

    def file(folder: str, step: int, name: str = "__1_0.distcp") -> str:
        return str(base / folder / "checkpoint" / f"step-{step}" / name)

    def copied(folder: str, source: str = "whole") -> list[str]:
        return ["copy", str(base / source), str(base / folder)]

    starts.add("whole", "whole", overrides=SHORT)
    for name, damage, victim in (("bit", "flip", "__1_0.distcp"), ("zeros", "zero", ".metadata")):
        starts.add(name, name, copied(name), [damage, file(name, 12, victim)], overrides=SHORT)
    reads = [["say_what_is_read"]]
    starts.add("reads", "reads", copied("reads"), overrides=SHORT, during=reads)
    starts.add("sizes", "sizes", copied("sizes"), ["list_sizes_alone", str(base / "sizes")], overrides=SHORT)
    starts.add("sizes, zeros", "sizes", ["zero", file("sizes", 12)], overrides=SHORT)
    everything = [["flip", file("all", step), step % 8] for step in (3, 6, 9, 12)]
    starts.add("all", "all", copied("all"), *everything, overrides=SHORT)
    imported = ["rename", str(base / "zero" / "checkpoint" / "step-3"), "step-0"]
    later = [["flip", file("zero", step), step % 8] for step in (6, 9, 12)]
    starts.add("zero", "zero", copied("zero"), imported, *later, overrides=SHORT)
    starts.add("none", "none", copied("none"), ["remove", str(base / "none" / "checkpoint")], overrides=SHORT)

    starts.add("milestone", "milestone", overrides=MILESTONES)
    cuts = [["cut", file("milestone", step)] for step in (6, 9)]
    starts.add("preempted", "milestone", *cuts, overrides=MILESTONES, during=[["stop_after", 4]])
    starts.add("gone on", "milestone", overrides=MILESTONES)

    two = [*SHORT, "--training.steps", "9", "--checkpoint.keep_last", "2"]
    starts.add("meanwhile", "meanwhile", overrides=two, during=[["cut_after", 7, file("meanwhile", 6)]])

    starts.add("weight", "weight", overrides=DIVERGING, during=[["spoil_weight", 6, "layers.1.ffn_norm.weight"]])
    stopped = [["spoil_weight", 6, "layers.1.ffn_norm.weight"], ["stop_after", 6]]
    starts.add("weight, stopped", "stopped", overrides=DIVERGING, during=stopped)
    starts.add("moment", "moment", overrides=DIVERGING, during=[["spoil_moment", 8]])

    late, never = ["blind", 1, "step-12", 2.0, 60.0], ["blind", 1, "step-12", 1e6, 1.0]
    longer = [*SHORT, "--training.steps", "14"]
    starts.add("late", "late", copied("late"), overrides=longer, during=[late])
    starts.add("never", "never", copied("never"), overrides=longer, during=[never])

    first = ["blind", 0, "step-12", 1e6, 60.0]
    starts.add("first", "first", copied("first"), overrides=SHORT, during=[first])
    spoilt = ["spoil_record", str(base / "record" / "metrics.jsonl")]
    starts.add("record", "record", copied("record"), spoilt, overrides=longer)

    starts.add("killed early", "killed", overrides=SHORT, during=[["kill_after", 2]])
    starts.add("killed saving", "killed", overrides=SHORT, during=[["stop_after", 5], ["kill_while_saving"]])
    starts.add("cleaned", "killed", overrides=SHORT)

    train, heldout = (str(path) for path in shards(data))
    on_data = [*SHORT, "--training.steps", "4", "--data.path", str(data)]
    starts.add("data 1", "on_data", ["flip", heldout], overrides=on_data)
    starts.add("data 2", "on_data", overrides=on_data)
    starts.add("data 3", "on_data", ["flip", train], overrides=on_data)
    starts.add("data whole", "on_data", ["flip", train], ["flip", heldout], overrides=on_data)
    starts.add("data changed", "on_data", ["flip", heldout, 3], overrides=[*on_data, "--training.steps", "6"])
    starts.add("data back", "on_data", ["flip", heldout, 3], overrides=[*on_data, "--training.steps", "6"])
    return starts.make(run_file)


def test_a_whole_run(ended: dict[str, Ended]) -> None:
    whole = ended["whole"]
    assert whole.statuses == [0, 0], whole.outputs
    assert whole.checkpoints == ["step-12", "step-3", "step-6", "step-9"]
    assert len(whole.losses) == STEPS


@pytest.mark.parametrize(("name", "victim"), [("bit", "__1_0.distcp"), ("zeros", ".metadata")])
def test_a_damaged_file_of_the_right_size_costs_one_checkpoint(name: str, victim: str, ended: dict[str, Ended]) -> None:
    again, path = ended[name], ended[name].folder / "checkpoint" / "step-12" / victim
    assert again.statuses == [0, 0], again.outputs
    for output in again.outputs:
        assert f"{path} is not what was written (its checksum differs); the checkpoint of step 12" in output
        assert "Loading the checkpoint from " + str(path.parent.with_name("step-9")) in output
    assert again.losses == ended["whole"].losses, "steps 10 to 12 once more"
    assert f"Removed {path.parent.with_name('damaged-step-12')}" in again.outputs[0]
    assert again.checkpoints == ended["whole"].checkpoints


def test_each_rank_reads_a_share_when_it_resumes(ended: dict[str, Ended]) -> None:
    read = [
        {line.split(" reads ")[1] for line in output.splitlines() if " reads " in line}
        for output in ended["reads"].outputs
    ]
    assert read == [{"step-12/.metadata", "step-12/__0_0.distcp"}, {"step-12/__1_0.distcp"}]


def test_file_lists_of_earlier_versions(ended: dict[str, Ended]) -> None:
    assert ended["sizes"].statuses == [0, 0]
    assert "passed over" not in ended["sizes"].outputs[0]
    again = ended["sizes, zeros"]
    assert again.statuses == [0, 0], again.outputs
    assert "step-12 cannot be read" in again.outputs[0]
    assert again.losses == ended["whole"].losses


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("all", "no checkpoint in {} is whole ("),
        ("zero", "no checkpoint in {} is whole ("),
        ("none", "has been trained and saved up to step 12, and {} has no"),
    ],
)
def test_a_run_that_was_saved_never_begins_anew_by_itself(name: str, words: str, ended: dict[str, Ended]) -> None:
    refused = ended[name]
    assert refused.statuses == [2, 2]
    (error,) = refused.errors
    assert words.format(refused.folder / "checkpoint") in error
    assert f"move {refused.folder} away to begin again at step 1" in error
    assert refused.metrics == ended["whole"].metrics
    assert len(refused.checkpoints) == (0 if name == "none" else 4), "none was set aside"
    assert all(step.startswith("step-") for step in refused.checkpoints)
    assert refused.status is not None
    assert (refused.status["state"], refused.status["step"]) == ("failed", 12)


def test_what_is_saved_after_damaged_checkpoints_is_kept(ended: dict[str, Ended]) -> None:
    assert ended["milestone"].checkpoints == ["step-3", "step-6", "step-9"]
    preempted = ended["preempted"]
    assert preempted.statuses == [0, 0], preempted.outputs
    assert preempted.checkpoints == ["damaged-step-6", "damaged-step-9", "step-3", "step-4"]
    assert f"is now {preempted.folder / 'checkpoint' / 'damaged-step-9'}" in preempted.outputs[0]
    again = ended["gone on"]
    assert again.statuses == [0, 0], again.outputs
    assert str(again.folder / "checkpoint" / "step-4") in again.outputs[1]
    assert again.checkpoints == ["step-3", "step-6", "step-9"]
    assert again.losses == ended["milestone"].losses


def test_a_checkpoint_damaged_while_the_run_goes_on_does_not_count(ended: dict[str, Ended]) -> None:
    meanwhile = ended["meanwhile"]
    assert meanwhile.statuses == [0, 0], meanwhile.outputs
    assert meanwhile.checkpoints == ["step-3", "step-9"], "two whole ones, without step 6"


@pytest.mark.parametrize(
    ("name", "reason", "kept"),
    [
        ("weight", "Loss is not finite (global_avg_loss=nan) at step 8", ["step-4"]),
        ("weight, stopped", "Step 6 is not saved: layers.1.ffn_norm.weight holds numbers that are not", ["step-4"]),
        ("moment", "Step 8 is not saved: exp_avg_sq of ", ["step-4"]),
    ],
)
def test_numbers_that_are_not_finite_are_not_saved(
    name: str, reason: str, kept: list[str], ended: dict[str, Ended]
) -> None:
    diverged = ended[name]
    assert diverged.statuses == [1, 1]
    assert diverged.checkpoints == kept
    assert diverged.status is not None
    assert diverged.status["state"] == "diverged"
    assert diverged.status["reason"].startswith(reason)
    assert diverged.errors[0].startswith(f"error: {reason}")
    assert "Traceback" not in "".join(diverged.outputs)
    assert list(diverged.losses) == [1], "logging.every is 20, whatever is looked at in between"


def test_a_rank_that_sees_a_checkpoint_late_waits_for_it(ended: dict[str, Ended]) -> None:
    late = ended["late"]
    assert late.statuses == [0, 0], late.outputs
    for output in late.outputs:
        assert f"Loading the checkpoint from {late.folder / 'checkpoint' / 'step-12'}" in output
    assert list(late.losses) == list(range(1, 15))


def test_a_rank_that_never_sees_a_checkpoint_stops_all(ended: dict[str, Ended]) -> None:
    never = ended["never"]
    assert never.statuses == [2, 2]
    (error,) = never.errors
    assert f"rank 1 on {platform.node()} does not see the checkpoint that the first rank sees: " in error
    assert str(never.folder / "checkpoint" / "step-12") in error
    assert never.metrics == ended["whole"].metrics
    assert never.checkpoints == ended["whole"].checkpoints


def test_what_the_first_rank_does_not_see_no_rank_loads(ended: dict[str, Ended]) -> None:
    first = ended["first"]
    assert first.statuses == [0, 0], first.outputs
    for output in first.outputs:
        assert f"Loading the checkpoint from {first.folder / 'checkpoint' / 'step-9'}" in output
    assert first.losses == ended["whole"].losses
    assert first.checkpoints == ended["whole"].checkpoints


def test_a_record_that_cannot_be_read_stops_all(ended: dict[str, Ended]) -> None:
    refused = ended["record"]
    assert refused.statuses == [2, 2]
    assert refused.errors == [f"error: {refused.folder / 'metrics.jsonl'}:1: not a JSON object (Expecting value)"]
    assert refused.checkpoints == ended["whole"].checkpoints


def test_a_run_killed_before_its_first_checkpoint_begins_again(ended: dict[str, Ended]) -> None:
    early = ended["killed early"]
    assert early.statuses == [-9, -9]
    assert early.checkpoints == []
    assert list(early.losses) == [1, 2]
    assert ended["killed saving"].losses[1] == early.losses[1]


def test_what_a_killed_save_left_is_removed_by_the_next_start(ended: dict[str, Ended]) -> None:
    killed, cleaned = ended["killed saving"], ended["cleaned"]
    assert killed.statuses[0] == -9
    assert killed.statuses[1] not in (0, "hung")
    assert ".step-3.tmp" in killed.checkpoints
    assert cleaned.statuses == [0, 0], cleaned.outputs
    assert f"Removed {cleaned.folder / 'checkpoint' / '.step-3.tmp'}" in cleaned.outputs[0]
    assert "Removed" not in cleaned.outputs[1]
    assert cleaned.checkpoints == ended["whole"].checkpoints
    assert cleaned.losses == ended["whole"].losses


def test_damaged_shards_are_refused_at_every_start(ended: dict[str, Ended], data: Path) -> None:
    train, heldout = shards(data)
    for name, damaged in (("data 1", [heldout]), ("data 2", [heldout]), ("data 3", [train, heldout])):
        refused = ended[name]
        assert refused.statuses == [2, 2]
        assert len(refused.errors) == len(damaged), "whichever rank has found it"
        for error, shard in zip(refused.errors, damaged, strict=True):
            assert error.startswith(f"error: {shard} is not the file that was written")
        assert (refused.checkpoints, refused.metrics, refused.status) == ([], "", None)
    assert ended["data whole"].statuses == [0, 0], ended["data whole"].outputs


def test_a_shard_changed_between_two_starts_is_refused(ended: dict[str, Ended], data: Path) -> None:
    before, refused, after = ended["data whole"], ended["data changed"], ended["data back"]
    assert refused.statuses == [2, 2]
    assert refused.errors[0].startswith(f"error: {shards(data)[1]} is not the file that was written")
    assert (refused.metrics, refused.checkpoints) == (before.metrics, before.checkpoints)
    assert after.statuses == [0, 0], after.outputs
    assert list(after.losses) == list(range(1, 7))
