"""Peer of `growth.py`: `tokenizers` itself, from JSON lines to a file of token ids.

python benchmarks/peers/tokenizers_to_disk.py TOKENIZER OUT FILE...      # prints the number of tokens as JSON
"""

import json
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

BATCH_TEXTS = 1000


def read_texts(paths: list[str]) -> Iterator[str]:
    for path in paths:
        with open(path, encoding="utf-8") as file:
            for line in file:
                yield json.loads(line)["text"]


def write_ids(tokenizer: Path, out: Path, paths: list[str]) -> int:
    """Encode and write a batch of texts at a time; return the number of tokens."""
    backend = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    out.mkdir(parents=True)
    texts, num_tokens = read_texts(paths), 0
    with (out / "ids").open("wb") as file:
        while batch := list(islice(texts, BATCH_TEXTS)):
            for encoding in backend.encode_batch_fast(batch, add_special_tokens=False):
                ids = np.array(encoding.ids, dtype=np.uint32)
                num_tokens += len(ids)
                file.write(ids.data)
    return num_tokens


if __name__ == "__main__":
    print(json.dumps({"tokens": write_ids(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])}))
