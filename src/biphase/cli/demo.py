"""The whole path on bundled text and tasks: a study of three arms of equal budget, beside the same network untrained.

Each stage writes into the demo's folder and is skipped when its output is there, so the command can be stopped and
started again.
"""

import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np
from rich.table import Table

from biphase.console import duration, err, out
from biphase.corpus.prepare import prepare
from biphase.corpus.text import find_text_sources, sample_texts
from biphase.corpus.tokenizer import save_tokenizer, train_tokenizer
from biphase.engine.local import Engine
from biphase.errors import InputError
from biphase.report.statistics import Difference, Interval, mean_interval, paired_t_test
from biphase.study.folder import StudyFolder, claim_study_folder, read_state, trained_folder
from biphase.study.plan import Plan, plan_study
from biphase.study.report import report_study
from biphase.study.run import run_study
from biphase.study.spec import load_study
from biphase.tasks.spec import find_task

VOCAB_SIZE = 4096
BUNDLED = Path(str(resources.files("biphase") / "bundled"))


@dataclass(frozen=True)
class Result:
    """Test scores of one model on one task, in percent, in the order of seeds."""

    model: str
    task: str
    scores: tuple[float, ...]

    @property
    def interval(self) -> Interval:
        return mean_interval(self.scores)


def run_demo(folder: Path, overrides: Sequence[str] = ()) -> None:
    """Run every stage, print the table, and write `demo.png`, the report and an encoder for transformers.

    `overrides` change the study, as on the command line of `biphase study run`.
    """
    started = time.monotonic()
    corpus = BUNDLED / "corpus"
    say("1/5", "train a tokenizer on the bundled text")
    if not (folder / "tokenizer").exists():
        texts = sample_texts(find_text_sources([corpus / "train.jsonl.zst"]))
        save_tokenizer(train_tokenizer(texts, VOCAB_SIZE), folder / "tokenizer")
    say("2/5", "tokenize it into shards")
    prepare(
        [corpus / "train.jsonl.zst"],
        folder / "tokenizer",
        folder / "shards",
        validation_sources=[corpus / "validation.jsonl.zst"],
    )
    plan = plan_study(load_study(BUNDLED / "demo.yaml", [f"recipe.data.shards={folder / 'shards'}", *overrides]))
    place = claim_study_folder(folder / "study", plan.study)
    say("3/5", f"pretrain {', '.join(plan.arms)}; fine-tune each and random weights: {len(plan.cells)} cells")
    failures = run_study(plan, place, Engine())
    if failures:
        raise InputError(f"{failures[0].unit}: {failures[0].reason}; the same command goes on")
    say("4/5", "export the biphasic encoder for transformers")
    encoder = export(plan, place, folder / "encoder")
    say("5/5", "report")
    results = collect_results(plan, place)
    draw(results, folder / "demo.png")
    page = report_study(plan, place, folder / "report", [f"biphase demo {shlex.quote(str(folder))}"])
    print_table(results)
    out.print(f"\n{verdict(results)}\nreport: {page} · plot: {folder / 'demo.png'} · encoder: {encoder}")
    out.print(f"took {duration(time.monotonic() - started)}")


def say(stage: str, what: str) -> None:
    err.print(f"[bold]\\[{stage}][/bold] {what}")


def export(plan: Plan, place: StudyFolder, path: Path) -> Path:
    """The last arm, as a folder that transformers loads."""
    from biphase.export.model import export_checkpoint

    arm = list(plan.arms)[-1]
    model = next(model for model in plan.models if model.name == arm)
    folder = trained_folder(place, model.run)
    encoder = path.with_name(f"{path.name}-{folder.name.rpartition('-')[2]}")
    if not encoder.exists():
        out.print(export_checkpoint(f"{folder}@{model.step}", encoder), markup=False)
    return encoder


