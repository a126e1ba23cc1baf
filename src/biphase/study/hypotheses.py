"""The hypotheses of a study: held against its plan before it runs, recorded when it runs, judged by its results."""

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from biphase.errors import InputError
from biphase.files import content_hash, read_json, write_json
from biphase.report.claims import Claim, Finding, Verdicts, judge_claims
from biphase.report.formats import show_count
from biphase.report.grammar import AskedInequality
from biphase.report.hypotheses import Ladder, Spot, bind, make_line
from biphase.report.paper import judge_paper, measure_findings, read_findings
from biphase.report.results import MEAN_OF_FAMILIES, ResultSet
from biphase.study.plan import Plan
from biphase.study.spec import write_steps

CITED = re.compile(r"(F[0-9]+) of the paper")
"""A line that is one of the paper's findings as a whole."""

HOW_JUDGED = "Supported if each inequality is, contradicted if one is; corrected (Holm) for the hypotheses declared."


def list_ladders(plan: Plan) -> dict[str, Ladder]:
    """List what names in a hypothesis stand for: an arm, an arm without its budget, a curriculum, a group, a model on
    the way or with random weights, which `random` is of every network."""
    plan = plan.of_first_seed
    ladders: dict[str, dict[Spot, dict[str, str]]] = {}
    spots = {name: Spot(arm.model, arm.recipe.num_steps) for name, arm in plan.arms.items()}
    for name, spot in spots.items():
        ladders[name] = {spot: {name: name}}
    for model in plan.models:
        if model.kind != "final":
            ladders[model.name] = {Spot(plan.arms[model.arm].model, model.step): {model.name: model.name}}
    taken = set(ladders)
    for arm in plan.arms.values():
        # The names that it shares with the same arm at other budgets; and what it is called there at every place.
        short, spot = arm.name.removesuffix(f"-{write_steps(arm.recipe.num_steps)}"), spots[arm.name]
        names = [short, arm.group]
        if arm.parent is None and not arm.settings:
            names.append(arm.curriculum)
        for name in names:
            if name in taken:
                continue
            ladders.setdefault(name, {}).setdefault(spot, {})[short.removeprefix(f"{arm.model}-")] = arm.name
        if f"{arm.model}-random" in taken and "random" not in taken:
            ladders.setdefault("random", {})[spot] = {"random": f"{arm.model}-random"}
    return dict(ladders)


AskedLine = str | Sequence[Sequence[AskedInequality]]
"""A line of a hypothesis: the key of a finding of the paper, such as F1, which finds its arms by itself; or
inequalities over the plan's arms, of each of these lists one is enough."""


@dataclass(frozen=True)
class AskedHypotheses:
    """The hypotheses of a plan's study, bound to its arms."""

    plan: Plan
    lines: Sequence[Sequence[AskedLine]]
    """Those of each hypothesis."""

    @cached_property
    def text_hash(self) -> str:
        """Eight digits of what hypotheses say: what a folder of an earlier version recorded."""
        return content_hash([hypothesis.model_dump(mode="json") for hypothesis in self.plan.study.hypotheses])[:8]

    @cached_property
    def hash(self) -> str:
        """Eight digits of what hypotheses say, and of what that is about in this plan: which arms, at which budgets, on
        which tasks. A line of the paper is about all of them."""
        everything, about = [list(self.plan.of_first_seed.arms), list(self.plan.families)], list[list[Any]]()
        for lines in self.lines:
            about.append([everything if isinstance(line, str) else self.list_subjects(line) for line in lines])
        return content_hash([self.text_hash, about])[:8]

    def list_subjects(self, line: Sequence[Sequence[AskedInequality]]) -> list[Any]:
        """List what a line is about: of each first inequality the label, the arms and tasks of its terms, the baseline,
        and the same of its rivals."""
        subjects = []
        for first, *rivals in line:
            terms = []
            for term in first.operands:
                families = self.plan.families.items()
                tasks = [name for name, family in families if term.task in (name, family, MEAN_OF_FAMILIES)]
                terms.append((term.arms, tasks))
            subjects.append([first.label, terms, first.ladder, self.list_subjects([[rival] for rival in rivals])])
        return subjects


def ask(plan: Plan) -> AskedHypotheses:
    """Bind the lines of every hypothesis to arms of the plan. Raises `InputError` for a line that is not in the
    grammar, or asks for what the study does not have."""
    study = plan.study
    if study.hypotheses and study.evaluation is None:
        raise InputError("hypotheses are about scores: the study needs an evaluation")
    ladders, findings = list_ladders(plan), read_findings()["findings"]
    bound = list[list[AskedLine]]()
    for hypothesis in study.hypotheses:
        lines: list[AskedLine] = []
        try:
            for line in hypothesis.holds:
                cited = CITED.fullmatch(line.strip())
                if cited is None:
                    lines.append(bind(line, ladders, plan.families))
                elif cited[1] in findings:
                    lines.append(cited[1])
                else:
                    raise InputError(f"'{line}': the paper's findings are {', '.join(findings)}")
        except InputError as error:
            raise InputError(f"hypothesis '{hypothesis.name}': {error}") from None
        bound.append(lines)
    return AskedHypotheses(plan, bound)


