"""From a run to torchtitan's configuration: which parameters are decayed, and the schedule."""

import re
from pathlib import Path

import pytest
import yaml

from torchtitan_ext.depth.attention import FusedAttention
from torchtitan_ext.depth.build import decoder_config
from torchtitan_ext.resolve import ResolvedRun, resolve
from torchtitan_ext.run_file import load_run
from torchtitan_ext.titan.config import trainer_config


def resolved(dataset: Path, tmp_path: Path, *overrides: str) -> ResolvedRun:
    run = {"model": {"size": "debug"}, "data": {"path": str(dataset), "seq_len": 64}, "training": {"steps": 100}}
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(run))
    return resolve(load_run(path, list(overrides)), ranks=1)


def decayed(run: ResolvedRun) -> dict[str, bool]:
    """Whether each parameter of the built model is decayed: the first group whose pattern matches takes it."""
    groups = trainer_config(run).optimizer.param_groups
    model = decoder_config(run.shape, run.variant, seq_len=64, inner_attention=FusedAttention.Config()).build()
    found = {}
    for name, _ in model.named_parameters():
        group = next(group for group in groups if re.search(group.pattern, name))
        found[name] = group.optimizer_kwargs["weight_decay"] > 0
    return found


def test_norms_and_embeddings_are_not_decayed(dataset: Path, tmp_path: Path) -> None:
    for name, is_decayed in decayed(resolved(dataset, tmp_path)).items():
        assert is_decayed == name.endswith(("wqkv.weight", "wo.weight", "w1.weight", "w2.weight", "w3.weight")), name


@pytest.mark.parametrize("variant", ["control_block", "m_gate_kv", "moda", "residual_scalars"])
def test_what_a_variant_learns_about_depth_is_decayed_on_request_alone(
    variant: str, dataset: Path, tmp_path: Path
) -> None:
    standard = decayed(resolved(dataset, tmp_path))
    usual = decayed(resolved(dataset, tmp_path, "--model.variant", variant))
    asked = decayed(resolved(dataset, tmp_path, "--model.variant", variant, "--optimizer.decay_depth_parameters"))
    added = set(usual) - set(standard)
    assert added
    assert not any(usual[name] for name in added)
    # A gate's bias stays undecayed, as every bias does.
    assert all(asked[name] for name in added if not name.endswith(".bias"))
    assert all(usual[name] == asked[name] == standard[name] for name in standard)


def test_the_schedule_follows_the_run(dataset: Path, tmp_path: Path) -> None:
    run = resolved(dataset, tmp_path, "--optimizer.lr", "0.5", "--optimizer.warmup_steps", "7")
    config = trainer_config(run)
    assert config.lr_scheduler.warmup_steps == 7
    assert config.lr_scheduler.decay_ratio == pytest.approx(0.1)
    assert {group.optimizer_kwargs["lr"] for group in config.optimizer.param_groups} == {0.5}
    assert config.training.global_batch_size * 64 == run.batch_tokens
    cosine = trainer_config(resolved(dataset, tmp_path, "--optimizer.schedule", "cosine"))
    assert (cosine.lr_scheduler.decay_type, cosine.lr_scheduler.decay_ratio) == ("cosine", None)
