"""What a plan's numbers alone do not say: runs outside the budget, odd widths, parameters that learn nothing."""

from collections.abc import Iterator, Mapping

from torchtitan_ext.resolve import ResolvedRun
from torchtitan_ext.study.cost import train_flops, train_tokens
from torchtitan_ext.study.planned import Plan, PlannedRun
from torchtitan_ext.study.solve import FFN_STEP, HEAD_STEP

Groups = Mapping[str, list[PlannedRun]]
Remark = tuple[str, str]
"""A label, and what is to be said about its runs."""

HELD = {
    "tokens": ("tokens",),
    "params": ("parameters", "tokens"),
    "flops": ("training FLOPs",),
    "wall_clock": ("tokens",),
}
"""What a budget makes equal before anything is measured."""


def outside_the_budget(plan: Plan, groups: Groups) -> Iterator[Remark]:
    """Runs that have more or less than their baseline of what the budget makes equal: controls, by their purpose."""
    budget = plan.study.budget
    for label, runs in groups.items():
        run = runs[0]
        if run.resolved is None or run.baseline is None:
            continue
        baseline = plan.run(run.baseline)
        assert baseline.resolved is not None
        own, other = _amounts(run.resolved), _amounts(baseline.resolved)
        shares = {name: own[name] / other[name] - 1 for name in HELD[budget.match]}
        parts = [f"{share:+.1%} {name}" for name, share in shares.items() if abs(share) > budget.tolerance]
        if parts:
            yield label, f"{' and '.join(parts)} against {baseline.label}"


def _amounts(run: ResolvedRun) -> dict[str, int]:
    return {"parameters": run.parameters, "tokens": train_tokens(run), "training FLOPs": train_flops(run)}


def odd_widths(groups: Groups) -> Iterator[Remark]:
    """Runs with a width that matrix units have to pad, so that their speed says less about their variant."""
    for label, runs in groups.items():
        if runs[0].resolved is None:
            continue
        shape = runs[0].resolved.shape
        odd = [f"heads of {shape.head_dim}"] if shape.head_dim % HEAD_STEP else []
        odd += [f"a feed-forward of {shape.ffn_width}"] if shape.ffn_width % FFN_STEP else []
        if odd:
            yield label, " and ".join(odd)


def without_gradient(groups: Groups) -> Iterator[Remark]:
    """Runs with parameters that training teaches nothing."""
    for label, runs in groups.items():
        resolved = runs[0].resolved
        idle = 0 if resolved is None else resolved.variant.without_gradient(resolved.shape)
        if resolved is not None and idle:
            yield label, f"{idle:,} of {resolved.parameters:,} parameters ({idle / resolved.parameters:.1%})"
