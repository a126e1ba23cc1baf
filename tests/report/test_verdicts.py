"""The verdict rule, case by case, on score folders made so that the answer is known."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from biphase.api.finetuning import result_of
from biphase.console import out
from biphase.errors import InputError
from biphase.finetuning.scores import read_score, read_scores
from biphase.finetuning.words import reduce_config
from biphase.report.verdicts import (
    TaskComparison,
    add_words,
    compare,
    print_comparison,
    print_summary,
    summarize,
    tell_alone,
)

WriteCells = Callable[..., None]

CLEAR = [0.80, 0.81, 0.82], [0.70, 0.71, 0.725]
"""Differences 0.1, 0.1 and 0.095: t = 59, p = 0.0003."""
MODEST = [0.72, 0.73, 0.74], [0.70, 0.70, 0.70]
"""Differences 0.02, 0.03 and 0.04: t = 0.03·√3/0.01 = 5.196, p = 0.0351."""
NOISY = [0.70, 0.80, 0.75], [0.75, 0.70, 0.74]


@pytest.fixture
def write_cells(write_cell: Callable[..., Path]) -> WriteCells:
    """One cell per score, with seeds 0, 1, 2, …"""

    def write(model: str, task: str, tests: Sequence[float | None], lines: Any = None, **settings: Any) -> None:
        for seed, test in enumerate(tests, start=settings.pop("first_seed", 0)):
            write_cell(model, task, seed=seed, test=test, lines=lines and lines(test), **settings)

    return write


@pytest.fixture
def compare_all(scores_folder: Path) -> Callable[[], list[TaskComparison]]:
    return lambda: compare(read_scores(scores_folder), "a", "b")


Compare = Callable[[], list[TaskComparison]]


def same_examples(test: float) -> list[dict]:
    """1,000 examples of which the first are right: models differ on the same few examples, always in one direction."""
    return [{"id": str(i), "score": float(i < round(1000 * test))} for i in range(1000)]


def few_examples(test: float) -> list[dict]:
    """Each example one and the same partial score but for a pair that goes up and down: differences are all chance."""
    sign = 1 if test > 0.75 else -1
    return [{"id": str(i), "score": test + sign * swing} for i, swing in enumerate([3.0, -3.0] * 10)]


def test_clear_and_noisy(write_cells: WriteCells, compare_all: Compare) -> None:
    for task, (a, b) in (("clear", CLEAR), ("noisy", NOISY), ("reversed", CLEAR[::-1])):
        write_cells("a", task, a)
        write_cells("b", task, b)
    clear, noisy, turned = compare_all()
    assert [one.verdict for one in (clear, noisy, turned)] == ["A better", "within noise", "B better"]
    assert clear.contrast and clear.contrast.test == "paired t" and clear.contrast.estimate == pytest.approx(0.295 / 3)
    raw = stats.ttest_rel(*CLEAR).pvalue
    assert clear.p_value == turned.p_value == pytest.approx(3 * raw) and clear.num_tasks == 3
    assert clear.contrast.noise == ("fine-tuning seeds",) and "test examples are not accounted for" in clear.notes[0]


def test_many_tasks_ask_for_more(write_cells: WriteCells, compare_all: Compare) -> None:
    """p = 0.035 alone is more than noise; beside another question it is 0.070."""
    for model, tests in zip("ab", MODEST, strict=True):
        write_cells(model, "first", tests)
    (alone,) = compare_all()
    assert alone.p_value == pytest.approx(0.0351, abs=1e-4) and alone.verdict == "A better"
    for model, tests in zip("ab", MODEST, strict=True):
        write_cells(model, "second", tests)
    both = compare_all()
    assert [(round(one.p_value, 3), one.verdict) for one in both] == [(0.07, "within noise")] * 2
    half_width = stats.t.ppf(1 - 0.05 / 4, 2) * 0.01 / math.sqrt(3)
    for one in both:
        assert one.difference and one.level == one.difference.level == 0.025
        assert (one.difference.low, one.difference.high) == pytest.approx((0.03 - half_width, 0.03 + half_width))
    with out.capture() as capture:
        print_comparison(both)
    assert capture.get().count("+3.00 points [−0.58, +6.58; 97.5 %], within noise") == 2


def test_different_seeds_are_not_paired(write_cells: WriteCells, compare_all: Compare) -> None:
    write_cells("a", "genre", CLEAR[0])
    write_cells("b", "genre", CLEAR[1][:2], first_seed=1)
    (one,) = compare_all()
    assert one.contrast and one.contrast.test == "Welch"
    assert one.p_value == pytest.approx(stats.ttest_ind(CLEAR[0], CLEAR[1][:2], equal_var=False).pvalue)


def test_examples_that_agree(write_cells: WriteCells, compare_all: Compare) -> None:
    for model, tests in zip("ab", CLEAR, strict=True):
        write_cells(model, "genre", tests, lines=same_examples)
    (one,) = compare_all()
    assert one.verdict == "A better" and one.p_value < 0.01 and one.notes == ()
    assert one.contrast and one.contrast.num_examples == 1000
    assert one.contrast.noise == ("fine-tuning seeds", "test examples")


def test_examples_take_a_better_one_back(write_cells: WriteCells, compare_all: Compare) -> None:
    """Seeds are sure, p < 0.001; but the twenty examples go up and down by three points each."""
    for model, tests in zip("ab", CLEAR, strict=True):
        write_cells(model, "genre", tests, lines=few_examples)
    (one,) = compare_all()
    assert one.verdict == "within noise" and one.p_value > 0.05 and one.notes == ()


def test_examples_alone_make_no_better_one(write_cells: WriteCells, compare_all: Compare) -> None:
    for model, tests in zip("ab", NOISY, strict=True):
        write_cells(model, "genre", tests, lines=same_examples)
    (one,) = compare_all()
    assert one.verdict == "within noise" and one.contrast and one.p_value > 0.05 > one.contrast.over_examples().p_value


def test_one_seed(write_cells: WriteCells, compare_all: Compare) -> None:
    for task, lines in (("1-none", None), ("2-differ", same_examples), ("3-chance", few_examples)):
        write_cells("a", task, [0.8], lines=lines)
        write_cells("b", task, [0.7], lines=lines)
    none, differ, chance = compare_all()
    assert [one.verdict for one in (none, differ, chance)] == ["cannot be told", "cannot be told", "within noise"]
    assert all("one seed shows no spread over seeds" in one.notes for one in (none, differ, chance))
    assert all(math.isnan(one.p_value) for one in (none, differ, chance))
    assert none.difference and math.isnan(none.difference.low)
    assert differ.contrast and differ.difference == differ.contrast.over_examples() and differ.difference.low > 0.08


def test_the_same_difference_with_every_seed(write_cells: WriteCells, compare_all: Compare) -> None:
    write_cells("a", "genre", [0.8, 0.7])
    write_cells("b", "genre", [0.7, 0.6])
    (one,) = compare_all()
    assert one.verdict == "cannot be told" and "all seeds differ by the same amount" in one.notes


def test_no_difference(write_cells: WriteCells, compare_all: Compare) -> None:
    for model in "ab":
        write_cells(model, "genre", CLEAR[0], lines=same_examples)
    (one,) = compare_all()
    assert one.verdict == "within noise" and one.p_value == 1


def test_survivors_win_nothing(write_cells: WriteCells, compare_all: Compare) -> None:
    """A seed of the one ahead diverged at its only rate; of the one behind, that takes nothing away."""
    write_cells("a", "1-ahead", [*CLEAR[0], None])
    write_cells("b", "1-ahead", CLEAR[1])
    write_cells("a", "2-behind", CLEAR[0])
    write_cells("b", "2-behind", [*CLEAR[1], None])
    ahead, behind = compare_all()
    assert ahead.verdict == "cannot be told" and "the better model lost seeds" in ahead.notes
    assert behind.verdict == "A better" and "1 of 4 seeds of b diverged at its best rate, 5e-5" in behind.notes[0]


def test_what_cannot_be_compared(write_cells: WriteCells, compare_all: Compare) -> None:
    write_cells("a", "1-data", CLEAR[0], data_hash="e" * 64)
    write_cells("b", "1-data", CLEAR[1], data_hash="f" * 64)
    write_cells("a", "2-alone", CLEAR[0])
    write_cells("a", "3-lost", CLEAR[0])
    write_cells("b", "3-lost", [None, None])
    notes = (
        "they were scored with different data",
        "no scores of b on task '2-alone'",
        "b on 3-lost: training diverged",
    )
    for one, note in zip(compare_all(), notes, strict=True):
        assert one.verdict == "cannot be told" and one.contrast is None and note in one.notes[0]


def test_other_test_examples(write_cells: WriteCells, compare_all: Compare) -> None:
    write_cells("a", "genre", CLEAR[0], lines=same_examples)
    write_cells("b", "genre", CLEAR[1], lines=lambda test: [{"id": "x"} | row for row in same_examples(test)][::-1])
    (one,) = compare_all()
    assert one.contrast and one.contrast.num_examples == 1000 and "the test examples are not the same" in one.notes[0]
    assert one.contrast.example_variance == pytest.approx((0.81 * 0.19 + 0.71167 * 0.28833) / 999, rel=0.05)


def test_unequal_fine_tuning_is_said(write_cells: WriteCells, compare_all: Compare) -> None:
    write_cells("a", "genre", CLEAR[0], max_steps=500)
    write_cells("b", "genre", CLEAR[1])
    assert "they were fine-tuned with different max_steps" in compare_all()[0].notes


def test_a_choice_of_rates_that_is_not_known_is_said(write_cells: WriteCells, compare_all: Compare) -> None:
    for model in ("a", "b"):
        for rate in (1e-5, 5e-5):
            write_cells(model, "genre", CLEAR[0], same_examples, rate=rate, num_examples={"validation": 50})
    told = [
        note
        for note in compare_all()[0].notes
        if note.startswith("what other validation examples would have chosen is not accounted for")
    ]
    assert len(told) == 2 and all("no per-example predictions (validation.jsonl)" in note for note in told)


def test_unequal_tuning_is_said(write_cells: WriteCells, compare_all: Compare) -> None:
    for rate in (1e-5, 5e-5):
        write_cells("a", "genre", CLEAR[0], rate=rate)
    write_cells("b", "genre", CLEAR[1])
    (one,) = compare_all()
    assert one.verdict == "A better" and one.notes[0] == "unequal tuning: 2 rates tried for a, 1 for b"


def test_one_class_for_all_is_said(write_cells: WriteCells, compare_all: Compare, scores_folder: Path) -> None:
    def labels(test: float) -> list[dict]:
        gold = ["yes" if i % 4 else "no" for i in range(40)]
        found = gold if test == 1 else ["yes"] * 40
        pairs = enumerate(zip(gold, found, strict=True))
        return [{"id": str(i), "gold": g, "predicted": p, "score": float(g == p)} for i, (g, p) in pairs]

    for model, test in (("a", 1.0), ("b", 0.75)):
        write_cells(model, "genre", [test, test], lines=labels)
    (one,) = compare_all()
    assert "degenerate: b predicts the same for all examples with 2 of 2 seeds" in one.notes
    assert [(row.score.arm.name, row.score.count_degenerate()) for row in summarize(read_scores(scores_folder))] == [
        ("a", 0),
        ("b", 2),
    ]
    with out.capture() as capture:
        print_summary(summarize(read_scores(scores_folder)))
    assert "degenerate: b on genre" in capture.get()


def test_one_number_for_all_has_no_correlation(write_cell: Callable[..., Path]) -> None:
    pairs = enumerate([(1.0, 0.25), (2.0, 0.25), (4.0, 0.25)])
    lines = [{"id": str(i), "gold": gold, "predicted": predicted} for i, (gold, predicted) in pairs]
    for gold in (1.0, 4.0):
        lines[0]["gold"] = lines[1]["gold"] = gold
        folder = write_cell("m", "rated", test=0.0, metric="spearman", lines=lines, name=f"gold-{gold:.0f}")
        told = [*tell_alone(result_of(read_score(folder)), (), ())]
        said = "degenerate: this model predicts the same for all test examples, so its spearman means nothing"
        assert told == ([f"{said} (0 if undefined)"] if gold == 1 else []), "its labels are all the same"


def test_tags_are_compared_by_sentence(write_cells: WriteCells, compare_all: Compare) -> None:
    """`a` finds every entity, `b` misses those of every other sentence: F1 1 and 2/3."""

    def sentences(test: float) -> list[dict]:
        gold = ["B-PER", "I-PER", "O"]
        return [
            {"id": str(i), "gold": gold, "predicted": gold if test == 1 or i % 2 else ["O"] * 3} for i in range(100)
        ]

    for model, f1 in (("a", 1.0), ("b", 2 / 3)):
        write_cells(model, "uner", [f1, f1], lines=sentences, metric="f1")
    (one,) = compare_all()
    assert one.contrast and one.contrast.estimate == pytest.approx(1 / 3) and one.contrast.num_examples == 100
    tested = one.contrast.over_examples()
    assert tested.low == pytest.approx(1 / 3, abs=0.12) and tested.p_value < 0.01


def test_labels_are_compared_by_the_metric_itself(write_cells: WriteCells, compare_all: Compare) -> None:
    """`a` is right everywhere; `b` finds half of the few that are yes: accuracy hardly differs, F1 does."""

    def labels(test: float) -> list[dict]:
        gold = ["yes" if i % 10 == 0 else "no" for i in range(200)]
        found = ["no" if test < 1 and i % 20 == 0 else label for i, label in enumerate(gold)]
        pairs = zip(gold, found, strict=True)
        return [{"id": str(i), "gold": g, "predicted": p, "score": float(g == p)} for i, (g, p) in enumerate(pairs)]

    f1_yes, f1_no = 2 * 10 / (20 + 10), 2 * 180 / (180 + 190)
    for metric, value in (("f1", f1_yes), ("macro_f1", (f1_yes + f1_no) / 2)):
        for model, test in (("a", 1.0), ("b", value)):
            write_cells(model, metric, [test, test], lines=labels, metric=metric, classes=("no", "yes"))
    for one, expected in zip(compare_all(), (1 - f1_yes, 1 - (f1_yes + f1_no) / 2), strict=True):
        assert one.contrast and one.contrast.num_examples == 200
        tested = one.contrast.over_examples()
        assert tested.value == pytest.approx(expected) and tested.p_value < 0.03
        assert not any("not accounted for" in note for note in one.notes)


def test_names_that_do_not_work(write_cells: WriteCells, scores_folder: Path) -> None:
    write_cells("runs/mlm", "genre", CLEAR[0])
    write_cells("runs/clm", "snli", CLEAR[1])
    scores = read_scores(scores_folder)
    with pytest.raises(InputError, match="'mlm' and 'runs/mlm' are the same model"):
        compare(scores, "mlm", "runs/mlm")
    with pytest.raises(InputError, match="runs/mlm and runs/clm have no task in common"):
        compare(scores, "mlm", "clm")
    with pytest.raises(InputError, match="no scores of a model 'mml'; did you mean 'mlm'"):
        compare(scores, "mml", "clm")


def test_summary_by_hand(write_cells: WriteCells, scores_folder: Path) -> None:
    """At 1e-4: 0.80, 0.82 and 0.84, mean 0.82, s = 0.02, t(2) = 4.3027."""
    write_cells("m", "genre", [0.80, 0.82, 0.84], rate=1e-4, validation=0.9)
    write_cells("m", "genre", [0.70, 0.70, 0.70], rate=1e-5, validation=0.8)
    write_cells("m", "genre", [None, None, 0.99], rate=1e-3, validation=0.99)
    write_cells("lost", "genre", [None], rate=1e-4)
    write_cells("best", "genre", [0.9], rate=1e-4)
    best, m, lost = summarize(read_scores(scores_folder))
    assert tuple(row.score.arm.name for row in (best, m, lost)) == ("best", "m", "lost")
    assert (
        m.score.rate == 1e-4 and m.score.seeds == (0, 1, 2) and m.diverged == ((1e-3, 0), (1e-3, 1)) and m.missing == ()
    )
    assert m.score.interval.value == pytest.approx(0.82)
    assert m.score.interval.half_width == pytest.approx(4.3026527 * 0.02 / math.sqrt(3))
    assert m.paper_interval.half_width == pytest.approx(1.959964 * 0.02 / math.sqrt(3))
    # Of the rates 1e-5 and 1e-4, both ends included; 1e-3 is outside.
    assert m.spread and m.spread.num == 6
    assert m.spread.value == pytest.approx(np.std([0.80, 0.82, 0.84, 0.70, 0.70, 0.70], ddof=1))
    assert best.spread is None and math.isnan(best.score.interval.half_width)
    assert lost.score.rate is None and lost.score.interval.num == 0 and lost.diverged == ((1e-4, 0),)


def test_printed_summary(write_cells: WriteCells, write_cell: Callable[..., Path], scores_folder: Path) -> None:
    write_cells("runs/m", "genre", [0.80, 0.82, 0.84])
    write_cells("runs/m", "genre", [None], weights="random")
    (write_cell("runs/m", seed=9, name="cut") / "score.json").write_text("{")
    scores = read_scores(scores_folder)
    with out.capture() as capture:
        print_summary(summarize(scores), scores.broken)
    text = capture.get()
    assert "82.00 ± 4.97" in text and "2.26" in text  # 1.96·2/√3 in points
    assert "m [weights=random]" in text and "1 of 1" in text
    assert "missing: m [weights=random] on genre: 2 cells: 5e-5 seed 1, 5e-5 seed 2" in text
    assert f"left out: {scores_folder / 'cut' / 'score.json'} (is not valid JSON" in text
    with out.capture() as capture:
        print_summary([])
    assert capture.get().strip() == "no finished scores"


def test_printed_signals(write_cells: WriteCells, scores_folder: Path) -> None:
    """Of two models it is the t of their difference: 0.11 over 0.01/√3 on genre, 0.01 over 0.03/√3 on snli."""
    write_cells("runs/a", "genre", [0.80, 0.82, 0.84])
    write_cells("runs/b", "genre", [0.70, 0.71, 0.72])
    write_cells("runs/a", "snli", [0.80, 0.80, 0.80])
    write_cells("runs/b", "snli", [0.82, 0.79, 0.76])
    write_cells("runs/a", "alone", [0.5, 0.6, 0.7])
    with out.capture() as capture:
        print_summary(summarize(read_scores(scores_folder)))
    text = " ".join(capture.get().split())
    assert "signal ÷ noise: genre 19.1, snli (0.6); about 1 if models are equally good" in text
    assert "snli separates no models yet; needed: about" in text and "genre separates" not in text


def test_models_on_other_data_or_by_another_metric_are_no_rivals(
    write_cells: WriteCells, write_cell: Callable[..., Path], scores_folder: Path
) -> None:
    """Before rows were added, and after: no signal is measured over both, and words alone stand beside each."""
    for data, value in (("1", 0.91), ("2", 0.81)):
        write_cells("runs/m", "mine", [value, value + 0.01], data_hash=data * 64)
    write_cells("runs/m", "other", [0.5, 0.6])
    write_cells("runs/n", "other", [0.7, 0.7], metric="f1")
    scores = read_scores(scores_folder)
    [alone] = [read_score(write_cell("TF-IDF + linear", "mine", test=0.85, data_hash="2" * 64, name="words"))]
    alone = alone.model_copy(update={"config": reduce_config(alone.config, "accuracy", 0)})
    rows = add_words(summarize(scores), [alone])
    assert [(row.score.dataset, row.data_hash[0]) for row in rows if row.words] == [("mine", "2")]
    [words] = [row.words for row in rows if row.words]
    assert words.num_models == 1 and words.mean == pytest.approx(0.815)
    with out.capture() as capture:
        print_summary(rows)
    text = " ".join(capture.get().split())
    assert "mine [data=11111111]" in text and "mine [data=22222222]" in text and "signal" not in text
    assert "scores on other data or by another metric do not compare: mine, other" in text


def test_a_model_without_a_score_says_why(write_cells: WriteCells, scores_folder: Path) -> None:
    """Each seed was tried at a rate of its own."""
    for seed, rate, validation in ((0, 3e-4, 0.5), (1, 3e-4, 0.5), (2, 9e-4, 0.9)):
        write_cells("m", "mine", [0.8], rate=rate, validation=validation, first_seed=seed)
    with out.capture() as capture:
        print_summary(summarize(read_scores(scores_folder)))
    assert "no score: m on mine: no seed finished at the rate that the others chose" in " ".join(capture.get().split())


def test_printed_comparison(write_cells: WriteCells, compare_all: Compare) -> None:
    for model, clear, modest in zip("ab", CLEAR, MODEST, strict=True):
        write_cells(model, "clear", clear, lines=same_examples)
        write_cells(model, "modest", modest)
        write_cells(model, "single", clear[:1])
    with out.capture() as capture:
        print_comparison(compare_all())
    lines = capture.get().splitlines()
    by_task = {
        word: [line for line in lines if line.strip().startswith(word)] for word in ("clear", "modest", "single")
    }
    row, sentence = by_task["clear"]
    assert "81.00 ± 2.48" in row and "+9.83 ± " in row and row.rstrip().endswith("A better")
    assert sentence.startswith("clear (accuracy): a is ahead of b: 81.00 % against 71.17 %, +9.83 points [+")
    assert "over 3 pairs of seeds and 1,000 examples; adjusted over 2 tasks)" in sentence
    assert "+3.00 points [+0.52, +5.48]" in by_task["modest"][1]
    assert "over 3 pairs of seeds only; adjusted over 2 tasks" in by_task["modest"][1]
    assert by_task["single"][1].startswith(
        "single (accuracy): a cannot be distinguished from b: 80.00 % against 70.00 %, +10.00 points; "
    )
    assert lines[0] == "A = a" and lines[-1].startswith("of 3 tasks: A better on ")
