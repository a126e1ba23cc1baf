import json
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas
import pytest

from biphase.errors import InputError
from biphase.tasks.examples import LabelledText, Question, TaggedWords, find_answer, input_of, load_examples, to_iob2
from biphase.tasks.sources import find_source
from biphase.tasks.spec import TASK_SPLITS, Task, find_task, task_table
from biphase.tasks.splits import Collection, hold_out

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="developers' data is not here")

PAIR = {"premise": "A man sleeps.", "hypothesis": "A man is awake.", "label": 2}
TAGGED = {"tokens": ["in", "New", "York"], "ner_tags": ["O", "B-location", "I-location"]}
ASKED = {"id": "q", "question": "Who?", "context": "Ann met Ann", "answers": {"text": ["Ann"], "answer_start": [8]}}


def load_task(name: str, data_dir: Path | None = None, most_evaluated: int | None = None) -> Any:
    return load_examples(find_source(find_task(name), data_dir), judged_only=True, most_evaluated=most_evaluated)


def lines(*rows: object) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def write(folder: Path, **files: str) -> Path:
    """`train_jsonl=...` becomes the file train.jsonl."""
    for name, content in files.items():
        (folder / name.replace("_", ".")).write_text(content, encoding="utf-8")
    return folder


def pairs(folder: Path, train: str) -> Path:
    return write(folder, train_jsonl=train, validation_jsonl=lines(PAIR), test_jsonl=lines(PAIR) + "\n")


def tagged(folder: Path, row: dict) -> Path:
    return write(folder, train_jsonl=lines(row), validation_jsonl=lines(TAGGED), test_jsonl=lines(TAGGED) + "\n")


def asked(folder: Path, row: dict) -> Path:
    train = lines(*({**ASKED, "id": str(i)} for i in range(30)))
    return write(folder, train_jsonl=train, validation_jsonl=lines(row))


def glue(folder: Path, header: str, *rows: str, test: str = "dev.tsv") -> Path:
    for name in ("train.tsv", test):
        (folder / name).write_text("\n".join((header, *rows, "")), encoding="utf-8")
    return folder


# Sequence classification


def test_snli() -> None:
    data = load_task("snli")
    assert (len(data.train), len(data.validation), len(data.test), data.left_out) == (8858, 984, 2961, 0)
    assert find_source(find_task("snli"), None).name == "biphase" and data.task == task_table()["snli"]
    assert input_of(data.train[0]) == (
        "Premise: Two women are embracing while holding to go packages .\n"
        "Hypothesis: The sisters are hugging goodbye while holding to go packages after just eating lunch ."
    )
    assert data.task.classes[data.train[0].label] == "neutral"
    premises = [{input_of(example).split("\n")[0] for example in split} for split in (data.train, data.validation)]
    assert not premises[0] & premises[1]
    assert max(Counter(example.label for example in data.test).values()) < 0.36 * len(data.test)


@needs_shared
def test_sst2_splits_as_in_the_paper() -> None:
    data = load_task("sst2", SHARED / "sst2")
    assert (len(data.train), len(data.validation), len(data.test)) == (63981, 3368, 872)
    assert data.test[0] == LabelledText("dev.tsv:2", (("one long string of cliches .", ((0, 28),)),), 0)


def test_held_out_part_is_that_of_datasets() -> None:
    ids = [str(i) for i in range(1013)]
    theirs = datasets.Dataset.from_dict({"id": ids}).train_test_split(train_size=0.95, seed=42)
    assert hold_out(ids, 0.95) == (list(theirs["train"]["id"]), list(theirs["test"]["id"]))


def test_a_stratified_draw_keeps_the_shares_of_classes() -> None:
    strata = np.random.default_rng(0).choice(4, 1013, p=[0.7, 0.2, 0.09, 0.01])
    train, held = hold_out([*range(1013)], 0.9, strata)
    assert sorted([*train, *held]) == [*range(1013)] and len(held) == 102
    expected = np.bincount(strata) * 102 / 1013
    assert np.abs(np.bincount(strata[held]) - expected).max() < 1
    assert held != sorted(held, key=lambda number: strata[number])
    alone = np.array([*range(8)] + [8, 9] * 16)
    held = hold_out([*range(40)], 0.75, alone)[1]
    assert len(held) == 10 and min(held) >= 8  # an example alone in its class is for training


