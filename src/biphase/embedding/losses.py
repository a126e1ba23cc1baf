"""A stage → its loss, and its teacher's embedding of every text, in a file that is made once.

Letters: B rows of a piece, C columns, D width.
"""

import inspect
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import losses
from torch import Tensor, nn

from biphase import console
from biphase.embedding.encode import ENCODE_TEXTS, PIECE_TEXTS
from biphase.embedding.folder import hash_embedder, load_embedder
from biphase.embedding.packed_module import width_of
from biphase.embedding.recipe import LOSSES, EmbeddingStage
from biphase.errors import InputError, first_line, nearest
from biphase.files import make_once


@lru_cache(maxsize=1)
def open_teacher(name: str, _content: str) -> SentenceTransformer:
    """One at a time, opened anew where its files have changed."""
    return load_embedder(name)


def load_teacher(stage: EmbeddingStage, width: int) -> SentenceTransformer | None:
    """The stage's teacher. Raises `InputError` where it cannot be loaded, or has another dimension than the student."""
    if stage.teacher is None:
        return None
    try:
        teacher = open_teacher(stage.teacher, hash_embedder(stage.teacher))
    except (OSError, ValueError) as error:
        raise InputError(
            f"stage {stage.name}: teacher {stage.teacher} cannot be loaded ({first_line(error)})"
        ) from None
    dimension = teacher.get_embedding_dimension()
    if dimension != width and not stage.projection:
        raise InputError(
            f"stage {stage.name}: teacher {stage.teacher} has {dimension} dimensions, the model {width}: say "
            "projection: true, or take another teacher"
        )
    return teacher


def teach_once(table: Dataset, teacher: SentenceTransformer, stage: str, kept: Path) -> Dataset:
    """The texts of a table with the teacher's embedding of each as labels of `EmbedDistillLoss`, [C, D] for a row, kept
    as a file and mapped into memory.

    With its own prompts: anchors are queries to it, and what belongs to them documents; the two sides of scored pairs
    are no such things.
    """
    make_once(kept, lambda part: write_taught(table, teacher, f"teach {stage}", part))
    return Dataset.from_file(str(kept))


def write_taught(table: Dataset, teacher: SentenceTransformer, label: str, path: Path) -> None:
    columns = [column for column in table.column_names if column != "score"]
    encoders: list[Any] = [teacher.encode_query] + [teacher.encode_document] * (len(columns) - 1)
    if "score" in table.column_names:
        encoders = [teacher.encode, teacher.encode]
    width = width_of(teacher)
    rows_CD = pa.list_(pa.list_(pa.float32(), width), len(columns))
    schema = pa.schema([*((column, pa.string()) for column in columns), ("label", rows_CD)])
    with pa.ipc.new_stream(path, schema) as writer, console.track(label, len(table), "rows") as progress:
        for texts in table.select_columns(columns).iter(PIECE_TEXTS):
            embeddings = [
                encode(texts[column], batch_size=ENCODE_TEXTS, convert_to_tensor=True, show_progress_bar=False)
                for encode, column in zip(encoders, columns, strict=True)
            ]
            flat = pa.array(torch.stack(embeddings, dim=1).flatten().cpu().numpy())
            rows_BCD = pa.FixedSizeListArray.from_arrays(pa.FixedSizeListArray.from_arrays(flat, width), len(columns))
            writer.write_table(pa.table([*texts.values(), rows_BCD], schema=schema))
            progress.advance(len(rows_BCD))


SMALLEST_DIM = 32
"""Matryoshka's halves of the width end here."""


def loss_name(stage: EmbeddingStage, kind: str) -> str:
    """The recipe's name of the loss for pairs of a kind. Raises `InputError` for one that is of the other kind."""
    if stage.loss == "auto":
        return "cosent" if kind == "scored" else "mnrl" if stage.orthogonal_weight else "cached_mnrl"
    is_scored = stage.loss == "cosent"
    if stage.loss != "distill" and is_scored != (kind == "scored"):
        raise InputError(
            f"stage {stage.name}: loss {stage.loss} needs {'scored pairs' if is_scored else 'pairs without scores'}"
        )
    return stage.loss


def make_loss(
    model: SentenceTransformer, stage: EmbeddingStage, kind: str, matryoshka: bool | Sequence[int]
) -> nn.Module:
    """The stage's loss, over several widths of the embeddings unless the recipe says otherwise.

    Raises `InputError` for a setting that the loss does not have.
    """
    name = loss_name(stage, kind)
    make = getattr(losses, LOSSES[name])
    known = inspect.signature(make).parameters
    settings = dict(stage.loss_settings)
    for key in settings:
        if key not in known or key == "model":
            raise InputError(
                f"stage {stage.name}: loss_settings: unknown key '{key}'{nearest(key, set(known) - {'model'})}"
            )
    if "scale" in known:
        settings.setdefault("scale", 1 / stage.temperature)
    if "mini_batch_num_tokens" in known:
        settings.setdefault("mini_batch_num_tokens", stage.mini_batch_tokens)
    width = width_of(model)
    if name == "distill" and stage.projection:
        teacher = load_teacher(stage, width)
        assert teacher is not None
        settings.setdefault("projection_dim", teacher.get_embedding_dimension())
    try:
        loss = make(model, **settings)
    except (TypeError, ValueError) as error:
        raise InputError(f"stage {stage.name}: loss_settings: {first_line(error)}") from None
    if name == "distill":
        return loss
    if stage.orthogonal_weight:
        loss = WithOrthogonality(model, loss, stage.orthogonal_weight)
    dims = matryoshka_dims(width, matryoshka)
    return losses.MatryoshkaLoss(model, loss, dims) if len(dims) > 1 else loss


class WithOrthogonality(nn.Module):
    """A loss with the weighted global orthogonal regularizer added, from the same embeddings."""

    def __init__(self, model: SentenceTransformer, loss: Any, weight: float) -> None:
        super().__init__()
        self.model, self.loss, self.weight = model, loss, weight
        self.regularizer = losses.GlobalOrthogonalRegularizationLoss(model)

    def forward(self, sentence_features: Iterable[dict[str, Any]], labels: Tensor) -> Tensor:
        embeddings = [self.model(features)["sentence_embedding"] for features in sentence_features]
        terms = self.regularizer.compute_loss_from_embeddings(embeddings)
        return self.loss.compute_loss_from_embeddings(embeddings, labels) + self.weight * sum(terms.values())


def matryoshka_dims(width: int, wanted: bool | Sequence[int]) -> list[int]:
    """The widths that are trained, largest first: 384 gives 384, 192, 96, 48."""
    if wanted is False:
        return [width]
    if wanted is True:
        dims = [width]
        while dims[-1] % 2 == 0 and dims[-1] // 2 >= SMALLEST_DIM:
            dims.append(dims[-1] // 2)
        return dims
    if max(wanted) > width:
        raise InputError(f"matryoshka: {max(wanted)} is above the {width} dimensions of the model")
    return sorted({width, *wanted}, reverse=True)
