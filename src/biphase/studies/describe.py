"""A plan with its cost and the power of its tests, and advice, for people and programs: tables, JSON, a picture of the
tree of runs.

In the picture, steps run to the right and each run has a lane. A bar's colour shows the objective, its height the
learning rate.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib
import yaml
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke
from pydantic_core import to_jsonable_python
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from rich.tree import Tree
from scipy import special

from biphase.console import duration, printable
from biphase.curriculum import OBJECTIVES
from biphase.embedding.recipe import set_name
from biphase.errors import DOCS, first_of
from biphase.report.contrasts import (
    FEW_RATES,
    POWER,
    SHARED_CHOICE,
    Contrast,
    count_lent,
    find_lent_factor,
    find_power,
)
from biphase.report.formats import (
    format_bytes,
    show_count,
    show_estimate,
    show_list,
    show_power,
    show_tokens,
    write_steps,
)
from biphase.report.statistics import SIGNIFICANCE, spend_error
from biphase.report.tables import PLAIN
from biphase.studies.advise import LEAST_TOKENS, Advice
from biphase.studies.cost import Estimate, Machine, task_size
from biphase.studies.declarations import hash_hypotheses
from biphase.studies.plan import Plan, PlannedRun, history
from biphase.studies.spec import EMBED, Evaluation, find_data_dirs, trainings
from biphase.style import LOOKS, check_picture, save_picture
from biphase.tasks.spec import find_task

LANE_INCHES = 0.2
HEIGHT = 0.36
"""Half of a bar's height at the peak learning rate, in lanes."""


