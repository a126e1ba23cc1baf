"""Verdicts with known answers: a made-up study in which all eight findings hold, and changes that break one each."""

import math
import zlib
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy import stats

from biphase.errors import InputError
from biphase.report.claims import Finding, Inequality, combine, count_tested, judge_claims, name_noise, tell_verdict
from biphase.report.contrasts import Contrast, difference, jackknife, with_averages
from biphase.report.grammar import Operand
from biphase.report.hypotheses import contrast_spreads, weigh_arms
from biphase.report.paper import answer, measure_findings, read_findings, read_reference
from biphase.report.results import ReportArm, Result, ResultSet
from biphase.report.statistics import SIGNIFICANCE, holm, rate_spread

Change = Callable[[ReportArm, str], float]
RATES = (1e-5, 5e-5, 1e-4)
FINDINGS = tuple(read_findings()["findings"])


def arm(setup: str, size: str, clm: int, mlm: int, mask: int = 40, cpt: int = 0) -> ReportArm:
    objective = "clm+mlm" if clm and mlm else "clm" if clm else "mlm"
    name = f"{setup}-{size}-{clm}-{mlm}-{mask}-{cpt}"
    return ReportArm(name, setup, size, objective, mask if mlm or cpt else None, clm + mlm, clm, mlm, cpt)  # type: ignore[arg-type]


def score_of(arm: ReportArm, family: str) -> float:
    """In this world all findings hold, by two points or more each."""
    is_clm, is_masked_less = arm.objective == "clm", arm.mask_percent == 20
    if arm.setup == "objective":
        if is_clm:
            return {"SC": 0.55, "TC": 0.70, "QA": 0.40, "IR": 0.50 if arm.size == "1m" else 0.55}[family]
        small = {"SC": 0.0, "TC": 0.02, "QA": 0.02, "IR": -0.02}
        gain = small[family] if arm.size == "1m" else -0.02
        return {"SC": 0.58, "TC": 0.70, "QA": 0.52, "IR": 0.57}[family] + is_masked_less * gain
    if arm.setup == "efficiency":
        ahead = 0.03 if arm.pretrain_steps < 500 or family == "TC" else -0.03
        return 0.4 + arm.pretrain_steps / 10_000 + is_clm * ahead
    if arm.setup == "ratio":
        return 0.5 + {0.25: 0.03, 0.5: 0.03}.get(arm.clm_share, 0.0)
    if arm.setup == "adapted":
        return 0.6 + 0.001 * is_masked_less
    return 0.6 + 0.03 * (is_clm and arm.cpt_steps > 0 and family in ("SC", "TC"))


ARMS = [
    *(arm("objective", size, 1000, 0) for size in ("1m", "2m")),
    *(arm("objective", size, 0, 1000, mask) for size in ("1m", "2m") for mask in (20, 40)),
    *(arm("efficiency", "1m", clm * steps, (1 - clm) * steps) for steps in (100, 200, 800) for clm in (0, 1)),
    *(arm("ratio", "1m", clm, 400 - clm) for clm in (0, 100, 200, 300, 400)),
    *(arm("adapted", "1m", 800, 200, mask) for mask in (20, 40)),
    *(arm("cpt", "1m", clm, 1000 - clm, cpt=steps) for clm in (0, 1000) for steps in (0, 50, 100)),
]


def world(
    noise: float = 0.0005, num: int = 5, change: Change = lambda arm, family: 0.0, steady: str = "clm"
) -> ResultSet:
    """A dataset for each family; noise of its own for each score, the same in every call."""
    results = []
    for each in ARMS:
        for family in ("SC", "TC", "QA", "IR"):
            rng = np.random.default_rng(zlib.crc32(f"{each.name} {family}".encode()))
            spread = 0.005 if each.objective == steady else 0.02
            by_rate = {
                rate: score_of(each, family) + change(each, family) - spread * at + noise * rng.standard_normal(num)
                for at, rate in enumerate(RATES)
            }
            scores = {rate: tuple(values.tolist()) for rate, values in by_rate.items()}
            results.append(Result(each, family, f"{family}-data", "standard", scores[RATES[0]], scores))  # type: ignore[arg-type]
    return ResultSet(tuple(results))


