"""The referee of a loop: its levels against integrals and its tests against SciPy, the order of rows as its only state,
nights whose truth is known, and what is refused."""

import csv
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import integrate, stats

import biphase
from biphase.cli.app import main, run_command
from biphase.errors import InputError
from biphase.report.referee import EXIT_CODES, FUTILE, SeedScore, idea_level, list_looks, look_levels
from biphase.report.statistics import SIGNIFICANCE

sys.path.append(str(Path(__file__).parents[2] / "scripts"))
from simulate_nights import World, live_through, summarize_nights

Rows = list[dict[str, Any]]


def rows_of(method: str, *scores: float, **columns: Any) -> Rows:
    return [{"method": method, "seed": seed, "score": score, **columns} for seed, score in enumerate(scores)]


BASELINE = rows_of("main", 1.0, 1.2, 0.8, 1.1, 0.9)
"""Mean 1, sum of squares 0.1."""


def write_rows(path: Path, rows: Rows) -> str:
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, rows[0])
        table.writeheader()
        table.writerows(rows)
    return str(path)


# Levels


def test_levels_of_all_ideas_add_up() -> None:
    """Levels based on recent discovery: 5 % times weights that add up to 1 - 1/√(T + 1), by hand for the first."""
    assert idea_level(1) == pytest.approx(0.05 * (1 - math.sqrt(0.5))) and idea_level(3) == pytest.approx(
        0.05 * 0.0773503
    )
    levels = [idea_level(idea) for idea in range(1, 10_000)]
    assert sum(levels) == pytest.approx(SIGNIFICANCE * 0.99) and levels == sorted(levels, reverse=True)


@pytest.mark.slow
@pytest.mark.minutes
@pytest.mark.parametrize("idea", [1, 10, 100])
def test_levels_of_looks_add_up_by_quadrature(idea: int) -> None:
    """The probability that a sum of normal numbers first crosses its bound at the second or third look: SciPy's
    integrals give what the spending function allows, a share of (n / 3)²."""
    error = idea_level(idea)
    one, two, three = stats.norm.isf(look_levels(3, idea)) * np.sqrt([1, 2, 3])
    pdf, sf = stats.norm.pdf, stats.norm.sf

    def crossed_at_third(second: float, first: float) -> float:
        return float(pdf(first) * pdf(second - first) * sf(three - second))

    at_second = integrate.quad(lambda first: pdf(first) * sf(two - first), -one, one)[0]
    at_third = integrate.dblquad(crossed_at_third, -one, one, -two, two, epsabs=1e-9)[0]
    assert sf(one) == pytest.approx(error / 9, rel=2e-3)
    assert sf(one) + at_second == pytest.approx(error * 4 / 9, rel=2e-3)
    assert sf(one) + at_second + at_third == pytest.approx(error, rel=2e-3)


def test_looks_at_a_baseline_with_few_seeds_err_less() -> None:
    """Three seeds of the baseline, a look after each of eight seeds: 200,000 draws of the first idea."""
    rng = np.random.default_rng(0)
    base_T, seeds_TN = rng.normal(size=(200_000, 3)).mean(1), rng.normal(size=(200_000, 8))
    crossed_T = np.zeros(len(base_T), bool)
    for num in range(1, 9):
        z_T = (seeds_TN[:, :num].mean(1) - base_T) / math.sqrt(1 / num + 1 / 3)
        crossed_T |= stats.norm.sf(z_T) <= look_levels(8, 1)[num - 1]
    assert 0.6 * idea_level(1) < crossed_T.mean() < idea_level(1)


# Tests


def test_a_learned_spread_is_students_test_and_a_given_one_is_the_z_test() -> None:
    candidate = rows_of("wider", 1.3, 1.5, 1.25)
    base, new = ([row["score"] for row in rows] for rows in (BASELINE, candidate))
    ruling = biphase.judge(BASELINE + candidate, baseline="main", candidate="wider")
    student = stats.ttest_ind(new, base, alternative="greater")
    assert (ruling.p_value, ruling.degrees) == pytest.approx((student.pvalue, student.df))
    assert ruling.gain == pytest.approx(0.35) and ruling.gain / ruling.standard_error == pytest.approx(
        student.statistic
    )
    given = biphase.judge(BASELINE + candidate, baseline="main", candidate="wider", spread=0.3)
    assert given.p_value == pytest.approx(stats.norm.sf(0.35 / (0.3 * math.sqrt(1 / 3 + 1 / 5))))
    assert given.spread == 0.3 and math.isinf(given.degrees)


