"""What people and programs read of a plan: complete, well-formed, the same every time."""

import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from rich.console import Console

from biphase.config import BUNDLED, parse_config
from biphase.errors import InputError
from biphase.report.formats import format_bytes
from biphase.studies.cost import estimate, study_machine
from biphase.studies.describe import Begun, describe_plan, describe_power, draw_plan, order_lanes, plan_json, plot_runs
from biphase.studies.plan import Plan, plan_study
from biphase.studies.spec import PretrainingSeeds, Study, load_study

STUDIES = BUNDLED / "studies"


@pytest.fixture(scope="module", params=["paper", "mini"])
def plan(request: pytest.FixtureRequest) -> Plan:
    return plan_study(load_study(STUDIES / f"{request.param}.yaml"))


def told(plan: Plan) -> str:
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(describe_plan(plan, estimate(plan, study_machine(plan.study)), Begun()))
    return console.export_text()


def test_what_a_small_study_has_none_of_is_not_told() -> None:
    text = told(plan_study(load_study(STUDIES / "demo.yaml")))
    for fact in (
        "\n2 final models, and 1 from random weights\n",
        "\n2 runs: 1,200 steps\n",
        "\n30 fine-tunings: 3 models × 2 tasks × 1 rate × 5 seeds\n",
        "\ncan detect differences of about 4.3 points on genre (1,200 examples) and 2.5 points on uner_en_ewt",
    ):
        assert fact in text, fact
    assert "(80% power, corrected for 2 hypotheses)" in " ".join(text.split())


def test_seeds_in_place_of_rates_are_proposed() -> None:
    """Three rates and one seed against one rate and three seeds, which are as many fine-tunings."""
    changes = ["pretraining_seeds=6", "hypotheses=[]", "evaluation.seeds=1"]
    rates = [*changes, "evaluation.learning_rates=[1e-3,2e-3,4e-3]"]
    tried = " ".join(told(plan_study(load_study(STUDIES / "demo.yaml", rates))).split())
    assert "(80% power) if" in tried and "corrected for" not in tried
    found = r"3 fine-tuning seeds, the same number of fine-tunings finds ([\d.]+) points on genre \(1,200 examples\) "
    *_, proposed = re.findall(rf"{found}in 8\d% of studies instead of (\d+)%", tried)
    alone = " ".join(told(plan_study(load_study(STUDIES / "demo.yaml", [*changes[:2], "evaluation.seeds=3"]))).split())
    assert f"{proposed[0]} points on genre" in alone and int(proposed[1]) < 70 and "tuned before" not in alone


def test_a_plan_that_can_detect_nothing_says_so() -> None:
    """Two seeds and twenty hypotheses leave a test without power, and more fine-tunings do not help."""
    says = [{"name": f"h{n}", "says": "s", "holds": ["40/60 - mlm > 0 on genre"]} for n in range(20)]
    words = ["pretraining_seeds=2", "evaluation.seeds=1", "evaluation.learning_rates=[1e-3,2e-3,4e-3]"]
    tree = load_study(STUDIES / "demo.yaml", words).model_dump() | {"hypotheses": says}
    study = parse_config(Study, tree, origin="test")
    text = " ".join(told(plan_study(study)).split())
    assert re.search(r"can detect no difference on genre [^:]* and uner_en_ewt [^:]*, however large \(80% power", text)
    assert "the same number of fine-tunings finds no difference on genre (1,200 examples) either" in text
    assert "inf" not in re.findall(r"\w+", text)


