"""The tidy form of scores that tables, figures and verdicts read, for the paper's published scores and for our studies.

A result is one cell: an arm (a trained model in its place in a comparison) on a dataset. Scores are shares, 0 to 1.
"""

import csv
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import resources
from typing import Any, Literal

import numpy as np

from biphase.report.statistics import Difference, mean_interval, t_test

Family = Literal["SC", "TC", "QA", "IR"]
Metric = Literal["standard", "paper"]

FAMILIES: dict[str, str] = {
    "SC": "sequence classification",
    "TC": "token classification",
    "QA": "question answering",
    "IR": "retrieval",
}
SETUPS: dict[str, str] = {
    "objective": "objective and masking ratio",
    "efficiency": "undecayed checkpoints on the way",
    "ratio": "CLM then MLM at a fixed budget",
    "adapted": "masking ratio after CLM",
    "cpt": "continued pretraining with MLM",
    "control": "beside random weights",
    "other": "further curricula",
}
"""The comparisons. The paper's tables show the first three and `cpt`; `adapted` is in one of its figures; `control` is
every final model of a network that was also fine-tuned without any pretraining."""

MEASURES: dict[str, dict[str, str]] = {
    "standard": {"SC": "accuracy", "TC": "F1 of entities", "QA": "F1 of answers", "IR": "nDCG@10"},
    "paper": {
        "SC": "accuracy",
        "TC": "macro-F1 per sentence, O included",
        "QA": "F1 of token positions, first answer",
        "IR": "nDCG@10, ideal order over the retrieved",
    },
}

AVERAGE = "Average"
"""The name that stands for the mean over the datasets of a family."""

NORMAL_QUANTILE = 1.96
PUBLISHED_DIGIT = 1e-4
"""The paper prints hundredths of a percent."""


STABILITY_RATES = (1e-5, 1e-4)
"""Between these the paper measures how much scores depend on the fine-tuning rate."""


@dataclass(frozen=True)
class ReportArm:
    """A trained model in its place in one comparison; one that stands in several is given once for each."""

    name: str
    setup: str
    """A key of `SETUPS`. `efficiency` says that the checkpoint is undecayed."""
    size: str
    objective: Literal["clm", "mlm", "clm+mlm", "none"]
    """Of the pretraining from scratch; what continues from it is MLM. `none`: random weights."""
    mask_percent: int | None
    """None without MLM. With `cpt_steps` above 0: of the continued pretraining."""
    pretrain_steps: int
    clm_steps: int
    mlm_steps: int
    cpt_steps: int = 0
    parent: str | None = None
    """The name of the arm that this one continues, or on whose way it lies."""
    flops: float | None = None
    """Of all its training, its parents' included."""

    @property
    def clm_share(self) -> float:
        return self.clm_steps / self.pretrain_steps


@dataclass(frozen=True)
class Result:
    """The test score of an arm on a dataset at the rate that validation data chose."""

    arm: ReportArm
    family: Family
    dataset: str
    metric: Metric
    mean: float
    half_width: float
    """Of the 95 % interval: Student's t over `samples`; where those are not known, the paper's 1.96·s/√num."""
    samples: tuple[float, ...]
    """One for each seed, in the order of seeds, the same seeds for every arm; () where only the mean ± is known."""
    by_rate: Mapping[float, tuple[float, ...]] | None
    """Test scores of the seeds at every learning rate, nan where training diverged."""
    num: int
    """Of fine-tuning seeds."""

    @property
    def std(self) -> float:
        """Over seeds (n-1). A published half-width of 0.00 counts as 0.005, the largest that is printed so."""
        if self.samples:
            return float(np.std(self.samples, ddof=1)) if self.num > 1 else math.nan
        return max(self.half_width, PUBLISHED_DIGIT / 2) * math.sqrt(self.num) / NORMAL_QUANTILE


@dataclass(frozen=True)
class ResultSet:
    """Results, at most one for each (setup, arm, family, dataset, metric)."""

    results: tuple[Result, ...]

    def __post_init__(self) -> None:
        assert len(self.cells) == len(self.results), "a cell is there twice"

    @cached_property
    def cells(self) -> dict[tuple[str, str, str, str, str], Result]:
        return {(r.arm.setup, r.arm.name, r.family, r.dataset, r.metric): r for r in self.results}


def measured(
    arm: ReportArm,
    family: Family,
    dataset: str,
    metric: Metric,
    samples: Sequence[float],
    by_rate: Mapping[float, Sequence[float]] | None = None,
) -> Result:
    """The result of a finished study: mean and Student's interval over the seeds' test scores at the chosen rate."""
    interval = mean_interval(samples)
    rates = None if by_rate is None else {rate: tuple(by_rate[rate]) for rate in sorted(by_rate)}
    return Result(arm, family, dataset, metric, interval.mean, interval.half_width, tuple(samples), rates, interval.num)


