"""Rows of a source → checked examples of a task, in its splits. Whatever comes out is well-formed.

Splits that the source does not have are drawn, as `spec.Splits` says. Labels and tags come out as numbers, tags in
IOB2, answers as exact spans of their context, documents without the prefixes of the encoder's input.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from string import Formatter
from typing import Any, Generic, Literal, TypeVar

import numpy as np

from biphase.console import err
from biphase.corpus.readers import ABSENT, find_field
from biphase.errors import InputError, first_of
from biphase.tasks.collection import Collection, load_collection
from biphase.tasks.drawing import TEST_SHARE, TRAIN_SHARE, Judgements, draw_items, hold_out
from biphase.tasks.labels import (
    Answer,
    find_answer,
    is_missing,
    is_unlabelled,
    label_number,
    label_numbers,
    read_spans,
    right_choice,
    score_number,
    to_iob2,
)
from biphase.tasks.rows import Row
from biphase.tasks.sources import (
    TaskSource,
    check_distinct,
    column,
    id_of,
    own_name,
    read_rows,
    shown,
    text_column,
)
from biphase.tasks.spec import (
    TASK_SPLITS,
    EvaluatedSplit,
    Family,
    Task,
    TaskSplit,
    is_own_task,
    template_columns,
)

CLASSES_SHOWN = 5
"""Classes that are named of those that a split has not."""

Stretch = tuple[int, int]
"""Characters of a text, from and up to."""


@dataclass(frozen=True)
class LabelledText:
    id: str
    text: str
    """The task's template, filled."""
    label: int | float | tuple[int, ...]
    """A number of `Task.classes`, or as the task's `problem_type` says: a score, or the numbers of several classes."""
    columns: tuple[Stretch, ...] = field(default=(), compare=False)
    """Where the columns of the template stand in the text."""


@dataclass(frozen=True)
class ChoiceTexts:
    """A question with each of its choices filled into the template."""

    id: str
    choices: tuple[LabelledText, ...]
    right: int


@dataclass(frozen=True)
class TaggedWords:
    id: str
    words: tuple[str, ...]
    tags: tuple[int, ...]
    """Numbers of `Task.classes`, which are in IOB2."""


@dataclass(frozen=True)
class Question:
    id: str
    question: str
    context: str
    answers: tuple[Answer, ...]
    """None of them: unanswerable."""
    candidates: tuple[Answer, ...] = ()
    """ReCoRD's entities, in the order of the text; `question` keeps its @placeholder."""


AnyExample = LabelledText | TaggedWords | Question | ChoiceTexts
ExampleKind = TypeVar("ExampleKind", bound=AnyExample)


@dataclass(frozen=True)
class TaskData(Generic[ExampleKind]):
    """The examples of a task; every split has some. `left_out` counts rows without label or text, and broken ones."""

    task: Task
    source: str
    train: tuple[ExampleKind, ...]
    validation: tuple[ExampleKind, ...]
    test: tuple[ExampleKind, ...]
    left_out: int

    @property
    def splits(self) -> dict[TaskSplit, tuple[ExampleKind, ...]]:
        return {"train": self.train, "validation": self.validation, "test": self.test}


