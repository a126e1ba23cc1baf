"""Proofs about a network: packing changes nothing, it attends in the right direction, our loss equals its head's.

A proof compares forward passes on a few tokens with each other, or with transformers' own results for each text alone.
The tokens are chosen so that a short text reveals what the network does. Differences are in units of the hidden states'
mean size: in a mixture of experts a changed token regroups products, so that even states that must stay the same move
by rounding. If a foreign network raises an error because it does not support such a call, the proof fails; errors
inside biphase and a lack of memory pass through.

Letters: T tokens, D width.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from biphase.console import told_if_slow
from biphase.encoder.attention import PackedLayout, lay_out, layer_configs
from biphase.encoder.packed import PackedModel, packed_hidden
from biphase.errors import InputError, first_line, is_raised_here, lacks_memory
from biphase.hub import AFTER_PADDING, longest_text

NARROW = {
    **dict.fromkeys(("sliding_window", "sliding_window_size", "window_size", "keep_window_size"), 8),
    **dict.fromkeys(("attention_window", "attention_window_size", "attention_chunk_size"), 8),
    **dict.fromkeys(("index_topk", "indexer_budget"), 8),
    "local_attention": 16,
    "index_topk_blocks": 1,
    "index_block_size": 4,
}
"""The settings that limit how far a token sees, with values for a proof that are small enough to affect a short
text."""

WIDE = 512
"""A window that limits nothing in a proof."""

SPREAD = 512
"""The number of tokens, spread over the vocabulary, from which a proof chooses those with the most distant
embeddings."""

PROOF_LENGTHS = (9, 35, 2)
"""The lengths of the samples in a proof of packing: one is longer than two narrow windows reach to each side."""

PROBE_TOKENS = 19
"""The tokens of a probe: two samples of 9 and 7 tokens, and three tokens to replace one of them."""


@torch.no_grad()
def telling_tokens(
    network: Any, num_tokens: int, candidates: Tensor | None = None, rows_of: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """Choose tokens (among `candidates`) with distant embeddings, or distant rows by `rows_of`; the most distant first.

    Excludes padding and mask tokens. Tokens that training never met, such as bytes in SentencePiece vocabularies, often
    have equal embeddings, so that swapping them would change nothing.
    """
    config, rows_of = network.config, rows_of or network.get_input_embeddings()
    candidates = torch.arange(config.vocab_size) if candidates is None else candidates
    # Some networks number positions by padding tokens, or scale by mask tokens.
    roles = [getattr(config, f"{role}_token_id", None) for role in ("pad", "mask")]
    candidates = candidates[~torch.isin(candidates, torch.tensor([id for id in roles if id is not None]))]
    candidates = candidates[torch.linspace(0, len(candidates) - 1, min(SPREAD, len(candidates))).long()]
    rows: Any = rows_of(candidates.to(network.device))
    rows = (rows[0] if isinstance(rows, tuple) else rows).float()  # I-BERT's come with a scale
    distances = torch.cdist(rows, rows)
    chosen, nearest = [0], distances[0]
    while len(chosen) < min(num_tokens, len(candidates)):
        chosen.append(int(nearest.argmax()))
        nearest = torch.minimum(nearest, distances[chosen[-1]])
    return candidates[chosen].repeat(-(-num_tokens // len(chosen)))[:num_tokens]


def proof_samples(network: Any, longest: int) -> tuple[Tensor, list[int]]:
    """Return the tokens of a packing proof and the lengths of its samples; none if the network has no positions.

    `longest` is the longest text that the network reads.
    """
    first_position = getattr(network, "first_position", 0)
    if network.config.model_type in AFTER_PADDING:  # its own positions begin there, whichever offset we try
        first_position = max(first_position, (network.config.pad_token_id or 0) + 1)
    limit = min(longest - first_position, max(PROOF_LENGTHS))
    if limit < 1:
        return torch.zeros(0), []
    lengths = [min(length, limit) for length in PROOF_LENGTHS]
    tokens_T = telling_tokens(network, sum(lengths))
    mask_id: Any = getattr(network.config, "mask_token_id", None)
    if mask_id in range(network.config.vocab_size) and mask_id != getattr(network.config, "pad_token_id", None):
        tokens_T[1 : lengths[0] // 2] = mask_id  # ESM scales by the share of masks, which differs by sample here
    return tokens_T, lengths


def with_windows(network: Any, longest: int, *, narrow: bool = True) -> Any:
    """Copy a network, with shared weights, and with windows narrow enough to affect a short text or, with `narrow` off,
    wider than a proof's texts.

    Returns the network itself if it has no window below the `longest` text that it reads.
    """

    def change(key: str, value: Any) -> Any:
        if isinstance(value, dict):
            return {name: change(name, inner) for name, inner in value.items()}
        if key not in NARROW or type(value) is not int or not 0 < value < longest:
            return value
        return min(value, NARROW[key]) if narrow else max(value, WIDE)

    settings = network.config.to_dict()
    changed = change("", settings)
    if changed == settings:
        return network
    config = type(network.config).from_dict(changed, name_or_path=network.name_or_path)
    config._attn_implementation = network.config._attn_implementation
    with torch.device("meta"):
        twin = type(network)(config).eval()
    for name, module in network.named_modules():
        copied = twin.get_submodule(name)
        if type(copied) is not type(module):  # a removed pooler
            twin.set_submodule(name, module)
        copied._parameters, copied._buffers = module._parameters, module._buffers
    return twin


def reach(network: Any) -> int:
    """Return the distance that every token sees, at most 7, which is the farthest that a proof checks."""
    return min(7, window_of(network.config) or 7)


def window_of(config: Any) -> int:
    """Return the distance that the narrowest layer sees to one side; 0 for no limit."""
    windows = []
    for layer in layer_configs(config):
        local = getattr(layer, "local_attention", None) or getattr(layer, "attention_window", None)
        windows.append(getattr(layer, "sliding_window", None) or (local // 2 if isinstance(local, int) else 0))
    return min((window for window in windows if window > 0), default=0)


AGREEMENT = 1e-3
"""The largest difference between two computations of the same hidden states, relative to each and to their mean
size."""

MOVED_BY_ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}
"""The largest move of a hidden state by rounding alone, in units of the states' mean size."""


