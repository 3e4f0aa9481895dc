"""Train one run: ``torchrun --nproc-per-node 2 -m torchtitan_ext.train --config-file train_configs/NAME.yaml``.

Any key of the run file can be set on the command line, as ``--section.key value``. Running the same command again
continues the run from its newest checkpoint. ``--print-config`` shows the resolved run and leaves.

Exit status: 0 when the run finished or was asked to stop (its state was saved), 2 for a mistake in the run file, the
command or the data, 1 for anything else; the folder's status.json says which.
"""

import os
import platform
import sys
from typing import TYPE_CHECKING

from torchtitan_ext.errors import Diverged, SharedError, UserError

if TYPE_CHECKING:
    from torchtitan_ext.resolve import ResolvedRun


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    first_rank = os.environ.get("RANK", "0") == "0"
    try:
        path, overrides, print_only = _parse(arguments)
        if path is None:
            print(__doc__)
            return 0
        from torchtitan_ext.resolve import load_resolved

        resolved = load_resolved(path, overrides)
        if print_only:
            from torchtitan_ext.run_file import dump_run

            if first_rank:
                print(dump_run(resolved.run), end="")
            return 0
        return _train(resolved)
    except (UserError, Diverged) as error:
        _show(error)
        return 2 if isinstance(error, UserError) else 1


def _show(error: UserError | Diverged) -> None:
    """Print ``error``, on every rank unless all have the same one, and leave it for torchrun, which may show the first
    rank's output alone."""
    rank = os.environ.get("RANK", "0")
    where = "" if rank == "0" else f" (rank {rank} on {platform.node()})"
    if not where or not isinstance(error, SharedError | Diverged):
        for line in str(error).splitlines():
            print(f"error{where}: {line}", file=sys.stderr, flush=True)
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)


def _parse(arguments: list[str]) -> tuple[str | None, list[str], bool]:
    """Split the command line into (run file or None for help, overrides, whether to print only)."""
    rest = list(arguments)
    if "--help" in rest or "-h" in rest:
        return None, [], False
    print_only = "--print-config" in rest
    rest = [argument for argument in rest if argument != "--print-config"]
    for position, argument in enumerate(rest):
        name, equals, value = argument.partition("=")
        if name == "--config-file":
            taken = 1 if equals else 2
            path = value if equals else "".join(rest[position + 1 : position + 2])
            if not path:
                raise UserError("--config-file needs a run file, for example train_configs/quickstart.yaml")
            return path, rest[:position] + rest[position + taken :], print_only
    raise UserError("give a run file: --config-file train_configs/NAME.yaml (--help says more)")


def _train(resolved: "ResolvedRun") -> int:
    if "RANK" not in os.environ:
        raise UserError(
            "start training with torchrun (torchrun --nproc-per-node 2 -m torchtitan_ext.train …) or with `depth train`"
        )
    from torchtitan_ext.start import check_folder

    check_folder(resolved)
    import torch.distributed as dist

    from torchtitan_ext.cost import text_seen
    from torchtitan_ext.titan.config import trainer_config
    from torchtitan_ext.titan.console import set_up_logging

    set_up_logging()
    if os.environ["RANK"] == "0":
        print(text_seen(resolved), flush=True)
    trainer = trainer_config(resolved).build()
    try:
        trainer.train()
    finally:
        trainer.close()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
