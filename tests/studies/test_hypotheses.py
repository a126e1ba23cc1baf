"""The hypotheses of a study: checked against its arms, recorded when it runs, judged on its scores."""

import json
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from scipy import stats

from biphase.api.studies import OpenStudy
from biphase.config import parse_config
from biphase.errors import InputError
from biphase.finetuning.scores import ScoreSet
from biphase.report.claims import Claim, Finding, Inequality, judge_claims, tell_finding
from biphase.report.contrasts import Contrast, with_averages
from biphase.report.paper import measure_findings, read_findings, read_reference
from biphase.report.results import AVERAGE, LOSS, ReportArm, Result, ResultSet
from biphase.report.statistics import spend_error
from biphase.studies.cost import measure_sizes
from biphase.studies.declarations import (
    count_looks,
    declare,
    hash_hypotheses,
    hash_settings,
    read_declared,
    tell_declaration,
)
from biphase.studies.describe import Begun, list_planned_looks
from biphase.studies.plan import Plan, bind_hypotheses, list_named_arms, plan_study
from biphase.studies.report import collect_results, hypotheses_json, measure_hypotheses, with_losses
from biphase.studies.spec import Study, load_study


def make_plan(*holds: str, **changes: Any) -> Plan:
    schedule = {"warmup_steps": 10, "decay_steps": 20}
    tree: dict[str, Any] = {
        "name": "small",
        "recipe": {"data": {"shards": "shards"}, "schedule": schedule},
        "planning": {"vocab_size": 8192},
        "pretraining_seeds": 2,
        "arms": [
            {"group": "all", "models": ["1m"], "curricula": ["mlm40", "25/75"], "budgets": [400, 100]},
            {
                "group": "stack",
                "name": "{model}-stack-{budget}",
                "models": ["1m"],
                "curricula": ["25/75"],
                "budgets": [400, 100],
                "recipe": {"optimizer": {"name": "muon"}},
            },
            {
                "group": "rates",
                "models": ["1m"],
                "curricula": ["mlm20"],
                "budgets": [100],
                "sweep": {"schedule.peak_lr": [0.001, 0.002]},
            },
        ],
        "evaluation": {"tasks": ["wnut17", "genre"], "learning_rates": [1e-3], "seeds": 5, "random_weights": True},
        "hypotheses": [{"name": f"h{n}", "says": f"Number {n}", "holds": line} for n, line in enumerate(holds)],
    }
    return plan_study(parse_config(Study, tree | changes, origin="small.yaml"))


def test_what_names_stand_for() -> None:
    named_arms = list_named_arms(make_plan())
    assert named_arms["mlm40"] == {("1m", 400): {"mlm40": "1m-mlm40-400"}, ("1m", 100): {"mlm40": "1m-mlm40-100"}}
    assert named_arms["1m-mlm40"] == named_arms["mlm40"] and named_arms["stack"] == named_arms["1m-stack"]
    assert named_arms["all"]["1m", 400] == {"mlm40": "1m-mlm40-400", "25-75": "1m-25-75-400"}
    assert named_arms["25/75"]["1m", 100] == {"25-75": "1m-25-75-100", "stack": "1m-stack-100"}
    assert list(named_arms["rates"]["1m", 100]) == ["mlm20-100-peak_lr0.001", "mlm20-100-peak_lr0.002"]
    assert named_arms["1m-mlm20-100-peak_lr0.002"] == {
        ("1m", 100): {"1m-mlm20-100-peak_lr0.002": "1m-mlm20-100-peak_lr0.002"}
    }
    assert "mlm20" not in named_arms and not [name for name in named_arms if "seed" in name]
    assert "1m-random" in named_arms


def test_an_unknown_name_is_refused_before_anything_trains() -> None:
    with pytest.raises(
        InputError,
        match=r"hypothesis 'h1': 'mlm30 - mlm40 > 0': the line names an unknown arm 'mlm30'; did you mean 'mlm40'",
    ):
        make_plan("stack - mlm40 > 0", "mlm30 - mlm40 > 0")
    with pytest.raises(InputError, match=r"hypothesis 'h0'.*unknown task or family 'snli'"):
        make_plan("stack - mlm40 > 0 on snli")


def judge(plan: Plan, results: Sequence[Result]) -> tuple[Finding, ...]:
    expected = collect_results(plan, {model.name: ScoreSet(()) for model in plan.models}, measure_sizes(plan))
    findings, _ = measure_hypotheses(plan, with_averages(replace(expected, results=tuple(results))))
    return judge_claims(findings)


