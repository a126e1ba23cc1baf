"""Fine-tuning keeps the rows of the embedding that a task uses: how they are found, trained and written back."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModel, Gemma3TextConfig

from biphase.encoder.models import Encoder
from biphase.finetuning import fit
from biphase.finetuning.encoding import TokenizedTexts
from biphase.finetuning.encoding_cache import load_encoded
from biphase.finetuning.fit import train_network
from biphase.finetuning.heads import UsedEmbedding, build_network, copy_backbone, is_table
from biphase.tasks.sources import find_task_sources

from .conftest import fit_cell, make_cell, predict_split


def texts_of(tokens: list[int]) -> TokenizedTexts:
    return TokenizedTexts(np.array(tokens, np.int32), np.array([0, len(tokens)]), np.zeros(0, np.int64))


@pytest.mark.slow
@pytest.mark.minutes
@pytest.mark.parametrize("weights", ["pretrained", "random"])
@pytest.mark.parametrize("task", ["snli", "wnut17", "squad_v2", "squad_retrieval"])
def test_the_rows_in_use_are_all_that_training_needs(
    encoder: Encoder, data_dirs: dict[str, Path], task: str, weights: str
) -> None:
    """Losses, predictions and the trained rows are those of the whole embedding; its other rows only decay."""
    cell = make_cell(task, weights=weights, weight_decay=0.0)
    encoded, _ = load_encoded(find_task_sources(task, data_dirs)[0], encoder, cell.config)
    models, losses, predictions = [], [], []
    for given in (encoded.values(), []):
        torch.manual_seed(0)
        models.append(build_network(encoder, cell, given))
        before = models[-1].backbone.get_input_embeddings().weight.detach().clone()
        losses.append(train_network(models[-1], encoded["train"], cell)[0])
        predictions.append(predict_split(models[-1], encoded["test"], cell))
    used, whole = (model.backbone.get_input_embeddings() for model in models)
    assert len(used.weight) < len(whole.weight)
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    rows = used.row_of_V < len(used.weight)
    torch.testing.assert_close(used.weight, whole.weight[rows], rtol=1e-4, atol=1e-5)
    assert torch.equal(whole.weight[~rows], before[~rows])
    if task == "snli":
        assert np.array_equal(*predictions)


def test_every_text_of_a_task_counts(encoder: Encoder, data_dirs: dict[str, Path]) -> None:
    assert texts_of([3, 3, 1]).used_U.tolist() == [1, 3]
    assert texts_of([]).used_U.tolist() == []
    cell = make_cell("squad_retrieval")
    shared, _ = load_encoded(find_task_sources("squad_retrieval", data_dirs)[0], encoder, cell.config)
    queries, documents = shared["test"].texts, shared["test"].documents
    for split in shared.values():
        assert split.texts.tokens_T is queries.tokens_T and split.documents.tokens_T is documents.tokens_T


def test_a_token_that_no_text_has_is_an_error() -> None:
    embedding = UsedEmbedding(nn.Embedding(10, 4), torch.tensor([2, 7]))
    assert embedding(torch.tensor([7, 2])).shape == (2, 4)
    with pytest.raises(IndexError):
        embedding(torch.tensor([3]))


def test_padding_stays(encoder: Encoder) -> None:
    """Networks without packing pad their batches themselves."""
    backbone = copy.deepcopy(encoder.backbone)
    backbone.config.pad_token_id = 5
    copied: Any = copy_backbone(backbone, [texts_of([8, 9])])
    assert (copied.get_input_embeddings().row_of_V < 3).nonzero().flatten().tolist() == [5, 8, 9]
    assert type(backbone.get_input_embeddings()) is nn.Embedding


def test_an_embedding_that_does_more_stays_whole() -> None:
    config = Gemma3TextConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, head_dim=8
    )
    scaled: Any = AutoModel.from_config(config)
    copied: Any = copy_backbone(scaled, [texts_of([1])])
    assert len(copied.get_input_embeddings().weight) == 32

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.out = nn.Embedding(4, 2), nn.Linear(2, 4)
            self.out.weight = self.embedding.weight

    tied = Tied()
    assert not is_table(tied, tied.embedding)


def test_cells_are_trained_with_the_rows_in_use(
    model_folder: Path, data_dirs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    are_narrow = []
    original = fit.train_network

    def noted(model: Any, *rest: Any) -> Any:
        are_narrow.append(hasattr(model.backbone.get_input_embeddings(), "row_of_V"))
        return original(model, *rest)

    monkeypatch.setattr(fit, "train_network", noted)
    fit_cell(str(model_folder), "snli", make_cell("snli").config, None, data_dirs["snli"])
    assert are_narrow == [True]
