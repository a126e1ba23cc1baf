"""A pretraining run as its YAML file says it: where it starts, data, curriculum, schedule, optimizer, how it computes.

Inert: nothing here reads data, touches torch or decides from the machine. Units stand in the names (`warmup_steps`,
`batch_tokens`), and defaults are the paper's where the paper has a value (Table 1).
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag, field_validator, model_validator

from biphase.config import Beta, Count, PositiveCount, Seed, Setting, Share, Strict
from biphase.console import TrackingName
from biphase.errors import refuse_unknown
from biphase.files import content_hash

MaskShare = Annotated[float, Field(gt=0, lt=1)]

SHAPE_KEYS = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
"""Transformers' names of what makes the size of a network, besides its vocabulary."""
PRESET_SIZES = {
    # The paper's three (Table 1), named by their parameters without the language model head ...
    "1b": (28, 1728, 5120, 18, 6),
    "610m": (26, 1152, 4096, 18, 6),
    "210m": (12, 768, 3072, 12, 12),
    # ... and smaller ones, named by the parameters of their blocks.
    "36m": (10, 512, 1536, 8, 8),
    "11m": (6, 384, 1024, 6, 6),
    "3m": (4, 256, 640, 4, 4),
    "1m": (4, 128, 384, 4, 4),
}
"""Layers, width, feed-forward width, heads and key-value heads."""
PRESETS = {name: dict(zip(SHAPE_KEYS, sizes, strict=True)) for name, sizes in PRESET_SIZES.items()}
"""The sizes of networks that a recipe can name, under transformers' names; the largest network first."""


def find_preset(preset: str) -> dict[str, int]:
    """Return the sizes of a preset. Raises `InputError` for an unknown one."""
    refuse_unknown("unknown preset", preset, PRESETS)
    return PRESETS[preset]


ObjectiveName = Literal["clm", "mlm", "mntp", "meap", "causal-mlm"]
Attention = Literal["causal", "bidirectional"]
Target = Literal["next", "same"]


@dataclass(frozen=True)
class Objective:
    """The facts of an objective; `pretraining.objectives.label_batch` computes it, and `style.LOOKS` has its look."""

    title: str
    words: str
    attention: Attention
    target: Target
    """Whether a position predicts the token after it, or its own."""
    masks_input: bool = True

    @property
    def is_causal(self) -> bool:
        """Whether it looks back only."""
        return self.attention == "causal"

    @property
    def is_dense(self) -> bool:
        """Whether every token is a target, but for the first of a sample; else those that are masked."""
        return self.is_causal and self.target == "next"


OBJECTIVES: dict[ObjectiveName, Objective] = {
    "clm": Objective("CLM", "the next token", "causal", "next", masks_input=False),
    "mlm": Objective("MLM", "masked tokens", "bidirectional", "same"),
    "mntp": Objective("MNTP", "masked tokens from one place before", "bidirectional", "next"),
    "meap": Objective("MEAP", "the next token beside masks", "causal", "next"),
    "causal-mlm": Objective("causal MLM", "masked tokens from those before", "causal", "same"),
}
"""The objectives, by the words for them in recipes, in the short forms of studies, and in records of runs."""


@dataclass(frozen=True)
class MatrixUpdate:
    """The facts of how an optimizer updates the matrices inside the blocks. It updates all other weights as AdamW."""

    moments: tuple[str, ...]
    """The tensors that it keeps for a matrix, each as large as that."""
    iterations: int = 0
    """How often Newton-Schulz iterates over a matrix in an update."""
    needs_whole_matrices: bool = False
    """Whether FSDP, which parts them, is refused."""


MATRIX_UPDATES = {
    "adamw": MatrixUpdate(("exp_avg", "exp_avg_sq")),
    "muon": MatrixUpdate(("momentum_buffer",), iterations=5, needs_whole_matrices=True),
}
"""By the optimizer's name; `pretraining.optimizer` computes them."""


