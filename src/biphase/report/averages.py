"""Results on datasets → the averages of families, with intervals by the test of all verdicts."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from biphase.report.contrasts import seed_interval
from biphase.report.results import AVERAGE, NORMAL_QUANTILE, Result, ResultSet, measured


def with_averages(results: Iterable[Result]) -> ResultSet:
    """Add the average over the datasets of each family, where an arm has all of those that any arm has; averages that
    are there stay."""
    given = ResultSet(tuple(results))
    made = []
    for metric in given.metrics:
        for family in given.families:
            for arm in given.arms(family=family, metric=metric):
                cells = [cell for cell in given.find_all(arm, family, metric) if cell is not None]
                is_whole = len(cells) == len(given.datasets(family, metric))
                if is_whole and given.find(arm, family, AVERAGE, metric) is None:
                    made.append(average(cells))
    return ResultSet((*given.results, *made))


def average(cells: Sequence[Result]) -> Result:
    """The mean of an arm's results on several datasets.

    Where all have the same seeds it goes seed by seed, so that its interval is that of the average. Where a seed lacks
    somewhere there are no samples, but its interval is still over what is repeated: cells of the same pretraining seeds
    stay together. Of means and half-widths alone, as published, all count as independent.
    """
    first = cells[0]
    places = {(cell.seeds, cell.pretraining_seeds) for cell in cells}
    if first.samples and len(places) == 1:
        ((seeds, pretraining_seeds),) = places
        means = np.mean([cell.samples for cell in cells], axis=0).tolist()
        made = measured(
            first.arm, first.family, AVERAGE, first.metric, means, seeds=seeds, pretraining_seeds=pretraining_seeds
        )
        return replace(made, cells=tuple(cells))
    mean = float(np.mean([cell.mean for cell in cells]))
    num = min(cell.num for cell in cells)
    made = Result(first.arm, first.family, AVERAGE, first.metric, mean, math.nan, (), None, num)
    if all(cell.samples for cell in cells):
        seen = seed_interval((1 / len(cells), cell) for cell in cells)
        return replace(made, half_width=seen.half_width, cells=tuple(cells))
    error = math.sqrt(sum(cell.std**2 / cell.num for cell in cells)) / len(cells)
    return replace(made, half_width=NORMAL_QUANTILE * error)
