"""The paper's published scores, and its eight findings as lines in the grammar of hypotheses.

Should We Still Pretrain Encoders with Masked Language Modeling? arXiv 2507.00994. The numbers are in `bundled/paper/`,
with their sources in `SOURCE.md`, and the findings in `findings.yaml`. The same code judges published scores and the
scores of our own studies.

The score of a family is the average over its datasets. Arms with MLM have the reference masking ratio of their study,
unless the claim is about the ratio.
"""

import csv
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any

from biphase.config import BUNDLED, read_yaml
from biphase.errors import InputError, clipped, first_of
from biphase.report import claims
from biphase.report.contrasts import with_averages
from biphase.report.formats import show_count, show_difference, show_list, write_steps
from biphase.report.hypotheses import ArmsBySpot, Spot, bind, measure_claim
from biphase.report.page import PageText, WrittenReport, write_report
from biphase.report.results import ReportArm, Result, ResultSet, reference_mask
from biphase.report.statistics import Interval, is_stability_rate

PUBLISHED_FAMILIES = ("SC", "TC", "QA", "IR")

PUBLISHED_SIZES = {"210m", "610m", "1b"}
"""The sizes of the networks that the paper's findings are about."""

TOKENS_PER_STEP = 2_359_296


def read_reference() -> ResultSet:
    """Read the paper's 800 published scores, averages included, in the order of its tables."""
    folder = BUNDLED / "paper"
    training_rows = csv.DictReader((folder / "paper_flops.csv").read_text("utf-8").splitlines())
    score_rows = csv.DictReader((folder / "paper_scores.csv").read_text("utf-8").splitlines())
    training = {row["arm"]: row for row in training_rows}
    results = []
    for row in score_rows:
        steps = {key: int(row[key] or 0) for key in ("pretrain_steps", "clm_steps", "mlm_steps", "cpt_steps")}
        mask = int(row["mask_percent"]) if row["mask_percent"] else None
        name, comparison = row["arm"], (row["setup"], row["size"], row["objective"].lower())
        parent, flops = training[name]["parent"] or None, float(training[name]["flops"])
        tokens = float(TOKENS_PER_STEP * (steps["pretrain_steps"] + steps["cpt_steps"]))
        arm = ReportArm(name, *comparison, mask, **steps, parent=parent, flops=flops, tokens=tokens)  # type: ignore[arg-type]
        family: Any = row["family"]
        mean, half_width = float(row["mean"]) / 100, float(row["ci95"]) / 100
        summary = Interval(mean, mean - half_width, mean + half_width, num=5)
        results.append(Result(arm, family, row["dataset"], "paper", summary=summary))
    return ResultSet(tuple(results))


