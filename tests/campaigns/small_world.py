"""A small world of every kind of file that biphase reads, and the command called in this process.

    text/ tokenizer/ shards/ recipe.yaml runs/RUN encoder/ tasks/ data/ scores/ cache/ study.yaml study-small/ report/

All paths are relative to the world's folder, so that a copy of it is a world of its own.
"""

import argparse
import contextlib
import gzip
import io
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

PROSE = Path(__file__).parents[1] / "data" / "land_of_oz.txt"

SHAPE = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
RECIPE = {
    "name": "tiny",
    "init": {"preset": "1m", "architecture": SHAPE},
    "data": {"shards": "shards", "max_sample_tokens": 64},
    "curriculum": [{"objective": "clm", "steps": 3}, {"objective": "mlm", "steps": 3, "mask_probability": 0.3}],
    "schedule": {"peak_lr": 0.01, "warmup_steps": 1, "decay_steps": 2},
    "batch_tokens": 256,
    "seed": 1,
    "optimizer": {"eps": 1e-6, "betas": [0.9, 0.95]},
    "compute": {"microbatch_tokens": 256, "precision": "fp32", "compile": "off", "device": "cpu"},
    "validation": {"every_steps": 3, "tokens": 500},
    "checkpoints": {"every_steps": 2, "keep_last": 1, "keep": [5]},
}
FAST = ["precision=fp32", "device=cpu", "max_steps=2", "batch_size=4", "max_length=48", "max_eval_examples=6"]
FINETUNE = {word.partition("=")[0]: yaml.safe_load(word.partition("=")[2]) for word in FAST}
STUDY = {
    "name": "small",
    "title": "Small",
    "question": "Does it hold?",
    "recipe": {key: RECIPE[key] for key in ("data", "schedule", "batch_tokens", "optimizer", "compute", "validation")}
    | {"checkpoints": {"every_steps": 0}},
    "models": [{"name": "s", "preset": "1m", "architecture": SHAPE}],
    "arms": [{"group": "all", "models": ["s"], "curricula": ["clm", "50/50"], "budgets": [4]}],
    "evaluation": {
        "tasks": ["genre"],
        "learning_rates": [0.001],
        "seeds": 2,
        "finetune": FINETUNE | {"max_train_examples": 8},
    },
    "planning": {"device": "CPU", "vocab_size": 300},
}
TASKS = {
    "mood": {
        "family": "sequence_classification",
        "metric": "accuracy",
        "template": "{text}",
        "classes": ["good", "bad"],
        "files": [{"train": "train.jsonl", "validation": "validation.jsonl", "test": "test.jsonl"}],
    },
    "mood-tsv": {
        "family": "sequence_classification",
        "metric": "accuracy",
        "template": "{text}",
        "classes": ["good", "bad"],
        "files": [{"train": "train.tsv", "test": "test.tsv"}],
    },
    "names": {
        "family": "token_classification",
        "metric": "f1",
        "classes": ["O", "B-PER", "I-PER"],
        "label": "tags",
        "files": [{"train": "train.conll", "test": "test.conll", "format": "columns"}],
    },
    "asked": {
        "family": "question_answering",
        "metric": "f1",
        "template": "{question} {context}",
        "files": [{"train": "train.json", "test": "test.json", "format": "squad"}],
    },
}


@dataclass(frozen=True)
class Result:
    """How a command ended: its exit code, what it printed, and the traceback of what it raised."""

    code: int
    out: str
    err: str
    traceback: str = ""


class HangError(BaseException):
    """A command took longer than it may."""


WAITING = 5
"""How many times as long as it may compute a command may take where it waits, for a busy machine too."""


