"""Which runs may be compared with which."""

import json
from pathlib import Path

import pytest

from data_prep.manifest import Manifest, Settings, Shard, Split, TokenizerFile
from eval.compare.compare import compare
from eval.compare.grouping import Family, make_families
from eval.compare.run import LeftOut
from eval.compare.sources import gather
from torchtitan_ext.errors import UserError

from .conftest import Recorded, straight


def families(runs: Path, baseline: str | None = None) -> tuple[list[Family], list[LeftOut]]:
    gathered = gather([str(runs)])
    return make_families(gathered.runs, gathered.left_out, baseline), gathered.left_out


def labels(family: Family) -> list[str]:
    return [group.label for group in family.all]


def test_runs_that_differ_in_their_seeds_alone_are_a_group(runs: Path) -> None:
    for seed in (0, 1):
        Recorded(seed=seed).write(runs / f"s{seed}")
        Recorded(variant="m_gate_kv", seed=seed, run_file={"logging": {"every": seed}}).write(runs / f"m{seed}")
    ((family,), left_out) = families(runs)
    assert labels(family) == ["standard", "m_gate_kv"]
    assert [len(group.runs) for group in family.all] == [2, 2]
    assert left_out == []


def test_options_of_a_variant_are_in_its_label(runs: Path) -> None:
    Recorded().write(runs / "s")
    for rank in (8, 16):
        Recorded(variant="attnres_low_rank", run_file={"depth": {"rank": rank}}).write(runs / f"r{rank}")
    ((family,), _) = families(runs)
    assert labels(family) == ["standard", "attnres_low_rank, rank 16", "attnres_low_rank, rank 8"]


def test_a_form_of_attention_is_compared_with_the_standard_one_and_variants_with_their_own(runs: Path) -> None:
    for attention in ("standard", "qk_norm"):
        chosen = {"model": {"attention": attention}}
        Recorded(run_file=chosen).write(runs / f"s_{attention}")
        Recorded(variant="moda", run_file=chosen).write(runs / f"m_{attention}")
    found, left_out = families(runs)
    assert sorted(labels(family) for family in found) == [
        ["standard, attention qk_norm", "moda, attention qk_norm"],
        ["standard, attention standard", "moda, attention standard", "standard, attention qk_norm"],
    ]
    assert left_out == []
    assert len(compare(found, left_out).families) == 2


def test_one_rate_of_a_sweep_can_be_the_baseline(runs: Path) -> None:
    for lr in (1e-3, 3e-3):
        Recorded(lr=lr).write(runs / f"s{lr}")
        Recorded(lr=lr, variant="m_gate_kv").write(runs / f"m{lr}")
    ((best,), _) = families(runs)
    assert labels(best) == ["standard", "m_gate_kv"]
    ((everything,), _) = families(runs, "standard, lr 0.003")
    assert labels(everything)[0] == "standard, lr 0.003"
    assert len(everything.groups) == 3


def test_sizes_are_compared_apart(runs: Path) -> None:
    for size in ("10M", "24M"):
        Recorded(size=size).write(runs / f"s{size}")
        Recorded(size=size, variant="m_gate_kv").write(runs / f"m{size}")
    found, _ = families(runs)
    assert [(family.size, labels(family)) for family in found] == [
        ("10M", ["standard", "m_gate_kv"]),
        ("24M", ["standard", "m_gate_kv"]),
    ]


def test_a_longer_baseline_is_a_reference_and_no_variant(runs: Path) -> None:
    Recorded().write(runs / "s")
    Recorded(variant="m_gate_kv").write(runs / "m")
    Recorded(steps=(50, 100, 120)).write(runs / "longer")
    ((family,), _) = families(runs, "standard, steps 100")
    assert [family.is_reference(group) for group in family.groups] == [True, False]


def test_a_study_names_the_baseline_of_each_run(runs: Path) -> None:
    """Here the standard model is compared with a variant, and a wall-clock control with its own baseline."""
    Recorded(variant="m_gate_kv").write(runs / "gate")
    Recorded().write(runs / "plain")
    Recorded(variant="m_gate_kv", steps=(50, 100, 110)).write(runs / "longer")
    common = {"size": "10M", "seed": 0, "lr": None, "control": None, "baseline": None}
    record = {
        "format": 1,
        "name": "s",
        "baseline": "gate",
        "runs": [
            {**common, "name": "gate", "label": "gate", "variant": "m_gate_kv"},
            {**common, "name": "plain", "label": "plain", "variant": "standard", "baseline": "gate"},
            {**common, "name": "longer", "label": "plain_wall_clock", "variant": "m_gate_kv", "control": "wall_clock",
             "baseline": "gate"},
        ],
    }  # fmt: skip
    (runs / "study.json").write_text(json.dumps(record))
    ((family,), _) = families(runs)
    assert labels(family) == ["gate", "plain", "plain_wall_clock"]
    assert [family.is_reference(group) for group in family.groups] == [False, True]
    (runs / "gate" / "status.json").unlink()
    ((without,), left_out) = families(runs)
    assert without.baseline is None
    assert [out.name for out in left_out] == ["gate"]


