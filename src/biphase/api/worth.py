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
    judge: Callable[[Any], Rows]
    """What a network, called as those of transformers are, predicts for each example."""


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

    judged = read_judged_set(test)
    return ScoredTask(
        judged.name, judged.metric, (), lambda network: score_embedder(served_by(network, folder), judged)[1]
    )


def served_by(network: Any, folder: Path) -> Any:
    """Make the `SentenceTransformer` of a folder, with its prompts, compute by a network that gives embeddings."""
    from sentence_transformers import SentenceTransformer

    embedder: Any = SentenceTransformer(str(folder), device="cpu", trust_remote_code=False)
    embedder.forward = lambda features, **_: {"sentence_embedding": network(**features).sentence_embedding}
    return embedder


def read_test_split(folder: Path, kept: KeptModel, cell: CellContext, test: Path | None) -> ScoredTask:
    """Read a labelled file, or the test split in a folder with the task's data or in the package, as the model's
    training encoded it."""
    config, data = kept.config, read_test_examples(kept, test)
    tokenizer = HashedTokenizer(load_tokenizer(folder))
    split: EncodedSplit = family_module(kept.task, config).encode(data, tokenizer, config)["test"]

    def judge(network: Any) -> Rows:
        with torch.no_grad():
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
