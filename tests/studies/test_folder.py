"""What of a study counts as done and may be compared: made-up cells and runs in its folder."""

import re
import shutil
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from biphase.config import parse_config
from biphase.console import duration
from biphase.engine.units import Engine
from biphase.errors import BusyError, InputError, StoppedError
from biphase.exporting.push import without_folders
from biphase.files import RECORD_HASH, locked, read_json, write_hashed
from biphase.finetuning.config import settle_config
from biphase.finetuning.scores import ScoreSet, read_score
from biphase.hub import model_fingerprint
from biphase.recipe import Init
from biphase.report.contrasts import difference
from biphase.report.page import tell_cost
from biphase.report.results import tell_edges
from biphase.run import Run, whole_steps
from biphase.studies import folder, report
from biphase.studies import run as worker
from biphase.studies.bundle import hide_folders
from biphase.studies.cost import list_costs, measure_sizes
from biphase.studies.declarations import hash_settings
from biphase.studies.folder import (
    StudyState,
    TrainedRecord,
    claim_study_folder,
    drop_checkpoints,
    find_record,
    find_weights,
    reach_step,
    read_runs,
    read_state,
    refuse_other_data,
    refuse_other_models,
    refuse_other_precision,
    refuse_other_text,
    refuse_unlike_validation,
    study_text,
)
from biphase.studies.plan import Plan, StudyCell, plan_study
from biphase.studies.report import arm_of_model, collect_results, list_notes
from biphase.studies.spec import Study, load_study
from biphase.tasks.sources import find_source
from biphase.tasks.spec import find_task

TREE: dict[str, Any] = {
    "name": "made-up",
    "recipe": {"data": {"shards": "shards"}, "schedule": {"warmup_steps": 10, "decay_steps": 20}},
    "planning": {"vocab_size": 8192},
    "arms": [{"group": "all", "models": ["1m"], "curricula": ["mlm40", "25/75"], "budgets": [400]}],
    "evaluation": {"tasks": ["genre"], "learning_rates": [1e-3], "seeds": 5},
}

BERT = {"mask_token_share": 0.8, "random_token_share": 0.1}


def make_plan(**changes: Any) -> Plan:
    return plan_study(parse_config(Study, TREE | changes, origin="made-up"))


