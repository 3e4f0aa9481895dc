"""What a benchmark compares: variants under one set of settings, and nothing else."""

from pathlib import Path

import pytest
import torch
import yaml

from data_prep.dataset import TokenDataset
from torchtitan_ext.bench.contenders import Contender, Request, contenders
from torchtitan_ext.bench.random_tokens import write_random_tokens
from torchtitan_ext.errors import UserError
from torchtitan_ext.resolve import KNOWN_NAMES
from torchtitan_ext.run_file import load_run


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    folder = tmp_path / "scratch"
    folder.mkdir()
    return folder


def write(path: Path, variant: str = "standard", **sections: dict) -> str:
    run = {
        "model": {"size": "debug", "variant": variant},
        "data": {"path": "nowhere", "seq_len": 64},
        "training": {"steps": 10, "batch_tokens": 512, "micro_batch": 4},
    }
    for name, section in sections.items():
        run[name] = {**run.get(name, {}), **section}
    path.write_text(yaml.safe_dump(run))
    return str(path)


def compared(scratch: Path, *files: str, variants: tuple[str, ...] = (), **request: object) -> list[Contender]:
    return contenders(Request(files, variants, vocab_size=512, **request), scratch)  # type: ignore[arg-type]


def test_runs_that_differ_in_more_than_the_variant_are_refused_with_every_key(tmp_path: Path, scratch: Path) -> None:
    one = write(tmp_path / "one.yaml")
    other = write(
        tmp_path / "other.yaml",
        "moda",
        data={"seq_len": 128},
        training={"micro_batch": 2, "activation_checkpoint": "full"},
        optimizer={"lr": 0.5},
    )
    with pytest.raises(UserError) as error:
        compared(scratch, one, other)
    message = str(error.value)
    assert message.startswith("runs one and other differ in ")
    for difference in (
        "data.seq_len (64 and 128)",
        "training.micro_batch (4 and 2)",
        "training.activation_checkpoint (none and full)",
        "optimizer.lr (None and 0.5)",
    ):
        assert difference in message
    assert message.count(" and ") == 1 + 4, "no other key is named"
    assert "\n" not in message


def test_runs_that_differ_in_the_variant_alone_are_compared(tmp_path: Path, scratch: Path) -> None:
    one = write(tmp_path / "one.yaml", "control_block", depth={"block_size": 2})
    other = write(tmp_path / "other.yaml", heldout={"every": 7}, logging={"every": 1}, checkpoint={"every": 3})
    models = compared(scratch, one, other)
    assert [model.label for model in models] == ["standard", "control_block"], "standard comes first"
    assert models[1].resolved.run.depth == {"block_size": 2}


def test_standard_is_added_and_takes_no_options(tmp_path: Path, scratch: Path) -> None:
    file = write(tmp_path / "one.yaml", "control_block", depth={"block_size": 2})
    models = compared(scratch, file)
    assert [model.label for model in models] == ["standard", "control_block"]
    assert models[0].resolved.run.depth == {}


def test_options_in_the_file_belong_to_its_variant_and_those_of_the_command_line_to_all(
    tmp_path: Path, scratch: Path
) -> None:
    file = write(tmp_path / "one.yaml", "control_block", depth={"block_size": 2})
    models = compared(scratch, file, variants=("control_block", "moda", "standard"))
    assert [model.resolved.run.depth for model in models] == [{}, {"block_size": 2}, {}]
    shared = ["--depth.block_size", "4"]
    models = compared(scratch, file, variants=("control_block", "block_hybrid_memory"), overrides=shared)
    assert [model.resolved.run.depth for model in models] == [{}, {"block_size": 4}, {"block_size": 4}]


def test_options_of_the_command_line_are_not_for_standard(tmp_path: Path, scratch: Path) -> None:
    file = write(tmp_path / "one.yaml", "standard")
    models = compared(scratch, file, variants=("control_block",), overrides=["--depth.block_size=2"])
    assert [model.resolved.run.depth for model in models] == [{}, {"block_size": 2}]


