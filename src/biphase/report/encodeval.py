"""Cells of EncodEval → results, the same as from our own cells; the authors' published cells → a report on the paper.

EncodEval's folder `results/` has a file for each fine-tuning, `MODEL/FAMILY/TASK/CELL/results.json`. CELL ends with
`lrRATE_sdSEED`. The file has, for validation and for test, the score and the score of each example (`scores_i`).
"""

import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic_core import from_json

from biphase import console
from biphase.corpus.rows import read_number
from biphase.errors import InputError, first_line, first_of
from biphase.files import reading
from biphase.finetuning.config import FinetuneConfig
from biphase.finetuning.scores import GridPoint, KeptExamples, Score, ScoreSet, show_rate
from biphase.report.contrasts import with_averages
from biphase.report.formats import MISSING, csv_text, show_points, show_share
from biphase.report.page import PageText, WrittenReport, write_report
from biphase.report.paper import (
    TOKENS_PER_STEP,
    judge_paper,
    measure_findings,
    place_arms,
    read_findings,
    read_reference,
)
from biphase.report.results import AVERAGE, PUBLISHED_DIGIT, ReportArm, Result, ResultSet, select_rate, with_cohorts
from biphase.report.statistics import Interval, mean_interval
from biphase.report.tables import Cell, Table, TableRow
from biphase.tasks.spec import EVALUATED_SPLITS

CELL = re.compile(r"lr(\d+(?:\.\d+)?(?:e-?\d+)?)_sd(\d+)$")
MEASURE = "score"
SAME_MEAN = 1e-4
"""The largest difference between a share and the mean of its examples: published scores are rounded to 0.01 %."""


@dataclass(frozen=True)
class CellGrid:
    """The cells of a model on a task."""

    model: str
    task: str
    paths: Mapping[GridPoint, Path]

    def read(self, points: Iterable[GridPoint] = ()) -> ScoreSet:
        """Read the cells. A point of `points` without a cell, or with a broken one, counts as a diverged training:
        cells are mostly missing at high rates, and a rate should not win by its survivors."""
        scores, broken = [], dict[Path, str]()
        for rate, seed in sorted({*self.paths, *points}):
            fields, path = DIVERGED, self.paths.get((rate, seed))
            try:
                fields = read_cell(path) if path else DIVERGED
            except InputError as error:
                assert path
                broken[path] = str(error)
            names: dict[str, Any] = {
                "model": self.model,
                "task": self.task,
                "trained_on": self.task,
                "cell": f"{rate} {seed}",
            }
            unknown: dict[str, Any] = dict.fromkeys(("model_hash", "source", "data_hash"), "") | {
                "protocol": 0,
                "num_steps": 0,
            }
            unknown |= {"final_loss": None, "seconds": {}, "machine": {}}
            scores.append(Score(**names, **unknown, **fields, metric=MEASURE, config=make_config(rate, seed)))
        return ScoreSet(tuple(scores), broken)

    def choose_rates(self, scores: ScoreSet) -> Result:
        """Choose the rate of each seed by the other seeds (`select_rate`). Keep the test examples at these rates and
        the noise of the choice, and free the other examples of `scores`."""
        result = select_rate(scores, self.model, self.task)
        assert result.examples and result.choice
        result.choice.draw_noise()
        table = result.examples.read()
        for score in scores.scores:
            score.contributions.clear()
        kept = KeptExamples(result.examples.scores, table)
        num_runs = sum(not score.diverged for score in scores.scores)
        return replace(
            result,
            examples=None if table.why_unknown else kept,
            predicted=kept if table.why_unknown else None,
            num_runs=num_runs,
        )


DIVERGED: Mapping[str, Any] = {"metrics": {}, "num_examples": {}, "diverged": True}
"""The fields of a `Score` without a cell, or with a score that is not finite."""


