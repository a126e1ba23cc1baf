"""What a score is made of, class by class, is what scikit-learn and seqeval say."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import sklearn.metrics
from seqeval.metrics import classification_report as seqeval_report

import biphase
from biphase.cli.app import run_command
from biphase.errors import InputError
from biphase.finetuning.calibration import Calibration
from biphase.finetuning.class_report import (
    ClassReport,
    ClassScore,
    Coverage,
    draw_confusion,
    print_report,
    report_classes,
    tell_coverage,
)
from biphase.finetuning.class_report import tell_report as tell
from biphase.finetuning.families import sequence_classification, token_classification
from biphase.tasks.examples import LabelledText, TaggedWords
from biphase.tasks.spec import task_table
from biphase.tasks.splits import draw_indices

from ..conftest import full_disk
from .conftest import fit_cell, make_cell
from .metrics.test_tagging import SETS, labels_of, read_set, to_rows


def check(scores: tuple[ClassScore, ...], theirs: dict[str, Any]) -> None:
    """The scores of classes, or their averages, are those of a report of scikit-learn's form."""
    for score in scores:
        said = theirs[score.name.replace("average", "avg")]
        assert [score.precision, score.recall, score.f1, score.support] == pytest.approx(
            [said[key] for key in ("precision", "recall", "f1-score", "support")]
        )


def draw_labels(names: list[str], num: int) -> tuple[list[str], list[str]]:
    """Labels of unequal frequency, of which the first is never gold and the second never predicted."""
    rng = np.random.default_rng(0)
    shares = rng.dirichlet(np.full(len(names) - 1, 0.5))
    gold = [str(name) for name in rng.choice(names[1:], num, p=shares)]
    predicted = [name if rng.random() < 0.6 else str(rng.choice(names)) for name in gold]
    return gold, [names[0] if name == names[1] else name for name in predicted]


@pytest.mark.parametrize("names", [["b", "a", "c", "d"], ["10", "9", "-1", "2"], [f"class {n}" for n in range(200)]])
def test_one_label_is_counted_as_scikit_learn_counts(names: list[str]) -> None:
    gold, predicted = draw_labels(names, 300)
    report = report_classes([{"gold": a, "predicted": b} for a, b in zip(gold, predicted, strict=True)], names)
    theirs: Any = sklearn.metrics.classification_report(
        gold, predicted, labels=names, output_dict=True, zero_division=0
    )
    check(report.classes, theirs)
    seen = sorted({*gold, *predicted})
    theirs = sklearn.metrics.classification_report(gold, predicted, labels=seen, output_dict=True, zero_division=0)
    check(report.averages[1:], theirs)
    assert report.averages[0].f1 == pytest.approx(sklearn.metrics.accuracy_score(gold, predicted))
    assert np.array_equal(report.confusion, sklearn.metrics.confusion_matrix(gold, predicted, labels=names))
    assert set(report.never_predicted) == set(gold) - set(predicted) != set()
    assert report.majority == max(names, key=gold.count)


def test_several_labels_are_counted_as_scikit_learn_counts() -> None:
    names, rng = ["b", "a", "moon", "c"], np.random.default_rng(0)
    gold_NC, predicted_NC = (rng.random((50, 4)) < [0.5, 0.1, 0.0, 0.3] for _ in range(2))
    rows = []
    for gold_C, predicted_C in zip(gold_NC, predicted_NC, strict=True):
        labels = [[name for name, is_in in zip(names, part, strict=True) if is_in] for part in (gold_C, predicted_C)]
        rows.append({"gold": labels[0], "predicted": labels[1], "probabilities": {}})
    report = report_classes(rows, names)
    theirs: Any = sklearn.metrics.classification_report(
        gold_NC, predicted_NC, target_names=names, output_dict=True, zero_division=0
    )
    check((*report.classes, *report.averages), theirs)
    assert report.majority is None and report.confusion == ()


