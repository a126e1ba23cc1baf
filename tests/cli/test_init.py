"""`biphase init`: what it writes passes biphase's own checks, says what was asked for, and is never written over."""

import gzip
import json
import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas
import pytest

from biphase.api.folders import check_task
from biphase.cli.init import BUNDLED_NAMES, init_recipe, init_study, init_task
from biphase.config import load_config
from biphase.embedding.recipe import EmbeddingRecipe
from biphase.errors import InputError
from biphase.recipe import Recipe
from biphase.studies.plan import plan_study
from biphase.studies.spec import load_study
from biphase.tasks import own
from biphase.tasks.examples import input_of, load_examples
from biphase.tasks.families import KINDS
from biphase.tasks.own import write_task
from biphase.tasks.sources import find_source
from biphase.tasks.spec import find_task

from ..conftest import write_manifest


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", sorted({*BUNDLED_NAMES["recipes"]} - {"branch"}))
def test_every_recipe_is_one_to_start_from(name: str) -> None:
    is_embedding = name.startswith("embed")
    init_recipe(name, shards=None if is_embedding else "s", model="enc/coder", out=Path("mine.yaml"))
    if is_embedding:
        assert load_config(EmbeddingRecipe, Path("mine.yaml")).model == "enc/coder"
    else:
        recipe = load_config(Recipe, Path("mine.yaml"))
        assert (recipe.name, recipe.data.shards, recipe.init.model) == ("mine", "s", "enc/coder")


def test_a_recipe_says_where_it_starts(capsys: pytest.CaptureFixture[str]) -> None:
    init_recipe(shards="s", model="11m", out=Path("a.yaml"))
    assert "s holds no shards yet: `biphase prepare TEXT" in capsys.readouterr().err
    assert load_config(Recipe, Path("a.yaml")).init.preset == "11m"
    init_recipe(shards="s", model="Qwen/Qwen3-0.6B-Base", out=Path("b.yaml"))
    assert load_config(Recipe, Path("b.yaml")).curriculum[0].objective == "mntp"


