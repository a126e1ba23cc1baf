"""The examples of a task as token ids, made once for each tokenizer and kept on disk.

    encoded/TASK-KEY/  arrays.safetensors  values.json  hashes.json

Arrays are mapped into memory, so that processes share them. What was written is checked by its hash before it is used.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from safetensors.torch import load_file

from biphase import console
from biphase.errors import InputError
from biphase.files import (
    content_hash,
    file_hash,
    locked,
    read_json,
    read_json_as,
    refuse_links,
    whole_folder,
    write_json,
)
from biphase.finetuning.config import ENCODING_SETTINGS, EVALUATED_SPLITS, FinetuneConfig
from biphase.finetuning.encoding import EncodedTask, HashedTokenizer
from biphase.finetuning.families import module_of
from biphase.tasks.examples import Collection, TaskData, count_shared, input_of, limit_evaluation, load_examples
from biphase.tasks.sources import TaskSource
from biphase.tasks.spec import TASK_SPLITS

ENCODING = 6
"""Part of the name of what is kept on disk: raise it when the same text no longer gives the same arrays, or when they
are kept in another form."""

ARRAYS, VALUES, HASHES = "arrays.safetensors", "values.json", "hashes.json"


def cache_folder() -> Path:
    """$BIPHASE_CACHE, else biphase/ in the user's cache folder."""
    given = os.environ.get("BIPHASE_CACHE")
    return Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "biphase"


def load_encoded(source: TaskSource, tokenizer: HashedTokenizer, config: FinetuneConfig) -> EncodedTask[Any]:
    """The examples of a source as token ids, from the disk; made first where they are not there.

    They are kept in the `cache_folder`. It is safe to delete.
    """
    task = source.task
    settings = {name: getattr(config, name) for name in ("max_length", "max_eval_examples")}
    settings |= {name: getattr(config, name) for name in ENCODING_SETTINGS[task.family]}
    settings |= {"ranking": config.ranking} if config.ranking != "embeddings" else {}
    specials = [tokenizer.hash, tokenizer.opening, tokenizer.closing]
    key = content_hash([ENCODING, source.hash, specials, settings])
    folder = cache_folder() / "encoded" / f"{task.name}-{key[:24]}"
    if not folder.exists():
        refuse_links(folder.parent)
        with locked(folder.with_name(f".{folder.name}.lock"), wait=True):
            if not folder.exists():  # another process may have made it while this one waited
                encoded = encode_source(source, tokenizer, config)
                # What training and scores will not see, unless its reader has told so.
                if encoded.left_out and source.task.missing == "refuse":
                    console.err.print(f"{task.name}: {encoded.left_out:,} rows without a gold label are left out")
                counts = {name: split.num_truncated for name, split in encoded.splits.items()}
                if any(counts.values()):
                    cut = ", ".join(f"{number:,} of {name}" for name, number in counts.items() if number)
                    console.err.print(f"{task.name}: cut at {config.max_length:,} tokens: {cut}")
                save_encoded(folder, encoded)
    return read_encoded(folder, module_of(task.family, config).split_kind)  # type: ignore[arg-type]


def encode_source(source: TaskSource, tokenizer: HashedTokenizer, config: FinetuneConfig) -> EncodedTask[Any]:
    data = load_data(source, config)
    for split, number in count_shared(data).items():
        if number:
            console.err.print(f"{source.task.name}: {number:,} inputs of {split} stand in train too")
    return module_of(source.task.family, config).encode_task(data, tokenizer, config)


def load_data(source: TaskSource, config: FinetuneConfig) -> TaskData[Any] | Collection:
    assert config.judged_only is not None, "the configuration is settled"
    data = load_examples(source, judged_only=config.judged_only)
    return data if config.max_eval_examples is None else limit_evaluation(data, config.max_eval_examples)


def load_inputs(source: TaskSource, config: FinetuneConfig) -> dict[str, list[Any]]:
    """What the network saw of each example that is predicted, by split, in the order of the predictions."""
    data = load_data(source, config)
    if isinstance(data, Collection):
        queries = data.queries.items()
        return {split: [text for id, text in queries if id in judged] for split, judged in data.relevance.items()}
    return {split: [input_of(example) for example in data.splits[split]] for split in EVALUATED_SPLITS}


def save_encoded(folder: Path, encoded: EncodedTask[Any]) -> None:
    """Write a folder, whole or not at all. What several splits share (the documents of a retrieval) is written once."""
    arrays: dict[str, np.ndarray] = {}
    values: dict[str, Any] = {}
    names: dict[int, str] = {}  # of each value, by its id(): where it was met first
    shared: dict[str, str] = {}
    for split_name, split in encoded.splits.items():
        for name, value in leaves_of(split, f"{split_name}."):
            first = names.setdefault(id(value), name)
            if first != name:
                shared[name] = first
            elif isinstance(value, np.ndarray):
                arrays[name] = value
            else:
                values[name] = value
    with whole_folder(folder) as part:
        save_file(arrays, part / ARRAYS)
        content = {"left_out": encoded.left_out, "values": values, "shared": shared}
        (part / VALUES).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
        write_json(part / HASHES, {name: file_hash(part / name) for name in (ARRAYS, VALUES)})


def leaves_of(record: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values in a dataclass and in those inside it, by dotted names: `train.texts.tokens_T`."""
    for item in fields(record):
        value = getattr(record, item.name)
        if is_dataclass(value):
            yield from leaves_of(value, f"{prefix}{item.name}.")
        else:
            yield f"{prefix}{item.name}", value


@lru_cache(maxsize=8)
def read_encoded(folder: Path, kind: Any) -> EncodedTask[Any]:
    """Read splits of a kind that `save_encoded` wrote; arrays are mapped from the disk, read-only.

    Raises `InputError` where a file is not the one that was written.
    """
    written = read_json_as(folder / HASHES, dict[str, str])
    for name in (ARRAYS, VALUES):
        if not (folder / name).is_file() or file_hash(folder / name) != written.get(name):
            raise InputError(f"{folder / name} is damaged; delete its folder and rerun, which makes it again")
    content = read_json(folder / VALUES)
    leaves = content["values"]
    for name, tensor in load_file(folder / ARRAYS).items():  # torch's: numpy's would copy the file into memory
        leaves[name] = tensor.numpy()
        leaves[name].flags.writeable = False
    leaves |= {name: leaves[first] for name, first in content["shared"].items()}
    return EncodedTask({name: build_record(kind, leaves, f"{name}.") for name in TASK_SPLITS}, content["left_out"])


def build_record(kind: Any, leaves: dict[str, Any], prefix: str) -> Any:
    """The dataclass of which `leaves_of` gave the values."""
    values = {}
    for item in fields(kind):
        name = f"{prefix}{item.name}"
        is_nested = is_dataclass(item.type)
        values[item.name] = build_record(item.type, leaves, f"{name}.") if is_nested else leaves[name]
    return kind(**values)
