"""What advice rests on: rules of thumb (`rules.yaml`), a scaling law, and how much text there is.

F1 to F8 are the findings of arXiv 2507.00994. It trained 210M to 1.2B parameters on 28 to 99 billion tokens, and says
nothing about other sizes, batches or rates: what stands here for those is a scaling law of decoders or a rule of our
own, and is called that. `study.advise` decides which case holds and fills in the numbers.
"""

import math
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from biphase.corpus.language import find_language
from biphase.corpus.shards import ShardSet
from biphase.corpus.text import find_text_sources, read_documents
from biphase.errors import InputError
from biphase.trees import parse_yaml

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
JUDGED_TEXTS, JUDGED_CHARACTERS = 200, 2000
"""How many of the first texts say which language they are in, and what is read of each."""


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
        first = range(min(shards.num_documents, JUDGED_TEXTS))
        tokenizer = shards.tokenizer()
        judged = [shards.document(index)[:JUDGED_CHARACTERS] for index in first]
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
        before = text_bytes
        for number, (document, bytes_read) in enumerate(read_documents(source, text_field)):
            text_bytes += len(document.text.encode())
            texts += [document.text[:JUDGED_CHARACTERS]] if number < JUDGED_TEXTS / SAMPLED_SOURCES else []
            if text_bytes - before >= SAMPLED_BYTES:
                file_bytes += bytes_read
                break
        else:
            file_bytes += source.num_bytes or 0
    num_bytes = text_bytes * sum(source.num_bytes or 0 for source in sources) / file_bytes
    return TextAmount(text_bytes=num_bytes, language=find_language(texts))
