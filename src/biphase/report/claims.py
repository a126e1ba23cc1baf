"""Claims about scores → verdicts. A claim becomes inequalities; each is tested, with a correction over all findings.

An inequality says that a weighted sum of mean scores lies above a bound; its test is two-sided. An equivalence says
that the sum lies between two bounds, by two one-sided tests. A finding says that all its inequalities hold. A finding
is one question, so Holm's correction is over findings, not over inequalities. Claims are lines in the grammar of
hypotheses.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import get_args

import numpy as np

from biphase.errors import first_of
from biphase.report.contrasts import Contrast, Noise, tell_carriers, what_decides
from biphase.report.formats import show_count, show_difference, show_list, show_noise, show_points, tell_p_value
from biphase.report.statistics import SIGNIFICANCE, GapUnit, Interval, holm, holm_levels, is_significant, spend_error
from biphase.report.verdicts import LOOKS_OF_VERDICTS, ClaimVerdict

ON_PAR = 0.01
"""The difference within which scores count as about equal, one point, and losses too, 0.01 nats: our convention."""


def combine(verdicts: Sequence[str]) -> ClaimVerdict:
    """Return the verdict on a whole from those on its parts."""
    if "contradicted" in verdicts:
        return "contradicted"
    return "supported" if set(verdicts) == {"supported"} else "undecided"


@dataclass(frozen=True)
class Inequality:
    """`estimate` > `bound`, or `estimate` < `bound`, or the equivalence |`estimate`| < |`bound`|, with its test and
    verdict. "Above" means on the side of the bound that is claimed."""

    label: str
    contrast: Contrast
    bound: float
    """For an equivalence, the bound on the side of the estimate."""
    lacks_above: tuple[str, ...] = ()
    """Missing scores that prevent the verdict "above the bound"."""
    lacks_below: tuple[str, ...] = ()
    """Missing scores that prevent the verdict "below the bound"."""
    num_asked: int = 1
    """The number of inequalities among which this one was chosen as the strongest."""
    p_contrary: float = math.nan
    """The p-value of the contrary if a different test gives it (`strongest`); else nan."""
    adjusted: float = math.nan
    """The smaller p-value of both sides, corrected as in `judge_claims`."""
    level: float = SIGNIFICANCE
    """The level of its test on the side of the estimate, corrected as in `judge_claims`."""
    verdict: ClaimVerdict = "undecided"
    needs: str = ""
    """Missing scores, or further seeds and examples, that would decide it; empty if it is decided."""
    by_task: Mapping[str, Contrast] = field(default_factory=dict, repr=False, compare=False)
    """Task → the contrast on that task alone, for a mean over tasks."""
    arms: frozenset[str] = frozenset()
    """The arms whose scores it compares."""
    beside: str = ""
    """For a compute equivalent: the baseline at a multiple of the arm's FLOPs, in words."""
    compute: str = ""
    """How its arms differ in FLOPs, in words (`equivalents.tell_compute`)."""
    is_equivalence: bool = False
    is_below: bool = False
    """Whether it claims that the estimate lies below the bound."""

    @property
    def estimate(self) -> float:
        return self.contrast.estimate

    @property
    def margin(self) -> float:
        """How far the estimate lies on the side of the bound that is claimed; below 0 on the other side."""
        if self.is_equivalence:
            return abs(self.bound) - abs(self.estimate)
        return self.bound - self.estimate if self.is_below else self.estimate - self.bound

    @cached_property
    def interval(self) -> Interval:
        """The estimate with the interval of its test, and the p-value of "the estimate equals the bound". The interval
        misses with probability `level`, or for an equivalence twice that, because its two tests are one-sided. So it
        contains the bound if and only if the test decides nothing."""
        return self.contrast.against(self.bound, self.level * (2 if self.is_equivalence and self.margin > 0 else 1))

    @property
    def carriers(self) -> str:
        """A sentence about the tasks that do not show the difference alone; empty unless it is supported."""
        is_told = self.verdict == "supported" and not self.is_equivalence
        return tell_carriers(self.by_task, self.bound, self.is_below) if is_told else ""

    @property
    def told_bound(self) -> str:
        """The bound in words: `0`, `+2.00`, or for an equivalence `±2.00`."""
        shown = show_points(self.bound, self.contrast.unit) if self.bound else "0"
        return f"±{shown[1:]}" if self.is_equivalence else shown

    @property
    def seeds(self) -> str:
        """In how many seeds the estimate lies above the bound, in words (`Contrast.tell_seeds`)."""
        return "" if self.is_equivalence else self.contrast.tell_seeds(self.bound)

    @property
    def alone(self) -> str:
        """The result of its uncorrected test if corrections leave it undecided, such as
        `contradicted when tested alone, p = 0.002`; else empty."""
        lacks = {"supported": self.lacks_above, "contradicted": self.lacks_below}
        for (word, lacking), p_value in zip(lacks.items(), self.sides, strict=True):
            if self.verdict == "undecided" and is_significant(p_value) and not lacking:
                return f"{word} when tested alone, {tell_p_value(p_value)}"
        return ""

    @property
    def p_value(self) -> float:
        """The two-sided p-value of `interval`, times `num_asked` (Bonferroni); nan without a test. For an equivalence
        whose estimate lies between the bounds, the larger p-value of its two one-sided tests (Schuirmann 1987)."""
        p_value = self.interval.p_value / (2 if self.is_equivalence and self.margin > 0 else 1)
        return min(p_value * self.num_asked, 1.0)

    @property
    def sides(self) -> tuple[float, float]:
        """The p-values of the verdicts "it holds" and "it does not hold": that of the test on the side of the estimate,
        1 on the other side; nan without a test."""
        holds = self.p_value if self.margin > 0 or math.isnan(self.p_value) else 1.0
        fails = self.p_value if self.margin <= 0 or math.isnan(self.p_value) else 1.0
        return holds, fails if math.isnan(self.p_contrary) else self.p_contrary


