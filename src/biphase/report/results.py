"""Scores → results, which tables, figures and verdicts read. Published scores and those of our studies share one form.

A result is the score of an arm on a dataset; an arm is a trained model in one comparison. Scores are shares, 0 to 1.
"""

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import chain
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from biphase.config import read_yaml
from biphase.curriculum import OBJECTIVES
from biphase.errors import SOURCE, InputError, first_of
from biphase.finetuning import choosing
from biphase.finetuning.scores import KeptExamples, Score, ScoreSet, show_rate
from biphase.report.statistics import GapUnit, Interval, mean_interval, repetitions
from biphase.tasks.families import KINDS, TASK_FAMILIES

Metric = Literal["standard", "paper"]

FAMILY_CODES: dict[str, str] = {name: KINDS[name].code for name in TASK_FAMILIES} | {"embedding": "EM"}
"""Name of a family in `biphase.tasks` → its code; multiple choice counts as classification."""
FIRST_FAMILIES = {code: name for name, code in reversed(FAMILY_CODES.items())}
"""Code → the first family with this code, which names it in reports."""
FAMILY_NAMES = {code: FIRST_FAMILIES[code].replace("_", " ") for code in FAMILY_CODES.values()} | {"OT": "tasks"}


@cache
def read_words() -> dict[str, Any]:
    """Read the words of comparisons, figures and measures from `words.yaml`."""
    return read_yaml(SOURCE / "report" / "words.yaml")


AVERAGE = "Average"
"""The `dataset` of a mean over a family."""
ALL_TASKS = "all tasks"
"""The `dataset` of a mean over all datasets."""
OBJECTIVE_NAMES = {"clm": "CLM", "mlm": "MLM", "clm+mlm": "CLM → MLM", "none": "random", "": ""}

LOSS = "loss"
"""The `dataset` of an arm's held-out loss in the end, in nats."""

MEAN_OF_FAMILIES = "average"
"""The word for the mean over families in hypotheses."""

RESERVED_NAMES = {*FAMILY_NAMES, AVERAGE, LOSS, MEAN_OF_FAMILIES}
"""The names that no task of a study may have, because means and losses have them."""

NORMAL_QUANTILE = 1.96
PUBLISHED_DIGIT = 1e-4
"""The last digit of the paper's scores, as a share: the paper rounds to hundredths of a percent."""


