"""`biphase embed` and zero-shot scores: a recipe → an embedding model; models and judged texts → tables."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from biphase.config import load_config
from biphase.console import out as console
from biphase.embedding.recipe import EmbeddingRecipe
from biphase.errors import InputError
from biphase.files import write_json

EXTRAS = {"mteb": "mteb"}
"""Packages that come with an extra of their own."""


@contextmanager
def needs_embeddings(what: str) -> Iterator[None]:
    """Around imports: a package that is not here is told with the extra that brings it."""
    try:
        yield
    except ModuleNotFoundError as error:
        extra = EXTRAS.get(str(error.name), "embeddings")
        raise InputError(f"{what} needs {error.name}: pip install 'biphase[{extra}]'") from None


def embed_command(
    recipe: Annotated[Path, typer.Argument(help="A YAML file; recipes/embed.yaml is one.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Changes: key.sub=value.")] = None,
    runs: Annotated[Path, typer.Option("--runs", help="Where run folders are.")] = Path("runs"),
) -> None:
    """Train an encoder or a decoder into an embedding model for sentence-transformers. The same command resumes.

    Example: `biphase embed recipes/embed.yaml model=encoder out=embedder`
    """
    run_embed(recipe, overrides or (), runs)


def run_embed(path: Path, overrides: Sequence[str], runs: Path) -> None:
    """Train as the recipe says; print where the model is and what it scores."""
    recipe = load_config(EmbeddingRecipe, path, overrides)
    with needs_embeddings("biphase embed"):
        from biphase.embedding.embed import train_embedder
    folder, facts = train_embedder(recipe, runs)
    table = Table("layer", "cosine to before", box=None)
    for layer, cosine in facts["cosines"].items():
        table.add_row(layer, f"{cosine:.4f}")
    console.print(table)
    for name, arms in facts["scores"].items():
        print_zero_shot(name, arms)
    console.print(f"{folder}: load it with SentenceTransformer('{folder}')", markup=False)


def print_zero_shot(name: str, arms: dict[str, dict[str, float]]) -> None:
    """One set's scores, a row for each model."""
    metrics = list(next(iter(arms.values())))
    table = Table(name, *metrics, box=None)
    for arm, scores in arms.items():
        table.add_row(arm, *(f"{scores[metric]:.4f}" for metric in metrics))
    console.print(table)


def is_zero_shot(tasks: str) -> bool:
    return any(task.startswith(("mteb:", "zero-shot:")) for task in tasks.split(","))


def run_zero_shot(models: Sequence[str], tasks: str, out: Path) -> None:
    """Score embedding models as they are on `zero-shot:PATH` (BEIR's layout, scored pairs) and `mteb:NAME[=FOLDER]`.

    Results are kept as MTEB's JSON, `out/zero-shot/MODEL/TASK.json`.
    """
    with needs_embeddings("zero-shot evaluation"):
        from biphase.embedding.evaluation import read_judged, score_bm25, score_embedder, to_mteb
        from biphase.embedding.folder import load_embedder
    words = tasks.split(",")
    if wrong := next((word for word in words if not is_zero_shot(word)), None):
        raise InputError(f"--tasks: '{wrong}' is fine-tuned on, the others are not; give them to two commands")
    judged = [read_judged(Path(word.partition(":")[2])) for word in words if word.startswith("zero-shot:")]
    named = [word.partition(":")[2] for word in words if word.startswith("mteb:")]
    embedders = {model: load_embedder(model) for model in models}
    for each in judged:
        kind = "STS" if each.pairs else "Retrieval"
        arms = {model: score_embedder(embedder, each) for model, embedder in embedders.items()}
        if each.documents:
            arms["BM25"] = score_bm25(each)
        for arm, scores in arms.items():
            keep_result(out, arm, each.name, to_mteb(each.name, scores, kind))
        print_zero_shot(each.name, arms)
    if named:
        with needs_embeddings("mteb tasks"):
            from biphase.embedding.mteb_tasks import run_mteb
        for name in named:
            results = {model: run_mteb(embedder, name) for model, embedder in embedders.items()}
            for model, result in results.items():
                keep_result(out, model, result["task_name"], result)
            main = {model: {"main_score": main_score(result)} for model, result in results.items()}
            print_zero_shot(name, main)


def main_score(result: dict[str, Any]) -> float:
    return float(next(iter(result["scores"].values()))[0]["main_score"])


def keep_result(out: Path, model: str, task: str, result: object) -> None:
    folder = out / "zero-shot" / Path(model).name
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / f"{task}.json", result)