def call(arguments: list[str], seconds: int = 60) -> Result:
    """The `biphase` command in this process, in the current folder, for so many seconds of the processor."""
    import biphase.cli.app as cli
    from biphase import console

    cli.prepare_process = lambda: None  # heap and threads are this process' own business
    clear_caches()
    out, err = io.StringIO(), io.StringIO()
    before = sys.argv, console.out.file, console.err.file
    sys.argv = ["biphase", *arguments]
    console.out.file, console.err.file = out, err

    def hang(*_: object) -> None:
        raise HangError

    for number, timer, limit in (
        (signal.SIGPROF, signal.ITIMER_PROF, seconds),
        (signal.SIGALRM, signal.ITIMER_REAL, seconds * WAITING),
    ):
        signal.signal(number, hang)
        signal.setitimer(timer, limit)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            cli.main()
        return Result(0, out.getvalue(), err.getvalue())
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        return Result(code, out.getvalue(), err.getvalue())
    except HangError:
        return Result(124, out.getvalue(), err.getvalue(), traceback.format_exc())
    except BaseException:
        return Result(1, out.getvalue(), err.getvalue(), traceback.format_exc())
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.argv, console.out.file, console.err.file = before


def clear_caches() -> None:
    """Forget what is kept for a process: the next command is a new one."""
    for name, module in list(sys.modules.items()):
        if name.startswith("biphase."):
            for value in list(vars(module).values()):
                if hasattr(value, "cache_clear"):
                    value.cache_clear()


