"""The rows of a file with what a fine-tuned network predicts for them → JSONL or CSV, as they are read."""

import csv
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

from biphase.console import track
from biphase.errors import InputError
from biphase.files import whole_file
from biphase.tasks.rows import Row

OUT_ENDINGS = (".jsonl", ".csv")


def check_out(out: Path) -> None:
    if out.suffix not in OUT_ENDINGS:
        raise InputError(f"{out}: name a {' or '.join(OUT_ENDINGS)} file")
    if out.exists():
        raise InputError(f"{out} is there already; choose another name, or delete it first")
    if not out.absolute().parent.is_dir():
        raise InputError(f"{out}: there is no folder {out.parent}")


def predict_rows(model: str, file: Path, template: str | None, device: str) -> Iterator[Row]:
    """Each row of a file with its prediction, as it is read."""
    if not file.exists():
        raise InputError(f"{file} does not exist")
    if device not in ("auto", "cpu", "cuda"):
        raise InputError(f"device {device}: give auto, cpu or cuda")
    from biphase.device import choose_device
    from biphase.finetuning.predict import open_model, predict_file

    predicting = open_model(model, file, template, choose_device(device))
    with track(f"predict {file.name}", None, "rows") as progress:
        num_rows = 0
        for row in predict_file(predicting, file):
            num_rows += 1
            progress.advance(1)
            yield row
        if not num_rows:
            raise InputError(f"{file} has no rows")
        progress.say(f"{file.name}: {num_rows:,} rows")


def write_predictions(model: str, file: Path, out: Path | TextIO, template: str | None, device: str) -> None:
    """The rows of a file with predictions, into a .jsonl or .csv file that appears when it is whole, or as JSONL."""
    if isinstance(out, Path):
        check_out(out)
        write = write_csv if out.suffix == ".csv" else write_lines
        rows = predict_rows(model, file, template, device)
        with whole_file(out) as sink:
            write(rows, sink)
    else:
        write_lines(predict_rows(model, file, template, device), out)


def write_lines(rows: Iterable[Row], sink: TextIO) -> None:
    """A JSON object a line; on a terminal with nothing in it that a terminal obeys."""
    for row in rows:
        sink.write(json.dumps(row, ensure_ascii=sink.isatty(), default=str) + "\n")
    sink.flush()


def write_csv(rows: Iterable[Row], sink: TextIO) -> None:
    """A table with the columns of the first row: one for each label's probability, lists as JSON."""
    table: Any = None
    for number, row in enumerate(rows, start=1):
        flat = {key: value for key, value in row.items() if not isinstance(value, dict) or key != "probabilities"}
        if isinstance(row.get("probabilities"), dict):
            flat |= {f"probability_{label}": value for label, value in row["probabilities"].items()}
        flat = {
            key: json.dumps(value, ensure_ascii=False, default=str) if isinstance(value, dict | list) else value
            for key, value in flat.items()
        }
        if table is None:
            table = csv.DictWriter(sink, list(flat), lineterminator="\n")
            table.writeheader()
        extra = sorted(flat.keys() - set(table.fieldnames))
        if extra:
            raise InputError(f"row {number} has a column '{extra[0]}' that the first row has not; write a .jsonl file")
        table.writerow(flat)
