"""Broken and hostile input of every kind, through the real command: one line and exit code 2, or the right result.

    python tests/campaigns/fuzzing.py --count 2000 --seed 0        (make fuzz)

Attempt k of a seed is always the same. It copies the small world, damages one file of it (or the words of a command),
calls a command that reads it, and asks what became of it:

    ok        exit code 0; for a file with a hash: and every result is that of the whole file
    told      exit code 2 (or 75) and one line that names what is wrong
    traceback, hang, untold (another exit code, more than a line), accepted (damage that changed a result): lost

A child process makes the attempts; one that hangs or is killed costs its attempt alone.
"""

import argparse
import json
import os
import random
import re
import resource
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path

sys.path.append(str(Path(__file__).parent))

from damage import damage, strange_words
from small_world import WAITING, Result, call, evaluation, finetune, open_world, run_in, standing_in

HANG_SECONDS = 60
MEMORY_BYTES = 6 << 30
LOST = ("traceback", "hang", "untold", "accepted", "killed")


@dataclass(frozen=True)
class Target:
    """Files of one kind, and the commands that read them."""

    name: str
    pattern: str
    commands: tuple[list[str], ...]
    is_hashed: bool = False
    """Whether biphase wrote the file and holds its hash: changed bytes must not change a result."""
    drops: tuple[str, ...] = ()
    """What is removed first, so that the command has something to do."""


@dataclass(frozen=True)
class Attempt:
    number: int
    target: str
    file: str
    mutation: str
    command: list[str]
    outcome: str
    detail: str = ""


def list_targets(run: str) -> list[Target]:
    """Every kind of file, with what reads it."""
    shards = "shards/shards/*"
    pretrain = ["pretrain", "recipe.yaml", "--runs", "new"]
    export = ["export", run, "out"]
    prepare = ["--tokenizer", "tokenizer", "--out", "out", "--workers", "1"]
    prepare_by = ["prepare", "text/train.jsonl", "--tokenizer", "encoder", "--out", "out", "--workers", "1"]
    texts = ("plain.txt", "train.jsonl", "packed.jsonl.gz", "packed.jsonl.zst", "table.parquet", "table.arrow")
    study = [["study", verb, "study.yaml"] for verb in ("plan", "status", "report")]
    again = ["study", "run", "study.yaml", "--workers", "0"]
    branch = [*pretrain, f"init={{checkpoint: {run}@5}}"]
    adapt = [*pretrain, "init={model: encoder}", "name=adapted"]
    checks = (["inspect", "shards", "--verify"], pretrain)
    train_tokenizer = ["tokenizer", "train", "text/train.jsonl", "--out", "out"]
    take_tokenizer = ["tokenizer", "from", "tokenizer", "--out", "out"]
    unmarked = ("encoder/.biphase.json",)
    tables = ["text/table.parquet", "text/table.arrow"]
    cell, verify = finetune("mood", "new"), ["inspect", run, "--verify"]
    of_run = ["finetune", run, *cell[2:]]
    compare = ["evaluate", "--out", "scores", "--compare", "encoder", run]
    tasks = (("mood", "jsonl"), ("mood-tsv", "tsv"), ("names", "conll"), ("asked", "json"))
    return [
        Target("recipe", "recipe.yaml", (pretrain,)),
        Target("study", "study.yaml", (*study, again)),
        *(Target(f"task {name}", f"tasks/{name}.yaml", (finetune(name),), drops=("single",)) for name, _ in tasks),
        *(
            Target(f"rows {form}", f"data/*.{form}", (finetune(name, "new"),), drops=("single", "cache"))
            for name, form in tasks
        ),
        *(Target(f"text {name}", f"text/{name}", (["prepare", f"text/{name}", *prepare],)) for name in texts),
        *(Target(f"task of {path}", path, (["init", "task", path, "--out", "new.yaml"],)) for path in tables),
        Target("text for a tokenizer", "text/train.jsonl", (train_tokenizer,)),
        Target("tokenizer", "tokenizer/*.json", (["prepare", "text/train.jsonl", *prepare], take_tokenizer)),
        Target("tokenizer mark", "tokenizer/.biphase.json", (["tokenizer", "from", "encoder", "--out", "tokenizer"],)),
        Target("shards", f"{shards}/*", checks, is_hashed=True),
        Target("shard manifest", "shards/manifest.json", checks, is_hashed=True),
        Target("shard bytes", "shards/token_bytes.npy", checks, is_hashed=True),
        Target("model configuration", "encoder/config.json", (cell, adapt), drops=unmarked),
        Target("model tokenizer", "encoder/token*.json", (cell, prepare_by), drops=("cache", *unmarked)),
        Target("model weights", "encoder/model.safetensors", (cell, adapt), drops=unmarked),
        Target("model mark", "encoder/.biphase.json", (cell,)),
        Target("checkpoint", f"{run}/steps/6/model/*", (export, of_run), is_hashed=True),
        Target("parent", f"{run}/steps/5/**/*", (branch,), is_hashed=True),
        Target("checkpoint manifest", f"{run}/steps/*/manifest.json", (export, branch, verify), is_hashed=True),
        Target("run", f"{run}/*.*", (export, ["inspect", run], ["pretrain", "recipe.yaml"], branch)),
        Target("score", "scores/mood-*/score.json", (compare, ["evaluate", "encoder", *evaluation()])),
        Target("predictions", "scores/mood-*/test.jsonl", (compare,)),
        Target("encoded cache", "cache/encoded/mood-*", (cell,), is_hashed=True, drops=("single",)),
        Target("study folder", "study-small/**/*.*", (*study[1:], again)),
        Target("failures", "study-small/failed/*.json", (["study", "status", "study.yaml"], again)),
        Target("failures of cells", "scores/failed/*.json", (["evaluate", "encoder", *evaluation(), "--dry-run"],)),
        Target("report mark", "study-small/report/.biphase.json", (["study", "report", "study.yaml"],)),
        Target("words", "", ()),
    ]  # fmt: skip