@pytest.mark.parametrize(
    ("tokens", "times", "batch", "phases"),
    [
        (850_000, "40 times; reading it more often would gain nothing.", 16_384, [2076]),
        (10_000, "40 times; reading it more often would gain nothing.", 8192, [49]),
        (100_000_000, "1.3 times.", 131_072, [1000]),
    ],
)
def test_a_recipe_reads_its_text_as_often_as_it_gains(
    tokens: int, times: str, batch: int, phases: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps, batch and all that goes by steps, as advice has it; the file says how often that is."""
    Path("s").mkdir()
    Path("s/manifest.json").touch()
    split = SimpleNamespace(splits={"train": SimpleNamespace(tokens=tokens)})
    monkeypatch.setattr("biphase.corpus.shards.read_shard_manifest", lambda path: split)
    init_recipe(shards="s", model="enc/coder", out=Path("a.yaml"))
    recipe, text = load_config(Recipe, Path("a.yaml")), Path("a.yaml").read_text()
    assert f"# It reads the {tokens:,} tokens of the text {times}\n" in text
    assert (recipe.batch_tokens, [phase.steps for phase in recipe.curriculum]) == (batch, phases)
    warmup, decay = recipe.schedule.warmup_steps, recipe.schedule.decay_steps
    assert (warmup, decay) == (phases[0] * 100 // 1000, phases[0] * 300 // 1000)


def test_a_model_of_the_hub_may_have_a_revision() -> None:
    Path("foo").mkdir()
    init_recipe(shards="s", model="foo/bar@v1.0", out=Path("a.yaml"))
    init = load_config(Recipe, Path("a.yaml")).init
    assert (init.model, init.revision) == ("foo/bar", "v1.0")
    init_recipe("embed", model="foo/bar@v1.0", out=Path("e.yaml"))
    assert load_config(EmbeddingRecipe, Path("e.yaml")).model == "foo/bar@v1.0"
    with pytest.raises(InputError, match="run/s is not a run folder"):
        init_recipe(shards="s", model="run/s@3", out=Path("b.yaml"))
    assert not Path("b.yaml").exists()


def test_embedding_recipes_take_no_shards() -> None:
    with pytest.raises(InputError, match="--shards: embed trains on pairs or plain text, not shards"):
        init_recipe("embed", shards="sh", out=Path("a.yaml"))


def test_a_branch_starts_where_a_checkpoint_is() -> None:
    Path("runs/a-12345678/steps/400").mkdir(parents=True)
    Path("runs/a-12345678/config.yaml").touch()
    write_manifest(Path("runs/a-12345678/steps/400"))
    for name, model in (
        ("branch", "runs/b@400"),
        (None, "runs/b@400"),
        (None, "runs/a-12345678@300"),
        ("branch", "1m"),
    ):
        with pytest.raises(
            InputError, match=r"(runs/b|1m) is not a run folder|runs/a-12345678 has no checkpoint '@300'; it has @400"
        ):
            init_recipe(name, shards="s", model=model, out=Path("c.yaml"))
        assert not Path("c.yaml").exists()
    init_recipe("branch", shards="s", model="runs/a-12345678@400", out=Path("c.yaml"))
    assert load_config(Recipe, Path("c.yaml")).init.checkpoint == "runs/a-12345678@400"


@pytest.mark.parametrize("name", BUNDLED_NAMES["studies"])
def test_every_study_is_one_to_start_from(name: str) -> None:
    init_study(name, shards="s", out=Path("mine.yaml"))
    plan = plan_study(load_study(Path("mine.yaml")))
    assert plan.study.name == "mine" and plan.study.recipe["data"]["shards"] == "s"
    tells_of_tuning = "tuned_rates" in Path("mine.yaml").read_text(encoding="utf-8")
    assert tells_of_tuning == (name in ("curricula", "gpu", "mini"))


def test_a_study_of_tasks_and_text_that_are_here() -> None:
    """The folders of their data are named, and the size of the vocabulary is the shards' own."""
    Path("data").mkdir()
    Path("data/train.csv").write_text("text,stars\n" + "".join(f"a b {n},{n % 2}\n" for n in range(40)))
    init_task(Path("data/train.csv"), out=Path("own.yaml"))
    Path("s").mkdir()
    Path("s/manifest.json").write_text('{"vocab_size": 384}')
    init_study("demo", shards="s", tasks="own.yaml,genre", data_dir=["own.yaml=data"], out=Path("mine.yaml"))
    study = load_study(Path("mine.yaml"))
    assert study.evaluation is not None and study.evaluation.data_dirs == {"own.yaml": "data"}
    assert (study.planning.devices, study.planning.vocab_size) == (2, None)
    assert "# short cells" in Path("mine.yaml").read_text()
    for given, tasks, message in (
        ("other.yaml", "own.yaml,genre", "must be TASK=FOLDER"),
        ("snli=data", "own.yaml", "unknown task 'snli'"),
    ):
        with pytest.raises(InputError, match=message):
            init_study("demo", shards="s", tasks=tasks, data_dir=[given], out=Path("b.yaml"))
    init_study("demo", shards="s", tasks="own.yaml", data_dir=["data"], out=Path("one.yaml"))
    assert "data_dirs: {own: data}" in Path("one.yaml").read_text()


@pytest.mark.parametrize(
    ("given", "folders"),
    [
        ({"data_dir": ["tasks/pos_ewt.yaml=mine"]}, {"tasks/pos_ewt.yaml": "mine"}),
        ({"data_dir": ["genre=mine"]}, {"tasks/pos_ewt.yaml": "data/pos", "genre": "mine"}),
        ({"tasks": "uner_en_ewt,genre"}, {}),
        ({"tasks": "uner_en_ewt,genre", "data_dir": ["genre=mine"]}, {"genre": "mine"}),
    ],
)
def test_the_folders_of_a_bundled_study_change_with_its_tasks(given: dict[str, Any], folders: dict[str, str]) -> None:
    init_study("price", shards="s", out=Path("mine.yaml"), **given)
    evaluation = load_study(Path("mine.yaml")).evaluation
    assert evaluation is not None and evaluation.data_dirs == folders


def test_a_study_by_flags() -> None:
    with pytest.raises(InputError, match="' ,' has nothing but commas"):
        init_study("demo", shards="s", model="3m", tasks=" ,", out=Path("mine.yaml"))
    init_study("demo", shards="s", model="3m", tasks="snli, genre,", out=Path("mine.yaml"))
    study = load_study(Path("mine.yaml"))
    assert study.evaluation is not None and study.evaluation.tasks == ("snli", "genre")
    assert study.evaluation.per_task == {"genre": {"max_train_examples": 1600}}
    assert study.arms[0].models == ("3m",)
    assert "# short cells" in Path("mine.yaml").read_text()


def test_a_study_with_fewer_tasks_keeps_their_settings() -> None:
    """The command that docs/how_to/paper.md shows."""
    init_study("mini", shards="s", tasks="sst2,uner_en_ewt,squad", out=Path("mini.yaml"))
    evaluation = load_study(Path("mini.yaml")).evaluation
    assert evaluation is not None and list(evaluation.per_task) == ["sst2", "uner_en_ewt", "squad"]
    assert evaluation.per_task["sst2"] == {"max_train_examples": 1200}


@pytest.mark.parametrize("family", KINDS)
def test_a_task_of_each_family(family: Any) -> None:
    init_task(family=family, out=Path("mine.yaml"))
    task = find_task("mine.yaml")
    assert (task.name, task.problem_type or task.family) == ("mine", family)


CLASSES = {"classes": ("1", "2"), "template": "{title}\n{body}", "label": "stars"}
COLUMNS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "sequence_classification": (
        [{"title": f"a b {n}", "body": "c, d", "stars": n % 2 + 1} for n in range(40)],
        CLASSES,
    ),
    "token_classification": (
        [{"words": ["in", f"Rome{n}"], "ner_tags": ["O", ("O", "B-loc")[n % 2]]} for n in range(40)],
        {"classes": ("O", "B-loc", "I-loc")},
    ),
    "question_answering": (
        [
            {"question": f"who {n}?", "context": "it is Ann", "answers": {"text": ["Ann"], "answer_start": [6]}}
            for n in range(40)
        ],
        {},
    ),
    "regression": ([{"sentence1": f"a {n}", "sentence2": f"b {n}", "score": n / 4} for n in range(40)], {}),
    "multi_label_classification": (
        [{"body": f"a {n}", "labels": ["x"] * (n % 2) + ["y"] * (n % 3 > 0)} for n in range(40)],
        {"classes": ("x", "y")},
    ),
    "multiple_choice": (
        [{"ctx": f"a {n}", "endings": [f"b {n}", f"c {n}", "d"], "label": n % 3} for n in range(40)],
        {"classes": ("A", "B", "C"), "choices": ("endings",), "template": "{ctx} {choice}"},
    ),
}


@pytest.mark.parametrize("family", COLUMNS)
def test_a_task_is_read_off_its_data(family: str) -> None:
    """What is written reads the data that it was written of."""
    rows, expected = COLUMNS[family]
    table, is_text = pandas.DataFrame(rows), family == "sequence_classification"
    file = Path("train.csv" if is_text else "train.jsonl")
    if is_text:
        table.to_csv(file, index=False)
    else:
        table.to_json(file, orient="records", lines=True)
    init_task(file, out=Path("mine.yaml"))
    task = find_task("mine.yaml")
    assert (task.problem_type or task.family) == family
    assert {key: getattr(task, key) for key in expected} == expected
    data: Any = load_examples(find_source(task, Path()), judged_only=False)
    assert len(data.splits["train"]) > 20
    if is_text:
        assert {input_of(example).partition("\n")[2] for example in data.train} == {"c, d"}


