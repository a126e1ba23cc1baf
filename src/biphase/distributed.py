"""The processes of one run, as torchrun starts them. No other module names process groups.

The processes live and end together. Each ends with the process that started it. Each sends a beat once a second, so
that none waits for a process that died, was stopped or is cut off: the others name the silent process and end.

`python -P -m biphase.distributed` is torchrun with two changes. It names a killed process in one line, and it exits
with the code of its processes: torchrun itself exits with 1 whatever happened, and a caller must tell a busy run (75)
from one that cannot be trained.
"""

import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

if __name__ == "__main__":  # PyTorch reads it at import; else the death of another machine prints a page of C++ frames
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from biphase.console import err, silence
from biphase.device import choose_device, choose_dtype
from biphase.errors import InputError, told_as
from biphase.machine import GRACE, STOPS, describe_kill, end_with_parent, environment_number, grace, handled
from biphase.recipe import ComputeConfig

PARENT = "BIPHASE_PARENT"
"""The environment variable with the id of a process: when that process ends, so does a launcher or a rank."""
SILENCE_SECONDS = 60.0
"""The longest silence of a process, unless the recipe sets another."""
BEAT_SECONDS = 1.0
GONE_BEATS = 5
"""The number of missed beats after which a process counts as gone, once a connection has broken."""
JOIN_PATIENCE = 10
"""The factor on the longest silence before a process has joined: libraries load slowly from a busy disk."""
PATIENCE = timedelta(hours=1)
"""The longest wait for a process that is alive: the first one makes, loads and writes large networks for all."""
LAUNCHER_SECONDS = 5.0
"""The part of its grace that a launcher keeps for itself, to end after its processes."""
GO_ON = "whole checkpoints stay, run the same command to continue"
HAS_LEFT = 1 << 40
"""The number added to the beats of a process that has ended as it should."""

Shared = TypeVar("Shared")


@dataclass(frozen=True)
class World:
    """This process among those of the run: its rank, their number, its device and the type of its arithmetic.

    `sum`, `fail_together`, `broadcast`, `on_first` and `broadcast_into` are collectives: every process must call them.
    """

    rank: int
    size: int
    device: torch.device
    dtype: torch.dtype = torch.float32
    signals: list[int] = field(default_factory=list)
    """The signals that asked this process to stop."""

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def sum(self, *values: float) -> list[float]:
        """Sum each value over all processes, in double precision."""
        if self.size == 1:
            return [float(value) for value in values]
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return total.tolist()

    @contextmanager
    def fail_together(self, kind: type[InputError] = InputError) -> Iterator[None]:
        """Raise in all processes if the block raises an `InputError` or `OSError` in one. That process raises its own
        error, and the others raise one of this `kind` that refers to it."""
        failure: OSError | InputError | None = None
        try:
            yield
        except (OSError, InputError) as error:
            failure = error
        [num_failures] = self.sum(failure is not None)
        if num_failures:
            raise failure or kind("another process of this run says why it ends")

    def broadcast(self, value: Shared) -> Shared:
        """Return the first process's value (plain data) in all processes, because others may see an older state of
        files."""
        if self.size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, device=self.device)
        return values[0]

    def on_first(self, work: Callable[[], Shared]) -> Shared:
        """Call `work` in the first process, and return its result (plain data) in all. If it fails, all processes
        raise."""
        result: Any = None
        with self.fail_together():
            if self.is_main:
                result = work()
        return self.broadcast(result)

    def broadcast_into(self, tensor: torch.Tensor) -> None:
        """Fill a tensor with the first process's values."""
        dist.broadcast(tensor, 0)

    def mesh(self) -> DeviceMesh:
        return init_device_mesh(self.device.type, (self.size,))


