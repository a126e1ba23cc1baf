"""Flat packed tokens → hidden states and losses, through transformers' own networks; padded ones stand behind it too.

`packed_hidden` calls a network without its head, `PackedModel` a language model. A network whose attention does not go
through the function of `encoder.attention` runs on padded batches in `PaddedBackbone`, behind the same interface.
`count_flops` says what training costs.

Letters: T packed tokens, F samples with the padding sample, L longest sample, N targets, D width, V vocabulary.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from biphase.device import choose_dtype, explain_dtype
from biphase.encoder.attention import PackedLayout, beyond_varlen, explain_backend, lay_out
from biphase.encoder.loss import language_model_loss
from biphase.flops import FlopCount, longest_text, training_flops

COUNTED_TOKENS = 16
"""The length of the text that FLOPs are counted on."""


def packed_hidden(backbone: nn.Module, inputs_T: Tensor, positions_T: Tensor, layout: PackedLayout) -> Tensor:
    """Last hidden states [T, D] of a transformers base model. Positions count from 0 in every sample."""
    num_tokens = len(inputs_T)
    positions_T = positions_T + getattr(backbone, "first_position", 0)
    if layout.num_padding:
        # The padding is a sample of its own that nothing reads: any tokens will do, at any positions.
        inputs_T = torch.cat([inputs_T, inputs_T[-1:].expand(layout.num_padding)])
        positions_T = torch.cat([positions_T, positions_T[-1:].expand(layout.num_padding)])
    output = backbone(input_ids=inputs_T[None], position_ids=positions_T[None], layout=layout, use_cache=False)
    return output.last_hidden_state.squeeze(0)[:num_tokens]


def position_limit(network: PreTrainedModel) -> int | None:
    """The longest sample that the network has positions for, None for any length."""
    limit = longest_text(network.config)
    return limit - getattr(network.base_model, "first_position", 0) if limit else None


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
        """What `language_model_loss` gives: the sum of the losses in nats, the loss of each target [N], and whether
        each is predicted correctly [N] where no gradient is formed.

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
        return language_model_loss(hidden_ND, head.weight, head_bias(self.network), targets_N, softcap)


def roberta_transform(network: Any, hidden_ND: Tensor) -> Tensor:
    """Dense, activation and norm of RoBERTa's head and its kin's."""
    head = network.lm_head
    return head.layer_norm(nn.functional.gelu(head.dense(hidden_ND)))


def albert_transform(network: Any, hidden_ND: Tensor) -> Tensor:
    """Dense, activation and norm of ALBERT's head, to the width of its embedding."""
    head = network.predictions
    return head.LayerNorm(head.activation(head.dense(hidden_ND)))


def scaled(network: Any, hidden_ND: Tensor) -> Tensor:
    """Hidden states times the number by which logits are multiplied (Cohere, Falcon H1) or divided (Granite)."""
    config = network.config
    factor = getattr(config, "logit_scale", None) or getattr(config, "lm_head_multiplier", None) or 1.0
    divisor = getattr(config, "logits_scaling", None) or 1.0
    return hidden_ND * (factor * divisor if config.model_type == "hyperclovax" else factor / divisor)


HEAD_TRANSFORMS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "albert": albert_transform,
    **dict.fromkeys(
        ("bert", "ernie", "layoutlm", "nomic_bert"), lambda network, x: network.cls.predictions.transform(x)
    ),
    "distilbert": lambda network, x: network.vocab_layer_norm(network.activation(network.vocab_transform(x))),
    "electra": lambda network, x: network.generator_predictions(x),
    "modernbert": lambda network, x: network.head(x),
    "modernbert-decoder": lambda network, x: network.lm_head(x),
    **dict.fromkeys(("camembert", "data2vec-text", "esm", "gte", "jina_embeddings_v3", "roberta"), roberta_transform),
    **dict.fromkeys(("roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod"), roberta_transform),
}
"""What each model type puts between the last hidden state and the product with the output embeddings: a dense layer, an
activation and a norm; all others at most a factor. `proofs.check_head` proves that the right one was taken, or rightly
none."""


def head_input(network: Any, hidden_ND: Tensor) -> Tensor:
    """What is multiplied with the output embeddings: the hidden states, transformed where the network's head does."""
    return HEAD_TRANSFORMS.get(network.config.model_type, scaled)(network, hidden_ND)


def head_bias(network: Any) -> Tensor | None:
    """What is added to the logits: ESM keeps it beside the output embeddings."""
    bias = network.get_output_embeddings().bias
    return network.lm_head.bias if network.config.model_type == "esm" else bias


LEFT_FACTOR = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1, "_grouped_mm": 0, "grouped_mm_fallback": 0}
"""PyTorch's and transformers' products, and at which place of the arguments their left factor stands."""


class ProductCounter(TorchDispatchMode):
    """Counts the multiplications with weights, and those of attention, while a network runs."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.weights = {weight.untyped_storage()._cdata for weight in network.parameters()}
        self.with_weights = 0
        self.attention_width = 0.0
        """The widths of all heads of all layers; where keys and values differ, the mean of the two."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        if name == "bucket_attention":
            q_THK, _, v_TGK = args[:3]
            self.attention_width += q_THK.shape[1] * (q_THK.shape[2] + v_TGK.shape[2]) / 2
        elif name in LEFT_FACTOR:
            left, right = args[LEFT_FACTOR[name] :][:2]
            if self.weights & {left.untyped_storage()._cdata, right.untyped_storage()._cdata}:
                self.with_weights += left.numel() * right.shape[-1]
        return result