def load_examples(source: TaskSource, judged_only: bool) -> TaskData[Any] | Collection:
    """Read and check everything.

    Args:
        judged_only: of a collection keep only the documents that its judgements name, in any split of the task. The
            others are read past, so that millions of them do not fill the memory.

    Raises:
        InputError: naming file and line (or question, or document) for what does not fit the task: a missing column, a
            label outside its set, tags that do not match words, an answer that is not in its context, a judgement of
            an unknown document; a split without examples, or one too small to draw another from.
    """
    check_distinct(source)
    if source.task.family == "retrieval":
        return load_collection(source, judged_only)
    makers: dict[Family, Callable[[TaskSource, str, Row], AnyExample | None]] = {
        "sequence_classification": make_text,
        "token_classification": make_words,
        "question_answering": make_question,
        "multiple_choice": make_choices,
    }
    task, make = source.task, makers[source.task.family]
    examples: dict[TaskSplit, list[AnyExample]] = {}
    left_out = 0
    missing: dict[str, list[str]] = {}
    for split in source.splits:
        examples[split] = []
        for place, row in read_rows(source, split):
            part = None if row is None else missing_part(source, place, row)
            if part is not None:
                missing.setdefault(part, []).append(place)
            example = None if row is None or part is not None else make(source, place, row)
            left_out += example is None
            examples[split] += [] if example is None else [example]
    tell_missing(task, missing)
    for split in source.splits:
        if not examples[split]:
            remedy = "; leave `test` out: a part of train takes its place" if split == "test" else ""
            raise InputError(f"task '{task.name}': the {split} split in {source.name} has no labelled examples{remedy}")
        if task.family == "question_answering":  # answers are compared by id
            [(id, times)] = Counter(example.id for example in examples[split]).most_common(1)
            if times > 1:
                raise InputError(f"{source.name}: the {split} split has two questions with the id '{id}'")
    draw_missing_splits(source, examples)
    train, validation, test = (tuple(examples[split]) for split in TASK_SPLITS)
    return TaskData[Any](task, source.name, train, validation, test, left_out)


def draw_missing_splits(source: TaskSource, examples: dict[TaskSplit, list[AnyExample]]) -> None:
    """Hold the splits that the source does not have out of train. Raises `InputError` where that is too small, and
    where texts to train on all have one label, or one number stands for a correlation."""
    shares: dict[TaskSplit, float] = {"test": 1 - TEST_SHARE, "validation": TRAIN_SHARE}
    drawn = [split for split in shares if split not in examples]
    for split in drawn:
        if len(examples["train"]) < 2:
            raise InputError(
                f"task '{source.task.name}': the train split in {source.name} is too small to hold out a {split}"
            )
        classes = [classes_of(example) for example in examples["train"]]
        strata = np.array(classes)[:, 0] if source.task.stratified else None
        examples["train"], examples[split] = hold_out(examples["train"], shares[split], strata)
    for split in TASK_SPLITS if source.task.problem_type == "regression" else TASK_SPLITS[:1]:
        labels = {example.label for example in examples[split] if isinstance(example, LabelledText)}
        if len(labels) == 1 and len(examples[split]) > 1:
            raise InputError(
                f"task '{source.task.name}': all {len(examples[split]):,} examples of {split} in {source.name} have "
                "the same label: nothing can be learnt or told from them"
            )
    if drawn:
        tell_absent_classes(source.task, examples, ["train", *drawn])


def tell_absent_classes(task: Task, examples: dict[TaskSplit, list[AnyExample]], splits: Sequence[TaskSplit]) -> None:
    """Tell which classes chance has left out of a split: each is in another one."""
    found = {split: {number for one in some for number in classes_of(one)} for split, some in examples.items()}
    for split in splits:
        absent = sorted(set().union(*found.values()) - found[split])
        if absent:
            names = first_of([task.classes[number] for number in absent], CLASSES_SHOWN)
            what = "left to train on" if split == "train" else f"drawn for {split}"
            told = f"{task.name}: none of the {len(examples[split]):,} examples {what} has {names}"
            has_shares = "" if task.stratified or task.problem_type else ", or `stratified: true`"
            err.print(f"{told}; name files for the splits{has_shares} to have all classes in each", markup=False)


def classes_of(example: AnyExample) -> tuple[int, ...]:
    """The numbers of the classes that stand in an example."""
    match example:
        case LabelledText(label=int() as number):
            return (number,)
        case LabelledText(label=tuple() as numbers) | TaggedWords(tags=numbers):
            return numbers
    return ()


def count_shared(data: TaskData[Any] | Collection) -> dict[EvaluatedSplit, int]:
    """How many inputs of validation and of test stand in train too, whatever their labels are."""
    if isinstance(data, Collection):
        trained = {data.queries[query] for query, _ in data.train}
        return {
            split: sum(data.queries[query] in trained for query in judged) for split, judged in data.relevance.items()
        }
    seen = {input_of(example) for example in data.train}
    splits: dict[EvaluatedSplit, tuple[AnyExample, ...]] = {"validation": data.validation, "test": data.test}
    return {split: sum(input_of(example) in seen for example in examples) for split, examples in splits.items()}


