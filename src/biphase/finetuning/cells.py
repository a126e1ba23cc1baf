"""A cell's name: (model, task, configuration), by the bytes of model and data and by all that decides its result.

A model is named by a run of ours (`RUN` or `RUN@STEP`), a Hugging Face folder, or a hub id (`ID` or `ID@REVISION`).
Nothing here loads a model or PyTorch: a grid of thousands of cells is planned in the time that reading its files takes.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from biphase.corpus.tokenizer import TOKENIZER_FILES
from biphase.errors import InputError
from biphase.files import MARK, Stamp, content_hash, read_json_as, refuse_changed, refuse_damaged, stamp_of
from biphase.finetuning.config import PLACEMENT, PROTOCOL, FinetuneConfig, settle_config
from biphase.hub import AFTER_PADDING, INDEX, count_positions, fetch_model, load_model_config, refuse_pickles
from biphase.machine import has_bf16_cores, visible_gpus
from biphase.run import find_model, read_checkpoint_manifest
from biphase.tasks.sources import TaskSource, dir_of, find_source, hash_part, training_source
from biphase.tasks.spec import Task, find_task

IDENTIFYING_FILES = (
    *("config.json", "*.safetensors", INDEX),
    *("tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "*.model", "vocab*", "merges*"),
)

fetch_once = lru_cache(fetch_model)
"""Cached, for a grid asks for the same model again and again."""


@dataclass(frozen=True)
class Encoder:
    """An encoder is found first, by all that decides a cell's name and result; `heads.open_encoder` adds what computes,
    which cells share: it is copied, never trained."""

    name: str
    """The name that its scores have."""
    hash: str
    """The hash of configuration, weights and tokenizer."""
    max_length: int
    """Tokens that the network has positions for, by its configuration; once loaded, as it was found to number them."""
    folder: Path = Path()
    """Where its files are."""
    backbone: Any = field(default=None, compare=False, repr=False)
    """The network without a head; None before it is loaded."""
    tokenizer: Any = field(default=None, compare=False, repr=False)
    """Its `encoding.HashedTokenizer`; None before it is loaded."""
    stamps: Mapping[Path, Stamp] = field(default_factory=dict, compare=False, repr=False)
    """The stamps of the files behind its hash, before they were hashed."""


def identify(name: str) -> Encoder:
    """Read what names the cells of a model. Raises `InputError` where its folder lacks what fine-tuning needs."""
    folder = find_folder(name)
    # `count_positions` asks for some fields of the configuration. They are in its file, unless that leaves to
    # transformers what a type of network has by default, or another name for it.
    try:
        content = read_json_as(folder / "config.json", dict[str, Any])
    except InputError:  # said below in the words for a model that somebody else made
        content = {}
    says_all = "max_position_embeddings" in content and not content.keys() & {"auto_map", "text_config"}
    if says_all and ("pad_token_id" in content or content.get("model_type") not in AFTER_PADDING):
        config: Any = SimpleNamespace(**{"model_type": None, "pad_token_id": None} | content)
    else:
        config = load_model_config(folder)
    stamps = stamp_model(folder)
    return Encoder(name, hash_model(folder), count_positions(config), folder, stamps=stamps)


def find_folder(name: str) -> Path:
    """Find the folder of a model; one from the hub is downloaded once (`biphase.hub`).

    Raises `InputError` naming what is missing there (configuration, weights as safetensors, tokenizer), or what in a
    folder that biphase wrote is not as it was written.
    """
    address = find_model(name)
    folder = Path(address)
    is_here = folder.is_dir()
    if not is_here:
        if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?(@.*)?", address):  # `./x` as it is: a path is never an id
            raise InputError(f"{name} is neither a run, nor a folder, nor a hub id")
        folder = fetch_once(address)
    if not (folder / "config.json").exists():
        raise InputError(f"{name} has no config.json: it is not a Hugging Face model folder")
    refuse_pickles(folder)
    if not any(path for pattern in TOKENIZER_FILES for path in folder.glob(pattern)):
        raise InputError(f"{name} has no tokenizer files (tokenizer.json or the like); save its tokenizer beside it")
    if is_here:  # the hub has no marks, and hashes of its own
        refuse_damaged(folder, f"make it again, or delete {MARK} where you changed it yourself")
    return folder


def stamp_model(folder: Path) -> dict[Path, Stamp]:
    """Return the stamps of all files that decide what an encoder does, in order."""
    return {path: stamp_of(path) for path in sorted({*chain(*map(folder.glob, IDENTIFYING_FILES))})}


def hash_model(folder: Path) -> str:
    """Make one hash of all files that decide what an encoder does. Raises `InputError` where one of a checkpoint of
    ours is not as it was written."""
    files = stamp_model(folder)
    checkpoint = folder.parent
    if folder.name == "model" and (checkpoint / "manifest.json").exists():
        remedy = f"delete {checkpoint} and rerun its run"
        written = read_checkpoint_manifest(checkpoint, check_files=False).files
        names = [f"model/{path.name}" for path in files]
        refuse_changed(checkpoint, {name: written.get(name, "") for name in names}, remedy)
    return content_hash([[path.name, hash_part(path)] for path in files])


DataDirs = Mapping[str, str | Path]
"""Folders with the data of tasks, by the task's name; other tasks come from the package or the hub."""


