"""What a study file may say: one pydantic model per mapping, each field with its limits and a one-line description."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from torchtitan_ext.run_file.schema import Text, Whole
from torchtitan_ext.study.yaml_lines import Location, Places, place_of

CONTROLS = ("detached", "wider", "wall_clock")
"""Kinds of controls: the first is another form of the variant, the others of the baseline."""


def problem(message: str) -> PydanticCustomError:
    """An error whose message goes on from "key is value;"."""
    return PydanticCustomError("problem", "{message}", {"message": message})


def _label(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", value):
        raise problem("must hold only letters, digits, '.', '_' and '-', and not begin with '.' or '-'")
    if len(value) > 100:
        raise problem("must have 100 characters at most, since it becomes part of a folder's name")
    return value


def _folder(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    if not value or not value.isprintable():
        raise problem("must be the path of a folder")
    if re.search("[{}]", value.replace("{name}", "")):
        raise problem("the only part in braces that is filled in is {name}")
    return Path(value)


def _short_for(key: str) -> BeforeValidator:
    """Let a mapping that has no more than ``key`` be written as its value alone."""
    return BeforeValidator(lambda value: {key: value} if isinstance(value, str) else value)


def _distinct(values: list[Any]) -> list[Any]:
    for value in values:
        if values.count(value) > 1:
            raise problem(f"{value} is in it twice; keep one")
    return values


Label = Annotated[str, AfterValidator(_label)]
Seed = Annotated[Whole, Field(ge=0)]
Rate = Annotated[float, Field(gt=0)]
SetKeys = Annotated[dict[str, Any], Field(default={})]


class _Mapping(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Entry(_Mapping):
    """One line of the comparison: a variant, with its options."""

    variant: Text = Field(description="name of the variant")
    name: Label | None = Field(default=None, description="what the entry is called here; null: the variant's name")
    size: Text | None = Field(
        default=None, description="its own size, where the study has one size and the baseline keeps that"
    )
    depth: dict[str, int | float | bool | Text] = Field(default={}, description="options of the variant")
    set: SetKeys = Field(description="run keys that this entry alone has, such as a learning rate of its own")

    @property
    def label(self) -> str:
        return self.name or self.variant


class SizeEntry(_Mapping):
    """A size of the study."""

    size: Text = Field(description="name of the size")
    set: SetKeys = Field(description="run keys that all runs of this size have")


class Budget(_Mapping):
    """What every run of a size has as much of as the baseline."""

    match: Literal["tokens", "params", "flops", "wall_clock"] = Field(
        default="tokens", description="what is made equal"
    )
    by: Literal["ffn_width", "width"] = Field(default="ffn_width", description="what is solved to match params")
    tolerance: float = Field(default=0.005, ge=0, lt=1, description="largest share by which a match may miss")

    @model_validator(mode="after")
    def _by_needs_params(self) -> Self:
        if "by" in self.model_fields_set and self.match != "params":
            raise problem(f"only match: params is solved by a width, and match is {self.match}; drop 'by'")
        return self


class Control(_Mapping):
    """A run that tests an explanation of a variant's result. One kind each."""

    detached: Label | None = Field(default=None, description="the variant with its gradient across layers cut")
    wider: Label | None = Field(default=None, description="a baseline with at least the variant's parameters")
    wall_clock: Label | None = Field(default=None, description="the baseline with the variant's training time")
    width: Annotated[Whole, Field(gt=0)] | dict[str, Annotated[Whole, Field(gt=0)]] | None = Field(
        default=None,
        description="model width of the wider baseline, with several sizes one for each as {SIZE: WIDTH}; null: its "
        "feed-forward width is solved",
    )

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        kinds = [kind for kind in CONTROLS if getattr(self, kind) is not None]
        if len(kinds) != 1:
            raise problem("a control has exactly one of detached, wider and wall_clock, each with a variant's label")
        if self.width is not None and kinds != ["wider"]:
            raise problem("width belongs to the control wider")
        return self

    @property
    def kind(self) -> str:
        return next(kind for kind in CONTROLS if getattr(self, kind) is not None)

    @property
    def of(self) -> str:
        """Label of the entry that it is a control of."""
        return getattr(self, self.kind)

    def width_at(self, size: str) -> int | None:
        """The width of the wider baseline at ``size``, which a mapping must have."""
        return self.width[size] if isinstance(self.width, dict) else self.width


