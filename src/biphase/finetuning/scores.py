"""The score of a cell (`score.json`), all scores of a folder by model and task, and the contributions of examples.

Contributions are stored beside the predictions of a cell (test.npz beside test.jsonl). Values are from 0 to 1; percent
is for printing. No torch: reports read thousands of cells.

Letters: N examples, S scores, L labels, C columns of counts, E entities, U words.
"""

import hashlib
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from pydantic import Field
from pydantic_core import from_json

from biphase import console, files
from biphase.config import Strict
from biphase.errors import InputError, first_line, told_as
from biphase.finetuning import metrics
from biphase.finetuning.calibration import Calibration
from biphase.finetuning.config import PLACEMENT, PROTOCOL, FinetuneConfig
from biphase.tasks.families import KINDS
from biphase.tasks.spec import EVALUATED_SPLITS, EvaluatedSplit

GridPoint = tuple[float, int]
"""A learning rate and a seed."""

LOWEST_SCORES = {name: measure.lowest for kind in KINDS.values() for name, measure in kind.metrics.items()}
"""Metric → its lowest score."""
ROUNDING_ERROR = 1e-6

NO_SETTING = PLACEMENT | {"learning_rate", "seed"}
"""Keys of a cell's configuration that are not settings of its model: where it ran, and its point in the grid."""


class Score(Strict):
    """The score of a cell, as in its `score.json`."""

    later: ClassVar[frozenset[str]] = frozenset({"best_step", "checks", "calibration"})

    protocol: int
    """The protocol when the cell was computed (`PROTOCOL` or `LATER_PROTOCOLS`)."""
    cell: str
    model: str
    model_hash: str
    task: str
    trained_on: str
    """The task whose train split was used, mostly `task` itself."""
    source: str
    """The source of the task's data."""
    data_hash: str
    metric: str
    """The metric that chooses a rate: a key of `metrics[split]`."""
    classes: tuple[str, ...] = ()
    """The classes of a classification, in the task's order."""
    config: FinetuneConfig
    """The settled configuration (`settle_config`), without `auto`."""
    metrics: dict[str, dict[str, float]]
    """Values by split (validation and test), then by name; empty if training diverged."""
    never_predicted: dict[str, dict[str, int]] = Field(default={})
    """By split, the classes (for entities, the types) that occur in gold but are never predicted, with their number in
    the examples that train."""
    num_examples: dict[str, int]
    num_truncated: dict[str, int] = Field(default={})
    num_left_out: int = 0
    """The number of rows without a gold label."""
    num_steps: int
    best_step: int | None = None
    """With `load_best_model_at_end`: the step of the scored weights."""
    checks: dict[int, float] = Field(default={})
    """With `load_best_model_at_end` or `early_stopping_patience`: the metric on validation after these steps, in the
    middle of the training."""
    calibration: Calibration | None = None
    """For classes of texts and choices: the way to read the outputs that validation gives. `metrics` and stored
    predictions are without it; a kept model has it."""
    diverged: bool = False
    diverged_at_step: int | None = None
    """The first step (from 0) whose loss or gradient was not finite."""
    final_loss: float | None
    """The mean loss of the last tenth of the steps; losses.json has every step's. For numbers it is the squared error
    over the variance in train: about 1 for a network that predicts the mean."""
    seconds: dict[str, float]
    """The time of `train` and `evaluate`."""
    tokens_per_second: dict[str, float] = Field(default={})
    peak_memory_bytes: int = 0
    """The peak of the process on a CPU, of the cell on a GPU."""
    machine: dict[str, Any]
    predictions: dict[str, str] = Field(default={}, exclude=True)
    """The hash of each split's predictions; empty if no predictions were written."""
    contributions: dict[str, Any] = Field(default={}, exclude=True)
    """Split → the contribution of each example, [N], for the score of a foreign cell, which has no predictions."""
    folder: Path | None = Field(default=None, exclude=True)
    """The folder of score.json, losses.json and the predictions (validation.jsonl, test.jsonl); None for no folder."""

    @property
    def settings(self) -> dict[str, str]:
        """The settings apart from model, task, rate and seed, as text."""
        facts = {"protocol": str(self.protocol), "metric": self.metric, "data": self.data_hash[:8]}
        return as_text(self.config) | facts

    def __repr__(self) -> str:
        spent = "" if self.diverged else f" · {self.spent}"
        return f"{self.name}\n{self.outcome}\n{self.point}{spent}\n{self.folder or 'not kept'}"

    __str__ = __repr__

    @property
    def name(self) -> str:
        return f"{self.task} · {self.model}"

    @property
    def point(self) -> str:
        """Its place in a grid: `lr 5e-5 · seed 0`."""
        head = " · head=transformers" if self.config.head == "transformers" else ""
        return f"lr {show_rate(self.config.learning_rate)} · seed {self.config.seed}{head}"

    @property
    def outcome(self) -> str:
        """The primary metric on each split."""
        if self.diverged:
            return f"diverged at step {self.diverged_at_step}"
        values = [f"{split} {values.get(self.metric, np.nan):.2%}" for split, values in self.metrics.items()]
        return f"{self.metric} {' · '.join(values)}"

    def headline(self) -> str:
        result = f"{self.name} · {self.point}: {self.outcome}"
        return result if self.diverged else f"{result} ({self.spent})"

    @property
    def spent(self) -> str:
        """Steps, time and speed."""
        spent = console.duration(sum(self.seconds.values()))
        speed = f"{self.tokens_per_second.get('train', math.nan):,.0f} tokens/s"
        steps = f"{self.num_steps:,} steps"
        if not self.config.shots and self.num_steps < self.config.max_steps:
            at_most = "up to " * (self.config.early_stopping_patience is not None)
            steps += f", {at_most}{self.config.epochs} epoch{'s' * (self.config.epochs > 1)}"
        if self.best_step is not None:
            steps += f", the weights of step {self.best_step}"
        return f"{steps}, {spent}, {speed}"


