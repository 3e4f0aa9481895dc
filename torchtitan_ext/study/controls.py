"""Runs that test an explanation of a variant's result, as cases made from the baseline's and the variant's.

The protocol is that of "Adding a 4th Signal to Transformer Attention", section 5: is it the gradient across layers that
helps, or the capacity, and what would the time that a step takes have bought?
"""

from dataclasses import replace

from torchtitan_ext.errors import UserError
from torchtitan_ext.study.cases import Case, Group
from torchtitan_ext.study.check import control_label, detached_form
from torchtitan_ext.study.solve import FFN_STEP, Match, equal_steps, smallest_multiple


def detached(variant: Case, place: str) -> Case:
    """The variant as it is, with the same number of steps, but without its gradient across layers."""
    form = detached_form(variant.variant)
    assert form is not None  # the study's names were checked
    name, options = form
    own = {"model.variant": name, **{f"depth.{option}": value for option, value in options.items()}}
    return replace(
        variant,
        entry=control_label(variant.entry, "detached"),
        variant=name,
        control="detached",
        keys=variant.known_keys.with_values(own, place),
        matches=(),
        intended=variant.intended | own.keys(),
        place=place,
    )


def wider(group: Group, variant: Case, width: int | None, place: str) -> Case:
    """A baseline of ``width``, or else with the smallest feed-forward, that has the variant's parameters or more.

    It trains for as long as the baseline. Raises ``UserError`` where the baseline is no smaller than the variant, or
    the ``width`` not enough.
    """
    label = control_label(variant.entry, "wider")
    what = f"{place}: {label} at {group.size}"

    def parameters(**widths: int) -> int:
        return group.reference.architecture.parameters(group.shape(group.reference_run, widths, what))

    if width is not None:
        own, got = {"model.width": width}, parameters(width=width)
    elif group.reference.parameters < variant.parameters:
        ffn_width = smallest_multiple(lambda number: parameters(ffn_width=number), variant.parameters, FFN_STEP)
        own, got = {"model.ffn_width": ffn_width}, parameters(ffn_width=ffn_width)
    else:
        raise UserError(
            f"{what}: the baseline has {group.reference.parameters:,} parameters, no fewer than the variant's "
            f"{variant.parameters:,}; give a `width:` or drop this control"
        )
    match = Match("parameters", own, got, variant.parameters, at_least=True)
    match.check(0.0, what)
    base = group.baseline()
    return replace(
        base,
        entry=label,
        of=variant.entry,
        control="wider",
        keys=base.known_keys.with_values(own, place),
        parameters=got,
        matches=(match,),
        intended=frozenset({"model.width", "model.ffn_width"}),
        place=place,
    )


def wall_clock(group: Group, variant: Case, seconds: tuple[float, float] | None, begun: int | None, place: str) -> Case:
    """The baseline with the variant's training time.

    Args:
        group: the size and learning rate.
        variant: the variant's case.
        seconds: measured step times of the baseline and the variant; None while one is missing.
        begun: length of such a run that has begun, which stays, whatever seeds measured since say: runs that differ in
            seed alone have one length.
        place: where the study asks for it.
    """
    base = group.baseline()
    case = replace(
        base, entry=control_label(variant.entry, "wall_clock"), of=variant.entry, control="wall_clock", place=place
    )
    if seconds is None:
        return replace(case, keys=None)
    what = f"{place}: {case.entry} at {group.size}"
    own, other = seconds
    wanted = other * variant.known_keys.values["training.steps"]
    steps = begun or equal_steps(wanted, own, what)
    match = Match("seconds of training", {"training.steps": steps}, own * steps, wanted)
    if not begun:
        match.check(group.study.budget.tolerance, what)
    return replace(
        case,
        keys=base.known_keys.with_values(group.recipe(steps, group.reference.batch_tokens), place),
        matches=(match,),
        intended=frozenset({"training.steps", "optimizer.warmup_steps"}),
    )
