"""A fine-tuned model folder and the rows of a file → the rows with predictions, streamed.

A folder that `finetune --keep` wrote says what its inputs look like: they are made, and outputs read, as when it was
scored. Running texts to tag, and any other folder with a head for classification, go through transformers' pipelines.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import pipeline

from biphase.console import err
from biphase.corpus.rows import LONGEST_TEXT, PlacedRow, Row, column
from biphase.corpus.tokenizer import load_tokenizer
from biphase.encoder.network import load_weights
from biphase.errors import InputError
from biphase.finetuning.encoding import CellContext, EncodedSplit, HashedTokenizer, TokenizedTexts
from biphase.finetuning.families import question_answering, retrieval, sequence_classification, token_classification
from biphase.finetuning.heads import AUTO_CLASSES, padded_logits
from biphase.finetuning.kept import TEXT, KeptModel, input_columns, with_task_names
from biphase.finetuning.metrics import find_entities
from biphase.hub import position_limit
from biphase.tasks import examples
from biphase.tasks.sources import text_column
from biphase.tasks.spec import Family

ROWS_AT_ONCE = 512
"""Rows that are read, sorted by length and predicted together; fewer where they have `LONGEST_TEXT` characters."""

SHARED = 4
"""An input that goes on where a text was cut shares one part in so many with the input before it."""

Predicted = tuple[Iterable[Row], int]
"""What is predicted for each row, and of how many rows something was cut off."""


@torch.no_grad()
def predict_placed(model: KeptModel, rows: Iterator[PlacedRow], name: str, device: torch.device) -> Iterator[Row]:
    """Give the rows of the file `name`, each with what is predicted for it, in order and as they are needed.

    Tells in the end how many were cut. Raises `InputError` naming the row that lacks a column, or has one that a
    prediction would take.
    """
    network: Any = load_weights(AUTO_CLASSES[model.task.family], model.folder, attention=None).eval().to(device)
    if not all(bool(weight.isfinite().all()) for weight in network.parameters()):
        raise InputError(f"{model.folder} has weights that are no finite numbers; take it from where it is whole")
    tokenizer = HashedTokenizer(load_tokenizer(model.folder))
    limit = position_limit(network) or tokenizer.pretrained.model_max_length  # many a tokenizer names none
    tokenizer.pretrained.model_max_length = limit = min(limit, tokenizer.pretrained.model_max_length)
    predict = PREDICTORS[model.task.family]
    num_rows = num_cut = num_empty = 0
    for chunk in in_chunks(rows):
        named = [(origin, with_task_names(model.task, model.layout, row)) for origin, row in chunk]
        predictions, num_cut_here = predict(model, network, tokenizer, named)
        num_rows, num_cut = num_rows + len(chunk), num_cut + num_cut_here
        for (origin, row), prediction in zip(chunk, predictions, strict=True):
            if doubles := sorted(row.keys() & prediction.keys()):
                raise InputError(f"{origin}: the file has a column '{doubles[0]}' already; rename it")
            num_empty += prediction.get("predicted", "") is None
            yield row | prediction
    if num_empty:
        err.print(f"{name}: {num_empty:,} of {num_rows:,} rows have no text: nothing is predicted for them")
    if num_cut:
        err.print(f"{name}: {num_cut:,} of {num_rows:,} rows were too long and cut at {limit:,} tokens")


def in_chunks(rows: Iterable[PlacedRow]) -> Iterator[list[PlacedRow]]:
    """Yield the rows that are predicted together."""
    chunk: list[PlacedRow] = []
    num_chars = 0
    for placed in rows:
        chunk.append(placed)
        num_chars += len(str(placed[1]))
        if len(chunk) == ROWS_AT_ONCE or num_chars >= LONGEST_TEXT:
            yield chunk
            chunk, num_chars = [], 0
    if chunk:
        yield chunk


def predict_inputs(model: KeptModel, network: Any, inputs: EncodedSplit | TokenizedTexts) -> Any:
    """Predict for encoded inputs, with a class of transformers with its head."""
    cell = CellContext(model.task, model.config, network.device, torch.float32)
    return inputs.predict(partial(padded_logits, network), cell)


def choose(model: KeptModel, network: Any, tokenizer: HashedTokenizer, rows: Sequence[PlacedRow]) -> Predicted:
    """Name the best choice, by the row's own name where it has a name for each, and the probability of each."""
    task = model.task
    names, inputs = [], []
    for origin, row in rows:
        choices, labels = examples.read_choices(task, origin, row)
        names.append(labels if labels and len({*labels}) == len(labels) else task.classes)
        if len(choices) > len(names[-1]):
            raise InputError(f"{origin}: {len(choices)} choices, where task '{task.name}' names {len(task.classes)}")
        inputs.append(examples.LabelledText(origin, choices, 0))
    split = sequence_classification.encode_choices(task, inputs, tokenizer, model.config)
    scores_S1 = predict_inputs(model, network, split)
    parts = zip(np.split(scores_S1[:, 0], split.bounds_Q1[1:-1]), names, strict=True)
    return [sequence_classification.best_choice(*part) for part in parts], split.num_truncated


