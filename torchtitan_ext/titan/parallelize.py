"""Activation checkpointing, compilation and FSDP2 or HSDP for a depth decoder.

torchtitan's ``parallelize_llama`` in our order and with its own functions, apart from three things: parameters of
modules that torchtitan does not know are declared replicated; some variants' layers are compiled and selectively
checkpointed sublayer by sublayer; and gloo, which has no pre-multiplied sum, reduces by plain sums.
"""

from collections.abc import Callable
from typing import Any

import spmd_types as spmd
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torchtitan.config import TORCH_DTYPE_MAP, CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing, FullAC
from torchtitan.distributed.compile import apply_compile
from torchtitan.distributed.fsdp import apply_fsdp_to_decoder
from torchtitan.distributed.full_dtensor import resolve_fsdp_mesh, validate_config
from torchtitan.models.common.decoder_sharding import dense_param_placement
from torchtitan.protocols.module import Module
from torchtitan.protocols.sharding import ShardingConfig

from torchtitan_ext.depth.decoder import DepthDecoder


def parallelize(
    model: DepthDecoder,
    *,
    parallel_dims: ParallelDims,
    training: TrainingConfig,
    parallelism: ParallelismConfig,
    compile_config: CompileConfig,
    ac_config: ActivationCheckpointing.Config | None,
    dump_folder: str,
) -> DepthDecoder:
    """Prepare ``model`` (on the meta device) for training; the arguments are those of a ``parallelize_fn``."""
    validate_config(parallel_dims, model)
    _declare_replicated(model)
    model.parallelize(parallel_dims)

    policy = ac_config.build(dump_folder=dump_folder) if ac_config is not None else None
    checkpoint_and_compile(model, policy, compile_config, parallel_dims)

    mesh, mesh_dims = resolve_fsdp_mesh(parallel_dims)
    apply_fsdp_to_decoder(
        model,
        mesh,
        param_dtype=TORCH_DTYPE_MAP[training.mixed_precision_param],
        reduce_dtype=TORCH_DTYPE_MAP[training.mixed_precision_reduce],
        pp_enabled=False,
        cpu_offload=training.enable_cpu_offload,
        reshard_after_forward_policy=parallelism.fsdp_reshard_after_forward,
        dp_mesh_dims=mesh_dims,
    )
    if mesh.device_type == "cpu":
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
    return model


def _declare_replicated(model: nn.Module) -> None:
    """Declare the parameters of modules that torchtitan has no sharding for: whole on every tensor-parallel rank."""
    for module in model.modules():
        if isinstance(module, Module) and module._sharding_config is None:
            names = [name for name, _ in module.named_parameters(recurse=False)]
            names += [name for name, _ in module.named_buffers(recurse=False)]
            if names:
                placements = {name: dense_param_placement(tp=spmd.R) for name in names}
                module._sharding_config = ShardingConfig(state_shardings=placements)


def checkpoint_and_compile(
    model: DepthDecoder,
    policy: ActivationCheckpointing | None,
    compile_config: CompileConfig,
    parallel_dims: ParallelDims,
) -> None:
    """Wrap the layers for activation checkpointing and compilation, each region one full graph."""
    compiling = compile_config.enable and "model" in compile_config.components
    if any(layer.link.in_sublayers for layer in model.layers.values()):
        _prepare_sublayers(model, policy, compile_config.backend if compiling else None)
        return
    if policy is not None:
        policy.apply(model)
    if compiling:
        apply_compile(model, compile_config=compile_config, parallel_dims=parallel_dims)


def _prepare_sublayers(model: DepthDecoder, policy: ActivationCheckpointing | None, backend: str | None) -> None:
    """Compile and checkpoint layers sublayer by sublayer.

    Full checkpointing wraps the whole layer, so that reads are recomputed too and each layer keeps its inputs alone.
    Selective checkpointing has to be inside the compiled sublayer, where the compiler applies its policy.
    """
    full = model.stream.recomputed = isinstance(policy, FullAC)
    for layer_id, layer in model.layers.items():
        for region in layer.regions:
            run: Callable[..., Any] = getattr(layer, region)
            if policy is not None and not full:
                wrapper = policy._wrap_block(layer, base_fqn=f"layers.{layer_id}")
                run = _checkpointed(wrapper.checkpoint_fn, run)
            if backend is not None:
                run = torch.compile(run, backend=backend, fullgraph=True)
            if run is not getattr(layer, region):
                setattr(layer, region, run)
        if backend is not None:
            for kernel in layer.kernels:
                setattr(layer, kernel, torch.compile(getattr(layer, kernel), backend=backend, fullgraph=True))
    if policy is not None and full:
        policy.apply(model)


def _checkpointed(checkpoint_fn: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        return checkpoint_fn(function, *args)

    return run
