"""Rows of a source become checked examples of a task, in its splits. Whatever comes out is well-formed.

Splits that the source does not have are drawn, as `spec.Splits` says. Labels and tags come out as numbers (of a class
that is given by name or number, of several classes, or a score), tags in IOB2, answers as exact spans of their context,
documents without the prefixes of the encoder's input.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import lru_cache, partial
from string import Formatter
from typing import Any, Literal

import numpy as np

from biphase.console import err
from biphase.corpus.rows import SHORT_ROW, TASK_REMEDY, PlacedRow, Row, column, excerpt
from biphase.errors import InputError, first_of, refuse_doubles
from biphase.tasks import spec
from biphase.tasks.sources import TaskSource, read_rows, text_column
from biphase.tasks.splits import TEST_SHARE, TRAIN_SHARE, Collection, TaskData, draw_indices, hold_out, load_collection

LABEL_REMEDY = f"{TASK_REMEDY}; leave a split without labels out"
MULTI_HOT = {"0": False, "0.0": False, "false": False, "1": True, "1.0": True, "true": True}
"""What a list may say of each class: whether it applies."""


def label_number(task: spec.Task, origin: str, value: Any, choices: tuple[str, ...] = ()) -> int:
    """Find the number of a label among the names that a row has for its choices, or else among the task's classes.

    Raises `InputError` for what `map_labels` does not have.
    """
    names = choices or task.classes
    by_name, by_spelling = map_labels(names)
    number = None if value is None else by_name.get(str(value), by_spelling.get(canonical_label(value)))
    if number is None:
        message = "is none of its choices" if choices else f"is not one of task '{task.name}'"
        by_number = "" if any(map(WRITTEN_NUMBER.fullmatch, names)) else f" (or 0 to {len(names) - 1})"
        raise InputError(f"{origin}: label {value!r} {message}: {', '.join(names)}{by_number}")
    return number


WRITTEN_NUMBER = re.compile(r"[+-]?\d+(\.\d*)?")


@lru_cache
def map_labels(names: tuple[str, ...]) -> tuple[dict[str, int], dict[str | Decimal, int]]:
    """List the numbers of labels by their names, and by what `canonical_label` makes of one name alone. Where no name
    is a number, a label may be its number from 0, which tables write as text."""
    spellings = [canonical_label(name) for name in names]
    by_spelling = {spelling: number for number, spelling in enumerate(spellings) if spellings.count(spelling) == 1}
    if not any(map(WRITTEN_NUMBER.fullmatch, names)):
        by_spelling |= {Decimal(number): number for number in range(len(names))}
    return {name: number for number, name in enumerate(names)}, by_spelling


def canonical_label(value: Any) -> str | Decimal:
    """Write a label as all that mean the same: a number by its value, 1 for 1.0, as pandas may write it; JSON's true
    and false, and pandas' True and False, in small letters."""
    text = str(value)
    if WRITTEN_NUMBER.fullmatch(text):
        return Decimal(text)
    return text.lower() if text.lower() in ("true", "false") else text


def score_number(origin: str, name: str, value: Any) -> float:
    """Read a label that is a number, which tables write as text."""
    number = math.nan
    with suppress(TypeError, ValueError):
        number = math.nan if isinstance(value, bool) else float(value)
    if not math.isfinite(number):
        raise InputError(f"{origin}: '{name}' is {excerpt(value)}, not a number")
    return number


def label_numbers(task: spec.Task, origin: str, value: Any) -> tuple[int, ...]:
    """List the numbers of the classes in a list of labels, ascending."""
    labels, message = list_labels(value), f"{origin}: '{task.label}' is {excerpt(value)}"
    if labels is None:
        raise InputError(f"{message}, not a list of labels (empty for none)")
    is_multi_hot = len(labels) == len(task.classes) and all(str(label).lower() in MULTI_HOT for label in labels)
    if is_multi_hot if task.multi_hot is None else task.multi_hot and not is_multi_hot:
        remedy = "say `multi_hot: true` where lists have a 0 or 1 for each class, `false` where they name classes"
        raise InputError(f"{message}, and task '{task.name}' has {len(task.classes)} classes; {remedy}")
    if task.multi_hot:
        return tuple(number for number, label in enumerate(labels) if MULTI_HOT[str(label).lower()])
    numbers = sorted(label_number(task, origin, label) for label in labels)
    if len(set(numbers)) < len(numbers):
        raise InputError(f"{message}, which has a class twice: name each once, or say `multi_hot: true` of 0s and 1s")
    return tuple(numbers)


