import numpy as np
import torch

from biphase.encoder.attention import PAD_TO_MULTIPLE_OF
from biphase.finetuning.encoding import (
    TokenizedTexts,
    pack,
    split_by_tokens,
    to_bounds,
)
from biphase.finetuning.fit import training_order

from .conftest import make_cell

CELL = make_cell("snli", microbatch_tokens=100)


def texts_of(lengths: list[int]) -> TokenizedTexts:
    return TokenizedTexts(np.arange(sum(lengths), dtype=np.int32), to_bounds(lengths), np.zeros(0, dtype=np.int64))


def test_batch_is_its_samples() -> None:
    texts = texts_of([3, 2, 4])
    batch = pack(texts, np.array([2, 0, 2]), CELL)
    assert batch.tokens_T.tolist() == [5, 6, 7, 8, 0, 1, 2, 5, 6, 7, 8]
    assert batch.positions_T.tolist() == [0, 1, 2, 3, 0, 1, 2, 0, 1, 2, 3]
    assert batch.layout.bounds_S1.tolist() == [0, 4, 7, 11] and not batch.layout.causal
    assert batch.indices_T.tolist() == batch.tokens_T.tolist()
    assert batch.layout.num_padding == PAD_TO_MULTIPLE_OF - 11


def test_training_order() -> None:
    steps = list(training_order(num_items=10, batch_size=4, num_steps=7, seed=3))
    assert [len(step) for step in steps] == [4, 4, 2, 4, 4, 2, 4]
    assert sorted(np.concatenate(steps[:3])) == sorted(np.concatenate(steps[3:6])) == list(range(10))
    assert not (np.concatenate(steps[:3]) == np.concatenate(steps[3:6])).all()
    again = training_order(10, 4, 7, seed=3)
    assert all((a == b).all() for a, b in zip(steps, again, strict=True))


def test_evaluation_sees_each_sample_once_within_the_budget() -> None:
    lengths = np.random.default_rng(0).integers(1, 50, 200).tolist()
    lengths[17] = 500
    texts = texts_of(lengths)
    chosen = np.arange(0, 200, 2)
    chosen = np.append(chosen, 17)

    class Sizes(torch.nn.Module):
        def forward(self, batch):
            return torch.tensor(len(batch.tokens_T))

    found = [(batch, int(size)) for batch, size in texts.outputs(Sizes(), chosen, CELL)]
    assert found[0][0].samples.tolist() == [17]
    assert sorted(np.concatenate([batch.samples for batch, _ in found])) == sorted(chosen)
    assert all(size <= 100 for _, size in found[1:])


def test_outputs_stand_where_their_samples_and_tokens_do() -> None:
    """However batches are ordered and cut."""
    texts = texts_of(np.random.default_rng(0).integers(1, 50, 40).tolist())

    class Tokens(torch.nn.Module):
        def forward(self, batch):
            return batch.tokens_T[:, None].float()

    class Firsts(torch.nn.Module):
        def forward(self, batch):
            return batch.tokens_T[batch.layout.bounds_S1[:-1].long()][:, None].float()

    of_tokens = make_cell("wnut17", microbatch_tokens=100)
    assert texts.predict(Tokens(), of_tokens, 1)[:, 0].tolist() == texts.tokens_T.tolist()
    assert texts.predict(Firsts(), CELL, 1)[:, 0].tolist() == texts.bounds_S1[:-1].tolist()


def test_cut_fills_parts() -> None:
    lengths = np.array([5, 5, 5, 12, 1])
    assert [part.tolist() for part in split_by_tokens(np.array([0, 1, 2, 3, 4]), lengths, 10)] == [
        [0, 1],
        [2],
        [3],
        [4],
    ]
    assert split_by_tokens(np.array([], dtype=int), lengths, 10) == []
