"""Typed, frozen configuration: a YAML file plus dotted overrides in, one resolved tree and its identity out.

Inert: nothing here reads data, touches torch or decides from the machine. Unknown keys are errors. Units stand in the
names (`warmup_steps`, `batch_tokens`), and defaults are the paper's where the paper has a value (Table 1).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from biphase.errors import InputError, nearest
from biphase.files import content_hash

Count = Annotated[int, Field(ge=0)]
PositiveCount = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]


class Strict(BaseModel):
    """A frozen model in which an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Init(Strict):
    """Where the weights come from: exactly one of `preset`, `checkpoint` and `model`."""

    preset: str | None = None
    """A size of `biphase.encoder.presets.PRESETS`, from random weights."""
    architecture: dict[str, bool | int | float | str] = {}
    """Changes to the preset under transformers' names, such as `num_hidden_layers: 6`."""
    checkpoint: str | None = None
    """A run of ours, `runs/NAME-HASH@STEP`, or `runs/NAME-HASH` once it is done: steps and data order go on."""
    carry_optimizer: bool = True
    """With `checkpoint`: go on with its optimizer moments too, or start them at zero."""
    model: str | None = None
    """A Hugging Face decoder or encoder: a folder or a hub id."""
    revision: str | None = None
    """With `model`: a commit, tag or branch of the hub repository."""

    @model_validator(mode="after")
    def one_source(self) -> "Init":
        given = [key for key in ("preset", "checkpoint", "model") if getattr(self, key) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of preset, checkpoint and model (given: {', '.join(given) or 'none'})")
        return self


class Data(Strict):
    """Which tokens are trained on, how they are cut into samples, and in which order."""

    shards: str
    """A folder that `biphase prepare` wrote."""
    packing: Literal["documents", "stream"] = "documents"
    """`documents`: samples never cross documents. `stream`: the paper's original packer, which cuts a token stream at
    random lengths and lets the documents inside a sample see each other."""
    min_sample_tokens: PositiveCount = 12
    max_sample_tokens: PositiveCount = 2048
    order_seed: int = 42

    @model_validator(mode="after")
    def lengths_fit(self) -> "Data":
        if self.max_sample_tokens < 2 * self.min_sample_tokens:
            raise ValueError("max_sample_tokens must be at least twice min_sample_tokens")
        return self


class Phase(Strict):
    """One stretch of training under one objective."""

    objective: Literal["clm", "mlm", "mntp"]
    steps: PositiveCount
    mask_probability: Annotated[float, Field(gt=0, lt=1)] = 0.4
    mask_token_share: Share = 1.0
    """The share of the chosen positions that show the mask token. The paper: all of them. BERT: 0.8."""
    random_token_share: Share = 0.0
    """The share of the chosen positions that show a random token. BERT: 0.1; the rest keep their token."""
    clm_share: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """The share of a masked objective's steps that predict the next token instead, spread evenly: CLM and MLM mixed
    by batch. The phase still counts as its masked objective: its model is bidirectional."""

    @model_validator(mode="after")
    def shares_add_up(self) -> "Phase":
        if self.mask_token_share + self.random_token_share > 1 + 1e-9:
            raise ValueError("mask_token_share + random_token_share must not exceed 1")
        if self.objective == "clm" and self.clm_share:
            raise ValueError("clm_share mixes CLM into a masked objective; write objective: mlm with it")
        return self

    @property
    def label(self) -> str:
        """`clm`, `mlm40`, `mlm40+clm25`: the objective, the masked percentage, the share of CLM where it has one."""
        if self.objective == "clm":
            return "clm"
        mixed = f"+clm{100 * self.clm_share:g}" if self.clm_share else ""
        return f"{self.objective}{100 * self.mask_probability:g}{mixed}"

    @property
    def parts(self) -> tuple[tuple["Phase", float], ...]:
        """The pure phases that it mixes, each with its share of the steps."""
        if not self.clm_share:
            return ((self, 1.0),)
        masked = self.model_copy(update={"clm_share": 0.0})
        return (masked, 1 - self.clm_share), (Phase(objective="clm", steps=self.steps), self.clm_share)


class Schedule(Strict):
    """Warmup-stable-decay: linear from 0, constant, linear to 0. Either end may have 0 steps."""

    peak_lr: Annotated[float, Field(gt=0)] = 5e-4
    warmup_steps: Count = 2000
    decay_steps: Count = 2000


class Optimizer(Strict):
    """How gradients become updates; the defaults are the paper's AdamW."""

    name: Literal["adamw", "muon"] = "adamw"
    """`muon`: orthogonalised momentum for the matrices inside the blocks, AdamW for everything else."""
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-5
    weight_decay: float = 0.1
    """On every parameter, norms and embeddings included, as the paper's code does."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    muon_lr_scale: Annotated[float, Field(gt=0)] = 1.0
    """With `muon`: its rate as a multiple of AdamW's (updates are scaled to AdamW's root mean square)."""


class Validation(Strict):
    """When held-out text is measured, and how much of it."""

    every_steps: Count = 1000
    """0: only at the end of a phase."""
    tokens: PositiveCount = 1_000_000
    """At most this many tokens of the validation split, always the same ones."""


class Checkpoints(Strict):
    """When a checkpoint is written, and which ones stay."""

    every_steps: Count = 1000
    """0: only where a phase ends, before the decay begins, and after the updates in `keep`; all these stay."""
    keep_last: Count = 2
    """How many of the `every_steps` checkpoints stay (0: all)."""
    keep: tuple[PositiveCount, ...] = ()
    """Updates of this run after which the checkpoint stays, such as those where another run will branch off. Where one
    is added to a finished run, the same command trains up to it again."""


class ComputeConfig(Strict):
    """How, not what: with fixed `precision`, nothing here changes a run's identity."""

    microbatch_tokens: PositiveCount = 16_384
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """The type of the arithmetic; master weights are always fp32. `auto`: bf16 where the device has units for it, else
    fp32."""
    compile: Literal["auto", "on", "off"] = "auto"
    """torch.compile of the blocks. `auto`: on CUDA, and in long bf16 runs on a CPU with a C++ compiler."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """Under torchrun: whole weights on each process, or weights, gradients and moments sharded (FSDP2)."""
    activation_checkpointing: bool = False
    device: Literal["auto", "cpu", "cuda"] = "auto"

    @field_validator("compile", mode="before")
    @classmethod
    def read_on_and_off(cls, value: Any) -> Any:
        """YAML reads a bare on or off as a boolean."""
        return ("on" if value else "off") if isinstance(value, bool) else value


class Recipe(Strict):
    """One pretraining run: init + curriculum + schedule + data + seed."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    init: Init
    data: Data
    curriculum: Annotated[tuple[Phase, ...], Field(min_length=1)]
    schedule: Schedule = Schedule()
    batch_tokens: PositiveCount = 2_359_296
    optimizer: Optimizer = Optimizer()
    seed: int = 0
    """What the initial weights and the masks are drawn from."""
    validation: Validation = Validation()
    checkpoints: Checkpoints = Checkpoints()
    compute: ComputeConfig = ComputeConfig()
    tensorboard: bool = False
    """Write TensorBoard event files beside metrics.jsonl (needs `pip install tensorboard`)."""

    @property
    def num_steps(self) -> int:
        return sum(phase.steps for phase in self.curriculum)

    @model_validator(mode="after")
    def steps_and_batches_fit(self) -> "Recipe":
        ends = self.schedule.warmup_steps + self.schedule.decay_steps
        if ends > self.num_steps:
            raise ValueError(
                f"schedule: {self.schedule.warmup_steps} warm-up + {self.schedule.decay_steps} decay steps do not fit "
                f"into the {self.num_steps} steps of the curriculum"
            )
        if late := [step for step in self.checkpoints.keep if step > self.num_steps]:
            raise ValueError(
                f"checkpoints.keep: step {late[0]} lies behind the {self.num_steps} steps of the curriculum"
            )
        for key, tokens in (
            ("batch_tokens", self.batch_tokens),
            ("compute.microbatch_tokens", self.compute.microbatch_tokens),
        ):
            if tokens < self.data.max_sample_tokens:
                raise ValueError(f"{key} is {tokens}, less than one sample of {self.data.max_sample_tokens} tokens")
        return self

    def identity(self, data_fingerprint: str, parent: str | None, precision: str) -> str:
        """A hash of everything that decides the weights. Paths are replaced by what they hold.

        Args:
            data_fingerprint: content hash of the shard set.
            parent: content hash of the checkpoint or model behind `init`, None for a preset.
            precision: what `compute.precision` means on the device at hand, such as `torch.bfloat16`.
        """
        tree = self.model_dump(mode="json", exclude={"name", "validation", "checkpoints", "tensorboard", "compute"})
        tree["data"]["shards"] = data_fingerprint
        tree["init"]["checkpoint"] = tree["init"]["model"] = tree["init"]["revision"] = parent
        tree["precision"] = precision
        return content_hash(tree)


