"""Measure one trained model: its loss on held-out text, what it writes, its marks in downstream tasks.

Without --prompt, --tasks and --suite, or with --data or --baseline, it scores every token of the held-out split once
and shows the loss by position; against a baseline, also where in the text and in which tasks the two models differ.
Results go to the run folder as JSON, with a picture.

example: depth eval runs/m_gate_10m --baseline runs/standard_10m
         depth eval runs/m_gate_10m --prompt "It was a" --temperature 0.8 --top-k 50
         depth eval runs/m_gate_10m --tasks hellaswag piqa lambada_openai
         depth eval runs/m_gate_10m --suite core --baseline runs/standard_10m
"""

import argparse
import importlib.util
import os
from pathlib import Path

from eval.evaluate.suites import SUITES
from torchtitan_ext.errors import UserError
from torchtitan_ext.run_folder import RunFolder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="run folder")
    parser.add_argument("--step", type=int, help="checkpoint to take (default: the newest)")
    parser.add_argument("--data", metavar="FOLDER", help="data set with the same tokeniser (default: the run's own)")
    parser.add_argument("--baseline", metavar="RUN2", help="run folder to compare with, token by token")
    parser.add_argument("--baseline-step", type=int, help="its checkpoint (default: the step of RUN)")
    parser.add_argument("--top", type=int, default=20, help="places to list on each side (default: %(default)s)")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32", help="(default: %(default)s)")
    parser.add_argument("--nproc", type=int, help="processes that share the work (default: one per GPU; else 1)")
    parser.add_argument("--out", metavar="FILE", help="JSON file for the results (default: RUN/eval/step-N….json)")
    writing = parser.add_argument_group("writing")
    writing.add_argument("--prompt", nargs="+", metavar="TEXT", default=[], help="beginnings of texts to continue")
    writing.add_argument("--max-tokens", type=int, default=100, help="new tokens at most (default: %(default)s)")
    writing.add_argument("--temperature", type=float, default=1.0, help="0: always the likeliest (default: 1)")
    writing.add_argument("--top-k", type=int, default=0, help="choose among the k likeliest (default: 0, all)")
    writing.add_argument("--top-p", type=float, default=1.0, help="choose among this share (default: 1, all)")
    writing.add_argument("--seed", type=int, default=0, help="of the choices (default: %(default)s)")
    tasks = parser.add_argument_group("downstream tasks, with pip install 'torchtitan-ext[eval]'")
    tasks.add_argument("--tasks", nargs="+", metavar="TASK", default=[], help="names in lm-evaluation-harness")
    summaries = "; ".join(f"{name}: {suite.summary}" for name, suite in SUITES.items())
    tasks.add_argument("--suite", choices=list(SUITES), help=f"a set of tasks and its mean; {summaries}")
    tasks.add_argument("--bos", action="store_true", help="begin every question with an end-of-text token")
    tasks.add_argument("--task-folder", metavar="FOLDER", help="further task files (YAML)")
    tasks.add_argument("--limit", type=int, help="questions of each task, for a quick look (default: all)")


def run(args: argparse.Namespace) -> int:
    _check(args)
    if (args.tasks or args.suite) and importlib.util.find_spec("lm_eval") is None:
        raise UserError("--tasks and --suite need lm-evaluation-harness; pip install 'torchtitan-ext[eval]'")
    # Everything that can be wrong is found here, once, rather than by every process.
    from eval.evaluate.job import Checkpoint, Job, evaluate
    from eval.evaluate.processes import default_processes, share_out
    from eval.evaluate.request import baseline_of, data_of, result_file
    from eval.evaluate.sample import Sampling
    from torchtitan_ext.titan.restore import describe, find_checkpoint

    folder = RunFolder(args.run)
    description = describe(folder)
    step, _ = find_checkpoint(folder, args.step)
    data, own_data = data_of(description, args.data)
    baseline = baseline_of(description, step, args.baseline, args.baseline_step)
    job = Job(
        checkpoint=Checkpoint(folder.path, step),
        data=data.path,
        own_data=own_data,
        heldout=bool(args.data or args.baseline or not (args.prompt or args.tasks or args.suite)),
        baseline=baseline,
        precision=args.precision,
        prompts=tuple(args.prompt),
        max_tokens=args.max_tokens,
        sampling=Sampling(args.temperature, args.top_k, args.top_p, args.seed),
        tasks=tuple(args.tasks),
        suite=args.suite,
        bos=args.bos,
        task_folder=args.task_folder,
        task_limit=args.limit,
        top=args.top,
        out=Path(args.out) if args.out else result_file(args, folder.path, step, data, baseline),
    )
    _check_writable(job.out)
    return share_out(default_processes() if args.nproc is None else args.nproc, evaluate, job)


def _check(args: argparse.Namespace) -> None:
    least = {"nproc": 1, "top": 1, "max_tokens": 1, "temperature": 0, "top_k": 0, "seed": 0, "limit": 1}
    for name, smallest in least.items():
        value = getattr(args, name)
        if value is not None and not value >= smallest:
            raise UserError(f"--{name.replace('_', '-')} is {value}; it must be {smallest} or more")
    if not 0 < args.top_p <= 1:
        raise UserError(f"--top-p is {args.top_p}; it must be above 0 and at most 1")
    if args.baseline_step is not None and args.baseline is None:
        raise UserError("--baseline-step says which checkpoint of the baseline; give --baseline RUN2 as well")
    if args.out is not None and Path(args.out).is_dir():
        raise UserError(f"--out {args.out} is a folder; give the JSON file's own name")
    if args.out is not None and Path(args.out).suffix.lower() == ".png":
        raise UserError(f"--out {args.out} is for the results, and the picture goes beside them; give a name in .json")
    if args.task_folder is not None and not Path(args.task_folder).is_dir():
        raise UserError(f"--task-folder {args.task_folder} is not a folder; give the one with the task files (YAML)")
    if args.bos and not (args.tasks or args.suite):
        raise UserError("--bos is about the questions of tasks; give --tasks or --suite as well")
    for name in SUITES.keys() & set(args.tasks):
        others = [task for task in args.tasks if task not in SUITES]
        rest = f" and the others with --tasks {' '.join(others)}" if others else ""
        raise UserError(f"--tasks {name}: that is a set of tasks; ask for it with --suite {name}{rest}")
    for prompt in args.prompt:
        try:
            prompt.encode()
        except UnicodeEncodeError:
            raise UserError(f"--prompt {prompt!r} is not UTF-8 text; check the terminal's encoding") from None


def _check_writable(out: Path) -> None:
    """Make the file's folder, before the work rather than after it."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{out.parent} cannot be made ({error.strerror}); give another file with --out") from error
    if not os.access(out.parent, os.W_OK):
        raise UserError(f"{out.parent} cannot be written to; give another file with --out")
