"""The description of a task: its family, its columns and classes, and the places of its splits.

Tasks are data, not code: `tasks.yaml` has biphase's own, and a user's file has the same keys. `sources.py` finds the
files or the Hub data behind a task, `examples.py` reads them.
"""

import re
from functools import cache
from pathlib import Path
from typing import Annotated, ClassVar, Literal, get_args

import yaml
from pydantic import Field, model_validator

from biphase.config import FolderName, Strict, load_config, parse_config
from biphase.corpus.forms import template_columns
from biphase.corpus.rows import FileForm
from biphase.errors import InputError, nearest, refuse_unknown
from biphase.tasks.families import KINDS, SEQUENCE_CLASSIFICATION, Family, Kind, ProblemType, TaskSize

TaskSplit = Literal["train", "validation", "test"]
TASK_SPLITS: tuple[TaskSplit, ...] = get_args(TaskSplit)
EvaluatedSplit = Literal["validation", "test"]
EVALUATED_SPLITS: tuple[EvaluatedSplit, ...] = get_args(EvaluatedSplit)
Scheme = Literal["IOB1", "IOB2", "BIOES", "BILOU"]

PAPER_TASKS = (
    *("sst2", "mnli", "qqp"),
    *("conll2003", "ontonotes5", "uner_en_ewt"),
    *("squad", "squad_v2", "record"),
    *("msmarco", "nq", "mldr_en"),
)
"""The paper's twelve tasks."""

TestName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")]
Name = Annotated[str, Field(coerce_numbers_to_str=True)]
"""A text, even one that YAML reads as a number."""


class Splits(Strict):
    """The place of each split: a file name in a folder, or a split name on the Hub; in retrieval, of its judgements.

    A split without a place is drawn with seed 42: test is 10 % of train, then validation 5 % of the rest; with
    `Task.stratified` each class keeps its share. In retrieval, test must have a place, and queries are drawn:
    validation is 5 % of train's queries, at least 100 but no more than half. Without train, a task that is trained on
    another one takes half of test's queries for validation; any other takes half of them for train and a quarter for
    validation.
    """

    train: str | None = None
    validation: str | None = None
    test: str | dict[TestName, str] | None = None
    """A place, or several by name, to train once and test on each (zero-shot transfer): `{de: test_de.tsv, fr:
    test_fr.tsv}`."""

    @model_validator(mode="after")
    def splits_differ(self) -> "Splits":
        tests = self.test.values() if isinstance(self.test, dict) else [self.test]
        places = [location for location in (self.train, self.validation, *tests) if location is not None]
        twice = next((location for location in places if places.count(location) > 1), None)
        if twice is not None and not self.is_divided:
            raise ValueError(f"{twice} is given as two splits; leave one out: what has no place is drawn from train")
        return self

    @property
    def is_divided(self) -> bool:
        """Whether one place holds several splits."""
        return False

    @property
    def named(self) -> dict[TaskSplit, str]:
        """The splits with one place, and that place."""
        places = {name: getattr(self, name) for name in TASK_SPLITS}
        return {name: location for name, location in places.items() if isinstance(location, str)}


class FileLayout(FileForm, Splits):
    """The files that a folder may have, plain or as `.zst` or `.gz`; `*` in a name matches several files, in order, and
    `**` also those in folders below."""

    later: ClassVar[frozenset[str]] = frozenset({"quotes", "has_header", "delimiter", "split_column"})

    split_column: Name | None = None
    """The column that names the split of each row, where one file has several: `train` or `training`; `validation`,
    `valid`, `val` or `dev`; `test` or `testing`. Name the file for each of them."""
    corpus: str = "corpus.jsonl"
    queries: str = "queries.jsonl"
    rename: dict[Name, str] = Field(default_factory=dict)
    """The file's names of columns → the task's. `meta.text` is the `text` in an object `meta`."""
    scheme: Scheme = "IOB2"
    """The scheme of tags in the file. Examples always have IOB2."""

    @property
    def is_divided(self) -> bool:
        return self.split_column is not None

    @property
    def splits(self) -> Splits:
        """The layout itself, as the counterpart of `Hub.splits`."""
        return self


class HubRows(Strict):
    """Rows of a Hub repository, from one or more splits."""

    config: str | None = None
    splits: Annotated[tuple[str, ...], Field(min_length=1)]


class Hub(Strict):
    """A data set repository of the Hugging Face Hub."""

    id: str
    config: str | None = None
    revision: str | None = None
    """A commit. A tag, a branch or None becomes a commit when the task is read."""
    splits: Splits
    corpus: HubRows | None = None
    queries: HubRows | None = None
    rename: dict[str, str] = Field(default_factory=dict)
    scheme: Scheme = "IOB2"


