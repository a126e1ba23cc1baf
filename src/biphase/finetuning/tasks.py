"""A task's name → its labelled examples. What each task is stands in one table; what differs is data, not code.

Examples come from files in the package, from a folder of the data's own published format (`data_dir`), or from the hub.
Rows are checked here, once: whatever comes out is well-formed.
"""

import io
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from importlib import resources
from pathlib import Path
from string import Formatter
from typing import Any, Literal

import numpy as np
import pyarrow as pa  # its streams, unlike zstandard's, notice a file that is cut short

from biphase.config import Strict
from biphase.errors import InputError, nearest
from biphase.files import content_hash

Family = Literal["sequence_classification", "token_classification"]
SplitName = Literal["train", "validation", "test"]
SPLITS: tuple[SplitName, ...] = ("train", "validation", "test")

TRAIN_SHARE, HOLD_OUT_SEED = 0.95, 42
"""Where there is no validation split, the rest of train becomes it, as in the paper."""

CODECS = {".zst": "zstd", ".gz": "gzip"}


class Splits(Strict):
    """Where each split is: file names in a folder, or split names on the hub."""

    train: str
    validation: str | None = None
    """None: 5 % of train, drawn with seed 42."""
    test: str


class Hub(Strict):
    id: str
    config: str | None = None
    revision: str | None = None
    splits: Splits


class Task(Strict):
    name: str
    family: Family
    label: str
    """The column with the label, or with the list of tags."""
    labels: tuple[str, ...]
    """In the order of their numbers: a column may hold names or numbers."""
    unlabelled: tuple[str, ...] = ()
    """Values of `label` that say nobody knows: such rows are left out and counted."""
    template: str = ""
    """Sequence classification: the input, with columns in braces."""
    words: str = "tokens"
    """Token classification: the column with the list of words."""
    metric: Literal["accuracy", "f1"]
    """The one that chooses a learning rate (on validation)."""
    bundled: bool = False
    """Comes with the package, in `bundled/tasks`."""
    files: tuple[Splits, ...]
    """What a `data_dir` may hold, by preference: .jsonl, .tsv with a header, else columns; .zst and .gz are opened."""
    columns: tuple[int, int] = (0, 1)
    """Of a file of columns: where the word and the tag stand."""
    hub: Hub | None = None
    licence: str
    citation: str
    note: str = ""


