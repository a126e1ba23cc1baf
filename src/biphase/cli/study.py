"""`biphase study`: the command line's words → plan, run, status, report and advice, told to a person."""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from biphase.config import parse_config
from biphase.console import duration, err, out
from biphase.engine.local import Engine
from biphase.errors import InputError, nearest
from biphase.files import write_text
from biphase.study.advise import Evidence
from biphase.study.plan import Plan, plan_study
from biphase.study.spec import load_study

PLAN_FORMATS = ("text", "json", "dot", "mermaid")


def show_plan(
    study: Path,
    overrides: Sequence[str],
    device: str | None,
    efficiency: float | None,
    form: str,
    picture: Path | None,
) -> None:
    from biphase.study.cost import estimate, study_machine
    from biphase.study.describe import GRAPH_LANGUAGES, describe_plan, plan_graph, plan_json

    if form not in PLAN_FORMATS:
        raise InputError(f"unknown format '{form}'{nearest(form, PLAN_FORMATS)}")
    plan = plan_study(load_study(study, overrides))
    if form in GRAPH_LANGUAGES:
        out.print(plan_graph(plan, form), markup=False)
    else:
        cost = estimate(plan, study_machine(plan.study, device, efficiency))
        if form == "json":
            out.print(json.dumps(plan_json(plan, cost), indent=2, ensure_ascii=False), markup=False)
        else:
            out.print(describe_plan(plan, cost))
    if picture is not None:
        from biphase.study.picture import draw_plan

        draw_plan(plan, picture)
        err.print(str(picture))


def open_study(study: Path, overrides: Sequence[str], folder: Path | None) -> tuple[Plan, Path]:
    """The plan, and the study's folder."""
    plan = plan_study(load_study(study, overrides))
    return plan, folder or Path(f"study-{plan.study.name}")


def run_missing_units(
    study: Path, overrides: Sequence[str], folder: Path | None, engine: dict[str, Any], processes: int, unit: str | None
) -> None:
    """Train and evaluate what is missing. Raises `InputError` when units failed: how many, and the first reason."""
    from biphase.study.folder import claim_study_folder
    from biphase.study.run import run_study

    plan, path = open_study(study, overrides, folder)
    chosen = parse_config(Engine, engine | {"devices_per_worker": processes}, (), origin="study run")
    failures = run_study(plan, claim_study_folder(path, plan.study), chosen, processes, unit)
    if failures:
        own = [failure for failure in failures if not failure.is_blocked]
        first = (own or failures)[0]
        raise InputError(
            f"{len(own)} units failed and {len(failures) - len(own)} wait for them; the first: {first.unit}: "
            f"{first.reason}; the same command runs them again"
        )
    report = command_line("report", study, overrides, folder)
    out.print(f"{path}: done; `{report}` writes the report" if unit is None else f"{unit}: done", markup=False)


def command_line(verb: str, study: Path, overrides: Sequence[str], folder: Path | None) -> str:
    """What a person types to do something else with the same study."""
    return shlex.join(["biphase", "study", verb, str(study), *overrides, *(["--out", str(folder)] if folder else [])])


def show_status(study: Path, overrides: Sequence[str], folder: Path | None) -> None:
    from biphase.study.folder import StudyFolder, read_state, status

    plan, path = open_study(study, overrides, folder)
    place = StudyFolder(path)
    lines, failures = status(plan, place, read_state(plan, place))
    table = Table(title=f"{plan.study.name}: {path}")
    for column in ("what", "done", "running", "failed", "of", "one worker needs"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for line in lines:
        left = "–" if line.seconds_left is None else duration(line.seconds_left)
        numbers = (line.done, line.running or "", line.failed or "", line.total)
        table.add_row(line.name, *map(str, numbers), left if line.done < line.total else "")
    out.print(table)
    own = [failure for failure in failures if not failure.is_blocked]
    for failure in own:
        out.print(f"failed: {failure.unit}: {failure.reason}", markup=False)
    if len(own) < len(failures):
        out.print(f"{len(failures) - len(own)} more units wait for these")


def write_study_report(study: Path, overrides: Sequence[str], folder: Path | None, report: Path | None) -> Path:
    from biphase.study.folder import StudyFolder
    from biphase.study.report import report_study

    plan, path = open_study(study, overrides, folder)
    commands = [command_line(verb, study, overrides, folder) for verb in ("run", "report")]
    return report_study(plan, StudyFolder(path), report or path / "report", commands)


def read_evidence(folder: Path) -> list[Evidence]:
    """What the study in a folder says of curricula. Raises `InputError` when it says nothing yet."""
    from biphase.study.folder import StudyFolder
    from biphase.study.results import compare_curricula

    if not (folder / "study.yaml").exists():
        raise InputError(f"{folder} is not the folder of a study (it has no study.yaml); give what study run wrote")
    evidence = compare_curricula(plan_study(load_study(folder / "study.yaml")), StudyFolder(folder))
    if not evidence:
        raise InputError(f"{folder} has no curriculum with a score on every task yet; finish it with study run")
    return evidence


def show_advice(
    text: Path | None,
    hours: float | None,
    device: str,
    devices: int,
    efficiency: float | None,
    flops: float | None,
    recipe: Path | None,
    own_study: Path | None,
) -> None:
    from biphase.study.advise import advise, describe_advice, recipe_yaml
    from biphase.study.cost import find_machine
    from biphase.study.text_amount import measure_text

    machine = None if hours is None else find_machine(device, devices, efficiency)
    amount = None if text is None else measure_text(text)
    evidence = () if own_study is None else read_evidence(own_study)
    advice = advise(amount, flops=flops, hours=hours, machine=machine, evidence=evidence)
    out.print(describe_advice(advice))
    if recipe is None:
        out.print(recipe_yaml(advice), markup=False)
    else:
        write_text(recipe, recipe_yaml(advice))
        err.print(str(recipe))
