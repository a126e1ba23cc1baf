"""A pretraining run as a YAML file describes it: start, data, curriculum, schedule, optimizer, computing.

Nothing here reads data, imports torch or queries the machine. Names contain units (`warmup_steps`, `batch_tokens`).
Defaults are the paper's values where it gives any (Table 1).
"""

from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, Tag, field_validator, model_validator

from biphase.config import Beta, Count, FolderName, PositiveCount, Seed, Setting, Strict
from biphase.console import TrackingName
from biphase.curriculum import NUMBER_OR_RAMP, BatchRamp, Phase
from biphase.files import content_hash
from biphase.schedule import Schedule


@dataclass(frozen=True)
class MatrixUpdate:
    """An optimizer's method for the matrices inside the blocks. AdamW updates all other weights, such as experts that
    are stacked in one tensor."""

    moments: tuple[str, ...]
    """The tensors that it keeps for a matrix, each as large as the matrix."""
    iterations: int = 0
    """The Newton–Schulz iterations of an update."""
    needs_whole_matrices: bool = False
    """Whether the method rules out FSDP, which divides matrices among devices."""


MATRIX_UPDATES = {
    "adamw": MatrixUpdate(("exp_avg", "exp_avg_sq")),
    "muon": MatrixUpdate(("momentum_buffer",), iterations=5, needs_whole_matrices=True),
}
"""The methods, by the optimizer's name. `pretraining.optimizer` implements them."""


class Lora(Strict):
    """Low-rank adapters (LoRA), which train in place of the weights, by the argument names of `peft`."""

    later: ClassVar[frozenset[str]] = frozenset({"lora_alpha", "lora_dropout", "target_modules"})

    r: PositiveCount
    """The rank of the adapters."""
    lora_alpha: Annotated[float, Field(gt=0)] | None = None
    """The scale of the adapters, whose outputs count `lora_alpha / r` times. By default, twice `r`, as in LLM2Vec."""
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """The dropout of the adapters' inputs. Its draws depend on the number of processes and on
    `compute.microbatch_tokens`, and so does the result."""
    target_modules: Annotated[
        tuple[str, ...],
        BeforeValidator(lambda names: [names] if isinstance(names, str) else names),
        Field(min_length=1),
    ] = ("all-linear",)
    """The layers to adapt: all linear layers inside the blocks, or those whose names end in one of these, such as
    `[q_proj, v_proj]`. Experts that transformers stacks in one tensor are no linear layers."""


class Init(Strict):
    """The origin of the weights: exactly one of `preset`, `checkpoint` and `model`."""

    later: ClassVar[frozenset[str]] = frozenset({"new_head", "lora"})

    preset: str | None = None
    """A network with random weights, named by its size: `1m 3m 11m 36m` count the parameters of the blocks, the paper's
    `210m 610m 1b` those of the whole network without its head."""
    architecture: dict[str, Setting] = Field(default={})
    """Changes to the preset under transformers' names, such as `num_hidden_layers: 6`."""
    checkpoint: str | None = None
    """A checkpoint of a biphase run: `runs/NAME-HASH@STEP`, or `runs/NAME-HASH` for the last one of a finished run.
    Steps and data order continue from there."""
    carry_optimizer: bool = True
    """With `checkpoint`: whether to take over the optimizer's moments too. `false` starts them at zero."""
    model: str | None = None
    """A model folder or Hub id: a decoder whose head is one matrix (Llama, Qwen, Gemma 3, Mistral, …), a EuroBERT, or
    a masked language model, which stays one (BERT, RoBERTa, XLM-R, ModernBERT, …)."""
    revision: str | None = None
    """With `model`: a commit, tag or branch of the Hub id. Without it, biphase takes the commit in the cache, else the
    newest, and writes it into the run's config.yaml. The commit is part of the run's identity."""
    new_head: bool = False
    """With `model`: give a language model head to a network that lacks one, such as an embedding model. The head is
    tied to the embeddings if the network's class ties them, else drawn from `seed`."""
    lora: Lora | None = None
    """With `model` or `checkpoint`: adapters to train in place of all weights, such as `{r: 16}`. The embeddings of the
    mask token and of other tokens that the model lacks train too. Checkpoints hold the merged model."""

    @model_validator(mode="after")
    def one_source(self) -> "Init":
        named = [key for key in ("preset", "checkpoint", "model") if getattr(self, key) is not None]
        if len(named) != 1:
            raise ValueError(f"give exactly one of preset, checkpoint and model (given: {', '.join(named) or 'none'})")
        if self.architecture and self.preset is None:
            raise ValueError(f"architecture changes a preset: leave it out, because the {named[0]} has its own")
        if self.revision is not None and self.model is None:
            raise ValueError(f"revision is that of init.model: leave it out with {named[0]}")
        if self.new_head and self.model is None:
            raise ValueError("new_head needs init.model: presets and checkpoints have a head")
        if self.lora is not None and self.preset is not None:
            raise ValueError("lora: adapters would leave the random weights of a preset as they are; leave lora out")
        if self.lora is not None and self.new_head:
            raise ValueError("lora would leave the random weights of a new_head as they are; leave one of them out")
        if self.lora is not None and self.checkpoint is not None and self.carry_optimizer:
            raise ValueError("lora adds new adapters, which have no moments yet; say carry_optimizer: false")
        return self

    @property
    def reference(self) -> str | None:
        """The `model` with its revision, as `MODEL@REVISION`; None for weights of another origin."""
        return f"{self.model}@{self.revision}" if self.revision else self.model


