"""Results → tables, written as Markdown, LaTeX and CSV, and printed in a terminal.

One table for each comparison, family and metric: arms in rows, datasets and their average in columns.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from rich import box
from rich.measure import Measurement
from rich.table import Table as RichTable
from rich.text import Text

from biphase.console import out, printable
from biphase.errors import SOURCE
from biphase.report.contrasts import difference, measure_signal
from biphase.report.formats import MISSING, csv_text, show_share, tell_measures, write_steps
from biphase.report.results import (
    ALL_TASKS,
    AVERAGE,
    FAMILY_NAMES,
    OBJECTIVE_NAMES,
    SCORE_DECIMALS,
    ReportArm,
    Result,
    ResultSet,
    read_words,
)
from biphase.report.statistics import Interval


@dataclass(frozen=True)
class Cell:
    """A cell of a table: words, or a number with half of its interval."""

    text: str
    reach: str = ""
    """The number after ±."""
    mark: Literal["best", "tied", ""] = ""
    """`best`: the best of its block; `tied`: within noise of the best."""
    score: Result | None = None


def interval_cell(interval: Interval, decimals: int = SCORE_DECIMALS) -> Cell:
    """Show an interval as `81.20 ± 0.93`, or a single value as `81.20 ±    –`."""
    value, reach = (show_share(share, decimals) for share in (interval.value, interval.half_width))
    return Cell(value, reach if interval.num else "")


@dataclass(frozen=True)
class TableRow:
    stub: tuple[str, ...]
    """The words before the cells."""
    cells: tuple[Cell, ...]
    block: object = None
    """The key of the row's block; rows with equal keys are compared."""
    arm: ReportArm | None = None


@dataclass(frozen=True)
class Table:
    name: str
    """The name of its files, without the ending."""
    title: str
    """Its title, without its `measures`."""
    stub: tuple[str, ...]
    columns: tuple[str, ...]
    rows: tuple[TableRow, ...]
    notes: tuple[str, ...] = ()
    """Sentences that explain how to read the table."""
    records: Sequence[Sequence[object]] = ()
    """The lines of its CSV file, headers first; () without a CSV file."""
    signals: tuple[tuple[float, str], ...] = ()
    """The result of `measure_signal` for each column; () if no column has one."""
    details: tuple[bool, ...] = ()
    """Whether the page hides each column until asked, as it does with datasets whose family has a mean; () for none."""
    words: TableRow | None = None
    """The scores of words alone, which are no arm; None without any."""
    unit: str = "%"
    """The unit of its scores, as in `ResultSet`."""
    measures: str = ""
    """The metrics of its scores in words, and the paper's table of its form; empty if its columns name the metrics."""

    @property
    def whole_title(self) -> str:
        return f"{self.title} ({self.measures})" if self.measures else self.title


STUBS: dict[str, Callable[[ReportArm], str]] = {
    "size": lambda arm: arm.size,
    "objective": lambda arm: arm.told_objective,
    "masked": lambda arm: f"{arm.told_masks} %" if arm.told_masks else MISSING,
    "steps": lambda arm: f"{arm.pretrain_steps + arm.cpt_steps:,}",
    "CLM steps": lambda arm: f"{arm.clm_steps:,}",
    "MLM steps": lambda arm: f"{arm.mlm_steps:,}",
    "continued steps": lambda arm: f"{arm.cpt_steps:,}",
    "parent": lambda arm: f"{OBJECTIVE_NAMES[arm.objective]} {arm.pretrain_steps:,}",
    "budget": lambda arm: arm.budget_class,
    "model": lambda arm: arm.name,
}
"""Header → the function that writes an arm's words before its scores, for tables of comparisons."""

WIDE_STUBS: dict[str, Callable[[ReportArm], str]] = {
    "model": lambda arm: arm.name,
    "network": lambda arm: arm.size,
    "steps": lambda arm: write_steps(arm.pretrain_steps + arm.cpt_steps),
    "objective": STUBS["objective"],
    "masked": STUBS["masked"],
}
"""The same for the table of all models."""


