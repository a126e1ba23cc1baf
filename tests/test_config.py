"""A recipe: what it accepts, how it says no, and what is part of a run's identity."""

from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from pydantic import ValidationError

from biphase.config import BUNDLED, find_yaml, load_config, parse_config, read_settings
from biphase.curriculum import OBJECTIVES, ObjectiveName, Phase
from biphase.embedding.recipe import EmbeddingRecipe
from biphase.errors import InputError
from biphase.recipe import Recipe
from biphase.style import LOOKS

TREE: dict[str, Any] = {
    "name": "r",
    "init": {"preset": "1m"},
    "data": {"shards": "shards", "max_sample_tokens": 512},
    "curriculum": [{"objective": "clm", "steps": 4}, {"objective": "mlm", "steps": 6}],
    "schedule": {"warmup_steps": 2, "decay_steps": 3},
    "batch_tokens": 4096,
    "compute": {"microbatch_tokens": 2048},
}


def parse(*overrides: str) -> Recipe:
    return parse_config(Recipe, TREE, overrides, origin="r.yaml")


def refusal(*overrides: str) -> str:
    """The one line that a recipe is refused with."""
    with pytest.raises(InputError) as caught:
        parse(*overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_defaults_are_the_papers() -> None:
    recipe = parse_config(
        Recipe,
        {
            "name": "r",
            "init": {"preset": "610m"},
            "data": {"shards": "s"},
            "curriculum": [{"objective": "mlm", "steps": 42000}],
        },
        origin="r.yaml",
    )
    assert recipe.batch_tokens == 2304 * 1024
    assert (recipe.data.min_sample_tokens, recipe.data.max_sample_tokens) == (12, 2048)
    assert (recipe.schedule.peak_lr, recipe.schedule.warmup_steps, recipe.schedule.decay_steps) == (5e-4, 2000, 2000)
    optimizer = recipe.optimizer
    assert (optimizer.name, optimizer.betas, optimizer.eps) == ("adamw", (0.9, 0.95), 1e-5)
    assert (optimizer.weight_decay, optimizer.max_grad_norm) == (0.1, 1.0)
    (phase,) = recipe.curriculum
    assert (phase.mask_probability, phase.mask_token_share, phase.random_token_share) == (0.4, 1.0, 0.0)


def test_overrides() -> None:
    recipe = parse("curriculum.1.steps=7", "schedule={peak_lr: 1e-3, warmup_steps: 0, decay_steps: 0}", "name=other")
    assert [phase.steps for phase in recipe.curriculum] == [4, 7]
    assert recipe.num_steps == 11
    assert (recipe.schedule.peak_lr, recipe.name) == (1e-3, "other")
    assert TREE["curriculum"][1]["steps"] == 6, "the tree that was given is left as it is"
    assert parse("optimizer.betas=[0.8, 0.9]").optimizer.betas == (0.8, 0.9)
    assert parse("init={model: x/y, revision: abc}").init.revision == "abc"


def test_numbers_of_an_architecture_may_have_an_exponent_without_a_point() -> None:
    """YAML 1.1 reads them as text."""
    architecture = {"rms_norm_eps": "1e-6", "rope_theta": "2E4", "hidden_act": "silu", "num_hidden_layers": 2}
    read = parse_config(Recipe, {**TREE, "init": {"preset": "1m", "architecture": architecture}}, origin="r.yaml")
    assert read.init.architecture == {**architecture, "rms_norm_eps": 1e-6, "rope_theta": 2e4}


@pytest.mark.parametrize(("text", "value"), [("on", "on"), ("off", "off"), ("auto", "auto"), ("'on'", "on")])
def test_yaml_reads_on_and_off_as_booleans(text: str, value: str) -> None:
    assert parse(f"compute.compile={text}").compute.compile == value


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("schedule.peak_rl=1", "schedule.peak_rl=1: unknown key 'schedule.peak_rl'; did you mean 'peak_lr'?"),
        ("sede=1", "unknown key 'sede'; did you mean 'seed'?"),
        ("curriculum.0.objektive=clm", "unknown key 'curriculum.0.objektive'; did you mean 'objective'?"),
        (
            "compute.xyz=1",
            "unknown key 'compute.xyz'; known: activation_checkpointing, compile, device, microbatch_tokens",
        ),
        ("lr=1", "unknown key 'lr'; did you mean 'schedule.peak_lr'?"),
        ("tensorboard=true", "unknown key 'tensorboard'; did you mean 'tracking=tensorboard'?"),
        ("bf16=true", "unknown key 'bf16'; did you mean 'compute.precision=bf16'?"),
        ("sede=often", "unknown key 'sede'; known: batch_tokens"),
        ("learning_rate=1", "did you mean 'schedule.peak_lr'?"),
        ("steps=30", "did you mean 'curriculum.0.steps'?"),
        ("curriculum.0.objective=mml", "'curriculum.0.objective' is 'mml': input should be 'clm', 'mlm', 'mntp', "),
        ("curriculum.0.steps=0", "'curriculum.0.steps' is 0: input should be greater than or equal to 1"),
        ("curriculum.0.mask_probability={from: 1.0, to: 0.2}", "'curriculum.0.mask_probability.from' is 1.0"),
        ("curriculum.0.mask_probability={form: 0.4, to: 0.2}", "did you mean 'from'?"),
        ("batch_tokens={from: 8, to: 4096, steps: 2}", "batch_tokens is 8, less than one sample"),
        ("batch_tokens={from: 4096, to: 8192}", "'batch_tokens.steps' is required"),
        ("curriculum.0.mask_probability=1.0", "'curriculum.0.mask_probability' is 1.0"),
        (
            "curriculum.0={objective: mlm, steps: 4, mask_token_share: 0.8, random_token_share: 0.3}",
            "must not exceed 1",
        ),
        ("curriculum.0.clm_share=1.0", "'curriculum.0.clm_share' is 1.0"),
        (
            "curriculum.0={objective: clm, steps: 4, clm_share: 0.5}",
            "clm_share mixes CLM into a bidirectional objective",
        ),
        (
            "curriculum.0={objective: meap, steps: 4, clm_share: 0.5}",
            "clm_share mixes CLM into a bidirectional objective",
        ),
        (
            "curriculum.1.attention=causal",
            "objective: mlm has attention: bidirectional; leave out objective or attention",
        ),
        ("curriculum.1.target=next", "objective: mlm has target: same; leave out objective or target"),
        (
            "curriculum.0={attention: both, steps: 4, mask_probability: 0.4}",
            "attention: both, target: same is not an objective: give causal or bidirectional, next or same",
        ),
        (
            "curriculum.0={attention: bidirectional, target: next, steps: 4}",
            "curriculum.0: attention: bidirectional, target: next is not an objective: give causal or bidirectional, "
            "next or same; without mask_probability only causal with next hides from each position the token that it "
            "must predict",
        ),
        ("curriculum.0={attention: bidirectional, target: same, steps: 4}", "target: same is not an objective: give"),
        ("curriculum.0={attention: causal, target: same, steps: 4}", "target: same is not an objective: give"),
        ("curriculum.0={steps: 4, mask_probability: 0.4}", "'curriculum.0.objective' is required"),
        ("checkpoints.keep=[4, 11]", "checkpoints.keep: step 11 is beyond the 10 steps of the curriculum"),
        ("curriculum=[]", "'curriculum' is []"),
        ("name=a b", "'name' is 'a b'"),
        ("data.shards=", "'data.shards' is None"),
        ("data.max_sample_tokens=20", "data: max_sample_tokens must be at least twice min_sample_tokens"),
        ("schedule.decay_steps=9", "2 warm-up + 9 decay steps do not fit into the 10 steps of the curriculum"),
        ("batch_tokens=500", "batch_tokens is 500, less than one sample of 512 tokens"),
        ("compute.microbatch_tokens=100", "compute.microbatch_tokens is 100, less than one sample of 512 tokens"),
        ("init={}", "init: give exactly one of preset, checkpoint and model (given: none)"),
        ("init.model=x", "init: give exactly one of preset, checkpoint and model (given: preset, model)"),
        ("init={model: x, architecture: {num_hidden_layers: 2}}", "init: architecture changes a preset: leave it out"),
        ("init={checkpoint: x, architecture: {num_hidden_layers: 2}}", "because the checkpoint has its own"),
        ("init={preset: 1m, revision: abc}", "init: revision is that of init.model: leave it out with preset"),
        ("seed", "'seed' is not of the form key=value"),
        ("=3", "'=3' is not of the form key=value"),
        ("seed=yes", "'seed' is True: input should be a number"),
        ("schedule.peak_lr=on", "'schedule.peak_lr' is True: input should be a number"),
        ("optimizer.betas=[no, 0.9]", "'optimizer.betas' is [False, 0.9]: input should be a number"),
        ("schedule.peak_lr=1:30", "'schedule.peak_lr' is '1:30': input should be a valid number"),
        ("curriculum.².steps=1", "'²' is not one of the 2 positions of a list"),
        ("seed=[", "the value in 'seed=[' is not valid YAML"),
        ("curriculum.5.steps=1", "'5' is not one of the 2 positions of a list"),
        ("curriculum.x.steps=1", "'x' is not one of the 2 positions of a list"),
        ("seed.x=1", "'seed' is {'x': 1}: input should be a valid integer"),
        ("batch_tokens.x=1", "'x' lies inside a single value"),
    ],
)
def test_refusals(override: str, expected: str) -> None:
    assert expected in refusal(override)


