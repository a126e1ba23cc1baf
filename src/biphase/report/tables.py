"""Results → tables in the paper's form (its tables 2 to 17), as data, and as Markdown, LaTeX and CSV.

One table for each comparison, family and metric: arms in rows, datasets and their average in columns.
"""

import csv
import io
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from biphase.files import write_text
from biphase.report.results import (
    AVERAGE,
    FAMILIES,
    MEASURES,
    SETUPS,
    ReportArm,
    Result,
    ResultSet,
    arms_of,
    datasets_of,
    difference,
    families,
    find,
    metrics,
    select,
)

MISSING = "–"
RULE = (
    "Test scores in %: mean over fine-tuning seeds (± half of the 95 % interval). Bold: the best of its block. "
    "=: within noise of it, as the 95 % interval of the difference includes zero or cannot be told; paired by seed "
    "where the score of each seed is known, else by Welch's test from means and half-widths; not corrected for the "
    "number of comparisons. –: no score."
)

PUBLISHED_SETUPS = ("objective", "efficiency", "ratio", "cpt")
OBJECTIVES = {"clm": "CLM", "mlm": "MLM", "clm+mlm": "CLM → MLM", "none": "random"}


@dataclass(frozen=True)
class TableCell:
    result: Result | None
    mark: Literal["best", "tied", ""]


@dataclass(frozen=True)
class Row:
    arm: ReportArm
    stub: tuple[str, ...]
    cells: tuple[TableCell, ...]
    block: tuple[str | int, ...]
    """What is compared with each other: rows of the same block."""


@dataclass(frozen=True)
class Table:
    name: str
    """Of its files."""
    title: str
    setup: str
    metric: str
    stub: tuple[str, ...]
    columns: tuple[str, ...]
    rows: tuple[Row, ...]

    @property
    def missing(self) -> list[str]:
        """Arms and datasets without a score."""
        lost = [
            (row.arm.name, column)
            for row in self.rows
            for column, cell in zip(self.columns, row.cells, strict=True)
            if cell.result is None
        ]
        return [f"{arm}: {column}" for arm, column in lost]


@dataclass(frozen=True)
class Form:
    """How a comparison is laid out: what stands before the scores, and which rows compete."""

    stub: tuple[str, ...]
    describe: Callable[[ReportArm], tuple[str, ...]]
    block: Callable[[ReportArm], tuple[str | int, ...]]


def percent(mask: int | None) -> str:
    return MISSING if mask is None else f"{mask} %"


def describe_parent(arm: ReportArm) -> str:
    return f"{OBJECTIVES[arm.objective]} {arm.pretrain_steps:,}"


FORMS = {
    "objective": Form(
        ("size", "objective", "masked"),
        lambda arm: (arm.size, OBJECTIVES[arm.objective], percent(arm.mask_percent)),
        lambda arm: (arm.size,),
    ),
    "efficiency": Form(
        ("size", "steps", "objective"),
        lambda arm: (arm.size, f"{arm.pretrain_steps:,}", OBJECTIVES[arm.objective]),
        lambda arm: (arm.size, arm.pretrain_steps),
    ),
    "ratio": Form(
        ("size", "steps", "of them CLM", "of them MLM"),
        lambda arm: (arm.size, f"{arm.pretrain_steps:,}", f"{arm.clm_steps:,}", f"{arm.mlm_steps:,}"),
        lambda arm: (arm.size, arm.pretrain_steps),
    ),
    "adapted": Form(
        ("size", "CLM steps", "MLM steps", "masked"),
        lambda arm: (arm.size, f"{arm.clm_steps:,}", f"{arm.mlm_steps:,}", percent(arm.mask_percent)),
        lambda arm: (arm.size, arm.clm_steps, arm.mlm_steps),
    ),
    "cpt": Form(
        ("size", "continued steps", "parent"),
        lambda arm: (arm.size, f"{arm.cpt_steps:,}", describe_parent(arm)),
        lambda arm: (arm.size, arm.cpt_steps),
    ),
    "control": Form(("size", "model"), lambda arm: (arm.size, arm.name), lambda arm: (arm.size,)),
    "other": Form(("size", "arm"), lambda arm: (arm.size, arm.name), lambda arm: (arm.size,)),
}
assert FORMS.keys() == SETUPS.keys()


def make_tables(results: ResultSet) -> list[Table]:
    """A table for each comparison, family and metric with a result, in the paper's order."""
    return [
        make_table(part, setup, family, metric)
        for metric in metrics(results)
        for setup in SETUPS
        for part in [select(results, metric=metric, setup=setup)]
        for family in families(part)
    ]


def make_table(results: ResultSet, setup: str, family: str, metric: str) -> Table:
    """Of a comparison's results: a row for every arm, also for one that lacks this family."""
    form = FORMS[setup]
    columns = [*datasets_of(results, family, metric), AVERAGE]
    if len(columns) == 2:
        columns.pop()
    arms = arms_of(results)
    blocks = list(dict.fromkeys(form.block(arm) for arm in arms))
    rows = [row for block in blocks for row in make_block(results, form, block, columns, family, metric)]
    title = f"{SETUPS[setup]}, {FAMILIES[family]} ({MEASURES[metric][family]})"
    name = f"{setup}-{family.lower()}"
    if setup in PUBLISHED_SETUPS:
        number = 2 + PUBLISHED_SETUPS.index(setup) * len(FAMILIES) + list(FAMILIES).index(family)
        title, name = f"{title}, in the form of the paper's table {number}", f"table-{number:02d}-{name}"
    else:
        name = f"table-{name}"
    title = title[0].upper() + title[1:]
    return Table(f"{name}-{metric}", title, setup, metric, form.stub, tuple(columns), tuple(rows))


