"""A model folder → `onnx/model.onnx` in it, and with 8-bit weights `onnx/model_quantized.onnx`: what PyTorch computes,
for onnxruntime and whatever else reads ONNX.

Files and outputs have the names that transformers.js, Text Embeddings Inference, fastembed and sentence-transformers
look for: `logits` of a network with a head (`start_logits` and `end_logits` for answers), else `last_hidden_state`; a
folder of sentence-transformers has a `sentence_embedding` too, with its pooling, dense layer and normalization in the
graph. A graph is traced on one example, and believed by what it computes for other batches and lengths.
"""

import logging
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from transformers.utils import ModelOutput

from biphase.console import told_if_slow
from biphase.errors import InputError, told_as
from biphase.exporting.plain import TEXTS_AT_ONCE, TOKEN_OUTPUTS, Features, NamedOutputs, load_named, prove_outputs
from biphase.exporting.push import MODEL_FILES
from biphase.files import MARK, FolderMark, files_below, read_json_as, refuse_filled, whole_folder, write_mark

ONNX_FILE, INT8_FILE = "onnx/model.onnx", "onnx/model_quantized.onnx"
OPSET = 18
INLINE_BYTES = 2_000_000_000
"""Weights of so many bytes lie beside the graph, in `model.onnx_data`: protobuf ends at 2 GiB."""

EXAMPLE = (7, 4)
"""The lengths of the texts of the example: unequal, so that the mask becomes a part of the graph."""


class OnnxNetwork:
    """An ONNX file, called as a network of transformers is. Raises `InputError` for a file that onnxruntime cannot
    read."""

    device = torch.device("cpu")

    def __init__(self, path: Path, config: Any = None) -> None:
        import onnxruntime

        self.config = config
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.enable_cpu_mem_arena = False  # it would keep room for each shape that a batch ever had
        with told_as(f"onnxruntime cannot read {path}", "export it again"):
            self.session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self.input_names = [entry.name for entry in self.session.get_inputs()]
        self.output_names = [entry.name for entry in self.session.get_outputs()]

    def outputs(self, features: Features) -> Features:
        """Compute named outputs; types of tokens that are not given are all the first one."""
        inputs = {name: features.get(name, torch.zeros_like(features["input_ids"])) for name in self.input_names}
        outputs = self.session.run(None, {name: values.numpy() for name, values in inputs.items()})
        return dict(zip(self.output_names, map(torch.from_numpy, outputs), strict=True))

    def __call__(self, **features: Tensor) -> Any:
        return ModelOutput(self.outputs(features))


def copy_model(source: Path, folder: Path, complete: Callable[[Path], None]) -> None:
    """Write a copy of a model folder, without what is no part of the model, and let `complete` add to it. Raises
    `InputError` for a folder that holds something else."""
    if (source / "onnx").exists():
        raise InputError(f"{source} has ONNX files already (in onnx/): give the folder that it was made of")
    kind = read_json_as(source / MARK, FolderMark).biphase if (source / MARK).exists() else "model"
    with whole_folder(folder) as part:
        refuse_filled(folder)  # another process may have written it meanwhile
        for path in files_below(source):
            name = path.relative_to(source)
            if MODEL_FILES.fullmatch(name.as_posix()):
                (part / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, part / name)
        complete(part)
        write_mark(part, kind)


@dataclass(frozen=True)
class OnnxProof:
    """A proof says what a file gives, and how far that is at most from what PyTorch gives."""

    gap: float
    """In units of the mean size of an output."""
    batches: list[Features] = field(repr=False)
    """Bundled texts, on which the file is compared with another one and timed."""


@torch.no_grad()
def write_onnx(folder: Path) -> OnnxProof:
    """Write `onnx/model.onnx` into a model folder. onnxruntime must compute by it what transformers, or
    sentence-transformers, computes with the folder.

    Raises:
        InputError: a network that torch.onnx cannot trace.
        FailedProofError: a graph that gives something else for other batches or lengths than the example's.
    """
    path, (network, reference) = folder / ONNX_FILE, load_named(folder)
    with told_if_slow("tracing the network for ONNX, and comparing what onnxruntime computes"):
        trace(network, path)
        name = f"the ONNX graph of this {type(network.network).__name__}"
        gap = prove_outputs(OnnxNetwork(path).outputs, reference, network, name)
    texts = network.read_texts()
    batches = [network.batch(texts[first : first + TEXTS_AT_ONCE]) for first in range(0, len(texts), TEXTS_AT_ONCE)]
    return OnnxProof(gap, batches)


def trace(network: NamedOutputs, path: Path) -> None:
    """Write the graph of a network, for any number of texts of any length."""
    import onnx

    example = network.batch(network.read_texts(), EXAMPLE)
    outputs = network.outputs(example)
    of_texts = {name for name, output in outputs.items() if name not in TOKEN_OUTPUTS and output.ndim < 3}
    axes = {name: {0: "batch_size", 1: "sequence_length"} for name in (*example, *outputs)}
    axes |= {name: {0: "batch_size"} for name in of_texts}
    weights_bytes = sum(weight.numel() * weight.element_size() for weight in network.state_dict().values())
    path.parent.mkdir()
    if network.network._can_set_experts_implementation():  # a loop would keep the experts of its example
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
    """Keep what torch.onnx and onnxruntime say of their own future from a person who cannot change it."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(logging.NOTSET)


def quantize(folder: Path) -> None:
    """Write `onnx/model_quantized.onnx` beside `onnx/model.onnx`: weights of 8 bits, each column with a scale of its
    own (with one for a whole matrix, retrieval loses a point), and activations rounded as they come."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    settings: Any = {
        "weight_type": QuantType.QInt8,
        "use_external_data_format": (folder / f"{ONNX_FILE}_data").exists(),
    }
    with silenced():
        quantize_dynamic(folder / ONNX_FILE, folder / INT8_FILE, per_channel=True, **settings)


def megabytes(path: Path) -> float:
    """Return the size of an ONNX file with its data."""
    return sum(part.stat().st_size for part in path.parent.glob(f"{path.name}*")) / 1e6
