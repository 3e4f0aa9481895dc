"""The parameters of a plan's models by how they are trained: how many are decayed, how many get no gradient, and with
which rates those are trained that a variant adds."""

from collections.abc import Iterator

from torchtitan_ext.parameter_groups import TrainedGroup
from torchtitan_ext.resolve import ResolvedRun
from torchtitan_ext.study.layout import Remark, row
from torchtitan_ext.study.planned import Plan, RunsByLabel, solved

COLUMNS = ("all", "decayed", "undecayed", "no gradient")
WIDTHS = (12, 12, 12, 12)


def parameter_lines(groups: RunsByLabel) -> Iterator[str]:
    """A row for each label whose runs are solved. What gets no gradient is among the decayed and the undecayed."""
    yield from row("parameters", COLUMNS, WIDTHS)
    for run, resolved in solved(groups):
        decayed = _decayed(resolved)
        idle = resolved.architecture.variant.without_gradient(resolved.shape)
        numbers = (resolved.parameters, decayed, resolved.parameters - decayed, idle)
        yield from row(run.label, [f"{number:,}" for number in numbers], WIDTHS)


def added_groups(groups: RunsByLabel) -> Iterator[Remark]:
    """The parameter groups that variants add, with their rates."""
    for run, resolved in solved(groups):
        if resolved.groups:
            own = {group.name for group in resolved.groups}
            yield run.label, "; ".join(_described(group) for group in resolved.parameter_groups() if group.name in own)


def unequally_decayed(plan: Plan) -> Iterator[Remark]:
    """Where parameters are made equal: runs with more or fewer decayed ones than their baseline."""
    if plan.study.budget.match != "params":
        return
    for pair in plan.compared():
        own, other = _decayed(pair.resolved), _decayed(pair.baseline)
        share = (own - other) / pair.baseline.parameters
        if abs(share) > plan.study.budget.tolerance:
            yield pair.run.label, f"{own - other:+,} against {pair.against}, {share:+.1%} of its parameters"


def _decayed(resolved: ResolvedRun) -> int:
    return sum(group.parameters for group in resolved.parameter_groups() if group.weight_decay)


def _described(group: TrainedGroup) -> str:
    decay = f"weight decay {group.weight_decay:g}" if group.weight_decay else "no weight decay"
    return f"{group.name}, {group.parameters:,}, learning rate {group.lr:.3g}, {decay}"
