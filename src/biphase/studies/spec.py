"""The form of a study file: arms (models × curricula × budgets), their evaluation, and assumptions about cost.

`studies.arms` turns arms into recipes. Curricula have short forms:

    mlm   mlm30   mntp12.5       one objective for the whole budget; the number is the percentage of masked tokens
    25/75                        25 % of the budget CLM, then 75 % MLM
    meap/mlm                     half of the budget MEAP, then MLM
    5k+17k                       5,000 steps of CLM, then 17,000 of MLM: the budget is their sum
    mlm40-15                     a percentage that falls (or rises) linearly over its phase
    40k clm + 2k mlm20           any list of phases in steps ...
    40% mlm + 20% clm + 40% mlm  ... or in shares of the budget, which add up to 100 %

Any other curriculum needs a name and a list of phases in the study's `curricula` (`NamedCurriculum`).
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from biphase import config
from biphase.console import printable
from biphase.curriculum import OBJECTIVES, Phase, join_phases
from biphase.embedding.recipe import EmbeddingRecipe, JudgedPaths, set_name
from biphase.errors import InputError, nearest, refuse_doubles, refuse_unknown
from biphase.files import content_hash
from biphase.finetuning.config import FinetuneConfig
from biphase.report.results import FAMILY_CODES, RESERVED_NAMES
from biphase.tasks.sources import name_data_dirs
from biphase.tasks.spec import find_task, split_name

NUMBER = r"\d+(?:\.\d+)?"
SHORT_PHASE = re.compile(
    rf"(?:(?P<amount>{NUMBER})(?P<unit>k|%|)\s+)?(?P<objective>{'|'.join(OBJECTIVES)})"
    rf"(?:(?<!clm)(?P<percent>{NUMBER})(?:-(?P<to>{NUMBER}))?)?"
)
"""A phase in short form: `40k clm`, `25% mlm20`, `500 mntp`, `mlm`, `mlm40-15`. `clm` masks nothing, so it has no
percentage."""


class NamedCurriculum(config.Strict):
    """A list of phases with a name, for curricula without a short form."""

    name: str
    phases: Annotated[tuple[dict[str, Any], ...], Field(min_length=1)]
    """Phases with the keys of a recipe's phase, or with `share`, a share of the budget, instead of `steps`."""
    repeat: Annotated[config.PositiveCount, Field(le=10_000)] = 1
    """The number of times to go through the list. Shares and steps are those of one round."""


PhaseTemplate = tuple[Phase, Fraction | None]
"""A phase and its share of a budget: None with the phase's own number of steps, else the phase has one step."""


def read_steps(value: Any) -> Any:
    """Read `42k` as 42000. Return anything else unchanged, for validation."""
    match = re.fullmatch(rf"({NUMBER})k", value) if isinstance(value, str) else None
    if match is None:
        return value
    steps = Fraction(match[1]) * 1000
    return int(steps) if steps.denominator == 1 else value


