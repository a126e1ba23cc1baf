"""Files as other programs write them: what pandas, datasets and seqeval read there is what we read."""

import csv
import json
import re
import unicodedata
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError
from seqeval.scheme import BILOU, IOBES, Entities

from biphase.corpus.forms import rows_in_memory
from biphase.corpus.rows import rows_of_file
from biphase.errors import InputError
from biphase.tasks.examples import count_shared, input_of, label_index, load_examples, to_iob2
from biphase.tasks.own import write_task
from biphase.tasks.sources import definition, find_source, read_rows
from biphase.tasks.spec import FileLayout, Task, find_task, task_table
from biphase.tasks.splits import Collection, TaskData

TEXTS = ["plain", 'said "yes"', "a, b; c\td", "two\nlines", "", " ünï\u00a0code ", '"', "x;y"]
CLASSES = {"name": "mine", "family": "sequence_classification", "metric": "accuracy", "template": "{text}"}


def task_of(**changes: Any) -> Task:
    files = [{"train": "train.csv", "test": "test.csv"}]
    return Task.model_validate(CLASSES | {"classes": ["no", "yes"], "files": files} | changes)


def rows_of(path: Path, **layout: Any) -> list[Any]:
    return [row for _, row in rows_of_file(path, FileLayout(**layout))]


@pytest.mark.parametrize("separator", [",", ";", "\t"])
@pytest.mark.parametrize("quoting", [csv.QUOTE_MINIMAL, csv.QUOTE_ALL, csv.QUOTE_NONNUMERIC])
@pytest.mark.parametrize("ends", ["\n", "\r\n"])
def test_tables_as_pandas_writes_them(tmp_path: Path, separator: str, quoting: Any, ends: str) -> None:
    table = pandas.DataFrame({"text": TEXTS, "label": ["yes"] * len(TEXTS)})
    path = tmp_path / ("t.tsv" if separator == "\t" else "t.csv")
    table.to_csv(path, sep=separator, quoting=quoting, index=False, lineterminator=ends, encoding="utf-8-sig")
    theirs = pandas.read_csv(path, sep=separator, dtype=str, keep_default_na=False)
    found = rows_of(path, quotes=True) if separator == "\t" else rows_of(path)
    assert found == theirs.to_dict("records")
    if separator == "\t" and quoting != csv.QUOTE_MINIMAL:
        assert rows_of(path) == found


