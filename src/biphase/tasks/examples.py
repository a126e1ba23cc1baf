"""Rows of a source → checked, well-formed examples of a task, in its splits.

Splits that the source lacks are drawn, as `spec.Splits` says. Labels and tags become indices of classes (or a score),
tags are in IOB2, answers are exact spans of their context, and documents have no prefixes.
"""

import re
import unicodedata
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import lru_cache, partial
from string import Formatter
from typing import Any, Literal

import numpy as np

from biphase.console import err
from biphase.corpus.forms import PlacedRow, Row, is_missing, list_labels, template_columns
from biphase.corpus.rows import (
    ABSENT,
    SHORT_ROW,
    TASK_REMEDY,
    column,
    excerpt,
    find_field,
    read_number,
    text_column,
)
from biphase.corpus.text import WORD
from biphase.errors import InputError, first_of, refuse_doubles
from biphase.tasks import spec
from biphase.tasks.sources import TaskSource, read_rows
from biphase.tasks.splits import TEST_SHARE, TRAIN_SHARE, Collection, TaskData, draw_indices, hold_out, load_collection

LABEL_REMEDY = f"{TASK_REMEDY}; leave a split without labels out"
UNKNOWN_REMEDY = "correct it, or map it by `labels` in the task file before training"
MULTI_HOT = {"0": False, "0.0": False, "false": False, "1": True, "1.0": True, "true": True}
"""The values of a list that says for each class whether it applies."""
WRITTEN_NUMBER = re.compile(r"[+-]?\d+(\.\d*)?")


def label_index(task: spec.Task, location: str, value: Any, choices: tuple[str, ...] = ()) -> int:
    """Find the index of a label among a row's own names of choices, or else among the task's classes. Raises
    `InputError` for any other label."""
    names = choices or task.classes
    by_name, by_spelling = map_labels(names, () if choices else tuple(task.labels.items()))
    index = None if value is None else by_name.get(str(value), by_spelling.get(canonical_label(value)))
    if index is None:
        message = "is none of its choices" if choices else f"is not one of task '{task.name}'"
        by_number = "" if any(map(WRITTEN_NUMBER.fullmatch, names)) else f" (or their numbers, 0 to {len(names) - 1})"
        of_score = "" if task.kind.has_label_sets else "; `score` leaves rows with an empty label out"
        remedy = "" if choices else f"; {UNKNOWN_REMEDY}{of_score}"
        raise InputError(f"{location}: label {value!r} {message}: {', '.join(names)}{by_number}{remedy}")
    return index


@lru_cache
def map_labels(
    names: tuple[str, ...], variants: tuple[tuple[str, str], ...] = ()
) -> tuple[dict[str, int], dict[str | Decimal, int]]:
    """Map labels to indices, by name and by canonical spelling, if only one name has that spelling. If no name is a
    number, a label may be its index, which tables write as text. `variants` are pairs of `Task.labels`."""
    spellings = [canonical_label(name) for name in names]
    by_spelling = {spelling: index for index, spelling in enumerate(spellings) if spellings.count(spelling) == 1}
    if not any(map(WRITTEN_NUMBER.fullmatch, names)):
        by_spelling |= {Decimal(index): index for index in range(len(names))}
    by_spelling |= {canonical_label(variant): names.index(name) for variant, name in variants}
    return {name: index for index, name in enumerate(names)}, by_spelling


def read_label(value: Any) -> str:
    """Read a label as the name of a class: `1` for 1.0, without blanks around it, in Unicode's NFC."""
    text = str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
    return unicodedata.normalize("NFC", text.strip())


def canonical_label(value: Any) -> str | Decimal:
    """Unify spellings of a label: a number becomes its value, 01 is 1; True and False get small letters, as in JSON."""
    text = read_label(value)
    if WRITTEN_NUMBER.fullmatch(text):
        return Decimal(text)
    return text.lower() if text.lower() in ("true", "false") else text


