"""Token classification: every token learns the tag of its word, and the majority of a word's tokens decides. F1 scores
tags of entities, accuracy other tags.

Words are joined by spaces, as in the texts that a tokenizer knows. A token belongs to the word of its last character.

Letters: T tokens, S sentences, W words of a split, C classes.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import transformers
from scipy.special import softmax
from torch import Tensor

from biphase.corpus.forms import PlacedRow, Row
from biphase.corpus.rows import text_column
from biphase.corpus.text import MARKS, UNSPACED, WORD, end_of_marks
from biphase.finetuning.config import FinetuneConfig
from biphase.finetuning.encoding import (
    NO_TEXTS,
    Batch,
    BatchModel,
    CellContext,
    EncodedSplit,
    HashedTokenizer,
    to_bounds,
)
from biphase.finetuning.families import Predicted, in_order_of_length, predict_inputs
from biphase.finetuning.kept import TEXT, KeptModel
from biphase.finetuning.loss import balance_classes, cross_entropy
from biphase.finetuning.metrics import Judgement, Rows, find_entities, tag_scores
from biphase.tasks.examples import TaggedWords, words_of
from biphase.tasks.spec import TaskSplit
from biphase.tasks.splits import TaskData


@dataclass(frozen=True)
class Split(EncodedSplit):
    tags_W: np.ndarray
    """The tag of every word, cut off or not."""
    word_bounds_S1: np.ndarray
    """The bounds of each sentence's words in `tags_W`."""
    words_T: np.ndarray
    """The word of each token, an index of `tags_W`; -1 for special tokens."""

    def targets_of(self, items: np.ndarray) -> np.ndarray:
        """List the tags of all tokens of words in some sentences."""
        bounds_S1 = self.texts.bounds_S1
        words_T = np.concatenate([self.words_T[bounds_S1[item] : bounds_S1[item + 1]] for item in items])
        return self.tags_W[words_T[words_T >= 0]]

    def balanced_weights(self, items: np.ndarray, cell: CellContext) -> np.ndarray:
        return balance_classes(np.bincount(self.targets_of(items), minlength=len(cell.task.classes)))

    def loss(self, output: Tensor, batch: Batch, items: np.ndarray, cell: CellContext) -> Tensor:
        """Compute the cross-entropy over the tokens of words."""
        words_T = self.words_T[batch.indices_T]
        targets_T = np.where(words_T >= 0, self.tags_W[words_T], -100)  # torch ignores -100
        return cross_entropy(cell, output, targets_T, self.targets_of(items))

    def classes_of(self, examples: np.ndarray) -> np.ndarray:
        bounds_S1 = self.word_bounds_S1
        return np.concatenate([self.tags_W[bounds_S1[index] : bounds_S1[index + 1]] for index in examples])

    def predict(self, model: BatchModel, cell: CellContext) -> tuple[np.ndarray, np.ndarray]:
        """Predict the tag of each word, [W], and the mean probability of this tag over the word's tokens, [W]; 0 for a
        word that was cut off."""
        classes = cell.task.classes
        num_words = len(self.tags_W)
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


def encode(data: TaskData, tokenizer: HashedTokenizer, config: FinetuneConfig) -> dict[TaskSplit, Split]:
    return {name: encode_words(examples, tokenizer, config) for name, examples in data.splits.items()}


def encode_words(examples: Sequence[TaggedWords], tokenizer: HashedTokenizer, config: FinetuneConfig) -> Split:
    split = tag_split(examples)
    sentences = [" ".join(example.words) for example in examples]
    room = tokenizer.room(config.max_length)
    parts, words = [], []
    encoded = tokenizer.tokenize(sentences, with_spans=True)
    for example, first, (ids, spans_T2) in zip(examples, split.word_bounds_S1[:-1], encoded, strict=True):
        parts.append(ids)
        # The word of each token that is not cut off, counted through the whole split, between special tokens (-1).
        last_characters = np.maximum(spans_T2[:, 1] - 1, spans_T2[:, 0])[:room]
        ends_W = np.cumsum([len(word) + 1 for word in example.words]) - 1  # a space belongs to the word after it
        inside = np.searchsorted(ends_W, last_characters, side="right").clip(max=len(ends_W) - 1)
        words += [np.full(len(tokenizer.opening), -1), first + inside, np.full(1, -1)]
    texts = tokenizer.concatenate(parts, config.max_length)
    return replace(split, texts=texts, num_truncated=len(texts.truncated), words_T=np.concatenate(words))


def tag_split(examples: Sequence[TaggedWords]) -> Split:
    """Make a split of the tags, without the words."""
    return Split(
        ids=[example.id for example in examples],
        texts=NO_TEXTS,
        num_examples=len(examples),
        num_truncated=0,
        tags_W=np.concatenate([example.tags for example in examples]).astype(np.int64),
        word_bounds_S1=to_bounds([len(example.words) for example in examples]),
        words_T=NO_TEXTS.tokens_T,
    )


UNKNOWN = -1
"""The prediction for a word that was cut off, if the tags have no O. It is always wrong, and written as ""."""


