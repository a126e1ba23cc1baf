"""One cell: (encoder, task, configuration with rate and seed) → one `Score` with per-example predictions.

The protocol is the paper's: 1,000 steps of 32 examples or one epoch, 10 % warm-up, linear decay, no early stopping.
What many cells share (weights on disk, encoded tasks) is loaded once per process and never changed; a cell trains a
copy. Tasks that are trained on another's pairs (NQ and MLDR on MS MARCO's) are scored after one training.
"""

import json
import math
import resource
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from biphase import console
from biphase.device import choose_device, choose_dtype, describe_machine
from biphase.encoder.load import fresh_backbone
from biphase.errors import BusyError, InputError
from biphase.files import content_hash, locked, whole_folder, write_json
from biphase.finetuning.batches import training_order
from biphase.finetuning.cell import CellContext, Runtime
from biphase.finetuning.cells import CellPlan, DataDirs, plan_cells
from biphase.finetuning.config import EVALUATED_SPLITS, PROTOCOL, FinetuneConfig
from biphase.finetuning.encoders import Encoder, load_encoder
from biphase.finetuning.encoding import KeyedTokenizer, cache_folder, load_record, save_record
from biphase.finetuning.families import (
    question_answering,
    retrieval,
    sequence_classification,
    token_classification,
)
from biphase.finetuning.scores import Score, read_score
from biphase.finetuning.vocabulary import copy_for
from biphase.tasks.examples import limit_evaluation, load_examples
from biphase.tasks.sources import TaskSource
from biphase.tasks.spec import SPLITS, Task, find_task

FAMILIES: dict[str, ModuleType] = {
    "sequence_classification": sequence_classification,
    "token_classification": token_classification,
    "question_answering": question_answering,
    "retrieval": retrieval,
}
"""Each knows how to encode its examples, build its head, compute its loss, predict, measure and tell."""

ENCODING = 2
"""Part of the name of what is kept on disk: raise it when the same text no longer gives the same arrays."""

CHECK_EVERY_STEPS = 25
"""How often the losses are fetched from the device and looked at."""


def fit_cell(
    model: str, task: str, config: FinetuneConfig, out: Path | None = None, data_dir: str | Path | None = None
) -> Score:
    """Fine-tune `model` on a task of the table (or of a YAML file) and evaluate it.

    With `out`, the result appears as the folder `out/TASK-HASH` when it is finished, and a finished cell is read, not
    rerun. On a CPU the same cell gives the same scores to the last bit. Training that diverges is a result, not an
    error. Many cells in one process load the model and encode the task once. Prints one line.
    """
    plans = plan_cells(model, [task], config, {} if data_dir is None else {find_task(task).name: data_dir})
    was_there = out is not None and plans[0].is_finished(out)
    [score] = fit_plans(model, plans, out)
    console.out.print(score.headline() + (" · finished before" if was_there else ""), markup=False)
    return score


def fit_cells(
    model: str,
    tasks: Sequence[str],
    config: FinetuneConfig,
    out: Path | None = None,
    data_dirs: DataDirs | None = None,
    label: str | None = None,
) -> list[Score]:
    """As `fit_cell`, for several tasks with the same training (`Task.trained_on`): it happens once. Prints nothing.

    `label` is what the scores call the model, in place of `model`.

    Raises `BusyError` when another process is at work on one of the cells.
    """
    return fit_plans(model, plan_cells(model, tasks, config, data_dirs or {}), out, label)


def fit_plans(model: str, plans: Sequence[CellPlan], out: Path | None, label: str | None = None) -> list[Score]:
    """The scores of cells that share a training, read where they are finished."""
    if out is None:
        return [finished.score for finished in run_cells(model, plans, label)]
    missing = [plan for plan in plans if not plan.is_finished(out)]
    if missing:
        with claimed(out, missing):
            missing = [plan for plan in missing if not plan.is_finished(out)]  # another process may have done some
            for plan, finished in zip(missing, run_cells(model, missing, label) if missing else (), strict=True):
                write_cell(plan.folder(out), finished)
    return [read_score(plan.folder(out)) for plan in plans]


@contextmanager
def claimed(out: Path, plans: Sequence[CellPlan]) -> Iterator[None]:
    """Hold the names of cells against other processes; a killed one lets go."""
    locks = out / ".locks"
    locks.mkdir(parents=True, exist_ok=True)
    with ExitStack() as held:
        for plan in plans:
            try:
                held.enter_context(locked(locks / plan.folder(out).name))
            except BusyError:
                raise BusyError(f"{plan.folder(out)} is being made by another process") from None
        yield


@dataclass(frozen=True)
class Finished:
    """A cell in memory."""

    score: Score
    predictions: dict[str, Any]
    """By split; none when training diverged."""
    encoded: Any
    cell: CellContext
    losses: list[float]