def collect_results(plan: Plan, place: StudyFolder) -> list[Result]:
    """Random weights last. Raises `InputError` for a cell that diverged."""
    assert plan.study.evaluation is not None
    results = []
    scores = read_state(plan, place).scores
    for model in plan.models:
        found = sorted(scores[model.name].scores, key=lambda score: score.config.seed)
        for score in found:
            if score.diverged:
                raise InputError(f"{score.headline()}; please report it, with the kind of machine")
        for task in plan.study.evaluation.tasks:
            chosen = [100 * score.metrics["test"][score.metric] for score in found if score.task == task]
            results.append(Result(model.name, task, tuple(chosen)))
    return results


def gain(results: Sequence[Result], model: str, task: str) -> Difference:
    """A model minus its network from random weights, paired by seed."""
    scores = {result.model: result.scores for result in results if result.task == task}
    return paired_t_test(scores[model], scores[control_of(results)])


def control_of(results: Sequence[Result]) -> str:
    return results[-1].model


def names_of(results: Sequence[Result]) -> tuple[list[str], list[str]]:
    """Models without the control, and tasks."""
    models = dict.fromkeys(result.model for result in results)
    return [name for name in models if name != control_of(results)], list(dict.fromkeys(r.task for r in results))


def verdict(results: Sequence[Result]) -> str:
    """What the intervals allow to say, and no more."""
    models, tasks = names_of(results)
    clear = {model: [task for task in tasks if gain(results, model, task).low > 0] for model in models}
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
    return f"{paid}\n{compare_arms(results)}"


def compare_arms(results: Sequence[Result]) -> str:
    """The best arm of each task, and whether its lead over the next is more than noise."""
    models, tasks = names_of(results)
    parts = []
    for task in tasks:
        scores = {result.model: result.scores for result in results if result.task == task and result.model in models}
        first, second = sorted(scores, key=lambda model: -float(np.mean(scores[model])))[:2]
        lead = paired_t_test(scores[first], scores[second])
        sure = "more than noise by a test of these two alone" if lead.low > 0 else "within noise"
        parts.append(f"{first} leads on {task} by {lead.mean:.1f} (±{lead.high - lead.mean:.1f}), {sure}")
    return f"Between the arms: {'; '.join(parts)}."


def print_table(results: Sequence[Result]) -> None:
    models, tasks = names_of(results)
    table = Table(
        title="Test scores in %, mean ± half of the 95 % interval (Student's t, 3 seeds), and gain over random"
    )
    table.add_column("model")
    for task in tasks:
        table.add_column(f"{task}: {find_task(task).metric}", justify="right")
        table.add_column("gain", justify="right")
    for model in [control_of(results), *models]:
        cells = []
        for task in tasks:
            interval = next(r for r in results if (r.model, r.task) == (model, task)).interval
            more = None if model == control_of(results) else gain(results, model, task)
            cells.append(f"{interval.mean:.1f} ± {interval.half_width:.1f}")
            cells.append("" if more is None else f"{more.mean:+.1f} ± {more.high - more.mean:.1f}")
        table.add_row(model, *cells)
    out.print(table)


def draw(results: Sequence[Result], path: Path) -> None:
    """A panel for each task: means with intervals as bars, seeds as dots."""
    from matplotlib.figure import Figure

    models, tasks = names_of(results)
    shown = [control_of(results), *models]
    colors = ["#999999", "#0072B2", "#D55E00", "#009E73"]
    figure = Figure(figsize=(9, 4), layout="constrained")
    for task, axes in zip(tasks, np.atleast_1d(figure.subplots(1, len(tasks))), strict=True):
        for place, model in enumerate(shown):
            result = next(r for r in results if (r.model, r.task) == (model, task))
            interval, color = result.interval, colors[place % len(colors)]
            axes.bar(place, interval.mean, 0.7, color=color, yerr=interval.half_width, capsize=4, zorder=2)
            axes.plot([place] * len(result.scores), result.scores, "k.", markersize=4, zorder=3)
        axes.set_xticks(range(len(shown)), shown)
        axes.set_ylabel(f"test {find_task(task).metric} (%)")
        axes.set_title(task)
        axes.grid(axis="y", alpha=0.25, zorder=0)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(
        "One budget, three ways to spend it, beside random weights (95 % intervals over seeds)", fontsize=10
    )
    figure.savefig(path, dpi=150)
