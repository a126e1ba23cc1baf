"""Results → verdicts on the paper's eight findings: each claim as tests, each test with its effect and interval.

A claim is a list of inequalities: a weighted sum of mean scores lies above a bound. Each is tested two-sided, all that
are tested in a report are corrected together (Holm), and only then is anything called supported or contradicted. Scores
of a family are averages over its datasets; arms with MLM are those at the study's reference masking ratio, unless the
claim is about the ratio.
"""

import bisect
import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from scipy import stats

from biphase.report.results import (
    FAMILIES,
    Contrast,
    ReportArm,
    Result,
    ResultSet,
    arms_of,
    contrast,
    datasets_of,
    families,
    family_score,
    find,
    objective_pairs,
    primary_metric,
    scores_by_rate,
    select,
    short_steps,
    sizes_of,
    stability_rates,
    with_averages,
)
from biphase.report.statistics import holm

Verdict = Literal["supported", "contradicted", "undecided"]
Terms = list[tuple[float, Result]]

ALPHA = 0.05
POWER = 0.8
ON_PAR = 0.01
"""What "on par" and "closed" allow for: one point. The paper gives no number; this one is ours."""

MOST_SEEDS = 1000

EARLY = {"SC": 10 / 42, "TC": math.inf, "QA": 10 / 42, "IR": 20 / 42}
"""Before which share of the budget the paper sees CLM ahead: 10,000 and 20,000 of 42,000 steps; on TC always."""

FEW_CLM = (0.2, 0.55)
MUCH_CLM = (0.7, 0.8)
"""Which shares of CLM count as "25 to 50 %" and as "75 %": the paper's splits are whole thousands of steps."""


@dataclass(frozen=True)
class Effect:
    """One inequality: `estimate` > `bound`."""

    label: str
    contrast: Contrast
    bound: float
    low: float
    high: float
    """Of the 95 % interval of the estimate, not corrected."""
    p_value: float
    """Two-sided, of "the estimate equals the bound"; nan where it cannot be tested."""
    num_asked: int = 1
    """The inequality is the best of so many: its p-value is multiplied by them (Bonferroni)."""
    p_contrary: float = math.nan
    """Of the contrary, where this is not the other side of the same test."""
    adjusted: float = math.nan
    adjusted_contrary: float = math.nan
    """After Holm's correction over everything tested."""
    verdict: Verdict = "undecided"
    needs: str = ""
    """What would decide it, if it is undecided."""

    @property
    def estimate(self) -> float:
        return self.contrast.estimate


@dataclass(frozen=True)
class Claim:
    """A claim within a finding: supported if all its inequalities are, contradicted if one of them is."""

    claim: str
    effects: tuple[Effect, ...]
    untested: tuple[str, ...] = ()
    """What the claim also says and the results have no scores for."""
    verdict: Verdict = "undecided"


@dataclass(frozen=True)
class Finding:
    key: str
    claim: str
    rule: str
    """How it is judged, in words."""
    parts: tuple[Claim, ...]
    verdict: Verdict
    needs: tuple[str, ...]


def judge_findings(results: ResultSet) -> tuple[Finding, ...]:
    """Every finding with its verdict, on the standard metrics where there are any, else on the paper's.

    An inequality is supported (contradicted) if its estimate lies above (below) its bound and the adjusted p-value is
    at most 5 %. A claim, and likewise a finding, is supported if everything in it is, contradicted if anything in it
    is, and undecided otherwise; also where something in it cannot be tested. Seeds are those of fine-tuning: a verdict
    is about the models at hand, not about what another pretraining run of the same arm would give.
    """
    results = with_averages(select(results, metric=primary_metric(results)).results)
    raw = {key: function(results) for key, (_, function) in FINDINGS.items()}
    effects = [effect for parts in raw.values() for part in parts for effect in part.effects]
    asked = np.array([p_values(effect) for effect in effects]).reshape(-1, 2)
    adjusted = holm(asked.ravel()).reshape(-1, 2)
    num_tests = int((~np.isnan(asked)).sum())
    decided = iter(
        [
            decide(effect, for_it, against_it, num_tests)
            for effect, (for_it, against_it) in zip(effects, adjusted.tolist(), strict=True)
        ]
    )
    findings = []
    for key, (claim, function) in FINDINGS.items():
        parts = []
        for part in raw[key]:
            made = tuple(itertools.islice(decided, len(part.effects)))
            verdicts = [*(effect.verdict for effect in made), *("undecided" for _ in part.untested)]
            parts.append(replace(part, effects=made, verdict=together(verdicts)))
        verdict = together([part.verdict for part in parts])
        rule = inspect.getdoc(function) or ""
        findings.append(Finding(key, claim, rule, tuple(parts), verdict, tuple(open_questions(parts))))
    return tuple(findings)


