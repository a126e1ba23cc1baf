"""The rate of every update, exactly; and a curriculum gives each step its mixture, a mixture its pure phase."""

from fractions import Fraction

import pytest

from biphase.config import Phase, Schedule
from biphase.pretraining.schedule import decay_start, learning_rate, mixture_ends, mixture_number, pure_phase


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


def test_each_step_has_its_mixture() -> None:
    curriculum = [Phase(objective=name, steps=steps) for name, steps in (("clm", 3), ("mlm", 1), ("clm", 2))]
    assert mixture_ends(curriculum) == [3, 4, 6]
    assert [mixture_number(curriculum, step) for step in range(6)] == [0, 0, 0, 1, 2, 2]


@pytest.mark.parametrize("share", [0.1, 0.25, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("first", [0, 7, 1234])
def test_objectives_are_mixed_evenly(share: float, first: int) -> None:
    """Any stretch of any length has its share of CLM, up to less than one step."""
    mixture = Phase(objective="mlm", steps=100, mask_probability=0.3, clm_share=share)
    causal = [pure_phase(mixture, first + step).objective == "clm" for step in range(100)]
    for begin in range(0, 90, 9):
        for length in (1, 5, 10):
            assert abs(sum(causal[begin : begin + length]) - share * length) < 1 - 1e-9
    assert {pure_phase(mixture, step).label for step in range(100)} == {"mlm30", "clm"}


def test_steps_of_clm_as_the_comment_says() -> None:
    mixture = Phase(objective="mlm", steps=100, clm_share=0.4)
    assert [step for step in range(13) if pure_phase(mixture, step).objective == "clm"] == [2, 4, 7, 9, 12]


def test_a_pure_phase_is_its_own() -> None:
    phase = Phase(objective="clm", steps=3)
    assert pure_phase(phase, 2) is phase
