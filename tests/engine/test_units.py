"""Units run once, in order of their needs; what breaks one breaks only what needs it; nothing stays behind."""

import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from threading import Thread
from types import ModuleType

import psutil
import pytest
from pydantic import ValidationError

from biphase import machine
from biphase.engine import local
from biphase.engine import ray as cluster_module
from biphase.engine import units as units_module
from biphase.engine.local import LocalPool, WorkerProcess, end_processes
from biphase.engine.ray import divide_nodes
from biphase.engine.scheduler import run_units
from biphase.engine.units import Engine, Outcome, Unit, UnitQueue
from biphase.errors import BusyError, InputError, StoppedError
from biphase.machine import num_cores

from ..conftest import mostly_later

DEEDS = """
import os, signal, subprocess, sys, time
from pathlib import Path

from biphase import console
from biphase.errors import BusyError, InputError, StoppedError

def add(x, y):
    return x + y

def pid(seconds=0.0):
    time.sleep(seconds)
    return os.getpid()

def meet_on_nodes(folder, marker):
    # Says on which node it is, once units are under way on two of them and the marker is there; nothing on a lost node.
    node = os.environ["RAY_RAYLET_PID"]
    Path(folder, node).write_text(str(os.getpid()))
    deadline = time.monotonic() + 120
    while len(list(Path(folder).iterdir())) < 2 or not Path(marker).exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    state = subprocess.run(["ps", "-o", "stat=", "-p", node], capture_output=True, text=True).stdout
    if not state.strip() or state.startswith("Z"):
        time.sleep(60)
    return node

def environment(keys):
    return {key: os.environ.get(key) for key in keys}

def refuse(text):
    raise InputError(text)

def divide(x):
    return 1 / x

def be_busy_once(folder):
    path = Path(folder, "tried")
    if not path.exists():
        path.touch()
        raise BusyError("held")
    return os.getpid()

def count_to(number):
    for step in range(number):
        console.report_progress(step)
    return number

def count_shards():
    from biphase.files import read_json
    return len(read_json(3))

def leave(code):
    sys.exit(code)

class PanicException(BaseException):
    pass

def panic(text):
    raise PanicException(text)

def vanish(code):
    os._exit(code)

def receive(number):
    os.kill(os.getpid(), number)
    time.sleep(60)

def unsendable():
    return lambda: None

def breed(folder):
    child = subprocess.Popen(["sleep", "60"])
    Path(folder, f"{os.getpid()}").touch()
    Path(folder, f"{child.pid}").touch()
    time.sleep(60)

def save_when_asked(folder):
    def save(signum, frame):
        time.sleep(0.2)
        Path(folder, "saved").touch()
        raise StoppedError("stopped at step 3")
    signal.signal(signal.SIGTERM, save)
    Path(folder, "started").touch()
    time.sleep(60)

def finish_when_asked(folder):
    asked = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
    Path(folder, "started").touch()
    while not asked:
        time.sleep(0.01)
    return folder
"""

HERE = Engine(workers=0)


def crew(number: int) -> Engine:
    return Engine(workers=number, device="cpu")


@pytest.fixture(scope="module")
def deeds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """A module that workers can import: test modules are none."""
    folder = tmp_path_factory.mktemp("deeds")
    (folder / "deeds_of_units.py").write_text(DEEDS)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        yield import_module("deeds_of_units")


def by_name(outcomes: Iterator[Outcome]) -> dict[str, Outcome]:
    collected = list(outcomes)
    named = {outcome.name: outcome for outcome in collected}
    assert len(named) == len(collected), "a unit has two outcomes"
    return named


def is_alive(pid: int) -> bool:
    """Not gone and no zombie."""
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout
    return bool(state.strip()) and not state.startswith("Z")


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def bred(folder: Path, number: int) -> list[int]:
    """The process ids that `breed` left in a folder, once there are as many."""
    assert wait_until(lambda: len(list(folder.iterdir())) >= number)
    return [int(path.name) for path in folder.iterdir()]


# Order


def forest(rng: random.Random, number: int) -> list[Unit]:
    """Units that need up to two of the earlier ones, shuffled."""
    names = [f"u{index}" for index in range(number)]
    units = [
        Unit(
            name,
            os.getpid,
            {},
            affinity=rng.choice(["", "a", "b", "c"]),
            needs=tuple(rng.sample(names[:index], min(index, rng.choice([0, 0, 0, 1, 2])))),
        )
        for index, name in enumerate(names)
    ]
    rng.shuffle(units)
    return units


