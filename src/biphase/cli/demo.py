"""The whole path on bundled text and tasks: a study of two arms of equal budget, beside the same network untrained.

Each stage writes into the demo's folder and is skipped when its output is there, so the command can be stopped and
started again.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from biphase.api.networks import export
from biphase.api.studies import study
from biphase.api.text import train_tokenizer
from biphase.config import BUNDLED
from biphase.console import duration, err, out
from biphase.corpus.prepare import prepare
from biphase.study.folder import StudyFolder


def demo(
    folder: Path = Path("biphase-demo"), /, *, changes: Annotated[Sequence[str], Parameter(parse=False)] = ()
) -> None:
    """Run the whole path on bundled text and tasks, in minutes on a laptop: does pretraining CLM → MLM pay?

    Example: `biphase demo`

    Args:
        folder: where to work; finished parts are kept.
        changes: of the study, as on the command line of `biphase study run`.
    """
    started = time.monotonic()
    corpus = BUNDLED / "corpus"
    err.print("[1/5] train a tokenizer on the bundled text")
    if not (folder / "tokenizer").exists():
        train_tokenizer(corpus / "train.jsonl.zst", folder / "tokenizer", vocab_size=4096)
    err.print("[2/5] tokenize it into shards")
    shards, held_out = folder / "shards", corpus / "validation.jsonl.zst"
    prepare(corpus / "train.jsonl.zst", folder / "tokenizer", shards, validation=held_out)
    opened = study("demo", [f"recipe.data.shards={shards}", *changes], folder / "study")
    plan = opened.planned
    err.print(f"[3/5] pretrain {', '.join(plan.arms)}; fine-tune each and random weights: {len(plan.cells)} cells")
    opened.run()
    err.print("[4/5] export the biphasic encoder for transformers")
    last = next(model for model in plan.models if model.name == list(plan.arms)[-1])
    study_folder = StudyFolder(opened.folder)
    record = study_folder.find_record(plan.runs[last.run])
    assert record is not None
    encoder = folder / f"encoder-{record.folder.rpartition('-')[2]}"
    if not encoder.exists():
        export(f"{(study_folder.runs / record.folder).resolve()}@{last.step}", encoder)
    err.print("[5/5] report")
    opened.report(folder / "report")
    out.print(f"encoder: {encoder} · took {duration(time.monotonic() - started)}")