class FailedProofError(InputError):
    """A failed proof: a network computes something else than it should, so that none of its numbers can be trusted."""


@contextmanager
def foreign_errors_fail(failure: str) -> Iterator[None]:
    """Turn an error of a network that does not support a call into a failed proof: `failure`: ERROR.

    Such a network takes no `position_ids`, or has too few positions, or needs a mask. Bugs of ours, which have the same
    types, and a lack of memory pass through.
    """
    try:
        yield
    except (AssertionError, AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        if lacks_memory(error) or is_raised_here(error):
            raise
        raise FailedProofError(f"{failure}: {type(error).__name__}: {first_line(error)}") from None


def agree(computed: Tensor, expected: Tensor) -> bool:
    """Return whether two computations agree up to rounding."""
    if computed.shape != expected.shape:
        return False
    return torch.allclose(computed, expected, rtol=AGREEMENT, atol=AGREEMENT * float(expected.abs().mean()))


def find_first_position(network: Any, causal: bool) -> str:
    """Find the network's first position, with which packed samples give the same results as each alone.

    Sets `network.first_position`, which `packed_hidden` adds. Returns "", or the reason why packing always fails.
    """
    pad_id = getattr(network.config, "pad_token_id", None) or 0
    name = network.name_or_path or type(network).__name__
    reasons, longest = [], longest_text(network.config) or 2**31
    with told_if_slow(f"{name}: proving on a few texts that packing changes nothing"):
        with foreign_errors_fail(f"{name}: transformers makes no copy of it with other windows"):
            narrow, wide = with_windows(network, longest), with_windows(network, longest, narrow=False)
        for first_position in (0, pad_id + 1):  # RoBERTa counts from after its padding index
            network.first_position = narrow.first_position = wide.first_position = first_position
            reason = why_not_packed(narrow, causal, longest)
            if not reason:
                return ""
            if narrow is not wide and not why_not_packed(wide, causal, longest):
                return f"{reason}; with windows wider than a text it passes"
            reasons.append(reason)
    return reasons[0]


@torch.no_grad()
def why_not_packed(network: PreTrainedModel, causal: bool, longest: int) -> str:
    """Return the reason why packed samples give other results than each alone, or "".

    The samples have unequal lengths; one is longer than a narrow window.
    """
    try:
        with foreign_errors_fail("it cannot be called on packed tokens"):
            tokens_T, lengths = proof_samples(network, longest)
            if not lengths:
                return "it has no positions"
            positions_T = torch.cat([torch.arange(length) for length in lengths])
            layout = lay_out(np.cumsum([0, *lengths]), causal=causal)
            hidden_of = partial(packed_hidden, network)
            try:
                packed_TD = hidden_of(tokens_T, positions_T, layout)
            except InputError:  # from our attention
                return "it does not hand the layout of packed samples on to its attention"
            alone_TD = each_alone(network, tokens_T, lengths)
            if not alone_TD.isfinite().all():
                name = network.name_or_path or type(network).__name__
                raise InputError(f"{name} computes no numbers (NaN): its training diverged, or its weights are damaged")
            if agree(packed_TD, alone_TD):
                probe_causality(hidden_of, causal, network)
                return ""
            # If every token is a sample of its own, attention through our function changes every state.
            blind = lay_out(np.arange(len(tokens_T) + 1), causal=causal)
            blind_TD = hidden_of(tokens_T, positions_T, blind)
            if agree(blind_TD, packed_TD):
                return "its attention does not go through transformers' AttentionInterface"
            if looks_both_ways(network) == causal:
                return f"transformers lets it look {'both ways' if causal else 'back only'}"
            middle = torch.tensor(len(tokens_T) // 2)
            changed_T = tokens_T.index_fill(0, middle, int(tokens_T[-1]))
            leaked_T = relative_moves(blind_TD, hidden_of(changed_T, positions_T, blind)).index_fill(0, middle, 0.0)
            if leaked_T.max() > AGREEMENT:
                text = f"a token moves the state {int(leaked_T.argmax() - middle)} tokens from it past its attention"
                return f"{text}, by {leaked_T.max():.1g} of the states' mean size"
            moved_T = relative_moves(alone_TD, packed_TD)
            first = int((moved_T > AGREEMENT).int().argmax())
            text = f"token {int(positions_T[first]) + 1} of a text of {np.repeat(lengths, lengths)[first]}"
            return f"{text} differs from the text alone, by {moved_T[first]:.1g} of the states' mean size"
    except FailedProofError as error:
        return str(error)


def check_directions(network: Any, directions: Sequence[bool]) -> None:
    """Prove for each direction of training (causal or not) that transformers computes the network that we train,
    because users load the result there. Raises `FailedProofError`."""
    published = network.config.__dict__.get("is_causal")
    for causal in directions:
        network.config.is_causal = causal
        reason = find_first_position(network.base_model, causal)
        if reason:
            looks = "looks back only" if causal else "looks both ways"
            raise FailedProofError(f"{type(network).__name__} cannot be trained as one that {looks}: {reason}")
    if published is None:
        del network.config.is_causal
    else:
        network.config.is_causal = published


def each_alone(network: Any, tokens_T: Tensor, lengths: Sequence[int], attention: str = "eager") -> Tensor:
    """Compute the hidden states of each sample alone, by transformers with its own attention; return them end to end.

    The attention is `eager`, or PyTorch's (`sdpa`) if eager does not exist or needs a mask.
    """
    implementation = network.config._attn_implementation
    try:
        network.set_attn_implementation(attention)
        outputs = []
        is_switched = network.config.__dict__.get("is_causal") is False
        switch = ", told by is_causal=false to look both ways," if is_switched else ""
        for text_T in tokens_T.split(list(lengths)):
            with foreign_errors_fail(f"transformers itself{switch} cannot read a text of {len(text_T)} tokens alone"):
                outputs.append(network(input_ids=text_T[None]))
        hidden: list[Any] = [getattr(output, "last_hidden_state", None) for output in outputs]
        if any(rows is None or rows.shape[:2] != (1, length) for rows, length in zip(hidden, lengths, strict=True)):
            name = network.name_or_path or type(network).__name__
            raise InputError(f"{name}: {type(network).__name__} gives no hidden state for each token of a text")
        return torch.cat([rows[0] for rows in hidden])
    except FailedProofError:
        if attention == "sdpa" or not getattr(network, "_supports_sdpa", False):
            raise
        return each_alone(network, tokens_T, lengths, "sdpa")
    finally:
        network.set_attn_implementation(implementation)


@torch.no_grad()
def looks_both_ways(network: Any) -> bool:
    """Return whether each token of a text sees the ones after it, by transformers alone."""
    last, changed, *tokens = telling_tokens(network, 10).tolist()
    try:
        before_TD = each_alone(network, torch.tensor([*tokens, last]), [9])
        after_TD = each_alone(network, torch.tensor([*tokens, changed]), [9])
    except FailedProofError:
        return False
    moved_T = relative_moves(before_TD, after_TD)
    return bool((moved_T[9 - 1 - reach(network) :] > MOVED_BY_ROUNDING[torch.float32]).all())


def relative_moves(before_TD: Tensor, after_TD: Tensor) -> Tensor:
    """Return the move of each hidden state, in units of the states' mean size."""
    return (after_TD - before_TD).float().abs().amax(-1) / before_TD.float().abs().mean()


@torch.no_grad()
def probe_causality(
    hidden_of: Callable[[Tensor, Tensor, PackedLayout], Tensor],
    causal: bool,
    network: Any,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    *,
    reads_rows: bool = False,
) -> None:
    """Prove that the network attends as the objective demands: change a later token, and compare every earlier output.

    Also prove that two samples of one packed batch do not see each other. Raises `FailedProofError`. One of three
    changes must pass: rounding may flip the choice of an expert once, but a leak shows every time.

    Args:
        hidden_of: maps (tokens, positions, layout) to hidden states [T, D] of `network`.
        reads_rows: choose tokens by their hidden states, not by their embeddings, which FSDP2 may have divided.
    """
    device, furthest = torch.device(device), reach(network)

    def read_singly(tokens_T: Tensor) -> Tensor:
        layout = lay_out(np.arange(len(tokens_T) + 1), causal=True, device=device, dtype=dtype)
        return hidden_of(tokens_T, torch.zeros_like(tokens_T), layout)

    layout = lay_out(np.array([0, 9, 16]), causal=causal, device=device, dtype=dtype)
    probe_T = telling_tokens(network, PROBE_TOKENS, rows_of=read_singly if reads_rows else None)
    replacements, tokens_T = probe_T[:3].tolist(), probe_T[3:].to(device)
    positions_T = torch.cat([torch.arange(9), torch.arange(7)]).to(device)
    before_TD = hidden_of(tokens_T, positions_T, layout)
    in_16_bits = before_TD.dtype != torch.float32 or torch.is_autocast_enabled(device.type)
    rounding = MOVED_BY_ROUNDING[torch.bfloat16 if in_16_bits else torch.float32]
    failure = ""
    for replacement in replacements:
        changed_T = tokens_T.clone()
        changed_T[7] = replacement
        moved_T = relative_moves(before_TD, hidden_of(changed_T, positions_T, layout))
        failure = why_not_seen(moved_T.tolist(), causal, rounding, furthest)
        if not failure:
            return
    raise FailedProofError(f"{type(network).__name__}: {failure}")


def prove_causality(model: nn.Module, causal: bool, network: Any, device: torch.device, dtype: torch.dtype) -> None:
    """Prove that a network attends as the objective demands, with the attention and arithmetic of its training.

    `model` is the `PackedModel` around the base model `network`, wrapped for its processes. Raises `FailedProofError`.
    """
    model.eval()
    with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
        probe_causality(model, causal, network, device, dtype, reads_rows=True)
    model.train()


def why_not_seen(moved_T: Sequence[float], causal: bool, rounding: float, furthest: int) -> str:
    """Return the fault that the moves of 9 + 7 tokens reveal after the eighth token changed, or ""."""
    noise = max(moved_T[9:])
    least = max(MOVED_BY_ROUNDING[torch.float32], 2 * noise)
    if not noise <= rounding:
        return "samples of a packed batch see each other"
    if not moved_T[7] > least:
        return "the proof cannot tell where it looks: a changed token changes nothing that it computes"
    if not moved_T[8] > least:
        return "a changed token does not reach the tokens after it"
    if causal and not max(moved_T[:7]) <= rounding:
        return "a causal objective sees later tokens"
    if not causal and not min(moved_T[7 - furthest : 7]) > least:
        return "a bidirectional objective does not see later tokens"
    return ""


@torch.no_grad()
def check_padded(padded: Any) -> None:
    """Prove that a `PaddedBackbone` computes the same for each text of a batch as its network for the text alone, and
    is bidirectional.

    If neighbours' lengths change its results, restrict its batches to texts of equal length. Raises `FailedProofError`.
    """
    network, name = padded.network, type(padded.network).__name__
    tokens_T, lengths = proof_samples(network, longest_text(network.config) or 2**31)
    layout = lay_out(np.cumsum([0, *lengths]), causal=False)
    alone_TD = each_alone(network, tokens_T, lengths)
    with foreign_errors_fail(name):
        for padded.equal_lengths in (False, True):
            if agree(packed_hidden(padded, tokens_T, torch.zeros_like(tokens_T), layout), alone_TD):
                probe_causality(partial(packed_hidden, padded), False, network)
                return
    raise FailedProofError(f"{name}: a text gives another result in a batch than alone")


@torch.no_grad()
def check_head(model: PreTrainedModel) -> None:
    """Prove that our loss scores hidden states as the model's own head does: scaled or shifted logits would differ."""
    name, positions_T = type(model).__name__, torch.arange(8)
    with foreign_errors_fail(f"{name}: its head cannot be called on hidden states"):
        tokens_T, packed = telling_tokens(model, 8), PackedModel(model).eval()
        targets_T, layout = tokens_T.roll(-1), lay_out(np.array([0, 8]), causal=True)
        hidden_TD, (weight_VD, bias_V) = packed.head(packed(tokens_T, positions_T, layout)), packed.head.weights()
        shape = (len(weight_VD if bias_V is None else bias_V), hidden_TD.shape[1])
        if shape != weight_VD.shape:  # such as a bias that has not grown with the embeddings
            needs = f"its head needs output embeddings of shape {shape}"
            raise FailedProofError(f"{name}: {needs}, and they have {tuple(weight_VD.shape)}")
        ours_T = packed(tokens_T, positions_T, layout, positions_T, targets_T)[1]
        position_ids = positions_T[None] + getattr(model.base_model, "first_position", 0)
        output = model(input_ids=tokens_T[None], position_ids=position_ids, layout=layout, use_cache=False)
        logits_TV = output.logits[0].float()
        theirs_T = nn.functional.cross_entropy(logits_TV, targets_T, reduction="none")
    # Logits of fresh weights differ by little, and the tolerance must not hide a missing scale.
    if not torch.allclose(ours_T, theirs_T, rtol=1e-5, atol=AGREEMENT * float(logits_TV.std())):
        worst = int((ours_T - theirs_T).abs().argmax())
        raise FailedProofError(
            f"{name}: its head gives token {worst + 1} of 8 a loss of {theirs_T[worst]:.3g} nats, and the product with "
            f"its output embeddings gives {ours_T[worst]:.3g}"
        )


def freeze_unreached(model: PreTrainedModel) -> None:
    """Freeze weights that no loss reaches, such as ESM's contact head, because DDP would wait for their gradients.
    Experts stay trainable, because the tokens decide which ones the loss reaches."""
    tokens_T = torch.arange(8) * 5 % model.config.vocab_size
    positions_T = torch.arange(8)
    layout = lay_out(np.array([0, 8]), causal=True)
    loss = PackedModel(model).eval()(tokens_T, positions_T, layout, positions_T, tokens_T.roll(-1))[0]
    reached, visited, pending = set(), {loss.grad_fn}, [loss.grad_fn]
    while pending:
        node = pending.pop()
        reached.add(id(getattr(node, "variable", None)))  # the leaves of the graph hold the parameters
        further = {following for following, _ in node.next_functions} - visited - {None}
        visited |= further
        pending += further
    for name, weight in model.named_parameters():
        if id(weight) not in reached and "expert" not in name:
            weight.requires_grad_(False)
