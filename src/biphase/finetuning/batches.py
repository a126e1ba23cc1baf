"""Flat token ids → packed batches on the device, for training and for evaluation, without padding.

Letters: T tokens of a batch, S samples.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from biphase.device import to_device
from biphase.encoder.attention import PAD_TO_MULTIPLE_OF, PackedLayout, choose_backend, lay_out
from biphase.finetuning.config import FinetuneConfig
from biphase.finetuning.encoding import TokenizedTexts, bounds_of_lengths
from biphase.tasks.spec import Task


@dataclass(frozen=True)
class CellContext:
    """What one cell is about, and where and in which type it computes: the same throughout it."""

    task: Task
    config: FinetuneConfig
    device: torch.device
    dtype: torch.dtype
    """The type of the arithmetic; autocast from the type of the weights."""

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)


@dataclass(frozen=True)
class Batch:
    """Samples laid end to end, on the device."""

    tokens_T: Tensor
    positions_T: Tensor
    layout: PackedLayout
    samples: np.ndarray
    """The numbers of the samples in the texts that they are from."""
    indices_T: np.ndarray
    """Where each token stands in `TokenizedTexts.tokens_T`, so that targets are looked up as `targets[indices_T]`."""


def pack(texts: TokenizedTexts, samples: np.ndarray, cell: CellContext) -> Batch:
    """The given samples in the given order.

    Of texts with the bounds 0, 3, 5, 9, the samples 2 and 0 give bounds 0, 4, 7, positions 0 1 2 3 0 1 2 and indices
    5 6 7 8 0 1 2.
    """
    lengths = texts.bounds_S1[samples + 1] - texts.bounds_S1[samples]
    bounds = bounds_of_lengths(lengths)
    positions_T = np.arange(bounds[-1]) - np.repeat(bounds[:-1], lengths)
    indices_T = np.repeat(texts.bounds_S1[samples], lengths) + positions_T
    backend = choose_backend(cell.device, cell.dtype)
    layout = lay_out(bounds, causal=False, device=cell.device, backend=backend, pad_to_multiple_of=PAD_TO_MULTIPLE_OF)
    return Batch(
        tokens_T=to_device(texts.tokens_T[indices_T].astype(np.int64), cell.device),
        positions_T=to_device(positions_T, cell.device),
        layout=layout,
        samples=samples,
        indices_T=indices_T,
    )


def targets_on_device(targets: np.ndarray, cell: CellContext) -> Tensor:
    """Targets as int64, or fp32 where they are fractions."""
    kind = np.float32 if np.issubdtype(targets.dtype, np.floating) else np.int64
    return to_device(np.ascontiguousarray(targets, dtype=kind), cell.device)


def training_order(num_items: int, batch_size: int, num_steps: int, seed: int) -> Iterator[np.ndarray]:
    """The items of each step: every epoch a new seeded permutation, its last batch as short as it comes."""
    steps_per_epoch = -(-num_items // batch_size)
    for step in range(num_steps):
        epoch, batch = divmod(step, steps_per_epoch)
        if batch == 0:
            order = np.random.default_rng((seed, epoch)).permutation(num_items)
        yield order[batch * batch_size : (batch + 1) * batch_size]


def backward_in_microbatches(
    texts: TokenizedTexts,
    samples: np.ndarray,
    cell: CellContext,
    loss_of: Callable[[Batch], Tensor],
    bounds_G1: np.ndarray | None = None,
) -> Tensor:
    """The sum of `loss_of` over microbatches that fit into memory, and its gradient.

    With `bounds_G1`, `samples` are numbers of groups that stay together: group g is all samples between its bounds.
    """
    total = torch.zeros((), device=cell.device)
    lengths = texts.lengths_S if bounds_G1 is None else np.diff(texts.bounds_S1[bounds_G1])
    for part in split_by_tokens(samples, lengths, cell.config.microbatch_tokens):
        if bounds_G1 is not None:
            part = np.concatenate([np.arange(bounds_G1[group], bounds_G1[group + 1]) for group in part])
        with cell.autocast():
            loss = loss_of(pack(texts, part, cell))
        loss.backward()
        total += loss.detach()
    return total


def evaluation_batches(
    model: nn.Module, texts: TokenizedTexts, samples: np.ndarray, cell: CellContext
) -> Iterator[tuple[Batch, Tensor]]:
    """The model's output for the given samples, longest first, batch by batch. Call under `torch.no_grad`."""
    most = cell.config.microbatch_tokens
    if cell.device.type == "cpu":
        most = min(4096, most)  # what its caches hold
    lengths = texts.bounds_S1[samples + 1] - texts.bounds_S1[samples]
    ordered = samples[np.argsort(-lengths, kind="stable")]
    for part in split_by_tokens(ordered, texts.lengths_S, most):
        batch = pack(texts, part, cell)
        with cell.autocast():
            output = model(batch.tokens_T, batch.positions_T, batch.layout)
        yield batch, output


def predict_samples(model: nn.Module, texts: TokenizedTexts, width: int, cell: CellContext) -> np.ndarray:
    """The model's outputs for each sample of the texts, [S, width], fp32. Call under `torch.no_grad`."""
    outputs_SC = np.zeros((texts.num_samples, width), dtype=np.float32)
    for batch, output in evaluation_batches(model, texts, np.arange(texts.num_samples), cell):
        outputs_SC[batch.samples] = output.cpu().numpy()
    return outputs_SC


def split_by_tokens(samples: np.ndarray, lengths_S: np.ndarray, most_tokens: int) -> list[np.ndarray]:
    """Consecutive parts of `samples`, each of at most `most_tokens` tokens or of one sample."""
    ends = np.cumsum(lengths_S[samples])
    parts, begin = [], 0
    while begin < len(samples):
        before = ends[begin - 1] if begin else 0
        end = max(begin + 1, int(np.searchsorted(ends, before + most_tokens, side="right")))
        parts.append(samples[begin:end])
        begin = end
    return parts
