"""The variants that tests go through: names that stand for another name's declaration are left out."""

from torchtitan_ext.depth.registry import VARIANTS

ALIASES = ("deep_baseline", "deep_control_block", "deep_hybrid_memory")
DISTINCT = [name for name in VARIANTS if name not in ALIASES]
