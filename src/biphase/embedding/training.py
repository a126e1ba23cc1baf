"""Tables of pairs and a stage → a trained network, by sentence-transformers' trainer."""

import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from datasets import Dataset
from datasets.table import InMemoryTable
from safetensors.torch import load_file, save_file
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from torch import Tensor, nn
from transformers import PrinterCallback, TrainerCallback

from biphase import console
from biphase.embedding.losses import make_loss
from biphase.embedding.pairs import Pairs
from biphase.embedding.recipe import EmbeddingRecipe, EmbeddingStage
from biphase.errors import InputError, StoppedError
from biphase.files import MARK, content_hash, refuse_damaged, write_mark
from biphase.machine import stop_signals
from biphase.tracking import Send

LOGGING_STEPS = 10
LEARNT_BY_LOSSES = "losses.safetensors"


def to_table(pairs: Pairs, weight: float, seed: int) -> Dataset:
    """The rows that an epoch goes through: all of them `weight` times, a fraction drawn with the seed, in order."""
    whole, part = divmod(weight, 1)
    is_drawn = np.zeros(len(pairs.table), dtype=bool)
    is_drawn[random.Random(seed).sample(range(len(is_drawn)), round(part * len(is_drawn)))] = True
    table = pa.concat_tables([*[pairs.table] * int(whole), pairs.table.filter(pa.array(is_drawn))])
    # With a fingerprint, as `datasets` would make one of all texts, copied.
    return Dataset(InMemoryTable(table), fingerprint=content_hash([pairs.hash, weight, seed])[:16])


class CardlessTrainer(SentenceTransformerTrainer):
    """Trains without the model card of sentence-transformers, for which it would embed texts behind a bar of its own:
    the card is written with the folder. Checkpoints hold what a loss learns, too: a map to a teacher's dimension."""

    def add_model_card_callback(self, default_args_dict: dict[str, Any]) -> None:
        pass

    def learnt_by_losses(self) -> dict[str, Tensor]:
        """Parameters of the losses by their names, those of the model left out."""
        of_model = {id(parameter) for parameter in self.model.parameters()}
        given: Any = self.loss
        found = nn.ModuleDict(given if isinstance(given, dict) else {"loss": given})
        return {name: parameter for name, parameter in found.named_parameters() if id(parameter) not in of_model}

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict)
        if learnt := self.learnt_by_losses():
            save_file(learnt, Path(output_dir or "", LEARNT_BY_LOSSES))

    def _save_checkpoint(self, *arguments: Any) -> None:
        """As theirs, with the hash of each file; the one before goes when this one is whole."""
        super()._save_checkpoint(*arguments)
        folder = Path(self.args.output_dir or "")
        own = folder / f"checkpoint-{self.state.global_step}"
        write_mark(own, "checkpoint")
        for earlier in folder.glob("checkpoint-*"):
            if earlier != own:
                shutil.rmtree(earlier)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint)
        if learnt := self.learnt_by_losses():
            kept = load_file(Path(resume_from_checkpoint, LEARNT_BY_LOSSES))
            with torch.no_grad():
                for name, weight in learnt.items():
                    weight.copy_(kept[name])


class StageCallback(TrainerCallback):
    """The bar or the lines that a person waits with, losses on their way to TensorBoard or W&B, and the end of the step
    at which the process is asked to stop: with a checkpoint, and the loss up to there."""

    def __init__(self, stage: str, send: Send, steps_before: int) -> None:
        self.stage, self.send, self.steps_before = stage, send, steps_before
        self.asked: list[int] = []
        self.note = ""
        self.tracker: console.Tracker | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.tracker = console.Tracker(f"embed {self.stage}", state.max_steps, "steps")
        self.tracker.advance(state.global_step, already_done=True)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        assert self.tracker is not None
        self.tracker.advance(1, self.note)
        if self.asked:
            control.should_save = control.should_training_stop = True
        if self.asked or state.global_step == state.max_steps:  # a short stage has a last loss, too
            control.should_log = True

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if logs and "loss" in logs:
            self.note = f"loss {float(logs['loss']):.4f}"
            record = {"kind": "train", "objective": self.stage, "step": self.steps_before + state.global_step}
            known = {"loss": "loss", "learning_rate": "lr", "grad_norm": "grad_norm"}
            self.send(record | {ours: logs[theirs] for theirs, ours in known.items() if theirs in logs})

    def close(self) -> None:
        """However training ended: a tracker that is left open goes on telling."""
        if self.tracker is not None:
            self.tracker.close()


class OneDeviceArguments(SentenceTransformerTrainingArguments):
    """One GPU of those that are there: the trainer would take a batch for each and scatter it by rows, which packed
    tokens have not."""

    @property
    def n_gpu(self) -> int:
        return min(super().n_gpu, 1)


