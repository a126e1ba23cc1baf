"""Where else the numbers of a run go while it trains: TensorBoard's event files, or Weights & Biases.

The records of metrics.jsonl go under the names of transformers' trainer (`train/learning_rate`, `eval/…`); what depends
on the objective bears its name (`train/mlm_loss`, `eval/clm_accuracy`), so that no curve jumps where an objective ends.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from biphase.console import err
from biphase.errors import InputError

TrackingName = Literal["tensorboard", "wandb"]

Send = Callable[[Mapping[str, Any]], None]
"""Called with each record of metrics.jsonl."""

OBJECTIVE_NUMBERS = ("loss", "accuracy", "bits_per_byte", "targets")
TRAINER_NAMES = {"lr": "learning_rate", "tokens_seen": "num_input_tokens_seen", "train": "train", "validation": "eval"}


def check_tracking(name: TrackingName | None) -> None:
    """Raises `InputError` where the package is not installed. A folder `wandb` of earlier runs is no package."""
    spec = find_spec(name) if name else None
    if name and (spec is None or spec.origin is None):
        extra = "wandb" if name == "wandb" else "tracking"
        raise InputError(f"tracking: {name} needs a package that is not here; pip install 'biphase[{extra}]'")


def name_scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """`{kind: train, objective: mlm, step: 3, loss: 2.0, lr: 0.1}` → train/mlm_loss 2.0, train/learning_rate 0.1."""
    scalars = {}
    for key, value in record.items():
        if key not in ("kind", "objective", "step"):
            name = f"{record['objective']}_{key}" if key in OBJECTIVE_NUMBERS else TRAINER_NAMES.get(key, key)
            scalars[f"{TRAINER_NAMES[record['kind']]}/{name}"] = value
    return scalars


@contextmanager
def open_tracking(
    name: TrackingName | None, folder: Path, settings: Mapping[str, Any], first_step: int
) -> Iterator[Send]:
    """Send records while it is open, and what belongs to a run's folder.

    Args:
        settings: what W&B shows beside the curves.
        first_step: steps from here on that an earlier process told TensorBoard of are taken back. W&B leaves out steps
            that it has.

    Raises:
        InputError: the package is missing, or W&B cannot be reached.
    """
    check_tracking(name)
    if name == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        with SummaryWriter(str(folder / "tensorboard"), purge_step=first_step) as writer:

            def add(record: Mapping[str, Any]) -> None:
                for key, value in name_scalars(record).items():
                    writer.add_scalar(key, value, record["step"])

            yield add
    elif name == "wandb":
        run, exit_code = start_wandb(folder, settings), 1
        try:  # as a context of its own, a run prints what is raised
            yield lambda record: run.log(name_scalars(record), step=record["step"])
            exit_code = 0
        finally:
            run.finish(exit_code)
    else:
        yield lambda record: None


def start_wandb(folder: Path, settings: Mapping[str, Any]) -> Any:
    """W&B's run of a run's folder, the same one when the run goes on; its files are below the folder.

    Project, mode and account are W&B's own settings (WANDB_PROJECT, WANDB_MODE, `wandb login`).
    """
    import wandb

    earlier = sorted((folder / "wandb").glob("*run-*-*"))  # offline-run-20261122_034831-abcd1234
    try:
        run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "biphase"),
            name=folder.name,
            id=earlier[-1].name.rpartition("-")[2] if earlier else None,
            resume="allow",
            dir=str(folder),
            config=dict(settings),
            settings=wandb.Settings(console="off", silent=True),
        )
    except wandb.errors.Error as error:
        raise InputError(f"tracking: wandb: {error}; or set WANDB_MODE=offline, and `wandb sync` later") from None
    place = f"offline; `wandb sync {Path(run.dir).parent}` sends it" if run.offline else run.url
    err.print(f"W&B: {place}", markup=False)
    return run
