"""What a run logs: torchtitan's scalars and ours, to TensorBoard, ``metrics.jsonl`` and the console.

torchtitan's processor starts a new TensorBoard folder at every start and divides by wall-clock time, whatever happened
in it. Here a run has one folder for ever, steps that were lost with a crash are purged, and throughput counts training
time alone, without evaluation and checkpoints.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.utils.tensorboard import SummaryWriter
from torchtitan.components.metrics import BaseLogger, MetricsProcessor
from torchtitan.tools.logging import logger

from torchtitan_ext.errors import Diverged
from torchtitan_ext.run_folder import RunFolder
from torchtitan_ext.units import duration

from .diagnostics import DepthNumbers
from .pictures import map_picture, series_picture
from .versus import StoppingRule, Versus


@dataclass
class Progress:
    """How far a run has come, over all its starts. Saved in checkpoints."""

    step: int = 0
    tokens: int = 0
    train_seconds: float = 0.0
    flops: float = 0.0


class RunMetrics(MetricsProcessor):
    """Logs the run in ``folder``. ``attach`` must be called before the first ``log``."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        baseline: str | None = None
        """Run folder to compare with."""
        stop_behind: float | None = None
        stop_behind_at: int | None = None

    def __init__(self, config: Config, *, dump_folder: str = "./outputs", **kwargs: Any) -> None:
        super().__init__(config, dump_folder=dump_folder, **kwargs)
        self.folder = RunFolder(dump_folder)
        self.writer: SummaryWriter | None = None
        self.versus: Versus | None = None
        self.progress: Callable[[], Progress] = Progress
        self.last = Progress()
        self.steps = 0
        self.saves: Callable[[int], bool] = lambda step: False

    def _build_metric_logger(self, **kwargs: Any) -> BaseLogger:
        return BaseLogger()  # the writer is opened by attach(), when the step to continue from is known

    def should_log(self, step: int) -> bool:
        """Whether torchtitan finds out this step's loss and gradient norm, which waits for the device: to log them, or
        because the step is saved, which nothing may be that is not finite."""
        return self._logs(step) or self.saves(step)

    def _logs(self, step: int) -> bool:
        return step == 1 or step % self.config.log_freq == 0 or step == self.steps

    def attach(self, progress: Callable[[], Progress], steps: int, saves: Callable[[int], bool]) -> None:
        """Start logging, up to step ``steps``, after the step that ``progress`` gives; forget what was logged later.
        ``saves`` tells which steps will be saved."""
        self.progress, self.steps, self.saves = progress, steps, saves
        self.last = progress()
        if dist.get_rank() == 0:
            self.folder.cut_metrics(self.last.step)
            if self.config.enable_tensorboard:
                self.writer = SummaryWriter(str(self.folder.tensorboard_path), purge_step=self.last.step + 1)
            if self.config.baseline is not None:
                self._compare_with(Path(self.config.baseline))

    def _compare_with(self, baseline: Path) -> None:
        rule = None
        if self.config.stop_behind is not None and self.config.stop_behind_at is not None:
            rule = StoppingRule(self.config.stop_behind, self.config.stop_behind_at)
        self.versus = Versus(self.folder, baseline, rule)
        logger.info(
            f"In brackets, at the same step of {baseline}: loss minus its loss, tok/s and mem as a share of its"
        )

    @property
    def verdict(self) -> str | None:
        """Why the stopping rule ends this run, once it does; known on the first rank."""
        return self.versus.verdict if self.versus is not None else None

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        """Log one training step. Losses in nats per token; ``extra_metrics`` are torchtitan's learning rates.

        Raises:
            Diverged: the step is to be saved and its gradient norm is not finite; torchtitan has looked at the loss.
        """
        if self.saves(step) and not math.isfinite(grad_norm):
            raise Diverged(
                f"Gradient norm is not finite ({grad_norm}, with a loss of {global_avg_loss}) at step {step}"
            )
        if not self._logs(step):
            return
        now = self.progress()
        seconds = max(now.train_seconds - self.last.train_seconds, 1e-9)
        tokens_per_second = (now.tokens - self.last.tokens) / seconds
        flops_per_second = (now.flops - self.last.flops) / seconds / dist.get_world_size()
        memory = self.device_memory_monitor.get_peak_stats()
        loading = sum(self.data_loading_times)
        metrics: dict[str, float] = {
            "loss_metrics/global_avg_loss": global_avg_loss,
            "loss_metrics/global_max_loss": global_max_loss,
            "grad_norm": grad_norm,
            "throughput(tps)": tokens_per_second / dist.get_world_size(),
            "throughput/global_tokens_per_s": tokens_per_second,
            "tflops": flops_per_second / 1e12,
            "mfu(%)": 100 * flops_per_second / self.gpu_peak_flops,
            "time_metrics/end_to_end(s)": seconds / max(step - self.last.step, 1),
            "time_metrics/data_loading(s)": loading / max(len(self.data_loading_times), 1),
            "time_metrics/data_loading(%)": 100 * loading / seconds,
            "memory/max_active(GiB)": memory.max_active_gib,
            "memory/max_active(%)": memory.max_active_pct,
            "memory/max_reserved(GiB)": memory.max_reserved_gib,
            "memory/max_reserved(%)": memory.max_reserved_pct,
            "memory/num_alloc_retries": memory.num_alloc_retries,
            "memory/num_ooms": memory.num_ooms,
            "progress/tokens": now.tokens,
            "progress/train_flops": now.flops,
            "progress/train_seconds": now.train_seconds,
        }
        metrics.update({name: value for name, value in (extra_metrics or {}).items() if name.startswith("lr/")})
        against = self._compare(step, metrics)
        self._write(step, metrics)
        left = (self.steps - step) * metrics["time_metrics/end_to_end(s)"]
        logger.info(
            f"step {step}/{self.steps}  loss {global_avg_loss:.4f}{against['loss']}  grad norm {grad_norm:.3f}  "
            f"{tokens_per_second:,.0f} tok/s{against['speed']}  mfu {metrics['mfu(%)']:.1f}%  "
            f"mem {memory.max_reserved_gib:.2f} GiB{against['memory']}  left {duration(left)}"
        )
        self.last = now
        self.ntokens_since_last_log = 0
        self.data_loading_times.clear()
        self.time_last_log = time.perf_counter()
        self.device_memory_monitor.reset_peak_stats()
        if dist.get_rank() == 0:
            self.folder.write_status("running", step, self.steps)

    def _compare(self, step: int, metrics: dict[str, float]) -> dict[str, str]:
        """Add what is known now about the baseline to ``metrics``, the record of ``step``, and to records of their own
        for earlier steps that the baseline has reached since. Returns the console's brackets."""
        if self.versus is not None:
            self.versus.note(step, metrics)
            for earlier, comparison in self.versus.compare().items():
                if earlier == step:
                    metrics.update(comparison)
                else:
                    self._write(earlier, comparison)
        if "vs_baseline/loss" not in metrics:
            return {"loss": "", "speed": "", "memory": ""}
        return {
            "loss": f" ({metrics['vs_baseline/loss']:+.4f})",
            "speed": f" ({metrics['vs_baseline/tokens_per_s']:.0%})",
            "memory": f" ({metrics['vs_baseline/peak_memory']:.0%})",
        }

    def log_heldout(self, step: int, metrics: dict[str, float]) -> None:
        self._write(step, metrics)
        logger.info(
            f"step {step}/{self.steps}  held-out loss {metrics['heldout/loss']:.4f}  "
            f"perplexity {metrics['heldout/perplexity']:.2f}  bits per byte {metrics['heldout/bits_per_byte']:.4f}"
        )

    def log_depth(self, step: int, numbers: DepthNumbers) -> None:
        """Log numbers by depth: scalars and maps to the record, scalars and pictures to TensorBoard."""
        scalars = {
            f"depth/{name}/{index:02}": value
            for name, values in numbers.series.items()
            for index, value in enumerate(values)
        }
        self._write(step, scalars, maps={f"depth/{name}": rows for name, rows in numbers.maps.items()})
        if self.writer is not None:
            for name, rows in numbers.maps.items():
                self.writer.add_figure(f"depth/{name}", map_picture(name, rows), step)
            for name, values in numbers.series.items():
                self.writer.add_figure(f"depth/{name}", series_picture(name, values), step)
            self.writer.flush()

    def _write(self, step: int, metrics: dict[str, float], maps: dict[str, list[list[float]]] | None = None) -> None:
        if dist.get_rank() != 0:
            return
        self.folder.append_metrics(step, {**metrics, **(maps or {})})
        if self.writer is not None:
            for tag, value in metrics.items():
                self.writer.add_scalar(tag, value, step)
            self.writer.flush()

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
