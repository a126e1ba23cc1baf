"""Tags as spans of characters, as annotation tools write them: rows as files have them, and the words that are read."""

import json
import re
import time
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from biphase.cli.init import init_task
from biphase.corpus.rows import rows_of_file
from biphase.errors import InputError
from biphase.files import content_hash
from biphase.tasks.examples import TaggedWords, load_examples, read_spans_of_characters, tag_spans
from biphase.tasks.own import describe_data, write_task
from biphase.tasks.sources import definition, find_source, list_readings
from biphase.tasks.spec import TASK_SPLITS, FileLayout, Hub, Splits, Task, find_task

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


def found_in(text: str, *spans: Any) -> list[str]:
    """The words with tags of a row."""
    words, tags = tag_spans("a.json: row 3", text, read_spans_of_characters("a.json: row 3", [*spans]) or ())
    return [f"{word}/{tag}" for word, tag in zip(words, tags, strict=True) if tag != "O"]


def test_words_of_scripts_without_spaces_and_letters_with_marks() -> None:
    """A span covers its own characters, where no blank ends a word, and marks stay with their letters."""
    assert found_in("我叫李明住在北京。", [2, 4, "PER"], [6, 8, "LOC"]) == [
        "李/B-PER",
        "明/I-PER",
        "北/B-LOC",
        "京/I-LOC",
    ]
    assert found_in("नाम राहुल है", [4, 9, "PER"]) == ["राहुल/B-PER"]
    decomposed = unicodedata.normalize("NFD", "Béla Kroměříž")
    assert found_in(decomposed, [0, len(decomposed), "X"]) == [
        f"{word}/{tag}" for word, tag in zip(decomposed.split(), ("B-X", "I-X"), strict=True)
    ]
    assert found_in("GPT模型 3.5km!", [0, 12, "X"])[:3] == ["GPT/B-X", "模/I-X", "型/I-X"]


def test_invisible_signs_end_no_word() -> None:
    """A tokenizer that drops them would leave a word of its own without a token, within an entity."""
    for text, count in {
        "علی\u200cاکبر آمد": 1,
        "ශ\u0dca\u200dර\u0dd3 ලංකාව": 2,
        "Bundes\u00adrepublik!": 2,
        "\u200fعلی\u200f آمد": 2,
        "a\u200bb \U0001f469\u200d\U0001f467": 4,  # but the zero-width space is one
    }.items():
        end = text.index(" ") if count == 1 else len(text)
        words = found_in(text, [0, end, "X"])
        tags = [word.rpartition("/")[2] for word in words]
        assert tags == ["B-X", *["I-X"] * (count - 1)], text
        assert "".join(word.rpartition("/")[0] for word in words) == re.sub(r"[ \u200b]", "", text[:end])


def test_data_that_may_be_texts_with_spans_has_another_hash(tmp_path: Path) -> None:
    """Earlier versions divided words at invisible signs, also of the Hub's rows. Files of columns, and the data of
    biphase's own tasks, are read as ever. A broken row is told when rows are read."""
    keys = {"family": "token_classification", "metric": "f1", "classes": ["O", "B-x"]}
    for name in ("a.conll", "a.jsonl"):
        (tmp_path / name).write_text("{broken")
    layouts = {name: FileLayout(train=name) for name in ("a.conll", "a.jsonl")}
    layouts["columns"] = layouts["a.jsonl"].model_copy(update={"format": "columns"})
    hub = Hub(id="a/b", revision="0" * 40, splits=Splits(train="train"))
    is_other = {}
    for name, form in {**layouts, "hub": hub, "own": layouts["a.jsonl"]}.items():
        forms: dict[str, Any] = {"hub": form} if isinstance(form, Hub) else {"files": (form,)}
        task = Task.model_validate({"name": "wnut17" if name == "own" else "mine"} | keys | forms)
        source = find_source(task, None if isinstance(form, Hub) else tmp_path)
        layout = form.model_dump(mode="json", exclude=set() if name == "hub" else {*TASK_SPLITS, "corpus", "queries"})
        before = [definition(task), layout] + [source.hashes] * (name != "hub")
        is_other[name] = source.hash != content_hash(before)
    assert is_other == {"a.conll": False, "a.jsonl": True, "columns": False, "hub": True, "own": False}
    tags = ("AUX", "sent_id", "text")  # the keys of comments, which were read as tags
    tagged = task.model_copy(update={"name": "mine", "classes": tags})
    told = {name: "comments are no words" in list_readings(tagged, layouts[name]) for name in ("a.conll", "a.jsonl")}
    assert told == {"a.conll": True, "a.jsonl": False}
    form = layouts["a.jsonl"]
    asked: Any = {"family": "question_answering", "metric": "f1", "template": "{question} {context}", "files": (form,)}
    assert [bool(list_readings(Task(name=name, **asked), form)) for name in ("mine", "squad")] == [True, False]


