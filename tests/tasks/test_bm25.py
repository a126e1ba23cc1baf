"""Word search: words between spaces, and where a script puts none, pairs of characters."""

from typing import Any

import pytest

from biphase.tasks.bm25 import index_bm25, query_bm25, searched_words, stems_of

CHINESE = "永和九年，歲在癸丑，暮春之初，會於會稽山陰之蘭亭。"


def test_words_between_spaces_are_those_of_bm25s() -> None:
    bm25s = pytest.importorskip("bm25s")
    texts = ["The cat's naïve co-op; it's a I x_1 foo.bar 3.5", "한국어 русский état", "!!!", ""]
    tokens = bm25s.tokenize(texts, stopwords=None, return_ids=False, show_progress=False)
    assert [searched_words(text) for text in texts] == tokens


def test_marks_are_parts_of_words_however_they_are_written() -> None:
    """`\\w`, and so bm25s, cuts words at the vowels of Hindi, and at an accent that is a character of its own."""
    assert searched_words("हिन्दी में খোজ తెలుగు மொழி") == ["हिन्दी", "में", "খোজ", "తెలుగు", "மொழி"]
    assert searched_words("gro\u0308\u00dfe ＡＢＣ ｶﾀ") == ["größe", "abc", "カタ"]
    assert searched_words("كِتَاب") == searched_words("كتاب") == ["كتاب"]
    assert searched_words("שָׁלוֹם") == searched_words("שלום") == ["שלום"]


def test_a_word_is_found_whatever_its_case_and_its_line_breaks() -> None:
    """`İ` has a small form of two characters in Python; a soft hyphen or a zero-width space divides no word."""
    assert searched_words("İstanbul İÇİN") == searched_words("I\u0307stanbul i\u00e7in") == ["istanbul", "için"]
    for sign in "\u00ad\u200b\u2060\ufeff":
        assert searched_words(f"{sign}Donau{sign}dampf{sign}schiff") == ["donaudampfschiff"]
        assert searched_words(f"永{sign}和") == ["永和"]
    pytest.importorskip("Stemmer")
    assert stems_of("tr")("İçin İstanbul") == stems_of("tr")("istanbul")
    for capitals, small in (("AÇIKLAMA IŞIK", "açıklama ışık"), ("KULLANIM", "kullanım"), ("I\u0307SIM", "isım")):
        assert stems_of("tr")(capitals) == stems_of("tr")(small)
    assert stems_of("tr")("IP POSIX") == ["ip", "posix"] and stems_of("de")("Igel") == ["igel"]


def test_without_spaces_neighbours_are_words() -> None:
    assert searched_words("BERT模型は、猫") == ["bert", "模型", "型は", "猫"]
    assert searched_words("กินข้าว") == ["กิ", "ิน", "นข", "ข้", "้า", "าว"]


def test_bm25_finds_a_part_of_a_text_without_spaces() -> None:
    pytest.importorskip("bm25s")
    [found] = query_bm25(index_bm25(["天下大勢，分久必合，合久必分。", CHINESE]), ["會稽山陰"], 2)
    assert [number for number, _ in found] == [1]


def test_equal_scores_have_the_order_of_the_documents() -> None:
    """Whatever number is asked for: a few hits are the first of many."""
    pytest.importorskip("bm25s")
    index = index_bm25([("a wing", "a wing flow", "flow", "jet")[n % 4] for n in range(400)])
    [every] = query_bm25(index, ["flow wing"], 400)
    assert len(every) == 300 and every == sorted(every, key=lambda hit: (-hit[1], hit[0]))
    for top in (1, 5, 150):
        assert query_bm25(index, ["flow wing"], top) == [every[:top]]


def test_bm25_finds_nothing_where_there_is_no_word() -> None:
    pytest.importorskip("bm25s")
    assert query_bm25(index_bm25(["a b", "!!!"]), ["a", "word"], 5) == [[], []]


def test_bm25s_is_not_asked_for_what_has_no_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """With numba, it fails there. The answers have the order of the questions."""
    pytest.importorskip("bm25s")
    index = index_bm25(["a wing", "a flow"])
    get_scores = index.get_scores

    def refuse_empty(words: list[str]) -> Any:
        assert words and all(word in index.vocab_dict for word in words)
        return get_scores(words)

    monkeypatch.setattr(index, "get_scores", refuse_empty)
    found = query_bm25(index, ["?", "flow", "unknown", "wing", ""], 2)
    assert [[row for row, _ in hits] for hits in found] == [[], [1], [], [0], []]


@pytest.mark.parametrize(
    ("language", "text"),
    [
        ("en", "The wings were studied, and the flows of them are studies"),
        ("fr", "Comment supprimer les fichiers ? On supprime le fichier."),
        ("de", "Die Häuser und das Haus der Katzen"),
    ],
)
def test_stems_are_those_of_bm25s(language: str, text: str) -> None:
    bm25s, stemmer = pytest.importorskip("bm25s"), pytest.importorskip("Stemmer")
    [theirs] = bm25s.tokenize(
        text, stopwords=language, stemmer=stemmer.Stemmer(language), return_ids=False, show_progress=False
    )
    assert stems_of(language)(text) == theirs


def test_words_of_an_unknown_language_stay_as_they_are() -> None:
    pytest.importorskip("Stemmer")
    assert stems_of("several") is stems_of("th") is searched_words
    assert stems_of("zh")("的永和") == ["的永", "永和"]
    assert stems_of("nb")("husene") == stems_of("no")("husene") == ["hus"]


def test_only_documents_that_may_be_found_are() -> None:
    pytest.importorskip("bm25s")
    np, index = pytest.importorskip("numpy"), index_bm25(["a wing", "a wing flow", "flow"])
    [found] = query_bm25(index, ["wing flow"], 3, is_searched_N=np.array([True, False, True]))
    assert {number for number, _ in found} == {0, 2}
