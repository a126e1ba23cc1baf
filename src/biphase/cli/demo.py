"""The whole path on bundled text and tasks: a study of two arms of equal budget, beside the same network untrained.

Each stage writes into the demo's folder and is skipped when its output is there, so the command can be stopped and
started again.
"""

import time
from collections.abc import Sequence
from pathlib import Path

from rich.text import Text

from biphase.api.studies import study
from biphase.config import BUNDLED
from biphase.console import duration, err, out, printable
from biphase.corpus.prepare import prepare
from biphase.corpus.text import find_text_sources, sample_texts
from biphase.corpus.tokenizer import save_tokenizer, train_tokenizer
from biphase.study.folder import StudyFolder, find_record

VOCAB_SIZE = 4096


def run_demo(folder: Path = Path("biphase-demo"), overrides: Sequence[str] = ()) -> None:
    """Run every stage, and write the report, which is printed in short, and an encoder for transformers.

    Args:
        folder: where to work; finished parts are kept.
        overrides: changes of the study, as on the command line of `biphase study run`.
    """
    started = time.monotonic()
    corpus = BUNDLED / "corpus"
    say("1/5", "train a tokenizer on the bundled text")
    if not (folder / "tokenizer").exists():
        texts = sample_texts(find_text_sources([corpus / "train.jsonl.zst"]))
        save_tokenizer(train_tokenizer(texts, VOCAB_SIZE), folder / "tokenizer")
    say("2/5", "tokenize it into shards")
    held_out, shards = [corpus / "validation.jsonl.zst"], folder / "shards"
    prepare([corpus / "train.jsonl.zst"], folder / "tokenizer", shards, validation_sources=held_out)
    opened = study("demo", [f"recipe.data.shards={shards}", *overrides], folder / "study")
    plan = opened.planned
    say("3/5", f"pretrain {', '.join(plan.arms)}; fine-tune each and random weights: {len(plan.cells)} cells")
    opened.run()
    say("4/5", "export the biphasic encoder for transformers")
    last = next(model for model in plan.models if model.name == list(plan.arms)[-1])
    place = StudyFolder(opened.folder)
    record = find_record(place, plan.runs[last.run])
    assert record is not None
    encoder = folder / f"encoder-{record.folder.rpartition('-')[2]}"
    if not encoder.exists():
        from biphase.export.model import export_checkpoint

        out.print(export_checkpoint(f"{(place.runs / record.folder).resolve()}@{last.step}", encoder), markup=False)
    say("5/5", "report")
    opened.report(folder / "report")
    out.print(f"encoder: {encoder} · took {duration(time.monotonic() - started)}", markup=False)


def say(stage: str, what: str) -> None:
    err.print(Text.assemble((f"[{stage}]", "bold"), f" {printable(what)}"))