def verdicts(findings: tuple[Finding, ...]) -> dict[str, str]:
    return {finding.key: finding.verdict for finding in findings}


def inequalities_of(findings: tuple[Finding, ...]) -> list[Inequality]:
    return [inequality for finding in findings for inequality in finding.inequalities]


def judge_findings(results: ResultSet) -> tuple[Finding, ...]:
    return judge_claims(measure_findings(with_averages(results)))


@pytest.fixture(scope="module")
def judged() -> tuple[Finding, ...]:
    return judge_findings(world())


def test_supported(judged: tuple[Finding, ...]) -> None:
    assert verdicts(judged) == dict.fromkeys(FINDINGS, "supported")
    assert all(claim.inequalities and not claim.untested for finding in judged for claim in finding.claims)
    assert not any(finding.needs for finding in judged)


AGAINST: dict[str, Change] = {
    "F1": lambda arm, family: -0.1 * (arm.setup == "objective" and arm.objective == "mlm" and family == "SC"),
    "F2": lambda arm, family: -0.1 * (arm.setup == "objective" and arm.objective == "clm" and family == "TC"),
    "F3": lambda arm, family: -0.1 * (arm.setup == "objective" and arm.mask_percent == 20),
    "F4": lambda arm, family: -0.2 * (arm.setup == "efficiency" and arm.objective == "clm"),
    "F6": lambda arm, family: -0.1 * (arm.setup == "ratio" and arm.objective == "clm+mlm"),
    "F7": lambda arm, family: 0.1 * (arm.setup == "adapted" and arm.mask_percent == 20),
    "F8": lambda arm, family: -0.1 * (arm.setup == "cpt" and arm.objective == "clm"),
}


@pytest.mark.parametrize("key", AGAINST)
def test_contradicted(key: str) -> None:
    findings = judge_findings(world(change=AGAINST[key]))
    assert verdicts(findings) == {**dict.fromkeys(FINDINGS, "supported"), key: "contradicted"}


def test_steadier_mlm_contradicts_f5() -> None:
    assert verdicts(judge_findings(world(steady="mlm")))["F5"] == "contradicted"


def test_undecided_by_noise() -> None:
    """The same means within noise of 20 points: nothing can be told, and everything says what would decide it."""
    findings = judge_findings(world(noise=0.2))
    assert verdicts(findings) == dict.fromkeys(FINDINGS, "undecided")
    assert all(one.needs for one in inequalities_of(findings))


def test_no_verdict_from_a_point_estimate() -> None:
    findings = judge_findings(world(num=1))
    assert verdicts(findings) == dict.fromkeys(FINDINGS, "undecided")
    assert count_tested(findings) == 0
    assert {one.needs for one in inequalities_of(findings)} == {"two seeds or more"}


def test_scores_without_spread_decide_nothing() -> None:
    """Two seeds with the same score do not prove that a third would have it too."""
    exact = [replace(r, samples=(r.mean,) * 2, by_rate=None) for r in world(noise=0.0).results]
    findings = judge_findings(ResultSet(tuple(exact)))
    assert verdicts(findings) == dict.fromkeys(FINDINGS, "undecided")
    assert all(one.needs.startswith("two seeds or more with different scores") for one in inequalities_of(findings))


def test_nothing_to_test() -> None:
    """A study of one arm: every finding names what it lacks."""
    lonely = ResultSet(world().select(setup="cpt").results[:4])
    for finding in judge_findings(lonely):
        assert finding.verdict == "undecided"
        assert finding.needs and all(line.startswith("not tested: ") for line in finding.needs)


def test_missing_family_leaves_its_claim_open() -> None:
    """Without QA, F1 cannot be supported, however clear SC is."""
    rest = tuple(result for result in world().results if result.family != "QA")
    (finding, *_) = judge_findings(ResultSet(rest))
    assert finding.verdict == "undecided"
    assert [one.verdict for one in finding.claims[0].inequalities] == ["supported"] * 2
    assert finding.claims[0].untested == (
        "mlm - clm on QA 1m, 1,000 steps (no scores)",
        "mlm - clm on QA 2m, 1,000 steps (no scores)",
    )
    assert finding.claims[1].inequalities == ()


