"""From a resolved run to torchtitan's configuration."""

from functools import partial

import torch
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig
from torchtitan.config.configs import CommConfig, CompileConfig, DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing, FullAC, SelectiveAC
from torchtitan.models.common.attention import FlexAttention
from torchtitan.protocols.model_spec import ModelSpec

from torchtitan_ext.depth.architecture import Architecture
from torchtitan_ext.depth.attention import FusedAttention, document_mask
from torchtitan_ext.depth.build import decoder_config
from torchtitan_ext.resolve import ResolvedRun
from torchtitan_ext.sizes import Shape
from torchtitan_ext.start import start_run

from .checkpoints import Checkpoints
from .loader import NoTokenizer, WindowLoader
from .metrics import RunMetrics
from .parallelize import parallelize
from .trainer import DepthTrainer

NEVER = 2**62
"""An interval in steps that no run reaches."""


def model_spec(
    shape: Shape,
    architecture: Architecture,
    *,
    seq_len: int,
    documents: bool,
    flavor: str = "",
    on_cpu: bool | None = None,
) -> ModelSpec:
    """The model as torchtitan takes it. ``documents``: attention stays within a document. ``on_cpu`` is by default
    whether there is no accelerator."""
    on_cpu = not torch.accelerator.is_available() if on_cpu is None else on_cpu
    flex = documents and not on_cpu
    return ModelSpec(
        name="torchtitan_ext",
        flavor=flavor,
        model=decoder_config(
            shape,
            architecture.variant,
            architecture.attention,
            seq_len=seq_len,
            inner_attention=FlexAttention.Config() if flex else FusedAttention.Config(),
            make_mask=document_mask if documents and on_cpu else None,
        ),
        parallelize_fn=parallelize,
        pipelining_fn=None,
        post_optimizer_build_fn=None,
        state_dict_adapter=None,
    )


def trainer_config(resolved: ResolvedRun, on_cpu: bool | None = None) -> DepthTrainer.Config:
    """The configuration of the trainer for ``resolved``, by default on the accelerator there is or else on the CPU."""
    run = resolved.run
    on_cpu = not torch.accelerator.is_available() if on_cpu is None else on_cpu
    training, seq_len = run.training, run.data.seq_len
    bf16 = training.precision == "bf16" or (training.precision == "auto" and not on_cpu)
    assert training.micro_batch is not None
    return DepthTrainer.Config(
        start=partial(start_run, resolved),
        model_spec=model_spec(
            resolved.shape,
            resolved.architecture,
            seq_len=seq_len,
            documents=run.data.document_mask,
            flavor=f"{run.model.size} {run.model.variant} {run.model.attention}",
            on_cpu=on_cpu,
        ),
        hf_assets_path=str(resolved.dataset.path),
        dump_folder=run.folder,
        tokenizer=NoTokenizer.Config(),
        dataloader=WindowLoader.Config(
            dataset_path=str(resolved.dataset.path),
            seed=run.data.seed,
            global_batch=resolved.batch_tokens // seq_len,
            document_mask=run.data.document_mask,
        ),
        training=TrainingConfig(
            local_batch_size=training.micro_batch,
            global_batch_size=resolved.batch_tokens // seq_len,
            seq_len=seq_len,
            max_norm=training.max_grad_norm,
            steps=resolved.steps,
            disable_cuda_graphs=True,
            mixed_precision_param="bfloat16" if bf16 else "float32",
        ),
        parallelism=ParallelismConfig(
            data_parallel_replicate_degree=run.parallelism.replicate,
            data_parallel_shard_degree=run.parallelism.shard,
            fsdp_reshard_after_forward=run.parallelism.reshard_after_forward,
        ),
        activation_checkpoint=_activation_checkpoint(training.activation_checkpoint),
        compile=CompileConfig(enable=training.compile),
        optimizer=_optimizer(resolved),
        lr_scheduler=_schedule(resolved),
        # The logits of a long window in fp32 are a GPU's largest tensor; a CPU's windows are short.
        loss=CrossEntropyLoss.Config() if on_cpu else ChunkedLossWrapper.Config(),
        checkpoint=Checkpoints.Config(
            enable=True,
            interval=run.checkpoint.every or NEVER,
            initial_load_model_only=False,
            last_save_model_only=False,
            keep_latest_k=0,
            keep_last=run.checkpoint.keep_last,
            milestones=list(run.checkpoint.milestones),
        ),
        metrics=RunMetrics.Config(
            log_freq=run.logging.every,
            enable_tensorboard=run.logging.tensorboard,
            disable_color_printing=True,
            baseline=run.logging.baseline,
            stop_behind=training.stop_behind,
            stop_behind_at=training.stop_behind_at,
        ),
        heldout_every=run.heldout.every,
        heldout_tokens=run.heldout.tokens,
        depth_every=run.logging.depth_every,
        debug=DebugConfig(seed=run.seed, deterministic=training.deterministic, enable_structured_logging=False),
        comm=CommConfig(train_timeout_seconds=600, trace_buf_size=0 if on_cpu else 20_000),
    )


def _activation_checkpoint(mode: str) -> ActivationCheckpointing.Config | None:
    return {"none": None, "selective": SelectiveAC.Config(), "full": FullAC.Config()}[mode]


def _optimizer(resolved: ResolvedRun) -> OptimizersContainer.Config:
    """AdamW with the run's parameter groups."""
    optimizer = resolved.run.optimizer
    shared = {"betas": (optimizer.beta1, optimizer.beta2), "eps": optimizer.eps}
    groups = [
        ParamGroupConfig(
            pattern=group.pattern,
            optimizer_name="AdamW",
            optimizer_kwargs={"lr": group.lr, "weight_decay": group.weight_decay, **shared},
        )
        for group in resolved.parameter_groups()
    ]
    return OptimizersContainer.Config(param_groups=groups)


def _schedule(resolved: ResolvedRun) -> LRSchedulersContainer.Config:
    optimizer = resolved.run.optimizer
    assert optimizer.warmup_steps is not None
    return LRSchedulersContainer.Config(
        warmup_steps=optimizer.warmup_steps,
        decay_ratio=optimizer.decay_fraction,
        decay_type="cosine" if optimizer.schedule == "cosine" else "linear",
        min_lr_factor=optimizer.min_lr_ratio,
    )