def vote(labels_T: np.ndarray, words_T: np.ndarray, num_words: int, num_labels: int, default: int) -> np.ndarray:
    """Choose the majority label of each word's tokens; of equally frequent labels, the first in the word. Words without
    tokens, which were cut off or which the tokenizer drops, get `default`."""
    # One key for each pair of word and label; for each key, its number of votes and the first token that votes so.
    inside = np.flatnonzero(words_T >= 0)
    keys = words_T[inside] * num_labels + labels_T[inside]
    counts = np.bincount(keys, minlength=num_words * num_labels)
    first = np.full(num_words * num_labels, len(words_T))
    first[keys[::-1]] = inside[::-1]  # the last write to a key stays: the earliest token
    # Both in one number, like the digits of a decimal: more votes win, then the earlier first token.
    ranks_WC = (counts * (len(words_T) + 1) - first).reshape(num_words, num_labels)
    return np.where(counts.reshape(num_words, num_labels).any(axis=1), ranks_WC.argmax(axis=1), default)


def tag_rows(split: Split, predictions: tuple[np.ndarray, np.ndarray], classes: Sequence[str]) -> Rows:
    names = np.array([*classes, ""], dtype=object)
    gold, predicted = names[split.tags_W].tolist(), names[predictions[0]].tolist()
    probabilities = predictions[1].round(5).tolist()
    rows = []
    for id, (begin, end) in zip(split.ids, pairwise(split.word_bounds_S1.tolist()), strict=True):
        row = {"id": id, "gold": gold[begin:end], "predicted": predicted[begin:end]}
        rows.append(row | {"probabilities": probabilities[begin:end]})
    return rows


SHARED = 4
"""An input that continues a text shares one word in `SHARED` with the input before it."""


def predict(model: KeptModel, network: Any, tokenizer: HashedTokenizer, rows: Sequence[PlacedRow]) -> Predicted:
    """Tag each word of a list, and name the spans of words that the tags make. Name the spans of characters of running
    text. It is divided into words if texts in training were (`tag_spans` in `tasks/examples.py`); plain tags then make
    a span of each word whose tag is not O. Other networks read it as it is (`tag_text`)."""
    task = model.task
    if model.is_ours and task.words in rows[0][1]:
        lists = [words_of(task, location, row) for location, row in rows]
        tagged = tag_lists(model, network, tokenizer, lists)
        if task.classes[0] == "O":
            for words, row in zip(lists, tagged, strict=True):
                row["spans"] = spans_of_tags(words, row["predicted"], row["probabilities"])
        return Predicted(tagged, 0, lists)
    if not model.divides_text:
        return tag_text(model, network, tokenizer, rows)
    texts = [text_column(location, row, TEXT) for location, row in rows]
    matches = [[*WORD.finditer(text)] for text in texts]
    lists = [tuple(match[0] for match in found) for found in matches]
    tagged = tag_lists(model, network, tokenizer, lists)
    predictions: list[Row] = []
    for text, found, words, row in zip(texts, matches, lists, tagged, strict=True):
        tags = row["predicted"]
        if task.classes[0] != "O":
            tags = ["O" if tag in ("", "O") else f"B-{tag}" for tag in tags]
        spans = spans_of_tags(words, tags, row["probabilities"]) if words else []
        predictions.append({"spans": [in_characters(text, found, span) for span in spans]})
    return Predicted(predictions, 0, lists)


