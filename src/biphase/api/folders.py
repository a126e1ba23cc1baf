"""Read the facts about each kind of folder, and check the data of a task."""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from biphase.api.finetuning import fields_of
from biphase.config import AnyPath, ModelName, load_config, read_yaml
from biphase.console import err
from biphase.corpus.shards import SHARD_SPLITS, ShardSet
from biphase.corpus.tokenizer import load_tokenizer
from biphase.embedding.recipe import EmbeddingRecipe
from biphase.encoder.models import find_folder
from biphase.errors import InputError
from biphase.files import ANEW, MARK, read_json_as, refuse_damaged
from biphase.finetuning.class_report import draw_confusion, read_report
from biphase.finetuning.kept import RECORD, KeptModel
from biphase.finetuning.scores import read_score, read_scores
from biphase.run import Run, find_model, read_checkpoint_manifest, read_done, read_metrics, read_recipe, whole_steps
from biphase.studies.cost import count_characters
from biphase.tasks import examples
from biphase.tasks.own import find_split_column
from biphase.tasks.sources import find_source, read_rows
from biphase.tasks.spec import find_task, is_own_task
from biphase.tasks.splits import Collection, TaskData

Facts = dict[str, Any]

LONG_TOKENS = 2048
"""The length above which documents count as long, in tokens: the paper's longest sample."""
BEGIN_CHARACTERS, BEGIN_DOCUMENTS = 200, 2
"""The number of characters shown of a document, and the number of documents shown."""

MODEL_KEYS = ("architectures", "model_type", "is_causal", "hidden_size", "num_hidden_layers", "vocab_size")


FOLDER_KINDS: Mapping[str, tuple[str, ...]] = {
    "checkpoint": ("model/config.json",),
    "shards": ("manifest.json",),
    "study": ("study.yaml",),
    "fine-tuned model": (RECORD,),
    "model": ("config.json",),
    "run": ("config.yaml",),
    "cell": ("score.json",),
    "task": ("task.yaml",),
    "scores": ("*/score.json", "*/*/score.json"),
    "tokenizer": ("tokenizer.json",),
    **dict.fromkeys(("embedding model", "converted model", "search index"), ()),
}
"""Kind of folder → the files that identify it without our mark; one of them is enough. A model folder may have a
config.yaml of its own, and has a tokenizer, so the order decides."""


def inspect(folder: ModelName, *, verify: bool = False, picture: AnyPath | None = None) -> Facts:
    """Return the `kind`, the `path` and other facts about a folder. For a model, also load it with transformers, and
    return `warnings` if its files say something else.

    Args:
        folder: Any folder that biphase wrote (shards, a run, a study, …), RUN@STEP, a model folder or a Hub id.
        verify: Read all files and compare their hashes.
        picture: Save the test-set confusion matrix of a fine-tuning to this .png, .svg or .pdf file.

    Raises:
        InputError: an unknown or damaged folder; the message names the file.
    """
    path, name = Path(folder), str(folder)
    if not path.is_dir():
        address = find_model(name)
        path = find_folder(name) if address == name else Path(address).parent  # the checkpoint of RUN@STEP
    facts = read_folder(path, verify)
    if facts["kind"].endswith("model") and "text_network" not in facts:
        from biphase.deploying.inspection import examine_model

        facts |= examine_model(Path(facts["path"]))
    if picture is not None:
        draw_confusion(facts["classes"] if facts["kind"] == "cell" else None, Path(picture))
    return facts


def read_folder(path: Path, verify: bool = False) -> Facts:
    """Read the facts about a folder from its files."""
    kind = find_kind(path)
    head = {"kind": kind, "path": str(path)}
    if verify and (marks := sorted(path.rglob(MARK))):
        for mark in marks:
            refuse_damaged(mark.parent, ANEW)
        head["verified"] = "every hash agrees"
    if kind == "shards":
        facts = shard_facts(path, verify)
    else:
        facts = run_facts(path, verify) if kind == "run" else read_facts(kind, path)
    return head | facts | head


def find_kind(path: Path) -> str:
    """Return the kind that a folder's mark states, or else the first of `FOLDER_KINDS` with a file in the folder."""
    if (path / MARK).exists():
        marked = str(read_json_as(path / MARK, dict[str, Any]).get("biphase"))
        if marked in FOLDER_KINDS and marked != "tokenizer":  # a model may have been saved beside that
            return marked
    for kind, patterns in FOLDER_KINDS.items():
        if any(next(path.glob(pattern), None) for pattern in patterns):
            return kind
    raise InputError(f"{path} holds nothing that biphase knows: no {', no '.join([*FOLDER_KINDS])}")