def test_hypotheses_are_judged_together() -> None:
    plan = make_plan("stack - mlm40 > 0 at the largest budget", "1m-25-75 - mlm40 < 0 on TC", "stack - 1m-random > 0")
    means = {"1m-stack-400": 0.7, "1m-mlm40-400": 0.5, "1m-25-75-400": 0.4, "1m-25-75-100": 0.31, "1m-mlm40-100": 0.45}
    results = []
    for name, mean in means.items():
        arm = ReportArm(name, "other", "1m", "mlm", 40, pretrain_steps=400, clm_steps=0, mlm_steps=400)
        for family, task in (("TC", "wnut17"), ("SC", "genre")):
            own = [0.0007 if (seed + round(100 * mean)) % 3 else 0.0 for seed in range(5)]
            samples = [mean + 0.001 * (seed - 2) + own[seed] for seed in range(5)]
            results.append(Result(arm, family, task, "standard", samples))  # type: ignore[arg-type]
    first, second, third = judge(plan, results)
    assert [finding.verdict for finding in (first, second, third)] == ["supported", "supported", "undecided"]
    (one,) = first.inequalities
    assert one.estimate == pytest.approx(0.2, abs=0.002) and one.label == "stack - mlm40 on average 1m, 400 steps"
    assert [round(one.estimate, 2) for one in second.inequalities] == [-0.14, -0.1], "as it is asked for"
    assert next(second.inequalities).label == "1m-25-75 - mlm40 on TC 1m, 100 steps"
    assert "−9.99 points [−10.06, −9.91] for the smaller of 2 differences" in tell_finding(second)
    assert third.claims[0].untested, "random weights have no score yet"
    tree = json.loads(hypotheses_json(plan, "1a2b3c4d", ["not declared"], (first, second, third)))
    assert [one["verdict"] for one in tree["hypotheses"]] == ["supported", "supported", "undecided"]
    assert (tree["hash"], tree["declared"]) == ("1a2b3c4d", "not declared")


def test_a_bound_on_the_compute_equivalent() -> None:
    plan = make_plan(
        "compute_equivalent(stack, 1m-mlm40) < 0.6 at 100 steps",
        "compute_equivalent(stack, 1m-mlm40) < 0.6 at 400 steps",
        "compute_equivalent(stack, 1m-mlm40) > 0.6 on TC at 100 steps",
    )
    results = []
    for name, mean, flops in (("1m-mlm40-100", 0.5, 1e12), ("1m-mlm40-400", 0.6, 4e12), ("1m-stack-100", 0.58, 0.9e12)):
        arm = ReportArm(name, "other", "1m", "mlm", 40, pretrain_steps=100, clm_steps=0, mlm_steps=100, flops=flops)
        own = [0.001 * ((seed * len(name) + round(100 * mean)) % 5) for seed in range(5)]
        results += [
            Result(arm, "TC", "wnut17", "standard", [mean + noise for noise in own]),
            Result(arm, "SC", "genre", "standard", [mean + noise for noise in reversed(own)]),
        ]
    less, missing, more = judge(plan, results)
    # At 1.5e12 FLOPs, 1 / 0.6 of the arm's, the baseline is at 0.529, by the logarithm of compute.
    (one,) = less.inequalities
    assert one.estimate == pytest.approx(0.051, abs=0.002) and less.verdict == "supported"
    by_task = {task: part.estimate for task, part in one.by_task.items()}
    assert by_task == pytest.approx(dict.fromkeys(("wnut17", "genre"), one.estimate), abs=0.002) and not one.carriers
    assert " beside the baseline with 1.7 times the arm’s FLOPs, positive in 5 of 5 seeds, p" in tell_finding(less)
    assert (
        more.verdict == "contradicted" and "the baseline’s score minus the arm’s" in next(iter(more.inequalities)).label
    )
    assert "no scores" in missing.claims[0].untested[0]
    # A seed that diverged stands in the way of the side that its score speaks for.
    for name, verdicts in (
        ("1m-stack-100", ("undecided", "undecided")),
        ("1m-mlm40-400", ("supported", "contradicted")),
    ):
        lost = [replace(one, num_diverged=int(one.arm.name == name)) for one in results]
        less, _, more = judge(plan, lost)
        assert (less.verdict, more.verdict) == verdicts


def test_an_arm_that_is_a_checkpoint_of_another_run_has_the_loss_there() -> None:
    """Without a decay, the shorter of two budgets trains no step of its own."""
    recipe = {"data": {"shards": "shards"}, "schedule": {"warmup_steps": 10, "decay_steps": 0}}
    arms = [{"group": "all", "models": ["1m"], "curricula": ["mlm40"], "budgets": [400, 100]}]
    plan = make_plan(recipe=recipe, arms=arms, pretraining_seeds=1)
    assert [*plan.runs] == ["1m-mlm40-400"]
    results = ResultSet(
        tuple(
            Result(ReportArm(name, "other", "1m", "mlm", 40, 100, 0, 100), "TC", "wnut17", "standard", (0.5, 0.6))
            for name in plan.arms
        )
    )
    facts = {"kind": "validation", "seed": 0, "is_recorded": True}
    rows = [facts | {"step": step, "loss": step / 100} for step in (100, 400)]
    lost = [one for one in with_losses(plan, results, {"1m-mlm40-400": rows}).results if one.dataset == LOSS]
    assert {one.arm.name: one.samples for one in lost} == {"1m-mlm40-400": [4.0], "1m-mlm40-100": [1.0]}


