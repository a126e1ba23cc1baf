"""Processes of one run end together: with who started them, and with one line where one of them is lost."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
import yaml

import biphase.distributed as distributed
from biphase.distributed import HAS_LEFT, Heart, World
from biphase.errors import InputError
from biphase.files import locked
from biphase.machine import GRACE
from biphase.recipe import ComputeConfig, Recipe
from biphase.run import Run, whole_steps

CPU = torch.device("cpu")
PATIENCE = 300.0
"""Seconds until a test gives up; what is waited for takes a few on a quiet machine."""


def wait_until(is_so: Callable[[], object], what: str) -> None:
    ends = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < ends, f"{what}: not within {PATIENCE:.0f} s"
        time.sleep(0.1)


# The heart alone


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.Store:
    monkeypatch.setattr(distributed, "BEAT_SECONDS", 0.01)
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []

    def end_at_once(heart: Heart, line: str) -> None:
        lines.append(line)
        heart.stopped.set()

    monkeypatch.setattr(Heart, "end_at_once", end_at_once)
    return lines


def test_a_silent_process_is_named(store: dist.Store, told: list[str]) -> None:
    first, second = Heart(store, World(0, 2, CPU), 0.3), Heart(store, World(1, 2, CPU), 1e6)
    first.start()
    second.start()
    wait_until(lambda: first.counts[1] > 3 and second.counts[0] > 3, "beats")
    assert told == []
    second.stopped.set()
    wait_until(lambda: told, "a line")
    assert told[0].startswith("process 1 of 2 (") and f"pid {os.getpid()}) has been silent for" in told[0]


@pytest.mark.parametrize(("launcher", "host"), [("True", ""), ("False", ""), ("True", "another")])
def test_a_launcher_reports_a_killed_process_alone(
    launcher: str, host: str, store: dist.Store, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The main thread may wait in a collective, so that this process does not know yet that it was asked to stop."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", launcher)
    heart, _ = Heart(store, World(0, 2, CPU), 0.1), Heart(store, World(1, 2, CPU), 1e6)
    gone = subprocess.Popen(["true"])
    gone.wait()
    store.set("name/1", f"{host or socket.gethostname()}, pid {gone.pid}")
    heart.run()
    assert [bool(line) for line in told] == [launcher == "False" or bool(host)]


def test_one_that_never_joined_is_waited_for_longer(store: dist.Store, told: list[str]) -> None:
    heart = Heart(store, World(0, 2, CPU), 0.05)
    heart.start()
    wait_until(lambda: told, "a line")
    assert "process 1 of 2 has not joined for" in told[0]
    assert heart.missed[1] >= 50


def test_one_that_has_left_is_not_missed(store: dist.Store, told: list[str]) -> None:
    first, second = Heart(store, World(0, 2, CPU), 0.1), Heart(store, World(1, 2, CPU), 0.1)
    second.leave()
    first.start()
    wait_until(lambda: first.store.add("beats/0", 0) > 50, "beats")
    assert told == [] and first.counts[1] >= HAS_LEFT
    first.stopped.set()


def test_one_that_tells_is_not_ended_by_its_own_report(store: dist.Store, told: list[str]) -> None:
    heart = Heart(store, World(0, 2, CPU), 1e6)

    class Told(dist.PrefixStore):
        def add(self, key: str, number: int) -> int:
            if key == "told" and not number:  # the main thread is quicker than this look
                heart.stopped.set()
                super().add("told", 1)
            return super().add(key, number)

    heart.store = Told("", heart.store)
    heart.run()
    assert told == []


def test_one_that_another_has_told_about_ends(store: dist.Store, told: list[str]) -> None:
    heart = Heart(store, World(0, 2, CPU), 1e6)
    heart.store.add("told", 1)
    heart.run()
    assert told == [""]


def test_one_of_them_tells(store: dist.Store) -> None:
    hearts = [Heart(store, World(rank, 3, CPU), 1.0) for rank in range(3)]
    assert [heart.may_tell() for heart in hearts] == [True, False, False]


def test_after_a_broken_connection_the_one_without_beats_has_gone(
    store: dist.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distributed, "BEAT_SECONDS", 0.1)  # on a busy machine, too, the others beat meanwhile
    hearts = [Heart(store, World(rank, 3, CPU), 1e6) for rank in range(3)]
    stopped = threading.Event()

    def beat_until_stopped() -> None:
        while not stopped.wait(0.001):
            hearts[1].store.add("beats/1", 1)

    hearts[2].store.add("beats/2", 7)
    thread = threading.Thread(target=beat_until_stopped)
    thread.start()
    hearts[0].start()
    try:
        assert hearts[0].find_gone() == 2
    finally:
        hearts[0].stopped.set()
        stopped.set()
        thread.join()


@pytest.mark.parametrize(
    ("error", "told"),
    [(InputError("a file is damaged"), r"\): a file is damaged$"), (SystemExit(1), r"\) is gone: killed, out of")],
)
def test_an_error_of_another_process_alone_is_told(
    error: BaseException, told: str, store: dist.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stays silent itself, because the launcher ends it with the first process."""
    monkeypatch.setattr(distributed, "BEAT_SECONDS", 0.1)
    monkeypatch.setattr(distributed.os, "_exit", lambda _: None)  # a heart that wins the race would end the tests
    monkeypatch.setattr(distributed.err, "quiet", False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("silence", "end_with_parent"):
        monkeypatch.setattr(distributed, name, lambda *_: None)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **settings: None)

    def end(rank: int, error: BaseException) -> None:
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        monkeypatch.setattr(dist, "rendezvous", lambda *_: iter([(store, rank, 2)]))
        with distributed.join_world(ComputeConfig(device="cpu")):
            raise error

    with pytest.raises(type(error)):
        end(1, error)
    with pytest.raises(InputError, match=rf"^process 1 of 2 \(.*, pid {os.getpid()}{told}"):
        end(0, RuntimeError("gloo: connection closed by peer"))


