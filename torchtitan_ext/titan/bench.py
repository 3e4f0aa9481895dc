"""torchtitan's trainer, built as for a run, with its steps timed and its memory counted instead of logged and saved.

``depth bench`` (``torchtitan_ext/bench``) starts one for each model, in processes of their own.
"""

import gc
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.config.configs import CommConfig
from torchtitan.trainer import Trainer

from torchtitan_ext.resolve import ResolvedRun

from .bench_meters import HeldBytes, Stopwatch, peak_bytes, present_bytes, reset_peak, storage_bytes
from .config import NEVER, trainer_config

PARTS = ("data", "forward", "loss", "backward", "optimizer")
"""The parts of a step, in order. ``loss`` has the output head in it where a run computes both in chunks (on GPUs), and
is forward and backward there. ``optimizer`` is gradient clipping, AdamW and the schedule."""


@dataclass(frozen=True)
class Setup:
    """What one model is and needs, found before it takes turns with others.

    Attributes:
        device: name of the device.
        peak_flops: FLOP/s of one device that MFU is taken against; on a CPU measured on a matrix product.
        parameters, flops_per_token: of the built model, by torchtitan's count; training FLOPs.
        tokens_per_step: over all ranks.
        compile_seconds: by how much the first step took longer than a later one; None without compilation.
        graphs: compiled graphs; None without compilation.
        saved_bytes: what one rank holds for the backward pass as it begins, weights and gradients excluded.
        peak_bytes: the most that one rank has during a step, weights, gradients and optimizer states included.
    """

    device: str
    peak_flops: float
    parameters: int
    flops_per_token: int
    tokens_per_step: int
    compile_seconds: float | None
    graphs: int | None
    saved_bytes: int
    peak_bytes: int


class BenchTrainer(Trainer):
    """A trainer that keeps no run folder. Every rank calls its methods, in the same order.

    ``folder`` is for what torchtitan may want to write.
    """

    loss_fn: Any

    def __init__(self, resolved: ResolvedRun, folder: str) -> None:
        self.bytes_before = present_bytes()
        self.watch: Stopwatch | None = None
        self.held: HeldBytes | None = None
        config = trainer_config(resolved)
        config.dump_folder = folder
        config.checkpoint = CheckpointManager.Config(enable=False, initial_load_model_only=False)
        config.metrics = MetricsProcessor.Config(log_freq=NEVER, disable_color_printing=True)
        config.comm = CommConfig(train_timeout_seconds=600, trace_buf_size=0)
        super().__init__(config)
        self.run_loss, self.loss_fn = self.loss_fn, self._loss
        self.batches = self.batch_generator(self.dataloader)
        self.step = 1  # torchtitan logs the first step whatever the interval

    def set_up(self) -> Setup:
        """Train the first steps, compiling what is compiled, and take stock."""
        first, *later = (sum(self.train(1).values()) for _ in range(3))
        compiling = self.config.compile.enable
        graphs = counters["stats"]["unique_graphs"]
        seq_len = self.config.training.seq_len
        parameters, flops = self.model_config.get_nparams_and_flops(self.model_parts[0], seq_len)
        return Setup(
            device=self.metrics_processor.device_memory_monitor.device_name,
            peak_flops=self.metrics_processor.gpu_peak_flops,
            parameters=parameters,
            flops_per_token=flops,
            tokens_per_step=self.config.training.global_batch_size * seq_len,
            compile_seconds=first - min(later) if compiling else None,
            graphs=graphs if compiling else None,
            saved_bytes=self.saved_bytes(),
            peak_bytes=self.peak_bytes(),
        )

    def train(self, steps: int) -> dict[str, float]:
        """Train ``steps`` steps. Returns the seconds of each of ``PARTS``, summed over the steps.

        Raises ``FloatingPointError`` when the loss has become infinite or NaN, for which kernels may be faster.
        """
        gc.collect()  # torchtitan has switched the automatic collection off
        dist.barrier()
        self.watch = Stopwatch()
        for _ in range(steps):
            self.step += 1
            self.watch.mark("data")
            self.train_step(self.batches)
        seconds = self.watch.stop()
        self.watch = None
        if not math.isfinite(self.last_loss.item()):
            raise FloatingPointError(f"the loss is {self.last_loss.item()} after {self.step - 1} steps")
        return {part: seconds.get(part, 0.0) for part in PARTS}

    def forward_backward_step(self, **kwargs: Any) -> torch.Tensor:
        self._mark("forward")
        if self.held is not None:
            self.held.begin()
        loss = super().forward_backward_step(**kwargs)
        self._mark("optimizer")
        self.last_loss = loss.detach()
        return loss

    def _loss(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        self._mark("loss")
        loss, metrics = self.run_loss(*args, **kwargs)
        loss.register_hook(self._backward_begins)
        return loss, metrics

    def _backward_begins(self, gradient: torch.Tensor) -> None:
        self._mark("backward")
        if self.held is not None:
            self.held.end()
            self.model_bytes_held = self.model_bytes()

    def _mark(self, part: str) -> None:
        if self.watch is not None:
            self.watch.mark(part)

    def saved_bytes(self) -> int:
        """What the first pass of a step has allocated when its backward pass begins, but for model and gradients.

        Asked of the allocator, so that what counts is what is held, whoever holds it: autograd, checkpointing or a
        compiled graph.
        """
        self.optimizers.zero_grad()
        self.model_bytes = self._model_bytes()
        before = self.model_bytes()
        with HeldBytes() as self.held:
            self.train(1)
        held, self.held = self.held, None
        return held.bytes - (self.model_bytes_held - before)

    def _model_bytes(self) -> Callable[[], int]:
        """A function that counts this rank's gradients and the parameters that FSDP has gathered by then."""
        model = self.model_parts[0]
        sharded = list(model.parameters())
        modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for module in modules:
            module.unshard()
        gathered = list(model.parameters())
        for module in modules:
            module.reshard()
        return lambda: storage_bytes([*gathered, *(parameter.grad for parameter in [*sharded, *gathered])])

    def peak_bytes(self) -> int:
        """The most memory during a step, beyond what there was before the model was built."""
        reset_peak()
        self.train(1)
        return peak_bytes() - self.bytes_before