def test_losses_are_paired_by_pretraining_seed() -> None:
    """By scipy's t test on the same numbers. The last loss of each seed counts, of a mixed phase the masked
    objective's. An unfinished seed leaves it undecided; random weights and losses of another
    kind are refused before anything trains."""
    plan = make_plan("1m-25-75 - mlm40 < 0 on loss at 100 steps", "stack - mlm40 within 0.2 nats on loss at 100 steps")
    rng = np.random.default_rng(0)
    level = rng.normal(5, 0.3, 2)
    arms = {name: ReportArm(name, "other", "1m", "mlm", 40, 100, 0, 100) for name in NAMES}
    scores = [Result(arm, "TC", "wnut17", "standard", (0.5, 0.6)) for arm in arms.values()]
    shift = {"1m-25-75-100": -0.4, "1m-mlm40-100": 0.0, "1m-stack-100": 0.001}
    ends = {name: level + shift[name] + rng.normal(0, 0.003, 2) for name in NAMES}
    losses = {
        name: [
            {"kind": kind, "step": step, "seed": seed, "is_recorded": True}
            | {"loss": loss + 9 * (kind == "train") + (step < 100) + more}
            for seed, loss in enumerate(ends[name])
            for kind, step, more in (
                ("validation", 50, 0),
                ("train", 100, 0),
                ("validation", 100, 0),
                ("validation", 100, 7),
            )
        ]
        for name in NAMES
    }

    def judged(kept: dict[str, Any]) -> tuple[Finding, ...]:
        planned = collect_results(plan, {model.name: ScoreSet(()) for model in plan.models}, measure_sizes(plan))
        results = with_averages(replace(planned, results=tuple(scores)))
        return judge_claims(measure_hypotheses(plan, with_losses(plan, results, kept))[0])

    first, second = judged(losses)
    for finding, name in ((first, "1m-25-75-100"), (second, "1m-stack-100")):
        (one,) = finding.inequalities
        known = stats.ttest_rel(ends[name], ends["1m-mlm40-100"])
        assert one.contrast.degrees == 1 and one.contrast.noise == ("pretraining seeds",)
        assert one.estimate / one.contrast.error == pytest.approx(known.statistic)
        assert "nats" in tell_finding(finding)
    assert first.inequalities and next(first.inequalities).p_value == pytest.approx(
        stats.ttest_rel(ends["1m-25-75-100"], ends["1m-mlm40-100"]).pvalue
    )
    assert [finding.verdict for finding in (first, second)] == ["supported", "supported"]
    lost = {**losses, "1m-mlm40-100": [row for row in losses["1m-mlm40-100"] if row["seed"] == 0]}
    first, _ = judged(lost)
    assert first.verdict == "undecided" and "all trainings of 1m-mlm40-100 on loss: its score comes from 1 of 2" in (
        " ".join(first.needs)
    )
    for line, told in (
        (
            "1m-mlm20-100-peak_lr0.001 - 1m-mlm40 < 0 on loss at 100 steps",
            "of different kinds cannot be compared: .*MLM",
        ),
        ("1m-mlm40 - 1m-random < 0 on loss at 100 steps", "'1m-random' is not trained, so it has no held-out loss"),
    ):
        with pytest.raises(InputError, match=told):
            make_plan(line)


@pytest.mark.parametrize(
    ("phase", "recipe", "told"),
    [
        ({"mask_token_share": 0.8, "random_token_share": 0.1}, {}, r"MLM 40 % \(80/10/10\), on"),
        ({}, {"data": {"packing": "stream"}}, "packing: stream"),
        ({}, {"data": {"max_sample_tokens": 64}}, "samples of 12 to 64 tokens"),
        ({}, {"validation": {"tokens": 5000}, "seed": 1}, "on 5,000 tokens of shards"),
        ({}, {"data": {"order_seed": 1}, "validation": {"every_steps": 7}}, ""),
    ],
)
def test_losses_of_other_masks_or_samples_are_not_compared(phase: Any, recipe: Any, told: str) -> None:
    """Another order of the training text and more frequent validation leave the held-out loss what it is."""
    arms = [
        {"group": "all", "models": ["1m"], "curricula": ["mlm40"], "budgets": [400]},
        {"group": "own", "name": "own", "models": ["1m"], "curricula": ["own"], "budgets": [400], "recipe": recipe},
    ]
    curricula = [{"name": "own", "phases": [{"objective": "mlm", "share": 1} | phase]}]
    with pytest.raises(InputError, match=f"of different kinds cannot be compared: .*{told}") if told else nullcontext():
        make_plan("own - mlm40 < 0 on loss", arms=arms, curricula=curricula)


def test_losses_of_a_stream_in_another_order_are_not_compared() -> None:
    """There the seed of the order decides where the held-out text is cut too."""
    recipe = {"data": {"shards": "shards", "packing": "stream"}, "schedule": {"warmup_steps": 10, "decay_steps": 20}}
    group = {"models": ["1m"], "curricula": ["25/75"], "budgets": [400], "name": "own"}
    arms = [
        {"group": "all", "models": ["1m"], "curricula": ["mlm40"], "budgets": [400]},
        {"group": "own", "recipe": {"data": {"order_seed": 7}}} | group,
    ]
    with pytest.raises(InputError, match=r"stream, order_seed: 7\); .* \(packing: stream, order_seed: 42\)"):
        make_plan("own - mlm40 < 0 on loss", recipe=recipe, arms=arms)