class MixturePart(Strict):
    """One text of a mixture."""

    path: str
    """A folder that `biphase prepare` wrote."""
    weight: Annotated[float, Field(gt=0, le=1e9)]
    """This text's relative share of each batch: biphase divides the weight by the sum of all weights."""


class Data(Strict):
    """The tokens to train on, the way to cut them into samples, and the order of the samples."""

    later: ClassVar[frozenset[str]] = frozenset({"mixture"})

    shards: str
    """A folder that `biphase prepare` wrote. With `mixture`, a run uses only its tokenizer and its validation text."""
    mixture: Annotated[tuple[MixturePart, ...], Field(min_length=2)] | None = None
    """Several texts to train on, in place of `shards`. Each batch contains tokens from all of them."""
    packing: Literal["documents", "stream"] = "documents"
    """`documents`: a sample never crosses documents. `stream`: the paper's original packer, which cuts the stream of
    tokens at random lengths, so that documents in one sample see each other."""
    min_sample_tokens: PositiveCount = 12
    """The shortest sample. Shorter documents are left out."""
    max_sample_tokens: PositiveCount = 2048
    """The longest sample. If unset, it is lowered to the number of positions of `init.model`."""
    order_seed: Seed = 42
    """The seed of the order of samples: all runs on one text with this seed see the same order."""

    @model_validator(mode="after")
    def lengths_fit(self) -> "Data":
        if self.max_sample_tokens < 2 * self.min_sample_tokens:
            raise ValueError("max_sample_tokens must be at least twice min_sample_tokens")
        return self

    @property
    def sets(self) -> list[str]:
        """The folders of the shard sets to train on."""
        return [member.path for member in self.mixture] if self.mixture else [self.shards]

    @property
    def order(self) -> dict[str, Any]:
        """All settings that decide the data order, besides the content of the texts."""
        return self.model_dump(mode="json", exclude={"shards", "mixture"})

    @property
    def shares(self) -> tuple[Fraction, ...]:
        """Each text's exact share of the tokens."""
        weights = [Fraction(str(member.weight)) for member in self.mixture or ()] or [Fraction(1)]
        return tuple(weight / sum(weights) for weight in weights)

    @property
    def placeless(self) -> dict[str, Any]:
        """All settings, with the shares of the texts in place of their folders."""
        return self.order | {"shares": [str(share) for share in self.shares]}


