"""Sources of a recipe → tables of pairs, triplets or scored pairs, checked before anything trains.

Letters: N rows, C columns.
"""

import math
import random
import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from biphase import console
from biphase.corpus.forms import PlacedRow
from biphase.corpus.rows import FileForm, as_number, check_text, read_number, rows_of_file
from biphase.corpus.text import TextSource, check_place, cut_words, find_text_sources, join_words, read_documents
from biphase.embedding.recipe import EmbeddingRecipe, EmbeddingStage, PairSource
from biphase.encoder.models import find_folder
from biphase.errors import InputError
from biphase.files import content_hash, file_hash, refuse_foreign
from biphase.hub import pin_commit
from biphase.tasks.sources import read_hub_split

GUESSES: tuple[tuple[str, ...], ...] = (
    ("anchor", "positive", "negative"),
    ("anchor", "positive"),
    ("query", "positive", "negative"),
    ("query", "positive"),
    ("sentence1", "sentence2", "score"),
    ("sentence_A", "sentence_B", "relatedness_score"),
    ("text1", "text2", "score"),
    ("question", "answer"),
    ("question", "context"),
    ("query", "passage"),
    ("query", "document"),
    ("title", "text"),
)
"""The columns of pairs if a recipe names none: the first of these entries that the file has."""
SCORES = ("score", "relatedness_score", "label", "similarity")
MOST_TOLD = 0.99
"""The largest share of rows read in an epoch of which a line tells."""
PIECE_ROWS = 10_000
"""The number of rows that are Python objects at a time."""
RARE = 0.1
"""The share of the batches of an epoch that may have a text for all rows to be read."""
MOST_VISITS = 20
"""The number of times that a row is visited to see how many rows an epoch reads."""
SHORTEST_PASSAGE = 8
"""The fewest words of a passage; shorter ones are left out."""


@dataclass(frozen=True)
class Pairs:
    """The rows of one source."""

    name: str
    kind: Literal["pairs", "scored"]
    table: pa.Table
    """Texts in the columns `anchor`, `positive`, `negative_1` …; scored pairs have `score`."""
    hash: str
    """The hash of the source's files or commit."""
    description: str
    """A line for people about the origin of the pairs."""

    @property
    def rows(self) -> list[tuple[Any, ...]]:
        return list(zip(*self.table.to_pydict().values(), strict=True))


class UnclearPairsError(InputError):
    """A file does not show which of its columns are pairs, or scores. The arguments are the question that is open and
    the remedy in a recipe."""

    def __str__(self) -> str:
        question, remedy = self.args
        return f"{question} {remedy}"


def to_arrow(rows: Iterable[Sequence[Any]], names: Sequence[str], progress: console.Tracker | None = None) -> pa.Table:
    """Make a table of rows, piece by piece, because Python objects take several times the memory."""
    schema = pa.schema([(name, pa.float64() if name == "score" else pa.string()) for name in names])
    pieces, remaining = [schema.empty_table()], iter(rows)
    while piece := list(islice(remaining, PIECE_ROWS)):
        pieces.append(pa.table([list(column) for column in zip(*piece, strict=True)], schema=schema))
        if progress is not None:
            progress.advance(len(piece))
    return pa.concat_tables(pieces)


def read_pairs(source: PairSource, seed: int) -> Pairs:
    """Read all rows of a source. Raises `InputError` for a row that is not a pair of texts, with its file and line."""
    if source.path is None:
        return pairs_from_text(source, str(source.from_text), seed)
    rows, columns, is_scored = open_pairs(source)
    if not source.columns:
        console.err.print(f"{source.path}: pairs are its columns {', '.join(columns)}")
    names = ("anchor", "positive", *(f"negative_{index + 1}" for index in range(len(columns) - 2)))
    names = ("anchor", "positive", "score") if is_scored else names
    with console.track(f"read {Path(source.path).name}", source.limit, "rows") as progress:
        table = to_arrow(check_rows(islice(rows, source.limit), columns, is_scored), names, progress)
    scores = table["score"].unique().to_pylist() if is_scored else []
    if scores and not source.columns and columns[2] == "label" and all(score % 1 == 0 for score in scores):
        remedy = f"name columns: [{', '.join(columns)}] where it is a score, or two columns with texts"
        raise UnclearPairsError(f"{source.path}: is 'label' a score or a class?", remedy)
    if len(scores) == 1:
        raise InputError(f"{source.path}: all scores are {scores[0]}, from which nothing can be learnt")
    message = f"{len(table):,} {'scored pairs' if is_scored else 'rows'} of {', '.join(columns)}"
    return Pairs(source.path, "scored" if is_scored else "pairs", table, hash_pairs(source), message)


