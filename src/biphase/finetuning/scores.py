"""A cell's result as it stands in `score.json`, all of a folder's by model and task, and what each example contributes.

Contributions are read from predictions that were kept beside a score (test.jsonl, validation.jsonl). Everything here is
a share from 0 to 1; percent is for printing. No torch: reports read thousands of cells.

Letters: N examples, S scores, L labels, C columns of counts, E entities, U words.
"""

import json
import math
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field, ValidationError
from pydantic_core import from_json

from biphase import console
from biphase.config import Strict
from biphase.errors import InputError
from biphase.files import RECORD_HASH, content_hash, file_hash, parse_json, read_json, reading
from biphase.finetuning.config import EVALUATED_SPLITS, PLACEMENT, PROTOCOL, FinetuneConfig
from biphase.finetuning.metrics import (
    Statistic,
    correlation_products,
    counted_answers,
    exact_match,
    find_entities,
    label_counts,
    micro_f1,
)
from biphase.tasks.spec import EvaluatedSplit

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


@dataclass(frozen=True)
class ExampleScores:
    """What each example contributes to a score."""

    fingerprint: str
    """A hash of the ids in order: equal where the examples are the same."""
    values: np.ndarray
    """[N] shares, where the score is their mean; or [N, C] counts, where it is `statistic` of their sums."""
    statistic: Statistic | None = None
    is_degenerate: bool = False
    """Whether one and the same was predicted for all: one class, no entity, one answer."""


