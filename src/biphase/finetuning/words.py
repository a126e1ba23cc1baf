"""A task → its scores by words alone: a linear model on TF-IDF, the most frequent tag of each word, or BM25.

This is the baseline that a network must beat. It trains on the same examples as the network's cell, chooses its
regularization on validation, and has the scores of the task's family. Cells with the same examples share one result,
in the form of a cell:

    SCORES/.words/TASK-HASH/  score.json  validation.jsonl  test.jsonl  validation.npz  test.npz  losses.json

Letters: N examples, F features, C classes or 1 for a number, W words of a split.
"""

import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from biphase.console import duration, err
from biphase.encoder.models import Encoder
from biphase.files import content_hash, forget_claim, locked
from biphase.finetuning.config import BM25_VERSION, PROTOCOL, CellPlan, FinetuneConfig, settle_config
from biphase.finetuning.metrics import Judgement, Rows
from biphase.finetuning.scores import Score, read_score, read_scores, write_cell
from biphase.tasks.examples import LabelledText, TaggedWords, inputs_of, load_examples
from biphase.tasks.families import KINDS
from biphase.tasks.sources import TaskSource
from biphase.tasks.spec import EVALUATED_SPLITS, EvaluatedSplit, Task
from biphase.tasks.splits import TaskData

if TYPE_CHECKING:
    from biphase.finetuning.encoding import CellContext

WORD_SCORES = ".words"
"""The folder of these scores beside those of cells."""
SURE = 30.0
"""The log-odds of a class that all training examples have, or with a minus none."""
BASELINE = 1
"""A part of every name but those of BM25. Raise it when the same examples give other scores."""

STRENGTHS = (0.1, 1.0, 10.0)
"""The values of C, the inverse of the regularization, among which validation chooses; the least of equal ones."""
CHARACTERS = 5_000
"""The characters of a text that count, so that long documents do not fill the memory."""


Judged = dict[EvaluatedSplit, Judgement]
Outputs = dict[EvaluatedSplit, np.ndarray]
"""The outputs of a baseline for the texts of each split, [N, C]."""


def score_words(train: TaskSource, evaluation: TaskSource, configs: Iterable[FinetuneConfig], out: Path) -> list[Score]:
    """Score words alone beside cells of one task with these settings, of which some may read the same examples. Returns
    the different results, each computed once and kept below `out`; none for a family without such a baseline, or if
    `words` is off."""
    task, scores = evaluation.task, dict[str, Score]()
    configs = [settle_config(config, task, config.max_length) for config in configs if config.words and task.kind.words]
    if configs and task.kind.is_search and find_spec("bm25s") is None:
        err.print(f"{task.name}: not compared with BM25, which needs bm25s: pip install 'biphase[embeddings]'")
        return []
    load = cache(load_examples)
    for config in configs:
        how = bool(config.judged_only), config.max_eval_examples
        data = load(evaluation, *how)
        trained = data if task.kind.is_search or train.hash == evaluation.hash else load(train, *how)
        config = reduce_config(config, task.metric, len(trained.train))
        baseline = BM25_VERSION if task.kind.is_search else BASELINE
        name = [baseline, train.hash, evaluation.hash, task.metric, config.model_dump(mode="json")]
        model = Encoder(task.kind.words, f"words {baseline}", max_length=0)
        plan = CellPlan(model, task, train, evaluation, config, content_hash(name))
        if plan.hash not in scores:
            with locked(out / ".locks" / plan.folder(out).name, wait=True):
                if not plan.is_finished(out):
                    write_words(plan, data, trained, plan.folder(out))
                forget_claim(plan.folder(out))
            scores[plan.hash] = read_score(plan.folder(out))
    return [*scores.values()]


def reduce_config(config: FinetuneConfig, metric: str, num_train: int) -> FinetuneConfig:
    """Reduce the settings of a cell with this metric and size of the train split to those that decide which examples it
    reads. The seed is one of them only if it draws them. With the default batch size, a cell that reads all of them has
    the steps of one epoch, or the default if that is more."""
    names, all_read = ["max_eval_examples", "judged_only"], FinetuneConfig()
    if metric not in KINDS["retrieval"].metrics:
        names[1:] = ["max_train_examples", "shots"]
        num_examples = min(num_train, config.max_train_examples or num_train)
        if config.shots or config.max_steps * config.batch_size < num_examples:
            names += ["seed", "batch_size", "max_steps", "epochs"]
        else:
            steps = max(all_read.max_steps, math.ceil(num_examples / all_read.batch_size))
            all_read = all_read.model_copy(update={"max_steps": steps})
    return all_read.model_copy(update={name: getattr(config, name) for name in names})