NAMES = ("1m-25-75-100", "1m-mlm40-100", "1m-stack-100")


def test_an_average_is_over_all_tasks_of_the_plan_or_not_there() -> None:
    """With one of two tasks done the average over families, a family that lacks it and a finding of the paper wait;
    the task that is there is judged."""
    lines = ["on average", "on TC", "on SC", "on wnut17"]
    plan = make_plan(*(f"1m-25-75 - mlm40 > 0 {where} at 100 steps" for where in lines), "F6 of the paper")
    results = []
    for name, mean, setup in (("1m-25-75-100", 0.6, "ratio"), ("1m-mlm40-100", 0.5, "ratio")):
        arm = ReportArm(name, setup, "1m", "clm+mlm" if mean > 0.5 else "mlm", 40, 100, 25 * (mean > 0.5), 75)
        samples = [mean + 0.001 * ((seed * (3 if mean > 0.5 else 1)) % 4) for seed in range(5)]
        results.append(Result(arm, "TC", "wnut17", "standard", samples))
    everything, tc, sc, task, finding = judge(plan, results)
    assert [one.verdict for one in (everything, tc, sc, task)] == ["undecided", "supported", "undecided", "supported"]
    for lacking in (everything, sc):
        assert not lacking.is_tested and "no scores of 1m-25-75-100 on genre" in lacking.needs[0]
    assert not finding.is_tested and any("on genre" in line for line in finding.needs)
    assert measure_findings(with_averages(ResultSet(tuple(results))))[5].is_tested, (
        "without a plan, what is there is all there is"
    )


def judge_one_task(*holds: str, ahead: dict[str, int], behind: dict[str, int]) -> tuple[Finding, ...]:
    """1m-25-75-100 is ten points ahead of 1m-mlm40-100 on wnut17, with two pretraining seeds of five runs each."""
    results = []
    for name, mean, more in (("1m-25-75-100", 0.6, ahead), ("1m-mlm40-100", 0.5, behind)):
        arm = ReportArm(name, "other", "1m", "mlm", 40, 100, 0, 100)
        samples = [mean + 0.001 * ((at * (3 if mean > 0.5 else 1)) % 4) for at in range(10)]
        known: dict[str, Any] = {"num_runs": 10, **more}
        seeds = [at % 5 for at in range(10)]
        results.append(Result(arm, "TC", "wnut17", "standard", samples, seeds=seeds, **known))
    return judge(make_plan(*holds), results)


@pytest.mark.parametrize(
    ("ahead", "behind", "verdicts", "needs"),
    [
        ({}, {}, ["supported", "contradicted"], []),
        ({"num_diverged": 3}, {}, ["undecided", "undecided"], ["1m-25-75-100 on wnut17 without divergence: it lost 3"]),
        ({}, {"num_diverged": 3}, ["supported", "contradicted"], []),
        ({"num_runs": 9}, {}, ["undecided", "undecided"], ["1m-25-75-100 on wnut17: its score comes from 9 of 10"]),
        ({}, {"num_runs": 5}, ["undecided", "undecided"], ["1m-mlm40-100 on wnut17: its score comes from 5 of 10"]),
    ],
)
def test_a_verdict_rests_on_finished_scores_that_lost_no_seed(
    ahead: dict[str, int], behind: dict[str, int], verdicts: list[str], needs: list[str]
) -> None:
    """Seeds that diverged stand in the way of the arm that is ahead, as the mean is that of the survivors."""
    lines = "1m-25-75 - mlm40 > 0 on TC at 100 steps", "1m-25-75 - mlm40 < 0 on TC at 100 steps"
    judged = judge_one_task(*lines, ahead=ahead, behind=behind)
    assert [one.verdict for one in judged] == verdicts
    for finding in judged:
        assert len(finding.needs) == len(needs) and all(map(str.__contains__, finding.needs, needs))


def test_an_equivalence_rests_on_scores_that_lost_no_seed_in_either_arm() -> None:
    lines = [
        f"{one} - {other} within 20 points on TC at 100 steps"
        for one, other in (("1m-25-75", "mlm40"), ("mlm40", "1m-25-75"))
    ]
    for ahead, behind in (({}, {}), ({"num_diverged": 3}, {}), ({}, {"num_diverged": 3})):
        is_whole = not (ahead or behind)
        for finding in judge_one_task(*lines, ahead=ahead, behind=behind):
            assert finding.verdict == ("supported" if is_whole else "undecided")
            assert is_whole or "without divergence: it lost 3 of 13 seeds" in finding.needs[0]


def test_a_spread_of_losses_is_in_nats() -> None:
    """Two losses that are 0.1 nats apart have a standard deviation of 0.1 / √2."""
    results = []
    for name, apart in (("1m-25-75", 0.1), ("1m-mlm40", 0.02)):
        for steps, loss in ((100, 2 + apart), (400, 2.0)):
            arm = ReportArm(f"{name}-{steps}", "other", "1m", "mlm", 40, steps, 0, steps)
            results.append(Result(arm, "", LOSS, "standard", [loss] * 5))
    line = "spread(1m-25-75 over budget) - spread(mlm40 over budget) > 0.01 nats on loss"
    (finding,) = judge(make_plan(line), results)
    assert tell_finding(finding) == "Undecided: Number 0: +0.057 nats against +0.010."


