"""The declaration of a study before it runs: the words of its hypotheses, their hash, the time, and the number of
pretraining seeds; and the looks that reports took at them.

OUT/hypotheses.json

The file has an entry for each change, and one for each number of seeds that a report looked at. It is plain text with
its own hash, which reveals damage and accidents, but the owner of the folder can replace it. To prove a declaration to
others, publish it elsewhere before training.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic_core import to_jsonable_python

from biphase.config import Count
from biphase.errors import first_of
from biphase.exporting.push import without_folders
from biphase.files import content_hash, read_hashed, write_hashed
from biphase.finetuning.config import PLACEMENT
from biphase.report.claims import NO_LOOKS, Looks
from biphase.report.formats import show_count
from biphase.report.grammar import AskedInequality
from biphase.report.results import MEAN_OF_FAMILIES
from biphase.studies.plan import Plan
from biphase.studies.spec import Hypothesis, finetune_config, move_tasks, scored_as, trainings

DECLARED = "hypotheses.json"
REMEDY = "restore the original; without it, hypotheses count as declared at the next run of the study"


def hash_hypotheses(plan: Plan) -> str:
    """Return an eight-digit hash of the hypotheses' words and of their subjects in this plan: arms, budgets and tasks.
    The subjects of a finding of the paper are all arms and tasks."""
    everything, about = [list(plan.of_first_seed.arms), list(plan.families)], list[list[Any]]()
    for conditions in plan.hypotheses:
        about.append([everything if isinstance(groups, str) else list_subjects(plan, groups) for groups in conditions])
    words = content_hash([hypothesis.model_dump(mode="json") for hypothesis in plan.study.hypotheses])[:8]
    # Names of arms state their budgets, unless their group has a template without them.
    unsaid = {group.group for group in plan.study.arms if group.budgets and group.name and "{budget}" not in group.name}
    steps = {arm.name: arm.recipe.num_steps for arm in plan.of_first_seed.arms.values() if arm.group in unsaid}
    return content_hash([words, about, steps] if steps else [words, about])[:8]


FITTING = "fine-tuning"
FITTED = ("learning_rates", "tuned_rates", "embed")
"""The settings of `Evaluation` that every fine-tuning has, besides those of `FinetuneConfig`."""


def hash_settings(plan: Plan) -> dict[str, tuple[str, ...]]:
    """Return the hash of each arm's training, of the rates of all fine-tunings, and of the settings that decide the
    scores of those on each task, the same wherever text and tasks lie. A second hash is that by which earlier versions
    of biphase recorded the same settings."""
    plan, hashes = plan.of_first_seed, dict[str, tuple[str, ...]]()
    for name in plan.arms:
        recipes = [arm.recipe for arm in plan.lineage(name)]
        trees = [recipe.weights_tree | {"data": recipe.data.placeless} for recipe in recipes]
        hashes[name] = (hash_tree(trees),)
    tree, evaluation = move_tasks(plan.study.model_dump(mode="json"), scored_as), plan.study.evaluation
    if evaluation is not None:
        as_written = {key: tree["evaluation"][key] for key in (*FITTED, "finetune", "per_task")}
        rates = {key: as_written[key] for key in FITTED}
        hashes[FITTING] = hash_tree(rates, sort_keys=True), hash_tree(as_written)
        for task in trainings(evaluation):
            config = finetune_config(evaluation, task, 1.0, 0)
            decides = config.model_dump(mode="json", exclude={*PLACEMENT, "learning_rate", "seed"})
            hashes[f"{FITTING} on {scored_as(task)}"] = (hash_tree(decides, sort_keys=True),)
    return hashes


def hash_tree(tree: Any, *, sort_keys: bool = False) -> str:
    return content_hash(without_folders(json.dumps(tree, ensure_ascii=False, sort_keys=sort_keys)))[:8]


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
    seeds: Count = 0
    """The number of pretraining seeds that it plans; 0 if an earlier version of biphase recorded it."""
    up_to: Count = 0
    """The number of pretraining seeds that looks may add up to; 0 for a fixed number."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Arm, `fine-tuning`, or `fine-tuning on TASK` → the hash of its settings; empty or without tasks if an earlier
    version of biphase recorded it."""

    @property
    def words(self) -> str:
        """The time of the declaration, and the numbers of runs and scores, in words."""
        if not (self.runs or self.scores):
            return f"declared {self.when}, before anything was trained"
        counted = f"{show_count(self.runs, 'run')} and {show_count(self.scores, 'score')} in the folder"
        return f"declared {self.when}, with {counted}"

    def list_changed(self, settings: Mapping[str, Sequence[str]]) -> list[str]:
        """Name what has other settings now; `settings` as `hash_settings` returns them."""
        return [name for name, digest in self.settings.items() if digest not in settings.get(name, (digest,))]


@dataclass(frozen=True)
class SeedLook:
    """The first report on a hypothesis at a number of pretraining seeds in its test."""

    hash: str
    """The hash of all hypotheses at that time."""
    seeds: Count
    when: str
    hypothesis: str = ""
    """Its name; empty for all, as an earlier version of biphase recorded it."""


@dataclass(frozen=True)
class DeclarationRecord:
    """The contents of `hypotheses.json`, oldest first."""

    declarations: tuple[Declaration, ...] = ()
    looks: tuple[SeedLook, ...] = ()

    def write(self, folder: Path) -> None:
        tree = to_jsonable_python(self)
        write_hashed(folder / DECLARED, {key: entries for key, entries in tree.items() if entries})


def read_declared(folder: Path) -> DeclarationRecord:
    """Read the declarations and looks in a study's folder. Raises `InputError` for a changed file."""
    path = folder / DECLARED
    return read_hashed(path, DeclarationRecord, REMEDY) if path.exists() else DeclarationRecord()


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")


