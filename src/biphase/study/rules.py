"""What advice rests on: rules of thumb with their reasons and sources, a scaling law, and how much text there is.

F1 to F8 are the findings of arXiv 2507.00994. It trained 210M to 1.2B parameters on 28 to 99 billion tokens, and says
nothing about other sizes, batches or rates: what stands here for those is a scaling law of decoders or a rule of our
own, and is called that. `study.advise` decides which case holds and fills in the numbers.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from biphase.corpus.shards import ShardSet
from biphase.corpus.text import find_text_sources, read_documents
from biphase.errors import InputError

PAPER = "arXiv 2507.00994"
LAW = "Muennighoff et al. 2023 (arXiv 2305.16264), a law of decoders' loss; none is published for encoders"
OURS = "a rule of ours, not a finding"
MEASURED = "docs/LOG.md: one seed, preset 1m only"
PRICE = "our study price"
TUNING = "our study price_tuning"

PAPER_SIZES = ("210m", "610m", "1b")
FRESH_EPOCHS, MOST_EPOCHS = 4, 16
"""Up to the first, repeated text is worth nearly as much as new text; from the second on, little is gained (`LAW`)."""
WITHIN_NOISE = 0.01
"""Predicted losses this close, as a share, count as equal: then the smaller network is better, being cheaper to use."""


@dataclass(frozen=True)
class Choice:
    """A row of the advice, as it is told."""

    what: str
    value: str
    reason: str
    source: str


SIZE_CHOSEN = "{chosen.preset}, {millions:,.3g}M parameters without head"
TOKENS_CHOSEN = "{chosen.tokens:.3g} tokens, {chosen.tokens_per_parameter:,.3g} for each parameter"
TOKENS_READ = TOKENS_CHOSEN + ", {chosen.epochs:.2g} times the text"
NO_BEST_MASK = "no ratio is best everywhere: larger models and retrieval like more, small models less (F3)"
BATCH_CHOSEN = "{recipe.batch_label} tokens, {recipe.num_steps:,} steps"
BATCH_LAW = "a power of the tokens of training through 1.2M → 2,048 and 99B → 2.36M"
RATE_CHOSEN = "{recipe.schedule.peak_lr:g}"
CONTEXT_CHOSEN = "{recipe.data.max_sample_tokens:,} tokens"
VOCABULARY_CHOSEN = "{chosen.vocab_size:,} tokens"

# (what, case): (value, reason, source)
RULES = {
    ("size", "one"): (SIZE_CHOSEN, "the only one that the budget can train", "arithmetic"),
    ("size", "lowest"): (SIZE_CHOSEN, "lowest loss by the law ({chosen.loss:.3f}; {others})", LAW),
    ("size", "near the lowest"): (
        SIZE_CHOSEN,
        f"smallest within {WITHIN_NOISE:.0%} of the lowest loss by the law ({{chosen.loss:.3f}}; {{others}})",
        LAW,
    ),
    ("tokens", "any text"): (TOKENS_CHOSEN, "what the budget buys; enough text is taken for granted", "arithmetic"),
    ("tokens", "fresh"): (
        TOKENS_READ,
        f"up to {FRESH_EPOCHS} times, repeated text is nearly as good as new text",
        LAW,
    ),
    ("tokens", "repeated"): (
        TOKENS_READ,
        f"beyond {FRESH_EPOCHS} times, more text would be worth more than repeats",
        LAW,
    ),
    ("tokens", "used up"): (
        TOKENS_READ,
        f"repeating the text more than {MOST_EPOCHS} times gains little: the text, not the budget, is the limit",
        LAW,
    ),
    ("curriculum", "by the paper"): (
        "{curriculum}",
        "CLM, then MLM beats MLM alone at a fixed budget (F6); the mean of all four task families over 12k, 22k and "
        "42k steps is 77.8 for 25/75, 77.2 for 50/50, 76.8 for 75/25, 76.2 for MLM and 72.7 for CLM, at 610M",
        PAPER,
    ),
    ("curriculum", "small network"): (
        "{curriculum}",
        "at preset 1m the mean of two tasks over 300, 600 and 1,200 steps is 48.6 for 25/75, 49.7 for 50/50 and "
        "45.0 for MLM (three seeds); at 1,200 steps 25/75 needs 0.66 of MLM's FLOPs for its score; the better "
        "of two recipes at fewer steps was the better at 1,200 in 30 of 30 pairs. At 610M 25/75 is the best (F6)",
        f"{PRICE}, {PAPER}",
    ),
    ("curriculum", "not told apart"): (
        "{curriculum}",
        "your study has {best.curriculum} at {best.score} and {preferred.curriculum} at {preferred.score}, no clear "
        "difference, so F6 decides",
        f"your study, {PAPER}",
    ),
    ("curriculum", "best"): (
        "{curriculum}",
        "best of {num_compared} in your study ({best.score}){foretold}",
        "your study",
    ),
    ("masking", "small network"): (
        "{chosen.mask:.0%}",
        "best of 20 to 50 % for MLM alone at preset 1m, with 50 % close; a ratio that falls to 15 % costs points",
        f"{TUNING}, {PRICE}",
    ),
    ("masking", "MLM alone"): ("{chosen.mask:.0%}", NO_BEST_MASK, PAPER),
    ("masking", "after CLM"): ("{chosen.mask:.0%}", f"{NO_BEST_MASK}; after CLM it matters less (F7)", PAPER),
    ("batch", "small network"): (
        BATCH_CHOSEN,
        f"{BATCH_LAW}; at preset 1m a batch that grows is no cheaper at equal scores",
        f"{OURS}, {PRICE}",
    ),
    ("batch", "the paper's size"): (BATCH_CHOSEN, BATCH_LAW, OURS),
    ("schedule", "any"): (
        "{recipe.schedule.warmup_steps:,} steps up, {recipe.schedule.decay_steps:,} down",
        "2,000 up, at most 5 % of the steps; 2,000 down, at least 10 % and at most 20 % of them",
        f"{PAPER}; a tenth was the best decay in arXiv 2605.12438",
    ),
    ("rate", "small network"): (
        RATE_CHOSEN,
        "rises as the width falls below 768; half as much again as AdamW's, from 3e-3, the best of four at preset 1m",
        f"{OURS}, {TUNING}",
    ),
    ("rate", "the paper's size"): (RATE_CHOSEN, "searched at these sizes, with batches of 2.36M tokens", PAPER),
    ("optimizer", "small network"): ("Muon", "gets further on few tokens than AdamW in our runs", MEASURED),
    ("optimizer", "the paper's size"): ("AdamW", "the paper's settings", PAPER),
    ("context", "small network"): (CONTEXT_CHOSEN, "short for a small network", OURS),
    ("context", "the paper's size"): (CONTEXT_CHOSEN, "the paper's", PAPER),
    ("vocabulary", "of the shards"): (VOCABULARY_CHOSEN, "of the shards", "given"),
    ("vocabulary", "small network"): (VOCABULARY_CHOSEN, "so that embeddings do not outweigh the blocks by far", OURS),
    ("vocabulary", "the paper's size"): (VOCABULARY_CHOSEN, "the paper's, of Llama 3", PAPER),
}

PUBLIC_ENCODER_TOKENS = 2e12
PUBLIC_ENCODER_FLOPS = 1e15
"""What ModernBERT-base was trained on (arXiv 2412.13663), and the FLOPs of a million tokens of it: from there on, a
budget can continue it."""

CAVEATS = {
    "public encoder": "for English, answerdotai/ModernBERT-base (149M parameters, 2 trillion tokens) begins where this "
    "budget does not come: continued with MLM on your text (init: {{model: answerdotai/ModernBERT-base}}, with its own "
    "tokenizer) it is very likely the better use; random weights pay for other languages, vocabularies or sizes, or to "
    "compare recipes",
    "extrapolated": "curricula were compared at 1M parameters and minutes of training, and from 210M and 28 billion "
    "tokens on: that 25/75 is best between them is an extrapolation; `biphase study run mini` tests it on your text",
    "beyond the law": "the law is fitted on decoders of 10M to 9B parameters; read its losses as a ranking, roughly",
    "tokens guessed": "tokens are guessed from bytes of English text; `biphase prepare` counts them",
    "budget left": "this uses {used:.0%} of the budget: with the text given, the rest would be wasted; more text helps",
    "decoders": "a good decoder for your text and size is a better start than random weights: continue it with MLM "
    "(F8), as in recipes/adapt.yaml",
}


def apply_rule(what: str, case: str, **facts: Any) -> Choice:
    """A row of `RULES` with the numbers filled in."""
    value, reason, source = RULES[what, case]
    return Choice(what, value.format(**facts), reason.format(**facts), source)


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


@dataclass(frozen=True)
class TextAmount:
    """How much text there is: in tokens where it is prepared, else in bytes."""

    text_bytes: float | None = None
    tokens: float | None = None
    vocab_size: int | None = None

    def unique_tokens(self, vocab_size: int) -> float:
        """Its tokens; from its bytes, by what is measured for the vocabulary nearest in size."""
        if self.tokens is not None:
            return self.tokens
        assert self.text_bytes is not None
        nearest_size = min(BYTES_PER_TOKEN, key=lambda size: abs(math.log(size / vocab_size)))
        return self.text_bytes / BYTES_PER_TOKEN[nearest_size]


def measure_text(path: Path) -> TextAmount:
    """How much text a shard set, or a file or folder of documents, holds; large ones are judged by their beginnings.

    Raises:
        InputError: nothing readable there, or a hub data set, whose size is not known before it is read.
    """
    if (path / "manifest.json").exists():
        shards = ShardSet.open(path, "train")
        return TextAmount(tokens=float(shards.num_tokens), vocab_size=shards.manifest.vocab_size)
    sources = find_text_sources([path])
    hub = next((source.name for source in sources if source.num_bytes is None), None)
    if hub is not None:
        raise InputError(f"{hub}: the size of a hub data set is not known here; give its tokens")
    # Sources are looked into at equal distances. What they begin with says how much text is in a byte of a file, which
    # may be compressed, and so how much is in all of them.
    distance = math.ceil(len(sources) / SAMPLED_SOURCES)
    text_bytes, file_bytes = 0, 0
    for source in sources[::distance]:
        before = text_bytes
        for document, bytes_read in read_documents(source):
            text_bytes += len(document.text.encode())
            if text_bytes - before >= SAMPLED_BYTES:
                file_bytes += bytes_read
                break
        else:
            file_bytes += source.num_bytes or 0
    return TextAmount(text_bytes=text_bytes * sum(source.num_bytes or 0 for source in sources) / file_bytes)
