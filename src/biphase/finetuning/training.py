"""One cell: the encoder's copy with a new head is trained (AdamW, a linear schedule), then predicts and is scored."""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from resource import RUSAGE_SELF, getrusage
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from biphase import console
from biphase.device import describe_machine
from biphase.finetuning.batches import CellContext, training_order
from biphase.finetuning.cells import CellPlan
from biphase.finetuning.config import EVALUATED_SPLITS, PROTOCOL, FinetuneConfig
from biphase.finetuning.encoders import Encoder, copy_backbone
from biphase.finetuning.encoding import EncodedSplit, EncodedTask
from biphase.finetuning.families import module_of
from biphase.finetuning.metrics import Judgement
from biphase.finetuning.scores import Score
from biphase.tasks.drawing import draw_indices, draw_shots

SplitRows = dict[str, Iterator[dict[str, Any]]]
"""Rows of the predictions for each split, to be consumed once; no split when training diverged."""


@dataclass(frozen=True)
class TrainingResult:
    losses: list[float]
    num_steps: int
    num_tokens: int
    seconds: float
    diverged_at: int | None
    """The first step whose loss or gradient was not finite."""

    @property
    def final_loss(self) -> float | None:
        """The mean over the last tenth of the steps."""
        tail = self.losses[-math.ceil(len(self.losses) / 10) :]
        return float(np.mean(tail)) if self.diverged_at is None else None


def build_network(
    encoder: Encoder, cell: CellContext, tasks: Sequence[EncodedTask[Any]], table: nn.Module | None = None
) -> nn.Module:
    """A copy of the encoder for the texts of some tasks (none: for any text), or a table of features, with a new head.

    Random weights come from torch's generator.
    """
    splits = [split for encoded in tasks for split in encoded.splits.values()]
    texts = [texts for split in splits for texts in split.all_texts]
    backbone = copy_backbone(encoder.backbone, texts, cell.config.weights) if table is None else table
    network: Any = module_of(cell.task.family, cell.config).build_model(backbone, cell)
    if cell.config.frozen:
        network.backbone.requires_grad_(False)
    return network.to(torch.bfloat16) if cell.config.weight_dtype == "bf16" else network