def slow_choices(ready: list[Unit], last: str, others: list[str], chains: dict[str, int]) -> set[str]:
    """The affinities that the rule allows, by its words: longest chain, own affinity, one unheld, largest."""
    longest = max(chains[unit.name] for unit in ready)
    urgent = [unit.affinity for unit in ready if chains[unit.name] == longest]
    if last and last in urgent:
        return {last}
    if unheld := {affinity for affinity in urgent if not affinity or affinity not in others}:
        return unheld
    most = max(urgent.count(affinity) for affinity in urgent)
    return {affinity for affinity in urgent if urgent.count(affinity) == most}


def slow_chain(name: str, units: list[Unit]) -> int:
    return max((1 + slow_chain(unit.name, units) for unit in units if name in unit.needs), default=0)


@pytest.mark.parametrize("seed", range(20))
def test_queue_follows_its_rule(seed: int) -> None:
    """Against the rule said slowly, with three workers that start and finish at random times, some units failing."""
    rng = random.Random(seed)
    units = forest(rng, 30)
    chains = {unit.name: slow_chain(unit.name, units) for unit in units}
    queue, over, failed = UnitQueue(units), set(), set()
    last, busy = ["", "", ""], [None, None, None]
    waiting = {unit.name: unit for unit in units}
    while queue.num_left:
        worker = rng.randrange(3)
        unit = busy[worker]
        if unit is not None:
            error = "broken" if rng.random() < 0.1 else None
            settled = queue.settle(Outcome(unit.name, None, error))
            over |= {outcome.name for outcome in settled}
            failed |= {outcome.name for outcome in settled if outcome.error}
            busy[worker] = None
            continue
        ready = [unit for unit in waiting.values() if over - failed >= set(unit.needs) and unit.name not in over]
        assert queue.num_ready == len(ready)
        unit = queue.take(worker)
        assert (unit is None) == (not ready)
        if unit is not None:
            others = [affinity for index, affinity in enumerate(last) if index != worker]
            assert unit.affinity in slow_choices(ready, last[worker], others, chains)
            last[worker], busy[worker] = unit.affinity, unit
            del waiting[unit.name]
    assert over == {unit.name for unit in units}
    assert {unit.name for unit in units if failed & set(unit.needs)} <= failed


@pytest.mark.parametrize("number", [0, 3])
def test_needs_end_before_what_needs_them(number: int) -> None:
    units = forest(random.Random(7), 60)
    order = [outcome.name for outcome in run_units(units, crew(number))]
    assert sorted(order) == sorted(unit.name for unit in units)
    assert all(order.index(need) < order.index(unit.name) for unit in units for need in unit.needs)


def test_one_worker_goes_through_one_affinity_after_the_other() -> None:
    units = [Unit(f"{affinity}{index}", os.getpid, {}, affinity) for index in range(3) for affinity in "xyz"]
    assert [outcome.name[0] for outcome in run_units(units, HERE)] == [*"xxxyyyzzz"]


def test_a_worker_keeps_its_affinity(deeds: ModuleType) -> None:
    units = [Unit(f"{index}{a}", deeds.pid, {"seconds": 0.01}, a) for index in range(6) for a in "vwxyz"]
    outcomes = by_name(run_units(units, crew(2)))
    loads = {(outcome.value, name[-1]) for name, outcome in outcomes.items()}
    assert len({pid for pid, _ in loads}) <= 2  # one may be done before the other has started
    assert len(loads) <= 6  # each affinity is loaded once, and the last one once more by the worker that helps out


def test_what_others_wait_for_goes_first() -> None:
    """A trunk is not kept waiting by the many cells of the branch before it."""
    cells = [Unit(f"cell{index}", os.getpid, {}, "cells") for index in range(9)]
    trunk = [Unit("first", os.getpid, {}), Unit("second", os.getpid, {}, needs=("first",))]
    order = [outcome.name for outcome in run_units([*cells, *trunk, Unit("z", os.getpid, {}, "", ("second",))], HERE)]
    assert order[:2] == ["first", "second"]


class CountedDict(dict):
    looks = 0

    def __iter__(self) -> Iterator:
        for key in super().__iter__():
            self.looks += 1
            yield key