def span(start: int, end: int, **others: Any) -> dict[str, Any]:
    return {"value": {"start": start, "end": end, "labels": ["PER"]} | others}


def test_a_span_has_the_text_that_it_names(capsys: pytest.CaptureFixture[str]) -> None:
    """Offsets in UTF-16 units, which older versions of Label Studio count, are read as such if the texts prove it."""
    text = "😀😀😀 Anna lives  in\nParis now."
    assert found_in(text, span(4, 8, text="Anna")) == ["Anna/B-PER"]
    assert found_in(text, span(9, 24, text="lives in\\nParis")) == ["lives/B-PER", "in/I-PER", "Paris/I-PER"]
    assert found_in(text, span(4, 8, text="nn")) == ["Anna/B-PER"]  # it completes words, but not their text
    assert "UTF-16" not in capsys.readouterr().err
    assert found_in(text, span(7, 11, text="Anna"), span(22, 27)) == ["Anna/B-PER", "Paris/B-PER"]
    assert found_in(text, span(7, 11, text="Anna")) == ["Anna/B-PER"]
    assert capsys.readouterr().err == "a.json: spans count UTF-16 units (2 for 😀), as their own texts show: read so\n"
    told = r'^a.json: row 3: the span from 7 to 11 has "a li" in its text, not its own "Bert"; correct it, or export'
    for spans in ([span(7, 11, text="Bert")], [span(7, 11, text="Bert"), span(4, 8, text="Anna")]):
        with pytest.raises(InputError, match=told):
            found_in(text, *spans)
    for start, end in ((30, 34), (-40, 4), (8, 4), (4, 10**30)):
        with pytest.raises(InputError, match=f"from {start} to {end} is not in its text of length 29"):
            found_in(text, span(start, end), span(7, 11, text="Anna"))


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ({"value": 5}, "5"),
        ({"value": None}, r"\[null, null, null\]"),
        (span(0, 4, labels={"a": 1}), r"\[0, 4, {"),
        (span(0, 4, labels=["PER", "LOC"]), r'\[0, 4, \["PER", "LOC"\]\]'),
        (span(0, 4, labels=[]), r"\[0, 4, \[\]\]"),
        ([0, 4], r"\[0, 4\]"),
        ([0, 4, "PER", "Anna"], r"\[0, 4, "),
        ([0.0, 4, "PER"], r"\[0\.0, 4, "),
        ([True, 4, "PER"], r"\[true, 4, "),
    ],
)
def test_spans_of_another_shape_are_refused(value: Any, told: str) -> None:
    with pytest.raises(InputError, match=f"^a.json: row 3: {told}.* is not a span's start, end and one label"):
        found_in("Anna", value)


def test_a_label_may_stand_alone() -> None:
    assert found_in("Anna", span(0, 4, labels="PER")) == found_in("Anna", [0, 4, "PER"]) == ["Anna/B-PER"]


def test_many_spans_take_no_time_for_each_word() -> None:
    text, spans = "word " * 100_000, [[5 * index, 5 * index + 4, "PER"] for index in range(100_000)]
    began = time.process_time()
    assert len(found_in(text, *spans)) == 100_000
    assert time.process_time() - began < 20


LABELS = [
    {"value": {"start": start, "end": end, "text": TEXT[start:end], "labels": [name]}} for start, end, name in SPANS
]


