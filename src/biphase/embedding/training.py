"""A recipe → an embedding model in one folder: check the sources, then train one stage after the other.

runs/NAME-HASH8/  config.yaml  clock.json  stages/NAME/{FILES}  done.json

A stage's FILES: pairs.json, trainer/, negatives-N.arrow, taught-N.arrow, model/, done.json.

A stage's model is written last, then marked done. An interrupted stage continues from its last checkpoint. The
trainer and the losses are sentence-transformers'.

A study trains each of its models by the same recipe, and stores the scores as cells.
"""

import copy
import inspect
import random
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import yaml
from datasets import Dataset, disable_progress_bars
from datasets.table import InMemoryTable
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer import losses
from torch import Tensor, nn
from transformers import PrinterCallback, TrainerCallback

from biphase import console, files
from biphase.config import parse_config
from biphase.corpus.tokenizer import misreading_class
from biphase.device import choose_device, choose_dtype, describe_machine, prefetch
from biphase.embedding import model as embedders
from biphase.embedding.evaluation import hash_judged, read_judged_set, score_arms, score_bm25, score_embedder
from biphase.embedding.pairs import Pairs, check_paths, check_stage, hash_pairs, read_pairs, tell_read
from biphase.embedding.recipe import LOSSES, EmbeddingRecipe, EmbeddingStage
from biphase.encoder.attention import explain_computing
from biphase.encoder.lora import add_adapters, has_adapters, merge_adapters
from biphase.encoder.models import find_folder, identify, unreplaced
from biphase.encoder.network import layer_cosines, load_backbone, merge_weights, refuse_equal_lengths, save_network
from biphase.errors import InputError, StoppedError, first_line, memory_told
from biphase.finetuning.config import PLACEMENT, PROTOCOL, FinetuneConfig
from biphase.finetuning.heads import refuse_replaced
from biphase.finetuning.metrics import BM25
from biphase.finetuning.scores import Score, read_score, write_cell
from biphase.machine import stop_signals
from biphase.run import keep_time
from biphase.tasks.spec import EVALUATED_SPLITS

EMBEDDER_MAX_LENGTH = 512
TRAINED = "this model"
FURTHER_MODULES = "modules.safetensors"
"""The file with the weights of the modules after the network."""
NOTED_ROWS = 1000
"""The number of first rows of a source whose hash shows whether its pairs were made in another way."""
SMALLEST_DIM = 32
"""The smallest width that Matryoshka reaches by halving."""
LOGGING_STEPS = 10
LOSS_WEIGHTS = "losses.safetensors"