# One attempt


def results(before: set[Path]) -> str:
    """A hash of every result that a command made: weights, scores, predictions."""
    found = sorted(
        path for path in Path().rglob("*") if path.is_file() and not path.is_symlink() and path not in before
    )
    digest = sha256()
    for path in found:
        if path.name == "score.json":
            content = json.loads(path.read_text())
            digest.update(json.dumps([content["metrics"], content["final_loss"]]).encode())
        elif path.suffix == ".safetensors" or path.name.endswith((".tokens", ".ends")):
            digest.update(sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def judge(result: Result) -> tuple[str, str]:
    """The outcome that can be told from how a command ended."""
    if result.code == 124 and "HangError" in result.traceback:
        return "hang", result.traceback[-1500:]
    if result.traceback:
        return "traceback", result.traceback[-2500:]
    if "Traceback" in result.err:
        return "traceback", result.err[-2500:]
    if re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", re.sub(r"\r", "", result.out + result.err)):
        return "untold", f"control characters: {(result.out + result.err)[-500:]!r}"
    if result.code == 0:
        return "ok", ""
    last = result.err.splitlines()[-1:] or [""]
    if result.code not in (2, 75) or not (last[0].startswith("biphase: ") or "─" in last[0] or "Error" in result.err):
        return "untold", f"exit code {result.code}: {result.err[-500:]}"
    return "told", last[0][:300]


def drop(place: Path, names: tuple[str, ...]) -> None:
    """Remove folders, and files: by its mark a changed model would be refused unread."""
    for path in map(place.joinpath, names):
        path.unlink() if path.is_file() else shutil.rmtree(path, ignore_errors=True)


def attempt(number: int, seed: int, world: Path, place: Path, only: str | None = None) -> Attempt:
    """Make attempt `number` of a seed in `place`, a folder that is made and removed."""
    rng = random.Random(f"{seed}-{number}")
    run = run_in(world)
    targets = [target for target in list_targets(run) if only is None or only in target.name]
    target = targets[number % len(targets)]
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(world, place, symlinks=True)
    drop(place, target.drops)
    if target.name == "words":
        (place / "loop").symlink_to("loop")
        command, file, mutation = strange_words(rng, run), "", "words"
    else:
        command = rng.choice(target.commands)
        path = rng.choice(sorted(path for path in place.glob(target.pattern) if path.is_file()))
        file = str(path.relative_to(place))
        mutation = ""
    with standing_in(place):
        before = set(Path().rglob("*"))
        if file:
            mutation = damage(rng, Path(file))
        result = call(command, HANG_SECONDS)
        outcome, detail = judge(result)
        if outcome == "ok" and "line" in mutation and mutation.startswith("double_key") and "twice" in mutation:
            outcome, detail = "accepted", "a key twice"
        if outcome == "ok" and target.is_hashed and "same bytes" not in mutation:
            changed = results(before)
            if changed != whole_results(tuple(command), world, place, target.drops):
                outcome, detail = "accepted", "another result"
    return Attempt(number, target.name, file, mutation, command, outcome, detail)


known: dict[tuple[str, ...], str] = {}


def whole_results(command: tuple[str, ...], world: Path, place: Path, drops: tuple[str, ...]) -> str:
    """The results of a command where nothing is damaged."""
    if command not in known:
        twin = place.with_name(f"{place.name}-twin")
        shutil.rmtree(twin, ignore_errors=True)
        shutil.copytree(world, twin, symlinks=True)
        drop(twin, drops)
        with standing_in(twin):
            before = set(Path().rglob("*"))
            result = call(list(command), HANG_SECONDS)
            assert result.code == 0, f"undamaged: {command}: {result}"
            known[command] = results(before)
        shutil.rmtree(twin)
    return known[command]


# Many attempts


def work(folder: Path, seed: int, numbers: range, only: str | None) -> None:
    """Attempts in this process, one line of JSON for each on the real standard output."""
    world = open_world(folder)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    told = os.fdopen(os.dup(1), "w")
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    for number in numbers:
        print(json.dumps(asdict(attempt(number, seed, world, folder / "attempt", only))), file=told, flush=True)


def campaign(count: int, seed: int, folder: Path, only: str | None = None, start: int = 0) -> Iterator[Attempt]:
    """Attempts in a child; where it hangs or dies, the next one goes on behind the attempt."""
    number = start
    while number < start + count:
        command = [sys.executable, __file__, "--seed", str(seed), "--count", str(start + count - number)]
        command += ["--start", str(number), "--work", str(folder), *(["--only", only] if only else [])]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL) as child:
            assert child.stdout is not None
            while number < start + count:
                ready, _, _ = select.select([child.stdout], [], [], 3 * WAITING * HANG_SECONDS)
                line = child.stdout.readline() if ready else b""
                if not line:
                    child.kill()
                    outcome = "hang" if not ready else "killed"
                    yield Attempt(number, "?", "?", "?", [], outcome, f"exit code {child.wait()}")
                    number += 1
                    break
                yield Attempt(**json.loads(line))
                number += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--only", help="targets whose name has this in it")
    parser.add_argument("--folder", type=Path, help="where to work, and where outcomes.jsonl is written")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        numbers = range(given.start, given.start + given.count)
        work(given.work, given.seed, numbers, given.only)
        return
    folder = given.folder or Path(tempfile.mkdtemp(prefix="biphase-fuzz-"))
    folder.mkdir(parents=True, exist_ok=True)
    outcomes: Counter[str] = Counter()
    by_target: dict[str, Counter[str]] = defaultdict(Counter)
    started = time.monotonic()
    with open(folder / "outcomes.jsonl", "w", encoding="utf-8") as log:
        for made in campaign(given.count, given.seed, folder, given.only, given.start):
            outcomes[made.outcome] += 1
            by_target[made.target][made.outcome] += 1
            print(json.dumps(asdict(made)), file=log, flush=True)
            if made.outcome in LOST:
                last = made.detail.strip().splitlines()[-1:] or [""]
                print(f"{made.number} {made.outcome}: {made.target} {made.file} ({made.mutation}): {last[0][:200]}")
    for name, counts in sorted(by_target.items()):
        print(f"{name:24} " + ", ".join(f"{number} {outcome}" for outcome, number in counts.most_common()))
    lost = sum(outcomes[name] for name in LOST)
    print(f"seed {given.seed}: {outcomes.total()} inputs in {time.monotonic() - started:.0f} s: {dict(outcomes)}")
    print(f"attempts {outcomes.total()}, survived {outcomes.total() - lost}, lost {lost}")
    sys.exit(lost > 0)


if __name__ == "__main__":
    main()
