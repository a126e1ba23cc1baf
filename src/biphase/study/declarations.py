"""What a study declares before it runs: its hypotheses in words, their hash, and when.

OUT/hypotheses.json

The file has an entry for each change. It is plain text with its own hash, which tells damage and slips: whoever owns
the folder can write another one. What is to be proved to others has to be posted elsewhere before anything is trained.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic_core import to_jsonable_python

from biphase.config import Count
from biphase.errors import InputError
from biphase.files import content_hash, read_hashed, read_json, validate_record, write_hashed
from biphase.report.formats import show_count
from biphase.report.grammar import AskedInequality
from biphase.report.results import MEAN_OF_FAMILIES
from biphase.study.plan import Plan
from biphase.study.spec import Hypothesis

DECLARED = "hypotheses.json"
REMEDY = "put it back as it was; without it, hypotheses count as declared when the study runs next"


def hash_hypotheses(plan: Plan) -> tuple[str, str]:
    """Return two hashes of eight digits. The first is of what hypotheses say and of what that is about in this plan:
    which arms, at which budgets, on which tasks; a line of the paper is about all of them. The second is of what they
    say alone, which a folder of an earlier version recorded."""
    everything, about = [list(plan.of_first_seed.arms), list(plan.families)], list[list[Any]]()
    for lines in plan.hypotheses:
        about.append([everything if isinstance(line, str) else list_subjects(plan, line) for line in lines])
    words = content_hash([hypothesis.model_dump(mode="json") for hypothesis in plan.study.hypotheses])[:8]
    return content_hash([words, about])[:8], words


def list_subjects(plan: Plan, line: Sequence[Sequence[AskedInequality]]) -> list[Any]:
    """List what a line is about: of each first inequality the label, the arms and tasks of its terms, the baseline, and
    the same of its rivals."""
    subjects = []
    for first, *rivals in line:
        terms = []
        for term in first.operands:
            tasks = [name for name, family in plan.families.items() if term.task in (name, family, MEAN_OF_FAMILIES)]
            terms.append((term.arms, tasks))
        subjects.append([first.label, terms, first.ladder, list_subjects(plan, [[rival] for rival in rivals])])
    return subjects


@dataclass(frozen=True)
class Declaration:
    """An entry of `hypotheses.json`: the hypotheses that were declared at a time, and what stood in the folder then."""

    hash: str
    when: str
    hypotheses: tuple[Hypothesis, ...] = ()
    """The words; none in an entry of an earlier version."""
    runs: Count = 0
    """Folders of runs that had begun, of any plan."""
    scores: Count = 0
    """Scores of finished cells, of any plan."""
    units_done: Count | None = None
    """In an entry of an earlier version, in place of the two: the units that were done of its own plan."""
    text: str | None = None
    """In an entry of an earlier version, the hash of the words alone; the first such entries have it as `hash`."""

    def is_of(self, hashes: tuple[str, str]) -> bool:
        """Tell whether it declares what has these two hashes (`hash_hypotheses`)."""
        is_of_words_alone = not (self.hypotheses or self.text)
        return self.hash == hashes[0] or (is_of_words_alone and self.hash == hashes[1])

    @property
    def standing(self) -> str:
        """Tell when it was declared, and what stood in the folder."""
        if self.units_done is not None:
            counted = f"{show_count(self.units_done, 'unit')} of its plan done (nothing else was counted)"
        elif self.runs or self.scores:
            counted = f"{show_count(self.runs, 'run')} and {show_count(self.scores, 'score')} in the folder"
        else:
            return f"declared {self.when}, before anything was trained"
        return f"declared {self.when}, with {counted}"


@dataclass(frozen=True)
class DeclaredRecord:
    """All of `hypotheses.json`."""

    declarations: tuple[Declaration, ...]


def read_declared(folder: Path) -> tuple[Declaration, ...]:
    """Read what was declared in a study's folder, the first one first. Earlier versions wrote a list without a hash.

    Raises `InputError` for a file that is not what was written.
    """
    path = folder / DECLARED
    if not path.exists():
        return ()
    content = read_json(path)
    if not isinstance(content, list):
        return read_hashed(path, DeclaredRecord, REMEDY).declarations
    entries = validate_record(path, content, tuple[Declaration, ...], REMEDY)
    if any(entry.units_done is None for entry in entries):
        raise InputError(f"{path} is damaged (it has entries of this version and no hash); {REMEDY}")
    return entries


def list_words(hypotheses: Iterable[Hypothesis]) -> dict[str, str]:
    """Map the name of each hypothesis to its words."""
    return {line.name: f"“{line.says}” ({'; '.join(line.holds)})" for line in hypotheses}


def declare(plan: Plan, folder: Path) -> None:
    """Record in a study's folder what it declares and what stands there, unless the last entry has these words."""
    declared, hashes = read_declared(folder), hash_hypotheses(plan)
    if declared and declared[-1].hypotheses and declared[-1].is_of(hashes):
        return
    runs = len([*folder.glob("runs/*/config.yaml")])
    scores = len([path for path in folder.glob("scores/*/*/score.json") if not path.parent.name.startswith(".")])
    when = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    entry = Declaration(hashes[0], when, plan.study.hypotheses, runs, scores)
    record = DeclaredRecord((*declared, entry))
    write_hashed(folder / DECLARED, to_jsonable_python(record))


def tell_declaration(plan: Plan, folder: Path) -> tuple[str, list[str]]:
    """Return the hash of the hypotheses, and sentences: whether they stood before the results did, and what they
    replaced, word for word."""
    hashes, declared = hash_hypotheses(plan), read_declared(folder)
    current, own = hashes[0], [entry for entry in declared if entry.is_of(hashes)]
    replaced = {entry.hash: entry for entry in reversed(declared) if entry not in own}
    names = [current if entry in own else entry.hash for entry in declared]
    changes = sum(one != other for one, other in pairwise([*names, current]))
    times = {1: "once", 2: "twice"}.get(changes, f"{changes} times")
    if not own:
        history = "not declared, for the study has not run with them"
    elif changes:
        history = f"changed {times} since the first declaration; the current ones were {own[0].standing}"
    else:
        history = f"{own[0].standing}; unchanged since, in words"
        history += ", arms, budgets and tasks" if own[0].hash == current else "; what they are about is not recorded"
    sentences = [f"Hypotheses {current}: {history}."]
    words = {entry.hash: list_words(entry.hypotheses) for entry in declared if entry.hypotheses}
    for entry in reversed(replaced.values()):
        told = " · ".join(f"{name}: {text}" for name, text in words.get(entry.hash, {}).items())
        sentences.append(f"Replaced: {entry.hash}, {entry.standing}: {told or 'its words were not recorded'}.")
    return current, sentences
