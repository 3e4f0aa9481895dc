"""The benchmark's table: for the terminal, as Markdown, and as JSON with every turn behind it."""

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torchtitan_ext.files import write_file

from .summary import Row, Spread
from .turns import Measured

FORMAT = 1
Table = list[list[str]]
"""Rows of cells; the first is the header."""
Report = tuple[str, dict[str, Table], dict[str, Any]]
"""A line that says what was measured, the tables by name, and the record for ``bench.json``."""

PARTS = ("forward", "loss", "backward", "optimizer")


def machine(device: str) -> dict[str, Any]:
    """What a figure depends on besides the settings."""
    import torch

    return {
        "device": device,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": os.environ.get("OMP_NUM_THREADS", "all cores"),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def tables(rows: Sequence[Row]) -> dict[str, Table]:
    """The table in parts that fit 80 columns: speed, step, memory, and start-up where there was compilation."""
    found: dict[str, Table] = {}
    timed = [(row.label, row.speed) for row in rows if row.speed is not None]
    if timed:
        found["speed"] = [
            ["", "tokens/s", "of standard", "(quartiles)", "MFU"],
            *([x, f"{s.tokens_per_second:,.0f}", *_ratio(s.ratio), f"{s.mfu:.1%}"] for x, s in timed),
        ]
        found["one step, ms"] = [
            ["", "all", *PARTS],
            *([x, _ms(s.step_seconds), *(_ms(s.parts[part]) for part in PARTS)] for x, s in timed),
        ]
    found["memory of one process"] = [
        ["", "peak", "of standard", "saved for backward", "of standard"],
        *(
            [r.label, _mib(r.peak_bytes), f"{r.peak_ratio:.3f}", _mib(r.saved_bytes), f"{r.saved_ratio:.3f}"]
            for r in rows
        ),
    ]
    if any(row.graphs is not None for row in rows):
        found["compilation"] = [
            ["", "seconds", "graphs"],
            *([row.label, f"{row.compile_seconds or 0:.1f}", str(row.graphs)] for row in rows),
        ]
    return found


def as_text(parts: dict[str, Table]) -> str:
    return "\n\n".join("\n".join([name, *_aligned(table)]) for name, table in parts.items())


def as_markdown(parts: dict[str, Table]) -> str:
    blocks = []
    for name, (header, *rows) in parts.items():
        lines = [[name, *header[1:]], ["---"] * len(header), *rows]
        blocks.append("\n".join("| " + " | ".join(line) + " |" for line in lines))
    return "\n\n".join(blocks) + "\n"


def save(folder: Path, title: str, parts: dict[str, Table], record: dict[str, Any]) -> None:
    """Write ``bench.md`` and ``bench.json`` to ``folder``, which is made if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    write_file(folder / "bench.json", (json.dumps({"format": FORMAT, **record}, indent=1) + "\n").encode())
    write_file(folder / "bench.md", f"{title}\n\n{as_markdown(parts)}".encode())


def record_of(rows: Sequence[Row], measured: Sequence[Measured]) -> list[dict[str, Any]]:
    """The rows as JSON has them, each with its turns (seconds of each part) and its run."""
    return [
        {**asdict(row), "turns": one.turns, "run": one.contender.resolved.run.model_dump()}
        for row, one in zip(rows, measured, strict=True)
    ]


def _ratio(spread: Spread) -> tuple[str, str]:
    return f"{spread.median:.3f}", f"{spread.lower:.3f}-{spread.upper:.3f}"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.1f}"


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"


def _aligned(table: Table) -> list[str]:
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    lines = []
    for first, *rest in table:
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))]
        lines.append("  ".join(["", *cells]).rstrip())
    return lines
