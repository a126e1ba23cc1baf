"""Lines and rows come with their numbers, out of any compression; what is wrong is told with file and line."""

import bz2
import gzip
import json
import lzma
import math
import os
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path

import pytest
import zstandard

import biphase.corpus.rows as readers
from biphase.corpus.rows import as_number, kind_of, read_json_file, read_json_lines, read_text_lines, rows_of_file
from biphase.corpus.text import find_text_sources
from biphase.embedding.questions import parse_filter
from biphase.errors import InputError

PACKINGS: list[tuple[str, Callable[[bytes], bytes]]] = [
    ("", lambda data: data),
    (".gz", gzip.compress),
    (".zst", zstandard.compress),
    (".GZ", gzip.compress),
    (".Zst", zstandard.compress),
]


@pytest.mark.parametrize(("ending", "pack"), PACKINGS)
def test_lines_keep_their_ends_and_say_how_much_was_read(ending: str, pack: Callable, tmp_path: Path) -> None:
    path = tmp_path / f"a.txt{ending}"
    path.write_bytes(pack("\ufeffone\r\n\ntwo\u2028three".encode()))
    lines = list(read_text_lines(path))
    assert [(number, line) for number, line, _ in lines] == [(1, "one\r\n"), (2, "\n"), (3, "two\u2028three")]
    assert lines[-1][2] == path.stat().st_size


@pytest.mark.parametrize(("ending", "pack"), PACKINGS)
def test_rows_are_numbered_by_line(ending: str, pack: Callable, tmp_path: Path) -> None:
    path = tmp_path / f"a.jsonl{ending}"
    path.write_bytes(pack(b'{"a": 1}\n\n  \n{"a": 2}'))
    assert [(number, row) for number, row, _ in read_json_lines(path)] == [(1, {"a": 1}), (4, {"a": 2})]


@pytest.mark.parametrize("ending", ["jsonl", "ndjson", "jsonlines", "jl"])
def test_lines_of_json_have_several_endings(ending: str, tmp_path: Path) -> None:
    """Of which one is that of programs in Julia, too."""
    path = tmp_path / f"a.{ending}"
    path.write_text('{"text": "b"}\n')
    assert [row for _, row in rows_of_file(path)] == [{"text": "b"}]
    assert (kind_of(path) == "jsonl") == (ending != "jl")


def test_a_json_file_may_have_many_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"a": [1, 2]}, indent=1))
    assert read_json_file(path) == {"a": [1, 2]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"a": 1}\n\n{"a"', r"a\.jsonl:3: broken JSON \(.*, column 5\): one object per line$"),
        (b"[1]\n", r"a\.jsonl:1: one JSON object per line is needed, here is \[1\]$"),
        (b'{"a": 1}\n{"a": "caf\xe9"}\n', r"a\.jsonl:2: not UTF-8 \(byte 0xe9 at position 10 of the line\); convert"),
    ],
)
def test_what_is_wrong_is_told_with_file_and_line(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        list(read_json_lines(path))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.txt does not exist$"):
        list(read_text_lines(tmp_path / "none.txt"))
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"a line\n" * 100_000)[:-20])
    with pytest.raises(InputError, match=r"a\.txt\.gz cannot be read \(.*\); it is damaged, cut short or"):
        list(read_text_lines(tmp_path / "a.txt.gz"))
    (tmp_path / "b.json").write_text("[1,\n2")
    with pytest.raises(InputError, match=r"b\.json:2: broken JSON \(.*\)$"):
        read_json_file(tmp_path / "b.json")


@pytest.mark.parametrize(
    ("name", "content", "kind"),
    [
        ("a.xls", b"\xd0\xcf\x11\xe0\xa1\xb1", "an old workbook"),
        ("a.csv.zip", b"PK\x03\x04\x14\x00\x00\xff", "a zip archive"),
        ("a.csv", b"PK\x03\x04\x14\x00\x00\x00\n", "a zip archive"),
        ("a.jsonl.bz2", bz2.compress(b"{}"), "bzip2"),
        ("a.tsv.xz", lzma.compress(b"a\tb"), "xz"),
    ],
)
def test_packed_files_are_named_as_what_they_are(name: str, content: bytes, kind: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=rf"{name} is {kind}, not a text: unpack it, or save it as \.xlsx or \.csv"):
        list(rows_of_file(tmp_path / name))


@pytest.mark.parametrize("ending", ["jsonl", "json", "csv", "txt", "parquet", "xlsx", "conllu"])
def test_a_pipe_is_named_as_such(ending: str, tmp_path: Path) -> None:
    """Its content would be gone after the first look at it."""
    if ending == "xlsx":
        pytest.importorskip("openpyxl")
    path = tmp_path / f"a.{ending}"
    os.mkfifo(path)
    for read in (lambda: list(rows_of_file(path)), lambda: find_text_sources(str(path))):
        with pytest.raises(InputError, match=r"a\..* is a pipe or a device; write its content to a file"):
            read()
    with pytest.raises(InputError, match="/dev/null is a pipe or a device"):
        list(rows_of_file(Path("/dev/null")))


@pytest.mark.parametrize(
    ("first", "told"), [("[" * 5000, "nested more than 100 deep"), ("1" * 5000, "Exceeds the limit .*digits")]
)
def test_a_first_line_that_no_parser_likes(first: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(f'{{"a": {first}\n{{"a": 1}}\n')
    # Later versions of Python read deeper values, and find that the value does not end.
    with pytest.raises(InputError, match=rf"a\.json:\d: broken JSON \(({told}|Expecting)"):
        list(rows_of_file(path))


@pytest.mark.parametrize(("ending", "pack"), PACKINGS)
def test_a_line_is_bounded(ending: str, pack: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few kilobytes of .zst may hold a line of gigabytes."""
    monkeypatch.setattr(readers, "MAX_LINE_BYTES", 1000)
    path = tmp_path / f"a.txt{ending}"
    path.write_bytes(pack(b"short\n" + b"x" * 999 + b"\n" + b"y" * 5_000_000))
    lines = read_text_lines(path)
    assert [len(next(lines)[1]) for _ in range(2)] == [6, 1000]
    with pytest.raises(InputError, match=r"a\.txt.*:3: the line has more than 1,000 bytes; split it"):
        next(lines)


def test_numbers_that_no_float_holds_are_infinite() -> None:
    """An integer of any length, as JSON allows, is what the same digits in a table are."""
    for value, number in (
        (10**400, math.inf),
        ("1" * 400, math.inf),
        (-(10**400), -math.inf),
        ("1e3", 1000),
        (" 2 ", 2),
    ):
        assert as_number(value) == number
    assert [as_number(value) for value in (True, None, "two", [1], Decimal("sNaN"))] == [None] * 5
    assert parse_filter("year>2001").holds({"year": 10**400}) and not parse_filter("year<2001").holds({"year": 10**400})
