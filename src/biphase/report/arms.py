"""Arms of a study → their order, which of them is usual, and which are set against each other."""

import math
from collections import Counter
from collections.abc import Iterable

from biphase.report.results import ReportArm, ResultSet


def short_steps(steps: int) -> str:
    """`12000` → `12k`, `950` → `950`."""
    return f"{steps // 1000}k" if steps >= 1000 and steps % 1000 == 0 else f"{steps:,}"


def reference_mask(arms: Iterable[ReportArm]) -> int | None:
    """The masking ratio (percent) of most models with MLM: the one at which objectives are compared; None without."""
    masked = [arm for arm in arms if arm.mask_percent is not None]
    plain = [arm for arm in masked if arm.is_plain] or masked  # a ratio that falls is no reference
    counts = Counter({arm.name: arm.mask_percent for arm in plain}.values())
    return max(counts, key=lambda mask: (counts[mask], mask)) if counts else None


def sizes_of(arms: Iterable[ReportArm]) -> list[str]:
    """Smallest first; sizes whose names are no number of parameters (`610M`, `1b`) come last, in the order given."""
    return sorted(dict.fromkeys(arm.size for arm in arms), key=num_parameters)


def num_parameters(size: str) -> float:
    try:
        return float(size[:-1]) * {"k": 1e3, "m": 1e6, "b": 1e9}[size[-1:].lower()]
    except (KeyError, ValueError):
        return math.inf


def objective_pairs(results: ResultSet) -> list[tuple[ReportArm, ReportArm]]:
    """(CLM, MLM at the reference ratio) at the largest budget of each size that has both, smallest first.

    Of several with recipes of their own, it is the one with the recipe of most arms; without such a one, none.
    """
    mask = reference_mask(results.arms())
    arms = [arm for arm in results.arms(setup="objective") if arm.mask_percent in (None, mask)]
    pairs: list[tuple[ReportArm, ReportArm]] = []
    for size in sizes_of(arms):
        budgets: dict[tuple[int, int], dict[str, list[ReportArm]]] = {}
        for arm in (arm for arm in arms if arm.size == size):
            budgets.setdefault((arm.pretrain_steps, arm.cpt_steps), {}).setdefault(arm.objective, []).append(arm)
        largest = max((budget for budget, own in budgets.items() if own.keys() >= {"clm", "mlm"}), default=None)
        if largest is not None:
            clm, mlm = (budgets[largest][objective] for objective in ("clm", "mlm"))
            pairs += zip(usual_arm(clm), usual_arm(mlm), strict=False)
    return pairs


def usual_arm(arms: list[ReportArm]) -> list[ReportArm]:
    return [arm for arm in arms if arm.is_plain][:1] or (arms if len(arms) == 1 else [])