class Task(Strict):
    """A task, as `tasks.yaml` and a user's file describe it."""

    later: ClassVar = frozenset(
        {"problem_type", "choices", "multi_hot", "missing", "duplicates", "stratified", "group", "labels"}
    )

    name: FolderName
    family: Family
    metric: str
    """The metric that chooses a learning rate, on validation."""
    template: str = ""
    """The input, with columns in braces: a text or a pair; a question and, at the end, its context; or a question and
    one {choice}."""
    choices: tuple[str, ...] = ()
    """Multiple choice: the column with the list of choices, or a column for each. `classes` are their names."""
    problem_type: ProblemType | None = None
    """Sequence classification, by transformers' names: whether the label is a number or a set of classes. None: one
    class."""
    multi_hot: bool | None = None
    """Sets of classes: whether a list of labels has a 0 or 1 for each class, in order. None: such a list is an error,
    because it could also name classes by their index."""
    missing: Literal["refuse", "drop"] = "refuse"
    """Classification and multiple choice: whether rows without a label or text are an error, or are left out. Either
    way, they are counted."""
    duplicates: Literal["keep", "drop"] = "keep"
    """Tasks of rows: whether exact copies of an input are left out, and counted, before splits are drawn. Of equal
    inputs, the first one of test stays, else of validation, else of train. With several tests, copies in a test are
    left out, because all tests share one training."""
    stratified: bool = False
    """Classification: whether each class has its share of train in drawn splits."""
    group: str | None = None
    """The column whose value is the same for rows of one page, patient or author. Drawn splits hold out whole groups,
    of about the right size and, with `stratified`, shares of classes. Groups in two splits are printed."""
    label: str = "label"
    """Classification: the column with the label, the number, or the list of labels or tags."""
    classes: tuple[Name, ...] = ()
    """Classification: the names of the labels, which a column may hold by name or by index from 0. Tags are in IOB2, O
    first; with `metric: accuracy` or `macro_f1` any tags, such as parts of speech, where O is not the first."""
    labels: dict[Name, Name] = Field(default={})
    """Classification: other labels in the data, and the class of each: `{network: Network}`. Blanks around a label do
    not count, and accents may be composed or not (Unicode's NFC)."""
    unlabelled: tuple[Name, ...] = ()
    """Values of `label` that mean an unknown label. Such rows are left out and counted."""
    words: str = "tokens"
    """Token classification: the column with the list of words."""
    query_template: str = "Query: {text}"
    document_template: str = "Document: {text}"
    part_of: str | None = Field(default=None, exclude=True)
    """The task that has this as one of several tests (`with_test`)."""
    trained_on: str | None = None
    """Retrieval: one of biphase's own tasks to train on, for a task without a train split."""
    bundled: bool = False
    """Whether the package has the data, in `bundled/tasks`."""
    files: tuple[FileLayout, ...] = ()
    """The layouts that a `data_dir` may have, in order of preference."""
    hub: Hub | None = None
    size: TaskSize | None = None
    """The size of the task, which is not part of a cell's name. None: the typical size of its family."""
    licence: str = ""
    citation: str = ""
    note: str = ""

    @property
    def forms(self) -> "tuple[FileLayout | Hub, ...]":
        """All forms that the data may have, in order of preference."""
        return (*self.files, self.hub) if self.hub else self.files

    @property
    def kind(self) -> Kind:
        """The record of its family and problem type."""
        return KINDS[self.problem_type or self.family]

    @model_validator(mode="after")
    def keys_fit(self) -> "Task":
        """Raise `ValueError` with the first sentence whose condition is true."""
        kind, kind_name, metric, classes = self.kind, self.problem_type or self.family, self.metric, self.classes
        is_mistyped = self.problem_type is not None and KINDS[self.family] is not SEQUENCE_CLASSIFICATION
        is_text, is_tagging, is_retrieval = kind.is_of_texts, kind.is_tagging, kind.is_search
        is_single, is_several = kind.has_strata, kind.has_label_sets
        metrics, has_classes, has_choices = kind.metrics, kind.has_classes, bool(self.choices)
        has_entities, has_tags = is_tagging and classes[:1] == ("O",), metric in ("accuracy", "macro_f1")
        odd = next((name for name in classes[1:] if name[:2] not in ("B-", "I-") or len(name) == 2), None)
        are_distinct = len(classes) >= 2 and len(set(classes)) == len(classes)
        columns = template_columns(self.template)
        lacks_texts = self.hub is not None and None in (self.hub.corpus, self.hub.queries)
        own = next((name for name in self.labels if name in classes), None)
        unknown = next((name for name in self.labels.values() if name not in classes), "")
        plain_o = "for tags that mark no spans, name O last, with metric: accuracy"
        is_question = columns == ("question", "context") and self.template.endswith("{context}")
        table = [
            (is_mistyped, "problem_type is for sequence_classification"),
            (self.stratified and not is_single, "stratified is for sequence_classification with one class for each"),
            (self.group is not None and is_retrieval, "group is for tasks of rows: retrieval draws whole queries"),
            (self.duplicates == "drop" and is_retrieval, "duplicates is for tasks of rows"),
            (bool(self.labels) and (has_choices or not has_classes), f"{kind_name} has no classes for labels to name"),
            (own is not None, f"labels: '{own}' is a class itself; take it out of the classes, or out of labels"),
            (bool(unknown), f"labels: '{unknown}' is not a class{nearest(unknown, classes)}"),
            (self.multi_hot is not None and not is_several, "multi_hot is for multi_label_classification"),
            (metric not in metrics, f"metric '{metric}' is not for {kind_name}{nearest(metric, metrics)}"),
            (is_text and metric == "f1" and len(classes) != 2, "metric 'f1' needs two classes; use macro_f1"),
            (bool(classes) and not has_classes, f"{kind_name} has no classes"),
            (has_classes and not are_distinct, "classes must be two or more, none of them twice"),
            (is_tagging and not (has_entities or has_tags), "classes must begin with O, unless metric is 'accuracy'"),
            (has_entities and metric == "macro_f1", "macro_f1 is for tags that are not entities: take f1 or strict_f1"),
            (has_entities and odd is not None, f"classes after O must be B-… and I-… (IOB2), not '{odd}'; {plain_o}"),
            (is_text and not columns, "template must name a column in braces, such as {text}"),
            (has_choices != kind.has_choices, "choices are columns of multiple_choice, and of it alone"),
            (has_choices and "choice" not in columns, "template must have {choice}"),
            (kind.is_answering and not is_question, "template must have {question} and end in {context}"),
            (self.trained_on is not None and not is_retrieval, "trained_on is for retrieval"),
            (is_retrieval and lacks_texts, "hub: retrieval needs corpus and queries"),
        ]
        for key in ("query_template", "document_template"):
            columns_of = template_columns(getattr(self, key))
            table.append((columns_of != ("text",), f"{key} must have {{text}} once, and no other column"))
        for splits in (form.splits for form in self.forms):
            may_lack_train = is_retrieval and (self.trained_on is not None or splits.validation is None)
            table += [
                (is_retrieval and splits.test is None, "test is missing: retrieval needs judgements of its queries"),
                (bool(self.trained_on and splits.train), "a task that is trained_on another one has no train"),
                (not (splits.train or may_lack_train), f"train is missing beside test: {splits.test or 'nothing'}"),
            ]
        for is_wrong, sentence in table:
            if is_wrong:
                raise ValueError(sentence)
        return self