def make_block(
    results: ResultSet, form: Form, block: tuple[str | int, ...], columns: Sequence[str], family: str, metric: str
) -> list[Row]:
    arms = [arm for arm in arms_of(results) if form.block(arm) == block]
    scores = [[find(results, arm, family, column, metric) for arm in arms] for column in columns]
    cells = zip(*(mark_column(column) for column in scores), strict=True)
    return [Row(arm, form.describe(arm), row, block) for arm, row in zip(arms, cells, strict=True)]


def mark_column(scores: Sequence[Result | None]) -> list[TableCell]:
    """The best of the scores, and those that are not shown to be different from it. A score alone is neither."""
    known = [score for score in scores if score is not None]
    if len(known) < 2:
        return [TableCell(score, "") for score in scores]
    best = max(known, key=lambda score: score.mean)

    def mark(score: Result | None) -> Literal["best", "tied", ""]:
        if score is None or score is best:
            return "best" if score is best else ""
        gap = difference(best, score).against()
        return "" if gap.low > 0 else "tied"

    return [TableCell(score, mark(score)) for score in scores]


def number(value: float) -> str:
    """A share as a percentage, two decimals as in the paper; `–` for what is not known."""
    return MISSING if math.isnan(value) else f"{100 * value:.2f}"


def to_markdown(table: Table) -> str:
    def line(cells: Iterable[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    def show(cell: TableCell) -> str:
        if cell.result is None:
            return MISSING
        mean, half_width = number(cell.result.mean), number(cell.result.half_width)
        marked = {"best": f"**{mean}** (± {half_width})", "tied": f"{mean} (± {half_width}) ="}
        return marked.get(cell.mark, f"{mean} (± {half_width})")

    lines = [
        f"**{table.title}**",
        "",
        line((*table.stub, *table.columns)),
        "|" + ":---|" * len(table.stub) + "---:|" * len(table.columns),
        *(line((*row.stub, *map(show, row.cells))) for row in table.rows),
        "",
        RULE,
    ]
    if table.missing:
        lines += ["", f"Missing: {'; '.join(table.missing)}."]
    return "\n".join(lines) + "\n"


def to_latex(table: Table) -> str:
    """For `booktabs`, without document preamble."""

    def show(cell: TableCell) -> str:
        if cell.result is None:
            return "--"
        mean = number(cell.result.mean)
        if cell.mark == "best":
            mean = rf"\textbf{{{mean}}}"
        half_width = number(cell.result.half_width).replace(MISSING, "--")
        return rf"{mean}{'$^{=}$' if cell.mark == 'tied' else ''} {{\scriptsize($\pm$\,{half_width})}}"

    lines = []
    for previous, row in zip((None, *table.rows), table.rows, strict=False):
        if previous is not None and previous.block != row.block:
            lines.append(r"\midrule")
        lines.append(" & ".join((*map(escape_latex, row.stub), *map(show, row.cells))) + r" \\")
    return "\n".join(
        [
            r"\begin{table}",
            r"\centering\small",
            rf"\caption{{{escape_latex(table.title)}. {escape_latex(RULE)}}}",
            rf"\label{{tab:{table.name}}}",
            rf"\begin{{tabular}}{{{'l' * len(table.stub)}{'r' * len(table.columns)}}}",
            r"\toprule",
            " & ".join(map(escape_latex, (*table.stub, *table.columns))) + r" \\",
            r"\midrule",
            *lines,
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
            "",
        ]
    )


LATEX = {
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "→": r"$\to$",
    "–": "--",
}


def escape_latex(text: str) -> str:
    return "".join(LATEX.get(sign, sign) for sign in text)


CSV_COLUMNS = (
    *("table", "arm", "parent", "size", "objective", "mask_percent", "pretrain_steps", "clm_steps", "mlm_steps"),
    *("cpt_steps", "family", "metric", "dataset", "mean", "half_width", "num_seeds", "mark"),
)


def to_csv(table: Table) -> str:
    """One line for each score, in percent; nothing where something is missing or does not apply."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for row in table.rows:
        for cell in row.cells:
            if (result := cell.result) is None:
                continue
            arm = result.arm
            writer.writerow(
                (
                    *(table.name, arm.name, arm.parent, arm.size, arm.objective, arm.mask_percent),
                    *(arm.pretrain_steps, arm.clm_steps, arm.mlm_steps, arm.cpt_steps),
                    *(result.family, result.metric, result.dataset, number(result.mean)),
                    *(number(result.half_width).replace(MISSING, ""), result.num, cell.mark),
                )
            )
    return file.getvalue()


FORMATS = {".md": to_markdown, ".tex": to_latex, ".csv": to_csv}


def write_tables(tables: Iterable[Table], folder: Path) -> list[Path]:
    """Every table in every format; the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for table in tables:
        for suffix, show in FORMATS.items():
            paths.append(folder / f"{table.name}{suffix}")
            write_text(paths[-1], show(table))
    return paths
