"""Tables of pairs and a stage → a trained network, by sentence-transformers' trainer, losses and miner.

Letters: R rows, D width.
"""

import inspect
import random
import shutil
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer import losses
from sentence_transformers.util import mine_hard_negatives
from torch import Tensor, nn
from transformers import PrinterCallback, TrainerCallback

from biphase import console
from biphase.embedding.packed_module import width_of
from biphase.embedding.pairs import Pairs
from biphase.embedding.recipe import LOSSES, EmbeddingRecipe, EmbeddingStage, HardNegatives
from biphase.errors import InputError, first_line, nearest

SMALLEST_DIM = 32
"""Matryoshka's halves of the width end here."""
ENCODE_BATCH = 128
LOGGING_STEPS = 10


def to_table(pairs: Pairs, weight: float, seed: int) -> Dataset:
    """The rows that an epoch goes through: all of them `weight` times, a fraction drawn with the seed, in order."""
    whole, part = divmod(weight, 1)
    drawn = random.Random(seed).sample(range(len(pairs.rows)), round(part * len(pairs.rows)))
    rows = pairs.rows * int(whole) + [pairs.rows[number] for number in sorted(drawn)]
    return Dataset.from_dict({name: [row[at] for row in rows] for at, name in enumerate(pairs.columns)})


def mine_once(
    table: Dataset, model: SentenceTransformer, stage: str, wanted: HardNegatives, recipe: EmbeddingRecipe, kept: Path
) -> Dataset:
    """Anchor, positive and `wanted.number` negatives that the model ranks high, kept as a file; anchors with fewer are
    left out, and told. Raises `InputError` where none is left."""
    if not kept.exists():
        part = kept.with_suffix(".part")
        random.seed(recipe.seed)
        mined = mine_hard_negatives(
            table.select_columns(["anchor", "positive"]),
            model,
            anchor_column_name="anchor",
            positive_column_name="positive",
            range_min=wanted.first_rank,
            range_max=min(wanted.last_rank, len(set(table["positive"]))),
            relative_margin=wanted.margin,
            num_negatives=wanted.number,
            query_prompt=recipe.prompts.query or None,
            corpus_prompt=recipe.prompts.document or None,
            output_format="n-tuple",
            batch_size=ENCODE_BATCH,
            verbose=False,
        )
        if not len(mined):
            raise InputError(
                f"hard_negatives: no anchor has {wanted.number} negatives within rank {wanted.last_rank} and margin "
                f"{wanted.margin}: lower number or margin, or raise last_rank"
            )
        mined.to_parquet(str(part))
        part.rename(kept)
    mined = Dataset.from_parquet(str(kept), cache_dir=str(kept.parent / "cache"))
    told = f"{len(mined):,} of {len(table):,} pairs have {wanted.number} hard negatives"
    console.err.print(f"stage {stage}: {told}", markup=False)
    return mined


def add_teacher(table: Dataset, teacher: SentenceTransformer) -> Dataset:
    """The teacher's embedding of every text, as the labels of `EmbedDistillLoss`: [columns, D] for each row."""
    columns = [column for column in table.column_names if column != "score"]
    embeddings = [teacher.encode(list(table[column]), batch_size=ENCODE_BATCH) for column in columns]
    labels = [[each[row].tolist() for each in embeddings] for row in range(len(table))]
    return table.select_columns(columns).add_column("label", labels)


@lru_cache(maxsize=1)
def open_teacher(name: str) -> SentenceTransformer:
    return SentenceTransformer(name, trust_remote_code=False)


def load_teacher(stage: EmbeddingStage, width: int) -> SentenceTransformer | None:
    """The stage's teacher. Raises `InputError` where it cannot be loaded, or has another dimension than the student."""
    if stage.teacher is None:
        return None
    try:
        teacher = open_teacher(stage.teacher)
    except (OSError, ValueError) as error:
        raise InputError(
            f"stage {stage.name}: teacher {stage.teacher} cannot be loaded ({first_line(error)})"
        ) from None
    dimension = teacher.get_embedding_dimension()
    if dimension != width and not stage.projection:
        raise InputError(
            f"stage {stage.name}: teacher {stage.teacher} has {dimension} dimensions, the model {width}: say "
            "projection: true, or take another teacher"
        )
    return teacher


