"""Rows of a user's own → the description of their task. A task of rows in memory is written once, with its data and
description, into a folder whose name ends in a hash of its contents."""

import hashlib
import json
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from decimal import Decimal
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any, Literal

import yaml

from biphase.config import parse_config, write_value
from biphase.console import err
from biphase.corpus.forms import (
    CommaNumber,
    PlacedRow,
    Row,
    is_missing,
    list_labels,
    rows_in_memory,
    template_columns,
)
from biphase.corpus.rows import (
    ABSENT,
    COMMENT,
    DEFAULT_FORM,
    FORMATS,
    FileForm,
    as_number,
    column,
    ending_of,
    excerpt,
    field_names,
    find_field,
    numbered_lines,
    own_name,
    plain_name,
    plain_path,
    read_number,
    renamed,
    rows_of_file,
    split_fields,
)
from biphase.corpus.text import is_running_text, json_line
from biphase.errors import InputError, clipped, first_of
from biphase.files import content_hash, whole_folder, write_text
from biphase.tasks.examples import canonical_label, read_label, read_spans_of_characters, tell_lacking, why_left_out
from biphase.tasks.families import KINDS, TASK_FAMILIES
from biphase.tasks.sources import SPLIT_WORDS, find_files, find_split, has_needed_quotes
from biphase.tasks.spec import EVALUATED_SPLITS, TASK_SPLITS, Scheme, Task, task_table

LABEL_NAMES = (
    *("label", "labels", "class", "category", "sentiment", "stars", "rating", "intent", "topic", "topics", "genres"),
    *("ner_tags", "pos_tags", "tags", "score", "similarity", "answer", "answerKey", "entities", "spans", "ents"),
)
"""The usual names of the column with the label; the first one present counts, before those in capital letters."""
WORD_NAMES = ("tokens", "words")
CHOICE_LISTS = ("choices", "options", "endings")
CHOICE_COLUMN = re.compile(r"(choice|option|ending|answer|solution|sol)_?[0-9a-eA-E]|[A-E]")
"""The name of a column that holds one of several choices: `choice1`, `option_b`, `ending0`, `A`."""
QUESTION_TEMPLATE = "Question: {question}\nContext: {context}"
NO_LABELS = ("n/a", "#n/a", "na", "nan", "none", "null", "-", "?")
"""Words for a missing label, in small letters, which may also be the name of a class."""
MOST_CLASSES = 200
"""The most classes of a task: a column with more different values is unlikely to hold labels."""
LEAST_ROWS_OF_VALUE = 5
"""The rows that a value has on average, at least, in a column that is taken for classes and not for texts."""


