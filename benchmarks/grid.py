"""The evaluation grid beside the usual way: the same cells by `biphase evaluate` and by Hugging Face Trainer.

    python benchmarks/grid.py                                     # 2 tasks × 2 rates × 3 seeds, a fresh 3m encoder
    python benchmarks/grid.py --model FOLDER --steps 200          # an encoder that has learnt something
    python benchmarks/grid.py --retrieval FOLDER                  # and Sentence Transformers, on a BEIR folder

Tasks: bundled ones of sequence and token classification; `--retrieval` adds a grid of its own. benchmarks/README.md
says what is the same on both sides, what each arm is and how its seconds are counted.

Letters: B samples of a batch, L its longest sample.
"""

import argparse
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import date
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any, Literal

from pretraining import describe, num_cores, say

# torch, transformers and biphase are imported inside functions: what the usual way loads is a part of its time.

HERE = Path(__file__).resolve().parent
CLASSIFICATION = ("sequence_classification", "token_classification")
METRICS = {"sequence_classification": "accuracy", "token_classification": "f1", "retrieval": "ndcg_at_10"}
Evaluated = Literal["validation", "test"]
SPLITS: tuple[Evaluated, ...] = ("validation", "test")


@dataclass(frozen=True)
class Way:
    """How an arm goes about its cells."""

    what: str
    is_loop: bool = False
    """All cells in one process, not a process for each."""
    is_side_by_side: bool = False
    """A process per core, one thread each, not one process with all cores as threads."""
    keeps_heap: bool = False
    """The allocator setting of `biphase.machine`."""
    is_fp32: bool = False
    """Arithmetic in fp32, which is what Trainer does unless told otherwise, whatever biphase does."""


ARMS = {
    "biphase": Way("biphase evaluate, default workers, a fresh cache"),
    "trainer": Way("Trainer, a process per cell, one after the other, all cores as threads"),
    "trainer-fp32": Way("the same in fp32, as it is shipped", is_fp32=True),
    "trainer-loop": Way("Trainer, all cells in one process, all cores as threads", is_loop=True),
    "trainer-loop-heap": Way("the same, its allocator keeps its heap", is_loop=True, keeps_heap=True),
    "trainer-side-by-side": Way("Trainer, a process per cell, one for each core at a time", is_side_by_side=True),
}
DEFAULT_ARMS = ["biphase", "trainer", "trainer-fp32", "trainer-loop"]


@dataclass(frozen=True)
class Cell:
    task: str
    learning_rate: float
    seed: int


@dataclass(frozen=True)
class Grid:
    """What both sides do. Plain values and paths as strings, so that it travels as JSON."""

    name: str
    model: str
    tasks: dict[str, dict[str, Any]]
    """By name, the task of biphase's table and, as `folder`, where its data is."""
    learning_rates: list[float]
    seeds: list[int]
    config: dict[str, Any]
    """biphase's `FinetuneConfig`, resolved: precision and length are what this machine and this model allow."""

    @property
    def cells(self) -> list[Cell]:
        return [Cell(*values) for values in product(self.tasks, self.learning_rates, self.seeds)]


@dataclass(frozen=True)
class Job:
    """Cells of the usual way, one after the other in one process."""

    grid: Grid
    cells: list[Cell]
    keeps_heap: bool
    cache: str
    """Of `datasets`: texts are tokenized once for each task, also by processes that follow one another."""
    began: float
    """When the process was started, by `time.time`."""


# The usual way, in a process of its own


def work(job: Job) -> dict[str, Any]:
    """All cells of a job, each with its scores and the seconds of its stages; `start`: the interpreter and imports."""
    if job.keeps_heap:
        from biphase.machine import keep_heap

        keep_heap()
    import datasets
    from transformers import Trainer  # noqa: F401

    families = {job.grid.tasks[cell.task]["family"] for cell in job.cells or job.grid.cells}
    if "token_classification" in families:
        import seqeval.metrics  # noqa: F401
    if "retrieval" in families:
        import sentence_transformers  # noqa: F401
    datasets.disable_progress_bars()
    start = time.time() - job.began
    fit = fit_retriever if "retrieval" in families else fit_classifier
    return {"start": start, "cells": [fit(job, cell) for cell in job.cells]}