class Init(Strict):
    """Where the weights come from: exactly one of `preset`, `checkpoint` and `model`."""

    later: ClassVar[frozenset[str]] = frozenset({"new_head"})

    preset: str | None = None
    """A size from random weights: `1m 3m 11m 36m`, by the weights of their blocks; the paper's `210m 610m 1b`."""
    architecture: dict[str, Setting] = Field(default={})
    """Changes to the preset under transformers' names, such as `num_hidden_layers: 6`."""
    checkpoint: str | None = None
    """A run of ours, `runs/NAME-HASH@STEP`, or `runs/NAME-HASH` once it is done: steps and data order go on."""
    carry_optimizer: bool = True
    """With `checkpoint`: go on with its optimizer moments too, or start them at zero."""
    model: str | None = None
    """A folder or hub id of transformers: a decoder whose head is one matrix (Llama, Qwen, Gemma 3, Mistral, …), a
    EuroBERT, or a masked language model that goes on as one (BERT, RoBERTa, XLM-R, ModernBERT, …)."""
    revision: str | None = None
    """With `model`: a commit, tag or branch of the hub id; without it the commit in the cache, else the newest. The
    commit is part of the run's identity."""
    new_head: bool = False
    """With `model`: it has no language model head, as embedding models have none, and gets a new one: tied to its
    embeddings where its class ties them, else drawn from the recipe's `seed`."""

    @model_validator(mode="after")
    def one_source(self) -> "Init":
        named = [key for key in ("preset", "checkpoint", "model") if getattr(self, key) is not None]
        if len(named) != 1:
            raise ValueError(f"give exactly one of preset, checkpoint and model (given: {', '.join(named) or 'none'})")
        if self.new_head and self.model is None:
            raise ValueError("new_head is for a model of others: a preset has a head, and so has a checkpoint")
        return self


class MixturePart(Strict):
    """One of several texts, and how much of each batch is of it."""

    path: str
    """A folder that `biphase prepare` wrote."""
    weight: Annotated[float, Field(gt=0, le=1e9)]
    """Its share of the tokens is its weight divided by the sum of all weights."""


class Data(Strict):
    """Which tokens are trained on, how they are cut into samples, and in which order."""

    later: ClassVar[frozenset[str]] = frozenset({"mixture"})

    shards: str
    """A folder that `biphase prepare` wrote. With `mixture`, its tokenizer and its validation text count."""
    mixture: Annotated[tuple[MixturePart, ...], Field(min_length=2)] | None = None
    """The texts to train on in place of `shards`, all of them in each batch."""
    packing: Literal["documents", "stream"] = "documents"
    """`documents`: samples never cross documents. `stream`: the paper's original packer, which cuts a token stream at
    random lengths and lets the documents inside a sample see each other."""
    min_sample_tokens: PositiveCount = 12
    max_sample_tokens: PositiveCount = 2048
    """Where it is not given, no more than the `init.model` has positions for."""
    order_seed: Seed = 42

    @model_validator(mode="after")
    def lengths_fit(self) -> "Data":
        if self.max_sample_tokens < 2 * self.min_sample_tokens:
            raise ValueError("max_sample_tokens must be at least twice min_sample_tokens")
        return self

    @property
    def sets(self) -> list[str]:
        """The folders of the shard sets to train on."""
        return [part.path for part in self.mixture] if self.mixture else [self.shards]

    @property
    def order(self) -> dict[str, Any]:
        """What decides the data order, besides the content of the texts: all but their places."""
        return self.model_dump(mode="json", exclude={"shards", "mixture"})

    @property
    def shares(self) -> tuple[Fraction, ...]:
        """The share of the tokens that each text has, exactly."""
        weights = [Fraction(str(part.weight)) for part in self.mixture or ()] or [Fraction(1)]
        return tuple(weight / sum(weights) for weight in weights)


class MaskRamp(Strict):
    """A masking ratio that moves within a phase, linearly in its steps."""

    model_config = ConfigDict(validate_by_name=True, serialize_by_alias=True)

    start: Annotated[MaskShare, Field(alias="from")]
    to: MaskShare


class BatchRamp(Strict):
    """A batch that grows linearly over so many updates and keeps its last size from there on.

    Updates count over all parents, as checkpoints do: a branch goes on where its trunk was.
    """

    model_config = ConfigDict(validate_by_name=True, serialize_by_alias=True)

    start: Annotated[PositiveCount, Field(alias="from")]
    to: PositiveCount
    steps: PositiveCount

    def tokens_before(self, step: int) -> int:
        """Count the tokens of all updates before `step` together."""
        # Update k of n has from + (to - from) · (k + ½) / n tokens. Summed up over k that is a square, rounded here in
        # whole numbers, and a batch is what lies between two of these sums: no rounding adds up.
        climbing = min(step, self.steps)
        climbed = (2 * self.steps * self.start * climbing + (self.to - self.start) * climbing**2) // (2 * self.steps)
        return climbed + (step - climbing) * self.to


NUMBER_OR_RAMP = Discriminator(lambda value: "ramp" if isinstance(value, dict | Strict) else "number")
"""Which of the two a setting that may move is, so that an error is about the one that was meant."""


