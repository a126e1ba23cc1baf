"""A cell's result as it stands in `score.json`. No torch: reports read thousands of them."""

from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from biphase import console
from biphase.config import Strict
from biphase.errors import InputError
from biphase.files import read_json
from biphase.finetuning.config import EVALUATED_SPLITS, FinetuneConfig


class Score(Strict):
    """The result of a cell, as its `score.json`."""

    protocol: int = 3
    """The `PROTOCOL` that it was made under; those that do not say are of the third."""
    cell: str
    model: str
    model_hash: str
    task: str
    trained_on: str
    """The task whose train split it was trained on: mostly `task` itself."""
    source: str
    """Where the task's data came from."""
    data_hash: str
    metric: str
    """The one that chooses a rate: a key of `metrics[split]`."""
    classes: tuple[str, ...] = ()
    """Of a classification, in the order of their numbers."""
    config: FinetuneConfig
    """As `settle_config` gives it, with what `auto` meant."""
    metrics: dict[str, dict[str, float]]
    """By split, validation and test, then by name; empty when training diverged."""
    num_examples: dict[str, int]
    num_truncated: dict[str, int]
    num_left_out: int
    """Rows of the data without a gold label."""
    num_steps: int
    diverged: bool
    diverged_at_step: int | None
    """The first step (from 0) whose loss or gradient was not finite."""
    final_loss: float | None
    """Mean over the last tenth of the steps; every step's is in losses.json."""
    seconds: dict[str, float]
    """For `train` and `evaluate`."""
    tokens_per_second: dict[str, float]
    peak_memory_bytes: int
    """Of the process on a CPU, of the cell on a GPU."""
    machine: dict[str, Any]
    folder: Path | None = Field(default=None, exclude=True)
    """Where score.json, losses.json and the predictions (validation.jsonl, test.jsonl) are; None when not kept."""

    def headline(self) -> str:
        name = f"{self.task} · {self.model} · lr {self.config.learning_rate:g} · seed {self.config.seed}"
        if self.diverged:
            return f"{name}: diverged at step {self.diverged_at_step}"
        values = " · ".join(f"{split} {self.metrics[split][self.metric]:.2%}" for split in EVALUATED_SPLITS)
        spent = console.duration(sum(self.seconds.values()))
        speed = f"{self.tokens_per_second['train']:,.0f} tokens/s"
        return f"{name}: {self.metric} {values} ({self.num_steps} steps, {spent}, {speed})"


def read_score(folder: Path) -> Score:
    """The score of a finished cell. Raises `InputError` naming the file when it is not one."""
    path = folder / "score.json"
    content = read_json(path)
    try:
        return Score.model_validate({**content, "folder": folder})
    except (ValidationError, TypeError) as error:
        reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        raise InputError(f"{path} is not the score of this version ({reason}); delete its folder and rerun") from None
