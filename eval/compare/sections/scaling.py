"""Scaling laws: their constants, their picture, and the compute-equivalent gain."""

from eval.compare.numbers import NONE, between, large, loss, ratio
from eval.compare.page import Block, Bullets, Heading, Picture, Pictures, Table, Text, name
from eval.compare.pictures import scaling_picture
from eval.compare.sections.words import loss_name
from eval.scaling.ladder import COMPUTE
from eval.scaling.results import Gain, Interval, LadderResult, ScalingResult

_SYMBOLS = {"alpha": "α", "beta": "β", "gamma": "γ"}


def scaling_blocks(scaling: ScalingResult | None) -> list[Block]:
    if scaling is None:
        return []
    measure = loss_name(scaling.measure)
    fitted = [ladder for ladder in scaling.ladders if ladder.constants]
    blocks: list[Block] = [Heading("Scaling over sizes")]
    refused = [f"{name(ladder.label)}: no law, {ladder.why_not}." for ladder in scaling.ladders if ladder.why_not]
    if fitted:
        blocks.append(Text(_law(scaling)))
    shown = scaling_picture(scaling.ladders, measure)
    lines = "Lines are the laws" if scaling.law == COMPUTE else "Lines are the lowest loss that a law has at a compute"
    explained = f" {lines}, shades their 95% intervals." if fitted else ""
    blocks += [
        Text(f"Each point is the mean over the seeds of one size and length.{explained}"),
        Pictures([Picture("scaling", shown, f"Final {measure} against training FLOPs.")]),
    ]
    blocks += [*_points(scaling.ladders, measure), *_constants(fitted, scaling), *_gains(fitted, scaling)]
    notes = [f"{name(ladder.label)}: {note}." for ladder in scaling.ladders for note in ladder.notes]
    if refused or notes:
        blocks += [Text("**Notes on the laws**"), Bullets([*refused, *notes])]
    return blocks


def _law(scaling: ScalingResult) -> str:
    how = (
        "fitted to the logarithm of the losses with the Huber loss (δ = 0.001), as in approach 3 of Hoffmann et al. "
        "2022. C is the FLOPs of the whole training (FLOPs per token × tokens, counted from the shapes)"
    )
    if scaling.law == COMPUTE:
        return (
            f"Each variant's final losses follow **L(C) = E + K · C^−γ**, {how}. The law holds along this ladder: for "
            "these sizes, each trained for as long as it was here."
        )
    return (
        f"Each variant's final losses follow **L(N, D) = E + A / N^α + B / D^β**, {how}; N is the number of all "
        "parameters, the embedding included (once, where it is the head too); D is the number of training tokens."
    )


def _points(ladders: list[LadderResult], measure: str) -> list[Block]:
    rows = [
        [
            name(ladder.label),
            name(point.size),
            *map(large, (point.parameters, point.tokens, point.flops)),
            loss(point.loss),
            str(point.runs),
        ]
        for ladder in ladders
        for point in ladder.points
    ]
    return [
        Table("scaling-points", ["run", "size", "parameters N", "tokens D", "FLOPs C", "loss", "seeds"], rows),
        Text(f"**loss**: final {measure}, mean over the seeds."),
    ]


def _constants(fitted: list[LadderResult], scaling: ScalingResult) -> list[Block]:
    if not fitted:
        return []
    names = list(fitted[0].constants)
    rows = [
        [name(ladder.label), *(_constant(ladder.constants[key]) for key in names), f"{100 * (ladder.error or 0):.2f}%"]
        for ladder in fitted
    ]
    return [
        Heading("The laws", 3),
        Table("scaling-laws", ["run", *(_SYMBOLS.get(key, key) for key in names), "error"], rows),
        Bullets(
            [
                "**E**: the loss that no compute would remove. In brackets: 95% intervals, from "
                f"{scaling.draws} fits to runs drawn anew with replacement, widened for the small number of runs.",
                "**error**: root mean square of what separates law and runs, relative to the loss.",
            ]
        ),
    ]


def _gains(fitted: list[LadderResult], scaling: ScalingResult) -> list[Block]:
    rows = [
        [name(ladder.label), name(gain.size), loss(gain.loss), *_gain(gain)]
        for ladder in fitted
        for gain in ladder.gains
    ]
    if not rows:
        return []
    bases = ", ".join(name(base) for base in dict.fromkeys(ladder.baseline for ladder in fitted if ladder.gains))
    path = "" if scaling.law == COMPUTE else " The baseline grows from its model of that size, N and D alike."
    return [
        Heading("Compute-equivalent gain", 3),
        Table("scaling-gain", ["run", "size", "loss by its law", "gain", "95% interval", "outside the data"], rows),
        Bullets(
            [
                f"**gain**: how many times the run's training FLOPs the baseline ({bases}) needs for the same loss, "
                f"each by its law; above 1 the run is better.{path} FLOPs count neither memory nor how fast a machine "
                "computes them.",
                "**95% interval**: from the same draws of runs for both, so that what is common to them cancels. An "
                "interval with 1 in it does not tell who is better.",
                "**outside the data**: the compute that the baseline needs, as a multiple of the most (or the least, "
                "divided by it) of its runs. **Far** is more than from one size to the next: do not build on it.",
            ]
        ),
    ]


def _gain(gain: Gain) -> list[str]:
    if gain.gain is None or gain.outside is None:
        return ["none: the baseline's law never has this loss", NONE, "**far**"]
    outside = "inside" if gain.outside == 1 else ratio(gain.outside) + (", **far**" if gain.far else "")
    return [ratio(gain.gain.value), between(gain.gain), outside]


def _constant(found: Interval) -> str:
    value = f"{found.value:.4g}"
    return value if found.low is None or found.high is None else f"{value} ({found.low:.3g} to {found.high:.3g})"