class Optimizer(Strict):
    """The optimizer; the defaults are the paper's AdamW."""

    later: ClassVar[frozenset[str]] = frozenset({"muon_weight_decay"})

    name: Literal["adamw", "muon"] = "adamw"
    """`muon`: orthogonalised momentum for the matrices inside the blocks, AdamW for everything else. In a mixture of
    experts, this includes the experts, because transformers stacks them in tensors of three dimensions."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """AdamW's decay rates of the first and the second moment."""
    eps: Annotated[float, Field(gt=0, le=1)] = 1e-5
    """The constant that AdamW adds to the denominator."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """The decoupled weight decay of all parameters, norms and embeddings included, as in the paper's code."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """The largest norm of the gradient; training scales a longer gradient down to it."""
    muon_lr_scale: Annotated[float, Field(gt=0)] = 1.0
    """With `muon`: the rate of its matrices as a multiple of AdamW's. Updates are scaled to AdamW's root mean
    square."""
    muon_weight_decay: Annotated[float, Field(ge=0)] | None = None
    """With `muon`: the weight decay of its matrices; by default, `weight_decay`."""

    @property
    def matrix_update(self) -> MatrixUpdate:
        return MATRIX_UPDATES[self.name]


class Validation(Strict):
    """Validation on held-out text."""

    every_steps: Count = 1000
    """The number of updates between validations. Validation also runs at each permanent checkpoint (the end of each
    phase, the beginning of the decay, `checkpoints.keep`). 0: only there."""
    tokens: PositiveCount = 1_000_000
    """The most tokens of the validation split to use, always the same ones. With `packing: stream`,
    `data.order_seed` decides which."""


class Checkpoints(Strict):
    """The checkpoints to write and to keep."""

    every_steps: Count = 1000
    """The number of updates between checkpoints. 0: only permanent ones, which are at the end of each phase, at the
    beginning of the decay, and in `keep`."""
    keep_last: Count = 2
    """The number of the latest `every_steps` checkpoints to keep (0: all)."""
    keep: tuple[PositiveCount, ...] = ()
    """Updates of this run with a permanent checkpoint, such as those where another run will branch off. To get one that
    a finished run lacks, add it and run the same command, which trains up to it again."""


