"""Finished cells on disk → scores by model and task, and the learning rate that validation chooses for each.

Everything here is a share from 0 to 1; percent is for printing. The rate is chosen by a function that sees validation
scores only.
"""

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from biphase.errors import InputError, nearest
from biphase.files import content_hash
from biphase.finetuning.config import EVALUATED_SPLITS, PLACEMENT, PROTOCOL, FinetuneConfig
from biphase.finetuning.metrics.answers import counted_answers, exact_match
from biphase.finetuning.metrics.tagging import find_entities
from biphase.finetuning.scores import Score, read_score
from biphase.report.statistics import macro_f1, micro_f1

GridPoint = tuple[float, int]
"""A learning rate and a seed."""

NO_SETTING = PLACEMENT | {"learning_rate", "seed"}
"""Of a cell's configuration: where it ran, and its place in the grid."""


@dataclass(frozen=True)
class Broken:
    """A score that was left out, and why."""

    path: Path
    reason: str


@dataclass(frozen=True)
class ScoreSet:
    scores: tuple[Score, ...]
    broken: tuple[Broken, ...] = ()

    @cached_property
    def cells(self) -> dict[tuple[str, str], dict[GridPoint, Score]]:
        """By (model, task), each a grid of (rate, seed); see `name_models` for what a model is called.

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
        """Of each task, the rates and the seeds that any model was given."""
        points: dict[str, set[GridPoint]] = defaultdict(set)
        for (_, task), cells in self.cells.items():
            points[task].update(cells)
        return {
            task: (tuple(sorted({rate for rate, _ in some})), tuple(sorted({seed for _, seed in some})))
            for task, some in points.items()
        }


def read_scores(folder: Path) -> ScoreSet:
    """All finished scores below `folder`, in the order of their paths.

    What is damaged is named in `broken` and left out. Folders that start with a dot are unfinished and not looked at.
    """
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder; give the one that the scores were written to")
    scores, broken = [], []
    for path in sorted(folder.rglob("score.json")):
        if any(part.startswith(".") for part in path.relative_to(folder).parts):
            continue
        try:
            scores.append(check_score(read_score(path.parent)))
        except (InputError, OSError) as error:
            broken.append(Broken(path, str(error).removeprefix(f"{path} ")))
    return ScoreSet(tuple(scores), tuple(broken))


def show_rate(rate: float) -> str:
    """`5e-5`, `1.5e-4`."""
    mantissa, _, exponent = f"{rate:.3e}".partition("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def check_score(score: Score) -> Score:
    """Raises `InputError` unless the score diverged or has a finite value of its metric in both splits."""
    for split in () if score.diverged else EVALUATED_SPLITS:
        value = score.metrics.get(split, {}).get(score.metric)
        if value is None or not math.isfinite(value):
            raise InputError(f"its {score.metric} on {split} is {'missing' if value is None else value}")
    return score


def name_models(scores: Sequence[Score]) -> list[str]:
    """What the model of each score is called: its name, with more where the name alone would mix different things.

    `NAME@HASH` where one name had several weights. `NAME [weights=random]` where scores of one model on one task come
    from different settings: those that differ, unless they are the defaults.
    """
    names = [score.model.rstrip("/") for score in scores]
    hashes = collect((name, score.model_hash) for name, score in zip(names, scores, strict=True))
    names = [
        f"{name}@{score.model_hash[:8]}" if len(hashes[name]) > 1 else name
        for name, score in zip(names, scores, strict=True)
    ]
    settings = [settings_of(score) for score in scores]
    groups = collect(((name, score.task), place) for place, (name, score) in enumerate(zip(names, scores, strict=True)))
    varied = {group: set(differing(settings[place] for place in places)) for group, places in groups.items()}
    of_model = collect((name, key) for (name, _), keys in varied.items() for key in keys - OF_THE_TASK)
    for group, places in groups.items():
        keys = sorted(set(of_model[group[0]]) | varied[group])
        for place in places:
            shown = [f"{key}={settings[place][key]}" for key in keys if settings[place][key] != DEFAULTS.get(key)]
            names[place] += f" [{', '.join(shown)}]" if shown else ""
    return names


Key = TypeVar("Key")
Value = TypeVar("Value")


def collect(pairs: Iterable[tuple[Key, Value]]) -> dict[Key, dict[Value, None]]:
    """The different values of each key, in the order in which they come."""
    found: dict[Key, dict[Value, None]] = defaultdict(dict)
    for key, value in pairs:
        found[key][value] = None
    return found


def settings_of(score: Score) -> dict[str, str]:
    """What decides a score apart from model, task, rate and seed, as text."""
    return as_text(score.config) | {
        "protocol": str(score.protocol),
        "metric": score.metric,
        "data": score.data_hash[:8],
    }


def as_text(config: FinetuneConfig) -> dict[str, str]:
    return {key: str(value) for key, value in config.model_dump(mode="json", exclude=NO_SETTING).items()}


DEFAULTS = as_text(FinetuneConfig()) | {"protocol": str(PROTOCOL)}
OF_THE_TASK = {"metric", "data"}
"""Settings whose values on different tasks have nothing to do with each other."""


def differing(settings: Iterable[Mapping[str, str]]) -> list[str]:
    """The keys whose values are not the same in all."""
    values = collect(pair for some in settings for pair in some.items())
    return [key for key, seen in values.items() if len(seen) > 1]


def short_name(model: str) -> str:
    """`runs/encoders/a [weights=random]` → `a [weights=random]`."""
    path, bracket, settings = model.partition(" [")
    return Path(path).name + bracket + settings


def base_name(model: str) -> str:
    """`runs/encoders/a [weights=random]` → `a`."""
    return short_name(model.partition(" [")[0])


def find_model(scores: ScoreSet, name: str) -> str:
    """The model that a user means: by its whole name or the last part of its path, with its settings where it has some.

    Raises `InputError` when there is none (with the nearest) or more than one (with all).
    """
    wanted = name.rstrip("/")
    if wanted in scores.models:
        return wanted
    found = [model for model in scores.models if short_name(model) == wanted]
    if len(found) == 1:
        return found[0]
    if found:
        raise InputError(f"'{name}' could be any of {', '.join(repr(model) for model in found)}; give the whole name")
    raise InputError(
        f"no scores of a model '{name}'{nearest(wanted, {*scores.models, *map(short_name, scores.models)})}"
    )


def choose_rate(validation: Mapping[float, Sequence[float | None]]) -> float:
    """The learning rate with the best mean validation score over its seeds; of equal ones the lowest.

    None stands for a seed that diverged. A rate with more diverged seeds ranks below every rate with fewer: the mean of
    those that survived is no estimate of what the next seed will do.

    Raises `InputError` when no seed of any rate survived.
    """
    ranks = {}
    for rate, values in validation.items():
        survivors = [value for value in values if value is not None]
        assert all(math.isfinite(value) for value in survivors)
        if survivors:
            # fsum is exact, so that the order of the seeds decides no tie.
            ranks[rate] = (len(survivors) - len(values), math.fsum(survivors) / len(survivors), -rate)
    if not ranks:
        raise InputError("training diverged at every learning rate with every seed; try lower rates")
    return max(ranks, key=lambda rate: ranks[rate])


@dataclass(frozen=True)
class Selection:
    """A model on a task at the chosen rate; the seeds that finished there, in order, and their scores."""

    model: str
    task: str
    metric: str
    rate: float
    seeds: tuple[int, ...]
    validation: tuple[float, ...]
    test: tuple[float, ...]
    scores: tuple[Score, ...]
    missing: tuple[GridPoint, ...]
    """Of the task's grid: without a score."""
    diverged: tuple[GridPoint, ...]
    test_by_rate: Mapping[float, tuple[float, ...]]
    """At every rate of the grid, for every seed of the grid; nan where diverged or missing."""

    @property
    def num_diverged(self) -> int:
        """At the chosen rate."""
        return sum(rate == self.rate for rate, _ in self.diverged)