def label_indices(task: spec.Task, location: str, value: Any) -> tuple[int, ...]:
    """List the indices of the classes in a list of labels, ascending."""
    message = f"{location}: '{task.label}' is {excerpt(value)}"
    labels = list_labels(value, [*task.classes, *task.labels])
    if labels is None:
        raise InputError(f"{message}, not a list of labels (empty for none)")
    is_multi_hot = len(labels) == len(task.classes) and all(str(label).lower() in MULTI_HOT for label in labels)
    if is_multi_hot if task.multi_hot is None else task.multi_hot and not is_multi_hot:
        remedy = "say `multi_hot: true` where lists have a 0 or 1 for each class, `false` where they name classes"
        raise InputError(f"{message}, and task '{task.name}' has {len(task.classes)} classes; {remedy}")
    if task.multi_hot:
        return tuple(index for index, label in enumerate(labels) if MULTI_HOT[str(label).lower()])
    indices = [label_index(task, location, label) for label in labels]
    if len(set(indices)) < len(indices) and not task.labels:  # which may make one class of two labels
        raise InputError(f"{message}, which has a class twice: name it once, or say `multi_hot: true` for 0s and 1s")
    return tuple(sorted(set(indices)))


def to_iob2(tags: Sequence[Any], scheme: spec.Scheme, location: str) -> list[Any]:
    """Write the tags of a sentence in IOB2: every entity begins with B-. Broken tags of BIOES and BILOU stay broken.

    IOB1 marks a beginning only where an entity follows another of its type, so IOB2 read as IOB1 does not change.
    """
    if scheme == "IOB2":
        return list(tags)
    marks = {"IOB1": "BI", "BIOES": "BIES", "BILOU": "BILU"}[scheme]
    before, converted = "O", list[Any]()
    for tag in tags:
        if not isinstance(tag, str) or (tag != "O" and (tag[:1] not in marks or tag[1:2] != "-")):
            raise InputError(f"{location}: tag {tag!r} is not of the scheme {scheme}")
        if tag != "O" and scheme in ("BIOES", "BILOU"):
            tag = {"S": "B", "E": "I", "U": "B", "L": "I"}.get(tag[0], tag[0]) + tag[1:]
        elif tag[:1] == "I" and before[1:] != tag[1:]:
            tag = "B" + tag[1:]
        converted.append(tag)
        before = tag
    return converted


Answer = tuple[str, int]
"""A span of a context: its text, and the character at which it starts."""


def read_spans(location: str, name: str, value: Any) -> list[Answer]:
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
        raise InputError(f"{location}: column '{name}' is {excerpt(value)}, not texts and where they start")
    return spans


def find_answer(location: str, context: str, text: str, start: int) -> Answer:
    """Find the occurrence of `text` that is nearest to `start`: published starts are not all right."""
    start = min(max(start, 0), len(context))
    starts = [at for at in (context.rfind(text, 0, start + len(text)), context.find(text, start)) if at >= 0]
    if not starts:
        raise InputError(f"{location}: a context without its answer '{text[:40]}'")
    return text, min(starts, key=lambda at: abs(at - start))


FilledText = tuple[str, tuple[tuple[int, int], ...]]
"""A filled template, and the characters of each of its columns."""


@dataclass(frozen=True)
class LabelledText:
    id: str
    texts: tuple[FilledText, ...]
    """One text, or in multiple choice one for each choice of a question."""
    label: int | float | tuple[int, ...]
    """The index of a class or of the right choice; by the task's `problem_type` a score, or indices of classes."""
    group: str = ""
    """The value of `Task.group`."""


