"""What `--format json` writes is what docs/reference/command_line.md says, key by key."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from biphase.api.finetuning import comparison_records, summary_records, to_json
from biphase.api.folders import FOLDER_KINDS, read_folder
from biphase.cli.show import print_facts
from biphase.console import UNSEEN
from biphase.engine.scheduler import Failure
from biphase.errors import InputError
from biphase.files import MARK
from biphase.report.results import ReportArm, Result
from biphase.report.verdicts import SummaryRow, TaskComparison
from biphase.studies.advise import Advice, Choice

DOCUMENTED = (Path(__file__).parents[2] / "docs" / "reference" / "command_line.md").read_text(encoding="utf-8")
LOST = Result(ReportArm("m"), "", "t", "standard", measure="f1", num_runs=0)
ROW = SummaryRow(LOST, (), (), LOST.interval, None)


@pytest.mark.parametrize(
    "keys",
    [
        list(summary_records([ROW])[0]),
        list(comparison_records([TaskComparison(LOST, LOST)])[0]),
        [field.name for field in fields(Failure)],
        [field.name for field in fields(Choice)],
    ],
    ids=["evaluate", "compare", "failed", "advise"],
)
def test_records_are_as_documented(keys: list[str]) -> None:
    assert f"`{' '.join(keys)}`" in DOCUMENTED


def test_kinds_and_parts_are_as_documented() -> None:
    for kind in FOLDER_KINDS:
        assert f"`{kind}`" in DOCUMENTED
    for field in fields(Advice):
        assert f"`{field.name}" in DOCUMENTED or f" {field.name}" in DOCUMENTED, field.name


def test_json_has_no_nan() -> None:
    text = to_json({"scores": summary_records([ROW]), "x": float("inf"), "é": Path("a")})
    assert json.loads(to_json({"a": "\x1b[2J\x9b\u202e", "b": [1]})) == {"a": "\x1b[2J\x9b\u202e", "b": [1]}
    assert not UNSEEN.search(to_json("\x1b\x7f\x9b\u202e"))
    assert '"mean": null' in text and '"x": null' in text and '"é": "a"' in text


@pytest.mark.parametrize(
    ("files", "kind", "facts"),
    [
        (
            {MARK: {"biphase": "search index"}, "index.json": {"model": "m", "path": "x"}},
            "search index",
            {"model": "m"},
        ),
        ({MARK: {"biphase": []}, "config.json": {"model_type": "bert"}}, "model", {"model_type": "bert"}),
        ({"config.yaml": "seed: 3", "config.json": {"model_type": "bert"}}, "model", {"model_type": "bert"}),
        ({"study.yaml": "name: s", "trained/a.json": {}, "failed/b.json": {}}, "study", {"name": "s", "failed": ["b"]}),
        ({"config.json": {}, "modules.json": [3]}, None, "modules.json is damaged"),
        ({"config.json": {}, "biphase.json": {"task": 1}}, None, "biphase.json is damaged"),
        ({"config.yaml": "stages: 3", "stages/x": ""}, None, "config.yaml"),
        ({"task.yaml": "name: 3"}, None, "task.yaml"),
        ({"other": ""}, None, "holds nothing that biphase knows"),
        ({MARK: {"biphase": "report"}, "index.html": ""}, None, "holds nothing that biphase knows"),
    ],
)
def test_folders_are_known_or_told(
    files: dict[str, Any], kind: str | None, facts: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    if kind is None:
        with pytest.raises(InputError, match=facts):
            read_folder(tmp_path)
        return
    found = read_folder(tmp_path)
    assert (found["kind"], found["path"]) == (kind, str(tmp_path)) and facts.items() <= found.items()
    print_facts(found)
    assert capsys.readouterr().out.startswith(f"kind: {kind}\npath: {tmp_path}\n")
