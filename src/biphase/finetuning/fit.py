"""One cell: (encoder, task, configuration with rate and seed) → one `Score` with per-example predictions.

The protocol is the paper's: 1,000 steps of 32 examples or one epoch, 10 % warm-up, linear decay, no early stopping.
What many cells share (weights on disk, encoded tasks) is loaded once per process and never changed; a cell trains a
copy. Tasks that are trained on another's pairs (NQ and MLDR on MS MARCO's) are scored after one training.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from biphase import console
from biphase.device import choose_device, choose_dtype
from biphase.encoder.packed import explain_computing
from biphase.errors import memory_told
from biphase.files import locked, refuse_filled, whole_folder, write_hashed, write_json
from biphase.finetuning.batches import CellContext
from biphase.finetuning.cells import CellPlan, DataDirs, plan_cells
from biphase.finetuning.config import FinetuneConfig
from biphase.finetuning.encoders import check_length, copy_backbone, load_encoder
from biphase.finetuning.encoding_cache import load_encoded, load_inputs
from biphase.finetuning.keep import check_keepable, keep_network
from biphase.finetuning.probe import look_up_tasks
from biphase.finetuning.scores import Score, read_score
from biphase.finetuning.training import SplitRows, build_network, evaluate_cell, train_network
from biphase.tasks.spec import find_task


def fit_cell(
    model: str,
    task: str,
    config: FinetuneConfig,
    out: Path | None = None,
    data_dir: str | Path | None = None,
    keep: Path | None = None,
) -> Score:
    """Fine-tune `model` on a task of the table (or of a YAML file) and evaluate it.

    With `out`, the result appears as the folder `out/TASK-HASH` when it is finished, and a finished cell is read, not
    rerun. On a CPU the same cell gives the same scores to the last bit. Training that diverges is a result, not an
    error. Many cells in one process load the model and encode the task once. Prints one line.

    With `keep`, the trained network becomes a model folder there (`keep.keep_network`); a finished cell is trained
    again for it, its score stays. A training that diverges leaves none.
    """
    if keep is not None:
        refuse_filled(keep, "keep")
    plans = plan_cells(model, [task], config, {} if data_dir is None else {find_task(task).name: data_dir})
    was_there = out is not None and plans[0].is_finished(out)
    [score] = fit_plans(model, plans, out, keep=keep)
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
    """Fine-tune as `fit_cell` does, once for several tasks with the same training (`Task.trained_on`). Prints nothing.

    `label` is what the scores call the model, in place of `model`.

    Raises `BusyError` when another process is at work on one of the cells.
    """
    return fit_plans(model, plan_cells(model, tasks, config, data_dirs or {}), out, label)


@memory_told("lower microbatch_tokens (65,536 unless given), or --workers-per-gpu where cells share a GPU")
def fit_plans(
    model: str, plans: Sequence[CellPlan], out: Path | None, label: str | None = None, keep: Path | None = None
) -> list[Score]:
    """The scores of cells that share a training, read where they are finished."""
    if out is None:
        return [score for score, _, _ in run_cells(model, plans, label, keep)]
    missing = [plan for plan in plans if not plan.is_finished(out)]
    if missing:
        with cells_claimed(out, missing):
            missing = [plan for plan in missing if not plan.is_finished(out)]  # another process may have done some
            cells = run_cells(model, missing, label, keep) if missing else ()
            for plan, (score, losses, predictions) in zip(missing, cells, strict=True):
                inputs = load_inputs(plan.evaluation, plan.config) if plan.config.keep_texts else {}
                for split in inputs.keys() & predictions.keys():
                    pairs = zip(predictions[split], inputs[split], strict=True)
                    predictions[split] = ({**row, "input": text} for row, text in pairs)
                write_cell(plan.folder(out), score, losses, predictions)
    if keep is not None and not missing:
        list(run_cells(model, plans, label, keep))
    return [read_score(plan.folder(out)) for plan in plans]


def write_cell(
    folder: Path, score: Score, losses: Sequence[float], predictions: Mapping[str, Iterable[dict[str, Any]]]
) -> None:
    """A cell's folder, whole or not at all."""
    with whole_folder(folder) as part:
        for split, rows in predictions.items():
            lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            (part / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
        write_json(part / "losses.json", losses)
        write_hashed(part / "score.json", score.model_dump(mode="json"))


@contextmanager
def cells_claimed(out: Path, plans: Sequence[CellPlan]) -> Iterator[None]:
    """Hold the names of cells against other processes; a killed one lets go."""
    with ExitStack() as held:
        for place in (plan.folder(out) for plan in plans):
            busy = f"{place} is being made by another process"
            held.enter_context(locked(out / ".locks" / place.name, busy=busy))
        yield


def run_cells(
    model: str, plans: Sequence[CellPlan], label: str | None = None, keep: Path | None = None
) -> Iterator[tuple[Score, list[float], SplitRows]]:
    """Train once, then evaluate each task: its score, the losses, the predictions."""
    assert len({plan.train.hash for plan in plans}) == 1, "these tasks do not share a training"
    assert len({plan.config for plan in plans}) == 1, "tasks of one training have one configuration"
    # 1. The encoder, and where it computes.
    encoder = replace(load_encoder(model), name=label or model)
    device = choose_device(plans[0].config.device)
    config = plans[0].config.model_copy(update={"device": device.type})
    dtype = choose_dtype(config.precision, device)
    console.err.print(
        f"{explain_computing(config.precision, device, encoder.backbone)} · not compiled (too short a run)"
    )
    check_length(encoder, config)
    if keep is not None:
        check_keepable(encoder, CellContext(plans[0].task, config, torch.device("cpu"), torch.float32))
    # 2. The data as token ids: of the task that is trained on, and of those that are evaluated.
    source = plans[0].train
    trained = load_encoded(source, encoder.tokenizer, config)
    evaluated = []
    for plan in plans:
        is_same = plan.evaluation.hash == source.hash
        evaluated.append(trained if is_same else load_encoded(plan.evaluation, encoder.tokenizer, config))
    # 3. A copy of the encoder with a new head, trained. Head and dropout draw from torch's generator, under the seed.
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(config.seed)
        cell = CellContext(source.task, config, device, dtype)
        counted = trained.splits["train"]
        table, (trained, *evaluated) = look_up_tasks(encoder, [trained, *evaluated], cell)
        network: Any = build_network(encoder, cell, [trained, *evaluated], table).to(device)
        training = train_network(network, trained, cell, counted)
    # 4. Predictions and scores, task by task.
    for plan, encoded in zip(plans, evaluated, strict=True):
        cell = CellContext(plan.task, config, device, dtype)
        score, predictions = evaluate_cell(network, encoded, training, plan, cell, encoder)
        yield score, training.losses, predictions
        if keep is not None and not score.diverged:
            network.backbone = network.backbone if table is None else copy_backbone(encoder.backbone, [])
            keep_network(network, encoder, cell, keep, score, encoded.splits["test"])
