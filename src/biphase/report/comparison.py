"""Scores → what a person reads: every model on every task, and whether one model is better than another.

Nothing is called better by its mean alone. Scores are shares; percent and percentage points are for printing.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from rich import box
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from biphase import console
from biphase.errors import InputError
from biphase.finetuning.predictions import read_examples
from biphase.finetuning.scores import (
    BrokenScore,
    GridPoint,
    ScoreSet,
    base_name,
    differing,
    settings_of,
    short_name,
    show_rate,
)
from biphase.finetuning.selection import Selection, find_missing, find_model, select_rate
from biphase.report.statistics import (
    Difference,
    Interval,
    Spread,
    bootstrap_difference,
    bootstrap_statistic,
    holm,
    mean_interval,
    paired_t_test,
    rate_spread,
    welch_t_test,
)

SPREAD_RATES = (1e-5, 1e-4)
"""The learning rates, both included, over which the paper measures stability."""

THRESHOLD = 0.05

PLAIN: dict[str, Any] = {"box": box.SIMPLE_HEAD, "pad_edge": False, "padding": (0, 1, 0, 0), "title_justify": "left"}
"""How tables look: columns two spaces apart, one line below the head."""

Verdict = Literal["A better", "B better", "within noise", "cannot be told"]
VERDICTS: tuple[Verdict, ...] = ("A better", "B better", "within noise", "cannot be told")


@dataclass(frozen=True)
class SummaryRow:
    """A model on a task at the rate that validation chose; without rate and scores where everything diverged."""

    model: str
    task: str
    metric: str
    rate: float | None
    interval: Interval
    """Of the test score over seeds, by Student's t."""
    paper_interval: Interval
    """The paper's normal one, which is narrower."""
    seeds: tuple[int, ...]
    num_cells: int
    diverged: tuple[GridPoint, ...]
    missing: tuple[GridPoint, ...]
    spread: Spread | None
    """Over seeds and the rates of `spread_rates`; None with scores at fewer than two of them."""
    spread_rates: tuple[float, float]
    """From, to."""


def summarize(
    scores: ScoreSet,
    metric: str | None = None,
    spread_rates: tuple[float, float] = SPREAD_RATES,
    spread_seed: int = 0,
) -> list[SummaryRow]:
    """One row for each model on each task that it has scores on: by task, the best mean first.

    A row depends on its own scores only. `spread_seed` is that of the resampling behind the interval of a spread.
    """
    rows = []
    for (model, task), cells in scores.cells.items():
        diverged = tuple(point for point in sorted(cells) if cells[point].diverged)
        chosen = None if len(diverged) == len(cells) else select_rate(scores, model, task, metric)
        tests = chosen.test if chosen else ()
        rows.append(
            SummaryRow(
                model=model,
                task=task,
                metric=metric or next(iter(cells.values())).metric,
                rate=chosen.rate if chosen else None,
                interval=mean_interval(tests),
                paper_interval=mean_interval(tests, "normal"),
                seeds=chosen.seeds if chosen else (),
                num_cells=len(cells),
                diverged=diverged,
                missing=find_missing(scores, model, task),
                spread=measure_spread(chosen, spread_rates, spread_seed) if chosen else None,
                spread_rates=spread_rates,
            )
        )
    return sorted(rows, key=lambda row: (row.task, row.rate is None, -row.interval.mean, row.model))


