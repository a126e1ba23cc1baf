"""A preset, a folder or a Hub model becomes a network for packed batches, with or without its head.

The networks are transformers' own classes: a `EuroBertConfig` for a preset, else any decoder or encoder with a causal
or masked language model in transformers. A loaded network is fp32, attends through `encoder.attention`, has no dropout,
and has proved that packing changes nothing (`encoder.proofs`). A headless network with its own attention runs on
padded batches in `PaddedBackbone`, behind the same interface. Two networks of one shape can be averaged, and compared
layer by layer.

Letters: T packed tokens, N samples of a batch, L longest sample, D width.
"""

import copy
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import EuroBertConfig, PretrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from biphase import console
from biphase.encoder.attention import ATTENTION, PackedLayout
from biphase.encoder.proofs import FailedProofError, check_padded, find_first_position, looks_both_ways
from biphase.errors import InputError, first_line, refuse_unknown, told_as
from biphase.flops import read_shape
from biphase.hub import load_model_config, refuse_endless, refuse_pickles
from biphase.presets import find_preset


@torch.no_grad()
def merge_weights(network: nn.Module, before: nn.Module, share: float) -> None:
    """Average the trained network, in place, with the network before training, whose weight is `share`, against
    forgetting (BidirLM, arXiv:2604.02045)."""
    old = dict(before.named_parameters())
    for name, parameter in network.named_parameters():
        parameter.lerp_(old[name].to(parameter.device), share)


