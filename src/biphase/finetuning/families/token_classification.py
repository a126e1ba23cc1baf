"""Token classification: every token carries its word's tag, the majority of a word's tokens decides, entity F1.

Words are joined by spaces, so that a tokenizer sees the text it knows; each token belongs to the word that its last
character is in.

Letters: T tokens, S sentences, W words of a split, C classes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from biphase.finetuning.batches import Batch, backward_by_parts, evaluation_batches, on_device
from biphase.finetuning.cell import CellContext
from biphase.finetuning.config import FinetuneConfig
from biphase.finetuning.encoding import KeyedTokenizer, Texts, cumulate, flatten, join, tokenize
from biphase.finetuning.heads import TokenClassifier
from biphase.finetuning.metrics.tagging import token_metrics
from biphase.tasks.examples import TaggedWords, TaskData
from biphase.tasks.spec import Task

ENCODING_SETTINGS: tuple[str, ...] = ()

IGNORED = -100
"""The target of a token that has none (torch's convention)."""


@dataclass(frozen=True)
class Split:
    ids: tuple[str, ...]
    texts: Texts
    tags_W: np.ndarray
    """The tag of every word, also of those that were cut off."""
    word_bounds_S1: np.ndarray
    """Where the words of each sentence lie in `tags_W`."""
    words_T: np.ndarray
    """The word of each token; -1 for special tokens."""

    @property
    def num_examples(self) -> int:
        return len(self.ids)

    @property
    def num_truncated(self) -> int:
        return len(self.texts.truncated)


@dataclass(frozen=True)
class Encoded:
    train: Split
    validation: Split
    test: Split
    left_out: int


def encode_task(data: TaskData, keyed: KeyedTokenizer, config: FinetuneConfig) -> Encoded:
    train, validation, test = (
        encode_split(examples, keyed, config.max_length)  # type: ignore[arg-type]
        for examples in (data.train, data.validation, data.test)
    )
    return Encoded(train, validation, test, data.left_out)


def encode_split(examples: Sequence[TaggedWords], keyed: KeyedTokenizer, max_length: int) -> Split:
    word_bounds_S1 = cumulate([len(example.words) for example in examples])
    ids, words = [], []
    room = max_length - len(keyed.opening) - 1
    sentences = [" ".join(example.words) for example in examples]
    for example, first, tokens in zip(
        examples, word_bounds_S1.tolist(), tokenize(keyed, sentences, with_spans=True), strict=False
    ):
        assert tokens.spans is not None
        last_characters = np.maximum(tokens.spans[:, 1] - 1, tokens.spans[:, 0])[:room]
        ids.append(tokens.ids)
        words += [[-1] * len(keyed.opening), (first + words_of_tokens(example.words, last_characters)).tolist(), [-1]]
    return Split(
        ids=tuple(example.id for example in examples),
        texts=join(keyed, ids, max_length),
        tags_W=flatten(example.tags for example in examples),
        word_bounds_S1=word_bounds_S1,
        words_T=flatten(words),
    )


def words_of_tokens(words: Sequence[str], last_characters: np.ndarray) -> np.ndarray:
    """The number of the word that each token's last character is in; a space belongs to the word after it."""
    ends_W = np.cumsum([len(word) + 1 for word in words]) - 1
    return np.minimum(np.searchsorted(ends_W, last_characters, side="right"), len(words) - 1)


def training_items(encoded: Encoded) -> Texts:
    return encoded.train.texts


def build(backbone: nn.Module, task: Task, config: FinetuneConfig) -> nn.Module:
    return TokenClassifier(backbone, len(task.classes), config.head_dropout)


def accumulate_gradients(model: nn.Module, encoded: Encoded, samples: np.ndarray, cell: CellContext) -> Tensor:
    """The mean loss over the tokens of words in `samples`, and its gradient."""
    split = encoded.train
    num_special = sum((split.words_T[a:b] < 0).sum() for a, b in bounds_of(split.texts, samples))
    num_targets = max(split.texts.count_tokens(samples) - int(num_special), 1)

    def loss_of(batch: Batch) -> Tensor:
        logits_TC = model(batch.tokens_T, batch.positions_T, batch.layout)
        words = split.words_T[batch.places_T]
        targets = on_device(np.where(words >= 0, split.tags_W[words], IGNORED), cell.compute)
        return cross_entropy(logits_TC, targets, ignore_index=IGNORED, reduction="sum") / num_targets

    return backward_by_parts(split.texts, samples, cell.compute, loss_of)


def bounds_of(texts: Texts, samples: np.ndarray) -> Iterator[tuple[int, int]]:
    return zip(texts.bounds_S1[samples].tolist(), texts.bounds_S1[samples + 1].tolist(), strict=True)


def predict(model: nn.Module, encoded: Encoded, split_name: str, cell: CellContext) -> np.ndarray:
    """The tag of each word of a split."""
    split: Split = getattr(encoded, split_name)
    classes = cell.task.classes
    labels_T = np.zeros(len(split.texts.tokens_T), dtype=np.int64)
    for batch, logits_TC in evaluation_batches(model, split.texts, np.arange(split.num_examples), cell.compute):
        labels_T[batch.places_T] = logits_TC.argmax(-1).cpu().numpy()
    return vote(labels_T, split.words_T, len(split.tags_W), len(classes), default=classes.index("O"))


def vote(labels_T: np.ndarray, words_T: np.ndarray, num_words: int, num_labels: int, default: int) -> np.ndarray:
    """The majority label of each word's tokens; of equally frequent ones, the one that comes first in the word.

    Words without tokens (those that were cut off) get `default`.
    """
    inside = np.flatnonzero(words_T >= 0)
    keys = words_T[inside] * num_labels + labels_T[inside]
    counts = np.bincount(keys, minlength=num_words * num_labels)
    first = np.full(num_words * num_labels, len(words_T))
    first[keys[::-1]] = inside[::-1]  # of repeated keys the last write stays: the earliest token
    ranks_WC = (counts * (len(words_T) + 1) - first).reshape(num_words, num_labels)
    has_tokens_W = counts.reshape(num_words, num_labels).any(axis=1)
    return np.where(has_tokens_W, ranks_WC.argmax(axis=1), default)


def measure(encoded: Encoded, split_name: str, predicted_W: np.ndarray, cell: CellContext) -> dict[str, float]:
    split: Split = getattr(encoded, split_name)
    return token_metrics(split.tags_W, predicted_W, split.word_bounds_S1, cell.task.classes)


def records(encoded: Encoded, split_name: str, predicted_W: np.ndarray, cell: CellContext) -> Iterator[dict[str, Any]]:
    split: Split = getattr(encoded, split_name)
    names = np.array(cell.task.classes, dtype=object)
    gold, predicted = names[split.tags_W].tolist(), names[predicted_W].tolist()
    for id, (begin, end) in zip(split.ids, pairwise(split.word_bounds_S1.tolist()), strict=True):
        yield {"id": id, "gold": gold[begin:end], "predicted": predicted[begin:end]}
