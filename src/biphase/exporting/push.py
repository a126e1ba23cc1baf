"""A model folder, or a run's checkpoints → a repository on the Hugging Face Hub.

In: a folder that `export`, `--keep` or `embed` wrote, or RUN[@STEP], which is exported first. Out: a commit on `main`;
checkpoints before a run's end go to branches `step-N`. `push` sends only model files, card and curves (no moments, logs
or predictions), only after every check has passed, and never beside model files of another push.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

from biphase.config import ModelName, OnCommandLine, by_commas
from biphase.console import err, out
from biphase.corpus.tokenizer import TOKENIZER_FILES
from biphase.encoder.models import find_folder
from biphase.errors import InputError, first_of, told_as
from biphase.files import files_below, reading, refuse_damaged
from biphase.hub import told_by_hub
from biphase.run import Run, find_checkpoint, is_run_folder, name_run, read_done, split_reference, whole_steps

CARD_NAME, EMPTY_CARD = "README.md", "---\n\n---\n"
MODEL_FILES = re.compile(
    r"(\d+_\w+/)?(model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json|((generation|cnn|lstm)_)?config\.json"
    r"|tokenizer(_config)?\.json|(special_tokens_map|added_tokens|vocab)\.json|vocab\.(bpe|txt)|merges\.txt"
    r"|[^/]+\.model|chat_template\.jinja|sentence_[\w-]+_config\.json)"
    r"|modules\.json|config_sentence_transformers\.json|biphase\.json|golden\.json|README\.md|LICENSE|curves\.png"
    r"|onnx/model(_quantized)?\.onnx(_data)?|model\.gguf"
)
"""The paths of the files to send to the Hub; a module of sentence-transformers has a folder such as 1_Pooling."""
MODULE_FOLDER = re.compile(r"\d+_\w+")
LOCAL_PATH = re.compile(
    r"(?<![\w:/.<\\])((?:file:/+)?(?:/[\w.-]+){2,}|file:/+[\w.-]+|~/[\w./-]+|[A-Za-z]:\\+\w[\w\\.-]*"
    r"|\\\\[\w.-]{2,}\\[\w$.-]{2,})"
)
"""A local path in a text: /data/mine, file:///data, ~/data, D:\\data, \\\\server\\data; no web address."""
PARENT_PATH = re.compile(r"(?<![\w./~-])(?:\.\./)+[\w.-]+(?:/[\w.-]+)*")
"""A path in a text that begins at a parent folder: ../data/mine."""
HUB_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{20,}")
COMMIT_TITLE = "biphase push"
PUSH_REMEDY = "is the name right, and are you signed in (`hf auth login`)?"
LISTING_SECONDS = 10.0
"""The longest wait for the list of the files of a repository."""
WORDS_OF_A_TOKENIZER = ("tokenizer.json", "vocab.json", "merges.txt", "vocab.txt")


def without_folders(text: str) -> str:
    """Return a text with the last name of each path that only its author has: /home/ann/shards is ./shards."""
    for pattern in (LOCAL_PATH, PARENT_PATH):
        text = pattern.sub(lambda path: "./" + path[0].replace("\\", "/").rstrip("/").rpartition("/")[2], text)
    return text


def push(
    source: ModelName,
    repo: str,
    *,
    public: bool = False,
    license: str | None = None,
    language: Annotated[str | Iterable[str] | None, OnCommandLine(str | None)] = None,
    dry_run: bool = False,
) -> None:
    """Send a model folder to the Hugging Face Hub, or a run: its end to `main`, other checkpoints to `step-N`.

    Args:
        source: A model folder or RUN[@STEP].
        repo: A repository on the Hugging Face Hub, USER/NAME; a new one is private.
        public: Make a new repository public, or allow pushing to a public one.
        license: The license to put in the model card, such as apache-2.0, if the card names none.
        language: The languages to put in the model card, such as en or en,de, if the card names none.
        dry_run: List the files; upload nothing.

    Raises:
        InputError: before sending, for a folder or card that is not fit to send, and for a revision with model files
            that are not sent now; or with the reason that the Hub states.
    """
    from huggingface_hub import HfApi

    languages = list_languages(language)
    check_repository(repo)
    report = [f"{repo}: {'public' if public else 'private'}, nothing sent (dry run)" if dry_run else f"{repo}:"]
    api = HfApi(library_name="biphase")
    with TemporaryDirectory() as scratch:
        uploads: dict[str, dict[str, Any]] = {}
        # Each folder is checked before the next checkpoint is exported.
        for revision, folder in folders_to_send(name_run(str(source)), repo, Path(scratch)):
            paths = {path.relative_to(folder).as_posix(): path for path in files_below(folder)}
            files = {name: path for name, path in paths.items() if MODEL_FILES.fullmatch(name)}
            check_files(folder, files)
            report.append(f"revision {revision}:")
            report += [f"  {name}  {path.stat().st_size / 1e6:,.2f} MB" for name, path in files.items()]
            report += [f"  stays here: {', '.join(sorted(paths.keys() - files.keys()))}"] if paths != files else []
            card = load_from(files[CARD_NAME].read_text(encoding="utf-8"), folder, repo, revision)
            card = complete_card(card, source, license, languages)
            uploads[revision] = {**files, CARD_NAME: card.encode()}
        told = partial(told_by_hub, f"{repo} cannot be sent to", PUSH_REMEDY)
        new = refuse_left(api, repo, uploads, told, dry_run=dry_run)
        if not dry_run:
            with told():
                report += commit_uploads(api, repo, uploads, new, public=public)
    out.print("\n".join(report))


