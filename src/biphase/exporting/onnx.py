"""A model folder → `onnx/model.onnx` in it, and with 8-bit weights `onnx/model_quantized.onnx`, for onnxruntime and
other programs that read ONNX.

Files and outputs have the names that transformers.js, Text Embeddings Inference, fastembed and sentence-transformers
expect: `logits` of a network with a head (`start_logits` and `end_logits` for answers), else `last_hidden_state`. A
folder of sentence-transformers also has a `sentence_embedding`, with pooling, dense layer and normalization in the
graph. torch.onnx traces a graph on one example; batches of other sizes and lengths prove it.
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
from biphase.corpus.tokenizer import load_pretrained_tokenizer
from biphase.errors import InputError, told_as
from biphase.exporting.plain import (
    TEXTS_AT_ONCE,
    TOKEN_OUTPUTS,
    Features,
    NamedOutputs,
    load_named,
    prove_outputs,
    text_limits,
)
from biphase.exporting.push import MODEL_FILES
from biphase.files import (
    MARK,
    FolderMark,
    files_below,
    read_json_as,
    refuse_filled,
    whole_folder,
    write_json,
    write_mark,
)

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

    def outputs(self, features: Features) -> Features:
        """Compute outputs by name; missing token types are all 0."""
        inputs = {name: features.get(name, torch.zeros_like(features["input_ids"])) for name in self.input_names}
        outputs = self.session.run(None, {name: values.numpy() for name, values in inputs.items()})
        return dict(zip(self.output_names, map(torch.from_numpy, outputs), strict=True))

    def __call__(self, **features: Tensor) -> Any:
        return ModelOutput(self.outputs(features))


def copy_model(source: Path, folder: Path, complete: Callable[[Path], None]) -> None:
    """Copy the model files of a folder, and let `complete` add to the copy. Raises `InputError` for a target that is
    not empty, and for a link that leaves the folder, except into its own repository in the Hub's cache."""
    if (source / "onnx").exists():
        raise InputError(f"{source} has ONNX files already (in onnx/): give the folder it was made from")
    places = [source.resolve()]
    if places[0].parent.name == "snapshots":
        places.append((places[0].parents[1] / "blobs").resolve())
    kind = read_json_as(source / MARK, FolderMark).biphase if (source / MARK).exists() else "model"
    with whole_folder(folder) as part:
        refuse_filled(folder)  # another process may have written it in the meantime
        for path in files_below(source):
            name = path.relative_to(source)
            if MODEL_FILES.fullmatch(name.as_posix()):
                if not any(path.resolve().is_relative_to(place) for place in places):
                    raise InputError(f"{path} is a link to a file outside of its folder: put the file in its place")
                (part / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, part / name)
        join_limits(part)
        complete(part)
        write_mark(part, kind)


def join_limits(folder: Path) -> None:
    """Make a folder's tokenizer and sentence-transformers cut texts at the same number of tokens: the smallest of
    theirs and the network's."""
    limits = text_limits(folder, load_pretrained_tokenizer(folder))
    lengths = {"tokenizer_config.json": "model_max_length", "sentence_bert_config.json": "max_seq_length"}
    for path, key in [(folder / name, key) for name, key in lengths.items() if limits]:
        settings = read_json_as(path, dict[str, Any]) if path.exists() else {}
        if (path.exists() or path.name.startswith("tokenizer")) and settings.get(key) != min(limits.values()):
            write_json(path, settings | {key: min(limits.values())})


@dataclass(frozen=True)
class OnnxProof:
    """The result of a proof."""

    gap: float
    """The largest difference from PyTorch, in units of an output's mean size."""
    batches: list[Features] = field(repr=False)
    """Bundled texts to time the file on and to compare it with another one."""


@torch.no_grad()
def write_onnx(folder: Path) -> OnnxProof:
    """Write `onnx/model.onnx` into a model folder, and prove that onnxruntime computes what transformers, or
    sentence-transformers, does.

    Raises:
        InputError: a network that torch.onnx cannot trace.
        FailedProofError: a graph with other outputs for batches or lengths other than the example's.
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
    """Write `onnx/model_quantized.onnx`, with 8-bit weights, beside `onnx/model.onnx`.

    Each column has its own scale (with a single scale per matrix, retrieval loses a point); onnxruntime rounds
    activations as it computes them.
    """
    from onnxruntime.quantization import QuantType, quantize_dynamic

    has_data = (folder / f"{ONNX_FILE}_data").exists()
    settings: Any = {"weight_type": QuantType.QInt8, "use_external_data_format": has_data}
    with silenced(), told_as(f"{folder / ONNX_FILE} cannot be quantized", "is the disk full?"):  # onnx cuts files then
        quantize_dynamic(folder / ONNX_FILE, folder / INT8_FILE, per_channel=True, **settings)


def megabytes(path: Path) -> float:
    """Return the size of an ONNX file and its data, in MB."""
    return sum(part.stat().st_size for part in path.parent.glob(f"{path.name}*")) / 1e6
