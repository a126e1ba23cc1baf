"""A model's name → a network with its tokenizer, which cells share → a cell's copy with a head → that copy, trained, as
a network of transformers.

The copy has only the rows of the embedding that the cell's texts use. The other rows get no gradient, so scores stay
the same; but with a vocabulary of 128,256 and small batches, their gradients, norm and optimizer would cost more than
everything else.

A trained network is kept as a class of transformers, whose `pipeline` predicts as ours does. If that class has another
head than the paper's, `head: transformers` trains that head, so the kept network is the one that was scored.

A frozen encoder computes its outputs once for all cells of a process, which train their layer on them. It computes them
in blocks of neighbours, so that an output is the same to the last bit whichever cell asks first.

Letters: V vocabulary, U tokens in use, T tokens of a batch, S samples, D width, C classes.
"""

import copy
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
import transformers
from torch import Tensor, nn

from biphase.console import err
from biphase.corpus.tokenizer import NEW_NAMES, find_tokenizer
from biphase.encoder.attention import choose_inference_backend
from biphase.encoder.lora import add_adapters
from biphase.encoder.models import Encoder, identify, stamp_model, unreplaced
from biphase.encoder.network import copy_in, fresh_backbone, load_backbone, pad_batch, without_padding
from biphase.encoder.packed import packed_hidden
from biphase.errors import InputError
from biphase.finetuning.config import FinetuneConfig, settings_that_matter
from biphase.finetuning.encoding import Batch, CellContext, EncodedSplit, HashedTokenizer, TokenizedTexts
from biphase.hub import AFTER_PADDING, output_width
from biphase.tasks.spec import Task

UNUSED_EMBEDDINGS = 1024
"""The most unused rows (or a twentieth of all rows, if that is more) that rounding up the size of an embedding
explains."""


def load_encoder(name: str) -> Encoder:
    """Load the encoder behind a name."""
    return open_encoder(identify(name))


