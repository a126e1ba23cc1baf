"""Make src/biphase/bundled/tasks/*.jsonl.zst from the developers' data (../shared/data; not needed to use biphase).

Usage: python scripts/bundle_tasks.py [DATA_FOLDER]. The same input gives the same bytes. What is changed is what
LICENSES.md beside the files says.
"""

import itertools
import json
import sys
from pathlib import Path

import numpy as np
import zstandard

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "src" / "biphase" / "bundled" / "tasks"
VALIDATION_PREMISES, TEST_PREMISES, SEED = 333, 1000, 42
LIMIT_BYTES = 1_500_000


def main() -> None:
    data = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT.parent / "shared" / "data"
    needed = ["snli/validation.jsonl", "snli/test.jsonl"]
    needed += [
        f"{task}/{split}.jsonl" for task in ("uner_en_ewt", "wnut17") for split in ("train", "validation", "test")
    ]
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
    total = sum(path.stat().st_size for path in TARGET.glob("*.zst"))
    assert total <= LIMIT_BYTES, f"{total:,} bytes are more than the {LIMIT_BYTES:,} that the package has room for"
    print(f"{total:,} bytes in {TARGET}")


def split_by_premise(rows: list[dict], num_premises: int) -> tuple[list[dict], list[dict]]:
    """The pairs of `num_premises` premises drawn with the seed, and the other pairs; both in file order."""
    groups = [list(group) for _, group in itertools.groupby(rows, key=lambda row: row["premise"])]
    assert len(groups) == len({group[0]["premise"] for group in groups}), "a premise comes back later in the file"
    drawn = set(np.random.default_rng(SEED).permutation(len(groups))[:num_premises].tolist())
    parts = ([], [])
    for number, group in enumerate(groups):
        parts[number not in drawn].extend(group)
    return parts


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write(name: str, rows: list[dict]) -> None:
    text = "".join(json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n" for row in rows)
    data = zstandard.ZstdCompressor(level=22).compress(text.encode())
    (TARGET / f"{name}.jsonl.zst").write_bytes(data)
    print(f"{name}: {len(rows):,} rows, {len(data):,} bytes")


if __name__ == "__main__":
    main()