def test_a_delimiter_may_be_named(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("text|label\na, b|yes\nc;d|no\n")
    assert rows_of(path, delimiter="|") == [{"text": "a, b", "label": "yes"}, {"text": "c;d", "label": "no"}]
    with pytest.raises(InputError, match=r"t\.csv:2: 2 fields where the header names 1, separated by ','.*`delimiter`"):
        rows_of(path, delimiter=",")
    assert rows_of(path) == rows_of(path, delimiter="|")
    for odd in ("||", "\n", '"', ""):
        with pytest.raises(ValidationError):
            FileLayout(delimiter=odd)


def test_columns_inside_objects_go_by_names_with_dots(tmp_path: Path) -> None:
    rows = [
        {"meta": {"body": f"text {number}"}, "said": {"label": "yes" if number % 2 else "no"}} for number in range(30)
    ]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = [{"train": "train.jsonl", "rename": {"said.label": "label"}}]
    for changes in (
        {"template": "{meta.body}", "files": files},
        {"template": "{meta.body}", "label": "said.label", "files": [{"train": "train.jsonl"}]},
    ):
        data = load_examples(find_source(task_of(**changes), tmp_path), judged_only=False)
        assert {(input_of(one), one.label) for one in data.train} <= {(f"text {n}", n % 2) for n in range(30)}
    with pytest.raises(InputError, match=r"column 'meta.txt'; the columns are: meta, meta.body, said, said.label"):
        load_examples(find_source(task_of(template="{meta.txt}", files=files), tmp_path), judged_only=False)


def test_a_template_names_columns_with_blanks(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("review text,label\n" + "good,yes\nbad,no\n" * 15)
    task = task_of(template="A {review text}.", files=[{"train": "train.csv"}])
    data = load_examples(find_source(task, tmp_path), judged_only=False)
    assert {input_of(one) for one in data.train} == {"A good.", "A bad."}


def test_classes_that_a_draw_leaves_out_are_told(tmp_path: Path, capsys) -> None:
    lines = "".join(
        f"text {number},{'rare' if number == 7 else 'yes' if number % 2 else 'no'}\n" for number in range(40)
    )
    (tmp_path / "train.csv").write_text("text,label\n" + lines)
    task = task_of(classes=["no", "yes", "rare"], files=[{"train": "train.csv"}])
    data = load_examples(find_source(task, tmp_path), judged_only=False)
    told = capsys.readouterr().err
    for split, what in {
        "train": "left to train on",
        "validation": "drawn for validation",
        "test": "drawn for test",
    }.items():
        examples = data.splits[split]  # type: ignore[index]
        is_absent = all(one.label != 2 for one in examples)
        assert is_absent == (f"none of the {len(examples)} examples {what} has rare" in " ".join(told.split()))
    (tmp_path / "test.csv").write_text("text,label\na,yes\nb,no\n")
    (tmp_path / "dev.csv").write_text("text,label\nc,yes\nd,no\n")
    files = [{"train": "train.csv", "validation": "dev.csv", "test": "test.csv"}]
    load_examples(
        find_source(task.model_copy(update={"files": task_of(files=files).files}), tmp_path), judged_only=False
    )
    assert "none of" not in capsys.readouterr().err
    assert "has rare; join rare, too rare for that, by `labels`, or drop it by `unlabelled`" in " ".join(told.split())


def test_no_strata_are_proposed_where_there_are_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"tokens": [f"w{n}"], "label": ["B-x" if n == 7 else "O"]} for n in range(40)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = {"family": "token_classification", "metric": "f1", "template": "", "classes": ["O", "B-x", "I-x"]}
    load_examples(find_source(task_of(files=[{"train": "train.jsonl"}], **keys), tmp_path), judged_only=False)
    told = " ".join(capsys.readouterr().err.split())
    assert "has B-x; name files for the splits to have all classes in each" in told and "stratified" not in told


@pytest.mark.parametrize(
    ("table", "numbers"),
    [
        ("text;label\na;9,71\nb;1,234\nc;-0,5\nd;1,5e-05\ne;7", {9.71, 1.234, -0.5, 1.5e-05, 7}),
        ("text\tlabel\na\t9,5\nb\t1,234", {9.5, 1.234}),
        ("text;day;label\na;24.12.2025;1,2\nb;31.12.2025;2,5", {1.2, 2.5}),
        ("text;time;version;label\na;09.15;1.2;9,71\nb;10.45;1.3;1,234", {9.71, 1.234}),
        ("text;label\na;9.71\nb;1.234", {9.71, 1.234}),
        ('text,label\na,"1,234"\nb,"9,71"', None),
        ("text\tlabel\na\t1,234\nb\t9", None),
        ("text;label\na;1,234\nb;999", None),
        ("text;price;label\na;9.71;1,234\nb;3.5;7", None),
    ],
)
def test_decimal_commas_are_numbers_where_the_table_has_them(table: str, numbers: Any, tmp_path: Path) -> None:
    """Elsewhere 1,234 may be a thousand, and is refused."""
    head, *lines = table.split("\n")
    (tmp_path / "t.csv").write_text("\n".join([head, *(lines * 60)]) + "\n")
    task = task_of(classes=(), metric="pearson", problem_type="regression", files=[{"train": "t.csv"}])
    if numbers is None:
        with pytest.raises(InputError, match=r"t\.csv:2: 'label' is \"1,234\", not a number"):
            load_examples(find_source(task, tmp_path), judged_only=False)
        return
    data: Any = load_examples(find_source(task, tmp_path), judged_only=False)
    assert {example.label for split in data.splits.values() for example in split} == numbers
    names, fields = (re.split("[;\t]", line) for line in (head, lines[0]))
    assert rows_of(tmp_path / "t.csv")[0] == dict(zip(names, fields, strict=True))


def test_a_point_among_decimal_commas_may_separate_thousands(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("text;label\n" + "a b;0,5\na b;2,5\na c;0.125\n" * 60 + "a d;1.234\n")
    task = task_of(classes=(), metric="pearson", problem_type="regression", files=[{"train": "t.csv"}])
    for read in (
        lambda: load_examples(find_source(task, tmp_path), judged_only=False),
        lambda: write_task(tmp_path / "t.csv", tmp_path / "own", "own"),
    ):
        with pytest.raises(InputError, match=r"t\.csv:182: 'label' is \"1\.234\", not a number"):
            read()
    (tmp_path / "t.csv").write_text("text;label;n\n" + "a b;1.100.200;0,5\na c;1.100.300;0,5\n" * 30)
    own = find_task(write_task(tmp_path / "t.csv", tmp_path / "own", "own")[0])
    assert own.classes == ("1.100.200", "1.100.300"), "no number has two points"


def test_columns_are_found_in_any_spelling_of_their_names(tmp_path: Path) -> None:
    """With blanks around them, or with accents as macOS writes them; but the file's own name comes first."""
    decomposed = unicodedata.normalize("NFD", "Schlüssel")
    (tmp_path / "t.csv").write_text(f" text,{decomposed}, both ,both\n" + "a,yes,1,2\nb,no,1,2\n" * 10)
    task = task_of(template="{text}{both}", label="Schlüssel", files=[{"train": "t.csv"}])
    data: Any = load_examples(find_source(task, tmp_path), judged_only=False)
    assert {(input_of(example), example.label) for example in data.train} == {("a2", 1), ("b2", 0)}


def test_quotes_in_tsv_are_never_kept_unasked(tmp_path: Path) -> None:
    path = tmp_path / "t.tsv"
    path.write_text('text\tlabel\n"said ""yes"""\tyes\n')
    with pytest.raises(InputError, match=r"t\.tsv:2: a field in quotes: say `quotes: true`"):
        rows_of(path)
    assert rows_of(path, quotes=False)[0]["text"] == '"said ""yes"""'
    assert rows_of(path, quotes=True)[0]["text"] == 'said "yes"'
    (tmp_path / "train.tsv").write_bytes(path.read_bytes())
    (tmp_path / "dev.tsv").write_bytes(path.read_bytes())
    own = read_rows(find_source(task_table()["qqp"], tmp_path), "train")  # GLUE has no quoting
    assert next(iter(own))[1] == {"text": '"said ""yes"""', "label": "yes"}


def test_ragged_rows_are_named_by_line(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text('text,label\n"two\nlines",yes\n\none\n')
    with pytest.raises(InputError, match=r"t\.csv:5: 1 fields where the header names 2"):
        rows_of(path)
    path.write_text('text,label\nfine,yes\n"open,yes\nmore,no\n')
    with pytest.raises(InputError, match=r"t\.csv:3: broken table"):
        rows_of(path)


@pytest.mark.parametrize("name", ["t.csv", "t.tsv", "t.parquet"])
def test_no_table_has_two_columns_of_one_name(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if name == "t.parquet":
        pq.write_table(pa.table([["a"], ["yes"], ["b"]], names=["text", "label", "text"]), path)
    else:
        path.write_text("text,label,text\na,yes,b\n".replace(",", "," if name == "t.csv" else "\t"))
    with pytest.raises(InputError, match="the column text is named twice; drop or rename one"):
        rows_of(path)


def test_tables_that_excel_writes_another_way(tmp_path: Path) -> None:
    path = tmp_path / "t.tsv"
    path.write_text("text\tlabel\nfine\tyes\n", encoding="utf-16")
    with pytest.raises(InputError, match=r"t\.tsv:1: not UTF-8 \(UTF-16, .*iconv -f utf-16"):
        rows_of(path)
    path.write_text("text\tlabel\nünï\tyes\n", encoding="latin1")
    with pytest.raises(InputError, match=r"t\.tsv:2: not UTF-8 \(byte 0xfc .*iconv -f cp1252"):
        rows_of(path)
    path.write_text('text\tlabel\nfine\tyes\n"two\nlines"\tno\n')
    with pytest.raises(InputError, match=r"t\.tsv:3: a field in quotes: say `quotes: true`"):
        rows_of(path)
    (tmp_path / "t.csv").write_bytes(b"text,label\rfine,yes\r")
    with pytest.raises(InputError, match=r"t\.csv:1: broken table .*end a line in \\n"):
        rows_of(tmp_path / "t.csv")


def test_tables_with_odds_and_ends(tmp_path: Path) -> None:
    """An empty line, Excel's line `sep=`, columns of Excel's that nobody named, and a .tsv that has no tabs."""
    for name, written in (("t.tsv", "\ntext\tlabel\nfine\tyes\n"), ("t.csv", "sep=;\r\ntext;label\r\nfine;yes\r\n")):
        (tmp_path / name).write_text(written, newline="")
        assert [*rows_of_file(tmp_path / name)] == [(f"{tmp_path / name}:3", {"text": "fine", "label": "yes"})]
    (tmp_path / "t.tsv").write_text("text\tlabel\n\nfine\tyes\n\n")
    assert rows_of(tmp_path / "t.tsv") == [{"text": "fine", "label": "yes"}]
    (tmp_path / "one.tsv").write_text("text\n\nfine\n")
    assert rows_of(tmp_path / "one.tsv") == [{"text": ""}, {"text": "fine"}]
    (tmp_path / "t.csv").write_text("text;label;;\nfine;yes;;\n")
    assert rows_of(tmp_path / "t.csv") == [{"text": "fine", "label": "yes", "2": "", "3": ""}]
    (tmp_path / "t.tsv").write_text("text,label\nfine,yes\n")
    with pytest.raises(
        InputError, match=r"t\.tsv:1: no tabs between its columns: save it as \.csv, or name `delimiter`"
    ):
        rows_of(tmp_path / "t.tsv")
    assert rows_of(tmp_path / "t.tsv", delimiter=",") == [{"text": "fine", "label": "yes"}]


@pytest.mark.parametrize("late", [2, 300])
def test_a_column_of_a_workbook_has_texts_or_numbers(late: int, tmp_path: Path) -> None:
    """Its first cell may be a number; so is a column whose first text comes late, up to there."""
    pytest.importorskip("openpyxl")
    rows = [{"text": "a" if n == late else n, "stars": n % 5} for n in range(310)]
    pandas.DataFrame(rows).to_excel(tmp_path / "t.xlsx", index=False)
    found = rows_of(tmp_path / "t.xlsx")
    assert [row["stars"] for row in found] == [row["stars"] for row in rows]
    assert [row["text"] for row in found] == [n if n < late > 256 else str(rows[n]["text"]) for n in range(310)]


def test_an_empty_cell_means_the_same_in_a_workbook_and_in_a_table(tmp_path: Path) -> None:
    """For sets of classes, that none applies; among numbers it has no value."""
    pytest.importorskip("openpyxl")
    tags = ["x", "y", "", '["x", "y"]']
    frame = pandas.DataFrame([{"text": f"a {n}", "tags": tags[n % 4], "n": n if n % 2 else None} for n in range(40)])
    frame.to_csv(tmp_path / "t.csv", index=False)
    frame.replace("", None).to_excel(tmp_path / "t.xlsx", index=False)
    assert [row["n"] for row in rows_of(tmp_path / "t.xlsx")][:2] == [None, 1]
    of_files = []
    for name in ("t.csv", "t.xlsx"):
        given: dict[str, Any] = {"problem_type": "multi_label_classification", "metric": "micro_f1", "label": "tags"}
        task = task_of(**given, classes=["x", "y"], files=[{"train": name}])
        data: Any = load_examples(find_source(task, tmp_path), judged_only=False)
        assert data.left_out == 0
        of_files.append([[(one.texts, one.label) for one in examples] for examples in data.splits.values()])
    assert of_files[0] == of_files[1] and any(label == () for _, label in of_files[0][0])


def test_columns_by_number(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("1,a b,x\n0,c,y\n")
    assert rows_of(path, has_header=False) == [{"0": "1", "1": "a b", "2": "x"}, {"0": "0", "1": "c", "2": "y"}]
    task = task_of(files=[{"train": "t.csv", "has_header": False, "rename": {0: "label", 1: "text"}}])
    (tmp_path / "t.csv").write_text("1,a b,x\n0,c,y\n" * 10)
    data = load_examples(find_source(task, tmp_path), judged_only=False)
    assert isinstance(data, TaskData)
    assert (len(data.train), len(data.validation), len(data.test)) == (17, 1, 2)
    assert {(input_of(example), example.label) for example in data.train} == {("a b", 1), ("c", 0)}


def test_json_of_any_shape(tmp_path: Path) -> None:
    rows = [{"text": "a", "label": True}, {"text": "b", "label": False}]
    path = tmp_path / "t.json"
    shapes = (json.dumps(rows), json.dumps(rows, indent=2), "".join(json.dumps(row) + "\n" for row in rows))
    for text in shapes:
        path.write_text(text)
        assert rows_of(path) == rows
    path.write_text(json.dumps({"17": rows[0], "18": rows[1]}))
    assert rows_of(path) == [{"id": "17"} | rows[0], {"id": "18"} | rows[1]]
    for text in (f" {shapes[2]}", *(json.dumps(rows[0] | {"meta": {}}, indent=indent) for indent in (None, 1))):
        path.write_text(text)
        assert rows_of(path) in (rows, [rows[0] | {"meta": {}}]), "a blank before the lines, or one row"
    for content, name in (([1, 2], "0"), ({"17": rows[0], "18": rows[1], "_meta": "v1"}, "_meta")):
        path.write_text(json.dumps(content))
        with pytest.raises(InputError, match=f"row {name} is not an object"):
            rows_of(path)


def test_parquet_and_saved_data_sets(tmp_path: Path) -> None:
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "yes"])})
    rows = [{"text": f"text {n}", "label": n % 2} for n in range(2500)]
    table = datasets.Dataset.from_list(rows, features=features)
    table.to_parquet(tmp_path / "t.parquet")
    named = [row | {"label": ["no", "yes"][row["label"]]} for row in rows]  # the file says what its numbers mean
    assert rows_of(tmp_path / "t.parquet") == named
    pandas.DataFrame(rows).to_parquet(tmp_path / "t.parquet")
    assert rows_of(tmp_path / "t.parquet") == rows
    datasets.DatasetDict(train=table, test=table.select(range(10))).save_to_disk(str(tmp_path / "saved"))
    task = task_of(classes=["yes", "no"], files=[{"train": "train", "test": "test"}])
    source = find_source(task, tmp_path / "saved")
    data = load_examples(source, judged_only=False)
    assert isinstance(data, TaskData) and len(data.train) + len(data.validation) == 2500
    assert [example.label for example in data.test[:2]] == [1, 0]  # by name: the file's 0 is called no
    assert count_shared(data)["test"] == sum(
        input_of(example) in {input_of(other) for other in data.train} for example in data.test
    )
    with pytest.raises(InputError, match=r"saved holds several splits: name the folder of one \(test, train\)"):
        load_examples(find_source(task_of(files=[{"train": "saved"}]), tmp_path), judged_only=False)
    (tmp_path / "t.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(InputError, match=r"t\.parquet cannot be read \("):
        rows_of(tmp_path / "t.parquet")


NAMED = '{"info": {"features": {"label": {"_type": "ClassLabel", "names": %s}}}}'


@pytest.mark.parametrize("said", ["null", "5", "[]", '{"info": null}', '{"info": {"features": 5}}', NAMED % '{"0": 1}'])
def test_what_others_say_of_a_table_is_passed_over(tmp_path: Path, said: str) -> None:
    """Under the key by which `datasets` describes its columns; but for what is no JSON."""
    table = pa.table({"label": [0, 1]}).replace_schema_metadata({"huggingface": said})
    pq.write_table(table, tmp_path / "t.parquet")
    assert rows_of(tmp_path / "t.parquet") == [{"label": 0}, {"label": 1}]
    pq.write_table(table.replace_schema_metadata({"huggingface": "{"}), tmp_path / "t.parquet")
    with pytest.raises(InputError, match=r"t\.parquet cannot be read \(Expecting property name"):
        rows_of(tmp_path / "t.parquet")


def test_flipped_bits_of_an_arrow_file_do_not_end_the_process(tmp_path: Path) -> None:
    """Arrow would follow an offset of its texts to any place in memory."""
    with pa.ipc.new_file(tmp_path / "t.arrow", pa.schema({"text": pa.string()})) as file:
        file.write_table(pa.table({"text": [f"text {n}" for n in range(100)]}))
    data = bytearray((tmp_path / "t.arrow").read_bytes())
    offset = data.index(np.arange(0, 18, 6, dtype=np.int32).tobytes()) + 4 * 50  # of the 51st text
    data[offset + 3] ^= 1 << 6
    (tmp_path / "t.arrow").write_bytes(data)
    with pytest.raises(InputError, match=r"t\.arrow cannot be read \(.*[Oo]ffset"):
        rows_of(tmp_path / "t.arrow")


@pytest.mark.parametrize("place", ["t.parquet", "saved"])
def test_labels_inside_objects_have_the_names_of_the_data_set(tmp_path: Path, place: str) -> None:
    """The task numbers the classes the other way round."""
    said = {"label": datasets.ClassLabel(names=["no", "yes"])}
    features = datasets.Features({"text": datasets.Value("string"), "said": said})
    rows = [{"text": f"text {n}", "said": {"label": n % 2}} for n in range(40)]
    table = datasets.Dataset.from_list(rows, features=features)
    table.to_parquet(tmp_path / place) if place.endswith("t") else table.save_to_disk(tmp_path / place)
    task = task_of(classes=["yes", "no"], label="said.label", files=[{"train": place}])
    data = load_examples(find_source(task, tmp_path), judged_only=False)
    assert isinstance(data, TaskData)
    assert all(one.label == 1 - int(input_of(one).split()[1]) % 2 for one in data.train)


@pytest.mark.parametrize("kind", ["Sequence", "List"])
def test_labels_in_a_list_of_objects_have_the_names_of_the_data_set(kind: str, tmp_path: Path) -> None:
    """Earlier versions of `datasets` kept such a list as an object of lists."""
    inner = {"label": {"_type": "ClassLabel", "names": ["no", "yes"]}, "n": {"_type": "Value", "dtype": "int64"}}
    features = {"said": {"feature": inner, "_type": kind}}
    given: Any = {"label": [0, 1], "n": [0, 1]} if kind == "Sequence" else [{"label": 0, "n": 0}, {"label": 1, "n": 1}]
    described = {"huggingface": json.dumps({"info": {"features": features}})}
    pq.write_table(pa.table({"said": [given]}).replace_schema_metadata(described), tmp_path / "t.parquet")
    [row] = rows_of(tmp_path / "t.parquet")
    names = row["said"]["label"] if kind == "Sequence" else [one["label"] for one in row["said"]]
    assert names == ["no", "yes"]


def test_questions_without_ids_are_numbered(tmp_path: Path) -> None:
    """As annotation tools write SQuAD's form."""
    asked = [{"question": f"who {n}?", "answers": [{"text": "Ann", "answer_start": 6}]} for n in range(30)]
    asked[7]["id"] = "own"
    paragraphs = [{"context": "it is Ann", "qas": asked[:20]}, {"context": "or so Ann", "qas": asked[20:]}]
    (tmp_path / "train.json").write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    keys = {"family": "question_answering", "metric": "f1", "template": "{question} {context}"}
    task = Task.model_validate({"name": "mine", "files": [{"train": "train.json"}]} | keys)
    data: Any = load_examples(find_source(task, tmp_path), judged_only=False)
    named = {one.id: one.question for split in data.splits.values() for one in split}
    assert named == {"own" if n == 7 else str(n): f"who {n}?" for n in range(30)}


def test_candidates_may_stand_inside_objects(tmp_path: Path) -> None:
    span = {"text": ["b"], "start": [2]}
    row = {"question": "which?", "context": "a b", "answers": span, "meta": {"named": span}}
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row | {"id": n}) + "\n" for n in range(30)))
    files = [{"train": "t.jsonl", "rename": {"meta.named": "candidates"}}]
    shape = {"family": "question_answering", "metric": "f1", "template": "{question} {context}"}
    data = load_examples(find_source(Task(name="mine", files=files, **shape), tmp_path), judged_only=False)
    assert isinstance(data, TaskData) and all(one.candidates for one in data.train)