def test_findings_are_corrected_together(judged: tuple[Finding, ...]) -> None:
    """Each as one question: a verdict is that of Holm's correction over the findings' p-values."""
    adjusted = holm([finding.p_value for finding in judged])
    for finding, whole in zip(judged, adjusted, strict=True):
        assert max(one.adjusted for one in finding.inequalities) == pytest.approx(whole)
    assert count_tested(judged) == len(FINDINGS)


@pytest.mark.parametrize(
    ("parts", "verdict"),
    [
        (["supported", "supported"], "supported"),
        (["supported", "undecided"], "undecided"),
        (["supported", "undecided", "contradicted"], "contradicted"),
        ([], "undecided"),
    ],
)
def test_together(parts: list[str], verdict: str) -> None:
    assert combine(parts) == verdict


def test_on_par_is_a_point() -> None:
    """F2: CLM half a point below MLM on TC is on par; two points below is not."""

    def f2(loss: float) -> str:
        results = world(change=lambda arm, family: loss / 0.1 * AGAINST["F2"](arm, family))
        return judge_findings(results)[1].claims[0].verdict

    assert (f2(0.005), f2(0.01), f2(0.02)) == ("supported", "undecided", "contradicted")


def test_published_verdicts() -> None:
    """What 800 means and half-widths allow to say; F5 and F7 are about scores that the paper's tables do not have."""
    findings = judge_findings(read_reference())
    assert verdicts(findings) == {**dict.fromkeys(FINDINGS, "undecided"), "F1": "supported", "F4": "supported"}
    assert {one.contrast.test for one in inequalities_of(findings)} == {"Welch"}
    assert [finding.key for finding in findings if not any(claim.inequalities for claim in finding.claims)] == [
        "F5",
        "F7",
    ]
    first = findings[0].claims[0].inequalities[1]
    assert (first.label, round(100 * first.estimate, 2)) == ("mlm - clm on SC 610M, 42,000 steps", 3.42)
    assert first.compute == " at equal tokens (0.93 times the FLOPs)"
    text = answer(findings)
    assert "in 4 of 6 comparisons and behind in none; the other 2 cannot be distinguished from noise" in text
    assert text.count(". ") == 1 and "F4 (CLM is more data-efficient early)" in text
    # What the paper says of 25/75 alone, and of QA after 12,000 steps, has lines of its own, with their own tests.
    quarter, half, *_ = findings[FINDINGS.index("F6")].claims
    assert [round(100 * one.estimate, 2) for one in quarter.inequalities] == [2.13, 0.87, 1.76]
    for one in quarter.inequalities:
        assert one.contrast.against().low > 0 and (one.alone or one.verdict == "supported")
        assert (one.interval.low > 0) == (one.verdict == "supported") and one.interval.level < 0.05
    assert [round(100 * one.estimate, 2) for one in half.inequalities] == [1.94, 1.32, -0.47]
    (early,) = findings[FINDINGS.index("F8")].claims[-1].inequalities
    assert round(100 * early.estimate, 2) == -3.36 and early.bound == -0.01
    assert early.contrast.against(early.bound).high < early.bound < early.interval.high
    assert (early.verdict, early.alone) == ("undecided", "contradicted when tested alone, p = 0.005")
    assert text.endswith(
        "without correction for multiple tests, F8 ('half as long from clm' - 'half as long from mlm' on QA 610M, "
        "12,000 steps: −3.36 points [−4.55, −2.17]) would be contradicted."
    )


