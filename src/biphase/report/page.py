"""Results → the report: tables and figures as files, and one HTML page that shows them with the verdicts.

The page begins with the answer in a sentence and one table of all models and tasks. It loads no other file and needs no
network: it contains its styles, script and figures. Figures take the page's colours; on a narrow page their panels
stack.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from biphase import __version__
from biphase.console import out as terminal
from biphase.curriculum import OBJECTIVES
from biphase.errors import SOURCE, InputError
from biphase.files import own_folder
from biphase.finetuning.scores import Score
from biphase.report import contrasts, formats, tables
from biphase.report.claims import Finding, Verdicts, count_tested, tell_finding, tell_verdict
from biphase.report.equivalents import PriceList, ladder_panel, list_prices, price_sentence, price_tables, tell_compute
from biphase.report.figures import FigurePart, figure_pool, list_figures, plot_panel, save_figure
from biphase.report.formats import MISSING, show_count, show_estimate, show_list, show_share, show_steps, tell_p_value
from biphase.report.results import ALL_TASKS, FAMILY_NAMES, ReportArm, Result, ResultSet, find_flaws, read_words
from biphase.report.statistics import SIGNIFICANCE, Interval, is_significant
from biphase.report.verdicts import LOOKS_OF_VERDICTS, compare_words
from biphase.style import GRID, INK

SUPERFLUOUS = re.compile(
    r"""<metadata>.*?</metadata> | <defs>\s*<style.*?</defs> | <!--.*?--> | (?<=<g)\ id="[^"]*"
    | font-family:\ [^;"]*;?\ ? | stroke-linejoin:\ miter;?\ ? | \ transform="rotate\(-?0\ [^)]*\)"
    | (?<=[0-9]\.[0-9])[0-9]{3,}(?=[^<>]*>) | \ style="" | (?<=>)\s+(?=<) | \ \n(?=[A-Z])""",
    re.DOTALL | re.VERBOSE,
)
"""Parts of matplotlib's SVG that the page does not need: global styles, superfluous digits, ids of groups."""


def inline_svg(parts: Iterable[FigurePart], styles: dict[str, str]) -> Markup:
    """Return the parts of a figure as SVG in the page's colours.

    `styles`: CSS style in the page's pictures → name of its class; the function adds new styles.
    """

    def name_style(found: re.Match[str]) -> str:
        return f'class="{styles.setdefault(found[1].strip(), f"s{len(styles)}")}"'

    drawn = []
    for part in parts:
        root, _, body = SUPERFLUOUS.sub("", part.svg[part.svg.index("<svg") :]).partition(">")
        (box,) = re.findall(r'viewBox="([^"]*)"', root)
        width = f' width="{1.5 * float(box.split()[2]):.0f}"' if part.kind == "legend" else ""
        body = body.replace(INK, "currentColor").replace(GRID, "var(--grid)").replace(" xlink:href=", " href=")
        body = re.sub(r'style="([^"]*)"', name_style, body)
        drawn.append(f'<svg class="{part.kind}" viewBox="{box}"{width}>{body}')
    return Markup("".join(drawn))


def tell_arm(arm: ReportArm, *, is_short: bool = False) -> str:
    """Write how an arm was trained: `CLM for 600 steps, then MLM for 1,800`, or in short `CLM 600, then MLM 1,800`;
    empty if only its name is known."""
    if arm.objective in ("none", ""):
        return "random weights" if arm.objective else ""
    phases = [*arm.phases] or [(arm.curriculum or arm.objective.upper(), arm.pretrain_steps), ("MLM", arm.cpt_steps)]
    if arm.objective == "clm+mlm" and not arm.curriculum:
        phases[:1] = ("CLM", arm.clm_steps), ("MLM", arm.mlm_steps)
    phases = [(objective, steps) for objective, steps in phases if steps]
    if is_short or not phases:
        return ", then ".join(f"{objective}\xa0{show_steps(steps)}" for objective, steps in phases)
    first, *later = [f"{objective} for {steps:,}" for objective, steps in phases]
    undecayed = ", undecayed" if arm.setup == "efficiency" else ""
    return ", then ".join([f"{first} steps", *later]) + undecayed