def train_network(
    network: nn.Module, encoded: EncodedTask[Any], cell: CellContext, counted: EncodedSplit | None = None
) -> TrainingResult:
    """Update `network` in place. Stops early only when a loss or a gradient is not finite.

    `counted` has the tokens that are counted, where those of `encoded` are numbers of features.
    """
    # 1. What is trained on, and for how long.
    config, family, split = cell.config, module_of(cell.task.family, cell.config), encoded.splits["train"]
    items, num_steps = choose_items(split, config)
    # 2. Optimizer.
    parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
    optimizer = make_adamw(parameters, config)
    network.train()
    if config.frozen:
        network.get_submodule("backbone").eval()
    # 3. Updates. What a step gives stays on the device for up to 25 steps, so that few steps wait for it.
    unseen: list[Tensor] = []
    losses: list[float] = []
    diverged_at, num_tokens, started = None, 0, time.perf_counter()
    with console.track(f"fine-tune {cell.task.name}", num_steps, "steps") as progress:
        for step, indices in enumerate(training_order(len(items), config.batch_size, num_steps, config.seed)):
            for group in optimizer.param_groups:
                group["lr"] = finetuning_rate(config, step, num_steps)
            loss = family.accumulate_gradients(network, split, items[indices], cell)
            norm = nn.utils.clip_grad_norm_(parameters, config.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
            unseen.append(torch.stack([loss.float(), norm.float()]))
            num_tokens += (counted or split).count_tokens(items[indices])
            if len(unseen) == 25 or step + 1 == num_steps:
                diverged_at = append_losses(losses, unseen)
                progress.advance(len(unseen), f"loss {losses[-1]:.3f}" if losses else "")
                unseen.clear()
            if diverged_at is not None:
                break
    # 4. The last update may itself have broken the weights: no loss saw it.
    if diverged_at is None and not all(parameter.isfinite().all() for parameter in parameters):
        diverged_at = num_steps - 1
    return TrainingResult(losses, num_steps, num_tokens, time.perf_counter() - started, diverged_at)


def choose_items(split: EncodedSplit, config: FinetuneConfig) -> tuple[np.ndarray, int]:
    """The items that are trained on, of all examples or of a subset, and for how many updates: `max_steps`, or as many
    as some epochs have."""
    if config.shots is None:
        examples = draw_indices(split.num_examples, config.max_train_examples or split.num_examples)
    else:
        examples = draw_shots(split.strata, config.shots, config.seed)
    items = split.items_of(examples)
    if config.shots is not None and config.epochs == 1:
        return items, config.max_steps
    return items, min(config.max_steps, config.epochs * math.ceil(len(items) / config.batch_size))


def make_adamw(parameters: Sequence[nn.Parameter], config: FinetuneConfig) -> torch.optim.AdamW:
    """Weight decay is on matrices, not on norms and biases."""
    groups = [
        {"params": [parameter for parameter in parameters if parameter.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [parameter for parameter in parameters if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, eps=config.eps, fused=True)


def finetuning_rate(config: FinetuneConfig, step: int, num_steps: int) -> float:
    """The rate of update `step` (from 0): up to the peak in equal steps, then down to 0 after the last update.

    The decay equals that of transformers' linear schedule; the warm-up is ahead of it by one step, whose first update
    has rate 0.
    """
    assert 0 <= step < num_steps
    warmup_steps = math.ceil(config.warmup_ratio * num_steps)
    climbing = (step + 1) / warmup_steps if warmup_steps else 1.0
    falling = (num_steps - step) / (num_steps - warmup_steps) if warmup_steps < num_steps else 1.0
    return config.learning_rate * min(climbing, falling, 1.0)


def append_losses(losses: list[float], unseen: Sequence[Tensor]) -> int | None:
    """Append the losses of steps up to the first that is not finite, in loss or gradient norm; its number, or None."""
    for loss, norm in torch.stack(list(unseen)).tolist():
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return len(losses)
        losses.append(loss)
    return None


def evaluate_cell(
    network: nn.Module,
    encoded: EncodedTask[Any],
    training: TrainingResult,
    plan: CellPlan,
    cell: CellContext,
    encoder: Encoder,
) -> tuple[Score, SplitRows]:
    """Predict validation and test of one task, unless training diverged, and say how good that is."""
    family, splits = module_of(plan.task.family, plan.config), encoded.splits
    started = time.perf_counter()
    judged: dict[str, Judgement] = {}
    network.eval()
    for name in EVALUATED_SPLITS if training.diverged_at is None else ():
        with torch.no_grad():
            predictions = family.predict(network, splits[name], cell)
        judged[name] = family.judge_split(splits[name], predictions, cell)
    is_on_gpu = cell.device.type == "cuda"
    peak = torch.cuda.max_memory_allocated(cell.device) if is_on_gpu else 1024 * getrusage(RUSAGE_SELF).ru_maxrss
    seconds = {"train": training.seconds, "evaluate": time.perf_counter() - started}
    score = Score(
        **plan.known,
        protocol=PROTOCOL,
        model=encoder.name,
        model_hash=encoder.hash,
        config=cell.config,
        metrics={name: metrics for name, (metrics, _) in judged.items()},
        num_examples={name: split.num_examples for name, split in splits.items()},
        num_truncated={name: split.num_truncated for name, split in splits.items()},
        num_left_out=encoded.left_out,
        num_steps=training.num_steps,
        diverged=training.diverged_at is not None,
        diverged_at_step=training.diverged_at,
        final_loss=training.final_loss,
        seconds={name: round(value, 3) for name, value in seconds.items()},
        tokens_per_second={"train": round(training.num_tokens / training.seconds, 1)},
        peak_memory_bytes=peak,
        machine=describe_machine(cell.device),
    )
    return score, {name: rows for name, (_, rows) in judged.items()}
