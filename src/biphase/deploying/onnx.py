"""A model folder → `onnx/model.onnx` in it, and with 8-bit weights `onnx/model_quantized.onnx`, for onnxruntime and
other programs that read ONNX.

Files and outputs have the names that transformers.js, Text Embeddings Inference, fastembed and sentence-transformers
expect: `logits` of a network with a head (`start_logits` and `end_logits` for answers), else `last_hidden_state`. A
folder of sentence-transformers also has a `sentence_embedding`, with pooling, dense layer and normalization in the
graph. torch.onnx traces a graph on one example; batches of other sizes and lengths prove it.

Letters: N texts (or their tokens, in families of tokens), C outputs of a head.
"""

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.utils import ModelOutput

from biphase.console import told_if_slow
from biphase.deploying.worth import ScoredTask, find_task_data, tell_loss, tell_speed
from biphase.encoder.proofs import foreign_errors_fail
from biphase.errors import told_as
from biphase.exporting import plain
from biphase.exporting.card import add_chapter
from biphase.hub import load_model_config

ONNX_FILE, INT8_FILE = "onnx/model.onnx", "onnx/model_quantized.onnx"
OPSET = 18
INLINE_BYTES = 2_000_000_000
"""The size from which weights lie beside the graph, in `model.onnx_data`, because protobuf is limited to 2 GiB."""

EXAMPLE = (7, 4)
"""The lengths of the example's texts: unequal, so that the mask becomes a part of the graph."""


class OnnxNetwork:
    """An ONNX file that is called like a transformers network. Raises `InputError` if onnxruntime cannot read it."""

    device = torch.device("cpu")

    def __init__(self, path: Path, config: Any = None) -> None:
        import onnxruntime

        self.config = config
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.enable_cpu_mem_arena = False  # an arena would keep memory for every shape that a batch ever had
        with told_as(f"onnxruntime cannot read {path}", "export it again"):
            self.session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self.input_names = [entry.name for entry in self.session.get_inputs()]
        self.output_names = [entry.name for entry in self.session.get_outputs()]

    def outputs(self, features: plain.Features) -> plain.Features:
        """Compute outputs by name; missing token types are all 0."""
        inputs = {name: features.get(name, torch.zeros_like(features["input_ids"])) for name in self.input_names}
        outputs = self.session.run(None, {name: values.numpy() for name, values in inputs.items()})
        return dict(zip(self.output_names, map(torch.from_numpy, outputs), strict=True))

    def __call__(self, **features: Tensor) -> Any:
        return ModelOutput(self.outputs(features))


@dataclass(frozen=True)
class OnnxProof:
    """The result of a proof."""

    gap: float
    """The largest difference from PyTorch, in units of an output's mean size."""
    batches: list[plain.Features] = field(repr=False)
    """Bundled texts to time the file on and to compare it with another one."""


@torch.no_grad()
def write_onnx(folder: Path) -> OnnxProof:
    """Write `onnx/model.onnx` into a model folder, and prove that onnxruntime computes what transformers, or
    sentence-transformers, does.

    Raises:
        InputError: a network that torch.onnx cannot trace, or a pooling that leaves prompts out.
        FailedProofError: a graph with other outputs for batches or lengths other than the example's.
    """
    plain.refuse_left_out_prompts(folder)
    path, (network, reference) = folder / ONNX_FILE, plain.load_named(folder)
    with told_if_slow("tracing the network for ONNX, and comparing what onnxruntime computes"):
        trace(network, path)
        name = f"the ONNX graph of this {type(network.network).__name__}"
        gap = plain.prove_outputs(OnnxNetwork(path).outputs, reference, network, name)
    texts = network.read_texts()
    step = plain.TEXTS_AT_ONCE
    batches = [network.batch(texts[first : first + step]) for first in range(0, len(texts), step)]
    return OnnxProof(gap, batches)


def trace(network: plain.NamedOutputs, path: Path) -> None:
    """Write the graph of a network, for any number of texts of any length."""
    import onnx

    example = network.batch(network.read_texts(), EXAMPLE)
    with foreign_errors_fail(plain.UNPADDED.format(kind=type(network.network).__name__)):
        outputs = network.outputs(example)
    of_texts = {name for name, output in outputs.items() if name not in plain.TOKEN_OUTPUTS and output.ndim < 3}
    axes = {name: {0: "batch_size", 1: "sequence_length"} for name in (*example, *outputs)}
    axes |= {name: {0: "batch_size"} for name in of_texts}
    weights_bytes = sum(weight.numel() * weight.element_size() for weight in network.state_dict().values())
    path.parent.mkdir()
    if network.network._can_set_experts_implementation():  # a loop would keep the example's experts
        network.network.set_experts_implementation("batched_mm")
    with TemporaryDirectory(dir=path.parent) as scratch, silenced():
        written = Path(scratch) / path.name
        with told_as(f"torch.onnx cannot trace {type(network.network).__name__}"):
            names: Any = {"input_names": list(example), "output_names": list(outputs), "dynamic_axes": axes}
            torch.onnx.export(network, (*example.values(),), written, opset_version=OPSET, dynamo=False, **names)
        if weights_bytes < INLINE_BYTES:
            written.rename(path)
        else:
            onnx.save_model(onnx.load(written), path, save_as_external_data=True, location=f"{path.name}_data")


