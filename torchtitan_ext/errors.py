"""Errors that are meant to be read by the person at the terminal."""

from collections.abc import Iterable
from difflib import get_close_matches


class UserError(Exception):
    """Something the user can put right: one line that says what is wrong, where, and what to do.

    Commands print it without a traceback and exit with status 2.
    """


class SharedError(UserError):
    """A mistake that every rank of a launch raises alike, whichever found it: the first rank's word is enough.

    One line for each thing that is wrong.
    """


class Diverged(Exception):
    """The numbers of a run are no longer finite. Every rank raises it in the same step."""


def nearest(word: str, choices: Iterable[str]) -> str:
    """Return a hint for a mistyped name, for use inside an error message.

    Gives ``did you mean 'x'?`` when some choice is close to ``word``, else ``choose from: a, b, c``.
    """
    names = [str(choice) for choice in choices]
    close = get_close_matches(word, names, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"choose from: {', '.join(names)}"