def test_a_phase_names_itself_and_its_parts() -> None:
    phase = Phase(objective="mlm", steps=100, mask_probability=0.3, clm_share=0.25)
    masked, clm = phase.parts
    assert (masked[0].clm_share, masked[0].mask_probability, masked[1]) == (0, 0.3, 0.75)
    assert clm == (Phase(objective="clm", steps=100), 0.25)
    assert phase.label == "mlm30+clm25"
    pure = Phase(objective="clm", steps=3)
    assert pure.parts == ((pure, 1.0),) and pure.label == "clm"
    bert = Phase(objective="mlm", steps=3, mask_probability=0.15, mask_token_share=0.8, random_token_share=0.1)
    assert (bert.label, bert.words) == ("mlm15(80/10/10)", "MLM 15 % (80/10/10)")
    twice = bert.model_copy(update={"mask_token_share": 0.7, "random_token_share": 0.3, "mask_passes": 2})
    assert (twice.label, twice.words) == ("mlm15(70/30/0)x2", "MLM 15 % (70/30/0) in 2 passes")


def test_a_wrong_item_does_not_make_its_list_too_short() -> None:
    assert refusal("curriculum.0.objective=mml").count("'curriculum") == 1


def test_every_mistake_is_named_at_once() -> None:
    """By what gave it: a change, or the file."""
    line = refusal("sede=1", "batch_tokens=many")
    assert "sede=1: unknown key 'sede'" in line
    assert "batch_tokens=many: 'batch_tokens' is 'many'" in line
    with pytest.raises(InputError, match=r"^seed=x: 'seed' is 'x'.*; r.yaml: unknown key 'sede'"):
        parse_config(Recipe, {**TREE, "sede": 1}, ["seed=x"], origin="r.yaml")


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    with pytest.raises(InputError, match=r"r.yaml does not exist"):
        load_config(Recipe, path)
    path.write_text(yaml.safe_dump(TREE))
    assert load_config(Recipe, path, ["seed=3"]).seed == 3
    for text, expected in (("a: [", "is not valid YAML"), ("- a", "must be a mapping"), ("", "must be a mapping")):
        path.write_text(text)
        with pytest.raises(InputError, match=expected) as caught:
            load_config(Recipe, path)
        assert "\n" not in str(caught.value)
    path.write_bytes(b"name: \xff")
    with pytest.raises(InputError, match="is not valid YAML"):
        load_config(Recipe, path)
    with pytest.raises(InputError, match="Is a directory"):
        load_config(Recipe, tmp_path)


