import gzip
import json
from collections import Counter
from importlib import resources
from pathlib import Path

import datasets
import pytest
import zstandard

from biphase.errors import InputError
from biphase.finetuning.tasks import (
    TASKS,
    Hub,
    LabelledText,
    Splits,
    TaggedWords,
    Task,
    hold_out,
    load_task,
    read_task,
    template_columns,
)

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="developers' data is not here")

PAIR = {"premise": "A man sleeps.", "hypothesis": "A man is awake.", "label": 2}
TAGGED = {"tokens": ["in", "New", "York"], "ner_tags": ["O", "B-location", "I-location"]}


def folder_of(tmp_path: Path, train: str, name: str = "train.jsonl", rest: dict | None = None) -> Path:
    """A folder whose train file is `train`; the other splits are fine."""
    (tmp_path / name).write_text(train, encoding="utf-8")
    for other in ("validation.jsonl", "test.jsonl"):
        (tmp_path / other).write_text(json.dumps(rest or PAIR), encoding="utf-8")
    return tmp_path


def test_table_is_sound() -> None:
    for name, task in TASKS.items():
        assert name == task.name
        assert len(set(task.labels)) == len(task.labels) >= 2
        assert task.licence and task.citation
        if task.family == "token_classification":
            assert task.labels[0] == "O" and task.metric == "f1"
        else:
            assert template_columns(task.template) and task.metric == "accuracy"


def test_bundled_files_are_small_and_attributed() -> None:
    folder = Path(str(resources.files("biphase"))) / "bundled" / "tasks"
    files = list(folder.glob("*.zst"))
    assert len(files) == 3 * sum(task.bundled for task in TASKS.values())
    assert sum(file.stat().st_size for file in files) < 1_500_000
    notice = (folder / "LICENSES.md").read_text(encoding="utf-8")
    assert all(f"## {name}-" in notice for name, task in TASKS.items() if task.bundled)


def test_snli() -> None:
    data = load_task("snli")
    assert (len(data.train), len(data.validation), len(data.test), data.left_out) == (8858, 984, 2961, 0)
    assert isinstance(data.train[0], LabelledText)
    assert data.train[0].text == (
        "Premise: Two women are embracing while holding to go packages .\n"
        "Hypothesis: The sisters are hugging goodbye while holding to go packages after just eating lunch ."
    )
    assert data.task.labels[data.train[0].label] == "neutral"
    premises = [{example.text.split("\n")[0] for example in split} for split in (data.train, data.validation)]
    assert not premises[0] & premises[1]
    assert max(Counter(example.label for example in data.test).values()) < 0.36 * len(data.test)


@pytest.mark.parametrize(("name", "sizes"), [("uner_en_ewt", (12543, 2001, 2077)), ("wnut17", (3394, 1009, 1287))])
def test_bundled_words(name: str, sizes: tuple[int, ...]) -> None:
    data = load_task(name)
    assert (len(data.train), len(data.validation), len(data.test)) == sizes
    seen = {data.task.labels[tag] for example in data.train for tag in example.tags}
    assert seen == set(data.task.labels)


@needs_shared
def test_bundled_words_are_the_source() -> None:
    assert load_task("uner_en_ewt").fingerprint == load_task("uner_en_ewt", SHARED / "uner_en_ewt").fingerprint


@needs_shared
def test_release_columns_equal_jsonl(tmp_path: Path) -> None:
    for split in ("dev", "test"):
        (tmp_path / f"en_ewt-ud-{split}.iob2").symlink_to(SHARED / "uner_en_ewt" / f"en_ewt-ud-{split}.iob2")
    (tmp_path / "en_ewt-ud-train.iob2").symlink_to(SHARED / "uner_en_ewt" / "en_ewt-ud-dev.iob2")
    released, bundled = load_task("uner_en_ewt", tmp_path), load_task("uner_en_ewt")
    assert released.validation == bundled.validation
    assert released.test == bundled.test