def read_examples(score: Score, split: EvaluatedSplit = "test", most: int | None = None) -> ExampleScores:
    """The examples behind a score, and what each contributes to it, by what was kept of the predictions; `most` of
    them, evenly over the file, where these are fewer.

    Raises `InputError` when they were not kept, are damaged, or, if all are read, do not add up to the score.
    """
    if score.folder is None or not (path := score.folder / f"{split}.jsonl").exists():
        raise InputError(f"{score.folder or 'a score'} has no per-example predictions ({split}.jsonl)")
    rows: list[tuple[str, dict[str, Any]]] = []
    with reading(path, "rerun its cell"), path.open(encoding="utf-8") as file:
        if (written := score.predictions.get(split)) and written != file_hash(path):
            raise InputError(f"{path} is damaged (it is not what was written, by score.json); rerun its cell")
        lines = list(enumerate(file, start=1))
    num, taken = len(lines), min(len(lines), most or len(lines))
    for line_number, line in (lines[n * num // taken] for n in range(taken)):
        place = f"{path}:{line_number}"
        try:
            row = parse_json(line)
        except json.JSONDecodeError as error:
            raise InputError(f"{place}: broken JSON ({error.msg}); rerun its cell") from None
        if not isinstance(row, dict) or "id" not in row:
            raise InputError(f"{place}: a JSON object with an id is needed; rerun its cell")
        rows.append((place, row))
    if not rows:
        raise InputError(f"{path} is empty; rerun its cell")
    values, statistic = contributions(score, path, rows)
    total = float(values.mean() if statistic is None else statistic(values.sum(axis=0)))
    stated = score.metrics[split][score.metric]
    if taken == num and abs(total - stated) > 1e-4:
        raise InputError(f"{path} gives {score.metric} {total:.4f} where score.json says {stated:.4f}; rerun its cell")
    fingerprint = content_hash([row["id"] for _, row in rows])
    return ExampleScores(fingerprint, values, statistic, is_one_for_all(row for _, row in rows))


def is_one_for_all(rows: Iterable[Mapping[str, Any]]) -> bool:
    """Whether predictions say nothing about their examples: all the same, where what is right is not; tags all O."""
    predicted, gold = set[str](), set[str]()
    for row in rows:
        predicted |= set(row["predicted"]) if is_sentence(row) else {str(row.get("predicted"))}
        gold |= set(row.get("gold", ())) if is_sentence(row) else {str(row.get("gold"))}
        if len(predicted) > 1:
            return False
    return len(gold) > 1 and predicted != {"None"}


def is_sentence(row: Mapping[str, Any]) -> bool:
    """Whether a row predicts something for each of its parts; a set of labels has the probability of each label."""
    return isinstance(row.get("predicted"), list) and not isinstance(row.get("probabilities"), dict)


@dataclass(frozen=True)
class ExampleTable:
    """What each example contributes to each of several scores on the same examples."""

    fingerprint: str
    """That of `ExampleScores`."""
    values_SN: np.ndarray
    """The mean of a row is its score; the spread of a row, as of any N values, gives the score's standard error."""
    num_degenerate: int = 0
    """How many of the scores come from predictions that are one and the same for all examples."""


@dataclass(frozen=True)
class KeptExamples:
    """The predictions that were kept beside scores of one model or recipe on a task; read when first asked for."""

    scores: tuple[Score, ...]
    split: EvaluatedSplit = "test"
    most: int | None = None
    """As in `read_examples`."""

    @cached_property
    def found(self) -> ExampleTable | InputError:
        """The table, in the order of `scores`; or why there is none: not kept, damaged, or of other examples."""
        try:
            read = [read_examples(score, self.split, self.most) for score in self.scores]
        except InputError as error:
            return error
        if len({(one.fingerprint, len(one.values)) for one in read}) > 1:
            return InputError(f"the {self.split} examples are not the same")
        values_SN = np.stack([linearize(one) for one in read])
        return ExampleTable(read[0].fingerprint, values_SN, sum(one.is_degenerate for one in read))

    @property
    def table(self) -> ExampleTable | None:
        """None where it is not known what examples contribute."""
        return None if isinstance(self.found, InputError) else self.found


def linearize(examples: ExampleScores) -> np.ndarray:
    """[N] values whose mean is the score and whose spread is its noise: the examples' own values where the score is
    their mean, else the jackknife's pseudo-values (Tukey 1958), moved so that their mean is the score."""
    if examples.statistic is None:
        return np.asarray(examples.values, dtype=np.float64)
    counts_NC = examples.values.astype(np.float64)
    sums_C = counts_NC.sum(axis=0)
    without_N = examples.statistic(sums_C - counts_NC)
    return np.asarray(examples.statistic(sums_C) + (len(counts_NC) - 1) * (without_N.mean() - without_N))


PredictionRows = Sequence[tuple[str, Mapping[str, Any]]]
"""Lines of a file of predictions, with the place of each."""


def contributions(score: Score, path: Path, rows: PredictionRows) -> tuple[np.ndarray, Statistic | None]:
    """`values` and `statistic` of `ExampleScores`, for any metric that may choose a rate (`tasks.METRICS`)."""
    is_labels = all(isinstance(row.get("gold"), str) for _, row in rows)
    if is_labels and score.metric in ("macro_f1", "f1", "mcc"):
        return label_counts(score.metric, *read_labels(score, rows))
    if score.metric == "macro_f1" and is_tags(rows[0][1].get("gold")) and is_sentence(rows[0][1]):
        return count_tag_labels(score, rows)
    if score.metric in ("micro_f1", "macro_f1"):
        return label_counts(score.metric, *read_labels(score, rows), is_multi=True)
    if score.metric in ("spearman", "pearson"):
        return correlation_products(score.metric, *read_numbers(rows))
    if score.metric == "exact":
        return match_answers(rows), None
    if all("score" in row for _, row in rows):
        for place, row in rows:
            if not isinstance(row["score"], int | float) or not math.isfinite(row["score"]):
                raise InputError(f"{place}: score {row['score']!r} is not a number; rerun its cell")
        return np.array([float(row["score"]) for _, row in rows]), None
    if score.metric in ("f1", "strict_f1", "accuracy"):
        check_tags(rows)
        if score.metric == "accuracy":
            right = [sum(map(str.__eq__, row["gold"], row["predicted"])) for _, row in rows]
            counts_N2 = np.array([right, [len(row["gold"]) for _, row in rows]]).T  # of each sentence's words
            return counts_N2, lambda counts_C: counts_C[..., 0] / counts_C[..., 1]
        return count_entities(rows, is_strict=score.metric == "strict_f1"), micro_f1
    raise InputError(f"{path} does not say what each example contributes to {score.metric}")


def match_answers(rows: PredictionRows) -> np.ndarray:
    for place, row in rows:
        answers = row.get("gold")
        is_right = isinstance(answers, list) and all(isinstance(answer, str) for answer in answers)
        if not is_right or not isinstance(row.get("predicted"), str):
            raise InputError(f"{place}: neither a predicted answer nor a list of right ones; rerun its cell")
    counted = counted_answers([row["gold"] for _, row in rows])
    pairs = zip((row["predicted"] for _, row in rows), counted, strict=True)
    return np.array([exact_match(predicted, answers) for predicted, answers in pairs])


def read_labels(score: Score, rows: PredictionRows) -> tuple[np.ndarray, np.ndarray]:
    """Gold and predicted label or labels of each example, as 1 in its column of [N, L], 0 in the others."""
    if not score.classes:
        raise InputError(f"{score.folder} does not say in which order the classes are numbered; rerun its cell")
    numbers = {name: number for number, name in enumerate(score.classes)}
    gold_NL, predicted_NL = np.zeros((2, len(rows), len(numbers)), dtype=np.int64)
    for number, (place, row) in enumerate(rows):
        for side_NL, key in ((gold_NL, "gold"), (predicted_NL, "predicted")):
            value = row.get(key)
            names: list[str] = value if isinstance(value, list) else [str(value)]
            if not all(name in numbers for name in names):
                raise InputError(f"{place}: gold or predicted is none of {', '.join(score.classes)}; rerun its cell")
            side_NL[number, [numbers[name] for name in names]] = 1
    return gold_NL, predicted_NL


def read_numbers(rows: PredictionRows) -> tuple[np.ndarray, np.ndarray]:
    """Gold and predicted number of each example."""
    for place, row in rows:
        if not all(isinstance(row.get(key), int | float) for key in ("gold", "predicted")):
            raise InputError(f"{place}: gold or predicted is not a number; rerun its cell")
    gold_N, predicted_N = (np.array([float(row[key]) for _, row in rows]) for key in ("gold", "predicted"))
    return gold_N, predicted_N


def check_tags(rows: PredictionRows) -> None:
    for place, row in rows:
        gold, predicted = row.get("gold", ()), row.get("predicted", ())
        if not is_tags(gold) or not is_tags(predicted) or len(gold) != len(predicted):
            raise InputError(f"{place}: neither a score nor gold and predicted tags of equal number; rerun its cell")


def count_tag_labels(score: Score, rows: PredictionRows) -> tuple[np.ndarray, Statistic]:
    """[N, 2L] how often each tag is right in a sentence, and predicted or gold, and the macro F1 of their sums. Words
    that were cut off have no tag."""
    check_tags(rows)
    words = []
    for place, row in rows:
        tags = zip(row["gold"], row["predicted"], strict=True)
        words += [(place, {"gold": gold, "predicted": found or []}) for gold, found in tags]
    counts_UC, statistic = label_counts("macro_f1", *read_labels(score, words))
    firsts_N = np.cumsum([0, *(len(row["gold"]) for _, row in rows[:-1])])
    return np.add.reduceat(counts_UC, firsts_N), statistic


def count_entities(rows: PredictionRows, is_strict: bool = False) -> np.ndarray:
    """[N, 3] entities of each sentence: found with the right type and both ends, predicted, and in gold.

    `is_strict`: without those that do not begin with B- (see `metrics.classification`).
    """
    # Sentences lie one after the other: words bounds_N1[n] to bounds_N1[n + 1] belong to sentence n. Gold tags and then
    # predicted ones become numbers of the same labels. `find_entities` gives each entity as one number that holds where
    # it begins, where it ends and its type: what both sides have in common is what was found, and a division by all
    # ends and types gives the word at which it begins, and so its sentence.
    bounds_N1 = np.cumsum([0, *(len(row["gold"]) for _, row in rows)])
    gold_tags = [tag for _, row in rows for tag in row["gold"]]
    predicted_tags = [tag for _, row in rows for tag in row["predicted"]]
    labels, numbers_2U = np.unique([*gold_tags, *predicted_tags], return_inverse=True)
    sides = []
    for tags_U in np.split(numbers_2U, 2):
        entities_E, is_whole_E = find_entities(tags_U, bounds_N1, labels.tolist())
        sides.append(entities_E[is_whole_E] if is_strict else entities_E)
    gold_E, predicted_E = sides
    entities_per_word = bounds_N1[-1] * len(labels)
    columns = []
    for entities_E in (np.intersect1d(gold_E, predicted_E), predicted_E, gold_E):
        sentences_E = np.searchsorted(bounds_N1, entities_E // entities_per_word, side="right") - 1
        columns.append(np.bincount(sentences_E, minlength=len(rows)))
    return np.stack(columns, axis=1)


def is_tags(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(isinstance(tag, str) for tag in value)