@pytest.mark.parametrize("num_affinities", [50, 15_000])
def test_many_units_are_scheduled_with_few_steps(num_affinities: int) -> None:
    """A decision looks at as many groups as there are workers, here eight, however many groups there are."""
    units = [Unit(str(index), os.getpid, {}, str(index % num_affinities)) for index in range(15_000)]
    queue, taken = UnitQueue(units), 0
    for key in [*queue.groups]:
        queue.groups[key] = CountedDict(queue.groups[key])
    groups = [*queue.groups.values()]
    while queue.take(taken % 8) is not None:
        taken += 1
    assert taken == 15_000
    assert 0 < sum(each.looks for each in groups) < (8 + 3) * 15_000


def test_what_another_process_is_at_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds up only what needs it, and is done when the other process lets go."""
    tries = []

    def be_busy() -> str:
        tries.append(1)
        if len(tries) < 3:
            raise BusyError("held")
        return "done"

    units = [
        Unit("busy", be_busy, {}),
        Unit("after", os.getpid, {}, needs=("busy",)),
        Unit("other", os.getpid, {}),
    ]
    left = by_name(run_units(units, HERE))
    assert [left[name].is_busy for name in ("busy", "after", "other")] == [True, True, False]
    assert all(outcome.error is None for outcome in left.values())
    tries.clear()
    monkeypatch.setattr(units_module, "POLL_SECONDS", 0.05)
    outcomes = list(run_units(units, HERE, waits_for_busy=True))
    assert [(outcome.name, outcome.is_busy) for outcome in outcomes] == [
        ("busy", True),
        ("other", False),
        ("busy", True),
        ("busy", False),
        ("after", False),
    ]


def test_workers_try_again_what_another_process_is_at(
    deeds: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(units_module, "POLL_SECONDS", 0.05)
    units = [Unit("busy", deeds.be_busy_once, {"folder": str(tmp_path)}), Unit("other", deeds.pid, {})]
    outcomes = list(run_units(units, crew(1), waits_for_busy=True))
    assert [outcome.name for outcome in outcomes if not outcome.is_busy] == ["other", "busy"]
    assert outcomes[0].is_busy and outcomes[-1].value == outcomes[1].value, "bad luck costs no worker"


@pytest.mark.parametrize("number", [0, 2])
def test_units_say_how_far_they_are(number: int, deeds: ModuleType) -> None:
    heard = []
    units = [Unit(name, deeds.count_to, {"number": 3}) for name in "ab"]
    outcomes = by_name(run_units(units, crew(number), on_progress=lambda name, value: heard.append((name, value))))
    assert sorted(heard) == [(name, step) for name in "ab" for step in range(3)]
    assert [outcomes[name].value for name in "ab"] == [3, 3]


# Outcomes


@pytest.mark.parametrize("number", [0, 2])
def test_a_failure_blocks_only_what_needs_it(number: int, deeds: ModuleType) -> None:
    units = [
        Unit("root", deeds.divide, {"x": 0}),
        Unit("child", os.getpid, {}, needs=("root", "fine")),
        Unit("grandchild", os.getpid, {}, needs=("child", "root")),
        Unit("fine", deeds.add, {"x": 1, "y": 2}),
        Unit("other", deeds.add, {"x": "a", "y": "b"}, needs=("fine",)),
    ]
    outcomes = by_name(run_units(units, crew(number)))
    assert outcomes["root"].error == "ZeroDivisionError: division by zero (deeds_of_units.py:35)"
    assert "return 1 / x" in outcomes["root"].traceback
    assert outcomes["child"].error == f"blocked: root failed: {outcomes['root'].error}"
    assert outcomes["grandchild"].error == outcomes["child"].error
    assert (outcomes["fine"].value, outcomes["other"].value) == (3, "ab")
    assert outcomes["fine"].error is None


@pytest.mark.parametrize("number", [0, 2])
def test_errors_are_one_line_that_names_the_place(number: int, deeds: ModuleType) -> None:
    units = [
        Unit("input", deeds.refuse, {"text": "shards.bin:3 is empty;\n rerun"}),
        Unit("ours", deeds.count_shards, {}),
        Unit("wrong", deeds.add, {"z": 1}),
        Unit("exit", deeds.leave, {"code": 4}),
        Unit("panic", deeds.panic, {"text": "index out of bounds"}),
    ]
    errors = {name: outcome.error or "" for name, outcome in by_name(run_units(units, crew(number))).items()}
    assert errors["input"] == "shards.bin:3 is empty; rerun"
    assert errors["ours"].startswith("AttributeError: ") and "(files.py:" in errors["ours"]
    assert errors["wrong"].startswith("TypeError: add() got an unexpected keyword argument 'z'")
    assert errors["exit"].startswith("SystemExit: 4")
    assert errors["panic"].startswith("PanicException: index out of bounds")


def test_a_dead_worker_costs_one_unit(deeds: ModuleType) -> None:
    units = [
        Unit("killed", deeds.receive, {"number": 9}),
        Unit("crashed", deeds.receive, {"number": 11}),
        Unit("vanished", deeds.vanish, {"code": 3}),
        Unit("waits", os.getpid, {}, needs=("killed",)),
        *(Unit(f"fine{index}", deeds.add, {"x": index, "y": 1}) for index in range(6)),
    ]
    outcomes = by_name(run_units(units, crew(2)))
    assert outcomes["killed"].error == "worker was killed (signal 9, SIGKILL; out of memory?)"
    assert outcomes["crashed"].error == "worker was killed (signal 11, SIGSEGV)"
    assert outcomes["vanished"].error == "worker ended with exit code 3"
    assert outcomes["waits"].error == f"blocked: killed failed: {outcomes['killed'].error}"
    assert [outcomes[f"fine{index}"].value for index in range(6)] == [1, 2, 3, 4, 5, 6]


def test_a_value_that_cannot_be_sent_is_an_error(deeds: ModuleType) -> None:
    units = [Unit("lambda", deeds.unsendable, {}), Unit("next", deeds.add, {"x": 1, "y": 1})]
    outcomes = by_name(run_units(units, crew(1)))
    assert "local object 'unsendable.<locals>.<lambda>'" in (outcomes["lambda"].error or "")
    assert outcomes["next"].value == 2


def test_a_worker_outlives_bad_input_but_no_other_error(deeds: ModuleType) -> None:
    """What broke a unit may have broken its process (CUDA, memory); the user's mistake has not."""
    chain = [
        Unit("a", deeds.pid, {}),
        Unit("input", deeds.refuse, {"text": "no"}),
        Unit("b", deeds.pid, {}),
        Unit("bug", deeds.divide, {"x": 0}),
        Unit("c", deeds.pid, {}),
    ]
    outcomes = by_name(run_units(chain, crew(1)))
    assert outcomes["a"].value == outcomes["b"].value != outcomes["c"].value
    assert os.getpid() not in {outcomes["a"].value, outcomes["c"].value}


