"""A cell → the score of a linear model on the vectors that its encoder gives texts before any training.

This is the second baseline of a fine-tuned model, beside words alone. It costs one reading of the texts by the network,
and the linear fits. Where it scores as high, `encode` and a linear model are enough, and nothing needs to be
fine-tuned. The linear model reads the same examples as the cell, at most `MOST_EXAMPLES`, and chooses its
regularization on validation. The result has the form of a cell:

    SCORES/.frozen/TASK-HASH/  score.json  validation.jsonl  test.jsonl  validation.npz  test.npz  losses.json

Letters: N examples, D width, C classes or 1 for a number.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from biphase.console import duration, err, track
from biphase.device import choose_device, choose_dtype
from biphase.errors import memory_told
from biphase.files import content_hash, forget_claim, locked
from biphase.finetuning.config import PLACEMENT, CellPlan
from biphase.finetuning.encoding import CellContext, TokenizedTexts
from biphase.finetuning.encoding_cache import load_encoded
from biphase.finetuning.heads import TaskNetwork, count_weights, open_encoder, place_backbone
from biphase.finetuning.scores import Score, read_score
from biphase.finetuning.words import (
    SURE,
    Judged,
    Outputs,
    choose_outputs,
    fit_linear,
    list_seen,
    write_baseline,
)
from biphase.hub import output_width
from biphase.tasks.spec import EVALUATED_SPLITS, EvaluatedSplit, Task

FROZEN_SCORES = ".frozen"
"""The folder of these scores beside those of cells."""

BASELINE_NAME = "frozen vectors + linear"
VERSION = 1
"""A part of every name. Raise it when the same examples give other scores."""
LEAST_PARAMETERS = 5_000_000
"""The weights of an encoder, without embeddings, from which its vectors are a baseline. Smaller ones stay far behind
words alone."""
MOST_EXAMPLES, MOST_LABELS = 20_000, 200_000
"""The training examples that the linear model reads, and the product of their number and that of sets' classes, each of
which has a regression of its own. Examples are drawn if the cell has more."""
VECTOR_STRENGTHS = (1e-3, 1e-2, 1e-1)
"""The values of C, the inverse of the regularization of standardized features, among which validation chooses."""


@memory_told("lower microbatch_tokens (65,536 unless given)")
def score_frozen(plan: CellPlan, words: Sequence[Score], out: Path) -> list[Score]:
    """Score a linear model on the frozen encoder's vectors beside a cell and the scores of `words` alone, which tell
    the examples that it reads. Print the score, which is computed once and kept below `out`. [] for tasks without a
    class, classes or a number for each text, without words alone, and for small, frozen or random encoders."""
    config, kind = plan.config, plan.task.kind
    if not (words and kind.is_of_texts) or config.frozen or config.weights == "random":
        return []
    device = choose_device(config.device)
    settled = {name: getattr(config, name) for name in ("max_length", "judged_only", "precision", "microbatch_tokens")}
    reduced = words[0].config.model_copy(update=settled | {"frozen": True, "device": device.type})
    named = reduced.model_dump(mode="json", exclude=PLACEMENT)
    name = [VERSION, plan.model.hash, plan.train.hash, plan.evaluation.hash, plan.task.metric, named]
    model = replace(plan.model, name=BASELINE_NAME)
    baseline = replace(plan, model=model, config=reduced, hash=content_hash(name))
    folder = baseline.folder(out)
    if not baseline.is_finished(out) and count_weights(open_encoder(plan.model).backbone) < LEAST_PARAMETERS:
        return []
    with locked(out / ".locks" / folder.name, wait=True):
        if not baseline.is_finished(out):
            write_frozen(baseline, open_encoder(plan.model), device, folder)
        forget_claim(folder)
    score = read_score(folder)
    err.print(f"{score.name}: {score.outcome} ({duration(score.seconds['train'])})")
    return [score]


def write_frozen(plan: CellPlan, encoder: Any, device: torch.device, folder: Path) -> None:
    """Compute the scores of the linear model, and write them as a cell."""
    started, config = time.perf_counter(), plan.config
    cell = CellContext(plan.task, config, device, choose_dtype(config.precision, device))
    splits, left_out = load_encoded(plan.evaluation, encoder, config)
    train = load_encoded(plan.train, encoder, config)[0]["train"]
    seen = list_seen(train, cell)
    num_regressions = len(plan.task.classes) if plan.task.kind.has_label_sets else 1
    if len(seen) > (most := min(MOST_EXAMPLES, MOST_LABELS // num_regressions)):
        seen = np.sort(np.random.default_rng(config.seed).choice(seen, most, replace=False))
    network = TaskNetwork(place_backbone(encoder, device), cell, has_head=False)
    train_ND = embed_samples(network, train.texts, seen, cell)
    mean_D, scale_D = train_ND.mean(0), np.maximum(train_ND.std(0), 1e-6)
    vectors_of: Outputs = {}
    for split in EVALUATED_SPLITS:
        texts = splits[split].texts
        vectors_of[split] = (embed_samples(network, texts, np.arange(texts.num_samples), cell) - mean_D) / scale_D
    train_ND, labels = (train_ND - mean_D) / scale_D, train.labels_S[seen]
    tried = (fit_vectors(plan.task, train_ND, labels, strength, vectors_of) for strength in VECTOR_STRENGTHS)
    outputs = choose_outputs(splits["validation"], tried, cell)
    judged: Judged = {name: splits[name].judge(outputs[name], cell) for name in EVALUATED_SPLITS}
    write_baseline(plan, cell, judged, (len(seen), left_out), started, folder)


def embed_samples(network: Any, texts: TokenizedTexts, samples: np.ndarray, cell: CellContext) -> np.ndarray:
    """Average the encoder's outputs over the tokens of each of some samples, ascending: fp32, [N, D]."""
    vectors_ND = np.zeros((len(samples), output_width(network.backbone.config)), dtype=np.float32)
    with torch.no_grad(), track(f"read {cell.task.name} without training", len(samples), "texts") as progress:
        for batch, output in texts.outputs(network, samples, cell):
            vectors_ND[np.searchsorted(samples, batch.samples)] = output.float().cpu().numpy()
            progress.advance(len(batch.samples))
    return vectors_ND


def fit_vectors(
    task: Task, train_ND: np.ndarray, labels: np.ndarray, strength: float, vectors_of: Mapping[EvaluatedSplit, Any]
) -> Outputs:
    """Fit a multinomial logistic regression for classes, one regression for each class of sets, or ridge for numbers.
    Returns its outputs for each split, [N, C]."""
    from sklearn.linear_model import LogisticRegression

    if task.problem_type is not None:
        return fit_linear(train_ND, labels.reshape(len(labels), -1), strength, task.kind.has_label_numbers, vectors_of)
    outputs = {name: np.full((len(vectors), len(task.classes)), -SURE) for name, vectors in vectors_of.items()}
    present = np.unique(labels)
    model = LogisticRegression(C=strength, max_iter=1000).fit(train_ND, labels) if len(present) > 1 else None
    for name, vectors_ND in vectors_of.items():
        outputs[name][:, present] = 0.0 if model is None else model.predict_log_proba(vectors_ND)
    return outputs
