"""F5 and F7: how much scores depend on the fine-tuning rate and on the masking ratio, as spreads.

Letters: A two arms, K rates or masking ratios, S seeds.
"""

from collections.abc import Callable, Collection, Sequence

import numpy as np

from biphase.paper.published import PUBLISHED_FAMILIES
from biphase.report.claims import Claim, Tested, make_claim, make_inequality
from biphase.report.contrasts import Contrast, jackknife
from biphase.report.results import (
    ReportArm,
    Result,
    ResultSet,
    objective_pairs,
    scores_by_rate,
    short_steps,
    stability_rates,
)


def clm_is_steadier(results: ResultSet) -> list[Claim]:
    """F5: spreads over fine-tuning rates and seeds."""
    tests = list[Tested]()
    for clm, mlm in objective_pairs(results):
        seen, rates = rate_spread_gap(results, mlm, clm)
        if seen is None:
            tests.append(f"{mlm.size}: test scores at every fine-tuning rate, of CLM and of MLM")
        else:
            label = f"{mlm.size}: spread of MLM − of CLM, rates {', '.join(f'{rate:g}' for rate in rates)}"
            tests.append(make_inequality(label, seen))
    lack = "CLM and MLM of the same size and steps"
    return [make_claim("CLM depends less on the fine-tuning rate and seed", tests, lack)]


def clm_first_forgives(results: ResultSet) -> list[Claim]:
    """F7: spreads over masking ratios."""
    arms = results.arms(setup="adapted")
    alone = results.arms(setup="objective", objective="mlm")
    by_mask = {(arm.size, arm.pretrain_steps, arm.mask_percent): arm for arm in alone}
    tests = list[Tested]()
    for key in dict.fromkeys((arm.size, arm.clm_steps, arm.mlm_steps) for arm in arms):
        after = [arm for arm in arms if (arm.size, arm.clm_steps, arm.mlm_steps) == key]
        places = [(arm.size, arm.pretrain_steps, arm.mask_percent) for arm in after]
        label = f"{key[0]}, {short_steps(key[1])} CLM + {short_steps(key[2])} MLM"
        pairs = [(by_mask[place], arm) for place, arm in zip(places, after, strict=True) if place in by_mask]
        seen = ratio_spread_gap(results, pairs) if len(pairs) > 1 else None
        if seen is None:
            tests.append(f"{label}: scores of each seed at two ratios or more, and MLM alone at these ratios")
        else:
            masks = ", ".join(f"{arm.mask_percent}" for _, arm in pairs)
            tests.append(make_inequality(f"{label}: spread of MLM alone − after CLM, ratios {masks} %", seen))
    lack = "MLM after CLM at two masking ratios or more, with the same steps of each"
    return [make_claim("After CLM, results depend less on the masking ratio", tests, lack)]


def rate_spread_gap(results: ResultSet, wide: ReportArm, narrow: ReportArm) -> tuple[Contrast | None, list[float]]:
    """Spread over rates and seeds of `wide` minus that of `narrow`, mean over datasets, and the rates."""
    metric = results.primary_metric
    tables, used, repeated = [], set[float](), set[tuple[int, ...]]()
    for family in results.families:
        for dataset in results.datasets(family, metric):
            ours, theirs = (results.find(arm, family, dataset, metric) for arm in (wide, narrow))
            tuned = [set(one.by_rate if one and one.by_rate else ()) for one in (ours, theirs)]
            rates = stability_rates(sorted(tuned[0] & tuned[1]))
            both = [scores_by_rate(ours, rates), scores_by_rate(theirs, rates)]
            if both[0] is None or both[1] is None or both[0].shape != both[1].shape:
                continue
            scores_AKS = np.stack([both[0], both[1]])
            is_whole_K = ~np.isnan(scores_AKS).any(axis=(0, 2))
            if is_whole_K.sum() > 1:
                tables.append(scores_AKS[:, is_whole_K])
                repeated |= {repeated_seeds(one) for one in (ours, theirs) if one}
                used |= set(np.array(rates)[is_whole_K].tolist())
    return contrast_spreads(tables, repeated, lambda scores_KS: float(scores_KS.std(ddof=1))), sorted(used)


def ratio_spread_gap(results: ResultSet, pairs: Sequence[tuple[ReportArm, ReportArm]]) -> Contrast | None:
    """Spread over ratios of the first of each pair minus that of the second, mean over families."""
    tables, repeated = [], set[tuple[int, ...]]()
    for family in PUBLISHED_FAMILIES:
        scores = [[results.find_average(arm, family) for arm in pair] for pair in pairs]
        samples = [[score.samples if score else () for score in pair] for pair in scores]
        if len({len(seeds) for pair in samples for seeds in pair}) == 1 and samples[0][0]:
            tables.append(np.array(samples).swapaxes(0, 1))
            repeated |= {repeated_seeds(score) for pair in scores for score in pair if score}
    return contrast_spreads(tables, repeated, lambda scores_KS: float(scores_KS.mean(axis=1).std(ddof=1)))


def repeated_seeds(result: Result) -> tuple[int, ...]:
    """The pretraining seed of each sample; () where all are of one pretraining."""
    return result.pretraining_seeds if result.num_pretrainings > 1 else ()


def contrast_spreads(
    tables: Sequence[np.ndarray], repeated: Collection[tuple[int, ...]], spread: Callable[[np.ndarray], float]
) -> Contrast | None:
    """The spread of [K, S] scores of the first arm minus that of the second, mean over [A, K, S] tables, tested over
    seeds; None unless all tables are of the same seeds, whose `repeated_seeds` are given."""
    numbers = {scores_AKS.shape[2] for scores_AKS in tables}
    if len(numbers) != 1 or len(repeated) != 1:
        return None
    (num,), (seeds_S,) = numbers, repeated
    if seeds_S and len(seeds_S) != num:  # not every seed has a score everywhere
        return None

    def statistic(seeds: np.ndarray) -> float:
        return float(
            np.mean([spread(wide_KS[:, seeds]) - spread(narrow_KS[:, seeds]) for wide_KS, narrow_KS in tables])
        )

    largest = float(max(np.abs(scores_AKS).max() for scores_AKS in tables))
    return jackknife(statistic, num, largest, seeds_S)
