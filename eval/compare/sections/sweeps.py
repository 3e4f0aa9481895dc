"""Final losses over the learning rate, of the rows that were trained at several."""

from eval.compare.numbers import NONE, loss
from eval.compare.page import Block, Bullets, Heading, Picture, Pictures, Table, name
from eval.compare.pictures import sweep_picture
from eval.compare.results import FamilyResult, SweepResult
from eval.compare.sections.words import loss_name
from eval.compare.sweeps import Rate


def sweep_blocks(family: FamilyResult, key: str) -> list[Block]:
    """Nothing where nothing was swept. ``key`` starts the names of the picture files."""
    if not family.sweeps:
        return []
    measure = loss_name(family.measure)
    rows = [_row(swept, rate) for swept in family.sweeps for rate in swept.sweep.rates]
    picture = Picture(f"{key}-sweep", sweep_picture(family, measure), f"Final {measure} against the learning rate.")
    return [
        Heading("Learning rates", 3),
        Table("learning-rates", ["run", "learning rate", "seeds", "loss", "lowest", "highest", ""], rows),
        Bullets(
            [
                "Each of these rows was trained at several learning rates, and is compared at its **best** one "
                "everywhere else in this report. **loss**: the mean over the seeds that all its rates have (or over "
                "its own, where they have none in common); **lowest** and **highest** of them. A rate at which runs "
                "diverged is the best only where runs diverged at all rates.",
                "The rate was chosen by the losses that are then compared, on the same seeds. That favours an arm that "
                "tried more rates than another. New seeds at the chosen rates would tell without this.",
            ]
        ),
        Pictures([picture]),
    ]


def _row(swept: SweepResult, rate: Rate) -> list[str]:
    seeds = f"{rate.runs}" + (f" + {rate.diverged} diverged" if rate.diverged else "")
    said = NONE
    if rate.rate == swept.sweep.best:
        said = "**best**" + (f", the {swept.edge} tried" if swept.edge else "")
    return [name(swept.label), f"{rate.rate:g}", seeds, loss(rate.loss), loss(rate.low), loss(rate.high), said]
