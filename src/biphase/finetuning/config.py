"""The settings of a fine-tuning, and the hash that names its cell.

The hash covers the bytes of model and data, and every setting that decides the result.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Real
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypedDict

from pydantic import BeforeValidator, Field, model_validator

from biphase.config import Beta, Count, PositiveCount, Share, Strict
from biphase.console import TrackingName
from biphase.encoder.models import Encoder, identify
from biphase.errors import InputError, refuse_unknown
from biphase.files import content_hash
from biphase.machine import has_bf16_cores, visible_gpus
from biphase.recipe import Lora
from biphase.schedule import Schedule
from biphase.tasks.families import KINDS
from biphase.tasks.sources import DataDirs, TaskSource, find_task_sources
from biphase.tasks.spec import PAPER_TASKS, Task

PROTOCOL = 4
"""A part of every cell's name. Raise it when the same configuration gives other scores, or another name.

4: a cell is named by its settled configuration (`settle_config`); `max_train_examples` counts questions;
`max_eval_examples` leaves the searched documents as they are.
"""

LATER_PROTOCOLS = dict.fromkeys(KINDS["regression"].metrics, PROTOCOL + 1)
"""The protocol of fine-tunings with one of these metrics, which changed once more: numbers are learned as standardized
labels, and the last layer computes them in fp32. Embedding models learn no numbers, and have `PROTOCOL`."""

BM25_VERSION = 3
"""A part of the names of BM25's scores, and of cells and encodings with the candidates that BM25 finds. Raise it when
BM25's words, scores or order change."""

PLACEMENT = {"device", "microbatch_tokens", "keep_texts", "tracking", "words"}
"""Settings that decide where a cell runs, how fast, and what is stored with it, but not its scores."""

FAMILY_SETTINGS = {setting for kind in KINDS.values() for setting in kind.settings}
"""Settings that only some families use."""

PAPER_SEARCH = {"judged_only": True, "max_answer_tokens": 30}
"""Defaults of the paper's tasks, and the values of these settings in tasks that do not use them."""

DEFAULT_MAX_LENGTH = 2028


def list_weights(value: Any) -> Any:
    """Turn a mapping of classes to weights, or pairs of both, into sorted pairs, which can be hashed."""
    if value is None or (isinstance(value, str) and value == "balanced"):
        return value
    pairs = [*value.items()] if isinstance(value, dict) else value
    are_pairs = isinstance(pairs, list | tuple) and all(
        isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs
    )
    weights = [weight for _, weight in pairs] if are_pairs else []
    if not weights or not all(
        isinstance(weight, Real) and type(weight) is not bool and float(weight) > 0 for weight in weights
    ):
        raise ValueError("give `balanced`, or a mapping of classes to weights above 0")
    return sorted((str(name), float(weight)) for name, weight in pairs)


ClassWeights = Annotated[Literal["balanced"] | tuple[tuple[str, float], ...] | None, BeforeValidator(list_weights)]


