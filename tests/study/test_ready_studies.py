"""The studies in train_configs/studies load and plan, on text that Python ships in place of theirs.

Where the stand-in has fewer tokens than one of their batches, the batch is smaller too. Shapes are theirs but for the
vocabulary.
"""

from pathlib import Path

import pytest

from torchtitan_ext import cli
from torchtitan_ext.cost import train_tokens
from torchtitan_ext.study import Plan, PlannedRun, load_study, plan_study, plan_text
from torchtitan_ext.study.schema import Budget, Control, Entry, Exclusion, SizeEntry, Stop, Study

STUDIES = Path(__file__).resolve().parents[2] / "train_configs" / "studies"
DOCS = Path(__file__).resolve().parents[2] / "docs"
STAND_IN = ["--set.data.path", "text"]
SMALL_BATCH = ["--set.training.batch_tokens", "65536"]


def planned(name: str, *overrides: str, ranks: int = 8) -> Plan:
    plan = plan_study(load_study(STUDIES / f"{name}.yaml", overrides), ranks)
    assert max(map(len, plan_text(plan).splitlines())) <= 80
    return plan


def parameters(run: PlannedRun) -> int:
    assert run.resolved
    return run.resolved.parameters


def test_every_ready_study_is_tested_here() -> None:
    assert {path.stem for path in STUDIES.iterdir()} == {
        *("seed_m_gate", "seed_attnres_500m", "scaling_ladder", "cpu_demo", "books_1m", "first_500m"),
        *("query_scale_1m", "query_scale_10m"),
    }


def test_seed_m_gate_has_the_widths_of_the_published_study(folder: Path) -> None:
    # 65 characters, as many as the text of the study has, and the end of text: a vocabulary of 66, padded to 128.
    characters = "".join(map(chr, range(48, 48 + 64)))
    Path("plays.txt").write_text("".join(f"{characters[number % 64 :]}{characters}\n" for number in range(200)))
    prep = ["prep", "plays.txt", "--document-separator", "\\n", "--tokenizer", "characters", "--workers", "1"]
    assert cli.main([*prep, "--heldout-fraction", "0.2", "--out", "data/shakespeare-char"]) == 0
    plan = planned("seed_m_gate")
    assert len(plan.runs) == 5 * 8
    standard, variant, detached, wider = plan.runs[:4]
    assert [run.entry for run in plan.runs[:4]] == ["standard", "m_gate_kv", "m_gate_kv_detached", "m_gate_kv_wider"]
    # 6 · (4·128·128 + 3·128·344 + 2·128) + 128 + 128·128
    assert parameters(standard) == 1_203_840
    # 6 · (4·112·112 + 3·112·316 + 2·112) + 112 + 128·112, and in 5 layers 4·112·112 for M
    assert parameters(variant) == parameters(detached) == 1_204_784
    # 6 · (4·136·136 + 3·136·368 + 2·136) + 136 + 128·136
    assert parameters(wider) == 1_363_944
    assert [run.resolved and run.resolved.shape.width for run in plan.runs[:4]] == [128, 112, 112, 136]
    assert {run.entry for run in plan.runs if run.command is None} == {"m_gate_kv_wall_clock"}
    for run in plan.runs[:4]:
        assert run.resolved
        assert train_tokens(run.resolved) == 3000 * 32 * 128
    # The documentation shows this plan, for one process and before the text is prepared.
    one = plan_study(load_study(plan.study.file), ranks=1, vocab_size=66)
    assert (
        f"seed_m_gate.yaml --nproc 1 --vocab-size 66\n{plan_text(one).rstrip()}\n```"
        in (DOCS / "studies.md").read_text()
    )


def test_every_key_of_a_study_is_documented() -> None:
    documented = (DOCS / "studies.md").read_text()
    for prefix, model in {
        "": Study,
        "variants[].": Entry,
        "sizes[].": SizeEntry,
        "budget.": Budget,
        "exclude[].": Exclusion,
        "stop.": Stop,
    }.items():
        for key, field in model.model_fields.items():
            assert f"| `{prefix}{key}` | {field.description}" in documented, key
    for kind in [key for key in Control.model_fields if key != "width"]:
        assert f"- `{kind}: LABEL`" in documented


