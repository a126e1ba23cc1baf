"""The paper's eight findings, as lines in the grammar of hypotheses (`findings.yaml`); results → their verdicts. Also
the report on the paper's published scores, by the same code as reports on our own studies.

Scores of a family are averages over its datasets; arms with MLM are those at the study's reference masking ratio,
unless the claim is about the ratio.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from biphase.errors import InputError
from biphase.paper.published import PUBLISHED_FAMILIES, PUBLISHED_SIZES, TABLE_NUMBERS, read_reference
from biphase.report.arms import reference_mask, short_steps, sizes_of
from biphase.report.averages import with_averages
from biphase.report.claims import (
    ON_PAR,
    Claim,
    Finding,
    Verdicts,
    count_tested,
    group_verdicts,
    judge_claims,
    name_noise,
)
from biphase.report.formats import show_count, show_list
from biphase.report.grammar import parse_inequality
from biphase.report.hypotheses import NOTHING_ASKED, AskedScores, Ladder, bind, make_line
from biphase.report.page import Told, write_report
from biphase.report.results import ReportArm, Result, ResultSet
from biphase.report.statistics import is_stability_rate
from biphase.trees import parse_yaml

NOTE = f"“On par” allows for {100 * ON_PAR:g} point, a number that is ours."


@cache
def read_findings() -> dict[str, Any]:
    """`findings`: key → what the paper says, the lines that are to hold, and what they do not tell of how it is judged;
    `names`: what the names in these lines stand for."""
    text = (resources.files("biphase.paper") / "findings.yaml").read_text(encoding="utf-8")
    return parse_yaml(text)


def stand_for(chosen: Mapping[str, Any], arms: Sequence[ReportArm]) -> Ladder:
    """What a name of the findings' file stands for among these arms."""
    usual, longest = reference_mask(arms), dict[tuple[str, bool], int]()
    for arm in arms:
        place = arm.size, arm.cpt_steps > 0
        longest[place] = max(longest.get(place, 0), arm.budget)
    low, high = chosen.get("share", (0, 1))
    least, most = chosen.get("reached", (0, 1))
    ladder: dict[tuple[str, int], dict[str, str]] = {}
    for arm in arms:
        is_chosen = (
            arm.setup == chosen["setup"]
            and chosen.get("objective", arm.objective) == arm.objective
            and ("mask" not in chosen or arm.mask_percent == usual)
            and bool(arm.cpt_steps) >= chosen.get("continued", False)
            and low <= arm.clm_share <= high
            and least <= arm.budget / longest[arm.size, arm.cpt_steps > 0] <= most
        )
        if is_chosen:
            split = f"{short_steps(arm.clm_steps)}+{short_steps(arm.mlm_steps)}"
            objective = split if arm.objective == "clm+mlm" else arm.objective
            mask = f"{arm.mask_percent}%" if arm.mask_percent else ""
            kind = " ".join(filter(None, [arm.parent if arm.cpt_steps else "", objective, mask]))
            members = ladder.setdefault((arm.size, arm.budget), {})
            members[arm.name if kind in members else kind] = arm.name
    return ladder


def make_claims(key: str, results: ResultSet, planned: AskedScores = NOTHING_ASKED) -> list[Claim]:
    """The lines of a finding as claims, at the paper's fine-tuning rates; one that is about arms that are not there is
    untested. `planned` is that of `make_line`."""
    families = {family: family for family in PUBLISHED_FAMILIES}
    asked = {task: family for task, family in planned.families.items() if family in families}
    planned = AskedScores(asked, planned.num_runs)
    results = ResultSet(tuple(at_stability_rates(one) for one in results.results if one.family in families))
    arms = results.arms()
    ladders = {name: stand_for(chosen, arms) for name, chosen in read_findings()["names"].items()}
    claims = []
    for line in read_findings()["findings"][key]["holds"]:
        try:
            claims.append(make_line(bind(parse_inequality(line), ladders, families), results, planned))
        except InputError as error:
            claims.append(Claim(line, (), (str(error).removeprefix(f"'{line}': ").partition(";")[0],)))
    return claims


def at_stability_rates(result: Result) -> Result:
    """A result without its scores at rates that the paper says nothing of."""
    by_rate = result.by_rate and {rate: own for rate, own in result.by_rate.items() if is_stability_rate(rate)}
    return replace(result, by_rate=by_rate)