@pytest.mark.parametrize("lost", [{}, {"num_diverged": 3}])
def test_a_spread_is_over_what_did_not_diverge(lost: dict[str, int]) -> None:
    """So that seeds that diverged at the chosen rate stand in no verdict's way."""
    results = []
    for name, slope in (("1m-25-75-100", 0.1), ("1m-mlm40-100", 0.02)):
        arm = ReportArm(name, "other", "1m", "mlm", 40, 100, 0, 100)
        noise = [0.001 * ((at * (3 if slope > 0.05 else 1)) % 4) for at in range(5)]
        by_rate = {1e-5: [0.5 + one for one in noise], 1e-4: [0.5 + slope - one for one in noise]}
        results.append(Result(arm, "TC", "wnut17", "standard", by_rate[1e-4], by_rate, num_runs=10, **lost))
    line = "spread(1m-25-75 over rate) - spread(mlm40 over rate) > 0 on TC at 100 steps"
    (finding,) = judge(make_plan(line), results)
    assert (finding.verdict, finding.needs) == ("supported", [])
    assert "(rate 1e-05, 0.0001)" in next(finding.inequalities).label


def test_that_none_holds_is_not_known_while_one_has_no_scores() -> None:
    line = "mlm40 - 1m-25-75 > 0 on some task at 100 steps"
    (finding,) = judge_one_task(line, ahead={}, behind={})
    assert finding.verdict == "undecided" and "no scores of 1m-mlm40-100 on genre" in finding.needs[0]


def test_findings_of_the_paper_are_hypotheses_too() -> None:
    """On its 800 scores a citation is judged as the finding itself; beside it stands an inequality of one's own."""
    plan = make_plan("F6 of the paper", "F1 of the paper", "stack - mlm40 > 0")
    published = read_reference()
    planned = {result.dataset: result.family for result in published.results if result.dataset != AVERAGE}
    plan = replace(plan, families=planned)
    plan = replace(plan, hypotheses=tuple(bind_hypotheses(plan)))
    sixth, first, own = judge(plan, published.results)
    known = {finding.key: finding for finding in judge_claims(measure_findings(published))}
    for judged, key in ((sixth, "F6"), (first, "F1")):
        assert [one.label for one in judged.inequalities] == [one.label for one in known[key].inequalities]
        assert [one.p_value for one in judged.inequalities] == [one.p_value for one in known[key].inequalities]
    assert first.verdict == "supported" and not own.is_tested
    with pytest.raises(InputError, match="unknown finding of the paper 'F9'; known: F1, F2"):
        make_plan("F9 of the paper")


@pytest.mark.parametrize("wanted", ["paper", "expected.yaml"])
def test_hypotheses_stand_in_a_file_of_their_own(tmp_path: Path, wanted: str) -> None:
    (tmp_path / "expected.yaml").write_text("hypotheses: [{name: own, says: so, holds: clm - mlm40 > 0}]")
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump({**make_plan().study.model_dump(mode="json"), "hypotheses": wanted}))
    study = load_study(path)
    assert [one.name for one in study.hypotheses] == (
        list(read_findings()["findings"]) if wanted == "paper" else ["own"]
    )
    with pytest.raises(InputError, match=r"nothing\.yaml does not exist"):
        load_study(path, ["hypotheses=nothing.yaml"])


def sentences_on(plan: Plan, folder: Path) -> list[str]:
    """The sentences on when hypotheses were declared; the hash that stands in the first is that of `study plan`."""
    digest, sentences = tell_declaration(plan, folder)
    assert digest == hash_hypotheses(plan) and sentences[0].startswith(f"Hypotheses (hash {digest}): ")
    return sentences


def fill(folder: Path, runs: int, scores: int) -> None:
    """Put runs and scores into a study's folder, of whatever plan; unfinished cells do not count."""
    places = [f"runs/run-{number}/config.yaml" for number in range(runs)]
    places += [f"scores/model/{name}/score.json" for name in (*map(str, range(scores)), ".cell.part")]
    for place in places:
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        (folder / place).touch()


