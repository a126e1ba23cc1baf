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
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from biphase.engine.local import Engine, LocalPool, Pool, attempt
from biphase.engine.ray import RayPool
from biphase.engine.units import Outcome, Unit, UnitQueue
from biphase.errors import InputError, StoppedError

START_ATTEMPTS = 3
"""Workers in a row that may end before they take a unit (short of memory, say) before the whole run is given up."""

Listener = Callable[[str, Any], None]
"""Called with a unit's name and what it says on the way (`local.report_progress`)."""


def run_units(
    units: Iterable[Unit],
    engine: Engine,
    *,
    waits_for_busy: bool = False,
    on_progress: Listener = lambda name, value: None,
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
            queue.sleep()
            continue
        affinity = unit.affinity
        _, outcome = attempt(partial(unit.function, **unit.arguments), partial(on_progress, unit.name))
        yield from queue.settle(replace(outcome, name=unit.name))


@dataclass
class Worker:
    """What is known of a worker: what it is at, since when, and what it had last."""

    is_ready: bool = False
    unit: Unit | None = None
    affinity: str = ""
    since: float = 0.0


def run_in_workers(queue: UnitQueue, engine: Engine, on_progress: Listener) -> Generator[Outcome, None, None]:
    if not queue.num_left:
        return
    with sigterm_stops():
        pool: Pool = RayPool(engine, queue.num_left) if engine.kind == "ray" else LocalPool(engine, queue.num_left)
        try:
            yield from schedule(queue, pool, on_progress)
        finally:
            pool.close()


def schedule(queue: UnitQueue, pool: Pool, on_progress: Listener) -> Iterator[Outcome]:
    workers: dict[int, Worker] = {}
    failed_starts = 0
    while queue.num_left:
        # 1. Start workers for the ready units that no idle or starting one will take.
        queue.readmit()
        needed = queue.num_ready - sum(worker.unit is None for worker in workers.values())
        free = [number for number in range(pool.limit) if number not in workers]
        for number in free[: max(needed, 0)]:
            pool.start(number)
            workers[number] = Worker()
        hand_out(queue, pool, workers)
        if not workers:
            queue.sleep()
        # 2. Hear what they say: how far a unit is, what came of it, that they are ready, that they end.
        over: list[Outcome] = []
        for number, (kind, said) in pool.listen():
            worker = workers[number]
            if kind == "progress":
                if worker.unit is not None:
                    on_progress(worker.unit.name, said)
                continue
            if worker.unit is not None:
                num_running = sum(other.unit is not None for other in workers.values())
                seconds = time.monotonic() - worker.since if said.worker_died else said.seconds
                over += queue.settle(replace(said, name=worker.unit.name, seconds=seconds, num_running=num_running))
                worker.unit = None
            elif not worker.is_ready:
                worker.is_ready = kind == "ready"
                failed_starts = 0 if worker.is_ready else failed_starts + 1
                if failed_starts == START_ATTEMPTS:
                    raise InputError(f"workers do not start: {said.error}")
            if kind == "ended":
                del workers[number]
                queue.holders[worker.affinity] -= 1
                pool.end([number])
        hand_out(queue, pool, workers)  # before the caller takes its time with the outcomes
        yield from over


def hand_out(queue: UnitQueue, pool: Pool, workers: dict[int, Worker]) -> None:
    """Give the idle workers a unit each, as long as there are some."""
    for number, worker in workers.items():
        if worker.is_ready and worker.unit is None:
            worker.unit = queue.take(worker.affinity)
            if worker.unit is None:
                return
            worker.affinity, worker.since = worker.unit.affinity, time.monotonic()
            pool.send(number, pickle.dumps((worker.unit.function, worker.unit.arguments)))


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
