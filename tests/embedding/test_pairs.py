"""Texts that belong together, out of tables and plain text."""

import json
import random
import re
import tracemalloc
from itertools import islice
from pathlib import Path

import pytest
import torch
from datasets import Dataset

from biphase.embedding.pairs import check_stage, read_pairs, share_read, to_arrow
from biphase.embedding.recipe import EmbeddingStage, PairSource
from biphase.errors import InputError


def read_table(path: Path, text: str, delimiter: str | None = None) -> list[tuple[object, ...]]:
    path.write_text(text)
    return read_pairs(PairSource(path=str(path), delimiter=delimiter), 0).rows


def test_columns_of_numbers_are_no_texts(tmp_path: Path) -> None:
    path = tmp_path / "pairs.csv"
    with pytest.raises(InputError, match=r"which columns are pairs\? .* it has id, body"):
        read_table(path, "id,body\n17,a red fox\n18,the sea\n")
    assert read_table(path, "id,claim,proof\n17,a fox,it is red\n") == [("a fox", "it is red")]
    assert read_table(path, "one,two,score\na fox,foxes,0.9\nthe sea,bread,0.1\n") == [
        ("a fox", "foxes", 0.9),
        ("the sea", "bread", 0.1),
    ]


def test_pairs_with_a_label_are_not_all_taken_for_right(tmp_path: Path) -> None:
    path, rows = tmp_path / "pairs.csv", "a fox,foxes,1\nthe sea,bread,0\n"
    for names in ("question,answer,label", "anchor,positive,similarity"):
        with pytest.raises(InputError, match=rf"does '\w+' say how .* columns: \[{names.replace(',', ', ')}\] if so"):
            read_table(path, f"{names}\n{rows}")
    named = PairSource(path=str(path), columns=("anchor", "positive", "similarity"))
    assert read_pairs(named, 0).rows == [("a fox", "foxes", 1.0), ("the sea", "bread", 0.0)]
    assert read_table(path, f"title,text,label\n{rows}") == [("a fox", "foxes"), ("the sea", "bread")]


def test_the_delimiter_of_a_table_may_be_named(tmp_path: Path) -> None:
    assert read_table(tmp_path / "pairs.csv", "question|answer\na, b|c; d\n", "|") == [("a, b", "c; d")]
    assert read_table(tmp_path / "pairs.tsv", "question;answer\na;b\n", ";") == [("a", "b")]


def test_a_quote_in_a_table_with_tabs_swallows_no_rows(tmp_path: Path) -> None:
    path = tmp_path / "pairs.tsv"
    path.write_text('question\tanswer\n"Hello\tfoo one\nb two\tc three\nd four\tis said"\n')
    assert read_pairs(PairSource(path=str(path)), 0).rows[0] == ('"Hello', "foo one")
    path.write_text('question\tanswer\n"Hello, you"\tfoo one\n')
    with pytest.raises(InputError, match=r"pairs\.tsv:2: a field in quotes: say `quotes: true`"):
        read_pairs(PairSource(path=str(path)), 0)
    assert read_pairs(PairSource(path=str(path), quotes=True), 0).rows == [("Hello, you", "foo one")]


def test_all_numbered_negatives_are_taken(tmp_path: Path) -> None:
    row = {"anchor": "a", "positive": "b", "negative_1": "c", "negative_2": "d"}
    (tmp_path / "pairs.jsonl").write_text(json.dumps(row) + "\n")
    assert read_pairs(PairSource(path=str(tmp_path / "pairs.jsonl")), 0).rows == [("a", "b", "c", "d")]


