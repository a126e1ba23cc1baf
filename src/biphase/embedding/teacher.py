"""A stage with a teacher → the teacher's embedding of every text, in a file that is made once.

Letters: B rows of a piece, C columns, D width.
"""

from functools import lru_cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer

from biphase import console
from biphase.embedding.encode import ENCODE_TEXTS, PIECE_TEXTS
from biphase.embedding.folder import hash_embedder, load_embedder
from biphase.embedding.packed_module import width_of
from biphase.embedding.recipe import EmbeddingStage
from biphase.errors import InputError, first_line
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