def test_labels_as_files_write_them() -> None:
    task = task_of(classes=["False", "True"])
    assert [label_index(task, "here", value) for value in (True, "True", 1, "1", 1.0, "1.0", "1.00")] == [1] * 7
    for wrong in (2, "1.5", 0.5, -1, "maybe", None):
        with pytest.raises(InputError, match="is not one of task"):
            label_index(task, "here", wrong)
    spelt = task_of(classes=["false", "true"])  # as JSON spells them; a table of pandas has a capital
    assert [label_index(spelt, "here", value) for value in (False, "False", "True", "true")] == [0, 0, 1, 1]


def test_names_that_are_numbers_are_compared_by_value() -> None:
    stars = task_of(classes=[0.5, 1.0, 1.5, 2.0])
    given = [0.5, 1, "1.50", 2, 2.0, "2", " 2"]
    assert [label_index(stars, "here", value) for value in given] == [0, 1, 2, 3, 3, 3, 3]
    for wrong in (0, 3, True):
        with pytest.raises(InputError, match=r"is not one of task 'mine': 0\.5, 1\.0, 1\.5, 2\.0; correct it, or map"):
            label_index(stars, "here", wrong)
    codes = task_of(classes=["1", "01", "9007199254740993"])
    assert [label_index(codes, "here", value) for value in (1, "01", 9007199254740993)] == [0, 1, 2]
    for wrong in ("1.0", 9007199254740992):  # which of the two; another, though it is the same float
        with pytest.raises(InputError, match="is not one of task"):
            label_index(codes, "here", wrong)


