"""The text of a run: one shard set, or several with weights, each as it is now or as it was before it grew.

A run's *history* of its text says what it was over from which place of the data order on. With it the order is the same
for ever: a run that goes on over a set that has grown sees what is new from there on, and what came before is unmoved.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from math import floor

from biphase.corpus.order import Growth
from biphase.corpus.packing import Batches, DocumentSamples, PackedSet, Samples, StreamSamples
from biphase.corpus.shards import ShardSet, check_tokenizer
from biphase.errors import InputError
from biphase.files import content_hash
from biphase.recipe import Data

TextHistory = tuple[tuple[int, tuple[str, ...]], ...]
"""Places in the data order, in tokens from 0 on, each with the fingerprints of the sets as they were from there on."""


@dataclass(frozen=True)
class TrainingText:
    """The sets that a run trains on, and the share of the tokens that each has."""

    main: ShardSet
    """The set of `data.shards`: its tokenizer and its validation text are the run's."""
    sets: tuple[ShardSet, ...]
    shares: tuple[Fraction, ...]

    @property
    def contents(self) -> tuple[str, ...]:
        return tuple(shards.fingerprint for shards in self.sets)

    @property
    def fingerprint(self) -> str:
        """Names the content: that of the set where it is one, else of all sets with their shares."""
        return self.fingerprint_of(self.contents)

    def fingerprint_of(self, contents: Sequence[str]) -> str:
        """The fingerprint with other contents of the sets."""
        if len(contents) == 1:
            return contents[0]
        return content_hash([[content, str(share)] for content, share in zip(contents, self.shares, strict=True)])

    def grew_from(self, contents: Sequence[str]) -> bool:
        """Whether the sets are those of these fingerprints, each as it was or grown since."""
        return len(contents) == len(self.sets) and all(
            content in [stage.fingerprint for stage in shards.manifest.stages]
            for content, shards in zip(contents, self.sets, strict=True)
        )


def open_text(data: Data) -> TrainingText:
    """Raises `InputError` as `ShardSet.open`, and where sets were not made with the tokenizer of `data.shards`."""
    main = ShardSet.open(data.shards, "train", data.content)
    if not data.mixture:
        return TrainingText(main, (main,), find_shares(data))
    sets = tuple(ShardSet.open(part.path, "train", part.content) for part in data.mixture)
    for shards in sets:
        check_tokenizer(shards, main.manifest.tokenizer_hash)
    if len({shards.fingerprint for shards in sets}) < len(sets):
        raise InputError("data.mixture names a text twice: give it once, with the sum of the weights")
    return TrainingText(main, sets, find_shares(data))


def find_shares(data: Data) -> tuple[Fraction, ...]:
    """The share of the tokens that each set has, exactly."""
    weights = [Fraction(str(part.weight)) for part in data.mixture or ()] or [Fraction(1)]
    return tuple(weight / sum(weights) for weight in weights)


def make_samples(data: Data, shards: ShardSet) -> Samples:
    """How the shards' tokens are cut into samples, by `data.packing`."""
    if data.packing == "stream":
        return StreamSamples(shards.num_tokens, data.min_sample_tokens, data.max_sample_tokens, data.order_seed)
    return DocumentSamples(shards.document_ends, data.min_sample_tokens, data.max_sample_tokens)


def make_batches(
    data: Data, text: TrainingText, tokens_before: Callable[[int], int], *, origin: int, history: TextHistory = ()
) -> Batches:
    """The batches of a run that begins `origin` tokens into the data order, over texts with this history."""
    sets = []
    for number, (shards, share) in enumerate(zip(text.sets, text.shares, strict=True)):
        samples = make_samples(data, shards)
        growth = find_growth(shards, samples, [(floor(at * share), contents[number]) for at, contents in history])
        sets.append(PackedSet(shards, samples, data.order_seed + number, growth))
    return Batches(sets, tokens_before, text.shares, origin)


def find_growth(shards: ShardSet, samples: Samples, history: Sequence[tuple[int, str]]) -> list[Growth]:
    """Where in its order a set grew, from what it was at which places."""
    growth = []
    for (_, before), (position, content) in pairwise(history):
        if content != before:
            stage = shards.manifest.at_stage(before)
            assert stage is not None, (before, shards.folder)
            totals = stage.splits["train"]
            growth.append(Growth(position, samples.num_first(totals.documents, totals.tokens)))
    return growth
