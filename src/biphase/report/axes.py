"""Functions of several scores along an axis: their mean, the trend of the line through them, how far they spread.

    mean    of the arms
    trend   the change from the lowest to the highest value of the axis, along the straight line of least squares
    spread  the standard deviation: of an arm's scores over fine-tuning rates and seeds (`rate`; the rates are those of
            `stability_rates`, without those at which training diverged), or of the means over seeds of several arms,
            as the mean over datasets

Functions that stand in one line take the values of the axis that all of them have. Intervals of a spread leave out one
seed at a time (`contrasts.jackknife`). Letters: A operands, V values of the axis, S seeds.
"""

from collections.abc import Sequence

import numpy as np

from biphase.errors import InputError
from biphase.report.contrasts import Contrast, jackknife
from biphase.report.grammar import RATE, Operand
from biphase.report.results import ReportArm, ResultSet, stability_rates

Term = tuple[Operand, Sequence[ReportArm]]
"""An operand with its arm, or all arms that its function is over."""


def line_up(arms: Sequence[ReportArm], axis: str) -> dict[float, ReportArm]:
    """Arms by their values on an axis. Raises `InputError` where one has none, or that of another."""
    found: dict[float, ReportArm] = {}
    for arm in arms:
        places = {"budget": arm.budget, "mask": arm.mask_percent}
        value = places.get(axis, arm.clm_share)
        if value is None or value in found:
            raise InputError(f"'{arm.name}' has no place of its own on the axis '{axis}'")
        found[value] = arm
    return found


def weigh_arms(terms: Sequence[Term]) -> list[list[tuple[float, ReportArm]]]:
    """Each term as a weighted sum of arms, without the operand's own weight. Raises `InputError` where the axis has
    too few values for it."""
    lines = [(operand.axis, line_up(arms, operand.axis) if operand.axis else {}) for operand, arms in terms]
    weighed = []
    for (operand, arms), (axis, line) in zip(terms, lines, strict=True):
        if not axis:
            weighed.append([(1.0, arms[0])])
            continue
        shared = set(line).intersection(*(other for own, other in lines if own == axis))
        values = np.array(sorted(shared), dtype=float)
        if len(values) < (2 if operand.function == "trend" else 1):
            raise InputError(f"too few arms over {axis}")
        weights = np.full(len(values), 1 / len(values))
        if operand.function == "trend":
            # Least squares gives the line's slope as a weighted sum of scores; times the range of values it is the
            # change along the line. Values 20, 30, 50: weights −0.86, −0.21, 1.07 (they add up to nothing).
            centred = values - values.mean()
            weights = centred / (centred**2).sum() * np.ptp(values)
        weighed.append([(weight, line[value]) for weight, value in zip(weights.tolist(), values.tolist(), strict=True)])
    return weighed


def contrast_spreads(
    terms: Sequence[Term], datasets: Sequence[str], results: ResultSet
) -> tuple[Contrast, list[float]]:
    """The weighted sum of spreads, mean over datasets, and the values of the axis that they are over. Raises
    `InputError` where not every seed has a score at two values or more."""
    weights_A = np.array([operand.weight for operand, _ in terms])
    is_over_rates = terms[0][0].axis == RATE
    tables, used, repeated = [], set[float](), set[tuple[int, ...]]()
    for dataset in datasets:
        lines = [read_line(operand.axis, arms, dataset, results) for operand, arms in terms]
        values = [value for value in sorted(lines[0]) if all(value in line for line in lines)]
        if is_over_rates:
            values = stability_rates(values)
        samples = [[line[value][0] for value in values] for line in lines]
        if len({len(seeds) for row in samples for seeds in row}) != 1:
            continue
        scores_AVS = np.array(samples)
        is_whole_V = ~np.isnan(scores_AVS).any(axis=(0, 2))
        if scores_AVS.shape[2] and is_whole_V.sum() > 1:
            tables.append(scores_AVS[:, is_whole_V])
            used |= set(np.array(values)[is_whole_V].tolist())
            repeated |= {line[value][1] for line in lines for value in values}
    numbers = {scores_AVS.shape[2] for scores_AVS in tables}
    if len(numbers) != 1 or len(repeated) != 1 or len(next(iter(repeated))) not in (0, *numbers):
        raise InputError(f"no scores of each seed at two values of {terms[0][0].axis} or more")
    (num,), (seeds_S,) = numbers, repeated

    def statistic(seeds: np.ndarray) -> float:
        spreads = []
        for scores_AVS in tables:
            chosen_AVS = scores_AVS[:, :, seeds]
            spread_A = (
                chosen_AVS.std(axis=(1, 2), ddof=1) if is_over_rates else chosen_AVS.mean(axis=2).std(axis=1, ddof=1)
            )
            spreads.append(weights_A @ spread_A)
        return float(np.mean(spreads))

    largest = float(max(np.abs(scores_AVS).max() for scores_AVS in tables))
    return jackknife(statistic, num, largest, seeds_S), sorted(used)


def read_line(
    axis: str, arms: Sequence[ReportArm], dataset: str, results: ResultSet
) -> dict[float, tuple[tuple[float, ...], tuple[int, ...]]]:
    """The scores of all seeds on a dataset at every value of an axis, and their pretraining seeds; () where all are of
    one pretraining."""
    if axis == RATE:
        found = results.scores_of(arms[0]).get(dataset)
        by_value = {} if found is None or found.by_rate is None else {r: (s, found) for r, s in found.by_rate.items()}
    else:
        scores = {value: results.scores_of(arm).get(dataset) for value, arm in line_up(arms, axis).items()}
        by_value = {value: (score.samples, score) for value, score in scores.items() if score is not None}
    return {
        value: (samples, score.pretraining_seeds if score.num_pretrainings > 1 else ())
        for value, (samples, score) in by_value.items()
    }