@contextmanager
def silenced() -> Iterator[None]:
    """Silence warnings, and log records up to that level."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(logging.NOTSET)


def quantize(folder: Path) -> None:
    """Write `onnx/model_quantized.onnx`, with weights of one byte, beside `onnx/model.onnx`.

    Each column has its own scale (with a single scale per matrix, retrieval loses a point); onnxruntime rounds
    activations as it computes them. Weights have 7 bits of the byte: processors without VNNI add two products in 16
    bits, where products of 8 bits overflow.
    """
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    path, has_data = folder / INT8_FILE, (folder / f"{ONNX_FILE}_data").exists()
    settings: Any = {"weight_type": QuantType.QInt8, "reduce_range": True, "use_external_data_format": has_data}
    with silenced(), told_as(f"{folder / ONNX_FILE} cannot be quantized", "is the disk full?"):  # onnx cuts files then
        quantize_dynamic(folder / ONNX_FILE, path, per_channel=True, **settings)
        if has_data:  # onnxruntime names the data as nobody looks for them
            onnx.save_model(onnx.load(path), path, save_as_external_data=True, location=f"{path.name}_data")
            path.with_name(f"{path.name}.data").unlink()


def megabytes(path: Path) -> float:
    """Return the size of an ONNX file and its data, in MB."""
    return sum(part.stat().st_size for part in path.parent.glob(f"{path.name}*")) / 1e6


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


def describe_int8(folder: Path, whole: OnnxNetwork, batches: Sequence[plain.Features], task: ScoredTask | None) -> str:
    """Write what 8 bits cost on the task, or without a task how similar the outputs are; and what they save."""
    int8 = OnnxNetwork(folder / INT8_FILE, whole.config)
    smaller = megabytes(folder / ONNX_FILE) / megabytes(folder / INT8_FILE)
    saved = f"{smaller:.1f} times smaller; {tell_speed(whole, int8, batches)}"
    if task is None:
        return f"{describe_agreement(whole, int8, batches)}; {saved}. Its loss on a task was not measured"
    return f"{tell_loss(task, task.judge(whole), task.judge(int8))}; {saved}"


def describe_agreement(whole: OnnxNetwork, int8: OnnxNetwork, batches: Sequence[plain.Features]) -> str:
    """Write how similar the outputs of two networks for some texts are: by the share of equal labels or decisions, the
    correlation of a single output, or the cosine."""
    expected, computed = list[np.ndarray](), list[np.ndarray]()
    for features in batches:
        lengths = features["attention_mask"].sum(1).tolist()
        expected += plain.read_answers(whole.outputs(features), lengths)
        computed += plain.read_answers(int8.outputs(features), lengths)
    texts = f"{len(expected)} English texts"
    if whole.output_names != ["logits"]:
        pairs = zip(expected, computed, strict=True)
        alike = [(one * other).sum() / (np.linalg.norm(one) * np.linalg.norm(other)) for one, other in pairs]
        mean, least = f"{np.mean(alike):.4f} on average", f"{min(alike):.4f} at least"
        return f"the cosine with the output of the fp32 file is {mean}, {least}, for {texts}"
    expected_NC, computed_NC = np.vstack(expected), np.vstack(computed)
    if expected_NC.shape[1] == 1:
        correlation = np.corrcoef(expected_NC[:, 0], computed_NC[:, 0])[0, 1]
        largest = np.abs(computed_NC - expected_NC).max() / expected_NC.std()
        how_far = f"the largest difference is {largest:.2f} of the output's standard deviation"
        return f"the correlation with the output of the fp32 file is {correlation:.4f}, and {how_far}, for {texts}"
    if getattr(whole.config, "problem_type", None) == "multi_label_classification":
        equal = ((computed_NC > 0) == (expected_NC > 0)).mean()
        return f"the same decision as the fp32 file, at a probability of 0.5, in {equal:.1%} of the classes of {texts}"
    equal = (computed_NC.argmax(1) == expected_NC.argmax(1)).mean()
    return f"the same label as the fp32 file in {equal:.1%} of the labels of {texts}"
