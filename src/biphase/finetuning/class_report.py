"""Rows of predictions → scores of each class: a record, sentences, a table and a picture.

The units are examples with one label or several, words with tags, or, if tags are of entities, whole entities by type.
The values equal scikit-learn's `classification_report` and seqeval's.

Letters: U units that carry a label (examples or words), L classes or types of entities, E entities.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from biphase.console import PlainConsole, out, print_rows
from biphase.errors import InputError, first_of
from biphase.finetuning.calibration import Calibration, calibration_error
from biphase.finetuning.metrics import find_entities, index_tags, is_sentence, one_hot
from biphase.finetuning.scores import Score, read_test_rows
from biphase.style import INK, PLOT_STYLE, check_picture, save_picture

CLASSES_IN_TABLE = 12
"""The most classes in a terminal's table (half of them the worst, half the best) and in a sentence."""


CountedUnit = Literal["examples", "words", "entities"]


@dataclass(frozen=True)
class ClassScore:
    """The scores of a class, from 0 to 1; 0 for a division by zero."""

    name: str
    precision: float
    recall: float
    f1: float
    support: int
    """The number of units with this gold label."""
    predicted: int
    """The number of units with this predicted label."""


@dataclass(frozen=True)
class Coverage:
    """The accuracy on the surest examples, if a person labels the others."""

    share: float
    """The share of these examples, from 0 to 1."""
    accuracy: float
    least: float | None
    """The least probability among them, rounded down; None if the probabilities are not yet calibrated."""


@dataclass(frozen=True)
class ClassReport:
    unit: CountedUnit
    classes: tuple[ClassScore, ...]
    averages: tuple[ClassScore, ...]
    """The micro average over all units, the macro average, and the average weighted by support. The last two are over
    the classes in gold or predictions, or over all classes if an example has several."""
    majority: str | None
    """The most frequent class. None if a unit may have no class or several."""
    never_predicted: tuple[str, ...]
    """The classes in gold that are never predicted."""
    labels: tuple[str, ...]
    """The names of the rows and columns of `confusion`."""
    confusion: tuple[tuple[int, ...], ...]
    """The number of times that each label (row) is predicted as each label (column), word by word for tags; () if an
    example has several."""
    calibration_error: float | None
    """The expected calibration error (`calibration.calibration_error`)."""
    coverage: tuple[Coverage, ...] = ()
    """The accuracy on about 90 %, 80 % and 50 % of the examples; () for words and for labels without a probability."""
    calibration: Calibration | None = None
    """The way to read the outputs that validation gives; these predictions are without it."""


def report_classes(rows: Sequence[Mapping[str, Any]], classes: Sequence[str]) -> ClassReport:
    """Count for each class the units that are right, predicted and gold, and which classes are confused."""
    # 1. Counts, [3, L]: right, predicted, gold.
    unit: CountedUnit = "words" if is_sentence(rows[0]) else "examples"
    has_several = unit == "examples" and isinstance(rows[0]["gold"], list)
    names = tuple(classes)
    confusion_LL = np.zeros((0, 0), dtype=np.int64)
    if has_several:
        gold_UL, predicted_UL = (one_hot([row[key] for row in rows], classes) for key in ("gold", "predicted"))
        counts_3L = np.stack([part_UL.sum(axis=0) for part_UL in (gold_UL * predicted_UL, predicted_UL, gold_UL)])
    else:
        sentences = rows if unit == "words" else [{key: [row[key]] for key in ("gold", "predicted")} for row in rows]
        gold_U, predicted_U, bounds_S1, _ = index_tags(sentences, classes)
        confused_LL = np.zeros((len(classes), len(classes) + 1), dtype=np.int64)
        np.add.at(confused_LL, (gold_U, predicted_U), 1)  # the last column counts words that were cut off
        confusion_LL = confused_LL[:, :-1]
        counts_3L = np.stack([confusion_LL.diagonal(), confusion_LL.sum(axis=0), confused_LL.sum(axis=1)])
    if unit == "words" and classes[0] == "O":
        unit = "entities"
        names, counts_3L = count_types(gold_U, predicted_U, bounds_S1, classes)
    # 2. Scores of each class, and their averages.
    scores = [score_class(name, *counts) for name, counts in zip(names, counts_3L.T.tolist(), strict=True)]
    seen = [score for score in scores if has_several or score.support or score.predicted]
    has_one = unit != "entities" and not has_several
    has_probability = has_one and "probability" in rows[0]
    return ClassReport(
        unit=unit,
        classes=tuple(scores),
        averages=(
            score_class("micro average", *counts_3L.sum(axis=1).tolist()),
            average_classes("macro average", seen, np.ones(len(seen))),
            average_classes("weighted average", seen, np.array([score.support for score in seen])),
        ),
        majority=max(scores, key=lambda score: score.support).name if has_one else None,
        never_predicted=tuple(score.name for score in scores if score.support and not score.predicted),
        labels=() if has_several else tuple(classes),
        confusion=tuple(map(tuple, confusion_LL.tolist())),
        coverage=measure_coverage(rows) if has_probability and unit == "examples" else (),
        calibration_error=calibration_error(rows) if has_probability else None,
    )


