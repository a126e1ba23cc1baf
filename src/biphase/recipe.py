"""A pretraining run as a YAML file describes it: start, data, curriculum, schedule, optimizer, computing.

Inert: nothing here reads data, imports torch or asks the machine. Units stand in the names (`warmup_steps`,
`batch_tokens`). Defaults are the paper's where it gives a value (Table 1).
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag, field_validator, model_validator

from biphase.config import Beta, Count, PositiveCount, Seed, Setting, Share, Strict
from biphase.console import TrackingName
from biphase.files import content_hash
from biphase.schedule import Schedule

MaskShare = Annotated[float, Field(gt=0, lt=1)]

ObjectiveName = Literal["clm", "mlm", "mntp", "meap", "causal-mlm"]
Attention = Literal["causal", "bidirectional"]
Target = Literal["next", "same"]


@dataclass(frozen=True)
class Objective:
    """The facts of an objective. `pretraining.objectives.label_batch` computes it; `style.LOOKS` has its look."""

    title: str
    words: str
    attention: Attention
    target: Target
    """`next`: a position predicts the token after it. `same`: its own."""
    masks_input: bool = True

    @property
    def is_causal(self) -> bool:
        """Whether a token sees only itself and those before it."""
        return self.attention == "causal"

    @property
    def is_dense(self) -> bool:
        """Whether all tokens of a sample but the first are targets; else only masked ones are."""
        return self.is_causal and self.target == "next"


OBJECTIVES: dict[ObjectiveName, Objective] = {
    "clm": Objective("CLM", "the next token", "causal", "next", masks_input=False),
    "mlm": Objective("MLM", "masked tokens", "bidirectional", "same"),
    "mntp": Objective("MNTP", "masked tokens from one place before", "bidirectional", "next"),
    "meap": Objective("MEAP", "the next token beside masks", "causal", "next"),
    "causal-mlm": Objective("causal MLM", "masked tokens from those before", "causal", "same"),
}
"""The objectives, by their names in recipes, in the short forms of studies and in the records of runs."""


@dataclass(frozen=True)
class MatrixUpdate:
    """An optimizer's way to update the matrices inside the blocks. All other weights are updated by AdamW."""

    moments: tuple[str, ...]
    """The tensors that it keeps for a matrix, each as large as the matrix."""
    iterations: int = 0
    """The Newton–Schulz iterations of an update."""
    needs_whole_matrices: bool = False
    """Whether FSDP, which divides matrices among devices, is refused."""


MATRIX_UPDATES = {
    "adamw": MatrixUpdate(("exp_avg", "exp_avg_sq")),
    "muon": MatrixUpdate(("momentum_buffer",), iterations=5, needs_whole_matrices=True),
}
"""The ways, by the optimizer's name. `pretraining.optimizer` computes them."""


class Init(Strict):
    """Where the weights come from: exactly one of `preset`, `checkpoint` and `model`."""

    later: ClassVar[frozenset[str]] = frozenset({"new_head"})

    preset: str | None = None
    """A network with random weights. Its name is its size: `1m 3m 11m 36m` by the parameters of the blocks, the paper's
    `210m 610m 1b` by those of the whole network without its head."""
    architecture: dict[str, Setting] = Field(default={})
    """Changes to the preset under transformers' names, such as `num_hidden_layers: 6`."""
    checkpoint: str | None = None
    """A checkpoint of a biphase run: `runs/NAME-HASH@STEP`, or `runs/NAME-HASH` for the last one of a finished run.
    Steps and data order go on from there."""
    carry_optimizer: bool = True
    """With `checkpoint`: also take over the optimizer's moments. `false` starts them at zero."""
    model: str | None = None
    """A model folder or hub id: a decoder whose head is one matrix (Llama, Qwen, Gemma 3, Mistral, …), a EuroBERT, or
    a masked language model, which stays one (BERT, RoBERTa, XLM-R, ModernBERT, …)."""
    revision: str | None = None
    """With `model`: a commit, tag or branch of the hub id. Without it, biphase takes the commit in the cache, else the
    newest. The commit is part of the run's identity."""
    new_head: bool = False
    """With `model`: give a language model head to a network that lacks one, such as an embedding model. The head is
    tied to the embeddings where the network's class ties them, else drawn from `seed`."""

    @model_validator(mode="after")
    def one_source(self) -> "Init":
        named = [key for key in ("preset", "checkpoint", "model") if getattr(self, key) is not None]
        if len(named) != 1:
            raise ValueError(f"give exactly one of preset, checkpoint and model (given: {', '.join(named) or 'none'})")
        if self.new_head and self.model is None:
            raise ValueError("new_head needs init.model: presets and checkpoints have a head")
        return self


