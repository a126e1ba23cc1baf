"""A cell of a user's own table, without a length or a learning rate → the same cell with both.

The paper's one epoch is too little for most tables, so the number of epochs follows from the size of the table. The
paper's 5e-5 suits its network of 210M parameters. Smaller networks need higher rates, so a short search on validation
tries three rates around one that depends on size. biphase's own tasks, `evaluate` and studies keep the paper's length.
`evaluate` and studies have grids of rates; biphase's own tasks use 5e-5.
"""

import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from biphase.console import err, prefix_bars
from biphase.corpus.text import SEVERAL, sample_language
from biphase.device import choose_device, choose_dtype
from biphase.errors import first_of, memory_told
from biphase.files import read_json_as, write_json
from biphase.finetuning.choosing import choose_rate
from biphase.finetuning.config import CellPlan
from biphase.finetuning.encoding import CellContext
from biphase.finetuning.encoding_cache import load_encoded
from biphase.finetuning.fit import choose_items, train_copy
from biphase.finetuning.heads import count_weights, open_encoder
from biphase.finetuning.loss import weigh_classes
from biphase.finetuning.scores import show_rate
from biphase.hub import read_languages
from biphase.tasks.examples import inputs_of, load_examples
from biphase.tasks.spec import is_own_task

PROBE_RATES = (1e-3, 1e-2, 1e-1)
"""The rates to try for a linear probe."""
PAPER_RATE, PAPER_PARAMETERS, EXPONENT = 5e-5, 112e6, 0.75
"""The paper's rate, the parameters of its network without embeddings, and the power by which the rate falls with their
number. It fits the best rates of the preset 1m (3e-3 to 6e-3), of all-MiniLM-L6-v2 (3e-4) and of that network."""
LORA_FACTOR = 3
"""The factor on this rate for adapters. With r = 16, all-MiniLM-L6-v2 learns best at 3 to 10 times its best rate, and
nothing at 30 times."""
LEAST_SEARCH_STEPS, SEARCH_STEPS = 20, 100
"""The least and the most updates of each try, with warm-up and decay. In between, all tries together have a third of
the training's updates; no try has more than the training."""
TABLE_STEPS, TABLE_EPOCHS, MOST_TABLE_STEPS = 600, (3, 20), 4000
"""The length of a training: as many epochs as give about 600 updates, between 3 and 20, and never more than 4,000
updates."""
FEWEST_VALIDATED, PATIENCE = 500, 3
"""The fewest examples of validation that choose weights, and the checks without a better score that end a training;
half of the epochs if that is more, because a score may stay flat through the first epochs."""


def fill_in_length(plan: CellPlan, given: Collection[str]) -> CellPlan:
    """Plan a cell of a user's own table with a length, as far as the settings that are `given` have none. Cells of
    biphase's own tasks and of retrieval stay as they are."""
    if is_own_task(plan.task) or plan.task.kind.is_search:
        return plan
    tell_languages(plan)
    return choose_length(plan, given)


def fill_in_rate(plan: CellPlan, given: Collection[str], scores: Path) -> CellPlan:
    """Plan a cell of a user's own table with a learning rate, unless it is among the settings that are `given`. Cells
    of biphase's own tasks and of retrieval stay as they are."""
    is_set = "learning_rate" in given or is_own_task(plan.task) or plan.task.kind.is_search
    return plan if is_set else search_rate(plan, scores)


def tell_languages(plan: CellPlan) -> None:
    """Print that the training texts are in a language that the model's card does not name, if that is so."""
    known = read_languages(plan.model.folder)
    if not known:
        return
    inputs = inputs_of(load_examples(plan.train, bool(plan.config.judged_only)), "train")
    texts = [each if isinstance(each, str) else " ".join(each) for each in inputs]
    found = sample_language(texts, len(texts))
    named = first_of([f"'{code}'" for code in known], 8)
    alike = [code for code in known if len(code) == len(found)]  # a card may have codes of three letters
    if (found == SEVERAL and len(known) == 1) or (alike and found not in alike):
        what = "several languages" if found == SEVERAL else f"'{found}'"
        remedy = "a model that has read the language may do better (biphase study advise --text names one)"
        err.print(f"{plan.task.name}: the texts are in {what}, and the model's card names {named} only; {remedy}")