@contextlib.contextmanager
def standing_in(folder: Path) -> Iterator[None]:
    """In a world: its folder is the current one, its cache the one that is used."""
    before = Path.cwd()
    os.environ["BIPHASE_CACHE"] = str(folder / "cache")
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def settle_process() -> None:
    """One thread, no network, no measuring of the machine: commands repeat to the last bit, are fast and may fork."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads would not be in a fork
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    import torch

    import biphase.pretraining.loop as loop

    torch.set_num_threads(1)
    loop.peak_flops = lambda device, dtype: 1e12  # type: ignore[attr-defined]


def open_world(folder: Path) -> Path:
    """The small world in a folder, made where it is not there; this process is settled."""
    settle_process()
    world, part = folder / "world", folder / "world.part"
    if not world.exists():
        shutil.rmtree(part, ignore_errors=True)
        build(part).rename(world)
    return world


def must(arguments: list[str]) -> Result:
    result = call(arguments)
    assert result.code == 0, f"{arguments}: {result}"
    return result


def build(folder: Path) -> Path:
    """Make the world below a folder that is not there yet."""
    folder.mkdir(parents=True)
    with standing_in(folder):
        write_sources(Path())
        must(["tokenizer", "train", "text/train.jsonl", "--vocab-size", "300", "--out", "tokenizer"])
        prepare = ["prepare", "text/train.jsonl", "--tokenizer", "tokenizer", "--out", "shards", "--workers", "1"]
        must([*prepare, "--validation", "text/validation.jsonl"])
        must(["pretrain", "recipe.yaml"])
        must(["export", run_in(folder), "encoder"])
        must(["evaluate", "encoder", *evaluation()])
        must(["evaluate", run_in(folder), *evaluation()])
        for task in TASKS:
            must(finetune(task))
        must(["study", "run", "study.yaml", "--workers", "0"])
        must(["study", "report", "study.yaml"])
        for place in ("study-small", "scores"):  # and a unit that failed
            path = Path(place) / "failed" / "train-s-clm-4-1234abcd.json"
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps({"unit": "train s-clm-4", "reason": "a disk was full", "traceback": ""}))
    return folder


def run_in(folder: Path) -> str:
    [path] = (folder / "runs").iterdir()
    return f"runs/{path.name}"


def evaluation() -> list[str]:
    words = ["--tasks", "tasks/mood.yaml", "--learning-rates", "1e-3", "--seeds", "0-1", "--data-dir", "mood=data"]
    return [*FAST, *words, "--workers", "0", "--out", "scores"]


def finetune(task: str, scores: str = "single") -> list[str]:
    return ["finetune", "encoder", f"tasks/{task}.yaml", *FAST, "--data-dir", "data", "--out", scores]


def write_sources(folder: Path) -> None:
    """What a user writes: text, recipe, tasks and their data, a study."""
    paragraphs = PROSE.read_text(encoding="utf-8").split("\n\n")[:60]
    paragraphs[12] = f"{'a' * 40}! {paragraphs[12]}"  # what some patterns take for ever on
    for name in ("text", "tasks", "data"):
        (folder / name).mkdir()
    for name, part in (("train", paragraphs[8:]), ("validation", paragraphs[:8])):
        rows = [{"id": f"{name}-{number}", "text": text} for number, text in enumerate(part)]
        write_lines(folder / "text" / f"{name}.jsonl", rows)
    packed = (folder / "text" / "train.jsonl").read_bytes()
    (folder / "text" / "packed.jsonl.gz").write_bytes(gzip.compress(packed, mtime=0))
    (folder / "text" / "plain.txt").write_text("\n\n".join(paragraphs[:20]), encoding="utf-8")
    import pyarrow as pa
    import pyarrow.parquet as pq

    (folder / "text" / "packed.jsonl.zst").write_bytes(pa.Codec("zstd").compress(packed, asbytes=True))
    table = pa.table({"text": paragraphs[:20], "label": [number % 2 for number in range(20)]})
    pq.write_table(table, folder / "text" / "table.parquet")
    with pa.ipc.new_file(folder / "text" / "table.arrow", table.schema) as file:
        file.write_table(table)
    for name, content in (("recipe", RECIPE), ("study", STUDY)):
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    for name, task in TASKS.items():
        text = yaml.safe_dump({"name": name, **task}, sort_keys=False)
        (folder / "tasks" / f"{name}.yaml").write_text(text, encoding="utf-8")
    write_task_data(folder / "data", [" ".join(text.replace('"', "").split()[:12]) for text in paragraphs])


def write_task_data(folder: Path, texts: list[str]) -> None:
    for split, part in (("train", texts[:24]), ("validation", texts[24:34]), ("test", texts[34:44])):
        rows = [{"id": f"{split}-{n}", "text": text, "label": ("good", "bad")[n % 2]} for n, text in enumerate(part)]
        write_lines(folder / f"{split}.jsonl", rows)
        table = [f"{row['text']}\t{row['label']}" for row in rows]
        (folder / f"{split}.tsv").write_text("\n".join(["text\tlabel", *table]) + "\n", encoding="utf-8")
        sentences = ["\n".join(f"{w}\t{'B-PER' if w[0].isupper() else 'O'}" for w in text.split()) for text in part]
        (folder / f"{split}.conll").write_text("\n\n".join(sentences) + "\n", encoding="utf-8")
        (folder / f"{split}.json").write_text(json.dumps({"version": "1", "data": [questions(part)]}), encoding="utf-8")


def questions(texts: list[str]) -> dict[str, Any]:
    paragraphs = []
    for number, text in enumerate(texts):
        word = text.split()[0]
        answers = [{"text": word, "answer_start": 0}]
        asked = {"id": f"q{number}", "question": "What is first?", "answers": answers, "is_impossible": False}
        paragraphs.append({"context": text, "qas": [asked]})
    return {"title": "t", "paragraphs": paragraphs}


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


Outcome = tuple[str, int, str]
"""What kind of thing was tried, how many attempts that were, and what was lost: nothing in the empty string."""


def run_campaign(
    campaign: Callable[[argparse.Namespace, Path], Iterable[Outcome]], text: str | None, **options: dict[str, Any]
) -> None:
    """A campaign as a command: what is lost is told at once, the figures in the end; exit code 1 where anything was.

    Args:
        campaign: gets the options, and the folder in which it works.
        options: the command's own, each with the settings of `add_argument`.
    """
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, settings in {**options, "folder": {"type": Path}}.items():
        parser.add_argument(f"--{name}", **settings)
    given = parser.parse_args()
    folder = given.folder or Path(tempfile.mkdtemp(prefix="biphase-campaign-"))
    started = time.monotonic()
    tried: Counter[str] = Counter()
    lost: Counter[str] = Counter()
    for kind, number, what in campaign(given, folder):
        tried[kind] += number
        lost[kind] += bool(what)
        if what:
            print(f"{kind}: {what}", flush=True)
    for kind, number in tried.items():
        print(f"{kind}: {number} attempts, {lost[kind]} lost")
    print(f"{time.monotonic() - started:.0f} s")
    print(f"attempts {tried.total()}, survived {tried.total() - lost.total()}, lost {lost.total()}")
    if given.folder is None:
        shutil.rmtree(folder)
    sys.exit(lost.total() > 0)
