"""The verbs of `biphase study`: plan, run, status, report and advice, told to a person.

Heavy imports happen inside the verb that needs them.
"""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from biphase.console import duration, err, out
from biphase.errors import InputError, nearest

if TYPE_CHECKING:
    from biphase.study.advise import Evidence
    from biphase.study.plan import Plan

study_app = typer.Typer(no_args_is_help=True, help="A controlled study: one file → plan, runs, report.")

Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Changes to single keys.")]
EngineOption = Annotated[str, typer.Option("--engine", help="local, or ray for many machines.")]
AddressOption = Annotated[str | None, typer.Option(help="Of the Ray cluster, such as `auto`.")]
StudyArgument = Annotated[
    Path, typer.Argument(metavar="STUDY", help="A YAML file, or the name of one that comes with biphase: mini.")
]
StudyFolderOption = Annotated[Path | None, typer.Option("--out", help="The study's folder; study-NAME unless given.")]
DeviceOption = Annotated[str | None, typer.Option(help="Such as H100 or CPU, or a run to measure by.")]
EfficiencyOption = Annotated[float | None, typer.Option(help="Useful FLOP/s as a share of the device's peak.")]


@study_app.command("plan")
def study_plan_command(
    study: StudyArgument,
    overrides: Overrides = None,
    device: DeviceOption = None,
    efficiency: EfficiencyOption = None,
    format: Annotated[str, typer.Option(help="text, json, dot or mermaid.")] = "text",
    picture: Annotated[Path | None, typer.Option(help="Draw the tree of runs into this .svg, .pdf or .png.")] = None,
) -> None:
    """What a study trains and evaluates, what sharing saves, and what it costs. Trains nothing.

    Example: `biphase study plan studies/paper.yaml --device MI250X`
    """
    from biphase.study.cost import estimate, study_machine
    from biphase.study.describe import GRAPH_LANGUAGES, describe_plan, plan_graph, plan_json

    formats = ("text", "json", *GRAPH_LANGUAGES)
    if format not in formats:
        raise InputError(f"unknown format '{format}'{nearest(format, formats)}")
    plan, _ = open_study(study, overrides)
    if format in GRAPH_LANGUAGES:
        out.print(plan_graph(plan, format), markup=False)
    else:
        cost = estimate(plan, study_machine(plan.study, device, efficiency))
        if format == "json":
            out.print(json.dumps(plan_json(plan, cost), indent=2, ensure_ascii=False), markup=False)
        else:
            out.print(describe_plan(plan, cost))
    if picture is not None:
        from biphase.study.picture import draw_plan

        draw_plan(plan, picture)
        err.print(str(picture))


def open_study(study: Path, overrides: Sequence[str] | None, folder: Path | None = None) -> tuple["Plan", Path]:
    """The plan, whose hypotheses are about arms and tasks that it has, and the study's folder."""
    from biphase.study.hypotheses import ask
    from biphase.study.plan import plan_study
    from biphase.study.spec import load_study

    plan = plan_study(load_study(study, overrides or ()))
    ask(plan)
    return plan, folder or Path(f"study-{plan.study.name}")


@study_app.command("run")
def study_run_command(
    study: StudyArgument,
    overrides: Overrides = None,
    folder: StudyFolderOption = None,
    engine: EngineOption = "local",
    address: AddressOption = None,
    workers: Annotated[int | None, typer.Option(help="Units side by side; one per core or GPU unless given.")] = None,
    workers_per_gpu: Annotated[int, typer.Option(help="Units that share a GPU.")] = 1,
    processes: Annotated[int, typer.Option(help="Devices of each training run, by torchrun.")] = 1,
    unit: Annotated[
        str | None, typer.Option(help="Only this one, such as 'train 1m-clm-400'; train: all runs, no cell.")
    ] = None,
) -> None:
    """Train and evaluate whatever is missing. Killed? The same command goes on; several of them share the work.

    Example: `biphase study run studies/mini.yaml`
    """
    from biphase.config import parse_config
    from biphase.engine.local import Engine
    from biphase.study.folder import claim_study_folder, read_state
    from biphase.study.hypotheses import declare
    from biphase.study.run import run_study

    plan, path = open_study(study, overrides, folder)
    chosen = {"kind": engine, "address": address, "workers": workers, "workers_per_gpu": workers_per_gpu}
    where = parse_config(Engine, chosen | {"devices_per_worker": processes}, (), origin="study run")
    place = claim_study_folder(path, plan.study)
    if plan.study.hypotheses:
        declare(plan.study, path, len(read_state(plan, place).done))
    failures = run_study(plan, place, where, processes, unit)
    if failures:
        own = [failure for failure in failures if not failure.is_blocked]
        first = (own or failures)[0]
        raise InputError(
            f"{len(own)} units failed and {len(failures) - len(own)} wait for them; the first: {first.unit}: "
            f"{first.reason}; the same command runs them again"
        )
    report = command_line("report", study, overrides, folder)
    out.print(f"{path}: done; `{report}` writes the report" if unit is None else f"{unit}: done", markup=False)


