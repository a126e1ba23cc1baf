"""A recipe → a run → a folder that is given away; a folder, a run or a hub id → a network that embeds texts."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from biphase.console import out as console
from biphase.corpus.mixture import open_text
from biphase.encoder.presets import find_preset
from biphase.files import read_json, refuse_filled
from biphase.hub import fetch_model
from biphase.recipe import Recipe
from biphase.run import find_checkpoint, name_run
from biphase.verbs.memory import Changes, by_commas, read_settings

if TYPE_CHECKING:
    import numpy as np


def pretrain(recipe: Any, changes: Changes = (), *, runs: str | Path = "runs") -> Path:
    """Pretrain, continue or adapt as a recipe says; returns the run's folder. The same call resumes.

    Args:
        recipe: a YAML file, a mapping of its keys, or a `biphase.recipe.Recipe`.
        changes: to single keys, such as `{"schedule.peak_lr": 1e-3}`.
        runs: where run folders are.
    """
    found = read_settings(Recipe, recipe, changes)
    check_beginning(found)
    from biphase.pretraining.loop import train

    path = train(found, Path(runs)).path
    console.print(str(path))
    return path


def check_beginning(recipe: Recipe) -> None:
    """Raises `InputError` for text that is not there, and for a beginning that no network has. A checkpoint may have
    been dropped since the run began, which knows it then."""
    open_text(recipe.data)
    if recipe.init.preset is not None:
        find_preset(recipe.init.preset)
    if recipe.init.model is not None:
        fetch_model(recipe.init.model, recipe.init.revision)


def export(
    run: str | Path,
    folder: str | Path,
    merge: float | None = None,
    *,
    to_hub: str | None = None,
    license: str | None = None,
    language: str | Iterable[str] | None = None,
) -> Path:
    """Write a checkpoint as a folder that transformers loads, with a model card; returns the folder.

    Args:
        run: a run folder, or `RUN@STEP`; its last step unless given. A run's name, or the beginning of its folder's
            name in `runs`, does too: of several runs of one name it is the last that was trained.
        merge: average with the decoder that it came from; this share is the decoder's.
        to_hub: `push` the folder to this repository, with license and language.
    """
    from biphase.export.push import check_repository

    refuse_filled(Path(folder))
    run = name_run(str(run))
    find_checkpoint(run)
    if to_hub is not None:
        check_repository(to_hub)
    from biphase.export.model import export_checkpoint

    console.prose(export_checkpoint(run, Path(folder), merge))
    if to_hub is not None:
        push(folder, to_hub, license=license, language=language)
    return Path(folder)


def push(
    source: str | Path,
    repo: str,
    *,
    public: bool = False,
    license: str | None = None,
    language: str | Iterable[str] | None = None,
    dry_run: bool = False,
) -> None:
    """Send a model folder to the Hugging Face hub, or a run: its end to `main`, other checkpoints to `step-N`.

    Args:
        repo: USER/NAME; a new repository is private.
        public: make it public, or send to one that is.
        license: such as `apache-2.0`, for a card that says none.
        language: such as `en`, or several, for a card that says none.
        dry_run: say what would go.
    """
    from biphase.export.push import push_model

    source = name_run(str(source))
    languages = tuple(by_commas(language) if isinstance(language, str) else language or ())
    console.print(push_model(source, repo, public=public, license=license, languages=languages, dry_run=dry_run))


def load(model: str | Path) -> Any:
    """The network behind a run (`RUN`, `RUN@STEP`), a folder or a hub id, with its tokenizer, for `encode`.

    Returns: a `biphase.finetuning.encoders.Encoder`; a `SentenceTransformer` where the folder is one that does more
    than to take the mean over a text's tokens.
    """
    from biphase.export.model import NEEDS_VERSION, SENTENCE_TRANSFORMERS_FILES
    from biphase.finetuning.encoders import load_encoder
    from biphase.finetuning.models import find_folder

    folder = find_folder(str(model))
    modules = SENTENCE_TRANSFORMERS_FILES.items() if (folder / "modules.json").exists() else ()
    needing = {name: content | NEEDS_VERSION for name, content in modules if isinstance(content, dict)}
    if all(
        (folder / name).exists() and read_json(folder / name) in (content, needing.get(name, content))
        for name, content in modules
    ):
        return load_encoder(str(model))
    from biphase.verbs.embedding import needs_embeddings

    with needs_embeddings("an embedding model"):
        from biphase.embedding.folder import load_embedder
    return load_embedder(str(model))


def encode(model: Any, texts: Iterable[str], *, device: str = "auto") -> "np.ndarray":
    """The embeddings of texts, fp32, [texts, width]: the mean over a text's tokens, which all look both ways, as in
    `evaluate` before any fine-tuning. Texts are packed, not padded; one of more tokens than the network has positions
    for is cut, and told.

    Args:
        model: what `load` returned, or what it takes.
        device: auto, cpu or cuda.
    """
    model = load(model) if isinstance(model, str | Path) else model
    texts = [texts] if isinstance(texts, str) else list(texts)
    from biphase.device import choose_device

    place = choose_device(device)
    if not hasattr(model, "backbone"):
        return model.encode(texts, show_progress_bar=False, convert_to_numpy=True, device=str(place))
    from biphase.finetuning.probe import encode_packed

    return encode_packed(model, texts, place)
