"""`biphase` and `python -m biphase`: Ctrl-C is one line from the beginning on, before anything is loaded that takes
time: so `signal` itself, whose enumerations would, is not."""

import _signal as signal
import os
from types import FrameType


def start_command() -> object:
    """The `biphase` command: see `biphase.cli.app.main`."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a process may be started to pass it over
        signal.signal(signal.SIGINT, interrupt)
    try:
        from biphase.cli.app import main

        return main()
    except KeyboardInterrupt:
        return end_interrupted()


def interrupt(signum: int, frame: FrameType | None) -> None:
    """Ctrl-C. While a module is loaded, which takes seconds, the process ends here: loading PyTorch swallows errors."""
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            end_interrupted()
        frame = frame.f_back
    raise KeyboardInterrupt


def end_interrupted() -> object:
    os.write(2, b"biphase: stopped; run the same command to go on\n")
    os._exit(128 + signal.SIGINT)


if __name__ == "__main__":
    start_command()
