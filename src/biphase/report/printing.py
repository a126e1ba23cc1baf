"""Summaries and comparisons → tables and sentences in a terminal."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from rich import box
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from biphase import console
from biphase.finetuning.scores import short_name, show_rate
from biphase.report.formats import (
    MISSING,
    show_count,
    show_difference,
    show_interval,
    show_noise,
    show_p_value,
    show_share,
    show_spread,
)
from biphase.report.page import answer_sentences, list_means, wide_table
from biphase.report.results import ResultSet
from biphase.report.statistics import STABILITY_RATES, mean_interval
from biphase.report.tables import show_signal
from biphase.report.verdicts import ComparisonVerdict, SummaryRow, TaskComparison, measure_signals

PLAIN: dict[str, Any] = {"box": box.SIMPLE_HEAD, "pad_edge": False, "padding": (0, 1, 0, 0), "title_justify": "left"}
"""How tables look: columns two spaces apart, one line below the head."""


def print_summary(rows: Sequence[SummaryRow], broken: Mapping[Path, str] | None = None) -> None:
    """A table by task, and what is missing from it."""
    names = shorten({row.model for row in rows})
    columns: dict[str, Callable[[SummaryRow], str]] = {
        "rate": lambda row: MISSING if row.rate is None else show_rate(row.rate),
        "mean ±": lambda row: show_interval(row.interval),
        "paper ±": lambda row: show_interval(row.paper_interval),
        "seeds": lambda row: str(len(row.seeds)),
    }
    lines = [
        "mean: each seed at the rate that the others chose; ±: half of the 95 % interval over seeds, by Student's t; "
        "–: no interval, because there is one seed or all seeds score the same",
        "paper: all seeds at the rate that they chose together, which is the one shown; ± is 1.96·s/√n. Both are too "
        "optimistic for few seeds",
    ]
    if any(row.diverged for row in rows):
        columns["diverged"] = lambda row: f"{len(row.diverged)} of {row.num_cells}" if row.diverged else "0"
    if any(row.spread for row in rows):
        columns["spread"] = lambda row: show_spread(row.spread)
        low, high = map(show_rate, STABILITY_RATES)
        lines.append(f"spread: standard deviation over seeds and rates from {low} to {high}, and its 95 % interval")
    if rows:
        print_table(tabulate(rows, columns, names))
    else:
        lines = ["no finished scores"]
    for row in rows:
        lines += list_flaws(row, f"{names[row.model]} on {row.task}")
    if signals := measure_signals(rows):
        measured = ", ".join(f"{task} {show_signal(signal)}" for task, signal in signals.items())
        lines.append(f"signal ÷ noise: {measured}; about 1 where models are equally good, (…) where nothing is decided")
        lines += [f"{task} decides nothing here; what would: {one.needs}" for task, one in signals.items() if one.needs]
    for line in (*lines, *(f"left out: {path} ({reason})" for path, reason in (broken or {}).items())):
        console.out.print(line, markup=False)


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


def tabulate(
    rows: Sequence[SummaryRow], columns: Mapping[str, Callable[[SummaryRow], str]], names: Mapping[str, str]
) -> Table:
    """The rows of each task under its name and metric."""
    table = Table(title="Test scores in %, each seed at the rate that the others chose", **PLAIN)
    table.add_column("model", overflow="fold")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for task in sorted({row.task for row in rows}):
        chosen = [row for row in rows if row.task == task]
        metric = " / ".join(sorted({row.metric for row in chosen}))
        table.add_section()
        table.add_row(Text(console.printable(task), style="bold"), "", Text(metric, style="italic"))
        for row in chosen:
            table.add_row(f"  {names[row.model]}", *(show(row) for show in columns.values()))
    return table


def print_results(results: ResultSet) -> None:
    """The table of all models and tasks, and the answer to the study's question, as its page has them."""
    shown = wide_table(results, results.primary_metric)
    table = Table(title="Test scores in %, mean over seeds ± half of the 95 % interval", **PLAIN)
    table.add_column("model", overflow="fold")
    for column in shown.columns:
        table.add_column(column, justify="right", no_wrap=True)
    for row in shown.rows:
        scores = []
        for score, mark in row.cells:
            text = MISSING if score is None else f"{show_share(score.mean)} ± {show_share(score.half_width):>5}"
            scores.append(Text(text, style="bold" if mark == "best" else ""))
        table.add_row(row.arm.name, *scores)
    print_table(table)
    for sentence in answer_sentences(results, list_means(results)):
        console.out.print(sentence, markup=False)


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
            one.task,
            *(show_interval(mean_interval(side.test)) if side else MISSING for side in (one.a, one.b)),
            MISSING if one.seen is None else show_difference(one.seen.against()),
            show_p_value(one.p_value).replace(" ", ""),
            one.verdict,
        )
    for letter, model in (("A", first.model_a), ("B", first.model_b)):
        console.out.print(f"{letter} = {model}", markup=False)
    print_table(table)
    for one in comparisons:
        console.out.print(describe_comparison(one, names), markup=False)
    verdicts = get_args(ComparisonVerdict)
    counts = [f"{verdict} on {sum(one.verdict == verdict for one in comparisons)}" for verdict in verdicts]
    counted = f"of {show_count(len(comparisons), 'task')}: {', '.join(counts)}"
    console.out.print(f"{counted}; about these two checkpoints, not about how they were pretrained", markup=False)


