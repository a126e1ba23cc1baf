"""A model's name → the network with its tokenizer, ready to be fine-tuned. `identity` says what a name may be."""

from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch import nn

from biphase.corpus.tokenizer import NEW_NAMES, load_tokenizer, tokenizer_hash
from biphase.encoder.load import load_backbone
from biphase.errors import InputError
from biphase.finetuning.encoding import KeyedTokenizer
from biphase.finetuning.models import count_positions, find_folder, hash_files, stamps_of


@dataclass(frozen=True)
class Encoder:
    """A pretrained network and its tokenizer. Shared by cells: copied, never trained."""

    name: str
    hash: str
    """Of configuration, weights and tokenizer."""
    backbone: nn.Module = field(compare=False, repr=False)
    keyed: KeyedTokenizer
    max_length: int
    """Tokens that the network has positions for, as it was found to number them."""


def load_encoder(name: str) -> Encoder:
    """The encoder behind a name; a second call for the same files costs nothing."""
    folder = find_folder(name)
    return _load_encoder(name, folder, stamps_of(folder))


@lru_cache(maxsize=1)
def _load_encoder(name: str, folder: Path, stamps: tuple[tuple[str, int, int], ...]) -> Encoder:
    backbone = load_backbone(folder)
    tokenizer = load_tokenizer(folder)
    config: Any = backbone.config
    highest = max(number for token, number in tokenizer.get_vocab().items() if token not in NEW_NAMES.values())
    size = config.vocab_size
    keyed = KeyedTokenizer(tokenizer_hash(tokenizer), tokenizer)
    if max(highest, keyed.closing, *keyed.opening) >= size:
        raise InputError(
            f"{name}: its tokenizer has {highest + 1:,} tokens, its network only {size:,}; they do not belong together"
        )
    limit = count_positions(config, getattr(backbone, "first_position", None))
    return Encoder(name, hash_files(stamps), backbone, keyed, limit)