JSONL = Splits(train="train.jsonl", validation="validation.jsonl", test="test.jsonl")

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task(
            name="genre",
            family="sequence_classification",
            template="{text}",
            label="label",
            labels=("encyclopedia", "novel", "government", "abstract", "article"),
            metric="accuracy",
            bundled=True,
            files=(JSONL,),
            licence="CC BY-SA 4.0",
            citation="biphase, from the sources that bundled/tasks/LICENSES.md names",
            note="Which kind of text a sentence is from. Made for the demo; no published benchmark.",
        ),
        Task(
            name="snli",
            family="sequence_classification",
            template="Premise: {premise}\nHypothesis: {hypothesis}",
            label="label",
            labels=("entailment", "neutral", "contradiction"),
            unlabelled=("-1",),
            metric="accuracy",
            bundled=True,
            files=(JSONL,),
            licence="CC BY-SA 4.0",
            citation="Bowman, Angeli, Potts and Manning 2015, arXiv:1508.05326",
            note="What is bundled is a small part: train and validation are the official dev part, split by premise; "
            "test is 1,000 premises of the official test part. Scores on it are not the official benchmark's.",
        ),
        Task(
            name="sst2",
            family="sequence_classification",
            template="{sentence}",
            label="label",
            labels=("negative", "positive"),
            metric="accuracy",
            files=(Splits(train="train.tsv", test="dev.tsv"),),
            hub=Hub(
                id="nyu-mll/glue",
                config="sst2",
                revision="bcdcba79d07bc864c1c254ccfcedcce55bcc9a8c",
                splits=Splits(train="train", test="validation"),
            ),
            licence="not stated (research use)",
            citation="Socher et al. 2013, aclanthology.org/D13-1170; Wang et al. 2019 (GLUE), arXiv:1804.07461",
            note="GLUE's test labels are not public: as in the paper, its validation split is the test split here.",
        ),
        Task(
            name="uner_en_ewt",
            family="token_classification",
            words="tokens",
            label="ner_tags",
            labels=("O", "B-PER", "I-PER", "B-ORG", "I-ORG", "B-LOC", "I-LOC"),
            metric="f1",
            bundled=True,
            files=(
                JSONL,
                Splits(train="en_ewt-ud-train.iob2", validation="en_ewt-ud-dev.iob2", test="en_ewt-ud-test.iob2"),
            ),
            columns=(1, 2),
            licence="CC BY-SA 4.0",
            citation="Mayhew et al. 2024, aclanthology.org/2024.naacl-long.243",
            note="The bundled train split is an early revision in which a few entities differ from the release.",
        ),
        Task(
            name="wnut17",
            family="token_classification",
            words="tokens",
            label="ner_tags",
            labels=(
                "O",
                *("B-corporation", "I-corporation", "B-creative-work", "I-creative-work", "B-group", "I-group"),
                *("B-location", "I-location", "B-person", "I-person", "B-product", "I-product"),
            ),
            metric="f1",
            bundled=True,
            files=(
                JSONL,
                Splits(train="wnut17train.conll", validation="emerging.dev.conll", test="emerging.test.annotated"),
            ),
            columns=(0, 1),
            licence="CC BY 4.0",
            citation="Derczynski, Nichols, van Erp and Limsopatham 2017, aclanthology.org/W17-4418",
        ),
    )
}


@dataclass(frozen=True)
class LabelledText:
    id: str
    text: str
    label: int


@dataclass(frozen=True)
class TaggedWords:
    id: str
    words: tuple[str, ...]
    tags: tuple[int, ...]


Example = LabelledText | TaggedWords


@dataclass(frozen=True)
class TaskData:
    """The examples of a task; every split has some. `left_out` counts the rows without a gold label."""

    task: Task
    source: str
    train: tuple[Example, ...]
    validation: tuple[Example, ...]
    test: tuple[Example, ...]
    left_out: int

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the task's definition and of all examples in order."""
        examples = {name: [list(asdict(example).values()) for example in getattr(self, name)] for name in SPLITS}
        return content_hash({"labels": self.task.labels, "metric": self.task.metric, **examples})


def find_task(name: str) -> Task:
    if name not in TASKS:
        raise InputError(f"unknown task '{name}'{nearest(name, TASKS)}")
    return TASKS[name]


def load_task(name: str, data_dir: str | Path | None = None) -> TaskData:
    """The examples of a task of the table: from `data_dir` when given, else from the package, else from the hub.

    Raises `InputError` naming file and line: a missing file or column, a label outside the task's set, tags that do
    not match words, text that is not UTF-8, broken JSON; and an empty split or an unknown task.
    """
    return read_task(find_task(name), None if data_dir is None else Path(data_dir))


@lru_cache(maxsize=8)
def read_task(task: Task, data_dir: Path | None) -> TaskData:
    source, rows_by_split = find_rows(task, data_dir)
    examples: dict[str, list[Example]] = {}
    left_out = 0
    for name, rows in rows_by_split.items():
        made = [make_example(task, place, row) for place, row in rows]
        examples[name] = [example for example in made if example is not None]
        left_out += len(made) - len(examples[name])
        if not examples[name]:
            raise InputError(f"task '{task.name}': the {name} split in {source} has no labelled examples")
    if "validation" not in examples:
        if len(examples["train"]) < 2:
            raise InputError(f"task '{task.name}': the train split in {source} is too small to hold out a validation")
        examples["train"], examples["validation"] = hold_out(examples["train"])
    train, validation, test = (tuple(examples[name]) for name in SPLITS)
    return TaskData(task, source, train, validation, test, left_out)


