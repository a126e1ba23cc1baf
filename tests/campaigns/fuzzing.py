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
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))

from small_world import FAST, WAITING, Result, build, call, evaluation, finetune, run_in, settle_process, standing_in

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
    texts = ("plain.txt", "train.jsonl", "packed.jsonl.gz", "packed.jsonl.zst", "table.parquet")
    study = [["study", verb, "study.yaml"] for verb in ("plan", "status", "report")]
    again = ["study", "run", "study.yaml", "--workers", "0"]
    branch = [*pretrain, f"init={{checkpoint: {run}@5}}"]
    adapt = [*pretrain, "init={model: encoder}", "name=adapted"]
    checks = (["inspect", "shards", "--verify"], pretrain)
    train_tokenizer = ["tokenizer", "train", "text/train.jsonl", "--out", "out"]
    take_tokenizer = ["tokenizer", "from", "tokenizer", "--out", "out"]
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
        Target("text for a tokenizer", "text/train.jsonl", (train_tokenizer,)),
        Target("tokenizer", "tokenizer/*.json", (["prepare", "text/train.jsonl", *prepare], take_tokenizer)),
        Target("tokenizer mark", "tokenizer/.biphase.json", (["tokenizer", "from", "encoder", "--out", "tokenizer"],)),
        Target("shards", f"{shards}/*", checks, is_hashed=True),
        Target("shard manifest", "shards/manifest.json", checks, is_hashed=True),
        Target("shard bytes", "shards/token_bytes.npy", checks, is_hashed=True),
        Target("model configuration", "encoder/config.json", (cell, adapt)),
        Target("model tokenizer", "encoder/token*.json", (cell,), drops=("cache",)),
        Target("model weights", "encoder/model.safetensors", (cell, adapt)),
        Target("checkpoint", f"{run}/steps/6/model/*", (export, of_run), is_hashed=True),
        Target("parent", f"{run}/steps/5/**/*", (branch,), is_hashed=True),
        Target("checkpoint manifest", f"{run}/steps/*/manifest.json", (export, branch, verify), is_hashed=True),
        Target("run", f"{run}/*.*", (export, ["inspect", run], ["pretrain", "recipe.yaml"], branch)),
        Target("score", "scores/mood-*/score.json", (compare, ["evaluate", "encoder", *evaluation()])),
        Target("predictions", "scores/mood-*/test.jsonl", (compare,)),
        Target("encoded cache", "cache/encoded/mood-*/*", (cell,), is_hashed=True, drops=("single",)),
        Target("study folder", "study-small/**/*.*", (*study[1:], again)),
        Target("failures", "study-small/failed/*.json", (["study", "status", "study.yaml"], again)),
        Target("failures of cells", "scores/failed/*.json", (["evaluate", "encoder", *evaluation(), "--dry-run"],)),
        Target("report mark", "study-small/report/.biphase.json", (["study", "report", "study.yaml"],)),
        Target("words", "", ()),
    ]  # fmt: skip


# What is done to a file


def hostile_values(rng: random.Random) -> Any:
    """Values that a format allows and nobody means."""
    deep: Any = []
    for _ in range(300):
        deep = [deep]
    values = [None, True, [], {}, "", -1, 0, 1e308, float("nan"), float("inf"), 2**63, -(2**70), "x" * 100_000]
    values += [
        "\x1b[2J\x1b]0;title\x07",
        "[/bold]",
        "$x^$",
        "../../x",
        "/etc/passwd",
        "\u202eabc",
        deep,
        {"a": deep},
        [0] * 3,
    ]
    return rng.choice(values)


