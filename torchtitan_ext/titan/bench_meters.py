"""What the benchmark reads: a stopwatch on the device's clock, and memory as the allocator and the system report it."""

import ctypes
import gc
import os
import time
from collections.abc import Iterable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function
from torchtitan.tools import utils

from .cpu import peak_resident_bytes


class Stopwatch:
    """Time between marks. On a CUDA device marks are events in its queue, so that timing never makes it wait."""

    def __init__(self) -> None:
        self.on_cuda = utils.device_type == "cuda"
        self.marks: list[tuple[str, Any]] = []

    def mark(self, part: str) -> None:
        """The time from here to the next mark belongs to ``part``."""
        if self.on_cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append((part, event))
        else:
            self.marks.append((part, time.perf_counter()))

    def stop(self) -> dict[str, float]:
        """Seconds of each part, after waiting for the device."""
        self.mark("")
        utils.device_module.synchronize()
        seconds: dict[str, float] = {}
        for (part, begin), (_, end) in zip(self.marks, self.marks[1:], strict=False):
            spent = begin.elapsed_time(end) / 1000 if self.on_cuda else end - begin
            seconds[part] = seconds.get(part, 0.0) + spent
        return seconds


class HeldBytes:
    """How much more is allocated at ``end`` than at ``begin``, as the allocator counts it; for use in a ``with``.

    On a CPU, where the allocator keeps no count, its calls are recorded by torch's profiler.
    """

    BEGIN, END = "held bytes: begin", "held bytes: end"

    def __init__(self) -> None:
        self.on_cpu = utils.device_type == "cpu"
        self.profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True) if self.on_cpu else None
        self.allocated: dict[str, int] = {}

    def __enter__(self) -> "HeldBytes":
        if self.profile is not None:
            self.profile.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self.profile is not None:
            self.profile.__exit__(*error)

    def begin(self) -> None:
        self._note(self.BEGIN)

    def end(self) -> None:
        self._note(self.END)

    def _note(self, name: str) -> None:
        if name in self.allocated:
            return  # the first pass of a step counts
        if self.profile is None:
            self.allocated[name] = utils.device_module.memory_allocated()
        else:
            self.allocated[name] = 0
            with record_function(name):
                pass

    @property
    def bytes(self) -> int:
        if self.profile is None:
            return self.allocated[self.END] - self.allocated[self.BEGIN]
        events = self.profile.profiler.kineto_results.events()
        begin, end = (min(e.start_ns() for e in events if e.name() == name) for name in (self.BEGIN, self.END))
        return sum(e.nbytes() for e in events if e.name() == "[memory]" and begin <= e.start_ns() <= end)


def storage_bytes(tensors: Iterable[torch.Tensor | None]) -> int:
    """Bytes of the storages behind ``tensors`` on this rank, each counted once."""
    local = (getattr(tensor, "_local_tensor", tensor) for tensor in tensors if tensor is not None)
    storages = {storage._cdata: storage.nbytes() for storage in (tensor.untyped_storage() for tensor in local)}
    return sum(storages.values())


def present_bytes() -> int:
    """The memory that this process has now: a device's allocator's count, or on a CPU the resident set (Linux)."""
    if utils.device_type != "cpu":
        return utils.device_module.memory_allocated()
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def reset_peak() -> int:
    """Start a new interval for ``peak_bytes``, without garbage. Returns the memory that there is now, in bytes."""
    gc.collect()
    if utils.device_type == "cpu":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)  # the C library keeps freed memory, which is resident all the same
    utils.device_module.reset_peak_memory_stats()
    return present_bytes()


def peak_bytes() -> int:
    """The most memory since ``reset_peak``."""
    return peak_resident_bytes() if utils.device_type == "cpu" else utils.device_module.max_memory_allocated()
