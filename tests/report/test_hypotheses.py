"""Hypotheses: a line of text is read by the grammar or refused at its place, and asks for arms that are there."""

import numpy as np
import pytest
from scipy import stats

from biphase.errors import InputError
from biphase.report.claims import Finding, judge_claims
from biphase.report.contrasts import what_decides, with_averages
from biphase.report.hypotheses import ArmsBySpot, bind, measure_claim
from biphase.report.results import ReportArm, Result, ResultSet

ARMS = {
    "mlm40": {(size, steps): f"{size}-mlm40-{steps}" for size in ("1m", "3m") for steps in (400, 800)},
    "25/75": {("1m", steps): f"1m-25-75-{steps}" for steps in (400, 800, 1600)},
    "clm": {("1m", 400): "1m-clm-400", ("3m", 400): "3m-clm-400"},
    "1m-random": {("1m", 0): "1m-random"},
}
NAMED_ARMS: dict[str, ArmsBySpot] = {
    **{name: {spot: {arm: arm} for spot, arm in arms.items()} for name, arms in ARMS.items()},
    "both": {(size, 400): {kind: f"{size}-{kind}-400" for kind in ("clm", "mlm40")} for size in ("1m", "3m")},
}
TASKS = {"wnut17": "TC", "uner": "TC", "genre": "SC"}


def asked(line: str) -> list[tuple[str, str]]:
    """Each inequality as a sum of arm@task, and its label."""
    found = []
    for one, *_ in bind(line, NAMED_ARMS, TASKS):
        terms = " ".join(f"{term.weight:+g}·{'&'.join(term.arms)}@{term.task}" for term in one.operands)
        found.append((terms, one.label))
    return found


@pytest.mark.parametrize(
    "text", ["(" * 5000 + "a" + ")" * 5000 + " > 0", "a > 0 at 1e999 steps", "a > 1e400 points", "9" * 400 + " * a > 0"]
)
def test_nothing_is_endless(text: str) -> None:
    with pytest.raises(InputError, match=r"expected .* instead of|more than 50 brackets") as error:
        bind(text, NAMED_ARMS, TASKS)
    assert len(str(error.value)) < 300


def test_a_difference_at_every_budget_that_both_have() -> None:
    assert asked("25/75 - mlm40 > 0 on token_classification at every budget") == [
        ("+1·1m-25-75-400@TC -1·1m-mlm40-400@TC", "25/75 - mlm40 on TC 1m, 400 steps"),
        ("+1·1m-25-75-800@TC -1·1m-mlm40-800@TC", "25/75 - mlm40 on TC 1m, 800 steps"),
    ]
    assert asked("25/75 - mlm40 > 0 on TC") == asked("25/75 - mlm40 > 0 on token_classification at every budget")


def test_places_choose_budgets_models_and_tasks() -> None:
    (one,) = asked("25/75 - mlm40 > -1 point at the largest budget")
    assert one[0] == "+1·1m-25-75-800@average -1·1m-mlm40-800@average"
    assert [terms for terms, _ in asked("mlm40 > 40 points on every task at 400 steps for 3m")] == [
        "+1·3m-mlm40-400@wnut17",
        "+1·3m-mlm40-400@uner",
        "+1·3m-mlm40-400@genre",
    ]
    assert [terms for terms, _ in asked("mlm40 - clm > 0 on SC and wnut17 for the largest model")] == [
        "+1·3m-mlm40-400@SC -1·3m-clm-400@SC",
        "+1·3m-mlm40-400@wnut17 -1·3m-clm-400@wnut17",
    ]


def test_an_arm_alone_has_no_place_of_its_own() -> None:
    assert asked("1m-random > 0 on SC") == [("+1·1m-random@SC", "1m-random on SC")]


def test_terms_have_places_and_weights_of_their_own() -> None:
    (one, _) = asked("(mlm40 - clm on TC) - 0.5 * (mlm40 - clm on SC) > 0 at 400 steps")
    assert one[0] == "+1·1m-mlm40-400@TC -1·1m-clm-400@TC -0.5·1m-mlm40-400@SC +0.5·1m-clm-400@SC"
    (one,) = asked("mlm40 at the largest budget for 1m - 1m-random > 0 on uner")
    assert one[0] == "+1·1m-mlm40-800@uner -1·1m-random@uner"
    assert asked("mlm40 - clm on SC > 0")[0][0] == asked("(mlm40 - clm on SC) > 0")[0][0]
    (one,) = asked("mlm40 - (clm on SC) > 0 on TC at 400 steps for 1m")
    assert one[0] == "+1·1m-mlm40-400@TC -1·1m-clm-400@SC"
    (one,) = asked("(mlm40 - clm for the largest model) - (mlm40 - clm for 1m) < 0 at 400 steps on SC")
    assert one[0] == "+1·3m-mlm40-400@SC -1·3m-clm-400@SC -1·1m-mlm40-400@SC +1·1m-clm-400@SC"