def test_a_table_as_companies_have_it(capsys: pytest.CaptureFixture[str]) -> None:
    """What `init task` writes passes `load_examples`: blanks, case, labels and texts that are missing, a short text."""
    labels = ["Network", "Mail", "network", "Network ", "", "Mail", "Network", " Mail"]
    rows = "".join(f"a{n};no help {n};{labels[n % 8]};3,5\n" for n in range(80))
    Path("tickets.csv").write_text(f"\ufefftext;body;Category;hours\n{rows};;Mail;1,5\n", encoding="utf-8")
    init_task(Path("tickets.csv"), label="Category", template="{text}\\n{body}", out=Path("mine.yaml"))
    task, said = find_task("mine.yaml"), " ".join(capsys.readouterr().err.split())
    assert (task.classes, task.labels, task.missing) == (("Mail", "Network"), {"network": "Network"}, "drop")
    told = "'network' (rows: 10) and 'Network' (30) differ only in case, blanks or the form of a number: `labels: "
    told += "{network: Network}` in a"
    assert told.replace("(30)", "(rows: 30)") in said and "the new task file has these `labels`; to keep two" in said
    left = "10 rows have no label (the first: tickets.csv:6), 1 row has no text (the first: tickets.csv:82)"
    assert f"left out: {left} the new task file leaves them out: `missing: drop`" in said
    data: Any = load_examples(find_source(task, Path()), judged_only=False)
    assert sum(map(len, data.splits.values())) == 70 and data.left_out == 11
    assert input_of(data.test[0]).count("\n") == 1 and {example.label for example in data.train} == {0, 1}
    init_task(Path("tickets.csv"), label="Category", out=Path("other.yaml"))
    assert find_task("other.yaml").template == "{text}\n{body}", "a column named text, whatever is in it"
    for wrong, message in (("{title}", "no column 'title'; the columns are: text, body"), ("{a", "a brace that is te")):
        with pytest.raises(InputError, match=message):
            init_task(Path("tickets.csv"), label="Category", template=wrong, out=Path("third.yaml"))
    with pytest.raises(InputError, match="--template is for texts, not for retrieval: leave it out"):
        init_task(family="retrieval", template="{text}", out=Path("third.yaml"))
    pandas.read_csv("tickets.csv", sep=";").dropna().to_csv("clean.csv", index=False)
    write_task("clean.csv", Path("own"), None, label="Category")
    assert told.partition(" (30)")[0] in " ".join(capsys.readouterr().err.split())
    [written] = Path("own").glob("*/task.yaml")
    assert find_task(str(written)).classes == ("Mail", "Network", "network"), "rows in memory are told, not changed"


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (
            ["3,45", "1.234,50", "2"],
            r"is '3,45' in 'label' one class, several, or a number, though '1\.234,50' is none\? Give `problem_type`, ",
        ),
        (["x; y", "x", "y; x", "y"], "is 'x; y' in 'label' one class, several, or a number"),
        (
            ["[0, 1, 1]", "[0, 0, 0]"],
            r"is '\[0, 1, 1\]' in 'label' one class, .*`multi_hot` or `classes` in a task file",
        ),
        (["", " "], "no row has a label in 'label': name another column"),
    ],
)
def test_labels_that_may_be_something_else_are_asked_for(labels: list[str], message: str) -> None:
    rows = [{"text": f"some words {n}", "label": labels[n % len(labels)]} for n in range(30)]
    pandas.DataFrame(rows).to_csv("train.csv", index=False, sep=";" if ";" not in labels[0] else ",")
    with pytest.raises(InputError, match=message):
        init_task(Path("train.csv"), out=Path("mine.yaml"))
    assert not Path("mine.yaml").exists()


def test_columns_that_look_like_choices_are_asked_for() -> None:
    rows = [{"question": f"who is {n}", "A": "a b", "B": "c d", "C": "e f", "label": "ABC"[n % 3]} for n in range(30)]
    pandas.DataFrame(rows).to_csv("train.csv", index=False)
    with pytest.raises(InputError, match=r"are A, B, C choices\? If so, give `choices` and `classes`"):
        init_task(Path("train.csv"), out=Path("mine.yaml"))


def test_columns_may_have_any_signs_in_their_names() -> None:
    names = ("Beschreibung; lang", "Text (lang)", "Text/Betreff", "Frage?", "Frage", "Rubrik (Ü)")
    rows = [dict(zip(names, [*(f"{name} {n} und" for name in names[:5]), "ab"[n % 2]], strict=True)) for n in range(30)]
    pandas.DataFrame(rows).to_csv("train.csv", index=False, sep=",")
    init_task(Path("train.csv"), label="Rubrik (Ü)", out=Path("mine.yaml"))
    task = find_task("mine.yaml")
    assert task.template == "\n".join(f"{{{name}}}" for name in names[:5])
    data: Any = load_examples(find_source(task, Path()), judged_only=False)
    assert input_of(data.validation[0]).splitlines()[0].startswith("Beschreibung; lang ") and task.stratified


def test_names_that_no_template_can_have_are_renamed() -> None:
    names = ("Mail (lang) {neu}", "Größe: x", "Größe x", "Topic")
    rows = [dict(zip(names, [*(f"{name} {n} und" for name in names[:3]), "ab"[n % 2]], strict=True)) for n in range(30)]
    pandas.DataFrame(rows).to_csv("train.csv", index=False, sep=";")
    init_task(Path("train.csv"), out=Path("mine.yaml"))
    task = find_task("mine.yaml")
    assert task.template == "{Mail (lang) neu}\n{Größe x_}\n{Größe x}" and task.label == "Topic"
    data: Any = load_examples(find_source(task, Path()), judged_only=False)
    assert re.fullmatch(r"Mail \(lang\) {neu} .*\nGröße: x .*\nGröße x .*", input_of(data.test[0]))