def name_labels(arms: Iterable[ReportArm], tasks: Iterable[str]) -> Callable[[str], Markup]:
    """Return a function that turns a sentence into HTML in which names of arms are small labels. Where an arm's name
    first appears, the words of `tell_arm` precede it. A name of letters alone, such as `base`, could be an ordinary
    word, so it stays as it is. A task with words in `words.yaml` is called by them; its name follows once."""
    told_tasks = {name: read_words()["tasks"][name] for name in tasks if name in read_words()["tasks"]}
    words = {arm.name: tell_arm(arm) for arm in arms if not arm.name.isalpha()} | told_tasks
    longest_first = sorted(map(re.escape, words), key=len, reverse=True)
    names = re.compile(rf"(?<![\w.-])({'|'.join(longest_first)})(?![\w-])")
    told = set[str]()

    def label(found: re.Match[str]) -> str:
        name = found[0]
        before, is_told = words[name], name in told
        told.add(name)
        if is_told or not before:
            return told_tasks.get(name) or f'<span class="label">{name}</span>'
        return f'{before} <span class="label">({name})</span>'

    return lambda sentence: Markup(names.sub(label, str(escape(sentence)))) if words else escape(sentence)


def answer_sentences(results: ResultSet, hypotheses: Sequence[Finding] = ()) -> Iterator[str]:
    """Yield sentences that compare the best model with the best of another objective (else the runner-up), and with
    random weights; or one that explains why there is no best model. Leave out pairs that a hypothesis compares on all
    tasks."""
    means = [scores[ALL_TASKS] for scores in results.scores.values() if ALL_TASKS in scores]
    groups: dict[object, list[Result]] = {}
    for result in means:
        if result.arm.objective != "none":
            groups.setdefault(result.arm.block, []).append(result)
    if not groups:
        yield "No answer yet: no trained model has a score on every task."
        return

    def weigh(group: list[Result]) -> tuple[float, ...]:
        """Return the sort key of a group: its number of objectives, whether it has a rival, its amount of training."""
        arm, objectives = group[0].arm, {result.arm.whole_objective for result in group}
        return len(objectives), len(group) > 1, arm.flops or 0.0, arm.pretrain_steps + arm.cpt_steps

    group = max(groups.values(), key=weigh)
    best = max(group, key=lambda result: result.mean)
    names = [*chain(*results.datasets.values())]
    where = f"on average over {len(names)} tasks" if len(names) > 1 else f"on {names[0]}"
    runners_up = [result for result in group if result is not best]
    unlike = [rival for rival in runners_up if rival.arm.whole_objective != best.arm.whole_objective]
    rivals = [max(unlike or runners_up, key=lambda result: result.mean)] if runners_up else []
    if not rivals:
        yield f"{best.arm.name} reaches {show_share(best.mean)} % {where}."
    control = [result for result in means if result.arm.objective == "none" and result.arm.size == best.arm.size]
    asked = [line.arms for finding in hypotheses for line in finding.inequalities if line.by_task.keys() >= {*names}]
    for rival in (*rivals, *control[:1]):
        if {best.arm.name, rival.arm.name} not in asked:
            yield compare_in_words(results, best, rival, where, len(group))


