"""What is read and what is left out: no damaged run takes another down."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.utils.tensorboard import SummaryWriter

from eval.compare.sources import gather
from torchtitan_ext.errors import UserError
from torchtitan_ext.run_folder import FORMAT

from .conftest import Recorded, as_a_user, straight


def rewrite(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return lambda run: (run / name).write_bytes(change((run / name).read_bytes())) and None


def status(**fields: object) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        content = json.loads((run / "status.json").read_text())
        (run / "status.json").write_text(json.dumps({**content, **fields}))

    return change


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "half a facts.json": (rewrite("facts.json", lambda b: b[:100]), "facts.json is damaged"),
    "facts.json of another kind": (rewrite("facts.json", lambda b: b"[1]"), "damaged"),
    "no facts.json": (lambda run: (run / "facts.json").unlink(), "no facts.json"),
    "facts without parameters": (rewrite("facts.json", lambda b: b.replace(b'"parameters"', b'"p"')), "parameters"),
    "facts of a later version": (
        rewrite("facts.json", lambda b: b.replace(f'"format": {FORMAT}'.encode(), b'"format": 9')),
        "format 9",
    ),
    "no run.yaml": (lambda run: (run / "run.yaml").unlink(), "no run.yaml"),
    "run.yaml that is no YAML": (rewrite("run.yaml", lambda b: b"a: [1"), "run.yaml is damaged"),
    "run.yaml without keys": (rewrite("run.yaml", lambda b: b"text"), "run.yaml is damaged"),
    "no status": (lambda run: (run / "status.json").unlink(), "never started"),
    "still running": (status(state="running", step=40), "running at step 40 of 100"),
    "stopped": (status(state="stopped", step=60), "stopped at step 60 of 100"),
    "failed": (status(state="failed"), "failed"),
    "diverged": (status(state="diverged", step=20), "diverged at step 20 of 100"),
    "no metrics": (lambda run: (run / "metrics.jsonl").unlink(), "metrics.jsonl is missing or empty"),
    "empty metrics": (rewrite("metrics.jsonl", lambda b: b""), "metrics.jsonl is missing or empty"),
    "metrics that are no JSON": (rewrite("metrics.jsonl", lambda b: b"{\n" + b), "metrics.jsonl:1"),
    "metrics that are no text": (rewrite("metrics.jsonl", lambda b: b"\xff\xfe\n" + b), "not UTF-8"),
    "metrics cut off": (rewrite("metrics.jsonl", lambda b: b[: len(b) // 2]), "ended at step 100"),
    "a last loss that is NaN": (
        rewrite("metrics.jsonl", lambda b: b.replace(b'"heldout/loss": 4.0', b'"heldout/loss": NaN')),
        "diverged: its last held-out loss, of step 100, is nan",
    ),
    "metrics of lists": (rewrite("metrics.jsonl", lambda b: b"[]\n3\n"), "no finite loss"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_run_is_left_out_with_the_reason(runs: Path, name: str) -> None:
    damage, why = DAMAGE[name]
    Recorded().write(runs / "good")
    damage(Recorded(seed=1).write(runs / "bad"))
    gathered = gather([str(runs)])
    assert [run.name for run in gathered.runs] == ["good"]
    (left_out,) = gathered.left_out
    assert left_out.name == "bad"
    assert why in left_out.why
    fate = {"diverged": "diverged", "a last loss that is NaN": "diverged", "failed": "failed"}.get(name, "unfinished")
    assert left_out.fate == fate


def test_a_last_line_cut_off_by_a_crash_is_no_damage(runs: Path) -> None:
    path = Recorded().write(runs / "run")
    with open(path / "metrics.jsonl", "a") as file:
        file.write('{"step": 101, "heldout/l')
    assert [run.heldout.final for run in gather([str(path)]).runs] == [4.0]


def test_nan_inside_a_run_is_dropped_and_noted(runs: Path) -> None:
    path = Recorded(loss=lambda step: float("nan") if step == 40 else 8 - step / 25).write(runs / "run")
    (run,) = gather([str(path)]).runs
    assert run.heldout.steps.tolist() == [10, 20, 60, 80, 100]
    assert any("heldout/loss is NaN" in note for note in run.notes)


def test_event_files_stand_in_for_a_damaged_record(runs: Path) -> None:
    path = Recorded().write(runs / "run")
    with SummaryWriter(str(path / "tb")) as writer:
        for record in Recorded().records():
            for tag in record.keys() - {"step", "time"}:
                writer.add_scalar(tag, record[tag], record["step"])
    (whole,) = gather([str(path)]).runs
    (path / "metrics.jsonl").write_text("damaged\n")
    (run,) = gather([str(path)]).runs
    assert "its event files were read instead" in run.notes[0]
    assert run.heldout.values == pytest.approx(whole.heldout.values)
    assert run.heldout.axes["seconds"] == pytest.approx(whole.heldout.axes["seconds"])


def test_curves_and_costs_are_those_recorded(runs: Path) -> None:
    path = Recorded(straight(8.0, 3.0), step_seconds=0.25, memory=3.5, flops_per_token=7, parameters=11).write(
        runs / "r"
    )
    (run,) = gather([str(path)]).runs
    assert run.heldout.steps.tolist() == [10, 20, 40, 60, 80, 100]
    assert run.heldout.values == pytest.approx([7.5, 7.0, 6.0, 5.0, 4.0, 3.0])
    assert run.heldout.axes["tokens"].tolist() == [10_000, 20_000, 40_000, 60_000, 80_000, 100_000]
    assert run.heldout.axes["flops"][-1] == 700_000
    assert run.heldout.axes["seconds"].tolist() == [2.5, 5.0, 10.0, 15.0, 20.0, 25.0]
    assert run.costs == {
        "tokens_per_s": 4000.0,
        "step_seconds": 0.25,
        "peak_memory_gib": 3.5,
        "flops_per_token": 7.0,
        "parameters": 11.0,
    }


def test_depth_numbers_come_from_the_last_look(runs: Path) -> None:
    extra = {"depth/gradient_norm/00": 0.5, "depth/gradient_norm/01": 0.25, "depth/weights": [[1.0], [0.5, 0.5]]}
    path = Recorded(extra=extra).write(runs / "run")
    (run,) = gather([str(path)]).runs
    assert run.depth.step == 100
    assert run.depth.series == {"gradient_norm": [0.5, 0.25]}
    assert run.depth.maps == {"weights": [[1.0], [0.5, 0.5]]}


def record_study(folder: Path, *runs: dict[str, object]) -> None:
    common = {"size": "10M", "lr": None, "control": None, "baseline": None}
    text = json.dumps({"format": 1, "name": "s", "baseline": "standard", "runs": [{**common, **run} for run in runs]})
    (folder / "study.json").write_text(text)


def test_a_study_says_what_its_runs_are(runs: Path) -> None:
    Recorded().write(runs / "a")
    Recorded(variant="m_gate_kv").write(runs / "b")
    record_study(
        runs,
        {"name": "a", "label": "plain", "variant": "standard", "seed": 0},
        {"name": "b", "label": "gate", "variant": "m_gate_kv", "seed": 0, "baseline": "a", "control": "detached"},
        {"name": "c", "label": "gate", "variant": "m_gate_kv", "seed": 1, "baseline": "a"},
    )
    gathered = gather([str(runs)])
    assert [(run.label, run.baseline, run.control) for run in gathered.runs] == [
        ("plain", None, None),
        ("gate", "plain", "detached"),
    ]
    assert [(out.name, out.why) for out in gathered.left_out] == [("c", "not started: its folder does not exist")]


def test_a_study_file_leads_to_its_runs(runs: Path, tmp_path: Path) -> None:
    Recorded().write(runs / "a")
    record_study(runs, {"name": "a", "label": "plain", "variant": "standard", "seed": 0})
    (tmp_path / "base.yaml").write_text("model: {size: 10M}\ndata: {path: nowhere}\n")
    study = tmp_path / "study.yaml"
    study.write_text(f"base: base.yaml\nfolder: {runs}\nvariants: [standard, m_gate_kv]\nbaseline: standard\n")
    assert [run.label for run in gather([str(study)]).runs] == ["plain"]
    (runs / "study.json").unlink()
    with pytest.raises(UserError, match=r"has no study\.json"):
        gather([str(study)])


def test_a_run_given_twice_counts_once(runs: Path) -> None:
    path = Recorded().write(runs / "run")
    assert len(gather([str(path), str(runs), f"{path}/../run"]).runs) == 1


@pytest.mark.parametrize("text", ["{", "[]", '{"format": 1}', '{"format": 1, "runs": [{"name": "a"}]}'])
def test_a_damaged_study_record_is_an_error(runs: Path, text: str) -> None:
    runs.mkdir()
    (runs / "study.json").write_text(text)
    with pytest.raises(UserError, match=r"study\.json is damaged"):
        gather([str(runs)])


def test_what_does_not_exist_is_an_error_and_what_holds_nothing_is_left_out(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        gather([str(tmp_path / "nowhere")])
    assert "holds no run" in gather([str(tmp_path)]).left_out[0].why


def test_a_damaged_study_beside_others_is_left_out(runs: Path) -> None:
    for name in ("one", "two"):
        Recorded().write(runs / name / "a")
        record_study(runs / name, {"name": "a", "label": name, "variant": "standard", "seed": 0})
    (runs / "one" / "study.json").write_text("{")
    gathered = gather([str(runs)])
    assert [run.label for run in gathered.runs] == ["two"]
    ((name, why),) = [(out.name, out.why) for out in gathered.left_out]
    assert name == "one"
    assert "study.json is damaged" in why


@pytest.mark.parametrize("rights", [0o000, 0o644])
def test_a_folder_that_may_not_be_read_is_left_out(public: Path, rights: int) -> None:
    Recorded().write(public / "good")
    (public / "locked" / "inside").mkdir(parents=True)
    (public / "locked").chmod(rights)
    as_a_user()
    gathered = gather([str(public)])
    assert [run.name for run in gathered.runs] == ["good"]
    assert [(out.name, out.why) for out in gathered.left_out] == [("locked", "cannot be read (Permission denied)")]
    with pytest.raises(UserError, match="cannot be read"):
        gather([str(public / "locked")])
