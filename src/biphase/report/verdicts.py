"""Scores → a row for every model on every task, and verdicts on two models, as data and in a terminal.

A better mean alone is no verdict. Scores are shares, printed in percent; differences are printed in percentage points.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from biphase.console import out
from biphase.errors import InputError, first_of
from biphase.finetuning.choosing import RateChoice, find_scored_model
from biphase.finetuning.metrics import Rows, contributions, total_score
from biphase.finetuning.scores import (
    TASK_SETTINGS,
    ExampleTable,
    GridPoint,
    KeptExamples,
    Score,
    ScoreSet,
    base_name,
    differing,
    linearize,
    short_name,
    show_rate,
)
from biphase.finetuning.words import find_word_scores
from biphase.report import contrasts, statistics
from biphase.report.formats import (
    MISSING,
    show_count,
    show_end,
    show_noise,
    show_p_value,
    show_points,
    show_share,
    show_spread,
    tell_p_value,
)
from biphase.report.results import ReportArm, Result, ResultSet, read_words, select_rate
from biphase.report.tables import Cell, Table, TableRow, interval_cell, print_table, show_signal
from biphase.tasks.families import KINDS
from biphase.tasks.spec import Task

ClaimVerdict = Literal["supported", "contradicted", "undecided"]
"""The verdict on a claim, a finding or a hypothesis (`report.claims`)."""
ComparisonVerdict = Literal["A better", "B better", "within noise", "cannot be told"]
"""The verdict on two models (`compare`)."""

LOOKS_OF_VERDICTS: dict[ClaimVerdict, tuple[str, str]] = {
    "supported": ("✓", "yes"),
    "contradicted": ("✕", "no"),
    "undecided": ("?", "open"),
}
"""Verdict on a claim → its sign, which tells it without colours, and the name of its colour in `page.css.j2`."""


@dataclass(frozen=True)
class SummaryRow:
    """A model's score on a task at the rates that validation chose, with the missing and diverged cells of its grid."""

    score: Result
    """The score, without samples if all seeds diverged at the chosen rates."""
    diverged: tuple[GridPoint, ...]
    missing: tuple[GridPoint, ...]
    paper_interval: statistics.Interval
    """The mean as the paper computes it: at one rate for all seeds, with the normal interval, which is narrower."""
    spread: statistics.Interval | None
    """The spread over seeds and over the rates within `STABILITY_RATES`; None with fewer than two such rates."""
    words: "WordsRow | None" = None
    """For words alone, which are no model: their comparison with the task's best model."""
    data_hash: str = ""
    """The hash of the task's data: scores on other data, such as a table before rows were added, do not compare."""
    why_unscored: str = ""
    """The reason for a score without samples."""

    @property
    def never_predicted(self) -> dict[str, int]:
        """Class of the test set → the number of seeds that never predict it."""
        scores = self.score.examples.scores if self.score.examples else ()
        return dict(Counter(name for score in scores for name in score.never_predicted.get("test", ())))


def summarize(scores: ScoreSet) -> list[SummaryRow]:
    """Make a row for each model and task, sorted by task, the best mean first. A row depends on its own scores only."""
    rows = []
    for (model, task), cells in scores.cells.items():
        diverged = tuple(point for point in sorted(cells) if cells[point].diverged)
        rates, seeds = scores.grids[task]
        if all(len({seed for _, seed in grid}) == 1 for (_, other), grid in scores.cells.items() if other == task):
            seeds = tuple({seed for _, seed in cells})  # each model has a single seed, not always the same
        missing = tuple(point for point in product(rates, seeds) if point not in cells)
        first, why_unscored = next(iter(cells.values())), ""
        try:
            score = select_rate(scores, model, task)
        except InputError as error:
            score = Result(ReportArm(model), "", task, "standard", measure=first.metric, num_runs=len(cells))
            why_unscored = str(error)
        by_rate = score.by_rate or {}
        at_rate = [value for value in by_rate.get(score.rate or 0.0, ()) if not math.isnan(value)]
        inside_RS = [by_seed for rate, by_seed in by_rate.items() if statistics.is_stability_rate(rate)]
        is_spread = sum(not np.isnan(by_seed).all() for by_seed in inside_RS) > 1
        spread = statistics.rate_spread([inside_RS], np.random.default_rng(0)) if is_spread else None
        of_paper, more = statistics.mean_interval(at_rate, "normal"), (None, first.data_hash, why_unscored)
        rows.append(SummaryRow(score, diverged, missing, of_paper, spread, *more))
    return sorted(
        rows, key=lambda row: (row.score.dataset, row.score.rate is None, -row.score.mean, row.score.arm.name)
    )


