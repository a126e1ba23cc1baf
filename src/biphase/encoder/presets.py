"""The sizes of networks that a recipe can name. Without torch, so that plans of studies need none."""

from collections.abc import Mapping
from typing import Any

from biphase.errors import InputError, nearest
from biphase.flops import SHAPE_KEYS, Shape, read_shape


def sizes(*values: int) -> dict[str, int]:
    """Layers, width, feed-forward width, heads and key-value heads under transformers' names."""
    return dict(zip(SHAPE_KEYS, values, strict=True))


PRESETS: dict[str, dict[str, int]] = {
    # The paper's three (Table 1), named by their parameters without the language model head ...
    "1b": sizes(28, 1728, 5120, 18, 6),
    "610m": sizes(26, 1152, 4096, 18, 6),
    "210m": sizes(12, 768, 3072, 12, 12),
    # ... and smaller ones, named by the parameters of their blocks.
    "36m": sizes(10, 512, 1536, 8, 8),
    "11m": sizes(6, 384, 1024, 6, 6),
    "3m": sizes(4, 256, 640, 4, 4),
    "1m": sizes(4, 128, 384, 4, 4),
}
"""Largest first."""


def find_preset(preset: str) -> dict[str, int]:
    """The sizes of a preset. Raises `InputError` for an unknown one."""
    if preset not in PRESETS:
        raise InputError(f"unknown preset '{preset}'{nearest(preset, PRESETS)}")
    return PRESETS[preset]


def shape_of(preset: str, architecture: Mapping[str, Any], vocab_size: int) -> Shape:
    """The shape of a preset with changes under transformers' names."""
    return read_shape({"vocab_size": vocab_size, **PRESETS[preset], **architecture})
