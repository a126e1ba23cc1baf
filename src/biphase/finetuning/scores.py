"""A cell's result as it stands in `score.json`, and all of a folder's by model and task. No torch: reports read
thousands of them.

Everything here is a share from 0 to 1; percent is for printing.
"""

import math
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError
from pydantic_core import from_json

from biphase import console
from biphase.config import Strict
from biphase.errors import InputError
from biphase.files import RECORD_HASH, content_hash, read_json, reading
from biphase.finetuning.config import EVALUATED_SPLITS, PLACEMENT, PROTOCOL, FinetuneConfig

GridPoint = tuple[float, int]
"""A learning rate and a seed."""

CORRELATIONS, ROUNDING = ("mcc", "pearson", "spearman"), 1e-6
"""Metrics that go down to -1; and what rounding may add to any."""

NO_SETTING = PLACEMENT | {"learning_rate", "seed"}
"""What in a cell's configuration is no setting of the model: where it ran, and its place in the grid."""


class Score(Strict):
    """The result of a cell, as its `score.json`."""

    protocol: int
    """The `PROTOCOL` that it was made under."""
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
    """The classes of a classification, in the order of their numbers."""
    config: FinetuneConfig
    """The configuration as `settle_config` gives it, with what `auto` meant."""
    metrics: dict[str, dict[str, float]]
    """Values by split (validation and test), then by name; empty when training diverged."""
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
    """What `train` and `evaluate` took."""
    tokens_per_second: dict[str, float]
    peak_memory_bytes: int
    """The peak of the process on a CPU, that of the cell on a GPU."""
    machine: dict[str, Any]
    predictions: dict[str, str] = Field(default={}, exclude=True)
    """The hash of each split's predictions as they were written; empty when not kept, and in earlier versions."""
    folder: Path | None = Field(default=None, exclude=True)
    """Where score.json, losses.json and the predictions (validation.jsonl, test.jsonl) are; None when not kept."""

    def headline(self) -> str:
        name = f"{self.task} · {self.model} · lr {self.config.learning_rate:g} · seed {self.config.seed}"
        if self.diverged:
            return f"{name}: diverged at step {self.diverged_at_step}"
        values = " · ".join(f"{split} {self.metrics[split][self.metric]:.2%}" for split in EVALUATED_SPLITS)
        spent = console.duration(sum(self.seconds.values()))
        speed = f"{self.tokens_per_second['train']:,.0f} tokens/s"
        steps = f"{self.num_steps} steps"
        if not self.config.shots and self.num_steps < self.config.max_steps:
            steps += f", {self.config.epochs} epoch{'s' * (self.config.epochs > 1)}"
        return f"{name}: {self.metric} {values} ({steps}, {spent}, {speed})"


def read_score(folder: Path) -> Score:
    """The score of a finished cell. Raises `InputError` naming the file when it is not one."""
    path = folder / "score.json"
    with reading(path):
        text = path.read_bytes()
    try:
        content = from_json(text)  # a study has thousands: five times as fast as `read_json`, which tells what is wrong
    except ValueError:
        content = read_json(path)
    remedy = "delete its folder and rerun"
    written = content.pop(RECORD_HASH, None) if isinstance(content, dict) else None
    if written is not None and written != content_hash(content):  # earlier versions wrote none
        raise InputError(f"{path} is damaged (it is not what was written, by its own hash); {remedy}")
    try:
        score = Score.model_validate(content)
    except ValidationError as error:
        raise InputError(f"{path} is not the score of this version ({error.errors()[0]['msg']}); {remedy}") from None
    object.__setattr__(score, "folder", folder)
    return score


@dataclass(frozen=True)
class ScoreSet:
    scores: tuple[Score, ...]
    broken: Mapping[Path, str] = field(default_factory=dict)
    """Files that were left out, and why."""

    @cached_property
    def cells(self) -> dict[tuple[str, str], dict[GridPoint, Score]]:
        """Scores by (model, task), each a grid of (rate, seed); see `name_models` for what a model is called.

        Raises `InputError` when two different cells stand for the same point.
        """
        grids: dict[tuple[str, str], dict[GridPoint, Score]] = defaultdict(dict)
        for score, model in zip(self.scores, name_models(self.scores), strict=True):
            grid, point = grids[model, score.task], (score.config.learning_rate, score.config.seed)
            if (other := grid.setdefault(point, score)).cell != score.cell:
                raise InputError(
                    f"{other.folder} and {score.folder} are two scores of {model} on {score.task} at rate "
                    f"{show_rate(point[0])} and seed {point[1]}; remove the outdated one"
                )
        return dict(grids)

    @cached_property
    def models(self) -> tuple[str, ...]:
        return tuple(sorted({model for model, _ in self.cells}))

    @cached_property
    def tasks(self) -> tuple[str, ...]:
        return tuple(sorted({task for _, task in self.cells}))

    @cached_property
    def grids(self) -> dict[str, tuple[tuple[float, ...], tuple[int, ...]]]:
        """The rates and the seeds of each task that any model was given."""
        points: dict[str, set[GridPoint]] = defaultdict(set)
        for (_, task), cells in self.cells.items():
            points[task].update(cells)
        grids = {}
        for task, asked in points.items():
            rates, seeds = {rate for rate, _ in asked}, {seed for _, seed in asked}
            grids[task] = tuple(sorted(rates)), tuple(sorted(seeds))
        return grids