def select(scores: ScoreSet, model: str, task: str, metric: str | None = None) -> Selection:
    """Choose the rate of a model (as in `scores.models`) on a task and take what was scored there.

    `metric` both chooses and is reported; None: the task's own.

    Raises `InputError` when there is no such score or metric, or everything diverged.
    """
    cells = scores.cells.get((model, task))
    if cells is None:
        raise InputError(f"no scores of {model} on task '{task}'")
    metric = metric or next(iter(cells.values())).metric

    def value(score: Score, split: str) -> float | None:
        if score.diverged:
            return None
        known = score.metrics[split]
        if metric not in known:
            raise InputError(f"{score.folder} has no metric '{metric}'{nearest(metric, known)}")
        return known[metric]

    by_rate: dict[float, list[float | None]] = defaultdict(list)
    for point in sorted(cells):
        by_rate[point[0]].append(value(cells[point], "validation"))
    try:
        rate = choose_rate(by_rate)
    except InputError as error:
        raise InputError(f"{model} on {task}: {error}") from None
    chosen = [cells[point] for point in sorted(cells) if point[0] == rate and not cells[point].diverged]
    rates, seeds = scores.grids[task]

    def at(rate: float, seed: int) -> float:
        score = cells.get((rate, seed))
        found = None if score is None else value(score, "test")
        return math.nan if found is None else found

    return Selection(
        model=model,
        task=task,
        metric=metric,
        rate=rate,
        seeds=tuple(score.config.seed for score in chosen),
        validation=tuple(score.metrics["validation"][metric] for score in chosen),
        test=tuple(score.metrics["test"][metric] for score in chosen),
        scores=tuple(chosen),
        missing=find_missing(scores, model, task),
        diverged=tuple(point for point in sorted(cells) if cells[point].diverged),
        test_by_rate={rate: tuple(at(rate, seed) for seed in seeds) for rate in rates},
    )


