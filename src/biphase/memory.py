"""The shape of a network and how it is trained → bytes on each device. Arithmetic alone; tests tie it to real tensors.

Master weights, gradients and the optimizer's moments are fp32. With FSDP2 each device keeps a part of them, and for a
while the whole of one block, gathered in the type of the arithmetic, beside the embedding and the head. Gradients of
several microbatches are whole on each device until the last one: only then are they summed and parted.

Activations are what backward needs of the blocks: for each token, in numbers of the type of the arithmetic,

    13 · width  +  2 · (heads + kv heads) · head width  +  4 · ffn      of each layer
    2 · width                                                           of each, with activation checkpointing
    5 · width                                                           before and after the blocks

as eager blocks keep it, residuals and norms in fp32. Compiled blocks keep less: an upper bound, then.
"""

from dataclasses import dataclass

from biphase.flops import Shape

FLOAT32, BFLOAT16 = 4, 2
"""Bytes of a number."""
LOGITS_AT_ONCE = 2**29
"""How many logits the head holds on a GPU, in the type of the arithmetic (`encoder.loss`); half as many are fp32."""


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes on each device while a network is trained."""

    weights: float
    gradients: float
    moments: float
    copies: float
    """Weights in the type of the arithmetic: those that FSDP2 has gathered, which are the embedding, the head and two
    blocks (one computes, the next is on its way); without it, those of all blocks, which autocast makes."""
    activations: float
    logits: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.moments + self.copies + self.activations + self.logits


def plan_memory(
    shape: Shape,
    devices: int,
    *,
    microbatch_tokens: int,
    num_microbatches: int = 1,
    recomputes: bool = False,
    moments_per_weight: float = 2,
) -> TrainingMemory:
    """What each of `devices` holds under FSDP2, or one alone.

    Args:
        num_microbatches: how many of them a device goes through for an update.
        recomputes: activation checkpointing.
        moments_per_weight: 2 for AdamW; Muon keeps one for the matrices of the blocks.
    """
    whole = float(FLOAT32 * shape.parameters)
    gradients = whole / devices
    if devices > 1 and num_microbatches > 1:
        gradients += whole
    block = shape.block_weights / shape.layers + 2 * shape.width
    outside = shape.parameters - shape.layers * block
    kept = 13 * shape.width + 2 * shape.head_width * (shape.heads + shape.kv_heads) + 4 * shape.ffn
    # With checkpointing, each block keeps its input in fp32, and one at a time what it computes.
    per_token = 2 * shape.layers * shape.width + kept if recomputes else shape.layers * kept
    targets = min(microbatch_tokens, LOGITS_AT_ONCE // shape.vocab_size)
    return TrainingMemory(
        weights=whole / devices,
        gradients=gradients,
        moments=moments_per_weight * whole / devices,
        copies=BFLOAT16 * (outside + 2 * block if devices > 1 else float(shape.block_weights)),
        activations=float(BFLOAT16 * microbatch_tokens * (per_token + 5 * shape.width)),
        logits=float((BFLOAT16 + FLOAT32 / 2) * targets * shape.vocab_size),
    )
