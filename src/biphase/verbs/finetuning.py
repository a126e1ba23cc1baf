"""A network and a task → a fine-tuned network with its score; that network and rows → predictions."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from biphase.config import parse_config
from biphase.console import err
from biphase.errors import InputError
from biphase.finetuning.config import FinetuneConfig
from biphase.finetuning.scores import Score
from biphase.verbs.memory import keep_rows, rows_in
from biphase.verbs.own_task import write_task

if TYPE_CHECKING:
    import pandas

OWN_TASKS = "data"
"""The folder beside scores in which tasks are kept that came as rows."""


def finetune(
    model: str | Path,
    task: str | None = None,
    *,
    data: Any = None,
    template: str | None = None,
    label: str | None = None,
    scores: str | Path = "scores",
    keep: str | Path | None = None,
    **settings: Any,
) -> Score:
    """Fine-tune one model on one task with one rate and seed, and score it on validation and test.

    Args:
        model: `RUN[@STEP]`, a model folder, or a hub id (`ID@REVISION`).
        task: a name such as snli, or a YAML file that describes one; for rows in memory, a name for them.
        data: the folder with the task's data as published, in place of the hub; or, without such a task, rows to train
            on (a DataFrame, a `datasets.Dataset`, dictionaries, a file) or a mapping of `train`, `validation` and
            `test` to such. What is missing is drawn from train. The columns tell what the task is.
        template: columns in braces that make the input of rows, in place of all their columns of texts.
        label: the column of rows with the label, or with the list of tags, where its name does not tell.
        scores: where finished cells are kept.
        keep: write the fine-tuned model to this folder, for transformers' pipelines.
        settings: of the cell, such as `learning_rate=1e-4, seed=3`.
    """
    from biphase.finetuning.fit import fit_cell

    config = parse_config(FinetuneConfig, settings, origin=task or "finetune")
    if task is None and is_folder(data) and not Path(data).exists():
        raise InputError(f"{data} does not exist; give a file of rows as data")
    folder = data if is_folder(data) else None
    if folder is None and data is not None:
        task, folder = write_task(data, Path(scores) / OWN_TASKS, task, template, label)
    if task is None:
        raise InputError("which task? Name one, such as snli, or a YAML file, or give rows as data")
    score = fit_cell(str(model), task, config, Path(scores), folder, None if keep is None else Path(keep))
    err.print(f"{score.folder}: scores and predictions" + ("" if keep is None else f"; {keep}: the model"))
    return score


def is_folder(data: Any) -> bool:
    """Whether data is where a task's published files are (a folder, or `hub`), and not rows or a file of rows."""
    return isinstance(data, str | Path) and not Path(data).is_file()


def predict(
    model: str | Path,
    data: Any,
    *,
    out: str | Path | None = None,
    template: str | None = None,
    device: str = "auto",
) -> "pandas.DataFrame | Path":
    """Predict labels, spans or answers for every row; the rows' own columns stay.

    Args:
        model: a folder that `finetune` kept, or a hub id with a head.
        data: a file (.jsonl, .csv, .tsv, .json, .parquet, columns; .txt: a text a line), a DataFrame, a
            `datasets.Dataset`, texts, or rows as dictionaries.
        out: write a .jsonl or .csv file, row by row, and return its path.
        template: columns in braces, for a model that does not say what its inputs are: `{text}`.
        device: auto, cpu or cuda.
    """
    import pandas

    from biphase.verbs.prediction import predict_rows, write_predictions

    with TemporaryDirectory() as folder:
        in_memory = not isinstance(data, str | Path)
        file = keep_rows(rows_in(data), Path(folder), "rows") if in_memory else Path(data)
        if out is not None:
            write_predictions(str(model), file, Path(out), template, device)
            return Path(out)
        table = pandas.DataFrame(list(predict_rows(str(model), file, template, device)))
        return table.set_axis(data.index) if isinstance(data, pandas.DataFrame) else table
