"""The scores of words alone: against scikit-learn's own pipeline, seqeval and answers known by hand."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy import stats
from scipy.stats import spearmanr
from seqeval.metrics import f1_score
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.multiclass import OneVsRestClassifier
from sklearn.pipeline import make_pipeline, make_union

import biphase
from biphase.api.finetuning import result_of
from biphase.console import out
from biphase.errors import InputError
from biphase.finetuning import words
from biphase.finetuning.config import CellPlan, FinetuneConfig, plan_cells
from biphase.finetuning.fit import draw_shots, fit_cells
from biphase.finetuning.metrics import score_rows
from biphase.finetuning.scores import Score, read_examples, read_scores
from biphase.finetuning.words import (
    STRENGTHS,
    WORD_SCORES,
    find_word_scores,
    list_seen,
    read_word_scores,
    reduce_config,
    score_words,
)
from biphase.report.results import ReportArm
from biphase.report.statistics import mean_interval
from biphase.report.verdicts import add_words, compare, compare_words, print_summary, summarize
from biphase.tasks.examples import LabelledText, load_examples
from biphase.tasks.own import write_task
from biphase.tasks.sources import TaskSource, find_task_sources
from biphase.tasks.splits import TaskData, draw_indices

NOUNS = ("cat", "dog", "tree", "house", "river", "paper", "stone", "train")
FEW = FinetuneConfig(precision="fp32", max_length=64, max_train_examples=300)


def make_rows(num: int, label: Any, seed: int = 0) -> list[dict[str, Any]]:
    """Texts of six nouns, with the label that a function gives to the nouns and a random number."""
    rng = np.random.default_rng(seed)
    drawn = [([str(noun) for noun in rng.choice(NOUNS, 6)], rng.random()) for _ in range(num)]
    return [{"text": " ".join(nouns), "label": label(nouns, luck)} for nouns, luck in drawn]


def noisy_class(nouns: list[str], luck: float) -> str:
    return "abc"[int(3 * luck) if luck < 0.3 else nouns.count("cat") % 3]


def own_source(folder: Path, label: Any = noisy_class, sizes: tuple[int, int, int] = (400, 100, 150)) -> TaskSource:
    named = zip(("train", "validation", "test"), sizes, strict=True)
    data = {split: make_rows(size, label, seed) for seed, (split, size) in enumerate(named)}
    task, place = write_task(data, folder, "own")
    return find_task_sources(task, {"own": place})[1]


def load(source: TaskSource) -> TaskData:
    data = load_examples(source, False)
    assert isinstance(data, TaskData)
    return data


def texts_of(examples: Any) -> list[str]:
    return [example.texts[0][0] for example in examples]


def make_pipe(model: Any) -> Any:
    vectors = TfidfVectorizer(sublinear_tf=True, ngram_range=(1, 2), token_pattern=r"\w+|[^\w\s]")
    characters = TfidfVectorizer(sublinear_tf=True, ngram_range=(3, 5), analyzer="char_wb")
    return make_pipeline(make_union(vectors, characters), model)


def score_pipelines(trained: Any, validation: Any, test: Any) -> list[tuple[float, float, float]]:
    """The accuracy of scikit-learn's pipeline on validation and test, and minus its C, for each strength."""
    found = []
    for strength in STRENGTHS:
        model = LogisticRegression(C=strength, solver="liblinear", dual=True, max_iter=1000, random_state=0)
        pipe = make_pipe(OneVsRestClassifier(model)).fit(texts_of(trained), [example.label for example in trained])
        right = []
        for examples in (validation, test):
            right.append(float(np.mean(pipe.predict(texts_of(examples)) == [example.label for example in examples])))
        found.append((right[0], -strength, right[1]))
    return found


def test_texts_are_classified_as_by_a_pipeline_of_scikit_learn_at_the_strength_that_is_best_on_validation(
    tmp_path: Path,
) -> None:
    source = own_source(tmp_path)
    [score] = score_words(source, source, [FEW], tmp_path / "words")
    data = load(source)
    found = score_pipelines([data.train[index] for index in draw_indices(400, 300)], data.validation, data.test)
    assert len({values[2] for values in found}) > 1, "the choice of a strength decides nothing here"
    assert (score.metrics["validation"]["accuracy"], score.metrics["test"]["accuracy"]) == max(found)[::2]
    assert (score.model, score.num_examples) == ("TF-IDF + linear", {"train": 400, "validation": 100, "test": 150})


