"""A plan in words and columns, for a terminal of 80."""

from collections.abc import Iterable, Sequence

from torchtitan_ext.cost import (
    checkpoint_bytes,
    disk_bytes,
    epochs,
    gpu_flops,
    heldout_flops,
    peak_disk_bytes,
    train_tokens,
)
from torchtitan_ext.gpus import Gpu, Speed
from torchtitan_ext.plan.plan import Need, tokens_per_second
from torchtitan_ext.resolve import ResolvedRun
from torchtitan_ext.titan.rehearsal import PARTS
from torchtitan_ext.units import count, duration

GIB = 2**30


def head(resolved: ResolvedRun, name: str, gpu: Gpu) -> str:
    """What is planned, on what."""
    run, ranks, replicate = resolved.run, resolved.ranks, resolved.run.parallelism.replicate
    sequences, micro_batch = resolved.batch_tokens // run.data.seq_len, run.training.micro_batch
    assert micro_batch is not None
    passes = sequences // ranks // micro_batch
    copies = f"{replicate} copies of the model, each" if replicate > 1 else "one copy of the model"
    return "\n".join(
        [
            f"{run.name}: {run.model.size} {run.model.variant}",
            f"  {resolved.parameters:,} parameters, {resolved.flops_per_token / 1e6:,.0f} MFLOPs per token",
            f"  {ranks} x {name} ({gpu.memory / 1e9:.0f} GB, {gpu.flops / 1e12:.0f} TFLOP/s bf16), "
            f"{copies} over {ranks // replicate}",
            f"  a step is {sequences} sequences of {run.data.seq_len} tokens; "
            f"per GPU {passes} x {micro_batch} (passes x micro-batch)",
            f"  checkpointing {run.training.activation_checkpoint}"
            + (", compiled: memory is an upper bound" if run.training.compile else ""),
        ]
    )


def memory_table(needs: Sequence[Need], gpu: Gpu) -> str:
    """GiB per GPU by part for each run, and the largest micro-batch that fits."""
    lines = [""]

    def row(label: str, values: Iterable[str]) -> None:
        lines.append(f"{label:<22}" + "".join(f"{value:>22}" for value in values))

    row("GiB per GPU", [need.resolved.run.model.variant for need in needs])
    for part in PARTS:
        sizes = [need.memory.training[part] for need in needs]
        if any(sizes):
            row(f"  {part}", map(_gib, sizes))
    row("peak in training", [_gib(sum(need.memory.training.values())) for need in needs])
    held_out = [need.memory.heldout for need in needs if need.memory.heldout is not None]
    if held_out:
        row("peak in held-out", [_gib(sum(parts.values())) for parts in held_out])
    row("that tensors may fill", [_gib(gpu.usable) for _ in needs])
    row("largest micro-batch", [str(need.largest or "none fits") for need in needs])
    row("  and its peak", [_gib(need.largest_peak) if need.largest else "" for need in needs])
    return "\n".join(lines)


def _gib(size: float) -> str:
    return f"{size / GIB:.2f}"


def speed(runs: Sequence[ResolvedRun], assumed: Speed) -> str:
    """Tokens/s in training, and hours and GPU-hours with held-out measurements, of each run."""
    tokens = train_tokens(runs[0])
    share = heldout_flops(runs[0]) / gpu_flops(runs[0])
    length = f"{runs[0].steps:,} steps, {count(tokens)} tokens"
    lines = ["", f"{length}, at an MFU of {assumed.mfu:.0%}; {share:.1%} of the time is evaluation:"]
    for resolved in runs:
        rate = tokens_per_second(resolved, assumed)
        hours = assumed.gpu_hours(gpu_flops(resolved))
        lines.append(
            f"  {resolved.run.model.variant:<24} {count(rate):>7} tokens/s  "
            f"{duration(hours / resolved.ranks * 3600):>7}  {hours:,.1f} GPU-hours"
        )
    return "\n".join(lines)


def disk_and_text(resolved: ResolvedRun) -> str:
    """What the run keeps on disk, and how often it sees its text."""
    lines = [
        f"checkpoints: {count(checkpoint_bytes(resolved))}B each, {count(disk_bytes(resolved))}B at the end, "
        f"{count(peak_disk_bytes(resolved))}B at most"
    ]
    seen = epochs(resolved)
    if seen is not None:
        there = resolved.dataset.split("train").n_tokens
        lines.append(f"text: {seen:.3g} epochs of the {count(there)} tokens in {resolved.dataset.path}")
        if seen > 1:
            lines.append("the run sees its text more than once: prepare more, or train on fewer tokens")
    return "\n".join(["", *lines])
