"""Rows of a user's files as a kept folder reads them. No network is needed for that."""

from pathlib import Path
from typing import Any

import pytest

from biphase.finetuning.config import FinetuneConfig
from biphase.finetuning.kept import KeptModel, label_of, layout_to_predict, read_labelled
from biphase.tasks.spec import Task

from .conftest import write_jsonl

TAGGED = {"name": "mine", "family": "token_classification", "metric": "f1", "label": "tags"}
TAGGED |= {"classes": ["O", "B-x", "I-x"]}
TEXTS = {"name": "mine", "family": "sequence_classification", "metric": "accuracy", "template": "{text}"}
TEXTS |= {"classes": ["no", "yes"], "unlabelled": ["-"], "files": [{"train": "train.csv"}]}


def kept(file: Path, **keys: Any) -> KeptModel:
    task = Task.model_validate(keys)
    return KeptModel(task=task, config=FinetuneConfig(), layout=layout_to_predict(task, file))


HUB = {"id": "some/data", "splits": {"train": "train"}}


@pytest.mark.parametrize("ending", [".conll", ".iob", ".jsonl", ".conllu"])
@pytest.mark.parametrize("source", ["files", "hub"])
@pytest.mark.parametrize(
    ("scheme", "tags"),
    [("IOB1", "I-x I-x B-x O I-x"), ("BIOES", "B-x E-x S-x O S-x"), ("IOB1", "B-x I-x B-x O B-x")],
)
def test_a_file_of_another_ending_has_the_scheme_of_training(
    scheme: str, tags: str, source: str, ending: str, tmp_path: Path
) -> None:
    """A file in IOB2 is read as it is: its beginnings are those of every scheme."""
    place = {"files": [{"train": "train.conll", "scheme": scheme}]}
    file, words = tmp_path / f"new{ending}", [*zip("abcde", tags.split(), strict=True)]
    if ending == ".jsonl":
        write_jsonl(file, [{"tokens": [word for word, _ in words], "tags": tags.split()}])
    else:
        form = "{0}\t{1}\t_\t{2}\n" if ending == ".conllu" else "{1} {2}\n"
        file.write_text("".join(form.format(at, *pair) for at, pair in enumerate(words, start=1)))
    model = kept(file, **TAGGED, **(place if source == "files" else {"hub": HUB | {"scheme": scheme}}))
    [example] = read_labelled(model, file).test
    assert example.tags == (1, 2, 1, 0, 1)


@pytest.mark.parametrize(
    ("row", "label"),
    [
        ({"text": "so it is", "label": "yes"}, ("yes", "yes")),
        ({"text": "so it is", "label": "maybe"}, (None, "maybe")),
        ({"text": "so it is", "label": ""}, (None, None)),
        ({"text": "so it is", "label": "-"}, (None, None)),
        ({"text": " ", "label": "yes"}, (None, None)),
    ],
)
def test_only_a_label_outside_the_classes_is_unknown(row: dict[str, str], label: Any) -> None:
    assert label_of(kept(Path("rows.csv"), **TEXTS), row) == label
