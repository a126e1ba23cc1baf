"""Budget → recipe: it loads, it costs what was given, each choice has a source, evidence decides where it is clear."""

import csv
import itertools
import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from rich.console import Console
from scipy import stats

import biphase
from biphase.config import load_config
from biphase.encoder.presets import PRESETS
from biphase.errors import InputError
from biphase.recipe import Recipe
from biphase.report.contrasts import Terms
from biphase.report.results import ReportArm, measured
from biphase.study.advise import (
    Evidence,
    advise,
    choose_curriculum,
    choose_steps,
    describe_advice,
    list_caveats,
    recipe_yaml,
)
from biphase.study.devices import find_machine
from biphase.study.results import weigh_evidence
from biphase.study.rules import MOST_EPOCHS, Choice, TextAmount, apply_rule, measure_text, predict_loss, read_rules

H100 = find_machine("H100", efficiency=0.4)

BUDGETS: list[dict[str, Any]] = [
    {"hours": 0.2, "machine": find_machine("CPU", 2), "text": TextAmount(text_bytes=2e8)},
    {"hours": 1, "machine": H100, "text": TextAmount(text_bytes=2e8)},
    {"flops": 1e20, "text": TextAmount(tokens=1e10, vocab_size=50_000)},
    {"flops": 1e21},
    {"hours": 24, "machine": find_machine("MI250X", 192)},
]


@pytest.mark.parametrize("budget", BUDGETS)
def test_a_recipe_loads_and_stays_within_its_budget(budget: dict[str, Any], tmp_path: Path) -> None:
    advice = advise(**budget)
    (tmp_path / "recipe.yaml").write_text(recipe_yaml(advice))
    assert load_config(Recipe, tmp_path / "recipe.yaml") == advice.recipe
    assert all(f"# note: {caveat}" in recipe_yaml(advice) for caveat in advice.caveats)
    limit = budget.get("flops") or budget["hours"] * 3600 * (
        budget["machine"].devices * budget["machine"].peak_flops * budget["machine"].efficiency
    )
    assert advice.flops <= 1.02 * limit
    assert advice.flops >= 0.98 * limit or advice.chosen.epochs == MOST_EPOCHS
    trained = advice.recipe.num_steps * advice.recipe.batch_tokens
    assert trained == pytest.approx(advice.chosen.tokens, rel=0.01)
    assert [phase.objective for phase in advice.recipe.curriculum] == ["clm", "mlm"]
    assert advice.recipe.curriculum[0].steps == round(advice.recipe.num_steps / 4)
    assert all(choice.reason and choice.source for choice in advice.choices)


def test_more_budget_buys_a_larger_network() -> None:
    sizes = list(reversed(PRESETS))
    chosen = [sizes.index(advise(flops=flops).chosen.preset) for flops in (1e14, 1e16, 1e18, 1e20, 1e22)]
    assert chosen == sorted(chosen) and chosen[0] == 0 and chosen[-1] == len(sizes) - 1


def test_little_text_limits_what_is_spent() -> None:
    advice = advise(TextAmount(tokens=1e6), flops=1e18)
    assert advice.chosen.epochs == MOST_EPOCHS and advice.flops < 1e17
    assert advice.chosen.preset in ("1m", "3m", "11m"), "parameters that this text cannot fill"
    assert any("more text helps" in caveat for caveat in advice.caveats)
    assert "the text, not the budget" in next(c.reason for c in advice.choices if c.what == "tokens")


CAVEATS: list[tuple[dict[str, Any], dict[str, Any], list[str]]] = [
    ({}, {}, []),
    ({"tokens": 2e10}, {}, ["an extrapolation"]),
    ({"tokens": 2e10}, {"has_evidence": True}, []),
    ({"preset": "11m"}, {}, ["an extrapolation", "read its losses as a ranking"]),
    ({"parameters": 4e9}, {}, ["read its losses as a ranking"]),
    ({}, {"text": TextAmount(text_bytes=1e12)}, ["guessed from bytes"]),
    ({}, {"text": TextAmount(tokens=1e12)}, []),
    ({}, {"spent": 7e13}, ["uses 70% of the budget"]),
    ({"tokens": 3e12}, {"budget": 1e16, "spent": 1e16}, []),
    ({}, {"budget": 1e16, "spent": 1e16}, ["ModernBERT"]),
]


