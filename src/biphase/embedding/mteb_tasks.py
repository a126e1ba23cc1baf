"""An embedding model and the name of a task of MTEB → the result of its own code, from the hub or a local folder."""

from pathlib import Path
from typing import Any

import mteb
from sentence_transformers import SentenceTransformer

from biphase.errors import InputError, first_line


def run_mteb(model: SentenceTransformer, name: str) -> dict[str, Any]:
    """MTEB's result of one task as its files have it.

    Args:
        name: `STSBenchmark`, or `STSBenchmark=FOLDER` with the task's data as `datasets` reads a folder (such as
            `test.jsonl` or `test.parquet`), for machines without network.

    Raises:
        InputError: no such task, or data that cannot be had.
    """
    name, _, folder = name.partition("=")
    try:
        task = mteb.get_task(name)
    except KeyError as error:
        raise InputError(f"MTEB has no task '{name}' ({first_line(error)})") from None
    if folder:
        if not Path(folder).is_dir():
            raise InputError(f"{folder} is no folder")
        local = {"path": str(Path(folder).resolve()), "revision": "local"}
        task.metadata = task.metadata.model_copy(update={"dataset": local})
    try:
        result = mteb.evaluate(
            model, task, cache=None, co2_tracker=False, overwrite_strategy="always", show_progress_bar=False
        )
    except (OSError, ValueError, KeyError) as error:
        raise InputError(
            f"MTEB's {name} cannot be run ({first_line(error)}); without network give its data: mteb:{name}=FOLDER"
        ) from None
    return dict(result.task_results[0].to_dict())
