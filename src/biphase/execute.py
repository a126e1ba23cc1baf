"""Run idempotent units: in this process, in worker processes of this machine, or on the machines of a Ray cluster.

In: units, each a function with plain arguments, and an engine that says where. Out: an outcome per unit, as they end.
Order and errors are decided here, alike for all engines. What a unit makes is its own to claim, write last and mark
done: a unit that is run again finds its work done.
"""

import heapq
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from textwrap import shorten
from typing import Any, Literal

from pydantic import model_validator

from biphase.config import Count, PositiveCount, Strict
from biphase.console import err, silence
from biphase.errors import InputError, StoppedError
from biphase.startup import prepare_process

GRACE_SECONDS = 20.0
"""From asking a worker to end until it is killed: training uses them to save its state. Slurm itself gives 30."""

START_ATTEMPTS = 3
"""Workers in a row that may end before they take a unit (short of memory, say) before the whole run is given up."""

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")

PACKAGE = Path(__file__).parent


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


class Engine(Strict):
    """Where units run."""

    kind: Literal["local", "ray"] = "local"
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
    """Of a Ray cluster: `auto`, HOST:PORT or `ray://HOST:10001`. None: the one on this machine, else a new one."""

    @model_validator(mode="after")
    def devices_are_whole(self) -> "Engine":
        if self.workers_per_gpu > 1 and self.devices_per_worker > 1:
            raise ValueError(
                "workers either share a GPU or have several: leave workers_per_gpu or devices_per_worker at 1"
            )
        return self

    @model_validator(mode="after")
    def ray_has_workers(self) -> "Engine":
        if self.kind == "ray" and self.workers == 0:
            raise ValueError("workers is 0: only the local engine runs units in this process; use 1 or more")
        if self.kind == "local" and self.address is not None:
            raise ValueError(f"address is {self.address}, but the engine is local; use kind: ray")
        return self


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