def test_a_studys_baseline_with_a_form_of_attention_stays_the_baseline(runs: Path) -> None:
    """Also beside a standard residual with the standard form, which is compared with it."""
    Recorded(run_file={"model": {"attention": "qk_norm"}}).write(runs / "normed")
    Recorded(run_file={"model": {"attention": "standard"}}).write(runs / "plain")
    common = {"size": "10M", "seed": 0, "lr": None, "control": None, "variant": "standard"}
    record = {
        "format": 1,
        "name": "s",
        "baseline": "normed",
        "runs": [
            {**common, "name": "normed", "label": "normed", "baseline": None},
            {**common, "name": "plain", "label": "plain", "baseline": "normed"},
        ],
    }
    (runs / "study.json").write_text(json.dumps(record))
    ((family,), left_out) = families(runs)
    assert labels(family) == ["normed", "plain"]
    assert left_out == []


def test_no_baseline_and_an_unknown_one(runs: Path) -> None:
    Recorded(variant="moda").write(runs / "a")
    Recorded(variant="m_gate_kv").write(runs / "b")
    ((family,), _) = families(runs)
    assert family.baseline is None
    assert "no baseline" in compare([family], []).families[0].warnings[0]
    with pytest.raises(UserError, match="did you mean 'm_gate_kv'"):
        families(runs, "m_gate_vk")


@pytest.mark.parametrize(
    ("data", "why"),
    [
        ({"fingerprint": "cccc"}, "training data aaaa in standard, cccc here"),
        ({"heldout_fingerprint": "cccc"}, "held-out data bbbb in standard, cccc here"),
        ({"vocab_size": 512}, "vocabulary 4096 in standard, 512 here"),
        ({"seq_len": 50}, "sequence length 100 in standard, 50 here"),
        ({"document_mask": True}, "document mask False in standard, True here"),
    ],
)
def test_losses_on_other_data_are_not_compared(runs: Path, data: dict[str, object], why: str) -> None:
    Recorded().write(runs / "s")
    Recorded(variant="moda").write(runs / "good")
    Recorded(variant="m_gate_kv", data=data).write(runs / "other")
    ((family,), left_out) = families(runs)
    assert labels(family) == ["standard", "moda"]
    assert [out.name for out in left_out] == ["other"]
    assert why in left_out[0].why


def test_nor_losses_over_another_part_of_the_held_out_split(runs: Path) -> None:
    Recorded().write(runs / "s")
    Recorded(variant="moda").write(runs / "good")
    Recorded(variant="m_gate_kv", run_file={"heldout": {"tokens": 6000}}).write(runs / "other")
    ((family,), left_out) = families(runs)
    assert labels(family) == ["standard", "moda"]
    assert "held-out windows, at most 50 in standard, 60 here" in left_out[0].why


def test_a_run_without_held_out_loss_is_left_out_where_others_have_one(runs: Path) -> None:
    Recorded().write(runs / "s")
    Recorded(variant="moda").write(runs / "good")
    Recorded(variant="m_gate_kv", heldout=False).write(runs / "without")
    ((family,), left_out) = families(runs)
    assert labels(family) == ["standard", "moda"]
    assert "no held-out loss" in left_out[0].why


def test_a_second_run_of_one_seed_is_left_out(runs: Path) -> None:
    for name in ("a", "b"):
        Recorded().write(runs / name)
    Recorded(variant="moda").write(runs / "m")
    ((family,), left_out) = families(runs)
    assert [len(group.runs) for group in family.all] == [1, 1]
    assert "same settings and seed as a" in left_out[0].why


def test_diverged_runs_count_against_their_group(runs: Path) -> None:
    Recorded().write(runs / "s")
    Recorded(variant="moda").write(runs / "m0")
    Recorded(variant="moda", seed=1, state="diverged").write(runs / "m1")
    Recorded(variant="moda", seed=1, size="24M", state="diverged").write(runs / "m2")
    ((family,), _) = families(runs)
    assert [out.name for out in family.groups[0].diverged] == ["m1"]


def data_set(folder: Path, tokenizer: str, heldout_tokens: int, **heldout: int) -> Path:
    """A manifest as `depth prep` leaves it: equal text, cut into tokens by ``tokenizer``."""
    folder.mkdir(parents=True)
    counts = {"documents": 7, "bytes": 9000, "token_bytes": 9000, **heldout}
    manifest = Manifest(
        settings=Settings(source={"kind": "files", "listing_sha256": "x"}, tokenizer=tokenizer, heldout_fraction=0.1,
                          shard_tokens=100),
        tokenizer=TokenizerFile(kind=tokenizer, sha256=tokenizer),
        token_bytes_sha256="t",
        vocab_size=256,
        eot_id=0,
        dtype="uint16",
        splits={
            name: Split(tokens=heldout_tokens, shards=(Shard(file="f", tokens=1, size=1, sha256=tokenizer + name),),
                        **counts)
            for name in ("train", "heldout")
        },
    )  # fmt: skip
    (folder / "manifest.json").write_text(manifest.to_json())
    return folder