def place_arms(arms: Iterable[ReportArm]) -> tuple[ReportArm, ...]:
    """Place the arms of a study in every comparison of the paper to which they belong; the others become `other`.

    An arm whose setup is `efficiency`, `control` or `other` keeps it. The other arms go to these comparisons, but one
    with a recipe of its own not to `ratio`, `adapted` and `cpt` if a plain arm has its size, steps and mask:

    - `objective`: a single objective, at the largest budget of its size
    - `ratio`: CLM alone, MLM alone and CLM+MLM at the reference mask, at each budget that has such CLM+MLM
    - `adapted`: CLM+MLM with the same steps at two masking ratios or more
    - `cpt`: arms that continue another arm, and the arms that they continue
    - `control`: all final models of a size that also has random weights
    """
    arms = tuple(arms)
    mask = reference_mask(arms)
    whole = [arm for arm in arms if arm.setup not in ("efficiency", "control", "other")]
    controlled = {arm.size for arm in arms if arm.setup == "control"}
    training_of = attrgetter("size", "clm_steps", "mlm_steps", "cpt_steps", "mask_percent")
    plain = {training_of(arm) for arm in whole if arm.is_plain}
    usual = [arm for arm in whole if arm.is_plain or training_of(arm) not in plain]
    scratch = [arm for arm in whole if not arm.cpt_steps]
    largest = {arm.size: max(a.pretrain_steps for a in scratch if a.size == arm.size) for arm in scratch}
    mixed = [arm for arm in usual if arm.objective == "clm+mlm" and not arm.cpt_steps]
    budgets = {(arm.size, arm.pretrain_steps) for arm in mixed if arm.mask_percent == mask}
    ratios = Counter((arm.size, arm.clm_steps, arm.mlm_steps) for arm in mixed)
    parents = {arm.parent for arm in whole if arm.cpt_steps}

    placed = []
    for arm in arms:
        is_scratch, is_usual = not arm.cpt_steps, arm in usual
        belongs = {
            "objective": is_scratch and arm.objective != "clm+mlm" and arm.pretrain_steps == largest.get(arm.size),
            "ratio": is_usual
            and is_scratch
            and (arm.size, arm.pretrain_steps) in budgets
            and arm.mask_percent in (None, mask),
            "adapted": arm in mixed and ratios[arm.size, arm.clm_steps, arm.mlm_steps] > 1,
            "cpt": is_usual and (not is_scratch or arm.name in parents),
            "control": arm.size in controlled,
        }
        setups = [setup for setup, is_there in belongs.items() if is_there] or ["other"]
        if arm not in whole:
            setups = [arm.setup, *(["control"] if arm.setup == "other" and arm.size in controlled else [])]
        placed += [replace(arm, setup=setup) for setup in setups]
    return tuple(placed)


NOTE = f"“On par” means within {100 * claims.ON_PAR:g} point; that margin is ours."


@cache
def read_findings() -> dict[str, Any]:
    """Read the findings' file. `findings`: key → the paper's statement, the lines that must hold, and a further rule of
    judging; `names`: name in these lines → the definition of its arms; `report`: title and question of the page about
    published scores."""
    return read_yaml(BUNDLED / "paper" / "findings.yaml")


def stand_for(definition: Mapping[str, Any], results: ResultSet) -> ArmsBySpot:
    """Find the arms that fit the definition of a name in the findings' file."""
    longest = dict[tuple[str, bool], int]()
    for arm in results.arms:
        training = arm.size, arm.cpt_steps > 0
        longest[training] = max(longest.get(training, 0), arm.budget)
    low, high = definition.get("share", (0, 1))
    least, most = definition.get("reached", (0, 1))
    fields = {key: definition[key] for key in ("setup", "objective") if key in definition}
    arms_by_spot: dict[Spot, dict[str, str]] = {}
    for arm in results.select(**fields).arms:
        is_chosen = (
            ("mask" not in definition or arm.mask_percent == results.usual_mask)
            and bool(arm.cpt_steps) == definition.get("continued", False)
            and low <= arm.clm_share <= high
            and least <= arm.budget / longest[arm.size, arm.cpt_steps > 0] <= most
        )
        if is_chosen:
            split = f"{write_steps(arm.clm_steps)}+{write_steps(arm.mlm_steps)}"
            objective = split if arm.objective == "clm+mlm" else arm.objective
            mask = f"{arm.mask_percent}%" if arm.mask_percent else ""
            short_name = " ".join(filter(None, [arm.parent if arm.cpt_steps else "", objective, mask]))
            members = arms_by_spot.setdefault((arm.size, arm.budget), {})
            members[arm.name if short_name in members else short_name] = arm.name
    return arms_by_spot