def train_embedder(recipe: EmbeddingRecipe, runs: Path) -> tuple[Path, dict[str, Any]]:
    """Train the missing stages and write the folder `recipe.out`. After a stop or a kill the same call continues.

    Returns: the folder, and the facts on its card, with the `seconds` of all calls for this run.

    Raises:
        InputError: before anything trains, for a mistake in the recipe, its sources, its model or its folder.
        StoppedError: after a stop signal while a stage trains, once its state is saved.
    """
    # 1. Models, pairs and judged texts, checked before anything trains.
    out = Path(recipe.out)
    console.check_tracking(recipe.tracking)
    check_paths(recipe)
    device = choose_device(recipe.device)
    dtype = choose_dtype(recipe.precision, device)
    with ExitStack() as opened:
        for name in (recipe.model, *recipe.teachers):
            opened.enter_context(unreplaced(find_folder(name)))
        before, model = open_models(recipe)
        begun = embedders.tell_unused_parts(recipe)
        console.err.print(f"{explain_computing(dtype, device, before[0].network)} · not compiled (too short a run)")
        stage_runs = open_stages(recipe, model)
        model_hash, *teacher_hashes = map(embedders.hash_embedder, (recipe.model, *recipe.teachers))
    datasets = [read_judged_set(Path(path)) for path in recipe.evaluation]
    # 2. The folder of the run, named by everything that decides its weights.
    hashes = [*(pairs.hash for run in stage_runs for pairs in run.sources), *teacher_hashes]
    hashes.append(str(dtype))
    folder = runs / f"{recipe.name}-{recipe.identity(model_hash, hashes)[:8]}"
    for run in stage_runs:
        run.folder = folder / "stages" / run.stage.name
        files.refuse_links(run.folder.parent, run.folder, run.folder / "trainer", run.folder / "model")
    with files.locked(folder / "lock"), count_seconds(folder / "clock.json") as so_far:
        settings = recipe.model_dump(mode="json")
        files.write_text(folder / "config.yaml", yaml.safe_dump(settings, sort_keys=False))
        tracking = None if (folder / "done.json").exists() else recipe.tracking
        with console.open_tracking(tracking, folder, settings) as send:
            # 3. The stages.
            model.to(device)
            records = run_stages(stage_runs, send)
            cosines = layer_cosines(model[0], before.to(device)[0])
            if recipe.merge:
                merge_weights(model[0], before[0], recipe.merge)
            # 4. Scores, and facts for the card.
            model.eval()
            models = {TRAINED: model, begun: before}
            scores = {dataset.name: score_arms(models, dataset) for dataset in datasets}
            is_distilled = recipe.stages[-1].loss == "distill"  # distillation learns all dimensions at once
            dims = matryoshka_dims(embedders.width_of(model), recipe.matryoshka and not is_distilled)
            facts = {"stages": records, "dims": dims, "cosines": cosines, "scores": scores}
            record: dict[str, Any] = {"kind": "validation", "step": sum(stage["steps"] for stage in records)}
            for name, arms in scores.items():
                record |= {f"{name}/{metric}": score for metric, score in arms[TRAINED].items()}
            send(record)
        # 5. The model's folder, proved on some of the texts.
        texts = [text for pairs in stage_runs[0].sources for text in pairs.table["positive"][:8].to_pylist()]
        embedders.write_embedder(model, recipe, facts, [*texts, "a"], out)
        files.write_json(folder / "done.json", facts | {"out": str(out)})
        return out, facts | {"seconds": so_far()}


@contextmanager
def count_seconds(clock: Path) -> Iterator[Callable[[], float]]:
    """Add the seconds that the block takes to those in the file `clock` (`keep_time`)."""
    earlier = files.read_json_as(clock, float) if clock.exists() else 0.0
    with keep_time(partial(files.write_json, clock), earlier) as so_far:
        yield so_far


def open_models(recipe: EmbeddingRecipe) -> tuple[Any, Any]:
    """Make the model before training (random weights come from the recipe's seed), which waits on the CPU, and a copy
    to train. Raises `InputError` for a network or a tokenizer that sentence-transformers would compute or read
    differently, and token embeddings that cannot be scaled."""
    console.err.print(f"loading {recipe.model}")
    torch.manual_seed(recipe.seed)
    before: Any = embedders.make_embedder(
        recipe.model, recipe.max_length, recipe.pooling, dense=recipe.dense, weights=recipe.weights
    )
    if recipe.max_length is None:
        before.max_seq_length = min(EMBEDDER_MAX_LENGTH, before.max_seq_length)
    refuse_equal_lengths(before[0].backbone, recipe.model)
    before.prompts = recipe.prompts.model_dump()
    config = before[0].network.config
    if misread_as := misreading_class(before[0].tokenizer, config):
        message = f"sentence-transformers would take {misread_as} for its type '{config.model_type}'"
        raise InputError(f"{recipe.model}: {message}, and split texts differently: take another network or tokenizer")
    model = copy.deepcopy(before)
    if recipe.token_embedding_rms is not None:
        embedders.scale_token_embeddings(model[0], recipe.token_embedding_rms, whiten=recipe.whiten_token_embeddings)
    return before.to("cpu"), model