def list_words(hypotheses: Iterable[Hypothesis]) -> dict[str, str]:
    """Map the name of each hypothesis to its words."""
    return {one.name: f"“{one.says}” ({'; '.join(one.holds)})" for one in hypotheses}


def declare(plan: Plan, folder: Path) -> None:
    """Record a study's hypotheses, settings and numbers of seeds, and the numbers of runs and scores in its folder,
    unless the last entry has the same."""
    record, digest, settings = read_declared(folder), hash_hypotheses(plan), hash_settings(plan)
    last, seeds = record.declarations[-1] if record.declarations else None, planned_seeds(record, plan, digest)
    is_same = last and (last.hash, last.seeds, last.up_to) == (digest, *seeds)
    if last and is_same and not last.list_changed(settings):
        return
    runs = len([*folder.glob("runs/*/config.yaml")])
    scores = len([path for path in folder.glob("scores/*/[!.]*/score.json") if path.parts[-3][0] != "."])
    newest = {name: hashes[0] for name, hashes in settings.items()}
    entry = Declaration(digest, now(), plan.study.hypotheses, runs, scores, *seeds, newest)
    replace(record, declarations=(*record.declarations, entry)).write(folder)


def planned_seeds(record: DeclarationRecord, plan: Plan, digest: str) -> tuple[int, int]:
    """Return the number of pretraining seeds and the number that looks may add up to, 0 for a fixed number: those of
    the plan or, once a report has looked, the last that were declared with these hypotheses."""
    declared = [(entry.seeds, entry.up_to) for entry in record.declarations if entry.hash == digest and record.looks]
    return declared[-1] if declared else (plan.num_seeds, plan.study.pretraining_seeds.up_to or 0)


def count_looks(plan: Plan, folder: Path, tested: Mapping[str, int]) -> dict[str, tuple[Looks, str]]:
    """Record that a report looks at hypotheses, once for each number of seeds.

    `tested`: name of a hypothesis → the number of pretraining seeds in its test, 0 without a test, which is no look. A
    look at hypotheses that were then changed counts for all that replaced them.

    Return for each hypothesis the looks that share the level of its test with this one, which are none unless the study
    has `up_to`; and words on the looks, "" if it was looked at as planned.
    """
    record, digest = read_declared(folder), hash_hypotheses(plan)
    declared = [(entry.seeds, entry.up_to) for entry in record.declarations if entry.hash == digest]
    seeds, up_to = declared[-1] if declared else planned_seeds(record, plan, digest)
    new, found = list[SeedLook](), dict[str, tuple[Looks, str]]()
    for name, num in tested.items():
        before = numbers_seen(record, digest, name)
        new += [SeedLook(digest, num, now(), name)] if num and num not in before else []
        looks = sorted({seen for seen in before if seen < num} | {num})
        found[name] = (looks, max(up_to, num)) if up_to and num else NO_LOOKS, ""
        num_others = len(before - {num})
        if not num or (not up_to and not num_others and num == (seeds or num)):
            continue
        after = f"after {show_count(num_others, 'look')}" if num_others else "at the first look"
        words = f"planned {seeds or '?'}" + f" to {up_to}" * bool(up_to) + f" seeds, tested at {num} {after}"
        beyond = ", beyond the seeds that share the 5 %" if up_to and num > up_to else ""
        found[name] = found[name][0], words + beyond
    if new:
        replace(record, looks=(*record.looks, *new)).write(folder)
    return found


def numbers_seen(record: DeclarationRecord, digest: str, name: str) -> set[int]:
    """List the numbers of seeds at which reports looked at a hypothesis, or at others that it replaced."""
    return {look.seeds for look in record.looks if look.hash != digest or look.hypothesis in ("", name)}


def tell_declaration(plan: Plan, folder: Path) -> tuple[str, list[str]]:
    """Return the hash of the hypotheses, and sentences about when they were declared and which hypotheses they
    replaced."""
    current, declared = hash_hypotheses(plan), read_declared(folder).declarations
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
    if changed := own[0].list_changed(hash_settings(plan)) if own else []:
        sentences.append(f"The settings of these have changed since the declaration: {first_of(changed)}.")
    for entry in reversed(replaced.values()):
        told = " · ".join(f"{name}: {text}" for name, text in list_words(entry.hypotheses).items())
        sentences.append(f"Replaced: {entry.hash}, {entry.words}: {told}.")
    return current, sentences