def draw_plan(plan: Plan, path: Path) -> None:
    """Write the picture as SVG, PNG or PDF; equal plans give equal bytes of SVG. It shows only the first pretraining
    seed, because the others look the same."""
    plan = plan.of_first_seed
    check_picture(path)
    settings: Any = {"svg.hashsalt": "biphase", "svg.fonttype": "none", "font.size": 9, "hatch.linewidth": 0.5}
    with matplotlib.rc_context(settings | {"text.parse_math": False}):
        figure = Figure(layout="constrained")
        axes = figure.subplots()
        plot_runs(plan, axes)
        used = dict.fromkeys(phase.objective for run in plan.runs.values() for phase in run.recipe.curriculum)
        bars = [Patch(label=f"{OBJECTIVES[name].title}: {OBJECTIVES[name].words}", **look(name)) for name in used]
        marks, _ = axes.get_legend_handles_labels()
        key = [*bars, *marks, Line2D([], [], linestyle="none", label="height of a bar: learning rate")]
        rows = 1 if len(key) <= 5 else -(-len(key) // 3)
        figure.set_size_inches(10, 1.1 + LANE_INCHES * (len(plan.runs) + rows))
        axes.set_title((plan.study.title or plan.study.name) + rows * "\n", loc="left", fontsize=10)
        # Above the lanes, outside the axes.
        corner: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (-0.01, 1.0), "ncols": -(-len(key) // rows)}
        sizes: dict[str, Any] = {"fontsize": 8, "handlelength": 1.6, "columnspacing": 1.4, "borderaxespad": 0.1}
        axes.legend(handles=key, frameon=False, **corner, **sizes)
        save_picture(figure, path)


def plot_runs(plan: Plan, axes: Axes) -> None:
    lanes = {name: lane for lane, name in enumerate(order_lanes(plan))}
    end = max(run.last for run in plan.runs.values())
    axes.set_xlim(-0.01 * end, 1.01 * end)
    for name, lane in lanes.items():
        run = plan.runs[name]
        if run.parent is not None:
            axes.plot([run.first, run.first], [lanes[run.parent], lane], color="0.45", linewidth=0.8, zorder=1)
        axes.axhline(lane, color="0.93", linewidth=0.6, zorder=0)
        draw_run(plan, run, lane, axes)
        axes.annotate(name, (run.last, lane), (7, 0), textcoords="offset points", va="center", fontsize=8, color="0.15")
    marker: dict[str, Any] = {"markersize": 4, "markeredgecolor": "black", "zorder": 4}
    for kind, face, label in (("final", "black", "final model"), ("intermediate", "white", "evaluated on the way")):
        models = [model for model in plan.models if model.kind == kind]
        if models:
            steps, heights = [model.step for model in models], [lanes[model.run] for model in models]
            axes.plot(steps, heights, "o", markerfacecolor=face, label=label, **marker)
    axes.set_ylim(len(lanes) - 0.4, -0.6)
    axes.set_yticks([])
    ticks = [tick for tick in axes.get_xticks() if 0 <= tick <= end]
    axes.set_xticks(ticks, [f"{tick / 1000:g}k" if end >= 10_000 and tick else f"{tick:g}" for tick in ticks])
    is_adapted = any(run.recipe.init.model for run in plan.runs.values())
    axes.set_xlabel("steps" if is_adapted else "steps since random weights")
    axes.spines[["left", "right", "top"]].set_visible(False)


def order_lanes(plan: Plan, parent: str | None = None) -> Iterator[str]:
    """Yield each run below its parent, the latest branch first, so that no connecting line crosses a bar."""
    branches = [run for run in plan.runs.values() if run.parent == parent]
    for run in sorted(branches, key=lambda run: -run.first):
        yield run.name
        yield from order_lanes(plan, run.name)


def draw_run(plan: Plan, run: PlannedRun, lane: int, axes: Axes) -> None:
    marks = [model.step for model in plan.models if model.run == run.name]
    schedule, begin = run.recipe.schedule, run.first
    bends = (begin + schedule.warmup_steps, run.last - schedule.decay_steps)
    for phase in run.recipe.curriculum:
        text, objective, end = phase.label, phase.objective, begin + phase.steps
        steps = [begin, *(step for step in bends if begin < step < end), end]
        begin = end
        heights = []  # the learning rate as a share of its peak
        for step in steps:
            climbing = (step - run.first) / schedule.warmup_steps if schedule.warmup_steps else 1.0
            falling = (run.last - step) / schedule.decay_steps if schedule.decay_steps else 1.0
            heights.append(HEIGHT * min(climbing, falling, 1.0))
        ends = [lane - height for height in heights], [lane + height for height in heights]
        axes.fill_between(steps, *ends, zorder=2, **look(objective))
        # Write the phase's label into the longest piece between two marks if it fits.
        free = sorted({steps[0], *(mark for mark in marks if steps[0] < mark < steps[-1]), steps[-1]})
        first, last = max(pairwise(free), key=lambda piece: piece[1] - piece[0])
        if last - first > 0.017 * axes.get_xlim()[1] * len(text):
            centered: dict[str, Any] = {"ha": "center", "va": "center_baseline", "fontsize": 7.5, "color": "white"}
            halo = [withStroke(linewidth=4, foreground=LOOKS[objective].color)]
            axes.text((first + last) / 2, lane, text, path_effects=halo, zorder=3, **centered)


def look(objective: str) -> dict[str, Any]:
    """Return the colour of an objective and its hatch for print without colours, twice as dense as in charts."""
    own = LOOKS[objective]
    return {"facecolor": own.color, "edgecolor": "white", "linewidth": 0, "hatch": 2 * own.hatch}


@dataclass(frozen=True)
class Begun:
    """What the folder of a study that has begun says of its tests."""

    variances: Mapping[str, float] = field(default_factory=dict)
    """Task → the variance of the difference between two models on one example (`measure_example_variances`)."""
    looks: frozenset[int] = frozenset()
    """The numbers of seeds at which reports looked at any of the hypotheses."""
    up_to: int | None = None
    """The number of seeds up to which looks share the level, as declared before the first look; None without a look."""


def describe_plan(plan: Plan, estimate: Estimate, begun: Begun) -> RenderableType:
    """Describe the runs of a study, their tree, their cost, the steps that sharing saves, and its power
    (`describe_power`)."""
    study, evaluation = plan.study, plan.study.evaluation
    kinds = Counter(model.kind for model in plan.models)
    between = f" and {show_count(kinds['intermediate'], 'intermediate checkpoint')}" if kinds["intermediate"] else ""
    controls = f", and {kinds['random']} from random weights" if kinds["random"] else ""
    order = "one order of the data" if plan.has_one_order else "each with its own order of the data"
    repeated = f", with {plan.num_seeds} pretraining seeds, {order}" if plan.num_seeds > 1 else ""
    saved = 1 - plan.steps / plan.steps_alone
    shared = f"; each arm alone would need {plan.steps_alone:,}, so sharing saves {saved:.0%}" if saved else ""
    lines: list[RenderableType] = [Text(printable(study.title or study.name), style="bold")]
    lines += [study.question] if study.question else []
    lines += [
        "",
        f"{show_count(kinds['final'], 'final model')}{repeated}{between}{controls}",
        f"{show_count(len(plan.runs), 'run')}: {plan.steps:,} steps{shared}",
        f"longest chain of runs: {plan.longest_chain:,} steps",
    ]
    if evaluation is not None:
        # On one task, random weights have a cell for each pretraining seed, and so count as that many models.
        points = {(cell.model, cell.config.seed) for cell in plan.cells if cell.task == plan.cells[0].task}
        num_models = len(points) // len(evaluation.seeds_of(0))
        models, seeds = show_count(num_models, "model"), show_count(len(evaluation.seeds_of(0)), "seed")
        fitted = [cell for cell in plan.cells if not cell.task.startswith(EMBED)]
        if evaluation.tasks:
            tasks, scores, num_trainings = show_count(len(evaluation.tasks), "task"), "", len(trainings(evaluation))
            if num_trainings < len(evaluation.tasks):
                tasks = f"{show_count(num_trainings, 'training')} ({tasks})"
                scores = f" → {show_count(sum(len(cell.evaluates) for cell in fitted), 'score')}"
            rates = " to ".join([*map(str, plan.num_rates[:-1]), show_count(plan.num_rates[-1], "rate")])
            lines.append(f"{show_count(len(fitted), 'fine-tuning')}: {models} × {tasks} × {rates} × {seeds}{scores}")
        if evaluation.embed is not None:
            embedded = show_count(len(plan.cells) - len(fitted), "embedding model")
            data = ", ".join(map(set_name, evaluation.embed.data))
            lines.append(f"{embedded} by one recipe: {models} × {seeds}, zero-shot on {data}")
        lines += describe_power(plan, evaluation, begun)
    if study.hypotheses:
        names = ", ".join(hypothesis.name for hypothesis in study.hypotheses)
        count = show_count(len(study.hypotheses), "hypothesis", "hypotheses")
        lines.append(Text(printable(f"{count} (hash {hash_hypotheses(plan)}): {names}")))
    counts = {"models": "models", "steps\nalone": "steps_alone", "steps\nshared": "steps"}
    columns: Columns = {header: (key, "{:,}".format) for header, key in counts.items()}
    columns["tokens"] = "tokens", show_tokens
    trained = [row for row in estimate.groups if row["group"] != "evaluation"]
    lines += ["", run_tree(plan), "", group_table("Steps", trained, columns)]
    columns = {"FLOPs": ("flops", show_power)}
    if estimate.machine:
        columns[f"{estimate.machine.name}\nhours"] = "device_hours", show_estimate
    return Group(*lines, "", group_table("Cost", estimate.groups, columns), *cost_lines(estimate))


USUAL_NOISE = {"networks of 210M and more": (0.005, 0.005), "networks of 1M on small tasks": (0.012, 0.018)}
"""Networks → the standard deviations of a score over pretraining seeds and over fine-tuning seeds. Those of large
networks are the median of the paper's 600 scores over fine-tuning seeds, assumed for pretraining too; those of small
networks are measured with our own."""


@dataclass(frozen=True)
class Design:
    """What decides the power of a comparison of two arms of a study."""

    num_pretrainings: int
    num_seeds: int
    """The number of fine-tuning seeds of each pretraining."""
    num_rates: int
    num_examples: int
    """The number of test examples."""
    example_variance: float
    """The variance of the difference between two models on one example."""
    noise: tuple[float, float]
    """As in `USUAL_NOISE`."""
    num_arms: int = 2
    level: float = SIGNIFICANCE

    def measure(self, estimate: float) -> Contrast:
        """Return the expected contrast of two arms; its error is infinite with a single seed.

        With one pretraining the test compares two checkpoints, so the noise of pretraining is no part of the error.
        Rates count as equally good, so that the luck of each rate moves the seeds that choose it for each other.
        """
        several = self.num_pretrainings > 1
        num = self.num_pretrainings if several else self.num_seeds
        degrees = num - 1
        of_pretraining, of_finetuning = self.noise
        of_seeds = 2 * (several * of_pretraining**2 + of_finetuning**2 / self.num_seeds) / self.num_pretrainings
        counts = num, self.num_pretrainings, self.num_examples
        of_examples, lent = self.example_variance / self.num_examples, 0
        of_choice = 2 * (1 - 1 / self.num_rates) * of_finetuning**2 / (self.num_pretrainings * self.num_seeds)
        if several and self.num_seeds > 1:  # the spread over pretrainings contains it
            of_seeds, of_choice = of_seeds + of_choice, 0.0
        elif several and self.num_rates <= FEW_RATES:
            of_choice *= SHARED_CHOICE
        if not of_choice and (lent := count_lent(degrees, self.num_arms)):
            # The mean result of `moderate` if all variances are 1. A sum's own variance, χ² divided by its degrees, is
            # not shrunk where it exceeds the factor. `excess` is the mean of what exceeds it, 0 where nothing does.
            factor = find_lent_factor(degrees)
            excess = special.chdtrc(degrees + 2, degrees * factor) - factor * special.chdtrc(degrees, degrees * factor)
            of_seeds *= (degrees + lent * (factor + float(excess))) / (degrees + lent)
        error = math.sqrt(of_seeds + of_examples + of_choice) if num > 1 else math.inf
        choice = of_choice, self.num_rates * degrees
        return Contrast(estimate, error, degrees, 1.0, "paired t", *counts, of_examples, *choice, lent=lent)

    def find_power(self, difference: float) -> float:
        """Return the probability that the test finds a difference."""
        planned = self.measure(difference)
        return find_power(planned, 0.0, self.level) if math.isfinite(planned.error) else 0.0

    @property
    def smallest_difference(self) -> float:
        """The smallest difference that the test finds with probability `POWER`; infinite with a single seed."""
        tenths = next((tenths for tenths in range(1, 1000) if self.find_power(tenths / 1000) >= POWER), math.inf)
        return tenths / 1000  # of a point


def describe_power(plan: Plan, evaluation: Evaluation, begun: Begun) -> Iterator[str]:
    """Yield lines on the smallest differences that the plan's seeds can detect, on its smallest and its largest test
    set."""
    seeds, num_rates = len(evaluation.seeds_of(0)), plan.num_rates[-1]
    pretrainings = Counter(arm.pooled_name for arm in plan.arms.values())
    fewest = min(pretrainings.values())
    if max(plan.num_seeds, seeds) < 2:
        yield "one seed each: no difference can be distinguished from noise"
        return
    tested = min(number for number in pretrainings.values() if max(number, seeds) > 1)
    if fewest < plan.num_seeds:
        few = first_of([name for name, number in pretrainings.items() if number == fewest])
        test = "no test beside an arm with several" if fewest == 1 else "less power than arms with more"
        yield f"{show_count(fewest, 'pretraining seed')} of {few}: {test}; the differences below are for {tested}"
    looks = list_planned_looks(plan, begun)
    most = looks[-1][-1] if looks else 0
    level = spend_error(looks[0] if looks else [], most) / max(len(plan.hypotheses), 1)
    num_arms = len({model.pooled_name for model in plan.models if model.kind != "random"})
    ends, told = list_tests(evaluation, begun.variances), f"{POWER:.0%} power"
    told += f", corrected for {len(plan.hypotheses)} hypotheses" if len(plan.hypotheses) > 1 else ""
    for who, noise in USUAL_NOISE.items() if ends else ():
        designs = [Design(tested, seeds, num_rates, *size, noise, num_arms, level) for size, _ in ends]
        sizes = zip(designs, ends, strict=True)
        found = {name: 100 * design.smallest_difference for design, (_, name) in sizes}
        unfound = [name for name, points in found.items() if math.isinf(points)]
        told_points = [f"{points:.1f} points on {name}" for name, points in found.items() if name not in unfound]
        moved = f"{100 * noise[0]:g} points between pretraining seeds and {100 * noise[1]:g} between fine-tuning seeds"
        variation = f"({told}) if scores vary by {moved}, as in {who}"
        if told_points:
            yield f"can detect differences of about {show_list(told_points)} {variation}"
        if unfound:
            yield f"can detect no difference on {show_list(unfound)}, however large {variation}"
        if num_rates > 1:
            tuned = replace(designs[0], num_rates=1, num_seeds=seeds * num_rates)
            gap = tuned.smallest_difference
            power = f"{tuned.find_power(gap):.0%} of studies instead of {designs[0].find_power(gap):.0%}"
            declared = "tuned before and declared as `evaluation.tuned_rates`"
            more = f"with one rate for each arm and task, {declared}, and {tuned.num_seeds} fine-tuning seeds"
            if math.isinf(gap):
                yield f"{more}, the same number of fine-tunings finds no difference on {ends[0][1]} either"
            else:
                yield f"{more}, the same number of fine-tunings finds {100 * gap:.1f} points on {ends[0][1]} in {power}"
    if looks:
        levels = [f"{spend_error(seen, most):.2g} at {seen[-1]}" for seen in looks]
        earlier = [*map(str, looks[0][:-1])]
        after = f", after looks at {show_list(earlier)}" if earlier else ""
        yield f"looks at each number of seeds share the 5 %: p below {show_list(levels)}{after}"
    if plan.num_seeds == 2:
        less = "less than 1 does: take 3 or more, or take 1 for verdicts about these checkpoints alone"
        yield f"2 pretraining seeds detect {less if seeds > 1 else 'little: take 3 or more'}"


def list_planned_looks(plan: Plan, begun: Begun) -> list[list[int]]:
    """List the looks up to each number of seeds that the study may still have, from the planned one; [] if it may not
    grow. Looks at fewer seeds have been taken."""
    up_to = plan.study.pretraining_seeds.up_to if begun.up_to is None else begun.up_to
    numbers = range(plan.num_seeds, (up_to or 0) + 1)
    earlier = sorted(seen for seen in begun.looks if seen < plan.num_seeds)
    return [[*earlier, *range(plan.num_seeds, num + 1)] for num in numbers]


def list_tests(evaluation: Evaluation, measured: Mapping[str, float]) -> list[tuple[tuple[int, float], str]]:
    """List the smallest and the largest test set: the number of examples and the variance of one, and words."""
    tests, folders = [], find_data_dirs(evaluation)
    for name in sorted(evaluation.tasks):
        task, size = find_task(name), task_size(name, folders)
        if not task.kind.is_search:  # most tokens in search belong to documents, not to examples
            guess = max(int(float(f"{size.evaluated_tokens / 2 / max(size.example_tokens, 1):.2g}")), 1)
            is_guess, num = not (task.size or size.test_examples), size.test_examples or guess
            variance = measured.get(task.name, task.kind.metrics[task.metric].example_variance)
            source = ", a guess" * is_guess + ", variance measured" * (task.name in measured)
            tests.append(((num, variance), f"{task.name} ({num:,} examples{source})"))
    tests.sort()
    return tests[:: max(len(tests) - 1, 1)]  # the first and the last


def run_tree(plan: Plan) -> Tree:
    """Make a tree of the runs below their parents, with phases and kept steps: `610m-3k-9k-12k: 3k → 12k, mlm40 9k`."""
    root = Tree("runs, with the steps at which each starts and ends")
    num_seeds, plan = plan.num_seeds, plan.of_first_seed
    branches: dict[str, Tree] = {}
    for name, run in plan.runs.items():
        trained = ", ".join(f"{phase.label} {write_steps(phase.steps)}" for phase in run.recipe.curriculum)
        passed = [write_steps(step) for step in run.kept if step != run.last]
        keeps = f"; keeps {', '.join(passed)}" if passed else ""
        line = f"{name}: {write_steps(run.first)} → {write_steps(run.last)}, {trained}{keeps}"
        above = branches[run.parent] if run.parent else root
        branches[name] = above.add(Text(line, overflow="fold", no_wrap=False))
    if num_seeds > 1:
        seeds = f"seeds 1 to {num_seeds - 1}" if num_seeds > 2 else "seed 1"
        root.add(f"the same again for pretraining {seeds}, named …-seed1 and so on")
    return root


Columns = dict[str, tuple[str, Callable[[Any], str]]]
"""Header of a column → the key of its values in a row, and the function that formats them."""


def group_table(title: str, rows: Sequence[dict[str, Any]], columns: Columns) -> Table:
    """Make a table of groups of arms with a row of sums. It fits into 60 characters: words wrap, numbers do not."""
    table = Table(title=title, show_footer=True, **PLAIN)
    table.add_column("arms", "all", overflow="fold")
    for header, (key, show) in columns.items():
        table.add_column(header, show(sum(row[key] for row in rows)), justify="right", no_wrap=True)
    for row in rows:
        table.add_row(row["group"], *(show(row[key]) for key, show in columns.values()))
    return table


def describe_hours(machine: Machine, flops: float) -> str:
    """Write the time that a machine takes with all devices busy: `12 hours`, or below two hours `1m26s`."""
    hours = machine.device_hours(flops) / machine.devices
    return f"{show_estimate(hours)} hours" if hours >= 2 else duration(3600 * hours)


def cost_lines(estimate: Estimate) -> list[str]:
    """List in words the FLOPs by objective, the time with all devices busy, the disk space, and the assumptions."""
    by_objective = {name: flops for name, flops in estimate.flops_by_objective.items() if flops}
    spent = sum(by_objective.values())
    shares = [f"{name} {show_power(flops)} ({flops / spent:.0%})" for name, flops in by_objective.items()]
    lines = ["FLOPs of pretraining, with the head on targets only: " + ", ".join(shares)]
    machine, disk = estimate.machine, {use: format_bytes(size) for use, size in estimate.disk_bytes.items()}
    if machine and machine.devices > 1:
        all_busy = describe_hours(machine, estimate.flops)
        lines.append(f"on all {machine.devices} devices (planning.devices of the study), all busy: {all_busy}")
    if estimate.first_seed_flops is not None:
        first = f"{show_power(estimate.first_seed_flops)} FLOPs"
        if machine:
            first += f", {describe_hours(machine, estimate.first_seed_flops)} with all devices busy"
        lines.append(f"the first pretraining seed alone, with its fine-tunings: {first}")
    with_more = f"{disk['needed']} with the checkpoints that branches need, {disk['everything']} for all checkpoints"
    lines.append(f"disk: {disk['models']} for the models' weights, {with_more}")
    lines += estimate.misfits
    lines += [f"assumed: {line}" for line in estimate.assumptions]
    if estimate.not_counted:
        lines.append(f"not counted, since their shape is not known here: {', '.join(estimate.not_counted)}")
    return lines


def plan_json(plan: Plan, estimate: Estimate) -> dict[str, Any]:
    """Return the plan as plain data: runs with recipes, segments, models, checkpoints, names of cells, and the cost."""
    models = []
    for model in plan.models:
        arm = plan.arms[model.arm]
        facts = {"name": model.name, "arm": arm.name, "kind": model.kind, "seed": model.seed, "group": arm.group}
        facts |= {"model": arm.model, "parent": arm.parent, "curriculum": arm.curriculum}
        models.append(facts | {"checkpoint": f"{model.run}@{model.step}", "history": history(plan, model)})
    hidden: Any = {"machine": {"peak_flops", "source"}, "first_seed_flops": True}
    tree: dict[str, Any] = {
        "study": plan.study.name,
        "hypotheses": hash_hypotheses(plan) if plan.study.hypotheses else None,
        "steps": plan.steps,
        "steps_alone": plan.steps_alone,
        "longest_chain": plan.longest_chain,
        "runs": [to_jsonable_python(run, exclude={"key"}) for run in plan.runs.values()],
        "segments": plan.segments,
        "models": models,
        "checkpoints": [{"checkpoint": f"{run}@{step}"} | users for (run, step), users in plan.checkpoints.items()],
        "cells": [{"name": cell.name, "evaluates": cell.evaluates} for cell in plan.cells],
        "cost": to_jsonable_python(estimate, exclude=hidden),
    }
    return to_jsonable_python(tree)


def describe_advice(advice: Advice) -> RenderableType:
    """Describe the best use of the budget, the choices with their reasons, the presets, the cost, and the caveats."""
    choices = Table(title=f"The recipe: {advice.recipe.name}", show_lines=True)
    for name in ("what", "choice", "reason", "source"):
        choices.add_column(name, overflow="fold")
    for choice in advice.choices:
        choices.add_row(choice.what, choice.value, choice.reason, choice.source)
    lines: list[RenderableType] = [Text(advice.best_use, style="bold"), ""]
    lines += [Text(advice.words.tell(advice.chosen)), ""] if advice.words else []
    lines += [choices, ""]
    if any(not item.is_guess for item in advice.candidates):
        sizes = Table(title="What the budget buys, by size")
        for name in ("preset", "tokens", "per parameter", "epochs", "loss by the law"):
            sizes.add_column(name, justify="left" if name == "preset" else "right")
        for item in advice.candidates:
            if item.tokens < LEAST_TOKENS:
                sizes.add_row(item.name, show_tokens(item.tokens), "", "", "too few tokens")
                continue
            mark = "  ← chosen" if item == advice.chosen else ""
            epochs = show_estimate(item.epochs) if advice.text else ""
            loss, ratio = "nothing learned" if item.is_guess else f"{item.loss:.2f}", item.tokens_per_parameter
            sizes.add_row(item.name + mark, show_tokens(item.tokens), show_estimate(ratio), epochs, loss)
        lines += [sizes, ""]
    cost = f"cost: {show_power(advice.flops)} FLOPs"
    if machine := advice.machine:
        on_machine = f"{machine.devices} × {machine.name} ({machine.speed})"
        cost += f", {describe_hours(machine, advice.flops)} on {on_machine}"
    notes = [f"note: {caveat}" for caveat in advice.caveats]
    if any("docs/" in choice.source for choice in advice.choices):
        notes.append(f"docs/ in a source is {DOCS}")
    return Group(*lines, cost, *notes)


def recipe_yaml(advice: Advice, has_reasons: bool = True) -> str:
    """Return the recipe as YAML for `biphase pretrain`. Comments give its reasons, and the commands to run before."""
    recipe, lines = advice.recipe, [f"# {advice.best_use}"]
    lines += [f"# {advice.words.tell(advice.chosen)}"] if advice.words else []
    lines += [f"# {choice.what}: {choice.value}. {choice.reason} [{choice.source}]" for choice in advice.choices]
    lines += [f"# note: {caveat}" for caveat in advice.caveats]
    lines = lines if has_reasons else []
    if advice.text is None or advice.text.shards != recipe.data.shards:
        tokenizer = f"train TEXT --vocab-size {advice.vocab_size} --out tokenizer"
        if advice.chosen.kind == "continued":
            tokenizer = f"from {advice.chosen.name} --out tokenizer"
        lines.append(f"#   biphase tokenizer {tokenizer}")
        lines.append(f"#   biphase prepare TEXT --tokenizer tokenizer --out {recipe.data.shards}")
    tree = recipe.model_dump(mode="json", exclude_defaults=True)
    body = yaml.safe_dump(tree, sort_keys=False, default_flow_style=None, width=120)
    return "\n".join([*lines, body])
