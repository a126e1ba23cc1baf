"""A list of units, done with a bar, and the record of those that failed: what a grid and a study have in common.

FOLDER/failed/NAME.json is the record of a unit that failed when it was last tried, or was not tried, because a unit
that it needs failed. It goes when the unit is done.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from biphase import console
from biphase.engine.local import Engine
from biphase.engine.scheduler import run_units
from biphase.engine.units import Outcome, Unit
from biphase.files import content_hash, read_json_as, write_json


@dataclass(frozen=True)
class Failure:
    """The record of a unit that failed."""

    unit: str
    reason: str
    traceback: str = ""

    @property
    def is_blocked(self) -> bool:
        """Whether it did not begin, because something that it needs failed."""
        return self.reason.startswith("blocked: ")


def failure_path(folder: Path, unit: Unit) -> Path:
    name = unit.file or unit.name
    plain = re.sub(r"[^\w.=@+-]+", "-", name)
    if plain != name:  # two names may have the same plain one
        plain = f"{plain[:150]}-{content_hash(name)[:8]}"
    return folder / "failed" / f"{plain}.json"


def read_failures(folder: Path) -> list[Failure]:
    """What failed last time in a folder that units worked on."""
    return [read_json_as(path, Failure) for path in sorted((folder / "failed").glob("*.json"))]


class Forecast:
    """How long the units that are left will take.

    A unit takes as long for its cost as those of its kind took so far, or, before one of its kind is done, as all. As
    many units run side by side as did when the last one ended.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self.left: dict[str, float] = defaultdict(float)
        """The cost of the units that are left, by kind."""
        self.seconds: dict[str, float] = defaultdict(float)
        """What those that are done took, by kind."""
        self.costs: dict[str, float] = defaultdict(float)
        """What those that are done cost, by kind."""
        self.num_running = 1
        for unit in units:
            self.left[unit.kind] += unit.cost

    def note(self, unit: Unit, outcome: Outcome) -> None:
        """A unit is over."""
        self.left[unit.kind] -= unit.cost
        self.num_running = outcome.num_running
        if outcome.error is None and unit.cost:
            self.seconds[unit.kind] += outcome.seconds
            self.costs[unit.kind] += unit.cost

    @property
    def seconds_left(self) -> float | None:
        """None before the first unit is done."""
        if not self.costs:
            return None
        of_all = sum(self.seconds.values()) / sum(self.costs.values())
        total = 0.0
        for kind, cost in self.left.items():
            total += cost * (self.seconds[kind] / self.costs[kind] if kind in self.costs else of_all)
        return total / self.num_running


def run_batch(
    units: Sequence[Unit],
    engine: Engine,
    folder: Path,
    *,
    label: str,
    things: str,
    num_done: int = 0,
    waits_for_busy: bool = False,
    on_done: Callable[[Unit], None] = lambda unit: None,
) -> list[Failure]:
    """Run units whose values are lists of lines to say; returns what failed, which `folder` records too.

    A failure blocks only what needs it, and is told unless it is such a block: one bad file may block hundreds.

    Args:
        label: what the bar is called.
        things: what it counts, by the units' `size`.
        num_done: how many things were done before.
        waits_for_busy: wait for what other processes are at, in place of leaving it to them.
        on_done: called with each unit that is done.
    """
    by_name = {unit.name: unit for unit in units}
    failures: list[Failure] = []
    forecast = Forecast(units)
    has_waited = False
    with console.track(label, num_done + sum(unit.size for unit in units), things) as progress:
        progress.advance(num_done, already_done=True)
        for outcome in run_units(units, engine, waits_for_busy=waits_for_busy):
            unit = by_name[outcome.name]
            if outcome.is_busy:
                if not waits_for_busy:
                    progress.say(f"{unit.name}: left to the process that is at it")
                elif not has_waited:
                    progress.say("waiting for units that other processes are at")
                    has_waited = True
                continue
            forecast.note(unit, outcome)
            progress.advance(unit.size, unit.name, seconds_left=forecast.seconds_left)
            if outcome.error is None:
                failure_path(folder, unit).unlink(missing_ok=True)
                for line in outcome.value:
                    progress.say(line)
                on_done(unit)
                continue
            failures.append(Failure(unit.name, outcome.error, outcome.traceback))
            path = failure_path(folder, unit)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, asdict(failures[-1]))
            if not failures[-1].is_blocked:
                progress.say(f"{unit.name}: {outcome.error}")
    return failures
