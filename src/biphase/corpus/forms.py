"""JSON values in the forms of published data sets and scores, and of annotation tools → rows; the columns of a
template; the form of a table, its numbers with decimal commas and its lists of labels; values in memory."""

import ast
import csv
import json
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, islice
from string import Formatter
from typing import Any, Literal

from biphase.console import err
from biphase.errors import InputError, refuse_doubles

Format = Literal[
    "jsonl", "tsv", "csv", "json", "parquet", "xlsx", "columns", "conllu", "squad", "record", "trec", "mldr"
]
UD_COLUMNS = (1, 3)
"""The columns of the word and its universal part of speech in CoNLL-U. Its first column numbers the words, so the
default of `FileForm.columns` means these two, even if a layout spells it out."""

Row = dict[str, Any]
PlacedRow = tuple[str, Row]
"""A row with its location for messages, such as `train.tsv:12`."""


@lru_cache
def template_columns(template: str) -> tuple[str, ...]:
    """List the columns of a template. Raises `InputError` for anything else in braces."""
    try:
        fields = [field for field in Formatter().parse(template) if field[1] is not None]
    except ValueError as error:
        raise InputError(f"template {template!r}: {error}; a brace that is text is doubled") from None
    if any(not name or spec or conversion for _, name, spec, conversion in fields):
        raise InputError(f"template {template!r}: only names of columns may be in braces; `rename` changes them")
    return tuple(str(name) for _, name, _, _ in fields)


def is_missing(value: Any) -> bool:
    """Tell whether a field is empty: no value, NaN, or blanks."""
    return value is None or value != value or (isinstance(value, str) and not value.strip())


@dataclass(frozen=True)
class TableForm:
    """The form of a table with fields between commas, semicolons, tabs or bars."""

    delimiter: str = ","
    quoting: Literal[0, 1, 3] = csv.QUOTE_MINIMAL
    """A constant of `csv`: quotes where they are needed, around all fields (as around the header), or nowhere."""
    has_mark: bool = False
    """Whether it begins with a byte order mark, by which Excel recognizes UTF-8."""
    line_end: str = "\n"
    decimal: str = "."


FIRST_ROWS = 256
"""The number of rows by which a table shows how it writes numbers."""
COMMA_NUMBER = re.compile(r"[-+]?(\d+,\d+([eE][-+]?\d+)?|[1-9]\d{0,2}\.\d{3})")
SHOWS_COMMA, SHOWS_POINT = re.compile(r"-?(0|\d+(?!,\d{3}$)),\d+"), re.compile(r"-?\d+\.\d+")
"""Numbers that show their decimal mark; 1,000 may be a thousand."""
LIST_OF_NUMBERS = re.compile(r"[-+]?\d+(\s*,\s*[-+]?\d+){2,}")


class CommaNumber(str):
    """A field of a table with decimal commas that is a number: a text as it stands, and a number for `float`, which
    raises `ValueError` for 1.234, because its point may separate thousands."""

    __slots__ = ()

    def __float__(self) -> float:
        if "." in self:
            raise ValueError(f"{self} may be a thousand")
        return float(self.replace(",", "."))


def decimal_of(form: TableForm, fields: Iterable[str], otherwise: str = "") -> str:
    """Find the decimal mark that more of a table's fields show. If none shows any, it is another one or, with
    semicolons, a comma, as Excel writes both. A table with commas between fields has points."""
    if form.delimiter == ",":
        return "."
    fields = [*fields]
    commas, points = (sum(map(bool, map(mark.fullmatch, fields))) for mark in (SHOWS_COMMA, SHOWS_POINT))
    if commas or points:
        return "," if commas > points else "."
    return otherwise or ("," if form.delimiter == ";" else ".")


def number_columns(rows: Iterable[PlacedRow]) -> dict[str, list[str]]:
    """Return the fields of each column by its name, without blanks around them. Leave out a column with a list of three
    or more whole numbers, because the commas in its other fields separate numbers too."""
    columns: dict[str, list[str]] = {}
    for name, field in chain.from_iterable(row.items() for _, row in rows):
        columns.setdefault(name, []).append(field.strip())
    return {name: fields for name, fields in columns.items() if not any(map(LIST_OF_NUMBERS.fullmatch, fields))}