COVERED_SHARES = (0.9, 0.8, 0.5)


def measure_coverage(rows: Sequence[Mapping[str, Any]]) -> tuple[Coverage, ...]:
    """Measure the accuracy on the surest examples, about these shares of them. The least probability has three
    decimals, and share and accuracy are those at this value. Shares with the same value are listed once."""
    probabilities_N = np.array([row["probability"] for row in rows])
    is_right_N = np.array([row["gold"] == row["predicted"] for row in rows])
    descending_N = np.sort(probabilities_N)[::-1]
    last = [math.ceil(share * len(rows)) - 1 for share in COVERED_SHARES]
    points = []
    for least in dict.fromkeys(np.floor(descending_N[last] * 1000) / 1000):
        part_N = probabilities_N >= least
        points.append(Coverage(float(part_N.mean()), float(is_right_N[part_N].mean()), float(least)))
    return tuple(points)


def tell_coverage(coverage: Iterable[Coverage]) -> str:
    """Write a sentence on the accuracy on the surest examples."""
    parts = []
    for point in coverage:
        least = "" if point.least is None else f" (probability from {point.least:.3f})"
        parts.append(f"of {100 * point.share:.0f} %{least}, {100 * point.accuracy:.1f} % are right")
    return f"the surest examples: {'; '.join(parts)}"


def count_types(
    gold_U: np.ndarray, predicted_U: np.ndarray, bounds_S1: np.ndarray, classes: Sequence[str]
) -> tuple[tuple[str, ...], np.ndarray]:
    """Name the types of entities, and count the right, predicted and gold entities of each, [3, L]."""
    names = tuple(dict.fromkeys(label[2:] for label in classes[1:]))
    types_L = np.searchsorted(np.unique([label[2:] for label in classes]), names)  # indices as in `find_entities`
    gold_E, predicted_E = (find_entities(tags_U, bounds_S1, classes)[0] for tags_U in (gold_U, predicted_U))
    counts = []
    for entities_E in (np.intersect1d(gold_E, predicted_E), predicted_E, gold_E):
        counts.append(np.bincount(entities_E % len(classes), minlength=len(classes))[types_L])
    return names, np.stack(counts)


def score_class(name: str, right: int, predicted: int, gold: int) -> ClassScore:
    f1 = 2 * right / max(predicted + gold, 1)
    return ClassScore(name, right / max(predicted, 1), right / max(gold, 1), f1, support=gold, predicted=predicted)


def average_classes(name: str, scores: Sequence[ClassScore], weights_L: np.ndarray) -> ClassScore:
    shares_L3 = np.array([(score.precision, score.recall, score.f1) for score in scores]).reshape(-1, 3)
    precision, recall, f1 = (weights_L @ shares_L3 / max(weights_L.sum(), 1)).tolist()
    support, predicted = (sum(getattr(score, key) for score in scores) for key in ("support", "predicted"))
    return ClassScore(name, precision, recall, f1, support, predicted)


def read_report(score: Score) -> ClassReport | None:
    """Report on the test predictions of a cell. None for a task without classes, or without stored predictions."""
    if not score.classes or not (rows := read_test_rows(score)):
        return None
    report = report_classes(rows, score.classes)
    coverage = tuple(replace(point, least=None) for point in report.coverage)
    return replace(report, calibration=score.calibration, coverage=coverage)


