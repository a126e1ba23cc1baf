"""The rate of every update, exactly."""

from fractions import Fraction

import pytest

from biphase.config import Schedule
from biphase.pretraining.schedule import decay_start, learning_rate


def rates(warmup: int, decay: int, steps: int, peak: float = 8.0) -> list[float]:
    schedule = Schedule(peak_lr=peak, warmup_steps=warmup, decay_steps=decay)
    return [learning_rate(schedule, step, steps) for step in range(steps)]


@pytest.mark.parametrize(
    ("warmup", "decay", "expected"),
    [
        (4, 4, [2, 4, 6, 8, 8, 8, 8, 6, 4, 2]),
        (0, 4, [8, 8, 8, 8, 8, 8, 8, 6, 4, 2]),
        (4, 0, [2, 4, 6, 8, 8, 8, 8, 8, 8, 8]),
        (0, 0, [8] * 10),
        (5, 5, [1.6, 3.2, 4.8, 6.4, 8, 8, 6.4, 4.8, 3.2, 1.6]),
        (1, 1, [8] * 10),
    ],
)
def test_every_rate(warmup: int, decay: int, expected: list[float]) -> None:
    assert rates(warmup, decay, 10) == pytest.approx(expected, rel=1e-15)


def test_the_papers_schedule() -> None:
    """2,000 steps up, constant 5e-4, 2,000 steps down, 42,000 in all."""
    found = rates(2000, 2000, 42_000, 5e-4)
    assert found[1999:40_001] == [5e-4] * 38_002
    for step in (0, 1, 777, 1998):
        assert found[step] == pytest.approx(float(Fraction(step + 1, 2000) * Fraction("5e-4")), rel=1e-15)
        assert found[-1 - step] == pytest.approx(found[step], rel=1e-15)
    assert all(rate > 0 for rate in found)


def test_a_branch_that_decays_goes_on_at_the_peak() -> None:
    """From an undecayed step, without warm-up: the first rate is the trunk's, the last is one step above zero."""
    assert rates(0, 4, 6) == [8, 8, 8, 6, 4, 2]
    assert rates(0, 4, 4) == [8, 6, 4, 2]
    assert decay_start(Schedule(warmup_steps=0, decay_steps=4), 6) == 2
    assert decay_start(Schedule(warmup_steps=0, decay_steps=0), 6) == 6


def test_a_step_outside_is_our_mistake() -> None:
    for step in (-1, 10):
        with pytest.raises(AssertionError):
            learning_rate(Schedule(), step, 10)
