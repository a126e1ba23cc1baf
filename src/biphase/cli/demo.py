"""The whole path on bundled text and tasks: a study of three arms of equal budget, beside the same network untrained.

Each stage writes into the demo's folder and is skipped when its output is there, so the command can be stopped and
started again.
"""

import shlex
import time
from collections.abc import Sequence
from pathlib import Path

from rich.text import Text

from biphase.cli.demo_scores import collect_by_task, draw_scores, print_scores, verdict
from biphase.config import BUNDLED
from biphase.console import duration, err, out, printable
from biphase.corpus.prepare import prepare
from biphase.corpus.text import find_text_sources, sample_texts
from biphase.corpus.tokenizer import save_tokenizer, train_tokenizer
from biphase.engine.local import Engine
from biphase.errors import InputError
from biphase.study.folder import claim_study_folder, find_record
from biphase.study.plan import plan_study
from biphase.study.report import report_study
from biphase.study.run import run_study
from biphase.study.spec import load_study

VOCAB_SIZE = 4096


def run_demo(folder: Path, overrides: Sequence[str] = ()) -> None:
    """Run every stage, print the table, and write `demo.png`, the report and an encoder for transformers.

    `overrides` change the study, as on the command line of `biphase study run`.
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
    plan = plan_study(load_study(BUNDLED / "studies" / "demo.yaml", [f"recipe.data.shards={shards}", *overrides]))
    place = claim_study_folder(folder / "study", plan.study)
    say("3/5", f"pretrain {', '.join(plan.arms)}; fine-tune each and random weights: {len(plan.cells)} cells")
    failures = run_study(plan, place, Engine())
    if failures:
        raise InputError(f"{failures[0].unit}: {failures[0].reason}; the same command goes on")
    say("4/5", "export the biphasic encoder for transformers")
    last = next(model for model in plan.models if model.name == list(plan.arms)[-1])
    record = find_record(place, plan.runs[last.run])
    assert record is not None
    encoder = folder / f"encoder-{record.folder.rpartition('-')[2]}"
    if not encoder.exists():
        from biphase.export.model import export_checkpoint

        out.print(export_checkpoint(f"{(place.runs / record.folder).resolve()}@{last.step}", encoder), markup=False)
    say("5/5", "report")
    page, _ = report_study(plan, place, folder / "report", [f"biphase demo {shlex.quote(str(folder))}"])
    results = collect_by_task(plan, place)
    draw_scores(results, folder / "demo.png")
    print_scores(results)
    out.print(f"\n{verdict(results)}\nreport: {page} · plot: {folder / 'demo.png'} · encoder: {encoder}")
    out.print(f"took {duration(time.monotonic() - started)}")


def say(stage: str, what: str) -> None:
    err.print(Text.assemble((f"[{stage}]", "bold"), f" {printable(what)}"))
