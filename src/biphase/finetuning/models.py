"""A model's name → its folder and what of it names a cell, known without loading it and without PyTorch.

A name is a run of ours (`RUN` or `RUN@STEP`), a Hugging Face folder, or a hub id (`ID` or `ID@REVISION`).
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from biphase.corpus.tokenizer import TOKENIZER_FILES
from biphase.errors import InputError
from biphase.files import MARK, content_hash, file_hash, read_hashed, read_json_as, refuse_damaged
from biphase.flops import AFTER_PADDING, count_positions
from biphase.hub import INDEX, fetch_model, refuse_pickles
from biphase.run import find_model

IDENTIFYING_FILES = (
    *("config.json", "*.safetensors", INDEX),
    *("tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "*.model", "vocab*", "merges*"),
)

FileStamps = tuple[tuple[str, int, int], ...]
"""Path, size and time of change of each file that decides what an encoder does."""

fetch_once = lru_cache(fetch_model)
"""A grid asks for the same model again and again."""


@dataclass(frozen=True)
class ModelFingerprint:
    """The properties of a model that decide a cell's name."""

    hash: str
    """The hash of configuration, weights and tokenizer."""
    max_length: int
    """Tokens that the network has positions for, by its configuration."""


def identify(name: str) -> ModelFingerprint:
    """Find out what names the cells of a model. Raises `InputError` where its folder lacks what fine-tuning needs."""
    folder = find_folder(name)
    return ModelFingerprint(hash_files(stamp_files(folder)), count_positions(read_model_config(folder)))


def find_folder(name: str) -> Path:
    """The folder of a model; one from the hub is downloaded once (`biphase.hub`).

    Raises `InputError` naming what is missing there (configuration, weights as safetensors, tokenizer), or what in a
    folder that biphase wrote is not as it was written.
    """
    found = find_model(name)
    folder = Path(found)
    if not folder.is_dir():
        if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?(@.*)?", found):  # `./x` as it is: a path is never an id
            raise InputError(f"{name} is neither a run, nor a folder, nor a hub id")
        folder = fetch_once(found)
    if not (folder / "config.json").exists():
        raise InputError(f"{name} has no config.json: it is not a Hugging Face model folder")
    refuse_pickles(folder)
    if not any(path for pattern in TOKENIZER_FILES for path in folder.glob(pattern)):
        raise InputError(f"{name} has no tokenizer files (tokenizer.json or the like); save its tokenizer beside it")
    refuse_damaged(folder, f"make it again, or delete {MARK} where you changed it yourself")
    return folder


def stamp_files(folder: Path) -> FileStamps:
    paths = sorted({path for pattern in IDENTIFYING_FILES for path in folder.glob(pattern)})
    return tuple((str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in paths)


@lru_cache
def hash_files(stamps: FileStamps) -> str:
    """One hash of all these files. Raises `InputError` where one of a checkpoint of ours is not as it was written."""
    hashes = {Path(path): file_hash(Path(path)) for path, _, _ in stamps}
    folder = next(iter(hashes)).parent
    if folder.name == "model" and (folder.parent / "manifest.json").exists():
        remedy = f"delete {folder.parent} and rerun its run"
        written = read_hashed(folder.parent / "manifest.json", dict[str, Any], remedy).get("files")
        for path, digest in hashes.items():
            if not isinstance(written, dict) or written.get(f"model/{path.name}") != digest:
                raise InputError(
                    f"checkpoint {folder.parent} is damaged: {path} is not as it was written; rerun its run"
                )
    return content_hash([[path.name, digest] for path, digest in hashes.items()])


def read_model_config(folder: Path) -> Any:
    """The fields that `count_positions` asks for: from the file of a configuration, or from transformers where the file
    leaves to it what a type of network has by default, or another name for it."""
    try:
        content = read_json_as(folder / "config.json", dict[str, Any])
    except InputError:  # said below in the words for a model that somebody else made
        content = {}
    says_all = "max_position_embeddings" in content and not content.keys() & {"auto_map", "text_config"}
    if says_all and ("pad_token_id" in content or content.get("model_type") not in AFTER_PADDING):
        return SimpleNamespace(**{"model_type": None, "pad_token_id": None} | content)
    from biphase.encoder.configuration import load_model_config

    return load_model_config(folder)