def list_labels(value: Any) -> list[Any] | None:
    """Read a list of labels; tables write it as text, with commas, semicolons or bars between. None for no list."""
    if isinstance(value, str):
        inside = value.strip("[] ")
        return [name.strip() for name in re.split("[,;|]", inside)] if inside else []
    return value if isinstance(value, list) else None


def is_missing(value: Any) -> bool:
    """Tell whether a field holds nothing: no value, NaN, or blanks."""
    return value is None or value != value or (isinstance(value, str) and not value.strip())


def to_iob2(tags: Sequence[Any], scheme: spec.Scheme, origin: str) -> list[Any]:
    """Write the tags of a sentence in IOB2: every entity begins with B-. What is broken in other schemes than IOB1
    stays broken.

    IOB1 marks a beginning only where an entity follows another of its type, so IOB2 read as IOB1 is itself.
    """
    if scheme == "IOB2":
        return list(tags)
    marks = {"IOB1": "BI", "BIOES": "BIES", "BILOU": "BILU"}[scheme]
    before = "O"
    converted = []
    for tag in tags:
        if not isinstance(tag, str) or (tag != "O" and (tag[:1] not in marks or tag[1:2] != "-")):
            raise InputError(f"{origin}: tag {tag!r} is not of the scheme {scheme}")
        if tag != "O" and scheme in ("BIOES", "BILOU"):
            tag = {"S": "B", "E": "I", "U": "B", "L": "I"}.get(tag[0], tag[0]) + tag[1:]
        elif tag[:1] == "I" and before[1:] != tag[1:]:
            tag = "B" + tag[1:]
        converted.append(tag)
        before = tag
    return converted


Answer = tuple[str, int]
"""A span of a context: its text, and the character at which it starts."""


def read_spans(origin: str, name: str, value: Any) -> list[Answer]:
    """Read (text, start) pairs from lists of texts and starts, a list of mappings, or a list of texts (start 0)."""
    try:
        if isinstance(value, dict):
            starts: Any = value.get("answer_start", value.get("start"))
            spans = list(zip(value["text"], starts, strict=True))
        else:
            spans = []
            for item in value if isinstance(value, list) else [None]:
                span: Any = {"text": item, "start": 0} if isinstance(item, str) else item
                spans.append((span["text"], span.get("answer_start", span.get("start"))))
    except (AttributeError, KeyError, TypeError, ValueError):
        spans = [("", 0)]
    if not all(isinstance(text, str) and text and type(start) is int for text, start in spans):
        raise InputError(f"{origin}: column '{name}' is {excerpt(value)}, not texts and where they start")
    return spans


def find_answer(origin: str, context: str, text: str, start: int) -> Answer:
    """Find the occurrence of `text` that is nearest to `start`: published starts are not all right."""
    start = min(max(start, 0), len(context))
    starts = [at for at in (context.rfind(text, 0, start + len(text)), context.find(text, start)) if at >= 0]
    if not starts:
        raise InputError(f"{origin}: a context without its answer '{text[:40]}'")
    return text, min(starts, key=lambda at: abs(at - start))


FilledText = tuple[str, tuple[tuple[int, int], ...]]
"""A task's template, filled, and where each of its columns stands in the text."""


@dataclass(frozen=True)
class LabelledText:
    id: str
    texts: tuple[FilledText, ...]
    """One text, or in multiple choice one for each choice of a question."""
    label: int | float | tuple[int, ...]
    """A number of `Task.classes`, or as the task's `problem_type` says: a score, or the numbers of several classes. In
    multiple choice, the number of the right choice."""
    group: str = ""
    """The value of `Task.group`."""


@dataclass(frozen=True)
class TaggedWords:
    id: str
    words: tuple[str, ...]
    tags: tuple[int, ...]
    """Numbers of `Task.classes`, which are in IOB2."""
    group: str = ""


@dataclass(frozen=True)
class Question:
    id: str
    question: str
    context: str
    answers: tuple[Answer, ...]
    """An unanswerable question has none."""
    candidates: tuple[Answer, ...] = ()
    """ReCoRD's entities, in the order of the text; `question` keeps its @placeholder."""
    group: str = ""


AnyExample = LabelledText | TaggedWords | Question


