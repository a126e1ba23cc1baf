"""A model's name → the network with its tokenizer, shared by cells; a cell's copy of it; the heads that stand on one.

The copy has those rows of the embedding only that the cell's texts use. The other rows get no gradient and are looked
up by nobody, so scores stay the same; but every step they would cost their share of gradients, norm and optimizer: with
a vocabulary of 128,256 and small batches, more than all else.

Letters: V vocabulary, U tokens in use, T tokens of a batch, S samples, D width, C classes.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from biphase.console import err
from biphase.corpus.tokenizer import NEW_NAMES, load_tokenizer, tokenizer_hash
from biphase.encoder.attention import PackedLayout, lay_out
from biphase.encoder.load import fresh_backbone, load_backbone
from biphase.encoder.packed import PaddedBackbone, packed_hidden
from biphase.encoder.probes import telling_tokens
from biphase.errors import InputError
from biphase.finetuning.config import FinetuneConfig
from biphase.finetuning.encoding import HashedTokenizer, TokenizedTexts
from biphase.finetuning.models import FileStamps, find_folder, hash_files, stamp_files
from biphase.flops import count_positions

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