def list_equivalents(hypotheses: AskedHypotheses) -> dict[str, tuple[str, ...]]:
    """Map each arm whose compute-equivalent a hypothesis is about to the arms of the baseline."""
    ladders = {}
    for line in chain(*hypotheses.lines):
        inequalities = [] if isinstance(line, str) else [*chain(*line)]
        for inequality in inequalities:
            if inequality.ladder:
                ladders[inequality.operands[0].arms[0]] = inequality.ladder
    return ladders


def judge_results(hypotheses: AskedHypotheses, results: ResultSet) -> tuple[tuple[Finding, ...], Verdicts]:
    """Judge every hypothesis, corrected together, by the standard metrics; on all tasks of the plan that it is about,
    or not at all; and not by scores that are unfinished or lost seeds. And judge the paper's findings by the same
    scores. `results` have their averages, and what the plan expects."""
    results = results.select(metric=results.primary_metric)
    measured = measure_findings(results)
    cited, findings = {finding.key: finding.claims for finding in measured}, []
    for hypothesis, lines in zip(hypotheses.plan.study.hypotheses, hypotheses.lines, strict=True):
        claims: list[Claim] = []
        for line in lines:
            claims += cited[line] if isinstance(line, str) else [make_line(line, results)]
        findings.append(Finding(hypothesis.name, hypothesis.says, HOW_JUDGED, tuple(claims)))
    return judge_claims(findings), judge_paper(measured)


# What was declared, and when


def declare(hypotheses: AskedHypotheses, folder: Path, units_done: int) -> None:
    """Record in a study's folder what it declares, as it is about to run; a line for each change."""
    declared, current = read_declared(folder), hypotheses.hash
    if not declared or declared[-1]["hash"] != current:
        when = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
        entry = {"hash": current, "text": hypotheses.text_hash, "when": when, "units_done": units_done}
        write_json(folder / "hypotheses.json", [*declared, entry])


def read_declared(folder: Path) -> list[dict[str, Any]]:
    """Read what was declared, each time with its `hash` and that of its `text` alone; earlier versions wrote the latter
    as `hash`."""
    path = folder / "hypotheses.json"
    return read_json(path) if path.exists() else []


def tell_declaration(hypotheses: AskedHypotheses, folder: Path) -> str:
    """Tell whether the hypotheses stood before the results did, in a sentence."""
    declared, current = read_declared(folder), hypotheses.hash
    if not declared:
        return f"Hypotheses {current}: not declared, for the study has not run with them."
    last, is_later = declared[-1], declared[-1]["units_done"]
    when = f"declared {last['when']}"
    when += f", when {is_later} units were done" if is_later else ", before anything was trained"
    worded = [entry for entry in declared if "text" not in entry]
    if last["hash"] not in (current, hypotheses.text_hash):
        history = f"what they said or are about changed since the study last ran; it ran with {last['hash']}"
    elif last in worded:
        history = f"the same words were {when}; which arms and tasks they were about is not recorded"
    elif worded and {entry.get("text", entry["hash"]) for entry in declared} == {last["text"]}:
        since = f"the same words stood there since {worded[0]['when']}"
        history = f"{when}; {since}, about arms and tasks that were not recorded"
    elif len(declared) > 1:
        history = f"changed {len(declared) - 1} times since the first run; these were {when}"
    else:
        history = f"{when}; unchanged since, in words, arms, budgets and tasks"
    return f"Hypotheses {current}: {history}."


def tell_findings(findings: Sequence[Finding], declared: str) -> Iterator[str]:
    """Tell the verdicts on a study's hypotheses, a line each, and whether these stood before the results did."""
    for finding in findings:
        verdicts = [inequality.verdict for inequality in finding.inequalities]
        count = f"{verdicts.count('supported')} of {show_count(len(verdicts), 'inequality', 'inequalities')}"
        yield f"{finding.verdict}: {finding.key}: {finding.statement} ({count})"
    yield declared


def hypotheses_json(hypotheses: AskedHypotheses, declared: str, findings: Sequence[Finding]) -> str:
    """Write the hypotheses with their verdicts; `declared` tells whether these stood before the results did."""
    records = []
    for hypothesis, finding in zip(hypotheses.plan.study.hypotheses, findings, strict=True):
        inequalities = []
        for claim in finding.inequalities:
            interval = claim.interval
            numbers = {"estimate": claim.estimate, "low": interval.low, "high": interval.high, "bound": claim.bound}
            numbers |= {"p": claim.p_value, "adjusted_p": claim.adjusted}
            shown = {key: None if math.isnan(value) else value for key, value in numbers.items()}  # nan is no JSON
            inequalities.append({"label": claim.label, **shown, "verdict": claim.verdict})
        record = hypothesis.model_dump(mode="json") | {"verdict": finding.verdict, "inequalities": inequalities}
        records.append(record | {"needs": finding.needs})
    tree = {"hash": hypotheses.hash, "declared": declared, "hypotheses": records}
    return json.dumps(tree, indent=1, ensure_ascii=False) + "\n"
