"""What differs between two planned runs."""

from collections.abc import Sequence
from typing import Any

from torchtitan_ext.errors import UserError
from torchtitan_ext.resolve import ResolvedRun

Difference = tuple[str, Any, Any]
"""A run key with a run's own value and its baseline's; None where the key is not there."""

NAMES = {"name", "folder", "logging.baseline", "training.stop_behind", "training.stop_behind_at"}
"""Keys that say which run it is and what it is compared with, not what is trained."""

SHAPE = ("layers", "width", "heads", "kv_heads", "ffn_width")


def differences_between(run: ResolvedRun, baseline: ResolvedRun | None) -> tuple[Difference, ...]:
    """Return the run keys whose values differ; none without a baseline.

    Widths and head counts are compared as the models have them, whether given or the size's, but for those that follow
    from two different sizes.
    """
    if baseline is None:
        return ()
    own, other = run.run.flat(), baseline.run.flat()
    if run.run.model.size == baseline.run.model.size:
        own |= {f"model.{name}": getattr(run.shape, name) for name in SHAPE}
        other |= {f"model.{name}": getattr(baseline.shape, name) for name in SHAPE}
    keys = [key for key in {**own, **other} if key not in NAMES]
    return tuple((key, own.get(key), other.get(key)) for key in keys if own.get(key) != other.get(key))


def differences_in_shape(run: ResolvedRun, baseline: ResolvedRun) -> tuple[Difference, ...]:
    """Return the layers, widths and head counts that differ, whether given or following from two sizes."""
    pairs = [(f"model.{name}", getattr(run.shape, name), getattr(baseline.shape, name)) for name in SHAPE]
    return tuple((key, own, other) for key, own, other in pairs if own != other)


def check_intended(differences: Sequence[Difference], intended: frozenset[str], what: str) -> None:
    """Raise ``UserError``, starting with ``what``, for a difference that the study does not ask for."""
    for key, own, other in differences:
        if key not in intended:
            raise UserError(
                f"{what} differs from its baseline in {key} ({own} against {other}), which the study does not ask "
                f"for; put {key} under `set:` of the study, for all runs"
            )