def input_of(example: AnyExample) -> Any:
    """All that a network sees of an example."""
    match example:
        case LabelledText():
            return example.text
        case TaggedWords():
            return example.words
        case Question():
            return example.question, example.context
        case ChoiceTexts():
            return tuple(choice.text for choice in example.choices)


def limit_evaluation(data: TaskData[Any] | Collection, num_examples: int) -> TaskData[Any] | Collection:
    """The data with at most so many examples (queries) in validation and in test, drawn with seed 42, in their order.

    The documents that are searched stay as they were: fewer of them would make every query easier.
    """
    if isinstance(data, TaskData):
        validation, test = (draw_items(examples, num_examples) for examples in (data.validation, data.test))
        return replace(data, validation=validation, test=test)
    relevance: dict[EvaluatedSplit, Judgements] = {}
    for split, judged in data.relevance.items():
        relevance[split] = {query: judged[query] for query in draw_items(tuple(judged), num_examples)}
    return replace(data, relevance=relevance)


def missing_part(source: TaskSource, place: str, row: Row) -> Literal["label", "text"] | None:
    """What an example cannot be made without, and the row lacks; None where it has all. Rows of biphase's own tasks are
    taken as they were published."""
    task = source.task
    if is_own_task(task) or task.family not in ("sequence_classification", "multiple_choice"):
        return None
    label = column(source, place, row, task.label)
    may_be_empty = task.problem_type == "multi_label_classification"
    if not is_unlabelled(task, label) and is_missing(label) and (label is None or not may_be_empty):
        return "label"
    return "text" if lacks_text(source, place, row) else None


def lacks_text(source: TaskSource, place: str, row: Row) -> bool:
    """Whether a column of the template has no value in this row, or all of them are empty."""
    names = [name for name in template_columns(source.task.template) if name != "choice"]
    values = [column(source, place, row, name) for name in names]
    return any(value is None for value in values) or (bool(values) and all(map(is_missing, values)))


def tell_missing(task: Task, places: dict[str, list[str]]) -> None:
    """Say how many rows lack a label or text. Raises `InputError` unless the task leaves them out."""
    told = [
        f"{len(some):,} {'rows have' if len(some) > 1 else 'row has'} no {part} (the first: {some[0]})"
        for part, some in places.items()
    ]
    if told and task.missing == "refuse":
        remedy = "fill them in, or leave them out by `missing: drop` in the task's file"
        raise InputError(f"task '{task.name}': {', '.join(told)}; {remedy}")
    if told:
        err.print(f"{task.name}: left out: {', '.join(told)}")


def make_text(source: TaskSource, place: str, row: Row) -> LabelledText | None:
    task = source.task
    label = column(source, place, row, task.label)
    if is_unlabelled(task, label):
        return None
    text, columns = fill_row(source, place, row)
    match task.problem_type:
        case None:
            return LabelledText(id_of(place, row), text, label_number(task, place, label), columns)
        case "regression":
            return LabelledText(id_of(place, row), text, score_number(place, task.label, label), columns)
        case "multi_label_classification":
            return LabelledText(id_of(place, row), text, label_numbers(task, place, label), columns)


def make_choices(source: TaskSource, place: str, row: Row) -> ChoiceTexts | None:
    task = source.task
    label = column(source, place, row, task.label)
    if is_unlabelled(task, label):
        return None
    texts, names = read_choices(source, place, row)
    right = right_choice(task, place, names, label)
    if max(right, len(texts) - 1) >= min(len(texts), len(task.classes)):
        told = f"task '{task.name}' names {len(task.classes)}, and {shown(label)} is right"
        raise InputError(f"{place}: {len(texts)} choices, where {told}")
    return ChoiceTexts(id_of(place, row), fill_choices(source, place, row, texts), right)


