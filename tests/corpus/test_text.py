import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

import biphase
from biphase.corpus import text as sources_of_text
from biphase.corpus.rows import saved_tables
from biphase.corpus.text import (
    Document,
    cut_words,
    find_language,
    find_text_sources,
    join_words,
    keep_rows,
    read_documents,
    sample_texts,
)
from biphase.errors import InputError

DOCUMENTS = [Document("a", "First.\nTwo lines."), Document("b", "Zweiter: äöü, 日本語, 🙂"), Document("c", "third")]


def jsonl(documents: Iterable[Document]) -> bytes:
    return "".join(json.dumps({"id": d.id, "text": d.text, "n": 1}) + "\n" for d in documents).encode()


def read(path: Path | str, **options: Any) -> list[Document]:
    return [d for source in find_text_sources([path]) for d in read_documents(source, **options)]


def fails(path: Path | str, *parts: str, **options: str) -> str:
    """The one line that `read` fails with; it holds all `parts`."""
    with pytest.raises(InputError) as caught:
        read(path, **options)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message
    return message


@pytest.mark.parametrize(
    ("name", "pack"),
    [
        ("d.jsonl", lambda data: data),
        ("d.jsonl.gz", gzip.compress),
        ("d.jsonl.zst", zstandard.compress),
        ("two_frames.jsonl.zst", lambda data: zstandard.compress(data[:20]) + zstandard.compress(data[20:])),
        ("bom.jsonl", lambda data: b"\xef\xbb\xbf" + data + b"\n\n"),
    ],
)
def test_jsonl_in_any_packing(tmp_path: Path, name: str, pack) -> None:
    (tmp_path / name).write_bytes(pack(jsonl(DOCUMENTS)))
    assert read(tmp_path / name) == DOCUMENTS


def test_parquet(tmp_path: Path) -> None:
    columns = {"id": [d.id for d in DOCUMENTS], "text": [d.text for d in DOCUMENTS], "other": [1, 2, 3]}
    pq.write_table(pa.table(columns), tmp_path / "d.parquet", row_group_size=2)
    assert read(tmp_path / "d.parquet") == DOCUMENTS
    found = list(read_documents(find_text_sources([tmp_path / "d.parquet"])[0]))
    assert len(found) == 3 and found[-1].num_bytes == (tmp_path / "d.parquet").stat().st_size


