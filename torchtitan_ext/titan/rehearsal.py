"""One training step without memory: the real model, parallelisation and loss on fake tensors and fake ranks.

What the step would allocate is logged storage by storage. Everything runs as it would in training apart from the
arithmetic: FSDP gathers and frees weights, checkpointing recomputes, the loss works through its chunks.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.config import CompileConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.distributed.spmd_types import set_spmd_meshes

from torchtitan_ext.depth.attention import FusedAttention
from torchtitan_ext.depth.decoder import DepthDecoder
from torchtitan_ext.ops import depth_read
from torchtitan_ext.plan.storages import Parts, StorageLog
from torchtitan_ext.resolve import ResolvedRun

from .config import trainer_config
from .parallelize import parallelize

WEIGHTS, GRADIENTS, OPTIMIZER = "weights", "gradients", "optimizer"
GATHERED, REDUCED = "gathered weights", "reduced gradients"
ACTIVATIONS, DEPTH_STATE, LOGITS, BACKWARD = "activations", "depth state", "logits", "backward pass"

PARTS = {
    WEIGHTS: "this GPU's share of the parameters in fp32, and buffers",
    GRADIENTS: "this GPU's share of the gradients in fp32",
    OPTIMIZER: "AdamW's two moments of that share in fp32",
    GATHERED: "FSDP: whole weights of the root group and of the layers in use",
    REDUCED: "FSDP: whole gradients of the layers that are being reduced",
    DEPTH_STATE: "what layers hand along: the residual stream, or a variant's sources",
    ACTIVATIONS: "what else the forward pass keeps for the backward pass",
    LOGITS: "logits and their gradients",
    BACKWARD: "recomputed activations and gradients on their way",
}
"""The parts of a GPU's memory, in the order in which they are shown, with what they are."""

FIXED = (WEIGHTS, GRADIENTS, OPTIMIZER, GATHERED, REDUCED)
"""The parts that do not grow with the micro-batch."""

_SCOPES = {"FSDP::post_backward": REDUCED, "FSDP::": GATHERED}
_CLAIMS = {"FSDP::post_backward_reduce": REDUCED}


@contextmanager
def rehearsing(resolved: ResolvedRun, *, on_cpu: bool = False) -> Iterator["Rehearsal"]:
    """A rehearsal of ``resolved`` on rank 0 of ranks that do not exist: GPUs, or with ``on_cpu`` CPU processes."""
    if dist.is_initialized():
        raise RuntimeError("a plan makes a process group of its own, and this process has one already")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=resolved.ranks)
    threads, chunk = torch.autograd.is_multithreading_enabled(), depth_read._CPU_CHUNK_ELEMENTS
    if not on_cpu:
        # CPUs work through a depth read in pieces that fit their cache, which would take long to rehearse.
        depth_read._CPU_CHUNK_ELEMENTS = depth_read._DEVICE_CHUNK_ELEMENTS
    torch.autograd.set_multithreading_enabled(False)
    try:
        yield Rehearsal(resolved, on_cpu=on_cpu)
    finally:
        torch.autograd.set_multithreading_enabled(threads)
        depth_read._CPU_CHUNK_ELEMENTS = chunk
        set_spmd_meshes(dense_mesh=None, sparse_mesh=None)
        dist.destroy_process_group()
        # It holds this rehearsal's mesh, which the next one's equals but is not.
        _clear_sharding_prop_cache()