@pytest.mark.parametrize("name", SETS)
def test_entities_are_counted_as_seqeval_counts(name: str) -> None:
    gold, predicted = read_set(name)
    report = report_classes(to_rows(gold, predicted), labels_of(gold, predicted))
    theirs = seqeval_report(gold, predicted, output_dict=True, zero_division=0)
    check((*(score for score in report.classes if score.support or score.predicted), *report.averages), theirs)
    flat = [[tag for tags in side for tag in tags] for side in (gold, predicted)]
    assert np.array_equal(report.confusion, sklearn.metrics.confusion_matrix(*flat, labels=report.labels))


def test_a_word_without_a_tag_is_missed() -> None:
    report = report_classes([{"gold": ["N", "V", "V"], "predicted": ["N", "N", ""]}], ["N", "V"])
    assert [(score.recall, score.support, score.predicted) for score in report.classes] == [(1, 1, 2), (0, 2, 0)]
    assert report.confusion == ((1, 0), (1, 0)) and report.averages[0].recall == pytest.approx(1 / 3)


def report_of(gold: str, predicted: str, names: str) -> ClassReport:
    rows = [{"gold": a, "predicted": b} for a, b in zip(gold.split(), predicted.split(), strict=True)]
    return report_classes(rows, names.split())


def test_sentences_name_the_majority_and_what_is_never_predicted() -> None:
    report = report_of("a a a b c c c", "a a b b b b b", "a b c d")
    assert tell(report, {"c": 1400}) == [
        "accuracy 42.9 % is what one gets by always predicting 'a'",
        "never predicted: c (1,400 in train)",
    ]
    assert tell(report_of("a a b c", "a a b b", "a b c"), {})[0].endswith(
        "75.0 % is 25.0 points above always predicting 'a'"
    )
    report = report_of("a a b c", "d a d d", "a b c d")
    assert tell(report, {}) == [
        "accuracy 25.0 % is 25.0 points below always predicting 'a'",
        "never predicted: b (1 examples here), c (1)",
    ]


def test_the_surest_examples_are_those_that_a_threshold_leaves() -> None:
    """The same shares and accuracies as pandas', at thresholds that can be typed."""
    rng = np.random.default_rng(0)
    probability = np.round(rng.uniform(0.3, 1, 400), 5)
    predicted = np.where(rng.uniform(size=400) < probability, "a", "b")
    table = pandas.DataFrame({"gold": "a", "predicted": predicted, "probability": probability})
    report = report_classes(table.to_dict("records"), ["a", "b"])
    assert [round(point.share, 2) for point in report.coverage] == [0.9, 0.8, 0.5]
    for point in report.coverage:
        sure = table[table["probability"] >= point.least]
        assert point.least == round(point.least or 0, 3)
        assert [point.share, point.accuracy] == pytest.approx([len(sure) / 400, (sure["predicted"] == "a").mean()])
    first, _, last = report.coverage
    assert first.accuracy < last.accuracy
    assert tell(report, {})[-1] == tell_coverage(report.coverage)
    told = f"the surest examples: of 90 % (probability from {first.least:.3f}), {100 * first.accuracy:.1f} % are right;"
    assert tell_coverage(report.coverage).startswith(told)
    for temperature, start in ((2.0, "without the temperature, the surest"), (1.0, "the surest")):
        cell = replace(report, calibration=Calibration(temperature=temperature, on_test=(0.2, 0.1)))
        assert tell(cell, {})[-1].startswith(start)
    same = [{"gold": "a", "predicted": "a", "probability": 0.25}] * 8
    assert report_classes(same, ["a", "b"]).coverage == (Coverage(1.0, 1.0, 0.25),)
    assert report_classes([{"gold": ["a"], "predicted": ["a"], "probability": 1.0}], ["a", "b"]).coverage == ()


def test_of_many_classes_the_worst_and_the_best_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    names = [f"class{n:03}" for n in range(40)]
    predicted = [name if number >= 20 else "class039" for number, name in enumerate(names)]
    print_report(report_of(" ".join(names), " ".join(predicted), " ".join(names)), {})
    printed = capsys.readouterr().out
    assert "the 6 worst and 6 best of 40 classes by F1" in printed and printed.count("│ class0") == 12
    assert "class000 " in printed and "class038 " in printed and "│ class025" not in printed
    print_report(report_of(" ".join(names[:7]), " ".join(names[:7]), " ".join(names)), {})
    assert "the 7 in gold of 40 classes by F1" in capsys.readouterr().out