def test_tuned_rates_are_counted_and_leave_nothing_to_choose() -> None:
    """Where every arm has a tuned rate, the plan has the power of a study with one rate."""
    changes = ["evaluation.learning_rates=[1e-3,2e-3,4e-3]"]
    rates = "{genre: 1e-3, uner_en_ewt: 2e-3}"
    some = [*changes, f"evaluation.tuned_rates={{1m-mlm-600: {rates}}}"]
    every = [*changes, f"evaluation.tuned_rates={{1m-mlm-600: {rates}, 1m-40-60-600: {rates}, 1m-random: {rates}}}"]
    partly, wholly, demo = (told(plan_study(load_study(STUDIES / "demo.yaml", words))) for words in (some, every, []))
    assert "\n70 fine-tunings: 3 models × 2 tasks × 1 to 3 rates × 5 seeds\n" in partly
    assert "declared as `evaluation.tuned_rates`" in " ".join(partly.split())
    assert "\n30 fine-tunings: 3 models × 2 tasks × 1 rate × 5 seeds\n" in wholly and "tuned before" not in wholly
    powers = [next(line for line in text.split("\n") if "can detect" in line) for text in (wholly, demo)]
    assert powers[0] == powers[1]


def test_the_levels_of_looks_are_told() -> None:
    text = told(plan_study(load_study(STUDIES / "demo.yaml", ["pretraining_seeds={count: 3, up_to: 5}"])))
    assert "share the 5 %: p below 0.035 at 3, 0.021 at 4 and 0.019 at 5" in " ".join(text.split())


def test_the_plan_takes_the_noise_of_examples_from_finished_scores() -> None:
    plan = plan_study(load_study(STUDIES / "demo.yaml"))
    assert plan.study.evaluation is not None
    (guessed, _), (measured, _) = (
        describe_power(plan, plan.study.evaluation, Begun(known))
        for known in ({}, {"genre": 0.01, "uner_en_ewt": 0.21})
    )
    points = [float(re.findall(r"about ([\d.]+) points on genre", line)[0]) for line in (guessed, measured)]
    assert points[1] < 0.7 * points[0] and "genre (1,200 examples, variance measured)" in measured


def test_the_power_is_that_of_the_arms_with_the_fewest_pretraining_seeds() -> None:
    study = load_study(STUDIES / "demo.yaml", ["pretraining_seeds=6"])
    few = study.arms[0].model_copy(update={"curricula": ("40/60",), "pretraining_seeds": PretrainingSeeds(count=3)})
    many = study.arms[0].model_copy(update={"curricula": ("mlm",)})
    text = told(plan_study(study.model_copy(update={"arms": (many, few)})))
    assert "3 pretraining seeds of 1m-40-60-600: less power" in text
    points = [
        re.findall(
            r"about ([\d.]+) points",
            told(plan_study(load_study(STUDIES / "demo.yaml", [f"pretraining_seeds={number}"]))),
        )[0]
        for number in (3, 6)
    ]
    assert re.findall(r"about ([\d.]+) points", text)[0] == points[0] != points[1]


def test_arms_of_a_single_seed_have_no_test_whose_power_is_told() -> None:
    study = load_study(STUDIES / "demo.yaml", ["pretraining_seeds=6", "evaluation.seeds=1"])
    one = study.arms[0].model_copy(update={"curricula": ("40/60",), "pretraining_seeds": PretrainingSeeds(count=1)})
    many = study.arms[0].model_copy(update={"curricula": ("mlm",)})
    text = " ".join(told(plan_study(study.model_copy(update={"arms": (many, one)}))).split())
    assert (
        "1 pretraining seed of 1m-40-60-600: no test beside an arm with several; the differences below are for 6"
        in text
    )
    assert re.search(r"about [\d.]+ points on genre", text) and "inf points" not in text


def test_two_pretraining_seeds_are_warned_of() -> None:
    for num in (1, 2, 3):
        text = told(plan_study(load_study(STUDIES / "demo.yaml", [f"pretraining_seeds={num}"])))
        assert ("2 pretraining seeds detect less than 1 does" in text) == (num == 2)
        one_tuning = ["evaluation.seeds=1", f"pretraining_seeds={num}"]
        text_of_one = told(plan_study(load_study(STUDIES / "demo.yaml", one_tuning)))
        assert ("2 pretraining seeds detect little: take 3 or more" in text_of_one) == (num == 2)
        assert (f"{num} pretraining seeds, each with its own order of the data" in text) == (num > 1)


