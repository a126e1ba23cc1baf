"""A fine-tuned model folder and the rows of a file → the rows with predictions, streamed.

A folder that `finetune --keep` wrote says what its inputs look like: they are made, and outputs read, as when it was
scored. Running texts to tag, and any other folder with a head for classification, go through transformers' pipelines.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from transformers import pipeline

from biphase.console import err
from biphase.corpus.rows import PlacedRow, Row
from biphase.encoder.network import load_model_config, load_weights
from biphase.encoder.packed import position_limit
from biphase.errors import InputError
from biphase.finetuning.encoding import CellContext, HashedTokenizer, predict_samples
from biphase.finetuning.families import question_answering, retrieval, sequence_classification, token_classification
from biphase.finetuning.heads import PaddedNetwork, load_hashed_tokenizer
from biphase.finetuning.keep import AUTO_CLASSES
from biphase.finetuning.kept import TEXT, KeptModel, check_columns, input_columns, with_task_names
from biphase.finetuning.metrics import find_entities
from biphase.tasks.examples import (
    ChoiceTexts,
    LabelledText,
    Question,
    TaggedWords,
    TaskData,
    fill_choices,
    fill_row,
    find_answer,
    lacks_text,
    read_choices,
    read_spans,
    words_of,
)
from biphase.tasks.sources import text_column
from biphase.tasks.spec import Family, Task

ROWS_AT_ONCE = 512
"""Rows that are read, sorted by length and predicted together."""

SHARED = 4
"""An input that goes on where a text was cut shares one part in so many with the input before it."""

Predictor = Callable[["Predicting", Sequence[PlacedRow]], tuple[Iterable[Row], int]]
"""Rows with their places → what is predicted for each, and of how many rows something was cut off."""


@dataclass(frozen=True)
class Predicting:
    """A loaded model, and what its inputs look like."""

    origin: KeptModel
    model: Any
    tokenizer: HashedTokenizer
    device: torch.device

    @property
    def cell(self) -> CellContext:
        assert self.origin.record is not None
        return CellContext(self.task, self.origin.record.config, self.device, torch.float32)

    @property
    def network(self) -> PaddedNetwork:
        return PaddedNetwork(self.model)

    @property
    def task(self) -> Task:
        return self.origin.task


def open_model(kept: KeptModel, device: torch.device) -> Predicting:
    """Load a model folder or a hub model."""
    config: Any = load_model_config(kept.folder)
    model = load_weights(AUTO_CLASSES[kept.family], kept.folder, config, attention=None).eval().to(device)
    tokenizer = load_hashed_tokenizer(kept.folder)
    limit = position_limit(model) or tokenizer.pretrained.model_max_length  # many a tokenizer names none
    tokenizer.pretrained.model_max_length = min(limit, tokenizer.pretrained.model_max_length)
    return Predicting(kept, model, tokenizer, device)


@torch.no_grad()
def predict_placed(predicting: Predicting, rows: Iterator[PlacedRow], name: str) -> Iterator[Row]:
    """The rows of the file `name`, each with what is predicted for it, in order and as they are needed.

    Tells in the end how many were cut. Raises `InputError` naming the row that lacks a column, or has one that a
    prediction would take.
    """
    num_rows = num_cut = num_empty = 0
    while chunk := list(itertools.islice(rows, ROWS_AT_ONCE)):
        # By the model's kind, and for tagging by whether rows are words or running text.
        is_kept = predicting.origin.record is not None
        named = [(place, with_task_names(predicting.task, predicting.origin.layout, row)) for place, row in chunk]
        has_words = is_kept and predicting.task.words in named[0][1]
        predict = (PREDICTORS if is_kept else PIPELINE_PREDICTORS)[predicting.task.family]
        if predict is tag_words and not has_words:
            predict = tag_text
        is_empty = [False] * len(chunk)
        if predicting.task.family == "sequence_classification":
            is_empty = [lacks_text(predicting.task, place, row) for place, row in named]
            blank = dict.fromkeys(input_columns(predicting.task), "")
            named = [(place, blank if empty else row) for (place, row), empty in zip(named, is_empty, strict=True)]
            num_empty += sum(is_empty)
        found, num_cut_here = predict(predicting, named)
        num_rows, num_cut = num_rows + len(chunk), num_cut + num_cut_here
        for (place, row), predicted, empty in zip(chunk, found, is_empty, strict=True):
            taken = sorted(row.keys() & predicted.keys())
            if taken:
                raise InputError(f"{place}: the file has a column '{taken[0]}' already; rename it")
            if empty:  # the same columns without values
                predicted = {
                    key: dict.fromkeys(value) if isinstance(value, dict) else None for key, value in predicted.items()
                }
            yield row | predicted
    if num_empty:
        err.print(f"{name}: {num_empty:,} of {num_rows:,} rows have no text: nothing is predicted for them")
    if num_cut:
        limit = predicting.tokenizer.pretrained.model_max_length
        err.print(f"{name}: {num_cut:,} of {num_rows:,} rows were too long and cut at {limit:,} tokens")


def choose(predicting: Predicting, rows: Sequence[PlacedRow]) -> tuple[Iterable[Row], int]:
    """The name of the best choice, the row's own where it has a name for each, and the probability of each."""
    task, config = predicting.task, predicting.cell.config
    names, made = [], []
    for place, row in rows:
        texts, own = read_choices(predicting.task, place, row)
        own = own[: len(texts)]
        names.append(own if own and len({*own}) == len(own) else task.classes)
        if len(texts) > len(names[-1]):
            raise InputError(f"{place}: {len(texts)} choices, where task '{task.name}' names {len(task.classes)}")
        made.append(ChoiceTexts(place, fill_choices(predicting.task, place, row, texts), 0))
    data = TaskData(task, predicting.origin.name, (), (), tuple(made), 0)
    split = sequence_classification.encode_choices(data, predicting.tokenizer, config).splits["test"]
    scores_S1 = sequence_classification.predict_labels(predicting.network, split, predicting.cell)
    parts = zip(np.split(scores_S1[:, 0], split.bounds_Q1[1:-1]), names, strict=True)
    return [sequence_classification.best_choice(*part) for part in parts], split.num_truncated