def describe_data(
    data: Path, label: str | None, family: str | None = None, template: str | None = None
) -> dict[str, Any]:
    """Describe a file of rows, with the files of other splits beside it, or a folder in BEIR's layout, by the keys of a
    task; `family` is its family or problem type, if given. `labels` joins variants of a class, and `missing` drops rows
    without a label or text, if there are any; both are printed.

    Raises `InputError` if the data does not determine the keys; the message names the one to give.
    """
    if (data / "corpus.jsonl").exists() or (data / "qrels").is_dir():
        judged = find_splits(data / "qrels" / "train.jsonl") | find_splits(data / "qrels" / "train.tsv")
        named = {split: f"qrels/{name}" for split, name in judged.items()}
        if "test" not in named:
            raise InputError(f"{data}: retrieval needs qrels/test.tsv (or .jsonl), the judgements of its queries")
        texts = {key: next(iter(sorted(data.glob(f"{key}.*"))), data).name for key in ("corpus", "queries")}
        texts = {key: file for key, file in texts.items() if not file.startswith(f"{key}.jsonl") and file != data.name}
        return {"family": "retrieval", "files.0": named | texts}
    form = form_of(data)
    tell_columns(data)
    rows = list(rows_of_file(data, form))
    spans = (row["entities"] for _, row in rows if row.get("label") and isinstance(row.get("entities"), list))
    if label is None and any(spans):
        label = "entities" if family == "token_classification" else None
        if family is None:
            err.print(f"{data} has spans too, in 'entities': `--family token_classification` reads them")
    needed = needed_column(rows[0][1], label) if rows else ""
    splits = find_splits(data, needed)
    beside = list[PlacedRow]()
    for name in [name for split, name in splits.items() if split != "train"]:
        beside += chain.from_iterable(rows_of_file(file, form) for file in find_files(data.parent, name))
    keys = describe_rows([*rows, *beside], str(data), label, family, template)
    variants = keys.get("labels", {})
    if variants:
        keys["classes"] = [name for name in keys["classes"] if name not in variants]
        err.print("the new task file has these `labels`; to keep two classes apart, move the name to its `classes`")
    trained, others = (find_classes(placed, needed, variants) for placed in (rows, beside))
    if untrained := [name for name in keys.get("classes", ()) if name in others - trained]:
        err.print(f"no row of {data} has {first_of(untrained)}, but the files beside it do: a model cannot learn that")
    task, names = Task.model_construct(None, **{"name": data.name, "missing": "drop", **keys}), keys["files.0"]
    lacking: dict[str, list[str]] = defaultdict(list)
    for location, row in [*rows, *beside]:
        if reason := why_left_out(task, location, row | renamed(row, names.get("rename", {}))):
            lacking[reason].append(location)
    tell_lacking(task, lacking)
    if lacking:
        err.print("the new task file leaves them out: `missing: drop`")
        keys["missing"] = "drop"
    splits |= place_splits([row for _, row in rows if not is_missing(find_field(row, needed))], splits)
    return keys | {"files.0": splits | names | form.model_dump(exclude_defaults=True)}


def find_classes(placed: Iterable[PlacedRow], label: str, variants: Mapping[str, str]) -> set[str]:
    """Find the classes that occur in the column with the label, which may be called by variants of their names."""
    names = chain.from_iterable(part_names(find_field(row, label)) for _, row in placed)
    return {variants.get(name, name) for name in names}


def form_of(file: Path) -> FileForm:
    """Choose the form of a user's own file: with quotes for a .tsv that has them where they are needed; with the
    columns of the word and of the tag."""
    if ending_of(file) == ".tsv" and has_needed_quotes(file, DEFAULT_FORM):
        return FileForm(quotes=True)
    word_at, tag_at, _ = find_columns(list_lines(file))
    return FileForm(columns=(word_at, tag_at))


PlacedFields = tuple[int, list[str]]
"""The fields of a line of columns, with its number."""


def list_lines(file: Path) -> list[PlacedFields]:
    """List the lines of a file of columns that `read_columns` takes for words; none for a file of another form."""
    if file.is_dir() or ending_of(file) in FORMATS:
        return []
    written = ((number, line) for number, line in numbered_lines(file) if line.strip(" \t"))
    words = ((at, line) for at, line in written if not (line.startswith("-DOCSTART-") or COMMENT.match(line)))
    lines = [(number, split_fields(line)) for number, line in words]
    without_signs = [(number, fields) for number, fields in lines if not fields[0].startswith("#")]
    return without_signs if find_columns(without_signs)[0] > 0 else lines  # where words have numbers, # is a comment


def find_columns(lines: Sequence[PlacedFields]) -> tuple[int, int, int]:
    """Find the columns of the word and of the tag, from 0, and the number of columns. The tag is beside the word,
    unless the last column has spans and that one has none; the first column may number the words."""
    width = max(Counter(len(fields) for _, fields in lines).items(), key=lambda item: item[1], default=(2, 0))[0]
    table = [fields for _, fields in lines if len(fields) == width]
    word_at = int(width > 2 and all(fields[0].isdecimal() for fields in table))
    spanned = {at for at, tags in enumerate(zip(*table, strict=True)) if have_spans(tags)}
    is_last = width > 2 and width - 1 in spanned and word_at + 1 not in spanned
    return word_at, width - 1 if is_last else word_at + 1, width


