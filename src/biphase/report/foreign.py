"""A table of other people's scores → a verdict on every pair of methods, ranks with intervals, shares of compute.

A row is one score of a method on a task, with its seed, compute and contributions of test examples if known. Tests,
averages, prices and the page are the same as for our own studies. Notes say what the table leaves unknown.
"""

import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from biphase.corpus.forms import PlacedRow, Row, is_missing, rows_in_memory, unfold_euroeval, unfold_mteb
from biphase.corpus.rows import column, plain_name, read_json_file, read_number, rows_of_file
from biphase.corpus.text import are_names
from biphase.errors import InputError, first_of, refuse_doubles, refuse_unknown
from biphase.files import content_hash, parse_json
from biphase.finetuning.choosing import RateChoice
from biphase.finetuning.scores import ExampleTable, KeptExamples
from biphase.report import contrasts, tables
from biphase.report.encodeval import CELL, SAME_MEAN, grid_rows
from biphase.report.equivalents import AXES, LEAST_RUNGS, PriceList, list_prices, price_sentence, price_tables
from biphase.report.formats import show_count, show_power, with_unit
from biphase.report.page import PageText, write_report
from biphase.report.results import (
    ALL_TASKS,
    FAMILY_NAMES,
    SCORE_DECIMALS,
    Over,
    ReportArm,
    Result,
    ResultSet,
    read_words,
)
from biphase.report.tables import Cell, Table, interval_cell
from biphase.report.verdicts import TaskComparison, judge_all, pair_table, ranked_names
from biphase.tasks.examples import canonical_label

if TYPE_CHECKING:
    import pandas

CASELESS = ("method", "task", "seed", "pretraining_seed", "score")
COLUMNS = (*CASELESS, *AXES, "examples")
COLUMN_REMEDY = "name your column for it: rename={{'THEIRS': '{name}'}} in Python, --rename THEIRS={name}"
Scale = Literal["share", "percent"]


# Files → rows


def read_tables(source: Any, rename: Mapping[str, str]) -> Iterator[PlacedRow]:
    """Yield the rows of files, folders or objects in memory, with our names of columns (`name_columns`). If there are
    several files, the name of a file is the method of its rows that have none. Raises `InputError` for a column that is
    named twice, and for a renamed one that no row has."""
    placed: Iterator[tuple[dict[str, str], PlacedRow]]
    if are_names(source):
        paths = [Path(source)] if isinstance(source, str | Path) else [*map(Path, source)]
        metrics = dict[str, str]()
        read = ((path, folder_rows(path) if path.is_dir() else file_rows(path, metrics)) for path in paths)
        placed = (({"method": path.stem} if len(paths) > 1 else {}, row) for path, rows in read for row in rows)
    else:
        placed = (({}, (f"row {index}", row)) for index, row in enumerate(rows_in_memory(source)))
    seen = dict[str, None]()
    for named, (location, row) in placed:
        seen |= dict.fromkeys(row)
        names = name_columns(row, rename)
        refuse_doubles(f"{location}: the column", names)
        own = dict(zip(names, row.values(), strict=True))
        yield location, own | {name: value for name, value in named.items() if is_missing(own.get(name))}
    for theirs in rename if seen else ():
        refuse_unknown("rename: column", theirs, seen)


def name_columns(row: Mapping[str, Any], rename: Mapping[str, str]) -> list[str]:
    """Return the names of a row's columns, renamed. A name that is ours but for blanks around it becomes ours, and one
    of `CASELESS` also in another case, unless another column has that name."""
    names = [rename.get(name, name) for name in row]
    plain = [plain_name(str(name)) for name in names]
    plain = [name.casefold() if name.casefold() in CASELESS else name for name in plain]
    return [ours if ours in COLUMNS and ours not in names else name for name, ours in zip(names, plain, strict=True)]