def load_examples(source: TaskSource, judged_only: bool, most_evaluated: int | None = None) -> TaskData | Collection:
    """Read and check everything.

    Args:
        judged_only: of a collection keep only the documents that its judgements name, in any split of the task. The
            others are read past, so that millions of them do not fill the memory.
        most_evaluated: keep at most so many examples (queries) of validation and of test, drawn with seed 42.

    Raises:
        InputError: naming file and line (or question, or document) for what does not fit the task: a missing column, a
            label outside its set, tags that do not match words, an answer that is not in its context, a judgement of
            an unknown document; a split without examples, or one too small to draw another from.
    """
    if source.hashes.get("validation", 0) == source.hashes.get("test"):  # the rate would be chosen on the test
        files = f"{source.files['validation'][0].name}, {source.files['test'][0].name}"
        message = f"task '{source.task.name}': validation and test in {source.name} are the same data ({files})"
        raise InputError(f"{message}: leave validation out, and a part of train takes its place")
    if source.task.kind.is_search:
        return load_collection(source, judged_only, most_evaluated)
    task = source.task
    examples: dict[spec.TaskSplit, list[AnyExample]] = {}
    left_out = 0
    lacking: dict[str, list[str]] = defaultdict(list)
    for split in source.splits:
        examples[split], num_left_out = make_examples(task, source.form.scheme, read_rows(source, split), lacking)
        left_out += num_left_out
    tell_lacking(task, lacking)
    for split in source.splits:
        if not examples[split]:
            remedy = "; leave `test` out: a part of train takes its place" if split == "test" else ""
            raise InputError(f"task '{task.name}': the {split} split in {source.name} has no labelled examples{remedy}")
        if task.family == "question_answering":  # answers are compared by id
            refuse_doubles(f"{source.name}: {split}: the question", [example.id for example in examples[split]])
    draw_splits(source, examples, most_evaluated)
    tell_groups(task, {split: {example.group for example in examples[split]} for split in spec.TASK_SPLITS})
    splits = {split: tuple(examples[split]) for split in spec.TASK_SPLITS}
    return TaskData(task, **splits, left_out=left_out)


def make_examples(
    task: spec.Task, scheme: spec.Scheme, rows: Iterable[PlacedRow], lacking: dict[str, list[str]]
) -> tuple[list[AnyExample], int]:
    """Make examples of labelled rows, and count those that are left out. The places of rows without a label or a text
    are added to `lacking`. Raises `InputError` for a row that does not fit the task."""
    makers: dict[spec.Family, Callable[[spec.Task, str, Row], AnyExample | None]] = {
        "sequence_classification": make_text,
        "token_classification": partial(make_words, scheme=scheme),
        "question_answering": make_question,
        "multiple_choice": make_choices,
    }
    make = partial(make_grouped, makers[task.family])
    examples: list[AnyExample] = []
    left_out = 0
    for origin, row in rows:
        reason = "short" if row is SHORT_ROW else why_left_out(task, origin, row)
        example = None if reason else make(task, origin, row)
        if example is not None:
            examples.append(example)
            continue
        left_out += 1
        if reason in ("label", "text"):
            lacking[reason].append(origin)
    return examples, left_out