def group_rows(rows: Iterable[SummaryRow]) -> dict[tuple[str, str, str], list[SummaryRow]]:
    """Group rows by task, data hash and metric, in the same order. Only scores of one group compare."""
    groups: dict[tuple[str, str, str], list[SummaryRow]] = {}
    for row in rows:
        groups.setdefault((row.score.dataset, row.data_hash, row.score.measure), []).append(row)
    return groups


@dataclass(frozen=True)
class TaskComparison:
    """A comparison of two models, A and B, on one task."""

    a: Result
    """A's score, without samples if no rate can be chosen (`notes` say why)."""
    b: Result
    """B's score, likewise."""
    contrast: contrasts.Contrast | None = None
    """A minus B; None if the two cannot be compared."""
    p_value: float = math.nan
    """The p-value of the difference, adjusted over tasks by Holm's method; nan without a test."""
    level: float = statistics.SIGNIFICANCE
    """The level at which Holm's method tests the difference."""
    num_tasks: int = 1
    """The number of tasks over which `p_value` is adjusted."""
    verdict: ComparisonVerdict = "cannot be told"
    notes: tuple[str, ...] = ()

    @property
    def difference(self) -> statistics.Interval | None:
        """A minus B with the interval of the test at `level`, or with the 95 % interval over examples alone if the
        seeds allow no test; None if the two cannot be compared."""
        if self.contrast is None:
            return None
        tested = self.contrast.against(level=self.level)
        return self.contrast.over_examples() if math.isnan(tested.low) else tested


@dataclass(frozen=True)
class WordsRow:
    """The score of words alone on a dataset, which is no arm of a study, and the distance of the best model from it."""

    dataset: str
    name: str
    """The baseline, such as `TF-IDF + linear`."""
    value: float
    """Its score."""
    model: str
    """The best model."""
    mean: float
    """The best model's score."""
    difference: statistics.Interval
    """`mean` minus `value`. p-value and interval are corrected for picking the best model (Bonferroni). With a single
    seed, the test is over test examples alone."""
    num_models: int = 1
    """The number of models of which the best was picked."""

    @property
    def sentence(self) -> str:
        """The comparison in words: `Words alone: TF-IDF + linear is ahead of A on genre: 80.00 % against 70.00 %,
        +10.00 points [+8.00, +12.00].`"""
        return f"Words alone: {self.told}"

    @property
    def told(self) -> str:
        """The sentence without its first words."""
        gap, sides = self.difference, [(self.model, self.mean), (self.name, self.value)]
        is_ahead = statistics.is_significant(gap.p_value)
        told = contrasts.say_difference(gap, *sides, is_ahead=is_ahead, where=f"on {self.dataset}")
        picked = f"; {tell_p_value(gap.p_value)}, corrected for picking the best of {self.num_models} models"
        return f"{told}{picked if self.num_models > 1 else ''}."


def compare_words(results: Iterable[Result], stored: Sequence[Score]) -> list[WordsRow]:
    """Compare the best model on each dataset with words alone, on the same test examples. `stored`: scores by words
    alone. Datasets on which the best model is ahead come first."""
    by_dataset: dict[str, list[Result]] = {}
    for result in results:
        if result.examples is not None and result.samples:
            by_dataset.setdefault(result.dataset, []).append(result)
    best = [max(models, key=lambda result: result.mean) for models in by_dataset.values()]
    rows = [
        beside_words(result, words, len(by_dataset[result.dataset]))[1]
        for result in best
        if result.examples and (words := find_word_scores(result.examples.scores, stored))
    ]
    return sorted(rows, key=lambda row: row.value - row.mean)


