"""The hypotheses of a study: held against its plan before it runs, recorded when it runs, judged by its results."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from biphase.errors import InputError
from biphase.files import content_hash, read_json, write_json
from biphase.paper.findings import FINDINGS
from biphase.report.claims import Claim, ClaimTest, Finding, judge_claims, make_claim, make_inequality
from biphase.report.contrasts import Terms
from biphase.report.equivalents import contrast_at_share
from biphase.report.grammar import EQUIVALENT, MEAN_OF_FAMILIES, ParsedInequality, parse_inequality
from biphase.report.hypotheses import AskedInequality, AskedTerm, Ladder, Spot, bind
from biphase.report.results import AVERAGE, FAMILY_CODES, FAMILY_NAMES, ReportArm, Result, ResultSet, with_averages
from biphase.study.arms import Arm, refuse_doubles
from biphase.study.curricula import write_steps
from biphase.study.plan import Plan
from biphase.study.spec import Hypothesis, Study
from biphase.tasks.spec import find_task

CITED = re.compile(r"(F[0-9]+) of the paper")
"""A line that is one of the paper's findings as a whole."""

HOW_JUDGED = "Supported if each inequality is, contradicted if one is; corrected (Holm) for all that is declared."


def list_ladders(plan: Plan) -> dict[str, Ladder]:
    """What names in a hypothesis stand for: an arm, an arm without its budget, a curriculum, a group, a model on the
    way or with random weights. One that stands for several arms of a model and budget stands for nothing."""
    plan = plan.of_first_seed
    found: dict[str, dict[Spot, str]] = {}
    for arm in plan.arms.values():
        found[arm.name] = {(arm.model, arm.recipe.num_steps): arm.name}
    for model in plan.models:
        if model.kind != "final":
            found[model.name] = {(plan.arms[model.arm].model, model.step): model.name}
    taken = set(found)
    several = set[str]()
    for arm in plan.arms.values():
        spot = (arm.model, arm.recipe.num_steps)
        for name in line_names(arm):
            if name in taken:
                continue
            if spot in (ladder := found.setdefault(name, {})):
                several.add(name)
            ladder[spot] = arm.name
    return {name: {} if name in several else ladder for name, ladder in found.items()}


def line_names(arm: Arm) -> Iterator[str]:
    """The names that an arm shares with the same arm at other budgets."""
    without = arm.name.removesuffix(f"-{write_steps(arm.recipe.num_steps)}")
    names = [without] if without != arm.name else []
    if arm.parent is None and not arm.settings:
        names.append(arm.curriculum)
    yield from dict.fromkeys([*names, arm.group])


def ask(plan: Plan) -> dict[str, list[tuple[str, list[AskedInequality]]]]:
    """Every hypothesis → its lines, each with what it asks of the plan's arms; a finding of the paper finds its arms by
    itself. Raises `InputError` for a line that is not in the grammar, or asks for what the study does not have."""
    study = plan.study
    refuse_doubles("hypotheses", [hypothesis.name for hypothesis in study.hypotheses])
    if study.hypotheses and study.evaluation is None:
        raise InputError("hypotheses are about scores: the study needs an evaluation")
    tasks = {} if study.evaluation is None else study.evaluation.tasks
    families = {find_task(task).name: FAMILY_CODES[find_task(task).family] for task in tasks}
    ladders = list_ladders(plan)
    asked: dict[str, list[tuple[str, list[AskedInequality]]]] = {}
    for hypothesis in study.hypotheses:
        try:
            asked[hypothesis.name] = [
                (line, [] if find_finding(line) else bind(parse_inequality(line), ladders, families))
                for line in hypothesis.holds
            ]
        except InputError as error:
            raise InputError(f"hypothesis '{hypothesis.name}': {error}") from None
    return asked


def find_finding(line: str) -> str | None:
    """The key of the paper's finding that a line cites. Raises `InputError` where the paper has none of that key."""
    cited = CITED.fullmatch(line.strip())
    if cited and cited[1] not in FINDINGS:
        raise InputError(f"'{line}': the paper's findings are {', '.join(FINDINGS)}")
    return cited[1] if cited else None


def judge_hypotheses(plan: Plan, results: ResultSet) -> tuple[Finding, ...]:
    """Every hypothesis with its verdict, corrected together, by the standard metrics."""
    results = with_averages(results.select(metric=results.primary_metric).results) if results.results else results
    arms = {arm.name: arm for arm in results.arms()}
    findings = []
    for hypothesis, lines in zip(plan.study.hypotheses, ask(plan).values(), strict=True):
        claims: list[Claim] = []
        for line, asked in lines:
            key = find_finding(line)
            claims += FINDINGS[key][2](results) if key else [make_line(line, asked, results, arms)]
        findings.append(Finding(hypothesis.name, hypothesis.says, HOW_JUDGED, tuple(claims)))
    return judge_claims(findings)


def make_line(line: str, asked: Sequence[AskedInequality], results: ResultSet, arms: Mapping[str, ReportArm]) -> Claim:
    """A line of a hypothesis as a claim: that a sum lies below a bound says that the contrary sum lies above its
    contrary."""
    parsed = parse_inequality(line)
    if parsed.kind == EQUIVALENT:
        return make_equivalent_line(parsed, asked, results, arms)
    sign = 1.0 if parsed.relation == ">" else -1.0
    tests: list[ClaimTest] = []
    for one in asked:
        terms: Terms | None = []
        for term in one.terms:
            found = find_terms(term, results, arms)
            terms = None if found is None or terms is None else [*terms, *((sign * w, score) for w, score in found)]
        tests.append((one.label if sign > 0 else f"−({one.label})", terms, sign * parsed.bound))
    return make_claim(line, tests, "scores")


