"""A model folder → a copy of its files, to which a form is added."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from biphase import files
from biphase.console import err
from biphase.corpus.tokenizer import check_tokenizer_files, load_pretrained_tokenizer, tell_misreading
from biphase.errors import InputError
from biphase.exporting.plain import find_transformer_file, text_limits
from biphase.exporting.push import CARD_NAME, MODEL_FILES, read_text
from biphase.finetuning.kept import TRAINED_ROWS


def copy_model(source: Path, folder: Path, complete: Callable[[Path], None]) -> None:
    """Copy the model files of a folder, and let `complete` add to the copy. A line says if transformers reads texts
    otherwise than the tokenizer.json, with which golden vectors are computed.

    Raises `InputError` for a target that is not empty, and for a link that leaves the folder, except into its own
    repository in the Hub's cache.
    """
    for place, form in {"onnx": "ONNX files", "model.gguf": "a GGUF file"}.items():
        if (source / place).exists():
            raise InputError(f"{source} has {form} already (in {place}): give the folder it was made from")
    places = [source.resolve()]
    if places[0].parent.name == "snapshots":
        places.append((places[0].parents[1] / "blobs").resolve())
    check_tokenizer_files(source)  # before the copy, whose name a message would give
    if misread := tell_misreading(source, load_pretrained_tokenizer(source)):
        err.print(f"{source}: {misread}; the golden vectors of `check` come from its tokenizer.json")
    mark = source / files.MARK
    kind = files.read_json_as(mark, files.FolderMark).biphase if mark.exists() else "model"
    with files.whole_folder(folder) as part:
        files.refuse_filled(folder)  # another process may have written it in the meantime
        for path in files.files_below(source):
            name = path.relative_to(source)
            if MODEL_FILES.fullmatch(name.as_posix()) or name == Path(TRAINED_ROWS):
                if not any(path.resolve().is_relative_to(place) for place in places):
                    raise InputError(f"{path} is a link to a file outside of its folder: put the file in its place")
                (part / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, part / name)
        if (card := part / CARD_NAME).exists():
            text, (old, new) = read_text(card), (places[0].name, folder.resolve().name)
            text = text.replace(f"# {old}\n", f"# {new}\n").replace(f'("{old}"', f'("{new}"')
            card.write_text(text, encoding="utf-8")
        join_limits(part)
        complete(part)
        files.mark_successor(part, folder, kind)


def join_limits(folder: Path) -> None:
    """Make a folder's tokenizer and sentence-transformers cut texts at the same number of tokens: the smallest of
    theirs and the network's."""
    limits = text_limits(folder, load_pretrained_tokenizer(folder))
    lengths = {folder / "tokenizer_config.json": "model_max_length"}
    if (transformer_file := find_transformer_file(folder)) is not None:
        lengths[transformer_file] = "max_seq_length"
    for path, key in lengths.items() if limits else ():
        settings = files.read_json_as(path, dict[str, Any]) if path.exists() else {}
        if settings.get(key) != min(limits.values()):
            files.write_json(path, settings | {key: min(limits.values())})
