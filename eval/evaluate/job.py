"""What ``depth eval`` does once everything asked for is known to be there."""

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from data_prep.dataset import TokenDataset
from eval.evaluate.positions import Decode, by_position, compare
from eval.evaluate.processes import Processes, device_of
from eval.evaluate.report import show, write
from eval.evaluate.sample import Sampling, generate
from eval.evaluate.score import HeldOutTokens, TokenLosses, score
from eval.evaluate.suites import SUITES
from torchtitan_ext.errors import UserError
from torchtitan_ext.run_folder import RunFolder
from torchtitan_ext.titan.restore import Description, Restored, restore

if TYPE_CHECKING:
    from eval.evaluate.tasks import Outcome, Tasks

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}
FORMAT = 1


@dataclass(frozen=True)
class Checkpoint:
    """A step of a run."""

    folder: Path
    step: int


@dataclass(frozen=True)
class Job:
    """Everything that one ``depth eval`` is asked for.

    Attributes:
        data: the data set folder whose held-out split and tokeniser are used.
        heldout: whether to score the held-out split; ``baseline`` is scored beside it.
        own_data: whether that split is the one that was held out in training.
        bos: whether every question of a task begins with an end-of-text token.
        out: the JSON file for the results; a picture goes beside it.
    """

    checkpoint: Checkpoint
    data: Path
    own_data: bool
    heldout: bool
    baseline: Checkpoint | None
    precision: str
    prompts: tuple[str, ...]
    max_tokens: int
    sampling: Sampling
    tasks: tuple[str, ...]
    suite: str | None
    bos: bool
    task_folder: str | None
    task_limit: int | None
    top: int
    out: Path


def evaluate(processes: Processes, job: Job) -> None:
    """Do ``job``; the first process shows and writes the results."""
    dataset = TokenDataset.open(job.data)
    # Before the work, so that a damaged file costs none of it.
    logged = _logged(job.checkpoint) if processes.first and job.heldout and job.own_data else None
    tasks = _tasks(job)
    restored = load(job.checkpoint, job.precision, processes)
    description = restored.description
    facts = description.facts
    results: dict[str, Any] = {
        "format": FORMAT,
        "run": str(job.checkpoint.folder),
        "step": restored.step,
        "size": facts["size"],
        "variant": facts["variant"],
        "data": {"path": str(job.data), "heldout_fingerprint": dataset.heldout_fingerprint},
        "precision": job.precision,
    }
    if job.prompts and processes.first:
        results["samples"] = _samples(job, restored, dataset)
    outcome = None
    if tasks is not None:
        outcome = _ask(job, tasks, restored, dataset, processes)
        results["tasks"] = outcome.marks
        if job.suite is not None:
            results["suite"] = {"name": job.suite, "tasks": [asdict(task) for task in SUITES[job.suite].tasks]}
    if job.heldout:
        text = HeldOutTokens.read(dataset)
        losses = _score(restored, text, processes)
        baseline = None
        if job.baseline is not None:
            del restored  # room for the other
            other = load(job.baseline, job.precision, processes)
            baseline = _score(other, text, processes)
            if tasks is not None and outcome is not None:
                others = _ask(job, tasks, other, dataset, processes)
                results["baseline_tasks"] = others.marks
                results["tasks_comparison"] = outcome.against(others)
            results["baseline"] = {
                "run": str(job.baseline.folder),
                "step": job.baseline.step,
                "size": other.description.facts["size"],
                "variant": other.description.facts["variant"],
            }
        if processes.first:
            results |= _heldout(job, description, losses, baseline, logged, _decoder(dataset))
    if processes.first:
        write(results, job.out)
        show(results, job.out)


def load(checkpoint: Checkpoint, precision: str, processes: Processes) -> Restored:
    """Restore a model on this process's device, with its parameters in ``precision``."""
    restored = restore(RunFolder(checkpoint.folder), checkpoint.step, device_of(processes.rank))
    for parameter in restored.model.parameters():  # not the complex numbers of the rotary positions
        parameter.data = parameter.data.to(PRECISIONS[precision])
    return restored


def _score(restored: Restored, text: HeldOutTokens, processes: Processes) -> TokenLosses:
    description = restored.description
    try:
        return score(
            restored.model,
            text,
            seq_len=description.seq_len,
            document_mask=description.run.data.document_mask,
            processes=processes,
            title=f"{description.facts['name']}, step {restored.step}",
        )
    except UserError as error:
        raise UserError(f"{description.facts['name']}, step {restored.step}: {error}") from error


