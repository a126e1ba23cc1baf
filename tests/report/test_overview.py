"""What a report says first, held against models that are known to be equally good."""

import re
from dataclasses import replace
from importlib.resources import files

import numpy as np
import pytest
from scipy import stats

from biphase.finetuning.scores import ExampleTable, KeptExamples
from biphase.report.claims import Finding, judge_claims
from biphase.report.contrasts import with_averages
from biphase.report.hypotheses import ArmsBySpot, bind, measure_claim
from biphase.report.page import PageText, answer_sentences, print_results, tell_answer
from biphase.report.paper import judge_paper, measure_findings, place_arms
from biphase.report.results import ReportArm, Result, ResultSet
from biphase.report.tables import wide_table
from biphase.studies.cost import measure_sizes
from biphase.studies.plan import plan_study
from biphase.studies.report import arm_of_model
from biphase.studies.spec import load_study, task_families

CONTROL = ReportArm("1m-random", "control", "1m", "none", None, 0, 0, 0)


def test_the_best_of_many_is_not_ahead_for_having_been_chosen() -> None:
    """Twelve arms as good as each other and as the control: the best of them is said to be ahead of another, or of the
    control, in 5 % of studies at most. Not corrected, it is ahead of the control in three times as many."""
    rng = np.random.default_rng(0)
    clm = [ReportArm(f"clm-{at}", "objective", "1m", "clm", None, 100, 100, 0) for at in range(6)]
    mlm = [ReportArm(f"mlm-{at}", "objective", "1m", "mlm", 40, 100, 0, 100) for at in range(6)]
    hits = np.zeros(2)
    for _ in range(250):
        arms = (*clm, *mlm, CONTROL)
        scores = [Result(arm, "SC", "a", "standard", rng.normal(0.7, 0.02, 5).tolist()) for arm in arms]
        results = with_averages(ResultSet(scores))
        told = list(answer_sentences(results))
        assert len(told) == 2 and "corrected for picking the best of 12 models" in told[1]
        assert "corrected for picking the best of 11 models besides " in told[0]
        hits += ["is ahead of" in sentence for sentence in told]
    assert (hits <= stats.binom.isf(1e-3, 250, 0.05)).all()


@pytest.mark.parametrize("name", ["curricula", "demo", "embedding", "gpu", "mini", "paper", "price", "price_tuning"])
def test_every_bundled_study_has_an_answer(name: str) -> None:
    """Also those with random weights, which every trained model stands beside; and without scores, the reason."""
    plan = plan_study(load_study(files("biphase.bundled") / "studies" / f"{name}.yaml"))
    sizes, rng = measure_sizes(plan), np.random.default_rng(0)
    models = {model.pooled_name: model for model in plan.models}.values()
    results = []
    for arm in place_arms(arm_of_model(plan, model, sizes) for model in models):
        for task, family in task_families(plan.study.evaluation).items():
            results.append(Result(arm, family, task, "standard", rng.normal(0.5, 0.01, 3).tolist()))  # type: ignore[arg-type]
    first, *rest = tell_answer(with_averages(ResultSet(results)), [], PageText("", ""))
    assert re.match(r"[\w.-]+ (is ahead of|cannot be distinguished from) [\w.-]+ on ", first), first
    assert bool(rest) == any(result.arm.objective == "none" for result in results)
    told = list(answer_sentences(ResultSet(results)))
    assert told == ["No answer yet: no trained model has a score on every task."]


def test_what_was_declared_is_answered_first_and_once_and_a_mean_says_what_carries_it() -> None:
    """40/60 is 15 points ahead of MLM on a and level on b. The lead over MLM is the hypothesis; that over random
    weights is not, and stands behind it."""
    rng, means = np.random.default_rng(0), {"mlm": (0.2, 0.7), "40-60": (0.35, 0.7), "random": (0.1, 0.5)}
    arms = {
        "mlm": ReportArm("mlm", "ratio", "1m", "mlm", 40, 100, 0, 100),
        "40-60": ReportArm("40-60", "ratio", "1m", "clm+mlm", 40, 100, 40, 60),
        "random": replace(CONTROL, name="random"),
    }
    scores = []
    for name, by_task in means.items():
        for (task, family), mean in zip((("a", "TC"), ("b", "SC")), by_task, strict=True):
            values = (mean + rng.permutation([-0.005, -0.002, 0, 0.002, 0.005])).tolist()
            scores.append(Result(arms[name], family, task, "standard", values))  # type: ignore[arg-type]
    results = with_averages(ResultSet(scores))
    ladders: dict[str, ArmsBySpot] = {name: {("1m", 100): {name: name}} for name in means}
    claim = measure_claim(bind("40-60 - mlm > 0 on average", ladders, {"a": "TC", "b": "SC"}), results)
    declared = judge_claims([Finding("order", "CLM first beats MLM", "", (claim,))])
    first, *rest = tell_answer(results, ["PRICE."], PageText("", "", hypotheses=(declared, "declared today")))
    start = "Supported for these checkpoints: CLM first beats MLM: +7.50 points [+"
    assert first.startswith(start)
    told = "When the tasks are tested separately, only a shows the difference: +15.00"
    assert f"], positive in 5 of 5 seeds, p < 0.001. {told}" in first
    assert re.search(r" The other, b, does not: 0\.00 points \[−0\.\d\d, \+0\.\d\d\]\.$", first)
    price, lead = rest
    assert price == "PRICE." and lead.startswith("40-60 is ahead of random on average over 2 tasks")
    assert "; p < 0.001, corrected for picking the better of two models. This is" in lead
    priced = PageText("", "", hypotheses=(declared, ""), declared={"40-60": ["mlm"]})
    assert next(tell_answer(results, ["PRICE."], priced)) == "PRICE.", "a share that was declared is the answer"
    leads = [sentence for sentence in tell_answer(results, [], PageText("", "")) if " is ahead of " in sentence]
    assert len(leads) == 2 and "only a shows the difference: +15.00" in leads[0], "without hypotheses"
    assert all("], positive in 5 of 5 seeds" in lead for lead in leads)


