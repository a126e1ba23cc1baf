"""Predictions of kept models are those that were scored, and those of transformers' pipelines."""

import csv
import gc
import json
import re
import sys
import unicodedata
import zipfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
import transformers

import biphase
from biphase.api.finetuning import leave_to_people, write_predictions
from biphase.cli.app import run_command
from biphase.corpus.rows import rows_of_file
from biphase.corpus.writing import refuse_ending, write_rows
from biphase.errors import InputError
from biphase.files import MARK, whole_file
from biphase.finetuning import predict as predicting
from biphase.finetuning.config import FinetuneConfig, settle_config
from biphase.finetuning.families import token_classification
from biphase.finetuning.families.token_classification import (
    encode_words,
    join_touching,
    spans_of_tags,
    spell_tags,
    with_marks,
)
from biphase.finetuning.grid import encode_unit
from biphase.finetuning.heads import load_encoder
from biphase.finetuning.kept import (
    TRAINED_ROWS,
    find_kept,
    hash_inputs,
    open_rows,
    read_labelled,
    read_trained,
    tell_trained,
)
from biphase.finetuning.predict import predict_placed
from biphase.finetuning.scores import read_examples, read_score
from biphase.tasks.examples import LabelledText, Question, TaggedWords, input_of, inputs_of, load_examples, tag_spans
from biphase.tasks.sources import find_source
from biphase.tasks.spec import Task, task_table
from biphase.tasks.splits import draw_indices

from ..conftest import DEVICE, full_disk
from .conftest import NOUNS, write_jsonl
from .test_keeping import fit_and_keep, keep_untrained

WHERE = torch.device(DEVICE)


def predict_all(model: Path, file: Path, template: str | None = None) -> list[dict[str, Any]]:
    kept = find_kept(str(model), file, template)
    return list(predict_placed(kept, open_rows(kept, file)[1], file.name, WHERE))


def tagging(**changes: Any) -> Task:
    tree = {"name": "mine", "family": "token_classification", "metric": "f1", "label": "tags"}
    return Task.model_validate(tree | {"classes": ["O", "B-x", "I-x"], "files": [{"train": "train.jsonl"}]} | changes)


def test_texts_as_scored_and_as_the_pipeline(model_folder: Path, data_dirs: dict[str, Path], tmp_path: Path) -> None:
    kept, data, rows = fit_and_keep("snli", model_folder, data_dirs["snli"], tmp_path, learning_rate=3e-3)
    file = data_dirs["snli"] / "test.jsonl"
    found = predict_all(kept, file)
    assert [one["predicted"] for one in found] == [row["predicted"] for row in rows]
    assert [one["premise"] for one in found] == [json.loads(line)["premise"] for line in file.read_text().splitlines()]
    classify = transformers.pipeline("text-classification", str(kept), device="cpu", top_k=None)
    for one, said in zip(found, classify([input_of(example) for example in data.test]), strict=True):
        assert one["probabilities"] == pytest.approx({part["label"]: part["score"] for part in said}, abs=1e-4)
    # The command writes the same rows as a table.
    out = tmp_path / "predicted.csv"
    run_command(["predict", str(kept), str(file), "--out", str(out)])
    with open(out, newline="") as table:
        written = list(csv.DictReader(table))
    assert [row["predicted"] for row in written] == [row["predicted"] for row in rows]
    assert float(written[0]["probability_neutral"]) == pytest.approx(found[0]["probabilities"]["neutral"], abs=1e-4)
    with pytest.raises(InputError, match="already exists"):
        run_command(["predict", str(kept), str(file), "--out", str(out)])
    for content, wrong in (
        ([{"premise": "a dog"}], "rows.jsonl:1: .*there is no column 'hypothesis'; the columns are: premise"),
        ([{"premise": "a dog", "hypothesis": 3}], "rows.jsonl:1: column 'hypothesis' is 3, not a text"),
        ([{"premise": "a", "hypothesis": "b", "predicted": "c"}], "has a column 'predicted' already"),
    ):
        write_jsonl(tmp_path / "rows.jsonl", content)
        with pytest.raises(InputError, match=wrong):
            predict_all(kept, tmp_path / "rows.jsonl")
    with pytest.raises(InputError, match="a line is one text"):
        predict_all(kept, tmp_path / "rows.txt")


@pytest.mark.parametrize("task", ["snli", "wnut17", "squad_v2"])
def test_rows_that_trained_a_model_are_told(
    task: str, model_folder: Path, data_dirs: dict[str, Path], tmp_path: Path, capsys: Any
) -> None:
    """By their inputs, whatever their labels say now; examples that were left out of a subset are new."""
    settings: dict[str, Any] = {"max_steps": 1, "learning_rate": 1e-4, "max_train_examples": 12}
    kept, data, _ = fit_and_keep(task, model_folder, data_dirs[task], tmp_path, **settings)
    chosen = [data.train[index] for index in draw_indices(len(data.train), 12)]
    seen = {str(input_of(example)) for example in [*chosen, *data.validation]}
    assert (kept / TRAINED_ROWS).stat().st_size == 8 * len(seen)
    for name, split in (("train", data.train), ("test", data.test)):
        rows = []
        for example in split:
            match example:
                case LabelledText():
                    (text, (first, second)) = example.texts[0]
                    rows.append({"premise": text[slice(*first)], "hypothesis": text[slice(*second)], "label": 0})
                case TaggedWords():
                    rows.append({"tokens": example.words, "ner_tags": ["O"] * len(example.words)})
                case Question():
                    rows.append({"question": example.question, "context": example.context, "id": example.id})
        write_jsonl(tmp_path / f"{name}.jsonl", rows)
        num_seen = sum(str(input_of(example)) in seen for example in split)
        assert num_seen >= 12 if name == "train" else num_seen < len(rows)
        capsys.readouterr()
        predict_all(kept, tmp_path / f"{name}.jsonl")
        told = f"{name}.jsonl: {num_seen} of {len(rows)} rows trained or validated this model"
        assert (told in " ".join(capsys.readouterr().err.split())) == (num_seen > 0)
        if task == "squad_v2":
            continue
        score = biphase.score(kept, tmp_path / f"{name}.jsonl", device=DEVICE)
        assert score.num_trained == num_seen and ("trained or validated" in repr(score)) == (num_seen > 0)
        told = f"{num_seen} of {len(rows)} examples trained or validated this model: the score is probably too high"
        assert (told in " ".join(capsys.readouterr().err.split())) == (num_seen > 0)