def have_spans(tags: Iterable[str]) -> bool:
    """Tell whether most tags, except for O, mark spans, such as B-loc."""
    named = [tag for tag in tags if tag != "O"]
    return 2 * sum(tag[:1].isupper() and tag[1:2] == "-" for tag in named) > len(named)


def tell_columns(file: Path) -> None:
    """Print which columns of a file are taken for the words and the tags, if it has more. Raises `InputError` for the
    forms of BRAT and of WebAnno, and for lines that are no words with tags, such as texts: they have no spans, and
    different lengths or too many tags."""
    is_webanno = ending_of(file) == ".tsv" and next(numbered_lines(file), (1, ""))[1].startswith("#FORMAT=WebAnno")
    if is_webanno or ending_of(file) == ".ann":
        form = "WebAnno and INCEpTION" if is_webanno else "BRAT"
        remedy = "export CoNLL, or rows of JSON with `text` and its spans, `label: [[start, end, class]]`"
        raise InputError(f"{file} has the form of {form}, which biphase does not read; {remedy}")
    lines = list_lines(file)
    word_at, tag_at, width = find_columns(lines)
    tags = Counter(fields[tag_at] for _, fields in lines if len(fields) > tag_at)
    uneven = [f"{file}:{at}: {len(fields)} fields, elsewhere {width}" for at, fields in lines if len(fields) != width]
    if lines and not have_spans(tags.elements()) and (uneven or not 2 <= len(tags) <= MOST_CLASSES):
        remedy = "if a line is a word and its tag, write a task file for it; name a file of texts .csv, .jsonl or .xlsx"
        raise InputError(f"{uneven[0] if uneven else f'{file}: different tags: {len(tags):,}'}; {remedy}")
    if width > word_at + 2:
        told = f"of its {width} columns (from 0), {word_at} is read as the word and {tag_at} as the tag"
        err.print(f"{file}: {told}; `columns` in the task file names others")


def find_label(row: Row, label: str | None) -> str | None:
    """Find the column with the label, in the row's own spelling: the given one, or one of a usual name."""
    small = {plain_name(str(name)).casefold(): name for name in reversed([*row])}
    usual = [*filter(row.__contains__, LABEL_NAMES), *(small.get(name.casefold()) for name in LABEL_NAMES)]
    return own_name(row, label) if label else next(filter(None, usual), None)


def needed_column(row: Row, label: str | None) -> str:
    """Find the column that every split needs: the answers to questions about a context, or the label. Empty without
    one."""
    is_answering = label is None and {"question", "context", "answers"} <= row.keys()
    return "answers" if is_answering else find_label(row, label) or ""


def describe_rows(
    placed: Sequence[PlacedRow], data: str, label: str | None, family: str | None = None, template: str | None = None
) -> dict[str, Any]:
    """Describe rows by the keys of a task, with the given template, or one with all text columns.

    Error messages call the rows `data`, and a single row by its location. `files.0` has further keys for the task's
    files, beside their names.
    """
    if not placed:
        raise InputError(f"{data} has no rows; give some to train on")
    columns = placed[0][1]
    for name in template_columns(template or ""):
        if name != "choice":
            column(*placed[0], name, "the template names it")
    needed = needed_column(columns, label)
    if needed == "answers" != label:
        return {"family": "question_answering", "template": QUESTION_TEMPLATE, "files.0": {}}
    if not (label := needed):
        raise InputError(f"which column of {data} is the label? Name it as `label`: {', '.join(columns)}")
    if all(find_field(row, label, ABSENT) is ABSENT for _, row in placed):
        column(*placed[0], label, "name one as `label`")
    placed = [(location, row) for location, row in placed if find_field(row, label) is not None]
    if family != "multi_label_classification":  # where an empty field means that no class applies
        placed = [(location, row) for location, row in placed if not is_missing(find_field(row, label))]
    if not placed:
        raise InputError(f"{data}: no row has a label in '{label}': name another column as `label`")
    labels = values_of(placed, label)
    words = next((name for name in WORD_NAMES if isinstance(placed[0][1].get(name), list)), None)
    tagged = () if words else zip(placed, labels, strict=True)
    spans = [read_spans_of_characters(location, value) for (location, _), value in tagged]
    if any(spans) and None not in spans:
        text = "text" if "text" in columns else next((name for name in columns if isinstance(columns[name], str)), "")
        return describe_tags({f"B-{span.label}" for row in spans for span in row or ()}, text=text, label=label)
    if words is None or not isinstance(labels[0], list):
        return {"files.0": {}, **describe_texts(placed, data, label, labels, family, template)}
    tags = [[read_label(tag) for tag in row] for row in labels]
    keys = describe_tags({tag for row in tags for tag in row}, tokens=words, label=label)
    if (scheme := find_scheme(tags)) != "IOB2":
        err.print(f"the tags are of the scheme {scheme}, as the new task file says")
        keys["files.0"]["scheme"] = scheme
    return keys


