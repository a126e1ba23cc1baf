"""A model's name → the folder of its files, their hash, and the longest text that it reads.

A name is a biphase run (`RUN` or `RUN@STEP`), a Hugging Face folder, or a Hub id (`ID` or `ID@REVISION`). Nothing here
loads a model or PyTorch, so that planning a grid of thousands of cells takes no longer than reading files.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from biphase import hub
from biphase.corpus.tokenizer import TOKENIZER_FILES
from biphase.errors import InputError
from biphase.files import MARK, Stamp, content_hash, hash_path, read_json_as, refuse_changed, refuse_damaged, stamp_of
from biphase.run import find_model, read_checkpoint_manifest

IDENTIFYING_FILES = (
    *("config.json", "*.safetensors", hub.INDEX),
    *("tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "*.model", "vocab*", "merges*"),
)
Stamps = Mapping[Path, Stamp | None]
"""The stamps of a model folder's files; None for a file that vanished meanwhile."""
STAMPED_FILES = (
    *(*IDENTIFYING_FILES, MARK, "biphase.json", "golden.json", "trained_rows.u64", "modules.json", "*sentence*.json"),
    *("[0-9]_*/*", "model/*"),
)
"""The files of a model folder that a reader may open: also a kept model's records, golden vectors, further modules,
and the model in a checkpoint."""

fetch_once = lru_cache(hub.fetch_model)
"""`fetch_model`, cached because a grid asks for the same model again and again."""


@dataclass(frozen=True)
class Encoder:
    """An encoder with everything that decides a cell's name and result. `finetuning.heads.open_encoder` adds its
    network and tokenizer. Cells share both: they train only copies."""

    name: str
    """The name in its scores."""
    hash: str
    """The hash of configuration, weights and tokenizer."""
    max_length: int
    """The number of the network's positions, from its configuration; after loading, from its proof."""
    folder: Path = Path()
    """The folder of its files."""
    backbone: Any = field(default=None, compare=False, repr=False)
    """The network without a head; None before it is loaded."""
    tokenizer: Any = field(default=None, compare=False, repr=False)
    """Its `finetuning.encoding.HashedTokenizer`; None before it is loaded."""
    stamps: Stamps = field(default_factory=dict, compare=False, repr=False)
    """The stamps of its files (`stamp_model`), from before they were read."""


def identify(name: str) -> Encoder:
    """Read the facts that name a model's cells. Raises `InputError` for a folder that lacks something that fine-tuning
    needs."""
    folder = find_folder(name)
    stamps = stamp_model(folder)
    # `count_positions` needs some fields of the configuration. The file has them, unless it relies on a default of its
    # type, or on another name.
    try:
        content = read_json_as(folder / "config.json", dict[str, Any])
    except InputError:  # `load_model_config` reports it with the messages for foreign models
        content = {}
    says_all = "max_position_embeddings" in content and not content.keys() & {"auto_map", "text_config"}
    if says_all and ("pad_token_id" in content or content.get("model_type") not in hub.AFTER_PADDING):
        config: Any = SimpleNamespace(**{"model_type": None, "pad_token_id": None} | content)
    else:
        config = hub.load_model_config(folder)
    max_length = hub.count_positions(config)
    return Encoder(name, hash_model(folder), max_length, folder, stamps=stamps)


def find_folder(name: str) -> Path:
    """Find the folder of a model; download a Hub model once (`biphase.hub`).

    Raises `InputError` naming missing files (configuration, safetensors weights, tokenizer), a configuration that names
    what is never run, and changed files of a folder that biphase wrote.
    """
    address = find_model(name)
    folder = Path(address)
    is_here = folder.is_dir()
    if not is_here:
        if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?(@.*)?", address):  # `./x` as it is: a path is never an id
            raise InputError(f"{name} is neither a run, nor a folder, nor a Hub id")
        folder = fetch_once(address)
    if not (folder / "config.json").exists():
        raise InputError(f"{name} has no config.json: it is not a Hugging Face model folder")
    hub.read_config(folder)
    hub.refuse_pickles(folder)
    if not any(path for pattern in TOKENIZER_FILES for path in folder.glob(pattern)):
        raise InputError(f"{name} has no tokenizer files (tokenizer.json or the like); save its tokenizer beside it")
    if is_here:  # folders of the Hub have no mark, and the Hub checks its own hashes
        with unreplaced(folder):
            refuse_damaged(folder, f"make it again, or delete {MARK} where you changed it yourself")
    return folder


def find_ranker(name: str) -> Path:
    """Find the folder of a model that ranks pairs of texts. Raises `InputError` as `find_folder` does, and for a model
    without a head that gives one score."""
    folder = find_folder(name)
    config = hub.read_config(folder)
    if not config.kind.endswith("ForSequenceClassification") or len(config.id2label or (0, 1)) != 1:
        remedy = f"train one: biphase finetune {name} TASK ranking=pairs --keep RANKER"
        described = config.kind or "a network without a head"
        raise InputError(f"{name} is {described}, which has no head with one score for a pair of texts; {remedy}")
    return folder


def list_files(folder: Path, patterns: Iterable[str]) -> list[Path]:
    """List the files in a folder that match one of the patterns, sorted."""
    return sorted({*chain(*map(folder.glob, patterns))})


def stamp_model(folder: Path) -> Stamps:
    """Return the stamps of all files of a model folder that a reader may open."""
    return {path: stamp_of(path) if path.exists() else None for path in list_files(folder, STAMPED_FILES)}


@contextmanager
def unreplaced(folder: Path, stamps: Stamps | None = None) -> Iterator[Path]:
    """Yield a model folder for a block that reads it. Raises `InputError` at the end if one of its files was replaced
    since it was stamped: before the block, unless `stamps` are from an earlier reader of the same files. What was read
    would then be a mixture of two models."""
    stamps = stamps or stamp_model(folder)
    try:
        yield folder
    finally:  # in place of any error that a mixture caused
        if stamp_model(folder) != stamps:
            raise InputError(f"files of {folder} were replaced while it was read: run the command again")


def hash_model(folder: Path) -> str:
    """Hash all files that decide an encoder's results. Raises `InputError` for a changed file of a checkpoint of
    ours."""
    files = list_files(folder, IDENTIFYING_FILES)
    checkpoint = folder.parent
    if folder.name == "model" and (checkpoint / "manifest.json").exists():
        remedy = f"delete {checkpoint} and rerun its run"
        written = read_checkpoint_manifest(checkpoint, check_files=False).files
        names = [f"model/{path.name}" for path in files]
        refuse_changed(checkpoint, {name: written.get(name, "") for name in names}, remedy)
    return content_hash([[path.name, hash_path(path)] for path in files])
