"""Progress for a person who waits: one bar with time left and rate on a terminal, plain lines elsewhere.

TensorBoard or Weights & Biases receive the records of metrics.jsonl under the names of transformers' trainer
(`train/learning_rate`, `eval/…`). Metrics that depend on the objective include its name (`train/mlm_loss`,
`eval/clm_accuracy`), so that no curve jumps at the end of an objective.
"""

import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from rich.text import Text

from biphase.errors import InputError, told_as
from biphase.machine import environment_number

TrackingName = Literal["tensorboard", "wandb"]

Send = Callable[[Mapping[str, Any]], None]
"""A function that receives each record of metrics.jsonl."""

OBJECTIVE_NUMBERS = ("loss", "accuracy", "bits_per_byte", "targets")
TRAINER_NAMES = {"lr": "learning_rate", "tokens_seen": "num_input_tokens_seen", "train": "train", "validation": "eval"}


def check_tracking(name: TrackingName | None) -> None:
    """Raise `InputError` if the package is not installed. A folder `wandb` of earlier runs is not a package."""
    if name and getattr(find_spec(name), "origin", None) is None:
        extra = "wandb" if name == "wandb" else "tracking"
        raise InputError(f"tracking: {name} needs a package that is not installed; pip install 'biphase[{extra}]'")


def name_scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """Name the numbers of a record: `{kind: train, objective: mlm, step: 3, loss: 2.0, lr: 0.1}` → train/mlm_loss 2.0,
    train/learning_rate 0.1."""
    scalars = {}
    for key, value in record.items():
        if key not in ("kind", "objective", "step"):
            name = f"{record['objective']}_{key}" if key in OBJECTIVE_NUMBERS else TRAINER_NAMES.get(key, key)
            scalars[f"{TRAINER_NAMES[record['kind']]}/{name}"] = value
    return scalars


@contextmanager
def open_tracking(name: TrackingName | None, folder: Path, settings: Mapping[str, Any]) -> Iterator[Send]:
    """Open a function that sends the records of a run's folder.

    A resumed run stays the same W&B run, with its files below the folder. Project, mode and account are W&B's own
    settings (WANDB_PROJECT, WANDB_MODE, `wandb login`); W&B groups the runs of a study under the study's name.
    TensorBoard drops earlier records from the first new record's step on; W&B ignores steps that it has.

    Args:
        settings: the configuration that W&B shows beside the curves.

    Raises:
        InputError: the package is missing, or W&B cannot be reached.
    """
    check_tracking(name)
    if name == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        with ExitStack() as opened:
            writers: list[SummaryWriter] = []

            def add(record: Mapping[str, Any]) -> None:
                if not writers:
                    writer = SummaryWriter(str(folder / "tensorboard"), purge_step=record["step"])
                    writers.append(opened.enter_context(writer))
                for key, value in name_scalars(record).items():
                    writers[0].add_scalar(key, value, record["step"])

            yield add
    elif name == "wandb":
        import wandb

        earlier = sorted((folder / "wandb").glob("*run-*-*"))  # offline-run-20261122_034831-abcd1234
        with told_as("tracking: wandb does not start", "set WANDB_MODE=offline, and `wandb sync` later"):
            run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "biphase"),
                name=folder.name,
                group=next((above.name for above in folder.resolve().parents if (above / "study.yaml").exists()), None),
                id=earlier[-1].name.rpartition("-")[2] if earlier else None,
                resume="allow",
                dir=str(folder),
                config=dict(settings),
                settings=wandb.Settings(console="off", silent=True),
            )
        err.print(f"W&B: {f'offline; `wandb sync {Path(run.dir).parent}` sends it' if run.offline else run.url}")
        exit_code = 1
        try:  # as a context manager, a W&B run would print the error
            yield lambda record: run.log(name_scalars(record), step=record["step"])
            exit_code = 0
        finally:
            run.finish(exit_code)
    else:
        yield lambda record: None


UNSEEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that control a terminal, reverse the direction of text, or cannot be encoded."""


def printable(text: str) -> str:
    """Spell out the characters of a text that control a terminal: `\\x1b` for an escape. Keep line ends and tabs."""
    return UNSEEN.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


class PlainConsole(Console):
    """A console that prints strings literally: file names and other people's texts are neither markup nor commands."""

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, highlight=False, soft_wrap=True, markup=False, emoji=False)
        self.soft_wrap = not (stderr and self.is_terminal)  # a terminal would break words

    def prose(self, text: str) -> None:
        """Print sentences: a terminal breaks their lines between words, a file has each on one line."""
        self.print(text, soft_wrap=not self.is_terminal)

    def render_str(self, text: str, **settings: Any) -> Text:
        return super().render_str(printable(text), **settings)


