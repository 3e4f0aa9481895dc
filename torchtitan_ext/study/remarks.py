"""What a plan's numbers alone do not say: runs outside the budget, and odd widths."""

from collections.abc import Iterator

from torchtitan_ext.cost import train_flops, train_tokens
from torchtitan_ext.machines import devices_of
from torchtitan_ext.recipe import law_batch_tokens, recipe_for
from torchtitan_ext.resolve import ResolvedRun
from torchtitan_ext.study.layout import Remark
from torchtitan_ext.study.planned import Plan, RunsByLabel, solved
from torchtitan_ext.study.solve import FFN_STEP, HEAD_STEP

HELD = {
    "tokens": ("tokens",),
    "params": ("parameters", "tokens"),
    "flops": ("training FLOPs",),
    "wall_clock": ("tokens",),
}
"""What a budget makes equal before anything is measured."""


def outside_the_budget(plan: Plan) -> Iterator[Remark]:
    """Runs that have more or less than their baseline of what the budget makes equal: controls, by their purpose."""
    budget = plan.study.budget
    for pair in plan.compared():
        own, other = _amounts(pair.resolved), _amounts(pair.baseline)
        shares = {name: own[name] / other[name] - 1 for name in HELD[budget.match]}
        parts = [f"{share:+.1%} {name}" for name, share in shares.items() if abs(share) > budget.tolerance]
        if parts:
            yield pair.run.label, f"{' and '.join(parts)} against {pair.against}"


def _amounts(run: ResolvedRun) -> dict[str, int]:
    return {"parameters": run.parameters, "tokens": train_tokens(run), "training FLOPs": train_flops(run)}


def odd_widths(groups: RunsByLabel) -> Iterator[Remark]:
    """Runs with a width that matrix units have to pad, so that their speed says less about their variant."""
    for run, resolved in solved(groups):
        shape = resolved.shape
        odd = [f"heads of {shape.head_dim}"] if shape.head_dim % HEAD_STEP else []
        odd += [f"a feed-forward of {shape.ffn_width}"] if shape.ffn_width % FFN_STEP else []
        if odd:
            yield run.label, " and ".join(odd)


def unlike_machines(plan: Plan) -> Iterator[Remark]:
    """Wall-clock controls whose length follows from step times of unlike devices, as far as those were noted."""
    for label, runs in plan.by_label().items():
        after = dict.fromkeys(name for run in runs for name in run.after)
        devices = {plan.run(name).label: devices_of(plan.run(name).folder) for name in after}
        if len(frozenset().union(*devices.values())) > 1:
            parts = [f"{one} on {' and '.join(sorted(kinds))}" for one, kinds in devices.items() if kinds]
            yield label, f"step times of {', '.join(parts)} say more of the machines than of the variant"


def stepped_batches(groups: RunsByLabel) -> Iterator[Remark]:
    """In a study of several sizes, how the recipe's batches, which are powers of two, depart from their smooth law."""
    baselines = {planned.label: run for planned, run in solved(groups) if planned.baseline is None}
    if len({run.run.model.size for run in baselines.values()}) < 2:
        return
    for label, run in baselines.items():
        tokens, seq_len = train_tokens(run), run.run.data.seq_len
        recipe = recipe_for(run.shape, seq_len=seq_len, total_tokens=tokens)
        if recipe.batch_tokens != run.batch_tokens:
            continue  # set by hand
        law = law_batch_tokens(run.shape, tokens)
        yield (
            label,
            f"{run.batch_tokens:,} tokens, {run.batch_tokens / law - 1:+.0%} against {law:,.0f}; "
            f"optimizer.beta2 {run.run.optimizer.beta2:g}",
        )