def test_a_stop_in_this_process_ends_the_run(deeds: ModuleType, tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    ask = f"import os, time, sys; time.sleep(0.2); os.kill({os.getpid()}, 15)"
    asking = subprocess.Popen([sys.executable, "-c", ask])
    try:
        with pytest.raises(StoppedError, match="step 3"):
            list(run_units([Unit("save", deeds.save_when_asked, {"folder": str(tmp_path)})], HERE))
    finally:
        signal.signal(signal.SIGTERM, before)
        asking.wait()


def test_sigterm_stops_what_runs_in_this_process(deeds: ModuleType) -> None:
    with pytest.raises(StoppedError, match="run the same command to continue"):
        list(run_units([Unit("stop", deeds.receive, {"number": signal.SIGTERM})], HERE))


def hear(pool: LocalPool) -> str:
    """What the only worker says next."""
    while True:
        for _, (kind, _) in pool.listen():
            return kind


def test_a_stop_tells_what_became_of_the_units(
    deeds: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Of one that ended before, it was an outcome already."""
    pool = LocalPool(crew(1), 1)
    for function, arguments in ((deeds.divide, {"x": 0}), (deeds.save_when_asked, {"folder": str(tmp_path)})):
        pool.start(0)
        assert hear(pool) == "ready"
        pool.send(0, pickle.dumps((function, arguments)))
        if function is deeds.divide:
            assert hear(pool) == "ended"
            pool.end([0])
    while not (tmp_path / "started").exists():
        time.sleep(0.01)
    pool.close()
    assert capsys.readouterr().err == "stopped at step 3\n"


def test_a_worker_that_finishes_its_unit_when_it_is_asked_to_end_ends(deeds: ModuleType, tmp_path: Path) -> None:
    """It waits for no further one until it is killed."""
    pool = LocalPool(crew(1), 1)
    pool.start(0)
    assert hear(pool) == "ready"
    pool.send(0, pickle.dumps((deeds.finish_when_asked, {"folder": str(tmp_path)})))
    while not (tmp_path / "started").exists():
        time.sleep(0.01)
    process = pool.processes[0].popen
    pool.close()
    assert process.returncode == 0


def test_nothing_to_do_starts_nothing() -> None:
    assert list(run_units([], Engine(kind="ray", address="127.0.0.1:1"))) == []


# Places


def test_workers_share_the_cores_and_leave_this_process_alone(
    deeds: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "num_cores", lambda: 7)
    monkeypatch.setenv("OMP_NUM_THREADS", "99")
    monkeypatch.setenv("RAYON_NUM_THREADS", "2")
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "0,1")
    keys = ["OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS", "OMP_WAIT_POLICY"]
    keys += ["CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"]
    units = [Unit(str(index), deeds.environment, {"keys": keys}) for index in range(2)]
    before = dict(os.environ)
    for outcome in run_units(units, Engine(workers=5, device="cpu")):
        assert list(outcome.value.values()) == [
            "2",
            "2",
            "2",
            "PASSIVE",
            "",
            "",
        ]  # two units, two workers
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("share", "given", "threads"),
    [(0, "", "1"), (0, "4", "1"), (3, "", "3"), (3, "2", "2"), (3, "0", "3"), (3, "a", "3")],
)
def test_a_worker_has_a_thread_where_there_are_more_workers_than_cores(
    share: int, given: str, threads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []
    monkeypatch.setattr(local.subprocess, "Popen", lambda env, **_: started.append(env["OMP_NUM_THREADS"]))
    monkeypatch.setenv("OMP_NUM_THREADS", given)
    WorkerProcess(share, None)
    assert started == [threads]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"HIP": "2,3"}, {"HIP"}),
        ({"ROCR": "2,3"}, {"ROCR"}),
        ({"CUDA": "2,3", "HIP": "2,3", "ROCR": "2,3"}, {"CUDA", "HIP"}),
        ({"CUDA": "2,3", "ROCR": "2,3"}, {"CUDA"}),
    ],
)
def test_gpus_are_given_by_the_variable_that_is_set(
    given: dict[str, str], expected: set[str], deeds: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AMD's runtime counts CUDA's and HIP's within ROCR's."""
    names = [f"{kind}_VISIBLE_DEVICES" for kind in ("CUDA", "HIP", "ROCR")]
    monkeypatch.setattr(machine, "count_gpus", lambda allowed: len(allowed.split(",")))
    for name in names:
        monkeypatch.delenv(name, raising=False)
    for kind, value in given.items():
        monkeypatch.setenv(f"{kind}_VISIBLE_DEVICES", value)
    process = WorkerProcess(1, LocalPool(Engine(), 2).gpus[1])
    process.send(pickle.dumps((deeds.environment, {"keys": names})))
    _, (_, outcome) = (pickle.loads(process.receive()) for _ in range(2))
    end_processes([process])
    assert outcome.value == {
        name: "3" if name.split("_")[0] in expected else given.get(name.split("_")[0]) for name in names
    }


@pytest.mark.parametrize(
    ("allowed", "per_gpu", "expected"),
    [
        (None, 1, ["0", "1"]),
        ("5, 7,9", 2, ["5", "7", "5", "7"]),
        ("GPU-ab,GPU-cd", 1, ["GPU-ab", "GPU-cd"]),
        ("MIG-ab,MIG-cd,MIG-ef", 1, ["MIG-ab", "MIG-cd", "MIG-ef"]),
    ],
)
def test_gpus_go_round(allowed: str | None, per_gpu: int, expected: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "count_gpus", lambda allowed: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if allowed is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", allowed)
    pool = LocalPool(Engine(workers_per_gpu=per_gpu), 100)
    assert pool.limit == len(expected)
    assert (pool.gpus * 2)[: pool.limit] == expected
    assert LocalPool(Engine(workers_per_gpu=per_gpu, device="cpu"), 100).limit == num_cores()


def test_workers_that_start_processes_of_their_own_have_several_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torchrun needs them: `biphase study run --processes 4`."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(machine, "count_gpus", lambda allowed: 9)
    pool = LocalPool(Engine(devices_per_worker=4), 100)
    assert (pool.limit, pool.gpus) == (2, ["0,1,2,3", "4,5,6,7"])
    with pytest.raises(InputError, match="16 devices for each worker, but this machine has 9 GPUs"):
        LocalPool(Engine(devices_per_worker=16), 100)
    monkeypatch.setattr(machine, "count_gpus", lambda allowed: 0)
    monkeypatch.setattr(machine, "num_cores", lambda: 8)
    assert LocalPool(Engine(devices_per_worker=4), 100).limit == 2
    with pytest.raises(ValueError, match="share a GPU or have several"):
        Engine(devices_per_worker=2, workers_per_gpu=2)


def test_gpus_are_counted_as_pytorch_counts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    machine.count_gpus.cache_clear()
    assert machine.count_gpus(allowed) == torch.cuda.device_count()
    machine.count_gpus.cache_clear()
    monkeypatch.setattr(machine, "GPU_FILES", ("null",))
    monkeypatch.delitem(sys.modules, "torch")  # then in a process of its own
    monkeypatch.setattr(torch.cuda, "device_count", None)
    counted = machine.count_gpus(allowed)
    monkeypatch.undo()
    machine.count_gpus.cache_clear()
    assert counted == torch.cuda.device_count()


@pytest.mark.parametrize(
    ("nodes", "engine", "num_units", "expected"),
    [
        ([{"CPU": 4.0}, {"CPU": 2.0}], {}, 100, (6, 1, 0)),
        ([{"CPU": 8.0}, {"CPU": 4.0}], {"workers": 3}, 100, (3, 4, 0)),
        ([{"CPU": 8.0}, {"CPU": 4.0}], {}, 1, (1, 8, 0)),
        ([{"CPU": 2.0}], {"workers": 5}, 100, (5, 1, 0)),
        ([{"CPU": 64.0, "GPU": 8.0}, {"CPU": 16.0, "GPU": 4.0}, {"CPU": 99.0}], {}, 100, (12, 4, 1.0)),
        ([{"CPU": 16.0, "GPU": 1.0}], {"workers_per_gpu": 4}, 100, (4, 4, 0.25)),
        ([{"CPU": 1.0, "GPU": 2.0}], {}, 100, (2, 0, 1.0)),
        ([{"CPU": 64.0, "GPU": 8.0}, {"CPU": 9.0, "GPU": 1.0}], {"devices_per_worker": 4}, 100, (2, 32, 4.0)),
        ([{"CPU": 8.0}, {"CPU": 4.0}], {"devices_per_worker": 4}, 100, (3, 4, 0)),
        ([{"CPU": 16.0, "GPU": 1.0}], {"device": "cpu"}, 4, (4, 4, 0)),
    ],
)
def test_how_a_cluster_is_cut_up(nodes: list, engine: dict, num_units: int, expected: tuple) -> None:
    assert divide_nodes(nodes, Engine(kind="ray", **engine), num_units) == expected


# Ends


def test_a_caller_who_stops_leaves_nothing_behind(deeds: ModuleType, tmp_path: Path) -> None:
    """Not even what the units started, nor a handler."""
    before = signal.getsignal(signal.SIGTERM)
    units = [Unit("a", deeds.pid, {}), *(Unit(f"{i}", deeds.breed, {"folder": str(tmp_path)}) for i in range(9))]
    seen = []
    for outcome in run_units(units, crew(2)):
        seen = [outcome.value, *bred(tmp_path, 2)]  # the worker of the first unit went on
        break
    assert len(seen) >= 3
    assert not [pid for pid in seen if is_alive(pid)]
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_unit_may_save_its_state_when_asked_to_stop(deeds: ModuleType, tmp_path: Path) -> None:
    units = [Unit("first", deeds.pid, {}), Unit("long", deeds.save_when_asked, {"folder": str(tmp_path)})]
    outcomes = run_units(units, crew(2))
    assert next(outcomes).name == "first"
    assert wait_until((tmp_path / "started").exists)
    outcomes.close()
    assert (tmp_path / "saved").exists()


def test_a_stopped_unit_is_an_outcome_and_its_worker_is_replaced(deeds: ModuleType, tmp_path: Path) -> None:
    units = [
        Unit("who", deeds.pid, {}),
        Unit("long", deeds.save_when_asked, {"folder": str(tmp_path)}, needs=("who",)),
        Unit("after", deeds.pid, {}, needs=("who",)),
    ]
    outcomes = run_units(units, crew(1))
    pid = next(outcomes).value
    assert wait_until((tmp_path / "started").exists)
    os.kill(pid, signal.SIGTERM)  # by another person, or by Slurm
    named = by_name(outcomes)
    assert named["long"].error == "stopped at step 3"
    assert named["after"].value not in {pid, None}


def heed_signals() -> None:
    """A shell's background jobs ignore the one, and what runs under `nohup` the other."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@pytest.mark.parametrize(
    "number",
    mostly_later([signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT], signal.SIGKILL, signal.SIGTERM),
)
def test_no_orphans_when_the_parent_is_ended(number: int, deeds: ModuleType, tmp_path: Path) -> None:
    code = (
        "import deeds_of_units as deeds, sys\n"
        "from biphase.engine.scheduler import run_units\n"
        "from biphase.engine.units import Unit\n"
        "from biphase.engine.units import Engine\n"
        "units = [Unit(str(index), deeds.breed, {'folder': sys.argv[1]}) for index in range(2)]\n"
        "list(run_units(units, Engine(workers=2, device='cpu')))\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heed_signals,
    )
    pids = bred(tmp_path, 4)
    assert all(is_alive(pid) for pid in pids)
    parent.send_signal(number)
    _, errors = parent.communicate(timeout=30)
    assert {signal.SIGKILL: "", signal.SIGINT: "KeyboardInterrupt"}.get(number, "StoppedError") in errors
    if number != signal.SIGKILL:
        assert not [pid for pid in pids if is_alive(pid)]
    assert wait_until(lambda: not any(is_alive(pid) for pid in pids))


# Bad input


@pytest.mark.parametrize(
    ("units", "message"),
    [
        ([Unit("a", os.getpid, {}), Unit("a", os.getpid, {})], "two units have one name"),
        ([Unit("a", os.getpid, {}, needs=("b",))], "unit 'a' needs 'b', which is not among the units"),
        ([Unit("a", os.getpid, {}, needs=("b",)), Unit("b", os.getpid, {}, needs=("a",))], "nodes are in a cycle"),
    ],
)
def test_units_that_cannot_be_ordered(units: list[Unit], message: str) -> None:
    with pytest.raises((AssertionError, ValueError), match=message):
        run_units(units, HERE)


def test_engines_that_make_no_sense() -> None:
    with pytest.raises(ValidationError, match="only the local engine"):
        Engine(kind="ray", workers=0)
    with pytest.raises(ValidationError, match="use kind: ray"):
        Engine(address="auto")


def test_workers_that_do_not_start_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "START", "raise SystemExit(5)")
    with pytest.raises(InputError, match="workers do not start: worker ended with exit code 5"):
        list(run_units([Unit("a", os.getpid, {})], crew(1)))


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "count_gpus", lambda allowed: 0)
    with pytest.raises(InputError, match="PyTorch sees no CUDA device"):
        list(run_units([Unit("a", os.getpid, {})], Engine(device="cuda")))
    with pytest.raises(InputError, match="none of the 1 Ray nodes has a GPU"):
        divide_nodes([{"CPU": 2.0}], Engine(kind="ray", device="cuda"), 1)


def test_ray_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match=r"pip install 'biphase\[cluster\]'"):
        list(run_units([Unit("a", os.getpid, {})], Engine(kind="ray")))


def test_a_cluster_that_is_not_there() -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    with pytest.raises(InputError, match=r"no Ray cluster at '127\.0\.0\.1:1' \(Connection refused\)"):
        list(run_units([Unit("a", os.getpid, {})], Engine(kind="ray", address="127.0.0.1:1")))


def test_a_cluster_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Something takes the connection and says nothing, as where the token is another."""
    pytest.importorskip("ray", reason="Ray is not installed")
    monkeypatch.setattr(cluster_module, "JOIN_SECONDS", 4.0)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0" * 64)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(InputError, match=f"no Ray cluster at '{address}': no answer within 4 s; .* RAY_AUTH_TOKEN"):
            list(run_units([Unit("a", os.getpid, {})], Engine(kind="ray", address=address)))


# Ray


@pytest.mark.slow
@pytest.mark.minutes
def test_ray_runs_units_on_all_nodes_and_outlives_one(deeds: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    from ray.cluster_utils import Cluster

    before = signal.getsignal(signal.SIGTERM)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        node = cluster.add_node(num_cpus=1)
        theirs = signal.getsignal(signal.SIGTERM)
        cluster.wait_for_nodes()
        engine = Engine(kind="ray", address=cluster.address)
        folders = [tmp_path / name for name in "abc"]
        for folder in folders:
            folder.mkdir()
        meeting = {"marker": str(tmp_path)}  # is there

        units = [
            *(Unit(f"meet{i}", deeds.meet_on_nodes, meeting | {"folder": str(folders[0])}) for i in range(8)),
            Unit("killed", deeds.receive, {"number": 9}),
            Unit("bug", deeds.divide, {"x": 0}),
            Unit("waits", os.getpid, {}, needs=("bug",)),
            Unit("threads", deeds.environment, {"keys": ["OMP_NUM_THREADS"]}),
        ]
        outcomes = by_name(run_units(units, engine))
        assert {outcomes[f"meet{index}"].value for index in range(8)} <= {path.name for path in folders[0].iterdir()}
        assert len(list(folders[0].iterdir())) == 2, "units ran on both nodes at a time"
        assert outcomes["killed"].error == "worker was killed (signal 9, SIGKILL; out of memory?)"
        assert outcomes["bug"].error == "ZeroDivisionError: division by zero (deeds_of_units.py:35)"
        assert outcomes["waits"].error == f"blocked: bug failed: {outcomes['bug'].error}"
        assert outcomes["threads"].value == {"OMP_NUM_THREADS": "1"}

        breeding = [Unit(f"b{index}", deeds.breed, {"folder": str(folders[1])}) for index in range(3)]
        stopped = run_units([Unit("a", deeds.pid, {}), *breeding], engine)
        pids = [next(stopped).value, *bred(folders[1], 2)]
        stopped.close()
        assert wait_until(lambda: not any(is_alive(pid) for pid in pids))

        lost = tmp_path / "lost"

        def lose_node() -> None:
            bred(folders[2], 2)
            cluster.remove_node(node, allow_graceful=False)
            (gone,) = [path for path in folders[2].iterdir() if not is_alive(int(path.name))]
            wait_until(lambda: not is_alive(int(gone.read_text())))  # else it may still end well
            lost.touch()

        losing = Thread(target=lose_node)
        losing.start()
        meeting = {"folder": str(folders[2]), "marker": str(lost)}
        meetings = [Unit(f"meet{index}", deeds.meet_on_nodes, meeting) for index in range(5)]
        errors = [outcome.error for outcome in run_units(meetings, engine)]
        losing.join()
        assert len(errors) == 5 and errors.count(None) == 4
        assert next(error for error in errors if error).startswith("worker was lost on node ")
        assert signal.getsignal(signal.SIGTERM) is theirs
    finally:
        cluster.shutdown()
        signal.signal(signal.SIGTERM, before)


def test_an_earlier_wave_goes_first_where_both_are_ready() -> None:
    def named(name: str, needs: tuple[str, ...] = (), wave: int = 0) -> Unit:
        return Unit(name, print, {}, needs=needs, wave=wave)

    queue = UnitQueue([named("b", wave=1), named("b2", ("b",), 1), named("a"), named("a2", ("a",)), named("a3")])
    taken = []
    while (unit := queue.take(0)) is not None:
        taken.append(unit.name)
        queue.settle(Outcome(unit.name, [], None, 1.0))
    assert taken == ["a", "a3", "a2", "b", "b2"] or taken == ["a", "a2", "a3", "b", "b2"]


def listening(pid: int) -> set[str]:
    """The IP addresses on which a process, or one that it started, listens."""
    family = {pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))}
    sockets = psutil.net_connections("tcp")
    return {each.laddr.ip for each in sockets if each.pid in family and each.status == psutil.CONN_LISTEN}


@pytest.mark.slow
@pytest.mark.minutes
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the sockets of all processes are root's to see")
def test_a_cluster_that_is_started_here_is_nobody_elses(tmp_path: Path) -> None:
    """It listens on the loopback interface alone, and wants a token. In a process of its own: Ray keeps its first."""
    pytest.importorskip("ray", reason="Ray is not installed")
    code = (
        "import os, sys; from biphase.engine.units import Engine; from biphase.engine.scheduler import run_units;"
        "from biphase.engine.units import Unit;"
        "run = run_units([Unit(name, os.getpid, {}) for name in 'ab'], Engine(kind='ray', workers=1));"
        "assert next(run).error is None; print(os.environ['RAY_AUTH_MODE'], flush=True);"
        "sys.stdin.read(1); run.close();"
        "assert 'RAY_AUTH_TOKEN' not in os.environ"
    )
    environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    (tmp_path / "yaml.py").write_text("import os; os.mkdir('RAN')")  # nor does it run what lies in the current folder
    starting = machine.python_process("-c", code) | {"env": environment, "cwd": tmp_path}
    with subprocess.Popen(**starting, stdin=-1, stdout=-1, stderr=-1, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "token\n"
        addresses = listening(process.pid)
        _, told = process.communicate("x")
    assert process.returncode == 0, told
    assert addresses and addresses <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}
    assert not (tmp_path / "RAN").exists()
