"""Results → records of plain data: the rows of DataFrames, and of `--format json`. Shares, not percent; what is not
known is None or NaN, and null in JSON."""

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from pydantic_core import to_jsonable_python

from biphase.console import UNSEEN

if TYPE_CHECKING:
    from biphase.report.comparison import SummaryRow, TaskComparison


def summary_records(rows: "Iterable[SummaryRow]") -> list[dict[str, Any]]:
    """A record for each model on each task, in the order of the table: the task's best mean first."""
    return [
        {
            "model": row.model,
            "task": row.task,
            "metric": row.metric,
            "rate": row.rate,
            "mean": row.interval.value,
            "half_width": row.interval.half_width,
            "paper_half_width": row.paper_interval.half_width,
            "seeds": list(row.seeds),
            "num_cells": row.num_cells,
            "num_diverged": len(row.diverged),
            "num_missing": len(row.missing),
            "num_degenerate": row.num_degenerate,
            "spread": row.spread.value if row.spread else None,
        }
        for row in rows
    ]


def comparison_records(comparisons: "Iterable[TaskComparison]") -> list[dict[str, Any]]:
    """A record for each task; differences are A minus B."""
    records = []
    for one in comparisons:
        difference = one.difference
        records.append(
            {
                "task": one.task,
                "metric": one.metric,
                "model_a": one.model_a,
                "model_b": one.model_b,
                "mean_a": one.a.mean if one.a else None,
                "mean_b": one.b.mean if one.b else None,
                "difference": difference.value if difference else None,
                "low": difference.low if difference else None,
                "high": difference.high if difference else None,
                "p_value": one.p_value,
                "num_tasks": one.num_tasks,
                "verdict": one.verdict,
                "notes": list(one.notes),
            }
        )
    return records


def to_json(value: Any) -> str:
    """The text of plain data and of records, as every `--format json` writes it: indented, in UTF-8, no NaN, nothing
    that a terminal obeys."""
    tree = to_jsonable_python(value, inf_nan_mode="null")
    text = json.dumps(tree, indent=2, ensure_ascii=False, allow_nan=False)
    return UNSEEN.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