def test_a_recipe_is_frozen() -> None:
    with pytest.raises(ValidationError):
        parse().seed = 1  # type: ignore[misc]


def test_the_saved_tree_is_the_recipe() -> None:
    recipe = parse("optimizer.name=muon", "curriculum.1.mask_probability=0.3")
    assert Recipe.model_validate(yaml.safe_load(yaml.safe_dump(recipe.model_dump(mode="json")))) == recipe


def test_what_is_not_set_stays_so_in_a_changed_recipe() -> None:
    """Among it the length of samples, which then follows from a model."""
    recipe = parse("data={shards: shards}", "curriculum.1.mask_probability={from: 0.4, to: 0.2}")
    changed = read_settings(Recipe, recipe, {"seed": 3})
    assert changed == recipe.model_copy(update={"seed": 3}) and changed.data.model_fields_set == {"shards"}


def identity(recipe: Recipe, data: str = "data", parent: str | None = None) -> str:
    return recipe.identity(data, parent, recipe.compute.precision)


@pytest.mark.parametrize(
    "change",
    [
        "init.preset=3m",
        "init.architecture={num_hidden_layers: 2}",
        "data.packing=stream",
        "data.max_sample_tokens=256",
        "data.order_seed=1",
        "curriculum.0.steps=5",
        "curriculum.1.mask_probability=0.3",
        "curriculum.1.objective=mntp",
        "schedule.peak_lr=1e-3",
        "batch_tokens=8192",
        "optimizer.weight_decay=0",
        "seed=1",
        "compute.precision=bf16",
    ],
)
def test_what_decides_the_weights_is_identity(change: str) -> None:
    assert identity(parse(change)) != identity(parse())


