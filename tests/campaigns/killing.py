"""kill -9 at any moment of a command; the same command goes on, and what comes out is what an undisturbed one makes.

    python tests/campaigns/killing.py --count 100 --seed 0        (a part of make campaigns)

A killed process is a fork of this one, in which the modules are loaded already. Attempt k of a seed is always the same:
the process kills itself before its n-th change to a file or folder (Python tells of each by an audit event), or, every
fourth time, after a while. It is started again, and killed again, up to twice; then it ends in peace. Lost is an
attempt in which

    a result differs from that of the undisturbed twin, or is missing          (lost)
    a finished checkpoint, cell, shard or trained run was made once more       (redone)
    something lies there that the twin does not have                           (left lying)
    the last command failed                                                    (failed)
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

sys.path.append(str(Path(__file__).parent))

from small_world import Outcome, Result, call, evaluation, open_world, run_campaign, standing_in

from biphase.files import RECORD_HASH, content_hash

CHANGES = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "shutil.rmtree")
CLOCK = ("seconds", "tokens_per_second", "flops_per_second", "share_of_peak", "data_wait", "peak_memory_bytes")
CLOCK += ("machine", "started")
DEADLINE = 120.0


@dataclass(frozen=True)
class Scenario:
    """A command, where its results are, and what of them is never made twice once it is there."""

    name: str
    command: list[str]
    results: str
    finished: str
    """A pattern of files that are written last: those that are there after a kill must stay as they are."""


def list_scenarios() -> list[Scenario]:
    text = ["text/train.jsonl", "text/plain.txt", "text/packed.jsonl.gz"]
    prepare = ["prepare", *text, "--tokenizer", "tokenizer", "--workers", "1", "--out", "made"]
    more = ["checkpoints.every_steps=1", "checkpoints.keep=[]", "validation.every_steps=2", "curriculum.1.steps=5"]
    return [
        Scenario("pretrain", ["pretrain", "recipe.yaml", *more, "--runs", "made"], "made", "*/steps/*/manifest.json"),
        Scenario("prepare", prepare, "made", "shards/*/manifest.json"),
        Scenario("evaluate", ["evaluate", "encoder", *evaluation()[:-1], "made"], "made", "*/score.json"),
        Scenario("study", ["study", "run", "study.yaml", "--workers", "0", "--out", "made"], "made", "**/score.json"),
    ]


def fork_call(command: list[str], doom: Callable[[], None] = lambda: None) -> tuple[int, Result | None]:
    """The command in a fork of this process: the number of the signal that killed it, else 0 and how it ended."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        quiet = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(quiet, number)
        doom()
        result = call(command, int(DEADLINE))
        os.write(write, json.dumps([result.code, result.err[-600:], result.traceback[-1500:]]).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        told = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return os.WTERMSIG(status), None
    code, err, trace = json.loads(told)
    return 0, Result(code, "", err, trace)


def count_changes(root: Path, at: int | None, number: int = signal.SIGKILL) -> Callable[[], int]:
    """Count the changes below a folder from now on; send oneself a signal, and die of it, before change `at`."""
    counted = [0]

    def audit(event: str, arguments: tuple[object, ...]) -> None:
        if event not in CHANGES or not isinstance(arguments[0], str | Path):
            return
        if event == "open" and not (isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)):
            return
        if root not in Path(os.path.abspath(arguments[0])).parents:
            return
        counted[0] += 1
        if counted[0] == at:
            os.kill(os.getpid(), number)

    sys.addaudithook(audit)
    return lambda: counted[0]


def later_death(seconds: float) -> None:
    signal.signal(signal.SIGUSR1, lambda *_: None)
    if os.fork() == 0:
        time.sleep(seconds)
        os.kill(os.getppid(), signal.SIGKILL)
        os._exit(0)