@dataclass(frozen=True)
class ReportArm:
    """A trained model in one comparison. A model in several comparisons has an arm in each."""

    name: str
    setup: str = "other"
    """A key of `comparisons` in `words.yaml`; `efficiency` means an undecayed checkpoint."""
    size: str = ""
    objective: Literal["clm", "mlm", "clm+mlm", "none", ""] = "none"
    """The objective of pretraining from scratch; continued pretraining is always MLM. `none`: random weights. Empty:
    unknown, as for methods in a table of results."""
    mask_percent: int | None = None
    """The masking ratio in percent, that of continued pretraining if there is any; None without MLM or with several
    ratios."""
    pretrain_steps: int = 0
    clm_steps: int = 0
    mlm_steps: int = 0
    cpt_steps: int = 0
    parent: str | None = None
    """The arm that this one continues, or whose checkpoint it is."""
    flops: float | None = None
    """FLOPs of its whole training, including its parents'."""
    tokens: float | None = None
    """Tokens of its whole training, including its parents'."""
    is_plain: bool = True
    """Whether it is CLM, MLM, or CLM then MLM, without ramps and without a recipe of its own."""
    curriculum: str = ""
    """Its objectives in words if `whole_objective` does not name them, such as `MLM with 25 % CLM`; the method in a
    table of results."""
    phases: tuple[tuple[str, int], ...] = ()
    """The objectives of `curriculum` in words, each with its steps; empty if unknown or in turns."""
    masks: str = ""
    """Its masks if it has several ratios in percent, or other tokens than the mask token: `40–15`, `15 (80/10/10)`."""
    budget_class: str = ""
    """The budget in words, for a table of results that compares methods at equal budgets; empty if all are compared."""

    @property
    def whole_objective(self) -> Literal["clm", "mlm", "clm+mlm", "none", ""]:
        """The objective of its whole training; CLM continued with MLM counts as both."""
        return "clm+mlm" if self.objective == "clm" and self.cpt_steps else self.objective

    @property
    def look(self) -> str:
        """The objective whose look it has in tables and figures (`figures.look_of`): of a curriculum that
        `whole_objective` does not name, the first one unless that is CLM or MLM."""
        if not (self.curriculum and self.objective):
            return self.whole_objective
        first = next((name for name, _ in self.phases), "")
        rare = (name for name, facts in OBJECTIVES.items() if facts.title == first and name not in ("clm", "mlm"))
        return next(rare, "curriculum")

    @property
    def told_objective(self) -> str:
        """Its whole training in words: `CLM → MLM`, `MLM with 25 % CLM`."""
        return self.curriculum or OBJECTIVE_NAMES[self.whole_objective]

    @property
    def told_masks(self) -> str:
        """The masking ratio in percent: `40`, or `masks`; empty without MLM."""
        return self.masks or str(self.mask_percent or "")

    @property
    def clm_share(self) -> float:
        return self.clm_steps / max(self.pretrain_steps, 1)

    @property
    def budget(self) -> int:
        """The steps of its own training, excluding its parent's."""
        return self.cpt_steps or self.pretrain_steps

    @property
    def block(self) -> tuple[str | int, ...]:
        """A key that is equal for models to compare: the same size, steps, and decay or budget class."""
        decay = "undecayed" if self.setup == "efficiency" else self.budget_class
        return self.size, self.pretrain_steps + self.cpt_steps, decay


@dataclass(frozen=True)
class Result:
    """The test score of an arm on a dataset at the rate that validation data chose."""

    arm: ReportArm
    family: str
    """The code of a family. Empty: a mean over all tasks. `OT`: only the task's name is known."""
    dataset: str
    metric: Metric
    samples: Sequence[float] = ()
    """The score of each fine-tuning seed of each pretraining seed; () if only mean and interval are known."""
    by_rate: Mapping[float, Sequence[float]] | None = None
    """Learning rate → the test score of each seed; nan if the training diverged."""
    seeds: Sequence[int] = ()
    """The fine-tuning seed of each sample; () for 0, 1, …"""
    pretraining_seeds: Sequence[int] = ()
    """The pretraining seed of each sample; () for a single pretraining."""
    summary: Interval | None = None
    """Mean and interval if samples are unknown: published (mean ± 1.96·s/√num), or averaged over datasets with
    different seeds (`contrasts.average`)."""
    examples: KeptExamples | None = field(default=None, repr=False, compare=False)
    """The contribution of each test example to each sample, read when first needed; None if unknown."""
    predicted: KeptExamples | None = field(default=None, repr=False, compare=False)
    """The predictions behind `samples` if their metric is not the task's own; then `examples` is None."""
    choice: choosing.RateChoice | None = field(default=None, repr=False, compare=False)
    """The rates among which validation chose; None if unknown, or if each pretraining seed chose its own rate."""
    measure: str = ""
    """The name of the metric, such as mcc; empty if unknown."""
    num_runs: int | None = None
    """The number of fine-tunings over all rates and seeds, including diverged ones; None if unknown."""
    num_diverged: int = 0
    """The number of seeds that diverged at the chosen rate."""
    rate: float | None = None
    """The rate that all seeds of one pretraining choose together; None if pooled or unknown."""
    cells: tuple["Result", ...] = field(default=(), repr=False, compare=False)
    """The measured results behind an average."""
    cohort: Mapping[str, np.ndarray] = field(default_factory=dict, repr=False, compare=False)
    """Name of an arm → its `repeated`, for every trained arm with the same seeds on this dataset, this one included."""

    @cached_property
    def interval(self) -> Interval:
        """The mean and its 95 % interval by Student's t over `repeated`."""
        return self.summary or mean_interval(self.repeated)

    @cached_property
    def repeated(self) -> np.ndarray:
        """The independent repetitions: `samples`, or with several pretraining seeds the mean of each one's samples."""
        return repetitions(self.samples, self.pretraining_seeds)

    @property
    def mean(self) -> float:
        return self.interval.value

    @property
    def num(self) -> int:
        """The number of samples, over all pretraining seeds."""
        return len(self.samples) or self.interval.num

    @property
    def unit(self) -> GapUnit:
        """The unit of a difference from another score."""
        return "nats" if (self.family, self.dataset) == ("", LOSS) else "points"

    @property
    def parts(self) -> tuple["Result", ...]:
        """The results on datasets behind an average, or the result itself."""
        return self.cells or (self,)

    @property
    def num_pretrainings(self) -> int:
        """The number of pretraining seeds; for an average, that of the dataset with the fewest."""
        return min(len(set(part.pretraining_seeds)) or 1 for part in self.parts)

    @property
    def chosen_rates(self) -> list[float]:
        """The rate of each sample; empty if unknown."""
        kept = self.examples or self.predicted
        return [score.config.learning_rate for score in kept.scores] if kept else []

    def count_degenerate(self) -> int:
        """Count the seeds that predict the same for all examples; 0 without kept predictions."""
        kept = self.examples or self.predicted
        return kept.read().num_degenerate if kept else 0

    def is_degenerate(self) -> bool:
        """Tell whether every seed predicts the same for all examples, on every dataset."""
        return all(part.count_degenerate() == part.num for part in self.parts)

    @property
    def std(self) -> float:
        """The standard deviation of all samples (over n-1); a published half-width of 0.00 % counts as 0.005 %."""
        if self.samples:
            return float(np.std(self.samples, ddof=1)) if self.num > 1 else math.nan
        return max(self.interval.half_width, PUBLISHED_DIGIT / 2) * math.sqrt(self.num) / NORMAL_QUANTILE


