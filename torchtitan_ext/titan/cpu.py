"""Run torchtitan where there is no accelerator.

torchtitan takes "cuda" for the device when it finds no accelerator, at the import of ``torchtitan.tools.utils``, and
other modules copy the names at their own import. ``use_cpu_without_accelerator`` must therefore run before anything
imports ``torchtitan.trainer``.
"""

import functools
import os
import platform
import resource
import time
from types import SimpleNamespace

import torch


class CpuDevice:
    """What torchtitan asks of a device module (``torch.cuda`` and its like), answered for the CPU.

    Memory is the process's resident set: its peak since the last reset, in bytes.
    """

    @staticmethod
    def set_device(device: torch.device) -> None:
        return None

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def get_device_name(device: torch.device | None = None) -> str:
        return f"CPU ({platform.processor() or platform.machine()})"

    @staticmethod
    def get_device_properties(device: torch.device | None = None) -> SimpleNamespace:
        return SimpleNamespace(total_memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))

    @staticmethod
    def memory_stats(device: torch.device | None = None) -> dict[str, int]:
        peak = peak_resident_bytes()
        return {
            "active_bytes.all.peak": peak,
            "reserved_bytes.all.peak": peak,
            "num_alloc_retries": 0,
            "num_ooms": 0,
        }

    @staticmethod
    def reset_peak_memory_stats(device: torch.device | None = None) -> None:
        """Start a new interval for the peak (writing 5 to clear_refs resets the high-water mark: Linux, proc(5))."""
        try:
            with open("/proc/self/clear_refs", "w") as refs:
                refs.write("5")
        except OSError:
            return  # not permitted here: the peak is then that of the whole process so far

    @staticmethod
    def empty_cache() -> None:
        return None

    @staticmethod
    def synchronize(device: torch.device | None = None) -> None:
        return None


def peak_resident_bytes() -> int:
    """The highest resident set size since the last reset, in bytes."""
    try:
        with open("/proc/self/status") as status:
            for line in status:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@functools.cache
def measured_peak_flops(device_name: str = "") -> float:
    """FLOP/s of one process on a large fp32 matrix product: the peak that a CPU's MFU is taken against.

    torchtitan's table knows data-centre accelerators only and counts everything else as an A100.
    """
    size = 1024
    a, b = torch.randn(2, size, size, generator=torch.Generator().manual_seed(0))
    best = float("inf")
    for _ in range(6):
        start = time.perf_counter()
        a @ b
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


def use_cpu_without_accelerator() -> None:
    """Point torchtitan at the CPU when no accelerator is there."""
    from torchtitan.tools import utils

    if torch.accelerator.is_available():
        return
    utils.device_type = "cpu"
    utils.device_module = CpuDevice
    utils.get_local_device = lambda: torch.device("cpu")
    utils.get_peak_flops = measured_peak_flops