@pytest.mark.parametrize(("candidate", "settings", "expected"), CAVEATS)
def test_what_to_keep_in_mind(candidate: dict[str, Any], settings: dict[str, Any], expected: list[str]) -> None:
    """Of a network of 200M and 5e10 tokens, within a budget too small to continue a public encoder; decoders are always
    named."""
    chosen = replace(advise(flops=1e21).chosen, **{"preset": "210m", "parameters": 2e8, "tokens": 5e10} | candidate)
    given = {"budget": 1e14, "spent": 1e14, "text": None, "has_evidence": False} | settings
    *told, _ = sorted(list_caveats(chosen, **given), key=lambda caveat: caveat.startswith("a good decoder"))
    assert len(told) == len(expected) and all(words in caveat for words, caveat in zip(expected, told, strict=True))


def test_where_the_law_says_nothing_the_smallest_is_taken() -> None:
    """Of 1m with 4,096 words and 1b with 128,256, none is better for knowing fewer words."""
    advice = advise(TextAmount(tokens=1e5, vocab_size=4096), flops=1e19)
    assert advice.chosen.preset == list(PRESETS)[-1] and advice.chosen.is_guess
    assert "the law expects nothing" in next(c.reason for c in advice.choices if c.what == "size")


def test_the_law_is_chinchillas_without_repeats() -> None:
    """With unique text, 20 tokens for a parameter are best at a fixed budget (up to what 6ND leaves out)."""
    budget = 6e18
    sizes = [10 ** (7 + i / 50) for i in range(150)]
    best = min(sizes, key=lambda size: predict_loss(size, budget / 6 / size, math.inf))
    assert 15 < budget / 6 / best**2 < 25
    # Repeats are worth less than new tokens, four times nearly as much, and never harm.
    new, four, forty = (predict_loss(1e8, 4e9, unique) for unique in (4e9, 1e9, 1e8))
    assert new < four < forty and four - new < 0.05
    assert predict_loss(1e8, 4e10, 1e8) <= forty


def test_batches_go_through_the_two_settings_that_worked() -> None:
    assert choose_steps(1.2e6, 256) == (586, 2048)
    assert choose_steps(99.1e9, 2048) == (42_004, 2_359_296)
    steps, batch = choose_steps(3e9, 2048)
    assert batch & (batch - 1) == 0 and 2048 < batch < 2_359_296 and steps * batch == pytest.approx(3e9, rel=1e-3)


def test_the_users_own_study_decides_where_it_is_clear() -> None:
    clear = [Evidence("25/75", 60.0, 0.5, True), Evidence("50/50", 63.0, 0.5), Evidence("mlm", 59.0, 0.5, True)]
    assert choose_curriculum(clear).value == "50/50"
    unclear = [Evidence("25/75", 60.0, 1.5), Evidence("mlm", 61.0, 1.5)]
    choice = choose_curriculum(unclear)
    assert choice.value == "25/75" and "no clear difference" in choice.reason and "your study" in choice.source
    without = [Evidence("clm", 61.0, 1.5), Evidence("50/50", 60.0, 1.5), Evidence("75/25", 59.5, 1.5)]
    assert choose_curriculum(without).value == "50/50", "its best split, where the default is not in it"
    behind = [replace(item, is_behind=True) for item in without[1:]]
    choice = choose_curriculum(
        [Evidence("70/30", 61.0, 1.5), Evidence("clm", 60.0, 1.5), Evidence("mlm", 50.0, 1, True)]
    )
    assert choice.reason == "best of 3 in your study (61.0 ± 1.5), 1 of the others within noise of it"
    choice = choose_curriculum([Evidence("clm", 70.0, math.nan), *behind])
    assert choice.value == "clm" and "(70.0)" in choice.reason, "a single seed has no interval"
    for best, shares in (("mlm", [1.0]), ("1k+3k", [0.25, 0.75])):
        recipe = advise(flops=1e16, evidence=[Evidence(best, 60.0, 0.5)]).recipe
        assert [phase.steps / recipe.num_steps for phase in recipe.curriculum] == pytest.approx(shares, abs=1e-3)