def command_line(verb: str, study: Path, overrides: Sequence[str] | None, folder: Path | None) -> str:
    """What a person types to do something else with the same study."""
    words = ["biphase", "study", verb, str(study), *(overrides or ())]
    return shlex.join([*words, "--out", str(folder)] if folder else words)


@study_app.command("status")
def study_status_command(study: StudyArgument, overrides: Overrides = None, folder: StudyFolderOption = None) -> None:
    """What is done, running and failed, and how long the rest takes.

    Example: `biphase study status studies/mini.yaml`
    """
    from biphase.study.folder import StudyFolder, read_state, seed_progress, status

    plan, path = open_study(study, overrides, folder)
    place = StudyFolder(path)
    state = read_state(plan, place)
    lines, failures = status(plan, place, state)
    table = Table(title=f"{plan.study.name}: {path}")
    for column in ("what", "done", "running", "failed", "of", "one worker needs"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for line in lines:
        left = "–" if line.seconds_left is None else duration(line.seconds_left)
        numbers = (line.done, line.running or "", line.failed or "", line.total)
        table.add_row(line.name, *map(str, numbers), left if line.done < line.total else "")
    out.print(table)
    for progress in seed_progress(plan, state):
        out.print(progress)
    own = [failure for failure in failures if not failure.is_blocked]
    for failure in own:
        out.print(f"failed: {failure.unit}: {failure.reason}", markup=False)
    if len(own) < len(failures):
        out.print(f"{len(failures) - len(own)} more units wait for these")


@study_app.command("report")
def study_report_command(
    study: StudyArgument,
    overrides: Overrides = None,
    folder: StudyFolderOption = None,
    report: Annotated[
        Path | None, typer.Option(help="The folder to write; report/ in the study's unless given.")
    ] = None,
) -> None:
    """Tables, figures, verdicts and one HTML page from what is finished so far.

    Example: `biphase study report studies/mini.yaml`
    """
    from biphase.report.formats import show_count
    from biphase.study.folder import StudyFolder
    from biphase.study.hypotheses import describe_declaration
    from biphase.study.report import report_study

    plan, path = open_study(study, overrides, folder)
    commands = [command_line(verb, study, overrides, folder) for verb in ("run", "report")]
    page, findings = report_study(plan, StudyFolder(path), report or path / "report", commands)
    for finding in findings:
        counted = [one.verdict for one in finding.inequalities].count("supported")
        asked = show_count(sum(1 for _ in finding.inequalities), "inequality", "inequalities")
        out.print(f"{finding.verdict}: {finding.key}: {finding.statement} ({counted} of {asked})", markup=False)
    if findings:
        out.print(describe_declaration(plan.study, path), markup=False)
    out.print(str(page))


@study_app.command("advise")
def study_advise_command(
    text: Annotated[Path | None, typer.Option(help="Your text: a file or a folder.")] = None,
    hours: Annotated[float | None, typer.Option(help="How long the devices may work.")] = None,
    device: Annotated[str, typer.Option(help="Such as H100 or CPU, or a run to measure by.")] = "CPU",
    devices: Annotated[int, typer.Option(help="How many.")] = 1,
    efficiency: EfficiencyOption = None,
    flops: Annotated[float | None, typer.Option(help="A budget in FLOPs in place of hours and device.")] = None,
    recipe: Annotated[Path | None, typer.Option(help="Write the recipe to this file.")] = None,
    study: Annotated[
        Path | None, typer.Option(help="The folder of a study of yours, whose scores then choose the curriculum.")
    ] = None,
) -> None:
    """Model size, curriculum, batch and steps for a budget, each with its reason, as a recipe ready to run.

    Example: `biphase study advise --text corpus/ --hours 8 --device H100 --recipe recipe.yaml`
    """
    from biphase.files import write_text
    from biphase.study.advise import advise, describe_advice, recipe_yaml
    from biphase.study.cost import find_machine
    from biphase.study.rules import measure_text

    advice = advise(
        None if text is None else measure_text(text),
        flops=flops,
        hours=hours,
        machine=None if hours is None else find_machine(device, devices, efficiency),
        evidence=() if study is None else read_evidence(study),
    )
    out.print(describe_advice(advice))
    if recipe is None:
        out.print(recipe_yaml(advice), markup=False)
    else:
        write_text(recipe, recipe_yaml(advice))
        err.print(str(recipe))


def read_evidence(folder: Path) -> list["Evidence"]:
    """What the study in a folder says of curricula. Raises `InputError` when it says nothing yet."""
    from biphase.study.folder import StudyFolder
    from biphase.study.results import compare_curricula

    if not (folder / "study.yaml").exists():
        raise InputError(f"{folder} is not the folder of a study (it has no study.yaml); give what study run wrote")
    evidence = compare_curricula(open_study(folder / "study.yaml", ())[0], StudyFolder(folder))
    if not evidence:
        raise InputError(f"{folder} has no curriculum with a score on every task yet; finish it with study run")
    return evidence