@pytest.mark.parametrize(
    ("results", "beginning"),
    [
        (
            world(),
            "At the same budget, CLM then MLM (25–50 % CLM) is ahead of MLM alone in 2 of 2 comparisons and behind",
        ),
        (world(change=AGAINST["F6"]), "At the same budget, CLM then MLM (25–50 % CLM) is ahead of MLM alone in 0 of 2"),
        (world(num=1), "The differences between CLM then MLM (25–50 % CLM) and MLM alone at the same budget cannot be"),
    ],
)
def test_answer(results: ResultSet, beginning: str) -> None:
    """Of networks as large as the paper's; others say what they show of its findings, and where."""
    larger = {"1m": "210m", "2m": "610m"}
    scaled = [replace(one, arm=replace(one.arm, size=larger[one.arm.size])) for one in results.results]
    text = answer(judge_findings(ResultSet(tuple(scaled))))
    assert text.startswith(beginning)
    assert text.count(". ") == 1 and text.endswith(".")
    assert answer(judge_findings(results)).startswith("Of the paper’s 8 findings, at size 1m and 2m: ")


def test_verdicts_say_what_they_are_about() -> None:
    """A network of 1M does not contradict a finding about 610M, nor one pretraining one about recipes; F5 is about the
    paper's rates; and where nothing is tested, no other sentence stands."""
    finding = judge_findings(world(change=AGAINST["F6"]))[FINDINGS.index("F6")]
    told = tell_verdict(finding.verdict, finding.inequalities)
    assert (finding.scope, told) == ("at size 1m and 2m", "contradicted for these checkpoints")
    assert {one.scope for one in judge_findings(read_reference())} == {""}
    rates = [replace(one, by_rate={10 * r: own for r, own in (one.by_rate or {}).items()}) for one in world().results]
    assert not judge_findings(ResultSet(tuple(rates)))[FINDINGS.index("F5")].is_tested
    embedding = [replace(one, family="EM") for one in world().results]
    assert answer(judge_findings(ResultSet(tuple(embedding)))) == "No score tests any of the paper's 8 findings."


def test_seeds_needed_have_the_power_they_promise() -> None:
    """By the non-central t: about 80 % with as many seeds as named, less than that with one seed fewer."""
    findings = judge_findings(read_reference())
    closing = findings[1].claims[1].inequalities[0]
    named = int(closing.needs.split()[1])
    level = SIGNIFICANCE / count_tested(findings)

    def power(num: int) -> float:
        degrees = closing.contrast.degrees * (num - 1) / 4
        shift = closing.estimate / (closing.contrast.error * math.sqrt(5 / num))
        return float(stats.nct.sf(stats.t.isf(level / 2, degrees), degrees, shift))

    assert 0.77 < power(named) < 0.85
    assert power(named - 1) < power(named)


def test_trend_is_the_line_of_least_squares() -> None:
    """0.50, 0.56, 0.54 at 20, 30, 50 %: the line rises by 0.03/1400·… from 20 to 50."""
    arms = [arm("objective", "1m", 0, 100, mask) for mask in (20, 30, 50)]
    scores = dict(zip((20, 30, 50), (0.50, 0.56, 0.54), strict=True))
    names = {each.name: each for each in arms}
    over = Operand(1.0, "masking", function="trend", axis="mask", arms=tuple(names))
    weighed = weigh_arms([over], names)
    line = stats.linregress(list(scores), list(scores.values()))
    assert sum(weight * scores[each.mask_percent] for weight, each, _ in weighed) == pytest.approx(30 * line.slope)  # type: ignore[index]
    with pytest.raises(InputError, match="too few arms over mask"):
        weigh_arms([replace(over, arms=(arms[0].name,))], names)


def spread_gap(results: ResultSet, wide: ReportArm, narrow: ReportArm) -> tuple[Contrast, list[float]]:
    """The spread over rates of one arm less that of another."""
    terms = [
        Operand(sign, "", function="spread", axis="rate", arms=(each.name,), task="average")
        for sign, each in ((1.0, wide), (-1.0, narrow))
    ]
    return contrast_spreads(terms, {each.name: each for each in (wide, narrow)}, results)


