"""A stage of an embedding recipe is trained by sentence-transformers' trainer and losses.

Hard negatives for its pairs, and a teacher's embedding of every text, come from files that are made once.

Letters: N passages, A anchors, B rows of a piece, C columns, D width.
"""

import inspect
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from datasets import Dataset
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer import losses
from torch import Tensor, nn
from transformers import PrinterCallback, TrainerCallback

from biphase import console
from biphase.console import Send
from biphase.embedding import model as embedders
from biphase.embedding.model import embed_pieces, embed_to_file, width_of
from biphase.embedding.pairs import PIECE_ROWS, to_arrow
from biphase.embedding.recipe import LOSSES, EmbeddingRecipe, EmbeddingStage, HardNegatives
from biphase.errors import InputError, StoppedError, first_line
from biphase.files import MARK, make_once, reading, refuse_damaged, write_mark
from biphase.finetuning.families.retrieval import find_nearest, in_pieces
from biphase.machine import stop_signals


@lru_cache(maxsize=1)
def open_teacher(name: str, _content: str) -> SentenceTransformer:
    """Load a teacher, and keep the last one, unless its files have changed."""
    return embedders.load_embedder(name)


def load_teacher(stage: EmbeddingStage, width: int) -> SentenceTransformer | None:
    """Load the stage's teacher. Raises `InputError` where it cannot be loaded, or has another dimension than the
    student."""
    if stage.teacher is None:
        return None
    teacher = open_teacher(stage.teacher, embedders.hash_embedder(stage.teacher))
    if (dimension := width_of(teacher)) != width and not stage.projection:
        message = f"teacher {stage.teacher} has {dimension} dimensions, the model {width}"
        raise InputError(f"stage {stage.name}: {message}: say projection: true, or take another teacher")
    return teacher


def table_once(path: Path, schema: pa.Schema, pieces: Iterable[pa.Table]) -> Dataset:
    """Make rows piece by piece, once, and map them into memory from the file where they are kept."""

    def write(part: Path) -> None:
        with pa.ipc.new_stream(part, schema) as writer:
            for piece in pieces:
                writer.write_table(piece)

    make_once(path, write)
    return Dataset.from_file(str(path))


def teach_once(table: Dataset, teacher: SentenceTransformer, stage: str, path: Path) -> Dataset:
    """Add the teacher's embeddings to the texts of a table, as labels of `EmbedDistillLoss`, [C, D] for a row, kept as
    a file.

    They are made with the teacher's own prompts: anchors are queries to it, positives and negatives documents; the two
    sides of scored pairs are neither.
    """
    columns = [column for column in table.column_names if column != "score"]
    encoders: list[Any] = [teacher.encode_query] + [teacher.encode_document] * (len(columns) - 1)
    if "score" in table.column_names:
        encoders = [teacher.encode, teacher.encode]
    width = width_of(teacher)
    rows_CD = pa.list_(pa.list_(pa.float32(), width), len(columns))
    schema = pa.schema([*((column, pa.string()) for column in columns), ("label", rows_CD)])

    def teach() -> Iterator[pa.Table]:
        with console.track(f"teach {stage}", len(table), "rows") as progress:
            for texts in table.select_columns(columns).iter(embedders.PIECE_TEXTS):
                embeddings = []
                for encode, column in zip(encoders, columns, strict=True):
                    embeddings.append(embedders.encode_batch(encode, texts[column]))
                flat = pa.array(torch.stack(embeddings, dim=1).flatten().cpu().numpy())
                rows_BC = pa.FixedSizeListArray.from_arrays(flat, width)
                rows_BCD = pa.FixedSizeListArray.from_arrays(rows_BC, len(columns))
                yield pa.table([*texts.values(), rows_BCD], schema=schema)
                progress.advance(len(rows_BCD))

    return table_once(path, schema, teach())


SMALLEST_DIM = 32
"""Matryoshka's halves of the width end here."""


def loss_name(stage: EmbeddingStage, kind: str) -> str:
    """Return the recipe's name of the loss for pairs of a kind. Raises `InputError` for a loss of the other kind."""
    if stage.loss == "auto":
        return "cosent" if kind == "scored" else "mnrl" if stage.orthogonal_weight else "cached_mnrl"
    is_scored = stage.loss == "cosent"
    if stage.loss != "distill" and is_scored != (kind == "scored"):
        needed = "scored pairs" if is_scored else "pairs without scores"
        raise InputError(f"stage {stage.name}: loss {stage.loss} needs {needed}")
    return stage.loss