def draw_splits(
    source: TaskSource, examples: dict[spec.TaskSplit, list[AnyExample]], most_evaluated: int | None
) -> None:
    """Hold the splits that the source does not have out of train, and draw those that are evaluated of all. Raises
    `InputError` where train is too small, and where texts to train on all have one label, or one number stands for a
    correlation."""
    task, train_of = source.task, f"task '{source.task.name}': the train split in {source.name}"
    shares: dict[spec.TaskSplit, float] = {"test": 1 - TEST_SHARE, "validation": TRAIN_SHARE}
    drawn = [split for split in shares if split not in examples]
    for split in drawn:
        if len(examples["train"]) < 2:
            raise InputError(f"{train_of} is too small to hold out a {split}")
        strata = np.array([classes_of(example)[0] for example in examples["train"]]) if task.stratified else None
        groups = np.array([example.group for example in examples["train"]]) if task.group else None
        if groups is not None and len(np.unique(groups)) < 2:
            raise InputError(f"{train_of} has too few values of '{task.group}' to hold out whole groups for {split}")
        examples["train"], examples[split] = hold_out(examples["train"], shares[split], strata, groups)
    for split in spec.TASK_SPLITS if task.problem_type == "regression" else spec.TASK_SPLITS[:1]:
        labels = {example.label for example in examples[split] if isinstance(example, LabelledText)}
        if len(labels) == 1 and len(examples[split]) > 1 and not task.choices:
            count = f"all {len(examples[split]):,} examples of {split} in {source.name}"
            raise InputError(f"task '{task.name}': {count} have the same label, from which nothing can be learnt")
    # Classes that chance has left out of a split are told: each is in another one.
    classes = {split: set[int]().union(*map(classes_of, examples[split])) for split in examples}
    for split in ["train", *drawn] if drawn and not task.choices else ():
        absent = sorted(set[int]().union(*classes.values()) - classes[split])
        if absent:
            names = first_of([task.classes[number] for number in absent])
            use = "left to train on" if split == "train" else f"drawn for {split}"
            sentence = f"{task.name}: none of the {len(examples[split]):,} examples {use} has {names}"
            has_shares = "" if task.stratified or task.problem_type else ", or `stratified: true`"
            err.print(f"{sentence}; name files for the splits{has_shares} to have all classes in each", markup=False)
    if most_evaluated is not None:
        for split in spec.EVALUATED_SPLITS:
            indices = draw_indices(len(examples[split]), most_evaluated)
            examples[split] = [examples[split][index] for index in indices]


def make_grouped(
    make: Callable[[spec.Task, str, Row], AnyExample | None], task: spec.Task, origin: str, row: Row
) -> AnyExample | None:
    """Make an example with its group, where the task has a column for it."""
    example = make(task, origin, row)
    if example is None or task.group is None:
        return example
    value = column(origin, row, task.group, "or leave `group` out of the task")
    if is_missing(value):
        raise InputError(f"{origin}: no group stands in '{task.group}': fill it in, or leave `group` out of the task")
    return replace(example, group=str(value))


def tell_groups(task: spec.Task, groups: dict[spec.TaskSplit, set[str]]) -> None:
    """Say how many groups each split has, and how many of them are in train too, where the files of the splits do not
    divide them."""
    if task.group is None:
        return
    counts = ", ".join(f"{len(names):,} in {split}" for split, names in groups.items())
    err.print(f"{task.name}: groups by '{task.group}': {counts}", markup=False)
    for split in spec.EVALUATED_SPLITS:
        if shared := groups[split] & groups["train"]:
            sentence = f"{len(shared):,} of {len(groups[split]):,} groups of {split} are in train too"
            err.print(f"{task.name}: {sentence}; leave `{split}` out to have whole groups held out", markup=False)


def classes_of(example: AnyExample) -> tuple[int, ...]:
    """List the numbers of the classes that stand in an example."""
    match example:
        case LabelledText(label=int() as number):
            return (number,)
        case LabelledText(label=tuple() as numbers) | TaggedWords(tags=numbers):
            return numbers
    return ()


def count_shared(data: TaskData | Collection) -> dict[spec.EvaluatedSplit, int]:
    """Count the inputs of validation and of test that stand in train too, whatever their labels are."""
    if isinstance(data, Collection):
        trained = {data.queries[query] for query, _ in data.train}
        return {split: sum(data.queries[id] in trained for id in data.relevance[split]) for split in data.relevance}
    trained = {input_of(example) for example in data.train}
    return {
        split: sum(input_of(example) in trained for example in data.splits[split]) for split in spec.EVALUATED_SPLITS
    }


def input_of(example: AnyExample) -> Any:
    """Return all that a network sees of an example."""
    match example:
        case LabelledText():
            texts = tuple(text for text, _ in example.texts)
            return texts if len(texts) > 1 else texts[0]
        case TaggedWords():
            return example.words
        case Question():
            return example.question, example.context


def count_characters(example: AnyExample) -> int:
    """Count the characters of all that a network sees of an example."""
    text = " ".join(example.words) if isinstance(example, TaggedWords) else input_of(example)
    return len(text) if isinstance(text, str) else sum(map(len, text))


def why_left_out(task: spec.Task, origin: str, row: Row) -> Literal["answer", "label", "text"] | None:
    """Name what an example cannot be made without, and the row lacks: an answer that anybody knows, a label, a text.
    None where it has all. Rows of biphase's own tasks are taken as they were published."""
    if task.family not in ("sequence_classification", "multiple_choice", "token_classification"):
        return None
    label = column(origin, row, task.label, LABEL_REMEDY)
    if canonical_label(label) in map(canonical_label, task.unlabelled):  # -1 may be written as -1.0
        return "answer"
    if spec.is_own_task(task):
        return None
    if lacks_label(task, label):
        return "label"
    texts = [column(origin, row, name) for name in spec.template_columns(task.template) if name != "choice"]
    return "text" if lacks_text(texts) else None


