"""Copies are counted exactly, by hash."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from biphase.api.folders import inspect
from biphase.corpus import prepare as preparing
from biphase.corpus import shards
from biphase.corpus.prepare import prepare
from biphase.corpus.shards import read_shard_manifest
from biphase.corpus.text import read_documents
from biphase.errors import InputError

WORDS = [f"word{number}" for number in range(200)]


@pytest.fixture
def made(corpus: Any, tmp_path: Path) -> Path:
    """Twenty texts, of which 0 and 1 come again, 2 and 3 with a word changed, and 0 and 4 for validation too."""
    rng = np.random.default_rng(1)
    texts = [rng.choice(WORDS, 60).tolist() for _ in range(20)]
    near = [[*texts[number][:30], "other", *texts[number][31:]] for number in (2, 3)]
    for name, rows in (("train", [*texts, texts[0], texts[1], *near]), ("held", [texts[0], texts[4], ["new"] * 9])):
        lines = [json.dumps({"text": " ".join(row)}) for row in rows]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    held_out = [tmp_path / "held.jsonl"]
    prepare([tmp_path / "train.jsonl"], corpus.tokenizer, tmp_path / "set", validation=held_out, workers=1)
    return tmp_path / "set"


def test_exact_copies(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = read_shard_manifest(made)
    assert manifest.duplicates == {"train": 2, "validation": 0, "in_both": 2}
    monkeypatch.setattr(shards, "HASHES_AT_ONCE", 3)
    assert shards.count_copies(made, manifest.shards) == manifest.duplicates, "in ranges"
    assert inspect(made)["exact_copies"] == manifest.duplicates


def test_a_source_may_have_any_name(corpus: Any, tmp_path: Path) -> None:
    (tmp_path / "½ m² ① हिन्दी.txt").write_text("one text\n\nand another\n" * 9)
    options: Any = {"txt_documents": "paragraphs", "workers": 1}
    prepare(tmp_path / "½ m² ① हिन्दी.txt", corpus.tokenizer, tmp_path / "set", **options)
    [shard] = read_shard_manifest(tmp_path / "set").shards
    assert shard.name.startswith("½-m²-①-")


def test_copies_are_dropped(
    capsys: pytest.CaptureFixture[str], made: Path, corpus: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of equal texts the first stays. The same call finds its set finished, without reading it, or mends it."""
    assert "that are also in train: 2; drop_copies (--drop-copies) leaves" in " ".join(capsys.readouterr().out.split())
    sources, held = [tmp_path / "train.jsonl"], [tmp_path / "held.jsonl"]
    with (tmp_path / "train.jsonl").open("a") as file:
        file.write('\n{"text": ""}\n{"text": ""}\n')
    for is_read in (True, False, True):
        monkeypatch.setattr(preparing, "read_documents", read_documents if is_read else None)
        prepare(sources, corpus.tokenizer, tmp_path / "once", validation=held, workers=1, drop_copies=True)
        told = "4 documents have the text of an earlier one and are left out"
        assert (told in " ".join(capsys.readouterr().err.split())) == is_read
        if not is_read:
            shutil.rmtree(next((tmp_path / "once" / "shards").iterdir()))
    manifest = read_shard_manifest(tmp_path / "once")
    assert manifest.duplicates == {"train": 0, "validation": 0, "in_both": 0}
    before = read_shard_manifest(made).splits
    assert [manifest.splits[name].documents for name in ("train", "validation")] == [
        before["train"].documents - 2,
        before["validation"].documents - 2,
    ]
    assert manifest.splits["train"].empty_texts == 2
    with pytest.raises(InputError, match="has a finished shard set with other options"):
        prepare(sources, corpus.tokenizer, tmp_path / "once", validation=held, workers=1)
