"""F1 to F3: what the objective and the masking ratio do, all else equal."""

import itertools
from collections.abc import Sequence

import numpy as np

from biphase.paper.gaps import ON_PAR, add, gap, mean_of, scale
from biphase.report.claims import Claim, ClaimTest, Terms, make_claim, strongest
from biphase.report.contrasts import Contrast, difference
from biphase.report.results import FAMILY_NAMES, ReportArm, ResultSet, objective_pairs, sizes_of


def mlm_beats_clm(results: ResultSet) -> list[Claim]:
    """F1: MLM minus CLM, and where the gap is largest."""
    pairs = objective_pairs(results)
    beats: list[ClaimTest] = [
        (f"{family}, {mlm.size}: MLM − CLM", gap(results, mlm, clm, family), 0.0)
        for family in ("SC", "QA")
        for clm, mlm in pairs
    ]
    largest: list[ClaimTest] = []
    for clm, mlm in pairs:
        on_qa = gap(results, mlm, clm, "QA")
        for family in ("SC", "TC", "IR"):
            terms = add(on_qa, gap(results, clm, mlm, family))  # (MLM − CLM on QA) − (MLM − CLM on the family)
            largest.append((f"{mlm.size}: gap on QA − gap on {family}", terms, 0.0))
    lack = "CLM and MLM of the same size and steps"
    return [
        make_claim("MLM beats CLM on SC and QA at every size", beats, lack),
        make_claim("The gap is largest on QA", largest, lack),
    ]


def clm_holds_on_tokens(results: ResultSet) -> list[Claim]:
    """F2: CLM minus MLM on TC, and how the gap on IR changes with size."""
    pairs = objective_pairs(results)
    level: list[ClaimTest] = [
        (f"TC, {clm.size}: CLM − MLM", gap(results, clm, mlm, "TC"), -ON_PAR) for clm, mlm in pairs
    ]
    closing: list[ClaimTest] = []
    if len(pairs) > 1:
        (clm, mlm), (large_clm, large_mlm) = pairs[0], pairs[-1]
        terms = add(gap(results, mlm, clm, "IR"), gap(results, large_clm, large_mlm, "IR"))
        closing = [(f"IR: gap at {mlm.size} − gap at {large_mlm.size}", terms, 0.0)]
    return [
        make_claim("CLM is on par or better on TC at every size", level, "CLM and MLM of the same size and steps"),
        make_claim("CLM closes on MLM for IR as size grows", closing, "CLM and MLM at two sizes or more"),
    ]


def no_ratio_is_best(results: ResultSet) -> list[Claim]:
    """F3: masking ratios against each other, and the slope of scores over them."""
    arms = results.arms(setup="objective", objective="mlm")
    sizes = sizes_of(arms)
    slopes = {(size, family): slope(results, size, family) for size in sizes for family in FAMILY_NAMES}
    larger: list[ClaimTest] = []
    if len(sizes) > 1:
        small, large = sizes[0], sizes[-1]
        both = [family for family in FAMILY_NAMES if slopes[small, family] and slopes[large, family]]
        growth = [add(slopes[large, family], scale(slopes[small, family], -1)) for family in both]
        label = f"slope at {large} − slope at {small}, mean over {', '.join(both)}"
        larger = [(label, mean_of(growth), 0.0)]
    retrieval: list[ClaimTest] = [(f"IR, {size}: slope", slopes[size, "IR"], 0.0) for size in sizes]
    smallest: list[ClaimTest] = [
        (f"{family}, {size}: −slope", scale(slopes[size, family], -1), 0.0)
        for size in sizes[:1]
        for family in ("TC", "QA")
    ]
    lack = "MLM alone at two masking ratios or more"
    return [
        beaten_somewhere(results, arms, lack),
        make_claim("Larger models like more masking", larger, f"{lack}, at two sizes or more"),
        make_claim("Retrieval likes more masking at every size", retrieval, lack),
        make_claim("The smallest model likes less masking on TC and QA", smallest, lack),
    ]


def slope(results: ResultSet, size: str, family: str) -> Terms | None:
    """The change of the score of MLM from the lowest to the highest masking ratio, by least squares."""
    arms = [arm for arm in results.arms(setup="objective", objective="mlm") if arm.size == size]
    scores = [(arm.mask_percent or 0, score) for arm in arms if (score := results.find_average(arm, family))]
    masks = np.array([mask for mask, _ in scores], dtype=np.float64)
    if len(masks) < 2:
        return None
    # Least squares gives the line's slope as a weighted sum of scores; times the range of ratios it is the change along
    # the line. Ratios 20, 30, 50: weights −0.86, −0.21, 1.07 (they add up to nothing).
    centred = masks - masks.mean()
    weights = centred / (centred**2).sum() * np.ptp(masks)
    return [(weight, score) for weight, (_, score) in zip(weights.tolist(), scores, strict=True)]


def beaten_somewhere(results: ResultSet, arms: Sequence[ReportArm], lack: str) -> Claim:
    """For every ratio, the strongest evidence that another one is above it at some size on some family.

    The contrary is that no other is more than a point above it anywhere.
    """
    rivals: dict[int, list[tuple[str, Contrast]]] = {mask: [] for mask in sorted({a.mask_percent or 0 for a in arms})}
    for size, family in itertools.product(sizes_of(arms), FAMILY_NAMES):
        scores = {}
        for arm in arms:
            score = results.find_average(arm, family)
            if arm.size == size and score is not None:
                scores[arm.mask_percent or 0] = score
        for mask, other in itertools.permutations(scores, 2):
            label = f"{mask} %: beaten by {other} % on {family}, {size}"
            rivals[mask].append((label, difference(scores[other], scores[mask])))
    inequalities = tuple(strongest(found, ON_PAR) for found in rivals.values() if found)
    return Claim(
        "Every masking ratio is beaten by another one somewhere", inequalities, () if inequalities else (lack,)
    )
