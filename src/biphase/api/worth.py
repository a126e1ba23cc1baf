"""A model and another form of it (8 bits, fewer tokens) → the difference on the user's own task, and in time.

What is scored is a kept model's test split or a labelled file, or an embedding model's judged texts.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from biphase.corpus.tokenizer import load_tokenizer
from biphase.errors import InputError
from biphase.export.trim import load_plain
from biphase.files import read_json_as
from biphase.finetuning.encoding import CellContext, EncodedSplit, HashedTokenizer
from biphase.finetuning.families import family_module
from biphase.finetuning.heads import padded_logits
from biphase.finetuning.kept import RECORD, KeptModel, layout_to_predict, read_labelled
from biphase.finetuning.metrics import Rows, contributions
from biphase.finetuning.scores import linearize
from biphase.report.formats import show_difference
from biphase.report.statistics import mean_interval
from biphase.tasks.examples import load_examples
from biphase.tasks.sources import find_source
from biphase.tasks.splits import Collection, TaskData


@dataclass(frozen=True)
class ScoredTask:
    """A task that tells two networks apart: how a network's predictions for its examples come about and are scored."""

    name: str
    metric: str
    classes: tuple[str, ...]
    judge: Callable[..., Rows]
    """What a model predicts for each example: that of `folder`, the one that was asked about unless given, by its own
    network, or by another `network` that is called as those of transformers are."""


TIMED_RUNS = 3
"""Passes over some texts, of which the fastest counts."""


def time_batches(network: Callable[..., Any], batches: Sequence[Mapping[str, Tensor]]) -> float:
    """Return the seconds that a network takes for padded batches, after one pass that is not counted."""
    seconds = []
    for _ in range(1 + TIMED_RUNS):
        started = time.perf_counter()
        for features in batches:
            network(**features)
        seconds.append(time.perf_counter() - started)
    return min(seconds[1:])


def tell_loss(task: ScoredTask, before: Rows, after: Rows) -> str:
    """Say the difference of two scores of the same examples, with its interval."""
    first_N, second_N = (linearize(*contributions(rows, task.metric, task.classes)) for rows in (before, after))
    scores = f"{100 * first_N.mean():.2f} → {100 * second_N.mean():.2f}"
    of_what = f"{len(first_N):,} test examples of {task.name}"
    return f"{task.metric} {show_difference(mean_interval(second_N - first_N))} ({scores}, {of_what})"


def find_task_data(folder: Path, test: Path | None) -> ScoredTask | None:
    """Find the data of a model's task: those that are given, else the test split of a kept model whose task comes with
    biphase. None: there are none."""
    if (folder / RECORD).exists():
        kept = read_json_as(folder / RECORD, KeptModel, "fine-tune it again with --keep")
        cell = CellContext(kept.task, kept.config, torch.device("cpu"), torch.float32, calibration=kept.calibration)
        if not cell.is_embedder:
            has_data = test is not None or kept.task.bundled
            return read_test_split(folder, kept, cell, test) if has_data else None
    if test is None:
        return None
    if not (folder / "modules.json").exists():
        raise InputError("test: this model has no task of its own: only kept and embedding models are scored")
    from biphase.embedding.evaluation import read_judged_set, score_embedder

    judged, source = read_judged_set(test), folder

    def judge_embedder(network: Any = None, folder: Path = source) -> Rows:
        from sentence_transformers import SentenceTransformer

        embedder: Any = SentenceTransformer(str(folder), device="cpu", trust_remote_code=False)
        if network is not None:
            embedder.forward = lambda features, **_: {"sentence_embedding": network(**features).sentence_embedding}
        return score_embedder(embedder, judged)[1]

    return ScoredTask(judged.name, judged.metric, (), judge_embedder)


def read_test_split(source: Path, kept: KeptModel, cell: CellContext, test: Path | None) -> ScoredTask:
    """Read a labelled file, or the test split in a folder with the task's data or in the package, which is encoded as
    the model's training encoded it."""
    config, data = kept.config, read_test_examples(kept, test)

    @torch.no_grad()
    def judge(network: Any = None, folder: Path = source) -> Rows:
        tokenizer = HashedTokenizer(load_tokenizer(folder))
        split: EncodedSplit = family_module(kept.task, config).encode(data, tokenizer, config)["test"]
        network = load_plain(folder) if network is None else network
        return split.judge(split.predict(partial(padded_logits, network), cell), cell)[1]

    return ScoredTask(kept.task.name, kept.task.metric, kept.task.classes, judge)


def read_test_examples(kept: KeptModel, test: Path | None) -> TaskData | Collection:
    """Read the examples of test; of other splits no more than encoding asks for."""
    task, config = kept.task, kept.config
    if test is not None and not test.is_dir():
        examples, left_out = read_labelled(kept.model_copy(update={"layout": layout_to_predict(task, test)}), test)
        data: TaskData | Collection = TaskData(task, (), (), tuple(examples), left_out)
    else:
        data = load_examples(find_source(task, test), bool(config.judged_only), config.max_eval_examples)
    if isinstance(data, Collection):
        test_only = data.relevance["test"]
        return replace(data, train=(), relevance={"validation": dict(islice(test_only.items(), 1)), "test": test_only})
    return replace(data, train=data.test[:1], validation=data.test[:1])
