"""What the demo's models scored: a table, a plot, and what the intervals allow to say."""

import math
from collections.abc import Mapping
from functools import partial
from itertools import cycle
from pathlib import Path

from rich.table import Table

from biphase.errors import InputError
from biphase.report.contrasts import Contrast, difference
from biphase.report.figures import Picture, arrange_panels, plot_panel, plot_settings
from biphase.report.formats import show_difference, show_interval, show_noise
from biphase.report.panels import Mark, Panel
from biphase.report.printing import PLAIN, print_table
from biphase.report.results import Result
from biphase.report.statistics import mean_interval
from biphase.study.folder import StudyFolder, read_state
from biphase.study.plan import Plan
from biphase.study.results import collect_results
from biphase.style import NEUTRAL, SERIES, Look
from biphase.tasks.spec import find_task

CONTROL = Look(NEUTRAL, "o", "-", "")

Results = Mapping[tuple[str, str], Result]
"""(model, task) → the test scores there; models in the order of the plan, random weights last."""


def collect_by_task(plan: Plan, place: StudyFolder) -> Results:
    """Raises `InputError` for a cell that diverged."""
    scores = read_state(plan, place).scores
    for found in scores.values():
        for score in found.scores:
            if score.diverged:
                raise InputError(f"{score.headline()}; please report it, with the kind of machine")
    standard = [result for result in collect_results(plan, scores) if result.metric == "standard"]
    by_name = {(result.arm.name, result.dataset): result for result in standard}
    return {(model.name, task): by_name[model.name, task] for model in plan.models for task in tasks_of(by_name)}


def tasks_of(results: Results) -> list[str]:
    return list(dict.fromkeys(task for _, task in results))


def models_of(results: Results) -> tuple[list[str], str]:
    """The models that were trained, and the one that was not."""
    *models, control = dict.fromkeys(model for model, _ in results)
    return models, control


def gain(results: Results, model: str, task: str) -> Contrast:
    """A model minus its network from random weights."""
    return difference(results[model, task], results[models_of(results)[1], task])


def verdict(results: Results) -> str:
    """What the intervals allow to say, and no more, by the rule of all verdicts for one question at a time."""
    (models, _), tasks = models_of(results), tasks_of(results)
    clear = {model: [task for task in tasks if gain(results, model, task).side == "above"] for model in models}
    everywhere = [model for model in models if len(clear[model]) == len(tasks)]
    if len(everywhere) == len(models):
        paid = (
            "Pretraining pays: every arm beats random weights on every task, by gains whose 95 % intervals lie above 0."
        )
    elif any(clear.values()):
        known = "; ".join(f"{model} on {', '.join(found) or 'no task'}" for model, found in clear.items())
        paid = f"Clearly better than random weights: {known}."
    else:
        paid = "No gain over random weights is clear of zero at this budget."
    # The best arm of each task, and whether its lead over the next is more than noise.
    told = []
    for task in tasks:
        first, second = sorted(models, key=lambda model: -results[model, task].mean)[:2]
        seen = difference(results[first, task], results[second, task])
        lead = seen.against()
        sure = "more than noise by a test of these two alone" if seen.side == "above" else "within noise"
        reach = "" if math.isnan(lead.high) else f" (±{100 * lead.half_width:.1f})"
        size = f"{100 * lead.value:.1f}{reach}"
        told.append(f"{first} leads on {task} by {size}, {sure}")
    noise = gain(results, models[0], tasks[0]).noise
    return f"{paid}\nBetween the arms: {'; '.join(told)}.\nNoise accounted for: {show_noise(noise) or 'nothing'}."


def print_scores(results: Results) -> None:
    (models, control), tasks = models_of(results), tasks_of(results)
    table = Table(
        title="Test scores in %, mean ± half of the 95 % interval (Student's t, 3 seeds), and gain over random", **PLAIN
    )
    table.add_column("model")
    for task in tasks:
        table.add_column(f"{task}: {find_task(task).metric}", justify="right")
        table.add_column("gain", justify="right")
    for model in [control, *models]:
        cells = []
        for task in tasks:
            cells.append(show_interval(mean_interval(results[model, task].samples)))
            cells.append("" if model == control else show_difference(gain(results, model, task).against()))
        table.add_row(model, *cells)
    print_table(table)


def draw_scores(results: Results, path: Path) -> None:
    """A panel for each task: means with intervals as bars, seeds as dots."""
    models, control = models_of(results)
    looks = dict(zip(models, cycle(SERIES), strict=False))
    plots = []
    for task in tasks_of(results):
        series = []
        for model in [control, *models]:
            result = results[model, task]
            reach = 100 * result.half_width
            dots = [100 * score for score in result.samples]
            series.append((model, looks.get(model, CONTROL), [Mark(0, 100 * result.mean, reach, reach, dots=dots)]))
        panel = Panel(
            kind="bars",
            series=series,
            title=task,
            x_label="",
            y_label=f"test {find_task(task).metric} (%)",
            ticks=[0],
            tick_labels=[""],
            x_margin=0.5,
        )
        plots.append(partial(plot_panel, panel))
    with plot_settings("demo"):
        figure = arrange_panels(Picture("demo", plots))
        figure.supxlabel(
            "One budget, three ways to spend it, beside random weights (95 % intervals over seeds)", fontsize=9
        )
        figure.savefig(path, dpi=150, facecolor="white")