class Heart(threading.Thread):
    """A thread that beats for this process and watches the beats of others, through the store at which all have met.

    The first process watches all others, and they watch the first. Each measures silence in its own beats, so that no
    process counts as silent while the whole run is suspended or starved. The first to find a silent process names it
    and ends; the others follow.
    """

    def __init__(self, store: Any, world: World, silence_seconds: float) -> None:
        super().__init__(daemon=True)
        self.store = store.clone()  # a connection of its own: the main thread may block on the other
        self.signals, self.silence_seconds = world.signals, silence_seconds
        self.has_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        """Whether torchrun started the processes. It holds the store, and reports which of them was killed."""
        self.rank, self.size = rank, size = world.rank, world.size
        self.watched = range(1, size) if rank == 0 else range(1)
        """The ranks that this process watches."""
        self.counts = dict.fromkeys(range(size), 0)
        """The beats of each rank at the last look."""
        self.missed = dict.fromkeys(range(size), 0)
        """The beats of this process since a rank's count last changed."""
        self.stopped = threading.Event()
        self.store.set(f"name/{rank}", f"{socket.gethostname()}, pid {os.getpid()}")
        self.store.add(f"beats/{rank}", 1)  # from here on it has joined, even if it is stopped before its next beat

    def run(self) -> None:
        while not self.stopped.wait(BEAT_SECONDS):
            try:
                self.store.add(f"beats/{self.rank}", 1)
                for rank in self.watched:
                    beats = self.store.add(f"beats/{rank}", 0)
                    self.missed[rank] = 0 if beats != self.counts[rank] or beats >= HAS_LEFT else self.missed[rank] + 1
                    self.counts[rank] = beats
                if self.store.add("told", 0) and not self.stopped.is_set():  # else the main thread tells, and ends
                    self.end_at_once("")
            except RuntimeError:  # the store does not answer
                # The store belongs to the first process or to the launcher, with which this process ends anyway.
                self.missed[0] += not self.has_launcher
            for rank in self.watched:
                state, patience = ("has been silent", 1) if self.counts[rank] else ("has not joined", JOIN_PATIENCE)
                seconds = self.missed[rank] * BEAT_SECONDS
                if seconds >= self.silence_seconds * patience:
                    line = f"{self.name_of(rank)} {state} for {seconds:.0f} s: stopped, starved or cut off"
                    line += f" (compute.silence_seconds sets the longest wait); {GO_ON}"
                    self.end_at_once("" if self.has_launcher and self.has_ended(rank) else line)

    def leave(self) -> None:
        """Stop beating, and sign off, so that the others do not miss this process."""
        self.stopped.set()
        with suppress(RuntimeError):
            self.store.add(f"beats/{self.rank}", HAS_LEFT)

    def find_gone(self) -> int | None:
        """Find the process that stopped beating, after a connection broke; None if all still beat."""
        self.missed, self.watched = dict.fromkeys(self.missed, 0), range(self.size)  # it misses no beat of its own
        for _ in range(2 * GONE_BEATS):
            time.sleep(BEAT_SECONDS)
            longest = max(self.missed, key=lambda rank: self.missed[rank])
            if self.missed[longest] >= GONE_BEATS:
                return longest
        return None

    def name_of(self, rank: int) -> str:
        name = f"process {rank} of {self.size}"
        with suppress(RuntimeError):
            if self.store.check([f"name/{rank}"]):
                name += f" ({self.store.get(f'name/{rank}').decode()})"
        return name

    def leave_reason(self, error: InputError) -> None:
        """Leave this process's error for the others: the launcher may end it before its turn to print."""
        with suppress(RuntimeError):
            self.store.set(f"reason/{self.rank}", str(error))

    def explain_gone(self, rank: int) -> str:
        """Say why a process is gone: its own error, if it left one."""
        with suppress(RuntimeError):
            if self.store.check([f"reason/{rank}"]):
                return f"{self.name_of(rank)}: {self.store.get(f'reason/{rank}').decode()}"
        return f"{self.name_of(rank)} is gone: killed, out of memory, or ended by an error of its own; {GO_ON}"

    def has_ended(self, rank: int) -> bool:
        """Return whether a process had joined on this machine and is gone."""
        with suppress(RuntimeError, PermissionError):
            if self.store.check([f"name/{rank}"]):
                host, _, pid = self.store.get(f"name/{rank}").decode().rpartition(", pid ")
                try:
                    os.kill(int(pid), 0)
                except ProcessLookupError:
                    return host == socket.gethostname()
        return False

    def may_tell(self) -> bool:
        """Return whether this process is the first to claim the report of why the run ends."""
        try:
            return bool(self.store.add("told", 1) == 1)
        except RuntimeError:
            return True

    def end_at_once(self, line: str) -> NoReturn:
        """End this process from this thread, because the main thread may wait forever."""
        if line and not self.signals and self.may_tell():  # else its launcher asked it to stop, and reports why
            err.quiet = False
            err.show_cursor(True)
            err.print(f"biphase: {line}")
        sys.stderr.flush()
        os._exit(2)  # as after any InputError


