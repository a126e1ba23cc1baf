"""Rows of a source → checked examples of a task, in its splits. Whatever comes out is well-formed.

Splits that the source does not have are drawn, as `spec.Splits` says. Labels and tags come out as numbers, tags in
IOB2, answers as exact spans of their context, documents without the prefixes of the encoder's input.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

from biphase import console
from biphase.errors import InputError
from biphase.tasks.drawing import Judgements, draw_items, draw_queries, hold_out
from biphase.tasks.sources import PartName, Row, TaskSource, column, id_of, own_name, read_rows, shown, text_column
from biphase.tasks.spec import TASK_SPLITS, EvaluatedSplit, Family, Scheme, Task, TaskSplit, template_columns


@dataclass(frozen=True)
class LabelledText:
    id: str
    text: str
    """The task's template, filled."""
    label: int


@dataclass(frozen=True)
class TaggedWords:
    id: str
    words: tuple[str, ...]
    tags: tuple[int, ...]
    """Numbers of `Task.classes`, which are in IOB2."""


@dataclass(frozen=True)
class Answer:
    """A span of the context: `context[start : start + len(text)] == text`."""

    text: str
    start: int


@dataclass(frozen=True)
class Question:
    id: str
    question: str
    context: str
    answers: tuple[Answer, ...]
    """None of them: unanswerable."""
    candidates: tuple[Answer, ...] = ()
    """ReCoRD's entities, in the order of the text; `question` keeps its @placeholder."""


AnyExample = LabelledText | TaggedWords | Question
ExampleKind = TypeVar("ExampleKind", bound=AnyExample)


@dataclass(frozen=True)
class TaskData(Generic[ExampleKind]):
    """The examples of a task; every split has some. `left_out` counts the rows without a gold label and broken ones."""

    task: Task
    source: str
    train: tuple[ExampleKind, ...]
    validation: tuple[ExampleKind, ...]
    test: tuple[ExampleKind, ...]
    left_out: int

    @property
    def splits(self) -> dict[TaskSplit, tuple[ExampleKind, ...]]:
        return {"train": self.train, "validation": self.validation, "test": self.test}


@dataclass(frozen=True)
class Collection:
    """Documents, the queries that are judged, and the judgements, of a retrieval task. Texts have no prefixes."""

    task: Task
    source: str
    documents: dict[str, str]
    queries: dict[str, str]
    train: tuple[tuple[str, str], ...]
    """(query id, relevant document id); empty where the task is trained on another one."""
    relevance: dict[EvaluatedSplit, Judgements]
    """Every judgement of the queries that are evaluated, of grade 0 and below too."""
    judged_documents: dict[EvaluatedSplit, tuple[str, ...]]
    """The documents that a judgement of the split names, whether its query is evaluated or not."""
    left_out: int
    """Queries of train without a relevant document."""


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
    if source.task.family == "retrieval":
        return load_collection(source, judged_only)
    makers: dict[Family, Callable[[TaskSource, str, Row], AnyExample | None]] = {
        "sequence_classification": make_text,
        "token_classification": make_words,
        "question_answering": make_question,
    }
    task, make = source.task, makers[source.task.family]
    examples: dict[TaskSplit, list[AnyExample]] = {}
    left_out = 0
    for split in source.splits:
        found = [None if row is None else make(source, place, row) for place, row in read_rows(source, split)]
        examples[split] = [example for example in found if example is not None]
        left_out += len(found) - len(examples[split])
        if not examples[split]:
            raise InputError(f"task '{task.name}': the {split} split in {source.name} has no labelled examples")
        if task.family == "question_answering":  # answers are compared by id
            [(id, times)] = Counter(example.id for example in examples[split]).most_common(1)
            if times > 1:
                raise InputError(f"{source.name}: the {split} split has two questions with the id '{id}'")
    if "validation" not in examples:
        if len(examples["train"]) < 2:
            raise InputError(
                f"task '{task.name}': the train split in {source.name} is too small to hold out a validation"
            )
        examples["train"], examples["validation"] = hold_out(examples["train"])
    train, validation, test = (tuple(examples[split]) for split in TASK_SPLITS)
    return TaskData[Any](task, source.name, train, validation, test, left_out)


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


def make_text(source: TaskSource, place: str, row: Row) -> LabelledText | None:
    task = source.task
    label = column(source, place, row, task.label)
    if str(label) in task.unlabelled:
        return None
    texts = {name: text_column(source, place, row, name) for name in template_columns(task.template)}
    return LabelledText(id_of(place, row), task.template.format(**texts), label_number(task, place, label))