def test_rows_that_trained_the_model_below_are_told_and_remembered(
    model_folder: Path, data_dirs: dict[str, Path], tmp_path: Path, capsys: Any
) -> None:
    """Random weights have seen none."""
    data = load_examples(find_source(task_table()["snli"], data_dirs["snli"]), judged_only=True)
    seen = [*map(input_of, data.test[:3]), "a text of another table"]
    kept = keep_untrained(task_table()["snli"], model_folder, tmp_path / "kept", seen)
    given: dict[str, Any] = {"device": DEVICE, "precision": "fp32", "max_steps": 1, "scores": tmp_path / "scores"}
    num_seen = sum(input_of(example) in seen for example in data.test)
    told = f"snli: {num_seen} of {len(data.test)} inputs of test trained or validated {kept}: the scores on test are"
    for folder, weights in ((tmp_path / "again", "pretrained"), (tmp_path / "anew", "random")):
        biphase.finetune(kept, "snli", data=data_dirs["snli"], keep=folder, **given, weights=weights)
        is_told = told in " ".join(capsys.readouterr().err.split())
        hashes = set(read_trained(folder).tolist())
        inputs = {*map(input_of, (*data.train, *data.validation))} | {*(seen if weights == "pretrained" else ())}
        assert is_told == (weights == "pretrained") and hashes == set(hash_inputs(inputs).tolist())
    config = settle_config(FinetuneConfig(max_length=64), task_table()["snli"], 256)
    lines = encode_unit(str(kept), "snli", config, {"snli": data_dirs["snli"]})
    assert any(told in line for line in lines), "`evaluate` prints it"


def test_retrieval_counts_no_inputs(model_folder: Path, data_dirs: dict[str, Path], tmp_path: Path) -> None:
    """Its queries alone are no inputs, and loading its documents to count them would take long."""
    source, config = find_source(task_table()["squad_retrieval"], data_dirs["squad_retrieval"]), FinetuneConfig()
    queries = inputs_of(load_examples(source, judged_only=True), "test")
    kept = keep_untrained(task_table()["snli"], model_folder, tmp_path / "kept", queries)
    assert len(read_trained(kept)) and tell_trained(load_encoder(str(kept)), source, config) == []


def test_words_as_scored_and_texts_as_words(
    model_folder: Path, data_dirs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"epochs": 30, "learning_rate": 1e-2}
    kept, data, rows = fit_and_keep("wnut17", model_folder, data_dirs["wnut17"], tmp_path, **settings)
    found = predict_all(kept, data_dirs["wnut17"] / "test.jsonl")
    assert [one["predicted"] for one in found] == [row["predicted"] for row in rows]
    assert found[0]["probabilities"] == pytest.approx(rows[0]["probabilities"], abs=1e-4)
    for one in found:
        for span in one["spans"]:
            assert span["text"] == " ".join(one["tokens"][span["start"] : span["end"]])
    texts = [" ".join(example.words) for example in data.test]
    write_jsonl(tmp_path / "texts.jsonl", [{"text": text} for text in texts])
    assert 'aggregation_strategy="first"' in (kept / "README.md").read_text()
    for text, one, other in zip(texts, predict_all(kept, tmp_path / "texts.jsonl"), found, strict=True):
        assert [span["text"] for span in one["spans"]] == [span["text"] for span in other["spans"]]
        assert all(text[span["start"] : span["end"]] == span["text"] for span in one["spans"])
    capsys.readouterr()
    write_jsonl(tmp_path / "texts.jsonl", [{"text": " ".join(data.train[0].words)}])
    predict_all(kept, tmp_path / "texts.jsonl")
    assert "1 of 1 rows trained or validated this model" in " ".join(capsys.readouterr().err.split())
    # Another's folder reads texts as transformers' pipeline does.
    for name in ("biphase.json", MARK):
        (kept / name).rename(tmp_path / name)
    tag = transformers.pipeline("token-classification", str(kept), device="cpu", aggregation_strategy="simple")
    write_jsonl(tmp_path / "texts.jsonl", [{"text": text} for text in texts])
    for text, one in zip(texts, predict_all(kept, tmp_path / "texts.jsonl"), strict=True):
        places = [(span["label"], span["start"], span["end"]) for span in one["spans"]]
        said = [(group["entity_group"], group["start"], group["end"]) for group in tag(text)]
        assert characters(text, places) == characters(text, said)
        assert all(a[2] < b[1] or a[0] != b[0] for a, b in pairwise(places))
        assert all(text[span["start"] : span["end"]] == span["text"] for span in one["spans"])
    for name in ("biphase.json", MARK):
        (tmp_path / name).rename(kept / name)
    # A file of columns may lack tags, and words do not stand for them.
    (tmp_path / "words.conll").write_text("dog\ntree\n\nriver\n")
    columns = predict_all(kept, tmp_path / "words.conll")
    assert [len(one["predicted"]) for one in columns] == [2, 1] and all("label" not in one for one in columns)
    # To score a model, the tags are read.
    tags = [data.task.classes[tag] for example in data.test[:1] for tag in example.tags]
    lines = [f"{word}\t{tag}" for word, tag in zip(data.test[0].words, tags, strict=True)]
    (tmp_path / "tagged.conll").write_text("\n".join(lines) + "\n")
    model = find_kept(str(kept), tmp_path / "tagged.conll")
    [example] = read_labelled(model, tmp_path / "tagged.conll").test
    assert (example.words, example.tags) == (data.test[0].words, data.test[0].tags)


