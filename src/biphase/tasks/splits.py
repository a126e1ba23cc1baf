"""The splits that a source lacks, drawn with seed 42; and the data of a retrieval task.

The draw depends on the number of examples, strata and groups, or in retrieval on query ids: every model sees the same
splits and subsets.
"""

import itertools
import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, TypeVar

import numpy as np
from pydantic import Field, TypeAdapter, ValidationError

from biphase import console
from biphase.corpus.rows import column, text_column
from biphase.errors import InputError
from biphase.tasks.sources import PartName, TaskSource, read_rows
from biphase.tasks.spec import EVALUATED_SPLITS, TASK_SPLITS, EvaluatedSplit, Task, TaskSplit

DRAW_SEED = 42
TRAIN_SHARE = 0.95
"""The share of train that stays if validation is drawn from it, as in the paper."""
TEST_SHARE = 0.1
"""The share of train that becomes a missing test split, before validation is drawn from the rest."""

NUM_SHUFFLES = 32
"""The number of random orders of groups; the best of them is the first choice."""

Item = TypeVar("Item")
Judgements = dict[str, dict[str, int]]
"""Query id → document id → grade; 1 and more is relevant."""


def draw_indices(num_items: int, most: int) -> np.ndarray:
    """Draw the indices of a fixed random subset of at most `most` items, ascending."""
    return np.sort(np.random.default_rng(DRAW_SEED).permutation(num_items)[:most])


def choose_groups(groups: np.ndarray, num_held: int, strata: np.ndarray | None) -> np.ndarray:
    """Choose groups to hold out: some, but not all, with nearly `num_held` rows and, with `strata`, nearly the share of
    each.

    Groups are shuffled with seed 42 and taken from the first, as in scikit-learn's GroupShuffleSplit, several times.
    From the closest choice on, the group that brings it closest is added or taken out, until no group brings it closer.
    The order of the rows does not matter. Letters: G groups, C strata.
    """
    names, group = np.unique(groups, return_inverse=True)
    classes, stratum = np.unique(np.zeros(len(groups)) if strata is None else strata, return_inverse=True)
    counts_GC = np.zeros((len(names), len(classes)))
    np.add.at(counts_GC, (group, stratum), 1)
    wanted_C = counts_GC.sum(axis=0) * num_held / len(groups)
    generator = np.random.default_rng(DRAW_SEED)
    is_held_G = np.zeros(len(names), bool)
    least = math.inf
    for _ in range(NUM_SHUFFLES):
        order = generator.permutation(len(names))
        distances_G = np.abs(counts_GC[order].cumsum(axis=0) - wanted_C).sum(axis=1)[:-1]
        if distances_G.min() < least:
            is_held_G[:], least = False, distances_G.min()
            is_held_G[order[: distances_G.argmin() + 1]] = True
    while True:
        sign_G = np.where(is_held_G, -1, 1)
        held_GC = counts_GC[is_held_G].sum(axis=0) + sign_G[:, None] * counts_GC
        distances_G = np.abs(held_GC - wanted_C).sum(axis=1)
        distances_G[np.isin(is_held_G.sum() + sign_G, (0, len(names)))] = math.inf
        if distances_G.min() >= least:
            return names[is_held_G]
        is_held_G[distances_G.argmin()] ^= True
        least = distances_G.min()


