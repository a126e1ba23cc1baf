"""`biphase` and `python -m biphase`: Ctrl-C is one line from the beginning on, while modules are loaded too."""

from typing import Any

from biphase.machine import catch_interrupts


def start_command() -> Any:
    catch_interrupts()
    from biphase.cli.app import main

    return main()


if __name__ == "__main__":
    start_command()
