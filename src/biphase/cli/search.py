"""`biphase search`: an index or a text, and a question → passages with scores, BM25's beside them."""

from pathlib import Path
from typing import Annotated

import typer

from biphase.cli.embed import needs_embeddings
from biphase.console import err
from biphase.console import out as console
from biphase.errors import InputError

SHOWN_CHARACTERS = 300


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
    run_search(source, question, model=model, index=index, top=top, rebuild=rebuild, text_field=text_field)


def run_search(
    source: str, question: str, *, model: str | None, index: Path | None, top: int, rebuild: bool, text_field: str
) -> None:
    """Open or build the index, and print what it answers."""
    with needs_embeddings("biphase search"):
        from biphase.embedding.index import answer_question, build_index, is_index, open_index
        from biphase.embedding.pairs import hash_source
    if not question.strip():
        raise InputError("the question is empty")
    if is_index(Path(source)):
        if rebuild:
            raise InputError(f"{source} is an index: to build it again, give its text")
        folder = Path(source)
        manifest = open_index(folder, model)
    else:
        folder = index or Path(source.rstrip("/") + ".index")
        if is_index(folder) and not rebuild:
            manifest = open_index(folder, model)
            if manifest.text_hash != hash_source(source):
                raise InputError(f"{folder} was made of another text than {source} holds now: add --rebuild")
        elif model is None:
            raise InputError(f"{source} has no index yet: name an embedding model with --model")
        else:
            manifest = build_index(source, model, folder, text_field)
            err.print(f"{folder}: {manifest.num_passages:,} passages", markup=False)
    for name, answers in answer_question(folder, manifest, question, top).items():
        console.print(f"\n{manifest.model if name == 'model' else name}", style="bold", markup=False)
        for answer in answers:
            text = answer.text if len(answer.text) <= SHOWN_CHARACTERS else answer.text[:SHOWN_CHARACTERS] + " …"
            console.print(f"{answer.rank:>2}  {answer.score:.3f}  {answer.id}", markup=False)
            console.print(f"    {text}", markup=False)
