"""A task with several tests: one training, a score for each test by its name."""

import json
from pathlib import Path
from typing import Any

import pytest

from biphase.api.finetuning import evaluate
from biphase.deploying.worth import find_task_data
from biphase.errors import InputError
from biphase.finetuning.config import FinetuneConfig, plan_cells
from biphase.finetuning.grid import Grid, plan_grid
from biphase.finetuning.kept import read_task
from biphase.tasks.examples import input_of, load_examples
from biphase.tasks.sources import definition, find_source, find_task_sources, name_data_dirs
from biphase.tasks.spec import find_task, name_tests

from .conftest import fit_cell, write_jsonl
from .test_keeping import keep_untrained


def write_transfer(folder: Path) -> str:
    """English to train on, and tests of two languages, in one of which the words mean the contrary."""
    good, bad = "good", "bad"
    for name, first, second in (("train", good, bad), ("en", bad, good), ("de", good, bad)):
        texts = [(first, 1 - (name == "en")), (second, int(name == "en"))] * 12
        rows = [{"text": f"{word} {number} {name}", "label": label} for number, (word, label) in enumerate(texts)]
        if name == "de":
            rows = [row | {"label": 1 - row["label"]} for row in rows]
        write_jsonl(folder / f"{name}.jsonl", rows)
    (folder / "own.yaml").write_text(
        "{name: own, family: sequence_classification, metric: accuracy, template: '{text}', classes: [bad, good],\n"
        "files: [{train: train.jsonl, test: {en: en.jsonl, de: de.jsonl}}]}\n"
    )
    return str(folder / "own.yaml")


@pytest.mark.slow
@pytest.mark.minutes
def test_one_training_gives_a_score_by_name(model_folder: Path, tmp_path: Path) -> None:
    task = write_transfer(tmp_path)
    assert name_tests(task) == (f"{task}:en", f"{task}:de") and name_tests("snli") == ("snli",)
    config = FinetuneConfig(precision="fp32", device="cpu", max_length=64)
    dirs = name_data_dirs([(task, str(tmp_path))], name_tests(task), "data")
    grid = Grid((str(model_folder),), name_tests(task), config, tmp_path, (1e-3,), (0,), dirs)
    [training] = plan_grid(grid)
    assert [cell.task.name for cell in training] == ["own.en", "own.de"]
    # A further test, or another one, leaves the training and the other cells what they were.
    content = Path(task).read_text()
    Path(task).write_text(content.replace("{en: en.jsonl, de: de.jsonl}", "{de: de.jsonl}"))
    assert plan_cells(str(model_folder), [f"{task}:de"], training[0].config, dirs)[0].hash == training[1].hash
    Path(task).write_text(content)
    settings: dict[str, Any] = {"learning_rates": [5e-3], "seeds": [0], "workers": 1, "scores": tmp_path / "scores"}
    settings |= {"precision": "fp32", "device": "cpu", "max_length": 64, "epochs": 20, "batch_size": 8, "words": False}
    table = evaluate(model_folder, task, data={task: tmp_path}, **settings).set_index("task")
    assert table.loc["own.en", "mean"] > 0.9 and table.loc["own.de", "mean"] == pytest.approx(0, abs=0.1)
    assert len(list((tmp_path / "scores").glob("own.*/score.json"))) == 2


def test_a_test_must_be_named(model_folder: Path, tmp_path: Path) -> None:
    task = write_transfer(tmp_path)
    with pytest.raises(InputError, match=r"has several tests: name one, such as FILE\.yaml:en"):
        fit_cell(str(model_folder), task, FinetuneConfig(), data_dir=tmp_path)
    with pytest.raises(InputError, match="task 'own' has no test 'fr'"):
        find_task(f"{task}:fr")
    (tmp_path / "part.yaml").write_text(Path(task).read_text().replace("{name: own,", "{name: own, part_of: other,"))
    with pytest.raises(InputError, match="'bundled' and 'part_of' are set by biphase itself"):
        find_task(str(tmp_path / "part.yaml"))
    train, evaluation = find_task_sources(f"{task}:de", {"own": tmp_path})
    assert (train.task.name, evaluation.task.name) == ("own", "own.de") and train.hash != evaluation.hash


