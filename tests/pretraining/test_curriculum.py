"""A curriculum gives each step its mixture, and a mixture its pure phase."""

import pytest

from biphase.config import Phase
from biphase.pretraining.curriculum import mixture_ends, mixture_number, pure_phase


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