def answer(findings: Sequence[Finding]) -> str:
    """Two sentences: what the scores say about CLM then MLM, and what became of the findings."""
    effects = next(finding for finding in findings if finding.key == "F6").parts[0].effects
    num_tests = count_tests(findings)
    ahead, behind, open_ = (
        sum(effect.verdict == verdict for effect in effects) for verdict in ("supported", "contradicted", "undecided")
    )
    noise = f"cannot be told from the noise of fine-tuning seeds, corrected for all {num_tests} tests of this report"
    if not effects:
        first = "Whether CLM then MLM beats MLM alone at the same budget is not known: no finished scores compare them."
    elif ahead == behind == 0:
        first = f"The differences between CLM then MLM (25–50 % CLM) and MLM alone at the same budget {noise}."
    else:
        rest = f"; the other {open_} {noise}" if open_ else f", corrected for all {num_tests} tests of this report"
        first = (
            f"At the same budget, CLM then MLM (25–50 % CLM) is ahead of MLM alone in {ahead} of {len(effects)} "
            f"comparisons and behind in {behind or 'none'}{rest}."
        )
    groups = []
    for verdict in ("supported", "contradicted", "undecided"):
        chosen = [finding for finding in findings if finding.verdict == verdict]
        names = [f.key if verdict == "undecided" else f"{f.key} ({lower_first(f.claim)})" for f in chosen]
        groups.append(
            f"{verdict} {'is' if len(names) == 1 else 'are'} {join(names)}" if names else f"none is {verdict}"
        )
    return f"{first} Of the {len(findings)} findings, {'; '.join(groups)}."


def count_tests(findings: Iterable[Finding]) -> int:
    effects = [effect for finding in findings for part in finding.parts for effect in part.effects]
    return sum(not math.isnan(p_value) for effect in effects for p_value in p_values(effect))


def p_values(effect: Effect) -> tuple[float, float]:
    return effect.p_value, effect.p_contrary


def lower_first(text: str) -> str:
    """The first letter in lower case, except of an abbreviation: `At a fixed …`, but `MLM beats …`."""
    return text if text[:2].isupper() else text[0].lower() + text[1:]


def join(names: Sequence[str]) -> str:
    return ", ".join(names[:-1]) + (" and " if len(names) > 1 else "") + names[-1]


def decide(effect: Effect, adjusted: float, adjusted_contrary: float, num_tests: int) -> Effect:
    verdict: Verdict = "undecided"
    if adjusted <= ALPHA and effect.estimate > effect.bound:
        verdict = "supported"
    elif adjusted_contrary <= ALPHA or (
        adjusted <= ALPHA and effect.estimate < effect.bound and math.isnan(effect.p_contrary)
    ):
        verdict = "contradicted"
    effect = replace(effect, adjusted=adjusted, adjusted_contrary=adjusted_contrary, verdict=verdict)
    return effect if verdict != "undecided" else replace(effect, needs=seeds_needed(effect, num_tests))


def together(verdicts: Sequence[str]) -> Verdict:
    if "contradicted" in verdicts:
        return "contradicted"
    return "supported" if verdicts and set(verdicts) == {"supported"} else "undecided"


def open_questions(parts: Iterable[Claim]) -> list[str]:
    """What would decide the undecided, one line each."""
    lines = []
    for part in parts:
        lines += [f"{effect.label}: {effect.needs}" for effect in part.effects if effect.needs]
        lines += [f"scores that are not there: {what}" for what in part.untested]
    return lines