class Phase(Strict):
    """One stretch of training under one objective."""

    later: ClassVar[frozenset[str]] = frozenset({"mask_passes"})

    objective: ObjectiveName
    """Or, in its place, `attention`, `target` and for masked input `mask_probability`, which say what it is:
    `{attention: causal, target: next, mask_probability: 0.15}` is `meap`."""
    attention: Attention = Field(default="bidirectional", exclude=True)
    """`causal`: a token sees itself and those before it."""
    target: Target = Field(default="same", exclude=True)
    """`next`: a position predicts the token after it. `same`: its own, which is masked."""
    steps: PositiveCount
    mask_probability: Annotated[
        Annotated[MaskShare, Tag("number")] | Annotated[MaskRamp, Tag("ramp")], NUMBER_OR_RAMP
    ] = 0.4
    """The share of the tokens to predict, or `{from: 0.4, to: 0.15}`: linear in the steps of the phase."""
    mask_token_share: Share = 1.0
    """The share of the chosen positions that show the mask token. The paper: all of them. BERT: 0.8."""
    random_token_share: Share = 0.0
    """The share of the chosen positions that show a random token. BERT: 0.1; the rest keep their token."""
    mask_passes: Annotated[PositiveCount, Field(le=100)] = 1
    """With 2, two updates in a row read the same text under masks that have no token in common, and the text of the
    second is not read: as many targets in a text as twice the ratio would choose, each seen beside more of the text."""
    clm_share: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """The share of a masked objective's steps that predict the next token instead, spread evenly: CLM and MLM mixed
    by batch. The phase still counts as its masked objective: its model is bidirectional."""

    @model_validator(mode="before")
    @classmethod
    def name_objective(cls, tree: Any) -> Any:
        """Let `attention`, `target` and the presence of `mask_probability` say the objective, or it the first two."""
        keys = ("attention", "target")
        if not isinstance(tree, dict) or not tree.keys() & {"objective", *keys}:
            return tree
        if "objective" not in tree:
            kind = {key: tree.get(key, cls.model_fields[key].default) for key in keys}
            sought = (kind | {"masks_input": "mask_probability" in tree}).items()
            names = [name for name, facts in OBJECTIVES.items() if sought <= vars(facts).items()]
            if not names:
                told = ", ".join(f"{key}: {value}" for key, value in kind.items())
                hidden = "causal with next hides from each position the token that it must predict"
                remedy = "give causal or bidirectional, next or same"
                raise ValueError(f"{told} is no objective: {remedy}; without mask_probability only {hidden}")
            return tree | {"objective": names[0]}
        for key in keys if tree["objective"] in [*OBJECTIVES] else ():
            fact = vars(OBJECTIVES[tree["objective"]])[key]
            if tree.get(key, fact) != fact:
                raise ValueError(f"objective: {tree['objective']} has {key}: {fact}; leave out objective or {key}")
            tree = tree | {key: fact}
        return tree

    @model_validator(mode="after")
    def shares_add_up(self) -> "Phase":
        if self.mask_token_share + self.random_token_share > 1 + 1e-9:
            raise ValueError("mask_token_share + random_token_share must not exceed 1")
        if self.is_causal and self.clm_share:
            raise ValueError("clm_share mixes CLM into what looks both ways; write objective: mlm with it")
        if self.mask_passes > 1 and (self.facts.is_dense or self.clm_share or self.is_ramped):
            raise ValueError("mask_passes needs a masked objective with one mask_probability and no clm_share")
        if self.mask_passes > 1 and self.mask_passes * self.mask_at(0) > 1 + 1e-9:
            raise ValueError("mask_passes times mask_probability must not exceed 1: no token is masked twice")
        return self

    @property
    def label(self) -> str:
        """`clm`, `mlm40`, `mlm40+clm25`: the objective, the masked percentage, the share of CLM where it has one."""
        if not self.masked:
            return self.objective
        mixed = f"+clm{100 * self.clm_share:g}" if self.clm_share else ""
        passes = f"x{self.mask_passes}" if self.mask_passes > 1 else ""
        return f"{self.objective}{self.masked.replace('–', '-')}{passes}{mixed}"

    @property
    def words(self) -> str:
        """`CLM`, `MLM 40 %`, `MLM 40–15 % with 25 % CLM`: the label as a person reads it."""
        passes = f" in {self.mask_passes} passes" if self.mask_passes > 1 else ""
        masked = f" {self.masked} %{passes}" if self.masked else ""
        return self.predicted.replace(self.facts.title, self.facts.title + masked, 1)

    @property
    def predicted(self) -> str:
        """What is predicted: `CLM`, `MLM`, `MLM with 25 % CLM`."""
        return self.facts.title + (f" with {100 * self.clm_share:g} % CLM" if self.clm_share else "")

    @property
    def masked(self) -> str:
        """The masked percentage, `40` or `40–15`; empty for CLM."""
        ends = (self.mask_at(0), self.mask_at(1)) if self.is_ramped else (self.mask_at(0),)
        return "" if not self.facts.masks_input else "–".join(f"{100 * share:g}" for share in ends)

    @property
    def facts(self) -> Objective:
        """Those of its objective; a mixture looks as its masked objective does."""
        return OBJECTIVES[self.objective]

    @property
    def is_causal(self) -> bool:
        """Whether it looks back only."""
        return self.facts.is_causal

    @property
    def is_ramped(self) -> bool:
        """Whether its masking ratio moves."""
        return isinstance(self.mask_probability, MaskRamp)

    def with_mask_at(self, share: float) -> "Phase":
        """Return the phase with the masking ratio that it has where this share of its steps is done."""
        return self.model_copy(update={"mask_probability": self.mask_at(share)}) if self.is_ramped else self

    def mask_at(self, share: float) -> float:
        """Return the masking ratio where this share of its steps is done."""
        ratio = self.mask_probability
        return ratio.start + (ratio.to - ratio.start) * share if isinstance(ratio, MaskRamp) else ratio

    @property
    def parts(self) -> tuple[tuple["Phase", float], ...]:
        """The pure phases that it mixes, each with its share of the steps."""
        if not self.clm_share:
            return ((self, 1.0),)
        masked = self.model_copy(update={"clm_share": 0.0})
        return (masked, 1 - self.clm_share), (Phase(objective="clm", steps=self.steps), self.clm_share)