def print_table(table: Table) -> None:
    """Not wider than a terminal; in a file, as wide as it needs to be."""
    if not console.out.is_terminal:
        table.width = Measurement.get(console.out, console.out.options.update_width(200), table).maximum
    console.out.print(table)


def describe_comparison(one: TaskComparison, names: Mapping[str, str]) -> str:
    """One comparison in words: who is ahead, by how much, whether that is more than noise, and by which test."""
    start = f"{one.task} ({one.metric})" if one.metric else one.task
    reasons = "".join(f"; {note}" for note in one.notes)
    difference = one.difference
    if difference is None:
        return f"{start}: cannot be told{reasons}"
    ahead, behind = (one.model_a, one.model_b) if difference.value >= 0 else (one.model_b, one.model_a)
    size = f"{100 * abs(difference.value):.2f} points"
    if not math.isnan(difference.low):
        # The ends as seen by the one ahead: `1.20 points [0.27, 2.13]`.
        low, high = sorted(math.copysign(1, difference.value) * end for end in (difference.low, difference.high))
        size += f" [{100 * low:.2f}, {100 * high:.2f}]"
    # What the test is over: ` (p = 0.031 over 5 pairs of seeds and 2,000 examples; adjusted over 3 tasks)`; with
    # several rates: `over 5 pairs of seeds, 2,000 examples and the choice of rates`.
    test = ""
    if not math.isnan(one.p_value):
        assert one.a and one.b and one.seen
        is_paired = one.seen.test == "paired t"
        over = [f"{show_count(one.a.num, 'pair')} of seeds" if is_paired else f"{one.a.num} and {one.b.num} seeds"]
        over += [show_count(one.seen.num_examples, "example")] if one.seen.num_examples else []
        over += ["the choice of rates"] if "the choice of rates" in one.seen.noise else []
        test = f"p = {show_p_value(one.p_value)} over {show_noise(over)}".replace("= <", "<")
        test = f" ({test}{f'; adjusted over {one.num_tasks} tasks' if one.num_tasks > 1 else ''})"
    if one.verdict in ("A better", "B better"):
        return f"{start}: {names[ahead]} beats {names[behind]} by {size}, more than noise{test}{reasons}"
    lead = "both score the same" if difference.value == 0 else f"{names[ahead]} is ahead by {size}"
    judged = "within noise" if one.verdict == "within noise" else "but which is better cannot be told"
    return f"{start}: {lead}, {judged}{test}{reasons}"


def shorten(models: set[str]) -> dict[str, str]:
    """The last parts of the models' paths, where they tell them apart."""
    short = {model: short_name(model) for model in models}
    return short if len(set(short.values())) == len(models) else {model: model for model in models}
