"""The verbs of `biphase study`: their options, and what each of them calls."""

from pathlib import Path
from typing import Annotated

import typer

from biphase.cli.options import (
    AddressOption,
    DeviceOption,
    EfficiencyOption,
    EngineOption,
    Overrides,
    StudyArgument,
    StudyFolderOption,
)
from biphase.console import out

study_app = typer.Typer(no_args_is_help=True, help="A controlled study: one file → plan, runs, report.")


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
    from biphase.cli.study import show_plan

    show_plan(study, overrides or (), device, efficiency, format, picture)


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
    from biphase.cli.study import run_missing_units

    chosen = {"kind": engine, "address": address, "workers": workers, "workers_per_gpu": workers_per_gpu}
    run_missing_units(study, overrides or (), folder, chosen, processes, unit)


@study_app.command("status")
def study_status_command(study: StudyArgument, overrides: Overrides = None, folder: StudyFolderOption = None) -> None:
    """What is done, running and failed, and how long the rest takes.

    Example: `biphase study status studies/mini.yaml`
    """
    from biphase.cli.study import show_status

    show_status(study, overrides or (), folder)


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
    from biphase.cli.study import write_study_report

    out.print(str(write_study_report(study, overrides or (), folder, report)))


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
    from biphase.cli.study import show_advice

    show_advice(text, hours, device, devices, efficiency, flops, recipe, study)