def curriculum_label(text: str) -> str:
    """Write a curriculum as part of a name: `25/75` → `25-75`."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", text)


def read_curriculum(
    text: str, named: Mapping[str, NamedCurriculum], mask_probability: float
) -> tuple[PhaseTemplate, ...]:
    """Read the phases of a curriculum: `text` is a name in `named` or a short form. Masked phases without a percentage
    get `mask_probability`.

    Raises `InputError` for an unknown name or form, and for a phase that no recipe could have.
    """
    curriculum = named.get(text) or NamedCurriculum(name=text, phases=tuple(read_short_form(text, named)))
    one_round = []
    for index, phase in enumerate(curriculum.phases):
        where = f"curriculum '{text}', phase {index}"
        if ("steps" in phase) == ("share" in phase):
            raise InputError(f"{where} needs either steps or share")
        is_clean = phase.get("objective", "clm") == "clm"  # a phase with only `attention` and `target` masks nothing
        settings = {"steps": 1} | ({} if is_clean else {"mask_probability": mask_probability}) | phase
        settings["steps"], share = read_steps(settings["steps"]), settings.pop("share", None)
        if "share" in phase:
            if isinstance(share, bool) or not isinstance(share, int | float | Fraction) or not 0 < share <= 1:
                raise InputError(f"{where}: share is {share!r}, not a number above 0 and up to 1")
            share = Fraction(str(share)) / curriculum.repeat  # the file has shares of a round's budget
        one_round.append((config.parse_config(Phase, settings, origin=where), share))
    return tuple(one_round) * curriculum.repeat


def read_short_form(text: str, named: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yield the phases of a short form, with the keys of `NamedCurriculum.phases`. Errors suggest names in `named`."""
    long_form = re.sub(rf"^({NUMBER})/({NUMBER})$", r"\1% clm + \2% mlm", text)
    long_form = re.sub(r"^([a-z][^/+]*)/([a-z][^/+]*)$", r"50% \1 + 50% \2", long_form)
    long_form = re.sub(rf"^({NUMBER}k?)\+({NUMBER}k?)$", r"\1 clm + \2 mlm", long_form)
    for piece in long_form.split("+"):
        match = SHORT_PHASE.fullmatch(piece.strip())
        if match is None:
            forms = "short forms are such as mlm30, 25/75, 5k+17k and 40k clm + 2k mlm20"
            raise InputError(f"unknown curriculum '{text}'{nearest(text, [*named, *OBJECTIVES])}; {forms}")
        amount, unit, objective, percent, to = match.group("amount", "unit", "objective", "percent", "to")
        keys: dict[str, Any] = {"objective": objective}
        if to:
            keys["mask_probability"] = {"from": float(percent) / 100, "to": float(to) / 100}
        elif percent:
            keys["mask_probability"] = float(percent) / 100
        if amount is None or unit == "%":  # a phase without an amount has the whole budget
            keys["share"] = Fraction(amount or 100) / 100
        else:
            keys["steps"] = amount + unit
        yield keys


def fill_budget(templates: tuple[PhaseTemplate, ...], budget: int | None, where: str) -> tuple[Phase, ...]:
    """Fit the phases into a budget of steps. Round the ends of phases, so that their steps add up to the budget."""
    shares = [share for _, share in templates if share is not None]
    if shares and len(shares) < len(templates):
        raise InputError(f"{where} mixes steps and shares; use one of the two")
    if shares:
        # The ends of phases as shares of the budget: shares 1/4, 3/4 → ends 1/4, 1.
        reached = list(accumulate(shares))
        if abs(float(reached[-1]) - 1) > 1e-6:
            raise InputError(f"{where} is impossible: its shares add up to {float(reached[-1]):.4%}, not 100 %")
        if budget is None:
            raise InputError(f"{where} needs budgets, such as budgets: [12k]")
        ends = [round(share * budget) for share in reached]
        steps = [end - begin for begin, end in pairwise([0, *ends])]
    else:
        steps = [phase.steps for phase, _ in templates]
        if budget not in (None, sum(steps)):
            raise InputError(f"{where} has {sum(steps)} steps, which is not the budget of {budget}; leave budgets out")
    if min(steps) < 1:
        raise InputError(f"{where} gives one of its phases less than one of {budget} steps")
    return join_phases(
        phase.model_copy(update={"steps": count}) for (phase, _), count in zip(templates, steps, strict=True)
    )


ARCHITECTURE = "architecture."
"""The prefix of the axes of a sweep that change a network."""

Steps = Annotated[config.PositiveCount, BeforeValidator(read_steps)]


Seeds = Annotated[
    Annotated[tuple[config.Count, ...], Field(min_length=1, max_length=config.MOST_REPEATS)] | None,
    BeforeValidator(
        lambda value: tuple(range(min(value, config.MOST_REPEATS + 1))) if isinstance(value, int) else value
    ),
    BeforeValidator(lambda value: None if value == 1 else value),
]
"""A list of seeds, or their number: 5 means 0 to 4. The number 1 becomes None: then the fine-tuning seed of each model
is its pretraining seed."""


ShownText = Annotated[str, AfterValidator(printable)]
"""A text for people. It has escapes in place of control characters, which no page or picture can hold."""


