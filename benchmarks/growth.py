"""How time and memory grow with the work: text, vocabulary and samples, cells, documents, rows.

Each measurement is a process of its own: its processor time (user and system, its children's too), its wall time, and
its peak memory. The same command on next to nothing is its start. What lies above the start is fitted by a line through
the logarithms of sizes and costs, whose slope is the exponent: 1 where the cost grows as the work does.

    python benchmarks/growth.py                                  # all parts, for an hour or two
    python benchmarks/growth.py --parts status --cells 100 200 400
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import date
from itertools import count
from pathlib import Path
from typing import Any

from bookkeeping import BUNDLED, make_folder
from embedding import make_model
from measuring import BUNDLED_TEXT, HERE, Found, clocked, describe_setup, make_document, save, say

MIB = 2**20
PEERS = HERE / "peers"
POLL_SECONDS = 0.1
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS")
"""The variables that tell libraries how many threads to use."""
FILES_OF_LEAST = 4
"""The files that the smallest text has; larger ones have more files of that size."""
COSTS = {"cpu_seconds": 0.01, "wall_seconds": 0.01, "peak_mib": 1.0}
"""What is measured, and what it counts at least above the start, so that it has a logarithm."""


# Processes, and what they cost


def spend(words: Sequence[object], threads: int = 1, **variables: str) -> Found:
    """Run a Python command: `wall_seconds`, `cpu_seconds`, `peak_mib` (all its processes together, shared memory once)
    and its `answer`, the last line that it prints if that is JSON. Raises `SystemExit` with what it wrote if it fails.
    """
    environment = os.environ | dict.fromkeys(THREADS, str(threads)) | {"HF_HUB_OFFLINE": "1"} | variables
    found: Found = {"peak_mib": 0.0}
    with tempfile.TemporaryFile("w+") as printed, tempfile.TemporaryFile("w+") as errors, clocked(found):
        process = subprocess.Popen([sys.executable, *map(str, words)], stdout=printed, stderr=errors, env=environment)
        while process.poll() is None:
            found["peak_mib"] = max(found["peak_mib"], resident_mib(process.pid))
            time.sleep(POLL_SECONDS)
        printed.seek(0)
        errors.seek(0)
        lines = printed.read().splitlines()
        if process.returncode:
            raise SystemExit(f"{words}: {errors.read()[-4000:]}")
    if lines and lines[-1].startswith("{"):
        found["answer"] = json.loads(lines[-1])
    return found


def resident_mib(pid: int) -> float:
    """The resident memory of a process and its descendants; a page that several share counts once."""
    import psutil

    total = 0
    try:
        for process in (parent := psutil.Process(pid), *parent.children(recursive=True)):
            total += process.memory_full_info().pss
    except psutil.Error:  # one of them has just ended
        return 0.0
    return total / MIB


def fit_exponent(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """The slope of the least-squares line through the logarithms of three sizes or more and their costs."""
    import numpy as np

    assert len(sizes) >= 3, "a line through two points says nothing of its fit"
    return float(np.polyfit(np.log(sizes), np.log(costs), 1)[0])


def make_row(name: str, work: str, sizes: Sequence[float], start: Found, runs: Sequence[Found]) -> Found:
    """One row of the table: what each size cost, the start, and the exponents of what lies above the start."""
    row: Found = {"name": name, "work": work, "sizes": list(sizes), "start": start, "runs": list(runs)}
    for key, least in COSTS.items():
        above = [max(run[key] - start[key], least) for run in runs]
        row[f"{key}_exponent"] = fit_exponent(sizes, above)
    last = runs[-1]
    row["per_cpu_second"] = sizes[-1] / max(last["cpu_seconds"] - start["cpu_seconds"], COSTS["cpu_seconds"])
    say(f"{name}: time^{row['cpu_seconds_exponent']:.2f}, memory^{row['peak_mib_exponent']:.2f}")
    return row


# biphase prepare, and its peers


def write_texts(sources: Sequence[str], megabytes: Sequence[float], folder: Path) -> dict[float, list[Path]]:
    """Write JSON lines of so many MB (10⁶ bytes) of text: the documents of the sources, shuffled, again and again, each
    with its number in front, so that no two are equal. Returns the files of each size."""
    from biphase.corpus.text import find_text_sources, sample_texts

    texts = [text for text in sample_texts(find_text_sources(list(sources))) if text.strip()]
    draw, numbers = random.Random(0), count()
    folder.mkdir()
    file_bytes = min(megabytes) * 1e6 / FILES_OF_LEAST
    files = [folder / f"{index:04d}.jsonl" for index in range(round(max(megabytes) * 1e6 / file_bytes))]
    pending: list[str] = []
    for path in files:
        held = 0
        with path.open("w", encoding="utf-8") as file:
            while held < file_bytes:
                pending = pending or draw.sample(texts, len(texts))
                number = next(numbers)
                text = f"{number} {pending.pop()}"
                held += len(text.encode())
                file.write(json.dumps({"id": f"{number}", "text": text}, ensure_ascii=False) + "\n")
    return {size: files[: round(size * 1e6 / file_bytes)] for size in megabytes}


def prepare_words(arm: str, threads: int, tokenizer: Path, out: Path, paths: Sequence[Path]) -> list[object]:
    if arm == "biphase":
        return ["-m", "biphase", "prepare", *paths, "--tokenizer", tokenizer, "--out", out]
    if arm == "datasets":
        return [PEERS / "datasets_map.py", tokenizer, out, threads, *paths]
    return [PEERS / "tokenizers_to_disk.py", tokenizer, out, *paths]


def count_tokens(arm: str, found: Found, out: Path) -> int:
    """The tokens of the texts, without those that biphase puts behind each document."""
    if arm != "biphase":
        return found["answer"]["tokens"]
    splits = json.loads((out / "manifest.json").read_text())["splits"].values()
    return sum(split["tokens"] - split["documents"] for split in splits)


def measure_prepare(options: argparse.Namespace, folder: Path) -> list[Found]:
    """MB of text → token ids on disk."""
    from biphase.corpus.tokenizer import load_tokenizer

    bundled = [str(BUNDLED_TEXT)]
    tokenizer = load_tokenizer(options.tokenizer) if options.tokenizer else train_words(bundled)
    return compare_prepare(options, folder, tokenizer, options.megabytes)


def measure_reading(options: argparse.Namespace, folder: Path) -> list[Found]:
    """MB of text → token ids on disk, where a token is a whole sentence: everything but the encoding."""
    from tokenizers import pre_tokenizers

    tokenizer = train_words(options.text, pre_tokenizers.CharDelimiterSplit("."))
    return compare_prepare(options, folder, tokenizer, options.reading_megabytes)


def train_words(sources: Sequence[str], split: Any = None) -> Any:
    """A tokenizer of the first MB of some text: byte-level BPE, or, with a `split`, whole pieces of text as tokens."""
    from tokenizers import Tokenizer, models, trainers

    from biphase.corpus.text import find_text_sources, sample_texts
    from biphase.corpus.tokenizer import NEW_NAMES, train_tokenizer, wrap_backend

    texts = sample_texts(find_text_sources(list(sources)), limit_mb=4)
    if split is None:
        return train_tokenizer(texts, 4096)
    backend = Tokenizer(models.WordLevel(unk_token="<unk>"))
    backend.pre_tokenizer = split
    special = ["<unk>", *NEW_NAMES.values()]
    backend.train_from_iterator(texts, trainers.WordLevelTrainer(vocab_size=4096, special_tokens=special))
    return wrap_backend(backend, NEW_NAMES)


def compare_prepare(
    options: argparse.Namespace, folder: Path, tokenizer: Any, megabytes: Sequence[float]
) -> list[Found]:
    """Rows for biphase, `datasets.map` and `tokenizers` with so many threads. Raises `SystemExit` if they give
    different numbers of tokens."""
    from biphase.corpus.tokenizer import save_tokenizer

    save_tokenizer(tokenizer, folder / "tokenizer")
    line = folder / "line.jsonl"
    line.write_text(json.dumps({"id": "0", "text": "One short line."}) + "\n")
    files = write_texts(options.text, megabytes, folder / "texts")

    def once(arm: str, threads: int, paths: Sequence[Path]) -> Found:
        out = folder / "out"
        words = prepare_words(arm, threads, folder / "tokenizer", out, paths)
        # `datasets` has processes in place of threads, each with one.
        alone = {"RAYON_NUM_THREADS": "1", "HF_DATASETS_CACHE": str(out)} if arm == "datasets" else {}
        found = spend(words, threads, **alone)
        found["answer"] = {"tokens": count_tokens(arm, found, out)}
        shutil.rmtree(out)
        return found

    rows = []
    for threads in options.threads:
        runs: dict[str, list[Found]] = {arm: [] for arm in options.arms}
        start = {arm: once(arm, threads, [line]) for arm in options.arms}
        for size, paths in files.items():
            for arm in options.arms:
                runs[arm].append(once(arm, threads, paths))
                say(f"{size:g} MB, {threads} threads, {arm}: {runs[arm][-1]}")
            if len({runs[arm][-1]["answer"]["tokens"] for arm in options.arms}) > 1:
                raise SystemExit(f"the arms differ in their tokens: {[runs[arm][-1]['answer'] for arm in runs]}")
        threaded = f"{threads} thread{'s' if threads > 1 else ''}"
        for arm in options.arms:
            rows.append(make_row(f"{ARMS[arm]}, {threaded}", "MB of text", megabytes, start[arm], runs[arm]))
    return rows


ARMS = {"biphase": "`biphase prepare`", "datasets": "`datasets.map`", "tokenizers": "`tokenizers`"}

# The memory of a step


def measure_memory(options: argparse.Namespace, folder: Path) -> list[Found]:
    """Vocabulary and longest sample → the peak memory of an update, beside what `plan_memory` plans."""
    import biphase
    from biphase.corpus.text import find_text_sources, sample_texts

    # Documents of 20 texts: longer than any sample.
    texts = list(sample_texts(find_text_sources(options.text), limit_mb=10))
    documents = ["\n".join(texts[begin : begin + 20]) for begin in range(0, len(texts), 20)]
    biphase.prepare(documents, make_tokenizer_folder(folder), folder / "shards")
    vocabularies = [(vocab, min(options.samples)) for vocab in options.vocab]
    samples = [(min(options.vocab), sample) for sample in options.samples]
    runs = run_job(
        "step",
        shards=str(folder / "shards"),
        preset=options.preset,
        shapes=[*vocabularies, *samples],
        batch_tokens=options.batch_tokens,
    )
    nothing = dict.fromkeys(COSTS, 0.0)
    half, rows = len(vocabularies), []
    for work, sizes, of_work in (("tokens", options.vocab, runs[:half]), ("positions", options.samples, runs[half:])):
        what = {"tokens": "a larger vocabulary", "positions": "longer samples"}[work]
        rows.append(make_row(f"a pretraining step, {what}", work, sizes, nothing, of_work))
        planned = [run["planned_mib"]["total"] for run in of_work]
        rows[-1]["planned_mib_exponent"] = fit_exponent(sizes, planned)
    return rows


def run_job(job: str, **arguments: Any) -> list[Found]:
    """What `growth_job.py` measured in one process, for each size. It measures its own memory, so nothing polls it."""
    words = [sys.executable, str(HERE / "growth_job.py"), job, json.dumps(arguments)]
    environment = os.environ | dict.fromkeys(THREADS, "1") | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(words, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{words}: {done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])["runs"]


def make_tokenizer_folder(folder: Path) -> Path:
    from biphase.corpus.tokenizer import save_tokenizer

    save_tokenizer(train_words([str(BUNDLED_TEXT)]), folder / "tokenizer")
    return folder / "tokenizer"


# The state of a study


def measure_status(options: argparse.Namespace, folder: Path) -> list[Found]:
    """Finished cells of a study → `biphase study status`."""
    import yaml

    tree = yaml.safe_load((BUNDLED / "mini.yaml").read_text())

    def once(changes: Found) -> tuple[Found, int]:
        """The same study with other settings of `evaluation`, all of it finished."""
        place = folder / f"study-{changes.get('seeds', 'start')}"
        changed = {key: value for key, value in tree.items() if key not in ("evaluation", "intermediate")}
        changed |= {"evaluation": tree["evaluation"] | changes} if changes else {}
        file = folder / "study.yaml"
        file.write_text(yaml.safe_dump(changed))
        num_cells = make_folder(file, place)["cells"]
        found = spend(["-m", "biphase", "study", "status", file, "--out", place])
        say(f"{num_cells:,} cells: {found}")
        return found, num_cells

    start, _ = once({})
    cells_per_seed = once({"seeds": 1})[1]
    found = [once({"seeds": round(cells / cells_per_seed)}) for cells in options.cells]
    return [
        make_row("`biphase study status`", "cells", [cells for _, cells in found], start, [run for run, _ in found])
    ]


# Documents and rows


def write_passages(path: Path, num: int, least: int, most: int, sources: Sequence[str]) -> Path:
    """Write rows of `least` to `most` words, drawn from the documents of the sources."""
    from biphase.corpus.text import find_text_sources, sample_texts

    words = [text.split() for text in sample_texts(find_text_sources(list(sources)), limit_mb=100)]
    words = [text for text in words if len(text) > most]
    draw = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for number in range(num):
            text, length = draw.choice(words), draw.randint(least, most)
            begin = draw.randrange(len(text) - length)
            row = {"id": f"{number}", "text": " ".join(text[begin : begin + length])}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    return path


TINY = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64}
TINY |= {"num_attention_heads": 1, "num_key_value_heads": 1}
START_ROWS = 64


def measure_index(options: argparse.Namespace, folder: Path) -> list[Found]:
    """Documents → an index and a query, by a tiny encoder and by BM25. Encoding, which is linear, counts apart."""
    model = make_model("1m", 4096, folder, TINY)
    sizes = (START_ROWS, *options.documents)
    texts = [write_passages(folder / f"{num}.jsonl", num, 20, 40, options.text) for num in sizes]
    runs = run_job("index", model=str(model), texts=[str(text) for text in texts])
    rows = []

    def add(name: str, costs: list[Found]) -> None:
        rows.append(make_row(name, "documents", options.documents, costs[0], costs[1:]))

    for run in runs:
        run["rest"] = run["cpu_seconds"] - run["encoder"] - run["words"]
    for part, name in (("encoder", "its encoder"), ("words", "BM25's part"), ("rest", "the rest")):
        add(f"an index: {name}", [{key: run[key] for key in COSTS} | {"cpu_seconds": run[part]} for run in runs])
    for by, name in (("embeddings", "embeddings"), ("bm25", "BM25")):
        for query in ("first", "later"):
            add(f"a search by {name}: {query} query", [run[by][query] for run in runs])
    return rows


def measure_predict(options: argparse.Namespace, folder: Path) -> list[Found]:
    """Rows of a file → `biphase predict` by a tiny classifier."""
    import biphase

    biphase.silence()
    encoder = make_model("1m", 4096, folder, TINY)
    texts = [json.loads(line)["text"] for line in write_passages(folder / "train", 200, 7, 15, options.text).open()]
    rows = [{"text": text, "label": str(number % 3)} for number, text in enumerate(texts)]
    settings: Any = {"learning_rate": 1e-3, "max_steps": 2, "precision": "fp32", "device": "cpu"}
    biphase.finetune(encoder, data=rows, scores=folder / "scores", keep=folder / "kept", **settings)
    sizes = (START_ROWS, *options.rows)
    files = [write_passages(folder / f"{num}.jsonl", num, 7, 15, options.text) for num in sizes]
    runs = run_job("predict", model=str(folder / "kept"), files=[str(file) for file in files])
    return [make_row("`biphase predict`", "rows", options.rows, runs[0], runs[1:])]


PARTS: dict[str, Callable[[argparse.Namespace, Path], list[Found]]] = {
    "prepare": measure_prepare,
    "reading": measure_reading,
    "memory": measure_memory,
    "status": measure_status,
    "index": measure_index,
    "predict": measure_predict,
}


def table_of(rows: Sequence[Found]) -> list[str]:
    """The lines of a table in Markdown: for each size, the processor seconds above the start and the peak memory."""
    head = (
        "what",
        "work",
        "sizes",
        "CPU s above the start",
        "exponent",
        "peak MiB",
        "exponent of what is above the start",
    )
    lines = [" | ".join(["", *head, ""]).strip(), "|---" * len(head) + "|"]
    for row in rows:
        seconds = [max(run["cpu_seconds"] - row["start"]["cpu_seconds"], 0) for run in row["runs"]]
        memory = [f"{run['peak_mib']:,.0f}" for run in row["runs"]]
        if "planned_mib" in row["runs"][0]:
            memory = [
                f"{have} of {run['planned_mib']['total']:,.0f}" for have, run in zip(memory, row["runs"], strict=True)
            ]
        cells = [row["name"], row["work"], ", ".join(f"{size:,g}" for size in row["sizes"])]
        cells += [", ".join(f"{value:.3g}" for value in seconds), f"{row['cpu_seconds_exponent']:.2f}"]
        cells += [", ".join(memory), f"{row['peak_mib_exponent']:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--megabytes", nargs="+", type=float, default=[60, 250, 1000], help="of text for prepare")
    parser.add_argument("--reading-megabytes", nargs="+", type=float, default=[60, 250, 1000], help="for reading")
    parser.add_argument("--text", nargs="+", default=[str(BUNDLED_TEXT)], help="sources, repeated up to the largest")
    parser.add_argument("--tokenizer", help="as for `biphase prepare`; by default, one of 4,096 tokens is trained")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--preset", default="1m", help="of the pretraining step")
    parser.add_argument("--vocab", nargs="+", type=int, default=[8192, 32_768, 131_072])
    parser.add_argument("--samples", nargs="+", type=int, default=[512, 2048, 8192], help="positions of a sample")
    parser.add_argument("--batch-tokens", type=int, default=8192)
    parser.add_argument("--cells", nargs="+", type=int, default=[1000, 4000, 16_000])
    parser.add_argument("--documents", nargs="+", type=int, default=[10_000, 50_000, 200_000])
    parser.add_argument("--rows", nargs="+", type=int, default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--work", type=Path, help="where temporary files go: three times the text")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="the folder for the JSON files")
    options = parser.parse_args()
    for name in ("megabytes", "reading_megabytes", "vocab", "samples", "cells", "documents", "rows"):
        if len(getattr(options, name)) < 3:
            parser.error(f"--{name.replace('_', '-')}: give three sizes or more")  # for the exponents
    return options


def main() -> None:
    options = parse_options()
    for part in options.parts:
        started, machine = time.perf_counter(), describe_setup("cpu", max(options.threads))
        with tempfile.TemporaryDirectory(dir=options.work) as folder:
            rows = PARTS[part](options, Path(folder))
        what = f"how the cost of {part} grows with the work"
        shown = {key: value for key, value in vars(options).items() if key not in ("work", "out")}
        document = make_document(what, machine, shown, time.perf_counter() - started) | {"rows": rows}
        print("\n".join(table_of(rows)))
        path = options.out / f"{date.today().isoformat()}-growth-{part}.json"
        save(path, document)
        print(f"written to {path}")


if __name__ == "__main__":
    main()
