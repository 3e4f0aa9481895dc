"""A dumped run loads to the same run, here and with plain PyYAML."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from torchtitan_ext.run_file import Run, describe_schema, dump_run

Load = Callable[..., Run]

FULL = """\
name: full
folder: out/{name}
seed: 3
model: {size: 60M, variant: block_attnres, layers: 3, width: 64, heads: 4, kv_heads: 2, ffn_width: 96, tied: false}
groups: {queries.lr_factor: 2, gates.lr: 2e-2, gates.weight_decay_factor: 0.5}
depth: {zeta: 1e-5, blocks: 4, norm: true, gain: 1.0, kind: '1e-3'}
data: {path: "data: set #1", seq_len: 512, seed: 9, document_mask: true}
training: {tokens_per_parameter: 20.5, batch_tokens: 4096, micro_batch: 2, precision: bf16, compile: true,
  activation_checkpoint: selective, max_grad_norm: 0.5, deterministic: true}
optimizer: {lr: 3e-4, beta1: 0.8, beta2: 0.99, eps: 1e-15, weight_decay: 0,
  schedule: wsd, warmup_steps: 0, decay_fraction: 0.2, min_lr_ratio: 0.1}
parallelism: {replicate: 2, shard: 4, reshard_after_forward: never}
checkpoint: {every: 0, keep_last: 3, milestones: [10, 20]}
heldout: {every: 0, tokens: 1e9}
logging: {every: 1, tensorboard: false}
"""


def test_round_trip_of_every_key(load: Load) -> None:
    run = load(FULL)
    assert run.groups == {"queries.lr_factor": 2, "gates.lr": 0.02, "gates.weight_decay_factor": 0.5}
    assert run.depth == {"zeta": 1e-5, "blocks": 4, "norm": True, "gain": 1.0, "kind": "1e-3"}
    text = dump_run(run)
    assert load(text) == run
    assert dump_run(load(text)) == text
    assert yaml.safe_load(text) == run.model_dump()


def test_round_trip_of_defaults(load: Load, base: str) -> None:
    run = load(base)
    assert load(dump_run(run)) == run
    assert load(dump_run(run), "--seed=1") != run


def test_the_order_of_keys_is_the_schemas(load: Load, base: str) -> None:
    data = yaml.safe_load(dump_run(load("depth:\n  b: 1\n  a: 2\ngroups:\n  b.lr: 1\n  a.lr: 2\n" + base)))
    assert list(data["depth"]) == ["a", "b"]
    assert list(data["groups"]) == ["a.lr", "b.lr"]
    del data["depth"], data["groups"]
    keys: list[str] = []
    for key, value in data.items():
        keys += [f"{key}.{below}" for below in value] if isinstance(value, dict) else [key]
    rows = [row.key for row in describe_schema()]
    assert keys == [key for key in rows if key != "extends" and "<" not in key]


def test_repeated_values_make_no_aliases(load: Load, base: str) -> None:
    run = load(base + "checkpoint:\n  milestones: [7, 7]\n")
    milestones = run.checkpoint.milestones
    shared = run.model_copy(update={"checkpoint": run.checkpoint.model_copy(update={"milestones": milestones})})
    text = dump_run(shared)
    assert "&" not in text
    assert "*" not in text


@pytest.mark.parametrize("seed", range(20))
def test_round_trip_of_awkward_text_and_numbers(load: Load, base: str, seed: int) -> None:
    """Text that YAML 1.1 or 1.2 would read as a number, a switch, a date or syntax stays text."""
    rng = random.Random(seed)
    words = ["on", "No", "y", "null", "~", "010", "0x1f", "1_0", "1e5", "1:30", ".inf", "2024-01-01", "=", "<<", "true"]
    characters = "abc 0123456789.eE+-_:#'\"\\{}[],&*!|>%@`?~=/é😀"
    depth: dict[str, object] = {}
    for index in range(10):
        depth[f"text_{index}"] = "".join(rng.choices(characters, k=rng.randint(1, 120)))
        depth[f"word_{index}"] = rng.choice(words)
        depth[f"number_{index}"] = rng.choice([1, -1]) * rng.random() * 10.0 ** rng.randint(-300, 300)
        depth[f"whole_{index}"] = rng.randint(-(10**6), 10**6)
        depth[f"switch_{index}"] = rng.random() < 0.5
    run = Run.model_validate(load(base).model_dump() | {"depth": depth})
    again = load(dump_run(run))
    assert again == run
    assert {key: type(value) for key, value in again.depth.items()} == {key: type(v) for key, v in depth.items()}
    assert yaml.safe_load(dump_run(run)) == run.model_dump()


def test_options_named_like_yaml_words(load: Load, base: str) -> None:
    run = load(base + "depth:\n  on: 1\n  null: 2\n  n: 3\n")
    assert run.depth == {"on": 1, "null": 2, "n": 3}
    assert load(dump_run(run)) == run


def test_a_run_may_start_from_a_dumped_one(load: Load) -> None:
    Path("first.yaml").write_text(dump_run(load(FULL)))
    run = load("extends: first.yaml\ntraining:\n  steps: 3\n")
    assert (run.name, run.folder, run.training.steps, run.optimizer.lr) == ("x", "runs/x", 3, 3e-4)