def num_cores() -> int:
    """Cores that this process may use (fewer than the machine has under taskset, Slurm or a container's cpuset)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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


@dataclass(frozen=True)
class Reply:
    """What a worker says: that it is ready (all empty), what came of a unit, or why it ends (then the last reply).

    `seconds` is None when nobody measured them, because the worker died.
    """

    value: Any = None
    error: str | None = None
    traceback: str = ""
    seconds: float | None = None
    is_last: bool = False


def run_here(queue: Queue) -> Generator[Outcome, None, None]:
    affinity = ""
    while (unit := queue.take(affinity)) is not None:
        affinity = unit.affinity
        reply = attempt(unit.function, unit.arguments)
        yield from queue.settle(outcome_of(unit, reply, 0.0))


def attempt(function: Callable[..., Any], arguments: dict[str, Any]) -> Reply:
    started = time.perf_counter()
    value, error, trace, is_last = None, None, "", False
    try:
        value = function(**arguments)
    except StoppedError:
        raise
    except (Exception, SystemExit) as problem:
        error, is_last = describe_error(problem), not isinstance(problem, InputError)
        trace = "".join(traceback.format_exception(problem))
    return Reply(value, error, trace, time.perf_counter() - started, is_last)


def outcome_of(unit: Unit, reply: Reply, seconds: float) -> Outcome:
    return Outcome(
        unit.name, reply.value, reply.error, seconds if reply.seconds is None else reply.seconds, reply.traceback
    )


def describe_error(error: BaseException) -> str:
    """One line: the text of our own errors, else `Type: text (where in this package)`."""
    text = " ".join(str(error).split())
    if isinstance(error, InputError):
        return text
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    ours = [frame for frame in frames if Path(frame.filename).is_relative_to(PACKAGE)]
    place = ""
    if ours:
        place = f" ({Path(ours[-1].filename).relative_to(PACKAGE)}:{ours[-1].lineno})"
    elif frames:
        place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})"
    return type(error).__name__ + (f": {text}" if text else "") + place


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


# Workers on this machine

START = (
    "import sys; number, parent, *sys.path = sys.argv[1:]; "
    "from biphase.execute import serve; serve(int(number), int(parent))"
)


class Process:
    """A worker process, with a pipe to it. It leads a process group: Ctrl-C passes it by, and its children end with it.

    Not `multiprocessing`'s: that one would run the main script again in each worker, with our environment.
    """

    def __init__(self, environment: dict[str, str], paths: Sequence[str]) -> None:
        self.connection, theirs = Pipe()
        with theirs:
            number = theirs.fileno()
            self.popen = subprocess.Popen(
                [sys.executable, "-P", "-c", START, str(number), str(os.getpid()), *paths],
                stdin=subprocess.DEVNULL,
                env=environment,
                pass_fds=[number],
                process_group=0,
            )

    def send(self, payload: bytes) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # `receive` tells that it is gone
            self.connection.send_bytes(payload)

    def receive(self) -> Reply:
        return pickle.loads(self.receive_bytes())

    def receive_bytes(self) -> bytes:
        """Its next reply, pickled; how it ended, if it did. Waits."""
        # Its children may hold the pipe open after its end, so that the end of the pipe is not enough to know.
        while not self.connection.poll(1.0):
            if self.popen.poll() is not None and not self.connection.poll():
                return pickle.dumps(self.last_reply())
        try:
            return self.connection.recv_bytes()
        except (EOFError, OSError):
            return pickle.dumps(self.last_reply())

    def last_reply(self) -> Reply:
        try:
            self.popen.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            self.signal_group(signal.SIGKILL)
        return Reply(error=describe_exit(self.popen.wait()), is_last=True)

    def signal_group(self, number: int) -> None:
        """Send a signal to the worker and all that it started, as far as they are left."""
        with suppress(ProcessLookupError, PermissionError):  # the latter is macOS's word for one that is ending
            os.killpg(self.popen.pid, number)


def describe_exit(code: int) -> str:
    if code >= 0:
        return f"worker ended with exit code {code}"
    names = {number.value: f", {number.name}" for number in signal.Signals}
    memory = "; out of memory?" if -code == signal.SIGKILL else ""
    return f"worker was killed (signal {-code}{names.get(-code, '')}{memory})"


def end_processes(processes: Sequence[Process], tell: Callable[[str], None]) -> None:
    """Ask them to end, wait, kill what they leave behind; a Ctrl-C meanwhile kills at once."""
    started, told = time.monotonic(), False
    try:
        for process in processes:
            process.signal_group(signal.SIGTERM)
        while left := sum(process.popen.poll() is None for process in processes):
            waited = time.monotonic() - started
            if waited > GRACE_SECONDS:
                break
            if waited > 1 and not told:
                tell(f"waiting up to {GRACE_SECONDS:.0f} s for {left} workers to save their state; Ctrl-C kills them")
                told = True
            time.sleep(0.01)
    finally:
        for process in processes:
            process.signal_group(signal.SIGKILL)
            process.popen.wait()
            process.connection.close()


class Processes:
    """The workers of this machine."""

    def __init__(self, engine: Engine, num_units: int) -> None:
        self.gpus = visible_gpus() if engine.device != "cpu" else []
        self.hides_gpus = engine.device == "cpu"
        if engine.device == "cuda" and not self.gpus:
            raise InputError("device is cuda, but PyTorch sees no CUDA device; use cpu")
        self.gpus_each = engine.devices_per_worker
        if self.gpus and self.gpus_each > len(self.gpus):
            raise InputError(f"{self.gpus_each} devices for each worker, but this machine has {len(self.gpus)} GPUs")
        places = len(self.gpus) or num_cores()
        per_place = engine.workers_per_gpu if self.gpus else 1
        self.limit = min(engine.workers or max(1, per_place * places // engine.devices_per_worker), num_units)

    def environment(self, number: int) -> dict[str, str]:
        """Of the worker in a slot: its share of the cores, its GPU."""
        threads = share_threads(num_cores() // self.limit)
        if self.gpus:
            first = number * self.gpus_each % (len(self.gpus) // self.gpus_each * self.gpus_each)
            own = ",".join(self.gpus[first : first + self.gpus_each])
            return {**os.environ, **threads, "CUDA_VISIBLE_DEVICES": own}
        return {**os.environ, **threads, **({"CUDA_VISIBLE_DEVICES": ""} if self.hides_gpus else {})}

    def start(self, number: int) -> Process:
        return Process(self.environment(number), sys.path)

    def wait(self, workers: list[Process]) -> list[Process]:
        heard = wait([worker.connection for worker in workers], timeout=1.0)
        return [worker for worker in workers if worker.connection in heard or worker.popen.poll() is not None]

    def end(self, workers: list[Process]) -> None:
        end_processes(workers, lambda line: err.print(line, markup=False))

    def close(self) -> None:
        pass


def share_threads(threads: int) -> dict[str, str]:
    """Must stand in the environment before PyTorch is loaded."""
    return dict.fromkeys(THREAD_VARIABLES, str(max(1, threads)))


def visible_gpus() -> list[str]:
    """GPUs that PyTorch would see here, each as a value of CUDA_VISIBLE_DEVICES."""
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = count_gpus(allowed)
    return allowed.split(",")[:count] if allowed else [str(number) for number in range(count)]


@cache
def count_gpus(allowed: str | None) -> int:
    """PyTorch is asked: it is right on every platform. Where it is not loaded, in a process of its own (2 s).

    Args:
        allowed: the value of CUDA_VISIBLE_DEVICES that the answer holds for.
    """
    if allowed == "":
        return 0
    if "torch" in sys.modules:
        return sys.modules["torch"].cuda.device_count()
    command = [sys.executable, "-P", "-c", "import torch; print(torch.cuda.device_count())"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    if answer.returncode != 0:
        lines = answer.stderr.strip().splitlines() or [f"exit code {answer.returncode}"]
        raise InputError(f"PyTorch does not load, so GPUs cannot be counted: {lines[-1]}; device=cpu does without")
    return int(answer.stdout.split()[-1])


# Inside a worker


def serve(number: int, parent: int) -> None:
    """Units in, replies out, over the file descriptor `number`; ends with the process `parent`."""
    threading.Thread(target=end_with_parent, args=(parent,), daemon=True).start()
    os.set_inheritable(number, False)
    prepare_process()
    silence()
    with suppress(EOFError, ConnectionResetError, BrokenPipeError), Connection(number) as connection:
        reply = Reply()
        while True:
            connection.send_bytes(pickle_reply(reply))
            if reply.is_last:
                return
            reply = answer_request(connection.recv_bytes())


def answer_request(payload: bytes) -> Reply:
    started = time.perf_counter()
    try:
        return attempt(load_and_call, {"payload": payload})
    except StoppedError as stop:
        return Reply(error=str(stop), seconds=time.perf_counter() - started, is_last=True)


def load_and_call(payload: bytes) -> Any:
    """Loading imports the module of the function, so it may fail as the function may."""
    function, arguments = pickle.loads(payload)
    return function(**arguments)


def pickle_reply(reply: Reply) -> bytes:
    try:
        return pickle.dumps(reply)
    except Exception as error:  # whatever the value's own code raises
        problem = f"its value, of type {type(reply.value).__name__}, cannot be sent: {describe_error(error)}"
        return pickle.dumps(Reply(None, problem, "", reply.seconds, reply.is_last))


def end_with_parent(parent: int) -> None:
    """No orphans: once the parent is gone, this process and all that it started end as if it had asked them to."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os.killpg(0, signal.SIGTERM)
    time.sleep(GRACE_SECONDS)
    os.killpg(0, signal.SIGKILL)