def mark_numbers(form: TableForm, rows: Iterable[PlacedRow]) -> Iterator[PlacedRow]:
    """Yield the rows of a table. Numbers with a comma, or with a point that may separate thousands, become
    `CommaNumber` in the columns whose first fields show decimal commas, or that show nothing in a table that does."""
    begin = [] if form.delimiter == "," else list(islice(rows, FIRST_ROWS))
    columns = number_columns(begin)
    mark = decimal_of(form, chain.from_iterable(columns.values()), ".")  # 1,000 alone may be a thousand
    marked = [name for name, fields in columns.items() if decimal_of(form, fields, mark) == ","]
    for location, row in chain(begin, rows):
        for name in marked if row else ():
            row[name] = CommaNumber(row[name]) if COMMA_NUMBER.fullmatch(row[name].strip()) else row[name]
        yield location, row


LIST_READERS: tuple[Callable[[str], Any], ...] = (json.loads, ast.literal_eval)
TOUCHING = re.compile(r"""['"]\s+['"]""")
"""Two texts with nothing but blanks between them, as NumPy writes a list; Python would join them."""


def list_labels(value: Any, classes: Collection[str]) -> list[Any] | None:
    """Read a list of labels. Tables write it as text: as JSON or Python does, or with commas, semicolons or bars
    between labels without quotes. A text that is the name of a class is one label. None for anything else."""
    if not isinstance(value, str):
        return value if isinstance(value, list) else None
    if (text := value.strip()) in classes:
        return [text]
    for read in LIST_READERS if text[:1] == "[" and not TOUCHING.search(text) else ():
        with suppress(ValueError, SyntaxError, MemoryError, RecursionError):
            labels = read(text)
            if isinstance(labels, list) and all(isinstance(label, str) for label in labels):
                return labels
    inside = value.strip("[] ")
    return [name.strip() for name in re.split("[,;|]", inside)] if inside else []


def mark_texts(rows: Iterator[PlacedRow]) -> Iterator[PlacedRow]:
    """Yield the rows of a sheet. In columns with a text in its first rows, or in an earlier row, numbers become texts,
    and empty cells become empty texts, as in a .csv."""
    begin = list(islice(rows, FIRST_ROWS))
    texts = {name for _, row in begin for name, value in row.items() if isinstance(value, str)}
    for location, row in chain(begin, rows):
        texts |= {name for name, value in row.items() if isinstance(value, str)}
        yield location, row | {name: "" if row[name] is None else str(row[name]) for name in texts}


def list_annotations(value: Any) -> list[Any]:
    """List the finished annotations of a text in Label Studio's JSON export, the ground truth first; else nothing."""
    match value:
        case {"data": {}, "annotations": list() as annotations}:
            finished = [part for part in annotations if not part.get("was_cancelled")]
            return sorted(finished, key=lambda part: not part.get("ground_truth"))
    return []


def plain_row(value: Any) -> Any:
    """Turn a row of Label Studio's JSON export, of Prodigy or of spaCy (a text with `entities`, or `Doc.to_json`) into
    a row of a task; return any other value unchanged.

    An unfinished annotation, or one that Prodigy's user did not accept, has no label. Beside a choice in Label Studio,
    spans are `entities`. Drops tokens that are only offsets.
    """
    match value:
        case {"data": {**data}, "annotations": list()}:
            finished = list_annotations(value)
            answers = [item["value"] for part in finished[:1] for item in part["result"] if "value" in item]
            choices = [answer.get("choices", []) for answer in answers]
            chosen = [name for names in choices for name in ([names] if isinstance(names, str) else names)]
            spans = [answer for answer in answers if "labels" in answer]
            label = (chosen[0] if len(chosen) == 1 else chosen or spans) if finished else None
            return ({"entities": spans} if chosen else {}) | data | {"id": value.get("id"), "label": label}
        case [str() as text, {"entities": list() as spans}]:
            return {"text": text, "label": spans}
        case {"text": str(), "answer": "accept" | "reject" | "ignore" as answer, "_task_hash": _}:
            row = {name: part for name, part in value.items() if name not in ("tokens", "answer")}
            return row if answer == "accept" else row | dict.fromkeys(row.keys() & {"spans", "label", "accept"})
        case {"text": str(), "tokens": [{"start": int(), "end": int()}, *_]}:
            return {name: part for name, part in value.items() if name != "tokens"}
    return value


