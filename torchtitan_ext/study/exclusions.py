"""Which runs a study leaves out."""

from collections.abc import Sequence

from torchtitan_ext.errors import UserError
from torchtitan_ext.study.schema import Study


class Exclusions:
    """Which runs the study leaves out, and which of its exclusions were used."""

    def __init__(self, study: Study) -> None:
        self.study = study
        self.used = [False] * len(study.exclude)

    def hold(self, labels: Sequence[str], size: str, lr: float | None, seed: int) -> bool:
        """Say whether a run that goes by ``labels`` (an entry's own, for a control the controlled entry's too) is left
        out."""
        found = False
        for number, exclusion in enumerate(self.study.exclude):
            if (
                exclusion.variant in (None, *labels)
                and exclusion.size in (None, size)
                and exclusion.lr in (None, lr)
                and exclusion.seed in (None, seed)
            ):
                self.used[number] = found = True
        return found

    def check_all_used(self) -> None:
        for number, used in enumerate(self.used):
            if not used:
                raise UserError(
                    f"{self.study.origin('exclude', number)}: exclude: no run of the study has all of this; correct it "
                    "or drop it"
                )
