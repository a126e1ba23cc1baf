"""What a worker does for a grid: token ids of a task, cells of a training. PyTorch is loaded by the worker only."""

from pathlib import Path
from typing import Any

from biphase.finetuning.cells import find_task_sources, resolve_precision
from biphase.finetuning.config import FinetuneConfig
from biphase.run import split_reference


def absolute_model(model: str) -> str:
    """The model's name for a worker that may stand in another folder."""
    path, step = split_reference(model)
    if not Path(path).exists():
        return model
    return str(Path(path).resolve()) + (f"@{step}" if step else "")


def precision_unit(config: dict[str, Any]) -> str:
    return resolve_precision(FinetuneConfig.model_validate(config)).precision


def encode_unit(model: str, task: str, config: dict[str, Any], data_dirs: dict[str, str]) -> list[str]:
    from biphase.finetuning.encoders import check_length, load_encoder
    from biphase.finetuning.encoding_cache import load_encoded

    encoder, settings = load_encoder(model), FinetuneConfig.model_validate(config)
    check_length(encoder, settings)
    load_encoded(find_task_sources(task, data_dirs)[1], encoder.tokenizer, settings)
    return []


def fit_unit(
    model: str, label: str, tasks: list[str], config: dict[str, Any], out: str, data_dirs: dict[str, str]
) -> list[str]:
    from biphase.finetuning.fit import fit_cells

    scores = fit_cells(model, tasks, FinetuneConfig.model_validate(config), Path(out), data_dirs, label)
    return [score.headline() for score in scores]