def refuse_left(
    api: Any, repo: str, uploads: Mapping[str, Collection[str]], told: Callable[[], Any], *, dry_run: bool
) -> set[str]:
    """Raise `InputError` for revisions with model files that are not sent now; print a line for a card that somebody
    edited on the Hub. Returns the revisions that do not exist yet. In a dry run, a Hub that does not answer is only
    told."""
    left: dict[str, list[str] | None] = {}
    try:
        with told():
            left = {revision: find_left(api, repo, revision, sent) for revision, sent in uploads.items()}
            for revision in [revision for revision, names in left.items() if names is not None]:
                tell_edit(api, repo, revision)
    except InputError as error:
        if not dry_run:
            raise
        err.print(f"the files that {repo} has now are not known: {error}")
    for revision, names in left.items():
        if names:
            files = f"revision {revision} of {repo} has model files that are not sent now ({first_of(names)})"
            raise InputError(f"{files}: delete them on the Hub, or push to another repository")
    return {revision for revision, names in left.items() if names is None}


def tell_edit(api: Any, repo: str, revision: str) -> None:
    """Print a line if the card at a revision was last changed by another commit than that of a push."""
    for card in api.get_paths_info(repo, [CARD_NAME], expand=True, revision=revision):
        if card.last_commit and not card.last_commit.title.startswith(COMMIT_TITLE):
            edited = f"was last changed by the commit '{card.last_commit.title}' on the Hub, where its history stays"
            err.print(f"revision {revision} of {repo}: its card {edited}; a push replaces it")


def find_left(api: Any, repo: str, revision: str, sent: Collection[str]) -> list[str] | None:
    """List the model files of a revision that a push does not replace, without a licence that someone added there; None
    for a revision that does not exist."""
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    try:
        info = api.model_info(repo, revision=revision, timeout=LISTING_SECONDS)
    except (RepositoryNotFoundError, RevisionNotFoundError):
        return None
    names = [file.rfilename for file in info.siblings if file.rfilename not in sent]
    return sorted(name for name in names if MODEL_FILES.fullmatch(name) and name != "LICENSE")


