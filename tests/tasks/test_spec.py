import json
import re
import runpy
from pathlib import Path

import pytest
import yaml

from biphase.config import BUNDLED
from biphase.corpus.forms import template_columns
from biphase.errors import InputError
from biphase.tasks.examples import load_examples
from biphase.tasks.sources import definition, find_source
from biphase.tasks.spec import Hub, Splits, Task, find_task, task_table

ROOT = Path(__file__).parents[2]
DOCS = (ROOT / "docs" / "tasks.md").read_text(encoding="utf-8")
EXAMPLES = sorted((BUNDLED / "tasks").glob("*.yaml"))
PAPER = {
    *("sst2", "mnli", "qqp", "conll2003", "ontonotes5", "uner_en_ewt"),
    *("squad", "squad_v2", "record", "msmarco", "nq", "mldr_en"),
}
MINIMAL = {
    "name": "mine",
    "family": "sequence_classification",
    "metric": "accuracy",
    "template": "{text}",
    "classes": ["no way", "yes"],
    "files": [{"train": "train.tsv", "test": "test.tsv"}],
}
TAGGED = {"family": "token_classification", "metric": "f1", "classes": ["O", "B-x", "I-x"]}
ASKED = {"family": "question_answering", "metric": "f1", "classes": []}
FOUND = {"family": "retrieval", "metric": "map_at_100", "classes": [], "files": [{"test": "qrels/test.tsv"}]}
THERE = {"corpus": {"splits": ["corpus"]}, "queries": {"splits": ["queries"]}}


FILES_ONLY = {"cranfield", "squad_retrieval", "wiki_longdoc", "ud_en_ewt"}
"""Tasks without a copy in the package or on the Hub."""


def test_table_is_sound() -> None:
    assert set(task_table()) >= PAPER
    for name, task in task_table().items():
        assert name == task.name
        assert task.licence and task.citation and (task.note or name == "wnut17")
        assert task.files and (task.bundled or task.hub or name in FILES_ONLY)
        assert task.trained_on is None or task_table()[task.trained_on].trained_on is None
        unpinned = task.hub and not re.fullmatch(r"[0-9a-f]{40}", task.hub.revision or "")
        assert bool(unpinned) == ("not pinned" in task.note)
    assert {name for name, task in task_table().items() if task.trained_on == "msmarco"} == {"nq", "mldr_en"}
    assert len(task_table()["ontonotes5"].classes) == 37
    assert len({tag[2:] for tag in task_table()["ontonotes5"].classes[1:]}) == 18
    assert task_table()["conll2003"].classes[:3] == ("O", "B-PER", "I-PER")


def test_docs_list_every_task_as_it_is() -> None:
    table = list(runpy.run_path(str(ROOT / "scripts" / "docs_site.py"))["tasks"]())
    rows = {cells[1].strip("* "): cells for line in table if len(cells := line.split("|")) == 8}
    layouts = DOCS.partition("## What `--data-dir` may hold")[2]
    for name, task in task_table().items():
        assert rows[name][1].strip().startswith("**") == (name in PAPER)
        for layout in task.files:
            files = [place for place in (layout.train, layout.validation, layout.test) if place]
            assert all(f"`{file}`" in layouts or (file.endswith(".jsonl") and "qrels" in file) for file in files)


def test_own_tasks_are_in_the_form_of_a_users(tmp_path: Path) -> None:
    """A document of tasks.yaml under another name is a task file (of a bundled task, with its data as a folder)."""
    documents = (ROOT / "src/biphase/tasks/tasks.yaml").read_text(encoding="utf-8").split("\n---\n")[1:]
    assert len(documents) == len(task_table())
    for text in documents:
        path = tmp_path / "mine.yaml"
        path.write_text(text.replace("name: ", "name: my-", 1).replace("bundled: true\n", ""), encoding="utf-8")
        mine = find_task(str(path))
        own = task_table()[mine.name.removeprefix("my-")]
        assert mine.model_copy(update={"name": own.name, "bundled": own.bundled}) == own
        assert definition(mine) == definition(own)


def test_a_size_is_no_part_of_what_a_task_is() -> None:
    task = task_table()["sst2"]
    assert task.size is not None and definition(task.model_copy(update={"size": None})) == definition(task)