@dataclass(frozen=True)
class TaggedWords:
    id: str
    words: tuple[str, ...]
    tags: tuple[int, ...]
    """Indices of `Task.classes`, which are in IOB2."""
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
    """Read and check the examples of a source.

    Args:
        judged_only: keep only the documents that a judgement of any split names, so that millions of others do not fill
            the memory.
        most_evaluated: keep at most this many examples (queries) of validation and of test, drawn with seed 42.

    Raises:
        InputError: with file and line (or question, or document), for a row that does not fit the task: a missing
            column, an unknown label, tags that do not match words, an answer that is not in its context, a judgement of
            an unknown document; for a split without examples, or too small to draw another from.
    """
    if source.hashes.get("validation", 0) == source.hashes.get("test") and not source.form.splits.is_divided:
        files = f"{source.files['validation'][0].name}, {source.files['test'][0].name}"
        message = f"task '{source.task.name}': validation and test in {source.name} are the same data ({files})"
        raise InputError(f"{message}: leave validation out, and a part of train takes its place")
    if source.task.kind.is_search:
        return load_collection(source, judged_only, most_evaluated)
    task = source.task
    examples: dict[spec.TaskSplit, list[AnyExample]] = {}
    left_out, lacking = 0, defaultdict[str, list[str]](list)
    for split in source.splits:
        examples[split], num_left_out = make_examples(task, source.form.scheme, read_rows(source, split), lacking)
        left_out += num_left_out
    tell_lacking(task, lacking)
    num_copies = drop_copies(task, examples) if task.duplicates == "drop" else 0
    for split in source.splits:
        if not examples[split]:
            remedy = "; leave `test` out: a part of train takes its place" if split == "test" else ""
            raise InputError(f"task '{task.name}': the {split} split in {source.name} has no labelled examples{remedy}")
        if task.kind.is_answering:  # answers are compared by id
            refuse_doubles(f"{source.name}: {split}: the question", [example.id for example in examples[split]])
    draw_splits(source, examples, most_evaluated)
    tell_groups(source, examples)
    splits = {split: tuple(examples[split]) for split in spec.TASK_SPLITS}
    return TaskData(task, **splits, left_out=left_out, num_copies=num_copies)


def make_examples(
    task: spec.Task, scheme: spec.Scheme, rows: Iterable[PlacedRow], lacking: dict[str, list[str]]
) -> tuple[list[AnyExample], int]:
    """Make examples of labelled rows, and count the rows that are left out. The locations of rows without a label or a
    text are added to `lacking`. Raises `InputError` for a row that does not fit the task."""
    make: Callable[[spec.Task, str, Row], AnyExample | None]
    if task.kind.is_tagging:
        make = partial(make_words, scheme=scheme)
    elif task.kind.is_answering:
        make = make_question
    else:
        make = make_choices if task.kind.has_choices else make_text
    examples, left_out = list[AnyExample](), 0
    for location, row in rows:
        reason = "short" if row is SHORT_ROW else why_left_out(task, location, row)
        example = None if reason else make(task, location, row)
        if example is not None:
            examples.append(replace(example, group=group_of(task, location, row)) if task.group else example)
            continue
        left_out += 1
        if reason in ("label", "text"):
            lacking[reason].append(location)
    return examples, left_out


def drop_copies(task: spec.Task, examples: dict[spec.TaskSplit, list[AnyExample]]) -> int:
    """Leave out examples whose input another one has, in place; return and print their number. Of equal inputs, the
    first one of test stays, else of validation, else of train; one of several tests, which share train, comes last."""
    kept, counts, num_other = dict[Any, AnyExample](), dict[spec.TaskSplit, int](), 0
    order: Iterable[spec.TaskSplit] = ("validation", "train", "test") if task.part_of else reversed(spec.TASK_SPLITS)
    for split in order:
        firsts = [(example, kept.setdefault(input_of(example), example)) for example in examples.get(split, ())]
        copies = [(example, first) for example, first in firsts if example is not first]
        num_other += sum(replace(first, id=example.id, group=example.group) != example for example, first in copies)
        if copies:
            examples[split], counts[split] = [example for example, first in firsts if example is first], len(copies)
    if counts:
        told = ", ".join(f"{number:,} in {split}" for split, number in counts.items())
        other = f"; {num_other:,} of them had another label than the row that stays" if num_other else ""
        err.print(f"{task.name}: copies left out: {told}{other}")
    return sum(counts.values())


