"""The declaration of a study before it runs: the words of its hypotheses, their hash, and the time.

OUT/hypotheses.json

The file has an entry for each change. It is plain text with its own hash, which reveals damage and accidents, but the
owner of the folder can replace it. To prove a declaration to others, publish it elsewhere before training.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic_core import to_jsonable_python

from biphase.config import Count
from biphase.files import content_hash, read_hashed, write_hashed
from biphase.report.formats import show_count
from biphase.report.grammar import AskedInequality
from biphase.report.results import MEAN_OF_FAMILIES
from biphase.studies.plan import Plan
from biphase.studies.spec import Hypothesis

DECLARED = "hypotheses.json"
REMEDY = "restore the original; without it, hypotheses count as declared at the next run of the study"


def hash_hypotheses(plan: Plan) -> str:
    """Return an eight-digit hash of the hypotheses' words and of their subjects in this plan: arms, budgets and tasks.
    The subjects of a finding of the paper are all arms and tasks."""
    everything, about = [list(plan.of_first_seed.arms), list(plan.families)], list[list[Any]]()
    for conditions in plan.hypotheses:
        about.append([everything if isinstance(groups, str) else list_subjects(plan, groups) for groups in conditions])
    words = content_hash([hypothesis.model_dump(mode="json") for hypothesis in plan.study.hypotheses])[:8]
    return content_hash([words, about])[:8]


def list_subjects(plan: Plan, groups: Sequence[Sequence[AskedInequality]]) -> list[Any]:
    """List the subjects of a condition. For the first inequality of each group these are its label, the arms and tasks
    of its terms, its baseline, and the same for the other inequalities of the group."""
    subjects = []
    for first, *rivals in groups:
        terms = []
        for term in first.operands:
            tasks = [name for name, family in plan.families.items() if term.task in (name, family, MEAN_OF_FAMILIES)]
            terms.append((term.arms, tasks))
        subjects.append([first.label, terms, first.baseline, list_subjects(plan, [[rival] for rival in rivals])])
    return subjects


@dataclass(frozen=True)
class Declaration:
    """An entry of `hypotheses.json`: hypotheses, the time, and the numbers of runs and scores at that time."""

    hash: str
    when: str
    hypotheses: tuple[Hypothesis, ...]
    runs: Count
    """The number of runs in the folder that had begun, for any plan."""
    scores: Count
    """The number of scores in the folder, for any plan."""

    @property
    def words(self) -> str:
        """The time of the declaration, and the numbers of runs and scores, in words."""
        if not (self.runs or self.scores):
            return f"declared {self.when}, before anything was trained"
        counted = f"{show_count(self.runs, 'run')} and {show_count(self.scores, 'score')} in the folder"
        return f"declared {self.when}, with {counted}"


def read_declared(folder: Path) -> tuple[Declaration, ...]:
    """Read the declarations in a study's folder, oldest first. Raises `InputError` for a changed file."""
    path = folder / DECLARED
    if not path.exists():
        return ()
    return read_hashed(path, dict[str, tuple[Declaration, ...]], REMEDY).get("declarations", ())


def list_words(hypotheses: Iterable[Hypothesis]) -> dict[str, str]:
    """Map the name of each hypothesis to its words."""
    return {one.name: f"“{one.says}” ({'; '.join(one.holds)})" for one in hypotheses}


def declare(plan: Plan, folder: Path) -> None:
    """Record a study's hypotheses and the numbers of runs and scores in its folder, unless the last entry has the same
    hash."""
    declared, digest = read_declared(folder), hash_hypotheses(plan)
    if declared and declared[-1].hash == digest:
        return
    runs = len([*folder.glob("runs/*/config.yaml")])
    scores = len([path for path in folder.glob("scores/*/*/score.json") if not path.parent.name.startswith(".")])
    when = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    entry = Declaration(digest, when, plan.study.hypotheses, runs, scores)
    write_hashed(folder / DECLARED, to_jsonable_python({"declarations": (*declared, entry)}))


def tell_declaration(plan: Plan, folder: Path) -> tuple[str, list[str]]:
    """Return the hash of the hypotheses, and sentences about when they were declared and which hypotheses they
    replaced."""
    current, declared = hash_hypotheses(plan), read_declared(folder)
    own = [entry for entry in declared if entry.hash == current]
    replaced = {entry.hash: entry for entry in reversed(declared) if entry.hash != current}
    changes = sum(one != other for one, other in pairwise([*(entry.hash for entry in declared), current]))
    times = {1: "once", 2: "twice"}.get(changes, f"{changes} times")
    if not own:
        history = "not declared, since the study has not run with them"
    elif changes:
        history = f"changed {times} since the first declaration; the current ones were {own[0].words}"
    else:
        history = f"{own[0].words}; unchanged since (wording, arms, budgets, tasks)"
    sentences = [f"Hypotheses (hash {current}): {history}."]
    for entry in reversed(replaced.values()):
        told = " · ".join(f"{name}: {text}" for name, text in list_words(entry.hypotheses).items())
        sentences.append(f"Replaced: {entry.hash}, {entry.words}: {told}.")
    return current, sentences