def file_rows(path: Path, metrics: dict[str, str]) -> Iterator[PlacedRow]:
    """Yield the rows of a table, or of EuroEval's results (`unfold_euroeval`, with `metrics`)."""
    for location, row in rows_of_file(path):
        if not isinstance(row.get("results"), dict):
            yield location, row
            continue
        try:
            yield from ((location, of_seed) for of_seed in unfold_euroeval(row, metrics))
        except (KeyError, TypeError, AttributeError, StopIteration):
            told = "not a line of EuroEval's results (model, dataset, results.raw, results.total)"
            raise InputError(f"{location}: {told}") from None


def folder_rows(folder: Path) -> Iterator[PlacedRow]:
    """Yield the rows of a folder of EncodEval's results (`grid_rows`) or of MTEB's (`MODEL/REVISION/TASK.json`). All
    files of a task of MTEB count by the first split that they share, or else each by its own first."""
    yield from grid_rows(folder)
    read, shared = list[tuple[Path, str, str, dict[str, list[Row]]]](), dict[str, list[str]]()
    for path in sorted(folder.rglob("*.json")):
        if CELL.search(path.parent.name):
            continue
        content = read_json_file(path)
        try:
            if "task_name" in content and (by_split := unfold_mteb(content)):
                task, method = content["task_name"], path.parts[-3].replace("__", "/")
                shared[task] = [split for split in shared.get(task, by_split) if split in by_split]
                read.append((path, method, task, by_split))
        except (ArithmeticError, KeyError, TypeError, AttributeError, IndexError):
            raise InputError(f"{path}: neither a task's result of MTEB nor a cell of EncodEval") from None
    for path, method, task, by_split in read:
        for row in by_split[next(iter(shared[task] or by_split))]:
            yield str(path), {"method": method, **row}


# Rows → results


BudgetKey = tuple[float | None, ...]
"""The compute of a run in each unit of `AXES`; None if unknown."""


class ForeignScore(NamedTuple):
    """A score, as read from a row of a table."""

    location: str
    method: str
    task: str
    compute: BudgetKey
    seeds: tuple[Any, Any]
    """The seeds of pretraining and of fine-tuning; None if the table has none."""
    value: float
    examples: np.ndarray | None
    choice: RateChoice | None = None
    """The rates among which validation chose, for EncodEval's results."""
    num_lost: int = 0
    """The number of seeds without a cell at their rate, for EncodEval's results."""
    others: Mapping[str, Any] = {}
    """The values of the columns that are not ours."""


def parse_examples(location: str, value: Any, score: float) -> np.ndarray | None:
    """Return the contribution of each example, or None if the table has none. Raises `InputError` unless the score is
    the mean of these contributions."""
    if value is None or (isinstance(value, str) and not value):
        return None
    try:
        values = np.array([float(number) for number in (parse_json(value) if isinstance(value, str) else value)])
        is_mean = abs(float(np.mean(values)) - score) <= SAME_MEAN * (100 if abs(score) > 1 else 1)
    except (ArithmeticError, TypeError, ValueError):
        is_mean = False
    if not is_mean:
        remedy = "give a list of numbers whose mean is the score, or leave the column out"
        raise InputError(f"{location}: the mean of column 'examples' is not the score {score:g}; {remedy}")
    return values


