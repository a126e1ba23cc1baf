"""Run idempotent units: in this process, in worker processes of this machine, or on the machines of a Ray cluster.

In: units, each a function with plain arguments, and an engine that says where. Out: an outcome per unit, as they end.
Order and errors are decided here, alike for all engines (`local`, `ray`). What a unit makes is its own to claim, write
last and mark done: a unit that is run again finds its work done.
"""

import pickle
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from biphase.engine.local import Engine, LocalPool, Pool, Worker, WorkerMessage, attempt, listening
from biphase.engine.ray import RayPool
from biphase.engine.units import Outcome, Unit, UnitQueue
from biphase.errors import InputError, StoppedError

START_ATTEMPTS = 3
"""Workers in a row that may end before they take a unit (short of memory, say) before the whole run is given up."""

Listener = Callable[[str, Any], None]
"""Called with a unit's name and what it says on the way (`local.report_progress`)."""


def ignore_progress(name: str, value: Any) -> None:
    pass


def run_units(
    units: Iterable[Unit], engine: Engine, *, waits_for_busy: bool = False, on_progress: Listener = ignore_progress
) -> Generator[Outcome, None, None]:
    """The outcomes of all units, as they end. Closing the generator ends the workers.

    A free worker takes a unit that the longest chain of others waits for; among those, one of the affinity that it had
    last, else of the first affinity that no other worker has, else of the one with the most units left.

    An exception in a unit, or the death of its worker, is an outcome with an `error`, and so is every unit that needs
    one of those (`blocked: NAME failed: ERROR`); all others go on. After any exception but an `InputError` the worker
    is replaced: what broke a unit may have broken its process too, as CUDA errors do. Without workers, in this process,
    `StoppedError` and `KeyboardInterrupt` of a unit end the run.

    A unit that another process is at (`BusyError`) is an outcome with `is_busy`. With `waits_for_busy` it is tried
    again until it ends otherwise, with such an outcome each time; else it is over, and so is what needs it.

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
    queue = UnitQueue(list(units), waits_for_busy)
    return run_here(queue, on_progress) if engine.workers == 0 else run_in_workers(queue, engine, on_progress)


def run_here(queue: UnitQueue, on_progress: Listener) -> Generator[Outcome, None, None]:
    affinity = ""
    while queue.num_left:
        unit = queue.take(affinity)
        if unit is None:
            assert queue.postponed, "units are left, but none of them is ready"
            time.sleep(queue.seconds_to_next())
            continue
        affinity = unit.affinity
        with listening(partial(on_progress, unit.name)):
            message = attempt(unit.function, unit.arguments)
        yield from queue.settle(outcome_of(unit, message, 0.0, 1))


def outcome_of(unit: Unit, message: WorkerMessage, seconds: float, num_running: int) -> Outcome:
    """
    Args:
        seconds: how long it took as seen from here, for a worker that died.
        num_running: how many units were under way.
    """
    return Outcome(
        unit.name,
        message.value,
        None if message.is_busy else message.error,
        seconds if message.seconds is None else message.seconds,
        message.traceback,
        is_busy=message.is_busy,
        worker_died=message.seconds is None,
        num_running=num_running,
    )


@dataclass
class WorkerState:
    """What the scheduler knows of a worker: its place in the pool, what it is at, since when, and what it had last."""

    number: int
    is_ready: bool = False
    unit: Unit | None = None
    affinity: str = ""
    since: float = 0.0


class Scheduler:
    """Hands the units of a queue to the workers of a pool."""

    def __init__(self, queue: UnitQueue, pool: Pool, on_progress: Listener) -> None:
        self.queue, self.pool, self.on_progress = queue, pool, on_progress
        self.workers: dict[Worker, WorkerState] = {}
        self.failed_starts = 0

    def start_missing(self) -> None:
        """Start workers for the ready units that no idle or starting one will take."""
        self.queue.readmit()
        taken = {state.number for state in self.workers.values()}
        free = [number for number in range(self.pool.limit) if number not in taken]
        needed = self.queue.num_ready - sum(state.unit is None for state in self.workers.values())
        for number in free[: max(needed, 0)]:
            self.workers[self.pool.start(number)] = WorkerState(number)

    def hand_out(self) -> None:
        for worker, state in self.workers.items():
            if state.is_ready and state.unit is None:
                state.unit = self.queue.take(state.affinity)
                if state.unit is None:
                    return
                state.affinity, state.since = state.unit.affinity, time.monotonic()
                worker.send(pickle.dumps((state.unit.function, state.unit.arguments)))

    def collect(self) -> list[Outcome]:
        """Wait for a second, or until a worker says something or ends; returns what is over by that."""
        if not self.workers:
            assert self.queue.postponed, "units are left, but none of them is ready or under way"
            time.sleep(min(1.0, self.queue.seconds_to_next()))
        over = []
        for worker in self.pool.wait(list(self.workers)):
            state, message = self.workers[worker], worker.receive()
            if message.is_progress:
                if state.unit is not None:
                    self.on_progress(state.unit.name, message.value)
                continue
            if state.unit is not None:
                num_running = sum(other.unit is not None for other in self.workers.values())
                seconds = time.monotonic() - state.since
                over += self.queue.settle(outcome_of(state.unit, message, seconds, num_running))
                state.unit = None
            elif not state.is_ready:
                self.note_start(state, message)
            if message.is_last:
                del self.workers[worker]
                self.queue.release(state.affinity)
                self.pool.end([worker])
        return over

    def note_start(self, state: WorkerState, message: WorkerMessage) -> None:
        state.is_ready = not message.is_last
        self.failed_starts = 0 if state.is_ready else self.failed_starts + 1
        if self.failed_starts == START_ATTEMPTS:
            raise InputError(f"workers do not start: {message.error}")


def run_in_workers(queue: UnitQueue, engine: Engine, on_progress: Listener) -> Generator[Outcome, None, None]:
    if not queue.num_left:
        return
    with sigterm_stops():
        pool: Pool = RayPool(engine, queue.num_left) if engine.kind == "ray" else LocalPool(engine, queue.num_left)
        scheduler = Scheduler(queue, pool, on_progress)
        try:
            while queue.num_left:
                scheduler.start_missing()
                scheduler.hand_out()
                over = scheduler.collect()
                scheduler.hand_out()  # before the caller takes its time with the outcomes
                yield from over
        finally:
            try:
                pool.end(list(scheduler.workers))
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
