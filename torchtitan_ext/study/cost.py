"""What planned runs cost: GPU-hours at an assumed speed, and disk for their checkpoints."""

from dataclasses import dataclass

from torchtitan_ext.errors import UserError
from torchtitan_ext.gpus import gpu_of
from torchtitan_ext.resolve import ResolvedRun

BYTES_PER_PARAMETER = 12
"""Of a checkpoint: the weight and AdamW's two moments, in fp32."""


@dataclass(frozen=True)
class Speed:
    """How fast GPUs are assumed to train: ``mfu`` is the share of the peak that reaches the model's FLOPs."""

    gpu: str = "B200"
    mfu: float = 0.4

    def __post_init__(self) -> None:
        gpu_of(self.gpu)
        if not 0 < self.mfu <= 1:
            raise UserError(f"--mfu {self.mfu:g} must be a share of the peak, above 0 and at most 1")

    def gpu_hours(self, flops: float) -> float:
        """Hours of one GPU."""
        return flops / (gpu_of(self.gpu).flops * self.mfu) / 3600


def train_tokens(run: ResolvedRun) -> int:
    return run.steps * run.batch_tokens


def train_flops(run: ResolvedRun) -> int:
    return train_tokens(run) * run.flops_per_token


def kept_checkpoints(run: ResolvedRun) -> int:
    """How many checkpoints a finished run leaves."""
    settings = run.run.checkpoint
    milestones = {step for step in settings.milestones if step <= run.steps}
    saved = {run.steps} | milestones
    if settings.every:
        saved |= set(range(settings.every, run.steps + 1, settings.every))
    return len(set(sorted(saved)[-settings.keep_last :]) | milestones)


def disk_bytes(run: ResolvedRun) -> int:
    """Bytes of the checkpoints that a finished run leaves."""
    return kept_checkpoints(run) * BYTES_PER_PARAMETER * run.parameters
