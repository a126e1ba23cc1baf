import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from biphase.encoder.models import Encoder
from biphase.errors import InputError
from biphase.finetuning import encoding_cache
from biphase.finetuning.encoding_cache import (
    encode_source,
    encodings,
    leaves_of,
    load_encoded,
    read_encoded,
    save_encoded,
)
from biphase.finetuning.families import family_module
from biphase.tasks.sources import find_task_sources
from biphase.tasks.spec import TASK_SPLITS, TaskSplit

from .conftest import make_cell

Dirs = dict[str, Path]


def load_for(encoder: Encoder, task: str, data_dirs: Dirs, **settings: object) -> dict[TaskSplit, Any]:
    cell = make_cell(task, **settings)
    return load_encoded(find_task_sources(task, data_dirs)[0], encoder, cell.config)[0]


@pytest.mark.parametrize("task", ["snli", "wnut17", "squad_v2", "squad_retrieval"])
def test_splits_come_back_from_the_disk(encoder: Encoder, data_dirs: Dirs, tmp_path: Path, task: str) -> None:
    source = find_task_sources(task, data_dirs)[0]
    cell = make_cell(task, max_length=24, doc_stride=4)
    made = encode_source(source, encoder.tokenizer, cell.config)
    save_encoded(tmp_path / "task", made)
    found, num_left_out = read_encoded(tmp_path / "task", family_module(cell.task, cell.config).Split)
    assert tuple(found) == TASK_SPLITS and num_left_out == made[1]
    for name in TASK_SPLITS:
        assert type(found[name]) is type(made[0][name])
        for (key, value), (_, wanted) in zip(leaves_of(found[name]), leaves_of(made[0][name]), strict=True):
            if isinstance(wanted, np.ndarray):
                assert value.dtype == wanted.dtype and np.array_equal(value, wanted), key
                with pytest.raises(ValueError, match="read-only"):
                    value[...] = 0
            else:
                assert value == wanted and type(value) is type(wanted), key


def test_what_splits_share_is_kept_once(encoder: Encoder, data_dirs: Dirs) -> None:
    splits = load_for(encoder, "squad_retrieval", data_dirs)
    for one, other in itertools.pairwise(splits.values()):
        assert one.documents.tokens_T is other.documents.tokens_T and one.document_ids is other.document_ids
        assert one.queries_J is not other.queries_J


def test_a_text_is_tokenized_once(
    encoder: Encoder, data_dirs: Dirs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BIPHASE_CACHE", str(tmp_path))
    first = load_for(encoder, "snli", data_dirs)
    encodings.clear()
    monkeypatch.setattr(encoding_cache, "load_examples", None)
    again = load_for(encoder, "snli", data_dirs)
    assert again is not first and load_for(encoder, "snli", data_dirs) is again
    old, new = first["train"], again["train"]
    assert (new.texts.tokens_T == old.texts.tokens_T).all() and new.ids == old.ids
    with pytest.raises(TypeError):
        load_for(encoder, "snli", data_dirs, max_length=10)


def test_candidates_of_another_bm25_have_another_name(
    encoder: Encoder, data_dirs: Dirs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BIPHASE_CACHE", str(tmp_path))
    for version in (3, 4):
        monkeypatch.setattr(encoding_cache, "BM25_VERSION", version)
        for ranking in ("embeddings", "pairs"):
            load_for(encoder, "squad_retrieval", data_dirs, ranking=ranking)
    assert len([*tmp_path.glob("encoded/squad_retrieval-*.safetensors")]) == 3


@pytest.mark.parametrize("damage", ["changed", "cut"])
def test_what_is_damaged_is_not_trained_on(
    encoder: Encoder, data_dirs: Dirs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    monkeypatch.setenv("BIPHASE_CACHE", str(tmp_path))
    load_for(encoder, "wnut17", data_dirs)
    encodings.clear()
    [path] = tmp_path.glob("encoded/wnut17-*.safetensors")
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    path.write_bytes(content if damage == "changed" else content[:-9])
    with pytest.raises(InputError, match=rf"{path} is damaged .*delete it"):
        load_for(encoder, "wnut17", data_dirs)
