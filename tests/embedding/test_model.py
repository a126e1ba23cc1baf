"""sentence-transformers' losses on packed tokens are what they are on its own padded module.

Not here: losses that reach into its own Transformer module by its class (AdaptiveLayer, Matryoshka2d), or need a
decoder (DenoisingAutoEncoder) or a second model (GIST).
"""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("sentence_transformers")

from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Normalize, Transformer
from sentence_transformers.sentence_transformer import losses
from sentence_transformers.sentence_transformer.modules import Pooling
from sentence_transformers.util import batch_to_device

from biphase.embedding.model import PackedTransformer, load_embedder, load_for_inference, make_embedder
from biphase.encoder import attention
from biphase.encoder.attention import sdpa_attention
from biphase.errors import InputError
from biphase.files import MARK


def padded(folder: Path, pooling: str) -> SentenceTransformer:
    module = Transformer(str(folder), model_kwargs={"dtype": torch.float32})
    module.max_seq_length = 48
    width = module.model.config.hidden_size
    return SentenceTransformer(modules=[module, Pooling(width, pooling_mode=pooling), Normalize()])  # type: ignore[arg-type]


def loss_and_gradient(model: Any, make: Any, columns: list[list[str]], labels: Any) -> tuple[float, torch.Tensor]:
    torch.manual_seed(0)
    model.zero_grad()
    features = [model.preprocess(texts) for texts in columns]
    loss = make(model)(features, labels)
    loss = sum(loss.values()) if isinstance(loss, dict) else loss
    loss.backward()
    network = model[0].network if hasattr(model[0], "network") else model[0].model
    return loss.item(), network.get_input_embeddings().weight.grad.clone()


def matryoshka(model: Any) -> Any:
    return losses.MatryoshkaLoss(model, losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=5), [32, 16])


PAIRS = {
    "MultipleNegativesRankingLoss": losses.MultipleNegativesRankingLoss,
    "Cached": lambda model: losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=7),
    "CachedTokens": lambda model: losses.CachedMultipleNegativesRankingLoss(model, mini_batch_num_tokens=200),
    "Matryoshka": matryoshka,
    "CachedSymmetricHard": lambda model: losses.CachedMultipleNegativesRankingLoss(
        model, mini_batch_size=7, directions=("query_to_doc", "doc_to_query"), hardness_mode="in_batch_negatives"
    ),
    "MegaBatchMargin": lambda model: losses.MegaBatchMarginLoss(model, mini_batch_size=4),
    "Orthogonal": losses.GlobalOrthogonalRegularizationLoss,
    "ContrastiveTensionInBatch": losses.ContrastiveTensionLossInBatchNegatives,
}
SCORED = {
    name: getattr(losses, name)
    for name in ("CoSENTLoss", "AnglELoss", "CosineSimilarityLoss", "ContrastiveLoss", "OnlineContrastiveLoss")
}
TRIPLETS = {"TripletLoss": losses.TripletLoss, "MultipleNegativesRankingLoss": losses.MultipleNegativesRankingLoss}
BATCH = {
    name: getattr(losses, name)
    for name in (
        "BatchAllTripletLoss",
        "BatchHardTripletLoss",
        "BatchSemiHardTripletLoss",
        "BatchHardSoftMarginTripletLoss",
    )
}


def test_bounds_on_the_device_give_the_same_embeddings(encoder_folder: Path) -> None:
    """Our own stay on the CPU for those who lay out and divide batches there; pooling gets them on the device."""
    model = make_embedder(str(encoder_folder), 48, "mean")
    features = model.preprocess(["a red fox", "the sea", "bread"])
    assert features["cu_seq_lens_q"].dtype == np.int32
    given = {name: torch.as_tensor(value).to(model.device) for name, value in features.items()}
    ours = model(batch_to_device(dict(features), model.device))
    assert ours["cu_seq_lens_q"].tolist() == features["cu_seq_lens_q"].tolist()
    assert ours["cu_seq_lens_q"].device == ours["token_embeddings"].device
    assert torch.equal(model(given)["sentence_embedding"], ours["sentence_embedding"])


TEACHER = torch.randn(24, 32, generator=torch.Generator().manual_seed(1))


def cases() -> list[Any]:
    found = [pytest.param(make, "pairs", id=f"pairs-{name}") for name, make in PAIRS.items()]
    found += [pytest.param(make, "scored", id=f"scored-{name}") for name, make in SCORED.items()]
    found += [pytest.param(make, "triplets", id=f"triplets-{name}") for name, make in TRIPLETS.items()]
    found += [pytest.param(make, "classes", id=name) for name, make in BATCH.items()]
    found += [pytest.param(losses.EmbedDistillLoss, "distill", id="EmbedDistill")]
    found += [pytest.param(losses.MSELoss, "distill", id="MSE")]
    found += [pytest.param(losses.MarginMSELoss, "margins", id="MarginMSE")]
    found += [pytest.param(losses.DistillKLDivLoss, "margins2", id="DistillKLDiv")]
    found += [pytest.param(lambda m: losses.SoftmaxLoss(m, 32, 3), "classes2", id="Softmax")]
    return found


