"""What `--format json` writes is what docs/reference/command_line.md says, key by key."""

from dataclasses import fields
from pathlib import Path

import pytest

from biphase.engine.scheduler import Failure
from biphase.finetuning.scores import ScoreSet
from biphase.report.comparison import SummaryRow, TaskComparison
from biphase.report.statistics import Interval
from biphase.study.advise import Advice
from biphase.study.folder import StatusLine
from biphase.study.rules import Choice
from biphase.verbs.folders import FACTS, SIGN_FILES
from biphase.verbs.grids import EvaluatedGrid
from biphase.verbs.records import comparison_records, summary_records, to_json
from biphase.verbs.studies import StudyProgress

DOCUMENTED = (Path(__file__).parents[2] / "docs" / "reference" / "command_line.md").read_text(encoding="utf-8")
NONE = Interval(float("nan"), float("nan"), 0)
ROW = SummaryRow("m", "t", "f1", None, NONE, NONE, (), 0, (), (), 0, None)


@pytest.mark.parametrize(
    "keys",
    [
        list(summary_records([ROW])[0]),
        list(comparison_records([TaskComparison("a", "b", "t")])[0]),
        [field.name for field in fields(Failure)],
        [field.name for field in fields(StatusLine)],
        [field.name for field in fields(Choice)],
    ],
    ids=["evaluate", "compare", "failed", "status", "advise"],
)
def test_records_are_as_documented(keys: list[str]) -> None:
    assert f"`{' '.join(keys)}`" in DOCUMENTED


def test_kinds_and_parts_are_as_documented() -> None:
    for kind in {*FACTS, *SIGN_FILES}:
        assert f"`{kind}`" in DOCUMENTED
    for kind in (Advice, StudyProgress):
        for field in fields(kind):
            assert f"`{field.name}" in DOCUMENTED or f" {field.name}" in DOCUMENTED, field.name


def test_json_has_no_nan() -> None:
    text = to_json({"scores": EvaluatedGrid(ScoreSet(()), [ROW], []).records, "x": float("inf"), "é": Path("a")})
    assert '"mean": null' in text and '"x": null' in text and '"é": "a"' in text
