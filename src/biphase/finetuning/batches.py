"""Examples → token ids, once per (task, tokenizer) → packed batches: flat, without padding.

An input is its text and an end-of-text token, without a begin-of-text token. What gets a label is a *unit*: the sample
itself in sequence classification, a word in token classification. Words are joined by spaces, so that a tokenizer
sees the text it knows; each token belongs to the word that its last character is in.

Letters: T tokens of a split or a batch, S samples, U units, W words.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from tokenizers import Encoding, Tokenizer
from torch import Tensor

from biphase.encoder.attention import Backend, Layout, lay_out
from biphase.finetuning.tasks import SPLITS, LabelledText, TaggedWords, TaskData

IGNORED = -100
"""The target of a token that has none (torch's convention)."""
TEXTS_PER_CALL = 50_000
"""So that the tokenizer's own records of a large task never fill the memory."""


@dataclass(frozen=True)
class KeyedTokenizer:
    """A tokenizer that counts as equal to any other with the same hash, so that what it encoded can be kept."""

    hash: str
    tokenizer: Any = field(compare=False, repr=False)


@dataclass(frozen=True)
class EncodedSplit:
    """A split as flat tokens; arrays are read-only."""

    ids: tuple[str, ...]
    tokens_T: np.ndarray
    bounds_S1: np.ndarray
    gold_U: np.ndarray
    """The label of every unit, also of words that were cut off."""
    unit_bounds_S1: np.ndarray
    """Where the units of each sample lie in `gold_U`."""
    units_T: np.ndarray | None
    """Token classification: the word of each token, -1 for end-of-text."""
    num_truncated: int

    @property
    def num_samples(self) -> int:
        return len(self.bounds_S1) - 1

    @property
    def lengths_S(self) -> np.ndarray:
        return np.diff(self.bounds_S1)


@dataclass(frozen=True)
class EncodedTask:
    data: TaskData
    train: EncodedSplit
    validation: EncodedSplit
    test: EncodedSplit


@dataclass(frozen=True)
class Batch:
    """Samples laid end to end, on the device."""

    tokens_T: Tensor
    positions_T: Tensor
    layout: Layout
    targets: Tensor
    """[S], or [T] with `IGNORED` at end-of-text tokens."""
    rows: np.ndarray
    """The samples (or the tokens) of the split that the rows of the model's output stand for."""


def encode_task(data: TaskData, keyed: KeyedTokenizer, max_length: int) -> EncodedTask:
    """All splits, each sample cut at `max_length` tokens including end-of-text (`num_truncated` counts those cut)."""
    assert max_length >= 2
    examples = [getattr(data, name) for name in SPLITS]
    everything = list(itertools.chain.from_iterable(examples))
    encodings = encode(keyed.tokenizer, [text_of(example) for example in everything], max_length)
    ends = np.cumsum([len(part) for part in examples])
    eos_id = keyed.tokenizer.eos_token_id
    parts = [
        join(everything[end - len(part) : end], encodings[end - len(part) : end], eos_id)
        for part, end in zip(examples, ends, strict=True)
    ]
    return EncodedTask(data, *parts)


def text_of(example: LabelledText | TaggedWords) -> str:
    return example.text if isinstance(example, LabelledText) else " ".join(example.words)


@dataclass(frozen=True)
class TokenizedText:
    ids: np.ndarray
    last_characters: np.ndarray
    """For each token, the offset of its last character in the text."""
    is_cut: bool


def encode(tokenizer: Any, texts: Sequence[str], max_length: int) -> list[TokenizedText]:
    """Token ids without special tokens; names of special tokens inside a text are read as ordinary text."""
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.no_padding()
    backend.no_truncation()
    backend.encode_special_tokens = True
    encoded: list[TokenizedText] = []
    for begin in range(0, len(texts), TEXTS_PER_CALL):
        part = backend.encode_batch(texts[begin : begin + TEXTS_PER_CALL], add_special_tokens=False)
        encoded.extend(shorten(encoding, max_length - 1) for encoding in part)
    return encoded


def shorten(encoding: Encoding, room: int) -> TokenizedText:
    ids = np.array(encoding.ids[:room], dtype=np.int32)
    spans = np.array(encoding.offsets[:room], dtype=np.int64).reshape(-1, 2)
    return TokenizedText(ids, np.maximum(spans[:, 1] - 1, spans[:, 0]), len(encoding.ids) > room)


def join(
    examples: Sequence[LabelledText | TaggedWords], encodings: Sequence[TokenizedText], eos_id: int
) -> EncodedSplit:
    eos = np.array([eos_id], dtype=np.int32)
    bounds_S1 = cumulate([len(encoding.ids) + 1 for encoding in encodings])
    gold, units = [], []
    for example, encoding in zip(examples, encodings, strict=True):
        if isinstance(example, LabelledText):
            gold.append([example.label])
        else:
            gold.append(list(example.tags))
            units.append(words_of_tokens(example.words, encoding.last_characters))
    unit_bounds_S1 = cumulate([len(labels) for labels in gold])
    if units:
        shifted = [np.append(words + first, -1) for words, first in zip(units, unit_bounds_S1, strict=False)]
    split = EncodedSplit(
        ids=tuple(example.id for example in examples),
        tokens_T=np.concatenate([part for encoding in encodings for part in (encoding.ids, eos)]),
        bounds_S1=bounds_S1,
        gold_U=np.fromiter(itertools.chain.from_iterable(gold), dtype=np.int64),
        unit_bounds_S1=unit_bounds_S1,
        units_T=np.concatenate(shifted) if units else None,
        num_truncated=sum(encoding.is_cut for encoding in encodings),
    )
    for array in (split.tokens_T, split.bounds_S1, split.gold_U, split.unit_bounds_S1, split.units_T):
        if array is not None:
            array.flags.writeable = False
    return split


def cumulate(lengths: Sequence[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


def words_of_tokens(words: Sequence[str], last_characters: np.ndarray) -> np.ndarray:
    """The number of the word that each token's last character is in; a space belongs to the word after it."""
    ends_W = np.cumsum([len(word) + 1 for word in words]) - 1
    return np.minimum(np.searchsorted(ends_W, last_characters, side="right"), len(words) - 1)


def make_batch(
    split: EncodedSplit, samples: np.ndarray, device: torch.device | str = "cpu", backend: Backend = "buckets"
) -> Batch:
    """The given samples of a split, in the given order."""
    lengths = split.lengths_S[samples]
    bounds = cumulate(lengths)
    positions_T = np.arange(bounds[-1]) - np.repeat(bounds[:-1], lengths)
    places_T = np.repeat(split.bounds_S1[samples], lengths) + positions_T
    if split.units_T is None:
        rows, targets = samples, split.gold_U[samples]
    else:
        rows, units_T = places_T, split.units_T[places_T]
        targets = np.where(units_T >= 0, split.gold_U[units_T], IGNORED)
    return Batch(
        tokens_T=torch.from_numpy(split.tokens_T[places_T].astype(np.int64)).to(device),
        positions_T=torch.from_numpy(positions_T).to(device),
        layout=lay_out(bounds, causal=False, device=device, backend=backend),
        targets=torch.from_numpy(targets).to(device),
        rows=rows,
    )


def count_targets(split: EncodedSplit, samples: np.ndarray) -> int:
    """How many terms the loss of these samples has: one per sample, or one per token of a word."""
    return len(samples) if split.units_T is None else int((split.lengths_S[samples] - 1).sum())


def training_order(num_samples: int, batch_size: int, num_steps: int, seed: int) -> Iterator[np.ndarray]:
    """The samples of each step: every epoch a new seeded permutation, its last batch as short as it comes."""
    steps_per_epoch = -(-num_samples // batch_size)
    for step in range(num_steps):
        epoch, place = divmod(step, steps_per_epoch)
        if place == 0:
            order = np.random.default_rng((seed, epoch)).permutation(num_samples)
        yield order[place * batch_size : (place + 1) * batch_size]


def evaluation_order(lengths_S: np.ndarray, budget_tokens: int) -> list[np.ndarray]:
    """All samples, longest first, in batches of at most `budget_tokens` (or of one sample)."""
    return cut(np.argsort(-lengths_S, kind="stable"), lengths_S, budget_tokens)


def cut(samples: np.ndarray, lengths_S: np.ndarray, budget_tokens: int) -> list[np.ndarray]:
    """Consecutive parts of `samples`, each of at most `budget_tokens` tokens or of one sample."""
    ends = np.cumsum(lengths_S[samples])
    parts, begin = [], 0
    while begin < len(samples):
        before = ends[begin - 1] if begin else 0
        end = max(begin + 1, int(np.searchsorted(ends, before + budget_tokens, side="right")))
        parts.append(samples[begin:end])
        begin = end
    return parts


def vote(labels_T: np.ndarray, units_T: np.ndarray, num_units: int, num_labels: int, default: int) -> np.ndarray:
    """The majority label of each unit's tokens; of equally frequent ones, the one that comes first in the unit.

    Units without tokens (words that were cut off) get `default`.
    """
    inside = np.flatnonzero(units_T >= 0)
    keys = units_T[inside] * num_labels + labels_T[inside]
    counts = np.bincount(keys, minlength=num_units * num_labels)
    first = np.full(num_units * num_labels, len(units_T))
    first[keys[::-1]] = inside[::-1]  # of repeated keys the last write stays: the earliest token
    ranks_UL = (counts * (len(units_T) + 1) - first).reshape(num_units, num_labels)
    has_tokens_U = counts.reshape(num_units, num_labels).any(axis=1)
    return np.where(has_tokens_U, ranks_UL.argmax(axis=1), default)