@contextmanager
def timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    seconds[stage] = seconds.get(stage, 0.0) + time.perf_counter() - started


def shared_arguments(job: Job, cell: Cell, folder: str) -> dict[str, Any]:
    """What `TrainingArguments` of both kinds get: biphase's settings under their names."""
    import torch

    config = job.grid.config
    return {
        "output_dir": folder,
        "max_steps": config["max_steps"],
        "per_device_train_batch_size": config["batch_size"],
        "per_device_eval_batch_size": config["batch_size"],
        "learning_rate": cell.learning_rate,
        "lr_scheduler_type": "linear",
        "warmup_steps": config["warmup_ratio"],  # below 1 it is a share
        "adam_beta1": config["betas"][0],
        "adam_beta2": config["betas"][1],
        "adam_epsilon": config["eps"],
        "weight_decay": config["weight_decay"],
        "max_grad_norm": config["max_grad_norm"],
        "bf16": config["precision"] == "bf16",
        "use_cpu": not torch.cuda.is_available(),
        "seed": cell.seed,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def fit_classifier(job: Job, cell: Cell) -> dict[str, Any]:
    """As run_glue.py and run_ner.py do it, apart from the heads, which are biphase's."""
    from transformers import (
        AutoTokenizer,
        DataCollatorForTokenClassification,
        DataCollatorWithPadding,
        Trainer,
        TrainingArguments,
        set_seed,
    )

    task = job.grid.tasks[cell.task]
    is_tagging = task["family"] == "token_classification"
    seconds: dict[str, float] = {}
    with timed(seconds, "load"):
        set_seed(cell.seed)
        tokenizer = AutoTokenizer.from_pretrained(job.grid.model)
        network = make_network(job.grid.model, len(task["classes"]), is_tagging, job.grid.config["head_dropout"])
    with timed(seconds, "tokenize"):
        data = read_tokenized(task, tokenizer, job)
    with tempfile.TemporaryDirectory() as folder:
        with timed(seconds, "train"):
            trainer = Trainer(
                network,
                TrainingArguments(**shared_arguments(job, cell, folder)),
                train_dataset=data["train"],
                data_collator=(DataCollatorForTokenClassification if is_tagging else DataCollatorWithPadding)(
                    tokenizer
                ),
                preprocess_logits_for_metrics=lambda logits, _: logits.argmax(-1),
            )
            trainer.train()
        scores = {}
        with timed(seconds, "evaluate"):
            for split in SPLITS:
                predicted = trainer.predict(data[split]).predictions
                scores[split] = (score_tags if is_tagging else score_labels)(data[split], predicted, task)
    return asdict(cell) | {"scores": scores, "steps": trainer.state.global_step, "seconds": seconds}


def changes_of_config(model: str) -> dict[str, Any]:
    """What makes a network bidirectional and takes its dropout out, as biphase does."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model).to_dict()
    rates = [key for key, value in config.items() if isinstance(value, float) and re.search("dropout|_pdrop$", key)]
    return {"is_causal": False, "use_cache": False, **dict.fromkeys(rates, 0.0)}


def make_network(model: str, num_labels: int, is_tagging: bool, head_dropout: float) -> Any:
    """The pretrained network with biphase's head, for padded batches."""
    import torch
    from torch import nn
    from transformers import AutoConfig, AutoModel

    config = AutoConfig.from_pretrained(model, **changes_of_config(model))
    backbone = AutoModel.from_pretrained(model, config=config, dtype=torch.float32)
    width = config.hidden_size
    if is_tagging:
        head = nn.Sequential(nn.Dropout(head_dropout), nn.Linear(width, num_labels))
    else:
        head = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, num_labels))
    for layer in head:
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=config.initializer_range)
            nn.init.zeros_(layer.bias)

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone, self.head = backbone, head

        def forward(self, input_ids: Any, attention_mask: Any, labels: Any) -> dict[str, Any]:
            hidden = self.backbone(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
            if not is_tagging:
                is_token_BL1 = attention_mask[..., None]
                hidden = (hidden.float() * is_token_BL1).sum(1) / is_token_BL1.sum(1)
            logits = self.head(hidden).float()
            return {"loss": nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten()), "logits": logits}

    return Network()