def find_scheme(rows: Sequence[Sequence[str]]) -> Scheme:
    """Find the scheme of tags. In IOB1, a span begins with `I-`, unless it touches another one of its class."""
    marks = {tag[0] for tags in rows for tag in tags if tag[1:2] == "-"}
    if marks & {"E", "S", "L", "U"}:
        return "BILOU" if marks & {"L", "U"} else "BIOES"
    pairs = [pair for tags in rows for pair in pairwise(("O", *tags))]
    begun = {tag[0] for before, tag in pairs if tag[1:2] == "-" and before[2:] != tag[2:]}
    return "IOB1" if begun == {"I"} else "IOB2"


def find_split_column(rows: Sequence[Row]) -> tuple[str, Counter[str | None]]:
    """Find a column that names the split of each row, train and others; return it with the number of rows of each
    split. Empty without one."""
    for name in sorted(rows[0] if rows else (), key=lambda name: plain_name(name).casefold() != "split"):
        counts = Counter(find_split(row.get(name)) for row in rows)
        if "train" not in counts or len(counts) < 2 or counts[None] > len(rows) / 2:
            continue
        if None not in counts:
            return name, counts
        others = first_of(sorted({repr(row.get(name)) for row in rows if find_split(row.get(name)) is None}))
        told = f"'{name}' names the split of most rows, but not of {counts[None]:,} of {len(rows):,} ({others})"
        err.print(f"{told}, so rows are divided at random: write train, validation or test in each row")
    return "", Counter()


def place_splits(rows: Sequence[Row], splits: Mapping[Any, str]) -> dict[str, str]:
    """Place splits by a column of the rows of train that names the split of each row, if there is one: return the keys
    of `files` for that. Print that it is used, or that it is not, because other splits have places (`splits`)."""
    name, counts = find_split_column(rows)
    if not name or splits.keys() != {"train"}:
        if name:
            err.print(f"'{name}' names the split of each row, but is not used: other splits have files of their own")
        return {}
    told = ", ".join(f"{split} {counts[split]:,}" for split in TASK_SPLITS if counts[split])
    err.print(f"'{name}' names the split of each row ({told})")
    return dict.fromkeys([split for split in TASK_SPLITS if counts[split]], splits["train"]) | {"split_column": name}


def describe_tags(tags: set[str], **columns: str) -> dict[str, Any]:
    """Describe a token classification task by the tags that occur, in any scheme, and by the names of its columns."""
    renamed = {name: role for role, name in columns.items() if name != role}
    keys: dict[str, Any] = {"family": "token_classification", "files.0": {"rename": renamed} if renamed else {}}
    if types := sorted({tag[2:] for tag in tags if tag[1:2] == "-"}):
        return keys | {"classes": ["O", *(f"{mark}-{name}" for name in types for mark in "BI")]}
    classes = sorted(tags)
    if classes[0] == "O":  # which would mean that the others mark spans
        classes = [*classes[1:], "O"]
    return keys | {"classes": classes, "metric": "accuracy"}


