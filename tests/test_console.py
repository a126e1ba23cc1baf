"""What is printed is what was meant: no markup in names, no commands to the terminal in the texts of others."""

import io

import pytest

from biphase.console import PlainConsole, Tracker, printable


@pytest.mark.parametrize("text", ["runs/[/red]x", "[bold]x[/bold]", ":smile:", "a\tb", "ä – 😀"])
def test_strings_are_printed_as_they_are(text: str) -> None:
    console = PlainConsole()
    console.file = io.StringIO()
    console.print(text)
    assert console.file.getvalue() == text.expandtabs() + "\n"


def test_a_terminal_is_given_no_commands(capsys: pytest.CaptureFixture[str]) -> None:
    hostile = "\x1b]0;title\x07\x9b2J\u202eabc\udc80\r"
    shown = r"\x1b]0;title\x07\x9b2J\u202eabc\udc80\r"
    assert printable(hostile) == shown
    console = PlainConsole()
    console.file = io.StringIO()
    console.print(hostile)
    assert console.file.getvalue() == shown + "\n"
    tracker = Tracker("x\x1b[31m", 10, "MB", every_seconds=0)
    tracker.advance(1, "\x1b[0m")
    assert "\x1b" not in capsys.readouterr().err
