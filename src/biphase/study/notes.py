"""A study's records → what a reader must know before comparing its arms: what was not the same for all of them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from biphase.errors import first_of
from biphase.files import read_json_as
from biphase.finetuning.scores import TASK_SETTINGS, Score, settings_of
from biphase.run import Run, read_recipe
from biphase.study.folder import StudyFolder, StudyState, TrainedRecord

DTYPES = {"bf16": "bfloat16", "fp32": "float32", "auto": ""}
MOST_NAMES = 3


def list_notes(place: StudyFolder, state: StudyState) -> Iterator[str]:
    """A sentence for each."""
    yield from tell_unlike("trained", [(name, trained_with(place, record)) for name, record in state.records.items()])
    by_task: dict[str, list[tuple[str, Score]]] = {}
    for model, found in state.scores.items():
        for score in found.scores:
            by_task.setdefault(score.task, []).append((model, score))
    settings = dict[str, None]()
    for scores in by_task.values():
        settings |= dict.fromkeys(tell_unlike("fine-tuned", [(model, tuned_with(score)) for model, score in scores]))
    yield from settings


def trained_with(place: StudyFolder, record: TrainedRecord) -> dict[str, str]:
    """What decides a run's weights beside its recipe, as far as that is recorded."""
    run = Run(place.runs / record.folder)
    environment = read_json_as(run.path / "environment.json", dict[str, Any])
    given = DTYPES[read_recipe(run).compute.precision]
    return {"precision": environment.get("precision", given), "device": environment.get("device", "")}


def tuned_with(score: Score) -> dict[str, str]:
    own = {key: value for key, value in settings_of(score).items() if key not in {*TASK_SETTINGS, "weights"}}
    return own | {"device": str(score.machine.get("device", ""))}


def tell_unlike(how: str, facts: Sequence[tuple[str, Mapping[str, str]]]) -> Iterator[str]:
    """A sentence for each fact that is known to differ; `facts` with the name of a run or a model, which may be there
    more than once."""
    for key in dict.fromkeys(key for _, own in facts for key in own):
        names: dict[str, dict[str, None]] = {}
        for name, own in facts:
            if own.get(key):
                names.setdefault(own[key], {})[name] = None
        if len(names) > 1:
            shown = [f"{value} ({first_of([*some], MOST_NAMES)})" for value, some in sorted(names.items())]
            yield f"Not all {how} with the same {key}: {', '.join(shown)}; differences between these may come from it."
