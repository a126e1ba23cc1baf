"""Where units run: the engines, and the worker processes of this machine."""

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal, Protocol

from pydantic import model_validator

from biphase.config import Count, PositiveCount, Strict
from biphase.console import err, silence
from biphase.errors import BusyError, InputError, StoppedError
from biphase.machine import num_cores, prepare_process, visible_gpus

GRACE_SECONDS = 20.0
"""From asking a worker to end until it is killed: training uses them to save its state. Slurm itself gives 30."""

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")

PACKAGE = Path(__file__).parents[1]


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
    """The address of a Ray cluster: `auto`, HOST:PORT or `ray://HOST:10001`. None: that of this machine, else a new
    one."""

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


# What a worker says


@dataclass(frozen=True)
class WorkerMessage:
    """What a worker says: that it is ready (all empty), how far a unit is, what came of it, or why the worker ends."""

    value: Any = None
    error: str | None = None
    traceback: str = ""
    seconds: float | None = None
    """How long the unit took; None when nobody measured it, because the worker died."""
    is_progress: bool = False
    """Whether the unit goes on, and `value` is what it says of its progress."""
    is_busy: bool = False
    """Whether another process is at what the unit makes."""
    is_last: bool = False
    """Whether the worker ends."""


listener: ContextVar[Callable[[Any], None]] = ContextVar("listener")


@contextmanager
def listening(told: Callable[[Any], None]) -> Iterator[None]:
    """Inside the block, what a unit says of its progress goes to `told`."""
    token = listener.set(told)
    try:
        yield
    finally:
        listener.reset(token)


def report_progress(value: Any) -> None:
    """Tell whoever runs this unit how far it is, in plain data. Does nothing where nobody listens."""
    listener.get(lambda _: None)(value)


def attempt(function: Callable[..., Any], arguments: dict[str, Any]) -> WorkerMessage:
    """Call a unit's function. Only `StoppedError` and `KeyboardInterrupt` pass."""
    started = time.perf_counter()
    value, error, trace, is_last, is_busy = None, None, "", False, False
    try:
        value = function(**arguments)
    except StoppedError:
        raise
    except (Exception, SystemExit) as problem:  # whatever a unit may raise is what came of it
        error = describe_error(problem)
        is_last, is_busy = not isinstance(problem, InputError), isinstance(problem, BusyError)
        trace = "".join(traceback.format_exception(problem))
    seconds = time.perf_counter() - started
    return WorkerMessage(value, error, trace, seconds, is_busy=is_busy, is_last=is_last)


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


# Where units run


class Worker(Protocol):
    """A worker that units can be sent to."""

    def send(self, payload: bytes) -> None:
        """Hand it a unit: function and arguments, pickled."""
        ...

    def receive(self) -> WorkerMessage:
        """What it says next; how it ended, if it did. Waits."""
        ...


class Pool(Protocol):
    """Where workers come from."""

    limit: int
    """How many there may be at a time."""

    def start(self, number: int) -> Worker:
        """A new worker in the place `number`, from 0 to `limit` - 1."""
        ...

    def wait(self, workers: list[Any]) -> list[Any]:
        """Those of the workers that have said something, or ended, after a second at most."""
        ...

    def end(self, workers: list[Any]) -> None:
        """Ask workers to end, give them time to save their state, then kill them."""
        ...

    def close(self) -> None: ...


# Worker processes

START = (
    "import sys; number, parent, *sys.path = sys.argv[1:]; "
    "from biphase.engine.local import serve; serve(int(number), int(parent))"
)
"""The program of a worker: its end of the pipe and its parent, then the folders that the parent imports from."""


class WorkerProcess:
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

    def receive(self) -> WorkerMessage:
        return pickle.loads(self.receive_bytes())

    def receive_bytes(self) -> bytes:
        """Its next message, pickled; how it ended, if it did. Waits."""
        # Its children may hold the pipe open after its end, so that the end of the pipe is not enough to know.
        while not self.connection.poll(1.0):
            if self.popen.poll() is not None and not self.connection.poll():
                return pickle.dumps(self.last_message())
        try:
            return self.connection.recv_bytes()
        except (EOFError, OSError):
            return pickle.dumps(self.last_message())

    def last_message(self) -> WorkerMessage:
        try:
            self.popen.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            self.signal_group(signal.SIGKILL)
        return WorkerMessage(error=describe_exit(self.popen.wait()), is_last=True)

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


def end_processes(processes: Sequence[WorkerProcess], tell: Callable[[str], None]) -> None:
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


class LocalPool:
    """Worker processes on this machine."""

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
        """What a worker finds in its environment: its share of the cores, its GPU."""
        threads = share_threads(num_cores() // self.limit)
        if self.gpus:
            first = number * self.gpus_each % (len(self.gpus) // self.gpus_each * self.gpus_each)
            own = ",".join(self.gpus[first : first + self.gpus_each])
            return {**os.environ, **threads, "CUDA_VISIBLE_DEVICES": own}
        return {**os.environ, **threads, **({"CUDA_VISIBLE_DEVICES": ""} if self.hides_gpus else {})}

    def start(self, number: int) -> WorkerProcess:
        return WorkerProcess(self.environment(number), sys.path)

    def wait(self, workers: list[WorkerProcess]) -> list[WorkerProcess]:
        heard = wait([worker.connection for worker in workers], timeout=1.0)
        return [worker for worker in workers if worker.connection in heard or worker.popen.poll() is not None]

    def end(self, workers: list[WorkerProcess]) -> None:
        end_processes(workers, lambda line: err.print(line, markup=False))

    def close(self) -> None:
        pass


def share_threads(threads: int) -> dict[str, str]:
    """Must stand in the environment before PyTorch is loaded."""
    return dict.fromkeys(THREAD_VARIABLES, str(max(1, threads)))


# Inside a worker


def serve(number: int, parent: int) -> None:
    """Units in, messages out, over the file descriptor `number`; ends with the process `parent`."""
    threading.Thread(target=end_with_parent, args=(parent,), daemon=True).start()
    os.set_inheritable(number, False)
    prepare_process()
    silence()
    with suppress(EOFError, ConnectionResetError, BrokenPipeError), Connection(number) as connection:
        message = WorkerMessage()
        with listening(lambda value: connection.send_bytes(pickle.dumps(WorkerMessage(value, is_progress=True)))):
            while True:
                connection.send_bytes(pickle_message(message))
                if message.is_last:
                    return
                message = answer_request(connection.recv_bytes())


def answer_request(payload: bytes) -> WorkerMessage:
    started = time.perf_counter()
    try:
        return attempt(load_and_call, {"payload": payload})
    except StoppedError as stop:
        return WorkerMessage(error=str(stop), seconds=time.perf_counter() - started, is_last=True)


def load_and_call(payload: bytes) -> Any:
    """Loading imports the function's module, so it may fail as the function may. The bytes are from the parent."""
    function, arguments = pickle.loads(payload)
    return function(**arguments)


def pickle_message(message: WorkerMessage) -> bytes:
    try:
        return pickle.dumps(message)
    except Exception as error:  # whatever the value's own code raises
        problem = f"its value, of type {type(message.value).__name__}, cannot be sent: {describe_error(error)}"
        return pickle.dumps(replace(message, value=None, error=problem, traceback=""))


def end_with_parent(parent: int) -> None:
    """No orphans: once the parent is gone, this process and all that it started end as if it had asked them to."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os.killpg(0, signal.SIGTERM)
    time.sleep(GRACE_SECONDS)
    os.killpg(0, signal.SIGKILL)