# Workers on Ray


class Host:
    """A Ray actor that holds one worker process: units get the main thread, their own signals and a clean death.

    Its methods run beside each other, in threads, so that `stop` is heard while `run` waits.
    """

    def __init__(self, environment: dict[str, str]) -> None:
        import ray

        theirs = Path(ray.__file__).parent  # Ray's own vendored packages must not hide those of the user
        paths = [path for path in sys.path if not Path(path).is_relative_to(theirs)]
        self.process = Process({**os.environ, **environment}, paths)

    def start(self) -> bytes:
        return self.process.receive_bytes()

    def run(self, payload: bytes) -> bytes:
        self.process.send(payload)
        return self.process.receive_bytes()

    def stop(self) -> None:
        end_processes([self.process], lambda line: None)


class Actor:
    """A handle to a `Host`, with the call to it that is under way."""

    def __init__(self, host: Any) -> None:
        self.host = host
        self.pending = host.start.remote()
        self.answers = False

    def send(self, payload: bytes) -> None:
        self.pending = self.host.run.remote(payload)

    def receive(self) -> Reply:
        import ray

        pending, self.pending = self.pending, None
        try:
            reply = pickle.loads(ray.get(pending))
        except ray.exceptions.RayError as error:
            self.answers = False
            lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
            text = lines[0] if len(lines) == 1 else f"{lines[0]} {lines[-1]}"
            return Reply(error=f"worker was lost: {shorten(text, 300)}", traceback=str(error), is_last=True)
        self.answers = True
        return reply


