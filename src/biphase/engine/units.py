"""Units of work, what became of them, and which of them comes next."""

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from graphlib import CycleError, TopologicalSorter
from typing import Any

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
    """What became of a unit: its value, or one line of `error`; `traceback` holds the rest, for a log."""

    name: str
    value: Any
    error: str | None
    seconds: float
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
    first one that no other worker is at, else from the largest. So a decision looks at as many groups as there are
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
        self.holders: Counter[str] = Counter()
        """How many workers had a unit of an affinity last."""
        self.postponed: deque[tuple[float, Unit]] = deque()
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
        self.groups[-unit.wave, self.chains[unit.name]].setdefault(unit.affinity, deque()).append(unit)
        self.num_ready += 1

    def take(self, last: str) -> Unit | None:
        """The next unit of a worker whose last affinity was `last`; None when no unit is ready."""
        self.readmit()
        if not self.groups:
            return None
        first = max(self.groups)
        groups = self.groups[first]
        affinity: str | None = last
        if not last or last not in groups:
            affinity = next((name for name in groups if not name or self.holders[name] <= 0), None)
        if affinity is None:  # workers are at all of them, so these are few
            affinity = max(groups, key=lambda name: len(groups[name]))
        unit = groups[affinity].popleft()
        if not groups[affinity]:
            del groups[affinity]
        if not groups:
            del self.groups[first]
        self.num_ready -= 1
        self.holders[last] -= 1
        self.holders[unit.affinity] += 1
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
        """What is over by this outcome: the unit, and when it failed, all that waited for it, as blocked. After a unit
        that is done, what waited for it becomes ready. A busy one is over too, unless it is tried again."""
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
                    over.append(replace(outcome, name=name, error=reason, seconds=0.0, traceback=""))
                    continue
                self.missing[name].remove(ended.name)
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
