"""A plan as text of 80 columns."""

from torchtitan_ext.gpus import Speed
from torchtitan_ext.study.cost_table import cost_lines, repeated_text, run_lines, text_lines, total_lines
from torchtitan_ext.study.differences import differences_in_shape
from torchtitan_ext.study.layout import Remark, folded, section, shown
from torchtitan_ext.study.parameter_table import added_groups, parameter_lines, unequally_decayed
from torchtitan_ext.study.planned import Plan, RunsByLabel
from torchtitan_ext.study.recipe_table import recipe_lines
from torchtitan_ext.study.remarks import odd_widths, outside_the_budget, stepped_batches, unlike_machines

BUDGETS = {
    "tokens": "equal tokens",
    "params": "equal parameters, equal tokens",
    "flops": "equal training FLOPs",
    "wall_clock": "equal tokens, and a baseline for each variant with its wall-clock",
}


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
        list(run_lines(groups, speed)),
        [""],
        list(cost_lines(groups)),
        [""],
        list(total_lines(plan, speed)),
        list(text_lines(run.resolved for run in plan.runs if run.resolved is not None)),
        section("sees text more than once", repeated_text(groups)),
        [""],
        list(recipe_lines(groups)),
        [""],
        list(parameter_lines(groups)),
        section("parameter groups that variants add", added_groups(groups)),
        section("decayed parameters, where not equal too", unequally_decayed(plan)),
        section("solved", _solved(groups)),
        section("outside the budget, as these controls ask", outside_the_budget(plan)),
        section("no multiple of 8, which alone may make a run slower", odd_widths(groups)),
        section("batches are powers of two: sizes depart from the recipe's law differently", stepped_batches(groups)),
        section("differs from the baseline in", _differences(plan)),
        section("measured on unlike machines", unlike_machines(plan)),
        section("waits", _waiting(plan, groups)),
    ]
    return "\n".join(line for part in parts for line in part)


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
