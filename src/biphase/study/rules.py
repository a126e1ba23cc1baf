"""What advice rests on: rules with their reasons, a scaling law, and which networks a text and a budget can train."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from biphase.corpus.shards import ShardSet
from biphase.corpus.text import CODE, find_language, find_text_sources, read_documents, spread
from biphase.encoder.presets import PRESETS, shape_of
from biphase.errors import InputError
from biphase.files import parse_yaml
from biphase.flops import SampleLengths, Shape, flops_per_token
from biphase.recipe import Phase
from biphase.study.spec import fill_budget, read_curriculum

PAPER_SIZES = ("210m", "610m", "1b")
FRESH_EPOCHS, MOST_EPOCHS = 4, 40
"""Up to the first, repeated text is worth nearly as much as new text; from the second on, nothing is gained: by the law
below."""
CLM_EPOCHS = 16
"""How often CLM may read a text: where it is read more often, the rest is better masked (arXiv 2512.14549)."""
WITHIN_NOISE = 0.01
"""Predicted losses this close, as a share, count as equal: then the smaller network is better, being cheaper to use."""


@dataclass(frozen=True)
class Choice:
    """A row of the advice, as it is told."""

    what: str
    value: str
    reason: str
    source: str


@cache
def read_rules() -> dict[str, Any]:
    """`best_use` and its `languages`; `rules`: what is chosen → its cases, with value, reason and source; `caveats`;
    `sources` by short names."""
    return parse_yaml((resources.files("biphase.study") / "rules.yaml").read_text(encoding="utf-8"))


def apply_rule(what: str, case: str, **facts: Any) -> Choice:
    """A row of the advice with the numbers filled in."""
    tree = read_rules()
    rule, limits = tree["rules"][what], {"fresh": FRESH_EPOCHS, "most": MOST_EPOCHS, "noise": WITHIN_NOISE}
    said = {"value": rule.get("value"), **rule[case]}
    return Choice(what, **{key: text.format(**tree["sources"], **limits, **facts) for key, text in said.items()})


# The scaling law
#
# Muennighoff et al. 2023 (arXiv 2305.16264, appendix A): Chinchilla's law with one exponent,
#
#     loss = FLOOR + A / parameters ^ EXPONENT + B / tokens ^ EXPONENT
#
# Text that is read again counts as fewer tokens, parameters beyond what the text can fill as fewer parameters.
# The constants were fitted on decoders of 10M to 9B parameters; no such law is published for encoders. So the losses
# rank candidates, and are good for nothing else.

A, B, FLOOR = math.exp(6.255414), math.exp(7.3049974), math.exp(0.6254804)
EXPONENT = 0.3526596
TOKENS_DECAY, PARAMETERS_DECAY = 15.387756, 5.309743
"""How many repeats, and how many times too many parameters, it takes until each further one counts 1/e."""


def predict_loss(parameters: float, tokens: float, unique_tokens: float) -> float:
    """The loss of a network trained on `tokens`, of which `unique_tokens` at most are different text."""
    read = min(tokens, unique_tokens)
    # Read four times, tokens / read - 1 = 3 repeats: worth 3 times new text at the most, ever less as they grow.
    effective_tokens = discounted(read, tokens / read - 1, TOKENS_DECAY)
    # The parameters that are optimal for `read` tokens: with one exponent for both, a fixed share of them.
    filled = min(parameters, read * (A / B) ** (1 / EXPONENT))
    effective_parameters = discounted(filled, parameters / filled - 1, PARAMETERS_DECAY)
    return FLOOR + A / effective_parameters**EXPONENT + B / effective_tokens**EXPONENT


def discounted(amount: float, excess: float, decay: float) -> float:
    """`amount` and `excess` times as much on top, of which the n-th time counts about exp(-n / decay)."""
    return amount * (1 + decay * (1 - math.exp(-excess / decay)))


# The amount of text

BYTES_PER_TOKEN = {4096: 3.4, 8192: 3.9, 32_768: 4.5, 128_256: 4.7}
"""Held-out English text over the tokens of byte-level BPE with a vocabulary of that size, measured here; 128,256 is
Llama 3's."""
SAMPLED_SOURCES, SAMPLED_BYTES = 8, 16e6
"""Sources that are looked into for how much text there is, and bytes of text that are read in each."""
JUDGED_TEXTS = 25
"""The language is judged by so many texts of a source, and where it has n, more than that, by √(25 n)."""


@dataclass(frozen=True)
class TextAmount:
    """How much text there is: in tokens where it is prepared, else in bytes."""

    text_bytes: float | None = None
    tokens: float | None = None
    vocab_size: int | None = None
    shards: str | None = None
    """The folder of a set that is prepared."""
    language: str | None = None
    """As `corpus.language` says it; None where nobody looked."""

    def unique_tokens(self, vocab_size: int) -> float:
        """Its tokens; from its bytes, by what is measured for the vocabulary nearest in size."""
        if self.tokens is not None:
            return self.tokens
        assert self.text_bytes is not None
        nearest_size = min(BYTES_PER_TOKEN, key=lambda size: abs(math.log(size / vocab_size)))
        return self.text_bytes / BYTES_PER_TOKEN[nearest_size]


def measure_text(path: Path, text_field: str = "text") -> TextAmount:
    """How much text a shard set, or a file or folder of documents, holds; large ones are judged by their beginnings.

    Raises:
        InputError: nothing readable there, or a hub data set, whose size is not known before it is read.
    """
    if (path / "manifest.json").exists():
        shards = ShardSet.open(path, "train")
        indices = range(0, shards.num_documents, math.ceil(shards.num_documents / (SAMPLED_SOURCES * JUDGED_TEXTS)))
        tokenizer = shards.tokenizer()
        judged = (piece for index in indices for piece in spread(shards.document(index)))
        language = find_language(str(tokenizer.decode(tokens, skip_special_tokens=True)) for tokens in judged)
        return TextAmount(None, float(shards.num_tokens), shards.manifest.vocab_size, str(path), language)
    sources = find_text_sources([path])
    hub = next((source.name for source in sources if source.num_bytes is None), None)
    if hub is not None:
        raise InputError(f"{hub}: the size of a hub data set is not known here; give its tokens")
    # Sources are looked into at equal distances. What they begin with says how much text is in a byte of a file, which
    # may be compressed, and so how much is in all of them.
    distance = math.ceil(len(sources) / SAMPLED_SOURCES)
    text_bytes, file_bytes, texts = 0, 0, list[str]()
    for source in sources[::distance]:
        before, first = text_bytes, len(texts)
        for number, (document, bytes_read) in enumerate(read_documents(source, text_field)):
            text_bytes += len(document.text.encode())
            texts += [document.text] if is_judged(number, len(texts) - first) else []
            if text_bytes - before >= SAMPLED_BYTES:
                file_bytes += bytes_read
                break
        else:
            file_bytes += source.num_bytes or 0
    num_bytes = text_bytes * sum(source.num_bytes or 0 for source in sources) / file_bytes
    return TextAmount(text_bytes=num_bytes, language=find_language(texts))


def is_judged(number: int, num_judged: int) -> bool:
    """Whether the text of this number says which language a source is in, beside so many before it."""
    return num_judged**2 <= JUDGED_TEXTS * number


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
