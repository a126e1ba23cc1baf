"""The sizes of networks that a recipe can name. Without torch, so that plans of studies need none."""

from collections.abc import Mapping
from typing import Any

from biphase.errors import InputError, nearest
from biphase.flops import SHAPE_KEYS, Shape, read_shape

PRESET_SIZES = {
    # The paper's three (Table 1), named by their parameters without the language model head ...
    "1b": (28, 1728, 5120, 18, 6),
    "610m": (26, 1152, 4096, 18, 6),
    "210m": (12, 768, 3072, 12, 12),
    # ... and smaller ones, named by the parameters of their blocks.
    "36m": (10, 512, 1536, 8, 8),
    "11m": (6, 384, 1024, 6, 6),
    "3m": (4, 256, 640, 4, 4),
    "1m": (4, 128, 384, 4, 4),
}
"""Layers, width, feed-forward width, heads and key-value heads."""
PRESETS = {name: dict(zip(SHAPE_KEYS, sizes, strict=True)) for name, sizes in PRESET_SIZES.items()}
"""The sizes under transformers' names, largest network first."""


def find_preset(preset: str) -> dict[str, int]:
    """Return the sizes of a preset. Raises `InputError` for an unknown one."""
    if preset not in PRESETS:
        raise InputError(f"unknown preset '{preset}'{nearest(preset, PRESETS)}")
    return PRESETS[preset]


def shape_of(preset: str, architecture: Mapping[str, Any], vocab_size: int) -> Shape:
    """Return the shape of a preset with changes under transformers' names."""
    return read_shape({"vocab_size": vocab_size, **PRESETS[preset], **architecture})