@pytest.mark.parametrize("classes", [["O", "B-x", "I-x"], ["B-x", "I-x", "O"]])
def test_running_text_is_read_as_the_words_of_spans_of_characters(
    classes: list[str], model_folder: Path, tmp_path: Path
) -> None:
    """Punctuation and characters of scripts without spaces are words of their own, as `tag_spans` makes them for
    training, and `B-` separates words that touch. Plain tags are each word's own."""
    is_plain = classes[0] != "O"
    task = tagging(classes=classes, metric="accuracy" if is_plain else "f1")
    kept = keep_untrained(task, model_folder, tmp_path / "kept", inputs=[("the", "dog", ",")])
    texts = ["the dog,the tree.", "我叫李明", "", " \t", "Kroměříž", "ok (river)"]
    texts[4] = unicodedata.normalize("NFD", texts[4])
    write_jsonl(tmp_path / "texts.jsonl", [{"text": text} for text in texts])
    words = [tag_spans("", text, [])[0] for text in texts]
    assert words[0] == ["the", "dog", ",", "the", "tree", "."] and words[1] == [*"我叫李明"]
    write_jsonl(tmp_path / "words.jsonl", [{"tokens": each} for each in words if each])
    tagged = iter(predict_all(kept, tmp_path / "words.jsonl"))
    for text, each, row in zip(texts, words, predict_all(kept, tmp_path / "texts.jsonl"), strict=True):
        assert row.keys() == {"text", "spans"}
        spans = [] if is_plain or not each else next(tagged)["spans"]
        if is_plain and each:
            tags = next(tagged)["predicted"]
            spans = [{"label": tag, "start": at, "end": at + 1} for at, tag in enumerate(tags) if tag != "O"]
        places = [match.span() for match in re.finditer("|".join(map(re.escape, each)), text)] if each else []
        expected = [(span["label"], places[span["start"]][0], places[span["end"] - 1][1]) for span in spans]
        assert [(span["label"], span["start"], span["end"]) for span in row["spans"]] == expected
        assert all(text[span["start"] : span["end"]] == span["text"] for span in row["spans"])


def test_running_text_is_not_divided_unless_texts_in_training_were(model_folder: Path, tmp_path: Path) -> None:
    """A list of words such as `U.S.` and `n't` is not what `WORD` makes of a text: a pipeline reads running text."""
    task = tagging(classes=["O", "B-x", "I-x"], metric="f1")
    kept = keep_untrained(task, model_folder, tmp_path / "kept", inputs=[("the", "U.S.", "did", "n't")])
    tag = transformers.pipeline("token-classification", str(kept), device="cpu", aggregation_strategy="simple")
    text = "the dog,the tree did n't"
    write_jsonl(tmp_path / "texts.jsonl", [{"text": text}])
    (row,) = predict_all(kept, tmp_path / "texts.jsonl")
    places = [(span["label"], span["start"], span["end"]) for span in row["spans"]]
    said = [(group["entity_group"], group["start"], group["end"]) for group in tag(text)]
    assert characters(text, places) == characters(text, said)


def test_words_stand_where_training_had_them(model_folder: Path, tmp_path: Path) -> None:
    universal = {"metric": "accuracy", "classes": ["NOUN", "VERB"], "files": [{"train": "train.conllu"}]}
    kept = keep_untrained(tagging(**universal), model_folder, tmp_path / "pos")
    columns = tmp_path / "new.conllu"
    columns.write_text("# sent_id = 1\n1\tdog\tdog\n2\ttree\ttree\n\n1\tcat\tcat\n")
    assert [row["tokens"] for row in predict_all(kept, columns)] == [["dog", "tree"], ["cat"]]
    # A file that ends otherwise than those for training, of columns all the same.
    kept = keep_untrained(tagging(files=[{"train": "train.iob", "columns": [1, 3]}]), model_folder, tmp_path / "ner")
    columns = columns.rename(tmp_path / "new.conll")
    assert [row["tokens"] for row in predict_all(kept, columns)] == [["dog", "tree"], ["cat"]]
    columns.write_text("dog\n")
    with pytest.raises(InputError, match=r"new.conll:1: a line without a word in column 1 \(from 0\), where training"):
        predict_all(kept, columns)


def test_columns_under_the_names_of_file_and_task(model_folder: Path, tmp_path: Path) -> None:
    """Rows that a program has are not of the kind of the files for training."""
    file = tmp_path / "rows.jsonl"
    named = {"files": [{"train": "train.tsv", "rename": {"words": "tokens", "sentence": "text"}}]}
    for number, ending in enumerate((".tsv", ".jsonl")):
        named["files"][0]["train"] = f"train{ending}"
        kept = keep_untrained(tagging(**named), model_folder, tmp_path / str(number))
        for row in ({"words": ["dog"]}, {"tokens": ["dog"]}):
            write_jsonl(file, [row])
            [found] = predict_all(kept, file)
            assert found.keys() == {*row, "predicted", "probabilities", "spans"} and len(found["predicted"]) == 1
        write_jsonl(file, [{"sentence": "a dog"}])
        assert predict_all(kept, file)[0].keys() == {"sentence", "spans"}
        write_jsonl(file, [{"other": "a dog"}])
        with pytest.raises(
            InputError, match=r"rows.jsonl:1: 'tokens' \(a list of words\) or 'text' is needed; the col"
        ):
            predict_all(kept, file)


def test_columns_under_the_names_of_the_hub(model_folder: Path, tmp_path: Path) -> None:
    hub = {"id": "some/data", "splits": {"train": "train"}, "rename": {"words": "tokens"}}
    kept = keep_untrained(tagging(files=[], hub=hub), model_folder, tmp_path / "kept")
    write_jsonl(tmp_path / "rows.jsonl", [{"words": ["dog"]}])
    [found] = predict_all(kept, tmp_path / "rows.jsonl")
    assert len(found["predicted"]) == 1


def test_quotes_in_tsv_are_never_texts_unasked(model_folder: Path, tmp_path: Path) -> None:
    """Tables of biphase's own tasks have no quoting, but rows to predict are a user's."""
    file = tmp_path / "new.tsv"
    kept = keep_untrained(task_table()["sst2"], model_folder, tmp_path / "sst2")
    file.write_text('"sentence"\n"He said ""hi"""\n')
    assert [row["sentence"] for row in predict_all(kept, file)] == ['He said "hi"']
    kept = keep_untrained(task_table()["squad_retrieval"], model_folder, tmp_path / "pairs", ranking="pairs")
    file.write_text('query\tdocument\n"a dog"\t"a tree"\n')
    with pytest.raises(InputError, match=r"new.tsv:2: a field in quotes: .*; or save the table as .csv"):
        predict_all(kept, file)


