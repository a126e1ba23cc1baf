"""A EuroBERT written as a plain Llama gives the same hidden states and embeddings, and says to each reader which way it
looks; what cannot become one is refused."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer, EuroBertModel, LlamaModel

import biphase
from biphase.deploying import llama
from biphase.encoder.proofs import FailedProofError
from biphase.errors import InputError
from biphase.exporting import golden
from biphase.exporting.model import export_checkpoint
from biphase.pretraining.loop import train

from ..exporting.test_model import CLM, MLM
from .test_onnx import TEXTS, make_embedder, make_family, make_kept


@pytest.fixture(scope="module")
def encoder(tiny_recipe: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encoder")
    export_checkpoint(str(train(tiny_recipe(*MLM), folder / "runs").path), folder / "encoder")
    return folder / "encoder"


@torch.no_grad()
def hidden_states(kind: Any, folder: Path) -> torch.Tensor:
    """Those of a padded batch of unequal lengths, by transformers alone."""
    batch = AutoTokenizer.from_pretrained(folder)(TEXTS, padding=True, return_tensors="pt")
    lengths = batch["attention_mask"].sum(1).tolist()
    assert len(set(lengths)) == len(TEXTS)
    return kind.from_pretrained(folder).eval()(**batch).last_hidden_state[batch["attention_mask"].bool()]


def test_a_twin_computes_what_the_eurobert_computes(encoder: Path, tmp_path: Path) -> None:
    twin = biphase.export(encoder, tmp_path / "twin", as_="llama")
    assert type(AutoModel.from_pretrained(twin)) is LlamaModel
    expected = hidden_states(EuroBertModel, encoder)
    for kind in (AutoModel, LlamaModel):
        gap = (hidden_states(kind, twin) - expected).abs().max()
        assert gap < 1e-5 * expected.abs().mean()
    config = json.loads((twin / "config.json").read_text())
    assert (config["is_causal"], config["use_bidirectional_attention"]) == (False, True)  # transformers, TEI
    assert (config["architectures"], config["pooling"]) == (["LlamaBidirectionalModel"], "avg")  # vLLM
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]
    # transformers 4, which would look left only, has no tokenizer of this class.
    assert json.loads((twin / "tokenizer_config.json").read_text())["tokenizer_class"] == "TokenizersBackend"
    card = (twin / "README.md").read_text()
    assert "pipeline_tag: feature-extraction" in card and "eurobert\n" not in card and "plain Llama" in card
    assert np.allclose(biphase.encode(twin, TEXTS), biphase.encode(encoder, TEXTS), atol=1e-6)
    assert biphase.inspect(twin, verify=True)["model_type"] == "llama"


def test_an_embedding_model_keeps_its_modules(encoder: Path, tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer

    source = make_embedder(encoder, tmp_path / "source")
    twin = biphase.export(source, tmp_path / "twin", as_="llama")
    before, after = (SentenceTransformer(str(folder), device="cpu") for folder in (source, twin))
    assert [type(module).__name__ for module in after][1:] == ["Pooling", "Dense", "Normalize"]
    assert type(after[0].auto_model) is LlamaModel
    assert np.abs(before.encode(TEXTS) - after.encode(TEXTS)).max() < 1e-6


def test_a_run_and_an_adapted_llama_become_twins(
    encoder: Path, tiny_recipe: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    run = train(tiny_recipe(*MLM), tmp_path / "runs").path
    monkeypatch.setattr(golden, "make_golden", computed := Mock(wraps=golden.make_golden))
    twin = biphase.export(run, tmp_path / "twin", as_="llama")
    assert type(AutoModel.from_pretrained(twin)) is LlamaModel
    told = " ".join(capsys.readouterr().out.split())
    assert "LlamaBidirectionalModel, bidirectional; load it with AutoModel" in told and "AutoModelFor" not in told
    computed.assert_called_once()
    card = (twin / "README.md").read_text()
    assert "import AutoModel, AutoTokenizer" in card and "MaskedLM" not in card and "unexpected" not in card
    assert re.search(r"A bidirectional `LlamaModel` of [\d.]+M parameters", card)
    source = make_family("llama-tied", encoder, tmp_path / "source")
    twin = biphase.export(source, tmp_path / "adapted", as_="llama")
    assert not any(path.startswith("lm_head") for path in load_names(twin))
    assert torch.equal(hidden_states(LlamaModel, twin), hidden_states(LlamaModel, source))


def load_names(folder: Path) -> list[str]:
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", "pt") as file:
        return list(file.keys())


def test_what_is_no_llama_is_refused(
    encoder: Path, tiny_recipe: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clm = biphase.export(train(tiny_recipe(*CLM), tmp_path / "runs").path, tmp_path / "clm")
    kept = make_kept(encoder, tmp_path / "kept", "ForSequenceClassification")
    modern = make_family("modernbert", encoder, tmp_path / "modern")
    pooled = make_embedder(encoder, tmp_path / "pooled")
    settings = json.loads((pooled / "1_Pooling" / "config.json").read_text())
    (pooled / "1_Pooling" / "config.json").write_text(json.dumps(settings | {"pooling_mode": "max"}))
    out = tmp_path / "out"
    for source, words in (
        (clm, "only a EuroBERT or a bidirectional Llama becomes one, not a 'llama'"),
        (kept, "EuroBertForSequenceClassification has the head of a task"),
        (modern, "not a 'modernbert'"),
        (pooled, "pooling is 'max'"),
    ):
        with pytest.raises(InputError, match=words):
            biphase.export(source, out, as_="llama")
    with pytest.raises(InputError, match="`as_` is 'bert'"):
        biphase.export(encoder, out, as_="bert")  # type: ignore[arg-type]
    monkeypatch.setattr(llama, "set_direction", lambda config, causal: None)
    with pytest.raises(FailedProofError, match="the LlamaModel of this EuroBertModel gives another last_hidden_state"):
        biphase.export(encoder, out, as_="llama")
    assert not out.exists()
