"""A study's folder, finished or not → the report on it: what each model is in the paper's terms, and what it scored."""

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from biphase.config import Phase
from biphase.console import duration
from biphase.errors import InputError
from biphase.files import read_json
from biphase.report.page import write_report
from biphase.report.results import ReportArm, Result, ResultSet, measured, place_arms
from biphase.report.scores import ScoreSet, select
from biphase.report.statistics import mean_interval
from biphase.run import open_run, read_metrics
from biphase.study.advise import Evidence
from biphase.study.cost import Sizes, measure_sizes
from biphase.study.folder import StudyFolder, StudyState, is_trained, measure_cells, read_state, status, trained_folder
from biphase.study.picture import draw_plan
from biphase.study.plan import Model, Plan, history
from biphase.tasks.spec import find_task

FAMILIES = {
    "sequence_classification": "SC",
    "token_classification": "TC",
    "question_answering": "QA",
    "retrieval": "IR",
}
PAPER_METRICS = {"SC": "accuracy", "TC": "paper_f1", "QA": "paper_f1", "IR": "paper_ndcg_at_10"}


def report_study(plan: Plan, place: StudyFolder, out: Path, commands: Sequence[str]) -> Path:
    """Write tables, figures, verdicts and the page of what is finished into the folder `out`; returns the page.

    `commands` make the results again, in their order.
    """
    state = read_state(plan, place)
    scores = state.scores
    results = ResultSet(tuple(collect_results(plan, scores)))
    with TemporaryDirectory() as folder:
        picture = Path(folder) / "plan.svg"
        draw_plan(plan, picture)
        svg = picture.read_text(encoding="utf-8")
    page = write_report(
        results,
        out,
        title=plan.study.title or f"The study {plan.study.name}",
        question=plan.study.question,
        plan_svg=svg,
        costs=list_costs(plan, place, scores),
        commands=commands,
        missing=list(list_missing(plan, place, state)),
        losses={
            name: read_metrics(open_run(trained_folder(place, name)), "train")
            + read_metrics(open_run(trained_folder(place, name)), "validation")
            for name, run in plan.runs.items()
            if is_trained(place, run)
        },
    )
    write_cells(scores, page.parent / "scores.csv")
    return page


def write_cells(scores: dict[str, ScoreSet], path: Path) -> None:
    """Every cell as it was measured: a row for each model, task, rate and seed, in shares; empty where it diverged."""
    rows = [
        (model, score)
        for model, found in scores.items()
        for score in sorted(found.scores, key=lambda s: (s.task, s.config.learning_rate, s.config.seed))
    ]
    names = sorted(
        {(split, metric) for _, score in rows for split, values in score.metrics.items() for metric in values}
    )
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        labels = [f"{split} {metric}" for split, metric in names]
        writer.writerow(["model", "task", "learning_rate", "seed", "metric", "steps", "seconds", *labels])
        for model, score in rows:
            values = [score.metrics.get(split, {}).get(metric) for split, metric in names]
            shown = ["" if value is None else f"{value:.6f}" for value in values]
            config, seconds = score.config, round(sum(score.seconds.values()), 1)
            own = [model, score.task, config.learning_rate, config.seed, score.metric, score.num_steps, seconds]
            writer.writerow([*own, *shown])


def collect_results(plan: Plan, scores: dict[str, ScoreSet]) -> Iterator[Result]:
    """Every model on every task, by the standard metric and by the paper's, in each of its comparisons."""
    sizes = measure_sizes(plan)
    arms = place_arms(describe_model(plan, model, sizes) for model in plan.models)
    for arm in arms:
        found = scores[arm.name]
        for task in found.tasks:
            name = next(model for model in found.models if (model, task) in found.cells)
            family = FAMILIES[find_task(task).family]
            own = next(iter(found.cells[name, task].values())).metric
            for kind, metric in (("standard", own), ("paper", PAPER_METRICS[family])):
                try:
                    chosen = select(found, name, task, metric)
                except InputError:
                    continue  # diverged everywhere: told as missing
                yield measured(arm, family, task, kind, chosen.test, chosen.test_by_rate)  # type: ignore[arg-type]


def compare_curricula(plan: Plan, place: StudyFolder) -> list[Evidence]:
    """How the curricula of a study did: mean test score in % over all tasks, seed by seed, at the largest budget of the
    network that has most of them. Left out are arms with a task missing and curricula that have no short form."""
    results = list(collect_results(plan, read_state(plan, place).scores))
    tasks = {result.dataset for result in results}
    scores = {(r.arm.name, r.dataset): r.samples for r in results if r.metric == "standard"}
    tables = {table.name for table in plan.study.curricula}
    found: dict[tuple[str, int], list[Evidence]] = {}
    for arm in plan.arms.values():
        samples = [scores[arm.name, task] for task in tasks if (arm.name, task) in scores]
        is_whole = len(samples) == len(tasks) and len(set(map(len, samples))) == 1
        if arm.parent is not None or arm.curriculum in tables or not is_whole:
            continue
        interval = mean_interval([100 * sum(values) / len(values) for values in zip(*samples, strict=True)])
        evidence = Evidence(arm.curriculum, interval.mean, interval.half_width)
        found.setdefault((arm.model, arm.recipe.num_steps), []).append(evidence)
    return max(found.items(), key=lambda item: (len(item[1]), item[0][1]), default=((), []))[1]