def test_lines_of_txt_are_texts_unless_they_are_columns(model_folder: Path, tmp_path: Path) -> None:
    trained_on = {"jsonl": {"train": "train.jsonl"}, "txt": {"train": "train.txt", "columns": [0, 1]}}
    kept = {
        name: keep_untrained(tagging(files=[one]), model_folder, tmp_path / name) for name, one in trained_on.items()
    }
    file = tmp_path / "new.txt"
    for texts in (["the dog sees a stone", "the cat and the boy"], ["a dog", "", "the tree near a river"], ["dog"]):
        file.write_text("\n".join(texts) + "\n")
        for folder in kept.values():
            assert [row["text"] for row in predict_all(folder, file)] == texts
    for columns in ("dog O\ntree O\n\nriver O\n", "dog\tO\ntree\tO\n", "dog O\ntree O\nriver O\n"):
        file.write_text(columns)
        with pytest.raises(InputError, match=r"new.txt: words in columns, or a text a line\? Name columns .conll"):
            predict_all(kept["jsonl"], file)
        assert [word for row in predict_all(kept["txt"], file) for word in row["tokens"]][:2] == ["dog", "tree"]


def test_long_texts_are_tagged_to_their_end(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = tagging(classes=["x", "y"], metric="accuracy")  # whatever random weights choose, each token is of a span
    nouns = [f"{noun}{end}" for end in ("", "s") for noun in NOUNS]
    kept = keep_untrained(task, model_folder, tmp_path / "kept", [tuple(nouns)], max_length=12)
    inputs: list[tuple[str, ...]] = []

    def recorded(examples: Any, *rest: Any) -> Any:
        inputs.extend(example.words for example in examples)
        return encode_words(examples, *rest)

    monkeypatch.setattr(token_classification, "encode_words", recorded)
    write_jsonl(tmp_path / "rows.jsonl", [{"tokens": nouns}, {"tokens": ["cat"]}])
    long, short = predict_all(kept, tmp_path / "rows.jsonl")
    begins = sorted({nouns.index(words[0]) for words in inputs if words[0] != "cat" or len(words) > 1})
    assert begins[0] == 0 and len(begins) > 2 and len(short["predicted"]) == 1
    assert len(long["predicted"]) == 20 and min(long["probabilities"]) > 0
    last = tmp_path / "last.jsonl"
    write_jsonl(last, [{"tokens": nouns[begins[-1] :]}])
    assert predict_all(kept, last)[0]["probabilities"][-1] == pytest.approx(long["probabilities"][-1], abs=1e-4)
    write_jsonl(tmp_path / "texts.jsonl", [{"text": " ".join(nouns)}])
    [row] = predict_all(kept, tmp_path / "texts.jsonl")
    assert [(span["text"], span["label"]) for span in row["spans"]] == [*zip(nouns, long["predicted"], strict=True)]
    assert max(map(len, inputs)) <= 12, "a book is not encoded again for each of its inputs"


EXCEL = '\ufeffsentence;prix\r\na dog, a cat;0,5\r\n"a tree\nthe river; ""dogs""";1\r\n'
"""What Excel writes in French."""


@pytest.mark.parametrize(
    ("name", "content", "out", "begins", "probability"),
    [
        ("rows.csv", EXCEL, ".csv", "\ufeffsentence;prix;predicted;", "0,"),
        ("rows.csv", EXCEL.replace("0,5", "0.5"), ".csv", "\ufeffsentence;prix;predicted;", "0."),
        ("rows.csv", "sentence;n\na dog;1\n", ".csv", "sentence;n;predicted;", "0,"),
        ("rows.csv", "sentence|n\na dog|1\n", ".csv", "sentence|n|predicted|", "0."),
        ("rows.csv", "sentence;n\na dog;1,25\n", ".csv", "sentence;n;predicted;", "0,"),
        ("rows.csv", "sentence;n\na dog;1,250\n", ".csv", "sentence;n;predicted;", "0,"),
        ("rows.csv", "sentence;tags;n\na dog;1,2;2.5\na cat;1,2,3;\nit;1,5;\n", ".csv", "sentence;tags;n;", "0."),
        ("rows.csv", "sentence;n\na dog;1.250\n", ".csv", "sentence;n;predicted;", "0."),
        ("rows.csv", 'sentence,n\na dog,"1,25"\n', ".csv", "sentence,n,predicted,", "0."),
        ("rows.csv", '"sentence","n"\n"a dog","1"\n', ".csv", '"sentence","n","predicted",', "0."),
        ("rows.tsv", 'sentence\tn\na "dog", a\t0,5\n', ".tsv", "sentence\tn\tpredicted\t", "0,"),
        ("rows.tsv", '"sentence"\t"n"\n"a\n""dog"""\t"1"\n', ".tsv", '"sentence"\t"n"\t"predicted"\t', "0."),
        # Of a file with another ending: as `TABLE_FORMS` says.
        ("rows.csv", EXCEL, ".tsv", '\ufeff"sentence"\t"prix"\t"predicted"\t', "0."),
        ("rows.jsonl", '{"sentence": "a \\"dog\\",\\n\\ta; cat"}\n', ".tsv", '"sentence"\t"predicted"\t', "0."),
        ("rows.jsonl", '{"sentence": "a \\"dog\\",\\n\\ta; cat"}\n', ".csv", "sentence,predicted,", "0."),
    ],
)
def test_a_table_comes_back_in_the_form_that_it_had(
    name: str, content: str, out: str, begins: str, probability: str, model_folder: Path, tmp_path: Path
) -> None:
    task = tagging(family="sequence_classification", metric="accuracy", template="{sentence}", label="label")
    kept = keep_untrained(task, model_folder, tmp_path / "kept")
    file, back = tmp_path / name, tmp_path / f"back{out}"
    file.write_text(content, newline="")
    write_predictions(str(kept), file, back, None, DEVICE)
    written = back.read_bytes().decode()
    assert written.startswith(begins)
    assert written.count("\r\n") == (content.count("\r\n") if file.suffix == out else 0)
    for (_, row), (_, new) in zip(rows_of_file(file), rows_of_file(back), strict=True):
        assert new["probability"].startswith(probability) and new["predicted"] in task.classes
        assert row == {key: new[key] for key in row}


def test_how_many_rows_were_cut(model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = keep_untrained(task_table()["sst2"], model_folder, tmp_path / "kept", max_length=8)
    write_jsonl(tmp_path / "rows.jsonl", [{"sentence": "a dog"}, {"sentence": "a dog near a tree " * 9}])
    predict_all(kept, tmp_path / "rows.jsonl")
    assert "rows.jsonl: 1 of 2 rows was too long and cut at 8 tokens\n" in capsys.readouterr().err
    for name in ("biphase.json", MARK):  # as any folder with a head
        (kept / name).unlink()
    write_jsonl(tmp_path / "rows.jsonl", [{"text": "a dog"}, {"text": "a dog near a tree " * 9}])
    predict_all(kept, tmp_path / "rows.jsonl")
    assert "rows.jsonl: 1 of 2 rows was too long and cut at 8 tokens\n" in capsys.readouterr().err


def test_few_long_rows_are_predicted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """No memory holds the tokens of hundreds of books."""
    monkeypatch.setattr(predicting, "LONGEST_TEXT", 100)
    monkeypatch.setattr(predicting, "ROWS_AT_ONCE", 4)
    rows = [(f"row {n}", {"text": "x" * (90 if n < 3 else 9)}) for n in range(12)]
    chunks = [*predicting.in_chunks(rows)]
    assert [len(chunk) for chunk in chunks] == [1, 1, 1, 4, 4, 1]
    assert [placed for chunk in chunks for placed in chunk] == rows


def characters(text: str, spans: list[tuple[str, int, int]]) -> set[tuple[str, int]]:
    """The labels of characters that are no blanks."""
    return {(label, at) for label, start, end in spans for at in range(start, end) if text[at].strip()}


def test_rows_below_a_probability_are_left_to_people(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = {"name": "mine", "family": "sequence_classification", "metric": "accuracy", "template": "{text}"}
    keys |= {"classes": ["no", "yes"], "labels": {"NO": "no"}, "files": [{"train": "train.csv"}]}
    kept = keep_untrained(Task.model_validate(keys), model_folder, tmp_path / "kept")
    texts = ["red", "a dog", "a cat and a dog", "the garden", "", "no cat", "big"]
    pandas.DataFrame({"text": texts, "label": ["no ", "NO", "yes", "", "", "maybe", "never"]}).to_csv(
        tmp_path / "rows.csv", index=False
    )
    plain = biphase.predict(kept, tmp_path / "rows.csv", device=DEVICE)
    assert isinstance(plain, pandas.DataFrame)
    assert 'labels: 3 known to the model, 2 missing, 2 unknown (the first: "maybe")' in capsys.readouterr().err
    least = float(plain["probability"].median())
    left = biphase.predict(kept, tmp_path / "rows.csv", least=least, device=DEVICE)
    assert isinstance(left, pandas.DataFrame)
    is_sure = plain["probability"] >= least
    assert left["predicted"].tolist() == plain["predicted"].where(is_sure, None).tolist() and 0 < is_sure.sum() < 6
    assert left.drop(columns="predicted").equals(plain.drop(columns="predicted"))
    num_left = int((plain["probability"] < least).sum())
    told = (
        f"rows.csv: {num_left} of 7 rows ({num_left / 7:.0%}) are left to a person: no class reaches a probability of"
    )
    assert told in " ".join(capsys.readouterr().err.split())
    biphase.predict(kept, [{"text": text} for text in texts], least=least, device=DEVICE)
    said = " ".join(capsys.readouterr().err.split())
    assert "the data in memory: 7 rows" in said and f"the data in memory: {num_left} of 7 rows" in said
    assert "rows.jsonl" not in said and "memory.jsonl" not in said
    out = tmp_path / "left.csv"
    run_command(["predict", str(kept), str(tmp_path / "rows.csv"), "--least", str(least), "--out", str(out)])
    assert pandas.read_csv(out)["predicted"].isna().sum() == num_left + 1
    with pytest.raises(InputError, match="least: 60 is not from 0 to 1; it is a probability, for texts with one class"):
        biphase.predict(kept, tmp_path / "rows.csv", least=60)
    tagger = keep_untrained(tagging(), model_folder, tmp_path / "tagger")
    with pytest.raises(InputError, match="least: not for mine; it is a probability, for texts with one class each"):
        biphase.predict(tagger, tmp_path / "rows.csv", least=0.5)
    with pytest.raises(InputError, match="least: rows: this model gives no probability of one class; leave least out"):
        [*leave_to_people(iter([{"predicted": 0.5}]), "rows", 0.5)]


def test_nothing_is_predicted_for_rows_without_text(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = Task.model_validate(
        {"name": "mine", "family": "sequence_classification", "metric": "accuracy", "template": "{text}"}
        | {"classes": ["no", "yes"], "files": [{"train": "train.jsonl"}]}
    )
    kept = keep_untrained(task, model_folder, tmp_path / "kept")
    write_jsonl(tmp_path / "rows.jsonl", [{"text": text} for text in (None, "red", " ")])
    found = predict_all(kept, tmp_path / "rows.jsonl")
    assert [row["predicted"] is None for row in found] == [True, False, True]
    assert found[0]["text"] is None and found[0]["probabilities"] == {"no": None, "yes": None}
    assert "2 of 3 rows have no text: `predicted` is empty there" in capsys.readouterr().err
    pair = task.model_copy(update={"template": "{title}\n{text}"})
    kept = keep_untrained(pair, model_folder, tmp_path / "pair")
    rows = [{"title": None, "text": "red"}, {"title": "", "text": "red"}, {"text": "red"}, {"title": " "}, {}]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    found = predict_all(kept, tmp_path / "rows.jsonl")
    assert found[0]["probability"] == found[1]["probability"] == found[2]["probability"] is not None
    assert [row["predicted"] is None for row in found] == [False, False, False, True, True]


def test_parts_of_a_word_are_one_span() -> None:
    """Every token of "Johnny" carries `B-PER`; a blank, or another label, parts spans."""
    text = "Johnny Mary,Oz"
    places = [("PER", 0, 1, 0.4), ("PER", 1, 6, 1.0), ("PER", 7, 11, 0.5), ("PER", 12, 13, 0.5), ("LOC", 13, 14, 0.5)]
    keys = ("label", "start", "end", "probability")
    parts = [dict(zip(keys, place, strict=True)) | {"text": text[place[1] : place[2]]} for place in places]
    joined = join_touching(text, parts)
    assert [span["text"] for span in joined] == ["Johnny", "Mary", "O", "z"]
    assert joined[0]["probability"] == 0.9 and joined[1:] == parts[2:]
    assert join_touching(text, parts, has_borders=True) == joined


def test_neighbours_without_a_blank_stay_apart_where_a_foreign_tagger_parts_them() -> None:
    """A place for each character of 中美; but a mark of a letter begins no word."""
    for text, apart in {"中美": ["中", "美"], "กั": ["กั"], "aé": ["aé"]}.items():
        spans = [{"label": "LOC", "start": n, "end": n + 1, "text": text[n], "probability": 1.0} for n in range(2)]
        assert [span["text"] for span in join_touching(text, spans, has_borders=True)] == apart
        assert [span["text"] for span in join_touching(text, spans)] == [text]


def test_the_pipeline_reads_the_tags_of_any_scheme() -> None:
    for tags, spelled in (
        (["O", "B-x", "I-x", "L-x", "U-x"], ["O", "B-x", "I-x", "I-x", "B-x"]),
        (["S-x", "B-x", "E-x", "I-x", "O", "[PAD]"], ["B-x", "B-x", "I-x", "I-x", "O", "[PAD]"]),
        (["B-S-x", "I-S-x", "O"], ["B-S-x", "I-S-x", "O"]),
        (["-LRB-", "NN-TL", "S-x", "NN", "O"], ["I--LRB-", "I-NN-TL", "I-S-x", "NN", "O"]),
    ):
        found = spell_tags(dict(enumerate(tags)))
        assert found == dict(enumerate(spelled)) == spell_tags(found)


def test_plain_tags_of_running_text_keep_their_hyphens(model_folder: Path, tmp_path: Path) -> None:
    classes = ["-LRB-", "NN-TL"]
    task = tagging(classes=classes, metric="accuracy")
    kept = keep_untrained(task, model_folder, tmp_path / "kept", inputs=[("the", "U.S.")])
    write_jsonl(tmp_path / "texts.jsonl", [{"text": "the dog,the tree did n't"}])
    (row,) = predict_all(kept, tmp_path / "texts.jsonl")
    assert row["spans"] and {span["label"] for span in row["spans"]} <= {*classes}


def test_marks_that_a_tokenizer_drops_belong_to_their_letters() -> None:
    """Else one entity would end at each of them, and the last would lack it."""
    text = unicodedata.normalize("NFD", "in Kroměříži sunny")
    end = text.index(" s")
    places = [(match.start(), match.end()) for match in re.finditer(r"[A-Za-z]+", text) if 3 <= match.start() < end]
    spans = [{"label": "LOC", "start": a, "end": b, "text": text[a:b], "probability": 1.0} for a, b in places]
    assert len(spans) == 5
    (joined,) = join_touching(text, [with_marks(text, span) for span in spans])
    assert joined["text"] == text[3:end]


def test_spans_begin_where_conlleval_begins_them() -> None:
    words = list("abcdef")
    spans = spans_of_tags(words, ["I-x", "I-x", "B-x", "I-y", "O", "I-y"], [1.0, 0.5, 1.0, 1.0, 1.0, 1.0])
    assert [(span["label"], span["start"], span["end"]) for span in spans] == [
        ("x", 0, 2),
        ("x", 2, 3),
        ("y", 3, 4),
        ("y", 5, 6),
    ]
    assert spans[0]["probability"] == 0.75


def test_answers_as_scored(model_folder: Path, data_dirs: dict[str, Path], tmp_path: Path) -> None:
    """A EuroBERT that answers is kept as the Llama that it is, looking both ways."""
    kept, _, rows = fit_and_keep(
        "squad_v2", model_folder, data_dirs["squad_v2"], tmp_path, epochs=40, learning_rate=1e-2
    )
    model = transformers.AutoModelForQuestionAnswering.from_pretrained(kept)
    assert type(model).__name__ == "LlamaForQuestionAnswering"
    found = predict_all(kept, data_dirs["squad_v2"] / "dev-v2.0.json")
    assert [one["predicted"] for one in found] == [row["predicted"] for row in rows]
    assert [one["no_answer_score"] for one in found] == pytest.approx(
        [row["no_answer_score"] for row in rows], abs=2e-3
    )
    assert any(one["predicted"] for one in found)
    for one in found:
        if one["predicted"]:
            assert one["context"][one["start"] : one["end"]] == one["predicted"]


def test_any_folder_with_a_head(model_folder: Path, tmp_path: Path) -> None:
    config = transformers.BertConfig(
        vocab_size=400,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        id2label={0: "bad", 1: "good", 2: "odd"},
    )
    torch.manual_seed(0)
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path / "bert")
    load_encoder(str(model_folder)).tokenizer.pretrained.save_pretrained(tmp_path / "bert")
    texts = ["a dog sees a tree", "the river", "a house near the train near the stone"]
    (tmp_path / "texts.txt").write_text("\n".join(texts) + "\n")
    classify = transformers.pipeline("text-classification", str(tmp_path / "bert"), device="cpu")
    found = predict_all(tmp_path / "bert", tmp_path / "texts.txt")
    assert [one["text"] for one in found] == texts
    for one, text in zip(found, texts, strict=True):
        said = classify([text])[0]
        assert (one["predicted"], one["probability"]) == (said["label"], pytest.approx(said["score"], abs=1e-4))


def test_what_predicts_nothing_is_refused(model_folder: Path, data_dirs: dict[str, Path], tmp_path: Path) -> None:
    file = tmp_path / "texts.txt"
    file.write_text("a dog\n")
    with pytest.raises(InputError, match="has no head that predicts; fine-tune it first"):
        find_kept(str(model_folder), file)
    kept, _, _ = fit_and_keep("squad_retrieval", model_folder, data_dirs["squad_retrieval"], tmp_path)
    with pytest.raises(InputError, match=r"no head that predicts; .*; or search with its embeddings: `biphase search"):
        find_kept(str(kept), file)


def test_weights_that_are_no_numbers_predict_nothing(model_folder: Path, tmp_path: Path) -> None:
    """Also where the mark that would tell of the damage is gone."""
    kept = keep_untrained(tagging(), model_folder, tmp_path / "kept")
    weights = kept / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8] + b"\xff" * 8)
    (kept / MARK).unlink()
    write_jsonl(tmp_path / "rows.jsonl", [{"tokens": ["Tip", "ran"]}])
    with pytest.raises(InputError, match="has weights that are not finite numbers"):
        predict_all(kept, tmp_path / "rows.jsonl")


def test_a_cross_encoder_is_kept_for_sentence_transformers(
    model_folder: Path, data_dirs: dict[str, Path], tmp_path: Path
) -> None:
    """Its scores are those of the pairs that CrossEncoder makes, also of pairs that are cut, and so are predictions."""
    sentence_transformers = pytest.importorskip("sentence_transformers")
    folder = data_dirs["squad_retrieval"]
    kept, data, rows = fit_and_keep(
        "squad_retrieval", model_folder, folder, tmp_path, ranking="pairs", epochs=16, max_length=12
    )
    score = read_score(next((tmp_path / "scores").glob("squad_retrieval-*")))
    assert read_examples(score).values_SN.shape[1] == len(rows) == len(data.relevance["test"])
    assert score.num_steps == 64 and score.final_loss is not None and score.final_loss < np.log(8) - 0.05
    assert score.metrics["test"]["bm25_ndcg_at_10"] > score.metrics["test"]["ndcg_at_10"] > 0
    model = sentence_transformers.CrossEncoder(str(kept), device="cpu")
    pairs = [(data.queries[row["id"]], data.documents[id]) for row in rows[:5] for id in row["predicted"]]
    theirs = model.predict(pairs, convert_to_numpy=True)
    assert theirs.tolist() == pytest.approx([score for row in rows[:5] for score in row["scores"]], abs=1e-4)
    lines = [json.dumps({"query": query, "document": document}) for query, document in pairs]
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines))
    told = [row["predicted"] for row in predict_all(kept, tmp_path / "pairs.jsonl")]
    assert told == pytest.approx(theirs.tolist(), abs=1e-4)


