"""The cells of the arms of `grid.py` → medians, ratios, test scores with intervals; and these as a table."""

import statistics
from collections.abc import Sequence
from typing import Any

from grid_job import METRICS, Grid
from measuring import Found, medians_of, summarize_ratios


def summarize_cells(what: str, rounds: list[Found], grid: Grid) -> dict[str, Any]:
    """Medians over the rounds; `seconds` of all slots together, by stage; test scores of the first round."""
    whole = [found for found in rounds if "error" not in found]
    if not whole:
        return {"what": what, "error": rounds[0]["error"]}
    medians = medians_of(whole, ("cells_per_hour", "wall_seconds", "cpu_seconds"))
    seconds = {stage: statistics.median(found["seconds"][stage] for found in whole) for stage in whole[0]["seconds"]}
    return {
        "what": what,
        "rounds": len(whole),
        "slots": whole[0]["slots"],
        **medians,
        "seconds": seconds,
        "test_scores": {
            task: {f"{rate:g}": interval_of_mean(scores_of(whole[0], task, rate)) for rate in grid.learning_rates}
            for task in grid.tasks
        },
    }


def scores_of(found: Found, task: str, rate: float) -> list[float]:
    """Test scores in %, by seed."""
    chosen = [cell for cell in found["cells"] if (cell["task"], cell["learning_rate"]) == (task, rate)]
    return [100 * cell["scores"]["test"] for cell in sorted(chosen, key=lambda cell: cell["seed"])]


def compare(pairs: list[tuple[Found, Found]]) -> dict[str, float]:
    """Our cells per hour over theirs; `by_work`: were there nothing but training and evaluation, as in long cells."""

    def work_seconds(found: Found) -> float:
        return (found["seconds"]["train"] + found["seconds"]["evaluate"]) / found["slots"]

    rates = [ours["cells_per_hour"] / theirs["cells_per_hour"] for ours, theirs in pairs]
    by_cpu = [theirs["cpu_seconds"] / ours["cpu_seconds"] for ours, theirs in pairs]
    by_work = [work_seconds(theirs) / work_seconds(ours) for ours, theirs in pairs]
    return summarize_ratios(rates, by_cpu) | {"by_work": statistics.median(by_work)}


def interval_of_mean(values: Sequence[float]) -> dict[str, Any]:
    """Mean, and half of its 95 % interval by Student's t; None for a single value."""
    from scipy.stats import t

    half = t.ppf(0.975, len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
    return {"mean": statistics.fmean(values), "half_width": None if half is None else float(half), "values": values}


def compare_scores(ours: Found, theirs: Found, task: str, grid: Grid) -> dict[str, Any]:
    """Ours minus theirs on test in points, the mean over the rates, with its 95 % interval.

    Seeds are not paired, since order and head differ. The spread is that over seeds, pooled over rates and sides.
    """
    from scipy.stats import t

    sides = [[scores_of(found, task, rate) for rate in grid.learning_rates] for found in (ours, theirs)]
    means = [statistics.fmean(map(statistics.fmean, side)) for side in sides]
    groups = [scores for side in sides for scores in side]
    freedom = sum(len(scores) - 1 for scores in groups)
    found: dict[str, Any] = {"metric": METRICS[grid.tasks[task]["family"]], "mean": means[0] - means[1]}
    if not freedom:
        return found | {"half_width": None, "includes_zero": None}
    variance = sum((score - statistics.fmean(scores)) ** 2 for scores in groups for score in scores) / freedom
    error = (variance * sum(1 / len(scores) for scores in groups)) ** 0.5 / len(grid.learning_rates)
    half = float(t.ppf(0.975, freedom)) * error
    return found | {"half_width": half, "includes_zero": abs(found["mean"]) <= half}


def print_results(result: dict[str, Any]) -> None:
    print(f"\n{result['name']}: {result['num_cells']} cells of {result['config']['max_steps']} steps")
    print(f"  {'arm':<22} {'cells/h':>8} {'wall s':>8} {'CPU s':>8}  where the time goes")
    for arm, found in result["arms"].items():
        if "error" in found:
            print(f"  {arm:<22} {found['error'][:100]}")
            continue
        total = sum(found["seconds"].values())
        shares = ", ".join(f"{stage} {spent / total:.0%}" for stage, spent in found["seconds"].items())
        rates = f"{found['cells_per_hour']:>8,.0f} {found['wall_seconds']:>8,.0f} {found['cpu_seconds']:>8,.0f}"
        print(f"  {arm:<22} {rates}  {shares}")
    for name, ratio in result["ratios"].items():
        spread = f"({ratio['min']:.2f}–{ratio['max']:.2f})"
        print(f"  {name}: {ratio['median']:.2f}× {spread}; training and evaluation alone: {ratio['by_work']:.2f}×")
    print("  test scores in % by rate")
    for task in result["tasks"]:
        for arm, found in result["arms"].items():
            if "error" not in found:
                by_rate = (f"{rate}: {with_half_width(score)}" for rate, score in found["test_scores"][task].items())
                print(f"    {task} {arm:<22} {'   '.join(by_rate)}")
        for name, by_task in result["differences"].items():
            verdict = {True: "0 is inside", False: "0 is outside", None: "one seed"}[by_task[task]["includes_zero"]]
            print(f"    {task} {name}: {with_half_width(by_task[task], '+')} points ({verdict})")


def with_half_width(found: dict[str, Any], sign: str = "") -> str:
    half = "" if found["half_width"] is None else f" ± {found['half_width']:.1f}"
    return f"{found['mean']:{sign}.1f}{half}"