Over = Literal["seeds", "tasks"]
"""The repetitions of a test; over tasks, each task counts as a seed."""

SCORE_DECIMALS = 2
"""The decimals of a score in percent and of a difference in points, as the paper has them."""


@dataclass(frozen=True)
class ResultSet:
    """Results, at most one for each (setup, arm, family, dataset, metric), with the plan of their study."""

    results: Sequence[Result]
    planned_tasks: Mapping[str, str] = field(default_factory=dict)
    """Task of the study → code of its family; an average needs all of them."""
    planned_runs: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """(arm, task) → the planned number of fine-tunings, over all rates and seeds."""
    decimals: int = SCORE_DECIMALS
    """The decimals of scores in tables."""
    unit: str = "%"
    """The unit of scores in tables and figures; empty for losses in a table of results."""
    over: Over = "seeds"
    """The repetitions of all tests."""

    @cached_property
    def scores(self) -> dict[str, dict[str, Result]]:
        """Model → its scores by the primary metric, by dataset, code of a family (its average) or `ALL_TASKS`. Each
        model has the arm of its first comparison."""
        scores: dict[str, dict[str, Result]] = {}
        for result in self.results:
            if result.metric == self.primary_metric:
                by_name = scores.setdefault(result.arm.name, {})
                arm = next(iter(by_name.values()), result).arm
                name = result.family if result.dataset == AVERAGE else result.dataset
                by_name.setdefault(name, replace(result, arm=arm))
        return scores

    @property
    def models(self) -> list[ReportArm]:
        """Every model once, as the arm of its first comparison."""
        return [next(iter(scores.values())).arm for scores in self.scores.values()]

    @cached_property
    def arms(self) -> list[ReportArm]:
        """Every arm, in order of appearance."""
        return list(dict.fromkeys(result.arm for result in self.results))

    @property
    def is_foreign(self) -> bool:
        """Whether the training of all models is unknown, as in a table of results."""
        return not any(arm.objective for arm in self.arms)

    @cached_property
    def sizes(self) -> list[str]:
        """The sizes of all arms, smallest first (`610M`, `1b`); names without a number of parameters come last."""
        return sorted(dict.fromkeys(arm.size for arm in self.arms), key=num_parameters)

    @cached_property
    def usual_mask(self) -> int | None:
        """The masking ratio (percent) at which objectives are compared (`reference_mask`)."""
        return reference_mask(self.arms)

    @cached_property
    def metrics(self) -> list[Metric]:
        return [metric for metric in get_args(Metric) if any(r.metric == metric for r in self.results)]

    @property
    def primary_metric(self) -> Metric:
        """The metric of figures and verdicts: standard, or the paper's if there are no other scores."""
        return next(iter(self.metrics), "standard")

    @cached_property
    def families(self) -> list[str]:
        return [family for family in FAMILY_NAMES if any(r.family == family for r in self.results)]

    @cached_property
    def datasets(self) -> dict[str, list[str]]:
        """Family → its datasets with the primary metric in order of appearance, without the average."""
        names: dict[str, dict[str, None]] = {family: {} for family in self.families}
        for result in self.results:
            if result.metric == self.primary_metric and result.family and result.dataset != AVERAGE:
                names[result.family][result.dataset] = None
        return {family: [*of_family] for family, of_family in names.items()}

    def select(
        self, family: str | None = None, dataset: str | None = None, metric: str | None = None, **arm: Any
    ) -> "ResultSet":
        """Select the results with these values; `arm` has fields of `ReportArm`, such as `setup="ratio"`."""
        values = {"family": family, "dataset": dataset, "metric": metric}
        chosen = []
        for result in self.results:
            is_wanted = all(value in (None, getattr(result, key)) for key, value in values.items())
            if is_wanted and all(getattr(result.arm, key) == value for key, value in arm.items()):
                chosen.append(result)
        return replace(self, results=tuple(chosen))