def beside_words(best: Result, words: Sequence[Score], num_models: int) -> tuple[Result, WordsRow]:
    """Compare the best of some models with the score of words alone beside each of its scores. Return also the result
    of words alone. The baseline has no seed of its own: it counts as that score for each seed of the model."""
    samples = tuple(score.metrics["test"][best.measure] for score in words)
    choice = best.choice and RateChoice({0.0: words}, best.measure)
    arm, kept = ReportArm(words[0].model), KeptExamples(tuple(words))
    alone = replace(best, arm=arm, samples=samples, examples=kept, choice=choice, cohort={})
    return alone, measure_distance(best, alone, num_models)


def add_words(rows: Iterable[SummaryRow], stored: Sequence[Score]) -> list[SummaryRow]:
    """Add a row of words alone below the models of each group of `group_rows`, if it has a score beside the best of
    them. `rows`: as of `summarize`."""
    extended = []
    for (_, data_hash, _), of_task in group_rows(rows).items():
        extended += of_task
        best, num_models = of_task[0].score, sum(bool(row.score.samples) for row in of_task)
        words = find_word_scores(best.examples.scores, stored) if best.examples else []
        if not words:
            continue
        alone, compared = beside_words(best, words, num_models)
        cells = {score.cell: score for score in words}
        if len(cells) == 1:  # one score for all seeds
            alone = replace(alone, samples=alone.samples[:1], seeds=(), examples=KeptExamples((*cells.values(),)))
        arm = ReportArm(f"words alone ({alone.arm.name})")
        alone = replace(alone, arm=arm, by_rate=None, rate=None, num_runs=len(cells), num_diverged=0)
        of_paper = statistics.mean_interval(alone.samples, "normal")
        extended.append(SummaryRow(alone, (), (), of_paper, None, compared, data_hash))
    return extended


def measure_distance(best: Result, alone: Result, num_models: int = 1) -> WordsRow:
    """Measure the distance of the best of some models from words alone."""
    gap = contrasts.difference(best, alone)
    level = statistics.SIGNIFICANCE / num_models
    tested = gap.over_examples(level) if math.isnan(gap.error) else gap.against(level=level)
    tested = replace(tested, p_value=min(tested.p_value * num_models, 1.0))
    return WordsRow(best.dataset, alone.arm.name, alone.mean, best.arm.name, best.mean, tested, num_models)


def compare_rows(task: Task, rows: Rows, by_words: Rows) -> WordsRow:
    """Compare the predictions of a model with those of words alone for the same examples."""
    sides = []
    for name, judged in (("this model", rows), (task.kind.words, by_words)):
        values, statistic = contributions(judged, task.metric, task.classes)
        table, score = ExampleTable("", linearize(values, statistic)[None]), total_score(values, statistic)
        examples = KeptExamples((), table)
        sides.append(Result(ReportArm(name), "", task.name, "standard", (score,), seeds=(0,), examples=examples))
    return measure_distance(sides[0], sides[1])


def compare(scores: ScoreSet, a: str, b: str) -> list[TaskComparison]:
    """Compare two models on every task that either has, each at the rate that its validation chose.

    `find_scored_model` resolves the names. The test (`contrasts.contrast`) asks: would other fine-tuning runs on other
    test examples say the same? If the contributions of examples are unknown, the test is over seeds alone, and a note
    says so. Verdicts are about these two checkpoints, not about another pretraining of the same recipes. p-values are
    adjusted over tasks by Holm's method. The verdicts:

    - "A better", "B better": adjusted p < 0.05, and no seed of the better model diverged at its rate.
    - "within noise": adjusted p ≥ 0.05; or the seeds allow no test, but the choice of test examples alone could explain
      the difference. It never means "equal": look at the interval.
    - "cannot be told": no test over seeds, the better model lost seeds, different data, or a model without scores.

    Raises:
        InputError: an unknown or ambiguous name, the same model twice, or no task in common.
    """
    model_a, model_b = find_scored_model(scores, a), find_scored_model(scores, b)
    if model_a == model_b:
        raise InputError(f"'{a}' and '{b}' are the same model, {model_a}; give two different ones")
    tasks = {model: {task for name, task in scores.cells if name == model} for model in (model_a, model_b)}
    if not tasks[model_a] & tasks[model_b]:
        raise InputError(f"{model_a} and {model_b} have no task in common; fine-tune both on the same")
    measured = [measure_task(scores, model_a, model_b, task) for task in sorted(tasks[model_a] | tasks[model_b])]
    judged = judge_all(measured)
    num_tasks = sum(not math.isnan(pair.p_value) for pair in judged)
    return [replace(pair, num_tasks=num_tasks) for pair in judged]