def commit_uploads(
    api: Any, repo: str, uploads: Mapping[str, Mapping[str, Any]], new: Collection[str], *, public: bool
) -> list[str]:
    """Make the repository if there is none, and send the files of each revision in one commit. Returns the addresses of
    the commits.

    A branch of the Hub begins as a copy of `main`. So the commit of a `new` one deletes the other model files there.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    api.create_repo(repo, private=not public, exist_ok=True)
    if not public and not api.model_info(repo).private:
        raise InputError(f"{repo} already exists, and is public; send to it with `public`")
    addresses = []
    for revision, files in uploads.items():
        operations: list[Any] = [CommitOperationAdd(name, content) for name, content in files.items()]
        if revision in new and revision != "main":
            api.create_branch(repo, branch=revision)
            operations += map(CommitOperationDelete, find_left(api, repo, revision, files) or ())
        message = f"{COMMIT_TITLE} ({revision})"
        addresses.append(api.create_commit(repo, operations, commit_message=message, revision=revision).commit_url)
    return addresses


def check_push(
    name: str, source: Path, to_hub: str | None, license: str | None, language: str | Iterable[str] | None
) -> list[str]:
    """Raise `InputError` for a repository as `check_repository` does, for the card of a source as `complete_card` does,
    and for settings of a push without a repository. Returns the languages."""
    languages, card = list_languages(language), source / CARD_NAME
    if to_hub is not None:
        check_repository(to_hub)
        complete_card(read_text(card) if card.exists() else EMPTY_CARD, name, license, languages)
    elif license is not None or language is not None:
        raise InputError("`license` and `language` go into the card that is pushed: give `to_hub`, or edit README.md")
    return languages


def push_written(folder: Path, repo: str, license: str | None, languages: list[str]) -> None:
    """Push a folder that was written just now. An error says that the folder is there, and how to push it."""
    try:
        push(folder, repo, license=license, language=languages)
    except InputError as error:
        raise InputError(f"{error}; {folder} is written: `biphase push {folder} {repo} …` sends it") from None


def list_languages(language: str | Iterable[str] | None) -> list[str]:
    return by_commas(language) if isinstance(language, str) else list(language or ())


def check_repository(repo: str) -> None:
    """Raise `InputError` unless a name is USER/NAME."""
    from huggingface_hub.utils import validate_repo_id

    with told_as(f"{repo} is not a repository name", "give USER/NAME"):
        validate_repo_id(repo if "/" in repo else f"{repo}/")


def folders_to_send(source: str, repo: str, scratch: Path) -> Iterator[tuple[str, Path]]:
    """Yield each branch with its folder; checkpoints are exported into `scratch`."""
    path, step = split_reference(source)
    if not is_run_folder(Path(path)):
        yield "main", Path(source)
        return
    find_checkpoint(source)  # refuses a run without it, or one that has lost its end
    run = Run(Path(path))
    end = (read_done(run) or {}).get("step")
    from biphase.exporting.model import export_checkpoint  # imports torch, which a folder does not need

    for sent in [int(step)] if step else whole_steps(run):
        revision = "main" if sent == end else f"step-{sent}"
        folder = scratch / revision / repo.partition("/")[2]
        export_checkpoint(f"{path}@{sent}", folder)
        yield revision, folder


def check_files(folder: Path, files: dict[str, Path]) -> None:
    """Raise `InputError` for files that are not a whole, undamaged model with a tokenizer and a card, for links, and
    for texts with access tokens or local paths."""
    modules = (path for path in folder.iterdir() if path.is_symlink() and MODULE_FOLDER.fullmatch(path.name))
    if links := [*(name for name, path in files.items() if path.is_symlink()), *(path.name for path in modules)]:
        raise InputError(f"{folder}: links are not sent ({first_of(links)}): put the files in their places")
    has_weights = any(name.endswith(".safetensors") for name in files)
    if not has_weights or not files.keys() & {"config.json", "modules.json"}:
        raise InputError(f"{folder} is not a model folder (configuration and *.safetensors); export a run into one")
    if "config.json" in files:
        find_folder(str(folder))
    else:  # a model of sentence-transformers whose network lies in a folder of its own
        refuse_damaged(folder, "make it again")
        if not any(path.match(pattern) for path in files.values() for pattern in TOKENIZER_FILES):
            raise InputError(f"{folder} has no tokenizer files (tokenizer.json or the like)")
    if CARD_NAME not in files:
        raise InputError(f"{folder} has no model card ({CARD_NAME}); write one")
    local = []
    for path in files.values():
        if path.suffix in (".json", ".md", ".jinja") and path.name not in WORDS_OF_A_TOKENIZER:
            text = read_text(path)
            if match := HUB_TOKEN.search(text):
                raise InputError(f"{path} has an access token of the Hub, {match[0][:6]}…: remove it")
            if match := LOCAL_PATH.search(text):
                local.append(f"{path} ({match[1]})")
    if local:
        raise InputError(f"local paths are named in {', '.join(local)}: write another word there")


def read_text(path: Path) -> str:
    """Read a text. Raises `InputError` for a file that is not UTF-8."""
    with reading(path, "save it in UTF-8"):
        return path.read_text(encoding="utf-8")


def load_from(card: str, folder: Path, repo: str, revision: str) -> str:
    """Return a card whose examples load a revision of a repository, in place of the folder or of what is named in the
    card's title."""
    loaded = f'("{repo}"' if revision == "main" else f'("{repo}", revision="{revision}"'
    for name in (folder.resolve().name, *re.findall("^# (.+)$", card, re.MULTILINE)):
        card = card.replace(f'("{name}"', loaded)
    return card


def complete_card(text: str, name: str | Path, license: str | None, languages: list[str]) -> str:
    """Add licence and languages to the card of a folder or run that lacks them. Raises `InputError` if the user names
    none either, or others than the card."""
    from huggingface_hub import ModelCard

    card = ModelCard(text, ignore_metadata_errors=True)
    options_given = {"license": license, "language": languages}
    if lacking := [key for key, value in options_given.items() if not (value or getattr(card.data, key))]:
        options = " and ".join(f"`{key}`" for key in lacking)
        lack = f"the card of {name} has no {' and no '.join(lacking)}"
        raise InputError(f"{lack}: give {options}, or write it at the top of a folder's {CARD_NAME}")
    for key, value in options_given.items():
        old = getattr(card.data, key)
        if old and value and value not in (old, [old]):
            told = f"the card of {name} says {key} {old}, not {value}"
            raise InputError(f"{told}: leave one out, or change the other at its top")
        setattr(card.data, key, old or value)
    return str(card)
