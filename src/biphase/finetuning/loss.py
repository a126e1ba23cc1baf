"""The cross-entropy of a task: weighted by class and smoothed as configured, or over the rows of segments.

A loss is a part of torch's mean over all items of a step, so that the parts of microbatches add up. InfoNCE is
`contrastive_loss` in `families/retrieval.py`.

Letters: X samples or tokens, T rows, S segments, C classes.
"""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from biphase.finetuning.encoding import CellContext, EncodedSplit


def weigh_classes(cell: CellContext, split: EncodedSplit, items: np.ndarray) -> CellContext:
    """Weigh the classes of a cell as configured; `balanced` counts them in these training items. The weight of a
    number's error is 1 over the standard deviation of these items."""
    weights = "balanced" if cell.task.kind.has_label_numbers else cell.config.class_weights
    if not weights:
        return cell
    if weights == "balanced":
        weights_C = split.balanced_weights(items, cell)
    else:
        by_class = dict(weights)
        weights_C = np.array([by_class.get(name, 1.0) for name in cell.task.classes])
    return replace(cell, class_weights_C=cell.on_device(weights_C.astype(np.float32)))


def deviation_from(numbers_N: np.ndarray, center: float) -> float:
    """Compute the root mean square distance of numbers from a center; 1 if all numbers are the same."""
    return float(np.sqrt(np.mean((numbers_N - center) ** 2))) if np.ptp(numbers_N) else 1.0


def balance_classes(counts_C: np.ndarray) -> np.ndarray:
    """Compute scikit-learn's `balanced` weights: n / (k · n_c) for n targets of k classes. An absent class weighs 1."""
    return np.where(counts_C > 0, counts_C.sum() / (np.count_nonzero(counts_C) * np.maximum(counts_C, 1)), 1.0)


def cross_entropy(cell: CellContext, logits_XC: Tensor, targets_X: np.ndarray, all_targets: np.ndarray) -> Tensor:
    """Compute what some targets (-100: none) add to torch's weighted and smoothed mean over all targets."""
    weights_C = cell.class_weights_C
    targets = cell.on_device(targets_X)
    smoothing = cell.config.label_smoothing
    loss = nn.functional.cross_entropy(logits_XC, targets, weights_C, reduction="sum", label_smoothing=smoothing)
    if weights_C is None or len(all_targets) == 0:
        return loss / max(len(all_targets), 1)
    return loss / weights_C[cell.on_device(all_targets)].sum()


def segment_logsumexp(logits_TC: Tensor, bounds_S1: Tensor) -> Tensor:
    """Compute logsumexp over the rows of each segment, [S, C]."""
    indices_S = torch.arange(len(bounds_S1) - 1, device=logits_TC.device)
    segments_T = torch.repeat_interleave(indices_S, bounds_S1.diff(), output_size=len(logits_TC))
    highest = torch.segment_reduce(logits_TC.detach(), "max", offsets=bounds_S1, axis=0)
    sums = torch.zeros_like(highest).index_add(0, segments_T, (logits_TC - highest[segments_T]).exp())
    return sums.log() + highest
