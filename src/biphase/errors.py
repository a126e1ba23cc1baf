"""Errors that a user can fix. The command line prints each as one line and exits with code 2, or with `EXIT_BUSY` if
nothing is wrong and the same command may succeed later."""

import signal
import traceback
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path

SOURCE = Path(__file__).parent
"""The folder of the package."""
DOCS = SOURCE / "docs" if (SOURCE / "docs").is_dir() else SOURCE.parents[1] / "docs"
"""The folder of the documentation: inside an installed package, but beside `src` in a checkout."""


class InputError(ValueError):
    """A mistake that the user can fix. Its message is one line that names the culprit (a file and line, a key, a value)
    and the remedy."""


EXIT_BUSY = 75
"""The exit code of a command that ended with `BusyError`: EX_TEMPFAIL of sysexits.h."""


class BusyError(InputError):
    """A conflict with another process that does the same work: wait for it, or leave the work to it."""


STOPPED = "stopped; run the same command to continue"


class StoppedError(Exception):
    """A stop on request, after the work has saved its state. The same command continues the work."""

    def __init__(self, message: str = STOPPED, signum: int = signal.SIGTERM) -> None:
        super().__init__(message)
        self.exit_code = 128 + signum
        """The exit code by the shells' rule: 130 after Ctrl-C, 143 after SIGTERM, 129 after SIGHUP."""


def is_raised_in_rust(error: BaseException) -> bool:
    """Tell whether a Rust library (`tokenizers`, `safetensors`) raised an error. Such an error leaves no frame. It is a
    bare `Exception` or, after a panic, of a class that is not a subclass of `Exception`."""
    return type(error) is Exception or type(error).__name__ == "PanicException"


def is_raised_here(error: BaseException) -> bool:
    """Tell whether a line of biphase raised an error, not a library that it called."""
    if is_raised_in_rust(error) or not type(error).__module__.startswith(("builtins", "biphase")):
        return False
    *_, (innermost, _) = traceback.walk_tb(error.__traceback__)
    return SOURCE in Path(innermost.f_code.co_filename).parents


@contextmanager
def told_as(problem: str, remedy: str = "") -> Iterator[None]:
    """Turn errors of the system or a library in the block into an `InputError`: PROBLEM (REASON); REMEDY.

    Stop signals pass through. So do errors that biphase itself raises, unless they come from the system: they are bugs
    of ours, and keep their traceback.
    """
    try:
        yield
    except BaseException as error:  # each library has error types of its own
        if stop := find_stop(error):
            raise stop from None
        if isinstance(error, InputError):
            raise
        if not isinstance(error, Exception) and not is_raised_in_rust(error):
            raise
        if is_raised_here(error) and not isinstance(error, OSError | UnicodeError | MemoryError):
            raise
        reason = error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)
        raise InputError(f"{problem} ({reason}){remedy and f'; {remedy}'}") from error


def find_stop(error: BaseException | None) -> BaseException | None:
    """Find the stop signal behind an error, ours or torchrun's, because libraries wrap whatever is raised while they
    work."""
    while error is not None and not (isinstance(error, StoppedError) or type(error).__name__ == "SignalException"):
        error = error.__cause__ or error.__context__
    return error


NO_MEMORY = ("out of memory", "DefaultCPUAllocator", "Cannot allocate memory", "failed to map segment")
"""The phrases that report a lack of memory: PyTorch's on a GPU and on a CPU, the system's, and its library loader's."""


def lacks_memory(error: BaseException) -> bool:
    """Tell whether an error means that a GPU or this machine has no memory left."""
    says_so = any(words in str(error) for words in NO_MEMORY)
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError | ImportError | OSError) and says_so)


@contextmanager
def memory_told(remedy: str) -> Iterator[None]:
    """Turn a lack of memory in the block into an `InputError` with the remedy."""
    try:
        yield
    except (MemoryError, RuntimeError, ImportError, OSError) as error:
        if not lacks_memory(error):
            raise
        message = first_line(error).rpartition("DefaultCPUAllocator: ")[2]
        lack = ". ".join(message.split(". ")[:3]).rstrip(".")  # the allocator's figures follow
        raise InputError(f"out of memory ({lack}): {remedy}") from error


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text that is not blank, and all other lines too if it ends in a colon. Return
    the type of an error without a text, and put the type before the key of a `KeyError`."""
    name = type(error).__name__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [name]
    text = clipped(" ".join(lines), 300) if lines[0].endswith(":") else lines[0]
    return f"{name} {text}" if isinstance(error, KeyError) else text


def clipped(text: str, limit: int = 200) -> str:
    """Shorten a long text, for a message."""
    return text if len(text) <= limit else f"{text[:limit]}…"


def first_of(names: Sequence[str], most: int = 3) -> str:
    """Join the first names: `a, b, c and 4 more`."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def refuse_doubles(kind: str, values: Sequence[Hashable]) -> None:
    """Raise `InputError` if a value occurs twice."""
    for value, count in Counter(values).items():
        if count > 1:
            raise InputError(f"{kind} {value} is named twice; drop or rename one of the two")


def refuse_unknown(kind: str, word: str, names: Iterable[str]) -> None:
    """Raise `InputError` for a word that is not among the names, and suggest the nearest name."""
    names = set(names)
    if word not in names:
        raise InputError(f"{kind} '{word}'{nearest(word, names)}")


def nearest(word: str, names: Iterable[str]) -> str:
    """Give a hint for a mistyped name: `"; did you mean 'x'?"`, or the list of names when none is near."""
    names = sorted(names)
    close = get_close_matches(word, names, n=1)
    return f"; did you mean '{close[0]}'?" if close else f"; known: {', '.join(names)}"