def tell_report(report: ClassReport, in_train: Mapping[str, int]) -> list[str]:
    """Write sentences on facts that a score alone hides. `in_train` counts classes in train, if that is known."""
    sentences = []
    supports = {score.name: score.support for score in report.classes}
    if report.majority is not None:
        micro = report.averages[0]
        gap = micro.recall - supports[report.majority] / micro.support
        than = f"{100 * abs(gap):.1f} points {'above' if gap > 0 else 'below'}" if gap else "what one gets by"
        sentences.append(f"accuracy {100 * micro.recall:.1f} % is {than} always predicting '{report.majority}'")
    if report.never_predicted:
        scope = " in train" if in_train else f" {report.unit} here"
        counts = list[str]()
        for name in report.never_predicted:
            counts.append(f"{name} ({in_train.get(name, supports[name]):,}{scope if not counts else ''})")
        sentences.append(f"never predicted: {first_of(counts, CLASSES_IN_TABLE)}")
    if report.calibration_error is not None:
        off, chosen = 100 * report.calibration_error, report.calibration
        if chosen is None or chosen.on_test is None or chosen.temperature == 1:
            sentences.append(f"probabilities are {off:.1f} points off on average (ECE)")
        else:
            how = f"with the temperature {chosen.temperature:.2f} that validation gives, as in a kept model"
            after = f"{100 * chosen.on_test[1]:.1f}"
            sentences.append(f"probabilities are {after} points off on average (ECE) {how}; {off:.1f} without it")
    if report.coverage:
        is_without = report.calibration is not None and report.calibration.temperature != 1
        sentences.append(f"{'without the temperature, ' * is_without}{tell_coverage(report.coverage)}")
    return sentences


def print_report(report: ClassReport, in_train: Mapping[str, int], console: PlainConsole = out) -> None:
    """Print a table of the classes, or of the worst and the best of many, then the sentences."""
    shown = list(report.classes)
    title = f"{report.unit}, in %"
    if len(shown) > CLASSES_IN_TABLE:
        half = CLASSES_IN_TABLE // 2
        shown = sorted((score for score in shown if score.support), key=lambda score: score.f1)
        which = f"the {len(shown)} in gold"
        if len(shown) > CLASSES_IN_TABLE:
            shown, which = [*shown[:half], *shown[-half:]], f"the {half} worst and {half} best"
        title += f"; {which} of {len(report.classes)} classes by F1"
    rows = []
    for score in (*shown, *report.averages):
        percents = [f"{100 * value:.1f}" for value in (score.precision, score.recall, score.f1)]
        rows.append([score.name, *percents, f"{score.support:,}", f"{score.predicted:,}"])
    print_rows(("class", "precision", "recall", "F1", "support", "predicted"), rows, title, console)
    for sentence in tell_report(report, in_train):
        console.prose(sentence)


MOST_COUNTS, LONGEST_LABEL = 25, 30
"""The most labels with which a picture shows counts, and the characters that it shows of a label."""


def draw_confusion(report: ClassReport | None, path: Path) -> None:
    """Draw the confusion matrix as SVG, PNG or PDF: counts, coloured by their share of the row. Raises `InputError` for
    a report without one."""
    import matplotlib
    from matplotlib.figure import Figure

    check_picture(path)
    if report is None or not report.confusion:
        raise InputError(f"{path}: a picture needs a finished cell or a file with one class per example or word")
    confusion_LL = np.array(report.confusion)
    num = len(report.labels)
    shares_LL = confusion_LL / np.maximum(confusion_LL.sum(axis=1, keepdims=True), 1)
    inches = min(2.2 + 0.34 * num, 16)
    with matplotlib.rc_context({"svg.hashsalt": "biphase", "axes.grid": False}, PLOT_STYLE):
        figure = Figure(figsize=(inches, inches), layout="constrained", facecolor="white")
        axes = figure.subplots()
        axes.imshow(shares_LL, cmap="Blues", vmin=0, vmax=1)
        size = min(8.0, 45 * inches / num)
        names = [label if len(label) <= LONGEST_LABEL else f"{label[:LONGEST_LABEL]}…" for label in report.labels]
        axes.set_xticks(range(num), names, rotation=90, fontsize=size)
        axes.set_yticks(range(num), names, fontsize=size)
        axes.set(xlabel=f"predicted ({report.unit if report.unit == 'examples' else 'words'})", ylabel="gold")
        for row, column in np.argwhere(confusion_LL) if num <= MOST_COUNTS else ():
            ink = "white" if shares_LL[row, column] > 0.5 else INK
            axes.text(column, row, f"{confusion_LL[row, column]}", ha="center", va="center", color=ink, fontsize=7)
        save_picture(figure, path)