def test_blanks_around_a_label_and_forms_of_unicode_do_not_count() -> None:
    composed, decomposed = "d\u00e9j\u00e0", "de\u0301ja\u0300"
    for name in (composed, decomposed):
        task = task_of(classes=[name, "no"])
        given = [composed, decomposed, f" {decomposed}\t", "no ", "\u00a0no"]
        assert [label_index(task, "here", value) for value in given] == [0, 0, 0, 1, 1]
    odd = task_of(classes=["no", "no ", "yes"])  # a label that is written as a class is that class
    assert [label_index(odd, "here", value) for value in ("no", "no ", "yes ")] == [0, 1, 2]
    with pytest.raises(InputError, match="label ' no' is not one of task"):
        label_index(odd, "here", " no")


def test_labels_are_mapped_to_classes(tmp_path: Path) -> None:
    task = task_of(labels={"No": "no", 7: "yes", "0": "yes"})
    given = ["no", " No", 7, "7.0", 0, "1", 1]  # 0 is an index of a class only where `labels` does not name it
    assert [label_index(task, "here", value) for value in given] == [0, 0, 1, 1, 1, 1, 1]
    with pytest.raises(InputError, match="label 'NO' is not one of task"):
        label_index(task, "here", "NO")
    lists = [["Net", "net"], "Net, mail", []]
    assert read_label_lists(tmp_path, lists, classes=["mail", "net"], labels={"Net": "net"}) == [(1,), (0, 1), ()]
    assert "labels" not in task_of().model_dump() and "duplicates" not in task_of().model_dump()