def tag_lists(
    model: KeptModel, network: Any, tokenizer: HashedTokenizer, lists: Sequence[tuple[str, ...]]
) -> list[Row]:
    """Tag each word of each list.

    The rest of a list that is longer than an input goes into further inputs. Each begins some words earlier. Of the
    words that two inputs share, the first half take the tags of the earlier input. With inputs of 8 words, 20 words are
    in 0–8, 6–14, 12–20, and these inputs give the tags of 0–7, 7–13, 13–20.
    """
    tagged: list[Row] = [{"predicted": [], "probabilities": []} for _ in lists]
    starts = {index: 0 for index, words in enumerate(lists) if words}
    most = model.config.max_length  # more words do not fit, because a word has at least one token, but for odd signs
    while starts:
        # 1. Tag the next words of each list that has some.
        parts = [lists[index][begin : begin + most] for index, begin in starts.items()]
        sentences = [TaggedWords("", words, (0,) * len(words)) for words in parts]
        split = encode_words(sentences, tokenizer, model.config)
        sentence_rows = tag_rows(split, predict_inputs(model, network, split), model.task.classes)
        # 2. Keep the tags, and find the word from which a list continues.
        cut = set(split.texts.truncated.tolist())
        inside = split.words_T[split.words_T >= 0]
        ends = np.searchsorted(inside, split.word_bounds_S1[1:])  # the tokens before the next sentence
        inputs, starts = starts, {}
        for sentence, (index, begin) in enumerate(inputs.items()):
            num_words = len(parts[sentence])
            if sentence in cut:  # perhaps within its last word
                num_words = int(inside[ends[sentence] - 1] + 1 - split.word_bounds_S1[sentence])
            if sentence in cut or begin + num_words < len(lists[index]):
                starts[index] = max(begin + num_words - max(num_words // SHARED, 1), begin + 1)
            new = (begin + len(tagged[index]["predicted"])) // 2  # the middle of the words in both inputs
            for key in ("predicted", "probabilities"):
                tagged[index][key][new:] = sentence_rows[sentence][key][new - begin : num_words]
    return tagged


def spans_of_tags(words: Sequence[str], tags: Sequence[str], probabilities: Sequence[float]) -> list[Row]:
    """List the entities of IOB2 tags, from and up to a word. A stray I- begins an entity, as in conlleval."""
    labels, labels_U = np.unique(tags, return_inverse=True)
    spans = []
    for entity in find_entities(labels_U, np.array([0, len(tags)]), labels.tolist())[0].tolist():
        begin, last = divmod(entity // len(labels), len(tags))
        mean = round(float(np.mean(probabilities[begin : last + 1])), 5)
        text = " ".join(words[begin : last + 1])
        spans.append({"label": tags[begin][2:], "start": begin, "end": last + 1, "text": text, "probability": mean})
    return spans


def in_characters(text: str, words: Sequence[re.Match[str]], span: Row) -> Row:
    """Return a span of words, which `WORD` finds in a text, as one of characters."""
    start, end = words[span["start"]].start(), words[span["end"] - 1].end()
    return span | {"start": start, "end": end, "text": text[start:end]}


def tag_text(model: KeptModel, network: Any, tokenizer: HashedTokenizer, rows: Sequence[PlacedRow]) -> Predicted:
    """Find the spans of running texts, in characters, without dividing them into words: transformers' pipeline groups
    tokens (`simple`), and touching parts are joined, except for a foreign tagger's between characters of a script
    without spaces. Inputs overlap if a text is longer than one. Spans of blanks are left out."""
    texts = [text_column(location, row, TEXT) for location, row in rows]
    pipe: Any = transformers.pipeline(
        "token-classification",
        network,
        tokenizer=tokenizer.pretrained,
        device=network.device,
        aggregation_strategy="simple",
        stride=tokenizer.room(tokenizer.pretrained.model_max_length) // SHARED,
    )
    network.config.id2label = spell_tags(network.config.id2label)
    predictions: list[Row] = []
    for text, groups in zip(texts, in_order_of_length(lambda some: pipe(some, batch_size=32), texts), strict=True):
        spans: list[Row] = []
        for group in groups:
            words = text[group["start"] : group["end"]]
            start, stripped = group["end"] - len(words.lstrip()), words.strip()
            if stripped:
                span = {"label": group["entity_group"], "start": start, "end": start + len(stripped), "text": stripped}
                spans.append(span | {"probability": round(float(group["score"]), 5)})
        marked = [with_marks(text, span) for span in spans]
        predictions.append({"spans": join_touching(text, marked, has_borders=not model.is_ours)})
    return Predicted(predictions, 0)


def spell_tags(tags: Mapping[int, str]) -> dict[int, str]:
    """Spell tags, by their indices, as transformers' pipeline groups them, which knows `B-` and `I-`: those of BIOES
    and BILOU in IOB2, and `I-` before others with a hyphen, at which it would cut their names (`-LRB-`)."""
    marks = {tag[0] for tag in tags.values() if tag[1:2] == "-"}
    is_scheme = {*"BI"} <= marks and (marks <= {*"BIES"} or marks <= {*"BILU"})
    spelled = {}
    for index, tag in tags.items():
        if is_scheme and tag[1:2] == "-":
            tag = {"S": "B", "U": "B", "E": "I", "L": "I"}.get(tag[0], tag[0]) + tag[1:]
        elif "-" in tag and tag[:2] not in ("B-", "I-"):
            tag = f"I-{tag}"
        spelled[index] = tag
    return spelled


def with_marks(text: str, span: Row) -> Row:
    """Extend a span over the marks of its last letter."""
    end = end_of_marks(text, span["end"])
    return span | {"end": end, "text": text[span["start"] : end]}


BORDER = re.compile(f"[{UNSPACED}](?![{MARKS}])[{UNSPACED}]")
"""Two characters, the second not a mark of the first, between which a word may end without a blank."""


def join_touching(text: str, spans: Sequence[Row], *, has_borders: bool = False) -> list[Row]:
    """Join touching spans of one label, because each token of a word may have learnt its word's tag, `B-` too; but not
    at a `BORDER` if there are such. The probability is the mean over characters."""
    joined: list[Row] = []
    for span in spans:
        before = joined[-1] if joined else None
        is_border = has_borders and BORDER.match(text, max(span["start"] - 1, 0)) is not None
        if before is None or is_border or span["start"] > before["end"] or span["label"] != before["label"]:
            joined.append(span)
            continue
        begin, end = before["start"], max(before["end"], span["end"])
        lengths = [group["end"] - group["start"] for group in (before, span)]
        mean = np.average([before["probability"], span["probability"]], weights=lengths)
        whole = {"start": begin, "end": end, "text": text[begin:end], "probability": round(float(mean), 5)}
        joined[-1] = before | whole
    return joined