def select_rate(
    scores: ScoreSet,
    model: str,
    task: str,
    metric: str | None = None,
    *,
    is_papers_way: bool = False,
    peers: Iterable[Score] = (),
) -> Result:
    """Choose the learning rates of a model (a name in `scores.models`) on a task, and take the scores at these rates.

    Args:
        metric: the metric of both the choice and the result; None: the task's own.
        is_papers_way: whether all seeds choose one rate together and are tested at that rate, as in the paper.
        peers: scores of other pretraining seeds on the task; they choose the rate of a single fine-tuning seed.

    Raises `InputError` if there are no such scores, or if no seed finished at its chosen rate.
    """
    cells = scores.cells.get((model, task))
    if cells is None:
        raise InputError(f"no scores of {model} on task '{task}'")
    cells = dict(sorted(cells.items()))
    metric = metric or next(iter(cells.values())).metric
    # 1. The scores on validation data, by rate and seed, and the rate that all seeds choose together.
    by_rate: dict[float, dict[int, float | None]] = defaultdict(dict)
    for (rate, seed), score in cells.items():
        by_rate[rate][seed] = choosing.validation_of(score, metric)
    try:
        best = choosing.choose_rate({rate: [*by_seed.values()] for rate, by_seed in by_rate.items()})
    except InputError as error:
        raise InputError(f"{model} on {task}: {error}") from None
    # 2. The rate of each seed. Only a rate at which a seed survived, and no more diverged, could be chosen with other
    # seeds.
    num_lost = {rate: [*by_seed.values()].count(None) for rate, by_seed in by_rate.items()}
    rivals = {rate: own for rate, own in by_rate.items() if num_lost[rate] == num_lost[best] < len(own)}
    test = {point: score.metrics["test"][metric] for point, score in cells.items() if not score.diverged}
    peers = [*peers] if len({seed for _, seed in test}) == 1 else []
    by_peers = choosing.validation_by_rate(peers, metric)
    rates = dict.fromkeys(by_rate[best], best) if is_papers_way else choosing.choose_for_each_seed(rivals, by_peers)
    # 3. The scores at these rates.
    points = [(rate, seed) for seed, rate in rates.items() if (rate, seed) in cells]
    chosen = [cells[point] for point in points if point in test]
    if not chosen:
        raise InputError(f"{model} on {task}: no seed finished at the rate that the others chose; finish the grid")
    survivors = [score for score in [*cells.values(), *peers] if not score.diverged]
    scores_at = {rate: [score for score in survivors if score.config.learning_rate == rate] for rate in rivals}
    grid_rates, grid_seeds = scores.grids[task]
    kept = KeptExamples(tuple(chosen))
    is_own = metric == chosen[0].metric
    way: Metric = "paper" if is_papers_way else "standard"
    return replace(
        Result(ReportArm(model), "", task, way, measure=metric, num_runs=len(cells), rate=best),
        samples=tuple(score.metrics["test"][metric] for score in chosen),
        by_rate={rate: tuple(test.get((rate, seed), math.nan) for seed in grid_seeds) for rate in grid_rates},
        seeds=tuple(score.config.seed for score in chosen),
        examples=kept if is_own else None,  # contributions of examples exist only for the task's own metric
        predicted=None if is_own else kept,
        choice=choosing.RateChoice(scores_at, metric) if is_own else None,
        num_diverged=len(points) - len(chosen),
    )