def read_facts(kind: str, path: Path) -> Facts:
    """Read the facts about a folder from its record and file names, for kinds without options."""
    match kind:
        case "checkpoint":
            manifest = read_checkpoint_manifest(path)  # this compares every file with its hash
            facts: Facts = {"state": "whole", **fields_of(manifest, "step is_decayed objective tokens_seen content")}
            facts |= {"data": manifest.data_fingerprint, "tokenizer": manifest.tokenizer_hash}
            return facts | fields_of(manifest, "parent carried")
        case "task":
            return find_task(str(path / "task.yaml")).model_dump(mode="json", exclude_defaults=True)
        case "search index":
            return read_json_as(path / "index.json", dict[str, Any])
        case "tokenizer":
            tokenizer = load_tokenizer(path)
            return {"vocab_size": len(tokenizer), **fields_of(tokenizer, "mask_token eos_token pad_token")}
        case "study":
            study = read_yaml(path / "study.yaml")
            facts = {key: study.get(key) for key in ("name", "title", "question")}
            facts["trained_runs"] = len(list(path.glob("trained/*.json")))
            facts["scores"] = len(list(path.glob("scores/*/*/score.json")))
            return facts | {"failed": [file.stem for file in sorted(path.glob("failed/*.json"))]}
        case "cell":
            score = read_score(path)
            facts = fields_of(score, "model task metric metrics num_examples num_steps diverged seconds")
            facts |= fields_of(score.config, "learning_rate seed") | {"never_predicted": score.never_predicted}
            return facts | {"classes": read_report(score)}
        case "scores":
            scores = read_scores(path)
            facts = {"scores": len(scores.scores), "models": scores.models, "tasks": tuple(sorted(scores.grids))}
            return facts | {"broken": [f"{file} ({reason})" for file, reason in scores.broken.items()]}
    return model_facts(path)


def shard_facts(path: Path, verify: bool) -> Facts:
    sets = [ShardSet(path, split) for split in SHARD_SPLITS]
    if verify:
        for shards in sets:
            shards.verify()
    manifest = sets[0].manifest
    facts: Facts = {"content": manifest.fingerprint, "tokenizer": manifest.tokenizer_hash}
    facts |= fields_of(manifest, "vocab_size dtype") | {"num_shards": len(manifest.shards)}
    if manifest.duplicates is not None:
        facts["exact_copies"] = manifest.duplicates
    tokenizer = sets[0].tokenizer
    for shards in sets:
        total = manifest.splits[shards.split]
        facts[shards.split] = fields_of(total, "documents tokens text_bytes empty_texts")
        if shards.num_documents:
            lengths = np.diff(shards.document_ends, prepend=0)
            facts[shards.split] |= {
                "mean_document_tokens": float(lengths.mean()),
                "median_document_tokens": float(np.median(lengths)),
                f"share_above_{LONG_TOKENS}_tokens": float(np.mean(lengths > LONG_TOKENS)),
                "bytes_per_token": total.text_bytes / total.tokens,
            }
        begins = [shards.document(number)[:80] for number in range(min(BEGIN_DOCUMENTS, shards.num_documents))]
        texts = [" ".join(str(tokenizer.decode(tokens)).split())[:BEGIN_CHARACTERS] for tokens in begins]
        facts |= {f"{shards.split}_begins": texts} if texts else {}
    return facts | ({"verified": "every hash agrees"} if verify else {})


def run_facts(path: Path, verify: bool) -> Facts:
    if (path / "stages").is_dir():
        embedding = load_config(EmbeddingRecipe, path / "config.yaml")
        stages = [stage.name for stage in embedding.stages]
        ended = [name for name in stages if (path / "stages" / name / "done.json").exists()]
        state = "done" if (path / "done.json").exists() else "not done"
        return {"state": state, "model": embedding.model, "out": embedding.out, "stages": stages, "done": ended}
    run = Run(path)
    recipe, end = read_recipe(run), read_done(run)
    train, steps = read_metrics(run, "train"), whole_steps(run)
    facts: Facts = {
        "state": "not done" if end is None else "done",
        "step": train[-1]["step"] if train else 0,
        "num_steps": recipe.num_steps,
        "curriculum": [f"{phase.label} {phase.steps}" for phase in recipe.curriculum],
        "checkpoints": steps,
    }
    if train:
        facts |= {name: train[-1][name] for name in ("objective", "loss", "tokens_seen")}
    names = ("step", "objective", "loss", "accuracy", "bits_per_byte")
    facts["validation"] = [{name: row[name] for name in names} for row in read_metrics(run, "validation")[-3:]]
    for step in steps:
        read_checkpoint_manifest(run.steps / str(step), check_files=verify)
    if verify:
        read_json_as(path / "environment.json", dict[str, Any])
        facts["verified"] = f"{len(steps)} checkpoints are whole"
    return facts


