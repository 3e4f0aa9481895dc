"""How many graphs a variant compiles: its price in start-up time, and what must not grow with depth."""

from typing import Any

import torch
from torch._dynamo.utils import counters
from torchtitan.config.configs import CompileConfig, ParallelismConfig
from torchtitan.distributed import ParallelDims

from torchtitan_ext.depth.attention import FusedAttention
from torchtitan_ext.depth.build import decoder_config
from torchtitan_ext.depth.decoder import DepthDecoder
from torchtitan_ext.depth.variant import Variant
from torchtitan_ext.sizes import shape_of

from .parallelize import checkpoint_and_compile


def compile_layers(model: DepthDecoder, backend: Any) -> None:
    """Compile ``model`` as training does on one process; ``backend`` is a name or a function, as ``torch.compile``
    takes them."""
    dims = ParallelDims.from_config(ParallelismConfig(), world_size=1)
    checkpoint_and_compile(model, None, CompileConfig(enable=True, backend=backend), dims)


def count_graphs(variant: Variant, layers: int, backend: str = "eager") -> int:
    """Graphs that two training steps of a narrow model with ``layers`` layers compile, in this process on the CPU.

    A region that cannot be one full graph, or that meets the compiler's limit of recompilations, raises: nothing falls
    back to eager. ``backend`` is what a graph is handed to. Forgets what was compiled before, also by others.
    """
    torch._dynamo.reset()
    counters.clear()
    shape = shape_of("debug", 64, layers=layers, width=32, heads=2, kv_heads=1, ffn_width=32)
    model = decoder_config(shape, variant, seq_len=8, inner_attention=FusedAttention.Config()).build()
    model.init_states()
    compile_layers(model, backend)
    tokens = torch.randint(64, (2, 9), generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        logits = model(tokens[:, :-1])
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    graphs = counters["stats"]["unique_graphs"]
    torch._dynamo.reset()
    return graphs