@pytest.mark.parametrize("text", ["", " \n", None])
def test_a_text_without_words_is_no_example(
    text: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"text": f"{TEXT} {number}", "label": FORMS["label"]} for number in range(30)]
    rows.append({"text": text, "label": []})
    file, data = write_task(rows, tmp_path, "own")
    with pytest.raises(InputError, match=r"1 row has no text \(the first: .*train.jsonl:31\); .*missing='drop'"):
        load_examples(find_source(find_task(file), data), judged_only=False)
    file, data = write_task(rows, tmp_path, "own", missing="drop")
    read: Any = load_examples(find_source(find_task(file), data), judged_only=False)
    assert (read.left_out, sum(map(len, read.splits.values()))) == (1, 30)
    (tmp_path / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert describe_data(tmp_path / "train.jsonl", None)["missing"] == "drop"
    assert "left out: 1 row has no text" in capsys.readouterr().err


WORDS = [{"text": "Marie", "start": 0, "end": 5, "id": 0}]
HASHES = {"_input_hash": 1, "_task_hash": 2}
FILES: dict[str, tuple[str, Callable[[str, bool], Any]]] = {
    "label studio": (
        ".json",
        lambda text, is_done: {
            "id": 3,
            "data": {"text": text},
            "annotations": [{"was_cancelled": True, "result": []}, *[{"result": LABELS}] * is_done],
        },
    ),
    "prodigy": (
        ".jsonl",
        lambda text, is_done: {
            "text": text,
            "tokens": WORDS,
            "spans": FORMS["spans"],
            **HASHES,
            "answer": "accept" if is_done else "reject",
        },
    ),
    "spacy": (".json", lambda text, is_done: [text, {"entities": FORMS["label"] if is_done else None}]),
    "spacy's docs": (".jsonl", lambda text, is_done: {"text": text, "ents": FORMS["spans"], "tokens": WORDS}),
}


@pytest.mark.parametrize("tool", ["label studio", "prodigy", "spacy's docs", "spacy"])
def test_files_of_annotation_tools_are_read(tool: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What nobody finished or accepted has no label, and is left out where the task says so."""
    ending, make = FILES[tool]
    has_open = tool in ("label studio", "prodigy")
    values = [make(f"{TEXT} {'x' * number}", True) for number in range(1, 21)]
    values += [make("Rien ici", False)] * has_open
    file = tmp_path / f"train{ending}"
    file.write_text(json.dumps(values) if ending == ".json" else "\n".join(map(json.dumps, values)))
    written, data = write_task(file, tmp_path / "tasks", "own", missing="drop")
    examples = load_examples(find_source(find_task(written), data), judged_only=False).train
    assert examples[0].tags[:12] == (1, 2, 0, 0, 0, 3, 0, 0, 0, 3, 0, 0)
    assert ("1 row has no label" in capsys.readouterr().err) == has_open


def test_spans_beside_a_choice_are_read_by_their_family(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = [[{"value": {"choices": ["good"]}}, *LABELS] for _ in range(30)] + [LABELS, []]
    values = [{"data": {"text": f"{TEXT} {n}"}, "annotations": [{"result": part}]} for n, part in enumerate(results)]
    file, out = tmp_path / "train.json", tmp_path / "mine.yaml"
    file.write_text(json.dumps(values))
    with pytest.raises(InputError, match="in 'label' one class"):
        init_task(file, out=out)
    assert "train.json has spans too, in 'entities': `--family token_classification`" in capsys.readouterr().err
    init_task(file, family="token_classification", out=out)
    data: Any = load_examples(find_source(find_task(str(out)), tmp_path), judged_only=False)
    assert sum(bool(sum(one.tags)) for split in data.splits.values() for one in split) == 31


def test_label_studio_has_classes_of_texts_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    choose = {"type": "choices", "value": {"choices": ["good"]}}
    file = tmp_path / "a.json"
    file.write_text(json.dumps([{"id": 1, "data": {"review": "so it is"}, "annotations": [{"result": [choose]}]}]))
    said = file.read_text()
    for text in (said, said.replace('["good"]', '"good"')):
        file.write_text(text)
        assert [row for _, row in rows_of_file(file)] == [
            {"review": "so it is", "id": 1, "label": "good", "entities": []}
        ]
    kinds = [{"result": [choose]}, {"result": [], "ground_truth": True, "was_cancelled": True}]
    truth = {"result": [{"value": {"choices": ["bad"]}}], "ground_truth": True}
    for annotations, label in ((kinds, "good"), ([*kinds, kinds[0]], "good"), ([*kinds, truth], "bad")):
        file.write_text(json.dumps([{"data": {"review": "so"}, "annotations": annotations}]))
        assert [row["label"] for _, row in rows_of_file(file)] == [label]
        told = "a.json: texts with several annotations: 1; of each, the one marked as ground truth is read"
        assert (told in capsys.readouterr().err) == (len(annotations) > 2)
    file.write_text(json.dumps([{"data": {}, "annotations": [5]}]))
    with pytest.raises(InputError, match=r"a.json: row 0: not a row, nor Label Studio's JSON export"):
        list(rows_of_file(file))