def read_tokenized(task: dict[str, Any], tokenizer: Any, job: Job) -> Any:
    """The splits with `input_ids` and `labels`; of tagged words also what `score_tags` needs."""
    from datasets import load_dataset

    files = {split: str(Path(task["folder"]) / f"{split}.jsonl") for split in ("train", *SPLITS)}
    raw = load_dataset("json", data_files=files, cache_dir=job.cache)
    has_pair = tokenizer.cls_token_id is not None and tokenizer.sep_token_id is not None
    opening = [tokenizer.cls_token_id] if has_pair else []
    closing = [tokenizer.sep_token_id if has_pair else tokenizer.eos_token_id]
    room = job.grid.config["max_length"] - len(opening) - len(closing)
    numbers = {name: number for number, name in enumerate(task["classes"])}

    def number_of(label: str | int) -> int:
        return numbers[label] if isinstance(label, str) else label

    def encode(texts: Sequence[str], **options: Any) -> Any:
        return tokenizer(texts, add_special_tokens=False, truncation=True, max_length=room, **options)

    def encode_texts(rows: dict[str, list[Any]]) -> dict[str, Any]:
        texts = [
            task["template"].format(**dict(zip(rows, row, strict=True))) for row in zip(*rows.values(), strict=True)
        ]
        return {
            "input_ids": [opening + ids + closing for ids in encode(texts)["input_ids"]],
            "labels": [number_of(label) for label in rows[task["label"]]],
        }

    def encode_words(rows: dict[str, list[Any]]) -> dict[str, Any]:
        made: dict[str, list[Any]] = defaultdict(list)
        encoded = encode([" ".join(words) for words in rows[task["words"]]], return_offsets_mapping=True)
        columns = (rows[task["words"]], rows[task["label"]], encoded["input_ids"], encoded["offset_mapping"])
        for words, labels, ids, spans in zip(*columns, strict=True):
            tags = [number_of(label) for label in labels]
            word_at = [i for i, word in enumerate(words) for _ in range(len(word) + (i > 0))]  # a space: the next word
            places = [word_at[max(end - 1, begin)] for begin, end in spans]
            made["input_ids"].append(opening + ids + closing)
            made["labels"].append([-100] * len(opening) + [tags[place] for place in places] + [-100])
            made["word_of_token"].append([-1] * len(opening) + places + [-1])
            made["word_tags"].append(tags)
        return dict(made)

    is_tagging = task["family"] == "token_classification"
    encode_rows = encode_words if is_tagging else encode_texts
    return raw.map(encode_rows, batched=True, remove_columns=raw["train"].column_names)


def score_labels(data: Any, predicted: Any, task: dict[str, Any]) -> float:
    import numpy as np

    return float((np.array(data["labels"]) == predicted).mean())


def score_tags(data: Any, predicted: Any, task: dict[str, Any]) -> float:
    """seqeval's F1 over entities; of each word's tokens the majority decides, the first of equals."""
    from collections import Counter

    from seqeval.metrics import f1_score

    names, gold, voted = task["classes"], [], []
    for tags, words, labels in zip(data["word_tags"], data["word_of_token"], predicted.tolist(), strict=True):
        votes: dict[int, Counter[int]] = defaultdict(Counter)
        for word, label in zip(words, labels, strict=False):  # behind the words' tokens there is padding
            votes[word][label] += 1
        gold.append([names[tag] for tag in tags])
        voted.append([names[votes[i].most_common(1)[0][0]] if i in votes else "O" for i in range(len(tags))])
    return float(f1_score(gold, voted))