def arguments_of(
    recipe: EmbeddingRecipe, stage: EmbeddingStage, folder: Path, kinds: dict[str, str], *, bf16: bool, use_cpu: bool
) -> Any:
    """The trainer's, for sources of these kinds by name. Scored pairs have no prompts: neither side is a query."""
    prompts: dict[str, Any] = {"anchor": recipe.prompts.query, "positive": recipe.prompts.document}
    for number in range(100):
        prompts[f"negative_{number + 1}"] = recipe.prompts.document
    if len(kinds) > 1:
        prompts = {name: prompts for name, kind in kinds.items() if kind == "pairs"}
    has_pairs = "pairs" in kinds.values()
    is_prompted = has_pairs and bool(recipe.prompts.query or recipe.prompts.document)
    return OneDeviceArguments(
        output_dir=str(folder),
        num_train_epochs=stage.epochs,
        max_steps=stage.max_steps or -1,
        per_device_train_batch_size=stage.batch_size,
        learning_rate=stage.learning_rate,
        warmup_steps=stage.warmup_ratio,  # below 1 it is a share
        weight_decay=stage.weight_decay,
        seed=recipe.seed,
        bf16=bf16,
        use_cpu=use_cpu,
        batch_sampler="no_duplicates" if has_pairs else "batch_sampler",
        multi_dataset_batch_sampler="proportional",
        prompts=prompts if is_prompted else None,
        logging_steps=LOGGING_STEPS,
        logging_nan_inf_filter=False,
        save_steps=stage.save_steps,
        report_to=[],
        disable_tqdm=True,
    )


def last_checkpoint(folder: Path) -> Path | None:
    """The newest `checkpoint-STEP` of a trainer that is whole: its mark is written last; in earlier versions, which
    wrote none, its state."""
    whole = [*folder.glob(f"checkpoint-*/{MARK}")] or [*folder.glob("checkpoint-*/trainer_state.json")]
    return max((path.parent for path in whole), key=lambda path: int(path.name.partition("-")[2]), default=None)


def train_stage(
    model: SentenceTransformer,
    recipe: EmbeddingRecipe,
    stage: EmbeddingStage,
    tables: Mapping[str, tuple[str, Dataset]],
    folder: Path,
    *,
    bf16: bool,
    send: Send = lambda record: None,
    steps_before: int = 0,
) -> dict[str, Any]:
    """Train the model in place, from the last checkpoint in `folder` where there is one, on sources by their names,
    of each its kind and its rows. Returns the steps taken, the rows and the losses that were logged, which are sent
    too, counted on from the steps of the stages before.

    Raises:
        InputError: the checkpoint is damaged, or the weights end up as no numbers.
        StoppedError: after SIGTERM or SIGINT, once there is a checkpoint.
    """
    callback = StageCallback(stage.name, send, steps_before)
    trainer = make_trainer(model, recipe, stage, tables, folder, callback, bf16=bf16)
    last = last_checkpoint(folder)
    if last is not None:
        refuse_damaged(last, f"delete {last} and rerun")
        console.err.print(f"stage {stage.name}: goes on from {last.name}", markup=False)
    try:
        with stop_signals(callback.asked.append):
            trainer.train(resume_from_checkpoint=str(last) if last else None)
    finally:
        callback.close()
    step, steps = trainer.state.global_step, trainer.state.max_steps
    if callback.asked and step < steps:
        line = f"stage {stage.name}: stopped at step {step} of {steps}; run the same command to go on"
        raise StoppedError(line, callback.asked[0])
    trainer.accelerator.unwrap_model(model, keep_fp32_wrapper=False)  # else it would go on in bf16 where it trained so
    if not all(torch.isfinite(weight).all() for weight in model.parameters()):
        shutil.rmtree(folder)  # else the same command would go on from there
        raise InputError(f"stage {stage.name}: training diverged; lower its learning_rate ({stage.learning_rate:g})")
    told = [{"step": log["step"], "loss": log["loss"]} for log in trainer.state.log_history if "loss" in log]
    return {"steps": step, "rows": sum(len(table) for _, table in tables.values()), "losses": told}


def make_trainer(
    model: SentenceTransformer,
    recipe: EmbeddingRecipe,
    stage: EmbeddingStage,
    tables: Mapping[str, tuple[str, Dataset]],
    folder: Path,
    callback: StageCallback,
    *,
    bf16: bool,
) -> CardlessTrainer:
    """The trainer of a stage, with a loss for each source."""
    torch.manual_seed(recipe.seed)  # a loss may draw weights, whatever was drawn before
    made = {name: make_loss(model, stage, kind, recipe.matryoshka) for name, (kind, _) in tables.items()}
    rows = {name: table for name, (_, table) in tables.items()}
    kinds = {name: kind for name, (kind, _) in tables.items()}
    only = next(iter(tables)) if len(tables) == 1 else None
    trainer = CardlessTrainer(
        model,
        arguments_of(recipe, stage, folder, kinds, bf16=bf16, use_cpu=model.device.type == "cpu"),
        train_dataset=rows[only] if only else rows,
        loss=made[only] if only else made,
        callbacks=[callback],
    )
    trainer.remove_callback(PrinterCallback)
    return trainer