def hold_out(examples: Sequence[Example]) -> tuple[list[Example], list[Example]]:
    """Train and validation, in the order of `datasets.Dataset.train_test_split(train_size=0.95, seed=42)`."""
    num_train = math.floor(TRAIN_SHARE * len(examples))
    order = np.random.default_rng(HOLD_OUT_SEED).permutation(len(examples))
    num_held = len(examples) - num_train
    return [examples[i] for i in order[num_held:]], [examples[i] for i in order[:num_held]]


Row = dict[str, Any]
Rows = Iterable[tuple[str, Row]]
"""Rows with the place of each: `train.jsonl:12`."""


def find_rows(task: Task, data_dir: Path | None) -> tuple[str, dict[str, Rows]]:
    """A name of the source, and the rows of each split that it has."""
    if data_dir is not None:
        paths = find_files(task, data_dir)
        return str(data_dir), {name: read_rows(task, path) for name, path in paths.items()}
    if task.bundled:
        folder = Path(str(resources.files("biphase"))) / "bundled" / "tasks"
        paths = {name: folder / f"{task.name}-{name}.jsonl.zst" for name in SPLITS}
        return "biphase", {name: read_rows(task, path) for name, path in paths.items()}
    if task.hub is None:
        raise InputError(f"task '{task.name}' comes neither with biphase nor from a hub: give its folder as data_dir=…")
    return task.hub.id, {name: read_hub(task.hub, split) for name, split in named(task.hub.splits).items()}


def named(splits: Splits) -> dict[str, str]:
    return {name: place for name in SPLITS if (place := getattr(splits, name)) is not None}


def find_files(task: Task, folder: Path) -> dict[str, Path]:
    """The files of the first layout that is complete in `folder`, compressed or not."""
    if not folder.is_dir():
        raise InputError(f"data_dir {folder} is not a folder")
    lacking = []
    for layout in task.files:
        candidates = {name: [folder / (file + end) for end in ("", *CODECS)] for name, file in named(layout).items()}
        found = {name: next((path for path in paths if path.is_file()), None) for name, paths in candidates.items()}
        if all(found.values()):
            return {name: path for name, path in found.items() if path is not None}
        lacking.append(next(getattr(layout, name) for name, path in found.items() if path is None))
    raise InputError(f"data_dir {folder}: task '{task.name}' needs {' or '.join(lacking)} there")


