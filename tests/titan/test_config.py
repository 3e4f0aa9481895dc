"""From a run to torchtitan's configuration: which parameters are decayed, and the schedule."""

import re
from pathlib import Path

import pytest
import yaml
from torch import nn

from torchtitan_ext.depth.architecture import Architecture
from torchtitan_ext.depth.attention import FusedAttention
from torchtitan_ext.depth.attentions import ATTENTIONS, Attention
from torchtitan_ext.depth.build import decoder_config
from torchtitan_ext.depth.registry import VARIANTS
from torchtitan_ext.depth.variant import Variant
from torchtitan_ext.errors import UserError
from torchtitan_ext.parameter_groups import group_of
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
    found = {}
    for name, _ in model_of(run, run.architecture).named_parameters():
        group = next(group for group in groups if re.search(group.pattern, name))
        found[name] = group.optimizer_kwargs["weight_decay"] > 0
    return found


def test_norms_and_embeddings_are_not_decayed(dataset: Path, tmp_path: Path) -> None:
    for name, is_decayed in decayed(resolved(dataset, tmp_path)).items():
        assert is_decayed == name.endswith(("wqkv.weight", "wo.weight", "w1.weight", "w2.weight", "w3.weight")), name


@pytest.mark.parametrize(
    ("variant", "attention"),
    [
        *((variant, "standard") for variant in VARIANTS),
        *(("m_gate_kv", attention) for attention in ATTENTIONS if attention != "standard"),
    ],
)
def test_the_groups_of_an_architecture_are_its_parameters_and_no_others(
    variant: str, attention: str, dataset: Path, tmp_path: Path
) -> None:
    run = resolved(dataset, tmp_path, "--model.variant", variant, "--model.attention", attention)
    standard = {name for name, _ in model_of(run, STANDARD).named_parameters()}
    found: dict[str, int] = {}
    for name, parameter in model_of(run, run.architecture).named_parameters():
        group = group_of(name, run.parameter_groups())
        assert (group.name in ("matrices", "norms and embeddings")) == (name in standard), name
        found[group.name] = found.get(group.name, 0) + parameter.numel()
    assert found == {group.name: group.parameters for group in run.parameter_groups()}


STANDARD = Architecture(Variant(), Attention())


def model_of(run: ResolvedRun, built_of: Architecture) -> nn.Module:
    parts = (built_of.variant, built_of.attention)
    return decoder_config(run.shape, *parts, seq_len=64, inner_attention=FusedAttention.Config()).build()


def test_groups_take_absolute_values_and_factors(dataset: Path, tmp_path: Path) -> None:
    gate = ["--model.variant", "m_gate_kv", "--depth.gate_bias", "true", "--optimizer.lr", "0.01"]
    asked = ["--groups.gates.lr", "0.02", "--groups.gates.weight_decay_factor", "0.5"]
    run = resolved(dataset, tmp_path, *gate, *asked, "--groups.gate_biases.lr_factor", "3")
    rates = {group.name: (group.lr, group.weight_decay) for group in run.parameter_groups()}
    assert rates == {
        "gate_biases": (0.03, 0.0),
        "gates": (0.02, 0.05),
        "norms and embeddings": (0.01, 0.0),
        "matrices": (0.01, 0.1),
    }
    usual = resolved(dataset, tmp_path, *gate).parameter_groups()
    assert [(group.lr, group.weight_decay) for group in usual] == [(0.01, 0.0), (0.01, 0.1), (0.01, 0.0), (0.01, 0.1)]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--groups.gate.lr", "1"], "is not for a parameter group of the variant; did you mean 'gates'?"),
        (["--groups.gates.rate", "1"], "--groups.gates.rate is not a key; write the name of a parameter group and"),
        (["--groups.gates.lr", "-1"], "--groups.gates.lr is -1; must be at least 0"),
        (
            ["--groups.gates.lr", "1", "--groups.gates.lr_factor", "1"],
            "groups.gates.lr and groups.gates.lr_factor both set one value; keep one",
        ),
    ],
)  # fmt: skip
def test_a_mistake_in_a_group_is_one_line(overrides: list[str], message: str, dataset: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=re.escape(message)) as error:
        resolved(dataset, tmp_path, "--model.variant", "m_gate_kv", *overrides)
    assert "\n" not in str(error.value)


def test_the_schedule_follows_the_run(dataset: Path, tmp_path: Path) -> None:
    run = resolved(dataset, tmp_path, "--optimizer.lr", "0.5", "--optimizer.warmup_steps", "7")
    config = trainer_config(run)
    assert config.lr_scheduler.warmup_steps == 7
    assert config.lr_scheduler.decay_ratio == pytest.approx(0.1)
    assert {group.optimizer_kwargs["lr"] for group in config.optimizer.param_groups} == {0.5}
    assert config.training.global_batch_size * 64 == run.batch_tokens
    cosine = trainer_config(resolved(dataset, tmp_path, "--optimizer.schedule", "cosine"))
    assert (cosine.lr_scheduler.decay_type, cosine.lr_scheduler.decay_ratio) == ("cosine", None)