def seeds_needed(effect: Effect, num_tests: int) -> str:
    """How many fine-tuning seeds would decide it if the estimate and the spread stay as they are.

    With a probability of 80 %, at the level that Holm's correction asks of the first of `num_tests`.
    """
    seen = effect.contrast
    if math.isnan(effect.p_value) or not seen.error > 0:
        return "scores that differ between seeds, of two seeds or more" if seen.num > 1 else "two seeds or more"
    distance = abs(seen.estimate - effect.bound)
    level = ALPHA / (num_tests * effect.num_asked)

    def is_enough(num: int) -> bool:
        degrees = seen.degrees * (num - 1) / (seen.num - 1)
        error = seen.error * math.sqrt(seen.num / num)
        return bool(distance / error >= stats.t.isf(level / 2, degrees) + stats.t.ppf(POWER, degrees))

    numbers = range(seen.num + 1, MOST_SEEDS + 1)
    at = bisect.bisect_left(numbers, True, key=is_enough)
    if at == len(numbers):
        return f"not even {MOST_SEEDS:,} seeds: for this spread it is too close to {100 * effect.bound:g}"
    return f"about {numbers[at]} seeds instead of {seen.num}, if difference and spread stay as they are"


Test = tuple[str, Terms | None, float]
"""What it says, the weighted scores (None where one is missing), and the bound below them if it holds."""

# One function per finding, in the paper's order. The page shows what it says beside the verdict.


def mlm_beats_clm(results: ResultSet) -> list[Claim]:
    """MLM minus CLM at the same size and steps lies above zero on SC and on QA, at every size; and this gap is larger
    on QA than on every other family, at every size."""
    pairs = objective_pairs(results)
    beats: list[Test] = [
        (f"{family}, {mlm.size}: MLM − CLM", gap(results, mlm, clm, family), 0.0)
        for family in ("SC", "QA")
        for clm, mlm in pairs
    ]
    largest: list[Test] = [
        (f"{mlm.size}: gap on QA − gap on {family}", add(of_qa, gap(results, clm, mlm, family)), 0.0)
        for clm, mlm in pairs
        for of_qa in [gap(results, mlm, clm, "QA")]
        for family in ("SC", "TC", "IR")
    ]
    lack = "CLM and MLM of the same size and steps"
    return [
        make_part("MLM beats CLM on SC and QA at every size", beats, lack),
        make_part("The gap is largest on QA", largest, lack),
    ]


def clm_holds_on_tokens(results: ResultSet) -> list[Claim]:
    """CLM minus MLM on TC lies above −1 point at every size (on par or better). The gap between MLM and CLM on IR is
    larger at the smallest size than at the largest."""
    pairs = objective_pairs(results)
    level: list[Test] = [(f"TC, {clm.size}: CLM − MLM", gap(results, clm, mlm, "TC"), -ON_PAR) for clm, mlm in pairs]
    closing: list[Test] = []
    if len(pairs) > 1:
        (clm, mlm), (large_clm, large_mlm) = pairs[0], pairs[-1]
        terms = add(gap(results, mlm, clm, "IR"), gap(results, large_clm, large_mlm, "IR"))
        closing = [(f"IR: gap at {mlm.size} − gap at {large_mlm.size}", terms, 0.0)]
    return [
        make_part("CLM is on par or better on TC at every size", level, "CLM and MLM of the same size and steps"),
        make_part("CLM closes on MLM for IR as size grows", closing, "CLM and MLM at two sizes or more"),
    ]


def no_ratio_is_best(results: ResultSet) -> list[Claim]:
    """Every masking ratio is beaten by another one somewhere: at some size, on some family. (Contradicted if one ratio
    is nowhere more than 1 point below another.) The other claims are about the slope: the change in score from the
    lowest to the highest ratio, along the straight line through all of them. It is larger at the largest size than at
    the smallest (mean over families), above zero on IR at every size, and below zero on TC and QA at the smallest
    size."""
    arms = arms_of(results, setup="objective", objective="mlm")
    sizes = sizes_of(arms)
    slopes = {(size, family): slope(results, size, family) for size in sizes for family in FAMILIES}
    larger: list[Test] = []
    if len(sizes) > 1:
        small, large = sizes[0], sizes[-1]
        both = [family for family in FAMILIES if slopes[small, family] and slopes[large, family]]
        growth = [add(slopes[large, family], scale(slopes[small, family], -1)) for family in both]
        label = f"slope at {large} − slope at {small}, mean over {', '.join(both)}"
        larger = [(label, mean_of(growth), 0.0)]
    retrieval: list[Test] = [(f"IR, {size}: slope", slopes[size, "IR"], 0.0) for size in sizes]
    smallest: list[Test] = [
        (f"{family}, {size}: −slope", scale(slopes[size, family], -1), 0.0)
        for size in sizes[:1]
        for family in ("TC", "QA")
    ]
    lack = "MLM alone at two masking ratios or more"
    return [
        beaten_somewhere(results, arms, lack),
        make_part("Larger models like more masking", larger, f"{lack}, at two sizes or more"),
        make_part("Retrieval likes more masking at every size", retrieval, lack),
        make_part("The smallest model likes less masking on TC and QA", smallest, lack),
    ]


