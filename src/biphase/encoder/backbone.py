"""The network: transformers' own classes, called on flat packed tokens.

A preset is a `EuroBertConfig`; any decoder or encoder that transformers has a causal or masked language model for can
take its place. Here a model is made or loaded, checked, wrapped to compute losses at targets only, and counted.

Letters: T tokens, N targets, D width, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    EuroBertConfig,
    EuroBertForMaskedLM,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING

from biphase.encoder.attention import ATTENTION, Backend, NoLayoutError, PackedLayout, lay_out
from biphase.encoder.head import language_model_loss
from biphase.encoder.presets import PRESETS
from biphase.errors import InputError, first_line, nearest

WINDOW_PROOF_TOKENS = 300
"""Longest sample of the proof of packing: enough to see the local attention of ModernBERT (128)."""

ALIEN_ERRORS = (AttributeError, IndexError, KeyError, RuntimeError, TypeError)
"""Of a network that is not made to be called so: it knows no `position_ids`, not so many, no mask that is None ..."""


@dataclass(frozen=True)
class TokenIds:
    """The ids that a network's configuration carries."""

    vocab_size: int
    mask: int
    eos: int
    pad: int
    bos: int | None


def make_model(preset: str, architecture: dict[str, Any], tokens: TokenIds, max_len: int, seed: int) -> PreTrainedModel:
    """A network of a preset's shape with random weights: normal with standard deviation 0.02, norms 1."""
    if preset not in PRESETS:
        raise InputError(f"unknown preset '{preset}'{nearest(preset, PRESETS)}")
    known = EuroBertConfig().to_dict()
    for key in architecture:
        if key not in known:
            raise InputError(f"init.architecture: unknown key '{key}'{nearest(key, known)}")
        if key.endswith("token_id"):
            raise InputError(f"init.architecture: '{key}' follows from the tokenizer of the shards; leave it out")
    if architecture.get("vocab_size", tokens.vocab_size) < tokens.vocab_size:
        raise InputError(f"init.architecture: vocab_size is below the {tokens.vocab_size:,} tokens of the shards")
    settings = {
        "vocab_size": tokens.vocab_size,
        "max_position_embeddings": max_len,
        "rms_norm_eps": 1e-5,
        "initializer_range": 0.02,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "tie_word_embeddings": False,
        "mask_token_id": tokens.mask,
        "eos_token_id": tokens.eos,
        "pad_token_id": tokens.pad,
        "bos_token_id": tokens.bos,
        **PRESETS[preset],
        **architecture,
    }
    width, heads, kv_heads = (settings[key] for key in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    if width % heads or heads % kv_heads:
        raise InputError(
            f"init.architecture: {heads} attention heads and {kv_heads} key-value heads do not divide evenly into "
            f"hidden_size {width}"
        )
    try:
        config = EuroBertConfig(**settings)
    except StrictDataclassError as error:
        raise InputError(f"init.architecture: {' '.join(str(error).split())}") from None
    torch.manual_seed(seed)
    config._attn_implementation = ATTENTION
    config.use_cache = False  # as in every network that is loaded, so that branches and fresh runs save the same
    model = EuroBertForMaskedLM(config)
    train_padding_row(model)
    return model


def load_model(
    source: str | Path, revision: str | None = None, *, vocab_size: int | None = None, seed: int = 0
) -> PreTrainedModel:
    """A language model from a folder or the hub, in fp32, attending through `biphase`, without dropout.

    Never runs a repository's own code and never unpickles weights. With `vocab_size`, the embeddings are resized to
    hold that many tokens (new rows are drawn with `seed` from the distribution of the old ones).

    Raises:
        InputError: nothing to load, an encoder-decoder, or a network whose attention does not go through ours.
    """
    config = load_model_config(source, revision)
    refuse_encoder_decoder(config, source)
    kind = language_model_class(config)
    if kind is None:
        raise InputError(
            f"{source} is a '{config.model_type}' model, for which transformers has no language model head"
        )
    model = load_weights(kind, source, revision, config)
    if model.get_output_embeddings() is None:
        raise InputError(f"{source}: {type(model).__name__} has no output embeddings")
    causal = kind is AutoModelForCausalLM and getattr(config, "is_causal", True)
    if not find_first_position(model.base_model, causal):
        raise InputError(
            f"{source}: {type(model).__name__} computes something else on packed samples than on each alone, so it "
            "cannot be trained here; take a model whose layers all attend through transformers' AttentionInterface"
        )
    embedding: Any = model.get_input_embeddings()
    old_size = embedding.weight.shape[0]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if vocab_size is not None and vocab_size > old_size:
            model.resize_token_embeddings(vocab_size, mean_resizing=True)
        train_padding_row(model)
    return model


def refuse_encoder_decoder(config: PretrainedConfig, source: str | Path) -> None:
    if getattr(config, "is_encoder_decoder", False):
        raise InputError(f"{source} is an encoder-decoder ({config.model_type}), which is not supported")


def load_model_config(source: str | Path, revision: str | None = None) -> PretrainedConfig:
    if str(source).startswith((".", "/")) and not Path(source).is_dir():
        raise InputError(f"{source} is not a folder")
    try:
        config = AutoConfig.from_pretrained(str(source), revision=revision, trust_remote_code=False)
    except (OSError, ValueError, StrictDataclassError) as error:
        raise InputError(f"cannot read a model configuration from {source}: {first_line(error)}") from None
    return config.get_text_config()


def load_weights(
    kind: Any, source: str | Path, revision: str | None, config: PretrainedConfig, attention: str = ATTENTION
) -> PreTrainedModel:
    """`kind.from_pretrained` in fp32 from safetensors, every weight accounted for."""
    for key, value in config.to_dict().items():
        if ("dropout" in key or key.endswith("_pdrop")) and isinstance(value, float):
            setattr(config, key, 0.0)  # pretraining uses none (Table 1)
    config.use_cache = False
    try:
        model, report = kind.from_pretrained(
            str(source),
            revision=revision,
            config=config,
            dtype=torch.float32,
            attn_implementation=attention,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except KeyError as error:
        if error.args != (attention,):
            raise
        raise InputError(
            f"{source}: '{config.model_type}' chooses among attention classes of its own and cannot be packed; take a "
            "model that attends through transformers' AttentionInterface"
        ) from None
    except (OSError, ValueError, SafetensorError) as error:
        raise InputError(f"cannot load weights from {source}: {first_line(error)}") from None
    missing = sorted(key for key in report["missing_keys"] if not key.startswith("pooler."))
    if missing:
        raise InputError(f"{source} lacks {len(missing)} weights of {type(model).__name__}, such as '{missing[0]}'")
    return model


def language_model_class(config: PretrainedConfig) -> Any:
    """The Auto class that holds this configuration's language model, None when there is none.

    BERT's kin have both; they are decoders only where they say so.
    """
    if type(config) in MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", False):
        return AutoModelForMaskedLM
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForCausalLM
    return None


def train_padding_row(model: PreTrainedModel) -> None:
    """Let the padding row of the embedding learn: where pad = eos (Llama 3), eos would stay a zero vector for ever."""
    embedding = model.get_input_embeddings()
    if not isinstance(embedding, nn.Embedding) or embedding.padding_idx is None:
        return
    padding_idx = embedding.padding_idx
    embedding.padding_idx = None
    with torch.no_grad():
        if not embedding.weight[padding_idx].any():
            embedding.weight[padding_idx].normal_(std=getattr(model.config, "initializer_range", 0.02))


def roberta_transform(network: Any, hidden_ND: Tensor) -> Tensor:
    head = network.lm_head
    return head.layer_norm(nn.functional.gelu(head.dense(hidden_ND)))


def distilbert_transform(network: Any, hidden_ND: Tensor) -> Tensor:
    return network.vocab_layer_norm(network.activation(network.vocab_transform(hidden_ND)))


HEAD_TRANSFORMS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "bert": lambda network, hidden_ND: network.cls.predictions.transform(hidden_ND),
    "camembert": roberta_transform,
    "distilbert": distilbert_transform,
    "electra": lambda network, hidden_ND: network.generator_predictions(hidden_ND),
    "modernbert": lambda network, hidden_ND: network.head(hidden_ND),
    "roberta": roberta_transform,
    "xlm-roberta": roberta_transform,
}
"""By model type: dense, activation and norm between the last hidden state and the product with the output embeddings.
`check_head` proves that the right one was taken, or rightly none."""


def head_input(network: Any, hidden_ND: Tensor) -> Tensor:
    """What is multiplied with the output embeddings: the hidden states, transformed where the network's head does."""
    transform = HEAD_TRANSFORMS.get(network.config.model_type)
    return hidden_ND if transform is None else transform(network, hidden_ND)


class PackedModel(nn.Module):
    """A transformers language model whose forward pass is a packed batch's loss, for DDP and FSDP to wrap."""

    def __init__(self, network: PreTrainedModel) -> None:
        super().__init__()
        self.network = network

    def forward(
        self,
        inputs_T: Tensor,
        positions_T: Tensor,
        layout: PackedLayout,
        target_positions_N: Tensor | None = None,
        targets_N: Tensor | None = None,
    ) -> Any:
        """As `language_model_loss`: sum of the losses in nats, loss of each target [N], which are predicted best [N].

        Without targets: the last hidden states [T, D].
        """
        hidden_TD = packed_hidden(self.network.base_model, inputs_T, positions_T, layout)
        if target_positions_N is None or targets_N is None:
            return hidden_TD
        hidden_ND = head_input(self.network, hidden_TD.index_select(0, target_positions_N))
        if torch.is_autocast_enabled(hidden_ND.device.type):  # the last norm leaves fp32
            hidden_ND = hidden_ND.to(torch.get_autocast_dtype(hidden_ND.device.type))
        head = self.network.get_output_embeddings()
        softcap = getattr(self.network.config, "final_logit_softcapping", None)
        return language_model_loss(hidden_ND, head.weight, head.bias, targets_N, softcap)


def packed_hidden(backbone: nn.Module, inputs_T: Tensor, positions_T: Tensor, layout: PackedLayout) -> Tensor:
    """Last hidden states [T, D] of a transformers base model. Positions count from 0 in every sample."""
    num_tokens = len(inputs_T)
    positions_T = positions_T + getattr(backbone, "first_position", 0)
    if layout.num_filler:  # any tokens will do, at any positions
        inputs_T, positions_T = (
            torch.cat([x_T, x_T[-1:].expand(layout.num_filler)]) for x_T in (inputs_T, positions_T)
        )
    output = backbone(input_ids=inputs_T[None], position_ids=positions_T[None], layout=layout, use_cache=False)
    return output.last_hidden_state[0, :num_tokens]


def find_first_position(network: Any, causal: bool) -> bool:
    """Find the number at which the network's own positions begin, so that packed samples come out as each alone.

    Sets `network.first_position`, which `packed_hidden` adds. False when packing gives something else either way: the
    attention, a convolution or a recurrence goes past the function of `encoder.attention`.
    """
    pad_id = getattr(network.config, "pad_token_id", None) or 0
    for first_position in (0, pad_id + 1):  # RoBERTa counts from behind its padding index
        network.first_position = first_position
        if packs_like_itself(network, causal):
            try:
                check_causality(network, causal, network.config.vocab_size)
            except AssertionError:  # samples see each other, by less than rounding hides
                return False
            return True
    return False


@torch.no_grad()
def packs_like_itself(network: PreTrainedModel, causal: bool) -> bool:
    """Whether two packed samples come out as when the network reads each alone, with its own attention."""
    config = network.config
    limit = position_limit(network) or WINDOW_PROOF_TOKENS
    if limit < 1:
        return False
    window = getattr(config, "sliding_window", None) or getattr(config, "local_attention", None) or 0
    sees_window = 2 * window + 3 if 2 * window + 3 <= WINDOW_PROOF_TOKENS else 0
    lengths = [min(8, limit), min(limit, max(16, sees_window))]
    tokens_T = torch.arange(sum(lengths)) * 7 % config.vocab_size
    pad_id = getattr(config, "pad_token_id", None)
    if pad_id is not None:  # some networks number the positions by what is padding
        tokens_T[tokens_T == pad_id] = (pad_id + 1) % config.vocab_size
    positions_T = torch.cat([torch.arange(length) for length in lengths])
    layout = lay_out(np.array([0, lengths[0], sum(lengths)]), causal=causal)
    try:
        packed_TD = packed_hidden(network, tokens_T, positions_T, layout)
        network.set_attn_implementation("eager")
        own_TD = torch.cat([network(input_ids=part[None]).last_hidden_state[0] for part in tokens_T.split(lengths)])
    except (NoLayoutError, *ALIEN_ERRORS):
        return False
    finally:
        network.set_attn_implementation(ATTENTION)
    return bool(torch.allclose(packed_TD, own_TD, rtol=1e-3, atol=1e-3 * float(own_TD.abs().mean())))


def position_limit(network: PreTrainedModel) -> int | None:
    """The longest sample that the network has positions for, None for any length."""
    limit = getattr(network.config, "max_position_embeddings", None)
    return limit - getattr(network.base_model, "first_position", 0) if limit else None


def check_causality(backbone: nn.Module, causal: bool, vocab_size: int, device: torch.device | str = "cpu") -> None:
    """`probe_causality` of a transformers base model."""
    was_training = backbone.training
    backbone.eval()
    probe_causality(partial(packed_hidden, backbone), causal, vocab_size, device, type(backbone).__name__)
    backbone.train(was_training)


@torch.no_grad()
def probe_causality(
    hidden_of: Callable[[Tensor, Tensor, PackedLayout], Tensor],
    causal: bool,
    vocab_size: int,
    device: torch.device | str,
    name: str,
    backend: Backend = "buckets",
) -> None:
    """Prove that the network looks where the objective says: change a later token, watch an earlier output.

    Also proves that two samples of one packed batch do not see each other. `hidden_of` maps (tokens, positions, layout)
    to hidden states [T, D]. Raises `AssertionError` when violated: no number that follows could be trusted.
    """
    layout = lay_out(np.array([0, 8, 16]), causal=causal, device=device, backend=backend)
    tokens_T = torch.arange(16, device=device) * 7 % vocab_size
    positions_T = torch.arange(16, device=device) % 8
    changed_T = tokens_T.clone()
    changed_T[6] = (changed_T[6] + 1) % vocab_size
    moved_TD = hidden_of(changed_T, positions_T, layout) - hidden_of(tokens_T, positions_T, layout)
    moved_T = moved_TD.abs().amax(-1) > 0
    assert not moved_T[8:].any(), f"{name}: samples of a packed batch see each other"
    assert moved_T[6:8].all(), f"{name}: a changed token does not reach the tokens after it"
    if causal:
        assert not moved_T[:6].any(), f"{name}: a causal objective sees later tokens"
    else:
        assert moved_T[:6].any(), f"{name}: a bidirectional objective does not see later tokens"


@torch.no_grad()
def check_head(model: PreTrainedModel, device: torch.device | str = "cpu") -> None:
    """Prove that our loss scores hidden states as the model's own head does (scaled or shifted logits would differ)."""
    size = model.config.vocab_size
    tokens_T = torch.arange(8, device=device) * 5 % size
    targets_T = tokens_T.roll(-1)
    positions_T = torch.arange(8, device=device)
    layout = lay_out(np.array([0, 8]), causal=True, device=device)
    position_ids = positions_T[None] + getattr(model.base_model, "first_position", 0)
    try:
        ours = PackedModel(model).eval()(tokens_T, positions_T, layout, positions_T, targets_T)[1]
        output = model(input_ids=tokens_T[None], position_ids=position_ids, layout=layout, use_cache=False)
        theirs = nn.functional.cross_entropy(output.logits[0].float(), targets_T, reduction="none")
        agrees = torch.allclose(ours, theirs, rtol=1e-3, atol=1e-3)
    except ALIEN_ERRORS:  # another width, or a bias that does not grow with the embeddings
        agrees = False
    if not agrees:
        raise InputError(f"{type(model).__name__} transforms its logits in a way that packed training does not support")


@dataclass(frozen=True)
class FlopCount:
    """Floating-point operations of training (forward and backward: 3 · 2 · multiply-adds), without recomputation."""

    per_token: float
    """6 × the weights of the blocks."""
    per_token_and_key: float
    """12 · layers · width, for each key a query meets: the attended length of its sample, half of it when causal."""
    per_target: float
    """6 × the weights of the head, D · V and its transform, where there is a target."""

    def batch(self, lengths_S: np.ndarray, num_targets: int, causal: bool) -> float:
        pairs = float((lengths_S.astype(np.float64) ** 2).sum()) / (2 if causal else 1)
        return self.per_token * lengths_S.sum() + self.per_token_and_key * pairs + self.per_target * num_targets


def count_flops(model: PreTrainedModel) -> FlopCount:
    config = model.config
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    blocks = {id(p): p.numel() for p in model.base_model.parameters() if p.ndim == 2 and id(p) not in embeddings}
    head = {id(p): p.numel() for p in model.parameters() if p.ndim == 2 and id(p) not in embeddings | blocks.keys()}
    output = model.get_output_embeddings().weight
    head[id(output)] = output.numel()  # tied or not
    return FlopCount(
        per_token=6.0 * sum(blocks.values()),
        per_token_and_key=12.0 * config.num_hidden_layers * heads * head_dim,
        per_target=6.0 * sum(head.values()),
    )
