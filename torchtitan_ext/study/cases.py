"""The runs of a study but for their seeds: for each size and learning rate the baseline, the variants, the controls.

A case carries every run key that its runs set. What the baseline's recipe gives (batch, learning rate, second-moment
decay, warm-up) is written out for all, because a recipe follows the shape and a solved width would change it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from data_prep.dataset import TokenDataset
from data_prep.manifest import MANIFEST
from torchtitan_ext.depth.architecture import Architecture
from torchtitan_ext.errors import UserError
from torchtitan_ext.recipe import recipe_for
from torchtitan_ext.resolve import ResolvedRun, architecture_of
from torchtitan_ext.run_file import Run
from torchtitan_ext.sizes import Shape, padded_vocab, shape_of
from torchtitan_ext.study.differences import SHAPE
from torchtitan_ext.study.run_keys import Launch, RunKeys
from torchtitan_ext.study.schema import Entry, Study
from torchtitan_ext.study.solve import Match, closest_ffn_width, closest_width, equal_steps


@dataclass(frozen=True)
class Case:
    """A planned run but for its seed.

    Attributes:
        entry: label of its entry or of the control.
        of: label of the entry whose exclusions hold for it: its own, or the one that it is a control of.
        keys: what it sets over the base run file; None for a wall-clock control, until step times are known.
        parameters: how many its model has.
        matches: what was solved for it.
        intended: run keys in which it may differ from the baseline.
        place: where the study asks for it.
    """

    entry: str
    of: str
    variant: str
    size: str
    control: str | None
    keys: RunKeys | None
    parameters: int
    matches: tuple[Match, ...]
    intended: frozenset[str]
    place: str

    @property
    def known_keys(self) -> RunKeys:
        """The keys of a case that is solved."""
        assert self.keys is not None
        return self.keys


class Group:
    """One size and learning rate: its cases share a baseline.

    Args:
        study: the study.
        size: name of the size.
        keys: run keys that all cases have.
        launch: what the runs are planned for.
    """

    def __init__(self, study: Study, size: str, keys: RunKeys, launch: Launch) -> None:
        self.study, self.size, self.keys, self.launch = study, size, keys, launch
        self.reference_entry = study.entry(study.baseline)
        self.reference_keys = self._entry_keys(self.reference_entry)

    @cached_property
    def reference_run(self) -> Run:
        """The baseline's run as the files ask for it, with the recipe's part open."""
        return self.reference_keys.load(self.study.base_file)

    @cached_property
    def reference(self) -> ResolvedRun:
        """The baseline's run with nothing left open."""
        self._architecture(self.reference_entry, self.reference_run, self.reference_keys)
        return self.reference_keys.resolve(self.reference_run, self.launch)

    def baseline(self) -> Case:
        """The baseline."""
        entry = self.reference_entry
        place = self._place(entry)
        keys = self.reference_keys.with_values(self.recipe(self.reference.steps, self.reference.batch_tokens), place)
        return Case(
            entry=entry.label,
            of=entry.label,
            variant=entry.variant,
            size=self.size,
            control=None,
            keys=keys,
            parameters=self.reference.parameters,
            matches=(),
            intended=frozenset(),
            place=place,
        )

    def variant(self, entry: Entry) -> Case:
        """The case of an entry other than the baseline. Raises ``UserError`` where its budget has no solution."""
        place = self._place(entry)
        what = f"{place}: {entry.label} at {entry.size or self.size}"
        keys = self._entry_keys(entry)
        run = keys.load(self.study.base_file)
        architecture = self._architecture(entry, run, keys)
        matches = []
        if self.study.budget.match == "params":
            matches.append(self._match_parameters(entry, run, architecture))
            keys = keys.with_values(matches[0].solved, place)
            run = keys.load(self.study.base_file)
            self._architecture(entry, run, keys)  # has to fit the widths that were found
        shape = self.shape(run)
        flops = architecture.flops_per_token(shape, run.data.seq_len)
        if self.study.budget.match == "flops" and len(architecture.variant.schedules(shape)) > 1:
            raise UserError(
                f"{what}: budget match: flops needs to know the FLOPs beforehand, and the schedule of "
                f"{entry.variant} changes during training; match tokens"
            )
        length = self._match_length(entry, flops, what)
        if length.solved:
            matches.append(length)
        for match in matches:
            match.check(self.study.budget.tolerance, what)
        recipe = self.recipe(length.solved.get("training.steps", self.reference.steps), self._batch(entry))
        keys = keys.with_values({key: value for key, value in recipe.items() if key not in entry.set}, place)
        intended = {"model.variant", *entry.set, *self.reference_entry.set, *length.solved}
        intended |= {f"depth.{option}" for option in (*entry.depth, *self.reference_entry.depth)}
        intended |= {key for match in matches for key in match.solved}
        if length.solved:
            intended.add("optimizer.warmup_steps")
        if "training.batch_tokens" in entry.set:
            intended.add("training.micro_batch")
        if entry.size:
            intended.add("model.size")
        if intended & {"model.width", "model.block"}:
            intended.add("model.ffn_width")  # keeps its ratio to the width, or its parameters
        return Case(
            entry=entry.label,
            of=entry.label,
            variant=entry.variant,
            size=entry.size or self.size,
            control=None,
            keys=keys,
            parameters=architecture.parameters(shape),
            matches=tuple(matches),
            intended=frozenset(intended),
            place=place,
        )

    def _place(self, entry: Entry) -> str:
        return self.study.origin("variants", self.study.variants.index(entry))

    def _entry_keys(self, entry: Entry) -> RunKeys:
        number = self.study.variants.index(entry)
        origin = self.study.origin
        keys = self.keys.with_values({"model.variant": entry.variant}, origin("variants", number, "variant"))
        if entry.size is not None:
            keys = keys.with_values({"model.size": entry.size}, origin("variants", number, "size"))
        for option, value in entry.depth.items():
            keys = keys.with_values({f"depth.{option}": value}, origin("variants", number, "depth", option))
        for key, value in entry.set.items():
            keys = keys.with_values({key: value}, origin("variants", number, "set", key))
        return keys

    def _architecture(self, entry: Entry, run: Run, keys: RunKeys) -> Architecture:
        """What the entry's models are built of. Raises ``UserError`` when they do not fit the model."""
        where = f"{self._place(entry)}: {entry.label} at {entry.size or self.size}"
        try:
            architecture = architecture_of(run)
        except UserError as error:
            raise UserError(keys.in_study(str(error))) from None
        shape = self.shape(run, where=where)
        try:
            architecture.check(shape)
        except UserError as error:
            raise UserError(f"{where}: {error}") from None
        return architecture

    @cached_property
    def _vocab_size(self) -> int:
        if self.launch.vocab_size is not None:
            return padded_vocab(self.launch.vocab_size)
        path = self.reference_run.data.path
        try:
            return padded_vocab(TokenDataset.open(path).vocab_size)
        except UserError as error:
            if Path(path, MANIFEST).is_file():
                raise
            raise UserError(f"{error}; `depth study plan --vocab-size 50257` plans without it") from None

    def shape(self, run: Run, other: Mapping[str, int] | None = None, where: str = "model") -> Shape:
        """The shape that ``run`` asks for, with the numbers in ``other`` replaced."""
        asked = {**run.model.model_dump(include={*SHAPE, "tied", "block"}), **(other or {})}
        return shape_of(run.model.size, self._vocab_size, **asked, seq_len=run.data.seq_len, where=where)

    def _match_parameters(self, entry: Entry, run: Run, architecture: Architecture) -> Match:
        """Widths for as many parameters as the baseline has; a width that the entry sets is kept."""
        target, tolerance = self.reference.parameters, self.study.budget.tolerance
        found: dict[str, int] = {}

        def count(**other: int) -> int:
            return architecture.parameters(self.shape(run, {**found, **other}))

        if self.study.budget.by == "width" and "model.width" not in entry.set:
            heads = self.shape(run).heads
            found["width"] = closest_width(lambda width: count(width=width), target, heads, tolerance)
        if "model.ffn_width" not in entry.set and abs(count() - target) > tolerance * target:
            # Widths lie far apart: what is left after the width, the feed-forward takes.
            found["ffn_width"] = closest_ffn_width(lambda width: count(ffn_width=width), target, tolerance)
        return Match("parameters", {f"model.{name}": width for name, width in found.items()}, count(), target)

    def _match_length(self, entry: Entry, flops_per_token: int, what: str) -> Match:
        """Steps for as many tokens as the baseline sees, or for as many training FLOPs."""
        reference, batch = self.reference, self._batch(entry)
        tokens = reference.steps * reference.batch_tokens
        if self.study.budget.match == "flops":
            wanted, per_step = tokens * reference.flops_per_token, batch * flops_per_token
            steps = equal_steps(wanted, per_step, what)
            return Match("training FLOPs", {"training.steps": steps}, steps * per_step, wanted)
        steps = equal_steps(tokens, batch, what)
        solved = {"training.steps": steps} if steps != reference.steps else {}
        return Match("tokens", solved, steps * batch, tokens)

    def _batch(self, entry: Entry) -> int:
        return entry.set.get("training.batch_tokens") or self.reference.batch_tokens

    def recipe(self, steps: int, batch_tokens: int) -> dict[str, Any]:
        """What the baseline's recipe gives a run of ``steps`` steps, as run keys."""
        run, reference = self.reference_run, self.reference.run.optimizer
        warmup = run.optimizer.warmup_steps
        if warmup is None:
            seq_len = run.data.seq_len
            shape = self.reference.shape
            warmup = recipe_for(shape, seq_len=seq_len, batch_tokens=batch_tokens, steps=steps).warmup_steps
        return {
            "training.steps": steps,
            "training.batch_tokens": batch_tokens,
            "optimizer.lr": reference.lr,
            "optimizer.beta2": reference.beta2,
            "optimizer.warmup_steps": warmup,
        }
