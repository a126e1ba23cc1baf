"""Draws with seed 42 of what no source decides, so that every model sees the same split and the same subset.

The draw depends on the number of examples, or in retrieval on the ids of the queries, and on nothing else.
"""

import math
from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from biphase.errors import InputError
from biphase.tasks.sources import TaskSource
from biphase.tasks.spec import TaskSplit

DRAW_SEED = 42
TRAIN_SHARE = 0.95
"""Where there is no validation split, the rest of train becomes it, as in the paper."""
TEST_SHARE = 0.1
"""Where there is no test split, this part of train becomes it, before validation is drawn from the rest."""

Item = TypeVar("Item")
Judgements = dict[str, dict[str, int]]
"""Query id → document id → grade, of which 1 and more is relevant."""


def draw_items(items: Sequence[Item], wanted: int) -> tuple[Item, ...]:
    """All items, or a fixed random subset of them in their order."""
    return tuple(items[index] for index in draw_indices(len(items), wanted))


def draw_indices(num_items: int, wanted: int) -> np.ndarray:
    """The indices of `draw_items`, ascending."""
    return np.sort(np.random.default_rng(DRAW_SEED).permutation(num_items)[:wanted])


def draw_shots(strata: np.ndarray, shots: int, seed: int) -> np.ndarray:
    """The indices, ascending, of so many examples of each class. Raises `InputError` where one has fewer."""
    order = np.random.default_rng(seed).permutation(len(strata))
    drawn = []
    for number in np.unique(strata):
        members = order[strata[order] == number]
        if len(members) < shots:
            raise InputError(f"shots={shots}: a class of the train split has only {len(members)} examples")
        drawn.append(members[:shots])
    return np.sort(np.concatenate(drawn))


def hold_out(
    examples: Sequence[Item], train_share: float, strata: np.ndarray | None = None
) -> tuple[list[Item], list[Item]]:
    """Train and what is held out of it, in the order of `Dataset.train_test_split(train_size=0.95, seed=42)`.

    With `strata`, each has its share in both: the shuffled examples stand in a row, one stratum after the other, and as
    many as are wanted are taken at equal distances. A stratum of one example stays in train.
    """
    total = len(examples)
    num_held = total - math.floor(train_share * total)
    order = np.random.default_rng(DRAW_SEED).permutation(total)
    is_held = np.arange(total) < num_held
    if strata is not None:
        _, stratum, sizes = np.unique(strata[order], return_inverse=True, return_counts=True)
        row = np.argsort(stratum, kind="stable")
        several = row[sizes[stratum[row]] > 1]
        row = several if len(several) > num_held else row
        is_held[:] = False
        is_held[row] = np.diff(np.arange(len(row) + 1) * num_held // len(row)) > 0
    held, train = ([examples[i] for i in order[chosen]] for chosen in (is_held, ~is_held))
    return train, held


def shuffle(items: Sequence[Item]) -> list[Item]:
    return [items[i] for i in np.random.default_rng(DRAW_SEED).permutation(len(items))]


def draw_queries(source: TaskSource, judged: dict[TaskSplit, Judgements]) -> dict[TaskSplit, Judgements]:
    """The splits that the source does not have, by query. The draw depends on the ids alone, not on their order."""
    if "validation" in judged:
        return judged
    drawn_from: TaskSplit = "train" if "train" in judged else "test"
    ids = shuffle(sorted(judged[drawn_from]))
    num_ids = len(ids)
    ends: dict[TaskSplit, int]
    if drawn_from == "train":
        num_held = max(num_ids - math.floor(TRAIN_SHARE * num_ids), min(100, num_ids // 2))
        ends = {"validation": num_held, "train": num_ids}
    elif source.task.trained_on is not None:
        ends = {"validation": num_ids // 2, "test": num_ids}
    else:
        ends = {"validation": num_ids // 4, "test": num_ids // 2, "train": num_ids}
    splits = dict(judged)
    begin = 0
    for split, end in ends.items():
        chosen = set(ids[begin:end])
        if not chosen:
            raise InputError(
                f"task '{source.task.name}': the {drawn_from} split in {source.name} has too few queries "
                f"({num_ids}) to draw a {split} split from it"
            )
        splits[split] = {query: grades for query, grades in judged[drawn_from].items() if query in chosen}
        begin = end
    return splits