class PretrainingSeeds(config.Strict):
    """The pretraining seeds of every arm. Each seed has its own initial weights, its own masks and, with `order`, its
    own order of the data. All arms with the same seed have the same order."""

    count: Annotated[config.PositiveCount, Field(le=config.MOST_REPEATS)] = 1
    order: bool = True
    """Whether each seed has its own order of the data. With `false`, results hold only for the one order."""
    up_to: Annotated[config.PositiveCount, Field(le=config.MOST_REPEATS)] | None = None
    """The number of seeds up to which `count` may grow after reports. The tests of all reports share the 5 %."""

    @model_validator(mode="after")
    def count_fits(self) -> "PretrainingSeeds":
        if self.up_to is not None and not 1 < self.count <= self.up_to:
            raise ValueError(
                f"up_to is {self.up_to}: it needs a count from 2 to {self.up_to}, and here it is {self.count}"
            )
        return self


SeededTraining = Annotated[
    PretrainingSeeds, BeforeValidator(lambda value: {"count": value} if isinstance(value, int) else value)
]
"""`3`, `{count: 3, order: false}`, or `{count: 3, up_to: 8}`."""


class StartingModel(config.Strict):
    """The start of an arm: a network with random weights, or a pretrained one. A plain preset needs no entry."""

    name: config.FolderName
    preset: str | None = None
    architecture: dict[str, config.Setting] = Field(default_factory=dict)
    """Changes to the preset, as in a recipe's `init`."""
    model: str | None = None
    """A Hugging Face decoder or encoder, instead of a preset."""
    revision: str | None = None
    """The commit, tag or branch of `model` on the Hub."""
    recipe: dict[str, Any] = Field(default_factory=dict)
    """Changes to the study's `recipe` for this model."""


class ArmGroup(config.Strict):
    """Every combination of models (or parents), curricula and budgets."""

    group: ShownText = "arms"
    """The name of these arms in the plan's table."""
    name: str = ""
    """A template of names with {model} or {parent}, {curriculum} and {budget}; by default
    `{model}-{curriculum}-{budget}`."""
    models: tuple[str, ...] = ()
    """Presets, or names from the study's `models`."""
    parents: tuple[str, ...] = ()
    """Arms to continue, from their final, decayed models. They replace `models`."""
    curricula: Annotated[tuple[str, ...], Field(min_length=1)]
    """Short forms such as `25/75`, or names from the study's `curricula`."""
    budgets: tuple[Steps, ...] = ()
    """Budgets in steps. Curricula that state their own steps need none."""
    pretraining_seeds: SeededTraining | None = None
    """Pretraining seeds that replace the study's."""
    carry_optimizer: bool = True
    """Whether arms with `parents` take over their parent's optimizer moments; otherwise the moments start at zero."""
    recipe: dict[str, Any] = Field(default_factory=dict)
    """Changes to the study's `recipe` for these arms."""
    sweep: dict[str, Annotated[tuple[bool | int | float | str, ...], Field(min_length=1)]] = Field(default_factory=dict)
    """Further axes with their values: keys of the recipe, such as `schedule.peak_lr`, or of a preset, such as
    `architecture.num_hidden_layers`. Each architecture becomes a model with its own name, such as
    `1m-num_hidden_layers4`. For other keys, the names of arms end in the key's last word and the value:
    `…-peak_lr0.003`."""

    @model_validator(mode="after")
    def axes_and_beginning_are_known(self) -> "ArmGroup":
        if self.parents and (keys := [key for key in self.sweep if key.startswith(ARCHITECTURE)]):
            raise ValueError(f"sweep: {keys[0]} cannot differ from that of the parents")
        if self.group == "evaluation":
            raise ValueError("no group of arms can be named 'evaluation': the plan's table has a row of that name")
        if bool(self.models) == bool(self.parents):
            raise ValueError(f"arms '{self.group}': give either models or parents")
        if self.pretraining_seeds and self.pretraining_seeds.up_to:
            problem = "up_to has no place here, because a look is at the whole study"
            raise ValueError(f"arms '{self.group}': {problem}: give it with the study's own pretraining_seeds")
        return self


