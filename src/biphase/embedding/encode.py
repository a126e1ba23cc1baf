"""Texts → embeddings, piece by piece, with a sign of progress.

Letters: N texts, D width.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from biphase import console

ENCODE_TEXTS = 64
"""Texts that are in the network at a time."""
PIECE_TEXTS = 512
"""The most texts that are embedded between two signs of progress."""


def embed_pieces(
    encode: Callable[..., Any], texts: Iterable[str], num_texts: int, label: str, **settings: Any
) -> Iterator[Tensor]:
    """The embeddings of texts by a method of an embedding model, a piece at a time, on the device of the model."""
    left, size = iter(texts), ENCODE_TEXTS  # at first little, for a sign of life
    with console.track(label, num_texts, "texts") as progress:
        while piece := list(islice(left, size)):
            yield encode(piece, batch_size=ENCODE_TEXTS, convert_to_tensor=True, show_progress_bar=False, **settings)
            progress.advance(len(piece))
            size = min(2 * size, PIECE_TEXTS)


def embed_texts(encode: Callable[..., Any], texts: Sequence[str], label: str) -> Tensor:
    """The embeddings of texts as they are, [N, D]."""
    return torch.cat(list(embed_pieces(encode, texts, len(texts), label)))


def embed_to_file(
    encode: Callable[..., Any],
    texts: Iterable[str],
    shape_ND: tuple[int, int],
    path: Path,
    label: str,
    *,
    normalize: bool = True,
) -> np.ndarray:
    """Write the embeddings of texts, of length 1 unless said otherwise; returns them as fp32, mapped into memory."""
    rows_ND = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=shape_ND)
    begin = 0
    for piece_ND in embed_pieces(encode, texts, shape_ND[0], label, normalize_embeddings=normalize):
        rows_ND[begin : begin + len(piece_ND)] = piece_ND.cpu().numpy()
        begin += len(piece_ND)
    rows_ND.flush()
    return rows_ND
