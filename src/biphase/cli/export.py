"""Networks are given away: a checkpoint → a folder that transformers loads."""

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
    from biphase.export.model import export_checkpoint

    out.print(export_checkpoint(run, folder, merge), markup=False)