class Intermediate(config.Strict):
    """Checkpoints before the decay, to evaluate like final models."""

    arms: Annotated[tuple[str, ...], Field(min_length=1)]
    steps: Annotated[tuple[Steps, ...], Field(min_length=1)]
    """Steps from the beginning of the arm: from random weights, or from the end of its parent."""


EMBED = "embed:"
"""The prefix of the names of embedding recipes, which stand for a training task in cells and scores."""


class EmbedEvaluation(config.Strict):
    """An evaluation of embeddings: one recipe turns every model into an embedding model, once for each seed, and the
    study counts its zero-shot scores."""

    recipe: dict[str, Any]
    """A recipe of `biphase embed`, without the keys that the study decides: name, model, out, weights, seed,
    evaluation."""
    data: Annotated[JudgedPaths, Field(min_length=1)]
    """Folders in BEIR's layout, or files of scored pairs."""

    @property
    def name(self) -> str:
        return EMBED + content_hash(self.recipe)[:8]

    @property
    def tasks(self) -> dict[str, str]:
        """Name of a score → the path of its data."""
        return {f"zero-shot:{set_name(path)}": path for path in self.data}

    def settle(self, weights: str = "pretrained") -> EmbeddingRecipe:
        """Return the recipe, without a model. Raises `InputError` for a wrong key, and for one that the study
        decides."""
        settled = {"name": "embed", "model": "", "out": "", "weights": weights, "seed": 0, "evaluation": ()}
        if decided := settled.keys() & self.recipe.keys():
            raise InputError(f"evaluation.embed: '{min(decided)}' follows from the study; leave it out of recipe")
        return config.parse_config(EmbeddingRecipe, {**self.recipe, **settled}, origin="evaluation.embed")

    def configs(self, seeds: Sequence[int]) -> list[FinetuneConfig]:
        """Return the settings of a cell for each seed: the rate and batch size of the last stage, and the steps of all
        stages."""
        stages, usual = self.settle().stages, FinetuneConfig()
        steps = sum(stage.max_steps or usual.max_steps for stage in stages)
        last = {"learning_rate": stages[-1].learning_rate, "batch_size": stages[-1].batch_size}
        return [usual.model_copy(update={**last, "max_steps": steps, "seed": seed}) for seed in seeds]


Rate = Annotated[float, Field(gt=0)]


class Evaluation(config.Strict):
    """The evaluation of a study, which fine-tunes every model on every task with every rate and seed."""

    tasks: tuple[str, ...] = ()
    learning_rates: tuple[Rate, ...] = ()
    tuned_rates: dict[str, dict[str, Rate]] = Field(default_factory=dict)
    """Arm → the task to train on (`msmarco` for `nq`, `xnli.yaml` for `xnli.yaml:de`) → its one learning rate, which an
    earlier run chose on validation. It replaces `learning_rates`, which only the other arms and tasks need. All
    pretraining seeds of an arm have the same rate."""
    seeds: Seeds = None
    """Fine-tuning seeds, the same for every pretraining seed. By default, each model has a single fine-tuning seed with
    the number of its pretraining seed, because the luck of a shared seed would look like an effect of the arm."""
    embed: EmbedEvaluation | None = None
    finetune: dict[str, Any] = Field(default_factory=dict)
    """Settings for all tasks, with the keys of `biphase finetune`."""
    per_task: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Settings for single tasks, which override those of `finetune`."""
    data_dirs: dict[str, str] = Field(default_factory=dict)
    """Folders with the published data of tasks, instead of the Hub; by a task's name or YAML file."""
    random_weights: bool = False
    """Whether to also fine-tune each network from random weights: the control that pretraining must beat."""

    @model_validator(mode="after")
    def something_is_scored(self) -> "Evaluation":
        if not self.tasks and self.embed is None:
            raise ValueError("nothing is evaluated: give tasks or embed")
        if self.tasks and not (self.learning_rates or self.tuned_rates):
            raise ValueError("learning_rates is missing: fine-tuning on tasks needs them")
        return self

    def rates_of(self, arm: str, task: str) -> tuple[float, ...]:
        """Return the learning rates of an arm, without its pretraining seed, on a task that it trains on."""
        tuned = self.tuned_rates.get(arm, {}).get(task)
        return self.learning_rates if tuned is None else (tuned,)

    def seeds_of(self, pretraining_seed: int) -> tuple[int, ...]:
        """Return the fine-tuning seeds for models with this pretraining seed."""
        return (pretraining_seed,) if self.seeds is None else self.seeds