class Rehearsal:
    """A run's model and loss, to be stepped through at any micro-batch. ``rehearsing`` makes one."""

    def __init__(self, resolved: ResolvedRun, *, on_cpu: bool) -> None:
        self.resolved, self.on_cpu = resolved, on_cpu
        config = trainer_config(resolved, on_cpu=on_cpu)
        config.compile = CompileConfig(enable=False)  # graphs cannot be run on fake tensors
        assert config.model_spec is not None
        dist_utils.set_spmd_backend(config.parallelism.spmd_backend)
        dims = ParallelDims.from_config(config.parallelism, resolved.ranks)
        self.context = dist_utils.get_spmd_context(parallel_dims=dims)
        model_config = config.model_spec.model
        if not on_cpu:
            # FlexAttention keeps what fused attention keeps, but cannot be run on fake tensors.
            for layer in model_config.layers:
                layer.attention.inner_attention = FusedAttention.Config()
        model_config.update_from_config(config=config)
        with torch.device("meta"):
            model = model_config.build()
        parallelize(
            model,
            parallel_dims=dims,
            training=config.training,
            parallelism=config.parallelism,
            compile_config=config.compile,
            ac_config=config.activation_checkpoint,
            dump_folder="",
        )
        self.loss = config.loss.build(compile_config=config.compile)
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        with self.fake:
            self.model: DepthDecoder = model.to_empty(device="cpu")
            if model.changing_schedule is not None:
                model.changing_schedule.use_longest()
        if resolved.shape.tied:
            # Moving took them apart; in training ``init_states`` joins them again.
            model.tok_embeddings.weight = model.lm_head.weight
        if not on_cpu:
            _fuse_norms(model)
        self.moments = sum(2 * _local_bytes(p) for p in model.parameters() if p.requires_grad)
        if isinstance(self.loss, ChunkedLossWrapper):
            self.loss.set_lm_head(model.lm_head)
            model._skip_lm_head = True

    def train(self, micro_batch: int) -> Parts:
        """Bytes by part at the peak of any training step but the first, with ``micro_batch`` sequences a pass."""
        share = self.resolved.batch_tokens // self.resolved.run.data.seq_len // self.resolved.ranks
        self.model.train()
        with self._logging(micro_batch) as (log, inputs, extras, labels), self.context():
            self._set_gradients(log, there=share > micro_batch)  # those of the passes before
            with log.during(ACTIVATIONS):
                prediction = self.model(inputs, **extras)
                loss, _ = self.loss(prediction, labels, torch.tensor(1), **extras)
                del prediction
            with log.during(BACKWARD):
                loss.backward()
            log.assign([p.grad for p in self.model.parameters()], GRADIENTS)
        return self._in_order(log.peak())

    def evaluate(self, micro_batch: int) -> Parts:
        """Bytes by part at the peak of measuring the held-out loss, between two training steps."""
        self.model.eval()
        skipped, self.model._skip_lm_head = self.model._skip_lm_head, False
        with self._logging(micro_batch) as (log, inputs, extras, labels), self.context(), torch.no_grad():
            self._set_gradients(log, there=True)
            with log.during(ACTIVATIONS):
                logits = self.model(inputs, **extras)
                F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="none").double().sum()
                del logits
        self.model._skip_lm_head = skipped
        return self._in_order(log.peak())

    @contextmanager
    def _logging(self, micro_batch: int) -> Iterator[tuple[StorageLog, torch.Tensor, dict[str, Any], torch.Tensor]]:
        """Log one pass over ``micro_batch`` sequences: yields the log, inputs, further arguments and labels."""
        run = self.resolved.run
        tokens, vocabulary = micro_batch * run.data.seq_len, self.resolved.shape.vocab_size
        chunk = tokens // self.loss.num_chunks if isinstance(self.loss, ChunkedLossWrapper) else tokens

        def logits_or(part: str, tensor: torch.Tensor) -> str:
            rows, rest = divmod(tensor.numel(), vocabulary)
            return LOGITS if rows in (tokens, chunk) and not rest and tensor.shape[-1] == vocabulary else part

        log = StorageLog(logits_or, scopes=_SCOPES, claims=_CLAIMS)
        hooks = [
            layer.register_forward_hook(
                lambda _layer, inputs, output: log.assign((inputs[0], output), DEPTH_STATE, of=ACTIVATIONS)
            )
            for layer in self.model.layers.values()
        ]
        with self.fake, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # training will say it again
            log.assign([*self.model.parameters(), *self.model.buffers()], WEIGHTS)
            inputs = torch.zeros(micro_batch, run.data.seq_len, dtype=torch.int64)
            extras = {"positions": torch.zeros_like(inputs)} if run.data.document_mask else {}
            labels = torch.zeros_like(inputs)
            log.assign((inputs, extras, labels), ACTIVATIONS)
            with log:
                yield log, inputs, extras, labels
            for module in self.model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
        for hook in hooks:
            hook.remove()

    def _set_gradients(self, log: StorageLog, there: bool) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter) if there and parameter.requires_grad else None
        log.assign([p.grad for p in self.model.parameters()], GRADIENTS)

    def _in_order(self, parts: Parts) -> Parts:
        return {part: parts.get(part, self.moments if part == OPTIMIZER else 0) for part in PARTS}


def _local_bytes(parameter: torch.Tensor) -> int:
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return local.numel() * local.element_size()


class _FusedNorm(torch.autograd.Function):
    """The RMS norm of GPUs, which keeps its input and one number a token; on CPUs it is made of several operations."""

    @staticmethod
    def forward(ctx: Any, x_BTD: torch.Tensor, weight_D: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x_BTD, weight_D, torch.empty_like(x_BTD[..., 0], dtype=torch.float32))
        return torch.empty_like(x_BTD)

    @staticmethod
    def backward(ctx: Any, grad_BTD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        _, weight_D, _ = ctx.saved_tensors
        return torch.empty_like(grad_BTD), torch.empty_like(weight_D)


def _fuse_norms(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.RMSNorm):
            module.forward = partial(lambda norm, x_BTD: _FusedNorm.apply(x_BTD, norm.weight), module)