def parse_rows(source: Any, rename: Mapping[str, str]) -> tuple[list[ForeignScore], list[str]]:
    """Read all scores, leave out averages (`leave_out_averages`), and join the budgets of each method (`join_budgets`);
    return also notes about that. Raises `InputError` for a missing, malformed or repeated score, and for a single
    method."""
    for ours in rename.values():
        refuse_unknown("rename: column", ours, COLUMNS)
    scores, runs = list[ForeignScore](), defaultdict[str, list[tuple[BudgetKey, object]]](list)
    only_task = next((theirs for theirs, ours in rename.items() if ours == "score"), "score")
    for location, row in read_tables(source, rename):
        method = read_name(location, "method", column(location, row, "method", COLUMN_REMEDY))
        task = read_name(location, "task", row.get("task", only_task))
        if task == "OT":
            raise InputError(f"{location}: reports call the mean over tasks OT; rename this task")
        value = read_number(location, "score", column(location, row, "score", COLUMN_REMEDY))
        compute = tuple(None if is_missing(row.get(axis)) else read_number(location, axis, row[axis]) for axis in AXES)
        seeds = read_seed(row.get("pretraining_seed")), read_seed(row.get("seed"))
        examples = parse_examples(location, row.get("examples"), value)
        others = {name: value for name, value in row.items() if name not in COLUMNS}
        choice = row["choice"] if isinstance(row.get("choice"), RateChoice) else None  # a table may have such a column
        num_lost = row["num_lost"] if choice else 0
        scores.append(ForeignScore(location, method, task, compute, seeds, value, examples, choice, num_lost, others))
    scores, notes = leave_out_averages(scores)
    refuse_partial_compute(scores)
    for score in scores:
        runs[score.method].append((score.compute, (score.task, score.seeds)))
    if not runs:
        names = [source] if isinstance(source, str | Path) else (are_names(source) and source) or ["the table"]
        raise InputError(f"no rows of scores in {first_of([*map(str, names)])}")
    if len(runs) < 2:
        raise InputError(f"{show_count(len(runs), 'method')} ({first_of([*runs])}): there is nothing to compare")
    budgets = {method: join_budgets(of_method) for method, of_method in runs.items()}
    scores = [score._replace(compute=budgets[score.method][score.compute]) for score in scores]
    refuse_second(scores)
    joined = [name for name, own in budgets.items() if len({*map(round_budget, own)}) > len({*own.values()})]
    notes += [read_words()["unknown"]["budgets"].format(names=first_of(joined))] if joined else []
    lost = dict.fromkeys(
        f"{score.method} on {score.task} ({show_count(score.num_lost, 'seed')})" for score in scores if score.num_lost
    )
    notes += [read_words()["unknown"]["lost"].format(names=first_of([*lost]))] if lost else []
    return scores, notes


def read_name(location: str, column_name: str, value: Any) -> str:
    """Return the name of a method or task, without blanks around it. Raises `InputError` for an empty field."""
    if is_missing(value):
        raise InputError(f"{location}: column '{column_name}' is empty; fill it in, or remove the row")
    return str(value).strip()


def refuse_second(scores: Iterable[ForeignScore]) -> None:
    """Raise `InputError` for a second score of a method on a task with the same compute and seeds."""
    first = dict[tuple[Any, ...], ForeignScore]()
    for score in scores:
        before = first.setdefault((score.method, score.task, score.compute, score.seeds), score)
        if before is score:
            continue
        seed = next((seed for seed in reversed(score.seeds) if seed is not None), None)
        told = "without a `seed`" if seed is None else f"also with seed {seed}"
        remedy = "drop one" if seed is not None else "give each a `seed`, or drop one"
        if unlike := [name for name, value in score.others.items() if str(value) != str(before.others.get(name))]:
            remedy = f"they differ in {first_of(unlike)}: {remedy}, or rename a column that tells their tasks to `task`"
        second = f"a second score of {score.method} on {score.task}, {told} (first: {before.location})"
        raise InputError(f"{score.location}: {second}; {remedy}")


def refuse_partial_compute(scores: Iterable[ForeignScore]) -> None:
    """Raise `InputError` if some scores of a method have a unit of compute that its others lack: these would count as
    another budget."""
    first = dict[str, ForeignScore]()
    for score in scores:
        before = first.setdefault(score.method, score)
        for axis, *values in zip(AXES, score.compute, before.compute, strict=True):
            if values.count(None) == 1:
                lacking, other = (score, before) if values[0] is None else (before, score)
                told = f"{lacking.location}: {score.method} has no {axis} here, but at {other.location}"
                raise InputError(f"{told}; give {axis} for all of its rows, or for none")