def _heldout(
    job: Job,
    description: Description,
    losses: TokenLosses,
    baseline: TokenLosses | None,
    logged: float | None,
    decode: Decode,
) -> dict[str, Any]:
    text, seq_len, run = losses.text, description.seq_len, description.run
    context_N = text.context_N(seq_len, run.data.document_mask)
    results: dict[str, Any] = {
        "heldout": {
            "loss": losses.loss,
            "perplexity": losses.perplexity,
            "bits_per_byte": losses.bits_per_byte,
            "nats": losses.nats,
            "tokens": len(text),
            "text_bytes": int(text.bytes_N.sum()),
            "documents": int(text.document_N[-1]) + 1,
            "window": seq_len,
            "document_mask": run.data.document_mask,
        },
        "by_context": [asdict(row) for row in by_position(context_N, losses, baseline)],
        "by_document_position": [asdict(row) for row in by_position(text.document_position_N, losses, baseline)],
    }
    if logged is not None:
        again = losses.over_training_windows(seq_len, run.heldout.tokens)
        results["logged"] = {"loss": logged, "same_windows": again, "tokens": run.heldout.tokens}
    if baseline is not None:
        results["baseline_heldout"] = {"loss": baseline.loss, "bits_per_byte": baseline.bits_per_byte}
        comparison = compare(
            losses, baseline, context_N=context_N, decode=decode, vocab_size=description.vocab_size, top=job.top
        )
        results["comparison"] = asdict(comparison)
    return results


def _logged(checkpoint: Checkpoint) -> float | None:
    """The held-out loss that training logged at this step, if it did and the file can be read that far."""
    folder = RunFolder(checkpoint.folder)
    try:
        for record in folder.metrics():
            if record["step"] == checkpoint.step and "heldout/loss" in record:
                return record["heldout/loss"]
    except (UserError, ValueError, LookupError, TypeError) as error:
        why = error if isinstance(error, UserError) else f"{folder.metrics_path} is damaged ({error})"
        print(f"warning: the loss that training logged is left out: {why}", file=sys.stderr)
    return None


def _tasks(job: Job) -> "Tasks | None":
    if not job.tasks and job.suite is None:
        return None
    # An extra of the package, imported only where it is asked for.
    from eval.evaluate.tasks import Tasks

    return Tasks(job.tasks, suite=job.suite, folder=job.task_folder)


def _ask(job: Job, tasks: "Tasks", restored: Restored, dataset: TokenDataset, processes: Processes) -> "Outcome":
    from eval.evaluate.harness import HarnessModel

    model = HarnessModel(restored, dataset.tokenizer(), dataset.eot_id, processes, bos=job.bos)
    return tasks.run(model, job.task_limit)


def _samples(job: Job, restored: Restored, dataset: TokenDataset) -> list[dict[str, Any]]:
    tokenizer, description = dataset.tokenizer(), restored.description
    # Like every document in training, a prompt comes behind an end-of-text token.
    prompts = [[dataset.eot_id, *tokenizer.encode(prompt, add_special_tokens=False).ids] for prompt in job.prompts]
    for prompt, tokens in zip(job.prompts, prompts, strict=True):
        if len(tokens) >= description.seq_len:
            raise UserError(
                f"--prompt {prompt[:20]!r}… has {len(tokens) - 1} tokens, and the model's window of "
                f"{description.seq_len} leaves no room for more; shorten it"
            )
    written = generate(
        restored.model,
        prompts,
        max_tokens=job.max_tokens,
        window=description.seq_len,
        eot_id=dataset.eot_id,
        vocab_size=description.vocab_size,
        document_mask=description.run.data.document_mask,
        sampling=job.sampling,
    )
    return [
        {"prompt": prompt, "text": tokenizer.decode(tokens), "tokens": len(tokens), **asdict(job.sampling)}
        for prompt, tokens in zip(job.prompts, written, strict=True)
    ]


def _decoder(dataset: TokenDataset) -> Decode:
    tokenizer = dataset.tokenizer()
    return lambda tokens: tokenizer.decode(list(tokens), skip_special_tokens=False)