def with_cohorts(results: Iterable[Result]) -> tuple[Result, ...]:
    """Give each result its cohort: the scores of all results with its dataset, metric and seeds. Leave out of cohorts
    scores that do not vary, and scores of random weights beside trained arms, because they show no noise."""
    results = tuple(results)
    has_trained = any(result.arm.objective != "none" for result in results)
    cohorts: dict[Any, dict[str, np.ndarray]] = defaultdict(dict)
    keys = []
    for result in results:
        keys.append((result.dataset, result.metric, tuple(result.seeds), tuple(result.pretraining_seeds)))
        is_untrained = has_trained and result.arm.objective == "none"
        if len(result.samples) > 1 and np.ptp(result.repeated) > 0 and not is_untrained:
            cohorts[keys[-1]][result.arm.name] = result.repeated
    return tuple(replace(result, cohort=cohorts[key]) for result, key in zip(results, keys, strict=True))


def pool(results: Sequence[Result]) -> Result:
    """Pool the results of an arm's pretraining seeds on a dataset. If there are several, each must have
    `pretraining_seeds`."""
    first = results[0]
    if len(results) == 1:
        return first
    assert all(len(result.pretraining_seeds) == len(result.samples) > 0 for result in results)

    joined: dict[str, Any] = {}
    for name in ("samples", "seeds", "pretraining_seeds"):
        joined[name] = tuple(chain(*(getattr(result, name) for result in results)))
    tables = [result.by_rate or {} for result in results]
    by_rate = {}
    if all(table.keys() == tables[0].keys() for table in tables):
        by_rate = {rate: tuple(chain(*(table[rate] for table in tables))) for rate in tables[0]}
    for name in ("examples", "predicted"):
        kept = [getattr(result, name) for result in results]
        joined[name] = KeptExamples(tuple(chain(*(examples.scores for examples in kept)))) if all(kept) else None
    return replace(
        first,
        **joined,
        by_rate=by_rate,
        rate=None,
        num_runs=sum(result.num_runs or 0 for result in results) or None,
        num_diverged=sum(result.num_diverged for result in results),
        # Pretraining seeds with one fine-tuning seed each choose one rate together.
        choice=first.choice if all(result.num == 1 for result in results) else None,
    )


class Flaws(NamedTuple):
    """Sentences about the flaws of results."""

    gaps: list[str]
    """What `list_gaps` lists."""
    averages: list[str]
    """What `check_averages` counts."""
    edges: list[str]
    """What `tell_edges` tells."""


def find_flaws(results: ResultSet) -> Flaws:
    """List the flaws of results: scores that are missing, averages that differ, rates at the edge of their grid."""
    return Flaws(list_gaps(results), check_averages(results), [*tell_edges(results)])