MEANS = itertools.product(("", "macro "), ("average", "avg", "mean", "overall"), ("", " score", " task", " tasktype"))
AVERAGE_NAMES = {*map("".join, MEANS), *(f"{code.lower()} mean" for code in FAMILY_NAMES), ALL_TASKS}
"""The names, in small letters and without signs, under which a table has a row for a mean over tasks: those of
leaderboards, of MTEB, and of our own tables."""


def leave_out_averages(scores: Sequence[ForeignScore]) -> tuple[list[ForeignScore], list[str]]:
    """Leave out a table's own means over tasks, which would count as one more task, and return a note about them. In a
    table without other tasks, they stay, under names that our own averages do not have."""
    tasks = list(dict.fromkeys(score.task for score in scores))
    means = [task for task in tasks if re.sub(r"[\W_]+", " ", task).strip().casefold() in AVERAGE_NAMES]
    if not means:
        return [*scores], []
    if len(means) == len(tasks):
        names = {task: task.casefold().replace(ALL_TASKS, f"mean over {ALL_TASKS}") for task in tasks}
        return [score._replace(task=names[score.task]) for score in scores], []
    words, kept = read_words()["unknown"], [score for score in scores if score.task not in means]
    told = [words["averages"].format(names=first_of(means))]
    if lacking := sorted({score.method for score in scores} - {score.method for score in kept}):
        told.append(words["methods"].format(names=first_of(lacking)))
    return kept, told


def read_seed(value: Any) -> Any:
    """Return a seed in one spelling: 0, "0", " 0" and 0.0 are equal; None if the table has none."""
    return None if is_missing(value) else canonical_label(str(value).strip())


NEAR_BUDGETS = 1.05
"""The largest factor between neighbouring budgets that count as one."""


def round_budget(compute: BudgetKey) -> BudgetKey:
    return tuple(number and float(f"{number:.3g}") for number in compute)


def join_budgets(runs: Iterable[tuple[BudgetKey, object]]) -> dict[BudgetKey, BudgetKey]:
    """Map the compute of each run to the mean of its budget, rounded to three digits. `runs` are pairs of a compute and
    a key. Neighbours within 5 % are one budget, unless a key occurs at two of them, as on a finely spaced ladder."""
    keys: dict[BudgetKey, list[object]] = defaultdict(list)
    for compute, key in runs:
        keys[compute].append(key)
    budgets = list[list[BudgetKey]]()
    for compute in sorted(keys, key=lambda compute: [number or 0.0 for number in compute]):
        if budgets and all(map(are_near, budgets[-1][-1], compute)):
            budgets[-1].append(compute)
        else:
            budgets.append([compute])
    joined = dict[BudgetKey, BudgetKey]()
    for budget in budgets:
        held = [key for compute in budget for key in {*keys[compute]}]
        runs_of_axis = zip(*(compute for compute in budget for _ in keys[compute]), strict=True)
        mean = tuple(None if None in numbers else float(np.mean(numbers)) for numbers in runs_of_axis)
        joined |= {compute: round_budget(compute if len({*held}) < len(held) else mean) for compute in budget}
    return joined


def are_near(a: float | None, b: float | None) -> bool:
    """Tell whether two numbers are equal or differ by at most `NEAR_BUDGETS`."""
    return a == b or (a is not None and b is not None and 0 < min(a, b) >= max(a, b) / NEAR_BUDGETS)


UNLIKE_SCALES = 20
"""The factor between the largest scores of two methods from which shares beside percent are likelier."""


def refuse_unlike_scales(scores: Sequence[ForeignScore]) -> None:
    """Raise `InputError` if one method seems to have shares where another has percent."""
    largest = dict[str, float]()
    for score in scores:
        largest[score.method] = max(largest.get(score.method, 0.0), abs(score.value))
    top = max(largest, key=lambda method: largest[method])
    small = [method for method, most in largest.items() if 0 < most <= 1 and UNLIKE_SCALES * most <= largest[top]]
    if small and largest[top] > 1:
        beside = f"{top} has scores up to {largest[top]:g}, and {first_of(small)} none above 1"
        remedy = "Give all scores in one scale; if they are in one, give `scale`"
        raise InputError(f"{beside}: are these shares, and those percent? {remedy}")