class MixturePart(Strict):
    """One text of a mixture."""

    path: str
    """A folder that `biphase prepare` wrote."""
    weight: Annotated[float, Field(gt=0, le=1e9)]
    """This text's part of each batch: its weight divided by the sum of all weights."""


class Data(Strict):
    """The tokens to train on, their cutting into samples, and the order of the samples."""

    later: ClassVar[frozenset[str]] = frozenset({"mixture"})

    shards: str
    """A folder that `biphase prepare` wrote. With `mixture`, only its tokenizer and its validation text are used."""
    mixture: Annotated[tuple[MixturePart, ...], Field(min_length=2)] | None = None
    """Several texts to train on, in place of `shards`. Each batch holds tokens of all of them."""
    packing: Literal["documents", "stream"] = "documents"
    """`documents`: a sample never crosses documents. `stream`: the paper's original packer, which cuts the stream of
    tokens at random lengths, so that documents in one sample see each other."""
    min_sample_tokens: PositiveCount = 12
    """The shortest sample. Shorter documents are left out."""
    max_sample_tokens: PositiveCount = 2048
    """The longest sample. Unless it is given, it is at most the number of positions of `init.model`."""
    order_seed: Seed = 42
    """The seed of the order of samples, which is the same for all runs on one text."""

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
        """All settings that decide the data order, besides the content of the texts."""
        return self.model_dump(mode="json", exclude={"shards", "mixture"})

    @property
    def shares(self) -> tuple[Fraction, ...]:
        """Each text's exact share of the tokens."""
        weights = [Fraction(str(part.weight)) for part in self.mixture or ()] or [Fraction(1)]
        return tuple(weight / sum(weights) for weight in weights)


class MaskRamp(Strict):
    """A masking ratio that moves linearly over the steps of a phase."""

    model_config = ConfigDict(validate_by_name=True, serialize_by_alias=True)

    start: Annotated[MaskShare, Field(alias="from")]
    to: MaskShare


class BatchRamp(Strict):
    """A batch that grows linearly over `steps` updates and then keeps its size.

    Updates are counted over all parents, so that a branch goes on where its trunk was.
    """

    model_config = ConfigDict(validate_by_name=True, serialize_by_alias=True)

    start: Annotated[PositiveCount, Field(alias="from")]
    to: PositiveCount
    steps: PositiveCount

    def tokens_before(self, step: int) -> int:
        """Count the tokens of all updates before `step` together."""
        # Update k of n has from + (to - from) · (k + ½) / n tokens. The sum over k is a square, rounded to a whole
        # number; a batch is the difference of two such sums, so that no rounding adds up.
        climbing = min(step, self.steps)
        climbed = (2 * self.steps * self.start * climbing + (self.to - self.start) * climbing**2) // (2 * self.steps)
        return climbed + (step - climbing) * self.to


NUMBER_OR_RAMP = Discriminator(lambda value: "ramp" if isinstance(value, dict | Strict) else "number")
"""Tells a number from a ramp, so that an error is about the form that was meant."""


