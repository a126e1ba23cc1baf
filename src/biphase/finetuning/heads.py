"""A model's name becomes the network with its tokenizer, shared by cells; a cell's copy of it; and the heads on top.

The copy has those rows of the embedding only that the cell's texts use. The other rows get no gradient and are looked
up by nobody, so scores stay the same; but every step they would cost their share of gradients, norm and optimizer: with
a vocabulary of 128,256 and small batches, more than all else.

A frozen encoder's rows are computed once for all cells of a process: rates and seeds train their layer on rows that are
looked up. Rows are made in blocks of neighbours, so that a row is the same to the last bit whichever cell asked first.

Letters: V vocabulary, U tokens in use, T tokens of a batch, S samples, D width, C classes, N rows (of texts, or of
their tokens), M those of them that there is room for.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor, nn

from biphase.console import err
from biphase.corpus.tokenizer import NEW_NAMES, load_tokenizer, tokenizer_hash
from biphase.encoder.attention import PackedLayout, lay_out
from biphase.encoder.network import fresh_backbone, load_backbone
from biphase.encoder.packed import PaddedBackbone, packed_hidden
from biphase.encoder.proofs import telling_tokens
from biphase.errors import InputError
from biphase.finetuning.cells import FileStamps, find_folder, hash_files, stamp_files
from biphase.finetuning.config import FinetuneConfig
from biphase.finetuning.encoding import (
    CellContext,
    EncodedTask,
    HashedTokenizer,
    TokenizedTexts,
    encode_texts,
    evaluation_batches,
    predict_samples,
)
from biphase.flops import count_positions
from biphase.tasks.spec import Task

UNUSED_EMBEDDINGS = 1024
"""More rows of an embedding than this, or than a twentieth of it, are not there for a round number alone."""


@dataclass(frozen=True)
class Encoder:
    """A pretrained network and its tokenizer. Shared by cells: copied, never trained."""

    name: str
    hash: str
    """The hash of configuration, weights and tokenizer."""
    backbone: nn.Module = field(compare=False, repr=False)
    tokenizer: HashedTokenizer
    max_length: int
    """Tokens that the network has positions for, as it was found to number them."""


def load_encoder(name: str) -> Encoder:
    """The encoder behind a name (see `models`). The last one that was loaded is kept: it costs nothing to ask again."""
    folder = find_folder(name)
    return load_stamped_encoder(name, folder, stamp_files(folder))


@lru_cache(maxsize=1)
def load_stamped_encoder(name: str, folder: Path, stamps: FileStamps) -> Encoder:
    backbone = load_backbone(folder)
    tokenizer = load_hashed_tokenizer(folder)
    pretrained = tokenizer.pretrained
    config: Any = backbone.config
    highest = max(number for token, number in pretrained.get_vocab().items() if token not in NEW_NAMES.values())
    if max(highest, tokenizer.closing, *tokenizer.opening) >= config.vocab_size:
        raise InputError(
            f"{name}: its tokenizer has {highest + 1:,} tokens, its network only {config.vocab_size:,}; they do not "
            "belong together"
        )
    if config.vocab_size - highest > max(UNUSED_EMBEDDINGS, config.vocab_size // 20):
        err.print(
            f"{name}: its tokenizer has {highest + 1:,} tokens, its network {config.vocab_size:,}: is it its own?"
        )
    limit = count_positions(config, getattr(backbone, "first_position", None))
    return Encoder(name, hash_files(stamps), backbone, tokenizer, limit)


def load_hashed_tokenizer(folder: Path) -> HashedTokenizer:
    pretrained = load_tokenizer(folder)
    return HashedTokenizer(tokenizer_hash(pretrained), pretrained)


def check_length(encoder: Encoder, config: FinetuneConfig) -> None:
    """Raises `InputError` where special tokens leave no room for a question and its context, or positions run out."""
    if config.max_length > encoder.max_length:
        raise InputError(
            f"max_length {config.max_length} is above the {encoder.max_length} tokens that {encoder.name} has "
            f"positions for: give max_length={encoder.max_length}"
        )
    least = len(encoder.tokenizer.opening) + 1 + 2
    if config.max_length < least:
        raise InputError(
            f"max_length {config.max_length} leaves no room for text: {encoder.name} needs {least} or more"
        )


class UsedEmbedding(nn.Embedding):
    """Some rows of an embedding, found by the numbers that the tokens have in the whole vocabulary.

    Of a vocabulary of 6 with the tokens 2 and 5 in use, `row_of_V` is 2 2 0 2 2 1: rows 0 and 1 are there, and to look
    up any other token is an error.
    """

    row_of_V: Tensor

    def __init__(self, whole: nn.Embedding, used_U: Tensor) -> None:
        super().__init__(len(used_U), whole.embedding_dim, _weight=whole.weight.detach()[used_U])
        row_of_V = used_U.new_full((whole.num_embeddings,), len(used_U))
        row_of_V[used_U] = torch.arange(len(used_U), device=used_U.device)
        self.register_buffer("row_of_V", row_of_V, persistent=False)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(self.row_of_V[input])

    @torch.no_grad()
    def put_back(self, pretrained: Any) -> nn.Embedding:
        """The whole embedding: trained rows where texts used them, the others as they were."""
        whole = copy.deepcopy(pretrained).to(self.weight.dtype)
        is_used_V = self.row_of_V < self.num_embeddings
        whole.weight[is_used_V] = self.weight[self.row_of_V[is_used_V]].to(whole.weight.device)
        return whole


def copy_backbone(
    backbone: Any, texts: Sequence[TokenizedTexts], weights: Literal["pretrained", "random"] = "pretrained"
) -> nn.Module:
    """A copy for these texts; for any text, where none are given. Random weights come from torch's generator.

    The whole embedding stays where it is more than a table.
    """
    if weights == "random":
        backbone = fresh_backbone(backbone)
    embedding = backbone.get_input_embeddings()
    if not texts or not is_table(backbone, embedding):
        return copy.deepcopy(backbone)
    pad_id = (
        getattr(backbone.config, "pad_token_id", None) or 0
    )  # networks without packing pad their batches themselves
    once = {id(part.tokens_T): part for part in texts}.values()  # splits may share their texts
    used_U = np.unique(np.concatenate([[pad_id], *(part.used_U for part in once)]))
    # What deepcopy takes for copied already, it does not copy: the whole embedding never exists twice.
    return copy.deepcopy(backbone, {id(embedding): UsedEmbedding(embedding, torch.from_numpy(used_U))})


def is_table(backbone: nn.Module, embedding: nn.Module) -> bool:
    """Whether an embedding only looks rows up (Gemma's scales them), and nothing else has its weight."""
    if type(embedding) is not nn.Embedding or embedding.max_norm is not None or embedding.scale_grad_by_freq:
        return False
    owners = [module for module in backbone.modules() if getattr(module, "weight", None) is embedding.weight]
    return owners == [embedding]


class SequenceClassifier(nn.Module):
    """Mean over a sample's tokens, end-of-text included → dense → GELU → linear; the last alone for a linear probe."""

    def __init__(self, backbone: Any, num_labels: int, is_probe: bool = False) -> None:
        super().__init__()
        self.backbone = backbone
        self.dense = None if is_probe else new_linear(backbone, backbone.config.hidden_size)
        self.out = new_linear(backbone, num_labels)

    def forward(self, tokens_T: Tensor, positions_T: Tensor, layout: PackedLayout) -> Tensor:
        """Logits [S, C], fp32."""
        hidden_TD = packed_hidden(self.backbone, tokens_T, positions_T, layout)
        pooled_SD = mean_pool(hidden_TD, layout.bounds_S1).to(self.out.weight.dtype)
        return self.out(pooled_SD if self.dense is None else nn.functional.gelu(self.dense(pooled_SD))).float()


class TokenClassifier(nn.Module):
    """Dropout → linear, for each token: its tag, or how well an answer starts and ends there."""

    def __init__(self, backbone: nn.Module, num_labels: int, dropout: float) -> None:
        super().__init__()
        self.backbone = backbone
        self.dropout = nn.Dropout(dropout)
        self.out = new_linear(backbone, num_labels)

    def forward(self, tokens_T: Tensor, positions_T: Tensor, layout: PackedLayout) -> Tensor:
        """Logits [T, C], fp32."""
        hidden_TD = packed_hidden(self.backbone, tokens_T, positions_T, layout)
        return self.out(self.dropout(hidden_TD)).float()


class PaddedNetwork(nn.Module):
    """A class of transformers with its own head, behind the packed interface: what is packed is padded for it."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    @property
    def backbone(self) -> Any:
        """The network without its head."""
        return self.model.base_model

    def forward(self, tokens_T: Tensor, positions_T: Tensor, layout: PackedLayout) -> Tensor:
        """Logits, fp32: [S, C] of samples, or [T, C] of tokens; C are start and end of an answer's span. Of a network
        without a head, the last hidden states."""
        lengths_S = layout.bounds_S1.long().diff()
        is_token_SL = torch.arange(int(lengths_S.max()), device=tokens_T.device) < lengths_S[:, None]
        padded_SL = tokens_T.new_full(is_token_SL.shape, getattr(self.model.config, "pad_token_id", None) or 0)
        padded_SL[is_token_SL] = tokens_T
        output = self.model(input_ids=padded_SL, attention_mask=is_token_SL.long())
        is_span = "start_logits" in output
        logits = torch.stack([output.start_logits, output.end_logits], -1) if is_span else output[0]
        return (logits[is_token_SL] if logits.ndim == 3 else logits).float()


def with_transformers_head(backbone: Any, kind: Any, num_labels: int) -> PaddedNetwork:
    """The network's own class for a kind of task, such as `AutoModelForSequenceClassification`, with a new head by
    torch's generator.

    Raises `InputError` where transformers has no such class, or its network computes something else than ours.
    """
    config = copy.deepcopy(backbone.config)
    config.num_labels = num_labels
    inner: Any = backbone.network if isinstance(backbone, PaddedBackbone) else backbone
    attention = "sdpa" if getattr(inner, "_supports_sdpa", False) else "eager"
    try:
        model = kind.from_config(config, attn_implementation=attention).float()
    except ValueError:
        raise InputError(
            f"head=transformers: there is no class for '{config.model_type}' with a head for that"
        ) from None
    model.base_model.set_input_embeddings(backbone.get_input_embeddings())
    missing, unexpected = model.base_model.load_state_dict(inner.state_dict(), strict=False)
    lost = [key for key in (*missing, *unexpected) if not key.startswith("pooler.")]
    embedding = backbone.get_input_embeddings()
    known = torch.arange(getattr(embedding, "num_embeddings", config.vocab_size))
    if isinstance(embedding, UsedEmbedding):
        known = (embedding.row_of_V < embedding.num_embeddings).nonzero()[:, 0]
    if lost or not computes_the_same(partial(packed_hidden, backbone.eval()), model.base_model, known, atol=1e-3):
        raise InputError(
            f"head=transformers: {type(model).__name__} computes something else than '{config.model_type}' does packed"
        )
    return PaddedNetwork(model)


@torch.no_grad()
def computes_the_same(ours: Callable[..., Tensor], theirs: Any, known: Tensor, atol: float) -> bool:
    """Whether a network of transformers computes on padded samples of 12 and 5 known tokens what ours does on them
    packed: hidden states, or logits where it has a head."""
    tokens_T = telling_tokens(theirs.base_model, 17, known)
    positions_T = torch.cat([torch.arange(12), torch.arange(5)])
    packed = tokens_T, positions_T, lay_out(np.array([0, 12, 17]), causal=False)
    return torch.allclose(ours(*packed).float(), PaddedNetwork(theirs.eval())(*packed), rtol=1e-3, atol=atol)


class Embedder(nn.Module):
    """Mean over a sample's tokens."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, tokens_T: Tensor, positions_T: Tensor, layout: PackedLayout) -> Tensor:
        """Embeddings [S, D], fp32, not normalised."""
        return mean_pool(packed_hidden(self.backbone, tokens_T, positions_T, layout), layout.bounds_S1)


def new_linear(backbone: Any, num_outputs: int) -> nn.Linear:
    """Normal weights with the standard deviation that the network itself was initialised with, biases 0."""
    layer = nn.Linear(backbone.config.hidden_size, num_outputs)
    nn.init.normal_(layer.weight, std=getattr(backbone.config, "initializer_range", 0.02))
    nn.init.zeros_(layer.bias)
    return layer


def mean_pool(hidden_TD: Tensor, bounds_S1: Tensor) -> Tensor:
    """The mean of each sample's rows, [S, D], summed in fp32."""
    return torch.segment_reduce(hidden_TD.float(), "mean", offsets=bounds_S1.long(), axis=0)


def reference_mean_pool(hidden_TD: Tensor, bounds_S1: Tensor) -> Tensor:
    """The slow twin of `mean_pool`."""
    bounds = bounds_S1.tolist()
    return torch.stack([hidden_TD[a:b].float().mean(0) for a, b in pairwise(bounds)])


BLOCK = 64
"""Texts that are encoded together."""
NUM_KEPT = 8

kept: dict[tuple[Any, ...], "Features"] = {}
"""The features that were asked for last; they hold the texts by whose identity they are named."""

backbones: WeakValueDictionary[tuple[str, torch.device], nn.Module] = WeakValueDictionary()
"""Encoders on a GPU, one each, for as long as features are made of them."""


def place_backbone(encoder: Encoder, device: torch.device) -> nn.Module:
    """The encoder on the device: on a CPU itself, for nothing here changes it."""
    if device.type == "cpu":
        return encoder.backbone.eval()
    placed = backbones.get((encoder.hash, device))
    if placed is None:
        placed = backbones[encoder.hash, device] = copy.deepcopy(encoder.backbone).to(device).eval()
    return placed


class Features:
    """The rows of some texts, made when they are first looked up."""

    def __init__(self, encoder: Encoder, texts: TokenizedTexts, cell: CellContext) -> None:
        self.texts, self.cell = texts, cell
        self.is_of_tokens = cell.task.family == "token_classification"
        backbone = place_backbone(encoder, cell.device)
        self.model: Any = partial(packed_hidden, backbone) if self.is_of_tokens else Embedder(backbone)
        self.num = len(texts.tokens_T) if self.is_of_tokens else texts.num_samples
        width: int = encoder.backbone.config.hidden_size  # type: ignore[union-attr, assignment]
        self.rows_MD = torch.zeros(0, width, device=cell.device)
        self.places_N = np.full(self.num, -1)
        self.num_made = 0

    @torch.no_grad()
    def look_up(self, rows: np.ndarray) -> Tensor:
        missing = rows[self.places_N[rows] < 0]
        samples = np.searchsorted(self.texts.bounds_S1, missing, side="right") - 1 if self.is_of_tokens else missing
        for block in np.unique(samples // BLOCK):
            self.make(np.arange(block * BLOCK, min((block + 1) * BLOCK, self.texts.num_samples)))
        if self.num_made == self.num:
            self.model = None
        return self.rows_MD[torch.from_numpy(self.places_N[rows]).to(self.rows_MD.device)]

    def make(self, samples: np.ndarray) -> None:
        """Put the rows of some texts behind those that there are, in twice the room where it is full."""
        for batch, output in evaluation_batches(self.model, self.texts, samples, self.cell):
            first, end = self.num_made, self.num_made + len(output)
            if end > len(self.rows_MD):
                room = torch.zeros(min(2 * end, self.num), output.shape[1], device=output.device)
                room[:first] = self.rows_MD[:first]
                self.rows_MD = room
            self.rows_MD[first:end] = output.float()
            self.places_N[batch.indices_T if self.is_of_tokens else batch.samples] = np.arange(first, end)
            self.num_made = end


@torch.no_grad()
def encode_packed(encoder: Encoder, texts: Sequence[str], device: torch.device) -> np.ndarray:
    """The mean over each text's tokens, fp32, [texts, width]; of texts that have to be cut, a line tells."""
    backbone: Any = place_backbone(encoder, device)
    encoded = encode_texts(encoder.tokenizer, texts, encoder.max_length)
    if len(encoded.truncated):
        err.print(f"{len(encoded.truncated):,} of {len(texts):,} texts are cut at {encoder.max_length:,} tokens")
    task = Task.model_construct(name="encode", family="retrieval")
    cell = CellContext(task, FinetuneConfig(precision="fp32"), device, torch.float32)
    return predict_samples(Embedder(backbone).eval(), encoded, backbone.config.hidden_size, cell)


class FeatureTable(nn.Module):
    """It stands where the encoder would: numbers of rows in place of token ids → features."""

    def __init__(self, config: Any, parts: Sequence[Features]) -> None:
        super().__init__()
        self.config, self.parts = config, parts
        self.firsts = np.cumsum([0, *(part.num for part in parts)])

    def forward(self, input_ids: Tensor, **_: Any) -> Any:
        rows = input_ids[0].cpu().numpy()
        features_ND = torch.zeros(len(rows), self.config.hidden_size, device=input_ids.device)
        for part, first in zip(self.parts, self.firsts[:-1].tolist(), strict=True):
            own = np.flatnonzero((rows >= first) & (rows < first + part.num))
            if len(own):
                features_ND[torch.from_numpy(own).to(input_ids.device)] = part.look_up(rows[own] - first)
        return SimpleNamespace(last_hidden_state=features_ND[None])


def look_up_tasks(
    encoder: Encoder, tasks: Sequence[EncodedTask[Any]], cell: CellContext
) -> tuple[FeatureTable | None, Sequence[EncodedTask[Any]]]:
    """A table in place of a frozen encoder, and the tasks with numbers of its rows as tokens: one for each text, or for
    each token of texts to tag. Other cells keep their tasks, and those whose weights are their own or that find spans.
    """
    config, is_known = cell.config, cell.task.family not in ("question_answering", "retrieval")
    if not (config.frozen and is_known) or config.weights == "random" or config.weight_dtype == "bf16":
        return None, tasks
    parts: list[Features] = []
    made = []
    for encoded in tasks:
        splits = {}
        for name, split in encoded.splits.items():
            key = (encoder.hash, cell.device, cell.dtype, id(split.texts))
            part = kept.pop(key, None) or Features(encoder, split.texts, cell)
            kept[key] = part
            first = sum(one.num for one in parts)
            tokens = np.arange(first, first + part.num)
            bounds = split.texts.bounds_S1 if part.is_of_tokens else np.arange(part.num + 1)
            splits[name] = replace(split, texts=TokenizedTexts(tokens, bounds, split.texts.truncated))
            parts.append(part)
        made.append(EncodedTask(splits, encoded.left_out))
    while len(kept) > max(NUM_KEPT, len(parts)):
        del kept[next(iter(kept))]
    return FeatureTable(encoder.backbone.config, parts), made