err = PlainConsole(stderr=True)
"""The console for messages and bars; messages appear above a bar."""
out = PlainConsole()
"""The console for results."""


def print_rows(
    heads: Sequence[str], rows: Iterable[Sequence[str]], title: str | None = None, console: PlainConsole = out
) -> None:
    """Print a table, names aligned left and numbers right."""
    table = Table(title=title)
    for head in heads:
        is_name = head in ("part", "model", "task", "name", "layer", "class")
        table.add_column(head, justify="left" if is_name else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)


Advance = tuple[float | None, float, str]
"""The progress of a silenced process: the finished share of its work (0 to 1), the seconds so far, and a line."""

report_progress: Callable[[Any], None] = lambda value: None  # noqa: E731
"""The function that reports the progress of this process's unit to the engine, as plain data; bars report an `Advance`.
The engine sets it while a unit runs."""


def silence(is_silent: bool = True) -> None:
    """Turn the bars and lines of all commands off; with False, on again."""
    err.quiet = out.quiet = is_silent


@contextmanager
def each_line_once() -> Iterator[None]:
    """Print equal messages only once in the block, which is not within another one."""
    print_line, told = err.print, set[str]()

    def print_new(*lines: Any, **settings: Any) -> None:
        texts = {line for line in lines if isinstance(line, str)}
        if not texts or not texts <= told:
            print_line(*lines, **settings)
        told.update(texts)

    vars(err)["print"] = print_new
    try:
        yield
    finally:
        del vars(err)["print"]


def announce_loading(command: str) -> None:
    """Print a line when PyTorch begins to load, because loading takes seconds in silence."""
    print_once = cache(partial(err.print, f"{command}: loading PyTorch"))

    def find_spec(name: str, *_: Any) -> None:
        if name in ("torch", "transformers"):
            print_once()  # the finder stays: removing it now would make the import skip the next finder

    finder: Any = SimpleNamespace(find_spec=find_spec)
    sys.meta_path.insert(0, finder)


def is_one_of_several() -> bool:
    """Return whether a launcher started this process beside others of the same run."""
    return environment_number("WORLD_SIZE", 1) > 1


def describe_copies() -> str:
    """Return a hint for a command that finds its work busy because Slurm started it several times."""
    copies = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    if copies == "1" or is_one_of_several():
        return ""
    return f"; srun started this command {copies} times, each on its own: one run of several processes needs torchrun"


TELLING_SECONDS, STOP_SECONDS = 30.0, 1.0
"""The seconds that a silenced process waits before it ends. After a failure, it waits for the launcher to end it. After
a stop it waits only a moment, because the launcher waits for all processes within their grace."""


def take_turn(*, is_shared: bool) -> None:
    """Let the process that prints the reason end before a silenced one, because a launcher ends all with the first.

    Then this process prints its own reason, unless all processes share it: a stop is printed once.
    """
    if err.quiet and is_one_of_several():
        time.sleep(STOP_SECONDS if is_shared else TELLING_SECONDS)
        err.quiet = is_shared


def duration(seconds: float) -> str:
    """Format seconds for a person: `95` → `1m35s`."""
    seconds = round(max(seconds, 0))
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m{seconds % 60:02d}s"
    return f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"


QUICK_SECONDS = 3.0
"""The seconds that work may take without an announcement."""


@contextmanager
def told_if_slow(line: str) -> Iterator[None]:
    """Print a line once the block has run for `QUICK_SECONDS`."""
    timer = threading.Timer(QUICK_SECONDS, err.print, [line])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


bar_prefix, bar_later = "", 0.0
"""The prefix of the names of bars, and the units of work that follow each; `prefix_bars` sets both."""


@contextmanager
def prefix_bars(prefix: str, later: float = 0.0) -> Iterator[None]:
    """Put a prefix before the name of each bar that opens in the block, for work that is a part of a larger one. Its
    time left counts the units that come `later`, after this part."""
    global bar_prefix, bar_later
    bar_prefix, bar_later = prefix, later
    try:
        yield
    finally:
        bar_prefix, bar_later = "", 0.0


LINE_SECONDS, LIVE_SECONDS = 10.0, 0.5
"""The least seconds between two lines in a log file, and between two changes of a notebook's line."""
LONGEST_SILENCE = 30.0
"""The seconds after which a log file gets a line although nothing was finished."""
PERIODS = {"s": 1, "min": 60, "h": 3600}
"""The periods of a rate. A bar uses the first one in which at least one unit is finished."""
FEWEST_ADVANCES, TELLING_TIME = 4, 5.0
"""The number of advances after which a bar shows the time left. Two suffice after `TELLING_TIME` seconds. The first
advance includes the warm-up."""


def plain_number(value: float) -> str:
    """Format a number for a person: `1,040`, `12`, `4.2`, `0.05`."""
    return f"{value:,.0f}" if value >= 10 or value == round(value) else f"{round(value, 3):.2g}"