def list_gaps(results: ResultSet) -> list[str]:
    """List what results lack: for each arm, the datasets that another arm of its comparison has; and for each result
    with unusable predictions, the reason."""
    lines = []
    for metric, (setup, words) in itertools.product(results.metrics, read_words()["comparisons"].items()):
        compared = results.select(metric=metric, setup=setup)
        for family, (name, scores) in itertools.product(compared.families, compared.scores.items()):
            if lost := [dataset for dataset in compared.datasets[family] if dataset not in scores]:
                lines.append(f"{words['name']} · {name} · {family}: {', '.join(lost)} ({metric} metric)")
    for result in results.results:
        if result.examples and (why := result.examples.read().why_unknown):
            lines.append(f"{result.arm.name} on {result.dataset}: test examples are not accounted for: {why}")
    return list(dict.fromkeys(lines))


def tell_edges(results: ResultSet) -> Iterator[str]:
    """Yield a line about the tasks and arms where most seeds chose the lowest or the highest of several rates; none if
    there are no such arms."""
    edges: dict[str, dict[str, float]] = defaultdict(dict)
    for score in chain(*(scores.values() for scores in results.scores.values())):
        grid, rates = sorted(score.by_rate or ()), score.chosen_rates
        for word, rate in [("highest", grid[-1]), ("lowest", grid[0])] if len(grid) > 1 else []:
            if (share := rates.count(rate) / max(len(rates), 1)) > 0.5:
                told = f"{score.arm.name} in {rates.count(rate)} of {len(rates)} runs"
                edges[f"on {score.dataset}, the {word} ({show_rate(rate)}) was chosen for"][told] = share
    if edges:
        lines = [f"{where} {first_of(sorted(arms, key=lambda told: -arms[told]))}" for where, arms in edges.items()]
        yield f"Some chosen rates lie at the edge of the grid, so a better one may lie outside it: {'; '.join(lines)}."


def check_averages(results: ResultSet) -> list[str]:
    """Return a line that counts the averages that equal the mean of their datasets, up to rounding to 0.01 %, unless
    every family has one dataset; and a line for each average that does not."""
    lines, num_averages = [], 0
    for metric, (setup, words) in itertools.product(results.metrics, read_words()["comparisons"].items()):
        of_metric = results.select(metric=metric)
        by_model = of_metric.select(setup=setup).scores
        for (name, scores), (family, datasets) in itertools.product(by_model.items(), of_metric.datasets.items()):
            num_averages += family in scores
            if scores.keys() >= {family, *datasets}:
                mean, recomputed = scores[family].mean, float(np.mean([scores[dataset].mean for dataset in datasets]))
                if abs(recomputed - mean) > PUBLISHED_DIGIT * (1 + 1e-9):
                    told = f"{100 * mean:.2f}, but the mean of its datasets is {100 * recomputed:.2f}"
                    lines.append(f"{words['name']} · {name} · {family}: {told}")
    has_averages = any(len(datasets) > 1 for datasets in results.datasets.values())
    num_equal = num_averages - len(lines)
    right = f"{num_equal} of {num_averages} averages equal the mean over their datasets, up to rounding."
    return [right, *lines] if has_averages else lines


def reference_mask(arms: Iterable[ReportArm]) -> int | None:
    """Return the masking ratio (percent) of most arms, at which objectives are compared; None without MLM."""
    masked = [arm for arm in arms if arm.mask_percent is not None]
    plain = [arm for arm in masked if arm.is_plain] or masked
    counts = Counter({arm.name: arm.mask_percent for arm in plain}.values())
    return max(counts, key=lambda mask: (counts[mask], mask)) if counts else None


def num_parameters(size: str) -> float:
    try:
        return float(size[:-1]) * {"k": 1e3, "m": 1e6, "b": 1e9}[size[-1:].lower()]
    except (KeyError, ValueError):
        return math.inf
