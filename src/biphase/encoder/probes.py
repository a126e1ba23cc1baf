"""What a proof reads: tokens whose embeddings differ, in texts of a few lengths, and a network with narrow windows.

A text of a few tokens must show whatever the network does; where it cannot, a proof would say nothing.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from biphase.encoder.packed import layer_configs, position_limit
from biphase.flops import count_positions, longest_text

NARROW = {
    **dict.fromkeys(("sliding_window", "sliding_window_size", "window_size", "keep_window_size"), 8),
    **dict.fromkeys(("attention_window", "attention_window_size", "attention_chunk_size"), 8),
    **dict.fromkeys(("index_topk", "indexer_budget"), 8),
    "local_attention": 16,
    "index_topk_blocks": 1,
    "index_block_size": 4,
}
"""What limits how far a token sees in a configuration, and what it is in a proof: a short text shows the limit."""

WIDE = 512
"""Windows of this size limit nothing in a proof."""

SPREAD = 512
"""A proof chooses its tokens from so many, spread over the vocabulary: those whose embeddings lie farthest apart."""

PROOF_LENGTHS = (9, 35, 2)
"""The samples of a proof of packing: one is longer than what two narrow windows show of it to each side."""

PROBE_TOKENS = 19
"""Two samples of 9 and 7 tokens, and three tokens that one of them is changed for."""


@torch.no_grad()
def telling_tokens(
    network: Any, num_tokens: int, known: Tensor | None = None, rows_of: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """Tokens (of those that are `known`) whose embeddings, or whose rows by `rows_of`, lie far apart, the first ones
    farthest; neither padding nor a mask is among them.

    Embeddings of tokens that training never met, such as bytes in a vocabulary of SentencePiece, are often all alike:
    to change one for another changes nothing.
    """
    config, rows_of = network.config, rows_of or network.get_input_embeddings()
    known = torch.arange(config.vocab_size) if known is None else known
    # Some networks number the positions by what is padding, or scale by what is masked.
    roles = [getattr(config, f"{role}_token_id", None) for role in ("pad", "mask")]
    known = known[~torch.isin(known, torch.tensor([id for id in roles if id is not None]))]
    known = known[torch.linspace(0, len(known) - 1, min(SPREAD, len(known))).long()]
    rows: Any = rows_of(known.to(network.device))
    rows = (rows[0] if isinstance(rows, tuple) else rows).float()  # I-BERT's come with a scale
    distances = torch.cdist(rows, rows)
    chosen, nearest = [0], distances[0]
    while len(chosen) < min(num_tokens, len(known)):
        chosen.append(int(nearest.argmax()))
        nearest = torch.minimum(nearest, distances[chosen[-1]])
    return known[chosen].repeat(-(-num_tokens // len(chosen)))[:num_tokens]


def proof_samples(network: Any) -> tuple[Tensor, list[int]]:
    """The tokens of a proof of packing, and the lengths of its samples; none where no position is left."""
    longest = max(PROOF_LENGTHS)
    limit = min(position_limit(network) or longest, count_positions(network.config), longest)
    if limit < 1:
        return torch.zeros(0), []
    lengths = [min(length, limit) for length in PROOF_LENGTHS]
    tokens_T = telling_tokens(network, sum(lengths))
    mask_id: Any = getattr(network.config, "mask_token_id", None)
    if mask_id in range(network.config.vocab_size) and mask_id != getattr(network.config, "pad_token_id", None):
        tokens_T[1 : lengths[0] // 2] = mask_id  # ESM scales by the share of masks: here it differs by sample
    return tokens_T, lengths


def with_windows(network: Any, *, narrow: bool = True) -> Any:
    """The same network, of the very same weights, in which a token sees few others where a window limits it: what a
    window does is then seen in a short text. With `narrow` off, the windows are wider than a proof's texts.

    Where nothing limits it, or no text is as long as the window, the network itself.
    """

    def change(key: str, value: Any) -> Any:
        if isinstance(value, dict):
            return {name: change(name, inner) for name, inner in value.items()}
        if key not in NARROW or type(value) is not int or not 0 < value < limit:
            return value
        return min(value, NARROW[key]) if narrow else max(value, WIDE)

    settings, limit = network.config.to_dict(), longest_text(network.config) or 2**31
    changed = change("", settings)
    if changed == settings:
        return network
    config = type(network.config).from_dict(changed, name_or_path=network.name_or_path)
    config._attn_implementation = network.config._attn_implementation
    with torch.device("meta"):
        twin = type(network)(config).eval()
    for name, module in network.named_modules():
        part = twin.get_submodule(name)
        if type(part) is not type(module):  # a pooler that was taken out
            twin.set_submodule(name, module)
        part._parameters, part._buffers = module._parameters, module._buffers
    return twin


def reach(network: Any) -> int:
    """How far a token sees at least, up to the few tokens of a proof."""
    return min(7, window_of(network.config) or 7)


def window_of(config: Any) -> int:
    """How far the narrowest layer sees to one side, 0 where nothing limits it."""
    windows = []
    for layer in layer_configs(config):
        local = getattr(layer, "local_attention", None) or getattr(layer, "attention_window", None)
        windows.append(getattr(layer, "sliding_window", None) or (local // 2 if isinstance(local, int) else 0))
    return min((window for window in windows if window > 0), default=0)
