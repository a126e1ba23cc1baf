"""The verbs of `biphase study`, told to a person or as JSON, and the options that several verbs have."""

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.table import Table

from biphase.api import studies
from biphase.api.grids import to_json
from biphase.api.text import advise
from biphase.console import duration, err, out
from biphase.engine.local import EngineKind

study_app = typer.Typer(no_args_is_help=True, help="A controlled study: one file → plan, runs, report.")

Overrides = Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Changes to single keys.")]
EngineOption = Annotated[EngineKind, typer.Option("--engine", help="local: this machine; ray: several machines.")]
AddressOption = Annotated[str | None, typer.Option(help="The address of a Ray cluster, such as `auto`.")]
StudyArgument = Annotated[
    Path, typer.Argument(metavar="STUDY", help="A YAML file, or the name of one that comes with biphase: mini.")
]
StudyFolderOption = Annotated[Path | None, typer.Option("--out", help="The study's folder; study-NAME unless given.")]
DeviceOption = Annotated[str | None, typer.Option(help="Such as H100 or CPU, or a run to measure by.")]
FormatOption = Annotated[
    Literal["text", "json"], typer.Option("--format", help="Print text for people, or JSON for programs.")
]
EfficiencyOption = Annotated[float | None, typer.Option(help="Useful FLOP/s as a share of the device's peak.")]


@study_app.command("plan")
def study_plan_command(
    study: StudyArgument,
    overrides: Overrides = None,
    device: DeviceOption = None,
    efficiency: EfficiencyOption = None,
    form: Annotated[
        Literal["text", "json", "mermaid"], typer.Option("--format", help="mermaid draws the tree of runs.")
    ] = "text",
    picture: Annotated[Path | None, typer.Option(help="Draw the tree of runs into this .svg, .pdf or .png.")] = None,
) -> None:
    """What a study trains and evaluates, what sharing saves, and what it costs. Trains nothing.

    Example: `biphase study plan paper --device MI250X`
    """
    from biphase.study.describe import describe_plan, plan_graph

    opened = studies.study(study, overrides or ())
    if form == "mermaid":
        out.print(plan_graph(opened.planned))
    elif form == "json":
        out.print(to_json(opened.plan_facts(device, efficiency)))
    else:
        out.print(describe_plan(opened.planned, opened.estimate(device, efficiency)))
    if picture is not None:
        from biphase.study.describe import draw_plan

        draw_plan(opened.planned, picture)
        err.print(str(picture))


@study_app.command("run")
def study_run_command(
    study: StudyArgument,
    overrides: Overrides = None,
    folder: StudyFolderOption = None,
    engine: EngineOption = "local",
    address: AddressOption = None,
    workers: Annotated[
        int | None, typer.Option(min=0, help="Units side by side; one per core or GPU unless given.")
    ] = None,
    workers_per_gpu: Annotated[int, typer.Option(min=1, help="Units that share a GPU.")] = 1,
    processes: Annotated[
        int, typer.Option(min=1, help="Devices of each training run. A cell holds as many and uses one: see --unit.")
    ] = 1,
    unit: Annotated[
        str | None,
        typer.Option(
            help="train: all runs; cells: all of trained models; or only this one, such as 'train 1m-clm-400'."
        ),
    ] = None,
) -> None:
    """Train and evaluate whatever is missing. Killed? The same command goes on; several of them share the work.

    Example: `biphase study run mini`
    """
    options = locals()
    opened = studies.study(*(options.pop(name) for name in ("study", "overrides", "folder")))
    opened.run(**options)


@study_app.command("status")
def study_status_command(
    study: StudyArgument,
    overrides: Overrides = None,
    folder: StudyFolderOption = None,
    form: FormatOption = "text",
) -> None:
    """What is done, begun and failed, and how long the rest takes.

    Example: `biphase study status mini`
    """
    opened = studies.study(study, overrides or (), folder)
    progress = opened.progress()
    if form == "json":
        out.print(to_json({"study": opened.planned.study.name, "folder": str(opened.folder), **progress}))
        return
    table = Table(title=f"{opened.planned.study.name}: {opened.folder}")
    for column in ("what", "done", "begun", "failed", "of", "one worker needs"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for line in progress["lines"]:
        left = "–" if line.seconds_left is None else duration(line.seconds_left)
        numbers = (line.done, line.running or "", line.failed or "", line.total)
        table.add_row(line.name, *map(str, numbers), left if line.done < line.total else "")
    out.print(table)
    for told in (*progress["seeds"], *progress["notes"]):
        out.prose(told)
    for failure in progress["failed"]:
        out.prose(f"failed: {failure.unit}: {failure.reason}")
    if progress["num_waiting"]:
        out.print(f"{progress['num_waiting']} more units wait for these")


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

    Example: `biphase study report mini`
    """
    studies.study(study, overrides or (), folder).report(report)


@study_app.command("advise")
def study_advise_command(
    text: Annotated[
        Path | None, typer.Option(help="Your text: shards, whose tokens are known, or a file or a folder.")
    ] = None,
    hours: Annotated[float | None, typer.Option(help="How long the devices may work.")] = None,
    device: Annotated[
        str | None,
        typer.Option(help="Such as H100, or a run to measure by; this machine's CPU, measured, unless given."),
    ] = None,
    devices: Annotated[int | None, typer.Option(help="How many; 1, or all cores, unless given.")] = None,
    efficiency: EfficiencyOption = None,
    flops: Annotated[float | None, typer.Option(help="A budget in FLOPs in place of hours and device.")] = None,
    recipe: Annotated[Path | None, typer.Option(help="Write the recipe to this file.")] = None,
    study: Annotated[
        Path | None,
        typer.Option(help="The folder of a study of yours, whose scores choose the curriculum from random weights."),
    ] = None,
    from_scratch: Annotated[
        bool, typer.Option("--from-scratch", help="Start from random weights, even where a model could be continued.")
    ] = False,
    text_field: Annotated[str, typer.Option(help="The JSON field or the column with the text.")] = "text",
    form: FormatOption = "text",
) -> None:
    """The best use of a budget: what to continue, or which size from random weights; with its reasons and a recipe.

    Example: `biphase study advise --text corpus/ --hours 8 --device H100 --recipe recipe.yaml`
    """
    from biphase.files import write_text
    from biphase.study.describe import describe_advice, recipe_yaml

    advice = advise(
        text,
        hours=hours,
        device=device,
        devices=devices,
        efficiency=efficiency,
        flops=flops,
        study=study,
        from_scratch=from_scratch,
        text_field=text_field,
    )
    if form == "json":
        out.print(to_json(advice))
    else:
        out.print(describe_advice(advice))
        if recipe is None:
            out.print(recipe_yaml(advice, has_reasons=False))
    if recipe is not None:
        write_text(recipe, recipe_yaml(advice))
        err.print(str(recipe))
