"""What is printed is what was meant: no markup in names, no commands to the terminal in the texts of others."""

import io
import time
from typing import Any

import pytest
from rich.text import Text

from biphase import console as console_module
from biphase.console import (
    Advance,
    PlainConsole,
    Tracker,
    each_line_once,
    err,
    is_one_of_several,
    plain_number,
    printable,
    silence,
    told_if_slow,
)
from biphase.errors import InputError


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_terminal_breaks_sentences_between_words(is_terminal: bool) -> None:
    console = PlainConsole()
    console.file, console.width, console._force_terminal = io.StringIO(), 20, is_terminal
    console.prose("labels of train: Systemverwaltung 3")
    first = console.file.getvalue().split("\n")[0]
    assert first.rstrip() == "labels of train:" + " Systemverwaltung 3" * (not is_terminal)


@pytest.mark.parametrize("text", ["runs/[/red]x", "[bold]x[/bold]", ":smile:", "a\tb", "ä – 😀"])
def test_strings_are_printed_as_they_are(text: str) -> None:
    console = PlainConsole()
    console.file = io.StringIO()
    console.print(text)
    assert console.file.getvalue() == text.expandtabs() + "\n"


def test_a_terminal_is_given_no_commands(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    hostile = "\x1b]0;title\x07\x9b2J\u202eabc\udc80\r"
    shown = r"\x1b]0;title\x07\x9b2J\u202eabc\udc80\r"
    assert printable(hostile) == shown
    console = PlainConsole()
    console.file = io.StringIO()
    console.print(hostile)
    assert console.file.getvalue() == shown + "\n"
    monkeypatch.setattr(console_module, "LINE_SECONDS", 0)
    tracker = Tracker("x\x1b[31m", 10, "MB")
    tracker.advance(1, "\x1b[0m")
    tracker.close()
    assert "\x1b" not in capsys.readouterr().err


def test_equal_lines_are_printed_once_in_a_block(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        with each_line_once():
            for line in ("left out: 3", "other", "left out: 3"):
                err.print(line)
            err.print()
    assert capsys.readouterr().err == "left out: 3\nother\n\n" * 2


def test_what_a_launcher_says_is_a_number_or_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, is_one in (("", False), ("1", False), ("4", True)):
        monkeypatch.setenv("WORLD_SIZE", value)
        assert is_one_of_several() == is_one
    for value in ("abc", "-1", "0", "1.5"):
        monkeypatch.setenv("WORLD_SIZE", value)
        with pytest.raises(InputError, match=f"WORLD_SIZE={value} in the environment"):
            is_one_of_several()


@pytest.mark.parametrize(
    ("width", "seen"), [(120, "20 steps/s · clm loss 3.123"), (80, "1m25s left"), (60, "1m25s left")]
)
def test_a_bar_is_one_line_of_any_width(width: int, seen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The label and how much is left are never cut; the rest of a note that does not fit is."""
    terminal = PlainConsole(stderr=True)
    terminal._environ = {"TERM": "xterm"}
    monkeypatch.setattr(terminal, "_force_terminal", True)
    monkeypatch.setattr(terminal, "_width", width)
    monkeypatch.setattr(console_module, "err", terminal)
    with terminal.capture():
        tracker = Tracker("fine-tune wnut17", 3000, "steps", 100)
        tracker.started -= 60
        tracker.advance(1200, "clm loss 3.123 · " + "long " * 40, seconds_left=85)
        assert tracker.bar is not None
        with terminal.capture() as shown:
            terminal.print(tracker.bar.get_renderable())
        tracker.close()
    [line] = [line for line in plain_lines(shown.get()) if line]
    assert line.startswith("fine-tune wnut17 ") and "1,300/3,000 steps" in line and seen in line
    assert len(line) <= width


def plain_lines(text: str) -> list[str]:
    """Lines without what colours them."""
    return [line.rstrip() for line in Text.from_ansi(text).plain.splitlines()]


def test_a_log_file_gets_lines_whatever_takes_so_long(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console_module, "LONGEST_SILENCE", 0.0)
    tracker = Tracker("study", 35, "units", 3)
    found = ""
    while not found:
        time.sleep(0.05)
        found = capsys.readouterr().err
    tracker.close()
    assert found.startswith("study: 3/35 units · ") and found.endswith(" since the last progress\n")


def test_what_takes_long_is_told_once_and_what_is_quick_never(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with told_if_slow("model: reading the weights"):
        pass
    monkeypatch.setattr(console_module, "QUICK_SECONDS", 0.01)
    found = ""
    with told_if_slow("[b]model[/b]: reading the weights"):
        while not found:
            time.sleep(0.02)
            found = capsys.readouterr().err
    assert found == "[b]model[/b]: reading the weights\n"
    assert capsys.readouterr().err == ""


def test_a_silent_process_sends_how_far_it_is(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    sent: list[Advance] = []
    monkeypatch.setattr(console_module.err, "quiet", False)
    monkeypatch.setattr(console_module.out, "quiet", False)
    monkeypatch.setattr(console_module, "report_progress", sent.append)
    monkeypatch.setattr(console_module, "LINE_SECONDS", 0)
    silence()
    tracker = Tracker("pretrain", 20, "steps", 10)
    tracker.advance(5, "loss 3")
    assert [share for share, _, _ in sent] == [0, 0.5]
    assert sent[1][2].startswith("pretrain: 15/20 steps") and sent[1][2].endswith("loss 3")
    assert capsys.readouterr().err == ""


def test_a_rate_keeps_its_unit_and_plain_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(console_module.time, "monotonic", lambda: now[0])
    tracker = Tracker("study", 2000, "units")
    told = []
    for rate in (2.0, 0.11, 0.01, 12.5):
        now[0], tracker.done = 100.0, 100.0 * rate
        tracker.advance(0)
        told.append(tracker.text.split(" · ")[-1])
    tracker.close()
    assert told == ["2 units/s", "0.11 units/s", "0.01 units/s", "12 units/s"]
    assert [plain_number(value) for value in (1040.2, 4.21349, 600, 0)] == ["1,040", "4.2", "600", "0"]


def test_the_time_left_is_told_once_it_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step takes a minute, all others a second."""
    now = [0.0]
    monkeypatch.setattr(console_module.time, "monotonic", lambda: now[0])
    tracker = Tracker("pretrain", 100, "steps")
    told = []
    for at in range(4):
        now[0] = 60.0 + at
        tracker.advance(1)
        told.append("left" in tracker.text)
    tracker.close()
    assert told == [False, False, False, True] and "4/100 steps · 1m36s left · 3.8 steps/min" in tracker.text


def test_the_time_left_of_a_part_is_that_of_all_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes a second; 30 steps follow this part of 10."""
    now = [0.0]
    monkeypatch.setattr(console_module.time, "monotonic", lambda: now[0])
    with console_module.prefix_bars("first · ", later=30):
        tracker = Tracker("pretrain", 10, "steps")
    for at in range(1, 7):
        now[0] = float(at)
        tracker.advance(1)
    tracker.close()
    assert tracker.label == "first · pretrain" and "6/10 steps · 34s left in all · 1 steps/s" in tracker.text
    alone = Tracker("pretrain", 10, "steps")
    alone.close()
    assert alone.later == 0


def test_slow_work_tells_the_time_left_after_its_second_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(console_module.time, "monotonic", lambda: now[0])
    tracker = Tracker("pretrain", 100, "steps")
    for at in (9.0, 15.0):
        now[0] = at
        tracker.advance(1)
    tracker.close()
    assert "2/100 steps · 9m48s left" in tracker.text
