"""The kinds of tasks, with a record for each: names, settings, and metrics with their words and lowest scores.

The module of a family's name in `finetuning/families/` has its code. Texts whose label is a number or a set of classes
are kinds of their own within their family; a task names such a kind as its `problem_type`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, get_args

from biphase.config import Count, Strict

Family = Literal[
    "sequence_classification", "token_classification", "question_answering", "retrieval", "multiple_choice"
]
TASK_FAMILIES: tuple[Family, ...] = get_args(Family)
ProblemType = Literal["regression", "multi_label_classification"]


class TaskSize(Strict):
    """The rounded size of a task, only to forecast the cost and the power of a study."""

    later: ClassVar[frozenset[str]] = frozenset({"test_examples"})

    train_examples: Count
    """The published count; 0 for a task that is trained on another one."""
    example_tokens: Count
    """The tokens of a training example (in retrieval, of both texts), guessed from the mean length in words."""
    evaluated_tokens: Count
    """The tokens of validation and test together."""
    test_examples: Count | None = None
    """The number of test examples; by default, guessed from these tokens."""


@dataclass(frozen=True)
class Measure:
    """A metric, as reports and readers of scores know it. `finetuning/metrics.py` computes it."""

    words: str
    """The name in reports."""
    lowest: int = 0
    """The lowest score; the highest is 1."""
    example_variance: float = 0.21
    """The variance of the difference between two models on one example, to forecast the power of a study until its own
    cells measure it. By default, that of two models that are right on 70 % of the examples, with errors of correlation
    0.5."""


ACCURACY, MACRO_F1 = Measure("accuracy"), Measure("macro-F1")


@dataclass(frozen=True)
class Kind:
    """A kind of tasks, as all other modules know it."""

    code: str
    """The name in reports."""
    metrics: Mapping[str, Measure]
    """Name → each metric that may choose a learning rate; `init task` takes the first."""
    paper_metric: str
    """The name of the metric of the paper's tables."""
    paper_measure: Measure
    pipeline_tag: str
    """The name on the Hub."""
    example: str
    """The task file in `bundled/tasks` from which `init task` starts."""
    size: TaskSize
    """The assumed size of a task without one, until a finished cell shows its time."""
    words: str = ""
    """The baseline by words alone (`finetuning/words.py`); empty for none."""
    head: str = "ForSequenceClassification"
    """The end of the names of its classes in transformers."""
    has_classes: bool = False
    """Whether its tasks list classes."""
    num_outputs: int | None = None
    """The width of a head's output. None: one for each class."""
    is_search: bool = False
    """Whether its tasks search documents for judged queries. Their data is a `Collection`, not rows of examples."""
    is_of_texts: bool = False
    """Whether its examples are texts, or pairs of texts, with a label each."""
    is_tagging: bool = False
    """Whether its examples are sentences with a tag for each word."""
    is_answering: bool = False
    """Whether its examples are questions whose answers are spans of a context."""
    has_choices: bool = False
    """Whether its examples have choices, one of which is right."""
    has_strata: bool = False
    """Whether a drawn split may have its share of each class."""
    has_label_sets: bool = False
    """Whether a label is a set of classes."""
    has_label_numbers: bool = False
    """Whether a label is a number."""
    input_columns: tuple[str, ...] = ()
    """The columns of an input's texts. Empty: those in the template."""
    settings: tuple[str, ...] = ()
    """The settings of fine-tuning that this kind uses and others do not."""
    encoding_settings: tuple[str, ...] = ()
    """The `settings` that change token ids."""


SEQUENCE_CLASSIFICATION = Kind(
    code="SC",
    metrics={
        "accuracy": ACCURACY,
        "macro_f1": MACRO_F1,
        "mcc": Measure("Matthews correlation", lowest=-1),
        "f1": Measure("F1 of the second class"),
    },
    paper_metric="accuracy",
    paper_measure=ACCURACY,
    pipeline_tag="text-classification",
    example="reviews",
    size=TaskSize(train_examples=50_000, example_tokens=40, evaluated_tokens=1_000_000),
    words="TF-IDF + linear",
    has_classes=True,
    is_of_texts=True,
    has_strata=True,
    settings=("head", "class_weights", "label_smoothing"),
)