def hold_out(
    examples: Sequence[Item], train_share: float, strata: np.ndarray | None = None, groups: np.ndarray | None = None
) -> tuple[list[Item], list[Item]]:
    """Divide examples into train and a held-out part, both in the order of
    `Dataset.train_test_split(train_size=0.95, seed=42)`.

    With `strata`, each has its share in both: the shuffled examples form a row, one stratum after the other, and
    held-out examples come from it at equal distances. A stratum of one example stays in train. With `groups`, two or
    more, the groups of `choose_groups` are held out.
    """
    total = len(examples)
    num_held = total - math.floor(train_share * total)
    order = np.random.default_rng(DRAW_SEED).permutation(total)
    is_held = np.arange(total) < num_held
    if groups is not None:
        is_held = np.isin(groups[order], choose_groups(groups, num_held, strata))
    elif strata is not None:
        _, stratum, sizes = np.unique(strata[order], return_inverse=True, return_counts=True)
        row = np.argsort(stratum, kind="stable")
        several = row[sizes[stratum[row]] > 1]
        row = several if len(several) > num_held else row
        is_held[:] = False
        is_held[row] = np.diff(np.arange(len(row) + 1) * num_held // len(row)) > 0
    return [examples[i] for i in order[~is_held]], [examples[i] for i in order[is_held]]


def draw_queries(source: TaskSource, by_split: dict[TaskSplit, Judgements]) -> dict[TaskSplit, Judgements]:
    """Draw the missing splits, by query. The draw depends on the ids alone, not on their order."""
    if "validation" in by_split:
        return by_split
    drawn_from: TaskSplit = "train" if "train" in by_split else "test"
    ids = sorted(by_split[drawn_from])
    num_ids = len(ids)
    ids = [ids[index] for index in np.random.default_rng(DRAW_SEED).permutation(num_ids)]
    ends: dict[TaskSplit, int]
    if drawn_from == "train":
        num_held = max(num_ids - math.floor(TRAIN_SHARE * num_ids), min(100, num_ids // 2))
        ends = {"validation": num_held, "train": num_ids}
    elif source.task.trained_on is not None:
        ends = {"validation": num_ids // 2, "test": num_ids}
    else:
        ends = {"validation": num_ids // 4, "test": num_ids // 2, "train": num_ids}
    splits = dict(by_split)
    begin = 0
    for split, end in ends.items():
        chosen = set(ids[begin:end])
        if not chosen:
            message = f"task '{source.task.name}': the {drawn_from} split in {source.name}"
            raise InputError(f"{message} has too few queries ({num_ids}) to draw a {split} split from it")
        splits[split] = {query: grades for query, grades in by_split[drawn_from].items() if query in chosen}
        begin = end
    return splits


@dataclass(frozen=True)
class TaskData:
    """The examples of a task. No split is empty, unless a file is scored. `left_out` counts rows without label or text,
    and broken ones; `num_copies` the copies that `Task.duplicates` drops."""

    task: Task
    train: tuple[Any, ...]
    validation: tuple[Any, ...]
    test: tuple[Any, ...]
    left_out: int
    num_copies: int = 0

    @property
    def splits(self) -> dict[TaskSplit, tuple[Any, ...]]:
        return {name: getattr(self, name) for name in TASK_SPLITS if getattr(self, name)}


@dataclass(frozen=True)
class Collection:
    """The documents, judged queries and judgements of a retrieval task. Texts have no prefixes."""

    task: Task
    documents: dict[str, str]
    queries: dict[str, str]
    train: tuple[tuple[str, str], ...]
    """Pairs (query id, relevant document id); empty if the task is trained on another one."""
    relevance: dict[EvaluatedSplit, Judgements]
    """All judgements of the evaluated queries, of grade 0 and below too."""
    judged_documents: dict[EvaluatedSplit, tuple[str, ...]]
    """The documents that the judgements of a split name, also for queries that are not evaluated."""
    left_out: int
    """The number of train queries without a relevant document."""

    @cached_property
    def query_documents(self) -> frozenset[str]:
        """The evaluated queries that are also documents: such a query's hits leave out the query itself."""
        return own_documents(self.queries, self.documents, self.relevance["validation"] | self.relevance["test"])


def load_collection(source: TaskSource, judged_only: bool, most_evaluated: int | None) -> Collection:
    """Read and check a retrieval task, with at most `most_evaluated` queries in each evaluated split. All documents
    stay, because every query is easier with fewer of them."""
    task = source.task
    # 1. Judgements, with the missing splits drawn from their queries.
    by_split = draw_queries(source, {split: read_judgements(source, split) for split in source.splits})
    relevance = {split: by_split[split] for split in EVALUATED_SPLITS}
    judged_documents = {split: named_documents(judgements) for split, judgements in relevance.items()}
    if most_evaluated is not None:
        for name, judgements in relevance.items():
            ids = list(judgements)
            drawn = [ids[index] for index in draw_indices(len(ids), most_evaluated)]
            relevance[name] = {query: judgements[query] for query in drawn}
    # 2. Texts.
    queries, documents = read_judged_texts(source, by_split, judged_only)
    # 3. Pairs to train on. A query without a relevant document has none; no split may consist of such queries.
    pairs: list[tuple[str, str]] = []
    for query, grades in by_split.get("train", {}).items():
        pairs += [(query, document) for document, grade in grades.items() if grade > 0]
    for split, judgements in by_split.items():
        if all(grade <= 0 for grades in judgements.values() for grade in grades.values()):
            raise InputError(f"task '{task.name}': the {split} split in {source.name} has no relevant document")
    left_out = len(by_split.get("train", {})) - len({query for query, _ in pairs})
    return Collection(task, documents, queries, tuple(pairs), relevance, judged_documents, left_out)


GRADE: TypeAdapter[int] = TypeAdapter(Annotated[int, Field(gt=1 - 2**31, lt=2**31 - 1)])
"""The type of a grade: pytrec_eval silently scores 0 for one of more than 31 bits."""


def read_judgements(source: TaskSource, split: TaskSplit) -> Judgements:
    judgements: Judgements = {}
    for location, row in read_rows(source, split):
        query, document = str(column(location, row, "query-id")), str(column(location, row, "corpus-id"))
        value = column(location, row, "score")
        try:
            grade = GRADE.validate_python(value)
        except ValidationError:
            raise InputError(f"{location}: grade {value!r} is not a whole number of 31 bits") from None
        if judgements.setdefault(query, {}).setdefault(document, grade) != grade:
            raise InputError(f"{location}: document '{document}' has two grades for query '{query}'")
    return judgements


def named_documents(judgements: Judgements) -> tuple[str, ...]:
    """List the documents of judgements, each once, in order."""
    return tuple(dict.fromkeys(itertools.chain.from_iterable(judgements.values())))


def read_judged_texts(
    source: TaskSource, by_split: Mapping[TaskSplit, Judgements], judged_only: bool
) -> tuple[dict[str, str], dict[str, str]]:
    """Read the judged queries and all documents, or with `judged_only` the judged ones, by id. A title goes before its
    text. Raises `InputError` for a missing text."""
    queries, documents = set[str](), set[str]()
    for judgements in by_split.values():
        queries.update(judgements)
        documents.update(named_documents(judgements))
    return read_named_texts(source, "queries", queries), read_named_texts(source, "corpus", documents, judged_only)


def read_named_texts(source: TaskSource, part: PartName, named: Set[str], judged_only: bool = True) -> dict[str, str]:
    """Read the queries or documents that judgements name, by id, or all. Raises `InputError` for a missing text."""
    texts: dict[str, str] = {}
    with console.track(f"read {source.task.name} {part}", None, "rows") as progress:
        for row_number, (location, row) in enumerate(read_rows(source, part), start=1):
            id = str(column(location, row, "_id"))
            if row_number % 10_000 == 0:
                progress.advance(10_000)
            if id not in named and judged_only:
                continue
            text = text_column(location, row, "text")
            if row.get("title"):
                text = f"{text_column(location, row, 'title')} {text}"
            if texts.setdefault(id, text.strip()) != text.strip():
                raise InputError(f"{location}: a second text with the id '{id}'")
    if missing := named - texts.keys():
        role = "query" if part == "queries" else "document"
        message = f"a judgement of {role} '{min(missing)}', which {source.name} does not have"
        raise InputError(f"task '{source.task.name}': {message}")
    return texts


def own_documents(queries: dict[str, str], documents: dict[str, str], relevance: Judgements) -> frozenset[str]:
    """Find the queries that are also documents, and would find themselves: query and document have the same id and the
    same text, except for a title, and no judgement says that this document is relevant. Equal ids alone may be a
    coincidence."""
    twins = set()
    for id in queries.keys() & documents.keys():
        query, document = " ".join(queries[id].split()), " ".join(documents[id].split())
        if f" {document}".endswith(f" {query}") and relevance.get(id, {}).get(id, 0) <= 0:
            twins.add(id)
    return frozenset(twins)
