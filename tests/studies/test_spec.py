"""Study file → arms: the grid, the names, and one clear line for what cannot be."""

from pathlib import Path
from typing import Any

import pytest

from biphase.config import BUNDLED, parse_config
from biphase.curriculum import MaskRamp
from biphase.errors import InputError
from biphase.report.formats import write_steps
from biphase.studies.arms import expand_arms
from biphase.studies.spec import (
    NamedCurriculum,
    Study,
    check_evaluation,
    fill_budget,
    finetune_config,
    load_study,
    read_curriculum,
    trainings,
)

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


def test_a_wrong_value_is_that_of_the_change_that_set_it() -> None:
    path = STUDIES / "mini.yaml"
    with pytest.raises(InputError, match=r"^evaluation\.seeds=x: 'evaluation\.seeds' is 'x': "):
        load_study(path, ["name=other", "evaluation.seeds=x"])


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


@pytest.mark.parametrize("name", ["QA", "OT", "average", "Average", "loss"])
def test_a_task_is_not_called_as_reports_call_means_and_losses(name: str, tmp_path: Path) -> None:
    """Its scores would stand in the mean's place."""
    path = tmp_path / "own.yaml"
    files = "files: [{train: train.tsv, validation: dev.tsv, test: test.tsv}]"
    facts = f"family: sequence_classification, metric: accuracy, classes: [a, b], {files}"
    path.write_text(f'{{name: {name}, label: label, template: "{{text}}", {facts}}}', encoding="utf-8")
    with pytest.raises(InputError, match=f"^evaluation: task {name}: reports use this name for .*; rename the task$"):
        run_all_checks(make_study(f"evaluation.tasks=[sst2, {path}]"))


def test_a_task_that_is_only_evaluated_has_no_settings_of_its_own() -> None:
    evaluation = make_study("evaluation.tasks=[nq]", "evaluation.per_task={nq: {batch_size: 4}}").evaluation
    assert evaluation is not None
    with pytest.raises(InputError, match="does not train on 'nq'"):
        check_evaluation(evaluation)


def phases_of(text: str, budget: int | None, *named: NamedCurriculum) -> list[tuple[str, int, float | MaskRamp]]:
    templates = read_curriculum(text, {one.name: one for one in named}, 0.4)
    return [(p.objective, p.steps, p.mask_probability) for p in fill_budget(templates, budget, text)]


@pytest.mark.parametrize(
    ("text", "budget", "expected"),
    [
        ("clm", 12_000, [("clm", 12_000, 0.4)]),
        ("mlm", 12_000, [("mlm", 12_000, 0.4)]),
        ("mlm20", 7, [("mlm", 7, 0.2)]),
        ("mntp12.5", 7, [("mntp", 7, 0.125)]),
        ("25/75", 22_000, [("clm", 5_500, 0.4), ("mlm", 16_500, 0.4)]),
        ("33.3/66.7", 10, [("clm", 3, 0.4), ("mlm", 7, 0.4)]),
        ("5k+17k", None, [("clm", 5_000, 0.4), ("mlm", 17_000, 0.4)]),
        ("2.5k+500", 3_000, [("clm", 2_500, 0.4), ("mlm", 500, 0.4)]),
        ("40k clm + 2k mlm30", None, [("clm", 40_000, 0.4), ("mlm", 2_000, 0.3)]),
        ("40% mlm + 20% clm + 40% mlm50", 10, [("mlm", 4, 0.4), ("clm", 2, 0.4), ("mlm", 4, 0.5)]),
        ("clm/mlm", 10, [("clm", 5, 0.4), ("mlm", 5, 0.4)]),
        ("meap15/mlm", 10, [("meap", 5, 0.15), ("mlm", 5, 0.4)]),
        ("mntp/mlm40-15", 10, [("mntp", 5, 0.4), ("mlm", 5, MaskRamp(start=0.4, to=0.15))]),
        ("causal-mlm/mlm30", 11, [("causal-mlm", 6, 0.4), ("mlm", 5, 0.3)]),
        ("causal-mlm20", 7, [("causal-mlm", 7, 0.2)]),
        ("50% mlm + 50% mlm40", 10, [("mlm", 10, 0.4)]),
        ("25% clm + 75% mlm40-15", 8, [("clm", 2, 0.4), ("mlm", 6, MaskRamp(start=0.4, to=0.15))]),
        (
            "50% mlm40-15 + 50% mlm40-15",
            8,
            [("mlm", 4, MaskRamp(start=0.4, to=0.15)), ("mlm", 4, MaskRamp(start=0.4, to=0.15))],
        ),
    ],
)
def test_short_forms(text: str, budget: int | None, expected: list[tuple[str, int, float]]) -> None:
    assert phases_of(text, budget) == expected


def test_shares_round_to_the_budget() -> None:
    assert [steps for _, steps, _ in phases_of("33% clm + 33% mlm + 34% clm", 100)] == [33, 33, 34]
    for budget in range(4, 60):
        assert sum(steps for _, steps, _ in phases_of("35% clm + 30% mlm + 35% clm", budget)) == budget


def test_named_curricula_are_phase_lists_that_may_repeat() -> None:
    phases = ({"objective": "clm", "share": 0.5}, {"objective": "mlm", "share": 0.5, "mask_token_share": 0.8})
    alternation = NamedCurriculum(name="in turns", phases=phases, repeat=3)
    assert [(name, steps) for name, steps, _ in phases_of("in turns", 60, alternation)] == [
        ("clm", 10),
        ("mlm", 10),
    ] * 3
    masked = fill_budget(read_curriculum("in turns", {"in turns": alternation}, 0.25), 60, "")[1]
    assert masked.mask_token_share == 0.8 and masked.mask_probability == 0.25
    by_keys = NamedCurriculum(
        name="by keys",
        phases=(
            {"attention": "causal", "target": "next", "share": 0.25},
            {"attention": "causal", "target": "next", "mask_probability": 0.15, "share": 0.25},
            {"target": "next", "mask_probability": 0.3, "share": 0.5},
        ),
    )
    assert phases_of("by keys", 4, by_keys) == [("clm", 1, 0.4), ("meap", 1, 0.15), ("mntp", 2, 0.3)]
    falling = NamedCurriculum(
        name="falling",
        phases=(
            {"objective": "mlm", "steps": "1k", "mask_probability": 0.4},
            {"objective": "mlm", "steps": 500, "mask_probability": 0.2},
        ),
    )
    assert phases_of("falling", None, falling) == [("mlm", 1000, 0.4), ("mlm", 500, 0.2)]


def test_steps_are_written_as_people_write_them() -> None:
    assert [write_steps(steps) for steps in (0, 400, 1000, 1200, 42_000)] == ["0", "400", "1k", "1200", "42k"]