class FinetuneConfig(Strict):
    """The settings of a fine-tuning. Defaults are the paper's values where it states any."""

    later: ClassVar[frozenset[str]] = frozenset(
        {"frozen", "shots", "keep_texts", "ranking", "head", "class_weights", "label_smoothing", "lora"}
        | {"load_best_model_at_end", "early_stopping_patience", "tracking", "words"}
    )

    learning_rate: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 5e-5
    """The rate at its peak, after warm-up. Then it falls to 0 along a straight line."""
    seed: Count = 0
    """The seed of the order of examples, of the head's weights, and of dropout."""
    batch_size: PositiveCount = 32
    """The examples of an update; in retrieval, pairs of a query and a relevant document."""
    max_steps: PositiveCount = 1000
    """The most updates."""
    epochs: PositiveCount = 1
    """The most epochs. Training ends after `max_steps` or this many epochs, whichever comes first. With `shots`, 1 sets
    no limit. For a task of your own, `finetune` chooses both if you set neither; if you set one, it alone decides."""
    warmup_ratio: Share = 0.1
    """The share of the updates in which the rate rises from 0."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """AdamW's decay rates of the mean of the gradients and of their squares."""
    eps: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e-5
    """AdamW's epsilon. It is large for gradients of small networks, which learn more with 1e-8."""
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.1
    """The weight decay of matrices, embeddings included. Norms and biases have none."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """The norm to which longer gradients are cut."""
    class_weights: ClassWeights = None
    """Classification of texts and words: the weight of each class in the loss. Give a mapping, in which missing classes
    weigh 1, or `balanced`, which weighs a class by n / (k · n_c): n training examples, k classes, n_c examples of the
    class. Torch calls it `weight`. If texts have several classes, torch calls it `pos_weight`, and `balanced` divides
    the number of examples without the class by the number with it."""
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Classification into one class: the share of each label that is spread over all classes, as in torch."""
    load_best_model_at_end: bool = False
    """Whether to end with the weights that score best on validation, the earliest of equal ones. Training then scores
    validation after each epoch, after each quarter of the steps if there are fewer than four epochs, and with `shots`
    but no `epochs` at most 20 times. The paper keeps the last weights."""
    early_stopping_patience: PositiveCount | None = None
    """Training stops when this many checks of validation in a row, at the same steps as for `load_best_model_at_end`,
    bring no better score, but not before the end of warm-up. By default, training is not stopped early. The learning
    rate falls as for the full length."""
    max_length: Annotated[int, Field(ge=2)] = DEFAULT_MAX_LENGTH
    """The longest input in tokens, end-of-text included. A network with fewer positions lowers it. A pair that is too
    long loses tokens of its longer text."""
    weights: Literal["pretrained", "random"] = "pretrained"
    """`random` draws fresh weights with `seed`: the control that pretraining must beat."""
    max_train_examples: PositiveCount | None = None
    """The size of a fixed random subset to train on, the same for every seed, in texts, sentences, questions (with all
    windows of their contexts), or pairs of a query and a relevant document."""
    shots: PositiveCount | None = None
    """Few-shot: the number of training examples for each class of texts; in other tasks, the number of all training
    examples. `seed` draws them, the same for all models. Validation, which chooses the rate, stays whole unless
    `max_eval_examples` limits it."""
    frozen: bool = False
    """Linear probe: whether to freeze the encoder, and train one linear layer on its mean over tokens, or on each
    token. A probe needs higher rates, such as 1e-3 to 1e-1. Retrieval has no layer to train."""
    lora: Lora | None = None
    """LoRA: adapters to train in place of the encoder's weights, beside the head (`lora.r=16`). That takes less memory
    and needs higher rates. A kept model is merged."""
    max_eval_examples: PositiveCount | None = None
    """The size of the fixed random subsets of validation and of test to evaluate. In retrieval it limits the queries,
    but not the documents, whose search takes most of the time."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """The type of the arithmetic. `auto` takes bf16 if the device has units for it."""
    weight_dtype: Literal["fp32", "bf16"] = "fp32"
    """The type of weights and moments. The paper used `bf16`, in which rounding loses the updates of low rates."""
    head: Literal["paper", "transformers"] = "paper"
    """`paper` puts the paper's head on every network, so that scores compare. `transformers` trains the head of the
    network's own class in transformers, with its dropout, on padded batches. `finetune --keep` trains that head if it
    differs from the paper's."""
    head_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """The dropout of the paper's token classifier. Its other heads have none."""
    qa_head: Literal["span", "token"] = "span"
    """Question answering: the head, which predicts the start and end of a span, or classifies tokens as the paper
    does."""
    doc_stride: Count = 128
    """Question answering: the tokens that two windows of a long context share. The token head has one window."""
    max_answer_tokens: PositiveCount | None = None
    """Question answering: the longest answer to predict. None: 30 for the paper's tasks; for others the length that
    covers 99 % of the answers in train, and at least 30."""
    scale: Annotated[float, Field(gt=0)] = 20.0
    """Retrieval: the factor on cosines in the loss (1 / temperature)."""
    ranking: Literal["embeddings", "pairs"] = "embeddings"
    """Retrieval: `pairs` trains a cross-encoder, which reads a query and a document together. It learns from relevant
    documents and others that BM25 finds, and reorders BM25's 100 best."""
    judged_only: bool | None = None
    """Retrieval: whether to search only the documents that the judgements of the split name. None: yes for the paper's
    tasks, as in the paper, and no for others."""
    microbatch_tokens: PositiveCount = 65_536
    """The most tokens to compute at once; a larger batch is computed in parts. This changes memory, not the
    gradient."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes a GPU if there is one."""
    keep_texts: bool = False
    """Whether to store the inputs beside the predictions. A finished cell stays unchanged."""
    tracking: TrackingName | None = None
    """The receiver of each step's loss and of the scores: `tensorboard` or `wandb`, as in a recipe."""

    words: bool = True
    """Whether to also score words alone on the task: a linear model on TF-IDF for texts, the most frequent tag of each
    word for tags, BM25 for retrieval. It takes seconds for 10,000 texts. Question answering and multiple choice have no
    such baseline. `finetune` also scores a linear model on the encoder's vectors before training, for texts."""

    @model_validator(mode="after")
    def settings_fit(self) -> "FinetuneConfig":
        if self.shots is not None and self.max_train_examples is not None:
            raise ValueError("shots and max_train_examples both choose the training examples; give one")
        if self.lora is not None and self.frozen:
            raise ValueError("lora adapts the encoder, and frozen leaves it as it is; give one")
        return self

    def schedule(self, num_steps: int) -> Schedule:
        """Return the schedule of this many updates: warm-up, then decay. The decay equals transformers' linear
        schedule; the warm-up is one step ahead of it, because transformers starts with a rate of 0."""
        warmup_steps = math.ceil(self.warmup_ratio * num_steps)
        return Schedule(warmup_steps=warmup_steps, decay_steps=num_steps - warmup_steps)


