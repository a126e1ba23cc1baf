"""One cell: (encoder, task, configuration with rate and seed) → one `Score` with per-example predictions.

The protocol is the paper's: 1,000 steps of 32 examples or one epoch, AdamW, 10 % warm-up, linear decay, no early
stopping. A process loads weights and encoded tasks once for many cells and never changes them; each cell trains a copy
with a new head. One training serves all tasks that train on the same pairs (NQ and MLDR on MS MARCO's).
"""

import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from itertools import chain, takewhile
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from biphase import console
from biphase.device import choose_device, choose_dtype, describe_machine, prefetch
from biphase.encoder.attention import explain_computing
from biphase.encoder.models import Encoder
from biphase.errors import InputError, memory_told
from biphase.files import locked
from biphase.finetuning.calibration import AS_THEY_ARE, Calibration, calibration_error
from biphase.finetuning.class_report import report_classes
from biphase.finetuning.config import LATER_PROTOCOLS, PROTOCOL, CellPlan, FinetuneConfig
from biphase.finetuning.encoding import CellContext, EncodedSplit, EncodedTask
from biphase.finetuning.encoding_cache import load_encoded
from biphase.finetuning.heads import build_network, open_encoder, refuse_replaced
from biphase.finetuning.loss import weigh_classes
from biphase.finetuning.metrics import Rows
from biphase.finetuning.scores import Score, read_score, short_name, write_cell
from biphase.tasks.examples import inputs_of, load_examples
from biphase.tasks.spec import EVALUATED_SPLITS
from biphase.tasks.splits import draw_indices

MOST_CHECKS = 20
"""The most checks of validation in a few-shot training without `epochs`, whose epochs have few updates."""