def measure_task(scores: ScoreSet, model_a: str, model_b: str, task: str) -> TaskComparison:
    """Compare two models on a task, without a verdict; `judge` adds it."""
    sides: list[Result] = []
    notes: list[str] = []
    for model in (model_a, model_b):
        try:
            sides.append(select_rate(scores, model, task))
        except InputError as error:
            sides.append(Result(ReportArm(model), "", task, "standard"))
            notes.append(str(error))
    a, b = sides
    if notes:
        return TaskComparison(a, b, notes=tuple(notes))
    changed = differing([side.examples.scores[0].settings for side in sides if side.examples])
    if clash := [key for key in changed if key in TASK_SETTINGS]:
        return TaskComparison(a, b, notes=(f"they were scored with different {' and '.join(clash)}",))
    if changed and base_name(model_a) != base_name(model_b):
        notes.append(f"they were fine-tuned with different {', '.join(changed)}")
    return TaskComparison(a, b, contrasts.difference(a, b), notes=(*notes, *list_doubts(scores, a, b)))


def list_doubts(scores: ScoreSet, a: Result, b: Result) -> Iterator[str]:
    """Yield reasons to doubt a difference between two models."""
    tried = []
    for side in (a, b):
        rates = {rate for rate, _ in scores.cells[side.arm.name, side.dataset]}
        tried.append((len(rates), short_name(side.arm.name)))
    (fewest, of_fewest), (most, of_most) = sorted(tried)
    if fewest < most:
        yield f"unequal tuning: {show_count(most, 'rate')} tried for {of_most}, {fewest} for {of_fewest}"
    for side in (a, b):
        if side.num_diverged and side.rate:
            lost = f"{side.num_diverged} of {show_count(side.num_diverged + side.num, 'seed')}"
            at_rate = f"diverged at its best rate, {show_rate(side.rate)}"
            yield f"{lost} of {short_name(side.arm.name)} {at_rate}: the mean is over the survivors"
    tables = []
    for side in (a, b):
        assert side.examples
        table = side.examples.read()
        if table.why_unknown:
            yield f"test examples are not accounted for: {table.why_unknown}"
            return
        if table.num_degenerate:
            seeds = f"{table.num_degenerate} of {show_count(side.num, 'seed')}"
            yield f"degenerate: {short_name(side.arm.name)} predicts the same for all examples with {seeds}"
        tables.append(table)
        if side.choice and (why := side.choice.draw_noise().why_unknown):
            yield f"what other validation examples would have chosen is not accounted for: {why}"
    if tables[0].fingerprint != tables[1].fingerprint:
        yield "the test examples are not the same, so they are not paired"


def judge_all(measured: Sequence[TaskComparison]) -> list[TaskComparison]:
    """Return the comparisons with their verdicts, and with p-values and intervals that are adjusted over all of them
    (Holm). An interval contains zero if and only if its p-value is not significant."""
    raw = [pair.contrast.against().p_value if pair.contrast else math.nan for pair in measured]
    tested = zip(measured, statistics.holm(raw).tolist(), statistics.holm_levels(raw), strict=True)
    return [judge(replace(pair, p_value=p_value, level=level)) for pair, p_value, level in tested]


