"""A model folder → `onnx/model.onnx` in it, and with 8-bit weights `onnx/model_quantized.onnx`: what PyTorch computes,
for onnxruntime and whatever else reads ONNX.

Files and outputs have the names that transformers.js, Text Embeddings Inference, fastembed and sentence-transformers
look for: `logits` of a network with a head (`start_logits` and `end_logits` for answers), else `last_hidden_state`; a
folder of sentence-transformers has a `sentence_embedding` too, with its pooling, dense layer and normalization in the
graph. A graph is traced on one example, and believed by what it computes for other batches and lengths.

Letters: S texts of a batch, L tokens of the longest of them.
"""

import logging
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import signature
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.utils import ModelOutput

from biphase.config import BUNDLED
from biphase.console import told_if_slow
from biphase.corpus.text import find_text_sources, sample_texts
from biphase.encoder.network import load_weights
from biphase.encoder.proofs import FailedProofError, agree
from biphase.errors import InputError, told_as
from biphase.export.push import MODEL_FILES
from biphase.files import MARK, FolderMark, files_below, read_json_as, refuse_filled, whole_folder, write_mark
from biphase.hub import count_positions
from biphase.tasks.families import KINDS

ONNX_FILE, INT8_FILE = "onnx/model.onnx", "onnx/model_quantized.onnx"
OPSET = 18
TOKEN_OUTPUTS = ("last_hidden_state", "start_logits", "end_logits")
"""The outputs that have a row for each token; `logits` have one for each token or for each text."""
INLINE_BYTES = 2_000_000_000
"""Weights of so many bytes lie beside the graph, in `model.onnx_data`: protobuf ends at 2 GiB."""

EXAMPLE = (7, 4)
"""The lengths of the texts of the example: unequal, so that the mask becomes a part of the graph."""
LONGEST = 2048
"""The longest text of the proof, where a network has positions for twice as many tokens."""
LENGTHS = ((1,), (2,), (3, 1), (LONGEST,), (17, LONGEST, 1), (9, 40, 5, 1, 23))
"""The lengths of the texts of the batches of the proof."""
NUM_TEXTS, TEXT_CHARACTERS, TEXTS_AT_ONCE = 64, 400, 8
"""Bundled texts on which files are compared and timed, the characters of each, and how many make a batch."""

Features = dict[str, Tensor]
"""A padded batch: `input_ids`, `attention_mask` and perhaps `token_type_ids`, [S, L]; or outputs by their names."""


