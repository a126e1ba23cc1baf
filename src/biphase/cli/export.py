"""Networks are given away: a checkpoint, or an old EuroBERT, → a folder that transformers loads."""

from pathlib import Path
from typing import Annotated

import typer

from biphase.console import out

LicenseOption = Annotated[str | None, typer.Option(help="Such as apache-2.0, for a card that says none.")]
LanguageOption = Annotated[str | None, typer.Option(help="Such as en, or en,de, for a card that says none.")]


def export_command(
    run: Annotated[str, typer.Argument(metavar="RUN[@STEP]", help="A run folder; its last step unless given.")],
    folder: Annotated[Path, typer.Argument(help="The folder to write.")],
    merge: Annotated[
        float | None, typer.Option(help="Average with the decoder that it came from; this share is the decoder's.")
    ] = None,
    to_hub: Annotated[str | None, typer.Option(metavar="USER/NAME", help="Push the folder there too, private.")] = None,
    license: LicenseOption = None,
    language: LanguageOption = None,
) -> None:
    """Write a checkpoint as a folder that transformers loads, with a model card.

    Example: `biphase export runs/tiny-1a2b3c4d encoder`

    Example: `biphase export runs/adapt-1a2b3c4d encoder --merge 0.5`
    """
    from biphase.verbs import networks

    networks.export(run, folder, merge, to_hub=to_hub, license=license, language=language)


def push_command(
    source: Annotated[str, typer.Argument(metavar="FOLDER", help="A model folder, or RUN[@STEP].")],
    repo: Annotated[str, typer.Argument(metavar="USER/NAME", help="A repository on the Hugging Face hub.")],
    public: Annotated[bool, typer.Option("--public", help="Make it public; it is private otherwise.")] = False,
    license: LicenseOption = None,
    language: LanguageOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go; send nothing.")] = False,
) -> None:
    """Send a model to the Hugging Face hub: weights, configuration, tokenizer and card, nothing else.

    Of a run, its end goes to `main`, and each earlier checkpoint to a branch `step-N`.

    Example: `biphase push encoder user/encoder --license apache-2.0 --language en --dry-run`
    """
    from biphase.verbs import networks

    networks.push(source, repo, public=public, license=license, language=language, dry_run=dry_run)


def convert_command(
    model: Annotated[str, typer.Argument(help="A folder, or a hub id (ID@REVISION).")],
    folder: Annotated[Path, typer.Argument(help="The folder to write.")],
) -> None:
    """Turn a EuroBERT checkpoint made for code of its own into one that transformers loads; runs none of that code.

    Example: `biphase convert EuroBERT/EuroBERT-210m eurobert-210m`
    """
    from biphase.export.convert import convert_checkpoint

    out.print(convert_checkpoint(model, folder))