def compare_in_words(results: ResultSet, best: Result, rival: Result, where: str, num_models: int) -> str:
    """Write `A is ahead of B on genre: 71.20 % against 70.00 %, +1.20 points [+0.40, +2.00], positive in 5 of 5 seeds.`

    Both are means over the same tasks. `best` was picked as the best of `num_models`, so p-value and interval are
    corrected for the number of candidates, which are all models but `rival` (Bonferroni).
    """
    if best.is_degenerate() and rival.is_degenerate():
        reason = "both predict the same for all examples, as networks with too little training do"
        return f"{best.arm.name} cannot be distinguished from {rival.arm.name} {where}: {reason}."
    has_candidate = rival.arm.objective != "none"
    num_asked, besides = num_models - has_candidate, f" besides {rival.arm.name}" * has_candidate
    best, rival = (best, rival) if best.mean >= rival.mean else (rival, best)  # random weights may be ahead
    compute = tell_compute(results, [(1.0, best), (-1.0, rival)])
    gap = contrasts.difference(best, rival)
    tested = gap.against(level=SIGNIFICANCE / num_asked)
    p_value = min(tested.p_value * num_asked, 1.0)
    sides = [(result.arm.name, result.mean) for result in (best, rival)]
    is_ahead = is_significant(p_value)
    carriers = ""
    if is_ahead:
        scores, others = (results.scores[result.arm.name] for result in (best, rival))
        by_task = {name: contrasts.difference(scores[name], others[name]) for name in chain(*results.datasets.values())}
        carriers = f" {contrasts.tell_carriers(by_task)}".rstrip()
    sentence = contrasts.say_difference(tested, *sides, is_ahead=is_ahead, where=where) + compute + gap.tell_seeds()
    if math.isnan(tested.low):
        sentence += "; there is no interval with one seed, or if all seeds differ by the same amount"
    elif num_asked > 1:
        picked = "the better of two" if num_asked == 2 else f"the best of {num_asked}"
        sentence += f"; {tell_p_value(p_value)}, corrected for picking {picked} models{besides}"
    scope = "" if gap.num_pretrainings > 1 else " This is about these checkpoints: each was pretrained once."
    return f"{sentence}.{carriers}{scope}"


@dataclass(frozen=True)
class PageText:
    """The contents of the page apart from scores."""

    title: str
    question: str
    verdicts: Verdicts | None = None
    hypotheses: tuple[Sequence[Finding], Sequence[str]] | None = None
    """The declared hypotheses with their verdicts, and sentences about their declaration."""
    declared: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Arm with a declared compute-equivalent → the arms of its baseline."""
    listed: Sequence[PriceList] | None = None
    """For a table of results: its compute-equivalents, which are known already."""
    judgements: Sequence[tables.Table] = ()
    """Tables with verdicts on methods."""
    notes: Sequence[str] = ()
    """Sentences to read before comparing models."""
    costs: Sequence[Mapping[str, object]] = ()
    commands: Sequence[str] = ()
    words: Sequence[Score] = ()
    """Scores by words alone, which are no arms."""
    bm25: Mapping[str, float] = field(default_factory=dict)
    """Dataset → the score of BM25 among the scores of a model."""
    answer: str = ""
    """The answer to the question; if empty, the page compares the best models."""
    plan_svg: str = ""
    """A picture of the plan as run. It is our own SVG, so the page does not escape it."""
    losses: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    """Run → records of its metrics.jsonl, for the loss curves."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Name → text of a file beside the page."""
    missing: Sequence[str] = ()
    """Sentences about missing parts of the study."""


class WrittenReport(NamedTuple):
    """A report that was written."""

    page: Path
    text: PageText
    """The text of the page, with the notes about its results."""
    table: tables.Table
    """The table of all models and tasks."""
    sentences: list[str]
    """The answer."""