def measure_findings(results: ResultSet) -> tuple[claims.Finding, ...]:
    """Measure every finding, without verdicts, by the primary metric at the paper's fine-tuning rates. A line about
    absent arms counts as untested. `results` include averages."""
    results = results.select(metric=results.primary_metric)
    is_published = {size.lower() for size in results.sizes} <= PUBLISHED_SIZES
    scope = "" if is_published else f"at size {show_list(results.sizes)}"
    families = {family: family for family in PUBLISHED_FAMILIES}
    planned_tasks = {task: family for task, family in results.planned_tasks.items() if family in families}
    selected = []
    for result in results.results:
        if result.family in families:
            by_rate = {rate: scores for rate, scores in (result.by_rate or {}).items() if is_stability_rate(rate)}
            selected.append(replace(result, by_rate=by_rate))
    results = replace(results, results=selected, planned_tasks=planned_tasks)
    named_arms = {name: stand_for(definition, results) for name, definition in read_findings()["names"].items()}
    findings = []
    for key, finding in read_findings()["findings"].items():
        measured = []
        for line in finding["holds"]:
            try:
                measured.append(measure_claim(bind(line, named_arms, families), results))
            except InputError as error:
                reason = str(error).removeprefix(f"'{clipped(line)}': ").partition(";")[0]
                measured.append(claims.Claim(line, (), (reason,)))
        findings.append(claims.Finding(key, finding["says"], finding.get("judged", ""), tuple(measured), scope))
    return tuple(findings)


def judge_paper(measured: Sequence[claims.Finding]) -> claims.Verdicts:
    """Judge the findings of `measure_findings`. Return them, the answer in the paper's terms, and a note about the
    tests."""
    findings = claims.judge_claims(measured)
    over = claims.name_noise(findings)
    return findings, answer(findings), f"{NOTE} Tests account for variation over {over}." if over else NOTE


def answer(findings: Sequence[claims.Finding]) -> str:
    """Write the findings grouped by verdict; for networks of the paper's sizes also how CLM then MLM compares with MLM
    alone."""
    if not any(finding.is_tested for finding in findings):
        return f"No score tests any of the paper's {len(findings)} findings."
    sixth = next(finding for finding in findings if finding.key == "F6")
    verdicts = Counter(inequality.verdict for claim in sixth.claims[:2] for inequality in claim.inequalities)
    ahead, behind, num_open = verdicts["supported"], verdicts["contradicted"], verdicts["undecided"]
    tested = show_count(claims.count_tested(findings), "finding")
    noise = f"cannot be distinguished from noise after correction for the {tested} tested"
    scope, first = findings[0].scope, ""
    # A study, which has a scope, answers its own question.
    if num_open and not scope and not ahead and not behind:
        first = f"The differences between CLM then MLM (25–50 % CLM) and MLM alone at the same budget {noise}. "
    elif verdicts and not scope:
        ending = f"; the other {num_open} {noise}" if num_open else f", corrected for the {tested} tested"
        first = (
            f"At the same budget, CLM then MLM (25–50 % CLM) is ahead of MLM alone in {ahead} of {verdicts.total()} "
            f"comparisons and behind in {behind or 'none'}{ending}. "
        )

    words = {}
    for finding in findings:
        statement = finding.statement
        if not statement[:2].isupper():  # `At a fixed …`, but not `MLM beats …`
            statement = statement[0].lower() + statement[1:]
        parts = finding.told_parts if scope and finding.is_tested else ""
        told = "; ".join(filter(None, ["" if finding.verdict == "undecided" else statement, parts]))
        words[finding.key] = f"{finding.key} ({told})" if told else finding.key
    groups = claims.group_verdicts(findings, words)
    alone = []
    for finding in findings:
        against = [one for one in finding.inequalities if one.alone.startswith("contradicted")]
        alone += [f"{finding.key} ({one.label}: {show_difference(one.contrast.against(one.bound))})" for one in against]
    groups += f"; without correction for multiple tests, {first_of(alone)} would be contradicted" if alone else ""
    return f"{first}Of the paper’s {len(findings)} findings, {scope}{': ' if scope else ''}{groups}."


COMMANDS = ("pip install .", "biphase report paper --out paper-report")


def report_paper(out: Path) -> WrittenReport:
    """Write the report on the paper's scores into the folder `out`, as `write_report` does."""
    results = with_averages(read_reference())
    verdicts = judge_paper(measure_findings(results))
    title_and_question = read_findings()["report"]
    page_text = PageText(**title_and_question, verdicts=verdicts, commands=COMMANDS, answer=verdicts[1])
    return write_report(results, out, page_text)
