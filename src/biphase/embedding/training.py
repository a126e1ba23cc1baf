"""Tables of pairs and a stage → a trained network, by sentence-transformers' trainer, losses and miner.

Letters: R rows, D width.
"""

import inspect
import random
import shutil
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from datasets import Dataset
from safetensors.torch import load_file, save_file
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer import losses
from sentence_transformers.util import dot_score, semantic_search
from torch import Tensor, nn
from transformers import PrinterCallback, TrainerCallback

from biphase import console
from biphase.embedding.folder import hash_embedder, load_embedder
from biphase.embedding.index import embed_to_file
from biphase.embedding.packed_module import ENCODE_TEXTS, width_of
from biphase.embedding.pairs import Pairs
from biphase.embedding.recipe import LOSSES, EmbeddingRecipe, EmbeddingStage, HardNegatives
from biphase.errors import InputError, StoppedError, first_line, nearest
from biphase.machine import stop_signals
from biphase.tracking import Send

SMALLEST_DIM = 32
"""Matryoshka's halves of the width end here."""
MINED_ANCHORS, MINED_PASSAGES = 1024, 65_536
"""Whose scores are in memory at a time."""
WRITTEN_ROWS = 10_000
LOGGING_STEPS = 10
LEARNT_BY_LOSSES = "losses.safetensors"


def to_table(pairs: Pairs, weight: float, seed: int) -> Dataset:
    """The rows that an epoch goes through: all of them `weight` times, a fraction drawn with the seed, in order."""
    whole, part = divmod(weight, 1)
    drawn = random.Random(seed).sample(range(len(pairs.rows)), round(part * len(pairs.rows)))
    rows = pairs.rows * int(whole) + [pairs.rows[number] for number in sorted(drawn)]
    return Dataset.from_dict({name: [row[at] for row in rows] for at, name in enumerate(pairs.columns)})


def mine_once(table: Dataset, model: SentenceTransformer, stage: str, wanted: HardNegatives, kept: Path) -> Dataset:
    """The rows that have hard negatives, with them, kept as a file; how many there are is told. Raises `InputError`
    where there are none."""
    if not kept.exists():
        part = kept.with_suffix(".part")
        negatives = mine_negatives(table, model, wanted, f"mine for {stage}", part.with_suffix(".npy"))
        if not write_mined(table, negatives, wanted.number, part):
            raise InputError(
                f"hard_negatives: no anchor has {wanted.number} negatives within rank {wanted.last_rank} and margin "
                f"{wanted.margin}: lower number or margin, or raise last_rank"
            )
        part.rename(kept)
    mined = Dataset.from_parquet(str(kept), cache_dir=str(kept.parent / "cache"))
    told = f"{len(mined):,} of {len(table):,} pairs have {wanted.number} hard negatives"
    console.err.print(f"stage {stage}: {told}", markup=False)
    return mined


def mine_negatives(
    table: Dataset, model: SentenceTransformer, wanted: HardNegatives, label: str, place: Path
) -> dict[str, list[str]]:
    """For each anchor up to `wanted.number` positives of others that the model ranks high, as sentence-transformers'
    `mine_hard_negatives` chooses them.

    That function holds embeddings in memory several times over, and scores of 16,384 anchors with all passages; here
    embeddings of passages lie in the file `place` while it runs, and anchors come in pieces. A negative scores at most
    the margin below the worst positive of its anchor; ranks are counted among those that do.
    """
    passages = list(dict.fromkeys(table["positive"]))
    numbers = {text: number for number, text in enumerate(passages)}
    right: dict[str, set[int]] = {}
    for anchor, positive in zip(table["anchor"], table["positive"], strict=True):
        right.setdefault(anchor, set()).add(numbers[positive])
    rows_ND = torch.from_numpy(embed_to_file(model.encode_document, passages, width_of(model), place, label))

    def score(rows_AD: Tensor, some_ND: Tensor) -> Tensor:
        return dot_score(rows_AD.to(model.device), some_ND.to(model.device))

    top = wanted.last_rank + max(map(len, right.values()))
    chosen: dict[str, list[str]] = {}
    anchors = list(right)
    with console.track(label, len(anchors), "anchors") as progress:
        for begin in range(0, len(anchors), MINED_ANCHORS):
            piece = anchors[begin : begin + MINED_ANCHORS]
            rows_AD = model.encode_query(
                piece, batch_size=ENCODE_TEXTS, normalize_embeddings=True, convert_to_tensor=True
            ).cpu()
            found = semantic_search(rows_AD, rows_ND, MINED_ANCHORS, MINED_PASSAGES, top, score)
            for anchor, row_D, hits in zip(piece, rows_AD, found, strict=True):
                own = right[anchor]
                worst = float((rows_ND[sorted(own)] @ row_D).min())
                most = worst - abs(worst) * wanted.margin
                left = [hit["corpus_id"] for hit in hits if hit["score"] <= most and hit["corpus_id"] not in own]
                ranked = left[wanted.first_rank : wanted.last_rank]
                chosen[anchor] = [passages[int(number)] for number in ranked[: wanted.number]]
            progress.advance(len(piece))
    place.unlink()
    return chosen