def open_stages(recipe: EmbeddingRecipe, model: SentenceTransformer) -> list["StageRun"]:
    """Load all teachers, which wait on the CPU, read all sources and try each loss, so that mistakes appear before
    anything trains. The stages get their folders later, because the sources decide them."""
    width = embedders.width_of(model)
    names = dict.fromkeys(stage.teacher for stage in recipe.stages)
    teachers: dict[str | None, Any] = {name: name and embedders.load_embedder(name).to("cpu") for name in names}
    for stage in recipe.stages:
        dimension = width if stage.teacher is None else embedders.width_of(teachers[stage.teacher])
        if dimension != width and not stage.projection:
            sizes = f"teacher {stage.teacher} has {dimension} dimensions, the model {width}"
            raise InputError(f"stage {stage.name}: {sizes}: say projection: true, or take another teacher")
    stage_runs: list[StageRun] = []
    for stage in recipe.stages:
        sources = [read_pairs(source, recipe.seed) for source in stage.data]
        check_stage(stage, sources)
        run = StageRun(recipe, stage, model, sources=sources, teacher=teachers[stage.teacher])
        for kind in {pairs.kind for pairs in sources}:
            make_loss(run, kind)
        for pairs in sources:
            console.err.print(f"stage {stage.name}: {pairs.name}: {pairs.description}")
        stage_runs.append(run)
    return stage_runs


def last_checkpoint(folder: Path) -> Path | None:
    """Return the newest whole `checkpoint-STEP` of a trainer: one with its mark, which is written last."""
    whole = [path.parent for path in folder.glob(f"checkpoint-*/{files.MARK}")]
    return max(whole, key=lambda path: int(path.name.partition("-")[2]), default=None)


def run_stages(stage_runs: Sequence["StageRun"], send: console.Send) -> list[dict[str, Any]]:
    """Train the stages that are not done, one after the other. Returns the record of each. Raises `StoppedError` before
    a stage after a stop signal that came in the last step of an earlier one."""
    records: list[dict[str, Any]] = []
    for run in stage_runs:
        folder, network = run.folder / "model", run.model[0]
        if (run.folder / "done.json").exists():
            files.refuse_damaged(folder, f"delete {run.folder} and rerun")
            network.backbone = load_backbone(folder).to(run.model.device)
            if run.recipe.dense:
                nn.Sequential(*list(run.model)[1:]).load_state_dict(load_file(folder / FURTHER_MODULES))
            console.err.print(f"stage {run.stage.name}: done already")
            records.append(files.read_json(run.folder / "done.json"))
        else:
            if noted := [number for earlier in stage_runs for number in earlier.stop_signals]:
                message = f"stopped before stage {run.stage.name}; run the same command to continue"
                raise StoppedError(message, noted[0])
            run.send, run.steps_before = send, sum(record["steps"] for record in records)
            records.append(run_stage(run))
    return records


def run_stage(run: "StageRun") -> dict[str, Any]:
    """Train the model in place, save it, and return the record of the stage. Raises `InputError` if the stage began on
    other pairs."""
    # 1. The pairs. When the stage began, the same text may have been cut in another way.
    stage = run.stage
    folder = run.folder
    disable_progress_bars()
    folder.mkdir(parents=True, exist_ok=True)
    noted = [[len(pairs.table), pairs.table.slice(0, NOTED_ROWS).to_pydict()] for pairs in run.sources]
    if (folder / "pairs.json").exists() and files.read_json(folder / "pairs.json") != files.content_hash(noted):
        raise InputError(f"stage {stage.name} began on pairs that were made in another way: delete {folder}")
    files.write_json(folder / "pairs.json", files.content_hash(noted))
    tables = stage_tables(run)
    # 2. Training.
    names = {loss_name(stage, kind) for kind, _ in tables.values()}
    is_cached = any(name.startswith("cached") for name in names)
    key = f"mini_batch_tokens ({stage.mini_batch_tokens:,})" if is_cached else f"batch_size ({stage.batch_size:,})"
    with memory_told(f"stage {stage.name}: lower {key}"):
        trained = train_stage(run, tables)
    # 3. Its model and its record. Files that only its training needed are deleted.
    record = {
        "name": stage.name,
        "data": [f"{Path(pairs.name).name}: {pairs.description}" for pairs in run.sources],
        "loss": ", ".join(sorted(names)),
        "last_loss": trained["losses"][-1]["loss"] if trained["losses"] else float("nan"),
        **trained,
    }
    with files.whole_folder(folder / "model") as whole:
        packed: Any = run.model[0]
        save_network(packed.network, whole)
        if run.recipe.dense:
            save_file(nn.Sequential(*list(run.model)[1:]).state_dict(), whole / FURTHER_MODULES)
        files.write_mark(whole, "model")
    files.write_json(folder / "done.json", record)
    for checkpoint in (folder / "trainer").glob("checkpoint-*"):
        shutil.rmtree(checkpoint)
    for taught in folder.glob("*taught-*.arrow*"):
        taught.unlink()
    return record