def score_pairs(model: KeptModel, network: Any, tokenizer: HashedTokenizer, rows: Sequence[PlacedRow]) -> Predicted:
    """Score how well each row's `document` answers its `query`: the higher, the better."""
    pairs = [(text_column(origin, row, "query"), text_column(origin, row, "document")) for origin, row in rows]
    texts = retrieval.encode_pairs(tokenizer, pairs, model.config.max_length)
    scores_S = predict_inputs(model, network, texts)[:, 0]
    return [{"predicted": round(score, 5)} for score in scores_S.tolist()], len(texts.truncated)


def classify(model: KeptModel, network: Any, tokenizer: HashedTokenizer, rows: Sequence[PlacedRow]) -> Predicted:
    """The label, its probability, and that of each label; labels; or a number. Pairs are cut as in training. A row
    without a text has the same columns without values."""
    task, blank = model.task, dict.fromkeys(input_columns(model.task), "")
    is_empty = [examples.lacks_text([column(origin, row, name) for name in blank]) for origin, row in rows]
    no_label = () if task.problem_type == "multi_label_classification" else 0
    inputs = []
    for (origin, row), empty in zip(rows, is_empty, strict=True):
        text = examples.fill_row(task, origin, blank if empty else row)
        inputs.append(examples.LabelledText(origin, (text,), no_label))
    if not model.is_ours:
        texts = [*map(examples.input_of, inputs)]
        predictions, num_cut = classify_as_pipeline(network, tokenizer.pretrained, texts)
    else:
        split = sequence_classification.encode_labelled(task, inputs, tokenizer, model.config)
        logits_SC = predict_inputs(model, network, split)
        predictions, num_cut = [*sequence_classification.read_outputs(task, logits_SC)], split.num_truncated
    for number in np.flatnonzero(is_empty):
        values = predictions[number].items()
        predictions[number] = {key: dict.fromkeys(value) if isinstance(value, dict) else None for key, value in values}
    return predictions, num_cut


def classify_as_pipeline(network: Any, tokenizer: Any, texts: Sequence[str]) -> tuple[list[Row], int]:
    lengths = map(len, tokenizer(texts, truncation=False, verbose=False)["input_ids"])
    pipe = pipeline("text-classification", network, tokenizer=tokenizer, device=network.device)
    is_single = network.config.problem_type != "multi_label_classification"
    predictions: list[Row] = []
    for scores in in_order_of_length(lambda part: pipe(part, top_k=None, truncation=True, batch_size=32), texts):
        if len(scores) == 1:  # a number, with no class
            predictions.append({"predicted": scores[0]["score"]})
        else:
            probabilities = {label["label"]: label["score"] for label in scores}
            predictions.append(sequence_classification.labelled(probabilities, is_single))
    return predictions, sum(length > tokenizer.model_max_length for length in lengths)


