"""Curricula as study files write them → phases: short forms, shares that round, names, numbers of steps."""

import pytest

from biphase.curriculum import MaskRamp
from biphase.report.formats import write_steps
from biphase.studies.spec import NamedCurriculum, fill_budget, read_curriculum


def phases_of(text: str, budget: int | None, *named: NamedCurriculum) -> list[tuple[str, int, float | MaskRamp]]:
    templates = read_curriculum(text, {one.name: one for one in named}, 0.4)
    return [(p.objective, p.steps, p.mask_probability) for p in fill_budget(templates, budget, text)]


@pytest.mark.parametrize(
    ("text", "budget", "expected"),
    [
        ("clm", 12_000, [("clm", 12_000, 0.4)]),
        ("mlm", 12_000, [("mlm", 12_000, 0.4)]),
        ("mlm20", 7, [("mlm", 7, 0.2)]),
        ("mntp12.5", 7, [("mntp", 7, 0.125)]),
        ("25/75", 22_000, [("clm", 5_500, 0.4), ("mlm", 16_500, 0.4)]),
        ("33.3/66.7", 10, [("clm", 3, 0.4), ("mlm", 7, 0.4)]),
        ("5k+17k", None, [("clm", 5_000, 0.4), ("mlm", 17_000, 0.4)]),
        ("2.5k+500", 3_000, [("clm", 2_500, 0.4), ("mlm", 500, 0.4)]),
        ("40k clm + 2k mlm30", None, [("clm", 40_000, 0.4), ("mlm", 2_000, 0.3)]),
        ("40% mlm + 20% clm + 40% mlm50", 10, [("mlm", 4, 0.4), ("clm", 2, 0.4), ("mlm", 4, 0.5)]),
        ("clm/mlm", 10, [("clm", 5, 0.4), ("mlm", 5, 0.4)]),
        ("meap15/mlm", 10, [("meap", 5, 0.15), ("mlm", 5, 0.4)]),
        ("mntp/mlm40-15", 10, [("mntp", 5, 0.4), ("mlm", 5, MaskRamp(start=0.4, to=0.15))]),
        ("causal-mlm/mlm30", 11, [("causal-mlm", 6, 0.4), ("mlm", 5, 0.3)]),
        ("causal-mlm20", 7, [("causal-mlm", 7, 0.2)]),
        ("50% mlm + 50% mlm40", 10, [("mlm", 10, 0.4)]),
        ("25% clm + 75% mlm40-15", 8, [("clm", 2, 0.4), ("mlm", 6, MaskRamp(start=0.4, to=0.15))]),
        (
            "50% mlm40-15 + 50% mlm40-15",
            8,
            [("mlm", 4, MaskRamp(start=0.4, to=0.15)), ("mlm", 4, MaskRamp(start=0.4, to=0.15))],
        ),
    ],
)
def test_short_forms(text: str, budget: int | None, expected: list[tuple[str, int, float]]) -> None:
    assert phases_of(text, budget) == expected


def test_shares_round_to_the_budget() -> None:
    assert [steps for _, steps, _ in phases_of("33% clm + 33% mlm + 34% clm", 100)] == [33, 33, 34]
    for budget in range(4, 60):
        assert sum(steps for _, steps, _ in phases_of("35% clm + 30% mlm + 35% clm", budget)) == budget


def test_named_curricula_are_phase_lists_that_may_repeat() -> None:
    phases = ({"objective": "clm", "share": 0.5}, {"objective": "mlm", "share": 0.5, "mask_token_share": 0.8})
    alternation = NamedCurriculum(name="in turns", phases=phases, repeat=3)
    assert [(name, steps) for name, steps, _ in phases_of("in turns", 60, alternation)] == [
        ("clm", 10),
        ("mlm", 10),
    ] * 3
    masked = fill_budget(read_curriculum("in turns", {"in turns": alternation}, 0.25), 60, "")[1]
    assert masked.mask_token_share == 0.8 and masked.mask_probability == 0.25
    by_keys = NamedCurriculum(
        name="by keys",
        phases=(
            {"attention": "causal", "target": "next", "share": 0.25},
            {"attention": "causal", "target": "next", "mask_probability": 0.15, "share": 0.25},
            {"target": "next", "mask_probability": 0.3, "share": 0.5},
        ),
    )
    assert phases_of("by keys", 4, by_keys) == [("clm", 1, 0.4), ("meap", 1, 0.15), ("mntp", 2, 0.3)]
    falling = NamedCurriculum(
        name="falling",
        phases=(
            {"objective": "mlm", "steps": "1k", "mask_probability": 0.4},
            {"objective": "mlm", "steps": 500, "mask_probability": 0.2},
        ),
    )
    assert phases_of("falling", None, falling) == [("mlm", 1000, 0.4), ("mlm", 500, 0.2)]


def test_steps_are_written_as_people_write_them() -> None:
    assert [write_steps(steps) for steps in (0, 400, 1000, 1200, 42_000)] == ["0", "400", "1k", "1200", "42k"]