def score_pairs(predicting: Predicting, rows: Sequence[PlacedRow]) -> tuple[Iterable[Row], int]:
    """How well each row's `document` answers its `query`: the higher, the better."""
    pairs = []
    for place, row in rows:
        query, document = (text_column(place, row, name) for name in ("query", "document"))
        pairs.append((query, document))
    texts = retrieval.encode_pairs(predicting.tokenizer, pairs, predicting.cell.config.max_length)
    scores_S = predict_samples(predicting.network, texts, 1, predicting.cell)[:, 0]
    return [{"predicted": round(score, 5)} for score in scores_S.tolist()], len(texts.truncated)


def classify(predicting: Predicting, rows: Sequence[PlacedRow]) -> tuple[Iterable[Row], int]:
    """The label, its probability, and that of each label; labels; or a number. Pairs are cut as in training."""
    filled = [(place, *fill_row(predicting.task, place, row)) for place, row in rows]
    no_label = () if predicting.task.problem_type == "multi_label_classification" else 0
    examples = tuple(LabelledText(place, text, no_label, columns) for place, text, columns in filled)
    data = TaskData(predicting.task, predicting.origin.name, (), (), examples, 0)
    split = sequence_classification.encode_labelled(data, predicting.tokenizer, predicting.cell.config).splits["test"]
    logits_SC = sequence_classification.predict_labels(predicting.network, split, predicting.cell)
    return sequence_classification.read_outputs(predicting.task, logits_SC), split.num_truncated


def classify_as_pipeline(predicting: Predicting, rows: Sequence[PlacedRow]) -> tuple[Iterable[Row], int]:
    texts = [fill_row(predicting.task, place, row)[0] for place, row in rows]
    tokenizer = predicting.tokenizer.pretrained
    lengths = map(len, tokenizer(texts, truncation=False, verbose=False)["input_ids"])
    pipe = pipeline("text-classification", predicting.model, tokenizer=tokenizer, device=predicting.device)
    is_single = predicting.model.config.problem_type != "multi_label_classification"
    found: list[Row] = []
    for scores in in_order_of_length(lambda part: pipe(part, top_k=None, truncation=True, batch_size=32), texts):
        if len(scores) == 1:  # a number, with no class
            found.append({"predicted": scores[0]["score"]})
        else:
            named = {one["label"]: one["score"] for one in scores}
            found.append(sequence_classification.labelled(named, is_single))
    return found, sum(length > tokenizer.model_max_length for length in lengths)