@dataclass(frozen=True)
class Claim:
    """A claim within a finding: supported if all its inequalities are, contradicted if one is."""

    statement: str
    inequalities: tuple[Inequality, ...]
    untested: tuple[str, ...] = ()
    """Parts of the claim that lack scores."""

    @property
    def verdict(self) -> ClaimVerdict:
        verdicts: list[str] = [inequality.verdict for inequality in self.inequalities]
        return combine([*verdicts, *("undecided" for _ in self.untested)])


Looks = tuple[Sequence[int], int]
"""The numbers of seeds at the looks that share the level of their tests, and the most that a look may have."""

NO_LOOKS: Looks = (), 0


@dataclass(frozen=True)
class Finding:
    """One statement with its claims; it holds if all claims do."""

    key: str
    statement: str
    rule: str
    claims: tuple[Claim, ...]
    scope: str = ""
    """The scope of the verdict, if the statement is more general, `at size 1m`, or if it was looked at otherwise than
    planned: `planned 3 seeds, tested at 7 after 4 looks`."""
    looks: Looks = NO_LOOKS
    """The looks that share the level of its tests, of which this is the last; none if it is the only one."""

    @cached_property
    def times(self) -> float:
        """The factor of its p-values for the looks that share the level."""
        return SIGNIFICANCE / spend_error(*self.looks)

    @property
    def verdict(self) -> ClaimVerdict:
        return combine([claim.verdict for claim in self.claims])

    @property
    def needs(self) -> list[str]:
        """Lines on what would decide the finding: one for each undecided inequality and for each untested part."""
        lines = []
        for claim in self.claims:
            lines += [f"{one.label}: {one.needs}" for one in claim.inequalities if one.needs]
            lines += [f"not tested: {lack}" for lack in claim.untested]
        return lines

    @property
    def told_parts(self) -> str:
        """How many of its claims have scores: `1 of 3 parts tested`; empty if all have."""
        num, num_tested = len(self.claims), sum(bool(claim.inequalities) for claim in self.claims)
        return f"{num_tested} of {show_count(num, 'part')} tested" if num_tested < num else ""

    @property
    def is_tested(self) -> bool:
        """Whether any of its inequalities has scores."""
        return any(claim.inequalities for claim in self.claims)

    @property
    def inequalities(self) -> Iterator[Inequality]:
        for claim in self.claims:
            yield from claim.inequalities

    @property
    def by_unit(self) -> list[list[Inequality]]:
        """The inequalities that have scores: those in points, those in nats. The first of each list lies least above
        its bound; a unit without any has no list."""
        measured = [inequality for inequality in self.inequalities if not math.isnan(inequality.estimate)]
        measured.sort(key=lambda inequality: inequality.margin)
        by_unit = [[each for each in measured if each.contrast.unit == unit] for unit in get_args(GapUnit)]
        return [*filter(None, by_unit)]

    @property
    def num_tests(self) -> int:
        """The number of its inequalities that have a test."""
        return sum(not math.isnan(inequality.sides[1]) for inequality in self.inequalities)

    @property
    def num_seeds(self) -> int:
        """The most pretraining seeds in a test of it; 0 without a test."""
        tested = [one.contrast for one in self.inequalities if not math.isnan(one.p_value)]
        return max((contrast.num_pretrainings for contrast in tested), default=0)

    @property
    def p_value(self) -> float:
        """The p-value of the finding as a whole, not corrected for other findings; nan without a test.

        It is the smaller of two p-values. That of "all inequalities hold" is the largest of theirs (the
        intersection-union test, Berger 1982); that of "one does not hold" is the smallest of theirs, times their
        number.
        """
        if not self.num_tests:
            return math.nan
        holds, fails = zip(*(inequality.sides for inequality in self.inequalities), strict=True)
        is_whole = not any(claim.untested for claim in self.claims) and not np.isnan(holds).any()
        return min(max(holds) if is_whole else 1.0, float(np.nanmin(fails)) * self.num_tests, 1.0)