def clm_is_faster_early(results: ResultSet) -> list[Claim]:
    """CLM minus MLM at the same step, averaged over the undecayed checkpoints before 10/42 of the budget (SC, QA),
    before 20/42 (IR) or over all of them (TC), lies above zero. At the last checkpoint, where it is not one of those
    (on TC: not the only one), the order is that of the end: CLM ahead on TC; MLM ahead on SC, QA and IR."""
    arms = arms_of(results, setup="efficiency")
    early: list[Test] = []
    last: list[Test] = []
    for size in sizes_of(arms):
        budget = max(arm.pretrain_steps for arm in arms_of(results, size=size))
        pairs = same_steps(arms, size)
        for family in FAMILIES if pairs else ():
            before = [pair for pair in pairs if pair[0].pretrain_steps < EARLY[family] * budget]
            steps = ", ".join(short_steps(clm.pretrain_steps) for clm, _ in before) or "no"
            gaps = [gap(results, clm, mlm, family) for clm, mlm in before]
            early.append((f"{family}, {size}: CLM − MLM, mean over {steps} steps", mean_of(gaps), 0.0))
            clm, mlm = pairs[-1]
            first, second, sign = (clm, mlm, "CLM − MLM") if family == "TC" else (mlm, clm, "MLM − CLM")
            label = f"{family}, {size}: {sign} at {short_steps(clm.pretrain_steps)} steps"
            is_late = len(pairs) > 1 if family == "TC" else pairs[-1] not in before
            if is_late:
                last.append((label, gap(results, first, second, family), 0.0))
    lack = "undecayed checkpoints of CLM and MLM at the same steps"
    return [
        make_part("CLM is ahead early, and on TC always", early, lack),
        make_part(
            "By the last checkpoint MLM has overtaken it on SC, QA and IR, not on TC", last, f"{lack}, late enough"
        ),
    ]


def clm_is_steadier(results: ResultSet) -> list[Claim]:
    """The standard deviation of a model's test scores, over all seeds and all fine-tuning rates from 1e-5 to 1e-4 (all
    rates of the study, where fewer than two lie there), is larger for MLM than for CLM at every size, on average over
    datasets. A rate at which either of the two diverged is left out for both. Intervals and tests leave out one seed at
    a time (the jackknife, with Student's t)."""
    effects, untested = [], []
    for clm, mlm in objective_pairs(results):
        seen, rates = spread_gap(results, mlm, clm)
        if seen is None:
            untested.append(f"{mlm.size}: test scores at every fine-tuning rate, of CLM and of MLM")
        else:
            label = f"{mlm.size}: spread of MLM − of CLM, rates {', '.join(f'{rate:g}' for rate in rates)}"
            effects.append(make_effect(label, seen, 0.0))
    if not effects and not untested:
        untested.append("CLM and MLM of the same size and steps")
    return [Claim("CLM depends less on the fine-tuning rate and seed", tuple(effects), tuple(untested))]


def clm_first_pays(results: ResultSet) -> list[Claim]:
    """At each budget, CLM→MLM minus MLM alone, as the mean over families: above zero with 25 to 50 % CLM; above −1
    point with 75 % (about on par)."""
    arms = arms_of(results, setup="ratio")
    few: list[Test] = []
    much: list[Test] = []
    for arm in sorted(arms, key=lambda arm: (arm.pretrain_steps, arm.clm_steps)):
        alone = [a for a in arms if (a.size, a.pretrain_steps, a.objective) == (arm.size, arm.pretrain_steps, "mlm")]
        if arm.objective != "clm+mlm" or not alone:
            continue
        there, terms = gap_over_families(results, arm, alone[0])
        split = f"{short_steps(arm.clm_steps)} CLM of {short_steps(arm.pretrain_steps)}"
        label = f"{arm.size}, {split} − MLM alone, mean over {there}"
        if FEW_CLM[0] <= arm.clm_share <= FEW_CLM[1]:
            few.append((label, terms, 0.0))
        elif MUCH_CLM[0] <= arm.clm_share <= MUCH_CLM[1]:
            much.append((label, terms, -ON_PAR))
    return [
        make_part("With 25–50 % CLM it beats MLM alone at every budget", few, "CLM→MLM and MLM alone at one budget"),
        make_part("With 75 % CLM it is about on par", much, "CLM→MLM with 75 % CLM and MLM alone at one budget"),
    ]