def read_reference() -> ResultSet:
    """The paper's 800 published cells, averages included, in the order of its tables (`reference/SOURCE.md`)."""
    flops = {row["arm"]: float(row["flops"]) for row in read_reference_rows("paper_flops.csv")}
    return ResultSet(tuple(read_cell(row, flops) for row in read_reference_rows("paper_scores.csv")))


def read_reference_rows(name: str) -> Iterable[dict[str, str]]:
    text = (resources.files("biphase.report") / "reference" / name).read_text(encoding="utf-8")
    return csv.DictReader(text.splitlines())


def read_cell(row: Mapping[str, str], flops: Mapping[str, float]) -> Result:
    arm = ReportArm(
        name="",
        setup=row["setup"],
        size=row["size"],
        objective=row["objective"].lower(),  # type: ignore[arg-type]
        mask_percent=int(row["mask_percent"]) if row["mask_percent"] else None,
        pretrain_steps=int(row["pretrain_steps"]),
        clm_steps=int(row["clm_steps"]),
        mlm_steps=int(row["mlm_steps"]),
        cpt_steps=int(row["cpt_steps"] or 0),
    )
    name, parent = published_name(arm)
    return Result(
        arm=replace(arm, name=name, parent=parent, flops=flops[name]),
        family=row["family"],  # type: ignore[arg-type]
        dataset=row["dataset"],
        metric="paper",
        mean=float(row["mean"]) / 100,
        half_width=float(row["ci95"]) / 100,
        samples=(),
        by_rate=None,
        num=5,
    )


def published_name(arm: ReportArm) -> tuple[str, str | None]:
    """What the paper's authors call a model on the hub, and its parent: `610m-clm-3k-mlm40-12k`, None."""
    size, steps = arm.size.lower(), short_steps(arm.pretrain_steps)
    start = "clm" if arm.clm_steps else f"mlm{arm.mask_percent}"
    if arm.setup == "efficiency":
        return f"{size}-{start}-42k-{arm.pretrain_steps}", f"{size}-{start}-42k"
    if arm.cpt_steps:
        total = short_steps(arm.pretrain_steps + arm.cpt_steps)
        return f"{size}-{start}-dec{steps}-mlm{arm.mask_percent}-{total}", f"{size}-{start}-{steps}"
    if arm.objective == "clm+mlm":
        return f"{size}-clm-{short_steps(arm.clm_steps)}-mlm{arm.mask_percent}-{steps}", None
    return f"{size}-{start}-{steps}", None


def short_steps(steps: int) -> str:
    """`12000` → `12k`, `950` → `950`."""
    return f"{steps // 1000}k" if steps >= 1000 and steps % 1000 == 0 else f"{steps:,}"


def place_arms(arms: Iterable[ReportArm]) -> tuple[ReportArm, ...]:
    """The arms of a study, each in every comparison of the paper in which it has a place; what has none is `other`.

    An arm that comes with the setup `efficiency`, `control` or `other` stays there. Of the rest, `objective` has those
    of one objective at the largest budget of their size; `ratio`, for every budget with CLM+MLM at the reference mask,
    these beside CLM alone and MLM alone; `adapted`, CLM+MLM of the same steps at two masking ratios or more; `cpt`,
    what continues from another arm, and that arm; `control`, all final models of a size that has random weights.
    """
    arms = tuple(arms)
    mask = reference_mask(arms)
    whole = [arm for arm in arms if arm.setup not in ("efficiency", "control", "other")]
    controlled = {arm.size for arm in arms if arm.setup == "control"}
    scratch = [arm for arm in whole if not arm.cpt_steps]
    largest = {arm.size: max(a.pretrain_steps for a in scratch if a.size == arm.size) for arm in scratch}
    both = [arm for arm in scratch if arm.objective == "clm+mlm"]
    budgets = {(arm.size, arm.pretrain_steps) for arm in both if arm.mask_percent == mask}
    ratios = Counter((arm.size, arm.clm_steps, arm.mlm_steps) for arm in both)
    parents = {arm.parent for arm in whole if arm.cpt_steps}

    def setups(arm: ReportArm) -> list[str]:
        if arm not in whole:
            return [arm.setup, *["control"] * (arm.setup == "other" and arm.size in controlled)]
        is_scratch = not arm.cpt_steps
        found = {
            "objective": is_scratch and arm.objective != "clm+mlm" and arm.pretrain_steps == largest[arm.size],
            "ratio": is_scratch and (arm.size, arm.pretrain_steps) in budgets and arm.mask_percent in (None, mask),
            "adapted": arm in both and ratios[arm.size, arm.clm_steps, arm.mlm_steps] > 1,
            "cpt": not is_scratch or arm.name in parents,
            "control": arm.size in controlled,
        }
        return [setup for setup, is_there in found.items() if is_there] or ["other"]

    return tuple(replace(arm, setup=setup) for arm in arms for setup in setups(arm))


