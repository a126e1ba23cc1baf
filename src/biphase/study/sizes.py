"""What devices compute in an hour and hold in memory, and how large networks, samples and tasks are: for estimates."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from biphase.config import MAX_COUNT
from biphase.corpus.shards import read_shard_manifest
from biphase.encoder.presets import shape_of
from biphase.errors import InputError, clipped, nearest
from biphase.files import read_json, read_json_as
from biphase.flops import (
    DEVICES,
    LLAMA_SHAPED,
    PEAK_FLOPS,
    SHAPE_KEYS,
    SampleLengths,
    Shape,
    flops_per_token,
    known_device,
    read_shape,
    update_flops,
)
from biphase.machine import total_memory
from biphase.recipe import Data
from biphase.run import open_run, read_metrics
from biphase.study.arms import starting_models
from biphase.study.plan import Plan
from biphase.study.spec import Planning, StartingModel, Study
from biphase.study.trunks import PlannedRun, phases_between
from biphase.tasks.spec import Family, TaskSize, find_task

EFFICIENCY = {"CPU": 0.6}
"""The share of the peak that our own runs reach (docs/LOG.md)."""
ASSUMED_EFFICIENCY = 0.4
"""The same for other devices: a round figure for well-run bf16 training, not a measurement."""


@dataclass(frozen=True)
class Machine:
    """What trains: so many devices of one kind. A device is a GPU, or a core of a CPU."""

    name: str
    devices: int
    peak_flops: float
    efficiency: float
    source: str
    """Where the efficiency is from, for people."""

    @property
    def speed(self) -> str:
        """What one device computes, for people."""
        if self.efficiency == 1:
            return f"{self.peak_flops / 1e9:,.3g} GFLOP/s, {self.source}"
        return f"{self.peak_flops / 1e12:,.3g} TFLOP/s, {self.efficiency:.0%} of them used, {self.source}"

    @property
    def memory(self) -> float:
        """Bytes of one device, of a CPU those of this machine; 0 where that is not known."""
        if self.name == "CPU":
            return float(total_memory())
        return DEVICES[key][1] * 2.0**30 if (key := known_device(self.name)) else 0.0

    def device_hours(self, flops: float) -> float:
        """The hours that one device needs for so many FLOPs."""
        return flops / (self.peak_flops * self.efficiency) / 3600

    def flops_in(self, hours: float) -> float:
        """What all its devices together do in some hours."""
        return hours * 3600 * self.devices * self.peak_flops * self.efficiency


def find_machine(name: str, devices: int = 1, efficiency: float | None = None) -> Machine:
    """A device of the table, by a name that it is part of, or the devices of the run in a folder, as fast as they were:
    by the median of its steps, without the first few.

    Raises `InputError` for unknown ones, none of them, an efficiency that is no share, one beside a run, and a run that
    has logged no more than its first steps.
    """
    if devices < 1:
        raise InputError(f"{devices} devices compute nothing; give a number from 1 on")
    if efficiency is not None and not 0 < efficiency <= 1:
        raise InputError(f"an efficiency of {efficiency:g} is no share of the peak; give a number above 0 and up to 1")
    if (Path(name) / "config.yaml").exists():
        if efficiency is not None:
            raise InputError(f"{name} is a run, which measures what is reached; leave the efficiency out")
        run = open_run(Path(name))
        records = read_metrics(run, "train")
        speeds = [record["flops_per_second"] for record in records[len(records) // 10 + 1 :]]
        if not speeds:
            raise InputError(f"{name} has logged too few steps to measure a device by; let it train for longer")
        environment = read_json(run.path / "environment.json")
        is_cpu = environment["device"] == "cpu"
        used = environment["processes"] * (environment["threads"] if is_cpu else 1)
        measured = "CPU" if is_cpu else environment["device"]
        return Machine(measured, devices, median(speeds) / used, 1.0, f"as measured in {name}")
    key = known_device(name)
    if key is None:
        raise InputError(f"unknown device or run '{name}'{nearest(name, PEAK_FLOPS)}")
    source, usual = "stated" if efficiency else "assumed", EFFICIENCY.get(key, ASSUMED_EFFICIENCY)
    return Machine(key, devices, PEAK_FLOPS[key], efficiency or usual, source)


def study_machine(study: Study, device: str | None = None, efficiency: float | None = None) -> Machine | None:
    """The device that is asked for, else that of the study file; None where neither names one.

    What the file says of the efficiency is said of its own device. Raises `InputError` for an efficiency of none.
    """
    planning = study.planning
    if device is None and planning.device is not None:
        device, efficiency = planning.device, planning.efficiency if efficiency is None else efficiency
    if device is not None:
        return find_machine(device, planning.devices, efficiency)
    if efficiency is not None:
        raise InputError("an efficiency is that of a device, and none is named; give one, such as H100")
    return None


SAMPLED_SAMPLES = 100_000
"""How many samples of a shard set are looked at for their mean length."""


def find_lengths(data: Data, planning: Planning) -> SampleLengths:
    """How long samples are: in the shards where they are here, else by the packer's rule or as the study assumes."""
    low, high = data.min_sample_tokens, data.max_sample_tokens
    if data.packing == "stream":
        # Two samples fill `high` tokens, cut at r uniform in low..high - low. So each is high / 2 long on average, with
        # the variance of a uniform integer, and the mean of its square is the square of the mean plus the variance.
        variance = ((high - 2 * low + 1) ** 2 - 1) / 12
        squares = 2 * ((high / 2) ** 2 + variance)
        return SampleLengths(high / 2, squares / high, "of a token stream cut at random")
    places = (data.shards, *(part.path for part in data.mixture or ()))
    if all((Path(place) / "manifest.json").exists() for place in places):
        from biphase.corpus.packing import make_samples, open_text

        text, samples_per_token, mean_keys = open_text(data), 0.0, 0.0
        for shards, share in zip(text.sets, map(float, text.shares), strict=True):
            samples = make_samples(data, shards)
            chosen = np.linspace(0, samples.num_samples - 1, min(samples.num_samples, SAMPLED_SAMPLES)).astype(np.int64)
            starts, stops = samples.spans(chosen)
            lengths = (stops - starts).astype(np.float64)
            samples_per_token += share / float(lengths.mean())
            mean_keys += share * float((lengths**2).sum() / lengths.sum())
        return SampleLengths(1 / samples_per_token, mean_keys, f"measured in {', '.join(places[1:] or places)}")
    mean = float(planning.mean_sample_tokens or high / 2)
    absent = next(place for place in places if not (Path(place) / "manifest.json").exists())
    return SampleLengths(mean, mean, f"assumed: {absent} is not here; all samples as long as the mean")