def test_a_data_set_can_be_named_without_a_run_file(tmp_path: Path, scratch: Path) -> None:
    (tmp_path / "own").mkdir()
    write_random_tokens(tmp_path / "own", 256, 100_000)
    overrides = ["--model.size=debug", "--data.seq_len=64", "--training.micro_batch=3"]
    own = [*overrides, "--data.path", str(tmp_path / "own")]
    assert contenders(Request(overrides=own), scratch)[0].resolved.shape.vocab_size == 256
    with pytest.raises(UserError, match=r"--data\.path and --vocab-size both say what to train on"):
        contenders(Request(overrides=own, vocab_size=512), scratch)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU can do what is refused here")
def test_a_backend_that_this_machine_lacks_is_refused(tmp_path: Path, scratch: Path) -> None:
    file = write(tmp_path / "one.yaml", "control_block")
    with pytest.raises(UserError, match="triton"):
        compared(scratch, file, overrides=["--depth.backend=triton"])


def test_labels_tell_models_apart(tmp_path: Path, scratch: Path) -> None:
    two = write(tmp_path / "two.yaml", "control_block", depth={"block_size": 2})
    four = write(tmp_path / "four.yaml", "control_block", depth={"block_size": 4})
    assert [model.label for model in compared(scratch, two, four)] == ["standard", "two", "four"]
    doubles = compared(scratch, two, variants=("standard", "standard", "moda"))
    assert [model.label for model in doubles] == ["standard", "standard (2)", "moda"]


def test_without_a_run_file_a_step_is_one_pass_of_every_process(scratch: Path) -> None:
    overrides = ["--model.size=debug", "--data.seq_len=64", "--training.micro_batch=3"]
    models = contenders(Request(overrides=overrides, vocab_size=512, ranks=2), scratch)
    assert [model.label for model in models] == ["standard", "control_block", "block_hybrid_memory"]
    assert {model.resolved.batch_tokens for model in models} == {2 * 3 * 64}
    assert models[0].resolved.shape.vocab_size == 512


def test_a_mistake_in_a_name_is_found_with_the_nearest_one(tmp_path: Path, scratch: Path) -> None:
    with pytest.raises(UserError, match=r"model\.variant .control_blok. is unknown; did you mean .control_block.\?"):
        compared(scratch, write(tmp_path / "one.yaml"), variants=("control_blok",))


def test_random_tokens_are_a_data_set_like_any_other(tmp_path: Path) -> None:
    write_random_tokens(tmp_path, 70_000, 300_000)
    data = TokenDataset.open(tmp_path)
    data.verify_checksums()
    tokens = data.split("train").read(0, 300_000)
    assert data.vocab_size == 70_000
    # 70,000 ids each missing with probability exp(-300,000 / 70,000) = 1.4%: 69,037 expected, standard deviation < 31.
    assert abs(len(set(tokens.tolist())) - 69_037) < 200
    again = tmp_path / "again"
    again.mkdir()
    write_random_tokens(again, 70_000, 300_000)
    assert TokenDataset.open(again).fingerprint == data.fingerprint


def test_the_settings_compared_are_those_of_the_schema(tmp_path: Path) -> None:
    """A key that is added to run files is compared unless it is declared to be of no use here."""
    from torchtitan_ext.bench.contenders import UNUSED, check_same_settings

    run = load_run(write(tmp_path / "one.yaml"), known=KNOWN_NAMES)
    for section in ("seed", "data.document_mask", "training.compile", "parallelism.reshard_after_forward"):
        name, _, key = section.partition(".")
        value: object = {"seed": 5, "reshard_after_forward": "never"}.get(key or name, True)
        changed = getattr(run, name).model_copy(update={key: value}) if key else value
        with pytest.raises(UserError, match=section):
            check_same_settings(run, run.model_copy(update={name: changed}))
    assert all(name in type(run).model_fields for name in UNUSED)