def test_the_text_has_every_run_and_the_sums() -> None:
    plan = plan_study(load_study(STUDIES / "paper.yaml"))
    text = told(plan)
    assert all(f"{run.name}: " in text for run in plan.runs.values())
    for fact in (
        "38 final models and 12 intermediate checkpoints",
        "812,000 steps; each arm alone would need 1,166,000, so sharing saves 30%",
        "15,000 fine-tunings: 50 models × 10 trainings (12 tasks) × 6 rates × 5 seeds → 18,000 scores",
        "610m-3k-9k-12k: 3k → 12k, mlm40 9k",
    ):
        assert fact in text, fact


def test_json_is_complete(plan: Plan) -> None:
    tree = json.loads(json.dumps(plan_json(plan, estimate(plan, study_machine(plan.study)))))
    assert [run["name"] for run in tree["runs"]] == list(plan.runs)
    assert [cell["name"] for cell in tree["cells"]] == [cell.name for cell in plan.cells]
    assert len(tree["models"]) == len(plan.models) and len(tree["segments"]) == len(plan.segments)
    for model in tree["models"]:
        assert sum(phase["steps"] for phase in model["history"]) == int(model["checkpoint"].rpartition("@")[2])
    assert tree["cost"]["flops"] > 0 and tree["cost"]["machine"]["name"]


def test_a_foreign_model_is_not_called_random_weights() -> None:
    tree = {
        "name": "adapt",
        "recipe": {"data": {"shards": "shards"}, "schedule": {"warmup_steps": 0, "decay_steps": 0}},
        "models": [{"name": "net", "model": "org/net"}],
        "arms": [{"group": "a", "models": ["net", "1m"], "curricula": ["mlm20"], "budgets": [10]}],
    }
    plan = plan_study(parse_config(Study, tree, origin="adapt.yaml"))
    for own, label in ((plan, "steps"), (plan_study(load_study(STUDIES / "demo.yaml")), "steps since random weights")):
        axes = Figure().add_subplot()
        plot_runs(own, axes)
        assert axes.get_xlabel() == label


def test_lanes_stand_under_their_parents(plan: Plan) -> None:
    lanes = {name: lane for lane, name in enumerate(order_lanes(plan))}
    assert set(lanes) == set(plan.runs)
    for run in plan.runs.values():
        if run.parent is not None:
            between = [plan.runs[name] for name, lane in lanes.items() if lanes[run.parent] < lane < lanes[run.name]]
            # Nothing that the connecting line would cross.
            assert all(other.first >= run.first for other in between)


def test_the_picture_is_the_same_every_time(plan: Plan, tmp_path: Path) -> None:
    """Whatever the title is: to nobody's eyes is it mathematics, and a control character is written out."""
    title = "Is $x^$ worth a \x07 bell?"
    study = parse_config(Study, plan.study.model_dump() | {"title": title}, origin="study")
    plan = replace(plan, study=study)
    for name in ("a.svg", "b.svg"):
        draw_plan(plan, tmp_path / name)
    first = (tmp_path / "a.svg").read_bytes()
    assert first == (tmp_path / "b.svg").read_bytes()
    root = ElementTree.fromstring(first)
    assert root.tag.endswith("svg") and "Is $x^$ worth a \\x07 bell?" in "".join(root.itertext())
    with pytest.raises(InputError, match=r"a picture ends in \.svg, \.png, \.pdf"):
        draw_plan(plan, tmp_path / "a.gif")


def test_sizes() -> None:
    assert [format_bytes(value) for value in (7, 1234, 5.5e6, 1.5e12, 3e16)] == [
        "7 B",
        "1.23 kB",
        "5.5 MB",
        "1.5 TB",
        "30,000 TB",
    ]