class Tracker:
    """The progress of long work with a known or unknown total, in any unit (`MB`, `steps`, `cells`).

    A terminal shows a live bar as wide as the line. A notebook shows one line, which changes and disappears at the end.
    Log files get a line at most every `LINE_SECONDS` and at least every `LONGEST_SILENCE`.
    """

    def __init__(self, label: str, total: float | None, unit: str, done: float = 0.0) -> None:
        """Start a bar. `done` units come from an earlier call and do not count for the rate."""
        label = bar_prefix + label
        self.label, self.total, self.unit, self.later = label, total, unit, bar_later
        self.done = self.credited = done
        self.text = self.period = ""
        self.num_advances, self.first = 0, (0.0, 0.0)
        self.started = self.last_line = self.last_advance = time.monotonic()
        self.is_over = threading.Event()
        self.bar: Progress | None = None
        self.live: Any = None
        if err.is_terminal and not err.quiet:
            whole = Column(no_wrap=True, min_width=len(label))
            name = TextColumn("{task.description}", markup=False, table_column=whole)
            bars = [BarColumn(24)] if err.width >= 110 else []  # if there is room
            clipped_end = Column(no_wrap=True, overflow="ellipsis", ratio=1)
            note = TextColumn("{task.fields[note]}", markup=False, table_column=clipped_end)
            self.bar = Progress(name, *bars, TimeElapsedColumn(), note, console=err, transient=True, expand=True)
            self.bar.start()
            self.task: TaskID = self.bar.add_task(printable(label), total=total, note="")
        elif err.is_jupyter and not err.quiet:
            from IPython.display import display  # type: ignore[import-not-found, unused-ignore]

            self.live = display({"text/plain": ""}, raw=True, display_id=True)
        elif not err.quiet:
            threading.Thread(target=self.break_silence, daemon=True).start()
        if total:
            self.advance(0)

    def advance(self, amount: float, note: str = "", *, seconds_left: float | None = None) -> None:
        """Count `amount` units as done. Pass `seconds_left` where units differ too much to predict it by their rate."""
        self.done += amount
        now = self.last_advance = time.monotonic()
        if amount:
            self.num_advances += 1
            if self.num_advances == 1:
                self.first = now, self.done
        rate = (self.done - self.credited) / max(now - self.started, 1e-9)
        if rate and not self.period:
            self.period = next((name for name, seconds in PERIODS.items() if rate * seconds >= 1), "h")
        began, done = self.first
        is_sure = self.num_advances >= FEWEST_ADVANCES or (self.num_advances > 1 and now - began > TELLING_TIME)
        if seconds_left is None and self.total and is_sure:
            seconds_left = (now - began) / (self.done - done) * (self.total - self.done + self.later)
        counted = f"{plain_number(self.done)}/{plain_number(self.total)}" if self.total else plain_number(self.done)
        time_left = "" if seconds_left is None else f" · {duration(seconds_left)} left{' in all' * bool(self.later)}"
        speed = f" · {plain_number(rate * PERIODS[self.period])} {self.unit}/{self.period}" if rate else ""
        self.text = f"{counted} {self.unit}{time_left}{speed}" + (f" · {note}" if note else "")
        if self.bar is not None:
            self.bar.update(self.task, completed=self.done, note=printable(self.text))
        elif time.monotonic() - self.last_line >= (LINE_SECONDS if self.live is None else LIVE_SECONDS):
            self.print_line(self.text)

    def print_line(self, text: str) -> None:
        self.last_line = time.monotonic()
        if err.quiet:
            progress = (self.done - self.credited) / max(self.total - self.credited, 1e-9) if self.total else None
            report_progress((progress, self.last_line - self.started, f"{self.label}: {text}"))
        elif self.live is not None:
            self.live.update({"text/plain": printable(f"{self.label}: {text}")}, raw=True)
        else:
            print(printable(f"{self.label}: {text}"), file=sys.stderr, flush=True)

    def break_silence(self) -> None:
        while not self.is_over.wait(1.0):
            if time.monotonic() - self.last_line >= LONGEST_SILENCE:
                working = f"still working, {duration(time.monotonic() - self.last_advance)} since the last progress"
                self.print_line(f"{self.text} · {working}".lstrip(" ·"))

    def close(self) -> None:
        self.is_over.set()
        if self.bar is not None:
            self.bar.stop()
        if self.live is not None:
            self.live.update({"text/plain": ""}, raw=True)


def track(label: str, total: float | None, unit: str, done: float = 0.0) -> closing[Tracker]:
    """Open a bar: `with track("prepare", 204.1, "MB") as progress: progress.advance(1.5)`."""
    return closing(Tracker(label, total, unit, done))