def test_mnli_as_glue_writes_it(tmp_path: Path) -> None:
    header = "index\tpairID\tsentence1_parse\tsentence1\tsentence2\tlabel1\tgold_label"
    rows = [f'{i}\t{i}e\t(ROOT)\t"It rains\tIt is wet\tneutral\t{["entailment", "neutral"][i % 2]}' for i in range(20)]
    data = load_task("mnli", glue(tmp_path, header, *rows, test="dev_matched.tsv"))
    assert (len(data.train), len(data.validation), len(data.test)) == (19, 1, 20)
    text = 'Premise: "It rains\nHypothesis: It is wet', ((9, 18), (31, 40))
    assert data.test[0] == LabelledText("dev_matched.tsv:2", (text,), 0)


def test_mnli_as_its_authors_write_it(tmp_path: Path) -> None:
    row = {"sentence1": "a", "sentence2": "b", "gold_label": "contradiction", "annotator_labels": []}
    text = lines(*[row, row | {"gold_label": "neutral"}] * 3, row | {"gold_label": "-"})
    for name in ("multinli_1.0_train.jsonl", "multinli_1.0_dev_matched.jsonl"):
        (tmp_path / name).write_text(text)
    data = load_task("mnli", tmp_path)
    assert data.left_out == 2 and data.test[0].label == 2
    (tmp_path / "multinli_1.0_train.jsonl").write_text(lines({"sentence1": "a", "gold_label": "neutral"}))
    with pytest.raises(InputError, match=r"train\.jsonl:1: there is no column 'hypothesis'; .*sentence1, gold_lab"):
        load_task("mnli", tmp_path)


def test_qqp_leaves_broken_rows_out(tmp_path: Path) -> None:
    header = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate"
    rows = ["133273\t1\t2\tHow?\tWhy?\t1", '402555\t3\t4\t"How', "5\t6\t7\tWho?\tWhose?\t0"]
    data = load_task("qqp", glue(tmp_path, header, *rows))
    assert data.left_out == 2
    assert data.test == (
        LabelledText("133273", (("Question 1: How?\nQuestion 2: Why?", ((12, 16), (29, 33))),), 1),
        LabelledText("5", (("Question 1: Who?\nQuestion 2: Whose?", ((12, 16), (29, 35))),), 0),
    )
    with pytest.raises(InputError, match=r"train\.tsv:3: 1 fields where the header names 2"):
        load_task("sst2", glue(tmp_path, "sentence\tlabel", "fine\t1", "no label"))


def test_rows_without_gold_label_are_counted(tmp_path: Path) -> None:
    data = load_task("snli", pairs(tmp_path, lines(*(PAIR | {"label": n} for n in (0, -1, "-1", "-", "neutral")))))
    assert [example.label for example in data.train] == [0, 1]
    assert data.left_out == 3


def test_ids(tmp_path: Path) -> None:
    rows = [PAIR | {"label": 1}, PAIR | {"idx": 7}, PAIR | {"id": "x"}]
    assert [example.id for example in load_task("snli", pairs(tmp_path, lines(*rows))).train] == [
        "train.jsonl:1",
        "7",
        "x",
    ]


def test_braces_in_a_text_are_text(tmp_path: Path) -> None:
    data = load_task("snli", pairs(tmp_path, lines(PAIR | {"premise": "{hypothesis} {0}"})))
    assert input_of(data.train[0]).startswith("Premise: {hypothesis} {0}\n")


@pytest.mark.parametrize("ending", ["csv", "jsonl"])
def test_one_of_two_texts_may_be_empty(ending: str, tmp_path: Path) -> None:
    """Null is what an empty field of a table is."""
    texts = [(f"title {n}" if n % 3 else None, f"body {n}" if n % 2 else None) for n in range(60)]
    table = pandas.DataFrame({"title": one, "body": two, "label": n % 2} for n, (one, two) in enumerate(texts))
    if ending == "csv":
        table.to_csv(tmp_path / "train.csv", index=False)
    else:
        table.to_json(tmp_path / "train.jsonl", orient="records", lines=True)
    keys: dict[str, Any] = {"name": "mine", "family": "sequence_classification", "metric": "accuracy"}
    keys |= {"template": "{title}\n{body}", "classes": ["0", "1"], "missing": "drop"}
    task = Task.model_validate(keys | {"files": [{"train": f"train.{ending}"}]})
    data: Any = load_examples(find_source(task, tmp_path), judged_only=False)
    expected = {f"{one or ''}\n{two or ''}" for one, two in texts if one or two}
    assert {input_of(example) for split in data.splits.values() for example in split} == expected
    assert data.left_out == 10


