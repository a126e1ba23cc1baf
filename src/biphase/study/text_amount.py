"""Files → how much text there is to train on, without reading all of it."""

import math
from dataclasses import dataclass
from pathlib import Path

from biphase.corpus.shards import ShardSet
from biphase.corpus.text import find_text_sources, read_documents
from biphase.errors import InputError

BYTES_PER_TOKEN = {4096: 3.4, 8192: 3.9, 32_768: 4.5, 128_256: 4.7}
"""Held-out English text over the tokens of byte-level BPE with a vocabulary of that size, measured here; 128,256 is
Llama 3's."""
SAMPLED_SOURCES, SAMPLED_BYTES = 8, 16e6
"""Sources that are looked into for how much text there is, and bytes of text that are read in each."""


@dataclass(frozen=True)
class TextAmount:
    """How much text there is: in tokens where it is prepared, else in bytes."""

    text_bytes: float | None = None
    tokens: float | None = None
    vocab_size: int | None = None


def measure_text(path: Path) -> TextAmount:
    """How much text a shard set, or a file or folder of documents, holds; large ones are judged by their beginnings.

    Raises:
        InputError: nothing readable there, or a hub data set, whose size is not known before it is read.
    """
    if (path / "manifest.json").exists():
        shards = ShardSet.open(path, "train")
        return TextAmount(tokens=float(shards.num_tokens), vocab_size=shards.manifest.vocab_size)
    sources = find_text_sources([path])
    hub = next((source.name for source in sources if source.num_bytes is None), None)
    if hub is not None:
        raise InputError(f"{hub}: the size of a hub data set is not known here; give its tokens")
    # Sources are looked into at equal distances. What they begin with says how much text is in a byte of a file, which
    # may be compressed, and so how much is in all of them.
    distance = math.ceil(len(sources) / SAMPLED_SOURCES)
    text_bytes, file_bytes = 0, 0
    for source in sources[::distance]:
        reader, before = read_documents(source), text_bytes
        for document in reader:
            text_bytes += len(document.text.encode())
            if text_bytes - before >= SAMPLED_BYTES:
                file_bytes += reader.bytes_read
                break
        else:
            file_bytes += source.num_bytes or 0
    return TextAmount(text_bytes=text_bytes * sum(source.num_bytes or 0 for source in sources) / file_bytes)


def unique_tokens(text: TextAmount | None, vocab_size: int) -> float:
    """The tokens of the text; from its bytes, by what is measured for the vocabulary nearest in size."""
    if text is not None and text.tokens is not None:
        return text.tokens
    if text is None or text.text_bytes is None:
        return math.inf
    nearest_size = min(BYTES_PER_TOKEN, key=lambda size: abs(math.log(size / vocab_size)))
    return text.text_bytes / BYTES_PER_TOKEN[nearest_size]
