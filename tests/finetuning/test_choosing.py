"""What other validation examples would have chosen, against a normal distribution by hand and a bootstrap."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from biphase.finetuning.choosing import MOST_EXAMPLES, RateChoice, draw_choices, other_seeds, spread_of_choices
from biphase.finetuning.metrics import micro_f1
from biphase.finetuning.scores import linearize, read_scores
from biphase.report.results import select_rate

Choose = Callable[..., RateChoice]


@pytest.fixture
def choose(write_cell: Callable[..., Path], scores_folder: Path) -> Choose:
    """The choice among the rates 1e-5, 2e-5, … by which validation examples are right at each; seeds are alike."""

    def make(*right: Sequence[bool], test: Sequence[float], is_kept: bool = True, num_seeds: int = 2) -> RateChoice:
        for number, values in enumerate(right):
            lines = [{"id": str(i), "score": float(value)} for i, value in enumerate(values)]
            for seed in range(num_seeds):
                write_cell(
                    "m",
                    rate=(number + 1) * 1e-5,
                    seed=seed,
                    test=test[number],
                    validation=float(np.mean(values)),
                    validation_lines=lines if is_kept else None,
                    num_examples={"validation": len(values)},
                )
        choice = select_rate(read_scores(scores_folder), "m", "genre").choice
        assert choice is not None
        return choice

    return make


def first(num: int, of: int = 100) -> list[bool]:
    return [i < num for i in range(of)]


def test_two_rates_by_hand(choose: Choose) -> None:
    """100 examples: one rate has the first 80 right, the other the last 75. They differ on 45 in 20 : 25, so the
    difference of 5 points has a standard error of about √(0.45 − 0.05²) / 10."""
    choice = choose(first(80), [i >= 25 for i in range(100)], test=(0.7, 0.9))
    noise = choice.draw_noise()
    error = np.sqrt((0.45 - 0.05**2) / 99)
    share = float(stats.norm.cdf(0.05 / error))
    assert choice.num_examples == 100 and noise.shares == pytest.approx({1e-5: share, 2e-5: 1 - share}, abs=0.03)
    assert noise.variance == pytest.approx(share * (1 - share) * 0.2**2, rel=0.05)


def test_a_rate_far_behind_is_chosen_at_times(choose: Choose) -> None:
    """The first 60 right, or the other 40: the difference of 20 points has a standard error of √(1 − 0.2²) / 10."""
    noise = choose(first(60), [i >= 60 for i in range(100)], test=(0.7, 0.9)).draw_noise()
    share = float(stats.norm.cdf(0.2 / np.sqrt((1 - 0.2**2) / 99)))
    assert share < 0.98 and noise.shares == pytest.approx({1e-5: share, 2e-5: 1 - share}, abs=0.005)


def test_what_cannot_be_chosen_is_not_read(choose: Choose) -> None:
    """One rate is 40 points behind, and no predictions were kept; nor where there is one rate alone."""
    noise = choose(first(90), first(50), test=(0.7, 0.9), is_kept=False).draw_noise()
    assert (noise.shares, noise.variance) == ({1e-5: 1.0}, 0.0)


def test_one_rate_is_no_choice(choose: Choose) -> None:
    choice = choose(first(90), test=(0.7,), is_kept=False)
    noise = choice.draw_noise()
    assert (noise.shares, noise.variance, choice.num_examples) == ({1e-5: 1.0}, 0.0, 0)


def test_of_equal_rates_the_lowest(choose: Choose) -> None:
    noise = choose(first(9, of=12), first(9, of=12), first(9, of=12), test=(0.7, 0.8, 0.9)).draw_noise()
    assert [*noise.shares.values()] == [1, 0, 0] and noise.variance == 0


def test_a_choice_that_is_not_known(choose: Choose) -> None:
    noise = choose(first(80), first(75), test=(0.7, 0.9), is_kept=False).draw_noise()
    assert "no per-example predictions (validation.jsonl)" in noise.why_unknown and np.isnan(noise.variance)


def test_one_example_knows_no_noise(choose: Choose) -> None:
    noise = choose([True], [False], test=(0.7, 0.9)).draw_noise()
    assert noise.why_unknown and np.isnan(noise.variance)


def test_a_part_of_many_examples_tells_it(choose: Choose) -> None:
    """Right and wrong ones alternate over the file: every tenth line is read, and its own mean is not the score."""
    many = 10 * MOST_EXAMPLES
    rng = np.random.default_rng(0)
    one, other = rng.random((2, many)) < 0.8
    noise = choose(one.tolist(), other.tolist(), test=(0.7, 0.9), num_seeds=1).draw_noise()
    error = np.std(one.astype(float) - other) / np.sqrt(many)
    share = float(stats.norm.cdf((one.mean() - other.mean()) / error))
    assert noise.shares == pytest.approx({1e-5: share, 2e-5: 1 - share}, abs=0.05)


def test_rates_with_more_lost_seeds_are_no_rivals(write_cell: Callable[..., Path], scores_folder: Path) -> None:
    for rate, seeds in ((1e-5, (0.5, 0.5)), (5e-5, (0.9, None))):
        for seed, test in enumerate(seeds):
            write_cell("m", rate=rate, seed=seed, test=test, validation=test or 0.0)
    choice = select_rate(read_scores(scores_folder), "m", "genre").choice
    assert choice is not None and [*choice.by_rate] == [1e-5]


def test_other_metrics_choose_elsewhere(choose: Choose, scores_folder: Path) -> None:
    """What is kept of predictions is known of the task's own metric alone."""
    choose(first(80), test=(0.7,))
    assert select_rate(read_scores(scores_folder), "m", "genre", "other").choice is None