def test_the_spread_is_that_of_all_methods_above() -> None:
    """Sums of squares 0.1 and 0.02 with 4 and 1 degrees of freedom, the candidate's single seed, and nothing below."""
    rows = [*BASELINE, *rows_of("dropped", 0.8, 1.0), *rows_of("wider", 1.4), *rows_of("later", 5.0, 9.0)]
    ruling = biphase.judge(rows, baseline="main", candidate="wider")
    assert (ruling.spread, ruling.degrees, ruling.idea) == (pytest.approx(math.sqrt(0.12 / 5)), 5, 2)


def test_each_budget_of_another_method_has_a_mean_of_its_own() -> None:
    """Two budgets of a ladder with sums of squares 0.02 each: they lend a degree of freedom each, and none is averaged
    away between them."""
    ladder = [*rows_of("ladder", 0.2, 0.4, tokens=1e6), *rows_of("ladder", 0.8, 0.6, tokens=4e6)]
    rows = [*ladder, *({**row, "tokens": 1e6} for row in BASELINE + rows_of("wider", 1.4))]
    ruling = biphase.judge(rows, baseline="main", candidate="wider")
    assert (ruling.spread, ruling.degrees) == (pytest.approx(math.sqrt(0.14 / 6)), 6)


def test_the_chance_is_the_predictive_probability() -> None:
    """A flat prior for the candidate's mean, two seeds of eight: draws of the mean over all eight."""
    seeds = [SeedScore(row["method"], row["score"]) for row in BASELINE + rows_of("wider", 1.3, 1.7)]
    *_, ruling = list_looks(seeds, "main", "wider", 4, 8, 0.3)
    rng = np.random.default_rng(1)
    mean_T = rng.normal(1.5, 0.3 / math.sqrt(2), 400_000)
    final_T = (2 * 1.5 + 6 * rng.normal(mean_T, 0.3 / math.sqrt(6))) / 8
    passes_T = stats.norm.sf((final_T - 1.0) / (0.3 * math.sqrt(1 / 8 + 1 / 5))) <= look_levels(8, 4)[-1]
    assert ruling.verdict == "one more seed" and ruling.chance == pytest.approx(passes_T.mean(), abs=0.004)


def test_verdicts_and_what_decides_them() -> None:
    verdicts = {}
    for score in (0.9, 1.5, 3.0):
        ruling = biphase.judge(BASELINE + rows_of("new", score), baseline="main", candidate="new", spread=0.3)
        verdicts[ruling.verdict] = ruling
        assert (ruling.p_value <= ruling.level) == (ruling.verdict == "keep") == (ruling.chance == 1)
        assert (ruling.chance < FUTILE) == (ruling.verdict == "drop")
    assert {*verdicts} == {*EXIT_CODES}
    last = biphase.judge(BASELINE + rows_of("new", 1.5), baseline="main", candidate="new", spread=0.3, up_to=1)
    assert (last.verdict, last.chance) == ("drop", 0), "no seed is left"
    open_, seeds = verdicts["one more seed"], "(standard error 0.33, 1 seed against 5)"
    test = "p = 0.064, and idea 1 needs at most 0.00023"
    more = f"more seeds would keep it with a chance of {open_.chance:.0%}"
    assert str(open_) == f"one more seed: the gain of new over main is +0.50 {seeds}; {test}; {more}"
    assert str(verdicts["drop"]).endswith("p = 0.62, and idea 1 needs at most 0.00023")


def test_a_p_value_beside_its_level_shows_its_side() -> None:
    ruling = biphase.judge(BASELINE + rows_of("new", 0.9), baseline="main", candidate="new")
    for p_value, told in ((0.01461, "p = 0.01461, and"), (0.01464, "p = 0.01464, and"), (0.014645, "p = 0.015, and")):
        assert told in str(replace(ruling, p_value=p_value, level=0.014645))


