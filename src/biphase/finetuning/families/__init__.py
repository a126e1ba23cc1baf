"""The families of tasks: each is a kind of splits, with its targets, loss, predictions and their metrics."""

from collections.abc import Callable
from typing import Any

from biphase.finetuning.config import FinetuneConfig
from biphase.finetuning.encoding import EncodedSplit, EncodedTask, HashedTokenizer
from biphase.finetuning.families import question_answering, retrieval, sequence_classification, token_classification
from biphase.tasks.spec import Family, TaskSplit
from biphase.tasks.splits import Collection, TaskData

SPLIT_KINDS: dict[Family, type[EncodedSplit]] = {
    "sequence_classification": sequence_classification.LabelledSplit,
    "token_classification": token_classification.TaggedSplit,
    "question_answering": question_answering.QuestionSplit,
    "retrieval": retrieval.JudgedSplit,
    "multiple_choice": sequence_classification.ChoiceSplit,
}

SPLIT_ENCODERS: dict[Family, Callable[..., EncodedSplit]] = {
    "sequence_classification": sequence_classification.encode_labelled,
    "token_classification": token_classification.encode_words,
    "multiple_choice": sequence_classification.encode_choices,
}
"""What encodes one split, for the families that do so without a look at the others."""


def kind_of_splits(family: Family, config: FinetuneConfig) -> type[EncodedSplit]:
    """Return the kind of splits that a cell with this configuration is trained on."""
    has_pairs = family == "retrieval" and config.ranking == "pairs"
    return retrieval.CandidateSplit if has_pairs else SPLIT_KINDS[family]


def encode_task(data: TaskData | Collection, tokenizer: HashedTokenizer, config: FinetuneConfig) -> EncodedTask:
    """Encode all splits of a task, as `tasks.examples` has them, as token ids with their targets."""
    splits: dict[TaskSplit, Any] = {}
    if isinstance(data, Collection):
        has_pairs = config.ranking == "pairs"
        encode_collection: Any = retrieval.encode_candidates if has_pairs else retrieval.encode_judged
        splits = encode_collection(data, tokenizer, config)
    elif data.task.family == "question_answering":
        splits |= question_answering.encode_question_task(data, tokenizer, config)
    else:
        for name, examples in data.splits.items():
            splits[name] = SPLIT_ENCODERS[data.task.family](data.task, examples, tokenizer, config)
    return EncodedTask(splits, data.left_out)
