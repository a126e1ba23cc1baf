"""Make src/biphase/bundled/tasks/*.jsonl.zst from the developers' data (../shared/data; not needed to use biphase).

Usage: python scripts/bundle_tasks.py [DATA_FOLDER]. The same input gives the same bytes. What is changed is what
LICENSES.md beside the files says.
"""

import io
import itertools
import json
import re
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
import zstandard

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "src" / "biphase" / "bundled" / "tasks"
VALIDATION_PREMISES, TEST_PREMISES, SEED = 333, 1000, 42
GENRES = {
    "wiki2014": "encyclopedia",
    "wiki2018": "encyclopedia",
    "books_classic": "novel",
    "books_eltec": "novel",
    "us_gov": "government",
    "acl_abstracts": "abstract",
    "plos": "article",
}
"""The kind of text that each source of the corpus is."""
GENRE_FILES = {"train": ("train-01", 600), "validation": ("train-02", 100), "test": ("train-03", 250)}
"""For each split: a part of the corpus that the bundled text is not from, and sentences per genre."""
LIMIT_BYTES = 1_500_000


def main() -> None:
    data = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT.parent / "shared" / "data"
    needed = ["snli/validation.jsonl", "snli/test.jsonl"]
    needed += [
        f"{task}/{split}.jsonl" for task in ("uner_en_ewt", "wnut17") for split in ("train", "validation", "test")
    ]
    needed += [f"corpus/{part}.jsonl.zst" for part, _ in GENRE_FILES.values()]
    missing = [name for name in needed if not (data / name).is_file()]
    if missing:
        sys.exit(f"{data} lacks {', '.join(missing)}; the bundled files stay as they are")
    validation, train = split_by_premise(read(data / "snli" / "validation.jsonl"), VALIDATION_PREMISES)
    write("snli-train", train)
    write("snli-validation", validation)
    write("snli-test", split_by_premise(read(data / "snli" / "test.jsonl"), TEST_PREMISES)[0])
    for task in ("uner_en_ewt", "wnut17"):
        for split in ("train", "validation", "test"):
            write(f"{task}-{split}", read(data / task / f"{split}.jsonl"))
    for split, (part, per_genre) in GENRE_FILES.items():
        write(f"genre-{split}", genre_sentences(data / "corpus" / f"{part}.jsonl.zst", per_genre))
    total = sum(path.stat().st_size for path in TARGET.glob("*.zst"))
    assert total <= LIMIT_BYTES, f"{total:,} bytes are more than the {LIMIT_BYTES:,} that the package has room for"
    print(f"{total:,} bytes in {TARGET}")


def split_by_premise(rows: list[dict], num_premises: int) -> tuple[list[dict], list[dict]]:
    """The pairs of `num_premises` premises drawn with the seed, and the other pairs; both in file order."""
    groups = [list(group) for _, group in itertools.groupby(rows, key=lambda row: row["premise"])]
    assert len(groups) == len({group[0]["premise"] for group in groups}), "a premise comes back later in the file"
    drawn = set(np.random.default_rng(SEED).permutation(len(groups))[:num_premises].tolist())
    parts: tuple[list[dict], list[dict]] = ([], [])
    for number, group in enumerate(groups):
        parts[number not in drawn].extend(group)
    return parts


def genre_sentences(path: Path, per_genre: int) -> list[dict]:
    """As many sentences of each genre, each from the middle of a document, in an order drawn with the seed."""
    rng = np.random.default_rng(SEED)
    found: dict[str, list[dict]] = defaultdict(list)
    with open(path, "rb") as file:
        for line in io.TextIOWrapper(zstandard.ZstdDecompressor().stream_reader(file), encoding="utf-8"):
            document = json.loads(line)
            genre = GENRES.get(document["source"])
            sentences = re.split(r"(?<=[.!?])\s+", " ".join(document["text"].split()))[2:-2]
            fitting = [sentence for sentence in sentences if 60 <= len(sentence) <= 220 and sentence[0].isupper()]
            if genre and fitting:
                drawn = rng.permutation(len(fitting))[: 40 if genre in ("article", "novel") else 3]
                found[genre] += [{"id": document["id"], "text": fitting[i], "label": genre} for i in drawn]
    rows = [rows[i] for rows in found.values() for i in rng.permutation(len(rows))[:per_genre]]
    assert len(rows) == per_genre * len(set(GENRES.values())), {genre: len(rows) for genre, rows in found.items()}
    return [rows[i] for i in rng.permutation(len(rows))]


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write(name: str, rows: list[dict]) -> None:
    text = "".join(json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n" for row in rows)
    data = zstandard.ZstdCompressor(level=22).compress(text.encode())
    (TARGET / f"{name}.jsonl.zst").write_bytes(data)
    print(f"{name}: {len(rows):,} rows, {len(data):,} bytes")


if __name__ == "__main__":
    main()
