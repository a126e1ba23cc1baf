"""Are the defaults of `finetune` good? Some tables of rows, each trained by default and for one epoch, beside words
alone.

    python benchmarks/finetuning.py encoder --learning-rate 2e-3 --tables genre:1000 snli:6000
    python benchmarks/finetuning.py encoder --learning-rate 2e-3 --tables sst2:2000 --sst2 ../shared/data/sst2

A table is a task that comes with biphase, or SST-2 in GLUE's own files, cut to so many rows; validation is drawn from
them, as from a user's table. Both arms have the same learning rate, so that only the length differs. All texts are cut
at 96 tokens.
"""

import argparse
import csv
import json
import random
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from measuring import describe_setup, make_document, result_path, save, say

ARMS: dict[str, dict[str, Any]] = {"default": {}, "one epoch": {"epochs": 1}}
MOST_TEST_ROWS = 1250
Rows = list[dict[str, Any]]


def read_sst2(folder: Path) -> dict[str, Rows]:
    rows = {}
    for split, name in (("train", "train.tsv"), ("test", "dev.tsv")):
        with (folder / name).open(encoding="utf-8", newline="") as file:
            found = csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
            names = ("negative", "positive")
            rows[split] = [{"sentence": row["sentence"], "label": names[int(row["label"])]} for row in found]
    return rows


def read_bundled(name: str) -> dict[str, Rows]:
    """The texts and labels of a bundled task; its validation rows are part of train."""
    from biphase.tasks.examples import input_of, load_examples
    from biphase.tasks.sources import find_source
    from biphase.tasks.spec import find_task

    task = find_task(name)
    data: Any = load_examples(find_source(task, None), judged_only=False)
    rows: dict[str, Rows] = {"train": [], "test": []}
    for split, examples in data.splits.items():
        for example in examples:
            row = {"text": input_of(example), "label": task.classes[example.label]}
            rows["test" if split == "test" else "train"].append(row)
    return rows


def measure(model: Path, rate: float, data: dict[str, Rows], name: str, scores: Path) -> dict[str, Any]:
    """Both arms, words alone and the frozen encoder on a table."""
    import biphase
    from biphase.finetuning.frozen import FROZEN_SCORES
    from biphase.finetuning.scores import read_scores
    from biphase.finetuning.words import read_word_scores

    measured: dict[str, Any] = {}
    for arm, settings in ARMS.items():
        started = time.process_time()
        given: dict[str, Any] = {
            "learning_rate": rate,
            "max_length": 96,
            "device": "cpu",
            "precision": "fp32",
        } | settings
        score = biphase.finetune(model, name, data=data, scores=scores, **given)
        spent = {"cpu_seconds": time.process_time() - started, "seconds": score.seconds}
        error = None if score.calibration is None else score.calibration.on_test
        kept = {"epochs": score.config.epochs, "num_steps": score.num_steps, "best_step": score.best_step}
        measured[arm] = spent | kept | {"metrics": score.metrics, "checks": score.checks, "calibration_error": error}
        measured["examples"] = score.num_examples
    [alone] = read_word_scores(scores)
    measured["words alone"] = alone.metrics
    if (scores / FROZEN_SCORES).is_dir():  # of an encoder that is not small
        [frozen] = read_scores(scores / FROZEN_SCORES).scores
        measured["frozen vectors"] = frozen.metrics
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--learning-rate", type=float, required=True)
    parser.add_argument("--tables", nargs="+", required=True, help="NAME:ROWS")
    parser.add_argument("--sst2", type=Path, help="the folder of GLUE's SST-2")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    machine, started, tables = describe_setup("cpu", 1), time.perf_counter(), {}
    for table in options.tables:
        name, _, num_rows = table.partition(":")
        rows = read_sst2(options.sst2) if name == "sst2" else read_bundled(name)
        drawn = {"train": random.Random(0).sample(rows["train"], int(num_rows))}
        drawn["test"] = rows["test"][:MOST_TEST_ROWS]
        with TemporaryDirectory() as scores:
            tables[table] = measure(options.model, options.learning_rate, drawn, f"{name}_{num_rows}", Path(scores))
        say(f"{table}: {json.dumps(tables[table])}")
        asked = {"model": options.model.name, "learning_rate": options.learning_rate, "tables": [*tables]}
        document = make_document(
            "fine-tuning by default and for one epoch", machine, asked, time.perf_counter() - started
        )
        save(
            options.out or result_path(f"finetuning-{options.model.name}", machine["processor"], 1),
            document | {"found": tables},
        )


if __name__ == "__main__":
    main()