class Exclusion(_Mapping):
    """Runs to leave out: those that agree with every key given here."""

    variant: Label | None = Field(default=None, description="label of an entry, which takes its controls along")
    size: Text | None = Field(default=None, description="name of the size")
    seed: Seed | None = Field(default=None, description="seed")
    lr: Rate | None = Field(default=None, description="learning rate")

    @model_validator(mode="after")
    def _not_everything(self) -> Self:
        if not self.model_fields_set:
            raise problem("an exclusion needs at least one of variant, size, seed and lr")
        return self


class Stop(_Mapping):
    """When a run is given up."""

    behind: float = Field(gt=0, description="how far behind the baseline's loss, in nats per token")
    at_step: Whole = Field(gt=0, description="at which step this is judged")


class Study(_Mapping):
    """A study. Places of its keys are kept for error messages."""

    name: Label = Field(description="name of the study")
    base: Text = Field(description="run file that all runs start from, relative to this file")
    folder: Annotated[Path, BeforeValidator(_folder)] = Field(
        default=Path("runs/{name}"),
        validate_default=True,
        description="where the run folders go; {name} stands for the name",
    )
    variants: list[Annotated[Entry, _short_for("variant")]] = Field(
        min_length=1, description="entries: a variant's name, or a mapping"
    )
    sizes: list[Annotated[SizeEntry, _short_for("size")]] | None = Field(
        default=None, min_length=1, description="sizes, each a name or a mapping; null: the base's"
    )
    seeds: Annotated[list[Seed], AfterValidator(_distinct)] = Field(
        default=[0], min_length=1, description="seeds: of the weights and of the data order alike"
    )
    learning_rates: Annotated[list[Rate], AfterValidator(_distinct)] | None = Field(
        default=None, min_length=1, description="peak learning rates; null: the base's or the recipe's"
    )
    set: SetKeys = Field(description="run keys that all runs have")
    baseline: Label = Field(description="label of the entry that every run is compared with")
    budget: Budget = Field(default=Budget(), description="what is made equal between runs")
    controls: list[Control] = Field(default=[], description="controls, each one of the kinds below")
    exclude: list[Exclusion] = Field(default=[], description="runs to leave out")
    stop: Stop | None = Field(default=None, description="when a run is given up as diverged")
    retries: Whole = Field(default=2, ge=0, description="how often a crashed run is started again")
    _file: Path = PrivateAttr(default=Path("study"))
    _places: Places = PrivateAttr(default={})

    @field_validator("folder")
    @classmethod
    def _fill_in_name(cls, folder: Path, info: ValidationInfo) -> Path:
        return Path(str(folder).replace("{name}", info.data.get("name", "{name}")))

    @property
    def file(self) -> Path:
        """The study file."""
        return self._file

    @property
    def base_file(self) -> Path:
        """The run file that all runs start from."""
        return Path(os.path.normpath(self._file.parent / self.base))

    def entry(self, label: str) -> Entry:
        """The entry called ``label``, which must be there."""
        return next(entry for entry in self.variants if entry.label == label)

    def all_controls(self) -> Iterator[tuple[Control, Location]]:
        """The controls that are listed and those that the budget brings along, each with the location of its key."""
        for number, control in enumerate(self.controls):
            yield control, ("controls", number)
        if self.budget.match == "wall_clock":
            for entry in self.variants:
                control = Control(wall_clock=entry.label)
                if entry.label != self.baseline and control not in self.controls:
                    yield control, ("budget", "match")

    def origin(self, *location: str | int) -> str:
        """Return where a key was given, to begin an error message with: ``file:line``, or an option of the command."""
        return place_of(self._places, location, str(self._file))