def test_what_nobody_knows_is_a_number_in_any_form(tmp_path: Path) -> None:
    labels = [-1.0, 2.5, "-1.00", -1, 3.0, -1.5]
    for name in ("train", "test"):
        rows = [json.dumps({"text": f"{name} {n}", "label": label}) for n, label in enumerate(labels)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    layout = {"train": "train.jsonl", "test": "test.jsonl"}
    keys: dict[str, Any] = {"problem_type": "regression", "metric": "spearman", "classes": [], "unlabelled": [-1]}
    data: Any = load_examples(find_source(task_of(files=[layout], **keys), tmp_path), judged_only=False)
    assert ([example.label for example in data.test], data.left_out) == ([2.5, 3.0, -1.5], 6)


def read_label_lists(folder: Path, given: list[Any], **keys: Any) -> list[Any]:
    """The labels that a multi-label task reads of a file, and of one for test that is like it."""
    content = "".join(json.dumps({"text": f"text {n}", "label": label}) + "\n" for n, label in enumerate(given))
    for name in ("train", "dev", "test"):
        (folder / f"{name}.jsonl").write_text(content + "\n" * (name == "test"))
    layout = {"train": "train.jsonl", "validation": "dev.jsonl", "test": "test.jsonl"}
    problem = {"problem_type": "multi_label_classification", "metric": "micro_f1"}
    data = load_examples(find_source(task_of(files=[layout], **problem, **keys), folder), judged_only=False)
    assert isinstance(data, TaskData)
    return [example.label for example in data.train]


def test_a_label_may_be_a_0_or_1_for_each_class(tmp_path: Path) -> None:
    hot = [[0, 0, 1, 1], [1.0, 0.0, 0.0, 0.0], [False, True, True, False], "[0, 0, 0, 0]"]
    for classes in ("abcd", "0123"):
        assert read_label_lists(tmp_path, hot, classes=[*classes], multi_hot=True) == [(2, 3), (0,), (1, 2), ()]
    pair, two = [[0, 1], [1]], ["a", "b"]
    assert read_label_lists(tmp_path, pair, classes=two, multi_hot=False) == [(0, 1), (1,)]
    for labels, keys in ((pair, {}), (pair, {"multi_hot": True}), ([[0, 1], ["a"]], {"multi_hot": True})):
        with pytest.raises(InputError, match=r"jsonl:[12]: 'label' is .*, and task .* has 2 classes; say `multi_hot"):
            read_label_lists(tmp_path, labels, classes=two, **keys)
    for mixed in ([["a", "b"], ["c", "a", "c"]], [["a"], ["a", 0]]):
        with pytest.raises(InputError, match=r"jsonl:2: 'label' is .*, which has a class twice: name it once, or"):
            read_label_lists(tmp_path, mixed, classes=[*"abcd"])


@pytest.mark.parametrize(
    "written",
    ["['joy, or so', \"it's\"]", '["joy, or so", "it\'s"]', "[ 'joy, or so',\"it's\", ]", '["it\'s", "joy, or so"]\n'],
)
def test_lists_in_tables_are_read_as_python_and_json_write_them(written: str, tmp_path: Path) -> None:
    names = ["joy, or so", "it's", "joy"]
    assert read_label_lists(tmp_path, [written, "['joy']", "[joy]", "joy", "[]"], classes=names) == [
        (0, 1),
        *[(2,)] * 3,
        (),
    ]
    with pytest.raises(InputError, match=r"label .* is not one of task"):
        read_label_lists(tmp_path, ["['joy' \"it's\"]"], classes=names)


def test_a_text_that_names_a_class_is_that_class_alone(tmp_path: Path) -> None:
    given, classes = [["x; y", "z"], "x; y", " x; y ", "x,z"], ["x", "x; y", "z"]
    assert read_label_lists(tmp_path, given, classes=classes) == [(1, 2), (1,), (1,), (0, 2)]
    several = {"problem_type": "multi_label_classification", "metric": "micro_f1"}
    entries = [definition(task_of(classes=names, **several)) for names in (classes, ["x", "z"])]
    assert ["labels of one text" in entry for entry in entries] == [True, False], "scores of other readings stay apart"


def test_judgements_as_trec_writes_them(tmp_path: Path) -> None:
    for name, blank in (("a.qrels", " "), ("b.tsv", "\t"), ("c.txt", " ")):
        (tmp_path / name).write_text("".join(f"q{n}{blank}0{blank}d{n}{blank}1\n" for n in range(8)))
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps({"_id": f"d{n}", "text": "x"}) + "\n" for n in range(9)))
    (tmp_path / "queries.jsonl").write_text("".join(json.dumps({"_id": f"q{n}", "text": "?"}) + "\n" for n in range(8)))
    for name in ("a.qrels", "b.tsv", "c.txt"):
        task = task_of(family="retrieval", metric="ndcg_at_10", template="", classes=[], files=[{"test": name}])
        data = load_examples(find_source(task, tmp_path), judged_only=False)
        assert isinstance(data, Collection) and len(data.documents) == 9
        assert sum(len(judged) for judged in data.relevance.values()) + len(data.train) == 8