@pytest.mark.parametrize("ending", [".tsv", ".TSV"])
@pytest.mark.parametrize("texts", [["a dog", "a tree\tthe river"], ["a dog", 'the "river"'], ["a\ncat", "a dog"]])
def test_a_tsv_with_quotes_where_they_are_needed_is_read_and_written_so(
    texts: list[str], ending: str, model_folder: Path, tmp_path: Path
) -> None:
    task = tagging(family="sequence_classification", metric="accuracy", template="{sentence}", label="label")
    kept = keep_untrained(task, model_folder, tmp_path / "kept")
    file, back = tmp_path / f"rows{ending}", tmp_path / "back.tsv"
    pandas.DataFrame({"sentence": texts, "n": ["1", "2"]}).to_csv(file, sep="\t", index=False)
    write_predictions(str(kept), file, back, None, DEVICE)
    assert pandas.read_csv(back, sep="\t")["sentence"].tolist() == texts
    assert back.read_text().startswith("sentence\tn\tpredicted\t")


@pytest.fixture
def workbook(tmp_path: Path) -> Path:
    """As pandas writes it, with a formula as a spreadsheet saves it: with its value."""
    pytest.importorskip("openpyxl")
    plain, path = tmp_path / "plain.xlsx", tmp_path / "rows.xlsx"
    when = pandas.Timestamp("2024-05-06")
    rows = [["=SUM(1)", 1.5, when, 7], ["a dog", 2, None, 8], [3, None, None, 9], [None] * 4, ["#N/A", 1, None, 10]]
    pandas.DataFrame(rows, columns=["sentence", "n", "day", "sum"]).to_excel(plain, index=False)
    with zipfile.ZipFile(plain) as old, zipfile.ZipFile(path, "w") as new:
        for name in old.namelist():
            content = old.read(name).decode()
            new.writestr(name, re.sub(r"<c r=.A2.[^>]*>(<f>.*?</f>)<v ?/>", r'<c r="A2" t="str">\1<v>one</v>', content))
    return path