def read_cell(path: Path) -> Mapping[str, Any]:
    """Read the fields of a `Score` that a cell has. A score that is not the mean of its examples, as for some metrics,
    has no contributions. Raises `InputError` for a file that is no such cell."""
    with reading(path):
        text = path.read_bytes()
    fields: dict[str, Any] = {"metrics": {}, "num_examples": {}, "contributions": {}}
    try:
        content = from_json(text)
        for split in EVALUATED_SPLITS:
            score, values_N = content[split]["score"], np.asarray(content[split]["scores_i"], np.float32)
            if not (values_N.ndim == 1 and len(values_N) and np.isfinite(values_N).all()):
                raise ValueError(f"'{split}.scores_i' is not a list of numbers")
            if score != score:
                return DIVERGED
            value = read_number(str(path), f"{split}.score", score)
            fields["metrics"][split] = {MEASURE: value}
            fields["num_examples"][split] = len(values_N)
            if abs(float(values_N.mean()) - value) <= SAME_MEAN:
                fields["contributions"][split] = values_N
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        why = f"there is no {error}" if isinstance(error, KeyError) else first_line(error)
        raise InputError(f"{path} is not a cell of EncodEval ({why}); fetch it again") from None
    return fields


@cache
def make_config(rate: float, seed: int) -> FinetuneConfig:
    return FinetuneConfig(learning_rate=rate, seed=seed)


def find_grids(folder: Path) -> list[CellGrid]:
    """Find the cells below a folder, by model and task. Raises `InputError` for two cells at one point of a grid."""
    grids: dict[tuple[str, str], dict[GridPoint, Path]] = defaultdict(dict)
    for path in sorted(folder.rglob("results.json")):
        if cell := CELL.search(path.parent.name):
            model, _, task = path.absolute().parts[-5:-2]
            first = grids[model, task].setdefault((float(cell[1]), int(cell[2])), path)
            if first != path:
                raise InputError(f"{first} and {path} are two cells at one rate and seed; remove one")
    return [CellGrid(model, task, paths) for (model, task), paths in grids.items()]