def reference_mask(arms: Iterable[ReportArm]) -> int | None:
    """The masking ratio (percent) of most models with MLM: the one at which objectives are compared; None without."""
    models = {arm.name: arm.mask_percent for arm in arms if arm.mask_percent is not None}
    counts = Counter(models.values())
    return max(counts, key=lambda mask: (counts[mask], mask)) if counts else None


def with_averages(results: Iterable[Result]) -> ResultSet:
    """Add the average over the datasets of each family, where an arm has all of those that any arm has.

    Over samples where all datasets have the same number of seeds: seed by seed, so that the interval is that of the
    average. Else means count as independent, and the half-width is the normal one. Averages that are there stay.
    """
    given = ResultSet(tuple(results))
    made = [
        average(cells)
        for metric in metrics(given)
        for family in families(given)
        for arm in arms_of(given, family=family, metric=metric)
        if find(given, arm, family, AVERAGE, metric) is None
        for cells in [dataset_cells(given, arm, family, metric)]
        if None not in cells
    ]
    return ResultSet((*given.results, *made))


def average(cells: Sequence[Result]) -> Result:
    """Of the datasets of a family, for one arm and metric."""
    first = cells[0]
    if first.samples and len({len(cell.samples) for cell in cells}) == 1:
        means_S = np.mean([cell.samples for cell in cells], axis=0)
        return measured(first.arm, first.family, AVERAGE, first.metric, means_S.tolist())
    mean = float(np.mean([cell.mean for cell in cells]))
    error = math.sqrt(sum(cell.std**2 / cell.num for cell in cells)) / len(cells)
    num = min(cell.num for cell in cells)
    return Result(first.arm, first.family, AVERAGE, first.metric, mean, NORMAL_QUANTILE * error, (), None, num)


def select(
    results: ResultSet, family: str | None = None, dataset: str | None = None, metric: str | None = None, **arm: Any
) -> ResultSet:
    """Results with these values, where given; `arm` names fields of `ReportArm`, such as `setup="ratio"`."""
    wanted = {"family": family, "dataset": dataset, "metric": metric}
    chosen = [
        result
        for result in results.results
        if all(value is None or getattr(result, key) == value for key, value in wanted.items())
        and all(getattr(result.arm, key) == value for key, value in arm.items())
    ]
    return ResultSet(tuple(chosen))


def find(results: ResultSet, arm: ReportArm, family: str, dataset: str, metric: str) -> Result | None:
    return results.cells.get((arm.setup, arm.name, family, dataset, metric))


def metrics(results: ResultSet) -> list[Metric]:
    return [metric for metric in MEASURES if any(r.metric == metric for r in results.results)]  # type: ignore[misc]


def primary_metric(results: ResultSet) -> Metric:
    """What figures and verdicts are about: standard metrics where there are any, else the paper's."""
    return metrics(results)[0]


def families(results: ResultSet) -> list[Family]:
    return [family for family in FAMILIES if any(r.family == family for r in results.results)]  # type: ignore[misc]


def datasets_of(results: ResultSet, family: str, metric: str) -> list[str]:
    """In the order in which they come; the average is none of them."""
    chosen = select(results, family, metric=metric).results
    return list(dict.fromkeys(r.dataset for r in chosen if r.dataset != AVERAGE))


def dataset_cells(results: ResultSet, arm: ReportArm, family: str, metric: str) -> list[Any]:
    """The results of an arm on every dataset of a family; None where one is missing."""
    return [find(results, arm, family, name, metric) for name in datasets_of(results, family, metric)]


def arms_of(results: ResultSet, family: str | None = None, metric: str | None = None, **arm: Any) -> list[ReportArm]:
    """The arms with a result among those selected, in the order in which they come."""
    return list(dict.fromkeys(result.arm for result in select(results, family, metric=metric, **arm).results))


def sizes_of(arms: Iterable[ReportArm]) -> list[str]:
    """Smallest first; sizes whose names are no number of parameters (`610M`, `1b`) come last, in the order given."""
    return sorted(dict.fromkeys(arm.size for arm in arms), key=num_parameters)


def num_parameters(size: str) -> float:
    try:
        return float(size[:-1]) * {"k": 1e3, "m": 1e6, "b": 1e9}[size[-1:].lower()]
    except (KeyError, ValueError):
        return math.inf


def objective_pairs(results: ResultSet) -> list[tuple[ReportArm, ReportArm]]:
    """(CLM, MLM at the reference ratio) for every size that has both, smallest first."""
    mask = reference_mask(arms_of(results))
    arms = arms_of(results, setup="objective")
    clm = {arm.size: arm for arm in arms if arm.objective == "clm"}
    mlm = {arm.size: arm for arm in arms if arm.objective == "mlm" and arm.mask_percent == mask}
    return [(clm[size], mlm[size]) for size in sizes_of(arms) if size in clm and size in mlm]