KINDS: dict[Family | ProblemType, Kind] = {
    "sequence_classification": SEQUENCE_CLASSIFICATION,
    "token_classification": Kind(
        code="TC",
        metrics={
            "f1": Measure("F1 of entities", example_variance=0.08),
            "strict_f1": Measure("strict F1 of entities", example_variance=0.08),
            "accuracy": Measure("accuracy of tags", example_variance=0.009),
            "macro_f1": Measure("macro-F1 of tags"),
        },
        paper_metric="paper_f1",
        paper_measure=Measure("macro-F1 per sentence, O included"),
        head="ForTokenClassification",
        pipeline_tag="token-classification",
        example="prescriptions",
        size=TaskSize(train_examples=15_000, example_tokens=25, evaluated_tokens=200_000),
        words="most frequent tag",
        has_classes=True,
        is_tagging=True,
        input_columns=("text",),
        settings=("head", "head_dropout", "class_weights", "label_smoothing"),
    ),
    "question_answering": Kind(
        code="QA",
        metrics={"f1": Measure("F1 of answers"), "exact": Measure("exact match")},
        paper_metric="paper_f1",
        paper_measure=Measure("F1 of token positions, first answer"),
        head="ForQuestionAnswering",
        pipeline_tag="question-answering",
        example="manuals",
        size=TaskSize(train_examples=90_000, example_tokens=200, evaluated_tokens=3_000_000),
        num_outputs=2,
        is_answering=True,
        settings=("head", "head_dropout", "qa_head", "doc_stride", "max_answer_tokens"),
        encoding_settings=("qa_head", "doc_stride"),
    ),
    "retrieval": Kind(
        code="IR",
        metrics={
            "ndcg_at_10": Measure("nDCG@10"),
            "map_at_100": Measure("MAP@100"),
            "mrr_at_10": Measure("MRR@10"),
            "recall_at_100": Measure("recall@100"),
        },
        paper_metric="paper_ndcg_at_10",
        paper_measure=Measure("nDCG@10, with the ideal ranking taken over the retrieved documents only"),
        pipeline_tag="sentence-similarity",
        example="handbook",
        size=TaskSize(train_examples=100_000, example_tokens=120, evaluated_tokens=1_000_000),
        words="BM25",
        num_outputs=1,
        is_search=True,
        input_columns=("query", "document"),
        settings=("head", "ranking", "scale", "judged_only"),
        encoding_settings=("judged_only", "ranking"),
    ),
    "multiple_choice": Kind(
        code="SC",
        metrics={"accuracy": ACCURACY},
        paper_metric="accuracy",
        paper_measure=ACCURACY,
        pipeline_tag="multiple-choice",
        example="exams",
        size=TaskSize(train_examples=40_000, example_tokens=200, evaluated_tokens=2_000_000),
        has_classes=True,
        num_outputs=1,
        has_choices=True,
        settings=("head",),
    ),
    "regression": replace(
        SEQUENCE_CLASSIFICATION,
        metrics={
            "spearman": Measure("Spearman correlation", lowest=-1),
            "pearson": Measure("Pearson correlation", lowest=-1),
        },
        example="similarity",
        has_classes=False,
        has_strata=False,
        has_label_numbers=True,
        num_outputs=1,
        settings=("head",),
    ),
    "multi_label_classification": replace(
        SEQUENCE_CLASSIFICATION,
        metrics={"micro_f1": Measure("micro-F1"), "macro_f1": MACRO_F1, "accuracy": ACCURACY},
        example="subjects",
        has_strata=False,
        has_label_sets=True,
        settings=("head", "class_weights"),
    ),
}