def find_missing(scores: ScoreSet, model: str, task: str) -> tuple[GridPoint, ...]:
    """The points of a task's grid at which a model has no score, not even a diverged one."""
    rates, seeds = scores.grids[task]
    return tuple((rate, seed) for rate in rates for seed in seeds if (rate, seed) not in scores.cells[model, task])


Statistic = Callable[[np.ndarray], np.ndarray]
"""Sums of counts [..., C] → scores [...]."""


@dataclass(frozen=True)
class Examples:
    """What each test example contributes to a score."""

    fingerprint: str
    """Of the ids in order: equal where the examples are the same."""
    values: np.ndarray
    """[N], where the score is their mean; or [N, C] counts, where it is `statistic` of their sums."""
    statistic: Statistic | None = None


def read_examples(score: Score) -> Examples:
    """The test examples behind a score, and what each contributes to it, by what was kept of the predictions.

    Raises `InputError` when they were not kept, are damaged, or do not add up to the score.
    """
    if score.folder is None or not (path := score.folder / "test.jsonl").exists():
        raise InputError(f"{score.folder or 'a score'} has no per-example predictions (test.jsonl)")
    rows = list(read_lines(path))
    if not rows:
        raise InputError(f"{path} is empty; rerun its cell")
    values, statistic = contributions(score, path, rows)
    total = float(values.mean() if statistic is None else statistic(values.sum(axis=0)))
    stated = score.metrics["test"][score.metric]
    if abs(total - stated) > 1e-4:
        raise InputError(f"{path} gives {score.metric} {total:.4f} where score.json says {stated:.4f}; rerun its cell")
    return Examples(content_hash([row["id"] for _, row in rows]), values, statistic)


Rows = Sequence[tuple[str, Mapping[str, Any]]]
"""Lines of a file of predictions, with the place of each."""