def test_classes_are_listed_for_some_examples() -> None:
    sentences = [TaggedWords("", ("a",) * len(tags), tags) for tags in ((2, 0), (1,), (3, 3))]
    tags = token_classification.tag_split(sentences)
    several: Any = {"problem_type": "multi_label_classification", "classes": tuple("abcd")}
    task = task_table()["snli"].model_copy(update=several)
    sets = sequence_classification.label_split(task, [LabelledText("", (), label) for label in ((0, 2), (1,), (3,))])
    for split, expected in ((tags, [2, 0, 3, 3]), (sets, [0, 2, 3])):
        assert split.classes_of(np.array([0, 2])).tolist() == expected


@pytest.mark.parametrize("num", [3, pytest.param(100, marks=[pytest.mark.slow, pytest.mark.minutes])])
def test_what_is_confused_is_drawn(num: int, tmp_path: Path) -> None:
    """A hundred classes are too many for counts and for letters of the usual size."""
    names = [f"{n} $x_1$ {'long' * 20}" for n in range(num)]
    rows = [{"gold": name, "predicted": names[number // 2]} for number, name in enumerate(names)]
    report = report_classes(rows, names)
    for ending in ("png", "svg"):
        draw_confusion(report, tmp_path / f"a.{ending}")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG") and "1 $x_1$" in (tmp_path / "a.svg").read_text()
    for ending in ("png", "svg", "pdf") if num == 3 else ():
        with full_disk(3000), pytest.raises(OSError):
            draw_confusion(report, tmp_path / f"b.{ending}")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.png", "a.svg"]
    with pytest.raises(InputError, match=r"a\.gif: a picture ends in \.svg, \.png, \.pdf"):
        draw_confusion(report, tmp_path / "a.gif")


def test_a_cell_says_what_it_never_predicts(
    model_folder: Path, data_dirs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In its score, by `inspect`, and in the summary of `evaluate`; it counts the examples that train."""
    out = tmp_path / "scores"
    config = make_cell("snli", learning_rate=1e-9, max_train_examples=20).config
    score = fit_cell(str(model_folder), "snli", config, out, data_dirs["snli"])
    assert score.folder is not None
    lines = (score.folder / "test.jsonl").read_text().splitlines()
    pairs = [(row["gold"], row["predicted"]) for row in map(json.loads, lines)]
    never = {gold for gold, _ in pairs} - {predicted for _, predicted in pairs}
    train = [json.loads(line)["label"] for line in (data_dirs["snli"] / "train.jsonl").read_text().splitlines()]
    chosen = [train[index] for index in draw_indices(len(train), 20)]
    expected = {name: chosen.count(score.classes.index(name)) for name in never}
    assert any(train.count(score.classes.index(name)) > number for name, number in expected.items())
    assert expected and score.never_predicted["test"] == expected
    facts = biphase.inspect(score.folder, picture=tmp_path / "cell.png")
    assert set(facts["classes"].never_predicted) == never and (tmp_path / "cell.png").exists()
    assert np.sum(facts["classes"].confusion) == len(pairs)
    run_command(["inspect", str(score.folder), "--format", "json"])
    assert json.loads(capsys.readouterr().out)["classes"]["never_predicted"] == [*expected]
    run_command(["inspect", str(score.folder)])
    assert "in train)" in capsys.readouterr().out
    run_command(["evaluate", "--out", str(out)])
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("never predicted:")]
    assert all(name in line for name in never)
    run_command(["evaluate", "--out", str(out), "--format", "json"])
    assert json.loads(capsys.readouterr().out)["scores"][0]["never_predicted"] == dict.fromkeys(expected, 1)
    with pytest.raises(InputError, match="a picture needs a finished cell"):
        biphase.inspect(out, picture=tmp_path / "no.png")
