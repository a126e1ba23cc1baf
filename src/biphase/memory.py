"""The shape of a network and how it is trained → bytes on each device. Arithmetic alone; tests tie it to real tensors.

Master weights, gradients and the optimizer's moments are fp32. With FSDP2 each device keeps a part of them, and for a
while the whole of one block, gathered in the type of the arithmetic, beside the embedding and the head. Gradients of
several microbatches are whole on each device until the last one: only then are they summed and parted. With DDP each
device holds what one alone does. Its buckets are the gradients, but those of several microbatches stand beside them.

Activations are what backward needs of the blocks: for each token, in numbers of the type of the arithmetic,

    a · width  +  2 · (heads + kv heads) · head width  +  4 · ffn       of each layer
    b · width                                                           of each, with activation checkpointing
    c · width                                                           before and after the blocks

as eager blocks keep it, residuals and norms in fp32: a, b, c are 13, 2, 5 in bf16, and 6, 1, 3 in fp32. Compiled blocks
keep less: an upper bound, then.

The head, of vocabulary · width, has its gradient in fp32 from forward on: beside it stand a copy of the weights and a
product, both in the type of the arithmetic, and in backward the gradient once more, scaled.

Muon's update treats all matrices of one shape at once. For n of a · b with a ≤ b these are, in numbers,

    n · a · b  in fp32, and  n · max(4 · a · b + a², 2 · a · b + 4 · a²)  in the type of the arithmetic

when the activations are gone; AdamW's is made in place.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from biphase.flops import Shape

FLOAT32, BFLOAT16 = 4, 2
"""Bytes of a number."""
WIDTHS_KEPT = {BFLOAT16: (13, 2, 5), FLOAT32: (6, 1, 3)}
"""How often a token's width is kept for backward (above)."""
LOGITS_AT_ONCE = {"cpu": 2**25, "cuda": 2**29}
"""How many logits the head holds, in the type of the arithmetic, and how many of them in fp32 (`encoder.loss`)."""
FP32_LOGITS_AT_ONCE = {"cpu": 2**18, "cuda": 2**28}


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes on each device while a network is trained."""

    weights: float
    gradients: float
    moments: float
    copies: float
    """Weights in the type of the arithmetic: those that FSDP2 has gathered, which are the embedding, the head and two
    blocks (one computes, the next is on its way); without it, those of all blocks, which autocast makes in bf16."""
    activations: float
    logits: float
    head: float
    """The gradient of the head until it is added to the others."""
    update: float
    """What the optimizer makes for a while."""

    @property
    def total(self) -> float:
        computing = self.copies + self.activations + self.logits + self.head
        return self.weights + self.gradients + self.moments + max(computing, self.update)


def plan_memory(
    shape: Shape,
    devices: int,
    *,
    microbatch_tokens: int,
    num_microbatches: int = 1,
    recomputes: bool = False,
    muon: bool = False,
    parallel: Literal["ddp", "fsdp"] = "fsdp",
    number: int = BFLOAT16,
    device: Literal["cpu", "cuda"] = "cuda",
) -> TrainingMemory:
    """What each of `devices` holds, or one alone.

    Args:
        num_microbatches: how many of them a device goes through for an update.
        recomputes: activation checkpointing.
        muon: the optimizer of the blocks' matrices, of which it keeps one moment; AdamW keeps two.
        number: bytes of a number of the arithmetic.
    """
    parts = devices if parallel == "fsdp" else 1
    whole = float(FLOAT32 * shape.parameters)
    gradients = whole / parts + (whole if devices > 1 and num_microbatches > 1 else 0)
    block = shape.block_weights / shape.layers + 2 * shape.width
    outside = shape.parameters - shape.layers * block
    copied = outside + 2 * block if parts > 1 else shape.block_weights if number != FLOAT32 else 0
    of_layer, of_input, of_ends = WIDTHS_KEPT[number]
    kept = of_layer * shape.width + 2 * shape.head_width * (shape.heads + shape.kv_heads) + 4 * shape.ffn
    # With checkpointing, each block keeps its input in fp32, and one at a time what it computes.
    per_token = shape.layers * of_input * shape.width + kept if recomputes else shape.layers * kept
    logits = microbatch_tokens * shape.vocab_size
    in_fp32 = min(logits, FP32_LOGITS_AT_ONCE[device])
    moments = 2 * whole - FLOAT32 * (shape.block_weights if muon else 0)
    return TrainingMemory(
        weights=whole / parts,
        gradients=gradients,
        moments=moments / parts,
        copies=float(number * copied),
        activations=float(number * microbatch_tokens * (per_token + of_ends * shape.width)),
        logits=float(number * min(logits, LOGITS_AT_ONCE[device]) + FLOAT32 * in_fp32),
        head=float(2 * FLOAT32 * shape.vocab_size * shape.width),
        update=float(max(muon_bytes(*each, number) for each in matrices_of(shape).items()) if muon else 0),
    )


def matrices_of(shape: Shape) -> Counter[tuple[int, int]]:
    """How many matrices of a shape the blocks have."""
    queries, keys = shape.heads * shape.head_width, shape.kv_heads * shape.head_width
    sizes = [(queries, shape.width), (shape.width, queries), *2 * [(keys, shape.width)]]
    sizes += [*2 * [(shape.ffn, shape.width)], (shape.width, shape.ffn)]
    return Counter({size: shape.layers * number for size, number in Counter(sizes).items()})


def muon_bytes(size: tuple[int, int], count: int, number: int) -> int:
    """What `pretraining.optimizer` makes of the gradients of so many matrices, at most at once."""
    short, long = sorted(size)
    at_once = max(4 * short * long + short**2, 2 * short * long + 4 * short**2)
    return count * (FLOAT32 * short * long + number * at_once)