# The table is the state


def test_rows_below_change_nothing() -> None:
    """At each row of a night, a candidate that was kept stays kept, and every other ruling stays what it was."""
    rng = np.random.default_rng(2)
    rows = [*BASELINE, *rows_of("a", 1.1, 1.15), *rows_of("b", 1.9, 1.8), *rows_of("c", *rng.normal(1, 0.15, 4))]
    then = {name: biphase.judge(rows, baseline="main", candidate=name) for name in "abc"}
    assert then["b"].verdict == "keep"
    later = [*rows, {"method": "main", "seed": 9, "score": 7.0}, *rows_of("d", 1.0, 3.0)]
    assert {name: biphase.judge(later, baseline="main", candidate=name) for name in "abc"} == then
    worse = rows + [{"method": "b", "seed": seed, "score": 0.1} for seed in (7, 8)]
    assert biphase.judge(worse, baseline="main", candidate="b") == then["b"]
    assert then["b"].num_seeds < 3, "it was kept before its last seed"


def test_a_kept_candidate_begins_a_new_count() -> None:
    rows = [*BASELINE, *rows_of("a", 0.9), *rows_of("b", 1.9, 1.8), *rows_of("c", 1.9)]
    ideas = {
        (base, name): biphase.judge(rows, baseline=base, candidate=name).idea
        for base, name in (("main", "a"), ("main", "b"), ("main", "c"), ("b", "c"))
    }
    assert [*ideas.values()] == [1, 2, 3, 1]


def test_seeds_beyond_the_last_are_not_read() -> None:
    rows = BASELINE + rows_of("new", 1.3, 1.1, 9.0)
    ruling = biphase.judge(rows, baseline="main", candidate="new", up_to=2)
    assert (ruling.verdict, ruling.num_seeds, ruling.gain) == ("drop", 2, pytest.approx(0.2))


def test_losses_tasks_and_seeds_of_both_kinds() -> None:
    """Losses are turned round; a seed counts once, with its mean over tasks, also where it was fine-tuned twice."""
    candidate = rows_of("new", 1.4, 1.6)
    plain = biphase.judge(BASELINE + candidate, baseline="main", candidate="new")
    losses = [{"run": row["method"], "seed": row["seed"], "score": 3 - row["score"]} for row in BASELINE + candidate]
    turned = biphase.judge(losses, baseline="main", candidate="new", lower_is_better=True, rename={"run": "method"})
    assert vars(turned) == pytest.approx(vars(plain))
    on_tasks = [
        {
            "method": row["method"],
            "task": task,
            "pretraining_seed": row["seed"],
            "seed": seed,
            "score": row["score"] + add,
        }
        for row in BASELINE + candidate
        for task, seed, add in (("a", 0, 0.3), ("a", 1, 0.5), ("b", 0, -0.4))
    ]
    assert vars(biphase.judge(on_tasks, baseline="main", candidate="new")) == pytest.approx(vars(plain))


# Nights


@pytest.mark.slow
@pytest.mark.minutes
def test_a_night_of_ideas_that_are_no_better() -> None:
    """Fewer than 6 % of nights of 100 ideas keep any, with a known and with a learned spread; without levels that fall,
    most nights would."""
    for world in (World(), World(is_known=False)):
        found = summarize_nights(world, [live_through(world, seed) for seed in range(50)])
        assert found["nights_with_a_false_keep"] <= 0.06


@pytest.mark.minutes
def test_a_night_with_some_better_ideas() -> None:
    """One idea in ten gains two or three standard deviations: nearly all kept ones are better, and most better ones of
    three are kept."""
    for world, power in ((World(0.1, 2.0, False, 16), 0.7), (World(0.1, 3.0, False), 0.9)):
        found = summarize_nights(world, [live_through(world, seed) for seed in range(40)])
        assert found["power"] > power and 0 < found["false_discovery_rate"] < 0.06
        assert found["seeds_of_another_idea"] < 2.5