Config = TypeVar("Config", bound=Strict)


def load_config(kind: type[Config], path: Path, overrides: Sequence[str] = ()) -> Config:
    """The YAML file at `path`, changed by `key.sub=value` overrides, checked against `kind`.

    Raises:
        InputError: missing file, broken YAML, unknown key (with the nearest valid one), wrong type or value.
    """
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path} does not exist") from None
    except IsADirectoryError:
        raise InputError(f"{path} is a folder; give a YAML file") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict):
        raise InputError(f"{path} must be a mapping of keys to values")
    return parse_config(kind, tree, overrides, origin=str(path))


def parse_config(kind: type[Config], tree: dict[str, Any], overrides: Sequence[str] = (), *, origin: str) -> Config:
    """As `load_config`, from a tree in memory; `origin` names it in errors."""
    for override in overrides:
        tree = apply_override(tree, override)
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        # A list whose items are wrong also counts as too short, which is not what is wrong with it.
        blamed = [item["loc"] for item in error.errors() if item["type"] != "too_short"]
        found = [
            explain(kind, item)
            for item in error.errors()
            if item["type"] != "too_short" or not any(place[: len(item["loc"])] == item["loc"] for place in blamed)
        ]
        raise InputError(f"{origin}: " + "; ".join(found)) from None