def test_places_of_terms_leave_the_rest_open() -> None:
    """Budgets are named, one model is not; and of what is taken away again the rest is asked about."""
    assert asked("(mlm40 at 400 steps for 3m) - (mlm40 at 800 steps) > 0 on SC") == [
        (
            f"+1·3m-mlm40-400@SC -1·{size}-mlm40-800@SC",
            f"(mlm40 at 400 steps for 3m) - (mlm40 at 800 steps) on SC {size}",
        )
        for size in ("1m", "3m")
    ]
    assert len(asked("(25/75 - clm) - (mlm40 - clm) > 0 on SC at 400 steps")) == 1


def test_an_average_that_one_arm_lacks_a_family_of_is_not_there() -> None:
    scores = [("1m-mlm40-400", "SC"), ("1m-mlm40-400", "TC"), ("1m-clm-400", "SC")]
    arms = {name: ReportArm(name, "other", "1m", "mlm", 40, 400, 0, 400) for name, _ in scores}
    cells = [Result(arms[name], family, family.lower(), "standard", (0.5, 0.6)) for name, family in scores]  # type: ignore[arg-type]
    results = with_averages(ResultSet(cells))
    for line, is_there in (("mlm40 - clm > 0 at 400 steps for 1m", False), ("mlm40 > 0 at 400 steps for 1m", True)):
        claim = measure_claim(bind(line, NAMED_ARMS, TASKS), results)
        assert bool(claim.inequalities) == is_there and bool(claim.untested) != is_there


def test_every_average_is_the_mean_over_families() -> None:
    """On a rung of its ladder, a compute equivalent's sum is the difference from that rung. An arm that gains
    4 points on three data sets of one family and loses 10 on the only one of another is behind."""
    rng, arms = np.random.default_rng(0), {}
    for name, flops, score in (("mlm-100", 1.0, 0.6), ("mlm-200", 2.0, 0.65), ("mlm-400", 4.0, 0.7), ("x", 2.0, 0.65)):
        arms[ReportArm(name, "other", "1m", "mlm", 40, 200, 0, 200, flops=flops)] = score
    cells = [
        Result(arm, family, task, "standard", tuple(score + gain * (arm.name == "x") + rng.normal(0, 0.003, 4)))  # type: ignore[arg-type]
        for arm, score in arms.items()
        for family, task, gain in (("TC", "a", 0.04), ("TC", "b", 0.04), ("TC", "c", 0.04), ("QA", "d", -0.1))
    ]
    tasks = {"a": "TC", "b": "TC", "c": "TC", "d": "QA"}
    results = with_averages(ResultSet(cells, planned_tasks=tasks))
    named: dict[str, ArmsBySpot] = {"mlm": {("1m", n): {"mlm": f"mlm-{n}"} for n in (100, 200, 400)}}
    named |= {"x": {("1m", 200): {"x": "x"}}, "mlm-200": {("1m", 200): {"mlm-200": "mlm-200"}}}
    for place in ("", " on TC", " on every task"):
        lines = f"compute_equivalent(x, mlm) < 1{place}", f"x - mlm-200 > 0{place}"
        share, gap = (measure_claim(bind(line, named, tasks), results).inequalities for line in lines)
        assert [one.estimate for one in share] == pytest.approx([one.estimate for one in gap])
        assert [one.interval.low for one in share] == pytest.approx([one.interval.low for one in gap])
        assert gap[0].estimate < 0 if not place else gap[0].estimate > 0


def test_of_a_group_every_arm_is_asked_about_or_one_is_enough() -> None:
    assert asked("every both - clm > 0 on TC for 1m") == [
        ("+1·1m-mlm40-400@TC -1·1m-clm-400@TC", "mlm40 - clm on TC 1m, 400 steps")
    ]
    # For each of the two, whichever the model, one other is enough: `every` is chosen before `some`.
    second, first = bind("some both - every both > 0 on some family for some model", NAMED_ARMS, TASKS)
    assert [one.label for one in first] == [
        "mlm40 - clm on TC 1m, 400 steps",
        "mlm40 - clm on TC 3m, 400 steps",
        "mlm40 - clm on SC 1m, 400 steps",
        "mlm40 - clm on SC 3m, 400 steps",
    ]
    assert len(second) == 4 and second[0].label.startswith("clm - mlm40")