@pytest.mark.parametrize(("scheme", "theirs"), [("BILOU", BILOU), ("BIOES", IOBES)])
def test_schemes_are_read_as_seqeval_does(scheme: Any, theirs: Any) -> None:
    last, single = ("L", "U") if scheme == "BILOU" else ("E", "S")
    tags = ["O", f"{single}-a", "B-b", "I-b", f"{last}-b", f"{single}-b", "B-a", f"{last}-a", "O"]
    spans = {(entity.start, entity.end, entity.tag) for entity in Entities([tags], theirs).entities[0]}
    made = to_iob2(tags, scheme, "here")
    starts = [n for n, tag in enumerate(made) if tag[0] == "B"]
    ends = [next(m for m in range(n + 1, len(made) + 1) if m == len(made) or made[m][0] != "I") for n in starts]
    assert spans == {(a, b, made[a][2:]) for a, b in zip(starts, ends, strict=True)}


def test_words_may_hold_no_break_spaces(tmp_path: Path) -> None:
    path = tmp_path / "t.conll"
    path.write_text("10\u00a0000 B-x\n\u2009 O\n\u0085\tO\n", encoding="utf-8")
    task = task_table()["conll2003"]
    [(_, row)] = rows_of_file(path, FileLayout(), task.words, task.label)
    assert row == {task.words: ["10\u00a0000", "\u2009", "\u0085"], task.label: ["B-x", "O", "O"]}


