"""Units of work, their outcomes and their order; the settings of engines; the interface of an engine's pool of
workers."""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from graphlib import TopologicalSorter
from typing import Any, Literal, Protocol

from pydantic import model_validator

from biphase.config import Count, PositiveCount, Strict

POLL_SECONDS = 10.0
"""The wait before the next attempt at a unit on which another process works."""


@dataclass(frozen=True)
class Unit:
    """A piece of work that another process can do: `function(**arguments)`.

    A worker must be able to import `function` from the top level of a module, and its arguments and value must be
    picklable. It raises `BusyError` while another process does the same work.
    """

    name: str
    function: Callable[..., Any]
    arguments: dict[str, Any]
    affinity: str = ""
    """A name for shared models and data. If possible, one worker runs all units of an affinity in a row. "": none."""
    needs: tuple[str, ...] = ()
    """The units that must succeed before this one starts."""
    kind: str = ""
    """A name for units whose time is proportional to their cost."""
    cost: float = 0.0
    """The amount of work in FLOPs, bytes or seconds, the same for all units of a call; 0 for almost none."""
    size: int = 1
    """The number of its products, which the bar counts."""
    wave: int = 0
    """The number of its wave. Ready units of an earlier wave start first, however long the chains of later ones."""
    file: str = ""
    """The name of its failure's record, if its own name differs from call to call."""


@dataclass(frozen=True)
class Outcome:
    """The end of a unit: its value, or its error in one line, with the traceback for a log."""

    name: str
    value: Any
    error: str | None
    seconds: float = 0.0
    """The time of a finished unit."""
    traceback: str = ""
    is_busy: bool = False
    """Whether the unit is undone because another process works on it."""
    worker_died: bool = False
    """Whether the error is the death of its worker."""
    num_running: int = 1
    """The number of units in progress at its end, itself included."""


class UnitQueue:
    """The units that wait for a worker or for other units.

    Ready units are grouped by wave, by the length of the chain of units that wait for them, and by affinity. A worker
    takes a unit of the first wave with the longest chain: from the group of its last affinity, else from the first
    group that is not the last of another worker, else from the largest. So the time of a choice depends on the number
    of workers, not of units.
    """

    def __init__(self, units: Sequence[Unit], waits_for_busy: bool = False) -> None:
        """
        Args:
            waits_for_busy: whether to retry a unit on which another process works until it is done, or to leave it
                undone.
        """
        self.units = {unit.name: unit for unit in units}
        self.waits_for_busy = waits_for_busy
        self.num_left, self.num_ready = len(units), 0
        self.missing = {unit.name: set(unit.needs) for unit in units}
        self.dependents: dict[str, list[str]] = defaultdict(list)
        self.groups: dict[tuple[int, int], dict[str, deque[Unit]]] = defaultdict(dict)
        """The groups: (-wave, length of the chain) → affinity → units; the largest key comes first."""
        self.affinities: dict[int, str] = {}
        """The affinity of each worker's last unit."""
        self.postponed: deque[tuple[float, Unit]] = deque()
        """Busy units with the times of their next attempts."""
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
        """Take the next unit for a worker; None if no unit is ready."""
        self.readmit()
        if not self.groups:
            return None
        first = max(self.groups)
        groups = self.groups[first]
        affinity = self.affinities.get(worker)
        if not affinity or affinity not in groups:
            held = {*self.affinities.values()} - {""}
            affinity = next((name for name in groups if name not in held), None)
        if affinity is None:  # each group is another worker's last one, so there are few groups
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
        """Make postponed units ready at their time."""
        while self.postponed and self.postponed[0][0] <= time.monotonic():
            self.add(self.postponed.popleft()[1])

    def sleep(self) -> None:
        """Wait a second, or until a postponed unit is ready; for times without a ready or running unit."""
        assert self.postponed, "units are left, but none of them is ready or in progress"
        time.sleep(min(1.0, max(0.0, self.postponed[0][0] - time.monotonic())))

    def settle(self, outcome: Outcome) -> list[Outcome]:
        """Note an outcome, and return it with all outcomes that follow from it.

        Units that need a failed unit are blocked. Units that need a busy one stay undone with it, or wait for its next
        attempt. Units that need a finished one become ready.
        """
        if outcome.is_busy and self.waits_for_busy:
            self.postponed.append((time.monotonic() + POLL_SECONDS, self.units[outcome.name]))
            return [outcome]
        over = [outcome]
        for ended in over:  # the list grows: blocked units block others
            for name in self.dependents.pop(ended.name, ()):
                if name not in self.missing:
                    continue  # another unit has blocked it
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


EngineKind = Literal["local", "ray"]


class Engine(Strict):
    """The machines and devices that run units."""

    kind: EngineKind = "local"
    """`local`: this machine. `ray`: a Ray cluster."""
    workers: Count | None = None
    """The number of worker processes. By default: `workers_per_gpu` per GPU, or one per core without a GPU. 0: no
    workers; this process runs a unit at a time, for a debugger."""
    workers_per_gpu: PositiveCount = 1
    """The number of workers that share a GPU."""
    devices_per_worker: PositiveCount = 1
    """The GPUs per worker, or its cores without a GPU, for units that start several processes, as torchrun does."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`: GPUs if there are any. `cpu`: hide GPUs from the units. `cuda`: GPUs only."""
    address: str | None = None
    """The address of a Ray cluster: `auto`, HOST:PORT or `ray://HOST:10001`. By default: RAY_ADDRESS, else a new
    cluster on this machine."""

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


Message = tuple[Literal["ready", "progress", "over", "ended"], Any]
"""`ready`; `progress` with the unit's report; `over` with its outcome, without the name; `ended` with the last outcome
of the worker."""


class Pool(Protocol):
    """Workers of one engine, each known by its index, from 0 to `limit` - 1."""

    limit: int
    """The number of workers that can run at once."""

    def start(self, worker: int) -> None:
        """Start a worker; its first message is `ready`."""

    def send(self, worker: int, payload: bytes) -> None:
        """Hand a worker a unit: function and arguments, pickled."""

    def listen(self) -> Iterator[tuple[int, Message]]:
        """Yield the messages of workers, which include their ends, after a second at most."""

    def end(self, workers: list[int]) -> None:
        """Ask workers to end, give them time to save their state, and then kill them."""

    def close(self) -> None:
        """End all workers."""