def measure_spread(chosen: Selection, rates: tuple[float, float], seed: int) -> Spread | None:
    low, high = rates
    inside = [scores for rate, scores in chosen.test_by_rate.items() if low * (1 - 1e-9) <= rate <= high * (1 + 1e-9)]
    scored = [scores for scores in inside if not all(map(math.isnan, scores))]
    return rate_spread(inside, np.random.default_rng(seed)) if len(scored) > 1 else None


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
    """By seed; otherwise the seeds differ and the test is Welch's."""
    over_examples: Difference | None = None
    num_examples: int = 0
    p_seeds: float = math.nan
    """As `p_examples`, adjusted over tasks by Holm; nan where there is no test."""
    p_examples: float = math.nan
    num_tasks: int = 1
    """That the p-values are adjusted over."""
    verdict: Verdict = "cannot be told"
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
    """Two models (see `find_model` for names) on every task that either has, each at the rate its validation chose.

    Two tests ask two questions. Over seeds: would other fine-tuning runs say the same? Student's t paired by seed where
    both have the same seeds, else Welch's. Over examples: would other test examples say the same of these runs? A
    bootstrap over examples, of scores averaged over seeds. Each is adjusted over tasks by Holm's method. The verdict:

    - "A better", "B better": the test over seeds has adjusted p < 0.05, and no seed of the better one diverged at its
      rate. Where the test over examples does not agree (its adjusted p is not below 0.05), a note says so.
    - "within noise": the test over seeds has adjusted p ≥ 0.05; or there is none (one seed), and the one over examples
      has. It never means "equal": look at the interval. Where examples alone would tell the two apart, a note says so.
    - "cannot be told": no test over seeds, and either none over examples or one that does tell the runs apart (single
      runs are not the models); or the better one lost seeds; or different data; or a model without scores.

    Raises:
        InputError: an unknown or ambiguous name, twice the same model, or no task in common.
    """
    model_a, model_b = find_model(scores, a), find_model(scores, b)
    if model_a == model_b:
        raise InputError(f"'{a}' and '{b}' are the same model, {model_a}; give two")
    tasks = {model: {task for other, task in scores.cells if other == model} for model in (model_a, model_b)}
    if not tasks[model_a] & tasks[model_b]:
        raise InputError(f"{model_a} and {model_b} have no task in common; fine-tune both on the same")
    measured = [
        measure_task(scores, model_a, model_b, task, rng, num_resamples)
        for task in sorted(tasks[model_a] | tasks[model_b])
    ]
    p_seeds = holm([p_value_of(one.over_seeds) for one in measured])
    p_examples = holm([p_value_of(one.over_examples) for one in measured])
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
        f"{side.num_diverged} of {count(side.num_diverged + len(side.seeds), 'seed')} of {short_name(side.model)} "
        f"diverged at its best rate, {show_rate(side.rate)}: the mean is that of the survivors"
        for side in (a, b)
        if side.num_diverged
    ]
    is_paired = a.seeds == b.seeds
    known = replace(
        known,
        over_seeds=paired_t_test(a.test, b.test) if is_paired else welch_t_test(a.test, b.test),
        is_paired=is_paired,
    )
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


def p_value_of(test: Difference | None) -> float:
    return math.nan if test is None else test.p_value


def judge(measured: TaskComparison) -> TaskComparison:
    """The rule of `compare`, on adjusted p-values."""
    a, b, test = measured.a, measured.b, measured.over_seeds
    p_seeds, p_examples = measured.p_seeds, measured.p_examples
    if a is None or b is None or test is None:
        return measured
    notes = list(measured.notes)
    verdict: Verdict = "cannot be told"
    if p_seeds < THRESHOLD:
        if (a if test.mean > 0 else b).num_diverged:
            notes.append("the one ahead is the one that lost seeds")
        else:
            verdict = "A better" if test.mean > 0 else "B better"
        if p_examples >= THRESHOLD:
            notes.append("examples disagree: the choice of test examples could explain it")
    elif p_seeds >= THRESHOLD:
        verdict = "within noise"
        if p_examples < THRESHOLD:
            notes.append("examples disagree: these runs do differ on them, but so do runs of one model")
    else:
        is_single = min(len(a.seeds), len(b.seeds)) == 1
        notes.append("one seed says nothing about the next" if is_single else "all seeds differ by the same amount")
        if p_examples >= THRESHOLD:
            verdict = "within noise"
            notes.append("the choice of test examples could explain it")
        elif p_examples < THRESHOLD:
            notes.append("these runs do differ on the test examples, but others may not")
    return replace(measured, verdict=verdict, notes=tuple(notes))


