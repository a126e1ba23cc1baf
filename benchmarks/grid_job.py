"""What both sides of `grid.py` are given: cells, a grid, and a job, which is the part of it that one process does."""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

METRICS = {"sequence_classification": "accuracy", "token_classification": "f1", "retrieval": "ndcg_at_10"}
Evaluated = Literal["validation", "test"]
SPLITS: tuple[Evaluated, ...] = ("validation", "test")


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
    workers_per_gpu: int = 1
    """Cells of biphase that share a GPU."""

    @property
    def cells(self) -> list[Cell]:
        return [Cell(*values) for values in product(self.tasks, self.learning_rates, self.seeds)]


@dataclass(frozen=True)
class GridJob:
    """Cells of the usual way, one after the other in one process."""

    grid: Grid
    cells: list[Cell]
    keeps_heap: bool
    cache: str
    """Where `datasets` keeps texts that are tokenized, once for each task, also for processes that follow."""
    began: float
    """When the process was started, by `time.time`."""


@contextmanager
def timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    seconds[stage] = seconds.get(stage, 0.0) + time.perf_counter() - started


def shared_arguments(job: GridJob, cell: Cell, folder: str) -> dict[str, Any]:
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


def changes_of_config(model: str) -> dict[str, Any]:
    """What makes a network bidirectional and takes its dropout out, as biphase does."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model).to_dict()
    rates = [key for key, value in config.items() if isinstance(value, float) and re.search("dropout|_pdrop$", key)]
    return {"is_causal": False, "use_cache": False, **dict.fromkeys(rates, 0.0)}
