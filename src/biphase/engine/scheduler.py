"""Run idempotent units: in this process, in worker processes of this machine, or on the machines of a Ray cluster.

In: units, each a function with plain arguments, and an engine that says where they run. Out: an outcome for each unit,
when it ends. This module decides order and errors, in the same way for all engines (`local`, `ray`). A unit claims its
result, writes it last and marks it done, so that a unit that runs again finds its work done.

Grids and studies run their units with a bar and with records of failures. FOLDER/failed/NAME.json records a unit whose
last attempt failed, or that a failed unit blocked. The record is removed when the unit is done.
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
from biphase.engine.local import LocalPool, attempt
from biphase.engine.ray import RayPool
from biphase.engine.units import Engine, Outcome, Pool, Unit, UnitQueue
from biphase.errors import InputError, StoppedError
from biphase.files import content_hash, read_json_as, write_json
from biphase.machine import STOPS, grace, handled

START_ATTEMPTS = 3
"""The number of consecutive workers that may end before they take a unit (for lack of memory, say). Then the run
ends."""

WAITING = "waiting for units on which other processes work"

Listener = Callable[[str, Any], None]
"""A function of a unit's name and its report of progress (`console.report_progress`)."""


def run_units(
    units: Iterable[Unit],
    engine: Engine,
    *,
    folder: Path | None = None,
    waits_for_busy: bool = False,
    on_progress: Listener = lambda name, value: None,
) -> Generator[Outcome, None, None]:
    """Yield the outcomes of all units, as they end. Closing the generator ends the workers.

    A unit that raises, or whose worker dies, has an outcome with an `error`. So does every unit that needs it
    (`blocked: NAME failed: ERROR`). All others run. After any exception but an `InputError` the worker is replaced,
    because the error may have broken the process too, as CUDA errors do. Without workers, a unit's `StoppedError` or
    `KeyboardInterrupt` ends the run.

    A unit on which another process works (`BusyError`) has an outcome with `is_busy` after each attempt (`UnitQueue`).
    Units that need it wait with it, or stay undone with it.

    A local worker gets its part of the cores as threads, or fewer if OMP_NUM_THREADS is lower here. It gets its GPU by
    CUDA_VISIBLE_DEVICES or AMD's variables, among the GPUs that these variables allow here. Workers are detached from
    the terminal. When the generator is closed, they and their children get SIGTERM. Processes that outlive their worker
    or `machine.grace` get SIGKILL. When this process is killed, workers end by themselves. While the generator is open,
    a signal in `machine.STOPS` raises `StoppedError`.

    On Ray, each worker reserves its CPUs, or its part of a GPU, on a node. The run ends if a node has other code or
    libraries, or does not see the current folder of this process or the files in `folder`. All other files that units
    read and write must also be on a file system that all nodes share.

    Raises:
        InputError: for a missing GPU, Ray or cluster, and for workers that do not start.
        StoppedError: after a signal in `machine.STOPS`.
    """
    queue = UnitQueue(list(units), waits_for_busy)
    grace()  # refuse an unreadable value before anything starts
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
    pools: dict[str, Callable[..., Pool]] = {"local": LocalPool, "ray": partial(RayPool, folder=folder)}
    with handled(stop, *STOPS), closing(pools[engine.kind](engine, queue.num_left)) as pool:
        # Each worker, known by its index, is starting, idle or running a unit.
        starting = set[int]()
        idle = set[int]()
        running = dict[int, Unit]()
        failed_starts = 0
        while queue.num_left:
            # 1. Start workers for the ready units that no idle or starting one will take.
            queue.readmit()
            num_needed = queue.num_ready - len(starting) - len(idle)
            free = [worker for worker in range(pool.limit) if worker not in starting | idle | running.keys()]
            for worker in free[: max(num_needed, 0)]:
                pool.start(worker)
                starting.add(worker)
            hand_out(queue, pool, idle, running)
            if not starting | idle | running.keys():
                queue.sleep()
            # 2. Read their messages: a unit's progress or outcome, a worker that is ready or ends.
            over: list[Outcome] = []
            for worker, (kind, body) in pool.listen():
                if kind == "progress":
                    if worker in running:
                        on_progress(running[worker].name, body)
                    continue
                if worker in running:
                    num_running = len(running)
                    over += queue.settle(replace(body, name=running.pop(worker).name, num_running=num_running))
                elif worker in starting:
                    starting.remove(worker)
                    failed_starts = failed_starts + 1 if kind == "ended" else 0
                    if failed_starts == START_ATTEMPTS:
                        raise InputError(f"workers do not start: {body.error}")
                if kind != "ended":
                    idle.add(worker)
                    continue
                idle.discard(worker)
                queue.affinities.pop(worker, None)
                pool.end([worker])
            hand_out(queue, pool, idle, running)  # before the caller takes its time with the outcomes
            yield from over


def hand_out(queue: UnitQueue, pool: Pool, idle: set[int], running: dict[int, Unit]) -> None:
    """Give each idle worker a unit, as long as some are ready."""
    for worker in sorted(idle):
        unit = queue.take(worker)
        if unit is None:
            return
        idle.remove(worker)
        running[worker] = unit
        pool.send(worker, pickle.dumps((unit.function, unit.arguments)))