def loss_name(stage: EmbeddingStage, kind: str) -> str:
    if stage.loss == "auto":
        return "cosent" if kind == "scored" else "mnrl" if stage.orthogonal_weight else "cached_mnrl"
    is_scored = stage.loss == "cosent"
    if stage.loss != "distill" and is_scored != (kind == "scored"):
        raise InputError(
            f"stage {stage.name}: loss {stage.loss} needs {'scored pairs' if is_scored else 'pairs without scores'}"
        )
    return stage.loss


def make_loss(
    model: SentenceTransformer, stage: EmbeddingStage, kind: str, matryoshka: bool | Sequence[int]
) -> nn.Module:
    """The stage's loss, over several widths of the embeddings unless the recipe says otherwise.

    Raises `InputError` for a setting that the loss does not have.
    """
    name = loss_name(stage, kind)
    make = getattr(losses, LOSSES[name])
    known = inspect.signature(make).parameters
    settings = dict(stage.loss_settings)
    for key in settings:
        if key not in known or key == "model":
            raise InputError(
                f"stage {stage.name}: loss_settings: unknown key '{key}'{nearest(key, set(known) - {'model'})}"
            )
    if "scale" in known:
        settings.setdefault("scale", 1 / stage.temperature)
    if "mini_batch_num_tokens" in known:
        settings.setdefault("mini_batch_num_tokens", stage.mini_batch_tokens)
    width = width_of(model)
    if name == "distill":
        if stage.projection:
            teacher = load_teacher(stage, width)
            assert teacher is not None
            settings.setdefault("projection_dim", teacher.get_embedding_dimension())
        return make(model, **settings)
    try:
        loss = make(model, **settings)
    except (TypeError, ValueError) as error:
        raise InputError(f"stage {stage.name}: loss_settings: {first_line(error)}") from None
    if stage.orthogonal_weight:
        loss = WithOrthogonality(model, loss, stage.orthogonal_weight)
    dims = matryoshka_dims(width, matryoshka)
    return losses.MatryoshkaLoss(model, loss, dims) if len(dims) > 1 else loss


class WithOrthogonality(nn.Module):
    """A loss with the weighted global orthogonal regularizer added, from the same embeddings."""

    def __init__(self, model: SentenceTransformer, loss: Any, weight: float) -> None:
        super().__init__()
        self.model, self.loss, self.weight = model, loss, weight
        self.regularizer = losses.GlobalOrthogonalRegularizationLoss(model)

    def forward(self, sentence_features: Iterable[dict[str, Any]], labels: Tensor) -> Tensor:
        embeddings = [self.model(features)["sentence_embedding"] for features in sentence_features]
        terms = self.regularizer.compute_loss_from_embeddings(embeddings)
        return self.loss.compute_loss_from_embeddings(embeddings, labels) + self.weight * sum(terms.values())