def read_test_rows(score: Score) -> metrics.Rows:
    """Read the test predictions of a cell; none if they are not stored."""
    path = (score.folder or Path()) / "test.jsonl"
    if score.folder is None or not path.exists():
        return []
    files.refuse_changed(score.folder, {path.name: score.predictions["test"]}, "rerun its cell")
    with files.reading(path, "rerun its cell"), path.open(encoding="utf-8") as file:
        return [files.parse_json(line) for line in file]


def tell_errors(score: Score) -> list[str]:
    """Write a sentence on the errors of a cell's test predictions, if they are numbers and are stored."""
    if "spearman" not in score.metrics["test"] or not (rows := read_test_rows(score)):
        return []
    errors = metrics.score_rows(rows, metrics.ERRORS, ())
    told = ", ".join(f"{name} {metrics.show_value(name, value)}" for name, value in errors.items())
    return [f"errors on test, in the unit of the labels: {told}"]


def write_cell(folder: Path, score: Score, losses: Sequence[float], predictions: Mapping[str, metrics.Rows]) -> None:
    """Write a cell's folder, whole or not at all: its score, losses, predictions and their contributions."""
    texts: dict[str, bytes] = {}
    hashes: dict[str, str] = {}
    arrays: dict[str, dict[str, Any]] = {}
    for split, rows in predictions.items():
        texts[split] = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
        hashes[split] = hashlib.sha256(texts[split]).hexdigest()
        values, statistic = metrics.contributions(rows, score.metric, score.classes)
        arrays[split] = {
            "ids": [row["id"] for row in rows],
            "values": values,
            "predictions": hashes[split],
            "statistic": getattr(statistic, "__name__", ""),
            "is_degenerate": metrics.is_one_for_all(rows),
        }
    with files.whole_folder(folder) as part:
        for split, text in texts.items():
            (part / f"{split}.jsonl").write_bytes(text)
            np.savez_compressed(part / f"{split}.npz", **arrays[split])
        files.write_json(part / "losses.json", losses)
        files.write_hashed(part / "score.json", score.model_dump(mode="json") | {"predictions": hashes})


def read_score(folder: Path) -> Score:
    """Read the score of a finished cell. Raises `InputError` for a broken file, and for the score of another cell than
    the folder's name says."""
    path, remedy = folder / "score.json", "delete its folder and rerun"
    with files.reading(path):
        text = path.read_bytes()
    try:
        content = from_json(text)  # five times as fast as `read_json`, and a study has thousands
    except ValueError as error:
        raise InputError(f"{path} is not valid JSON ({first_line(error)}); {remedy}") from None
    content = content if isinstance(content, dict) else {}
    if content.pop(files.RECORD_HASH, None) != files.content_hash(content):
        raise InputError(f"{path} is damaged (it is not what was written, by its own hash); {remedy}")
    score = files.validate_record(path, content | {"folder": folder}, Score, remedy)
    named = CELL_FOLDER.search(folder.name)
    if named and not score.cell.startswith(named[1]):
        raise InputError(f"{path} is the score of another cell ({score.cell[:16]}); {remedy}")
    return score


