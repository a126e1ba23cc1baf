"""What the engine costs with up to 1,000 workers and the paper's 15,000 cells: processor time a unit, and idle workers.

    python benchmarks/engine.py [--workers 10 100 1000]

Units, queue, messages, the records of failures and the bar are those of a study; workers are simulated. Each has a real
pipe to this process, but what it says comes by a clock that is simulated too: a training takes 6 hours and waits for
that of its trunk, a cell takes 20 seconds in the median. `cells per second` is how many the engine could hand out if
cells took no time; `busy` is the share of the workers' time in which they have a unit, until the last one ends.
"""

import argparse
import heapq
import json
import pickle
import random
import subprocess
import tempfile
import time
from collections.abc import Iterator
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from biphase.console import err
from biphase.engine import local, scheduler
from biphase.engine.local import LocalPool, WorkerProcess
from biphase.engine.units import Engine, Message, Outcome, Unit

RUNS, MODELS, CELLS = 38, 106, 15_000
TRAINING_SECONDS, CELL_SECONDS = 6 * 3600.0, 20.0
START_SECONDS = 10.0
"""Until a worker has loaded PyTorch."""


def wait_for(seconds: float) -> list[str]:
    raise AssertionError(f"nobody runs this for {seconds} s: workers are simulated")


def make_units(*, trains: bool) -> list[Unit]:
    """Trunks, branches that need them, and cells that need either, of one affinity for each model."""
    rng = random.Random(0)
    units = []
    for number in range(RUNS if trains else 0):
        needs = () if number % 4 == 0 else (f"train {number - number % 4}",)
        units.append(Unit(f"train {number}", wait_for, {"seconds": TRAINING_SECONDS}, needs=needs, kind="train"))
    for number in range(CELLS):
        model = number * MODELS // CELLS
        arguments = {"seconds": rng.lognormvariate(0, 0.5) * CELL_SECONDS}
        needs = (f"train {model % RUNS}",) if trains else ()
        units.append(
            Unit(f"model {model}/{number}", wait_for, arguments, f"model {model}", needs, kind="cell", cost=1.0)
        )
    return units


class SimulatedWorker(WorkerProcess):
    """A worker's pipe, with this process at both of its ends."""

    def __init__(self, popen: "subprocess.Popen[bytes]") -> None:
        self.popen = popen
        self.connection, self.theirs = Pipe()


class SimulatedPool(LocalPool):
    """As many workers as wanted; whichever is the next to say something says it when it is listened to."""

    def __init__(self, workers: int) -> None:
        super().__init__(Engine(workers=workers, device="cpu"), CELLS)
        self.events: list[tuple[float, int, Message]] = []
        self.now = self.busy_seconds = 0.0

    def start(self, worker: int) -> None:
        super().start(worker)
        heapq.heappush(self.events, (self.now + START_SECONDS, worker, ("ready", None)))

    def send(self, worker: int, payload: bytes) -> None:
        _, arguments = pickle.loads(payload)
        seconds = arguments["seconds"]
        self.busy_seconds += seconds
        heapq.heappush(self.events, (self.now + seconds, worker, ("over", Outcome("", [], None, seconds))))

    def listen(self) -> Iterator[tuple[int, Message]]:
        self.now, worker, message = heapq.heappop(self.events)
        process: Any = self.processes[worker]
        process.theirs.send_bytes(pickle.dumps(message))
        yield from super().listen()

    def close(self) -> None:
        """Simulated workers are no processes that must end."""


def measure(workers: int, *, trains: bool) -> dict[str, float]:
    units = make_units(trains=trains)
    with subprocess.Popen(["sleep", "infinity"]) as child, tempfile.TemporaryDirectory() as folder:
        patched: Any = local
        patched.WorkerProcess = lambda threads, gpus: SimulatedWorker(child)
        pool = SimulatedPool(workers)
        patched = scheduler
        patched.LocalPool = lambda engine, num_units: pool
        started = time.process_time()
        failures = scheduler.run_batch(units, Engine(workers=workers), Path(folder), label="study", things="units")
        spent = time.process_time() - started
        child.kill()
    assert not failures
    return {
        "workers": workers,
        "units": len(units),
        "microseconds_a_unit": round(spent / len(units) * 1e6),
        "cells_per_second": round(len(units) / spent),
        "busy": round(pool.busy_seconds / (workers * pool.now), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[10, 100, 1000])
    arguments = parser.parse_args()
    for trains in (False, True):
        for workers in arguments.workers:
            found = measure(workers, trains=trains)
            print(json.dumps({"units are": "trainings and cells" if trains else "cells", **found}), flush=True)


if __name__ == "__main__":
    err.quiet = True
    main()