@needs_shared
def test_sst2_splits_as_in_the_paper() -> None:
    data = load_task("sst2", SHARED / "sst2")
    assert (len(data.train), len(data.validation), len(data.test)) == (63981, 3368, 872)
    assert data.test[0] == LabelledText("dev.tsv:2", "one long string of cliches .", 0)


def test_held_out_part_is_that_of_datasets() -> None:
    examples = [LabelledText(str(i), "", 0) for i in range(1013)]
    theirs = datasets.Dataset.from_dict({"id": [e.id for e in examples]}).train_test_split(train_size=0.95, seed=42)
    train, held = hold_out(examples)
    assert [example.id for example in train] == theirs["train"]["id"]
    assert [example.id for example in held] == theirs["test"]["id"]


def test_compressed_files_and_other_orders_of_columns(tmp_path: Path) -> None:
    rows = "".join(json.dumps(row) + "\n" for row in (PAIR, PAIR | {"idx": 7, "label": "neutral"}))
    folder_of(tmp_path, "")
    (tmp_path / "train.jsonl").unlink()
    (tmp_path / "train.jsonl.zst").write_bytes(zstandard.compress(rows.encode()))
    (tmp_path / "validation.jsonl").unlink()
    (tmp_path / "validation.jsonl.gz").write_bytes(gzip.compress(rows.encode()))
    data = load_task("snli", tmp_path)
    assert [example.label for example in data.train] == [2, 1]
    assert [example.id for example in data.train] == ["train.jsonl.zst:1", "7"]
    assert [example.text for example in data.validation] == [example.text for example in data.train]


def test_columns(tmp_path: Path) -> None:
    text = "#\tO\nNew\tB-location\nYork\tI-location\n\n\nhi there\tO\r\n"
    for name in ("wnut17train.conll", "emerging.dev.conll", "emerging.test.annotated"):
        (tmp_path / name).write_text(text)
    assert load_task("wnut17", tmp_path).train == (
        TaggedWords("wnut17train.conll:1", ("#", "New", "York"), (0, 7, 8)),
        TaggedWords("wnut17train.conll:6", ("hi there",), (0,)),
    )


def test_hub(tmp_path: Path) -> None:
    """A data set in a folder stands for one on the hub: `datasets` reads both the same way."""
    repository = folder_of(tmp_path, "\n".join([json.dumps(PAIR)] * 40))
    hub = Hub(id=str(repository), splits=Splits(train="train", test="test"))
    data = read_task(TASKS["snli"].model_copy(update={"bundled": False, "hub": hub}), None)
    assert (len(data.train), len(data.validation), len(data.test)) == (38, 2, 1)
    assert data.test[0].label == 2
    lacking = hub.model_copy(update={"splits": Splits(train="train", test="best")})
    with pytest.raises(InputError, match="split 'best' cannot be read"):
        read_task(TASKS["snli"].model_copy(update={"bundled": False, "hub": lacking}), None)


def test_rows_without_gold_label_are_counted(tmp_path: Path) -> None:
    data = load_task("snli", folder_of(tmp_path, "\n".join(json.dumps(PAIR | {"label": n}) for n in (0, -1, "-1", 2))))
    assert [example.label for example in data.train] == [0, 2]
    assert data.left_out == 2


def test_braces_in_a_text_are_text(tmp_path: Path) -> None:
    data = load_task("snli", folder_of(tmp_path, json.dumps(PAIR | {"premise": "{hypothesis} {0}"})))
    assert data.train[0].text.startswith("Premise: {hypothesis} {0}\n")


def test_unknown_task() -> None:
    with pytest.raises(InputError, match=r"unknown task 'sst'; did you mean 'sst2'\?"):
        load_task("sst")