def stop(signum: int, _: Any) -> None:
    """Raise `StoppedError`, once, so that workers end in order."""
    signal.signal(signum, signal.SIG_IGN)  # Slurm may send it twice
    raise StoppedError(signum=signum)


# Units with a bar and records of failures


@dataclass(frozen=True)
class Failure:
    """The record of a unit that failed."""

    unit: str
    reason: str
    traceback: str = ""

    @property
    def is_blocked(self) -> bool:
        """Whether the unit did not begin because a unit that it needs failed."""
        return self.reason.startswith("blocked: ")

    @property
    def cause(self) -> str:
        """The unit whose failure is the first reason: this one, or the one at the end of a chain of blocked units."""
        chain = re.match(r"(?:blocked: (.*?) failed: )+", self.reason)
        return chain[1] if chain else self.unit


def read_failure(path: Path, mtime: int | None = None) -> Failure | None:
    """Read the record of a failure; None if there is none, or if it dates from `mtime`."""
    try:
        return None if path.stat().st_mtime_ns == mtime else read_json_as(path, Failure)
    except (FileNotFoundError, InputError):
        if path.exists():
            raise
        return None


def read_failures(folder: Path) -> list[Failure]:
    """Read all records of failures in a folder."""
    return [failure for path in sorted((folder / "failed").glob("*.json")) if (failure := read_failure(path))]


def unless_failed(function: Callable[..., Any], arguments: dict[str, Any], record: Path, mtime: int | None) -> Any:
    """Run a unit, unless another process has recorded its failure since `mtime`: then raise that failure.

    Otherwise the processes that wait for a unit would repeat it one by one, for hours and with the same result.
    """
    failure = read_failure(record, mtime)
    if failure is not None and failure.traceback:  # else blocked, or its worker died: it may succeed here
        raise InputError(failure.reason)
    return function(**arguments)


def record_failure(path: Path, mtime: int | None, unit: Unit, outcome: Outcome) -> Failure | None:
    """Write and return the record of a failed unit; for a unit that is done, remove its record and return None.

    If another process has recorded the same failure since `mtime`, its record stays: it has the traceback.
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
    """The time and the summed cost of the finished units of a kind."""

    seconds: float
    cost: float


LEAST_PROGRESS = 0.1
"""The share of a unit that must be done before its pace counts, because its first seconds go to loading."""


class Forecast:
    """A forecast of the time that the remaining units will take.

    It assumes that time is proportional to cost. The factor comes from the units of the same kind so far, including
    running ones; before any of them has progressed, from all units. It also assumes that as many units run side by side
    as when the last one ended.
    """

    def __init__(self, units: Sequence[Unit], spent: Mapping[str, Pace] | None = None) -> None:
        """Start a forecast; `spent` is the pace of earlier calls, by kind."""
        self.left: dict[str, float] = defaultdict(float)
        """The cost of the remaining units, by kind."""
        self.seconds = defaultdict(float, {kind: pace.seconds for kind, pace in (spent or {}).items()})
        self.costs = defaultdict(float, {kind: pace.cost for kind, pace in (spent or {}).items()})
        """The time and the cost of the finished units, by kind."""
        self.running: dict[str, tuple[Unit, float, float]] = {}
        """Each unit that has reported progress, the share that is done, and the seconds that this share took."""
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
        """The seconds that one worker needs for the rest of each kind; None until a unit, or `LEAST_PROGRESS` of one,
        is done."""
        left = self.left.copy()
        seconds = self.seconds.copy()
        costs = self.costs.copy()
        for unit, progress, spent in self.running.values():
            if progress < LEAST_PROGRESS:
                continue
            left[unit.kind] -= progress * unit.cost
            seconds[unit.kind] += spent
            costs[unit.kind] += progress * unit.cost
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
    if plain != name or len(name.encode()) > 200:  # two names may have the same plain one
        plain = f"{plain.encode()[:150].decode(errors='ignore')}-{content_hash(name)[:8]}"
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
    """Run units whose values are lists of lines to print. Record the failures in `folder` and return them.

    Args:
        label: the name of the bar, which counts `things` by the units' `size`; `num_done` were done before.
        waits_for_busy: whether to wait for units on which other processes work; if not, leave these to them.
        spent: the pace of earlier calls, by kind, for the forecast.
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
        done, seconds, line = advance
        *_, longest = forecast.running.get(name, (0.0,))  # a unit may have several bars; the longest counts
        if done is not None and seconds >= longest:
            forecast.running[name] = by_name[name], done, seconds
        progress.advance(0, f"{name}: {line}", seconds_left=forecast.seconds_left)

    with console.track(label, num_done + sum(unit.size for unit in units), things, num_done) as progress:
        for outcome in run_units(tried, engine, folder=folder, waits_for_busy=waits_for_busy, on_progress=note_advance):
            unit = by_name[outcome.name]
            if outcome.is_busy:
                line = WAITING if waits_for_busy else f"{unit.name}: another process works on it"
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