def stage_tables(run: "StageRun") -> "Tables":
    """Make the tables that a stage trains on, with hard negatives or a teacher's embeddings. These are files, made once
    for the stage."""
    stage = run.stage
    seed = run.recipe.seed
    tables: dict[str, tuple[str, Dataset]] = {}
    for index, (source, pairs) in enumerate(zip(stage.data, run.sources, strict=True)):
        # An epoch goes through all rows as often as `weight` says; the seed draws the rows of a fraction.
        whole, fraction = divmod(source.weight, 1)
        num_rows = len(pairs.table)
        is_drawn = np.zeros(num_rows, dtype=bool)
        is_drawn[random.Random(seed).sample(range(num_rows), round(fraction * num_rows))] = True
        rows = pa.concat_tables([*[pairs.table] * int(whole), pairs.table.filter(pa.array(is_drawn))])
        # `datasets` would copy all texts to make a fingerprint.
        fingerprint = files.content_hash([pairs.hash, source.weight, seed])[:16]
        table = Dataset(InMemoryTable(rows), fingerprint=fingerprint)
        if stage.hard_negatives is not None:
            path = run.folder / f"negatives-{index}.arrow"
            table = embedders.mine_once(table, run.model, stage.name, stage.hard_negatives, path)
            tell_read(stage, pairs.name, table.data.table, 1)
        if run.teacher is not None:
            # The teacher reads rows that are repeated once.
            is_repeated = whole > 0 and stage.hard_negatives is None
            once = table.select(range(num_rows)) if is_repeated else table
            teacher = run.teacher.to(choose_device(run.recipe.device))
            table = embedders.teach_once(once, teacher, stage.name, run.folder / f"taught-{index}.arrow")
            teacher.to("cpu")  # the steps need the memory of the device
            if is_repeated:
                table = table.select([*range(num_rows)] * int(whole) + np.flatnonzero(is_drawn).tolist())
        tables[f"source_{index}"] = pairs.kind, table
    return tables


# A stage in training


def loss_name(stage: EmbeddingStage, kind: str) -> str:
    """Name the loss for pairs of a kind. Raises `InputError` if the stage's loss needs the other kind."""
    if stage.loss == "auto":
        return "cosent" if kind == "scored" else "mnrl" if stage.orthogonal_weight else "cached_mnrl"
    is_scored = stage.loss == "cosent"
    if stage.loss != "distill" and is_scored != (kind == "scored"):
        needed = "scored pairs" if is_scored else "pairs without scores"
        raise InputError(f"stage {stage.name}: loss {stage.loss} needs {needed}")
    return stage.loss


def make_loss(run: "StageRun", kind: str) -> nn.Module:
    """Make the stage's loss for a kind of pairs, over several widths of embeddings unless `matryoshka` is off. Raises
    `InputError` for a setting that the loss does not have."""
    model = run.model
    stage = run.stage
    name = loss_name(stage, kind)
    make = getattr(losses, LOSSES[name])
    offered: dict[str, Any] = {"scale": 1 / stage.temperature, "mini_batch_num_tokens": stage.mini_batch_tokens}
    if run.teacher is not None and stage.projection:
        offered["projection_dim"] = embedders.width_of(run.teacher)
    parameters = inspect.signature(make).parameters
    settings = {key: value for key, value in offered.items() if key in parameters} | stage.loss_settings
    try:
        loss = make(model, **settings)
    except (TypeError, ValueError) as error:
        raise InputError(f"stage {stage.name}: loss_settings: {first_line(error)}") from None
    if name == "distill":
        return loss
    if stage.orthogonal_weight:
        loss = WithOrthogonality(model, loss, stage.orthogonal_weight)
    dims = matryoshka_dims(embedders.width_of(model), run.recipe.matryoshka)
    return losses.MatryoshkaLoss(model, loss, dims) if len(dims) > 1 else loss