def make_equivalent_line(
    line: ParsedInequality, asked: Sequence[AskedInequality], results: ResultSet, arms: Mapping[str, ReportArm]
) -> Claim:
    """A bound on a compute equivalent, in FLOPs, as a claim about scores: that the share is below 0.6 says that the arm
    is above the baseline's line at 1 / 0.6 of the arm's compute."""
    inequalities, untested = [], []
    for one in asked:
        [term], rungs = one.terms, [arms[name] for name in one.ladder if name in arms]
        if term.arm not in arms or len(rungs) < len(one.ladder):
            untested.append(f"{one.label} (no scores)")
            continue
        try:
            seen = contrast_at_share(results, arms[term.arm], rungs, line.bound, datasets=datasets_of(term, results))
        except InputError as error:
            untested.append(f"{one.label} ({error})")
            continue
        if seen is None:
            untested.append(f"{one.label} (the baseline's ladder does not reach {1 / line.bound:.2g} of its compute)")
            continue
        above = line.relation == "<"
        label = f"{one.label}: {'arm − baseline' if above else 'baseline − arm'} at {1 / line.bound:.2g} of its compute"
        inequalities.append(make_inequality(label, seen if above else replace(seen, estimate=-seen.estimate), 0.0))
    return Claim(line.text, tuple(inequalities), tuple(untested))


def datasets_of(term: AskedTerm, results: ResultSet) -> list[str] | None:
    """The data sets that a term is about; None for all."""
    if term.task == MEAN_OF_FAMILIES:
        return None
    is_family = term.task in FAMILY_NAMES
    return results.datasets(term.task, results.primary_metric) if is_family else [term.task]


def find_terms(term: AskedTerm, results: ResultSet, arms: Mapping[str, ReportArm]) -> Terms | None:
    """A term over scores: that of a task, the average of a family, or the mean of these; None where one is missing."""
    if term.arm not in arms:
        return None
    arm, metric = arms[term.arm], results.primary_metric
    found: list[Result | None]
    if term.task == MEAN_OF_FAMILIES:
        found = [results.find(arm, family, AVERAGE, metric) for family in results.families]
    elif term.task in FAMILY_NAMES:
        found = [results.find(arm, term.task, AVERAGE, metric)]
    else:
        found = [results.find(arm, family, term.task, metric) for family in results.families]
        found = [score for score in found if score is not None] or [None]
    scores = [score for score in found if score is not None]
    return [(term.weight / len(scores), score) for score in scores] if len(scores) == len(found) else None


# What was declared, and when


def hypotheses_hash(hypotheses: Sequence[Hypothesis]) -> str:
    """Eight digits of what hypotheses say."""
    return content_hash([hypothesis.model_dump(mode="json") for hypothesis in hypotheses])[:8]


def declare(study: Study, folder: Path, units_done: int) -> None:
    """Record in a study's folder what it declares, as it is about to run; a line for each change."""
    path = folder / "hypotheses.json"
    declared = read_declared(folder)
    current = hypotheses_hash(study.hypotheses)
    if (not study.hypotheses and not declared) or (declared and declared[-1]["hash"] == current):
        return
    when = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    write_json(path, [*declared, {"hash": current, "when": when, "units_done": units_done}])


def read_declared(folder: Path) -> list[dict[str, Any]]:
    path = folder / "hypotheses.json"
    return read_json(path) if path.exists() else []


def describe_declaration(study: Study, folder: Path) -> str:
    """Whether the hypotheses stood before the results did, in a sentence."""
    declared, current = read_declared(folder), hypotheses_hash(study.hypotheses)
    if not declared:
        return f"Hypotheses {current}: not declared, for the study has not run with them."
    last = declared[-1]
    if last["hash"] != current:
        return f"Hypotheses {current}: changed since the study last ran; it ran with {last['hash']}."
    when = f"declared {last['when']}"
    when += f", when {last['units_done']} units were done" if last["units_done"] else ", before anything was trained"
    if len(declared) > 1:
        return f"Hypotheses {current}: changed {len(declared) - 1} times since the first run; these were {when}."
    return f"Hypotheses {current}: {when}; unchanged since."


def hypotheses_json(plan: Plan, folder: Path, findings: Sequence[Finding]) -> str:
    """The hypotheses with their verdicts, for other programs."""
    judged = []
    for hypothesis, finding in zip(plan.study.hypotheses, findings, strict=True):
        inequalities = []
        for one in finding.inequalities:
            values = {
                "estimate": one.estimate,
                "low": one.low,
                "high": one.high,
                "bound": one.bound,
                "p": one.p_value,
                "adjusted_p": one.adjusted,
            }
            known = {key: value if value == value else None for key, value in values.items()}  # nan is no JSON
            inequalities.append({"label": one.label, **known, "verdict": one.verdict})
        said = hypothesis.model_dump(mode="json")
        judged.append({**said, "verdict": finding.verdict, "inequalities": inequalities, "needs": finding.needs})
    declared = describe_declaration(plan.study, folder)
    tree = {"hash": hypotheses_hash(plan.study.hypotheses), "declared": declared, "hypotheses": judged}
    return json.dumps(tree, indent=1, ensure_ascii=False) + "\n"
