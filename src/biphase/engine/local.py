"""Units of work, their outcomes and their order; the settings of engines; the workers of this machine."""

import os
import pickle
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from graphlib import TopologicalSorter
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

from pydantic import model_validator

from biphase import console, machine
from biphase.config import Count, PositiveCount, Strict
from biphase.console import err
from biphase.errors import SOURCE, BusyError, InputError, StoppedError

POLL_SECONDS = 10.0
"""The wait before a unit on which another process works is tried again."""


@dataclass(frozen=True)
class Unit:
    """A piece of work that another process can do: `function(**arguments)`.

    `function` stands at the top level of a module that a worker can import; its arguments and its value can be pickled.
    It raises `BusyError` when another process does the same work.
    """

    name: str
    function: Callable[..., Any]
    arguments: dict[str, Any]
    affinity: str = ""
    """Units of one affinity load the same things: one worker does them in a row where possible. Empty: none."""
    needs: tuple[str, ...] = ()
    """The units that must be done, without an error, before this one starts."""
    kind: str = ""
    """Units of one kind take time in proportion to their cost."""
    cost: float = 0.0
    """The amount of work: FLOPs, bytes or seconds, the same for all units of a call; 0 for next to none."""
    size: int = 1
    """The number of things that it makes, by which the bar counts."""
    wave: int = 0
    """Ready units of an earlier wave go first, however long the chains of other units behind them."""
    file: str = ""
    """The name of its failure's record, where its own name differs from call to call."""


@dataclass(frozen=True)
class Outcome:
    """The end of a unit: its value, or its error in one line, with the traceback for a log."""

    name: str
    value: Any
    error: str | None
    seconds: float = 0.0
    """The time that it took, where it is done."""
    traceback: str = ""
    is_busy: bool = False
    """Whether it was left undone because another process works on it."""
    worker_died: bool = False
    """Whether the error is the death of its worker."""
    num_running: int = 1
    """The number of units in progress when this one ended, itself included."""


class UnitQueue:
    """The units that wait for a worker, or for other units.

    Ready units stand in groups: by wave, by the length of the chain of units that wait for them, and by affinity. A
    worker takes a unit of the first wave and its longest chain: from the group of its last affinity, else from the
    first group that is no other worker's last, else from the largest. So a choice looks at as many groups as there are
    workers, however many units there are.
    """

    def __init__(self, units: Sequence[Unit], waits_for_busy: bool = False) -> None:
        """
        Args:
            waits_for_busy: try a unit again, until it is done, while another process works on it; else leave it undone.
        """
        self.units = {unit.name: unit for unit in units}
        self.waits_for_busy = waits_for_busy
        self.num_left, self.num_ready = len(units), 0
        self.missing = {unit.name: set(unit.needs) for unit in units}
        self.dependents: dict[str, list[str]] = defaultdict(list)
        self.groups: dict[tuple[int, int], dict[str, deque[Unit]]] = defaultdict(dict)
        """(minus the wave, the length of the chain) → affinity → units; the largest key comes first."""
        self.affinities: dict[int, str] = {}
        """The affinity of each worker's last unit."""
        self.postponed: deque[tuple[float, Unit]] = deque()
        """Busy units, each with the time from which it is ready again."""
        self.chains = dict.fromkeys(self.units, 0)
        """The length of the longest chain of units that wait for each unit."""
        assert len(self.units) == len(units), "two units have one name"
        for unit in units:
            for need in self.missing[unit.name]:
                assert need in self.units, f"unit '{unit.name}' needs '{need}', which is not among the units"
                self.dependents[need].append(unit.name)
        for name in reversed([*TopologicalSorter(self.missing).static_order()]):
            for need in self.units[name].needs:
                self.chains[need] = max(self.chains[need], self.chains[name] + 1)
        for unit in units:
            if not unit.needs:
                self.add(unit)

    def add(self, unit: Unit) -> None:
        self.groups[-unit.wave, self.chains[unit.name]].setdefault(unit.affinity, deque()).append(unit)
        self.num_ready += 1

    def take(self, worker: int) -> Unit | None:
        """Take the next unit of a worker; None when no unit is ready."""
        self.readmit()
        if not self.groups:
            return None
        first = max(self.groups)
        groups = self.groups[first]
        affinity = self.affinities.get(worker)
        if not affinity or affinity not in groups:
            held = {*self.affinities.values()} - {""}
            affinity = next((name for name in groups if name not in held), None)
        if affinity is None:  # each is another worker's last, so there are few
            affinity = max(groups, key=lambda name: len(groups[name]))
        unit = groups[affinity].popleft()
        if not groups[affinity]:
            del groups[affinity]
        if not groups:
            del self.groups[first]
        self.num_ready -= 1
        self.affinities[worker] = unit.affinity
        return unit

    def readmit(self) -> None:
        """Make postponed units ready whose time has come."""
        while self.postponed and self.postponed[0][0] <= time.monotonic():
            self.add(self.postponed.popleft()[1])

    def sleep(self) -> None:
        """Wait a second, or until a postponed unit is ready again, when no unit is ready or in progress."""
        assert self.postponed, "units are left, but none of them is ready or in progress"
        time.sleep(min(1.0, max(0.0, self.postponed[0][0] - time.monotonic())))

    def settle(self, outcome: Outcome) -> list[Outcome]:
        """Take note of an outcome, and return all outcomes that follow from it, this one first.

        Units that waited for a failed unit are blocked. Those that waited for a busy one are left undone with it,
        unless it is tried again. Those that waited for a unit that is done become ready.
        """
        if outcome.is_busy and self.waits_for_busy:
            self.postponed.append((time.monotonic() + POLL_SECONDS, self.units[outcome.name]))
            return [outcome]
        over = [outcome]
        for ended in over:  # grows on the way: blocked units block others
            for name in self.dependents.pop(ended.name, ()):
                if name not in self.missing:
                    continue  # blocked already, by another unit
                if outcome.error is not None or outcome.is_busy:
                    del self.missing[name]
                    reason = None if outcome.is_busy else f"blocked: {outcome.name} failed: {outcome.error}"
                    over.append(replace(outcome, name=name, error=reason, traceback=""))
                    continue
                self.missing[name].remove(ended.name)
                if not self.missing[name]:
                    self.add(self.units[name])
        self.num_left -= len(over)
        return over


THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")

EngineKind = Literal["local", "ray"]


class Engine(Strict):
    """The settings of where units run."""

    kind: EngineKind = "local"
    """`local`: this machine. `ray`: a Ray cluster."""
    workers: Count | None = None
    """The number of worker processes. Unless it is given: `workers_per_gpu` for each GPU, or one for each core without
    a GPU. 0: this process alone, a unit at a time, for a debugger."""
    workers_per_gpu: PositiveCount = 1
    """The number of workers that share a GPU."""
    devices_per_worker: PositiveCount = 1
    """The GPUs of each worker, or its cores without a GPU, for units that start several processes, as torchrun does."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`: GPUs where there are some. `cpu`: hide them from the units."""
    address: str | None = None
    """The address of a Ray cluster: `auto`, HOST:PORT or `ray://HOST:10001`. Unless it is given, that of RAY_ADDRESS,
    else a new cluster on this machine."""

    @model_validator(mode="after")
    def makes_sense(self) -> "Engine":
        if self.workers_per_gpu > 1 and self.devices_per_worker > 1:
            remedy = "leave workers_per_gpu or devices_per_worker at 1"
            raise ValueError(f"workers either share a GPU or have several: {remedy}")
        if self.kind == "ray" and self.workers == 0:
            raise ValueError("workers is 0: only the local engine runs units in this process; use 1 or more")
        if self.kind == "local" and self.address is not None:
            raise ValueError(f"address is {self.address}, but the engine is local; use kind: ray")
        return self


# Messages of a worker

Message = tuple[Literal["ready", "progress", "over", "ended"], Any]
"""`ready`; `progress` with the unit's report; `over` with its outcome, which has no name; `ended` with an outcome,
after which the worker is gone."""


def attempt(call: Callable[[], Any], tell: Callable[[Any], None]) -> Message:
    """Do a unit's work, and pass its reports of progress to `tell`. Errors become outcomes, and any but an `InputError`
    ends the worker; `StoppedError` and `KeyboardInterrupt` are raised."""
    started, earlier = time.perf_counter(), console.report_progress
    console.report_progress = tell
    try:
        value = call()
    except StoppedError:
        raise
    except (Exception, SystemExit) as problem:  # a unit may raise anything
        is_busy = isinstance(problem, BusyError)
        error = None if is_busy else describe_error(problem)
        lines = traceback.format_exception(problem)
        outcome = Outcome("", None, error, traceback="".join(lines), is_busy=is_busy)
        return ("over" if isinstance(problem, InputError) else "ended"), outcome
    finally:
        console.report_progress = earlier
    return "over", Outcome("", value, None, time.perf_counter() - started)