def join_phases(phases: Iterable[Phase]) -> tuple[Phase, ...]:
    """Write a training with as few phases as it takes: neighbours alike become one."""
    joined: list[Phase] = []
    for phase in phases:
        # Settings of masking mean nothing where nothing is masked; without them, two phases of CLM are alike.
        plain = phase if phase.masked else Phase(objective=phase.objective, steps=phase.steps)
        if joined and not plain.is_ramped and joined[-1] == plain.model_copy(update={"steps": joined[-1].steps}):
            plain = plain.model_copy(update={"steps": joined.pop().steps + plain.steps})
        joined.append(plain)
    return tuple(joined)


def cut_phases(phases: tuple[Phase, ...], steps: Collection[int]) -> Iterator[tuple[int, int, Phase]]:
    """Yield (begin, end, phase) of the same training with a phase ending at each of `steps`, from its beginning on.
    Each step keeps its masking ratio.

    clm 60, mlm 100 cut at 20 and 150 → (0, 20, clm), (20, 60, clm), (60, 150, mlm), (150, 160, mlm).
    """
    begin = 0
    for phase in phases:
        end = begin + phase.steps
        ends = sorted({begin, end, *(step for step in steps if begin < step < end)})
        for first, last in pairwise(ends):
            changes: dict[str, Any] = {"steps": last - first}
            if phase.is_ramped and len(ends) > 2:
                ratios = [phase.mask_at((step - begin) / phase.steps) for step in (first, last)]
                changes["mask_probability"] = MaskRamp(start=ratios[0], to=ratios[1])
            yield first, last, phase.model_copy(update=changes)
        begin = end


def phases_between(phases: tuple[Phase, ...], first: int, last: int) -> tuple[Phase, ...]:
    """Return the part of a training between two of its steps: clm 60, mlm 100 between 20 and 150 → clm 40, mlm 90."""
    pieces = cut_phases(phases, (first, last))
    return tuple(phase for begin, end, phase in pieces if first <= begin and end <= last)


class Schedule(Strict):
    """Warmup-stable-decay: linear from 0, constant, linear to 0. Either end may have 0 steps."""

    peak_lr: Annotated[float, Field(gt=0, le=1000)] = 5e-4
    warmup_steps: Count = 2000
    decay_steps: Count = 2000

    def share_of_peak(self, step: int, num_steps: int) -> float:
        """Return the rate of update `step` (from 0) of `num_steps` as a share of the peak (Hu et al. 2024).

        Warm-up climbs in equal steps from 1 / warmup_steps to 1. Decay falls in equal steps from 1 to 1 / decay_steps:
        0 would come after the last update, so that no update is wasted on it.
        """
        assert 0 <= step < num_steps
        climbing = (step + 1) / self.warmup_steps if self.warmup_steps else 1.0
        falling = (num_steps - step) / self.decay_steps if self.decay_steps else 1.0
        return min(climbing, 1.0, falling)


