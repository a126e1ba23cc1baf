"""BM25 over texts: their words → an index, in memory or on disk → the best documents of each query.

Words are lower-cased and have no stop words or stems taken out; scripts without spaces are searched by pairs of
characters. bm25s computes the scores.
"""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from biphase.corpus.text import UNSPACED
from biphase.errors import InputError

SEARCHED = re.compile(rf"([{UNSPACED}]+)|([^\W{UNSPACED}]{{2,}})")


def searched_words(text: str) -> list[str]:
    """Return what word search looks for: lower-cased words of two letters and more, and of scripts without spaces
    all pairs of neighbours, as Lucene's CJKAnalyzer has them: `BERT模型は` → `bert`, `模型`, `型は`."""
    words = []
    for match in SEARCHED.finditer(text.lower()):
        run, word = match.groups()
        if run:
            words += [run[at : at + 2] for at in range(max(1, len(run) - 1))]
        else:
            words.append(word)
    return words


def index_bm25(documents: Iterable[str]) -> Any:
    """Build the index that bm25s searches in; None where no document has a word."""
    bm25s = load_bm25s()
    vocab: dict[str, int] = {}
    ids = [[vocab.setdefault(word, len(vocab)) for word in searched_words(text)] for text in documents]
    if not vocab:
        return None
    retriever = bm25s.BM25()
    retriever.index((ids, vocab), show_progress=False)
    return retriever


def open_bm25(folder: Path) -> Any:
    """Map an index that was saved into memory; None where there is no such folder."""
    settings = {"backend": "auto"}  # the machine that wrote it may have had another one
    return load_bm25s().BM25.load(folder, mmap=True, override_params=settings) if folder.exists() else None


def load_bm25s() -> Any:
    try:
        import bm25s
    except ModuleNotFoundError:
        raise InputError("BM25 needs bm25s: pip install 'biphase[embeddings]'") from None
    return bm25s


def query_bm25(retriever: Any, queries: Sequence[str], top: int) -> list[list[tuple[int, float]]]:
    """Find the best documents of each query by their numbers, best first, without those that have no word of it."""
    if retriever is None:
        return [[] for _ in queries]
    words = [searched_words(query) for query in queries]
    most = min(top, retriever.scores["num_docs"])
    numbers_QK, scores_QK = retriever.retrieve(words, k=most, show_progress=False)
    hits = []
    for numbers, scores in zip(numbers_QK.tolist(), scores_QK.tolist(), strict=True):
        hits.append([(number, score) for number, score in zip(numbers, scores, strict=True) if score > 0])
    return hits