IN_A_FILE = "in a task file (`biphase init task --family FAMILY` writes one)"


def describe_texts(
    placed: Sequence[PlacedRow], data: str, label: str, labels: list[Any], family: str | None, template: str | None
) -> dict[str, Any]:
    """Describe a task on texts, or a multiple-choice task. Raises `InputError` for columns that seem to hold one choice
    each."""
    columns = placed[0][1]
    single = [name for name in columns if name != label and CHOICE_COLUMN.fullmatch(name)]
    may_choose = family in (None, "multiple_choice")
    if may_choose and len(single) > 1 and single != ["A", "B"]:  # A and B are as often two texts to compare
        raise InputError(f"{data}: are {', '.join(single)} choices? If so, give `choices` and `classes` {IN_A_FILE}")
    choices = next((name for name in CHOICE_LISTS if may_choose and isinstance(columns.get(name), list | dict)), None)
    texts = [] if template else find_texts(placed, data, (label, choices), labels)
    # Braces and colons would be signs of the template itself.
    plain: dict[str, str] = {}
    for name in texts:
        if not is_in_template(name):
            plain[name] = new_name(name, {*columns, *plain.values()})
    files = {"files.0": {"rename": plain}} if plain else {}
    texts = [plain.get(name, name) for name in texts]
    if len(texts) > 1:
        err.print(f"template: {', '.join(texts)}: remove columns that reveal the answer or are not known before it")
    if choices:
        lists = [value.get("text", ()) if isinstance(value, dict) else value for value in values_of(placed, choices)]
        template = template or " ".join(f"{{{name}}}" for name in [*texts, "choice"])
        classes = list("ABCDEFGHIJ"[: max(map(len, lists))])
        keys = {"family": "multiple_choice", "template": template, "label": label}
        return keys | {"choices": [choices], "classes": classes, **files}
    if not texts and not template:
        names = clipped(", ".join(field_names(columns)))
        reason = f"{data}: no column besides '{label}' has texts of several words that do not only repeat the label"
        raise InputError(f"{reason}; name columns in a template, such as '{{subject}}'; the columns are: {names}")
    own = family if family in TASK_FAMILIES and KINDS[family].is_of_texts else "sequence_classification"
    keys = {"family": own, "template": template or "\n".join(f"{{{name}}}" for name in texts)}
    return {**keys, "label": label, **describe_labels(data, label, labels, family), **files}


def find_texts(placed: Sequence[PlacedRow], data: str, others: Collection[str | None], labels: list[Any]) -> list[str]:
    """List the columns, except for `others`, whose texts a model may read; print which are not read, and why."""
    columns, texts, unread = placed[0][1], list[str](), list[str]()
    for name in dict.fromkeys(name for _, row in placed for name in row if name not in others):
        values = [row.get(name) for _, row in placed]
        # A model must not read a column that only repeats the label in other words ("1 star" for 1).
        pairs = set(zip(map(str, values), map(str, labels), strict=True))
        says_label = len({text for text, _ in pairs}) == len(set(map(str, labels))) == len(pairs) < len(values)
        if name in columns and (plain_name(name).casefold() == "text" or (is_text(values) and not says_label)):
            texts.append(name)
        elif not says_label and is_text([value for value in values if not is_missing(value)]):
            unread.append(name)
    if unread:
        remedy = "to read a column, give it to all rows, where it may be empty, and name it in a template"
        err.print(f"{data}: texts that only some rows have are not read: {first_of(unread)}; {remedy}")
    alike = [name for name in texts if plain_name(name).casefold() != "text" and has_few_values(placed, name)]
    if len(alike) < len(texts):
        texts = [name for name in texts if name not in alike]
        remedy = "to read a column, name it in a template"
        if alike:
            err.print(f"{data}: not read, because few values repeat: {first_of(alike)}; {remedy}")
    return texts