class WithOrthogonality(nn.Module):
    """A loss plus the weighted global orthogonal regularizer of the same embeddings."""

    def __init__(self, model: SentenceTransformer, loss: Any, weight: float) -> None:
        super().__init__()
        self.model = model
        self.loss = loss
        self.weight = weight
        self.regularizer = losses.GlobalOrthogonalRegularizationLoss(model)

    def forward(self, sentence_features: Iterable[dict[str, Any]], labels: Tensor) -> Tensor:
        embeddings = [self.model(features)["sentence_embedding"] for features in sentence_features]
        terms = self.regularizer.compute_loss_from_embeddings(embeddings)
        return self.loss.compute_loss_from_embeddings(embeddings, labels) + self.weight * sum(terms.values())


def matryoshka_dims(width: int, matryoshka: bool | Sequence[int]) -> list[int]:
    """List the widths to train, largest first: 384, 192, 96, 48 for a width of 384."""
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


class StageTrainer(SentenceTransformerTrainer):
    """A trainer whose next batch is made in a thread while a step computes. It writes no model card, for which
    sentence-transformers would embed texts behind a progress bar."""

    epoch: Any = None
    """The iterator of the present epoch's batches."""
    batches: Any = None
    """The same batches, made ahead."""

    def _load_from_checkpoint(self, *checkpoint: Any) -> None:
        if not has_adapters(self.model):  # else `train_stage` has read all weights that train
            super()._load_from_checkpoint(*checkpoint)

    def add_model_card_callback(self, default_args_dict: dict[str, Any]) -> None:
        pass

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> Any:
        if epoch_iterator is not self.epoch:
            self.epoch, self.batches = epoch_iterator, prefetch(self.make_batches(epoch_iterator))
        return super().get_batch_samples(self.batches, num_batches, device)

    def make_batches(self, epoch_iterator: Iterator[Any]) -> Iterator[Any]:
        for batch in epoch_iterator:
            yield batch
            if self.accelerator.gradient_state.end_of_dataloader:
                return  # the loader would count the epoch itself, beside the trainer


Tables = Mapping[str, tuple[str, Dataset]]
"""The kind and the rows of each source, by its name."""


@dataclass(eq=False)
class StageRun(TrainerCallback):
    """A stage while it trains, and the trainer's callback: it shows losses and sends them to TensorBoard or W&B. After
    a stop signal, training ends after the current step, with a checkpoint and a last loss."""

    recipe: EmbeddingRecipe
    stage: EmbeddingStage
    model: SentenceTransformer
    """The model, which is trained in place."""
    folder: Path = Path()
    sources: Sequence[Pairs] = ()
    teacher: SentenceTransformer | None = None
    send: console.Send = lambda record: None
    steps_before: int = 0
    """The number of steps of the earlier stages; the steps of its losses continue from there."""
    loss_weights: dict[str, nn.Parameter] = field(default_factory=dict)
    """The weights that the losses learn beside the model: a map to a teacher's dimension. With LoRA, also those that
    the model learns."""
    stop_signals: list[int] = field(default_factory=list)
    note: str = ""
    tracker: console.Tracker | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.tracker = console.Tracker(f"embed {self.stage.name}", state.max_steps, "steps", state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        assert self.tracker is not None
        self.tracker.advance(1, self.note)
        if self.stop_signals:
            control.should_save = control.should_training_stop = True
        if self.stop_signals or state.global_step == state.max_steps:  # so that a short stage has a last loss too
            control.should_log = True

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Complete a checkpoint, mark it as whole by the hash of each file, and delete the earlier one."""
        folder = Path(args.output_dir)
        checkpoint = folder / f"checkpoint-{state.global_step}"
        if self.loss_weights:
            save_file(dict(self.loss_weights), checkpoint / LOSS_WEIGHTS)
        files.write_mark(checkpoint, "checkpoint")
        for earlier in folder.glob("checkpoint-*"):
            if earlier != checkpoint:
                shutil.rmtree(earlier)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if logs and "loss" in logs:
            self.note = f"loss {float(logs['loss']):.4f}"
            record = {"kind": "train", "objective": self.stage.name, "step": self.steps_before + state.global_step}
            names = {"loss": "loss", "learning_rate": "lr", "grad_norm": "grad_norm"}
            self.send(record | {name: logs[key] for key, name in names.items() if key in logs})


def arguments_of(run: StageRun, tables: Tables) -> SentenceTransformerTrainingArguments:
    """Make the trainer's arguments. Scored pairs have no prompts: neither side is a query."""
    recipe = run.recipe
    stage = run.stage
    device = run.model.device
    prompts: dict[str, Any] = {}
    for name, (kind, table) in tables.items():
        if kind == "pairs" and any(recipe.prompts.model_dump().values()):
            texts = [column for column in table.column_names if column != "label"]
            prompts[name] = dict.fromkeys(texts, recipe.prompts.document) | {"anchor": recipe.prompts.query}
    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(run.folder / "trainer"),
        num_train_epochs=stage.epochs,
        max_steps=stage.max_steps or -1,
        per_device_train_batch_size=stage.batch_size,
        learning_rate=stage.learning_rate,
        warmup_steps=stage.warmup_ratio,  # below 1 it is a share
        weight_decay=stage.weight_decay,
        seed=recipe.seed,
        bf16=choose_dtype(recipe.precision, device) == torch.bfloat16,
        use_cpu=device.type == "cpu",
        batch_sampler="no_duplicates" if any(kind == "pairs" for kind, _ in tables.values()) else "batch_sampler",
        multi_dataset_batch_sampler="proportional",
        prompts=prompts or None,
        logging_steps=LOGGING_STEPS,
        logging_nan_inf_filter=False,
        save_steps=stage.save_steps,
        disable_tqdm=True,
        accelerator_config={"non_blocking": device.type == "cuda"},
    )
    # The trainer would take a batch for each GPU and scatter it by rows, and packed tokens have no rows.
    arguments._n_gpu = min(arguments.n_gpu, 1)
    return arguments