def test_what_was_declared_is_recorded(tmp_path: Path) -> None:
    before, after = make_plan("stack - mlm40 > 0"), make_plan("stack - mlm40 > 1 point")
    assert sentences_on(before, tmp_path)[0].endswith("not declared, since the study has not run with them.")
    declare(before, tmp_path)
    fill(tmp_path, 1, 0)
    declare(before, tmp_path)  # the same command goes on: nothing new is declared
    (first,) = sentences_on(before, tmp_path)
    assert first.endswith("before anything was trained; unchanged since (wording, arms, budgets, tasks).")
    assert "not declared" in sentences_on(after, tmp_path)[0]
    # Of another plan, which has done nothing yet.
    fill(tmp_path, 2, 12)
    declare(after, tmp_path)
    first, replaced = sentences_on(after, tmp_path)
    assert "changed once since the first declaration; the current ones were declared" in first
    assert first.endswith("with 2 runs and 12 scores in the folder.")
    says = before.study.hypotheses[0].says
    assert replaced.startswith(f"Replaced: {hash_hypotheses(before)}, declared ")
    assert replaced.endswith(f"before anything was trained: h0: “{says}” (stack - mlm40 > 0).")
    # Back again: what was declared first was declared then, and what was tried meanwhile is told.
    declare(before, tmp_path)
    first, replaced = sentences_on(before, tmp_path)
    assert "changed twice since" in first and first.endswith("before anything was trained.")
    assert "(stack - mlm40 > 1 point)" in replaced


OWN_TASK = {
    "name": "mine",
    "family": "sequence_classification",
    "metric": "accuracy",
    "classes": ["a", "b"],
    "template": "{text}",
    "files": [{"train": "t.jsonl"}],
}


def test_settings_that_changed_since_the_declaration_are_named(tmp_path: Path) -> None:
    """More seeds, another place of the text and further arms change no arm that was declared."""
    plan, rule = make_plan("stack - mlm40 > 0"), "stack - mlm40 > 0"
    declare(plan, tmp_path)
    (_, *arms), tree = plan.study.arms, plan.study.model_dump(mode="json")
    masked = [
        tree["arms"][0] | {"curricula": ["mlm40", "25/75", "mlm10"], "recipe": {"optimizer": {"weight_decay": 0.2}}},
        *tree["arms"][1:],
    ]
    moved = {"recipe": tree["recipe"] | {"data": {"shards": "elsewhere"}}, "pretraining_seeds": 3}
    assert arms and len(sentences_on(make_plan(rule, **moved), tmp_path)) == 1
    fitted = tree["evaluation"] | {"learning_rates": [2e-3]}
    for changes, named in (
        ({"arms": masked}, "1m-mlm40-400, 1m-mlm40-100, 1m-25-75-400 and 1 more"),
        ({"evaluation": fitted}, "fine-tuning"),
    ):
        changed = make_plan(rule, **changes)
        assert (
            sentences_on(changed, tmp_path)[1] == f"The settings of these have changed since the declaration: {named}."
        )
        declare(changed, tmp_path)  # recorded, and told all the same
        assert len(sentences_on(changed, tmp_path)) == 2
    assert len(read_declared(tmp_path).declarations) == 3
    # A task of one's own is the same wherever its file lies.
    hashes = []
    for name in ("here", "there"):
        file = tmp_path / name / "reviews.yaml"
        file.parent.mkdir()
        file.write_text(json.dumps(OWN_TASK))
        evaluation = tree["evaluation"] | {"tasks": [str(file)], "per_task": {str(file): {"epochs": 2}}}
        hashes.append(hash_settings(make_plan(rule, evaluation=evaluation)))
    assert hashes[0] == hashes[1] != hash_settings(plan)


def test_settings_without_effect_on_scores_are_no_change(tmp_path: Path) -> None:
    """The place and speed of a fine-tuning, defaults, the order of keys, and a number that YAML reads as text."""
    rule, tree = "stack - mlm40 > 0", make_plan().study.model_dump(mode="json")["evaluation"]

    def plan_with(finetune: dict[str, Any], per_task: dict[str, Any]) -> Plan:
        return make_plan(rule, evaluation=tree | {"finetune": finetune, "per_task": per_task})

    declared = plan_with({"eps": 1e-8, "batch_size": 16}, {"genre": {"epochs": 2}})
    declare(declared, tmp_path)
    for finetune, per_task in (
        ({"batch_size": 16, "eps": "1e-8"}, {"genre": {"epochs": 2}}),
        ({"eps": 1e-8, "batch_size": 16, "device": "cpu", "microbatch_tokens": 999}, {"genre": {"epochs": 2}}),
        ({"eps": 1e-8, "batch_size": 16, "shots": None}, {"genre": {"epochs": 2, "keep_texts": True}, "wnut17": {}}),
    ):
        assert len(sentences_on(plan_with(finetune, per_task), tmp_path)) == 1
        declare(plan_with(finetune, per_task), tmp_path)
    assert len(read_declared(tmp_path).declarations) == 1
    for finetune, per_task, named in (
        ({"eps": 1e-8, "batch_size": 16}, {"genre": {"epochs": 3}}, "fine-tuning on genre"),
        ({"eps": 1e-6, "batch_size": 16}, {"genre": {"epochs": 2}}, "fine-tuning on wnut17, fine-tuning on genre"),
    ):
        told = sentences_on(plan_with(finetune, per_task), tmp_path)[1]
        assert told == f"The settings of these have changed since the declaration: {named}."
    # The hash of the settings as they are written, which earlier versions recorded.
    record = read_declared(tmp_path)
    (entry,) = record.declarations
    arms = {name: digest for name, digest in entry.settings.items() if "fine-tuning" not in name}
    earlier = replace(entry, settings={**arms, "fine-tuning": "b4fcfc9c"})
    replace(record, declarations=(earlier,)).write(tmp_path)
    assert len(sentences_on(declared, tmp_path)) == 1
    declare(declared, tmp_path)
    assert read_declared(tmp_path).declarations == (earlier,)
    changed = plan_with({"eps": 1e-6, "batch_size": 16}, {"genre": {"epochs": 2}})
    assert sentences_on(changed, tmp_path)[1].endswith("the declaration: fine-tuning.")