def print_summary(rows: Sequence[SummaryRow], broken: Sequence[BrokenScore] = ()) -> None:
    """A table by task, and what is missing from it."""
    names = shorten({row.model for row in rows})
    columns: dict[str, Callable[[SummaryRow], str]] = {
        "rate": lambda row: "–" if row.rate is None else show_rate(row.rate),
        "mean ±": lambda row: show_interval(row.interval),
        "paper ±": lambda row: show_share(row.paper_interval.half_width),
        "seeds": lambda row: str(len(row.seeds)),
    }
    lines = [
        "±: half of the 95 % interval over seeds, by Student's t; the paper's is 1.96·s/√n, too narrow for few seeds"
    ]
    if any(row.diverged for row in rows):
        columns["diverged"] = lambda row: f"{len(row.diverged)} of {row.num_cells}" if row.diverged else "0"
    if any(row.spread for row in rows):
        columns["spread"] = lambda row: show_spread(row.spread)
        low, high = map(show_rate, rows[0].spread_rates)
        lines.append(f"spread: standard deviation over seeds and rates from {low} to {high}, and its 95 % interval")
    table = Table(title="Test scores in %, at the rate that validation chose", **PLAIN)
    table.add_column("model", overflow="fold")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for task in sorted({row.task for row in rows}):
        chosen = [row for row in rows if row.task == task]
        table.add_section()
        table.add_row(
            Text(task, style="bold"), "", Text(" / ".join(sorted({row.metric for row in chosen})), style="italic")
        )
        for row in chosen:
            table.add_row(Text(f"  {names[row.model]}"), *(show(row) for show in columns.values()))
    if rows:
        print_table(table)
    else:
        lines = ["no finished scores"]
    for row in rows:
        if row.missing:
            lines.append(f"missing: {names[row.model]} on {row.task}: {show_points(row.missing)}")
        if row.spread and row.spread.num_left_out:
            lost = count(row.spread.num_left_out, "cell")
            lines.append(
                f"spread of {names[row.model]} on {row.task}: lacks {lost} without a score, so it may be too small"
            )
    for line in (*lines, *(f"left out: {one.path} ({one.reason})" for one in broken)):
        console.out.print(line, markup=False)


