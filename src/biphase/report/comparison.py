"""Scores → every model on every task, and whether one model is better than another.

Nothing is called better by its mean alone. Scores are shares; percent and percentage points are for printing.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from biphase.errors import InputError
from biphase.finetuning.predictions import read_examples
from biphase.finetuning.scores import (
    GridPoint,
    ScoreSet,
    base_name,
    differing,
    settings_of,
    short_name,
    show_rate,
)
from biphase.finetuning.selection import Selection, find_missing, find_scored_model, select_rate
from biphase.report.formats import show_count
from biphase.report.statistics import (
    Difference,
    Interval,
    Spread,
    bootstrap_difference,
    bootstrap_statistic,
    difference,
    holm,
    is_stability_rate,
    judge_difference,
    mean_interval,
    rate_spread,
)

ComparisonVerdict = Literal["A better", "B better", "within noise", "cannot be told"]


@dataclass(frozen=True)
class SummaryRow:
    """A model on a task at the rate that validation chose; without rate and scores where everything diverged."""

    model: str
    task: str
    metric: str
    rate: float | None
    interval: Interval
    """The interval of the test score over seeds, by Student's t."""
    paper_interval: Interval
    """The paper's normal interval, which is narrower."""
    seeds: tuple[int, ...]
    num_cells: int
    diverged: tuple[GridPoint, ...]
    missing: tuple[GridPoint, ...]
    spread: Spread | None
    """The spread over seeds and over the rates of `STABILITY_RATES`; None with scores at fewer than two of them."""


def summarize(scores: ScoreSet) -> list[SummaryRow]:
    """One row for each model on each task that it has scores on: by task, the best mean first.

    A row depends on its own scores only.
    """
    rows = []
    for (model, task), cells in scores.cells.items():
        diverged = tuple(point for point in sorted(cells) if cells[point].diverged)
        chosen = None if len(diverged) == len(cells) else select_rate(scores, model, task)
        tests = chosen.test if chosen else ()
        by_rate = chosen.test_by_rate if chosen else {}
        inside_RS = [by_seed for rate, by_seed in by_rate.items() if is_stability_rate(rate)]
        num_scored = sum(not all(map(math.isnan, by_seed)) for by_seed in inside_RS)
        rows.append(
            SummaryRow(
                model=model,
                task=task,
                metric=next(iter(cells.values())).metric,
                rate=chosen.rate if chosen else None,
                interval=mean_interval(tests),
                paper_interval=mean_interval(tests, "normal"),
                seeds=chosen.seeds if chosen else (),
                num_cells=len(cells),
                diverged=diverged,
                missing=find_missing(scores, model, task),
                spread=rate_spread(inside_RS, np.random.default_rng(0)) if num_scored > 1 else None,
            )
        )
    return sorted(rows, key=lambda row: (row.task, row.rate is None, -row.interval.mean, row.model))


@dataclass(frozen=True)
class TaskComparison:
    """Two models on one task. Differences are A minus B."""

    model_a: str
    model_b: str
    task: str
    metric: str = ""
    a: Selection | None = None
    """None where there is nothing to choose from; `notes` say why."""
    b: Selection | None = None
    over_seeds: Difference | None = None
    is_paired: bool = False
    """Whether the test pairs the seeds; otherwise the seeds differ and the test is Welch's."""
    over_examples: Difference | None = None
    num_examples: int = 0
    p_seeds: float = math.nan
    """The p-value of the test over seeds, adjusted over tasks by Holm; nan where there is no test."""
    p_examples: float = math.nan
    """That of the test over examples, adjusted likewise."""
    num_tasks: int = 1
    """How many tasks the p-values are adjusted over."""
    verdict: ComparisonVerdict = "cannot be told"
    notes: tuple[str, ...] = ()

    @property
    def difference(self) -> Difference | None:
        """That over seeds; where it has no interval and examples give one, that over examples."""
        if self.over_seeds is not None and math.isnan(self.over_seeds.low) and self.over_examples is not None:
            return self.over_examples
        return self.over_seeds


def compare(
    scores: ScoreSet, a: str, b: str, rng: np.random.Generator, num_resamples: int = 10_000
) -> list[TaskComparison]:
    """Two models on every task that either has, each at the rate its validation chose.

    Names are as `find_scored_model` finds them. Two tests ask two questions. Over seeds: would other fine-tuning runs
    say the same? Student's t paired by seed where both have the same seeds, else Welch's. Over examples: would other
    test examples say the same of these runs? A bootstrap over examples, of scores averaged over seeds. Each is adjusted
    over tasks by Holm's method. The verdict:

    - "A better", "B better": the test over seeds has adjusted p < 0.05, and no seed of the better one diverged at its
      rate. Where the test over examples does not agree (its adjusted p is not below 0.05), a note says so.
    - "within noise": the test over seeds has adjusted p ≥ 0.05; or there is none (one seed), and the one over examples
      has. It never means "equal": look at the interval. Where examples alone would tell the two apart, a note says so.
    - "cannot be told": no test over seeds, and either none over examples or one that does tell the runs apart (single
      runs are not the models); or the better one lost seeds; or different data; or a model without scores.

    Raises:
        InputError: an unknown or ambiguous name, twice the same model, or no task in common.
    """
    model_a, model_b = find_scored_model(scores, a), find_scored_model(scores, b)
    if model_a == model_b:
        raise InputError(f"'{a}' and '{b}' are the same model, {model_a}; give two")
    tasks = {model: {task for other, task in scores.cells if other == model} for model in (model_a, model_b)}
    if not tasks[model_a] & tasks[model_b]:
        raise InputError(f"{model_a} and {model_b} have no task in common; fine-tune both on the same")
    measured = [
        measure_task(scores, model_a, model_b, task, rng, num_resamples)
        for task in sorted(tasks[model_a] | tasks[model_b])
    ]
    p_seeds = holm([one.over_seeds.p_value if one.over_seeds else math.nan for one in measured])
    p_examples = holm([one.over_examples.p_value if one.over_examples else math.nan for one in measured])
    num_tasks = int((~np.isnan(p_seeds) | ~np.isnan(p_examples)).sum())
    return [
        judge(replace(one, p_seeds=float(seeds), p_examples=float(examples), num_tasks=num_tasks))
        for one, seeds, examples in zip(measured, p_seeds, p_examples, strict=True)
    ]


