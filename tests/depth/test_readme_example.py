"""The variant that the README shows is built and trained from the README's own text."""

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from torchtitan_ext.depth.attention import FusedAttention
from torchtitan_ext.depth.build import decoder_config
from torchtitan_ext.depth.variant import Variant
from torchtitan_ext.sizes import shape_of

README = Path(__file__).resolve().parent.parent.parent / "README.md"


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Any:
    (source,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(source.splitlines()) < 40
    path = tmp_path_factory.mktemp("example") / "scaled_residual.py"
    path.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("scaled_residual", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build(variant: Variant) -> Any:
    model = decoder_config(shape_of("debug", 128), variant, seq_len=16, inner_attention=FusedAttention.Config()).build()
    model.init_states()
    return model


def test_it_starts_as_the_standard_model(example: Any) -> None:
    tokens = torch.randint(128, (2, 16), generator=torch.Generator().manual_seed(0))
    assert torch.equal(build(example.ScaledResidual())(tokens), build(Variant())(tokens))
    half = example.ScaledResidual().with_options({"start": 0.5}, lambda key: "test")
    assert not torch.equal(build(half)(tokens), build(Variant())(tokens))


def test_its_parameters_are_counted(example: Any) -> None:
    shape, variant = shape_of("debug", 128), example.ScaledResidual()
    counted = shape.parameters() + variant.parameters(shape)
    assert sum(parameter.numel() for parameter in build(variant).parameters()) == counted


def test_it_trains(example: Any) -> None:
    model = build(example.ScaledResidual())
    tokens = torch.randint(128, (4, 17), generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(10):
        loss = torch.nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5
    assert all(part.scale.item() != 1.0 for layer in model.layers.values() for part in layer.connections)
