import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from biphase.errors import InputError
from biphase.tasks.examples import load_examples
from biphase.tasks.own import write_task
from biphase.tasks.sources import definition, find_source
from biphase.tasks.spec import find_task
from biphase.tasks.splits import TaskData, hold_out

RNG = np.random.default_rng(7)
PAGES = np.repeat([f"page {number}" for number in range(60)], RNG.integers(1, 20, 60))
LABELS = RNG.choice(["a", "b", "c"], len(PAGES), p=[0.6, 0.3, 0.1])
ROWS = [
    {"text": f"some words of row {number}", "label": label, "page": page}
    for number, (label, page) in enumerate(zip(LABELS.tolist(), PAGES.tolist(), strict=True))
]


def read(splits: dict[str, list[dict]], folder: Path) -> TaskData:
    file, data = write_task(splits, folder, "own", "{text}", group="page")
    examples = load_examples(find_source(find_task(file), data), judged_only=False)
    assert isinstance(examples, TaskData)
    return examples


def test_whole_groups_are_held_out_in_the_shares_of_rows_and_classes(tmp_path: Path, capsys) -> None:
    data = read({"train": ROWS}, tmp_path)
    pages = {split: {example.group for example in examples} for split, examples in data.splits.items()}
    assert not (
        pages["train"] & pages["test"] or pages["train"] & pages["validation"] or pages["test"] & pages["validation"]
    )
    assert len(data.test) == pytest.approx(len(ROWS) / 10, abs=10)
    shares = [
        np.bincount([example.label for example in part], minlength=3) / len(part) for part in (data.train, data.test)
    ]
    assert np.abs(shares[0] - shares[1]).sum() < 0.15
    counts = ", ".join(f"{len(pages[split])} in {split}" for split in ("train", "validation", "test"))
    assert f"groups by 'page': {counts}" in " ".join(capsys.readouterr().err.split())


def test_classes_that_come_in_large_groups_leave_the_held_out_part_its_size() -> None:
    rng = np.random.default_rng(1)
    groups = np.repeat(np.arange(200), np.minimum(rng.zipf(1.5, 200), 60))
    usual = rng.integers(0, 12, 200)[groups]
    classes = np.where(rng.random(len(groups)) < 0.8, usual, rng.integers(0, 12, len(groups)))
    held = hold_out(range(len(groups)), 0.9, classes, groups)[1]
    assert len(held) == pytest.approx(len(groups) / 10, rel=0.1)
    counts = [np.bincount(classes[rows], minlength=12) for rows in (held, slice(None))]
    assert np.abs(counts[0] - counts[1] / 10).sum() < len(groups) / 10 / 4


def test_the_order_of_rows_does_not_choose_the_groups() -> None:
    order = np.random.default_rng(0).permutation(len(ROWS))
    chosen = []
    for numbers in (np.arange(len(ROWS)), order):
        held = hold_out([PAGES[number] for number in numbers], 0.9, LABELS[numbers], PAGES[numbers])[1]
        chosen.append(set(held))
    assert chosen[0] == chosen[1] != set()


def test_groups_in_two_given_splits_are_told(tmp_path: Path, capsys) -> None:
    read({"train": ROWS[:-5], "test": ROWS[-5:]}, tmp_path)
    assert "1 of 1 groups of test are in train too" in " ".join(capsys.readouterr().err.split())


def test_rows_without_groups_and_a_single_group_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="too few values of 'page' to hold out whole groups for test"):
        read({"train": [row | {"page": "same"} for row in ROWS]}, tmp_path)
    with pytest.raises(InputError, match="the group in 'page' is empty: fill it in"):
        read({"train": [*ROWS, ROWS[0] | {"page": " "}]}, tmp_path)


def test_spellings_of_a_group_are_one_group(tmp_path: Path, capsys) -> None:
    spellings = [*zip(["ACME", "Béla", "12"], [" ACME ", "Be\u0301la", 12.0], strict=True), ("12", "12.0"), ("b", "b")]
    rows = [row | {"page": spellings[n % 5][n % 2]} for n, row in enumerate(ROWS)]
    data = read({"train": rows}, tmp_path)
    pages = {split: {example.group for example in examples} for split, examples in data.splits.items()}
    assert set.union(*pages.values()) == {"ACME", "Béla", "12", "b"} and sum(map(len, pages.values())) == 4
    assert definition(data.task) != definition(data.task.model_copy(update={"group": None})) | {"group": "page"}


def test_a_long_name_of_a_group_takes_no_memory_in_every_row(tmp_path: Path) -> None:
    rows = [row | {"page": str(row["page"]) + "." * 100_000 * (n == 0)} for n, row in enumerate(ROWS)]
    tracemalloc.start()
    read({"train": rows}, tmp_path)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 4 * 100_000 * len(ROWS) / 2
    same = hold_out(ROWS, 0.9, LABELS, np.unique(PAGES, return_inverse=True)[1])
    assert same == hold_out(ROWS, 0.9, LABELS, PAGES)
