"""Files exchanged for others of their kind, and two commands at one place: what is named is what computes, or a line.

    python tests/campaigns/exchanging.py --count 20 --seed 0        (a part of make campaigns)

Exchanged is what a restored backup or one wrong copy exchanges: a checkpoint for that of another run or of another
step, the words of two shard sets, a cell for another's, a folder for a copy without its mark. Lost is an attempt in
which a command that reads it has nothing to say. Of two commands that begin within a second at one place, each may
make it, or end with a line: lost is an attempt after which the folder is neither's, a part lies there, or neither made
it.
"""

import argparse
import random
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.pool import ThreadPool
from pathlib import Path

import numpy as np
import xxhash

sys.path.append(str(Path(__file__).parent))

from killing import contents, fork_call, fresh
from small_world import FAST, Outcome, call, evaluation, must, open_world, run_campaign, standing_in

TASK = ["tasks/mood.yaml", *FAST, "--data-dir", "data"]


def two_runs(world: Path, place: Path) -> tuple[str, str]:
    """Train two runs that differ in their seed alone."""
    fresh(world, place)
    keep = ["pretrain", "recipe.yaml", "checkpoints.keep_last=0"]
    with standing_in(place):
        for seed in (1, 2):
            must([*keep, f"seed={seed}", "--runs", f"runs-{seed}"])
        return tuple(str(next(Path(f"runs-{seed}").iterdir())) for seed in (1, 2))  # type: ignore[return-value]


def exchange(first: Path, second: Path) -> None:
    aside = first.with_name("aside")
    first.rename(aside)
    second.rename(first)
    aside.rename(second)


def other_cell() -> None:
    first, second = sorted(Path("scores").glob("mood-*"))[:2]
    shutil.rmtree(first)
    shutil.copytree(second, first)


def other_words() -> None:
    [own] = Path("shards/shards").glob("train*/train.tokens")
    ends_D = np.fromfile(own.with_suffix(".ends"), dtype="<i8")
    words_T = np.fromfile(own, dtype="<u2")
    words_T[:6] = words_T[5::-1]
    words_T.tofile(own)
    documents = np.split(words_T, ends_D[:-1])
    np.array([xxhash.xxh3_64_intdigest(part.data) for part in documents], "<u8").tofile(own.with_suffix(".hashes"))


def without_mark() -> None:
    Path("encoder/.biphase.json").unlink()


def list_exchanges(run: str, other: str) -> list[tuple[str, Callable[[], object], list[list[str]], str]]:
    """A name, what is exchanged, the commands that read it, and what each of them is to say."""
    own, branch = Path(run) / "steps", ["pretrain", "recipe.yaml", "name=branch", "init={}", f"init.checkpoint={run}@6"]
    readers = [
        ["export", run, "out"],
        ["inspect", run],
        ["finetune", f"{run}@6", *TASK, "--out", "new"],
        branch,
    ]
    goes_on = ["pretrain", "recipe.yaml", "checkpoints.keep_last=0", "seed=1", "--runs", str(Path(run).parent)]

    refused = "put its own back, or delete the folder and rerun"

    def interrupted() -> None:
        shutil.rmtree(own)
        (Path(run) / "done.json").unlink()
        shutil.copytree(Path(other) / "steps" / "4", own / "4")

    return [
        ("another run's checkpoint", lambda: exchange(own / "6", Path(other) / "steps" / "6"), readers, refused),
        ("another run's, to go on", interrupted, [goes_on], refused),
        ("another step's", lambda: exchange(own / "6", own / "4"), readers, refused),
        ("words of a set", other_words, [["pretrain", "recipe.yaml", "seed=9"]], "train.hashes is damaged"),
        ("another cell", other_cell, [["evaluate", "encoder", *evaluation()]], "is the score of another cell"),
        ("no mark", without_mark, [["finetune", "encoder", *TASK, "--out", "new"]], "lacks .biphase.json"),
    ]


def race(rng: random.Random, first: list[str], second: list[str], twins: list[dict[str, str]]) -> str:
    """What was lost of two commands that begin within a second: nothing in the empty string."""
    wait = rng.random()

    def start(number: int) -> object:
        time.sleep(wait * number)
        return fork_call([first, second][number])[1]

    with ThreadPool(2) as pool:
        results = pool.map(start, range(2), chunksize=1)
    codes = [getattr(result, "code", None) for result in results]
    parts = [path.name for path in Path().rglob(".*.part")]
    if parts or 0 not in codes or not {*codes} <= {0, 2, 75} or contents(Path("out")) not in twins:
        return f"after {wait:.2f} s: {codes}, {parts}, {results}"
    return ""


def campaign(given: argparse.Namespace, folder: Path) -> Iterator[Outcome]:
    """Each exchange once, and so many races of each pair of commands."""
    world, base, place = open_world(folder), folder / "base", folder / "place"
    run, other = two_runs(world, base)
    for name, change, commands, words in list_exchanges(run, other):
        for command in commands:
            fresh(base, place)
            with standing_in(place):
                change()
                result = call(command)
            is_told = words in result.out + result.err and not result.traceback
            yield name, 1, "" if is_told else f"{command}: {result}"
    train = ["tokenizer", "train", "text/train.jsonl", "--out", "out", "--vocab-size"]
    pairs = {
        "two exports": (["export", f"{run}@4", "out"], ["export", f"{run}@6", "out"]),
        "two tokenizers": ([*train, "280"], [*train, "290"]),
        "two reports": (["study", "report", "study.yaml", "--report", "out"],) * 2,
    }
    for name, pair in pairs.items():
        twins = []
        for command in pair:
            fresh(base, place)
            with standing_in(place):
                must(command)
                twins.append(contents(Path("out")))
        for number in range(given.count):
            fresh(base, place)
            with standing_in(place):
                lost = race(random.Random(f"{given.seed}-{name}-{number}"), *pair, twins)
            yield name, 1, lost and f"attempt {number} of seed {given.seed}: {lost}"


if __name__ == "__main__":
    run_campaign(
        campaign,
        __doc__,
        count={"type": int, "default": 20, "help": "races of each pair of commands"},
        seed={"type": int, "default": 0},
    )
