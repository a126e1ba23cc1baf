"""Plan → a picture of the tree: steps to the right, a lane for each run, colours by objective, height by rate."""

from collections.abc import Iterator
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Polygon
from matplotlib.patheffects import withStroke

from biphase.errors import InputError
from biphase.study.plan import Plan
from biphase.study.trunks import PlannedRun
from biphase.style import COLORS

PICTURE_FORMATS = (".svg", ".png", ".pdf")
LANE_INCHES = 0.2
HEIGHT = 0.36
"""Half of a lane's bar at the full rate."""
NAMES = {"clm": "CLM: next token", "mlm": "MLM: masked tokens", "mntp": "MNTP: masked tokens from one place before"}


def draw_plan(plan: Plan, path: Path) -> None:
    """Write the picture as SVG, PNG or PDF; the same plan gives the same bytes of SVG. It is that of the first
    pretraining seed: the others look alike."""
    plan = plan.of_first_seed
    if path.suffix not in PICTURE_FORMATS:
        raise InputError(f"{path}: a picture ends in {', '.join(PICTURE_FORMATS)}")
    settings: Any = {"svg.hashsalt": "biphase", "svg.fonttype": "none", "font.size": 9, "hatch.linewidth": 0.5}
    with matplotlib.rc_context(settings | {"text.parse_math": False}):
        figure = Figure(figsize=(10, 1.3 + LANE_INCHES * len(plan.runs)), layout="constrained")
        axes = figure.subplots()
        plot_runs(plan, axes)
        place_key(plan, axes)
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)


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
    for model in plan.models:
        if model.kind == "random":
            continue
        face = "black" if model.kind == "final" else "white"
        axes.plot(
            model.step, lanes[model.run], "o", markersize=4, markerfacecolor=face, markeredgecolor="black", zorder=4
        )
    axes.set_ylim(len(lanes) - 0.4, -0.6)
    axes.set_yticks([])
    ticks = [tick for tick in axes.get_xticks() if 0 <= tick <= end]
    axes.set_xticks(ticks, [f"{tick / 1000:g}k" if end >= 10_000 and tick else f"{tick:g}" for tick in ticks])
    is_adapted = any(run.recipe.init.model for run in plan.runs.values())
    axes.set_xlabel("steps" if is_adapted else "steps since random weights")
    axes.spines[["left", "right", "top"]].set_visible(False)


def order_lanes(plan: Plan) -> Iterator[str]:
    """Each run under its parent, the latest branch first: then no connecting line crosses a bar."""
    children: dict[str | None, list[PlannedRun]] = {}
    for run in plan.runs.values():
        children.setdefault(run.parent, []).append(run)

    def below(name: str | None) -> Iterator[str]:
        found = children.get(name, [])
        for run in found if name is None else sorted(found, key=lambda run: -run.first):
            yield run.name
            yield from below(run.name)

    return below(None)


def draw_run(plan: Plan, run: PlannedRun, lane: int, axes: Axes) -> None:
    segments = [segment for segment in plan.segments if segment.run == run.name]
    marks = [model.step for model in plan.models if model.run == run.name]
    for text, alike in groupby(segments, key=lambda segment: segment.phase.label):
        stretch = list(alike)
        objective = stretch[0].phase.objective
        steps = [stretch[0].first, *(segment.last for segment in stretch)]
        below = [(step, lane + half_height(run, step)) for step in steps]
        above = [(step, lane - half_height(run, step)) for step in reversed(steps)]
        axes.add_patch(Polygon([*below, *above], zorder=2, **look(objective)))
        # The name stands in the longest piece between two marks, where there is room for it.
        free = sorted({steps[0], *(mark for mark in marks if steps[0] < mark < steps[-1]), steps[-1]})
        first, last = max(pairwise(free), key=lambda piece: piece[1] - piece[0])
        if last - first > 0.017 * axes.get_xlim()[1] * len(text):
            axes.text(
                (first + last) / 2,
                lane,
                text,
                ha="center",
                va="center_baseline",
                fontsize=7.5,
                color="white",
                path_effects=[withStroke(linewidth=4, foreground=COLORS[objective])],
                zorder=3,
            )


def look(objective: str) -> dict[str, Any]:
    """Colour, and for print without colours a hatch for what is masked."""
    hatch = {"clm": None, "mlm": "////", "mntp": "...."}[objective]
    return {"facecolor": COLORS[objective], "edgecolor": "white", "linewidth": 0, "hatch": hatch}


def half_height(run: PlannedRun, step: int) -> float:
    """Half the height of the bar at a step: the learning rate as a share of its peak."""
    schedule = run.recipe.schedule
    climbing = (step - run.first) / schedule.warmup_steps if schedule.warmup_steps else 1.0
    falling = (run.last - step) / schedule.decay_steps if schedule.decay_steps else 1.0
    return HEIGHT * min(climbing, falling, 1.0)


def place_key(plan: Plan, axes: Axes) -> None:
    """Above the lanes, outside of the axes."""
    used = dict.fromkeys(segment.phase.objective for segment in plan.segments)
    key: list[Artist] = [Patch(label=NAMES[name], **look(name)) for name in used]
    marker: dict[str, Any] = {"marker": "o", "linestyle": "none", "markeredgecolor": "black", "markersize": 4}
    key.append(Line2D([], [], markerfacecolor="black", label="final model", **marker))
    if any(model.kind == "intermediate" for model in plan.models):
        key.append(Line2D([], [], markerfacecolor="white", label="evaluated on the way", **marker))
    key.append(Line2D([], [], linestyle="none", label="height of a bar: learning rate"))
    axes.set_title(f"{plan.study.title or plan.study.name}\n", loc="left", fontsize=10)
    axes.legend(
        handles=key,
        loc="lower left",
        bbox_to_anchor=(-0.01, 1.0),
        ncols=len(key),
        frameon=False,
        fontsize=8,
        handlelength=1.6,
        columnspacing=1.4,
        borderaxespad=0.1,
    )
