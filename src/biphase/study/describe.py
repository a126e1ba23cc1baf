"""Plan and estimate → what a person or another program reads: tables, JSON, Graphviz, Mermaid."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.tree import Tree

from biphase.config import Phase
from biphase.study.cost import Estimate
from biphase.study.plan import Plan, PlannedRun, history
from biphase.study.spec import are_alike, trainings, write_steps
from biphase.style import COLORS


@dataclass(frozen=True)
class Stretch:
    """What a run trains between two points at which something changes or is kept."""

    run: str
    phase: Phase
    first: int
    last: int


def stretches(plan: Plan) -> Iterator[Stretch]:
    """The segments, without the cuts that only the schedule makes."""
    pending: Stretch | None = None
    for segment in plan.segments:
        if (
            pending is not None
            and pending.run == segment.run
            and pending.last not in plan.runs[segment.run].kept
            and are_alike(pending.phase, segment.phase)
        ):
            pending = Stretch(segment.run, pending.phase, pending.first, segment.last)
            continue
        if pending is not None:
            yield pending
        pending = Stretch(segment.run, segment.phase, segment.first, segment.last)
    if pending is not None:
        yield pending


def describe_plan(plan: Plan, estimate: Estimate) -> RenderableType:
    """What the study trains, in what order, what sharing saves, and what it costs."""
    parts: list[RenderableType] = [f"[bold]{escape(plan.study.title or plan.study.name)}[/bold]"]
    if plan.study.question:
        parts.append(escape(plan.study.question))
    parts += [
        "",
        *count_lines(plan),
        "",
        run_tree(plan),
        "",
        steps_table(estimate),
        *step_lines(estimate),
        "",
        cost_table(estimate),
        *cost_lines(estimate),
    ]
    return Group(*parts)


def count_lines(plan: Plan) -> list[str]:
    kinds = Counter(model.kind for model in plan.models)
    controls = f", and {kinds['random']} from random weights" if kinds["random"] else ""
    saved = 1 - plan.steps / plan.steps_alone
    lines = [
        f"{kinds['final']} final models and {kinds['intermediate']} intermediate checkpoints{controls}",
        f"{len(plan.runs)} runs of {len(plan.segments)} segments: {plan.steps:,} steps; each arm alone would need "
        f"{plan.steps_alone:,}, so sharing saves {saved:.0%}",
        f"longest chain of runs: {plan.longest_chain:,} steps",
    ]
    if plan.study.evaluation is not None:
        evaluation = plan.study.evaluation
        scores = sum(len(cell.evaluates) for cell in plan.cells)
        lines.append(
            f"{len(plan.cells):,} fine-tunings: {len(plan.models)} models × {len(trainings(evaluation))} trainings "
            f"({len(evaluation.tasks)} tasks) × {len(evaluation.learning_rates)} rates × {len(evaluation.seeds)} seeds "
            f"→ {scores:,} scores"
        )
    return lines


def run_tree(plan: Plan) -> Tree:
    """Runs under the runs that they start from."""
    root = Tree("runs, with the step that each starts from and ends at")
    branches: dict[str, Tree] = {}
    by_run: dict[str, list[Stretch]] = {}
    for stretch in stretches(plan):
        by_run.setdefault(stretch.run, []).append(stretch)
    for run in plan.runs.values():
        above = branches[run.parent] if run.parent else root
        branches[run.name] = above.add(escape(describe_run(run, by_run[run.name])))
    return root


def describe_run(run: PlannedRun, parts: list[Stretch]) -> str:
    phases: list[tuple[Phase, int]] = []
    for part in parts:
        if phases and are_alike(phases[-1][0], part.phase):
            phases[-1] = (part.phase, phases[-1][1] + part.last - part.first)
        else:
            phases.append((part.phase, part.last - part.first))
    trained = ", ".join(f"{phase.label} {write_steps(steps)}" for phase, steps in phases)
    passed = [write_steps(step) for step in run.kept if step != run.last]
    kept = f"; keeps {', '.join(passed)}" if passed else ""
    return f"{run.name}: {write_steps(run.first)} → {write_steps(run.last)}, {trained}{kept}"


def steps_table(estimate: Estimate) -> Table:
    rows = [row for row in estimate.groups if row.group != "evaluation"]
    table = Table(title="Steps", show_footer=True)
    table.add_column("arms", "all")
    for name, values in (
        ("models", [row.models for row in rows]),
        ("steps alone", [row.steps_alone for row in rows]),
        ("steps shared", [row.steps for row in rows]),
        ("tokens", [row.tokens for row in rows]),
    ):
        total = sum(values)
        table.add_column(name, f"{total:.3g}" if name == "tokens" else f"{total:,}", justify="right")
    is_published = any(row.published and row.published.steps is not None for row in rows)
    if is_published:
        table.add_column("published", justify="right")
    for row in rows:
        steps = row.published.steps if row.published else None
        published = [] if not is_published else ["" if steps is None else f"{steps:,}"]
        table.add_row(
            escape(row.group),
            str(row.models),
            f"{row.steps_alone:,}",
            f"{row.steps:,}",
            f"{row.tokens:.3g}",
            *published,
        )
    return table


def cost_table(estimate: Estimate) -> Table:
    """FLOPs, device hours, and published hours with the share of the device's peak that they imply."""
    machine, rows = estimate.machine, estimate.groups
    hours = {row.group: row.published.gpu_hours for row in rows if row.published and row.published.gpu_hours}
    table = Table(title="Cost", show_footer=True)
    table.add_column("", "all")
    table.add_column("FLOPs", f"{estimate.flops:.3g}", justify="right")
    if machine:
        total = sum(row.device_hours or 0.0 for row in rows)
        table.add_column(f"{machine.name} hours", number(total), justify="right")
    if hours:
        table.add_column("published", number(sum(hours.values())), justify="right")
    if hours and machine:
        table.add_column("which is of peak", justify="right")
    for row in rows:
        cells = [escape(row.group), f"{row.flops:.3g}"]
        if machine:
            cells.append(number(row.device_hours or 0.0))
        if hours:
            cells.append(number(hours[row.group]) if row.group in hours else "")
        if hours and machine and row.group in hours:
            cells.append(f"{row.flops / hours[row.group] / 3600 / machine.peak_flops:.1%}")
        table.add_row(*cells)
    return table