def find_word_scores(cells: Iterable[Score], stored: Iterable[Score]) -> list[Score]:
    """Find the score by words alone beside each cell; [] if one is missing."""
    known = {(score.task, score.data_hash, score.config): score for score in stored}
    keys = [(cell, reduce_config(cell.config, cell.metric, cell.num_examples.get("train", 0))) for cell in cells]
    found = [known.get((cell.task, cell.data_hash, config)) for cell, config in keys]
    return [score for score in found if score] if all(found) else []


def read_word_scores(scores: Path) -> tuple[Score, ...]:
    """Read all scores by words alone beside the cells in a folder; none without any."""
    return read_scores(scores / WORD_SCORES).scores if (scores / WORD_SCORES).is_dir() else ()


def tell_word_score(score: Score) -> str:
    return f"{score.name} (words alone): {score.outcome} ({duration(score.seconds['train'])})"


def write_words(plan: CellPlan, data: Any, trained: Any, folder: Path) -> None:
    """Compute the scores of words alone, and write them as a cell."""
    from biphase.finetuning.families.pair_ranking import judge_bm25

    task, started, cell = plan.task, time.perf_counter(), make_context(plan.task, plan.config)
    if task.kind.is_search:
        judged = judge_bm25(data, cell)
    else:
        judged = (judge_tags if task.kind.is_tagging else judge_texts)(cell, data, trained)
    write_baseline(plan, cell, judged, (len(trained.train), data.left_out), started, folder)


def write_baseline(
    plan: CellPlan, cell: "CellContext", judged: Judged, counts: tuple[int, int], started: float, folder: Path
) -> None:
    """Write the scores of a baseline as a cell. `counts`: its training examples, and the rows left out; `started`: of
    `time.perf_counter`."""
    from biphase.device import describe_machine

    task, (num_train, num_left_out) = plan.task, counts
    score = Score(
        protocol=PROTOCOL,
        cell=plan.hash,
        model=plan.model.name,
        model_hash=plan.model.hash,
        task=task.name,
        trained_on=plan.train.task.name,
        source=plan.evaluation.name,
        data_hash=plan.evaluation.hash,
        metric=task.metric,
        classes=task.classes,
        config=plan.config,
        metrics={split: metrics for split, (metrics, _) in judged.items()},
        num_examples={"train": num_train} | {split: len(rows) for split, (_, rows) in judged.items()},
        num_left_out=num_left_out,
        num_steps=0,
        final_loss=None,
        seconds={"train": round(time.perf_counter() - started, 3), "evaluate": 0.0},
        machine=describe_machine(cell.device),
    )
    write_cell(folder, score, [], {split: rows for split, (_, rows) in judged.items()})


def judge_words(config: FinetuneConfig, source: TaskSource, test: Sequence[Any]) -> tuple[Rows, list[Any]]:
    """Predict other test examples by words alone, sets of classes with thresholds by validation, as a kept model does.
    Returns a row for each, and the inputs that trained the baseline."""
    data, cell = load_examples(source, False, config.max_eval_examples), make_context(source.task, config)
    assert isinstance(data, TaskData), "a ranking has no rows to score"
    inputs = inputs_of(data, "train")
    trained = [inputs[index] for index in list_seen(make_split(source.task, data.train), cell)]
    others = replace(data, test=tuple(test))
    if source.task.kind.is_tagging:
        return judge_tags(cell, others, data)["test"][1], trained
    splits, outputs = fit_texts(cell, others, data)
    if source.task.kind.has_label_sets:
        cell = replace(cell, calibration=splits["validation"].calibrate(outputs["validation"], cell))
    return splits["test"].judge(outputs["test"], cell)[1], trained


def make_context(task: Task, config: FinetuneConfig) -> "CellContext":
    import torch

    from biphase.finetuning.encoding import CellContext

    return CellContext(task, config, torch.device("cpu"), torch.float32)


def make_split(task: Task, examples: Sequence[Any]) -> Any:
    """Make the family's split of some examples, with labels and without texts."""
    from biphase.finetuning.families import sequence_classification, token_classification

    if task.kind.is_tagging:
        return token_classification.tag_split(examples)
    return sequence_classification.label_split(task, examples)


def list_seen(train: Any, cell: "CellContext") -> np.ndarray:
    """List the training examples that a network reads within its steps, ascending."""
    from biphase.finetuning.fit import choose_items, training_order

    items, num_steps = choose_items(train, cell.config)
    return np.unique(np.concatenate([*training_order(items, cell.config, num_steps)]))


