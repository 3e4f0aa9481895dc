"""Words that several sections share."""

from eval.compare.results import AtEqual

WHOLE = 0.98
"""A loss read at this share of a run or later is taken for its final one."""


def is_equal(found: AtEqual) -> bool:
    """Whether both whole runs cost the same, so that their final losses are the comparison."""
    return found.spent is not None and WHOLE <= found.spent <= 1 / WHOLE