def unfold_squad(document: Any) -> Iterator[Row]:
    """Yield the questions about each paragraph, with their numbers from 0 where they have no ids, and with the title of
    an article that has one."""
    number = 0
    for article in document["data"]:
        title = {"title": article["title"]} if "title" in article else {}
        for paragraph in article["paragraphs"]:
            for question in paragraph["qas"]:
                yield {"id": str(number), **title, **question, "context": paragraph["context"]}
                number += 1


def unfold_record(line: Any) -> Iterator[Row]:
    """Yield the questions about a passage, with its entities."""
    text, entities = line["passage"]["text"], line["passage"]["entities"]
    spans = [(entity["start"], entity["end"] + 1) for entity in entities]  # its ends are inclusive
    named = {"text": [text[start:end] for start, end in spans], "start": [start for start, _ in spans]}
    for question in line["qas"]:
        answers = [{"text": answer["text"], "start": answer["start"]} for answer in question["answers"]]
        row = {"id": f"{line['idx']}-{question['idx']}", "question": question["query"], "context": text}
        yield row | {"candidates": named, "answers": answers}


def unfold_mldr(line: Any) -> Iterator[Row]:
    for passage in line["positive_passages"]:
        yield {"query-id": line["query_id"], "corpus-id": passage["docid"], "score": 1}


MLDR = "MLDR's form, lines of query_id, query, positive_passages (docid), or of docid, text"
PUBLISHED: dict[str, tuple[Callable[[Any], Iterable[Row]], str]] = {
    "jsonl": (lambda line: [plain_row(line)], "a row, nor Label Studio's JSON export: data and annotations (result)"),
    "squad": (unfold_squad, "SQuAD's form, data → paragraphs → context and qas"),
    "record": (unfold_record, "SuperGLUE's form of ReCoRD: passage, idx, qas (query, answers, idx)"),
    "mldr": (unfold_mldr, MLDR),
    "queries": (lambda line: [{"_id": line["query_id"], "text": line["query"]}], MLDR),
    "corpus": (lambda line: [{"_id": line["docid"], "text": line["text"]}], MLDR),
}
"""For each published form, the function from a JSON value to its rows, and a description of the form. MLDR has three
kinds of rows."""


MTEB_SPLITS = ("test", "validation", "dev")
"""The splits of MTEB's results that come before others."""


def name_variant(task: str, variants: Sequence[str]) -> str:
    """Name a task whose scores compare only with those of the same variants: `MSMARCO (dev)`."""
    return f"{task} ({', '.join(variants)})" if variants else task


def unfold_mteb(content: Any) -> dict[str, list[Row]]:
    """Make the scores of a file of MTEB's results, by split: test and validation first, train only if it is alone. A
    task is named after its subset and its split too, if they are not the usual ones. Experiments count as seeds."""
    filled = [split for split, subsets in content["scores"].items() if subsets]
    splits = [split for split in filled if split != "train"] or filled
    by_split = dict[str, list[Row]]()
    for split in sorted(splits, key=lambda name: (*MTEB_SPLITS, name).index(name)):
        for part in content["scores"][split]:
            runs, subset = part.get("scores_per_experiment") or [{}], part["hf_subset"]
            main = next((name for name in runs[0] if part.get(name) == part["main_score"]), "")
            told = [name for name, usual in ((subset, "default"), (split, "test")) if name != usual]
            row = {"task": name_variant(content["task_name"], told)}
            scores = [run[main or "main_score"] for run in (runs if main else [part])]
            rows = [row | {"seed": seed, "score": score} for seed, score in enumerate(scores)]
            by_split.setdefault(split, []).extend(rows)
    return by_split


def unfold_euroeval(line: Any, metrics: dict[str, str]) -> list[Row]:
    """Make a score of each iteration, whose number is the seed, of a line of EuroEval's results. It is by the first
    metric of `results.total`; generative models have it in `results.raw` without `test_`.

    Scores on validation, or by generative models without examples, are of tasks of their own, and so are those by
    another metric than in the first line of the data set. `metrics`: data set → that metric, which a first line sets.
    """
    metric = next(name for name in line["results"]["total"] if name.startswith("test_"))
    is_zero_shot = line.get("few_shot") is False and line.get("generative") is not False
    told = ["validation"] * bool(line.get("validation_split")) + ["zero-shot"] * is_zero_shot
    told += [metric.removeprefix("test_")] * (metrics.setdefault(line["dataset"], metric) != metric)
    row = {"method": line["model"], "task": name_variant(line["dataset"], told)}
    scores = [own[metric if metric in own else metric.removeprefix("test_")] for own in line["results"]["raw"]]
    return [row | {"seed": seed, "score": score} for seed, score in enumerate(scores)]