def train_network(
    network: nn.Module, split: EncodedSplit, cell: CellContext, validation: EncodedSplit | None = None
) -> tuple[list[float], dict[str, Any]]:
    """Train `network` in place. Returns the losses, and the fields of `Score` about training. It stops early at a loss
    or gradient that is not finite, or by the scores on `validation`, which may also choose the weights."""
    # 1. The items, the number of steps, the items of each step, and the steps that are followed by a check.
    config = cell.config
    items, num_planned = choose_items(split, config)
    cell, num_steps = weigh_classes(cell, split, items), num_planned
    split.set_unit(network, items)
    order, checks = training_order(items, config, num_planned), steps_to_validate(config, len(items), num_planned)
    scores, best, diverged_at = dict[int, float](), dict[str, Tensor](), None
    # 2. Optimizer.
    parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
    optimizer, schedule = make_optimizer(parameters, config), config.schedule(num_planned)
    set_training(network, config)
    # 3. Updates. While one computes, a thread packs the batches of the next. Losses stay on the device for up to 25
    # steps or a second, so that few steps wait for them.
    unread, losses, num_tokens = list[Tensor](), list[float](), 0
    started = shown_at = time.perf_counter()
    packed = prefetch((chosen, split.pack_items(chosen, cell)) for chosen in order)
    with closing(packed), console.track(f"fine-tune {cell.task.name}", num_planned, "steps") as progress:
        for step, (chosen, batches) in enumerate(packed):
            for group in optimizer.param_groups:
                group["lr"] = config.learning_rate * schedule.share_of_peak(step, num_planned)
            loss = split.accumulate_gradients(network, chosen, batches, cell)
            norm = nn.utils.clip_grad_norm_(parameters, config.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
            unread.append(torch.stack([loss.float(), norm.float()]))
            num_tokens += int(split.lengths_I[chosen].sum())
            if step + 1 in checks and validation is not None:
                best = check_weights(network, validation, cell, step + 1, scores) or best
                num_steps = step + 1 if is_stuck(scores, config, schedule.warmup_steps) else num_planned
            if len(unread) == 25 or step + 1 == num_steps or time.perf_counter() - shown_at > 1:
                finite = finite_losses(unread)
                losses += finite
                progress.advance(len(unread), f"loss {losses[-1]:.3f}" if losses else "")
                diverged_at = len(losses) if len(finite) < len(unread) else None
                if diverged_at is not None or step + 1 == num_steps:
                    break
                unread.clear()
                shown_at = time.perf_counter()
    # 4. The best weights on validation. The last update may have broken them, and no loss has seen it.
    if diverged_at is None and not all(parameter.isfinite().all() for parameter in parameters):
        diverged_at = num_steps - 1
    if scores and diverged_at is None:
        network.load_state_dict(best, strict=False)
        console.err.print(f"{cell.task.name}: {tell_checks(scores, config, num_steps < num_planned)}")
    seconds = time.perf_counter() - started
    return losses, {
        "num_steps": num_steps,
        "best_step": best_of(scores) if best and diverged_at is None else None,
        "checks": scores,
        "diverged": diverged_at is not None,
        "diverged_at_step": diverged_at,
        "final_loss": float(np.mean(losses[-math.ceil(len(losses) / 10) :])) if diverged_at is None else None,
        "seconds": {"train": round(seconds, 3)},
        "tokens_per_second": {"train": round(num_tokens / seconds, 1)},
    }


def finite_losses(steps: Sequence[Tensor]) -> list[float]:
    """Read losses from pairs of a loss and a gradient norm, up to the first pair that is not finite."""
    finite = takewhile(lambda pair: all(map(math.isfinite, pair)), torch.stack(list(steps)).tolist())
    return [loss for loss, _ in finite]


def make_optimizer(parameters: Sequence[nn.Parameter], config: FinetuneConfig) -> torch.optim.Optimizer:
    """Make an AdamW optimizer, with weight decay on matrices, but not on norms and biases."""
    groups = [
        {"params": [parameter for parameter in parameters if parameter.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [parameter for parameter in parameters if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, eps=config.eps, fused=True)


def set_training(network: nn.Module, config: FinetuneConfig) -> None:
    """Turn dropout on, but not in a frozen encoder."""
    network.train()
    if config.frozen:
        network.get_submodule("backbone").eval()


def steps_to_validate(config: FinetuneConfig, num_items: int, num_steps: int) -> set[int]:
    """List the steps after which validation is scored; none unless `load_best_model_at_end` or
    `early_stopping_patience` needs it."""
    if not config.load_best_model_at_end and config.early_stopping_patience is None:
        return set()
    num_epochs = math.ceil(num_steps / math.ceil(num_items / config.batch_size))
    # With `shots` and without `epochs`, `max_steps` may take hundreds of epochs.
    num_checks = max(4, min(num_epochs, max(config.epochs, MOST_CHECKS)))
    return {math.ceil(num_steps * check / num_checks) for check in range(1, num_checks + 1)}


@torch.no_grad()
def check_weights(
    network: nn.Module, validation: EncodedSplit, cell: CellContext, step: int, scores: dict[int, float]
) -> dict[str, Tensor]:
    """Score a network on validation in the middle of its training, and add the score to `scores`, by steps.

    With `load_best_model_at_end`, return a copy of its trained parameters, by name and on the CPU, if this score is the
    best so far; otherwise {}.
    """
    if not all(parameter.isfinite().all() for parameter in network.parameters()):
        return {}
    scores[step] = validation.judge(validation.predict(network.eval(), cell), cell)[0][cell.task.metric]
    set_training(network, cell.config)
    if not cell.config.load_best_model_at_end or best_of(scores) != step:
        return {}
    return {name: weight.cpu().clone() for name, weight in network.named_parameters() if weight.requires_grad}


def best_of(scores: Mapping[int, float]) -> int:
    """Return the step with the best score, the earliest of equal ones."""
    return max(scores, key=lambda step: scores[step])


def is_stuck(scores: Mapping[int, float], config: FinetuneConfig, warmup_steps: int) -> bool:
    """Tell whether warm-up is over, and as many checks as `early_stopping_patience` followed the best one."""
    patience = config.early_stopping_patience
    if patience is None or max(scores, default=0) <= warmup_steps:
        return False
    return [*scores].index(best_of(scores)) < len(scores) - patience


def tell_checks(scores: Mapping[int, float], config: FinetuneConfig, has_stopped: bool) -> str:
    """Write which check was best on validation, what the first one was, whether training stopped early, and whether it
    kept its last weights."""
    (first, value), best = next(iter(scores.items())), best_of(scores)
    sentence = f"step {best} was best on validation, {scores[best]:.2%}"
    if best != first:
        sentence += f"; the first check, after step {first}, had {value:.2%}"
    sentence += f"; stopped after step {[*scores][-1]}, as it rose no more" if has_stopped else ""
    return sentence + ("" if config.load_best_model_at_end else "; the last weights are kept")


def choose_examples(split: EncodedSplit, config: FinetuneConfig) -> np.ndarray:
    """Choose the examples to train on, ascending: all or a subset."""
    if config.shots is None:
        return draw_indices(split.num_examples, config.max_train_examples or split.num_examples)
    return draw_shots(split.strata, config.shots, config.seed)


def choose_items(split: EncodedSplit, config: FinetuneConfig) -> tuple[np.ndarray, int]:
    """List the items to train on, and count the updates."""
    examples = choose_examples(split, config)
    items = split.items_of(examples)
    if config.shots is not None and config.epochs == 1:
        return items, config.max_steps
    return items, min(config.max_steps, config.epochs * math.ceil(len(items) / config.batch_size))


def draw_shots(strata: np.ndarray, shots: int, seed: int) -> np.ndarray:
    """Draw the indices, ascending, of `shots` examples of each class. Raises `InputError` if a class has fewer."""
    order = np.random.default_rng(seed).permutation(len(strata))
    drawn = []
    for stratum in np.unique(strata):
        members = order[strata[order] == stratum]
        if len(members) < shots:
            part = "the train split" if len(members) == len(strata) else "a class of the train split"
            raise InputError(f"shots={shots}: {part} has only {len(members)} examples")
        drawn.append(members[:shots])
    return np.sort(np.concatenate(drawn))


def training_order(items: np.ndarray, config: FinetuneConfig, num_steps: int) -> Iterator[np.ndarray]:
    """Yield the items of each step: a new seeded permutation each epoch, whose last batch may be short."""
    steps_per_epoch = -(-len(items) // config.batch_size)
    for step in range(num_steps):
        epoch, batch = divmod(step, steps_per_epoch)
        if batch == 0:
            order = np.random.default_rng((config.seed, epoch)).permutation(items)
        yield order[batch * config.batch_size : (batch + 1) * config.batch_size]


def evaluate_cell(
    network: nn.Module, encoded: EncodedTask, plan: CellPlan, cell: CellContext, training: dict[str, Any]
) -> tuple[Score, dict[str, Rows], dict[str, Any]]:
    """Predict and score validation and test of a task, unless training diverged. Returns also, for each split, the rows
    of predictions and the network's outputs. `training` comes from `train_network`."""
    splits, num_left_out = encoded
    started = time.perf_counter()
    metrics: dict[str, dict[str, float]] = {}
    rows: dict[str, Rows] = {}
    predictions: dict[str, Any] = {}
    network.eval()
    with console.track(f"score {plan.task.name}", len(EVALUATED_SPLITS), "splits") as progress:
        for name in () if training["diverged"] else EVALUATED_SPLITS:
            with torch.no_grad():
                predictions[name] = splits[name].predict(network, cell)
            metrics[name], rows[name] = splits[name].judge(predictions[name], cell)
            progress.advance(1)
    is_on_gpu = cell.device.type == "cuda"
    peak = torch.cuda.max_memory_allocated(cell.device) if is_on_gpu else 1024 * getrusage(RUSAGE_SELF).ru_maxrss
    training = training | {"seconds": training["seconds"] | {"evaluate": round(time.perf_counter() - started, 3)}}
    score = Score(
        protocol=LATER_PROTOCOLS.get(plan.task.metric, PROTOCOL),
        cell=plan.hash,
        model=plan.model.name,
        model_hash=plan.model.hash,
        task=plan.task.name,
        trained_on=plan.train.task.name,
        source=plan.evaluation.name,
        data_hash=plan.evaluation.hash,
        metric=plan.task.metric,
        classes=plan.task.classes,
        config=cell.config,
        metrics=metrics,
        never_predicted=name_never_predicted(splits["train"], rows, cell),
        num_examples={name: split.num_examples for name, split in splits.items()},
        num_truncated={name: split.num_truncated for name, split in splits.items()},
        num_left_out=num_left_out,
        peak_memory_bytes=peak,
        machine=describe_machine(cell.device),
        calibration=calibrate_cell(splits, predictions, cell) if predictions and plan.task.classes else None,
        **training,
    )
    return score, rows, predictions


def calibrate_cell(
    splits: Mapping[Any, EncodedSplit], predictions: Mapping[str, Any], cell: CellContext
) -> Calibration | None:
    """Calibrate a cell by its predictions for validation, and measure the effect on test."""
    chosen = splits["validation"].calibrate(predictions["validation"], cell)
    if chosen is None:
        return None
    measured = []
    for calibration in (AS_THEY_ARE, chosen):
        outputs = predictions["test"] / calibration.temperature
        metrics, rows = splits["test"].judge(outputs, replace(cell, calibration=calibration))
        measured.append(metrics[cell.task.metric] if chosen.thresholds else calibration_error(rows))
    return chosen.model_copy(update={"on_test": tuple(measured)})


def name_never_predicted(
    train: EncodedSplit, predictions: Mapping[str, Rows], cell: CellContext
) -> dict[str, dict[str, int]]:
    """Name the classes that are gold in a split but never predicted, and count them in the training examples."""
    classes = cell.task.classes
    if not classes:
        return {}
    in_train: Counter[str] = Counter()
    indices = train.classes_of(choose_examples(train, cell.config))
    for name, count in zip(classes, np.bincount(indices, minlength=len(classes)).tolist(), strict=True):
        in_train[name.removeprefix("B-") if classes[0] == "O" else name] += count  # entities by their type
    reports = {split: report_classes(rows, classes) for split, rows in predictions.items()}
    return {split: {name: in_train[name] for name in report.never_predicted} for split, report in reports.items()}


@memory_told("lower microbatch_tokens (65,536 unless given), or --workers-per-gpu where cells share a GPU")
def fit_cells(plans: Sequence[CellPlan], out: Path) -> list[Score]:
    """Fine-tune a model once for cells that share a training (`Task.trained_on`), and evaluate their tasks.

    A finished cell appears as the folder `out/TASK-HASH`, and is read, not rerun. On a CPU the same cell has the same
    scores to the last bit. A training that diverges is a result, not an error. Raises `BusyError` if another process
    works on one of the cells.
    """
    with claim_cells(plans, out):
        write_cells(plans, out)
    return [read_score(plan.folder(out)) for plan in plans]


@contextmanager
def claim_cells(plans: Sequence[CellPlan], out: Path) -> Iterator[None]:
    """Keep other processes away from the cells that are not finished; another process may have finished some
    meanwhile. A killed process releases its claims. Raises `BusyError` if another process works on one of them."""
    with ExitStack() as claims:
        for folder in [plan.folder(out) for plan in plans if not plan.is_finished(out)]:
            busy = f"{folder} is being made by another process"
            claims.enter_context(locked(out / ".locks" / folder.name, busy=busy))
        yield


def add_inputs(cell: "FittedCell") -> None:
    """Add the input of each example to the rows of predictions."""
    config = cell.context.config
    assert config.judged_only is not None, "the configuration is settled"
    data = load_examples(cell.plan.evaluation, config.judged_only, config.max_eval_examples)
    for split in EVALUATED_SPLITS:
        for row, text in zip(cell.predictions[split], inputs_of(data, split), strict=True):
            row["input"] = text


def train_copy(
    encoder: Encoder, cell: CellContext, trained: Mapping[Any, EncodedSplit], splits: Iterable[EncodedSplit]
) -> tuple[nn.Module, list[float], dict[str, Any]]:
    """Train a copy of the encoder, for the texts of these splits, with a new head. Head and dropout draw from torch's
    generator, under the seed. Returns the network, and the results of `train_network`."""
    is_on_gpu = cell.device.type == "cuda"
    if is_on_gpu:
        torch.cuda.reset_peak_memory_stats(cell.device)
    with torch.random.fork_rng(devices=[cell.device] if is_on_gpu else []):
        torch.manual_seed(cell.config.seed)
        network = build_network(encoder, cell, splits).to(cell.device)
        return network, *train_network(network, trained["train"], cell, trained["validation"])


def track_cell(plan: CellPlan, out: Path) -> AbstractContextManager[console.Send]:
    """Open a cell's tracking, if its configuration has one, in its own folder below `out`."""
    config = plan.config
    name = f"{short_name(plan.model.name)}-{plan.task.name}-lr{config.learning_rate:g}-seed{config.seed}"
    folder = out / "tracking" / f"{name}-{plan.hash[:8]}"
    if config.tracking is not None:
        folder.mkdir(parents=True, exist_ok=True)
    return console.open_tracking(config.tracking, folder, config.model_dump(mode="json"))


@dataclass(frozen=True)
class FittedCell:
    """A cell after its training, whose network the cells of one training share."""

    plan: CellPlan
    context: CellContext
    encoder: Encoder
    network: nn.Module
    losses: list[float]
    train: EncodedSplit
    """The split that trained the network."""
    splits: Mapping[Any, EncodedSplit]
    score: Score
    predictions: dict[str, Rows]
    """The rows of predictions of each split; none if training diverged."""
    outputs: dict[str, Any]
    """The network's outputs for each split, not calibrated, as `EncodedSplit.predict` returns them."""


def run_cells(plans: Sequence[CellPlan]) -> Iterator[FittedCell]:
    """Train once, then evaluate task by task."""
    source = plans[0].train
    config = plans[0].config
    assert all(plan.train.hash == source.hash for plan in plans), "these tasks do not share a training"
    assert all(plan.config == config for plan in plans), "tasks of one training have one configuration"
    # 1. The encoder and the device.
    encoder = open_encoder(plans[0].model)
    device = choose_device(config.device)
    dtype = choose_dtype(config.precision, device)
    console.err.print(f"{explain_computing(dtype, device, encoder.backbone)} · not compiled (too short a run)")
    config = config.model_copy(update={"device": device.type})
    # 2. The token ids of the task to train on, and of the tasks to evaluate.
    trained, _ = load_encoded(source, encoder, config)
    evaluated = [load_encoded(plan.evaluation, encoder, config) for plan in plans]
    # 3. A copy of the encoder with a new head, trained.
    cell = CellContext(source.task, config, device, dtype)
    splits = chain(trained.values(), *(splits.values() for splits, _ in evaluated))
    network, losses, training = train_copy(encoder, cell, trained, splits)
    # 4. Predictions and scores, task by task.
    for plan, encoded in zip(plans, evaluated, strict=True):
        cell = CellContext(plan.task, config, device, dtype)
        judged = evaluate_cell(network, encoded, plan, cell, training)
        yield FittedCell(plan, cell, encoder, network, losses, trained["train"], encoded[0], *judged)


def write_cells(plans: Sequence[CellPlan], out: Path) -> list[FittedCell]:
    """Run the cells of one training that are not finished. Write each of them below `out` as soon as it has its score.
    Returns them."""
    plans = [plan for plan in plans if not plan.is_finished(out)]
    if not plans:
        return []
    written: list[FittedCell] = []
    with track_cell(plans[0], out) as send:
        for cell in run_cells(plans):
            objective = plans[0].train.task.name
            if not written:
                for step, loss in enumerate(cell.losses, start=1):
                    send({"kind": "train", "objective": objective, "step": step, "loss": loss})
            values = cell.score.metrics.get("validation", {}).items()
            named = {f"{cell.plan.task.name}_{name}": value for name, value in values}
            send({"kind": "validation", "objective": objective, "step": len(cell.losses), **named})
            if cell.plan.config.keep_texts and cell.predictions:
                add_inputs(cell)
            refuse_replaced(cell.plan.model)
            write_cell(cell.plan.folder(out), cell.score, cell.losses, cell.predictions)
            written.append(cell)
    return written
