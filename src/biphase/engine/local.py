"""Workers on this machine: processes that run one unit at a time."""

import os
import pickle
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from biphase import console, machine
from biphase.console import err
from biphase.engine.units import Engine, Message, Outcome
from biphase.errors import SOURCE, BusyError, InputError, StoppedError

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")


def attempt(call: Callable[[], Any], tell: Callable[[Any], None]) -> Message:
    """Run a unit, and pass its reports of progress to `tell`. Errors become outcomes; all but `InputError` also end the
    worker. `StoppedError` and `KeyboardInterrupt` are raised."""
    started, earlier = time.perf_counter(), console.report_progress
    console.report_progress = tell
    try:
        value = call()
    except (StoppedError, KeyboardInterrupt):
        raise
    except BaseException as problem:  # a unit may raise anything, and a Rust library raises no Exception
        is_busy, lines = isinstance(problem, BusyError), "".join(traceback.format_exception(problem))
        outcome = Outcome("", None, None if is_busy else describe_error(problem), traceback=lines, is_busy=is_busy)
        return ("over" if isinstance(problem, InputError) else "ended"), outcome
    finally:
        console.report_progress = earlier
    return "over", Outcome("", value, None, time.perf_counter() - started)


def describe_error(error: BaseException) -> str:
    """Write an error in one line: the text of an `InputError`, else `Type: text (line of this package)`."""
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
"""The program of a worker. Its arguments are its end of the pipe, its parent process, and the parent's import path."""


class WorkerProcess:
    """A worker process and a pipe to it. It leads a process group: Ctrl-C does not reach it, and its children end with
    it.

    `multiprocessing` would run the main script again in each worker, with our environment. On a cluster, a Ray actor
    starts this process and runs these methods in threads, so that it can end the process while `receive` waits. A unit
    has the main thread of the process and its own signals, and its death leaves this process intact.
    """

    def __init__(self, threads: int, gpus: str | None) -> None:
        """
        Args:
            threads: the most threads; the environment may lower it.
            gpus: the worker's value of `machine.gpu_variables`; None for the value of this process.
        """
        given = [os.environ.get(name, "") for name in THREAD_VARIABLES]
        allowed = [int(number) for number in given if number.isdecimal() and int(number) > 0]
        # All of them, because PyTorch takes MKL's number, whatever OMP_NUM_THREADS is.
        variables = dict.fromkeys(THREAD_VARIABLES, str(max(1, min([threads, *allowed]))))
        if gpus is not None:
            names = machine.gpu_variables()
            variables |= dict.fromkeys(names if gpus else [*names, "CUDA_VISIBLE_DEVICES"], gpus)
        paths = sys.path
        if ray := sys.modules.get("ray"):  # Ray's vendored packages must not hide the user's packages
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
        with suppress(BrokenPipeError, ConnectionResetError):  # `receive` reports the end of the process
            self.connection.send_bytes(payload)

    def receive(self) -> bytes:
        """Wait for the next pickled message. After the end of the process, return a message about it."""
        # Children may hold the pipe open after the end of the process.
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
        """Send a signal to the worker and to all its running children."""
        with suppress(ProcessLookupError, PermissionError):  # macOS raises the latter for an ending process
            os.killpg(self.popen.pid, signum)


def end_processes(processes: Sequence[WorkerProcess]) -> None:
    """Ask processes to end, wait for them, and kill all that remain. Ctrl-C during the wait kills at once."""
    started, is_told, patience = time.monotonic(), False, machine.grace()
    try:
        for process in processes:
            process.signal_group(signal.SIGTERM)
            # A worker that waits for a unit ends with its pipe, even if its last unit caught the SIGTERM.
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
            # Print the unread message of a worker about its stopped unit.
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
    """Count the workers that can run side by side; 0 if only a Ray cluster knows."""
    if engine.workers is not None:
        return max(engine.workers, 1)
    if engine.kind == "ray":
        return 0
    gpus = machine.visible_gpus() if engine.device != "cpu" else []
    return max(1, (engine.workers_per_gpu * len(gpus) or machine.num_cores()) // engine.devices_per_worker)


class LocalPool:
    """Worker processes on this machine, each known by its index, from 0 to `limit` - 1."""

    def __init__(self, engine: Engine, num_units: int) -> None:
        gpus = [] if engine.device == "cpu" else machine.visible_gpus()
        if engine.device == "cuda" and not gpus:
            raise InputError("device is cuda, but PyTorch sees no CUDA device; use cpu")
        each = engine.devices_per_worker
        if gpus and each > len(gpus):
            raise InputError(f"{each} devices for each worker, but this machine has {len(gpus)} GPUs")
        shares = [",".join(gpus[first : first + each]) for first in range(0, len(gpus) - each + 1, each)]
        self.gpus: list[str | None] = [*shares] or ["" if engine.device == "cpu" else None]
        """The values of `machine.gpu_variables` that workers get in turn; None for the value of this process."""
        self.limit = min(count_workers(engine), num_units)
        self.processes: dict[int, WorkerProcess] = {}

    def start(self, worker: int) -> None:
        gpus = self.gpus[worker % len(self.gpus)]
        self.processes[worker] = WorkerProcess(machine.num_cores() // self.limit, gpus)

    def send(self, worker: int, payload: bytes) -> None:
        """Hand a worker a unit: function and arguments, pickled."""
        self.processes[worker].send(payload)

    def listen(self) -> Iterator[tuple[int, Message]]:
        """Yield the messages of workers, which include their ends, after a second at most."""
        ready = wait([process.connection for process in self.processes.values()], timeout=1.0)
        for worker, process in list(self.processes.items()):
            # The children of a dead worker may hold its pipe open.
            if process.connection in ready or process.popen.poll() is not None:
                yield worker, pickle.loads(process.receive())

    def end(self, workers: list[int]) -> None:
        """Ask workers to end, give them time to save their state, and then kill them."""
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
    """Unpickle the parent's function and arguments, and call the function. The import of its module and the pickling of
    its value happen here too, so that their errors count as the unit's."""
    function, arguments = pickle.loads(payload)
    value = function(**arguments)
    pickle.dumps(value)
    return value