def check_paths(recipe: EmbeddingRecipe) -> None:
    """Raise `InputError` for paths of a recipe that do not exist or have no pairs in their first row, and for an `out`
    that biphase did not write. Skip pairs on the Hub."""
    out, models = Path(recipe.out), (recipe.model, *recipe.teachers)
    if out.exists() and out.resolve() in [Path(model).expanduser().resolve() for model in models]:
        raise InputError(f"out: {out} is the model that is trained, or a teacher: give another folder")
    refuse_foreign(out, "embedding model")
    for model in models:
        find_folder(model)
    check_sources(recipe)
    for path in recipe.evaluation:
        if not Path(path).exists():
            raise InputError(f"evaluation: {path} does not exist")


def check_sources(recipe: EmbeddingRecipe) -> None:
    """Raise `InputError` for sources of a recipe that do not exist or have no pairs in their first row. Skip pairs on
    the Hub."""
    for source in (source for stage in recipe.stages for source in stage.data):
        if source.from_text is not None:
            check_place(source.from_text)
        elif is_local(str(source.path)):
            open_pairs(source)


def open_pairs(source: PairSource) -> tuple[Iterator[PlacedRow], tuple[str, ...], bool]:
    """Open a file, or the split `train` of a Hub data set (`owner/name[:config]`). Returns its placed rows, the columns
    of its pairs, and whether the third column is a score. Raises `InputError` if the first row lacks a column."""
    assert source.path is not None
    if is_local(source.path):
        rows = rows_of_file(Path(source.path).expanduser(), FileForm(quotes=source.quotes, delimiter=source.delimiter))
    else:
        id, _, config = source.path.partition(":")
        rows = read_hub_split(id, None, config or None, "train")
    first = next(rows, None)
    if first is None:
        raise InputError(f"{source.path} has no rows")
    row = first[1]
    columns = source.columns or guess_columns(source.path, row)
    lacking = [column for column in columns if column not in row]
    if lacking or len(columns) < 2:
        message = f"no column '{lacking[0] if lacking else '?'}'; it has {', '.join(row)}"
        raise InputError(f"{source.path}: {message}: name two or more with columns")
    may_be_scored = len(columns) == 3 and not columns[2].startswith("negative")
    is_scored = may_be_scored and (columns[2] in SCORES or as_number(row[columns[2]]) is not None)
    return chain([first], rows), columns, is_scored


def is_local(path: str) -> bool:
    """Tell a path of this machine from the name of a Hub data set. Raises `InputError` for neither."""
    if Path(path).expanduser().exists():
        return True
    if path.startswith((".", "/", "~")) or path.count("/") != 1 or Path(path.partition("/")[0]).exists():
        raise InputError(f"{path} does not exist")
    return False


def check_rows(rows: Iterable[PlacedRow], columns: Sequence[str], is_scored: bool) -> Iterator[tuple[Any, ...]]:
    """Yield the texts of each row, or two texts and their score."""
    for location, row in rows:
        values: list[Any] = []
        for column in columns[:2] if is_scored else columns:
            values.append(check_text(location, column, row.get(column)))
            if not values[-1].strip():
                raise InputError(f"{location}: '{column}' is empty: fix the row or remove it")
        if is_scored:
            values.append(read_number(location, columns[2], row.get(columns[2])))
            if not 0 <= values[-1] <= 5:
                raise InputError(f"{location}: '{columns[2]}' is {values[-1]:g}: scores are from 0 to 1, or 0 to 5")
        yield tuple(values)


def hash_pairs(source: PairSource) -> str:
    """Hash the contents of a source: a file, all files of a folder, or the newest commit of a Hub data set. Equals
    `Pairs.hash`."""
    if source.path is None:
        return hash_text(str(source.from_text), find_text_sources([str(source.from_text)]))
    path = Path(source.path).expanduser()
    if path.exists():
        return hash_files(path, (file for file in path.rglob("*") if file.is_file()))
    return content_hash([source.path, pin_commit(source.path.partition(":")[0], None)])