def draw_splits(source: TaskSource, examples: dict[spec.TaskSplit, list[AnyExample]], most: int | None) -> None:
    """Hold missing splits out of train, and draw the examples to evaluate, in place. Raises `InputError` for a train
    split that is too small, or whose texts have one label, and for a split of one number, which has no correlation."""
    task = source.task
    train_of = f"task '{task.name}': the train split in {source.name}"
    shares: dict[spec.TaskSplit, float] = {"test": 1 - TEST_SHARE, "validation": TRAIN_SHARE}
    drawn = [split for split in shares if split not in examples]
    for split in drawn:
        if len(examples["train"]) < 2:
            raise InputError(f"{train_of} is too small to hold out a {split}")
        strata = np.array([classes_of(example)[0] for example in examples["train"]]) if task.stratified else None
        ranks = {name: rank for rank, name in enumerate(sorted({example.group for example in examples["train"]}))}
        groups = np.array([ranks[example.group] for example in examples["train"]]) if task.group else None
        if groups is not None and len(ranks) < 2:
            raise InputError(f"{train_of} has too few values of '{task.group}' to hold out whole groups for {split}")
        examples["train"], examples[split] = hold_out(examples["train"], shares[split], strata, groups)
    for split in spec.TASK_SPLITS if task.kind.has_label_numbers else spec.TASK_SPLITS[:1]:
        labels = {example.label for example in examples[split] if isinstance(example, LabelledText)}
        if len(labels) == 1 and len(examples[split]) > 1 and not task.kind.has_choices:
            count = f"all {len(examples[split]):,} examples of {split} in {source.name}"
            raise InputError(f"task '{task.name}': {count} have the same label, from which nothing can be learnt")
    # Print the classes that a drawn split lacks by chance, while another split has them.
    counts = {split: Counter(index for one in examples[split] for index in classes_of(one)) for split in examples}
    total = sum(counts.values(), Counter[int]())
    for split in ["train", *drawn] if drawn and not task.kind.has_choices else ():
        if absent := sorted(total.keys() - counts[split].keys()):
            names = first_of([task.classes[index] for index in absent])
            use = "left to train on" if split == "train" else f"drawn for {split}"
            sentence = f"{task.name}: none of the {len(examples[split]):,} examples {use} has {names}"
            has_shares = "" if task.stratified or not task.kind.has_strata else ", or `stratified: true`"
            few = [task.classes[i] for i in absent if task.kind.has_strata and total[i] < len(spec.TASK_SPLITS)]
            ways = [f"name files for the splits{has_shares} to have all classes in each"] * (len(few) < len(absent))
            ways += [f"join {first_of(few)}, too rare for that, by `labels`, or drop it by `unlabelled`"] * bool(few)
            err.print(f"{sentence}; {'; '.join(ways)}")
    if most is not None:
        for split in spec.EVALUATED_SPLITS:
            examples[split] = [examples[split][index] for index in draw_indices(len(examples[split]), most)]


def group_of(task: spec.Task, location: str, row: Row) -> str:
    """Read the name of a row's group as a label is read; `12.0` is 12. Raises `InputError` for an empty field."""
    value = column(location, row, str(task.group), "or leave `group` out of the task")
    if is_missing(value):
        raise InputError(f"{location}: the group in '{task.group}' is empty: fill it in, or leave `group` out")
    return re.sub(r"^([+-]?\d+)\.0$", r"\1", read_label(value))


def tell_groups(source: TaskSource, examples: dict[spec.TaskSplit, list[AnyExample]]) -> None:
    """Print the number of groups in each split, and how many of them are in train too, with the remedy. Questions
    without groups have their contexts instead, of which only those in two splits are printed."""
    task, kind = source.task, "groups" if source.task.group else "contexts"
    if task.group is None and (not task.kind.is_answering or spec.is_own_task(task)):
        return
    groups = {split: {one.group if task.group else input_of(one)[1] for one in examples[split]} for split in examples}
    if task.group:
        counts = ", ".join(f"{len(groups[split]):,} in {split}" for split in spec.TASK_SPLITS)
        err.print(f"{task.name}: groups by '{task.group}': {counts}")
    if shared := {split: ids for split in spec.EVALUATED_SPLITS if (ids := groups[split] & groups["train"])}:
        counts = ", ".join(f"{len(ids):,} of {len(groups[split]):,} {kind} of {split}" for split, ids in shared.items())
        given = [f"`{split}`" for split in shared if split in source.splits]
        ways = ["say `group: context`"] * (not task.group) + [f"leave {' and '.join(given)} out"] * bool(given)
        err.print(f"{task.name}: {counts} are in train too; {' and '.join(ways)} to have whole {kind} held out")


def classes_of(example: AnyExample) -> tuple[int, ...]:
    """List the indices of an example's classes."""
    match example:
        case LabelledText(label=int() as index):
            return (index,)
        case LabelledText(label=tuple() as indices) | TaggedWords(tags=indices):
            return indices
    return ()