def test_functions_are_over_all_arms_of_a_place() -> None:
    assert (
        asked("mean(both over share) - clm > 0 for 3m")[0][0]
        == "+1·3m-clm-400&3m-mlm40-400@average -1·3m-clm-400@average"
    )
    assert [terms for terms, _ in asked("trend(mlm40 over budget) > 0")] == [
        "+1·1m-mlm40-400&1m-mlm40-800@average",
        "+1·3m-mlm40-400&3m-mlm40-800@average",
    ]


def test_the_largest_is_that_of_all_names_of_the_line() -> None:
    (one,) = asked("(25/75 - clm at the largest budget for the largest model) > 0")
    assert one[0] == "+1·1m-25-75-400@average -1·1m-clm-400@average"


def test_a_compute_equivalent_asks_for_the_whole_ladder_of_the_baseline() -> None:
    line = "compute_equivalent(25/75, mlm40) < 0.6 on TC at 1600 steps"
    ((one,),) = bind(line, NAMED_ARMS, TASKS)
    assert (one.is_equivalent, one.sign, one.bound) == (True, -1, 0.6)
    assert [term.arms for term in one.operands] == [("1m-25-75-1600",)] and one.baseline == (
        "1m-mlm40-400",
        "1m-mlm40-800",
    )
    with pytest.raises(InputError, match="has one budget; a baseline's ladder has two or more"):
        bind("compute_equivalent(25/75, clm) < 0.6", NAMED_ARMS, TASKS)
    far = {**NAMED_ARMS, "mlm40": {("1m", steps): {f"mlm-{steps}": f"mlm-{steps}"} for steps in (400, 6400)}}
    with pytest.raises(InputError, match=r"mlm-400 and mlm-6400 are a factor of 16 apart.*give the baseline budgets"):
        bind(line, far, TASKS)


def test_the_ladder_is_of_the_network_of_an_arm_with_a_whole_name() -> None:
    named = NAMED_ARMS | {"1m-clm-400": {("1m", 400): {"1m-clm-400": "1m-clm-400"}}}
    ((one,),) = bind("compute_equivalent(1m-clm-400, mlm40) < 0.8 on SC", named, TASKS)
    assert one.baseline == ("1m-mlm40-400", "1m-mlm40-800")


def test_an_equivalence_and_a_loss_are_read() -> None:
    ((one,),) = bind("mlm40 - clm within 2 points on SC at 400 steps for 1m", NAMED_ARMS, TASKS)
    assert (one.is_equivalence, one.bound, one.label) == (True, 0.02, "mlm40 - clm on SC 1m, 400 steps")
    ((one,),) = bind("mlm40 - clm < -0.05 nats on loss at 400 steps for 1m", NAMED_ARMS, TASKS)
    assert (one.sign, one.bound, {term.task for term in one.operands}) == (-1, -0.05, {"loss"})
    assert not [terms for terms, _ in asked("mlm40 > 0 on every task") if "loss" in terms]


@pytest.mark.parametrize(
    ("apart", "low", "high"),
    [
        pytest.param(0.0, 0.9, 1.0, marks=[pytest.mark.slow, pytest.mark.minutes]),
        pytest.param(0.01, 0.4, 0.7, marks=[pytest.mark.slow, pytest.mark.minutes]),
        (0.02, 0.0, 0.05),
    ],
)
def test_how_often_arms_are_called_equivalent(apart: float, low: float, high: float) -> None:
    """Within 2 points, of arms that are equal, 1 and exactly 2 points apart; six seeds in pairs. At the border it is
    wrong, so at most 5 %, within the noise of 600 trials (one-sided at 0.1 %)."""
    rng, num_trials, num_supported = np.random.default_rng(1), 600, 0
    groups = bind("mlm40 - clm within 2 points on SC at 400 steps for 1m", NAMED_ARMS, TASKS)
    arms = [ReportArm(f"1m-{name}-400", "other", "1m", "mlm", 40, 400, 0, 400) for name in ("mlm40", "clm")]
    for _ in range(num_trials):
        seeds = rng.normal(0.5, 0.02, 6)
        samples = [seeds + apart + rng.normal(0, 0.008, 6), seeds + rng.normal(0, 0.008, 6)]
        known = {"seeds": range(6), "pretraining_seeds": range(6)}
        cells = [
            Result(arm, "SC", "genre", "standard", scores.tolist(), **known)  # type: ignore[arg-type]
            for arm, scores in zip(arms, samples, strict=True)
        ]
        claim = measure_claim(groups, with_averages(ResultSet(cells)))
        (judged,) = judge_claims([Finding("e", "so", "", (claim,))])
        gaps = samples[0] - samples[1]
        p_values = [
            stats.ttest_1samp(gaps, bound, alternative=side).pvalue
            for bound, side in ((-0.02, "greater"), (0.02, "less"))
        ]
        assert (judged.verdict == "supported") == (max(p_values) < 0.05)
        num_supported += judged.verdict == "supported"
    assert low <= num_supported / num_trials
    assert num_supported <= stats.binom.ppf(0.999, num_trials, high)