def clm_first_forgives(results: ResultSet) -> list[Claim]:
    """The standard deviation of scores over masking ratios (each score the mean over seeds), on average over families,
    is larger for MLM alone than for MLM after CLM, at the same size, total steps and ratios. Intervals and tests leave
    out one seed at a time (the jackknife, with Student's t); noise between seeds widens both spreads."""
    arms = arms_of(results, setup="adapted")
    alone = arms_of(results, setup="objective", objective="mlm")
    effects, untested = [], []
    for key in dict.fromkeys((arm.size, arm.clm_steps, arm.mlm_steps) for arm in arms):
        after = [arm for arm in arms if (arm.size, arm.clm_steps, arm.mlm_steps) == key]
        by_mask = {(a.size, a.pretrain_steps, a.mask_percent): a for a in alone}
        places = [(arm.size, arm.pretrain_steps, arm.mask_percent) for arm in after]
        label = f"{key[0]}, {short_steps(key[1])} CLM + {short_steps(key[2])} MLM"
        pairs = [(by_mask[place], arm) for place, arm in zip(places, after, strict=True) if place in by_mask]
        seen = ratio_spread_gap(results, pairs) if len(pairs) > 1 else None
        if seen is None:
            untested.append(f"{label}: scores of each seed at two ratios or more, and MLM alone at these ratios")
        else:
            masks = ", ".join(f"{arm.mask_percent}" for _, arm in pairs)
            effects.append(make_effect(f"{label}: spread of MLM alone − after CLM, ratios {masks} %", seen, 0.0))
    if not arms:
        untested.append("MLM after CLM at two masking ratios or more, with the same steps of each")
    return [Claim("After CLM, results depend less on the masking ratio", tuple(effects), tuple(untested))]


def continuing_clm_pays(results: ResultSet) -> list[Claim]:
    """Continued with the same steps of MLM, the CLM model minus the MLM model: at the most steps, above zero on SC and
    TC and above −1 point on QA and IR (closed); and above −1 point on every family at 12,000 of 22,000 steps, or the
    fewer steps nearest to this share (so many suffice)."""
    arms = [arm for arm in arms_of(results, setup="cpt") if arm.cpt_steps]
    final: list[Test] = []
    sooner: list[Test] = []
    for size in sizes_of(arms):
        from_clm, from_mlm = (
            {arm.cpt_steps: arm for arm in arms if (arm.size, arm.objective) == (size, objective)}
            for objective in ("clm", "mlm")
        )
        steps = sorted(from_clm.keys() & from_mlm.keys())
        for family in FAMILIES if steps else ():
            bound = 0.0 if family in ("SC", "TC") else -ON_PAR
            label = f"{family}, {size}: from CLM − from MLM after"
            most = steps[-1]
            terms = gap(results, from_clm[most], from_mlm[most], family)
            final.append((f"{label} {short_steps(most)} steps", terms, bound))
            if steps[:-1]:
                fewer = min(steps[:-1], key=lambda step: abs(step / most - 12 / 22))
                terms = gap(results, from_clm[fewer], from_mlm[fewer], family)
                sooner.append((f"{label} {short_steps(fewer)} steps", terms, -ON_PAR))
    lack = "MLM continued from CLM and from MLM with the same steps"
    return [
        make_part("From CLM it is better on SC and TC, and closed on QA and IR", final, lack),
        make_part("Fewer steps already suffice", sooner, f"{lack}, at two numbers of steps or more"),
    ]


FINDINGS: dict[str, tuple[str, Callable[[ResultSet], list[Claim]]]] = {
    "F1": ("MLM beats CLM on SC and QA at every size, most of all on QA", mlm_beats_clm),
    "F2": ("CLM is on par or better on TC, and closes on MLM for IR as size grows", clm_holds_on_tokens),
    "F3": ("No masking ratio is best everywhere", no_ratio_is_best),
    "F4": ("CLM is more data-efficient early", clm_is_faster_early),
    "F5": ("CLM-pretrained models depend less on the fine-tuning rate", clm_is_steadier),
    "F6": ("At a fixed budget, CLM then MLM beats MLM alone", clm_first_pays),
    "F7": ("After CLM, results depend less on the masking ratio", clm_first_forgives),
    "F8": ("Continuing with MLM from a CLM model beats continuing from an MLM model", continuing_clm_pays),
}


