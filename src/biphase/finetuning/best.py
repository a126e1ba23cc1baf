"""A grid → the best fine-tuned network of each model and task, in a folder (`evaluate` with `keep`)."""

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from biphase.console import err
from biphase.errors import InputError
from biphase.files import read_json_as, refuse_filled
from biphase.finetuning.cells import CellPlan
from biphase.finetuning.choosing import choose_rate
from biphase.finetuning.encoding import CellContext
from biphase.finetuning.fit import fit_plans
from biphase.finetuning.grid import SharedTraining
from biphase.finetuning.heads import load_encoder
from biphase.finetuning.keep import check_keepable
from biphase.finetuning.kept import RECORD
from biphase.finetuning.scores import read_score, short_name

Kept = dict[tuple[str, str], tuple[Path, list[CellPlan]]]
"""For each model and task, the folder to write and the cells to choose from."""


def check_kept(trainings: Iterable[SharedTraining], folder: Path) -> Kept:
    """Where each model and task is kept, `folder/MODEL-TASK`.

    Raises `InputError`, before anything is trained, for a folder of other things than a kept network, two models of
    one name, and a network that cannot be kept.
    """
    kept: Kept = {}
    for training in trainings:
        name = re.sub(r"[^\w.@-]", "-", short_name(training.model))
        for cell in training.cells:
            place = folder / f"{name}-{cell.task.name}"
            kept.setdefault((training.model, cell.task.name), (place, []))[1].append(cell)
    [(place, times)] = Counter(place for place, _ in kept.values()).most_common(1)
    if times > 1:
        raise InputError(f"`keep`: two models would be written to {place}; rename the folder of one")
    for (model, _), (place, cells) in kept.items():
        context = CellContext(cells[0].task, cells[0].config, torch.device("cpu"), torch.float32)
        check_keepable(load_encoder(model), context)
        if not (place / RECORD).is_file():
            refuse_filled(place, "keep")
    return kept


def keep_best_networks(kept: Kept, out: Path) -> None:
    """Train the best cell of each model and task once more, and keep its network: at the rate that validation chooses
    over all seeds, the seed that is best on validation.

    One that is kept already stays, another one of ours is replaced. While cells are missing nothing is kept.
    """
    for (model, task), (place, cells) in kept.items():
        num_missing = sum(not cell.is_finished(out) for cell in cells)
        if num_missing:
            err.print(f"{place}: not kept, {num_missing} of {len(cells)} cells of {model} on {task} are missing")
            continue
        scored = [(cell, read_score(cell.folder(out))) for cell in cells]
        values = [score.metrics["validation"][score.metric] if score.metrics else None for _, score in scored]
        by_rate: dict[float, list[float | None]] = {}
        for (cell, _), value in zip(scored, values, strict=True):
            by_rate.setdefault(cell.config.learning_rate, []).append(value)
        if not any(value is not None for value in values):
            err.print(f"{place}: not kept, every cell of {model} on {task} diverged")
            continue
        rate = choose_rate(by_rate)
        at_rate = [cell for cell, _ in scored if cell.config.learning_rate == rate]
        ranked = zip(at_rate, by_rate[rate], strict=True)
        best, _ = max(((cell, value) for cell, value in ranked if value is not None), key=lambda one: one[1])
        if (place / RECORD).is_file() and read_json_as(place / RECORD, dict[str, Any]).get("cell") == best.hash:
            err.print(f"{place}: the best, as it was kept before")
            continue
        fit_plans(model, [best], out, keep=place)
        err.print(f"{place}: kept, learning rate {rate:g}, seed {best.config.seed}")