@pytest.mark.parametrize(("ending", "separator"), [("tsv", "\t"), ("csv", "|"), ("csv", "\t")])
def test_tables_of_pandas_with_other_separators(ending: str, separator: str, tmp_path: Path) -> None:
    rows = [{"text": f'he said "no"\t|, {n}', "label": "ab"[n % 2]} for n in range(30)]
    pandas.DataFrame(rows).to_csv(f"train.{ending}", index=False, sep=separator)
    init_task(Path(f"train.{ending}"), out=Path("mine.yaml"))
    task = find_task("mine.yaml")
    assert task.files[0].quotes == (True if ending == "tsv" else None)
    data: Any = load_examples(find_source(task, Path()), judged_only=False)
    assert {input_of(example) for split in data.splits.values() for example in split} == {row["text"] for row in rows}
    assert find_task(write_task(f"train.{ending}", tmp_path / "own", "own")[0]).classes == ("a", "b")


def test_a_table_of_scores_with_decimal_commas(tmp_path: Path) -> None:
    Path("train.csv").write_text("Text;Score\n" + "".join(f"a b;{n},{n % 7}1\n" for n in range(40)))
    init_task(Path("train.csv"), out=Path("mine.yaml"))
    file, folder = write_task("train.csv", tmp_path / "own", "own")
    for task, source in ((find_task("mine.yaml"), Path()), (find_task(file), Path(folder))):
        assert (task.problem_type, task.template, task.label) == ("regression", "{Text}", "Score")
        data: Any = load_examples(find_source(task, source), judged_only=False)
        assert {example.label for example in data.test} <= {float(f"{n}.{n % 7}1") for n in range(40)}