def test_the_seeds_that_an_equivalence_needs_are_those_of_its_test() -> None:
    """An estimate outside the bounds is tested on two sides, so its level is 5 % and not 10 %."""
    noise = np.array([0.01, -0.01, 0.02, -0.02, 0.005, -0.005])
    arms = [ReportArm(f"1m-{name}-400", "other", "1m", "mlm", 40, 400, 0, 400) for name in ("mlm40", "clm")]
    known = {"seeds": range(6), "pretraining_seeds": range(6)}
    cells = [
        Result(arm, "SC", "genre", "standard", (0.5 + gap).tolist(), **known)  # type: ignore[arg-type]
        for arm, gap in zip(arms, (0.03 + noise, 0 * noise), strict=True)
    ]
    groups = bind("mlm40 - clm within 2 points on SC at 400 steps for 1m", NAMED_ARMS, TASKS)
    (judged,) = judge_claims([Finding("e", "so", "", (measure_claim(groups, with_averages(ResultSet(cells))),))])
    (need,), (one,) = judged.needs, judged.inequalities
    at_its_level, at_twice = (what_decides(one.contrast, one.bound, level) for level in (0.05, 0.1))
    assert judged.verdict == "undecided" and at_its_level in need and at_its_level != at_twice


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("mlm - clm > 0", "unknown arm 'mlm'; did you mean 'mlm40'"),
        ("nothing - clm > 0", "unknown arm 'nothing'; known: .*1m-random"),
        ("both > 0", "'both' names several arms of one model and budget; name one of them, or write every or some"),
        ("spread(both over rate) > 0", "'both' names several arms of one model and budget"),
        ("mean(mlm40 over rate) > 0", "expected 'budget', 'mask' or 'share' instead of 'rate'"),
        ("mean(mlm40 over time) > 0", "expected 'budget', 'mask' or 'share' instead of 'time'"),
        (
            "spread(both over mask) - mlm40 > 0",
            "a spread can only be compared with spreads over the same axis on the same task",
        ),
        (
            "clm - (clm at the largest budget) > 0",
            "all names are one arm; other models or budgets have whole names, .*3m-clm-400",
        ),
        (
            "mlm40 - clm > 0 on QA",
            "unknown task or family 'QA'; known: SC, TC, average",
        ),
        ("mlm40 - clm > 0 for 7b", "unknown model '7b'; known: 1m, 3m"),
        ("25/75 - clm > 0 at 1600 steps", "share no model and budget there; known: 25/75 for 1m, 400 steps.*; other"),
        ("mlm40 - clm within 0 points", "within a number of points above 0"),
        ("mlm40 - clm within 2", "expected 'points' \\(of 100\\) or, for losses, 'nats' instead of the end"),
        ("some both - clm within 2 points", "'some' asks which difference is the strongest"),
        ("compute_equivalent(25/75, mlm40) within 2 points", "expected '<' or '>' instead of 'within'"),
        ("mlm40 - clm > 1 point on loss", "bounds on loss are in nats"),
        ("mlm40 - clm > 0.1 nats on SC", "those on scores in points"),
        ("(mlm40 on loss) - (clm on SC) > 0", "a loss can only be compared with losses"),
        ("compute_equivalent(25/75, mlm40) < 0.6 on loss at 1600 steps", "has no compute equivalent"),
        ("mlm40 - clm > 1", "expected 'points' \\(of 100\\) or, for losses, 'nats' instead of the end"),
        ("compute_equivalent(25/75, mlm40) < 60 points", "the end instead of 'points'"),
        ("compute_equivalent(25/75, mlm40) < 0", "expected a share of compute such as 0.6 instead of '0'"),
        ("1 - compute_equivalent(25/75, mlm40) > 0", "expected .* instead of|stands alone on the left"),
        ("mlm40 -clm > 0", "expected '<' or '>' or .* instead of '-clm'"),
        ("mlm40 - clm", "expected '<' or '>' or .* instead of the end"),
        ("mlm40 - clm > 0 at 400", "or a number of steps such as 400 steps instead of '400'"),
        ("mlm40 on every task - clm > 0", "a term has one place; write several after the number"),
        ("'mlm40 - clm > 0", "a quote is not closed"),
        ("mlm40 - clm > 0 when it rains", "or 'on' or 'at' or 'for' or the end instead of 'when'"),
        ("__import__('os') > 0", "expected '<' or '>' or .* instead of '\\('"),
    ],
)
def test_what_is_not_in_the_grammar_is_refused_at_its_place(line: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        bind(line, NAMED_ARMS, TASKS)