def places(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The place of every value in a tree."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from places(value, (*path, key))


def change_value(rng: random.Random, tree: Any) -> str:
    """Replace, remove or add one value of a tree; returns what was done."""
    known = list(places(tree))[:5000]
    if not known:
        return "nothing"
    path = rng.choice(known)
    node = tree
    for key in path[:-1]:
        node = node[key]
    kind = rng.choice(("replace", "replace", "replace", "remove", "add"))
    if kind == "replace":
        node[path[-1]] = hostile_values(rng)
    elif kind == "remove":
        del node[path[-1]]
    elif isinstance(node, dict):
        node["surprise"] = hostile_values(rng)
    else:
        node.append(hostile_values(rng))
    return f"{kind} {'.'.join(map(str, path))[:60]}"


def change_json(rng: random.Random, data: bytes) -> tuple[bytes, str]:
    tree = json.loads(data)
    what = change_value(rng, tree)
    return json.dumps(tree).encode(), what


def change_json_line(rng: random.Random, data: bytes) -> tuple[bytes, str]:
    lines = data.splitlines(keepends=True)
    at = rng.randrange(len(lines))
    lines[at], what = change_json(rng, lines[at])
    lines[at] += b"\n"
    return b"".join(lines), f"line {at + 1}: {what}"


def change_yaml(rng: random.Random, data: bytes) -> tuple[bytes, str]:
    import yaml

    tree = yaml.safe_load(data)
    what = change_value(rng, tree)
    return yaml.safe_dump(tree, sort_keys=False).encode(), what


def rewrite_json(rng: random.Random, data: bytes) -> tuple[bytes, str]:
    """What json.dumps does not write: surrogates, thousands of digits, depth, keys twice, bare constants."""
    kind, text = rng.choice(
        [
            ("surrogate", rb'"\ud800"'),
            ("digits", b"9" * 5000),
            ("deep list", b"[" * 100_000),
            ("deep and closed", b"[" * 20_000 + b"]" * 20_000),
            ("deep object", b'{"a":' * 100_000),
            ("constant", b"NaN"),
            ("huge float", b"1e999"),
            ("null character", rb'"\u0000"'),
            ("escape", rb'"\u001b[31m"'),
        ]
    )
    found = list(re.finditer(rb':\s*("(?:[^"\\]|\\.)*"|-?[\d.e+-]+|null|true|false)', data))
    if not found:
        return text, kind
    match = rng.choice(found[:2000])
    return data[: match.start(1)] + text + data[match.end(1) :], f"{kind} at {match.start(1)}"


def double_key(rng: random.Random, data: bytes) -> tuple[bytes, str]:
    """A key of a YAML file twice."""
    lines = data.splitlines(keepends=True)
    at = rng.choice([n for n, line in enumerate(lines) if re.match(rb"\s*\w+:", line)] or [0])
    match = re.match(rb"(\s*\w+):", lines[at])
    return b"".join(
        [*lines[: at + 1], *([match[1] + b": 1\n"] if match else []), *lines[at + 1 :]]
    ), f"line {at + 1} twice"


def rewrite_yaml(rng: random.Random, data: bytes) -> tuple[bytes, str]:
    bomb = b"a0: &a0 [x, x, x, x, x, x, x, x, x]\n"
    bomb += b"".join(b"a%d: &a%d [%s]\n" % (n, n, b", ".join([b"*a%d" % (n - 1)] * 9)) for n in range(1, 10))
    kind, text = rng.choice(
        [
            ("aliases", bomb),
            ("itself", b"surprise: &a [*a]\n"),
            ("deep", b"surprise: " + b"[" * 5000 + b"]" * 5000 + b"\n"),
            ("deep open", b"surprise: " + b"{a: " * 20_000 + b"\n"),
            ("digits", b"seed: " + b"9" * 5000 + b"\n"),
            ("python", b"surprise: !!python/object/apply:os.system ['true']\n"),
            ("date", b"surprise: 2020-99-99\n"),
            ("surrogate", b'surprise: "\\ud800"\n'),
            ("merge", b"<<: [1, 2]\n"),
            ("tag", b"surprise: !x 1\n"),
            ("sixty", b"surprise: 1:99999999999999999999:1\n"),
            ("documents", b"---\na: 1\n"),
            ("list for a key", b"? [1, 2]\n: 1\n"),
            ("control", b"surprise: \x07\n"),
        ]
    )
    return (data + text if rng.random() < 0.7 else text), kind


def flip_bit(rng: random.Random, data: bytes) -> tuple[bytes, str]:
    changed = bytearray(data)
    at = rng.randrange(len(changed)) if rng.random() < 0.6 else rng.randrange(min(64, len(changed)))
    changed[at] ^= 1 << rng.randrange(8)
    return bytes(changed), f"bit of byte {at}"


def cut(rng: random.Random, data: bytes) -> tuple[bytes, str]:
    at = rng.randrange(len(data))
    return data[:at], f"cut at {at}"


def zero(rng: random.Random, data: bytes) -> tuple[bytes, str]:
    at, size = rng.randrange(len(data)), rng.choice((1, 8, 512, 4096))
    return data[:at] + b"\0" * len(data[at : at + size]) + data[at + size :], f"zeros at {at}"


def insert(rng: random.Random, data: bytes) -> tuple[bytes, str]:
    at, noise = rng.randrange(len(data)), rng.randbytes(rng.choice((1, 3, 40)))
    return data[:at] + noise + data[at:], f"noise at {at}"


def drop(rng: random.Random, data: bytes) -> tuple[bytes, str]:
    at, size = rng.randrange(len(data)), rng.choice((1, 5, 100))
    return data[:at] + data[at + size :], f"{size} bytes lost at {at}"


def repeat_line(rng: random.Random, data: bytes) -> tuple[bytes, str]:
    lines = data.splitlines(keepends=True)
    at = rng.randrange(len(lines))
    return b"".join([*lines[:at], lines[at], *lines[at:]]), f"line {at + 1} repeated"


def empty(rng: random.Random, data: bytes) -> tuple[bytes, str]:
    return b"", "empty"


def noise(rng: random.Random, data: bytes) -> tuple[bytes, str]:
    return rng.randbytes(200), "noise"


def header_size(rng: random.Random, data: bytes) -> tuple[bytes, str]:
    """The length of the header of a safetensors file."""
    size = rng.choice((0, 1, 2**20, 2**40, 2**63, 2**64 - 1))
    return size.to_bytes(8, "little") + data[8:], f"header of {size}"


def change_header(rng: random.Random, data: bytes) -> tuple[bytes, str]:
    size = int.from_bytes(data[:8], "little")
    header, what = (change_json if rng.random() < 0.7 else rewrite_json)(rng, data[8 : 8 + size])
    return len(header).to_bytes(8, "little") + header + data[8 + size :], f"header: {what}"


Mutation = Callable[[random.Random, bytes], tuple[bytes, str]]
ANY: list[Mutation] = [flip_bit, flip_bit, cut, zero, insert, drop, empty, noise]
BY_ENDING: dict[str, list[Mutation]] = {
    ".json": [change_json, change_json, change_json, rewrite_json, rewrite_json],
    ".jsonl": [change_json_line, change_json_line, rewrite_json, repeat_line],
    ".yaml": [change_yaml, change_yaml, change_yaml, rewrite_yaml, rewrite_yaml, double_key],
    ".safetensors": [header_size, change_header, change_header],
    ".tsv": [repeat_line],
    ".conll": [repeat_line],
}


def damage(rng: random.Random, path: Path) -> str:
    """Damage the file at `path`; returns how."""
    if rng.random() < 0.06:
        return replace_file(rng, path)
    data = path.read_bytes()
    own = BY_ENDING.get(path.suffix, [])
    mutation = rng.choice(own) if own and rng.random() < 0.65 else rng.choice(ANY)
    if not data:
        mutation = noise
    try:
        changed, what = mutation(rng, data)
    except (ValueError, IndexError):  # an empty line, say
        changed, what = flip_bit(rng, data)
    path.unlink()
    path.write_bytes(changed)
    return f"{mutation.__name__}: {what}" + (" (same bytes)" if changed == data else "")


def replace_file(rng: random.Random, path: Path) -> str:
    """Something else than a file in its place."""
    kind = rng.choice(("folder", "gone", "loop", "dangling", "device"))
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind == "dangling":
        path.symlink_to("nowhere/at/all")
    elif kind == "device":
        path.symlink_to("/dev/null")
    return f"replace_file: {kind}"


ODD_WORDS = [
    "n" * 300,
    "loop",
    "[/red]",
    "[bold]x",
    "a\x1b[31mb",
    "\udc80",
    "",
    ".",
    "..",
    "/dev/null/x",
    "~",
    "a\nb",
    "-1",
]
ODD_WORDS += ["nan", "é" * 200, "$x^$"]
ODD_VALUES = ["9" * 5000, "1e400", "-1", ".nan", ".inf", "-.inf", "[" * 3000, "{a: 1, a: 2}", "0", "null", "[]", "1e18"]
ODD_VALUES += ["999999999999", *ODD_WORDS]
RECIPE_KEYS = [
    "optimizer.eps", "optimizer.betas", "optimizer.betas.0", "seed", "schedule.peak_lr",
    "schedule.warmup_steps", "init.architecture.hidden_size", "init.architecture.num_hidden_layers",
    "init.architecture.hidden_act", "init.architecture.vocab_size", "init.architecture.rope_theta",
    "data.max_sample_tokens", "batch_tokens", "curriculum.0.steps", "curriculum.1.mask_probability", "name",
    "data.shards", "compute.microbatch_tokens", "optimizer.weight_decay", "data.order_seed",
    "checkpoints.keep", "validation.tokens", "init.preset", "init.architecture.num_attention_heads",
    "init.architecture.rms_norm_eps", "init.model", "init.checkpoint",
]  # fmt: skip
CELL_KEYS = [
    "eps", "betas", "betas.0", "seed", "learning_rate", "weight_decay", "max_steps", "epochs", "scale",
    "max_length", "max_train_examples", "batch_size", "warmup_ratio", "microbatch_tokens",
]  # fmt: skip
STUDY_KEYS = [
    "mask_probability", "evaluation.seeds", "evaluation.learning_rates", "arms.0.budgets.0",
    "arms.0.curricula.0", "planning.vocab_size", "planning.devices", "title", "name", "arms.0.name",
    "arms.0.curricula.1", "recipe.seed", "models.0.architecture.hidden_size",
]  # fmt: skip
CURRICULA = ["99999999/1", "1e9/1e9", "(" * 500, "clm " * 400, "4x(clm)", "9999999x(25/75)", "[/red]", "50% clm"]


def strange_words(rng: random.Random, run: str) -> list[str]:
    """A command with a word that nobody would write."""
    odd, huge = rng.choice(ODD_WORDS), rng.choice(ODD_VALUES)
    key, tune, study_key, curriculum = (rng.choice(known) for known in (RECIPE_KEYS, CELL_KEYS, STUDY_KEYS, CURRICULA))
    return rng.choice(
        [
            ["pretrain", "recipe.yaml", f"{key}={huge}", "--runs", "new"],
            ["pretrain", "recipe.yaml", f"{key}={huge}", "--runs", "new"],
            ["pretrain", odd],
            ["pretrain", "recipe.yaml", odd],
            ["pretrain", "recipe.yaml", "--runs", odd],
            ["prepare", odd, "--tokenizer", "tokenizer", "--out", "out"],
            ["prepare", "text/plain.txt", "--tokenizer", odd, "--out", "out"],
            ["prepare", "text/plain.txt", "--tokenizer", "tokenizer", "--workers", "1", "--out", odd],
            ["prepare", "text/plain.txt", "--tokenizer", "tokenizer", "--out", "out", "--seed", huge],
            ["tokenizer", "train", "text/plain.txt", "--out", "out", "--vocab-size", huge],
            ["tokenizer", "train", "text/plain.txt", "--out", odd],
            ["tokenizer", "train", "text/plain.txt", "--out", "out", "--limit-mb", huge],
            ["tokenizer", "from", odd, "--out", "out"],
            ["inspect", odd],
            ["export", odd, "out"],
            ["export", run, odd],
            ["export", f"{run}@{huge}", "out"],
            [*finetune("mood", "new"), f"{tune}={huge}"],
            [*finetune("mood", "new"), f"{tune}={huge}"],
            ["finetune", odd, "tasks/mood.yaml", "--data-dir", "data", "--out", "new"],
            ["finetune", "encoder", odd, "--data-dir", "data", "--out", "new"],
            ["finetune", "encoder", "tasks/mood.yaml", *FAST, "--data-dir", odd, "--out", "new"],
            ["finetune", "encoder", "tasks/mood.yaml", *FAST, "--data-dir", "data", "--out", odd],
            ["evaluate", "encoder", "--tasks", odd, "--out", "new"],
            ["evaluate", "--compare", odd, "encoder", "--out", "scores"],
            ["evaluate", "--out", odd],
            [*["evaluate", "encoder", *evaluation()], "--seeds", huge],
            [*["evaluate", "encoder", *evaluation()], "--learning-rates", huge],
            [*["evaluate", "encoder", *evaluation()], "--part", huge],
            ["study", "plan", "study.yaml", f"{study_key}={huge}"],
            ["study", "plan", "study.yaml", f"arms.0.curricula.0={curriculum}"],
            ["study", "plan", "study.yaml", "--device", odd],
            ["study", "plan", odd],
            ["study", "report", "study.yaml", f"title={odd}", f"question={odd}"],
            ["study", "report", "study.yaml", "--report", odd],
            ["study", "advise", "--text", odd, "--hours", "1"],
            ["study", "advise", "--text", "text", "--flops", huge],
            ["report", "paper", "--out", odd],
        ]
    )


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


def attempt(number: int, seed: int, world: Path, place: Path, only: str | None = None) -> Attempt:
    """Make attempt `number` of a seed in `place`, a folder that is made and removed."""
    rng = random.Random(f"{seed}-{number}")
    run = run_in(world)
    targets = [target for target in list_targets(run) if only is None or only in target.name]
    target = targets[number % len(targets)]
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(world, place, symlinks=True)
    for name in target.drops:
        shutil.rmtree(place / name, ignore_errors=True)
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
        for name in drops:
            shutil.rmtree(twin / name, ignore_errors=True)
        with standing_in(twin):
            before = set(Path().rglob("*"))
            result = call(list(command), HANG_SECONDS)
            assert result.code == 0, f"undamaged: {command}: {result}"
            known[command] = results(before)
        shutil.rmtree(twin)
    return known[command]


# Many attempts


def work(world: Path, place: Path, seed: int, numbers: range, only: str | None) -> None:
    """Attempts in this process, one line of JSON for each on the real standard output."""
    settle_process()
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    told = os.fdopen(os.dup(1), "w")
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    for number in numbers:
        print(json.dumps(asdict(attempt(number, seed, world, place, only))), file=told, flush=True)


def campaign(count: int, seed: int, folder: Path, only: str | None = None, start: int = 0) -> Iterator[Attempt]:
    """Attempts in a child; where it hangs or dies, the next one goes on behind the attempt."""
    world = folder / "world"
    if not world.exists():
        command = [sys.executable, __file__, "--build", str(world)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
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
    parser.add_argument("--build", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.build:
        settle_process()
        build_world(given.build)
        return
    if given.work:
        numbers = range(given.start, given.start + given.count)
        work(given.work / "world", given.work / "attempt", given.seed, numbers, given.only)
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


def build_world(folder: Path) -> None:
    """The small world, with a unit that failed."""
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    build(part)
    for place in ("study-small", "scores"):
        (part / place / "failed").mkdir(exist_ok=True)
        record = {"unit": "train s-clm-4", "reason": "a disk was full", "traceback": ""}
        (part / place / "failed" / "train-s-clm-4-1234abcd.json").write_text(json.dumps(record))
    part.rename(folder)


if __name__ == "__main__":
    main()
