"""A model folder gets its ONNX files, and its card says what they are worth: the user's own task is scored once with
the weights as they are and once with 8 bits, both by onnxruntime.

What is scored is a kept model's test split or a labelled file, or an embedding model's judged texts. Without such data
the card says that the loss was not measured, and how alike the outputs for some texts are.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cosine_similarity

from biphase import console
from biphase.corpus.tokenizer import load_tokenizer
from biphase.errors import InputError
from biphase.export.golden import write_golden
from biphase.export.model import export_checkpoint
from biphase.export.onnx import (
    INT8_FILE,
    ONNX_FILE,
    TOKEN_OUTPUTS,
    Features,
    OnnxNetwork,
    OnnxProof,
    copy_model,
    megabytes,
    quantize,
    write_onnx,
)
from biphase.files import read_json_as, write_text
from biphase.finetuning.encoding import CellContext, EncodedSplit, HashedTokenizer
from biphase.finetuning.families import family_module
from biphase.finetuning.heads import padded_logits
from biphase.finetuning.kept import RECORD, KeptModel, layout_to_predict, read_labelled
from biphase.finetuning.metrics import Rows, contributions
from biphase.finetuning.scores import linearize
from biphase.hub import load_model_config
from biphase.report.formats import show_difference
from biphase.report.statistics import Interval, mean_interval
from biphase.tasks.examples import load_examples
from biphase.tasks.sources import find_source
from biphase.tasks.splits import Collection, TaskData

TIMED_RUNS = 3
"""Passes over the bundled texts, of which the fastest counts."""


@dataclass(frozen=True)
class ScoredTask:
    """A task that tells two networks apart: how a network's predictions for its examples come about and are scored."""

    name: str
    metric: str
    classes: tuple[str, ...]
    judge: Callable[[OnnxNetwork], Rows]


def export_onnx(source: Path | str, folder: Path, merge: float | None, int8: bool, test: Path | None) -> None:
    """Write a run `RUN[@STEP]`, or a copy of a model folder, with its ONNX files: all of it or nothing."""
    complete = partial(add_onnx, int8=int8, test=test)
    if isinstance(source, Path):
        copy_model(source, folder, complete)
    else:
        console.out.prose(export_checkpoint(source, folder, merge, complete))


def add_onnx(folder: Path, int8: bool, test: Path | None) -> None:
    """Write the ONNX files of a model folder, and a chapter of its card on them. Raises `InputError` where a file would
    compute something else than PyTorch, and for data that are none of the model's task."""
    task = find_task_data(folder, test) if int8 else None
    write_golden(folder)
    proof = write_onnx(folder)
    lines = [
        f"`{ONNX_FILE}`, {proof.megabytes:,.1f} MB, gives {' and '.join(f'`{name}`' for name in proof.outputs)}: by "
        f"onnxruntime, for other texts and lengths than those that it was traced with, at most {proof.gap:.1e} of an "
        "output's mean size from what PyTorch gives."
    ]
    if int8:
        quantize(folder)
        lines.append(f"`{INT8_FILE}` has weights of 8 bits, for CPUs: {describe_int8(folder, proof, task)}.")
    card = folder / "README.md"
    before = card.read_text(encoding="utf-8") if card.exists() else f"# {folder.name}\n"
    write_text(card, "\n\n".join([before.rstrip("\n"), "## ONNX", *lines]) + "\n")
    for line in lines:
        console.out.prose(line.replace("`", ""))


def describe_int8(folder: Path, proof: OnnxProof, task: ScoredTask | None) -> str:
    """Say what 8 bits cost on the task, or how alike outputs are where there is none, and what they save."""
    whole, int8 = open_both(folder)
    faster = time_batches(whole, proof.batches) / time_batches(int8, proof.batches)
    smaller = proof.megabytes / megabytes(folder / INT8_FILE)
    saved = f"{faster:.1f} times as fast here, {smaller:.1f} times smaller"
    if task is None:
        return f"{describe_agreement(whole, int8, proof.batches)}; {saved}. Its loss on a task was not measured"
    rows = [task.judge(network) for network in (whole, int8)]
    with_whole_N, with_int8_N = (linearize(*contributions(part, task.metric, task.classes)) for part in rows)
    loss: Interval = mean_interval(with_int8_N - with_whole_N)
    scores = f"{100 * with_whole_N.mean():.2f} → {100 * with_int8_N.mean():.2f}"
    of_what = f"{len(with_int8_N):,} test examples of {task.name}"
    return f"{task.metric} {show_difference(loss)} ({scores}, {of_what}), {saved}"


def open_both(folder: Path) -> tuple[OnnxNetwork, OnnxNetwork]:
    config = load_model_config(folder)
    return OnnxNetwork(folder / ONNX_FILE, config), OnnxNetwork(folder / INT8_FILE, config)


