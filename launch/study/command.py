"""Plan, run and watch a study: a fair set of runs from one file.

Keys of the study can be set after its file, as on `depth study run FILE --seeds "[0]" --set.training.steps 60`, and
mappings whole, as `--budget "{match: wall_clock}"`.
Running the same command again skips runs that have ended and resumes the others; several people may run it at once.

example: depth study run train_configs/studies/cpu_demo.yaml
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from launch.torchrun import default_processes
from torchtitan_ext.errors import UserError
from torchtitan_ext.gpus import ASSUMED_MFU, GPUS, Speed

if TYPE_CHECKING:
    from torchtitan_ext.study import Study

TAKES_OVERRIDES = True
WATCH_EVERY = 2.0
"""Seconds between two looks of ``--watch``."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="action", metavar="plan|run|status|drop|prune", required=True)
    for name, action in _ACTIONS.items():
        command = commands.add_parser(name, help=action.words, description=action.words, allow_abbrev=False)
        command.add_argument("file", help="a study file, such as train_configs/studies/cpu_demo.yaml")
        command.add_argument(
            *("--nproc", "--gpus")[: 2 if name == "plan" else 1],
            type=_positive,
            help="processes of each run, with --slurm over all its nodes (default: one per GPU, shared among --jobs; "
            "without a GPU 2, or 1 with --jobs)",
        )
        action.add_arguments(command)


def _plan_arguments(command: argparse.ArgumentParser) -> None:
    kinds = ", ".join(GPUS)
    command.add_argument("--gpu", default="B200", help=f"whose hours to estimate: {kinds} (default: %(default)s)")
    command.add_argument("--mfu", type=float, default=ASSUMED_MFU, help="at which MFU (default: %(default)s)")
    command.add_argument(
        "--vocab-size", type=_positive, metavar="N", help="tokens in the vocabulary of a data set not prepared yet"
    )


def _run_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--jobs", type=_positive, help="runs at a time (default: 1); with --slurm jobs in the queue (default: all)"
    )
    command.add_argument("--runs", nargs="+", metavar="NAME", help="only these runs of the study")
    command.add_argument("--slurm", type=Path, metavar="SCRIPT", help="sbatch script to submit the runs with")
    command.add_argument(
        "--per-node", type=_positive, metavar="K", help="with --slurm launch/slurm/pack_b200.sbatch: K runs on a node"
    )
    command.add_argument(
        "--sbatch", action="append", default=[], metavar="OPTION", help="for sbatch, as --sbatch=--time=4:00:00"
    )


def _status_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--watch", action="store_true", help="look again until all runs have ended")


def _drop_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("name", metavar="RUN", help="the run's name, such as m_gate_kv-100M-s0")
    command.add_argument("--reason", default="given up by hand", help="why (default: %(default)s)")
    command.add_argument("--undo", action="store_true", help="take it back: the run is started again")


def _prune_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--keep",
        choices=["weights", "records"],
        default="weights",
        help="weights: of the last step and of milestones, to evaluate and export; records: no checkpoint at all "
        "(default: %(default)s)",
    )
    command.add_argument("--yes", action="store_true", help="do it; without this it is only said what would be freed")


def run(args: argparse.Namespace) -> int:
    from torchtitan_ext.study import load_study

    study = load_study(args.file, args.overrides)
    return _ACTIONS[args.action].act(args, study)


def _plan(args: argparse.Namespace, study: "Study") -> int:
    from torchtitan_ext.study import plan_study, plan_text

    print(plan_text(plan_study(study, _processes(args), args.vocab_size), Speed(args.gpu, args.mfu)))
    return 0


def _run(args: argparse.Namespace, study: "Study") -> int:
    from launch.study.job import places
    from launch.study.runner import Runner
    from launch.study.slurm_queue import submit_packed, submit_runs
    from torchtitan_ext.study import plan_study, write_record

    if args.slurm is None:
        for option, given in {"--sbatch": args.sbatch, "--per-node": args.per_node}.items():
            if given:
                raise UserError(f"{option} is for Slurm; give --slurm SCRIPT too, one of those in launch/slurm")
        processes = _processes(args)
        found = places(processes, args.jobs or 1)
        return Runner(study, processes=processes, places=found, only=args.runs).run()
    if args.nproc is None:
        raise UserError("with --slurm, say with --nproc how many processes a run has over all its nodes")
    if not args.slurm.is_file():
        raise UserError(f"--slurm {args.slurm}: no such file; launch/slurm/train_b200.sbatch is one to start from")
    plan = plan_study(study, args.nproc)
    chosen = plan if args.runs is None else plan.only(args.runs)
    write_record(plan)
    if args.per_node is None:
        submit_runs(chosen, script=args.slurm, sbatch_options=args.sbatch, at_most=args.jobs)
    else:
        submit_packed(chosen, script=args.slurm, sbatch_options=args.sbatch, per_node=args.per_node, at_most=args.jobs)
    return 0


def _status(args: argparse.Namespace, study: "Study") -> int:
    from launch.study.disk import Sizes
    from launch.study.slurm_queue import JobList
    from launch.study.state import States
    from launch.study.table import status_table
    from torchtitan_ext.study import plan_study

    states, queue, sizes, plan = States(), JobList(study.folder), Sizes(), plan_study(study, _processes(args))
    clear = "\x1b[H\x1b[J" if args.watch and sys.stdout.isatty() else ""
    shown = ""
    while True:
        jobs = queue.others()
        found = states.look(plan.runs, frozenset(jobs))
        disk = sum(sizes.of(run.folder / "checkpoint") for run in plan.runs)
        text = status_table(found.values(), jobs, disk)
        if text != shown:
            print(f"{clear}{text}", flush=True)
            shown = text
        if not args.watch or all(state.ended for state in found.values()):
            return 0
        if any(state.run.command is None and state.state != "waiting" for state in found.values()):
            plan = plan_study(study, plan.ranks)  # what it waited for is measured now
        time.sleep(WATCH_EVERY)


def _drop(args: argparse.Namespace, study: "Study") -> int:
    from launch.study.drop import drop, undo
    from torchtitan_ext.study import plan_study

    plan = plan_study(study, _processes(args))
    plan.checked_names([args.name])
    if args.undo:
        undo(plan, args.name)
    else:
        drop(plan, args.name, args.reason)
    return 0


def _prune(args: argparse.Namespace, study: "Study") -> int:
    from launch.study.prune import prune_study
    from launch.study.state import States
    from torchtitan_ext.study import plan_study

    return prune_study(States().look(plan_study(study, _processes(args)).runs).values(), args.keep, args.yes)


def _processes(args: argparse.Namespace) -> int:
    """The processes of each run."""
    if args.nproc is not None:
        return args.nproc
    jobs = getattr(args, "jobs", None) or 1
    return max(1, default_processes() // jobs)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


class _Action(NamedTuple):
    words: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    act: Callable[[argparse.Namespace, "Study"], int]


_ACTIONS = {
    "plan": _Action("show the runs, what they cost and what differs between them, and leave", _plan_arguments, _plan),
    "run": _Action("start or continue the runs on this machine, or submit them to Slurm", _run_arguments, _run),
    "status": _Action("show how the runs stand", _status_arguments, _status),
    "drop": _Action("give a run up: it is not started again, and counts as failed in reports", _drop_arguments, _drop),
    "prune": _Action("free the disk that checkpoints of ended runs take", _prune_arguments, _prune),
}
