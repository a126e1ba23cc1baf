"""Token classification: every token carries its word's tag, the majority of a word's tokens decides; F1 of entities,
or accuracy of tags that are none.

Words are joined by spaces, so that a tokenizer sees the text it knows; each token belongs to the word that its last
character is in.

Letters: T tokens, S sentences, W words of a split, C classes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from scipy.special import softmax
from torch import Tensor
from torch.nn.functional import cross_entropy

from biphase.finetuning.config import FinetuneConfig
from biphase.finetuning.encoding import AdditiveSplit, Batch, BatchModel, CellContext, HashedTokenizer, to_bounds
from biphase.finetuning.metrics import Judgement, Rows, tag_scores
from biphase.tasks.examples import TaggedWords
from biphase.tasks.spec import Task


@dataclass(frozen=True)
class TaggedSplit(AdditiveSplit):
    tags_W: np.ndarray
    """The tag of every word, also of those that were cut off."""
    word_bounds_S1: np.ndarray
    """Where the words of each sentence lie in `tags_W`."""
    words_T: np.ndarray
    """The word of each token; -1 for special tokens."""

    def loss(self, output: Tensor, batch: Batch, items: np.ndarray, cell: CellContext) -> Tensor:
        """The cross-entropy of the tokens of words, its mean over those of all sentences."""
        bounds_S1 = self.texts.bounds_S1
        num_targets = sum(int((self.words_T[bounds_S1[item] : bounds_S1[item + 1]] >= 0).sum()) for item in items)
        words_T = self.words_T[batch.indices_T]
        targets_T = np.where(words_T >= 0, self.tags_W[words_T], -100)  # torch's number for: no target
        return cross_entropy(output, cell.on_device(targets_T), reduction="sum") / max(num_targets, 1)

    def predict(self, model: BatchModel, cell: CellContext) -> tuple[np.ndarray, np.ndarray]:
        """The tags [W], and the mean, over a word's tokens, of the probability of its tag; 0 for words that were cut
        off."""
        classes, num_words = cell.task.classes, len(self.tags_W)
        logits_TC = self.texts.predict(model, cell)
        default = 0 if classes[0] == "O" else UNKNOWN
        tags_W = vote(logits_TC.argmax(-1), self.words_T, num_words, len(classes), default)
        probabilities_TC = softmax(logits_TC, axis=-1)
        inside = np.flatnonzero(self.words_T >= 0)
        words = self.words_T[inside]
        sums_W = np.bincount(words, probabilities_TC[inside, tags_W[words]], minlength=num_words)
        return tags_W, sums_W / np.maximum(np.bincount(words, minlength=num_words), 1)

    def judge(self, predictions: tuple[np.ndarray, np.ndarray], cell: CellContext) -> Judgement:
        rows = tag_rows(self, predictions, cell.task.classes)
        return tag_scores(rows, cell.task.classes), rows


def encode_words(
    _task: Task, examples: Sequence[TaggedWords], tokenizer: HashedTokenizer, config: FinetuneConfig
) -> TaggedSplit:
    word_bounds_S1 = to_bounds([len(example.words) for example in examples])
    sentences = [" ".join(example.words) for example in examples]
    room = tokenizer.room(config.max_length)
    parts, words = [], []
    for example, first, (ids, spans_T2) in zip(
        examples, word_bounds_S1[:-1], tokenizer.tokenize(sentences, with_spans=True), strict=True
    ):
        parts.append(ids)
        # The words of the tokens that are kept, numbered through the whole split, between special tokens (-1).
        last_characters = np.maximum(spans_T2[:, 1] - 1, spans_T2[:, 0])[:room]
        ends_W = np.cumsum([len(word) + 1 for word in example.words]) - 1  # a space belongs to the word after it
        inside = np.searchsorted(ends_W, last_characters, side="right").clip(max=len(ends_W) - 1)
        words += [np.full(len(tokenizer.opening), -1), first + inside, np.full(1, -1)]
    texts = tokenizer.concatenate(parts, config.max_length)
    return TaggedSplit(
        ids=[example.id for example in examples],
        texts=texts,
        num_examples=len(examples),
        num_truncated=len(texts.truncated),
        tags_W=np.concatenate([example.tags for example in examples]).astype(np.int64),
        word_bounds_S1=word_bounds_S1,
        words_T=np.concatenate(words),
    )


UNKNOWN = -1
"""The prediction for a word that was cut off, where no tag stands for nothing: always wrong, written as ""."""


def vote(labels_T: np.ndarray, words_T: np.ndarray, num_words: int, num_labels: int, default: int) -> np.ndarray:
    """The majority label of each word's tokens; of equally frequent ones, the one that comes first in the word.

    Words without tokens (those that were cut off) get `default`.
    """
    # One key for each pair of word and label; for each key, how many tokens vote so and the first that does.
    inside = np.flatnonzero(words_T >= 0)
    keys = words_T[inside] * num_labels + labels_T[inside]
    counts = np.bincount(keys, minlength=num_words * num_labels)
    first = np.full(num_words * num_labels, len(words_T))
    first[keys[::-1]] = inside[::-1]  # of repeated keys the last write stays: the earliest token
    # Both in one number, as the places of a decimal: more votes win, then the lower first token.
    ranks_WC = (counts * (len(words_T) + 1) - first).reshape(num_words, num_labels)
    has_tokens_W = counts.reshape(num_words, num_labels).any(axis=1)
    return np.where(has_tokens_W, ranks_WC.argmax(axis=1), default)


def tag_rows(split: TaggedSplit, predictions: tuple[np.ndarray, np.ndarray], classes: Sequence[str]) -> Rows:
    names = np.array([*classes, ""], dtype=object)
    gold, predicted = names[split.tags_W].tolist(), names[predictions[0]].tolist()
    probabilities = predictions[1].round(5).tolist()
    rows = []
    for id, (begin, end) in zip(split.ids, pairwise(split.word_bounds_S1.tolist()), strict=True):
        row = {"id": id, "gold": gold[begin:end], "predicted": predicted[begin:end]}
        rows.append(row | {"probabilities": probabilities[begin:end]})
    return rows
