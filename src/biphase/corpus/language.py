"""Texts → the language that they are in, by py3langid (139 languages, no download)."""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

SEVERAL, CODE, UNKNOWN_LANGUAGE = "several", "code", "unknown"
MOSTLY, MUCH = 0.8, 0.3
"""Texts of which so large a share is in one language are in it; and code, with its comments, is a smaller share."""
PIECE, MOST_PIECES = 1000, 20
"""Characters of text that are judged at once, at least, because fewer say little; and about how many pieces of a text
are."""
CODE_SIGNS = frozenset("{}()[]=;<>_+*/\\#&|")
LEAST_SIGNS, LEAST_INDENTED = 0.045, 0.3
"""The shares of signs among characters, and of indented lines, that program code has: prose has a fifth of the first,
tables and lists none of the second."""
LEAST_MARGIN = 0.02
"""By how many nats a character the likeliest language is ahead of the next, in text of any language."""


def find_language(texts: Iterable[str]) -> str:
    """The language of most of the texts as ISO 639 has it, such as `de`; or `code`, `several`, `unknown`."""
    votes, piece = Counter[str](), ""
    for text in (*(part for whole in texts for part in spread(whole)), None):
        piece += "" if text is None else f"{text}\n"
        if len(piece) >= PIECE or (text is None and piece and not votes):
            votes[language_of(piece)] += len(piece)
            piece = ""
    if votes[CODE] > MUCH * votes.total():
        return CODE
    [(language, most)] = votes.most_common(1) or [(UNKNOWN_LANGUAGE, 0)]
    return language if most >= MOSTLY * votes.total() else SEVERAL


def spread(text: Any) -> Iterator[Any]:
    """Pieces of a text, of characters or tokens, up to its end: a book may begin with a licence in another language."""
    for place in range(0, len(text), max(PIECE, len(text) // MOST_PIECES)):
        yield text[place : place + PIECE]


def language_of(text: str) -> str:
    """The language of one piece of text."""
    from py3langid import rank

    lines = [line for line in text.splitlines() if line.strip()]
    letters = "".join(text.split())
    signs = sum(letter in CODE_SIGNS for letter in letters) / max(len(letters), 1)
    indented = sum(line[0] in " \t" for line in lines) / max(len(lines), 1)
    if signs > LEAST_SIGNS and indented > LEAST_INDENTED:
        return CODE
    (language, best), (_, second), *_ = rank(text)
    is_told = language != "zxx" and best - second > LEAST_MARGIN * len(text)  # zxx: no language at all
    return str(language) if is_told else UNKNOWN_LANGUAGE