BAD_PAIRS = [
    ('{"premise": "a", "hypothesis": "b"}', r"train\.jsonl:1: task 'snli' needs column 'label'; .*premise, hypothesis"),
    ('{"premise": "a", "label": 0}', r"train\.jsonl:1: task 'snli' needs column 'hypothesis'"),
    (json.dumps(PAIR) + "\n\n" + json.dumps(PAIR | {"label": 3}), r"train\.jsonl:3: label 3 is not one of .*neutral"),
    (json.dumps(PAIR | {"label": "maybe"}), r"train\.jsonl:1: label 'maybe'"),
    (json.dumps(PAIR | {"label": True}), r"train\.jsonl:1: label True"),
    (json.dumps(PAIR | {"label": 0.5}), r"train\.jsonl:1: label 0\.5"),
    (json.dumps(PAIR | {"premise": None}), r"train\.jsonl:1: column 'premise' is null, not a text"),
    ('{"premise": "a"', r"train\.jsonl:1: broken JSON"),
    ("[1]", r"train\.jsonl:1: one JSON object per line"),
    ("", r"the train split in .* has no labelled examples"),
    (json.dumps(PAIR | {"label": -1}), r"the train split in .* has no labelled examples"),
]


@pytest.mark.parametrize(("train", "message"), BAD_PAIRS)
def test_bad_pairs(tmp_path: Path, train: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        load_task("snli", folder_of(tmp_path, train))
    assert "\n" not in str(caught.value)


BAD_WORDS = [
    (TAGGED | {"ner_tags": ["O"]}, r"train\.jsonl:1: 1 tags for 3 words"),
    (TAGGED | {"ner_tags": "O O O"}, r"train\.jsonl:1: no list of tags for 3 words"),
    (TAGGED | {"ner_tags": ["O", "O", "B-LOC"]}, r"train\.jsonl:1: label 'B-LOC' is not one of task 'wnut17'"),
    (TAGGED | {"tokens": ["in", "", "York"]}, r"train\.jsonl:1: column 'tokens' must be a list of words"),
    (TAGGED | {"tokens": []}, r"train\.jsonl:1: column 'tokens' must be a list of words"),
]


@pytest.mark.parametrize(("row", "message"), BAD_WORDS)
def test_bad_words(tmp_path: Path, row: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_task("wnut17", folder_of(tmp_path, json.dumps(row), rest=TAGGED))


def test_bad_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not a folder"):
        load_task("snli", tmp_path / "none")
    with pytest.raises(InputError, match=r"task 'wnut17' needs train\.jsonl or wnut17train\.conll there"):
        load_task("wnut17", tmp_path)
    folder_of(tmp_path, json.dumps(PAIR))
    whole = zstandard.compress("".join(f'{{"premise": "{i}"}}\n' for i in range(1000)).encode())
    (tmp_path / "test.jsonl").unlink()
    (tmp_path / "test.jsonl.zst").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match=r"test\.jsonl\.zst.*(cut short|needs column)"):
        load_task("snli", tmp_path)


def test_not_utf8(tmp_path: Path) -> None:
    folder_of(tmp_path, "")
    (tmp_path / "train.jsonl").write_bytes(json.dumps(PAIR).encode() + b'\n{"premise": "caf\xe9"}\n')
    with pytest.raises(InputError, match=r"train\.jsonl:2: not UTF-8"):
        load_task("snli", tmp_path)


def test_bad_tables(tmp_path: Path) -> None:
    (tmp_path / "dev.tsv").write_text("sentence\tlabel\nfine\t1\n")
    (tmp_path / "train.tsv").write_text("sentence\tlabel\nfine\t1\nno label\n")
    with pytest.raises(InputError, match=r"train\.tsv:3: 1 fields where the header names 2"):
        load_task("sst2", tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    for name in ("wnut17train.conll", "emerging.dev.conll", "emerging.test.annotated"):
        (other / name).write_text("in\tO\nYork\n")
    with pytest.raises(InputError, match=r"wnut17train\.conll:2: a line without a tag: 'York'"):
        load_task("wnut17", other)


def test_one_example_leaves_nothing_to_hold_out(tmp_path: Path) -> None:
    for name in ("train.tsv", "dev.tsv"):
        (tmp_path / name).write_text("sentence\tlabel\nfine\t1\n")
    with pytest.raises(InputError, match="too small to hold out"):
        load_task("sst2", tmp_path)


def test_task_without_source() -> None:
    task: Task = TASKS["snli"].model_copy(update={"bundled": False})
    with pytest.raises(InputError, match="give its folder as data_dir"):
        read_task(task, None)