class Actors:
    """The workers of a Ray cluster: joined, or started on this machine for this run."""

    def __init__(self, engine: Engine, num_units: int) -> None:
        ray = import_ray()
        self.is_ours = not ray.is_initialized()
        if self.is_ours:
            connect_ray(engine.address)
        try:
            nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            self.limit, cpus, gpus = share_nodes(nodes, engine, num_units)
        except BaseException:
            self.close()
            raise
        hidden = {"CUDA_VISIBLE_DEVICES": ""} if engine.device == "cpu" else {}
        self.environment = {**share_threads(cpus), **hidden}
        self.host = ray.remote(Host).options(num_cpus=cpus, num_gpus=gpus, max_restarts=0, max_concurrency=2)

    def start(self, number: int) -> Actor:
        return Actor(self.host.remote(self.environment))

    def wait(self, workers: list[Actor]) -> list[Actor]:
        import ray

        pending = {worker.pending: worker for worker in workers if worker.pending is not None}
        heard, _ = ray.wait(list(pending), num_returns=1, timeout=1.0)
        return [pending[reference] for reference in heard]

    def end(self, workers: list[Actor]) -> None:
        import ray

        try:
            stopping = [worker.host.stop.remote() for worker in workers if worker.answers]
            if stopping:
                ray.wait(stopping, num_returns=len(stopping), timeout=GRACE_SECONDS + 5)
        finally:
            for worker in workers:
                ray.kill(worker.host)

    def close(self) -> None:
        import ray

        if self.is_ours:
            ray.shutdown()


JOIN_SECONDS = 60.0
"""Until an address that does not answer is given up."""

JOIN = "import sys, ray; ray.init(sys.argv[1], log_to_driver=False, logging_level=40, include_dashboard=False)"


def import_ray() -> Any:
    try:
        import ray
    except ImportError:
        raise InputError("the engine is ray, but Ray is not installed: pip install 'biphase[cluster]'") from None
    return ray


def connect_ray(address: str | None) -> None:
    import ray

    host, colon, port = (address or "").removeprefix("ray://").rpartition(":")
    if colon and port.isdecimal():  # Ray itself tries for minutes
        try:
            socket.create_connection((host, int(port)), timeout=10).close()
        except OSError as error:
            raise InputError(f"no Ray cluster at '{address}': {error.strerror or error}") from None
    if address is not None:
        try_to_join(address)
    before = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, include_dashboard=False)
    except (ConnectionError, RuntimeError, ValueError, ImportError) as error:
        problem = " ".join(str(error).split())
        raise InputError(f"no Ray cluster at '{address}': {problem}" if address else f"Ray: {problem}") from None
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)  # `ray.init` put its own in its place


def try_to_join(address: str) -> None:
    """Join in a process that can be ended: where something listens but does not answer as a cluster, Ray tries for
    minutes, in code that no signal interrupts. Raises `InputError` then, and for whatever Ray says."""
    command = [sys.executable, "-P", "-c", JOIN, address]
    try:
        subprocess.run(command, capture_output=True, text=True, timeout=JOIN_SECONDS, check=True)
        return
    except subprocess.TimeoutExpired:
        problem = f"no answer within {JOIN_SECONDS:.0f} s"
    except subprocess.CalledProcessError as error:
        problem = (error.stderr.strip().splitlines() or [f"exit code {error.returncode}"])[-1]
    raise InputError(
        f"no Ray cluster at '{address}': {shorten(problem, 300)}; is it of the same version of Ray, and RAY_AUTH_TOKEN "
        "its token, where it wants one?"
    )


def share_nodes(nodes: Sequence[dict[str, float]], engine: Engine, num_units: int) -> tuple[int, int, float]:
    """How a cluster is cut up: number of workers, and the CPUs and GPUs that each of them holds.

    With GPUs, the CPUs of a node are divided among its GPUs, and the node with the fewest sets the number. Without,
    each worker holds as many CPUs as still let all workers find a place.
    """
    with_gpus = [node for node in nodes if node.get("GPU", 0) >= 1]
    if engine.device != "cpu" and with_gpus:
        each = engine.devices_per_worker
        with_gpus = [node for node in with_gpus if node["GPU"] >= each]
        if not with_gpus:
            raise InputError(f"{each} devices for each worker, but no Ray node has so many GPUs")
        places = [int(node["GPU"]) // each * engine.workers_per_gpu for node in with_gpus]
        cpus = min(int(node.get("CPU", 0)) // number for node, number in zip(with_gpus, places, strict=True))
        return min(engine.workers or sum(places), num_units), cpus, each / engine.workers_per_gpu
    if engine.device == "cuda":
        raise InputError(f"device is cuda, but none of the {len(nodes)} Ray nodes has a GPU; use cpu")
    cores = [int(node.get("CPU", 0)) for node in nodes]
    if not sum(cores):
        raise InputError(f"none of the {len(nodes)} Ray nodes offers a CPU; start one with `ray start --num-cpus`")
    workers = min(engine.workers or sum(count // engine.devices_per_worker for count in cores) or 1, num_units)
    fitting = [cpus for cpus in range(1, max(cores) + 1) if sum(count // cpus for count in cores) >= workers]
    return workers, max(fitting, default=1), 0
