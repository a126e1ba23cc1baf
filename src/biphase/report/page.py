"""Results → the report: tables and figures as files, and one HTML page that shows them with the verdicts.

The page needs no network and no file beside it: styles, script and figures are inside; what it links to is extra.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from biphase import __version__
from biphase.errors import InputError
from biphase.files import own_folder
from biphase.report.arms import num_parameters
from biphase.report.averages import with_averages
from biphase.report.claims import Claim, Finding, Verdicts, count_tested, group_verdicts, tell_verdict
from biphase.report.figures import figure_pool, list_figures, save_figure
from biphase.report.formats import MISSING, show_count, show_p_value, show_points, show_share
from biphase.report.overview import answer_sentences, list_means, wide_table
from biphase.report.price import PriceList, ladder_panel, list_prices, price_files, price_sentence, price_tables
from biphase.report.results import FAMILY_NAMES, ResultSet, check_averages, missing_cells, missing_examples
from biphase.report.statistics import SIGNIFICANCE
from biphase.report.svg import inline_svg
from biphase.report.tables import OBJECTIVE_NAMES, ScoreTable, degenerate_mark, make_tables, show_signal, table_files

SIGNS = {"supported": "✓", "contradicted": "✕", "undecided": "?"}
"""Beside the word, so that a verdict does not depend on its colour."""

BAR_WIDTH, MEAN_WIDTH, BAR_HEIGHT = 170.0, 90.0, 18.0
GENERATOR = "biphase report"


@dataclass(frozen=True)
class Told:
    """What the page tells beside scores."""

    title: str
    question: str
    verdicts: Verdicts | None = None
    hypotheses: tuple[Sequence[Finding], str] | None = None
    """What the study declared before it ran, judged, and a sentence on when it was declared."""
    declared: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Arms whose compute-equivalent the study declared → the arms of the baseline."""
    notes: Sequence[str] = ()
    """What a reader must know before comparing models, in sentences."""
    costs: Sequence[Mapping[str, object]] = ()
    commands: Sequence[str] = ()
    bm25: Mapping[str, float] = field(default_factory=dict)
    """Dataset → what BM25, which is no arm, scores there."""


def write_report(
    results: ResultSet,
    out: Path,
    told: Told,
    *,
    table_numbers: Mapping[tuple[str, str], int] | None = None,
    plan_svg: str | None = None,
    losses: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
    files: Mapping[str, str] | None = None,
    missing: Sequence[str] = (),
    answer: str = "",
    pool: Executor | None = None,
) -> Path:
    """Write `tables/`, `figures/` and `index.html` on one study into the folder `out`, whole or not at all; returns the
    page. `InputError` for a folder that is no unchanged report, and without a score.

    Args:
        table_numbers: (setup, family) → the number under which the table stands in a paper.
        plan_svg: a picture of the plan as it was run, drawn by us: it is not escaped.
        losses: run → records of its metrics.jsonl, for the loss curves.
        files: name → text of what stands beside the page.
        answer: to the question; by default the best model against the others, in a sentence or two.
        pool: where figures are drawn, if there is one already (`figure_pool`); it is shut down.
    """
    if not results.results:
        raise InputError("there is no finished score to report on yet")
    with own_folder(out, "report") as folder, pool or figure_pool() as drawing:
        results = with_averages(results.results)
        prices, unpriced = list_prices(results, told.declared)
        pictures, figures, lacking = list_figures(results, losses, [*map(ladder_panel, prices)])
        drawn = drawing.map(partial(save_figure, folder=folder / "figures"), pictures)  # beside the tables
        wide, tables = [wide_table(results, metric) for metric in results.metrics], make_tables(results, table_numbers)
        write_texts(folder, {**(files or {}), **table_files([*wide, *tables]), **price_files(prices)})
        lacks = [*missing_cells(results), *missing_examples(results)]
        html = render(
            sentences=[answer] if answer else list(tell_answer(results, prices, told)),
            price_sentence=price_sentence,
            results=results,
            wide=wide,
            prices=prices,
            figures=figures,
            tables=tables,
            files=files or {},
            missing=[*missing, *unpriced, *lacks, *(f"No figure: {line}" for line in lacking)],
            **inline_pictures(sorted(drawn), plan_svg),
            **vars(told),
        )
        write_texts(folder, {"index.html": html})
    return out / "index.html"


def tell_answer(results: ResultSet, prices: Iterable[PriceList], told: Told) -> Iterator[str]:
    """What a study says to its question, in sentences: the best models, prices, and what was expected, or else what it
    says of the paper's findings."""
    yield from answer_sentences(results, list_means(results))
    yield from map(price_sentence, prices)
    if told.hypotheses:
        declared, _ = told.hypotheses
        names = {one.key: f"“{one.key if one.verdict == 'undecided' else one.statement}”" for one in declared}
        groups = group_verdicts(declared, lambda finding: names[finding.key])
        yield f"Of {show_count(len(declared), 'hypothesis', 'hypotheses')} of this study, {groups}."
    elif told.verdicts and count_tested(told.verdicts[0]):
        yield told.verdicts[1]


def write_texts(folder: Path, texts: Mapping[str, str]) -> None:
    """Write files that `own_folder` keeps whole."""
    for name, text in texts.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")