def test_odd_columns_and_classes_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    """Days are no text, and no row is dropped unasked."""
    labels = ["1", "1.0", "2", "n/a", "2"]
    rows = [
        {"day": f"{n + 10}.12.2025 09:15", "body": f"a b {n}", "stars": labels[n % 5], "part": ("train", "test")[n % 2]}
        for n in range(40)
    ]
    pandas.DataFrame(rows).to_csv("train.csv", index=False)
    init_task(Path("train.csv"), out=Path("mine.yaml"))
    task, said = find_task("mine.yaml"), " ".join(capsys.readouterr().err.split())
    assert (task.template, task.classes, task.labels) == ("{body}", ("1", "2", "n/a"), {"1.0": "1"})
    assert "'part' names the split of each row (train 20, test 20)" in said
    assert "'stars' has 'n/a' (rows: 8): if that means no label, say `unlabelled: [n/a]` in a task file" in said
    Path("mine.yaml").write_text(Path("mine.yaml").read_text().replace(", test: train.csv, split_column: part", ""))
    check_task("mine.yaml", Path())
    remedy = "name the file for each split, with `split_column: part`"
    assert f"'part' names the split of each row, but is not used: {remedy}" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("labels", "is_told"),
    [(["no", "yes", -1], True), ([0, 1, -1.0], True), ([1, -1], False), ([0, 1, -1, -2], False), ([0.5, 1, 2], False)],
)
def test_minus_one_may_mean_no_label(labels: list[Any], is_told: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """As on the Hub; but of two numbers it is a class."""
    rows = [{"text": f"a b {n}", "label": labels[n % len(labels)]} for n in range(40)]
    Path("train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    init_task(Path("train.jsonl"), out=Path("mine.yaml"))
    told = "'label' has '-1' (rows: 13): if that means no label, say `unlabelled: ['-1']` in a task file"
    assert (told in " ".join(capsys.readouterr().err.split())) == is_told


def test_a_column_names_the_split_of_each_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In one file, and in memory; what the column does not name is drawn."""
    words = ["train"] * 30 + ["Dev"] * 6 + ["test "] * 8
    rows = [{"text": f"a b {n}", "label": "xy"[n % 2], "split": word} for n, word in enumerate(words)]
    pandas.DataFrame(rows).to_csv("reviews.csv", index=False)
    init_task(Path("reviews.csv"), out=Path("mine.yaml"))
    said = " ".join(capsys.readouterr().err.split())
    assert "'split' names the split of each row (train 30, validation 6, test 8)" in said
    file, folder = write_task(rows, tmp_path / "own", "own")
    for task, source in ((find_task("mine.yaml"), Path()), (find_task(file), Path(folder))):
        assert task.template == "{text}" and task.files[0].split_column == "split"
        data: Any = load_examples(find_source(task, source), judged_only=False)
        assert [len(split) for split in data.splits.values()] == [30, 6, 8]
        assert [input_of(example) for example in data.test] == [f"a b {n}" for n in range(36, 44)]
    pandas.DataFrame(rows[:30] + rows[36:]).to_csv("reviews.csv", index=False)
    init_task(Path("reviews.csv"), out=Path("two.yaml"))
    data = load_examples(find_source(find_task("two.yaml"), Path()), judged_only=False)
    assert [len(split) for split in data.splits.values()] == [28, 2, 8]
    pandas.DataFrame([*rows, rows[0] | {"split": "hold-out"}]).to_csv("reviews.csv", index=False)
    with pytest.raises(InputError, match=r"reviews.csv:46: 'split' is 'hold-out', which names no split"):
        load_examples(find_source(find_task("mine.yaml"), Path()), judged_only=False)


def test_a_column_of_splits_is_not_used_beside_files_of_splits(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"text": f"a b {n}", "label": "xy"[n % 2], "split": ("train", "test")[n % 2]} for n in range(40)]
    for name in ("train", "test"):
        pandas.DataFrame(rows).to_csv(f"{name}.csv", index=False)
    init_task(Path("train.csv"), out=Path("mine.yaml"))
    said = " ".join(capsys.readouterr().err.split())
    assert "'split' names the split of each row, but is not used: other splits have files of their own" in said
    assert find_task("mine.yaml").files[0].split_column is None


def test_a_family_that_is_named_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("train.csv").write_text("text,stars\n" + "".join(f"a b {n},{n % 5}\n" for n in range(40)))
    init_task(Path("train.csv"), family="regression", out=Path("mine.yaml"))
    assert find_task("mine.yaml").problem_type == "regression"
    with pytest.raises(InputError, match="looks like sequence_classification, not retrieval"):
        init_task(Path("train.csv"), family="retrieval", out=Path("other.yaml"))
    monkeypatch.setattr(own, "TASK_FAMILIES", (*own.TASK_FAMILIES, "ranks"))
    monkeypatch.setitem(KINDS, "ranks", KINDS["sequence_classification"])  # type: ignore[misc]
    assert own.describe_data(Path("train.csv"), None, "ranks")["family"] == "ranks"


def test_a_test_without_labels_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    """As SuperGLUE, GLUE and most competitions publish theirs."""
    rows = [{"question": f"is it {n}", "passage": f"it was {n}", "label": n % 2 == 0} for n in range(40)]
    unlabelled = [{name: row[name] for name in ("question", "passage")} for row in rows]
    for name, part in (("train", rows), ("val", rows[:9]), ("test", unlabelled)):
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    init_task(Path("train.jsonl"), out=Path("mine.yaml"))
    assert "test.jsonl has no 'label': test is drawn from train" in capsys.readouterr().err
    assert find_task("mine.yaml").files[0].named == {"train": "train.jsonl", "validation": "val.jsonl"}
    with pytest.raises(InputError, match="test: its rows have no label: leave the split out"):
        write_task({"train": rows, "test": unlabelled}, Path("own"), None)
    task = find_task("mine.yaml")
    task = task.model_copy(update={"files": (task.files[0].model_copy(update={"test": "test.jsonl"}),)})
    with pytest.raises(
        InputError, match=r"test\.jsonl:1: there is no column 'label'.*leave a split without labels out"
    ):
        load_examples(find_source(task, Path()), judged_only=False)


def test_classes_come_from_all_files(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"text": f"some words {n}", "label": "xy"[n % 2]} for n in range(40)]
    pandas.DataFrame(rows).to_csv("train.csv", index=False)
    pandas.DataFrame([rows[0], *({"text": f"other words {n}", "label": "Yz"[n]} for n in (0, 1))]).to_csv("dev.csv")
    init_task(Path("train.csv"), out=Path("mine.yaml"))
    task = find_task("mine.yaml")
    assert task.classes == ("x", "y", "z") and task.labels == {"Y": "y"}
    assert "no row of train.csv has z, but the files beside it do" in capsys.readouterr().err
    data: Any = load_examples(find_source(task, Path()), judged_only=False)
    assert len(data.validation) == 3


@pytest.mark.parametrize(
    ("train", "validation", "test"),
    [
        ("Train.csv", "Valid.csv", "Test.csv"),
        ("training.csv", "validation.csv", "testing.csv"),
        ("train.csv.gz", "dev.csv", "test.csv.zst"),
        ("constrained_TRAIN_2.csv", "constrained_DEV_2.csv", "constrained_TEST_2.csv"),
        ("xtrain-train.csv", "xdev-train.csv", "xtrain-test.csv"),
    ],
)
def test_files_of_other_splits_are_found_beside_train(train: str, validation: str, test: str) -> None:
    table = pandas.DataFrame([{"text": f"a b {n}", "label": "xy"[n % 2]} for n in range(40)])
    for name in (train, validation, test, "contest.csv"):
        table.to_csv(name, index=False)
    init_task(Path(train), out=Path("mine.yaml"))
    names = [name.removesuffix(".gz").removesuffix(".zst") for name in (train, validation, test)]
    assert [*find_task("mine.yaml").files[0].named.values()] == names


def test_lists_of_texts_are_texts(capsys: pytest.CaptureFixture[str]) -> None:
    """As the contexts of a question in PubMedQA's own file, objects by their id; one may say the answer."""
    rows = {
        f"{n}": {"QUESTION": f"is it {n}", "CONTEXTS": [f"it was {n}", "so it is"], "YEAR": "2011"} for n in range(40)
    }
    decided = {id: row | {"final_decision": ("yes", "no", "maybe")[int(id) % 3]} for id, row in rows.items()}
    Path("ori_pqal.json").write_text(json.dumps(decided, indent=4))
    init_task(Path("ori_pqal.json"), label="final_decision", out=Path("mine.yaml"))
    assert find_task("mine.yaml").template == "{QUESTION}\n{CONTEXTS}"
    assert "take out" not in capsys.readouterr().err
    data: Any = load_examples(find_source(find_task("mine.yaml"), Path()), judged_only=False)
    assert any(input_of(example) == "is it 7\nit was 7 so it is" for split in data.splits.values() for example in split)
    answered = {id: row | {"LONG_ANSWER": f"as for {id}, {row['final_decision']}"} for id, row in decided.items()}
    Path("answered.json").write_text(json.dumps(answered, indent=4))
    init_task(Path("answered.json"), label="final_decision", out=Path("other.yaml"))
    assert "template: QUESTION, CONTEXTS, LONG_ANSWER: remove columns that reveal the answer" in capsys.readouterr().err


def test_what_cannot_be_started_from_is_told() -> None:
    Path("mine.yaml").write_text("kept")
    for command in (init_recipe, init_study, init_task):
        with pytest.raises(InputError, match=r"mine\.yaml already exists; choose another name"):
            command(out=Path("mine.yaml"))  # type: ignore[operator]
    assert Path("mine.yaml").read_text() == "kept"
    with pytest.raises(InputError, match="did you mean 'tiny'"):
        init_recipe("tinny")
    with pytest.raises(InputError, match=r"'my\.yaml' is not one of the bundled recipes; name the file to write"):
        init_recipe("my.yaml")
    with pytest.raises(InputError, match="mini has arms that continue others"):
        init_study("mini", model="1m")
    Path("data.csv").write_text("text,kind\na b,1\nc d,2\n")
    with pytest.raises(InputError, match=r"which column of data.csv is the label\? Name it as `label`: text, kind"):
        init_task(Path("data.csv"))
    with pytest.raises(InputError, match="no column besides 'text' has texts"):
        init_task(Path("data.csv"), label="text")
    with pytest.raises(InputError, match=r"column 'kind' has no|the same value in all rows|no column 'kindd'"):
        init_task(Path("data.csv"), label="kindd")
    assert not Path("recipe.yaml").exists() and not Path("task.yaml").exists()


@pytest.mark.parametrize(
    ("tags", "scheme"),
    [("O I-A I-A B-A", "IOB1"), ("S-A O B-A E-A", "BIOES"), ("U-A O B-A L-A", "BILOU"), ("B-A I-A O B-A", "IOB2")],
)
def test_the_scheme_of_tags_is_found(tags: str, scheme: str) -> None:
    sentences = ["\n".join(f"w{n}{at}\t{tag}" for at, tag in enumerate(tags.split())) for n in range(40)]
    Path("train.conll").write_text("\n\n".join(sentences) + "\n")
    init_task(Path("train.conll"), out=Path("mine.yaml"))
    task = find_task("mine.yaml")
    assert task.files[0].scheme == scheme and task.classes == ("O", "B-A", "I-A")
    data: Any = load_examples(find_source(task, Path()), judged_only=False)
    assert sum(tag == 1 for tag in data.train[0].tags) == 2, "two entities"


def test_plain_tags_may_have_an_o_that_sorts_first(tmp_path: Path) -> None:
    """It stands last, because an O in front of classes says that the others mark spans."""
    sentences = [f"w{n}\tO\nx{n}\tX\ny{n}\tY" for n in range(40)]
    Path("train.conll").write_text("\n\n".join(sentences) + "\n")
    init_task(Path("train.conll"), out=Path("mine.yaml"))
    for task in (find_task("mine.yaml"), find_task(write_task("train.conll", tmp_path / "own", "own")[0])):
        assert (task.classes, task.metric) == (("X", "Y", "O"), "accuracy")


@pytest.mark.parametrize(("train", "test"), [("w{n} {tag}", "w{n}"), ("w{n} NNP I-NP {tag}", "w{n} NNP I-NP")])
def test_words_without_tags_are_no_split(train: str, test: str, capsys: pytest.CaptureFixture[str]) -> None:
    """As shared tasks publish their tests."""
    for name, line in (("train", train), ("test", test)):
        lines = (line.format(n=n, tag=("O", "B-A")[n % 2]) for n in range(80))
        Path(f"{name}.conll").write_text("\n\n".join(lines) + "\n")
    init_task(Path("train.conll"), out=Path("mine.yaml"))
    assert "test.conll has no 'label': test is drawn from train" in capsys.readouterr().err
    assert find_task("mine.yaml").files[0].named == {"train": "train.conll"}


def test_comments_are_no_words_but_hashtags_are(capsys: pytest.CaptureFixture[str]) -> None:
    said = "# sent_id = {n}\n# text = I am\n# newpar\n# note =\n"
    sentences = [f"{said.format(n=n)}#w{n}\tPRON\nam\t{('AUX', 'VERB')[n % 2]}\n#\tSYM" for n in range(40)]
    Path("train.txt").write_text("\n\n".join(sentences) + "\n")
    init_task(Path("train.txt"), out=Path("mine.yaml"))
    task = find_task("mine.yaml")
    assert task.classes == ("AUX", "PRON", "SYM", "VERB")
    data: Any = load_examples(find_source(task, Path()), judged_only=False)
    assert {len(example.words) for example in data.train} == {3} and data.train[0].words[0].startswith("#w")
    Path("train.txt").write_text("# my notes here\n" + Path("train.txt").read_text())
    with pytest.raises(InputError, match=r"train.txt:1: 4 fields, elsewhere 2"):
        init_task(Path("train.txt"), out=Path("other.yaml"))


COLUMNS_TOLD = "columns (from 0), {} is read as the word and {} as the tag; `columns` in the task file names others"


@pytest.mark.parametrize(
    ("line", "classes", "columns"),
    [
        ("w{n} {tag} B-x", ("O", "B-A", "I-A"), (0, 1)),
        ("w{n} NNP I-NP {tag}", ("O", "B-A", "I-A"), (0, 3)),
        ("w{n} NNP x {tag}", ("O", "B-A", "I-A"), (0, 3)),
        ("{n}\tw{n}\t{tag}", ("O", "B-A", "I-A"), (1, 2)),
        ("w{n} {pos} x", ("NN", "VB"), (0, 1)),
        ("w{n} {tag}", ("O", "B-A", "I-A"), (0, 1)),
    ],
)
def test_the_tag_is_found_among_several_columns(
    line: str, classes: tuple[str, ...], columns: tuple[int, int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """As CoNLL's own files have parts of speech and chunks before the entities."""
    words = [line.format(n=n, tag=("O", "B-A")[n % 2], pos=("NN", "VB")[n % 2]) for n in range(80)]
    comment = "# id 7\n"
    text = "\n\n".join(f"{comment}{one}\n{two}" for one, two in zip(words[::2], words[1::2], strict=True))
    Path("train.conll").write_text(f"-DOCSTART- -X- O O\n\n{text}\n")
    init_task(Path("train.conll"), out=Path("mine.yaml"))
    said, task = " ".join(capsys.readouterr().err.split()), find_task("mine.yaml")
    assert (task.classes, task.files[0].columns) == (classes, columns)
    assert (COLUMNS_TOLD.format(*columns) in said) == (len(line.split()) > columns[0] + 2)
    data: Any = load_examples(find_source(task, Path()), judged_only=False)
    assert all(word[0] == "w" for example in data.train for word in example.words)
    assert find_task(write_task("train.conll", tmp_path / "own", "own")[0]).classes == classes


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("__label__pos a text{n}", "train.txt:2: 4 fields, elsewhere 3; if a line is a word and its tag, write"),
        ("w{n} {n}", "train.txt: different tags: 300; if a line is a word and its tag, write"),
        ("w{n} x", "train.txt: different tags: 1; if a line is a word"),
        ("text{n}", "train.txt: different tags: 0; if a line is a word"),
    ],
)
def test_texts_are_not_taken_for_words_with_tags(line: str, message: str, tmp_path: Path) -> None:
    lines = [line.format(n=n) + " more" * (n == 1 and "label" in line) + "\n" for n in range(300)]
    Path("train.txt").write_text("".join(lines))
    for make in (lambda: init_task(Path("train.txt")), lambda: write_task("train.txt", tmp_path, "own")):
        with pytest.raises(InputError, match=message):
            make()


@pytest.mark.parametrize(
    ("name", "text", "form"),
    [
        ("0.ann", "T1\tLOC 105 109\tRome\nT2\tORG 0 10\tSome house\n", "BRAT"),
        ("doc.tsv", "#FORMAT=WebAnno TSV 3.3\n#T_SP=custom.Span|value\n\n#Text=a b\n1-1\t0-1\ta\tLOC\n", "WebAnno and"),
    ],
)
def test_forms_of_annotation_tools_that_are_not_read_are_named(name: str, text: str, form: str) -> None:
    Path(name).write_text(text)
    with pytest.raises(InputError, match=f"{name} has the form of {form}.*does not read; export CoNLL"):
        init_task(Path(name))


def test_a_column_that_names_most_splits_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train"] * 30 + ["tset"] + ["test"] * 9
    rows = [{"text": f"a b {n}", "label": "xy"[n % 2], "split": word} for n, word in enumerate(words)]
    pandas.DataFrame(rows).to_csv("reviews.csv", index=False)
    init_task(Path("reviews.csv"), out=Path("mine.yaml"))
    said = " ".join(capsys.readouterr().err.split())
    assert "'split' names the split of most rows, but not of 1 of 40 ('tset'), so rows are divided at random" in said
    assert find_task("mine.yaml").files[0].split_column is None


def test_rows_of_a_split_without_labels_are_no_split() -> None:
    words = ["train"] * 30 + ["test"] * 10
    rows = [{"text": f"a b {n}", "label": "xy"[n % 2] if n < 30 else "", "split": word} for n, word in enumerate(words)]
    pandas.DataFrame(rows).to_csv("reviews.csv", index=False)
    init_task(Path("reviews.csv"), out=Path("mine.yaml"))
    task = find_task("mine.yaml")
    data: Any = load_examples(find_source(task, Path()), judged_only=False)
    assert sum(map(len, data.splits.values())) == 30


def test_a_label_inside_an_object_is_found_in_all_splits(tmp_path: Path) -> None:
    """Numbers too; a file of its own for test, or a column of splits."""
    parts = ("train", "test", "validation", "train")
    rows = [{"text": f"a b {n}", "meta": {"label": n // 4 % 2 + 1}, "part": parts[n % 4]} for n in range(60)]
    unlabelled = [{"text": f"b c {n}", "meta": {}} for n in range(9)]
    for name, part in {"train": rows, "test": rows[:9], "dev": unlabelled, "other": rows}.items():
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    init_task(Path("train.jsonl"), label="meta.label", out=Path("mine.yaml"))
    assert find_task("mine.yaml").files[0].named == {"train": "train.jsonl", "test": "test.jsonl"}
    init_task(Path("other.jsonl"), label="meta.label", out=Path("divided.yaml"))
    divided = find_task("divided.yaml")
    assert (divided.files[0].split_column, divided.label, divided.classes) == ("part", "meta.label", ("1", "2"))
    file, folder = write_task({"train": rows, "test": rows[:9]}, tmp_path / "own", "own", label="meta.label")
    for task, place in ((divided, Path()), (find_task(file), Path(folder))):
        data: Any = load_examples(find_source(task, place), judged_only=False)
        assert {example.label for example in data.test} == {0, 1}
    with pytest.raises(InputError, match="test: its rows have no label: leave the split out"):
        write_task({"train": rows, "test": unlabelled}, tmp_path / "own", "own", label="meta.label")


def test_texts_that_only_some_rows_have_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    rows: list[dict[str, Any]] = [{"text": f"a b {n}", "label": "xy"[n % 2], "rare": None} for n in range(40)]
    for n in (30, 31, 32):
        rows[n] |= {"note": f"seen by {n} people", "rare": f"it was {n}", "day": "24.12.2025", "id": f"x{n}"}
    Path("train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    init_task(Path("train.jsonl"), out=Path("mine.yaml"))
    said = " ".join(capsys.readouterr().err.split())
    assert "train.jsonl: texts that only some rows have are not read: rare, note; to read a column, give it" in said
    assert find_task("mine.yaml").template == "{text}"
    Path("whole.jsonl").write_text("".join(json.dumps({"note": "", **row}) + "\n" for row in rows))
    init_task(Path("whole.jsonl"), template="{text}\\n{note}", out=Path("whole.yaml"))
    assert "not read" not in capsys.readouterr().err, "a template is the user's choice"
    data: Any = load_examples(find_source(find_task("whole.yaml"), Path()), judged_only=False)
    assert "a b 31\nseen by 31 people" in {input_of(example) for split in data.splits.values() for example in split}


@pytest.mark.parametrize("label", ["label", "meta.label"])
def test_rows_without_the_key_of_the_label_are_left_out(
    label: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A name that no row has is a slip, and no label of none."""
    rows: list[dict[str, Any]] = []
    for number in range(60):
        value = {} if number % 9 == 1 else {"label": "ab"[number % 2]}
        rows.append({"text": f"a text about {number}", "meta": value} | (value if label == "label" else {}))
    (tmp_path / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    task = tmp_path / "own.yaml"
    init_task(tmp_path / "train.jsonl", label=label, out=task)
    assert "left out: 7 rows have no label (the first:" in " ".join(capsys.readouterr().err.split())
    assert "missing: drop" in task.read_text() and check_task(str(task), data=tmp_path)["left_out"] == 7
    with pytest.raises(InputError, match="there is no column 'labl'"):
        init_task(tmp_path / "train.jsonl", label="labl", out=tmp_path / "x.yaml")


@pytest.mark.parametrize("family", [None, "multi_label_classification"])
def test_a_null_is_no_set_of_labels(family: Any) -> None:
    """Whether the family is named or found; an empty list means that no class applies."""
    labels: list[Any] = [["x"], ["y"], ["x", "y"], None, []]
    rows = [{"body": f"a b {n}", "labels": labels[n % 5]} for n in range(60)]
    Path("train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    init_task(Path("train.jsonl"), family=family, out=Path("mine.yaml"))
    task = find_task("mine.yaml")
    assert (task.problem_type, task.classes, task.missing) == ("multi_label_classification", ("x", "y"), "drop")
    data: Any = load_examples(find_source(task, Path()), judged_only=False)
    assert (data.left_out, sum(map(len, data.splits.values()))) == (12, 48)


def test_a_class_that_a_list_names_is_not_divided_at_its_comma() -> None:
    """As in Label Studio's export, where a text with one choice has no list."""
    labels: list[Any] = [["Sport", "Food, Drinks"], "Food, Drinks", "Sport"]
    rows = [{"text": f"a b {n}", "label": labels[n % 3]} for n in range(60)]
    Path("train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    init_task(Path("train.jsonl"), out=Path("mine.yaml"))
    assert find_task("mine.yaml").classes == ("Food, Drinks", "Sport")


def test_the_next_command_can_be_copied(capsys: pytest.CaptureFixture[str]) -> None:
    """A shell reads its words as they are, also blanks in the names of files."""
    Path("my data").mkdir()
    Path("my data/train.csv").write_text("text,stars\n" + "".join(f"a b {n},{n % 2}\n" for n in range(40)))
    init_task(Path("my data/train.csv"), out=Path("my data/task.yaml"))
    init_study("demo", shards="s", out=Path("my data/study.yaml"))
    init_recipe(shards="s", model="1m", out=Path("my data/recipe.yaml"))
    told = " ".join(capsys.readouterr().err.split())
    commands = [shlex.split(command) for command in re.findall("next, `(.*?)`", told)]
    assert commands == [
        ["biphase", "task", "check", "my data/task.yaml", "--data-dir", "my data"],
        ["biphase", "study", "plan", "my data/study.yaml"],
        ["biphase", "pretrain", "my data/recipe.yaml"],
    ]
    assert "#   biphase study run 'my data/study.yaml'\n" in Path("my data/study.yaml").read_text()


def test_documents_and_queries_of_other_endings_are_named(tmp_path: Path) -> None:
    data = tmp_path / "data"
    (data / "qrels").mkdir(parents=True)
    (data / "corpus.csv").write_text("_id,text\n" + "".join(f"d{n},word{n} text\n" for n in range(40)))
    (data / "queries.jsonl").write_text("".join(f'{{"_id": "q{n}", "text": "word{n}"}}\n' for n in range(40)))
    for split, numbers in (("train", range(30)), ("test", range(30, 40))):
        rows = "".join(f"q{n}\td{n}\t1\n" for n in numbers)
        (data / "qrels" / f"{split}.tsv").write_text(f"query-id\tcorpus-id\tscore\n{rows}")
    init_task(data, out=tmp_path / "own.yaml")
    assert "corpus: corpus.csv}" in (tmp_path / "own.yaml").read_text()
    assert check_task(str(tmp_path / "own.yaml"), data=data)["rows"]


@pytest.mark.parametrize("ending", [".tsv", ".tsv.gz", ".jsonl", ".jsonl.gz"])
def test_compressed_judgements_of_train_are_found(ending: str) -> None:
    """Else queries of test would be drawn to train on."""
    Path("beir/qrels").mkdir(parents=True)
    for split in ("train", "dev", "test"):
        judged = f'{{"query-id": "{split}", "corpus-id": "d", "score": 1}}\n'
        content = judged if "json" in ending else f"query-id\tcorpus-id\tscore\n{split}\td\t1\n"
        write = gzip.open if ending.endswith("gz") else open
        with write(f"beir/qrels/{split}{ending}", "wt") as file:
            file.write(content)
    Path("beir/corpus.jsonl").write_text('{"_id": "d", "text": "a dog"}\n')
    Path("beir/queries.jsonl").write_text(
        "".join(f'{{"_id": "{id}", "text": "?"}}\n' for id in ("train", "dev", "test"))
    )
    init_task(Path("beir"), out=Path("mine.yaml"))
    data: Any = load_examples(find_source(find_task("mine.yaml"), Path("beir")), judged_only=False)
    assert data.train == (("train", "d"),) and {*data.relevance["validation"]} == {"dev"}