def test_a_task_of_ones_own_is_planned_under_its_name_in_scores(tmp_path: Path) -> None:
    """A study names it by its file. Scores that lack rates or seeds are found by the name of the task."""
    file = tmp_path / "reviews.yaml"
    file.write_text(json.dumps(OWN_TASK))
    tree = make_plan().study.model_dump(mode="json")
    tree["evaluation"] |= {"tasks": [str(file), "genre"]}
    plan = plan_study(parse_config(Study, tree, origin="small.yaml"))
    found = collect_results(plan, {model.name: ScoreSet(()) for model in plan.models}, measure_sizes(plan))
    assert {task for _, task in found.planned_runs} == {*found.planned_tasks} == {"mine", "genre"}


def plan_seeds(**seeds: int) -> Plan:
    tree = make_plan("stack - mlm40 > 0").study.model_dump(mode="json") | {"pretraining_seeds": seeds}
    return plan_study(parse_config(Study, tree, origin="small.yaml"))


def look(plan: Plan, folder: Path, num: int) -> tuple[Any, str]:
    return count_looks(plan, folder, {"h0": num})["h0"]


def test_looks_are_counted_once_for_each_number_of_seeds(tmp_path: Path) -> None:
    plan = plan_seeds(count=3)
    declare(plan, tmp_path)
    for num in (0, 3, 3):  # a report without a test is no look
        assert look(plan, tmp_path, num) == (((), 0), "")  # as planned
    more = plan_seeds(count=7)  # the same hypotheses, so the first declaration counts
    declare(more, tmp_path)
    told = {num: look(more, tmp_path, num)[1] for num in (4, 5, 5, 7)}
    assert told[7] == "planned 3 seeds, tested at 7 after 3 looks" and "tested at 4 after 1 look" in told[4]
    assert [entry.seeds for entry in read_declared(tmp_path).looks] == [3, 4, 5, 7]
    # A report on fewer seeds again.
    assert look(plan, tmp_path, 3)[1] == "planned 3 seeds, tested at 3 after 3 looks"
    (sentence, *_) = tell_declaration(more, tmp_path)[1]
    assert "; unchanged since" in sentence  # looks change no declaration


def test_looks_at_hypotheses_count_for_those_that_replace_them(tmp_path: Path) -> None:
    """Declared or not; a look at one hypothesis is none at another beside it."""
    plan = plan_seeds(count=2, up_to=4)
    declare(plan, tmp_path)
    assert look(plan, tmp_path, 2)[0] == ([2], 4)
    seen = count_looks(plan, tmp_path, {"h0": 3, "h1": 3})
    assert (seen["h0"][0], seen["h1"][0]) == (([2, 3], 4), ([3], 4))
    tree = make_plan("stack - mlm40 > 1 point").study.model_dump(mode="json")
    other = plan_study(parse_config(Study, tree | {"pretraining_seeds": {"count": 2, "up_to": 4}}, origin="o.yaml"))
    for declares in (False, True):
        if declares:
            declare(other, tmp_path)
        found = look(other, tmp_path, 4)
        assert found == (([2, 3, 4], 4), "planned 2 to 4 seeds, tested at 4 after 2 looks"), declares


def test_looks_up_to_a_declared_number_share_the_level(tmp_path: Path) -> None:
    declare(plan_seeds(count=3), tmp_path)
    plan = plan_seeds(count=3, up_to=8)
    for _ in range(2):  # a further number that is not declared does not count, before the first look and after it
        (tmp_path / "declared").mkdir(exist_ok=True)
        declare(plan_seeds(count=3), tmp_path / "declared")
        assert look(plan, tmp_path / "declared", 3) == (((), 0), "")
    declare(plan, tmp_path)  # before the first look, the numbers of seeds may still be declared
    assert look(plan, tmp_path, 3) == (([3], 8), "planned 3 to 8 seeds, tested at 3 at the first look")
    assert look(plan_seeds(count=5, up_to=8), tmp_path, 5)[0] == ([3, 5], 8)
    declare(plan_seeds(count=9), tmp_path)
    later, words = look(plan_seeds(count=9), tmp_path, 9)  # up_to is what was declared
    assert later == ([3, 5, 9], 9)
    assert words == "planned 3 to 8 seeds, tested at 9 after 2 looks, beyond the seeds that share the 5 %"
    # The plan knows the looks that were taken.
    begun = Begun({}, frozenset(entry.seeds for entry in read_declared(tmp_path).looks))
    assert list_planned_looks(plan_seeds(count=7, up_to=8), begun) == [[3, 5, 7], [3, 5, 7, 8]]
    late = replace(begun, up_to=0)  # declared only after the first look
    assert list_planned_looks(plan_seeds(count=7, up_to=8), late) == []
    for seeds in ({"count": 9, "up_to": 8}, {"count": 1, "up_to": 8}):
        with pytest.raises(InputError, match="up_to is 8: it needs a count from 2 to 8"):
            plan_seeds(**seeds)
    tree = plan.study.model_dump(mode="json")
    tree["arms"][0]["pretraining_seeds"] = {"count": 3, "up_to": 8}
    with pytest.raises(InputError, match="up_to has no place here"):
        parse_config(Study, tree, origin="small.yaml")


