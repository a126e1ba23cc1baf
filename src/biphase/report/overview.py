"""Results → what a reader wants first: the answer in a sentence, one table of all models and tasks, one picture."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from biphase.report.arms import short_steps
from biphase.report.averages import average
from biphase.report.contrasts import difference, is_significant
from biphase.report.formats import show_p_value, show_points, show_share
from biphase.report.measures import tell_measures
from biphase.report.results import ALL_TASKS, AVERAGE, FAMILY_NAMES, ReportArm, Result, ResultSet
from biphase.report.signal import Signal, measure_signal
from biphase.report.tables import OBJECTIVE_NAMES, ScoreTable, fill_rows, is_degenerate, percent

MOST_COLUMNS = 5
"""A page shows as many columns of scores at once; where there are more, it shows datasets of families when asked."""


def list_means(results: ResultSet) -> list[Result]:
    """The mean over all tasks of every model that has them all."""
    by_model = scores_by_model(results, results.primary_metric).values()
    return [own["", ALL_TASKS] for own in by_model if ("", ALL_TASKS) in own]


def rivals(arm: ReportArm) -> tuple[str | int, ...]:
    """Models with the same value are compared: one network, trained as long, decayed or not."""
    return arm.size, arm.pretrain_steps + arm.cpt_steps, "undecayed" if arm.setup == "efficiency" else ""


def scores_by_model(results: ResultSet, metric: str) -> dict[str, dict[tuple[str, str], Result]]:
    """Name of a model → (family, dataset) → its score; and ("", ALL_TASKS) → its mean over all tasks, where it has all
    that any model has."""
    names = [(family, dataset) for family in results.families for dataset in results.datasets(family, metric)]
    found = {}
    for name, cells in results.by_model.items():
        own: dict[tuple[str, str], Result] = {
            (one.family, one.dataset): one for one in cells.values() if one.metric == metric
        }
        known = [own[place] for place in names if place in own]
        if known and len(known) == len(names):
            own["", ALL_TASKS] = average(known) if len(known) > 1 else replace(known[0], dataset=AVERAGE)
        found[name] = own
    return found


def wide_table(results: ResultSet, metric: str) -> ScoreTable:
    """A row for every model; columns are the mean over all tasks, then each family's tasks and, of several
    families, its mean."""
    results = results.select(metric=metric)
    scores = scores_by_model(results, metric)
    names_of = {family: results.datasets(family, metric) for family in results.families}
    num_tasks = sum(map(len, names_of.values()))
    has_all = num_tasks > 1 and any(("", ALL_TASKS) in own for own in scores.values())
    columns = [("", ALL_TASKS)] if has_all else []  # family and dataset; no family: all tasks
    for family, names in names_of.items():
        is_mean_of_all = has_all and len(names) == num_tasks
        has_mean = len(names) > 1 and not is_mean_of_all
        columns += [(family, name) for name in ([AVERAGE, *names] if has_mean else names)]

    def describe(arm: ReportArm) -> tuple[str, ...]:
        steps = short_steps(arm.pretrain_steps + arm.cpt_steps)
        return arm.name, arm.size, steps, OBJECTIVE_NAMES[arm.whole_objective], percent(arm.mask_percent)

    rows = fill_rows(results.models, columns, rivals, describe, lambda arm, column: scores[arm.name].get(column))
    # How far tasks tell models apart is a question about models that are compared: those of the largest block.
    ((largest, num_rivals),) = Counter(row.block for row in rows).most_common(1)
    signals: tuple[Signal | None, ...] = ()
    if num_rivals > 1:
        compared = zip(*(row.cells for row in rows if row.block == largest), strict=True)
        signals = tuple(measure_signal(score for score, _ in cells) for cells in compared)
    # A dataset may have the name of another family's: `uner` of two families becomes `uner (TC)`.
    heads = [f"{code} mean" if name == AVERAGE else name for code, name in columns]
    heads = [f"{head} ({columns[at][0]})" if heads.count(head) > 1 else head for at, head in enumerate(heads)]
    about = "; ".join(f"{FAMILY_NAMES[code]}: {tell_measures(results, code, metric)}" for code in results.families)
    of_means = [code for code, name in columns if name in (AVERAGE, ALL_TASKS)]
    is_long = len(columns) > MOST_COLUMNS
    details = tuple(is_long and name not in (AVERAGE, ALL_TASKS) and code in of_means for code, name in columns)
    return ScoreTable(
        f"all-{metric}",
        f"All models and tasks, {'standard' if metric == 'standard' else 'the paper’s own'} metrics ({about})",
        ("model", "network", "steps", "objective", "masked"),
        tuple(heads),
        rows,
        signals,
        details,
    )


def answer_sentences(results: ResultSet, means: Sequence[Result]) -> Iterator[str]:
    """The best model against the best of any other objective (else the runner-up), and against random weights; or why
    there is none."""
    groups = list(group_rivals(one for one in means if one.arm.objective != "none"))
    if not groups:
        yield "No answer yet: no model that was trained has a score on every task."
        return
    # The group that compares most objectives; of several, the one with the most training.
    group = max(
        groups, key=lambda some: (len({one.arm.whole_objective for one in some}), len(some) > 1, training(some[0]))
    )
    best = max(group, key=lambda result: result.mean)
    names = [name for family in results.families for name in results.datasets(family, best.metric)]
    where = f"on average over {len(names)} tasks" if len(names) > 1 else f"on {names[0]}"
    others = [result for result in group if result is not best]
    if others:
        unlike = [one for one in others if one.arm.whole_objective != best.arm.whole_objective]
        yield compare_in_words(best, max(unlike or others, key=lambda result: result.mean), where, len(group))
    else:
        yield f"{best.arm.name} reaches {show_share(best.mean)} % {where}."
    control = [one for one in means if one.arm.objective == "none" and one.arm.size == best.arm.size]
    if control:
        yield compare_in_words(best, control[0], where, len(group))


def group_rivals(means: Iterable[Result]) -> Iterable[list[Result]]:
    """Results of models that are compared, group by group."""
    groups: dict[tuple[str | int, ...], list[Result]] = {}
    for result in means:
        groups.setdefault(rivals(result.arm), []).append(result)
    return groups.values()


def training(result: Result) -> tuple[float, int]:
    """How much training a model had: FLOPs where they are known, then steps."""
    return result.arm.flops or 0.0, result.arm.pretrain_steps + result.arm.cpt_steps


def compare_in_words(best: Result, other: Result, where: str, num_models: int) -> str:
    """`A is ahead of B on average over 4 tasks: 71.2 % against 70.0 %, +1.2 points [0.4, 2.0].`

    `best` is the best of so many models: its p-value is multiplied by how many it could have been beside `other`
    (Bonferroni), for the best of many equally good ones is ahead of any of them.
    """
    if is_degenerate(best) and is_degenerate(other):
        told = "both predict one and the same for all examples, as networks do that were trained too little"
        return f"{best.arm.name} cannot be told from {other.arm.name} {where}: {told}."
    seen = difference(best, other)
    tested = seen.against()
    num_asked = num_models if other.arm.objective == "none" else num_models - 1
    p_value = min(tested.p_value * num_asked, 1.0)
    verdict = "is ahead of" if is_significant(p_value) else "cannot be told from"
    effect, chosen = f"{show_points(tested.value)} points", ""
    if math.isnan(tested.low):
        effect += "; with one seed, or seeds that differ by the same, there is no interval"
    else:
        effect += f" [{show_points(tested.low)}, {show_points(tested.high)}]"
        if num_asked > 1:  # the number is told where the interval, which is not corrected, speaks otherwise
            told = f" {show_p_value(p_value)}" if is_significant(tested.p_value) != is_significant(p_value) else ""
            chosen = f", p{told} corrected for choosing the best of {num_models}"
    scope = "" if seen.num_pretrainings > 1 else " This is about these checkpoints: each was pretrained once."
    return (
        f"{best.arm.name} {verdict} {other.arm.name} {where}: {show_share(best.mean)} % against "
        f"{show_share(other.mean)} %, {effect}{chosen}.{scope}"
    )
