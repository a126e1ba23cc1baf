"""A mistaken command → the command that the user probably meant, by the kind of file or folder that it names."""

from collections.abc import Sequence
from pathlib import Path

import yaml

from biphase.config import BUNDLED
from biphase.errors import InputError
from biphase.files import parse_yaml

MODEL_VERBS = {"inspect", "export", "trim", "check", "push", "convert", "finetune", "evaluate", "predict", "score"}
TEXT_VERBS = {"tokenizer train", "tokenizer compare", "prepare", "init task", "init study", "init slurm"}
TEXT_VERBS |= {"search", "trim", "study advise"}
ROW_VERBS = {"report results", "judge", "predict DATA", "score DATA", "finetune DATA"}
STUDY_VERBS = {f"study {verb}" for verb in ("plan", "declare", "run", "status", "report", "bundle", "advise")}

USES: dict[str, tuple[str, set[str], str]] = {
    "run": ("a training run", MODEL_VERBS | STUDY_VERBS, "export {} encoder"),
    "shards": ("a folder of shards", {"inspect", "study advise"}, "pretrain tiny data.shards={}"),
    "study": ("a study", {"inspect", "demo", "init slurm", *STUDY_VERBS}, "study status {}"),
    "model": ("a model", MODEL_VERBS | {"tokenizer from"}, "finetune {} TASK"),
    "fine-tuned model": ("a fine-tuned model", MODEL_VERBS | {"tokenizer from"}, "predict {} FILE"),
    "embedding model": ("an embedding model", MODEL_VERBS | {"tokenizer from"}, "search TEXT QUESTION --model {}"),
    "scores": ("a folder of scores", {"inspect"}, "evaluate --out {}"),
    "search index": ("a search index", {"inspect", "search", "evaluate"}, "search {} QUESTION"),
    "recipe": ("a recipe", {"pretrain", "init recipe"}, "pretrain {}"),
    "embedding recipe": ("an embedding recipe", {"embed", "init recipe"}, "embed {}"),
    "study file": ("a study", {"init study", "init slurm", *STUDY_VERBS}, "study plan {}"),
    "task": ("a task", {"task check", "finetune DATA"}, "finetune MODEL {}"),
    "table": ("a table", TEXT_VERBS | ROW_VERBS - {"finetune DATA"}, "init task {}"),
}
"""Kind of file or folder → its name, the commands that take it, and a command to suggest."""
MEANT_COMMANDS = {
    ("model", "embed"): "embed embed model={} out=FOLDER",
    ("model", "pretrain"): "init recipe --model {}",
    ("model", "search"): "search TEXT QUESTION --model {}",
    ("table", "pretrain"): "prepare {} --tokenizer TOKENIZER --out shards",
    ("task", "evaluate"): "evaluate MODEL --tasks {}",
}
"""(kind, mistaken command) → the command that the user probably meant."""
TELLING_KEYS = {"arms": "study file", "curriculum": "recipe", "stages": "embedding recipe", "family": "task"}
"""Key of a YAML file → the kind of file that it reveals."""
TABLE_ENDINGS = {".csv", ".tsv", ".xlsx", ".parquet", ".jsonl"}
GROUPED = (["init"], ["tokenizer"], ["task"], ["study"], ["report"])
"""The first words of two-word commands."""


def find_meant(words: Sequence[str]) -> str | None:
    """Return a message that suggests another command if an argument is a file or folder of a kind that this command
    does not take; else None. Look at the first argument, at the data of commands that take a model and data, and at all
    models of `evaluate`."""
    num_verbs = 1 + (words[:1] in GROUPED)
    verb, rest = " ".join(words[:num_verbs]), words[num_verbs:]
    places = {
        "evaluate": [verb] * len(rest),
        **{name: [name, f"{name} DATA"] for name in ("finetune", "predict", "score")},
    }
    for word, used in zip(rest, places.get(verb, [verb]), strict=False):
        if word.startswith("-"):
            break
        kind = kind_of_word(word)
        if kind is not None and used not in USES[kind][1]:
            name, verbs, command = USES[kind]
            is_swapped = f"{verb} DATA" in verbs
            command = f"{verb} MODEL {{}}" if is_swapped else MEANT_COMMANDS.get((kind, verb), command)
            return f"{word} is {name}, which `biphase {verb}` does not take here; try `biphase {command.format(word)}`"
    return None


def kind_of_word(word: str) -> str | None:
    """Return the kind of a folder, a file, or the name of a bundled file; None for anything else."""
    from biphase.api.folders import find_kind
    from biphase.tasks.spec import task_table

    path = Path(word)
    if path.suffix in TABLE_ENDINGS and path.is_file():
        return "table"
    try:
        if path.is_dir():
            return kind if (kind := find_kind(path)) in USES else None
        named = [path, *(BUNDLED / kind / f"{word}.yaml" for kind in ("recipes", "studies"))]
        file = next((file for file in named if file.suffix in (".yaml", ".yml") and file.is_file()), None)
        tree = parse_yaml(file.read_text(encoding="utf-8")) if file else None
    except (InputError, OSError, UnicodeError, yaml.YAMLError):  # the command's own message names it
        return None
    kinds = [kind for key, kind in TELLING_KEYS.items() if isinstance(tree, dict) and key in tree]
    return next(iter([*kinds, *(["task"] if word in task_table() else [])]), None)
