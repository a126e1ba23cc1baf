"""What a user did or gave that cannot work. The command line prints it as one line and exits with code 2, or with
`EXIT_BUSY` where nothing is wrong and the same command may succeed later."""

from collections.abc import Iterable
from difflib import get_close_matches


class InputError(ValueError):
    """Names the culprit (a file and line, a key, a value) and the remedy, in one line."""


EXIT_BUSY = 75
"""The exit code of a command that ended with `BusyError`: EX_TEMPFAIL of sysexits.h."""


class BusyError(InputError):
    """Another process is at this very work: wait for it, or leave it to it."""


class StoppedError(Exception):
    """The work was asked to stop (SIGTERM or Ctrl-C) and has saved its state; the same command goes on."""


def first_line(error: BaseException) -> str:
    """The first line of an error's text that is not blank, or its type where it has no text."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint for a mistyped name: `"; did you mean 'x'?"`, or the list of what is known when nothing is near."""
    known = sorted(known)
    close = get_close_matches(word, known, n=1, cutoff=0.6)
    return f"; did you mean '{close[0]}'?" if close else f"; known: {', '.join(known)}"