def fit_retriever(job: Job, cell: Cell) -> dict[str, Any]:
    """As Sentence Transformers' own training examples for pairs do it."""
    import torch
    from datasets import load_dataset
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
    from transformers import set_seed

    task, config = job.grid.tasks[cell.task], job.grid.config
    folder_of_data = Path(task["peer_folder"])
    seconds: dict[str, float] = {}
    with timed(seconds, "load"):
        set_seed(cell.seed)
        changes = changes_of_config(job.grid.model)
        model = SentenceTransformer(job.grid.model, config_kwargs=changes, model_kwargs={"dtype": torch.float32})
        model.max_seq_length = config["max_length"]
    with timed(seconds, "tokenize"):  # reading only: texts are tokenized batch by batch
        pairs = load_dataset("json", data_files=str(folder_of_data / "train.jsonl"), cache_dir=job.cache)["train"]
        judged = {split: json.loads((folder_of_data / f"{split}.json").read_text()) for split in SPLITS}
    with tempfile.TemporaryDirectory() as folder, timed(seconds, "train"):
        arguments = SentenceTransformerTrainingArguments(
            **shared_arguments(job, cell, folder), batch_sampler="no_duplicates"
        )
        loss = MultipleNegativesRankingLoss(model, scale=config["scale"])
        trainer = SentenceTransformerTrainer(model, arguments, train_dataset=pairs, loss=loss)
        trainer.train()
    scores = {}
    with timed(seconds, "evaluate"):
        for split, found in judged.items():
            relevant = {query: set(documents) for query, documents in found["relevance"].items()}
            evaluator = InformationRetrievalEvaluator(
                found["queries"], found["documents"], relevant, batch_size=config["batch_size"], write_csv=False
            )
            with torch.autocast(model.device.type, torch.bfloat16, enabled=arguments.bf16):
                metrics = evaluator(model)
            scores[split] = next(value for name, value in metrics.items() if name.endswith("cosine_ndcg@10"))
    return asdict(cell) | {"scores": scores, "steps": trainer.state.global_step, "seconds": seconds}


# Both sides from outside


def run_arm(arm: str, grid: Grid, threads: int) -> dict[str, Any]:
    """One arm once, with a fresh cache. A failed one gives {"error": its last line}; the other arms go on."""
    from biphase.errors import InputError

    with tempfile.TemporaryDirectory() as folder:
        try:
            if arm == "biphase":
                found = run_biphase(grid, Path(folder))
            else:
                found = run_trainer(ARMS[arm], grid, threads, Path(folder))
        except InputError as error:
            return {"error": str(error)}
        except subprocess.CalledProcessError as failed:
            lines = failed.stderr.strip().splitlines()
            return {"error": lines[-1] if lines else f"ended with exit code {failed.returncode}"}
    cells, wall = found["cells"], found["wall_seconds"]
    expected = {(cell.task, cell.learning_rate, cell.seed) for cell in grid.cells}
    assert {(cell["task"], cell["learning_rate"], cell["seed"]) for cell in cells} == expected, f"{arm}: other cells"
    assert all(cell["steps"] == grid.config["max_steps"] for cell in cells), f"{arm}: other steps"
    seconds: dict[str, float] = defaultdict(float)
    for cell in cells:
        for stage, spent in cell["seconds"].items():
            seconds[stage] += spent
    seconds["rest"] = found["slots"] * wall - sum(seconds.values())
    return found | {"cells_per_hour": 3600 * len(cells) / wall, "seconds": dict(seconds)}


@contextmanager
def clocked(found: dict[str, Any]) -> Iterator[None]:
    """By the clock, and the processor time of the processes that start and end in the block, with theirs."""

    def cpu_seconds() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    cpu, started = cpu_seconds(), time.perf_counter()
    yield
    found["wall_seconds"], found["cpu_seconds"] = time.perf_counter() - started, cpu_seconds() - cpu


def run_biphase(grid: Grid, folder: Path) -> dict[str, Any]:
    """How many cells run at a time (`slots`), what the clock says, and the cells as `work` gives them."""
    from biphase.cli.evaluate import count_workers
    from biphase.engine.local import Engine
    from biphase.errors import InputError
    from biphase.finetuning.scores import read_scores

    changed = ("max_steps", "epochs", "batch_size", "precision", "max_length")
    command = [sys.executable, "-m", "biphase", "evaluate", grid.model]
    command += [f"{key}={grid.config[key]}" for key in changed]
    command += ["--tasks", ",".join(grid.tasks), "--out", str(folder / "scores")]
    command += ["--learning-rates", ",".join(map(str, grid.learning_rates)), "--seeds", ",".join(map(str, grid.seeds))]
    for name, task in grid.tasks.items():
        command += ["--data-dir", f"{name}={task['folder']}"]
    found: dict[str, Any] = {"slots": min(count_workers(Engine()), len(grid.cells)), "cells": []}
    with clocked(found):
        call(command, {"BIPHASE_CACHE": str(folder / "cache")})
    for score in read_scores(folder / "scores").scores:
        cell = Cell(score.task, score.config.learning_rate, score.config.seed)
        if score.diverged:
            raise InputError(f"{score.headline()}; give lower --learning-rates")
        metric = METRICS[grid.tasks[score.task]["family"]]
        scores = {split: score.metrics[split][metric] for split in SPLITS}
        found["cells"].append(asdict(cell) | {"scores": scores, "steps": score.num_steps, "seconds": score.seconds})
    return found


