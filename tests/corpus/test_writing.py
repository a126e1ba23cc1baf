from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from biphase.corpus.writing import refuse_rows, write_rows
from biphase.errors import InputError


@pytest.mark.parametrize("ending", [".csv", ".tsv", ".xlsx"])
def test_a_column_of_the_users_is_never_replaced(ending: str, tmp_path: Path) -> None:
    rows = [{"text": "a", "probability_no": 7, "probabilities": {"no": 0.25, "yes": 0.75}}]
    with (tmp_path / f"a{ending}").open("w") as sink:
        if ending == ".xlsx":
            pytest.importorskip("openpyxl")
        with pytest.raises(InputError, match="row 1: the file has a column 'probability_no' already; rename it"):
            write_rows(rows, sink, ending, None)


@pytest.mark.parametrize("ending", [".csv", ".tsv", ".xlsx"])
@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([{"a": 1}, {"a": 2, "b": 3}], "row 2 has a column 'b' that the first row lacks"),
        ([{"a": 1}, {"a": "x" * 32_768}], "row 2: a text of more than 32,767 characters"),
    ],
)
def test_rows_that_a_table_cannot_hold_are_found(ending: str, rows: list[Any], told: str) -> None:
    if ending == ".xlsx":
        pytest.importorskip("openpyxl")
    elif "32,767" in told:
        refuse_rows(rows, ending)
        return
    with pytest.raises(InputError, match=told):
        refuse_rows(rows, ending)
    refuse_rows(rows[:1], ending)
    refuse_rows(rows, ".jsonl")


def test_a_sheet_keeps_all_digits_of_an_id(tmp_path: Path) -> None:
    openpyxl = pytest.importorskip("openpyxl")
    ids = [999_999_999_999_999, 1_234_567_890_123_456_789, Decimal(2**70), -(2**53) - 1, True]
    with (tmp_path / "a.xlsx").open("w") as sink:
        write_rows([{"id": id} for id in ids], sink, ".xlsx", None)
    [_, *rows] = openpyxl.load_workbook(tmp_path / "a.xlsx").active.iter_rows(values_only=True)
    assert [id for (id,) in rows] == [ids[0], *map(str, ids[1:4]), True]


@pytest.mark.parametrize(
    ("ending", "value", "told"),
    [
        (".parquet", {}, r"the column 'a' does not fit one type \(.*\); write a .jsonl file"),
        (".parquet", [{}], "the column 'a' does not fit one type"),
        (".xlsx", datetime(2026, 1, 1, tzinfo=UTC), r"row 1 does not fit a sheet \(.*zones.*\); write a .jsonl"),
    ],
)
def test_what_a_library_cannot_write_is_refused_before_the_prediction(ending: str, value: Any, told: str) -> None:
    if ending == ".xlsx":
        pytest.importorskip("openpyxl")
    with pytest.raises(InputError, match=told):
        refuse_rows([{"text": "b", "a": value}], ending)