def hash_text(name: str, sources: Sequence[TextSource]) -> str:
    """Hash a file, the text files of a folder, the files that a glob matches, or commits."""
    path = Path(name).expanduser()
    if path.exists():
        return hash_files(path, [Path(source.name) for source in sources])
    return content_hash([file_hash(text.path) if text.path else text.fingerprint for text in sources])


def hash_files(path: Path, files: Iterable[Path]) -> str:
    """Hash a file, or these files of a folder with their names."""
    if path.is_file():
        return file_hash(path)
    return content_hash([[str(file.relative_to(path)), file_hash(file)] for file in sorted(files)])


def guess_columns(name: str, row: dict[str, Any]) -> tuple[str, ...]:
    """Guess the columns of pairs from the names in a row, or from its only two texts. Raises `InputError` if there are
    none, and if a further column may score the pairs."""
    columns = next((guess for guess in GUESSES if set(guess) <= row.keys()), None)
    if columns is not None and columns[-1] == "positive":
        columns = (*columns, *(column for column in row if re.fullmatch(r"negative_?\d+", column)))
    texts = tuple(column for column, value in row.items() if isinstance(value, str) and as_number(value) is None)
    if columns is None and len(texts) == 2 and len(row) <= 3:
        columns = (*texts, *(column for column in row if column not in texts and column in SCORES))
    if columns is None:
        remedy = f"name them with columns: [a, b]; it has {', '.join(row)}"
        raise UnclearPairsError(f"{name}: which columns are pairs?", remedy)
    score = next((column for column in SCORES if column in row and column not in columns), None)
    if score is not None and columns != ("title", "text"):  # a text with a title often has a class
        remedy = f"name columns: [{', '.join((*columns[:2], score))}] if so, else columns: [{', '.join(columns)}]"
        raise UnclearPairsError(f"{name}: does '{score}' say how well its pairs fit?", remedy)
    return columns


# Pairs out of plain text


def pairs_from_text(source: PairSource, path: str, seed: int) -> Pairs:
    """Make pairs from documents, in order. The same text, settings and seed give the same pairs."""
    draw = random.Random(seed)
    sources = find_text_sources([path])
    content = hash_text(path, sources)
    num_documents = num_used = 0

    def make_all() -> Iterator[tuple[str, str]]:
        nonlocal num_documents, num_used
        for document in chain.from_iterable(read_documents(text, source.text_field) for text in sources):
            num_documents += 1
            pairs = list(PAIR_MAKERS[source.pairs](document.text, source.passage_words, draw))
            num_used += bool(pairs)
            yield from pairs

    with console.track(f"make {source.pairs}", source.limit, "pairs") as progress:
        table = to_arrow(islice(make_all(), source.limit), ("anchor", "positive"), progress)
    if not len(table):
        raise InputError(f"{path}: no pairs by '{source.pairs}' in {num_documents:,} documents; are they too short?")
    message = f"{len(table):,} pairs ({source.pairs}) from {num_used:,} of {num_documents:,} documents"
    return Pairs(path, "pairs", table, content, message)


def cut_passages(text: str, passage_words: int) -> list[list[str]]:
    """Cut a text into passages of about equal length, without a last one that is too short to say anything."""
    return [passage for passage in cut_words(text, passage_words) if len(passage) >= SHORTEST_PASSAGE]