def run_trainer(way: Way, grid: Grid, threads: int, folder: Path) -> dict[str, Any]:
    """As `run_biphase`."""
    if way.is_fp32:
        grid = replace(grid, config=grid.config | {"precision": "fp32"})
    slots = min(threads, len(grid.cells)) if way.is_side_by_side else 1
    parts = [grid.cells] if way.is_loop else [[cell] for cell in grid.cells]

    def run(cells: list[Cell]) -> list[dict[str, Any]]:
        return run_job(Job(grid, cells, way.keeps_heap, str(folder / "datasets"), time.time()), threads // slots)

    found: dict[str, Any] = {"slots": slots}
    with clocked(found), ThreadPoolExecutor(slots) as pool:
        found["cells"] = [cell for part in pool.map(run, parts) for cell in part]
    return found


def run_job(job: Job, threads: int) -> list[dict[str, Any]]:
    """The cells of a job, run in a process of its own. What it took to start counts to the first of them."""
    with tempfile.NamedTemporaryFile("r", suffix=".json") as answer:
        command = [sys.executable, __file__, "--job", json.dumps(asdict(job)), "--answer", answer.name]
        count = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        call(command, count | {"HF_DATASETS_CACHE": job.cache})
        found = json.loads(answer.read())
    for cell in found["cells"][:1]:
        cell["seconds"] = {"start": found["start"]} | cell["seconds"]
    return found["cells"]


def call(command: list[str], environment: dict[str, str]) -> None:
    """Raises `CalledProcessError` with what the process wrote."""
    quiet = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}
    subprocess.run(command, check=True, env=os.environ | quiet | environment, capture_output=True, text=True)


# What is measured


def make_encoder(preset: str, vocab_size: int, folder: Path) -> Path:
    """A network with random weights, and a tokenizer trained on the bundled text."""
    from biphase.corpus.text import find_sources, sample_texts
    from biphase.corpus.tokenizer import train_tokenizer
    from biphase.encoder.backbone import TokenIds, make_model

    corpus = HERE.parent / "src" / "biphase" / "bundled" / "corpus" / "train.jsonl.zst"
    tokenizer = train_tokenizer(sample_texts(find_sources([corpus])), vocab_size)
    ids = TokenIds(len(tokenizer), tokenizer.mask_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, None)
    make_model(preset, {}, ids, max_len=2048, seed=0).save_pretrained(folder / "encoder")
    tokenizer.save_pretrained(folder / "encoder")
    return folder / "encoder"


def write_splits(name: str, sizes: dict[Literal["train", "validation", "test"], int], folder: Path) -> dict[str, Any]:
    """A bundled task, and its rows as plain JSON lines for both sides; of larger splits a fixed random part."""
    import random

    from biphase.errors import InputError
    from biphase.tasks.sources import find_source, read_part
    from biphase.tasks.spec import find_task

    task = find_task(name)
    if not task.bundled or task.family not in CLASSIFICATION:
        raise InputError(f"{name} is no bundled task of classification; those are snli, uner_en_ewt, wnut17 and genre")
    source = find_source(task, None)
    folder.mkdir(parents=True)
    for split, size in sizes.items():
        rows = [row for _, row in read_part(source, split) if row and str(row[task.label]) not in task.unlabelled]
        kept = sorted(random.Random(42).sample(range(len(rows)), min(size, len(rows))))
        lines = "".join(json.dumps(rows[i]) + "\n" for i in kept)
        (folder / f"{split}.jsonl").write_text(lines, encoding="utf-8")
    return task.model_dump(mode="json") | {"folder": str(folder)}