def unfold(values: Iterable[tuple[str, Any]], form: str) -> Iterator[PlacedRow]:
    """Yield the rows of JSON values, each with its location, in a published form. Values of any other form are rows
    already, in a workbook without numbers among texts. Raises `InputError` for a value that does not have the form."""
    if form not in PUBLISHED:
        yield from mark_texts(iter(values)) if form == "xlsx" else values
        return
    make_rows, needed = PUBLISHED[form]
    file, num_several = "", 0
    for location, value in values:
        try:
            if len(list_annotations(value)) > 1:
                file, num_several = location.rpartition(":")[0], num_several + 1
            for row in make_rows(value):
                if not isinstance(row, dict):
                    raise InputError(f"{location} is not an object: give a list, objects by id, or SQuAD's form")
                yield location, row
        except (AttributeError, KeyError, TypeError):
            raise InputError(f"{location}: not {needed}") from None
    if num_several:
        told = f"texts with several annotations: {num_several:,}"
        err.print(f"{file}: {told}; of each, the one marked as ground truth is read, or else the first")


def name_classes(rows: Iterable[Row], features: dict[str, Any]) -> Iterator[Row]:
    """Replace class numbers by class names in the rows of a data set, by its features."""
    named = [name for name, feature in features.items() if "ClassLabel" in json.dumps(feature)]
    for row in rows:
        for name in named:
            if name in row:
                row[name] = with_names(row[name], features[name])
        yield row


def read_dataset(table: Any) -> Iterator[Row]:
    """Yield the rows of a `datasets.Dataset`, streamed or not, with names of classes in place of their numbers."""
    features = table.features.to_dict()
    for batch in table.with_format("arrow").iter(batch_size=1000):
        yield from name_classes(batch.to_pylist(), features)


def with_names(value: Any, feature: Any) -> Any:
    """Return a value with names of classes in place of numbers, by its feature, also inside lists and objects. A
    feature that `datasets` does not write changes nothing."""
    if isinstance(feature, list) and feature:  # an older form of lists
        feature = {"feature": feature[0]}
    if not isinstance(feature, dict):
        return value
    if isinstance(value, list):
        return [with_names(item, feature.get("feature")) for item in value]
    if isinstance(value, dict):
        if feature.get("_type") == "Sequence" and isinstance(feature.get("feature"), dict):  # an object of lists
            feature = {name: {"feature": inner} for name, inner in feature["feature"].items()}
        return {name: with_names(inner, feature.get(name)) for name, inner in value.items()}
    names = feature.get("names") if feature.get("_type") == "ClassLabel" else None
    return names[value] if isinstance(names, list) and isinstance(value, int) and 0 <= value < len(names) else value


def rows_in_memory(data: Any, text_field: str = "text") -> Iterator[Row]:
    """Yield the rows of a DataFrame, a `datasets.Dataset`, or any iterable of dictionaries or texts.

    Missing values of a DataFrame become None, and arrays become lists.
    """
    if isinstance(data, Mapping):
        raise InputError(f"a mapping of {', '.join(map(str, data))} is given, not rows: give one of them")
    if not isinstance(data, Iterable):
        raise InputError(f"{data!r} is given, not texts or rows")
    pandas, datasets = sys.modules.get("pandas"), sys.modules.get("datasets")
    if pandas is not None and isinstance(data, pandas.DataFrame):
        data = data.set_axis([str(name) for name in data.columns], axis=1)
        refuse_doubles("DataFrame: the column", [*data.columns])
        data = data.astype(object).where(data.notna(), None).to_dict("records")
    elif datasets is not None and isinstance(data, datasets.Dataset | datasets.IterableDataset) and data.features:
        data = read_dataset(data)
    for number, row in enumerate(data):
        if isinstance(row, str):
            yield {text_field: row}
        elif isinstance(row, Mapping):
            yield {name: without_arrays(value) for name, value in row.items()}
        else:
            raise InputError(f"row {number} is of type {type(row).__name__}: give texts, or rows as dictionaries")


def without_arrays(value: Any) -> Any:
    """Return a value with lists in place of arrays."""
    if getattr(value, "ndim", 0) and hasattr(value, "tolist"):
        value = value.tolist()
    return [without_arrays(item) for item in value] if isinstance(value, list) else value