def test_spread_is_that_of_the_statistics() -> None:
    results = world()
    clm, mlm = (each for each in ARMS if each.setup == "objective" and each.size == "1m" and each.mask_percent != 20)
    seen, rates = spread_gap(results, mlm, clm)

    def mean_spread(each: ReportArm) -> float:
        tables = [list((r.by_rate or {}).values()) for r in results.results if r.arm == each]
        return float(np.mean([rate_spread([table], np.random.default_rng(0), 1).value for table in tables]))

    assert rates == list(RATES)
    assert seen.estimate == pytest.approx(mean_spread(mlm) - mean_spread(clm))


def test_a_diverged_rate_is_left_out_for_both() -> None:
    def spoil(result: Result) -> Result:
        if result.arm.objective == "clm" and result.by_rate:
            return replace(result, by_rate={**result.by_rate, 1e-4: (math.nan, *result.by_rate[1e-4][1:])})
        return result

    results = ResultSet(tuple(map(spoil, world().results)))
    claim = judge_findings(results)[4].claims[0]
    assert [one.label for one in claim.inequalities] == [
        "spread(mlm over rate) - spread(clm over rate) on average 1m, 1,000 steps (rate 1e-05, 5e-05)",
        "spread(mlm over rate) - spread(clm over rate) on average 2m, 1,000 steps (rate 1e-05, 5e-05)",
    ]


def test_a_seed_missing_at_a_rate_leaves_f5_open() -> None:
    """Partial studies: not an error, and no test on fewer seeds for one arm than for the other."""

    def spoil(result: Result) -> Result:
        if result.arm.objective == "clm" and result.by_rate:
            return replace(result, by_rate={**result.by_rate, 5e-5: result.by_rate[5e-5][:2]})
        return result

    claim = judge_findings(ResultSet(tuple(map(spoil, world().results))))[4].claims[0]
    assert (claim.verdict, claim.inequalities, len(claim.untested)) == ("undecided", (), 2)


def test_jackknife_of_a_mean_is_its_standard_error() -> None:
    values = np.array([0.5, 0.7, 0.65, 0.52])
    for of_one_pretraining in ((), (7, 7, 7, 7)):
        seen = jackknife(lambda seeds: float(values[seeds].mean()), 4, 1.0, of_one_pretraining)
        assert seen.estimate == pytest.approx(values.mean())
        assert seen.error == pytest.approx(values.std(ddof=1) / 2)
        assert seen.degrees == 3 and seen.noise == ("fine-tuning seeds",)
    alone = jackknife(lambda seeds: float(values[seeds].mean()), 1, 1.0)
    assert (alone.estimate, alone.num) == (0.5, 1) and math.isnan(alone.error)


def test_jackknife_leaves_out_whole_pretraining_seeds() -> None:
    """The samples of one pretraining seed go together: the error of a mean is that of the seeds' means."""
    values, seeds = np.array([0.5, 0.6, 0.7, 0.8, 0.5, 0.54]), (7, 7, 8, 8, 9, 9)
    seen = jackknife(lambda samples: float(values[samples].mean()), 6, 1.0, seeds)
    assert seen.error == pytest.approx(np.std([0.55, 0.75, 0.52], ddof=1) / math.sqrt(3))
    assert (seen.degrees, seen.num, seen.num_pretrainings) == (2, 3, 3)
    assert seen.noise == ("pretraining seeds", "fine-tuning seeds")


def test_f5_and_f7_leave_out_whole_pretraining_seeds() -> None:
    """Four samples are two pretraining seeds with two of fine-tuning: by hand, two pseudo-values of the gap."""

    def repeat(result: Result) -> Result:
        return replace(result, pretraining_seeds=(3, 3, 4, 4))

    results = ResultSet(tuple(map(repeat, world(num=4).results)))
    clm, mlm = (each for each in ARMS if each.setup == "objective" and each.size == "1m" and each.mask_percent != 20)
    seen, _ = spread_gap(results, mlm, clm)
    assert (seen.num, seen.degrees) == (2, 1)
    gaps = []
    for chosen in ([0, 1, 2, 3], [2, 3], [0, 1]):
        tables = {
            each: [np.array(list((r.by_rate or {}).values()))[:, chosen] for r in results.results if r.arm == each]
            for each in (mlm, clm)
        }
        wide, narrow = (np.mean([table.std(ddof=1) for table in tables[each]]) for each in (mlm, clm))
        gaps.append(float(wide - narrow))
    pseudo = [2 * gaps[0] - gaps[1], 2 * gaps[0] - gaps[2]]
    assert seen.error == pytest.approx(np.std(pseudo, ddof=1) / math.sqrt(2))
    forgiving = judge_findings(results)[6].claims[0].inequalities
    assert forgiving and all(one.contrast.num_pretrainings == 2 for one in forgiving)