CELL_FOLDER = re.compile(r"-([0-9a-f]{16})$")
"""The end of the name of a cell's folder: the start of its hash."""
TRACKED = re.compile(r"(^|/)tracking/[^/]+/wandb/")
"""A folder that W&B makes in the tracking of a cell."""


@dataclass(frozen=True)
class ScoreSet:
    scores: tuple[Score, ...]
    broken: Mapping[Path, str] = field(default_factory=dict)
    """The reason why each of these files was left out."""

    @cached_property
    def cells(self) -> dict[tuple[str, str], dict[GridPoint, Score]]:
        """Scores by (model, task), then by (rate, seed). `name_models` names the models. Raises `InputError` for two
        cells at one point."""
        grids: dict[tuple[str, str], dict[GridPoint, Score]] = defaultdict(dict)
        for score, model in zip(self.scores, name_models(self.scores), strict=True):
            grid, point = grids[model, score.task], (score.config.learning_rate, score.config.seed)
            if (earlier := grid.setdefault(point, score)).cell != score.cell:
                raise InputError(
                    f"{earlier.folder} and {score.folder} are two scores of {model} on {score.task} at rate "
                    f"{show_rate(point[0])} and seed {point[1]}; remove the outdated one"
                )
        return dict(grids)

    @cached_property
    def models(self) -> tuple[str, ...]:
        return tuple(sorted({model for model, _ in self.cells}))

    @cached_property
    def grids(self) -> dict[str, tuple[tuple[float, ...], tuple[int, ...]]]:
        """The rates and seeds of each task, over all models."""
        rates: dict[str, set[float]] = defaultdict(set)
        seeds: dict[str, set[int]] = defaultdict(set)
        for (_, task), cells in self.cells.items():
            rates[task] |= {rate for rate, _ in cells}
            seeds[task] |= {seed for _, seed in cells}
        return {task: (tuple(sorted(rates[task])), tuple(sorted(seeds[task]))) for task in rates}


def read_scores(folder: Path) -> ScoreSet:
    """Read all finished scores below `folder`, in the order of their paths.

    Damaged files, and scores without a finite value of their metric, go into `broken`. Folders whose names start with a
    dot are unfinished, and are not read; nor are those that W&B makes in the tracking of a cell, which hold links.
    """
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder; give the one that the scores were written to")
    scores: list[Score] = []
    broken: dict[Path, str] = {}
    for path in sorted(folder.rglob("score.json")):
        inside = path.relative_to(folder)
        if any(name.startswith(".") for name in inside.parts) or TRACKED.search(inside.as_posix()):
            continue
        try:
            score = read_score(path.parent)
            lowest = LOWEST_SCORES.get(score.metric, 0)
            for split in () if score.diverged else EVALUATED_SPLITS:
                value = score.metrics.get(split, {}).get(score.metric)
                if value is None:
                    raise InputError(f"its {score.metric} on {split} is missing")
                if not lowest - ROUNDING_ERROR <= value <= 1 + ROUNDING_ERROR:
                    raise InputError(f"its {score.metric} on {split} is {value:g}, which is out of its range")
            scores.append(score)
        except (InputError, OSError) as error:
            broken[path] = str(error).removeprefix(f"{path} ")
    return ScoreSet(tuple(scores), broken)


@dataclass(frozen=True)
class Spent:
    """The cost of the trainings on a task."""

    trainings: int
    steps: int
    tokens: float
    """The tokens in training."""
    seconds: float
    """The time, including all evaluations."""


def measure_trainings(scores: Iterable[Score]) -> dict[str, Spent]:
    """Sum the cost of each task's trainings, including evaluation. Each task of a shared training repeats its steps and
    seconds, which count once."""
    trained: dict[str, dict[tuple[str, float, int], Score]] = defaultdict(dict)
    evaluated: dict[str, float] = defaultdict(float)
    for score in scores:
        trained[score.trained_on].setdefault((score.model, score.config.learning_rate, score.config.seed), score)
        evaluated[score.trained_on] += score.seconds["evaluate"]
    spent = {}
    for task, trainings in trained.items():
        steps = sum(score.num_steps for score in trainings.values())
        seconds = sum((score.seconds["train"] for score in trainings.values()), evaluated[task])
        tokens = sum(score.tokens_per_second.get("train", 0.0) * score.seconds["train"] for score in trainings.values())
        spent[task] = Spent(len(trainings), steps, tokens, seconds)
    return spent


