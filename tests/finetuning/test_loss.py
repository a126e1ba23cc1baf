import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.utils.class_weight import compute_class_weight
from torch import nn

from biphase.config import parse_config
from biphase.encoder.models import Encoder
from biphase.errors import InputError
from biphase.finetuning.config import FinetuneConfig, settle_config
from biphase.finetuning.encoding import CellContext, TokenizedTexts
from biphase.finetuning.encoding_cache import load_encoded
from biphase.finetuning.families.sequence_classification import Split
from biphase.finetuning.fit import steps_to_validate, train_network
from biphase.finetuning.heads import build_network
from biphase.finetuning.loss import weigh_classes
from biphase.tasks.sources import find_task_sources
from biphase.tasks.spec import Task, find_task

from ..conftest import mostly_later
from .conftest import make_cell

Dirs = dict[str, Any]


def encoded_split(encoder: Encoder, cell: CellContext, data_dirs: Dirs) -> Any:
    return load_encoded(find_task_sources(cell.task.name, data_dirs)[0], encoder, cell.config)[0]["train"]


@pytest.mark.parametrize("task", ["snli", "wnut17"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_of_unequal_microbatches_is_torchs_weighted_mean_and_balanced_is_scikit_learns(
    encoder: Encoder, data_dirs: Dirs, task: str, smoothing: float
) -> None:
    first, second, *others = find_task(task).classes
    settings: dict[str, Any] = {"class_weights": {first: 0.2, second: 5}, "label_smoothing": smoothing}
    cell = make_cell(task, head_dropout=0.0, microbatch_tokens=40, **settings)
    split, items = encoded_split(encoder, cell, data_dirs), np.arange(8)
    cell = weigh_classes(cell, split, items)
    torch.manual_seed(0)
    model = build_network(encoder, cell, [])
    loss = split.accumulate_gradients(model, items, split.pack_items(items, cell), cell)

    end = 8 if task == "snli" else split.texts.bounds_S1[8]
    targets = split.labels_S if task == "snli" else np.where(split.words_T >= 0, split.tags_W[split.words_T], -100)
    present = np.unique(targets[:end][targets[:end] >= 0])
    balanced = compute_class_weight("balanced", classes=present, y=targets[:end][targets[:end] >= 0])
    assert split.balanced_weights(items, cell)[present] == pytest.approx(balanced) and len(set(balanced)) > 1
    with torch.no_grad():
        logits = torch.from_numpy(split.texts.predict(model.eval(), cell))[:end]
    expected = nn.functional.cross_entropy(
        logits, torch.tensor(targets[:end]), torch.tensor([0.2, 5.0, *[1.0] * len(others)]), label_smoothing=smoothing
    )
    torch.testing.assert_close(loss.cpu(), expected, rtol=1e-4, atol=1e-5)


def test_sets_of_classes_are_weighted_as_torchs_pos_weight() -> None:
    task = Task(
        name="topics",
        family="sequence_classification",
        problem_type="multi_label_classification",
        metric="micro_f1",
        template="{text}",
        classes=("a", "b", "c"),
    )
    labels = np.array([[1, 0, 0], [1, 1, 0], [0, 0, 0], [1, 0, 0], [1, 1, 0]], dtype=np.float64)
    texts = TokenizedTexts(np.arange(5, dtype=np.int32), np.arange(6), np.array([], dtype=np.int64))
    split, items = Split([*"vwxyz"], texts, 5, 0, labels), np.arange(5)
    cell = CellContext(task, FinetuneConfig(class_weights="balanced"), torch.device("cpu"), torch.float32)
    cell = weigh_classes(cell, split, items)
    assert cell.class_weights_C is not None and cell.class_weights_C.tolist() == [0.25, 1.5, 1.0]
    logits = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    batches: list[Any] = [SimpleNamespace(samples=np.arange(3)), SimpleNamespace(samples=np.arange(3, 5))]
    loss = sum(split.loss(logits[batch.samples], batch, items, cell) for batch in batches)
    expected = nn.BCEWithLogitsLoss(pos_weight=torch.tensor([0.25, 1.5, 1.0]))(logits, torch.tensor(labels).float())
    torch.testing.assert_close(loss, expected)


def test_weights_that_a_task_has_no_use_for_are_refused() -> None:
    given = FinetuneConfig.model_validate({"class_weights": {"neutral": 2}})
    assert settle_config(given, find_task("snli"), 256).class_weights == (("neutral", 2.0),)
    assert "class_weights" not in FinetuneConfig().model_dump()
    with pytest.raises(InputError, match="class_weights: squad is question answering, whose loss has none"):
        settle_config(given, find_task("squad"), 256)
    with pytest.raises(InputError, match="label_smoothing: squad"):
        settle_config(FinetuneConfig(label_smoothing=0.1), find_task("squad"), 256)
    odd = FinetuneConfig.model_validate({"class_weights": {"neutrl": 2}})
    with pytest.raises(InputError, match="snli has no class 'neutrl'; did you mean 'neutral'"):
        settle_config(odd, find_task("snli"), 256)
    of_yaml = FinetuneConfig.model_validate({"class_weights": {False: 5, True: 1}})
    own = find_task("snli").model_copy(update={"classes": ("no", "yes")})
    with pytest.raises(InputError, match=r"YAML reads yes and no as True and False, .* in quotes: no, yes"):
        settle_config(of_yaml, own, 256)
    assert settle_config(of_yaml, own.model_copy(update={"classes": ("False", "True")}), 256).class_weights


@pytest.mark.parametrize(
    "weights",
    [
        [1, 5],
        [[]],
        [{"a": 2}],
        [["a", 1, 2]],
        {"a": True},
        {"a": "2"},
        {"a": 0},
        {"a": float("nan")},
        {},
        [],
        3,
        "even",
    ],
)
def test_weights_that_are_none_are_refused_in_a_line(weights: Any) -> None:
    with pytest.raises(
        InputError, match=r"class_weights: .*give `balanced`, or a mapping of classes to weights above 0"
    ):
        parse_config(FinetuneConfig, {"class_weights": weights}, origin="finetune")


def test_weights_may_be_numbers_of_numpy() -> None:
    """As scikit-learn computes them; stored ones are pairs."""
    given = FinetuneConfig.model_validate({"class_weights": {"b": np.float64(2.5), np.int64(1): np.float32(0.5)}})
    assert given.class_weights == (("1", 0.5), ("b", 2.5))
    assert FinetuneConfig.model_validate(given.model_dump(mode="json")) == given


def test_the_weights_that_were_best_on_validation_come_back(encoder: Encoder, data_dirs: Dirs) -> None:
    class Validation:
        """It says that the second of four is the best, and remembers the weights that it saw."""

        def __init__(self) -> None:
            self.values, self.seen = [0.1, 0.7, 0.7, 0.2], list[torch.Tensor]()

        def predict(self, network: nn.Module, _: CellContext) -> None:
            assert not network.training and not torch.is_grad_enabled()
            self.seen.append(next(network.parameters()).clone())

        def judge(self, *_: Any) -> Any:
            return {"accuracy": self.values[len(self.seen) - 1]}, []

    networks, trainings, validation = [], [], Validation()
    for best in (True, False):
        cell = make_cell("snli", load_best_model_at_end=best)
        torch.manual_seed(0)
        networks.append(build_network(encoder, cell, []))
        trainings.append(train_network(networks[-1], encoded_split(encoder, cell, data_dirs), cell, validation))
    (losses, told), (plain_losses, plain) = trainings
    assert losses == plain_losses and plain["best_step"] is None and len(validation.seen) == 4
    assert told["best_step"] == math.ceil(told["num_steps"] / 2)
    assert torch.equal(next(networks[0].parameters()), validation.seen[1])
    assert torch.equal(next(networks[1].parameters()), validation.seen[3])
    assert [*told["checks"].values()] == validation.values and plain["checks"] == {}


@pytest.mark.parametrize(("patience", "num_checks"), [(1, 4), (2, 5), (3, 8), (4, 8)])
@pytest.mark.parametrize("is_best_kept", mostly_later([True, False], True))
def test_training_stops_when_validation_has_not_risen_for_so_many_checks(
    patience: int, num_checks: int, is_best_kept: bool, encoder: Encoder, data_dirs: Dirs, capsys: Any
) -> None:
    """The third check is best until the sixth; as in transformers' EarlyStoppingCallback, an equal score is no rise."""
    curve = [0.1, 0.2, 0.7, 0.6, 0.7, 0.9, 0.8, 0.8]
    seen: list[torch.Tensor] = []

    def predict(network: nn.Module, _: CellContext) -> None:
        seen.append(next(network.parameters()).clone())

    validation: Any = SimpleNamespace(predict=predict, judge=lambda *_: ({"accuracy": curve[len(seen) - 1]}, []))
    results = []
    for stops in (True, False):
        seen.clear()
        given = {"early_stopping_patience": patience} if stops else {}
        cell = make_cell("snli", load_best_model_at_end=is_best_kept or not stops, epochs=8, **given)
        torch.manual_seed(0)
        network = build_network(encoder, cell, [])
        results.append((network, *train_network(network, encoded_split(encoder, cell, data_dirs), cell, validation)))
        if stops:
            stopped_at = [*seen]
    (network, losses, told), (_, all_losses, _) = results
    steps_per_epoch = len(all_losses) // 8
    assert len(stopped_at) == num_checks and told["num_steps"] == len(losses) == num_checks * steps_per_epoch
    assert losses == all_losses[: len(losses)]  # the rate falls as if training did not stop
    best = curve.index(max(curve[:num_checks]))
    assert told["best_step"] == ((best + 1) * steps_per_epoch if is_best_kept else None)
    assert torch.equal(next(network.parameters()), stopped_at[best if is_best_kept else -1])
    said = " ".join(capsys.readouterr().err.split())
    first = (
        f"step {(best + 1) * steps_per_epoch} was best on validation, {max(curve[:num_checks]):.2%}; the first check,"
    )
    assert f"snli: {first} after step {steps_per_epoch}, had 10.00%" in said
    assert (f"; stopped after step {len(losses)}, as it rose no more" in said) == (num_checks < 8)
    assert ("; the last weights are kept" in said) != is_best_kept


def test_no_training_stops_while_it_warms_up(encoder: Encoder, data_dirs: Dirs) -> None:
    validation: Any = SimpleNamespace(predict=lambda *_: None, judge=lambda *_: ({"accuracy": 0.5}, []))
    cell = make_cell("snli", epochs=8, warmup_ratio=0.5, early_stopping_patience=1)
    network = build_network(encoder, cell, [])
    _, told = train_network(network, encoded_split(encoder, cell, data_dirs), cell, validation)
    assert [*told["checks"]] == [epoch * told["num_steps"] // 5 for epoch in range(1, 6)]


@pytest.mark.parametrize(
    ("settings", "num_steps", "num_checks"),
    [({"shots": 8}, 1000, 20), ({"shots": 8, "epochs": 30}, 30, 30), ({"epochs": 30}, 30, 30), ({}, 1, 1)],
)
def test_few_shots_without_epochs_are_checked_twenty_times(
    settings: dict[str, int], num_steps: int, num_checks: int
) -> None:
    config = FinetuneConfig(early_stopping_patience=3, **settings)
    assert len(steps_to_validate(config, 16, num_steps)) == num_checks
