"""The rate of every update, exactly; and a curriculum gives each step its phase, a mixed phase gives it a pure one."""

from fractions import Fraction
from itertools import pairwise
from math import floor

import pytest

from biphase.curriculum import BatchRamp, Phase, cut_phases
from biphase.pretraining.objectives import phase_of_step
from biphase.schedule import Schedule


def rates(warmup: int, decay: int, steps: int, peak: float = 8.0) -> list[float]:
    schedule = Schedule(warmup_steps=warmup, decay_steps=decay)
    return [peak * schedule.share_of_peak(step, steps) for step in range(steps)]


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


def test_a_step_outside_is_our_mistake() -> None:
    for step in (-1, 10):
        with pytest.raises(AssertionError):
            Schedule().share_of_peak(step, 10)


def test_each_step_has_its_phase() -> None:
    curriculum = [Phase(objective=name, steps=steps) for name, steps in (("clm", 3), ("mlm", 1), ("clm", 2))]
    assert [phase_of_step(curriculum, step, 0)[0] for step in range(6)] == [0, 0, 0, 1, 2, 2]


@pytest.mark.parametrize("share", [0.1, 0.25, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("first", [0, 7, 1234])
def test_objectives_are_mixed_evenly(share: float, first: int) -> None:
    """Any stretch of any length has its share of CLM, up to less than one step."""
    mixed = Phase(objective="mlm", steps=100, mask_probability=0.3, clm_share=share)
    causal = [phase_of_step([mixed], step, first)[1].objective == "clm" for step in range(100)]
    for begin in range(0, 90, 9):
        for length in (1, 5, 10):
            assert abs(sum(causal[begin : begin + length]) - share * length) < 1 - 1e-9
    assert {phase_of_step([mixed], step, 0)[1].label for step in range(100)} == {"mlm30", "clm"}


def test_steps_of_clm_as_the_comment_says() -> None:
    mixed = Phase(objective="mlm", steps=100, clm_share=0.4)
    assert [step for step in range(13) if phase_of_step([mixed], step, 0)[1].objective == "clm"] == [2, 4, 7, 9, 12]


def test_a_pure_phase_is_its_own() -> None:
    phase = Phase(objective="clm", steps=3)
    assert phase_of_step([phase], 2, 0)[1] is phase


FALLING = Phase(objective="mlm", steps=40, mask_probability={"from": 0.5, "to": 0.1})


def test_a_masking_ratio_falls_in_equal_steps() -> None:
    curriculum = [Phase(objective="clm", steps=7), FALLING]
    ratios = [phase_of_step(curriculum, step, 3)[1].mask_probability for step in range(7, 47)]
    assert ratios == pytest.approx([0.495 - 0.01 * step for step in range(40)], abs=1e-12)
    assert sum(ratios) / 40 == pytest.approx(FALLING.mask_at(0.5), abs=1e-12)
    assert FALLING.label == "mlm50-10"


@pytest.mark.parametrize("cuts", [(0, 40), (0, 1, 40), (0, 13, 14, 33, 40)])
def test_a_part_of_a_phase_has_the_ratios_of_the_whole(cuts: tuple[int, ...]) -> None:
    pieces = [phase for _, _, phase in cut_phases((FALLING,), cuts)]
    assert [piece.steps for piece in pieces] == [end - begin for begin, end in pairwise(cuts)]
    found = [phase_of_step(pieces, step, 0)[1].mask_probability for step in range(40)]
    assert found == pytest.approx(
        [phase_of_step([FALLING], step, 0)[1].mask_probability for step in range(40)], abs=1e-14
    )


@pytest.mark.parametrize(("start", "to", "steps"), [(512, 4096, 100), (4096, 512, 7), (1000, 1001, 3), (8, 9_999, 1)])
def test_a_batch_grows_in_equal_steps_and_loses_no_token(start: int, to: int, steps: int) -> None:
    """Against the sum of the exact sizes; every batch is within a token of its own."""
    ramp = BatchRamp(start=start, to=to, steps=steps)
    exact = [Fraction(start) + Fraction(to - start, steps) * (Fraction(step) + Fraction(1, 2)) for step in range(steps)]
    exact += [Fraction(to)] * 20
    for step in range(steps + 20):
        assert ramp.tokens_before(step) == floor(sum(exact[:step]))
        assert abs(ramp.tokens_before(step + 1) - ramp.tokens_before(step) - exact[step]) < 1
