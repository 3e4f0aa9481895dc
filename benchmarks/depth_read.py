"""How fast and how frugal ``depth_read`` is beside its plain reference: ratios measured alternately in one run.

    python -m benchmarks.depth_read --sources 9 --tokens 4096 --width 1536 --dtype float32 --device cpu

A ratio of 3 in ``speed`` means that the fused read takes a third of the time. ``memory`` compares the most that a
forward and backward pass needs beyond the sources and the incoming gradient, the sources' gradients included: the
allocator's peak on a GPU, on a CPU the peak resident memory of a process of its own (Linux).
"""

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from torchtitan_ext.ops.depth_query import DepthQuery, depth_read_reference
from torchtitan_ext.ops.depth_read import depth_read

READS: dict[str, Callable[[list[torch.Tensor], DepthQuery], torch.Tensor]] = {
    "reference": depth_read_reference,
    "fused": depth_read,
}


class Case:
    """Sources, a query and an incoming gradient, drawn from a fixed seed."""

    def __init__(self, args: argparse.Namespace) -> None:
        if args.threads:
            torch.set_num_threads(args.threads)
        self.device, dtype = torch.device(args.device), getattr(torch, args.dtype)
        generator = torch.Generator().manual_seed(0)

        def draw(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(device=self.device, dtype=dtype).requires_grad_()

        small = torch.float64 if dtype == torch.float64 else torch.float32
        key_width = args.key_width or args.width
        self.query = DepthQuery(
            draw(args.sources, key_width, dtype=small),
            basis_nRK=draw(args.sources, args.rank, key_width, dtype=small) if args.rank else None,
            coefficients_BTR=draw(1, args.tokens, args.rank) if args.rank else None,
        )
        self.sources = [draw(1, args.tokens, args.width) for _ in range(args.sources)]
        self.grad_BTD = draw(1, args.tokens, args.width).detach()

    def run(self, name: str) -> tuple[float, float]:
        """Seconds forward and seconds backward."""
        query = self.query
        inputs = [t for t in (query.w_nK, query.basis_nRK, query.coefficients_BTR, *self.sources) if t is not None]
        started = self.now()
        h_BTD = READS[name](self.sources, query)
        middle = self.now()
        torch.autograd.grad(h_BTD, inputs, self.grad_BTD)
        return middle - started, self.now() - middle

    def now(self) -> float:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return time.perf_counter()


def extra_memory(args: argparse.Namespace, name: str) -> int:
    """Peak bytes of one forward and backward pass beyond what was there before it."""
    if args.device == "cpu":
        Case(argparse.Namespace(**{**vars(args), "tokens": 8})).run(name)  # what the libraries set up once
    case = Case(args)
    if args.device == "cpu":
        Path("/proc/self/clear_refs").write_text("5")  # sets the peak to the present size (proc(5))
        before = status_bytes("VmHWM")
        case.run(name)
        return status_bytes("VmHWM") - before
    torch.accelerator.reset_peak_memory_stats(case.device)
    before = torch.accelerator.memory_allocated(case.device)
    case.run(name)
    return torch.accelerator.max_memory_allocated(case.device) - before


def status_bytes(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


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
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()

    memory = {}
    for name in READS:
        # A fresh process: memory that an allocator holds back for reuse would not show as growth.
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            memory[name] = pool.submit(extra_memory, args, name).result()
    case = Case(args)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in READS}
    for name in READS:
        case.run(name)
    for _ in range(args.repeats):
        for name in READS:
            times[name].append(case.run(name))

    one = case.grad_BTD.numel() * case.grad_BTD.element_size()
    print(
        f"{args.sources} sources of {args.tokens} x {args.width} {args.dtype} on {args.device}, "
        f"key width {case.query.w_nK.shape[-1]}, rank {args.rank}, {torch.get_num_threads()} threads, "
        f"median of {args.repeats} (best)"
    )
    for name in READS:
        forward, backward = zip(*times[name], strict=True)
        print(
            f"{name:10} forward {1e3 * statistics.median(forward):.0f} ({1e3 * min(forward):.0f}) ms  "
            f"backward {1e3 * statistics.median(backward):.0f} ({1e3 * min(backward):.0f}) ms  "
            f"extra memory {memory[name] / one:.1f} sources"
        )
    pairs = list(zip(times["reference"], times["fused"], strict=True))
    for title, parts in {"forward": [0], "backward": [1], "both": [0, 1]}.items():
        ratio = statistics.median(sum(a[i] for i in parts) / sum(b[i] for i in parts) for a, b in pairs)
        print(f"speed {title:8} {ratio:.2f}")
    print(f"memory         {memory['reference'] / memory['fused']:.2f}")


if __name__ == "__main__":
    main()