def judge_paper(results: ResultSet, planned: AskedScores = NOTHING_ASKED) -> Verdicts:
    """What a report in the paper's terms says: every finding, and two sentences. `planned` is that of `make_line`."""
    findings = judge_findings(results, planned)
    over = name_noise(findings)
    return findings, answer(findings), f"{NOTE} Tests are over {over}." if over else NOTE


def judge_findings(results: ResultSet, planned: AskedScores = NOTHING_ASKED) -> tuple[Finding, ...]:
    """Every finding with its verdict (see `judge_claims`), on the standard metrics where there are any, else on the
    paper's. `planned` is that of `make_line`."""
    results = with_averages(results.select(metric=results.primary_metric).results)
    sizes = sizes_of(results.arms())
    place = "" if {size.lower() for size in sizes} <= PUBLISHED_SIZES else f"here, at {show_list(sizes)}"
    findings = []
    for key, one in read_findings()["findings"].items():
        claims = make_claims(key, results, planned)
        findings.append(Finding(key, one["says"], one.get("judged", ""), tuple(claims), place))
    return judge_claims(findings)


def answer(findings: Sequence[Finding]) -> str:
    """What the scores say about CLM then MLM, where they are of the paper's sizes, and what became of the findings."""
    inequalities = next(finding for finding in findings if finding.key == "F6").claims[0].inequalities
    ahead, behind, open_ = (
        sum(one.verdict == verdict for one in inequalities) for verdict in ("supported", "contradicted", "undecided")
    )
    corrected = f"corrected for the {show_count(count_tested(findings), 'finding')} tested"
    noise = f"cannot be told from noise, {corrected}"
    if not any(finding.is_tested for finding in findings):
        return f"No score tests any of the paper's {len(findings)} findings."
    place = findings[0].place
    if not inequalities or place:  # a study answers its own question
        first = ""
    elif ahead == behind == 0:
        first = f"The differences between CLM then MLM (25–50 % CLM) and MLM alone at the same budget {noise}. "
    else:
        rest = f"; the other {open_} {noise}" if open_ else f", {corrected}"
        first = (
            f"At the same budget, CLM then MLM (25–50 % CLM) is ahead of MLM alone in {ahead} of {len(inequalities)} "
            f"comparisons and behind in {behind or 'none'}{rest}. "
        )

    def name(finding: Finding) -> str:
        said = finding.statement
        if not said[:2].isupper():  # `At a fixed …`, but not `MLM beats …`
            said = said[0].lower() + said[1:]
        return finding.key if finding.verdict == "undecided" else f"{finding.key} ({said})"

    groups = group_verdicts(findings, name)
    return f"{first}Of the paper’s {len(findings)} findings, {place}{': ' if place else ''}{groups}."


TITLE = "Should we still pretrain encoders with masked language modeling?"
QUESTION = (
    "Same architecture, same data in the same order, same budget: which objective makes the better text encoder, CLM "
    "(the next token), MLM (masked tokens), or one after the other? The 800 published scores of arXiv 2507.00994, "
    "judged anew."
)
COMMANDS = ("pip install .", "biphase report paper --out paper-report")
NOT_PUBLISHED = (
    "Published are means and half-widths over five fine-tuning seeds (1.96·s/√5), rounded to 0.01 points. Tests are "
    "Welch's, from these alone: pairing by seed, which could tell smaller differences, is not possible. A half-width "
    "printed as 0.00 counts as 0.005.",
    "Scores at every learning rate and seed are not published: F5 cannot be tested, and its figure not drawn.",
    "The four models of 40,000 steps CLM and 2,000 steps MLM at masking ratios of 20 to 50 % are in no published "
    "table: F7 cannot be tested, and its figure not drawn.",
    "Half-widths of averages are taken as published; to recompute them needs the scores of each seed.",
    "The metrics are the paper's own; standard ones (F1 of entities, official SQuAD F1, trec_eval's nDCG@10) are not "
    "published.",
    "FLOPs are not published: they are counted from the published shapes, with the head where there is a target.",
)


def report_paper(out: Path) -> Path:
    """Write `tables/`, `figures/` and `index.html` into the folder `out`; returns the page."""
    results = read_reference()
    verdicts = judge_paper(results)
    return write_report(
        results,
        out,
        Told(TITLE, QUESTION, verdicts, commands=COMMANDS),
        answer=verdicts[1],
        table_numbers=TABLE_NUMBERS,
        missing=NOT_PUBLISHED,
    )