def train_stage(run: StageRun, tables: Tables) -> dict[str, Any]:
    """Train the model in place, from the last checkpoint in the stage's folder if there is one, with a loss for each
    source. Returns the number of steps and rows, and the logged losses.

    Raises:
        InputError: the checkpoint is damaged, or the trained weights are not finite.
        StoppedError: after a stop signal, once there is a checkpoint.
    """
    # 1. The trainer, with the weights that losses learn.
    stage = run.stage
    packed: Any = run.model[0]
    model, network, lora = run.model, packed.network, run.recipe.lora
    if lora is not None:
        add_adapters(network, lora, run.recipe.seed)
    torch.manual_seed(run.recipe.seed)  # a loss may draw weights, which must not depend on earlier draws
    loss_modules = {name: make_loss(run, kind) for name, (kind, _) in tables.items()}
    rows = {name: table for name, (_, table) in tables.items()}
    trainer = StageTrainer(model, arguments_of(run, tables), train_dataset=rows, loss=loss_modules, callbacks=[run])
    trainer.remove_callback(PrinterCallback)
    of_model = {id(parameter) for parameter in model.parameters() if lora is None or not parameter.requires_grad}
    learnt = nn.ModuleDict(loss_modules).named_parameters()
    run.loss_weights = {name: weight for name, weight in learnt if id(weight) not in of_model}
    # 2. The checkpoint to continue from.
    last = last_checkpoint(run.folder / "trainer")
    if last is None and any((run.folder / "trainer").glob("checkpoint-*")):
        console.err.print(f"stage {stage.name}: starts over, because its checkpoint was not finished")
    if last is not None:
        files.refuse_damaged(last, f"delete {last} and rerun")
        console.err.print(f"stage {stage.name}: continues from {last.name}")
        if run.loss_weights:
            with files.reading(last / LOSS_WEIGHTS, f"delete {last} and rerun"):
                for name, weight in load_file(last / LOSS_WEIGHTS).items():
                    run.loss_weights[name].data.copy_(weight)
    # 3. Training, and its result.
    try:
        with stop_signals(run.stop_signals.append):
            trainer.train(resume_from_checkpoint=str(last) if last else None)
    finally:
        if trainer.batches is not None:
            trainer.batches.close()
        if run.tracker is not None:  # an open one would continue to print
            run.tracker.close()
    step, steps = trainer.state.global_step, trainer.state.max_steps
    if run.stop_signals and step < steps:
        message = f"stage {stage.name}: stopped at step {step} of {steps}; run the same command to continue"
        raise StoppedError(message, run.stop_signals[0])
    trainer.accelerator.unwrap_model(model, keep_fp32_wrapper=False)  # else it would still compute in bf16
    vars(model).pop("_is_accelerate_prepared", None)  # else the next stage would compute in fp32
    if not all(torch.isfinite(weight).all() for weight in model.parameters()):
        shutil.rmtree(run.folder / "trainer")  # else the same command would continue from there
        raise InputError(f"stage {stage.name}: training diverged; lower its learning_rate ({stage.learning_rate:g})")
    if lora is not None:
        merge_adapters(network)
        network.requires_grad_(True)  # the next stage has adapters of its own
    logged = [{"step": log["step"], "loss": log["loss"]} for log in trainer.state.log_history if "loss" in log]
    return {"steps": step, "rows": sum(map(len, rows.values())), "losses": logged}


