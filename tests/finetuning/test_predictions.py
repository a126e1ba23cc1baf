"""What each test example contributes to a score: its mean is the score, its spread the noise of the test set."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from biphase.errors import InputError
from biphase.finetuning.predictions import ExampleScores, KeptExamples, linearize, macro_f1, micro_f1, read_examples
from biphase.finetuning.scores import read_score


def test_shares_are_their_own_contributions() -> None:
    values = np.array([0.0, 1.0, 0.25])
    assert linearize(ExampleScores("x", values)).tolist() == values.tolist()


@pytest.mark.parametrize("name", ["micro_f1", "macro_f1"])
def test_linearized_noise_is_the_bootstraps(name: str) -> None:
    """The standard error from linearized contributions is that of resampling sentences, and their mean the score."""
    rng = np.random.default_rng(0)
    gold = rng.poisson(1.5, 400)
    found = rng.binomial(gold, 0.6)
    counts_NC = np.stack([found, found + rng.poisson(0.3, 400), gold], axis=1)
    statistic = micro_f1
    if name == "macro_f1":
        labels = np.eye(3)[rng.choice(3, 400, p=[0.7, 0.2, 0.1])]
        predicted = np.where((rng.random(400) < 0.7)[:, None], labels, np.eye(3)[rng.integers(0, 3, 400)])
        counts_NC, statistic = np.concatenate([labels * predicted, labels + predicted], axis=1), macro_f1
    values_N = linearize(ExampleScores("x", counts_NC, statistic))
    assert values_N.mean() == pytest.approx(float(statistic(counts_NC.sum(axis=0))))
    weights_BN = rng.multinomial(400, np.full(400, 1 / 400), 4000)
    bootstrap = statistic(weights_BN @ counts_NC).std(ddof=1)
    assert values_N.std(ddof=1) / 20 == pytest.approx(bootstrap, rel=0.06)


def test_kept_examples_are_read_when_asked_for(write_cell: Callable[..., Path]) -> None:
    lines = [{"id": str(number), "score": float(number < 3)} for number in range(4)]
    scores = [read_score(write_cell("m", seed=seed, test=0.75, lines=lines)) for seed in (0, 1)]
    table = KeptExamples(tuple(scores)).table
    assert table.values_SN.tolist() == [[1, 1, 1, 0]] * 2 and table.fingerprint == read_examples(scores[0]).fingerprint
    other = read_score(write_cell("m", seed=2, test=0.75, lines=[{**row, "id": f"x{row['id']}"} for row in lines]))
    with pytest.raises(InputError, match="not the same"):
        _ = KeptExamples((*scores, other)).table
    with pytest.raises(InputError, match="no per-example predictions"):
        _ = KeptExamples((read_score(write_cell("m", seed=3)),)).table
