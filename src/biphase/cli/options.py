"""Arguments and options that several verbs have, with their help."""

from pathlib import Path
from typing import Annotated

import typer

SourceArguments = Annotated[
    list[str],
    typer.Argument(
        help="Files (.txt, .jsonl, .jsonl.gz, .jsonl.zst, .parquet), folders, globs, or hub data sets "
        "(HuggingFaceFW/fineweb-edu:sample-10BT)."
    ),
]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Changes to single keys.")]
OutOption = Annotated[Path, typer.Option("--out", help="The folder to write.")]
TextFieldOption = Annotated[str, typer.Option(help="The JSON field or parquet column with the text.")]
TxtDocumentsOption = Annotated[str, typer.Option(help="What a document is in .txt files: file, paragraphs or lines.")]
RunsOption = Annotated[Path, typer.Option("--runs", help="Where run folders are.")]
ScoresOption = Annotated[Path, typer.Option("--out", help="Where finished cells are kept.")]
StudyArgument = Annotated[Path, typer.Argument(metavar="STUDY", help="A YAML file; studies/ has examples.")]
StudyFolderOption = Annotated[Path | None, typer.Option("--out", help="The study's folder; study-NAME unless given.")]
EngineOption = Annotated[str, typer.Option("--engine", help="local, or ray for many machines.")]
AddressOption = Annotated[str | None, typer.Option(help="Of the Ray cluster, such as `auto`.")]
DeviceOption = Annotated[str | None, typer.Option(help="Such as H100 or CPU, or a run to measure by.")]
EfficiencyOption = Annotated[float | None, typer.Option(help="Useful FLOP/s as a share of the device's peak.")]
