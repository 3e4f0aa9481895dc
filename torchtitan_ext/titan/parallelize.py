"""Activation checkpointing, compilation and FSDP2 or HSDP for a depth decoder.

torchtitan's ``parallelize_llama`` in our order and with its own functions, apart from five things:

- Parameters of modules that torchtitan does not know are declared replicated.
- A tied embedding is tied again before FSDP sees it (``_tie``).
- What variants learn about depth is one FSDP unit in fp32 (``_shard_depth_parameters``).
- Where layers are of too many kinds to be one graph each, they are compiled and selectively checkpointed sublayer by
  sublayer.
- gloo, which has no pre-multiplied sum, reduces by plain sums.
"""

from collections.abc import Callable
from typing import Any

import spmd_types as spmd
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
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
from torchtitan_ext.depth.kinds import has_few_kinds

MOST_KINDS = 4
"""Kinds of layers up to which each is compiled as a whole: every graph more is time before the first step."""


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
    if model.enable_weight_tying:
        _tie(model)

    policy = ac_config.build(dump_folder=dump_folder) if ac_config is not None else None
    checkpoint_and_compile(model, policy, compile_config, parallel_dims)

    mesh, mesh_dims = resolve_fsdp_mesh(parallel_dims)
    reduce_dtype = TORCH_DTYPE_MAP[training.mixed_precision_reduce]
    unit = _shard_depth_parameters(model, mesh=mesh, dp_mesh_dims=mesh_dims, reduce_dtype=reduce_dtype)
    apply_fsdp_to_decoder(
        model,
        mesh,
        param_dtype=TORCH_DTYPE_MAP[training.mixed_precision_param],
        reduce_dtype=reduce_dtype,
        pp_enabled=False,
        cpu_offload=training.enable_cpu_offload,
        reshard_after_forward_policy=parallelism.fsdp_reshard_after_forward,
        dp_mesh_dims=mesh_dims,
    )
    if unit is not None:
        # Nothing calls these modules as modules, so FSDP's own hooks on them never run. After the backward pass FSDP
        # reduces and shards whatever is still whole, this unit included.
        model.register_forward_pre_hook(lambda _model, _inputs: unit.unshard())
    if mesh.device_type == "cpu":
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
    return model


def _tie(model: DepthDecoder) -> None:
    """Make the embedding and the output head one parameter again.

    torchtitan 0.3.0's ``Module.parallelize`` gives every module a parameter of its own under its default backend
    ``spmd_types``, its own tied models included (``models/llama3``, ``models/qwen3``). FSDP then keeps two shards of
    the one matrix. Where the ranks do not divide its rows, each is padded into memory of its own, and the optimizer
    updates one of them: the other trains on with the initial values (pytorch issue 176076, torchtitan issue 2495).
    """
    model.tok_embeddings.weight = model.lm_head.weight


def _shard_depth_parameters(model: DepthDecoder, *, reduce_dtype: torch.dtype, **mesh: Any) -> FSDPModule | None:
    """Make the parameters of the stream and of all connections that want full precision one FSDP unit in fp32.

    A scalar of 1.003 is 1.0 in bf16, so these parameters stay as they are under mixed precision. One unit needs one
    gather in a forward pass for all layers. Returns a module of the unit; None where a variant has no such parameters.
    """
    learned = [
        module for module in model.ends().values() if module.full_precision and any(True for _ in module.parameters())
    ]
    if not learned:
        return None
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    fully_shard(learned, mp_policy=policy, reshard_after_forward=False, **mesh)
    unit = learned[0]
    assert isinstance(unit, FSDPModule)
    return unit


def check_storages(model: nn.Module) -> None:
    """Check that FSDP trains every parameter, and has one copy of it: to be called after ``init_states``.

    Raises ``RuntimeError`` naming the parameter. It can come from two modules that share a parameter FSDP does not
    know to be shared: the optimizer then updates one copy, and the forward pass uses the other.
    """
    _fsdp_state(model)._lazy_init()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    owners: dict[int, Any] = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in _fsdp_state(module)._fsdp_param_groups:
                for sharded in group.fsdp_params:
                    kept = sharded._sharded_param_data.untyped_storage()
                    trained = sharded.sharded_param.to_local().untyped_storage()
                    first = owners.setdefault(id(sharded.sharded_param), sharded)
                    if first is not sharded or kept.data_ptr() != trained.data_ptr():
                        raise RuntimeError(
                            f"FSDP has two copies of {names.get(id(sharded.sharded_param))}, and the optimizer would "
                            "update one of them; modules that share a parameter must share it before they are sharded, "
                            "and be sharded together"
                        )
    for parameter, name in names.items():
        if parameter not in owners:
            raise RuntimeError(f"FSDP does not shard {name}: its gradients would not be averaged over ranks")


def _fsdp_state(module: nn.Module) -> Any:
    assert isinstance(module, FSDPModule)
    return module._get_fsdp_state()


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
    """Wrap the layers for activation checkpointing and compilation: whole ones, if few graphs serve all of them. Where
    the state grows from layer to layer no graph may depend on how much of it there is."""
    compiling = compile_config.enable and "model" in compile_config.components
    if not has_few_kinds(model, MOST_KINDS):
        _prepare_sublayers(model, policy, compile_config.backend if compiling else None)
        return
    if policy is not None:
        policy.apply(model)
    if compiling:
        apply_compile(model, compile_config=compile_config, parallel_dims=parallel_dims)


def _prepare_sublayers(model: DepthDecoder, policy: ActivationCheckpointing | None, backend: str | None) -> None:
    """Compile and checkpoint layers sublayer by sublayer, and leave their connections to the depth state outside.

    Full checkpointing wraps the whole layer, so that reads are recomputed too and each layer keeps its inputs alone.
    Selective checkpointing has to be inside the compiled sublayer, where the compiler applies its policy.
    """
    full = model.stream.recomputed = isinstance(policy, FullAC)
    for layer_id, layer in model.layers.items():
        for sublayer in layer.sublayers:
            run: Callable[..., Any] = getattr(layer, sublayer)
            if policy is not None and not full:
                wrapper = policy._wrap_block(layer, base_fqn=f"layers.{layer_id}")
                run = _checkpointed(wrapper.checkpoint_fn, run)
            if backend is not None:
                run = torch.compile(run, backend=backend, fullgraph=True)
            if run is not getattr(layer, sublayer):
                setattr(layer, sublayer, run)
        if backend is not None:
            for kernel in layer.attention.kernels:
                compiled = torch.compile(getattr(layer.attention, kernel), backend=backend, fullgraph=True)
                setattr(layer.attention, kernel, compiled)
    if policy is not None and full:
        policy.apply(model)


def _checkpointed(checkpoint_fn: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        return checkpoint_fn(function, *args)

    return run