def run_cells(model: str, plans: Sequence[CellPlan], label: str | None = None) -> Iterator[Finished]:
    """Train once, then evaluate each task."""
    assert len({plan.train.hash for plan in plans}) == 1, "these tasks do not share a training"
    assert len({plan.config for plan in plans}) == 1, "tasks of one training have one configuration"
    encoder = load_encoder(model)
    device = choose_device(plans[0].config.device)
    config = plans[0].config.model_copy(update={"device": device.type})
    check_length(encoder, config)
    compute = Runtime(device, choose_dtype(config.precision, device), config.microbatch_tokens)
    trained_on = plans[0].train.task
    cell = CellContext(trained_on, config, compute)
    trained = load_encoded(plans[0].train, encoder.keyed, config)
    evaluated = [
        trained if plan.evaluation.hash == plan.train.hash else load_encoded(plan.evaluation, encoder.keyed, config)
        for plan in plans
    ]
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(config.seed)
        network = build(encoder, cell, trained, *evaluated).to(device)
        training = train(network, trained, cell)
    for plan, encoded in zip(plans, evaluated, strict=True):
        cell = CellContext(plan.task, config, compute)
        started = time.perf_counter()
        predictions = {}
        if training.diverged_at is None:
            predictions = {split: predict(network, encoded, split, cell) for split in EVALUATED_SPLITS}
        family = FAMILIES[plan.task.family]
        metrics = {split: family.measure(encoded, split, found, cell) for split, found in predictions.items()}
        seconds = {"train": training.seconds, "evaluate": time.perf_counter() - started}
        score = Score(
            protocol=PROTOCOL,
            cell=plan.hash,
            model=label or encoder.name,
            model_hash=encoder.hash,
            task=plan.task.name,
            trained_on=trained_on.name,
            source=plan.evaluation.name,
            data_hash=plan.evaluation.hash,
            metric=plan.task.metric,
            classes=plan.task.classes,
            config=config,
            metrics=metrics,
            num_examples={name: getattr(encoded, name).num_examples for name in SPLITS},
            num_truncated={name: getattr(encoded, name).num_truncated for name in SPLITS},
            num_left_out=encoded.left_out,
            num_steps=training.num_steps,
            diverged=training.diverged_at is not None,
            diverged_at_step=training.diverged_at,
            final_loss=training.final_loss,
            seconds={name: round(value, 3) for name, value in seconds.items()},
            tokens_per_second={"train": round(training.num_tokens / training.seconds, 1)},
            peak_memory_bytes=peak_memory_bytes(device),
            machine=describe_machine(device),
        )
        yield Finished(score, predictions, encoded, cell, training.losses)