@contextmanager
def join_world(compute: ComputeConfig) -> Iterator[World]:
    """Join the processes that torchrun started, as its environment variables say, or run alone.

    Raises `InputError` if the processes cannot meet, or if another one is gone; one process names it.
    """
    size = environment_number("WORLD_SIZE", 1)
    device = choose_device(compute.device, environment_number("LOCAL_RANK", 0) if size > 1 else 0)
    dtype = choose_dtype(compute.precision, device)
    if size == 1:
        yield World(0, 1, device, dtype)
        return
    silence_seconds = compute.silence_seconds or SILENCE_SECONDS
    parent = int(os.environ.get(PARENT) or os.getppid())
    end_with_parent(parent, max(grace(), silence_seconds))
    address = ":".join(os.environ.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))
    problem = f"{size} processes (WORLD_SIZE) cannot meet at {address} (MASTER_ADDR and MASTER_PORT)"
    remedy = "give the first machine's address and a free port; without torchrun, unset WORLD_SIZE to run alone"
    with told_as(problem, remedy):
        met, rank, size = next(dist.rendezvous("env://"))
    if rank > 0:
        silence()
    world = World(rank, size, device, dtype)
    heart = Heart(dist.PrefixStore("hearts", met), world, silence_seconds)
    heart.start()
    try:
        backend = "nccl" if device.type == "cuda" else "gloo"
        store = dist.PrefixStore("default_pg", met)
        bound = device if device.type == "cuda" else None  # else NCCL guesses it from the rank, with a warning
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=PATIENCE, device_id=bound)
        yield world
    except InputError as error:
        heart.leave_reason(error)
        err.quiet = environment_number("LOCAL_RANK", 0) > 0  # one process of each machine says why, at once
        raise
    except RuntimeError as error:
        is_of_connection = isinstance(error, dist.DistError) or "gloo" in str(error).lower()
        gone = heart.find_gone() if is_of_connection else None
        if gone is None:
            raise
        heart.stopped.set()  # else it may take this process's own report for another's, and end before it is printed
        # If the launcher has asked this process to stop, it reports by itself which process was killed.
        err.quiet = bool(world.signals) or not heart.may_tell()
        raise InputError(heart.explain_gone(gone)) from None
    else:
        heart.leave()
    finally:
        heart.stopped.set()
        if dist.is_initialized():
            dist.destroy_process_group()


def launch() -> int:
    """Run torchrun with the arguments of this process, and return the exit code."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.run import main as torchrun

    stops: list[float] = []
    """The time of the first signal that asked to end."""

    def end(number: int, _: Any) -> NoReturn:
        stops.append(time.monotonic())
        for asking in STOPS:
            signal.signal(asking, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        raise SignalException("asked to end", sigval=signal.Signals(number))

    try:
        patience = max(grace() - LAUNCHER_SECONDS, 1.0)
        if sys.flags.safe_path:  # -P, which holds for its processes too
            os.environ["PYTHONSAFEPATH"] = "1"
        if PARENT in os.environ:
            end_with_parent(int(os.environ[PARENT]), grace())
        os.environ[PARENT] = str(os.getpid())
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", f"{patience:.0f}")
        # torchrun's own handlers leave processes behind that are still saving when a further signal comes, and Slurm, a
        # study and its worker may all send one.
        os.environ.setdefault("PET_SIGNALS_TO_HANDLE", "SIGQUIT")
        logging.disable(logging.ERROR)  # else half a page about each process that fails
        with handled(end, *STOPS, signal.SIGINT):
            torchrun()
        return 0
    except SignalException as stop:
        if stops and time.monotonic() - stops[0] >= patience:
            line = f"biphase: processes that had not saved their state in {patience:.0f} s were killed"
            err.print(f"{line}; {GRACE} gives them longer; {GO_ON}")
        return 128 + stop.sigval
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except ChildFailedError as failed:
        codes = {rank: failure.exitcode for rank, failure in failed.failures.items()}
        if errors := [code for code in codes.values() if code > 0]:
            return errors[0]
        # torchrun sends SIGTERM to the others.
        rank = next((rank for rank, code in codes.items() if code != -signal.SIGTERM), min(codes))
        line = f"process {rank} (pid {failed.failures[rank].pid}) {describe_kill(-codes[rank])}; {GO_ON}"
    except RendezvousError:
        reason = "the launchers of other machines do not answer, or no longer: killed, cut off, or not started"
        line = f"{reason} with the same --rdzv-endpoint and --rdzv-id; {GO_ON}"
    except InputError as error:
        line = str(error)
    err.print(f"biphase: {line}")
    return 2


if __name__ == "__main__":
    sys.exit(launch())