def judge_texts(cell: "CellContext", data: TaskData, trained: TaskData) -> Judged:
    """Judge the linear model of `fit_texts`."""
    splits, outputs = fit_texts(cell, data, trained)
    return {name: split.judge(outputs[name], cell) for name, split in splits.items()}


def fit_texts(cell: "CellContext", data: TaskData, trained: TaskData) -> tuple[dict[EvaluatedSplit, Any], Outputs]:
    """Fit a linear model on TF-IDF of words and characters: ridge for numbers, else a logistic regression for each
    class against the rest. Returns the splits and its outputs for each, [N, C]."""
    task, train = cell.task, make_split(cell.task, trained.train)
    seen, features = list_seen(train, cell), make_features()
    train_NF = features.fit_transform(cut_texts(trained.train[index] for index in seen))
    splits: dict[EvaluatedSplit, Any] = {name: make_split(task, data.splits[name]) for name in EVALUATED_SPLITS}
    features_of = {name: features.transform(cut_texts(data.splits[name])) for name in EVALUATED_SPLITS}
    labels_N = train.labels_S[seen]
    targets_NC = np.eye(len(task.classes))[labels_N] if task.problem_type is None else labels_N.reshape(len(seen), -1)

    def fit(strength: float) -> Outputs:
        return fit_linear(train_NF, targets_NC, strength, task.kind.has_label_numbers, features_of)

    return splits, choose_outputs(splits["validation"], map(fit, STRENGTHS), cell)


def choose_outputs(validation: Any, tried: Iterable[Outputs], cell: "CellContext") -> Outputs:
    """Choose the outputs that score best on validation, of equal ones the first."""
    return max(tried, key=lambda outputs: validation.judge(outputs["validation"], cell)[0][cell.task.metric])


def make_features() -> Any:
    """Make scikit-learn's TF-IDF of one or two words (or signs) and of three to five characters within words."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.pipeline import make_union

    words = TfidfVectorizer(sublinear_tf=True, ngram_range=(1, 2), token_pattern=r"\w+|[^\w\s]")
    return make_union(words, TfidfVectorizer(sublinear_tf=True, ngram_range=(3, 5), analyzer="char_wb"))


def cut_texts(examples: Iterable[LabelledText]) -> list[str]:
    return [example.texts[0][0][:CHARACTERS] for example in examples]


def fit_linear(
    train_NF: Any, targets_NC: np.ndarray, strength: float, is_number: bool, features_of: Mapping[EvaluatedSplit, Any]
) -> Outputs:
    """Fit a linear model for each column of the targets. Returns its outputs for each split, [N, C]."""
    from scipy.sparse import issparse
    from sklearn.linear_model import LogisticRegression, Ridge

    columns: dict[EvaluatedSplit, list[np.ndarray]] = {name: [] for name in features_of}
    for target_N in targets_NC.T:
        model: Any = None
        if is_number:
            model = Ridge(alpha=1 / strength).fit(train_NF, target_N)
        elif target_N.min() < target_N.max():
            solver: Any = {"solver": "liblinear", "dual": True} if issparse(train_NF) else {}
            model = LogisticRegression(C=strength, max_iter=1000, random_state=0, **solver).fit(train_NF, target_N)
        for name, split_NF in features_of.items():
            same = np.full(split_NF.shape[0], SURE if target_N[0] else -SURE)  # a class of all examples, or of none
            predict = model and (model.predict if is_number else model.decision_function)
            columns[name].append(predict(split_NF) if predict else same)
    return {name: np.stack(outputs, axis=1) for name, outputs in columns.items()}


def judge_tags(cell: "CellContext", data: TaskData, trained: TaskData) -> Judged:
    """Judge the most frequent tag of each word; of an unknown word, the most frequent of all."""
    counts: dict[str, Counter[int]] = defaultdict(Counter)
    for index in list_seen(make_split(cell.task, trained.train), cell):
        example: TaggedWords = trained.train[index]
        for word, tag in zip(example.words, example.tags, strict=True):
            counts[word][tag] += 1
    usual = {word: most_frequent(tags) for word, tags in counts.items()}
    other = most_frequent(sum(counts.values(), Counter()))
    judged: Judged = {}
    for name in EVALUATED_SPLITS:
        tags, shares = zip(
            *(usual.get(word, other) for example in data.splits[name] for word in example.words), strict=True
        )
        judged[name] = make_split(cell.task, data.splits[name]).judge((np.array(tags), np.array(shares)), cell)
    return judged


def most_frequent(tags: Counter[int]) -> tuple[int, float]:
    """Return the most frequent tag, of equally frequent ones the first of the task, and its share."""
    tag, count = min(tags.items(), key=lambda item: (-item[1], item[0]))
    return tag, count / tags.total()
