"""Run idempotent units: in this process, in worker processes of this machine, or on the machines of a Ray cluster.

In: units, each a function with plain arguments, and an engine that says where. Out: an outcome per unit, as they end.
Order and errors are decided here, alike for all engines (`workers`, `cluster`). What a unit makes is its own to claim,
write last and mark done: a unit that is run again finds its work done.
"""

import heapq
import pickle
import signal
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import Any

from biphase.engine.local import Engine, Processes, Reply, attempt
from biphase.engine.ray import Actors
from biphase.errors import InputError, StoppedError

START_ATTEMPTS = 3
"""Workers in a row that may end before they take a unit (short of memory, say) before the whole run is given up."""


@dataclass(frozen=True)
class Unit:
    """A piece of work that another process can do: `function(**arguments)`.

    `function` stands at the top level of a module that a worker can import; `arguments` and what it returns are plain
    data. Units of one `affinity` share what they load, so one worker gets them in a row where possible; the empty one
    is none. `needs` names units that must have ended without an error before this one starts.
    """

    name: str
    function: Callable[..., Any]
    arguments: dict[str, Any]
    affinity: str = ""
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """What became of a unit: its value, or one line of `error`; `traceback` holds the rest, for a log."""

    name: str
    value: Any
    error: str | None
    seconds: float
    traceback: str = ""


def run_units(units: Iterable[Unit], engine: Engine) -> Generator[Outcome, None, None]:
    """The outcomes of all units, as they end. Closing the generator ends the workers.

    A free worker takes a unit that the longest chain of others waits for; among those, one of the affinity that it had
    last, else of the affinity with the most units left that no other worker has, else of the one with the most.

    An exception in a unit, or the death of its worker, is an outcome with an `error`, and so is every unit that needs
    one of those (`blocked: NAME failed: ERROR`); all others go on. After any exception but an `InputError` the worker
    is replaced: what broke a unit may have broken its process too, as CUDA errors do. Without workers, in this process,
    `StoppedError` and `KeyboardInterrupt` of a unit end the run.

    A local worker gets its share of the cores as threads and its GPU by CUDA_VISIBLE_DEVICES, within what that variable
    allows here. Workers stand apart from the terminal. When the generator is closed, they and what they started get
    SIGTERM; what is left when a worker is gone, or after `GRACE_SECONDS`, gets SIGKILL. When this process is killed,
    they end by themselves. SIGTERM to this process is raised as `StoppedError` while the generator is open.

    On Ray, each worker holds its CPUs, or its part of a GPU, on some node. All nodes must have this package and the
    same Python, and paths in arguments must be absolute and on a file system that all nodes share.

    Raises:
        ValueError: two units of one name, needs in a circle or of a unit that is not there.
        InputError: no GPU where one is asked for, no Ray, no cluster, or workers that do not start.
        StoppedError: on SIGTERM.
    """
    queue = Queue(list(units))
    return run_here(queue) if engine.workers == 0 else run_in_workers(queue, engine)


# Which unit comes next


class Queue:
    """The units that wait, in groups of equal urgency and affinity. A decision costs O(workers · log groups)."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self.units = {unit.name: unit for unit in units}
        self.missing = {unit.name: set(unit.needs) for unit in units}
        self.dependents: dict[str, list[str]] = defaultdict(list)
        self.num_left, self.num_ready = len(units), 0
        self.groups: dict[tuple[int, str], deque[Unit]] = {}
        self.entries: dict[tuple[int, str], tuple[int, int, int, tuple[int, str]]] = {}
        self.heap: list[tuple[int, int, int, tuple[int, str]]] = []
        self.holders: Counter[str] = Counter()
        if len(self.units) < len(units):
            raise ValueError(f"two units are named '{Counter(unit.name for unit in units).most_common(1)[0][0]}'")
        for unit in units:
            for need in self.missing[unit.name]:
                if need not in self.units:
                    raise ValueError(f"unit '{unit.name}' needs '{need}', which is not among the units")
                self.dependents[need].append(unit.name)
        self.chains = longest_chains(self.units)
        for unit in units:
            if not unit.needs:
                self.add(unit)

    def add(self, unit: Unit) -> None:
        key = (self.chains[unit.name], unit.affinity)
        group = self.groups.setdefault(key, deque())
        group.append(unit)
        self.num_ready += 1
        self.list_group(key, self.entries[key][2] if key in self.entries else len(self.entries))

    def list_group(self, key: tuple[int, str], order: int) -> None:
        """Place a group by chain, units left, first come. Its earlier places in the heap are void from now on."""
        self.entries[key] = (-key[0], -len(self.groups[key]), order, key)
        heapq.heappush(self.heap, self.entries[key])

    def take(self, last: str) -> Unit | None:
        """The next unit of a worker whose last affinity was `last`; None when no unit is ready."""
        key = self.best_group()
        if key is None:
            return None
        if last and self.groups.get((key[0], last)):
            key = (key[0], last)
        unit = self.groups[key].popleft()
        self.num_ready -= 1
        self.release(last)
        self.holders[unit.affinity] += 1
        return unit

    def release(self, affinity: str) -> None:
        """A worker of this affinity turned to another one, or is gone."""
        self.holders[affinity] -= 1

    def best_group(self) -> tuple[int, str] | None:
        """Of the groups with the longest chain, the largest one that no worker holds, else the largest one."""
        best, held = None, []
        while self.heap:
            entry = self.heap[0]
            _, size, order, key = entry
            if entry != self.entries[key] or not self.groups[key]:
                heapq.heappop(self.heap)
            elif -size != len(self.groups[key]):  # units were taken since
                heapq.heappop(self.heap)
                self.list_group(key, order)
            elif best is not None and key[0] != best[0]:
                break
            elif not key[1] or self.holders[key[1]] <= 0:
                best = key
                break
            else:
                best = best or key
                held.append(heapq.heappop(self.heap))
        for entry in held:
            heapq.heappush(self.heap, entry)
        return best

    def settle(self, outcome: Outcome) -> list[Outcome]:
        """A unit is over: what waited for it becomes ready, or is over too, as blocked, when it failed."""
        over = [outcome]
        for done in over:
            for name in self.dependents.pop(done.name, ()):
                if name not in self.missing:
                    continue
                if outcome.error is not None:
                    del self.missing[name]
                    over.append(Outcome(name, None, f"blocked: {outcome.name} failed: {outcome.error}", 0.0))
                    continue
                self.missing[name].remove(done.name)
                if not self.missing[name]:
                    self.add(self.units[name])
        self.num_left -= len(over)
        return over


def longest_chains(units: dict[str, Unit]) -> dict[str, int]:
    """For each unit, the length of the longest chain of units that wait for it."""
    try:
        order = list(TopologicalSorter({unit.name: unit.needs for unit in units.values()}).static_order())
    except CycleError as error:
        raise ValueError(f"units need each other in a circle: {' → '.join(error.args[1])}") from None
    chains = dict.fromkeys(order, 0)
    for name in reversed(order):
        for need in units[name].needs:
            chains[need] = max(chains[need], chains[name] + 1)
    return chains


# In this process


def run_here(queue: Queue) -> Generator[Outcome, None, None]:
    affinity = ""
    while (unit := queue.take(affinity)) is not None:
        affinity = unit.affinity
        reply = attempt(unit.function, unit.arguments)
        yield from queue.settle(outcome_of(unit, reply, 0.0))


def outcome_of(unit: Unit, reply: Reply, seconds: float) -> Outcome:
    return Outcome(
        unit.name, reply.value, reply.error, seconds if reply.seconds is None else reply.seconds, reply.traceback
    )


# In workers


@dataclass
class Slot:
    """A worker's place: what it is at, since when, and what it had last."""

    number: int
    is_ready: bool = False
    unit: Unit | None = None
    affinity: str = ""
    since: float = 0.0