class Phase(Strict):
    """Steps of training under one objective, or under a masked one mixed with CLM."""

    later: ClassVar[frozenset[str]] = frozenset({"mask_passes"})

    objective: ObjectiveName
    """The name of the objective. In its place `attention`, `target` and, for masked input, `mask_probability` may
    describe it: `{attention: causal, target: next, mask_probability: 0.15}` is `meap`."""
    attention: Attention = Field(default="bidirectional", exclude=True)
    """`causal`: a token sees itself and those before it. `bidirectional`: it sees the whole sample."""
    target: Target = Field(default="same", exclude=True)
    """`next`: a position predicts the token after it. `same`: it predicts its own token, which is masked."""
    steps: PositiveCount
    """The number of updates."""
    mask_probability: Annotated[
        Annotated[MaskShare, Tag("number")] | Annotated[MaskRamp, Tag("ramp")], NUMBER_OR_RAMP
    ] = 0.4
    """The share of tokens to choose for masking, or `{from: 0.4, to: 0.15}` for one that moves linearly over the
    phase."""
    mask_token_share: Share = 1.0
    """The share of the chosen tokens that are replaced by the mask token. The paper: all. BERT: 0.8."""
    random_token_share: Share = 0.0
    """The share of the chosen tokens that are replaced by a random token. BERT: 0.1. The rest stay as they are."""
    mask_passes: Annotated[PositiveCount, Field(le=100)] = 1
    """The number of updates in a row that read the same text, each masking other tokens. With 2, every second batch of
    text is skipped; a text has as many targets as with twice the ratio, and each target sees more of the text."""
    clm_share: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """The share of steps that predict the next token instead, spread evenly over a masked phase: CLM and MLM mixed by
    batch. The phase still counts as its masked objective, and its model is bidirectional."""

    @model_validator(mode="before")
    @classmethod
    def name_objective(cls, tree: Any) -> Any:
        """Derive the objective from `attention`, `target` and the presence of `mask_probability`, or those two from the
        objective."""
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
            raise ValueError("clm_share mixes CLM into a bidirectional objective; write objective: mlm with it")
        if self.mask_passes > 1 and (self.facts.is_dense or self.clm_share or self.is_ramped):
            raise ValueError("mask_passes needs a masked objective with one mask_probability and no clm_share")
        if self.mask_passes > 1 and self.mask_passes * self.mask_at(0) > 1 + 1e-9:
            raise ValueError("mask_passes times mask_probability must not exceed 1: no token is masked twice")
        return self

    @property
    def label(self) -> str:
        """`clm`, `mlm40`, `mlm40+clm25`: the objective, the masked percentage, the percentage of CLM steps."""
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
        """`CLM`, `MLM`, `MLM with 25 % CLM`: the words without the masked percentage."""
        return self.facts.title + (f" with {100 * self.clm_share:g} % CLM" if self.clm_share else "")

    @property
    def masked(self) -> str:
        """The masked percentage, `40` or `40–15`; empty for CLM."""
        ends = (self.mask_at(0), self.mask_at(1)) if self.is_ramped else (self.mask_at(0),)
        return "" if not self.facts.masks_input else "–".join(f"{100 * share:g}" for share in ends)

    @property
    def facts(self) -> Objective:
        """The facts of its objective; of a mixed phase, those of the masked one."""
        return OBJECTIVES[self.objective]

    @property
    def is_causal(self) -> bool:
        """Whether a token sees only itself and those before it."""
        return self.facts.is_causal

    @property
    def is_ramped(self) -> bool:
        """Whether its masking ratio moves."""
        return isinstance(self.mask_probability, MaskRamp)

    def with_mask_at(self, progress: float) -> "Phase":
        """Return the phase with its masking ratio fixed at that of `progress`, from 0 to 1."""
        return self.model_copy(update={"mask_probability": self.mask_at(progress)}) if self.is_ramped else self

    def mask_at(self, progress: float) -> float:
        """Return the masking ratio after this part of its steps, from 0 to 1."""
        ratio = self.mask_probability
        return ratio.start + (ratio.to - ratio.start) * progress if isinstance(ratio, MaskRamp) else ratio

    @property
    def parts(self) -> tuple[tuple["Phase", float], ...]:
        """Its pure phases, each with its share of the steps: one, or two of a mixed phase."""
        if not self.clm_share:
            return ((self, 1.0),)
        masked = self.model_copy(update={"clm_share": 0.0})
        return (masked, 1 - self.clm_share), (Phase(objective="clm", steps=self.steps), self.clm_share)


def join_phases(phases: Iterable[Phase]) -> tuple[Phase, ...]:
    """Join neighbouring phases that are alike."""
    joined: list[Phase] = []
    for phase in phases:
        # Masking settings mean nothing where nothing is masked: without them, all phases of CLM are alike.
        plain = phase if phase.masked else Phase(objective=phase.objective, steps=phase.steps)
        if joined and not plain.is_ramped and joined[-1] == plain.model_copy(update={"steps": joined[-1].steps}):
            plain = plain.model_copy(update={"steps": joined.pop().steps + plain.steps})
        joined.append(plain)
    return tuple(joined)


def cut_phases(phases: tuple[Phase, ...], steps: Collection[int]) -> Iterator[tuple[int, int, Phase]]:
    """Yield (begin, end, phase) of the same training, cut so that a phase ends at each of `steps`. Each step keeps its
    masking ratio.

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
    """Return the phases of a training between two steps: clm 60, mlm 100 between 20 and 150 → clm 40, mlm 90."""
    pieces = cut_phases(phases, (first, last))
    return tuple(phase for begin, end, phase in pieces if first <= begin and end <= last)


class Optimizer(Strict):
    """The optimizer; the defaults are the paper's AdamW."""

    later: ClassVar[frozenset[str]] = frozenset({"muon_weight_decay"})

    name: Literal["adamw", "muon"] = "adamw"
    """`muon`: orthogonalised momentum for the matrices inside the blocks, AdamW for everything else."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """AdamW's decay rates of the first and the second moment."""
    eps: Annotated[float, Field(gt=0, le=1)] = 1e-5
    """AdamW's addend in the denominator."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """The decoupled weight decay of all parameters, norms and embeddings included, as in the paper's code."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """The largest norm of the gradient; a longer gradient is scaled down to it."""
    muon_lr_scale: Annotated[float, Field(gt=0)] = 1.0
    """With `muon`: the rate of its matrices as a multiple of AdamW's. Updates are scaled to AdamW's root mean
    square."""
    muon_weight_decay: Annotated[float, Field(ge=0)] | None = None
    """With `muon`: the weight decay of its matrices; `weight_decay` unless given."""

    @property
    def matrix_update(self) -> MatrixUpdate:
        return MATRIX_UPDATES[self.name]


