from pathlib import Path

import numpy as np
import pytest
import torch

from biphase.finetuning.cells import find_task_sources
from biphase.finetuning.encoded import load_encoded
from biphase.finetuning.encoding import TokenizedTexts
from biphase.finetuning.fit import train_network
from biphase.finetuning.heads import Encoder, UsedEmbedding, build_network

from .conftest import make_cell, predict_split


def texts_of(tokens: list[int]) -> TokenizedTexts:
    return TokenizedTexts(np.array(tokens, np.int32), np.array([0, len(tokens)]), np.zeros(0, np.int64))


@pytest.mark.parametrize("weights", ["pretrained", "random"])
@pytest.mark.parametrize("task", ["snli", "wnut17", "squad_v2", "squad_retrieval"])
def test_the_rows_in_use_are_all_that_training_needs(
    encoder: Encoder, data_dirs: dict[str, Path], task: str, weights: str
) -> None:
    """Losses, predictions and the trained rows are those of the whole embedding; its other rows only decay."""
    cell = make_cell(task, weights=weights, weight_decay=0.0)
    encoded = load_encoded(find_task_sources(task, data_dirs)[0], encoder, cell.config)
    models, losses, predictions = [], [], []
    for given in ([encoded], []):
        torch.manual_seed(0)
        models.append(build_network(encoder, cell, given))
        before = models[-1].backbone.get_input_embeddings().weight.detach().clone()
        losses.append(train_network(models[-1], encoded, cell)[0])
        predictions.append(predict_split(models[-1], encoded.splits["test"], cell))
    used, whole = (model.backbone.get_input_embeddings() for model in models)
    assert isinstance(used, UsedEmbedding) and len(used.weight) < len(whole.weight)
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
    shared = load_encoded(find_task_sources("squad_retrieval", data_dirs)[0], encoder, cell.config)
    queries, documents = shared.splits["test"].texts, shared.splits["test"].documents
    for split in shared.splits.values():
        assert split.texts.tokens_T is queries.tokens_T and split.documents.tokens_T is documents.tokens_T