def test_models_that_predict_one_class_are_told_in_words() -> None:
    """Not as a difference of `−0.00 points [–, –]`; and one seed has no interval, in words too."""
    kept = KeptExamples((), ExampleTable("a", np.full((3, 4), 0.25), num_degenerate=3))
    arms = [ReportArm(name, "objective", "1m", "mlm", 40, 100, 0, 100) for name in ("a", "b")]
    for scores, examples, said in (
        ([0.25] * 3, kept, "b on a: both predict the same for all examples"),
        ([0.25], None, "b on a: 25.00 % against 25.00 %, 0.00 points; there is no interval with one seed"),
    ):
        results = with_averages(
            ResultSet([Result(arm, "SC", "a", "standard", scores, examples=examples) for arm in arms])
        )
        (told,) = answer_sentences(results)
        assert said in told and "–" not in told


def test_random_weights_that_are_ahead_are_named_first() -> None:
    trained = ReportArm("mlm", "objective", "1m", "mlm", 40, 100, 0, 100)
    cells = [(trained, [0.50, 0.51, 0.49]), (CONTROL, [0.60, 0.62, 0.58])]
    results = with_averages(ResultSet([Result(arm, "SC", "a", "standard", scores) for arm, scores in cells]))
    *_, told = answer_sentences(results)
    assert told.startswith(f"{CONTROL.name} is ahead of mlm on a: 60.00 % against 50.00 %, +10.00 points")


def test_a_p_value_that_is_corrected_is_told() -> None:
    """0.0095 over three seeds is no answer where the best of seven was chosen, though the uncorrected interval excludes
    zero: `+9.57 points [+5.19, +13.96]`. The interval is corrected too."""
    arms = [ReportArm(f"mlm-{at}", "objective", "1m", "mlm", 40, 100, 0, 100) for at in range(7)]
    ahead = [0.327407, 0.297125, 0.322671]
    cells = [(arm, ahead if arm is arms[0] else [0.2, 0.21, 0.19]) for arm in arms] + [(CONTROL, [0.22, 0.22, 0.22])]
    results = with_averages(ResultSet([Result(arm, "SC", "a", "standard", scores) for arm, scores in cells]))
    *_, told = answer_sentences(results)
    assert (
        "cannot be distinguished" in told
        and "; p = 0.06" in told
        and ", corrected for picking the best of 7 models." in told
        and "+9.57 points [−" in told
        and "; 99.29 %], positive in 3 of 3 seeds; p" in told
    )


def test_a_study_without_hypotheses_answers_with_the_findings() -> None:
    """Where a score tests any; and after the hypotheses of a study that has some, they are no answer of its own."""
    arms = [ReportArm(name, "objective", "1m", name, 40, 100, 0, 100) for name in ("clm", "mlm")]
    results = with_averages(ResultSet([Result(arm, "SC", "a", "standard", [0.2, 0.21, 0.19]) for arm in arms]))
    verdicts = judge_paper(measure_findings(results))
    assert list(tell_answer(results, [], PageText("", "", verdicts)))[-1] == verdicts[1]
    assert list(tell_answer(results, [], PageText("", "", verdicts, hypotheses=((), ()))))[-1] != verdicts[1]


def test_the_terminal_has_the_table_and_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    arm = ReportArm("clm", "objective", "1m", "clm", None, 100, 100, 0)
    scores = [
        Result(model, "SC", task, "standard", means)
        for model, means in ((arm, [0.79, 0.8, 0.82]), (CONTROL, [0.5, 0.49, 0.52]))
        for task in ("a", "b")
    ]
    results = with_averages(ResultSet(scores))
    print_results(wide_table(results, results.primary_metric), answer_sentences(results))
    told = capsys.readouterr().out
    assert told.count("80.33 ± ") == told.count("50.33 ± ") == 3, "the mean and both tasks"
    assert "clm is ahead of 1m-random on average over 2 tasks" in told.replace("\n", " ")