class GridSettings(TypedDict, total=False):
    """The settings of `FinetuneConfig` that all cells of a grid share, for editors and type checkers."""

    batch_size: int
    max_steps: int
    epochs: int
    warmup_ratio: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    max_grad_norm: float
    class_weights: Literal["balanced"] | dict[str, float] | None
    label_smoothing: float
    load_best_model_at_end: bool
    early_stopping_patience: int | None
    max_length: int
    weights: Literal["pretrained", "random"]
    max_train_examples: int | None
    shots: int | None
    frozen: bool
    lora: Lora | dict[str, Any] | None
    max_eval_examples: int | None
    precision: Literal["auto", "bf16", "fp32"]
    weight_dtype: Literal["fp32", "bf16"]
    head: Literal["paper", "transformers"]
    head_dropout: float
    qa_head: Literal["span", "token"]
    doc_stride: int
    max_answer_tokens: int | None
    scale: float
    ranking: Literal["embeddings", "pairs"]
    judged_only: bool | None
    microbatch_tokens: int
    device: Literal["auto", "cpu", "cuda"]
    keep_texts: bool
    tracking: TrackingName | None
    words: bool


class FinetuneSettings(GridSettings, total=False):
    """The settings of `FinetuneConfig`, for editors and type checkers."""

    learning_rate: float
    seed: int


def settle_config(config: FinetuneConfig, task: Task, max_length: int) -> FinetuneConfig:
    """Reduce a configuration to the settings that matter for this task, so that equal requests have one name.

    Settings that the task does not use take their defaults, and `max_length` is at most the network's
    (`encoder.models.Encoder`). The settings of `PLACEMENT` and a precision of `auto` stay. Raises `InputError` for
    settings that do not fit the task.
    """
    if config.frozen and task.kind.is_search:
        raise InputError(f"frozen: {task.name} has no head to train; zero-shot:FOLDER scores embeddings as they are")
    if config.head == "transformers" and (config.frozen or config.qa_head == "token"):
        raise InputError(f"head=transformers: {'frozen' if config.frozen else 'qa_head=token'} is for the paper's head")
    templates = {name: Task.model_fields[name].default for name in ("query_template", "document_template")}
    own = [name for name, default in templates.items() if getattr(task, name) != default]
    if config.ranking == "pairs" and task.kind.is_search and own:  # what reads a cross-encoder elsewhere has none
        message = "ranking=pairs reads queries and documents as they are, as any cross-encoder does"
        raise InputError(f"{message}: leave {' and '.join(own)} out of {task.name}")
    matters = settings_that_matter(config, task)
    for name in ("class_weights", "label_smoothing"):
        if name not in matters and getattr(config, name):
            described = (task.problem_type or task.family).replace("_", " ")
            raise InputError(f"{name}: {task.name} is {described}, whose loss has none; leave it out")
    for name, _ in config.class_weights if isinstance(config.class_weights, tuple) else ():
        if name in ("False", "True") and name not in task.classes:
            reason = f"YAML reads yes and no as True and False, which {task.name} does not have"
            raise InputError(f"class_weights: {reason}; put its classes in quotes: {', '.join(task.classes)}")
        refuse_unknown(f"class_weights: {task.name} has no class", name, task.classes)
    defaults = {name: FinetuneConfig.model_fields[name].default for name in FAMILY_SETTINGS} | PAPER_SEARCH
    settled = {name: defaults[name] for name in FAMILY_SETTINGS - matters}
    unset = {name for name in PAPER_SEARCH if name in matters and getattr(config, name) is None}
    if task.name in PAPER_TASKS:
        settled |= {name: PAPER_SEARCH[name] for name in unset}
    elif "judged_only" in unset:
        settled["judged_only"] = False
    return config.model_copy(update=settled | {"max_length": min(config.max_length, max_length)})