def inline_pictures(files: Sequence[Path], plan_svg: str | None) -> dict[str, dict[str, Any]]:
    """Figures, as SVG files, and the plan as parts of a page, by name; and the page's classes for them."""
    texts = {file.stem: file.read_text(encoding="utf-8") for file in files}
    texts |= {} if plan_svg is None else {"plan": plan_svg}
    styles = dict[str, str]()
    return {"pictures": {name: inline_svg(text, name, styles) for name, text in texts.items()}, "styles": styles}


def render(**parts: Any) -> str:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    here = resources.files("biphase.report")
    css, js, page = ((here / name).read_text("utf-8") for name in ("page.css", "page.js", "page.html.j2"))
    environment.globals.update(
        style=Markup(css),
        script=Markup(js),
        version=__version__,
        generator=GENERATOR,
        signs=SIGNS,
        objectives=OBJECTIVE_NAMES,
        missing_mark=MISSING,
        families=FAMILY_NAMES,
        check_averages=check_averages,
        count_tested=count_tested,
        describe_results=describe_results,
        significance=f"{100 * SIGNIFICANCE:g}",
        bar=(BAR_WIDTH, BAR_HEIGHT),
        mean_width=MEAN_WIDTH,
        bars_of=bars_of,
        mean_bars=mean_bars,
        show_points=show_points,
        show_count=show_count,
        show_p_value=show_p_value,
        tell_verdict=tell_verdict,
        show_share=show_share,
        show_signal=show_signal,
        degenerate_mark=degenerate_mark,
        sort_value=sort_value,
        first_number=first_number,
        price_tables=price_tables,
    )
    return environment.from_string(page).render(**parts)


def describe_results(results: ResultSet) -> list[str]:
    """What there is, in a few words each."""
    metric = results.primary_metric
    pretrained = [result for result in results.results if result.arm.setup != "control"] or results.results
    seeds = sorted({result.num // result.num_pretrainings for result in pretrained})
    num_pretrainings = max(result.num_pretrainings for result in pretrained)
    num_datasets = sum(len(results.datasets(family, metric)) for family in results.families)
    span = f"{seeds[0]}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
    return [
        f"{len({arm.name for arm in results.arms()})} models",
        show_count(num_datasets, "dataset"),
        *([f"{num_pretrainings} pretraining seeds"] if num_pretrainings > 1 else []),
        f"{span} fine-tuning seeds" if span != "1" else "1 fine-tuning seed",
        f"verdicts and figures on the {'standard' if metric == 'standard' else 'paper’s own'} metrics",
    ]


def bars_of(claim: Claim) -> list[dict[str, float] | None]:
    """The inequalities of a claim on one scale, which has zero, every bound and every interval on it: places in pixels
    from the left; None without an interval."""
    known = [one for one in claim.inequalities if not math.isnan(one.low)]
    place = scale([0.0, *(value for one in known for value in (one.low, one.high, one.bound))], BAR_WIDTH)
    bars: list[dict[str, float] | None] = []
    for one in claim.inequalities:
        values = {"zero": 0.0, "bound": one.bound, "low": one.low, "high": one.high, "estimate": one.estimate}
        bars.append(None if math.isnan(one.low) else {name: place(value) for name, value in values.items()})
    return bars


def mean_bars(table: ScoreTable) -> tuple[list[dict[str, float] | None], tuple[float, float]]:
    """The first score of every row with its interval on one scale, likewise, and the ends of that scale; no bar for a
    score that lacks, and none where there are not two."""
    scores = [row.cells[0][0] for row in table.rows]
    known = [one for one in scores if one]
    reach = {id(one): np.nan_to_num(one.half_width) for one in known}
    edges = [one.mean + side * reach[id(one)] for one in known for side in (-1, 1)]
    if len(known) < 2:
        return [None for _ in scores], (math.nan, math.nan)
    place, sides = scale(edges, MEAN_WIDTH), {"low": -1, "estimate": 0, "high": 1}
    bars = [
        None if one is None else {name: place(one.mean + side * reach[id(one)]) for name, side in sides.items()}
        for one in scores
    ]
    return bars, (min(edges), max(edges))


def scale(values: Iterable[float], width: float) -> Callable[[float], float]:
    """Values → places in pixels from the left of a bar of this width that has all of them."""
    low, high, margin = min(values), max(values), 6.0
    return lambda value: round(margin + (value - low) / ((high - low) or 1.0) * (width - 2 * margin), 1)


def sort_value(text: str) -> str:
    """What a cell sorts by: the number in `1,000`, `40 %` and `610M`, nothing where there is none, else the words."""
    if text == MISSING:
        return ""
    plain = text.removesuffix(" %").replace(",", "")
    parameters = num_parameters(plain)
    if not math.isinf(parameters):
        return f"{parameters:g}"
    return plain if re.fullmatch(r"-?[0-9]+(\.[0-9]+)?", plain) else text


def first_number(text: str) -> str:
    """`0.71` of `at most 0.71 [0.62, 0.83]`."""
    found = re.search(r"[0-9][0-9,]*(\.[0-9]+)?", text)
    return found.group() if found else MISSING