def make_tables(results: ResultSet) -> list[Table]:
    """Make a table for each comparison, family and metric with a result, in the order of `words.yaml`, with a row for
    every arm of the comparison. A study's tables name its models; tables of published scores name the paper's table."""
    tables = []
    is_published, flops = is_of_others(results), flops_stub(results)
    for metric, (setup, words) in itertools.product(results.metrics, read_words()["comparisons"].items()):
        of_setup = results.select(metric=metric, setup=setup)
        compared = [STUBS[head] for head in words["stub"][: words["block"]]]
        stubs = {head: STUBS[head] for head in ([] if is_published else ["model"]) + words["stub"]} | flops
        blocks = {arm: tuple(show(arm) for show in compared) for arm in of_setup.models}
        trained = [arm for arm in blocks if arm.objective != "none"]
        for family in of_setup.families:
            names = of_setup.datasets[family]
            columns = {name: name for name in names} | ({AVERAGE: family} if len(names) != 1 else {})
            title, measures = f"{words['name']}, {FAMILY_NAMES[family]}", tell_measures(of_setup, family)
            name = f"{setup}-{family.lower()}"
            if "first_table" in words and family != "EM":
                number = words["first_table"] + [*FAMILY_NAMES].index(family)
                measures += f"; in the form of the paper's table {number}" if is_published else ""
                name = f"{number:02d}-{name}"
            title, name = title[0].upper() + title[1:], f"table-{name}-{metric}"
            table = make_score_table(name, title, of_setup, stubs, blocks, columns, trained)
            tables.append(replace(table, measures=measures))
    return tables


def flops_stub(results: ResultSet) -> dict[str, Callable[[ReportArm], str]]:
    """Return the column of `relative_flops`; none if no training is known."""
    models, mask = results.models, results.usual_mask
    is_known = not results.is_foreign and any(arm.flops for arm in models)
    return {RELATIVE: lambda arm: relative_flops(arm, models, mask)} if is_known else {}


def is_of_others(results: ResultSet) -> bool:
    """Tell whether these are published results, which lack the scores of single seeds."""
    return not any(result.samples or result.cells for result in results.results)


MOST_COLUMNS = 5
"""The most columns of scores side by side; if there are more, the page hides datasets whose family has a mean."""


def wide_table(results: ResultSet, metric: str) -> Table:
    """Make a table with a row for every model. Its columns are the mean over all tasks, and then the mean and the tasks
    of each family; with a single family, that mean is the mean over all tasks."""
    flops, results = flops_stub(results), results.select(metric=metric)
    num_tasks = sum(map(len, results.datasets.values()))
    has_all = num_tasks > 1 and any(ALL_TASKS in scores for scores in results.scores.values())
    columns = {ALL_TASKS: ALL_TASKS} if has_all else {}
    datasets_beside_means = set[str]()
    for family, names in results.datasets.items():
        if len(names) > 1 and not (has_all and len(names) == num_tasks):  # a single family's mean is that of all tasks
            columns[f"{family} mean"] = family
            datasets_beside_means.update(names)
        columns |= {name: name for name in names}

    blocks = {arm: arm.block for arm in results.models}
    # A task's signal is measured over the models of the largest block.
    ((largest, _),) = Counter(blocks.values()).most_common(1)
    compared = [arm for arm in blocks if blocks[arm] == largest]
    about = "; ".join(f"{FAMILY_NAMES[code]}: {tell_measures(results, code)}" for code in results.families)
    details = [len(columns) > MOST_COLUMNS and name in datasets_beside_means for name in columns]
    title = f"All models and tasks, {'standard' if metric == 'standard' else 'the paper’s own'} metrics"
    stubs = {"model": STUBS["model"]} if results.is_foreign else WIDE_STUBS | flops
    table = make_score_table(f"all-{metric}", title, results, stubs, blocks, columns, compared, details)
    return replace(table, measures=about)


def with_words(table: Table, values: Mapping[str, float]) -> Table:
    """Add the scores of words alone, by column, to a table; columns without one stay empty."""
    cells = tuple(Cell(show_share(values[name]) if name in values else "") for name in table.columns)
    stub = ("words alone (no arm)", *[""] * (len(table.stub) - 1))
    return replace(table, words=TableRow(stub, cells)) if any(cell.text for cell in cells) else table


def mark_column(scores: Sequence[Result | None], decimals: int) -> list[Cell]:
    """Mark the best of several scores and those within noise of it. Mark none if the best is 0, or predicts the same
    for all examples with every seed. `†` follows a score that has such a seed."""
    measured = [score for score in scores if score is not None]
    best = max(measured, key=lambda score: score.mean, default=None)
    cells = []
    for score in scores:
        if score is None or best is None:
            cells.append(Cell(MISSING))
            continue
        mark: Literal["best", "tied", ""] = ""
        if len(measured) > 1 and best.mean != 0 and not best.is_degenerate():
            mark = "best" if score is best else "" if difference(best, score).side == "above" else "tied"
        sign = "†" if any(part.count_degenerate() for part in score.parts) else ""
        value, reach = (show_share(share, decimals) for share in (score.mean, score.interval.half_width))
        cells.append(Cell(value + sign, reach, mark, score))
    return cells