def has_few_values(placed: Sequence[PlacedRow], name: str) -> bool:
    """Tell whether a few values repeat in a column, as classes do, which may not be known when the model predicts."""
    num_values = len({str(row.get(name)) for _, row in placed})
    return 2 <= num_values <= MOST_CLASSES and len(placed) >= LEAST_ROWS_OF_VALUE * num_values


def is_in_template(name: str) -> bool:
    """Tell whether a template can name a column."""
    with suppress(InputError):
        return template_columns(f"{{{name}}}") == (name,)
    return False


def new_name(name: str, others: Set[str]) -> str:
    """Make a name that a template can have out of that of a column, unlike those of others."""
    plain = " ".join(re.sub(r"[^\w .()/-]", " ", name).split()) or "column"
    return plain if plain not in others else new_name(f"{plain}_", others)


def values_of(placed: Sequence[PlacedRow], name: str) -> list[Any]:
    """List the values of a column. Raises `InputError` for a row with no value or with a list that lacks one; and, if
    the first row has a list, for a row with neither a list nor a text."""
    values = [column(location, row, name, "give all rows the same columns") for location, row in placed]
    for (location, _), value in zip(placed, values, strict=True):
        is_other = isinstance(values[0], list) and not isinstance(value, list | str)
        if value is None or is_other or (isinstance(value, list) and None in value):
            raise InputError(f"{location}: '{name}' is {excerpt(value)}, unlike the first row: fix or remove the row")
    return values


def describe_labels(data: str, label: str, values: list[Any], family: str | None) -> dict[str, Any]:
    """Describe the labels of texts by the keys of a task: numbers, sets of classes, or classes, and which classes. The
    kind is `family`, or follows from the values.

    Raises `InputError` for labels that seem to list several things: only a task file can tell their kind.
    """
    if family is None and isinstance(values[0], list):
        family = "multi_label_classification"
    numbers: list[float] = []
    classes = Counter(map(read_label, values))
    signs = {*NO_LABELS, "-1"} if family != "regression" and stands_for_none(classes) else NO_LABELS
    if doubtful := [name for name in classes if name.casefold() in signs]:
        told = first_of([f"'{name}' (rows: {classes[name]:,})" for name in doubtful])
        remedy = f"say `unlabelled: {write_value(doubtful)}` in a task file, without it in `classes`"
        err.print(f"'{label}' has {told}: if that means no label, {remedy}")
    if family is None:
        certain = [value for value in values if read_label(value) not in doubtful]
        found = [as_number(value) for value in certain]
        numbers = [] if None in found else [number for number in found if number is not None]
        several = next((value for value in values if len(part_names(value)) > 1), None)
        if several is not None and not numbers:
            though = f", though '{certain[found.index(None)]}' is none" if as_number(several) is not None else ""
            question = f"is '{several}' in '{label}' one class, several, or a number{though}?"
            raise InputError(f"{data}: {question} Give `problem_type`, `multi_hot` or `classes` {IN_A_FILE}")
    if family == "regression" or len({*numbers}) > MOST_CLASSES or not all(map(float.is_integer, numbers)):
        return {"problem_type": "regression"}
    if family == "multi_label_classification":
        listed = {*map(read_label, chain.from_iterable(value for value in values if isinstance(value, list)))}
        classes = Counter(name for value in values for name in part_names(value, listed))
    if not 2 <= len(classes) <= MOST_CLASSES:
        count = "the same value in all rows" if len(classes) == 1 else f"{len(classes):,} different values"
        raise InputError(f"{data}: '{label}' has {count}; name a column of classes as `label`")
    ordered = sorted(classes, key=lambda name: (not name.isdecimal(), int(name) if name.isdecimal() else 0, name))
    keys = {"labels": variants} if (variants := find_variants(classes)) else {}
    if family == "multi_label_classification":
        return {"problem_type": family, "classes": ordered, **keys}
    return {"classes": ordered, "stratified": True, **keys}