class Planning(config.Strict):
    """The assumptions behind estimates of cost. They do not change any result."""

    device: str | None = None
    """A device such as H100 or CPU, or the folder of a run whose measured speed counts."""
    devices: config.PositiveCount = 1
    efficiency: Annotated[float, Field(gt=0, le=1)] | None = None
    """Useful FLOP/s as a share of the device's peak."""
    vocab_size: config.PositiveCount | None = None
    """The vocabulary size of the tokenizer, if the shards are not here."""
    mean_sample_tokens: config.PositiveCount | None = None
    """The mean length of a sample, if the shards are not here and samples are documents."""


class Hypothesis(config.Strict):
    """An expected result of a study, declared before it runs."""

    name: ShownText
    says: ShownText
    """The hypothesis in a sentence, for people."""
    holds: Annotated[
        tuple[str, ...],
        BeforeValidator(lambda value: (value,) if isinstance(value, str) else value),
        Field(min_length=1),
    ]
    """Inequalities that must all be true, or findings of the paper, such as `F1 of the paper`."""


class Study(config.Strict):
    """The contents of a study file."""

    name: config.FolderName
    title: ShownText = ""
    question: ShownText = ""
    """The question of the study. The plan and the report begin with it."""
    authors: tuple[ShownText, ...] = ()
    """The authors to cite, in BibTeX's form, such as `Ada Lovelace`."""
    notes: tuple[ShownText, ...] = ()
    """Sentences for readers of the report, for example about what was left out, and why."""
    recipe: dict[str, Any]
    """The common recipe of all arms, without name, init and curriculum."""
    pretraining_seeds: SeededTraining = PretrainingSeeds()
    """The number of pretrainings of every arm. The first has the same runs and names as a study without this key."""
    mask_probability: Annotated[float, Field(gt=0, lt=1)] = 0.4
    """The masking probability of masked phases that do not state one."""
    models: tuple[StartingModel, ...] = ()
    curricula: tuple[NamedCurriculum, ...] = ()
    arms: Annotated[tuple[ArmGroup, ...], Field(min_length=1)]
    intermediate: tuple[Intermediate, ...] = ()
    evaluation: Evaluation | None = None
    hypotheses: tuple[Hypothesis, ...] = ()
    planning: Planning = Planning()


def load_study(source: Path | dict[str, Any], overrides: Sequence[str] = ()) -> Study:
    """Read a study from its file, or from a mapping with the file's keys, and apply `key.sub=value` overrides. Raises
    `InputError` like `load_config`.

    Its `hypotheses` may be the path of a file that lists them, relative to the study file, or `paper`, which means all
    findings of the paper. The file of a task may be relative to the current folder or to the study file.
    """
    path = config.find_yaml(source, "studies") if isinstance(source, Path) else Path("study")
    tree = config.read_yaml(path) if isinstance(source, Path) else dict(source)
    for override in overrides:
        tree = config.apply_override(tree, override)
    hypotheses = tree.get("hypotheses")
    if hypotheses == "paper":
        from biphase.report.paper import read_findings

        says = {key: finding["says"] for key, finding in read_findings()["findings"].items()}
        tree["hypotheses"] = [{"name": key, "says": says[key], "holds": f"{key} of the paper"} for key in says]
    elif isinstance(hypotheses, str):
        tree["hypotheses"] = config.read_yaml(path.parent / hypotheses).get("hypotheses")

    def find_beside(name: str) -> str:
        file = Path(split_name(str(name))[0])
        is_beside = file.suffix in (".yaml", ".yml") and not file.exists() and (path.parent / file).exists()
        return str(path.parent / name) if is_beside else name

    return config.check_tree(Study, move_tasks(tree, find_beside), overrides, origin=str(path))


