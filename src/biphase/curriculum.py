"""A curriculum: phases of training, each under one objective, and the facts of each objective.

This module only describes objectives; `pretraining.objectives` computes them.
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag, model_validator

from biphase.config import PositiveCount, Share, Strict

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


class MaskRamp(Strict):
    """A masking ratio that moves linearly over the steps of a phase."""

    model_config = ConfigDict(validate_by_name=True, serialize_by_alias=True)

    start: Annotated[MaskShare, Field(alias="from")]
    to: MaskShare


class BatchRamp(Strict):
    """A batch that grows linearly over `steps` updates and then keeps its size.

    The count of updates includes all parents, so that a branch continues where its trunk was.
    """

    model_config = ConfigDict(validate_by_name=True, serialize_by_alias=True)

    start: Annotated[PositiveCount, Field(alias="from")]
    to: PositiveCount
    steps: PositiveCount

    def tokens_before(self, step: int) -> int:
        """Count the tokens of all updates before `step` together."""
        # Update k of n has from + (to - from) · (k + ½) / n tokens. The sum over k is quadratic, and rounded to a whole
        # number. A batch is the difference of two such sums, so that rounding errors do not add up.
        climbing = min(step, self.steps)
        climbed = (2 * self.steps * self.start * climbing + (self.to - self.start) * climbing**2) // (2 * self.steps)
        return climbed + (step - climbing) * self.to


NUMBER_OR_RAMP = Discriminator(lambda value: "ramp" if isinstance(value, dict | Strict) else "number")
"""The test that tells a number from a ramp, so that an error is about the form that the user meant."""


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
    """The share of the chosen tokens that are replaced by a random token. BERT: 0.1. The rest stay unchanged."""
    mask_passes: Annotated[PositiveCount, Field(le=100)] = 1
    """The number of updates in a row that read the same text, each masking other tokens. With 2, training skips every
    second batch of text. A text then has as many targets as with twice the ratio, and each target sees more of the
    text. Passes count from the beginning of the data order, not of the phase: after other masks, begin the phase at a
    multiple of `mask_passes`, or its first updates go on with a text that may have had the same targets."""
    clm_share: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """The share of steps that predict the next token instead, spread evenly over a masked phase: CLM and MLM mixed by
    batch. The phase still counts as its masked objective, and its model is bidirectional."""

    @model_validator(mode="before")
    @classmethod
    def name_objective(cls, tree: Any) -> Any:
        """Derive the objective from `attention`, `target` and the presence of `mask_probability`, or the first two from
        the objective."""
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
                raise ValueError(f"{told} is not an objective: {remedy}; without mask_probability only {hidden}")
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
        """`clm`, `mlm40`, `mlm15(80/10/10)`, `mlm40+clm25`: the objective, the masked percentage, the percentage of CLM
        steps."""
        if not self.masked:
            return self.objective
        mixed = f"+clm{100 * self.clm_share:g}" if self.clm_share else ""
        passes = f"x{self.mask_passes}" if self.mask_passes > 1 else ""
        return f"{self.objective}{self.masked.replace('–', '-')}{self.corruption}{passes}{mixed}"

    @property
    def words(self) -> str:
        """`CLM`, `MLM 40 %`, `MLM 15 % (80/10/10)`, `MLM 40–15 % with 25 % CLM`: the label for people."""
        corrupted = f" {self.corruption}" if self.corruption else ""
        passes = f" in {self.mask_passes} passes" if self.mask_passes > 1 else ""
        masked = f" {self.masked} %{corrupted}{passes}" if self.masked else ""
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
    def corruption(self) -> str:
        """The percentages of the chosen tokens that become the mask token, become a random token, and stay:
        `(80/10/10)`; empty if all become the mask token, and for CLM."""
        rest = abs(round(1 - self.mask_token_share - self.random_token_share, 9))
        shares = (self.mask_token_share, self.random_token_share, rest)
        has_others = self.facts.masks_input and self.mask_token_share < 1
        return f"({'/'.join(f'{100 * share:g}' for share in shares)})" if has_others else ""

    @property
    def facts(self) -> Objective:
        """The facts of its objective; for a mixed phase, those of the masked one."""
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
        """Return the phase with its masking ratio fixed at the value at `progress`, from 0 to 1."""
        return self.model_copy(update={"mask_probability": self.mask_at(progress)}) if self.is_ramped else self

    def mask_at(self, progress: float) -> float:
        """Return the masking ratio at `progress`, the share of its steps that is over, from 0 to 1."""
        ratio = self.mask_probability
        return ratio.start + (ratio.to - ratio.start) * progress if isinstance(ratio, MaskRamp) else ratio

    @property
    def parts(self) -> tuple[tuple["Phase", float], ...]:
        """Its pure phases, each with its share of the steps: one, or two for a mixed phase."""
        if not self.clm_share:
            return ((self, 1.0),)
        masked = self.model_copy(update={"clm_share": 0.0})
        return (masked, 1 - self.clm_share), (Phase(objective="clm", steps=self.steps), self.clm_share)


def join_phases(phases: Iterable[Phase]) -> tuple[Phase, ...]:
    """Join neighbouring phases that are alike."""
    joined: list[Phase] = []
    for phase in phases:
        # Without masking, its settings mean nothing. Drop them, so that all phases of CLM are alike.
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
