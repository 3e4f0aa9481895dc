"""Which models a benchmark compares: several variants under one set of settings, ``standard`` first."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from torchtitan_ext.errors import UserError
from torchtitan_ext.resolve import KNOWN_NAMES, MICRO_BATCH_TOKENS, ResolvedRun, resolve
from torchtitan_ext.run_file import Run, load_run
from torchtitan_ext.run_file.schema import OPEN_SECTIONS

from . import SIZE, VARIANTS, VOCABULARY
from .random_tokens import write_random_tokens

BASELINE = "standard"

RANDOM_TOKENS = 1 << 22
"""How many random tokens there are where the recipe chooses the batch: more than it does for any size."""

UNUSED = ("name", "folder", "checkpoint", "heldout", "logging")
"""Keys and sections that a benchmark makes no use of: runs may differ in them."""


@dataclass(frozen=True)
class Contender:
    """One model of a benchmark: a label that no other has, and the run that it trains as."""

    label: str
    resolved: ResolvedRun


@dataclass(frozen=True)
class Request:
    """What the command line asks for.

    Attributes:
        run_files: the runs to compare. Without any, the run file's defaults hold, with one pass for each step.
        variants: variants to compare under the settings of the one run file, in place of its own.
        overrides: keys of the run file for all models; ``--depth.…`` is for all but ``standard``.
        vocab_size: train on random tokens of a vocabulary so large; None: on the run file's data set.
        ranks: processes for each model.
    """

    run_files: Sequence[str] = ()
    variants: Sequence[str] = ()
    overrides: Sequence[str] = ()
    vocab_size: int | None = None
    ranks: int = 1


def contenders(request: Request, scratch: Path) -> list[Contender]:
    """The models to compare; ``scratch`` is an empty folder for files that they need while they train.

    Raises ``UserError`` for whatever does not fit, among it runs that differ in more than their variant.
    """
    files, overrides = list(request.run_files), list(request.overrides)
    variants, vocab_size = request.variants, request.vocab_size
    if len(files) > 1 and variants:
        raise UserError("run files and --variants both say what to compare; give one run file, or no --variants")
    own_data = any(override.partition("=")[0] == "--data.path" for override in overrides)
    if own_data and vocab_size is not None:
        raise UserError("--data.path and --vocab-size both say what to train on; give one of them")
    if not files:
        files = [str(_defaults(scratch))]
        overrides += _one_pass_a_step(load_run(files[0], overrides, known=KNOWN_NAMES), request.ranks)
        variants = variants or VARIANTS
        vocab_size = None if own_data else vocab_size or VOCABULARY
    if vocab_size is not None:
        overrides += ["--data.path", str(scratch)]
        batch = load_run(files[0], overrides, known=KNOWN_NAMES).training.batch_tokens
        write_random_tokens(scratch, vocab_size, (2 * batch if batch else RANDOM_TOKENS) + 1)
    if variants:
        runs = [_run_of(files[0], name, overrides) for name in variants]
    else:
        runs = [load_run(file, overrides, known=KNOWN_NAMES) for file in files]
    for run in runs[1:]:
        check_same_settings(runs[0], run)
    first = next((i for i, run in enumerate(runs) if run.model.variant == BASELINE), None)
    baseline = _run_of(files[0], BASELINE, overrides) if first is None else runs.pop(first)
    runs = [baseline, *runs]
    models = [Contender(label, resolve(run, request.ranks)) for label, run in zip(_labels(runs), runs, strict=True)]
    for model in models:
        model.resolved.architecture.variant.check_machine(model.resolved.run.training.precision)
    return models


def check_same_settings(one: Run, other: Run) -> None:
    """Raise ``UserError`` naming the keys in which two runs differ, variant, attention and what a benchmark does not
    use aside."""
    ours, theirs = _settings(one), _settings(other)
    different = [f"{key} ({ours[key]} and {theirs[key]})" for key in ours if ours[key] != theirs[key]]
    if different:
        raise UserError(
            f"runs {one.name} and {other.name} differ in {', '.join(different)}; "
            "runs that are compared may differ in variant or attention: make these keys equal"
        )


def _settings(run: Run) -> dict[str, Any]:
    left_out = {*UNUSED, *OPEN_SECTIONS}
    return {
        key: value
        for key, value in run.flat().items()
        if key.partition(".")[0] not in left_out and key not in ("model.variant", "model.attention")
    }


def _run_of(file: str, variant: str, overrides: list[str]) -> Run:
    """The run of ``file`` with another variant, which takes no options that the file gives its own one; ``standard``
    takes none from the command line either."""
    run = load_run(file, overrides, known=KNOWN_NAMES)
    if run.model.variant == variant and variant != BASELINE:
        return run
    foreign = [
        f"--{section}.{key}=null"
        for section in ("depth", "groups")
        for key in getattr(run, section)
        if variant == BASELINE or not run.origin(f"{section}.{key}").startswith("command line")
    ]
    return load_run(file, [*overrides, "--model.variant", variant, *foreign], known=KNOWN_NAMES)


def _defaults(scratch: Path) -> Path:
    path = scratch / "bench.yaml"
    run = {"model": {"size": SIZE}, "data": {"path": str(scratch)}, "training": {"steps": 1000}}
    path.write_text(yaml.safe_dump(run), encoding="utf-8")
    return path


def _one_pass_a_step(run: Run, ranks: int) -> list[str]:
    """Keys for a batch of one micro-batch per rank, unless the batch has been given."""
    if run.training.batch_tokens is not None:
        return []
    seq_len = run.data.seq_len
    micro_batch = run.training.micro_batch or max(1, MICRO_BATCH_TOKENS // seq_len)
    return ["--training.micro_batch", str(micro_batch), "--training.batch_tokens", str(micro_batch * seq_len * ranks)]


def _labels(runs: list[Run]) -> list[str]:
    """The variants' names; of runs of one variant the runs' names, or numbers where those are equal too."""
    variants = [run.model.variant for run in runs]
    labels: list[str] = []
    for run in runs:
        namesakes = [other.name for other in runs if other.model.variant == run.model.variant]
        label = run.name if len(set(namesakes)) == len(namesakes) > 1 else run.model.variant
        earlier = sum(variant == run.model.variant for variant in variants[: len(labels)])
        labels.append(f"{label} ({earlier + 1})" if label == run.model.variant and earlier else label)
    return labels