def tag_words(predicting: Predicting, rows: Sequence[PlacedRow]) -> tuple[Iterable[Row], int]:
    """A tag for each word of a list, and the spans of words that tags make.

    Where a list is longer than an input, what was cut off is tagged in further inputs, each of which begins some words
    earlier: of the words in two inputs, the first half have the tags of the earlier one. With inputs of 8 words, 20
    words are in 0–8, 6–14, 12–20, and the tags are those of 0–7, 7–13, 13–20.
    """
    lists = [words_of(predicting.task, place, row) for place, row in rows]
    tags: list[list[str]] = [[] for _ in lists]
    probabilities: list[list[float]] = [[] for _ in lists]
    starts = dict.fromkeys(range(len(lists)), 0)
    while starts:
        examples = [TaggedWords("", words, (0,) * len(words)) for words in (lists[n][at:] for n, at in starts.items())]
        inputs, starts = starts, {}
        for (number, begin), (found_tags, found_probabilities, is_cut) in zip(
            inputs.items(), tag_sentences(predicting, examples), strict=True
        ):
            end = begin + len(found_tags)
            new = (begin + len(tags[number])) // 2  # the middle of the words that are in both inputs
            tags[number][new:] = found_tags[new - begin :]
            probabilities[number][new:] = found_probabilities[new - begin :]
            if is_cut:  # within its last word, it may be
                starts[number] = max(end - max(len(found_tags) // SHARED, 1), begin + 1)
    found: list[Row] = [{"predicted": one, "probabilities": its} for one, its in zip(tags, probabilities, strict=True)]
    if predicting.task.classes[0] == "O":
        for words, row in zip(lists, found, strict=True):
            row["spans"] = spans_of_tags(words, row["predicted"], row["probabilities"])
    return found, 0


def tag_sentences(
    predicting: Predicting, examples: Sequence[TaggedWords]
) -> Iterator[tuple[list[str], list[float], bool]]:
    """For each sentence the tags and probabilities of the words that are in its input, and whether some were cut."""
    split = token_classification.encode_sentences(examples, predicting.tokenizer, predicting.cell.config.max_length)
    made = token_classification.predict_tags(predicting.network, split, predicting.cell)
    cut = set(split.texts.truncated.tolist())
    inside = split.words_T[split.words_T >= 0]
    ends = np.searchsorted(inside, split.word_bounds_S1[1:])  # how many tokens stand in front of the next sentence
    for number, row in enumerate(token_classification.tag_rows(split, made, predicting.task.classes)):
        is_cut = number in cut
        kept = int(inside[ends[number] - 1] + 1 - split.word_bounds_S1[number]) if is_cut else None
        yield row["predicted"][:kept], row["probabilities"][:kept], is_cut


def spans_of_tags(words: Sequence[str], tags: Sequence[str], probabilities: Sequence[float]) -> list[Row]:
    """The entities of IOB2 tags, from and up to a word; a stray I- begins one, as conlleval reads it."""
    labels, numbers_U = np.unique(tags, return_inverse=True)
    spans = []
    for entity in find_entities(numbers_U, np.array([0, len(tags)]), labels.tolist())[0].tolist():
        begin, last = divmod(entity // len(labels), len(tags))
        mean = round(float(np.mean(probabilities[begin : last + 1])), 5)
        text = " ".join(words[begin : last + 1])
        spans.append({"label": tags[begin][2:], "start": begin, "end": last + 1, "text": text, "probability": mean})
    return spans


def tag_text(predicting: Predicting, rows: Sequence[PlacedRow]) -> tuple[Iterable[Row], int]:
    """The spans of running texts, in characters, as transformers' pipeline groups tokens (`simple`) and the parts of a
    word are joined, in inputs that overlap where a text is longer than one. Spans of blanks alone are left out."""
    for place, row in rows:
        check_columns(predicting.origin, place, row)
    texts = [text_column(place, row, TEXT) for place, row in rows]
    pipe: Any = pipeline(
        "token-classification",
        predicting.model,
        tokenizer=predicting.tokenizer.pretrained,
        device=predicting.device,
        aggregation_strategy="simple",
        stride=predicting.tokenizer.room(predicting.tokenizer.pretrained.model_max_length) // SHARED,
    )
    found_spans: list[Row] = []
    for text, groups in zip(texts, in_order_of_length(lambda part: pipe(part, batch_size=32), texts), strict=True):
        spans: list[Row] = []
        for group in groups:
            found = text[group["start"] : group["end"]]
            start = group["end"] - len(found.lstrip())
            label, score = group["entity_group"], round(float(group["score"]), 5)
            stripped = found.strip()
            end = start + len(stripped)
            if stripped:
                spans.append({"label": label, "start": start, "end": end, "text": stripped, "probability": score})
        found_spans.append({"spans": join_touching(text, spans)})
    return found_spans, 0


def join_touching(text: str, spans: Sequence[Row]) -> list[Row]:
    """Spans in which those of one label with nothing between them are one: each token of a word was trained to carry
    its word's tag, `B-` too. Its probability is the mean over characters."""
    joined: list[Row] = []
    for span in spans:
        before = joined[-1] if joined else None
        if before is None or span["start"] > before["end"] or span["label"] != before["label"]:
            joined.append(span)
            continue
        begin, end = before["start"], max(before["end"], span["end"])
        parts = before, span
        lengths = [part["end"] - part["start"] for part in parts]
        mean = np.average([part["probability"] for part in parts], weights=lengths)
        whole = {"start": begin, "end": end, "text": text[begin:end], "probability": round(float(mean), 5)}
        joined[-1] = before | whole
    return joined


def in_order_of_length(predict: Callable[[list[str]], list[Any]], texts: Sequence[str]) -> list[Any]:
    """What is predicted for texts, which are batched with others of their length."""
    order = sorted(range(len(texts)), key=lambda number: -len(texts[number]))
    found: list[Any] = [None] * len(texts)
    for number, one in zip(order, predict([texts[number] for number in order]), strict=True):
        found[number] = one
    return found


def answer_questions(predicting: Predicting, rows: Sequence[PlacedRow]) -> tuple[Iterable[Row], int]:
    """The answer, where it stands in the context, its probability, and how much better no answer is."""
    assert predicting.origin.record is not None
    examples = []
    for number, (place, row) in enumerate(rows):
        question, context = (text_column(place, row, name) for name in ("question", "context"))
        if not context.strip():
            raise InputError(f"{place}: the context is empty")
        spans = read_spans(place, "candidates", row["candidates"]) if "candidates" in row else []
        candidates = tuple(find_answer(place, context, text, start) for text, start in spans)
        examples.append(Question(str(number), question, context, (), candidates))
    config = predicting.cell.config
    has_unanswerable = predicting.origin.record.has_unanswerable
    split = question_answering.encode_questions(
        predicting.task, examples, predicting.tokenizer, config, has_unanswerable
    )
    split = replace(split, max_answer_tokens=config.max_answer_tokens or split.max_answer_tokens)
    found = question_answering.predict_answers(predicting.network, split, predicting.cell)
    answers: list[Row] = []
    numbers = (found.probabilities_Q.tolist(), found.no_answer_scores_Q.tolist())
    for text, (start, end), probability, no_answer in zip(
        found.texts, found.characters_Q2.tolist(), *numbers, strict=True
    ):
        place_of = {"start": start, "end": end} if text else {"start": None, "end": None}
        no_answer_score = {"no_answer_score": round(no_answer, 5)} if has_unanswerable else {}
        answers.append({"predicted": text, **place_of, "probability": round(probability, 5)} | no_answer_score)
    return answers, split.num_truncated


PREDICTORS: dict[Family, Predictor] = {
    "question_answering": answer_questions,
    "token_classification": tag_words,
    "multiple_choice": choose,
    "retrieval": score_pairs,
    "sequence_classification": classify,
}
PIPELINE_PREDICTORS: dict[Family, Predictor] = {
    "token_classification": tag_text,
    "sequence_classification": classify_as_pipeline,
}
"""How the rows for a folder that we kept are predicted, and those for any other."""
