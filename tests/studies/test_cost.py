"""Hours, disk and published figures follow from shapes and FLOPs (tests/test_flops.py)."""

import json
import math
import re
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from biphase.config import BUNDLED, parse_config, read_settings
from biphase.errors import InputError
from biphase.flops import Shape, model_shape, plan_memory, shape_of
from biphase.hub import read_config_here
from biphase.presets import SHAPE_KEYS
from biphase.recipe import Data, Init, Recipe
from biphase.run import Run
from biphase.studies import cost
from biphase.studies.cost import (
    FULL,
    cell_cost,
    cell_costs,
    estimate,
    find_lengths,
    find_machine,
    fit_memory,
    measure_sizes,
    refuse_lack_of_memory,
    study_machine,
    task_size,
)
from biphase.studies.describe import Begun, describe_power
from biphase.studies.plan import Plan, StudyCell, plan_study
from biphase.studies.spec import Planning, Study, finetune_config, load_study
from biphase.tasks.spec import task_table

STUDIES = BUNDLED / "studies"


@pytest.fixture(scope="module")
def paper() -> Plan:
    return plan_study(load_study(STUDIES / "paper.yaml"))


def test_the_stream_packers_lengths_are_those_of_its_samples() -> None:
    from biphase.corpus.packing import cut_stream

    samples = cut_stream(20_000_000, 12, 2048, seed=1)
    starts, ends = samples.spans(np.arange(samples.num_samples))
    lengths = (ends - starts).astype(np.float64)
    text = find_lengths(Data(shards="nowhere", packing="stream"), Planning())
    assert text.mean_tokens == 1024 == lengths.mean()
    assert text.mean_keys == pytest.approx((lengths**2).sum() / lengths.sum(), rel=0.01)


def test_lengths_and_vocabulary_are_read_from_shards_that_are_here(corpus: Any) -> None:
    from biphase.corpus.packing import cut_documents
    from biphase.corpus.shards import ShardSet

    data = Data(shards=str(corpus.shards), max_sample_tokens=64)
    text = find_lengths(data, Planning(mean_sample_tokens=3))
    samples = cut_documents(ShardSet(corpus.shards).document_ends, 12, 64)
    assert text.mean_tokens == pytest.approx(samples.num_tokens / samples.num_samples)
    assert text.mean_tokens < text.mean_keys <= 64
    assert find_lengths(Data(shards="nowhere", max_sample_tokens=64), Planning()).mean_keys == 32
    for shards, planning, vocab_size in (
        (str(corpus.shards), {"vocab_size": 7}, 384),
        ("nowhere", {"vocab_size": 7}, 7),
    ):
        [(shape, _)] = measure_sizes(small_plan(shards, planning)).values()
        assert shape is not None and shape.vocab_size == vocab_size
    with pytest.raises(InputError, match=r"shards nowhere are not here yet: give planning\.vocab_size"):
        estimate(small_plan("nowhere", {}))
    assert [shape for shape, _ in measure_sizes(small_plan("nowhere", {})).values()] == [None], "a report does without"