def label_number(task: Task, place: str, value: Any) -> int:
    """The number of a label given by name or by number (GLUE's files write numbers as text)."""
    is_number = isinstance(value, int) and not isinstance(value, bool)
    if (isinstance(value, str) or is_number) and str(value) in task.classes:
        return task.classes.index(str(value))
    number = int(value) if isinstance(value, str) and value.isdecimal() else value
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < len(task.classes):
        raise InputError(
            f"{place}: label {value!r} is not one of task '{task.name}': {', '.join(task.classes)} "
            f"(or 0 to {len(task.classes) - 1})"
        )
    return number


def make_words(source: TaskSource, place: str, row: Row) -> TaggedWords:
    task = source.task
    tags = column(source, place, row, task.label)
    words = column(source, place, row, task.words)
    if not isinstance(words, list) or not words or not all(isinstance(word, str) and word for word in words):
        raise InputError(
            f"{place}: column '{own_name(source, task.words)}' must be a list of words, none of them empty"
        )
    if not isinstance(tags, list) or len(tags) != len(words):
        num_tags = f"{len(tags)} tags" if isinstance(tags, list) else "no list of tags"
        raise InputError(f"{place}: {num_tags} for {len(words)} words")
    tags = to_iob2(tags, source.form.scheme, place)
    return TaggedWords(id_of(place, row), tuple(words), tuple(label_number(task, place, tag) for tag in tags))


def to_iob2(tags: Sequence[Any], scheme: Scheme, place: str) -> list[Any]:
    """The tags of a sentence in IOB2: every entity begins with B-. Broken ones in IOB2 or BIOES stay broken.

    IOB1 marks a beginning only where an entity follows another of its type, so IOB2 read as IOB1 is itself.
    """
    if scheme == "IOB2":
        return list(tags)
    known = {"IOB1": "BI", "BIOES": "BIES"}[scheme]
    before = "O"
    made = []
    for tag in tags:
        if not isinstance(tag, str) or (tag != "O" and (tag[:1] not in known or tag[1:2] != "-")):
            raise InputError(f"{place}: tag {tag!r} is not of the scheme {scheme}")
        if tag != "O" and scheme == "BIOES":
            tag = {"S": "B", "E": "I"}.get(tag[0], tag[0]) + tag[1:]
        elif tag[:1] == "I" and before[1:] != tag[1:]:
            tag = "B" + tag[1:]
        made.append(tag)
        before = tag
    return made


def make_question(source: TaskSource, place: str, row: Row) -> Question | None:
    """None for a question about candidates without an answer: nobody knows it there."""
    id = id_of(place, row)
    context = text_column(source, place, row, "context")
    if not context.strip():
        raise InputError(f"{place}: question '{id}' has an empty context")
    locate = partial(find_answer, f"{place}: question '{id}'", context)
    own = own_name(source, "candidates")
    if own not in row:
        spans = [] if row.get("is_impossible") else read_spans(place, "answers", column(source, place, row, "answers"))
        answers = tuple(dict.fromkeys(locate(text, start) for text, start in spans))
        return Question(id, text_column(source, place, row, "question"), context, answers)
    candidates = {locate(text, start) for text, start in read_spans(place, own, row[own])}
    gold = read_spans(place, "answers", column(source, place, row, "answers"))
    if not gold:
        return None
    # The hub keeps only the texts of answers: their mentions are the candidates that read so.
    mentions = {candidate for candidate in candidates if candidate.text in {text for text, _ in gold}}
    mentions |= {locate(text, start) for text, start in gold if text not in {mention.text for mention in mentions}}
    ordered = sorted(candidates | mentions, key=lambda answer: (answer.start, len(answer.text)))
    answers = tuple(answer for answer in ordered if answer in mentions)
    return Question(id, text_column(source, place, row, "question"), context, answers, tuple(ordered))


def read_spans(place: str, name: str, value: Any) -> list[tuple[str, int]]:
    """(text, start) pairs from lists of texts and starts, a list of mappings, or a list of texts alone (start 0)."""
    if isinstance(value, dict):
        texts, starts = value.get("text"), value.get("answer_start", value.get("start"))
    elif isinstance(value, list):
        texts = [item.get("text") if isinstance(item, dict) else item for item in value]
        starts = [item.get("answer_start", item.get("start")) if isinstance(item, dict) else 0 for item in value]
    else:
        texts = starts = None
    is_right = isinstance(texts, list) and isinstance(starts, list) and len(texts) == len(starts)
    if not is_right or not all(isinstance(text, str) and text for text in texts or []):
        raise InputError(f"{place}: column '{name}' is {shown(value)}, not texts and where they start")
    if not all(isinstance(start, int) and not isinstance(start, bool) for start in starts or []):
        raise InputError(f"{place}: column '{name}' is {shown(value)}: a start is not a whole number")
    return list(zip(texts or [], starts or [], strict=True))