class Validation(Strict):
    """The validation on held-out text."""

    every_steps: Count = 1000
    """Validate after each so many updates, and where checkpoints stay (the end of each phase, the beginning of the
    decay, `checkpoints.keep`). 0: only there."""
    tokens: PositiveCount = 1_000_000
    """The number of tokens of the validation split to use, at most. They are always the same ones."""


class Checkpoints(Strict):
    """The checkpoints to write and to keep."""

    every_steps: Count = 1000
    """Write a checkpoint after each so many updates. 0: only those that stay, which are at the end of each phase, at
    the beginning of the decay, and in `keep`."""
    keep_last: Count = 2
    """The number of `every_steps` checkpoints to keep, the last ones (0: all)."""
    keep: tuple[PositiveCount, ...] = ()
    """Updates of this run whose checkpoints stay, such as those where another run will branch off. To get one that a
    finished run lacks, add it and run the same command: it trains up to there again."""


class ComputeConfig(Strict):
    """The way to compute. Except for the precision, nothing here changes a run's identity."""

    later: ClassVar[frozenset[str]] = frozenset({"silence_seconds"})

    microbatch_tokens: PositiveCount = 16_384
    """The tokens that each process computes at once. Lower it where memory is short: the result stays the same."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """The type of the arithmetic. Master weights are always fp32. `auto`: bf16 where the device has units for it, else
    fp32."""
    compile: Literal["auto", "on", "off"] = "auto"
    """torch.compile for the blocks and, on CUDA, for the loss. `auto`: on CUDA and in long bf16 runs on a CPU, wherever
    there is a compiler."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """For several processes. `ddp`: each holds all weights. `fsdp`: weights, gradients and moments are divided among
    them (FSDP2)."""
    activation_checkpointing: bool = False
    """Compute each block again in the backward pass, which takes less memory and more time."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """The device to train on. `auto`: a GPU where there is one."""
    silence_seconds: PositiveCount | None = None
    """With several processes: the seconds without a sign of life after which a process counts as stopped or cut off,
    and the others end and name it. 60 unless given."""

    @field_validator("compile", mode="before")
    @classmethod
    def read_on_and_off(cls, value: Any) -> Any:
        """Restore `on` and `off`, which YAML reads as booleans."""
        return ("on" if value else "off") if isinstance(value, bool) else value


class Recipe(Strict):
    """One pretraining run."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """The first part of the run's folder name; a hash of all that decides its weights follows."""
    init: Init
    data: Data
    curriculum: Annotated[tuple[Phase, ...], Field(min_length=1)]
    """The phases of the training, in order."""
    schedule: Schedule = Schedule()
    batch_tokens: Annotated[
        Annotated[PositiveCount, Tag("number")] | Annotated[BatchRamp, Tag("ramp")], NUMBER_OR_RAMP
    ] = 2_359_296
    """The tokens of an update, or `{from: 8192, to: 65536, steps: 1000}` for a number that grows over the first
    updates."""
    optimizer: Optimizer = Optimizer()
    seed: Seed = 0
    """The seed of the initial weights and of the masks."""
    validation: Validation = Validation()
    checkpoints: Checkpoints = Checkpoints()
    compute: ComputeConfig = ComputeConfig()
    tracking: TrackingName | None = None
    """`tensorboard` writes event files beside metrics.jsonl. `wandb` sends records to Weights & Biases, or with
    WANDB_MODE=offline keeps them here."""

    @property
    def num_steps(self) -> int:
        return sum(phase.steps for phase in self.curriculum)

    @property
    def kept_steps(self) -> set[int]:
        """The updates whose checkpoints stay: the end of each phase, the beginning of the decay, and `keep`."""
        ends = accumulate(phase.steps for phase in self.curriculum)
        return {*ends, self.decay_start, *self.checkpoints.keep} - {0}

    @property
    def decay_start(self) -> int:
        """The updates before the decay. Other runs can branch at full rate up to there."""
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
        """All settings that decide the weights: not the name, nor what is measured, kept or used to compute."""
        aside = {"name", "validation", "checkpoints", "tracking", "compute"}
        return self.model_dump(mode="json", exclude=aside) | {"precision": self.compute.precision}

    def identity(self, data_fingerprint: str, parent: str | None, precision: str) -> str:
        """Hash all that decides the weights. Hashes of content stand for paths.

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
