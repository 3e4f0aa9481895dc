"""Compiling has no price in depth: the graphs do not see how many sources, entries or layers there are."""

from functools import cache

import pytest

from torchtitan_ext.depth.registry import VARIANTS
from torchtitan_ext.titan.graphs import count_graphs

MORE_THAN_STANDARD = 3


@cache
def graphs(variant: str, layers: int) -> int:
    return count_graphs(VARIANTS[variant], layers)


@pytest.mark.parametrize("layers", [24, 48])
@pytest.mark.parametrize("variant", [name for name in VARIANTS if not name.startswith("deep_")])
def test_graphs_do_not_grow_with_depth(variant: str, layers: int) -> None:
    standard = graphs("standard", layers)
    assert standard == 1
    assert graphs(variant, layers) <= standard + MORE_THAN_STANDARD
