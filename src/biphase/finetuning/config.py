"""The configuration of a cell: all that it does, apart from which encoder and which task, and what of that names it.

A cell's name is the hash of the bytes of model and data, and of all that decides its result.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from biphase.config import Beta, Count, PositiveCount, Share, Strict
from biphase.console import TrackingName
from biphase.encoder.models import Encoder, identify
from biphase.errors import InputError, nearest
from biphase.files import content_hash
from biphase.machine import has_bf16_cores, visible_gpus
from biphase.recipe import Schedule
from biphase.tasks.families import KINDS
from biphase.tasks.sources import DataDirs, TaskSource, find_task_sources
from biphase.tasks.spec import PAPER_TASKS, Task

PROTOCOL = 4
"""A part of every cell's name: raise it when the same configuration no longer gives the same scores, or another name.

4: the configuration is named and kept as `settle_config` gives it; `max_train_examples` counts questions; with
`max_eval_examples` retrieval searches what it searches without.
"""


PLACEMENT = {"device", "microbatch_tokens", "keep_texts", "tracking"}
"""Settings that decide where and how fast a cell runs and what is kept of it, not what comes out."""

FAMILY_SETTINGS = {setting for kind in KINDS.values() for setting in kind.settings}
"""The settings that do not matter to all families."""

PAPER_SEARCH = {"judged_only": True, "max_answer_tokens": 30}
"""What these settings are for the paper's tasks, where nobody gives them; and wherever they do not matter."""

DEFAULT_MAX_LENGTH = 2028


def list_weights(value: Any) -> Any:
    """Turn a mapping of classes to weights into pairs: configurations are hashed."""
    pairs = sorted((str(name), weight) for name, weight in value.items()) if isinstance(value, dict) else value
    weights = [pair[-1] for pair in pairs] if isinstance(pairs, list | tuple) else []
    are_weights = bool(weights) and all(type(weight) in (int, float) and weight > 0 for weight in weights)
    if pairs not in (None, "balanced") and not are_weights:
        raise ValueError("give `balanced`, or a mapping of classes to weights above 0")
    return pairs


ClassWeights = Annotated[Literal["balanced"] | tuple[tuple[str, float], ...] | None, BeforeValidator(list_weights)]