class NamedOutputs(nn.Module):
    """A network of transformers, and the modules of sentence-transformers that make an embedding of its states."""

    def __init__(self, network: Any, tokenizer: Any, pooling: Iterable[nn.Module] = ()) -> None:
        super().__init__()
        self.network, self.tokenizer, self.pooling = network, tokenizer, nn.ModuleList(pooling)
        self.longest = max(1, min(count_positions(network.config) // 2, LONGEST))
        takes_types = "token_type_ids" in {*tokenizer.model_input_names} & {*signature(network.forward).parameters}
        self.input_names = ("input_ids", "attention_mask", *(["token_type_ids"] if takes_types else []))

    def outputs(self, features: Features) -> Features:
        output = self.network(**features)
        named = {name: output[name] for name in ("logits", *TOKEN_OUTPUTS) if name in output}
        if self.pooling:
            pooled: Any = features | {"token_embeddings": named["last_hidden_state"]}
            for module in self.pooling:
                pooled = module(pooled)
            named["sentence_embedding"] = pooled["sentence_embedding"]
        return named

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.outputs(dict(zip(self.input_names, inputs, strict=True))).values())

    def read_texts(self) -> list[Tensor]:
        """Read the bundled English texts as the tokenizer gives them, each the tokens of one."""
        texts = sample_texts(find_text_sources(BUNDLED / "corpus" / "validation.jsonl.zst"))
        cut = [text[:TEXT_CHARACTERS] for text in islice(texts, NUM_TEXTS)]
        rows = self.tokenizer(cut, truncation=True, max_length=max(self.longest, 4))["input_ids"]
        return [torch.tensor(row)[: self.longest] for row in rows]

    def batch(self, rows: Sequence[Tensor], lengths: Iterable[int] = ()) -> Features:
        """Make a batch of rows of tokens, padded on the right. With `lengths` each row is cut, or repeated, to one."""
        if lengths := [min(length, self.longest) for length in lengths]:
            rows = [row.repeat(length // len(row) + 1)[:length] for row, length in zip(rows, lengths, strict=False)]
        config = self.network.config
        ids_SL = nn.utils.rnn.pad_sequence(list(rows), True, getattr(config, "pad_token_id", None) or 0)
        positions_L, lengths_S1 = torch.arange(ids_SL.shape[1]), torch.tensor([[len(row)] for row in rows])
        mask_SL = positions_L < lengths_S1
        features = {"input_ids": ids_SL, "attention_mask": mask_SL.long()}
        if "token_type_ids" in self.input_names:  # of a pair the second text has another type, where there are two
            is_second_SL = mask_SL & (positions_L >= lengths_S1 // 2)
            features["token_type_ids"] = is_second_SL.long().clamp(max=getattr(config, "type_vocab_size", 1) - 1)
        return features


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

    def __call__(self, **features: Tensor) -> Any:
        """Compute named outputs; types of tokens that are not given are all the first one."""
        inputs = {name: features.get(name, torch.zeros_like(features["input_ids"])) for name in self.input_names}
        outputs = self.session.run(None, {name: values.numpy() for name, values in inputs.items()})
        return ModelOutput(dict(zip(self.output_names, map(torch.from_numpy, outputs), strict=True)))


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

    outputs: tuple[str, ...]
    gap: float
    """In units of the mean size of an output."""
    megabytes: float
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
        graph = OnnxNetwork(path)
        gap = prove_graph(graph, reference, network)
    texts = network.read_texts()
    batches = [network.batch(texts[first : first + TEXTS_AT_ONCE]) for first in range(0, len(texts), TEXTS_AT_ONCE)]
    return OnnxProof(tuple(graph.output_names), gap, megabytes(path), batches)


def load_named(folder: Path) -> tuple[NamedOutputs, Any]:
    """Load the network of a folder, with the head that it has, or with what follows it in sentence-transformers; and a
    function that computes the same outputs as these libraries do."""
    classes = read_json_as(folder / "config.json", dict[str, Any]).get("architectures") or []
    head = next((kind.head for kind in KINDS.values() if any(str(name).endswith(kind.head) for name in classes)), "")
    network: Any = load_weights(getattr(transformers, f"AutoModel{head}"), folder, attention=None).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    if head or not (folder / "modules.json").exists():
        named = NamedOutputs(network, tokenizer)
        return named, named.outputs
    from sentence_transformers import SentenceTransformer

    settings: Any = {"device": "cpu", "trust_remote_code": False, "model_kwargs": {"dtype": torch.float32}}
    embedder: Any = SentenceTransformer(str(folder), **settings).eval()

    def embed(features: Features) -> Features:
        output = embedder(dict(features))
        return {"last_hidden_state": output["token_embeddings"], "sentence_embedding": output["sentence_embedding"]}

    return NamedOutputs(network, tokenizer, list(embedder)[1:]), embed


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
    with TemporaryDirectory(dir=path.parent) as scratch, experts_without_loops(network.network), silenced():
        written = Path(scratch) / path.name
        with told_as(f"torch.onnx cannot trace {type(network.network).__name__}"):
            names: Any = {"input_names": list(example), "output_names": list(outputs), "dynamic_axes": axes}
            torch.onnx.export(network, (*example.values(),), written, opset_version=OPSET, dynamo=False, **names)
        if weights_bytes < INLINE_BYTES:
            written.rename(path)
        else:
            onnx.save_model(onnx.load(written), path, save_as_external_data=True, location=f"{path.name}_data")


@contextmanager
def experts_without_loops(network: Any) -> Iterator[None]:
    """Make a mixture of experts compute by products alone: of a loop, a trace would keep the experts of its example."""
    if not network._can_set_experts_implementation():
        yield
        return
    before = network.config._experts_implementation
    network.set_experts_implementation("batched_mm")
    yield
    network.set_experts_implementation(before)


@contextmanager
def silenced() -> Iterator[None]:
    """Keep what torch.onnx and onnxruntime say of their own future from a person who cannot change it."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(logging.NOTSET)


def prove_graph(graph: OnnxNetwork, reference: Any, network: NamedOutputs) -> float:
    """Return the largest difference of a graph to the reference, in units of an output's mean size, over texts alone,
    padded, short and long, none as the example's; and prove that a padded text gives what it gives alone.

    Raises `FailedProofError` where a difference is more than rounding.
    """
    texts, gaps = network.read_texts(), []

    def compare(computed: Features, expected: Features, than: str) -> None:
        for name, rows in expected.items():
            if not agree(computed[name], rows):
                words = f"the ONNX graph of this {type(network.network).__name__} gives another {name}"
                raise FailedProofError(f"{words} {than}: nothing is written")
            gaps.append(float((computed[name] - rows).abs().max() / rows.abs().mean()))

    for features in [*(network.batch(texts, lengths) for lengths in LENGTHS), network.batch(texts[:TEXTS_AT_ONCE])]:
        mask_SL, computed = features["attention_mask"].bool(), graph(**features)
        lengths_S = mask_SL.sum(1).tolist()
        than = f"than PyTorch for texts of {', '.join(map(str, lengths_S))} tokens"
        compare(rows_of_tokens(computed, mask_SL), rows_of_tokens(reference(features), mask_SL), than)
    gap = max(gaps)
    for index, length in enumerate(lengths_S):
        row = slice(index, index + 1)
        alone = graph(**{name: rows[row, :length] for name, rows in features.items()})
        padded = rows_of_tokens({name: rows[row] for name, rows in computed.items()}, mask_SL[row])
        than = f"in a batch than alone, for a text of {length} tokens"
        compare(padded, rows_of_tokens(alone, mask_SL[row, :length]), than)
    return gap


def rows_of_tokens(outputs: Features, mask_SL: Tensor) -> Features:
    """Leave rows of padding out of the outputs that have a row for each token."""
    of_tokens = {name for name, rows in outputs.items() if rows.ndim > 2 or name in TOKEN_OUTPUTS}
    return {name: rows[mask_SL] if name in of_tokens else rows for name, rows in outputs.items()}


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