def test_seed_attnres_500m_has_the_rows_of_the_published_table() -> None:
    plan = planned("seed_attnres_500m", *STAND_IN, *SMALL_BATCH)
    by_entry = {run.entry: run for run in plan.runs}
    assert len(plan.runs) == 13 * 4
    assert {run.seed for run in plan.runs} == {1337, 42, 123, 456}
    for entry, run in by_entry.items():
        assert run.resolved
        deep = entry.startswith("deep_")
        assert (run.resolved.shape.layers, run.resolved.shape.width) == ((48, 1080) if deep else (24, 1536))
        assert run.baseline == (None if entry == "standard" else f"standard-500M-s{run.seed}")
        assert train_tokens(run.resolved) == 10_000_000_000 // 65_536 * 65_536
        allowed = {"model.variant", "model.size"} if deep else {"model.variant"}
        assert {key for key, _, _ in run.differences} <= allowed


def test_first_500m_fits_four_nodes_of_eight() -> None:
    plan = plan_study(load_study(STUDIES / "first_500m.yaml"), ranks=32, vocab_size=50257)
    assert len(plan.runs) == 4 * 3
    for run in plan.runs:
        assert run.resolved
        assert train_tokens(run.resolved) == 10_000_000_000 // 2**20 * 2**20
        assert {key for key, _, _ in run.differences} <= {"model.variant"}


def test_scaling_ladder_has_tokens_in_proportion_to_size() -> None:
    plan = planned("scaling_ladder", *STAND_IN, *SMALL_BATCH)
    sizes = list(dict.fromkeys(run.size for run in plan.runs))
    assert (sizes[0], sizes[-1]) == ("100M", "1.5B")
    assert len(sizes) >= 3
    for run in plan.runs:
        assert run.resolved
        wanted = 20 * run.resolved.shape.parameters()  # the embedding is tied, so it counts as the head
        assert train_tokens(run.resolved) == pytest.approx(wanted, abs=65_536)


def test_scaling_ladder_says_how_its_batches_depart_from_their_law() -> None:
    plan = plan_study(load_study(STUDIES / "scaling_ladder.yaml"), ranks=32, vocab_size=50257)
    text = plan_text(plan)
    assert max(map(len, text.splitlines())) <= 80
    said = text[text.index("batches are powers of two") :].split("\n\n")[0].splitlines()[1:]
    # 327,680 · (N / 108e6)^(2/3) at 20 tokens per parameter, where N is 351,144,000: 719 thousand.
    assert "  standard-350M: 524,288 tokens, -27% against 719,1" in said[2]
    assert [line.split()[-1] for line in said] == ["0.99", "0.95", "0.95", "0.95", "0.95"]
    one = plan_study(load_study(STUDIES / "scaling_ladder.yaml", ["--sizes", "[100M]"]), ranks=32, vocab_size=50257)
    assert "batches are powers of two" not in plan_text(one)
    by_hand = ["--set.training.batch_tokens", "524288"]
    same = plan_study(load_study(STUDIES / "scaling_ladder.yaml", by_hand), ranks=32, vocab_size=50257)
    assert "standard-100M: 524,288 tokens" not in plan_text(same)


def test_cpu_demo_plans_in_full_and_in_its_smallest_form() -> None:
    assert {run.size for run in planned("cpu_demo", *STAND_IN).runs} == {"10M"}
    smallest = ["--sizes", "[debug]", "--seeds", "[0]", "--variants", "[standard, control_block]"]
    plan = planned("cpu_demo", *STAND_IN, *smallest, "--set.training.steps", "60", "--name", "tiny")
    assert [run.name for run in plan.runs] == ["standard-debug-s0", "control_block-debug-s0"]
    assert [run.resolved and run.resolved.steps for run in plan.runs] == [60, 60]


def test_books_1m_has_equal_parameters() -> None:
    plan = planned("books_1m", *STAND_IN)
    entries = ["standard", "control_block", "attnres_block", "m_gate_kv", "value_residual"]
    assert [(run.entry, run.seed) for run in plan.runs] == [(entry, seed) for seed in range(3) for entry in entries]
    standard = parameters(plan.runs[0])
    assert all(parameters(run) == pytest.approx(standard, rel=0.005) for run in plan.runs)


@pytest.mark.parametrize(("name", "seeds"), [("query_scale_1m", 5), ("query_scale_10m", 3)])
def test_query_scale_compares_each_read_with_and_without_the_factor(name: str, seeds: int) -> None:
    plan = planned(name, *STAND_IN, ranks=1)
    assert len(plan.runs) == 5 * 3 * seeds
    runs = {run.entry: run for run in plan.runs if run.seed == 0 and run.lr == 1e-3}
    for read in ("attnres_block", "control_block"):
        plain, scaled = runs[read].resolved, runs[f"{read}_scaled"].resolved
        assert plain
        assert scaled
        assert plain.run.depth == {**scaled.run.depth, "query_scale": "one"}
        assert scaled.run.depth["query_scale"] == "inverse_sqrt"