class FinetuneConfig(Strict):
    """All that a cell does, apart from which encoder and which task. Defaults are the paper's where it has a value."""

    later: ClassVar[frozenset[str]] = frozenset(
        {"frozen", "shots", "keep_texts", "ranking", "head", "class_weights", "label_smoothing"}
        | {"load_best_model_at_end", "tracking"}
    )

    learning_rate: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 5e-5
    seed: Count = 0
    """The seed of the order of examples, the head's weights and dropout."""
    batch_size: PositiveCount = 32
    max_steps: PositiveCount = 1000
    epochs: PositiveCount = 1
    """Training ends after `max_steps` or after this many epochs, whichever comes first; with `shots`, 1 is no limit."""
    warmup_ratio: Share = 0.1
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    eps: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e-5
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.1
    """Weight decay is on matrices (embeddings included); not on norms and biases."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    class_weights: ClassWeights = None
    """Classification of texts and words: what each class weighs in the loss, as torch's `weight` (`pos_weight` where
    texts have several classes): a mapping, in which a class without a weight has 1; or `balanced`: the number of
    examples trained on, divided by the number of classes and by that of the class (of several classes: those without
    the class, divided by those with it)."""
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Classification into one class: this share of each label is divided among all classes, as torch has it."""
    load_best_model_at_end: bool = False
    """Score validation after each epoch, of fewer than four after each quarter of the steps, and return to the weights
    that were best there; of equal ones the first. The paper takes the last."""
    max_length: Annotated[int, Field(ge=2)] = DEFAULT_MAX_LENGTH
    """The longest input in tokens, end-of-text included; a network made for fewer positions sets a lower limit. Of a
    pair that is too long, the longer text is cut."""
    weights: Literal["pretrained", "random"] = "pretrained"
    """`random`: the same network with fresh weights (drawn with `seed`), the control that pretraining must beat."""
    max_train_examples: PositiveCount | None = None
    """Train on a fixed random subset, the same for every seed: of texts, sentences, questions (with all windows of
    their contexts), or pairs of a query and a relevant document."""
    shots: PositiveCount | None = None
    """Few-shot: train on so many examples of each class of texts, or, of other tasks, on so many in all, drawn by
    `seed`, the same for all models. Validation, which chooses the rate, stays whole unless `max_eval_examples` says
    otherwise."""
    frozen: bool = False
    """Linear probe: the encoder stays as it is, and one linear layer is trained on its mean over tokens, or on each
    token. It needs higher rates, such as 1e-3 to 1e-1. Retrieval has no layer to train."""
    max_eval_examples: PositiveCount | None = None
    """Evaluate on a fixed random subset of validation and of test, of so many examples each. In retrieval: of so many
    queries; the documents that are searched stay the same, and with them most of the time that it takes."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """The type of the arithmetic. `auto`: bf16 where the device has units for it."""
    weight_dtype: Literal["fp32", "bf16"] = "fp32"
    """The type of weights and moments. `bf16`: as the paper did, where updates at low rates round away."""
    head: Literal["paper", "transformers"] = "paper"
    """The head on the network: the paper's, the same on all networks, whose scores compare; or that of the network's
    class in transformers, with its dropout, on padded batches. `finetune --keep` trains the second where the class has
    another head than the paper's."""
    head_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """The dropout of the paper's token classifier; its other heads have none."""
    qa_head: Literal["span", "token"] = "span"
    """Question answering by start and end of a span, or, as in the paper, by classifying tokens."""
    doc_stride: Count = 128
    """Question answering: tokens that two windows of a long context share. The token head has one window."""
    max_answer_tokens: PositiveCount | None = None
    """Question answering: the longest answer that is predicted. None: 30 for the paper's tasks, for others what 99 % of
    train's answers fit into, and at least 30."""
    scale: Annotated[float, Field(gt=0)] = 20.0
    """Retrieval: what cosines are multiplied with in the loss (1 / temperature)."""
    ranking: Literal["embeddings", "pairs"] = "embeddings"
    """Retrieval: `pairs` trains a cross-encoder, which reads a query with a document, on the right documents beside
    others that BM25 finds, and orders BM25's 100 best anew."""
    judged_only: bool | None = None
    """Retrieval: search only the documents that the split's judgements name. None: as in the paper for its tasks, else
    all documents are searched."""
    microbatch_tokens: PositiveCount = 65_536
    """A batch of more tokens than this is computed in parts, which changes memory, not the gradient."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    keep_texts: bool = False
    """Predictions that are kept beside a score carry their inputs too; a cell that is finished stays as it is."""
    tracking: TrackingName | None = None
    """Where the loss of each step and the scores are sent, as in a recipe: `tensorboard` or `wandb`."""

    @model_validator(mode="after")
    def settings_fit(self) -> "FinetuneConfig":
        if self.shots is not None and self.max_train_examples is not None:
            raise ValueError("shots and max_train_examples both say what is trained on; give one")
        return self

    def schedule(self, num_steps: int) -> Schedule:
        """Return the schedule of so many updates: warm-up, then decay. The decay equals that of transformers' linear
        schedule; the warm-up is ahead of it by one step, whose first update has rate 0."""
        warmup_steps = math.ceil(self.warmup_ratio * num_steps)
        return Schedule(warmup_steps=warmup_steps, decay_steps=num_steps - warmup_steps)


def settle_config(config: FinetuneConfig, task: Task, max_length: int) -> FinetuneConfig:
    """The configuration that decides the result of what is asked: two that ask for the same become one.

    What does not matter to the task stands at its default, and `max_length` is not above that of the network (see
    `encoder.models.Encoder`). Where a cell runs and what `auto` means there are left as they are.
    """
    if config.frozen and task.kind.is_search:
        raise InputError(f"frozen: {task.name} has no head to train; zero-shot:FOLDER scores embeddings as they are")
    if config.head == "transformers" and (config.frozen or config.qa_head == "token"):
        raise InputError(f"head=transformers: {'frozen' if config.frozen else 'qa_head=token'} is for the paper's head")
    matters = settings_that_matter(config, task)
    for name in ("class_weights", "label_smoothing"):
        if name not in matters and getattr(config, name):
            kind = (task.problem_type or task.family).replace("_", " ")
            raise InputError(f"{name}: {task.name} is {kind}, whose loss has none; leave it out")
    for name, _ in config.class_weights if isinstance(config.class_weights, tuple) else ():
        if name not in task.classes:
            raise InputError(f"class_weights: {task.name} has no class '{name}'{nearest(name, task.classes)}")
    settled: dict[str, Any] = {}
    for name in FAMILY_SETTINGS:
        if name not in matters:
            settled[name] = PAPER_SEARCH.get(name, FinetuneConfig.model_fields[name].default)
        elif name in PAPER_SEARCH and getattr(config, name) is None and task.name in PAPER_TASKS:
            settled[name] = PAPER_SEARCH[name]
    if task.kind.is_search and config.judged_only is None:
        settled.setdefault("judged_only", False)
    settled["max_length"] = min(config.max_length, max_length)
    return config.model_copy(update=settled)


def settings_that_matter(config: FinetuneConfig, task: Task) -> set[str]:
    """List the settings of the task's family that decide something, as the other settings are."""
    matters = {*task.kind.settings}
    if task.family == "question_answering":
        matters.remove("head_dropout" if config.qa_head == "span" else "doc_stride")
    if task.kind.is_search and config.ranking == "pairs":
        matters.remove("scale")
    elif task.kind.is_search:
        matters.remove("head")
    return matters - {"head_dropout"} if config.head == "transformers" else matters


def resolve_precision(config: FinetuneConfig) -> FinetuneConfig:
    """Replace a `precision` of `auto` by what it means on this machine.

    Raises `InputError` for a GPU that is asked for and not there.
    """
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
    """A cell to come says what is trained and evaluated on what, and has its name."""

    model: Encoder
    task: Task
    train: TaskSource
    evaluation: TaskSource
    config: FinetuneConfig
    """The configuration as `settle_config` gives it."""
    hash: str
    """The hash of everything that decides the result."""

    def folder(self, out: Path) -> Path:
        return out / f"{self.task.name}-{self.hash[:16]}"

    def is_finished(self, out: Path) -> bool:
        return (self.folder(out) / "score.json").exists()


def plan_cells(
    model: str, tasks: Sequence[str], config: FinetuneConfig, data_dirs: DataDirs, label: str | None = None
) -> list[CellPlan]:
    """Plan the cells of a model, whose scores call it `label` in place of `model`."""
    identity, config = replace(identify(model), name=label or model), resolve_precision(config)
    return [plan_cell(identity, *find_task_sources(task, data_dirs), config) for task in tasks]


def plan_cell(model: Encoder, train: TaskSource, evaluation: TaskSource, config: FinetuneConfig) -> CellPlan:
    """Names a cell by the bytes of model and data, not their paths, and by what decides its result.

    `config` comes from `resolve_precision`. Reads nothing.
    """
    task = evaluation.task
    config = settle_config(config, task, model.max_length)
    settings = config.model_dump(mode="json", exclude=PLACEMENT)
    name = [PROTOCOL, model.hash, train.hash, evaluation.hash, task.metric, settings]
    return CellPlan(model, task, train, evaluation, config, content_hash(name))