class Optimizer(Strict):
    """How gradients become updates; the defaults are the paper's AdamW."""

    later: ClassVar[frozenset[str]] = frozenset({"muon_weight_decay"})

    name: Literal["adamw", "muon"] = "adamw"
    """`muon`: orthogonalised momentum for the matrices inside the blocks, AdamW for everything else."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    eps: Annotated[float, Field(gt=0, le=1)] = 1e-5
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """On every parameter, norms and embeddings included, as the paper's code does."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    muon_lr_scale: Annotated[float, Field(gt=0)] = 1.0
    """With `muon`: its rate as a multiple of AdamW's (updates are scaled to AdamW's root mean square)."""
    muon_weight_decay: Annotated[float, Field(ge=0)] | None = None
    """With `muon`: the weight decay of its matrices; `weight_decay` unless given."""

    @property
    def matrix_update(self) -> MatrixUpdate:
        return MATRIX_UPDATES[self.name]


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

    later: ClassVar[frozenset[str]] = frozenset({"silence_seconds"})

    microbatch_tokens: PositiveCount = 16_384
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """The type of the arithmetic; master weights are always fp32. `auto`: bf16 where the device has units for it, else
    fp32."""
    compile: Literal["auto", "on", "off"] = "auto"
    """torch.compile of the blocks and, on CUDA, of the loss. `auto`: on CUDA, and in long bf16 runs on a CPU, where
    there is a compiler."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """In several processes: whole weights on each, or weights, gradients and moments sharded (FSDP2)."""
    activation_checkpointing: bool = False
    device: Literal["auto", "cpu", "cuda"] = "auto"
    silence_seconds: PositiveCount | None = None
    """How long a process of several may be silent, stopped or cut off, until the others end and name it: 60 unless
    given."""

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
    batch_tokens: Annotated[
        Annotated[PositiveCount, Tag("number")] | Annotated[BatchRamp, Tag("ramp")], NUMBER_OR_RAMP
    ] = 2_359_296
    """The tokens of an update, or `{from: 8192, to: 65536, steps: 1000}`: growing over so many updates."""
    optimizer: Optimizer = Optimizer()
    seed: Seed = 0
    """What the initial weights and the masks are drawn from."""
    validation: Validation = Validation()
    checkpoints: Checkpoints = Checkpoints()
    compute: ComputeConfig = ComputeConfig()
    tracking: TrackingName | None = None
    """`tensorboard`: event files beside metrics.jsonl. `wandb`: Weights & Biases, online or (WANDB_MODE) offline."""

    @property
    def num_steps(self) -> int:
        return sum(phase.steps for phase in self.curriculum)

    @property
    def kept_steps(self) -> set[int]:
        """The updates after which a checkpoint stays: where a phase ends, before the decay begins, and those named."""
        ends = accumulate(phase.steps for phase in self.curriculum)
        return {*ends, self.decay_start, *self.checkpoints.keep} - {0}

    @property
    def decay_start(self) -> int:
        """Updates before the decay: the last checkpoint from which other runs can branch at full rate."""
        return self.num_steps - self.schedule.decay_steps

    def tokens_before(self, step: int) -> int:
        """Count the tokens of all updates before `step`, which counts over all parents."""
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
            raise ValueError(f"checkpoints.keep: step {late[0]} lies behind {all_steps}")
        smallest = self.batch_tokens
        if isinstance(smallest, BatchRamp):
            smallest = min(smallest.start, smallest.to)
        for key, tokens in (("batch_tokens", smallest), ("compute.microbatch_tokens", self.compute.microbatch_tokens)):
            if tokens < self.data.max_sample_tokens:
                raise ValueError(f"{key} is {tokens}, less than one sample of {self.data.max_sample_tokens} tokens")
        return self

    @property
    def weights_tree(self) -> dict[str, Any]:
        """What decides weights: all but its name, what is measured and kept on the way, and where it runs."""
        aside = {"name", "validation", "checkpoints", "tracking", "compute"}
        return self.model_dump(mode="json", exclude=aside) | {"precision": self.compute.precision}

    def identity(self, data_fingerprint: str, parent: str | None, precision: str) -> str:
        """Return a hash of everything that decides the weights. Paths are replaced by what they hold.

        Args:
            data_fingerprint: content hash of the text, with the shares of a mixture.
            parent: content hash of the checkpoint or model behind `init`, None for a preset.
            precision: what `compute.precision` means on the device at hand, such as `torch.bfloat16`.
        """
        tree = self.weights_tree
        tree["data"] = self.data.order | {"shards": data_fingerprint}
        tree["init"]["checkpoint"] = tree["init"]["model"] = tree["init"]["revision"] = parent
        tree["precision"] = precision
        return content_hash(tree)
