"""Write a model folder's ONNX files, and a chapter of its card about their quality: the scores on the user's task with
the original weights and with 8 bits, both by onnxruntime. Without data of the task, the card says how similar the
outputs for some texts are, and that the loss on a task was not measured.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from biphase.api.worth import ScoredTask, find_task_data, tell_loss, tell_speed
from biphase.exporting.card import add_chapter
from biphase.exporting.onnx import INT8_FILE, ONNX_FILE, OnnxNetwork, megabytes, quantize, write_onnx
from biphase.exporting.plain import Features, read_answers
from biphase.hub import load_model_config


def add_onnx(folder: Path, int8: bool, test: Path | None) -> None:
    """Write the ONNX files of a model folder and a chapter of its card. Raises `InputError` for a file whose outputs
    differ from PyTorch's, and for data of another task."""
    task = find_task_data(folder, test) if int8 else None
    proof = write_onnx(folder)
    whole = OnnxNetwork(folder / ONNX_FILE, load_model_config(folder))
    names = " and ".join(f"`{name}`" for name in whole.output_names)
    lines = [
        f"`{ONNX_FILE}`, {megabytes(folder / ONNX_FILE):,.1f} MB, outputs {names}. On texts and lengths that were not "
        f"used for tracing, onnxruntime's outputs differ from PyTorch's by at most {proof.gap:.1e} of their mean "
        "magnitude."
    ]
    if int8:
        quantize(folder)
        lines.append(f"`{INT8_FILE}` has 8-bit weights, for CPUs: {describe_int8(folder, whole, proof.batches, task)}.")
    add_chapter(folder, "ONNX", lines)


def describe_int8(folder: Path, whole: OnnxNetwork, batches: Sequence[Features], task: ScoredTask | None) -> str:
    """Write what 8 bits cost on the task, or without a task how similar the outputs are; and what they save."""
    int8 = OnnxNetwork(folder / INT8_FILE, whole.config)
    smaller = megabytes(folder / ONNX_FILE) / megabytes(folder / INT8_FILE)
    saved = f"{smaller:.1f} times smaller; {tell_speed(whole, int8, batches)}"
    if task is None:
        return f"{describe_agreement(whole, int8, batches)}; {saved}. Its loss on a task was not measured"
    return f"{tell_loss(task, task.judge(whole), task.judge(int8))}; {saved}"


def describe_agreement(whole: OnnxNetwork, int8: OnnxNetwork, batches: Sequence[Features]) -> str:
    """Write how similar the outputs of two networks for some texts are: by the share of equal labels, or the cosine."""
    alike: list[float] = []
    num_texts = sum(len(features["input_ids"]) for features in batches)
    for features in batches:
        lengths = features["attention_mask"].sum(1).tolist()
        answers = (read_answers(network.outputs(features), lengths) for network in (whole, int8))
        for first, second in zip(*answers, strict=True):
            is_label = whole.output_names == ["logits"] and first.shape[-1] > 1
            norms = np.linalg.norm(first) * np.linalg.norm(second)
            similar = first.argmax(-1) == second.argmax(-1) if is_label else (first * second).sum() / norms
            alike += np.atleast_1d(similar).tolist()
    if is_label:
        return f"the same label as the fp32 file in {np.mean(alike):.1%} of the labels of {num_texts} English texts"
    mean, least = f"{np.mean(alike):.4f} on average", f"{min(alike):.4f} at least"
    return f"the cosine with the output of the fp32 file is {mean}, {least}, for {num_texts} English texts"