def count_shared(data: TaskData | Collection) -> dict[spec.EvaluatedSplit, int]:
    """Count the inputs of validation and of test that are also in train, whatever their labels."""
    trained = set(inputs_of(data, "train"))
    return {split: sum(text in trained for text in inputs_of(data, split)) for split in spec.EVALUATED_SPLITS}


def inputs_of(data: TaskData | Collection, split: spec.TaskSplit) -> list[Any]:
    """List the inputs of a split, as `input_of` returns them; in retrieval, list the queries, in their order."""
    if isinstance(data, TaskData):
        return [input_of(example) for example in data.splits[split]]
    ids = {query for query, _ in data.train} if split == "train" else data.relevance[split].keys()
    return [text for id, text in data.queries.items() if id in ids]


def input_of(example: AnyExample) -> Any:
    """Return the texts of an example that a network sees."""
    match example:
        case LabelledText():
            texts = tuple(text for text, _ in example.texts)
            return texts if len(texts) > 1 else texts[0]
        case TaggedWords():
            return example.words
        case Question():
            return example.question, example.context


def why_left_out(task: spec.Task, location: str, row: Row) -> Literal["answer", "label", "text"] | None:
    """Name the part that a row lacks to be an example: a known answer, a label or a text. None if it lacks nothing.
    Takes rows of biphase's own tasks as published."""
    if task.kind.is_answering:
        return None
    if task.missing == "drop" and find_field(row, task.label, ABSENT) is ABSENT:
        return "label"
    label = column(location, row, task.label, LABEL_REMEDY)
    if canonical_label(label) in map(canonical_label, task.unlabelled):  # -1 may be written as -1.0
        return "answer"
    if spec.is_own_task(task):
        return None
    if lacks_label(task, label):
        return "label"
    has_spans = task.kind.is_tagging and "text" in row and task.words not in row
    names = ("text",) if has_spans else template_columns(task.template)
    return "text" if lacks_text([column(location, row, name) for name in names if name != "choice"]) else None


def lacks_label(task: spec.Task, label: Any) -> bool:
    """Tell whether a field lacks a label. For sets of classes, an empty field means that none applies."""
    return is_missing(label) and (label is None or not task.kind.has_label_sets)


def lacks_text(values: Sequence[Any]) -> bool:
    """Tell whether a row has no text, because all of its fields for one are empty."""
    return bool(values) and all(map(is_missing, values))


def tell_lacking(task: spec.Task, lacking: dict[str, list[str]]) -> None:
    """Print how many rows lack a label or text. Raises `InputError` unless the task leaves them out."""
    counts = []
    for field, rows in lacking.items():
        counts.append(f"{len(rows):,} {'rows have' if len(rows) > 1 else 'row has'} no {field} (the first: {rows[0]})")
    if counts and task.missing == "refuse":
        remedy = "fill them in, or leave them out: missing='drop' in Python, `missing: drop` in a task's file"
        raise InputError(f"task '{task.name}': {', '.join(counts)}; {remedy}")
    if counts:
        err.print(f"{task.name}: left out: {', '.join(counts)}")


def id_of(location: str, row: Row) -> str:
    """Return the row's own id, or else its location, `train.tsv:12`. ReCoRD's ids are mappings of two numbers."""
    if (row_id := row.get("id", row.get("idx"))) is None:
        return location.rpartition("/")[2]
    return "-".join(str(number) for number in row_id.values()) if isinstance(row_id, dict) else str(row_id)


def make_text(task: spec.Task, location: str, row: Row) -> LabelledText:
    label = column(location, row, task.label, LABEL_REMEDY)
    text = fill_row(task, location, row)
    answer: int | float | tuple[int, ...]
    if task.kind.has_label_sets:
        answer = label_indices(task, location, label)
    elif task.kind.has_label_numbers:
        answer = read_number(location, task.label, label)
    else:
        answer = label_index(task, location, label)
    return LabelledText(id_of(location, row), (text,), answer)


def make_choices(task: spec.Task, location: str, row: Row) -> LabelledText:
    label = column(location, row, task.label, LABEL_REMEDY)
    choices, names = read_choices(task, location, row)
    right = label_index(task, location, label, names)
    if max(right, len(choices) - 1) >= min(len(choices), len(task.classes)):
        message = f"task '{task.name}' names {len(task.classes)}, and {excerpt(label)} is right"
        raise InputError(f"{location}: {len(choices)} choices, where {message}")
    return LabelledText(id_of(location, row), choices, right)


