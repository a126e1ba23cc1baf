"""The hypotheses of a study, which its plan holds: recorded when it runs, judged by its results."""

import json
import math
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any

from biphase.files import content_hash, read_json, write_json
from biphase.report.claims import Claim, Finding, Verdicts, judge_claims
from biphase.report.formats import show_count
from biphase.report.grammar import AskedInequality
from biphase.report.hypotheses import make_line
from biphase.report.paper import judge_paper, measure_findings
from biphase.report.results import MEAN_OF_FAMILIES, ResultSet
from biphase.study.plan import Plan

HOW_JUDGED = "Supported if each inequality is, contradicted if one is; corrected (Holm) for the hypotheses declared."


def hash_text(plan: Plan) -> str:
    """Return eight digits of what hypotheses say: what a folder of an earlier version recorded."""
    return content_hash([hypothesis.model_dump(mode="json") for hypothesis in plan.study.hypotheses])[:8]


def hash_hypotheses(plan: Plan) -> str:
    """Return eight digits of what hypotheses say, and of what that is about in this plan: which arms, at which budgets,
    on which tasks. A line of the paper is about all of them."""
    everything, about = [list(plan.of_first_seed.arms), list(plan.families)], list[list[Any]]()
    for lines in plan.hypotheses:
        about.append([everything if isinstance(line, str) else list_subjects(plan, line) for line in lines])
    return content_hash([hash_text(plan), about])[:8]


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


def list_equivalents(plan: Plan) -> dict[str, tuple[str, ...]]:
    """Map each arm whose compute-equivalent a hypothesis is about to the arms of the baseline."""
    ladders = {}
    for line in chain(*plan.hypotheses):
        inequalities = [] if isinstance(line, str) else [*chain(*line)]
        for inequality in inequalities:
            if inequality.ladder:
                ladders[inequality.operands[0].arms[0]] = inequality.ladder
    return ladders


def judge_results(plan: Plan, results: ResultSet) -> tuple[tuple[Finding, ...], Verdicts]:
    """Judge every hypothesis, corrected together, by the standard metrics; on all tasks of the plan that it is about,
    or not at all; and not by scores that are unfinished or lost seeds. And judge the paper's findings by the same
    scores. `results` have their averages, and what the plan expects."""
    results = results.select(metric=results.primary_metric)
    measured = measure_findings(results)
    cited, findings = {finding.key: finding.claims for finding in measured}, []
    for hypothesis, lines in zip(plan.study.hypotheses, plan.hypotheses, strict=True):
        claims: list[Claim] = []
        for line in lines:
            claims += cited[line] if isinstance(line, str) else [make_line(line, results)]
        findings.append(Finding(hypothesis.name, hypothesis.says, HOW_JUDGED, tuple(claims)))
    return judge_claims(findings), judge_paper(measured)


# What was declared, and when


def declare(plan: Plan, folder: Path, units_done: int) -> None:
    """Record in a study's folder what it declares, as it is about to run; a line for each change."""
    declared, current = read_declared(folder), hash_hypotheses(plan)
    if not declared or declared[-1]["hash"] != current:
        when = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
        entry = {"hash": current, "text": hash_text(plan), "when": when, "units_done": units_done}
        write_json(folder / "hypotheses.json", [*declared, entry])


def read_declared(folder: Path) -> list[dict[str, Any]]:
    """Read what was declared, each time with its `hash` and that of its `text` alone; earlier versions wrote the latter
    as `hash`."""
    path = folder / "hypotheses.json"
    return read_json(path) if path.exists() else []


def tell_declaration(plan: Plan, folder: Path) -> str:
    """Tell whether the hypotheses stood before the results did, in a sentence."""
    declared, current = read_declared(folder), hash_hypotheses(plan)
    if not declared:
        return f"Hypotheses {current}: not declared, for the study has not run with them."
    last, is_later = declared[-1], declared[-1]["units_done"]
    when = f"declared {last['when']}"
    when += f", when {is_later} units were done" if is_later else ", before anything was trained"
    worded = [entry for entry in declared if "text" not in entry]
    if last["hash"] not in (current, hash_text(plan)):
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


def hypotheses_json(plan: Plan, declared: str, findings: Sequence[Finding]) -> str:
    """Write the hypotheses with their verdicts; `declared` tells whether these stood before the results did."""
    records = []
    for hypothesis, finding in zip(plan.study.hypotheses, findings, strict=True):
        inequalities = []
        for claim in finding.inequalities:
            interval = claim.interval
            numbers = {"estimate": claim.estimate, "low": interval.low, "high": interval.high, "bound": claim.bound}
            numbers |= {"p": claim.p_value, "adjusted_p": claim.adjusted}
            shown = {key: None if math.isnan(value) else value for key, value in numbers.items()}  # nan is no JSON
            inequalities.append({"label": claim.label, **shown, "verdict": claim.verdict})
        record = hypothesis.model_dump(mode="json") | {"verdict": finding.verdict, "inequalities": inequalities}
        records.append(record | {"needs": finding.needs})
    tree = {"hash": hash_hypotheses(plan), "declared": declared, "hypotheses": records}
    return json.dumps(tree, indent=1, ensure_ascii=False) + "\n"
