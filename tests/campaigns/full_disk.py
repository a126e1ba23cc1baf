"""A disk that is full at some file: one line, what was finished is kept, and the same command ends as its twin did.

    python tests/campaigns/full_disk.py --count 20 --seed 0        (a part of make campaigns)

The system itself refuses to let a file grow past a size (RLIMIT_FSIZE), so Python, Rust and C write into the same wall.
Attempt k of a seed is always the same: one command, with a limit between nothing and the largest file of the twin. Then
the command is run again without a limit. Lost is an attempt in which the first command ended with a traceback or with
more than a line, or the second did not make what the twin made.
"""

import argparse
import random
import resource
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.append(str(Path(__file__).parent))

from killing import Scenario, contents, fork_call, fresh, list_scenarios
from small_world import Outcome, call, open_world, run_campaign, run_in, standing_in


def list_commands(run: str) -> list[Scenario]:
    train = ["tokenizer", "train", "text/train.jsonl", "--vocab-size", "290", "--out", "made/tokenizer"]
    report = ["study", "report", "study.yaml", "--report", "made/report"]
    return [
        *list_scenarios(),
        Scenario("tokenizer train", train, "made", ""),
        Scenario("export", ["export", run, "made/encoder"], "made", ""),
        Scenario("report", report, "made", ""),
    ]


def limit_files(num_bytes: int) -> None:
    """No file may grow larger; the signal that comes with it is ignored, so that the write itself fails."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))


def attempt(number: int, seed: int, scenario: Scenario, twin: dict[str, str], largest: int, place: Path) -> str:
    """What was lost: nothing in the empty string."""
    rng = random.Random(f"{seed}-{scenario.name}-{number}")
    limit = int(largest * rng.random() ** 3)
    with standing_in(place):
        _, result = fork_call(scenario.command, lambda: limit_files(limit))
        if result is None or result.traceback or result.code not in (0, 2):
            return f"at {limit} bytes: {result}"
        if result.code == 2 and not result.err.splitlines()[-1].startswith("biphase: "):
            return f"at {limit} bytes: {result}"
        again = fork_call(scenario.command)[1] if result.code == 2 else result
    if again is None or again.code != 0:
        return f"at {limit} bytes, again: {again}; before: {result}"
    made = contents(place / scenario.results)
    made.pop("failed", None)  # a folder for what failed, empty since
    wrong = [name for name in made.keys() | twin.keys() if made.get(name) != twin.get(name)]
    return f"at {limit} bytes: {sorted(wrong)[:5]}" if wrong else ""


def campaign(given: argparse.Namespace, folder: Path) -> Iterator[Outcome]:
    """So many full disks of each command."""
    world, place = open_world(folder), folder / "place"
    for scenario in list_commands(run_in(world)):
        fresh(world, place)
        with standing_in(place):
            assert call(scenario.command).code == 0, scenario.name
        twin = contents(place / scenario.results)
        largest = max(path.stat().st_size for path in (place / scenario.results).rglob("*") if path.is_file())
        for number in range(given.count):
            fresh(world, place)
            lost = attempt(number, given.seed, scenario, twin, largest, place)
            yield scenario.name, 1, lost and f"attempt {number} of seed {given.seed}: {lost}"


if __name__ == "__main__":
    run_campaign(
        campaign,
        __doc__,
        count={"type": int, "default": 20, "help": "full disks of each command"},
        seed={"type": int, "default": 0},
    )
