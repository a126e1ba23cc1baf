"""`biphase task check`, against counts by pandas."""

import re
from pathlib import Path

import pandas
import pytest

from biphase.api.folders import check_task
from biphase.cli.show import print_task
from biphase.errors import InputError

TASK = """name: mine
family: sequence_classification
metric: accuracy
template: "{text}"
classes: ["no", "yes", "never"]
files:
  - {train: train.csv, test: test.csv}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.yaml").write_text(TASK)
    texts = [f"text, number {n % 90}" for n in range(100)]
    table = pandas.DataFrame({"text": texts, "label": ["yes" if n % 4 else "no" for n in range(100)]})
    table[:80].to_csv(tmp_path / "train.csv", index=False)
    table[80:].to_csv(tmp_path / "test.csv", index=False)
    return tmp_path


def test_what_would_be_read(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = check_task(str(folder / "mine.yaml"), folder)
    test = pandas.read_csv(folder / "test.csv")
    assert facts["labels"]["test"] == test["label"].value_counts().to_dict()
    assert [row["examples"] for row in facts["rows"]] == [76, 4, 20] and facts["drawn"] == ["validation"]
    assert facts["rows"][2]["median_characters"] == test["text"].str.len().median()
    assert facts["also_in_train"]["test"] == 10 - facts["also_in_train"]["validation"]
    print_task(facts)
    said = capsys.readouterr().out
    assert "labels of test: yes 15, no 5; never: never\n" in said and str(folder / "train.csv") in said
    assert "drawn: validation\n" in said and max(map(len, said.replace(str(folder), "").splitlines())) <= 80
    table = pandas.read_csv(folder / "train.csv")
    pandas.concat([table, table]).to_csv(folder / "train.csv", index=False)
    facts = check_task(str(folder / "mine.yaml"), folder)
    print_task(facts)
    number = facts["also_in_train"]["validation"]
    said = capsys.readouterr().out
    told = "inputs of validation are also in train: the scores on validation may be too high\n"
    assert (
        told in said
        and "`duplicates: drop` in the task file leaves" in said
        and f"also in train: validation {number} · test" in said
        and facts["rows"][0]["copies_within"] > 60
    )


def test_copies_are_dropped_on_a_word(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Train loses those of test before validation is drawn from it; pandas counts the same."""
    table = pandas.read_csv(folder / "train.csv")
    table.loc[[20, 25, 28], "text"] = ["text, number 85", "text, number 21", "text, number 29"]
    table.to_csv(folder / "train.csv", index=False)
    test = pandas.read_csv(folder / "test.csv")
    (folder / "mine.yaml").write_text(f"duplicates: drop\n{TASK}")
    facts = check_task(str(folder / "mine.yaml"), folder)
    both = pandas.concat([test, table])
    first = both.groupby("text")["label"].transform("first")
    num_other, both = int((first != both["label"]).sum()), both.drop_duplicates("text")
    assert [row["examples"] for row in facts["rows"]] == [63, 4, 20] and len(both) == 87
    assert [row["copies_within"] for row in facts["rows"]] == [0, 0, 0] and not any(facts["also_in_train"].values())
    assert facts["copies_left_out"] == 100 - len(both)
    print_task(facts)
    said = capsys.readouterr()
    assert "copies left out: 13\n" in said.out and "`duplicates: drop`" not in said.out and num_other == 7
    told = "mine: copies left out: 13 in train; 7 of them had another label than the row that stays"
    assert told in " ".join(said.err.split())


def test_rows_without_label_or_text_are_counted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = pandas.read_csv(folder / "train.csv")
    table.loc[[3, 40], "text"] = ["", " "]
    table.loc[[0, 5, 6], "label"] = [None, "", " "]
    table.to_csv(folder / "train.csv", index=False)
    told = r"3 rows have no label \(.*train.csv:2\), 2 rows have no text \(the first: .*train.csv:5\)"
    with pytest.raises(InputError, match=f"{told}; fill them in, or leave them out: missing='drop'"):
        check_task(str(folder / "mine.yaml"), folder)
    (folder / "mine.yaml").write_text(f"missing: drop\n{TASK}")
    print_task(check_task(str(folder / "mine.yaml"), folder))
    said = capsys.readouterr()
    assert "left out: 5\n" in said.out and re.search(f"mine: left out: {told}", said.err)


def test_every_family_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    print_task(check_task("wnut17", None))
    said = capsys.readouterr().out
    assert "3,394" in said and "B-person" in said