def copy_in(network: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Copy a network for inference, with weights of another type, so that no pass casts them again. Buffers, such as
    the frequencies of rotary positions, keep theirs."""
    copied = copy.deepcopy(network).requires_grad_(False)
    for parameter in copied.parameters():
        parameter.data = parameter.data.to(dtype)
    return copied


def layer_cosines(network: nn.Module, before: nn.Module, name: str = "the network before") -> dict[str, float]:
    """Compute the cosine between the weights after and before training, for the embedding, each block and the rest.

    Raises `InputError` if the network before, called `name`, has weights with other names or shapes.
    """
    shapes = {(key, weight.shape) for key, weight in network.named_parameters()}
    if differences := shapes ^ {(key, weight.shape) for key, weight in before.named_parameters()}:
        differing = ", ".join(sorted({key for key, _ in differences})[:3])
        raise InputError(f"{name} cannot be merged: its weights {differing} differ by name or shape")
    groups: dict[str, list[float]] = {}
    old = dict(before.named_parameters())
    for key, parameter in network.named_parameters():
        # `backbone.layers.3.mlp.up_proj.weight` belongs to layer 3, a name without a number to embeddings or the rest.
        numbers = [word for word in key.split(".") if word.isdigit()]
        layer = numbers[0] if numbers else "embeddings" if "embed" in key else "rest"
        after, earlier = parameter.detach().double().cpu().flatten(), old[key].detach().double().cpu().flatten()
        sums = groups.setdefault(layer, [0.0, 0.0, 0.0])
        for index, product in enumerate((after @ earlier, after @ after, earlier @ earlier)):
            sums[index] += float(product)
    return {layer: dot / max((first * second) ** 0.5, 1e-30) for layer, (dot, first, second) in groups.items()}


@dataclass(frozen=True)
class TokenIds:
    """The vocabulary size and token ids of a network's configuration, under its names."""

    vocab_size: int
    mask_token_id: int
    eos_token_id: int
    pad_token_id: int
    bos_token_id: int | None


def make_model(preset: str, architecture: dict[str, Any], tokens: TokenIds, max_len: int, seed: int) -> PreTrainedModel:
    """Make a network of a preset's shape, with changes, for samples of up to `max_len` tokens.

    Its weights are random, normal with standard deviation 0.02, and its norms 1. Raises `InputError` for changes that
    are not settings of the network, that the shards decide, or that make no valid network.
    """
    sizes, defaults = find_preset(preset), EuroBertConfig().to_dict()
    for key in architecture:
        refuse_unknown("init.architecture: unknown key", key, defaults)
        if key.endswith("token_id"):
            raise InputError(f"init.architecture: '{key}' follows from the tokenizer of the shards; leave it out")
    settings = {
        "max_position_embeddings": max_len,
        "rms_norm_eps": 1e-5,
        "initializer_range": 0.02,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "tie_word_embeddings": False,
        **asdict(tokens),
        **sizes,
        **architecture,
    }
    shape = read_shape(settings)
    torch.manual_seed(seed)
    with told_as("init.architecture makes no network"), console.told_if_slow(f"drawing the weights of {preset}"):
        config = EuroBertConfig(**settings)
        refuse_endless("init.architecture", config)
        if config.vocab_size < tokens.vocab_size:
            raise InputError(f"init.architecture: vocab_size is below the {tokens.vocab_size:,} tokens of the shards")
        if shape.heads % (kv_heads := shape.kv_heads):
            raise InputError(f"init.architecture: {kv_heads} key-value heads do not divide {shape.heads} query heads")
        if (positions := config.max_position_embeddings) < max_len:
            remedy = f"set data.max_sample_tokens={positions} or lower (it is {max_len})"
            raise InputError(f"init.architecture: max_position_embeddings is {positions}; {remedy}, or leave it out")
        config._attn_implementation = ATTENTION
        config.use_cache = False  # as in loaded networks, so that branches and fresh runs save the same settings
        model = transformers.EuroBertForMaskedLM(config)
    train_padding_row(model)
    return model


def load_model(
    source: str | Path, *, vocab_size: int | None = None, seed: int = 0, new_head: bool = False
) -> PreTrainedModel:
    """Load a language model from a folder, in fp32, attending through `biphase`, without dropout.

    Never runs a repository's own code, and never unpickles weights.

    Args:
        vocab_size: enlarge the embeddings to this number of tokens, and draw new rows from the distribution of the old
            rows.
        seed: the seed of new rows and of a new head.
        new_head: add a head to a network without one, drawn as its class draws it, or tied to the embeddings.

    Raises:
        InputError: nothing to load, an encoder-decoder, attention that does not go through ours, a missing head, or
            `new_head` for a network with a head.
    """
    config = load_model_config(source)
    kind = language_model_class(config)
    if kind is None:
        raise InputError(f"{source} is a '{config.model_type}' model: transformers has no language model head for it")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = load_weights(kind, source, config, new_head=new_head)
    make_generation_saveable(model)
    if model.get_output_embeddings() is None or model.base_model is model:
        raise InputError(f"{source}: transformers does not say what lies below the head of {type(model).__name__}")
    causal = kind is transformers.AutoModelForCausalLM and getattr(config, "is_causal", True)
    reason = find_first_position(model.base_model, causal)
    if reason:
        raise InputError(f"{source}: no proof that packing changes nothing for {type(model).__name__}: {reason}")
    embedding: Any = model.get_input_embeddings()
    old_size = embedding.weight.shape[0]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if vocab_size is not None and vocab_size > old_size:
            model.resize_token_embeddings(vocab_size, mean_resizing=True)
        padding_idx = getattr(model.get_input_embeddings(), "padding_idx", None)
        train_padding_row(model)
    if padding_idx is not None and model.get_output_embeddings().weight is model.get_input_embeddings().weight:
        # Loading initializes tied weights, except those marked as loaded. Youtu ignores the mark.
        marked: Any = nn.Embedding(1, 1, padding_idx=0, _weight=torch.ones(1, 1)).requires_grad_(False)
        marked.weight._is_hf_initialized = True
        model._init_weights(marked)
        if not marked.weight.all():
            fault = f"transformers sets the padding row of a {type(model).__name__} to zero each time that it loads one"
            raise InputError(f"{source}: {fault}, so what is trained here would be lost")
    return model


LANGUAGE_MODELS = (transformers.AutoModelForMaskedLM, transformers.AutoModelForCausalLM)


def load_weights(
    kind: Any,
    source: str | Path,
    config: PretrainedConfig | None = None,
    attention: str | None = ATTENTION,
    dtype: Any = torch.float32,
    new_head: bool = False,
) -> PreTrainedModel:
    """Load all weights by `kind.from_pretrained` from safetensors, in fp32, or as stored with the dtype `auto`.

    The default of `config` is the folder's own. Raises `InputError` for missing weights, except those of a `new_head`.
    """
    config = config or load_model_config(source)
    refuse_pickles(source)  # transformers opens whatever the index names
    published_dropout = dropout_shares(config)
    config.update(dict.fromkeys(published_dropout, 0.0))  # pretraining uses none (Table 1)
    config.use_cache = False
    with told_as(f"cannot load weights from {source}"), console.told_if_slow(f"{source}: reading the weights"):
        try:
            model, report = kind.from_pretrained(
                str(source),
                config=config,
                dtype=dtype,
                attn_implementation=attention,
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
        except KeyError as error:
            if error.args != (attention,):
                raise
            reason = f"'{config.model_type}' chooses among attention classes of its own and cannot be packed"
            raise FailedProofError(f"{source}: {reason}") from None
    for name, weight in model.named_parameters():
        if weight.is_floating_point() and dtype not in ("auto", weight.dtype):
            raise InputError(f"{source}: its weight '{name}' stays {weight.dtype} and cannot be trained")
    lacking = sorted(key for key in report["missing_keys"] if not key.startswith("pooler."))
    below = f"{model.base_model_prefix}."
    lacks_head = bool(lacking) and kind in LANGUAGE_MODELS and not any(key.startswith(below) for key in lacking)
    if new_head and not lacking:
        raise InputError(f"{source} has a language model head: leave out init.new_head")
    if lacks_head and not new_head:
        raise InputError(f"{source} is an embedding model without a language model head; init.new_head: true adds one")
    if lacking and not lacks_head:
        raise InputError(f"{source} lacks {len(lacking)} weights of {type(model).__name__}, such as '{lacking[0]}'")
    model.published_dropout = published_dropout
    return model


def save_network(network: Any, folder: Path, **settings: Any) -> None:
    """Write a network as `save_pretrained` does, with the dropout that its configuration had before `load_weights`.
    Whoever fine-tunes it then draws the same dropout as in the model that it came from."""
    config = network.config
    used = dropout_shares(config)
    config.update(getattr(network, "published_dropout", {}))
    try:
        network.save_pretrained(folder, **settings)
    finally:
        config.update(used)


def dropout_shares(config: PretrainedConfig) -> dict[str, float]:
    """List the dropout settings of a configuration."""
    shares = {key: value for key, value in config.to_dict().items() if isinstance(value, float)}
    return {key: value for key, value in shares.items() if "dropout" in key or key.endswith("_pdrop")}


def make_generation_saveable(model: PreTrainedModel) -> None:
    """Make a model's generation settings valid, because transformers saves no model with invalid ones.

    Many published settings are invalid, such as a temperature without sampling. Then switch sampling on; if that does
    not help, keep only the tokens that begin and end a text.
    """
    if not model.can_generate():
        return
    published: Any = model.generation_config
    sampling, bare = copy.deepcopy(published), transformers.GenerationConfig()
    sampling.do_sample = True
    bare.bos_token_id, bare.eos_token_id = published.bos_token_id, published.eos_token_id
    for settings in (published, sampling, bare):
        with suppress(ValueError):
            settings.validate(strict=True)
            model.generation_config = settings
            return


def language_model_class(config: PretrainedConfig) -> Any:
    """Return the Auto class of this configuration's language model; None when there is none.

    Types like BERT have both classes; they are decoders only if their configuration says so.
    """
    if type(config) in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", False):
        return transformers.AutoModelForMaskedLM
    if type(config) in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING:
        return transformers.AutoModelForCausalLM
    return None


@torch.no_grad()
def train_padding_row(model: PreTrainedModel) -> None:
    """Let the padding row learn, from random values if it is zero: with pad = eos (Llama 3), eos would stay zero."""
    embedding = model.get_input_embeddings()
    if isinstance(embedding, nn.Embedding) and embedding.padding_idx is not None:
        row_D = embedding.weight[embedding.padding_idx]
        embedding.padding_idx = None
        if not row_D.any():
            row_D.normal_(std=getattr(model.config, "initializer_range", 0.02))


def pad_batch(samples: Sequence[Tensor], pad_id: int) -> dict[str, Tensor]:
    """Pad samples on the right, to inputs [N, L] of a transformers network."""
    masks = [torch.ones_like(tokens_T) for tokens_T in samples]
    padded = nn.utils.rnn.pad_sequence(list(samples), batch_first=True, padding_value=pad_id)
    return {"input_ids": padded, "attention_mask": nn.utils.rnn.pad_sequence(masks, batch_first=True)}


class PaddedBackbone(nn.Module):
    """A network that needs padded batches, called with packed tokens like any other."""

    def __init__(self, network: PreTrainedModel, equal_lengths: bool = False) -> None:
        super().__init__()
        self.network = network
        self.config = network.config
        self.equal_lengths = equal_lengths
        """Whether its batches contain only texts of equal length, because longer neighbours change its results."""

    def forward(self, input_ids: Tensor, position_ids: Tensor, layout: PackedLayout, use_cache: bool = False) -> Any:
        """Compute `last_hidden_state` [1, T, D] of tokens [1, T]; the network numbers the positions itself."""
        pad_id = getattr(self.config, "pad_token_id", None) or 0
        lengths = layout.bounds_S1.diff().tolist()
        samples = input_ids[0, : sum(lengths)].split(lengths)
        batches: dict[int, list[int]] = {}
        for index, length in enumerate(lengths):
            batches.setdefault(length if self.equal_lengths else 0, []).append(index)
        hidden: dict[int, Tensor] = {}
        for indices in batches.values():
            hidden_NLD = self.network(**pad_batch([samples[index] for index in indices], pad_id)).last_hidden_state
            for index, hidden_LD in zip(indices, hidden_NLD, strict=True):
                hidden[index] = hidden_LD[: lengths[index]]
        hidden_TD = torch.cat([hidden[index] for index in range(len(samples))])
        return SimpleNamespace(last_hidden_state=nn.functional.pad(hidden_TD, (0, 0, 0, layout.num_padding))[None])

    def get_input_embeddings(self) -> nn.Module:
        return self.network.get_input_embeddings()


def without_padding(backbone: nn.Module) -> Any:
    """Return the transformers network inside a `PaddedBackbone`, or the network itself."""
    return backbone.network if isinstance(backbone, PaddedBackbone) else backbone


def refuse_equal_lengths(backbone: nn.Module, name: str) -> None:
    """Raise `InputError` for a network that computes something else for a text beside a longer one. biphase groups
    texts by length for it; sentence-transformers pads them."""
    if isinstance(backbone, PaddedBackbone) and backbone.equal_lengths:
        why = f"{type(backbone.network).__name__} gives a text another embedding beside a longer one"
        raise InputError(f"{name}: {why}, and sentence-transformers pads texts to one length: take another network")


def load_backbone(source: str | Path) -> nn.Module:
    """Load a network without a head from a folder, fp32, no dropout, for `packed_hidden` with any layout.

    A decoder becomes bidirectional. Raises `InputError` for a folder without safetensors weights, an encoder-decoder,
    and a network that cannot be made bidirectional.
    """
    with suppress(FailedProofError):
        network: Any = load_headless(source, ATTENTION)
        if not looks_both_ways(network):  # set transformers' own switch, which its masks obey
            network.config.is_causal = False
        if not find_first_position(network, causal=False):
            return network
    # Load it again, because a network that ignores our attention may still choose its masks by the name of that
    # attention.
    padded = PaddedBackbone(load_headless(source, "eager"))
    if not looks_both_ways(padded.network):
        padded.config.is_causal = False
    try:
        check_padded(padded)
    except FailedProofError as error:
        raise InputError(f"{source} cannot be made a bidirectional encoder: {first_line(error)}") from None
    batches = "batches of equal lengths" if padded.equal_lengths else "padded batches"
    console.err.print(f"{source}: {type(padded.network).__name__} attends over {batches} only, which is slower")
    return padded


def load_headless(source: str | Path, attention: str) -> PreTrainedModel:
    """Load a network without a head and without a pooler, which belongs to next sentence prediction."""
    network: Any = load_weights(transformers.AutoModel, source, attention=attention)
    with told_as(f"{source} is a '{network.config.model_type}' model, which does not read tokens of text"):
        embedding = network.get_input_embeddings()
    if isinstance(embedding, nn.Embedding):
        embedding.padding_idx = None  # the padding row learns, from its present values
    if getattr(network, "pooler", None) is not None:
        network.pooler = nn.Identity()  # some networks call it unconditionally
    return network.eval()


def fresh_backbone(backbone: nn.Module) -> nn.Module:
    """Make a network of the same shape with random weights from torch's generator."""
    network = without_padding(backbone)
    fresh: Any = type(network)(copy.deepcopy(network.config))
    if getattr(fresh, "pooler", None) is not None:
        fresh.pooler = nn.Identity()
    train_padding_row(fresh)
    fresh.published_dropout = network.published_dropout
    if isinstance(backbone, PaddedBackbone):
        return PaddedBackbone(fresh, backbone.equal_lengths)
    fresh.first_position = network.first_position
    return fresh