def print_comparison(comparisons: Sequence[TaskComparison]) -> None:
    """A table, a sentence for each task, and the count of verdicts."""
    first = comparisons[0]
    names = shorten({first.model_a, first.model_b})
    table = Table(title="Test scores in % ± half of the 95 % interval over seeds", **PLAIN)
    table.add_column("task", overflow="fold")
    for column in ("A", "B", "A − B", "p"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for one in comparisons:
        table.add_row(
            Text(one.task),
            *(show_interval(mean_interval(side.test)) if side else "–" for side in (one.a, one.b)),
            "–" if one.over_seeds is None else show_difference(one.over_seeds),
            show_p(one.p_seeds, name=""),
            one.verdict,
        )
    for letter, model in (("A", first.model_a), ("B", first.model_b)):
        console.out.print(f"{letter} = {model}", markup=False)
    print_table(table)
    for one in comparisons:
        console.out.print(describe(one, names), markup=False)
    counts = [f"{verdict} on {sum(one.verdict == verdict for one in comparisons)}" for verdict in VERDICTS]
    console.out.print(f"of {count(len(comparisons), 'task')}: {', '.join(counts)}", markup=False)


def print_table(table: Table) -> None:
    """Not wider than a terminal; in a file, as wide as it needs to be."""
    if not console.out.is_terminal:
        table.width = Measurement.get(console.out, console.out.options.update_width(200), table).maximum
    console.out.print(table)


def describe(one: TaskComparison, names: Mapping[str, str]) -> str:
    """One comparison in words: who is ahead, by how much, whether that is more than noise, and by which tests."""
    start = f"{one.task} ({one.metric})" if one.metric else one.task
    reasons = "".join(f"; {note}" for note in one.notes)
    difference = one.difference
    if difference is None:
        return f"{start}: cannot be told{reasons}"
    ahead, behind = (one.model_a, one.model_b) if difference.mean >= 0 else (one.model_b, one.model_a)
    size, tests = show_size(difference), show_tests(one)
    if one.verdict in ("A better", "B better"):
        return f"{start}: {names[ahead]} beats {names[behind]} by {size}, more than noise{tests}{reasons}"
    lead = "both score the same" if difference.mean == 0 else f"{names[ahead]} is ahead by {size}"
    judged = "within noise" if one.verdict == "within noise" else "but which is better cannot be told"
    return f"{start}: {lead}, {judged}{tests}{reasons}"


def show_tests(one: TaskComparison) -> str:
    """` (p = 0.031 over 5 pairs of seeds, p < 0.001 over 2,000 examples; adjusted over 3 tasks)`."""
    shown = []
    if not math.isnan(one.p_seeds):
        shown.append(f"{show_p(one.p_seeds)} over {show_seeds(one)}")
    if not math.isnan(one.p_examples):
        shown.append(f"{show_p(one.p_examples)} over {count(one.num_examples, 'example')}")
    adjusted = f"; adjusted over {one.num_tasks} tasks" if one.num_tasks > 1 else ""
    return f" ({', '.join(shown)}{adjusted})" if shown else ""


def shorten(models: set[str]) -> dict[str, str]:
    """The last parts of the models' paths, where they tell them apart."""
    short = {model: short_name(model) for model in models}
    return short if len(set(short.values())) == len(models) else {model: model for model in models}


def count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def show_share(share: float) -> str:
    return "–" if math.isnan(share) else f"{100 * share:.2f}"


def show_interval(interval: Interval) -> str:
    """`81.20 ± 0.93`; of a single value `81.20 ±    –`."""
    return "–" if interval.num == 0 else f"{show_share(interval.mean)} ± {show_share(interval.half_width):>4}"


def show_difference(difference: Difference) -> str:
    """`+1.20 ± 0.93`, of an interval by Student's t."""
    return f"{100 * difference.mean:+.2f} ± {show_share(difference.high - difference.mean):>4}"


def show_size(difference: Difference) -> str:
    """`1.20 points [0.27, 2.13]`, as seen by the one ahead."""
    low, high = sorted(math.copysign(1, difference.mean) * end for end in (difference.low, difference.high))
    size = f"{100 * abs(difference.mean):.2f} points"
    return size if math.isnan(low) else f"{size} [{100 * low:.2f}, {100 * high:.2f}]"


def show_spread(spread: Spread | None) -> str:
    if spread is None or math.isnan(spread.std):
        return "–"
    ends = "" if math.isnan(spread.low) else f" [{show_share(spread.low)}, {show_share(spread.high)}]"
    return show_share(spread.std) + ends


def show_p(p_value: float, name: str = "p") -> str:
    """`p = 0.031`, `p < 0.001`; without a name `0.031`, `<0.001`."""
    if math.isnan(p_value):
        return "–"
    if p_value < 0.001:
        return f"{name} < 0.001" if name else "<0.001"
    return f"{name} = {p_value:.3f}" if name else f"{p_value:.3f}"


def show_seeds(one: TaskComparison) -> str:
    """`5 pairs of seeds`, or `5 and 3 seeds`."""
    assert one.a and one.b
    num_a, num_b = len(one.a.seeds), len(one.b.seeds)
    return f"{count(num_a, 'pair')} of seeds" if one.is_paired else f"{num_a} and {num_b} seeds"


def show_points(points: Sequence[GridPoint], most: int = 3) -> str:
    """`4 cells: 5e-5 seed 3, 5e-5 seed 4, 1e-4 seed 3, …`."""
    shown = [f"{show_rate(rate)} seed {seed}" for rate, seed in points[:most]]
    return f"{count(len(points), 'cell')}: " + ", ".join(shown + ["…"] * (len(points) > most))
