"""torchrun, without its traceback when it is asked to stop: ``python -m launch.elastic TORCHRUN-ARGUMENTS``.

On SIGTERM and SIGINT torchrun passes the signal on, waits for its workers, which save and leave, and then raises. Exit
status: that of torchrun, or 128 + the signal's number.
"""

import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.run import main


def run() -> int:
    try:
        main()
    except SignalException as stop:
        print(f"stopped by {stop.sigval.name}; the same command resumes", file=sys.stderr)
        return 128 + stop.sigval
    return 0


if __name__ == "__main__":
    sys.exit(run())
