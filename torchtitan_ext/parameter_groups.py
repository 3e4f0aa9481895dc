"""Parameter groups: which parameters are trained with which learning rate and weight decay.

A model's parameters are in two groups of the standard part, matrices (decayed) and norms and embeddings (not decayed),
and in the groups that its variant declares for what it adds. The rates of the variant's groups are those of the
variant's source unless the section ``groups`` of the run file says otherwise.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from torchtitan_ext.errors import UserError, nearest

SETTINGS = ("lr", "lr_factor", "weight_decay", "weight_decay_factor")
"""What can be set for a group, as ``groups.NAME.SETTING``: absolute, or as a factor on the run's own value."""


@dataclass(frozen=True)
class Group:
    """Parameters that a variant adds and that are trained alike.

    Attributes:
        name: what the run file calls the group.
        pattern: regular expression found in the full names of its parameters and in no other's, such as
            ``r"_connection\\.mix$"``.
        parameters: how many numbers these parameters hold.
        lr, weight_decay: absolute values; None where the factor counts.
        lr_factor, weight_decay_factor: factors on the run's peak learning rate and on its weight decay.
    """

    name: str
    pattern: str
    parameters: int
    lr: float | None = None
    lr_factor: float = 1.0
    weight_decay: float | None = None
    weight_decay_factor: float = 1.0

    def __str__(self) -> str:
        lr = f"{self.lr_factor:g} × the run's" if self.lr is None else f"{self.lr:g}"
        decay = f"{self.weight_decay_factor:g} × the run's" if self.weight_decay is None else f"{self.weight_decay:g}"
        return f"{self.name}: {self.parameters:,} parameters, learning rate {lr}, weight decay {decay}"


@dataclass(frozen=True)
class TrainedGroup:
    """A group with its peak learning rate and weight decay; a parameter belongs to the first group that matches."""

    name: str
    pattern: str
    parameters: int
    lr: float
    weight_decay: float


def with_settings(
    groups: Sequence[Group], settings: Mapping[str, float], where: Callable[[str], str]
) -> tuple[Group, ...]:
    """``groups`` with the settings of a run file, which are by ``NAME.SETTING``.

    ``where`` says where the key ``groups.NAME.SETTING`` was given. Raises ``UserError`` for a group that the variant
    does not have, and where a value and its factor are both given.
    """
    known = {group.name: group for group in groups}
    for key, value in settings.items():
        name, _, setting = key.partition(".")
        place = where(f"groups.{key}")
        if name not in known:
            hint = nearest(name, known) if known else "the variant adds no parameters"
            raise UserError(f"{place}: groups.{key} is not for a parameter group of the variant; {hint}")
        other = setting.removesuffix("_factor") if setting.endswith("_factor") else f"{setting}_factor"
        if f"{name}.{other}" in settings:
            raise UserError(f"{place}: groups.{key} and groups.{name}.{other} both set one value; keep one")
        change: dict[str, float | None] = {setting: value}
        if setting.endswith("_factor"):
            change[other] = None  # the factor asked for replaces an absolute value of the source's
        known[name] = replace(known[name], **change)  # type: ignore[arg-type]
    return tuple(known.values())


def trained_groups(
    standard: Mapping[str, int], added: Sequence[Group], *, tied: bool, lr: float, weight_decay: float
) -> tuple[TrainedGroup, ...]:
    """All groups of a model, the variant's first.

    ``standard`` has the numbers of parameters of the standard part: ``"matrices"`` and ``"norms and embeddings"``.
    OLMo-core leaves embeddings undecayed, nanoGPT everything with fewer than two axes: norms and biases.
    """
    undecayed = r"norm\.|\.bias$|^(tok|position)_embeddings\."
    if tied:
        undecayed += r"|^lm_head\."
    groups = [
        TrainedGroup(
            group.name,
            group.pattern,
            group.parameters,
            lr * group.lr_factor if group.lr is None else group.lr,
            weight_decay * group.weight_decay_factor if group.weight_decay is None else group.weight_decay,
        )
        for group in added
    ]
    names = ("norms and embeddings", "matrices")
    for name, pattern, decay in zip(names, (undecayed, ".*"), (0.0, weight_decay), strict=True):
        groups.append(TrainedGroup(name, pattern, standard[name], lr, decay))
    return tuple(groups)


def group_of(parameter: str, groups: Sequence[TrainedGroup]) -> TrainedGroup:
    """The group that trains the parameter of that full name."""
    return next(group for group in groups if re.search(group.pattern, parameter))
