"""Predictions that were kept beside a score (test.jsonl, validation.jsonl) → what each example contributes to it.

Letters: N examples, S scores, L labels, C columns of counts, E entities, U words.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from biphase.errors import InputError
from biphase.files import content_hash, file_hash, reading
from biphase.finetuning.metrics.answers import counted_answers, exact_match
from biphase.finetuning.metrics.classification import (
    Statistic,
    correlation_products,
    find_entities,
    label_counts,
    micro_f1,
)
from biphase.finetuning.scores import Score
from biphase.tasks.spec import EvaluatedSplit
from biphase.trees import parse_json


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
