"""A stage and the kind of its pairs → the loss, by sentence-transformers' own."""

import inspect
from collections.abc import Iterable, Sequence
from typing import Any

from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import losses
from torch import Tensor, nn

from biphase.embedding.packed_module import width_of
from biphase.embedding.recipe import LOSSES, EmbeddingStage
from biphase.embedding.teacher import load_teacher
from biphase.errors import InputError, first_line, nearest

SMALLEST_DIM = 32
"""Matryoshka's halves of the width end here."""


def loss_name(stage: EmbeddingStage, kind: str) -> str:
    """The recipe's name of the loss for pairs of a kind. Raises `InputError` for one that is of the other kind."""
    if stage.loss == "auto":
        return "cosent" if kind == "scored" else "mnrl" if stage.orthogonal_weight else "cached_mnrl"
    is_scored = stage.loss == "cosent"
    if stage.loss != "distill" and is_scored != (kind == "scored"):
        raise InputError(
            f"stage {stage.name}: loss {stage.loss} needs {'scored pairs' if is_scored else 'pairs without scores'}"
        )
    return stage.loss


def make_loss(
    model: SentenceTransformer, stage: EmbeddingStage, kind: str, matryoshka: bool | Sequence[int]
) -> nn.Module:
    """The stage's loss, over several widths of the embeddings unless the recipe says otherwise.

    Raises `InputError` for a setting that the loss does not have.
    """
    name = loss_name(stage, kind)
    make = getattr(losses, LOSSES[name])
    known = inspect.signature(make).parameters
    settings = dict(stage.loss_settings)
    for key in settings:
        if key not in known or key == "model":
            raise InputError(
                f"stage {stage.name}: loss_settings: unknown key '{key}'{nearest(key, set(known) - {'model'})}"
            )
    if "scale" in known:
        settings.setdefault("scale", 1 / stage.temperature)
    if "mini_batch_num_tokens" in known:
        settings.setdefault("mini_batch_num_tokens", stage.mini_batch_tokens)
    width = width_of(model)
    if name == "distill" and stage.projection:
        teacher = load_teacher(stage, width)
        assert teacher is not None
        settings.setdefault("projection_dim", teacher.get_embedding_dimension())
    try:
        loss = make(model, **settings)
    except (TypeError, ValueError) as error:
        raise InputError(f"stage {stage.name}: loss_settings: {first_line(error)}") from None
    if name == "distill":
        return loss
    if stage.orthogonal_weight:
        loss = WithOrthogonality(model, loss, stage.orthogonal_weight)
    dims = matryoshka_dims(width, matryoshka)
    return losses.MatryoshkaLoss(model, loss, dims) if len(dims) > 1 else loss


class WithOrthogonality(nn.Module):
    """A loss with the weighted global orthogonal regularizer added, from the same embeddings."""

    def __init__(self, model: SentenceTransformer, loss: Any, weight: float) -> None:
        super().__init__()
        self.model, self.loss, self.weight = model, loss, weight
        self.regularizer = losses.GlobalOrthogonalRegularizationLoss(model)

    def forward(self, sentence_features: Iterable[dict[str, Any]], labels: Tensor) -> Tensor:
        embeddings = [self.model(features)["sentence_embedding"] for features in sentence_features]
        terms = self.regularizer.compute_loss_from_embeddings(embeddings)
        return self.loss.compute_loss_from_embeddings(embeddings, labels) + self.weight * sum(terms.values())


def matryoshka_dims(width: int, wanted: bool | Sequence[int]) -> list[int]:
    """The widths that are trained, largest first: 384 gives 384, 192, 96, 48."""
    if wanted is False:
        return [width]
    if wanted is True:
        dims = [width]
        while dims[-1] % 2 == 0 and dims[-1] // 2 >= SMALLEST_DIM:
            dims.append(dims[-1] // 2)
        return dims
    if max(wanted) > width:
        raise InputError(f"matryoshka: {max(wanted)} is above the {width} dimensions of the model")
    return sorted({width, *wanted}, reverse=True)
