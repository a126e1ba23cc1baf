"""Any model folder → its outputs by name, as transformers alone or sentence-transformers computes them.

They are the reference for all other forms of the folder: an ONNX file, a plain Llama, llama.cpp, a server. This module
opens no pickle and runs no code of the folder.

Letters: S texts of a batch, L tokens of the longest of them, D width.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import signature
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
import transformers
from pydantic import Field
from torch import Tensor, nn

from biphase import hub
from biphase.config import BUNDLED
from biphase.corpus.text import find_text_sources, sample_texts
from biphase.corpus.tokenizer import check_tokenizer_files, load_auto_tokenizer
from biphase.encoder.network import load_weights, pad_batch
from biphase.encoder.proofs import FailedProofError, agree
from biphase.errors import InputError, told_as
from biphase.files import files_below
from biphase.tasks.families import KINDS

TOKEN_OUTPUTS = ("last_hidden_state", "start_logits", "end_logits")
"""The outputs with a row per token; `logits` have one per token or per text."""
LEAST_LIMIT = 2**31
"""The least number that tokenizers and networks without a length limit state."""
LONGEST = 2048
"""The longest text of a proof, in a network with positions for twice as many tokens."""
LENGTHS = ((1,), (2,), (3, 1), (LONGEST,), (17, LONGEST, 1), (9, 40, 5, 1, 23))
"""The batches of a proof, each by the lengths of its texts."""
NUM_TEXTS, TEXT_CHARACTERS, TEXTS_AT_ONCE = 64, 400, 8
"""The number of bundled texts for comparing and timing two forms of a network, the characters of each, and the size of
a batch."""
TRANSFORMER_FILES = "sentence_*_config.json"
"""The settings of sentence-transformers for a network, also by older names, such as sentence_roberta_config.json."""
UNPADDED = "{kind} cannot compute a padded batch (has its config.json a `pad_token_id`?)"
"""The failure of a decoder's classifier without a padding token, among others."""

Features = dict[str, Tensor]
"""A padded batch: `input_ids`, `attention_mask` and perhaps `token_type_ids`, [S, L]; or outputs by their names."""
OutputsOf = Callable[[Features], Features]