def read_choices(task: spec.Task, location: str, row: Row) -> tuple[tuple[FilledText, ...], tuple[str, ...]]:
    """Fill the template with each choice of a row. Returns also the row's own names of them: ARC has {text: […], label:
    […]}, with labels A, B, … in some rows and 1, 2, … in others."""
    columns = [column(location, row, name) for name in task.choices]
    while len(columns) > 2 and is_missing(columns[-1]):  # a question may have fewer choices than others
        columns.pop()
    given: Any = columns[0] if len(columns) == 1 else columns
    texts, names = (given.get("text"), given.get("label")) if isinstance(given, dict) else (given, None)
    if not isinstance(texts, list) or len(texts) < 2 or not all(isinstance(text, str) and text for text in texts):
        raise InputError(f"{location}: {excerpt(texts)} are not two or more choices, texts that are not empty")
    choices = tuple(fill_row(task, location, row | {"choice": text}) for text in texts)
    named = names[: len(texts)] if isinstance(names, list) and len(names) >= len(texts) else ()
    return choices, tuple(map(str, named))


def fill_row(task: spec.Task, location: str, row: Row) -> FilledText:
    """Fill the task's template with a row's columns. Null is an empty text, as an empty field of a table is."""
    text, columns = "", []
    for literal, name, _, _ in Formatter().parse(task.template):
        text += literal
        if name is not None:
            value = "" if column(location, row, name) is None else text_column(location, row, name)
            columns.append((len(text), len(text) + len(value)))
            text += value
    return text, tuple(columns)


def make_words(task: spec.Task, location: str, row: Row, scheme: spec.Scheme) -> TaggedWords:
    tags = column(location, row, task.label, LABEL_REMEDY)
    spans = None if task.words in row else read_spans_of_characters(location, tags)
    if spans is not None:
        text_words, tags = tag_spans(location, text_column(location, row, "text"), spans)
        row, scheme = row | {task.words: text_words}, "IOB2"
    words = words_of(task, location, row)
    if not isinstance(tags, list) or len(tags) != len(words):
        num_tags = f"{len(tags)} tags" if isinstance(tags, list) else "no list of tags"
        raise InputError(f"{location}: {num_tags} for {len(words)} words")
    tags = to_iob2(tags, scheme, location)
    return TaggedWords(id_of(location, row), words, tuple(label_index(task, location, tag) for tag in tags))


@dataclass(frozen=True)
class CharacterSpan:
    """A span of a running text, as an annotation tool writes it."""

    start: int
    end: int
    label: str
    text: str
    """The marked text, if the tool writes it too."""


def read_spans_of_characters(location: str, value: Any) -> list[CharacterSpan] | None:
    """Read the spans of annotation tools: `[start, end, label]` (Doccano, spaCy), or objects with `start` and `end` (or
    `start_offset`, `end_offset`) and `label` (Prodigy, Doccano, `biphase predict`) or one of `labels` (Label Studio,
    also below `value`). None for a value that is no list of lists or objects; raises `InputError` for other ones."""
    if not isinstance(value, list) or not all(isinstance(item, list | dict) for item in value):
        return None
    spans = []
    for item in value:
        parts: Any = item.get("value") or item if isinstance(item, dict) else item
        text = ""
        if isinstance(parts, dict):
            label, text = parts.get("label", parts.get("labels")), str(parts.get("text") or "")
            label = label[0] if isinstance(label, list) and len(label) == 1 else label
            parts = [parts.get("start", parts.get("start_offset")), parts.get("end", parts.get("end_offset")), label]
        if not isinstance(parts, list) or [*map(type, parts)] != [int, int, str]:
            raise InputError(f"{location}: {excerpt(parts)} is not a span's start, end and one label: fix or remove it")
        start, end, name = parts
        spans.append(CharacterSpan(start, end, name, text))
    return spans