def lacks_label(task: spec.Task, label: Any) -> bool:
    """Tell whether a field holds no label. An empty one of several classes says that none applies."""
    may_be_empty = task.problem_type == "multi_label_classification"
    return is_missing(label) and (label is None or not may_be_empty)


def lacks_text(values: Sequence[Any]) -> bool:
    """Tell whether a row's columns of texts have one without a value, or are all empty."""
    return any(value is None for value in values) or (bool(values) and all(map(is_missing, values)))


def tell_lacking(task: spec.Task, lacking: dict[str, list[str]]) -> None:
    """Say how many rows lack a label or text. Raises `InputError` unless the task leaves them out."""
    counts = []
    for part, rows in lacking.items():
        have = "rows have" if len(rows) > 1 else "row has"
        counts.append(f"{len(rows):,} {have} no {part} (the first: {rows[0]})")
    if counts and task.missing == "refuse":
        remedy = "fill them in, or leave them out: missing='drop' in Python, `missing: drop` in a task's file"
        raise InputError(f"task '{task.name}': {', '.join(counts)}; {remedy}")
    if counts:
        err.print(f"{task.name}: left out: {', '.join(counts)}")


def id_of(location: str, row: Row) -> str:
    """Return the row's own id, else its place: `train.tsv:12`. ReCoRD's is a mapping of two numbers."""
    row_id = row.get("id", row.get("idx"))
    if row_id is None:
        return location.rpartition("/")[2]
    return "-".join(str(part) for part in row_id.values()) if isinstance(row_id, dict) else str(row_id)


def make_text(task: spec.Task, origin: str, row: Row) -> LabelledText:
    label = column(origin, row, task.label, LABEL_REMEDY)
    text = fill_row(task, origin, row)
    target: int | float | tuple[int, ...]
    if task.problem_type == "regression":
        target = score_number(origin, task.label, label)
    elif task.problem_type == "multi_label_classification":
        target = label_numbers(task, origin, label)
    else:
        target = label_number(task, origin, label)
    return LabelledText(id_of(origin, row), (text,), target)


def make_choices(task: spec.Task, origin: str, row: Row) -> LabelledText:
    label = column(origin, row, task.label, LABEL_REMEDY)
    choices, names = read_choices(task, origin, row)
    right = label_number(task, origin, label, names)
    if max(right, len(choices) - 1) >= min(len(choices), len(task.classes)):
        message = f"task '{task.name}' names {len(task.classes)}, and {excerpt(label)} is right"
        raise InputError(f"{origin}: {len(choices)} choices, where {message}")
    return LabelledText(id_of(origin, row), choices, right)


def read_choices(task: spec.Task, origin: str, row: Row) -> tuple[tuple[FilledText, ...], tuple[str, ...]]:
    """Fill the template with each choice of a row, and return what it calls them itself: ARC's are {text: […], label:
    […]}, whose labels are A, B, … in some rows and 1, 2, … in others."""
    columns = [column(origin, row, name) for name in task.choices]
    texts: Any = columns[0] if len(columns) == 1 else columns
    names: Any = None
    if isinstance(texts, dict):
        texts, names = texts.get("text"), texts.get("label")
    if not isinstance(texts, list) or len(texts) < 2 or not all(isinstance(text, str) and text for text in texts):
        raise InputError(f"{origin}: {excerpt(texts)} are not two or more choices, texts that are not empty")
    choices = tuple(fill_row(task, origin, row | {"choice": text}) for text in texts)
    has_names = isinstance(names, list) and len(names) >= len(texts)
    return choices, tuple(map(str, names[: len(texts)])) if has_names else ()


def fill_row(task: spec.Task, origin: str, row: Row) -> FilledText:
    """Fill the task's template with a row's columns."""
    text, columns = "", []
    for literal, name, _, _ in Formatter().parse(task.template):
        text += literal
        if name is not None:
            value = text_column(origin, row, name)
            columns.append((len(text), len(text) + len(value)))
            text += value
    return text, tuple(columns)


