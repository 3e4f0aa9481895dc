"""A plan as text of 80 columns."""

from collections.abc import Iterator

from torchtitan_ext.gpus import gpu_of
from torchtitan_ext.study.cost import Speed, disk_bytes, train_flops, train_tokens
from torchtitan_ext.study.differences import differences_in_shape
from torchtitan_ext.study.layout import Remark, folded, row, section, shown
from torchtitan_ext.study.parameter_table import added_groups, parameter_lines, unequally_decayed
from torchtitan_ext.study.planned import Plan, RunsByLabel
from torchtitan_ext.study.recipe_table import recipe_lines
from torchtitan_ext.study.remarks import odd_widths, outside_the_budget
from torchtitan_ext.units import count

BUDGETS = {
    "tokens": "equal tokens",
    "params": "equal parameters, equal tokens",
    "flops": "equal training FLOPs",
    "wall_clock": "equal tokens, and a baseline for each variant with its wall-clock",
}
WIDTHS = (5, 7, 7, 7, 7, 7, 7)


def plan_text(plan: Plan, speed: Speed | None = None) -> str:
    """Return the plan for people: its runs with their cost and recipe, what was solved, and what differs between them.

    Runs that differ in seed alone share a line. ``speed`` is what GPU-hours are estimated with.
    """
    speed = speed or Speed()
    groups = plan.by_label()
    study = plan.study
    processes = "process" if plan.ranks == 1 else "processes"
    parts = [
        [f"{study.name}: {len(plan.runs)} runs of {plan.ranks} {processes} each, in {study.folder}"],
        folded(f"budget: {BUDGETS[study.budget.match]}, within {study.budget.tolerance:.2%}"),
        [""],
        list(_table(groups, speed)),
        [""],
        list(_totals(plan, speed)),
        [""],
        list(recipe_lines(groups)),
        [""],
        list(parameter_lines(groups)),
        section("parameter groups that variants add", added_groups(groups)),
        section("decayed parameters, where not equal too", unequally_decayed(plan)),
        section("solved", _solved(groups)),
        section("outside the budget, as these controls ask", outside_the_budget(plan)),
        section("no multiple of 8, which alone may make a run slower", odd_widths(groups)),
        section("differs from the baseline in", _differences(plan)),
        section("waits", _waiting(plan, groups)),
    ]
    return "\n".join(line for part in parts for line in part)


def _table(groups: RunsByLabel, speed: Speed) -> Iterator[str]:
    yield from row("run", ("seeds", "params", "steps", "tokens", "FLOPs", "GPU-h", "disk"), WIDTHS)
    for label, runs in groups.items():
        resolved = runs[0].resolved
        if resolved is None:
            *above, line = row(label, (len(runs),), WIDTHS[:1])
            yield from (*above, f"{line}  not solved yet; see below")
            continue
        flops = train_flops(resolved)
        cells = (
            len(runs),
            count(resolved.parameters),
            resolved.steps,
            count(train_tokens(resolved)),
            _scientific(flops),
            _hours(speed.gpu_hours(flops)),
            count(disk_bytes(resolved)) + "B",
        )
        yield from row(label, cells, WIDTHS)


def _totals(plan: Plan, speed: Speed) -> Iterator[str]:
    resolved = [run.resolved for run in plan.runs if run.resolved is not None]
    flops = sum(map(train_flops, resolved))
    yield from folded(
        f"total: {_scientific(flops)} FLOPs, {_hours(speed.gpu_hours(flops))} GPU-hours, "
        f"{count(sum(map(disk_bytes, resolved)))}B on disk for the whole study"
        + (f" but its {len(plan.runs) - len(resolved)} unsolved runs" if len(resolved) < len(plan.runs) else "")
    )
    yield from folded(
        f"GPU-hours assume {speed.gpu} at {speed.mfu:.0%} of {gpu_of(speed.gpu).flops / 1e12:,.0f} TFLOP/s (dense "
        "BF16). Disk is what finished runs keep of checkpoints: weights and two Adam moments in fp32."
    )


def _solved(groups: RunsByLabel) -> list[Remark]:
    lines = []
    for label, runs in groups.items():
        for match in runs[0].matches:
            parts = [f"{key} {value}" for key, value in match.solved.items()]
            if "model.width" in match.solved and runs[0].resolved is not None:
                parts.append(f"heads of {runs[0].resolved.shape.head_dim}")
            parts.append(f"{match.got:,.0f} {match.quantity} against {match.wanted:,.0f} ({match.miss:+.2%})")
            lines.append((label, ", ".join(parts)))
    return lines


def _differences(plan: Plan) -> list[Remark]:
    """What differs, by entry where that is the same at all sizes and learning rates, else by label."""
    texts: dict[str, dict[str, str]] = {}
    for pair in plan.compared():
        differences = dict.fromkeys((*pair.run.differences, *differences_in_shape(pair.resolved, pair.baseline)))
        listed = ", ".join(f"{key} {shown(own)} ({shown(other)})" for key, own, other in differences)
        texts.setdefault(pair.run.entry, {})[pair.run.label] = listed or "nothing"
    lines: list[Remark] = []
    for entry, by_label in texts.items():
        same = len(set(by_label.values())) == 1
        lines += [(entry, next(iter(by_label.values())))] if same else list(by_label.items())
    return lines


def _waiting(plan: Plan, groups: RunsByLabel) -> list[Remark]:
    labels = {run.name: run.label for run in plan.runs}
    return [
        (label, f"for the step times of {' and '.join(dict.fromkeys(labels[name] for name in runs[0].after))}")
        for label, runs in groups.items()
        if runs[0].command is None
    ]


def _scientific(number: float) -> str:
    return f"{number:.2e}".replace("e+", "e")


def _hours(hours: float) -> str:
    return f"{hours:,.0f}" if hours >= 100 else f"{hours:.2g}" if hours >= 0.01 else "<0.01"