def find_factor(scores: Sequence[ForeignScore], scale: Scale | None) -> tuple[float, str]:
    """Return the factor that turns scores into shares, and a sentence with the reason (empty if `scale` is given).
    Raises `InputError` if tasks differ in scale, or if a score lies beyond 100."""
    if scale:
        return (1.0 if scale == "share" else 0.01), ""
    largest = dict[str, float]()
    for score in scores:
        largest[score.task] = max(largest.get(score.task, 0.0), abs(score.value))
    top, shares = max(largest, key=lambda task: largest[task]), [task for task, most in largest.items() if most <= 1]
    if largest[top] <= 1:
        return 1.0, "No score is above 1, so scores count as shares and appear in %."
    if shares or largest[top] > 100:
        mixed = f"up to {largest[top]:g} on {top}" + (f", never above 1 on {first_of(shares)}" if shares else "")
        raise InputError(f"scores are neither all shares nor all percent: {mixed}; give `scale`")
    return 0.01, "Some scores are above 1, so scores count as percent."


def mean_by_task(scores: Sequence[ForeignScore]) -> tuple[list[ForeignScore], list[str]]:
    """Turn each task into a seed of a single task, with the mean over the task's own seeds as its score. Leave out
    methods that lack a task, and return their names. Raises `InputError` if all do."""
    values: dict[tuple[str, BudgetKey], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for score in scores:
        values[score.method, score.compute][score.task].append(score.value)
    tasks = {score.task for score in scores}
    means, left_out = [], list[str]()
    for (method, compute), by_task in values.items():
        if by_task.keys() != tasks:
            left_out.append(f"{method} @ {tell_budget(compute)}" if any(compute) else method)
        for task, of_task in by_task.items() if by_task.keys() == tasks else ():
            name = f"mean over {len(tasks)} tasks"
            means.append(ForeignScore("", method, name, compute, (None, task), float(np.mean(of_task)), None))
    if not means:
        raise InputError(f"no method has scores on all {len(tasks)} tasks: give only tasks that the methods share")
    return means, left_out


def tell_budget(compute: BudgetKey, most: int = 1) -> str:
    """Write the first known units of a budget, one unless `most` says more: `2e18 FLOPs`; empty if none is known."""
    known = [f"{show_power(value)} {unit}" for value, unit in zip(compute, AXES.values(), strict=True) if value]
    return ", ".join(known[:most])


def make_results(scores: Sequence[ForeignScore], factor: float) -> ResultSet:
    """Make a result for each method, budget and task. Values times `factor` are shares, for which more is better.
    Methods are paired by equal seeds, and compared at near budgets (`join_budgets`)."""
    classes = join_budgets((score.compute, score.method) for score in scores)
    budgets, cells = defaultdict(set), defaultdict(list)
    for score in scores:
        budgets[score.method].add(score.compute)
        cells[score.method, score.compute, score.task].append(score)
    has_ladder = any(len(of_method) > 1 for of_method in budgets.values())
    distinct = sorted({seed for score in scores for seed in score.seeds}, key=str)
    seeds = {seed: index for index, seed in enumerate(distinct)}
    results = []
    for (method, compute, task), of_cell in cells.items():
        of_cell.sort(key=lambda score: [seeds[seed] for seed in score.seeds])
        budget = tell_budget(classes[compute]) if has_ladder else ""
        alike = [other for other in budgets[method] if tell_budget(other) == tell_budget(compute)]
        spent_on = tell_budget(compute, most=1 if len(alike) == 1 else len(AXES))
        name = f"{method} @ {spent_on}" if len(budgets[method]) > 1 else method
        spent: dict[str, Any] = dict(zip(AXES, compute, strict=True))
        arm = ReportArm(name, "foreign", objective="", curriculum=method, budget_class=budget, **spent)
        pretrainings, tunings = zip(*([seeds[seed] for seed in score.seeds] for score in of_cell), strict=True)
        sizes, kept = {0 if score.examples is None else len(score.examples) for score in of_cell}, None
        if 0 not in sizes:
            if len(sizes) > 1:
                raise InputError(f"{name} on {task}: seeds differ in their number of examples; give one test set")
            values_SN = factor * np.array([score.examples for score in of_cell])
            kept = KeptExamples((), ExampleTable(content_hash([task, *sizes]), values_SN))
        samples = tuple(factor * score.value for score in of_cell)
        pretrainings = pretrainings if any(score.seeds[0] is not None for score in of_cell) else ()
        result = Result(arm, "OT", task, "standard", samples, None, tunings, pretrainings, examples=kept)
        if choice := of_cell[0].choice:
            noise = choice.draw_noise()
            scaled = replace(noise, variance=factor**2 * noise.variance)
            result = replace(result, choice=replace(choice, noise=scaled))
        results.append(result)
    return ResultSet(tuple(results), decimals=choose_decimals(results))


def choose_decimals(results: Sequence[Result]) -> int:
    """Choose the decimals of scores: those of the paper, unless they would show the usual half width as zero. Then two
    of its digits are shown, as of losses in bits per byte."""
    usual = median([100 * result.interval.half_width for result in results if result.interval.half_width > 0] or [1.0])
    return SCORE_DECIMALS if usual >= 10**-SCORE_DECIMALS else 1 - math.floor(math.log10(usual))


# Results → verdicts


@dataclass(frozen=True)
class Standing:
    """Verdicts on the methods of a table, by the mean over all tasks, between methods with the same budget."""

    results: ResultSet
    pairs: tuple[TaskComparison, ...]
    """Every pair of methods with all tasks, the better mean first. p-values and intervals are adjusted for all pairs
    (Holm)."""
    places: Mapping[str, tuple[int, int]]
    """Method → the ends of its rank's interval, the best mean first."""
    prices: tuple[PriceList, ...]
    notes: tuple[str, ...]
    """Sentences about how scores were read, and about what they leave unknown."""

    @property
    def sentences(self) -> list[str]:
        """The answer: sentences about the best methods, the number of separated pairs, and the prices."""
        by_budget: dict[object, list[TaskComparison]] = defaultdict(list)
        for pair in self.pairs:
            by_budget[pair.a.arm.block].append(pair)
        judged = [*map(tell_pairs, by_budget.values())] or [read_words()["unknown"]["pairs"]]
        return [*judged, *map(price_sentence, self.prices)]

    @cached_property
    def tables(self) -> tuple[Table, ...]:
        """The tables of ranks, of pairs and of shares of compute, without empty ones."""
        prices = itertools.chain(*map(price_tables, self.prices))
        judged = rank_table(self), pair_table(self.pairs, self.results)
        return tuple(table for table in (*judged, *prices) if table.rows)

    @property
    def frames(self) -> "dict[str, pandas.DataFrame]":
        """Name of a CSV file → its table: `ranks`, `pairs` and, with a ladder, `compute-equivalents-methods`."""
        import pandas

        shown = {table.name: table.records for table in self.tables if table.records}
        return {name: pandas.DataFrame(list(rows), columns=list(heads)) for name, (heads, *rows) in shown.items()}

    def __str__(self) -> str:
        return "\n".join([*self.sentences, *self.notes])

    def report(self, out: str | Path = "results-report") -> Path:
        """Write tables, a figure and one HTML page into a folder; return the path of the page."""
        words: dict[str, str] = read_words()["foreign_page"] | {"answer": " ".join(self.sentences)}
        judgements = tuple(table for table in self.tables if table.name in ("ranks", "pairs"))
        page_text = PageText(**words, notes=self.notes, judgements=judgements, listed=self.prices)  # type: ignore[arg-type]
        return write_report(self.results, Path(out), page_text)[0]


def compare_methods(results: ResultSet) -> tuple[tuple[TaskComparison, ...], dict[str, tuple[int, int]]]:
    """Judge every pair of methods at the same budget, and find the interval of each rank: from 1 + the number of
    methods shown to be better, to the number of all methods minus those shown to be worse. All rank intervals are right
    at once with probability 95 %, because all verdicts are (Al Mohamad, Goeman and van Zwet 2022)."""
    means = [scores[ALL_TASKS] for scores in results.scores.values() if ALL_TASKS in scores]
    ranked = sorted(means, key=lambda mean: -mean.mean)
    pairs = [(a, b) for a, b in itertools.combinations(ranked, 2) if a.arm.block == b.arm.block]
    judged = judge_all([TaskComparison(a, b, contrasts.difference(a, b)) for a, b in pairs])
    shown = [pair for pair in judged if pair.verdict == "A better"]
    places = {}
    for mean in ranked:
        size = sum(rival.arm.block == mean.arm.block for rival in ranked)
        better = sum(pair.b is mean for pair in shown)
        worse = sum(pair.a is mean for pair in shown)
        if size > 1:
            places[mean.arm.name] = (1 + better, size - worse)
    return tuple(judged), places


def tell_pairs(pairs: Sequence[TaskComparison]) -> str:
    """Write which methods are best at a budget: `A, B are not separated at the top of 4 methods; 3 of 6 pairs
    separated, 1 of 3 neighbours in rank.`"""
    names, budget = ranked_names(pairs), pairs[0].a.arm.budget_class
    at = f"At {budget}: " if budget else ""
    if all(pair.verdict == "cannot be told" for pair in pairs):
        return f"{at}No verdict on {show_count(len(names), 'method')}: {pairs[0].notes[-1]}."
    tied = [pair.b.arm.name for pair in pairs if pair.a.arm.name == names[0] and pair.verdict != "A better"]
    top = f"{first_of([names[0], *tied], 5)} are not separated at the top of" if tied else f"{names[0]} is the best of"
    neighbours = [pair for pair in pairs if names.index(pair.b.arm.name) == names.index(pair.a.arm.name) + 1]
    of_all, of_neighbours = (sum(pair.verdict == "A better" for pair in group) for group in (pairs, neighbours))
    counts = f"{of_all} of {show_count(len(pairs), 'pair')} separated"
    if untold := sum(pair.verdict == "cannot be told" for pair in pairs):
        counts += f" ({untold} cannot be told)"
    return f"{at}{top} {len(names)} methods; {counts}, {of_neighbours} of {len(neighbours)} neighbours in rank."


RANK_COLUMNS = ("half_width", "rank_low", "rank_high", "num_seeds")
"""The columns of the CSV file of ranks after the method, its budget and its score."""


def rank_table(standing: Standing) -> Table:
    """Make a table with a row for every method with all tasks, budget by budget."""
    rows = []
    unit = standing.results.unit
    records: list[Sequence[object]] = [("method", "budget", "percent" if unit else "score", *RANK_COLUMNS)]
    means = {name: standing.results.scores[name][ALL_TASKS] for name in standing.places}
    budgets = list(dict.fromkeys(mean.arm.budget_class for mean in means.values()))
    shows_budgets, decimals = len(budgets) > 1, standing.results.decimals
    for name, mean in sorted(means.items(), key=lambda item: budgets.index(item[1].arm.budget_class)):
        (low, high), budget = standing.places[name], mean.arm.budget_class
        texts = f"{low}" if low == high else f"{low} to {high}", str(mean.num), *([budget] if shows_budgets else [])
        rows.append(tables.TableRow((name,), (interval_cell(mean.interval, decimals), *map(Cell, texts)), budget))
        numbers = 100 * mean.mean, 100 * mean.interval.half_width, low, high, mean.num
        records.append((name, budget, *numbers))
    heads = (with_unit("score", unit), "rank", standing.results.over, *(["budget"] if shows_budgets else []))
    return Table("ranks", "Ranks", ("method",), heads, tuple(rows), (read_words()["ranks_rule"],), records, unit=unit)


def tell_unknown(results: ResultSet, over: Over) -> Iterator[str]:
    """Yield notes about the repetitions of the tests, and about what the table leaves unknown."""
    words, cells = read_words()["unknown"], [result for result in results.results if not result.cells]
    if over == "tasks":
        yield words["tasks"]
    elif not any(cell.pretraining_seeds for cell in cells):
        yield words["pretraining"]
    if single := list(dict.fromkeys(cell.arm.name for cell in cells if cell.num == 1)):
        hint = words["over_tasks"] if len({cell.dataset for cell in cells}) > 1 else ""
        yield words["seeds"].format(names=first_of(single)) + hint
    if over == "seeds" and not all(cell.examples for cell in cells):
        yield words["examples"]
    if lacking := [arm.name for arm in results.models if ALL_TASKS not in results.scores[arm.name]]:
        yield words["methods"].format(names=first_of(lacking))
    unpriced = [arm.curriculum for arm in results.models if not arm.budget_class]
    if len(unpriced) < len(results.models) and unpriced:
        yield words["compute"].format(names=first_of(unpriced))
    if partial := list_partial(cells):
        yield words["partial"].format(names=first_of(partial))
    samples = [sample for cell in cells for sample in cell.samples]
    if min(samples) < 0 < max(samples):
        yield words["negative"]
    for names in ({cell.arm.curriculum for cell in cells}, {cell.dataset for cell in cells}):
        alike = [name for name, number in Counter(map(str.casefold, names)).items() if number > 1]
        if alike:
            yield words["alike"].format(names=first_of(alike))


def list_partial(cells: Sequence[Result]) -> list[str]:
    """Name the methods with seeds that lack some of their tasks, and count these seeds: `B (1 seed)`."""
    counts: dict[str, Counter[tuple[int, int]]] = defaultdict(Counter)
    for cell in cells:
        counts[cell.arm.name].update(zip(cell.pretraining_seeds or [0] * cell.num, cell.seeds, strict=True))
    num_tasks = Counter(cell.arm.name for cell in cells)
    partial = {name: sum(num < num_tasks[name] for num in own.values()) for name, own in counts.items()}
    return [f"{name} ({show_count(number, 'seed')})" for name, number in partial.items() if number]


def judge_table(
    table: Any, baseline: str | None, scale: Scale | None, lower_is_better: bool, over: Over, rename: Mapping[str, str]
) -> Standing:
    """Judge the methods of a table, with the arguments of `biphase.equivalent`."""
    scores, joined = parse_rows(table, rename)
    if not lower_is_better and scale is None:
        refuse_unlike_scales(scores)
    factor, told = find_factor(scores, scale) if scale or not lower_is_better else (0.01, "")
    signed = read_words()["unknown"]["sign"] if lower_is_better else ""
    if over == "tasks":
        scores, left_out = mean_by_task(scores)
        joined = [*joined, read_words()["unknown"]["methods"].format(names=first_of(left_out))] if left_out else joined
    results = make_results(scores, -factor if lower_is_better else factor)
    results = contrasts.with_averages(replace(results, unit="" if lower_is_better and not scale else "%", over=over))
    budgets = Counter(arm.curriculum for arm in results.models)
    refuse_unknown("baseline", baseline or next(iter(budgets)), budgets)
    ladders = [method for method, num in budgets.items() if num >= LEAST_RUNGS]
    chosen = baseline or (ladders[0] if len(ladders) == 1 else "")
    prices, lacking = list_prices(results, method=chosen) if chosen else ([], [])
    if len(ladders) > 1 and not chosen:
        lacking = [f"No shares of compute: {first_of(ladders)} have {LEAST_RUNGS} budgets or more; name a `baseline`."]
    notes = filter(None, (told, signed, *joined, *tell_unknown(results, over), *lacking))
    return Standing(results, *compare_methods(results), tuple(prices), tuple(notes))
