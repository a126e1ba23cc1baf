"""Study file → arms: the grid, the names, and one clear line for what cannot be."""

from typing import Any

import pytest

from biphase.config import BUNDLED, parse_config
from biphase.errors import InputError
from biphase.studies.arms import expand_arms
from biphase.studies.spec import Study, check_evaluation, finetune_config, load_study, trainings

STUDIES = BUNDLED / "studies"

SMALL = {
    "name": "small",
    "recipe": {"data": {"shards": "shards"}, "schedule": {"warmup_steps": 10, "decay_steps": 20}},
    "arms": [{"group": "base", "models": ["1m"], "curricula": ["clm", "25/75"], "budgets": [100, 200]}],
    "evaluation": {"tasks": ["sst2"], "learning_rates": [1e-4], "seeds": 2},
}


def make_study(*overrides: str) -> Study:
    return parse_config(Study, SMALL, overrides, origin="small.yaml")


def test_the_grid_has_every_combination_with_its_recipe() -> None:
    arms = expand_arms(make_study("arms.0.models=[1m, 3m]", "arms.0.recipe={seed: 7, schedule: {decay_steps: 40}}"))
    assert list(arms) == [
        f"{size}-{curriculum}-{budget}"
        for size in ("1m", "3m")
        for curriculum in ("clm", "25-75")
        for budget in (100, 200)
    ]
    recipe = arms["3m-25-75-200"].recipe
    assert recipe.init.preset == "3m" and recipe.seed == 7
    assert [phase.steps for phase in recipe.curriculum] == [50, 150]
    assert (recipe.schedule.warmup_steps, recipe.schedule.decay_steps) == (10, 40)


def test_models_carry_architecture_and_changes() -> None:
    model = {
        "name": "narrow",
        "preset": "1m",
        "architecture": {"hidden_size": 64},
        "recipe": {"compute": {"microbatch_tokens": 4096}},
    }
    arms = expand_arms(make_study(f"models=[{model}]", "arms.0.models=[narrow]"))
    recipe = arms["narrow-clm-100"].recipe
    assert recipe.init.architecture == {"hidden_size": 64} and recipe.compute.microbatch_tokens == 4096


def test_continued_arms_come_after_their_parents_and_inherit_the_model() -> None:
    child = "{group: more, parents: [1m-clm-100], curricula: [mlm], budgets: [50], carry_optimizer: false}"
    grandchild = "{group: more, name: last, parents: [1m-clm-100-mlm-50], curricula: [clm], budgets: [50]}"
    base = "{group: base, models: [1m], curricula: [clm], budgets: [100]}"
    arms = expand_arms(make_study(f"arms=[{grandchild}, {child}, {base}]"))
    assert list(arms) == ["1m-clm-100", "1m-clm-100-mlm-50", "last"]
    assert arms["last"].model == "1m" and arms["last"].parent == "1m-clm-100-mlm-50"
    init = arms["1m-clm-100-mlm-50"].recipe.init
    assert init.checkpoint == "1m-clm-100" and not init.carry_optimizer


@pytest.mark.parametrize("change", ["evaluation.seeds", "pretraining_seeds", "arms.0.pretraining_seeds"])
def test_seeds_are_not_counted_for_ever(change: str) -> None:
    with pytest.raises(InputError, match=r"seeds.* 1,?000"):
        make_study(f"{change}=1000000000000")


def test_a_sweep_over_numbers_that_are_text_to_yaml() -> None:
    """The names are as they are written."""
    arms = expand_arms(make_study("arms.0.sweep={architecture.rms_norm_eps: [1e-6, 1e-5], schedule.peak_lr: [1e-3]}"))
    recipe = arms["1m-rms_norm_eps1e-6-clm-100-peak_lr1e-3"].recipe
    assert recipe.init.architecture == {"rms_norm_eps": 1e-6} and recipe.schedule.peak_lr == 1e-3


def test_trainings_are_shared_between_tasks() -> None:
    evaluation = make_study("evaluation.tasks=[nq, sst2, msmarco]").evaluation
    assert evaluation is not None
    assert trainings(evaluation) == {"msmarco": ("nq", "msmarco"), "sst2": ("sst2",)}


def test_settings_of_single_tasks_go_over_those_of_all() -> None:
    changes = ("evaluation.finetune={batch_size: 8, max_steps: 50}", "evaluation.per_task={sst2: {batch_size: 4}}")
    evaluation = make_study(*changes).evaluation
    assert evaluation is not None and evaluation.seeds == (0, 1)
    config = finetune_config(evaluation, "sst2", 3e-4, 1)
    assert (config.batch_size, config.max_steps, config.learning_rate, config.seed) == (4, 50, 3e-4, 1)


def test_the_files_of_this_repository_load() -> None:
    for path in sorted(STUDIES.glob("*.yaml")):
        study = load_study(path)
        expand_arms(study)
        assert study.evaluation is not None
        check_evaluation(study.evaluation)
    assert len(load_study(STUDIES / "paper.yaml", ["arms.0.models=[210m]"]).arms[0].models) == 1