@torch.no_grad()
def count_flops(model: PreTrainedModel) -> FlopCount:
    """The FLOPs of training a language model, from the products that it forms when it reads a short text.

    Layers that share weights, experts and unequal heads count as often as they compute. Where the number of experts
    differs by token (LongCat's that do nothing), it is a guess by these few tokens.
    """
    device, training = model.device, [module for module in model.modules() if module.training]
    num_tokens = min(COUNTED_TOKENS, position_limit(model) or COUNTED_TOKENS)
    positions_T = torch.arange(num_tokens, device=device)
    layout = lay_out(np.array([0, num_tokens]), causal=False, device=device)
    with ProductCounter(model) as counted:
        packed_hidden(model.eval().base_model, positions_T * 7 % model.config.vocab_size, positions_T, layout)
    for module in training:
        module.training = True
    assert counted.with_weights and counted.attention_width, "products that are formed otherwise than is known here"
    own = {id(weight) for weight in model.base_model.parameters()}
    head = {id(p): p.numel() for p in model.parameters() if p.ndim == 2 and id(p) not in own}
    output = model.get_output_embeddings().weight
    head[id(output)] = output.numel()  # tied or not
    return training_flops(
        block_weights=counted.with_weights / num_tokens,
        attention_width=counted.attention_width,
        head_weights=sum(head.values()),
    )


def layer_configs(config: Any) -> list[Any]:
    """The configuration of each layer; Gemma 4 has heads of one width in one layer, of another in the next."""
    if getattr(config, "is_heterogeneous", False):
        return list(config.per_layer_config)
    return [config] * config.num_hidden_layers


def head_widths(layer: Any) -> tuple[int, int]:
    """The width of a layer's queries and keys, and that of its values, which differ in DeepSeek's kind."""
    if getattr(layer, "kv_lora_rank", None):
        return layer.qk_nope_head_dim + layer.qk_rope_head_dim, layer.v_head_dim
    width = getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads
    return width, width


def explain_computing(precision: str, device: torch.device, network: nn.Module) -> str:
    """The device, the type of the arithmetic and the kernel of attention of a network without its head, and why."""
    attention = "its own, on padded batches"
    if not isinstance(network, PaddedBackbone):
        config: Any = network.config
        has_sinks = any(name.rpartition(".")[2].startswith("sink") for name, _ in network.named_parameters())
        softcap = getattr(config, "attn_logit_softcapping", None)
        beyond = [beyond_varlen(softcap, has_sinks, head_widths(layer)[0]) for layer in layer_configs(config)]
        attention = explain_backend(device, choose_dtype(precision, device), max(beyond))
    return f"{device}, {explain_dtype(precision, device)} · attention: {attention}"


class PaddedBackbone(nn.Module):
    """A network that knows only padded batches, called with packed tokens like any other."""

    def __init__(self, network: PreTrainedModel, equal_lengths: bool = False) -> None:
        super().__init__()
        self.network = network
        self.config = network.config
        self.equal_lengths = equal_lengths
        """Whether it is given texts of equal length only, because it computes something else beside longer ones."""

    def forward(self, input_ids: Tensor, position_ids: Tensor, layout: PackedLayout, use_cache: bool = False) -> Any:
        """`last_hidden_state` [1, T, D] of tokens [1, T]; the network numbers the positions itself."""
        lengths_S = layout.bounds_S1.diff()
        samples = list(input_ids[0, : int(layout.bounds_S1[-1])].split(lengths_S.tolist()))
        groups = [(lengths_S == length).nonzero()[:, 0] for length in lengths_S.unique()]
        if not self.equal_lengths:
            groups = [torch.arange(len(samples))]
        hidden: list[Tensor] = [input_ids] * len(samples)
        for group in groups:
            numbers = group.tolist()
            for number, hidden_LD in zip(numbers, self.read_padded([samples[n] for n in numbers]), strict=True):
                hidden[number] = hidden_LD
        hidden_TD = torch.cat(hidden)
        return SimpleNamespace(last_hidden_state=nn.functional.pad(hidden_TD, (0, 0, 0, layout.num_padding))[None])

    def read_padded(self, samples: list[Tensor]) -> list[Tensor]:
        """The hidden states of each sample, read in one padded batch."""
        pad_id = getattr(self.config, "pad_token_id", None) or 0
        tokens_NL = nn.utils.rnn.pad_sequence(samples, batch_first=True, padding_value=pad_id)
        lengths_N = torch.tensor([len(sample) for sample in samples], device=tokens_NL.device)
        is_token_NL = torch.arange(tokens_NL.shape[1], device=tokens_NL.device) < lengths_N[:, None]
        output = self.network(input_ids=tokens_NL, attention_mask=is_token_NL.long())
        return [row[: len(sample)] for row, sample in zip(output.last_hidden_state, samples, strict=True)]

    def get_input_embeddings(self) -> nn.Module:
        return self.network.get_input_embeddings()