def read_scores(folder: Path) -> ScoreSet:
    """All finished scores below `folder`, in the order of their paths.

    What is damaged, or has no finite value of its metric, is named in `broken` and left out. Folders that start with a
    dot are unfinished and not looked at.
    """
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder; give the one that the scores were written to")
    scores: list[Score] = []
    broken: dict[Path, str] = {}
    for path in find_score_folders(folder):
        try:
            score = read_score(path)
            for split in () if score.diverged else EVALUATED_SPLITS:
                value = score.metrics.get(split, {}).get(score.metric)
                if value is None or not math.isfinite(value):
                    raise InputError(f"its {score.metric} on {split} is {'missing' if value is None else value}")
                if not (-ROUNDING if score.metric not in CORRELATIONS else -1 - ROUNDING) <= value <= 1 + ROUNDING:
                    raise InputError(f"its {score.metric} on {split} is {value:g}, which is no share from 0 to 1")
            scores.append(score)
        except (InputError, OSError) as error:
            broken[path / "score.json"] = str(error).removeprefix(f"{path / 'score.json'} ")
    return ScoreSet(tuple(scores), broken)


def find_score_folders(folder: str | Path) -> Iterator[Path]:
    """The folders of finished cells; there is none in another."""
    if os.path.isfile(f"{folder}/score.json"):
        yield Path(folder)
        return
    for name in sorted(os.listdir(folder)):
        below = f"{folder}/{name}"
        if not name.startswith(".") and os.path.isdir(below) and not os.path.islink(below):
            yield from find_score_folders(below)


def show_rate(rate: float) -> str:
    """`5e-5`, `1.5e-4`."""
    mantissa, _, exponent = f"{rate:.3e}".partition("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def name_models(scores: Sequence[Score]) -> list[str]:
    """What the model of each score is called: its name, with more where the name alone would mix different things.

    `NAME@HASH` where one name had several weights. `NAME [weights=random]` where scores of one model on one task come
    from different settings: those that differ, unless they are the defaults.
    """
    names = [score.model.rstrip("/") for score in scores]
    hashes: dict[str, set[str]] = defaultdict(set)
    for name, score in zip(names, scores, strict=True):
        hashes[name].add(score.model_hash)
    for number, score in enumerate(scores):
        if len(hashes[names[number]]) > 1:
            names[number] += f"@{score.model_hash[:8]}"

    # The settings that vary among the scores of a name on a task tell its models apart on this task. Those that do not
    # belong to the task itself tell them apart on every other task, too: `m [weights=random]` is called so everywhere.
    settings = [settings_of(score) for score in scores]
    groups: dict[tuple[str, str], list[int]] = defaultdict(list)
    for number, score in enumerate(scores):
        groups[names[number], score.task].append(number)
    varied: dict[tuple[str, str], set[str]] = {}
    varied_anywhere: dict[str, set[str]] = defaultdict(set)
    for (name, task), numbers in groups.items():
        varied[name, task] = set(differing([settings[number] for number in numbers]))
        varied_anywhere[name] |= varied[name, task] - TASK_SETTINGS
    for (name, task), numbers in groups.items():
        keys = sorted(varied_anywhere[name] | varied[name, task])
        for number in numbers:
            shown = [f"{key}={settings[number][key]}" for key in keys if settings[number][key] != DEFAULTS.get(key)]
            names[number] += f" [{', '.join(shown)}]" if shown else ""
    return names


def settings_of(score: Score) -> dict[str, str]:
    """What decides a score apart from model, task, rate and seed, as text."""
    data = UNKNOWN_DATA if score.data_hash == score.trained_on else score.data_hash[:8]
    own = {"protocol": str(score.protocol), "metric": score.metric, "data": data}
    return as_text(score.config) | own


@cache
def as_text(config: FinetuneConfig) -> dict[str, str]:
    """Cached, because thousands of cells have a few hundred configurations."""
    given = config.model_dump(mode="json")
    defaults = {key: field.default for key, field in FinetuneConfig.model_fields.items() if key not in NO_SETTING}
    return {key: str(given.get(key, default)) for key, default in defaults.items()}


DEFAULTS = as_text(FinetuneConfig()) | {"protocol": str(PROTOCOL)}
TASK_SETTINGS = {"metric", "data"}
"""Settings whose values on different tasks have nothing to do with each other."""


UNKNOWN_DATA = "unknown"
"""The data of earlier embedding models' scores: these name their recipe in the place of its hash."""


def differing(settings: Sequence[Mapping[str, str]]) -> list[str]:
    """The keys whose values, as far as they are known, are not the same in all."""
    return [key for key in settings[0] if len({some[key] for some in settings} - {UNKNOWN_DATA}) > 1]


def short_name(model: str) -> str:
    """`runs/encoders/a [weights=random]` → `a [weights=random]`."""
    path, bracket, settings = model.partition(" [")
    return Path(path).name + bracket + settings


def base_name(model: str) -> str:
    """`runs/encoders/a [weights=random]` → `a`."""
    return short_name(model.partition(" [")[0])