def apply_override(tree: Any, override: str) -> Any:
    """`curriculum.0.steps=10` applied to a copy of `tree`; the value is read as YAML."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise InputError(f"'{override}' is not of the form key=value")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise InputError(f"the value in '{override}' is not valid YAML") from None

    def replaced(node: Any, path: list[str]) -> Any:
        if not path:
            return value
        if isinstance(node, list):
            if not path[0].isdigit() or int(path[0]) >= len(node):
                raise InputError(f"'{override}': '{path[0]}' is not one of the {len(node)} positions of a list")
            at = int(path[0])
            return [*node[:at], replaced(node[at], path[1:]), *node[at + 1 :]]
        if node is not None and not isinstance(node, dict):
            raise InputError(f"'{override}': '{path[0]}' lies inside a single value")
        return {**(node or {}), path[0]: replaced((node or {}).get(path[0]), path[1:])}

    return replaced(tree, key.split("."))


def explain(kind: type[Strict], error: Any) -> str:
    """One of pydantic's errors as `key: what is wrong, and what to write instead`."""
    location = error["loc"]
    key = ".".join(str(part) for part in location)
    if error["type"] == "extra_forbidden":
        # The keys that are valid there: those of the model at that place in the tree of `kind`.
        for part in location[:-1]:
            if isinstance(part, str):
                annotation: Any = kind.model_fields[part].annotation
                nested = [annotation, *get_args(annotation)]
                kind = next(item for item in nested if isinstance(item, type) and issubclass(item, Strict))
        return f"unknown key '{key}'{nearest(str(location[-1]), kind.model_fields)}"
    if error["type"] == "missing":
        return f"'{key}' is required"
    message = error["msg"].removeprefix("Value error, ")
    message = message[0].lower() + message[1:]
    if error["type"] == "value_error":
        return f"{key}: {message}" if key else message
    return f"'{key}' is {error['input']!r}: {message}"