@dataclass(frozen=True)
class CellPlan:
    """A cell to come says what is trained and evaluated on what, and has its name."""

    model: Encoder
    task: Task
    train: TaskSource
    evaluation: TaskSource
    config: FinetuneConfig
    """The configuration as `settle_config` gives it."""
    hash: str
    """The hash of everything that decides the result."""

    def folder(self, out: Path) -> Path:
        return out / f"{self.task.name}-{self.hash[:16]}"

    def is_finished(self, out: Path) -> bool:
        return (self.folder(out) / "score.json").exists()


def plan_cells(
    model: str, tasks: Sequence[str], config: FinetuneConfig, data_dirs: DataDirs, label: str | None = None
) -> list[CellPlan]:
    """Plan the cells of a model, whose scores call it `label` in place of `model`."""
    identity, config = replace(identify(model), name=label or model), resolve_precision(config)
    return [plan_cell(identity, *find_task_sources(task, data_dirs), config) for task in tasks]


def plan_cell(model: Encoder, train: TaskSource, evaluation: TaskSource, config: FinetuneConfig) -> CellPlan:
    """Names a cell by the bytes of model and data, not their paths, and by what decides its result.

    `config` comes from `resolve_precision`. Reads nothing.
    """
    task = evaluation.task
    config = settle_config(config, task, model.max_length)
    settings = config.model_dump(mode="json", exclude=PLACEMENT)
    name = [PROTOCOL, model.hash, train.hash, evaluation.hash, task.metric, settings]
    return CellPlan(model, task, train, evaluation, config, content_hash(name))


def find_task_sources(name: str, data_dirs: DataDirs) -> tuple[TaskSource, TaskSource]:
    """Find the data that a task is trained on and the data that it is evaluated on: mostly the same."""
    task = find_task(name)
    evaluation = find_source(task, dir_of(task, data_dirs))
    if task.part_of is not None:
        return training_source(evaluation), evaluation
    if task.trained_on is None:
        return evaluation, evaluation
    trained_on = find_task(task.trained_on)
    return find_source(trained_on, dir_of(trained_on, data_dirs)), evaluation


def resolve_precision(config: FinetuneConfig) -> FinetuneConfig:
    """Replace a `precision` of `auto` by what it means on this machine.

    Raises `InputError` for a GPU that is asked for and not there.
    """
    if config.precision != "auto":
        return config
    if config.device == "cpu" or (config.device == "auto" and not visible_gpus()):
        has_units = has_bf16_cores()
    else:
        from biphase.device import choose_device, has_bf16_units

        has_units = has_bf16_units(choose_device(config.device))
    return config.model_copy(update={"precision": "bf16" if has_units else "fp32"})