def test_the_lengths_of_all_pretraining_seeds_are_measured_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each seed has its own order of the samples, which does not change them."""
    plan = plan_study(load_study(STUDIES / "demo.yaml", ["pretraining_seeds=3"]))
    assert len({run.recipe.data.order_seed for run in plan.runs.values()}) == 3
    asked: list[Data] = []
    monkeypatch.setattr(cost, "find_lengths", lambda data, planning: asked.append(data) or find_lengths(data, planning))
    assert len(measure_sizes(plan)) == 6 and len(asked) == 1


def small_plan(shards: str, planning: dict[str, Any]) -> Plan:
    tree = {
        "name": "small",
        "recipe": {"data": {"shards": shards}, "schedule": {"warmup_steps": 0, "decay_steps": 0}},
        "arms": [{"group": "a", "models": ["1m"], "curricula": ["mlm"], "budgets": [10]}],
        "planning": planning,
    }
    return plan_study(parse_config(Study, tree, origin="small.yaml"))


@pytest.mark.parametrize(
    ("name", "found"),
    [("h100", "H100"), ("NVIDIA A100-SXM4-80GB", "A100"), ("NVIDIA A10", "A10"), ("AMD Instinct MI250X", "MI250X")],
)
def test_devices_are_found_by_the_names_that_they_have(name: str, found: str) -> None:
    assert find_machine(name).name == found


def test_a_device_is_a_known_one() -> None:
    with pytest.raises(InputError, match=r"unknown device or run 'H10O'; did you mean 'H100'\?$"):
        find_machine("H10O")
    with pytest.raises(InputError, match="unknown device or run 'runs/36m-h100-1a2b3c4d'"):
        find_machine("runs/36m-h100-1a2b3c4d")
    assert find_machine("AMD Instinct MI250X / MI250").name == "MI250X"
    machine = find_machine("H100", 4, efficiency=0.5)
    assert machine.device_hours(machine.peak_flops * 1800) == 1 and machine.source == "stated"
    assert find_machine("cpu").source == "assumed"


@pytest.mark.parametrize(
    ("devices", "efficiency", "message"),
    [
        (1, 5.0, "^device H100: 'efficiency' is 5.0: input should be less than or equal to 1$"),
        (1, 0.0, "'efficiency' is 0.0: input should be greater than 0$"),
        (1, -1.0, "'efficiency' is -1.0: input should be greater than 0$"),
        (1, math.nan, "'efficiency' is nan: input should be a finite number$"),
        (0, None, "'devices' is 0: input should be greater than or equal to 1$"),
    ],
)
def test_a_machine_that_cannot_be(devices: int, efficiency: float | None, message: str) -> None:
    with pytest.raises(InputError, match=message):
        find_machine("H100", devices, efficiency)


def test_an_efficiency_is_that_of_the_device_that_is_named() -> None:
    """The study file's is that of its own device, unless another one is given for it."""
    study = load_study(STUDIES / "paper.yaml", ["planning={device: A100, efficiency: 0.3, vocab_size: 128256}"])
    for device, efficiency, expected in (
        (None, None, ("A100", 0.3)),
        (None, 0.1, ("A100", 0.1)),
        ("H100", None, ("H100", 0.4)),
        ("H100", 0.1, ("H100", 0.1)),
    ):
        machine = study_machine(study, device, efficiency)
        assert machine is not None and (machine.name, machine.efficiency) == expected
    nowhere = load_study(STUDIES / "paper.yaml", ["planning={vocab_size: 128256}"])
    assert study_machine(nowhere) is None
    with pytest.raises(InputError, match="an efficiency needs a device"):
        study_machine(nowhere, None, 0.1)


