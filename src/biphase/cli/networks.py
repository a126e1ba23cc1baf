"""Networks are trained, given away and searched with: pretraining, embedding models, folders for transformers."""

from pathlib import Path
from typing import Annotated

import typer

from biphase.cli.study import FormatOption, Overrides
from biphase.console import err, out
from biphase.files import refuse_foreign
from biphase.hub import fetch_model
from biphase.verbs import embedding, folders, networks
from biphase.verbs.records import to_json

networks_app = typer.Typer()

LicenseOption = Annotated[str | None, typer.Option(help="Such as apache-2.0, for a card that says none.")]
LanguageOption = Annotated[str | None, typer.Option(help="Such as en, or en,de, for a card that says none.")]
RunsOption = Annotated[Path, typer.Option("--runs", help="Where run folders are.")]

SHOWN_CHARACTERS = 300
"""How much of a passage is shown."""


@networks_app.command("pretrain")
def pretrain_command(
    recipe: Annotated[Path, typer.Argument(help="A YAML file, or the name of one that comes with biphase: tiny.")],
    overrides: Overrides = None,
    runs: RunsOption = Path("runs"),
) -> None:
    """Pretrain, continue or adapt as a recipe says. The same command resumes; torchrun spreads it over devices.

    Example: `biphase pretrain tiny data.shards=shards schedule.peak_lr=1e-3`

    Several processes: `torchrun --nproc-per-node 8 -m biphase pretrain 210m compute.parallel=fsdp`
    """
    run = networks.pretrain(recipe, overrides or (), runs=runs)
    err.print(f"next: biphase export {run} encoder")


@networks_app.command("export")
def export_command(
    run: Annotated[
        str, typer.Argument(metavar="RUN[@STEP]", help="A run's folder or name; its last step unless given.")
    ],
    folder: Annotated[Path, typer.Argument(help="The folder to write.")],
    merge: Annotated[
        float | None, typer.Option(help="Average with the decoder that it came from; this share is the decoder's.")
    ] = None,
    to_hub: Annotated[str | None, typer.Option(metavar="USER/NAME", help="Push the folder there too, private.")] = None,
    license: LicenseOption = None,
    language: LanguageOption = None,
    form: FormatOption = "text",
) -> None:
    """Write a checkpoint as a folder that transformers loads, with a model card.

    Example: `biphase export tiny encoder`

    Example: `biphase export runs/adapt-1a2b3c4d encoder --merge 0.5`
    """
    out.quiet = form == "json"
    networks.export(run, folder, merge, to_hub=to_hub, license=license, language=language)
    out.quiet = False
    if form == "json":
        out.print(to_json(folders.inspect(folder)))


@networks_app.command("push")
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
    networks.push(source, repo, public=public, license=license, language=language, dry_run=dry_run)


@networks_app.command("convert")
def convert_command(
    model: Annotated[str, typer.Argument(help="A folder, or a hub id (ID@REVISION).")],
    folder: Annotated[Path, typer.Argument(help="The folder to write.")],
) -> None:
    """Write the text network of a model that reads images or sound too (Gemma 3, Qwen-VL, Mistral Small) as a folder of
    its own; or an old EuroBERT, made for code of its own, as one that transformers loads, without running that code.

    Example: `biphase convert google/gemma-3-4b-pt gemma-3-4b-text`
    """
    refuse_foreign(folder, "converted model")
    if not Path(model).is_dir():
        fetch_model(model)
    from biphase.export.convert import convert_checkpoint

    out.print(convert_checkpoint(model, folder))


@networks_app.command("embed")
def embed_command(
    recipe: Annotated[Path, typer.Argument(help="A YAML file, or the name of one that comes with biphase: embed.")],
    overrides: Overrides = None,
    runs: RunsOption = Path("runs"),
) -> None:
    """Train an encoder or a decoder into an embedding model for sentence-transformers. The same command resumes.

    Example: `biphase embed embed model=encoder out=embedder`
    """
    embedding.embed(recipe, overrides or (), runs=runs)


@networks_app.command("search")
def search_command(
    source: Annotated[str, typer.Argument(metavar="INDEX_OR_TEXT", help="An index, or files to make one of.")],
    question: Annotated[str, typer.Argument(help="What to look for.")],
    model: Annotated[str | None, typer.Option(help="An embedding model: a folder or a hub id.")] = None,
    index: Annotated[Path | None, typer.Option(help="Where the index of a text is kept (TEXT.index).")] = None,
    top: Annotated[int, typer.Option(min=1, help="Passages to show.")] = 5,
    rebuild: Annotated[bool, typer.Option("--rebuild", help="Make the index anew.")] = False,
    text_field: Annotated[str, typer.Option(help="The JSON field or the column with the text.")] = "text",
    form: FormatOption = "text",
) -> None:
    """Find passages for a question, by an embedding model and by BM25. Documents are embedded once and kept.

    Example: `biphase search documents/ "how are leaves shed?" --model embedder`
    """
    options = locals()
    del options["form"]
    found = embedding.search(**options)
    if form == "json":
        out.print(to_json(found.to_dict("records")))
        return
    for name, passages in found.groupby("by", sort=False):
        out.print(f"\n{name}", style="bold")
        for passage in passages.itertuples():
            text = passage.text if len(passage.text) <= SHOWN_CHARACTERS else passage.text[:SHOWN_CHARACTERS] + " …"
            out.print(f"{passage.rank:>2}  {passage.score:.3f}  {passage.id}")
            out.prose(f"    {text}")
