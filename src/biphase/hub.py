"""A hub id → the folder of its files at one commit, which names it from then on. Weights as pickles are refused.

The commit that is in the cache already is taken before a newer one, so that a run that is started again, on a machine
without network too, finds the model that it began with.
"""

from pathlib import Path
from typing import Literal

from biphase import console
from biphase.errors import InputError, first_line
from biphase.files import content_hash, file_hash, read_json

FILES = {"tokenizer": ["*.json", "*.model", "*.txt"], "model": ["*.json", "*.model", "*.txt", "*.safetensors"]}
"""Neither code nor pickles."""
OTHER_FOLDERS = {"tokenizer": ["*/*"], "model": ["[!0-9]*/*", "*/*/*"]}
"""What is left where it is: of an embedding model, modules are in folders such as `1_Pooling`."""

INDEX = "model.safetensors.index.json"
"""What names the files of weights that are too large for one."""

PICKLED_WEIGHTS = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt")


def fetch_model(id: str, revision: str | None = None, kind: Literal["model", "tokenizer"] = "model") -> Path:
    """A folder as it is, or that of a hub repository, named by its commit; what is not in the cache is downloaded, of a
    tokenizer no weights.

    Raises:
        InputError: no such repository or revision, or neither network nor cache has it; at once for a path, and for a
            name in a folder that is here.
    """
    path = Path(id)
    if path.is_dir():
        return path
    if id.startswith((".", "/", "~")) or id.count("/") > 1:
        raise InputError(f"{kind} {id} is not a folder")
    from huggingface_hub import snapshot_download, try_to_load_from_cache
    from huggingface_hub.errors import HTTPError

    cached: Path | None = None
    try:
        found = try_to_load_from_cache(id, "config.json", revision=revision)
        cached = Path(found).parent if isinstance(found, str) else None
        if cached is None and path.parent.name and path.parent.is_dir():
            raise NotADirectoryError(f"{path.parent} is a folder here, and only that was looked into")
        commit = cached.name if cached else revision
        folder = Path(
            snapshot_download(id, revision=commit, allow_patterns=FILES[kind], ignore_patterns=OTHER_FOLDERS[kind])
        )
    except (OSError, HTTPError, ValueError) as error:
        if cached is None:
            named = f"{id} at revision {revision}" if revision else id
            raise InputError(
                f"{kind} {named} is no folder here and cannot be had from the hub ({first_line(error)}); check its "
                "name and the network, or give a folder"
            ) from None
        folder = cached  # whether all of it is here is seen when it is read
    if revision != folder.name:
        console.err.print(f"{kind} {id}: commit {folder.name}", markup=False)
    return folder


def model_fingerprint(source: str, folder: Path) -> str:
    """Names the weights of a model: on the hub by its commit (the folder's name), else by what is in its files."""
    if not Path(source).is_dir():
        return content_hash({"model": source, "revision": folder.name})
    files = sorted([*folder.glob("*.safetensors"), *folder.glob(INDEX), *folder.glob("config.json")])
    return content_hash({path.name: file_hash(path) for path in files})


def refuse_pickles(source: str | Path) -> None:
    """Refuse a folder whose weights are not in safetensors files of its own; a hub id is looked at once it is here.

    Raises:
        InputError: no weights, weights as a pickle only, or an index that names anything but safetensors files in the
            same folder: transformers would open whatever it names.
    """
    folder = Path(source)
    if not folder.is_dir():
        return
    check_index(folder / INDEX)
    if any(folder.glob("*.safetensors")):
        return
    pickled = next((path for pattern in PICKLED_WEIGHTS for path in folder.glob(pattern)), None)
    if pickled is not None:
        raise InputError(
            f"{source} has its weights as a pickle only ({pickled.name}), which is never opened; "
            "save them as safetensors: model.save_pretrained(folder)"
        )
    raise InputError(f"{source} has no weights (*.safetensors)")


def check_index(path: Path) -> None:
    """Refuse an index of sharded weights that names anything but safetensors files beside it."""
    if not path.exists():
        return
    content = read_json(path)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(
            f"{path} is damaged (it has no weight_map); save the model anew: model.save_pretrained(folder)"
        )
    for name in sorted({str(name) for name in weight_map.values()}):
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise InputError(
                f"{path} names '{name}': weights must be *.safetensors files in the same folder; nothing else is opened"
            )
        if not (path.parent / name).is_file():
            raise InputError(f"{path} names '{name}', which is missing; copy the whole model folder")
