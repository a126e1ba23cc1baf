"""The families of tasks: each is a kind of splits, with its targets, loss, predictions and their metrics."""

from biphase.finetuning.config import FinetuneConfig
from biphase.finetuning.encoding import EncodedSplit
from biphase.finetuning.families.question_answering import QuestionSplit
from biphase.finetuning.families.retrieval import CandidateSplit, JudgedSplit
from biphase.finetuning.families.sequence_classification import ChoiceSplit, LabelledSplit
from biphase.finetuning.families.token_classification import TaggedSplit
from biphase.tasks.spec import Family

SPLIT_KINDS: dict[Family, type[EncodedSplit]] = {
    "sequence_classification": LabelledSplit,
    "token_classification": TaggedSplit,
    "question_answering": QuestionSplit,
    "retrieval": JudgedSplit,
    "multiple_choice": ChoiceSplit,
}


def kind_of_splits(family: Family, config: FinetuneConfig) -> type[EncodedSplit]:
    """The kind of splits that a cell with this configuration is trained on."""
    return CandidateSplit if family == "retrieval" and config.ranking == "pairs" else SPLIT_KINDS[family]