def matryoshka_dims(width: int, wanted: bool | Sequence[int]) -> list[int]:
    """The widths that are trained, largest first: 384 gives 384, 192, 96, 48."""
    if wanted is False:
        return [width]
    if wanted is True:
        dims = [width]
        while dims[-1] % 2 == 0 and dims[-1] // 2 >= SMALLEST_DIM:
            dims.append(dims[-1] // 2)
        return dims
    if max(wanted) > width:
        raise InputError(f"matryoshka: {max(wanted)} is above the {width} dimensions of the model")
    return sorted({width, *wanted}, reverse=True)


class CardlessTrainer(SentenceTransformerTrainer):
    """Trains without the model card of sentence-transformers, for which it would embed texts behind a bar of its own:
    the card is written with the folder."""

    def add_model_card_callback(self, default_args_dict: dict[str, Any]) -> None:
        pass


class ShowProgress(TrainerCallback):
    """The bar or the lines that a person waits with."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.note = ""
        self.tracker: console.Tracker | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.tracker = console.Tracker(self.label, state.max_steps, "steps")
        self.tracker.advance(state.global_step, already_done=True)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        assert self.tracker is not None
        self.tracker.advance(1, self.note)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if logs and "loss" in logs:
            self.note = f"loss {float(logs['loss']):.4f}"

    def close(self) -> None:
        """However training ended: a tracker that is left open goes on telling."""
        if self.tracker is not None:
            self.tracker.close()


def arguments_of(
    recipe: EmbeddingRecipe, stage: EmbeddingStage, folder: Path, kind: str, *, bf16: bool, use_cpu: bool
) -> Any:
    prompts = {"anchor": recipe.prompts.query, "positive": recipe.prompts.document}
    for number in range(100):
        prompts[f"negative_{number + 1}"] = recipe.prompts.document
    is_prompted = kind == "pairs" and bool(recipe.prompts.query or recipe.prompts.document)
    return SentenceTransformerTrainingArguments(
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
        batch_sampler="no_duplicates" if kind == "pairs" else "batch_sampler",
        multi_dataset_batch_sampler="proportional",
        prompts=prompts if is_prompted else None,
        logging_steps=LOGGING_STEPS,
        logging_nan_inf_filter=False,
        save_steps=stage.save_steps,
        save_total_limit=1,
        report_to=[recipe.tracking] if recipe.tracking else [],
        run_name=f"{recipe.name}-{stage.name}",
        disable_tqdm=True,
    )


def train_stage(
    model: SentenceTransformer,
    recipe: EmbeddingRecipe,
    stage: EmbeddingStage,
    tables: Mapping[str, tuple[str, Dataset]],
    folder: Path,
    *,
    bf16: bool,
) -> dict[str, Any]:
    """Train the model in place, from the last checkpoint in `folder` where there is one, on sources by their names,
    of each its kind and its rows. Returns the steps taken, the rows and the losses that were logged. Raises
    `InputError` where the weights end up as no numbers."""
    kinds = {kind for kind, _ in tables.values()}
    made = {name: make_loss(model, stage, kind, recipe.matryoshka) for name, (kind, _) in tables.items()}
    rows = {name: table for name, (_, table) in tables.items()}
    only = next(iter(tables)) if len(tables) == 1 else None
    progress = ShowProgress(f"embed {stage.name}")
    kind = "pairs" if kinds == {"pairs"} else "scored"
    trainer = CardlessTrainer(
        model,
        arguments_of(recipe, stage, folder, kind, bf16=bf16, use_cpu=model.device.type == "cpu"),
        train_dataset=rows[only] if only else rows,
        loss=made[only] if only else made,
        callbacks=[progress],
    )
    trainer.remove_callback(PrinterCallback)
    whole = [path.parent for path in folder.glob("checkpoint-*/trainer_state.json")]  # the state is written last
    last = max(whole, key=lambda path: int(path.name.partition("-")[2]), default=None)
    if last is not None:
        console.err.print(f"stage {stage.name}: goes on from {last.name}", markup=False)
    try:
        trainer.train(resume_from_checkpoint=str(last) if last else None)
    finally:
        progress.close()
    trainer.accelerator.unwrap_model(model, keep_fp32_wrapper=False)  # else it would go on in bf16 where it trained so
    if not all(torch.isfinite(weight).all() for weight in model.parameters()):
        shutil.rmtree(folder)  # else the same command would go on from there
        raise InputError(f"stage {stage.name}: training diverged; lower its learning_rate ({stage.learning_rate:g})")
    told = [{"step": log["step"], "loss": log["loss"]} for log in trainer.state.log_history if "loss" in log]
    return {"steps": trainer.state.global_step, "rows": sum(map(len, rows.values())), "losses": told}
