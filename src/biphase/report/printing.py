"""Summaries and comparisons → tables and sentences in a terminal."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

from biphase.console import out
from biphase.finetuning.scores import short_name, show_rate
from biphase.report.formats import MISSING, show_count, show_noise, show_p_value, show_share, show_spread
from biphase.report.page import answer_sentences, list_means, wide_table
from biphase.report.results import ResultSet
from biphase.report.statistics import STABILITY_RATES, Interval, mean_interval
from biphase.report.tables import Cell, Row, Table, print_table, show_signal
from biphase.report.verdicts import ComparisonVerdict, SummaryRow, TaskComparison, measure_signals, say_difference


def print_summary(rows: Sequence[SummaryRow], broken: Mapping[Path, str] | None = None) -> None:
    """A table by task, and what is missing from it."""
    names = shorten({row.model for row in rows})
    columns: dict[str, Callable[[SummaryRow], Cell]] = {
        "rate": lambda row: Cell(MISSING if row.rate is None else show_rate(row.rate)),
        "mean ±": lambda row: interval_cell(row.interval),
        "paper ±": lambda row: interval_cell(row.paper_interval),
        "seeds": lambda row: Cell(str(len(row.seeds))),
    }
    lines = [
        "mean: each seed at the rate that the others chose; ±: half of the 95 % interval over seeds, by Student's t; "
        "–: no interval, because there is one seed or all seeds score the same",
        "paper: all seeds at the rate that they chose together, which is the one shown; ± is 1.96·s/√n. Both are too "
        "optimistic for few seeds",
    ]
    if any(row.diverged for row in rows):
        columns["diverged"] = lambda row: Cell(f"{len(row.diverged)} of {row.num_cells}" if row.diverged else "0")
    if any(row.spread for row in rows):
        columns["spread"] = lambda row: Cell(show_spread(row.spread))
        low, high = map(show_rate, STABILITY_RATES)
        lines.append(f"spread: standard deviation over seeds and rates from {low} to {high}, and its 95 % interval")
    shown = []
    for task in sorted({row.task for row in rows}):
        chosen = [row for row in rows if row.task == task]
        metric = " / ".join(sorted({row.metric for row in chosen}))
        shown.append(Row((task,), (Cell(""), Cell(metric)), task))
        shown += [
            Row((f"  {names[row.model]}",), tuple(show(row) for show in columns.values()), task) for row in chosen
        ]
    if shown:
        title = "Test scores in %, each seed at the rate that the others chose"
        print_table(Table("scores", title, ("model",), tuple(columns), tuple(shown)))
    else:
        lines = ["no finished scores"]
    for row in rows:
        lines += list_flaws(row, f"{names[row.model]} on {row.task}")
    if signals := measure_signals(rows):
        measured = ", ".join(f"{task} {show_signal(signal)}" for task, signal in signals.items())
        lines.append(f"signal ÷ noise: {measured}; about 1 where models are equally good, (…) where nothing is decided")
        lines += [f"{task} decides nothing here; what would: {one.needs}" for task, one in signals.items() if one.needs]
    for line in (*lines, *(f"left out: {path} ({reason})" for path, reason in (broken or {}).items())):
        out.print(line, markup=False)


def interval_cell(interval: Interval) -> Cell:
    """`81.20 ± 0.93`; with a single value `81.20 ±    –`."""
    return Cell(show_share(interval.value), show_share(interval.half_width) if interval.num else "")


def list_flaws(row: SummaryRow, where: str) -> Iterator[str]:
    """What a reader must know of a row beyond its numbers."""
    if row.missing:
        shown = [f"{show_rate(rate)} seed {seed}" for rate, seed in row.missing[:3]]
        lost = f"{show_count(len(row.missing), 'cell')}: {', '.join(shown)}{', …' if len(row.missing) > 3 else ''}"
        yield f"missing: {where}: {lost}"
    if row.num_unspread:
        lost = show_count(row.num_unspread, "cell")
        yield f"spread of {where}: lacks {lost} without a score, so it may be too small"
    if row.num_degenerate:
        seeds = f"{row.num_degenerate} of {show_count(len(row.seeds), 'seed')}"
        yield f"degenerate: {where} predicts the same for all with {seeds}"


def print_results(results: ResultSet) -> None:
    """The table of all models and tasks, and the answer to the study's question, as its page has them."""
    title = "Test scores in %, mean over seeds ± half of the 95 % interval"
    print_table(replace(wide_table(results, results.primary_metric), title=title))
    for sentence in answer_sentences(results, list_means(results)):
        out.print(sentence, markup=False)


