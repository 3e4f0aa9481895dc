"""Plan, run and watch a study: a fair set of runs from one file.

Keys of the study can be set after its file, as on `depth study run FILE --seeds "[0]" --set.training.steps 60`, and
mappings whole, as `--budget "{match: wall_clock}"`.
Running the same command again skips runs that have ended and resumes the others; several people may run it at once.

example: depth study run train_configs/studies/cpu_demo.yaml
"""

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from launch.torchrun import default_processes
from torchtitan_ext.errors import UserError
from torchtitan_ext.gpus import ASSUMED_MFU, GPUS, Speed

if TYPE_CHECKING:
    from torchtitan_ext.study import Study

TAKES_OVERRIDES = True
WATCH_EVERY = 2.0
"""Seconds between two looks of ``--watch``."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="action", metavar="plan|run|status", required=True)
    for name, help in {
        "plan": "show the runs, what they cost and what differs between them, and leave",
        "run": "start or continue the runs on this machine, or submit them to Slurm",
        "status": "show how the runs stand",
    }.items():
        command = commands.add_parser(name, help=help, description=help, allow_abbrev=False)
        command.add_argument("file", help="a study file, such as train_configs/studies/cpu_demo.yaml")
        command.add_argument(
            *("--nproc", "--gpus")[: 2 if name == "plan" else 1],
            type=_positive,
            help="processes of each run, with --slurm over all its nodes (default: one per GPU, shared among --jobs; "
            "without a GPU 2, or 1 with --jobs)",
        )
        if name == "run":
            command.add_argument("--jobs", type=_positive, default=1, help="runs at a time (default: 1)")
            command.add_argument("--slurm", type=Path, metavar="SCRIPT", help="sbatch script to submit the runs with")
            command.add_argument(
                "--sbatch", action="append", default=[], metavar="OPTION", help="for sbatch, as --sbatch=--nodes=4"
            )
        if name == "status":
            command.add_argument("--watch", action="store_true", help="look again until all runs have ended")
        if name == "plan":
            command.add_argument("--gpu", default="B200", help=f"one of {', '.join(GPUS)} (default: %(default)s)")
            command.add_argument("--mfu", type=float, default=ASSUMED_MFU, help="at which MFU (default: %(default)s)")
            command.add_argument(
                "--vocab-size",
                type=_positive,
                metavar="N",
                help="tokens in the vocabulary of a data set that is not prepared yet",
            )


def run(args: argparse.Namespace) -> int:
    from torchtitan_ext.study import load_study

    study = load_study(args.file, args.overrides)
    return {"plan": _plan, "run": _run, "status": _status}[args.action](args, study)


def _plan(args: argparse.Namespace, study: "Study") -> int:
    from torchtitan_ext.study import plan_study, plan_text

    print(plan_text(plan_study(study, _processes(args), args.vocab_size), Speed(args.gpu, args.mfu)))
    return 0


def _run(args: argparse.Namespace, study: "Study") -> int:
    from launch.study.job import places
    from launch.study.runner import Runner
    from launch.study.slurm_queue import submit_runs
    from torchtitan_ext.study import plan_study, write_record

    if args.slurm is None:
        if args.sbatch:
            raise UserError("--sbatch is for Slurm; give --slurm SCRIPT too, such as launch/slurm/train_b200.sbatch")
        processes = _processes(args)
        return Runner(study, processes=processes, places=places(processes, args.jobs)).run()
    if args.nproc is None or args.jobs != 1:
        raise UserError(
            "with --slurm, say with --nproc how many processes a job has over all its nodes, and leave --jobs to Slurm"
        )
    if not args.slurm.is_file():
        raise UserError(f"--slurm {args.slurm}: no such file; launch/slurm/train_b200.sbatch is one to start from")
    plan = plan_study(study, args.nproc)
    write_record(plan)
    submit_runs(plan, script=args.slurm, sbatch_options=args.sbatch)
    return 0


def _status(args: argparse.Namespace, study: "Study") -> int:
    from launch.study.slurm_queue import JobList
    from launch.study.state import States
    from launch.study.table import status_table
    from torchtitan_ext.study import plan_study

    states, queue, plan = States(), JobList(study.folder), plan_study(study, _processes(args))
    clear = "\x1b[H\x1b[J" if args.watch and sys.stdout.isatty() else ""
    shown = ""
    while True:
        found = states.look(plan.runs, queue.queued())
        text = status_table(found.values())
        if text != shown:
            print(f"{clear}{text}", flush=True)
            shown = text
        if not args.watch or all(state.ended for state in found.values()):
            return 0
        if any(state.run.command is None and state.state != "waiting" for state in found.values()):
            plan = plan_study(study, plan.ranks)  # what it waited for is measured now
        time.sleep(WATCH_EVERY)


def _processes(args: argparse.Namespace) -> int:
    """The processes of each run."""
    if args.nproc is not None:
        return args.nproc
    jobs = getattr(args, "jobs", 1)
    return max(1, default_processes() // jobs)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)
