"""torchrun, for people: ``python -m launch.elastic TORCHRUN-ARGUMENTS``.

On SIGTERM, SIGINT and SIGHUP torchrun passes the signal on, waits for its workers, which save and leave, and then
raises; here that is one line. When a worker fails, this shows what went wrong on the ranks that the console does not
show. A mistake that a worker has explained needs no traceback of torchrun's.

Exit status: that of torchrun, or 128 + the signal's number.
"""

import signal
import sys

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

ALIKE = ("SharedError: ", "Diverged: ")
EXPLAINED = ("UserError: ", *ALIKE)
"""How torchrun names the errors that ``torchtitan_ext.train`` prints without a traceback. ``ALIKE``: those that every
rank raises."""


def run() -> int:
    arguments = torchrun.parse_args(None)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        # Under nohup the end of the terminal is nobody's business; torchrun would end the run all the same.
        kept = [name for name in arguments.signals_to_handle.split(",") if name != "SIGHUP"]
        arguments.signals_to_handle = ",".join(kept)
    try:
        torchrun.run(arguments)
    except SignalException as stop:
        print(f"stopped by {stop.sigval.name}; the same command resumes", file=sys.stderr)
        return 128 + stop.sigval
    except ChildFailedError as failed:
        errors = {rank: _message(failure) for rank, failure in sorted(failed.failures.items())}
        # The console shows each host's first rank; what all ranks raise alike, the first of them all has printed. Where
        # that one was stopped before it could speak, another does.
        shown = {
            errors[rank]
            for rank, failure in failed.failures.items()
            if failure.local_rank == 0 and (rank == 0 or not (errors[rank] or "").startswith(ALIKE))
        }
        for rank, error in errors.items():
            if error is not None and error not in shown:
                shown.add(error)
                print("\n".join(f"[rank{rank}]:{line}" for line in _lines(error)), file=sys.stderr)
        cause = _message(failed.get_first_failure()[1])
        if cause is None or not cause.startswith(EXPLAINED):
            raise
        return 1
    return 0


def _message(failure: ProcessFailure) -> str | None:
    """What a worker said went wrong, after the name of the exception; None where it said nothing."""
    message = failure.error_file_data["message"]
    return message["message"] if isinstance(message, dict) else None


def _lines(error: str) -> list[str]:
    for name in EXPLAINED:
        if error.startswith(name):
            return [f"error: {line}" for line in error.removeprefix(name).splitlines()]
    return error.splitlines()


if __name__ == "__main__":
    sys.exit(run())
