"""The words of embedding models: a recipe is trained; passages are found for a question."""

from pathlib import Path
from typing import Annotated

import typer

from biphase.cli.study import Overrides
from biphase.console import out as console

SHOWN_CHARACTERS = 300


def embed_command(
    recipe: Annotated[Path, typer.Argument(help="A YAML file; recipes/embed.yaml is one.")],
    overrides: Overrides = None,
    runs: Annotated[Path, typer.Option("--runs", help="Where run folders are.")] = Path("runs"),
) -> None:
    """Train an encoder or a decoder into an embedding model for sentence-transformers. The same command resumes.

    Example: `biphase embed recipes/embed.yaml model=encoder out=embedder`
    """
    from biphase.verbs import embedding

    embedding.embed(recipe, overrides or (), runs=runs)


def search_command(
    source: Annotated[str, typer.Argument(metavar="INDEX_OR_TEXT", help="An index, or files to make one of.")],
    question: Annotated[str, typer.Argument(help="What to look for.")],
    model: Annotated[str | None, typer.Option(help="An embedding model: a folder or a hub id.")] = None,
    index: Annotated[Path | None, typer.Option(help="Where the index of a text is kept (TEXT.index).")] = None,
    top: Annotated[int, typer.Option(min=1, help="Passages to show.")] = 5,
    rebuild: Annotated[bool, typer.Option("--rebuild", help="Make the index anew.")] = False,
    text_field: Annotated[str, typer.Option(help="The JSON field or parquet column with the text.")] = "text",
) -> None:
    """Find passages for a question, by an embedding model and by BM25. Documents are embedded once and kept.

    Example: `biphase search documents/ "how are leaves shed?" --model embedder`
    """
    options = locals()
    from biphase.verbs import embedding

    for name, passages in embedding.search(**options).groupby("by", sort=False):
        console.print(f"\n{name}", style="bold")
        for passage in passages.itertuples():
            text = passage.text if len(passage.text) <= SHOWN_CHARACTERS else passage.text[:SHOWN_CHARACTERS] + " …"
            console.print(f"{passage.rank:>2}  {passage.score:.3f}  {passage.id}")
            console.print(f"    {text}")