def find_vocab_size(data: Data, planning: Planning) -> int:
    """The vocabulary of the shards where they are here, else as the study says. Raises `InputError` without either."""
    if (Path(data.shards) / "manifest.json").exists():
        return read_shard_manifest(Path(data.shards)).vocab_size
    if planning.vocab_size is None:
        raise InputError(f"the shards {data.shards} are not here yet: give planning.vocab_size, such as 32768")
    return planning.vocab_size


def model_shape(model: StartingModel, vocab_size: int) -> Shape | None:
    """The shape of a preset or of a folder with a Llama-like config.json; None for other types and what only the hub
    knows."""
    if model.preset is not None:
        return shape_of(model.preset, model.architecture, vocab_size)
    config = Path(model.model or "") / "config.json"
    if not config.is_file():
        return None
    settings = read_json_as(config, dict[str, Any], "save the model anew")
    if settings.get("model_type") not in LLAMA_SHAPED or any(key not in settings for key in SHAPE_KEYS):
        return None
    for key in (*SHAPE_KEYS, "head_dim", "vocab_size"):
        size = settings.get(key) or 1
        if not isinstance(size, int) or not 0 < size <= MAX_COUNT:
            raise InputError(f"{config}: {key} is {clipped(repr(size))}, which is no size; save the model anew")
    return read_shape(settings | {"vocab_size": max(vocab_size, settings.get("vocab_size", 0))})


@dataclass(frozen=True)
class Sizes:
    """What the runs of a plan compute with: by name of a run, its network and the lengths of its samples."""

    shapes: Mapping[str, Shape | None]
    texts: Mapping[str, SampleLengths]

    def flops(self, run: PlannedRun, until: int | None = None) -> dict[str, float]:
        """What a run costs, by objective, up to a step of it; nothing for a network of unknown shape."""
        shape, spent = self.shapes[run.name], dict[str, float]()
        if shape is None:
            return spent
        end, per_update = run.first, update_flops(run.recipe.optimizer, shape.matrices)
        for phase in phases_between(run.recipe.curriculum, 0, (until or run.last) - run.first):
            begin, end = end, end + phase.steps
            tokens = run.recipe.tokens_before(end) - run.recipe.tokens_before(begin)
            for part, share in phase.parts:
                flops = tokens * flops_per_token(shape.flops, part, self.texts[run.name]) + phase.steps * per_update
                spent[part.objective] = spent.get(part.objective, 0.0) + share * flops
        return spent


def measure_sizes(plan: Plan) -> Sizes:
    """The sizes of all runs; each set of shards is looked into once."""
    models, planning = starting_models(plan.study), plan.study.planning
    texts: dict[Data, SampleLengths] = {}
    vocabularies: dict[str, int] = {}
    shapes = {}
    for run in plan.runs.values():
        data = run.recipe.data
        if data not in texts:
            texts[data], vocabularies[data.shards] = find_lengths(data, planning), find_vocab_size(data, planning)
        shapes[run.name] = model_shape(models[run.model], vocabularies[data.shards])
    return Sizes(shapes, {run.name: texts[run.recipe.data] for run in plan.runs.values()})


TYPICAL_SIZES: dict[Family, TaskSize] = {
    "sequence_classification": TaskSize(train_examples=50_000, example_tokens=40, evaluated_tokens=1_000_000),
    "token_classification": TaskSize(train_examples=15_000, example_tokens=25, evaluated_tokens=200_000),
    "question_answering": TaskSize(train_examples=90_000, example_tokens=200, evaluated_tokens=3_000_000),
    "multiple_choice": TaskSize(train_examples=40_000, example_tokens=200, evaluated_tokens=2_000_000),
    "retrieval": TaskSize(train_examples=100_000, example_tokens=120, evaluated_tokens=1_000_000),
}
"""The sizes that are assumed of tasks that do not say theirs, until a cell shows how long it takes."""


def task_size(name: str) -> TaskSize:
    """A task is as large as it says, or as is typical of its family."""
    task = find_task(name)
    return task.size or TYPICAL_SIZES[task.family]