def make_words(task: spec.Task, origin: str, row: Row, scheme: spec.Scheme) -> TaggedWords:
    tags = column(origin, row, task.label, LABEL_REMEDY)
    spans = None if task.words in row else read_spans_of_characters(tags)
    if spans is not None:
        found, tags = tag_spans(origin, text_column(origin, row, "text"), spans)
        row, scheme = row | {task.words: found}, "IOB2"
    words = words_of(task, origin, row)
    if not isinstance(tags, list) or len(tags) != len(words):
        num_tags = f"{len(tags)} tags" if isinstance(tags, list) else "no list of tags"
        raise InputError(f"{origin}: {num_tags} for {len(words)} words")
    tags = to_iob2(tags, scheme, origin)
    return TaggedWords(id_of(origin, row), words, tuple(label_number(task, origin, tag) for tag in tags))


def read_spans_of_characters(value: Any) -> list[tuple[int, int, str]] | None:
    """Read spans as annotation tools write them: `[start, end, label]` (Doccano, spaCy), or objects with `start` and
    `end` (or `start_offset`, `end_offset`) and `label` (Prodigy, Doccano, what `predict` writes) or a list of `labels`
    (Label Studio, also below `value`). None for anything else."""
    spans = []
    for item in value if isinstance(value, list) else [None]:
        span = item
        if isinstance(item, dict):
            named = item.get("value", item)
            labels = named.get("labels") or [None]
            first, last = named.get("start", named.get("start_offset")), named.get("end", named.get("end_offset"))
            span = [first, last, named.get("label", labels[0])]
        if not isinstance(span, list) or [type(part) for part in span] != [int, int, str]:
            return None
        spans.append((span[0], span[1], span[2]))
    return spans


WORD = re.compile(r"\w+|[^\w\s]")
"""A word of running text, or a sign of punctuation."""


def tag_spans(origin: str, text: str, spans: Sequence[tuple[int, int, str]]) -> tuple[list[str], list[str]]:
    """Divide a running text into words with tags in IOB2. A word of which a span has a part is in it."""
    matches = [*WORD.finditer(text)]
    tags = ["O"] * len(matches)
    for start, end, label in spans:
        if not 0 <= start < end <= len(text):
            raise InputError(f"{origin}: the span from {start} to {end} is not in its text of {len(text):,} characters")
        inside = [number for number, word in enumerate(matches) if word.start() < end and word.end() > start]
        if any(tags[number] != "O" for number in inside):
            raise InputError(f"{origin}: two spans share a word at {start} ({excerpt(text[start:end])}); leave one out")
        for number in inside:
            tags[number] = f"{'B' if number == inside[0] else 'I'}-{label}"
    return [word[0] for word in matches], tags


def words_of(task: spec.Task, origin: str, row: Row) -> tuple[str, ...]:
    words = column(origin, row, task.words)
    if not isinstance(words, list) or not words or not all(isinstance(word, str) and word for word in words):
        raise InputError(f"{origin}: column '{task.words}' must be a list of words, none of them empty")
    return tuple(words)


def make_question(task: spec.Task, origin: str, row: Row) -> Question | None:
    """Return None for a question about candidates that has no answer: nobody knows it there."""
    id = id_of(origin, row)
    context = text_column(origin, row, "context")
    if not context.strip():
        raise InputError(f"{origin}: question '{id}' has an empty context")
    locate = partial(find_answer, f"{origin}: question '{id}'", context)
    gold: list[Answer] = []
    if not row.get("is_impossible"):
        gold = read_spans(origin, "answers", column(origin, row, "answers", LABEL_REMEDY))
    if "candidates" not in row:
        answers = tuple(dict.fromkeys(locate(text, start) for text, start in gold))
        return Question(id, text_column(origin, row, "question"), context, answers)
    candidates = {locate(text, start) for text, start in read_spans(origin, "candidates", row["candidates"])}
    if not gold:
        return None
    # The hub keeps only the texts of answers: their mentions are the candidates that read so.
    mentions = {(text, start) for text, start in candidates if text in dict(gold)}
    mentions |= {locate(text, start) for text, start in gold if text not in dict(mentions)}
    ordered = sorted(candidates | mentions, key=lambda answer: (answer[1], len(answer[0])))
    answers = tuple(answer for answer in ordered if answer in mentions)
    return Question(id, text_column(origin, row, "question"), context, answers, tuple(ordered))