def judge(measured: TaskComparison) -> TaskComparison:
    """Return the comparison with its verdict, by the rule of `compare`."""
    gap = measured.contrast
    if gap is None:
        return measured
    says = contrasts.judge_difference(gap.estimate, measured.p_value)
    notes = list(measured.notes)
    verdict: ComparisonVerdict = "cannot be told"
    if says in ("above", "below"):
        if (measured.a if says == "above" else measured.b).num_diverged:
            notes.append("the better model lost seeds")
        else:
            verdict = "A better" if says == "above" else "B better"
    elif says == "within noise":
        verdict = "within noise"
    else:
        notes.append("one seed shows no spread over seeds" if gap.num == 1 else "all seeds differ by the same amount")
        p_examples = gap.over_examples().p_value
        if statistics.is_significant(p_examples):
            notes.append("these runs do differ on the test examples, but others may not")
        elif not math.isnan(p_examples):
            verdict = "within noise"
            notes.append("the choice of test examples could explain it")
    return replace(measured, verdict=verdict, notes=tuple(notes))


# Pairs of methods


MOST_PAIRS = 66
"""The most pairs on a page; if there are more, the page shows neighbours in rank, and the CSV file has all pairs."""


def ranked_names(pairs: Sequence[TaskComparison]) -> list[str]:
    """List the methods of these pairs, the best mean first."""
    return list(dict.fromkeys(arm.name for pair in pairs for arm in (pair.a.arm, pair.b.arm)))


def pair_table(pairs: Sequence[TaskComparison], results: ResultSet) -> Table:
    """Make a table with a row for every pair, or for neighbours in rank if there are more than `MOST_PAIRS`.
    Differences of scores without a unit are no points."""
    rows, names = [], ranked_names(pairs)
    measure = "points" if results.unit else "difference"
    records: list[Sequence[object]] = [("a", "b", measure, *PAIR_COLUMNS)]
    for pair in pairs:
        a, b, gap = pair.a.arm.name, pair.b.arm.name, pair.difference
        assert gap and pair.contrast
        verdict = pair.verdict.replace("A better", f"{a} better")
        value = show_points(gap.value, decimals=results.decimals)
        low, high = (show_end(end, decimals=results.decimals) for end in (gap.low, gap.high))
        ends = f"{low} to {high}" if gap.low == gap.low else MISSING
        coverage = f"{100 * (1 - gap.level):.4g} %" if gap.low == gap.low else MISSING
        noise = "tasks" if results.over == "tasks" else show_noise(pair.contrast.noise) or MISSING
        if len(pairs) <= MOST_PAIRS or names.index(b) == names.index(a) + 1:
            texts = (value, ends, coverage, show_p_value(pair.p_value), noise, verdict)
            rows.append(TableRow((f"{a} − {b}",), tuple(map(Cell, texts))))
        points = (100 * gap.value, 100 * gap.low, 100 * gap.high, gap.level)
        records.append((a, b, *points, pair.p_value, verdict, noise, "; ".join(pair.notes)))
    heads = (measure, "interval", "coverage", "adjusted p", "over", "verdict")
    rules = [read_words()["pairs_rule"]]
    if any(pair.difference and math.isnan(pair.p_value) and not math.isnan(pair.difference.low) for pair in pairs):
        rules.append(read_words()["pairs_alone"])
    title = "Pairs of methods" if len(pairs) <= MOST_PAIRS else "Neighbours in rank"
    return Table("pairs", title, ("pair",), heads, tuple(rows), tuple(rules), records)


PAIR_COLUMNS = ("low", "high", "level", "adjusted_p", "verdict", "over", "notes")
"""The columns of the CSV file of all pairs after the two methods and their difference."""


# In a terminal