@pytest.mark.parametrize(("make", "kind"), cases())
def test_losses_are_those_of_the_padded_module(
    make: Any, kind: str, encoder_folder: Path, pairs: list[dict[str, str]]
) -> None:
    anchors, positives = [row["anchor"] for row in pairs], [row["positive"] for row in pairs]
    negatives = positives[1:] + positives[:1]
    num = len(pairs)
    numbers = torch.arange(num)
    given: dict[str, tuple[list[list[str]], Any]] = {
        "pairs": ([anchors, positives], None),
        "scored": ([anchors, positives], (numbers % 2).float()),
        "triplets": ([anchors, positives, negatives], None),
        "classes": ([anchors], numbers % 3),
        "classes2": ([anchors, positives], numbers % 3),
        "distill": ([anchors], TEACHER[:num]),
        "margins": ([anchors, positives, negatives], torch.linspace(-1, 1, num)),
        "margins2": ([anchors, positives, negatives], torch.stack([torch.linspace(-1, 1, num), torch.zeros(num)], 1)),
    }
    columns, labels = given[kind]
    ours, our_gradient = loss_and_gradient(make_embedder(str(encoder_folder), 48, "mean"), make, columns, labels)
    theirs, their_gradient = loss_and_gradient(padded(encoder_folder, "mean"), make, columns, labels)
    assert ours == pytest.approx(theirs, abs=1e-5)
    torch.testing.assert_close(our_gradient, their_gradient, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("pooling", ["mean", "cls", "lasttoken", "max"])
def test_embeddings_are_those_of_the_padded_module(
    pooling: str, encoder_folder: Path, pairs: list[dict[str, str]]
) -> None:
    texts = [row["positive"] for row in pairs] + ["", "a"]
    ours = make_embedder(str(encoder_folder), 48, pooling).encode(texts)
    theirs = padded(encoder_folder, pooling).encode(texts)
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("units", [{"avx512_bf16"}, {"avx512_bf16", "amx_bf16"}])
def test_inference_computes_what_training_does(
    units: set[str], encoder_folder: Path, pairs: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In fp32 but for rounding; in bf16 as near to it as sentence-transformers with bf16 weights is. Without AMX,
    PyTorch's kernel for batches is left to fp32."""
    monkeypatch.setattr(attention, "name_bf16_cores", lambda: units)
    texts = [text for pair in pairs[:12] for text in pair.values()] + ["a", ""]
    trained = make_embedder(str(encoder_folder), None, "mean")
    expected = trained.encode(texts, convert_to_tensor=True)
    monkeypatch.setattr("biphase.embedding.model.load_embedder", lambda name: trained)
    model: Any = load_for_inference(str(encoder_folder))
    monkeypatch.setattr("biphase.embedding.model.most_tokens", lambda device: 100)
    asked: list[str] = []
    monkeypatch.setattr(attention, "sdpa_attention", lambda *given: asked.append("sdpa") or sdpa_attention(*given))
    torch.testing.assert_close(model.encode(texts, convert_to_tensor=True), expected, rtol=1e-4, atol=1e-6)
    assert len(asked) > 2 * model[0].network.config.num_hidden_layers and not model[0].copies, "several parts"
    asked.clear()
    theirs = padded(encoder_folder, "mean").to(torch.bfloat16).encode(texts, convert_to_tensor=True).float()
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            rounded = model.encode(texts, convert_to_tensor=True)
        assert rounded.dtype == torch.float32
        assert 0 < (rounded - expected).abs().max() <= 2 * (theirs - expected).abs().max()
    assert bool(asked) == ("amx_bf16" in units)
    [copied] = model[0].copies.values()
    assert {weight.dtype for weight in copied.parameters()} == {torch.bfloat16}
    assert model[0].network.dtype == torch.float32, "the network itself stays"


def test_a_checkpoint_comes_back(encoder_folder: Path, pairs: list[dict[str, str]], tmp_path: Path) -> None:
    model = make_embedder(str(encoder_folder), 48, "mean")
    model.save_pretrained(str(tmp_path))
    again = type(model[0]).load(str(tmp_path))
    assert again.max_seq_length == 48
    for one, other in zip(model[0].network.parameters(), again.network.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("sentence_bert_config.json", {"document_length": 5}),
        ("sentence_bert_config.json", {"query_length": 40}),
        ("sentence_bert_config.json", {"processing_kwargs": {"text": {"max_length": 40}}}),
        ("1_Pooling/config.json", {"include_prompt": False}),
        ("README.md", None),
    ],
)
def test_settings_that_packing_lacks_are_obeyed(
    file: str, content: Any, encoder_folder: Path, pairs: list[dict[str, str]], tmp_path: Path, capsys: Any
) -> None:
    """Documents, which have a prompt, and queries are embedded as sentence-transformers does; packed where it can."""
    folder = shutil.copytree(encoder_folder, tmp_path / "model")
    (folder / MARK).unlink()
    for path, changes in (
        ("config_sentence_transformers.json", {"prompts": {"document": "a text: "}}),
        (file, content),
    ):
        if changes:
            record = json.loads((folder / path).read_text()) if (folder / path).exists() else {}
            (folder / path).write_text(json.dumps(record | changes))
    model, plain, texts = load_embedder(str(folder)), SentenceTransformer(str(folder)), [row["anchor"] for row in pairs]
    assert isinstance(model[0], PackedTransformer) == (content is None)
    assert ("sentence-transformers alone runs it" in " ".join(capsys.readouterr().err.split())) == (content is not None)
    for ours, theirs in ((model.encode_query, plain.encode_query), (model.encode_document, plain.encode_document)):
        np.testing.assert_allclose(ours(texts), theirs(texts), atol=1e-5)


def test_lengths_beyond_the_positions_are_refused(encoder_folder: Path) -> None:
    with pytest.raises(InputError, match="positions"):
        make_embedder(str(encoder_folder), 10_000, "mean")
