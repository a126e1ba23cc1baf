"""Units of work, what became of them and which comes next; the engines that run them; the workers of this machine."""

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
"""How long a unit that another process is at is left alone before it is tried again."""


@dataclass(frozen=True)
class Unit:
    """A piece of work that another process can do: `function(**arguments)`.

    `function` stands at the top level of a module that a worker can import; `arguments` and what it returns are data
    that can be pickled. It raises `BusyError` when another process is at the same work. Units of one `affinity` share
    what they load, so one worker gets them in a row where possible; the empty one is none. `needs` names units that
    must have ended without an error before this one starts.
    """

    name: str
    function: Callable[..., Any]
    arguments: dict[str, Any]
    affinity: str = ""
    needs: tuple[str, ...] = ()
    kind: str = ""
    """Units of one kind take time in proportion to their cost."""
    cost: float = 0.0
    """How much work it is, in FLOPs, bytes or seconds, the same for all units of a call; 0 for next to nothing."""
    size: int = 1
    """How many of the things that the progress counts it makes."""
    wave: int = 0
    """Units of an earlier wave go first where both are ready, however long the chains behind them."""
    file: str = ""
    """What the record of its failure is called, where its name is not the same in the next call."""


@dataclass(frozen=True)
class Outcome:
    """The end of a unit: its value, or one line of `error`; `traceback` holds the rest, for a log."""

    name: str
    value: Any
    error: str | None
    seconds: float = 0.0
    """How long a unit took that is done."""
    traceback: str = ""
    is_busy: bool = False
    """Whether it was not done, because another process is at it."""
    worker_died: bool = False
    """Whether the error is that its worker was killed or ended."""
    num_running: int = 1
    """How many units were under way when this one ended, itself included."""


class UnitQueue:
    """The units that wait for a worker, and those that wait for other units.

    Ready units stand in groups, by wave, by the length of the chain of units that wait for them, then by affinity. A
    worker takes from the groups of the first wave and its longest chain: from that of its last affinity, else from the
    first one that no other worker had last, else from the largest. So a decision looks at as many groups as there are
    workers, however many units there are.
    """

    def __init__(self, units: Sequence[Unit], waits_for_busy: bool = False) -> None:
        """
        Args:
            waits_for_busy: try a unit that another process is at again, until it is done; else it is over, undone.
        """
        self.units = {unit.name: unit for unit in units}
        self.waits_for_busy = waits_for_busy
        self.num_left, self.num_ready = len(units), 0
        self.missing = {unit.name: set(unit.needs) for unit in units}
        self.dependents: dict[str, list[str]] = defaultdict(list)
        self.groups: dict[tuple[int, int], dict[str, deque[Unit]]] = defaultdict(dict)
        """(minus the wave, the length of the chain) → affinity → units; the largest key comes first."""
        self.affinities: dict[int, str] = {}
        """The affinity of the last unit that each worker took."""
        self.postponed: deque[tuple[float, Unit]] = deque()
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
        """Return the next unit of a worker; None when no unit is ready."""
        self.readmit()
        if not self.groups:
            return None
        first = max(self.groups)
        groups = self.groups[first]
        affinity = self.affinities.get(worker)
        if not affinity or affinity not in groups:
            held = {*self.affinities.values()} - {""}
            affinity = next((name for name in groups if name not in held), None)
        if affinity is None:  # workers are at all of them, so these are few
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
        """Make the postponed units ready whose time has come."""
        while self.postponed and self.postponed[0][0] <= time.monotonic():
            self.add(self.postponed.popleft()[1])

    def sleep(self) -> None:
        """Wait for a second, or until a postponed unit is ready again, when nothing is ready or under way."""
        assert self.postponed, "units are left, but none of them is ready or under way"
        time.sleep(min(1.0, max(0.0, self.postponed[0][0] - time.monotonic())))

    def settle(self, outcome: Outcome) -> list[Outcome]:
        """List what is over by this outcome: the unit, and when it failed, all that waited for it, as blocked. After a
        unit that is done, what waited for it becomes ready. A busy one is over too, unless it is tried again."""
        if outcome.is_busy and self.waits_for_busy:
            self.postponed.append((time.monotonic() + POLL_SECONDS, self.units[outcome.name]))
            return [outcome]
        over = [outcome]
        for ended in over:  # grows on the way: what is blocked blocks others
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
    """The place where units run."""

    kind: EngineKind = "local"
    workers: Count | None = None
    """Processes side by side. None: `workers_per_gpu` for each GPU, or one for each core where there is no GPU.
    0: no process but this one, a unit at a time, for a debugger."""
    workers_per_gpu: PositiveCount = 1
    devices_per_worker: PositiveCount = 1
    """GPUs that each worker sees, or cores that it has where there is no GPU, for units that start processes of their
    own, as torchrun does."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`: GPUs where there are some. `cpu` hides them from the units."""
    address: str | None = None
    """The address of a Ray cluster: `auto`, HOST:PORT or `ray://HOST:10001`. None: that of this machine, else a new
    one."""

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


# What a worker says

Message = tuple[Literal["ready", "progress", "over", "ended"], Any]
"""`ready`; `progress` and what a unit says of it; `over` and the unit's outcome; `ended` and the outcome, after which
the worker is gone. The outcomes are without the unit's name."""


