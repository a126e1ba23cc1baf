"""Run idempotent units: in this process, in worker processes of this machine, or on the machines of a Ray cluster.

In: units, each a function with plain arguments, and an engine that says where. Out: an outcome per unit, as they end.
Order and errors are decided here, alike for all engines (`local`, `ray`). What a unit makes is its own to claim, write
last and mark done: a unit that is run again finds its work done.

What a grid and a study have in common stands here too: units done with a bar, and the record of those that failed.
FOLDER/failed/NAME.json is that of a unit that failed when it was last tried, or was not tried, because a unit that it
needs failed. It goes when the unit is done.
"""

import pickle
import re
import signal
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from biphase import console
from biphase.engine.local import Engine, LocalPool, Outcome, Unit, UnitQueue, attempt
from biphase.engine.ray import RayPool
from biphase.errors import InputError, StoppedError
from biphase.files import content_hash, read_json_as, write_json
from biphase.machine import STOPS, grace, handled

START_ATTEMPTS = 3
"""Workers in a row that may end before they take a unit (short of memory, say) before the whole run is given up."""

WAITING = "waiting for units that other processes are at"

Listener = Callable[[str, Any], None]
"""Called with a unit's name and what it says on the way (`console.report_progress`)."""


def run_units(
    units: Iterable[Unit],
    engine: Engine,
    *,
    folder: Path | None = None,
    waits_for_busy: bool = False,
    on_progress: Listener = lambda name, value: None,
) -> Generator[Outcome, None, None]:
    """Yield the outcomes of all units, as they end. Closing the generator ends the workers.

    An exception in a unit, or the death of its worker, is an outcome with an `error`, and so is every unit that needs
    one of those (`blocked: NAME failed: ERROR`); all others go on. After any exception but an `InputError` the worker
    is replaced: what broke a unit may have broken its process too, as CUDA errors do. Without workers, in this process,
    `StoppedError` and `KeyboardInterrupt` of a unit end the run.

    A unit that another process is at (`BusyError`) is an outcome with `is_busy`, each time that it is tried
    (`UnitQueue`); what needs it waits with it, or is over with it.

    A local worker gets its share of the cores as threads, or fewer where OMP_NUM_THREADS says so here, and its GPU by
    CUDA_VISIBLE_DEVICES or AMD's variables, within what they allow here. Workers stand apart from the terminal. When
    the generator is closed, they and what they started get SIGTERM; what is left when a worker is gone, or after
    `machine.grace`, gets SIGKILL. When this process is killed, they end by themselves. One of `machine.STOPS` to it is
    raised as `StoppedError` while the generator is open.

    On Ray, each worker holds its CPUs, or its part of a GPU, on some node. A node whose workers have other code, do not
    see the current folder of this process, or not what is written into `folder`, ends the run. All else that units
    read and write must lie on a file system that all nodes share, too.

    Raises:
        InputError: no GPU where one is asked for, no Ray, no cluster, or workers that do not start.
        StoppedError: on one of `machine.STOPS`.
    """
    queue = UnitQueue(list(units), waits_for_busy)
    grace()  # what cannot be read is told before anything starts
    return run_here(queue, on_progress) if engine.workers == 0 else schedule(queue, engine, folder, on_progress)


def run_here(queue: UnitQueue, on_progress: Listener) -> Generator[Outcome, None, None]:
    with handled(stop, *STOPS):
        while queue.num_left:
            unit = queue.take(0)
            if unit is None:
                queue.sleep()
                continue
            _, outcome = attempt(partial(unit.function, **unit.arguments), partial(on_progress, unit.name))
            yield from queue.settle(replace(outcome, name=unit.name))


