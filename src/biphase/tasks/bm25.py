"""BM25: the words of texts → an index, in memory or on disk → the best documents of each query.

Words are lower-cased, in Unicode's form NFKC; in scripts without spaces, a word is a pair of characters. For a known
language, stop words are left out, and words become stems. bm25s computes the scores.
"""

import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from biphase.corpus.text import MARKS, UNSPACED
from biphase.errors import InputError

SEARCHED = re.compile(rf"([{UNSPACED}]+)|([^\W{UNSPACED}](?:[^\W{UNSPACED}]|[{MARKS}])+)")
POINTS = dict.fromkeys([*range(0x591, 0x5BE), *range(0x5BF, 0x5C8), *range(0x64B, 0x660), 0x670])
"""The vowels of Hebrew and Arabic, which most texts leave out: no part of a word."""
INVISIBLE = dict.fromkeys([0xAD, 0x200B, 0x2060, 0xFEFF])
"""Places where a line may or may not break, such as a soft hyphen: no part of a word, and no end of one."""
FindWords = Callable[[str], list[str]]
Hit = tuple[int, float]
"""The index of a document, and its score."""


def searched_words(text: str) -> list[str]:
    """List the lower-cased words of two or more characters and, in scripts without spaces, all pairs of neighbouring
    characters, as Lucene's CJKAnalyzer does: `BERT模型は` → `bert`, `模型`, `型は`."""
    words = []
    lowered = unicodedata.normalize("NFKC", text).lower().replace("i\u0307", "i")  # Python's small form of `İ`
    for match in SEARCHED.finditer(lowered.translate(POINTS | INVISIBLE)):
        run, word = match.groups()
        if run:
            words += [run[at : at + 2] for at in range(max(1, len(run) - 1))]
        else:
            words.append(word)
    return words


def stems_of(language: str) -> FindWords:
    """Return a function that finds the stems of a text in a language (ISO 639) and drops stop words. Stems come from
    Snowball, stop words from bm25s; a language that neither knows gets `searched_words`."""
    from Stemmer import Stemmer

    language = {"nb": "no", "nn": "no"}.get(language, language)
    stop_words, stem = frozenset[str](), None
    with suppress(ValueError):
        stop_words = frozenset(load_bm25s().tokenization.Tokenizer(stopwords=language).stopwords)
    with suppress(KeyError):
        stem = Stemmer(language).stemWords
    if not stop_words and stem is None:
        return searched_words

    def find(text: str) -> list[str]:
        words = [word for word in searched_words(text) if word not in stop_words]
        return stem(words) if stem is not None else words

    return find


def check_language(language: str | None) -> None:
    """Raise `InputError` for a language with neither stop words nor stems here; `none` means no language."""
    if language not in (None, "none") and stems_of(language) is searched_words:
        raise InputError(f"language '{language}' has neither stems nor stop words: give one such as en, or none")


def index_bm25(documents: Iterable[str], find_words: FindWords = searched_words) -> Any:
    """Build an index for bm25s; None if no document has a word."""
    bm25s = load_bm25s()
    vocab: dict[str, int] = {}
    ids = [[vocab.setdefault(word, len(vocab)) for word in find_words(text)] for text in documents]
    if not vocab:
        return None
    retriever = bm25s.BM25()
    retriever.index((ids, vocab), show_progress=False)
    return retriever


def open_bm25(folder: Path) -> Any:
    """Map a saved index into memory; None if there is no such folder."""
    settings = {"backend": "auto"}  # another machine may have written it with another backend
    return load_bm25s().BM25.load(folder, mmap=True, override_params=settings) if folder.exists() else None


def load_bm25s() -> Any:
    try:
        import bm25s
    except ModuleNotFoundError:
        raise InputError("BM25 needs bm25s: pip install 'biphase[embeddings]'") from None
    return bm25s


def query_bm25(
    retriever: Any,
    queries: Sequence[str],
    top: int,
    find_words: FindWords = searched_words,
    is_searched_N: np.ndarray | None = None,
) -> list[list[Hit]]:
    """Find the best documents of each query, best first, without those that share no word.

    Args:
        find_words: the function that built the index.
        is_searched_N: whether to search each document; by default, search all.
    """
    hits: list[list[Hit]] = [[] for _ in queries]
    vocab = {} if retriever is None else retriever.vocab_dict
    known = [[word for word in find_words(query) if word in vocab] for query in queries]
    asked = [index for index, words in enumerate(known) if words]  # with numba, bm25s takes no query without words
    if asked:
        most = min(top, retriever.scores["num_docs"])
        mask_N = None if is_searched_N is None else is_searched_N.astype(np.float32)
        searching: dict[str, Any] = {"k": most, "show_progress": False, "weight_mask": mask_N}
        found = retriever.retrieve([known[index] for index in asked], **searching)
        for index, documents, scores in zip(asked, *(array.tolist() for array in found), strict=True):
            hits[index] = [hit for hit in zip(documents, scores, strict=True) if hit[1] > 0]
    return hits


def score_some(retriever: Any, query: str, documents: Sequence[int], find_words: FindWords) -> list[Hit]:
    """Score some documents for a query, in the given order, without those that share no word."""
    words = [] if retriever is None else [word for word in find_words(query) if word in retriever.vocab_dict]
    if not words:
        return []
    scores_N = retriever.get_scores(words)
    return [(document, float(scores_N[document])) for document in documents if scores_N[document] > 0]
