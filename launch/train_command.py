"""Train a run file on this machine: on all its GPUs, or else on the CPU.

The same command continues an interrupted run, and leaves a finished one alone. Any key of the run file can be set after
it.

example: depth train train_configs/quickstart.yaml --training.steps 50 --nproc 2
"""

import argparse
import os
from pathlib import Path

from launch.torchrun import default_processes, torchrun_command, torchrun_environment
from torchtitan_ext.errors import UserError
from torchtitan_ext.machines import note_machine
from torchtitan_ext.run_file import describe_schema, dump_run

TAKES_OVERRIDES = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    keys = [f"  {row.key}: {row.type} (default: {row.default})\n      {row.description}" for row in describe_schema()]
    parser.epilog = "\n".join(["keys of a run file:", *keys])
    parser.add_argument("run_file", help="a YAML run file, such as train_configs/quickstart.yaml")
    parser.add_argument("--nproc", type=int, default=None, help="processes (default: one per GPU; 2 without a GPU)")
    parser.add_argument("--print-config", action="store_true", help="show the resolved run and leave")


def run(args: argparse.Namespace) -> int:
    processes = args.nproc if args.nproc is not None else default_processes()
    os.environ["WORLD_SIZE"] = str(processes)
    # Everything that can be wrong with the run is found here, once, rather than by every process of the launch.
    from torchtitan_ext.resolve import load_resolved
    from torchtitan_ext.run_folder import RunFolder
    from torchtitan_ext.run_lock import holder_of
    from torchtitan_ext.start import check_folder

    resolved = load_resolved(args.run_file, args.overrides)
    if args.print_config:
        print(dump_run(resolved.run), end="")
        return 0
    folder = RunFolder(resolved.run.folder)
    check_folder(resolved)
    if folder.exists:
        status = folder.status() or {}
        if status.get("state") == "finished" and status["step"] >= resolved.steps:
            print(f"{folder.path} is finished at step {status['step']}; raise training.steps to train on")
            return 0
        if (holder := holder_of(folder.path)) is not None:
            raise UserError(f"{folder.path} is being trained by {holder}; wait for it, or stop it first")
    folder.create()
    note_machine(folder.path / "logs", processes=processes)
    arguments = ["--config-file", args.run_file, *args.overrides]
    command = torchrun_command(arguments, processes=processes, log_folder=Path(resolved.run.folder) / "logs")
    os.execve(command[0], command, torchrun_environment(processes))
