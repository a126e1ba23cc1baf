"""F5 and F7: how much scores depend on the fine-tuning rate and on the masking ratio, as spreads.

Letters: A two arms, R rates, S seeds, M masking ratios.
"""

from collections.abc import Sequence

import numpy as np

from biphase.paper.published import PUBLISHED_FAMILIES
from biphase.report.claims import Claim, make_inequality
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
    inequalities, untested = [], []
    for clm, mlm in objective_pairs(results):
        seen, rates = spread_gap(results, mlm, clm)
        if seen is None:
            untested.append(f"{mlm.size}: test scores at every fine-tuning rate, of CLM and of MLM")
        else:
            label = f"{mlm.size}: spread of MLM − of CLM, rates {', '.join(f'{rate:g}' for rate in rates)}"
            inequalities.append(make_inequality(label, seen, 0.0))
    if not inequalities and not untested:
        untested.append("CLM and MLM of the same size and steps")
    return [Claim("CLM depends less on the fine-tuning rate and seed", tuple(inequalities), tuple(untested))]


def clm_first_forgives(results: ResultSet) -> list[Claim]:
    """F7: spreads over masking ratios."""
    arms = results.arms(setup="adapted")
    alone = results.arms(setup="objective", objective="mlm")
    inequalities, untested = [], []
    for key in dict.fromkeys((arm.size, arm.clm_steps, arm.mlm_steps) for arm in arms):
        after = [arm for arm in arms if (arm.size, arm.clm_steps, arm.mlm_steps) == key]
        by_mask = {(a.size, a.pretrain_steps, a.mask_percent): a for a in alone}
        places = [(arm.size, arm.pretrain_steps, arm.mask_percent) for arm in after]
        label = f"{key[0]}, {short_steps(key[1])} CLM + {short_steps(key[2])} MLM"
        pairs = [(by_mask[place], arm) for place, arm in zip(places, after, strict=True) if place in by_mask]
        seen = ratio_spread_gap(results, pairs) if len(pairs) > 1 else None
        if seen is None:
            untested.append(f"{label}: scores of each seed at two ratios or more, and MLM alone at these ratios")
        else:
            masks = ", ".join(f"{arm.mask_percent}" for _, arm in pairs)
            inequalities.append(
                make_inequality(f"{label}: spread of MLM alone − after CLM, ratios {masks} %", seen, 0.0)
            )
    if not arms:
        untested.append("MLM after CLM at two masking ratios or more, with the same steps of each")
    return [Claim("After CLM, results depend less on the masking ratio", tuple(inequalities), tuple(untested))]


def spread_gap(results: ResultSet, wide: ReportArm, narrow: ReportArm) -> tuple[Contrast | None, list[float]]:
    """Spread over rates and seeds of `wide` minus that of `narrow`, mean over datasets, and the rates."""
    metric = results.primary_metric
    pairs, used, repeated = [], set[float](), set[tuple[int, ...]]()
    for family in results.families:
        for dataset in results.datasets(family, metric):
            ours, theirs = (results.find(arm, family, dataset, metric) for arm in (wide, narrow))
            tuned = [set(one.by_rate if one and one.by_rate else ()) for one in (ours, theirs)]
            rates = stability_rates(sorted(tuned[0] & tuned[1]))
            tables = [scores_by_rate(ours, rates), scores_by_rate(theirs, rates)]
            if tables[0] is None or tables[1] is None or tables[0].shape != tables[1].shape:
                continue
            scores_ARS = np.stack([tables[0], tables[1]])
            is_whole_R = ~np.isnan(scores_ARS).any(axis=(0, 2))
            if is_whole_R.sum() > 1:
                pairs.append(scores_ARS[:, is_whole_R])
                repeated |= {repeated_seeds(one) for one in (ours, theirs) if one}
                used |= set(np.array(rates)[is_whole_R].tolist())
    numbers = {scores_ARS.shape[2] for scores_ARS in pairs}
    if len(numbers) != 1 or len(repeated) != 1:
        return None, []
    (num,), (seeds_S,) = numbers, repeated
    if seeds_S and len(seeds_S) != num:  # not every seed has a score at these rates
        return None, []

    def statistic(seeds: np.ndarray) -> float:
        spreads = [[scores_RS[:, seeds].std(ddof=1) for scores_RS in scores_ARS] for scores_ARS in pairs]
        return float(np.mean([wide - narrow for wide, narrow in spreads]))

    largest = float(max(np.abs(scores).max() for scores in pairs))
    return jackknife(statistic, num, largest, seeds_S), sorted(used)


def repeated_seeds(result: Result) -> tuple[int, ...]:
    """The pretraining seed of each sample; () where all are of one pretraining."""
    return result.pretraining_seeds if result.num_pretrainings > 1 else ()


def ratio_spread_gap(results: ResultSet, pairs: Sequence[tuple[ReportArm, ReportArm]]) -> Contrast | None:
    """Spread over ratios of the first of each pair minus that of the second, mean over families."""
    tables, repeated = [], set[tuple[int, ...]]()
    for family in PUBLISHED_FAMILIES:
        scores = [[results.find_average(arm, family) for arm in pair] for pair in pairs]
        samples = [[score.samples if score else () for score in pair] for pair in scores]
        if len({len(seeds) for pair in samples for seeds in pair}) == 1 and samples[0][0]:
            tables.append(np.array(samples))
            repeated |= {repeated_seeds(score) for pair in scores for score in pair if score}
    if not tables or len({scores_MAS.shape[2] for scores_MAS in tables}) != 1 or len(repeated) != 1:
        return None
    (seeds_S,) = repeated

    def statistic(seeds: np.ndarray) -> float:
        spreads = [scores_MAS[:, :, seeds].mean(axis=2).std(axis=0, ddof=1) for scores_MAS in tables]
        return float(np.mean([alone - after for alone, after in spreads]))

    largest = float(max(np.abs(scores).max() for scores in tables))
    return jackknife(statistic, tables[0].shape[2], largest, seeds_S)
