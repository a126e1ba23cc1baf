"""A task → how large it is, to say in advance what cells cost: as it says, or as is typical of its family."""

from biphase.study.spec import EMBED, Evaluation, trainings
from biphase.tasks.spec import Family, TaskSize, find_task

TYPICAL_SIZES: dict[Family, TaskSize] = {
    "sequence_classification": TaskSize(train_examples=50_000, example_tokens=40, evaluated_tokens=1_000_000),
    "token_classification": TaskSize(train_examples=15_000, example_tokens=25, evaluated_tokens=200_000),
    "question_answering": TaskSize(train_examples=90_000, example_tokens=200, evaluated_tokens=3_000_000),
    "multiple_choice": TaskSize(train_examples=40_000, example_tokens=200, evaluated_tokens=2_000_000),
    "retrieval": TaskSize(train_examples=100_000, example_tokens=120, evaluated_tokens=1_000_000),
}
"""The sizes that are assumed of tasks that do not say theirs."""


def find_sizes(evaluation: Evaluation | None) -> dict[str, TaskSize]:
    """The sizes of the tasks that cells train on or evaluate, by what the study calls them."""
    if evaluation is None:
        return {}
    names = {name for own, tests in trainings(evaluation).items() for name in (own, *tests)}
    return {name: find_size(name) for name in sorted(names) if not name.startswith(EMBED)}


def find_size(name: str) -> TaskSize:
    task = find_task(name)
    return task.size or TYPICAL_SIZES[task.family]