def make_loss(
    model: SentenceTransformer, stage: EmbeddingStage, kind: str, matryoshka: bool | Sequence[int]
) -> nn.Module:
    """Make the stage's loss, over several widths of the embeddings unless the recipe says otherwise.

    Raises `InputError` for a setting that the loss does not have.
    """
    name = loss_name(stage, kind)
    make = getattr(losses, LOSSES[name])
    parameters = inspect.signature(make).parameters
    settings = dict(stage.loss_settings)
    if "scale" in parameters:
        settings.setdefault("scale", 1 / stage.temperature)
    if "mini_batch_num_tokens" in parameters:
        settings.setdefault("mini_batch_num_tokens", stage.mini_batch_tokens)
    width = width_of(model)
    teacher = load_teacher(stage, width)
    if teacher is not None and stage.projection:
        settings.setdefault("projection_dim", width_of(teacher))
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


def matryoshka_dims(width: int, matryoshka: bool | Sequence[int]) -> list[int]:
    """List the widths that are trained, largest first: 384 gives 384, 192, 96, 48."""
    if matryoshka is False:
        return [width]
    if matryoshka is True:
        dims = [width]
        while dims[-1] % 2 == 0 and dims[-1] // 2 >= SMALLEST_DIM:
            dims.append(dims[-1] // 2)
        return dims
    if max(matryoshka) > width:
        raise InputError(f"matryoshka: {max(matryoshka)} is above the {width} dimensions of the model")
    return sorted({width, *matryoshka}, reverse=True)


def mine_once(table: Dataset, model: SentenceTransformer, stage: str, settings: HardNegatives, path: Path) -> Dataset:
    """Return the rows that have hard negatives, with them, kept as a file; print how many there are. Raises
    `InputError` where there are none."""
    names = ["anchor", "positive", *(f"negative_{number + 1}" for number in range(settings.number))]

    def mine() -> Iterator[pa.Table]:
        negatives = mine_negatives(table, model, settings, f"mine for {stage}", path.with_suffix(".npy"))
        if not any(len(texts) == settings.number for texts in negatives.values()):
            reach = f"{settings.number} negatives within rank {settings.last_rank} and margin {settings.margin}"
            raise InputError(f"hard_negatives: no anchor has {reach}: lower number or margin, or raise last_rank")
        for texts in table.iter(PIECE_ROWS):
            pairs = zip(texts["anchor"], texts["positive"], strict=True)
            rows = [(*pair, *negatives[pair[0]]) for pair in pairs if len(negatives[pair[0]]) == settings.number]
            yield to_arrow(rows, names)

    mined = table_once(path, pa.schema([(name, pa.string()) for name in names]), mine())
    message = f"{len(mined):,} of {len(table):,} pairs have {settings.number} hard negatives"
    console.err.print(f"stage {stage}: {message}", markup=False)
    return mined


def mine_negatives(
    table: Dataset, model: SentenceTransformer, settings: HardNegatives, label: str, path: Path
) -> dict[str, list[str]]:
    """Choose for each anchor up to `settings.number` positives of other anchors that the model ranks high, as
    `mine_hard_negatives` of sentence-transformers does.

    That function holds embeddings in memory several times over, and scores of 16,384 anchors with all passages; here
    embeddings of passages lie in the file `path` while it runs, and anchors come in pieces. A negative scores at most
    the margin below the worst positive of its anchor; ranks are counted among those that do.
    """
    anchors, positives = table.data.column("anchor").to_pylist(), table.data.column("positive").to_pylist()
    passages = list(dict.fromkeys(positives))
    numbers = {text: number for number, text in enumerate(passages)}
    right: dict[str, list[int]] = {}
    for anchor, positive in zip(anchors, positives, strict=True):
        right.setdefault(anchor, []).append(numbers[positive])
    shape_ND = len(passages), width_of(model)
    unit = {"normalize_embeddings": True}
    rows = embed_to_file(model.encode_document, passages, shape_ND, path, f"{label}: passages", **unit)
    rows_ND = torch.from_numpy(rows)
    top = settings.last_rank + max(len(set(numbers)) for numbers in right.values())
    chosen: dict[str, list[str]] = {}
    remaining = iter(right)
    for piece_AD in embed_pieces(model.encode_query, right, len(right), f"{label}: anchors", **unit):
        nearest_A = find_nearest(piece_AD, in_pieces(rows_ND), top)
        for anchor, row_D, hits in zip(islice(remaining, len(piece_AD)), piece_AD.cpu(), nearest_A, strict=True):
            relevant = set(right[anchor])
            worst = float((rows_ND[sorted(relevant)] @ row_D).min())
            most = worst - abs(worst) * settings.margin
            negatives = [number for number, score in hits if score <= most and number not in relevant]
            ranked = negatives[settings.first_rank : settings.last_rank]
            chosen[anchor] = [passages[number] for number in ranked[: settings.number]]
    path.unlink()
    return chosen


LOGGING_STEPS = 10
LOSS_WEIGHTS = "losses.safetensors"


class CardlessTrainer(SentenceTransformerTrainer):
    """Trains without the model card of sentence-transformers, for which it would embed texts behind a bar of its own:
    the card is written with the folder."""

    def add_model_card_callback(self, default_args_dict: dict[str, Any]) -> None:
        pass


Tables = Mapping[str, tuple[str, Dataset]]
"""Sources by their names: of each its kind, and its rows."""


@dataclass(eq=False)
class StageRun(TrainerCallback):
    """A stage at work, as a callback of the trainer: it shows losses and sends them to TensorBoard or W&B. A process
    that is asked to stop does so at the end of a step, with a checkpoint, and the loss up to there."""

    recipe: EmbeddingRecipe
    stage: EmbeddingStage
    model: SentenceTransformer
    """It is trained in place."""
    folder: Path
    bf16: bool
    send: Send = lambda record: None
    steps_before: int = 0
    """Steps of the stages before it: losses are counted on from there."""
    loss_weights: dict[str, nn.Parameter] = field(default_factory=dict)
    """Weights that losses learn beside the model: a map to a teacher's dimension."""
    stop_signals: list[int] = field(default_factory=list)
    note: str = ""
    tracker: console.Tracker | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.tracker = console.Tracker(f"embed {self.stage.name}", state.max_steps, "steps")
        self.tracker.advance(state.global_step, already_done=True)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        assert self.tracker is not None
        self.tracker.advance(1, self.note)
        if self.stop_signals:
            control.should_save = control.should_training_stop = True
        if self.stop_signals or state.global_step == state.max_steps:  # a short stage has a last loss, too
            control.should_log = True

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Complete a checkpoint, mark it as whole by the hash of each file, and delete the one before."""
        folder = Path(args.output_dir)
        checkpoint = folder / f"checkpoint-{state.global_step}"
        if self.loss_weights:
            save_file(dict(self.loss_weights), checkpoint / LOSS_WEIGHTS)
        write_mark(checkpoint, "checkpoint")
        for earlier in folder.glob("checkpoint-*"):
            if earlier != checkpoint:
                shutil.rmtree(earlier)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if logs and "loss" in logs:
            self.note = f"loss {float(logs['loss']):.4f}"
            step = self.steps_before + state.global_step
            record = {"kind": "train", "objective": self.stage.name, "step": step}
            names = {"loss": "loss", "learning_rate": "lr", "grad_norm": "grad_norm"}
            self.send(record | {name: logs[key] for key, name in names.items() if key in logs})


def arguments_of(run: StageRun, tables: Tables) -> SentenceTransformerTrainingArguments:
    """Make the trainer's arguments. Scored pairs have no prompts: neither side is a query."""
    recipe, stage = run.recipe, run.stage
    prompts: dict[str, Any] = {}
    for name, (kind, table) in tables.items():
        if kind == "pairs" and any(recipe.prompts.model_dump().values()):
            texts = [column for column in table.column_names if column != "label"]
            prompts[name] = dict.fromkeys(texts, recipe.prompts.document) | {"anchor": recipe.prompts.query}
    if len(tables) == 1:
        prompts = next(iter(prompts.values()), {})
    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(run.folder / "trainer"),
        num_train_epochs=stage.epochs,
        max_steps=stage.max_steps or -1,
        per_device_train_batch_size=stage.batch_size,
        learning_rate=stage.learning_rate,
        warmup_steps=stage.warmup_ratio,  # below 1 it is a share
        weight_decay=stage.weight_decay,
        seed=recipe.seed,
        bf16=run.bf16,
        use_cpu=run.model.device.type == "cpu",
        batch_sampler="no_duplicates" if any(kind == "pairs" for kind, _ in tables.values()) else "batch_sampler",
        multi_dataset_batch_sampler="proportional",
        prompts=prompts or None,
        logging_steps=LOGGING_STEPS,
        logging_nan_inf_filter=False,
        save_steps=stage.save_steps,
        report_to=[],
        disable_tqdm=True,
    )
    # The trainer would take a batch for each GPU and scatter it by rows, and packed tokens have no rows.
    arguments._n_gpu = min(arguments.n_gpu, 1)
    return arguments


