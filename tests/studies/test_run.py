"""A study of two tiny arms and their continuation, from the file to the report."""

import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from biphase import machine
from biphase.api.studies import OpenStudy, study
from biphase.config import parse_config
from biphase.corpus.prepare import prepare
from biphase.corpus.shards import read_shard_manifest
from biphase.engine import scheduler, units
from biphase.engine.local import THREAD_VARIABLES
from biphase.engine.units import Engine
from biphase.errors import BusyError, InputError, StoppedError
from biphase.files import file_hash, hash_below, locked, read_json, write_hashed, write_json
from biphase.finetuning.config import PROTOCOL
from biphase.hub import model_fingerprint
from biphase.pretraining import loop
from biphase.recipe import Checkpoints, Init, Recipe
from biphase.report.results import LOSS
from biphase.run import Run, read_checkpoint_manifest, read_recipe
from biphase.studies import report
from biphase.studies import run as worker
from biphase.studies.cost import list_costs, measure_sizes, run_flops
from biphase.studies.folder import (
    StudyState,
    TrainedRecord,
    claim_study_folder,
    drop_checkpoints,
    find_record,
    reach_step,
    read_runs,
    read_state,
    study_text,
)
from biphase.studies.plan import Plan, plan_study, train_name
from biphase.studies.report import (
    arm_of_model,
    as_published,
    collect_results,
    list_missing,
    list_notes,
    list_texts,
    read_evidence,
    read_losses,
    report_study,
    with_losses,
)
from biphase.studies.run import measure_units, run_study, status, study_units
from biphase.studies.spec import Study

HERE = Engine(workers=0)
ONE_CELL = ("evaluation.learning_rates=[1e-3]", "evaluation.seeds=1")
"""Of each model, where a test is of other things than cells."""
NOUNS = ["dog", "cat", "boy", "girl", "tree", "house", "river", "train"]


@pytest.fixture(scope="module")
def words_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("words")
    for split, others in (("train", NOUNS[:3]), ("validation", NOUNS[3:5]), ("test", NOUNS[5:])):
        rows = [{"tokens": [a, "near", b], "ner_tags": ["B-location", "O", "O"]} for a in NOUNS for b in others]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        rows = rows[1:]  # test must not be validation
    return folder


@pytest.fixture(scope="module")
def plan(tiny_recipe: Any, words_dir: Path) -> Plan:
    recipe = tiny_recipe().model_dump(mode="json")
    architecture = recipe["init"]["architecture"]
    for key in ("name", "init", "curriculum"):
        del recipe[key]
    tree = {
        "name": "tiny",
        "question": "Does anything work?",
        "recipe": recipe,
        "models": [{"name": "tiny", "preset": "1m", "architecture": architecture}],
        "arms": [
            {"group": "from scratch", "models": ["tiny"], "curricula": ["clm", "50/50", "mlm40"], "budgets": [12]},
            {
                "group": "continued",
                "name": "{parent}-then-{curriculum}-{budget}",
                "parents": ["tiny-clm-12", "tiny-mlm40-12"],
                "curricula": ["mlm40"],
                "budgets": [6],
                "recipe": {"schedule": {"warmup_steps": 0}},
            },
        ],
        "evaluation": {
            "tasks": ["wnut17"],
            "learning_rates": [1e-3, 3e-3],
            "seeds": 2,
            "finetune": {"batch_size": 8, "device": "cpu"},
            "data_dirs": {"wnut17": str(words_dir)},
        },
    }
    return plan_study(parse_config(Study, tree, origin="test"))