def fill_choices(source: TaskSource, place: str, row: Row, texts: list[str]) -> tuple[LabelledText, ...]:
    """The template filled with each of a row's choices."""
    own = own_name(source, "choice")
    filled = [fill_row(source, place, row | {own: text}) for text in texts]
    return tuple(LabelledText(id_of(place, row), text, 0, columns) for text, columns in filled)


def read_choices(source: TaskSource, place: str, row: Row) -> tuple[list[str], tuple[str, ...]]:
    """The choices of a row, and what it calls them itself: ARC's are {text: […], label: […]}, whose labels are A, B, …
    in some rows and 1, 2, … in others."""
    given = [column(source, place, row, name) for name in source.task.choices]
    texts: Any = given[0] if len(given) == 1 else given
    names = None
    if isinstance(texts, dict):
        texts, names = texts.get("text"), texts.get("label")
    if not isinstance(texts, list) or len(texts) < 2 or not all(isinstance(text, str) and text for text in texts):
        raise InputError(f"{place}: {shown(texts)} are not two or more choices, texts that are not empty")
    return texts, tuple(map(str, names)) if isinstance(names, list) and len(names) >= len(texts) else ()


def fill_row(source: TaskSource, place: str, row: Row) -> tuple[str, tuple[Stretch, ...]]:
    """The template filled with a row's columns, and where each of them stands in the text."""
    text, columns = "", []
    for literal, name, _, _ in Formatter().parse(source.task.template):
        text += literal
        if name is not None:
            value = text_column(source, place, row, name)
            columns.append((len(text), len(text) + len(value)))
            text += value
    return text, tuple(columns)


def make_words(source: TaskSource, place: str, row: Row) -> TaggedWords:
    task = source.task
    tags = column(source, place, row, task.label)
    words = words_of(source, place, row)
    if not isinstance(tags, list) or len(tags) != len(words):
        num_tags = f"{len(tags)} tags" if isinstance(tags, list) else "no list of tags"
        raise InputError(f"{place}: {num_tags} for {len(words)} words")
    tags = to_iob2(tags, source.form.scheme, place)
    return TaggedWords(id_of(place, row), words, tuple(label_number(task, place, tag) for tag in tags))


def words_of(source: TaskSource, place: str, row: Row) -> tuple[str, ...]:
    name = source.task.words
    words = column(source, place, row, name)
    if not isinstance(words, list) or not words or not all(isinstance(word, str) and word for word in words):
        raise InputError(f"{place}: column '{own_name(source, name)}' must be a list of words, none of them empty")
    return tuple(words)


def make_question(source: TaskSource, place: str, row: Row) -> Question | None:
    """None for a question about candidates without an answer: nobody knows it there."""
    id = id_of(place, row)
    context = text_column(source, place, row, "context")
    if not context.strip():
        raise InputError(f"{place}: question '{id}' has an empty context")
    locate = partial(find_answer, f"{place}: question '{id}'", context)
    own = own_name(source, "candidates")
    named = find_field(row, own, ABSENT)
    if named is ABSENT:
        spans = [] if row.get("is_impossible") else read_spans(place, "answers", column(source, place, row, "answers"))
        answers = tuple(dict.fromkeys(locate(text, start) for text, start in spans))
        return Question(id, text_column(source, place, row, "question"), context, answers)
    candidates = {locate(text, start) for text, start in read_spans(place, own, named)}
    gold = read_spans(place, "answers", column(source, place, row, "answers"))
    if not gold:
        return None
    # The hub keeps only the texts of answers: their mentions are the candidates that read so.
    mentions = {candidate for candidate in candidates if candidate.text in {text for text, _ in gold}}
    mentions |= {locate(text, start) for text, start in gold if text not in {mention.text for mention in mentions}}
    ordered = sorted(candidates | mentions, key=lambda answer: (answer.start, len(answer.text)))
    answers = tuple(answer for answer in ordered if answer in mentions)
    return Question(id, text_column(source, place, row, "question"), context, answers, tuple(ordered))
