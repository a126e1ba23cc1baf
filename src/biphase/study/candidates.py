"""A budget and a text → what they can train: each preset from random weights, or a public encoder that is continued."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from biphase.corpus.language import CODE
from biphase.encoder.presets import PRESETS, shape_of
from biphase.errors import InputError
from biphase.flops import SampleLengths, Shape, flops_per_token
from biphase.recipe import Phase
from biphase.study.curricula import fill_budget, read_curriculum
from biphase.study.rules import CLM_EPOCHS, MOST_EPOCHS, PAPER_SIZES, WITHIN_NOISE, TextAmount, predict_loss

USUAL_VOCABULARIES = {"1m": 8192, "3m": 8192, "11m": 32_768, "36m": 32_768}
USUAL_CONTEXTS = {"1m": 256, "3m": 256, "11m": 512, "36m": 1024}
PAPER_VOCABULARY, PAPER_CONTEXT = 128_256, 2048
"""Tokens of a vocabulary, and of the longest sample: ours below the paper's sizes, and the paper's."""
LEAST_TOKENS = 100_000
"""With fewer tokens of training a network learns nothing worth having."""
LEAST_CONTINUED = 1_000_000
"""Fewer tokens of a text change nothing in a public encoder."""
CONTINUED_CONTEXT, CONTINUED_MASK = 1024, 0.3


@dataclass(frozen=True)
class PublicEncoder:
    """A public encoder to continue."""

    name: str
    """On the Hugging Face hub."""
    shape: Shape
    tokens: float
    """What it was trained on."""
    knows: str
    """What its text was, for people."""
    source: str

    @property
    def flops(self) -> float:
        """About what its training took."""
        return self.tokens * self.shape.flops.token(CONTINUED_CONTEXT, CONTINUED_MASK)


MODERN_BERT = PublicEncoder(
    "answerdotai/ModernBERT-base", Shape(22, 768, 1152, 12, 12, 64, 50_368, True), 2e12, "English", "arXiv 2412.13663"
)
MM_BERT = PublicEncoder(
    "jhu-clsp/mmBERT-base", Shape(22, 768, 1152, 12, 12, 64, 256_000, True), 3e12, "1,833 languages", "arXiv 2509.06888"
)
EURO_BERT = PublicEncoder(
    "EuroBERT/EuroBERT-210m",
    Shape(12, 768, 3072, 12, 12, 64, 128_256),
    5e12,
    "15 languages and program code",
    "arXiv 2503.05500",
)


def find_encoder(language: str | None) -> PublicEncoder:
    """The public encoder to continue for a language as `corpus.language` says it, None where it is not known."""
    return {"en": MODERN_BERT, CODE: EURO_BERT}.get(language or "", MM_BERT)


@dataclass(frozen=True)
class Candidate:
    """What the budget buys with one preset, or with a public encoder."""

    name: str
    """The preset, or the encoder's name on the hub."""
    shape: Shape = field(repr=False)
    context: int
    """The longest sample, in tokens."""
    curriculum: str
    mask: float
    """The masking probability."""
    tokens: float
    """Tokens of training; read `epochs` times, where the text is known."""
    epochs: float
    loss: float
    """What the scaling law predicts, for comparing presets and nothing else; nan for a network that is continued."""
    flops: float

    @property
    def parameters(self) -> int:
        """Parameters without the language model head."""
        return self.shape.parameters_without_head

    @property
    def tokens_per_parameter(self) -> float:
        """With unique text, the law wants about 20."""
        return self.tokens / self.parameters

    @property
    def is_guess(self) -> bool:
        """Whether the law expects no more of it than of a network that has learned nothing."""
        return self.loss >= math.log(self.shape.vocab_size)

    @property
    def is_continued(self) -> bool:
        return self.name not in PRESETS

    @property
    def kind(self) -> str:
        """The case of the rules that holds for it."""
        return "continued" if self.is_continued else "small network" if self.is_small else "the paper's size"

    @property
    def is_small(self) -> bool:
        """Whether nothing is published about networks of this size that are trained from random weights."""
        return self.name not in PAPER_SIZES and not self.is_continued