@pytest.mark.parametrize("missing", ["RANK", "nothing"])
def test_processes_that_cannot_meet_are_told(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some images set only the number of processes; or another program has the port."""
    monkeypatch.setattr(distributed, "end_with_parent", lambda *_: None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        given = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "0"}
        for name, value in given.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv(missing, raising=False)
        told = rf"^2 processes .* at 127\.0\.0\.1:{port} .*; give the first machine's .*$"
        with pytest.raises(InputError, match=told), distributed.join_world(ComputeConfig(device="cpu")):
            pass


# Real processes

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


ENDLESS = [str(Path(__file__).with_name("endless.py"))]
TRAINING = ["-m", "biphase"]


@pytest.fixture
def run_of_two(
    tiny_recipe: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., list[str]]:
    """The command of a run by two processes that would take for ever."""
    monkeypatch.setenv(GRACE, "20")
    recipe = tiny_recipe("curriculum=[{objective: clm, steps: 1000000}]", "checkpoints.every_steps=1000")
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe.model_dump(mode="json")))

    def command(program: list[str], *overrides: str, folder: Path = tmp_path) -> list[str]:
        launcher = [sys.executable, "-m", "biphase.distributed", "--standalone", "--nproc-per-node=2", *program]
        words = ["pretrain", str(tmp_path / "recipe.yaml"), "--runs", str(folder / "runs")]
        return [*launcher, *words, "compute.silence_seconds=20", *overrides]

    return command


@contextmanager
def started(command: list[str], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    with open(folder / "output", "wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
        try:
            yield process
        finally:
            for pid in (*descendants(process.pid), process.pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()


def descendants(pid: int) -> list[int]:
    """Processes that a process started, and those that they started, parents first."""
    try:
        tasks = Path(f"/proc/{pid}/task").iterdir()
        children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [*children, *(below for child in children for below in descendants(child))]


def ranks_of(pid: int, folder: Path) -> dict[int, int]:
    """The processes of the run by their ranks, once they train."""
    wait_until(lambda: [path for path in folder.glob("runs/*/metrics.jsonl") if path.stat().st_size], "training")
    found = {}
    for child in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # over meanwhile
            found[child.environ().get("RANK")] = child.pid
    return {0: found["0"], 1: found["1"]}


def wait_for_end(pids: Iterable[int]) -> None:
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "the end of all")


def is_free(folder: Path) -> bool:
    """Whether nobody holds the run any more."""
    (run,) = folder.glob("runs/*")
    try:
        with locked(run / ".lock"):
            return True
    except ValueError:
        return False


def complaints(folder: Path) -> list[str]:
    lines = (folder / "output").read_text().splitlines()
    assert not [line for line in lines if "Traceback" in line or "frame #" in line], lines
    return [line for line in lines if line.startswith("biphase: ")]


@on_linux
@pytest.mark.slow
@pytest.mark.minutes
def test_a_killed_process_is_named_in_one_line(run_of_two: Callable[..., list[str]], tmp_path: Path) -> None:
    """Either of two that train is killed in `campaigns/distributed.py`."""
    with started(run_of_two(ENDLESS), tmp_path) as launcher:
        os.kill(ranks_of(launcher.pid, tmp_path)[0], signal.SIGKILL)
        assert launcher.wait(PATIENCE) == 2
    (line,) = complaints(tmp_path)
    assert "process 0 (pid " in line or "process 0 of 2 (" in line  # by the launcher, or by the other one
    assert is_free(tmp_path)


@on_linux
@pytest.mark.slow
@pytest.mark.minutes
def test_a_stopped_process_is_named_in_one_line(
    run_of_two: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either of two. Both runs are waited for at once: torchrun kills what does not end after half a minute."""
    monkeypatch.setenv(GRACE, "2")  # the other one has ended by then
    folders = [tmp_path / str(rank) for rank in range(2)]
    with ExitStack() as launchers:
        waited = []
        for rank, folder in enumerate(folders):
            folder.mkdir()
            command = run_of_two(ENDLESS, folder=folder)
            waited.append(launchers.enter_context(started(command, folder)))
            os.kill(ranks_of(waited[rank].pid, folder)[rank], signal.SIGSTOP)
        assert [launcher.wait(PATIENCE) for launcher in waited] == [2, 2]
    for rank, folder in enumerate(folders):
        (line,) = complaints(folder)
        assert f"process {rank} of 2 (" in line and "silent for 20 s" in line
        assert is_free(folder)


@on_linux
@pytest.mark.slow
@pytest.mark.minutes
def test_processes_save_and_end_when_their_launcher_is_killed(
    run_of_two: Callable[..., list[str]], tmp_path: Path
) -> None:
    with started(run_of_two(TRAINING), tmp_path) as launcher:
        ranks = ranks_of(launcher.pid, tmp_path)
        os.kill(launcher.pid, signal.SIGKILL)
        wait_for_end(ranks.values())
    assert "stopped at step" in complaints(tmp_path)[0]
    (run,) = tmp_path.glob("runs/*")
    assert whole_steps(Run(run)) and is_free(tmp_path)


@on_linux
@pytest.mark.slow
@pytest.mark.minutes
def test_processes_that_have_saved_do_not_wait_to_be_killed(
    run_of_two: Callable[..., list[str]], tmp_path: Path
) -> None:
    with started(run_of_two(TRAINING), tmp_path) as launcher:
        ranks_of(launcher.pid, tmp_path)
        os.kill(launcher.pid, signal.SIGTERM)
        assert launcher.wait(PATIENCE) == 143
    (line,) = complaints(tmp_path)
    assert line.startswith("biphase: stopped at step")


SAVING = """
import signal, sys, time
from pathlib import Path
folder, seconds = Path(sys.argv[1]), float(sys.argv[2])
def save(*_):
    (folder / "asked").touch()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(seconds)
    (folder / "saved").touch()
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
(folder / "started").touch()
time.sleep(300)
"""


@on_linux
@pytest.mark.slow
@pytest.mark.parametrize(("seconds", "grace"), [(2, "60"), pytest.param(300, "6", marks=pytest.mark.minutes)])
def test_a_launcher_that_is_asked_to_stop_waits_for_its_processes(
    seconds: int, grace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often it is asked, and as long as it is given."""
    (tmp_path / "saving.py").write_text(SAVING)
    monkeypatch.setenv(GRACE, grace)
    command = [sys.executable, "-m", "biphase.distributed", "--standalone", "--nproc-per-node=1"]
    with started([*command, str(tmp_path / "saving.py"), str(tmp_path), str(seconds)], tmp_path) as launcher:
        wait_until((tmp_path / "started").exists, "the process")
        os.kill(launcher.pid, signal.SIGTERM)
        wait_until((tmp_path / "asked").exists, "the signal")
        for _ in range(2):
            os.kill(launcher.pid, signal.SIGTERM)
            time.sleep(0.2)
        assert launcher.wait(PATIENCE) == 143
    is_saved = (tmp_path / "saved").exists()
    assert is_saved == (seconds == 2) and bool(complaints(tmp_path)) != is_saved


@on_linux
@pytest.mark.slow
@pytest.mark.minutes
def test_a_launcher_without_those_of_other_machines_says_so_in_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "biphase.distributed", "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d"]
    command += ["--rdzv-endpoint=127.0.0.1:0", "--rdzv-conf=join_timeout=1", "-m", "biphase"]
    with started(command, tmp_path) as launcher:
        assert launcher.wait(PATIENCE) == 2
    (line,) = complaints(tmp_path)
    assert "the launchers of other machines do not answer" in line


@on_linux
@pytest.mark.slow
@pytest.mark.minutes
def test_the_launcher_ends_with_the_worker_of_a_study(run_of_two: Callable[..., list[str]], tmp_path: Path) -> None:
    """As `study.worker` starts it: BIPHASE_PARENT names the worker."""
    code = (
        "import os, subprocess, sys;"
        "subprocess.run(sys.argv[1:], env=os.environ | {'BIPHASE_PARENT': str(os.getpid())}, check=False)"
    )
    with started([sys.executable, "-c", code, *run_of_two(ENDLESS)], tmp_path) as worker:
        ranks_of(worker.pid, tmp_path)
        below = descendants(worker.pid)
        os.kill(worker.pid, signal.SIGKILL)
        wait_for_end(below)
        assert is_free(tmp_path)


@on_linux
@pytest.mark.slow
@pytest.mark.minutes
def test_a_mistyped_key_is_told_once(run_of_two: Callable[..., list[str]], tmp_path: Path) -> None:
    with started(run_of_two(TRAINING, "batch_token=3"), tmp_path) as launcher:
        assert launcher.wait(PATIENCE) == 2
    (line,) = complaints(tmp_path)
    assert "did you mean 'batch_tokens'?" in line
