"""Peer of `growth.py`: `datasets.map` with the fast tokenizer of transformers, from JSON lines to Arrow files of ids.

python benchmarks/peers/datasets_map.py TOKENIZER OUT PROCESSES FILE...      # prints the number of tokens as JSON
"""

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
from datasets import load_dataset
from transformers import AutoTokenizer


def map_texts(tokenizer: Path, out: Path, processes: int, paths: list[str]) -> int:
    """Encode the texts as transformers' examples for language models do; return the number of tokens."""
    fast: Any = AutoTokenizer.from_pretrained(tokenizer)
    rows = load_dataset("json", data_files=paths, split="train", cache_dir=str(out))

    def encode(batch: dict[str, list[str]]) -> dict[str, Any]:
        return {"input_ids": fast(batch["text"], add_special_tokens=False, return_attention_mask=False)["input_ids"]}

    encoded = rows.map(encode, batched=True, num_proc=processes, remove_columns=rows.column_names)
    return sum(pc.sum(pc.list_value_length(chunk)).as_py() for chunk in encoded.data["input_ids"].chunks)


if __name__ == "__main__":
    tokens = map_texts(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
    print(json.dumps({"tokens": tokens}))