def make_candidate(preset: str, text: TextAmount | None, budget: float, curriculum: str) -> Candidate:
    """What the budget, or all of the text, trains of a preset."""
    vocab_size = (text.vocab_size if text else None) or USUAL_VOCABULARIES.get(preset, PAPER_VOCABULARY)
    shape = shape_of(preset, {}, vocab_size)
    context, mask = USUAL_CONTEXTS.get(preset, PAPER_CONTEXT), 0.3 if preset == "210m" else 0.4
    return spend(preset, shape, text, budget, curriculum, context, mask)


def continue_encoder(encoder: PublicEncoder, text: TextAmount | None, budget: float) -> Candidate:
    """What the budget, or all of the text, trains of a public encoder."""
    return spend(encoder.name, encoder.shape, text, budget, "mlm", CONTINUED_CONTEXT, CONTINUED_MASK)


def spend(
    name: str, shape: Shape, text: TextAmount | None, budget: float, curriculum: str, context: int, mask: float
) -> Candidate:
    vocab_size = shape.vocab_size
    unique = text.unique_tokens(vocab_size) if text else math.inf
    each = mean_token_flops(shape, scale_curriculum(curriculum, mask, 10_000), context)
    tokens = min(budget / each, MOST_EPOCHS * unique)
    # The law knows no vocabulary; a network that has learned nothing spreads its guess over all of it.
    loss = min(predict_loss(shape.parameters_without_head, tokens, unique), math.log(vocab_size))
    loss = loss if name in PRESETS else math.nan
    return Candidate(name, shape, context, curriculum, mask, tokens, tokens / unique, loss, tokens * each)


def choose_candidate(candidates: Sequence[Candidate], budget: float) -> Candidate:
    """The smallest of those that the law cannot tell from the best; they stand from large to small. Where it expects
    nothing of any, what differs is their vocabulary alone."""
    possible = [item for item in candidates if item.tokens >= LEAST_TOKENS]
    if not possible:
        tokens, epochs = candidates[-1].tokens, candidates[-1].epochs
        given = f" and the text given, read {epochs:.2g} times," if epochs else ""
        raise InputError(
            f"{budget:.3g} FLOPs{given} are {tokens:,.0f} tokens for the smallest preset, too few to learn from; "
            f"{LEAST_TOKENS:,} are the least, which cost {candidates[-1].flops / tokens * LEAST_TOKENS:.2g} FLOPs"
        )
    if all(item.is_guess for item in possible):
        return possible[-1]
    lowest = min(item.loss for item in possible)
    return next(item for item in reversed(possible) if item.loss <= lowest * (1 + WITHIN_NOISE))


def scale_curriculum(curriculum: str, mask: float, steps: int, epochs: float = 0) -> tuple[Phase, ...]:
    """The phases of a curriculum within a number of steps, by their proportions where it is given in steps too.

    Of a text that is read `epochs` times, CLM reads it `CLM_EPOCHS` times at most: the last phase has the rest.
    """
    templates = read_curriculum(curriculum, {}, mask)
    total = sum(phase.steps for phase, _ in templates)
    shares = [share or Fraction(phase.steps, total) for phase, share in templates]
    phases = [phase for phase, _ in templates]
    causal = sum(share for phase, share in zip(phases, shares, strict=True) if phase.objective == "clm")
    if causal * epochs > CLM_EPOCHS and phases[-1].objective != "clm":
        for at, phase in enumerate(phases):
            shares[at] *= Fraction(CLM_EPOCHS / epochs) / causal if phase.objective == "clm" else 1
        shares[-1] += 1 - sum(shares)
    return fill_budget(tuple(zip(phases, shares, strict=True)), steps, f"curriculum '{curriculum}'")


def mean_token_flops(shape: Shape, phases: Sequence[Phase], context: int) -> float:
    """FLOPs of a token of training, averaged over the phases; the text is not looked into."""
    samples = SampleLengths(context / 2, context / 2, "assumed")
    total = sum(phase.steps for phase in phases)
    return sum(phase.steps / total * flops_per_token(shape.flops, phase, samples) for phase in phases)