def print_summary(rows: Sequence[SummaryRow], broken: Mapping[Path, str] | None = None) -> None:
    """Print a table of scores by task, and the gaps and flaws in the scores of models; `broken`: file left out → the
    reason."""
    models = [row for row in rows if row.words is None]
    names = {row.score.arm.name: row.score.arm.name for row in rows} | shorten({row.score.arm.name for row in models})
    columns: dict[str, Callable[[SummaryRow], Cell]] = {
        "rate": lambda row: Cell(show_rate(row.score.rate) if row.score.rate else MISSING),
        "mean ±": lambda row: interval_cell(row.score.interval),
        "paper ±": lambda row: interval_cell(row.paper_interval),
        "seeds": lambda row: Cell(str(row.score.num) if row.score.seeds or row.words is None else MISSING),
    }
    lines = list(read_words()["summary_rules"])
    if any(row.diverged for row in rows):
        columns["diverged"] = lambda row: Cell(f"{len(row.diverged)} of {row.score.num_runs}" if row.diverged else "0")
    if any(row.spread for row in rows):
        columns["spread"] = lambda row: Cell(show_spread(row.spread))
        low, high = map(show_rate, statistics.STABILITY_RATES)
        lines.append(f"spread: standard deviation over seeds and rates from {low} to {high}, and its 95 % interval")
    table_rows, signals, undecided = [], [], []
    groups = group_rows(sorted(rows, key=lambda row: row.score.dataset))
    num_groups = Counter(name for name, _, _ in groups)
    for (name, data_hash, metric), of_task in groups.items():
        task = name if num_groups[name] == 1 else f"{name} [data={data_hash[:8]}]"
        chosen = [row.score for row in of_task if row.score.samples and row.words is None]
        ratio, needs = contrasts.measure_signal(chosen)
        signals += [] if math.isnan(ratio) else [f"{task} {show_signal(ratio, needs)}"]
        undecided += [f"{task} separates no models yet; needed: {needs}"] if needs else []
        table_rows.append(TableRow((task,), (Cell(""), Cell(metric)), task))
        for row in of_task:
            cells = tuple(show(row) for show in columns.values())
            table_rows.append(TableRow((f"  {names[row.score.arm.name]}",), cells, task))
    if table_rows:
        title = "Test scores in %, each seed at the rate that the others chose"
        print_table(Table("scores", title, ("model",), tuple(columns), tuple(table_rows)))
    else:
        lines = ["no finished scores"]
    changed = first_of([name for name, number in num_groups.items() if number > 1])
    lines += [f"scores on other data or by another metric do not compare: {changed}"] if changed else []
    for row in models:
        lines += list_flaws(row, f"{names[row.score.arm.name]} on {row.score.dataset}")
    if signals:
        about = "about 1 if models are equally good; (…): the task separates no models"
        lines.append(f"signal ÷ noise: {', '.join(signals)}; {about}")
    lines += undecided
    lines += [row.words.sentence for row in rows if row.words]
    for line in (*lines, *(f"left out: {path} ({reason})" for path, reason in (broken or {}).items())):
        out.print(line)


def list_flaws(row: SummaryRow, where: str) -> Iterator[str]:
    """Yield the flaws in a row's scores that its numbers do not show."""
    if row.why_unscored:
        yield f"no score: {row.why_unscored}"
    if row.missing:
        cells = [f"{show_rate(rate)} seed {seed}" for rate, seed in row.missing]
        lost = f"{show_count(len(row.missing), 'cell')}: {first_of(cells)}"
        yield f"missing: {where}: {lost}"
    num_unspread = sum(statistics.is_stability_rate(rate) for rate, _ in (*row.diverged, *row.missing))
    if row.spread and num_unspread:
        lost = show_count(num_unspread, "cell")
        yield f"spread of {where}: {lost} without a score left out, so it may be too small"
    if num_degenerate := row.score.count_degenerate():
        seeds = f"{num_degenerate} of {show_count(row.score.num, 'seed')}"
        yield f"degenerate: {where} predicts the same for all with {seeds}"
    never = []
    for name, count in row.never_predicted.items():
        never.append(name if count == row.score.num else f"{name} ({count} of {row.score.num} seeds)")
    if never:
        yield f"never predicted: {where}: {first_of(never, 5)}"


