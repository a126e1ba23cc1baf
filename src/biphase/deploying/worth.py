"""Compare a model with another form of itself (8 bits, fewer tokens) by its score on the user's own task, and by time.

The data are a fine-tuned model's test split or a labelled file, or judged texts for an embedding model.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from biphase.device import processor_name
from biphase.encoder.models import stamp_model
from biphase.errors import InputError
from biphase.finetuning.kept import RECORD, KeptModel, find_kept, read_labelled, read_task
from biphase.finetuning.metrics import Rows, contributions
from biphase.finetuning.scores import linearize
from biphase.report.formats import show_difference
from biphase.report.statistics import mean_interval
from biphase.tasks.examples import load_examples
from biphase.tasks.sources import find_source
from biphase.tasks.splits import Collection, TaskData


@dataclass(frozen=True)
class ScoredTask:
    """A task with the data on which to compare two networks."""

    name: str
    metric: str
    classes: tuple[str, ...]
    judge: Callable[..., Rows]
    """The function that predicts each example: with the model in `folder` (by default the user's model), or with a
    `network` that is called like transformers' networks."""


ROUNDS, TURNS = 3, 4
"""The number of measured ratios, and of each network's turns for one: the first is untimed, the fastest counts."""


def time_pass(network: Callable[..., Any], batches: Sequence[Mapping[str, Tensor]]) -> tuple[float, float]:
    """Return the seconds that a network takes for these padded batches: by the clock, and of processor time."""
    started = time.perf_counter(), time.process_time()
    for features in batches:
        network(**features)
    return time.perf_counter() - started[0], time.process_time() - started[1]


def tell_speed(whole: Callable[..., Any], other: Callable[..., Any], batches: Sequence[Mapping[str, Tensor]]) -> str:
    """Write how many times as fast as the `whole` network the `other` reads these padded batches. The networks take
    turns. The ratios are told only if every round gives the same digits."""
    told = set()
    for _ in range(ROUNDS):
        turns = np.array([[time_pass(network, batches) for network in (whole, other)] for _ in range(TURNS)])
        fastest = turns[1:].min(axis=0)
        told.add(tuple(f"{ratio:.1f}" for ratio in fastest[0] / fastest[1]))
    if len(told) > 1:
        return "speed unknown: the measurements differ, as on a busy machine"
    [(clock, processor)] = told
    lengths = torch.cat([features["attention_mask"].sum(1) for features in batches])
    texts = f"{len(lengths)} texts of {lengths.min()} to {lengths.max()} tokens"
    return f"{clock} times as fast ({processor} by processor time) on {texts}, {processor_name()}"


def tell_loss(task: ScoredTask, before: Rows, after: Rows) -> str:
    """Write the difference between two scores on the same examples, with its interval."""
    first_N, second_N = (linearize(*contributions(rows, task.metric, task.classes)) for rows in (before, after))
    scores = f"{100 * first_N.mean():.2f} → {100 * second_N.mean():.2f}"
    of_what = f"{len(first_N):,} test examples of {task.name}"
    return f"{task.metric} {show_difference(mean_interval(second_N - first_N))} ({scores}, {of_what})"


def find_task_data(folder: Path, test: Path | None) -> ScoredTask | None:
    """Find the data of a model's task: `test`, or else the test split of a kept model if biphase holds its data.
    Return None if there are no data."""
    is_embedder = (folder / "modules.json").exists()
    if (folder / RECORD).exists() and not is_embedder:
        kept = find_kept(str(folder), test or Path())
        return read_test_split(kept, test) if test is not None or kept.task.bundled else None
    if test is None:
        return None
    if not is_embedder:
        raise InputError("`test` scores fine-tuned and embedding models, and this model is neither: leave it out")
    from biphase.embedding.evaluation import read_judged_set, score_embedder
    from biphase.exporting.plain import load_sentence_transformer

    judged, source = read_judged_set(test), folder

    def judge(network: Any = None, folder: Path = source) -> Rows:
        embedder = load_sentence_transformer(folder, "cpu")
        if network is not None:
            embedder.forward = lambda features, **_: {"sentence_embedding": network(**features).sentence_embedding}
        return score_embedder(embedder, judged)[1]

    return ScoredTask(judged.name, judged.metric, (), judge)


def read_test_split(kept: KeptModel, test: Path | None) -> ScoredTask:
    """Read a labelled file, or the test split from a folder with the task's data or from the package. In retrieval,
    other splits keep at most a query."""
    task, config = read_task(kept.folder), kept.config  # `kept.task` lacks what only the splits need
    data: TaskData | Collection
    if test is not None and not test.is_dir():
        data = read_labelled(kept, test)
    else:
        data = load_examples(find_source(task, test), bool(config.judged_only), config.max_eval_examples)
    if isinstance(data, Collection):
        judged = data.relevance["test"]
        data = replace(data, train=(), relevance={"validation": dict(islice(judged.items(), 1)), "test": judged})
    from biphase.finetuning.predict import judge_test

    def judge(network: Any = None, folder: Path = kept.folder) -> Rows:
        other = {"folder": folder, "stamps": stamp_model(folder)} if folder != kept.folder else {}
        return judge_test(kept.model_copy(update=other), data, torch.device("cpu"), network)[1]

    return ScoredTask(task.name, task.metric, task.classes, judge)
