"""The text of a run: one shard set, or several with weights."""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from biphase.corpus.packing import Batches, DocumentSamples, PackedSet, Samples, StreamSamples
from biphase.corpus.shards import ShardSet, check_tokenizer
from biphase.errors import InputError
from biphase.files import content_hash
from biphase.recipe import Data


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
        if len(self.contents) == 1:
            return self.contents[0]
        return content_hash([[content, str(share)] for content, share in zip(self.contents, self.shares, strict=True)])


def open_text(data: Data) -> TrainingText:
    """Raises `InputError` as `ShardSet.open`, and where sets were not made with the tokenizer of `data.shards`."""
    main = ShardSet.open(data.shards, "train")
    if not data.mixture:
        return TrainingText(main, (main,), find_shares(data))
    sets = tuple(ShardSet.open(part.path, "train") for part in data.mixture)
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


def make_batches(data: Data, text: TrainingText, tokens_before: Callable[[int], int], *, origin: int) -> Batches:
    """The batches of a run that begins `origin` tokens into the data order."""
    sets = [
        PackedSet(shards, make_samples(data, shards), data.order_seed + number)
        for number, shards in enumerate(text.sets)
    ]
    return Batches(sets, tokens_before, text.shares, origin)
