"""A recipe → an embedding model; models and judged texts → scores as they are; a text and a question → passages."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from biphase.console import out as console
from biphase.corpus.text import check_place
from biphase.embedding.recipe import EmbeddingRecipe, refuse_equal_names
from biphase.errors import InputError
from biphase.files import refuse_foreign, write_json
from biphase.finetuning.models import find_folder
from biphase.verbs.memory import Changes, are_names, name_sources, read_settings

if TYPE_CHECKING:
    import pandas

ZeroShot = dict[str, dict[str, dict[str, float]]]
"""Scores by set, then by model (or BM25), then by metric."""


@contextmanager
def needs_embeddings(what: str) -> Iterator[None]:
    """Around imports: a package that is not here is told with the extra that brings it."""
    try:
        yield
    except ModuleNotFoundError as error:
        extra = "mteb" if error.name == "mteb" else "embeddings"
        raise InputError(f"{what} needs {error.name}: pip install 'biphase[{extra}]'") from None


def embed(recipe: Any, changes: Changes = (), *, runs: str | Path = "runs") -> Path:
    """Train an encoder or a decoder into an embedding model for sentence-transformers; returns its folder. The same
    call resumes.

    Args:
        recipe: a YAML file, a mapping of its keys, or a `biphase.embedding.recipe.EmbeddingRecipe`.
        changes: to single keys, such as `{"model": "encoder", "out": "embedder"}`.
        runs: where run folders are.
    """
    found = read_settings(EmbeddingRecipe, recipe, changes)
    from biphase.embedding.pairs import check_places

    check_places(found)
    with needs_embeddings("biphase embed"):
        from biphase.embedding.embed import train_embedder
    folder, facts = train_embedder(found, Path(runs))
    table = Table("layer", "cosine with the weights before training", box=None)
    for layer, cosine in facts["cosines"].items():
        table.add_row(layer, f"{cosine:.4f}")
    console.print(table)
    print_zero_shot(facts["scores"])
    console.print(f"{folder}: load it with SentenceTransformer('{folder}')")
    return folder


def print_zero_shot(scores: ZeroShot) -> None:
    """A table for each set, with a row for each model."""
    for name, arms in scores.items():
        metrics = list(next(iter(arms.values())))
        table = Table(name, *metrics, box=None)
        for arm, values in arms.items():
            table.add_row(arm, *(f"{values[metric]:.4f}" for metric in metrics))
        console.print(table)


def zero_shot_records(scores: ZeroShot) -> list[dict[str, Any]]:
    return [{"model": arm, "task": name, **values} for name, arms in scores.items() for arm, values in arms.items()]


def run_zero_shot(models: Sequence[str], tasks: Sequence[str], out: Path, **refused: Any) -> ZeroShot:
    """Score embedding models as they are on `zero-shot:PATH` (BEIR's layout, scored pairs) and `mteb:NAME[=FOLDER]`.

    Results are kept as MTEB's JSON, `out/zero-shot/MODEL/TASK.json`. Raises `InputError` where an option is given that
    says something of training only.
    """
    if said := [name for name, value in refused.items() if value]:
        raise InputError(f"{', '.join(said)}: zero-shot tasks train nothing, so this says nothing there; leave it out")
    given: dict[str, list[str]] = {"zero-shot": [], "mteb": []}
    for task in tasks:
        kind, _, place = task.partition(":")
        if kind not in given:
            raise InputError(f"tasks: '{task}' is fine-tuned on, the others are not; give them to two commands")
        given[kind].append(place)
    try:
        refuse_equal_names(tuple(given["zero-shot"]))
    except ValueError as error:
        raise InputError(f"tasks: {error}") from None
    if len({Path(model).name for model in models}) < len(set(models)):
        raise InputError("two models have the same folder name, by which their scores are kept: rename one")
    check_judged(given["zero-shot"], models)
    with needs_embeddings("zero-shot evaluation"):
        from biphase.embedding.evaluation import read_judged, run_mteb, score_arms, to_mteb
        from biphase.embedding.folder import load_embedder
    judged = [read_judged(Path(place)) for place in given["zero-shot"]]
    embedders = {model: load_embedder(model) for model in models}
    scores: ZeroShot = {}
    for each in judged:
        scores[each.name] = score_arms(embedders, each)
        for arm, values in scores[each.name].items():
            keep_result(out, arm, each.name, to_mteb(each, values))
    if given["mteb"]:
        with needs_embeddings("mteb tasks"):
            import_module("mteb")
    for name in given["mteb"]:
        scores[name] = {}
        for model, embedder in embedders.items():
            result, main_score = run_mteb(embedder, name)
            keep_result(out, model, result["task_name"], result)
            scores[name][model] = {"main_score": main_score}
    return scores


def check_judged(places: Sequence[str], models: Sequence[str]) -> None:
    """Raises `InputError` for judged texts or models that are not here."""
    for place in places:
        if not Path(place).exists():
            raise InputError(f"{place} does not exist")
    for model in models:
        find_folder(model)


def keep_result(out: Path, model: str, task: str, result: object) -> None:
    folder = out / "zero-shot" / Path(model).name
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / f"{task}.json", result)


def search(
    source: Any,
    question: str,
    *,
    model: str | Path | None = None,
    index: str | Path | None = None,
    top: int = 5,
    rebuild: bool = False,
    text_field: str = "text",
) -> "pandas.DataFrame":
    """Find passages for a question, by an embedding model and by BM25. Documents are embedded once and kept.

    Args:
        source: an index, files to make one of (a file, a folder or a glob), or texts or rows in memory, of which a copy
            is kept beside the index.
        model: an embedding model: a folder or a hub id; an index knows its own.
        index: where the index of a text is kept; `SOURCE.index` unless given.
        top: how many passages each finds.
        rebuild: make the index anew.

    Returns: a row for each passage: `by` (the model's name, or BM25), `rank`, `score`, `id`, `text`.
    """
    check_question(question)
    if top < 1:
        raise InputError(f"top is {top}: give 1 or more")
    given, asked = name_text(source, index, text_field), None if model is None else str(model)
    folder = Path(given) if is_index(Path(given)) else Path(index or given.rstrip("/") + ".index")
    if folder == Path(given) and rebuild:
        raise InputError(f"{given} is an index: to build it again, give its text")
    has_index = is_index(folder) and not rebuild
    if folder != Path(given):
        check_place(given)
    if asked is not None:
        find_folder(asked)
    elif not has_index:
        raise InputError(f"{given} has no index yet: name an embedding model as model")
    if not has_index:
        refuse_foreign(folder, "search index")
    import pandas

    with needs_embeddings("biphase search"):
        from biphase.embedding.index import answer_question, build_index, open_index
    if has_index:
        manifest = open_index(folder, asked, None if folder == Path(given) else given, text_field)
    else:
        assert asked is not None
        manifest = build_index(given, asked, folder, text_field)
    return pandas.DataFrame(answer_question(folder, manifest, question, top))


def is_index(path: Path) -> bool:
    return (path / "index.json").exists()


def check_question(question: Any) -> None:
    if not isinstance(question, str):
        raise InputError(f"the question is of type {type(question).__name__}: give a text")
    if not question.strip():
        raise InputError("the question is empty")
    try:
        question.encode()
    except UnicodeEncodeError:
        raise InputError("the question is no Unicode: is the terminal's encoding UTF-8?") from None


def name_text(source: Any, index: str | Path | None, text_field: str) -> str:
    """The name of what is searched, after texts in memory have become a file beside their index."""
    if index is None and not are_names(source):
        raise InputError("texts in memory have no name to keep their index by: say where, index='my.index'")
    names = name_sources(source, Path(f"{index}.texts"), text_field)
    if len(names) != 1:
        raise InputError(f"one name is searched, and {len(names)} are given: give their folder, a glob, or texts")
    return str(names[0])