def relative_flops(arm: ReportArm, arms: Sequence[ReportArm], mask: int | None) -> str:
    """Write an arm's training FLOPs divided by those of a baseline among `arms` with the same network and as many
    tokens: MLM alone at this masking ratio in percent, or else the first of them; – if there is none."""
    alike = [other for other in arms if other.size == arm.size and other.flops and other.tokens]
    members = [other for other in alike if math.isclose(other.tokens or 0, arm.tokens or 0, rel_tol=SIMILAR)]
    usual = [other for other in members if (other.objective, other.mask_percent) == ("mlm", mask)]
    baseline, *_ = *(other for other in usual if other.is_plain), *members, None
    return f"{arm.flops / baseline.flops:.2f}" if arm.flops and baseline and baseline.flops else MISSING


def make_score_table(
    name: str,
    title: str,
    results: ResultSet,
    stubs: Mapping[str, Callable[[ReportArm], str]],
    blocks: Mapping[ReportArm, object],
    columns: Mapping[str, str],
    compared: Sequence[ReportArm],
    details: Sequence[bool] = (),
) -> Table:
    """Make a table of scores with its notes: a row for every arm, block by block.

    Args:
        stubs: header → the function that writes an arm's words before its scores.
        blocks: arm → the key of its block.
        columns: header → the key of the column's scores in `ResultSet.scores`.
        compared: the arms over which the signal of each column is measured.
        details: as in `Table`.
    """
    rows: list[TableRow] = []
    for block in dict.fromkeys(blocks.values()):
        members = [arm for arm in blocks if blocks[arm] == block]
        scores = [results.scores[arm.name] for arm in members]
        by_column = ([known.get(column) for known in scores] for column in columns.values())
        marked = [mark_column(of_column, results.decimals) for of_column in by_column]
        for arm, cells in zip(members, zip(*marked, strict=True), strict=True):
            rows.append(TableRow(tuple(show(arm) for show in stubs.values()), cells, block, arm))
    known = [results.scores[arm.name] for arm in compared]
    of_columns = [[scores[column] for scores in known if column in scores] for column in columns.values()]
    signals = [measure_signal(of_column, results.over) for of_column in of_columns]
    by = "as published, 1.96·s/√n (verdicts use Student’s t)" if is_of_others(results) else "by Student’s t"
    unit, over = " in %" if results.unit else "", results.over
    noise = "tasks" if over == "tasks" else "seeds and, if predictions were saved, over test examples"
    notes = [
        f"Test scores{unit}: mean over {over} ± half the width of the 95 % interval over {over}, {by}. ± –: no "
        f"interval, because there is only one {over[:-1]} or all {over} give the same score. "
        + read_words()["scores_rule"].format(noise=noise)
    ]
    notes += [read_words()["flops_rule"]] if RELATIVE in stubs else []
    pairs = zip(columns, signals, strict=True)
    if undecided := [f"{column} separates no models yet; needed: {needs}" for column, (_, needs) in pairs if needs]:
        notes.append(f"{'; '.join(undecided)}.")
    records: list[Sequence[object]] = [CSV_COLUMNS]
    missing = []
    for row in rows:
        assert row.arm
        for column, cell in zip(columns, row.cells, strict=True):
            if cell.score:
                relative = dict(zip(stubs, row.stub, strict=True)).get(RELATIVE, "").replace(MISSING, "")
                records.append((*make_record(name, row.arm, column, cell, cell.score), relative))
            else:
                missing.append(f"{row.arm.name}: {column}")
    notes += [f"Missing: {'; '.join(missing)}."] if missing else []
    known_signals = () if all(math.isnan(ratio) for ratio, _ in signals) else tuple(signals)
    heads = tuple(stubs), tuple(columns)
    return Table(
        name, title, *heads, tuple(rows), tuple(notes), records, known_signals, tuple(details), unit=results.unit
    )


def make_record(name: str, arm: ReportArm, column: str, cell: Cell, score: Result) -> Sequence[object]:
    """Return the line of a score in a table's CSV file: the values of `CSV_COLUMNS` but the last."""
    told = {"objective": arm.curriculum or arm.objective, "mask_percent": arm.told_masks}
    facts = [told.get(field, getattr(arm, field)) for field in CSV_COLUMNS[2:10]]
    numbers = (cell.text.removesuffix("†"), cell.reach.replace(MISSING, ""), score.num, cell.mark)
    return name, arm.name, *facts, score.family, score.metric, column, *numbers