def write_report(results: ResultSet, out: Path, page_text: PageText, pool: Executor | None = None) -> WrittenReport:
    """Write `tables/`, `figures/` and `index.html` into the folder `out`, whole or not at all. Raises `InputError` if
    there is no score, or if `out` contains anything but an unchanged report.

    `pool` draws the figures; the function shuts it down. None: `figure_pool`.
    """
    if not results.results:
        raise InputError("there is no finished score to report on yet")
    measured = chain(*(scores.values() for scores in results.scores.values()))
    beside = compare_words((score for score in measured if score.arm.objective != "none"), page_text.words)
    with own_folder(out, "report") as folder, pool or figure_pool() as drawing:
        found = list_prices(results, page_text.declared) if page_text.listed is None else (page_text.listed, ())
        prices, unpriced = found
        priced, price_sentences = [*map(price_tables, prices)], [*map(price_sentence, prices)]
        plots, lacking = ({}, []) if results.is_foreign else list_figures(results, page_text.losses)
        figures = {name: words for name, words in read_words()["figures"].items() if name in plots}
        if prices:
            plots["compute-equivalents"] = [partial(plot_panel, ladder_panel(listed)) for listed in prices]
        save = partial(save_figure, folder=folder / "figures")
        drawn = drawing.map(save, plots.keys(), plots.values())  # beside the tables
        printed, wide = tables.make_tables(results), [tables.wide_table(results, name) for name in results.metrics]
        wide[0] = tables.with_words(wide[0], {**page_text.bm25, **{row.dataset: row.value for row in beside}})
        on_paper = [*wide, *printed, *page_text.judgements, *chain(*priced)]
        texts = {**page_text.files, **tables.table_files(on_paper)}
        flaws = find_flaws(results)
        missing = [*page_text.missing, *unpriced, *flaws.gaps, *(f"No figure: {line}" for line in lacking)]
        page_text = replace(page_text, notes=[*page_text.notes, *flaws.edges], missing=missing)
        sentences = [*tell_answer(results, price_sentences, page_text), *(row.sentence for row in beside)]
        html = render(
            facts=[*describe_results(results), *tell_cost(page_text.costs)],
            scope=find_scope(results),
            over=results.over,
            sentences=list_leads(sentences, page_text),
            label=name_labels(results.arms, chain(*results.datasets.values())),
            checks=flaws.averages,
            wide=wide,
            prices=[*zip(price_sentences, priced, strict=True)],
            figures=figures,
            tables=printed,
            drawn=dict(zip(plots, drawn, strict=True)),
            **vars(page_text),
        )
        for name, text in {**texts, "index.html": html}.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8")
    return WrittenReport(out / "index.html", page_text, wide[0], sentences)


def list_leads(sentences: Iterable[str], page_text: PageText) -> list[str]:
    """Remove from the answer the sentences that the page lists elsewhere: verdicts on hypotheses, and all but the first
    sentence about the paper's findings."""
    declared = page_text.hypotheses[0] if page_text.hypotheses else ()
    listed = {*map(tell_finding, declared)}
    leads = [sentence for sentence in sentences if sentence not in listed]
    if page_text.verdicts and page_text.verdicts[1] in leads:
        leads[leads.index(page_text.verdicts[1])] = page_text.verdicts[1].partition(". ")[0].rstrip(".") + "."
    return leads


def tell_answer(results: ResultSet, price_sentences: Iterable[str], page_text: PageText) -> Iterator[str]:
    """Yield the answer of `page_text`, or else sentences that answer the study's question: verdicts on hypotheses and
    prices (declared prices come first), then the best models; without hypotheses, the best models, prices and the
    paper's findings."""
    if page_text.answer:
        yield page_text.answer
        return
    declared, _ = page_text.hypotheses or ((), "")
    leads = answer_sentences(results, declared)
    if page_text.hypotheses:
        told = map(tell_finding, declared)
        yield from chain(*((price_sentences, told) if page_text.declared else (told, price_sentences)), leads)
        return
    yield from chain(leads, price_sentences)
    if page_text.verdicts and count_tested(page_text.verdicts[0]):
        yield page_text.verdicts[1]


def render(drawn: Mapping[str, Sequence[FigurePart]], plan_svg: str, **contents: Any) -> str:
    """Render the page as HTML; `drawn` has the parts of each figure."""
    styles = dict[str, str]()
    drawn = {**drawn, "plan": [FigurePart("whole", plan_svg)]} if plan_svg else drawn
    pictures = {name: inline_svg(figure, styles) for name, figure in drawn.items()}
    loader = FileSystemLoader(SOURCE / "report")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.globals |= {name: show for name, show in vars(formats).items() if name.startswith("show_")}
    counts, tells = (count_tested, count_verdicts), (tell_arm, tell_evidence, tell_verdict)
    for function in (*counts, *tells, find_ends, find_ticks, list_effects, locate, split_stubs, tables.show_signal):
        environment.globals[function.__name__] = function
    return environment.get_template("page.html.j2").render(
        contents,
        pictures=pictures,
        styles=styles,
        looks=LOOKS_OF_VERDICTS,
        families={code: words for code, words in FAMILY_NAMES.items() if code != "OT"},
        objectives=OBJECTIVES.values(),
        significance=f"{100 * SIGNIFICANCE:g}",
        version=__version__,
    )