def test_conllu_has_words_alone(tmp_path: Path) -> None:
    """What is written as one word (2-3) and words that are not written (3.1) are no words of the sentence."""
    fields = ["1 I _ PRON", "2-3 don't _ _", "2 do _ AUX", "3 n't _ PART", "3.1 know _ VERB", "4 # _ SYM"]
    lines = "\n".join(line.replace(" ", "\t") for line in fields)
    (tmp_path / "a.conllu").write_text(f"# sent_id = s1\n# text = I don't #\n{lines}\n\n")
    tags = ["PRON", "AUX", "PART", "SYM"]
    task = task_of(family="token_classification", metric="accuracy", classes=tags)
    [(_, row)] = rows_of_file(tmp_path / "a.conllu", FileLayout(), task.words, task.label)
    assert row == {"id": "s1", task.words: ["I", "do", "n't", "#"], task.label: tags}


def test_validation_and_test_must_differ(tmp_path: Path) -> None:
    text = "text,label\na,yes\nb,no\n"
    for name in ("train.csv", "dev.csv", "test.csv"):
        (tmp_path / name).write_text(text)
    task = task_of(files=[{"train": "train.csv", "validation": "dev.csv", "test": "test.csv"}])
    with pytest.raises(InputError, match=r"validation and test in .* are the same data \(dev\.csv, test\.csv\)"):
        load_examples(find_source(task, tmp_path), judged_only=False)
    (tmp_path / "dev.csv").write_text("text,label\na,yes\nc,no\n")
    data = load_examples(find_source(task, tmp_path), judged_only=False)
    assert count_shared(data) == {"validation": 1, "test": 2}