def write_pairs(name: str, beir: Path, closing: str, folder: Path) -> dict[str, Any]:
    """A retrieval task, and for Sentence Transformers its pairs and judgements: prefixes in place, splits drawn."""
    from biphase.tasks.examples import Collection, load_task
    from biphase.tasks.spec import find_task

    task, data = find_task(name), load_task(name, beir)
    assert isinstance(data, Collection)
    templates = (task.query_template, task.document_template)
    queries, documents = (
        {id: template.replace("{text}", text) + closing for id, text in texts.items()}
        for template, texts in zip(templates, (data.queries, data.documents), strict=True)
    )
    folder.mkdir(parents=True)
    pairs = ({"anchor": queries[query], "positive": documents[document]} for query, document in data.train)
    (folder / "train.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs), encoding="utf-8")
    for split in SPLITS:
        judged = data.relevance[split]
        named = set(data.judged_documents[split])
        content = {
            "queries": {id: queries[id] for id in judged},
            "documents": {id: documents[id] for id in documents if id in named},
            "relevance": {
                id: [document for document, grade in grades.items() if grade > 0] for id, grades in judged.items()
            },
        }
        (folder / f"{split}.json").write_text(json.dumps(content), encoding="utf-8")
    return task.model_dump(mode="json") | {"folder": str(beir.resolve()), "peer_folder": str(folder)}


def measure_grid(grid: Grid, arms: Sequence[str], rounds: int, threads: int) -> dict[str, Any]:
    """All arms, taking turns: medians, ratios within each round, scores of the first round."""
    say(f"{grid.name}: {len(grid.cells)} cells of {grid.config['max_steps']} steps")
    if grid.config["precision"] == "fp32":
        arms = [arm for arm in arms if not ARMS[arm].is_fp32]  # the other arms are in fp32 too
    if any(arm != "biphase" for arm in arms):  # so that no arm is the first to read the libraries from the disk
        with tempfile.TemporaryDirectory() as folder, suppress(subprocess.CalledProcessError):
            run_job(Job(grid, [], False, folder, time.time()), threads)
    found: list[dict[str, Any]] = []
    for number in range(rounds):
        found.append({})
        for arm in arms:
            once = found[-1][arm] = run_arm(arm, grid, threads)
            rate = once.get("error") or f"{once['cells_per_hour']:,.0f} cells/h ({once['wall_seconds']:,.0f} s)"
            say(f"  round {number + 1}/{rounds} {arm}: {rate}")
    others = [arm for arm in arms if arm != "biphase"] if "biphase" in arms else []
    return {
        "name": grid.name,
        "tasks": list(grid.tasks),
        "learning_rates": grid.learning_rates,
        "seeds": grid.seeds,
        "config": {key: value for key, value in grid.config.items() if key not in ("learning_rate", "seed")},
        "num_cells": len(grid.cells),
        "arms": {arm: summarize_arm(arm, [each[arm] for each in found], grid) for arm in arms},
        "ratios": {
            f"biphase / {arm}": compared
            for arm in others
            if (compared := compare([(each["biphase"], each[arm]) for each in found]))
        },
        "differences": {
            f"biphase − {arm}": {
                task: compare_scores(found[0]["biphase"], found[0][arm], task, grid) for task in grid.tasks
            }
            for arm in others
            if "error" not in found[0]["biphase"] | found[0][arm]
        },
        "rounds": found,
    }


def summarize_arm(arm: str, rounds: list[dict[str, Any]], grid: Grid) -> dict[str, Any]:
    """Medians over the rounds; `seconds` of all slots together, by stage; test scores of the first round."""
    whole = [found for found in rounds if "error" not in found]
    if not whole:
        return {"what": ARMS[arm].what, "error": rounds[0]["error"]}
    medians = {
        key: statistics.median(found[key] for found in whole)
        for key in ("cells_per_hour", "wall_seconds", "cpu_seconds")
    }
    seconds = {stage: statistics.median(found["seconds"][stage] for found in whole) for stage in whole[0]["seconds"]}
    return {
        "what": ARMS[arm].what,
        "rounds": len(whole),
        "slots": whole[0]["slots"],
        **medians,
        "seconds": seconds,
        "test_scores": {
            task: {f"{rate:g}": interval_of_mean(scores_of(whole[0], task, rate)) for rate in grid.learning_rates}
            for task in grid.tasks
        },
    }


def scores_of(found: dict[str, Any], task: str, rate: float) -> list[float]:
    """Test scores in %, by seed."""
    chosen = [cell for cell in found["cells"] if (cell["task"], cell["learning_rate"]) == (task, rate)]
    return [100 * cell["scores"]["test"] for cell in sorted(chosen, key=lambda cell: cell["seed"])]


def compare(pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, float]:
    """Our cells per hour over theirs; `by_work`: were there nothing but training and evaluation, as in long cells."""
    whole = [(ours, theirs) for ours, theirs in pairs if "error" not in ours | theirs]
    if not whole:
        return {}

    def work_seconds(found: dict[str, Any]) -> float:
        return (found["seconds"]["train"] + found["seconds"]["evaluate"]) / found["slots"]

    ratios = [ours["cells_per_hour"] / theirs["cells_per_hour"] for ours, theirs in whole]
    return {
        "median": statistics.median(ratios),
        "min": min(ratios),
        "max": max(ratios),
        "median_by_cpu_seconds": statistics.median(
            theirs["cpu_seconds"] / ours["cpu_seconds"] for ours, theirs in whole
        ),
        "by_work": statistics.median(work_seconds(theirs) / work_seconds(ours) for ours, theirs in whole),
    }


def interval_of_mean(values: Sequence[float]) -> dict[str, Any]:
    """Mean, and half of its 95 % interval by Student's t; None for a single value."""
    from scipy.stats import t

    half = t.ppf(0.975, len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
    return {"mean": statistics.fmean(values), "half_width": None if half is None else float(half), "values": values}


def compare_scores(ours: dict[str, Any], theirs: dict[str, Any], task: str, grid: Grid) -> dict[str, Any]:
    """Ours minus theirs on test in points, the mean over the rates, with its 95 % interval.

    Seeds are not paired, since order and head differ. The spread is that over seeds, pooled over rates and sides.
    """
    from scipy.stats import t

    sides = [[scores_of(found, task, rate) for rate in grid.learning_rates] for found in (ours, theirs)]
    means = [statistics.fmean(map(statistics.fmean, side)) for side in sides]
    groups = [scores for side in sides for scores in side]
    freedom = sum(len(scores) - 1 for scores in groups)
    found: dict[str, Any] = {"metric": METRICS[grid.tasks[task]["family"]], "mean": means[0] - means[1]}
    if not freedom:
        return found | {"half_width": None, "includes_zero": None}
    variance = sum((score - statistics.fmean(scores)) ** 2 for scores in groups for score in scores) / freedom
    error = (variance * sum(1 / len(scores) for scores in groups)) ** 0.5 / len(grid.learning_rates)
    half = float(t.ppf(0.975, freedom)) * error
    return found | {"half_width": half, "includes_zero": abs(found["mean"]) <= half}


def print_results(result: dict[str, Any]) -> None:
    print(f"\n{result['name']}: {result['num_cells']} cells of {result['config']['max_steps']} steps")
    print(f"  {'arm':<22} {'cells/h':>8} {'wall s':>8} {'CPU s':>8}  where the time goes")
    for arm, found in result["arms"].items():
        if "error" in found:
            print(f"  {arm:<22} {found['error'][:100]}")
            continue
        total = sum(found["seconds"].values())
        shares = ", ".join(f"{stage} {spent / total:.0%}" for stage, spent in found["seconds"].items())
        rates = f"{found['cells_per_hour']:>8,.0f} {found['wall_seconds']:>8,.0f} {found['cpu_seconds']:>8,.0f}"
        print(f"  {arm:<22} {rates}  {shares}")
    for name, ratio in result["ratios"].items():
        spread = f"({ratio['min']:.2f}–{ratio['max']:.2f})"
        print(f"  {name}: {ratio['median']:.2f}× {spread}; training and evaluation alone: {ratio['by_work']:.2f}×")
    print("  test scores in % by rate")
    for task in result["tasks"]:
        for arm, found in result["arms"].items():
            if "error" not in found:
                by_rate = (f"{rate}: {with_half_width(score)}" for rate, score in found["test_scores"][task].items())
                print(f"    {task} {arm:<22} {'   '.join(by_rate)}")
        for name, by_task in result["differences"].items():
            verdict = {True: "0 is inside", False: "0 is outside", None: "one seed"}[by_task[task]["includes_zero"]]
            print(f"    {task} {name}: {with_half_width(by_task[task], '+')} points ({verdict})")


def with_half_width(found: dict[str, Any], sign: str = "") -> str:
    half = "" if found["half_width"] is None else f" ± {found['half_width']:.1f}"
    return f"{found['mean']:{sign}.1f}{half}"


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a model folder (a fresh network of --preset, random weights)")
    parser.add_argument("--preset", default="3m")
    parser.add_argument("--vocab", type=int, default=8192, help="tokens of the fresh network")
    parser.add_argument("--tasks", nargs="*", default=["snli", "uner_en_ewt"], help="bundled ones")
    parser.add_argument(
        "--retrieval", type=Path, metavar="FOLDER", help="BEIR's layout with qrels/train and qrels/test"
    )
    parser.add_argument("--learning-rates", type=float, nargs="+", default=[1e-4, 5e-4])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--train-examples", type=int, default=10**9, help="at most; the steps choose among them (all)")
    parser.add_argument("--evaluated-examples", type=int, default=500, help="at most, of validation and of test")
    parser.add_argument("--precision", choices=("auto", "bf16", "fp32"), default="auto", help="of both sides")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=DEFAULT_ARMS)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=num_cores(), help="of the usual way; biphase takes all cores")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.retrieval is not None and find_spec("sentence_transformers") is None:
        parser.error("--retrieval needs Sentence Transformers: pip install 'biphase[embeddings]'")
    options.device = "auto"
    return options