def split_name(name: str) -> tuple[str, str]:
    """Split a task's name from that of its test: `xnli.yaml:de` → `xnli.yaml`, `de`; `snli` → `snli`, nothing."""
    match = re.fullmatch(r"(.+\.ya?ml):([^:/]+)", name)
    return (match[1], match[2]) if match else (name, "")


def test_names(task: Task) -> tuple[str, ...]:
    """List the names of a task's tests, if it has several."""
    places = [form.splits.test for form in task.forms]
    return tuple(dict.fromkeys(name for tests in places if isinstance(tests, dict) for name in tests))


def name_tests(name: str) -> tuple[str, ...]:
    """List a task's name, or one name for each of its tests: `xnli.yaml` → `xnli.yaml:de`, `xnli.yaml:fr`."""
    return tuple(f"{name}:{test}" for test in test_names(find_task(name))) or (name,)


def with_test(task: Task, test: str) -> Task:
    """Make a task from one of a task's tests, such as `xnli.de`."""
    refuse_unknown(f"task '{task.name}' has no test", test, test_names(task))
    files: list[Splits] = []
    hub: Hub | None = None
    for form in task.forms:
        tests = form.splits.test
        if isinstance(tests, dict) and test in tests:
            splits = form.splits.model_copy(update={"test": tests[test]})
            if isinstance(form, FileLayout):
                files.append(splits)
            else:
                hub = form.model_copy(update={"splits": splits})
    chosen = {"name": f"{task.name}.{test}", "part_of": task.name, "files": tuple(files), "hub": hub}
    return task.model_copy(update=chosen)


@cache
def task_table() -> dict[str, Task]:
    """Read biphase's own tasks, by name."""
    path = Path(__file__).with_name("tasks.yaml")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml, if it is there, is ten times faster
    with open(path, encoding="utf-8") as file:
        tasks = [parse_config(Task, tree, origin=str(path)) for tree in yaml.load_all(file, loader)]
    return {task.name: task for task in tasks}


def is_own_task(task: Task) -> bool:
    """Tell whether a task is biphase's own, with published files and the paper's settings."""
    return task.name in task_table()


def find_task(name: str) -> Task:
    """Find a task by its name in the table, or by its YAML file; `FILE.yaml:TEST` is one of its tests. Raises
    `InputError` for an unknown name or a mistake in the file."""
    table = task_table()
    name, test = split_name(name)
    if not name.endswith((".yaml", ".yml")):
        refuse_unknown("unknown task", name, table)
        return table[name]
    task = load_config(Task, Path(name))
    if task.name in table:
        raise InputError(f"{name}: '{task.name}' is the name of a task of biphase's own; choose another")
    if task.bundled or task.part_of:
        raise InputError(f"{name}: 'bundled' and 'part_of' are set by biphase itself: leave them out")
    alike = [name for name, own_task in table.items() if own_task.family == task.family]
    if task.trained_on is not None:
        refuse_unknown(f"{name}: trained_on: no retrieval task", task.trained_on, alike)
    return with_test(task, test) if test else task