def test_what_datasets_saves_to_disk(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    columns = {"id": [d.id for d in DOCUMENTS], "meta": [{"text": d.text} for d in DOCUMENTS], "other": [1, 2, 3]}
    saved = datasets.Dataset.from_dict(columns)
    saved.save_to_disk(tmp_path / "saved", num_shards=2)
    datasets.load_from_disk(tmp_path / "saved").map(lambda row: {"other": 0})  # leaves a file in the folder
    assert len(list((tmp_path / "saved").glob("*.arrow"))) == 3
    asked: list[Path] = []
    with monkeypatch.context() as patch:
        patch.setattr(sources_of_text, "saved_tables", lambda folder: asked.append(folder) or saved_tables(folder))
        sources = find_text_sources([tmp_path / "saved"])
    assert asked == [tmp_path / "saved"], "not for each of its files"
    assert "cache-" in capsys.readouterr().err
    found = [document for source in sources for document in read_documents(source, "meta.text")]
    assert found == DOCUMENTS
    assert found[-1].num_bytes <= sources[-1].path.stat().st_size
    fails(tmp_path / "saved", "'text'", "id, meta, meta.text, other")
    whole = datasets.DatasetDict({"train": saved, "test": saved})
    whole.save_to_disk(tmp_path / "whole")
    fails(tmp_path / "whole", r"holds several splits: name the folder of one (test, train)")
    # The other form of Arrow's files.
    with pa.ipc.new_file(tmp_path / "d.arrow", pa.schema({"text": pa.string()})) as file:
        file.write(pa.record_batch({"text": [d.text for d in DOCUMENTS]}))
    assert [one.text for one in read(tmp_path / "d.arrow")] == [d.text for d in DOCUMENTS]
    whole_file = (tmp_path / "saved" / "data-00000-of-00002.arrow").read_bytes()
    (tmp_path / "cut.arrow").write_bytes(whole_file[: len(whole_file) // 2])
    fails(tmp_path / "cut.arrow", "damaged", text_field="meta.text")


def test_a_csv_is_text_where_it_is_named(tmp_path: Path) -> None:
    """In a folder it is as often a list of the texts in it."""
    (tmp_path / "d.csv").write_text('\ufeffid;text\r\n1;"one; two\r\nthree"\r\n;four\r\n', newline="")
    assert [(document.id, document.text) for document in read(tmp_path / "d.csv")] == [
        *(("1", "one; two\r\nthree"), ("d.csv:4", "four"))
    ]
    assert [document.text for document in read(tmp_path / "d.csv", text_field="id")] == ["1", ""]
    fails(tmp_path / "d.csv", ":2:", "'content'", "id, text", text_field="content")
    (tmp_path / "d.txt").write_text("five")
    assert [Path(source.name).name for source in find_text_sources([tmp_path])] == ["d.txt"]


def test_other_columns_of_a_csv(tmp_path: Path) -> None:
    """Blanks around their names do not count, nor does a decimal comma."""
    (tmp_path / "d.csv").write_text("id, text, year , e\u0301t\u00e9\na, one, 1958, 1\n")
    (tmp_path / "e.csv").write_text("text;price;note;tags\none;2,50;1,5 or so;1,2\ntwo;call, mail, ask;0,5;1, 2,3\n")
    (tmp_path / "f.csv").write_text("text;price\none;2,5\ntwo;0,5\nthree;1.234\n")
    first, *others = (
        document
        for source in find_text_sources([tmp_path / f"{name}.csv" for name in "def"])
        for document in read_documents(source, with_columns=True)
    )
    assert (first.id, first.text, first.columns) == ("a", " one", {"year": " 1958", "\u00e9t\u00e9": " 1"})
    assert [other.columns for other in others] == [
        {"price": "2.50", "note": "1,5 or so", "tags": "1,2"},
        {"price": "call, mail, ask", "note": "0.5", "tags": "1, 2,3"},
        *({"price": "2.5"}, {"price": "0.5"}, {}),  # 1.234 may be a thousand
    ]


def test_other_columns_leave_out_bytes_and_empty_cells(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")
    table = pa.table({"text": ["one"], "picture": [b"\x00" * 9], "tag": [""]})
    pa.parquet.write_table(table, tmp_path / "d.parquet")
    (tmp_path / "d.csv").write_text("text,tag,note\none, ,new\n")
    for name, columns in (("d.parquet", {"tag": ""}), ("d.csv", {"note": "new"})):
        [source] = find_text_sources([tmp_path / name])
        assert [document.columns for document in read_documents(source, with_columns=True)] == [columns]


def test_an_empty_id_is_none(tmp_path: Path) -> None:
    rows = [
        {"id": "", "text": "a"},
        {"id": " ", "_id": "b", "text": "b"},
        {"id": None, "text": "c"},
        {"id": 0, "text": ""},
    ]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ids = [document.id for document in read(tmp_path / "d.jsonl", id_fields=("id", "_id"))]
    assert ids == ["d.jsonl:1", "b", "d.jsonl:3", "0"]


def test_txt_as_file_paragraphs_or_lines(tmp_path: Path) -> None:
    path = tmp_path / "d.txt"
    path.write_bytes(b"one\r\n two\n\n  \n\nthree\n")
    assert read(path) == [Document("d.txt", "one\r\n two\n\n  \n\nthree\n")]
    assert read(path, txt_documents="paragraphs") == [Document("d.txt:1", "one\r\n two"), Document("d.txt:6", "three")]
    lines = [("1", "one"), ("2", " two"), ("3", ""), ("4", "  "), ("5", ""), ("6", "three")]
    assert read(path, txt_documents="lines") == [Document(f"d.txt:{number}", text) for number, text in lines]
    fails(path, "paragraphs", "did you mean", txt_documents="paragraph")


def test_other_fields_and_rows_without_id(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text('{"body": "x", "key": 7}\n\n{"body": ""}\n')
    assert read(path, text_field="body", id_fields=["key"]) == [Document("7", "x"), Document("d.jsonl:3", "")]


def test_a_template_joins_fields(tmp_path: Path) -> None:
    """A document is empty, and counted as such, if all of its fields are."""
    rows = [{"title": "A {b}", "meta": {"body": "c"}}, {"title": "", "meta": {"body": " "}}]
    rows.append({"title": None, "meta": {"body": "d"}})
    template = "{title}\\n{meta.body}{{}}"
    expected = ["A {b}\nc{}", " ", "\nd{}"]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "d.parquet")
    for name in ("d.jsonl", "d.parquet"):
        assert [document.text for document in read(tmp_path / name, text_field=template)] == expected
    [source] = find_text_sources(tmp_path / "d.jsonl")
    first = next(read_documents(source, "{title}", with_columns=True))
    assert (first.text, first.columns) == ("A {b}", {})
    fails(tmp_path / "d.jsonl", ":3:", "'title' is null", text_field="{title}")
    fails(tmp_path / "d.jsonl", ":1:", "no column 'head'", text_field="{head} {title}")
    fails(tmp_path / "d.jsonl", "a brace that is text is doubled", text_field="{title")


def test_a_template_takes_a_column_that_only_some_rows_have(tmp_path: Path) -> None:
    """As readers of BEIR's files do. A column that none of the first rows has may be mistyped."""
    path = tmp_path / "d.jsonl"
    path.write_text('{"text": "a"}\n{"title": "B", "text": "b"}\n{"url": "c"}\n')
    [source] = find_text_sources(path)
    documents = read_documents(source, "{title}\n{text}")
    assert [next(documents).text for _ in range(2)] == ["\na", "B\nb"]
    fails(path, ":3:", "'title' is null", text_field="{title}\n{text}")
    fails(path, ":1:", "no column 'titel'", text_field="{titel}\n{text}")


def test_folders_are_recursive_and_sorted_and_say_what_stays_out(tmp_path: Path, capsys) -> None:
    for name in ("b.txt", "a/z.txt", "a/b.jsonl", "notes.md", "[b].rtf", "c.doc", "d.doc", "e.doc", ".hidden/x.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(jsonl(DOCUMENTS[:1]))
    names = [Path(source.name).relative_to(tmp_path).as_posix() for source in find_text_sources([tmp_path])]
    assert names == ["a/b.jsonl", "a/z.txt", "b.txt", "notes.md"]
    told = capsys.readouterr().err.replace("\n", "")
    left_out = [str(tmp_path / name) for name in ("[b].rtf", "c.doc", "d.doc")]
    assert f"4 of 8 files are not text sources and left out: {', '.join(left_out)} and 1 more" in told
    globbed = find_text_sources([f"{tmp_path}/**/*.txt"])
    assert [source.name for source in globbed] == [f"{tmp_path}/a/z.txt", f"{tmp_path}/b.txt"]
    for name in ("c.doc", "d.doc", "e.doc", "[b].rtf"):
        (tmp_path / name).unlink()
    for pattern in ("**", "**/*", "*"):  # which match a folder and, but for the last, what is in it
        named = [source.name for source in find_text_sources(f"{tmp_path}/{pattern}")]
        assert named == [str(tmp_path / name) for name in names], pattern


def test_links_that_are_not_gone_into_are_told(tmp_path: Path, capsys) -> None:
    for name in ("a/a.txt", "links/b.txt"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("text")
    (tmp_path / "links" / "a.txt").symlink_to(tmp_path / "a" / "a.txt")
    (tmp_path / "links" / "folder").symlink_to(tmp_path / "a")
    (tmp_path / "links" / "lost.txt").symlink_to("nowhere")
    (tmp_path / "links" / "named.txt").symlink_to(tmp_path / "c.txt")
    (tmp_path / "c.txt").write_text("text")
    assert [d.id for d in read(tmp_path / "links")] == ["a.txt", "b.txt", "named.txt"], "by the names of links"
    assert "2 of 5 files are not text sources" in capsys.readouterr().err


def test_a_link_is_read_as_its_own_ending_says(tmp_path: Path) -> None:
    """The Hub's cache has links to files that have no ending."""
    (tmp_path / "blob").write_text("some text")
    (tmp_path / "a.txt").symlink_to(tmp_path / "blob")
    assert [document.text for document in read(tmp_path / "a.txt")] == ["some text"]


def test_markdown_is_text(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("# Title\n\nText.\n")
    (tmp_path / "b.md.gz").write_bytes(gzip.compress(b"more"))
    assert read(f"{tmp_path}/*.md") == [Document("a.md", "# Title\n\nText.\n")]
    assert [document.text for document in read(tmp_path)] == ["# Title\n\nText.\n", "more"]


def test_an_empty_file_stays_out_and_one_without_documents_is_an_empty_document(tmp_path: Path, capsys) -> None:
    (tmp_path / "a.txt").write_text("text")
    for name, content in {"b.txt": b"", "c.jsonl": b"", "d.jsonl": b"\n\n", "e.txt.gz": gzip.compress(b"")}.items():
        (tmp_path / name).write_bytes(content)
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "f.parquet")
    expected = [("a.txt", "text"), ("d.jsonl", ""), ("e.txt.gz", ""), ("f.parquet", "")]
    assert read(tmp_path) == [Document(name, text) for name, text in expected]
    told = capsys.readouterr().err.replace("\n", "")
    assert f"2 of 6 files are empty and left out: {tmp_path}/b.txt, {tmp_path}/c.jsonl" in told
    fails(f"{tmp_path}/[bc].*", f"{tmp_path}/b.txt is empty, as are all other sources")


def test_a_name_with_dots_reaches_into_objects(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text(
        '{"meta": {"text": "inside", "key": {"n": 1}}}\n{"meta.text": "beside", "meta": {"text": "inside"}}\n'
    )
    names: Any = {"text_field": "meta.text", "id_fields": ["meta.key.n"]}
    assert read(path, **names) == [Document("1", "inside"), Document("d.jsonl:2", "beside")]
    fails(path, ":1:", "'meta.body'", "meta, meta.text, meta.key, meta.key.n", text_field="meta.body")
    pq.write_table(pa.table({"meta": [{"text": "inside", "key": {"n": 1}}], "n": [2]}), tmp_path / "d.parquet")
    assert read(tmp_path / "d.parquet", **names) == [Document("1", "inside")]
    fails(tmp_path / "d.parquet", "'text'", "meta.text, meta.key, meta.key.n")


def test_a_fingerprint_changes_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "d.txt"
    path.write_text("one")
    before = find_text_sources([path])[0]
    assert before == find_text_sources([path])[0]
    assert before.num_bytes == 3
    path.write_text("three")
    assert find_text_sources([path])[0].fingerprint != before.fingerprint


@pytest.mark.parametrize(
    ("name", "content", "parts"),
    [
        ("d.jsonl", b'{"text": "a"}\n{"text": "b"\n', [":2:", "broken JSON"]),
        ("d.jsonl", b'{"text": "a"}\n["b"]\n', [":2:", 'here is ["b"]']),
        (
            "d.jsonl",
            b'{"text": "a"}\n{"txt": "b", "url": "u"}\n',
            [":2:", "'text'", "txt, url", "as text_field (--text-field)"],
        ),
        ("d.jsonl", b'{"text": "a"}\n\n{"text": null}\n', [":3:", "null"]),
        ("d.jsonl", b'{"text": 5}\n', [":1:", "'text' is 5, not a text"]),
        ("d.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', [":2:", "not UTF-8", "0xff", "position 10"]),
        ("d.jsonl", b'{"text": "a"}\n{"text": "\\ud800"}\n', [":2:", "surrogate"]),
        ("d.txt", b"good\nb\xe4d\n", [":2:", "not UTF-8", "0xe4", "position 1"]),
        ("d.txt", b"", ["is empty"]),
        ("d.jsonl.gz", b"not gzip at all", ["damaged"]),
        ("d.jsonl.gz", gzip.compress(jsonl(DOCUMENTS) * 100)[:-20], ["cut short"]),
        ("d.jsonl.zst", zstandard.compress(jsonl(DOCUMENTS) * 100)[:-5], ["cut short"]),
        ("d.parquet", b"PAR1 and nothing else", ["damaged"]),
        ("d.arrow", b"no table at all", ["damaged"]),
        ("d.docx", b"x", ["unknown ending", ".jsonl"]),
    ],
)
def test_bad_files_are_named_with_line_and_remedy(tmp_path: Path, name: str, content: bytes, parts: list[str]) -> None:
    (tmp_path / name).write_bytes(content)
    fails(tmp_path / name, str(tmp_path / name), *parts)


def test_bad_parquet_columns(tmp_path: Path) -> None:
    path = tmp_path / "d.parquet"
    pq.write_table(pa.table({"content": ["a", None]}), path)
    fails(path, "'text'", "content")
    fails(path, "row 2", "null", text_field="content")
    pq.write_table(pa.table({"title": ["a"], "body": ["b"], "url": ["c"]}), path)
    fails(path, "no column 'text'; the columns are: title, body, url", text_field="{title}\n{text}")
    pq.write_table(pa.table([["a"], ["b"], ["c"]], names=["text", "id", "text"]), path)
    fails(path, "the column text is named twice")


def test_bad_names(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "train.jsonl").write_bytes(jsonl(DOCUMENTS))
    (tmp_path / "empty").mkdir()
    fails(tmp_path / "trian.jsonl", "does not exist", "did you mean 'train.jsonl'")
    fails(tmp_path / "nowhere" / "d.txt", "there is no folder")
    fails(f"{tmp_path}/*.parquet", "matches no file")
    fails(tmp_path / "empty", "no file that can be read")
    monkeypatch.chdir(tmp_path)
    fails("data/missing.jsonl", "does not exist")  # looks like owner/name, but the ending says file
    fails("empty/missing", "does not exist")  # the folder is here, so no owner on the Hub is meant
    fails("hub:one-word", "hub:owner/name")
    fails("", "a source without a name")
    with pytest.raises(InputError, match=r"the source .* is named twice"):
        find_text_sources(["train.jsonl", tmp_path])
    with pytest.raises(InputError, match="no source"):
        find_text_sources([])


class FakeHub:
    """Stands for huggingface_hub.HfApi: any revision is at this commit."""

    def resolve_revision(self, dataset: str, *, repo_type: str, revision: str | None) -> "FakeHub":
        if dataset == "no/network":
            raise ConnectionError("Name or service not known\nmore")
        self.resolved = "0123abcd"
        return self


def test_hub_data_sets_are_pinned_and_split_into_their_files(tmp_path: Path, monkeypatch) -> None:
    import datasets
    import huggingface_hub

    for index in range(3):
        (tmp_path / f"{index}.jsonl").write_bytes(jsonl([Document(f"{index}", f"text {index}")]))
    asked = {}

    def load_rows(path: str, name: str | None, split: str, revision: str, streaming: bool):
        asked.update(path=path, name=name, split=split, revision=revision, streaming=streaming)
        return datasets.load_dataset("json", data_files=f"{tmp_path}/*.jsonl", split=split, streaming=True)

    monkeypatch.setattr("biphase.corpus.text.load_rows", load_rows)
    monkeypatch.setattr(huggingface_hub, "HfApi", FakeHub)
    sources = find_text_sources(["HuggingFaceFW/fineweb-edu:sample-10BT"])
    assert asked["path"] == "HuggingFaceFW/fineweb-edu"
    assert (asked["name"], asked["split"], asked["revision"]) == ("sample-10BT", "train", "0123abcd")
    assert asked["streaming"]
    assert sources[0].name == "hub:HuggingFaceFW/fineweb-edu:sample-10BT:train@0123abcd#1/3"
    assert [d.text for source in sources for d in read_documents(source)] == ["text 0", "text 1", "text 2"]
    assert all(source.num_bytes is None for source in sources)
    with pytest.raises(ValueError, match="validation"):
        find_text_sources(["hub:a/b::validation@main"])
    fails("no/network", "cannot be fetched from the Hub", "Name or service not known")


def test_sample_texts_takes_from_every_source(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_bytes(jsonl(Document(f"{i}", name * 100) for i in range(50)))
    sources = find_text_sources([tmp_path])
    texts = list(sample_texts(sources, limit_mb=0.001))
    assert texts == ["a" * 100] * 5 + ["b" * 100] * 5
    assert len(list(sample_texts(sources))) == 100


def test_passages_have_as_many_words_in_every_script() -> None:
    def cut(text: str, num_words: int) -> list[str]:
        return [join_words(passage) for passage in cut_words(text, num_words)]

    assert cut(" one two\n three  four five", 2) == ["one two", "three four", "five"]
    assert cut("BERT 模型は 120\n", 9) == ["BERT 模型は 120"]
    chinese = "永和九年，歲在癸丑，暮春之初，會於會稽山陰之蘭亭。" * 40
    passages = cut(chinese, 120)
    assert "".join(passages) == chinese and all(120 <= len(passage) <= 240 for passage in passages[:-1])


def test_rows_in_memory_replace_no_file(tmp_path: Path) -> None:
    """A user's file may have the name that theirs begins with."""
    mine = tmp_path / "texts.jsonl"
    mine.write_text("mine")
    path = keep_rows([{"text": "a"}], tmp_path, "texts")
    assert keep_rows([{"text": "a"}], tmp_path, "texts") == path and path.read_text() == '{"text": "a"}\n'
    assert {*tmp_path.iterdir()} == {mine, path} and mine.read_text() == "mine"


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