def same_steps(arms: Sequence[ReportArm], size: str) -> list[tuple[ReportArm, ReportArm]]:
    """(CLM, MLM) of a size at every number of steps that has both."""
    clm, mlm = (
        {arm.pretrain_steps: arm for arm in arms if (arm.size, arm.objective) == (size, objective)}
        for objective in ("clm", "mlm")
    )
    return [(clm[steps], mlm[steps]) for steps in sorted(clm.keys() & mlm.keys())]


def gap(results: ResultSet, a: ReportArm, b: ReportArm, family: str) -> Terms | None:
    """Score of `a` minus score of `b`; None where one is missing."""
    ours, theirs = family_score(results, a, family), family_score(results, b, family)
    return None if ours is None or theirs is None else [(1.0, ours), (-1.0, theirs)]


def gap_over_families(results: ResultSet, a: ReportArm, b: ReportArm) -> tuple[str, Terms | None]:
    """The mean of the gaps over those families that both arms have, and their names."""
    gaps = {family: terms for family in FAMILIES if (terms := gap(results, a, b, family))}
    return ", ".join(gaps) or "no family", mean_of(list(gaps.values()))


def slope(results: ResultSet, size: str, family: str) -> Terms | None:
    """The change of the score of MLM from the lowest to the highest masking ratio, by least squares."""
    arms = [arm for arm in arms_of(results, setup="objective", objective="mlm") if arm.size == size]
    scores = [(arm.mask_percent or 0, score) for arm in arms if (score := family_score(results, arm, family))]
    masks = np.array([mask for mask, _ in scores], dtype=np.float64)
    if len(masks) < 2:
        return None
    centred = masks - masks.mean()
    weights = centred / (centred**2).sum() * np.ptp(masks)
    return [(weight, score) for weight, (_, score) in zip(weights.tolist(), scores, strict=True)]


def add(*parts: Terms | None) -> Terms | None:
    """The sum of weighted sums; None where one is."""
    return None if None in parts else [term for part in parts for term in part or []]


def scale(terms: Terms | None, factor: float) -> Terms | None:
    return None if terms is None else [(factor * weight, result) for weight, result in terms]


def mean_of(parts: Sequence[Terms | None]) -> Terms | None:
    return scale(add(*parts), 1 / len(parts)) if parts else None


def make_part(claim: str, tests: Sequence[Test], lack: str) -> Claim:
    """Tests without scores, or `lack` where there is not one, are named as untested."""
    effects = [make_effect(label, contrast(terms), bound) for label, terms, bound in tests if terms is not None]
    untested = [f"{label} (no scores)" for label, terms, _ in tests if terms is None]
    return Claim(claim, tuple(effects), tuple(untested if tests else [lack]))


def make_effect(label: str, seen: Contrast, bound: float) -> Effect:
    tested = seen.against(bound)
    return Effect(label, seen, bound, tested.low, tested.high, tested.p_value)


def beaten_somewhere(results: ResultSet, arms: Sequence[ReportArm], lack: str) -> Claim:
    """For every ratio, the strongest evidence that another one is above it at some size on some family.

    The p-value is that comparison's, times the number of comparisons of this ratio. That of the contrary, that no other
    is more than a point above it anywhere, is the largest over all of them: it must hold everywhere.
    """
    claim = "Every masking ratio is beaten by another one somewhere"
    by_place = {
        (size, family): {
            arm.mask_percent: score
            for arm in arms
            if arm.size == size and (score := family_score(results, arm, family)) is not None
        }
        for size in sizes_of(arms)
        for family in FAMILIES
    }
    effects = []
    for mask in sorted({arm.mask_percent or 0 for arm in arms}):
        rivals = [
            (f"{mask} %: beaten by {other} % on {family}, {size}", contrast([(1.0, score), (-1.0, scores[mask])]))
            for (size, family), scores in by_place.items()
            if mask in scores
            for other, score in scores.items()
            if other != mask
        ]
        if not rivals:
            continue
        effects.append(strongest(rivals))
    return Claim(claim, tuple(effects), () if effects else (lack,))