BAD_PAIRS = [
    ({"premise": "a", "hypothesis": "b"}, r"train\.jsonl:1: there is no column 'label'; .*premise, hypothesis"),
    ({"premise": "a", "label": 0}, r"train\.jsonl:1: there is no column 'hypothesis'"),
    (PAIR | {"label": 3}, r"train\.jsonl:1: label 3 is not one of .*neutral"),
    (PAIR | {"label": "maybe"}, r"train\.jsonl:1: label 'maybe'"),
    (PAIR | {"label": True}, r"train\.jsonl:1: label True"),
    (PAIR | {"label": 0.5}, r"train\.jsonl:1: label 0\.5"),
    (PAIR | {"premise": 5}, r"train\.jsonl:1: column 'premise' is 5, not a text: fix the row or remove it"),
    (PAIR | {"label": -1}, r"the train split in .* has no labelled examples"),
]


@pytest.mark.parametrize(("row", "message"), BAD_PAIRS)
def test_bad_pairs(tmp_path: Path, row: dict, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        load_task("snli", pairs(tmp_path, lines(row)))
    assert "\n" not in str(caught.value)


def test_empty_and_tiny_splits(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"the train split in .* has no labelled examples"):
        load_task("snli", pairs(tmp_path, ""))
    with pytest.raises(InputError, match="too small to hold out"):
        load_task("sst2", glue(tmp_path, "sentence\tlabel", "fine\t1"))


# Token classification


@pytest.mark.parametrize(("name", "sizes"), [("uner_en_ewt", (12543, 2001, 2077)), ("wnut17", (3394, 1009, 1287))])
def test_bundled_words(name: str, sizes: tuple[int, ...]) -> None:
    data = load_task(name)
    assert (len(data.train), len(data.validation), len(data.test)) == sizes
    seen = {data.task.classes[tag] for example in data.train for tag in example.tags}
    assert seen == set(data.task.classes)


@needs_shared
@pytest.mark.parametrize("name", ["uner_en_ewt", "wnut17"])
def test_bundled_words_are_the_source(name: str) -> None:
    bundled, source = load_task(name), load_task(name, SHARED / name)
    assert all(getattr(bundled, split) == getattr(source, split) for split in TASK_SPLITS)


@needs_shared
def test_release_columns_equal_jsonl(tmp_path: Path) -> None:
    for split in ("dev", "test"):
        (tmp_path / f"en_ewt-ud-{split}.iob2").symlink_to(SHARED / "uner_en_ewt" / f"en_ewt-ud-{split}.iob2")
    (tmp_path / "en_ewt-ud-train.iob2").symlink_to(SHARED / "uner_en_ewt" / "en_ewt-ud-dev.iob2")
    released, bundled = load_task("uner_en_ewt", tmp_path), load_task("uner_en_ewt")
    assert released.validation == bundled.validation
    assert released.test == bundled.test


SCHEMES = [
    ("IOB1", "I-A I-A B-A O I-B I-A", "B-A I-A B-A O B-B B-A"),
    ("IOB1", "O B-A I-A B-A B-B", "O B-A I-A B-A B-B"),
    ("IOB2", "I-A O I-B", "I-A O I-B"),
    ("BIOES", "S-A S-A B-B I-B E-B O S-B", "B-A B-A B-B I-B I-B O B-B"),
    ("BIOES", "O E-A", "O I-A"),
]


@pytest.mark.parametrize(("scheme", "tags", "expected"), SCHEMES)
def test_schemes(scheme: str, tags: str, expected: str) -> None:
    assert to_iob2(tags.split(), scheme, "") == expected.split()


@pytest.mark.parametrize(("scheme", "tag"), [("IOB1", "S-A"), ("BIOES", "U-A"), ("BIOES", "A"), ("IOB1", 1)])
def test_tags_outside_the_scheme(scheme: str, tag: object) -> None:
    with pytest.raises(InputError, match=f"here:1: tag {tag!r} is not of the scheme {scheme}"):
        to_iob2(["O", tag], scheme, "here:1")


def test_conll2003_as_published(tmp_path: Path) -> None:
    text = "-DOCSTART- -X- -X- O\n\nEU NNP I-NP I-ORG\nGerman JJ I-NP I-MISC\nUK NNP B-NP B-MISC\n\n"
    for name in ("eng.train", "eng.testa", "eng.testb"):
        (tmp_path / name).write_text(text + "\n" * (name == "eng.testb"))
    assert load_task("conll2003", tmp_path).train == (TaggedWords("eng.train:3", ("EU", "German", "UK"), (3, 7, 7)),)


def test_tags_by_number(tmp_path: Path) -> None:
    row = {"tokens": ["May", "5"], "tags": [2, 3]}
    data = load_task(
        "ontonotes5", write(tmp_path, train00_json=lines(row), valid_json=lines(row), test_json=lines(row, row))
    )
    assert data.test[0].tags == (2, 3) and data.task.classes[3] == "I-DATE"


BAD_WORDS = [
    (TAGGED | {"ner_tags": ["O"]}, r"train\.jsonl:1: 1 tags for 3 words"),
    (TAGGED | {"ner_tags": "O O O"}, r"train\.jsonl:1: no list of tags for 3 words"),
    (TAGGED | {"ner_tags": ["O", "O", "B-LOC"]}, r"train\.jsonl:1: label 'B-LOC' is not one of task 'wnut17'"),
    (TAGGED | {"ner_tags": [0, 0, 13]}, r"train\.jsonl:1: label 13 is not one of"),
    (TAGGED | {"tokens": ["in", "", "York"]}, r"train\.jsonl:1: column 'tokens' must be a list of words"),
    (TAGGED | {"tokens": []}, r"train\.jsonl:1: column 'tokens' must be a list of words"),
    ({"tokens": ["in"]}, r"train\.jsonl:1: there is no column 'ner_tags'"),
]


@pytest.mark.parametrize(("row", "message"), BAD_WORDS)
def test_bad_words(tmp_path: Path, row: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_task("wnut17", tagged(tmp_path, row))


# Question answering


@needs_shared
@pytest.mark.parametrize(
    ("name", "folder", "sizes", "unanswerable"),
    [("squad", "squad_dev", (7831, 413, 2326), 0), ("squad_v2", "squad_v2_dev", (8617, 454, 2802), 1496)],
)
def test_squad(name: str, folder: str, sizes: tuple[int, ...], unanswerable: int) -> None:
    data = load_task(name, SHARED / folder)
    assert (len(data.train), len(data.validation), len(data.test)) == sizes
    assert sum(not question.answers for question in data.test) == unanswerable
    for question in (*data.train, *data.validation, *data.test):
        assert all(question.context.startswith(text, start) for text, start in question.answers)


@needs_shared
@pytest.mark.parametrize(("name", "version", "size"), [("squad", "1.1", 10_570), ("squad_v2", "2.0", 11_873)])
def test_squad_as_published(tmp_path: Path, name: str, version: str, size: int) -> None:
    """The official file holds the questions of the two parts."""
    folder = SHARED / f"{name}_dev"
    official = json.loads((folder / f"dev-v{version}.json").read_text(encoding="utf-8"))
    (tmp_path / f"train-v{version}.json").write_text(json.dumps({"data": official["data"][:1]}))
    (tmp_path / f"dev-v{version}.json").symlink_to(folder / f"dev-v{version}.json")
    parts, whole = load_task(name, folder), load_task(name, tmp_path)
    expected = {question.id: question for split in TASK_SPLITS for question in getattr(parts, split)}
    assert len(whole.test) == len(expected) == size
    for question in whole.test:
        other = expected[question.id]
        assert (question.question, question.context) == (other.question, other.context)
        assert {text for text, _ in question.answers} == {text for text, _ in other.answers}


@needs_shared
def test_squad_held_out_as_in_the_paper() -> None:
    rows = datasets.Dataset.from_json(str(SHARED / "squad_dev" / "split_train.jsonl"))
    theirs = rows.train_test_split(train_size=0.95, seed=42)["test"]["id"]
    assert [question.id for question in load_task("squad", SHARED / "squad_dev").validation] == list(theirs)


ANSWERS = [
    ("right", "a b a b", "a b", 4, 4),
    ("nearest after", "xx b", "b", 0, 3),
    ("nearest before", "b xx", "b", 3, 0),
    ("the nearer of two", "b 23 b 67", "b", 4, 5),
    ("the nearer of two, before", "b 23 b", "b", 1, 0),
    ("beyond the end", "b", "b", 99, 0),
    ("before the beginning", "xb", "b", -1, 1),
]


@pytest.mark.parametrize(
    ("context", "text", "start", "expected"), [a[1:] for a in ANSWERS], ids=[a[0] for a in ANSWERS]
)
def test_answers_are_put_where_they_stand(context: str, text: str, start: int, expected: int) -> None:
    assert find_answer("here", context, text, start) == (text, expected)
    distances = [abs(i - start) for i in range(len(context)) if context.startswith(text, i)]
    assert abs(expected - start) == min(distances)


def test_answers(tmp_path: Path) -> None:
    answers = {"text": ["Ann", "met", "Ann"], "answer_start": [8, 1, 8]}
    question = load_task("squad", asked(tmp_path, ASKED | {"answers": answers})).test[0]
    assert question == Question("q", "Who?", "Ann met Ann", (("Ann", 8), ("met", 4)))
    listed = [{"text": text, "answer_start": start} for text, start in zip(*answers.values(), strict=True)]
    assert load_task("squad", asked(tmp_path, ASKED | {"answers": listed})).test[0] == question
    for changes in ({"answers": {"text": [], "answer_start": []}}, {"answers": []}, {"is_impossible": True}):
        assert load_task("squad_v2", asked(tmp_path, ASKED | changes)).test[0].answers == ()


BAD_QUESTIONS = [
    ({"answers": {"text": ["Bob"], "answer_start": [0]}}, "question 'q': a context without its answer 'Bob'"),
    ({"answers": {"text": ["Ann"], "answer_start": []}}, "column 'answers' is .*, not texts and where they start"),
    ({"answers": {"text": ["Ann"], "answer_start": ["0"]}}, "column 'answers' is .*, not texts and where they start"),
    ({"answers": {"text": [""], "answer_start": [0]}}, "column 'answers' is"),
    ({"answers": "Ann"}, "column 'answers' is \"Ann\""),
    ({"context": None}, "column 'context' is null, not a text"),
    ({"question": 5}, "column 'question' is 5, not a text"),
    ({"question": " "}, "'q' has an empty question: fill it in, or remove the row"),
    ({"context": ""}, "'q' has an empty context: fill it in, or remove the row"),
    ({"context": "word " * 1_000_001}, "column 'context' has 5,000,005 characters, more than 5,000,000: cut it"),
]


@pytest.mark.parametrize(("changes", "message"), BAD_QUESTIONS)
def test_bad_questions(tmp_path: Path, changes: dict, message: str) -> None:
    with pytest.raises(InputError, match=r"validation\.jsonl:1: " + message) as caught:
        load_task("squad", asked(tmp_path, ASKED | changes))
    assert "\n" not in str(caught.value)


def test_questions_have_ids_of_their_own(tmp_path: Path) -> None:
    folder = asked(tmp_path, ASKED)
    (folder / "validation.jsonl").write_text(lines(ASKED, ASKED))
    with pytest.raises(InputError, match=r"test: the question q is named twice"):
        load_task("squad", folder)


PASSAGE = "Ann met Bob.\n@highlight\nAnn won"
SUPERGLUE = {
    "idx": 7,
    "passage": {
        "text": PASSAGE,
        "entities": [{"start": 24, "end": 26}, {"start": 0, "end": 2}, {"start": 8, "end": 10}, {"start": 0, "end": 2}],
    },
    "qas": [
        {"idx": 1, "query": "@placeholder won", "answers": [{"start": 0, "end": 2, "text": "Ann"}]},
        {"idx": 2, "query": "@placeholder lost", "answers": [{"start": 8, "end": 10, "text": "Bob"}]},
        {"idx": 3, "query": "@placeholder slept", "answers": []},
    ],
}
SPANS = {"text": ["Ann", "Bob", "Ann"], "start": [0, 8, 24], "end": [3, 11, 27]}


def test_record(tmp_path: Path) -> None:
    """SuperGLUE's files and the Hub's rows give the same questions."""
    (tmp_path / "files").mkdir()
    (tmp_path / "rows").mkdir()
    files = write(tmp_path / "files", train_jsonl=lines(SUPERGLUE), val_jsonl=lines(SUPERGLUE))
    data = load_task("record", files)
    ann, bob, again = ("Ann", 0), ("Bob", 8), ("Ann", 24)
    assert data.left_out == 2
    assert data.test == (
        Question("7-1", "@placeholder won", PASSAGE, (ann, again), (ann, bob, again)),
        Question("7-2", "@placeholder lost", PASSAGE, (bob,), (ann, bob, again)),
    )
    shared = {"passage": PASSAGE, "entities": ["Ann", "Bob"], "entity_spans": SPANS}
    rows = [
        shared | {"query": query, "answers": answers, "idx": {"passage": 7, "query": number}}
        for number, query, answers in ((1, "@placeholder won", ["Ann"]), (2, "@placeholder lost", ["Bob"]))
    ]
    listed = [dict(zip(SPANS, values, strict=True)) for values in zip(*SPANS.values(), strict=True)]
    for spans in (SPANS, listed):
        text = lines(*(row | {"entity_spans": spans} for row in rows))
        assert load_task("record", write(tmp_path / "rows", train_jsonl=text, validation_jsonl=text)).test == data.test


def test_record_answers_that_are_no_entities_become_some(tmp_path: Path) -> None:
    row = {"passage": PASSAGE, "query": "@placeholder", "entity_spans": SPANS, "answers": ["won"], "idx": 0}
    text = lines(row, row | {"idx": 1})
    question = load_task("record", write(tmp_path, train_jsonl=text, validation_jsonl=text)).test[0]
    assert question.answers == (("won", 28),) and question.candidates[-1] == ("won", 28)
    bad = lines(row | {"answers": ["lost"]})
    with pytest.raises(InputError, match=r"validation\.jsonl:1: question '0': a context without its answer 'lost'"):
        load_task("record", write(tmp_path, train_jsonl=text, validation_jsonl=bad))


# Retrieval

HEADER = "query-id\tcorpus-id\tscore\n"


def collection(folder: Path, num_queries: int = 8, **qrels: str) -> Path:
    """Ten documents d0 … d9, `num_queries` queries, and judgements by split."""
    documents = ({"_id": f"d{i}", "title": "T" if i % 2 else "", "text": f"text {i}"} for i in range(10))
    queries = ({"_id": f"q{i}", "text": f"query {i}"} for i in range(num_queries))
    (folder / "qrels").mkdir(exist_ok=True)
    for split, judgements in qrels.items():
        (folder / "qrels" / f"{split}.tsv").write_text(HEADER + judgements)
    return write(folder, corpus_jsonl=lines(*documents), queries_jsonl=lines(*queries))


def judge(*queries: int, grade: int = 1) -> str:
    return "".join(f"q{i}\td{i % 10}\t{grade}\n" for i in queries)


@needs_shared
@pytest.mark.parametrize(
    ("name", "folder", "counts"),
    [
        ("cranfield", "cranfield", (830, 225, 807, 56, 56)),
        ("squad_retrieval", "squad_retrieval", (2067, 10_570, 7831, 413, 2326)),
        ("wiki_longdoc", "wiki_longdoc_ict", (900, 900, 500, 100, 300)),
    ],
)
def test_collections(name: str, folder: str, counts: tuple[int, ...]) -> None:
    source = find_source(task_table()[name], SHARED / folder)
    data = load_examples(source, judged_only=True)
    assert isinstance(data, Collection) and data.left_out == 0
    validation, test = data.relevance["validation"], data.relevance["test"]
    assert (len(data.documents), len(data.queries), len(data.train), len(validation), len(test)) == counts
    trained = {query for query, _ in data.train}
    assert not trained & validation.keys() and not trained & test.keys() and not validation.keys() & test.keys()
    whole = load_examples(source, judged_only=False)
    assert len(whole.documents) == {"cranfield": 1400, "squad_retrieval": 2067, "wiki_longdoc": 900}[name]
    assert (whole.train, whole.relevance) == (data.train, data.relevance)


def test_beir(tmp_path: Path) -> None:
    folder = collection(
        tmp_path,
        train="q0\td1\t1\nq0\td2\t2\nq1\td3\t0\nq0\td1\t1\n",
        dev="q2\td4\t-1\nq2\td5\t3\n",
        test="q3\td6\t1\n",
    )
    data = load_task("msmarco", folder)
    assert data.train == (("q0", "d1"), ("q0", "d2")) and data.left_out == 1
    assert data.relevance == {"validation": {"q2": {"d4": -1, "d5": 3}}, "test": {"q3": {"d6": 1}}}
    assert list(data.documents) == ["d1", "d2", "d3", "d4", "d5", "d6"]
    assert data.documents["d1"] == "T text 1" and data.documents["d2"] == "text 2"
    assert list(data.queries) == ["q0", "q1", "q2", "q3"] and data.queries["q3"] == "query 3"


def test_documents_and_queries_are_read_by_their_endings(tmp_path: Path) -> None:
    folder = collection(tmp_path, train=judge(0, 1), dev=judge(2), test=judge(3))
    documents, queries = (pandas.read_json(folder / f"{name}.jsonl", lines=True) for name in ("corpus", "queries"))
    expected = load_task("msmarco", folder)
    documents.to_parquet(folder / "corpus.parquet")
    queries.to_csv(folder / "queries.csv", index=False)
    queries.to_json(folder / "queries.json", orient="records")
    for name in ("queries.csv", "queries.json", "queries.jsonl"):
        task = find_task("msmarco")
        layout = task.files[0].model_copy(update={"corpus": "corpus.parquet", "queries": name})
        source = find_source(task.model_copy(update={"files": (layout,)}), folder)
        read = load_examples(source, judged_only=True)
        assert isinstance(read, Collection)
        assert (read.documents, read.queries, read.train) == (expected.documents, expected.queries, expected.train)


def test_judgements_as_jsonl_and_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = collection(tmp_path, dev=judge(1, 2), test=judge(3, grade=2))
    expected = load_task("mldr_en", folder)

    def rows(split: str, grade: float) -> list[dict]:
        judged = [line.split("\t") for line in (folder / "qrels" / f"{split}.tsv").read_text().splitlines()[1:]]
        return [{"query-id": query, "corpus-id": document, "score": grade} for query, document, _ in judged]

    def texts(name: str) -> list[dict]:
        return [json.loads(line.replace('"_id"', '"id"')) for line in (folder / name).read_text().splitlines()]

    there = {
        "en-qrels": {"dev": rows("dev", 1.0), "test": rows("test", 2.0)},
        "en-corpus": {split: texts("corpus.jsonl") for split in ("dev", "test")},
        "en-queries": {split: texts("queries.jsonl") for split in ("dev", "test")},
    }

    def load_rows(id: str, config: str, split: str, commit: str) -> datasets.Dataset:
        assert (id, commit) == ("mteb/MultiLongDocRetrieval", task_table()["mldr_en"].hub.revision)
        return datasets.Dataset.from_list(there[config][split])

    monkeypatch.setattr("biphase.tasks.sources.load_rows", load_rows)
    found = load_task("mldr_en")
    for split in ("dev", "test"):
        (folder / "qrels" / f"{split}.jsonl").write_text(lines(*there["en-qrels"][split]))
        (folder / "qrels" / f"{split}.tsv").unlink()
    for other in (found, load_task("mldr_en", folder)):
        assert (other.documents, other.queries) == (expected.documents, expected.queries)
        assert (other.train, other.relevance) == ((), expected.relevance)


def test_held_out_queries(tmp_path: Path) -> None:
    """5 % of them, at least 100, at most half; whichever order the judgements have."""
    for num_queries, num_held in ((2, 1), (30, 15), (400, 100), (3000, 150)):
        order = np.random.default_rng(0).permutation(num_queries).tolist()
        data = [
            load_task("squad_retrieval", collection(tmp_path, num_queries, train=judge(*ids), test=judge(0)))
            for ids in (range(num_queries), order)
        ]
        held = set(data[0].relevance["validation"])
        assert len(held) == num_held and len(data[0].train) == num_queries - num_held
        assert set(data[1].relevance["validation"]) == held
        assert not held & {query for query, _ in data[0].train}


def test_drawn_from_test_alone(tmp_path: Path) -> None:
    folder = collection(tmp_path, 45, test=judge(*range(45)))
    halves, parts = load_task("nq", folder), load_task("cranfield", folder)
    assert [len(halves.relevance[split]) for split in ("validation", "test")] == [22, 23] and halves.train == ()
    assert [len(parts.relevance[split]) for split in ("validation", "test")] == [11, 11] and len(parts.train) == 23
    queries = (
        {query for query, _ in parts.train} | parts.relevance["validation"].keys() | parts.relevance["test"].keys()
    )
    assert queries == {f"q{i}" for i in range(45)}


BAD_JUDGEMENTS = [
    ("q0\td99\t1\n", r"a judgement of document 'd99', which .* does not have"),
    ("q99\td0\t1\n", r"a judgement of query 'q99', which .* does not have"),
    ("q0\td0\tgood\n", r"test\.tsv:3: grade 'good' is not a whole number"),
    ("q0\td0\t0.5\n", r"test\.tsv:3: grade '0\.5' is not a whole number"),
    ("q0\td0\t2147483647\n", r"test\.tsv:3: grade '2147483647' is not a whole number of 31 bits"),
    ("q1\td1\t2\n", r"test\.tsv:3: document 'd1' has two grades for query 'q1'"),
    ("q1\td1\n", r"test\.tsv:3: 2 fields where the header names 3"),
]


@pytest.mark.parametrize(("line", "message"), BAD_JUDGEMENTS)
def test_bad_judgements(tmp_path: Path, line: str, message: str) -> None:
    folder = collection(tmp_path, train=judge(2, 3, 4), test=judge(1) + line)
    with pytest.raises(InputError, match=message) as caught:
        load_task("squad_retrieval", folder)
    assert "\n" not in str(caught.value)


def test_bad_collections(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"the train split in .* has too few queries \(0\)"):
        load_task("squad_retrieval", collection(tmp_path, train="", test=judge(1)))
    with pytest.raises(InputError, match=r"the test split in .* has no relevant document"):
        load_task("squad_retrieval", collection(tmp_path, train=judge(1, 2), test=judge(3, grade=0)))
    with pytest.raises(InputError, match=r"the train split .* too few queries \(1\) to draw a train split"):
        load_task("squad_retrieval", collection(tmp_path, train=judge(1), test=judge(3)))
    with pytest.raises(InputError, match=r"the test split .* too few queries \(3\) to draw a validation split"):
        load_task("cranfield", collection(tmp_path, test=judge(1, 2, 3)))
    folder = collection(tmp_path, train=judge(1, 2), test=judge(3))
    (folder / "qrels" / "test.tsv").write_text("q3\td3\t1\nq4\td4\t1\n")
    with pytest.raises(InputError, match=r"test\.tsv:2: there is no column 'query-id'; .* q3, d3, 1"):
        load_task("squad_retrieval", folder)
    collection(tmp_path, train=judge(1, 2), test=judge(3))
    (folder / "corpus.jsonl").write_text(lines(*({"_id": "d1", "text": text} for text in ("a", "b"))))
    with pytest.raises(InputError, match=r"corpus\.jsonl:2: a second text with the id 'd1'"):
        load_task("squad_retrieval", folder)
    (folder / "corpus.jsonl").write_text(lines({"_id": "d1", "body": "a"}))
    with pytest.raises(InputError, match=r"corpus\.jsonl:1: there is no column 'text'"):
        load_task("squad_retrieval", folder)


def test_a_part_of_the_evaluation(tmp_path: Path) -> None:
    data, part = load_task("genre"), load_task("genre", most_evaluated=10)
    assert part.train == data.train and len(part.validation) == len(part.test) == 10
    places = [data.test.index(example) for example in part.test]
    assert places == sorted(places) and part == load_task("genre", most_evaluated=10)
    assert load_task("genre", most_evaluated=10**9) == data
    folder = collection(tmp_path, 45, test=judge(*range(45)))
    whole, few = load_task("nq", folder), load_task("nq", folder, most_evaluated=7)
    assert isinstance(few, Collection) and [len(few.relevance[split]) for split in ("validation", "test")] == [7, 7]
    for split, judged in few.relevance.items():
        assert judged.items() <= whole.relevance[split].items()
    assert (few.judged_documents, few.documents, few.queries) == (
        whole.judged_documents,
        whole.documents,
        whole.queries,
    )
