"""A plan as text of 80 columns."""

import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from torchtitan_ext.gpus import gpu_of
from torchtitan_ext.study.cost import Speed, disk_bytes, train_flops, train_tokens
from torchtitan_ext.study.planned import Plan, PlannedRun
from torchtitan_ext.units import count

WIDTH = 80
LABEL_WIDTH = 26
"""A longer label stands on a line of its own."""
BUDGETS = {
    "tokens": "equal tokens",
    "params": "equal parameters, equal tokens",
    "flops": "equal training FLOPs",
    "wall_clock": "equal tokens, and a baseline for each variant with its wall-clock",
}

Groups = dict[str, list[PlannedRun]]
"""Runs by label: those that differ in seed alone."""


def plan_text(plan: Plan, speed: Speed | None = None) -> str:
    """Return the plan for people: its runs with their cost, what was solved, and what differs between them.

    Runs that differ in seed alone share a line. ``speed`` is what GPU-hours are estimated with.
    """
    speed = speed or Speed()
    groups: Groups = {}
    for run in plan.runs:
        groups.setdefault(run.label, []).append(run)
    study = plan.study
    processes = "process" if plan.ranks == 1 else "processes"
    parts = [
        [f"{study.name}: {len(plan.runs)} runs of {plan.ranks} {processes} each, in {study.folder}"],
        _wrapped(f"budget: {BUDGETS[study.budget.match]}, within {study.budget.tolerance:.2%}"),
        [""],
        list(_table(groups, speed)),
        [""],
        list(_totals(plan, speed)),
        _section("solved", _solved(groups)),
        _section("differs from the baseline in", _differences(groups)),
        _section("waits", _waiting(plan, groups)),
    ]
    return "\n".join(line for part in parts for line in part)


def _table(groups: Groups, speed: Speed) -> Iterator[str]:
    yield _row("run", "seeds", "params", "steps", "tokens", "FLOPs", "GPU-h", "disk")
    for label, runs in groups.items():
        shown = label
        if len(label) > LABEL_WIDTH:
            yield label
            shown = ""
        resolved = runs[0].resolved
        if resolved is None:
            yield f"{shown:<{LABEL_WIDTH}} {len(runs):>5}  not solved yet; see below"
            continue
        flops = train_flops(resolved)
        yield _row(
            shown,
            len(runs),
            count(resolved.parameters),
            resolved.steps,
            count(train_tokens(resolved)),
            _scientific(flops),
            _hours(speed.gpu_hours(flops)),
            count(disk_bytes(resolved)) + "B",
        )


def _row(label: str, seeds: Any, *cells: Any) -> str:
    return f"{label:<{LABEL_WIDTH}} {seeds:>5} " + " ".join(f"{cell:>7}" for cell in cells)


def _totals(plan: Plan, speed: Speed) -> Iterator[str]:
    resolved = [run.resolved for run in plan.runs if run.resolved is not None]
    flops = sum(map(train_flops, resolved))
    yield from _wrapped(
        f"total: {_scientific(flops)} FLOPs, {_hours(speed.gpu_hours(flops))} GPU-hours, "
        f"{count(sum(map(disk_bytes, resolved)))}B on disk for the whole study"
        + (f" but its {len(plan.runs) - len(resolved)} unsolved runs" if len(resolved) < len(plan.runs) else "")
    )
    yield from _wrapped(
        f"GPU-hours assume {speed.gpu} at {speed.mfu:.0%} of {gpu_of(speed.gpu).flops / 1e12:,.0f} TFLOP/s (dense "
        "BF16). Disk is what finished runs keep of checkpoints: weights and two Adam moments in fp32."
    )


def _section(title: str, lines: Sequence[tuple[str, str]]) -> list[str]:
    if not lines:
        return []
    return ["", title, *(wrapped for label, text in lines for wrapped in _wrapped(f"{label}: {text}", "  "))]


def _solved(groups: Groups) -> list[tuple[str, str]]:
    return [
        (
            label,
            f"{''.join(f'{key} {value}, ' for key, value in match.solved.items())}{match.got:,.0f} {match.quantity} "
            f"against {match.wanted:,.0f} ({match.miss:+.2%})",
        )
        for label, runs in groups.items()
        for match in runs[0].matches
    ]


def _differences(groups: Groups) -> list[tuple[str, str]]:
    """What differs, by entry where that is the same at all sizes and learning rates, else by label."""
    texts: dict[str, dict[str, str]] = {}
    for label, runs in groups.items():
        listed = ", ".join(f"{key} {_value(own)} ({_value(other)})" for key, own, other in runs[0].differences)
        if listed:
            texts.setdefault(runs[0].entry, {})[label] = listed
    lines: list[tuple[str, str]] = []
    for entry, by_label in texts.items():
        same = len(set(by_label.values())) == 1
        lines += [(entry, next(iter(by_label.values())))] if same else list(by_label.items())
    return lines


def _waiting(plan: Plan, groups: Groups) -> list[tuple[str, str]]:
    labels = {run.name: run.label for run in plan.runs}
    return [
        (label, f"for the step times of {' and '.join(dict.fromkeys(labels[name] for name in runs[0].after))}")
        for label, runs in groups.items()
        if runs[0].command is None
    ]


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent + "  ", break_on_hyphens=False)


def _value(value: Any) -> str:
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _scientific(number: float) -> str:
    return f"{number:.2e}".replace("e+", "e")


def _hours(hours: float) -> str:
    return f"{hours:,.0f}" if hours >= 100 else f"{hours:.2g}" if hours >= 0.01 else "<0.01"