def strongest(rivals: Sequence[tuple[str, Contrast]]) -> Effect:
    """The rival that is above with the smallest p-value; the highest, where none can be tested or none is above."""

    def evidence(rival: tuple[str, Contrast]) -> tuple[float, float]:
        seen = rival[1]
        p_value = seen.against().p_value
        return (p_value if seen.estimate > 0 and not math.isnan(p_value) else 2.0, -seen.estimate)

    def excess(seen: Contrast) -> float:
        """The p-value of "more than on par above" in the direction of "it is not"."""
        p_value = seen.against(ON_PAR).p_value
        return p_value if seen.estimate < ON_PAR or math.isnan(p_value) else 1.0

    effect = make_effect(*min(rivals, key=evidence), 0.0)
    contrary_N = np.array([excess(seen) for _, seen in rivals])
    is_tested_N = ~np.isnan(contrary_N)
    num = len(rivals)
    return replace(
        effect,
        p_value=min(effect.p_value * num, 1.0),
        num_asked=num,
        # What cannot be tested cannot be shown: it counts as 1, unless nothing can be tested.
        p_contrary=float(np.where(is_tested_N, contrary_N, 1.0).max()) if is_tested_N.any() else math.nan,
    )


def rates_of(result: Result | None) -> set[float]:
    return set(result.by_rate) if result is not None and result.by_rate is not None else set()


def spread_gap(results: ResultSet, wide: ReportArm, narrow: ReportArm) -> tuple[Contrast | None, list[float]]:
    """Spread over rates and seeds of `wide` minus that of `narrow`, mean over datasets, and the rates."""
    metric = primary_metric(results)
    pairs, used = [], set[float]()
    for family in families(results):
        for dataset in datasets_of(results, family, metric):
            ours, theirs = (find(results, arm, family, dataset, metric) for arm in (wide, narrow))
            rates = stability_rates(sorted(rates_of(ours) & rates_of(theirs)))
            tables = [scores_by_rate(ours, rates), scores_by_rate(theirs, rates)]
            if tables[0] is None or tables[1] is None or tables[0].shape != tables[1].shape:
                continue
            scores_ARS = np.stack([tables[0], tables[1]])
            is_whole_R = ~np.isnan(scores_ARS).any(axis=(0, 2))
            if is_whole_R.sum() > 1:
                pairs.append(scores_ARS[:, is_whole_R])
                used |= set(np.array(rates)[is_whole_R].tolist())
    numbers = {scores_ARS.shape[2] for scores_ARS in pairs}
    if len(numbers) != 1:
        return None, []

    def statistic(seeds: np.ndarray) -> float:
        spreads = [[scores_RS[:, seeds].std(ddof=1) for scores_RS in scores_ARS] for scores_ARS in pairs]
        return float(np.mean([wide - narrow for wide, narrow in spreads]))

    return jackknife(statistic, numbers.pop(), size=float(max(np.abs(scores).max() for scores in pairs))), sorted(used)


def ratio_spread_gap(results: ResultSet, pairs: Sequence[tuple[ReportArm, ReportArm]]) -> Contrast | None:
    """Spread over ratios of the first of each pair minus that of the second, mean over families."""
    tables = []
    for family in FAMILIES:
        scores = [[family_score(results, arm, family) for arm in pair] for pair in pairs]
        samples = [[score.samples if score else () for score in pair] for pair in scores]
        if len({len(seeds) for pair in samples for seeds in pair}) == 1 and samples[0][0]:
            tables.append(np.array(samples))
    if not tables or len({scores_MAS.shape[2] for scores_MAS in tables}) != 1:
        return None

    def statistic(seeds: np.ndarray) -> float:
        spreads = [scores_MAS[:, :, seeds].mean(axis=2).std(axis=0, ddof=1) for scores_MAS in tables]
        return float(np.mean([alone - after for alone, after in spreads]))

    return jackknife(statistic, tables[0].shape[2], size=float(max(np.abs(scores).max() for scores in tables)))


def jackknife(statistic: Callable[[np.ndarray], float], num: int, size: float) -> Contrast:
    """Standard error of a function of seeds from leaving out one at a time (Tukey's pseudo-values)."""
    seeds_S = np.arange(num)
    seen = statistic(seeds_S)
    if num < 2:
        return Contrast(seen, math.nan, math.nan, size, "jackknife t", num)
    values_S = np.array([num * seen - (num - 1) * statistic(np.delete(seeds_S, seed)) for seed in seeds_S])
    return Contrast(seen, float(values_S.std(ddof=1)) / math.sqrt(num), num - 1, size, "jackknife t", num)
