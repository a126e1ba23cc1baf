"""`biphase` and `python -m biphase`. Ctrl-C prints one line from the very start, before any slow import. So this module
imports `_signal`, not `signal`, which takes time to make its enumerations."""

import _signal as signal
import os
from types import FrameType


def start_command() -> object:
    """Run the `biphase` command (`biphase.cli.app.main`)."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else the parent process chose to ignore it
        signal.signal(signal.SIGINT, interrupt)
    try:
        from biphase.cli.app import main

        return main()
    except KeyboardInterrupt:
        return end_interrupted()


def interrupt(signum: int, frame: FrameType | None) -> None:
    """Handle Ctrl-C. During an import, end the process here, because the import of PyTorch swallows errors."""
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            end_interrupted()
        frame = frame.f_back
    raise KeyboardInterrupt


def end_interrupted() -> object:
    os.write(2, b"biphase: stopped; run the same command to continue\n")
    os._exit(128 + signal.SIGINT)


if __name__ == "__main__":
    start_command()