class ComputeConfig(Strict):
    """Settings of the computation. Only the precision is part of a run's identity."""

    later: ClassVar[frozenset[str]] = frozenset({"silence_seconds"})

    microbatch_tokens: PositiveCount = 16_384
    """The tokens that each process computes at once. Lower it if memory is short: the result stays the same, except
    with `lora_dropout`."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """The type of the arithmetic. Master weights are always fp32. `auto`: bf16 if the device has units for it, else
    fp32."""
    compile: Literal["auto", "on", "off"] = "auto"
    """torch.compile for the blocks and the loss. `auto`: on CUDA, and in bf16 runs of minutes on a CPU, wherever there
    is a compiler."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """With several processes: `ddp` keeps all weights in each; `fsdp` divides weights, gradients and moments among them
    (FSDP2)."""
    activation_checkpointing: bool = False
    """Whether to recompute each block in the backward pass, which takes less memory and more time."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """The device to train on. `auto`: a GPU if there is one."""
    silence_seconds: PositiveCount | None = None
    """With several processes: the seconds without a sign of life after which a process counts as stopped or cut off,
    and the others end and name it. By default, 60."""

    @field_validator("compile", mode="before")
    @classmethod
    def read_on_and_off(cls, value: Any) -> Any:
        """Restore `on` and `off`, which YAML reads as booleans."""
        return ("on" if value else "off") if isinstance(value, bool) else value

    def list_changes(self, fitted: "ComputeConfig") -> list[str]:
        """List the settings in which another one differs from this one, as `compute.KEY=VALUE` of the other."""
        changes = [(key, value) for key, value in fitted if value != getattr(self, key)]
        return [f"compute.{key}={str(value).lower()}" for key, value in changes]


class Recipe(Strict):
    """One pretraining run."""

    name: FolderName
    """The first part of the run's folder name. A hash of everything that decides its weights follows."""
    init: Init
    data: Data
    curriculum: Annotated[tuple[Phase, ...], Field(min_length=1)]
    """The phases of the training, in order."""
    schedule: Schedule = Schedule()
    batch_tokens: Annotated[
        Annotated[PositiveCount, Tag("number")] | Annotated[BatchRamp, Tag("ramp")], NUMBER_OR_RAMP
    ] = 2_359_296
    """The tokens per update, or `{from: 8192, to: 65536, steps: 1000}` for a number that grows over the first
    updates."""
    optimizer: Optimizer = Optimizer()
    seed: Seed = 0
    """The seed of the initial weights and of the masks."""
    validation: Validation = Validation()
    checkpoints: Checkpoints = Checkpoints()
    compute: ComputeConfig = ComputeConfig()
    tracking: TrackingName | None = None
    """`tensorboard` writes event files beside metrics.jsonl. `wandb` sends records to Weights & Biases, or keeps them
    on this machine with WANDB_MODE=offline."""

    @property
    def needs_whole_matrices(self) -> bool:
        """Whether FSDP, which divides matrices among devices, is ruled out."""
        return self.optimizer.matrix_update.needs_whole_matrices or self.init.lora is not None

    @property
    def num_steps(self) -> int:
        return sum(phase.steps for phase in self.curriculum)

    @property
    def kept_steps(self) -> set[int]:
        """The updates with a permanent checkpoint: the end of each phase, the beginning of the decay, and `keep`."""
        ends = accumulate(phase.steps for phase in self.curriculum)
        return {*ends, self.decay_start, *self.checkpoints.keep} - {0}

    @property
    def decay_start(self) -> int:
        """The number of updates before the decay. Up to there, other runs can branch at the full rate."""
        return self.num_steps - self.schedule.decay_steps

    def tokens_before(self, step: int) -> int:
        """Count the tokens of all updates before `step`, parents included."""
        batch = self.batch_tokens
        return batch.tokens_before(step) if isinstance(batch, BatchRamp) else batch * step

    @property
    def batch_label(self) -> str:
        """`8,192`, or `8,192 to 65,536`."""
        batch = self.batch_tokens
        return f"{batch.start:,} to {batch.to:,}" if isinstance(batch, BatchRamp) else f"{batch:,}"

    @model_validator(mode="after")
    def steps_and_batches_fit(self) -> "Recipe":
        warmup, decay = self.schedule.warmup_steps, self.schedule.decay_steps
        all_steps = f"the {self.num_steps} steps of the curriculum"
        if warmup + decay > self.num_steps:
            raise ValueError(f"schedule: {warmup} warm-up + {decay} decay steps do not fit into {all_steps}")
        if late := [step for step in self.checkpoints.keep if step > self.num_steps]:
            raise ValueError(f"checkpoints.keep: step {late[0]} is beyond {all_steps}")
        if self.init.lora is not None and self.compute.parallel == "fsdp":
            raise ValueError("init.lora needs whole matrices; use compute.parallel=ddp")
        smallest = self.batch_tokens
        if isinstance(smallest, BatchRamp):
            smallest = min(smallest.start, smallest.to)
        for key, tokens in (("batch_tokens", smallest), ("compute.microbatch_tokens", self.compute.microbatch_tokens)):
            if tokens < self.data.max_sample_tokens:
                raise ValueError(f"{key} is {tokens}, less than one sample of {self.data.max_sample_tokens} tokens")
        return self

    @property
    def weights_tree(self) -> dict[str, Any]:
        """All settings that decide the weights: the precision, and everything but the name, validation, checkpoints,
        tracking and other settings of the computation."""
        aside = {"name", "validation", "checkpoints", "tracking", "compute"}
        return self.model_dump(mode="json", exclude=aside) | {"precision": self.compute.precision}

    def identity(self, data_fingerprint: str, parent: str | None, precision: str) -> str:
        """Hash everything that decides the weights. Hashes of content replace paths.

        Args:
            data_fingerprint: content hash of the text, with the shares of a mixture.
            parent: content hash of the checkpoint or model behind `init`; None for a preset.
            precision: the type of the arithmetic on the device at hand, such as `torch.bfloat16`.
        """
        tree = self.weights_tree
        tree["data"] = self.data.order | {"shards": data_fingerprint}
        tree["init"]["checkpoint"] = tree["init"]["model"] = tree["init"]["revision"] = parent
        tree["precision"] = precision
        return content_hash(tree)
