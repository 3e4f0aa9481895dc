"""From what the user named to what there is: the data, the baseline, the file for the results."""

import argparse
from pathlib import Path

from data_prep.dataset import TokenDataset
from eval.evaluate.job import Checkpoint
from torchtitan_ext.errors import UserError
from torchtitan_ext.run_folder import RunFolder
from torchtitan_ext.titan.restore import Description, describe, find_checkpoint


def data_of(description: Description, asked: str | None) -> tuple[Path, bool]:
    """The data set folder to use, and whether its held-out split is the one of training.

    Raises:
        UserError: it is not there, or its tokeniser is not the run's.
    """
    own = description.run.data.path
    trained_on = description.facts["identity"]["data"]
    dataset = _open_own(own) if asked is None else TokenDataset.open(asked)
    if dataset.fingerprint == trained_on["fingerprint"]:
        return dataset.path, True
    if asked is None:
        raise UserError(f"{own} is no longer the data set of the run; give one with the same tokeniser with --data")
    if dataset.manifest.tokenizer.sha256 != _open_own(own).manifest.tokenizer.sha256:
        raise UserError(
            f"{asked} was prepared with another tokeniser than {own}, on which the run was trained; prepare it again "
            f"with `depth prep … --tokenizer {own}/tokenizer.json`"
        )
    return dataset.path, dataset.heldout_fingerprint == trained_on["heldout_fingerprint"]


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
        tokenizers = [_open_own(path).manifest.tokenizer.sha256 for path in (own, others)]
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


def result_file(args: argparse.Namespace, folder: Path, step: int, heldout: bool) -> Path:
    """``RUN/eval/step-N….json``, named after what is measured, so that one result does not replace another."""
    parts = [f"step-{step}"]
    if args.data is not None:
        parts += ["on", Path(args.data).resolve().name]
    if args.baseline is not None:
        parts += ["against", Path(args.baseline).resolve().name]
    if not heldout:
        parts += (["samples"] if args.prompt else []) + (["tasks"] if args.tasks else [])
    return folder / "eval" / f"{'-'.join(parts)}.json"


def _open_own(path: str) -> TokenDataset:
    try:
        return TokenDataset.open(path)
    except UserError as error:
        raise UserError(
            f"the run's own data set is needed for its tokeniser: {error}, or give it with --data"
        ) from error
