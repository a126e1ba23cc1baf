"""A cell without a learning rate → the same cell with a rate from a short search on validation.

The paper's 5e-5 suits its network of 210M parameters. Smaller networks need higher rates, so the search tries three
rates around one that depends on size. `evaluate` and studies have grids of rates; biphase's own tasks use 5e-5.
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
from biphase.finetuning.loss import weigh_classes
from biphase.finetuning.scores import show_rate

PROBE_RATES = (1e-3, 1e-2, 1e-1)
"""The rates to try for a linear probe."""
PAPER_RATE, PAPER_PARAMETERS, EXPONENT = 5e-5, 112e6, 0.75
"""The paper's rate, the parameters of its network without embeddings, and the power by which the rate falls with their
number. It fits the best rates of the preset 1m (3e-3 to 6e-3), of all-MiniLM-L6-v2 (3e-4) and of that network."""
SEARCH_STEPS = 100
"""The updates of each try, with warm-up and decay; fewer if the training has fewer."""


def search_rate(plan: CellPlan, scores: Path) -> CellPlan:
    """Plan the cell at the tried rate with the lowest loss on validation.

    After few steps a metric may be the same at all rates, with one class or no entity predicted; the loss still tells
    them apart. `scores/.rates` stores the losses, so that no search runs twice.
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
    err.print(f"{plan.task.name}: learning rate {show_rate(best)} ({how}); learning_rate=… skips this")
    return plan_cell(plan.model, plan.train, plan.evaluation, plan.config.model_copy(update={"learning_rate": best}))


def rates_by_size(backbone: Any) -> list[float]:
    """List the rate that a network's size suggests, a third of it and three times as much, each to one digit."""
    num_parameters = sum(parameter.numel() for parameter in backbone.parameters())
    num_parameters -= backbone.get_input_embeddings().weight.numel()
    rate = PAPER_RATE * (PAPER_PARAMETERS / num_parameters) ** EXPONENT
    return [float(f"{factor * rate:.0e}") for factor in (1 / 3, 1, 3)]


@memory_told("lower microbatch_tokens (65,536 unless given)")
def try_rate(plan: CellPlan, rate: float) -> float | None:
    """Train a network for some steps at a rate. Returns its mean loss on validation, None if it diverged."""
    encoder, device = open_encoder(plan.model), choose_device(plan.config.device)
    steps = min(plan.config.max_steps, SEARCH_STEPS)
    config = plan.config.model_copy(update={"learning_rate": rate, "max_steps": steps, "device": device.type})
    splits, _ = load_encoded(plan.train, encoder, config)
    cell = CellContext(plan.train.task, config, device, choose_dtype(config.precision, device))
    network, _, training = train_copy(encoder, cell, splits, splits.values())
    validation = splits["validation"]
    items = np.arange(len(validation.lengths_I))
    cell = weigh_classes(cell, validation, items)
    with torch.no_grad():
        loss = float(validation.accumulate_gradients(network.eval(), items, validation.pack_items(items, cell), cell))
    return None if training["diverged"] or not math.isfinite(loss) else loss