FILES = {
    "reviews": {
        f"{split}.tsv": f"title\tbody\tstars\n{split}\tb\tpositive\nC\td\t0\n" for split in ("train", "dev", "test")
    },
    "similarity": {
        f"{split}.csv": f"sentence1,sentence2,score\n{split},b,4.5\nC,d,0\n" for split in ("train", "dev", "test")
    },
    "subjects": {
        f"{split}.csv": f"title,body,subjects\n{split},b,health;sports\nC,d,\n" for split in ("train", "dev", "test")
    },
    "exams": {
        f"{split}.csv": f"question,A,B,C,D,answer\n{split},1,2,3,4,B\nC,5,6,7,8,3\n"
        for split in ("train", "dev", "test")
    },
    "prescriptions": {f"{split}.conll": "ten NN B-dose\nmg NN E-dose\n\n" * 4 for split in ("train", "test")},
    "pos_ewt": {
        f"en_ewt-ud-{split}.conllu": "1\tYes\tyes\tINTJ\tUH\t_\t0\troot\t_\t_\n\n" * 30 for split in ("dev", "test")
    },
    "manuals": {
        f"{split}.json": json.dumps(
            {
                "data": [
                    {
                        "paragraphs": [
                            {
                                "context": "Press it twice.",
                                "qas": [
                                    {"id": str(i), "question": "What?", "answers": [{"text": "it", "answer_start": 6}]}
                                    for i in range(3)
                                ],
                            }
                        ]
                    }
                ]
            }
        )
        for split in ("train", "dev")
    },
    "handbook": {
        "corpus.jsonl": '{"_id": "d", "title": "T", "text": "x"}\n',
        "queries.jsonl": "".join(f'{{"_id": "q{i}", "text": "?"}}\n' for i in range(5)),
        "qrels/train.tsv": "query-id\tcorpus-id\tscore\n" + "".join(f"q{i}\td\t1\n" for i in range(4)),
        "qrels/test.tsv": "query-id\tcorpus-id\tscore\nq4\td\t1\n",
    },
}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_tasks_load(tmp_path: Path, path: Path) -> None:
    task = find_task(str(path))
    for name, content in FILES[task.name].items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    data = load_examples(find_source(task, tmp_path), judged_only=True)
    assert data.task == task and data.train
    if task.name == "exams":
        assert [example.label for example in data.test] == [1, 3]
    if task.name == "prescriptions":
        assert data.test[0].tags == (3, 4)


def test_docs_show_every_family() -> None:
    assert {path.stem for path in EXAMPLES} == set(FILES)
    assert {find_task(str(path)).family for path in EXAMPLES} == {task.family for task in task_table().values()}
    assert all(f"bundled/tasks/{path.name}" in DOCS for path in EXAMPLES)


def test_unknown_task() -> None:
    with pytest.raises(InputError, match=r"unknown task 'sst'; did you mean 'sst2'\?"):
        find_task("sst")
    with pytest.raises(InputError, match=r"none\.yaml does not exist"):
        find_task("none.yaml")


