"""(model, task, configuration) → a cell's name, by the bytes of model and data and by all that decides its result.

Neither loads a model nor PyTorch: a grid of thousands of cells is planned in the time that reading its files takes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from biphase.files import content_hash
from biphase.finetuning.config import PLACEMENT, PROTOCOL, FinetuneConfig, settle_config
from biphase.finetuning.models import ModelFingerprint, identify
from biphase.machine import has_bf16_cores, visible_gpus
from biphase.tasks.sources import TaskSource, dir_of, find_source, training_source
from biphase.tasks.spec import Task, find_task

DataDirs = Mapping[str, str | Path]
"""Folders with the data of tasks, by the task's name; other tasks come from the package or the hub."""


@dataclass(frozen=True)
class CellPlan:
    """One cell to come: what it is trained and evaluated on, and its name."""

    task: Task
    train: TaskSource
    evaluation: TaskSource
    config: FinetuneConfig
    """The configuration as `settle_config` gives it."""
    hash: str
    """The hash of everything that decides the result."""

    @property
    def known(self) -> dict[str, Any]:
        """What its `Score` says of it."""
        return {
            "cell": self.hash,
            "task": self.task.name,
            "trained_on": self.train.task.name,
            "source": self.evaluation.name,
            "data_hash": self.evaluation.hash,
            "metric": self.task.metric,
            "classes": self.task.classes,
        }

    def folder(self, out: Path) -> Path:
        return out / f"{self.task.name}-{self.hash[:16]}"

    def is_finished(self, out: Path) -> bool:
        return (self.folder(out) / "score.json").exists()


def plan_cells(model: str, tasks: Sequence[str], config: FinetuneConfig, data_dirs: DataDirs) -> list[CellPlan]:
    fingerprint, config = identify(model), resolve_precision(config)
    return [plan_cell(fingerprint, *find_task_sources(task, data_dirs), config) for task in tasks]


def plan_cell(model: ModelFingerprint, train: TaskSource, evaluation: TaskSource, config: FinetuneConfig) -> CellPlan:
    """Names a cell by the bytes of model and data, not their paths, and by what decides its result.

    `config` comes from `resolve_precision`. Reads nothing.
    """
    task = evaluation.task
    config = settle_config(config, task, model.max_length)
    settings = config.model_dump(mode="json", exclude=PLACEMENT)
    name = [PROTOCOL, model.hash, train.hash, evaluation.hash, task.metric, settings]
    return CellPlan(task, train, evaluation, config, content_hash(name))


def find_task_sources(name: str, data_dirs: DataDirs) -> tuple[TaskSource, TaskSource]:
    """The data that a task is trained on and the data that it is evaluated on: mostly the same."""

    def source_of(task: Task) -> TaskSource:
        given = dir_of(task, data_dirs)
        return find_source(task, None if given is None else Path(given))

    task = find_task(name)
    evaluation = source_of(task)
    if task.part_of is not None:
        return training_source(evaluation), evaluation
    return (source_of(find_task(task.trained_on)) if task.trained_on else evaluation), evaluation


def resolve_precision(config: FinetuneConfig) -> FinetuneConfig:
    """The configuration with a `precision` of `auto` replaced by what it means on this machine.

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
