"""The paper's published scores, what it calls its models, and which of its comparisons and tables a model belongs to.

Should We Still Pretrain Encoders with Masked Language Modeling? arXiv 2507.00994; where the numbers come from is in
`reference/SOURCE.md`.
"""

import csv
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from importlib import resources
from itertools import count, product

from biphase.report.arms import reference_mask, short_steps
from biphase.report.results import ReportArm, Result, ResultSet

PUBLISHED_SETUPS = ("objective", "efficiency", "ratio", "cpt")
"""The comparisons that the paper prints as tables, in its order."""

PUBLISHED_FAMILIES = ("SC", "TC", "QA", "IR")
TABLE_NUMBERS = dict(zip(product(PUBLISHED_SETUPS, PUBLISHED_FAMILIES), count(2), strict=False))
"""The paper's number of the table for each comparison and family: tables 2 to 17."""


PUBLISHED_SIZES = {"210m", "610m", "1b"}
"""The networks that the paper's findings are about."""

TOKENS_PER_STEP = 2_359_296


def read_reference() -> ResultSet:
    """The paper's 800 published cells, averages included, in the order of its tables (`reference/SOURCE.md`)."""
    flops = {row["arm"]: float(row["flops"]) for row in read_reference_rows("paper_flops.csv")}
    results = []
    for row in read_reference_rows("paper_scores.csv"):
        steps, continued = int(row["pretrain_steps"]), int(row["cpt_steps"] or 0)
        arm = ReportArm(
            name="",
            setup=row["setup"],
            size=row["size"],
            objective=row["objective"].lower(),  # type: ignore[arg-type]
            mask_percent=int(row["mask_percent"]) if row["mask_percent"] else None,
            pretrain_steps=steps,
            clm_steps=int(row["clm_steps"]),
            mlm_steps=int(row["mlm_steps"]),
            cpt_steps=continued,
            tokens=float(TOKENS_PER_STEP * (steps + continued)),
        )
        name, parent = published_name(arm)
        results.append(
            Result(
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
        )
    return ResultSet(tuple(results))


def read_reference_rows(name: str) -> Iterable[dict[str, str]]:
    text = (resources.files("biphase.paper") / "reference" / name).read_text(encoding="utf-8")
    return csv.DictReader(text.splitlines())


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
            is_also_controlled = arm.setup == "other" and arm.size in controlled
            return [arm.setup, "control"] if is_also_controlled else [arm.setup]
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