def grid_rows(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the cells below a folder as rows of a table: for each seed the one at the rate that the other seeds choose
    on validation, with the noise of this choice. Raises `InputError` for a broken cell."""
    for grid in find_grids(folder):
        rates, seeds = zip(*grid.paths, strict=True)
        scores = grid.read(itertools.product(rates, seeds))
        for reason in scores.broken.values():
            raise InputError(reason)
        result = grid.choose_rates(scores)
        examples = result.examples.read().values_SN if result.examples else [None] * result.num
        for seed, rate, score, values_N in zip(
            result.seeds, result.chosen_rates, result.samples, examples, strict=True
        ):
            row = {"method": grid.model, "task": grid.task, "seed": seed, "score": score, "examples": values_N}
            yield str(grid.paths[rate, seed]), row | {"choice": result.choice, "num_lost": result.num_diverged}


# The paper's cells


NAME = re.compile(
    r"(?P<size>\d+[mb])-(?P<first>clm|mlm(?P<mask>\d+))-(?P<decayed>dec)?(?P<steps>\d+)k"
    r"(?:-(?P<checkpoint>\d+)|-mlm(?P<later>\d+)-(?P<total>\d+)k)?"
)
"""The authors' names of models: `610m-clm-42k`; `610m-clm-42k-1000`, a checkpoint on the way; `610m-clm-11k-mlm40-22k`,
CLM then MLM; `610m-clm-dec42k-mlm40-44k`, continued after the decay. The last number is the total of steps."""


def parse_model(name: str) -> ReportArm | None:
    """Return the arm that a model's name describes; None for another kind of name."""
    found = NAME.fullmatch(name)
    later = 1000 * (int(found["total"]) - int(found["steps"])) if found and found["total"] else 0
    if not found or bool(found["total"]) != (later > 0) or (found["decayed"] and not later):
        return None
    first = found["first"][:3]
    steps = int(found["checkpoint"] or 1000 * int(found["steps"]))
    continued, second = (later, 0) if found["decayed"] else (0, later)  # steps of MLM
    clm = steps if first == "clm" else 0
    parent = f"{found['size']}-{found['first']}-{found['steps']}k" if continued or found["checkpoint"] else None
    mask = found["later"] or found["mask"]
    return ReportArm(
        name,
        "efficiency" if found["checkpoint"] else "objective",
        found["size"].upper(),
        "clm+mlm" if clm and second else first,  # type: ignore[arg-type]
        int(mask) if mask else None,
        steps + second,
        clm,
        steps - clm + second,
        cpt_steps=continued,
        parent=parent,
        tokens=float(TOKENS_PER_STEP * (steps + later)),
    )


ModelOnData = tuple[str, str]
"""A model and a data set, by the paper's name."""


class ReadCells(NamedTuple):
    """What was read from the authors' folder."""

    arms: Mapping[str, ReportArm]
    """Model → its arm."""
    scores: Mapping[ModelOnData, tuple[Result, Interval]]
    """The score, and the same as the paper computes it: at one rate for all seeds, with the normal interval."""
    num_due: int
    """The number of cells that these models would have if none was missing."""
    missing: list[tuple[str, str, float, int]]
    """Model, data set, rate and seed of each missing cell."""
    left_out: list[str]
    """Sentences about broken cells, and about unknown models and tasks."""


def read_cells(folder: Path) -> ReadCells:
    """Read the authors' folder of results; each grid of cells is freed before the next one is read. Raises `InputError`
    if it has no cell of a known model on a known task."""
    tasks, grids = read_findings()["tasks"], find_grids(folder)
    arms = {name: arm for name in {grid.model for grid in grids} if (arm := parse_model(name))}
    used = [grid for grid in grids if grid.model in arms and grid.task in tasks]
    if not used:
        layout = "MODEL/FAMILY/TASK/lrRATE_sdSEED/results.json, such as 610m-clm-42k/SC/sst2/lr1e-05_sd0/results.json"
        raise InputError(f"{folder} has no cell of the paper ({layout}); give the authors' folder `results`")
    rates, seeds = {rate for grid in used for rate, _ in grid.paths}, {seed for grid in used for _, seed in grid.paths}
    points = [*itertools.product(sorted(rates), sorted(seeds))]
    places = [*itertools.product(sorted(arms), tasks.values())]
    due = {(name, dataset, rate, seed): None for name, dataset in places for rate, seed in points}
    num_due, broken = len(due), dict[Path, str]()
    read = dict[ModelOnData, tuple[Result, Interval]]()
    with console.track("read cells", sum(len(grid.paths) for grid in used), "cells") as progress:
        for grid in used:
            scores, place = grid.read(points), (grid.model, tasks[grid.task])
            broken |= scores.broken
            for point, path in grid.paths.items():
                if path not in scores.broken:
                    del due[*place, *point]
            with suppress(InputError):  # all trainings diverged, or those at the chosen rate did
                together = select_rate(scores, grid.model, grid.task, is_papers_way=True)
                result = replace(grid.choose_rates(scores), dataset=place[1], metric="paper", measure="")
                read[place] = result, mean_interval(together.samples, "normal")
            progress.advance(len(grid.paths))
    left_out = [*broken.values()][:MOST_BROKEN]
    left_out += [f"{len(broken) - MOST_BROKEN} more cells are broken."] if len(broken) > MOST_BROKEN else []
    for name in sorted({grid.model for grid in grids} - arms.keys()):
        left_out.append(f"'{name}' is not among the authors' names of models (such as 610m-clm-42k); it is left out.")
    if others := sorted({grid.task for grid in grids} - tasks.keys()):
        left_out.append(f"Left out, because they are in no table of the paper: {', '.join(others)}.")
    return ReadCells(arms, read, num_due, [*due], left_out)


MOST_BROKEN = 5
"""The most broken cells that are named."""


def place_results(cells: ReadCells) -> ResultSet:
    """Place the scores in every comparison of the paper to which their models belong, with averages."""
    reference = read_reference()
    flops = {arm.name: arm.flops for arm in reference.arms}
    families = {score.dataset: score.family for score in reference.results if score.dataset != AVERAGE}
    names = [*(name for name in flops if name in cells.arms), *sorted(cells.arms.keys() - flops)]
    placed = []
    for arm in place_arms(replace(cells.arms[name], flops=flops.get(name)) for name in names):
        for dataset, family in families.items():
            if read := cells.scores.get((arm.name, dataset)):
                placed.append(replace(read[0], arm=arm, family=family))
    return with_averages(ResultSet(with_cohorts(placed), planned_tasks=families))


def compare_scores(cells: ReadCells) -> Table:
    """Compare each published score with the same score recomputed from its cells: a row for each data set, and in the
    CSV file a line for each score."""
    published = {(score.arm.name, score.dataset): score for score in read_reference().results}
    gaps: dict[str, dict[str, float]] = defaultdict(dict)
    records: list[Sequence[object]] = [COMPARED]
    for (name, dataset), (ours, papers) in cells.scores.items():
        if score := published.get((name, dataset)):
            gap = gaps[dataset][name] = score.mean - papers.value
            intervals = [score.interval, papers, ours.interval]
            shares = [share for interval in intervals for share in (interval.value, interval.half_width)]
            texts = [show_share(share).replace(MISSING, "") for share in (*shares, gap)]
            records.append((name, dataset, *texts, ours.num_runs))
    rows = []
    for dataset, by_model in gaps.items():
        worst = max(by_model, key=lambda name: abs(by_model[name]))
        num_equal = sum(abs(gap) <= PUBLISHED_DIGIT / 2 * (1 + 1e-6) for gap in by_model.values())
        mean = show_points(float(np.mean([*by_model.values()])))
        cells_of_row = (str(len(by_model)), str(num_equal), mean, show_points(by_model[worst]), worst)
        rows.append(TableRow((dataset,), tuple(map(Cell, cells_of_row))))
    words = read_findings()["comparison"]
    heads = ("scores", "equal", "mean", "largest", "largest for")
    return Table("published-recomputed", words["title"], ("data set",), heads, tuple(rows), (words["note"],), records)


COMPARED: tuple[str, ...] = (
    "model",
    "dataset",
    "published",
    "published_half_width",
    "recomputed",
    "recomputed_half_width",
    "by_seed",
)
COMPARED += ("by_seed_half_width", "published_minus_recomputed", "num_cells")


def tell_lacks(cells: ReadCells) -> Iterator[str]:
    """Yield sentences about missing cells, missing models, lost seeds and unknown examples."""
    by_place: dict[ModelOnData, dict[float, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name, dataset, rate, seed in cells.missing:
        by_place[name, dataset][rate].append(str(seed))
    holes = []
    for (name, dataset), by_rate in sorted(by_place.items(), key=lambda hole: -sum(map(len, hole[1].values()))):
        at = "; ".join(f"{show_rate(rate)} seeds {', '.join(seeds)}" for rate, seeds in by_rate.items())
        num = sum(map(len, by_rate.values()))
        holes.append(f"{num} of {name} on {dataset}" + (f" ({at})" if (name, dataset) in cells.scores else ""))
    if holes:
        counts = f"{len(cells.missing):,} of {cells.num_due:,} cells are missing (missing-cells.csv lists them)"
        yield f"{counts}, most of them: {first_of(holes, 5)}. A missing cell counts as a training that diverged."
    known = {arm.name for arm in read_reference().arms}
    if absent := sorted(known - cells.arms.keys()):
        yield f"No cell of {len(absent)} of the {len(known)} models in the paper's tables: {first_of(absent, 5)}."
    lost = [place for place, (result, _) in cells.scores.items() if result.num_diverged]
    for name, dataset in lost[:MOST_BROKEN]:
        result, _ = cells.scores[name, dataset]
        where = f"{name} on {dataset} has {result.num} of {result.num + result.num_diverged} seeds"
        yield f"{where} (seeds {', '.join(map(str, result.seeds))}): the others lack a cell at their rate."
    if len(lost) > MOST_BROKEN:
        yield f"{len(lost) - MOST_BROKEN} more scores lack seeds."
    unknown = dict.fromkeys(dataset for (_, dataset), (result, _) in cells.scores.items() if not result.examples)
    if unknown:
        yield f"{read_findings()['comparison']['examples']} {', '.join(unknown)}."


def report_cells(folder: Path, out: Path) -> WrittenReport:
    """Write the report on the paper from the authors' cells in `folder` into the folder `out`, as `write_report`
    does."""
    cells = read_cells(folder)
    results, lacks = place_results(cells), [*cells.left_out, *tell_lacks(cells)]
    for line in lacks:
        console.err.print(line)
    verdicts = judge_paper(measure_findings(results))
    own, report = read_findings()["cells"], read_findings()["report"]
    page_text = PageText(
        report["title"],
        own["question"],
        verdicts,
        judgements=[compare_scores(cells)],
        commands=("pip install .", *own["commands"]),
        answer=verdicts[1],
        files={"missing-cells.csv": csv_text([("model", "dataset", "rate", "seed"), *cells.missing])},
        missing=[*lacks, *own["missing"]],
    )
    return write_report(results, out, page_text)