def time_batches(network: OnnxNetwork, batches: Sequence[Features]) -> float:
    """Return the seconds that the batches take, after one pass that is not counted."""
    seconds = []
    for _ in range(1 + TIMED_RUNS):
        started = time.perf_counter()
        for features in batches:
            network(**features)
        seconds.append(time.perf_counter() - started)
    return min(seconds[1:])


def describe_agreement(whole: OnnxNetwork, int8: OnnxNetwork, batches: Sequence[Features]) -> str:
    """Say how alike the last outputs of two networks are: the share of equal labels, or the cosine of embeddings (of
    the means of hidden states, where a network gives no embedding)."""
    alike: list[float] = []
    for features in batches:
        mask_SL, name = features["attention_mask"].bool(), whole.output_names[-1]
        first, second = (network(**features)[name] for network in (whole, int8))
        if name in TOKEN_OUTPUTS[1:]:  # where an answer ends, by the tokens of each text
            first, second = (rows.masked_fill(~mask_SL, -torch.inf) for rows in (first, second))
        elif name == "last_hidden_state":
            weights_SL1 = mask_SL[..., None] / mask_SL.sum(1)[:, None, None]
            first, second = ((rows * weights_SL1).sum(1) for rows in (first, second))
        elif first.ndim > 2:
            first, second = first[mask_SL], second[mask_SL]
        is_label = name.endswith("logits") and first.shape[1] > 1
        similar = first.argmax(1) == second.argmax(1) if is_label else cosine_similarity(first, second)
        alike += similar.double().tolist()
    num_texts = sum(len(features["input_ids"]) for features in batches)
    if is_label:
        of_what = "the tokens of " if name == "logits" and len(alike) > num_texts else ""
        return f"the same label as the fp32 file for {np.mean(alike):.1%} of {of_what}{num_texts} English texts"
    mean, least = f"{np.mean(alike):.4f} on average", f"{min(alike):.4f} at least"
    return f"the cosine with what the fp32 file gives is {mean}, {least}, for {num_texts} English texts"


def find_task_data(folder: Path, test: Path | None) -> ScoredTask | None:
    """Find the data of a model's task: those that are given, else the test split of a kept model whose task comes with
    biphase. None: there are none."""
    if (folder / RECORD).exists():
        kept = read_json_as(folder / RECORD, KeptModel, "fine-tune it again with --keep")
        cell = CellContext(kept.task, kept.config, torch.device("cpu"), torch.float32, calibration=kept.calibration)
        if not cell.is_embedder:
            has_data = test is not None or kept.task.bundled
            return read_test_split(folder, kept, cell, test) if has_data else None
    if test is None:
        return None
    if not (folder / "modules.json").exists():
        raise InputError("test: this model has no task of its own: only kept and embedding models are scored")
    from biphase.embedding.evaluation import read_judged_set, score_embedder

    judged = read_judged_set(test)
    return ScoredTask(
        judged.name, judged.metric, (), lambda network: score_embedder(served_by(network, folder), judged)[1]
    )


def served_by(network: OnnxNetwork, folder: Path) -> Any:
    """Make the `SentenceTransformer` of a folder, with its prompts, compute by an ONNX file."""
    from sentence_transformers import SentenceTransformer

    embedder: Any = SentenceTransformer(str(folder), device="cpu", trust_remote_code=False)
    embedder.forward = lambda features, **_: {"sentence_embedding": network(**features).sentence_embedding}
    return embedder


def read_test_split(folder: Path, kept: KeptModel, cell: CellContext, test: Path | None) -> ScoredTask:
    """Read a labelled file, or the test split in a folder with the task's data or in the package, as the model's
    training encoded it."""
    config, data = kept.config, read_test_examples(kept, test)
    tokenizer = HashedTokenizer(load_tokenizer(folder))
    split: EncodedSplit = family_module(kept.task, config).encode(data, tokenizer, config)["test"]

    def judge(network: OnnxNetwork) -> Rows:
        with torch.no_grad():
            return split.judge(split.predict(partial(padded_logits, network), cell), cell)[1]

    return ScoredTask(kept.task.name, kept.task.metric, kept.task.classes, judge)


def read_test_examples(kept: KeptModel, test: Path | None) -> TaskData | Collection:
    """Read the examples of test; of other splits no more than encoding asks for."""
    task, config = kept.task, kept.config
    if test is not None and not test.is_dir():
        examples, left_out = read_labelled(kept.model_copy(update={"layout": layout_to_predict(task, test)}), test)
        data: TaskData | Collection = TaskData(task, (), (), tuple(examples), left_out)
    else:
        data = load_examples(find_source(task, test), bool(config.judged_only), config.max_eval_examples)
    if isinstance(data, Collection):
        test_only = data.relevance["test"]
        return replace(data, train=(), relevance={"validation": dict(islice(test_only.items(), 1)), "test": test_only})
    return replace(data, train=data.test[:1], validation=data.test[:1])