def settings_that_matter(config: FinetuneConfig, task: Task) -> set[str]:
    """List the settings of the task's family that have an effect under this configuration."""
    matters = {*task.kind.settings}
    if task.kind.is_answering:
        matters.remove("head_dropout" if config.qa_head == "span" else "doc_stride")
    if task.kind.is_search and config.ranking == "pairs":
        matters.remove("scale")
    elif task.kind.is_search:
        matters.remove("head")
    return matters - {"head_dropout"} if config.head == "transformers" else matters


def resolve_precision(config: FinetuneConfig) -> FinetuneConfig:
    """Replace a `precision` of `auto` by its meaning on this machine. Raises `InputError` for a GPU that is missing."""
    if config.precision != "auto":
        return config
    if config.device == "cpu" or (config.device == "auto" and not visible_gpus()):
        has_units = has_bf16_cores()
    else:
        from biphase.device import choose_device, has_bf16_units

        has_units = has_bf16_units(choose_device(config.device))
    return config.model_copy(update={"precision": "bf16" if has_units else "fp32"})


@dataclass(frozen=True)
class CellPlan:
    """A cell before it runs: its model, task and data, and its name."""

    model: Encoder
    task: Task
    train: TaskSource
    evaluation: TaskSource
    config: FinetuneConfig
    """The configuration as `settle_config` returns it."""
    hash: str
    """The hash of everything that decides the scores."""

    def changed(self, **changes: Any) -> "CellPlan":
        """Plan the cell with other settings."""
        return plan_cell(self.model, self.train, self.evaluation, self.config.model_copy(update=changes))

    def folder(self, out: Path) -> Path:
        return out / f"{self.task.name}-{self.hash[:16]}"

    def is_finished(self, out: Path) -> bool:
        return (self.folder(out) / "score.json").exists()


def plan_cells(
    model: str, tasks: Sequence[str], config: FinetuneConfig, data_dirs: DataDirs, label: str | None = None
) -> list[CellPlan]:
    """Plan the cells of a model on some tasks. Scores name the model `label`, if given, instead of `model`."""
    identity, config = replace(identify(model), name=label or model), resolve_precision(config)
    return [plan_cell(identity, *find_task_sources(task, data_dirs), config) for task in tasks]


def plan_cell(model: Encoder, train: TaskSource, evaluation: TaskSource, config: FinetuneConfig) -> CellPlan:
    """Plan a cell, named by the bytes of model and data, not their paths. Reads no file; `config` comes from
    `resolve_precision`."""
    task = evaluation.task
    config = settle_config(config, task, model.max_length)
    settings = config.model_dump(mode="json", exclude=PLACEMENT)
    name = [LATER_PROTOCOLS.get(task.metric, PROTOCOL), model.hash, train.hash, evaluation.hash, task.metric, settings]
    if config.ranking == "pairs":
        name.append(BM25_VERSION)
    return CellPlan(model, task, train, evaluation, config, content_hash(name))