def test_a_run_measures_its_device(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("name: x\n")
    (tmp_path / "environment.json").write_text('{"device": "NVIDIA X", "processes": 4, "threads": 16}')
    with pytest.raises(InputError, match="too few steps to measure a device;"):
        find_machine(str(tmp_path))
    speeds = [1e9, 5e12, 3e12, 4e12]
    for step, speed in enumerate(speeds):
        record = {"kind": "train", "step": step, "objective": "clm", "loss": 2.5, "tokens_seen": 9}
        Run(tmp_path).log(record | {"flops_per_second": speed})
    machine = find_machine(str(tmp_path), devices=2)
    assert (machine.name, machine.devices, machine.peak_flops) == ("NVIDIA X", 2, 1e12)
    assert machine.device_hours(3.6e15) == 1
    with pytest.raises(InputError, match="is a run, which measures its own efficiency; leave the efficiency out"):
        find_machine(str(tmp_path), efficiency=0.3)
    (tmp_path / "environment.json").write_text('{"device": "cpu", "processes": 1, "threads": 2}')
    assert find_machine(str(tmp_path)).peak_flops == 2e12
    assert [find_machine(str(tmp_path), devices).devices for devices in (None, 1)] == [2, 1]
    session = '{"device": "cpu", "threads": %d}'
    for threads in (2, 1):
        earlier = f'{{"device": "cpu", "threads": 2, "earlier": [{session % threads}]}}'
        (tmp_path / "environment.json").write_text(earlier)
        if threads == 2:
            assert find_machine(str(tmp_path)).peak_flops == 2e12
    with pytest.raises(InputError, match="was trained on several devices, and measures none; give"):
        find_machine(str(tmp_path))


def test_the_papers_cost(paper: Plan) -> None:
    machine = study_machine(paper.study, "MI250X", 0.105)
    assert machine is not None
    cost = estimate(paper, machine)
    rows = {row["group"]: row for row in cost.groups}
    assert [row["models"] for row in cost.groups] == [15, 17, 6, 50]
    # 5.9e21 by hand: for each size, tokens × (blocks, attention over 1,357 keys, head), CLM once and MLM four times.
    by_hand = 0.0
    for preset in ("210m", "610m", "1b"):
        shape = shape_of(preset, {}, 128_256)
        for keys, targets in ((1357.4 / 2, 1 - 1 / 1024), *((1357.4, mask) for mask in (0.2, 0.3, 0.4, 0.5))):
            attention = 12 * shape.layers * shape.heads * shape.head_width * keys
            each = 6 * shape.block_weights + attention + 6 * shape.width * 128_256 * targets
            by_hand += 42_000 * 2_359_296 * each
    assert rows["base"]["flops"] == pytest.approx(by_hand, rel=1e-3)
    assert rows["base"]["device_hours"] == pytest.approx(81_000, rel=0.01)
    assert sum(cost.flops_by_objective.values()) == pytest.approx(sum(rows[g]["flops"] for g in list(rows)[:3]))


def test_a_plan_counts_what_muon_multiplies() -> None:
    study = load_study(BUNDLED / "studies" / "price.yaml")
    adamw = study.recipe | {"optimizer": {"name": "adamw"}}
    plans = [plan_study(one) for one in (study, study.model_copy(update={"recipe": adamw}))]
    more = estimate(plans[0]).flops - estimate(plans[1]).flops
    steps = sum(run.steps for run in plans[0].runs.values())
    assert more == pytest.approx(2_768_240_640 * steps)  # of preset 1m


def test_disk_counts_weights_and_moments(paper: Plan) -> None:
    disk = estimate(paper).disk_bytes
    bytes_of = {name: 4.0 * shape_of(name, {}, 128_256).parameters for name in ("210m", "610m", "1b")}
    assert disk["models"] == pytest.approx(5 * bytes_of["210m"] + 40 * bytes_of["610m"] + 5 * bytes_of["1b"])
    # 17 branch points, whose moments go on: 12 on the CLM trunk, 3 on the MLM trunk, one in each continuation. Of them,
    # 7 on the CLM trunk and those in the continuations are no models.
    branch_points = {(run.parent, run.first) for run in paper.runs.values() if run.parent}
    no_models = sum(1 for users in paper.checkpoints.values() if users["needed_by"] and not users["models"])
    assert (len(branch_points), no_models) == (17, 9)
    assert disk["needed"] == pytest.approx(disk["models"] + (9 + 2 * 17) * bytes_of["610m"])
    assert disk["everything"] > disk["needed"]


def test_muon_keeps_one_moment_for_the_blocks() -> None:
    study = load_study(STUDIES / "demo.yaml")
    disks = []
    for name in ("adamw", "muon"):
        plan = plan_study(study.model_copy(update={"recipe": study.recipe | {"optimizer": {"name": name}}}))
        disks.append(estimate(plan).disk_bytes)
    weights = shape_of("1m", {}, 4096).block_weights * len(plan.checkpoints)
    assert disks[0]["everything"] - disks[1]["everything"] == 4 * weights and disks[0]["models"] == disks[1]["models"]


def test_networks_of_unknown_shape_are_named_and_not_counted(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, '
        '"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 900}'
    )
    tree = {
        "name": "adapt",
        "recipe": {"data": {"shards": "nowhere"}, "schedule": {"warmup_steps": 0, "decay_steps": 0}},
        "models": [{"name": "hub", "model": "org/net"}, {"name": "here", "model": str(tmp_path)}],
        "arms": [{"group": "a", "models": ["hub", "here"], "curricula": ["mntp20"], "budgets": [10]}],
        "planning": {"vocab_size": 905},
    }
    plan = plan_study(parse_config(Study, tree, origin="adapt.yaml"))
    assert estimate(plan).not_counted == ("hub-mntp20-10",)
    shape, _ = measure_sizes(plan)["here-mntp20-10"]
    assert shape is not None and (shape.layers, shape.vocab_size, shape.head_width) == (2, 905, 16)


@pytest.mark.parametrize(("asked", "longest"), [({}, 24), ({"max_sample_tokens": 100}, 100)])
def test_samples_are_as_short_as_the_positions_of_a_model_here(
    asked: dict[str, int], longest: int, tmp_path: Path
) -> None:
    """As training makes them, of a model and of the arm that continues it; unless the recipe sets their length."""
    settings = {"model_type": "llama", "vocab_size": 900, "max_position_embeddings": 24, **dict.fromkeys(SHAPE_KEYS, 4)}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    tree = {
        "name": "adapt",
        "recipe": {"data": {"shards": "nowhere", **asked}, "schedule": {"warmup_steps": 0, "decay_steps": 0}},
        "models": [{"name": "here", "model": str(tmp_path)}],
        "arms": [
            {"group": "first", "models": ["here"], "curricula": ["mlm"], "budgets": [10]},
            {"group": "on", "parents": ["here-mlm-10"], "curricula": ["clm"], "budgets": [5]},
        ],
        "evaluation": {"tasks": ["squad"], "learning_rates": [1e-4]},
        "planning": {"vocab_size": 900},
    }
    plan = plan_study(parse_config(Study, tree, origin="adapt.yaml"))
    sizes = measure_sizes(plan)
    assert [text.mean_keys for _, text in sizes.values()] == [longest / 2] * 2
    for cell in cell_costs(plan, sizes):
        assert cell.tokens == pytest.approx(32 * longest * cell.steps, rel=0.01)
    assert any(line.startswith(f"samples of {longest // 2} tokens") for line in estimate(plan).assumptions)


def model_shape_of(init: Init) -> Shape | None:
    return model_shape(init, read_config_here(init.model), 900)


def test_a_branch_has_no_shape_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever lies in the current folder."""
    settings = {"model_type": "llama", "vocab_size": 900, **dict.fromkeys(SHAPE_KEYS, 4)}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    monkeypatch.chdir(tmp_path)
    assert model_shape_of(Init(model=".")) is not None
    assert model_shape_of(Init(checkpoint="runs/parent@5")) is None


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe", "starcoder2", None])
def test_a_network_of_another_kind_than_llama_is_not_counted_as_one(model_type: str | None, tmp_path: Path) -> None:
    """Experts, or feed-forward layers without a gate, under the same names of sizes."""
    settings = {"model_type": model_type, "vocab_size": 900, **dict.fromkeys(SHAPE_KEYS, 64)}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert model_shape_of(Init(model=str(tmp_path))) is None


def test_every_task_has_a_size(paper: Plan) -> None:
    assert all(task.size for task in task_table().values())


def cost_of(shape: Shape, cell: StudyCell, context: int) -> tuple[int, float, float]:
    return cell_cost(shape, cell, context, {})


def test_a_cell_costs_its_steps_and_its_evaluation(paper: Plan) -> None:
    evaluation = paper.study.evaluation
    assert evaluation is not None
    shape = shape_of("1m", {}, 8192)
    config = finetune_config(evaluation, "sst2", 1e-4, 0)
    steps, tokens, flops = cost_of(shape, StudyCell("m", "sst2", "sst2", ("sst2",), config), 2048)
    assert (steps, tokens) == (1000, 1000 * 32 * 14)
    each = 6 * shape.block_weights + 12 * 4 * 128 * 14
    assert flops == pytest.approx(each * (tokens + 7e4 / 3))
    cut = cost_of(shape, StudyCell("m", "sst2", "sst2", ("sst2",), config), 7)[2]
    by_hand = (6 * shape.block_weights + 12 * 4 * 128 * 7) * (1000 * 32 * 7 + 7e4 / 2 / 3)
    assert cut == pytest.approx(by_hand), "the half of each text that the network sees"
    few = config.model_copy(update={"max_eval_examples": 50})
    assert cost_of(shape, StudyCell("m", "sst2", "sst2", ("sst2",), few), 2048)[2] == pytest.approx(
        each * (tokens + 2 * 50 * 14 / 3)
    )
    searched = [
        cost_of(
            shape,
            StudyCell("m", "nq", "nq", ("nq",), finetune_config(evaluation, "nq", 1e-4, 0).model_copy(update=limit)),
            2048,
        )[2]
        for limit in ({}, {"max_eval_examples": 1})
    ]
    assert searched[0] == searched[1], "few queries leave all documents to be encoded"
    short = config.model_copy(update={"max_train_examples": 100, "epochs": 2})
    assert cost_of(shape, StudyCell("m", "sst2", "sst2", ("sst2",), short), 8)[:2] == (8, 2 * 100 * 8)


def test_few_shots_and_a_frozen_encoder_cost_less(paper: Plan) -> None:
    """Shots of sst2's two classes make the batches; without a backward pass, training costs a third."""
    evaluation = paper.study.evaluation
    assert evaluation is not None
    shape, config = shape_of("1m", {}, 8192), finetune_config(evaluation, "sst2", 1e-4, 0)
    shots = config.model_copy(update={"shots": 20})
    assert cost_of(shape, StudyCell("m", "sst2", "sst2", ("sst2",), shots), 2048)[:2] == (
        1000,
        1000 * 20 * 14,
    )  # 40 texts: of 32 and of 8
    twice = shots.model_copy(update={"epochs": 2})
    assert cost_of(shape, StudyCell("m", "sst2", "sst2", ("sst2",), twice), 2048)[:2] == (4, 2 * 40 * 14)
    assert cost_of(shape, StudyCell("m", "squad", "squad", ("squad",), twice), 2048)[:2] == (2, 2 * 20 * 175)
    steps, tokens, flops = cost_of(shape, StudyCell("m", "sst2", "sst2", (), config), 2048)
    frozen = config.model_copy(update={"frozen": True})
    assert cost_of(shape, StudyCell("m", "sst2", "sst2", (), frozen), 2048) == (steps, tokens, pytest.approx(flops / 3))


def test_a_mixture_is_measured_by_its_shares(corpus: Any, tmp_path: Path) -> None:
    """The mean over tokens drawn from each set by its share."""
    from biphase.corpus.packing import cut_documents
    from biphase.corpus.prepare import prepare
    from biphase.corpus.shards import ShardSet

    folder, source = tmp_path / "short", tmp_path / "short.jsonl"
    source.write_text(
        "".join(f'{{"text": "{n} rain falls on the stones of the old town again"}}\n' for n in range(400))
    )
    prepare([source], corpus.tokenizer, folder, workers=1)
    samples, keys = [], []
    for shards in (corpus.shards, folder):
        own = cut_documents(ShardSet(shards).document_ends, 12, 64)
        starts, stops = own.spans(np.arange(own.num_samples))
        samples.append(own.num_samples / own.num_tokens)
        keys.append(float(((stops - starts) ** 2).sum() / (stops - starts).sum()))
    parts = [{"path": str(corpus.shards), "weight": 3}, {"path": str(folder), "weight": 1}]
    data = Data.model_validate({"shards": str(corpus.shards), "mixture": parts, "max_sample_tokens": 64})
    text = find_lengths(data, Planning())
    assert text.mean_keys == pytest.approx((3 * keys[0] + keys[1]) / 4)
    assert 1 / text.mean_tokens == pytest.approx((3 * samples[0] + samples[1]) / 4)


def test_a_plan_says_what_memory_its_networks_need() -> None:
    """Muon's single moment and the microbatches of an update count; a network is named once."""
    study = load_study(STUDIES / "paper.yaml")
    lines = [line for line in estimate(plan_study(study)).assumptions if "GiB" in line]
    assert [line.partition(":")[0] for line in lines] == ["210m", "610m", "1b"]
    alone, under_ddp, eight, many = (float(word) for word in re.findall(r"([\d.]+) GiB", lines[-1]))
    assert 50 < alone < under_ddp < 80 and eight > many


@pytest.mark.parametrize(("here", "is_told"), [(2**30, True), (2**40, False), (0, False)])
def test_a_plan_for_a_cpu_says_what_memory_it_needs(here: int, is_told: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And that it is more than this machine has."""
    monkeypatch.setattr(cost, "total_memory", lambda: here)
    monkeypatch.setattr("biphase.flops.has_bf16_cores", lambda: False)
    plan = plan_study(load_study(STUDIES / "paper.yaml"))
    lines = [line for line in estimate(plan, find_machine("CPU")).assumptions if "GiB" in line]
    assert len(lines) == 3 and all("per process on a CPU" in line and "GPU" not in line for line in lines)
    assert all(("more than the 1.0 GiB of this machine" in line) == is_told for line in lines)


@pytest.mark.parametrize(
    ("preset", "gib", "processes", "told"),
    [
        (
            "210m",
            4,
            1,
            r"tiny needs 22 GiB of memory, and this machine has 4\.0 GiB; what fits: compute\.mic.*, or preset",
        ),
        ("1b", 4, 1, r"has 4\.0 GiB; what fits: preset [0-9]+m$"),
        ("1m", 4, 40, r"what fits: fewer processes, or preset [0-9]+m$"),
        ("1m", 8, 1, None),
        ("210m", 0, 1, None),  # the system does not say
    ],
)
def test_a_training_that_the_memory_cannot_hold_is_refused(
    preset: str, gib: int, processes: int, told: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU, whose system would kill it; the settings that are named do fit."""
    monkeypatch.setattr(cost, "total_memory", lambda: gib * 2**30)
    monkeypatch.setattr(cost, "visible_gpus", list)
    monkeypatch.setattr("biphase.flops.has_bf16_cores", lambda: False)
    changes = [f"init.preset={preset}", "compute.microbatch_tokens=16384", "batch_tokens=16384"]
    recipe = read_settings(Recipe, "tiny", changes)
    if told is None:
        return refuse_lack_of_memory(recipe, 32_768, processes)
    with pytest.raises(InputError, match=told) as refused:
        refuse_lack_of_memory(recipe, 32_768, processes)
    ways = str(refused.value).rpartition("what fits: ")[2].split(", or ")
    fitting = ways[0].split() if ways[0].startswith("compute") else []
    for fits in (fitting, [f"init.preset={ways[-1].split()[-1]}"]):
        if fits:
            refuse_lack_of_memory(read_settings(Recipe, "tiny", [*changes, *fits]), 32_768, 1)
    monkeypatch.setattr(cost, "visible_gpus", lambda: ["0"])
    refuse_lack_of_memory(recipe, 32_768, processes)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_processes_on_a_cpu_divide_or_repeat_what_they_hold(parallel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four with several microbatches: FSDP needs less than four times the memory of one, DDP more, by gradients of
    which each process has a second copy."""
    monkeypatch.setattr(cost, "visible_gpus", list)
    monkeypatch.setattr("biphase.flops.has_bf16_cores", lambda: False)
    changes = ["init.preset=210m", "batch_tokens=65536", f"compute.parallel={parallel}"]
    recipe, shape = read_settings(Recipe, "tiny", changes), shape_of("210m", {}, 32_768)
    alone, gradients = 4 * plan_memory(shape, recipe, on_cpu=True)["total"], 4 * 4 * shape.parameters
    monkeypatch.setattr(cost, "total_memory", lambda: int(alone + 0.9 * gradients))
    if parallel == "fsdp":
        monkeypatch.setattr(cost, "total_memory", lambda: int(alone) - 1)
        return refuse_lack_of_memory(recipe, 32_768, 4)
    with pytest.raises(InputError, match=r"tiny needs .* GiB of memory"):
        refuse_lack_of_memory(recipe, 32_768, 4)


def test_what_fits_several_devices_has_room_for_gradients_that_are_not_summed_yet() -> None:
    machine, shape = find_machine("A100", 8), shape_of("1b", {}, 128_256)
    changes = ["init.preset=1b", "batch_tokens=524288", "compute.microbatch_tokens=8192"]
    fitted = fit_memory(shape, read_settings(Recipe, "tiny", changes), machine)
    assert fitted is not None and fitted.compute.parallel == "ddp"
    assert plan_memory(shape, fitted, 8)["total"] <= FULL * machine.memory


def test_a_task_of_ones_own_is_as_large_as_its_files_or_as_is_typical(tmp_path: Path) -> None:
    """The estimate says which; files that are not here or do not hold together are refused when the study runs."""
    task, shape = tmp_path / "mine.yaml", "classes: [a, b], template: '{text}', metric: accuracy"
    task.write_text(f"{{name: mine, family: sequence_classification, {shape}, files: [{{train: t.jsonl}}]}}")
    changes = [f"evaluation.tasks=[genre, '{task}']", "evaluation.per_task={}"]

    def tell(*more: str) -> tuple[str, str]:
        plan = plan_study(load_study(STUDIES / "mini.yaml", [*changes, *more]))
        (told,) = (line for line in estimate(plan).assumptions if line.startswith("fine-tuning"))
        assert plan.study.evaluation is not None and "published data of genre" in told
        return told, next(describe_power(plan, plan.study.evaluation, Begun()))

    told, power = tell()
    assert "typical sizes, guessed, of mine" in told and "on mine (12,000 examples, a guess)" in power
    told, _ = tell(f"evaluation.data_dirs={{mine: '{tmp_path}'}}")
    assert "typical sizes, guessed, of mine" in told, "no t.jsonl"
    rows = [json.dumps({"text": "four" * 10, "label": "ab"[number % 2]}) for number in range(400)]
    (tmp_path / "t.jsonl").write_text("\n".join(rows))
    told, power = tell(f"evaluation.data_dirs={{mine: '{tmp_path}'}}")
    assert "the counted examples of mine" in told and "on mine (40 examples) and" in power
    counted = task_size(str(task), {"mine": str(tmp_path)})
    assert (counted.train_examples, counted.example_tokens, counted.evaluated_tokens) == (342, 10, 580)


def test_a_plan_says_what_does_not_fit_and_what_would_help() -> None:
    """610m on 24 GiB: by smaller microbatches; 1b needs two cards. On 80 GiB both fit."""
    plan = plan_study(load_study(STUDIES / "paper.yaml"))
    told = estimate(plan, find_machine("RTX 4090")).misfits
    assert [line.partition(" does not fit into the 24 GiB of one RTX 4090")[0] for line in told] == ["610m", "1b"]
    assert "what fits: recipe.compute.microbatch_tokens=2048, or preset 210m" in told[0], "as it is typed"
    assert "compute.parallel=fsdp" in told[1] and "on 2 of them" in told[1]
    assert all("preset 210m, the largest that fits" in line for line in told)
    assert estimate(plan, find_machine("H100")).misfits == () == estimate(plan).misfits


def test_a_plan_for_a_gpu_without_units_for_bf16_is_one_of_fp32() -> None:
    """Where there are such units, it says whose hours are not those of fp32."""
    changes = [], ["recipe.compute.precision=fp32"]
    as_given, in_fp32 = (plan_study(load_study(STUDIES / "paper.yaml", change)) for change in changes)
    assert find_machine("Tesla V100-SXM2-16GB").peak_flops == 15.7e12 and find_machine("T4").peak_flops == 8.1e12
    needed = {}
    for plan, device in product((as_given, in_fp32), ("T4", "L4")):
        cost = estimate(plan, find_machine(device))
        needed[plan is in_fp32, device] = [line for line in cost.assumptions if "GiB" in line]
        told = [line for line in cost.assumptions if line.startswith("hours are those of bf16; training in fp32 takes")]
        assert len(told) == (plan is in_fp32 and device == "L4")
    assert needed[False, "T4"] == needed[True, "T4"] == needed[True, "L4"] != needed[False, "L4"]
