"""Texts → flat token ids, and the splits of a task made of them.

An input is its text and the tokenizer's end-of-text token; where a tokenizer opens inputs with a classification token
(BERT's), that comes first. Names of special tokens inside a text are read as ordinary text.

Letters: T tokens, S samples, U tokens in use.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Generic, TypeVar

import numpy as np

from biphase.corpus.tokenizer import tell_blanks
from biphase.tasks.spec import TaskSplit

TEXTS_PER_CALL = 50_000
"""How many texts the tokenizer gets at a time, so that its own records of a large task never fill the memory."""


@dataclass(frozen=True)
class HashedTokenizer:
    """A tokenizer and the hash of what it does, by which encoded texts are kept."""

    hash: str
    pretrained: Any = field(repr=False)
    """The tokenizer of transformers."""

    @property
    def opening(self) -> list[int]:
        """The tokens before every text: the classification token of a tokenizer that has one."""
        has_pair = self.pretrained.cls_token_id is not None and self.pretrained.sep_token_id is not None
        return [self.pretrained.cls_token_id] if has_pair else []

    @property
    def closing(self) -> int:
        """The token after every text."""
        return self.pretrained.sep_token_id if self.opening else self.pretrained.eos_token_id

    def room(self, max_length: int) -> int:
        """How many tokens of a text fit into an input of `max_length` tokens."""
        return max_length - len(self.opening) - 1


@dataclass(frozen=True)
class TokenizedTexts:
    """Samples as token ids, end to end."""

    tokens_T: np.ndarray
    """int32."""
    bounds_S1: np.ndarray
    """int64: sample s is `tokens_T[bounds_S1[s] : bounds_S1[s + 1]]` (flash attention's cu_seqlens)."""
    truncated: np.ndarray
    """The samples that were cut, ascending."""

    @property
    def num_samples(self) -> int:
        return len(self.bounds_S1) - 1

    @property
    def lengths_S(self) -> np.ndarray:
        return np.diff(self.bounds_S1)

    @cached_property
    def used_U(self) -> np.ndarray:
        """The tokens that occur, ascending."""
        is_used = np.zeros(int(self.tokens_T.max(initial=0)) + 1, dtype=bool)
        is_used[self.tokens_T] = True
        return np.flatnonzero(is_used)

    def count_tokens(self, samples: np.ndarray) -> int:
        return int((self.bounds_S1[samples + 1] - self.bounds_S1[samples]).sum())


@dataclass(frozen=True)
class EncodedSplit:
    """One split of a task as token ids. Each family of tasks adds its targets to it.

    What training draws its batches from are *items*: mostly the examples themselves.
    """

    ids: list[str]
    """The ids that predictions are named by."""
    texts: TokenizedTexts
    num_examples: int
    num_truncated: int

    @property
    def all_texts(self) -> tuple[TokenizedTexts, ...]:
        return (self.texts,)

    @property
    def strata(self) -> np.ndarray:
        """The class of each example, where few shots are drawn from each class; else one for all."""
        return np.zeros(self.num_examples, dtype=np.int64)

    def items_of(self, examples: np.ndarray) -> np.ndarray:
        """The training items of examples."""
        return examples

    def count_tokens(self, items: np.ndarray) -> int:
        return self.texts.count_tokens(items)


Split = TypeVar("Split", bound=EncodedSplit)


@dataclass(frozen=True)
class EncodedTask(Generic[Split]):
    """The splits of a task as token ids."""

    splits: dict[TaskSplit, Split]
    left_out: int
    """Rows of the data without a gold label."""


def tokenize(
    tokenizer: HashedTokenizer, texts: Sequence[str], *, with_spans: bool = False
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The tokens of each text, in order, neither opened nor closed nor cut.

    With each comes where its tokens begin and end, [T, 2], in characters; nothing is in there without `with_spans`.
    """
    from tokenizers import Tokenizer

    backend = Tokenizer.from_str(tokenizer.pretrained.backend_tokenizer.to_str())
    backend.no_padding()
    backend.no_truncation()
    backend.encode_special_tokens = True
    tell_blanks(backend)
    encode = backend.encode_batch if with_spans else backend.encode_batch_fast
    for begin in range(0, len(texts), TEXTS_PER_CALL):
        for encoding in encode(texts[begin : begin + TEXTS_PER_CALL], add_special_tokens=False):
            spans_T2 = np.array(encoding.offsets if with_spans else [], dtype=np.int32).reshape(-1, 2)
            yield np.array(encoding.ids, dtype=np.int32), spans_T2


def encode_filled(
    tokenizer: HashedTokenizer, texts: Sequence[str], columns: Sequence[Sequence[tuple[int, int]]], max_length: int
) -> TokenizedTexts:
    """Texts that were made of several columns each, which stand at these characters: of one that is too long, the
    longest columns are cut, as transformers' `longest_first` does; what stands around them is kept."""
    room = tokenizer.room(max_length)
    parts = [ids for ids, _ in tokenize(tokenizer, texts)]
    long = [number for number, ids in enumerate(parts) if len(ids) > room and len(columns[number]) > 1]
    spans = tokenize(tokenizer, [texts[number] for number in long], with_spans=True)
    for number, (ids, spans_T2) in zip(long, spans, strict=True):
        parts[number] = ids[cut_longest(spans_T2, columns[number], room)]
    encoded = concatenate(tokenizer, parts, max_length)
    return replace(encoded, truncated=np.union1d(encoded.truncated, np.array(long, dtype=np.int64)))


def cut_longest(spans_T2: np.ndarray, columns: Sequence[tuple[int, int]], room: int) -> np.ndarray:
    """The tokens to keep of a text of several columns, ascending, at most `room`.

    With columns of 9, 2 and 6 tokens and room for 12, the caps are 5, 2 and 5: going up in length, each column gets its
    share of what is left, and what a short one does not need goes to those after it.
    """
    last_T = np.maximum(spans_T2[:, 1] - 1, spans_T2[:, 0])  # the character by which a token belongs to a column
    inside = [np.flatnonzero((last_T >= begin) & (last_T < end)) for begin, end in columns]
    left = room - (len(last_T) - sum(map(len, inside)))
    is_kept_T = np.ones(len(last_T), dtype=bool)
    for rank, tokens in enumerate(sorted(inside, key=len)):
        cap = min(len(tokens), max(left, 0) // (len(inside) - rank))
        is_kept_T[tokens[cap:]] = False
        left -= cap
    return np.flatnonzero(is_kept_T)[:room]


def concatenate(tokenizer: HashedTokenizer, parts: Iterable[np.ndarray], max_length: int) -> TokenizedTexts:
    """Samples of at most `max_length` tokens, opened and closed, end to end."""
    opening, closing = np.array(tokenizer.opening, np.int32), np.array([tokenizer.closing], np.int32)
    room = tokenizer.room(max_length)
    assert room >= 1
    pieces, lengths, truncated = [], [], []
    for number, ids in enumerate(parts):
        if len(ids) > room:
            truncated.append(number)
        kept = ids[:room]
        pieces += [opening, kept, closing]
        lengths.append(len(opening) + len(kept) + len(closing))
    tokens_T = np.concatenate([np.zeros(0, np.int32), *pieces])
    return TokenizedTexts(tokens_T, bounds_of_lengths(lengths), np.array(truncated, dtype=np.int64))


def encode_texts(tokenizer: HashedTokenizer, texts: Sequence[str], max_length: int) -> TokenizedTexts:
    return concatenate(tokenizer, (ids for ids, _ in tokenize(tokenizer, texts)), max_length)


def bounds_of_lengths(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    """The bounds of parts laid end to end, int64, from 0: lengths 3, 2 give 0, 3, 5."""
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
