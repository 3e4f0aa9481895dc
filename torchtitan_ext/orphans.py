"""A process does not outlive the one that watches it."""

import ctypes
import signal
import sys

PR_SET_PDEATHSIG = 1
"""From <linux/prctl.h>: the signal to get when the parent ends."""


def stop_with_parent() -> None:
    """Ask the kernel to send this process SIGTERM when its parent ends, on Linux.

    Training saves and leaves then. Without it what kills torchrun would leave its workers training: they are in
    sessions of their own.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