BAD_TASKS = [
    ({"templat": "{text}"}, "unknown key 'templat'; did you mean 'template'"),
    ({"files": [{"train": "a", "tset": "b", "test": "c"}]}, r"unknown key 'files\.0\.tset'; did you mean 'test'"),
    ({"files": [{}]}, "train is missing beside test: nothing"),
    ({"files": [{"train": "a", "validation": "b", "test": "b"}]}, "b is given as two splits"),
    ({"files": [{"test": "a.tsv"}]}, r"train is missing beside test: a\.tsv"),
    ({"family": "tagging"}, "'family' is 'tagging'"),
    ({"name": "a/b"}, "'name' is 'a/b'"),
    ({"name": "sst2"}, "'sst2' is the name of a task of biphase's own"),
    ({"bundled": True}, "'bundled' and 'part_of' are set by biphase itself"),
    ({"metric": "acuracy"}, "not for sequence_classification; did you mean 'accuracy'"),
    ({"metric": "f1", "classes": ["a", "b", "c"]}, "'f1' needs two classes"),
    ({"classes": ["a"]}, "two or more"),
    ({"classes": ["a", "a"]}, "none of them twice"),
    ({"classes": [False, True]}, "'classes.0' is False: .* put a text in quotes that YAML takes for "),
    ({"template": "text"}, "template must name a column in braces"),
    ({"template": "{}"}, "only names of columns may be in braces"),
    ({"template": "{a!r}"}, "only names of columns may be in braces; `rename` changes them"),
    ({"template": "{a: b}"}, "only names of columns may be in braces"),
    ({"template": "{a"}, "a brace that is text is doubled"),
    ({"query_template": "Query:"}, "query_template must have {text} once, and no other column"),
    ({"trained_on": "msmarco"}, "trained_on is for retrieval"),
    ({"labels": {"a": "yess"}}, "labels: 'yess' is not a class; did you mean 'yes'"),
    ({"labels": {"yes": "no way"}}, "labels: 'yes' is a class itself; take it out of the classes"),
    (ASKED | {"template": "{question} {context}", "labels": {"a": "b"}}, "question_answering has no classes for lab"),
    (FOUND | {"duplicates": "drop"}, "duplicates is for tasks of rows"),
    (TAGGED | {"classes": ["B-x", "I-x", "O"]}, "classes must begin with O"),
    (TAGGED | {"classes": ["O", "S-x"]}, "not 'S-x'"),
    (TAGGED | {"classes": ["O", "X"], "metric": "accuracy"}, "not 'X'; for tags that mark no spans, name O last"),
    ({"problem_type": "regression", "metric": "accuracy"}, "metric 'accuracy' is not for regression"),
    ({"problem_type": "regression", "metric": "pearson"}, "regression has no classes"),
    (TAGGED | {"problem_type": "regression"}, "problem_type is for sequence_classification"),
    (TAGGED | {"classes": ["NOUN", "VERB"]}, "unless metric is 'accuracy'"),
    (TAGGED | {"files": [{"train": "a", "test": "b", "scheme": "IOBES"}]}, r"'files\.0\.scheme' is 'IOBES'"),
    (ASKED | {"template": "{context} {question}"}, "template must have {question} and end in {context}"),
    (ASKED | {"template": "{question} {context}", "classes": ["a", "b"]}, "question_answering has no classes"),
    (FOUND | {"trained_on": "nope"}, "trained_on: no retrieval task 'nope'; known: cranfield"),
    (FOUND | {"trained_on": "sst2"}, "trained_on: no retrieval task 'sst2'"),
    (FOUND | {"trained_on": "nq", "files": [{"train": "a", "test": "b"}]}, "has no train"),
    (FOUND | {"files": [{"validation": "a", "test": "b"}]}, "train is missing beside test: b"),
    (FOUND | {"hub": {"id": "a/b", "splits": {"test": "test"}}}, "retrieval needs corpus and queries"),
    (FOUND | {"hub": {"id": "a/b", "splits": {"tst": "t"}} | THERE}, r"unknown key 'hub\.splits\.tst'; did you mean"),
]


@pytest.mark.parametrize(("changes", "message"), BAD_TASKS)
def test_bad_tasks(tmp_path: Path, changes: dict, message: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(MINIMAL | changes))
    with pytest.raises(InputError, match=message) as caught:
        find_task(str(path))
    assert str(caught.value).startswith(str(path)) and "\n" not in str(caught.value)


def test_own_tasks(tmp_path: Path) -> None:
    path = tmp_path / "mine.yml"
    path.write_text(yaml.safe_dump(MINIMAL))
    assert find_task(str(path)) == Task.model_validate(MINIMAL)
    path.write_text(yaml.safe_dump(MINIMAL | FOUND | {"trained_on": "msmarco"}))
    assert find_task(str(path)).trained_on == "msmarco"


def test_doubled_braces_are_text() -> None:
    assert template_columns("{{{text}}}") == ("text",)


def test_nothing_is_pinned_to_a_branch_by_accident() -> None:
    assert task_table()["ontonotes5"].hub == Hub(
        id="tner/ontonotes5",
        revision="refs/convert/parquet",
        splits=Splits(train="train", validation="validation", test="test"),
    )
