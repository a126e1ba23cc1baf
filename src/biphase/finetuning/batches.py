"""Flat token ids → packed batches on the device, for training and for evaluation, without padding.

Letters: T tokens of a batch, S samples.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from biphase.encoder.attention import PAD_TO_MULTIPLE_OF, PackedLayout, lay_out
from biphase.finetuning.cell import Runtime
from biphase.finetuning.encoding import Texts, cumulate


@dataclass(frozen=True)
class Batch:
    """Samples laid end to end, on the device."""

    tokens_T: Tensor
    positions_T: Tensor
    layout: PackedLayout
    samples: np.ndarray
    """Their numbers in the texts that they are from."""
    places_T: np.ndarray
    """Where each token stands in `Texts.tokens_T`."""


def pack(texts: Texts, samples: np.ndarray, compute: Runtime) -> Batch:
    """The given samples in the given order."""
    lengths = texts.bounds_S1[samples + 1] - texts.bounds_S1[samples]
    bounds = cumulate(lengths)
    positions_T = np.arange(bounds[-1]) - np.repeat(bounds[:-1], lengths)
    places_T = np.repeat(texts.bounds_S1[samples], lengths) + positions_T
    layout = lay_out(
        bounds, causal=False, device=compute.device, backend=compute.backend, pad_to_multiple_of=PAD_TO_MULTIPLE_OF
    )
    return Batch(
        tokens_T=torch.from_numpy(texts.tokens_T[places_T].astype(np.int64)).to(compute.device),
        positions_T=torch.from_numpy(positions_T).to(compute.device),
        layout=layout,
        samples=samples,
        places_T=places_T,
    )


def on_device(targets: np.ndarray, compute: Runtime) -> Tensor:
    """Targets as int64."""
    return torch.from_numpy(np.ascontiguousarray(targets, dtype=np.int64)).to(compute.device)


def training_order(num_items: int, batch_size: int, num_steps: int, seed: int) -> Iterator[np.ndarray]:
    """The items of each step: every epoch a new seeded permutation, its last batch as short as it comes."""
    steps_per_epoch = -(-num_items // batch_size)
    for step in range(num_steps):
        epoch, place = divmod(step, steps_per_epoch)
        if place == 0:
            order = np.random.default_rng((seed, epoch)).permutation(num_items)
        yield order[place * batch_size : (place + 1) * batch_size]


def backward_by_parts(
    texts: Texts, samples: np.ndarray, compute: Runtime, loss_of: Callable[[Batch], Tensor]
) -> Tensor:
    """The sum of `loss_of` over microbatches that fit into memory, and its gradient."""
    total = torch.zeros((), device=compute.device)
    for part in cut(samples, texts.lengths_S, compute.microbatch_tokens):
        with compute.autocast():
            loss = loss_of(pack(texts, part, compute))
        loss.backward()
        total += loss.detach()
    return total


def evaluation_batches(
    model: nn.Module, texts: Texts, samples: np.ndarray, compute: Runtime
) -> Iterator[tuple[Batch, Tensor]]:
    """The model's output for the given samples, longest first, batch by batch. Call under `torch.no_grad`."""
    lengths = texts.bounds_S1[samples + 1] - texts.bounds_S1[samples]
    ordered = samples[np.argsort(-lengths, kind="stable")]
    for part in cut(ordered, texts.lengths_S, evaluation_tokens(compute)):
        batch = pack(texts, part, compute)
        with compute.autocast():
            output = model(batch.tokens_T, batch.positions_T, batch.layout)
        yield batch, output


def evaluation_tokens(compute: Runtime) -> int:
    """Tokens per batch of evaluation: on a CPU, what its caches hold."""
    return compute.microbatch_tokens if compute.device.type == "cuda" else min(4096, compute.microbatch_tokens)


def cut(samples: np.ndarray, lengths_S: np.ndarray, budget_tokens: int) -> list[np.ndarray]:
    """Consecutive parts of `samples`, each of at most `budget_tokens` tokens or of one sample."""
    ends = np.cumsum(lengths_S[samples])
    parts, begin = [], 0
    while begin < len(samples):
        before = ends[begin - 1] if begin else 0
        end = max(begin + 1, int(np.searchsorted(ends, before + budget_tokens, side="right")))
        parts.append(samples[begin:end])
        begin = end
    return parts