def contents(folder: Path) -> dict[str, str]:
    """Each path below a folder → what must be equal in it: bytes, or JSON and log lines without the clock's part."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_dir():
            found[name] = "folder"
        elif path.suffix in (".json", ".jsonl"):
            lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
            found[name] = json.dumps([without_clock(json.loads(line)) for line in lines])
        else:
            found[name] = sha256(path.read_bytes()).hexdigest()
    return {re.sub(r"/\.locks?(/.*)?$", "/.lock", name): value for name, value in found.items()}


def without_clock(value: object) -> object:
    if isinstance(value, dict):
        if RECORD_HASH in value:  # it is over the clock's part too
            content = {key: item for key, item in value.items() if key != RECORD_HASH}
            value = content | {RECORD_HASH: value[RECORD_HASH] == content_hash(content)}
        return {key: without_clock(item) for key, item in value.items() if key not in CLOCK}
    return [without_clock(item) for item in value] if isinstance(value, list) else value


@dataclass(frozen=True)
class Twin:
    """An undisturbed run: what it made, how many changes to files and how many seconds it took."""

    made: dict[str, str]
    changes: int
    seconds: float


def make_twin(scenario: Scenario, world: Path, place: Path) -> Twin:
    fresh(world, place)
    with standing_in(place):
        tally = place.with_name("tally")

        def doom() -> None:  # the fork tells by a file how many changes it made
            counted = count_changes(place, None)
            original = os._exit

            def leave(code: int) -> None:
                tally.write_text(str(counted()))
                original(code)

            os._exit = leave  # type: ignore[assignment]

        started = time.monotonic()
        _, result = fork_call(scenario.command, doom)
        seconds = time.monotonic() - started
        assert result is not None and result.code == 0, f"{scenario.name}: {result}"
        return Twin(contents(place / scenario.results), int(tally.read_text()), seconds)


def fresh(world: Path, place: Path) -> None:
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(world, place, symlinks=True)


def stamps(folder: Path, pattern: str) -> dict[str, tuple[int, int]]:
    """What is finished → its inode and time: another one was made anew."""
    found = {}
    for path in folder.glob(pattern):
        if not any(part.startswith(".") for part in path.relative_to(folder).parts):  # such a folder is not yet whole
            status = path.stat()
            found[str(path)] = (status.st_ino, status.st_mtime_ns)
    return found


def attempt(number: int, seed: int, scenario: Scenario, twin: Twin, world: Path, place: Path) -> tuple[int, str]:
    """How many kills there were, and what was lost: nothing in the empty string."""
    rng = random.Random(f"{seed}-{scenario.name}-{number}")
    fresh(world, place)
    results, kills, redone = place / scenario.results, 0, []
    with standing_in(place):
        for _ in range(rng.randint(1, 3)):
            before = stamps(results, scenario.finished)
            if number % 4 == 3:
                wait = rng.uniform(0, twin.seconds)
                dead, result = fork_call(scenario.command, lambda wait=wait: later_death(wait))  # type: ignore[misc]
            else:
                at = rng.randint(1, twin.changes)
                dead, result = fork_call(scenario.command, lambda at=at: count_changes(place, at) and None)  # type: ignore[misc]
            kills += dead == signal.SIGKILL
            redone += changed_since(before, results, scenario.finished)
            if result is not None and result.code != 0:
                return kills, f"failed: {result}"
        before = stamps(results, scenario.finished)
        _, result = fork_call(scenario.command)
        redone += changed_since(before, results, scenario.finished)
    if result is None or result.code != 0:
        return kills, f"failed: {result}"
    return kills, compare(contents(results), twin.made, redone)


def compare(made: dict[str, str], twin: dict[str, str], redone: list[str]) -> str:
    """What was lost beside the twin: nothing in the empty string."""
    if redone:
        return f"redone: {redone[:3]}"
    if extra := sorted(made.keys() - twin.keys()):
        return f"left lying: {extra[:5]}"
    wrong = sorted(name for name, value in twin.items() if made.get(name) != value)
    return f"lost: {wrong[:5]}" if wrong else ""


def changed_since(before: dict[str, tuple[int, int]], folder: Path, pattern: str) -> list[str]:
    after = stamps(folder, pattern)
    return [name for name, stamp in before.items() if name in after and after[name] != stamp]


def campaign(given: argparse.Namespace, folder: Path) -> Iterator[Outcome]:
    """Attempts until each scenario had `count` kills."""
    world, place = open_world(folder), folder / "place"
    for scenario in list_scenarios():
        if given.only not in (None, scenario.name):
            continue
        fresh(world, place)
        with standing_in(place):  # once in this process, so that every fork has the modules
            assert call(scenario.command).code == 0, scenario.name
        twin = make_twin(scenario, world, place)
        done, number = 0, 0
        while done < given.count:
            kills, lost = attempt(number, given.seed, scenario, twin, world, place)
            yield scenario.name, kills, lost and f"attempt {number} of seed {given.seed}: {lost}"
            done, number = done + kills, number + 1


if __name__ == "__main__":
    run_campaign(
        campaign,
        __doc__,
        count={"type": int, "default": 100, "help": "kills of each command"},
        seed={"type": int, "default": 0},
        only={"help": "pretrain, prepare, evaluate or study"},
    )
