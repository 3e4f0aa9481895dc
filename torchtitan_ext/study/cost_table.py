"""What the runs of a plan cost: GPU-hours, checkpoints on disk, and the text that they train on."""

from collections.abc import Iterable, Iterator

from torchtitan_ext.cost import (
    PREPARED_TOKENS_PER_CORE_SECOND,
    checkpoint_bytes,
    disk_bytes,
    epochs,
    gpu_flops,
    heldout_flops,
    is_prepared,
    peak_disk_bytes,
    texts_needed,
    train_flops,
    train_tokens,
)
from torchtitan_ext.gpus import Speed
from torchtitan_ext.resolve import ResolvedRun
from torchtitan_ext.study.layout import Remark, folded, row
from torchtitan_ext.study.planned import Plan, RunsByLabel, solved
from torchtitan_ext.units import count

RUN_COLUMNS = ("seeds", "params", "steps", "tokens", "FLOPs", "GPU-h", "hours")
COST_COLUMNS = ("epochs", "eval.", "saved", "kept", "at most")
WIDTHS = (5, 7, 7, 7, 7, 7, 7)
COST_WIDTHS = (7, 7, 8, 8, 8)
SIXTEEN = 16
"""Cores of a machine whose hours of preparing text are given, beside core-hours."""


def run_lines(groups: RunsByLabel, speed: Speed) -> Iterator[str]:
    """A row for each label with what each of its runs is and takes."""
    yield from row("run", RUN_COLUMNS, WIDTHS)
    for label, runs in groups.items():
        resolved = runs[0].resolved
        if resolved is None:
            *above, line = row(label, (len(runs),), WIDTHS[:1])
            yield from (*above, f"{line}  not solved yet; see below")
            continue
        hours = speed.gpu_hours(gpu_flops(resolved))
        cells = (
            len(runs),
            count(resolved.parameters),
            resolved.steps,
            count(train_tokens(resolved)),
            _scientific(train_flops(resolved)),
            _hours(hours),
            _hours(hours / resolved.ranks),
        )
        yield from row(label, cells, WIDTHS)


def cost_lines(groups: RunsByLabel) -> Iterator[str]:
    """A row for each label with epochs, the share of evaluation, and a checkpoint's size, alone, kept and at worst."""
    yield from row("cost of each run", COST_COLUMNS, COST_WIDTHS)
    for run, resolved in solved(groups):
        seen = epochs(resolved)
        cells = (
            "?" if seen is None else f"{seen:.3g}",
            f"{heldout_flops(resolved) / gpu_flops(resolved):.1%}",
            *(f"{count(size(resolved))}B" for size in (checkpoint_bytes, disk_bytes, peak_disk_bytes)),
        )
        yield from row(run.label, cells, COST_WIDTHS)


def total_lines(plan: Plan, speed: Speed) -> Iterator[str]:
    """The whole study, and what its numbers assume."""
    resolved = [run.resolved for run in plan.runs if run.resolved is not None]
    hours = speed.gpu_hours(sum(map(gpu_flops, resolved)))
    extra = max(peak_disk_bytes(run) - disk_bytes(run) for run in resolved)
    yield from folded(
        f"total: {_scientific(sum(map(train_flops, resolved)))} FLOPs of training, "
        f"{_scientific(sum(map(heldout_flops, resolved)))} of evaluation; {_hours(hours)} GPU-hours, "
        f"{_hours(hours / plan.ranks)} hours one run at a time; {count(sum(map(disk_bytes, resolved)))}B of "
        f"checkpoints when all have finished, up to {count(extra)}B more for each run that is saving"
        + (f"; without {len(plan.runs) - len(resolved)} unsolved runs" if len(resolved) < len(plan.runs) else "")
    )
    yield from folded(
        f"Hours assume {speed.described()}, training and evaluation (eval.: its share) alike, without start-up, "
        "compiling and saving. FLOPs are those of training. Checkpoints hold weights and two Adam moments in fp32: one "
        "(saved), those of a finished run (kept), and at most while one is written beside those that it replaces."
    )


def text_lines(resolved: Iterable[ResolvedRun]) -> Iterator[str]:
    """What is trained on, for each data set; for one that is not prepared yet, what preparing it takes."""
    for needed in texts_needed(resolved):
        path = needed.dataset.path
        if is_prepared(needed.dataset):
            there = needed.dataset.split("train").n_tokens
            yield from folded(
                f"text: {path} has {count(there)} training tokens; the longest run sees {count(needed.train_tokens)}, "
                f"{needed.train_tokens / there:.3g} epochs"
            )
            continue
        hours = needed.prepare_core_hours
        yield from folded(
            f"text: {path} is not prepared yet. Once {count(needed.train_tokens)} tokens for the longest run, with the "
            f"held-out ones, take {count(needed.disk_bytes)}B on disk and {_hours(hours)} core-hours of `depth prep` "
            f"({_hours(hours / SIXTEEN)} hours on {SIXTEEN} cores) at {count(PREPARED_TOKENS_PER_CORE_SECOND)} tokens "
            "per second and core (measured: docs/performance.md), beside the download"
        )


def repeated_text(groups: RunsByLabel) -> Iterator[Remark]:
    """Runs that see their training text more than once."""
    for run, resolved in solved(groups):
        seen = epochs(resolved)
        if seen is not None and seen > 1:
            there = resolved.dataset.split("train").n_tokens
            yield run.label, f"{count(train_tokens(resolved))} tokens out of {count(there)}, {seen:.3g} epochs"


def _scientific(number: float) -> str:
    return f"{number:.2e}".replace("e+", "e")


def _hours(hours: float) -> str:
    return f"{hours:,.0f}" if hours >= 100 else f"{hours:.2g}" if hours >= 0.01 else "<0.01"
