"""What is done to a file or to the words of a command: values that a format allows and nobody means, lost bytes, noise.

Every function draws from the generator that it is given, so that an attempt can be made once more.
"""

import json
import random
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))

from small_world import FAST, evaluation, finetune


def hostile_values(rng: random.Random) -> Any:
    """Values that a format allows and nobody means."""
    deep: Any = []
    for _ in range(300):
        deep = [deep]
    values = [None, True, [], {}, "", -1, 0, 1e308, float("nan"), float("inf"), 2**63, -(2**70), "x" * 100_000]
    values += ["\x1b[2J\x1b]0;title\x07", "[/bold]", "$x^$", "../../x", "/etc/passwd", "\u202eabc"]
    values += [deep, {"a": deep}, [0] * 3]
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


OTHER_SHAPES = [b"null", b"5", b'"text"', b"[]", b"[5]", b"{}", b'{"a": 1}', b"[{}]", b'[{"a": null}]', b"true"]


def other_shape(rng: random.Random, data: bytes) -> tuple[bytes, str]:
    """Valid JSON, and YAML, of another shape than the record has."""
    shape = rng.choice(OTHER_SHAPES)
    return shape + b"\n", shape.decode()


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


YAML_TAGS = ["bool x", "int ''", "float ''", "float x", "timestamp x", "binary é", "null x", "set [1]", "omap {a: 1}"]
YAML_TAGS += ["pairs [1]", "map x", "seq x", "str [1]", "python/name:os.system"]


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
            *((f"tag {tag}", f"surprise: !!{tag}\n".encode()) for tag in YAML_TAGS),
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


PATHOLOGICAL = ["(a+)+$", "(a|aa)+$", "(", "\\p{Nope}", ".*.*.*.*x", "", "\\1"]


def change_tokenizer(rng: random.Random, data: bytes) -> tuple[bytes, str]:
    """A tokenizer of another shape: ids twice, out of reach or missing, no vocabulary, parts that end badly."""
    tree = json.loads(data)
    vocab, added = tree["model"]["vocab"], tree["added_tokens"]
    kind, name = rng.randrange(8), rng.choice(sorted(vocab))
    pattern = {"Regex": rng.choice(PATHOLOGICAL)}
    if kind == 0:
        vocab[name] = rng.choice([0, 1, 299, 300, 70_000, 9_999_999, 10_000_000, 4_000_000_000, 2**32 - 1])
    elif kind == 1:
        rng.choice(added)["id"] = rng.choice([0, 7, 70_000, 4_000_000_000])
    elif kind == 2:
        tree["model"] |= {"vocab": {}, "merges": []}
        tree["added_tokens"] = rng.choice([[], added])
    elif kind == 3:
        split = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
        tree["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, tree["pre_tokenizer"]]}
    elif kind == 4:
        tree["normalizer"] = {"type": "Replace", "pattern": pattern, "content": "aaaa"}
    elif kind == 5:
        tree["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": rng.choice(["AAAA", "", "/////w=="])}
    elif kind == 6:
        tree["model"] = {"type": rng.choice(["WordPiece", "Unigram", "WordLevel"]), "vocab": {"a": 0}, "unk_token": "b"}
    else:
        tree["post_processor"] = {"type": "TemplateProcessing", "single": [], "pair": [], "special_tokens": {}}
    return json.dumps(tree).encode(), f"tokenizer {kind}: {json.dumps(tree.get('normalizer'))[:80]}"


FOREIGN = ["null", "5", "[]", "{", '{"info": null}', '{"info": []}', '{"info": {"features": 5}}', "\x00", "é" * 99]
CLASSES = ["null", "5", '"x"', "{}", "[]", "[null]", '{"0": "x"}', '["x", 5]']
FOREIGN += [
    f'{{"info": {{"features": {{"text": {feature}}}}}}}' for feature in ("null", "5", "[]", "[5]", '"ClassLabel"')
]
FOREIGN += [
    f'{{"info": {{"features": {{"label": {{"_type": "ClassLabel", "names": {names}}}}}}}}}' for names in CLASSES
]


def foreign_metadata(rng: random.Random, data: bytes) -> tuple[bytes, str]:
    """A table in which something else stands where `datasets` describes its columns."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    said, sink = rng.choice(FOREIGN), pa.BufferOutputStream()
    is_parquet = data.startswith(b"PAR1")
    table = pq.read_table(pa.BufferReader(data)) if is_parquet else pa.ipc.open_file(data).read_all()
    table = table.replace_schema_metadata({b"huggingface": said.encode()})
    if is_parquet:
        pq.write_table(table, sink)
    else:
        with pa.ipc.new_file(sink, table.schema) as file:
            file.write_table(table)
    return sink.getvalue().to_pybytes(), said


Mutation = Callable[[random.Random, bytes], tuple[bytes, str]]
ANY: list[Mutation] = [flip_bit, flip_bit, cut, zero, insert, drop, empty, noise]
BY_ENDING: dict[str, list[Mutation]] = {
    ".json": [change_json, change_json, change_json, rewrite_json, rewrite_json, other_shape],
    ".jsonl": [change_json_line, change_json_line, rewrite_json, repeat_line],
    ".yaml": [change_yaml, change_yaml, change_yaml, rewrite_yaml, rewrite_yaml, double_key, other_shape],
    ".safetensors": [header_size, change_header, change_header],
    ".tsv": [repeat_line],
    ".parquet": [foreign_metadata],
    ".arrow": [foreign_metadata],
    ".conll": [repeat_line],
}


def damage(rng: random.Random, path: Path) -> str:
    """Damage the file at `path`; returns how."""
    if rng.random() < 0.06:
        return replace_file(rng, path)
    data = path.read_bytes()
    own = BY_ENDING.get(path.suffix, []) + (4 * [change_tokenizer] if path.name == "tokenizer.json" else [])
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
            [*["evaluate", "encoder", *evaluation()], "--tasks", odd],
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
