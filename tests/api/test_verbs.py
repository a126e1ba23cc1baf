"""biphase from Python: light to import, from what is in memory to a table that the command line prints."""

import csv
import inspect
import io
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas
import pytest
import torch

import biphase
from biphase.api.finetuning import is_folder
from biphase.cli.app import run_command
from biphase.config import list_changes
from biphase.corpus.forms import TableForm
from biphase.corpus.text import are_names
from biphase.corpus.writing import write_table
from biphase.errors import BusyError, InputError
from biphase.files import claimed
from biphase.finetuning.grid import Grid
from biphase.tasks.examples import load_examples
from biphase.tasks.own import describe_data, write_task
from biphase.tasks.sources import find_source
from biphase.tasks.spec import TASK_SPLITS, find_task

SCRIPT = """
import sys, json
import biphase, numpy, pandas, torch
assert biphase.InputError is not None
from pathlib import Path

nouns = ["dog", "cat", "boy", "girl", "tree", "house", "river", "train"]
texts = [f"the {a} sees a {b} near the {c} ." for a in nouns for b in nouns for c in nouns[:4]][:200]
biphase.train_tokenizer(texts, "tokenizer", vocab_size=300)
shards = biphase.prepare(texts, "tokenizer", "shards", validation_fraction=0.1)
shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
         "num_key_value_heads": 2}
recipe = {
    "name": "tiny", "init": {"preset": "1m", "architecture": shape},
    "data": {"shards": "nowhere", "max_sample_tokens": 32, "min_sample_tokens": 2},
    "curriculum": [{"objective": "mlm", "steps": 3}],
    "schedule": {"peak_lr": 1e-2, "warmup_steps": 0, "decay_steps": 1},
    "batch_tokens": 256, "validation": {"every_steps": 0},
    "compute": {"precision": "fp32", "compile": "off", "device": "cpu"},
}
run = biphase.pretrain(recipe, {"data.shards": shards, "schedule.peak_lr": 1e-3})
assert biphase.pretrain(recipe, [f"data.shards={shards}", "schedule.peak_lr=1e-3"]) == run
encoder = biphase.export(run, "encoder")
numpy.save("ours.npy", biphase.encode(run, texts[:5]))
numpy.save("loaded.npy", biphase.encode(biphase.load(encoder), texts[:5]))
table = pandas.DataFrame({"text": texts, "label": [text.split()[1] in nouns[:4] for text in texts]})
settings = {"precision": "fp32", "device": "cpu", "max_steps": 4}
score = biphase.finetune(encoder, data=table, keep="kept", learning_rate=1e-3, **settings)
assert score.classes == ("False", "True") and score.task == "own", score
predicted = biphase.predict("kept", table[3:9], device="cpu")
assert list(predicted.index) == list(range(3, 9)) and set(predicted["predicted"]) <= {"False", "True"}
assert biphase.predict("kept", table["text"][3:9], device="cpu").equals(predicted.drop(columns="label"))
data = {"boys": {"train": table, "test": table[:50].to_dict("records")}}
scores = biphase.evaluate(
    encoder, ["boys"], learning_rates=[1e-3], seeds=range(2), scores="grid", data=data, workers=1, **settings
)
scores.to_json("scores.json", orient="records")
assert list(scores["model"]) == [str(encoder), "words alone (TF-IDF + linear)"], scores["model"]
assert list(scores["num_cells"]) == [2, 2], scores["num_cells"]
"""


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a script without `if __name__ == "__main__"`, whose workers do not run it again."""
    folder = tmp_path_factory.mktemp("script")
    (folder / "script.py").write_text(SCRIPT)
    ended = subprocess.run([sys.executable, "script.py"], cwd=folder, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert "Traceback" not in ended.stderr
    return folder


@pytest.mark.slow
@pytest.mark.minutes
def test_texts_become_a_table_of_scores(
    done: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command line says the same of the same scores, and the embeddings are those of plain transformers."""
    monkeypatch.chdir(done)
    run_command(["evaluate", "--out", "grid", "--format", "json"])
    told = json.loads(capsys.readouterr().out)
    assert told["scores"] == json.loads(Path("scores.json").read_text())
    assert list(told) == ["scores", "left_out", "failed", "words"]

    from transformers import AutoModel, AutoTokenizer

    ours = np.load("ours.npy")
    np.testing.assert_array_equal(ours, np.load("loaded.npy"))
    nouns = ["dog", "cat", "boy", "girl"]
    model, tokenizer = AutoModel.from_pretrained("encoder").eval(), AutoTokenizer.from_pretrained("encoder")
    texts = [f"the dog sees a {seen} near the {near} ." for seen in nouns[:2] for near in nouns][:5]
    for number, text in enumerate(texts):
        batch = tokenizer(text)
        with torch.no_grad():
            hidden = model(input_ids=torch.tensor([batch["input_ids"]])).last_hidden_state[0]
        np.testing.assert_allclose(ours[number], hidden.mean(0).numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.minutes
@pytest.mark.parametrize(
    ("place", "kind", "fact"),
    [
        ("shards", "shards", "content"),
        ("runs/tiny-*", "run", "curriculum"),
        ("runs/tiny-*/steps/3", "checkpoint", "content"),
        ("encoder", "model", "modules"),
        ("kept", "fine-tuned model", "task"),
        ("grid", "scores", "tasks"),
        ("grid/boys-*", "cell", "metrics"),
        ("grid/data/boys-*", "task", "classes"),
    ],
)
def test_every_folder_is_known(done: Path, place: str, kind: str, fact: str) -> None:
    path = next(done.glob(place))
    found = biphase.inspect(path)
    assert found["kind"] == kind and fact in found
    json.dumps(found, default=str)


def test_import_is_light() -> None:
    """No PyTorch, pandas or pydantic before a verb needs them; every name is there."""
    code = """
import biphase, sys
assert not {'torch', 'pandas', 'pydantic', 'rich', 'numpy'} & sys.modules.keys()
[getattr(biphase, name) for name in biphase.OFFERED]
assert 'torch' not in sys.modules
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert (Path(biphase.__file__).parent / "py.typed").exists()
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = biphase.nothing


def test_texts_in_place_of_a_model_are_told() -> None:
    with pytest.raises(InputError, match=r"^\['a text'\] is not a model: give encode a model first, then the texts$"):
        biphase.encode(["a text"], "model")


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (pandas.DataFrame({"text": ["a"]}), "`texts` is of type DataFrame: give a list of texts, or a column"),
        ({"text": ["a"]}, "`texts` is of type dict: give"),
        (None, "`texts` is of type NoneType: give"),
        (["a", ("b", "c")], r"text 1 is \('b', 'c'\), and not a text: give texts alone"),
        (pandas.Series(["a", float("nan")]), "text 1 is nan, and not a text"),
        ([{"text": "a"}], r"text 0 is \{'text': 'a'\}, and not a text"),
        (["a", "b \ud83d"], r"text 1 is not valid Unicode \(.*surrogates not allowed\); remove it"),
    ],
)
def test_what_is_no_text_is_told_before_it_is_embedded(texts: Any, said: str) -> None:
    model = SimpleNamespace(encode=lambda *_, **__: pytest.fail("it was embedded"))
    with pytest.raises(InputError, match=said):
        biphase.encode(model, texts)


def test_tokenizers_are_compared_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A tokenizer of words that lacks some, beside one of bytes; counted anew by transformers' own calls."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    texts = ["the ship left the harbour", "the captain, 漢字漢字 himself", "die alten Häfen"]
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": each}) + "\n" for each in texts))
    biphase.train_tokenizer(texts, tmp_path / "bytes", vocab_size=300)
    backend = Tokenizer(models.WordLevel({"<unk>": 0, "the": 1, "ship": 2, ",": 3, "</s>": 4}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>").save_pretrained(
        tmp_path / "w"
    )
    found = biphase.compare_tokenizers(texts, [tmp_path / "bytes", tmp_path / "w"]).set_index("tokenizer")
    assert found.equals(biphase.compare_tokenizers(text, [tmp_path / "bytes", tmp_path / "w"]).set_index("tokenizer"))
    facts = biphase.inspect(tmp_path / "bytes", verify=True)
    assert (facts["kind"], facts["mask_token"], facts["verified"]) == ("tokenizer", "<|mask|>", "every hash agrees")
    num_words, num_bytes = 5 + 2 + 2 + 1 + 3, sum(len(each.encode()) for each in texts)
    for name in ("bytes", "w"):
        theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path / name)
        ids = [id for each in texts for id in theirs(each, add_special_tokens=False)["input_ids"]]
        row = found.loc[str(tmp_path / name)]
        assert row["tokens_per_word"] == pytest.approx(len(ids) / num_words)
        assert row["bytes_per_token"] == pytest.approx(num_bytes / len(ids))
        assert row["unknown"] == pytest.approx(
            ids.count(theirs.unk_token_id or -1) / len(ids) if name == "bytes" else 8 / 13
        )
    with pytest.raises(InputError, match="makes no token of the text"):
        biphase.compare_tokenizers([{"text": " "}], [tmp_path / "w"])


def test_defaults_are_those_of_the_command() -> None:
    """A parameter of a function and the option of that name have one default."""
    from biphase.api.studies import OpenStudy
    from biphase.cli import commands

    for command, function in (
        (commands.tokenizer_train, biphase.train_tokenizer),
        (commands.evaluate, biphase.evaluate),
        (commands.study_run, OpenStudy.run),
    ):
        ours, theirs = inspect.signature(function).parameters, inspect.signature(command).parameters
        shared = (ours.keys() & theirs.keys()) - {"models"}  # several words, none by default
        assert len(shared) >= 5
        assert {name: ours[name].default for name in shared} == {name: theirs[name].default for name in shared}


def test_names_and_texts(tmp_path: Path) -> None:
    (tmp_path / "my file").write_text("x")
    assert are_names("one text with spaces") and are_names([Path("a b")]) and are_names(["a.txt", "b c.txt"])
    assert are_names([str(tmp_path / "my file"), "no file"]) and are_names(["owner/name", "corpus"])
    with pytest.raises(InputError, match="a mapping of train, test is given, not rows"):
        biphase.prepare({"train": [], "test": []}, "tokenizer", tmp_path / "out")
    assert not are_names(["今天天气很好", "谢谢"])
    assert not are_names(["a text", "word"]) and not are_names(iter(["a"])) and not are_names([{"text": "a"}])
    assert list_changes({"a.b": 1e-5, "c": None, "d": [1, 2], "e": Path("x")}) == [
        *("a.b=1.0e-05", "c=null", "d=[1, 2]", "e=x")
    ]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (pandas.DataFrame([["a", "b"]], columns=["text", "text"]), "the column text is named twice"),
        (pandas.DataFrame([["a", "b"]], columns=[1, "1"]), "the column 1 is named twice"),
        (pandas.DataFrame([["a", "b"]], columns=[1, ("2",)]), r"Name it as `label`: 1, \('2',\)"),
        ({"dev": []}, "name them train, validation and test"),
        ([{"text": "a b"}], "^which column of train is the label"),
        ([], "^train has no rows; give some to train on"),
        ({"train": "nothere.csv"}, "nothere.csv does not exist"),
        ("nothere", "which task.* or give a file of rows as data, which nothere is not"),
        ([3], "row 0 is of type int"),
    ],
)
def test_rows_that_are_no_task(data: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=said):
        biphase.finetune("model", data=data, scores=tmp_path / "scores")


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: biphase.prepare(None, "tokenizer", "out"), "None is given, not texts or rows"),
        (lambda: biphase.pretrain(3), "^3 is neither a file nor"),
        (lambda: biphase.pretrain("tiny", "data.shards=none"), "none is not a shard set"),
        (lambda: biphase.pretrain("tiny", {"schedule.peak_lr": np.float64(1e-3), "a": 1}), "unknown key 'a'"),
        (lambda: biphase.finetune("model", pandas.DataFrame()), "`task` is a DataFrame: .* rows go to `data`"),
        (
            lambda: biphase.finetune("model", "snli", group="page"),
            "`group` is for rows as data: write it into the task",
        ),
        (
            lambda: biphase.finetune("model", "snli", data=".", missing="drop"),
            "`missing` is for rows as data: write it",
        ),
        (lambda: biphase.evaluate("model", "snli", seeds=3), "`seeds` is 3: give a list of numbers"),
        (lambda: biphase.evaluate("model", "snli", seeds="0-4"), "`seeds` is '0-4': give a list of numbers"),
        (lambda: biphase.evaluate("model", "snli", learning_rates=1e-4), "`learning_rates` is 0.0001: give a list"),
        (
            lambda: biphase.evaluate("model", data=pandas.DataFrame()),
            "`data` must map names of tasks to folders or rows",
        ),
        (lambda: biphase.study(["x"]), r"^\['x'\] is neither a file nor"),
        (lambda: biphase.advise(["a.txt", "b.txt"], hours=1), "there are 2: give the folder that holds them"),
        (lambda: biphase.advise(pandas.DataFrame({"a": ["x"]}), hours=1), "the columns are: a; name one as text_field"),
        (lambda: biphase.advise(iter(()), hours=1), "there is no text to advise on"),
        (lambda: biphase.advise([], hours=1), "no source is given"),
    ],
)
def test_what_is_given_by_mistake(
    call: Callable[[], Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is written."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=said):
        call()
    assert not [*tmp_path.iterdir()]


@pytest.mark.slow
@pytest.mark.minutes
def test_advice_on_texts_in_memory(tmp_path: Path) -> None:
    """It is the advice on the same texts in a file."""
    texts = [f"a text of some length, number {number}" for number in range(30_000)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    ours = biphase.advise(texts, flops=1e13)
    assert ours == biphase.advise(tmp_path / "texts.jsonl", flops=1e13) and ours.text is not None
    assert ours == biphase.advise(pandas.DataFrame({"body": texts}), flops=1e13, text_field="body")
    assert len(repr(ours)) < 400


def test_an_open_study_prints_on_a_line() -> None:
    assert repr(biphase.study("demo")) == "OpenStudy(folder=PosixPath('study-demo'), words=('demo',))"


def test_a_study_of_a_mapping_and_a_data_frame(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The mapping has the keys of a file, and its rows are a task of the study's folder."""
    monkeypatch.chdir(tmp_path)
    frame = pandas.DataFrame({"text": [f"a b {number}" for number in range(80)], "label": ["x", "y"] * 40})
    keys = {
        "name": "mine",
        "recipe": {"data": {"shards": "shards"}, "schedule": {"peak_lr": 1e-3, "warmup_steps": 4, "decay_steps": 4}},
        "arms": [{"models": ["1m"], "curricula": ["mlm", "25/75"], "budgets": [40]}],
        "pretraining_seeds": 2,
        "evaluation": {
            "tasks": ["rows"],
            "learning_rates": [1e-4],
            "tuned_rates": {"1m-mlm-40": {"rows": 2e-4}},
            "seeds": range(2),
            "per_task": {"rows": {"epochs": 2}},
        },
        "planning": {"vocab_size": 8192, "mean_sample_tokens": 100},
    }
    study = biphase.study(keys, data={"rows": frame})
    plan = study.plan("CPU")
    assert list(plan["group"]) == ["arms", "evaluation"] and plan["device_hours"].min() > 0
    assert len(study.planned.cells) == 8
    settings = {(cell.model, cell.config.learning_rate, cell.config.epochs) for cell in study.planned.cells}
    assert {("1m-mlm-40", 2e-4, 2), ("1m-25-75-40", 1e-4, 2)} < settings and len(settings) == 4
    told = " ".join(capsys.readouterr().err.split())
    assert "on rows (8 examples)" in told and "2 pretraining seeds detect less than 1 does" in told
    assert study.command("run") == "biphase study run study-mine/study.yaml"
    with pytest.raises(InputError, match=r"other is not in `evaluation\.tasks`"):
        biphase.study(keys, data={"other": frame})


def test_cells_that_hold_several_devices_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from biphase.studies import run

    monkeypatch.setattr(run, "run_study", lambda *_: [])
    told = "each cell reserves 2 devices and uses one"
    for unit, is_told in ((None, True), ("train", False)):
        biphase.study("demo", folder=tmp_path).run(processes=2, unit=unit)
        assert (told in capsys.readouterr().err) is is_told


def test_rows_alone_are_all_the_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from biphase.api import finetuning

    asked: list[tuple[str, ...]] = []

    def run(grid: Grid, *_: Any, **options: Any) -> None:
        asked.append(grid.tasks)
        raise InputError("not run")

    monkeypatch.setattr(finetuning, "run_evaluation", run)
    rows = [{"text": f"a text {n}", "label": "ab"[n % 2]} for n in range(9)]
    for data in (None, {"mine": rows}):
        with pytest.raises(InputError, match="not run"):
            biphase.evaluate("model", data=data, scores=tmp_path)
    assert asked[0] == ("paper",) and [Path(task).parent.name[:5] for task in asked[1]] == ["mine-"]


def test_texts_in_memory_have_a_limit(tmp_path: Path) -> None:
    def read() -> Iterator[str]:
        yield from ["a text of words"] * 40
        raise AssertionError("read beyond the limit")

    biphase.train_tokenizer(read(), tmp_path / "tokenizer", vocab_size=265, limit_mb=40 * 15 / 1e6 - 1e-6)
    for limit in (0, -1, float("nan")):
        with pytest.raises(InputError, match=f"`limit_mb` is {limit:g} and leaves no text"):
            biphase.train_tokenizer(read(), tmp_path / "other", limit_mb=limit)


def test_silence(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    biphase.silence()
    try:
        biphase.train_tokenizer(["a text of words"] * 9, tmp_path / "tokenizer", vocab_size=270)
    finally:
        biphase.silence(False)
    assert capsys.readouterr() == ("", "")


def test_folders_of_published_data_are_not_rows(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("text,label\n")
    assert is_folder("hub") and is_folder(tmp_path / "nothere")
    assert not is_folder(tmp_path / "rows.csv") and not is_folder([]) and not is_folder(None)


def test_a_table_holds_no_formulas(capsys: pytest.CaptureFixture[str]) -> None:
    """What a spreadsheet would compute is a text there; numbers stay numbers."""
    texts = [
        "=1+1",
        "@x",
        "-2 x",
        "+a",
        "\tx",
        "plain",
        "a=1",
        "-3.5",
        "+4",
        "",
        None,
        -1,
        ["=1"],
        "a\rb",
        "-",
        "+33 1 23",
        "-1-1",
        "\n=1",
        "＝1",
        "＠x",
        "－a",
        "＋3",
    ]
    expected = [
        "'=1+1",
        "'@x",
        "'-2 x",
        "'+a",
        "'\tx",
        "plain",
        "a=1",
        "-3.5",
        "+4",
        "",
        "",
        "-1",
        '["=1"]',
        "a\rb",
        "-",
        "+33 1 23",
        "'-1-1",
        "'\n=1",
        "'＝1",
        "'＠x",
        "'－a",
        "＋3",
    ]
    sink = io.StringIO(newline="")
    write_table([{"=head": text, "probabilities": {"-a": 0.5}} for text in texts], sink, TableForm())
    table = list(csv.reader(io.StringIO(sink.getvalue(), newline="")))
    assert table == [["'=head", "probability_-a"], *([text, "0.5"] for text in expected)]
    sink = io.StringIO(newline="")
    write_table([{"cost": text, "probability": -0.5} for text in ("-0,5", "-x")], sink, TableForm(";", decimal=","))
    assert sink.getvalue() == "cost;probability\n-0,5;-0,5\n'-x;-0,5\n"
    assert "wrote an apostrophe before a text that a spreadsheet would compute" in capsys.readouterr().err


def test_what_is_wrong_with_a_table_is_told_as_it_is(tmp_path: Path) -> None:
    """Rows of unlike columns, no folder for it; a full disk is the system's own to tell."""
    with pytest.raises(InputError, match="row 2 has a column 'b' that the first row lacks"):
        write_table([{"a": 1}, {"b": 2}], io.StringIO(), TableForm())
    with pytest.raises(InputError, match=r"there is no folder .*nowhere; make it first"):
        biphase.predict("model", ["a text"], out=tmp_path / "nowhere" / "out.csv")
    with open("/dev/full", "w") as full, pytest.raises(OSError, match="No space left on device"):
        write_table(({"a": "x" * 5000} for _ in range(9)), full, TableForm())
        full.flush()


def test_rows_of_every_family_are_tasks(tmp_path: Path) -> None:
    """What is written reads as a task: labels by name, drawn splits, the same rows the same folder."""
    import datasets

    labels = datasets.ClassLabel(names=["bad", "good"])
    features = datasets.Features({"review": datasets.Value("string"), "label": labels})
    rated = {"review": [f"a film {n}" for n in range(30)], "label": [n % 2 for n in range(30)]}
    given = {
        "rated": datasets.Dataset.from_dict(rated, features=features),
        "scored": [{"text": f"a film {n}", "score": n / 8} for n in range(30)],
        "chosen": [{"question": f"who? {n}", "choices": ["Tip", "Jim"], "answer": n % 2} for n in range(30)],
        "tagged": [{"tokens": ["Tip", "ran"], "ner_tags": ["B-PER", "O"]}] * 30,
        "asked": [
            {"question": f"who? {n}", "context": "Tip ran", "answers": {"text": ["Tip"], "answer_start": [0]}}
            for n in range(30)
        ],
    }
    for name, data in given.items():
        file, folder = write_task(data, tmp_path, name)
        assert (file, folder) == write_task(data, tmp_path, name)
        read = load_examples(find_source(find_task(file), Path(folder)), judged_only=False)
        assert {split: len(rows) > 0 for split, rows in read.splits.items()} == dict.fromkeys(TASK_SPLITS, True)
        assert sum(map(len, read.splits.values())) == 30
    assert find_task(write_task(given["rated"], tmp_path, "rated")[0]).classes == ("bad", "good")


def test_other_columns_of_classes_are_not_read_and_columns_that_are_read_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Classes may have two words, or letters without case; a template reads them."""
    urgent, topics = ("very high", "rather low", "not at all"), ("体育", "财经")
    rows = [
        {"subject": f"ticket {n} is open", "body": f"it fails {n}", "urgency": urgent[n % 3], "主题": topics[n % 2]}
        for n in range(30)
    ]
    rows = [row | {"team": "abc"[n % 4 % 3]} for n, row in enumerate(rows)]
    assert find_task(write_task(rows, tmp_path, "mine", label="team")[0]).template == "{subject}\n{body}"
    said = " ".join(capsys.readouterr().err.split())
    assert "train: not read, because few values repeat: urgency, 主题; to read a column, name it in a tem" in said
    assert "template: subject, body: remove columns that reveal the answer" in said
    asked = "{subject} {urgency}"
    assert find_task(write_task(rows, tmp_path, "mine", label="team", template=asked)[0]).template == asked
    assert "remove columns" not in capsys.readouterr().err
    few = [{"urgency": row["urgency"], "team": row["team"]} for row in rows]
    assert find_task(write_task(few, tmp_path, "few", label="team")[0]).template == "{urgency}", "there is no other"
    named = [row | {"text": f"{row['urgency']} it is"} for row in few]
    assert find_task(write_task(named, tmp_path, "named", label="team")[0]).template == "{text}"


def test_texts_without_blanks_and_questions_with_a_label(tmp_path: Path) -> None:
    """Chinese is text, a template says what is read, and what has a label that is named is classified."""
    rows: list[dict[str, Any]] = [
        {"question": f"好吗{n}", "context": f"天气很好{n}", "answers": [], "label": n % 2} for n in range(30)
    ]
    asked = find_task(write_task(rows, tmp_path, "asked", label="label")[0])
    assert (asked.family, asked.template) == ("sequence_classification", "{question}\n{context}")
    short = [{"word": f"word{n}", "label": n % 2} for n in range(30)]
    assert find_task(write_task(short, tmp_path, "short", template="{word}")[0]).template == "{word}"


def test_arrays_are_lists(tmp_path: Path) -> None:
    """What pandas reads of lists in a parquet file are arrays; rows of arrays and of lists are one task."""
    lists: list[dict[str, Any]] = [
        {"tokens": ["Tip", "ran"], "ner_tags": ["B-PER", "O"], "more": {"ids": [n, 1]}} for n in range(30)
    ]
    pandas.DataFrame(lists).to_parquet(tmp_path / "tagged.parquet")
    arrays = pandas.read_parquet(tmp_path / "tagged.parquet")
    assert isinstance(arrays["ner_tags"][0], np.ndarray)
    assert write_task(arrays, tmp_path, "tagged") == write_task(lists, tmp_path, "tagged")


@pytest.mark.parametrize(
    ("row", "wrong", "said"),
    [
        ({"tokens": ["a"], "ner_tags": ["O"]}, {"ner_tags": 0}, "2: 'ner_tags' is 0, unlike the first"),
        ({"question": "a b", "choices": ["x y", "z"], "answer": 0}, {"choices": None}, "2: 'choices' is null, unlike"),
        ({"text": "a b", "label": ["x"]}, {"label": ["x", None]}, r"2: 'label' is \[\"x\", null\], unlike"),
    ],
)
def test_a_row_without_a_value_is_named(tmp_path: Path, row: Any, wrong: Any, said: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in (row, row | wrong)))
    with pytest.raises(InputError, match=rf"rows\.jsonl:{said}"):
        describe_data(path, None)


def test_what_says_the_label_is_not_read(tmp_path: Path) -> None:
    """Nor are rows taken whose label or text is not there."""
    rows: list[dict[str, Any]] = [
        {"text": f"a film number {n}", "stars": n % 3, "said": ["no stars", "one star", "two stars"][n % 3]}
        for n in range(30)
    ]
    file, _ = write_task(rows, tmp_path, "mine")
    assert find_task(file).template == "{text}" and find_task(file).label == "stars"
    missing = [*rows, {"text": "a film without", "said": "no stars"}]
    file, folder = write_task(missing, tmp_path, "other")
    with pytest.raises(InputError, match=r"train\.jsonl:31: there is no column 'stars'"):
        load_examples(find_source(find_task(file), Path(folder)), judged_only=False)
    file, folder = write_task(missing, tmp_path, "other", missing="drop")
    read: Any = load_examples(find_source(find_task(file), Path(folder)), judged_only=False)
    assert (read.left_out, sum(map(len, read.splits.values()))) == (1, 30)
    with pytest.raises(InputError, match="row 0: there is no column 'star'"):
        write_task(missing, tmp_path, "other", label="star")
    for missing_label in (None, float("nan"), " "):
        for missing_text in (None, ""):
            more = [*rows, rows[0] | {"stars": missing_label}, rows[1] | {"text": missing_text}]
            file, folder = write_task(more, tmp_path, "gaps")
            with pytest.raises(InputError, match=r"1 row has no label \(.*:31\), 1 row has no text .*missing='drop'"):
                load_examples(find_source(find_task(file), Path(folder)), judged_only=False)
            file, folder = write_task(more, tmp_path, "gaps", missing="drop")
            read = load_examples(find_source(find_task(file), Path(folder)), judged_only=False)
            assert (read.left_out, sum(map(len, read.splits.values()))) == (2, 30)
    kept = tmp_path / "mine.jsonl"
    kept.write_text("".join(json.dumps(row) + "\n" for row in missing))
    file, folder = write_task(kept, tmp_path, "other", missing="drop")
    read = load_examples(find_source(find_task(file), Path(folder)), judged_only=False)
    assert (read.left_out, sum(map(len, read.splits.values()))) == (1, 30)


def test_what_a_grid_decides_is_no_setting() -> None:
    with pytest.raises(InputError, match="learning_rate varies in a grid: give `learning_rates`"):
        biphase.evaluate("model", "snli", learning_rate=1e-4)
    with pytest.raises(InputError, match="part: zero-shot tasks train nothing"):
        biphase.evaluate("model", "zero-shot:folder", part="1/2")


def test_a_training_that_diverged_keeps_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    score = SimpleNamespace(folder=tmp_path / "snli-0", headline=lambda: "snli", classes=(), diverged=True)
    given = {"task": find_task("snli"), "model": None, "train": None, "evaluation": None, "config": None}
    monkeypatch.setattr("biphase.api.finetuning.tell_trained", lambda *arguments: [])
    plan = SimpleNamespace(is_finished=lambda out: True, **given)
    monkeypatch.setattr("biphase.api.finetuning.score_words", lambda *arguments: [])
    monkeypatch.setattr("biphase.finetuning.keeping.fit_and_keep", lambda *arguments: score)
    monkeypatch.setattr("biphase.api.finetuning.plan_cells", lambda *arguments: [plan])
    monkeypatch.setattr("biphase.finetuning.keeping.plan_to_keep", lambda plan: plan)
    biphase.finetune("encoder", "snli", keep=tmp_path / "kept")
    said = capsys.readouterr()
    assert said.err == f"{tmp_path}/snli-0: scores and predictions; it diverged, and no model is kept\n"
    assert said.out == "snli · finished before\n"
    with claimed(tmp_path / "kept", "keep.part"), pytest.raises(BusyError, match="another process is writing"):
        biphase.finetune("encoder", "snli", keep=tmp_path / "kept")
