"""The tidy form: averages, spreads, and what is missing."""

import math
from dataclasses import replace

import pytest

from biphase.report.page import describe_results
from biphase.report.results import AVERAGE, ReportArm, Result, measured, missing_cells, pool, with_averages

CLM = ReportArm("clm", "objective", "1m", "clm", None, 100, 100, 0)
MLM = ReportArm("mlm", "objective", "1m", "mlm", 40, 100, 0, 100)


def test_published_spread() -> None:
    """±0.18 over five seeds is 1.96 · s / √5, so s = 0.2054 points; a printed 0.00 counts as 0.005."""
    result = Result(CLM, "SC", "SST-2", "paper", 0.87, 0.0018, (), None, 5)
    assert 100 * result.std == pytest.approx(0.18 * math.sqrt(5) / 1.96)
    assert 100 * replace(result, half_width=0.0).std == pytest.approx(0.005 * math.sqrt(5) / 1.96)


def test_averages_go_seed_by_seed() -> None:
    """(0.5, 0.7) and (0.8, 0.6) average to 0.65 with both seeds: no spread at all, although each dataset has one."""
    cells = [measured(CLM, "SC", "a", "standard", (0.5, 0.7)), measured(CLM, "SC", "b", "standard", (0.8, 0.6))]
    average = with_averages(cells).find(CLM, "SC", AVERAGE, "standard")
    assert average is not None
    assert average.samples == pytest.approx((0.65, 0.65))
    assert average.half_width == pytest.approx(0)


def test_pretrainings_are_pooled() -> None:
    """Two pretraining seeds with two and three fine-tuning seeds: the interval is over the two means, 0.6 and 0.7."""
    parts = [
        measured(CLM, "SC", "a", "standard", scores, {1e-5: scores}, range(len(scores)), [seed] * len(scores))
        for seed, scores in ((7, (0.5, 0.7)), (8, (0.6, 0.7, 0.8)))
    ]
    pooled = pool(parts)
    assert pooled.samples == (0.5, 0.7, 0.6, 0.7, 0.8) and pooled.num == 5 and pooled.num_pretrainings == 2
    assert (pooled.seeds, pooled.pretraining_seeds) == ((0, 1, 0, 1, 2), (7, 7, 8, 8, 8))
    assert pooled.by_rate == {1e-5: pooled.samples}
    assert pooled.mean == pytest.approx(0.65)
    assert pooled.half_width == pytest.approx(12.7062 * 0.05, rel=1e-4)  # s/√2 of 0.6 and 0.7, one degree of freedom
    assert pool(parts[:1]) is parts[0]
    told = describe_results(with_averages([pooled, measured(MLM, "SC", "a", "standard", (0.5, 0.7))]))
    assert told[2:4] == ["2 pretraining seeds", "2 fine-tuning seeds"]


def test_averages_of_unequal_seeds_are_independent() -> None:
    cells = [measured(CLM, "SC", "a", "standard", (0.5, 0.7)), measured(CLM, "SC", "b", "standard", (0.8, 0.6, 0.7))]
    average = with_averages(cells).find(CLM, "SC", AVERAGE, "standard")
    assert average is not None
    assert (average.mean, average.samples, average.num) == (pytest.approx(0.65), (), 2)
    error = math.sqrt(0.02 / 2 + 0.01 / 3) / 2
    assert average.half_width == pytest.approx(1.96 * error)


def test_no_average_of_a_part() -> None:
    cells = [measured(CLM, "SC", name, "standard", (0.5, 0.7)) for name in "ab"]
    cells.append(measured(MLM, "SC", "a", "standard", (0.5, 0.7)))
    results = with_averages(cells)
    assert results.find(MLM, "SC", AVERAGE, "standard") is None
    assert missing_cells(results) == ["objective and masking ratio · mlm · SC: b (standard metric)"]
    assert with_averages(results.results) == results


def test_a_cell_stands_once() -> None:
    cell = measured(CLM, "SC", "a", "standard", (0.5, 0.7))
    with pytest.raises(AssertionError, match="twice"):
        with_averages((cell, cell))