def test_the_hash_has_budgets_that_names_of_arms_do_not_state() -> None:
    hashes = set()
    for budget, name in ((400, "long"), (800, "long"), (400, "long-{budget}"), (800, "long-{budget}")):
        tree = plan_seeds(count=1).study.model_dump(mode="json") | {"hypotheses": [], "intermediate": []}
        tree["arms"] = [tree["arms"][0] | {"name": name, "budgets": [budget], "models": tree["arms"][0]["models"][:1]}]
        tree["arms"][0]["curricula"] = tree["arms"][0]["curricula"][:1]
        arm = name.format(budget=budget)
        tree["hypotheses"] = [{"name": "h", "says": "it learns", "holds": f"{arm} > 1 point on average"}]
        hashes.add(hash_hypotheses(plan_study(parse_config(Study, tree, origin="small.yaml"))))
    assert len(hashes) == 4


def test_a_look_at_a_shared_level_decides_less() -> None:
    """A p-value of 3 % decides a single look, and neither the first nor the second of several."""
    gap = Contrast(0.02, 0.02 / stats.t.isf(0.015, 4), 4, 0.7, "paired t", 5, by_seed=(0.1,) * 5)
    finding = Finding("h", "it is", "", (Claim("a > b", (Inequality("a - b", gap, 0.0),)),))
    adjusted = []
    for looks in (((), 0), ([3], 8), ([3, 5], 8)):
        (judged,) = judge_claims([replace(finding, looks=looks)])
        (one,) = judged.inequalities
        adjusted.append(one.adjusted)
        assert (judged.verdict == "supported") == (not looks[0]) and one.p_value == pytest.approx(0.03)
    assert adjusted == pytest.approx([0.03, 0.03 * 0.05 / spend_error([3], 8), 0.03 * 0.05 / spend_error([3, 5], 8)])


def test_a_rung_that_is_added_is_a_change(tmp_path: Path) -> None:
    """The words "at the largest budget" stay, what they are about does not; an arm that no line is about is no
    change."""

    def grow(*more: dict[str, Any]) -> Plan:
        plan = make_plan("1m-25-75 - mlm40 > 0 at the largest budget")
        tree = plan.study.model_dump(mode="json")
        return plan_study(parse_config(Study, tree | {"arms": [*tree["arms"], *more]}, origin="grown.yaml"))

    before, other = grow(), {"group": "other", "models": ["1m"], "curricula": ["mlm30"], "budgets": [800]}
    declare(before, tmp_path)
    assert "unchanged since" in sentences_on(grow(other), tmp_path)[0]
    rung = grow({"group": "rung", "models": ["1m"], "curricula": ["mlm40", "25/75"], "budgets": [800]})
    assert "not declared" in sentences_on(rung, tmp_path)[0]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("null", "it holds null, not a mapping of keys"),
        ("[5]", r"it holds \[5\], not a mapping of keys"),
        ('{"a": 1}', "not what was written, by its own hash"),
    ],
)
def test_a_record_of_declarations_that_is_none_is_named(text: str, told: str, tmp_path: Path) -> None:
    """By whoever reads it or would add to it."""
    plan, path = make_plan("stack - mlm40 > 0"), tmp_path / "hypotheses.json"
    path.write_text(text)
    for read in (tell_declaration, declare):
        with pytest.raises(InputError, match=f"^{path} is damaged .*{told}.*; restore the original"):
            read(plan, tmp_path)


def test_a_declaration_whose_date_was_edited_is_refused(tmp_path: Path) -> None:
    plan, path = make_plan("stack - mlm40 > 0"), tmp_path / "hypotheses.json"
    declare(plan, tmp_path)
    path.write_text(path.read_text().replace('"when": "2', '"when": "1'))
    with pytest.raises(InputError, match="not what was written, by its own hash"):
        tell_declaration(plan, tmp_path)


def test_hypotheses_are_declared_before_the_study_runs(tmp_path: Path) -> None:
    """Their hash is that of the plan, and the words stand beside it."""
    plan = make_plan("stack - mlm40 > 0")
    opened = OpenStudy(plan, tmp_path, ())
    facts = opened.declare()
    assert facts["hash"] == hash_hypotheses(plan) and [*facts["hypotheses"]] == ["h0"]
    assert facts["declared"] == opened.declare()["declared"] == tell_declaration(plan, tmp_path)[1]
    assert (tmp_path / "study.yaml").exists() and "before anything was trained" in facts["declared"][0]
    with pytest.raises(InputError, match="has no hypotheses to declare"):
        OpenStudy(make_plan(), tmp_path, ()).declare()