def describe_error(error: BaseException) -> str:
    """Write an error in one line: the text of our own, else `Type: text (where in this package)`."""
    text = " ".join(str(error).split())
    if isinstance(error, InputError):
        return text
    problem = type(error).__name__ + (f": {text}" if text else "")
    frames = [(Path(frame.filename), frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    frames = [(path, line) for path, line in frames if path != Path(__file__)]
    own_frames = [(path.relative_to(SOURCE), line) for path, line in frames if path.is_relative_to(SOURCE)]
    for path, line in own_frames[-1:] or frames[-1:]:
        problem += f" ({path if own_frames else path.name}:{line})"
    return problem


# Worker processes

START = (
    "import sys; descriptor, parent, *sys.path = sys.argv[1:]; "
    "from biphase.engine.local import serve; serve(int(descriptor), int(parent))"
)
"""The program of a worker. Its arguments are its end of the pipe, its parent, and the folders that the parent imports
from."""


class WorkerProcess:
    """A worker process with a pipe to it. It leads a process group: Ctrl-C passes it by, and its children end with it.

    `multiprocessing` would run the main script again in each worker, with our environment. On a cluster a Ray actor
    starts this process, and runs its methods in threads, so that it can be ended while `receive` waits. A unit has the
    main thread, its own signals and a clean death.
    """

    def __init__(self, threads: int, gpus: str | None) -> None:
        """
        Args:
            threads: the most threads; fewer where the environment says so.
            gpus: its value of `machine.gpu_variables`; None: the same as in this process.
        """
        variables = dict.fromkeys(THREAD_VARIABLES, str(max(1, threads)))
        for name in THREAD_VARIABLES:
            allowed = os.environ.get(name, "")
            if allowed.isdecimal() and 0 < int(allowed) < threads:
                variables[name] = allowed
        if gpus is not None:
            names = machine.gpu_variables()
            variables |= dict.fromkeys(names if gpus else [*names, "CUDA_VISIBLE_DEVICES"], gpus)
        paths = sys.path
        if ray := sys.modules.get("ray"):  # its own vendored packages must not hide those of the user
            paths = [path for path in paths if not Path(path).is_relative_to(Path(str(ray.__file__)).parent)]
        self.connection, worker_end = Pipe()
        with worker_end:
            descriptor = worker_end.fileno()
            self.popen = subprocess.Popen(
                **machine.python_process("-c", START, str(descriptor), str(os.getpid()), *paths, **variables),
                stdin=subprocess.DEVNULL,
                pass_fds=[descriptor],
                process_group=0,
            )

    def send(self, payload: bytes) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # `receive` tells that it is gone
            self.connection.send_bytes(payload)

    def receive(self) -> bytes:
        """Wait for its next message, pickled; once the process has ended, return one that says how."""
        # Its children may hold the pipe open, so that the end of the process does not end the pipe.
        with suppress(EOFError, OSError):
            while self.popen.poll() is None or self.connection.poll():
                if self.connection.poll(1.0):
                    return self.connection.recv_bytes()
        try:
            code = self.popen.wait(machine.grace())
        except subprocess.TimeoutExpired:
            self.signal_group(signal.SIGKILL)
            code = self.popen.wait()
        error = f"worker {machine.describe_kill(-code)}" if code < 0 else f"worker ended with exit code {code}"
        return pickle.dumps(("ended", Outcome("", None, error, worker_died=True)))

    def signal_group(self, signum: int) -> None:
        """Send a signal to the worker and to all that it started and that still runs."""
        with suppress(ProcessLookupError, PermissionError):  # macOS raises the latter for a process that is ending
            os.killpg(self.popen.pid, signum)


def end_processes(processes: Sequence[WorkerProcess]) -> None:
    """Ask processes to end, wait for them, and kill what they leave behind. A Ctrl-C meanwhile kills at once."""
    started, is_told, patience = time.monotonic(), False, machine.grace()
    try:
        for process in processes:
            process.signal_group(signal.SIGTERM)
            # A worker that waits for a unit ends with its pipe, even if its last unit has used up the SIGTERM.
            with suppress(OSError), socket.socket(fileno=os.dup(process.connection.fileno())) as pipe:
                pipe.shutdown(socket.SHUT_WR)
        while num_left := sum(process.popen.poll() is None for process in processes):
            waited = time.monotonic() - started
            if waited > patience:
                line = f"{num_left} workers had not saved their state in {patience:.0f} s"
                err.print(f"{line}; {machine.GRACE} gives them longer")
                break
            if waited > 1 and not is_told:
                line = f"waiting up to {patience:.0f} s for {num_left} workers to save their state"
                err.print(f"{line}; Ctrl-C kills them")
                is_told = True
            time.sleep(0.01)
        for process in processes:
            # Print how its unit was stopped, where it has said so and nobody has read it.
            with suppress(EOFError, OSError):
                while process.popen.poll() is not None and process.connection.poll():
                    kind, outcome = pickle.loads(process.connection.recv_bytes())
                    if kind == "ended" and outcome.error:
                        err.print(outcome.error)
    finally:
        for process in processes:
            process.signal_group(signal.SIGKILL)
            process.popen.wait()
            process.connection.close()


def count_workers(engine: Engine) -> int:
    """Count the workers that run side by side if there is work for all; 0 where only a Ray cluster knows."""
    if engine.workers is not None:
        return max(engine.workers, 1)
    if engine.kind == "ray":
        return 0
    gpus = machine.visible_gpus() if engine.device != "cpu" else []
    return max(1, (engine.workers_per_gpu * len(gpus) or machine.num_cores()) // engine.devices_per_worker)


class LocalPool:
    """Worker processes on this machine, each known by its index, from 0 to `limit` - 1."""

    def __init__(self, engine: Engine, num_units: int) -> None:
        self.hides_gpus = engine.device == "cpu"
        self.gpus = [] if self.hides_gpus else machine.visible_gpus()
        if engine.device == "cuda" and not self.gpus:
            raise InputError("device is cuda, but PyTorch sees no CUDA device; use cpu")
        self.gpus_each = engine.devices_per_worker
        if self.gpus and self.gpus_each > len(self.gpus):
            raise InputError(f"{self.gpus_each} devices for each worker, but this machine has {len(self.gpus)} GPUs")
        self.limit = min(count_workers(engine), num_units)
        self.processes: dict[int, WorkerProcess] = {}

    def choose_gpus(self, worker: int) -> str | None:
        """Choose a worker's value of `machine.gpu_variables`; None: the same as in this process."""
        if not self.gpus:
            return "" if self.hides_gpus else None
        first = worker * self.gpus_each % (len(self.gpus) // self.gpus_each * self.gpus_each)
        return ",".join(self.gpus[first : first + self.gpus_each])

    def start(self, worker: int) -> None:
        self.processes[worker] = WorkerProcess(machine.num_cores() // self.limit, self.choose_gpus(worker))

    def send(self, worker: int, payload: bytes) -> None:
        """Hand a worker a unit: function and arguments, pickled."""
        self.processes[worker].send(payload)

    def listen(self) -> Iterator[tuple[int, Message]]:
        """Yield the workers' messages, which may say that they ended, after a second at most."""
        ready = wait([process.connection for process in self.processes.values()], timeout=1.0)
        for worker, process in list(self.processes.items()):
            # The children of a dead one may hold its pipe open.
            if process.connection in ready or process.popen.poll() is not None:
                yield worker, pickle.loads(process.receive())

    def end(self, workers: list[int]) -> None:
        """Ask workers to end, give them time to save their state, then kill them."""
        end_processes([self.processes.pop(worker) for worker in workers])

    def close(self) -> None:
        self.end(list(self.processes))


# Inside a worker


def serve(descriptor: int, parent: int) -> None:
    """Receive units and send messages over a file descriptor; end with the process `parent`."""
    machine.end_with_parent(parent, machine.grace())
    os.set_inheritable(descriptor, False)
    machine.prepare_process()
    console.silence()
    with suppress(EOFError, ConnectionResetError, BrokenPipeError), Connection(descriptor) as connection:
        message: Message = ("ready", None)
        while True:
            connection.send_bytes(pickle.dumps(message))
            if message[0] == "ended":
                return
            payload = connection.recv_bytes()
            try:
                message = attempt(
                    partial(load_and_call, payload),
                    lambda value: connection.send_bytes(pickle.dumps(("progress", value))),
                )
            except StoppedError as stop:
                message = "ended", Outcome("", None, str(stop))


def load_and_call(payload: bytes) -> Any:
    """Unpickle a function and its arguments, which the parent sent, and call it. Importing its module and pickling its
    value happen here, where an error counts as the unit's."""
    function, arguments = pickle.loads(payload)
    value = function(**arguments)
    pickle.dumps(value)
    return value