def attempt(call: Callable[[], Any], tell: Callable[[Any], None]) -> Message:
    """Do what a unit does; what it says of its progress goes to `tell`. Only `StoppedError` and `KeyboardInterrupt`
    pass. Any error but one of input ends the worker."""
    started, earlier = time.perf_counter(), console.report_progress
    console.report_progress = tell
    try:
        value = call()
    except StoppedError:
        raise
    except (Exception, SystemExit) as problem:  # whatever a unit may raise is what came of it
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
    "import sys; number, parent, *sys.path = sys.argv[1:]; "
    "from biphase.engine.local import serve; serve(int(number), int(parent))"
)
"""The program of a worker: its end of the pipe and its parent, then the folders that the parent imports from."""


class WorkerProcess:
    """A worker process, with a pipe to it. It leads a process group: Ctrl-C passes it by, and its children end with it.

    Not `multiprocessing`'s: that one would run the main script again in each worker, with our environment. On a cluster
    it is the process of a Ray actor, which gives its methods threads, so that it can be ended while `receive` waits:
    units have the main thread, their own signals and a clean death.
    """

    def __init__(self, threads: int, gpus: str | None) -> None:
        """
        Args:
            threads: at most; fewer where the user has said so.
            gpus: what it finds in `machine.gpu_variables`; None: the same as this process.
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
            number = worker_end.fileno()
            self.popen = subprocess.Popen(
                **machine.python_process("-c", START, str(number), str(os.getpid()), *paths, **variables),
                stdin=subprocess.DEVNULL,
                pass_fds=[number],
                process_group=0,
            )

    def send(self, payload: bytes) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # `receive` tells that it is gone
            self.connection.send_bytes(payload)

    def receive(self) -> bytes:
        """Wait for its next message, pickled; where it has ended, return how."""
        # Its children may hold the pipe open after its end, so that the end of the pipe is not enough to know.
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

    def signal_group(self, number: int) -> None:
        """Send a signal to the worker and all that it started, as far as they are left."""
        with suppress(ProcessLookupError, PermissionError):  # the latter is macOS's word for one that is ending
            os.killpg(self.popen.pid, number)


def end_processes(processes: Sequence[WorkerProcess]) -> None:
    """Ask them to end, wait, kill what they leave behind; a Ctrl-C meanwhile kills at once."""
    started, is_told, patience = time.monotonic(), False, machine.grace()
    try:
        for process in processes:
            process.signal_group(signal.SIGTERM)
            # One that waits for a unit ends too, also if it has heard SIGTERM as that to the last one.
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
            # How its unit was stopped, where it has said so and nobody has heard it yet.
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
    """Count the workers that are side by side where there is work for all; 0 where only a Ray cluster knows."""
    if engine.workers is not None:
        return max(engine.workers, 1)
    if engine.kind == "ray":
        return 0
    gpus = machine.visible_gpus() if engine.device != "cpu" else []
    return max(1, (engine.workers_per_gpu * len(gpus) or machine.num_cores()) // engine.devices_per_worker)


class LocalPool:
    """Worker processes on this machine, each known by the number of its place, from 0 to `limit` - 1."""

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

    def choose_gpus(self, number: int) -> str | None:
        """Choose what the worker in a place finds in `machine.gpu_variables`; None: the same as this process."""
        if not self.gpus:
            return "" if self.hides_gpus else None
        first = number * self.gpus_each % (len(self.gpus) // self.gpus_each * self.gpus_each)
        return ",".join(self.gpus[first : first + self.gpus_each])

    def start(self, number: int) -> None:
        self.processes[number] = WorkerProcess(machine.num_cores() // self.limit, self.choose_gpus(number))

    def send(self, number: int, payload: bytes) -> None:
        """Hand a worker a unit: function and arguments, pickled."""
        self.processes[number].send(payload)

    def listen(self) -> Iterator[tuple[int, Message]]:
        """Yield what workers have said, or how they ended, after a second at most."""
        ready = wait([process.connection for process in self.processes.values()], timeout=1.0)
        for number, process in list(self.processes.items()):
            # What a dead one has started may hold its pipe open.
            if process.connection in ready or process.popen.poll() is not None:
                yield number, pickle.loads(process.receive())

    def end(self, numbers: list[int]) -> None:
        """Ask workers to end, give them time to save their state, then kill them."""
        end_processes([self.processes.pop(number) for number in numbers])

    def close(self) -> None:
        self.end(list(self.processes))


# Inside a worker


def serve(number: int, parent: int) -> None:
    """Take units and send messages over the file descriptor `number`; end with the process `parent`."""
    machine.end_with_parent(parent, machine.grace())
    os.set_inheritable(number, False)
    machine.prepare_process()
    console.silence()
    with suppress(EOFError, ConnectionResetError, BrokenPipeError), Connection(number) as connection:
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
    """Load a function and its arguments from bytes of the parent, and call it. Loading imports the function's module,
    so it may fail as the function may, and so may what the value does when it is sent."""
    function, arguments = pickle.loads(payload)
    value = function(**arguments)
    pickle.dumps(value)
    return value
