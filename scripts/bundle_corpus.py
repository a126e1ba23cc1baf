"""Make `src/biphase/bundled/corpus/`: a few MB of the development corpus, for `biphase demo` and the tests.

Needs ../shared/data/corpus (not part of the repository); without it the script says so and changes nothing.
"""

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import zstandard

REPOSITORY = Path(__file__).resolve().parent.parent
SOURCE = REPOSITORY.parent / "shared/data/corpus"
TARGET = REPOSITORY / "src/biphase/bundled/corpus"
MEGABYTES = {
    "wiki2014": 3.2,
    "wiki2018": 0.8,
    "books_classic": 1.2,
    "books_eltec": 0.6,
    "dialogues_sgd": 0.4,
    "us_gov": 0.5,
}
"""Text of each source. All of them may be redistributed; TARGET/LICENSES.md says under what terms."""
VALIDATION_SHARE = 0.04


def documents(path: Path) -> Iterator[dict]:
    with open(path, "rb") as file:
        for line in io.TextIOWrapper(zstandard.ZstdDecompressor().stream_reader(file), encoding="utf-8"):
            yield json.loads(line)


def choose(path: Path, share: float) -> list[dict[str, str]]:
    """The first documents of each source, up to `share` of its megabytes; the longest are left to the full corpus."""
    left = {source: megabytes * 1e6 * share for source, megabytes in MEGABYTES.items()}
    chosen = []
    for document in documents(path):
        size = len(document["text"].encode())
        if size <= min(left.get(document["source"], 0.0), 24_000):
            left[document["source"]] -= size
            chosen.append(document)
    return chosen


def write(path: Path, chosen: list[dict[str, str]]) -> None:
    text = "".join(json.dumps(document, ensure_ascii=False) + "\n" for document in chosen)
    path.write_bytes(zstandard.ZstdCompressor(level=19).compress(text.encode()))
    print(
        f"{path.relative_to(REPOSITORY)}: {len(chosen)} documents, {len(text) / 1e6:.1f} MB of JSON, "
        f"{path.stat().st_size:,} bytes"
    )


def main() -> None:
    if not SOURCE.is_dir():
        sys.exit(f"{SOURCE} is not here: the bundled corpus stays as it is")
    TARGET.mkdir(parents=True, exist_ok=True)
    write(TARGET / "train.jsonl.zst", choose(SOURCE / "train-00.jsonl.zst", 1.0))
    write(TARGET / "validation.jsonl.zst", choose(SOURCE / "validation.jsonl.zst", VALIDATION_SHARE))


if __name__ == "__main__":
    main()
