"""The shape of a network → its parameters and the FLOPs of training it: arithmetic alone, so planning needs no torch.

A test proves both equal to the networks that `biphase.encoder.backbone` builds.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from biphase.config import Phase
from biphase.encoder.presets import KEYS, PRESETS


@dataclass(frozen=True)
class Shape:
    """A pre-norm network with gated feed-forward layers and no biases: EuroBERT's, which is Llama's."""

    layers: int
    width: int
    ffn: int
    heads: int
    kv_heads: int
    head_width: int
    vocab_size: int
    is_tied: bool = False

    @property
    def block_weights(self) -> int:
        """Of the matrices inside the blocks."""
        attention = 2 * self.width * self.head_width * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.width * self.ffn)

    @property
    def parameters_without_head(self) -> int:
        """What fine-tuning starts from: embedding, blocks and norms."""
        return self.vocab_size * self.width + self.block_weights + (2 * self.layers + 1) * self.width

    @property
    def parameters(self) -> int:
        """With the language model head."""
        return self.parameters_without_head + (0 if self.is_tied else self.vocab_size * self.width)


def shape_of(preset: str, architecture: Mapping[str, Any], vocab_size: int) -> Shape:
    """The shape of a preset with changes under transformers' names."""
    settings = {**PRESETS[preset], **architecture}
    layers, width, ffn, heads, kv_heads = (int(settings[key]) for key in KEYS)
    return Shape(
        layers,
        width,
        ffn,
        heads,
        kv_heads,
        head_width=int(settings.get("head_dim") or width // heads),
        vocab_size=int(settings.get("vocab_size", vocab_size)),
        is_tied=bool(settings.get("tie_word_embeddings", False)),
    )


@dataclass(frozen=True)
class Text:
    """What the samples of a training run are like; attention and CLM depend on their lengths."""

    mean_tokens: float
    """Of a sample."""
    mean_keys: float
    """Length of the sample that a token is in, averaged over tokens: sum of squared lengths / sum of lengths."""
    source: str
    """Where the two numbers are from, for people."""


def flops_per_token(shape: Shape, phase: Phase, text: Text) -> float:
    """Floating-point operations of training on one token, forward and backward (3 · 2 · multiply-adds).

    6 · W + 12 · layers · heads · head width · keys + 6 · width · vocabulary · targets, where W are the weights of the
    blocks, keys the tokens that a token meets (half of its sample under CLM, all of it else) and targets the share
    of tokens with a loss (all but the last of a sample under CLM, `mask_probability` else: the head computes
    nothing where there is no target). As `biphase.encoder.backbone.FlopCount`; recomputation is not counted. A
    phase that mixes objectives costs the mean of its parts.
    """
    if phase.clm_share:
        return sum(share * flops_per_token(shape, part, text) for part, share in phase.parts)
    causal = phase.objective == "clm"
    keys = text.mean_keys / 2 if causal else text.mean_keys
    targets = 1 - 1 / text.mean_tokens if causal else phase.mask_probability
    blocks = 6.0 * shape.block_weights
    attention = 12.0 * shape.layers * shape.heads * shape.head_width * keys
    return blocks + attention + 6.0 * shape.width * shape.vocab_size * targets
