"""The whole path on bundled text and tasks: does pretraining CLM → MLM pay, against the same network untrained?

Each stage writes into the demo's folder and is skipped when its output is there, so the command can be stopped and
started again.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from biphase.config import Recipe, load_config
from biphase.console import duration, err, out, track
from biphase.corpus.prepare import prepare
from biphase.corpus.text import find_sources, sample_texts
from biphase.corpus.tokenizer import save_tokenizer, train_tokenizer
from biphase.errors import InputError
from biphase.execute import Engine, Unit, run_units
from biphase.finetuning.score import FinetuneConfig, Score, read_score
from biphase.finetuning.tasks import find_task
from biphase.report.statistics import Difference, Interval, mean_interval, paired_t_test
from biphase.run import Run

VOCAB_SIZE = 4096
SEEDS = (0, 1, 2)
ARMS = ("pretrained", "random")
TASKS = {
    "genre": FinetuneConfig(learning_rate=1e-3, eps=1e-8, batch_size=8, max_train_examples=1600),
    "uner_en_ewt": FinetuneConfig(learning_rate=1e-3, eps=1e-8, batch_size=8, max_train_examples=2000, epochs=2),
}
"""Short cells: small batches and high rates, which a small network needs and stands."""


@dataclass(frozen=True)
class Result:
    """Test scores over seeds of one arm on one task, in percent."""

    task: str
    arm: str
    scores: tuple[float, ...]

    @property
    def interval(self) -> Interval:
        return mean_interval(self.scores)


def run_demo(folder: Path) -> None:
    """Run every stage, print the table and write `demo.png`."""
    started = time.monotonic()
    corpus = Path(str(resources.files("biphase") / "bundled" / "corpus"))
    say("1/5", "train a tokenizer on the bundled text")
    if not (folder / "tokenizer").exists():
        texts = sample_texts(find_sources([corpus / "train.jsonl.zst"]))
        save_tokenizer(train_tokenizer(texts, VOCAB_SIZE), folder / "tokenizer")
    say("2/5", "tokenize it into shards")
    prepare(
        [corpus / "train.jsonl.zst"],
        folder / "tokenizer",
        folder / "shards",
        validation_sources=[corpus / "validation.jsonl.zst"],
    )
    say("3/5", "pretrain: next token (CLM), then masked tokens (MLM)")
    run = pretrain(folder)
    say("4/5", "export it for transformers")
    encoder = folder / f"encoder-{run.path.name.rpartition('-')[2]}"
    if not encoder.exists():
        from biphase.pretraining.export import export_checkpoint

        out.print(export_checkpoint(str(run.path), encoder), markup=False)
    say("5/5", f"fine-tune it, and the same network from random weights, on {len(TASKS)} tasks with {len(SEEDS)} seeds")
    results = collect_results(fit_all(encoder, folder / "scores"))
    draw(run, results, folder / "demo.png")
    print_table(results)
    out.print(f"\n{verdict(results)}\nplot: {folder / 'demo.png'} · encoder: {encoder} · run: {run.path}")
    out.print(f"took {duration(time.monotonic() - started)}")


def say(stage: str, what: str) -> None:
    err.print(f"[bold]\\[{stage}][/bold] {what}")


def pretrain(folder: Path) -> Run:
    from biphase.pretraining.loop import train

    recipe = Path(str(resources.files("biphase") / "bundled" / "demo.yaml"))
    return train(load_config(Recipe, recipe, [f"data.shards={folder / 'shards'}"]), folder / "runs")


def fit_all(encoder: Path, scores: Path) -> list[Score]:
    """Every (task, arm, seed), one process and one thread per core: small networks gain nothing from more threads.

    Raises `InputError` when one failed.
    """
    units = [
        Unit(
            f"{task} · {arm} · seed {seed}",
            fit_one,
            {
                "encoder": str(encoder),
                "task": task,
                "config": config.model_copy(update={"weights": arm, "seed": seed}).model_dump(mode="json"),
                "scores": str(scores),
            },
            affinity=task,
        )
        for task, config in TASKS.items()
        for seed in SEEDS
        for arm in ARMS
    ]
    found = []
    with track("fine-tune", len(units), "cells") as progress:
        for outcome in run_units(units, Engine()):
            if outcome.error is not None:
                raise InputError(f"{outcome.name}: {outcome.error}")
            score = read_score(Path(outcome.value))
            if score.diverged:
                raise InputError(f"{score.headline()}; please report it, with the kind of machine")
            progress.advance(1, score.headline())
            found.append(score)
    return sorted(found, key=lambda score: score.config.seed)


def fit_one(encoder: str, task: str, config: dict[str, Any], scores: str) -> str:
    from biphase.finetuning.fit import fit_cell

    return str(fit_cell(encoder, task, FinetuneConfig.model_validate(config), Path(scores)).folder)


def collect_results(scores: Sequence[Score]) -> list[Result]:
    def values(task: str, arm: str) -> tuple[float, ...]:
        chosen = [score for score in scores if score.task == task and score.config.weights == arm]
        return tuple(100 * score.metrics["test"][score.metric] for score in chosen)

    return [Result(task, arm, values(task, arm)) for task in TASKS for arm in ARMS]


def gain(results: Sequence[Result], task: str) -> Difference:
    """Pretrained minus random, paired by seed."""
    by_arm = {result.arm: result.scores for result in results if result.task == task}
    return paired_t_test(by_arm["pretrained"], by_arm["random"])


def verdict(results: Sequence[Result]) -> str:
    """What the intervals allow to say, and no more."""
    gains = {task: gain(results, task) for task in TASKS}
    clear = [task for task, difference in gains.items() if difference.low > 0]
    if len(clear) == len(gains):
        return "Pretraining pays on every task: each gain's 95 % interval lies above zero."
    if clear:
        return f"Pretraining pays on {', '.join(clear)}; on the rest the interval of the gain includes zero."
    return "No gain is clear of zero at this budget."


def print_table(results: Sequence[Result]) -> None:
    table = Table(title="Test scores in %, mean ± half of the 95 % interval (Student's t, 3 seeds)")
    for column in ("task", "metric", "random weights", "pretrained CLM → MLM", "gain"):
        table.add_column(column, justify="left" if column in ("task", "metric") else "right")
    for task in TASKS:
        random, pretrained = (
            next(r for r in results if (r.task, r.arm) == (task, arm)) for arm in ("random", "pretrained")
        )
        difference = gain(results, task)
        table.add_row(
            task,
            find_task(task).metric,
            f"{random.interval.mean:.1f} ± {random.interval.half_width:.1f}",
            f"{pretrained.interval.mean:.1f} ± {pretrained.interval.half_width:.1f}",
            f"{difference.mean:+.1f} ± {difference.high - difference.mean:.1f}",
        )
    out.print(table)


def draw(run: Run, results: Sequence[Result], path: Path) -> None:
    """Loss curves on the left, scores with intervals and single seeds on the right."""
    from matplotlib.figure import Figure

    from biphase.pretraining.card import plot_losses

    figure = Figure(figsize=(10, 4), layout="constrained")
    losses, scores = figure.subplots(1, 2)
    plot_losses(run, losses)
    losses.set_title("Pretraining")
    colors = {"random": "#999999", "pretrained": "#D55E00"}
    for i, arm in enumerate(("random", "pretrained")):
        chosen = [result for result in results if result.arm == arm]
        places = np.arange(len(chosen)) + 0.36 * (i - 0.5)
        means, widths = [r.interval.mean for r in chosen], [r.interval.half_width for r in chosen]
        scores.bar(places, means, 0.34, color=colors[arm], label=arm, yerr=widths, capsize=4, zorder=2)
        for place, result in zip(places, chosen, strict=True):
            scores.plot([place] * len(result.scores), result.scores, "k.", markersize=4, zorder=3)
    scores.set_xticks(range(len(TASKS)), [f"{task}\n({find_task(task).metric})" for task in TASKS])
    scores.set_ylabel("test score (%)")
    scores.set_title("Fine-tuned, 95 % intervals over seeds")
    scores.grid(axis="y", alpha=0.25, zorder=0)
    scores.spines[["top", "right"]].set_visible(False)
    scores.legend(frameon=False)
    figure.savefig(path, dpi=150)