def make_grids(options: argparse.Namespace, folder: Path) -> Iterator[Grid]:
    from biphase.finetuning.cells import resolve
    from biphase.finetuning.config import FinetuneConfig
    from biphase.finetuning.encoders import load_encoder

    model = str((options.model or make_encoder(options.preset, options.vocab, folder)).resolve())
    encoder = load_encoder(model)
    given = {
        "max_steps": options.steps,
        "epochs": options.steps,  # so that the steps decide, as they do for Trainer
        "batch_size": options.batch_size,
        "precision": options.precision,
    }
    config = resolve(FinetuneConfig.model_validate(given))
    settings = config.model_dump(mode="json") | {"max_length": min(config.max_length, encoder.max_length)}
    most = dict.fromkeys(SPLITS, options.evaluated_examples)

    def grid(name: str, tasks: dict[str, dict[str, Any]]) -> Grid:
        return Grid(name, model, tasks, options.learning_rates, options.seeds, settings)

    sizes: dict[Literal["train", "validation", "test"], int] = {"train": options.train_examples, **most}
    if options.tasks:
        yield grid(
            "classification", {task: write_splits(task, sizes, folder / "data" / task) for task in options.tasks}
        )
    if options.retrieval is not None:
        tokenizer: Any = encoder.keyed.tokenizer
        closing = "" if encoder.keyed.opening else tokenizer.eos_token
        task = "squad_retrieval"
        yield grid("retrieval", {task: write_pairs(task, options.retrieval, closing, folder / "data" / task)})


