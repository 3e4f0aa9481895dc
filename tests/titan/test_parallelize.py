"""How a model is sharded: one copy of every parameter, and what variants learn about depth in fp32, in one unit."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode, _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchtitan.config import CompileConfig
from torchtitan.config.configs import ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.distributed.spmd_types import set_spmd_meshes
from torchtitan.models.llama3.parallelize import parallelize_llama
from torchtitan.models.llama3.sharding import set_llama3_sharding_config

from torchtitan_ext.depth.attention import FusedAttention
from torchtitan_ext.depth.build import decoder_config
from torchtitan_ext.depth.decoder import DepthDecoder
from torchtitan_ext.depth.registry import variant_of
from torchtitan_ext.sizes import shape_of
from torchtitan_ext.titan.parallelize import check_storages, parallelize

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # console.py says why

VOCABULARY = 64


@pytest.fixture(autouse=True)
def group(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone; or, with the mark ``fake``, one of two that sends nothing."""
    if request.node.get_closest_marker("fake") is None:
        dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    else:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    dist_utils.set_spmd_backend("spmd_types")
    yield
    set_spmd_meshes(dense_mesh=None, sparse_mesh=None)
    dist.destroy_process_group()
    _clear_sharding_prop_cache()  # it holds this group's mesh, which equals the next one's but is another object


def sharded(
    variant: str, prepare: Callable[..., Any] = parallelize, precision: str = "bfloat16"
) -> tuple[DepthDecoder, ParallelDims]:
    shape = shape_of("debug", VOCABULARY, layers=4, width=32, heads=2, kv_heads=1, ffn_width=32)
    config = decoder_config(shape, variant_of(variant), seq_len=8, inner_attention=FusedAttention.Config())
    for layer in config.layers:
        layer.attention.rope.max_seq_len = 8
    parallelism = ParallelismConfig()
    dims = ParallelDims.from_config(parallelism, dist.get_world_size())
    set_llama3_sharding_config(config, enable_sp=False)
    with torch.device("meta"):
        model = config.build()
    training = TrainingConfig(mixed_precision_param=precision, disable_cuda_graphs=True)
    compiling = CompileConfig(enable=False)
    prepare(
        model,
        parallel_dims=dims,
        training=training,
        parallelism=parallelism,
        compile_config=compiling,
        ac_config=None,
        dump_folder="",
    )
    model.to_empty(device="cpu")
    model.init_states()
    return model, dims


def step(model: DepthDecoder, dims: ParallelDims) -> CommDebugMode:
    """One forward and one backward pass, with the communication that they took."""
    tokens = torch.randint(VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(0))
    counts = CommDebugMode()
    with counts, dist_utils.get_spmd_context(parallel_dims=dims)():
        logits = model(tokens[:, :-1])
        torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten()).backward()
    return counts


def gathers(counts: CommDebugMode) -> int:
    return sum(number for kind, number in counts.get_comm_counts().items() if "gather" in str(kind))


@pytest.mark.parametrize(
    "variant", ["residual_scalars", "mid_skip", "mid_context", "attnres_block", "block_value_proj"]
)
def test_what_a_variant_learns_about_depth_is_fp32_in_the_forward_pass(variant: str) -> None:
    model, dims = sharded(variant)
    seen: dict[str, torch.dtype] = {}

    def look(*_: object) -> None:
        for name, parameter in model.named_parameters():
            if name.startswith("stream.") or "_connection." in name:
                seen[name] = parameter.dtype
        seen["matrix"] = model.lm_head.weight.dtype

    model.lm_head.register_forward_pre_hook(look)
    step(model, dims)
    assert seen.pop("matrix") == torch.bfloat16
    assert seen
    assert set(seen.values()) == {torch.float32}, seen
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.dtype == torch.float32


def test_matrices_of_a_gate_are_in_the_precision_of_the_run() -> None:
    model, dims = sharded("m_gate_kv")
    seen: set[torch.dtype] = set()
    gate = model.layers["1"].feed_forward_connection.gate
    gate.register_forward_pre_hook(lambda *_: seen.add(gate.weight.dtype))
    step(model, dims)
    assert seen == {torch.bfloat16}


def test_a_scalar_keeps_digits_that_bf16_does_not_have() -> None:
    """μ x_0 alone, 1.003 or 1 times: in bf16 both would be 1."""
    starts: list[float] = []
    for scale in (1.003, 1.0):
        model, dims = sharded("residual_scalars")
        connection = model.layers["0"].attention_connection
        with torch.no_grad():
            connection.residual_scale.to_local().fill_(0.0)
            connection.embedding_scale.to_local().fill_(scale)
        entered: list[torch.Tensor] = []
        model.layers["0"].attention_norm.register_forward_pre_hook(lambda _m, inputs, e=entered: e.append(inputs[0]))
        step(model, dims)
        starts.append(entered[0].double().norm().item())
    assert starts[0] / starts[1] == pytest.approx(1.003, abs=1e-3)


@pytest.mark.fake
@pytest.mark.parametrize(
    ("variant", "more"),
    [("standard", 0), ("m_gate_kv", 0), ("residual_scalars", 1), ("attnres_block", 1), ("mid_skip", 1)],
)
def test_what_a_variant_learns_about_depth_costs_one_gather(variant: str, more: int) -> None:
    """Without it: four layers in the forward pass and in the backward pass, and once the embedding with the head."""
    assert gathers(step(*sharded(variant))) == 4 + 4 + 1 + more


def test_a_parameter_with_two_copies_is_found() -> None:
    """torchtitan 0.3.0's own parallelisation takes a tied embedding and its head apart."""
    check_storages(sharded("standard")[0])
    with pytest.raises(RuntimeError, match=r"two copies of (lm_head|tok_embeddings)\.weight"):
        check_storages(sharded("standard", parallelize_llama)[0])
