"""Results → tables, and a table as Markdown, LaTeX, CSV, and lines in a terminal.

One table for each comparison, family and metric: arms in rows, datasets and their average in columns.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from rich import box
from rich.measure import Measurement
from rich.table import Table as RichTable
from rich.text import Text

from biphase.console import out, printable
from biphase.report.contrasts import Signal, difference, measure_signal
from biphase.report.formats import MISSING, csv_text, show_share, tell_measures
from biphase.report.results import (
    ALL_TASKS,
    AVERAGE,
    FAMILY_NAMES,
    ReportArm,
    Result,
    ResultSet,
    read_words,
    short_steps,
)
from biphase.report.statistics import Interval

if TYPE_CHECKING:
    from jinja2 import Template

OBJECTIVE_NAMES = {"clm": "CLM", "mlm": "MLM", "clm+mlm": "CLM → MLM", "none": "random"}


T = TypeVar("T")


@dataclass(frozen=True)
class Cell:
    """A place of a table: words, or a number with half of its interval."""

    text: str
    reach: str = ""
    """What stands behind ±."""
    mark: Literal["best", "tied", ""] = ""
    """How a score stands to the others of its block."""
    score: Result | None = None


def interval_cell(interval: Interval) -> Cell:
    """Show an interval as `81.20 ± 0.93`; with a single value as `81.20 ±    –`."""
    return Cell(show_share(interval.value), show_share(interval.half_width) if interval.num else "")


@dataclass(frozen=True)
class Row:
    stub: tuple[str, ...]
    """What stands before the cells."""
    cells: tuple[Cell, ...]
    block: object = None
    """Rows of the same block are compared with each other."""
    arm: ReportArm | None = None


@dataclass(frozen=True)
class Table:
    name: str
    """The name of its files."""
    title: str
    stub: tuple[str, ...]
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    """How to read it, and what else a reader must know."""
    records: Sequence[Sequence[object]] = ()
    """The lines of its CSV file, headers first; () without such a file."""
    signals: tuple[Signal | None, ...] = ()
    """How far each column tells the trained models of the table apart."""
    details: tuple[bool, ...] = ()
    """Which columns a page shows only when asked: datasets beside the mean of their family."""


def percent(mask: int | None) -> str:
    return MISSING if mask is None else f"{mask} %"


STUBS: dict[str, Callable[[ReportArm], str]] = {
    "size": lambda arm: arm.size,
    "objective": lambda arm: OBJECTIVE_NAMES[arm.objective],
    "masked": lambda arm: percent(arm.mask_percent),
    "steps": lambda arm: f"{arm.pretrain_steps:,}",
    "CLM steps": lambda arm: f"{arm.clm_steps:,}",
    "MLM steps": lambda arm: f"{arm.mlm_steps:,}",
    "continued steps": lambda arm: f"{arm.cpt_steps:,}",
    "parent": lambda arm: f"{OBJECTIVE_NAMES[arm.objective]} {arm.pretrain_steps:,}",
    "model": lambda arm: arm.name,
}
"""What stands before the scores of an arm, by its header."""


def make_tables(results: ResultSet) -> list[Table]:
    """Make a table for each comparison, family and metric with a result, in the order of `words.yaml`: a row for every
    arm of the comparison, also for one that lacks this family."""
    tables = []
    for metric, (setup, words) in itertools.product(results.metrics, read_words()["comparisons"].items()):
        part = results.select(metric=metric, setup=setup)
        stubs = {arm: {head: STUBS[head](arm) for head in words["stub"]} for arm in part.arms}
        blocks = {arm: tuple(stub.values())[: words["block"]] for arm, stub in stubs.items()}
        trained = [arm for arm in stubs if arm.objective != "none"]
        for family in part.families:
            names = part.datasets(family, metric)
            columns = [*names, AVERAGE] if len(names) != 1 else names
            scores = {(arm.name, name): part.find(arm, family, name, metric) for arm in stubs for name in columns}
            title = f"{words['name']}, {FAMILY_NAMES[family]} ({tell_measures(part, family, metric)})"
            name = f"{setup}-{family.lower()}"
            if "first_table" in words and family != "EM":
                number = words["first_table"] + [*FAMILY_NAMES].index(family)
                title, name = f"{title}, in the form of the paper's table {number}", f"{number:02d}-{name}"
            title, name = title[0].upper() + title[1:], f"table-{name}-{metric}"
            tables.append(
                make_score_table(name, title, stubs, blocks, {name: name for name in columns}, scores, trained)
            )
    return tables


MOST_COLUMNS = 5
"""A page shows as many columns of scores at once; where there are more, it shows datasets of families when asked."""


def rivals(arm: ReportArm) -> tuple[str | int, ...]:
    """Return a key that is equal for models to compare: one network, trained as long, decayed or not."""
    return arm.size, arm.pretrain_steps + arm.cpt_steps, "undecayed" if arm.setup == "efficiency" else ""


def wide_table(results: ResultSet, metric: str) -> Table:
    """Make a table with a row for every model; columns are the mean over all tasks, then for each family its mean
    (where there are several families) and its tasks."""
    results = results.select(metric=metric)
    scores = results.by_model
    names_of = {family: results.datasets(family, metric) for family in results.families}
    num_tasks = sum(map(len, names_of.values()))
    has_all = num_tasks > 1 and any(("", ALL_TASKS) in by_task for by_task in scores.values())
    columns = [("", ALL_TASKS)] if has_all else []  # family and dataset; no family: all tasks
    for family, names in names_of.items():
        is_mean_of_all = has_all and len(names) == num_tasks
        has_mean = len(names) > 1 and not is_mean_of_all
        columns += [(family, name) for name in ([AVERAGE, *names] if has_mean else names)]

    stubs = {}
    for arm in results.models:
        stub = {"model": arm.name, "network": arm.size, "steps": short_steps(arm.pretrain_steps + arm.cpt_steps)}
        objective = {"objective": OBJECTIVE_NAMES[arm.whole_objective]}
        stubs[arm] = stub | objective | {"masked": percent(arm.mask_percent)}
    blocks = {arm: rivals(arm) for arm in stubs}
    # How far tasks tell models apart is a question about models that are compared: those of the largest block.
    ((largest, _),) = Counter(blocks.values()).most_common(1)
    compared = [arm for arm in stubs if blocks[arm] == largest]
    by_column = {(name, column): score for name, cells in scores.items() for column, score in cells.items()}
    # A dataset may have the name of another family's: `uner` of two families becomes `uner (TC)`.
    heads = [f"{code} mean" if name == AVERAGE else name for code, name in columns]
    heads = [f"{head} ({columns[at][0]})" if heads.count(head) > 1 else head for at, head in enumerate(heads)]
    about = "; ".join(f"{FAMILY_NAMES[code]}: {tell_measures(results, code, metric)}" for code in results.families)
    of_means = [code for code, name in columns if name in (AVERAGE, ALL_TASKS)]
    is_long = len(columns) > MOST_COLUMNS
    details = tuple(is_long and name not in (AVERAGE, ALL_TASKS) and code in of_means for code, name in columns)
    title = f"All models and tasks, {'standard' if metric == 'standard' else 'the paper’s own'} metrics ({about})"
    by_head = dict(zip(heads, columns, strict=True))
    return make_score_table(f"all-{metric}", title, stubs, blocks, by_head, by_column, compared, details)


def mark_column(scores: Sequence[Result | None]) -> list[Cell]:
    """Mark the best of the scores, and those that are not shown to differ from it; a score alone is neither. `†` stands
    at a score with a seed that predicts the same for all examples."""
    measured = [score for score in scores if score is not None]
    best = max(measured, key=lambda score: score.mean, default=None)
    cells = []
    for score in scores:
        if score is None or best is None:
            cells.append(Cell(MISSING))
            continue
        mark: Literal["best", "tied", ""] = ""
        if len(measured) > 1:
            mark = "best" if score is best else "" if difference(best, score).side == "above" else "tied"
        sign = "†" if any(part.num_degenerate for part in score.parts) else ""
        cells.append(Cell(show_share(score.mean) + sign, show_share(score.half_width), mark, score))
    return cells


def make_score_table(
    name: str,
    title: str,
    stubs: Mapping[ReportArm, Mapping[str, str]],
    blocks: Mapping[ReportArm, object],
    columns: Mapping[str, object],
    scores: Mapping[tuple[str, Any], Result | None],
    compared: Sequence[ReportArm],
    details: Sequence[bool] = (),
) -> Table:
    """Make a table of scores with what a reader must know of them: a row for every arm, block by block.

    Args:
        stubs: what stands before the scores of an arm, by its header.
        columns: the head of each column → what its scores stand under in `scores`, beside the name of an arm.
        compared: those arms that the columns are to tell apart.
    """
    rows: list[Row] = []
    for block in dict.fromkeys(blocks.values()):
        members = [arm for arm in stubs if blocks[arm] == block]
        marked = [mark_column([scores.get((arm.name, column)) for arm in members]) for column in columns.values()]
        for arm, cells in zip(members, zip(*marked, strict=True), strict=True):
            rows.append(Row(tuple(stubs[arm].values()), cells, block, arm))
    signals = [measure_signal(scores.get((arm.name, column)) for arm in compared) for column in columns.values()]
    measured = filter(None, (cell.score for row in rows for cell in row.cells))
    is_published = not any(score.samples or score.cells for score in measured)
    by = "as published, 1.96·s/√n (verdicts are by Student’s t)" if is_published else "by Student’s t"
    notes = [
        f"Test scores in %: mean over seeds ± half of the 95 % interval over them, {by}. ± –: no interval, because "
        f"there is one seed or all seeds score the same. {read_words()['scores_rule']}"
    ]
    pairs = [(column, signal.needs) for column, signal in zip(columns, signals, strict=False) if signal]
    undecided = [f"{column} decides nothing here; what would: {needs}" for column, needs in pairs if needs]
    if undecided:
        notes.append(f"{'; '.join(undecided)}.")
    missing = []
    records: list[Sequence[object]] = [CSV_COLUMNS]
    for row in rows:
        assert row.arm
        for column, cell in zip(columns, row.cells, strict=True):
            if cell.score is None:
                missing.append(f"{row.arm.name}: {column}")
                continue
            facts = [getattr(row.arm, field) for field in CSV_COLUMNS[2:10]]
            labels = (cell.score.family, cell.score.metric, column)
            half_width = cell.reach.replace(MISSING, "")
            numbers = (show_share(cell.score.mean), half_width, cell.score.num, cell.mark)
            records.append((name, row.arm.name, *facts, *labels, *numbers))
    if missing:
        notes.append(f"Missing: {'; '.join(missing)}.")
    stub = tuple(next(iter(stubs.values())))
    return Table(name, title, stub, tuple(columns), tuple(rows), tuple(notes), records, tuple(signals), tuple(details))


CSV_COLUMNS = (
    *("table", "arm", "parent", "size", "objective", "mask_percent", "pretrain_steps", "clm_steps", "mlm_steps"),
    *("cpt_steps", "family", "metric", "dataset", "mean", "half_width", "num_seeds", "mark"),
)
"""A line for each score, in percent, under the head of its column; nothing where something is missing or does not
apply."""


def show_signal(signal: Signal | None) -> str:
    """Show a ratio as `3.1`, or as `(0.9)` where nothing is decided."""
    if signal is None:
        return MISSING
    return f"({signal.ratio:.1f})" if signal.needs else f"{signal.ratio:.1f}"


# A table's files, and its lines in a terminal


def show_rows(table: Table, show: Callable[[Cell], T], escape: Callable[[str], T]) -> list[tuple[T, ...] | None]:
    """Show the rows of a table, the last one with the signals of its columns; None between blocks."""
    rows: list[tuple[T, ...] | None] = []
    for previous, row in zip((None, *table.rows), table.rows, strict=False):
        if previous is not None and previous.block != row.block:
            rows.append(None)
        rows.append((*map(escape, row.stub), *map(show, row.cells)))
    if any(table.signals):
        stub = ("signal ÷ noise", *[""] * (len(table.stub) - 1))
        rows += [None, tuple(map(escape, (*stub, *map(show_signal, table.signals))))]
    return rows


def to_markdown(table: Table) -> str:
    def show(cell: Cell) -> str:
        bold, sign = ("**" if cell.mark == "best" else ""), (" =" if cell.mark == "tied" else "")
        return bold + cell.text + bold + (f" (± {cell.reach})" if cell.reach else "") + sign

    rows = [(*table.stub, *table.columns), *filter(None, show_rows(table, show, str))]
    lines = ["| " + " | ".join(text.replace("|", "\\|") for text in row) + " |" for row in rows]
    lines.insert(1, "|" + ":---|" * len(table.stub) + "---:|" * len(table.columns))
    return "\n".join([f"**{table.title}**", "", *lines, *(line for note in table.notes for line in ("", note))]) + "\n"


def to_latex(table: Table) -> str:
    """Write a table for `booktabs`, without document preamble."""

    def show(cell: Cell) -> str:
        text, reach = escape_latex(cell.text), escape_latex(cell.reach)
        text = rf"\textbf{{{text}}}" if cell.mark == "best" else text
        sign = "$^{=}$" if cell.mark == "tied" else ""
        return text + sign + (rf" {{\scriptsize($\pm$\,{reach})}}" if reach else "")

    return latex_template().render(table=table, rows=show_rows(table, show, escape_latex))


@cache
def latex_template() -> "Template":
    from jinja2 import Environment

    environment = Environment(trim_blocks=True, keep_trailing_newline=True)
    environment.filters["latex"] = escape_latex
    return environment.from_string((resources.files("biphase.report") / "table.tex.j2").read_text("utf-8"))


def table_files(tables: Iterable[Table]) -> dict[str, str]:
    """Write every table in every format: names of files below the folder of a report → their text."""
    files = {}
    for table in tables:
        files[f"tables/{table.name}.md"] = to_markdown(table)
        files[f"tables/{table.name}.tex"] = to_latex(table)
        if table.records:
            files[f"tables/{table.name}.csv"] = csv_text(table.records)
    return files


PLAIN: dict[str, Any] = {"box": box.SIMPLE_HEAD, "pad_edge": False, "padding": (0, 1, 0, 0), "title_justify": "left"}
"""How tables look: columns two spaces apart, one line below the head."""


def print_table(table: Table) -> None:
    """Print the first words and the cells of each row; not wider than a terminal, and in a file as wide as it needs to
    be."""

    def show(cell: Cell) -> Text:
        text = f"{cell.text} ± {cell.reach:>4}" if cell.reach else cell.text
        return Text(printable(text), style="bold" if cell.mark == "best" else "")

    printed = RichTable(title=table.title, **PLAIN)
    printed.add_column(table.stub[0], overflow="fold")
    for column in table.columns:
        printed.add_column(column, justify="right", no_wrap=True)
    for row in show_rows(table, show, lambda text: Text(printable(text))):
        if row is None:
            printed.add_section()
        else:
            printed.add_row(row[0], *row[len(table.stub) :])
    if not out.is_terminal:
        printed.width = Measurement.get(out, out.options.update_width(200), printed).maximum
    out.print(printed)


LATEX = {sign: f"\\{sign}" for sign in "&%$#_{}"} | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}"}
LATEX |= {"^": r"\textasciicircum{}", "±": r"$\pm$", "→": r"$\to$", "–": "--", "†": r"$\dagger$", "÷": r"$\div$"}
LATEX |= {"…": r"\ldots{}", "“": "``", "”": "''"}


def escape_latex(text: str) -> str:
    return "".join(LATEX.get(sign, sign) for sign in text)
