"""How a study stands, as a table of at most 80 columns."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from launch.study.state import RunState
from torchtitan_ext.units import count, duration

WIDTH = 80
HEADER = ("run", "state", "step", "loss", "held out", "tok/s", "GiB", "left", "vs base")


HOPELESS_BEHIND = 0.5
"""Nats per token behind the baseline, at the same step, from which a run is pointed out."""
HOPELESS_FROM = 0.1
"""Share of a run before which it is not judged: early losses differ for little reason."""


def status_table(
    states: Iterable[RunState], jobs: Mapping[str, tuple[str, str]] | None = None, disk: int | None = None
) -> str:
    """A line per run and then what needs words: why runs diverged, failed or wait, and which look hopeless.

    ``jobs`` are the runs' jobs in Slurm's queue, each with its id and state; ``disk`` the bytes of all checkpoints.
    """
    states = list(states)
    rows = [HEADER, *(_row(state) for state in states)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    widths[0] = min(widths[0], max(8, WIDTH - sum(widths[1:]) - 2 - (len(widths) - 2)))
    lines = [_line(row, widths) for row in rows]
    ended = sum(state.ended for state in states)
    taken = "" if disk is None else f"; {count(disk)}B of checkpoints"
    lines += ["", f"{ended} of {len(states)} ended{_time_left(states)}{taken}", *_queue(jobs or {})]
    return "\n".join([*lines, *filter(None, map(remark, states))])


def remark(state: RunState) -> str:
    """What the table has no column for."""
    name = state.run.name
    if state.state == "dropped":
        return f"{name} was dropped at step {state.step}: {state.reason}"
    behind = state.versus.get("vs_baseline/loss", 0.0)
    if not state.ended and behind > HOPELESS_BEHIND and state.step > HOPELESS_FROM * (state.steps or 0):
        at = state.versus["step"]
        return f"{name} looks hopeless: {behind:+.2f} nats against its baseline at step {at} (depth study drop)"
    if state.state in ("diverged", "failed"):
        return f"{name} {state.state} at step {state.step}: {state.reason or 'see its logs'}"
    if state.state == "waiting":
        return f"{name} waits for the step times of {', '.join(state.run.after)}"
    return ""


def _queue(jobs: Mapping[str, tuple[str, str]]) -> list[str]:
    """How many jobs Slurm has in which state."""
    if not jobs:
        return []
    numbers = Counter(dict(jobs.values()).values())
    by_state = ", ".join(f"{number} {state.lower()}" for state, number in numbers.items())
    return [f"jobs in Slurm's queue: {by_state}"]


def _row(state: RunState) -> tuple[str, ...]:
    training = state.training
    return (
        state.run.name,
        state.state,
        f"{state.step}/{'?' if state.steps is None else state.steps}",
        _number(training.get("loss_metrics/global_avg_loss"), "{:.3f}"),
        _number(state.heldout.get("heldout/loss"), "{:.3f}"),
        "" if not training else count(training.get("throughput/global_tokens_per_s", 0.0)),
        _number(training.get("memory/max_reserved(GiB)"), "{:.3g}"),
        "" if state.seconds_left is None else duration(state.seconds_left),
        _number(state.versus.get("vs_baseline/loss"), "{:+.3f}"),
    )


def _number(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    name = (
        row[0]
        if len(row[0]) <= widths[0]
        else f"{row[0][: widths[0] // 2 - 1]}…{row[0][-(widths[0] - widths[0] // 2) :]}"
    )
    cells = [name.ljust(widths[0]), row[1].ljust(widths[1])]
    cells += [cell.rjust(width) for cell, width in zip(row[2:], widths[2:], strict=True)]
    return f"{cells[0]}  {' '.join(cells[1:])}".rstrip()


def _time_left(states: Sequence[RunState]) -> str:
    """Training time that is left, at the FLOP/s that the study's runs have had so far."""
    flops = seconds = 0.0
    for state in states:
        flops += state.training.get("progress/train_flops", 0.0)
        seconds += state.training.get("progress/train_seconds", 0.0)
    open_runs = [state for state in states if not state.ended]
    if not open_runs or not flops or not seconds:
        return ""
    if any(state.run.resolved is None for state in open_runs):
        return ""
    left = 0.0
    for state in open_runs:
        resolved = state.run.resolved
        if resolved is not None:
            left += (resolved.steps - state.step) * resolved.batch_tokens * resolved.flops_per_token
    return f"; {duration(left * seconds / flops)} of training left, one run at a time"