def choose_length(plan: CellPlan, given: Collection[str]) -> CellPlan:
    """Plan the cell with a length that suits the size of its table, and print it.

    The weights that score best on validation are kept, and training stops when that score no longer rises. If
    validation is too small to tell epochs apart, or `load_best_model_at_end` is given as false, training runs to its
    end. Settings whose names are `given` stay as they are. Of `epochs` and `max_steps`, one that is given alone
    decides; a cell with both, or with `shots`, stays as it is.
    """
    if "shots" in given or {"epochs", "max_steps"} <= {*given}:
        return plan
    splits, _ = load_encoded(plan.train, open_encoder(plan.model), plan.config)
    items, _ = choose_items(splits["train"], plan.config)
    if {"epochs", "max_steps"} & {*given}:
        return complete_length(plan, given, len(items))
    steps, num_validated = math.ceil(len(items) / plan.config.batch_size), splits["validation"].num_examples
    epochs = int(np.clip(round(TABLE_STEPS / steps), *TABLE_EPOCHS))
    chosen: dict[str, Any] = {"epochs": epochs, "max_steps": MOST_TABLE_STEPS}
    keeps_last = "load_best_model_at_end" in given and not plan.config.load_best_model_at_end
    if num_validated >= FEWEST_VALIDATED and not keeps_last:
        chosen |= {"load_best_model_at_end": True, "early_stopping_patience": max(PATIENCE, epochs // 2)}
    plan = plan.changed(**{key: value for key, value in chosen.items() if key not in given})
    config = plan.config
    has_all = epochs * steps <= MOST_TABLE_STEPS
    length = f"{epochs} epochs of {steps:,} updates" if has_all else f"{MOST_TABLE_STEPS:,} updates"
    length = f"up to {length}" if config.early_stopping_patience is not None else length
    kept = "the weights that score best on validation are kept"
    if not config.load_best_model_at_end:
        reason = f", because validation has only {num_validated:,} examples"
        kept = f"the last weights are kept{'' if 'load_best_model_at_end' in given else reason}"
    err.print(f"{plan.task.name}: {length} for {len(items):,} examples; {kept}; epochs=… sets another length")
    return plan


def complete_length(plan: CellPlan, given: Collection[str], num_items: int) -> CellPlan:
    """Plan the cell so that `epochs` or `max_steps`, whichever is given, decides its length, and print that length."""
    config, steps = plan.config, math.ceil(num_items / plan.config.batch_size)
    if "epochs" in given:
        longer = {"max_steps": max(config.max_steps, config.epochs * steps)}
    else:
        longer = {"epochs": max(config.epochs, math.ceil(config.max_steps / steps))}
    plan = plan.changed(**longer)
    config = plan.config
    most = "up to " if config.early_stopping_patience is not None else ""
    length = f"{most}{min(config.max_steps, config.epochs * steps):,} updates"
    err.print(f"{plan.task.name}: {length} for {num_items:,} examples; an epoch has {steps:,}")
    return plan


def search_rate(plan: CellPlan, scores: Path) -> CellPlan:
    """Plan the cell at the tried rate with the lowest loss on validation.

    After few steps a metric may be the same at all rates, with one class or no entity predicted; the loss still tells
    them apart. `scores/.rates` stores the losses, so that no search runs twice. All seeds have one search, and so one
    rate, with seed 0; but with `shots`, each seed draws its own examples.
    """
    encoder = open_encoder(plan.model)
    factor = 1 if plan.config.lora is None else LORA_FACTOR
    rates = PROBE_RATES if plan.config.frozen else rates_by_size(encoder.backbone, factor)
    splits, _ = load_encoded(plan.train, encoder, plan.config)
    _, num_steps = choose_items(splits["train"], plan.config)
    steps = min(num_steps, max(LEAST_SEARCH_STEPS, min(SEARCH_STEPS, num_steps // (3 * len(rates)))))
    shorter = {"max_steps": steps, "load_best_model_at_end": False, "early_stopping_patience": None}
    trial = plan.changed(**shorter, seed=plan.config.seed if plan.config.shots else 0)
    path = scores / ".rates" / f"{plan.task.name}-{trial.hash[:16]}.json"
    losses = read_json_as(path, dict[float, float | None]) if path.exists() else {}
    if not losses:
        tries = f"tries {len(rates)} learning rates for {steps} steps each"
        err.print(f"{plan.task.name}: {tries}, then trains {num_steps:,} steps")
    for number, rate in enumerate(rates, start=1):
        if rate not in losses:
            later = steps * len({*rates[number:]} - {*losses}) + num_steps
            with prefix_bars(f"learning rate {number} of {len(rates)} · ", later):
                losses[rate] = try_rate(trial, rate)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, losses)
    best = choose_rate({rate: [None if loss is None else -loss] for rate, loss in losses.items()})
    tried = (f"{show_rate(rate)} {'diverged' if loss is None else f'{loss:.3f}'}" for rate, loss in losses.items())
    how = f"tried for {steps} steps each, loss on validation: {', '.join(tried)}"
    err.print(f"{plan.task.name}: learning rate {show_rate(best)} ({how}); learning_rate=… skips this")
    return plan.changed(learning_rate=best)


def rates_by_size(backbone: Any, factor: float = 1) -> list[float]:
    """List the rate that a network's size suggests, times a factor, a third of it and three times as much, each to one
    digit."""
    rate = factor * PAPER_RATE * (PAPER_PARAMETERS / count_weights(backbone)) ** EXPONENT
    return [float(f"{times * rate:.0e}") for times in (1 / 3, 1, 3)]


@memory_told("lower microbatch_tokens (65,536 unless given)")
def try_rate(plan: CellPlan, rate: float) -> float | None:
    """Train a network at a rate. Returns its mean loss on validation, None if it diverged."""
    encoder, device = open_encoder(plan.model), choose_device(plan.config.device)
    config = plan.config.model_copy(update={"learning_rate": rate, "device": device.type})
    splits, _ = load_encoded(plan.train, encoder, config)
    cell = CellContext(plan.train.task, config, device, choose_dtype(config.precision, device))
    network, _, training = train_copy(encoder, cell, splits, splits.values())
    validation = splits["validation"]
    items = np.arange(len(validation.lengths_I))
    cell = weigh_classes(cell, validation, items)
    with torch.no_grad():
        loss = float(validation.accumulate_gradients(network.eval(), items, validation.pack_items(items, cell), cell))
    return None if training["diverged"] or not math.isfinite(loss) else loss
