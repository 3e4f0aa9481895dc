"""GPUs by name: what their makers' data sheets promise, and the share of it that plans count on."""

from dataclasses import dataclass

from torchtitan_ext.errors import UserError, nearest

USABLE = 0.95
"""Share of a GPU's memory that tensors may fill. The rest is for the CUDA context, NCCL's buffers, cuBLAS's workspace
and fragmentation. A gigabyte of a data sheet is taken as 10^9 bytes; what a card holds beyond it is theirs too."""

ASSUMED_MFU = 0.4
"""Share of the peak that a run is assumed to reach where nothing was measured. The goal for the 500M size on one GPU is
0.45 (docs/performance.md); several nodes, smaller models and most variants stay below it."""


@dataclass(frozen=True)
class Gpu:
    """``memory`` in bytes, ``flops`` in bf16 FLOP/s of matrix products without sparsity (half of what sheets give with
    it)."""

    memory: float
    flops: float
    source: str

    @property
    def usable(self) -> float:
        """Bytes that tensors may fill."""
        return USABLE * self.memory


GPUS = {
    "A100": Gpu(80e9, 312e12, "NVIDIA A100 Tensor Core GPU datasheet (A100 80GB SXM)"),
    "H100": Gpu(80e9, 989e12, "NVIDIA H100 Tensor Core GPU datasheet (H100 SXM; 1,979 TFLOPS with sparsity)"),
    "H200": Gpu(141e9, 989e12, "NVIDIA H200 Tensor Core GPU datasheet (H200 SXM; 1,979 TFLOPS with sparsity)"),
    "B200": Gpu(180e9, 2250e12, "NVIDIA DGX B200 datasheet (1,440 GB and 36 PFLOPS with sparsity in 8 GPUs)"),
    "GB200": Gpu(186e9, 2500e12, "NVIDIA GB200 NVL72 (13.4 TB and 360 PFLOPS with sparsity in 72 GPUs)"),
}


def gpu_of(name: str) -> Gpu:
    """The GPU called ``name``, in any case; raises ``UserError`` with the nearest name for an unknown one."""
    if name.upper() not in GPUS:
        raise UserError(f"--gpu {name} is unknown; {nearest(name.upper(), GPUS)}")
    return GPUS[name.upper()]


@dataclass(frozen=True)
class Speed:
    """How fast GPUs are assumed to train: ``mfu`` is the share of the peak that reaches the model's FLOPs."""

    gpu: str = "B200"
    mfu: float = ASSUMED_MFU

    def __post_init__(self) -> None:
        gpu_of(self.gpu)
        if not 0 < self.mfu <= 1:
            raise UserError(f"--mfu {self.mfu:g} must be a share of the peak, above 0 and at most 1")

    @property
    def flops(self) -> float:
        """Useful FLOP/s of one GPU."""
        return gpu_of(self.gpu).flops * self.mfu

    def gpu_hours(self, flops: float) -> float:
        """Hours of one GPU."""
        return flops / self.flops / 3600

    def described(self) -> str:
        """What is assumed, in words."""
        peak = f"{gpu_of(self.gpu).flops / 1e12:,.0f} TFLOP/s (dense BF16)"
        return f"{self.gpu.upper()} at an MFU of {self.mfu:.0%} of {peak}"