def stands_for_none(labels: Collection[str]) -> bool:
    """Tell whether the label -1 may mean no label, as on the Hub: beside names, or beside several numbers from 0."""
    others = [as_number(label) for label in labels if label != "-1"]
    return {*others} <= {None} or (len(others) > 1 and all(number is not None and number >= 0 for number in others))


def find_variants(counts: Mapping[str, int]) -> dict[str, str]:
    """Map names of classes to the most frequent name, or the shortest number, that differs from them only in case,
    blanks or the form of a number; print them with their counts of rows."""
    spellings: dict[Any, list[str]] = defaultdict(list)
    for name in sorted(counts, key=lambda name: (-counts[name], name)):
        spellings[canonical_label(" ".join(name.casefold().split()))].append(name)
    for spelling, names in spellings.items():
        if isinstance(spelling, Decimal):
            names.sort(key=len)
    variants = {name: names[0] for names in spellings.values() for name in names[1:]}
    if variants:
        told = {name: f"'{name}' (rows: {number:,})" for name, number in counts.items()}
        pairs = [f"{told[name]} and {told[most]}" for name, most in variants.items()]
        remedy = f"`labels: {clipped(write_value(variants))}` in a task file makes them one class"
        err.print(f"{first_of(pairs)} differ only in case, blanks or the form of a number: {remedy}")
    return variants


def find_splits(train: Path, needed: str | None = None) -> dict[str, str]:
    """Find the file of each split: `train`, and files beside it with the same name but `dev`, `test` and the like for
    `train` or `training`, in small or capital letters, plain or compressed. Return their names as a task has them,
    `train.csv` for `train.csv.gz`. Leave out a file without the needed column, or with too few columns for the tag of
    `train` (benchmarks publish such tests), and print a message."""
    beside = {plain_path(path).name.casefold(): path for path in sorted(train.parent.glob("*"), reverse=True)}
    name = plain_path(train).name.casefold()
    splits = {"train": train if train.exists() else beside[name]} if name in beside else {}
    places = [match.span() for match in re.finditer("train(ing)?", name)][::-1]
    tag_at = find_columns(list_lines(train))[1] if needed else 0
    for split in EVALUATED_SPLITS:
        names = (name[:begin] + word + name[end:] for begin, end in places for word in SPLIT_WORDS[split])
        path = next((beside[other] for other in names if other in beside), None)
        has_tags = path and needed and find_columns(list_lines(path))[2] > tag_at
        first = next(rows_of_file(path, form_of(path)), ("", {}))[1] if path and has_tags else {}
        if path and needed and find_field(first, needed, ABSENT) is ABSENT:
            err.print(f"{path} has no '{needed}': {split} is drawn from train instead")
        elif path:
            splits[split] = path
    return {split: plain_path(path).name for split, path in splits.items()}


def is_text(values: list[Any]) -> bool:
    """Tell whether a column holds running text, or lists of it, by the majority of its first values. Dates, times
    and numbers are none."""
    are_texts = []
    for value in islice(values, 1000):
        parts = value if isinstance(value, list) and value else [value]
        are_texts.append(all(isinstance(part, str) and is_running_text(part) and has_words(part) for part in parts))
    return sum(are_texts) > len(are_texts) / 2


def has_words(text: str) -> bool:
    """Tell whether a text is more than digits with a few letters, such as "24.12.2026 09:15 Uhr"."""
    return 2 * sum(map(str.isalpha, text)) >= max(sum(map(str.isdigit, text)), 1)


def part_names(value: Any, classes: Collection[str] = ()) -> list[str]:
    """List the labels in a list, as `make_text` reads it; any other value is one label."""
    labels = list_labels(value, classes)
    return [name for name in map(read_label, [value] if labels is None else labels) if name]