def main() -> None:
    options = parse_options()
    if options.job:
        given = json.loads(options.job)
        job = Job(**given | {"grid": Grid(**given["grid"]), "cells": [Cell(**cell) for cell in given["cells"]]})
        options.answer.write_text(json.dumps(work(job)))
        return
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from biphase.files import write_json

    started = time.perf_counter()
    machine = describe(options)
    with tempfile.TemporaryDirectory() as folder:
        results = [
            measure_grid(grid, options.arms, options.rounds, options.threads)
            for grid in make_grids(options, Path(folder))
        ]
    if options.out is None:
        label = re.sub(r"[^a-z0-9]+", "-", str(machine["processor"]).lower()).strip("-")
        options.out = HERE / "results" / f"{date.today().isoformat()}-grid-{label}-{options.threads}-threads.json"
    document = {
        "what": "the evaluation grid, cells per hour, biphase and Hugging Face Trainer",
        "date": date.today().isoformat(),
        "machine": machine | {"load_after": os.getloadavg()[0]},
        "options": {
            key: str(value) if isinstance(value, Path) else value
            for key, value in vars(options).items()
            if key != "out"
        },
        "minutes": (time.perf_counter() - started) / 60,
        "results": results,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_json(options.out, document)
    for result in results:
        print_results(result)
    print(f"\nwritten to {options.out}")


if __name__ == "__main__":
    main()