def family_score(results: ResultSet, arm: ReportArm, family: str) -> Result | None:
    return find(results, arm, family, AVERAGE, primary_metric(results))


def scores_by_rate(result: Result | None, rates: Sequence[float] | None = None) -> np.ndarray | None:
    """[rates, seeds] test scores at the rates given, by default those of `stability_rates`.

    None where they are not known, or not for the same number of seeds at every rate.
    """
    if result is None or result.by_rate is None:
        return None
    rates = stability_rates(sorted(result.by_rate)) if rates is None else rates
    rows = [result.by_rate[rate] for rate in rates]
    return np.array(rows, dtype=np.float64) if len({len(row) for row in rows}) == 1 else None


def stability_rates(rates: Sequence[float]) -> list[float]:
    low, high = STABILITY_RATES
    inside = [rate for rate in rates if low * (1 - 1e-9) <= rate <= high * (1 + 1e-9)]
    return inside if len(inside) > 1 else list(rates)


def missing_cells(results: ResultSet) -> list[str]:
    """A line for every arm that lacks datasets which another arm of its comparison has."""
    lines = []
    for metric in metrics(results):
        for setup in SETUPS:
            part = select(results, metric=metric, setup=setup)
            for family in families(part):
                names = datasets_of(part, family, metric)
                for arm in arms_of(part):
                    lost = [name for name in names if find(part, arm, family, name, metric) is None]
                    if lost:
                        lines.append(f"{SETUPS[setup]} · {arm.name} · {family}: {', '.join(lost)} ({metric} metric)")
    return lines


def disagreeing_averages(results: ResultSet) -> list[str]:
    """A line for every average that is not the mean of its datasets, up to the rounding of both to 0.01 %."""
    lines = []
    for result in select(results, dataset=AVERAGE).results:
        cells = dataset_cells(results, result.arm, result.family, result.metric)
        if None in cells:
            continue
        recomputed = float(np.mean([cell.mean for cell in cells]))
        if abs(recomputed - result.mean) > PUBLISHED_DIGIT * (1 + 1e-9):
            where = f"{SETUPS[result.arm.setup]} · {result.arm.name} · {result.family}"
            lines.append(f"{where}: {100 * result.mean:.2f}, but its datasets give {100 * recomputed:.2f}")
    return lines


@dataclass(frozen=True)
class Contrast:
    """A weighted sum of mean scores, such as a difference, with what is needed to test it."""

    estimate: float
    error: float
    """Its standard error; nan where one of the scores has no spread (one seed)."""
    degrees: float
    """Of freedom, of the t-distribution."""
    size: float
    """Of the scores behind it, to tell a spread from rounding."""
    test: Literal["paired t", "Welch", "jackknife t"]
    num: int
    """Of seeds behind each score, at least."""

    def against(self, bound: float = 0.0) -> Difference:
        """Estimate, 95 % interval, and two-sided p-value of "it equals `bound`"."""
        tested = t_test(self.estimate - bound, self.error, self.degrees, 0.95, self.size)
        return replace(tested, mean=self.estimate, low=tested.low + bound, high=tested.high + bound)


def contrast(terms: Iterable[tuple[float, Result]]) -> Contrast:
    """Σ weight · mean over different results.

    Paired by seed (Student's t over the sum of each seed) where every result has scores of the same number of seeds.
    Else means count as independent, from their standard deviations alone (Welch's test, degrees by Satterthwaite).
    """
    weights, results = zip(*terms, strict=True)
    numbers = {len(result.samples) for result in results}
    num = min(result.num for result in results)
    size = max(abs(result.mean) for result in results)
    estimate = float(np.dot(weights, [result.mean for result in results]))
    if len(numbers) == 1 and numbers != {0}:
        sums_S = np.dot(weights, np.array([result.samples for result in results]))
        error = float(sums_S.std(ddof=1)) / math.sqrt(num) if num > 1 else math.nan
        return Contrast(estimate, error, num - 1, size, "paired t", num)
    if num < 2:
        return Contrast(estimate, math.nan, math.nan, size, "Welch", num)
    parts = [(w * r.std) ** 2 / r.num for w, r in zip(weights, results, strict=True)]
    variance = sum(parts)
    denominator = sum(part**2 / (result.num - 1) for part, result in zip(parts, results, strict=True))
    degrees = variance**2 / denominator if denominator else math.nan
    return Contrast(estimate, math.sqrt(variance), degrees, size, "Welch", num)


def difference(a: Result, b: Result) -> Contrast:
    """Mean of `a` minus mean of `b`."""
    return contrast([(1.0, a), (-1.0, b)])
