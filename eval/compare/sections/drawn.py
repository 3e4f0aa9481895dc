"""Curves, and quality against cost."""

from collections.abc import Iterable

from eval.compare.numbers import COST_TITLES, UNITS
from eval.compare.page import Block, Folded, Heading, Picture, Pictures, Text, name
from eval.compare.pictures import cost_picture, difference_picture, loss_picture
from eval.compare.results import FamilyResult
from eval.compare.run import AXES
from eval.compare.sections.words import loss_name

_CUT = "The first tenth of training is left out."
_COSTS = ("step_seconds", "peak_memory_gib", "flops_per_token")


def picture_blocks(family: FamilyResult, key: str) -> list[Block]:
    """``key`` starts the names of the picture files."""
    blocks: list[Block] = []
    if family.baseline:
        costs = _pictures(
            (
                f"{key}-cost-{cost}",
                cost_picture(family, cost, COST_TITLES[cost]),
                f"Final loss against {COST_TITLES[cost]}.",
            )
            for cost in _COSTS
        )
        if costs:
            explained = (
                f"Each point is a row of the tables; {name(family.baseline)} is at (1, 0). Lower is better, further "
                "left is cheaper: what lies below and to the left of another point beats it. Bars are the 95% "
                "intervals of the main table; an open end has none."
            )
            blocks += [Heading("Quality against cost", 3), Text(explained), Pictures(costs)]
        gains = _pictures(
            (f"{key}-difference-{axis}", difference_picture(family, axis), f"Difference at equal {UNITS[axis]}.")
            for axis in AXES
        )
        if gains:
            explained = (
                f"The loss of each row less that of {name(family.baseline)} at the same budget, mean over the "
                f"seeds; the shade spans the lowest and the highest seed. Below zero is better. {_CUT} At equal "
                "FLOPs or time the run that costs more per step is behind in its schedule: where the baseline's "
                "learning rate falls first, the difference rises for a while whatever the variant is worth."
            )
            blocks += [Heading("Difference over training", 3), Text(explained), Pictures(gains)]
    losses = _losses(family, key, "curves", loss_name(family.measure))
    if losses:
        explained = f"Mean over the seeds; the shade spans the lowest and the highest seed. {_CUT}"
        blocks += [Heading("Loss over training", 3), Text(explained), Pictures(losses)]
    training = _losses(family, key, "training_curves", "training loss")
    if training and family.measure == "heldout":
        explained = f"The same, smoothed: each value is the mean over the last twentieth of the run. {_CUT}"
        blocks.append(Folded("Training loss over training", [Text(explained), Pictures(training)]))
    return blocks


def _losses(family: FamilyResult, key: str, curves: str, title: str) -> list[Picture]:
    return _pictures(
        (
            f"{key}-{curves.replace('_', '-')}-{axis}",
            loss_picture(family, axis, curves, title),
            f"{title.capitalize()} against {UNITS[axis]}.",
        )
        for axis in AXES
    )


def _pictures(made: Iterable[tuple[str, str | None, str]]) -> list[Picture]:
    return [Picture(file, svg, caption) for file, svg, caption in made if svg is not None]