CSV_COLUMNS = (
    *("table", "arm", "parent", "size", "objective", "mask_percent", "pretrain_steps", "clm_steps", "mlm_steps"),
    *("cpt_steps", "family", "metric", "dataset", "mean", "half_width", "num_seeds", "mark"),
    "relative_flops",
)
"""The columns of the CSV file of a table of scores. It has a line for each score, in percent; unknown values are
empty."""


SIMILAR = 0.05
"""The largest difference between amounts of compute that count as equal."""

RELATIVE = "relative FLOPs"
"""The header of the column with the words of `relative_flops`."""


def show_signal(ratio: float, needs: str) -> str:
    """Show a ratio as `3.1`, or as `(0.9)` if models may be equally good."""
    if math.isnan(ratio):
        return MISSING
    return f"({ratio:.1f})" if needs else f"{ratio:.1f}"


# A table's files and its lines in a terminal


def split_columns(table: Table) -> list[list[int]]:
    """Split columns into parts that fit on paper: the means, then each family's datasets."""
    details = table.details or (False,) * len(table.columns)
    runs = [list(run) for _, run in itertools.groupby(range(len(details)), details.__getitem__)]
    means = [column for run in runs if not details[run[0]] for column in run]
    groups = [means, *(run for run in runs if details[run[0]])]
    return [group[at : at + MOST_COLUMNS] for group in groups for at in range(0, len(group), MOST_COLUMNS)]


def table_files(tables: Sequence[Table]) -> dict[str, str]:
    """Return every table in every format: path in the report's folder → text. `document.tex` shows all LaTeX tables. A
    table's own file has no preamble, only a comment that names the packages it needs."""
    from jinja2 import Environment

    environment = Environment(trim_blocks=True, keep_trailing_newline=True)
    environment.filters["latex"] = lambda text: text.translate(str.maketrans(LATEX))
    environment.globals["show_signal"] = show_signal
    templates = {}
    for name in ("table.md", "table.tex", "document.tex"):
        templates[name] = environment.from_string((SOURCE / "report" / f"{name}.j2").read_text("utf-8"))
    files = {}
    for table in tables:
        for ending in ("md", "tex"):
            text = templates[f"table.{ending}"].render(table=table, parts=split_columns(table))
            files[f"tables/{table.name}.{ending}"] = text
        if table.records:
            files[f"tables/{table.name}.csv"] = csv_text(table.records)
    return files | {"tables/document.tex": templates["document.tex"].render(tables=tables)}


PLAIN: dict[str, Any] = {"box": box.SIMPLE_HEAD, "pad_edge": False, "padding": (0, 1, 0, 0), "title_justify": "left"}
"""The look of tables in a terminal: columns two spaces apart, one line below the head."""


def print_table(table: Table) -> None:
    """Print the first stub and the cells of each row, within the width of the terminal; a file gets the full width."""
    printed = RichTable(title=table.title, **PLAIN)
    printed.add_column(table.stub[0], overflow="fold")
    for column in table.columns:
        printed.add_column(column, justify="right", no_wrap=True)
    rows = [*table.rows, *([table.words] if table.words else [])]
    for number, row in enumerate(rows, start=1):
        texts = [Text(printable(row.stub[0]))]
        for cell in row.cells:
            text = f"{cell.text} ± {cell.reach:>4}" if cell.reach else cell.text
            texts.append(Text(printable(text), style="bold" if cell.mark == "best" else ""))
        is_last = any(following.block != row.block for following in rows[number : number + 1])
        printed.add_row(*texts, end_section=is_last)
    if not out.is_terminal:
        printed.width = Measurement.get(out, out.options.update_width(200), printed).maximum
    out.print(printed)


LATEX = {sign: f"\\{sign}" for sign in "&%$#_{}"} | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}"}
LATEX |= {"^": r"\textasciicircum{}", "|": r"\textbar{}", "<": r"\textless{}", ">": r"\textgreater{}"}
LATEX |= {"[": "{[}", "]": "{]}", "*": "{*}"}  # after the end of a row, LaTeX would read an option
LATEX |= {"±": r"$\pm$", "→": r"$\to$", "†": r"$\dagger$", "÷": r"$\div$", "√": r"$\surd$", "·": r"$\cdot$"}
LATEX |= {"×": r"$\times$", "≤": r"$\leq$", "≥": r"$\geq$", "≈": r"$\approx$", "−": "$-$", "²": "$^2$"}
LATEX |= {"–": "--", "—": "---", "…": r"\ldots{}", "“": "``", "”": "''", "‘": "`", "’": "'", "\xa0": "~"}
"""Character that LaTeX reserves or does not know → its command. LaTeX knows Latin letters with accents."""
