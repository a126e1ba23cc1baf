"""Results → tables, as data, and as Markdown, LaTeX and CSV.

One table for each comparison, family and metric: arms in rows, datasets and their average in columns.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from biphase.report.contrasts import Signal, difference, measure_signal
from biphase.report.formats import MISSING, csv_text, escape_latex, latex_text, markdown_text, show_share, tell_measures
from biphase.report.results import ALL_TASKS, AVERAGE, FAMILY_NAMES, SETUPS, ReportArm, Result, ResultSet

RULE = (
    "Bold: the best of its block. "
    "=: within noise of it, as the 95 % interval of the difference includes zero or cannot be told; over seeds and, "
    "where predictions were kept, test examples; not corrected for the number of comparisons. †: one and the same "
    "predicted for all examples. –: no score. Signal ÷ noise: the spread of the trained models over the standard error "
    "of a score; about 1 where they are equally good, in parentheses where all of them may be (F test)."
)

OBJECTIVE_NAMES = {"clm": "CLM", "mlm": "MLM", "clm+mlm": "CLM → MLM", "none": "random"}


Column = TypeVar("Column")
"""What names a column of a table to who looks for its scores."""

TableCell = tuple[Result | None, Literal["best", "tied", ""]]
"""A score, if there is one, and how it stands to the others of its block."""


@dataclass(frozen=True)
class TableRow:
    arm: ReportArm
    stub: tuple[str, ...]
    cells: tuple[TableCell, ...]
    block: tuple[str | int, ...]
    """Rows of the same block are compared with each other."""


@dataclass(frozen=True)
class ScoreTable:
    name: str
    """The name of its files."""
    title: str
    stub: tuple[str, ...]
    columns: tuple[str, ...]
    rows: tuple[TableRow, ...]
    signals: tuple[Signal | None, ...] = ()
    """How far each column tells the trained models of the table apart."""
    details: tuple[bool, ...] = ()
    """Which columns a page shows only when asked: datasets beside the mean of their family."""

    @property
    def rule(self) -> str:
        """How to read it."""
        scores = [score for row in self.rows for score, _ in row.cells if score]
        is_published = not any(score.samples or score.cells for score in scores)
        by = "as published, 1.96·s/√n (verdicts are by Student’s t)" if is_published else "by Student’s t"
        return (
            f"Test scores in %: mean over seeds ± half of the 95 % interval over them, {by}. ± –: no interval, because "
            f"there is one seed or all seeds score the same. {RULE}"
        )


def percent(mask: int | None) -> str:
    return MISSING if mask is None else f"{mask} %"


TableForm = tuple[tuple[str, ...], Callable[[ReportArm], tuple[str, ...]], Callable[[ReportArm], tuple[str | int, ...]]]

FORMS: dict[str, TableForm] = {
    "objective": (
        ("size", "objective", "masked"),
        lambda arm: (arm.size, OBJECTIVE_NAMES[arm.objective], percent(arm.mask_percent)),
        lambda arm: (arm.size,),
    ),
    "efficiency": (
        ("size", "steps", "objective"),
        lambda arm: (arm.size, f"{arm.pretrain_steps:,}", OBJECTIVE_NAMES[arm.objective]),
        lambda arm: (arm.size, arm.pretrain_steps),
    ),
    "ratio": (
        ("size", "steps", "of them CLM", "of them MLM"),
        lambda arm: (arm.size, f"{arm.pretrain_steps:,}", f"{arm.clm_steps:,}", f"{arm.mlm_steps:,}"),
        lambda arm: (arm.size, arm.pretrain_steps),
    ),
    "adapted": (
        ("size", "CLM steps", "MLM steps", "masked"),
        lambda arm: (arm.size, f"{arm.clm_steps:,}", f"{arm.mlm_steps:,}", percent(arm.mask_percent)),
        lambda arm: (arm.size, arm.clm_steps, arm.mlm_steps),
    ),
    "cpt": (
        ("size", "continued steps", "parent"),
        lambda arm: (arm.size, f"{arm.cpt_steps:,}", f"{OBJECTIVE_NAMES[arm.objective]} {arm.pretrain_steps:,}"),
        lambda arm: (arm.size, arm.cpt_steps),
    ),
    "control": (("size", "model"), lambda arm: (arm.size, arm.name), lambda arm: (arm.size,)),
    "other": (("size", "arm"), lambda arm: (arm.size, arm.name), lambda arm: (arm.size,)),
}
"""How each comparison is laid out: the headers of what stands before the scores, what stands there, and the block of an
arm: rows of one block are compared with each other."""
assert FORMS.keys() == SETUPS.keys()


def make_tables(results: ResultSet, numbers: Mapping[tuple[str, str], int] | None = None) -> list[ScoreTable]:
    """A table for each comparison, family and metric with a result, in the order of `SETUPS`: a row for every arm of
    the comparison, also for one that lacks this family.

    `numbers`: (setup, family) → the number of a paper's table of the same form.
    """
    tables = []
    for metric, setup in itertools.product(results.metrics, SETUPS):
        part = results.select(metric=metric, setup=setup)
        stub, describe, block_of = FORMS[setup]
        for family in part.families:
            names = part.datasets(family, metric)
            columns = [*names, AVERAGE] if len(names) != 1 else names
            scores = {(arm, name): part.find(arm, family, name, metric) for arm in part.arms() for name in columns}
            rows = fill_rows(part.arms(), columns, block_of, describe, lambda *place, scores=scores: scores[place])
            title, name = (
                f"{SETUPS[setup]}, {FAMILY_NAMES[family]} ({tell_measures(part, family, metric)})",
                f"{setup}-{family.lower()}",
            )
            number = (numbers or {}).get((setup, family))
            if number is not None:
                title, name = f"{title}, in the form of the paper's table {number}", f"{number:02d}-{name}"
            trained = [arm for arm in part.arms() if arm.objective != "none"]
            signals = [measure_signal(scores[arm, column] for arm in trained) for column in columns]
            title, name = title[0].upper() + title[1:], f"table-{name}-{metric}"
            tables.append(ScoreTable(name, title, stub, tuple(columns), rows, tuple(signals)))
    return tables


def fill_rows(
    arms: Sequence[ReportArm],
    columns: Sequence[Column],
    block_of: Callable[[ReportArm], tuple[str | int, ...]],
    describe: Callable[[ReportArm], tuple[str, ...]],
    find: Callable[[ReportArm, Column], Result | None],
) -> tuple[TableRow, ...]:
    """A row for every arm, block by block: what stands before its scores, and its score in each column."""
    rows = []
    for block in dict.fromkeys(map(block_of, arms)):
        own = [arm for arm in arms if block_of(arm) == block]
        marked = [mark_column([find(arm, column) for arm in own]) for column in columns]
        for arm, cells in zip(own, zip(*marked, strict=True), strict=True):
            rows.append(TableRow(arm, describe(arm), cells, block))
    return tuple(rows)


def mark_column(scores: Sequence[Result | None]) -> list[TableCell]:
    """The best of the scores, and those that are not shown to be different from it. A score alone is neither."""
    known = [score for score in scores if score is not None]
    if len(known) < 2:
        return [(score, "") for score in scores]
    best = max(known, key=lambda score: score.mean)
    cells: list[TableCell] = []
    for score in scores:
        if score is None or score is best:
            cells.append((score, "" if score is None else "best"))
        else:
            cells.append((score, "" if difference(best, score).side == "above" else "tied"))
    return cells


def degenerate_mark(result: Result) -> str:
    """`†` where a score comes from predictions that say nothing about their examples, with any seed."""
    return "†" if any(map(num_degenerate, result.cells or (result,))) else ""


def is_degenerate(result: Result) -> bool:
    """Whether all of its predictions say nothing about their examples, as far as these were kept."""
    return all(num_degenerate(cell) == cell.num for cell in result.cells or (result,))


def num_degenerate(cell: Result) -> int:
    """With how many seeds the same is predicted for all examples."""
    return cell.examples.table.num_degenerate if cell.examples and cell.examples.table else 0


def show_signal(signal: Signal | None) -> str:
    """`3.1`; `(0.9)` where nothing is decided."""
    if signal is None:
        return MISSING
    return f"({signal.ratio:.1f})" if signal.needs else f"{signal.ratio:.1f}"


def show_rows(
    table: ScoreTable, show: Callable[[TableCell], str], escape: Callable[[str], str]
) -> list[tuple[str, ...] | None]:
    """The rows of a table as text, the last one with the signals of its columns; None between blocks."""
    rows: list[tuple[str, ...] | None] = []
    for previous, row in zip((None, *table.rows), table.rows, strict=False):
        if previous is not None and previous.block != row.block:
            rows.append(None)
        rows.append((*map(escape, row.stub), *map(show, row.cells)))
    if any(table.signals):
        stub = ("signal ÷ noise", *[""] * (len(table.stub) - 1))
        rows += [None, tuple(map(escape, (*stub, *map(show_signal, table.signals))))]
    return rows


def to_markdown(table: ScoreTable) -> str:
    def show(cell: TableCell) -> str:
        result, mark = cell
        if result is None:
            return MISSING
        mean, half_width = show_share(result.mean) + degenerate_mark(result), show_share(result.half_width)
        bold, sign = ("**" if mark == "best" else ""), (" =" if mark == "tied" else "")
        return f"{bold}{mean}{bold} (± {half_width}){sign}"

    pairs = zip(table.columns, table.signals, strict=False)
    undecided = [
        f"{column} decides nothing here; what would: {signal.needs}"
        for column, signal in pairs
        if signal and signal.needs
    ]
    notes = [table.rule]
    if undecided:
        notes.append(f"{'; '.join(undecided)}.")
    places = ((row, place) for row in table.rows for place in zip(table.columns, row.cells, strict=True))
    missing = [f"{row.arm.name}: {column}" for row, (column, (result, _)) in places if result is None]
    if missing:
        notes.append(f"Missing: {'; '.join(missing)}.")
    rows = [row for row in show_rows(table, show, str) if row is not None]
    return markdown_text(table.title, (*table.stub, *table.columns), rows, len(table.stub), notes)


def to_latex(table: ScoreTable) -> str:
    def show(cell: TableCell) -> str:
        result, mark = cell
        if result is None:
            return "--"
        mean = show_share(result.mean) + escape_latex(degenerate_mark(result))
        if mark == "best":
            mean = rf"\textbf{{{mean}}}"
        half_width = show_share(result.half_width).replace(MISSING, "--")
        return rf"{mean}{'$^{=}$' if mark == 'tied' else ''} {{\scriptsize($\pm$\,{half_width})}}"

    header, rows = (*table.stub, *table.columns), show_rows(table, show, escape_latex)
    return latex_text(table.name, f"{table.title}. {table.rule}", header, rows, len(table.stub))


CSV_COLUMNS = (
    *("table", "arm", "parent", "size", "objective", "mask_percent", "pretrain_steps", "clm_steps", "mlm_steps"),
    *("cpt_steps", "family", "metric", "dataset", "mean", "half_width", "num_seeds", "mark"),
)


def to_csv(table: ScoreTable) -> str:
    """One line for each score, in percent, under the head of its column; nothing where something is missing or does not
    apply."""
    rows: list[Sequence[object]] = [CSV_COLUMNS]
    for row in table.rows:
        for column, (result, mark) in zip(table.columns, row.cells, strict=True):
            if result is None:
                continue
            own = [getattr(result.arm, name) for name in CSV_COLUMNS[2:10]]
            half_width = show_share(result.half_width).replace(MISSING, "")
            place = ("" if column == ALL_TASKS else result.family, result.metric, column)
            rows.append(
                (table.name, result.arm.name, *own, *place, show_share(result.mean), half_width, result.num, mark)
            )
    return csv_text(rows)


FILE_FORMATS = {".md": to_markdown, ".tex": to_latex, ".csv": to_csv}


def table_files(tables: Iterable[ScoreTable]) -> dict[str, str]:
    """Every table in every format: the names of files below the folder of a report, with their text."""
    return {f"tables/{table.name}{suffix}": show(table) for table in tables for suffix, show in FILE_FORMATS.items()}
