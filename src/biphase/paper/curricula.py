"""F4, F6 and F8: what the order of objectives does, on the way, at a fixed budget and when continued."""

import math
from collections.abc import Sequence

from biphase.paper.gaps import ON_PAR, gap, gap_over_families, mean_of
from biphase.report.claims import Claim, ClaimTest, make_claim
from biphase.report.results import FAMILY_NAMES, ReportArm, ResultSet, short_steps, sizes_of

EARLY = {"SC": 10 / 42, "TC": math.inf, "QA": 10 / 42, "IR": 20 / 42}
"""Before which share of the budget the paper sees CLM ahead: 10,000 and 20,000 of 42,000 steps; on TC always."""

FEW_CLM = (0.2, 0.55)
MUCH_CLM = (0.7, 0.8)
"""Which shares of CLM count as "25 to 50 %" and as "75 %": the paper's splits are whole thousands of steps."""


def clm_is_faster_early(results: ResultSet) -> list[Claim]:
    """F4: CLM minus MLM at undecayed checkpoints, early and last."""
    arms = results.arms(setup="efficiency")
    early: list[ClaimTest] = []
    last: list[ClaimTest] = []
    for size in sizes_of(arms):
        budget = max(arm.pretrain_steps for arm in results.arms(size=size))
        pairs = same_steps(arms, size)
        for family in FAMILY_NAMES if pairs else ():
            before = [pair for pair in pairs if pair[0].pretrain_steps < EARLY[family] * budget]
            steps = ", ".join(short_steps(clm.pretrain_steps) for clm, _ in before) or "no"
            gaps = [gap(results, clm, mlm, family) for clm, mlm in before]
            early.append((f"{family}, {size}: CLM − MLM, mean over {steps} steps", mean_of(gaps), 0.0))
            # The end: who is ahead at the last checkpoint, unless that is one of those that count as early. On TC all
            # count as early, so there the last one is asked about where it is not the only one.
            clm, mlm = pairs[-1]
            first, second, sign = (clm, mlm, "CLM − MLM") if family == "TC" else (mlm, clm, "MLM − CLM")
            label = f"{family}, {size}: {sign} at {short_steps(clm.pretrain_steps)} steps"
            is_late = len(pairs) > 1 if family == "TC" else pairs[-1] not in before
            if is_late:
                last.append((label, gap(results, first, second, family), 0.0))
    lack = "undecayed checkpoints of CLM and MLM at the same steps"
    return [
        make_claim("CLM is ahead early, and on TC always", early, lack),
        make_claim(
            "By the last checkpoint MLM has overtaken it on SC, QA and IR, not on TC", last, f"{lack}, late enough"
        ),
    ]


def clm_first_pays(results: ResultSet) -> list[Claim]:
    """F6: CLM then MLM minus MLM alone at each budget."""
    arms = results.arms(setup="ratio")
    few: list[ClaimTest] = []
    much: list[ClaimTest] = []
    for arm in sorted(arms, key=lambda arm: (arm.pretrain_steps, arm.clm_steps)):
        alone = [a for a in arms if (a.size, a.pretrain_steps, a.objective) == (arm.size, arm.pretrain_steps, "mlm")]
        if arm.objective != "clm+mlm" or not alone:
            continue
        there, terms = gap_over_families(results, arm, alone[0])
        split = f"{short_steps(arm.clm_steps)} CLM of {short_steps(arm.pretrain_steps)}"
        label = f"{arm.size}, {split} − MLM alone, mean over {there}"
        if FEW_CLM[0] <= arm.clm_share <= FEW_CLM[1]:
            few.append((label, terms, 0.0))
        elif MUCH_CLM[0] <= arm.clm_share <= MUCH_CLM[1]:
            much.append((label, terms, -ON_PAR))
    return [
        make_claim("With 25–50 % CLM it beats MLM alone at every budget", few, "CLM→MLM and MLM alone at one budget"),
        make_claim("With 75 % CLM it is about on par", much, "CLM→MLM with 75 % CLM and MLM alone at one budget"),
    ]


def continuing_clm_pays(results: ResultSet) -> list[Claim]:
    """F8: continued from CLM minus continued from MLM."""
    arms = [arm for arm in results.arms(setup="cpt") if arm.cpt_steps]
    final: list[ClaimTest] = []
    sooner: list[ClaimTest] = []
    for size in sizes_of(arms):
        from_clm, from_mlm = (
            {arm.cpt_steps: arm for arm in arms if (arm.size, arm.objective) == (size, objective)}
            for objective in ("clm", "mlm")
        )
        steps = sorted(from_clm.keys() & from_mlm.keys())
        for family in FAMILY_NAMES if steps else ():
            bound = 0.0 if family in ("SC", "TC") else -ON_PAR
            label = f"{family}, {size}: from CLM − from MLM after"
            most = steps[-1]
            terms = gap(results, from_clm[most], from_mlm[most], family)
            final.append((f"{label} {short_steps(most)} steps", terms, bound))
            if steps[:-1]:
                fewer = min(steps[:-1], key=lambda step: abs(step / most - 12 / 22))
                terms = gap(results, from_clm[fewer], from_mlm[fewer], family)
                sooner.append((f"{label} {short_steps(fewer)} steps", terms, -ON_PAR))
    lack = "MLM continued from CLM and from MLM with the same steps"
    return [
        make_claim("From CLM it is better on SC and TC, and closed on QA and IR", final, lack),
        make_claim("Fewer steps already suffice", sooner, f"{lack}, at two numbers of steps or more"),
    ]


def same_steps(arms: Sequence[ReportArm], size: str) -> list[tuple[ReportArm, ReportArm]]:
    """(CLM, MLM) of a size at every number of steps that has both."""
    clm, mlm = (
        {arm.pretrain_steps: arm for arm in arms if (arm.size, arm.objective) == (size, objective)}
        for objective in ("clm", "mlm")
    )
    return [(clm[steps], mlm[steps]) for steps in sorted(clm.keys() & mlm.keys())]