def write_mined(table: Dataset, negatives: Mapping[str, list[str]], number: int, path: Path) -> int:
    """Write the rows whose anchors have so many negatives as parquet; returns how many they are."""
    names = ["anchor", "positive", *(f"negative_{at + 1}" for at in range(number))]
    pairs = zip(table["anchor"], table["positive"], strict=True)
    rows = ((*pair, *negatives[pair[0]]) for pair in pairs if len(negatives[pair[0]]) == number)
    num_rows = 0
    with pq.ParquetWriter(path, pa.schema([(name, pa.string()) for name in names])) as writer:
        while piece := list(islice(rows, WRITTEN_ROWS)):
            writer.write_table(pa.table([list(column) for column in zip(*piece, strict=True)], names=names))
            num_rows += len(piece)
    return num_rows


def add_teacher(table: Dataset, teacher: SentenceTransformer) -> Dataset:
    """The teacher's embedding of every text, as the labels of `EmbedDistillLoss`: [columns, D] for each row.

    With its own prompts: anchors are queries to it, and what belongs to them documents; the two sides of scored pairs
    are no such things.
    """
    columns = [column for column in table.column_names if column != "score"]
    encoders: list[Any] = [teacher.encode_query] + [teacher.encode_document] * (len(columns) - 1)
    if "score" in table.column_names:
        encoders = [teacher.encode, teacher.encode]
    embeddings = [
        encode(list(table[column]), batch_size=ENCODE_TEXTS) for encode, column in zip(encoders, columns, strict=True)
    ]
    labels = [[each[row].tolist() for each in embeddings] for row in range(len(table))]
    return table.select_columns(columns).add_column("label", labels)


@lru_cache(maxsize=1)
def open_teacher(name: str, _content: str) -> SentenceTransformer:
    """One at a time, opened anew where its files have changed."""
    return load_embedder(name)


def load_teacher(stage: EmbeddingStage, width: int) -> SentenceTransformer | None:
    """The stage's teacher. Raises `InputError` where it cannot be loaded, or has another dimension than the student."""
    if stage.teacher is None:
        return None
    try:
        teacher = open_teacher(stage.teacher, hash_embedder(stage.teacher))
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
    if name == "distill" and stage.projection:
        teacher = load_teacher(stage, width)
        assert teacher is not None
        settings.setdefault("projection_dim", teacher.get_embedding_dimension())
    try:
        loss = make(model, **settings)
    except (TypeError, ValueError) as error:
        raise InputError(f"stage {stage.name}: loss_settings: {first_line(error)}") from None
    if name == "distill":
        return loss
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
            control.should_log = control.should_save = control.should_training_stop = True

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
        save_total_limit=1,
        report_to=[],
        disable_tqdm=True,
    )


def last_checkpoint(folder: Path) -> Path | None:
    """The newest `checkpoint-STEP` of a trainer that is whole: its state is written last."""
    whole = [path.parent for path in folder.glob("checkpoint-*/trainer_state.json")]
    return max(whole, key=lambda path: int(path.name.partition("-")[2]), default=None)


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
    too, counted on from the steps of the stages before. Raises `InputError` where the weights end up as no numbers."""
    kinds = {name: kind for name, (kind, _) in tables.items()}
    torch.manual_seed(recipe.seed)  # a loss may draw weights, whatever was drawn before
    made = {name: make_loss(model, stage, kind, recipe.matryoshka) for name, (kind, _) in tables.items()}
    rows = {name: table for name, (_, table) in tables.items()}
    only = next(iter(tables)) if len(tables) == 1 else None
    progress = StageCallback(stage.name, send, steps_before)
    trainer = CardlessTrainer(
        model,
        arguments_of(recipe, stage, folder, kinds, bf16=bf16, use_cpu=model.device.type == "cpu"),
        train_dataset=rows[only] if only else rows,
        loss=made[only] if only else made,
        callbacks=[progress],
    )
    trainer.remove_callback(PrinterCallback)
    last = last_checkpoint(folder)
    if last is not None:
        console.err.print(f"stage {stage.name}: goes on from {last.name}", markup=False)
    try:
        with stop_signals(progress.asked.append):
            trainer.train(resume_from_checkpoint=str(last) if last else None)
    finally:
        progress.close()
    step, steps = trainer.state.global_step, trainer.state.max_steps
    if progress.asked and step < steps:
        raise StoppedError(f"stage {stage.name}: stopped at step {step} of {steps}; run the same command to go on")
    trainer.accelerator.unwrap_model(model, keep_fp32_wrapper=False)  # else it would go on in bf16 where it trained so
    if not all(torch.isfinite(weight).all() for weight in model.parameters()):
        shutil.rmtree(folder)  # else the same command would go on from there
        raise InputError(f"stage {stage.name}: training diverged; lower its learning_rate ({stage.learning_rate:g})")
    told = [{"step": log["step"], "loss": log["loss"]} for log in trainer.state.log_history if "loss" in log]
    return {"steps": trainer.state.global_step, "rows": sum(map(len, rows.values())), "losses": told}