class Crew:
    """The workers of a run. A pool starts, watches and ends them: `Processes` here, `Actors` on Ray."""

    def __init__(self, queue: Queue, pool: Any) -> None:
        self.queue, self.pool = queue, pool
        self.slots: dict[Any, Slot] = {}
        self.failed_starts = 0

    def start_missing(self) -> None:
        """Workers for the ready units that no idle or starting one will take."""
        taken = {slot.number for slot in self.slots.values()}
        free = [number for number in range(self.pool.limit) if number not in taken]
        needed = self.queue.num_ready - sum(slot.unit is None for slot in self.slots.values())
        for number in free[: max(needed, 0)]:
            self.slots[self.pool.start(number)] = Slot(number)

    def hand_out(self) -> None:
        for worker, slot in self.slots.items():
            if slot.is_ready and slot.unit is None:
                slot.unit = self.queue.take(slot.affinity)
                if slot.unit is None:
                    return
                slot.affinity, slot.since = slot.unit.affinity, time.monotonic()
                worker.send(pickle.dumps((slot.unit.function, slot.unit.arguments)))

    def collect(self) -> list[Outcome]:
        """Wait until a worker says something or ends; whatever units are over by that."""
        assert self.slots, "units are left, but none of them is ready or under way"
        over = []
        for worker in self.pool.wait(list(self.slots)):
            slot, reply = self.slots[worker], worker.receive()
            if slot.unit is not None:
                over += self.queue.settle(outcome_of(slot.unit, reply, time.monotonic() - slot.since))
                slot.unit = None
            elif not slot.is_ready:
                self.note_start(slot, reply)
            if reply.is_last:
                del self.slots[worker]
                self.queue.release(slot.affinity)
                self.pool.end([worker])
        return over

    def note_start(self, slot: Slot, reply: Reply) -> None:
        slot.is_ready = not reply.is_last
        self.failed_starts = 0 if slot.is_ready else self.failed_starts + 1
        if self.failed_starts == START_ATTEMPTS:
            raise InputError(f"workers do not start: {reply.error}")


def run_in_workers(queue: Queue, engine: Engine) -> Generator[Outcome, None, None]:
    if not queue.num_left:
        return
    with sigterm_stops():
        pool: Any = Actors(engine, queue.num_left) if engine.kind == "ray" else Processes(engine, queue.num_left)
        crew = Crew(queue, pool)
        try:
            while queue.num_left:
                crew.start_missing()
                crew.hand_out()
                over = crew.collect()
                crew.hand_out()  # before the caller takes its time with the outcomes
                yield from over
        finally:
            try:
                pool.end(list(crew.slots))
            finally:
                pool.close()


@contextmanager
def sigterm_stops() -> Iterator[None]:
    """SIGTERM raises `StoppedError`, once, so that workers are ended in order. Does nothing outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(signum: int, _: Any) -> None:
        signal.signal(signum, signal.SIG_IGN)  # Slurm may say it twice
        raise StoppedError("stopped; run the same command to go on")

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