def describe_results(results: ResultSet) -> list[tuple[str, str]]:
    """Return what was compared: the numbers of models, data sets and seeds, and the metrics of verdicts and figures."""
    metric = results.primary_metric
    pretrained = [result for result in results.results if result.arm.setup != "control"] or results.results
    seeds = sorted({result.num // result.num_pretrainings for result in pretrained})
    num_pretrainings = max(result.num_pretrainings for result in pretrained)
    models = show_count(len({arm.name for arm in results.arms}), "model")
    if results.over == "tasks":
        tasks = show_count(max(result.num for result in results.results), "task")
        return [("compared", f"{models} on {tasks}"), ("repeats", "the tasks, with one score each")]
    num_datasets = sum(map(len, results.datasets.values()))
    of_each = "" if num_pretrainings == 1 or contrasts.have_one_seed(pretrained) else " per pretraining seed"
    span = f"{seeds[0]}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
    tuned = f"{span} fine-tuning seeds" if span != "1" else f"1 fine-tuning seed{of_each}"
    is_unknown = results.is_foreign and num_pretrainings == 1
    pretrained_by = "" if is_unknown else f"{show_count(num_pretrainings, 'pretraining seed')}, "
    facts = [("compared", f"{models} on {show_count(num_datasets, 'dataset')}"), ("repeats", f"{pretrained_by}{tuned}")]
    metrics = [("metrics", "the standard ones" if metric == "standard" else "the paper’s own")]
    return facts if results.is_foreign else facts + metrics


def tell_cost(costs: Sequence[Mapping[str, object]]) -> Iterator[tuple[str, str]]:
    """Yield the hours of each device, a GPU or a thread of a CPU, by the rows of the table of costs."""
    hours, unknown = defaultdict[str, float](float), list[str]()
    for row in costs:
        if row["device hours"] == "not known":  # of runs that went on with other devices or threads
            unknown.append(f"an unknown number of hours on {row['device']}")
        else:
            hours[str(row["device"]).partition(" × ")[2]] += float(str(row["device hours"]))
    spent = {"a CPU thread" if name == "cpu" else f"one {name}": num for name, num in hours.items() if num}
    if spent or unknown:
        known = [f"{show_estimate(num)} hours of {name}" for name, num in spent.items()]
        yield "cost", show_list([*known, *unknown])


class Scope(NamedTuple):
    """What the results of a study are about, and so what they do not show."""

    sizes: Sequence[str]
    tokens: Sequence[float]
    """The tokens of the shortest and of the longest pretraining; () if they are unknown."""
    is_repeated: bool
    """Whether models were pretrained more than once."""


def find_scope(results: ResultSet) -> Scope | None:
    """Find the scope of a study's results; None for tables of other people's scores."""
    if results.is_foreign:
        return None
    tokens = sorted({arm.tokens for arm in results.arms if arm.tokens})
    is_repeated = max(result.num_pretrainings for result in results.results) > 1
    return Scope([size for size in results.sizes if size], [*dict.fromkeys((*tokens[:1], *tokens[-1:]))], is_repeated)


def tell_evidence(finding: Finding) -> str:
    """Write only the evidence of a verdict: `+8.69 points [+4.72, +12.66], positive in 5 of 5 seeds.`"""
    return tell_finding(finding).partition(finding.statement)[2].lstrip(":. ")


def count_verdicts(findings: Sequence[Finding]) -> str:
    """Write `Of 8 hypotheses, 1 is supported, none is contradicted and 7 are undecided.`"""
    counts = Counter(finding.verdict for finding in findings)
    nums = {verdict: counts[verdict] for verdict in LOOKS_OF_VERDICTS}
    told = [f"{num or 'none'} {'are' if num > 1 else 'is'} {verdict}" for verdict, num in nums.items()]
    return f"Of {show_count(len(findings), 'hypothesis', 'hypotheses')}, {show_list(told)}."


def split_stubs(table: tables.Table) -> tuple[list[int], str]:
    """Return the indices of the stub columns that the page shows, and the values that all models share, for the
    caption. The objective needs no column, because the first one names it."""
    shown, said = [0], []
    for column, head in enumerate(table.stub[1:], start=1):
        values = {row.stub[column] for row in table.rows} - {MISSING}
        if head == "objective" or not values:
            continue
        if len(values) == 1:
            said.append(f"{head} {values.pop()}")
        else:
            shown.append(column)
    return shown, ", ".join(said)


def find_ends(intervals: Iterable[Interval], *others: float) -> tuple[float, float]:
    """Return the ends of a scale that covers these intervals and other values; nan with fewer than two values."""
    ends = [*others, *chain(*((interval.low, interval.value, interval.high) for interval in intervals))]
    known = [end for end in ends if not math.isnan(end)]
    return (min(known), max(known)) if len(known) > 1 else (math.nan, math.nan)


class Effect(NamedTuple):
    """A difference in the picture of all hypotheses."""

    task: str
    estimate: float
    interval: Interval
    bound: float


MOST_SPLIT = 2
"""The most hypotheses whose picture has a row for each task."""


def list_effects(findings: Sequence[Finding]) -> tuple[list[list[Effect]], tuple[float, float]]:
    """Return the rows of each hypothesis in the picture of all, and the ends of its scale, in points.

    The first row is the difference that is least above its bound, corrected as its verdict is. If there are few
    hypotheses, rows for the tasks follow, with 95 % intervals. A hypothesis about losses has no place on the scale.
    """
    effects = list[list[Effect]]()
    for finding in findings:
        if len(finding.by_unit) != 1 or (least := finding.by_unit[0][0]).contrast.unit != "points":
            effects.append([])
            continue
        rows = [Effect("", least.estimate, least.interval, least.bound)]
        for task, alone in least.by_task.items() if len(findings) <= MOST_SPLIT and len(least.by_task) > 1 else ():
            rows.append(Effect(task, alone.estimate, alone.against(least.bound), least.bound))
        effects.append(rows)
    shown = [*chain(*effects)]
    return effects, find_ends([row.interval for row in shown], 0.0, *(row.bound for row in shown))


def find_ticks(ends: tuple[float, float]) -> list[float]:
    """Return round numbers at equal distances on a scale with these ends, about five."""
    if not ends[0] < ends[1]:
        return []
    step = 10 ** math.floor(math.log10((ends[1] - ends[0]) / 2))
    step *= next(factor for factor in (0.2, 0.5, 1, 2, 5) if (ends[1] - ends[0]) / (factor * step) <= 6)
    return [step * number for number in range(math.ceil(ends[0] / step - 1e-9), math.floor(ends[1] / step + 1e-9) + 1)]


def locate(value: float, ends: tuple[float, float], width: float) -> float | None:
    """Return the position of a value in pixels from the left of a bar of this width, whose scale has these ends; None
    for nan."""
    (low, high), margin = ends, 6.0
    pixels = margin + (value - low) / ((high - low) or 1.0) * (width - 2 * margin)
    return None if math.isnan(pixels) else round(pixels, 1)


def print_results(table: tables.Table, sentences: Iterable[str]) -> None:
    """Print the table of all models and tasks, and the answer in sentences."""
    tables.print_table(replace(table, title="Test scores in %, mean over seeds ± half the width of the 95 % interval"))
    for sentence in sentences:
        terminal.prose(sentence)
