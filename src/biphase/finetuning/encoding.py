"""Texts → flat token ids, kept on disk by what they were made from, so that a text is tokenized once per tokenizer.

An input is its text and the tokenizer's end-of-text token; where a tokenizer opens inputs with a classification token
(BERT's), that comes first. Names of special tokens inside a text are read as ordinary text.

Letters: T tokens, S samples, U tokens in use.
"""

import dataclasses
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from biphase.files import read_json, whole_folder

TEXTS_PER_CALL = 50_000
"""So that the tokenizer's own records of a large task never fill the memory."""

Record = TypeVar("Record")


@dataclass(frozen=True)
class KeyedTokenizer:
    """A tokenizer that counts as equal to any other with the same hash, so that what it encoded can be kept."""

    hash: str
    tokenizer: Any = field(compare=False, repr=False)

    @property
    def opening(self) -> list[int]:
        """What stands before every text: the classification token of a tokenizer that has one."""
        tokenizer = self.tokenizer
        has_pair = tokenizer.cls_token_id is not None and tokenizer.sep_token_id is not None
        return [tokenizer.cls_token_id] if has_pair else []

    @property
    def closing(self) -> int:
        tokenizer = self.tokenizer
        return tokenizer.sep_token_id if self.opening else tokenizer.eos_token_id


@dataclass(frozen=True)
class Texts:
    """Samples as token ids, end to end."""

    tokens_T: np.ndarray
    """int32."""
    bounds_S1: np.ndarray
    """int64: sample s is `tokens_T[bounds_S1[s] : bounds_S1[s + 1]]`."""
    truncated: np.ndarray
    """The samples that were cut at the end, ascending."""

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

    def items_of(self, examples: np.ndarray) -> np.ndarray:
        """The training items of examples: each sample is an example of its own."""
        return examples

    def count_tokens(self, samples: np.ndarray) -> int:
        return int((self.bounds_S1[samples + 1] - self.bounds_S1[samples]).sum())


@dataclass(frozen=True)
class Tokens:
    """One text without special tokens: ids, and where each token begins and ends in it, in characters."""

    ids: np.ndarray
    spans: np.ndarray | None


def tokenize(keyed: KeyedTokenizer, texts: Sequence[str], *, with_spans: bool = False) -> Iterator[Tokens]:
    """The tokens of each text, in order, neither opened nor closed nor cut."""
    from tokenizers import Tokenizer

    backend = Tokenizer.from_str(keyed.tokenizer.backend_tokenizer.to_str())
    backend.no_padding()
    backend.no_truncation()
    backend.encode_special_tokens = True
    encode = backend.encode_batch if with_spans else backend.encode_batch_fast
    for begin in range(0, len(texts), TEXTS_PER_CALL):
        for encoding in encode(texts[begin : begin + TEXTS_PER_CALL], add_special_tokens=False):
            spans = np.array(encoding.offsets, dtype=np.int32).reshape(-1, 2) if with_spans else None
            yield Tokens(np.array(encoding.ids, dtype=np.int32), spans)


def join(keyed: KeyedTokenizer, parts: Iterable[np.ndarray], max_length: int) -> Texts:
    """Samples of at most `max_length` tokens, opened and closed."""
    opening, closing = np.array(keyed.opening, np.int32), np.array([keyed.closing], np.int32)
    room = max_length - len(opening) - len(closing)
    assert room >= 1
    pieces, lengths, truncated = [], [], []
    for number, ids in enumerate(parts):
        if len(ids) > room:
            truncated.append(number)
        kept = ids[:room]
        pieces += [opening, kept, closing]
        lengths.append(len(opening) + len(kept) + len(closing))
    tokens_T = np.concatenate([np.zeros(0, np.int32), *pieces])
    return Texts(tokens_T, cumulate(lengths), np.array(truncated, dtype=np.int64))


def encode(keyed: KeyedTokenizer, texts: Sequence[str], max_length: int) -> Texts:
    return join(keyed, (tokens.ids for tokens in tokenize(keyed, texts)), max_length)


def cumulate(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    """Bounds of parts laid end to end, int64, from 0."""
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


def flatten(lists: Iterable[Iterable[int]]) -> np.ndarray:
    return np.fromiter(chain.from_iterable(lists), dtype=np.int64)


def cache_folder() -> Path:
    """Where encoded tasks are kept: $BIPHASE_CACHE, else biphase/ in the user's cache folder. Safe to delete."""
    given = os.environ.get("BIPHASE_CACHE")
    return Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "biphase"


def save_record(folder: Path, record: Any) -> None:
    """Write a dataclass of arrays, plain values and such dataclasses as a folder, whole or not at all."""
    with whole_folder(folder) as part:
        arrays: dict[str, np.ndarray] = {}
        plain = split_arrays(record, "", arrays)
        for name, array in arrays.items():
            np.save(part / f"{name}.npy", array, allow_pickle=False)
        (part / "record.json").write_text(json.dumps(plain, ensure_ascii=False), encoding="utf-8")


def split_arrays(record: Any, prefix: str, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for item in dataclasses.fields(record):
        value, name = getattr(record, item.name), f"{prefix}{item.name}"
        if isinstance(value, np.ndarray):
            arrays[name] = value
        elif dataclasses.is_dataclass(value):
            plain[item.name] = split_arrays(value, f"{name}.", arrays)
        else:
            plain[item.name] = value
    return plain


def load_record(folder: Path, kind: type[Record]) -> Record:
    """What `save_record` wrote; arrays are mapped from the disk, read-only. Lists come back as tuples."""
    return join_arrays(folder, kind, "", read_json(folder / "record.json"))


def join_arrays(folder: Path, kind: Any, prefix: str, plain: dict[str, Any]) -> Any:
    values = {}
    for item in dataclasses.fields(kind):
        name = f"{prefix}{item.name}"
        if item.name not in plain:
            values[item.name] = np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False)
        elif dataclasses.is_dataclass(item.type):
            values[item.name] = join_arrays(folder, item.type, f"{name}.", plain[item.name])
        else:
            values[item.name] = frozen(plain[item.name])
    return kind(**values)


def frozen(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(frozen(inner) for inner in value)
    return value
