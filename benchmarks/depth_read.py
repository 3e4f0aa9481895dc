"""How fast and how frugal ``depth_read`` is beside its plain reference: ratios measured alternately in one run.

    python -m benchmarks.depth_read --sources 9 --tokens 4096 --width 1536 --dtype float32 --device cpu

A ratio of 3 in ``speed`` means that the fused read takes a third of the time. ``memory`` compares the most that a forward and
backward pass needs beyond the sources themselves and the incoming gradient: the allocator's own peak on a GPU, the peak of the
process's resident memory on a CPU (Linux only).
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from torchtitan_ext.ops.depth_read import DepthQuery, depth_read, depth_read_reference

Read = Callable[[list[torch.Tensor], DepthQuery], torch.Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sources", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--width", type=int, default=1536)
    parser.add_argument("--key-width", type=int, help="the width, if not given")
    parser.add_argument("--rank", type=int, default=0, help="rank of a token-dependent query")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float64"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, help="CPU threads")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)

    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    sources, query, grad_BTD = _inputs(args, device, dtype)
    reads: dict[str, Read] = {"reference": depth_read_reference, "fused": depth_read}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in reads}
    peaks: dict[str, list[float]] = {name: [] for name in reads}
    for repeat in range(args.repeats + 1):  # the first round warms up
        for name, read in reads.items():
            forward, backward, peak = _measure(read, sources, query, grad_BTD)
            if repeat:
                times[name].append((forward, backward))
                peaks[name].append(peak)

    one = sources[0].numel() * sources[0].element_size()
    print(
        f"{args.sources} sources of {args.tokens} x {args.width} {args.dtype} on {device}, key width {query.w_nK.shape[-1]}, "
        f"rank {args.rank}, {torch.get_num_threads()} threads, median of {args.repeats}"
    )
    for name in reads:
        forward, backward = (statistics.median(part) for part in zip(*times[name], strict=True))
        peak = statistics.median(peaks[name])
        print(f"{name:10} forward {forward:.4f} s  backward {backward:.4f} s  extra memory {peak / one:.1f} sources")
    pairs = list(zip(times["reference"], times["fused"], strict=True))
    for title, parts in {"forward": [0], "backward": [1], "both": [0, 1]}.items():
        ratio = statistics.median(sum(a[i] for i in parts) / sum(b[i] for i in parts) for a, b in pairs)
        print(f"speed {title:8} {ratio:.2f}")
    memory = statistics.median(a / b for a, b in zip(peaks["reference"], peaks["fused"], strict=True))
    print(f"memory         {memory:.2f}")


def _inputs(
    args: argparse.Namespace, device: torch.device, dtype: torch.dtype
) -> tuple[list[torch.Tensor], DepthQuery, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device=device, dtype=dtype).requires_grad_()

    small = torch.float64 if dtype == torch.float64 else torch.float32
    key_width = args.key_width or args.width
    query = DepthQuery(
        draw(args.sources, key_width, dtype=small),
        basis_nRK=draw(args.sources, args.rank, key_width, dtype=small) if args.rank else None,
        coefficients_BTR=draw(1, args.tokens, args.rank) if args.rank else None,
    )
    sources = [draw(1, args.tokens, args.width) for _ in range(args.sources)]
    return sources, query, draw(1, args.tokens, args.width).detach()


def _measure(
    read: Read, sources: list[torch.Tensor], query: DepthQuery, grad_BTD: torch.Tensor
) -> tuple[float, float, float]:
    """Seconds forward, seconds backward, peak of extra bytes."""
    device = grad_BTD.device
    inputs = [t for t in (query.w_nK, query.basis_nRK, query.coefficients_BTR, *sources) if t is not None]
    gc.collect()
    before = _reset_peak(device)
    started = _now(device)
    h_BTD = read(sources, query)
    middle = _now(device)
    grads = torch.autograd.grad(h_BTD, inputs, grad_BTD)
    ended = _now(device)
    peak = _peak(device) - before
    del grads, h_BTD
    return middle - started, ended - middle, peak


def _now(device: torch.device) -> float:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def _reset_peak(device: torch.device) -> int:
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(device)
        return torch.accelerator.memory_allocated(device)
    Path("/proc/self/clear_refs").write_text("5")  # sets the peak to the present size (proc(5))
    return _status("VmRSS")


def _peak(device: torch.device) -> int:
    return torch.accelerator.max_memory_allocated(device) if device.type != "cpu" else _status("VmHWM")


def _status(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main()
