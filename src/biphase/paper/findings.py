"""The paper's eight findings, each as claims with the rule that judges them; results → their verdicts. Also the report
on the paper's published scores, by the same code as reports on our own studies.

Scores of a family are averages over its datasets; arms with MLM are those at the study's reference masking ratio,
unless the claim is about the ratio.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from biphase.paper.gaps import (
    ON_PAR,
    clm_first_pays,
    clm_holds_on_tokens,
    clm_is_faster_early,
    continuing_clm_pays,
    mlm_beats_clm,
    no_ratio_is_best,
)
from biphase.paper.published import TABLE_NUMBERS, read_reference
from biphase.paper.spreads import clm_first_forgives, clm_is_steadier
from biphase.report.claims import Claim, Finding, Verdicts, count_tests, judge_claims, name_noise
from biphase.report.formats import show_list
from biphase.report.page import write_report
from biphase.report.results import ResultSet, with_averages

FINDINGS: dict[str, tuple[str, str, Callable[[ResultSet], list[Claim]]]] = {
    "F1": (
        "MLM beats CLM on SC and QA at every size, most of all on QA",
        "MLM minus CLM at the same size and steps lies above zero on SC and on QA, at every size; and this "
        "gap is larger on QA than on every other family, at every size.",
        mlm_beats_clm,
    ),
    "F2": (
        "CLM is on par or better on TC, and closes on MLM for IR as size grows",
        "CLM minus MLM on TC lies above −1 point at every size (on par or better). The gap between MLM and "
        "CLM on IR is larger at the smallest size than at the largest.",
        clm_holds_on_tokens,
    ),
    "F3": (
        "No masking ratio is best everywhere",
        "Every masking ratio is beaten by another one somewhere: at some size, on some family. (Contradicted "
        "if one ratio is nowhere more than 1 point below another.) The other claims are about the slope: the "
        "change in score from the lowest to the highest ratio, along the straight line through all of them. "
        "It is larger at the largest size than at the smallest (mean over families), above zero on IR at "
        "every size, and below zero on TC and QA at the smallest size.",
        no_ratio_is_best,
    ),
    "F4": (
        "CLM is more data-efficient early",
        "CLM minus MLM at the same step, averaged over the undecayed checkpoints before 10/42 of the budget "
        "(SC, QA), before 20/42 (IR) or over all of them (TC), lies above zero. At the last checkpoint, where "
        "it is not one of those (on TC: not the only one), the order is that of the end: CLM ahead on TC; MLM "
        "ahead on SC, QA and IR.",
        clm_is_faster_early,
    ),
    "F5": (
        "CLM-pretrained models depend less on the fine-tuning rate",
        "The standard deviation of a model's test scores, over all seeds and all fine-tuning rates from 1e-5 "
        "to 1e-4 (all rates of the study, where fewer than two lie there), is larger for MLM than for CLM at "
        "every size, on average over datasets. A rate at which either of the two diverged is left out for "
        "both. Intervals and tests leave out one seed at a time, of pretraining where there are several (the "
        "jackknife, with Student's t).",
        clm_is_steadier,
    ),
    "F6": (
        "At a fixed budget, CLM then MLM beats MLM alone",
        "At each budget, CLM→MLM minus MLM alone, as the mean over families: above zero with 25 to 50 % CLM; "
        "above −1 point with 75 % (about on par).",
        clm_first_pays,
    ),
    "F7": (
        "After CLM, results depend less on the masking ratio",
        "The standard deviation of scores over masking ratios (each score the mean over seeds), on average "
        "over families, is larger for MLM alone than for MLM after CLM, at the same size, total steps and "
        "ratios. Intervals and tests leave out one seed at a time, of pretraining where there are several (the "
        "jackknife, with Student's t); noise between seeds widens both spreads.",
        clm_first_forgives,
    ),
    "F8": (
        "Continuing with MLM from a CLM model beats continuing from an MLM model",
        "Continued with the same steps of MLM, the CLM model minus the MLM model: at the most steps, above "
        "zero on SC and TC and above −1 point on QA and IR (closed); and above −1 point on every family at "
        "12,000 of 22,000 steps, or the fewer steps nearest to this share (so many suffice).",
        continuing_clm_pays,
    ),
}
"""Key → what the paper says, how it is judged (shown beside the verdict), and the function that makes its claims."""

NOTE = f"“On par” allows for {100 * ON_PAR:g} point, a number that is ours."


def judge_paper(results: ResultSet) -> Verdicts:
    """What a report in the paper's terms says: every finding, and two sentences."""
    findings = judge_findings(results)
    over = name_noise(findings)
    return findings, answer(findings), f"{NOTE} Tests are over {over}." if over else NOTE


def judge_findings(results: ResultSet) -> tuple[Finding, ...]:
    """Every finding with its verdict (see `judge_claims`), on the standard metrics where there are any, else on the
    paper's."""
    results = with_averages(results.select(metric=results.primary_metric).results)
    return judge_claims(
        [Finding(key, said, rule, tuple(make_claims(results))) for key, (said, rule, make_claims) in FINDINGS.items()]
    )


def answer(findings: Sequence[Finding]) -> str:
    """Two sentences: what the scores say about CLM then MLM, and what became of the findings."""
    inequalities = next(finding for finding in findings if finding.key == "F6").claims[0].inequalities
    num_tests = count_tests(findings)
    ahead, behind, open_ = (
        sum(one.verdict == verdict for one in inequalities) for verdict in ("supported", "contradicted", "undecided")
    )
    noise = f"cannot be told from noise, corrected for all {num_tests} tests of this report"
    if not inequalities:
        first = "Whether CLM then MLM beats MLM alone at the same budget is not known: no finished scores compare them."
    elif ahead == behind == 0:
        first = f"The differences between CLM then MLM (25–50 % CLM) and MLM alone at the same budget {noise}."
    else:
        rest = f"; the other {open_} {noise}" if open_ else f", corrected for all {num_tests} tests of this report"
        first = (
            f"At the same budget, CLM then MLM (25–50 % CLM) is ahead of MLM alone in {ahead} of {len(inequalities)} "
            f"comparisons and behind in {behind or 'none'}{rest}."
        )
    groups = []
    for verdict in ("supported", "contradicted", "undecided"):
        chosen = [finding for finding in findings if finding.is_tested and finding.verdict == verdict]
        names = []
        for finding in chosen:
            said = finding.statement
            if not said[:2].isupper():  # `At a fixed …`, but not `MLM beats …`
                said = said[0].lower() + said[1:]
            names.append(finding.key if verdict == "undecided" else f"{finding.key} ({said})")
        are = "is" if len(names) == 1 else "are"
        groups.append(f"{verdict} {are} {show_list(names)}" if names else f"none is {verdict}")
    untested = [finding.key for finding in findings if not finding.is_tested]
    if untested:
        groups.append(f"no scores test {', '.join(untested)}")
    return f"{first} Of the {len(findings)} findings, {'; '.join(groups)}."


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
        title=TITLE,
        question=QUESTION,
        verdicts=verdicts,
        answer=verdicts[1],
        table_numbers=TABLE_NUMBERS,
        commands=COMMANDS,
        missing=NOT_PUBLISHED,
    )