def last_checkpoint(folder: Path) -> Path | None:
    """Return the newest `checkpoint-STEP` of a trainer that is whole: with its mark, which is written last; with its
    state, where an earlier version wrote it without a mark."""
    whole = [*folder.glob(f"checkpoint-*/{MARK}")] or [*folder.glob("checkpoint-*/trainer_state.json")]
    return max((path.parent for path in whole), key=lambda path: int(path.name.partition("-")[2]), default=None)


def train_stage(run: StageRun, tables: Tables) -> dict[str, Any]:
    """Train the model in place, from the last checkpoint in the stage's folder where there is one, with a loss for each
    source. Returns the steps taken, the rows and the losses that were logged, which are sent too.

    Raises:
        InputError: the checkpoint is damaged, or the weights end up as no numbers.
        StoppedError: after SIGTERM or SIGINT, once there is a checkpoint.
    """
    stage, model = run.stage, run.model
    torch.manual_seed(run.recipe.seed)  # a loss may draw weights, whatever was drawn before
    loss_modules = {name: make_loss(model, stage, kind, run.recipe.matryoshka) for name, (kind, _) in tables.items()}
    rows = {name: table for name, (_, table) in tables.items()}
    only = next(iter(tables)) if len(tables) == 1 else None
    trainer = CardlessTrainer(
        model,
        arguments_of(run, tables),
        train_dataset=rows[only] if only else rows,
        loss=loss_modules[only] if only else loss_modules,
        callbacks=[run],
    )
    trainer.remove_callback(PrinterCallback)
    of_model = {id(parameter) for parameter in model.parameters()}
    modules: Any = nn.ModuleDict(loss_modules if only is None else {"loss": loss_modules[only]})
    run.loss_weights = {name: weight for name, weight in modules.named_parameters() if id(weight) not in of_model}
    last = last_checkpoint(run.folder / "trainer")
    if last is not None:
        refuse_damaged(last, f"delete {last} and rerun")
        console.err.print(f"stage {stage.name}: goes on from {last.name}", markup=False)
        if run.loss_weights:
            with reading(last / LOSS_WEIGHTS, f"delete {last} and rerun"):
                for name, weight in load_file(last / LOSS_WEIGHTS).items():
                    run.loss_weights[name].data.copy_(weight)
    try:
        with stop_signals(run.stop_signals.append):
            trainer.train(resume_from_checkpoint=str(last) if last else None)
    finally:
        if run.tracker is not None:  # one that is left open goes on telling
            run.tracker.close()
    step, steps = trainer.state.global_step, trainer.state.max_steps
    if run.stop_signals and step < steps:
        line = f"stage {stage.name}: stopped at step {step} of {steps}; run the same command to go on"
        raise StoppedError(line, run.stop_signals[0])
    trainer.accelerator.unwrap_model(model, keep_fp32_wrapper=False)  # else it would go on in bf16 where it trained so
    if not all(torch.isfinite(weight).all() for weight in model.parameters()):
        shutil.rmtree(run.folder / "trainer")  # else the same command would go on from there
        raise InputError(f"stage {stage.name}: training diverged; lower its learning_rate ({stage.learning_rate:g})")
    logged = [{"step": log["step"], "loss": log["loss"]} for log in trainer.state.log_history if "loss" in log]
    return {"steps": step, "rows": sum(map(len, rows.values())), "losses": logged}
