"""A trained cell → the model folder that predicts as the cell did."""

from dataclasses import replace
from pathlib import Path

import torch

from biphase.console import err
from biphase.errors import memory_told
from biphase.finetuning.calibration import calibration_error
from biphase.finetuning.config import CellPlan
from biphase.finetuning.encoding import CellContext
from biphase.finetuning.fit import FittedCell, claim_cells, run_cells, write_cells
from biphase.finetuning.heads import refuse_replaced, to_transformers
from biphase.finetuning.kept import keep_network
from biphase.finetuning.scores import Score, read_score


@memory_told("lower microbatch_tokens (65,536 unless given)")
def fit_and_keep(plan: CellPlan, out: Path, folder: Path) -> Score:
    """Fine-tune a model for one cell, as `fit_cells` does, and keep the network in `folder`, which
    `heads.check_keepable` must have accepted. A finished cell trains again, and its score stays as it is. A training
    that diverged leaves no folder. Raises `BusyError` if another process works on the cell."""
    with claim_cells([plan], out):
        [fitted] = write_cells([plan], out) or run_cells([plan])
        if not fitted.score.diverged:
            keep_cell(fitted, folder)
    return read_score(plan.folder(out))


def keep_cell(fitted: FittedCell, folder: Path) -> None:
    """Calibrate a trained network, and write it to a model folder."""
    cell = calibrate_cell(fitted)
    model = to_transformers(fitted.network, fitted.encoder, cell)
    refuse_replaced(fitted.plan.model)
    keep_network(model, fitted.encoder, cell, folder, fitted.score, fitted.splits["test"])


@torch.no_grad()
def calibrate_cell(fitted: FittedCell) -> CellContext:
    """Calibrate a cell on validation, and print the effect on test."""
    network, splits, cell = fitted.network, fitted.splits, fitted.context
    chosen = splits["validation"].calibrate(network, cell) if cell.task.classes else None
    if chosen is None:
        return cell
    test = splits["test"]
    outputs = test.predict(network, cell)
    measured = []
    for calibration in (cell.calibration, chosen):
        metrics, rows = test.judge(outputs / calibration.temperature, replace(cell, calibration=calibration))
        measured.append(metrics["macro_f1"] if chosen.thresholds else calibration_error(rows))
    what = "macro F1" if chosen.thresholds else "calibration error"
    how = "a threshold for each class" if chosen.thresholds else f"a temperature of {chosen.temperature:.2f}"
    effect = f"with {how}, by validation, {measured[1]:.1%}"
    if chosen == cell.calibration:
        effect = "temperature scaling does not clearly help on validation, so none is applied"
    err.print(f"{what} on test {measured[0]:.1%}; {effect}")
    return replace(cell, calibration=chosen.model_copy(update={"on_test": tuple(measured)}))
