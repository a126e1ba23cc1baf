"""A task's source → its splits as token ids with targets, made once for each tokenizer and kept on disk:

    encoded/TASK-KEY.safetensors

Arrays are mapped into memory, so that processes share them. A file is checked by its hash before use.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from safetensors.torch import load_file

from biphase import console
from biphase.encoder.models import Encoder
from biphase.errors import InputError
from biphase.files import content_hash, locked, make_once, refuse_links
from biphase.finetuning.config import BM25_VERSION, FinetuneConfig
from biphase.finetuning.encoding import EncodedTask, HashedTokenizer
from biphase.finetuning.families import family_module
from biphase.tasks.examples import count_shared, load_examples
from biphase.tasks.sources import TaskSource
from biphase.tasks.spec import TASK_SPLITS

ENCODING = 9
"""A part of every file's name. Raise it when the arrays of a text or the form of the file change."""

NO_ARRAYS = "json"
"""The name of the array with all other values, as JSON, because the header of a safetensors file ends at 100 MB."""

encodings: dict[Path, EncodedTask] = {}
"""The tasks that were loaded last; the oldest are dropped first."""
NUM_ENCODINGS = 8


def cache_folder() -> Path:
    """Find the folder: $BIPHASE_CACHE, else biphase/ in the user's cache folder."""
    if folder := os.environ.get("BIPHASE_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "biphase"


def load_encoded(source: TaskSource, encoder: Encoder, config: FinetuneConfig) -> EncodedTask:
    """Read the encoded splits of a source from the `cache_folder`, which is safe to delete; encode them first if they
    are not there. Raises `InputError` for a `max_length` without room for text, or beyond the network's positions."""
    task, tokenizer, folder = source.task, encoder.tokenizer, cache_folder() / "encoded"
    least, longest = len(tokenizer.opening) + 3, config.max_length
    if longest > encoder.max_length:
        raise InputError(f"max_length {longest}: {encoder.name} has positions for {encoder.max_length} tokens")
    if longest < least:
        raise InputError(f"max_length {longest} leaves no room for text: give {least} or more")
    keys = ("max_length", "max_eval_examples", *task.kind.encoding_settings)
    settings = {name: getattr(config, name) for name in keys}
    if settings.get("ranking") == "pairs":
        settings["bm25"] = BM25_VERSION
    special = [tokenizer.opening, tokenizer.closing, tokenizer.between]
    key = content_hash([ENCODING, source.hash, [tokenizer.hash, *special], settings])
    path = folder / f"{task.name}-{key[:24]}.safetensors"
    if path not in encodings:
        refuse_links(folder)
        with locked(path.with_name(f".{path.name}.lock"), wait=True):
            make_once(path, lambda part: save_encoded(part, encode_source(source, tokenizer, config)))
        encodings[path] = read_encoded(path, family_module(task, config).Split)
        while len(encodings) > NUM_ENCODINGS:
            del encodings[next(iter(encodings))]
    return encodings[path]


def encode_source(source: TaskSource, tokenizer: HashedTokenizer, config: FinetuneConfig) -> EncodedTask:
    """Encode the examples of a source. Prints counts of inputs that are also in train, left out, or cut."""
    assert config.judged_only is not None, "the configuration is settled"
    task = source.task
    data = load_examples(source, config.judged_only, config.max_eval_examples)
    for split, num_shared in count_shared(data).items():
        if num_shared:
            console.err.print(f"{task.name}: {num_shared:,} inputs of {split} are in train too")
    splits = family_module(task, config).encode(data, tokenizer, config)
    if data.left_out and task.missing == "refuse":  # else `load_examples` has printed it
        console.err.print(f"{task.name}: {data.left_out:,} rows without a gold label are left out")
    cut = [f"{split.num_truncated:,} of {name}" for name, split in splits.items() if split.num_truncated]
    if cut:
        console.err.print(f"{task.name}: cut at {config.max_length:,} tokens: {', '.join(cut)}")
    return splits, data.left_out


def save_encoded(path: Path, encoded: EncodedTask) -> None:
    """Write one file. Values that several splits share (documents of a retrieval task) are written once."""
    splits, num_left_out = encoded
    leaves = dict(chain(*(leaves_of(split, f"{name}.") for name, split in splits.items())))
    names: dict[int, str] = {}  # id() of a value → its first name
    first_names = {name: names.setdefault(id(value), name) for name, value in leaves.items()}
    arrays = {name: leaves[name] for name in names.values() if isinstance(leaves[name], np.ndarray)}
    values = {name: leaves[name] for name in names.values() if name not in arrays}
    content = {"left_out": num_left_out, "values": values, "places": first_names}
    arrays[NO_ARRAYS] = np.frombuffer(json.dumps(content, ensure_ascii=False).encode(), np.uint8)
    path.touch()
    mode = path.stat().st_mode  # safetensors ignores the umask, and lets only the owner read its files
    save_file(arrays, path)
    path.chmod(mode)


def leaves_of(record: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of a dataclass, and of dataclasses inside it, by dotted names: `train.texts.tokens_T`."""
    for item in fields(record):
        value = getattr(record, item.name)
        if is_dataclass(value):
            yield from leaves_of(value, f"{prefix}{item.name}.")
        else:
            yield f"{prefix}{item.name}", value


def read_encoded(path: Path, kind: Any) -> EncodedTask:
    """Read splits that `save_encoded` wrote; arrays are mapped from the disk, read-only."""
    # PyTorch's `load_file`: NumPy's would copy the file into memory.
    leaves: dict[str, Any] = {name: tensor.numpy() for name, tensor in load_file(path).items()}
    for array in leaves.values():
        array.flags.writeable = False
    content = json.loads(leaves.pop(NO_ARRAYS).tobytes())
    leaves |= content["values"]
    leaves = {name: leaves[first] for name, first in content["places"].items()}
    return {name: build_record(kind, leaves, f"{name}.") for name in TASK_SPLITS}, content["left_out"]


def build_record(kind: Any, leaves: dict[str, Any], prefix: str) -> Any:
    """Build a dataclass from the values that `leaves_of` gave."""
    values = {}
    for item in fields(kind):
        name = f"{prefix}{item.name}"
        values[item.name] = build_record(item.type, leaves, f"{name}.") if is_dataclass(item.type) else leaves[name]
    return kind(**values)