def show_rate(rate: float) -> str:
    """Format a learning rate: `5e-5`, `1.5e-4`."""
    mantissa, _, exponent = f"{rate:.3e}".partition("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def name_models(scores: Sequence[Score]) -> list[str]:
    """Name the model of each score, with more than its name if that alone is ambiguous.

    `NAME@HASH` if one name had several weights. `NAME [weights=random]` if scores of one model on one task have
    different settings: those that differ, unless they are the defaults.
    """
    names = [score.model.rstrip("/") for score in scores]
    hashes: dict[str, set[str]] = defaultdict(set)
    for name, score in zip(names, scores, strict=True):
        hashes[name].add(score.model_hash)
    for index, score in enumerate(scores):
        if len(hashes[names[index]]) > 1:
            names[index] += f"@{score.model_hash[:8]}"

    # Settings that vary among the scores of a name on a task tell its models apart on this task, and on every other
    # task too unless they belong to the task: `m [weights=random]` has this name everywhere.
    settings = [score.settings for score in scores]
    groups: dict[tuple[str, str], list[int]] = defaultdict(list)
    for index, score in enumerate(scores):
        groups[names[index], score.task].append(index)
    varied: dict[tuple[str, str], set[str]] = {}
    varied_anywhere: dict[str, set[str]] = defaultdict(set)
    for (name, task), indices in groups.items():
        varied[name, task] = set(differing([settings[index] for index in indices]))
        varied_anywhere[name] |= varied[name, task] - TASK_SETTINGS
    for (name, task), indices in groups.items():
        keys = sorted(varied_anywhere[name] | varied[name, task])
        for index in indices:
            unusual = [f"{key}={settings[index][key]}" for key in keys if settings[index][key] != DEFAULTS.get(key)]
            names[index] += f" [{', '.join(unusual)}]" if unusual else ""
    return names


@cache
def as_text(config: FinetuneConfig) -> dict[str, str]:
    """Write the settings of a model as text. Cached: thousands of cells have a few hundred configurations."""
    values = config.model_dump(mode="json")
    fields = FinetuneConfig.model_fields.items()
    return {key: str(values.get(key, field.default)) for key, field in fields if key not in NO_SETTING}


DEFAULTS = as_text(FinetuneConfig()) | {"protocol": str(PROTOCOL)}
TASK_SETTINGS = {"metric", "data"}
"""Settings of a task: their values on different tasks are unrelated."""


def differing(settings: Sequence[Mapping[str, str]]) -> list[str]:
    """List the keys whose values differ."""
    return [key for key in settings[0] if len({values[key] for values in settings}) > 1]


def short_name(model: str) -> str:
    """Drop the folders of a model's name: `runs/encoders/a [weights=random]` → `a [weights=random]`."""
    path, bracket, settings = model.partition(" [")
    return Path(path).name + bracket + settings


def base_name(model: str) -> str:
    """Drop the folders and settings of a model's name: `runs/encoders/a [weights=random]` → `a`."""
    return short_name(model.partition(" [")[0])


@dataclass(frozen=True)
class ExampleTable:
    """The contributions of examples to several scores on the same examples."""

    fingerprint: str
    """A hash of the examples' ids in order; equal for the same examples. It includes the task where the examples have
    no ids of their own."""
    values_SN: np.ndarray
    """The contributions: a row's mean is its score, and its spread determines the score's standard error."""
    num_degenerate: int = 0
    """The number of scores whose predictions are all the same: one class, no entity, one answer."""
    why_unknown: str = ""
    """The reason for no examples: predictions were not kept, are damaged, or belong to other examples."""


def read_contributions(path: Path, score: Score, written: str | None) -> tuple[list[str], metrics.Contributions, bool]:
    """Read the ids of a file of predictions, their contributions, and whether all predictions are the same.

    The .npz beside the predictions has them. If it is missing, damaged, or belongs to other predictions than `written`,
    they are computed again.
    """
    archive = path.with_suffix(".npz")
    # A flipped bit may raise any of a dozen errors of zipfile, zlib or NumPy.
    with suppress(InputError), told_as(f"{archive} cannot be read"), np.load(archive, allow_pickle=False) as saved:
        if str(saved["predictions"]) == written:
            values, statistic = saved["values"], metrics.STATISTICS.get(str(saved["statistic"]))
            return saved["ids"].tolist(), (values, statistic), bool(saved["is_degenerate"])
    with files.reading(path, "rerun its cell"), path.open(encoding="utf-8") as file:
        texts = list(file)
    if not texts:
        raise InputError(f"{path} is empty; rerun its cell")
    try:
        rows = [files.parse_json(text) for text in texts]
        ids, is_degenerate = [row["id"] for row in rows], metrics.is_one_for_all(rows)
        return ids, metrics.contributions(rows, score.metric, score.classes), is_degenerate
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        lacks = f"what each example contributes to {score.metric} ({first_line(error)})"
        raise InputError(f"{path} does not say {lacks}; rerun its cell") from None


def has_lost_predictions(score: Score) -> bool:
    """Tell whether the test predictions were kept but are gone, and their contributions too."""
    kept = score.folder is not None and any((score.folder / f"test.{ending}").exists() for ending in ("npz", "jsonl"))
    return "test" in score.predictions and not kept


ROW_LOCATION = re.compile(r"(\.\w+:|: row )\d+$")
"""The end of an id that is only its row's location: `test.tsv:12`, `test.parquet: row 12`."""


def read_examples(score: Score, split: EvaluatedSplit = "test", most: int | None = None) -> ExampleTable:
    """Read the contributions to one score, of all examples or of at most `most`, evenly over the file.

    The predictions themselves may be gone. Raises `InputError` if neither was kept, if they are damaged, or, if all are
    read, if they do not add up to the score.
    """
    if (values := score.contributions.get(split)) is not None:
        most = min(most or len(values), len(values))
        chosen = np.arange(most) * len(values) // most
        return ExampleTable(files.content_hash([score.task, split, len(values)]), values[None, chosen])
    path = (score.folder or Path()) / f"{split}.jsonl"
    if score.folder is None or not (path.exists() or path.with_suffix(".npz").exists()):
        raise InputError(f"{score.folder or 'a score'} has no per-example predictions ({split}.jsonl)")
    written = score.predictions.get(split)
    if written is not None and path.exists():
        files.refuse_changed(score.folder, {path.name: written}, "rerun its cell")
    ids, (values, statistic), is_degenerate = read_contributions(path, score, written)
    # Locations and running numbers may be the same in the test sets of two tasks.
    has_own_ids = any(id != str(index) and not ROW_LOCATION.search(id) for index, id in enumerate(ids))
    if most is None:
        total, stated = metrics.total_score(values, statistic), score.metrics[split][score.metric]
        if not abs(total - stated) <= 1e-4:
            difference = f"{path} gives {score.metric} {total:.4f} where score.json says {stated:.4f}"
            raise InputError(f"{difference}; rerun its cell")
    elif len(ids) > most:
        chosen = np.arange(most) * len(ids) // most
        ids, values = [ids[index] for index in chosen], values[chosen]
    fingerprint = files.content_hash(ids if has_own_ids else [score.task, *ids])
    return ExampleTable(fingerprint, linearize(values, statistic)[None], int(is_degenerate))


@dataclass
class KeptExamples:
    """The contributions to the test scores of one model or recipe on a task, read once."""

    scores: tuple[Score, ...]
    table: ExampleTable | None = None

    def read(self) -> ExampleTable:
        """Read the table, in the order of `scores`."""
        if self.table is None:
            self.table = join_examples(self.scores)
        return self.table


def join_examples(scores: Iterable[Score], split: EvaluatedSplit = "test", most: int | None = None) -> ExampleTable:
    """Read the contributions to several scores, as `read_examples` does for one; `why_unknown` replaces its error."""
    try:
        sets = [read_examples(score, split, most) for score in scores]
        if len({examples.fingerprint for examples in sets}) > 1:
            raise InputError(f"the {split} examples are not the same")
    except InputError as error:
        return ExampleTable("", np.empty((0, 0)), why_unknown=str(error))
    values_SN = np.concatenate([examples.values_SN for examples in sets])
    return ExampleTable(sets[0].fingerprint, values_SN, sum(examples.num_degenerate for examples in sets))


def linearize(values: np.ndarray, statistic: metrics.Statistic | None) -> np.ndarray:
    """Return values, [N], whose mean is the score and whose spread is its noise: the examples' own values if the score
    is their mean, else the jackknife's pseudo-values (Tukey 1958), shifted so that their mean is the score."""
    if statistic is None:
        return np.asarray(values, dtype=np.float64)
    counts_NC = values.astype(np.float64)
    sums_C = counts_NC.sum(axis=0)
    if len(counts_NC) == 1:  # without it, there is nothing to score
        return np.array([statistic(sums_C)])
    without_N = statistic(sums_C - counts_NC)
    return np.asarray(statistic(sums_C) + (len(counts_NC) - 1) * (without_N.mean() - without_N))
