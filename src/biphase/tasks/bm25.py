"""BM25: the words of texts → an index, in memory or on disk → the best documents of each query, alone or fused with
another ranking.

Words are lower-cased, in Unicode's form NFKC; in scripts without spaces, a word is a pair of characters. For a known
language, stop words are left out, and words become stems. bm25s computes the scores.

Letters: Q queries, N documents.
"""

import re
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
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
SMALL_LETTERS = {"tr": str.maketrans("Iİ", "ıi")}
"""The small letters that capitals have in a language, where Unicode's are others."""
FUSED_PASSAGES = 100
"""The number of nearest passages that embeddings score where rankings are fused; the last of them gets 0."""
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
    Snowball, stop words from bm25s; a language that neither knows gets `searched_words`. Turkish stems have i for ı, so
    that `ip` finds `IP`, whose small form in Turkish is `ıp`."""
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

    def find_turkish(text: str) -> list[str]:
        lowered = unicodedata.normalize("NFC", text).translate(SMALL_LETTERS["tr"])
        return [word.replace("ı", "i") for word in find(lowered)]

    return find_turkish if language == "tr" else find


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
    masked = 1 if is_searched_N is None else is_searched_N
    return [find_best(scores_N * masked, top) for scores_N in score_documents(retriever, queries, find_words)]


def score_documents(retriever: Any, queries: Sequence[str], find_words: FindWords) -> Iterator[np.ndarray]:
    """Yield the scores of all documents for each query, [N]: 0 for those that share no word; [1], of a 0, for an index
    without words."""
    for query in queries:
        words = [] if retriever is None else [word for word in find_words(query) if word in retriever.vocab_dict]
        num_documents = 1 if retriever is None else retriever.scores["num_docs"]
        yield retriever.get_scores(words) if words else np.zeros(num_documents, dtype=np.float32)


def find_best(scores_N: np.ndarray, top: int) -> list[Hit]:
    """Find the `top` documents with the highest scores above 0, best first, equal ones by their index."""
    rows = np.flatnonzero(scores_N > 0)
    if len(rows) > top:  # all that may be among them, with all equals of the last
        rows = rows[scores_N[rows] >= np.partition(scores_N[rows], -top)[-top]]
    best = rows[np.argsort(-scores_N[rows], kind="stable")][:top]
    return list(zip(best.tolist(), scores_N[best].tolist(), strict=True))


def fuse_with_words(
    words: Any,
    queries: Sequence[str],
    nearest_Q: Sequence[Sequence[Hit]],
    top: int,
    find_words: FindWords,
    is_searched_N: np.ndarray | None = None,
) -> list[list[Hit]]:
    """Fuse BM25 with rankings by embeddings, which have `top` and at least `FUSED_PASSAGES` hits where there are as
    many documents. A document's score depends on neither `top` nor the other queries: BM25 scores all documents, and
    embeddings the `FUSED_PASSAGES` nearest ones; farther ones get 0, and are ordered as they are.

    Args:
        words: BM25's index; None if no document has a word.
        find_words: the function that built it.
        is_searched_N: whether to search each document; by default, search all.
    """
    fused_Q, masked = [], 1 if is_searched_N is None else is_searched_N
    for scores_N, nearest in zip(score_documents(words, queries, find_words), nearest_Q, strict=True):
        by_words, scored = find_best(scores_N * masked, top), nearest[:FUSED_PASSAGES]
        found = {row for row, _ in by_words}
        rest = [row for row, _ in scored if words is not None and row not in found]
        others = [(row, float(scores_N[row])) for row in rest if scores_N[row] > 0]
        fused = fuse_rankings([*by_words, *others], scored, lowest=0.0)
        known = {row for row, _ in fused}
        fused_Q.append([*fused, *((row, 0.0) for row, _ in nearest if row not in known)][:top])
    return fused_Q


def fuse_rankings(first: Sequence[Hit], second: Sequence[Hit], lowest: float | None = None) -> list[Hit]:
    """Fuse two rankings of one query: each contributes half of a document's score, scaled to 0..1 (a convex
    combination, Bruch et al. 2023, arXiv:2210.11934).

    Each ranking maps its worst score to 0 and its best to 1. The best documents come first, equal ones by their index.

    Args:
        lowest: the score that the first ranking maps to 0 instead of its worst; 0 for BM25, the score of a document
            without any word of the query.
    """
    fused = defaultdict[int, float](float)
    for ranking, bottom in ((first, lowest), (second, None)):
        for document, score in ranking:
            worst = ranking[-1][1] if bottom is None else bottom
            best = ranking[0][1]
            fused[document] += 0.5 * ((score - worst) / (best - worst) if best > worst else 1.0)
    return sorted(fused.items(), key=lambda hit: (-hit[1], hit[0]))