def test_evidence_is_over_pretraining_seeds() -> None:
    """The second curriculum is 4 points behind with each fine-tuning seed: clear, unless its pretraining seeds differ
    by 8. The third is as good as the first."""
    arm = ReportArm("any", "other", "1m", "mlm", 40, 100, 0, 100)

    def found(by_pretraining: tuple[float, ...]) -> tuple[bool, ...]:
        def score(offsets: Sequence[float]) -> Terms:
            pairs = [(mean + one, seed) for seed, mean in enumerate(offsets) for one in (-0.001, 0.001)]
            values, seeds = zip(*pairs, strict=True)
            return [(1.0, measured(arm, "SC", "a", "standard", values, None, [0, 1] * 3, seeds))]

        level = (0.701, 0.7, 0.699)
        evidence = weigh_evidence({"mlm": score(level), "25/75": score(by_pretraining), "clm": score(level[::-1])})
        half_width = 100 * stats.t.ppf(0.975, 2) * np.std(by_pretraining, ddof=1) / 3**0.5
        assert evidence[1].half_width == pytest.approx(half_width)
        return tuple(item.is_behind for item in evidence)

    assert found((0.661, 0.66, 0.659)) == (False, True, False)
    assert found((0.70, 0.66, 0.62)) == (False, False, False)


def test_smaller_budgets_are_counted_by_the_order_they_foretold() -> None:
    """At the largest budget a > b > c. One smaller budget has b > a > c, the other lacks b and has a > c."""
    arm = ReportArm("any", "other", "1m", "mlm", 40, 100, 0, 100)

    def rung(**means: float) -> dict[str, Terms]:
        return {name: [(1.0, measured(arm, "SC", "a", "standard", (mean,), None, [0]))] for name, mean in means.items()}

    evidence = weigh_evidence(rung(a=0.7, b=0.6, c=0.5), [rung(a=0.6, b=0.61, c=0.5), rung(a=0.4, c=0.3)])
    assert [item.foretold for item in evidence] == [(2, 3), (1, 2), (3, 3)]
    best = replace(evidence[0], curriculum="25/75")
    assert "foretold the better of two in 2 of 3 pairs" in choose_curriculum([best]).reason


def test_what_is_said_of_the_paper_is_in_its_scores() -> None:
    reference = Path(__file__).parents[2] / "src" / "biphase" / "paper" / "reference" / "paper_scores.csv"
    means = mean_by_curriculum(reference)
    reason = choose_curriculum(()).reason
    for name, share in (("25/75", 0.25), ("50/50", 0.5), ("75/25", 0.75), ("MLM", 0.0), ("CLM", 1.0)):
        assert f"{means[share]:.1f} for {name}" in reason


