"""The verbs of biphase for Python, under the names by which users know them. The command line calls them too: their
defaults and what they say are its own. Heavy imports happen inside the verb that needs them."""

from biphase import console


def silence(is_silent: bool = True) -> None:
    """End the bars and lines of all verbs; with False, begin them again."""
    console.err.quiet = console.out.quiet = is_silent
