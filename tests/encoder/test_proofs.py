"""What a foreign network raises is a failed proof; what biphase raises, and a lack of memory, is raised."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PhimoeConfig, PhimoeForCausalLM

from biphase.encoder.network import PaddedBackbone, load_backbone, load_model
from biphase.encoder.proofs import FailedProofError, check_directions, check_head
from biphase.errors import InputError
from biphase.exporting.model import check_export

NO_MEMORY = (
    torch.OutOfMemoryError("CUDA out of memory"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] data. DefaultCPUAllocator: can't allocate memory"),
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=96, max_position_embeddings=64, **sizes)).save_pretrained(tmp_path)
    return tmp_path


def raising(error: Exception) -> Callable[..., Any]:
    """Code that is not biphase's: this file."""

    def forward(*args: Any, **options: Any) -> Any:
        raise error

    return forward


@pytest.mark.parametrize("kind", [AttributeError, IndexError, KeyError, RuntimeError, TypeError])
def test_errors_of_a_network_are_failed_proofs(
    kind: type[Exception], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(folder)
    monkeypatch.setattr("transformers.LlamaModel.forward", raising(kind("not made for that")))
    with pytest.raises(InputError, match="its head cannot be called"):
        check_head(model)
    with pytest.raises(InputError, match="no proof that"):
        load_model(folder)
    with pytest.raises(InputError, match=r"cannot be made a bidirectional encoder: .*not made for that"):
        load_backbone(folder)


@pytest.mark.parametrize("error", NO_MEMORY, ids=["cuda", "cpu"])
def test_a_lack_of_memory_is_no_failed_proof(error: Exception, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(folder)
    monkeypatch.setattr("transformers.LlamaModel.forward", raising(error))
    for call in (lambda: check_head(model), lambda: load_model(folder), lambda: load_backbone(folder)):
        with pytest.raises(type(error)) as caught:
            call()
        assert caught.value is error


def test_an_error_of_ours_is_no_failed_proof(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layout that is none, as if a line of biphase had a mistake."""
    model = load_model(folder)
    monkeypatch.setattr("biphase.encoder.proofs.lay_out", lambda *args, **options: None)
    for call in (lambda: check_head(model), lambda: load_model(folder), lambda: load_backbone(folder)):
        with pytest.raises(AttributeError, match="num_padding"):
            call()


def test_rows_that_were_never_trained_are_no_proof(folder: Path) -> None:
    """Bytes in a vocabulary of SentencePiece; and where all rows are alike, the network is not blamed."""
    model = LlamaForCausalLM.from_pretrained(folder)
    rows = model.model.embed_tokens.weight.data
    rows[:80] = rows[0]
    model.save_pretrained(folder)
    network: Any = load_model(folder)
    check_directions(network, (False, True))
    check_export(folder, AutoModelForCausalLM, network, causal=True)
    rows[:] = network.model.embed_tokens.weight.data[:] = rows[0].clone()
    model.save_pretrained(folder)
    with pytest.raises(InputError, match="the proof cannot tell"):
        load_model(folder)
    with pytest.raises(FailedProofError, match="the proof cannot tell"):
        check_export(folder, AutoModelForCausalLM, network, causal=True)


@pytest.mark.parametrize("window", [8, 100])
def test_a_window_that_the_attention_is_not_told_is_seen(window: int, tmp_path: Path) -> None:
    """PhiMoE makes its masks by a window that its attention never hears of."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = PhimoeConfig(vocab_size=96, num_key_value_heads=2, num_local_experts=2, sliding_window=window, **sizes)
    PhimoeForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"token 9 of a text of 9 .*; with windows wider than a text it passes"):
        load_model(tmp_path)
    assert isinstance(load_backbone(tmp_path), PaddedBackbone)
    config.max_position_embeddings = window  # as published: no text is longer
    PhimoeForCausalLM(config).save_pretrained(tmp_path)
    assert not isinstance(load_backbone(tmp_path), PaddedBackbone)


def test_weights_that_are_no_numbers_are_told(folder: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(folder)
    torch.nn.init.constant_(model.model.layers[0].mlp.up_proj.weight, float("nan"))
    model.save_pretrained(folder)
    for load in (load_model, load_backbone):
        with pytest.raises(InputError, match=r"computes no numbers \(NaN\)"):
            load(folder)