def model_facts(path: Path) -> Facts:
    config = read_json_as(path / "config.json", dict[str, Any])
    facts = {key: config[key] for key in MODEL_KEYS if key in config}
    if config.keys() & {"text_config", "vision_config"}:
        facts["text_network"] = f"one of several; biphase convert {path} FOLDER writes it alone"
    if (path / "modules.json").exists():
        modules = read_json_as(path / "modules.json", list[dict[str, Any]])
        facts["modules"] = [str(module.get("type", "")).rpartition(".")[2] for module in modules]
    if files := sorted(path.glob("onnx/*.onnx")):
        facts["onnx"] = [file.name for file in files]
    if (path / RECORD).exists():
        record = read_json_as(path / RECORD, KeptModel)
        facts |= {"task": record.task.name, "family": record.task.family}
        facts["calibration"] = record.calibration.model_dump(exclude_defaults=True)
        facts |= fields_of(record.config, "learning_rate seed")
    return facts


def check_task(task: str, data: Path | None = None) -> Facts:
    """Read and check all data of a task; return facts about it. Raises `InputError` for the first mistake.

    Args:
        task: The name of a task, such as snli, or a YAML file that describes one.
        data: The folder with the task's original data; without it, the package's or the Hub's.
    """
    source = find_source(find_task(task), data)
    loaded = examples.load_examples(source, judged_only=False)
    rows: list[Facts] = []
    drawn: list[str] = []
    labels: dict[str, dict[str, int]] = {}
    if isinstance(loaded, Collection):
        rows = collection_rows(loaded)
    else:
        drawn = [split for split in loaded.splits if split not in source.splits]
        is_known = is_own_task(loaded.task) or source.form.splits.is_divided
        trained = () if is_known or not drawn else [row for _, row in read_rows(source, "train")]
        if name := find_split_column(trained)[0]:
            remedy = f"name the file for each split, with `split_column: {name}`"
            err.print(f"'{name}' names the split of each row, but is not used: {remedy}")
        for split, split_examples in loaded.splits.items():
            num_copies = len(split_examples) - len({examples.input_of(example) for example in split_examples})
            sizes = lengths([*map(count_characters, split_examples)])
            rows.append({"part": split, "examples": len(split_examples), "copies_within": num_copies, **sizes})
            counts = Counter(label for example in split_examples for label in labels_of(example, loaded.task.classes))
            labels[split] = dict(counts.most_common())
    facts: Facts = {"task": loaded.task.name, "family": loaded.task.family, "source": source.name}
    facts["files"] = {part: [str(path) for path in paths] for part, paths in source.files.items()}
    facts |= {"drawn": drawn, "rows": rows, "labels": labels, "classes": list(loaded.task.classes)}
    if isinstance(loaded, TaskData) and loaded.task.duplicates == "drop":
        facts["copies_left_out"] = loaded.num_copies
    return facts | {"left_out": loaded.left_out, "also_in_train": examples.count_shared(loaded)}


def collection_rows(data: Collection) -> list[dict[str, Any]]:
    sizes = lengths([len(text) for text in data.documents.values()])
    rows = [{"part": "documents", "number": len(data.documents), "judged": None, **sizes}]
    queries: dict[str, list[str]] = {"train": list(dict.fromkeys(query for query, _ in data.train))}
    num_judged = {"train": len(data.train)}
    for split, judgements in data.relevance.items():
        queries[split], num_judged[split] = list(judgements), sum(map(len, judgements.values()))
    for name, ids in queries.items():
        sizes = lengths([len(data.queries[id]) for id in ids])
        rows.append({"part": f"queries of {name}", "number": len(ids), "judged": num_judged[name], **sizes})
    return rows


def lengths(sizes: Sequence[int]) -> dict[str, float | None]:
    """Return the median and the largest size; None if there are no sizes."""
    return {"median_characters": statistics.median(sizes) if sizes else None, "longest": max(sizes, default=None)}


def labels_of(example: examples.AnyExample, classes: Sequence[str]) -> list[str]:
    """Return the labels, the tags or the kind of question of an example."""
    match example:
        case examples.LabelledText(label=float()):
            return ["numbers"]
        case examples.Question():
            return ["answerable" if example.answers else "unanswerable"]
    return [classes[number] for number in examples.classes_of(example)]