def schedule(
    queue: UnitQueue, engine: Engine, folder: Path | None, on_progress: Listener
) -> Generator[Outcome, None, None]:
    if not queue.num_left:
        return
    make_pool = partial(RayPool, folder=folder) if engine.kind == "ray" else LocalPool
    with handled(stop, *STOPS), closing(make_pool(engine, queue.num_left)) as pool:
        # Each worker, known by its number, is starting, idle or at a unit.
        starting, idle, running = set[int](), set[int](), dict[int, Unit]()
        failed_starts = 0
        while queue.num_left:
            # 1. Start workers for the ready units that no idle or starting one will take.
            queue.readmit()
            num_needed = queue.num_ready - len(starting) - len(idle)
            free = [number for number in range(pool.limit) if number not in starting | idle | running.keys()]
            for number in free[: max(num_needed, 0)]:
                pool.start(number)
                starting.add(number)
            hand_out(queue, pool, idle, running)
            if not starting | idle | running.keys():
                queue.sleep()
            # 2. Hear what they say: how far a unit is, what came of it, that they are ready, that they end.
            over: list[Outcome] = []
            for number, (kind, body) in pool.listen():
                if kind == "progress":
                    if number in running:
                        on_progress(running[number].name, body)
                    continue
                if number in running:
                    num_running = len(running)
                    over += queue.settle(replace(body, name=running.pop(number).name, num_running=num_running))
                elif number in starting:
                    starting.remove(number)
                    failed_starts = failed_starts + 1 if kind == "ended" else 0
                    if failed_starts == START_ATTEMPTS:
                        raise InputError(f"workers do not start: {body.error}")
                if kind != "ended":
                    idle.add(number)
                    continue
                idle.discard(number)
                queue.affinities.pop(number, None)
                pool.end([number])
            hand_out(queue, pool, idle, running)  # before the caller takes its time with the outcomes
            yield from over


def hand_out(queue: UnitQueue, pool: LocalPool | RayPool, idle: set[int], running: dict[int, Unit]) -> None:
    """Give the idle workers a unit each, as long as there are some."""
    for number in sorted(idle):
        unit = queue.take(number)
        if unit is None:
            return
        idle.remove(number)
        running[number] = unit
        pool.send(number, pickle.dumps((unit.function, unit.arguments)))


def stop(signum: int, _: Any) -> None:
    """Raise `StoppedError`, once, so that workers are ended in order."""
    signal.signal(signum, signal.SIG_IGN)  # Slurm may say it twice
    raise StoppedError(signum=signum)


# Units done with a bar, and the record of those that failed


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


def read_failure(path: Path, mtime: int | None = None) -> Failure | None:
    """Read the record of a failure; None where there is none, or none that was written since the time `mtime`."""
    try:
        return None if path.stat().st_mtime_ns == mtime else read_json_as(path, Failure)
    except (FileNotFoundError, InputError):
        if path.exists():
            raise
        return None


def read_failures(folder: Path) -> list[Failure]:
    """Read what failed last time in a folder that units worked on."""
    return [failure for path in sorted((folder / "failed").glob("*.json")) if (failure := read_failure(path))]


def unless_failed(function: Callable[..., Any], arguments: dict[str, Any], record: Path, mtime: int | None) -> Any:
    """Do a unit, unless another process has failed at it since the time `mtime` of its record: that is told again.

    The processes that wait for a unit would else repeat it one by one, for hours and to the same end.
    """
    failure = read_failure(record, mtime)
    if failure is not None and failure.traceback:  # else it was blocked, or its worker died: here it may not
        raise InputError(failure.reason)
    return function(**arguments)


def record_failure(path: Path, mtime: int | None, unit: Unit, outcome: Outcome) -> Failure | None:
    """Write what became of a unit that failed; of one that did not, None, and what is recorded of it goes.

    Another process' record of the same failure, written since `mtime`, stays: it has the traceback.
    """
    if outcome.error is None:
        path.unlink(missing_ok=True)
        return None
    failure = Failure(unit.name, outcome.error, outcome.traceback)
    with suppress(InputError):
        recorded = read_failure(path, mtime)
        if recorded is not None and recorded.reason == failure.reason:
            return recorded
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, asdict(failure))
    return failure


@dataclass(frozen=True)
class Pace:
    """What units of a kind took that are done."""

    seconds: float
    cost: float
    """The sum of their `cost`."""


LEAST_SHARE = 0.1