# Refusals, and the command line


@pytest.mark.parametrize(
    ("rows", "asked", "message"),
    [
        (BASELINE, {}, "there is nothing to compare"),
        (BASELINE + rows_of("wide", 1.0), {}, "candidate 'new'; known: main, wide"),
        (BASELINE + rows_of("new", 1.0), {"baseline": "mian"}, "baseline 'mian'; did you mean 'main'"),
        (
            rows_of("new", 1.0) + BASELINE,
            {},
            "new does not begin below the baseline main in the table: add each run at",
        ),
        (BASELINE + rows_of("wide", 1.0), {"candidate": "main"}, "main does not begin below the baseline main"),
        (
            rows_of("main", 1.0) + rows_of("new", 2.0),
            {},
            "their spread is unknown: add seeds of main above new, or give",
        ),
        (rows_of("main", 1.0, 1.0) + rows_of("new", 2.0, 2.0), {}, "no method has two seeds with different scores"),
        (BASELINE + rows_of("new", 1.0), {"spread": 0.0}, "`spread` is 0: give a standard deviation above 0"),
        (BASELINE + rows_of("new", 1.0), {"spread": math.nan}, "`spread` is nan"),
        (BASELINE + rows_of("new", 1.0), {"up_to": 0}, "`up_to` is 0: give a number of seeds from 1 to 30"),
        (BASELINE + rows_of("new", 1.0), {"up_to": 31}, "`up_to` is 31"),
        (BASELINE + rows_of("new", math.nan), {}, "'score' is NaN, not a number: fix the row or remove it"),
        (
            [*BASELINE, {"method": "new", "score": 1.0}, {"method": "new", "score": 1.1}],
            {},
            "a second score of new on score, without a `seed` (first: row 5); give each a `seed`, or drop one",
        ),
        (
            [*rows_of("main", 1.0, 1.1, task="a"), *rows_of("new", 1.0, task="a"), *rows_of("new", 1.0, task="b")],
            {},
            "main has no score on b with seed 0: add it, or drop these rows",
        ),
        (
            [*rows_of("main", 1.0, tokens=1e6), *rows_of("main", 1.0, tokens=4e6), *rows_of("new", 1.0, tokens=1e6)],
            {},
            "main has scores at several budgets: keep the rows of one",
        ),
    ],
)
def test_refusals(rows: Rows, asked: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        biphase.judge(rows, **{"baseline": "main", "candidate": "new"} | asked)
    assert message in str(caught.value)


def test_the_command_ends_with_the_code_of_its_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for verdict, score in (("keep", 3.0), ("drop", 0.9), ("one more seed", 1.5)):
        rows = BASELINE + rows_of("new", score)
        table = write_rows(tmp_path / "runs.csv", [{"run": row.pop("method"), **row} for row in map(dict, rows)])
        words = [
            "judge",
            table,
            "--baseline",
            "main",
            "--candidate",
            "new",
            "--rename",
            "run=method",
            "--spread",
            "0.3",
        ]
        for form in ("text", "json"):
            monkeypatch.setattr(sys, "argv", ["biphase", *words, "--format", form])
            with pytest.raises(SystemExit) as caught:
                main()
            assert (caught.value.code or 0) == EXIT_CODES[verdict]  # type: ignore[index]
            (line,) = capsys.readouterr().out.splitlines()
            assert line.startswith(f"{verdict}: ") if form == "text" else json.loads(line)["verdict"] == verdict
        ruling = biphase.judge(table, baseline="main", candidate="new", rename={"run": "method"}, spread=0.3)
        assert json.loads(line) == vars(ruling) | {"degrees": None}
    assert [*EXIT_CODES.values()] == [0, 3, 4], "1 is a bug and 2 a mistake"
    with pytest.raises(InputError, match=r"candidate 'old'; known: main, new"):
        run_command([*words[:5], "old", *words[6:]])
    monkeypatch.setattr(sys, "argv", ["biphase", *words[:5], "old", *words[6:]])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2 and "biphase: candidate 'old'; known: main, new" in capsys.readouterr().err
