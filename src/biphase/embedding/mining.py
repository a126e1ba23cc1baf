"""Pairs and the network before a stage → the pairs with hard negatives, in a file that is made once.

Letters: N passages, A anchors, D width.
"""

from collections.abc import Mapping
from itertools import islice
from pathlib import Path

import pyarrow as pa
import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer
from sentence_transformers.util import dot_score, semantic_search
from torch import Tensor

from biphase import console
from biphase.embedding.encode import embed_pieces, embed_to_file
from biphase.embedding.packed_module import width_of
from biphase.embedding.pairs import PIECE_ROWS, to_arrow
from biphase.embedding.recipe import HardNegatives
from biphase.errors import InputError
from biphase.files import make_once

MINED_PASSAGES = 262_144
"""Whose scores with the anchors of a piece are in memory at a time."""


def mine_once(table: Dataset, model: SentenceTransformer, stage: str, wanted: HardNegatives, kept: Path) -> Dataset:
    """The rows that have hard negatives, with them, kept as a file; how many there are is told. Raises `InputError`
    where there are none."""

    def mine(part: Path) -> None:
        negatives = mine_negatives(table, model, wanted, f"mine for {stage}", part.with_suffix(".npy"))
        if not write_mined(table, negatives, wanted.number, part):
            raise InputError(
                f"hard_negatives: no anchor has {wanted.number} negatives within rank {wanted.last_rank} and margin "
                f"{wanted.margin}: lower number or margin, or raise last_rank"
            )

    make_once(kept, mine)
    mined = Dataset.from_file(str(kept))
    told = f"{len(mined):,} of {len(table):,} pairs have {wanted.number} hard negatives"
    console.err.print(f"stage {stage}: {told}", markup=False)
    return mined


def mine_negatives(
    table: Dataset, model: SentenceTransformer, wanted: HardNegatives, label: str, place: Path
) -> dict[str, list[str]]:
    """For each anchor up to `wanted.number` positives of others that the model ranks high, as sentence-transformers'
    `mine_hard_negatives` chooses them.

    That function holds embeddings in memory several times over, and scores of 16,384 anchors with all passages; here
    embeddings of passages lie in the file `place` while it runs, and anchors come in pieces. A negative scores at most
    the margin below the worst positive of its anchor; ranks are counted among those that do.
    """
    anchors, positives = (table.data.column(name).to_pylist() for name in ("anchor", "positive"))
    passages = list(dict.fromkeys(positives))
    numbers = {text: number for number, text in enumerate(passages)}
    right: dict[str, list[int]] = {}
    for anchor, positive in zip(anchors, positives, strict=True):
        right.setdefault(anchor, []).append(numbers[positive])
    shape_ND = len(passages), width_of(model)
    rows_ND = torch.from_numpy(embed_to_file(model.encode_document, passages, shape_ND, place, f"{label}: passages"))

    def score(rows_AD: Tensor, some_ND: Tensor) -> Tensor:
        return dot_score(rows_AD.to(model.device), some_ND.to(model.device))

    top = wanted.last_rank + max(len(set(own)) for own in right.values())
    chosen: dict[str, list[str]] = {}
    left = iter(right)
    for piece_AD in embed_pieces(model.encode_query, right, len(right), f"{label}: anchors", normalize_embeddings=True):
        rows_AD, some = piece_AD.cpu(), list(islice(left, len(piece_AD)))
        found = semantic_search(rows_AD, rows_ND, len(rows_AD), MINED_PASSAGES, top, score)
        for anchor, row_D, hits in zip(some, rows_AD, found, strict=True):
            own = set(right[anchor])
            worst = float((rows_ND[sorted(own)] @ row_D).min())
            most = worst - abs(worst) * wanted.margin
            others = [hit["corpus_id"] for hit in hits if hit["score"] <= most and hit["corpus_id"] not in own]
            ranked = others[wanted.first_rank : wanted.last_rank]
            chosen[anchor] = [passages[int(number)] for number in ranked[: wanted.number]]
    place.unlink()
    return chosen


def write_mined(table: Dataset, negatives: Mapping[str, list[str]], number: int, path: Path) -> int:
    """Write the rows whose anchors have so many negatives; returns how many they are."""
    names = ["anchor", "positive", *(f"negative_{at + 1}" for at in range(number))]
    num_rows = 0
    with pa.ipc.new_stream(path, pa.schema([(name, pa.string()) for name in names])) as writer:
        for texts in table.iter(PIECE_ROWS):
            pairs = zip(texts["anchor"], texts["positive"], strict=True)
            rows = [(*pair, *negatives[pair[0]]) for pair in pairs if len(negatives[pair[0]]) == number]
            writer.write_table(to_arrow(rows, names))
            num_rows += len(rows)
    return num_rows