@pytest.mark.parametrize(("num_equal", "weight", "num_read"), [(51, 1, 69), (51, 3, 207), (5, 1, 100)])
def test_rows_that_no_epoch_reads_are_told(
    num_equal: int, weight: int, num_read: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As many as sentence-transformers' sampler leaves out."""
    sampler = pytest.importorskip("sentence_transformers.base.sampler")
    rows = [{"anchor": f"a {n}", "positive": f"b {max(n, num_equal)}"} for n in range(1, 101)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = PairSource(path=str(tmp_path / "pairs.jsonl"), weight=weight)
    check_stage(EmbeddingStage(name="s", data=(source,), batch_size=5), [read_pairs(source, 0)])
    told = f"about {num_read / weight:.0f}% of the rows are read in an epoch"
    assert (told in " ".join(capsys.readouterr().err.split())) == (num_read < 100 * weight)
    table = Dataset.from_list(weight * rows)
    batches = sampler.NoDuplicatesBatchSampler(table, 5, drop_last=False, generator=torch.Generator())
    assert sum(map(len, islice(batches, len(batches)))) == num_read


def test_a_negative_occurs_once_in_a_batch_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As sentence-transformers' sampler has it, for scored pairs beside triplets too; one negative for all rows fills
    no batch."""
    sampler = pytest.importorskip("sentence_transformers.base.sampler")
    draw, kept = random.Random(0), []
    rows = [{"anchor": f"a {n}", "positive": f"b {n % 60}"} for n in range(400)]
    for row in rows:
        others = draw.sample([f"b {n}" for n in range(60) if f"b {n}" != row["positive"]], 2)
        kept.append(row | {"negative_1": others[0], "negative_2": others[1]})
    scored = [{"sentence1": f"c {n % 17}", "sentence2": f"d {n}", "score": n % 2} for n in range(400)]
    shares = []
    for name, written in (("triplets", kept), ("scored", scored)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in written))
        table = Dataset.from_list(written)
        batches = sampler.NoDuplicatesBatchSampler(table, 16, False, ["score"], torch.Generator())
        shares.append(sum(map(len, islice(batches, len(batches)))) / 400)
    sources = tuple(PairSource(path=str(tmp_path / f"{name}.jsonl")) for name in ("triplets", "scored"))
    pairs = [read_pairs(source, 0) for source in sources]
    check_stage(EmbeddingStage(name="s", data=sources, batch_size=16), pairs)
    told = re.findall(r"about (\d+)% of the rows are read", " ".join(capsys.readouterr().err.split()))
    assert [int(share) / 100 for share in told] == pytest.approx(shares, abs=0.03) and max(shares) < 0.99
    check_stage(EmbeddingStage(name="s", data=sources[1:], batch_size=16), pairs[1:])
    assert "of the rows" not in capsys.readouterr().err, "scored pairs alone may have a text twice"
    for given, told in (({"negative": "None."}, "negative"), ({"negative_2": "None."}, "negative_2")):
        (tmp_path / "triplets.jsonl").write_text("".join(json.dumps(row | given) + "\n" for row in kept))
        message = rf"1 different texts as {told}, too few for a batch of 16: lower batch_size, or name columns without"
        with pytest.raises(InputError, match=message):
            check_stage(EmbeddingStage(name="s", data=sources[:1], batch_size=16), [read_pairs(sources[0], 0)])


def test_the_texts_of_a_table_are_compared_as_numbers_of_eight_bytes() -> None:
    """One Python integer for each text of a large table would take several times that memory."""
    num_rows = 100_000
    table = to_arrow(((f"a {n}", f"b {n}") for n in range(num_rows)), ("anchor", "positive"))
    tracemalloc.start()
    try:
        share = share_read(table, 1, 16)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert share == 1 and peak < 2 * num_rows * 60


def test_a_table_of_few_texts_is_judged_in_time_that_grows_with_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """By some batches, after which the others count as the last."""
    rows = [(f"a {n}", f"b {n % 12}", f"b {(n + 1) % 12}") for n in range(2000)]
    table = to_arrow(rows, ("anchor", "positive", "negative_1"))
    whole = share_read(table, 1, 16)
    monkeypatch.setattr("biphase.embedding.pairs.MOST_VISITS", 2)
    assert share_read(table, 1, 16) == pytest.approx(whole, abs=0.1) and 0.2 < whole < 6 / 16


def test_pairs_of_text_without_spaces(tmp_path: Path) -> None:
    text = "永和九年，歲在癸丑，暮春之初，會於會稽山陰之蘭亭。" * 20
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    for pairs in ("crops", "neighbours"):
        source = PairSource(from_text=str(tmp_path / "text.txt"), pairs=pairs, passage_words=40)  # type: ignore[arg-type]
        for row in read_pairs(source, seed=0).rows:
            assert all(one in text and len(one) <= 80 for one in row)


def test_texts_behind_a_glob_are_known_by_what_they_hold(documents: list[str], tmp_path: Path) -> None:
    for number, text in enumerate(documents):
        (tmp_path / f"{number}.txt").write_text(text, encoding="utf-8")
    source = PairSource(from_text=str(tmp_path / "*.txt"), passage_words=40)
    before = read_pairs(source, seed=0)
    assert read_pairs(source, seed=0).hash == before.hash
    (tmp_path / "0.txt").write_text(" ".join(reversed(documents[0].split())), encoding="utf-8")
    assert read_pairs(source, seed=0).hash != before.hash


def test_a_folder_is_known_from_wherever_it_is_named(
    documents: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "linked").symlink_to(tmp_path / "texts")
    for number, text in enumerate(documents[:9]):
        (tmp_path / "texts" / f"{number}.txt").write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    places = (str(tmp_path / "texts"), "texts", "texts/", "linked")

    def hashes() -> set[str]:
        return {read_pairs(PairSource(from_text=one, passage_words=40), seed=0).hash for one in places}

    before = hashes()
    assert len(before) == 1
    (tmp_path / "texts" / "8.txt").rename(tmp_path / "elsewhere.txt")
    (tmp_path / "texts" / "8.txt").symlink_to(tmp_path / "elsewhere.txt")
    assert hashes() == before, "a link to a file outside of the folder"


def test_files_that_stay_out_are_told_once(
    documents: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "kept.txt").write_text(" ".join(documents), encoding="utf-8")
    (tmp_path / "void.txt").touch()
    read_pairs(PairSource(from_text=str(tmp_path), passage_words=40), seed=0)
    assert capsys.readouterr().err.count("1 of 2 files are empty and left out: ") == 1