def find_answer(place: str, context: str, text: str, start: int) -> Answer:
    """The occurrence of `text` that is nearest to `start`: published starts are not all right."""
    if start >= 0 and context.startswith(text, start):
        return Answer(text, start)
    start = min(max(start, 0), len(context))
    found = [at for at in (context.rfind(text, 0, start + len(text)), context.find(text, start)) if at >= 0]
    if not found:
        raise InputError(f"{place}: a context without its answer '{text[:40]}'")
    return Answer(text, min(found, key=lambda at: abs(at - start)))


def load_collection(source: TaskSource, judged_only: bool) -> Collection:
    task = source.task
    # 1. Judgements, whose queries are drawn into splits where the source has no such split.
    judged = {split: read_judgements(source, split) for split in source.splits}
    for split, judgements in judged.items():
        if not judgements:
            raise InputError(f"task '{task.name}': the {split} split in {source.name} has no judgements")
    judged = draw_queries(source, judged)
    # 2. The texts that they name.
    wanted = {query for judgements in judged.values() for query in judgements}
    documents_of = {
        split: tuple(dict.fromkeys(itertools.chain.from_iterable(judgements.values())))
        for split, judgements in judged.items()
    }
    named = set(itertools.chain.from_iterable(documents_of.values()))
    queries = read_texts(source, "queries", wanted)
    documents = read_texts(source, "corpus", named if judged_only else None)
    check_known(source, "query", wanted, queries)
    check_known(source, "document", named, documents)
    # 3. Pairs to train on. A query without a relevant document gives none; no split may have such queries alone.
    pairs: dict[TaskSplit, list[tuple[str, str]]] = {"train": []}
    for split, judgements in judged.items():
        pairs[split] = []
        for query, grades in judgements.items():
            pairs[split] += [(query, document) for document, grade in grades.items() if grade > 0]
        if not pairs[split]:
            raise InputError(f"task '{task.name}': the {split} split in {source.name} has no relevant document")
    return Collection(
        task=task,
        source=source.name,
        documents=documents,
        queries=queries,
        train=tuple(pairs["train"]),
        relevance={"validation": judged["validation"], "test": judged["test"]},
        judged_documents={"validation": documents_of["validation"], "test": documents_of["test"]},
        left_out=len(judged.get("train", {})) - len({query for query, _ in pairs["train"]}),
    )


def read_judgements(source: TaskSource, split: TaskSplit) -> Judgements:
    judgements: Judgements = {}
    for place, row in read_rows(source, split):
        assert row is not None
        query, document = (str(column(source, place, row, name)) for name in ("query-id", "corpus-id"))
        value = column(source, place, row, "score")
        try:
            grade = int(value)
        except (TypeError, ValueError):
            grade = None
        if grade is None or (isinstance(value, float) and value != grade):
            raise InputError(f"{place}: grade {value!r} is not a whole number")
        if judgements.setdefault(query, {}).setdefault(document, grade) != grade:
            raise InputError(f"{place}: document '{document}' has two grades for query '{query}'")
    return judgements


def read_texts(source: TaskSource, part: PartName, wanted: Set[str] | None) -> dict[str, str]:
    """Texts by id, of all rows or of those that are wanted; a title goes before its text."""
    texts: dict[str, str] = {}
    with console.track(f"read {source.task.name} {part}", None, "rows") as progress:
        for number, (place, row) in enumerate(read_rows(source, part), start=1):
            assert row is not None
            id = str(column(source, place, row, "_id"))
            if number % 10_000 == 0:
                progress.advance(10_000)
            if wanted is not None and id not in wanted:
                continue
            text = text_column(source, place, row, "text")
            if row.get(own_name(source, "title")):
                text = f"{text_column(source, place, row, 'title')} {text}"
            if texts.setdefault(id, text.strip()) != text.strip():
                raise InputError(f"{place}: a second text with the id '{id}'")
    return texts


def check_known(source: TaskSource, kind: str, judged: Set[str], texts: Mapping[str, str]) -> None:
    """Every judged query or document has its text."""
    missing = judged - texts.keys()
    if not missing:
        return
    name = {"query": "query-id", "document": "corpus-id"}[kind]
    for split in source.splits:
        for place, row in read_rows(source, split):
            if row is not None and str(row[own_name(source, name)]) in missing:
                id = row[own_name(source, name)]
                raise InputError(f"{place}: a judgement of {kind} '{id}', which {source.name} does not have")
    raise AssertionError("what is missing stands in a judgement")