def measure_task(
    scores: ScoreSet, model_a: str, model_b: str, task: str, rng: np.random.Generator, num_resamples: int
) -> TaskComparison:
    """Both tests of two models on a task, before p-values are adjusted and judged."""
    sides: list[Selection | None] = []
    notes: list[str] = []
    for model in (model_a, model_b):
        try:
            sides.append(select_rate(scores, model, task))
        except InputError as error:
            sides.append(None)
            notes.append(str(error))
    a, b = sides
    found = a or b
    known = TaskComparison(model_a, model_b, task, found.metric if found else "", a, b, notes=tuple(notes))
    if a is None or b is None:
        return known
    settings_a, settings_b = settings_of(a.scores[0]), settings_of(b.scores[0])
    if clash := [key for key in ("metric", "data") if settings_a[key] != settings_b[key]]:
        return replace(known, notes=(f"they were scored with different {' and '.join(clash)}",))
    changed = differing((settings_a, settings_b))
    if changed and base_name(model_a) != base_name(model_b):
        notes.append(f"they were fine-tuned with different {', '.join(changed)}")
    notes += [
        f"{side.num_diverged} of {show_count(side.num_diverged + len(side.seeds), 'seed')} of {short_name(side.model)} "
        f"diverged at its best rate, {show_rate(side.rate)}: the mean is that of the survivors"
        for side in (a, b)
        if side.num_diverged
    ]
    over_seeds = difference(a, b)
    known = replace(known, over_seeds=over_seeds.against(), is_paired=over_seeds.test == "paired t")
    try:
        over_examples, num_examples = resample_examples(a, b, rng, num_resamples)
    except InputError as error:
        return replace(known, notes=(*notes, f"there is no test over examples: {error}"))
    return replace(known, over_examples=over_examples, num_examples=num_examples, notes=tuple(notes))


def resample_examples(
    a: Selection, b: Selection, rng: np.random.Generator, num_resamples: int
) -> tuple[Difference, int]:
    """The bootstrap over test examples, and their number. Raises `InputError` where they are not all there."""
    of_a, of_b = ([read_examples(score) for score in side.scores] for side in (a, b))
    first = of_a[0]
    for one in (*of_a, *of_b):
        if one.fingerprint != first.fingerprint or one.values.shape != first.values.shape:
            raise InputError("the test examples are not the same")
    values_a, values_b = (np.stack([one.values for one in side], axis=1) for side in (of_a, of_b))
    if first.statistic is None:
        test = bootstrap_difference(values_a.mean(axis=1), values_b.mean(axis=1), rng, num_resamples)
    else:
        test = bootstrap_statistic(values_a, values_b, first.statistic, rng, num_resamples)
    return test, len(values_a)


def judge(measured: TaskComparison) -> TaskComparison:
    """The rule of `compare`, on adjusted p-values."""
    a, b, test = measured.a, measured.b, measured.over_seeds
    if a is None or b is None or test is None:
        return measured
    seeds_say = judge_difference(test.mean, measured.p_seeds)
    examples_say = judge_difference(test.mean, measured.p_examples)
    notes = list(measured.notes)
    verdict: ComparisonVerdict = "cannot be told"
    if seeds_say in ("above", "below"):
        if (a if seeds_say == "above" else b).num_diverged:
            notes.append("the one ahead is the one that lost seeds")
        else:
            verdict = "A better" if seeds_say == "above" else "B better"
        if examples_say == "within noise":
            notes.append("examples disagree: the choice of test examples could explain it")
    elif seeds_say == "within noise":
        verdict = "within noise"
        if examples_say in ("above", "below"):
            notes.append("examples disagree: these runs do differ on them, but so do runs of one model")
    else:
        is_single = min(a.num, b.num) == 1
        notes.append("one seed says nothing about the next" if is_single else "all seeds differ by the same amount")
        if examples_say == "within noise":
            verdict = "within noise"
            notes.append("the choice of test examples could explain it")
        elif examples_say != "untested":
            notes.append("these runs do differ on the test examples, but others may not")
    return replace(measured, verdict=verdict, notes=tuple(notes))