def tag_words(model: KeptModel, network: Any, tokenizer: HashedTokenizer, rows: Sequence[PlacedRow]) -> Predicted:
    """A tag for each word of a list, and the spans of words that tags make; for running text spans alone (`tag_text`).

    Where a list is longer than an input, what was cut off is tagged in further inputs, each of which begins some words
    earlier: of the words in two inputs, the first half have the tags of the earlier one. With inputs of 8 words, 20
    words are in 0–8, 6–14, 12–20, and the tags are those of 0–7, 7–13, 13–20.
    """
    task = model.task
    if not model.is_ours or task.words not in rows[0][1]:
        return tag_text(model, network, tokenizer, rows)
    lists = [examples.words_of(task, origin, row) for origin, row in rows]
    tagged: list[Row] = [{"predicted": [], "probabilities": []} for _ in lists]
    starts = dict.fromkeys(range(len(lists)), 0)
    while starts:
        rests = [lists[number][begin:] for number, begin in starts.items()]
        sentences = [examples.TaggedWords("", words, (0,) * len(words)) for words in rests]
        split = token_classification.encode_words(task, sentences, tokenizer, model.config)
        sentence_rows = token_classification.tag_rows(split, predict_inputs(model, network, split), task.classes)
        cut, inside = set(split.texts.truncated.tolist()), split.words_T[split.words_T >= 0]
        ends = np.searchsorted(inside, split.word_bounds_S1[1:])  # how many tokens stand in front of the next sentence
        inputs, starts = starts, {}
        for sentence, (number, begin) in enumerate(inputs.items()):
            num = len(sentences[sentence].words)
            if sentence in cut:  # within its last word, it may be
                num = int(inside[ends[sentence] - 1] + 1 - split.word_bounds_S1[sentence])
                starts[number] = max(begin + num - max(num // SHARED, 1), begin + 1)
            new = (begin + len(tagged[number]["predicted"])) // 2  # the middle of the words that are in both inputs
            for key in ("predicted", "probabilities"):
                tagged[number][key][new:] = sentence_rows[sentence][key][new - begin : num]
    if task.classes[0] == "O":
        for words, row in zip(lists, tagged, strict=True):
            row["spans"] = spans_of_tags(words, row["predicted"], row["probabilities"])
    return tagged, 0


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


def tag_text(model: KeptModel, network: Any, tokenizer: HashedTokenizer, rows: Sequence[PlacedRow]) -> Predicted:
    """The spans of running texts, in characters, as transformers' pipeline groups tokens (`simple`) and the parts of a
    word are joined, in inputs that overlap where a text is longer than one. Spans of blanks alone are left out."""
    texts = [text_column(origin, row, TEXT) for origin, row in rows]
    pipe: Any = pipeline(
        "token-classification",
        network,
        tokenizer=tokenizer.pretrained,
        device=network.device,
        aggregation_strategy="simple",
        stride=tokenizer.room(tokenizer.pretrained.model_max_length) // SHARED,
    )
    predictions: list[Row] = []
    for text, groups in zip(texts, in_order_of_length(lambda part: pipe(part, batch_size=32), texts), strict=True):
        spans: list[Row] = []
        for group in groups:
            part = text[group["start"] : group["end"]]
            start, stripped = group["end"] - len(part.lstrip()), part.strip()
            if stripped:
                span = {"label": group["entity_group"], "start": start, "end": start + len(stripped), "text": stripped}
                spans.append(span | {"probability": round(float(group["score"]), 5)})
        predictions.append({"spans": join_touching(text, spans)})
    return predictions, 0


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
        lengths = [part["end"] - part["start"] for part in (before, span)]
        mean = np.average([before["probability"], span["probability"]], weights=lengths)
        whole = {"start": begin, "end": end, "text": text[begin:end], "probability": round(float(mean), 5)}
        joined[-1] = before | whole
    return joined


def in_order_of_length(predict: Callable[[list[str]], list[Any]], texts: Sequence[str]) -> list[Any]:
    """Predict for texts, each in a batch with others of its length."""
    order = sorted(range(len(texts)), key=lambda number: -len(texts[number]))
    by_number = dict(zip(order, predict([texts[number] for number in order]), strict=True))
    return [by_number[number] for number in range(len(texts))]


def answer_questions(
    model: KeptModel, network: Any, tokenizer: HashedTokenizer, rows: Sequence[PlacedRow]
) -> Predicted:
    """Find the answer, where it stands in the context, its probability, and how much better no answer is."""
    inputs = []
    for number, (origin, row) in enumerate(rows):
        question, context = text_column(origin, row, "question"), text_column(origin, row, "context")
        if not context.strip():
            raise InputError(f"{origin}: the context is empty")
        spans = examples.read_spans(origin, "candidates", row["candidates"]) if "candidates" in row else []
        candidates = tuple(examples.find_answer(origin, context, text, start) for text, start in spans)
        inputs.append(examples.Question(str(number), question, context, (), candidates))
    split = question_answering.encode_questions(model.task, inputs, tokenizer, model.config, model.has_unanswerable)
    answers: list[Row] = []
    for answer in predict_inputs(model, network, split):
        start, end = (answer["start"], answer["end"]) if answer["text"] else (None, None)
        row = {"predicted": answer["text"], "start": start, "end": end, "probability": round(answer["probability"], 5)}
        if model.has_unanswerable:
            row["no_answer_score"] = round(answer["no_answer_score"], 5)
        answers.append(row)
    return answers, split.num_truncated


PREDICTORS: dict[Family, Callable[[KeptModel, Any, HashedTokenizer, Sequence[PlacedRow]], Predicted]] = {
    "question_answering": answer_questions,
    "token_classification": tag_words,
    "multiple_choice": choose,
    "retrieval": score_pairs,
    "sequence_classification": classify,
}