def crops(document: str, passage_words: int, draw: random.Random) -> Iterator[tuple[str, str]]:
    """Yield a short and a longer piece of each passage, drawn independently (Contriever's crops). The short one has the
    length of a question: 4 to 16 words."""
    for passage in cut_passages(document, passage_words):
        short = min(draw.randint(4, 16), len(passage) // 2)
        long = draw.randint(max(short, len(passage) // 2), len(passage))
        first, second = draw.randint(0, len(passage) - short), draw.randint(0, len(passage) - long)
        yield join_words(passage[first : first + short]), join_words(passage[second : second + long])


def neighbours(document: str, passage_words: int, draw: random.Random) -> Iterator[tuple[str, str]]:
    """Yield every other passage with the next."""
    passages = cut_passages(document, passage_words)
    for first, second in zip(passages[::2], passages[1::2], strict=False):
        yield join_words(first), join_words(second)


def titles(document: str, passage_words: int, draw: random.Random) -> Iterator[tuple[str, str]]:
    """Yield the first line of a document, if it is short, with a passage drawn from the text below it."""
    title, _, body = document.strip().partition("\n")
    passages = cut_passages(body, passage_words)
    if passages and len(cut_words(title, 20)) == 1:  # a title has 1 to 20 words
        yield title.strip("# \t"), join_words(draw.choice(passages))


PAIR_MAKERS = {"crops": crops, "neighbours": neighbours, "titles": titles}


def check_stage(stage: EmbeddingStage, sources: Sequence[Pairs]) -> None:
    """Raise `InputError` if a source of a stage is too small for a batch or for hard negatives. Print a line if an
    epoch must leave out rows."""
    for source, pairs in zip(stage.data, sources, strict=True):
        mined = stage.hard_negatives
        if mined and len(pairs.table.columns) > 2:
            has = f"{pairs.name} has scores or negatives of its own"
            raise InputError(f"stage {stage.name}: {has}: leave hard_negatives out, or name two of its columns")
        distinct = {f"pairs at weight {source.weight:g}": round(min(1, source.weight) * len(pairs.table))}
        names = pairs.table.column_names if pairs.kind == "pairs" else []
        for name in names:
            told = "negative" if name.startswith("negative") and len(names) == 3 else name
            as_told = f"texts as {told}" if told.startswith("negative") else f"{told}s"
            distinct[as_told] = pc.count_distinct(pairs.table[name]).as_py()
        fewest, num_distinct = min(distinct.items(), key=lambda item: item[1])
        if num_distinct < (stage.batch_size if pairs.kind == "pairs" else 2):
            message = f"{pairs.name} has {num_distinct:,} different {fewest}, too few for a batch of {stage.batch_size}"
            remedy = "name columns without this one" if "as negative" in fewest else "give more pairs"
            raise InputError(f"stage {stage.name}: {message}: lower batch_size, or {remedy}")
        if any(other.kind == "pairs" for other in sources):  # then no batch has a text twice
            tell_read(stage, pairs.name, pairs.table, source.weight)
        if mined and mined.first_rank + mined.number > min(mined.last_rank, num_distinct):
            message = f"ranks {mined.first_rank} to {mined.last_rank} of the {num_distinct:,} {fewest} of {pairs.name}"
            raise InputError(f"stage {stage.name}: hard_negatives: {message} do not hold {mined.number} negatives")


def tell_read(stage: EmbeddingStage, name: str, table: pa.Table, weight: float) -> None:
    """Print a line if an epoch leaves out rows of a source, because a text occurs once in a batch."""
    share = share_read(table, weight, stage.batch_size)
    if share < MOST_TOLD:
        told = f"about {share:.0%} of the rows are read in an epoch, because a text occurs once in a batch"
        fewer = " or hard_negatives' number" if stage.hard_negatives else ""
        console.err.print(f"stage {stage.name}: {name}: {told}: lower batch_size{fewer}")


def share_read(table: pa.Table, weight: float, batch_size: int) -> float:
    """Return about which share of the rows of a source an epoch reads if no batch has a text twice, in whatever columns
    it stands.

    As sentence-transformers' sampler does, fill each batch with the next rows whose texts are not in it, and make no
    more batches than would hold all rows. Stop after `MOST_VISITS` visits of a row, and take the batches that remain
    for as large as the last.
    """
    pieces = table.drop_columns([name for name in table.column_names if name == "score"]).to_batches(PIECE_ROWS)
    hashes = ([[hash(text) for text in column.to_pylist()] for column in piece.columns] for piece in pieces)
    texts_NC = np.concatenate([np.array(piece, dtype=np.int64).T for piece in hashes])
    draw = np.random.default_rng(0)
    rows_N = draw.permutation(np.resize(draw.permutation(len(texts_NC)), round(weight * len(texts_NC))))
    num_rows, num_batches = len(rows_N), math.ceil(len(rows_N) / batch_size)
    if math.ceil(weight) * np.unique(texts_NC, return_counts=True)[1].max() <= RARE * num_batches:
        return 1.0
    waiting, num_read, num_visits = deque(map(tuple, texts_NC[rows_N].tolist())), 0, 0
    for num_left in reversed(range(num_batches)):
        texts, skipped, num_waiting, size = set[int](), list[tuple[int, ...]](), len(waiting), 0
        while waiting and size < batch_size:
            row = waiting.popleft()
            if texts.isdisjoint(row):
                texts.update(row)
                size += 1
            else:
                skipped.append(row)
        num_read += size
        num_visits += num_waiting - len(waiting)
        waiting.extendleft(reversed(skipped))
        if num_visits > MOST_VISITS * num_rows:
            return min(num_read + num_left * size, num_rows) / num_rows
    return num_read / num_rows
