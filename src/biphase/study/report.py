"""A study's folder, finished or not → the report on it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from biphase.console import duration
from biphase.corpus.manifest import read_shard_manifest
from biphase.errors import first_of
from biphase.files import read_json_as
from biphase.finetuning.scores import TASK_SETTINGS, Score, ScoreSet, settings_of
from biphase.paper.findings import judge_paper
from biphase.paper.published import TABLE_NUMBERS
from biphase.report.averages import with_averages
from biphase.report.claims import Finding
from biphase.report.figures import figure_pool
from biphase.report.formats import csv_text, show_count
from biphase.report.page import Told, write_report
from biphase.report.results import ResultSet
from biphase.run import Run, read_metrics, read_recipe
from biphase.study.folder import StudyFolder, StudyState, TrainedRecord, list_sets, measure_cells, read_state
from biphase.study.hypotheses import (
    describe_declaration,
    hypotheses_json,
    judge_hypotheses,
    list_equivalents,
    list_scores,
)
from biphase.study.plan import Plan
from biphase.study.results import collect_results, find_bm25
from biphase.study.run import status

DTYPES = {"bf16": "bfloat16", "fp32": "float32", "auto": ""}
MOST_NAMES = 3


def list_notes(place: StudyFolder, state: StudyState) -> Iterator[str]:
    """A sentence for each."""
    yield from tell_unlike("trained", [(name, trained_with(place, record)) for name, record in state.records.items()])
    by_task: dict[str, list[tuple[str, Score]]] = {}
    for model, found in state.scores.items():
        for score in found.scores:
            by_task.setdefault(score.task, []).append((model, score))
    settings = dict[str, None]()
    for scores in by_task.values():
        settings |= dict.fromkeys(tell_unlike("fine-tuned", [(model, tuned_with(score)) for model, score in scores]))
    yield from settings


def trained_with(place: StudyFolder, record: TrainedRecord) -> dict[str, str]:
    """What decides a run's weights beside its recipe, as far as that is recorded."""
    run = Run(place.runs / record.folder)
    environment = read_json_as(run.path / "environment.json", dict[str, Any])
    given = DTYPES[read_recipe(run).compute.precision]
    return {"precision": environment.get("precision", given), "device": environment.get("device", "")}


def tuned_with(score: Score) -> dict[str, str]:
    own = {key: value for key, value in settings_of(score).items() if key not in {*TASK_SETTINGS, "weights"}}
    return own | {"device": str(score.machine.get("device", ""))}


def tell_unlike(how: str, facts: Sequence[tuple[str, Mapping[str, str]]]) -> Iterator[str]:
    """A sentence for each fact that is known to differ; `facts` with the name of a run or a model, which may be there
    more than once."""
    for key in dict.fromkeys(key for _, own in facts for key in own):
        names: dict[str, dict[str, None]] = {}
        for name, own in facts:
            if own.get(key):
                names.setdefault(own[key], {})[name] = None
        if len(names) > 1:
            shown = [f"{value} ({first_of([*some], MOST_NAMES)})" for value, some in sorted(names.items())]
            yield f"Not all {how} with the same {key}: {', '.join(shown)}; differences between these may come from it."


CELL_COLUMNS = ("model", "task", "learning_rate", "seed", "metric", "steps", "seconds")


def report_study(
    plan: Plan, place: StudyFolder, out: Path, commands: Sequence[str]
) -> tuple[Path, tuple[Finding, ...], ResultSet]:
    """Write tables, figures, verdicts and the page of what is finished into the folder `out`; returns the page, the
    study's hypotheses with their verdicts, and the results.

    `commands` make the results again, in their order.
    """
    with figure_pool() as pool:
        picture = pool.submit(plan_svg, replace(plan, cells=()))  # beside the scores, which take longest to read
        state = read_state(plan, place)
        scores = state.scores
        results = with_averages(collect_results(plan, scores))
        hypotheses = judge_hypotheses(plan, results) if plan.study.hypotheses else ()
        files = {"scores.csv": cells_csv(scores)}
        if hypotheses:
            files["hypotheses.json"] = hypotheses_json(plan, place.path, hypotheses)
        told = Told(
            title=plan.study.title or f"The study {plan.study.name}",
            question=plan.study.question,
            verdicts=judge_paper(results, list_scores(plan)) if results.results else None,
            hypotheses=(hypotheses, describe_declaration(plan, place.path)) if hypotheses else None,
            declared=list_equivalents(plan),
            notes=[*tell_order(plan), *list_notes(place, state)],
            costs=list_costs(plan, state),
            commands=[*tell_texts(plan, state), *commands],
            bm25=find_bm25(scores),
        )
        page = write_report(
            results,
            out,
            told,
            table_numbers=TABLE_NUMBERS,
            plan_svg=picture.result(),
            missing=list(list_missing(plan, place, state)),
            losses=read_losses(plan, place, state),
            files=files,
            pool=pool,
        )
    return page, hypotheses, results