def read_hub(hub: Hub, split: str) -> Rows:
    """Rows from the hub, at the pinned revision. Code of the repository's own is never run."""
    import datasets
    from huggingface_hub.errors import HTTPError

    try:
        rows = datasets.load_dataset(hub.id, hub.config, split=split, revision=hub.revision)
    except (OSError, ValueError, RuntimeError, HTTPError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(
            f"{hub.id}: split '{split}' cannot be read from the hub ({reason}); a local copy works with data_dir=…"
        ) from None
    return ((f"{hub.id} {split}: row {number}", dict(row)) for number, row in enumerate(rows))


def read_rows(task: Task, path: Path) -> Rows:
    plain = path.with_suffix("") if path.suffix in CODECS else path
    if plain.suffix == ".jsonl":
        return read_jsonl(path)
    if plain.suffix == ".tsv":
        return read_tsv(path)
    return read_columns(path, task)


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines (from 1) without their ends, out of the compression."""
    try:
        with pa.OSFile(str(path)) as file:
            stream = pa.CompressedInputStream(file, CODECS[path.suffix]) if path.suffix in CODECS else file
            for number, line in enumerate(io.BufferedReader(stream, 1 << 20), start=1):
                yield number, line.rstrip(b"\r\n").decode("utf-8-sig" if number == 1 else "utf-8")
    except FileNotFoundError:
        raise InputError(f"{path} does not exist") from None
    except UnicodeDecodeError:
        raise InputError(f"{path}:{number}: not UTF-8; convert the file, for example with iconv") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read to its end ({error}): it is damaged or cut short") from None


def read_jsonl(path: Path) -> Rows:
    for number, line in read_lines(path):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise InputError(f"{path}:{number}: broken JSON ({error.msg}, column {error.colno})") from None
        if not isinstance(row, dict):
            raise InputError(f"{path}:{number}: one JSON object per line is needed")
        yield f"{path}:{number}", row


def read_tsv(path: Path) -> Rows:
    """GLUE's form: a header, tabs, no quoting."""
    lines = read_lines(path)
    header = next(lines, (1, ""))[1].split("\t")
    for number, line in lines:
        fields = line.split("\t")
        if len(fields) != len(header):
            raise InputError(f"{path}:{number}: {len(fields)} fields where the header names {len(header)}")
        yield f"{path}:{number}", dict(zip(header, fields, strict=True))


def read_columns(path: Path, task: Task) -> Rows:
    """CoNLL's form: a word and its tag per line, an empty line or -DOCSTART- between sentences.

    Where words are numbered (they stand behind the first column), a line with `#` is a comment; elsewhere it is a word.
    """
    word_at, tag_at = task.columns
    is_numbered = word_at > 0
    words: list[str] = []
    tags: list[str] = []
    row: Row = {}
    first = 0
    for number, line in itertools.chain(read_lines(path), [(0, "")]):
        if not line.strip() or line.startswith("-DOCSTART-"):
            if words:
                yield f"{path}:{first}", row | {task.words: words, task.label: tags}
            words, tags, row = [], [], {}
        elif is_numbered and line.startswith("#"):
            key, _, value = line[1:].partition("=")
            row |= {"id": value.strip()} if key.strip() == "sent_id" else {}
        else:
            fields = line.split("\t") if "\t" in line else line.split()
            if len(fields) <= max(word_at, tag_at):
                raise InputError(f"{path}:{number}: a line without a tag: '{line[:40]}'")
            first = first if words else number
            words.append(fields[word_at])
            tags.append(fields[tag_at].strip())


def make_example(task: Task, place: str, row: Row) -> Example | None:
    """A checked example; None for a row without a gold label."""
    id = str(row.get("id", row.get("idx", place.rpartition("/")[2])))
    value = column(task, place, row, task.label)
    if task.family == "sequence_classification":
        if str(value) in task.unlabelled:
            return None
        texts = {name: column(task, place, row, name) for name in template_columns(task.template)}
        for name, text in texts.items():
            if not isinstance(text, str):
                raise InputError(f"{place}: column '{name}' is {json.dumps(text)[:40]}, not a text")
        return LabelledText(id, task.template.format(**texts), label_number(task, place, value))
    words = column(task, place, row, task.words)
    if not isinstance(words, list) or not words or not all(isinstance(word, str) and word for word in words):
        raise InputError(f"{place}: column '{task.words}' must be a list of words, none of them empty")
    if not isinstance(value, list) or len(value) != len(words):
        num_tags = f"{len(value)} tags" if isinstance(value, list) else "no list of tags"
        raise InputError(f"{place}: {num_tags} for {len(words)} words")
    return TaggedWords(id, tuple(words), tuple(label_number(task, place, tag) for tag in value))


def column(task: Task, place: str, row: Row, name: str) -> Any:
    if name not in row:
        raise InputError(f"{place}: task '{task.name}' needs column '{name}'; the columns are: {', '.join(row)}")
    return row[name]


@lru_cache
def template_columns(template: str) -> tuple[str, ...]:
    return tuple(name for _, name, _, _ in Formatter().parse(template) if name)


def label_number(task: Task, place: str, value: Any) -> int:
    """The number of a label given by name or by number (GLUE's files write numbers as text)."""
    if isinstance(value, str) and value in task.labels:
        return task.labels.index(value)
    number = int(value) if isinstance(value, str) and value.isdecimal() else value
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < len(task.labels):
        raise InputError(
            f"{place}: label {value!r} is not one of task '{task.name}': {', '.join(task.labels)} "
            f"(or 0 to {len(task.labels) - 1})"
        )
    return number
