"""Text → its words: between spaces, and in scripts that put none between words, pairs of neighbouring characters."""

import re
from collections.abc import Sequence

UNSPACED = (
    r"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"  # Thai, Lao, Burmese, Khmer
    r"\u3005-\u3007\u3041-\u309f\u30a1-\u30fa\u30fc-\u30ff\u31f0-\u31ff\uff66-\uff9f"  # Hiragana, Katakana
    r"\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"  # Han
)
"""Characters of such scripts, as a regular expression has them between brackets."""
PIECES = re.compile(rf"([{UNSPACED}]{{1,2}}|[^\s{UNSPACED}]+)(\s?)")
SEARCHED = re.compile(rf"([{UNSPACED}]+)|([^\W{UNSPACED}]{{2,}})")


def find_words(text: str) -> list[str]:
    """The words of a text in its order, each with a blank where one follows: `BERT 模型は` → `BERT␣`, `模型`, `は`."""
    return [piece[1] + (" " if piece[2] else "") for piece in PIECES.finditer(text)]


def join_words(words: Sequence[str]) -> str:
    """The text of neighbouring words of `find_words`."""
    return "".join(words).rstrip()


def cut_words(words: Sequence[str], num_words: int) -> list[list[str]]:
    """Passages of so many words, the last one of what is left."""
    return [list(words[begin : begin + num_words]) for begin in range(0, len(words), num_words)]


def searched_words(text: str) -> list[str]:
    """What word search looks for: lower-cased words of two letters and more, and of scripts without spaces all pairs of
    neighbours, as Lucene's CJKAnalyzer has them: `BERT模型は` → `bert`, `模型`, `型は`."""
    words = []
    for found in SEARCHED.finditer(text.lower()):
        run, word = found.groups()
        if run:
            words += [run[at : at + 2] for at in range(max(1, len(run) - 1))]
        else:
            words.append(word)
    return words
