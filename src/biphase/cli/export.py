"""Networks are given away: a checkpoint, or an old EuroBERT, → a folder that transformers loads."""

from pathlib import Path
from typing import Annotated

import typer

from biphase.console import out


def export_command(
    run: Annotated[str, typer.Argument(metavar="RUN[@STEP]", help="A run folder; its last step unless given.")],
    folder: Annotated[Path, typer.Argument(help="The folder to write.")],
    merge: Annotated[
        float | None, typer.Option(help="Average with the decoder that it came from; this share is the decoder's.")
    ] = None,
) -> None:
    """Write a checkpoint as a folder that transformers loads, with a model card.

    Example: `biphase export runs/tiny-1a2b3c4d encoder`

    Example: `biphase export runs/adapt-1a2b3c4d encoder --merge 0.5`
    """
    from biphase.verbs import networks

    networks.export(run, folder, merge)


def convert_command(
    model: Annotated[str, typer.Argument(help="A folder, or a hub id (ID@REVISION).")],
    folder: Annotated[Path, typer.Argument(help="The folder to write.")],
) -> None:
    """Turn a EuroBERT checkpoint made for code of its own into one that transformers loads; runs none of that code.

    Example: `biphase convert EuroBERT/EuroBERT-210m eurobert-210m`
    """
    from biphase.export.convert import convert_checkpoint

    out.print(convert_checkpoint(model, folder))