def on(data: Path, tokens: int = 100_000) -> dict[str, dict[str, object]]:
    manifest = Manifest.model_validate(json.loads((data / "manifest.json").read_text()))
    fingerprints = {"fingerprint": manifest.fingerprint, "heldout_fingerprint": manifest.heldout_fingerprint}
    return {"data": fingerprints, "run_file": {"data": {"path": str(data)}, "heldout": {"tokens": tokens}}}


def test_bits_per_byte_are_offered_for_the_same_text_in_other_tokens(runs: Path, tmp_path: Path) -> None:
    small = on(data_set(tmp_path / "small", "bpe:256", 4000))
    large = on(data_set(tmp_path / "large", "bpe:512", 3000))
    for seed, (base, mine) in enumerate([(4.0, 3.6), (4.2, 3.4)]):
        Recorded(straight(8, base), seed=seed, **small).write(runs / f"s{seed}")
        Recorded(straight(8, mine), seed=seed, **large).write(runs / f"l{seed}")
    ((family,), left_out) = families(runs, "standard, data " + small["data"]["fingerprint"])
    assert left_out == []
    found = compare([family], [])
    rows = found.families[0].bits_per_byte
    # Recorded bits per byte are half the loss: (4.0 + 4.2) / 4 and (3.6 + 3.4) / 4; differences −0.2 and −0.4.
    assert [row.bits_per_byte for row in rows] == pytest.approx([2.05, 1.75])
    assert rows[1].difference is not None
    assert rows[1].difference.mean == pytest.approx(-0.3)
    assert [group.label for group in found.families[0].groups] == ["standard, data " + small["data"]["fingerprint"]]


@pytest.mark.parametrize("case", ["other text", "sampled windows", "data set gone", "bytes that do not add up"])
def test_bits_per_byte_are_not_offered_where_the_text_may_differ(runs: Path, tmp_path: Path, case: str) -> None:
    small = on(data_set(tmp_path / "small", "bpe:256", 4000))
    different = {"other text": {"documents": 8}, "bytes that do not add up": {"token_bytes": 8999}}.get(case, {})
    folder = data_set(tmp_path / "large", "bpe:512", 3000, **different)
    large = on(folder, tokens=2800 if case == "sampled windows" else 100_000)
    if case == "data set gone":
        (folder / "manifest.json").unlink()
    Recorded(**small).write(runs / "a")
    Recorded(variant="moda", **small).write(runs / "b")
    Recorded(variant="m_gate_kv", **large).write(runs / "c")
    ((family,), left_out) = families(runs)
    assert family.other_tokens == ()
    assert [out.name for out in left_out] == ["c"]
    assert "Bits per byte would do if" in left_out[0].why


def without_bits(run: Path) -> None:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kept = [{key: value for key, value in line.items() if "bits" not in key} for line in lines]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))


@pytest.mark.parametrize("lacking", ["one of two", "both", "the baseline", "held-out loss"])
def test_runs_in_other_tokens_that_cannot_be_compared_are_left_out(runs: Path, tmp_path: Path, lacking: str) -> None:
    small = on(data_set(tmp_path / "small", "bpe:256", 4000))
    large = on(data_set(tmp_path / "large", "bpe:512", 3000))
    Recorded(**small).write(runs / "a")
    Recorded(variant="moda", **small).write(runs / "b")
    for seed in (0, 1):
        heldout = lacking != "held-out loss"
        Recorded(variant="m_gate_kv", seed=seed, heldout=heldout, **large).write(runs / f"c{seed}")
    for name in {"one of two": ["c0"], "both": ["c0", "c1"], "the baseline": ["a"]}.get(lacking, []):
        without_bits(runs / name)
    ((family,), left_out) = families(runs)
    compared = [run.name for group in family.other_tokens for run in group.runs]
    assert compared == (["c1"] if lacking == "one of two" else [])
    assert sorted([out.name for out in left_out] + compared) == ["c0", "c1"]
    assert all("bits per byte" in out.why for out in left_out)
    assert ("standard, which logged no bits" in left_out[0].why) == (lacking == "the baseline")
    rows = compare([family], []).families[0].bits_per_byte
    assert [row.label for row in rows] == (["standard", "m_gate_kv"] if compared else [])


def test_a_baseline_without_held_out_loss_leaves_none_unsaid(runs: Path, tmp_path: Path) -> None:
    small = on(data_set(tmp_path / "small", "bpe:256", 4000))
    large = on(data_set(tmp_path / "large", "bpe:512", 3000))
    Recorded(heldout=False, **small).write(runs / "a")
    Recorded(variant="moda", **small).write(runs / "b")
    Recorded(variant="moda", seed=1, **small).write(runs / "b1")
    Recorded(variant="m_gate_kv", **small).write(runs / "d")
    Recorded(variant="m_gate_kv", **large).write(runs / "c")
    found, left_out = families(runs)
    shown = [run.name for family in found for group in family.all for run in group.runs]
    assert sorted([*shown, *(out.name for out in left_out)]) == ["a", "b", "b1", "c", "d"]
    assert compare(found, left_out).families
