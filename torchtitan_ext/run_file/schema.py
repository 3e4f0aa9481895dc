"""What a run file may say: one pydantic model per section, each field with its limits and a one-line description.

The descriptions feed ``--help`` and the reference page (see :mod:`.words`). ``None`` stands for "chosen elsewhere",
most often by the recipe of the size.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
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
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from torchtitan_ext.parameter_groups import SETTINGS

BUDGETS = ("training.steps", "training.tokens", "training.tokens_per_parameter")
"""The keys that say how long a run is; a run has exactly one of them."""

UNSUPPORTED = {
    "tensor": "the depth state and its connections have no plan for splitting them over ranks",
    "pipeline": "a stage would have to hand on the whole depth state, not one tensor",
    "context": "attention sees a whole sequence on one rank",
    "expert": "the feed-forward layers are dense and have no experts",
}
"""Kinds of parallelism a run cannot use, with the reason."""


def is_option_name(key: str) -> bool:
    """Say whether a variant's option may be called ``key``."""
    return key.isascii() and key.isidentifier()


def is_group_setting(key: str) -> bool:
    """Say whether ``key`` names a setting of a parameter group, such as ``queries.lr_factor``."""
    name, _, setting = key.partition(".")
    return is_option_name(name) and setting in SETTINGS


def _problem(message: str, *keys: str, whole_sentence: bool = False) -> PydanticCustomError:
    """An error in this schema's own words.

    ``message`` goes on from "key is value;" or is a whole sentence. ``keys`` are those that share the blame, the first
    of them first; without any it is the field's own.
    """
    context = {"message": message, "keys": keys, "whole_sentence": whole_sentence or bool(keys)}
    return PydanticCustomError("problem", "{message}", context)


def _whole(value: Any) -> Any:
    """Let ``1e9`` stand for a whole number."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _printable(value: str) -> str:
    if not value:
        raise _problem("must not be empty")
    if not value.isprintable():
        raise _problem("must be text without control characters")
    return value


def _run_name(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", value):
        raise _problem("must hold only letters, digits, '.', '_' and '-', and not begin with '.' or '-'")
    return value


def _option_name(value: str) -> str:
    if not is_option_name(value):
        raise _problem("must hold only letters, digits and '_', and not begin with a digit")
    return value


def _group_setting(value: str) -> str:
    if not is_group_setting(value):
        raise _problem(f"must be the name of a parameter group, a dot and one of {', '.join(SETTINGS)}")
    return value


def _fits_64_bits(value: int) -> int:
    """Keep a value from overflowing where it becomes a tensor, a file offset or a generator's seed."""
    if not -(2**63) <= value < 2**63:
        raise _problem("must fit in 64 bits")
    return value


def _only_one(value: int, info: ValidationInfo) -> int:
    if value != 1:
        kind = str(info.field_name)
        raise _problem(
            f"parallelism.{kind}={value} is not supported, because {UNSUPPORTED[kind]}; "
            "use parallelism.shard / replicate",
            whole_sentence=True,
        )
    return value


def _rank_count(value: int) -> int:
    if value != -1 and value < 1:
        raise _problem("must be -1 (all remaining ranks) or at least 1")
    return value