@lru_cache(maxsize=1)
def open_encoder(model: Encoder) -> Encoder:
    """Load an identified model. The last one stays in memory."""
    with unreplaced(model.folder, model.stamps):
        backbone = load_backbone(model.folder)
        pretrained = find_tokenizer(model.folder, str(model.folder))
    assert pretrained is not None, "a model that was found has a tokenizer"
    tokenizer = HashedTokenizer(pretrained)
    config: Any = backbone.config
    added = pretrained.backend_tokenizer.get_added_tokens_decoder()
    # Names of special tokens are letters in texts, so such tokens need no rows. Gemma's image token has none.
    unread = {token.content for token in added.values() if token.special} | {*NEW_NAMES.values()}
    highest = max((id for token, id in pretrained.get_vocab().items() if token not in unread), default=0)
    sizes = f"{model.name}: its tokenizer has {highest + 1:,} tokens, its network {config.vocab_size:,}"
    if max(highest, tokenizer.closing, *tokenizer.opening) >= config.vocab_size:
        raise InputError(f"{sizes}; they do not belong together")
    if config.vocab_size - max([highest, *added]) > max(UNUSED_EMBEDDINGS, config.vocab_size // 20):
        err.print(f"{sizes}: is this its own tokenizer?")
    # For types that number positions from after the padding, `count_positions` has already subtracted them.
    first_position = 0 if config.model_type in AFTER_PADDING else getattr(backbone, "first_position", 0)
    return replace(model, backbone=backbone, tokenizer=tokenizer, max_length=model.max_length - first_position)


def refuse_replaced(model: Encoder) -> None:
    """Raise `InputError` if a file of a model has changed since it was identified, and forget everything made of it.
    Weights are read when they are needed, so new ones would go by the old name."""
    if stamp_model(model.folder) != model.stamps:
        open_encoder.cache_clear()
        stored_features.cache_clear()
        backbones.clear()
        raise InputError(f"files of {model.name} were replaced while a cell was computed with them: run it again")


class UsedEmbedding(nn.Embedding):
    """Some rows of an embedding, looked up by the token ids of the whole vocabulary.

    If a vocabulary of 6 has the tokens 2 and 5 in use, `row_of_V` is 2 2 0 2 2 1: rows 0 and 1 exist, and looking up
    any other token is an error.
    """

    row_of_V: Tensor

    def __init__(self, whole: nn.Embedding, used_U: Tensor) -> None:
        super().__init__(len(used_U), whole.embedding_dim, _weight=whole.weight.detach()[used_U])
        row_of_V = used_U.new_full((whole.num_embeddings,), len(used_U))
        row_of_V[used_U] = torch.arange(len(used_U), device=used_U.device)
        self.register_buffer("row_of_V", row_of_V, persistent=False)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(self.row_of_V[input])


def copy_backbone(
    backbone: Any, texts: Sequence[TokenizedTexts], weights: str = "pretrained", pad_id: int | None = None
) -> nn.Module:
    """Copy a network for these texts, padded with `pad_id` if given; without texts, for any text. Random weights come
    from torch's generator. An embedding that is more than a lookup table stays whole."""
    if weights == "random":
        backbone = fresh_backbone(backbone)
    embedding = backbone.get_input_embeddings()
    if not texts or not is_table(backbone, embedding):
        return copy.deepcopy(backbone)
    # Networks without packing pad their batches themselves.
    own_pad_id = getattr(backbone.config, "pad_token_id", None) or 0
    pad_ids = [own_pad_id, own_pad_id if pad_id is None else pad_id]
    once = {id(tokenized.tokens_T): tokenized for tokenized in texts}.values()  # splits may share their texts
    used_U = np.unique(np.concatenate([pad_ids, *(tokenized.used_U for tokenized in once)]))
    # deepcopy thinks that it has already copied the embedding, so the whole embedding never exists twice.
    return copy.deepcopy(backbone, {id(embedding): UsedEmbedding(embedding, torch.from_numpy(used_U))})


def count_weights(backbone: Any) -> int:
    """Count the parameters of a network without its input embeddings."""
    weights = sum(parameter.numel() for parameter in backbone.parameters())
    return weights - int(backbone.get_input_embeddings().weight.numel())


def is_table(backbone: nn.Module, embedding: nn.Module) -> bool:
    """Tell whether an embedding only looks up rows (Gemma's scales them), and no other module has its weight."""
    if type(embedding) is not nn.Embedding or embedding.max_norm is not None or embedding.scale_grad_by_freq:
        return False
    owners = [module for module in backbone.modules() if getattr(module, "weight", None) is embedding.weight]
    return owners == [embedding]


class NumberLayer(nn.Linear):
    """The last layer of a network for numbers, computed in fp32 whatever is below it.

    Its weights learn standardized labels, of mean 0 and variance 1; its outputs are in the unit of the labels. Without
    a bias, which could hold their mean, only their size becomes 1.
    """

    def __init__(self, layer: nn.Linear) -> None:
        """Take over the weights of a layer."""
        super().__init__(layer.in_features, layer.out_features, bias=layer.bias is not None)
        self.load_state_dict(layer.state_dict())
        self.mean, self.scale = 0.0, 1.0

    def forward(self, input: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.float()
        with torch.autocast(input.device.type, enabled=False):
            return self.mean + self.scale * nn.functional.linear(input.float(), self.weight.float(), bias)

    def take_unit(self) -> tuple[float, float]:
        """Let the layer compute standardized outputs. Returns the mean and the scale that it applied."""
        unit, self.mean, self.scale = (self.mean, self.scale), 0.0, 1.0
        return unit


class TaskNetwork(nn.Module):
    """A network with the paper's head for a family of tasks, drawn from torch's generator.

    For samples: mean over the tokens, end-of-text included → dense → GELU → linear; a linear probe has no dense layer.
    For tokens: dropout → linear, to tags or to the start and end of an answer. An embedder has no head.
    """

    def __init__(self, backbone: Any, cell: CellContext, *, has_head: bool = True) -> None:
        super().__init__()
        self.backbone = backbone
        self.of_tokens = cell.is_of_tokens
        has_head = has_head and not cell.is_embedder
        has_dense = has_head and not (cell.is_of_tokens or cell.config.frozen)
        has_dropout = "head_dropout" in settings_that_matter(cell.config, cell.task)
        self.dense = new_linear(backbone, output_width(backbone.config)) if has_dense else None
        self.dropout = nn.Dropout(cell.config.head_dropout if has_dropout else 0.0)
        self.out = new_linear(backbone, cell.num_outputs) if has_head else None
        if self.out is not None and cell.task.kind.has_label_numbers:
            self.out = NumberLayer(self.out)

    def forward(self, batch: Batch) -> Tensor:
        """Compute logits [S, C] or [T, C], fp32; without a head the means [S, D], fp32, or the hidden states [T, D]."""
        if isinstance(self.backbone, FrozenFeatures):
            rows = self.backbone.look_up(batch)
        else:
            rows = packed_hidden(self.backbone, batch.tokens_T, batch.positions_T, batch.layout)
            rows = rows if self.of_tokens else mean_pool(rows, batch.layout.bounds_S1)
        if self.out is None:
            return rows
        if not self.of_tokens:
            rows = rows.to(self.out.weight.dtype)
        if self.dense is not None:
            rows = nn.functional.gelu(self.dense(rows))
        return self.out(self.dropout(rows)).float()


class ClassNetwork(nn.Module):
    """A network inside its class of transformers, with the new head of that class and its dropout, drawn from torch's
    generator. A pooler belongs to the head, so the network comes without one.

    Raises `InputError` if transformers has no class for the task, or one with another network inside.
    """

    def __init__(self, backbone: nn.Module, encoder: Encoder, cell: CellContext) -> None:
        super().__init__()
        network = without_padding(backbone)
        config = config_with_head(network.config, encoder, cell)
        model = make_class(config, backbone, cell)
        if type(model.base_model) is not type(network):
            kinds = f"{type(model).__name__} contains a {type(model.base_model).__name__}, not {type(network).__name__}"
            raise InputError(f"{kinds}: leave keep and head out")
        if cell.task.kind.has_label_numbers:
            name = last_layer(model)
            model.set_submodule(name, NumberLayer(model.get_submodule(name)))
        if hasattr(network, "pooler"):
            network.pooler = model.base_model.pooler
        attention = model.config._attn_implementation
        setattr(model, model.base_model_prefix, network)
        model.set_attn_implementation(attention)
        self.model = model

    @property
    def backbone(self) -> Any:
        return self.model.base_model

    def forward(self, batch: Batch) -> Tensor:
        """Compute logits [S, C] or [T, C], fp32."""
        return padded_logits(self.model, batch)


def make_class(config: Any, backbone: nn.Module, cell: CellContext) -> Any:
    """Make a network of transformers for a task, with random weights. Raises `InputError` if it has no such class."""
    has_sdpa = getattr(backbone, "_supports_sdpa", False)  # a network on padded batches keeps its own attention
    try:
        model = auto_class(cell.task).from_config(config, attn_implementation="sdpa" if has_sdpa else "eager")
    except ValueError:
        described = f"{cell.task.family.replace('_', ' ')} by a network of type '{config.model_type}'"
        raise InputError(f"transformers has no class for {described}; leave keep and head out") from None
    return model.float()


def last_layer(model: Any) -> str:
    """Name the linear layer that computes the logits of a class of transformers: the last one of its head."""
    below = {*model.base_model.modules()}
    return [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear) and layer not in below][-1]


def config_with_head(config: Any, encoder: Encoder, cell: CellContext) -> Any:
    """Copy a network's configuration, with its published dropout, the outputs of its head and the token that pads
    batches."""
    config = copy.deepcopy(config)
    config.update(without_padding(encoder.backbone).published_dropout)
    config.num_labels = cell.num_outputs
    if not cell.task.kind.is_answering:
        config.id2label = {0: cell.task.label} if cell.num_outputs == 1 else dict(enumerate(cell.task.classes))
        config.label2id = {name: index for index, name in config.id2label.items()}
        config.problem_type = cell.task.problem_type
    if cell.task.kind.is_search:  # else CrossEncoder would give other numbers, in the same order
        config.sentence_transformers = {"activation_fn": "torch.nn.modules.linear.Identity"}
    config.pad_token_id = padding_token(encoder)
    return config


def padding_token(encoder: Encoder) -> int:
    """Find the token that pads batches: the tokenizer's, or the end of text if that one has no embedding. Types that
    count positions from after the padding keep their own token."""
    config: Any = encoder.backbone.config
    pad_id = config.pad_token_id if config.model_type in AFTER_PADDING else encoder.tokenizer.pretrained.pad_token_id
    return pad_id if pad_id in range(config.vocab_size) else encoder.tokenizer.closing


def padded_logits(model: Any, batch: Batch) -> Tensor:
    """Compute the logits of a class of transformers, which takes padded batches: fp32, [S, C], or [T, C] in families of
    tokens; an answer's C are its start and end.

    A sample less than half as long as the longest goes into another padded batch: none is mostly padding.
    """
    pad_id = getattr(model.config, "pad_token_id", None) or 0
    lengths = batch.texts.lengths_S[batch.samples].tolist()
    samples = batch.tokens_T.split(lengths)
    rest = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    logits: dict[int, Tensor] = {}
    while rest:
        indices = [index for index in rest if 2 * lengths[index] >= lengths[rest[0]]]
        rest = rest[len(indices) :]
        output = model(**pad_batch([samples[index] for index in indices], pad_id))
        is_span = "start_logits" in output
        outputs = torch.stack([output.start_logits, output.end_logits], -1) if is_span else output[0]
        for index, rows in zip(indices, outputs, strict=True):
            logits[index] = rows[: lengths[index]] if outputs.ndim == 3 else rows[None]
    return torch.cat([logits[index] for index in range(len(lengths))]).float()


def new_linear(backbone: Any, num_outputs: int) -> nn.Linear:
    """Make a layer with normal weights, of the network's own initial standard deviation, and biases of 0."""
    layer = nn.Linear(output_width(backbone.config), num_outputs)
    nn.init.normal_(layer.weight, std=getattr(backbone.config, "initializer_range", 0.02))
    nn.init.zeros_(layer.bias)
    return layer


def mean_pool(hidden_TD: Tensor, bounds_S1: Tensor) -> Tensor:
    """Average the rows of each sample in fp32: [S, D]."""
    return torch.segment_reduce(hidden_TD.float(), "mean", offsets=bounds_S1.long(), axis=0)


BLOCK = 64
"""The number of texts to encode together."""
backbones: WeakValueDictionary[tuple[str, torch.device], nn.Module] = WeakValueDictionary()
"""One copy of each encoder on a GPU, as long as features need it."""


def place_backbone(encoder: Encoder, device: torch.device) -> nn.Module:
    """Place the encoder on a device; on a CPU do not copy it, because nothing here changes it."""
    if device.type == "cpu":
        return encoder.backbone.eval()
    placed = backbones.get((encoder.hash, device))
    if placed is None:
        placed = backbones[encoder.hash, device] = copy.deepcopy(encoder.backbone).to(device).eval()
    return placed


@lru_cache(maxsize=8)
def stored_features(encoder: str, device: torch.device, dtype: torch.dtype, texts: TokenizedTexts) -> dict[int, Tensor]:
    """Return the store for a frozen encoder's outputs: the rows of each sample of these texts."""
    return {}


class FrozenFeatures(nn.Module):
    """A frozen encoder, whose outputs are computed on first use and then looked up."""

    def __init__(self, encoder: Encoder, cell: CellContext) -> None:
        super().__init__()
        self.encoder, self.cell = encoder, cell
        self.config = encoder.backbone.config

    @cached_property
    def model(self) -> Any:
        """The network that computes outputs, made on first use; not a submodule."""
        return TaskNetwork(place_backbone(self.encoder, self.cell.device), self.cell, has_head=False)

    def look_up(self, batch: Batch) -> Tensor:
        """Look up the mean of each sample, or the hidden state of each token in families of tokens."""
        texts, samples = batch.texts, batch.samples.tolist()
        rows_of = stored_features(self.encoder.hash, self.cell.device, self.cell.dtype, texts)
        for block in np.unique([sample // BLOCK for sample in samples if sample not in rows_of]).tolist():
            neighbours = np.arange(block * BLOCK, min((block + 1) * BLOCK, texts.num_samples))
            with torch.no_grad():
                for piece, output in texts.outputs(self.model, neighbours, self.cell):
                    lengths = texts.lengths_S[piece.samples].tolist() if self.cell.is_of_tokens else 1
                    rows_of.update(zip(piece.samples.tolist(), output.float().split(lengths), strict=True))
        return torch.cat([rows_of[sample] for sample in samples])


def build_network(encoder: Encoder, cell: CellContext, splits: Iterable[EncodedSplit]) -> nn.Module:
    """Build a network with a new head on a copy of the encoder for the texts of some splits (none: for any text), or on
    its features. Random weights come from torch's generator."""
    if can_look_up(cell):
        return TaskNetwork(FrozenFeatures(encoder, cell), cell)
    texts = [value for split in splits for value in vars(split).values() if isinstance(value, TokenizedTexts)]
    network: Any
    if cell.config.head == "transformers":
        backbone = copy_backbone(encoder.backbone, texts, cell.config.weights, padding_token(encoder))
        network = ClassNetwork(backbone, encoder, cell)
    else:
        network = TaskNetwork(copy_backbone(encoder.backbone, texts, cell.config.weights), cell)
    if cell.config.frozen:
        network.backbone.requires_grad_(False)
    if cell.config.lora is not None:
        add_adapters(network.backbone, cell.config.lora, cell.config.seed)
        if cell.config.head == "transformers" and (pooler := getattr(network.backbone, "pooler", None)) is not None:
            pooler.requires_grad_(True)  # it is a part of the new head
    return network.to(torch.bfloat16) if cell.config.weight_dtype == "bf16" else network


def can_look_up(cell: CellContext) -> bool:
    """Tell whether a cell trains one layer on the stored outputs of an unchanged encoder."""
    config, has_layer = cell.config, not cell.task.kind.is_answering
    return config.frozen and has_layer and config.weights == "pretrained" and config.weight_dtype == "fp32"


@torch.no_grad()
def encode_packed(encoder: Encoder, texts: Sequence[str], device: torch.device, dtype: torch.dtype) -> np.ndarray:
    """Average the outputs over each text's tokens: fp32, [texts, width]. Prints how many texts were cut."""
    backbone: Any = place_backbone(encoder, device)
    if dtype != torch.float32:
        backbone = copy_in(backbone, dtype)
    encoded = encoder.tokenizer.encode_texts(texts, encoder.max_length)
    if len(encoded.truncated):
        err.print(f"{len(encoded.truncated):,} of {len(texts):,} texts are cut at {encoder.max_length:,} tokens")
    task = Task.model_construct(name="encode", family="retrieval")
    backend = choose_inference_backend(device, dtype)
    cell = CellContext(task, FinetuneConfig(precision="fp32"), device, dtype, backend=backend)
    return encoded.predict(TaskNetwork(backbone, cell).eval(), cell, output_width(backbone.config))


def auto_class(task: Task) -> Any:
    """Find transformers' Auto class for the networks of a task."""
    return getattr(transformers, f"AutoModel{task.kind.head}")