def describe_model(plan: Plan, model: Model, sizes: Sizes) -> ReportArm:
    """A model as the paper would describe it."""
    arm = plan.arms[model.arm]
    if model.kind == "random":
        return ReportArm(model.name, "control", arm.model, "none", None, pretrain_steps=0, clm_steps=0, mlm_steps=0)
    phases = history(plan, model)
    parent = None if arm.parent is None else next(other for other in plan.models if other.name == arm.parent)
    before = () if parent is None else history(plan, parent)
    num_before = sum(phase.steps for phase in before)
    pretraining, rest = before or phases, arm.recipe.curriculum if before else ()
    clm = round(sum(p.steps * share for p in pretraining for part, share in p.parts if part.objective == "clm"))
    mlm = sum(phase.steps for phase in pretraining) - clm
    later = sum(phase.steps for phase in phases) - num_before if parent is not None else 0
    masks = [phase.mask_probability for phase in phases if phase.objective != "clm"]
    is_intermediate = model.kind == "intermediate"
    return ReportArm(
        name=model.name,
        setup="efficiency" if is_intermediate else "objective" if is_of_the_paper(pretraining, rest) else "other",
        size=arm.model,
        objective="clm" if not mlm else "mlm" if not clm else "clm+mlm",
        mask_percent=round(100 * masks[-1]) if masks else None,
        pretrain_steps=clm + mlm,
        clm_steps=clm,
        mlm_steps=mlm,
        cpt_steps=later,
        parent=model.arm if is_intermediate else arm.parent,
        flops=sum_flops(plan, model, sizes),
    )


def is_of_the_paper(pretraining: tuple[Phase, ...], rest: tuple[Phase, ...]) -> bool:
    """CLM, MLM, or CLM and then MLM; and MLM that continues one of these."""
    kinds, later = ([part.objective for phase in phases for part, _ in phase.parts] for phases in (pretraining, rest))
    return kinds in (["clm"], ["mlm"], ["clm", "mlm"]) and later in ([], ["mlm"])


def sum_flops(plan: Plan, model: Model, sizes: Sizes) -> float | None:
    """Of all training from the beginning to this step, its parents' included; None for a network of unknown shape."""
    total, name, end = 0.0, model.run, model.step
    while True:
        run = plan.runs[name]
        spent = sizes.flops(run)
        if not spent:
            return None
        total += sum(spent.values()) * (end - run.first) / run.steps
        if run.parent is None:
            return total
        name, end = run.parent, run.first


def list_costs(plan: Plan, place: StudyFolder, scores: dict[str, ScoreSet]) -> list[dict[str, object]]:
    """What was spent, as measured."""
    trained = [name for name, run in plan.runs.items() if is_trained(place, run)]
    rows: list[dict[str, object]] = []
    if trained:
        seconds = sum(read_json(place.record(name))["seconds"] for name in trained)
        steps = sum(plan.runs[name].steps for name in trained)
        tokens = sum(plan.runs[name].steps * plan.runs[name].recipe.batch_tokens for name in trained)
        rows.append(cost_row("pretraining", len(trained), steps, tokens, seconds))
    for task, cells in measure_cells(scores).items():
        steps = sum(cell.steps for cell in cells)
        seconds = sum(cell.seconds for cell in cells)
        rows.append(cost_row(f"fine-tuning and evaluation: {task}", len(cells), steps, None, seconds))
    return rows


def cost_row(stage: str, units: int, steps: int, tokens: int | None, seconds: float) -> dict[str, object]:
    return {
        "stage": stage,
        "units": units,
        "steps": steps,
        "tokens": "" if tokens is None else f"{tokens:,}",
        "worker time": duration(seconds),
    }


def list_missing(plan: Plan, place: StudyFolder, state: StudyState) -> Iterator[str]:
    lines, failures = status(plan, place, state)
    for line in lines:
        if line.done < line.total:
            what = "runs" if line.name == "train" else f"cells of {line.name}"
            yield f"{line.total - line.done} of {line.total} {what} are not finished."
    for failure in failures:
        if not failure.is_blocked:
            yield f"Failed: {failure.unit}: {failure.reason}"
    for found in state.scores.values():
        for broken in found.broken:
            yield f"Left out, because it is damaged: {broken.path}: {broken.reason}"
        diverged = [score for score in found.scores if score.diverged]
        if diverged:
            points = ", ".join(f"{s.task} at {s.config.learning_rate:g} seed {s.config.seed}" for s in diverged)
            yield f"{diverged[0].model}: training diverged on {points}."
