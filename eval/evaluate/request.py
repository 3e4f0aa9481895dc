"""From what the user named to what there is: the data, the baseline, the file for the results."""

import argparse
import hashlib
import json
import re
from pathlib import Path
from typing import Any

from data_prep.dataset import TokenDataset
from eval.evaluate.job import Checkpoint
from torchtitan_ext.errors import UserError
from torchtitan_ext.run_folder import RunFolder
from torchtitan_ext.titan.restore import Description, describe, find_checkpoint

LONGEST_NAME = 32
"""Bytes of a folder's name that the name of a result file repeats."""
LONGEST_LIST = 80
"""Characters of task names that it lists."""


def data_of(description: Description, asked: str | None) -> tuple[TokenDataset, bool]:
    """The data set to use, and whether its held-out split is the one of training.

    Raises:
        UserError: it is not there, or its tokeniser is not the run's.
    """
    own = description.run.data.path
    trained_on = description.facts["identity"]["data"]
    dataset = _open_own(own, "or give it with --data") if asked is None else TokenDataset.open(asked)
    if dataset.fingerprint == trained_on["fingerprint"]:
        return dataset, True
    if asked is None:
        raise UserError(f"{own} is no longer the data set of the run; give one with the same tokeniser with --data")
    hint = f"put it there again, so that {asked} can be checked against it"
    if dataset.manifest.tokenizer.sha256 != _open_own(own, hint).manifest.tokenizer.sha256:
        raise UserError(
            f"{asked} was prepared with another tokeniser than {own}, on which the run was trained; prepare it again "
            f"with `depth prep … --tokenizer {own}/tokenizer.json`"
        )
    return dataset, dataset.heldout_fingerprint == trained_on["heldout_fingerprint"]


def baseline_of(description: Description, step: int, asked: str | None, asked_step: int | None) -> Checkpoint | None:
    """The checkpoint to compare with: of the step that is asked for, or else of ``step``.

    Raises:
        UserError: there is none, or the two models cannot be compared token by token.
    """
    if asked is None:
        return None
    folder = RunFolder(asked)
    other = describe(folder)
    for name, mine, theirs in (
        ("a vocabulary", description.vocab_size, other.vocab_size),
        ("windows", description.seq_len, other.seq_len),
    ):
        if mine != theirs:
            raise UserError(
                f"--baseline {asked} has {name} of {theirs} tokens and the run has {name} of {mine}: their losses "
                "cannot be compared token by token; `depth compare` compares bits per byte"
            )
    own, others = description.run.data.path, other.run.data.path
    if description.facts["identity"]["data"]["fingerprint"] != other.facts["identity"]["data"]["fingerprint"]:
        hint = f"put it there again, so that --baseline {asked} can be checked"
        tokenizers = [_open_own(path, hint).manifest.tokenizer.sha256 for path in (own, others)]
        if tokenizers[0] != tokenizers[1]:
            raise UserError(
                f"--baseline {asked} was trained on {others}, with another tokeniser than {own}: their losses cannot "
                "be compared token by token; `depth compare` compares bits per byte"
            )
    try:
        chosen, _ = find_checkpoint(folder, step if asked_step is None else asked_step)
    except UserError as error:
        hint = "; choose one with --baseline-step" if asked_step is None else ""
        raise UserError(f"{error}{hint}") from error
    return Checkpoint(folder.path, chosen)


def result_file(
    args: argparse.Namespace, folder: Path, step: int, data: TokenDataset, baseline: Checkpoint | None
) -> Path:
    """``RUN/eval/step-N….json``, named after all that is asked, so that one result does not replace another.

    What takes no place in a name (prompts and how they are continued, which data, which baseline) is in a hash of 8
    hexadecimal digits at its end. Equal questions have equal names as long as runs and task files stay where they are.
    """
    parts = [f"step-{step}"]
    hashed: dict[str, Any] = {}
    if args.precision != "fp32":
        parts.append(args.precision)
    if args.data is not None:
        parts += ["on", _shortened(data.path)]
        hashed["data"] = data.heldout_fingerprint
    if baseline is not None:
        parts += ["against", _shortened(baseline.folder)]
        hashed["baseline"] = [str(baseline.folder.resolve()), baseline.step, args.top]
    if args.prompt:
        parts.append("samples")
        hashed["samples"] = [args.prompt, args.max_tokens, args.temperature, args.top_k, args.top_p, args.seed]
    if args.tasks or args.suite:
        parts += ["bos"] if args.bos else []
        parts += [] if args.limit is None else ["limit", str(args.limit)]
        parts += ["suite", args.suite] if args.suite else []
        if args.task_folder is not None:
            hashed["task_folder"] = str(Path(args.task_folder).resolve())
    if args.tasks:
        names = "+".join(args.tasks)
        if len(names) <= LONGEST_LIST and re.fullmatch(r"[\w.+-]+", names, re.ASCII):
            parts += ["tasks", names]
        else:
            parts.append(f"{len(args.tasks)}-tasks")
            hashed["tasks"] = args.tasks
    if hashed:
        parts.append(hashlib.sha256(json.dumps(hashed).encode()).hexdigest()[:8])
    return folder / "eval" / f"{'-'.join(parts)}.json"


def _shortened(path: Path) -> str:
    return path.resolve().name.encode()[:LONGEST_NAME].decode(errors="ignore")


def _open_own(path: str, hint: str) -> TokenDataset:
    try:
        return TokenDataset.open(path)
    except UserError as error:
        raise UserError(f"the run's own data set is needed for its tokeniser: {error}, {hint}") from error