def test_test_examples_do_not_count_twice() -> None:
    """Two equally good rates, of which 400 test examples show one ahead by chance: what their noise explains on average
    is no matter of the choice. What is left is what lies between rates that truly differ."""
    rng = np.random.default_rng(2)
    shares_K, found = np.array([0.5, 0.5]), []
    for gap in (0.0, 0.1):
        right_TKN = rng.random((2000, 2, 400)) < np.array([0.7, 0.7 + gap])[:, None]
        covariances = [np.cov(right_KN) / 400 for right_KN in right_TKN]
        raw = [shares_K @ (scores_K - scores_K.mean()) ** 2 for scores_K in right_TKN.mean(axis=2)]
        taken_off = [
            spread_of_choices(shares_K, right_KN.mean(axis=1), covariance_KK)
            for right_KN, covariance_KK in zip(right_TKN, covariances, strict=True)
        ]
        found.append((np.mean(raw), np.mean(taken_off)))
    (raw, left), (raw_apart, left_apart) = found
    assert left < 0.6 * raw and left_apart < raw_apart
    assert left_apart == pytest.approx(0.05**2, rel=0.1)


def test_shares_are_those_of_a_bootstrap() -> None:
    """Of an F1, which is no mean over examples, at four rates of two seeds."""
    rng = np.random.default_rng(1)
    gold_N = rng.poisson(1.5, 150)
    levels = (0.6, 0.62, 0.58, 0.5)
    found_KSN = np.stack([[rng.binomial(gold_N, level) for _ in range(2)] for level in levels])
    counts_KSNC = np.stack([found_KSN, found_KSN + 1, np.broadcast_to(gold_N, found_KSN.shape)], axis=-1)
    linear_KN = np.mean([[linearize(c, micro_f1) for c in rate] for rate in counts_KSNC], axis=1)
    means_K = micro_f1(counts_KSNC.sum(axis=2)).mean(axis=1)
    weights_BN = rng.multinomial(150, np.full(150, 1 / 150), 4000)
    again_KSB = micro_f1(np.einsum("bn,ksnc->ksbc", weights_BN, counts_KSNC))
    bootstrap_K = np.bincount(again_KSB.mean(axis=1).argmax(axis=0), minlength=4) / 4000
    assert draw_choices(means_K, np.cov(linear_KN) / 150) == pytest.approx(bootstrap_K, abs=0.04)


def test_other_seeds_choose_otherwise(write_cell: Callable[..., Path], scores_folder: Path) -> None:
    """Without predictions the spread over seeds is known: means of 0.71 and 0.70, a variance of 0.0002 within each
    rate, and so 0.0002 · (1/2 + 1/1) for a mean of other seeds."""
    for rate, values in ((1e-5, (0.72, 0.70)), (2e-5, (0.71, 0.69))):
        for seed, value in enumerate(values):
            write_cell("m", rate=rate, seed=seed, test=value, validation=value, num_examples={"validation": 10_000})
    choice = select_rate(read_scores(scores_folder), "m", "genre").choice
    assert choice is not None and choice.degrees == 2
    noise = choice.draw_noise()
    assert noise.why_unknown
    assert other_seeds([(0.72, 0.70), (0.71, 0.69)]) == pytest.approx([0.0003, 0.0003])
    share = float(stats.norm.cdf(0.01 / np.sqrt(0.0006)))
    assert noise.shares == pytest.approx({1e-5: share, 2e-5: 1 - share}, abs=0.02)
    assert noise.variance == pytest.approx(share * (1 - share) * 0.01**2, rel=0.05)