def write_cell(folder: Path, finished: Finished) -> None:
    """The score and the predictions as files, all or nothing."""
    cell = finished.cell
    with whole_folder(folder) as part:
        for split, found in finished.predictions.items():
            rows = FAMILIES[cell.task.family].records(finished.encoded, split, found, cell)
            lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            (part / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
        write_json(part / "losses.json", finished.losses)
        write_json(part / "score.json", finished.score.model_dump(mode="json"))


def check_length(encoder: Encoder, config: FinetuneConfig) -> None:
    """Raises `InputError` where special tokens leave no room for a question and its context, or positions run out."""
    if config.max_length > encoder.max_length:
        raise InputError(
            f"max_length {config.max_length} is above the {encoder.max_length} tokens that {encoder.name} has "
            f"positions for: give max_length={encoder.max_length}"
        )
    least = len(encoder.keyed.opening) + 1 + 2
    if config.max_length < least:
        raise InputError(
            f"max_length {config.max_length} leaves no room for text: {encoder.name} needs {least} or more"
        )


def load_encoded(source: TaskSource, keyed: KeyedTokenizer, config: FinetuneConfig) -> Any:
    """The examples of a source as token ids: made once for each tokenizer and kept on disk, mapped into memory."""
    task = source.task
    family = FAMILIES[task.family]
    settings = {name: getattr(config, name) for name in ("max_length", "max_eval_examples", *family.ENCODING_SETTINGS)}
    specials = [keyed.hash, keyed.opening, keyed.closing]
    key = content_hash([ENCODING, source.hash, specials, settings])
    folder = cache_folder() / "encoded" / f"{task.name}-{key[:24]}"
    if not folder.exists():
        with alone(folder):
            if not folder.exists():
                data = load_examples(source, judged_only=config.judged_only)
                if config.max_eval_examples is not None:
                    data = limit_evaluation(data, config.max_eval_examples)
                encoded = family.encode_task(data, keyed, config)
                tell_losses(task, encoded, config)
                save_record(folder, encoded)
    return load_kept(folder, family.Encoded)


@lru_cache(maxsize=8)
def load_kept(folder: Path, kind: Any) -> Any:
    return load_record(folder, kind)


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Wait until no other process makes this folder."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder.with_name(f".{folder.name}.lock"), wait=True):
        yield


def tell_losses(task: Task, encoded: Any, config: FinetuneConfig) -> None:
    if encoded.left_out:
        console.err.print(f"{task.name}: {encoded.left_out:,} rows without a gold label are left out")
    cut = {name: count for name in SPLITS if (count := getattr(encoded, name).num_truncated)}
    if cut:
        counts = ", ".join(f"{count:,} of {name}" for name, count in cut.items())
        console.err.print(f"{task.name}: cut at {config.max_length:,} tokens: {counts}")


def build(encoder: Encoder, cell: CellContext, *encoded: Any) -> nn.Module:
    """The network for the texts of some tasks, with a new head; random weights come from torch's generator."""
    backbone = fresh_backbone(encoder.backbone) if cell.config.weights == "random" else encoder.backbone
    network: nn.Module = FAMILIES[cell.task.family].build(copy_for(backbone, *encoded), cell.task, cell.config)
    return network.to(torch.bfloat16) if cell.config.weight_dtype == "bf16" else network


@dataclass(frozen=True)
class TrainingResult:
    losses: list[float]
    num_steps: int
    num_tokens: int
    seconds: float
    diverged_at: int | None

    @property
    def final_loss(self) -> float | None:
        tail = self.losses[-math.ceil(len(self.losses) / 10) :]
        return float(np.mean(tail)) if self.diverged_at is None else None


def train(model: nn.Module, encoded: Any, cell: CellContext) -> TrainingResult:
    """Update `model` in place. Stops early only when a loss or a gradient is not finite."""
    config, family = cell.config, FAMILIES[cell.task.family]
    items = family.training_items(encoded)
    chosen = items.items_of(choose_examples(encoded.train.num_examples, config.max_train_examples))
    num_steps = min(config.max_steps, config.epochs * math.ceil(len(chosen) / config.batch_size))
    optimizer = make_optimizer(model, config)
    model.train()
    vitals: list[Tensor] = []
    losses: list[float] = []
    diverged_at = None
    num_tokens = 0
    started = time.perf_counter()
    with console.track(f"fine-tune {cell.task.name}", num_steps, "steps") as progress:
        for step, places in enumerate(training_order(len(chosen), config.batch_size, num_steps, config.seed)):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(config, step, num_steps)
            loss = family.accumulate_gradients(model, encoded, chosen[places], cell)
            norm = nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
            vitals.append(torch.stack([loss.float(), norm.float()]))
            num_tokens += items.count_tokens(chosen[places])
            if len(vitals) == CHECK_EVERY_STEPS or step + 1 == num_steps:
                diverged_at = collect(vitals, losses)
                progress.advance(len(vitals), f"loss {losses[-1]:.3f}" if losses else "")
                vitals.clear()
            if diverged_at is not None:
                break
    if diverged_at is None and not all(parameter.isfinite().all() for parameter in model.parameters()):
        diverged_at = num_steps - 1  # the last update itself: no loss saw it
    return TrainingResult(losses, num_steps, num_tokens, time.perf_counter() - started, diverged_at)


def choose_examples(num_examples: int, wanted: int | None) -> np.ndarray:
    """All training examples, or a fixed random subset of them in file order."""
    if wanted is None or wanted >= num_examples:
        return np.arange(num_examples)
    return np.sort(np.random.default_rng(42).permutation(num_examples)[:wanted])


def learning_rate(config: FinetuneConfig, step: int, num_steps: int) -> float:
    """The rate of update `step` (from 0): up to the peak in equal steps, then down to 0 after the last update.

    The decay equals that of transformers' linear schedule; the warm-up is ahead of it by one step, whose first update
    has rate 0.
    """
    assert 0 <= step < num_steps
    warmup_steps = math.ceil(config.warmup_ratio * num_steps)
    climbing = (step + 1) / warmup_steps if warmup_steps else 1.0
    falling = (num_steps - step) / (num_steps - warmup_steps) if warmup_steps < num_steps else 1.0
    return config.learning_rate * min(climbing, falling, 1.0)


def make_optimizer(model: nn.Module, config: FinetuneConfig) -> torch.optim.AdamW:
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, eps=config.eps, fused=True)


def collect(vitals: Sequence[Tensor], losses: list[float]) -> int | None:
    """Append the losses of finished steps up to the first that is not finite, in loss or gradient; its step number."""
    for loss, norm in torch.stack(list(vitals)).tolist():
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return len(losses)
        losses.append(loss)
    return None


@torch.no_grad()
def predict(model: nn.Module, encoded: Any, split: str, cell: CellContext) -> Any:
    """What the family predicts for a split, as its `measure` and `records` want it."""
    model.eval()
    return FAMILIES[cell.task.family].predict(model, encoded, split, cell)


def peak_memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
