from pathlib import Path
from typing import Any

import pytest

from biphase.api.own_task import write_task
from biphase.errors import InputError
from biphase.tasks.examples import TaggedWords, load_examples
from biphase.tasks.sources import find_source
from biphase.tasks.spec import find_task

TEXT = "Marie Curie, née à Varsovie, vécut à Paris."
SPANS = [(0, 11, "person"), (19, 27, "place"), (37, 42, "place")]
FORMS: dict[str, Any] = {
    "label": [[*span] for span in SPANS],  # Doccano
    "labels": [{"start_offset": start, "end_offset": end, "label": name} for start, end, name in SPANS],  # Doccano
    "spans": [{"start": start, "end": end, "label": name} for start, end, name in SPANS],  # Prodigy, predict
    "entities": [{"value": {"start": start, "end": end, "labels": [name]}} for start, end, name in SPANS],
}


def read(rows: list[dict[str, Any]], folder: Path) -> tuple[TaggedWords, ...]:
    file, data = write_task(rows, folder, "own")
    task = find_task(file)
    assert task.classes == ("O", "B-person", "I-person", "B-place", "I-place")
    return load_examples(find_source(task, data), judged_only=False).train


@pytest.mark.parametrize("column", FORMS)
def test_spans_of_characters_are_the_entities_of_words(column: str, tmp_path: Path) -> None:
    rows = [{"text": f"{TEXT} {'x' * number}", column: FORMS[column]} for number in range(1, 21)]
    rows.append({"text": "Rien ici", column: []})
    example = next(example for example in read(rows, tmp_path) if example.words[0] == "Marie")
    assert example.words[:6] == ("Marie", "Curie", ",", "née", "à", "Varsovie")
    assert example.tags[:12] == (1, 2, 0, 0, 0, 3, 0, 0, 0, 3, 0, 0)


@pytest.mark.parametrize(
    ("span", "message"),
    [
        ([5, 999, "place"], "the span from 5 to 999 is not in its text"),
        ([6, 11, "place"], "two spans share a word at 6"),
    ],
)
def test_spans_that_do_not_fit_are_refused(span: list[Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        read([{"text": TEXT, "label": [*FORMS["label"], span]}] * 9, tmp_path)