def tell_texts(plan: Plan, state: StudyState) -> Iterator[str]:
    """A comment on each shard set that runs were trained on; its size, where the set is still there."""
    trained = ((list_sets(plan.runs[name].recipe.data), one.text or ()) for name, one in state.records.items())
    for path, content in dict.fromkeys(pair for pairs in trained for pair in zip(*pairs, strict=False)):
        size = ""
        if (Path(path) / "manifest.json").exists():
            text = read_shard_manifest(Path(path)).splits["train"]
            size = f"{show_count(text.documents, 'document')}, {show_count(text.tokens, 'token')}, "
        yield f"# trained on {path}: {size}fingerprint {content[:8]}"


def tell_order(plan: Plan) -> Iterator[str]:
    if plan.has_one_order:
        yield "All pretraining seeds saw the data in one order: what they show holds for that order of the data."


def plan_svg(plan: Plan) -> str:
    from biphase.study.picture import draw_plan  # matplotlib, which only the process that draws has to load

    with TemporaryDirectory() as folder:
        picture = Path(folder) / "plan.svg"
        draw_plan(plan, picture)
        return picture.read_text(encoding="utf-8")


def read_losses(plan: Plan, place: StudyFolder, state: StudyState) -> dict[str, list[dict[str, Any]]]:
    """What the runs, finished or not, logged of their losses, at steps that count from random weights: a branch begins
    where it branches."""
    losses = {}
    for name, planned in plan.runs.items():
        record = state.records.get(name)
        folders = [place.runs / record.folder] if record else place.runs.glob(f"{name}-????????")
        runs = [Run(path) for path in folders if (path / "metrics.jsonl").exists()]
        logs = [[*read_metrics(run, "train"), *read_metrics(run, "validation")] for run in runs]
        if rows := max(logs, key=len, default=[]):
            losses[name] = [row | {"step": planned.first + row["step"]} for row in rows]
    return losses


def cells_csv(scores: dict[str, ScoreSet]) -> str:
    """Every cell as it was measured: a row for each model, task, rate and seed, in shares; empty where it diverged."""
    rows: list[dict[str, object]] = []
    for model, found in scores.items():
        for score in sorted(found.scores, key=lambda s: (s.task, s.config.learning_rate, s.config.seed)):
            config, seconds = score.config, round(sum(score.seconds.values()), 1)
            own = (model, score.task, config.learning_rate, config.seed, score.metric, score.num_steps, seconds)
            rows.append(dict(zip(CELL_COLUMNS, own, strict=True)))
            for split, values in score.metrics.items():
                rows[-1] |= {f"{split} {metric}": f"{value:.6f}" for metric, value in values.items()}
    columns = (*CELL_COLUMNS, *sorted({key for row in rows for key in row}.difference(CELL_COLUMNS)))
    return csv_text([columns, *([row.get(column, "") for column in columns] for row in rows)])


def list_costs(plan: Plan, state: StudyState) -> list[dict[str, object]]:
    """What was spent, as measured; all rows have the same keys, which are the headers."""
    columns = ("stage", "units", "steps", "tokens", "worker time")
    rows = list[tuple[object, ...]]()
    if state.records:
        timed = [record.seconds for record in state.records.values() if record.is_timed]
        untimed = len(state.records) - len(timed)
        spent = duration(sum(timed)) if timed else "not known"
        spent += f", without {show_count(untimed, 'run')} whose time is not known" if timed and untimed else ""
        steps, tokens = (sum(getattr(plan.runs[name], what) for name in state.records) for what in ("steps", "tokens"))
        rows.append(("pretraining", len(state.records), steps, f"{tokens:,}", spent))
    for task, (num, steps, seconds) in measure_cells(state.scores).items():
        rows.append((f"fine-tuning and evaluation: {task}", num, steps, "", duration(seconds)))
    return [dict(zip(columns, row, strict=True)) for row in rows]


def list_missing(plan: Plan, place: StudyFolder, state: StudyState) -> Iterator[str]:
    progress = status(plan, place, state)
    for line in progress["lines"]:
        if line.done < line.total:
            what = "runs" if line.name == "train" else f"cells of {line.name}"
            yield f"{line.total - line.done} of {line.total} {what} are not finished."
    for failure in progress["failed"]:
        yield f"Failed: {failure.unit}: {failure.reason}"
    for found in state.scores.values():
        for path, reason in found.broken.items():
            yield f"Left out, because it is damaged: {path}: {reason}"
        diverged = [score for score in found.scores if score.diverged]
        if diverged:
            points = ", ".join(f"{s.task} at {s.config.learning_rate:g} seed {s.config.seed}" for s in diverged)
            yield f"{diverged[0].model}: training diverged on {points}."