class Forecast:
    """A forecast of how long the units that are left will take.

    A unit takes as long for its cost as those of its kind took so far, the parts of those that run included, or, before
    there is one of its kind, as all. As many units run side by side as did when the last one ended.
    """

    def __init__(self, units: Sequence[Unit], spent: Mapping[str, Pace] | None = None) -> None:
        """`spent`: what was done before, by kind."""
        self.left: dict[str, float] = defaultdict(float)
        """The cost of the units that are left, by kind."""
        self.seconds = defaultdict(float, {kind: pace.seconds for kind, pace in (spent or {}).items()})
        self.costs = defaultdict(float, {kind: pace.cost for kind, pace in (spent or {}).items()})
        """What those that are done took and cost, by kind."""
        self.running: dict[str, tuple[Unit, float, float]] = {}
        """Each unit that has said how far it is, with the share that is done and the seconds that this took."""
        self.num_running = 1
        for unit in units:
            self.left[unit.kind] += unit.cost

    def note(self, unit: Unit, outcome: Outcome) -> None:
        self.running.pop(unit.name, None)
        self.left[unit.kind] -= unit.cost
        self.num_running = outcome.num_running
        if outcome.error is None and unit.cost:
            self.seconds[unit.kind] += outcome.seconds
            self.costs[unit.kind] += unit.cost

    @property
    def seconds_by_kind(self) -> dict[str, float] | None:
        """The seconds of one worker for what is left of each kind; None before a unit is done, or `LEAST_SHARE` of one:
        its first seconds make ready."""
        left, seconds, costs = self.left.copy(), self.seconds.copy(), self.costs.copy()
        for unit, share, spent in self.running.values():
            if share < LEAST_SHARE:
                continue
            left[unit.kind] -= share * unit.cost
            seconds[unit.kind] += spent
            costs[unit.kind] += share * unit.cost
        if not sum(costs.values()):
            return None
        of_all = sum(seconds.values()) / sum(costs.values())
        return {kind: cost * (seconds[kind] / costs[kind] if costs[kind] else of_all) for kind, cost in left.items()}

    @property
    def seconds_left(self) -> float | None:
        by_kind = self.seconds_by_kind
        return None if by_kind is None else sum(by_kind.values()) / max(self.num_running, len(self.running))


def failure_path(folder: Path, unit: Unit) -> Path:
    """Return the file that records the failure of a unit."""
    name = unit.file or unit.name
    plain = re.sub(r"[^\w.=@+-]+", "-", name)
    if plain != name:  # two names may have the same plain one
        plain = f"{plain[:150]}-{content_hash(name)[:8]}"
    return folder / "failed" / f"{plain}.json"


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
    spent: Mapping[str, Pace] | None = None,
) -> list[Failure]:
    """Run units whose values are lists of lines to say; returns what failed, which `folder` records too.

    Args:
        label: what the bar is called; it counts `things`, by the units' `size`, of which `num_done` were done before.
        waits_for_busy: wait for what other processes are at, in place of leaving it to them.
        spent: what was done before, by kind, to tell the time left by.
    """
    by_name = {unit.name: unit for unit in units}
    records: dict[str, tuple[Path, int | None]] = {}
    tried = []
    for unit in units:
        path = failure_path(folder.resolve(), unit)
        mtime = path.stat().st_mtime_ns if path.exists() else None
        records[unit.name] = path, mtime
        arguments = {"function": unit.function, "arguments": unit.arguments, "record": path, "mtime": mtime}
        tried.append(replace(unit, function=unless_failed, arguments=arguments) if waits_for_busy else unit)
    forecast, failures, told_busy = Forecast(units, spent), list[Failure](), set[str]()

    def note_advance(name: str, advance: console.Advance) -> None:
        share, seconds, line = advance
        if share is not None:
            forecast.running[name] = by_name[name], share, seconds
        progress.advance(0, f"{name}: {line}", seconds_left=forecast.seconds_left)

    with console.track(label, num_done + sum(unit.size for unit in units), things, num_done) as progress:
        for outcome in run_units(tried, engine, folder=folder, waits_for_busy=waits_for_busy, on_progress=note_advance):
            unit = by_name[outcome.name]
            if outcome.is_busy:
                line = WAITING if waits_for_busy else f"{unit.name}: left to the process that is at it"
                if line not in told_busy:
                    console.err.print(line)
                told_busy.add(line)
                continue
            forecast.note(unit, outcome)
            progress.advance(unit.size, unit.name, seconds_left=forecast.seconds_left)
            failure = record_failure(*records[unit.name], unit, outcome)
            if failure is None:
                for line in outcome.value:
                    console.err.print(line)
                on_done(unit)
                continue
            failures.append(failure)
            if not failure.is_blocked:  # one bad file may block hundreds
                console.err.print(f"{failure.unit}: {failure.reason}")
    return failures
