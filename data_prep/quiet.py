"""What libraries written in other languages print past Python."""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_failure() -> Iterator[None]:
    """Keep back what is written to file descriptor 2 and show it at the end, but not when an exception comes through.

    The tokenizers library prints several lines when it fails inside, which the error message then says in one.
    """
    sys.stderr.flush()
    with tempfile.TemporaryFile() as kept:
        there = os.dup(2)
        try:
            os.dup2(kept.fileno(), 2)
            yield
        except BaseException:
            kept.truncate(0)
            raise
        finally:
            os.dup2(there, 2)
            os.close(there)
            kept.seek(0)
            _show(kept.read())


def _show(data: bytes) -> None:
    while data:
        data = data[os.write(2, data) :]
