"""A network is believed by what it computes: packing changes nothing, it looks where it should, its head is ours.

Each proof is a forward pass or two on a few tokens. What a foreign network raises when it is called in a way that it is
not made for counts as a failed proof; an error inside of biphase, and a lack of memory, are raised as what they are.

Letters: T tokens, D width.
"""

import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from biphase.encoder.attention import ATTENTION, Backend, NoLayoutError, PackedLayout, lay_out
from biphase.encoder.packed import PackedModel, head_input, packed_hidden, position_limit
from biphase.errors import InputError

SOURCE = Path(__file__).parents[1]
"""The folder of biphase."""

WINDOW_PROOF_TOKENS = 300
"""Longest sample of the proof of packing: enough to see the local attention of ModernBERT (128)."""

FOREIGN_ERRORS = (AttributeError, IndexError, KeyError, RuntimeError, TypeError)
"""What a network raises that is not made to be called so: it knows no `position_ids`, or not so many, or no mask
that is None. To be caught together with `is_foreign` only: our own mistakes are of these types too."""


def is_foreign(error: BaseException) -> bool:
    """Whether an error comes from a foreign network: it was not raised in biphase itself, nor for want of memory."""
    if isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error):
        return False
    *_, (innermost, _) = traceback.walk_tb(error.__traceback__)
    return SOURCE not in Path(innermost.f_code.co_filename).parents


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
    except NoLayoutError:
        return False
    except FOREIGN_ERRORS as error:
        if not is_foreign(error):
            raise
        return False
    finally:
        network.set_attn_implementation(ATTENTION)
    return bool(torch.allclose(packed_TD, own_TD, rtol=1e-3, atol=1e-3 * float(own_TD.abs().mean())))


def check_causality(backbone: nn.Module, causal: bool, vocab_size: int) -> None:
    """`probe_causality` of a transformers base model on the CPU."""
    was_training = backbone.training
    backbone.eval()
    probe_causality(partial(packed_hidden, backbone), causal, vocab_size, "cpu", type(backbone).__name__)
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


def check_head(model: PreTrainedModel) -> None:
    """Prove that our loss scores hidden states as the model's own head does (scaled or shifted logits would differ)."""
    try:
        agrees = scores_like_itself(model)
    except FOREIGN_ERRORS as error:
        if not is_foreign(error):
            raise
        agrees = False
    if not agrees:
        raise InputError(f"{type(model).__name__} transforms its logits in a way that packed training does not support")


@torch.no_grad()
def scores_like_itself(model: PreTrainedModel) -> bool:
    """Whether `PackedModel` gives each target of a sample the loss that the model's own logits give."""
    tokens_T = torch.arange(8) * 5 % model.config.vocab_size
    targets_T, positions_T = tokens_T.roll(-1), torch.arange(8)
    layout = lay_out(np.array([0, 8]), causal=True)
    packed, head = PackedModel(model).eval(), model.get_output_embeddings()
    hidden_TD = head_input(model, packed(tokens_T, positions_T, layout))
    if hidden_TD.shape[1] != head.weight.shape[1]:
        return False  # a transform that we do not know lies between them
    if head.bias is not None and len(head.bias) != len(head.weight):
        return False  # it has not grown with the embeddings
    ours = packed(tokens_T, positions_T, layout, positions_T, targets_T)[1]
    position_ids = positions_T[None] + getattr(model.base_model, "first_position", 0)
    output = model(input_ids=tokens_T[None], position_ids=position_ids, layout=layout, use_cache=False)
    theirs = nn.functional.cross_entropy(output.logits[0].float(), targets_T, reduction="none")
    return bool(torch.allclose(ours, theirs, rtol=1e-3, atol=1e-3))
