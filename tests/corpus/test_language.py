"""Texts → their language: one, several, program code, or none that is known."""

from pathlib import Path

import pytest

import biphase
from biphase.corpus.text import find_language

GERMAN = "Der alte Mann sucht am Morgen den Brief aus der Stadt, den seine Schwester vergessen hat. "
ENGLISH = "The old man looks for the letter from the town which his sister has forgotten this morning. "
PROGRAM = Path(biphase.__file__).with_name("files.py").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("texts", "language"),
    [
        ([GERMAN], "de"),
        ([GERMAN * 20, ENGLISH], "de"),
        ([ENGLISH * 25 + GERMAN * 1000], "de"),
        ([ENGLISH * 3] * 9, "en"),
        ([ENGLISH * 20, GERMAN * 20], "several"),
        ([PROGRAM], "code"),
        (["ACGT" * 500], "unknown"),
        ([], "unknown"),
    ],
)
def test_a_language_is_that_of_most_of_the_text(texts: list[str], language: str) -> None:
    assert find_language(texts) == language