Whole = Annotated[int, BeforeValidator(_whole), AfterValidator(_fits_64_bits)]
Text = Annotated[str, AfterValidator(_printable)]
OnlyOne = Annotated[Whole, AfterValidator(_only_one)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Model(_Section):
    """The network: a size and a variant of its residual connection."""

    size: Text = Field(description="name of the size: layers, width, heads and the recipe that goes with them")
    variant: Text = Field(
        default="standard", description="name of the residual connection's replacement; standard is none"
    )
    block: Literal["llama", "gpt2", "nanogpt"] = Field(
        default="llama",
        description="norm, feed-forward and positions of a layer; nanogpt is gpt2 without biases, with the exact GELU",
    )
    attention: Text = Field(default="standard", description="name of the attention's form; standard is Llama 3's")
    layers: Whole | None = Field(default=None, gt=0, description="number of layers, instead of the size's")
    width: Whole | None = Field(default=None, gt=0, description="model width, instead of the size's")
    heads: Whole | None = Field(
        default=None, gt=0, description="number of attention (query) heads, instead of the size's"
    )
    kv_heads: Whole | None = Field(
        default=None, gt=0, description="number of key and value heads, instead of the size's"
    )
    ffn_width: Whole | None = Field(
        default=None, gt=0, description="hidden width of the feed-forward, instead of the size's"
    )
    tied: bool = Field(default=True, description="use the embedding's matrix for the output head too")


class Data(_Section):
    """What the model reads."""

    path: Text = Field(description="folder of the prepared data set")
    seq_len: Whole = Field(default=1024, gt=0, multiple_of=8, description="tokens in one sequence")
    seed: Whole = Field(default=0, ge=0, description="order of the training sequences")
    document_mask: bool = Field(default=False, description="keep attention inside a document")


class Training(_Section):
    """How long and how the model is trained."""

    steps: Whole | None = Field(default=None, gt=0, description="length of the run in optimizer steps")
    tokens: Whole | None = Field(default=None, gt=0, description="length of the run in tokens")
    tokens_per_parameter: float | None = Field(
        default=None, gt=0, description="length of the run in tokens per parameter"
    )
    batch_tokens: Whole | None = Field(
        default=None, gt=0, description="global batch in tokens; null: the size's recipe"
    )
    micro_batch: Whole | None = Field(
        default=None,
        gt=0,
        description="sequences per rank and pass; null: the most that split the batch evenly, of 8,192 tokens or less",
    )
    precision: Literal["auto", "bf16", "fp32"] = Field(
        default="auto", description="auto: bf16 on GPUs, fp32 on the CPU"
    )
    compile: bool = Field(default=False, description="compile the layers with torch.compile")
    activation_checkpoint: Literal["none", "selective", "full"] = Field(
        default="none", description="which activations the backward pass computes again instead of keeping"
    )
    max_grad_norm: float = Field(default=1.0, gt=0, description="norm that the gradient is clipped to")
    deterministic: bool = Field(default=False, description="use deterministic kernels only")
    stop_behind: float | None = Field(
        default=None,
        gt=0,
        description="end as diverged with a loss this far above logging.baseline's, in nats per token",
    )
    stop_behind_at: Whole | None = Field(
        default=None, gt=0, description="step from which stop_behind is decided, once, where both runs have logged"
    )

    @model_validator(mode="after")
    def _stopping_rule_is_whole(self) -> Self:
        if (self.stop_behind is None) != (self.stop_behind_at is None):
            given, missing = "stop_behind", "stop_behind_at"
            if self.stop_behind is None:
                given, missing = missing, given
            raise _problem(
                f"training.{given} is given without training.{missing}; give both or neither", f"training.{given}"
            )
        return self

    @model_validator(mode="after")
    def _one_budget(self) -> Self:
        given = [key for key in BUDGETS if getattr(self, key.partition(".")[2]) is not None]
        if len(given) > 1:
            values = " and ".join(f"{key} ({getattr(self, key.partition('.')[2])})" for key in given)
            raise _problem(f"{values} each say how long the run is; keep one", *given)
        if not given:
            raise _problem(f"nothing says how long the run is; give one of {', '.join(BUDGETS)}", whole_sentence=True)
        return self


class Optimizer(_Section):
    """AdamW and its learning-rate schedule."""

    lr: float | None = Field(default=None, gt=0, description="peak learning rate; null: the size's recipe")
    beta1: float = Field(default=0.9, ge=0, lt=1, description="decay of AdamW's first moment")
    beta2: float | None = Field(
        default=None, ge=0, lt=1, description="decay of AdamW's second moment; null: the size's recipe"
    )
    eps: float = Field(default=1e-8, gt=0, description="AdamW's epsilon")
    weight_decay: float = Field(default=0.1, ge=0, description="AdamW's decoupled weight decay")
    schedule: Literal["wsd", "cosine", "linear"] = Field(
        default="wsd", description="learning rate after warm-up; wsd: constant, then a decay at the end"
    )
    warmup_steps: Whole | None = Field(
        default=None, ge=0, description="steps of linear warm-up; null: the size's recipe"
    )
    decay_fraction: Fraction | None = Field(
        default=None, description="share of the run that wsd decays; null: the recipe"
    )
    min_lr_ratio: Fraction = Field(default=0.0, description="last learning rate as a share of the peak")

    @model_validator(mode="after")
    def _decay_fraction_needs_wsd(self) -> Self:
        if self.decay_fraction is not None and self.schedule != "wsd":
            raise _problem(
                f"optimizer.decay_fraction is {self.decay_fraction}, but only the schedule wsd has one and "
                f"optimizer.schedule is {self.schedule!r}; drop decay_fraction or use wsd",
                "optimizer.decay_fraction",
                "optimizer.schedule",
            )
        return self


class Parallelism(_Section):
    """How ranks share the work."""

    replicate: Whole = Field(default=1, ge=1, description="groups of ranks that each hold a whole copy of the model")
    shard: Annotated[Whole, AfterValidator(_rank_count)] = Field(
        default=-1, description="ranks that share one copy of the model; -1: all remaining ranks"
    )
    reshard_after_forward: Literal["default", "always", "never"] = Field(
        default="default", description="whether sharded weights are freed between the forward and the backward pass"
    )
    tensor: OnlyOne = Field(default=1, description="tensor parallelism; only 1 is supported")
    pipeline: OnlyOne = Field(default=1, description="pipeline parallelism; only 1 is supported")
    context: OnlyOne = Field(default=1, description="context parallelism; only 1 is supported")
    expert: OnlyOne = Field(default=1, description="expert parallelism; only 1 is supported")


class Checkpoint(_Section):
    """When the state of the run is saved."""

    every: Whole = Field(default=500, ge=0, description="steps between checkpoints; 0: only at the end")
    keep_last: Whole = Field(default=2, ge=2, description="number of latest checkpoints to keep")
    milestones: list[Annotated[Whole, Field(gt=0)]] = Field(
        default=[], description="steps whose checkpoints are kept for ever"
    )


class Heldout(_Section):
    """Loss on text that is not trained on."""

    every: Whole = Field(default=500, ge=0, description="steps between measurements; 0: never")
    tokens: Whole = Field(
        default=10_000_000, gt=0, description="how much of the held-out split to read, at most, in tokens"
    )


class Logging(_Section):
    """What the run writes down as it goes."""

    every: Whole = Field(default=10, gt=0, description="steps between logged lines")
    tensorboard: bool = Field(default=True, description="write TensorBoard event files too")
    depth_every: Whole = Field(default=0, ge=0, description="steps between looks inside the model by depth; 0: never")
    baseline: Text | None = Field(
        default=None, description="run folder to compare loss, tokens/s and memory with as the run goes"
    )


@dataclass(frozen=True)
class Origins:
    """Where each key of a run was given. Not part of what the run is: any two compare equal."""

    file: str = field(default="run", compare=False)
    places: Mapping[str, str] = field(default_factory=dict, compare=False)


class Run(_Section):
    """One training run. Build it with :func:`~torchtitan_ext.run_file.load_run`."""

    name: Annotated[Text, AfterValidator(_run_name)] = Field(
        description="name of the run; a file that extends this one does not inherit it"
    )
    folder: Text = Field(
        default="runs/{name}",
        validate_default=True,
        description="run folder; {name} stands for the name; inherited only with {name} in it",
    )
    seed: Whole = Field(default=0, ge=0, description="initial weights and all other randomness but the data order")
    model: Model
    depth: dict[Annotated[str, AfterValidator(_option_name)], int | float | bool | Text] = Field(
        default={}, description="options of the variant; null takes an inherited one back"
    )
    attention: dict[Annotated[str, AfterValidator(_option_name)], int | float | bool | Text] = Field(
        default={}, description="options of the attention; null takes an inherited one back"
    )
    groups: dict[Annotated[str, AfterValidator(_group_setting)], Annotated[float, Field(ge=0)]] = Field(
        default={}, description="learning rate or weight decay of what variant and attention add, by parameter group"
    )
    data: Data
    training: Training
    optimizer: Optimizer = Optimizer()
    parallelism: Parallelism = Parallelism()
    checkpoint: Checkpoint = Checkpoint()
    heldout: Heldout = Heldout()
    logging: Logging = Logging()
    _origins: Origins = PrivateAttr(default=Origins())

    @field_validator("folder")
    @classmethod
    def _fill_in_name(cls, folder: str, info: ValidationInfo) -> str:
        if re.search("[{}]", folder.replace("{name}", "")):
            raise _problem("the only part in braces that is filled in is {name}")
        return folder.replace("{name}", info.data.get("name", "{name}"))

    @model_validator(mode="after")
    def _whole_sequences(self) -> Self:
        batch, seq_len = self.training.batch_tokens, self.data.seq_len
        if batch is not None and batch % seq_len:
            lower = batch // seq_len * seq_len
            choices = f"{lower} or {lower + seq_len}" if lower else f"{seq_len}"
            raise _problem(
                f"training.batch_tokens is {batch}, not a multiple of data.seq_len, which is {seq_len}; use {choices}",
                "training.batch_tokens",
                "data.seq_len",
            )
        return self

    @model_validator(mode="after")
    def _another_run_is_the_baseline(self) -> Self:
        baseline = self.logging.baseline
        if baseline is None and self.training.stop_behind is not None:
            raise _problem(
                "training.stop_behind needs a run to compare with; give its folder in logging.baseline",
                "training.stop_behind",
            )
        if baseline is not None and os.path.realpath(baseline) == os.path.realpath(self.folder):
            raise _problem(
                f"logging.baseline is {baseline!r}, the run's own folder; give another run's or null",
                "logging.baseline",
            )
        return self

    def flat(self) -> dict[str, Any]:
        """Return every key, as ``section.key``, with its value."""
        flat: dict[str, Any] = {}
        for name, value in self.model_dump().items():
            flat |= (
                {f"{name}.{key}": below for key, below in value.items()} if isinstance(value, dict) else {name: value}
            )
        return flat

    def origin(self, key: str) -> str:
        """Return where ``key`` (such as ``data.path`` or ``depth.blocks``) was given, to begin an error message with.

        ``file:line``, ``command line --key``, or the run file alone for a key left at its default and for a section,
        whose keys may come from several places.
        """
        return self._origins.places.get(key, self._origins.file)


def _section(info: FieldInfo) -> type[BaseModel] | None:
    kind = info.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


OPEN_SECTIONS = {"depth": is_option_name, "attention": is_option_name, "groups": is_group_setting}
"""Sections whose keys follow from variant and attention, with the test of a key; each counts as one key of a run."""
SECTIONS = tuple(name for name, info in Run.model_fields.items() if _section(info) or name in OPEN_SECTIONS)
"""Keys whose values are mappings."""


@cache
def fields() -> Mapping[str, FieldInfo]:
    """Return every key of a run, as ``section.key``, in its fixed order; an open section counts as one key."""
    found: dict[str, FieldInfo] = {}
    for name, info in Run.model_fields.items():
        section = _section(info)
        if section is None:
            found[name] = info
        else:
            found.update({f"{name}.{key}": below for key, below in section.model_fields.items()})
    return found
