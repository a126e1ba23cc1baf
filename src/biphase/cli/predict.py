"""`biphase predict`: a fine-tuned model and a file → its rows with predictions, as JSONL or CSV."""

import csv
import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

from biphase.console import track
from biphase.errors import InputError
from biphase.files import whole_file

OUT_ENDINGS = (".jsonl", ".csv")


def predict_command(
    model: Annotated[str, typer.Argument(help="A folder that `finetune --keep` wrote, or a hub id with a head.")],
    file: Annotated[
        Path, typer.Argument(help="Rows: .jsonl, .csv, .tsv, .json, .parquet, columns; .txt: a text a line.")
    ],
    out: Annotated[Path | None, typer.Option(help="A .jsonl or .csv file; printed as JSONL unless given.")] = None,
    template: Annotated[
        str | None, typer.Option(help="Columns in braces, for a model that does not say what its inputs are: {text}.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
) -> None:
    """Predict labels, spans or answers for every row of a file. Rows are kept, and go through as they are read.

    Example: `biphase predict snli-model pairs.csv --out predicted.csv`
    """
    check_out(file, out)
    if not file.exists():
        raise InputError(f"{file} does not exist")
    from biphase.device import choose_device
    from biphase.finetuning.predict import open_model, predict_file

    if device not in ("auto", "cpu", "cuda"):
        raise InputError(f"--device {device}: give auto, cpu or cuda")
    predicting = open_model(model, file, template, choose_device(device))
    with track(f"predict {file.name}", None, "rows") as progress, opened(out) as sink:
        num_rows = 0
        write = write_csv if out is not None and out.suffix == ".csv" else write_lines
        for _ in write(predict_file(predicting, file), sink):
            num_rows += 1
            progress.advance(1)
        if not num_rows:
            raise InputError(f"{file} has no rows")
        progress.say(f"{out or file}: {num_rows:,} rows")


def check_out(file: Path, out: Path | None) -> None:
    if out is None:
        return
    if out.suffix not in OUT_ENDINGS:
        raise InputError(f"--out {out}: name a {' or '.join(OUT_ENDINGS)} file")
    if out.exists():
        raise InputError(f"--out {out} is there already; choose another name, or delete it first")
    if not out.absolute().parent.is_dir():
        raise InputError(f"--out {out}: there is no folder {out.parent}")


@contextmanager
def opened(out: Path | None) -> Iterator[TextIO]:
    """The file to write, which appears when it is whole; standard output without one."""
    if out is None:
        yield sys.stdout
        sys.stdout.flush()
    else:
        with whole_file(out) as file:
            yield file


def write_lines(rows: Iterable[dict[str, Any]], sink: TextIO) -> Iterator[None]:
    """A JSON object a line; on a terminal with nothing in it that a terminal obeys."""
    for row in rows:
        sink.write(json.dumps(row, ensure_ascii=sink.isatty(), default=str) + "\n")
        yield


def write_csv(rows: Iterable[dict[str, Any]], sink: TextIO) -> Iterator[None]:
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
            raise InputError(f"row {number} has a column '{extra[0]}' that the first row has not; give --out as .jsonl")
        table.writerow(flat)
        yield