def continued(parent: str) -> str:
    return f"[{{group: a, name: a, parents: [{parent}], curricula: [mlm], budgets: [50]}}]"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("arms.0.curricula=[25/80]", "'25/80' is impossible: its shares add up to 105.0000%"),
        ("arms.0.curricula=[0.1/99.9]", "gives one of its phases less than one of 100 steps"),
        ("arms.0.curricula=[30+30]", "has 60 steps, which is not the budget of 100"),
        ("arms.0.curricula=[50% clm + 10 mlm]", "mixes steps and shares"),
        ("arms.0.curricula=[clm40]", "unknown curriculum 'clm40'; did you mean 'clm'"),
        ("arms.0.curricula=[1.5 clm + 2 mlm]", "^curriculum '1.5 clm .*', phase 0: 'steps' is '1.5': .* valid integer"),
        ("arms.0.curricula=[0 clm + 2 mlm]", "'steps' is '0': input should be greater than"),
        ("arms.0.curricula=[mlmm]", "unknown curriculum 'mlmm'; did you mean 'mlm'"),
        ("arms.0.curricula=[mlm 40]", "short forms are such as"),
        ("arms.0.curricula=[mlm100]", "mask_probability"),
        ("arms.0.budgets=[25]", "10 warm-up \\+ 20 decay steps do not fit into the 25 steps"),
        ("arms.0.budgets=[]", "needs budgets"),
        ("arms.0.budgets=[1.2345k]", "'arms.0.budgets.0' is '1.2345k'"),
        ("arms.0.budgets=[100, 100]", "two arms are named '1m-clm-100' \\(groups 'base' and 'base'\\)"),
        ("arms.0.name='{model}-{budget}'", "two arms are named"),
        ("arms.0.name='{modle}'", r"name '{modle}' is not a template of {model}, {curriculum}, {budget} \('modle'\)"),
        ("arms.0.name='{model'", "is not a template"),
        ("arms.0.models=[2m]", "unknown model '2m'; did you mean"),
        ("arms.0.parents=[x]", "either models or parents"),
        ("arms.0.group=evaluation", "named 'evaluation'"),
        ("arms.0.bugdets=[5]", "unknown key 'arms.0.bugdets'; did you mean 'budgets'"),
        ("models=[{name: 1m, preset: 5m}]", "unknown preset '5m'"),
        ("models=[{name: x, preset: 1m}, {name: x, preset: 3m}]", "models: x is named twice"),
        ("models=[{name: 1m, preset: 1m, model: org/net}]", "exactly one of preset, checkpoint and model"),
        ("recipe.seeed=3", "arm '1m-clm-100': unknown key 'seeed'; did you mean 'seed'"),
        ("recipe.name=x", "recipe.name follows from the arm"),
        ("recipe.batch_tokens=100", "less than one sample"),
        (f"arms={continued('1m-clm-400')}", "continues the unknown arm '1m-clm-400'"),
        (f"arms={continued('a')}", "a circle of parents: a → a"),
        ("curricula=[{name: clm, phases: [{objective: clm}]}]", "phase 0 needs either steps or share"),
        ("curricula=[{name: clm, phases: [{objective: clm, share: 2}]}]", "share is 2, not a number above 0"),
        ("curricula=[{name: clm, phases: [{objektive: clm, share: 1}]}]", "unknown key 'objektive'"),
        ("evaluation.tasks=[sst3]", "unknown task 'sst3'; did you mean 'sst2'"),
        ("evaluation.tasks=[sst2, sst2]", "task sst2 is named twice"),
        ("evaluation.learning_rates=[1e-4, 1e-4]", "rate 0.0001 is named twice"),
        ("evaluation.per_task={qqp: {}}", "does not train on 'qqp'"),
        ("evaluation.finetune={batchsize: 3}", "unknown key 'batchsize'; did you mean 'batch_size'"),
        ("evaluation.finetune={seed: 3}", "seed follows from seeds"),
        ("evaluation.data_dirs={qqp: x}", "data_dirs: unknown task 'qqp'"),
    ],
)
def test_bad_input_is_one_clear_line(override: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        run_all_checks(make_study(override))
    assert "\n" not in str(caught.value)


def run_all_checks(study: Study) -> dict[str, Any]:
    arms = expand_arms(study)
    assert study.evaluation is not None
    check_evaluation(study.evaluation)
    return arms


def test_a_task_that_is_only_evaluated_has_no_settings_of_its_own() -> None:
    evaluation = make_study("evaluation.tasks=[nq]", "evaluation.per_task={nq: {batch_size: 4}}").evaluation
    assert evaluation is not None
    with pytest.raises(InputError, match="does not train on 'nq'"):
        check_evaluation(evaluation)