# As a part of a study


def hash_trained_on(recipe: EmbeddingRecipe) -> list[str]:
    """Hash the pairs of all stages, then the teachers."""
    pair_hashes = [hash_pairs(source) for stage in recipe.stages for source in stage.data]
    return [*pair_hashes, *map(embedders.hash_embedder, recipe.teachers)]


def score_embedding(
    model: str,
    label: str,
    recipe: Mapping[str, Any],
    paths: Mapping[str, str],
    trained_on: str,
    config: FinetuneConfig,
    out: Path,
) -> list[Score]:
    """Train an embedding model in `out`, and score it on every set (`paths`: name → path), unless the scores exist. The
    recipe has the name `trained_on`, and takes its seed and weights from `config`."""
    # 1. The cells, one for each set.
    identity = identify(model)
    settings = config.model_dump(mode="json", exclude=PLACEMENT)
    hashes = {name: files.content_hash([PROTOCOL, identity.hash, trained_on, name, settings]) for name in paths}
    folders = {name: out / f"{name.replace(':', '-')}-{digest[:16]}" for name, digest in hashes.items()}
    unscored = [name for name, folder in folders.items() if not (folder / "score.json").exists()]
    if not unscored:
        return list(map(read_score, folders.values()))
    # 2. The embedding model. Its sets are read first, so that mistakes appear before it trains.
    run_name = f"{trained_on.replace(':', '-')}-{config.weights}-{config.seed}"
    own = {"name": run_name, "model": model, "out": str(out / run_name), "seed": config.seed, "weights": config.weights}
    embedding_recipe = parse_config(EmbeddingRecipe, {**recipe, **own}, origin="evaluation.embed")
    sets = {name: read_judged_set(Path(paths[name])) for name in unscored}
    trained_hashes = hash_trained_on(embedding_recipe)
    folder, facts = train_embedder(embedding_recipe, out / "runs")
    embedder = embedders.load_embedder(str(folder))
    losses = [logged["loss"] for stage in facts["stages"] for logged in stage["losses"]]
    for name, dataset in sets.items():  # 3. Its scores.
        started = time.perf_counter()
        metrics, rows = score_embedder(embedder, dataset)
        evaluated = time.perf_counter() - started
        by_words = {BM25: score_bm25(dataset)["ndcg_at_10"]} if dataset.documents else {}
        score = Score(
            protocol=PROTOCOL,
            cell=hashes[name],
            model=label,
            model_hash=identity.hash,
            task=name,
            trained_on=trained_on,
            source=paths[name],
            data_hash=files.content_hash([hash_judged(dataset), trained_hashes]),
            metric=dataset.metric,
            config=config,
            metrics=dict.fromkeys(EVALUATED_SPLITS, metrics | by_words),
            num_examples=dict.fromkeys(EVALUATED_SPLITS, len(rows)),
            num_steps=sum(stage["steps"] for stage in facts["stages"]),
            final_loss=losses[-1] if losses else None,
            seconds={"train": facts["seconds"], "evaluate": round(evaluated, 3)},
            machine=describe_machine(choose_device(embedding_recipe.device)),
        )
        refuse_replaced(identity)
        write_cell(folders[name], score, losses, {"test": rows})
    return list(map(read_score, folders.values()))
