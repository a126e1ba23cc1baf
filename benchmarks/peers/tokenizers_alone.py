"""Peer of `tokenization.py`: `tokenizers` itself, over texts that are in memory already.

python benchmarks/peers/tokenizers_alone.py TOKENIZER SOURCE...      # prints what it measured as JSON
"""

import json
import sys
import time
from pathlib import Path

BATCH_CHARS = 2_000_000


def run_tokenizers(sources: list[str], tokenizer: Path) -> dict[str, float]:
    """Loading and encoding. Reading the texts comes first, and is on no clock."""
    from biphase.corpus.text import find_text_sources, read_documents

    texts = [document.text for source in find_text_sources(sources) for document in read_documents(source)]
    wall, cpu = time.perf_counter(), time.process_time()
    from tokenizers import Tokenizer

    backend = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    start = {"start_seconds": time.perf_counter() - wall, "start_cpu_seconds": time.process_time() - cpu}
    batch: list[str] = []
    held = 0
    for text in texts:
        batch.append(text)
        held += len(text)
        if held >= BATCH_CHARS:
            backend.encode_batch_fast(batch, add_special_tokens=False)
            batch, held = [], 0
    backend.encode_batch_fast(batch, add_special_tokens=False)
    whole = {"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}
    return whole | start | {"text_mb": sum(len(text.encode()) for text in texts) / 1e6}


if __name__ == "__main__":
    print(json.dumps(run_tokenizers(sys.argv[2:], Path(sys.argv[1]))))