class NamedOutputs(nn.Module):
    """A network of transformers with its tokenizer, and the modules of sentence-transformers that pool its states."""

    def __init__(self, network: Any, tokenizer: Any, pooling: Iterable[nn.Module] = ()) -> None:
        super().__init__()
        self.network, self.tokenizer, self.pooling = network, tokenizer, nn.ModuleList(pooling)
        self.longest = max(1, min(hub.count_positions(network.config) // 2, LONGEST))
        takes_types = "token_type_ids" in {*tokenizer.model_input_names} & {*signature(network.forward).parameters}
        self.input_names = ("input_ids", "attention_mask", *(["token_type_ids"] if takes_types else []))
        self.eval()  # torch.onnx.export gives the parts the mode of the whole, and dropout would be drawn

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
        """Tokenize the bundled English texts."""
        texts = sample_texts(find_text_sources(BUNDLED / "corpus" / "validation.jsonl.zst"))
        cut = [text[:TEXT_CHARACTERS] for text in islice(texts, NUM_TEXTS)]
        rows = self.tokenizer(cut, truncation=True, max_length=max(self.longest, 4))["input_ids"]
        return [torch.tensor(row)[: self.longest] for row in rows]

    def batch(self, rows: Sequence[Tensor], lengths: Iterable[int] = ()) -> Features:
        """Make a batch of token rows, padded on the right; with `lengths`, cut or repeat each row to its length."""
        if lengths := [min(length, self.longest) for length in lengths]:
            rows = [row.repeat(length // len(row) + 1)[:length] for row, length in zip(rows, lengths, strict=False)]
        config = self.network.config
        features = pad_batch(rows, getattr(config, "pad_token_id", None) or 0)
        if "token_type_ids" in self.input_names:  # the second half has another type, as the second text of a pair
            mask_SL = features["attention_mask"]
            is_second_SL = mask_SL.cumsum(1) * 2 > mask_SL.sum(1, keepdim=True)
            features["token_type_ids"] = (mask_SL * is_second_SL).clamp(max=getattr(config, "type_vocab_size", 1) - 1)
        return features


def network_class(config: Any) -> Any:
    """Return the transformers class that a configuration names, else `AutoModel`."""
    kind = getattr(transformers, str((getattr(config, "architectures", None) or [""])[0]), None)
    is_network = isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)
    return kind if is_network else transformers.AutoModel


def load_named(folder: Path, attention: str | None = None, *, pooled: bool = True) -> tuple[NamedOutputs, OutputsOf]:
    """Load the network of a folder in fp32, and a function that computes the reference outputs.

    The network has the folder's head, or with `pooled` the modules of sentence-transformers, which then computes the
    reference. Raises `InputError` for a folder that these libraries cannot load, and for pickles.
    """
    classes = hub.read_config(folder).architectures or []
    head = next((kind.head for kind in KINDS.values() if any(name.endswith(kind.head) for name in classes)), "")
    network: Any = load_weights(getattr(transformers, f"AutoModel{head}"), folder, attention=attention).eval()
    tokenizer = load_auto_tokenizer(folder)
    if head or not pooled or not (folder / "modules.json").exists():
        named = NamedOutputs(network, tokenizer)
        return named, named.outputs
    embedder = load_sentence_transformer(folder, "cpu").eval()

    def embed(features: Features) -> Features:
        output = embedder(dict(features))
        return {"last_hidden_state": output["token_embeddings"], "sentence_embedding": output["sentence_embedding"]}

    return NamedOutputs(network, tokenizer, list(embedder)[1:]), embed


def text_limits(folder: Path, tokenizer: Any = None) -> dict[str, int]:
    """Return the number of tokens at which each part of a folder cuts texts; parts without a limit are left out."""
    limits: dict[str, float | None] = {"positions": hub.count_positions(hub.load_model_config(folder))}
    if (path := find_transformer_file(folder)) is not None:
        limits["sentence_transformers"] = hub.read_model_file(path, TransformerFile).max_seq_length
    limits["tokenizer"] = tokenizer and tokenizer.model_max_length
    return {name: int(limit) for name, limit in limits.items() if limit and limit < LEAST_LIMIT}


def find_transformer_file(folder: Path) -> Path | None:
    """Find the settings of sentence-transformers for a folder's network: sentence_bert_config.json, else a file with an
    older name."""
    paths = sorted(folder.glob(TRANSFORMER_FILES))
    return min(paths, key=lambda path: path.name != "sentence_bert_config.json", default=None)


def tell_limits(limits: Mapping[str, int]) -> str:
    """Return a warning of a folder whose texts sentence-transformers cuts elsewhere than programs that read its
    tokenizer; "" for other folders."""
    ours = limits.get("sentence_transformers")
    theirs = min((limits[name] for name in ("positions", "tokenizer") if name in limits), default=None)
    if ours is None or ours == theirs:
        return ""
    return f"sentence-transformers cuts texts at {ours:,} tokens, other programs at {theirs or 'none'}: vectors differ"


def read_answers(outputs: Features, lengths: Sequence[int]) -> list[np.ndarray]:
    """Return the answer to each text of a batch: its embedding [D], else the mean of its hidden states, else its
    logits."""
    if "sentence_embedding" in outputs:
        return list(outputs["sentence_embedding"].numpy())
    name, states = next(iter(outputs.items()))
    if name == "start_logits":
        states = torch.stack([states, outputs["end_logits"]], -1)
    parts = [part[:length] if states.ndim > 2 else part for part, length in zip(states, lengths, strict=True)]
    return [(part.mean(0) if name == "last_hidden_state" else part).numpy() for part in parts]


@torch.no_grad()
def prove_outputs(compute: OutputsOf, reference: OutputsOf, network: NamedOutputs, name: str) -> float:
    """Prove that another form of a network computes for batches what the reference computes for each text alone.

    Returns the largest difference, in units of an output's mean size. Raises `FailedProofError` for more than rounding.
    """
    texts, gaps = network.read_texts(), []
    for features in [*(network.batch(texts, lengths) for lengths in LENGTHS), network.batch(texts[:TEXTS_AT_ONCE])]:
        computed, lengths = compute(features), features["attention_mask"].sum(1).tolist()
        alone = []
        for index, length in enumerate(lengths):
            alone.append(reference({key: rows[index : index + 1, :length] for key, rows in features.items()}))
        for output in alone[0]:
            expected = torch.cat([row[output].flatten() for row in alone])
            parts = [part[: row[output].shape[1]].flatten() for part, row in zip(computed[output], alone, strict=True)]
            if not agree(torch.cat(parts), expected):
                texts_of = ", ".join(map(str, lengths))
                raise FailedProofError(f"{name} gives another {output} than PyTorch for texts of {texts_of} tokens")
            gaps.append(float((torch.cat(parts) - expected).abs().max() / expected.abs().mean()))
    return max(gaps)


# The modules of sentence-transformers


EMBEDDING_MODULES = (
    *("CNN", "Dense", "Dropout", "LSTM", "LayerNorm", "Normalize", "Pooling", "StaticEmbedding", "Transformer"),
    "WeightedLayerPooling",
)
"""The modules that biphase runs."""


@dataclass(frozen=True)
class ModuleEntry:
    """An entry of modules.json, by which sentence-transformers finds a module of an embedding model."""

    path: str
    type: str


ARGUMENTS = (
    "add_pooling_layer|attn_implementation|clean_up_tokenization_spaces|do_lower_case|dtype|model_max_length|padding_side"
    "|torch_dtype|truncation_side|trust_remote_code|use_cache|use_fast"
)
Arguments = dict[Annotated[str, Field(pattern=f"^({ARGUMENTS})$")], Any]
"""The arguments that an embedding model may give to transformers. Others could open pickles or kernels of the Hub;
`trust_remote_code` is ignored."""


@dataclass(frozen=True)
class Modality:
    """The method of a network that reads one kind of input."""

    method: Literal["forward"]


@dataclass(frozen=True)
class TransformerFile:
    """The sentence_bert_config.json of an embedding model (`find_transformer_file`)."""

    max_seq_length: int | None = None
    transformer_task: Literal["feature-extraction", "fill-mask", "sequence-classification"] = "feature-extraction"
    tokenizer_name_or_path: None = None
    modality_config: dict[str, Modality] = field(default_factory=dict)
    model_args: Arguments = field(default_factory=dict)
    model_kwargs: Arguments = field(default_factory=dict)
    config_args: Arguments = field(default_factory=dict)
    config_kwargs: Arguments = field(default_factory=dict)
    tokenizer_args: Arguments = field(default_factory=dict)
    processor_kwargs: Arguments = field(default_factory=dict)


@dataclass(frozen=True)
class DenseFile:
    """The config.json of a dense layer."""

    activation_function: hub.Activation | None = None


@dataclass(frozen=True)
class PoolingFile:
    """The config.json of a pooling, in its old form (a key for each mode) or its new one."""

    pooling_mode: str | list[str] | None = None
    pooling_mode_cls_token: bool = False
    pooling_mode_max_tokens: bool = False
    pooling_mode_mean_tokens: bool = False
    pooling_mode_mean_sqrt_len_tokens: bool = False
    pooling_mode_weightedmean_tokens: bool = False
    pooling_mode_lasttoken: bool = False
    include_prompt: bool = True


@dataclass(frozen=True)
class EmbedderFile:
    """The config_sentence_transformers.json of an embedding model or a cross-encoder."""

    prompts: dict[str, str | None] | None = None
    default_prompt_name: str | None = None
    similarity_fn_name: str | None = None
    activation_fn: hub.Activation | None = None


def read_modules(folder: Path) -> list[ModuleEntry]:
    """Read the modules of an embedding model; none without modules.json. Raises `InputError` for a module outside the
    folder."""
    if not (folder / "modules.json").exists():
        return []
    modules = hub.read_model_file(folder / "modules.json", list[ModuleEntry])
    for module in modules:
        if not (folder / module.path).resolve().is_relative_to(folder.resolve()):
            raise InputError(f"{folder}: its module '{module.path}' is not in the folder; save the model again")
    return modules


def list_module_files(folder: Path) -> list[Path]:
    """List the files in the folders of an embedding model's modules, in order. Raises `InputError` for pickled weights,
    for an index that names weights elsewhere, and for what `check_module` refuses."""
    modules = read_modules(folder)
    places = {folder / module.path for module in modules} - {folder}
    listed = sorted({path for place in places for path in files_below(place)})
    for path in listed:
        if path.match("pytorch_model*.bin") or path.name == hub.INDEX:
            hub.refuse_pickles(path.parent)
    for module in modules:
        check_module(folder, module)
    return listed


def check_module(folder: Path, module: ModuleEntry) -> None:
    """Raise `InputError` for a module of an embedding model that biphase does not run, and for settings by which it
    would run or open anything else."""
    place, kind = folder / module.path, module.type.rpartition(".")[2]
    if not module.type.startswith("sentence_transformers.") or kind not in EMBEDDING_MODULES:
        raise InputError(f"{folder} has the module '{module.type}'; biphase runs only {', '.join(EMBEDDING_MODULES)}")
    if kind == "Dense":
        hub.read_model_file(place / "config.json", DenseFile)
    if kind != "Transformer":
        return
    hub.load_model_config(place)
    check_tokenizer_files(place)
    for path in place.glob(TRANSFORMER_FILES):
        hub.read_model_file(path, TransformerFile)
        hub.refuse_named(path, hub.read_model_file(path, dict[str, Any]))
    if processors := [*place.glob("*processor_config.json")]:
        raise InputError(f"{processors[0]} is a processor of images or sound, which biphase does not run; remove it")


def load_sentence_transformer(folder: Path, device: str | None = None) -> Any:
    """Load an embedding model by sentence-transformers: in fp32, from safetensors alone, on the default device unless
    one is given. Raises `InputError` for one that cannot be loaded, and as `list_module_files` does."""
    from sentence_transformers import SentenceTransformer

    list_module_files(folder)
    read_embedder_file(folder)
    settings: Any = {"dtype": torch.float32, "use_safetensors": True}
    with told_as(f"{hub.model_name(folder)} cannot be loaded as an embedding model"):
        return SentenceTransformer(str(folder), device=device, trust_remote_code=False, model_kwargs=settings)


def read_embedder_file(folder: Path) -> EmbedderFile:
    """Read a folder's config_sentence_transformers.json; without one, return the defaults."""
    path = folder / "config_sentence_transformers.json"
    return hub.read_model_file(path, EmbedderFile) if path.exists() else EmbedderFile()


def takes_mean(folder: Path) -> bool:
    """Tell whether sentence-transformers embeds a text by the mean over its tokens, and does nothing else."""
    return read_pooling(folder) == ["mean"] and len(read_modules(folder)) == 2


def read_named_prompts(folder: Path) -> dict[str, str]:
    """Read the prompts, by name, that sentence-transformers prepends to texts."""
    return {name: text for name, text in (read_embedder_file(folder).prompts or {}).items() if text}


def refuse_left_out_prompts(folder: Path) -> None:
    """Raise `InputError` for an embedding model whose pooling leaves out its prompts: no form for other programs can
    tell which tokens are those of a prompt."""
    poolings = [hub.read_model_file(path, PoolingFile) for path in folder.glob("*_Pooling/config.json")]
    if read_named_prompts(folder) and not all(pooling.include_prompt for pooling in poolings):
        lack = "its pooling leaves prompts out (include_prompt: false), which only sentence-transformers does"
        raise InputError(f"{hub.model_name(folder)}: {lack}: encode its texts there")


def read_pooling(folder: Path) -> list[str]:
    """Read how sentence-transformers pools a folder's tokens, such as `mean`; it concatenates several."""
    modes: list[str] = []
    for path in sorted(folder.glob("*_Pooling/config.json")):
        content = hub.read_model_file(path, PoolingFile)
        modes += [content.pooling_mode] if isinstance(content.pooling_mode, str) else content.pooling_mode or []
        keys = [key for key, value in vars(content).items() if value is True and key.startswith("pooling_mode_")]
        modes += [key.removeprefix("pooling_mode_").removesuffix("_tokens").removesuffix("_token") for key in keys]
    return modes