def test_copies_are_left_out_of_each_test_because_all_share_a_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = write_transfer(tmp_path)
    [first, second, third, *others] = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    write_jsonl(tmp_path / "train.jsonl", [first, first, second, third, *others])
    for name, copy in (("en", first), ("de", second)):
        with open(tmp_path / f"{name}.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(copy) + "\n")
    dropping = Path(task).read_text().replace("{name: own,", "{name: own, duplicates: drop,")
    trained = []
    for mark in ("", "validation: dev.jsonl, "):  # drawn from train, and a file of its own, which has a row of train
        write_jsonl(tmp_path / "dev.jsonl", [third, *({"text": f"new {n}", "label": n % 2} for n in range(9))])
        Path(task).write_text(dropping.replace("test: {", f"{mark}test: {{"))
        by_test: list[Any] = []
        for name in ("en", "de"):
            train, evaluation = find_task_sources(f"{task}:{name}", {"own": tmp_path})
            by_test += [(train.hash, load_examples(train, False)), load_examples(evaluation, False)]
            assert "1 in test" in " ".join(capsys.readouterr().err.split())
        (hash_en, en), test_en, (hash_de, de), test_de = by_test
        assert hash_en == hash_de and (en.train, en.validation) == (de.train, de.validation)
        for data in (test_en, test_de):
            assert (data.train, data.validation) == (en.train, en.validation) and len(data.test) == 24
            assert not {*map(input_of, data.test)} & {*map(input_of, (*en.train, *en.validation))}
        trained.append({input_of(example) for example in en.train})
        assert definition(train.task)["duplicates"] == "drop from the test", "other names, as train was another"
    assert first["text"] in trained[1] and second["text"] in trained[1] and third["text"] not in trained[1]


def test_a_kept_model_of_one_test_knows_the_rows_that_trained_it(model_folder: Path, tmp_path: Path) -> None:
    """`score --train` reads them again: copies of a test stay in train."""
    file = Path(write_transfer(tmp_path))
    file.write_text(file.read_text().replace("{name: own,", "{name: own, duplicates: drop,"))
    with (tmp_path / "de.jsonl").open("a") as test:
        test.writelines((tmp_path / "train.jsonl").read_text().splitlines(keepends=True)[:5])
    task = find_task(f"{file}:de")
    read = read_task(keep_untrained(task, model_folder, tmp_path / "kept"))
    trained, again = (load_examples(find_source(one, tmp_path), False) for one in (task, read))
    assert again == trained and read.part_of == "own"
    scored = find_task_data(tmp_path / "kept", tmp_path)
    assert scored is not None and [row["id"] for row in scored.judge()] == [example.id for example in trained.test]


def test_a_kept_model_is_judged_on_the_groups_that_its_training_held_out(model_folder: Path, tmp_path: Path) -> None:
    """Groups are drawn whole, so the test split of a folder without a test file is another one without them."""
    rows = [{"text": f"the {n}th text", "label": n % 2, "page": f"page {n // 4}"} for n in range(40)]
    write_jsonl(tmp_path / "train.jsonl", rows)
    (tmp_path / "own.yaml").write_text(
        "{name: own, family: sequence_classification, metric: accuracy, template: '{text}', classes: [bad, good],\n"
        "group: page, files: [{train: train.jsonl}]}\n"
    )
    task = find_task(str(tmp_path / "own.yaml"))
    held_out = load_examples(find_source(task, tmp_path), False).test
    scored = find_task_data(keep_untrained(task, model_folder, tmp_path / "kept"), tmp_path)
    assert scored is not None and [row["id"] for row in scored.judge()] == [example.id for example in held_out]