def number(value: float) -> str:
    """Two or three digits that count: 0.62, 12.5, 81,000."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def step_lines(estimate: Estimate) -> list[str]:
    """Where the steps differ from the published ones, and why."""
    lines = []
    for row in estimate.groups:
        if row.published and row.published.steps is not None:
            more = row.steps - row.published.steps
            note = f" {row.published.note}" if row.published.note else ""
            lines.append(f"{row.group}: {row.steps:,} steps, published {row.published.steps:,} ({more:+,}).{note}")
    return [escape(line) for line in lines]


def cost_lines(estimate: Estimate) -> list[str]:
    spent = sum(estimate.flops_by_objective.values())
    shares = [
        f"{name} {flops:.3g} ({flops / spent:.0%})" for name, flops in estimate.flops_by_objective.items() if flops
    ]
    lines = ["FLOPs of pretraining, the head only where a loss is: " + ", ".join(shares)]
    machine = estimate.machine
    if machine and machine.devices > 1:
        hours = sum(row.device_hours or 0.0 for row in estimate.groups) / machine.devices
        lines.append(f"on {machine.devices} of them, all busy: {number(hours)} hours")
    disk = estimate.disk
    lines.append(
        f"disk: {size(disk.models)} for the models' weights, {size(disk.needed)} with what branches need, "
        f"{size(disk.everything)} when nothing is dropped"
    )
    lines += [f"assumed: {line}" for line in estimate.assumptions]
    if estimate.unknown:
        lines.append(f"not counted, for their shape is not known here: {', '.join(estimate.unknown)}")
    return [escape(line) for line in lines]


def size(num_bytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if num_bytes < 1000 or unit == "TB":
            break
        num_bytes /= 1000
    return f"{num_bytes:.3g} {unit}"


def plan_json(plan: Plan, estimate: Estimate | None = None) -> dict[str, Any]:
    """The plan as plain data: runs with their recipes, segments, models, checkpoints, cells by name; and the cost."""
    tree: dict[str, Any] = {
        "study": plan.study.name,
        "steps": plan.steps,
        "steps_alone": plan.steps_alone,
        "longest_chain": plan.longest_chain,
        "runs": [
            {
                "name": run.name,
                "group": run.group,
                "model": run.model,
                "parent": run.parent,
                "first": run.first,
                "last": run.last,
                "kept": list(run.kept),
                "recipe": run.recipe.model_dump(mode="json"),
            }
            for run in plan.runs.values()
        ],
        "segments": [
            {
                "name": segment.name,
                "run": segment.run,
                "parent": segment.parent,
                "phase": segment.phase.model_dump(mode="json"),
                "part": segment.part,
                "first": segment.first,
                "last": segment.last,
            }
            for segment in plan.segments
        ],
        "models": [
            {
                "name": model.name,
                "arm": model.arm,
                "kind": model.kind,
                "group": plan.arms[model.arm].group,
                "model": plan.arms[model.arm].model,
                "parent": plan.arms[model.arm].parent,
                "curriculum": plan.arms[model.arm].curriculum,
                "checkpoint": model.checkpoint,
                "history": [phase.model_dump(mode="json") for phase in history(plan, model)],
            }
            for model in plan.models
        ],
        "checkpoints": [
            {
                "checkpoint": f"{kept.run}@{kept.step}",
                "models": list(kept.models),
                "needed_by": list(kept.needed_by),
                "moments_needed_by": list(kept.moments_needed_by),
            }
            for kept in plan.checkpoints
        ],
        "cells": [{"name": cell.name, "evaluates": list(cell.evaluates)} for cell in plan.cells],
    }
    if estimate is not None:
        tree["cost"] = estimate_json(estimate)
    return tree


def estimate_json(estimate: Estimate) -> dict[str, Any]:
    machine, disk = estimate.machine, estimate.disk
    return {
        "machine": machine and {"name": machine.name, "devices": machine.devices, "efficiency": machine.efficiency},
        "flops": estimate.flops,
        "flops_by_objective": estimate.flops_by_objective,
        "groups": [
            {
                "group": row.group,
                "models": row.models,
                "steps_alone": row.steps_alone,
                "steps": row.steps,
                "tokens": row.tokens,
                "flops": row.flops,
                "device_hours": row.device_hours,
                "published": row.published and row.published.model_dump(mode="json"),
            }
            for row in estimate.groups
        ],
        "disk_bytes": {"models": disk.models, "needed": disk.needed, "everything": disk.everything},
        "not_counted": list(estimate.unknown),
        "assumptions": list(estimate.assumptions),
    }


def graph(plan: Plan) -> tuple[dict[tuple[str, int], str], list[tuple[tuple[str, int], tuple[str, int], Stretch]]]:
    """Nodes, (run, step) → text, and edges with what is trained between them."""
    nodes: dict[tuple[str, int], str] = {}
    models = {(model.run, model.step): model.name for model in plan.models if model.kind == "intermediate"}
    models |= {(model.run, model.step): model.name for model in plan.models if model.kind == "final"}
    edges = []
    for stretch in stretches(plan):
        run = plan.runs[stretch.run]
        start = (stretch.run, stretch.first)
        if stretch.first == run.first:
            start = (run.parent, run.first) if run.parent else (f"random weights: {run.model}", 0)
            nodes.setdefault(start, start[0])
        end = (stretch.run, stretch.last)
        nodes[end] = models.get(end, f"{stretch.run}@{stretch.last}")
        edges.append((start, end, stretch))
    return nodes, edges


def plan_dot(plan: Plan) -> str:
    """The tree for Graphviz: `dot -Tsvg`. Boxes are models, points are other kept checkpoints."""
    nodes, edges = graph(plan)
    names = {node: f"n{i}" for i, node in enumerate(nodes)}
    models = {(model.run, model.step) for model in plan.models}
    lines = ["digraph plan {", "  rankdir=LR;", '  node [fontname="sans-serif"]; edge [fontname="sans-serif"];']
    for node, text in nodes.items():
        shape = "box" if node in models else "plaintext" if node[1] == 0 else "ellipse"
        lines.append(f'  {names[node]} [label="{text}", shape={shape}];')
    for start, end, stretch in edges:
        text = f"{stretch.phase.label} {write_steps(stretch.last - stretch.first)}"
        color = COLORS[stretch.phase.objective]
        lines.append(f'  {names[start]} -> {names[end]} [label="{text}", color="{color}", fontcolor="{color}"];')
    return "\n".join([*lines, "}"]) + "\n"


def plan_mermaid(plan: Plan) -> str:
    """The tree for Mermaid, as Markdown pages draw it. Boxes are models, rounded ones other kept checkpoints."""
    nodes, edges = graph(plan)
    names = {node: f"n{i}" for i, node in enumerate(nodes)}
    models = {(model.run, model.step) for model in plan.models}
    lines = ["flowchart LR"]
    for node, text in nodes.items():
        lines.append(f'  {names[node]}["{text}"]' if node in models else f'  {names[node]}("{text}")')
    for number, (start, end, stretch) in enumerate(edges):
        text = f"{stretch.phase.label} {write_steps(stretch.last - stretch.first)}"
        lines.append(f'  {names[start]} -- "{text}" --> {names[end]}')
        lines.append(f"  linkStyle {number} stroke:{COLORS[stretch.phase.objective]}")
    return "\n".join(lines) + "\n"
