"""A run by two processes of which one, or their launcher, is killed or stopped at any moment; then it goes on.

    python tests/campaigns/distributed.py --count 30 --seed 0        (a part of make campaigns)

The launcher is torchrun's, in `biphase.distributed`, and the processes are forks of it, in which the modules are loaded
already; they train with FSDP2 over gloo. Attempt k of a seed is always the same, but for what a clock decides. Lost is
an attempt in which, after the kill or the stop,

    a process is there after two minutes                                       (left running)
    there is a traceback, or more than one line of complaint                   (untold)
    or, once the same command has gone on to its end, what `killing` calls lost, redone, left lying or failed
"""

import argparse
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

sys.path.append(str(Path(__file__).parent))

from killing import changed_since, compare, contents, count_changes, fresh, stamps
from small_world import Outcome, call, open_world, run_campaign, standing_in

COMMAND = ["pretrain", "recipe.yaml", "--runs", "made", "compute.parallel=fsdp", "compute.silence_seconds=8"]
COMMAND += ["checkpoints.every_steps=1", "checkpoints.keep=[]", "validation.every_steps=2"]
FINISHED = "*/steps/*/manifest.json"
PATIENCE = 120.0
LAUNCHER = 2
"""The victim that is no rank."""


def launch(doomed: int | None, at: int, number: int) -> int:
    """A launcher with two ranks, in the current folder; rank `doomed` sends itself a signal before its change `at`."""
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    output = os.open(Path.cwd().with_name("output"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(output, stream)
    try:
        from torch.distributed import run
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

        from biphase import distributed

        def work() -> None:
            import biphase.cli.app as cli

            if os.environ["RANK"] == str(doomed):
                count_changes(Path.cwd(), at, number)
            sys.argv = ["biphase", *COMMAND]
            try:
                cli.main()
            except SystemExit as end:
                if end.code:  # else torch waits for what this function returns
                    os._exit(int(end.code))

        config = LaunchConfig(
            1, 1, 2, rdzv_backend="c10d", rdzv_endpoint="localhost:0", max_restarts=0, start_method="fork"
        )
        run.main = lambda: elastic_launch(config, work)()
        os._exit(distributed.launch())
    finally:
        os._exit(1)


def session(pid: int) -> list[int]:
    """The processes of a session, without those that have ended; its leader is the first, then its children by age."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with suppress(OSError):
                state, _, _, leader = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
                if int(leader) == pid and state != "Z":
                    found.append(int(folder.name))
    return sorted(found)


def end_of(pid: int) -> int | None:
    """The exit code of a launcher once nothing of its session is left; None where something stays."""
    deadline, code = time.monotonic() + PATIENCE, None
    while time.monotonic() < deadline:
        if code is None:
            done, status = os.waitpid(pid, os.WNOHANG)
            code = os.waitstatus_to_exitcode(status) if done else None
        if code is not None and not session(pid):
            return code
        time.sleep(0.05)
    os.killpg(pid, signal.SIGKILL)
    if code is None:
        os.waitpid(pid, 0)
    return None


def disturb(rng: random.Random, changes: int, seconds: float) -> tuple[str, int | None]:
    """Launch, kill or stop one, and wait for the end of all: what was done, and the launcher's exit code."""
    victim = rng.choice((0, 0, 1, LAUNCHER))
    number = signal.SIGKILL if victim == LAUNCHER else rng.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP))
    done = f"{number.name} to {'the launcher' if victim == LAUNCHER else f'rank {victim}'}"
    if victim == 0:  # it alone writes
        return done, end_of(launch(0, rng.randint(1, changes), number))
    started = time.monotonic()
    pid = launch(None, 0, number)
    wait = rng.uniform(0, seconds)
    while time.monotonic() < started + wait or (len(session(pid)) < 3 and time.monotonic() < started + PATIENCE):
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return "nothing, it was over", end_of(pid)
        time.sleep(0.01)
    with suppress(IndexError, ProcessLookupError):  # over meanwhile
        os.kill(pid if victim == LAUNCHER else session(pid)[1 + victim], number)
    return done, end_of(pid)


def attempt(number: int, seed: int, twin: dict[str, str], changes: int, seconds: float, place: Path) -> str:
    """What was lost: nothing in the empty string."""
    rng = random.Random(f"{seed}-distributed-{number}")
    results = place / "made"
    with standing_in(place):
        what, code = disturb(rng, changes, seconds)
        told = place.with_name("output").read_text(errors="replace")
        if code is None:
            return f"{what}: left running"
        complaints = [line for line in told.splitlines() if line.startswith("biphase: ")]
        if "Traceback" in told or len(complaints) > 1 or code not in (0, 2, -signal.SIGKILL):
            return f"{what}: untold: exit code {code}: {told[-1500:]}"
        before = stamps(results, FINISHED)
        code = end_of(launch(None, 0, 0))
        if code != 0:
            return f"{what}: failed: exit code {code}: {place.with_name('output').read_text(errors='replace')[-1500:]}"
    lost = compare(contents(results), twin, changed_since(before, results, FINISHED))
    return lost and f"{what}: {lost}"


def campaign(given: argparse.Namespace, folder: Path) -> Iterator[Outcome]:
    """So many attempts, each with one kill or stop."""
    import biphase.cli.app as cli

    cli.prepare_process = lambda: None
    world, place = open_world(folder), folder / "place"
    fresh(world, place)
    with standing_in(place):  # once in this process, so that every fork has the modules
        assert call(COMMAND).code == 0
    fresh(world, place)
    with standing_in(place):
        started = time.monotonic()
        code = end_of(launch(None, 0, 0))
        seconds = time.monotonic() - started
        assert code == 0, place.with_name("output").read_text(errors="replace")
    twin = contents(place / "made")
    changes = 4 * len(twin)  # about
    for number in range(given.count):
        fresh(world, place)
        lost = attempt(number, given.seed, twin, changes, seconds, place)
        yield "two processes", 1, lost and f"attempt {number} of seed {given.seed}: {lost}"


if __name__ == "__main__":
    run_campaign(
        campaign,
        __doc__,
        count={"type": int, "default": 30, "help": "kills and stops"},
        seed={"type": int, "default": 0},
    )