@pytest.fixture
def fill(write_cell: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Score every cell as a function of it says; returns the state of the study's folder."""
    monkeypatch.setattr(StudyState, "identify", lambda state, run, step: ("a" * 64, 2048))

    def make(plan: Plan, say: Callable[[StudyCell], dict[str, Any]]) -> Any:
        for cell in plan.cells:
            config = settle_config(cell.config, find_task(cell.task), 2048).model_dump(mode="json")
            rate, seed = config.pop("learning_rate"), config.pop("seed")
            name = f"{cell.model}/{cell.task}-{seed}{f'-{rate:g}' if rate != 1e-3 else ''}"
            given = {"precision": "fp32", "model_hash": "a" * 64} | say(cell)
            write_cell(cell.model, cell.task, rate, seed, name=name, **(config | given))
        return read_state(plan, tmp_path)

    return make


@pytest.mark.parametrize(
    ("key", "values", "told"),
    [
        ("precision", ("bf16", "fp32"), r"different precision, bf16 \(.*/genre-0\) and fp32 \(.*/genre-1\): .*pin it"),
        ("data_hash", ("e" * 64, "f" * 64), r"different data, e{8} \(.*/genre-0\) and f{8} \(.*/genre-1\): delete"),
    ],
)
def test_seeds_of_different_settings_are_refused(fill: Any, key: str, values: tuple[str, str], told: str) -> None:
    """Two machines, or data that changed: a mean over the seeds of either kind alone would hide the others."""
    plan = make_plan()
    state = fill(plan, lambda cell: {key: values[cell.config.seed % 2]})
    assert len(state.scored) == len(plan.cells)
    with pytest.raises(InputError, match=f"^scores on genre were made with {told}"):
        collect_results(plan, state.scores, measure_sizes(plan))


def test_a_study_does_not_go_on_in_another_precision(
    fill: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `auto` means here counts only for cells that are left."""
    plan, here = make_plan(evaluation=TREE["evaluation"] | {"finetune": {"device": "cpu"}}), Engine(workers=0)
    state, cell = fill(plan, lambda cell: {}), plan.cells[0]
    monkeypatch.setattr("biphase.finetuning.config.has_bf16_cores", lambda: False)
    refuse_other_precision(state, {cell.name}, here)
    monkeypatch.setattr("biphase.finetuning.config.has_bf16_cores", lambda: True)
    refuse_other_precision(state, set(), here)
    monkeypatch.setattr(worker, "read_state", lambda *_: replace(state, scored=state.scored - {cell.name}))
    monkeypatch.setattr(worker, "look_for_data", lambda *_: None)
    told = rf"{cell.model} was scored on genre in fp32, and auto means bf16 here: say .*precision=fp32, or continue"
    with pytest.raises(InputError, match=told):
        worker.run_study(plan, tmp_path, here)


def test_arms_on_different_data_are_refused(fill: Any) -> None:
    plan = make_plan()
    state = fill(plan, lambda cell: {"data_hash": ("a" if "mlm40" in cell.model else "b") * 64})
    with pytest.raises(InputError, match=r"^scores on genre were made with different data, aaaaaaaa \(") as error:
        collect_results(plan, state.scores, measure_sizes(plan))
    assert not re.search("pin|\n", str(error.value))


def test_what_was_not_the_same_for_all_arms_is_noted(fill: Any) -> None:
    """Precision here; a study of one arm has nothing to compare."""
    plan = make_plan()
    state = fill(plan, lambda cell: {"precision": "bf16" if "mlm40" in cell.model else "fp32"})
    for name, precision in zip(plan.runs, ("bfloat16", "float32"), strict=True):
        state.environments[name] = {"device": "cpu", "precision": precision}
    trained, tuned = list_notes(state, {})
    mlm, clm_mlm = plan.runs
    assert trained.startswith(f"Not all were trained with the same precision: bfloat16 ({mlm}), float32 ({clm_mlm});")
    resumed = {mlm: {"device": "H100", "earlier": [{"device": "cpu"}]}}
    (told,) = list_notes(replace(state, scores={}, environments=resumed), {})
    assert told.startswith(f"Not all were trained with the same device: H100 ({mlm}), cpu ({mlm});")
    assert tuned.startswith(f"Not all were fine-tuned with the same precision: bf16 ({mlm}), fp32 ({clm_mlm});")
    (mixed,) = (found for name, found in state.scores.items() if name == mlm)
    alone = replace(state, scores={mlm: mixed}, environments={mlm: state.environments[mlm]})
    assert list(list_notes(alone, {})) == []


def test_arms_of_other_versions_and_processors_are_noted_once(write_cell: Callable[..., Path], tmp_path: Path) -> None:
    """A sentence for the software and one for the processors, though several tasks differ."""
    scores, same = {}, {"device": "cpu", "biphase": "1", "torch": "2.9", "transformers": "5"}
    for model, changes in (("a", {"torch": "2.8", "processor": "Xeon"}), ("b", {"processor": "EPYC"})):
        made = [read_score(write_cell(model, task, seed=seed)) for task in ("genre", "wnut17") for seed in range(2)]
        scores[model] = ScoreSet(tuple(score.model_copy(update={"machine": same | changes}) for score in made))
    software, processor = sorted(list_notes(StudyState(make_plan(), tmp_path, {}, scores=scores), {}))[::-1]
    assert "software: biphase 1 torch 2.8 transformers 5 (a), biphase 1 torch 2.9 transformers 5 (b);" in software
    assert processor.startswith("Not all were fine-tuned with the same processor: EPYC (b), Xeon (a);")


def test_a_model_that_was_tuned_on_two_devices_is_noted(write_cell: Callable[..., Path], tmp_path: Path) -> None:
    """Also where the first cell of each model is on the same device."""
    scores = {}
    for model, devices in (("a", ("cpu", "cuda")), ("b", ("cpu",))):
        made = [read_score(write_cell(model, seed=seed)) for seed in range(len(devices))]
        own = zip(made, devices, strict=True)
        scores[model] = ScoreSet(tuple(score.model_copy(update={"machine": {"device": name}}) for score, name in own))
    (note,) = list_notes(StudyState(make_plan(), tmp_path, {}, scores=scores), {})
    assert note.startswith("Not all were fine-tuned with the same device: cpu (a, b), cuda (a);")
    kept = {model: ScoreSet(own.scores[:1]) for model, own in scores.items()}
    lost = kept["b"].scores[0].model_copy(update={"predictions": {"test": "a hash"}})
    (note,) = list_notes(StudyState(make_plan(), tmp_path, {}, scores=kept | {"b": ScoreSet((lost,))}), {})
    assert note.startswith("The predictions of 1 score were deleted (b):")


def test_two_tasks_of_one_name_are_refused(tmp_path: Path) -> None:
    """Scores stand under the name: the second would never run."""
    files = []
    for place in ("a", "b"):
        (tmp_path / place).mkdir()
        files.append(str(tmp_path / place / "t.yaml"))
        Path(files[-1]).write_text(
            "{name: topics, family: sequence_classification, metric: accuracy, classes: [a, b], template: '{text}', "
            "files: [{train: train.jsonl, validation: validation.jsonl, test: test.jsonl}]}"
        )
    with pytest.raises(InputError, match="evaluation: task topics is named twice; drop or rename one"):
        make_plan(evaluation=TREE["evaluation"] | {"tasks": files})


def test_a_recipe_of_its_own_is_no_part_of_a_baseline() -> None:
    """The decay belongs to the budget; an arm that continues another one is compared with those that do, too."""
    plain = {"models": ["1m"], "curricula": ["mlm40"]}
    hot = "{model}-{curriculum}-{budget}-hot"
    groups = [
        {"group": "hot", "name": hot, "budgets": [400], "recipe": {"schedule": {"peak_lr": 0.01}}} | plain,
        {"group": "short", "budgets": [100, 200]} | plain,
        {"group": "long", "budgets": [800], "recipe": {"schedule": {"decay_steps": 80}}} | plain,
        {
            "group": "on",
            "parents": ["1m-mlm40-100"],
            "curricula": ["mlm40"],
            "budgets": [50],
            "recipe": {"schedule": {"warmup_steps": 0}},
        },
    ]
    twice = {"name": "twice", "phases": [{"objective": "mlm", "share": 1, "mask_probability": 0.4, "mask_passes": 2}]}
    bert = {"name": "bert", "phases": [{"objective": "mlm", "share": 1, "mask_token_share": 0.8}]}
    for name in ("twice", "bert"):
        groups.append({"group": name, "models": ["1m"], "curricula": [name], "budgets": [200]})
    plan = make_plan(arms=groups, curricula=[twice, bert], pretraining_seeds=2)
    sizes = measure_sizes(plan)
    unlike = {model.name for model in plan.models if not arm_of_model(plan, model, sizes).is_plain}
    names = ("1m-mlm40-400-hot", "1m-twice-200", "1m-bert-200")
    assert unlike == {f"{name}{seed}" for name in names for seed in ("", "-seed1")}


@pytest.mark.parametrize(
    ("curriculum", "objective", "masked"),
    [
        ("25/75", "CLM → MLM", "40"),
        ("mlm40-15", "MLM", "40–15"),
        ("50% mlm + 50% mlm20", "MLM", "40, 20"),
        ("40% mlm + 20% clm + 40% mlm", "MLM → CLM → MLM", "40"),
        ("mntp20", "MNTP", "20"),
        ("meap/mlm", "MEAP → MLM", "40"),
        ("50% causal-mlm15 + 50% mlm", "causal MLM → MLM", "15, 40"),
        ("meap15", "MEAP", "15"),
        ("mixed", "MLM with 25 % CLM", "40"),
        ("in turns", "CLM and MLM in turns", "40"),
        ("bert", "MLM", "40 (80/10/10)"),
    ],
)
def test_a_report_says_what_an_arm_was_trained_on(curriculum: str, objective: str, masked: str) -> None:
    """Batches that mix objectives are not one after the other, and a ratio that falls is not its last one."""
    turns = [{"objective": "clm", "share": 0.5}, {"objective": "mlm", "share": 0.5}]
    named = [
        {"name": "mixed", "phases": [{"objective": "mlm", "share": 1, "clm_share": 0.25}]},
        {"name": "in turns", "phases": turns, "repeat": 4},
        {"name": "bert", "phases": [{"objective": "mlm", "share": 1} | BERT]},
    ]
    plan = make_plan(arms=[TREE["arms"][0] | {"curricula": [curriculum]}], curricula=named)
    arm = arm_of_model(plan, plan.models[0], measure_sizes(plan))
    assert (arm.told_objective, arm.told_masks) == (objective, masked)
    ratio = masked.removesuffix(" (80/10/10)")
    assert arm.mask_percent == (int(ratio) if ratio.isdigit() else None), "only one ratio has a place on an axis"


@pytest.mark.parametrize(
    ("num", "first", "test"), [(2, "pretraining seeds", "Welch"), (1, "fine-tuning seeds", "paired t")]
)
def test_random_weights_are_drawn_as_often_as_arms_are_pretrained(fill: Any, num: int, first: str, test: str) -> None:
    """Every fine-tuning of them draws anew, so a gain over them is one over several pretrainings."""
    evaluation = TREE["evaluation"] | {"random_weights": True, "seeds": 3}
    plan = make_plan(evaluation=evaluation, pretraining_seeds=num)
    state = fill(plan, lambda cell: {"test": 0.5 + 0.01 * cell.config.seed + 0.02 * ("seed1" in cell.model)})
    found = {
        one.arm.name: one
        for one in collect_results(plan, state.scores, measure_sizes(plan)).results
        if one.metric == "standard"
    }
    gain = difference(found["1m-mlm40-400"], found["1m-random"])
    assert (gain.noise[0], gain.test) == (first, test)


def test_a_rate_at_the_edge_of_its_grid_is_told_in_a_line(fill: Any) -> None:
    """Validation takes the highest rate for one arm with both pretrainings, for the other the middle one; of a single
    rate nothing was chosen."""

    def told(rates: list[float]) -> list[str]:
        plan = make_plan(evaluation=TREE["evaluation"] | {"learning_rates": rates, "seeds": 1}, pretraining_seeds=2)

        def say(cell: StudyCell) -> dict[str, Any]:
            best = 4e-3 if "mlm40" in cell.model else 2e-3
            own = 0.5 if cell.config.learning_rate == best else 0.4
            return {"validation": own, "test": own}

        return [*tell_edges(collect_results(plan, fill(plan, say).scores, measure_sizes(plan)))]

    (line,) = told([1e-3, 2e-3, 4e-3])
    assert line.endswith("outside it: on genre, the highest (4e-3) was chosen for 1m-mlm40-400 in 2 of 2 runs.")
    assert told([8e-3]) == []


def test_only_the_links_inside_folders_of_wandb_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """W&B links its latest run and logs below each training, and the study goes on after it. No file is asked for, as a
    study may have a hundred thousand of them on a shared disk."""
    plan = make_plan()
    for place in ("runs/1m-mlm40-400-12345678", "scores/1m-mlm40-400/tracking/genre-12345678"):
        inside = tmp_path / place / "wandb" / "offline-run-1"
        inside.mkdir(parents=True)
        (inside.parent / "latest-run").symlink_to(inside)
        (inside / "debug-core.log").symlink_to(tmp_path / "cache.log")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "is_symlink", lambda path: pytest.fail(f"{path}"))
        assert read_runs(plan, claim_study_folder(tmp_path, plan.study)).records == {}
    for linked in ("runs/1m-25-75-400-12345678/wandb", "scores/wandb"):
        (tmp_path / linked).parent.mkdir(exist_ok=True)
        (tmp_path / linked).symlink_to(tmp_path / "runs")
        with pytest.raises(InputError, match=f"{linked} is a link"):
            read_runs(plan, tmp_path)
        (tmp_path / linked).unlink()
    for inside in ("scores/wandb", "scores/1m-mlm40-400/wandb", "scores/1m-mlm40-400/genre-0/wandb"):
        (tmp_path / inside).mkdir(parents=True)
        (tmp_path / inside / "genre").symlink_to(tmp_path)
        with pytest.raises(InputError, match=f"{inside}/genre is a link"):
            read_runs(plan, tmp_path)
        (tmp_path / inside / "genre").unlink()


def test_a_checkpoint_is_waited_for_only_while_it_is_made(tmp_path: Path) -> None:
    plan, place = make_plan(), tmp_path
    begin = plan.runs["1m-25-75-400"]
    assert begin.parent is None
    lock = place / "trained" / f".{begin.name}.lock"
    for _ in range(2):
        with pytest.raises(InputError, match="1m-25-75-400@400 no longer exists; the same command makes it again"):
            reach_step(place, begin, 400)
        with locked(lock), pytest.raises(BusyError, match="another process makes 1m-25-75-400@400"):
            reach_step(place, begin, 400)
        lock = place / "runs" / "1m-25-75-400-12345678" / ".lock"


@pytest.mark.parametrize(("keep", "left"), [({}, []), ({"keep_last": 2}, [200, 300])])
def test_a_run_keeps_the_checkpoints_that_are_needed_or_asked_for(
    keep: dict[str, int], left: list[int], tmp_path: Path
) -> None:
    """A finished run lacks no checkpoint that it could go on to, unlike the other one, whose last one was lost."""
    plan = make_plan(recipe=TREE["recipe"] | {"checkpoints": {"every_steps": 100, **keep}})
    claim_study_folder(tmp_path, plan.study)
    made = {"1m-mlm40-400": (200, 300, 380, 400), "1m-25-75-400": (200, 300, 380)}
    for name, steps in made.items():
        run, path = plan.runs[name], tmp_path / "runs" / f"{name}-12345678"
        for step in steps:
            (path / "steps" / str(step)).mkdir(parents=True)
            (path / "steps" / str(step) / "manifest.json").touch()
        for file in ("config.yaml", "done.json"):
            (path / file).touch()
        record = {"folder": path.name, "seconds": 1.0, "key": run.key, "placeless_key": run.placeless_key}
        (tmp_path / "trained").mkdir(exist_ok=True)
        write_hashed(tmp_path / "trained" / f"{name}.json", record)
    drop_checkpoints(tmp_path, plan)
    kept = {name: whole_steps(Run(tmp_path / "runs" / f"{name}-12345678")) for name in made}
    assert kept == {"1m-mlm40-400": [*left, 400], "1m-25-75-400": [200, 300]}


def test_every_sitting_and_every_process_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is stopped or killed on the way took its time, too; where that was not kept, it is not known."""
    plan, place, name = make_plan(), tmp_path, "1m-mlm40-400"
    run, now = place / "runs" / f"{name}-12345678", [0.0]
    monkeypatch.setattr("biphase.run.time", SimpleNamespace(perf_counter=lambda: now[0]))

    def train(recipe: Any, folder: Path, processes: int = 1) -> Path:
        run.mkdir(parents=True, exist_ok=True)
        now[0] += 900
        if now[0] == 900:
            raise StoppedError("stopped")
        if now[0] == 1800:  # a kill tells nobody: the time is there before
            while read_json(place / "trained" / f".{name}.clock")["seconds"] < 1800:
                over.wait(0.01)
            shutil.copy(place / "trained" / f".{name}.clock", tmp_path / "kept")
            raise StoppedError("killed")
        (run / "done.json").write_text("{}")
        return run

    over = threading.Event()
    monkeypatch.setattr("biphase.run.TICK_SECONDS", 0.01)
    monkeypatch.setattr("biphase.pretraining.loop.train", lambda recipe, runs: Run(train(recipe, runs)))
    monkeypatch.setattr(worker, "train_by_torchrun", train)
    for _ in range(2):
        with pytest.raises(StoppedError):
            worker.train_unit(plan, name, place, 1)
    shutil.copy(tmp_path / "kept", place / "trained" / f".{name}.clock")
    worker.train_unit(plan, name, place, 4)
    record = find_record(place, plan.runs[name])
    assert record and record.seconds == 2700 and record.is_timed
    assert not (place / "trained" / f".{name}.clock").exists()
    (place / "trained" / f"{name}.json").unlink()
    worker.train_unit(plan, name, place, 1)
    record = find_record(place, plan.runs[name])
    assert record and not record.is_timed
    records = {name: record, "1m-25-75-400": replace(record, untimed=(), seconds=60.0)}
    machines = {key: {"device": "cpu", "threads": 2} for key in records}
    (row,) = list_costs(StudyState(plan, place, records, environments=machines), measure_sizes(plan))
    assert row["worker time"] == f"{duration(60)}, without 1 run of unknown time"
    elsewhere = machines | {name: {"device": "H100", "earlier": [machines[name]]}}
    row, other = list_costs(StudyState(plan, place, records, environments=elsewhere), measure_sizes(plan))
    assert (row["device"], row["device hours"], row["kWh at most"]) == ("1 × H100 and 2 × cpu", *["not known"] * 2)
    assert other["device"] == "2 × cpu"
    ((_, told),) = tell_cost([row, other])
    assert re.fullmatch(r"\S+ hours of a CPU thread and an unknown number of hours on 1 × H100 and 2 × cpu", told)


def test_a_study_that_was_trained_on_other_text_does_not_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, name = make_plan(recipe=TREE["recipe"] | {"data": {"shards": str(tmp_path)}}), "1m-mlm40-400"
    monkeypatch.setattr(folder, "read_shard_manifest", lambda path: SimpleNamespace(fingerprint=64 * "b"))

    def check(text: str) -> None:
        record = TrainedRecord("made-12345678", "key", 1.0, "placeless", text=(64 * text,))
        refuse_other_text(StudyState(plan, tmp_path, {name: record}))

    check("c")  # the shards are gone: nothing is known of them
    (tmp_path / "manifest.json").touch()
    check("b")
    with pytest.raises(InputError, match=rf"^run {name} was trained on other text \(cccccccc\) than .* now \(bbbbbbbb"):
        check("c")


def test_a_mixture_is_validated_on_the_same_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The set with the held-out text is none of those that it trains on."""
    (tmp_path / "manifest.json").touch()
    mixture = [{"path": str(tmp_path / member), "weight": 1} for member in ("code", "prose")]
    plan = make_plan(recipe=TREE["recipe"] | {"data": {"shards": str(tmp_path), "mixture": mixture}})
    monkeypatch.setattr(folder, "read_shard_manifest", lambda path: SimpleNamespace(fingerprint=64 * "b"))
    for made in ("", 64 * "b"):
        record = TrainedRecord("made-12345678", "key", 1.0, "placeless", text=("c", "d"), validation_text=made)
        refuse_other_text(StudyState(plan, tmp_path, {"1m-mlm40-400": record}))
    record = replace(record, validation_text=64 * "c")
    with pytest.raises(
        InputError, match=r"^run 1m-mlm40-400 was validated on other text \(cccccccc\) than .* now \(bb"
    ):
        refuse_other_text(StudyState(plan, tmp_path, {"1m-mlm40-400": record}))


def test_losses_over_other_numbers_of_tokens_are_not_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No key of a run has that number. Without a hypothesis on loss, it does not matter."""
    more = TREE["recipe"] | {"validation": {"tokens": 2_000_000}}
    hypotheses = [{"name": "order", "says": "Order matters", "holds": "1m-25-75 - mlm40 < 0 on loss"}]
    before, after = (make_plan(recipe=recipe, hypotheses=hypotheses) for recipe in (TREE["recipe"], more))
    name = "1m-mlm40-400"
    assert before.runs_compared_by_loss == {*before.runs} and before.runs[name].key == after.runs[name].key
    run = tmp_path / "runs" / MADE
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(yaml.safe_dump(before.runs[name].recipe.model_dump(mode="json")))
    state = StudyState(before, tmp_path, {name: TrainedRecord(MADE, "key", 1.0, "placeless")})
    refuse_unlike_validation(state)
    refuse_unlike_validation(replace(state, plan=make_plan(recipe=more)))
    told = rf"^run {name} measured its loss on at most 1,000,000 .* says 2,000,000: say .*: 1000000 .* delete {run} to"
    for module in (worker, report):
        monkeypatch.setattr(module, "read_state", lambda plan, _: replace(state, plan=plan))
    monkeypatch.setattr(worker, "declare", lambda *_: None)
    with pytest.raises(InputError, match=told):
        worker.run_study(after, tmp_path, Engine(workers=0))
    with pytest.raises(InputError, match=told):
        report.report_study(after, tmp_path, tmp_path / "report", ())
    # All of a text that does not exceed both numbers was measured either way.
    monkeypatch.setattr(folder, "is_shard_set", lambda path: path == "shards")
    state = replace(state, plan=after)
    for num_tokens, text in ((1_000_000, "b"), (1_000_001, "b"), (1_000_000, "c")):
        held = SimpleNamespace(splits={"validation": SimpleNamespace(tokens=num_tokens)}, fingerprint="b")
        monkeypatch.setattr(folder, "read_shard_manifest", lambda _, held=held: held)
        state.records[name] = replace(state.records[name], validation_text=text)
        with nullcontext() if (num_tokens, text) == (1_000_000, "b") else pytest.raises(InputError, match=told):
            refuse_unlike_validation(state)


def test_a_study_that_began_with_other_weights_does_not_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one starting model, in a folder or in the Hub's cache. The page tells it, too."""
    model = tmp_path / "decoder"
    model.mkdir()
    (model / "config.json").write_text("{}")
    arms = [TREE["arms"][0] | {"models": ["ours"]}]
    plan = make_plan(models=[{"name": "ours", "model": str(model)}], arms=arms)
    first, second = plan.runs
    made = model_fingerprint(str(model), model)

    def state_of(**parents: str | None) -> StudyState:
        record = TrainedRecord("made-12345678", "key", 1.0, "placeless")
        names = {"one": first, "two": second}
        records = {names[which]: replace(record, parent=parent) for which, parent in parents.items()}
        return StudyState(plan, tmp_path, records, {name: {400} for name in records})

    for whole in (state_of(one=None), state_of(one=made), state_of(one=made, two=made), state_of(one=None, two=made)):
        refuse_other_models(whole)
        assert not any("weights of" in note for note in list_notes(whole, {}))
    (model / "config.json").write_text('{"hidden_size": 8}')
    monkeypatch.setattr(worker, "read_state", lambda *_: state_of(one=made))
    told = rf"the weights of .*decoder changed \(run {first} began with {made[:8]}, "
    with pytest.raises(InputError, match=told + r"now it has \w{8}\): restore the first ones, or choose another"):
        worker.run_study(plan, tmp_path, Engine(workers=0))
    refuse_other_models(state_of(one=made, two=made))  # nothing is left to train
    with pytest.raises(InputError, match=rf"run {second} began with bbbbbbbb\)"):
        refuse_other_models(both := state_of(one=made, two="b" * 64))
    (note,) = (note for note in list_notes(both, {}) if "weights of" in note)
    assert "the same weights of " in note and f"bbbbbbbb ({second})" in note
    (model / "config.json").rename(tmp_path / "config.json")
    model.rmdir()
    refuse_other_models(state_of(one=made))


@pytest.mark.parametrize(
    ("revision", "remedy"), [("a" * 40, f"say revision: {'a' * 40} for the model"), (None, "restore the first ones")]
)
def test_a_study_whose_hub_model_changed_goes_on_with_its_commit(
    revision: str | None, remedy: str, tmp_path: Path
) -> None:
    """It is in the config.yaml of the run that began first."""
    arms = [TREE["arms"][0] | {"models": ["ours"]}]
    plan = make_plan(models=[{"name": "ours", "model": "org/net"}], arms=arms)
    records = {}
    for name, run in plan.runs.items():
        number = len(records)
        path = tmp_path / "runs" / f"{name}-12345678"
        path.mkdir(parents=True)
        made = run.recipe.model_copy(update={"init": Init(model="org/net", revision=None if number else revision)})
        (path / "config.yaml").write_text(yaml.safe_dump(made.model_dump(mode="json")))
        records[name] = TrainedRecord(path.name, "key", 1.0, "placeless", parent=f"{number}" * 64)
    with pytest.raises(InputError, match=rf"net changed \(.* 0{{8}}, .* 1{{8}}\): {remedy}, or choose another folder"):
        refuse_other_models(StudyState(plan, tmp_path, records, {name: {400} for name in records}))


def test_the_commit_in_the_cache_is_that_of_a_starting_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Any] = []

    def look(id: str, name: str, revision: str | None) -> str:
        asked.append((id, revision))
        return str(tmp_path / "abc" / name)

    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", look)
    for init in (Init(model="org/net"), Init(model="org/net@main"), Init(model="org/net", revision="main")):
        assert find_weights(init) == model_fingerprint(init.model or "", tmp_path / "abc")
    assert [*dict.fromkeys(asked)] == [("org/net", None), ("org/net", "main")]
    monkeypatch.undo()
    assert find_weights(Init(model=str(tmp_path / "gone"))) is None


@pytest.mark.parametrize("differs", ["text", "model"])
def test_paths_with_one_last_name_stay_apart_in_an_archive(differs: str, tmp_path: Path) -> None:
    """Else arms would become the same model, or one the branch of another. The page shows them as before, and an
    archive of an unpacked archive is the same."""
    arm = TREE["arms"][0] | {"curricula": ["mlm40"]}
    groups, models = [arm | {"group": name, "budgets": [100 * num]} for num, name in ((2, "web"), (1, "books"))], []
    for group in groups:
        if differs == "text":
            text = {"data": {"shards": f"/scratch/{group['group']}/shards"}}
            group |= {"name": group["group"] + "-{model}-{curriculum}-{budget}", "recipe": text}
        else:
            group["models"] = [group["group"]]
            models.append({"name": group["group"], "model": f"../exp/{group['group']}/decoder"})
    plan = make_plan(
        arms=groups, models=models, evaluation=TREE["evaluation"] | {"data_dirs": {"genre": "/home/ann/g"}}
    )
    (tmp_path / "study.yaml").write_text(hidden := hide_folders(study_text(plan.study)))
    again = plan_study(load_study(tmp_path / "study.yaml"))
    facts = [[(run.name, run.parent, run.first, run.last) for run in one.runs.values()] for one in (plan, again)]
    assert facts[0] == facts[1] and len(facts[0]) == 2
    assert hash_settings(plan) == hash_settings(again)
    assert without_folders(hidden) == without_folders(study_text(plan.study)) and hide_folders(hidden) == hidden
    assert "./g\n" in hidden and not re.search("/ann|/scratch|/exp|/web|/books", hidden)
    assert hide_folders("/x/shards beside ./shards") == "../1/shards beside ./shards"


def test_a_mixture_needs_the_set_with_its_validation_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is missed before anything trains."""
    mixture = [{"path": "code", "weight": 1}, {"path": "prose", "weight": 3}]
    plan = make_plan(recipe=TREE["recipe"] | {"data": {"shards": "held", "mixture": mixture}})
    looked_for: list[Path] = []
    monkeypatch.setattr(worker, "read_shard_manifest", looked_for.append)
    monkeypatch.setattr(worker, "run_batch", lambda *_, **__: [])
    worker.run_study(plan, tmp_path, Engine(workers=0))
    assert {*looked_for} == {Path("held"), Path("code"), Path("prose")}
    notes = worker.status(read_state(plan, tmp_path)).notes
    assert {f"{path} has no shards: the remaining runs cannot begin" for path in looked_for} <= {*notes}


def test_data_that_changed_since_they_were_scored_are_told(
    write_cell: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The study does not go on. It needs no data that are gone."""
    data, file = tmp_path / "data", tmp_path / "topics.yaml"
    data.mkdir()
    for split in ("train", "validation", "test"):
        (data / f"{split}.jsonl").write_text('{"text": "t", "label": "a"}\n')
    shape = "classes: [a, b], files: [{train: train.jsonl, validation: validation.jsonl, test: test.jsonl}]"
    keys = f"{{name: topics, family: sequence_classification, metric: accuracy, {shape}, template: '{{text}}'}}"
    file.write_text(keys)
    plan = make_plan(evaluation=TREE["evaluation"] | {"tasks": [str(file)], "data_dirs": {"topics": str(data)}})
    made = find_source(find_task(str(file)), data).hash
    score = read_score(write_cell("1m-mlm40-400", "topics", data_hash=made))
    score = score.model_copy(update={"seconds": {"train": 1.0, "evaluate": 1.0}})
    state = StudyState(plan, tmp_path, {}, scores={"1m-mlm40-400": ScoreSet((score,))})
    refuse_other_data(state)
    file.write_text(keys.replace("'{text}'", "'Topic: {text}'"))
    with pytest.raises(InputError, match=r"^topics: its definition or its data"):
        refuse_other_data(state)
    file.write_text(keys)
    (data / "train.jsonl").write_text('{"text": "other", "label": "a"}\n')
    monkeypatch.setattr(worker, "read_state", lambda *_: state)
    told = (
        rf"changed since its scores were made \({made[:8]}, .* now\); restore them, delete these scores below .*scores"
    )
    with pytest.raises(InputError, match=told):
        worker.run_study(plan, tmp_path, Engine(workers=0))
    data.rename(tmp_path / "moved")
    refuse_other_data(state)


MADE = "1m-mlm40-400-12345678"


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., TrainedRecord | None]:
    """Find the record of a run that was trained on the shards `here`, as a plan with the shards at a place wants it."""
    for name in ("here", "copied", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").touch()
    monkeypatch.setattr(
        folder,
        "read_shard_manifest",
        lambda path: SimpleNamespace(fingerprint="b" if path.name == "other" else "a"),
    )

    def find(place: str, **changes: Any) -> TrainedRecord | None:
        recipe = TREE["recipe"] | {"data": {"shards": str(tmp_path / place)}}
        run = make_plan(recipe=recipe).runs["1m-mlm40-400"]
        (tmp_path / "runs" / MADE).mkdir(parents=True, exist_ok=True)
        (tmp_path / "runs" / MADE / "done.json").touch()
        path, keys = tmp_path / "trained" / f"{run.name}.json", {"key": run.key, "placeless_key": run.placeless_key}
        path.parent.mkdir(exist_ok=True)
        if place == "here":
            made = {"folder": MADE, "seconds": 1.0, "text": ["a"], **keys} | changes
            write_hashed(path, made)
        return find_record(tmp_path, run)

    return find


def test_a_run_is_found_by_what_its_shards_hold(
    record: Callable[..., TrainedRecord | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shards that were moved are the same text; other ones there are not, nor are those that nobody can read."""
    assert record("here") == record("copied") and record("here") is not None
    assert record("other") is None and record("gone") is None
    monkeypatch.setattr(folder, "read_shard_manifest", pytest.fail)
    assert record("copied") == record("here"), "the manifest has been read"


def test_a_record_of_a_trained_run_has_its_hash(record: Callable[..., TrainedRecord | None], tmp_path: Path) -> None:
    """Without it, or changed, it is refused."""
    path = tmp_path / "trained" / "1m-mlm40-400.json"
    record("here")
    whole = path.read_text()
    for spoiled in (whole.replace('"seconds": 1.0', '"seconds": 1e300'), whole.replace(RECORD_HASH, "hash")):
        path.write_text(spoiled)
        with pytest.raises(
            InputError, match=f"^{path} is damaged .*own hash.*; delete it: the study's own command then finds"
        ):
            record("copied")
    with pytest.raises(InputError, match=r"damaged .seconds: "):
        record("here", seconds=1e300)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("../../myrun", "damaged .folder: String should match"),
        ("/home/ann/1m-mlm40-400-12345678", "damaged .folder: String should match"),
        ("../1m-mlm40-400-12345678", "damaged .folder: String should match"),
        ("1m-mlm40-400", "damaged .folder: String should match"),
        ("myrun-12345678", "names 'myrun-12345678', which is no folder of 1m-mlm40-400; delete it"),
        ("", "names '', which is no folder of 1m-mlm40-400"),
    ],
)
def test_a_record_names_the_folder_of_its_own_run(
    name: str, told: str, record: Callable[..., TrainedRecord | None]
) -> None:
    with pytest.raises(InputError, match=told):
        record("here", folder=name)


def test_tokens_of_a_continued_arm_are_those_of_both_batches() -> None:
    groups = [
        {"group": "first", "models": ["1m"], "curricula": ["clm"], "budgets": [100]},
        {
            "group": "on",
            "parents": ["1m-clm-100"],
            "curricula": ["mlm40"],
            "budgets": [50],
            "recipe": {"batch_tokens": 81_920},
        },
    ]
    plan = make_plan(arms=groups, recipe=TREE["recipe"] | {"batch_tokens": 8192})
    sizes = measure_sizes(plan)
    tokens = {arm.cpt_steps: arm.tokens for arm in (arm_of_model(plan, model, sizes) for model in plan.models)}
    assert tokens == {0: 8192 * 100, 50: 8192 * 100 + 81_920 * 50}