def test_what_is_said_of_small_networks_is_in_our_scores() -> None:
    """Means over tasks, budgets and seeds, and pairs of recipes that stand at fewer steps as at 1,200."""
    results = Path(__file__).parents[2] / "studies" / "results" / "price"
    reason = apply_rule("curriculum", "small network", curriculum="25/75").reason
    scores: dict[tuple[str, int], list[float]] = {}
    with open(results / "scores.csv", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            recipe, _, steps = re.sub(r"-seed\d+$", "", row["model"]).removeprefix("1m-").rpartition("-")
            value = row["test accuracy"] if row["task"] == "genre" else row["test f1"]
            scores.setdefault((recipe, int(steps) if steps.isdigit() else 0), []).append(100 * float(value))
    means = {spot: sum(values) / len(values) for spot, values in scores.items()}
    for name, recipe in (("25/75", "25-75"), ("50/50", "50-50"), ("MLM", "mlm")):
        assert f"{sum(means[recipe, steps] for steps in (300, 600, 1200)) / 3:.1f} for {name}" in reason
    recipes = [recipe for recipe, steps in means if steps == 1200]
    is_right = [
        (means[one, steps] > means[other, steps]) == (means[one, 1200] > means[other, 1200])
        for one, other in itertools.combinations(recipes, 2)
        for steps in (300, 600)
    ]
    assert f"in {sum(is_right)} of {len(is_right)} pairs" in reason
    table = (results / "tables" / "compute-equivalents-1m.md").read_text(encoding="utf-8")
    [share] = re.findall(r"\| 1m-25-75-1200 \|[^|]*\|[^|]*\| ([^|\[]*?) \[", table)
    assert f"25/75 needs {share} of MLM's FLOPs" in reason


def mean_by_curriculum(path: Path) -> dict[float, float]:
    """Mean over families and budgets of the averages of the ratio experiment, by the nearest quarter of CLM."""
    scores: dict[float, list[float]] = {}
    with open(path, encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["setup"] == "ratio" and row["dataset"] == "Average":
                share = round(4 * int(row["clm_steps"]) / int(row["pretrain_steps"])) / 4
                scores.setdefault(share, []).append(float(row["mean"]))
    return {share: sum(values) / len(values) for share, values in scores.items()}


def test_every_row_of_the_table_is_reached_and_none_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    reached = set()

    def watched(what: str, case: str, **facts: Any) -> Choice:
        reached.add((what, case))
        return apply_rule(what, case, **facts)

    monkeypatch.setattr("biphase.study.advise.apply_rule", watched)
    split, alone = Evidence("25/75", 60.0, 1.5), Evidence("mlm", 61.0, 1.5)
    texts = (None, TextAmount(tokens=1e6), TextAmount(tokens=2e9), TextAmount(tokens=1e12, vocab_size=8192))
    for text in texts:
        for flops in (1e12, 1e16, 1e19, 1e22):
            for evidence in ((), (alone,), (split, alone)):
                advise(text, flops=flops, evidence=evidence)
    rules = read_rules()["rules"]
    assert reached == {(what, case) for what, cases in rules.items() for case in cases if case != "value"}


def test_text_is_measured_where_it_lies(corpus: Any, tmp_path: Path) -> None:
    measured = measure_text(corpus.shards)
    assert measured.vocab_size == 384 and measured.tokens and measured.tokens > 1000
    written = recipe_yaml(advise(measured, flops=1e15))
    assert yaml.safe_load(written)["data"]["shards"] == str(corpus.shards) and "prepare" not in written
    texts = ["One small document.", "Zwei Wörter."]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    assert measure_text(tmp_path).text_bytes == sum(len(text.encode()) for text in texts)
    with pytest.raises(InputError, match="does not exist"):
        measure_text(tmp_path / "b.jsonl")


def test_a_parquet_file_of_one_row_group_is_judged_by_the_rows_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["word " * (1 + row * 7919 % 400) for row in range(10_000)]
    pd.DataFrame({"text": texts}).to_parquet(tmp_path / "one.parquet")
    monkeypatch.setattr("biphase.study.rules.SAMPLED_BYTES", 100_000)
    assert measure_text(tmp_path).text_bytes == pytest.approx(sum(map(len, texts)), rel=0.05)


def test_long_sources_are_judged_by_their_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = json.dumps({"text": "word " * 200}) + "\n"
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.jsonl").write_text(line * 10_000)
    monkeypatch.setattr("biphase.study.rules.SAMPLED_SOURCES", 2)
    monkeypatch.setattr("biphase.study.rules.SAMPLED_BYTES", 5e6)
    assert measure_text(tmp_path).text_bytes == pytest.approx(3e7, rel=0.2)


def test_the_description_names_choices_sizes_and_caveats() -> None:
    console = Console(width=140, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(describe_advice(advise(TextAmount(text_bytes=2e8), hours=1, machine=H100)))
    text = console.export_text()
    for fact in ("curriculum", "F6", "← chosen", "on 1 × H100 at 40% of peak", "ModernBERT", "extrapolation"):
        assert fact in text, fact


def test_devices_are_for_hours() -> None:
    for name, value in (("device", "H100"), ("devices", 4), ("efficiency", 0.4)):
        with pytest.raises(InputError, match=f"`{name}` says what computes in `hours`, and none are given"):
            biphase.advise(flops=1e18, **{name: value})
    assert biphase.advise(hours=1).machine == find_machine("CPU")
    with pytest.raises(InputError, match="0 devices compute nothing"):
        biphase.advise(hours=1, devices=0)
    assert biphase.advise(flops=1e30).chosen.preset == "1b"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "give a budget"),
        ({"flops": 1e18, "hours": 1, "machine": H100}, "either in FLOPs or in hours"),
        ({"hours": 1}, "hours need a device"),
        ({"flops": 0.0}, "buys nothing"),
        ({"flops": math.nan}, "buys nothing"),
        ({"flops": 1e40}, "a budget of 1e.40 FLOPs is more than anybody has; 1e.30 are the most"),
        ({"hours": -8, "machine": H100}, "-8 hours are no budget"),
        ({"hours": math.inf, "machine": H100}, "inf hours are no budget"),
        ({"flops": 1e10}, "too few to learn from; 100,000 are the least"),
    ],
)
def test_bad_budgets_are_one_clear_line(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        advise(**arguments)
