"""A model folder, or a run's checkpoints → a repository on the Hugging Face Hub.

In: a folder that `export`, `--keep` or `embed` wrote, or RUN[@STEP], which is exported first. Out: a commit on `main`;
checkpoints before a run's end go to branches `step-N`. `push` sends only model files, card and curves (no moments, logs
or predictions), and only after every check has passed.
"""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

from biphase.config import ModelName, OnCommandLine, by_commas
from biphase.console import out as console
from biphase.errors import InputError, told_as
from biphase.files import files_below
from biphase.hub import told_by_hub
from biphase.run import Run, find_checkpoint, is_run_folder, name_run, read_done, split_reference, whole_steps

CARD_NAME = "README.md"
MODEL_FILES = re.compile(
    r"model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json|(generation_)?config\.json|biphase\.json|golden\.json"
    r"|tokenizer(_config)?\.json|(special_tokens_map|added_tokens|vocab)\.json|vocab\.txt|merges\.txt"
    r"|\w+\.model|chat_template\.jinja|modules\.json|(config_)?sentence_(bert_config|transformers)\.json"
    r"|\d+_\w+/(config\.json|model\.safetensors)|README\.md|LICENSE|curves\.png"
    r"|onnx/model(_quantized)?\.onnx(_data)?|model\.gguf"
)
"""The paths of the files to send to the Hub."""
LOCAL_PATH = re.compile(
    r"(?<![\w:/.<\\])((?:file:/+)?(?:/[\w.-]+){2,}|file:/+[\w.-]+|~/[\w./-]+|[A-Za-z]:\\+\w[\w\\.-]*"
    r"|\\\\[\w.-]{2,}\\[\w$.-]{2,})"
)
"""A local path in a text: /data/mine, file:///data, ~/data, D:\\data, \\\\server\\data; no web address."""
PARENT_PATH = re.compile(r"(?<![\w./~-])(?:\.\./)+[\w.-]+(?:/[\w.-]+)*")
"""A path in a text that begins at a parent folder: ../data/mine."""
HUB_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{20,}")
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
        InputError: before sending, for a folder or card that is not fit to send; or with the reason that the Hub
            states.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    languages = by_commas(language) if isinstance(language, str) else list(language or ())
    check_repository(repo)
    report = [f"{repo}: {'public' if public else 'private'}, nothing sent (dry run)" if dry_run else f"{repo}:"]
    api = HfApi(library_name="biphase")
    with TemporaryDirectory() as scratch:
        uploads: dict[str, dict[str, Any]] = {}
        # Each folder is checked before the next checkpoint is exported.
        for revision, folder in folders_to_send(name_run(str(source)), repo, Path(scratch)):
            paths = {path.relative_to(folder).as_posix(): path for path in files_below(folder) if not path.is_symlink()}
            files = {name: path for name, path in paths.items() if MODEL_FILES.fullmatch(name)}
            report.append(f"revision {revision}:")
            report += [f"  {name}  {path.stat().st_size / 1e6:,.2f} MB" for name, path in files.items()]
            report += [f"  stays here: {', '.join(sorted(paths.keys() - files.keys()))}"] if paths != files else []
            check_files(folder, files)
            card = files[CARD_NAME].read_text(encoding="utf-8").replace(f'("{folder.name}"', f'("{repo}"')
            card = complete_card(card, files[CARD_NAME], license, languages)
            uploads[revision] = {**files, CARD_NAME: card.encode()}
        if not dry_run:
            remedy = "is the name right, and are you signed in (`hf auth login`)?"
            with told_by_hub(f"{repo} cannot be sent to", remedy):
                api.create_repo(repo, private=not public, exist_ok=True)
                if not public and not api.model_info(repo).private:
                    raise InputError(f"{repo} already exists, and is public; send to it with `public`")
                for revision, contents in uploads.items():
                    if revision != "main":
                        api.create_branch(repo, branch=revision, exist_ok=True)
                    operations = [CommitOperationAdd(name, content) for name, content in contents.items()]
                    message = f"biphase push ({revision})"
                    commit = api.create_commit(repo, operations, commit_message=message, revision=revision)
                    report.append(commit.commit_url)
    console.print("\n".join(report))


def check_push(to_hub: str | None, license: str | None, language: object) -> None:
    """Raise `InputError` for a repository as `check_repository` does, and for settings of a push without one."""
    if to_hub is not None:
        check_repository(to_hub)
    elif license is not None or language is not None:
        raise InputError("`license` and `language` go into the card that is pushed: give `to_hub`, or edit README.md")


def check_repository(repo: str) -> None:
    """Raise `InputError` unless a name is USER/NAME."""
    from huggingface_hub.utils import validate_repo_id

    with told_as(f"{repo} is not a repository name", "give USER/NAME"):
        validate_repo_id(repo if "/" in repo else f"{repo}/")


def folders_to_send(source: str, repo: str, scratch: Path) -> Iterator[tuple[str, Path]]:
    """Yield each branch with its folder; checkpoints are exported into `scratch`."""
    path, step = split_reference(source)
    if not (Path(path) / "config.yaml").exists():
        yield "main", Path(source)
        return
    run = Run(Path(path))
    steps = whole_steps(run)
    if not steps or (step and step not in map(str, steps)):
        raise InputError(f"{source} has no whole checkpoint")
    from biphase.exporting.model import export_checkpoint  # imports torch, which a folder does not need

    for sent in [int(step)] if step else steps:
        revision = "main" if run.is_done and sent == steps[-1] else f"step-{sent}"
        folder = scratch / revision / repo.partition("/")[2]
        export_checkpoint(f"{path}@{sent}", folder)
        yield revision, folder


def check_files(folder: Path, files: dict[str, Path]) -> None:
    """Raise `InputError` for files that are not a model with a card, and for texts with access tokens or local
    paths."""
    has_weights = any(name.endswith(".safetensors") for name in files)
    if not has_weights or not files.keys() & {"config.json", "modules.json"}:
        raise InputError(f"{folder} is not a model folder (configuration and *.safetensors); export a run into one")
    if CARD_NAME not in files:
        raise InputError(f"{folder} has no model card ({CARD_NAME}); write one")
    local = []
    for path in files.values():
        if path.suffix in (".json", ".md", ".jinja") and path.name not in WORDS_OF_A_TOKENIZER:
            text = path.read_text(encoding="utf-8")
            if match := HUB_TOKEN.search(text):
                raise InputError(f"{path} has an access token of the Hub, {match[0][:6]}…: remove it")
            if match := LOCAL_PATH.search(text):
                local.append(f"{path} ({match[1]})")
    if local:
        raise InputError(f"local paths are named in {', '.join(local)}: write another word there")


def complete_card(text: str, path: Path, license: str | None, languages: list[str]) -> str:
    """Add licence and languages to a card that lacks them. Raises `InputError` if the user names none either, or others
    than the card."""
    from huggingface_hub import ModelCard

    card = ModelCard(text, ignore_metadata_errors=True)
    options_given = {"license": license, "language": languages}
    if lacking := [name for name, value in options_given.items() if not (value or getattr(card.data, name))]:
        options = " and ".join(f"`{name}`" for name in lacking)
        raise InputError(f"{path} has no {' and no '.join(lacking)}: give {options}, or write it at its top")
    for name, value in options_given.items():
        old = getattr(card.data, name)
        if old and value and value not in (old, [old]):
            raise InputError(f"{path} says {name} {old}, not {value}: leave one out, or change the other at its top")
        setattr(card.data, name, old or value)
    return str(card)
    find_checkpoint(source)  # refuses a run without it, or one that has lost its end