@pytest.fixture(scope="module")
def finished(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = claim_study_folder(tmp_path_factory.mktemp("study"), plan.study)
    assert run_study(plan, place, HERE) == []
    return place


def test_every_unit_is_done_once(plan: Plan, finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {unit.name for unit in study_units(read_state(plan, finished))}
    assert len(names) == len(plan.runs) + len(plan.cells) == 5 + 5 * 4
    assert read_state(plan, finished).done == names
    monkeypatch.setattr(scheduler, "run_units", lambda units, *_, **__: iter([]) if not list(units) else pytest.fail())
    assert run_study(plan, finished, HERE) == []


def test_branches_start_from_the_trunk(plan: Plan, finished: Path) -> None:
    branch = plan.runs["tiny-50-50-12"]
    assert (branch.parent, branch.first) == ("tiny-clm-12", 6)
    config = (trained_folder(finished, branch.name) / "config.yaml").read_text()
    assert f"{trained_folder(finished, 'tiny-clm-12')}@6" in config


def test_runs_of_a_short_model_have_samples_of_its_length(plan: Plan, tmp_path: Path) -> None:
    """Unless the recipe sets their length. A branch goes on in the data order of its trunk."""
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 384}
    config = LlamaConfig(**sizes, num_attention_heads=4, max_position_embeddings=32)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    recipe = plan.study.recipe | {"data": {"shards": plan.study.recipe["data"]["shards"]}, "batch_tokens": 2048}
    recipe |= {"compute": {**recipe["compute"], "microbatch_tokens": 2048}}
    recipe |= {"schedule": {"warmup_steps": 0, "decay_steps": 1}}
    arms = {"group": "short", "models": ["short"], "curricula": ["clm", "50/50"], "budgets": [4]}
    tree = {"name": "short", "models": [{"name": "short", "model": str(tmp_path / "llama")}]}
    short = plan_study(parse_config(Study, tree | {"recipe": recipe, "arms": [arms]}, origin="test"))
    place = claim_study_folder(tmp_path / "study", short.study)
    assert run_study(short, place, HERE) == []
    runs = [Run(trained_folder(place, name)) for name in short.runs]
    assert [read_recipe(run).data.max_sample_tokens for run in runs] == [32, 32]
    assert "data position" in read_checkpoint_manifest(runs[1].steps / "4").carried
    record = find_record(place, short.runs["short-clm-4"])
    assert record and record.parent == model_fingerprint(str(tmp_path / "llama"), tmp_path / "llama")
    made = [line for line in list_texts(read_runs(short, place)) if line.startswith("biphase tokenizer")]
    assert made == [f"biphase tokenizer from {tmp_path / 'llama'} --out tokenizer"]


def test_a_record_says_what_text_was_trained_on(plan: Plan, finished: Path) -> None:
    shards = read_shard_manifest(Path(plan.runs["tiny-clm-12"].recipe.data.shards))
    for run in plan.runs.values():
        record = find_record(finished, run)
        assert record and record.text == (shards.fingerprint,) and record.is_timed
        assert record.validation_text == shards.fingerprint


def test_checkpoints_that_nobody_needs_are_dropped(plan: Plan, finished: Path) -> None:
    steps = {int(path.name) for path in Run(trained_folder(finished, "tiny-clm-12")).steps.iterdir()}
    assert steps == {12}  # step 6, from which a branch went, and step 7, before the decay, are gone


@pytest.mark.slow
@pytest.mark.minutes
def test_what_is_scored_needs_no_checkpoint(plan: Plan, finished: Path, tmp_path: Path) -> None:
    """A folder without weights and predictions, as one is kept: its page says the same, and nothing is trained."""
    place = copy_of(finished, tmp_path / "kept")
    for path in (*(place / "runs").glob("*/steps"), *place.glob("scores/*/*/*.jsonl")):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    before, after = read_state(plan, finished), read_state(plan, place)
    assert (after.done, after.begun) == (before.done, {}) and not any(after.steps.values())
    reports = [report_study(plan, folder, tmp_path / name, []) for name, folder in (("a", finished), ("b", place))]
    assert reports[0].text.missing == reports[1].text.missing == []
    examples = [
        [r.examples for r in collect_results(plan, state.scores, measure_sizes(plan)).results]
        for state in (before, after)
    ]
    told = [[not kept.read().why_unknown for kept in of_one if kept] for of_one in examples]
    assert told[0] == told[1]
    shutil.rmtree(next((place / "scores" / "tiny-50-50-12").glob("wnut17-*")))
    lacking = {train_name(name) for name in plan.runs} - read_state(plan, place).done
    assert lacking == {train_name("tiny-50-50-12"), train_name("tiny-clm-12")}, "the branch, and what it starts from"


@pytest.mark.slow
@pytest.mark.minutes
def test_an_archive_gives_the_page_again(
    plan: Plan, finished: Path, words_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the byte, in another process and folder: without the study's folder and file, its shards, and its own task."""
    monkeypatch.chdir(tmp_path)
    place = copy_of(finished, tmp_path / "study-tiny")
    shutil.copytree(plan.runs["tiny-clm-12"].recipe.data.shards, "shards")
    shape = "classes: [O, B-location], files: [{train: train.jsonl, validation: validation.jsonl, test: test.jsonl}]"
    own = "{name: places, family: token_classification, metric: f1, label: ner_tags, " + shape + "}"
    Path("places.yaml").write_text(own, encoding="utf-8")
    words = [
        "recipe.data.shards=shards",
        "evaluation.tasks=[wnut17, places.yaml]",
        "authors=[A. Žena & B_C, '{The Team}']",
    ]
    words.append(f"evaluation.data_dirs={{wnut17: {words_dir}, places.yaml: {words_dir}}}")
    moved = changed(plan, *words, *ONE_CELL, "title=A_B & 50 %")
    assert not run_study(moved, claim_study_folder(place, moved.study), HERE)
    Path("tiny.yaml").write_text(study_text(moved.study), encoding="utf-8")
    opened = study("tiny.yaml")
    opened.report("before")
    for name in ("one.tar.gz", "two.tar.gz", "three.tar.xz"):
        opened.bundle(name)
    assert file_hash(Path("one.tar.gz")) == file_hash(Path("two.tar.gz")), "equal folders give equal archives"
    assert not [*tmp_path.glob(".*.part")]
    with pytest.raises(InputError, match=r"one.tar.gz already exists; choose another name"):
        opened.bundle("one.tar.gz")
    Path(".four.tar.gz.part").symlink_to("tiny.yaml")
    with pytest.raises(OSError, match="symbolic links"):
        opened.bundle("four.tar.gz")
    assert Path("tiny.yaml").read_text(encoding="utf-8") == study_text(moved.study)
    with locked(tmp_path / ".five.tar.gz.lock.staged.part"), pytest.raises(BusyError, match="is writing five"):
        opened.bundle("five.tar.gz")
    with pytest.raises(InputError, match=r"one.zip: the name of an archive ends in .tar.gz or .tar.xz"):
        opened.bundle("one.zip")
    shutil.move("before", tmp_path / "kept")
    for gone in ("shards", "study-tiny"):
        shutil.rmtree(gone)
    for gone in ("tiny.yaml", "places.yaml"):
        Path(gone).unlink()
    for name in ("one.tar.gz", "three.tar.xz"):
        clean = tmp_path / f"clean {name}"
        with tarfile.open(name) as archive:
            members = archive.getmembers()
            assert all(member.isfile() and member.name.startswith("study-tiny/") for member in members)
            archive.extractall(clean, filter="data")
        for path in filter(Path.is_file, clean.rglob("*")):
            assert str(tmp_path.parent).encode() not in path.read_bytes(), f"{path} tells where its author lives"
        logged = {path.parent.name.rpartition("-")[0] for path in clean.glob("study-tiny/runs/*/metrics.jsonl")}
        assert logged == {*plan.runs} and not [*clean.rglob("*.safetensors"), *clean.rglob("*.jsonl.zst")]
        command = [sys.executable, "-m", "biphase", "study", "report", "study-tiny", "--report", "mine"]
        subprocess.run(command, cwd=clean, check=True, capture_output=True)
        for folder in (clean / "mine", clean / "study-tiny" / "report"):
            assert hash_below(folder) == hash_below(tmp_path / "kept"), folder
    citation = (tmp_path / "kept" / "citation.bib").read_text(encoding="utf-8")
    assert r"author = {A. Žena \& B\_C and {The Team}}" in citation and r"title = {{A\_B \& 50 \%}}" in citation
    page = (tmp_path / "kept" / "index.html").read_text(encoding="utf-8")
    assert "assumed" not in page and "1 × cpu" in page and "How to cite" in page
    assert f"# ./{words_dir.name}: your copy of the data of wnut17" in page and "biphase study run tiny.yaml" in page
    again = study(clean / "study-tiny").bundle(tmp_path / "again.tar.xz")
    assert file_hash(again) == file_hash(Path("three.tar.xz")), "an archive of an unpacked archive"
    (clean / "study-tiny" / "bundle.json").unlink()
    subprocess.run(command, cwd=clean, check=True, capture_output=True)
    told = "assume samples of .* tokens .assumed: shards is not here"
    assert re.search(told, (clean / "mine" / "index.html").read_text(encoding="utf-8")), "an archive made by hand"


def test_commands_of_older_archives_name_a_checkout() -> None:
    """biphase is on no index; the build of PyTorch for CPUs has its own."""
    assert [*as_published("pip install biphase==0.1.0 torch==2.13.0+cpu transformers==5.24.0")] == [
        "pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu",
        "pip install . transformers==5.24.0  # in a checkout of biphase 0.1.0",
    ]
    assert [*as_published("biphase study run /home/ann/a.yaml")] == ["biphase study run ./a.yaml"]


def test_a_study_without_a_score_is_no_archive(plan: Plan, tmp_path: Path) -> None:
    folder = claim_study_folder(tmp_path / "study", plan.study)
    with pytest.raises(InputError, match=r"the study's folder .*study has no finished score to publish yet"):
        OpenStudy(plan, folder, ()).bundle(tmp_path / "one.tar.gz")
    assert [path.name for path in tmp_path.iterdir()] == ["study"]


@pytest.mark.parametrize("linked", ["runs/*/metrics.jsonl", "scores/*/*/score.json", "runs/*/steps", "scores/*"])
def test_a_link_in_a_study_of_somebody_else_is_not_followed(
    linked: str, plan: Plan, finished: Path, tmp_path: Path
) -> None:
    """Not to a file that an archive would publish, nor to checkpoints that would be deleted."""
    place, secret = copy_of(finished, tmp_path / "study"), tmp_path / "secret"
    path = next(place.glob(linked))
    shutil.move(path, secret)
    path.symlink_to(secret)
    before = hash_below(secret) if secret.is_dir() else file_hash(secret)
    for ask in (read_runs, read_state):
        with pytest.raises(InputError, match=f"{path.name} is a link, and biphase follows none there; remove it"):
            ask(plan, place)
    with pytest.raises(InputError, match=f"{path.name} is a link"):
        run_study(plan, claim_study_folder(place, plan.study), HERE)
    assert before == (hash_below(secret) if secret.is_dir() else file_hash(secret))


def test_a_checkpoint_of_another_run_is_not_scored(plan: Plan, finished: Path, tmp_path: Path) -> None:
    """Also if the run's own folder claims to be the other one's."""
    place = copy_of(finished, tmp_path / "study")
    own, other = trained_folder(place, "tiny-clm-12"), trained_folder(place, "tiny-mlm40-12")
    assert reach_step(place, plan.runs["tiny-clm-12"], 12).endswith(f"{own.name}@12")
    for name in ("steps", "environment.json"):
        shutil.rmtree(own / name) if (own / name).is_dir() else (own / name).unlink()
    shutil.copytree(other / "steps", own / "steps")
    shutil.copy(other / "environment.json", own)
    with pytest.raises(InputError, match=f"{own.name}@12 is a checkpoint of {other.name}, not of {own.name}: delete"):
        reach_step(place, plan.runs["tiny-clm-12"], 12)


def test_costs_by_device(plan: Plan, finished: Path, tmp_path: Path) -> None:
    """Eight H100 for each run: their hours, FLOPs as the plan counts them, energy by the board's 700 W."""
    place = copy_of(finished, tmp_path / "gpus")
    for file in place.glob("runs/*/environment.json"):
        write_json(file, read_json(file) | {"device": "NVIDIA H100 80GB HBM3", "processes": 8})
    sizes, state = measure_sizes(plan), read_state(plan, place)
    pretraining, tuning = list_costs(state, sizes)
    seconds = sum(record.seconds for record in state.records.values())
    assert pretraining["device"] == "8 × NVIDIA H100 80GB HBM3" and tuning["device"] == "1 × cpu"
    assert float(str(pretraining["device hours"])) == pytest.approx(8 * seconds / 3600, rel=0.01)
    energy, _, told = str(pretraining["kWh at most"]).partition(" at ")
    assert (float(energy), told) == (pytest.approx(0.7 * 8 * seconds / 3600, rel=0.01), "700 W")
    flops = sum(sum(run_flops(run, sizes[name]).values()) for name, run in plan.runs.items())
    assert float(str(pretraining["FLOPs"])) == pytest.approx(flops, rel=0.01)
    scores = [score for own in state.scores.values() for score in own.scores]
    tokens = sum(score.tokens_per_second["train"] * score.seconds["train"] for score in scores)
    shape, _ = sizes["tiny-clm-12"]
    assert shape and float(str(tuning["FLOPs"])) == pytest.approx(6 * shape.block_weights * tokens, rel=0.01)
    assert (tuning["units"], tuning["kWh at most"]) == (len(scores), "not known")


@pytest.mark.slow
@pytest.mark.minutes
def test_more_pretraining_seeds_train_nothing_anew(plan: Plan, finished: Path, tmp_path: Path) -> None:
    """From one pretraining seed to two: what is done counts, the second has weights of its own, one seed at a time."""
    plan, place = changed(plan, *ONE_CELL), copy_of(finished, tmp_path / "seeds")
    grown = changed(plan, "pretraining_seeds=2")
    first, second = grown.of_first_seed, [name for name, arm in grown.arms.items() if arm.seed]
    assert (first.runs, first.models, first.cells) == (plan.runs, plan.models, plan.cells)
    assert second == [f"{name}-seed1" for name in plan.arms]
    before = {path: path.stat().st_mtime_ns for path in place.rglob("model.safetensors")}
    done = read_state(grown, place).done
    assert done == read_state(plan, place).done and status(read_state(grown, place)).seeds == [
        "pretraining seed 0: done",
        "pretraining seed 1: 0 of 10 units",
    ]
    assert not run_study(grown, place, HERE)
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert status(read_state(grown, place)).seeds == ["pretraining seed 0: done", "pretraining seed 1: done"]
    child = grown.runs["tiny-clm-12-then-mlm40-6-seed1"]
    assert child.parent == "tiny-clm-12-seed1" and child.recipe.seed == plan.arms["tiny-clm-12"].recipe.seed + 1
    hashes = {file_hash(path) for path in (place / "runs").glob("tiny-clm-12-*/steps/12/model/model.safetensors")}
    assert len(hashes) == 2, "another pretraining seed gives other weights"
    results = collect_results(grown, read_state(grown, place).scores, measure_sizes(grown)).results
    assert {result.arm.name for result in results} == {
        r.arm.name for r in collect_results(plan, read_state(plan, finished).scores, measure_sizes(plan)).results
    }


def test_a_finished_run_without_its_losses_is_told(plan: Plan, finished: Path, tmp_path: Path) -> None:
    place = copy_of(finished, tmp_path / "lost")
    state = read_state(plan, place)
    assert not [*list_missing(state, (), read_losses(state))]
    name = next(iter(plan.runs))
    log = place / "runs" / state.records[name].folder / "metrics.jsonl"
    log.write_text("spoiled\n")
    state = read_state(plan, place)
    [told] = list_missing(state, (), read_losses(state))
    assert told.startswith(f"{name} is trained, but runs/{log.parent.name}/metrics.jsonl has no losses: restore it")


def test_only_recorded_runs_have_a_loss_in_the_end(plan: Plan, finished: Path, tmp_path: Path) -> None:
    """A run that is done without a record had another recipe: it has no curve either."""
    place, name = copy_of(finished, tmp_path / "stale"), "tiny-mlm40-12"
    state = read_state(plan, place)
    results = collect_results(plan, state.scores, measure_sizes(plan))

    def tell_losses() -> tuple[set[str], set[str]]:
        """Return the arms with a curve, and those with a loss in the end."""
        losses = read_losses(read_runs(plan, place))
        ends = [one for one in with_losses(plan, results, losses).results if one.dataset == LOSS]
        return {*losses}, {one.arm.name for one in ends}

    assert tell_losses() == ({*plan.arms}, {*plan.arms})
    (place / "trained" / f"{name}.json").unlink()
    assert tell_losses() == ({*plan.arms} - {name},) * 2
    assert name not in read_state(plan, place).begun, "its training has all its steps before it"
    (place / "runs" / state.records[name].folder / "done.json").unlink()
    assert tell_losses() == ({*plan.arms}, {*plan.arms} - {name})
    assert read_state(plan, place).begun[name] == 12


def test_status_of_a_finished_study(plan: Plan, finished: Path) -> None:
    found = status(read_state(plan, finished))
    assert [(line["name"], line["done"], line["total"]) for line in found.lines] == [
        ("train", 5, 5),
        ("wnut17", 20, 20),
    ]
    assert not found.failed and all(line["seconds_left"] == 0 for line in found.lines)
    reference = Path(__file__).parents[2] / "docs" / "reference" / "command_line.md"
    assert f"`{' '.join(found.lines[0])}`" in reference.read_text(encoding="utf-8")


def test_status_tells_that_the_text_is_not_there(plan: Plan, tmp_path: Path) -> None:
    found = status(read_state(changed(plan, "recipe.data.shards=nowhere"), tmp_path))
    assert "nowhere has no shards: the remaining runs cannot begin" in found.notes


def test_what_is_done_has_not_failed(plan: Plan, finished: Path, tmp_path: Path) -> None:
    """As after a study file with a slip in it ran in the folder: the slip is gone, and what it asked for is done."""
    place = copy_of(finished, tmp_path / "study")
    (place / "failed").mkdir(exist_ok=True)
    for number, unit in enumerate((train_name("tiny-clm-12"), train_name("arm-that-was-taken-out"))):
        record = {"unit": unit, "reason": "no such model", "traceback": ""}
        (place / "failed" / f"{number}.json").write_text(json.dumps(record))
    assert len(scheduler.read_failures(place)) == 2
    found = status(read_state(plan, place))
    assert (found.failed, found.num_waiting, found.lines[0]["failed"]) == ([], 0, 0)


def test_a_unit_is_not_blocked_by_one_that_is_done(plan: Plan, finished: Path, tmp_path: Path) -> None:
    place = copy_of(finished, tmp_path / "study")
    state, cell = read_state(plan, place), plan.cells[0].name
    state = replace(state, scored=state.scored - {cell})
    (place / "failed").mkdir(exist_ok=True)
    reason = f"blocked: embed failed: blocked: {train_name('tiny-clm-12')} failed: worker was killed"
    (place / "failed" / "0.json").write_text(json.dumps({"unit": cell, "reason": reason, "traceback": ""}))
    assert cell not in state.done and state.read_failures() == []


def test_results_in_the_papers_terms(plan: Plan, finished: Path) -> None:
    scores = read_state(plan, finished).scores
    collected = collect_results(plan, scores, measure_sizes(plan))
    results, planned = collected.results, collected.planned_runs
    arms = {(result.arm.name, result.arm.setup): result.arm for result in results}
    both = arms["tiny-50-50-12", "ratio"]
    assert (both.objective, both.clm_steps, both.mlm_steps, both.mask_percent) == ("clm+mlm", 6, 6, 40)
    continued = arms["tiny-clm-12-then-mlm40-6", "cpt"]
    assert (continued.pretrain_steps, continued.cpt_steps, continued.parent) == (12, 6, "tiny-clm-12")
    assert continued.flops is not None and continued.flops > (arms["tiny-clm-12", "objective"].flops or 0)
    assert all(len(result.samples) == 2 and len(result.by_rate or {}) == 2 for result in results)
    assert {(result.family, result.metric) for result in results} == {("TC", "standard"), ("TC", "paper")}
    assert all(one.num_runs == planned[one.arm.name, one.dataset] == 4 and not one.num_diverged for one in results)
    assert {result.measure for result in results} == {"f1", "paper_f1"}
    assert {one.metric for one in results if one.count_degenerate()} == {"standard", "paper"}, "O everywhere, by both"


def test_report(plan: Plan, finished: Path, tmp_path: Path) -> None:
    commands = [*list_texts(read_runs(plan, finished)), "biphase study run study.yaml a.b=1"]
    page, *_ = report_study(plan, finished, tmp_path / "report", commands)
    text = page.read_text(encoding="utf-8")
    assert "Does anything work?" in text and "biphase study run study.yaml a.b=1" in text
    assert re.search(
        r"pip install torch==[\d.]+( --index-url https://download.pytorch.org/whl/\w+)?\n"
        r".*pip install . transformers==.*  # in a checkout of biphase .*\n"
        r".*# trained on .*: [\d,]+ documents, [\d,]+ tokens, fingerprint [0-9a-f]{16}; tokenizer [0-9a-f]{16}.*\n"
        r"biphase tokenizer train train.jsonl --vocab-size \d+ --out tokenizer  # if it was trained on this text\n"
        r"biphase prepare train.jsonl --tokenizer tokenizer --out .* --validation validation.jsonl\n"
        r".*# ./words\d*: your copy of the data of wnut17.*\n"
        r"biphase study run study.yaml a.b=1\n",
        text,
    )
    assert list((tmp_path / "report" / "tables").iterdir()) and list((tmp_path / "report" / "figures").iterdir())
    cells = (tmp_path / "report" / "scores.csv").read_text().splitlines()
    assert len(cells) == 1 + 20 and "test paper_f1" in cells[0]
    noted = changed(plan, "notes=['CLM alone is left out.']")
    again, told, *_ = report_study(noted, finished, tmp_path / "report", [])
    assert (again, told.hypotheses) == (page, None) and "CLM alone is left out." in page.read_text(encoding="utf-8")


def test_the_command_for_shards_has_all_their_options(plan: Plan, corpus: Any, tmp_path: Path) -> None:
    """Also the share of validation if nothing is held out, and in quotes what the shell would read in another way."""
    (tmp_path / "train.jsonl").write_text('{"title": "A ship", "body": "leaves the old harbour"}\n' * 3)
    options: dict[str, Any] = {"validation_fraction": 0.0, "text_field": "{title}\\n{body}"}
    made = prepare([tmp_path / "train.jsonl"], corpus.tokenizer, tmp_path / "shards", workers=1, **options)
    text = (read_shard_manifest(made).fingerprint,)
    record = TrainedRecord("tiny-clm-12-12345678", "key", 1.0, "placeless", text=text)
    moved = changed(plan, f"recipe.data.shards={made}")
    commands = list_texts(StudyState(moved, tmp_path, {"tiny-clm-12": record}))
    [command] = [line for line in commands if line.startswith("biphase prepare")]
    words = ["--validation-fraction", "0.0", "--text-field", options["text_field"]]
    assert shlex.split(command)[-4:] == words
    # The sets of a mixture have one tokenizer, which only one text can have trained.
    other = prepare([tmp_path / "train.jsonl"], corpus.tokenizer, tmp_path / "other", workers=1, text_field="title")
    parts = ", ".join(f"{{path: {path}, weight: 1}}" for path in (made, other))
    record = replace(record, text=tuple(read_shard_manifest(path).fingerprint for path in (made, other)))
    mixed = changed(moved, f"recipe.data.mixture=[{parts}]")
    commands = [*list_texts(StudyState(mixed, tmp_path, {"tiny-clm-12": record}))]
    [trained] = [line for line in commands if line.startswith("biphase tokenizer")]
    assert trained.endswith("--out tokenizer  # if it was trained on this text")
    prepared = [line for line in commands if line.startswith("biphase prepare")]
    assert len(prepared) == 2 and all(" --tokenizer tokenizer " in line for line in prepared)


def test_a_study_is_evidence_for_advice(
    plan: Plan, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless its arms adapt a model, which says nothing about random weights."""
    found = read_evidence(finished)
    assert [item.curriculum for item in found] == ["clm", "50/50", "mlm40"], "what continues another arm says nothing"
    scores = read_state(plan, finished).scores
    (both,) = [
        r
        for r in collect_results(plan, scores, measure_sizes(plan)).results
        if (r.arm.name, r.arm.setup, r.metric) == BOTH
    ]
    assert found[1].mean == pytest.approx(100 * both.mean)
    assert not any(item.is_behind for item in found), "all score zero"
    assert {item.mask for item in found} == {0.4}
    with pytest.raises(InputError, match=r"is not the folder of a study: it has no study.yaml"):
        read_evidence(tmp_path)
    empty = claim_study_folder(tmp_path / "empty", plan.study)
    with pytest.raises(InputError, match="no curriculum with a score on every task yet"):
        read_evidence(empty)
    arms = {name: replace(arm, recipe=given(arm.recipe)) for name, arm in plan.arms.items()}
    monkeypatch.setattr(report, "plan_study", lambda study: replace(plan, arms=arms))
    with pytest.raises(InputError, match=r"for a network from random weights; finish it .*, or leave the study out"):
        read_evidence(finished)


def given(recipe: Recipe) -> Recipe:
    """Return a recipe that begins with a model instead."""
    return recipe.model_copy(update={"init": Init(model="org/decoder")})


BOTH = ("tiny-50-50-12", "ratio", "standard")


def test_an_arm_with_a_recipe_of_its_own_is_no_evidence(
    plan: Plan, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The curriculum has the score of the network's usual recipe, wherever in the file the other one stands."""
    usual = {item.curriculum: item.mean for item in read_evidence(finished)}
    tree = plan.study.model_dump(mode="json") | {"mask_probability": 0.2}
    faster = tree["arms"][0] | {"group": "faster", "name": "fast-{curriculum}", "curricula": ["mlm40"]}
    faster["recipe"] = {"schedule": {"peak_lr": 2e-2}}
    scored = collect_results(plan, read_state(plan, finished).scores, measure_sizes(plan))
    own = [one for one in scored.results if one.arm.name == "tiny-mlm40-12"]
    better = [replace(one, arm=replace(one.arm, name="fast-mlm40"), samples=[1.0, 1.0], examples=None) for one in own]
    monkeypatch.setattr(report, "read_state", lambda *_: read_state(plan, finished))
    results = replace(scored, results=(*scored.results, *better))
    monkeypatch.setattr(report, "collect_results", lambda *_: results)
    for arms in ([*tree["arms"], faster], [faster, *tree["arms"]]):
        study = parse_config(Study, tree | {"arms": arms}, origin="faster")
        found = read_evidence(claim_study_folder(tmp_path / "study", study))
        assert {item.curriculum: item.mean for item in found} == usual and {item.mask for item in found} == {0.2}


def test_a_study_that_grows_trains_only_what_is_new(plan: Plan, finished: Path, tmp_path: Path) -> None:
    """The new arm branches where the finished trunk kept nothing: up to there the trunk is trained once more."""
    place = copy_of(finished, tmp_path / "grown")
    tree = plan.study.model_dump(mode="json", exclude={"evaluation"})
    tree["arms"][0]["curricula"].append("25/75")
    grown = plan_study(parse_config(Study, tree, origin="grown"))
    new = "tiny-25-75-12"
    assert grown.runs[new].first == 3
    missing = {train_name(name) for name in grown.runs} - read_state(grown, place).done
    assert missing == {train_name(new), train_name("tiny-clm-12")}
    folders = set((place / "runs").iterdir())
    models = {path: path.read_bytes() for path in (place / "runs").glob("*/steps/*/model/model.safetensors")}
    claim_study_folder(place, grown.study)
    assert not run_study(grown, place, HERE)
    assert set((place / "runs").iterdir()) - folders == {trained_folder(place, new)}
    assert all(path.read_bytes() == content for path, content in models.items())
    assert {int(path.name) for path in Run(trained_folder(place, "tiny-clm-12")).steps.iterdir()} == {12}
    assert not {train_name(name) for name in grown.runs} - read_state(grown, place).done


@pytest.mark.slow
@pytest.mark.minutes
def test_a_branch_of_a_scored_trunk_makes_only_its_start_again(plan: Plan, finished: Path, tmp_path: Path) -> None:
    """Checkpoints of scored models, which may be deleted, are not made again, and their scores stay."""
    place = copy_of(finished, tmp_path / "grown")
    for path in (place / "runs").glob("*/steps"):
        shutil.rmtree(path)
    grown = changed(plan, "arms.0.curricula=[clm, 50/50, mlm40, 25/75]")
    models = read_json(place / "trained" / "tiny-clm-12.json")["models"]
    done, new = read_state(plan, place).scored, "tiny-25-75-12"
    claim_study_folder(place, grown.study)
    assert not run_study(grown, place, HERE, only="train")
    assert {path.parents[1].name for path in place.glob("runs/*/steps/*")} == {trained_folder(place, new).name}
    assert read_json(place / "trained" / "tiny-clm-12.json")["models"] == models != {}
    assert read_state(grown, place).scored == done


def trained_folder(place: Path, run: str) -> Path:
    return (place / "runs" / read_json(place / "trained" / f"{run}.json")["folder"]).resolve()


def copy_of(place: Path, folder: Path) -> Path:
    shutil.copytree(place, folder)
    return folder


def test_damaged_scores_are_named_and_made_again(plan: Plan, finished: Path, tmp_path: Path) -> None:
    place = copy_of(finished, tmp_path / "copy")
    path = next((place / "scores" / "tiny-clm-12").glob("wnut17-*/score.json"))
    path.write_text(path.read_text()[:100])
    model = next(model for model in plan.models if model.name == "tiny-clm-12")
    state = read_state(plan, place)
    assert state.scores[model.name].broken.keys() == {path}
    assert any(
        note.startswith(f"Left out: {path} (is ") for note in list_notes(state, {})
    )  # on the page and the terminal
    assert len(read_state(plan, place).done) == 24
    shutil.rmtree(path.parent)
    assert run_study(plan, place, HERE) == []
    assert len(read_state(plan, place).done) == 25


def test_scores_of_other_weights_do_not_count(plan: Plan, finished: Path, tmp_path: Path) -> None:
    place = copy_of(finished, tmp_path / "copy")
    model = next(model for model in plan.models if model.name == "tiny-mlm40-12")
    config = trained_folder(place, "tiny-mlm40-12") / "steps" / "12" / "model" / "config.json"
    config.write_text(config.read_text() + " ")
    with pytest.raises(InputError, match=r"config\.json is damaged \(it is not what was written"):
        read_state(plan, place)
    manifest = config.parents[1] / "manifest.json"  # as if it had been trained anew
    content = {key: value for key, value in read_json(manifest).items() if key != "record_hash"}
    content["files"]["model/config.json"] = file_hash(config)
    write_hashed(manifest, content)
    assert len(read_state(plan, place).scores[model.name].scores) == 0


def test_scores_of_an_older_protocol_do_not_count(plan: Plan, finished: Path, tmp_path: Path) -> None:
    place = copy_of(finished, tmp_path / "copy")
    path = next((place / "scores" / "tiny-clm-12").glob("wnut17-*/score.json"))
    path.write_text(json.dumps({**json.loads(path.read_text()), "protocol": PROTOCOL - 1}))
    assert len(read_state(plan, place).done) == 24


@pytest.mark.parametrize(
    ("settings", "left"),
    [
        ({}, 0),
        ({"max_length": 9999, "scale": 5.0, "qa_head": "token"}, 0),
        ({"max_length": 8}, 20),
        ({"epochs": 2}, 20),
    ],
)
def test_only_what_decides_a_result_makes_a_cell_another(plan: Plan, finished: Path, settings: dict, left: int) -> None:
    """Beyond the network's positions every limit is the same, and token classification has no temperature."""
    cells = [replace(cell, config=cell.config.model_copy(update=settings)) for cell in plan.cells]
    assert len(read_state(replace(plan, cells=tuple(cells)), finished).done) == 25 - left


def test_a_failure_blocks_only_what_needs_it(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    plan = changed(plan, *ONE_CELL)
    place = claim_study_folder(tmp_path / "study", plan.study)
    real = loop.train

    def fail_one(recipe: Any, runs: Path) -> Run:
        if recipe.name == "tiny-mlm40-12":
            raise InputError("the loss is not finite at step 3")
        return real(recipe, runs)

    monkeypatch.setattr(loop, "train", fail_one)
    failures = run_study(plan, place, HERE)
    blocked = [failure for failure in failures if failure.reason.startswith("blocked")]
    assert len(failures) == 1 + 1 + 2 and len(blocked) == 3
    assert [find_record(place, plan.runs[name]) is None for name in ("tiny-50-50-12", "tiny-mlm40-12")] == [
        False,
        True,
    ]
    found = status(read_state(plan, place))
    assert (found.lines[0]["done"], found.lines[0]["failed"]) == (3, 2)
    assert (len(found.failed), found.num_waiting) == (1, 3)
    monkeypatch.setattr(loop, "train", real)
    assert run_study(plan, place, HERE) == []
    assert not status(read_state(plan, place)).failed


def test_what_another_process_is_at_is_left_to_it(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other process holds the first run's folder and finishes it while this one waits."""
    plan = changed(plan, *ONE_CELL)
    place = claim_study_folder(tmp_path / "study", plan.study)
    unit = next(unit for unit in study_units(read_state(plan, place)) if unit.name == train_name("tiny-clm-12"))
    unit.function(**unit.arguments)
    record = place / "trained" / "tiny-clm-12.json"
    hidden = record.rename(record.with_suffix(".hidden"))
    waits = []

    def wait(seconds: float) -> None:
        waits.append(hidden.rename(record))
        monkeypatch.setattr(units, "POLL_SECONDS", 0.0)

    monkeypatch.setattr(units, "POLL_SECONDS", 3600.0)
    monkeypatch.setattr(units.time, "sleep", wait)
    monkeypatch.setattr(units.time, "monotonic", lambda: time.perf_counter() + 3600.0 * len(waits))

    real = loop.train

    def train_unless_held(recipe: Any, runs: Path) -> Run:
        if not waits and recipe.name == "tiny-clm-12":
            raise BusyError("held")
        return real(recipe, runs)

    monkeypatch.setattr(loop, "train", train_unless_held)
    assert run_study(plan, place, HERE) == []
    assert len(waits) == 1 and len(read_state(plan, place).done) == 5 + 5


def test_only_mlm_continues_as_in_the_paper(plan: Plan) -> None:
    """A detour through CLM must not take the place of MLM in the comparison of continued models and its verdict."""
    detour = changed(
        plan, "arms.1.curricula=[mlm40, 50% clm + 50% mlm40]", "evaluation=null", "planning.vocab_size=384"
    )
    setups = {model.name: arm_of_model(detour, model, measure_sizes(detour)).setup for model in detour.models}
    assert setups["tiny-clm-12-then-mlm40-6"] == "objective"
    assert setups["tiny-clm-12-then-50-clm-50-mlm40-6"] == "other"


def changed(plan: Plan, *overrides: str) -> Plan:
    return plan_study(parse_config(Study, plan.study.model_dump(mode="json"), overrides, origin="changed.yaml"))


def test_scores_of_other_settings_are_not_reported(plan: Plan, finished: Path, tmp_path: Path) -> None:
    """A study that asks for other epochs, or for fewer rates, reports on those alone."""
    place = copy_of(finished, tmp_path / "changed")
    model = plan.models[0]
    longer = changed(plan, "evaluation.finetune.epochs=7", "evaluation.learning_rates=[1e-3]", "evaluation.seeds=[0]")
    assert not read_state(longer, place).scores[model.name].scores
    assert not run_study(longer, place, HERE)
    (score,) = read_state(longer, place).scores[model.name].scores
    assert score.config.epochs == 7
    fewer = changed(plan, "evaluation.learning_rates=[1e-3]")
    assert {score.config.learning_rate for score in read_state(fewer, place).scores[model.name].scores} == {1e-3}
    assert {score.config.epochs for score in read_state(plan, place).scores[model.name].scores} == {
        plan.cells[0].config.epochs
    }


def test_a_precision_that_is_asked_for_is_part_of_what_is_done(plan: Plan, finished: Path) -> None:
    made = read_state(plan, finished).scores[plan.models[0].name].scores[0].config.precision  # what `auto` means here
    for precision, done in (("auto", 25), ("fp32", 25 if made == "fp32" else 5), ("bf16", 25 if made == "bf16" else 5)):
        assert len(read_state(changed(plan, f"evaluation.finetune.precision={precision}"), finished).done) == done
    assert not read_state(changed(plan, "recipe.compute.precision=bf16"), finished).done


def test_what_begins_at_a_changed_run_is_trained_anew(plan: Plan, finished: Path, tmp_path: Path) -> None:
    """Branches and continuations, whether or not their own recipes changed."""
    faster = changed(plan, "arms.0.recipe={schedule: {peak_lr: 2e-2}}")
    assert not {train_name(name) for name in faster.runs} & read_state(faster, finished).done
    slower = changed(plan, "arms.1.recipe={schedule: {peak_lr: 1e-3, warmup_steps: 0}}")
    trained = {name for name in slower.runs if train_name(name) in read_state(slower, finished).done}
    assert trained == {name for name in slower.runs if "-then-" not in name}
    # Nothing starts from the old parent: while another process is at the new one it waits, else the plan is old.
    place = copy_of(finished, tmp_path / "faster")
    units = {unit.name: unit for unit in study_units(read_state(faster, place))}
    child = units[train_name("tiny-clm-12-then-mlm40-6")]
    cell = next(unit for unit in units.values() if unit.name.startswith("tiny-clm-12/"))
    for unit in (child, cell):
        with pytest.raises(BusyError), locked(place / "trained" / ".tiny-clm-12.lock"):
            unit.function(**unit.arguments)
        with pytest.raises(InputError, match="tiny-clm-12@12 no longer exists; the same command makes it again"):
            unit.function(**unit.arguments)


def test_a_branch_that_lacks_a_checkpoint_gets_it(
    plan: Plan, finished: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also when the checkpoint in which it began is gone: that is made once more first, and dropped again."""
    place = copy_of(finished, tmp_path / "grown")
    grown = changed(plan, "intermediate=[{arms: [tiny-50-50-12], steps: [7]}]", "evaluation=null")
    assert {train_name("tiny-50-50-12"), train_name("tiny-clm-12")}.isdisjoint(read_state(grown, place).done)
    assert status(read_state(grown, place)).lines[0]["done"] == 3
    before = read_json(place / "trained" / "tiny-clm-12.json")["seconds"]
    papers = (trained_folder(place, "tiny-clm-12") / "environment.json").read_bytes()
    claim_study_folder(place, grown.study)
    assert not run_study(grown, place, HERE)
    steps = {name: {int(p.name) for p in Run(trained_folder(place, name)).steps.iterdir()} for name in grown.runs}
    assert steps["tiny-50-50-12"] == {7, 12} and steps["tiny-clm-12"] == {12}
    record = read_json(place / "trained" / "tiny-clm-12.json")
    assert record["seconds"] > before, "what was spent is added up"
    said = "".join(capfd.readouterr())
    assert re.search(r"train tiny-clm-12: \d+ steps in \S+, \S+ of it since the restart", said), "attempts told apart"
    assert (trained_folder(place, "tiny-clm-12") / "environment.json").read_bytes() == papers


def test_a_checkpoint_that_is_made_elsewhere_is_waited_for(plan: Plan, finished: Path, tmp_path: Path) -> None:
    """While another process makes it, what begins there neither fails nor trains the trunk for itself."""
    place = copy_of(finished, tmp_path / "grown")
    grown = changed(plan, "arms.0.curricula=[clm, 50/50, mlm40, 25/75]", "evaluation=null")
    units = {unit.name: unit for unit in study_units(read_state(grown, place))}
    trunk, branch = units[train_name("tiny-clm-12")], units[train_name("tiny-25-75-12")]
    held = trained_folder(place, "tiny-clm-12") / ".lock"
    with pytest.raises(BusyError, match="another process makes tiny-clm-12@3"), locked(held):
        branch.function(**branch.arguments)
    trunk.function(**trunk.arguments)
    branch.function(**branch.arguments)
    drop_checkpoints(place, grown)
    assert 3 in read_runs(grown, place).steps["tiny-clm-12"], "the folder is not yet that of this study"
    claim_study_folder(place, grown.study)
    drop_checkpoints(place, grown)
    assert 3 not in read_runs(grown, place).steps["tiny-clm-12"]
    (line,) = trunk.function(**trunk.arguments)
    assert line.endswith(": done by another process"), "a late process trains nothing again"


class Launcher:
    """What torchrun would print, and its exit code, in place of it."""

    output, code = b"", 0

    def __init__(self, *_: Any, stdout: Any, env: dict[str, str], **__: Any) -> None:
        assert {env[name] for name in THREAD_VARIABLES} == {"1"}, "of each process, whatever the worker has"
        stdout.write(self.output)

    def wait(self) -> int:
        return self.code


def test_the_run_of_torchrun_is_the_one_that_it_says(
    plan: Plan, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the newest of that name, and wherever the shards lie by now; bytes that are no text do no harm."""
    place = copy_of(finished, tmp_path / "study")
    moved = changed(plan, "recipe.data.shards=elsewhere", "recipe.schedule.peak_lr=2e-2").runs["tiny-clm-12"].recipe
    newest = loop.train(changed(plan, "recipe.schedule.peak_lr=2e-2").runs["tiny-clm-12"].recipe, place / "runs").path
    own = trained_folder(place, "tiny-clm-12")
    monkeypatch.setattr(worker.subprocess, "Popen", Launcher)
    monkeypatch.setenv("MKL_NUM_THREADS", "8")
    for folder in (newest, own):
        monkeypatch.setattr(Launcher, "output", f"NCCL\xe2\n{folder}\n".encode("latin-1"))
        assert worker.train_by_torchrun(moved, place / "runs", 2) == folder
    monkeypatch.setattr(Launcher, "output", b"")
    with pytest.raises(
        InputError,
        match=r"torchrun succeeded but did not print the folder of its run; see .*tiny-clm-12\.log",
    ):
        worker.train_by_torchrun(moved, place / "runs", 2)


def test_what_torchrun_says_of_its_end_is_of_this_attempt(
    plan: Plan, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log has the earlier ones too. A stop is no failure."""
    recipe = plan.runs["tiny-clm-12"].recipe
    monkeypatch.setattr(worker.subprocess, "Popen", Launcher)
    attempts = [
        (b"biphase: process 1 was killed\n", 2, InputError, "exit code 2: process 1 was killed; see"),
        (b"Traceback\nImportError: libnccl.so.2\n", 1, InputError, "exit code 1: ImportError: libnccl.so.2; see"),
        (b"biphase: stopped at step 3 of 12\n", 143, StoppedError, "^stopped at step 3 of 12$"),
        (b"", 143, StoppedError, "^stopped; run the same command to continue"),
    ]
    for output, code, kind, words in attempts:
        monkeypatch.setattr(Launcher, "output", output)
        monkeypatch.setattr(Launcher, "code", code)
        with pytest.raises(kind, match=words):
            worker.train_by_torchrun(recipe, tmp_path, 2)


def test_a_stop_waits_for_the_processes_of_a_run(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """It is passed on, and is one also where they end as if nothing had been."""
    terminated = []

    class Asked(Launcher):
        def wait(self) -> int:
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
            return 0

        def terminate(self) -> None:
            terminated.append(1)

    monkeypatch.setattr(worker.subprocess, "Popen", Asked)
    monkeypatch.setenv(machine.GRACE, "77")
    with pytest.raises(StoppedError, match="run the same command to continue"):
        worker.train_by_torchrun(plan.runs["tiny-clm-12"].recipe, tmp_path, 2)
    assert terminated and capsys.readouterr().err == "waiting up to 77 s for 2 processes to save their state\n"


@pytest.mark.slow
@pytest.mark.minutes
def test_torchrun_says_by_its_exit_code_that_a_run_is_busy(plan: Plan, finished: Path) -> None:
    """And which run it is, where nobody is at it."""
    recipe = plan.runs["tiny-clm-12"].recipe
    lacking = recipe.model_copy(update={"checkpoints": Checkpoints(keep=(3,))})
    folder = trained_folder(finished, "tiny-clm-12")
    with locked(folder / ".lock"), pytest.raises(BusyError, match="in use by another"):
        worker.train_by_torchrun(lacking, finished / "runs", 2)
    assert worker.train_by_torchrun(recipe, finished / "runs", 1).resolve() == folder


def test_one_unit(plan: Plan, tmp_path: Path) -> None:
    place = claim_study_folder(tmp_path / "study", plan.study)
    with pytest.raises(InputError, match="no unit 'train tiny-clm' in this study; did you mean 'train tiny-clm-12'"):
        run_study(plan, place, HERE, only="train tiny-clm")
    with pytest.raises(InputError, match="no unit 'trian' in this study; did you mean 'train'"):
        run_study(plan, place, HERE, only="trian")
    with pytest.raises(InputError, match="no unit '0' in this study; names look like 'train tiny-"):
        run_study(plan, place, HERE, only="0")
    with pytest.raises(InputError, match="needs 'train tiny-clm-12', which is not done yet"):
        run_study(plan, place, HERE, only="train tiny-50-50-12")
    assert run_study(plan, place, HERE, only="train tiny-clm-12") == []
    assert read_state(plan, place).done == {"train tiny-clm-12"}
    assert run_study(plan, place, HERE, only="train") == []
    assert read_state(plan, place).done == {train_name(name) for name in plan.runs}


@pytest.mark.slow
@pytest.mark.minutes
def test_all_cells_of_what_is_trained(
    plan: Plan, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """What is not trained is not trained for them, and is told."""
    place = copy_of(finished, tmp_path / "study")
    shutil.rmtree(place / "scores")
    (place / "trained" / "tiny-mlm40-12.json").unlink()
    assert run_study(plan, place, HERE, only="cells") == []
    state = read_state(plan, place)
    lacking = {cell.name for cell in plan.cells if cell.model == "tiny-mlm40-12"}
    assert (
        state.scored == {cell.name for cell in plan.cells} - lacking
        and not (place / "trained" / "tiny-mlm40-12.json").exists()
    )
    assert "4 cells left out: their models are not trained" in capsys.readouterr().err


def test_scored_cells_are_not_left_out_for_want_of_a_checkpoint(
    plan: Plan, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    place = copy_of(finished, tmp_path / "kept")
    for path in (place / "runs").glob("*/steps"):
        shutil.rmtree(path)
    assert run_study(plan, place, HERE, only="cells") == [] and "left out" not in capsys.readouterr().err


def test_the_folder_of_another_study(plan: Plan, finished: Path) -> None:
    with pytest.raises(InputError, match="is the folder of the study 'tiny', not of 'other'"):
        claim_study_folder(finished, plan.study.model_copy(update={"name": "other"}))


@pytest.mark.slow
@pytest.mark.minutes
def test_words_alone_stand_beside_the_arms_and_are_none(plan: Plan, finished: Path, tmp_path: Path) -> None:
    """One result for all cells of a task; no arm, no cohort and no hypothesis has it; it can be left out."""
    state = read_state(plan, finished)
    [alone] = state.words
    assert (alone.model, alone.task) == ("most frequent tag", "wnut17")
    results = collect_results(plan, state.scores, measure_sizes(plan))
    names = {result.arm.name for result in results.results}.union(*(result.cohort for result in results.results))
    assert names == {model.name for model in plan.models}
    _, _, table, sentences = report_study(plan, finished, tmp_path / "report", [])
    assert table.words is not None and table.words.cells[-1].text == f"{100 * alone.metrics['test']['f1']:.2f}"
    assert not {cell.mark for cell in table.words.cells} - {""}
    [told] = [sentence for sentence in sentences if sentence.startswith("Words alone: ")]
    assert "most frequent tag" in told and "corrected for picking the best of 5 models" in told
    assert "most frequent tag" not in (tmp_path / "report" / "scores.csv").read_text()
    for ending in ("md", "tex"):
        assert "words alone (no arm)" in (tmp_path / "report" / "tables" / f"{table.name}.{ending}").read_text()
    without = changed(plan, "evaluation.finetune.words=false")
    assert {cell.name for cell in without.cells} == state.scored, "a cell has the same name without them"
    place = copy_of(finished, tmp_path / "study")
    shutil.rmtree(place / "scores" / ".words")
    assert run_study(without, place, HERE) == [] and read_state(without, place).words == ()
    assert run_study(plan, place, HERE) == [] and read_state(plan, place).words[0].metrics == alone.metrics


@pytest.mark.slow
@pytest.mark.minutes
def test_a_task_of_ones_own(plan: Plan, finished: Path, words_dir: Path, tmp_path: Path) -> None:
    """Its YAML file names it, its data is found under either name, and the report has it."""
    own = tmp_path / "places.yaml"
    shape = "classes: [O, B-location], files: [{train: train.jsonl, validation: validation.jsonl, test: test.jsonl}]"
    own.write_text(
        "{name: places, family: token_classification, metric: f1, label: ner_tags, " + shape + "}", encoding="utf-8"
    )
    place = copy_of(finished, tmp_path / "study")
    unknown = changed(plan, f"evaluation.tasks=['{own}']", "evaluation.data_dirs={}")
    told = status(read_state(unknown, place))
    assert [line["name"] for line in told.lines] == ["train", "places"], "not its path"
    assert told.notes == ["the time for places is a guess until its first cell is done"]
    for given in (str(own), "places"):
        words = [f"evaluation.tasks=['{own}']", f"evaluation.data_dirs={{'{given}': '{words_dir}'}}"]
        asked = changed(plan, *words, "evaluation.learning_rates=[1e-3]", "evaluation.seeds=1")
        assert run_study(asked, place, HERE) == []
    assert status(read_state(asked, place)).notes == []
    assert {
        result.dataset
        for result in collect_results(asked, read_state(asked, place).scores, measure_sizes(asked)).results
    } == {"places"}
    page, *_ = report_study(asked, place, tmp_path / "report", [])
    assert "places" in page.read_text(encoding="utf-8")


def test_data_are_looked_for_before_anything_trains(plan: Plan, tmp_path: Path) -> None:
    tree = plan.study.model_dump(mode="json")
    tree["evaluation"] |= {"data_dirs": {"wnut17": str(tmp_path)}}
    without = plan_study(parse_config(Study, tree, origin="without"))
    place = claim_study_folder(tmp_path / "study", without.study)
    with pytest.raises(InputError, match=r"task 'wnut17' needs .* there"):
        run_study(without, place, HERE)
    assert not (place / "runs").exists()
    tree["evaluation"] |= {"tasks": ["squad_retrieval"], "data_dirs": {}}
    lacking = plan_study(parse_config(Study, tree, origin="lacking"))
    with pytest.raises(InputError, match="task 'squad_retrieval' comes neither with biphase nor from the Hub"):
        run_study(lacking, place, HERE)
    tree = plan.study.model_dump(mode="json")
    tree["models"] += [{"name": "theirs", "model": "../decodr"}]
    tree["arms"] += [{"group": "adapted", "models": ["theirs"], "curricula": ["mlm40"], "budgets": [12]}]
    lost = plan_study(parse_config(Study, tree, origin="lost"))
    with pytest.raises(InputError, match=r"model \.\./decodr: there is no such folder"):
        run_study(lost, place, HERE)


def test_time_left_knows_what_training_took_before(plan: Plan, finished: Path, tmp_path: Path) -> None:
    state = read_state(plan, finished)
    every = study_units(state)
    spent, costs = measure_units(state, every), {unit.name: unit.cost for unit in every}
    records = [read_json(finished / "trained" / f"{run}.json")["seconds"] for run in plan.runs]
    assert spent["train"].seconds == pytest.approx(sum(records))
    assert spent["train"].cost == pytest.approx(sum(costs[train_name(run)] for run in plan.runs))
    assert spent["wnut17"].seconds > 0 and set(spent) == {"train", "wnut17"}
    training = units.Unit("train tiny-clm-12", list, {}, kind="train", cost=costs["train tiny-clm-12"])
    forecast = scheduler.Forecast([training], spent | {"wnut17": scheduler.Pace(1e6, 1.0)})
    assert forecast.seconds_left == pytest.approx(sum(records) * training.cost / spent["train"].cost)
    # Without the cells, `study status` tells the same for them: as long for their cost as the training took.
    place = copy_of(finished, tmp_path / "trained")
    shutil.rmtree(place / "scores")
    lines = status(read_state(plan, place)).lines
    cells = sum(cost for name, cost in costs.items() if not name.startswith("train "))
    assert [line["seconds_left"] for line in lines] == [
        0,
        pytest.approx(cells * spent["train"].seconds / spent["train"].cost),
    ]