def move_tasks(tree: dict[str, Any], move: Callable[[str], str]) -> dict[str, Any]:
    """Return a study's tree with each task renamed by `move`, for example to the path of its file."""
    evaluation = tree.get("evaluation")
    if not (isinstance(evaluation, dict) and isinstance(evaluation.get("tasks"), list)):
        return tree
    moved: dict[str, Any] = {"tasks": [move(name) for name in evaluation["tasks"]]}
    for key in ("per_task", "data_dirs"):
        if isinstance(settings := evaluation.get(key), dict):
            moved[key] = {move(name): value for name, value in settings.items()}
    if isinstance(tuned := evaluation.get("tuned_rates"), dict):
        moved["tuned_rates"] = {
            arm: {move(name): rate for name, rate in rates.items()} if isinstance(rates, dict) else rates
            for arm, rates in tuned.items()
        }
    return tree | {"evaluation": evaluation | moved}


def trainings(evaluation: Evaluation) -> dict[str, tuple[str, ...]]:
    """Map each training task to the tasks that it is evaluated on. Some tasks have no training of their own (nq), and
    the tests of one file share its training."""
    trained: dict[str, tuple[str, ...]] = {}
    for task in evaluation.tasks:
        description = find_task(task)
        name = split_name(task)[0] if description.part_of else description.trained_on or task
        trained[name] = (*trained.get(name, ()), task)
    return trained


def scored_as(training: str) -> str:
    """Return the name of a training in scores: the task's own name, even if the study names its file."""
    return training if training.startswith(EMBED) else find_task(training).name


def task_families(evaluation: Evaluation | None) -> dict[str, str]:
    """Map the names of tasks in scores to the codes of their families."""
    if evaluation is None:
        return {}
    embedded = () if evaluation.embed is None else evaluation.embed.tasks
    fitted = {task.name: FAMILY_CODES[task.family] for task in map(find_task, evaluation.tasks)}
    return fitted | dict.fromkeys(embedded, FAMILY_CODES["embedding"])


def check_evaluation(evaluation: Evaluation) -> None:
    """Raise `InputError` for an unknown task or fine-tuning setting, or a repeated task, rate or seed."""
    trained = trainings(evaluation)
    names = [find_task(task).name for task in evaluation.tasks]
    if taken := RESERVED_NAMES.intersection(names):
        raise InputError(f"evaluation: task {min(taken)}: reports use this name for a mean or a loss; rename the task")
    for key, values in (("task", names), ("rate", evaluation.learning_rates), ("seed", evaluation.seeds_of(0))):
        refuse_doubles(f"evaluation: {key}", values)
    for task in trained:
        finetune_config(evaluation, task, 1.0, evaluation.seeds_of(0)[0])
    for task in evaluation.per_task:
        refuse_unknown("evaluation.per_task: the study does not train on", task, trained)
    find_data_dirs(evaluation)
    if evaluation.embed is not None:
        evaluation.embed.settle("random" if evaluation.random_weights else "pretrained")


def find_data_dirs(evaluation: Evaluation) -> dict[str, str]:
    """Map names of tasks to their folders of data. Raises `InputError` for a task that the study does not evaluate."""
    return name_data_dirs(evaluation.data_dirs.items(), evaluation.tasks, "evaluation.data_dirs")


def finetune_config(evaluation: Evaluation, task: str, learning_rate: float, seed: int) -> FinetuneConfig:
    """Return the settings of the cells that train on `task` with this rate and seed."""
    settings, axes = evaluation.finetune | evaluation.per_task.get(task, {}), {"learning_rate", "seed"}
    if swept := axes & settings.keys():
        raise InputError(f"evaluation: {min(swept)} follows from {min(swept)}s; leave it out of finetune and per_task")
    tree = {**settings, "learning_rate": learning_rate, "seed": seed}
    return config.parse_config(FinetuneConfig, tree, origin=f"evaluation of '{task}'")