def contributions(score: Score, path: Path, rows: Rows) -> tuple[np.ndarray, Statistic | None]:
    """`values` and `statistic` of `Examples`, for any metric that may choose a rate (`tasks.METRICS`)."""
    is_labels = all(isinstance(row.get("gold"), str) for _, row in rows)
    if is_labels and score.metric in ("macro_f1", "f1"):
        predicted_NL, gold_NL = read_labels(score, rows)
        right_NL = predicted_NL * gold_NL
        if score.metric == "macro_f1":
            return np.concatenate([right_NL, predicted_NL + gold_NL], axis=1), macro_f1
        return np.stack([right_NL[:, 1], predicted_NL[:, 1], gold_NL[:, 1]], axis=1), micro_f1
    if score.metric == "exact":
        predicted, gold = read_answers(rows)
        return np.array([exact_match(*pair) for pair in zip(predicted, counted_answers(gold), strict=True)]), None
    if all("score" in row for _, row in rows):
        return np.array([number(place, row["score"]) for place, row in rows]), None
    if score.metric in ("f1", "strict_f1"):
        return count_entities(rows, is_strict=score.metric == "strict_f1"), micro_f1
    raise InputError(f"{path} does not say what each example contributes to {score.metric}")


def read_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows with the place of each."""
    with path.open(encoding="utf-8") as file:
        for line_number, line in enumerate(file, start=1):
            place = f"{path}:{line_number}"
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise InputError(f"{place}: broken JSON ({error.msg}); rerun its cell") from None
            if not isinstance(row, dict) or "id" not in row:
                raise InputError(f"{place}: a JSON object with an id is needed; rerun its cell")
            yield place, row


def number(place: str, value: Any) -> float:
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise InputError(f"{place}: score {value!r} is not a number; rerun its cell")
    return float(value)


def read_labels(score: Score, rows: Rows) -> tuple[np.ndarray, np.ndarray]:
    """Predicted and gold label of each example, as 1 in its column of [N, L], 0 in the others."""
    if not score.classes:
        raise InputError(f"{score.folder} does not say in which order the classes are numbered; rerun its cell")
    numbers = {name: number for number, name in enumerate(score.classes)}
    for place, row in rows:
        if row["gold"] not in score.classes or row.get("predicted") not in score.classes:
            raise InputError(f"{place}: gold or predicted is none of {', '.join(score.classes)}; rerun its cell")
    predicted_NL, gold_NL = (
        np.eye(len(numbers), dtype=np.int64)[[numbers[row[key]] for _, row in rows]] for key in ("predicted", "gold")
    )
    return predicted_NL, gold_NL


def read_answers(rows: Rows) -> tuple[list[str], list[list[str]]]:
    """The predicted answer of each example, and the right ones."""
    for place, row in rows:
        answers = row.get("gold")
        is_right = isinstance(answers, list) and all(isinstance(answer, str) for answer in answers)
        if not is_right or not isinstance(row.get("predicted"), str):
            raise InputError(f"{place}: neither a predicted answer nor a list of right ones; rerun its cell")
    return [row["predicted"] for _, row in rows], [row["gold"] for _, row in rows]


def count_entities(rows: Rows, is_strict: bool = False) -> np.ndarray:
    """[N, 3] entities of each sentence: found with the right type and both ends, predicted, and in gold.

    `is_strict`: without those that do not begin with B- (see `metrics.tagging`).
    """
    for place, row in rows:
        if (
            not is_tags(row.get("gold"))
            or not is_tags(row.get("predicted"))
            or len(row["gold"]) != len(row["predicted"])
        ):
            raise InputError(f"{place}: neither a score nor gold and predicted tags of equal number; rerun its cell")
    bounds_N1 = np.cumsum([0, *(len(row["gold"]) for _, row in rows)])
    labels, numbers = np.unique(
        [tag for key in ("gold", "predicted") for _, row in rows for tag in row[key]], return_inverse=True
    )
    gold_E, predicted_E = (
        entities_E[is_whole_E] if is_strict else entities_E
        for entities_E, is_whole_E in (
            find_entities(tags_U, bounds_N1, labels.tolist()) for tags_U in np.split(numbers, 2)
        )
    )
    entity_cells = bounds_N1[-1] * len(labels)
    return np.stack(
        [
            np.bincount(np.searchsorted(bounds_N1, entities_E // entity_cells, side="right") - 1, minlength=len(rows))
            for entities_E in (np.intersect1d(gold_E, predicted_E), predicted_E, gold_E)
        ],
        axis=1,
    )


def is_tags(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(isinstance(tag, str) for tag in value)
