"""Sizes of networks by name: the paper's three, and smaller ones."""

from biphase.errors import refuse_unknown

SHAPE_KEYS = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
"""Transformers' names for the sizes of a network, besides its vocabulary."""
PRESET_SIZES = {
    # The paper's three (Table 1), named by their parameters without the language model head …
    "1b": (28, 1728, 5120, 18, 6),
    "610m": (26, 1152, 4096, 18, 6),
    "210m": (12, 768, 3072, 12, 12),
    # … and smaller ones, named by the parameters of their blocks.
    "36m": (10, 512, 1536, 8, 8),
    "11m": (6, 384, 1024, 6, 6),
    "3m": (4, 256, 640, 4, 4),
    "1m": (4, 128, 384, 4, 4),
}
"""Layers, width, feed-forward width, heads and key-value heads."""
PRESETS = {name: dict(zip(SHAPE_KEYS, sizes, strict=True)) for name, sizes in PRESET_SIZES.items()}
"""The presets of a recipe, as settings under transformers' names; the largest first."""


def find_preset(preset: str) -> dict[str, int]:
    """Return the sizes of a preset. Raises `InputError` for an unknown one."""
    refuse_unknown("unknown preset", preset, PRESETS)
    return PRESETS[preset]
