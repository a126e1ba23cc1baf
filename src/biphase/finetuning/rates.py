"""A cell whose learning rate nobody gave → the same cell with the rate that a short search on validation chooses.

The paper's 5e-5 is for its network of 210M. Smaller ones need more, so three rates around one by the size are tried.
`evaluate`, studies and biphase's own tasks never come here: their rates are the axes of a grid.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

from biphase.console import err
from biphase.device import choose_device, choose_dtype
from biphase.errors import memory_told
from biphase.files import read_json_as, write_json
from biphase.finetuning.choosing import choose_rate
from biphase.finetuning.config import CellPlan, plan_cell
from biphase.finetuning.encoding import CellContext
from biphase.finetuning.encoding_cache import load_encoded
from biphase.finetuning.fit import train_copy
from biphase.finetuning.heads import open_encoder
from biphase.finetuning.scores import show_rate

PROBE_RATES = (1e-3, 1e-2, 1e-1)
"""The rates that are tried for a linear probe."""
PAPER_RATE, PAPER_PARAMETERS, EXPONENT = 5e-5, 112e6, 0.75
"""The paper's rate, and the parameters of its network without embeddings; the rate falls with their number as a power.
The exponent fits the best rates of the preset 1m (3e-3 to 6e-3), of all-MiniLM-L6-v2 (3e-4) and of that network."""
SEARCH_STEPS = 100
"""The updates of each try, with warm-up and decay; fewer where the training itself has fewer."""


def search_rate(plan: CellPlan, scores: Path) -> CellPlan:
    """Plan the cell at the rate, of those that are tried, with the lowest loss on validation.

    A loss tells rates apart where a metric is equal for all: while the largest class is predicted, or no entity. The
    losses are kept in `scores/.rates`, so that the same cell is not searched for twice.
    """
    path = scores / ".rates" / f"{plan.task.name}-{plan.hash[:16]}.json"
    losses = read_json_as(path, dict[float, float | None]) if path.exists() else {}
    for rate in PROBE_RATES if plan.config.frozen else rates_by_size(open_encoder(plan.model).backbone):
        if rate not in losses:
            losses[rate] = try_rate(plan, rate)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, losses)
    best = choose_rate({rate: [None if loss is None else -loss] for rate, loss in losses.items()})
    tried = (f"{show_rate(rate)} {'diverged' if loss is None else f'{loss:.3f}'}" for rate, loss in losses.items())
    how = f"tried for {SEARCH_STEPS} steps or fewer, loss on validation: {', '.join(tried)}"
    err.print(f"{plan.task.name}: learning rate {show_rate(best)} ({how}); learning_rate=… skips this", markup=False)
    return plan_cell(plan.model, plan.train, plan.evaluation, plan.config.model_copy(update={"learning_rate": best}))


def rates_by_size(backbone: Any) -> list[float]:
    """List a third of the rate that a network's size suggests, that rate, and three times as much, to one digit."""
    num_parameters = sum(parameter.numel() for parameter in backbone.parameters())
    num_parameters -= backbone.get_input_embeddings().weight.numel()
    rate = PAPER_RATE * (PAPER_PARAMETERS / num_parameters) ** EXPONENT
    return [float(f"{factor * rate:.0e}") for factor in (1 / 3, 1, 3)]


@memory_told("lower microbatch_tokens (65,536 unless given)")
def try_rate(plan: CellPlan, rate: float) -> float | None:
    """Train a network for some steps at a rate; return its mean loss on validation, None where it diverged."""
    encoder, device = open_encoder(plan.model), choose_device(plan.config.device)
    steps = min(plan.config.max_steps, SEARCH_STEPS)
    config = plan.config.model_copy(update={"learning_rate": rate, "max_steps": steps, "device": device.type})
    splits, _ = load_encoded(plan.train, encoder, config)
    cell = CellContext(plan.train.task, config, device, choose_dtype(config.precision, device))
    network, _, training = train_copy(encoder, cell, splits, splits.values())
    validation = splits["validation"]
    items = np.arange(len(validation.lengths_I))
    if config.class_weights:
        cell = cell.with_class_weights(validation.balanced_weights(items, cell))
    with torch.no_grad():
        loss = float(validation.accumulate_gradients(network.eval(), items, cell))
    return None if training["diverged"] or not math.isfinite(loss) else loss