@pytest.mark.parametrize(
    "change",
    [
        "name=other",
        "data.shards=elsewhere",
        "validation.every_steps=3",
        "checkpoints.every_steps=3",
        "tracking=wandb",
        "compute.microbatch_tokens=4096",
        "compute.compile=on",
        "compute.parallel=fsdp",
        "compute.activation_checkpointing=true",
    ],
)
def test_what_does_not_is_not(change: str) -> None:
    assert identity(parse(change)) == identity(parse())


def test_data_and_parent_are_identity_by_content() -> None:
    recipe = parse("init={checkpoint: runs/a@3}")
    assert identity(recipe, parent="p") == identity(parse("init={checkpoint: moved/a@3}"), parent="p")
    assert identity(recipe, parent="p") != identity(recipe, parent="q")
    assert identity(recipe, parent="p") != identity(recipe, data="other", parent="p")


def test_published_recipes_are_valid() -> None:
    recipes = sorted((BUNDLED / "recipes").glob("*.yaml"))
    assert recipes
    for path in recipes:
        load_config(EmbeddingRecipe if path.name.startswith("embed") else Recipe, path)


def test_what_comes_with_biphase_is_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of the user's goes first; what is neither is told with the nearest name."""
    monkeypatch.chdir(tmp_path)
    assert load_config(Recipe, Path("tiny")) == load_config(Recipe, Path("recipes/tiny.yaml"))
    for wrong in ("tiny.yaml", "recipes/tinny.yaml", "studies/tiny.yaml", "mine/recipes/tiny.yaml"):
        with pytest.raises(InputError, match=f"{wrong} does not exist"):
            load_config(Recipe, Path(wrong))
    with pytest.raises(InputError, match="tinny is neither a file nor one of the bundled recipes; did you mean 'tiny'"):
        load_config(Recipe, Path("tinny"))
    Path("recipes").mkdir()
    Path("recipes/tiny.yaml").write_text(find_yaml(Path("tiny")).read_text().replace("name: tiny", "name: own"))
    assert load_config(Recipe, Path("recipes/tiny.yaml")).name == "own"


def test_each_objective_has_its_facts_and_its_look() -> None:
    assert [*OBJECTIVES] == [*get_args(ObjectiveName)]
    assert LOOKS.keys() >= OBJECTIVES.keys()


@pytest.mark.parametrize(
    ("keys", "objective"),
    [
        ("attention: causal, target: next", "clm"),
        ("attention: causal, target: next, mask_probability: 0.3", "meap"),
        ("attention: causal, target: same, mask_probability: 0.3", "causal-mlm"),
        ("attention: bidirectional, target: next, mask_probability: 0.3", "mntp"),
        ("attention: bidirectional, target: same, mask_probability: 0.3", "mlm"),
    ],
)
def test_attention_target_and_masks_name_an_objective(keys: str, objective: str) -> None:
    """Both ways to write a phase are one run, and what is saved reads as it was."""
    ratio = "" if objective == "clm" else ", mask_probability: 0.3"
    by_keys = parse(f"curriculum.1={{{keys}, steps: 4}}")
    by_name = parse(f"curriculum.1={{objective: {objective}{ratio}, steps: 4}}")
    assert by_keys == by_name and identity(by_keys) == identity(by_name)
    dumped = by_keys.curriculum[1].model_dump(mode="json", by_alias=True)
    assert not {"attention", "target"} & dumped.keys() and Phase(**dumped) == by_keys.curriculum[1]
    told = by_keys.curriculum[1]
    assert f"attention: {told.attention}, target: {told.target}" in keys
