"""One operation alone, forward and backward: every implementation against the plain reference, and against the time in
which the device could move the bytes that the operation cannot do without."""

import argparse
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from torchtitan_ext.errors import UserError, nearest

from . import report

if TYPE_CHECKING:
    from .read_case import Shape

OPERATIONS = ("depth_read",)


def add_arguments(group: Any) -> None:
    group.add_argument("--operation", metavar="NAME", help=f"one of {', '.join(OPERATIONS)}")
    group.add_argument("--sources", type=int, default=9, help="tensors that are read (default: 9)")
    group.add_argument("--tokens", type=int, default=4096, help="tokens in each (default: 4096)")
    group.add_argument("--width", type=int, default=1536, help="width of each (default: 1536)")
    group.add_argument("--key-width", type=int, help="width of the keys (default: the width)")
    group.add_argument("--rank", type=int, default=0, help="rank of a query that depends on the token (default: 0)")
    group.add_argument("--dtype", default="float32", help="float32 or bfloat16 (default: float32)")


def compare(args: argparse.Namespace) -> report.Report:
    """Measure ``args.operation``. Raises ``UserError`` for arguments that do not fit."""
    from .read_case import COPY, REFERENCE, device_name, extra_bytes, implementations, left_out, times
    from .summary import Spread
    from .turns import say

    shape = _shape(args)
    names, missing = list(implementations(shape)), left_out(shape)
    for name, reason in missing.items():
        say(f"left out: {name} {reason}")
    memory = {}
    for name in names:
        say(f"memory of {name}")
        # A process of its own: memory that an allocator holds back for reuse would not show as growth.
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            memory[name] = pool.submit(extra_bytes, shape, name).result()
    spent = times(shape, names, args.turns)
    bandwidth = 2 * shape.sources * shape.source_bytes / Spread.of([sum(turn) for turn in spent.pop(COPY)]).median
    floor = [size / bandwidth for size in shape.bytes]
    rows = [
        {
            "label": name,
            "forward_seconds": Spread.of([turn[0] for turn in spent[name]]).median,
            "backward_seconds": Spread.of([turn[1] for turn in spent[name]]).median,
            "of_floor": Spread.of([sum(turn) / sum(floor) for turn in spent[name]]).median,
            "speedup": Spread.of([sum(b) / sum(a) for a, b in zip(spent[name], spent[REFERENCE], strict=True)]),
            "extra_bytes": memory[name],
            "memory_ratio": memory[name] / memory[REFERENCE],
            "turns": spent[name],
        }
        for name in names
    ]
    device = device_name()
    title = (
        f"{args.operation}: {shape.sources} sources of {shape.tokens} x {shape.width} {shape.dtype}, "
        f"key width {shape.key_width}, rank {shape.rank}; {device}, {bandwidth / 1e9:.1f} GB/s copied"
    )
    record = {
        "kind": "operation",
        "operation": args.operation,
        "shape": asdict(shape),
        "machine": report.machine(device),
        "copy_bytes_per_second": bandwidth,
        "floor_seconds": floor,
        "implementations": rows,
        "left_out": missing,
    }
    return title, _tables(rows, floor, shape), record


def _shape(args: argparse.Namespace) -> "Shape":
    from .read_case import Shape

    if args.operation not in OPERATIONS:
        raise UserError(
            f"--operation {args.operation} is not one that is measured; {nearest(args.operation, OPERATIONS)}"
        )
    if args.dtype not in ("float32", "bfloat16"):
        raise UserError(f"--dtype {args.dtype} is not measured; {nearest(args.dtype, ('float32', 'bfloat16'))}")
    for name, least in (("sources", 1), ("tokens", 1), ("width", 1), ("rank", 0), ("turns", 1)):
        if getattr(args, name) < least:
            raise UserError(f"--{name} is {getattr(args, name)}; it must be {least} or more")
    key_width = args.width if args.key_width is None else args.key_width
    if not 1 <= key_width <= args.width:
        raise UserError(f"--key-width is {key_width}; it must be from 1 to the width, {args.width}")
    return Shape(args.sources, args.tokens, args.width, key_width, args.rank, args.dtype)


def _tables(rows: list[dict[str, Any]], floor: list[float], shape: "Shape") -> dict[str, report.Table]:
    def ms(seconds: float) -> str:
        return f"{1000 * seconds:,.2f}"

    time_rows = [
        [
            row["label"],
            ms(row["forward_seconds"]),
            ms(row["backward_seconds"]),
            f"{row['of_floor']:.2f}",
            f"{row['speedup'].median:.2f}",
            f"{row['speedup'].lower:.2f}-{row['speedup'].upper:.2f}",
        ]
        for row in rows
    ]
    memory_rows = [
        [row["label"], f"{row['extra_bytes'] / shape.source_bytes:.1f}", f"{row['memory_ratio']:.3f}"] for row in rows
    ]
    return {
        "time, ms": [
            ["", "forward", "backward", "floors", "times as fast", "(quartiles)"],
            ["floor: bytes at copy speed", *map(ms, floor), "1.00", "", ""],
            *time_rows,
        ],
        "memory beyond sources and gradient": [["", "in sources", "of reference"], *memory_rows],
    }