def test_a_test_without_labels_is_told(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("text,label\n" + "a,yes\nb,no\n" * 10)
    (tmp_path / "test.csv").write_text("text,label\na,-1\n")
    task = task_of(unlabelled=[-1])
    with pytest.raises(InputError, match="no labelled examples; leave `test` out"):
        load_examples(find_source(task, tmp_path), judged_only=False)


def test_what_yaml_makes_of_yes_and_no(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    kind = "family: sequence_classification\nmetric: accuracy\n"
    path.write_text(f'name: mine\n{kind}template: "{{a}}"\nclasses: [yes, no]\n')
    with pytest.raises(InputError, match="put a text in quotes"):
        find_task(str(path))


def test_mldr_as_published(tmp_path: Path) -> None:
    """Queries with their passages a line, documents by `docid`; lists of texts, as PubMedQA has them, are texts."""
    for split, first in (("train", 0), ("test", 6), ("dev", 0)):
        rows = [
            {"query_id": f"q{n}", "query": f"what is {n}", "positive_passages": [{"docid": f"d{n}", "text": f"it {n}"}]}
            for n in range(first, first + 6)
        ]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    documents = [{"docid": f"d{n}", "text": [f"it is {n}", "so"]} for n in range(12)]
    (tmp_path / "corpus.jsonl").write_text("\n".join(json.dumps(row) for row in documents))
    layout = FileLayout(format="mldr", train="train.jsonl", test="test.jsonl")
    task = Task(name="long", family="retrieval", metric="ndcg_at_10", files=(layout,))
    data = load_examples(find_source(task, tmp_path), judged_only=False)
    assert data.documents["d3"] == "it is 3 so" and data.queries["q7"] == "what is 7"  # type: ignore[union-attr]
    assert data.relevance["test"]["q7"] == {"d7": 1} and len(data.train) == 3  # type: ignore[union-attr]
    own = load_examples(find_source(find_task("mldr_en"), tmp_path), judged_only=False)
    assert len(own.documents) == 12 and own.relevance["validation"]["q2"] == {"d2": 1}  # type: ignore[union-attr]
    (tmp_path / "test.jsonl").write_text('{"query_id": "q1"}')
    with pytest.raises(InputError, match="not MLDR's form, lines of query_id"):
        load_examples(find_source(task, tmp_path), judged_only=False)


def test_drawn_questions_that_share_contexts_with_train_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No question is shared; articles and contexts hold whole ones out."""
    data = []
    for number in range(20):
        qas = [{"question": f"who {n}?", "answers": [{"text": "Ann", "answer_start": 6}]} for n in range(10)]
        data.append({"title": f"{number % 10}", "paragraphs": [{"context": f"it is Ann {number}", "qas": qas}]})
    (tmp_path / "train.json").write_text(json.dumps({"data": data}))
    keys = {"family": "question_answering", "metric": "f1", "template": "{question} {context}"}
    names = {}
    for group in (None, "context", "title"):
        task = Task.model_validate({"name": "mine", "files": [{"train": "train.json"}], "group": group} | keys)
        drawn: Any = load_examples(find_source(task, tmp_path), judged_only=False)
        said = " ".join(capsys.readouterr().err.split())
        contexts = {split: {one.context for one in part} for split, part in drawn.splits.items()}
        shared = {split: len(contexts[split] & contexts["train"]) for split in ("validation", "test")}
        counts = ", ".join(f"{both} of {len(contexts[split])} contexts of {split}" for split, both in shared.items())
        told = f"{counts} are in train too; say `group: context` to have whole contexts held out"
        assert (told in said) == all(shared.values()) == any(shared.values()) == (group is None)
        names[group] = {one.group for one in drawn.test}
    assert names["title"] <= {str(n) for n in range(10)}
    (tmp_path / "test.json").write_text(json.dumps({"data": data[:1]}))
    for group, way in {None: "say `group: context` and leave `test` out", "title": "leave `test` out"}.items():
        files = [{"train": "train.json", "test": "test.json"}]
        load_examples(
            find_source(Task.model_validate({"name": "mine", "files": files, "group": group} | keys), tmp_path), False
        )
        assert f"are in train too; {way} to have whole" in " ".join(capsys.readouterr().err.split())


def test_a_streamed_data_set_has_its_names_of_classes() -> None:
    said = {"text": datasets.Value("string"), "tags": datasets.List(datasets.ClassLabel(names=["O", "B-x"]))}
    table = datasets.Dataset.from_list([{"text": "a", "tags": [1, 0]}], features=datasets.Features(said))
    streamed = table.to_iterable_dataset()
    assert [*rows_in_memory(streamed)] == [*rows_in_memory(table)] == [{"text": "a", "tags": ["B-x", "O"]}]
    undescribed = datasets.IterableDataset.from_generator(lambda: iter([{"text": "a", "tags": [1, 0]}]))
    assert [*rows_in_memory(undescribed)] == [{"text": "a", "tags": [1, 0]}]


def test_a_table_has_fewer_choices_where_its_last_columns_are_empty(tmp_path: Path) -> None:
    names = ["A", "B", "C", "D"]
    keys = {"family": "multiple_choice", "template": "{question} {choice}", "choices": names, "classes": names}
    task = task_of(**keys, files=[{"train": "train.csv"}])
    header, full = "question,A,B,C,D,label\n", "q,w,x,y,z,D\n" * 30
    (tmp_path / "train.csv").write_text(f"{header}q,x,y, ,,B\n{full}")
    data: Any = load_examples(find_source(task, tmp_path), judged_only=False)
    texts = {tuple(text for text, _ in one.texts) for split in data.splits.values() for one in split}
    assert texts == {("q x", "q y"), ("q w", "q x", "q y", "q z")}
    for row, told in (
        ("q,x,,y,,A", r'\["x", "", "y"\] are not two or more choices'),
        ("q,x,,,,A", r'\["x", ""\] are not two or more choices'),
        ("q,x,y,,,C", "2 choices, where task 'mine' names 4"),
    ):
        (tmp_path / "train.csv").write_text(f"{header}{row}\n{full}")
        with pytest.raises(InputError, match=told):
            load_examples(find_source(task, tmp_path), judged_only=False)
