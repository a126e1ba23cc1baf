"""What `grid.py` measures on: a fresh encoder, bundled tasks as plain JSON lines, pairs for Sentence Transformers."""

import json
from pathlib import Path
from typing import Any, Literal

from grid_job import SPLITS
from measuring import BUNDLED_TEXT

CLASSIFICATION = ("sequence_classification", "token_classification")


def make_encoder(preset: str, vocab_size: int, folder: Path) -> Path:
    """A network with random weights, and a tokenizer trained on the bundled text."""
    from biphase.corpus.text import find_text_sources, sample_texts
    from biphase.corpus.tokenizer import train_tokenizer
    from biphase.encoder.network import TokenIds, make_model

    tokenizer = train_tokenizer(sample_texts(find_text_sources([BUNDLED_TEXT])), vocab_size)
    ids = TokenIds(len(tokenizer), tokenizer.mask_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, None)
    make_model(preset, {}, ids, max_len=2048, seed=0).save_pretrained(folder / "encoder")
    tokenizer.save_pretrained(folder / "encoder")
    return folder / "encoder"


def write_splits(name: str, sizes: dict[Literal["train", "validation", "test"], int], folder: Path) -> dict[str, Any]:
    """A bundled task, and its rows as plain JSON lines for both sides; of larger splits a fixed random part."""
    import random

    from biphase.errors import InputError
    from biphase.tasks.sources import find_source, read_rows
    from biphase.tasks.spec import find_task

    task = find_task(name)
    if not task.bundled or task.family not in CLASSIFICATION:
        raise InputError(f"{name} is no bundled task of classification; those are snli, uner_en_ewt, wnut17 and genre")
    source = find_source(task, None)
    folder.mkdir(parents=True)
    for split, size in sizes.items():
        rows = [row for _, row in read_rows(source, split) if row and str(row[task.label]) not in task.unlabelled]
        kept = sorted(random.Random(42).sample(range(len(rows)), min(size, len(rows))))
        lines = "".join(json.dumps(rows[i]) + "\n" for i in kept)
        (folder / f"{split}.jsonl").write_text(lines, encoding="utf-8")
    return task.model_dump(mode="json") | {"folder": str(folder)}


def write_pairs(name: str, beir: Path, closing: str, folder: Path) -> dict[str, Any]:
    """A retrieval task, and for Sentence Transformers its pairs and judgements: prefixes in place, splits drawn."""
    from biphase.tasks.examples import load_examples
    from biphase.tasks.sources import find_source
    from biphase.tasks.spec import find_task
    from biphase.tasks.splits import Collection

    task = find_task(name)
    data = load_examples(find_source(task, beir), judged_only=True)
    assert isinstance(data, Collection)
    templates = (task.query_template, task.document_template)
    queries, documents = (
        {id: template.replace("{text}", text) + closing for id, text in texts.items()}
        for template, texts in zip(templates, (data.queries, data.documents), strict=True)
    )
    folder.mkdir(parents=True)
    pairs = ({"anchor": queries[query], "positive": documents[document]} for query, document in data.train)
    (folder / "train.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs), encoding="utf-8")
    for split in SPLITS:
        judged = data.relevance[split]
        named = set(data.judged_documents[split])
        content = {
            "queries": {id: queries[id] for id in judged},
            "documents": {id: documents[id] for id in documents if id in named},
            "relevance": {
                id: [document for document, grade in grades.items() if grade > 0] for id, grades in judged.items()
            },
        }
        (folder / f"{split}.json").write_text(json.dumps(content), encoding="utf-8")
    return task.model_dump(mode="json") | {"folder": str(beir.resolve()), "peer_folder": str(folder)}