def test_numbers_are_predicted_by_ridge(tmp_path: Path) -> None:
    source = own_source(tmp_path, lambda nouns, luck: nouns.count("cat") - nouns.count("dog") + luck)
    [score] = score_words(source, source, [FEW], tmp_path / "words")
    data, found = load(source), {}
    seen = [data.train[index] for index in draw_indices(400, 300)]
    for strength in STRENGTHS:
        pipe = make_pipe(Ridge(alpha=1 / strength)).fit(texts_of(seen), [example.label for example in seen])
        values = []
        for examples in (data.validation, data.test):
            values.append(spearmanr(pipe.predict(texts_of(examples)), [example.label for example in examples])[0])
        found[values[0]] = values[1]
    assert score.metrics["test"]["spearman"] == pytest.approx(found[max(found)], abs=1e-3)
    assert score.metrics["test"]["spearman"] > 0.8


def test_sets_of_classes_have_a_regression_for_each_class_and_a_class_of_no_example_is_never_predicted(
    tmp_path: Path,
) -> None:
    source = own_source(tmp_path, lambda nouns, luck: sorted({"cat", "dog"} & {*nouns}) + ["rare"] * (luck > 2))
    assert source.task.problem_type == "multi_label_classification"
    [score] = score_words(source, source, [FEW], tmp_path / "words")
    assert score.metrics["test"]["micro_f1"] > 0.95


def test_beside_a_kept_model_words_alone_have_thresholds_too(tmp_path: Path) -> None:
    """For labels that words make likely, but seldom likelier than a half."""
    halves = {"cat": 0.5, "dog": 0.6}
    source = own_source(
        tmp_path, lambda nouns, luck: [name for name in halves if name in nouns and luck < halves[name]]
    )
    [alone] = score_words(source, source, [FEW], tmp_path / "words")
    rows, _ = words.judge_words(FEW, source, load(source).test)
    beside = score_rows(rows, ["micro_f1"], source.task.classes)
    assert beside["micro_f1"] > alone.metrics["test"]["micro_f1"] + 0.1
    for name in halves:
        chances = [[row["probabilities"][name] for row in rows if (name in row["predicted"]) == has] for has in (0, 1)]
        assert max(chances[0]) < min(chances[1]) < 0.5


def test_a_table_with_a_known_answer_is_answered(tmp_path: Path) -> None:
    source = own_source(tmp_path, lambda nouns, _: "cats" if "cat" in nouns else "none", (200, 40, 40))
    [score] = score_words(source, source, [FEW], tmp_path / "words")
    assert score.metrics["test"]["accuracy"] == 1.0


def test_words_have_their_most_frequent_tag_in_train(data_dirs: dict[str, Path], tmp_path: Path) -> None:
    train, source = find_task_sources("wnut17", data_dirs)
    [score] = score_words(train, source, [FinetuneConfig(precision="fp32")], tmp_path)
    data, classes = load(source), source.task.classes
    counts: dict[str, Counter[int]] = {}
    for example in data.train:
        for word, tag in zip(example.words, example.tags, strict=True):
            counts.setdefault(word, Counter())[tag] += 1
    tags = {word: classes[count.most_common(1)[0][0]] for word, count in counts.items()}
    gold = [[classes[tag] for tag in example.tags] for example in data.test]
    predicted = [[tags.get(word, "O") for word in example.words] for example in data.test]
    assert score.metrics["test"]["f1"] == pytest.approx(f1_score(gold, predicted), abs=1e-12)
    assert score.model == "most frequent tag"


def test_equally_frequent_tags_are_broken_by_the_order_of_the_classes_and_unknown_words_take_the_commonest() -> None:
    assert words.most_frequent(Counter({3: 2, 1: 2, 2: 1})) == (1, 0.4)


def test_search_has_bm25_over_the_queries_of_the_cell(data_dirs: dict[str, Path], tmp_path: Path) -> None:
    train, source = find_task_sources("squad_retrieval", data_dirs)
    [score] = score_words(train, source, [FinetuneConfig(precision="fp32", max_eval_examples=5)], tmp_path)
    assert (score.model, score.num_examples["test"]) == ("BM25", 5)
    assert score.metrics["test"]["ndcg_at_10"] > 0.5
    assert read_examples(score).values_SN.mean() == pytest.approx(score.metrics["test"]["ndcg_at_10"])


@pytest.mark.parametrize("task", ["squad_v2"])
def test_families_without_a_baseline_have_none(data_dirs: dict[str, Path], tmp_path: Path, task: str) -> None:
    assert score_words(*find_task_sources(task, data_dirs), [FinetuneConfig(precision="fp32")], tmp_path) == []