def print_comparison(comparisons: Sequence[TaskComparison]) -> None:
    """A table, a sentence for each task, and the count of verdicts."""
    first = comparisons[0]
    names = shorten({first.model_a, first.model_b})
    rows = []
    for one in comparisons:
        cells = [interval_cell(mean_interval(side.test)) if side else Cell(MISSING) for side in (one.a, one.b)]
        tested = one.seen.against() if one.seen else None
        gap = Cell(f"{100 * tested.value:+.2f}", show_share(tested.half_width)) if tested else Cell(MISSING)
        rows.append(Row((one.task,), (*cells, gap, Cell(show_p_value(one.p_value)), Cell(one.verdict))))
    for letter, model in (("A", first.model_a), ("B", first.model_b)):
        out.print(f"{letter} = {model}", markup=False)
    title, columns = "Test scores in % ± half of the 95 % interval over seeds", ("A", "B", "A − B", "p", "verdict")
    print_table(Table("comparison", title, ("task",), columns, tuple(rows)))
    for one in comparisons:
        out.print(describe_comparison(one, names), markup=False)
    verdicts = get_args(ComparisonVerdict)
    counts = [f"{verdict} on {sum(one.verdict == verdict for one in comparisons)}" for verdict in verdicts]
    counted = f"of {show_count(len(comparisons), 'task')}: {', '.join(counts)}"
    out.print(f"{counted}; about these two checkpoints, not about how they were pretrained", markup=False)


def describe_comparison(one: TaskComparison, names: Mapping[str, str]) -> str:
    """One comparison in words: who is ahead, by how much, whether that is more than noise, and by which test."""
    start = f"{one.task} ({one.metric})" if one.metric else one.task
    notes = "".join(f"; {note}" for note in one.notes)
    gap = one.difference
    if gap is None or not one.seen or not one.a or not one.b:
        return f"{start}: cannot be told{notes}"
    sides = [(names[one.model_a], one.a.mean), (names[one.model_b], one.b.mean)]
    if gap.value < 0:
        sides.reverse()
        gap = replace(gap, value=-gap.value, low=-gap.high, high=-gap.low)
    # What the test is over: ` (p = 0.031 over 5 pairs of seeds and 2,000 examples; adjusted over 3 tasks)`; with
    # several rates: `over 5 pairs of seeds, 2,000 examples and the choice of rates`.
    test = ""
    if not math.isnan(one.p_value):
        is_paired = one.seen.test == "paired t"
        over = [f"{show_count(one.a.num, 'pair')} of seeds" if is_paired else f"{one.a.num} and {one.b.num} seeds"]
        over += [show_count(one.seen.num_examples, "example")] if one.seen.num_examples else []
        over += ["the choice of rates"] if "the choice of rates" in one.seen.noise else []
        test = f"p = {show_p_value(one.p_value)} over {show_noise(over)}".replace("= <", "<")
        test = f" ({test}{f'; adjusted over {one.num_tasks} tasks' if one.num_tasks > 1 else ''})"
    within = ", within noise" if one.verdict == "within noise" else ""
    return (
        f"{start}: {say_difference(gap, *sides, is_ahead=one.verdict in ('A better', 'B better'))}{within}{test}{notes}"
    )


def shorten(models: set[str]) -> dict[str, str]:
    """The last parts of the models' paths, where they tell them apart."""
    short = {model: short_name(model) for model in models}
    return short if len(set(short.values())) == len(models) else {model: model for model in models}
