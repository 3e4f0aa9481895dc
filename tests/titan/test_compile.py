"""Compiling has no price in depth: the graphs do not see how many sources, entries or layers there are."""

from collections.abc import Iterator
from functools import cache

import pytest
import torch
from torch._dynamo.utils import counters
from torchtitan.config import ParallelismConfig
from torchtitan.config.configs import CompileConfig
from torchtitan.distributed import ParallelDims

from torchtitan_ext.depth.attention import FusedAttention
from torchtitan_ext.depth.build import decoder_config
from torchtitan_ext.depth.registry import VARIANTS
from torchtitan_ext.sizes import shape_of
from torchtitan_ext.titan.parallelize import checkpoint_and_compile

MORE_THAN_STANDARD = 3


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@cache
def graphs(variant: str, layers: int) -> int:
    """Graphs that two training steps compile. A layer that cannot be one full graph, or meets the compiler's limit of
    recompilations, raises: nothing falls back to eager."""
    torch._dynamo.reset()
    counters.clear()
    shape = shape_of("debug", 64, layers=layers, width=32, heads=2, kv_heads=1, ffn_width=32)
    model = decoder_config(shape, VARIANTS[variant], seq_len=8, inner_attention=FusedAttention.Config()).build()
    model.init_states()
    dims = ParallelDims.from_config(ParallelismConfig(), world_size=1)
    checkpoint_and_compile(model, None, CompileConfig(enable=True, backend="eager"), dims)
    tokens = torch.randint(64, (2, 9), generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        logits = model(tokens[:, :-1])
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    assert not counters["graph_break"]
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("layers", [24, 48])
@pytest.mark.parametrize("variant", VARIANTS)
def test_graphs_do_not_grow_with_depth(variant: str, layers: int) -> None:
    standard = graphs("standard", layers)
    assert standard == 1
    assert graphs(variant, layers) <= standard + MORE_THAN_STANDARD