def write_task(
    data: Any,
    folder: Path,
    name: str | None,
    template: str | None = None,
    label: str | None = None,
    missing: Literal["refuse", "drop"] = "refuse",
    group: str | None = None,
) -> tuple[str, str]:
    """Write the YAML file and the data folder of a task made from rows (`describe_rows`); return both paths.

    Args:
        data: rows to train on, or a mapping of splits (`train`, `validation`, `test`) to rows: a DataFrame, a
            `datasets.Dataset`, a list of dictionaries, or a file in a form that tasks accept. Missing splits are drawn.
        folder: the folder for the user's own tasks.
        template: the input, with columns in braces; by default all text columns.
        label: the column with the label, or with the list of tags.
        missing: the task's key `missing`: whether rows without label or text are refused or dropped.
        group: the column whose values stay together in drawn splits.

    Raises:
        InputError: for another split, for columns that make no task, and for the name of a task that biphase has.
    """
    name = name or "own"
    if name in task_table() or name.endswith((".yaml", ".yml")):
        raise InputError(f"'{name}' is a task with files of its own: give their folder as data, or choose another name")
    splits = dict(data) if isinstance(data, Mapping) else {"train": data}
    if "train" not in splits or not splits.keys() <= set(TASK_SPLITS):
        raise InputError(f"data has the splits {', '.join(map(repr, splits))}; name them train, validation and test")
    placed, contents = dict[str, list[PlacedRow]](), dict[str, str]()
    if isinstance(splits["train"], str | Path):
        tell_columns(Path(splits["train"]))
    for split, rows in splits.items():
        placed[split], lines = [], list[str]()
        for location, row in labelled_rows(rows, split, label):
            lines.append(json_line(location, row))
            placed[split].append((location, json.loads(lines[-1])))
        contents[split] = "".join(lines)
    keys = describe_rows(placed["train"], "train", label, template=template)
    keys.pop("labels", None)  # printed; classes of rows in memory are what the rows name
    needed = needed_column(placed["train"][0][1], label)
    for split, written in placed.items():
        if not written or find_field(written[0][1], needed, ABSENT) is ABSENT:
            raise InputError(f"{split}: its rows have no label: leave the split out, or predict its rows")
    layout: dict[str, Any] = {split: f"{split}.jsonl" for split in TASK_SPLITS if split in contents}
    labelled = [row for _, row in placed["train"] if not is_missing(find_field(row, needed))]
    layout |= place_splits(labelled, layout) | keys.pop("files.0")
    metric = next(iter(KINDS[keys.get("problem_type", keys["family"])].metrics))
    tree = {"name": name, "metric": metric, **keys, "template": template or keys.get("template", ""), "files": [layout]}
    tree |= ({} if missing == "refuse" else {"missing": missing}) | ({} if group is None else {"group": group})
    parse_config(Task, tree, origin=f"task {name}")
    hashes = {split: hashlib.sha256(content.encode()).hexdigest() for split, content in contents.items()}
    target = folder / f"{name}-{content_hash([tree, hashes])[:12]}"
    if not (target / "task.yaml").exists():
        with whole_folder(target) as part:
            for split, content in contents.items():
                write_text(part / f"{split}.jsonl", content)
            write_text(part / "task.yaml", yaml.safe_dump(tree, sort_keys=False, allow_unicode=True))
    return str(target / "task.yaml"), str(target)


def labelled_rows(data: Any, split: str, label: str | None) -> Iterator[PlacedRow]:
    """Yield the rows of a split, each with its location. Turn labels that are numbers or truth values into text."""
    if isinstance(data, str | Path):
        placed = rows_of_file(Path(data), form_of(Path(data)))
    else:
        placed = ((f"{split}: row {number}", row) for number, row in enumerate(rows_in_memory(data)))
    for location, row in placed:
        name = find_label(row, label) or "label"
        value = find_field(row, name, "none")
        value = read_number(location, name, value) if isinstance(value, CommaNumber) else value
        if is_missing(value):
            row[name] = None  # a name such as `meta.label` becomes a column of its own
        elif isinstance(value, bool | int | float):
            row[name] = read_label(value)
        yield location, row