def tag_spans(location: str, text: str, spans: Sequence[CharacterSpan]) -> tuple[list[str], list[str]]:
    """Divide a running text into words with tags in IOB2. A word belongs to a span that covers any part of it."""
    matches = [*WORD.finditer(text)]
    starts, ends = [word.start() for word in matches], [word.end() for word in matches]
    tags = ["O"] * len(matches)
    for span in place_spans(location, text, spans):
        # The words that end after the span's start and begin before its end.
        inside = range(bisect_right(ends, span.start), bisect_left(starts, span.end))
        if any(tags[index] != "O" for index in inside):
            shared = f"two spans share a word at {span.start} ({excerpt(text[span.start : span.end])})"
            raise InputError(f"{location}: {shared}; drop one")
        for index in inside:
            tags[index] = f"{'B' if index == inside[0] else 'I'}-{span.label}"
    return [word[0] for word in matches], tags


def place_spans(location: str, text: str, spans: Sequence[CharacterSpan]) -> Sequence[CharacterSpan]:
    """Return spans that count characters. If the spans have the texts that they name only when they are read as UTF-16
    units, which some tools count, converts them, and prints that.

    Raises `InputError` for a span that is not in the text, or that does not have the text that it names.
    """
    units = [index for index, sign in enumerate(text) for _ in range(1 + (sign > "\uffff"))] + [len(text)]
    odd = next((span for span in spans if not is_marked(text, span)), None)
    if odd is None:
        return spans
    are_units = any(span.text for span in spans) and all(0 <= span.start < span.end < len(units) for span in spans)
    placed = [replace(span, start=units[span.start], end=units[span.end]) for span in spans] if are_units else []
    if placed and all(is_marked(text, span) for span in placed):
        tell_units(location.rpartition(":")[0])
        return placed
    told = f"{location}: the span from {odd.start} to {odd.end}"
    if not 0 <= odd.start < odd.end <= len(text):
        raise InputError(f"{told} is not in its text of length {len(text):,}")
    marked, remedy = text[odd.start : odd.end], "correct it, or export the annotations again"
    raise InputError(f"{told} has {excerpt(marked)} in its text, not its own {excerpt(odd.text)}; {remedy}")


def is_marked(text: str, span: CharacterSpan) -> bool:
    """Tell whether a span is in a text and has the text that it names. Label Studio names it without some blanks, with
    a backslash for line ends, and without the rest of words that it has completed."""
    own, named = (re.sub(r"\\[nr]|\s", "", words) for words in (text[span.start : span.end], span.text))
    return 0 <= span.start < span.end <= len(text) and named in own


@lru_cache
def tell_units(file: str) -> None:
    """Print once that a file's spans count UTF-16 units."""
    err.print(f"{file}: spans count UTF-16 units (2 for 😀), as their own texts show: read so")


def words_of(task: spec.Task, location: str, row: Row) -> tuple[str, ...]:
    words = column(location, row, task.words)
    if not isinstance(words, list) or not words or not all(isinstance(word, str) and word for word in words):
        raise InputError(f"{location}: column '{task.words}' must be a list of words, none of them empty")
    return tuple(words)


def make_question(task: spec.Task, location: str, row: Row) -> Question | None:
    """Make a question. None for one about candidates without a known answer."""
    id = id_of(location, row)
    question, context = text_column(location, row, "question"), text_column(location, row, "context")
    if not (question.strip() and context.strip()):
        lack = "context" if question.strip() else "question"
        raise InputError(f"{location}: '{id}' has an empty {lack}: fill it in, or remove the row")
    locate = partial(find_answer, f"{location}: question '{id}'", context)
    is_answered = not row.get("is_impossible")
    gold = read_spans(location, "answers", column(location, row, "answers", LABEL_REMEDY)) if is_answered else []
    if "candidates" not in row:
        return Question(id, question, context, tuple(dict.fromkeys(locate(*answer) for answer in gold)))
    candidates = {locate(text, start) for text, start in read_spans(location, "candidates", row["candidates"])}
    if not gold:
        return None
    # The Hub keeps only the texts of answers: their mentions are the candidates with the same text.
    mentions = {(text, start) for text, start in candidates if text in dict(gold)}
    mentions |= {locate(text, start) for text, start in gold if text not in dict(mentions)}
    ordered = sorted(candidates | mentions, key=lambda answer: (answer[1], len(answer[0])))
    return Question(id, question, context, tuple(filter(mentions.__contains__, ordered)), tuple(ordered))