Verdicts = tuple[tuple[Finding, ...], str, str]
"""The findings of a report, the answer to its question in a sentence or two, and a note on the tests."""


def judge_claims(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Return the findings with all verdicts.

    All inequalities of a finding must hold. So the p-value of an inequality above its bound is corrected only for the
    other findings (Holm). A single inequality below its bound contradicts the finding, so its p-value is also corrected
    for the inequalities of its finding (Bonferroni). An inequality is supported (contradicted) if that p-value is below
    5 % and no score is missing or has lost seeds (`lacks_above`, `lacks_below`). A claim, and likewise a finding, is
    supported if all its parts are, contradicted if one part is, and otherwise undecided. With one pretraining seed a
    verdict is about these checkpoints, not about another pretraining of the same arm (`name_noise`). An equivalence
    counts as a difference between its bounds or outside them.
    """
    p_values = [finding.times * finding.p_value for finding in findings]
    with_verdicts = []
    for index, finding in enumerate(findings):
        others = p_values[:index] + p_values[index + 1 :]
        claims = []
        for claim in finding.claims:
            decided = [decide(each, others, finding.num_tests or 1, finding.times) for each in claim.inequalities]
            claims.append(replace(claim, inequalities=tuple(decided)))
        with_verdicts.append(replace(finding, claims=tuple(claims)))
    return tuple(with_verdicts)


def name_noise(findings: Iterable[Finding]) -> str:
    """Name the sources of noise in the tests, and the subject of the verdicts:
    `pretraining seeds and test examples (4 of 5 tests). Verdicts hold for the recipes`; empty without tests."""
    inequalities = chain.from_iterable(finding.inequalities for finding in findings)
    tested = [inequality.contrast for inequality in inequalities if not math.isnan(inequality.p_value)]
    if not tested:
        return ""
    num_over = Counter(source for contrast in tested for source in contrast.noise)
    num_tests = len(tested)
    sources = []
    for source in get_args(Noise):
        if num_over[source]:
            some = f" ({num_over[source]} of {num_tests} tests)" if num_over[source] < num_tests else ""
            sources.append(f"{source}{some}")
    once = "these checkpoints, each pretrained once, not for what another pretraining run would give"
    subject = "the recipes, not just for these checkpoints" if num_over["pretraining seeds"] == num_tests else once
    return f"{show_noise(sources)}. Verdicts hold for {subject}"


def count_tested(findings: Iterable[Finding]) -> int:
    """Count the findings that have a p-value."""
    return sum(finding.num_tests > 0 for finding in findings)


def decide(inequality: Inequality, other_p_values: Sequence[float], num_tests: int, times: float) -> Inequality:
    """Return the inequality with its verdict, and with its needs if it is undecided. Multiply its p-values by `times`
    for the looks at it, and correct them for those of the other findings and for `num_tests`, the number of tests in
    its own finding."""
    holds, fails = (times * p_value for p_value in inequality.sides)
    num_asked = inequality.num_asked if inequality.margin > 0 else num_tests
    p_value = times * inequality.p_value / inequality.num_asked * num_asked
    level = holm_levels([p_value, *other_p_values])[0] / (num_asked * times)
    holds = min(float(holm([holds, *other_p_values])[0]), 1.0)
    fails = min(float(holm([fails * num_tests, *other_p_values])[0]), 1.0)
    verdict: ClaimVerdict = "undecided"
    if is_significant(holds):
        verdict = "supported"
    elif is_significant(fails):
        verdict = "contradicted"
    lacks_above = () if verdict == "contradicted" else inequality.lacks_above
    lacks_below = () if verdict == "supported" else inequality.lacks_below
    needs = list(dict.fromkeys((*lacks_above, *lacks_below)))
    if verdict == "undecided":  # at the strictest level of Holm's correction
        num_findings = 1 + sum(not math.isnan(p_value) for p_value in other_p_values)
        strictest = SIGNIFICANCE / (num_findings * num_asked * times)
        strictest *= 2 if inequality.is_equivalence and inequality.margin > 0 else 1
        needs.append(what_decides(inequality.contrast, inequality.bound, strictest))
    return replace(
        inequality,
        adjusted=float(np.fmin(holds, fails)),
        level=level,
        verdict="undecided" if needs else verdict,
        needs="; ".join(needs),
    )


def group_verdicts(findings: Sequence[Finding], words: Mapping[str, str]) -> str:
    """Group findings by verdict: `A and B are supported; none is contradicted; C is undecided; D could not be tested,
    for lack of scores`. `words`: key of a finding → the finding in words."""
    groups = []
    for verdict in LOOKS_OF_VERDICTS:
        names = [words[finding.key] for finding in findings if finding.is_tested and finding.verdict == verdict]
        are = "is" if len(names) == 1 else "are"
        groups.append(f"{show_list(names)} {are} {verdict}" if names else f"none is {verdict}")
    untested = [words[finding.key] for finding in findings if not finding.is_tested]
    if untested:
        groups.append(f"{show_list(untested)} could not be tested, for lack of scores")
    return "; ".join(groups)


def tell_verdict(verdict: ClaimVerdict, inequalities: Iterable[Inequality]) -> str:
    """Write `supported`, or `supported for these checkpoints` if any tested model was pretrained once."""
    has_one_pretraining = any(inequality.contrast.num_pretrainings < 2 for inequality in inequalities)
    is_of_checkpoints = verdict != "undecided" and has_one_pretraining
    return f"{verdict} for these checkpoints" if is_of_checkpoints else verdict


def tell_finding(finding: Finding) -> str:
    """Write a finding's verdict, the difference of each unit that is least above its bound, and the tasks that show
    it: `Supported for these checkpoints: CLM then MLM beats MLM alone: +8.69 points [+4.72, +12.66], positive in 5 of 5
    seeds, p = 0.004.`"""
    scope = f" ({finding.scope})" if finding.scope else ""
    told = f"{tell_verdict(finding.verdict, finding.inequalities).capitalize()}{scope}: {finding.statement}"
    if not finding.by_unit:
        needs = first_of(finding.needs, 2)
        return f"{told}: {needs}." if needs else f"{told}."
    gaps = "; ".join(tell_least(inequalities) for inequalities in finding.by_unit)
    return " ".join(filter(None, [f"{told}: {gaps}.", *(least.carriers for least, *_ in finding.by_unit)]))


def tell_least(inequalities: Sequence[Inequality]) -> str:
    """Write the first of these differences, which is the smallest, with its test."""
    least, num_measured = inequalities[0], len(inequalities)
    side = ("within" if least.margin > 0 else "outside") if least.is_equivalence else "against"
    bound = f" {side} {least.told_bound}" if least.bound else ""
    beside = f" beside {least.beside}" if least.beside else ""
    smallest = "smaller" if num_measured == 2 else "smallest"
    of_several = f" for the {smallest} of {num_measured} differences" if num_measured > 1 else ""
    corrected = " after correction" if least.adjusted > least.p_value / least.num_asked else ""
    p_value = "" if math.isnan(least.adjusted) else f", {tell_p_value(least.adjusted)}{corrected}"
    return f"{show_difference(least.interval)}{bound}{beside}{of_several}{least.compute}{least.seeds}{p_value}"


def strongest(rivals: Sequence[Inequality]) -> Inequality:
    """Turn "at least one of these inequalities holds" into a single inequality: the one with the strongest evidence,
    corrected for this choice (Bonferroni). All have the same bound. The contrary is "none is more than `ON_PAR` above
    the bound".

    The strongest has the smallest p-value among those that are above the bound, have a test and lack no scores. If
    there are none, it has the highest estimate.
    """

    def evidence(rival: Inequality) -> tuple[float, float]:
        is_seen = rival.margin > 0 and not math.isnan(rival.p_value) and not rival.lacks_above
        return (rival.p_value if is_seen else 2.0, -rival.margin)

    best = min(rivals, key=evidence)
    on_par = best.bound + (-ON_PAR if best.is_below else ON_PAR)
    # The contrary must hold for every rival, so its p-value is the largest of theirs. A rival without a test counts as
    # p = 1, unless no rival has a test: 0.01, nan, 0.2 → 1; 0.01, 0.03, 0.2 → 0.2; nan, nan → nan.
    contrary = []
    for rival in rivals:
        p_value = rival.contrast.against(on_par).p_value
        contrary.append(p_value if rival.margin < ON_PAR or math.isnan(p_value) else 1.0)
    contrary_N = np.array(contrary)
    is_tested_N = ~np.isnan(contrary_N)
    return replace(
        best,
        num_asked=len(rivals),
        lacks_below=tuple(lack for rival in rivals for lack in rival.lacks_below),
        p_contrary=float(np.where(is_tested_N, contrary_N, 1.0).max()) if is_tested_N.any() else math.nan,
    )