def test_a_workbook_is_read_and_written(workbook: Path, model_folder: Path, tmp_path: Path) -> None:
    """As pandas reads both. What begins as a formula is a text, and a formula its value."""
    sentences = ["one", "a dog", "3", "#N/A"]
    read = [row for _, row in rows_of_file(workbook)]
    assert [row["sentence"] for row in read] == sentences and [row["n"] for row in read] == [1.5, 2, None, 1]
    assert read[0]["day"].isoformat() == "2024-05-06T00:00:00" and [row["sum"] for row in read] == [7, 8, 9, 10]
    task = tagging(family="sequence_classification", metric="accuracy", template="{sentence}", label="label")
    kept, back = keep_untrained(task, model_folder, tmp_path / "kept"), tmp_path / "back.xlsx"
    write_predictions(str(kept), workbook, back, None, DEVICE)
    table = pandas.read_excel(back, keep_default_na=False)
    assert table["sentence"].tolist() == sentences and table["n"].tolist() == [1.5, 2, "", 1]
    assert table["day"][0] == pandas.Timestamp("2024-05-06")
    told = predict_all(kept, workbook)
    assert table["predicted"].tolist() == [row["predicted"] for row in told]
    assert table["probability"].tolist() == pytest.approx([row["probability"] for row in told])
    with back.with_name("b.xlsx").open("w") as sink:
        write_rows([{"=a": "=1+1", "b": [1], "probabilities": {"x": 0.5}}], sink, ".xlsx", None)
    book = pandas.read_excel(back.with_name("b.xlsx"))
    assert book.to_dict("records") == [{"=a": "=1+1", "b": "[1]", "probability_x": 0.5}]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([["a", "a"], [1, 2]], r"a\.xlsx:1: the column a is named twice"),
        ([["a", None, "b"], [1, 2, 3]], r"a\.xlsx:1: .* a cell in a column without a name"),
        ([["a", None], [1, 2]], r"a\.xlsx:2: .* a cell in a column without a name"),
        (b"PK no", r"a\.xlsx cannot be read \(.*\); it is damaged"),
        (3, r"unpacked it has more than 3 bytes; save it as \.csv"),
        (b" " * (1 << 25), r"unpacked a part of it is more than 100 times larger; save it as \.csv"),
    ],
)
def test_workbooks_that_are_no_tables(rows: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("openpyxl")
    path = tmp_path / "a.xlsx"
    pandas.DataFrame(rows if isinstance(rows, list) else [["a"]]).to_excel(path, index=False, header=False)
    if isinstance(rows, bytes) and rows[:1] == b" ":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as parts:
            parts.writestr("xl/worksheets/sheet1.xml", rows)
    elif isinstance(rows, bytes):
        path.write_bytes(rows)
    elif isinstance(rows, int):
        monkeypatch.setattr("biphase.corpus.rows.MOST_SHEET_BYTES", rows)
    with pytest.raises(InputError, match=message):
        list(rows_of_file(path))


@pytest.mark.parametrize(("text", "told"), [("a\x01", "row 1 does not fit a sheet"), ("a" * 33_000, "than 32,767")])
def test_what_no_workbook_holds_is_refused(text: str, told: str, tmp_path: Path) -> None:
    pytest.importorskip("openpyxl")
    with (tmp_path / "a.xlsx").open("w") as sink, pytest.raises(InputError, match=rf"{told}.*write a \.jsonl file"):
        write_rows([{"text": text}], sink, ".xlsx", None)


def test_a_full_disk_leaves_no_workbook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor a word of what the workbook would have done at its end."""
    pytest.importorskip("openpyxl")
    seen: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", seen.append)
    rows = [{"text": f"{number:x}" * 9} for number in range(9000)]
    with pytest.raises(OSError, match="too large"), full_disk(30_000), whole_file(tmp_path / "a.xlsx") as sink:
        write_rows(rows, sink, ".xlsx", None)
    gc.collect()
    assert not seen and not list(tmp_path.iterdir())


def test_without_openpyxl_a_line_says_what_brings_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openpyxl", None)
    for act in (lambda path: list(rows_of_file(path)), refuse_ending):
        with pytest.raises(InputError, match=r"a\.xlsx: \.xlsx needs openpyxl: pip install 'biphase\[xlsx\]'"):
            act(tmp_path / "a.xlsx")


def test_predictions_as_parquet_are_those_of_jsonl(model_folder: Path, tmp_path: Path) -> None:
    task = tagging(family="sequence_classification", metric="accuracy", template="{sentence}", label="label")
    kept = keep_untrained(task, model_folder, tmp_path / "kept")
    file, back = tmp_path / "rows.parquet", tmp_path / "back.parquet"
    pandas.DataFrame({"sentence": ["a dog", "a tree"], "n": [1, 2]}).to_parquet(file)
    write_predictions(str(kept), file, back, None, DEVICE)
    assert pandas.read_parquet(back).to_dict("records") == predict_all(kept, file)
    write_jsonl(tmp_path / "rows.jsonl", [{"sentence": "a dog"}, {"sentence": "a tree", "id": 2}])
    write_predictions(str(kept), tmp_path / "rows.jsonl", tmp_path / "b.parquet", None, DEVICE)
    assert [row["id"] for _, row in rows_of_file(tmp_path / "b.parquet")] == [None, 2]


@pytest.mark.parametrize("ending", [".csv", ".tsv", ".xlsx", ".parquet"])
def test_rows_of_unlike_columns_are_refused_before_the_model_loads(
    ending: str, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if ending == ".xlsx":
        pytest.importorskip("openpyxl")
    task = tagging(family="sequence_classification", metric="accuracy", template="{sentence}", label="label")
    kept = keep_untrained(task, model_folder, tmp_path / "kept")
    monkeypatch.setattr(predicting, "load_kept", None)
    rows = [{"sentence": "a dog", "id": 1}, {"sentence": "a tree", "id": "two", "note": "x"}]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    with pytest.raises(InputError, match="the column 'id' does not fit" if ending == ".parquet" else "a column 'note'"):
        write_predictions(str(kept), tmp_path / "rows.jsonl", tmp_path / f"b{ending}", None, DEVICE)
    assert not (tmp_path / f"b{ending}").exists()


def test_a_score_refuses_before_the_model_loads(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A picture of classes that do not exclude one another, or of none; another folder than that of training."""
    monkeypatch.setattr(predicting, "load_kept", None)
    kinds = {"regression": {"metric": "pearson", "classes": []}, "multi_label_classification": {"metric": "micro_f1"}}
    for kind, keys in kinds.items():
        form = {"family": "sequence_classification", "problem_type": kind, "template": "{text}", "label": "label"}
        kept = keep_untrained(tagging(**form, **keys), model_folder, tmp_path / kind)
        labels = [["O"], []] if "classes" not in keys else [1.5, 2.5]
        write_jsonl(tmp_path / "rows.jsonl", [{"text": "a dog", "label": label} for label in labels])
        with pytest.raises(InputError, match="picture: mine does not have one class per example or word; leave pic"):
            biphase.score(kept, tmp_path / "rows.jsonl", picture=tmp_path / "a.png", device=DEVICE)
        with pytest.raises(InputError, match="no is not a folder with the data of task 'mine'"):
            biphase.score(kept, tmp_path / "rows.jsonl", train=tmp_path / "no", device=DEVICE)


def test_what_no_parquet_holds_is_refused_before_the_model_loads(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = tagging(family="sequence_classification", metric="accuracy", template="{sentence}", label="label")
    kept = keep_untrained(task, model_folder, tmp_path / "kept")
    monkeypatch.setattr(predicting, "load_kept", None)
    for value, told in ((2**64, "Python int too large"), ("two", "Could not convert")):
        write_jsonl(tmp_path / "rows.jsonl", [{"sentence": "a dog", "id": 1}, {"sentence": "a tree", "id": value}])
        with pytest.raises(InputError, match=rf"^the column 'id' does not fit one type \({told}.*write a \.jsonl file"):
            write_predictions(str(kept), tmp_path / "rows.jsonl", tmp_path / "b.parquet", None, DEVICE)