def tell_alone(score: Result, words: Sequence[Score], frozen: Sequence[Score]) -> Iterator[str]:
    """Yield sentences on a single model: whether it predicts the same for all test examples, and its comparison with
    words alone and with a linear model on the vectors of the frozen encoder."""
    if score.count_degenerate():
        is_correlation = score.measure in KINDS["regression"].metrics
        undefined = f", so its {score.measure} means nothing (0 if undefined)" if is_correlation else ""
        yield f"degenerate: this model predicts the same for all test examples{undefined}"
    for row in compare_words([score], words):
        yield row.sentence
    for baseline in frozen:
        yield f"Beside its vectors before training: {beside_words(score, [baseline], 1)[1].told}"


def print_comparison(comparisons: Sequence[TaskComparison]) -> None:
    """Print a table, a sentence for each task, and the number of tasks with each verdict."""
    models = [side.arm.name for side in (comparisons[0].a, comparisons[0].b)]
    names = shorten({*models})
    rows = []
    for pair in comparisons:
        cells = [interval_cell(side.interval) for side in (pair.a, pair.b)]
        tested = pair.contrast.against(level=pair.level) if pair.contrast else None
        gap = Cell(f"{100 * tested.value:+.2f}", show_share(tested.half_width)) if tested else Cell(MISSING)
        rows.append(TableRow((pair.a.dataset,), (*cells, gap, Cell(show_p_value(pair.p_value)), Cell(pair.verdict))))
    for letter, model in zip("AB", models, strict=True):
        out.print(f"{letter} = {model}")
    title = "Test scores in % ± half the width of the 95 % interval over seeds; A − B ± that of the corrected interval"
    columns = ("A", "B", "A − B", "p", "verdict")
    print_table(Table("comparison", title, ("task",), columns, tuple(rows)))
    for pair in comparisons:
        out.print(describe_comparison(pair, names))
    verdicts = get_args(ComparisonVerdict)
    counts = [f"{verdict} on {sum(pair.verdict == verdict for pair in comparisons)}" for verdict in verdicts]
    counted = f"of {show_count(len(comparisons), 'task')}: {', '.join(counts)}"
    out.print(f"{counted}; about these two checkpoints, not about how they were pretrained")


def describe_comparison(pair: TaskComparison, names: Mapping[str, str]) -> str:
    """Write a comparison as a sentence: the difference, the verdict and the test."""
    metric = pair.a.measure or pair.b.measure
    start = f"{pair.a.dataset} ({metric})" if metric else pair.a.dataset
    notes = "".join(f"; {note}" for note in pair.notes)
    gap = pair.difference
    if gap is None or not pair.contrast:
        return f"{start}: cannot be told{notes}"
    sides = [(names[side.arm.name], side.mean) for side in (pair.a, pair.b)]
    # The test and its sources of noise: ` (p = 0.031 over 5 pairs of seeds and 2,000 examples; adjusted over 3 tasks)`.
    # With several rates: `over 5 pairs of seeds, 2,000 examples and the choice of rates`.
    test = ""
    if not math.isnan(pair.p_value):
        is_paired = pair.contrast.test == "paired t"
        over = [f"{show_count(pair.a.num, 'pair')} of seeds" if is_paired else f"{pair.a.num} and {pair.b.num} seeds"]
        over += [show_count(pair.contrast.num_examples, "example")] if pair.contrast.num_examples else []
        over += ["the choice of rates"] if "the choice of rates" in pair.contrast.noise else []
        test = f"{tell_p_value(pair.p_value)} over {show_noise(over)}"
        test = f" ({test}{f'; adjusted over {pair.num_tasks} tasks' if pair.num_tasks > 1 else ''})"
    sentence = contrasts.say_difference(gap, *sides, is_ahead=pair.verdict in ("A better", "B better"))
    within = ", within noise" if pair.verdict == "within noise" else ""
    return f"{start}: {sentence}{within}{test}{notes}"


def shorten(models: set[str]) -> dict[str, str]:
    """Map models to the last parts of their paths if those are distinct, else to themselves."""
    short = {model: short_name(model) for model in models}
    return short if len(set(short.values())) == len(models) else {model: model for model in models}