def test_cells_that_read_the_same_examples_share_a_result_which_is_computed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = own_source(tmp_path)
    seeds = [FEW.model_copy(update={"seed": seed, "learning_rate": 10.0**-seed}) for seed in range(3)]
    [score] = score_words(source, source, seeds, tmp_path / "words")
    monkeypatch.setattr(words, "write_words", lambda *_: pytest.fail("it was computed before"))
    assert score_words(source, source, seeds, tmp_path / "words") == [score]
    assert score_words(source, source, [FEW.model_copy(update={"words": False})], tmp_path / "words") == []


@pytest.mark.parametrize("changes", [{"shots": 5, "max_train_examples": None}, {"max_steps": 3, "batch_size": 8}])
def test_examples_that_a_seed_draws_or_the_steps_do_not_reach_are_the_networks(
    tmp_path: Path, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The baseline of each seed is fitted on the texts that the network of that seed reads, and on no other."""
    from biphase.finetuning.fit import choose_items, training_order

    source = own_source(tmp_path)
    read: list[list[str]] = []
    cut_texts = words.cut_texts

    def note(examples: Any) -> list[str]:
        read.append(cut_texts(examples))
        return read[-1]

    monkeypatch.setattr(words, "cut_texts", note)
    configs = [FEW.model_copy(update={"seed": seed, **changes}) for seed in range(2)]
    scores = score_words(source, source, configs, tmp_path / "words")
    assert len(scores) == 2, "each seed has its own examples"
    data = load(source)
    for config, texts in zip(configs, read[::3], strict=True):
        split = words.make_split(source.task, data.train)
        items, num_steps = choose_items(split, config)
        read_items = np.unique(np.concatenate([*training_order(items, config, num_steps)]))
        assert sorted(texts) == sorted(cut_texts(data.train[index] for index in read_items))
    assert len(read[0]) == (15 if "shots" in changes else 24)


def test_of_a_large_table_the_baseline_reads_what_the_network_reads() -> None:
    """Also beyond the 32,000 examples of the default length; a smaller table keeps its names."""
    split, names = SimpleNamespace(num_examples=40_000, items_of=lambda examples: examples), set[str]()
    for changes in ({"seed": 1}, {}, {"max_steps": 1250}, {"max_steps": 4000, "epochs": 2, "seed": 2}):
        config = FinetuneConfig(precision="fp32", **changes)
        reduced = reduce_config(config, "accuracy", 40_000)
        read, read_alone = (list_seen(split, SimpleNamespace(config=each)) for each in (config, reduced))
        assert np.array_equal(read, read_alone) and len(read) == (40_000 if "max_steps" in changes else 32_000)
        names.add(reduced.model_dump_json())
    assert len(names) == 3, "two cells read all examples"
    most = FinetuneConfig(max_steps=4000, seed=3, max_train_examples=32_000)
    assert reduce_config(most, "accuracy", 40_000) == FinetuneConfig(max_train_examples=32_000)


@pytest.fixture
def cell(model_folder: Path, tmp_path: Path) -> tuple[CellPlan, Score]:
    task, place = write_task(make_rows(300, noisy_class), tmp_path, "own")
    config = FinetuneConfig(precision="fp32", device="cpu", max_length=64, learning_rate=3e-3)
    [plan] = plan_cells(str(model_folder), [task], config, {"own": place})
    return plan, fit_cells([plan], tmp_path / "scores")[0]


def test_a_difference_to_words_is_over_the_same_test_examples(cell: tuple[CellPlan, Score], tmp_path: Path) -> None:
    """A single cell's difference is the mean over examples, with Student's interval; its name changes with no score."""
    plan, score = cell
    [alone] = score_words(plan.train, plan.evaluation, [plan.config], tmp_path / "scores" / WORD_SCORES)
    assert find_word_scores([score], read_word_scores(tmp_path / "scores")) == [alone]
    [row] = compare_words([result_of(score)], [alone])
    gaps_N = read_examples(score).values_SN[0] - read_examples(alone).values_SN[0]
    expected = mean_interval(gaps_N)
    assert (row.difference.value, row.difference.low, row.difference.high) == pytest.approx(
        (expected.value, expected.low, expected.high)
    )
    assert row.sentence.startswith("Words alone: ") and "TF-IDF + linear" in row.sentence
    rival = replace(result_of(score), arm=ReportArm("rival"), samples=(0.0,))
    [picked] = compare_words([result_of(score), rival], [alone])
    half_width = stats.t.ppf(1 - 0.05 / 4, len(gaps_N) - 1) * gaps_N.std(ddof=1) / np.sqrt(len(gaps_N))
    assert picked.difference.half_width == pytest.approx(half_width) and "; 97.5 %]; p" in picked.sentence
    other = alone.model_copy(update={"data_hash": "of other data"})
    assert compare_words([result_of(score)], [other]) == []


@pytest.mark.slow
@pytest.mark.minutes
def test_other_rows_are_scored_beside_words_that_the_same_rows_trained(model_folder: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"precision": "fp32", "device": "cpu", "max_length": 64, "learning_rate": 3e-3}
    task, place = write_task(make_rows(300, noisy_class), tmp_path / "data", "own")
    kept = tmp_path / "kept"
    biphase.finetune(model_folder, task, data=place, scores=tmp_path / "scores", keep=kept, shots=15, **settings)
    later = make_rows(80, noisy_class, seed=9)
    row = biphase.score(kept, later, train=place).words
    source = find_task_sources(task, {"own": place})[1]
    data = load(source)
    seen = draw_shots(np.array([example.label for example in data.train]), 15, 0)
    classes = source.task.classes
    new = [LabelledText("", ((row["text"], ()),), classes.index(row["label"])) for row in later]
    found = max(score_pipelines([data.train[index] for index in seen], data.validation, new))
    assert row is not None and (row.name, row.value) == ("TF-IDF + linear", found[2])
    assert biphase.score(kept, later).words is None
    _, other = write_task(make_rows(300, noisy_class, seed=1), tmp_path / "other", "own")
    with pytest.raises(InputError, match="has other rows than those that trained"):
        biphase.score(kept, later, train=other)


@pytest.mark.slow
@pytest.mark.minutes
def test_evaluate_has_a_row_for_words_alone_which_stays_out_of_tests_between_models(
    model_folder: Path, tmp_path: Path
) -> None:
    rows: dict[str, Any] = {"own": make_rows(200, noisy_class)}
    settings: dict[str, Any] = {
        "precision": "fp32",
        "device": "cpu",
        "max_length": 64,
        "max_train_examples": 16,
        "workers": 1,
    }
    grid: dict[str, Any] = {"learning_rates": [1e-3], "seeds": range(2), "scores": tmp_path / "scores"}
    table = biphase.evaluate([model_folder], data=rows, **grid, **settings)
    [alone] = read_word_scores(tmp_path / "scores")
    model, words_row = table.to_dict("records")
    assert (words_row["model"], words_row["task"]) == ("words alone (TF-IDF + linear)", model["task"])
    assert (words_row["mean"], words_row["metric"]) == (alone.metrics["test"]["accuracy"], "accuracy")
    assert (words_row["seeds"], words_row["num_cells"], model["seeds"]) == ([], 1, [0, 1])
    assert all(np.isnan(words_row[key]) for key in ("rate", "half_width", "paper_half_width"))
    assert len(biphase.evaluate([model_folder], data=rows, words=False, **grid, **settings)) == 1

    scores = read_scores(tmp_path / "scores")
    summary = add_words(summarize(scores), [alone])
    with out.capture() as with_words:
        print_summary(summary)
    with out.capture() as without:
        print_summary(summary[:1])
    shown = with_words.get().splitlines()
    [line] = [line for line in shown if line.startswith("   words alone (TF-IDF + linear)")]
    assert f"{100 * alone.metrics['test']['accuracy']:.2f} ±" in line and line.rstrip().endswith("–")
    assert [one for one in shown if "signal" in one] == [one for one in without.get().splitlines() if "signal" in one]
    with pytest.raises(InputError, match="no scores of a model 'words alone"):
        compare(scores, str(model_folder), "words alone (TF-IDF + linear)")


@pytest.mark.slow
@pytest.mark.minutes
def test_words_alone_have_an_interval_where_seeds_draw_their_examples(model_folder: Path, tmp_path: Path) -> None:
    rows: dict[str, Any] = {"own": make_rows(200, noisy_class)}
    settings: dict[str, Any] = {"precision": "fp32", "device": "cpu", "max_length": 64, "max_steps": 4, "workers": 1}
    grid: dict[str, Any] = {"learning_rates": [1e-3], "seeds": range(2), "scores": tmp_path / "scores"}
    table = biphase.evaluate([model_folder], data=rows, shots=5, **grid, **settings)
    found = [score.metrics["test"]["accuracy"] for score in read_word_scores(tmp_path / "scores")]
    assert len(found) == 2 and list(table["num_cells"]) == [2, 2] and list(table["seeds"]) == [[0, 1], [0, 1]]
    assert table["mean"][1] == pytest.approx(np.mean(found))
    assert table["half_width"][1] == pytest.approx(mean_interval(found).half_width)