def test_standard_metrics_come_first() -> None:
    """Verdicts are on the standard metric where there is one, whatever the paper's metric says."""
    paper = [replace(result, metric="paper") for result in world(change=AGAINST["F1"]).results]  # type: ignore[arg-type]
    assert verdicts(judge_findings(ResultSet((*paper, *world().results))))["F1"] == "supported"
    assert verdicts(judge_findings(ResultSet(tuple(paper))))["F1"] == "contradicted"


def test_difference_of_a_world_is_paired() -> None:
    a, b = world().results[:2]
    assert difference(a, b).test == "paired t"


def test_the_jackknife_of_a_spread_finds_no_more_than_chance_would() -> None:
    """Two models that depend on rate and seed alike, 4 data sets, 2 rates, 3 seeds: the least that a study has."""
    generator = np.random.default_rng(0)
    found = 0
    for _ in range(1000):
        scores = generator.normal(size=(2, 4, 2, 3)) + np.array([0.0, 2.0])[:, None]

        def gap(seeds: np.ndarray, scores: np.ndarray = scores) -> float:
            spreads = scores[..., seeds].reshape(2, 4, -1).std(axis=2, ddof=1).mean(axis=1)
            return float(spreads[0] - spreads[1])

        found += jackknife(gap, 3, size=1.0).against().p_value < 0.05
    assert 20 <= found <= 70  # 50 expected, 6.9 their standard deviation; it errs on the careful side


def test_seeds_of_one_pretraining_are_no_repetitions() -> None:
    """Equal models whose dependence on the rate differs between pretrainings: samples that are left out one at a time
    call far too many different, pretraining seeds do not."""
    generator = np.random.default_rng(1)
    seeds = np.repeat(np.arange(5), 3)
    found = {(): 0, tuple(seeds.tolist()): 0}
    for _ in range(500):
        slopes = generator.normal(2, 1, size=(2, 1, 5))[..., seeds]
        scores = generator.normal(0, 0.2, size=(2, 2, 15)) + slopes * np.array([0.0, 1.0])[None, :, None]

        def gap(samples: np.ndarray, scores: np.ndarray = scores) -> float:
            spreads = scores[..., samples].reshape(2, -1).std(axis=1, ddof=1)
            return float(spreads[0] - spreads[1])

        for pretraining_seeds in found:
            found[pretraining_seeds] += jackknife(gap, 15, 1.0, pretraining_seeds).against().p_value < 0.05
    by_sample, by_pretraining = found.values()
    assert by_sample > 100 and 5 <= by_pretraining <= 40  # 25 expected of 500


def test_what_tests_are_over_is_told_of_each_kind() -> None:
    """A spread over rates is tested over seeds only: that says nothing of the tests beside it."""

    def tested(*noise: str) -> Any:
        return SimpleNamespace(contrast=SimpleNamespace(noise=noise), p_value=0.5)

    both, seeds = ("fine-tuning seeds", "test examples"), ("fine-tuning seeds",)
    for asked, told in (
        (
            [both, both],
            "fine-tuning seeds and test examples. Verdicts hold for these checkpoints, each pretrained once, not",
        ),
        ([seeds], "fine-tuning seeds only. Verdicts hold for these"),
        ([both, seeds, both], "fine-tuning seeds and test examples (2 of 3 tests). Verdicts hold for these"),
        (
            [("pretraining seeds", *both)],
            "pretraining seeds, fine-tuning seeds and test examples. Verdicts hold for the recipes",
        ),
    ):
        finding: Any = SimpleNamespace(inequalities=[tested(*noise) for noise in asked])
        assert name_noise([finding]).startswith(told)
